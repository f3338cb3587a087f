//! Identity of a data set: the hash of its tokens, independent of the files.

use super::cores;
use super::store::{ReadError, Store, largest};
use serde::{Deserialize, Serialize};
use std::ops::Range;
use xxhash_rust::xxh3::{Xxh3Default, xxh3_128};

/// Tokens of a chunk. The identity is a hash of all chunk hashes, so it depends on this number.
const CHUNK: usize = 1 << 16;
/// Tokens per read.
const BLOCK: usize = 1 << 13;
/// Chunks whose hashes are in memory at the same time.
const TOGETHER: usize = 1 << 12;

/// 128-bit xxh3 hashes of the tokens as 32-bit numbers. They do not depend on the bytes per token
/// in a file, or on the division into files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Hash of the training part.
    pub train: u128,
    /// Hash of the validation part; files of earlier versions have it as `held_out`.
    #[serde(rename = "held_out")]
    pub validation: u128,
}

impl Identity {
    /// Combines the hashes with another hash of each part.
    pub(super) fn and(self, [train, validation]: [u128; 2]) -> Self {
        let both = |hashes: [u128; 2]| xxh3_128(hashes.map(u128::to_le_bytes).as_flattened());
        Self { train: both([self.train, train]), validation: both([self.validation, validation]) }
    }

    /// Identity of the training and validation tokens, and a summary of each segment. Runs on all
    /// cores, in bounded memory. `read` receives the number of bytes that were read.
    pub(super) fn and_segments(
        store: &Store,
        [train, validation]: &[TokenRanges; 2],
        read: &(dyn Fn(u64) + Sync),
    ) -> Result<(Self, Vec<SegmentSummary>), ReadError> {
        let mut segments = vec![SegmentSummary::default(); store.num_segments()];
        let mut of = |part| hash(store, part, None, &mut segments, read);
        let identity = Self { train: of(train)?, validation: of(validation)? };
        Ok((identity, segments))
    }
}

/// Result of a pass over a segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SegmentSummary {
    pub(super) largest: u32,
    /// Sum of the hashes of the segment's parts in all chunks, each with its place.
    pub(super) sum: u128,
}

/// The sum of a single segment.
pub(super) fn sum(
    store: &Store,
    parts: &[TokenRanges; 2],
    segment: usize,
) -> Result<u128, ReadError> {
    let mut found = vec![SegmentSummary::default(); store.num_segments()];
    for part in parts {
        hash(store, part, Some(segment), &mut found, &|_| ())?;
    }
    Ok(found[segment].sum)
}

/// Ranges of the tokens of a store, in order.
#[derive(Debug, Default)]
pub(super) struct TokenRanges {
    ranges: Vec<Range<usize>>,
    /// Number of tokens up to the end of each range.
    ends: Vec<usize>,
}

impl TokenRanges {
    pub(super) fn one(range: Range<usize>) -> Self {
        let mut one = Self::default();
        one.push(range);
        one
    }

    /// Adds a range. Adjacent ranges are merged.
    pub(super) fn push(&mut self, range: Range<usize>) {
        let end = self.len() + range.len();
        match (self.ranges.last_mut(), self.ends.last_mut()) {
            (Some(last), Some(of_last)) if last.end == range.start => {
                (last.end, *of_last) = (range.end, end);
            }
            _ => {
                self.ranges.push(range);
                self.ends.push(end);
            }
        }
    }

