//! Headers of safetensors files, read strictly: what the format's own reader lets pass (a name twice, a name
//! like a path, a thousand empty tensors) is refused here.

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use std::fmt;
use std::ops::Range;

/// Bytes of a header; more is an attack, or no safetensors file.
const LONGEST: u64 = 16 << 20;
const LONGEST_NAME: usize = 256;

/// An F32 tensor of one dimension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub(crate) name: String,
    pub(crate) len: usize,
}

/// A file's header: length, JSON, spaces up to a multiple of 8.
pub fn encode(entries: &[Entry]) -> Vec<u8> {
    let mut at = 0;
    let mut json = String::from("{");
    for (i, entry) in entries.iter().enumerate() {
        let end = at + 4 * entry.len;
        let comma = if i == 0 { "" } else { "," };
        // Names hold nothing that JSON would escape: see `is_name`.
        json += &format!(
            "{comma}\"{}\":{{\"dtype\":\"F32\",\"shape\":[{}],\"data_offsets\":[{at},{end}]}}",
            entry.name, entry.len
        );
        at = end;
    }
    json += "}";
    let mut json = json.into_bytes();
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend(json);
    bytes
}

/// Bytes of the whole header of a file of `file` bytes that starts with `first`.
pub fn length(first: [u8; 8], file: u64) -> Result<usize, String> {
    let json = u64::from_le_bytes(first);
    match json.checked_add(8) {
        Some(bytes) if json <= LONGEST && bytes <= file => Ok(bytes as usize),
        _ => {
            let [json, most] = [json, LONGEST].map(topology::format_bytes);
            Err(format!("its header of {json} is longer than the file or {most}"))
        }
    }
}

/// The tensors of a file of `file` bytes, in the order of their bytes, of which none is left out.
pub(crate) fn decode(header: &[u8], file: u64) -> Result<Vec<Entry>, String> {
    let json = header.get(8..).ok_or("it is too short")?;
    let raw: Raw = serde_json::from_slice(json).map_err(|e| format!("its header: {e}"))?;
    if raw.metadata.is_some() {
        return Err("its header has `__metadata__`".into());
    }
    let mut at = 0;
    let mut entries: Vec<Entry> = Vec::new();
    for (name, fields) in raw.tensors {
        let entry = fields.check(at..file.saturating_sub(header.len() as u64));
        let len = entry.map_err(|problem| format!("`{}`: {problem}", name.escape_debug()))?;
        at += 4 * len as u64;
        entries.push(Entry { name, len });
    }
    if header.len() as u64 + at != file {
        return Err(format!("its tensors end at byte {at} of the data, which does not"));
    }
    Ok(entries)
}

/// Letters, digits, `_`, `-`, and single dots between them: nothing that could lead anywhere as a path, or out of JSON.
pub(super) fn is_name(name: &str) -> bool {
    let word = |w: &str| {
        !w.is_empty() && w.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-')
    };
    name.len() <= LONGEST_NAME && name.split('.').all(word)
}

/// What a header says of a tensor, unchecked.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Fields {
    pub(crate) dtype: String,
    pub(crate) shape: Vec<u64>,
    pub(crate) data_offsets: [u64; 2],
}

impl Fields {
    /// Elements, when it lies where the former one ended and within the data.
    fn check(&self, left: Range<u64>) -> Result<usize, String> {
        let [len] = self.shape[..] else {
            return Err("has more or less than one dimension".into());
        };
        if self.dtype != "F32" {
            return Err(format!("is {}, not F32", self.dtype.escape_debug()));
        }
        if len == 0 {
            return Err("has no elements".into());
        }
        let end = len.checked_mul(4).and_then(|bytes| bytes.checked_add(left.start));
        let [from, to] = self.data_offsets;
        if from != left.start || Some(to) != end || to > left.end {
            return Err(format!("{len} elements do not stand at {from}..{to}"));
        }
        Ok(len as usize)
    }
}

/// In the order of the text; a name twice, or one that is none, is an error.
#[derive(Default)]
pub(crate) struct Raw {
    pub(crate) tensors: Vec<(String, Fields)>,
    /// Texts that say nothing of tensors.
    metadata: Option<std::collections::BTreeMap<String, String>>,
}

impl<'de> Deserialize<'de> for Raw {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(RawVisitor)
    }
}

struct RawVisitor;

