//! Opens the data of a config and its tokenizer for a command.

use super::{CommandError, Failable, code, say};
use crate::report::reading::TerminalProgress;
use config::{Config, DataConfig, DataFormat, DeviceConfig, Packing, Source};
use data::chat::{Template, end_of_text};
use data::model_files::ModelFiles;
use data::progress::{Progress, Silence};
use data::{
    Cache, Checks, ChunkSizes, Corpus, CorpusSplit, DataError, DataInspection, Dataset, Problem,
    RowSource, Rows, SampleSettings, SourceCorpora, TextSource, Tokenizer,
};
use files::names::TOKENIZER;
use files::path_text::{PathText, ShownPath};
use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

/// Opens the tokenizer that `data.tokenizer` names.
pub(super) fn tokenizer(config: &Config) -> Result<Option<Tokenizer>, CommandError> {
    let open = |path: &String| {
        let path = Path::new(path);
        Tokenizer::open(path).map_err(|problem| not_opened(path, &problem))
    };
    config.data.tokenizer.as_ref().map(open).transpose()
}

/// Opens the copy of the tokenizer in the run's directory. The path in the stored config is not
/// opened, since it may name any file.
pub(super) fn tokenizer_of(run: &Path, config: &Config) -> Result<Option<Tokenizer>, CommandError> {
    let Some(named) = &config.data.tokenizer else { return Ok(None) };
    let copy = run.join(TOKENIZER);
    let what = match fs::symlink_metadata(&copy) {
        Ok(metadata) if metadata.is_file() => {
            let opened = Tokenizer::open_kept(&copy);
            return opened.map(Some).map_err(|problem| not_opened(&copy, &problem));
        }
        Ok(_) => "is no file of it".to_owned(),
        Err(error) if error.kind() == ErrorKind::NotFound => "is not there".to_owned(),
        Err(error) => format!("cannot be read ({error})"),
    };
    let (copy, named) = (copy.shown(), PathText(Path::new(named)));
    let why = format!(
        "data.tokenizer: {copy} {what}, and the config of a run opens no file outside of it: to trust it, copy {named} there"
    );
    Err(CommandError::new(code::DATA, why))
}

/// Returns the files of `model_files`, from the folder `from`, that a run keeps. If their tokens
/// are of another kind, it keeps none, and a note says why.
pub(super) fn fitting(
    model_files: ModelFiles,
    from: &Path,
    config: &Config,
    tokenizer: Option<&Tokenizer>,
) -> ModelFiles {
    let Some(why) = model_files.foreign(&config.data, tokenizer) else {
        if let Some(left_out) = model_files.left_out() {
            say(&format!("note: {}: {left_out}", PathText(from)));
        }
        return model_files;
    };
    if model_files.files().iter().any(|(name, _)| *name != "config.json") {
        let from = PathText(from);
        say(&format!("note: the run keeps no tokenizer and no chat template of {from}: {why}"));
    }
    ModelFiles::default()
}

fn not_opened(path: &Path, problem: &Problem) -> CommandError {
    CommandError::new(code::DATA, format!("data.tokenizer: {}: {problem}", path.shown()))
}

/// Config keys that name files to read.
pub(super) const KEYS: [&str; 3] = ["data.train", "data.validation", "data.tokenizer"];
/// Maximum bytes of data that `config check` reads completely: in general, and with a tokenizer.
const READ_WHOLE: [u64; 2] = [64 << 20, 1 << 20];

