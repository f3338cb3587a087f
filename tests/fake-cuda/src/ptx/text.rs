//! Statements and operands of a PTX text.

/// A statement of a kernel's body.
#[derive(Debug)]
pub(super) struct Statement<'a> {
    /// Line of the text, from 1.
    pub(super) line: usize,
    pub(super) text: &'a str,
}

/// A kernel's text, from `.entry` to the end of its body.
#[derive(Debug)]
pub(super) struct Entry<'a> {
    pub(super) name: &'a str,
    /// The parameters, between the parentheses.
    pub(super) parameters: &'a str,
    pub(super) body: Vec<Statement<'a>>,
}

/// The statements of a body, and the statements outside kernels.
pub(super) fn entries(text: &str) -> (Vec<Entry<'_>>, Vec<&str>) {
    let (mut kernels, mut outside) = (Vec::new(), Vec::new());
    let mut lines = text.lines().enumerate().map(|(at, line)| (at + 1, plain(line)));
    while let Some((_, line)) = lines.next() {
        let Some((_, name)) = line.split_once(".entry ") else {
            outside.push(line.trim_end_matches(';'));
            continue;
        };
        let name = name.split(['(', ' ']).next().unwrap_or_default();
        let start = offset(text, line);
        // The body starts with the first line that is a brace.
        let mut body = Vec::new();
        let mut depth = 0;
        for (number, line) in lines.by_ref() {
            let (opens, closes) = (line == "{", line == "}");
            depth += i32::from(opens);
            depth -= i32::from(closes);
            if closes && depth == 0 {
                break;
            }
            if depth > 0 && !opens && !closes {
                body.extend(split(number, line));
            }
        }
        let head = &text[start..];
        let open = head.find('(').map_or(0, |at| at + 1);
        let close = head.find(')').unwrap_or(open);
        let parameters = head.get(open..close).unwrap_or_default();
        kernels.push(Entry { name, parameters, body });
    }
    (kernels, outside)
}

/// Byte position of `line` in `text`.
fn offset(text: &str, line: &str) -> usize {
    line.as_ptr() as usize - text.as_ptr() as usize
}

/// A line without its comment and the space around it.
fn plain(line: &str) -> &str {
    line.split("//").next().unwrap_or_default().trim()
}

fn split(line: usize, text: &str) -> impl Iterator<Item = Statement<'_>> {
    // A label ends in a colon, and NVRTC writes it on a line of its own.
    text.split(';')
        .map(|part| part.trim().trim_start_matches(['{', ' ', '\t']).trim())
        .filter(|part| !part.is_empty() && *part != "}")
        .map(move |text| Statement { line, text })
}

/// The operands between commas; vectors in braces stay whole.
pub(super) fn operands(text: &str) -> Vec<&str> {
    let (mut found, mut depth, mut start) = (Vec::new(), 0, 0);
    for (at, c) in text.char_indices() {
        match c {
            '{' | '[' => depth += 1,
            '}' | ']' => depth -= 1,
            ',' if depth == 0 => {
                found.push(text[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    found.push(text[start..].trim());
    found.retain(|operand| !operand.is_empty());
    found
}

/// The members of `{a, b}`; a single operand is its own member.
pub(super) fn members(operand: &str) -> Vec<&str> {
    operand.trim_matches(['{', '}']).split(',').map(str::trim).collect()
}

/// The bits of an immediate: `12`, `-3`, `0x1f`, `0f3F800000`, `0d3FF0000000000000`.
pub(super) fn immediate(text: &str) -> Option<u64> {
    let hex = |digits: &str| u64::from_str_radix(digits, 16).ok();
    if let Some(digits) = text.strip_prefix("0f").or_else(|| text.strip_prefix("0F")) {
        return hex(digits);
    }
    if let Some(digits) = text.strip_prefix("0d").or_else(|| text.strip_prefix("0D")) {
        return hex(digits);
    }
    let (negative, digits) = text.strip_prefix('-').map_or((false, text), |rest| (true, rest));
    let digits = digits.trim_end_matches('U');
    let value = match digits.strip_prefix("0x") {
        Some(digits) => hex(digits)?,
        None => digits.parse().ok()?,
    };
    Some(if negative { value.wrapping_neg() } else { value })
}
