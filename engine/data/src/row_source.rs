//! A data set of JSON lines, tokenized with a tokenizer and, for chats, the model's template.

use super::bad_rows::{BadRows, FIRST_ROWS, SLOW_ROWS};
use super::checks::Checks;
use super::document::Document;
use super::documents::{Documents, SampleCapacity};
use super::origins::RowLocation;
use super::problem::{Failure, Problem, at, in_key, settle};
use super::progress::Progress;
use super::read::named;
use super::rows::{Lines, Rows};
use super::store::TokenFile;
use super::token_cache::Cache;
use super::{Corpus, CorpusSplit, DataError, cores};
use crate::bad_rows::TOO_LONG;
use config::{DataFormat, Packing};
use std::io::BufReader;
use std::path::{Path, PathBuf};

/// Rows that are tokenized in parallel.
const AT_ONCE: usize = 4096;
/// Largest total size of these rows in bytes, unless a single row is larger.
pub const BYTES_AT_ONCE: usize = 16 << 20;

/// Settings for reading rows.
#[derive(Debug)]
pub struct RowSource<'a> {
    /// The maker of documents.
    pub rows: &'a Rows<'a>,
    /// Path of the tokenizer's file, for messages.
    pub tokenizer: &'a Path,
    /// `Jsonl` or `Chat`.
    pub format: &'a DataFormat,
    /// Kind of the samples.
    pub packing: Packing,
    /// Whether a document that is too long for a sample is cut, instead of left out or divided.
    pub truncate: bool,
    /// Whether each row left out is logged immediately.
    pub names_all: bool,
    /// Whether ignored keys are not reported, because another command reports them.
    pub is_brief: bool,
    /// The cache for the documents, and for unpacked files.
    pub cache: &'a Cache,
    /// Receiver of the progress of unpacking.
    pub progress: &'a dyn Progress,
}

impl RowSource<'_> {
    /// Size limits for the documents of samples of `seq_len` targets.
    fn room(&self, seq_len: usize) -> SampleCapacity {
        let divides = self.packing == Packing::Documents && *self.format != DataFormat::Chat;
        SampleCapacity::new(seq_len, self.truncate, divides)
    }

    /// Calls `push` with document and line number of each of the next rows; false if there was
    /// none.
    pub(super) fn read_some(
        &self,
        file: &TokenFile,
        lines: &mut Lines<BufReader<std::fs::File>>,
        bad: &mut BadRows,
        push: &mut dyn FnMut(Document, u64, &mut BadRows),
    ) -> Result<bool, Problem> {
        let (mut rows, mut bytes) = (Vec::new(), 0);
        // The first rows are read separately, in case that none can be used.
        let at_once = if bad.rows < FIRST_ROWS { FIRST_ROWS - bad.rows } else { AT_ONCE };
        while rows.len() < at_once && bytes < BYTES_AT_ONCE {
            let Some((number, row)) = lines.next().map_err(Problem::Unreadable)? else { break };
            bytes += row.as_ref().map_or(0, String::len);
            rows.push((number, row));
        }
        let texts: Vec<Result<&str, &str>> = rows
            .iter()
            .map(|(_, row)| row.as_ref().map(String::as_str).map_err(String::as_str))
            .collect();
        let document = |i: usize| texts[i].map_err(str::to_owned).and_then(|t| self.rows.read(t));
        let is_slow = |i: usize| document(i).is_err_and(|why| why.contains(TOO_LONG));
        let may_end = bad.rows == 0 && !self.names_all && texts.len() >= SLOW_ROWS;
        let texts = match may_end && (0..SLOW_ROWS).all(is_slow) {
            true => &texts[..SLOW_ROWS],
            false => &texts[..],
        };
        bad.rendered += self.rows.count_rendered(texts);
        let make = || cores::map(texts.len(), document);
        let documents = self.cache.documents(self.rows.hash(), texts, make);
        for ((number, _), document) in rows.iter().zip(documents) {
            bad.rows += 1;
            match document {
                Ok((document, unread)) => {
                    bad.unread.add(&unread);
                    push(document, *number, bad);
                }
                Err(why) => bad.add(file.row(*number), &why),
            }
        }
        match bad.give_up() {
            true => Err(Problem::BadRows { rows: Box::new(std::mem::take(bad)) }),
            false => Ok(!rows.is_empty()),
        }
    }
}

impl Corpus {
    /// Like [`open`](Self::open), for files of JSON lines.
    ///
    /// # Errors
    /// As for `open`, or too many rows cannot be samples.
    pub fn open_rows(
        parts: CorpusSplit<'_>,
        with: &RowSource<'_>,
        vocab: usize,
        seq_len: usize,
    ) -> Result<Self, DataError> {
        with.rows
            .tokenizer
            .fits(vocab)
            .map_err(at(with.tokenizer))
            .map_err(in_key("data.tokenizer"))?;
        let width = with.rows.tokenizer.token_bytes();
        let documents = Documents::that_say(with.room(seq_len));
        let documents = (with.packing != Packing::Windows).then_some(documents);
        let packs = with.packing == Packing::Documents;
        let mut data = Self { text: Some(0), documents, packs, ..Self::of_width(width, seq_len) };
        data.fill_parts(parts, Checks::none(), &mut |data, text| data.read_rows(text, with))?;
        Ok(data)
    }

    /// Appends the documents of all files that `text` names, in order; returns the files.
    fn read_rows(&mut self, text: &str, with: &RowSource<'_>) -> Result<Vec<PathBuf>, Failure> {
        let (files, mut source) = named(text, with.format, true)?;
        let (mut bytes, mut bad) = (0, BadRows::of_rows(with.names_all, with.is_brief));
        for path in &files {
            let file = source.unpacked(path, &mut self.store, with.cache, with.progress);
            let Some(file) = file.map_err(at(path))? else { continue };
            bytes += file.stamp.bytes;
            self.num_files += 1;
            let mut lines = Lines::new(BufReader::new(file.open().map_err(at(path))?));
            let mut push = |document, number, bad: &mut BadRows| {
                self.push_row(document, file.row(number), bad);
            };
            while with.read_some(&file, &mut lines, &mut bad, &mut push).map_err(at(path))? {}
        }
        self.left_out.append(source.end(Path::new(text), bytes)?);
        self.text = self.text.map(|all| all + bytes as usize);
        if bad.rows == 0 {
            return Err(at(Path::new(text))(Problem::Empty));
        }
        settle(Path::new(text), bad)?;
        Ok(files)
    }

    /// Appends the document of a row, if it fits into a sample.
    fn push_row(&mut self, mut document: Document, at: RowLocation<'_>, bad: &mut BadRows) {
        if let Some(Documents { room, .. }) = &self.documents {
            let tokens = document.tokens.len();
            if let Some(taken) = room.taken(tokens).filter(|taken| *taken < tokens) {
                document.tokens.truncate(taken);
                document.counted.truncate(taken);
                if !document.counted.contains(&true) {
                    let why = format!("its first {taken} tokens have no target");
                    return bad.add(at, &why);
                }
            }
            room.note(tokens, at, bad);
            if room.taken(tokens).is_none() {
                return;
            }
        }
        let before = self.documents.as_ref().map_or(0, Documents::len);
        self.append(&document);
        if let Some(documents) = &mut self.documents {
            documents.came_from(before, at);
        }
    }
}