/// Problem of `config` with its data, for `config check`, in the words of `train --dry-run`. Small
/// data is read completely; larger files are opened and their beginnings inspected. A described box
/// without `data.train` has no data to check.
pub(super) fn trouble(
    config: &Config,
    ok: &dyn Fn(&[&str]) -> bool,
) -> Option<(&'static str, String, String)> {
    let boxed = matches!(config.device, DeviceConfig::Sim { .. });
    let needed = ["data.format", "data.validation_fraction", "model.vocab", "model.seq_len"];
    if boxed && config.data.train.is_empty() || !ok(&KEYS) || !ok(&needed) {
        return None;
    }
    // Rules between keys report these configs; their data cannot be read as requested.
    let DataConfig { format, packing, tokenizer, .. } = &config.data;
    let no_documents = *packing != Packing::Windows && !format.has_documents();
    if no_documents || format.is_rows() && tokenizer.is_none() {
        return None;
    }
    let finding =
        |e: DataError| (e.key, format!("{}: {}", PathText(&e.path), e.problem), String::new());
    let look = || {
        let open = |path: &String| {
            let refused = |problem| DataError { key: "data.tokenizer", path: path.into(), problem };
            Tokenizer::open(Path::new(path)).map_err(refused)
        };
        let tokenizer = tokenizer.as_ref().map(open).transpose()?;
        let look = DataInspection::at(config, true)?;
        check_vocab(config, tokenizer.as_ref())?;
        let tokenizes = tokenizer.is_some() && format.is_text();
        if look.bytes <= READ_WHOLE[usize::from(tokenizes)] {
            let quiet = ReadOptions { dry: true, quiet: true, ..ReadOptions::default() };
            read(config, tokenizer.as_ref(), quiet)?;
        }
        Ok(())
    };
    look().err().map(finding)
}

/// Checks that the data can be read, before any of it is read.
pub(super) fn look(config: &Config) -> Result<(), CommandError> {
    DataInspection::at(config, false).map(drop).fail_with(code::DATA)
}

/// Opens and checks all data, then shrinks the cache folder to its limit.
pub(super) fn open(
    config: &Config,
    tokenizer: Option<&Tokenizer>,
    options: ReadOptions,
) -> Result<Arc<Dataset>, CommandError> {
    let (cache, began) = (Cache::of_user(options.dry), SystemTime::now());
    let limit = cache.limit().fail_with(code::CONFIG)?;
    let data = read(config, tokenizer, options).map(Arc::new).fail_with(code::DATA)?;
    cache.make_room(limit, began);
    Ok(data)
}

/// Opens the tokenizer and all data, for a command that needs no work between the two.
pub(super) fn read_whole(
    config: &Config,
    options: ReadOptions,
) -> Result<(Option<Tokenizer>, Arc<Dataset>), CommandError> {
    let tokenizer = tokenizer(config)?;
    look(config)?;
    if options.compares {
        DataInspection::compare(&config.data, &TerminalProgress).fail_with(code::DATA)?;
    }
    let data = open(config, tokenizer.as_ref(), options)?;
    Ok((tokenizer, data))
}

/// Options for reading data.
#[derive(Clone, Copy, Default)]
pub(super) struct ReadOptions {
    /// Whether nothing is written, not even into the user's cache folder.
    pub(super) dry: bool,
    /// Whether progress is hidden.
    pub(super) quiet: bool,
    /// Whether prepared tokens are compared with their stored hashes.
    pub(super) compares: bool,
    /// Whether each omitted row is named when it is found.
    pub(super) names_all: bool,
    /// Whether unused parts of rows are not reported.
    pub(super) is_brief: bool,
}

/// Refuses a tokenizer whose tokens exceed the model's vocabulary.
fn check_vocab(config: &Config, tokenizer: Option<&Tokenizer>) -> Result<(), DataError> {
    let (Some(tokenizer), Some(path)) = (tokenizer, &config.data.tokenizer) else { return Ok(()) };
    let refused = |problem| DataError { key: "data.tokenizer", path: path.into(), problem };
    tokenizer.fits(config.model.vocab).map_err(refused)
}

fn read(
    config: &Config,
    tokenizer: Option<&Tokenizer>,
    options: ReadOptions,
) -> Result<Dataset, DataError> {
    let ReadOptions { dry, quiet, names_all, .. } = options;
    let (data, model) = (&config.data, &config.model);
    let cache = Cache::of_user(dry);
    let progress: &dyn Progress = if quiet { &Silence } else { &TerminalProgress };
    match (tokenizer, &data.tokenizer) {
        (Some(tokenizer), Some(path)) if data.format.is_rows() => {
            with_rows(data, Path::new(path), &cache, tokenizer, options, |with| {
                every(data, &|parts| Corpus::open_rows(parts, &with, model.vocab, model.seq_len))
            })?
        }
        (Some(tokenizer), Some(path)) if data.format.is_text() => {
            let (path, format) = (Path::new(path), data.format.clone());
            let sizes = ChunkSizes::default();
            let with = TextSource { tokenizer, path, cache: &cache, format, sizes, progress };
            every(data, &|parts| Corpus::open_text(parts, &with, model.vocab, model.seq_len))
        }
        // Files of tokens are tokenized already; only the vocabulary is checked.
        _ => {
            check_vocab(config, tokenizer)?;
            let checks = Checks { cache: &cache, vocab: model.vocab, progress, names_all };
            let (format, packing, truncate) = (&data.format, data.packing, data.truncate);
            let with = SampleSettings { format, packing, truncate };
            every(data, &|parts| Corpus::open_checked(parts, with, checks, model.seq_len))
        }
    }
}

