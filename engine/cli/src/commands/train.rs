//! `onebox train`: the work before, during and after the steps.

mod diverged;
mod ending;
mod epochs;
mod first_loss;
mod follower;
mod guess;
mod prepared;
mod proof;
mod rollback;
mod watch;

use self::follower::{Follower, RollbackTarget, Start};
use self::guess::GuessWatch;
pub(super) use self::prepared::check_memory;
use self::prepared::{PreparedRun, StartWeights, prepare};
use self::watch::Watch;
use super::check::{count, model_words};
use super::processes::{SILENCE, Team};
use super::signals::{self, Signals, StartupNotice};
use super::trace::{self, TraceArgs};
use super::{CommandError, ConfigArgs, Failable, SimdArg, code, say};
use crate::report::progress::Progress;
use crate::report::stage::Stage;
use crate::report::stderr;
use checkpoint::Checkpoint;
use checkpoint::rollback::RollbackHistory;
use config::{Adapter, DeviceConfig, in_line};
use device::ErrorKind;
use device::numerics::SimdPath;
use engine::metrics::{LONGEST_METRICS, MetricsWriter, losses};
use engine::run::ReadFailure;
use engine::run::states::LOAD;
use engine::run::{FaultPoint, Outcome, RunError, RunOptions, StuckHandler, Watcher, train};
use engine::run_dir::{RunDir, RunDirError};
use engine::tensorboard::Events;
use engine::train::batch::FILL;
use files::input;
use files::names::{CONFIG, METRICS, TOKENIZER};
use files::path_text::ShownPath;
use layout::build::update_mode;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use topology::counted;

/// Train a model.
#[derive(Debug, clap::Args)]
pub(super) struct TrainArgs {
    #[command(flatten)]
    pub(super) config: ConfigArgs,
    /// Directory for metrics, config and weights [default: runs/NAME-TIME]
    #[arg(long)]
    run_dir: Option<PathBuf>,
    /// Continue the run in --run-dir
    #[arg(long, group = "mode")]
    resume: bool,
    /// Start from the run in --run-dir, in a new directory next to it
    #[arg(long, group = "mode")]
    fork: bool,
    /// Remove the run in --run-dir first
    #[arg(long, group = "mode")]
    overwrite: bool,
    /// Check everything, also the checkpoint to continue from; show the plan; write and train nothing
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    simd: SimdArg,
    #[command(flatten)]
    trace: TraceArgs,
    /// Under mpirun or srun: end the run if a process gives no sign of life for this many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = SILENCE, value_parser = clap::value_parser!(u64).range(2..))]
    silence: u64,
    /// Show no progress and no summary
    #[arg(short, long)]
    pub(super) quiet: bool,
    /// Observer of the ranks, for tests.
    #[arg(skip)]
    pub(super) watcher: Option<Watcher>,
}

impl TrainArgs {
    /// Observer of the ranks. When a rank has loaded its states, the startup is over: from then on
    /// the ranks react to a request to stop.
    fn watcher(&self, starting: &StartupNotice) -> Watcher {
        let (starting, other) = (starting.clone(), self.watcher.clone());
        Watcher::new(move |rank, place, step| {
            if place == FaultPoint::Loaded {
                starting.over();
            }
            if let Some(other) = &other {
                other.reach(rank, place, step);
            }
        })
    }
}

pub(super) fn run(args: &TrainArgs) -> Result<(), CommandError> {
    args.simd.choose()?;
    // A dry run writes nothing: any signal may end it.
    let signals = (!args.dry_run).then(signals::hear);
    let team = Team::join(args.silence)?;
    let ended = team.all("config", prepare(args, &team), |prepared| {
        let known = prepared.iter().flat_map(|prepared| {
            let all = checkpoint::identity(&prepared.loaded.config, &prepared.data);
            all.map(|(name, is)| (name.to_owned(), is))
        });
        let config = prepared.as_ref().map(|prepared| &prepared.loaded.config);
        team.facts(config).into_iter().chain(known).collect()
    });
    let ended = ended.and_then(|prepared| match (prepared, signals) {
        (None, _) => Ok(()),
        (Some(prepared), None) => {
            let looked = if team.is_first() { prepared.look(args) } else { Ok(()) };
            team.all("directory", looked, |()| Vec::new())?;
            say(&format!("data: {}", prepared.data.describe()));
            say("dry run: everything is in order; nothing was written");
            Ok(())
        }
        (Some(prepared), Some(signals)) => prepared.run(args, &team, &signals),
    });
    team.end(ended)
}

