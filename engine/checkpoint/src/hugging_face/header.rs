//! Headers of safetensors files that others wrote: names that are no paths, each once; types and shapes that are possible;
//! ranges that are the whole of the data, none of it twice.

use crate::header::{Fields, Raw};

/// Most dimensions of a tensor.
const MOST_DIMENSIONS: usize = 8;

/// A tensor in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Foreign {
    pub(super) name: String,
    /// `F32`
    pub(super) dtype: String,
    pub(super) shape: Vec<usize>,
    /// First byte in the file.
    pub(super) at: u64,
}

/// Bytes of an element.
pub(super) fn width(dtype: &str) -> Option<u64> {
    match dtype {
        "BOOL" | "U8" | "I8" => Some(1),
        "F16" | "BF16" | "U16" | "I16" => Some(2),
        "F32" | "U32" | "I32" => Some(4),
        "F64" | "U64" | "I64" => Some(8),
        _ => None,
    }
}

/// The tensors of a file of `file` bytes whose first ones, up to the data, are `header`.
pub(super) fn decode(header: &[u8], file: u64) -> Result<Vec<Foreign>, String> {
    let json = header.get(8..).ok_or("it is too short")?;
    let raw: Raw = serde_json::from_slice(json).map_err(|e| format!("its header: {e}"))?;
    let data = file.checked_sub(header.len() as u64).ok_or("it is too short")?;
    let mut found = Vec::new();
    for (name, fields) in raw.tensors {
        let shown = name.escape_debug().to_string();
        let (shape, range) = possible(&fields).map_err(|why| format!("`{shown}`: {why}"))?;
        let Fields { dtype, .. } = fields;
        found.push((range, Foreign { name, dtype, shape, at: 0 }));
    }
    found.sort_by_key(|(range, _)| *range);
    let mut at = 0;
    for ([from, to], foreign) in &mut found {
        if *from != at {
            let name = foreign.name.escape_debug();
            let what = if *from < at { "overlaps another" } else { "has a hole before it" };
            return Err(format!("`{name}` at bytes {from}..{to} of the data {what}"));
        }
        at = *to;
        foreign.at = header.len() as u64 + *from;
    }
    if at != data {
        return Err(format!("its tensors end at byte {at} of the data, which has {data}"));
    }
    Ok(found.into_iter().map(|(_, foreign)| foreign).collect())
}

/// Shape and range, when they are of one size.
fn possible(fields: &Fields) -> Result<(Vec<usize>, [u64; 2]), String> {
    let Fields { dtype, shape, data_offsets: [from, to] } = fields;
    let width = width(dtype).ok_or_else(|| format!("its type is {}", dtype.escape_debug()))?;
    if shape.len() > MOST_DIMENSIONS {
        return Err(format!("it has {} dimensions", shape.len()));
    }
    let bytes = shape.iter().try_fold(width, |bytes, n| bytes.checked_mul(*n));
    match bytes {
        Some(bytes) if to.checked_sub(*from) == Some(bytes) => {}
        _ => return Err(format!("{dtype} {shape:?} does not stand at {from}..{to}")),
    }
    let shape: Result<Vec<usize>, _> = shape.iter().map(|n| usize::try_from(*n)).collect();
    Ok((shape.map_err(|e| e.to_string())?, [*from, *to]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(json: &str, data: u64) -> Result<Vec<Foreign>, String> {
        let mut header = (json.len() as u64).to_le_bytes().to_vec();
        header.extend(json.as_bytes());
        let bytes = header.len() as u64 + data;
        crate::header::length(header[..8].try_into().unwrap(), bytes)?;
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
        let found = file(&json, 16).unwrap();
        let names: Vec<_> = found.iter().map(|f| f.name.as_str()).collect();
        assert_eq!(names, ["a.weight", "b"]);
        let start = 8 + json.len() as u64;
        assert_eq!((found[1].at, &found[1].shape[..]), (start + 4, &[2, 3][..]));
    }

    /// As the format's own reader has them; whether a model may have such tensors is not for a header to say.
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
            file(&json, 9).unwrap().into_iter().map(|f| (f.name, f.shape)).collect();
        let named = |name: &str, shape: &[usize]| (name.to_owned(), shape.to_vec());
        let all = [named("a", &[0]), named("b", &[4]), named("c", &[2, 0, 3]), named("d", &[1])];
        assert_eq!(found, all);
        let mut whole = (json.len() as u64).to_le_bytes().to_vec();
        whole.extend(json.as_bytes());
        whole.extend([0; 9]);
        assert_eq!(safetensors::SafeTensors::deserialize(&whole).unwrap().len(), 4);
    }

    #[test]
    fn hostile_headers_are_refused() {
        let two = |a: &str, b: &str| format!("{{\"a\":{a},\"b\":{b}}}");
        let one = |fields: &str| format!("{{\"a\":{fields}}}");
        let good = tensor("F32", "[1]", 0, 4);
        assert!(file(&one(&good), 4).is_ok());
        for (json, data, said) in [
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
            let why = file(&json, data).unwrap_err();
            assert!(why.contains(said) && !why.contains('\u{1b}'), "{json:.200}: {why}");
        }
    }
}
