//! What onebox has found in files of tokens and text, kept in the user's cache folder, so that a file is read through
//! once. It is believed of a file with the same [`Stamp`].

use super::cores;
use super::documents::{Documents, Room};
use super::identity::{Identity, Pieces, Segment};
use super::megatron::Index;
use super::problem::{Failure, Problem, at};
use super::progress::{Progress, Silence};
use super::store::{STAMP, Stamp, Store, TokenFile, Unread, failure, largest, widened};
use super::tokens::Cache;
use super::utf8::{self, NotUtf8};
use crate::files::sealed::{self, Magic};
use std::collections::HashMap;
use std::path::{Path, PathBuf, absolute};
use std::time::SystemTime;
use xxhash_rust::xxh3::Xxh3Default;

/// What a pass over all tokens has found.
const SET: &Magic = b"onebox checked 2";
/// Which files are text.
const TEXTS: &Magic = b"onebox texts  2\n";
/// The work that is done again where what was found cannot be kept.
const AGAIN: &str = "the data will be checked again";
/// Bytes that are checked faster than a file of the cache folder is written.
const WORTH_KEEPING: u64 = 16 << 20;
/// Tokens that a thread looks at together for one that is too large.
const BLOCK: usize = 1 << 20;

/// How files are checked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Checks<'a> {
    /// Where what was found is kept.
    pub(crate) cache: &'a Cache,
    /// Tokens are below it.
    pub(crate) vocab: usize,
    /// Hears how far it has come.
    pub(crate) progress: &'a dyn Progress,
    /// Each document of an index that is left out is named as it is found.
    pub(crate) names_all: bool,
}

/// Of a pass over all tokens.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) identity: Identity,
    pub(super) segments: Vec<Segment>,
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
        (indexes, documents): (&[Index], Option<&Documents>),
    ) -> Result<Found, Failure> {
        let found = self.found(store, split, (indexes, documents))?;
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
        (indexes, documents): (&[Index], Option<&Documents>),
    ) -> Result<Found, Failure> {
        let now = SystemTime::now();
        let parts = match documents {
            None => [0..split, split..store.num_tokens()].map(Pieces::one),
            Some(documents) => documents.parts(),
        };
        let bytes = (parts.each_ref().map(Pieces::len).iter().sum::<usize>() * store.width) as u64;
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
            let name = format!("{:032x}.checked", name(files, (store.width, split), of));
            Some(self.cache.folder.as_ref()?.join(name))
        });
        let known = kept.as_deref().and_then(|path| sealed::read(path, SET));
        let sizes = [store.num_segments(), indexes.len() + masks.len()];
        if let Some(found) = known.and_then(|bytes| Found::from_bytes(&bytes, sizes)) {
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
        let found = Found { identity, segments, beside: beside.map_err(failure)? };
        let settled = |files: &Vec<&TokenFile>| files.iter().all(|file| file.stamp.is_settled(now));
        if files.as_ref().is_some_and(settled) {
            let parts = std::iter::once(found.to_bytes());
            self.cache.keep(kept.as_deref(), SET, parts, AGAIN);
        }
        Ok(found)
    }

    /// Which token of a segment is the first that is not below the vocabulary, and the token.
    fn first_unknown(&self, store: &Store, segment: usize) -> Result<(String, u32), Unread> {
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

impl Found {
    fn to_bytes(&self) -> Vec<u8> {
        let Identity { train, held_out } = self.identity;
        let sums = self.segments.iter().map(|segment| segment.sum);
        let hashes = [train, held_out].into_iter().chain(sums).chain(self.beside.iter().copied());
        let largest = self.segments.iter().flat_map(|segment| segment.largest.to_le_bytes());
        hashes.flat_map(u128::to_le_bytes).chain(largest).collect()
    }

    fn from_bytes(bytes: &[u8], [segments, beside]: [usize; 2]) -> Option<Self> {
        let (hashes, largest) = bytes.split_at_checked(16 * (2 + segments + beside))?;
        let hashes = hashes.as_chunks().0.iter().map(|hash| u128::from_le_bytes(*hash));
        let hashes: Vec<u128> = hashes.collect();
        let ([train, held_out], rest) = hashes.split_first_chunk()?;
        let (sums, beside) = rest.split_at(segments);
        let (largest, []) = largest.as_chunks() else { return None };
        let segment = |(largest, sum): (&[u8; 4], &u128)| Segment {
            largest: u32::from_le_bytes(*largest),
            sum: *sum,
        };
        (largest.len() == segments).then(|| Self {
            identity: Identity { train: *train, held_out: *held_out },
            segments: largest.iter().zip(sums).map(segment).collect(),
            beside: beside.to_vec(),
        })
    }
}

/// By everything that a pass over the files depends on.
fn name<'a>(
    files: impl Iterator<Item = &'a TokenFile>,
    (width, split): (usize, usize),
    documents: Option<(Room, usize)>,
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
pub(super) struct Texts<'a> {
    checks: Checks<'a>,
    path: Option<PathBuf>,
    known: HashMap<[u8; STAMP], Option<NotUtf8>>,
    found: Vec<(Stamp, Option<NotUtf8>)>,
    /// Bytes that had to be looked at.
    looked_at: u64,
}

