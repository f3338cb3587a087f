//! Filters of Jinja, as transformers has them.

use super::arguments::{Arguments, text_or_none, truth, whole};
use super::checks;
use super::dump::{Dump, json};
use super::numbers::Number;
use super::operators::binary;
use super::print::text;
use super::sorting::{by_path, dictsort, extreme, part, some, sorted, unique};
use super::strings::{capitalized, is_blank, lines, padded, replaced, stripped};
use super::value::{Form, List, ValueKind, ValueResult, iterated, name_of, pay};
use minijinja::{State, Value};

/// Function of a filter in a template: maps a value to a value.
pub(super) type Filter = fn(&State<'_, '_>, &Value, &Arguments) -> ValueResult;

/// All filters by name.
pub(super) const FILTERS: [(&str, Filter); 46] = [
    ("abs", abs),
    ("batch", batch),
    ("capitalize", |s, of, a| of_text(s, of, a, capitalized)),
    ("center", center),
    ("count", length),
    ("d", default),
    ("default", default),
    ("dictsort", dictsort),
    ("e", escape),
    ("escape", escape),
    ("first", first),
    ("float", float),
    ("groupby", |_, _, a| Err(a.wrong("onebox does not know it"))),
    ("indent", indent),
    ("int", int),
    ("items", items),
    ("join", join),
    ("last", last),
    ("length", length),
    ("list", list),
    ("lower", |s, of, a| of_text(s, of, a, str::to_lowercase)),
    ("map", map),
    ("max", |s, of, a| extreme(s, of, a, true)),
    ("min", |s, of, a| extreme(s, of, a, false)),
    ("reject", |s, of, a| chosen(s, of, a, Choice { by_attribute: false, keeps: false })),
    ("rejectattr", |s, of, a| chosen(s, of, a, Choice { by_attribute: true, keeps: false })),
    ("replace", replace),
    ("reverse", reverse),
    ("round", round),
    ("safe", safe),
    ("select", |s, of, a| chosen(s, of, a, Choice { by_attribute: false, keeps: true })),
    ("selectattr", |s, of, a| chosen(s, of, a, Choice { by_attribute: true, keeps: true })),
    ("slice", |_, _, a| Err(a.wrong("onebox does not know it"))),
    ("sort", sorted),
    ("string", |s, of, a| of_text(s, of, a, str::to_owned)),
    ("sum", sum),
    ("title", |s, of, a| of_text(s, of, a, titled)),
    ("tojson", tojson),
    ("trim", trim),
    ("truncate", |_, _, a| Err(a.wrong("onebox does not know it"))),
    ("unique", unique),
    ("upper", |s, of, a| of_text(s, of, a, str::to_uppercase)),
    ("urlencode", |_, _, a| Err(a.wrong("onebox does not know it"))),
    ("wordcount", wordcount),
    ("wordwrap", |_, _, a| Err(a.wrong("onebox does not know it"))),
    ("xmlattr", |_, _, a| Err(a.wrong("onebox does not know it"))),
];

pub(super) fn named(name: &str) -> Option<Filter> {
    FILTERS.iter().find(|(other, _)| *other == name).map(|(_, filter)| *filter)
}

fn of_text(
    state: &State<'_, '_>,
    of: &Value,
    arguments: &Arguments,
    change: impl Fn(&str) -> String,
) -> ValueResult {
    arguments.bind([])?;
    let text = text(state, of)?;
    pay(state, text.len())?;
    Ok(Value::from(change(&text)))
}

fn generated(items: Vec<Value>) -> ValueResult {
    List::of(Form::Generator, items)
}

fn abs(_: &State<'_, '_>, of: &Value, arguments: &Arguments) -> ValueResult {
    arguments.bind([])?;
    match Number::of(of) {
        Some(Number::Int(number)) => {
            number.checked_abs().map(Value::from).ok_or_else(|| arguments.wrong("beyond 128 bits"))
        }
        Some(Number::Float(number)) => Ok(Value::from(number.abs())),
        None => Err(arguments.wrong(name_of(of))),
    }
}

