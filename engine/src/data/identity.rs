//! What makes two data sets the same one: the hash of their tokens, not the files in which they stand.

use super::cores;
use super::store::{Store, Unread, largest};
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use xxhash_rust::xxh3::{Xxh3Default, xxh3_128};

/// Tokens of a chunk. The hash is one over the hashes of all chunks, so this number is part of it.
const CHUNK: usize = 1 << 16;
/// Tokens that are read and widened at once.
const BLOCK: usize = 1 << 13;
/// Chunks whose hashes are held at once.
const TOGETHER: usize = 1 << 12;

/// xxh3, 128 bits, of the tokens as 32-bit numbers. How many bytes a token has in its file, and how files are cut, do
/// not matter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Of the training part.
    pub train: u128,
    /// Of the held-out part.
    pub held_out: u128,
}

impl Identity {
    /// Of a data set without tokens that is never trained on.
    pub(super) const NONE: Self = Self { train: 0, held_out: 0 };

    /// The same tokens with more about each part.
    pub(super) fn and(self, train: &[u8], held_out: &[u8]) -> Self {
        let both = |tokens: u128, more: &[u8]| {
            xxh3_128([tokens, xxh3_128(more)].map(u128::to_le_bytes).as_flattened())
        };
        Self { train: both(self.train, train), held_out: both(self.held_out, held_out) }
    }

    /// Of tokens of which `..split` are to train, and the largest token of each segment. Runs on all cores, in bounded memory.
    /// `read`: adds bytes that were read.
    pub(super) fn and_largest(
        store: &Store,
        split: usize,
        read: &(dyn Fn(u64) + Sync),
    ) -> Result<(Self, Vec<u32>), Unread> {
        let most: Vec<AtomicU32> = (0..store.num_segments()).map(|_| AtomicU32::new(0)).collect();
        let of = |part| hash(store, part, (&most, read));
        let identity = Self { train: of(0..split)?, held_out: of(split..store.num_tokens())? };
        Ok((identity, most.into_iter().map(AtomicU32::into_inner).collect()))
    }
}

fn hash(
    store: &Store,
    tokens: Range<usize>,
    (most, read): (&[AtomicU32], &(dyn Fn(u64) + Sync)),
) -> Result<u128, Unread> {
    let chunks = tokens.len().div_ceil(CHUNK);
    let mut all = Xxh3Default::new();
    for first in (0..chunks).step_by(TOGETHER) {
        let chunk = |i: usize| {
            let start = tokens.start + (first + i) * CHUNK;
            let chunk = start..tokens.end.min(start + CHUNK);
            let hash = of_chunk(store, chunk.clone(), most);
            read((chunk.len() * store.width) as u64);
            hash
        };
        for hash in cores::map(TOGETHER.min(chunks - first), chunk) {
            all.update(&hash?);
        }
    }
    Ok(all.digest128())
}

fn of_chunk(store: &Store, chunk: Range<usize>, most: &[AtomicU32]) -> Result<[u8; 16], Unread> {
    let mut hasher = Xxh3Default::new();
    let (mut bytes, mut wide) = (vec![0; BLOCK * store.width], vec![0; 4 * BLOCK]);
    for (segment, part) in store.parts(chunk) {
        let mut in_part = 0;
        for start in part.clone().step_by(BLOCK) {
            let bytes = &mut bytes[..BLOCK.min(part.end - start) * store.width];
            store.read(segment, start, bytes)?;
            in_part = in_part.max(largest(bytes, store.width));
            let wide = match store.width {
                4 => bytes,
                width => widen(bytes, width, &mut wide),
            };
            hasher.update(wide);
        }
        most[segment].fetch_max(in_part, Ordering::Relaxed);
    }
    Ok(hasher.digest128().to_le_bytes())
}

/// Tokens of 1 or 2 bytes in 4 bytes each.
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
            Self::and_largest(&store, split, &|_| ()).unwrap().0
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
            assert!(other.train != first.train && other.held_out == first.held_out, "{at}");
        }
        let mut other = tokens.clone();
        other.swap(split, split + 1);
        let other = of(&other, 2, split);
        assert!(other.train == first.train && other.held_out != first.held_out);
        // Whole chunks in another order.
        let two: Vec<u32> = (0..2 * CHUNK as u32).map(|i| i / CHUNK as u32).collect();
        let turned: Vec<u32> = two.iter().rev().copied().collect();
        assert_ne!(of(&two, 1, two.len()), of(&turned, 1, two.len()));
        assert_ne!(of(&tokens, 1, split), of(&tokens, 1, split - 1));
        // The definition: whoever changes it makes all checkpoints strangers to their data.
        let small = of(&[1, 2, 3, 300], 2, 3);
        let wide = xxh3_128(&stored(&[1, 2, 3], 4)).to_le_bytes();
        assert_eq!(small.train, xxh3_128(&wide));
        let wide = xxh3_128(&stored(&[300], 4)).to_le_bytes();
        assert_eq!(small.held_out, xxh3_128(&wide));
    }
}
