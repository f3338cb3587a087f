//! Writes token files from text once (`onebox data prepare`), in bounded memory, for later runs.
//!
//! The tokens are the same as those that a run makes of the same text. They are written in parts. A
//! part is synced before the manifest names it, and the folder of all parts gets its name after the
//! last part. So finished parts survive an interrupt, and no run trains on unfinished data.

use super::bad_rows::BadRows;
use super::checks::Checks;
use super::chunks::{ChunkSizes, TextChunks, TextPosition};
use super::prepared::{self, MANIFEST, Manifest, PreparedPart, SourceText, VERSION, partial};
use super::problem::{DataError, Failure, Problem, at, in_key, settle};
use super::progress::{Progress, Reading};
use super::rows::Lines;
use super::store::{Store, TokenFile, failure};
use super::text_source::text_files;
use super::token_cache::Cache;
use super::token_part::{self, TokenPart, hex};
use super::write_watch::WriteWatch;
use super::{RowSource, Tokenizer, mask};
use config::DataFormat;
use files::durable::{rename, sync_folder};
use files::names::is_there;
use files::path_text::PathText;
use files::regular_file;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, BufReader, Seek, SeekFrom};
use std::path::{Path, PathBuf, absolute};
use xxhash_rust::xxh3::xxh3_128;

/// Lock file of a preparation. A run's lock is `.lock`, so run directories are refused.
const LOCK: &str = ".prepare.lock";

/// Text to prepare, and the settings.
#[derive(Debug)]
pub struct Preparation<'a> {
    /// The entries of `data.train`.
    pub train: Vec<&'a str>,
    /// The entries of `data.validation`.
    pub validation: Vec<&'a str>,
    /// The format of the text.
    pub format: &'a DataFormat,
    /// The tokenizer for the text.
    pub tokenizer: &'a Tokenizer,
    /// The source of documents from JSON lines; `None` if the files are plain text.
    pub rows: Option<RowSource<'a>>,
    /// Cache of the results of text checks.
    pub cache: &'a Cache,
    /// Output folder for the tokens.
    pub out: &'a Path,
    /// Shell command that repeats the preparation.
    pub command: &'a str,
    /// Sizes of parts and pieces, in bytes of text.
    pub sizes: ChunkSizes,
    /// Receiver of the progress.
    pub progress: &'a dyn Progress,
}

/// Content of the output folder.
#[derive(Debug)]
pub struct PreparedData {
    /// The folders of training tokens.
    pub train: Vec<PathBuf>,
    /// The folders of validation tokens.
    pub validation: Vec<PathBuf>,
    /// Number of tokens.
    pub tokens: u64,
    /// Number of text files.
    pub files: usize,
    /// Bytes of text.
    pub text: u64,
    /// Number of parts.
    pub parts: usize,
    /// Number of parts that an earlier call had finished.
    pub before: usize,
    /// `U16` or `U32`.
    pub format: DataFormat,
}

/// Reasons why the preparation failed or stopped early.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what variants and fields are")]
pub enum PrepareError {
    #[error(transparent)]
    Data(#[from] DataError),
    #[error("{}: cannot be written: {error}", PathText(path))]
    Write { path: PathBuf, error: io::Error },
    #[error("{}: {why}", PathText(path))]
    Refused { path: PathBuf, why: String },
}

/// The files of a config entry.
struct NamedText<'a> {
    key: &'static str,
    text: &'a str,
    /// Folder for the tokens of the entry.
    folder: PathBuf,
    files: Vec<TokenFile>,
}

