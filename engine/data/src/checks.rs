//! What onebox has found in files of tokens and text, kept in the user's cache folder, so that a file is read through
//! once. It is believed of a file with the same [`Stamp`].

use super::cores;
use super::documents::{Documents, SampleCapacity};
use super::identity::{Identity, SegmentSummary, TokenRanges};
use super::megatron::Index;
use super::problem::{Failure, Problem, at};
use super::progress::{Progress, Silence};
use super::store::{ReadError, Stamp, Store, TokenFile, failure, largest, widened};
use super::token_cache::Cache;
use super::utf8::{self, Utf8Error};
use crate::cache_file::{self};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::path::{Path, PathBuf, absolute};
use std::time::SystemTime;
use xxhash_rust::xxh3::Xxh3Default;

/// The version of what a pass over all tokens finds, in the hash of each.
const SET: &[u8] = b"onebox checked 3";
/// The version of the lists of files that are text.
const TEXTS: &[u8] = b"onebox texts  3\n";
/// The work that is done again where what was found cannot be kept.
const AGAIN: &str = "the data will be checked again";
/// Bytes that are checked faster than a file of the cache folder is written.
const WORTH_KEEPING: u64 = 16 << 20;
/// Tokens that a thread looks at together for one that is too large.
const BLOCK: usize = 1 << 20;

/// How files are checked.
#[derive(Clone, Copy, Debug)]
pub struct Checks<'a> {
    /// Where what was found is kept.
    pub cache: &'a Cache,
    /// Tokens are below it.
    pub vocab: usize,
    /// Hears how far it has come.
    pub progress: &'a dyn Progress,
    /// Each document of an index that is left out is named as it is found.
    pub names_all: bool,
}

/// Of a pass over all tokens.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct DataFindings {
    pub(super) identity: Identity,
    pub(super) segments: Vec<SegmentSummary>,
    /// Hashes of the files beside those of the tokens: indexes, then masks.
    pub(super) beside: Vec<u128>,
}

/// Nowhere.
static NO_CACHE: Cache = Cache { folder: None, read_only: true };

impl Checks<'_> {
    /// Keeps nothing, shows nothing, takes any token.
    pub(super) const fn none() -> Self {
        Self { cache: &NO_CACHE, vocab: usize::MAX, progress: &Silence, names_all: false }
    }

    /// What is found in tokens of which `..split` are to train. Refuses those that are not below the vocabulary, and has larger
    /// ones than there are now refused from now on.
    pub(super) fn pass(
        &self,
        store: &mut Store,
        split: usize,
        indexes: &[Index],
        documents: Option<&Documents>,
    ) -> Result<DataFindings, Failure> {
        let found = self.found(store, split, indexes, documents)?;
        let largest: Vec<u32> = found.segments.iter().map(|segment| segment.largest).collect();
        for (segment, Index { dtype, .. }) in indexes.iter().enumerate() {
            if largest[segment] as usize >= dtype.end {
                let end = dtype.end;
                let bounded = Self { vocab: end, ..*self };
                let (which, _) = bounded.first_unknown(store, segment).map_err(failure)?;
                let problem = Problem::Negative { which, dtype: dtype.name, end };
                return Err(at(path_of(store, segment))(problem));
            }
        }
        if let Some(segment) = largest.iter().position(|token| *token as usize >= self.vocab) {
            let (which, token) = self.first_unknown(store, segment).map_err(failure)?;
            return Err(at(path_of(store, segment))(Problem::TokenOutOfVocab {
                which,
                token,
                vocab: self.vocab,
            }));
        }
        store.bound(&largest);
        Ok(found)
    }

    fn found(
        &self,
        store: &Store,
        split: usize,
        indexes: &[Index],
        documents: Option<&Documents>,
    ) -> Result<DataFindings, Failure> {
        let now = SystemTime::now();
        let parts = match documents {
            None => [0..split, split..store.num_tokens()].map(TokenRanges::one),
            Some(documents) => documents.parts(),
        };
        let bytes =
            (parts.each_ref().map(TokenRanges::len).iter().sum::<usize>() * store.width) as u64;
        let worth = bytes >= WORTH_KEEPING && self.cache.folder.is_some();
        let masks = documents.map_or(&[][..], Documents::masks);
        let beside = indexes.iter().map(|index| &index.file);
        let beside = beside.chain(masks.iter().map(|mask| &mask.file));
        let files = store.files().filter(|_| worth).map(|mut files| {
            files.extend(beside.clone());
            files
        });
        let kept = files.as_ref().and_then(|files| {
            // The index and these say which documents there are.
            let of = documents.map(|documents| (documents.room, documents.split));
            let files = files.iter().copied();
            let name = format!("{:032x}.checked", name(files, store.width, split, of));
            Some(self.cache.folder.as_ref()?.join(name))
        });
        if let Some(found) = kept.as_deref().and_then(cache_file::read) {
            return Ok(found);
        }
        for (segment, index) in indexes.iter().enumerate() {
            let Some(file) = store.file(segment) else { unreachable!("an index has a file") };
            index.check(file).map_err(at(&file.path))?;
        }
        for (segment, mask) in masks.iter().enumerate() {
            mask.check().map_err(at(path_of(store, segment)))?;
        }
        let reading = self.progress.begin("checking data", bytes);
        let add = |bytes| reading.add(bytes);
        let (identity, segments) = Identity::and_segments(store, &parts, &add).map_err(failure)?;
        let identity = match documents {
            Some(documents) => identity.and(documents.hashes().map_err(failure)?),
            None => identity,
        };
        drop(reading);
        let beside: Result<_, _> = beside.map(|file| file.hash(&|_| ())).collect();
        let found = DataFindings { identity, segments, beside: beside.map_err(failure)? };
        let settled = |files: &Vec<&TokenFile>| files.iter().all(|file| file.stamp.is_settled(now));
        if files.as_ref().is_some_and(settled) {
            self.cache.keep(kept.as_deref(), AGAIN, |path| cache_file::write(path, &found));
        }
        Ok(found)
    }

    /// Which token of a segment is the first that is not below the vocabulary, and the token.
    fn first_unknown(&self, store: &Store, segment: usize) -> Result<(String, u32), ReadError> {
        let first = store.start(segment);
        let tokens = store.len(segment);
        let in_block = |block: usize| {
            let start = block * BLOCK;
            let end = tokens.min(start + BLOCK);
            let mut bytes = vec![0; (end - start) * store.width];
            store.read(segment, first + start, &mut bytes)?;
            let mut found = None;
            if largest(&bytes, store.width) as usize >= self.vocab {
                let mut i = start;
                widened(&bytes, store.width, |token| {
                    if token as usize >= self.vocab && found.is_none() {
                        found = Some((i, token));
                    }
                    i += 1;
                });
            }
            Ok(found)
        };
        let blocks = tokens.div_ceil(BLOCK);
        for group in (0..blocks).step_by(cores::all()) {
            let found = cores::map(cores::all().min(blocks - group), |i| in_block(group + i));
            if let Some(found) = found.into_iter().find_map(Result::transpose) {
                let (index, token) = found?;
                return Ok((format!("token {index}, at byte {},", index * store.width), token));
            }
        }
        unreachable!("segment {segment} has a token that is not below {}", self.vocab)
    }
}

