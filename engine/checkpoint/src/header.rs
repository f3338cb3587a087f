//! Headers of safetensors files, read strictly. Unlike the format's own reader, this one refuses a
//! duplicate name, a name like a path, and data that belongs to no tensor or to several.

use files::foreign_text::{foreign, reason};
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::{Map, Value, json};
use std::fmt;

/// Longest header that is read, in bytes; a longer one is an attack or belongs to another format.
const LONGEST: u64 = 16 << 20;
const LONGEST_NAME: usize = 256;

/// Largest number of dimensions of a tensor.
const MOST_DIMENSIONS: usize = 8;

/// A tensor in a file of any program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TensorEntry {
    pub(crate) name: String,
    /// Type of an element, such as `F32`.
    pub(crate) dtype: String,
    pub(crate) shape: Vec<usize>,
    /// Offset of the first byte of the tensor in the file.
    pub(crate) at: u64,
}

impl TensorEntry {
    /// Bytes of an element.
    pub(crate) fn width(&self) -> u64 {
        width(&self.dtype).unwrap_or_else(|| unreachable!("{} was accepted", self.dtype))
    }
}

/// Bytes of an element of type `dtype`; `None` for an unknown type.
fn width(dtype: &str) -> Option<u64> {
    match dtype {
        "BOOL" | "U8" | "I8" => Some(1),
        "F16" | "BF16" | "U16" | "I16" => Some(2),
        "F32" | "U32" | "I32" => Some(4),
        "F64" | "U64" | "I64" => Some(8),
        _ => None,
    }
}

/// An F32 tensor of one dimension, as onebox writes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub(crate) name: String,
    pub(crate) len: usize,
}

/// Encodes a header: length, JSON, and spaces up to a multiple of 8.
pub fn encode(entries: &[Entry]) -> Vec<u8> {
    let mut at = 0;
    let mut json = String::from("{");
    for (i, entry) in entries.iter().enumerate() {
        let end = at + 4 * entry.len;
        let comma = if i == 0 { "" } else { "," };
        // Names contain no character that JSON escapes: see `is_name`.
        json += &format!(
            "{comma}\"{}\":{{\"dtype\":\"F32\",\"shape\":[{}],\"data_offsets\":[{at},{end}]}}",
            entry.name, entry.len
        );
        at = end;
    }
    json += "}";
    framed(json)
}

/// Encodes a header with the keys of `all` and with tensors of one type, `width` bytes per number.
/// The tensors are names and shapes in the order of their data.
pub fn of_shapes(
    all: Map<String, Value>,
    dtype: &str,
    width: u64,
    tensors: impl IntoIterator<Item = (String, Vec<usize>)>,
) -> Vec<u8> {
    let one = |(name, shape): (String, Vec<usize>)| {
        let bytes = width * shape.iter().product::<usize>() as u64;
        HeaderEntry { name, dtype: dtype.to_owned(), shape, bytes }
    };
    of_entries(all, tensors.into_iter().map(one))
}

/// A tensor of any type in a header to encode.
#[derive(Clone, Debug)]
pub(crate) struct HeaderEntry {
    pub(crate) name: String,
    /// Type of an element, such as `BF16`.
    pub(crate) dtype: String,
    pub(crate) shape: Vec<usize>,
    /// Bytes of all elements.
    pub(crate) bytes: u64,
}

/// Encodes a header with the keys of `all` and with tensors in the order of their data.
pub(crate) fn of_entries(
    mut all: Map<String, Value>,
    tensors: impl IntoIterator<Item = HeaderEntry>,
) -> Vec<u8> {
    let mut at = 0;
    for HeaderEntry { name, dtype, shape, bytes } in tensors {
        let end = at + bytes;
        all.insert(name, json!({ "dtype": dtype, "shape": shape, "data_offsets": [at, end] }));
        at = end;
    }
    framed(Value::Object(all).to_string())
}

fn framed(json: String) -> Vec<u8> {
    let mut json = json.into_bytes();
    json.resize(json.len().next_multiple_of(8), b' ');
    [(json.len() as u64).to_le_bytes().to_vec(), json].concat()
}

/// Bytes of the whole header of a file of `file` bytes; `first` are the first 8 bytes of the file.
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

/// The tensors of a file of `file` bytes, in file order. They must fill the data without overlap.
///
/// # Errors
/// The fault in the header.
pub(crate) fn decode(header: &[u8], file: u64) -> Result<Vec<TensorEntry>, String> {
    tensors(parse(header)?, header.len(), file)
}

