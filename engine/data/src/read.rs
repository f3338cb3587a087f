//! Opens the files of a config entry.

use super::arrow;
use super::bad_rows::BadRows;
use super::checks::{Checks, TextVerdicts};
use super::containers::Container;
use super::data_files::{NamedFiles, find_files, validation_file_among};
use super::kind::{self, FileKind};
use super::mask::{self, Mask};
use super::megatron::{self, Dtype, Index};
use super::open::open_regular;
use super::origins::{RowLocation, RowUnit};
use super::problem::{Failure, Problem, at, settle};
use super::progress::Progress;
use super::skipped_files::SkippedFiles;
use super::store::{Store, TokenFile};
use super::token_cache::Cache;
use super::unpack_error::UnpackError;
use super::{Corpus, prepared};
use config::{DataFormat, Packing};
use files::path_text::PathText;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Seek;
use std::path::{Path, PathBuf};

/// Alternative remedy for a named file that is not text.
const TAKE_BYTES: &str = "set data.format: Bytes to train on its bytes as they are";

/// State and settings for opening the files of a config entry.
pub(super) struct SourceFiles {
    pub(super) format: DataFormat,
    pub(super) from_directory: bool,
    pub(super) left_out: SkippedFiles,
    /// Whether warnings are logged, such as for a used file that seems not to be text.
    warns: bool,
    /// Each used file of text or rows and the bytes of its text, by its name without the ending of
    /// a compressed file.
    used: BTreeMap<PathBuf, (PathBuf, u64)>,
}

/// How the bytes of a file are used.
#[derive(Clone, Copy, Debug)]
pub(super) enum FileUse {
    /// As they are.
    Whole,
    /// After they are unpacked.
    Unpacked(Container),
}

/// The problem of a file whose kind does not fit `format`.
const fn refusal(kind: FileKind, format: &DataFormat) -> Problem {
    const INSIST: &str = "; or set data.format: Bytes to train on its bytes as they are";
    let FileKind { what, remedy } = kind;
    Problem::Foreign { what, remedy, insist: if format.is_bytes() { INSIST } else { "" } }
}

/// The files that `text` names, and the settings for opening them.
pub(super) fn named(
    text: &str,
    format: &DataFormat,
    warns: bool,
) -> Result<(Vec<PathBuf>, SourceFiles), Failure> {
    // Megatron names both files by their common prefix.
    let tokens = format!("{text}.bin");
    let by_prefix = *format == DataFormat::Megatron
        && !Path::new(text).exists()
        && Path::new(&tokens).is_file();
    let NamedFiles { files, from_directory, runs } =
        find_files(if by_prefix { &tokens } else { text })?;
    match format.is_text() {
        true if from_directory => arrow::check(Path::new(text))?,
        true => {}
        false => prepared::check(text, &files, from_directory)?,
    }
    if from_directory && let Some((train, validation)) = validation_file_among(&files) {
        let problem = Problem::ValidationAmongTraining { train, validation };
        if !format.is_text() {
            return Err(at(Path::new(text))(problem));
        }
        if warns {
            tracing::warn!("{}: {problem}", PathText(Path::new(text)));
        }
    }
    let left_out = SkippedFiles { runs, ..SkippedFiles::default() };
    let used = BTreeMap::new();
    Ok((files, SourceFiles { format: format.clone(), from_directory, left_out, warns, used }))
}

