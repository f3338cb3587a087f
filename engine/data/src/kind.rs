//! Guesses the kind of a file from its first bytes and its name. Training on any bytes is possible,
//! but most kinds of files are a mistake of the user.

use config::DataFormat;
use files::input;
use std::fs::File;
use std::io;
use std::path::Path;

/// Number of first bytes that are examined.
const HEAD: usize = 64 << 10;

/// A kind of file that is not plain text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FileKind {
    /// Description; it completes "it is".
    pub(super) what: &'static str,
    /// Remedy: how to train on such a file.
    pub(super) remedy: &'static str,
}

const JSON_LINES: FileKind = FileKind {
    what: "JSON lines",
    remedy: "set data.format: Chat for messages, or Jsonl(text: \"text\") for texts",
};
const JSON: FileKind = FileKind { what: "JSON", remedy: JSON_LINES.remedy };
const TABLE: FileKind = FileKind { what: "a table, as its name says", remedy: JSON_LINES.remedy };
const LISTS: FileKind = FileKind {
    what: "JSON lines with a list in each, not an object",
    remedy: "make an object of each, with jq -c '{messages: .}'",
};
/// A file in a directory of rows without a file name of JSON lines.
pub(super) const NO_ROWS: FileKind =
    FileKind { what: "no JSON lines, by its name", remedy: "call it .jsonl, or name it by a glob" };
const GZIP: FileKind = FileKind { what: "compressed (gzip)", remedy: "unpack it, with gunzip" };
const ZSTD: FileKind = FileKind { what: "compressed (zstd)", remedy: "unpack it, with unzstd" };
const NO_GZIP: FileKind = FileKind {
    what: "named as a gzip file, and is none",
    remedy: "give it the name of what it is",
};
const NO_ZSTD: FileKind =
    FileKind { what: "named as a zstd file, and is none", remedy: NO_GZIP.remedy };
const NO_PARQUET: FileKind =
    FileKind { what: "named as a Parquet table, and is none", remedy: NO_GZIP.remedy };
const LFS_POINTER: FileKind = FileKind {
    what: "a pointer of Git LFS, and not the file itself",
    remedy: "get the file, with git lfs pull",
};
const XZ: FileKind = FileKind { what: "compressed (xz)", remedy: "unpack it, with unxz" };
const BZIP2: FileKind = FileKind { what: "compressed (bzip2)", remedy: "unpack it, with bunzip2" };
const ZIP: FileKind = FileKind { what: "a zip archive", remedy: "unpack it" };
const PARQUET: FileKind = FileKind { what: "a Parquet table", remedy: JSON_LINES.remedy };
/// The first bytes of a file of `Dataset.save_to_disk`, or of another Arrow file.
pub(super) const ARROW: FileKind =
    FileKind { what: "an Arrow table", remedy: "write it as JSON lines, with datasets or pyarrow" };
/// A compressed file of a directory that also has its text.
pub(super) const PACKED_AND_UNPACKED: FileKind = FileKind {
    what: "compressed, and the file of that name without the last ending is there, too",
    remedy: "remove one of them",
};
/// A compressed file of a directory that cannot be unpacked.
pub(super) const PACKED_DAMAGED: FileKind =
    FileKind { what: "compressed, and damaged or cut off", remedy: "get the whole file again" };
/// A compressed file of a directory, without text in the file.
pub(super) const PACKED_ARCHIVE: FileKind = FileKind {
    what: "compressed, and contains an archive or a table",
    remedy: "unpack it by hand",
};
const NUMPY: FileKind = FileKind {
    what: "a NumPy array",
    remedy: "write its numbers without a header (`array.astype('uint16').tofile('train.bin')`) and set data.format: U16",
};
const INDEX: FileKind = FileKind {
    what: "a Megatron index",
    remedy: "name the .bin file beside it, with data.format: Megatron",
};
const TARGETS: FileKind = FileKind {
    what: "a mask of onebox",
    remedy: "name the .bin file beside it, with data.format: Megatron",
};
const TOKENS: FileKind = FileKind {
    what: "a token file, as its name says",
    remedy: "set data.format: U16 (nanoGPT's train.bin and val.bin; GPT-2's tokens) or U32",
};
const UTF16: FileKind = FileKind {
    what: "UTF-16 text, not UTF-8",
    remedy: "convert it, with iconv -f UTF-16 -t UTF-8",
};
/// A file with zero bytes, such as a picture or a program.
pub(super) const BINARY: FileKind = FileKind {
    what: "not text: it has zero bytes",
    remedy: "name text, or set data.format: U16 or U32 for a file of tokens",
};
/// A fault that may be only after the first bytes.
pub(super) const NOT_UTF8: FileKind =
    FileKind { what: "not UTF-8", remedy: "convert it, with iconv -t UTF-8" };
