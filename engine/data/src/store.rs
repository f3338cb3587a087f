//! Storage of the tokens. Tokens of files stay in the files and are read by position, so that
//! start-up time and memory do not depend on their size. Tokens of rows, and of text without a
//! cache, are in memory.
//!
//! Invariant: a read returns the checked tokens or an error. After each read the file must still be
//! the same, with the length and change times of its opening or of a successful revalidation.

use super::open::open_regular;
use super::origins::{RowLocation, RowUnit};
use super::problem::{Failure, Problem};
use super::use_list::UseList;
use files::directory::Directory;
use files::path_text::PathText;
use files::private::reopened;
use serde::{Deserialize, Serialize};
use std::fs::{File, Metadata};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::SystemTime;
use xxhash_rust::xxh3::Xxh3Default;

/// Largest number of files that stay open in a process. Other files are opened for each read.
const MOST_OPEN: usize = 256;
/// Number of files that are open now.
static OPEN: AtomicUsize = AtomicUsize::new(0);
/// Bytes per read of tokens, on the stack: a step allocates no memory.
const AT_ONCE: usize = 16 << 10;
/// Bytes per read for a hash.
const BLOCK: usize = 1 << 20;

/// Bytes of a [`Stamp`].
const STAMP: usize = 56;

/// Identity of a file and its version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) struct Stamp {
    device: u64,
    inode: u64,
    /// Length in bytes.
    pub(super) bytes: u64,
    /// Time of the last write, in seconds and nanoseconds since 1970. Programs can set it.
    modified: (i64, i64),
    /// Time of the last change of the file or its metadata, in the same units. No program can set
    /// it.
    pub(super) changed: (i64, i64),
}

impl Stamp {
    pub(super) fn of(metadata: &Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            bytes: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }

    /// The stamp as bytes, for hashes and files.
    pub(super) fn to_bytes(self) -> [u8; STAMP] {
        let ((a, b), (c, d)) = (self.modified, self.changed);
        let [a, b, c, d] = [a, b, c, d].map(i64::cast_unsigned);
        let words = [self.device, self.inode, self.bytes, a, b, c, d];
        let mut bytes = [0; STAMP];
        bytes.as_chunks_mut().0.copy_from_slice(&words.map(u64::to_le_bytes));
        bytes
    }

    /// Whether the file and its length are the same, but a time differs. Another link, owner or
    /// mode changes only the second time. A write with the first time set back looks the same.
    fn is_touched(&self, before: &Self) -> bool {
        let of = |stamp: &Self| (stamp.device, stamp.inode, stamp.bytes);
        self != before && of(self) == of(before)
    }

    /// The change of the file, as text.
    fn change(&self, now: &Self) -> String {
        if (self.device, self.inode) != (now.device, now.inode) {
            return "another file has taken its place".into();
        }
        if self.bytes != now.bytes {
            return format!("it has {} bytes now, and had {}", now.bytes, self.bytes);
        }
        if self.modified != now.modified {
            return "it was written to".into();
        }
        "it was written to, or has another link, owner or mode".into()
    }
}

/// Error: the run cannot read tokens of a file that it opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{}: cannot read the tokens at byte {offset}: {why}; bring the file back as it was and resume, or start again with the \
     new one",
    PathText(path)
)]
pub struct ReadError {
    /// The file.
    pub path: PathBuf,
    /// Offset of the failed read in the file, in bytes.
    pub offset: u64,
    /// The reason, as text.
    pub why: String,
}

/// Converts a read error during the opening of the data.
pub(super) fn failure(unread: ReadError) -> Failure {
    (unread.path.clone(), unread.into())
}

impl From<ReadError> for Problem {
    fn from(ReadError { offset, why, .. }: ReadError) -> Self {
        Self::Changed { offset, why }
    }
}

/// A file that stays open and counts towards the limit.
#[derive(Debug)]
struct OpenFile(File);

impl OpenFile {
    /// Counts the file as open; `None` if the limit is reached.
    fn new(file: File) -> Option<Self> {
        let more = |open: usize| (open < MOST_OPEN).then_some(open + 1);
        OPEN.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).ok().map(|_| Self(file))
    }
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        OPEN.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The unpacked text of a file that is packed, which is read in place of the file.
#[derive(Debug)]
enum FileCopy {
    /// A file of the cache folder.
    InCache(PathBuf),
    /// A file without a name.
    Nameless(Arc<File>),
}