impl<'a> Texts<'a> {
    /// Of the files that `named` stands for.
    pub(super) fn of(named: &str, checks: Checks<'a>) -> Self {
        let mut hash = Xxh3Default::new();
        let absolute = absolute(named).unwrap_or_else(|_| named.into());
        hash.update(absolute.as_os_str().as_encoded_bytes());
        let name = format!("{:032x}.texts", hash.digest128());
        let path = checks.cache.folder.as_ref().map(|folder| folder.join(name));
        let kept = path.as_deref().and_then(|path| sealed::read(path, TEXTS));
        let known = kept.and_then(|bytes| verdicts(&bytes)).unwrap_or_default();
        Self { checks, path, known, found: Vec::new(), looked_at: 0 }
    }

    /// Where a file ceases to be text.
    pub(super) fn fault(&mut self, file: &TokenFile) -> Result<Option<NotUtf8>, Unread> {
        let stamp = file.stamp;
        let fault = match self.known.get(&stamp.to_bytes()) {
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
        let settled = self.found.iter().filter(|(stamp, _)| stamp.is_settled(began));
        let bytes = settled.flat_map(|(stamp, fault)| {
            let (kind, byte, offset) = match *fault {
                None => (0, 0, 0),
                Some(NotUtf8::BadByte { offset, byte }) => (1, byte, offset),
                Some(NotUtf8::Cut { offset }) => (2, 0, offset),
            };
            [&stamp.to_bytes()[..], &[kind, byte], &offset.to_le_bytes()].concat()
        });
        let parts = std::iter::once(bytes.collect());
        self.checks.cache.keep(self.path.as_deref(), TEXTS, parts, AGAIN);
    }
}

/// Bytes of a file's stamp, a kind, a byte and an offset.
const VERDICT: usize = STAMP + 10;

/// As they were kept, by the bytes of a file's stamp.
fn verdicts(bytes: &[u8]) -> Option<HashMap<[u8; STAMP], Option<NotUtf8>>> {
    let (all, []) = bytes.as_chunks::<VERDICT>() else { return None };
    let one = |bytes: &[u8; VERDICT]| {
        let (stamp, fault) = bytes.split_first_chunk::<STAMP>()?;
        let (&[kind, byte], offset) = fault.split_first_chunk()?;
        let offset = u64::from_le_bytes(offset.try_into().ok()?);
        let fault = match kind {
            0 => None,
            1 => Some(NotUtf8::BadByte { offset, byte }),
            2 => Some(NotUtf8::Cut { offset }),
            _ => return None,
        };
        Some((*stamp, fault))
    };
    all.iter().map(one).collect()
}
