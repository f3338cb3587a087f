//! `onebox train`: what happens before, beside and after the steps.

mod diverged;
mod ending;
mod epochs;
mod first_loss;
mod rollback;
mod watch;

use self::watch::Watch;
use super::check::count;
use super::checkpoint::unusable;
use super::exit::{Failed, code};
use super::signals::{self, Signals};
use super::trace::{self, TraceArgs};
use super::{ConfigArgs, SimdArg, data, plan, print, resume, say, simulate};
use crate::checkpoint::{Checkpoint, FOLDER, sizes};
use crate::config::{Config, DataFormat, DeviceConfig, Loaded, Weights, in_line};
use crate::data::{Dataset, Tokenizer, takes_from};
use crate::hugging_face::{Beside, Folder, Pretrained};
use crate::predict::choose;
use crate::predict::plan::{Disk, memory_report};
use crate::report::metrics::MetricsWriter;
use crate::report::progress::Progress;
use crate::report::stderr;
use crate::report::tensorboard::Events;
use crate::run::{Outcome, Place, RunError, RunOptions, Unread, Watcher, train};
use crate::run_dir::kept::KEPT;
use crate::run_dir::{CONFIG, RUNS, RunDir, RunDirError, RunMode, TOKENIZER, WEIGHTS};
use crate::train::batch::FILL;
use crate::train::build::{Built, build};
use crate::train::detours::Detours;
use device::Error;
use device::numerics::SimdPath;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use topology::counted;
use tracing::debug_span;

/// Train a model.
#[derive(Debug, clap::Args)]
pub(super) struct TrainArgs {
    #[command(flatten)]
    pub(super) config: ConfigArgs,
    /// Where metrics, config and weights go [default: runs/NAME-TIME]
    #[arg(long)]
    run_dir: Option<PathBuf>,
    /// Go on with the run in --run-dir
    #[arg(long, group = "mode")]
    resume: bool,
    /// Start from the run in --run-dir, in a new directory beside it
    #[arg(long, group = "mode")]
    fork: bool,
    /// Remove the run in --run-dir first
    #[arg(long, group = "mode")]
    overwrite: bool,
    /// Check everything, read the data, show the plan; write and train nothing
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    simd: SimdArg,
    #[command(flatten)]
    trace: TraceArgs,
    /// No progress, no summary
    #[arg(short, long)]
    pub(super) quiet: bool,
}

