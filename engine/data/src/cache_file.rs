//! Small files in the user's cache folder: JSON, and the hash of it behind it. A damaged file is made again.

use super::token_part;
use files::path_text::ShownPath;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};
use std::{fs, io};
use xxhash_rust::xxh3::{Xxh3Default, xxh3_128};

/// The content of a file; none if it is not there, or damaged.
pub(super) fn read<T: DeserializeOwned>(path: &Path) -> Option<T> {
    let bytes = fs::read(path).ok()?;
    let json = bytes.split_last_chunk().filter(|(json, hash)| hash_of(json) == **hash);
    let content = json.and_then(|(json, _)| serde_json::from_slice(json).ok());
    if content.is_none() {
        warn_damaged(path);
    }
    content
}

pub(super) fn write<T: Serialize>(path: &Path, content: &T) -> io::Result<()> {
    let mut bytes = serde_json::to_vec(content)?;
    bytes.extend(hash_of(&bytes));
    token_part::write(path, &unfinished_name(path), &[bytes]).map(drop)
}

/// xxh3, 128 bits, of parts, each with its length in front of it.
pub(super) fn hash_of_parts<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> u128 {
    let mut hash = Xxh3Default::new();
    for part in parts {
        hash.update(&(part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.digest128()
}

fn hash_of(json: &[u8]) -> [u8; 16] {
    xxh3_128(json).to_le_bytes()
}

/// A name for a file before it is whole. Two runs at once write the same bytes, and the later file stays.
pub(super) fn unfinished_name(path: &Path) -> PathBuf {
    let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos());
    path.with_extension(format!("{}-{time}.tmp", std::process::id()))
}

pub(super) fn warn_damaged(path: &Path) {
    tracing::warn!("{}: not what was written; it is made again", path.shown());
}