fn batch(state: &State<'_, '_>, of: &Value, arguments: &Arguments) -> ValueResult {
    let [many, fill] = arguments.bind(["linecount", "fill_with"])?;
    let many = usize::try_from(whole(many.as_ref(), 0)?).ok().filter(|many| *many > 0);
    let many = many.ok_or_else(|| arguments.wrong("`linecount` is no number above 0"))?;
    let mut rows = Vec::new();
    for row in iterated(state, of)?.chunks(many) {
        let mut row = row.to_vec();
        if let Some(fill) = fill.as_ref().filter(|fill| !fill.is_none()) {
            pay(state, 24_usize.saturating_mul(many))?;
            row.resize(many, fill.clone());
        }
        rows.push(List::of(Form::List, row)?);
    }
    generated(rows)
}

fn center(state: &State<'_, '_>, of: &Value, arguments: &Arguments) -> ValueResult {
    let [width] = arguments.bind(["width"])?;
    let text = text(state, of)?;
    padded(state, &text, "center", whole(width.as_ref(), 80)?, " ").map(Value::from)
}

fn length(_: &State<'_, '_>, of: &Value, arguments: &Arguments) -> ValueResult {
    arguments.bind([])?;
    let length = match ValueKind::of(of) {
        ValueKind::Undefined => 0,
        ValueKind::Text(text) => text.chars().count(),
        ValueKind::Dict(dict) => dict.fields.len(),
        ValueKind::List(list) if list.form != Form::Generator => list.items.len(),
        _ => return Err(arguments.wrong(&format!("{} has no length", name_of(of)))),
    };
    Ok(Value::from(length))
}

fn default(_: &State<'_, '_>, of: &Value, arguments: &Arguments) -> ValueResult {
    let [or_else, also_false] = arguments.bind(["default_value", "boolean"])?;
    let missing = of.is_undefined() || (truth(also_false.as_ref()) && !of.is_true());
    Ok(if missing { or_else.unwrap_or_else(|| Value::from("")) } else { of.clone() })
}

fn escape(state: &State<'_, '_>, of: &Value, arguments: &Arguments) -> ValueResult {
    arguments.bind([])?;
    if of.is_safe() {
        return Ok(of.clone());
    }
    let text = text(state, of)?;
    pay(state, 5 * text.len())?;
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' => out.push_str("&#39;"),
            '"' => out.push_str("&#34;"),
            c => out.push(c),
        }
    }
    Ok(Value::from_safe_string(out))
}

fn safe(state: &State<'_, '_>, of: &Value, arguments: &Arguments) -> ValueResult {
    arguments.bind([])?;
    Ok(Value::from_safe_string(text(state, of)?))
}

fn first(state: &State<'_, '_>, of: &Value, arguments: &Arguments) -> ValueResult {
    arguments.bind([])?;
    Ok(iterated(state, of)?.into_iter().next().unwrap_or_default())
}

fn last(state: &State<'_, '_>, of: &Value, arguments: &Arguments) -> ValueResult {
    arguments.bind([])?;
    match ValueKind::of(of) {
        ValueKind::List(list) if list.form == Form::Generator => {
            Err(arguments.wrong("a generator has no last"))
        }
        _ => Ok(iterated(state, of)?.pop().unwrap_or_default()),
    }
}

/// Number in a text, as Python reads it.
fn read<T: std::str::FromStr>(text: &str) -> Option<T> {
    let text = text.trim_matches(is_blank);
    let bytes = text.as_bytes();
    let lone = |at: usize| {
        let digit =
            |at: Option<usize>| at.and_then(|at| bytes.get(at)).is_some_and(u8::is_ascii_digit);
        digit(at.checked_sub(1)) && digit(Some(at + 1))
    };
    if bytes.iter().enumerate().any(|(at, b)| *b == b'_' && !lone(at)) {
        return None;
    }
    text.replace('_', "").parse().ok()
}