    /// Number of tokens of all ranges.
    pub(super) fn len(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    /// The ranges in the store of `tokens`, which are counted over all ranges.
    fn of(&self, tokens: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let first = self.ends.partition_point(|end| *end <= tokens.start);
        let all = self.ranges[first..].iter().zip(&self.ends[first..]);
        all.take_while(move |(range, end)| *end - range.len() < tokens.end).map(
            move |(range, end)| {
                let before = end - range.len();
                let skipped = tokens.start.saturating_sub(before);
                range.start + skipped..range.end - end.saturating_sub(tokens.end)
            },
        )
    }
}

/// Hash of the tokens, or of those in segment `only`. Updates the summary of each segment.
fn hash(
    store: &Store,
    tokens: &TokenRanges,
    only: Option<usize>,
    segments: &mut [SegmentSummary],
    read: &(dyn Fn(u64) + Sync),
) -> Result<u128, ReadError> {
    let chunks = tokens.len().div_ceil(CHUNK);
    let mut all = Xxh3Default::new();
    let chunk = |i: usize| {
        let start = i * CHUNK;
        let chunk = start..tokens.len().min(start + CHUNK);
        let found = of_chunk(store, tokens.of(chunk.clone()), only);
        read((chunk.len() * store.width) as u64);
        found
    };
    for found in cores::map_groups(TOGETHER, chunks, chunk) {
        let (hash, parts) = found?;
        all.update(&hash);
        for (segment, SegmentSummary { largest, sum }) in parts {
            let segment = &mut segments[segment];
            segment.largest = segment.largest.max(largest);
            segment.sum = segment.sum.wrapping_add(sum);
        }
    }
    Ok(all.digest128())
}

/// Hash of a chunk, and the summary of its part of each segment.
type ChunkHash = ([u8; 16], Vec<(usize, SegmentSummary)>);

fn of_chunk(
    store: &Store,
    chunk: impl Iterator<Item = Range<usize>>,
    only: Option<usize>,
) -> Result<ChunkHash, ReadError> {
    let (mut hasher, mut parts) = (Xxh3Default::new(), Vec::new());
    let (mut bytes, mut wide) = (vec![0; BLOCK * store.width], vec![0; 4 * BLOCK]);
    let all = chunk.flat_map(|range| store.parts(range));
    for (segment, part) in all.filter(|(segment, _)| only.is_none_or(|one| one == *segment)) {
        let (mut in_part, mut of_part) = (0, Xxh3Default::new());
        of_part.update(&(part.start as u64).to_le_bytes());
        for start in part.clone().step_by(BLOCK) {
            let bytes = &mut bytes[..BLOCK.min(part.end - start) * store.width];
            store.read(segment, start, bytes)?;
            in_part = in_part.max(largest(bytes, store.width));
            of_part.update(bytes);
            let wide = match store.width {
                4 => bytes,
                width => widen(bytes, width, &mut wide),
            };
            hasher.update(wide);
        }
        parts.push((segment, SegmentSummary { largest: in_part, sum: of_part.digest128() }));
    }
    Ok((hasher.digest128().to_le_bytes(), parts))
}

/// Widens tokens of 1 or 2 bytes to 4 bytes.
fn widen<'a>(bytes: &[u8], width: usize, wide: &'a mut [u8]) -> &'a [u8] {
    let wide = &mut wide[..4 * bytes.len().div_euclid(width)];
    let out = wide.as_chunks_mut::<4>().0.iter_mut();
    match width {
        1 => out.zip(bytes).for_each(|(out, token)| *out = u32::from(*token).to_le_bytes()),
        _ => out.zip(bytes.as_chunks::<2>().0).for_each(|(out, token)| {
            *out = u32::from(u16::from_le_bytes(*token)).to_le_bytes();
        }),
    }
    wide
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `tokens` in `width` bytes each.
    fn stored(tokens: &[u32], width: usize) -> Vec<u8> {
        tokens.iter().flat_map(|token| token.to_le_bytes()[..width].to_vec()).collect()
    }

    impl Identity {
        fn of(bytes: &[u8], width: usize, split: usize) -> Self {
            let mut store = Store::new(width);
            store.push_bytes(bytes);
            let parts = [0..split, split..store.num_tokens()].map(TokenRanges::one);
            Self::and_segments(&store, &parts, &|_| ()).unwrap().0
        }
    }

    #[test]
    fn the_hash_is_of_tokens_their_order_and_their_part() {
        let tokens: Vec<u32> = (0..CHUNK as u32 + 9000).map(|i| i.wrapping_mul(77) % 251).collect();
        let split = tokens.len() - 1000;
        let of = |tokens: &[u32], width, split| Identity::of(&stored(tokens, width), width, split);
        let first = of(&tokens, 1, split);
        assert_eq!(first, of(&tokens, 2, split));
        assert_eq!(first, of(&tokens, 4, split));
        for at in [5, CHUNK - 1, CHUNK] {
            let mut other = tokens.clone();
            other[at] ^= 1;
            let other = of(&other, 2, split);
            assert!(other.train != first.train && other.validation == first.validation, "{at}");
        }
        let mut other = tokens.clone();
        other.swap(split, split + 1);
        let other = of(&other, 2, split);
        assert!(other.train == first.train && other.validation != first.validation);
        // The same chunks in another order.
        let two: Vec<u32> = (0..2 * CHUNK as u32).map(|i| i / CHUNK as u32).collect();
        let reversed: Vec<u32> = two.iter().rev().copied().collect();
        assert_ne!(of(&two, 1, two.len()), of(&reversed, 1, two.len()));
        assert_ne!(of(&tokens, 1, split), of(&tokens, 1, split - 1));
        // The definition of the hash: after a change of it, no checkpoint matches its data.
        let small = of(&[1, 2, 3, 300], 2, 3);
        let wide = xxh3_128(&stored(&[1, 2, 3], 4)).to_le_bytes();
        assert_eq!(small.train, xxh3_128(&wide));
        let wide = xxh3_128(&stored(&[300], 4)).to_le_bytes();
        assert_eq!(small.validation, xxh3_128(&wide));
    }
    /// Tokens of ranges hash like consecutive tokens; the tokens between the ranges have no effect.
    #[test]
    fn pieces_are_the_tokens_that_they_name() {
        let tokens: Vec<u32> = (0..3 * CHUNK as u32).map(|i| i.wrapping_mul(31) % 250).collect();
        let mut store = Store::new(2);
        store.push_bytes(&stored(&tokens, 2));
        let ranges = [0..7, 7..CHUNK - 1, CHUNK - 2..CHUNK + 5, CHUNK + 90..3 * CHUNK];
        let mut pieces = TokenRanges::default();
        ranges.iter().for_each(|range| pieces.push(range.clone()));
        assert_eq!((pieces.ranges.len(), pieces.len()), (3, 3 * CHUNK - 84));
        let joined: Vec<u32> =
            ranges.iter().flat_map(|range| tokens[range.clone()].to_vec()).collect();
        let parts = [pieces, TokenRanges::one(9..20)];
        let (of_pieces, _) = Identity::and_segments(&store, &parts, &|_| ()).unwrap();
        let both = [&joined, &tokens[9..20]].concat();
        assert_eq!(of_pieces, Identity::of(&stored(&both, 4), 4, joined.len()));
    }
}
