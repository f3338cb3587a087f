//! The mask (.mask) next to a token file of prepared chats: which tokens count as targets.
//!
//! Layout: a magic; the numbers of tokens and of documents, 8 bytes each; the number of targets of
//! each document, 4 bytes; a bit for each token, lowest first; an 8-byte hash of each block of all
//! the bytes before. A run reads the bits of a sample from the file, like the tokens.

use super::megatron::{FormatFault, Index};
use super::open::open_regular;
use super::problem::Problem;
use super::store::{ReadError, TokenFile};
use config::{DataFormat, Packing};
use std::ops::Range;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::xxh3_64;

/// First bytes of each mask.
const MAGIC: &[u8; 16] = b"onebox targets 1";
/// Bytes of a mask file before the numbers of targets of the documents.
const HEAD: u64 = 32;
/// Bytes that share a hash.
const BLOCK: u64 = 64 << 10;
/// Text after the number in the file name of a part of prepared chats: `000012.chat.bin`.
const CHAT: &str = ".chat";
/// Bytes of a hash.
const HASH: u64 = 8;

/// Path of the mask of a token file.
pub(super) fn path_of(tokens: &Path) -> PathBuf {
    tokens.with_extension("mask")
}

/// Bytes of a mask without the hashes.
const fn content(tokens: u64, documents: u64) -> u64 {
    HEAD + 4 * documents + tokens.div_ceil(8)
}

/// Bytes of the whole mask of this many tokens and documents.
pub(super) const fn length(tokens: u64, documents: u64) -> u64 {
    let content = content(tokens, documents);
    content + HASH * content.div_ceil(BLOCK)
}

/// Encodes a mask from the number of targets of each document and a flag for each token.
pub(super) fn written(counts: &[u32], counted: &[bool]) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend([counted.len(), counts.len()].map(|n| (n as u64).to_le_bytes()).as_flattened());
    bytes.extend(counts.iter().flat_map(|count| count.to_le_bytes()));
    let byte = |eight: &[bool]| -> u8 {
        eight.iter().enumerate().map(|(i, counts)| u8::from(*counts) << i).sum()
    };
    bytes.extend(counted.chunks(8).map(byte));
    let hash = |block: &[u8]| xxh3_64(block).to_le_bytes();
    let hashes: Vec<u8> = bytes.chunks(BLOCK as usize).flat_map(hash).collect();
    bytes.extend(hashes);
    bytes
}

/// File name of part `part`; names sort like parts. The name of a chat part shows that it has a
/// mask.
pub(super) fn name_of_part(part: usize, is_masked: bool) -> String {
    let chat = if is_masked { CHAT } else { "" };
    format!("{part:06}{chat}.bin")
}

/// Whether a file has the name of a part, finished or not.
pub(super) fn is_of_part(path: &Path) -> bool {
    let number = path.file_name().and_then(|name| name.to_str()?.split('.').next());
    number.is_some_and(|n| n.len() == 6 && n.bytes().all(|byte| byte.is_ascii_digit()))
}

/// Refuses a part of chats without its mask: all tokens would count, also the tokens of prompts.
pub(super) fn check_there(tokens: &Path) -> Result<(), Problem> {
    let stem = tokens.file_stem().and_then(|stem| stem.to_str());
    let number = stem.and_then(|stem| stem.strip_suffix(CHAT));
    let is_part = number.is_some_and(|n| n.bytes().all(|byte| byte.is_ascii_digit()));
    let mask = path_of(tokens);
    (!is_part || mask.exists()).then_some(()).ok_or(Problem::LostMask { mask })
}

/// Refuses samples that would ignore the mask next to a token file.
pub(super) fn check_use(
    tokens: &Path,
    format: &DataFormat,
    packing: Packing,
) -> Result<(), Problem> {
    let mask = path_of(tokens);
    let looks = *format == DataFormat::Megatron && packing != Packing::Windows;
    (looks || format.is_text() || !mask.exists()).then_some(()).ok_or(Problem::UnusedMask { mask })
}