/// A fault that is found only at the end.
pub(super) const TEXT_CUT: FileKind = FileKind {
    what: "text that ends inside a character",
    remedy: "get the whole file, or cut it before that character",
};

/// First bytes of a kind, with which no text or token file begins; name extensions; the kind.
type KindRow = (&'static [&'static [u8]], &'static [&'static str], FileKind);

const KINDS: [KindRow; 16] = [
    (&[b"version https://git-lfs"], &[], LFS_POINTER),
    (&[b"\x1f\x8b\x08"], &["gz", "gzip", "tgz"], GZIP),
    (&[b"\x28\xb5\x2f\xfd"], &["zst", "zstd"], ZSTD),
    (&[b"\xfd7zXZ\0"], &["xz"], XZ),
    (&[b"BZh91AY&SY"], &["bz2"], BZIP2),
    (&[b"PK\x03\x04"], &["zip"], ZIP),
    (&[b"PAR1"], &["parquet"], PARQUET),
    (&[b"ARROW1"], &["arrow"], ARROW),
    (&[b"\x93NUMPY"], &["npy", "npz"], NUMPY),
    (&[b"MMIDIDX\0", b"TNTIDX\0\0"], &["idx"], INDEX),
    (&[b"onebox targets 1"], &[], TARGETS),
    (&[b"\xff\xfe"], &[], UTF16),
    (&[], &["jsonl", "ndjson"], JSON_LINES),
    (&[], &["json"], JSON),
    (&[], &["csv", "tsv", "tab"], TABLE),
    (&[], &["bin"], TOKENS),
];

/// The first bytes of a file.
pub(super) fn head(file: &mut File) -> io::Result<Vec<u8>> {
    input::beginning(file, HEAD as u64)
}

/// The kind of a file if its name or beginning contradicts `format`.
pub(super) fn of(path: &Path, head: &[u8], format: &DataFormat) -> Option<FileKind> {
    let kind = by_head(head).or_else(|| by_name(path));
    let is_name_only = kind.is_some_and(|kind| by_head(head) != Some(kind));
    if is_name_only && (format.is_rows() || *format == DataFormat::Auto) {
        match kind {
            Some(GZIP) => return Some(NO_GZIP),
            Some(ZSTD) => return Some(NO_ZSTD),
            Some(PARQUET) => return Some(NO_PARQUET),
            _ => {}
        }
    }
    if format.is_bytes() {
        let zeros = || head.contains(&0).then_some(BINARY);
        return kind.or_else(|| is_json_lines(head).then_some(JSON_LINES)).or_else(zeros);
    }
    if format.is_rows() {
        let lists = || (begins_list(head) && has_list_in_line(head)).then_some(LISTS);
        return kind.filter(|kind| ![JSON_LINES, JSON, TABLE].contains(kind)).or_else(lists);
    }
    // The two bytes that mark UTF-16 may be a token.
    kind.filter(|kind| ![TOKENS, UTF16].contains(kind))
}

/// The kind of a file next to token files, if it cannot be a token file itself.
pub(super) fn of_tokens_elsewhere(path: &Path) -> Option<FileKind> {
    by_name(path).filter(|kind| ![TOKENS, INDEX, JSON, JSON_LINES, TABLE].contains(kind))
}

