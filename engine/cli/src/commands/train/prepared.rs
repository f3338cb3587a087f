//! Preparation and checks of `onebox train` before the first step.

use super::{TrainArgs, epochs};
use crate::commands::data::ReadOptions;
use crate::commands::processes::Team;
use crate::commands::weights::{self, pretrained};
use crate::commands::{CommandError, check_built, code, data, plan, print};
use crate::commands::{resume, say, say_report};
use crate::report::reading::TerminalProgress;
use ::data::model_files::ModelFiles;
use ::data::progress::{Progress, Silence};
use ::data::{Dataset, Tokenizer, takes_from};
use checkpoint::hugging_face::PretrainedWeights;
use checkpoint::{Checkpoint, RunFolder, newest_name, sizes};
use config::{Config, DataFormat, LoadedConfig};
use engine::run::Weights;
use engine::run_dir::{RunDir, RunDirError, RunMode};
use files::names::{CHECKPOINTS, CONFIG, EXPERTS, FORKED, KEPT, RUNS, UNTRAINED, WEIGHTS};
use files::path_text::PathText;
use layout::build::{RankLayout, lay_out};
use predict::choose;
use predict::plan::{Disk, memory_report};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tracing::debug_span;

/// Everything that a run has before it writes.
pub(super) struct PreparedRun {
    pub(super) loaded: LoadedConfig,
    pub(super) built: RankLayout,
    pub(super) tokenizer: Option<Tokenizer>,
    pub(super) data: Arc<Dataset>,
    pub(super) looked: MemoryDecision,
    pub(super) model_files: ModelFiles,
    pub(super) mode: RunMode,
}

/// Checks everything and reads the data; `None` for a run that has finished.
pub(super) fn prepare(args: &TrainArgs, team: &Team) -> Result<Option<PreparedRun>, CommandError> {
    let machine = &team.machine;
    let starts = starts_anew(args);
    // A run that goes on has its adapters in its checkpoint.
    let of_run = args.run_dir.as_ref().filter(|_| !starts).map(|dir| dir.join(CONFIG));
    let loaded =
        weights::load(&args.config, machine, starts, of_run.as_deref(), &|_, _| Vec::new());
    let loaded = loaded.map_err(|(code, errors)| CommandError::new(code, errors))?;
    let (mut loaded, early) = epochs::as_steps(args, loaded)?;
    choose(&mut loaded, machine)?;
    check_built(&loaded, machine)?;
    team.check(&loaded.config)?;
    if team.is_first() && starts {
        weights::warnings(&loaded).iter().for_each(|warning| say(warning));
    }
    // Only a run of epochs has read its data already.
    if let Some(data) = early.as_ref().filter(|_| team.is_first() && starts)
        && let Some(few) =
            loaded.config.few_steps(data.num_train_samples(), loaded.config.train.steps)
    {
        say(&format!("warning: {few}"));
    }
    let mode = match (args.resume, args.fork, args.overwrite) {
        (true, ..) => RunMode::Resume,
        (_, true, _) => RunMode::Fork,
        (.., true) => RunMode::Overwrite,
        _ => RunMode::Fresh,
    };
    if let (RunMode::Resume, Some(dir)) = (mode, &args.run_dir)
        && let Some(step) = RunDir::finished_in(dir)
        && step >= loaded.config.train.steps
    {
        return resume::finished(dir, step, &loaded).map(|()| None);
    }
    args.trace.check(args.run_dir.as_deref(), loaded.config.train.steps)?;
    let built = debug_span!("layout").in_scope(|| lay_out(&loaded.config, machine));
    let tokenizer = data::tokenizer(&loaded.config)?;
    data::look(&loaded.config)?;
    // A fork gets a new directory next to this one.
    if let Some(path) = args.run_dir.as_ref().filter(|_| mode != RunMode::Fork)
        && let Some(key) = takes_from(&loaded.config.data, path)
    {
        return Err(RunDirError::AmongData { path: path.clone(), key }.into());
    }
    // Checked before the data is read, since the data must fit too.
    let looked = check_memory(&loaded, &built, args.dry_run)?;
    let model_files =
        model_files(&loaded.config, tokenizer.as_ref(), args.run_dir.as_deref(), mode)?;
    let quiet = args.quiet || !team.is_first();
    let options = ReadOptions { dry: args.dry_run, quiet, ..ReadOptions::default() };
    let read = || data::open(&loaded.config, tokenizer.as_ref(), options);
    let data = match early {
        Some(data) => data,
        None => debug_span!("data").in_scope(read)?,
    };
    Ok(Some(PreparedRun { loaded, built, tokenizer, data, looked, model_files, mode }))
}