fn int(_: &State<'_, '_>, of: &Value, arguments: &Arguments) -> ValueResult {
    let [or_else, base] = arguments.bind(["default", "base"])?;
    let or_else = or_else.unwrap_or_else(|| Value::from(0));
    if whole(base.as_ref(), 10)? != 10 {
        return Err(arguments.wrong("a base other than 10, which onebox does not know"));
    }
    let cut = |number: f64| -> ValueResult {
        let wide = || Err(arguments.wrong("beyond 128 bits, which onebox does not know"));
        match number.is_finite() {
            false => Ok(or_else.clone()),
            true if number.abs() >= 2_f64.powi(126) => wide(),
            true => Ok(Value::from(number as i128)),
        }
    };
    match ValueKind::of(of) {
        ValueKind::Bool(value) => Ok(Value::from(i128::from(value))),
        ValueKind::Int(_) | ValueKind::Digits(_) => Ok(of.clone()),
        ValueKind::Float(number) => cut(number),
        ValueKind::Text(text) => match (read::<i128>(text), read::<f64>(text)) {
            (Some(number), _) => Ok(Value::from(number)),
            (None, Some(number)) => cut(number),
            (None, None) => Ok(or_else),
        },
        ValueKind::Undefined => Err(arguments.wrong("an undefined value")),
        _ => Ok(or_else),
    }
}

fn float(_: &State<'_, '_>, of: &Value, arguments: &Arguments) -> ValueResult {
    let [or_else] = arguments.bind(["default"])?;
    let or_else = or_else.unwrap_or_else(|| Value::from(0.0));
    match (Number::of(of), ValueKind::of(of)) {
        (Some(number), _) => Ok(Value::from(number.float())),
        (None, ValueKind::Text(text)) => Ok(read::<f64>(text).map_or(or_else, Value::from)),
        (None, ValueKind::Digits(digits)) => Ok(read::<f64>(digits).map_or(or_else, Value::from)),
        (None, ValueKind::Undefined) => Err(arguments.wrong("an undefined value")),
        _ => Ok(or_else),
    }
}

fn round(_: &State<'_, '_>, of: &Value, arguments: &Arguments) -> ValueResult {
    let [digits, method] = arguments.bind(["precision", "method"])?;
    let digits = whole(digits.as_ref(), 0)?;
    let method = text_or_none(method.as_ref())?.unwrap_or("common");
    match (Number::of(of), method) {
        (Some(Number::Int(number)), "common") if digits >= 0 => Ok(Value::from(number)),
        (Some(Number::Float(number)), "common") if (0..=100).contains(&digits) => {
            let digits = digits as usize;
            let text = format!("{number:.digits$}");
            text.parse::<f64>().map(Value::from).map_err(|e| arguments.wrong(&e.to_string()))
        }
        (Some(number), "ceil" | "floor") if (0..=22).contains(&digits) => {
            let scale = 10_f64.powi(digits as i32);
            let scaled = number.float() * scale;
            Ok(Value::from(if method == "ceil" { scaled.ceil() } else { scaled.floor() } / scale))
        }
        _ => Err(arguments.wrong(&format!("of {}, `{method:.60}`, {digits} digits", name_of(of)))),
    }
}

fn indent(state: &State<'_, '_>, of: &Value, arguments: &Arguments) -> ValueResult {
    let [width, first, blank] = arguments.bind(["width", "first", "blank"])?;
    let (of, indent) = (text(state, of)?, indentation(state, width.as_ref(), 4)?);
    let (first, blank) = (truth(first.as_ref()), truth(blank.as_ref()));
    // As in Jinja, the text gets one more line end, which the join of the lines removes.
    let ended = of + "\n";
    let lines = lines(state, &ended, false)?;
    pay(state, ended.len() + lines.len().saturating_mul(indent.len()))?;
    let mut out = String::new();
    for (i, line) in lines.iter().enumerate() {
        if i > 0 {
            out.push('\n');
        }
        let indented = if i == 0 { first } else { blank || !line.is_empty() };
        if indented {
            out.push_str(&indent);
        }
        out.push_str(line);
    }
    Ok(Value::from(out))
}

