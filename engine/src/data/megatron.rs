//! The index that Megatron writes beside a file of tokens.

use super::open::open_regular;
use crate::config::DataFormat;
use std::io::Read;
use std::path::Path;

/// The type of tokens that a Megatron index beside a file of tokens states; none without an index.
pub(super) fn index_of(tokens: &Path) -> Option<&'static str> {
    let mut start = [0; 18];
    open_regular(&tokens.with_extension("idx")).ok()?.read_exact(&mut start).ok()?;
    // The mark, a version of 8 bytes, the code of the type.
    let code = start.strip_prefix(b"MMIDIDX\0\0")?.last()?;
    Some(match code {
        1 => "uint8",
        2 => "int8",
        3 => "int16",
        4 => "int32",
        5 => "int64",
        6 => "float64",
        7 => "float32",
        8 => "uint16",
        _ => "an unknown type",
    })
}

/// The format of tokens of this type.
pub(super) fn format_of(dtype: &str) -> Option<DataFormat> {
    match dtype {
        "int16" | "uint16" => Some(DataFormat::U16),
        "int32" => Some(DataFormat::U32),
        _ => None,
    }
}