impl From<RunDirError> for CommandError {
    fn from(error: RunDirError) -> Self {
        let code = match error {
            RunDirError::Io { .. } => code::IO,
            _ => code::NO_RUN_DIR,
        };
        Self::new(code, error)
    }
}

impl PreparedRun {
    /// Compares the GPUs with the CPU, creates the run directory, and trains.
    pub(super) fn run(
        &self,
        args: &TrainArgs,
        team: &Team,
        signals: &Signals,
    ) -> Result<(), CommandError> {
        team.all("proof", self.prove(args, team), |()| Vec::new())?;
        let own = if team.is_first() { self.open(args).map(Some) } else { Ok(None) };
        let own = team.all("directory", own, |_| Vec::new())?;
        let Some((dir, start, weights)) = own else {
            return Follower { args, run: self, team }.follow(signals);
        };
        team.first("start", Some(Start::of(&dir, start.as_ref())))?;
        team.all("ready", Ok(()), |()| Vec::new())?;
        Session { args, run: self, dir: &dir, weights, start, team }.train(signals)
    }

    /// Options of the engine that are equal in every process.
    fn options(&self, args: &TrainArgs, team: &Team, signals: &Signals) -> RunOptions {
        RunOptions {
            trace: args.trace.start(),
            bind: true,
            stop: Arc::clone(&signals.stop),
            watcher: Some(args.watcher(&signals.starting)),
            copies_states: Some(self.looked.copies_states),
            processes: team.processes.clone(),
            stuck: Some(StuckHandler { after: Duration::from_secs(10), call: end_without }),
            ..RunOptions::default()
        }
    }
}

/// Everything that a run needs before its first step.
pub(super) struct Session<'a> {
    pub(super) args: &'a TrainArgs,
    run: &'a PreparedRun,
    pub(super) dir: &'a RunDir,
    /// Weights of a folder, if a new run starts from them.
    weights: StartWeights,
    /// Checkpoint that the run starts from.
    pub(super) start: Option<Arc<Checkpoint>>,
    team: &'a Team,
}