/// Indentation: this number of blanks, or a text.
fn indentation(
    state: &State<'_, '_>,
    width: Option<&Value>,
    or_else: i128,
) -> Result<String, String> {
    match width.map(ValueKind::of) {
        Some(ValueKind::Text(text)) => Ok(text.to_owned()),
        _ => {
            let many = usize::try_from(whole(width, or_else)?.max(0)).unwrap_or(usize::MAX);
            pay(state, many)?;
            Ok(" ".repeat(many))
        }
    }
}

fn items(state: &State<'_, '_>, of: &Value, arguments: &Arguments) -> ValueResult {
    arguments.bind([])?;
    match ValueKind::of(of) {
        ValueKind::Undefined => generated(Vec::new()),
        ValueKind::Dict(dict) => {
            pay(state, 48 * dict.fields.len())?;
            generated(dict.pairs()?)
        }
        _ => Err(arguments.wrong(name_of(of))),
    }
}

fn join(state: &State<'_, '_>, of: &Value, arguments: &Arguments) -> ValueResult {
    let [by, attribute] = arguments.bind(["d", "attribute"])?;
    let by = by.map_or_else(|| Ok(String::new()), |by| text(state, &by))?;
    let mut out = String::new();
    for (i, one) in iterated(state, of)?.iter().enumerate() {
        let part = text(state, &part(one, some(attribute.as_ref()))?)?;
        pay(state, by.len() + part.len())?;
        out.push_str(if i == 0 { "" } else { &by });
        out.push_str(&part);
    }
    Ok(Value::from(out))
}

fn list(state: &State<'_, '_>, of: &Value, arguments: &Arguments) -> ValueResult {
    arguments.bind([])?;
    List::of(Form::List, iterated(state, of)?)
}

fn map(state: &State<'_, '_>, of: &Value, arguments: &Arguments) -> ValueResult {
    let mut items = Vec::new();
    match &arguments.places[..] {
        [] => {
            let [attribute, or_else] = arguments.bind(["attribute", "default"])?;
            let path =
                attribute.ok_or_else(|| arguments.wrong("neither a filter nor an `attribute`"))?;
            for one in iterated(state, of)? {
                let found = by_path(&one, &path)?;
                items.push(match &or_else {
                    Some(or_else) if found.is_undefined() => or_else.clone(),
                    _ => found,
                });
            }
        }
        [name, rest @ ..] => {
            let name = text_or_none(Some(name))?.unwrap_or_default();
            let filter =
                named(name).ok_or_else(|| arguments.wrong(&format!("no filter `{name:.60}`")))?;
            let mut inner = Arguments::of(name, rest)?;
            inner.names.extend(arguments.names.iter().cloned());
            for one in iterated(state, of)? {
                items.push(filter(state, &one, &inner)?);
            }
        }
    }
    generated(items)
}

/// Filter of `select`, `reject`, `selectattr` and `rejectattr`.
#[derive(Clone, Copy)]
struct Choice {
    /// Whether the test checks an attribute of each item, not the item.
    by_attribute: bool,
    /// Whether the filter keeps the items that pass the test; otherwise it removes them.
    keeps: bool,
}

/// `select`, `reject`, `selectattr` and `rejectattr`.
fn chosen(
    state: &State<'_, '_>,
    of: &Value,
    arguments: &Arguments,
    Choice { by_attribute, keeps }: Choice,
) -> ValueResult {
    let (path, rest) = match arguments.places.split_first() {
        Some((path, rest)) if by_attribute => (Some(path), rest),
        None if by_attribute => return Err(arguments.wrong("no attribute")),
        _ => (None, &arguments.places[..]),
    };
    let test = match rest.first() {
        Some(name) => {
            let name = text_or_none(Some(name))?.unwrap_or_default();
            let test = checks::named(name);
            Some(test.ok_or_else(|| arguments.wrong(&format!("no test `{name:.60}`")))?)
        }
        None => None,
    };
    let inner = Arguments::of("test", rest.get(1..).unwrap_or_default())?;
    let mut items = Vec::new();
    for one in iterated(state, of)? {
        let value = part(&one, path)?;
        let holds = match test {
            Some(test) => test(state, &value, &inner)?,
            None => value.is_true(),
        };
        if holds == keeps {
            items.push(one);
        }
    }
    generated(items)
}

