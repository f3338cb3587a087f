//! Code of minijinja, from which expressions are built.

use super::source::quoted;

/// Code, or an error message.
pub(super) type CodeResult = Result<Code, String>;

/// Maximum levels of an expression: real templates have about 10, a thread's stack allows about 70.
pub(super) const DEEPEST: usize = 40;

/// Maximum operands of one operator, and maximum arguments of one call.
const MOST: usize = 500;

/// Expression in the syntax of minijinja.
#[derive(Debug)]
pub(super) struct Code {
    pub(super) text: String,
    pub(super) depth: usize,
}

impl Code {
    pub(super) const fn leaf(text: String) -> Self {
        Self { text, depth: 1 }
    }
}

pub(super) fn too_deep() -> String {
    format!("an expression has more than {DEEPEST} levels")
}

pub(super) fn level(text: String, below: usize) -> CodeResult {
    match below < DEEPEST {
        true => Ok(Code { text, depth: below + 1 }),
        false => Err(too_deep()),
    }
}

pub(super) fn depth(all: &[Code]) -> usize {
    all.iter().map(|one| one.depth).max().unwrap_or(0)
}

pub(super) fn one_or(mut all: Vec<Code>, join: impl FnOnce(Vec<Code>) -> CodeResult) -> CodeResult {
    if all.len() == 1
        && let Some(one) = all.pop()
    {
        return Ok(one);
    }
    join(all)
}

pub(super) fn call(function: &str, arguments: Vec<Code>) -> CodeResult {
    if arguments.len() > MOST {
        return Err(format!("an expression has more than {MOST} parts"));
    }
    let below = depth(&arguments);
    let texts: Vec<String> = arguments.into_iter().map(|one| one.text).collect();
    level(format!("{function}({})", texts.join(", ")), below)
}

/// Converts an integer literal of Python into code with decimal digits.
pub(super) fn integer(digits: &str) -> Result<String, String> {
    let plain = digits.replace('_', "").to_ascii_lowercase();
    let (radix, plain) = match plain.get(..2) {
        Some("0x") => (16, &plain[2..]),
        Some("0o") => (8, &plain[2..]),
        Some("0b") => (2, &plain[2..]),
        _ => (10, plain.as_str()),
    };
    match i128::from_str_radix(plain, radix) {
        Ok(number) => Ok(number.to_string()),
        Err(_) if radix == 10 => {
            Ok(format!("__integer({})", quoted(plain.trim_start_matches('0'))))
        }
        Err(_) => Err(format!("`{digits:.60}` is too large: write it in decimal digits")),
    }
}

/// Converts a float literal of Python into digits without an exponent.
pub(super) fn float(digits: &str) -> Result<String, String> {
    let number: f64 =
        digits.replace('_', "").parse().map_err(|e| format!("`{digits:.60}`: {e}"))?;
    if !number.is_finite() {
        return Err(format!("`{digits:.60}` is too large for a number"));
    }
    let text = number.to_string();
    Ok(if text.contains('.') { text } else { text + ".0" })
}