/// A file with its stamp.
#[derive(Debug)]
pub(super) struct TokenFile {
    /// Path that the user knows.
    pub(super) path: PathBuf,
    copy: Option<FileCopy>,
    /// Unit of the row numbers.
    unit: RowUnit,
    /// Time just before the stamp was read.
    pub(super) opened: SystemTime,
    /// Stamp at the time of the opening.
    pub(super) stamp: Stamp,
    /// Stamp that the file must have now: the first stamp, or the stamp of a successful
    /// revalidation.
    believed: RwLock<Stamp>,
    /// The open file; `None` if too many files are open.
    file: Option<OpenFile>,
}

impl TokenFile {
    pub(super) fn new(path: &Path, file: File) -> io::Result<Self> {
        let (path, opened) = (path.to_owned(), SystemTime::now());
        let stamp = Stamp::of(&file.metadata()?);
        let (believed, file) = (RwLock::new(stamp), OpenFile::new(file));
        Ok(Self { path, copy: None, unit: RowUnit::Line, opened, stamp, believed, file })
    }

    /// A file without a name as the copy of `source`.
    pub(super) fn nameless(source: &Self, file: File, unit: RowUnit) -> io::Result<Self> {
        let same = Self::new(&source.path, file.try_clone()?)?;
        Ok(Self { copy: Some(FileCopy::Nameless(Arc::new(file))), unit, ..same })
    }

    /// This file of the cache folder as the copy of `source`.
    pub(super) fn into_copy_of(self, source: &Self, unit: RowUnit) -> Self {
        Self { copy: Some(FileCopy::InCache(self.path)), path: source.path.clone(), unit, ..self }
    }

    /// The place of a row.
    pub(super) fn row(&self, number: u64) -> RowLocation<'_> {
        RowLocation { file: &self.path, number, unit: self.unit }
    }

    /// Opens the file, or its copy.
    pub(super) fn open(&self) -> Result<File, Problem> {
        match &self.copy {
            None => open_regular(&self.path),
            Some(FileCopy::InCache(path)) => open_regular(path),
            Some(FileCopy::Nameless(file)) => reopened(file).map_err(Problem::Unreadable),
        }
    }

    /// Calls `look` with the file, which is opened if necessary.
    pub(super) fn with_opened<T>(
        &self,
        look: impl FnOnce(&File) -> io::Result<T>,
    ) -> io::Result<T> {
        match &self.file {
            Some(OpenFile(file)) => look(file),
            None => look(&self.open().map_err(|e| io::Error::other(e.to_string()))?),
        }
    }

    /// The new stamp, if only a time of the file has changed.
    pub(super) fn touched(&self) -> Option<Stamp> {
        let metadata = match &self.file {
            Some(OpenFile(file)) => file.metadata(),
            None => self.open().ok()?.metadata(),
        };
        let now = Stamp::of(&metadata.ok()?);
        now.is_touched(&self.believed()).then_some(now)
    }

    pub(super) fn believed(&self) -> Stamp {
        *self.believed.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the stamp that the file must have; returns the previous one.
    pub(super) fn believe(&self, stamp: Stamp) -> Stamp {
        let mut believed = self.believed.write().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut believed, stamp)
    }

    /// 128-bit xxh3 hash of all bytes. `add` receives the number of bytes that were read.
    pub(super) fn hash(&self, add: &dyn Fn(u64)) -> Result<u128, ReadError> {
        let (mut hash, mut block) = (Xxh3Default::new(), vec![0; BLOCK]);
        for offset in (0..self.stamp.bytes).step_by(BLOCK) {
            let some = &mut block[..(self.stamp.bytes - offset).min(BLOCK as u64) as usize];
            self.read(offset, some)?;
            hash.update(some);
            add(some.len() as u64);
        }
        Ok(hash.digest128())
    }

    /// Fills `out` with the bytes from `offset` on.
    pub(super) fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), ReadError> {
        let opened;
        let file = match &self.file {
            Some(OpenFile(file)) => file,
            None => {
                opened = self.open().map_err(|problem| match problem {
                    Problem::Missing => self.unread(offset, "it is gone".into()),
                    other => self.unread(offset, other.to_string()),
                })?;
                &opened
            }
        };
        let read = file.read_exact_at(out, offset);
        // After the read: an unchanged stamp proves that the bytes are from before any change.
        let now = file.metadata().map(|metadata| Stamp::of(&metadata));
        match now {
            Ok(now) if now == self.believed() => {
                read.map_err(|e| self.unread(offset, e.to_string()))
            }
            Ok(now) => Err(self.unread(offset, self.stamp.change(&now))),
            Err(e) => Err(self.unread(offset, e.to_string())),
        }
    }

    /// The same file, but opened for each read.
    pub(super) fn closed(self) -> Self {
        Self { file: None, ..self }
    }

    pub(super) fn unread(&self, offset: u64, why: String) -> ReadError {
        let path = match &self.copy {
            Some(FileCopy::InCache(path)) => path,
            _ => &self.path,
        };
        ReadError { path: path.clone(), offset, why }
    }
}