/// Whether `head` begins as UTF-8 without zero bytes; the last character may be incomplete.
pub(super) fn is_text(head: &[u8]) -> bool {
    let cut = |e: std::str::Utf8Error| e.error_len().is_none();
    !head.contains(&0) && str::from_utf8(head).map_or_else(cut, |_| true)
}

/// Whether the file name says that a file has rows: JSON, or a table.
pub(super) fn is_named_as_rows(path: &Path) -> bool {
    by_name(uncompressed(path))
        .is_some_and(|kind| [JSON_LINES, JSON, TABLE, PARQUET].contains(&kind))
}

/// The path without the ending of a compressed file; the same path if it has none.
pub(super) fn uncompressed(path: &Path) -> &Path {
    match by_name(path) {
        Some(GZIP | ZSTD) => path.to_str().and_then(|text| text.rsplit_once('.')),
        _ => None,
    }
    .map_or(path, |(stem, _)| Path::new(stem))
}

/// The compression of a file in words.
pub(super) fn packed(head: &[u8]) -> String {
    by_head(head).map_or("packed", |kind| kind.what).to_owned()
}

/// Whether `head` begins one JSON array, and no lines with a list in each.
pub(super) fn is_array(head: &[u8]) -> bool {
    begins_list(head) && !has_list_in_line(head)
}

fn begins_list(head: &[u8]) -> bool {
    let head = head.strip_prefix("\u{FEFF}".as_bytes()).unwrap_or(head);
    head.trim_ascii_start().starts_with(b"[")
}

fn by_head(head: &[u8]) -> Option<FileKind> {
    let begins = |starts: &[&[u8]]| starts.iter().any(|start| head.starts_with(start));
    KINDS.iter().find(|(starts, ..)| begins(starts)).map(|(.., kind)| *kind)
}

fn by_name(path: &Path) -> Option<FileKind> {
    let extension = path.extension()?.to_str()?.to_ascii_lowercase();
    KINDS.iter().find(|(_, names, _)| names.contains(&extension.as_str())).map(|(.., kind)| *kind)
}

/// Whether the first line is a JSON list that is a chat itself, or that another list follows.
fn has_list_in_line(head: &[u8]) -> bool {
    let mut lines = head.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii);
    let mut next = || lines.find(|line| !line.is_empty());
    let Some(Ok(list)) = next().map(serde_json::from_slice::<Vec<serde_json::Value>>) else {
        return false;
    };
    let is_message = |one: &serde_json::Value| {
        let has = |key| one.get(key).is_some();
        has("role") && has("content") || has("from") && has("value")
    };
    next().is_some_and(|line| line.starts_with(b"[")) || list.first().is_some_and(is_message)
}

/// Whether each of the first two lines is a JSON object.
pub(super) fn is_json_lines(head: &[u8]) -> bool {
    let is_object = |line: &[u8]| {
        line.starts_with(b"{") && serde_json::from_slice::<serde::de::IgnoredAny>(line).is_ok()
    };
    let mut lines = head.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii);
    let mut next_is_object = || lines.next().is_some_and(is_object);
    next_is_object() && next_is_object()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_table_by_its_bytes_is_named_so() {
        let found = |name: &str, head: &[u8]| of(Path::new(name), head, &DataFormat::Chat);
        let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n";
        assert_eq!(found("a.parquet", pointer), Some(LFS_POINTER));
        assert_eq!(found("a.jsonl.gz", pointer), Some(LFS_POINTER));
        assert_eq!(found("a.parquet", b"<html>"), Some(NO_PARQUET));
    }

    #[test]
    fn a_list_on_one_line_is_an_array_unless_it_is_a_chat() {
        for (head, expected) in [
            (&b"[{\"instruction\": \"a\", \"output\": \"b\", \"from\": \"wiki\"}]"[..], true),
            (b"[{\"role\": \"user\", \"content\": \"a\"}]", false),
            (b"[{\"from\": \"human\", \"value\": \"a\"}]", false),
        ] {
            assert_eq!(is_array(head), expected, "{}", head.escape_ascii());
        }
    }
}
