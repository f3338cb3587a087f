//! What makes two data sets the same one: the hash of their tokens, not the files in which they stand.

use super::cores;
use xxhash_rust::xxh3::{Xxh3Default, xxh3_128};

/// Tokens of a chunk. The hash is one over the hashes of all chunks, so this number is part of it.
const CHUNK: usize = 1 << 16;
/// Tokens that are widened at once.
const BLOCK: usize = 1 << 12;

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

    /// Of little-endian tokens of `width` bytes, of which `..split` are to train. Runs on all cores.
    pub(super) fn of(bytes: &[u8], width: usize, split: usize) -> Self {
        let (train, held_out) = bytes.split_at(split * width);
        Self { train: hash(train, width), held_out: hash(held_out, width) }
    }
}

fn hash(bytes: &[u8], width: usize) -> u128 {
    let chunks: Vec<&[u8]> = bytes.chunks(CHUNK * width).collect();
    let chunk = |i: usize| {
        let (mut hasher, mut wide) = (Xxh3Default::new(), Vec::with_capacity(4 * BLOCK));
        for block in chunks[i].chunks(BLOCK * width) {
            wide.clear();
            match width {
                1 => wide.extend(block.iter().flat_map(|byte| u32::from(*byte).to_le_bytes())),
                2 => {
                    let tokens = block.as_chunks().0.iter().map(|token| u16::from_le_bytes(*token));
                    wide.extend(tokens.flat_map(|token| u32::from(token).to_le_bytes()));
                }
                _ => wide.extend_from_slice(block),
            }
            hasher.update(&wide);
        }
        hasher.digest128().to_le_bytes()
    };
    xxh3_128(cores::map(chunks.len(), chunk).as_flattened())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `tokens` in `width` bytes each.
    fn stored(tokens: &[u32], width: usize) -> Vec<u8> {
        tokens.iter().flat_map(|token| token.to_le_bytes()[..width].to_vec()).collect()
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
