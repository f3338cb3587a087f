//! Methods of Python's `str`.

use super::arguments::{Arguments, text_or_none, truth, whole};
use super::print::is_printable;
use super::value::{Form, List, ValueKind, iterated, name_of, pay};
use minijinja::{State, Value};

/// Bytes of memory for each part of a text in a list.
const BYTES_OF_A_PART: usize = 48;

/// Whether Python strips the character as a blank.
pub(super) fn is_blank(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\u{1c}'..='\u{1f}')
}

/// Result of a method of `str`. None: onebox does not know the method.
pub(super) fn method(
    state: &State<'_, '_>,
    text: &str,
    name: &str,
    arguments: &Arguments,
) -> Result<Option<Value>, String> {
    pay(state, text.len())?;
    let made = |text: String| Ok(Some(Value::from(text)));
    match name {
        "strip" | "lstrip" | "rstrip" => {
            let [chars] = arguments.bind(["chars"])?;
            let chars = text_or_none(chars.as_ref()).map_err(|why| arguments.wrong(&why))?;
            made(stripped(text, name, chars).to_owned())
        }
        "split" | "rsplit" => {
            let [by, most] = arguments.bind(["sep", "maxsplit"])?;
            let by = text_or_none(by.as_ref()).map_err(|why| arguments.wrong(&why))?;
            let most = whole(most.as_ref(), -1).map_err(|why| arguments.wrong(&why))?;
            if by == Some("") {
                return Err(arguments.wrong("the separator is empty"));
            }
            let most = usize::try_from(most).unwrap_or(usize::MAX);
            let many = match by {
                Some(by) => text.matches(by).count(),
                None => text.chars().filter(|c| is_blank(*c)).count(),
            };
            pay(state, BYTES_OF_A_PART * many.min(most))?;
            let parts = split(text, by, most, name == "rsplit");
            list(Form::List, parts).map(Some)
        }
        "splitlines" => {
            let [keep] = arguments.bind(["keepends"])?;
            list(Form::List, lines(state, text, truth(keep.as_ref()))?).map(Some)
        }
        "partition" | "rpartition" => {
            let [by] = arguments.bind(["sep"])?;
            let by = one_text(by.as_ref(), arguments)?;
            if by.is_empty() {
                return Err(arguments.wrong("the separator is empty"));
            }
            let from_right = name == "rpartition";
            let found = if from_right { text.rsplit_once(by) } else { text.split_once(by) };
            let parts = match found {
                Some((before, after)) => vec![before, by, after],
                None if from_right => vec!["", "", text],
                None => vec![text, "", ""],
            };
            list(Form::Tuple, parts).map(Some)
        }
        "startswith" | "endswith" => {
            let [of, start, end] = arguments.bind(["prefix", "start", "end"])?;
            let of = of.ok_or_else(|| arguments.wrong("no text"))?;
            let part =
                window(text, start.as_ref(), end.as_ref(), arguments)?.map_or("", |(_, part)| part);
            let one = |of: &Value| {
                let of = one_text(Some(of), arguments)?;
                Ok(if name == "startswith" { part.starts_with(of) } else { part.ends_with(of) })
            };
            let all = match ValueKind::of(&of) {
                ValueKind::List(List { form: Form::Tuple, items, .. }) => items,
                _ => std::slice::from_ref(&of),
            };
            let found = all.iter().map(one).collect::<Result<Vec<bool>, String>>()?;
            Ok(Some(Value::from(found.contains(&true))))
        }
        "removeprefix" | "removesuffix" => {
            let [of] = arguments.bind(["prefix"])?;
            let of = one_text(of.as_ref(), arguments)?;
            let rest =
                if name == "removeprefix" { text.strip_prefix(of) } else { text.strip_suffix(of) };
            made(rest.unwrap_or(text).to_owned())
        }
        "replace" => {
            let [old, new, count] = arguments.bind(["old", "new", "count"])?;
            let (old, new) =
                (one_text(old.as_ref(), arguments)?, one_text(new.as_ref(), arguments)?);
            made(replaced(state, text, old, new, whole(count.as_ref(), -1)?)?)
        }
        "find" | "rfind" | "index" | "rindex" | "count" => {
            let [of, start, end] = arguments.bind(["sub", "start", "end"])?;
            let of = one_text(of.as_ref(), arguments)?;
            let part = window(text, start.as_ref(), end.as_ref(), arguments)?;
            if name == "count" {
                let count = part.map_or(0, |(_, part)| part.matches(of).count());
                return Ok(Some(Value::from(count)));
            }
            let found = part.and_then(|(before, part)| {
                let at = if name.starts_with('r') { part.rfind(of) } else { part.find(of) };
                Some(before + part[..at?].chars().count())
            });
            match found {
                Some(at) => Ok(Some(Value::from(at))),
                None if name.ends_with("find") => Ok(Some(Value::from(-1))),
                None => Err(arguments.wrong("the text is not there")),
            }
        }
        "join" => {
            let [of] = arguments.bind(["iterable"])?;
            let mut out = String::new();
            for (i, item) in iterated(state, &of.unwrap_or_default())?.iter().enumerate() {
                let part = one_text(Some(item), arguments)?;
                pay(state, text.len() + part.len())?;
                out.push_str(if i == 0 { "" } else { text });
                out.push_str(part);
            }
            made(out)
        }
        "center" | "ljust" | "rjust" | "zfill" => {
            let [width, fill] = arguments.bind(["width", "fillchar"])?;
            let fill =
                text_or_none(fill.as_ref())?.unwrap_or(if name == "zfill" { "0" } else { " " });
            padded(state, text, name, whole(width.as_ref(), 0)?, fill).map(Value::from).map(Some)
        }
        _ => {
            arguments.bind([])?;
            Ok(simple(text, name))
        }
    }
}