/// Buffer of mask bits, kept for the next look.
#[derive(Debug)]
pub(super) struct MaskBits<'a> {
    bytes: &'a mut [u8],
    /// Number of the mask that the bits belong to.
    mask: usize,
    /// Range of the bytes of bits that are in the buffer.
    held: Range<u64>,
}

impl<'a> MaskBits<'a> {
    /// An empty buffer that uses the memory of `bytes`.
    pub(super) const fn new(bytes: &'a mut [u8]) -> Self {
        Self { bytes, mask: 0, held: 0..0 }
    }
}

/// An open mask file.
#[derive(Debug)]
pub(super) struct Mask {
    pub(super) file: TokenFile,
    /// Number of the file's first token among all tokens.
    start: usize,
    tokens: u64,
    documents: u64,
}

impl Mask {
    /// Opens the mask next to a token file with this index, and checks head and length; `None`
    /// without a mask. `start` is the number of the file's first token among all tokens.
    pub(super) fn open_for(
        tokens: &TokenFile,
        index: &Index,
        start: usize,
    ) -> Result<Option<Self>, Problem> {
        let path = path_of(&tokens.path);
        let fault =
            |problem: Problem| Problem::BadMask { mask: path.clone(), fault: problem.to_string() };
        let file = match open_regular(&path) {
            Err(Problem::Missing) => return Ok(None),
            opened => opened.map_err(fault)?,
        };
        let file = TokenFile::new(&path, file).map_err(Problem::Unreadable).map_err(fault)?;
        let tokens = tokens.stamp.bytes.div_euclid(index.width() as u64);
        let mask = Self { file, start, tokens, documents: index.num_documents() };
        mask.check_head().map_err(|fault| mask.bad(&fault))?;
        Ok(Some(mask))
    }

    fn check_head(&self) -> Result<(), FormatFault> {
        let Self { file, tokens, documents, .. } = self;
        let bytes = file.stamp.bytes;
        if bytes < HEAD {
            return Err(FormatFault { offset: bytes, why: "the file ends in its head".into() });
        }
        let mut head = [0; HEAD as usize];
        file.read(0, &mut head)?;
        if !head.starts_with(MAGIC) {
            return Err(FormatFault {
                offset: 0,
                why: "it does not begin as a mask of onebox".into(),
            });
        }
        let words = head.as_chunks::<8>().0;
        for (word, of, what) in [(2, tokens, "tokens"), (3, documents, "documents")] {
            let has = u64::from_le_bytes(words[word]);
            if has != *of {
                let why = format!("it is of {has} {what}, and the files beside it have {of}");
                return Err(FormatFault { offset: 8 * word as u64, why });
            }
        }
        let needs = length(*tokens, *documents);
        if bytes != needs {
            let why = format!(
                "the file has {bytes} bytes, and the mask of {tokens} tokens and {documents} documents has {needs}"
            );
            return Err(FormatFault { offset: bytes.min(needs), why });
        }
        Ok(())
    }

    /// Compares the whole mask with its hashes, in bounded memory.
    pub(super) fn check(&self) -> Result<(), Problem> {
        self.check_hashes().map_err(|fault| self.bad(&fault))
    }

    fn check_hashes(&self) -> Result<(), FormatFault> {
        let end = content(self.tokens, self.documents);
        let (mut block, mut hash) = (vec![0; BLOCK as usize], [0; HASH as usize]);
        for offset in (0..end).step_by(BLOCK as usize) {
            let some = &mut block[..BLOCK.min(end - offset) as usize];
            self.file.read(offset, some)?;
            self.file.read(end + offset.div_euclid(BLOCK) * HASH, &mut hash)?;
            if hash != xxh3_64(some).to_le_bytes() {
                let why =
                    format!("the {} bytes from there on are not what was written", some.len());
                return Err(FormatFault { offset, why });
            }
        }
        Ok(())
    }

