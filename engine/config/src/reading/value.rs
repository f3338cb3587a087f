//! Reads one value, or describes the expected value, the found value and the remedy.

use std::ops::RangeInclusive;
use std::str::FromStr;

use super::{
    Complaint, Field, NodeKind, ParseResult, format_bytes, meant, parse_bytes, short, ticked,
    value_answer,
};
use files::foreign_text::foreign;

/// A value in a text.
#[derive(Clone, Copy)]
pub(crate) struct Item<'a> {
    pub(crate) text: &'a str,
    pub(crate) kind: &'a NodeKind,
}

/// Interval of numbers; each end is open or closed.
#[derive(Clone, Copy)]
pub(crate) struct Interval {
    low: f32,
    high: f32,
    low_open: bool,
    high_open: bool,
}

impl Interval {
    /// The interval `[low, high]`.
    pub(crate) const fn closed(low: f32, high: f32) -> Self {
        Self { low, high, low_open: false, high_open: false }
    }

    /// The interval `(low, high]`.
    pub(crate) const fn above(low: f32, high: f32) -> Self {
        Self { low, high, low_open: true, high_open: false }
    }

    /// The interval `[low, high)`.
    pub(crate) const fn below(low: f32, high: f32) -> Self {
        Self { low, high, low_open: false, high_open: true }
    }

    fn holds(self, value: f32) -> bool {
        (value > self.low || (value == self.low && !self.low_open))
            && (value < self.high || (value == self.high && !self.high_open))
    }

    pub(crate) fn words(self) -> String {
        let plain =
            |bound: f32| if bound >= 1e8 { format!("{bound:e}") } else { bound.to_string() };
        let (low, high) = (plain(self.low), plain(self.high));
        match (self.low_open, self.high_open) {
            (false, false) => format!("from {low} to {high}"),
            (true, false) => format!("above {low} and at most {high}"),
            (false, true) => format!("from {low} to below {high}"),
            (true, true) => format!("above {low} and below {high}"),
        }
    }
}