pub(super) fn run(args: &TrainArgs) -> Result<(), Failed> {
    args.simd.choose()?;
    // A dry run writes nothing: any signal may end it.
    let signals = (!args.dry_run).then(signals::hear);
    let loaded = args.config.load()?;
    let (mut loaded, early) = epochs::as_steps(args, loaded)?;
    choose(&mut loaded).map_err(simulate::failed)?;
    if let Some(not_built) = loaded.config.not_built(&loaded.origins) {
        return Err(Failed::new(code::CONFIG, not_built));
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
        return resume::finished(dir, step, &loaded);
    }
    args.trace.check(args.run_dir.as_deref(), loaded.config.train.steps)?;
    let built = debug_span!("layout").in_scope(|| build(&loaded.config));
    let tokenizer = data::tokenizer(&loaded.config)?;
    let tokenizer = tokenizer.as_ref();
    data::look(&loaded.config)?;
    // A fork goes beside it.
    if let Some(path) = args.run_dir.as_ref().filter(|_| mode != RunMode::Fork)
        && let Some(key) = takes_from(&loaded.config.data, path)
    {
        return Err(refused(RunDirError::AmongData { path: path.clone(), key }));
    }
    // Before the data is read: it is part of what must fit.
    let looked = check_memory(&loaded, &built, args.dry_run)?;
    let beside = beside((&loaded.config, tokenizer), (args.run_dir.as_deref(), mode))?;
    let read = || data::open(&loaded.config, tokenizer, (args.dry_run, args.quiet));
    let data = match early {
        Some(data) => data,
        None => debug_span!("data").in_scope(read)?,
    };
    let Some(signals) = signals else {
        say(&format!("data: {}", data.describe()));
        say("dry run: everything is in order; nothing was written");
        return Ok(());
    };
    check_disk(&loaded, &built, (args.run_dir.as_deref(), mode))?;
    let create = || {
        let dir = RunDir::create(args.run_dir.as_deref(), &loaded.config.name, mode);
        let kept = dir.and_then(|dir| dir.keep(beside.files()).map(|()| dir));
        kept.map_err(refused)
    };
    let start = |from: &Path| resume::start(from, &loaded, &built, (&data, tokenizer), mode);
    let (dir, start, pretrained) = match mode {
        RunMode::Fork => {
            // A fork that is refused leaves no directory.
            let source = RunDir::source(args.run_dir.as_deref()).map_err(refused)?;
            let start = start(&source)?;
            let dir = create()?;
            start.iter().try_for_each(|start| resume::note_source(&dir, start))?;
            (dir, start, None)
        }
        RunMode::Resume => {
            let dir = create()?;
            let start = start(dir.path())?;
            // They are another model's than the one that is trained now.
            dir.remove(WEIGHTS).map_err(refused)?;
            let pretrained = match start {
                // The first start of a run.
                None => pretrained(&loaded.config, &built)?,
                Some(_) => None,
            };
            (dir, start, pretrained)
        }
        RunMode::Fresh | RunMode::Overwrite => {
            // A folder that is refused leaves no directory.
            let pretrained = pretrained(&loaded.config, &built)?;
            (create()?, None, pretrained)
        }
    };
    drop(beside);
    let (loaded, built, data, dir) = (&loaded, &built, &data, &dir);
    Session { args, loaded, built, data, tokenizer, dir, looked, pretrained, start }.train(&signals)
}

/// Refuses with numbers before anything is allocated. Only what is shown has its step counted. What the introduction
/// says of memory: whose sockets are used, how checkpoints are written, where that is not plain.
pub(super) fn check_memory(loaded: &Loaded, built: &Built, show: bool) -> Result<Looked, Failed> {
    let config = &loaded.config;
    let report = if show { plan::made(config, built)? } else { memory_report(config, built) };
    if show {
        print(&plan::text(loaded, &report))?;
    } else if !report.fits {
        say(&plan::refusal(loaded, &report));
    }
    let over = |limit: Option<u64>, bytes| limit.is_some_and(|limit| bytes > limit);
    if over(report.gpu.limit, report.gpu.bytes) {
        let why = "out of GPU memory before the first step: nothing was written";
        return Err(Failed::new(code::DEVICE_MEMORY, why));
    }
    if let Some(why) = report.not_checked {
        return Err(Failed::new(code::RANK, why));
    }
    if !report.fits {
        let why = "out of host memory before the first step: nothing was written";
        return Err(Failed::new(code::HOST_MEMORY, why));
    }
    let words = loaded.chosen.iter().cloned().chain(report.placed).chain(report.saving);
    let words: Vec<String> = words.collect();
    let words = (!words.is_empty()).then(|| words.join("\n"));
    Ok(Looked { words, copies_states: report.copies_states })
}

/// What a look at the memories has decided for the run.
pub(super) struct Looked {
    /// Whose sockets are used, how checkpoints are written, where that is not plain.
    words: Option<String>,
    /// Whether ranks copy their states and go on while these are written.
    copies_states: bool,
}

/// The folder of `model.from`, opened, where its weights are what training starts from.
fn pretrained(config: &Config, built: &Built) -> Result<Option<Arc<Pretrained>>, Failed> {
    let model = &config.model;
    let Some(from) = model.from.as_ref().filter(|_| model.weights == Weights::Pretrained) else {
        return Ok(None);
    };
    if Path::new(from).is_file() {
        let why = "model.from names a file, and weights stand beside it: name the folder, or set `model.weights=Random`";
        return Err(Failed::new(code::CONFIG, why));
    }
    let folder = Folder::open(Path::new(from)).map_err(unusable)?;
    let weights = Pretrained::new(folder, &built.gpt).map_err(unusable)?;
    Ok(Some(Arc::new(weights)))
}