    /// Converts a fault of the mask into a problem of the data.
    pub(super) fn bad(&self, fault: &FormatFault) -> Problem {
        Problem::BadMask { mask: self.file.path.clone(), fault: fault.to_string() }
    }

    /// Number of targets of each of `documents`.
    pub(super) fn counts(&self, documents: Range<u64>) -> Result<Vec<u32>, Problem> {
        let mut bytes = vec![0; 4 * (documents.end - documents.start) as usize];
        let read = self.file.read(HEAD + 4 * documents.start, &mut bytes);
        read.map_err(|unread| self.bad(&unread.into()))?;
        Ok(bytes.as_chunks().0.iter().map(|count| u32::from_le_bytes(*count)).collect())
    }

    /// Number of targets among `tokens` of the file.
    pub(super) fn count(&self, tokens: Range<usize>) -> Result<u32, Problem> {
        let (mut bytes, mut count) = ([0; 1 << 10], tokens.len() as u32);
        let read = self.not_counted(tokens, &mut MaskBits::new(&mut bytes), |_| count -= 1);
        read.map(|()| count).map_err(|unread| self.bad(&unread.into()))
    }

    /// Calls `each` with the index within `tokens`, tokens of the file, of each token that does not
    /// count. `bits` must belong to this mask.
    pub(super) fn not_counted(
        &self,
        tokens: Range<usize>,
        bits: &mut MaskBits<'_>,
        mut each: impl FnMut(usize),
    ) -> Result<(), ReadError> {
        for (i, token) in tokens.enumerate() {
            let (byte, bit) = (token as u64 / 8, token % 8);
            if !bits.held.contains(&byte) {
                let there = content(self.tokens, self.documents);
                let offset = HEAD + 4 * self.documents + byte;
                let some = (bits.bytes.len() as u64).min(there - offset);
                bits.held = 0..0;
                self.file.read(offset, &mut bits.bytes[..some as usize])?;
                bits.held = byte..byte + some;
            }
            if bits.bytes[(byte - bits.held.start) as usize] >> bit & 1 == 0 {
                each(i);
            }
        }
        Ok(())
    }
}

/// Calls `each` with the index within `tokens`, all of one file, of each token that does not count.
/// There is one mask per segment.
pub(super) fn not_counted(
    masks: &[Mask],
    tokens: Range<usize>,
    bits: &mut MaskBits<'_>,
    each: impl FnMut(usize),
) -> Result<(), ReadError> {
    let number = masks.partition_point(|mask| mask.start <= tokens.start) - 1;
    if bits.mask != number {
        (bits.mask, bits.held) = (number, 0..0);
    }
    let mask = &masks[number];
    mask.not_counted(tokens.start - mask.start..tokens.end - mask.start, bits, each)
}

/// Error for the document at token `at` whose bits and head disagree about the number of targets.
pub(super) fn contradiction(masks: &[Mask], at: usize, bits: u32, count: u32) -> ReadError {
    let number = masks.partition_point(|mask| mask.start <= at) - 1;
    let Mask { file, start, documents, .. } = &masks[number];
    let offset = HEAD + 4 * documents + (at - start) as u64 / 8;
    let why = format!("the document has {bits} targets there, and {count} in the head of the file");
    file.unread(offset, why)
}

#[cfg(test)]
mod tests {
    use super::super::data_files::tests::{folder, path};
    use super::super::megatron;
    use super::super::{Checks, Corpus, CorpusSplit, DataError, SampleSettings};
    use super::*;
    use device::random;
    use std::fs;
    use tempfile::TempDir;

    const LENGTHS: [usize; 6] = [7, 2, 9, 30, 8, 11];

