//! The index (.idx) that Megatron writes next to a token file (.bin): the type of the tokens, and
//! the starts of sequences and documents. `MMIDIDX` marks mapped data sets; `TNTIDX` marks older
//! data sets, which fairseq writes without documents.

use super::open::open_regular;
use super::problem::Problem;
use super::store::{ReadError, TokenFile};
use std::fmt;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

const MAPPED: &[u8; 9] = b"MMIDIDX\0\0";
const OLD: &[u8; 8] = b"TNTIDX\0\0";
/// Numbers of an index per read.
pub(super) const BLOCK: u64 = 1 << 16;

/// Type of the tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Dtype {
    pub(super) name: &'static str,
    /// Bytes of a token; `None` for types that onebox does not read.
    pub(super) width: Option<usize>,
    /// Exclusive upper bound of the tokens.
    pub(super) end: usize,
}

impl Dtype {
    fn of(code: u64) -> Self {
        let (name, width, end) = match code {
            1 => ("uint8", Some(1), 1 << 8),
            2 => ("int8", None, 0),
            3 => ("int16", Some(2), 1 << 15),
            4 => ("int32", Some(4), 1 << 31),
            5 => ("int64", None, 0),
            6 => ("float64", None, 0),
            7 => ("float32", None, 0),
            8 => ("uint16", Some(2), 1 << 16),
            _ => ("an unknown type", None, 0),
        };
        Self { name, width, end }
    }
}

/// Path of the index of a token file.
pub(super) fn path_of(tokens: &Path) -> PathBuf {
    tokens.with_extension("idx")
}

/// The token type in the head of the index next to a token file; `None` without an index.
pub(super) fn dtype_of(tokens: &Path) -> Option<Dtype> {
    let mut head = [0; 24];
    open_regular(&path_of(tokens)).ok()?.read_exact_at(&mut head[..18], 0).ok()?;
    if head.starts_with(MAPPED) {
        return Some(Dtype::of(head[17].into()));
    }
    let code = head[16..].first_chunk().filter(|_| head.starts_with(OLD))?;
    Some(Dtype::of(u64::from_le_bytes(*code)))
}

/// Encodes an index like Megatron, with one sequence per document; tokens have 2 or 4 bytes.
pub(super) fn written(lengths: impl Iterator<Item = usize> + Clone, width: usize) -> Vec<u8> {
    let count = lengths.clone().count() as u64;
    let code = if width == 2 { 8 } else { 4 };
    let mut bytes = [&MAPPED[..], &1u64.to_le_bytes(), &[code]].concat();
    bytes.extend([count, count + 1].map(u64::to_le_bytes).as_flattened());
    lengths.clone().for_each(|tokens| bytes.extend((tokens as u32).to_le_bytes()));
    let starts = lengths.scan(0, |end, tokens| {
        let start = *end;
        *end += (tokens * width) as u64;
        Some(start)
    });
    starts.for_each(|start| bytes.extend(start.to_le_bytes()));
    (0..=count).for_each(|sequence| bytes.extend(sequence.to_le_bytes()));
    bytes
}

/// Consecutive numbers in an index.
#[derive(Clone, Copy, Debug)]
struct Column {
    at: u64,
    /// Bytes of a number.
    width: u64,
}

/// A fault of an index or a mask, and its offset in bytes.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct FormatFault {
    pub(super) offset: u64,
    pub(super) why: String,
}

impl fmt::Display for FormatFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at byte {}: {}", self.offset, self.why)
    }
}

impl From<ReadError> for FormatFault {
    fn from(ReadError { offset, why, .. }: ReadError) -> Self {
        Self { offset, why: format!("it cannot be read: {why}") }
    }
}

/// An open index.
#[derive(Debug)]
pub(super) struct Index {
    pub(super) file: TokenFile,
    pub(super) dtype: Dtype,
    sequences: u64,
    /// Number of tokens of each sequence.
    sizes: Column,
    /// Start of each sequence: the number of its first token times `unit`.
    starts: Column,
    unit: u64,
    /// Old indexes only: start of each sequence's dimensions among all; a sequence of tokens has
    /// one.
    dimensions: Option<Column>,
    /// First sequence of each document, then the number of sequences; with the length of this list.
    /// `None` if each sequence is a document.
    documents: Option<(Column, u64)>,
}