impl SourceFiles {
    /// How a file is used; `None` if it is not. Records an unused file of a directory.
    pub(super) fn takes(
        &mut self,
        path: &Path,
        file: &mut File,
    ) -> Result<Option<FileUse>, Problem> {
        let tokens = !self.format.is_text();
        let bytes = file.metadata().map_err(Problem::Unreadable)?.len();
        if tokens && self.from_directory && path.extension().is_none_or(|e| e != "bin") {
            if let Some(kind) = kind::of_tokens_elsewhere(path) {
                self.left_out.add(path, bytes, kind);
            }
            return Ok(None);
        }
        let is_arrow = arrow::is_named(path);
        if self.format.is_rows()
            && self.from_directory
            && !is_arrow
            && !kind::is_named_as_rows(path)
        {
            self.left_out.add(path, bytes, kind::NO_ROWS);
            return Ok(None);
        }
        let head = kind::head(file).map_err(Problem::Unreadable)?;
        file.rewind().map_err(Problem::Unreadable)?;
        let (container, head) = match Container::of(path, &head, file, &self.format) {
            Ok(Some((container, inner))) => (Some(container), inner),
            Ok(None) => (None, head),
            Err(error) => {
                let problem = Problem::Packed { what: kind::packed(&head), error };
                return self.leave_out(path, bytes, problem).map(|()| None);
            }
        };
        if self.from_directory && container.is_some() && kind::uncompressed(path) != path {
            let unpacked = kind::uncompressed(path);
            if unpacked.is_file() {
                self.left_out.add(path, bytes, kind::PACKED_AND_UNPACKED);
                return Ok(None);
            }
        }
        let named = if container.is_some() { kind::uncompressed(path) } else { path };
        let found = match container.is_some_and(Container::is_table) {
            true => None,
            false => kind::of(named, &head, &self.format),
        };
        let Some(kind) = found else {
            if tokens {
                self.check_index(path)?;
                mask::check_there(path)?;
            }
            return Ok(Some(container.map_or(FileUse::Whole, FileUse::Unpacked)));
        };
        let leaves_out = self.from_directory && self.format == DataFormat::Auto;
        if kind == kind::ARROW && !tokens && !leaves_out && self.format != DataFormat::Bytes {
            return Err(Problem::Arrow { command: arrow::command(path) });
        }
        // `Bytes` in the config accepts any named file; a directory still provides only text.
        let insisted = self.format == DataFormat::Bytes;
        if self.from_directory && !(insisted && kind::is_text(&head)) {
            self.left_out.add(path, bytes, kind);
            return Ok(None);
        }
        if !insisted {
            return Err(refusal(kind, &self.format));
        }
        if self.warns {
            let path = PathText(path);
            tracing::warn!("{path} is {}; its bytes are taken as data.format says", kind.what);
        }
        Ok(Some(FileUse::Whole))
    }

    /// Opens a file or its unpacked copy, or skips it. `store` protects the copy from removal.
    pub(super) fn unpacked(
        &mut self,
        path: &Path,
        store: &mut Store,
        cache: &Cache,
        progress: &dyn Progress,
    ) -> Result<Option<TokenFile>, Problem> {
        let mut file = open_regular(path)?;
        let Some(file_use) = self.takes(path, &mut file)? else { return Ok(None) };
        let file = TokenFile::new(path, file).map_err(Problem::Unreadable)?;
        let text = match file_use {
            FileUse::Whole => Ok(file),
            FileUse::Unpacked(container) => {
                let packed = file.stamp.bytes;
                cache.unpacked(&file, container, store, progress).map_err(|error| (packed, error))
            }
        };
        match text {
            Ok(text) => {
                self.note_text(path, text.stamp.bytes);
                Ok(Some(text))
            }
            Err((packed, problem)) => self.leave_out(path, packed, problem).map(|()| None),
        }
    }

    /// Leaves out a packed file of a directory of texts that has no text in it, as any other file
    /// that is not text; returns any other problem.
    pub(super) fn leave_out(
        &mut self,
        path: &Path,
        bytes: u64,
        problem: Problem,
    ) -> Result<(), Problem> {
        let kind = match &problem {
            Problem::Packed { error: UnpackError::Damaged(_), .. } => Some(kind::PACKED_DAMAGED),
            Problem::Packed { error: UnpackError::Contains(_), .. } => Some(kind::PACKED_ARCHIVE),
            _ => None,
        };
        let kind = kind.filter(|_| self.from_directory && self.format.is_bytes());
        let Some(kind) = kind else { return Err(problem) };
        if self.warns {
            tracing::warn!("{}: {problem}; it is left out", PathText(path));
        }
        self.left_out.add(path, bytes, kind);
        Ok(())
    }