fn replace(state: &State<'_, '_>, of: &Value, arguments: &Arguments) -> ValueResult {
    let [old, new, count] = arguments.bind(["old", "new", "count"])?;
    let (Some(old), Some(new)) = (old, new) else {
        return Err(arguments.wrong("two texts are needed"));
    };
    let count = whole(some(count.as_ref()), -1)?;
    let (of, old, new) = (text(state, of)?, text(state, &old)?, text(state, &new)?);
    replaced(state, &of, &old, &new, count).map(Value::from)
}

fn reverse(state: &State<'_, '_>, of: &Value, arguments: &Arguments) -> ValueResult {
    arguments.bind([])?;
    match ValueKind::of(of) {
        ValueKind::Text(text) => {
            pay(state, text.len())?;
            Ok(Value::from(text.chars().rev().collect::<String>()))
        }
        _ => {
            let mut items = iterated(state, of)?;
            items.reverse();
            generated(items)
        }
    }
}

fn sum(state: &State<'_, '_>, of: &Value, arguments: &Arguments) -> ValueResult {
    let [attribute, start] = arguments.bind(["attribute", "start"])?;
    let mut found = start.unwrap_or_else(|| Value::from(0));
    for one in iterated(state, of)? {
        found = binary(state, "+", &found, &part(&one, some(attribute.as_ref()))?)?;
    }
    Ok(found)
}

fn titled(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut inside = false;
    for c in text.chars() {
        let between = c == '-' || is_blank(c) || "({[<".contains(c);
        match inside || between {
            true => out.extend(c.to_lowercase()),
            false => out.extend(c.to_uppercase()),
        }
        inside = !between;
    }
    out
}

/// `tojson` as transformers defines it, with the arguments of `json.dumps`.
fn tojson(state: &State<'_, '_>, of: &Value, arguments: &Arguments) -> ValueResult {
    let [ascii, indent, separators, sorted] =
        arguments.bind(["ensure_ascii", "indent", "separators", "sort_keys"])?;
    let indent =
        some(indent.as_ref()).map(|width| indentation(state, Some(width), 0)).transpose()?;
    let (between, behind_key) = match some(separators.as_ref()) {
        None if indent.is_some() => (",".into(), ": ".into()),
        None => (", ".into(), ": ".into()),
        Some(separators) => match &iterated(state, separators)?[..] {
            [between, behind_key] => {
                let text = |value| {
                    text_or_none(Some(value)).map(|text| text.unwrap_or_default().to_owned())
                };
                (text(between)?, text(behind_key)?)
            }
            _ => return Err(arguments.wrong("`separators` are not two")),
        },
    };
    let dump = Dump {
        ascii: truth(ascii.as_ref()),
        indent,
        between,
        behind_key,
        sorted: truth(sorted.as_ref()),
    };
    let mut out = String::new();
    json(state, of, &dump, 0, &mut out)?;
    Ok(Value::from(out))
}

fn trim(state: &State<'_, '_>, of: &Value, arguments: &Arguments) -> ValueResult {
    let [chars] = arguments.bind(["chars"])?;
    let chars = text_or_none(chars.as_ref())?;
    let text = text(state, of)?;
    Ok(Value::from(stripped(&text, "strip", chars)))
}

fn wordcount(state: &State<'_, '_>, of: &Value, arguments: &Arguments) -> ValueResult {
    arguments.bind([])?;
    let text = text(state, of)?;
    let words =
        text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty());
    Ok(Value::from(words.count()))
}