impl Index {
    /// Opens the index next to a token file and checks the length of the index.
    pub(super) fn open_for(tokens: &TokenFile) -> Result<Self, Problem> {
        let path = path_of(&tokens.path);
        let bad =
            |fault: Problem| Problem::BadIndex { index: path.clone(), fault: fault.to_string() };
        let file = open_regular(&path).map_err(|problem| match problem {
            Problem::Missing => Problem::NoIndex { index: path.clone() },
            other => bad(other),
        })?;
        let file = TokenFile::new(&path, file).map_err(|e| bad(Problem::Unreadable(e)))?;
        let index = Self::read(file)
            .map_err(|fault| Problem::BadIndex { index: path.clone(), fault: fault.to_string() })?;
        match index.dtype.width {
            // The index is rarely read, and there may be thousands, so do not keep it open.
            Some(_) => Ok(Self { file: index.file.closed(), ..index }),
            None => Err(Problem::StrangeTokens { index: path, dtype: index.dtype.name }),
        }
    }

    /// Reads the head, and compares its numbers with the length of the file.
    fn read(file: TokenFile) -> Result<Self, FormatFault> {
        let bytes = file.stamp.bytes;
        let mut head = [0; 56];
        let head = &mut head[..bytes.min(56) as usize];
        file.read(0, head)?;
        let word = |at: usize| {
            let word = head.get(at..at + 8).and_then(|word| word.try_into().ok());
            let cut = || FormatFault { offset: bytes, why: "the file ends in its head".into() };
            word.map(u64::from_le_bytes).ok_or_else(cut)
        };
        let version = |at: usize| match word(at)? {
            1 => Ok(()),
            other => {
                let why = format!("it has version {other}, and onebox reads version 1");
                Err(FormatFault { offset: at as u64, why })
            }
        };
        if head.starts_with(MAPPED) {
            version(9)?;
            let (sequences, documents) = (word(18)?, word(26)?);
            let code = u64::from(head[17]);
            let fits = |modes: u128| {
                34 + (12 + modes) * u128::from(sequences) + 8 * u128::from(documents)
                    == u128::from(bytes)
            };
            if !fits(0) && !fits(1) {
                return Err(too_long(18, sequences, documents, bytes));
            }
            let starts = 34 + 4 * sequences;
            let dtype = Dtype::of(code);
            return Ok(Self {
                file,
                dtype,
                sequences,
                sizes: Column { at: 34, width: 4 },
                starts: Column { at: starts, width: 8 },
                unit: dtype.width.unwrap_or(1) as u64,
                dimensions: None,
                documents: Some((Column { at: starts + 8 * sequences, width: 8 }, documents)),
            });
        }
        if !head.starts_with(OLD) {
            let why = "it begins neither with MMIDIDX nor with TNTIDX, as Megatron's do".into();
            return Err(FormatFault { offset: 0, why });
        }
        version(8)?;
        let (dtype, sequences, sizes) = (Dtype::of(word(16)?), word(32)?, word(40)?);
        if let Some(width) = dtype.width
            && word(24)? != width as u64
        {
            let why = format!("tokens of {} have {} bytes in it", dtype.name, word(24)?);
            return Err(FormatFault { offset: 24, why });
        }
        if sizes != sequences {
            let why = format!("{sequences} sequences have {sizes} dimensions, and tokens have one");
            return Err(FormatFault { offset: 40, why });
        }
        // fairseq writes neither the number of documents nor the documents.
        let without = 48 + 24 * u128::from(sequences) + 16;
        let documents = match u128::from(bytes) == without {
            true => None,
            false => Some(word(48)?),
        };
        let at = if documents.is_some() { 56 } else { 48 };
        let with = without + documents.map_or(0, |documents| 8 + 8 * u128::from(documents));
        if with != u128::from(bytes) {
            return Err(too_long(32, sequences, documents.unwrap_or(0), bytes));
        }
        let starts = at + 8 * (sequences + 1);
        let sizes = starts + 8 * (sequences + 1);
        let column = |at| Column { at, width: 8 };
        Ok(Self {
            file,
            dtype,
            sequences,
            sizes: column(sizes),
            starts: column(starts),
            unit: 1,
            dimensions: Some(column(at)),
            documents: documents.map(|count| (column(sizes + 8 * sequences), count)),
        })
    }