/// Opens all sources of the config: one corpus with both parts, or several corpora.
fn every(
    data: &DataConfig,
    open: &dyn Fn(CorpusSplit<'_>) -> Result<Corpus, DataError>,
) -> Result<Dataset, DataError> {
    let (train, validation, fraction) =
        (&data.train.0, &data.validation.0, data.validation_fraction);
    if let ([one], [other]) = (train.as_slice(), validation.as_slice()) {
        return open(CorpusSplit::Both(&one.path, &other.path)).map(Dataset::from);
    }
    let of_train = |source: &Source| {
        open(match validation.is_empty() {
            true => CorpusSplit::Cut(&source.path, fraction),
            false => CorpusSplit::Train(&source.path),
        })
    };
    if let ([one], []) = (train.as_slice(), validation.as_slice()) {
        return of_train(one).map(Dataset::from);
    }
    let to_train = train.iter().map(of_train).collect::<Result<_, _>>()?;
    let open_validation = |source: &Source| open(CorpusSplit::Validation(&source.path));
    let corpora = validation.iter().map(open_validation).collect::<Result<_, _>>()?;
    Ok(Dataset::of_corpora(
        SourceCorpora { corpora: to_train, sources: train },
        SourceCorpora { corpora, sources: validation },
    ))
}

/// Calls `then` with the token source for the rows of `data`; `path` is the tokenizer's.
pub(super) fn with_rows<T>(
    data: &DataConfig,
    path: &Path,
    cache: &Cache,
    tokenizer: &Tokenizer,
    ReadOptions { quiet, names_all, is_brief, .. }: ReadOptions,
    then: impl FnOnce(RowSource<'_>) -> T,
) -> Result<T, DataError> {
    let refused = |problem| {
        let folder = path.parent().unwrap_or(path);
        let path = if path.is_dir() { path } else { folder };
        DataError { key: "data.tokenizer", path: path.into(), problem }
    };
    let model_files = ModelFiles::open(path);
    let template;
    let rows = match &data.format {
        DataFormat::Jsonl { text } => {
            let end = model_files
                .map_err(|e| e.to_string())
                .and_then(|model_files| end_of_text(&model_files));
            let end = end.map_err(|why| refused(Problem::BadListed(why)))?;
            Rows::of_texts(tokenizer, text, end.as_deref())
        }
        _ => {
            let found = model_files.map_err(|e| e.to_string()).and_then(|model_files| {
                Ok((Template::find_for_data(&model_files)?, end_of_text(&model_files)?))
            });
            let (found, end) = found.map_err(|why| refused(Problem::NoTemplate(why)))?;
            template = found;
            let rows = match &template {
                Some(template) => Rows::of_chats(tokenizer, template, &data.system),
                None if data.system.is_empty() => Rows::of_pairs(tokenizer, end.as_deref()),
                None => return Err(refused(Problem::SystemWithoutTemplate)),
            };
            rows.with_columns(&data.columns, data.targets)
        }
    };
    let rows = rows.with_control_tokens(data.control_tokens);
    rows.check_end().map_err(refused)?;
    let (format, packing, truncate) = (&data.format, data.packing, data.truncate);
    let tokenizer = path;
    let rows = &rows;
    let progress: &dyn Progress = if quiet { &Silence } else { &TerminalProgress };
    let with = RowSource {
        rows,
        tokenizer,
        format,
        packing,
        truncate,
        names_all,
        is_brief,
        cache,
        progress,
    };
    Ok(then(with))
}