/// Whether the directory shows a start at step 1. Only such a run reads the weights of a folder.
fn starts_anew(args: &TrainArgs) -> bool {
    let begun = |dir: &PathBuf| {
        let goes_on = newest_name(&dir.join(CHECKPOINTS)).is_some() || dir.join(FORKED).exists();
        goes_on || RunDir::finished_in(dir).is_some()
    };
    !(args.fork || args.resume && args.run_dir.as_ref().is_some_and(begun))
}

impl PreparedRun {
    /// Opens the directory, the checkpoint to continue from, and the weights to start from.
    pub(super) fn open(&self, args: &TrainArgs) -> Result<OpenedRun, CommandError> {
        let (loaded, built, mode) = (&self.loaded, &self.built, self.mode);
        check_disk(loaded, built, args.run_dir.as_deref(), mode)?;
        let create = |own: Vec<(&'static str, Vec<u8>)>| {
            let dir = RunDir::create(args.run_dir.as_deref(), &loaded.config.name, mode)?;
            dir.keep(&[self.model_files.files(), &own[..]].concat())?;
            Ok::<RunDir, RunDirError>(dir)
        };
        let tokenizer = self.tokenizer.as_ref();
        let start = |from: &Path, own: Option<&RunFolder>| {
            resume::start(from, own, loaded, built, &self.data, tokenizer, mode)
        };
        Ok(match mode {
            RunMode::Fork => {
                // A fork that is refused leaves no directory.
                let source = RunDir::source(args.run_dir.as_deref())?;
                let start = start(&source, None)?;
                let base = start.as_deref().map(|start| self.base(start)).transpose()?;
                let dir = create(Vec::new())?;
                start.iter().try_for_each(|start| resume::note_source(&dir, start))?;
                (dir, start, base.unwrap_or_default())
            }
            RunMode::Resume => {
                let first = self.weights_of_a_first_step(args)?;
                let dir = create(self.own_files(first.as_ref(), args)?)?;
                let start = match &args.run_dir {
                    Some(path) => start(path, Some(dir.folder()))?,
                    None => return Err(RunDirError::NeedsDirectory(mode).into()),
                };
                let weights = match (&start, first) {
                    (Some(start), _) => self.base(start)?,
                    (None, Some(first)) => first,
                    (None, None) => self.weights(&TerminalProgress)?,
                };
                // These weights would not match the model that is trained now.
                dir.remove(WEIGHTS)?;
                (dir, start, weights)
            }
            RunMode::Fresh | RunMode::Overwrite => {
                let first = self.weights_of_a_first_step(args)?;
                let dir = create(self.own_files(first.as_ref(), args)?)?;
                (dir, None, first.unwrap_or_default())
            }
        })
    }
}

impl PreparedRun {
    /// Checks the disk, the directory, the checkpoint to continue from, and the weights to start from,
    /// as [`open`](Self::open) does, and changes nothing.
    pub(super) fn look(&self, args: &TrainArgs) -> Result<(), CommandError> {
        let (loaded, built, mode) = (&self.loaded, &self.built, self.mode);
        let dir = args.run_dir.as_deref();
        check_disk(loaded, built, dir, mode)?;
        self.weights_of_a_first_step(args)?;
        RunDir::check(dir, &loaded.config.name, mode)?;
        let from = match (mode, dir) {
            (RunMode::Fork, dir) => RunDir::source(dir)?,
            (RunMode::Resume, Some(dir)) => dir.to_owned(),
            (RunMode::Resume, None) => return Err(RunDirError::NeedsDirectory(mode).into()),
            (RunMode::Fresh | RunMode::Overwrite, _) => return Ok(()),
        };
        let tokenizer = self.tokenizer.as_ref();
        let start = resume::start(&from, None, loaded, built, &self.data, tokenizer, mode)?;
        match start {
            Some(start) => self.base(&start).map(drop)?,
            None => drop(pretrained(&loaded.config, &built.decoder)?),
        }
        Ok(())
    }

