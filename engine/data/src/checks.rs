//! Results of checks of token and text files, kept in the user's cache folder so that each file is
//! read once. A result is valid as long as the file has the same [`Stamp`].

use super::cores::map_groups;
use super::documents::Documents;
use super::identity::{Identity, SegmentSummary, TokenRanges};
use super::megatron::Index;
use super::problem::{Failure, Problem, at};
use super::progress::{Progress, Silence};
use super::store::{ReadError, Stamp, Store, TokenFile, failure, largest, widened};
use super::token_cache::Cache;
use super::utf8::{self, Utf8Error};
use super::write_watch::WriteWatch;
use super::{Corpus, cache_file};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::path::{Path, PathBuf, absolute};
use topology::cores;
use xxhash_rust::xxh3::Xxh3Default;

/// Version of the results of a pass over all tokens; part of each hash.
const SET: &[u8] = b"onebox checked 4";
/// Version of the lists of text files.
const TEXTS: &[u8] = b"onebox texts  4\n";
/// The work that is repeated if a result cannot be kept.
const AGAIN: &str = "the data will be checked again";
/// Least bytes of data for which results are kept: checking less is faster than writing a file.
const WORTH_KEEPING: u64 = 16 << 20;
/// Smallest text file, in bytes, that is synced before a check so that its result can be kept;
/// shorter files are quickly checked again.
const WORTH_WRITING: u64 = 64 << 10;
/// Tokens per thread and task in the search for a token that is too large.
const BLOCK: usize = 1 << 20;

/// Settings of the checks.
#[derive(Clone, Copy, Debug)]
pub struct Checks<'a> {
    /// The cache for the results.
    pub cache: &'a Cache,
    /// Vocabulary size: every token must be smaller.
    pub vocab: usize,
    /// Receiver of the progress.
    pub progress: &'a dyn Progress,
    /// Whether each document of an index that is left out is logged immediately.
    pub names_all: bool,
}

/// Results of a pass over all tokens.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct DataFindings {
    pub(super) identity: Identity,
    pub(super) segments: Vec<SegmentSummary>,
    /// Hashes of the indexes, then of the masks.
    #[serde(rename = "beside")]
    pub(super) index_and_mask_hashes: Vec<u128>,
}

/// A cache without a folder.
static NO_CACHE: Cache = Cache { folder: None, read_only: true };

impl Checks<'_> {
    /// Checks that keep nothing, show nothing and accept any token.
    pub(super) const fn none() -> Self {
        Self { cache: &NO_CACHE, vocab: usize::MAX, progress: &Silence, names_all: false }
    }
}

impl Corpus {
    /// Checks all tokens. Returns an error for a token outside of the vocabulary. Later reads
    /// refuse tokens above the largest token found now.
    pub(super) fn pass(&mut self, checks: Checks<'_>) -> Result<(), Failure> {
        self.found = self.findings(checks)?;
        let (store, vocab) = (&mut self.store, checks.vocab);
        let largest: Vec<u32> = self.found.segments.iter().map(|found| found.largest).collect();
        for (segment, Index { dtype, .. }) in self.indexes.iter().enumerate() {
            if largest[segment] as usize >= dtype.end {
                let end = dtype.end;
                let (which, _) = first_unknown(store, segment, end).map_err(failure)?;
                let problem = Problem::Negative { which, dtype: dtype.name, end };
                return Err(at(path_of(store, segment))(problem));
            }
        }
        if let Some(segment) = largest.iter().position(|token| *token as usize >= vocab) {
            let (which, token) = first_unknown(store, segment, vocab).map_err(failure)?;
            let problem = Problem::TokenOutOfVocab { which, token, vocab };
            return Err(at(path_of(store, segment))(problem));
        }
        store.bound(&largest);
        Ok(())
    }

    fn findings(&self, checks: Checks<'_>) -> Result<DataFindings, Failure> {
        let (store, parts) = (&self.store, self.parts());
        let bytes = (parts.iter().map(TokenRanges::len).sum::<usize>() * store.width) as u64;
        let folder = checks.cache.folder.as_ref().filter(|_| bytes >= WORTH_KEEPING);
        let files = store.files().filter(|_| folder.is_some()).map(|mut files| {
            files.extend(self.indexes_and_masks());
            files
        });
        let kept = files.as_ref().and_then(|files| {
            let name = format!("{:032x}.checked", self.name_of_findings(files));
            Some(folder?.join(name))
        });
        if let Some(found) = kept.as_deref().and_then(|path| checks.cache.read(path)) {
            return Ok(found);
        }
        let files = files.filter(|_| !checks.cache.read_only);
        let mut watch = WriteWatch::new(0);
        let is_covered = files.is_some_and(|files| files.iter().all(|file| watch.covers(file)));
        for (segment, index) in self.indexes.iter().enumerate() {
            let Some(file) = store.file(segment) else { unreachable!("an index has a file") };
            index.check(file).map_err(at(&file.path))?;
        }
        for (segment, mask) in self.masks().iter().enumerate() {
            mask.check().map_err(at(path_of(store, segment)))?;
        }
        let reading = checks.progress.begin("checking data", bytes);
        let add = |bytes| reading.add(bytes);
        let (identity, segments) = Identity::and_segments(store, &parts, &add).map_err(failure)?;
        let identity = match &self.documents {
            Some(documents) => identity.and(documents.hashes().map_err(failure)?),
            None => identity,
        };
        drop(reading);
        let hashes: Result<_, _> =
            self.indexes_and_masks().map(|file| file.hash(&|_| ())).collect();
        let index_and_mask_hashes = hashes.map_err(failure)?;
        let found = DataFindings { identity, segments, index_and_mask_hashes };
        if is_covered {
            checks.cache.keep(kept.as_deref(), AGAIN, |path| cache_file::write(path, &found));
        }
        Ok(found)
    }