/// Result of a method without arguments. None: onebox does not know the method.
fn simple(text: &str, name: &str) -> Option<Value> {
    let every = |is: fn(char) -> bool| Value::from(!text.is_empty() && text.chars().all(is));
    let cased = || text.chars().any(|c| c.is_lowercase() || c.is_uppercase());
    Some(match name {
        "upper" => Value::from(text.to_uppercase()),
        "lower" => Value::from(text.to_lowercase()),
        "capitalize" => Value::from(capitalized(text)),
        "title" => Value::from(titled(text)),
        "swapcase" => {
            let swap = |c: char| match c.is_uppercase() {
                true => c.to_lowercase().collect::<String>(),
                false => c.to_uppercase().collect(),
            };
            Value::from(text.chars().map(swap).collect::<String>())
        }
        "isupper" => Value::from(cased() && !text.chars().any(char::is_lowercase)),
        "islower" => Value::from(cased() && !text.chars().any(char::is_uppercase)),
        "isspace" => every(is_blank),
        "isascii" => Value::from(text.is_ascii()),
        "isprintable" => Value::from(text.chars().all(is_printable)),
        // Python has finer kinds of letters and digits beyond ASCII.
        "isalpha" if text.is_ascii() => every(|c| c.is_ascii_alphabetic()),
        "isalnum" if text.is_ascii() => every(|c| c.is_ascii_alphanumeric()),
        "isdigit" | "isdecimal" | "isnumeric" if text.is_ascii() => every(|c| c.is_ascii_digit()),
        _ => return None,
    })
}

/// Text with its first letter in upper case, and its other letters in lower case.
pub(super) fn capitalized(text: &str) -> String {
    let mut chars = text.chars();
    let first: String = chars.next().map(title_of).unwrap_or_default();
    first + &chars.as_str().to_lowercase()
}

/// Character in the case of a word's first letter.
fn title_of(c: char) -> String {
    let mut large = c.to_uppercase();
    let first = large.next().map_or_else(String::new, String::from);
    // If the upper case has two letters, as for the German sharp s, only the first is upper case.
    let rest: String = large.flat_map(char::to_lowercase).collect();
    first + &rest
}

/// Text with each first letter of a word in upper case, and all other letters in lower case.
fn titled(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut inside = false;
    for c in text.chars() {
        match inside {
            true => out.extend(c.to_lowercase()),
            false => out.push_str(&title_of(c)),
        }
        inside = c.is_lowercase() || c.is_uppercase();
    }
    out
}

/// Text without these characters at its ends, or without blanks at its ends.
pub(super) fn stripped<'a>(text: &'a str, name: &str, chars: Option<&str>) -> &'a str {
    let is = |c: char| chars.map_or_else(|| is_blank(c), |chars| chars.contains(c));
    let text = if name == "rstrip" { text } else { text.trim_start_matches(is) };
    if name == "lstrip" { text } else { text.trim_end_matches(is) }
}

fn list(form: Form, parts: Vec<&str>) -> Result<Value, String> {
    List::of(form, parts.into_iter().map(Value::from).collect())
}

fn one_text<'a>(value: Option<&'a Value>, arguments: &Arguments) -> Result<&'a str, String> {
    match value.map(|value| (value, ValueKind::of(value))) {
        Some((_, ValueKind::Text(text))) => Ok(text),
        Some((value, _)) => {
            Err(arguments.wrong(&format!("{} stands where a text should", name_of(value))))
        }
        None => Err(arguments.wrong("a text is missing")),
    }
}