    /// Opens the weights over which the run of checkpoint `start` trains adapters, if it does.
    fn base(&self, start: &Checkpoint) -> Result<StartWeights, CommandError> {
        let (config, decoder) = (&self.loaded.config, &self.built.decoder);
        let base = weights::base(config, decoder, start, weights::BY_KEY, &TerminalProgress)?;
        Ok(StartWeights { pretrained: base, adapters: None })
    }

    /// The file that names the tensors of the folder which the run does not train, if the run keeps
    /// the description of its model; a note says what these are.
    fn own_files(
        &self,
        first: Option<&StartWeights>,
        args: &TrainArgs,
    ) -> Result<Vec<(&'static str, Vec<u8>)>, CommandError> {
        let keeps = self.model_files.get("config.json").is_some();
        let first = first.and_then(|first| first.pretrained.as_deref());
        let Some(first) = first.filter(|_| keeps) else { return Ok(Vec::new()) };
        let experts = first.experts_file().map(|bytes| (EXPERTS, bytes));
        let progress: &dyn Progress = if args.quiet { &Silence } else { &TerminalProgress };
        let Some(untrained) = first.untrained(progress)? else {
            return Ok(experts.into_iter().collect());
        };
        say(&format!(
            "note: {}: the run does not train {}; an export copies them from there",
            PathText(first.path()),
            untrained.summary()
        ));
        Ok([(UNTRAINED, untrained.encode())].into_iter().chain(experts).collect())
    }

    /// Opens the weights of the folders for a run without steps, and reads all of them once, so that a
    /// refused folder leaves no run directory.
    fn weights_of_a_first_step(
        &self,
        args: &TrainArgs,
    ) -> Result<Option<StartWeights>, CommandError> {
        if !starts_anew(args) {
            return Ok(None);
        }
        let progress: &dyn Progress = if args.quiet { &Silence } else { &TerminalProgress };
        let found = self.weights(progress)?;
        if let Some(pretrained) = &found.pretrained {
            pretrained.check(progress)?;
        }
        Ok(Some(found))
    }

    /// The weights of the folders that the config names.
    fn weights(&self, progress: &dyn Progress) -> Result<StartWeights, CommandError> {
        let (config, decoder) = (&self.loaded.config, &self.built.decoder);
        Ok(StartWeights {
            pretrained: weights::of_start(config, decoder, progress)?,
            adapters: weights::factors(config, decoder)?,
        })
    }
}

/// Weights from which a run starts, or over which it trains adapters.
#[derive(Default)]
pub(super) struct StartWeights {
    /// Weights of the folder of `model.from`.
    pub(super) pretrained: Option<Arc<PretrainedWeights>>,
    /// Adapters of the folder of `adapter.from`.
    pub(super) adapters: Option<Arc<Weights>>,
}

/// Run directory, checkpoint to continue from, and weights to start from.
pub(super) type OpenedRun = (RunDir, Option<Arc<Checkpoint>>, StartWeights);