#[derive(Debug)]
enum SegmentData {
    File(TokenFile),
    Memory(Vec<u8>),
}

/// A contiguous range of tokens, in a file or in memory.
#[derive(Debug)]
struct Segment {
    /// End of the segment among all tokens.
    end: usize,
    place: SegmentData,
    /// Largest token, found by a check.
    most: u32,
}

/// The tokens of a data set, little-endian, one segment after another.
#[derive(Debug)]
pub(super) struct Store {
    /// Bytes of a token: 1, 2 or 4.
    pub(super) width: usize,
    segments: Vec<Segment>,
    /// List that protects the parts of the cache folder that the store reads.
    uses: Option<UseList>,
}

impl Store {
    /// A store without tokens.
    pub(super) const fn new(width: usize) -> Self {
        Self { width, segments: Vec::new(), uses: None }
    }

    /// Protects a part of the cache folder from removal while this store exists. No part is removed
    /// until the result is dropped. With `read_only`, no file is written.
    pub(super) fn hold(
        &mut self,
        folder: &Path,
        part: &str,
        read_only: bool,
    ) -> io::Result<Option<Directory>> {
        let list = match self.uses.take() {
            Some(list) => list,
            None => UseList::new(folder, read_only)?,
        };
        self.uses.insert(list).add(part)
    }

    /// Number of tokens of all segments.
    pub(super) fn num_tokens(&self) -> usize {
        self.segments.last().map_or(0, |segment| segment.end)
    }

    pub(super) const fn num_segments(&self) -> usize {
        self.segments.len()
    }

    /// The file of each segment; `None` if a segment is in memory.
    pub(super) fn files(&self) -> Option<Vec<&TokenFile>> {
        self.segments.iter().map(Segment::file).collect()
    }

    /// The file of a segment.
    pub(super) fn file(&self, segment: usize) -> Option<&TokenFile> {
        self.segments[segment].file()
    }

    /// Number of tokens of a segment.
    pub(super) fn len(&self, segment: usize) -> usize {
        self.segments[segment].end - self.start(segment)
    }

    /// Number of the segment's first token among all tokens.
    pub(super) fn start(&self, segment: usize) -> usize {
        segment.checked_sub(1).map_or(0, |before| self.segments[before].end)
    }

    /// Adds the tokens of a file, which must hold a whole number of them.
    pub(super) fn push_file(&mut self, file: TokenFile) {
        let length = file.stamp.bytes as usize;
        assert!(length.is_multiple_of(self.width), "a file has whole tokens");
        if length == 0 {
            return;
        }
        let end = self.num_tokens() + length / self.width;
        self.segments.push(Segment { end, place: SegmentData::File(file), most: u32::MAX });
    }

    /// Adds tokens that stay in memory.
    pub(super) fn push_bytes(&mut self, bytes: &[u8]) {
        assert!(bytes.len().is_multiple_of(self.width), "bytes are whole tokens");
        let end = self.num_tokens() + bytes.len() / self.width;
        match self.segments.last_mut() {
            Some(Segment { end: last, place: SegmentData::Memory(held), .. }) => {
                held.extend_from_slice(bytes);
                *last = end;
            }
            _ if bytes.is_empty() => {}
            _ => {
                let place = SegmentData::Memory(bytes.to_owned());
                self.segments.push(Segment { end, place, most: u32::MAX });
            }
        }
    }

