//! Checks whether a file is UTF-8 text; the search ends soon after the first bad byte.

use super::cores;
use super::kind::{FileKind, NOT_UTF8, TEXT_CUT};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Range;

/// Bytes of a block, which one thread checks.
const BLOCK: usize = 1 << 20;
/// Number of blocks that are checked before the search can end.
const TOGETHER: usize = 256;
/// Bytes of the longest character.
const LONGEST: usize = 4;

/// The reason why bytes are not text, with its offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Utf8Error {
    /// A byte that does not begin a character.
    BadByte {
        /// Number of valid bytes before it.
        offset: u64,
        /// The byte.
        byte: u8,
    },
    /// The bytes end inside of a character.
    Cut {
        /// Offset of that character.
        offset: u64,
    },
}

impl Utf8Error {
    /// The kind of file that the error shows.
    pub(super) const fn kind(self) -> FileKind {
        match self {
            Self::BadByte { .. } => NOT_UTF8,
            Self::Cut { .. } => TEXT_CUT,
        }
    }
}

impl fmt::Display for Utf8Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FileKind { what, remedy } = self.kind();
        match self {
            Self::BadByte { offset, byte } => {
                write!(f, "it is {what} (byte 0x{byte:02x} at offset {offset}): {remedy}")
            }
            Self::Cut { offset } => {
                write!(f, "it is {what} (which begins at offset {offset}): {remedy}")
            }
        }
    }
}

/// The first fault in `bytes` bytes, found on all cores. `read` fills a slice with the bytes from
/// an offset on; `looked_at` receives the length of each checked block.
pub(super) fn fault<E: Send>(
    bytes: u64,
    read: impl Fn(u64, &mut [u8]) -> Result<(), E> + Sync,
    looked_at: impl Fn(u64) + Sync,
) -> Result<Option<Utf8Error>, E> {
    let bytes = bytes as usize;
    let block = |i: usize| {
        let start = i * BLOCK;
        let block = start..bytes.min(start + BLOCK);
        let mut text = vec![0; (block.end + LONGEST - 1).min(bytes) - start];
        read(start as u64, &mut text)?;
        looked_at(block.len() as u64);
        Ok(in_block(&text, block, bytes))
    };
    let mut found = cores::map_groups(TOGETHER, bytes.div_ceil(BLOCK), block);
    found.find_map(Result::transpose).transpose()
}

/// The first fault of characters that begin in `block`; `text` continues after the block.
fn in_block(text: &[u8], block: Range<usize>, bytes: usize) -> Option<Utf8Error> {
    // Skip the rest of a character that began in the previous block.
    let rest_of_one = |from: usize| {
        let rest = text[from..].iter().take(LONGEST - 1);
        rest.take_while(|byte| **byte & 0xc0 == 0x80).count()
    };
    let start = if block.start == 0 { 0 } else { rest_of_one(0) };
    let end = block.len() + rest_of_one(block.len());
    let e = str::from_utf8(&text[start..end]).err()?;
    let place = start + e.valid_up_to();
    let offset = (block.start + place) as u64;
    let at_end = e.error_len().is_none() && block.start + end == bytes;
    Some(match at_end {
        true => Utf8Error::Cut { offset },
        false => Utf8Error::BadByte { offset, byte: text[place] },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;
    use std::sync::atomic::{AtomicU64, Ordering};

    /// The first error of UTF-8 in `text` followed by `zeros` zero bytes, and the number of checked
    /// bytes.
    fn found(text: &[u8], zeros: u64) -> (Option<Utf8Error>, u64) {
        let looked_at = AtomicU64::new(0);
        let read = |offset: u64, out: &mut [u8]| {
            let there = text.get(offset as usize..).unwrap_or(&[]);
            let there = &there[..there.len().min(out.len())];
            out[..there.len()].copy_from_slice(there);
            Ok::<_, Infallible>(())
        };
        let add = |bytes| _ = looked_at.fetch_add(bytes, Ordering::Relaxed);
        let Ok(fault) = fault(text.len() as u64 + zeros, read, add);
        (fault, looked_at.into_inner())
    }

    /// The result of the standard library for the whole text.
    fn expected(text: &[u8]) -> Option<Utf8Error> {
        let e = str::from_utf8(text).err()?;
        let offset = e.valid_up_to() as u64;
        Some(match e.error_len() {
            None => Utf8Error::Cut { offset },
            Some(_) => Utf8Error::BadByte { offset, byte: text[e.valid_up_to()] },
        })
    }

    #[test]
    fn what_is_no_text_is_found_without_reading_on() {
        let (fault, read) = found(b"caf\xe9", 1 << 40);
        assert_eq!(fault, Some(Utf8Error::BadByte { offset: 3, byte: 0xe9 }));
        assert_eq!(read, (TOGETHER * BLOCK) as u64);
    }

    #[test]
    fn a_character_across_two_blocks_is_one_and_faults_are_those_of_the_whole() {
        let around: [&[u8]; 16] = [
            b"ab",
            "é".as_bytes(),
            "漢".as_bytes(),
            "🦀".as_bytes(),
            b"\xc3",
            b"\xc3\xff",
            b"\xe6\xbc",
            b"\xf0\x9f\xa6",
            b"\x80",
            b"\x80\x80",
            b"\x80\x80\x80\x80",
            b"\xed\xa0\x80",
            b"\xc0\x80",
            b"\xf5\x80\x80\x80",
            b"\xf0\x9f\xa6x",
            b"\xe6\xbc\x80\x80\x80\x80",
        ];
        for before in BLOCK - 4..=BLOCK + 1 {
            for part in around {
                for after in [&b""[..], b"and on", &[b'y'; BLOCK]] {
                    let text = [&vec![b' '; before][..], part, after].concat();
                    let (fault, read) = found(&text, 0);
                    let case = format!("{part:x?} at {before}, {} behind", after.len());
                    assert_eq!(fault, expected(&text), "{case}");
                    assert_eq!(read, text.len() as u64, "{case}");
                }
            }
        }
        assert_eq!(found(b"", 0).0, None);
        assert_eq!(found(b"\xe6\xbc", 0).0, Some(Utf8Error::Cut { offset: 0 }));
    }
}
