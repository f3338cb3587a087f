//! Checks a topology file before hwloc parses it.
//!
//! hwloc trusts its XML: it asserts, allocates by the numbers in it, and expands entities through
//! libxml2. This file reads the text once, keeps nothing, and refuses everything that an export of
//! hwloc 2 does not contain.

use crate::Error;

/// Largest file in bytes. The export of a DGX A100 is 0.3 MB.
const MOST_BYTES: usize = 64 << 20;
const MOST_TAGS: usize = 400_000;
const MOST_DEPTH: usize = 64;
const MOST_OBJECTS_IN_A_MATRIX: u64 = 1024;
/// Largest attribute in characters. A set of 16,384 CPUs has 5,600.
const MOST_IN_AN_ATTRIBUTE: usize = 16 << 10;

/// Refuses text that is no hwloc 2 topology, in one pass.
pub(crate) fn check(text: &str) -> Result<(), Error> {
    if text.len() > MOST_BYTES {
        return refuse(format!("{} bytes, at most {MOST_BYTES} are read", text.len()));
    }
    let mut open: Vec<&str> = Vec::new();
    let (mut tags, mut closed_root, mut rest) = (0, false, text);
    while let Some(start) = rest.find('<') {
        rest = &rest[start..];
        if rest.starts_with("<!") {
            declaration(&rest[..rest.find('>').map_or(rest.len(), |end| end + 1)])?;
        }
        let end = if rest.starts_with("<!--") {
            rest.find("-->").map(|end| end + 3)
        } else {
            end_of_tag(rest)
        };
        let Some(end) = end else {
            return refuse("the file is cut off inside a tag");
        };
        let tag = &rest[..end];
        rest = &rest[end..];
        tags += 1;
        if tags > MOST_TAGS {
            return refuse(format!("more than {MOST_TAGS} tags"));
        }
        if tag.starts_with("<!") {
            continue;
        }
        if let Some(name) = tag.strip_prefix("</") {
            let name = name.trim_end_matches('>').trim();
            if open.pop() != Some(name) {
                return refuse(format!("</{name}> closes what is not open"));
            }
            closed_root = open.is_empty();
        } else if !tag.starts_with("<?") {
            if closed_root {
                return refuse("something follows the end of the topology");
            }
            element(tag, open.last().copied())?;
            if !tag.ends_with("/>") {
                open.push(name_of(tag));
            }
            if open.len() > MOST_DEPTH {
                return refuse(format!("more than {MOST_DEPTH} tags inside one another"));
            }
        }
    }
    match open.last() {
        Some(name) => refuse(format!("the file is cut off: <{name}> is not closed")),
        None if closed_root => Ok(()),
        None => refuse("there is no <topology> in it"),
    }
}

/// Refuses a synthetic description that is long or describes more CPUs than any box has.
pub(crate) fn check_synthetic(text: &str) -> Result<(), Error> {
    if text.len() > 4096 {
        return refuse("the description is longer than 4096 characters");
    }
    // The counts of levels multiply; the numbers in attributes such as (size=1TB) do not.
    let mut objects: u64 = 1;
    for word in text.split_whitespace().filter(|word| !word.starts_with(['(', '['])) {
        let count = word.split(['(', '[']).next().unwrap_or(word);
        let count = count.rsplit(':').next().unwrap_or(count);
        if let Ok(count) = count.parse::<u64>() {
            objects = objects.saturating_mul(count.max(1));
        }
    }
    if objects > 16 << 10 {
        return refuse(format!("it describes {objects} CPUs, at most {} are read", 16 << 10));
    }
    Ok(())
}

/// Returns the error that a text describes no box.
pub(crate) fn refuse<T>(why: impl Into<String>) -> Result<T, Error> {
    Err(Error::NotABox { why: why.into() })
}

/// The text after the `>` that ends the tag at the start of `text`. A `>` in quotes does not end
/// it.
fn end_of_tag(text: &str) -> Option<usize> {
    let mut quote = None;
    for (at, byte) in text.bytes().enumerate() {
        match (quote, byte) {
            (None, b'"' | b'\'') => quote = Some(byte),
            (None, b'>') => return Some(at + 1),
            (None, b'<') if at > 0 => return None,
            (Some(open), _) if open == byte => quote = None,
            _ => {}
        }
    }
    None
}

fn name_of(tag: &str) -> &str {
    let name = tag.trim_start_matches('<');
    name.split([' ', '\t', '\r', '\n', '/', '>']).next().unwrap_or(name)
}

/// Accepts `<!DOCTYPE topology SYSTEM "hwloc2.dtd">` and comments, the only declarations that hwloc
/// writes.
fn declaration(tag: &str) -> Result<(), Error> {
    let plain = tag.starts_with("<!--") || (tag.starts_with("<!DOCTYPE") && !tag.contains('['));
    if plain { Ok(()) } else { refuse("it declares entities or other things; nothing is expanded") }
}