/// What the run keeps of the folder that its model is from, where it has not kept it yet.
fn beside(
    (config, tokenizer): (&Config, Option<&Tokenizer>),
    (dir, mode): (Option<&Path>, RunMode),
) -> Result<Beside, Failed> {
    let (beside, from) = match (dir, mode, &config.model.from) {
        (Some(dir), RunMode::Resume, _) if dir.join(KEPT).exists() => return Ok(Beside::default()),
        (Some(dir), RunMode::Fork, _) if dir.join(KEPT).exists() => (Beside::of_run(dir), dir),
        (_, _, Some(from)) => (Beside::open(Path::new(from)), Path::new(from)),
        (_, _, None) => match config.data.tokenizer.as_deref().map(Path::new) {
            // Whoever talks to the model needs the template of its chats, also of prepared ones.
            Some(tokenizer)
                if config.data.format == DataFormat::Chat || !config.data.format.is_text() =>
            {
                (Beside::open(tokenizer).map(Beside::without_model), tokenizer)
            }
            _ => return Ok(Beside::default()),
        },
    };
    Ok(data::fitting(beside.map_err(unusable)?, from, (config, tokenizer)))
}

/// Refuses a run whose first checkpoint, or whose weights where it saves none, find no room; warns where not all of it does.
fn check_disk(
    loaded: &Loaded,
    built: &Built,
    (dir, mode): (Option<&Path>, RunMode),
) -> Result<(), Failed> {
    let parameters = built.gpt.shape().parameters();
    // A fork goes beside its source.
    let beside =
        |dir: &Path| dir.canonicalize().map_or(dir.to_owned(), |dir| dir.with_extension("new"));
    let place = match (dir, mode) {
        (Some(dir), RunMode::Fork) => beside(dir),
        (dir, _) => dir.unwrap_or(Path::new(RUNS)).to_owned(),
    };
    let disk = Disk::new(&loaded.config, parameters, &place);
    let found = match (dir, mode) {
        (Some(dir), RunMode::Resume | RunMode::Overwrite) => sizes(&dir.join(FOLDER)),
        (None, _) | (_, RunMode::Fresh | RunMode::Fork) => Vec::new(),
    };
    let disk = disk.holding(&found, mode == RunMode::Overwrite);
    if let Some(why) = disk.refusal() {
        return Err(Failed::new(code::IO, format!("{why}; nothing was written")));
    }
    if let Some(why) = disk.shortage() {
        say(&format!("warning: {why}"));
    }
    Ok(())
}

pub(super) fn refused(error: RunDirError) -> Failed {
    let code = match error {
        RunDirError::Io { .. } => code::IO,
        _ => code::NO_RUN_DIR,
    };
    Failed::new(code, error)
}

/// Everything that a run has before its first step.
pub(super) struct Session<'a> {
    pub(super) args: &'a TrainArgs,
    pub(super) loaded: &'a Loaded,
    pub(super) built: &'a Built,
    data: &'a Arc<Dataset>,
    pub(super) tokenizer: Option<&'a Tokenizer>,
    pub(super) dir: &'a RunDir,
    looked: Looked,
    /// The weights of a folder that a new run starts from.
    pretrained: Option<Arc<Pretrained>>,
    /// What it goes on from.
    pub(super) start: Option<Arc<Checkpoint>>,
}