/// By everything that a pass over the files depends on.
fn name<'a>(
    files: impl Iterator<Item = &'a TokenFile>,
    width: usize,
    split: usize,
    documents: Option<(SampleCapacity, usize)>,
) -> u128 {
    let mut hash = Xxh3Default::new();
    hash.update(SET);
    hash.update(&[width as u64, split as u64].map(u64::to_le_bytes).concat());
    if let Some(documents) = documents {
        hash.update(format!("{documents:?}").as_bytes());
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

fn path_of(store: &Store, segment: usize) -> &Path {
    store.file(segment).map_or(Path::new(""), |file| &file.path)
}

/// Which files of a name in the config are text.
pub(super) struct TextVerdicts<'a> {
    checks: Checks<'a>,
    path: Option<PathBuf>,
    known: HashMap<Stamp, Option<Utf8Error>>,
    found: Vec<(Stamp, Option<Utf8Error>)>,
    /// Bytes that had to be looked at.
    looked_at: u64,
}

impl<'a> TextVerdicts<'a> {
    /// Of the files that `named` stands for.
    pub(super) fn of(named: &str, checks: Checks<'a>) -> Self {
        let mut hash = Xxh3Default::new();
        hash.update(TEXTS);
        let absolute = absolute(named).unwrap_or_else(|_| named.into());
        hash.update(absolute.as_os_str().as_encoded_bytes());
        let name = format!("{:032x}.texts", hash.digest128());
        let path = checks.cache.folder.as_ref().map(|folder| folder.join(name));
        let kept: Option<Vec<_>> = path.as_deref().and_then(cache_file::read);
        let known = kept.into_iter().flatten().collect();
        Self { checks, path, known, found: Vec::new(), looked_at: 0 }
    }

    /// Where a file ceases to be text.
    pub(super) fn fault(&mut self, file: &TokenFile) -> Result<Option<Utf8Error>, ReadError> {
        let stamp = file.stamp;
        let fault = match self.known.get(&stamp) {
            Some(fault) => *fault,
            None => {
                self.looked_at += stamp.bytes;
                let reading = self.checks.progress.begin("checking text", stamp.bytes);
                utf8::fault(stamp.bytes, |at, out| file.read(at, out), |bytes| reading.add(bytes))?
            }
        };
        self.found.push((stamp, fault));
        Ok(fault)
    }

    /// Keeps what was found.
    pub(super) fn keep(self, began: SystemTime) {
        if self.looked_at < WORTH_KEEPING {
            return;
        }
        let settled: Vec<_> =
            self.found.iter().filter(|(stamp, _)| stamp.is_settled(began)).collect();
        self.checks
            .cache
            .keep(self.path.as_deref(), AGAIN, |path| cache_file::write(path, &settled));
    }
}