fn element(tag: &str, parent: Option<&str>) -> Result<(), Error> {
    let name = name_of(tag);
    match (name, parent) {
        ("topology", None) => {
            let version = attribute(tag, "version").unwrap_or("1");
            if !version.starts_with("2.") {
                return refuse(format!(
                    "it is in format {version}, and only 2.x is read; with hwloc's tools: \
                     lstopo --export-xml-flags v2 (hwloc 3), or export it again with hwloc 2"
                ));
            }
        }
        (_, None) => return refuse(format!("it starts with <{name}>, not with <topology>")),
        ("object", Some("topology" | "object")) => object(tag)?,
        (
            "distances2" | "distances2hetero" | "support" | "memattr" | "cpukind" | "info",
            Some("topology"),
        )
        | ("info" | "page_type" | "userdata", Some("object")) => {}
        (
            "indexes" | "u64values" | "info" | "memattr_value" | "value",
            Some("distances2" | "distances2hetero" | "memattr" | "cpukind"),
        ) => {}
        (_, Some(parent)) => return refuse(format!("<{name}> cannot stand in <{parent}>")),
    }
    for key in ["nbobjs", "length"] {
        let most = if key == "nbobjs" { MOST_OBJECTS_IN_A_MATRIX } else { 32 << 20 };
        match attribute(tag, key).map(str::parse::<u64>) {
            Some(Ok(n)) if n > most => return refuse(format!("{key} is {n}, at most {most}")),
            Some(Err(_)) => return refuse(format!("{key} is no number in <{name}>")),
            _ => {}
        }
    }
    if tag.split('"').any(|part| part.len() > MOST_IN_AN_ATTRIBUTE) {
        return refuse(format!("an attribute of <{name}> is longer than {MOST_IN_AN_ATTRIBUTE}"));
    }
    if tag.contains("&") && !only_plain_references(tag) {
        return refuse(format!("<{name}> refers to an entity"));
    }
    Ok(())
}

fn object(tag: &str) -> Result<(), Error> {
    let kind = attribute(tag, "type").unwrap_or("");
    if kind.is_empty() {
        return refuse("an object has no type");
    }
    if let Some(index) = attribute(tag, "os_index")
        && index.parse::<u32>().is_err()
    {
        return refuse(format!("os_index {index:?} is no number"));
    }
    for key in ["cpuset", "nodeset"] {
        if attribute(tag, key).is_some_and(|set| !is_set(set)) {
            return refuse(format!("the {key} of a {kind} is no set"));
        }
    }
    Ok(())
}

/// Whether the text is a set in hwloc's form: words of 32 bits in hexadecimal, most significant
/// first, commas between; an empty word is 0.
fn is_set(text: &str) -> bool {
    let word = |word: &str| {
        let digits = word.strip_prefix("0x").unwrap_or(word);
        digits.len() <= 8 && digits.bytes().all(|b| b.is_ascii_hexdigit())
    };
    // "0xf...f" is an infinite set.
    text.split(',').count() <= 512 && text.split(',').all(word)
}

/// Whether all references are `&amp;` and the like or numbers; any other reference is an entity.
fn only_plain_references(tag: &str) -> bool {
    tag.split('&').skip(1).all(|rest| {
        let name = rest.split(';').next().unwrap_or(rest);
        ["amp", "lt", "gt", "quot", "apos"].contains(&name) || name.starts_with('#')
    })
}

/// The value of `key="..."`.
fn attribute<'a>(tag: &'a str, key: &str) -> Option<&'a str> {
    let mut parts = tag.split('"');
    while let (Some(before), Some(value)) = (parts.next(), parts.next()) {
        let name = before.trim_end().strip_suffix('=')?.trim_end();
        if name.rsplit([' ', '\t', '\r', '\n']).next() == Some(key) {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn why(text: &str) -> String {
        check(text).unwrap_err().to_string()
    }

    #[test]
    fn what_is_no_export_of_hwloc_2_is_refused_with_the_reason() {
        let bomb = "<!DOCTYPE topology [<!ENTITY a \"aaaa\"><!ENTITY b \"&a;&a;\">]>\
                    <topology version=\"2.0\">&b;</topology>";
        let nested = "<object type=\"Group\">".repeat(80);
        for (text, reason) in [
            ("", "no <topology>"),
            ("plain text", "no <topology>"),
            ("<html></html>", "starts with <html>"),
            (bomb, "declares entities"),
            ("<topology version=\"3.0\"></topology>", "format 3.0"),
            ("<topology></topology>", "format 1"),
            ("<topology version=\"2.0\">", "is not closed"),
            ("<topology version=\"2.0\"><obj", "cut off inside a tag"),
            ("<topology version=\"2.0\"></object>", "closes what is not open"),
            ("<topology version=\"2.0\"><script/></topology>", "cannot stand in"),
            ("<topology version=\"2.0\"><object/></topology>", "no type"),
            ("<topology version=\"2.0\"></topology><topology version=\"2.0\">", "follows the end"),
            (
                "<topology version=\"2.0\"><object type=\"PU\" os_index=\"-1\"/></topology>",
                "no number",
            ),
            (
                "<topology version=\"2.0\"><object type=\"PU\" cpuset=\"0xf...f\"/></topology>",
                "no set",
            ),
            (
                "<topology version=\"2.0\"><distances2 nbobjs=\"99999999\"/></topology>",
                "at most 1024",
            ),
            ("<topology version=\"2.0\"><object type=\"&x;\"/></topology>", "refers to an entity"),
        ] {
            let why = why(text);
            assert!(why.contains(reason), "{text:.60}: {why}");
        }
        let deep = why(&format!("<topology version=\"2.0\">{nested}"));
        assert!(deep.contains("inside one another"), "{deep}");
        let wide = "<info/>".repeat(MOST_TAGS);
        assert!(why(&format!("<topology version=\"2.0\">{wide}")).contains("tags"));
    }

    #[test]
    fn quotes_and_comments_may_hold_brackets() {
        let text = "<?xml version=\"1.0\"?><!DOCTYPE topology SYSTEM \"hwloc2.dtd\"><!-- <a> -->\
                    <topology version=\"2.0\"><object type=\"Machine\" name=\"a &gt; b\"/></topology>";
        assert!(check(text).is_ok());
    }
}