impl<'de> Visitor<'de> for RawVisitor {
    type Value = Raw;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("tensors by name")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Raw, A::Error> {
        let mut seen = std::collections::BTreeSet::new();
        let mut raw = Raw::default();
        while let Some(name) = map.next_key::<String>()? {
            let shown = name.escape_debug();
            if !is_name(&name) {
                return Err(serde::de::Error::custom(format!(
                    "`{shown:.300}` is no tensor's name"
                )));
            }
            if !seen.insert(name.clone()) {
                return Err(serde::de::Error::custom(format!("`{shown}` stands there twice")));
            }
            if name == "__metadata__" {
                raw.metadata = Some(map.next_value()?);
            } else {
                raw.tensors.push((name, map.next_value()?));
            }
        }
        Ok(raw)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(json: &str, data: u64) -> Result<Vec<Entry>, String> {
        let mut header = (json.len() as u64).to_le_bytes().to_vec();
        header.extend(json.as_bytes());
        let bytes = header.len() as u64 + data;
        length(header[..8].try_into().unwrap(), bytes)?;
        decode(&header, bytes)
    }

    fn entry(name: &str, len: usize) -> Entry {
        Entry { name: name.into(), len }
    }

    #[test]
    fn what_is_written_is_read_back_by_the_formats_own_reader_too() {
        for entries in [vec![], vec![entry("h.0.ln_1.weight.master", 3), entry("b", 5)]] {
            let mut bytes = encode(&entries);
            assert!(bytes.len().is_multiple_of(8));
            let data: usize = entries.iter().map(|e| 4 * e.len).sum();
            let whole = (bytes.len() + data) as u64;
            assert_eq!(length(bytes[..8].try_into().unwrap(), whole), Ok(bytes.len()));
            assert_eq!(decode(&bytes, whole).unwrap(), entries);
            bytes.resize(whole as usize, 0);
            assert_eq!(safetensors::SafeTensors::deserialize(&bytes).unwrap().len(), entries.len());
        }
    }

    #[test]
    fn hostile_headers_are_refused() {
        let tensor = |name: &str| format!("\"{name}\":{}", at(0, 4));
        fn at(from: u64, to: u64) -> String {
            format!("{{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[{from},{to}]}}")
        }
        let one = |name: &str| format!("{{{}}}", tensor(name));
        assert_eq!(file(&one("w"), 4).unwrap(), [entry("w", 1)]);
        let long = "x".repeat(300);
        for name in [
            "",
            ".",
            "..",
            "../w",
            "/etc/passwd",
            "a//b",
            "a..b",
            "w.",
            "w\\n",
            "\\u001b[2J",
            "é",
            &long,
        ] {
            let error = file(&one(name), 4).unwrap_err();
            assert!(error.contains("no tensor's name"), "{name}: {error}");
            assert!(!error.contains(['\n', '\u{1b}']), "{error:?}");
        }
        let twice = format!("{{{},{}}}", tensor("w"), tensor("w"));
        assert!(file(&twice, 4).unwrap_err().contains("twice"));
        for (json, data) in [
            (one("w"), 8),
            (one("w"), 0),
            (format!("{{\"w\":{},\"v\":{}}}", at(0, 4), at(0, 4)), 4),
            (format!("{{\"w\":{},\"v\":{}}}", at(0, 4), at(8, 12)), 12),
            (one("w").replace("F32", "F16"), 4),
            (one("w").replace("[1]", "[1,1]"), 4),
            (one("w").replace("[1]", "[-1]"), 4),
            (one("w").replace("[1]", "[4611686018427387905]"), 4),
            (one("w").replace("[0,4]", "[0,18446744073709551615]"), 4),
            (one("w").replace("[1]", "[0]").replace("[0,4]", "[0,0]"), 0),
            (one("w").replace("\"F32\"", "\"F32\",\"dtype\":\"F32\""), 4),
            (one("w").replace("\"dtype\"", "\"more\":1,\"dtype\""), 4),
            (one("w") + "x", 4),
            ("[".repeat(100_000), 4),
            (String::new(), 4),
        ] {
            assert!(file(&json, data).is_err(), "{json:.200}");
        }
        for first in [u64::MAX, u64::MAX - 7, LONGEST + 1, 93] {
            assert!(length(first.to_le_bytes(), 100).is_err(), "{first}");
        }
    }
}
