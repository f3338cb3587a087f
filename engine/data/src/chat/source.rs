//! Pieces of a chat template as Jinja reads it: texts, comments and raw blocks, and tags of tokens.

/// A part of a template.
#[derive(Debug, PartialEq)]
pub(super) enum Piece<'a> {
    /// A text, a comment or a raw block, unchanged.
    Verbatim(&'a str),
    Tag(Tag<'a>),
}

/// `{{ .. }}`, or `{% .. %}`.
#[derive(Debug, PartialEq)]
pub(super) struct Tag<'a> {
    pub(super) kind: TagKind,
    /// `-`, `+` or an empty text: rule for the blanks before the tag.
    pub(super) left: &'a str,
    pub(super) tokens: Vec<Token<'a>>,
    /// `-`, `+` or an empty text: rule for the blanks after the tag.
    pub(super) right: &'a str,
    /// Line in which the tag begins, from 1.
    pub(super) line: usize,
    /// Number of line ends inside the tag.
    pub(super) lines: usize,
}

/// The two kinds of tags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TagKind {
    Print,
    Block,
}

impl TagKind {
    /// Brackets that begin and end a tag.
    const fn brackets(self) -> [&'static str; 2] {
        match self {
            Self::Print => ["{{", "}}"],
            Self::Block => ["{%", "%}"],
        }
    }
}