impl Item<'_> {
    /// Describes the found value for messages.
    pub(crate) fn found(&self) -> String {
        let text = short(self.text);
        match self.kind {
            NodeKind::Word(_) if number::<f64>(self.text).is_some() => format!("the number {text}"),
            NodeKind::Word(_) => format!("`{text}`"),
            NodeKind::Text => format!("the string {text}"),
            NodeKind::Bare => format!("the text {text}"),
            NodeKind::Struct { name: Some(name), .. }
            | NodeKind::Tuple { name: Some(name), .. } => {
                format!("`{}(...)`", short(name))
            }
            NodeKind::Struct { name: None, .. } => "a group of keys".into(),
            NodeKind::Tuple { name: None, .. } => "a group of values".into(),
            NodeKind::List(_) => "a list".into(),
            NodeKind::Other(what) => (*what).into(),
        }
    }

    /// Text of a short number, word or string; empty for any other value.
    pub(crate) fn brief(&self) -> String {
        let short = self.text.len() <= 64 && !self.text.contains(char::is_control);
        match self.kind {
            NodeKind::Word(_) | NodeKind::Text if short => self.text.into(),
            _ => String::new(),
        }
    }

    fn expected<T>(&self, what: &str, help: String) -> ParseResult<T> {
        let message = format!("expected {what}, found {}", self.found());
        Err(Complaint { message, help })
    }

    /// Remedy for a number in quotes, a number in `Some(...)`, and a value that is no number.
    fn number_help(&self, fits: impl Fn(&str) -> bool, words: &str) -> String {
        match self.kind {
            NodeKind::Text => match self.string().ok().filter(|text| fits(text)) {
                Some(text) => format!("write {text} without the quotes"),
                None => format!("write a number {words}"),
            },
            NodeKind::Tuple { name: Some(name), .. } if name == "Some" => {
                "write the number itself, without `Some`".into()
            }
            NodeKind::Word(_) if self.text == "None" => {
                "leave the key out for its default, or write a number".into()
            }
            _ => format!("write a number {words}"),
        }
    }

    /// Reads a whole number within `range`.
    pub(crate) fn uint(&self, range: &RangeInclusive<u64>) -> ParseResult<u64> {
        let words = format!("from {} to {}", grouped(*range.start()), grouped(*range.end()));
        let number = match self.kind {
            NodeKind::Word(_) => number::<f64>(self.text),
            _ => None,
        };
        let Some(number) = number else {
            let fits = |text: &str| text.parse::<u64>().is_ok_and(|v| range.contains(&v));
            return self.expected("a whole number", self.number_help(fits, &words));
        };
        match ron::from_str::<u64>(self.text) {
            Ok(value) if range.contains(&value) => Ok(value),
            Err(_) if number.is_finite() && number.fract() != 0.0 => {
                self.expected("a whole number", format!("write a whole number {words}"))
            }
            Err(_) if (0.0..1e15).contains(&number) => {
                let whole = number as u64;
                let help = match range.contains(&whole) {
                    true => format!("write {whole}, without a point or an exponent"),
                    false => format!("write a whole number {words}"),
                };
                self.expected("a whole number", help)
            }
            _ => self.outside(&format!("a whole number {words}"), &words),
        }
    }

    fn outside<T>(&self, what: &str, words: &str) -> ParseResult<T> {
        let message = format!("must be {what}, found {}", short(self.text));
        Err(Complaint { message, help: format!("choose a number {words}") })
    }

    /// Reads a finite number within `interval`, after rounding to 32 bits.
    pub(crate) fn float(&self, interval: Interval) -> ParseResult<f32> {
        let words = interval.words();
        let Some(exact) =
            number::<f64>(self.text).filter(|_| matches!(self.kind, NodeKind::Word(_)))
        else {
            let fits = |text: &str| number::<f64>(text).is_some_and(|v| interval.holds(v as f32));
            return self.expected("a number", self.number_help(fits, &words));
        };
        let value = number(self.text).unwrap_or(f32::NAN);
        let vanished = value == 0.0 && exact != 0.0;
        if interval.holds(value) && !vanished {
            return Ok(value);
        }
        if !value.is_finite() {
            return self.outside(&format!("a finite number {words}"), &words);
        }
        let (low, high) = (f64::from(interval.low), f64::from(interval.high));
        if vanished || exact > low && exact < high {
            let message = format!(
                "must be a number {words}, found {}, which is {value:?} in 32 bits",
                short(self.text)
            );
            return Err(Complaint { message, help: format!("stay further from {value:?}") });
        }
        self.outside(&format!("a number {words}"), &words)
    }

    /// Reads `true` or `false`.
    pub(crate) fn bool(&self) -> ParseResult<bool> {
        match (self.kind, self.text) {
            (NodeKind::Word(_), "true") => Ok(true),
            (NodeKind::Word(_), "false") => Ok(false),
            _ => self.expected("`true` or `false`", "write `true` or `false`".into()),
        }
    }

    /// Reads a string, which needs quotes unless it is from the command line.
    pub(crate) fn string(&self) -> ParseResult<String> {
        let help = |text: &str| format!("write it in quotes: {}", foreign(quoted(text)));
        match self.kind {
            NodeKind::Bare => Ok(self.text.into()),
            NodeKind::Text => ron::from_str(self.text).map_err(|error| Complaint {
                message: format!("this string cannot be read: {}", error.code),
                help: "escape a backslash or a quote by a backslash".into(),
            }),
            NodeKind::Word(_) => self.expected("a string", help(self.text)),
            _ => self.expected("a string", "write a string in quotes".into()),
        }
    }

    /// Reads a size in bytes.
    pub(crate) fn bytes(&self, range: &RangeInclusive<u64>) -> ParseResult<u64> {
        let words =
            format!("from {} to {}", format_bytes(*range.start()), format_bytes(*range.end()));
        if matches!(self.kind, NodeKind::Word(_)) && number::<f64>(self.text).is_some() {
            let text = short(self.text);
            let help = format!("say of what: \"{text}MiB\" or \"{text}GiB\"; \"{text}B\" is bytes");
            return self.expected("a size with a unit", help);
        }
        let Ok(text) = self.string() else {
            return self.expected("a size", "write a size in quotes, such as \"512MiB\"".into());
        };
        match parse_bytes(&text) {
            Ok(bytes) if range.contains(&bytes) => Ok(bytes),
            Ok(_) => {
                let message = format!("must be a size {words}, found {}", short(self.text));
                Err(Complaint { message, help: format!("choose a size {words}") })
            }
            Err(why) => {
                let message = format!("the size {} {why}", short(self.text));
                Err(Complaint { message, help: "write a size such as \"512MiB\"".into() })
            }
        }
    }

    /// Index of the value among `examples`, such as `Serial` or `Delayed(after_step: 40)`.
    pub(crate) fn variant(&self, examples: &[&'static str]) -> ParseResult<usize> {
        let names = examples.iter().map(|example| name_of(example));
        let typed = match self.kind {
            NodeKind::Struct { name: Some(name), .. } => name.as_str(),
            NodeKind::Word(word) => word.as_str(),
            _ => return self.no_variant(examples),
        };
        if let Some(index) = index_of(typed, examples) {
            return Ok(index);
        }
        if let Some(answer) = value_answer(typed, names.clone()) {
            let message = format!("expected {}, found {}", ticked(examples), self.found());
            return Err(Complaint { message, help: answer.into() });
        }
        let near = meant(typed, names);
        let meant: Vec<&str> =
            examples.iter().copied().filter(|example| near.contains(&name_of(example))).collect();
        let message = format!("expected {}, found {}", ticked(examples), self.found());
        let help = match meant.as_slice() {
            [] => format!("write {}", ticked(examples)),
            meant => format!("did you mean {}?", ticked(meant)),
        };
        Err(Complaint { message, help })
    }

    /// Error for a variant in quotes, for fields without names, and for any other value.
    fn no_variant(&self, examples: &[&'static str]) -> ParseResult<usize> {
        let typed = match self.kind {
            NodeKind::Text => self.string().unwrap_or_default(),
            NodeKind::Tuple { name: Some(name), .. } => name.clone(),
            _ => String::new(),
        };
        let example = index_of(&typed, examples).and_then(|index| examples.get(index));
        let answer = value_answer(&typed, examples.iter().map(|example| name_of(example)));
        let help = match (example, answer, self.kind) {
            (Some(example), _, NodeKind::Text) => format!("write `{example}` without the quotes"),
            (Some(example), ..) => format!("write `{example}`"),
            (None, Some(answer), _) => answer.into(),
            (None, None, NodeKind::Struct { name: None, fields }) => before_keys(examples, fields),
            (None, None, _) => format!("write {}", ticked(examples)),
        };
        self.expected(&ticked(examples), help)
    }
}

/// Remedy for keys without the name of a variant, as `--set` makes them of `adapter.rank=8`.
fn before_keys(examples: &[&'static str], fields: &[Field]) -> String {
    let keys: Vec<String> = fields.iter().map(|field| format!("{}: ...", field.key)).collect();
    let with_keys = examples.iter().filter(|example| example.contains('('));
    let all: Vec<String> =
        with_keys.map(|example| format!("{}({})", name_of(example), keys.join(", "))).collect();
    match all.as_slice() {
        [] => format!("write {}", ticked(examples)),
        all => {
            let all: Vec<&str> = all.iter().map(String::as_str).collect();
            format!("write the name before the keys: {}", ticked(&all))
        }
    }
}

/// Index of the variant with the name `typed` among `examples`. The name may be in any case, and have
/// `-` or `_` between its parts, if only one variant then has this name.
fn index_of(typed: &str, examples: &[&'static str]) -> Option<usize> {
    let mut names = examples.iter().map(|example| name_of(example));
    if let Some(index) = names.clone().position(|name| name == typed) {
        return Some(index);
    }
    let index = names.clone().position(|name| is_name(typed, name))?;
    let is_only = names.nth(index).is_some() && !names.any(|name| is_name(typed, name));
    is_only.then_some(index)
}

/// Whether the word `typed` is the name `name`, in any case, and with `-` or `_` between its parts.
pub(crate) fn is_name(typed: &str, name: &str) -> bool {
    let plain = |text: &str| text.replace(['-', '_'], "").to_lowercase();
    typed == name || plain(typed) == plain(name)
}

/// Name in an example: `Delayed` of `Delayed(after_step: 40)`.
pub(crate) fn name_of(example: &'static str) -> &'static str {
    example.split('(').next().unwrap_or(example)
}

/// Parses the number of a word and rounds it once; `NaN` and infinities are numbers, too.
fn number<T: FromStr>(text: &str) -> Option<T> {
    numeral(text)?.parse().ok()
}

/// Spells a number as Rust's parser expects it: without underscores, without type, in decimal.
fn numeral(text: &str) -> Option<String> {
    let bare = text.strip_suffix("f32").or(text.strip_suffix("f64")).unwrap_or(text);
    let unsigned = bare.trim_start_matches(['+', '-']);
    if unsigned == "inf" || unsigned == "NaN" {
        return Some(bare.into());
    }
    if let Ok(whole) = ron::from_str::<u64>(text) {
        return Some(whole.to_string());
    }
    let starts = unsigned.starts_with(|c: char| c.is_ascii_digit() || c == '.');
    starts.then(|| bare.replace('_', ""))
}

/// Groups the digits of a number: `10_000`. RON reads this form.
pub(crate) fn grouped(value: u64) -> String {
    let digits = value.to_string();
    let mut out = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push('_');
        }
        out.push(digit);
    }
    out
}

/// A RON string literal.
pub(crate) fn quoted(text: &str) -> String {
    ron::to_string(text).unwrap_or_else(|_| format!("{text:?}"))
}

/// A RON float that reads back as the same bits.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "it shows the value of a key")]
pub(crate) fn float_text(value: &f32) -> String {
    format!("{value:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_in_another_case_is_taken_only_if_it_is_one_variant() {
        let examples = ["Bf16", "InverseSqrt", "Delayed(after_step: 40)", "AbC", "A_bc"];
        for (typed, index) in [
            ("BF16", Some(0)),
            ("inverse_sqrt", Some(1)),
            ("INVERSE-SQRT", Some(1)),
            ("delayed", Some(2)),
            ("abc", None),
            ("AbC", Some(3)),
            ("bf", None),
            ("", None),
        ] {
            assert_eq!(index_of(typed, &examples), index, "{typed}");
        }
    }
}