impl Session<'_> {
    fn train(&mut self, signals: &Signals) -> Result<(), CommandError> {
        let config = &self.run.loaded.config;
        self.dir.write_atomically(CONFIG, config.to_ron().as_bytes()).fail_with(code::IO)?;
        if let Some(tokenizer) = &self.run.tokenizer {
            self.dir.write_atomically(TOKENIZER, tokenizer.bytes()).fail_with(code::IO)?;
        }
        if config.train.saves() {
            self.dir.make_folder().fail_with(code::IO)?;
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

    /// Trains, and rolls back as often as the config allows. `traced`: result of writing the trace.
    fn run_to_end(
        &mut self,
        signals: &Signals,
        traced: &mut Result<(), CommandError>,
    ) -> Result<(), CommandError> {
        let config = &self.run.loaded.config;
        let started = Instant::now();
        let stored = self.start.as_ref().map(|from| from.manifest().rollback_history.clone());
        let (mut rollback_history, mut done) = (stored.unwrap_or_default(), 0);
        loop {
            let (outcome, mut watch) = self.attempt(signals, traced, &rollback_history)?;
            let interrupted = signals.stop.load(Ordering::Relaxed);
            let allowed = if interrupted { 0 } else { config.train.rollbacks };
            let left = allowed.saturating_sub(done);
            let again = "interrupted while the run is taken back; --resume goes on after its newest checkpoint";
            signals.starting.say(again.to_owned());
            let earlier = self.earlier(left, &outcome)?;
            let next = earlier.as_ref().map(|from| RollbackTarget::of(self.dir, from));
            self.team.first("next", Some(next))?;
            let Some(earlier) = earlier else {
                signals.starting.over();
                return self.end(&outcome, &mut watch, started.elapsed().as_secs_f64());
            };
            rollback_history = rollback_history.with_rollback(earlier.step());
            done += 1;
            self.start = Some(earlier);
        }
    }

    /// Trains once, to the last step, a stop or a divergence.
    fn attempt(
        &self,
        signals: &Signals,
        traced: &mut Result<(), CommandError>,
        rollback_history: &RollbackHistory,
    ) -> Result<(Outcome, Watch), CommandError> {
        let config = &self.run.loaded.config;
        let held = self.dir.held();
        held.check().map_err(|e| self.moved(&e))?;
        let metrics = MetricsWriter::open(held, self.done()).fail_with(code::IO)?;
        let events = config.train.tensorboard.then(|| Events::create(held, self.done()));
        let events = events.transpose().fail_with(code::IO)?;
        let epochs_per_step = epochs::per_step(config, &self.run.data);
        let mut metrics = metrics.and(events).with_epochs(epochs_per_step);
        metrics.config(self.done(), config);
        let options = RunOptions {
            weights: Some(Arc::clone(self.dir.held())),
            checkpoints: Some(self.dir.folder().clone()),
            pretrained: self.weights.pretrained.clone(),
            initial: match self.start {
                None => self.weights.adapters.clone(),
                Some(_) => None,
            },
            resume: self.start.clone(),
            rollback_history: Some(rollback_history.clone()),
            // A fork has other settings, so its count of skipped steps starts at 0.
            skipped_in_a_row: self.dir.forked_from().map(|_| 0),
            ..self.run.options(self.args, self.team, signals)
        };
        let own = self.start.as_ref().filter(|_| self.source().is_none());
        let mut watch = Watch {
            metrics,
            progress: Progress::on_stderr(self.args.quiet),
            stop: Arc::clone(&signals.stop),
            last: None,
            saved: own.map(|from| from.step()),
            not_saved: None,
            validation: None,
            guess: self.guess_watch(),
            train_seconds: 0.0,
            speculation: [0; 3],
            verified: [0; 2],
        };
        // Until the first step, which has a line of its own.
        let what = "starting: memory, weights, first step";
        let mut starting = (!self.args.quiet).then(|| Stage::begin(what, 0));
        let outcome = train(config, &self.run.built, &self.run.data, &options, &mut |message| {
            starting = None;
            watch.hear(self, message);
        });
        drop(starting);
        watch.progress.finish();
        *traced = self.args.trace.write(options.trace.as_deref());
        Ok((outcome.map_err(|e| self.failed(&e))?, watch))
    }

    /// The losses of the steps before this start, as far as the metrics have them.
    fn guess_watch(&self) -> GuessWatch {
        let mut guess = GuessWatch::new(self.run.loaded.config.model.vocab);
        let read = || input::rest(&self.dir.held().check()?.read(METRICS)?, LONGEST_METRICS);
        // What cannot be read was reported when the metrics were opened.
        let text = if self.done() > 0 { read().unwrap_or_default() } else { Vec::new() };
        for (step, loss) in losses(&text) {
            guess.step(step, loss);
        }
        guess
    }

    pub(super) fn say(&self, text: &str) {
        if !self.args.quiet {
            say(text);
        }
    }

    /// Number of steps before this start.
    pub(super) fn done(&self) -> u64 {
        self.start.as_ref().map_or(0, |checkpoint| checkpoint.step())
    }

    /// Whether the initial weights were trained elsewhere; an import is a checkpoint of step 0.
    pub(super) fn imported(&self) -> bool {
        self.weights.pretrained.is_some()
            || self.start.as_ref().is_some_and(|from| from.step() == 0)
    }

    /// Path of the checkpoint that the run starts from, if it belongs to another run.
    pub(super) fn source(&self) -> Option<&Path> {
        let others = self.start.as_ref().filter(|from| !self.dir.folder().has(from));
        others.map(|from| from.path())
    }

    /// The model in words, and its adapters.
    fn model_words(&self) -> String {
        let (config, shape) = (&self.run.loaded.config, self.run.built.decoder.shape());
        let model = model_words(&config.model, shape.parameters() as f64);
        let trained = count(shape.trained_parameters() as f64);
        match &config.adapter {
            Adapter::None if shape.has_frozen_params() => {
                format!("{model}\n{trained} parameters are trained, the others are frozen")
            }
            Adapter::None => model,
            Adapter::Lora { rank, alpha, dropout, targets, .. } => {
                let drops = match *dropout {
                    0.0 => String::new(),
                    share => format!(", dropout {share}"),
                };
                let linears = targets.names(&config.model).join(", ");
                format!(
                    "{model}\nadapter {trained} parameters are trained, the model is frozen: rank {rank}, alpha {alpha}{drops}, on {linears}"
                )
            }
        }
    }

    fn introduce(&self) {
        let config = &self.run.loaded.config;
        let (m, p) = (&config.model, &config.parallel);
        self.say(&format!(
            "run     {}\nmodel   {}\n\
             layout  TP {} x DP {}{} on {}, {:?}; optimizer on {:?}, update {} by {}\n\
             batch   {} x {} in {} per rank\ndata    {}",
            self.dir.shown(),
            self.model_words(),
            p.tensor,
            p.data,
            if p.sequence { ", sequence parallel" } else { "" },
            self.gpus(),
            config.precision,
            config.offload.optimizer,
            in_line(&update_mode(config)),
            SimdPath::current(),
            config.batch.global,
            counted(m.seq_len, "token"),
            counted(self.run.built.micro_batches, "micro-batch"),
            self.run.data.describe() + &epochs::words(config, &self.run.data),
        ));
        for words in self.team.words(config).iter().chain(&self.run.looked.words) {
            self.say(words);
        }
        if !config.train.saves() {
            self.say(
                "this run saves no checkpoints: what ends it before its last step costs all of it (train.checkpoint_overhead=0.01 \
                 saves some)",
            );
        }
    }

    /// Text about the GPUs: `4 virtual GPUs`.
    fn gpus(&self) -> String {
        let config = &self.run.loaded.config;
        let ranks = config.world_size();
        if config.device != DeviceConfig::Cuda {
            return counted(ranks, "virtual GPU");
        }
        let machine = &self.run.built.machine;
        let all = &machine.cuda().gpus;
        let name = all.first().map_or("GPU", |gpu| gpu.name.as_str());
        match machine.ranks(config) > all.len() {
            true => format!("{} x {name}, shared by {}", all.len(), counted(ranks, "rank")),
            false => format!("{ranks} x {name}"),
        }
    }

    fn failed(&self, error: &RunError) -> CommandError {
        let code = code_of(error);
        let metrics = self.dir.held().place().map_or_else(String::new, |place| {
            format!("\nthe metrics up to there are in {}", place.shown())
        });
        CommandError::new(code, format!("{error}{metrics}"))
    }
}

/// The exit code of a run that has failed.
fn code_of(error: &RunError) -> u8 {
    let code = match error.error.kind() {
        ErrorKind::DeviceMemory => code::DEVICE_MEMORY,
        ErrorKind::HostMemory => code::HOST_MEMORY,
        ErrorKind::Bug => code::INTERNAL,
        ErrorKind::NoCuda => code::CONFIG,
        // A file of the data, or of the initial weights, was changed during the run.
        ErrorKind::Task(FILL | LOAD) => code::DATA,
        ErrorKind::Task(_) | ErrorKind::Rank => code::RANK,
    };
    match error.read_failure {
        Some(ReadFailure::System) => code::IO,
        Some(ReadFailure::Changed) => code::CHECKPOINT,
        None => code,
    }
}

/// Ends the process if a rank's thread is stuck, since such a thread cannot be joined.
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
