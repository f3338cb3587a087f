//! A data set of rows: files of JSON lines through a tokenizer and, for chats, the model's template.

use super::bad_rows::BadRows;
use super::checked::Checks;
use super::cores;
use super::document::Document;
use super::open::open_regular;
use super::pack::Packed;
use super::problem::{Failure, Problem, at, in_key};
use super::read::named;
use super::rows::{Lines, Rows};
use super::tokens::Cache;
use super::{Corpus, DataError, Parts};
use crate::config::{DataFormat, Packing};
use std::io::BufReader;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Rows whose tokens are made at once.
const AT_ONCE: usize = 4096;
/// Their bytes, unless one row has more.
const BYTES_AT_ONCE: usize = 16 << 20;

/// How rows become tokens.
#[derive(Debug)]
pub struct Rowed<'a> {
    /// The maker of documents.
    pub rows: &'a Rows<'a>,
    /// `Jsonl` or `Chat`.
    pub format: &'a DataFormat,
    /// The kind of a sample.
    pub packing: Packing,
    /// A document that is too long for a sample is cut, and not left out or divided.
    pub truncate: bool,
    /// Where documents are kept.
    pub cache: &'a Cache,
}

/// Documents that are samples by themselves.
#[derive(Clone, Debug, Default)]
pub(super) struct Documents {
    /// Where each ends in the tokens.
    ends: Vec<usize>,
    /// By token: whether it counts as a target.
    counted: Vec<bool>,
    /// By document: how many of its tokens do.
    targets: Vec<u32>,
    /// How many are to train.
    pub(super) split: usize,
    /// Where several share a sample: the samples, and how many of them are to train.
    packed: Option<(Packed, usize)>,
}

impl Documents {
    pub(super) fn push(&mut self, document: &Document) {
        self.counted.extend(&document.counted);
        self.ends.push(self.counted.len());
        self.targets.push(document.counted.iter().filter(|counts| **counts).count() as u32);
    }

    pub(super) const fn len(&self) -> usize {
        self.ends.len()
    }

    /// Puts documents together in samples of `seq_len` targets, those to train and the others apart.
    pub(super) fn pack(&mut self, seq_len: usize) {
        let mut packed = Packed::default();
        // The last token of a document is only a target.
        let length = |document| self.tokens(document).len() - 1;
        packed.append(0..self.split, seq_len, length);
        let to_train = packed.len();
        packed.append(self.split..self.len(), seq_len, length);
        self.packed = Some((packed, to_train));
    }

    /// Whether several share a sample.
    pub(super) const fn is_packed(&self) -> bool {
        self.packed.is_some()
    }

    /// Number of samples.
    pub(super) fn samples(&self) -> usize {
        self.packed.as_ref().map_or(self.len(), |(packed, _)| packed.len())
    }

    /// How many of them are to train.
    pub(super) fn samples_to_train(&self) -> usize {
        self.packed.as_ref().map_or(self.split, |(_, to_train)| *to_train)
    }

    /// The documents of a sample, one behind another; none behind the last.
    pub(super) fn of_sample(&self, sample: usize) -> impl Iterator<Item = usize> {
        let there = sample < self.samples();
        let packed = self.packed.as_ref().filter(|_| there).map(|(packed, _)| packed.of(sample));
        let alone = (there && packed.is_none()).then_some(sample);
        packed.into_iter().flatten().map(|document| *document as usize).chain(alone)
    }

    /// Where a document starts in the tokens, or where the last one ends.
    pub(super) fn start(&self, document: usize) -> usize {
        document.checked_sub(1).map_or(0, |before| self.ends[before])
    }

    /// The tokens of a document.
    pub(super) fn tokens(&self, document: usize) -> Range<usize> {
        self.start(document)..self.ends[document]
    }

    /// Whether a token counts as a target.
    pub(super) fn counts(&self, token: usize) -> bool {
        self.counted[token]
    }

    /// Targets of some samples that count.
    pub(super) fn targets(&self, mut samples: Range<usize>) -> u64 {
        let of = |sample| self.of_sample(sample).map(|document| u64::from(self.targets[document]));
        samples.by_ref().flat_map(of).sum()
    }

    /// Where documents end and which of their tokens count, for a hash.
    pub(super) fn bytes(&self, documents: Range<usize>) -> Vec<u8> {
        let start = self.start(documents.start);
        let ends = self.ends[documents.clone()].iter().map(|end| (end - start) as u64);
        let mut bytes: Vec<u8> = ends.flat_map(u64::to_le_bytes).collect();
        let end = self.start(documents.end);
        bytes.extend(self.counted[start..end].iter().map(|counts| u8::from(*counts)));
        bytes
    }
}