/// The tensors of a rank's file, as given to [`encode`].
///
/// # Errors
/// The fault in the header, or a difference from the headers of onebox.
pub(crate) fn decode_vectors(header: &[u8], file: u64) -> Result<Vec<Entry>, String> {
    let raw = parse(header)?;
    if raw.metadata.is_some() {
        return Err("its header has `__metadata__`".into());
    }
    let vector = |TensorEntry { name, dtype, shape, .. }: TensorEntry| match shape[..] {
        [len] if len > 0 && dtype == "F32" => Ok(Entry { name, len }),
        _ => Err(format!("`{name}` is {dtype} {shape:?}, not a vector of F32")),
    };
    tensors(raw, header.len(), file)?.into_iter().map(vector).collect()
}

fn parse(header: &[u8]) -> Result<RawHeader, String> {
    let json = header.get(8..).ok_or("it is too short")?;
    serde_json::from_slice(json).map_err(|e| format!("its header: {}", reason(e)))
}

fn tensors(raw: RawHeader, header: usize, file: u64) -> Result<Vec<TensorEntry>, String> {
    let header = header as u64;
    let data = file.checked_sub(header).ok_or("it is too short")?;
    let mut found = Vec::new();
    for (name, fields) in raw.tensors {
        let shape = fields.shape().map_err(|why| format!("`{}`: {why}", foreign(&name)))?;
        let Fields { dtype, data_offsets: [from, to], .. } = fields;
        found.push(([from, to], TensorEntry { name, dtype, shape, at: header }));
    }
    found.sort_by_key(|(range, _)| *range);
    let mut at = 0;
    for ([from, to], tensor) in &mut found {
        if *from != at {
            let name = foreign(&tensor.name);
            let what = if *from < at { "overlaps another" } else { "has a hole before it" };
            return Err(format!("`{name}` at bytes {from}..{to} of the data {what}"));
        }
        at = *to;
        tensor.at += *from;
    }
    if at != data {
        return Err(format!("its tensors end at byte {at} of the data, which has {data}"));
    }
    Ok(found.into_iter().map(|(_, tensor)| tensor).collect())
}

/// Whether a name has only letters, digits, `_`, `-` and single dots: safe in a path and in JSON.
pub(super) fn is_name(name: &str) -> bool {
    let word = |w: &str| {
        !w.is_empty() && w.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-')
    };
    name.len() <= LONGEST_NAME && name.split('.').all(word)
}

/// The entry of a tensor in a header, before any check.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

impl Fields {
    /// The shape, if its bytes equal the length of the range.
    fn shape(&self) -> Result<Vec<usize>, String> {
        let Self { dtype, shape, data_offsets: [from, to] } = self;
        let width = width(dtype).ok_or_else(|| format!("its type is {}", foreign(dtype)))?;
        if shape.len() > MOST_DIMENSIONS {
            return Err(format!("it has {} dimensions", shape.len()));
        }
        let bytes = shape.iter().try_fold(width, |bytes, n| bytes.checked_mul(*n));
        match bytes {
            Some(bytes) if to.checked_sub(*from) == Some(bytes) => {}
            _ => return Err(format!("{dtype} {shape:?} does not stand at {from}..{to}")),
        }
        let shape = shape.iter().map(|n| usize::try_from(*n).map_err(|e| e.to_string()));
        shape.collect()
    }
}