    /// For each token, whether it counts; never the first token of a document.
    fn counted(seed: u64) -> Vec<Vec<bool>> {
        let counts = |d: usize, i: usize| i > 0 && random::below(seed, (d * 99 + i) as u64, 3) > 0;
        let document = |(d, length): (usize, &usize)| {
            let mut all: Vec<bool> = (0..*length).map(|i| counts(d, i)).collect();
            all[length - 1] = true;
            all
        };
        LENGTHS.iter().enumerate().map(document).collect()
    }

    fn of(documents: &[Vec<bool>]) -> Vec<u8> {
        let count = |document: &Vec<bool>| document.iter().filter(|counts| **counts).count() as u32;
        written(&documents.iter().map(count).collect::<Vec<_>>(), &documents.concat())
    }

    /// Two token files with these masks.
    fn files(masks: [Option<&[u8]>; 2]) -> TempDir {
        let tokens: Vec<u8> = (0..LENGTHS.iter().sum::<usize>()).map(|i| i as u8).collect();
        let tokens: Vec<u8> = tokens.iter().flat_map(|token| [*token, 0]).collect();
        let index = megatron::written(LENGTHS.iter().copied(), 2);
        let folder = folder(&[("t/0.bin", &tokens), ("t/0.idx", &index)]);
        for (name, bytes) in [("t/1.bin", &tokens), ("t/1.idx", &index)] {
            fs::write(folder.path().join(name), bytes).unwrap();
        }
        for (i, mask) in masks.iter().enumerate() {
            let path = folder.path().join(format!("t/{i}.mask"));
            mask.iter().for_each(|mask| fs::write(&path, mask).unwrap());
        }
        folder
    }

    fn open(
        folder: &TempDir,
        (format, packing): (DataFormat, Packing),
        (seq_len, truncate): (usize, bool),
    ) -> Result<Corpus, DataError> {
        let with = SampleSettings { format: &format, packing, truncate };
        Corpus::open_checked(
            CorpusSplit::Cut(&path(folder, "t"), 0.25),
            with,
            Checks::none(),
            seq_len,
        )
    }

    const ALONE: (DataFormat, Packing) = (DataFormat::Megatron, Packing::None);

    #[test]
    fn documents_count_what_their_masks_say() {
        let both = [counted(1), counted(2)];
        let [one, other] = both.each_ref().map(|documents| of(documents));
        assert_eq!(one.len() as u64, length(67, 6));
        let folder = files([Some(&one), Some(&other)]);
        let all = both.concat();
        let data = open(&folder, ALONE, (32, false)).unwrap();
        let of_place = |data: &Corpus, place: usize| {
            let [document] = &data.documents(place).unwrap()[..] else { panic!("one") };
            document.counted.clone()
        };
        for (place, expected) in all.iter().take(9).enumerate() {
            assert_eq!(&of_place(&data, place), expected, "{place}");
            let (mut inputs, mut targets) = ([0; 32], [0; 32]);
            data.fill_train(place, &mut inputs, &mut targets).unwrap();
            let filled: Vec<bool> = targets.iter().map(|target| *target >= 0).collect();
            assert_eq!(filled[..expected.len() - 1], expected[1..]);
            let count = filled.iter().filter(|counts| **counts).count() as u64;
            assert_eq!(data.targets(place), count);
        }
        // Documents that are too long are left out or cut, never divided.
        for packing in [Packing::None, Packing::Documents] {
            let long = open(&folder, (DataFormat::Megatron, packing), (12, false)).unwrap_err();
            let message = long.to_string();
            assert!(
                message.contains("2 of 12 documents have more tokens than model.seq_len"),
                "{message}"
            );
            assert!(message.contains("are left out"), "{message}");
        }
        let data = open(&folder, ALONE, (8, true)).unwrap();
        for (place, expected) in all.iter().take(9).enumerate() {
            let expected = &expected[..expected.len().min(9)];
            assert_eq!(of_place(&data, place), expected);
            assert_eq!(data.targets(place), expected.iter().filter(|c| **c).count() as u64);
        }
        let packed =
            open(&folder, (DataFormat::Megatron, Packing::Documents), (40, false)).unwrap();
        for place in 0..packed.num_train_samples() {
            let documents = packed.documents(place).unwrap();
            assert!(documents.iter().all(|document| all.contains(&document.counted)), "{place}");
            let counts = documents.iter().flat_map(|d| &d.counted).filter(|c| **c).count();
            assert_eq!(packed.targets(place), counts as u64);
        }
    }