impl Session<'_> {
    fn train(&mut self, signals: &Signals) -> Result<(), Failed> {
        let config = &self.loaded.config;
        let file = |e| Failed::new(code::IO, e);
        self.dir.write_atomically(CONFIG, config.to_ron().as_bytes()).map_err(file)?;
        if let Some(tokenizer) = self.tokenizer {
            self.dir.write_atomically(TOKENIZER, tokenizer.bytes()).map_err(file)?;
        }
        if config.train.saves() {
            self.dir.make_folder().map_err(file)?;
        }
        signals.saves.store(config.train.saves(), Ordering::SeqCst);
        self.introduce();
        if self.dir.forked_from().is_none() {
            signals.starting.say(self.stopped_at_start());
        }
        let mut traced = Ok(());
        let ended = self.run_to_end(signals, &mut traced);
        trace::after(ended, traced)
    }

    /// Trains, and is taken back as often as it may be. `traced`: whether the trace is written.
    fn run_to_end(
        &mut self,
        signals: &Signals,
        traced: &mut Result<(), Failed>,
    ) -> Result<(), Failed> {
        let config = &self.loaded.config;
        let started = Instant::now();
        let stored = self.start.as_ref().map(|from| from.detours().clone());
        let (mut detours, mut done) = (stored.unwrap_or_default(), 0);
        loop {
            let (outcome, mut watch) = self.attempt((signals, traced), &detours)?;
            let interrupted = signals.stop.load(Ordering::Relaxed);
            let allowed = if interrupted { 0 } else { config.train.rollbacks };
            let left = allowed.saturating_sub(done);
            let again = "interrupted while the run is taken back; --resume goes on after its newest checkpoint";
            signals.starting.say(again.to_owned());
            let earlier = rollback::start(self.dir, self.start.as_ref(), (left, &outcome))?;
            let Some(earlier) = earlier else {
                signals.starting.over();
                return self.end(&outcome, &mut watch, started.elapsed().as_secs_f64());
            };
            detours = detours.and(earlier.step());
            done += 1;
            self.start = Some(earlier);
        }
    }

    /// To the end, or as far as it comes.
    fn attempt(
        &self,
        (Signals { stop, starting, .. }, traced): (&Signals, &mut Result<(), Failed>),
        detours: &Detours,
    ) -> Result<(Outcome, Watch), Failed> {
        let config = &self.loaded.config;
        let metrics = MetricsWriter::open(&self.dir.metrics_path(), self.done());
        let metrics = metrics.map_err(|e| Failed::new(code::IO, e))?;
        let events = config.train.tensorboard.then(|| Events::create(self.dir.path(), self.done()));
        let metrics = metrics.and(events.transpose().map_err(|e| Failed::new(code::IO, e))?);
        let trace = self.args.trace.start();
        let starting = starting.clone();
        // From there on every rank hears of a stop.
        let watcher = Watcher::new(move |_, place, _| {
            if place == Place::Loaded {
                starting.over();
            }
        });
        let options = RunOptions {
            trace: trace.clone(),
            bind: true,
            stop: Arc::clone(stop),
            watcher: Some(watcher),
            weights: Some(self.dir.path().join(WEIGHTS)),
            checkpoints: Some(self.dir.path().join(FOLDER)),
            copies_states: Some(self.looked.copies_states),
            held: Some(Arc::clone(self.dir.held())),
            pretrained: self.pretrained.clone(),
            resume: self.start.clone(),
            detours: Some(detours.clone()),
            // Other settings deserve as many steps as any.
            skipped_in_a_row: self.dir.forked_from().map(|_| 0),
            stuck: Some((Duration::from_secs(10), end_without)),
            ..RunOptions::default()
        };
        let progress = Progress::on_stderr(self.args.quiet);
        let own = self.start.as_ref().filter(|_| self.source().is_none());
        let saved = own.map(|from| from.step());
        let mut watch = Watch::new(metrics, progress, Arc::clone(stop), saved);
        let outcome = train(config, self.built, self.data, &options, &mut |message| {
            watch.hear(self, message);
        });
        watch.progress.finish();
        *traced = self.args.trace.write(trace.as_deref());
        Ok((outcome.map_err(|e| self.failed(&e))?, watch))
    }

    pub(super) fn say(&self, text: &str) {
        if !self.args.quiet {
            say(text);
        }
    }

    /// Steps that were done before.
    pub(super) fn done(&self) -> u64 {
        self.start.as_ref().map_or(0, |checkpoint| checkpoint.step())
    }

    /// Whether the weights of its first step were trained elsewhere: an import is a checkpoint of step 0.
    pub(super) fn imported(&self) -> bool {
        self.pretrained.is_some() || self.start.as_ref().is_some_and(|from| from.step() == 0)
    }

    /// The checkpoint that it goes on from, where that is another run's.
    pub(super) fn source(&self) -> Option<&Path> {
        let own = self.dir.path().join(FOLDER);
        self.start.as_ref().map(|from| from.path()).filter(|path| path.parent() != Some(&own))
    }

    fn introduce(&self) {
        let config = &self.loaded.config;
        let (m, p) = (&config.model, &config.parallel);
        self.say(&format!(
            "run     {}\nmodel   {} parameters: {}, hidden {}, {}, {}, vocabulary {}\n\
             layout  TP {} x DP {}{} on {}, {:?}; optimizer on {:?}, update {} by {}\n\
             batch   {} x {} in {} per rank\ndata    {}",
            self.dir.path().display(),
            count(self.built.gpt.shape().parameters() as f64),
            counted(m.layers, "layer"),
            m.hidden,
            counted(m.heads, "head"),
            counted(m.seq_len, "token"),
            m.vocab,
            p.tensor,
            p.data,
            if p.sequence { ", sequence parallel" } else { "" },
            self.gpus(),
            config.precision,
            config.offload.optimizer,
            in_line(&config.offload.update),
            SimdPath::current(),
            config.batch.global,
            counted(m.seq_len, "token"),
            counted(self.built.micro_batches, "micro-batch"),
            self.data.describe() + &epochs::words(config, self.data),
        ));
        if let Some(words) = &self.looked.words {
            self.say(words);
        }
        if !config.train.saves() {
            self.say(
                "this run saves no checkpoints: what ends it before its last step costs all of it (train.checkpoint_overhead=0.01 \
                 saves some)",
            );
        }
    }

    /// `4 virtual GPUs`
    fn gpus(&self) -> String {
        let config = &self.loaded.config;
        let ranks = config.world_size();
        if config.device != DeviceConfig::Cuda {
            return counted(ranks, "virtual GPU");
        }
        let all = &crate::run::gpu::machine().gpus;
        let name = all.first().map_or("GPU", |gpu| gpu.name.as_str());
        match all.len() {
            n if n < ranks => format!("{n} x {name}, shared by {}", counted(ranks, "rank")),
            _ => format!("{ranks} x {name}"),
        }
    }

    fn failed(&self, error: &RunError) -> Failed {
        let unread = error.unread.map(|unread| match unread {
            Unread::System => code::IO,
            Unread::Changed => code::CHECKPOINT,
        });
        let code = match error.error {
            Error::OutOfMemory(_) => code::DEVICE_MEMORY,
            Error::HostMemory { .. } => code::HOST_MEMORY,
            Error::Op { .. }
            | Error::OutOfPlan { .. }
            | Error::Overlap { .. }
            | Error::Hazard(_)
            | Error::ForeignEvent { .. }
            | Error::NoData => code::INTERNAL,
            Error::NoCuda { .. } => code::CONFIG,
            // A file of the data was changed under the run.
            Error::Task { op: FILL, .. } => code::DATA,
            _ => code::RANK,
        };
        let metrics = self.dir.held().place().map_or_else(String::new, |place| {
            format!("\nthe metrics up to there are in {}", place.display())
        });
        Failed::new(unread.unwrap_or(code), format!("{error}{metrics}"))
    }
}

/// Ends the process: a rank's thread does not, and nobody could wait for it.
#[expect(clippy::exit, reason = "threads that are stuck cannot be joined")]
fn end_without(error: &RunError) {
    let ranks = error.all.iter().enumerate().filter(|(_, error)| error.is_some());
    let ranks: Vec<String> = ranks.map(|(rank, _)| rank.to_string()).collect();
    let who = match ranks.len() {
        0 => "the checkpoint that is being written does not move".to_owned(),
        _ => format!("rank {} is stuck and does not end", ranks.join(", ")),
    };
    say(&format!(
        "error: {error}\n{who}, so the process ends; checkpoints that are saved are whole"
    ));
    stderr::leave();
    std::process::exit(i32::from(code::RANK));
}