/// Checks the memory before anything is allocated, and refuses with numbers. Counts the ops of a
/// step only if the plan is shown. The result has the text about these decisions for the
/// introduction.
pub(in crate::commands) fn check_memory(
    loaded: &LoadedConfig,
    built: &RankLayout,
    show: bool,
) -> Result<MemoryDecision, CommandError> {
    let config = &loaded.config;
    let report = if show { plan::made(config, built)? } else { memory_report(config, built) };
    if show {
        print(&plan::text(loaded, &built.machine, &report))?;
    } else if !report.fits {
        say_report(&plan::refusal(loaded, &built.machine, &report));
    }
    let over = |limit: Option<u64>, bytes| limit.is_some_and(|limit| bytes > limit);
    if over(report.gpu.limit, report.gpu.bytes) {
        let why = "out of GPU memory before the first step: nothing was written";
        return Err(CommandError::new(code::DEVICE_MEMORY, why));
    }
    if let Some(why) = report.not_checked {
        return Err(CommandError::new(code::RANK, why));
    }
    if !report.fits {
        let why = "out of host memory before the first step: nothing was written";
        return Err(CommandError::new(code::HOST_MEMORY, why));
    }
    let words = loaded.chosen.iter().cloned().chain(report.placed).chain(report.saving);
    let words: Vec<String> = words.collect();
    let words = (!words.is_empty()).then(|| words.join("\n"));
    Ok(MemoryDecision { words, copies_states: report.copies_states })
}

/// Decisions for the run after the check of its memory.
pub(in crate::commands) struct MemoryDecision {
    /// Text about the update mode, the sockets and the writing of checkpoints, if not plain.
    pub(super) words: Option<String>,
    /// Whether ranks copy their states, and continue while the copies are written.
    pub(super) copies_states: bool,
}

/// Files that the run keeps from the folder of its model or tokenizer; none if it has them already.
fn model_files(
    config: &Config,
    tokenizer: Option<&Tokenizer>,
    dir: Option<&Path>,
    mode: RunMode,
) -> Result<ModelFiles, CommandError> {
    let (model_files, from) = match (dir, mode, &config.model.from) {
        (Some(dir), RunMode::Resume, _) if dir.join(KEPT).exists() => {
            return Ok(ModelFiles::default());
        }
        (Some(dir), RunMode::Fork, _) if dir.join(KEPT).exists() => (ModelFiles::of_run(dir), dir),
        (_, _, Some(from)) => (ModelFiles::open(Path::new(from)), Path::new(from)),
        (_, _, None) => match config.data.tokenizer.as_deref().map(Path::new) {
            // Chats with the model need its template, also if it was trained on prepared chats.
            Some(tokenizer)
                if config.data.format == DataFormat::Chat || !config.data.format.is_text() =>
            {
                (ModelFiles::open(tokenizer).map(ModelFiles::without_model), tokenizer)
            }
            _ => return Ok(ModelFiles::default()),
        },
    };
    Ok(data::fitting(model_files?, from, config, tokenizer))
}

/// Refuses a run if its first checkpoint has no room on the disk, or its weights if it saves no
/// checkpoints. Warns if a later file has no room.
fn check_disk(
    loaded: &LoadedConfig,
    built: &RankLayout,
    dir: Option<&Path>,
    mode: RunMode,
) -> Result<(), CommandError> {
    let parameters = built.decoder.shape().trained_parameters();
    // A fork gets a directory next to its source.
    let next_to =
        |dir: &Path| dir.canonicalize().map_or(dir.to_owned(), |dir| dir.with_extension("new"));
    let place = match (dir, mode) {
        (Some(dir), RunMode::Fork) => next_to(dir),
        (dir, _) => dir.unwrap_or(Path::new(RUNS)).to_owned(),
    };
    let disk = Disk::new(&loaded.config, parameters, &place);
    let found = match (dir, mode) {
        (Some(dir), RunMode::Resume | RunMode::Overwrite) => sizes(&dir.join(CHECKPOINTS)),
        (None, _) | (_, RunMode::Fresh | RunMode::Fork) => Vec::new(),
    };
    let disk = disk.holding(&found, mode == RunMode::Overwrite);
    if let Some(why) = disk.refusal() {
        return Err(CommandError::new(code::IO, format!("{why}; nothing was written")));
    }
    if let Some(why) = disk.shortage() {
        say(&format!("warning: {why}"));
    }
    Ok(())
}