    #[test]
    fn a_damaged_mask_is_named_with_its_byte() {
        let (good, other) = (of(&counted(1)), of(&counted(2)));
        let refused = |mask: &[u8]| {
            let folder = files([Some(&good), Some(mask)]);
            open(&folder, ALONE, (32, false)).unwrap_err().to_string()
        };
        for i in 0..other.len() {
            let mut flipped = other.clone();
            flipped[i] ^= 1 << (i % 8);
            let message = refused(&flipped);
            let at = if i < 16 {
                0
            } else if i < 32 {
                i - i % 8
            } else {
                0
            };
            assert!(message.contains("t/1.bin: its mask "), "{message}");
            assert!(
                message.contains(&format!("1.mask is damaged, at byte {at}: ")),
                "{i}: {message}"
            );
            let message = refused(&other[..i]);
            assert!(
                message.contains(&format!("1.mask is damaged, at byte {i}: ")),
                "{i}: {message}"
            );
        }
        let message = refused(&[&other[..], &[0]].concat());
        assert!(message.contains(&format!("at byte {}: the file has", other.len())), "{message}");
        // A complete mask with another number of targets than its bits have.
        let count = |document: &Vec<bool>| document.len() as u32 - 1;
        let documents = counted(2);
        let counts: Vec<u32> = documents.iter().map(count).collect();
        let message = refused(&written(&counts, &documents.concat()));
        assert!(
            message.contains("1.mask: cannot read it from byte 56 on: the document has"),
            "{message}"
        );
        // A fault in a block after the first.
        let large = written(&[1; 40_000], &[true; 80_000]);
        let mask = |bytes: &[u8]| {
            let folder = folder(&[("m", bytes)]);
            let path = folder.path().join("m");
            let file = TokenFile::new(&path, fs::File::open(&path).unwrap()).unwrap();
            let mask = Mask { file, start: 0, tokens: 80_000, documents: 40_000 };
            mask.check_head().and_then(|()| mask.check_hashes()).map_err(|fault| fault.offset)
        };
        assert_eq!(mask(&large), Ok(()));
        for at in [70_000, 2 * BLOCK as usize, large.len() - 9] {
            let mut flipped = large.clone();
            flipped[at] ^= 1;
            let block = if at < 2 * BLOCK as usize || at > 170_032 { BLOCK } else { 2 * BLOCK };
            assert_eq!(mask(&flipped), Err(block), "{at}");
        }
    }

    #[test]
    fn a_mask_that_nobody_would_look_at_and_one_of_some_files_are_refused() {
        let mask = of(&counted(1));
        let refused = |masks, how, text: &str| {
            let message = open(&files(masks), how, (32, false)).unwrap_err().to_string();
            assert!(message.contains(text), "{text}: {message}");
        };
        let both = [Some(&mask[..]), Some(&mask)];
        for how in [(DataFormat::Megatron, Packing::Windows), (DataFormat::U16, Packing::Windows)] {
            refused(both, how, "0.mask says which of its tokens count; set data.format: Megatron");
        }
        refused([Some(&mask), None], ALONE, "1.mask is not there, and other files");
        refused([None, Some(&mask)], ALONE, "0.mask is not there, and other files");
        let folder = files(both);
        let how = DataFormat::Megatron;
        let named = Corpus::open(&path(&folder, "t/*.mask"), None, how, 0.25, 99, 4).unwrap_err();
        assert!(named.to_string().contains("it is a mask of onebox: name the .bin"), "{named}");
    }
}
