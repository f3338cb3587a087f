//! Files that contain their text or rows in another form: compressed, as one JSON array, as a table.
//! onebox unpacks such a file once into a copy, which has text or JSON lines ([`copy`]). Everything
//! else reads the copy, and messages name the file.

mod copy;
mod json_array;
mod output;
mod parquet;
mod table;

use super::kind;
use super::origins::RowUnit;
use super::progress::{Reading, Silence};
use super::unpack_error::UnpackError;
use config::DataFormat;
use output::Output;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

/// Bytes of unpacked text that are examined.
const HEAD: u64 = 64 << 10;
/// Bytes per read of a whole file.
const BLOCK: usize = 128 << 10;
/// Bytes per read of a beginning: fewer, so that the bytes that were read tell the growth.
const SMALL_BLOCK: usize = 4 << 10;
/// Largest window of a zstd file, as a power of two: what `zstd --long=31` writes.
const LARGEST_WINDOW: u32 = 31;
/// Place of the mark of a tar archive, and the mark.
const TAR: (usize, &[u8]) = (257, b"ustar");

/// The compression of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Compression {
    Gzip,
    Zstd,
}

/// The form of the rows of a file, after its decompression.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RowForm {
    /// Text or JSON lines, which the copy has without a change.
    Lines,
    Array,
    /// A table of texts with this sign between its columns.
    Table(u8),
    Parquet,
}

/// The form of a file that is unpacked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Container {
    compression: Option<Compression>,
    form: RowForm,
}

/// The beginning of the text of a container.
#[derive(Debug)]
pub(super) struct Preview {
    pub(super) head: Vec<u8>,
    /// Estimated bytes of the whole text.
    pub(super) bytes: u64,
}

impl Container {
    /// The container that a file is by its first bytes `head`, for data of `format`, and the beginning
    /// of what is compressed in it. `None` if the bytes of the file are used as they are.
    pub(super) fn of(
        path: &Path,
        head: &[u8],
        file: &File,
        format: &DataFormat,
    ) -> Result<Option<(Self, Vec<u8>)>, UnpackError> {
        let unpacks = format.is_rows() || *format == DataFormat::Auto;
        let Some(compression) = compression(head).filter(|_| unpacks) else {
            let form = if format.is_rows() { form(path, head) } else { RowForm::Lines };
            let container = Self { compression: None, form };
            return Ok((form != RowForm::Lines).then(|| (container, head.to_owned())));
        };
        let whole = Self { compression: Some(compression), form: RowForm::Lines };
        let Preview { head, .. } = whole.preview(file)?;
        let is_tar = head.get(TAR.0..).is_some_and(|rest| rest.starts_with(TAR.1));
        if is_tar || head.starts_with(b"PAR1") {
            let what = if is_tar { "a tar archive" } else { "a Parquet table" };
            return Err(UnpackError::Contains(what));
        }
        let form = match format.is_rows() {
            true => form(kind::uncompressed(path), &head),
            false => RowForm::Lines,
        };
        Ok(Some((Self { form, ..whole }, head)))
    }

    /// The form in words, after "it is".
    pub(super) fn what(self) -> String {
        let form = match self.form {
            RowForm::Lines => None,
            RowForm::Array => Some("one JSON array"),
            RowForm::Table(b'\t') => Some("a table (TSV)"),
            RowForm::Table(_) => Some("a table (CSV)"),
            RowForm::Parquet => Some("a Parquet table"),
        };
        let compression = self.compression.map(|compression| match compression {
            Compression::Gzip => "compressed (gzip)",
            Compression::Zstd => "compressed (zstd)",
        });
        [form, compression].into_iter().flatten().collect::<Vec<_>>().join(", ")
    }

    /// Whether the bytes have a form of their own, which is no text.
    pub(super) const fn is_table(self) -> bool {
        matches!(self.form, RowForm::Parquet)
    }

    /// Unit of the row numbers of the copy.
    pub(super) const fn unit(self) -> RowUnit {
        match self.form {
            RowForm::Lines | RowForm::Table(_) => RowUnit::Line,
            RowForm::Array | RowForm::Parquet => RowUnit::Row,
        }
    }

    /// The beginning of the text; damaged rows after it do not count.
    pub(super) fn preview(self, file: &File) -> Result<Preview, UnpackError> {
        let packed = file.metadata()?.len();
        let mut head = Vec::new();
        let mut out = Output::beginning(&mut head, packed, HEAD);
        let reading = Silence;
        let counted = CountedReader::new(file.try_clone()?, &reading, SMALL_BLOCK);
        let read = self.write(counted, packed, &mut out);
        let read = match read {
            (Err(UnpackError::Enough), read) => read.max(1),
            (done, _) => return done.map(|()| Preview { bytes: head.len() as u64, head }),
        };
        let growth = packed as f64 / read as f64;
        let bytes = (head.len() as f64 * growth.max(1.0)) as u64;
        Ok(Preview { head, bytes })
    }