    /// Hash of all inputs of a pass over the files.
    fn name_of_findings(&self, files: &[&TokenFile]) -> u128 {
        let mut hash = Xxh3Default::new();
        hash.update(SET);
        let numbers = [self.store.width as u64, self.split as u64];
        hash.update(&numbers.map(u64::to_le_bytes).concat());
        // The index and these two values decide which documents exist.
        if let Some(Documents { room, split, .. }) = &self.documents {
            hash.update(format!("{:?}", (room, split)).as_bytes());
        }
        for file in files {
            let path = absolute(&file.path).unwrap_or_else(|_| file.path.clone());
            let path = path.as_os_str().as_encoded_bytes();
            hash.update(&(path.len() as u64).to_le_bytes());
            hash.update(path);
            hash.update(&file.stamp.to_bytes());
        }
        hash.digest128()
    }
}

/// The first token of a segment that is not below `vocab`: its place in words, and the token.
fn first_unknown(store: &Store, segment: usize, vocab: usize) -> Result<(String, u32), ReadError> {
    let first = store.start(segment);
    let tokens = store.len(segment);
    let in_block = |block: usize| {
        let start = block * BLOCK;
        let end = tokens.min(start + BLOCK);
        let mut bytes = vec![0; (end - start) * store.width];
        store.read(segment, first + start, &mut bytes)?;
        let mut found = None;
        if largest(&bytes, store.width) as usize >= vocab {
            let mut i = start;
            widened(&bytes, store.width, |token| {
                if token as usize >= vocab && found.is_none() {
                    found = Some((i, token));
                }
                i += 1;
            });
        }
        Ok(found)
    };
    let mut found = map_groups(cores(), tokens.div_ceil(BLOCK), in_block);
    let Some(found) = found.find_map(Result::transpose) else {
        unreachable!("segment {segment} has a token that is not below {vocab}")
    };
    let (index, token) = found?;
    Ok((format!("token {index}, at byte {},", index * store.width), token))
}

fn path_of(store: &Store, segment: usize) -> &Path {
    store.file(segment).map_or(Path::new(""), |file| &file.path)
}

/// For each file of a config entry, whether it is text.
pub(super) struct TextVerdicts<'a> {
    checks: Checks<'a>,
    path: Option<PathBuf>,
    known: HashMap<Stamp, Option<Utf8Error>>,
    found: Vec<(Stamp, Option<Utf8Error>)>,
    watch: WriteWatch,
    /// Bytes that were actually checked.
    looked_at: u64,
}

impl<'a> TextVerdicts<'a> {
    /// Loads the known results for the files of the config entry `named`.
    pub(super) fn of(named: &str, checks: Checks<'a>) -> Self {
        let mut hash = Xxh3Default::new();
        hash.update(TEXTS);
        let absolute = absolute(named).unwrap_or_else(|_| named.into());
        hash.update(absolute.as_os_str().as_encoded_bytes());
        let name = format!("{:032x}.texts", hash.digest128());
        let path = checks.cache.folder.as_ref().map(|folder| folder.join(name));
        let kept: Option<Vec<_>> = path.as_deref().and_then(|path| checks.cache.read(path));
        let known = kept.into_iter().flatten().collect();
        Self {
            checks,
            path,
            known,
            found: Vec::new(),
            watch: WriteWatch::new(WORTH_WRITING),
            looked_at: 0,
        }
    }

    /// The settings of the checks.
    pub(super) const fn checks(&self) -> Checks<'a> {
        self.checks
    }

    /// The first fault that makes `file` not text; `None` for text.
    pub(super) fn fault(&mut self, file: &TokenFile) -> Result<Option<Utf8Error>, ReadError> {
        let stamp = file.stamp;
        if let Some(fault) = self.known.get(&stamp) {
            self.found.push((stamp, *fault));
            return Ok(*fault);
        }
        let keeps = self.path.is_some() && !self.checks.cache.read_only;
        let is_covered = keeps && self.watch.covers(file);
        self.looked_at += stamp.bytes;
        let reading = self.checks.progress.begin("checking text", stamp.bytes);
        let read = |at, out: &mut [u8]| file.read(at, out);
        let fault = utf8::fault(stamp.bytes, read, |bytes| reading.add(bytes))?;
        if is_covered {
            self.found.push((stamp, fault));
        }
        Ok(fault)
    }

    /// Keeps the results in the cache.
    pub(super) fn keep(self) {
        if self.looked_at < WORTH_KEEPING {
            return;
        }
        let found = &self.found;
        self.checks.cache.keep(self.path.as_deref(), AGAIN, |path| cache_file::write(path, found));
    }
}