impl Preparation<'_> {
    /// Creates all missing parts. Calls `kept` with the number of finished parts, which always
    /// stay.
    ///
    /// # Errors
    /// [`PrepareError`]; finished parts stay.
    pub fn run(&self, kept: &dyn Fn(usize)) -> Result<PreparedData, PrepareError> {
        // The store protects the unpacked copies in the cache folder until the end.
        let (mut all, mut copies) = (Vec::new(), Store::new(1));
        for (key, texts) in [("data.train", &self.train), ("data.validation", &self.validation)] {
            let name = key.trim_start_matches("data.");
            for (i, text) in texts.iter().enumerate() {
                let number = if texts.len() > 1 { format!("-{}", i + 1) } else { String::new() };
                let folder = self.out.join(format!("{name}{number}"));
                let files = self.files(text, &mut copies).map_err(in_key(key))?;
                all.push(NamedText { key, text, folder, files });
            }
        }
        let _lock = self.lock()?;
        let mut manifest = self.manifest(&all)?;
        let before = manifest.num_parts();
        kept(before);
        if before > 0 {
            self.save(&manifest)?;
        }
        let bytes =
            |named: &NamedText<'_>| named.files.iter().map(|file| file.stamp.bytes).sum::<u64>();
        let (text, files) = (all.iter().map(bytes).sum(), all.iter().map(|n| n.files.len()).sum());
        let reading = self.progress.begin("making tokens", text);
        reading.add(manifest.parts.iter().flatten().map(|part| part.text).sum());
        for (i, named) in all.iter().enumerate() {
            self.fill(&mut manifest, i, named, &*reading, kept)?;
        }
        drop(reading);
        let mut train = Vec::new();
        for NamedText { folder, .. } in all {
            let made = partial(&folder);
            if made.exists() || !folder.exists() {
                rename(&made, &folder).map_err(unwritten(&folder))?;
            }
            train.push(folder);
        }
        let validation = train.split_off(self.train.len());
        sync_folder(self.out).map_err(unwritten(self.out))?;
        let parts = manifest.parts.iter().flatten();
        let (tokens, parts) = (parts.clone().map(|part| part.tokens).sum(), parts.count());
        let format =
            if self.tokenizer.token_bytes() == 2 { DataFormat::U16 } else { DataFormat::U32 };
        Ok(PreparedData { train, validation, tokens, files, text, parts, before, format })
    }

    /// Whether some tokens do not count as targets.
    fn has_masks(&self) -> bool {
        *self.format == DataFormat::Chat
    }

    /// The files of a config entry that hold text or rows, closed.
    fn files(&self, text: &str, copies: &mut Store) -> Result<Vec<TokenFile>, Failure> {
        let checks = Checks { cache: self.cache, progress: self.progress, ..Checks::none() };
        let (_, files, source) = text_files(text, self.format, checks, copies)?;
        let taken = files.iter().map(|file| file.stamp.bytes).sum();
        source.end(Path::new(text), taken)?;
        Ok(files)
    }

    fn lock(&self) -> Result<File, PrepareError> {
        let there = fs::read_dir(self.out).map_or(0, Iterator::count);
        if there > 0 && !is_there(&self.out.join(LOCK)) {
            let why =
                "the folder is not empty, and `data prepare` did not make it; name another one";
            return Err(refused(self.out, why));
        }
        fs::create_dir_all(self.out).map_err(unwritten(self.out))?;
        let path = self.out.join(LOCK);
        let lock = regular_file::open_or_create(&path).map_err(unwritten(&path))?;
        let held = "another process prepares data in it; wait for that, or name another folder";
        lock.try_lock().map_err(|_| refused(self.out, held))?;
        Ok(lock)
    }

    /// The settings that decide the tokens of a text, by name.
    fn makers(&self) -> BTreeMap<String, String> {
        let tokenizer = format!("xxh3-128 {}", hex(xxh3_128(self.tokenizer.bytes())));
        let rows = self.rows.as_ref().map_or_else(Vec::new, |with| with.rows.makers());
        let all = [("tokenizer", tokenizer)].into_iter().chain(rows);
        all.map(|(name, value)| (name.to_owned(), value)).collect()
    }

    /// Paths, sizes and hashes of an entry's text files. The hash is that of `known` if the stamps
    /// are equal.
    fn texts(
        &self,
        named: &NamedText<'_>,
        known: &[SourceText],
    ) -> Result<Vec<SourceText>, Failure> {
        let bytes = named.files.iter().map(|file| file.stamp.bytes).sum();
        let reading = self.progress.begin("reading text", bytes);
        let mut watch = WriteWatch::new(0);
        let text = |(i, file): (usize, &TokenFile)| {
            let (path, of) =
                (absolute(&file.path).unwrap_or_else(|_| file.path.clone()), file.stamp);
            let stamp = Some(hex(xxh3_128(&of.to_bytes())));
            if let Some(known) = known.get(i).filter(|known| known.stamp == stamp) {
                return Ok(SourceText { path, bytes: of.bytes, hash: known.hash.clone(), stamp });
            }
            let stamp = stamp.filter(|_| watch.covers(file));
            let hash = hex(file.hash(&|bytes| reading.add(bytes)).map_err(failure)?);
            Ok(SourceText { path, bytes: of.bytes, hash, stamp })
        };
        named.files.iter().enumerate().map(text).collect()
    }

    /// The manifest of an earlier call with its undamaged parts, or a new one.
    fn manifest(&self, all: &[NamedText<'_>]) -> Result<Manifest, PrepareError> {
        let path = self.out.join(MANIFEST);
        let of_another = |why: String| {
            let (out, command) = (PathText(self.out), self.command);
            let again = format!("delete the folder {out} and make it again: {command}");
            refused(&path, format!("{why}; name another folder, or {again}"))
        };
        let refused = |why: String| {
            let out = PathText(self.out);
            refused(&path, format!("{why}; name another folder, or delete the folder {out}"))
        };
        let there = match Manifest::open(&path) {
            Ok(None) if path.exists() => {
                return Err(refused("`onebox data prepare` did not write it".into()));
            }
            Err(Problem::BadList(why)) => return Err(refused(format!("it is damaged ({why})"))),
            there => there.map_err(|problem| refused(problem.to_string()))?,
        };
        if let Some(Manifest { version, .. }) = there
            && version != VERSION
        {
            let why = format!(
                "another onebox wrote it, in format {version}, and this one writes format {VERSION}"
            );
            return Err(of_another(why));
        }
        let known = there.as_ref().map_or(&[][..], |there| &there.texts);
        let texts = all.iter().enumerate().map(|(i, named)| {
            self.texts(named, known.get(i).map_or(&[], Vec::as_slice)).map_err(in_key(named.key))
        });
        let name =
            |named: &NamedText<'_>| Some(named.folder.file_name()?.to_string_lossy().into_owned());
        let mut new = Manifest {
            version: VERSION,
            command: self.command.to_owned(),
            out: absolute(self.out).unwrap_or_else(|_| self.out.to_owned()),
            makers: self.makers(),
            folders: all.iter().filter_map(name).collect(),
            texts: texts.collect::<Result<_, _>>()?,
            parts: all.iter().map(|_| Vec::new()).collect(),
        };
        if let Some(there) = there {
            if new.has_other_rules(&there) {
                let why = "another onebox made it, with other rules for chats than this one has";
                return Err(of_another(why.into()));
            }
            if let Some(why) = new.differs(&there) {
                return Err(refused(why));
            }
            new.parts.iter_mut().zip(there.parts).for_each(|(new, there)| *new = there);
        }
        self.keep_whole(all, &mut new.parts)?;
        Ok(new)
    }

    /// Keeps the parts before the first one whose files differ from the list, and removes other
    /// files of parts. Only a folder with all parts has its final name, so no run trains on
    /// unfinished data.
    fn keep_whole(
        &self,
        all: &[NamedText<'_>],
        parts: &mut [Vec<PreparedPart>],
    ) -> Result<(), PrepareError> {
        let list = self.out.join(MANIFEST);
        let written = parts.iter().flatten().flat_map(|part| &part.files);
        let reading = self.progress.begin("comparing parts", written.map(|file| file.bytes).sum());
        for (NamedText { folder, files, .. }, parts) in all.iter().zip(parts) {
            let partial = partial(folder);
            let is_link =
                |place: &&Path| fs::symlink_metadata(place).is_ok_and(|place| place.is_symlink());
            if let Some(link) = [folder.as_path(), &partial].into_iter().find(is_link) {
                let why = "it is a symbolic link, and parts are written into no folder behind one; put the folder itself there, or name \
                     another OUT";
                return Err(refused(link, why));
            }
            if folder.exists() && partial.exists() {
                let (partial, list) = (PathText(&partial), PathText(&list));
                let why = format!(
                    "{partial} is there, too; delete one of them: the other is compared with {list}, and made again where it differs"
                );
                return Err(refused(folder, why));
            }
            let place = if folder.exists() { folder } else { &partial };
            let fault = |part: &PreparedPart| {
                part.files.iter().find_map(|file| {
                    let own = file.check_own(place);
                    own.and_then(|()| file.open(place, &|bytes| reading.add(bytes))).err()
                })
            };
            let fault = parts.iter().enumerate().find_map(|(i, part)| Some((i, fault(part)?)));
            let is_other = fault.is_some();
            if let Some((whole, fault)) = fault {
                tracing::warn!(
                    "{}: {}: this part and those behind it are made again",
                    PathText(&fault.path),
                    fault.words(&list)
                );
                parts.truncate(whole);
            }
            if folder.exists() && parts.last().is_none_or(|part| part.next.file < files.len()) {
                if !is_other {
                    let (folder, list) = (PathText(folder), PathText(&list));
                    tracing::warn!(
                        "{folder}: {list} does not name all of its files: they are made again"
                    );
                }
                rename(folder, &partial).map_err(unwritten(folder))?;
            }
            let place = if folder.exists() { folder } else { &partial };
            for path in others(place, parts).map_err(unwritten(place))? {
                if place == &partial && mask::is_of_part(&path) {
                    fs::remove_file(&path).map_err(unwritten(&path))?;
                } else if prepared::is_tokens(&path) {
                    return Err(refused(&path, prepared::unnamed(&list).to_string()));
                }
            }
        }
        Ok(())
    }

    fn save(&self, manifest: &Manifest) -> Result<(), PrepareError> {
        let path = self.out.join(MANIFEST);
        let json = serde_json::to_vec(manifest).map_err(io::Error::from);
        let json = json.and_then(|json| match json.len() as u64 > prepared::LARGEST {
            true => Err(io::Error::other(
                "the list of parts is too long: prepare fewer or larger files",
            )),
            false => Ok(json),
        });
        json.and_then(|json| token_part::write(&path, &unfinished(&path), &[json]))
            .map(drop)
            .map_err(unwritten(&path))
    }

    /// Creates the missing parts of a config entry.
    fn fill(
        &self,
        manifest: &mut Manifest,
        i: usize,
        named: &NamedText<'_>,
        reading: &dyn Reading,
        kept: &dyn Fn(usize),
    ) -> Result<(), PrepareError> {
        let refused = |problem| in_key(named.key)(at(Path::new(named.text))(problem));
        let into = partial(&named.folder);
        loop {
            let last = manifest.parts[i].last();
            let from = last.map_or(TextPosition::default(), |part| part.next);
            let rows = last.map(|part| part.rows.clone()).unwrap_or_default();
            if from.file == named.files.len() {
                if manifest.parts[i].iter().all(|part| part.tokens == 0) {
                    return Err(refused(Problem::Empty).into());
                }
                if self.rows.is_some() {
                    settle(Path::new(named.text), rows).map_err(in_key(named.key))?;
                }
                return Ok(());
            }
            let part = match &self.rows {
                None => self.of_texts(&named.files, from, reading),
                Some(with) => self.of_rows(&named.files, from, rows, with, reading),
            };
            let (tokens, mut part) = part.map_err(in_key(named.key))?;
            let part_name = mask::name_of_part(manifest.parts[i].len(), self.has_masks());
            let path = into.join(part_name);
            let files = tokens.write(&path, self.has_masks(), &|path, bytes| {
                token_part::write(path, &unfinished(path), bytes)
            });
            part.files = files.map_err(unwritten(&path))?;
            manifest.parts[i].push(part);
            self.save(manifest)?;
            kept(manifest.num_parts());
        }
    }

    /// Tokenizes the next text on all cores. Returns the tokens, and the part without its files.
    fn of_texts(
        &self,
        files: &[TokenFile],
        from: TextPosition,
        reading: &dyn Reading,
    ) -> Result<(TokenPart, PreparedPart), Failure> {
        let texts = TextChunks::new(files, self.tokenizer, self.sizes);
        let text = texts.read(from)?;
        let made = texts.encode(&text, &|bytes| reading.add(bytes))?;
        let (tokens, rows) = (made.num_tokens(), BadRows::default());
        let part =
            PreparedPart { tokens, files: Vec::new(), text: text.bytes, next: text.next, rows };
        Ok((made, part))
    }

    /// Tokenizes the next part of the rows. Returns the tokens, and the part without its files.
    fn of_rows(
        &self,
        files: &[TokenFile],
        from: TextPosition,
        mut rows: BadRows,
        with: &RowSource<'_>,
        reading: &dyn Reading,
    ) -> Result<(TokenPart, PreparedPart), Failure> {
        // The folder is for samples of any length: a run cuts or divides documents.
        let mut made = TokenPart::of_documents(self.tokenizer.token_bytes());
        let (mut next, mut text) = (from, 0);
        while next.file < files.len() && text < self.sizes.part {
            let file = &files[next.file];
            let unreadable = |e| at(&file.path)(Problem::Unreadable(e));
            let mut opened = file.open().map_err(at(&file.path))?;
            opened.seek(SeekFrom::Start(next.offset)).map_err(unreadable)?;
            let mut lines = Lines::after(BufReader::new(opened), next.lines);
            let mut more = true;
            while more && text < self.sizes.part {
                let push = &mut |document, _, _: &mut _| made.push(&document);
                let read = with.read_some(file, &mut lines, &mut rows, push);
                more = read.map_err(at(&file.path))?;
                let (offset, number) = lines.place().map_err(unreadable)?;
                reading.add(offset - next.offset);
                text += offset - next.offset;
                next = TextPosition { offset, lines: number, ..next };
            }
            // A read of 0 bytes checks that the file still has the stamp of the manifest.
            file.read(0, &mut []).map_err(failure)?;
            if !more {
                next = TextPosition { file: next.file + 1, ..TextPosition::default() };
            }
        }
        let part = PreparedPart { tokens: made.num_tokens(), files: Vec::new(), text, next, rows };
        Ok((made, part))
    }
}

fn refused(path: &Path, why: impl Into<String>) -> PrepareError {
    PrepareError::Refused { path: path.to_owned(), why: why.into() }
}

fn unwritten(path: &Path) -> impl FnOnce(io::Error) -> PrepareError {
    |error| PrepareError::Write { path: path.to_owned(), error }
}

/// The files of a folder, if it exists, without the files of `parts`.
fn others(folder: &Path, parts: &[PreparedPart]) -> io::Result<Vec<PathBuf>> {
    if !folder.exists() {
        return Ok(Vec::new());
    }
    let known = parts.iter().flat_map(|part| &part.files).map(|file| file.name.as_str());
    let known: BTreeSet<&str> = known.collect();
    let all: Vec<_> = fs::read_dir(folder)?.collect::<Result<_, _>>()?;
    let others =
        all.iter().filter(|file| !file.file_name().to_str().is_some_and(|n| known.contains(n)));
    Ok(others.map(fs::DirEntry::path).collect())
}

/// Temporary name of a file. No other process writes in the folder.
fn unfinished(path: &Path) -> PathBuf {
    path.with_extension("tmp")
}

#[cfg(test)]
mod tests;
