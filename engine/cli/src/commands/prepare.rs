//! `onebox data prepare`: tokenizes text once.

use super::data::ReadOptions;
use super::{
    CommandError, ConfigArgs, Failable, code, data, print, quoted_path, set_arguments, signals,
};
use crate::report::reading::TerminalProgress;
use ::data::{Cache, ChunkSizes, Preparation, PrepareError, PreparedData, RowSource, takes_from};
use clap::ValueHint;
use config::{Config, DataOrder, Packing, Source, Sources};
use files::names::resolved;
use files::path_text::ShownPath;
use layout::LocalMachine;
use std::path::{Path, PathBuf, absolute};
use topology::{counted, format_bytes};

#[derive(Debug, clap::Args)]
pub(super) struct PrepareArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Folder for the tokens; an unfinished folder is continued
    #[arg(value_hint = ValueHint::DirPath)]
    out: PathBuf,
}

pub(super) fn run(args: &PrepareArgs, machine: &LocalMachine) -> Result<(), CommandError> {
    let loaded = args.config.load(machine)?;
    let config = &loaded.config;
    refuse(config, &args.out)?;
    let (Some(tokenizer), Some(path)) = (data::tokenizer(config)?, &config.data.tokenizer) else {
        unreachable!("without a tokenizer nothing is prepared")
    };
    let fits = tokenizer.fits(config.model.vocab);
    fits.map_err(|problem| format!("data.tokenizer: {problem}")).fail_with(code::DATA)?;
    let starting = signals::hear().starting;
    starting.say("interrupted; finished parts are kept: the same command goes on".into());
    let cache = Cache::of_user(false);
    let out = absolute(&args.out).unwrap_or_else(|_| args.out.clone());
    let again = again(&args.config, &out);
    let data = &config.data;
    let prepare = |rows: Option<RowSource<'_>>| {
        let preparation = Preparation {
            train: data.train.paths().collect(),
            validation: data.validation.paths().collect(),
            format: &data.format,
            tokenizer: &tokenizer,
            rows,
            cache: &cache,
            out: &out,
            command: &again,
            sizes: ChunkSizes::default(),
            progress: &TerminalProgress,
        };
        preparation.run(&|parts| starting.say(interrupted(parts)))
    };
    let prepared = match data.format.is_rows() {
        false => prepare(None),
        true => {
            // No cache is needed, since the tokens go to a folder of the user's choice.
            let (path, cache, how) = (Path::new(path), Cache::default(), ReadOptions::default());
            data::with_rows(data, path, &cache, &tokenizer, how, |rows| prepare(Some(rows)))
                .fail_with(code::DATA)?
        }
    };
    let prepared = prepared.map_err(|error| {
        let code = match &error {
            PrepareError::Data(_) => code::DATA,
            PrepareError::Write { .. } => code::IO,
            PrepareError::Refused { .. } => code::NO_RUN_DIR,
        };
        CommandError::new(code, error)
    })?;
    print(&words(config, &prepared, &out))
}

/// Shell command that repeats this one from any folder; empty for a config from stdin.
fn again(ConfigArgs { config, sets }: &ConfigArgs, out: &Path) -> String {
    if config == Path::new("-") {
        return String::new();
    }
    // Paths in settings are relative to the working directory.
    let here = std::env::current_dir().ok().filter(|_| !sets.is_empty());
    let here = here.map_or_else(String::new, |here| format!("cd {} && ", quoted_path(&here)));
    let sets = set_arguments(sets);
    let config = absolute(config).unwrap_or_else(|_| config.clone());
    format!("{here}onebox data prepare {}{sets} {}", quoted_path(&config), quoted_path(out))
}

/// Last message of an interrupted preparation that keeps `parts` parts.
fn interrupted(parts: usize) -> String {
    match parts {
        0 => "interrupted before the first part; the same command begins again".into(),
        1 => "interrupted; 1 part is kept: the same command goes on behind it".into(),
        parts => {
            format!("interrupted; {parts} parts are kept: the same command goes on behind them")
        }
    }
}

/// Refuses data that needs no tokenization, and an output folder inside of the data.
fn refuse(config: &Config, out: &Path) -> Result<(), CommandError> {
    let data = &config.data;
    let why = match &data.format {
        format if !format.is_text() => {
            format!("data.format: {format:?}: the files hold tokens, and a run reads these where they stand")
        }
        _ if data.tokenizer.is_none() => {
            "data.tokenizer is not set: bytes are the tokens, and a run reads these where they stand".into()
        }
        _ => {
            let inside = |text: &str| {
                Path::new(text).is_dir() && resolved(out).starts_with(resolved(Path::new(text)))
            };
            let mut named = data.train.paths().chain(data.validation.paths());
            let among = takes_from(data, out).is_some() || named.any(inside);
            match among {
                true => format!("{}: it is in a folder of the data; name another one", out.shown()),
                false => return Ok(()),
            }
        }
    };
    Err(CommandError::new(code::CONFIG, why))
}

fn words(config: &Config, prepared: &PreparedData, out: &Path) -> String {
    let PreparedData { train, validation, tokens, files, text, parts, before, format } = prepared;
    let (files, text) = (counted(*files, "file"), format_bytes(*text));
    let parts = counted(*parts, "part");
    let before = match before {
        0 => String::new(),
        before => format!(", {before} of them from before"),
    };
    let data = &config.data;
    let mut keys = vec![format!("train: {}", sources(&data.train, train, true))];
    if !validation.is_empty() {
        keys.push(format!("validation: {}", sources(&data.validation, validation, false)));
    }
    match data.packing {
        Packing::Windows => keys.push(format!("format: {format:?}")),
        // The index says where documents begin.
        packing => keys.push(format!("format: Megatron, packing: {packing:?}")),
    }
    if let Some(tokenizer) = &data.tokenizer {
        keys.push(format!("tokenizer: {tokenizer:?}"));
    }
    if data.truncate {
        keys.push("truncate: true".into());
    }
    if data.order != DataOrder::Shuffled {
        keys.push(format!("order: {:?}", data.order));
    }
    if validation.is_empty() {
        keys.push(format!("validation_fraction: {:?}", data.validation_fraction));
    }
    format!(
        "{}: {tokens} tokens of {files}, {text} of text, in {parts}{before}\nA config trains on them with these two lines:\n    data: ({}),\n    model: (.., vocab: {}),\n",
        out.shown(),
        keys.join(", "),
        config.model.vocab,
    )
}

/// Formats sources as in a config, with paths of their tokens. Training sources have weights.
fn sources(of: &Sources, folders: &[PathBuf], are_weighted: bool) -> String {
    let path = |folder: &PathBuf| format!("{:?}", folder.to_string_lossy());
    if let ([Source { name: None, .. }], [folder]) = (of.0.as_slice(), folders) {
        return path(folder);
    }
    let one = |(source, folder): (&Source, &PathBuf)| {
        let name =
            source.name.as_ref().map_or_else(String::new, |name| format!("name: {name:?}, "));
        let weight =
            if are_weighted { format!(", weight: {:?}", source.weight) } else { String::new() };
        format!("({name}path: {}{weight})", path(folder))
    };
    format!("[{}]", of.0.iter().zip(folders).map(one).collect::<Vec<_>>().join(", "))
}