impl Corpus {
    /// [`open`](Self::open), where files hold JSON lines.
    ///
    /// # Errors
    /// As there, and where more rows than a few are no samples.
    pub fn open_rows(
        parts: Parts<'_>,
        with: &Rowed<'_>,
        tokenizer: (&Path, usize),
        (vocab, seq_len): (usize, usize),
    ) -> Result<Self, DataError> {
        let (path, tokens) = tokenizer;
        if tokens > vocab {
            let problem = Problem::TokenizerVocab { tokenizer: tokens, vocab };
            return Err(in_key("data.tokenizer")(at(path)(problem)));
        }
        let width = if tokens <= 1 << 16 { 2 } else { 4 };
        let documents = (with.packing != Packing::Windows).then(Documents::default);
        let packs = with.packing == Packing::Documents;
        let mut data = Self { text: Some(0), documents, packs, ..Self::of_width(width, seq_len) };
        data.fill_parts(parts, Checks::none(), &mut |data, text| data.read_rows(text, with))?;
        Ok(data)
    }

    /// Appends the documents of all files that `text` names, in order; returns the files.
    fn read_rows(&mut self, text: &str, with: &Rowed<'_>) -> Result<Vec<PathBuf>, Failure> {
        let (files, mut source) = named(text, with.format, true)?;
        let (mut bytes, mut bad) = (0, BadRows::default());
        for path in &files {
            let mut file = open_regular(path).map_err(at(path))?;
            if !source.takes(path, &mut file).map_err(at(path))? {
                continue;
            }
            bytes += file.metadata().map_err(Problem::Unreadable).map_err(at(path))?.len();
            self.num_files += 1;
            let mut lines = Lines::new(BufReader::new(file));
            while self.read_some(path, &mut lines, with, &mut bad).map_err(at(path))? {}
        }
        let ended = source.end(Path::new(text), bytes).map_err(at(Path::new(text)))?;
        self.left_out.append(ended);
        self.text = self.text.map(|all| all + bytes as usize);
        if bad.rows == 0 {
            return Err(at(Path::new(text))(Problem::Empty));
        }
        if bad.are_too_many() {
            return Err(at(Path::new(text))(Problem::BadRows(Box::new(bad))));
        }
        bad.warn(Path::new(text));
        Ok(files)
    }

    /// Appends the documents of the next rows. False: there was none.
    pub(super) fn read_some(
        &mut self,
        path: &Path,
        lines: &mut Lines<BufReader<std::fs::File>>,
        with: &Rowed<'_>,
        bad: &mut BadRows,
    ) -> Result<bool, Problem> {
        let (mut rows, mut bytes) = (Vec::new(), 0);
        while rows.len() < AT_ONCE && bytes < BYTES_AT_ONCE {
            let Some((number, row)) = lines.next().map_err(Problem::Unreadable)? else { break };
            bytes += row.as_ref().map_or(0, String::len);
            rows.push((number, row));
        }
        let texts: Vec<Result<&str, &str>> = rows
            .iter()
            .map(|(_, row)| row.as_ref().map(String::as_str).map_err(String::as_str))
            .collect();
        let document =
            |i: usize| texts[i].map_err(str::to_owned).and_then(|t| with.rows.document(t));
        let make = || cores::map(texts.len(), document);
        let documents = with.cache.documents(with.rows.hash(), &texts, make);
        for ((number, _), document) in rows.iter().zip(documents) {
            bad.rows += 1;
            match document {
                Ok(document) => self.push_row(document, with, (path, *number), bad),
                Err(why) => bad.add(path, *number, &why),
            }
        }
        Ok(!rows.is_empty())
    }

    /// Appends the document of a row, if it is a sample.
    fn push_row(
        &mut self,
        mut document: Document,
        with: &Rowed<'_>,
        (path, number): (&Path, u64),
        bad: &mut BadRows,
    ) {
        let most = self.seq_len + 1;
        if self.documents.is_some() && document.tokens.len() > most {
            let tokens = document.tokens.len();
            let divides = with.packing == Packing::Documents && *with.format != DataFormat::Chat;
            if !with.truncate && divides {
                document.divided(most).for_each(|part| self.append(&part));
                bad.divided += 1;
                return;
            }
            if !with.truncate {
                bad.longest = bad.longest.max(tokens);
                bad.long += 1;
                return;
            }
            document.tokens.truncate(most);
            document.counted.truncate(most);
            if !document.counted.contains(&true) {
                return bad.add(path, number, &format!("its first {most} tokens have no target"));
            }
            bad.cut += 1;
        }
        self.append(&document);
    }
}