/// Part between two places, and the number of characters before it. None: start is after end.
fn window<'a>(
    text: &'a str,
    start: Option<&Value>,
    end: Option<&Value>,
    arguments: &Arguments,
) -> Result<Option<(usize, &'a str)>, String> {
    if start.is_none() && end.is_none() {
        return Ok(Some((0, text)));
    }
    let length = text.chars().count() as i128;
    let place = |value: Option<&Value>, or_else: i128| match value.map(ValueKind::of) {
        Some(ValueKind::None) => Ok(or_else),
        _ => whole(value, or_else).map_err(|why| arguments.wrong(&why)),
    };
    let from_end = |at: i128| if at < 0 { (at + length).max(0) } else { at };
    let (start, end) = (from_end(place(start, 0)?), from_end(place(end, length)?).min(length));
    if start > end {
        return Ok(None);
    }
    let byte = |at: i128| text.char_indices().nth(at as usize).map_or(text.len(), |(byte, _)| byte);
    Ok(Some((start as usize, &text[byte(start)..byte(end)])))
}

/// The parts of a text between separators, or between blanks.
fn split<'a>(text: &'a str, by: Option<&str>, most: usize, from_right: bool) -> Vec<&'a str> {
    let mut parts = Vec::new();
    let mut left = match (by, from_right) {
        (Some(_), _) => text,
        (None, false) => text.trim_start_matches(is_blank),
        (None, true) => text.trim_end_matches(is_blank),
    };
    while parts.len() < most {
        let found = match (by, from_right) {
            (Some(by), false) => left.split_once(by),
            (Some(by), true) => left.rsplit_once(by).map(|(before, after)| (after, before)),
            (None, false) => left
                .split_once(is_blank)
                .map(|(one, rest)| (one, rest.trim_start_matches(is_blank))),
            (None, true) => {
                left.rsplit_once(is_blank).map(|(rest, one)| (one, rest.trim_end_matches(is_blank)))
            }
        };
        let Some((one, rest)) = found else { break };
        parts.push(one);
        left = rest;
    }
    if by.is_some() || !left.is_empty() {
        parts.push(left);
    }
    if from_right {
        parts.reverse();
    }
    parts
}

/// Lines of a text, with Python's line ends.
pub(super) fn lines<'a>(
    state: &State<'_, '_>,
    text: &'a str,
    keep: bool,
) -> Result<Vec<&'a str>, String> {
    let is_end = |c: char| {
        matches!(
            c,
            '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'
                ..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
        )
    };
    pay(state, BYTES_OF_A_PART * text.matches(is_end).count())?;
    let mut lines = Vec::new();
    let mut left = text;
    while !left.is_empty() {
        let end = left.find(is_end).unwrap_or(left.len());
        let rest = &left[end..];
        let bytes = match rest.starts_with("\r\n") {
            true => 2,
            false => rest.chars().next().map_or(0, char::len_utf8),
        };
        lines.push(&left[..if keep { end + bytes } else { end }]);
        left = &left[end + bytes..];
    }
    Ok(lines)
}

/// Text with `new` in place of `old`, at most `count` times; a negative `count` has no limit.
pub(super) fn replaced(
    state: &State<'_, '_>,
    text: &str,
    old: &str,
    new: &str,
    count: i128,
) -> Result<String, String> {
    let most = usize::try_from(count).unwrap_or(usize::MAX);
    let found = text.matches(old).take(most).count();
    pay(state, text.len().saturating_add(found.saturating_mul(new.len())))?;
    Ok(text.replacen(old, new, found))
}

/// Text with fill characters up to this width.
pub(super) fn padded(
    state: &State<'_, '_>,
    text: &str,
    name: &str,
    width: i128,
    fill: &str,
) -> Result<String, String> {
    if fill.chars().count() != 1 {
        return Err(format!("{name}: the fill `{fill:.20}` is not one character"));
    }
    let length = text.chars().count() as i128;
    let more = usize::try_from((width - length).max(0)).unwrap_or(usize::MAX);
    pay(state, text.len().saturating_add(more.saturating_mul(fill.len())))?;
    let fills = |many: usize| if many == 0 { String::new() } else { fill.repeat(many) };
    Ok(match name {
        "ljust" => format!("{text}{}", fills(more)),
        "rjust" => format!("{}{text}", fills(more)),
        "zfill" => {
            let digits = text.strip_prefix(['-', '+']).unwrap_or(text);
            format!("{}{}{digits}", &text[..text.len() - digits.len()], fills(more))
        }
        _ => {
            // CPython divides an odd number of fill characters in this way.
            let left = more / 2 + (more & usize::try_from(width.max(0)).unwrap_or(0) & 1);
            format!("{}{text}{}", fills(left), fills(more - left))
        }
    })
}