    /// Notes a used file with `bytes` of text, and warns if another one seems to have the same text:
    /// a text and its compressed copy, or two of its copies.
    fn note_text(&mut self, path: &Path, bytes: u64) {
        if !self.format.is_text() || bytes == 0 {
            return;
        }
        let name = kind::uncompressed(path).to_owned();
        match self.used.get(&name) {
            None => drop(self.used.insert(name, (path.to_owned(), bytes))),
            Some((other, length)) if *length == bytes && self.warns => tracing::warn!(
                "{} and {} have texts of the same name and of {bytes} bytes each: both are used, so that one text counts twice if \
                 they are the same; then remove one of them",
                PathText(other),
                PathText(path)
            ),
            Some(_) => {}
        }
    }

    /// Checks the total of an entry: `taken` used bytes, and the files that were left out.
    pub(super) fn end(self, named: &Path, taken: u64) -> Result<SkippedFiles, Failure> {
        if taken == 0 {
            return Err(at(named)(match self.from_directory {
                true => Problem::NoUsableFile(Box::new(self.left_out)),
                false => Problem::Empty,
            }));
        }
        if self.left_out.bytes > taken {
            let left = Box::new(self.left_out);
            return Err(at(named)(Problem::MoreLeftOut { left, taken }));
        }
        if self.left_out.files > 0 && self.warns {
            tracing::warn!("{}: {}", PathText(named), self.left_out);
        }
        Ok(self.left_out)
    }

    /// Compares the format with the Megatron index, if one exists.
    fn check_index(&self, path: &Path) -> Result<(), Problem> {
        let Some(Dtype { name, width, .. }) = megatron::dtype_of(path) else { return Ok(()) };
        if self.format == DataFormat::Megatron || width.is_some() && width == self.format.width() {
            return Ok(());
        }
        let remedy = match width {
            Some(_) => "set data.format: Megatron",
            None => "onebox reads uint8, uint16, int16 and int32: convert it",
        };
        let (index, format) = (megatron::path_of(path), Box::new(self.format.clone()));
        Err(Problem::OtherTokens { index, dtype: name, format, remedy })
    }

    /// Opens a file, or skips it. `or_else` is the other remedy if a named file must be text.
    pub(super) fn open(
        &mut self,
        path: &Path,
        or_else: Option<&'static str>,
        texts: &mut TextVerdicts<'_>,
        store: &mut Store,
    ) -> Result<Option<TokenFile>, Problem> {
        let Checks { cache, progress, .. } = texts.checks();
        let Some(file) = self.unpacked(path, store, cache, progress)? else { return Ok(None) };
        if !self.format.is_bytes() || !self.from_directory && or_else.is_none() {
            return Ok(Some(file));
        }
        match (texts.fault(&file)?, or_else) {
            (None, _) => Ok(Some(file)),
            (Some(fault), Some(or_else)) if !self.from_directory => {
                Err(Problem::NotUtf8 { fault, or_else })
            }
            (Some(fault), _) => {
                self.left_out.add(path, file.stamp.bytes, fault.kind());
                Ok(None)
            }
        }
    }
}

impl Corpus {
    /// Appends the tokens of all files that `text` names, in order; returns the files.
    pub(super) fn read(
        &mut self,
        text: &str,
        format: &DataFormat,
        checks: Checks<'_>,
    ) -> Result<Vec<PathBuf>, Failure> {
        let (files, mut source) = named(text, format, true)?;
        let or_else = (*format == DataFormat::Auto).then_some(TAKE_BYTES);
        let mut texts = TextVerdicts::of(text, checks);
        let before = self.store.num_tokens();
        let mut bad_rows = BadRows::of_documents(checks.names_all);
        for path in &files {
            let opened = source.open(path, or_else, &mut texts, &mut self.store);
            let Some(file) = opened.map_err(at(path))? else { continue };
            let bytes = file.stamp.bytes as usize;
            if self.documents.is_none() {
                mask::check_use(path, format, Packing::Windows).map_err(at(path))?;
            }
            if *format == DataFormat::Megatron {
                self.read_index(&file, &mut bad_rows).map_err(at(path))?;
            }
            let width = self.store.width;
            if !bytes.is_multiple_of(width) {
                return Err(at(path)(Problem::PartialToken { bytes, width }));
            }
            self.num_files += usize::from(bytes > 0);
            self.store.push_file(file);
        }
        texts.keep();
        let taken = ((self.store.num_tokens() - before) * self.store.width) as u64;
        self.left_out.append(source.end(Path::new(text), taken)?);
        if self.documents.is_some() {
            settle(Path::new(text), bad_rows)?;
        }
        Ok(files)
    }