    /// Bytes of a token.
    pub(super) fn width(&self) -> usize {
        let Some(width) = self.dtype.width else { unreachable!("other types are refused") };
        width
    }

    /// Number of documents.
    pub(super) fn num_documents(&self) -> u64 {
        self.documents.map_or(self.sequences, |(_, count)| count.saturating_sub(1))
    }

    /// Checks the consistency of all sequences, documents and the token file, in bounded memory.
    pub(super) fn check(&self, tokens: &TokenFile) -> Result<(), Problem> {
        let sum = self.check_sequences().map_err(|fault| self.bad(&fault))?;
        self.check_documents().map_err(|fault| self.bad(&fault))?;
        let needs = sum.saturating_mul(self.width() as u64);
        if needs != tokens.stamp.bytes {
            let (index, bytes) = (self.file.path.clone(), tokens.stamp.bytes);
            return Err(Problem::OtherLength { index, needs, bytes });
        }
        Ok(())
    }

    /// Converts a fault of the index into a problem of the data.
    pub(super) fn bad(&self, fault: &FormatFault) -> Problem {
        Problem::BadIndex { index: self.file.path.clone(), fault: fault.to_string() }
    }

    /// Checks the sequences; returns their number of tokens.
    fn check_sequences(&self) -> Result<u64, FormatFault> {
        let mut sum = 0u64;
        for first in (0..self.sequences).step_by(BLOCK as usize) {
            let block = first..self.sequences.min(first + BLOCK);
            let (sizes, starts) = (
                self.numbers(self.sizes, block.clone())?,
                self.numbers(self.starts, block.clone())?,
            );
            for ((i, size), start) in block.clone().zip(sizes).zip(starts) {
                let fault =
                    |column: Column, why| FormatFault { offset: column.at + i * column.width, why };
                let Ok(size) = u64::try_from(size) else {
                    return Err(fault(self.sizes, format!("sequence {i} has {size} tokens")));
                };
                if i128::from(start) != i128::from(sum) * i128::from(self.unit) {
                    let unit = if self.unit == 1 { "token" } else { "byte" };
                    let end = u128::from(sum) * u128::from(self.unit);
                    let why = format!(
                        "sequence {i} begins at {unit} {start}, and the ones before it end at {end}"
                    );
                    return Err(fault(self.starts, why));
                }
                let Some(with) = sum.checked_add(size) else {
                    return Err(fault(self.sizes, format!("sequence {i} has {size} tokens")));
                };
                sum = with;
            }
        }
        self.check_old(sum).map(|()| sum)
    }

    /// Checks fields of old indexes only: the end of the last sequence, and the dimensions.
    fn check_old(&self, sum: u64) -> Result<(), FormatFault> {
        let Some(dimensions) = self.dimensions else { return Ok(()) };
        let end = self.numbers(self.starts, self.sequences..self.sequences + 1)?[0];
        if end != sum as i64 {
            let offset = self.starts.at + self.sequences * self.starts.width;
            let why = format!("the sequences end at token {end}, and have {sum} tokens");
            return Err(FormatFault { offset, why });
        }
        for first in (0..=self.sequences).step_by(BLOCK as usize) {
            let block = first..(self.sequences + 1).min(first + BLOCK);
            let numbers = self.numbers(dimensions, block.clone())?;
            if let Some((i, first)) = block.zip(numbers).find(|(i, first)| *i as i64 != *first) {
                let why =
                    format!("the dimensions of sequence {i} begin at {first}, and tokens have one");
                return Err(FormatFault { offset: dimensions.at + i * dimensions.width, why });
            }
        }
        Ok(())
    }

