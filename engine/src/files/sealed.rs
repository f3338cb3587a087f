//! Files in the user's cache folder that are whole or are made again. Each ends with the hash of its content, and gets its
//! name when it is on the disk. Two runs at once write the same bytes, and the later name stays.

use crate::files::durable::sync_folder;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};
use xxhash_rust::xxh3::Xxh3Default;

/// The first bytes of a file: the name and the version of its content.
pub(crate) type Magic = [u8; 16];
/// Bytes of a hash.
const HASH: usize = 16;
/// Bytes that are read at once.
const BLOCK: usize = 1 << 20;

/// The content behind `magic`. None where the file is not there, or not whole.
pub(crate) fn read(path: &Path, magic: &Magic) -> Option<Vec<u8>> {
    let (file, body) = open(path, magic)?;
    let mut content = vec![0; (body.end - body.start) as usize];
    file.read_exact_at(&mut content, body.start).ok()?;
    Some(content)
}

/// The open file, and the place of the content behind `magic` in it. None where the file is not there, or not whole.
pub(crate) fn open(path: &Path, magic: &Magic) -> Option<(File, Range<u64>)> {
    let file = File::open(path).ok()?;
    let body = whole(&file, magic).unwrap_or_default();
    if body.is_none() {
        made_again(path);
    }
    Some((file, body?))
}

/// The place of the content of a file whose hash is right.
fn whole(mut file: &File, magic: &Magic) -> io::Result<Option<Range<u64>>> {
    let length = file.metadata()?.len();
    let Some(end) = length.checked_sub(HASH as u64).filter(|end| *end >= magic.len() as u64) else {
        return Ok(None);
    };
    let mut begin = Magic::default();
    file.read_exact(&mut begin)?;
    let mut hash = Xxh3Default::new();
    hash.update(&begin);
    let (mut block, mut left) = (vec![0; BLOCK], end - magic.len() as u64);
    while left > 0 {
        let some = &mut block[..left.min(BLOCK as u64) as usize];
        file.read_exact(some)?;
        hash.update(some);
        left -= some.len() as u64;
    }
    let mut written = [0; HASH];
    file.read_exact(&mut written)?;
    let is_whole = begin == *magic && written == hash.digest128().to_le_bytes();
    Ok(is_whole.then_some(magic.len() as u64..end))
}

fn made_again(path: &Path) {
    tracing::warn!("{}: not what was written; it is made again", path.display());
}

/// Writes `parts`, one behind another. The folder is made.
pub(crate) fn write(
    path: &Path,
    magic: &Magic,
    parts: impl Iterator<Item = Vec<u8>>,
) -> io::Result<()> {
    let folder = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
    fs::create_dir_all(folder)?;
    let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos());
    let unfinished = path.with_extension(format!("{}-{time}.tmp", std::process::id()));
    let done = fill(&unfinished, magic, parts)
        .and_then(|()| fs::rename(&unfinished, path))
        .and_then(|()| sync_folder(folder));
    if done.is_err() {
        // The first error is the one to tell.
        drop(fs::remove_file(&unfinished));
    }
    done
}

pub(crate) fn fill(
    path: &Path,
    magic: &Magic,
    parts: impl Iterator<Item = Vec<u8>>,
) -> io::Result<()> {
    let mut file = File::create_new(path)?;
    let mut hash = Xxh3Default::new();
    for part in std::iter::once(magic.to_vec()).chain(parts) {
        hash.update(&part);
        file.write_all(&part)?;
    }
    file.write_all(&hash.digest128().to_le_bytes())?;
    file.sync_all()
}