/// Content of a header in the order of the text. A duplicate or invalid name is an error.
#[derive(Default)]
struct RawHeader {
    tensors: Vec<(String, Fields)>,
    /// The free texts of `__metadata__`.
    metadata: Option<std::collections::BTreeMap<String, String>>,
}

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = RawHeader;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("tensors by name")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
        let mut seen = std::collections::BTreeSet::new();
        let mut raw = RawHeader::default();
        while let Some(name) = map.next_key::<String>()? {
            let shown = foreign(&name);
            if !is_name(&name) {
                return Err(serde::de::Error::custom(format!("`{shown}` is no tensor's name")));
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
        decode_vectors(&header, bytes)
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
            assert_eq!(decode_vectors(&bytes, whole).unwrap(), entries);
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

    fn foreign(json: &str, data: u64) -> Result<Vec<TensorEntry>, String> {
        let mut header = (json.len() as u64).to_le_bytes().to_vec();
        header.extend(json.as_bytes());
        let bytes = header.len() as u64 + data;
        length(header[..8].try_into().unwrap(), bytes)?;
        decode(&header, bytes)
    }

    fn tensor(dtype: &str, shape: &str, from: u64, to: u64) -> String {
        format!("{{\"dtype\":\"{dtype}\",\"shape\":{shape},\"data_offsets\":[{from},{to}]}}")
    }

    #[test]
    fn tensors_may_stand_in_any_order_and_of_any_type() {
        let json = format!(
            "{{\"__metadata__\":{{\"format\":\"pt\"}},\"b\":{},\"a.weight\":{}}}",
            tensor("F16", "[2,3]", 4, 16),
            tensor("F32", "[]", 0, 4)
        );
        let found = foreign(&json, 16).unwrap();
        let names: Vec<_> = found.iter().map(|f| f.name.as_str()).collect();
        assert_eq!(names, ["a.weight", "b"]);
        let start = 8 + json.len() as u64;
        assert_eq!((found[1].at, &found[1].shape[..]), (start + 4, &[2, 3][..]));
    }

    /// The format's own reader accepts empty tensors too; a model, and not a header, may refuse
    /// them.
    #[test]
    fn empty_tensors_stand_between_others() {
        let json = format!(
            "{{\"c\":{},\"b\":{},\"a\":{},\"d\":{}}}",
            tensor("F32", "[2,0,3]", 8, 8),
            tensor("F16", "[4]", 0, 8),
            tensor("F32", "[0]", 0, 0),
            tensor("U8", "[1]", 8, 9),
        );
        let found: Vec<_> =
            foreign(&json, 9).unwrap().into_iter().map(|f| (f.name, f.shape)).collect();
        let named = |name: &str, shape: &[usize]| (name.to_owned(), shape.to_vec());
        let all = [named("a", &[0]), named("b", &[4]), named("c", &[2, 0, 3]), named("d", &[1])];
        assert_eq!(found, all);
        let mut whole = (json.len() as u64).to_le_bytes().to_vec();
        whole.extend(json.as_bytes());
        whole.extend([0; 9]);
        assert_eq!(safetensors::SafeTensors::deserialize(&whole).unwrap().len(), 4);
    }

    #[test]
    fn hostile_headers_of_others_are_refused() {
        let two = |a: &str, b: &str| format!("{{\"a\":{a},\"b\":{b}}}");
        let one = |fields: &str| format!("{{\"a\":{fields}}}");
        let good = tensor("F32", "[1]", 0, 4);
        assert!(foreign(&one(&good), 4).is_ok());
        for (json, data, message) in [
            (two(&good, &good), 4, "overlaps"),
            (two(&tensor("F32", "[2]", 0, 8), &tensor("F32", "[2]", 4, 12)), 12, "overlaps"),
            (two(&good, &tensor("F32", "[1]", 8, 12)), 12, "hole"),
            (one(&tensor("F32", "[1]", 4, 8)), 8, "hole"),
            (one(&good), 8, "end at byte 4"),
            (one(&good), 0, "end at byte 4"),
            (one(&tensor("F32", "[2]", 0, 4)), 4, "does not stand"),
            (one(&tensor("F32", "[1]", 4, 0)), 4, "does not stand"),
            (one(&tensor("F32", "[0]", 0, 4)), 4, "does not stand"),
            (two(&tensor("F32", "[2]", 0, 8), &tensor("F32", "[0]", 4, 4)), 8, "overlaps"),
            (one(&tensor("F32", "[4294967296,4294967296,0]", 0, 0)), 0, "does not stand"),
            (one(&tensor("F32", "[4294967296,4294967296]", 0, 0)), 0, "does not stand"),
            (one(&tensor("F32", "[18446744073709551615]", 0, 4)), 4, "does not stand"),
            (one(&tensor("F32", "[1]", 0, u64::MAX)), 4, "does not stand"),
            (one(&tensor("F32", "[1]", u64::MAX - 3, u64::MAX)), 4, "does not stand"),
            (one(&tensor("F32", "[1,1,1,1,1,1,1,1,1]", 0, 4)), 4, "9 dimensions"),
            (one(&tensor("F4", "[8]", 0, 4)), 4, "type is F4"),
            (one(&tensor("\\u001b[2J", "[8]", 0, 4)), 4, "type is"),
            (one(&tensor("F32", "[-1]", 0, 4)), 4, "its header"),
            (one(&tensor("F32", "[1.5]", 0, 4)), 4, "its header"),
            (one(&tensor("F32", "[1e400]", 0, 4)), 4, "its header"),
            (two(&good, &good).replace("\"b\"", "\"a\""), 4, "twice"),
            (one(&good).replace("\"a\"", "\"../a\""), 4, "no tensor's name"),
            (one(&good).replace("\"a\"", "\"/etc/passwd\""), 4, "no tensor's name"),
            (one(&good).replace("\"dtype\"", "\"code\":1,\"dtype\""), 4, "its header"),
            ("{\"__metadata__\":{\"a\":1}}".into(), 0, "its header"),
            (format!("{{\"a\":{}", "[".repeat(100_000)), 4, "its header"),
        ] {
            let why = foreign(&json, data).unwrap_err();
            assert!(why.contains(message) && !why.contains('\u{1b}'), "{json:.200}: {why}");
        }
    }
}