    fn check_documents(&self) -> Result<(), FormatFault> {
        let Some((column, count)) = self.documents else { return Ok(()) };
        let mut before = 0;
        for first in (0..count).step_by(BLOCK as usize) {
            let block = first..count.min(first + BLOCK);
            for (i, sequence) in block.clone().zip(self.numbers(column, block)?) {
                let ends = i + 1 == count && sequence != self.sequences as i64;
                if sequence < before
                    || i == 0 && sequence != 0
                    || sequence as u64 > self.sequences
                    || ends
                {
                    let expected = match (i, ends) {
                        (0, _) => "0".into(),
                        (_, true) => self.sequences.to_string(),
                        (_, false) => format!("{before} to {}", self.sequences),
                    };
                    let why = format!(
                        "document {i} begins with sequence {sequence}, and not with {expected}"
                    );
                    return Err(FormatFault { offset: column.at + i * column.width, why });
                }
                before = sequence;
            }
        }
        match count {
            0 => Err(FormatFault {
                offset: column.at,
                why: "it has no documents, not even their end".into(),
            }),
            _ => Ok(()),
        }
    }

    fn numbers(&self, column: Column, range: Range<u64>) -> Result<Vec<i64>, ReadError> {
        let mut bytes = vec![0; ((range.end - range.start) * column.width) as usize];
        self.file.read(column.at + range.start * column.width, &mut bytes)?;
        Ok(match column.width {
            4 => bytes.as_chunks().0.iter().map(|n| i32::from_le_bytes(*n).into()).collect(),
            _ => bytes.as_chunks().0.iter().map(|n| i64::from_le_bytes(*n)).collect(),
        })
    }

    /// Number of tokens before the end of each of `documents`. The index must be checked.
    pub(super) fn ends(&self, documents: Range<u64>) -> Result<Vec<usize>, ReadError> {
        let ends = documents.start + 1..documents.end + 1;
        let sequences = match self.documents {
            Some((column, _)) => self.numbers(column, ends)?,
            None => ends.map(|end| end as i64).collect(),
        };
        let end = sequences.last().map_or(0, |last| *last as u64 + 1);
        let mut starts = SequenceStarts { index: self, end, first: 0, held: Vec::new() };
        sequences.into_iter().map(|sequence| starts.of(sequence as u64)).collect()
    }

    /// Ends of documents inside `tokens`.
    pub(super) fn ends_inside(&self, tokens: &Range<usize>) -> Result<Vec<usize>, ReadError> {
        let (mut low, mut high) = (0, self.num_documents());
        while low < high {
            let middle = low.midpoint(high);
            match self.ends(middle..middle + 1)?[0] > tokens.start {
                true => high = middle,
                false => low = middle + 1,
            }
        }
        // The block doubles until an end is outside, so this reads at most twice the needed ends.
        let (mut inside, mut some) = (Vec::new(), 1);
        while low < self.num_documents() && inside.last().is_none_or(|end| *end < tokens.end) {
            let block = low..self.num_documents().min(low + some);
            inside.extend(self.ends(block.clone())?);
            (low, some) = (block.end, BLOCK.min(2 * some));
        }
        inside.retain(|end| *end < tokens.end);
        inside.dedup();
        Ok(inside)
    }
}

/// Reader of sequence starts, which must be requested in increasing order.
struct SequenceStarts<'a> {
    index: &'a Index,
    /// End of the range of sequences that will be requested.
    end: u64,
    first: u64,
    held: Vec<i64>,
}

impl SequenceStarts<'_> {
    /// Number of tokens before a sequence, or before the end of all sequences.
    fn of(&mut self, sequence: u64) -> Result<usize, ReadError> {
        let Index { sequences, starts, sizes, unit, .. } = self.index;
        if sequence == *sequences {
            let Some(last) = sequence.checked_sub(1) else { return Ok(0) };
            let size = self.index.numbers(*sizes, last..sequence)?;
            return Ok(self.of(last)? + size[0] as usize);
        }
        if sequence < self.first || sequence >= self.first + self.held.len() as u64 {
            let end = (*sequences).min(self.end).min(sequence + BLOCK);
            self.held = self.index.numbers(*starts, sequence..end.max(sequence + 1))?;
            self.first = sequence;
        }
        Ok((self.held[(sequence - self.first) as usize] as u64).div_euclid(*unit) as usize)
    }
}

fn too_long(offset: u64, sequences: u64, documents: u64, bytes: u64) -> FormatFault {
    let why = format!(
        "{sequences} sequences and {documents} documents do not fit a file of {bytes} bytes"
    );
    FormatFault { offset, why }
}

#[cfg(test)]
mod tests;