    /// Sets the largest token of each segment, found by a check; reading a larger token is an
    /// error.
    pub(super) fn bound(&mut self, most: &[u32]) {
        for (segment, most) in self.segments.iter_mut().zip(most) {
            segment.most = *most;
        }
    }

    /// The segments of `tokens`, each with its part of them.
    pub(super) fn parts(
        &self,
        tokens: Range<usize>,
    ) -> impl Iterator<Item = (usize, Range<usize>)> {
        assert!(tokens.end <= self.num_tokens(), "tokens {tokens:?} of {}", self.num_tokens());
        let first = self.segments.partition_point(|segment| segment.end <= tokens.start);
        let part = move |segment: usize| {
            let end = self.segments[segment].end.min(tokens.end);
            (segment, self.start(segment).max(tokens.start)..end)
        };
        (first..self.segments.len()).map(part).take_while(|(_, part)| !part.is_empty())
    }

    /// Fills `out` with the bytes of whole tokens of one segment, from token `start` on.
    pub(super) fn read(
        &self,
        segment: usize,
        start: usize,
        out: &mut [u8],
    ) -> Result<(), ReadError> {
        let at = (start - self.start(segment)) * self.width;
        match &self.segments[segment].place {
            SegmentData::File(file) => file.read(at as u64, out),
            SegmentData::Memory(bytes) => {
                out.copy_from_slice(&bytes[at..][..out.len()]);
                Ok(())
            }
        }
    }

    /// Calls `each` with each of `tokens` and its index within them.
    pub(super) fn each(
        &self,
        tokens: Range<usize>,
        mut each: impl FnMut(usize, u32),
    ) -> Result<(), ReadError> {
        let mut block = [0; AT_ONCE];
        let mut number = 0;
        for (i, part) in self.parts(tokens) {
            let mut start = part.start;
            while start < part.end {
                let count = (part.end - start).min(AT_ONCE / self.width);
                let bytes = &mut block[..count * self.width];
                self.read(i, start, bytes)?;
                let mut largest = 0;
                widened(bytes, self.width, |token| {
                    largest = largest.max(token);
                    each(number, token);
                    number += 1;
                });
                self.check(i, start, largest)?;
                start += count;
            }
        }
        Ok(())
    }

    /// Checks that `token`, read from `start` on in a segment, is not above the bound.
    fn check(&self, segment: usize, start: usize, token: u32) -> Result<(), ReadError> {
        let Segment { most, place, .. } = &self.segments[segment];
        if token <= *most {
            return Ok(());
        }
        let SegmentData::File(file) = place else { unreachable!("tokens in memory are checked") };
        let why = format!("token {token} stands there now, and {most} was the largest of the file");
        Err(file.unread(((start - self.start(segment)) * self.width) as u64, why))
    }
}

impl Segment {
    const fn file(&self) -> Option<&TokenFile> {
        match &self.place {
            SegmentData::File(file) => Some(file),
            SegmentData::Memory(_) => None,
        }
    }
}

/// Calls `each` with every token of `bytes`.
#[inline]
pub(super) fn widened(bytes: &[u8], width: usize, mut each: impl FnMut(u32)) {
    match width {
        1 => bytes.iter().for_each(|byte| each(u32::from(*byte))),
        2 => bytes.as_chunks().0.iter().for_each(|token| each(u16::from_le_bytes(*token).into())),
        4 => bytes.as_chunks().0.iter().for_each(|token| each(u32::from_le_bytes(*token))),
        _ => unreachable!("tokens have 1, 2 or 4 bytes, not {width}"),
    }
}

/// The largest token of `bytes`.
pub(super) fn largest(bytes: &[u8], width: usize) -> u32 {
    let most = match width {
        1 => bytes.iter().max().map(|byte| u32::from(*byte)),
        2 => {
            bytes.as_chunks().0.iter().map(|token| u16::from_le_bytes(*token)).max().map(u32::from)
        }
        _ => bytes.as_chunks().0.iter().map(|token| u32::from_le_bytes(*token)).max(),
    };
    most.unwrap_or(0)
}

#[cfg(test)]
mod tests;