    /// Opens the index of a token file, which contains the width of the tokens.
    fn read_index(&mut self, file: &TokenFile, bad_rows: &mut BadRows) -> Result<(), Problem> {
        let index = Index::open_for(file)?;
        let (width, before) = (index.width(), self.store.width);
        match self.store.num_segments() {
            0 => self.store = Store::new(width),
            _ if width != before => return Err(Problem::OtherWidth { width, before }),
            _ => {}
        }
        // An empty file is not a segment. A file cut off inside a token is refused later.
        if file.stamp.bytes == 0 || !file.stamp.bytes.is_multiple_of(width as u64) {
            return index.check(file);
        }
        if self.documents.is_some() {
            index.check(file)?;
            let mask = self.mask_beside(file, &index)?;
            self.read_documents(&index, mask, &file.path, bad_rows)?;
        }
        self.indexes.push(index);
        Ok(())
    }

    /// Opens the mask of a token file. Either all files of a data set have a mask, or none has.
    fn mask_beside(&mut self, file: &TokenFile, index: &Index) -> Result<Option<Mask>, Problem> {
        let Some(documents) = &mut self.documents else { unreachable!("samples are windows") };
        let mask = Mask::open_for(file, index, self.store.num_tokens())?;
        match (mask.is_some(), documents.are_in_files(), self.indexes.first()) {
            (true, false, None) => documents.say_in_files(),
            (true, false, Some(first)) => {
                return Err(Problem::NoMask { mask: mask::path_of(&first.file.path) });
            }
            (false, true, _) => return Err(Problem::NoMask { mask: mask::path_of(&file.path) }),
            (false, false, _) | (true, true, _) => {}
        }
        Ok(mask)
    }

    /// Adds the documents of an index, after all existing tokens; the mask says which tokens count.
    fn read_documents(
        &mut self,
        index: &Index,
        mask: Option<Mask>,
        path: &Path,
        bad_rows: &mut BadRows,
    ) -> Result<(), Problem> {
        let Some(documents) = &mut self.documents else { unreachable!("samples are windows") };
        let first = self.store.num_tokens();
        let (all, mut start) = (index.num_documents(), 0);
        bad_rows.rows += all as usize;
        for block in (0..all).step_by(megatron::BLOCK as usize) {
            let block = block..all.min(block + megatron::BLOCK);
            let counts = mask.as_ref().map(|mask| mask.counts(block.clone())).transpose()?;
            let ends = index.ends(block.clone()).map_err(|unread| index.bad(&unread.into()))?;
            for (i, (number, end)) in block.zip(ends).enumerate() {
                let (tokens, from) = (end - start, start);
                let at = RowLocation { file: path, number, unit: RowUnit::Document };
                start = end;
                if tokens < 2 {
                    bad_rows.add_short(at);
                    continue;
                }
                let taken = documents.room.taken(tokens);
                let cut = from..from + taken.unwrap_or(tokens);
                let counted = match (&mask, &counts) {
                    (Some(mask), Some(_)) if cut.len() < tokens => Some(mask.count(cut.clone())?),
                    (_, counts) => counts.as_ref().map(|counts| counts[i]),
                };
                if counted == Some(0) {
                    let why = format!("its first {} tokens have no target", cut.len());
                    bad_rows.add(at, &why);
                    continue;
                }
                documents.room.note(tokens, at, bad_rows);
                let (cut, before) = (first + cut.start..first + cut.end, documents.len());
                match (taken, counted) {
                    (None, _) => {}
                    (Some(_), None) => documents.push(cut),
                    (Some(_), Some(count)) => documents.push_masked(cut, count),
                }
                documents.came_from(before, at);
            }
        }
        if let Some(mask) = mask {
            documents.push_mask(mask);
        }
        Ok(())
    }
}