    /// Writes the text of a file of `packed` bytes. Returns also the bytes that were read of it, or
    /// an estimate.
    fn write(
        self,
        mut from: CountedReader<'_>,
        packed: u64,
        out: &mut Output<'_>,
    ) -> (Result<(), UnpackError>, u64) {
        if let Err(error) = io::Seek::rewind(&mut from.file) {
            return (Err(error.into()), 0);
        }
        if self.form == RowForm::Parquet {
            let (done, [row, rows]) = parquet::rows(from.file, packed, from.reading, out);
            let share = row as f64 / rows.max(1) as f64;
            return (done, (packed as f64 * share) as u64);
        }
        let block = from.block;
        let done = self.decompress(&mut from).map_err(|e| UnpackError::unread(&e, 0));
        let done = done.and_then(|text| {
            let mut text = BufReader::with_capacity(block, text);
            match self.form {
                RowForm::Array => json_array::rows(&mut text, out),
                RowForm::Table(delimiter) => table::rows(&mut text, delimiter, out),
                RowForm::Lines | RowForm::Parquet => lines(&mut text, out),
            }
        });
        (done, from.bytes)
    }

    fn decompress<'a>(self, from: &'a mut CountedReader<'_>) -> io::Result<Box<dyn Read + 'a>> {
        let from = BufReader::with_capacity(from.block, from);
        Ok(match self.compression {
            None => Box::new(from),
            Some(Compression::Gzip) => Box::new(flate2::bufread::MultiGzDecoder::new(from)),
            Some(Compression::Zstd) => {
                let mut decoder = zstd::stream::read::Decoder::with_buffer(from)?;
                decoder.window_log_max(LARGEST_WINDOW)?;
                Box::new(decoder)
            }
        })
    }
}

/// Copies text without a change.
fn lines(from: &mut dyn BufRead, out: &mut Output<'_>) -> Result<(), UnpackError> {
    loop {
        let block = from.fill_buf().map_err(|e| UnpackError::unread(&e, out.written))?;
        let length = block.len();
        if length == 0 {
            return Ok(());
        }
        out.write(block)?;
        from.consume(length);
    }
}

/// Passes each byte of a text to `take`, without a byte order mark at its start.
fn each_byte(
    from: &mut dyn BufRead,
    out: &mut Output<'_>,
    mut take: impl FnMut(u8, &mut Output<'_>) -> Result<(), UnpackError>,
) -> Result<(), UnpackError> {
    let mut is_start = true;
    loop {
        let block = from.fill_buf().map_err(|e| UnpackError::unread(&e, out.written))?;
        let length = block.len();
        if length == 0 {
            return Ok(());
        }
        let mark = "\u{FEFF}".as_bytes();
        let block = if is_start { block.strip_prefix(mark).unwrap_or(block) } else { block };
        is_start = false;
        for byte in block {
            take(*byte, out)?;
        }
        from.consume(length);
    }
}

/// A file that counts the bytes that are read from it.
struct CountedReader<'a> {
    file: File,
    reading: &'a dyn Reading,
    /// Bytes per read.
    block: usize,
    bytes: u64,
}

impl<'a> CountedReader<'a> {
    fn new(file: File, reading: &'a dyn Reading, block: usize) -> Self {
        Self { file, reading, block, bytes: 0 }
    }
}

impl Read for CountedReader<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(out)?;
        self.bytes += read as u64;
        self.reading.add(read as u64);
        Ok(read)
    }
}

fn compression(head: &[u8]) -> Option<Compression> {
    match head {
        [0x1f, 0x8b, 0x08, ..] => Some(Compression::Gzip),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => Some(Compression::Zstd),
        _ => None,
    }
}

/// The form of rows, by the first bytes, and of a table by the name: its bytes say nothing.
fn form(path: &Path, head: &[u8]) -> RowForm {
    let extension = path.extension().and_then(|name| name.to_str()).map(str::to_ascii_lowercase);
    let delimiter = match extension.as_deref() {
        Some("csv") => Some(b','),
        Some("tsv" | "tab") => Some(b'\t'),
        _ => None,
    };
    let delimiter = delimiter.filter(|_| !kind::is_json_lines(head));
    match delimiter {
        _ if head.starts_with(b"PAR1") => RowForm::Parquet,
        Some(delimiter) => RowForm::Table(delimiter),
        None if kind::is_array(head) => RowForm::Array,
        None => RowForm::Lines,
    }
}

#[cfg(test)]
mod tests;