/// Token of an expression.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Token<'a> {
    Name(&'a str),
    Integer(&'a str),
    Float(&'a str),
    /// A string with decoded escapes.
    Text(String),
    Operator(&'a str),
}

impl Tag<'_> {
    /// The keyword of a block.
    pub(super) fn keyword(&self) -> Option<&str> {
        match self.tokens.first() {
            Some(Token::Name(name)) if self.kind == TagKind::Block => Some(name),
            _ => None,
        }
    }

    /// Whether the block needs an end tag. `{% set a = b %}` needs none.
    pub(super) fn is_open(&self) -> bool {
        let first = self.tokens.iter().find(
            |token| matches!(token, Token::Operator(o) if !matches!(*o, "," | "." | "(" | ")")),
        );
        self.keyword() != Some("set") || first != Some(&Token::Operator("="))
    }

    /// The tag with other words, on the same lines and with the same rules for blanks.
    pub(super) fn with(&self, words: &str) -> String {
        let lines = "\n".repeat(self.lines);
        let [open, close] = self.kind.brackets();
        format!("{open}{} {words}{lines} {}{close}", self.left, self.right)
    }
}

/// The text as a string literal of minijinja, in one line.
pub(super) fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// Escape with the code of a character.
pub(super) fn code_of(c: char) -> String {
    match u32::from(c) {
        code @ 0..=0xff => format!("\\x{code:02x}"),
        code @ 0x100..=0xffff => format!("\\u{code:04x}"),
        code => format!("\\U{code:08x}"),
    }
}

/// Pieces of a template. Its lines end with `\n`.
///
/// # Errors
/// Text that Jinja cannot read, with the line.
pub(super) fn pieces(source: &str) -> Result<Vec<Piece<'_>>, String> {
    let mut pieces = Vec::new();
    let mut at = 0;
    while let Some(open) = next_open(&source[at..]).map(|open| at + open) {
        if at < open {
            pieces.push(Piece::Verbatim(&source[at..open]));
        }
        let line = line_of(source, open);
        let wrong = |why: String| format!("line {line}: {why}");
        at = if source[open..].starts_with("{#") {
            let end = source[open + 2..].find("#}").map(|end| open + 2 + end + 2);
            let end = end.ok_or_else(|| wrong("a comment `{#` has no end `#}`".into()))?;
            pieces.push(Piece::Verbatim(&source[open..end]));
            end
        } else if let Some((begin, end)) = raw_block(&source[open..]).map_err(wrong)? {
            let (begin, body) = source[open..open + end].split_at(begin);
            pieces.push(Piece::Verbatim(begin));
            // minijinja drops a line end after `{% raw %}`, but Jinja keeps it.
            if body.starts_with('\n') && !begin.ends_with("-%}") {
                pieces.push(Piece::Verbatim("\n"));
            }
            pieces.push(Piece::Verbatim(body));
            open + end
        } else {
            let (tag, end) = tag(source, open).map_err(wrong)?;
            pieces.push(Piece::Tag(tag));
            end
        };
    }
    if at < source.len() {
        pieces.push(Piece::Verbatim(&source[at..]));
    }
    Ok(pieces)
}

/// Byte at which the next tag or comment begins.
fn next_open(source: &str) -> Option<usize> {
    let mut from = 0;
    loop {
        let at = from + source[from..].find('{')?;
        if matches!(source.as_bytes().get(at + 1), Some(b'{' | b'%' | b'#')) {
            return Some(at);
        }
        from = at + 1;
    }
}

/// Line of a byte, from 1.
fn line_of(source: &str, at: usize) -> usize {
    1 + source[..at].matches('\n').count()
}

/// Bytes of the first tag and of the whole block, if a raw block begins here.
fn raw_block(source: &str) -> Result<Option<(usize, usize)>, String> {
    let Some(begin) = lone_keyword(source, "raw") else { return Ok(None) };
    let mut at = begin;
    while let Some(open) = source[at..].find("{%").map(|open| at + open) {
        if let Some(end) = lone_keyword(&source[open..], "endraw") {
            return Ok(Some((begin, open + end)));
        }
        at = open + 2;
    }
    Err("a block `{% raw %}` has no `{% endraw %}`".into())
}

/// Bytes of the tag at the beginning, if the tag is a block with this word alone.
fn lone_keyword(source: &str, word: &str) -> Option<usize> {
    let rest = source.strip_prefix("{%")?;
    let rest = rest.strip_prefix(['-', '+']).unwrap_or(rest).trim_start();
    let rest = rest.strip_prefix(word)?.trim_start();
    let rest = rest.strip_prefix(['-', '+']).unwrap_or(rest).strip_prefix("%}")?;
    Some(source.len() - rest.len())
}

/// Tag that begins at `open`, and the byte after its end.
fn tag(source: &str, open: usize) -> Result<(Tag<'_>, usize), String> {
    let kind = match source[open..].starts_with("{%") {
        true => TagKind::Block,
        false => TagKind::Print,
    };
    let [begin, close] = kind.brackets();
    let mut at = open + 2;
    let left = sign(&source[at..]);
    at += left.len();
    // Inside brackets, `}}` does not end a tag: `{{ {'a': {}} }}`.
    let (mut tokens, mut brackets) = (Vec::new(), Vec::new());
    loop {
        let rest = source[at..].trim_start();
        at = source.len() - rest.len();
        if brackets.is_empty() {
            let is_word = kind == TagKind::Print && rest.starts_with('+');
            let right = if is_word { "" } else { sign(rest) };
            if rest[right.len()..].starts_with(close) {
                let end = at + right.len() + close.len();
                let lines = source[open..end].matches('\n').count();
                let line = line_of(source, open);
                return Ok((Tag { kind, left, tokens, right, line, lines }, end));
            }
        }
        let Some(first) = rest.chars().next() else {
            return Err(format!("a tag `{begin}` has no end `{close}`"));
        };
        // `a.0.1` contains no float.
        let floats = tokens.last() != Some(&Token::Operator("."));
        let (token, bytes) = token(rest, first, floats)?;
        match &token {
            Token::Operator("(") => brackets.push(")"),
            Token::Operator("[") => brackets.push("]"),
            Token::Operator("{") => brackets.push("}"),
            Token::Operator(found @ (")" | "]" | "}")) => match brackets.pop() {
                Some(wanted) if wanted == *found => {}
                Some(wanted) => return Err(format!("`{found}` stands where `{wanted}` should")),
                None => return Err(format!("`{found}` closes nothing")),
            },
            _ => {}
        }
        tokens.push(token);
        at += bytes;
    }
}

/// Sign `-` or `+` at the beginning, or an empty text.
fn sign(source: &str) -> &str {
    &source[..usize::from(source.starts_with(['-', '+']))]
}

/// Token at the beginning, and its bytes in the source.
fn token(rest: &str, first: char, floats: bool) -> Result<(Token<'_>, usize), String> {
    if matches!(first, '\'' | '"') {
        let (text, bytes) = text(rest, first)?;
        return Ok((Token::Text(text), bytes));
    }
    if first.is_ascii_digit() {
        let (bytes, float) = number(rest, floats);
        let number = &rest[..bytes];
        return Ok((if float { Token::Float(number) } else { Token::Integer(number) }, bytes));
    }
    if first.is_alphabetic() || first == '_' {
        let bytes = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        return Ok((Token::Name(&rest[..bytes]), bytes));
    }
    const TWO: [&str; 6] = ["//", "**", "==", "!=", ">=", "<="];
    let bytes = match TWO.iter().any(|two| rest.starts_with(two)) {
        true => 2,
        false if "+-/*%~[](){}><=.:|,;".contains(first) => 1,
        false => return Err(format!("`{}` is no word of Jinja", first.escape_debug())),
    };
    Ok((Token::Operator(&rest[..bytes]), bytes))
}

/// Bytes of the number at the beginning, and whether it is a float.
fn number(rest: &str, floats: bool) -> (usize, bool) {
    let digits = |from: usize, radix: u32| {
        let mut at = from;
        loop {
            let part = &rest[at..];
            let under = usize::from(part.starts_with('_') && at > from);
            if !part[under..].starts_with(|c: char| c.is_digit(radix)) {
                return at;
            }
            at += under + 1;
        }
    };
    let radix = match rest.as_bytes().get(..2) {
        Some(b"0x" | b"0X") => 16,
        Some(b"0o" | b"0O") => 8,
        Some(b"0b" | b"0B") => 2,
        _ => 10,
    };
    if radix != 10 {
        let end = digits(2, radix);
        return if end > 2 { (end, false) } else { (1, false) };
    }
    let decimal = |c: char| c.is_ascii_digit();
    let whole = digits(0, radix);
    if !floats {
        return (whole, false);
    }
    let mut end = whole;
    if rest[end..].starts_with('.') && rest[end + 1..].starts_with(decimal) {
        end = digits(end + 1, radix);
    }
    if rest[end..].starts_with(['e', 'E']) {
        let from = end + 1 + sign(&rest[end + 1..]).len();
        if rest[from..].starts_with(decimal) {
            end = digits(from, radix);
        }
    }
    (end, end > whole)
}

/// String at the beginning, and its bytes in the source with both quotes.
fn text(rest: &str, quote: char) -> Result<(String, usize), String> {
    let mut out = String::new();
    let mut chars = rest.char_indices().skip(1);
    while let Some((at, c)) = chars.next() {
        if c == quote {
            return Ok((out, at + 1));
        }
        if c != '\\' {
            out.push(c);
            continue;
        }
        let Some((at, escaped)) = chars.next() else { break };
        let from = &rest[at..];
        let more = escape(escaped, from, &mut out)?;
        for _ in 0..more {
            chars.next();
        }
    }
    Err("a string has no end".into())
}

/// Decodes an escape as Python does. Returns the number of its characters after `first`.
fn escape(first: char, from: &str, out: &mut String) -> Result<usize, String> {
    let simple = match first {
        '\n' => return Ok(0),
        '\\' | '\'' | '"' => first,
        'a' => '\u{7}',
        'b' => '\u{8}',
        'f' => '\u{c}',
        'n' => '\n',
        'r' => '\r',
        't' => '\t',
        'v' => '\u{b}',
        '0'..='7' => {
            let digits = from.chars().take(3).take_while(|c| c.is_digit(8)).count();
            let code = u32::from_str_radix(&from[..digits], 8).ok().and_then(char::from_u32);
            out.push(code.ok_or_else(|| format!("`\\{}` is no character", &from[..digits]))?);
            return Ok(digits - 1);
        }
        'x' | 'u' | 'U' => {
            let digits = match first {
                'x' => 2,
                'u' => 4,
                _ => 8,
            };
            let wrong = || format!("`\\{first}` is an escape of {digits} hexadecimal digits");
            let code = from.get(1..=digits).ok_or_else(wrong)?;
            let is_code = code.bytes().all(|b| b.is_ascii_hexdigit());
            let code = u32::from_str_radix(code, 16).ok().filter(|_| is_code).ok_or_else(wrong)?;
            let c = char::from_u32(code);
            out.push(c.ok_or_else(|| format!("`\\{first}{code:04X}` is no character"))?);
            return Ok(digits);
        }
        'N' => {
            let name = &from[..from.find('}').map_or(1, |end| end + 1)];
            return Err(format!(
                "`\\{name:.100}` names a character, which onebox does not know: write its code, as \\u00e9"
            ));
        }
        // As in Python, the result is the escape with the code of the character.
        c if !c.is_ascii() => {
            out.push_str(&code_of(c));
            return Ok(0);
        }
        other => {
            out.push('\\');
            other
        }
    };
    out.push(simple);
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(source: &str) -> Vec<String> {
        let of = |piece: Piece<'_>| match piece {
            Piece::Tag(tag) => tag.tokens.into_iter().find_map(|token| match token {
                Token::Text(text) => Some(text),
                _ => None,
            }),
            Piece::Verbatim(_) => None,
        };
        pieces(source).unwrap().into_iter().filter_map(of).collect()
    }

    /// Expected values: Python 3.12 and Jinja 3.1.6.
    #[test]
    fn literals_have_the_characters_that_python_reads() {
        for (literal, text) in [
            (r"'a\/b'", r"a\/b"),
            (r"'\U0001F600'", "\u{1F600}"),
            (r"'\u00e9\x41\101\0'", "\u{e9}AA\0"),
            (r"'\a\b\f\v\t\r\n'", "\u{7}\u{8}\u{c}\u{b}\t\r\n"),
            (r#"'\'\"\\'"#, r#"'"\"#),
            (r"'\d\8\ '", r"\d\8\ "),
            ("'a\\\nb'", "ab"),
            ("'\\\u{e9}\\\u{1F600}'", r"\xe9\U0001f600"),
            (r"'\777'", "\u{1ff}"),
            ("\"it's %} {{\"", "it's %} {{"),
        ] {
            assert_eq!(texts(&format!("{{{{ {literal} }}}}")), [text], "{literal}");
        }
        for (literal, message) in [
            (r"'\x4'", "2 hexadecimal digits"),
            (r"'\ud83d\ude00'", r"`\uD83D` is no character"),
            (r"'\U00110000'", "is no character"),
            (r"'\N{BULLET}'", r"\N{BULLET}"),
            ("'a", "a string has no end"),
        ] {
            let why = pieces(&format!("a\n{{{{ {literal} }}}}")).unwrap_err();
            assert!(why.contains(message) && why.starts_with("line 2: "), "{why}");
        }
    }

    #[test]
    fn a_tag_ends_where_jinja_ends_it() {
        let tags = |source: &str| -> usize {
            pieces(source).unwrap().iter().filter(|piece| matches!(piece, Piece::Tag(_))).count()
        };
        for (source, many) in [
            ("{{ {'a': {'b': 1}} }}", 1),
            ("{{ '}}' }}{%- if '%}' -%}{% endif +%}", 3),
            ("{# {{ a }} {% b %} #}{{ a }}", 1),
            ("{%- raw -%}{{ a }}{# {% endraw %}{{ b }}", 1),
            ("a { % } }} #} b", 0),
            ("{{-1.5e-3-}}{{ a.0.1 }}", 2),
        ] {
            assert_eq!(tags(source), many, "{source}");
        }
        for source in
            ["{{ a", "{% a %", "{# a", "{% raw %} {% endraw", "{{ (] }}", "{{ ) }}", "{{ $ }}"]
        {
            assert!(pieces(source).is_err(), "{source}");
        }
    }
}
