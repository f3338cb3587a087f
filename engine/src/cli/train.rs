//! `onebox train`: what happens before, beside and after the steps.

use super::check::count;
use super::exit::{Failed, code};
use super::trace::TraceArgs;
use super::watch::Watch;
use super::{ConfigArgs, SimdArg, data, plan, print, resume, rollback, say};
use crate::build::{Built, build, world_size};
use crate::checkpoint::{Checkpoint, FOLDER};
use crate::config::{DataFormat, DeviceConfig, Loaded, Precision, update_text};
use crate::data::{Dataset, Tokenizer};
use crate::detours::Detours;
use crate::generate::{Sampling, Trained, generate};
use crate::metrics::MetricsWriter;
use crate::plan::memory_report;
use crate::progress::{Progress, clock, si};
use crate::run::{Outcome, RunError, RunOptions, train};
use crate::run_dir::{CONFIG, METRICS, RunDir, RunDirError, RunMode, TOKENIZER, WEIGHTS};
use device::Error;
use device::numerics::SimdPath;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Train a model.
#[derive(Debug, clap::Args)]
pub(super) struct TrainArgs {
    #[command(flatten)]
    config: ConfigArgs,
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
    quiet: bool,
}

pub(super) fn run(args: &TrainArgs) -> Result<(), Failed> {
    args.simd.choose()?;
    let loaded = args.config.load()?;
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
        say(&format!("{}: finished at step {step}; nothing to do", dir.display()));
        return Ok(());
    }
    let built = build(&loaded.config);
    let tokenizer = data::tokenizer(&loaded.config)?;
    let tokenizer = tokenizer.as_ref();
    let data = data::open(&loaded.config, tokenizer, args.dry_run)?;
    let saving = check_memory(&loaded, &built, args.dry_run)?;
    if args.dry_run {
        say(&format!("data: {}", data.describe()));
        say("dry run: everything is in order; nothing was written");
        return Ok(());
    }
    let dir =
        RunDir::create(args.run_dir.as_deref(), &loaded.config.name, mode).map_err(refused)?;
    let start = match mode {
        RunMode::Resume | RunMode::Fork => {
            resume::start(&dir, &loaded, &built, (&data, tokenizer), mode)?
        }
        RunMode::Fresh | RunMode::Overwrite => None,
    };
    if mode == RunMode::Resume {
        // They are another model's than the one that is trained now.
        dir.remove(WEIGHTS).map_err(refused)?;
    }
    let (loaded, built, data, dir) = (&loaded, &built, &data, &dir);
    Session { args, loaded, built, data, tokenizer, dir, saving, start }.train()
}

/// Refuses with numbers before anything is allocated. Only what is shown has its step counted. How checkpoints are
/// written, where there are any.
pub(super) fn check_memory(
    loaded: &Loaded,
    built: &Built,
    show: bool,
) -> Result<Option<String>, Failed> {
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
    if !report.fits {
        let why = "out of host memory before the first step: nothing was written";
        return Err(Failed::new(code::HOST_MEMORY, why));
    }
    Ok(report.saving)
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
    tokenizer: Option<&'a Tokenizer>,
    dir: &'a RunDir,
    /// How checkpoints are written, where there are any.
    saving: Option<String>,
    /// What it goes on from.
    pub(super) start: Option<Arc<Checkpoint>>,
}

impl Session<'_> {
    fn train(&mut self) -> Result<(), Failed> {
        let config = &self.loaded.config;
        let file = |e| Failed::new(code::IO, e);
        self.dir.write_atomically(CONFIG, config.to_ron().as_bytes()).map_err(file)?;
        if let Some(tokenizer) = self.tokenizer {
            self.dir.write_atomically(TOKENIZER, tokenizer.bytes()).map_err(file)?;
        }
        self.introduce();
        let (stop, started) = (stop_at_signal(), Instant::now());
        let stored = self.start.as_ref().map(|from| from.detours().clone());
        let (mut detours, mut done) = (stored.unwrap_or_default(), 0);
        loop {
            let (outcome, mut watch) = self.attempt(&stop, &detours)?;
            let interrupted = stop.load(Ordering::Relaxed);
            let allowed = if interrupted { 0 } else { config.train.rollbacks };
            let left = allowed.saturating_sub(done);
            let earlier = rollback::start(self.dir, self.start.as_ref(), (left, &outcome))?;
            let Some(earlier) = earlier else {
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
        stop: &Arc<AtomicBool>,
        detours: &Detours,
    ) -> Result<(Outcome, Watch), Failed> {
        let config = &self.loaded.config;
        let metrics = MetricsWriter::open(&self.dir.metrics_path(), self.done());
        let metrics = metrics.map_err(|e| Failed::new(code::IO, e))?;
        let trace = self.args.trace.start();
        let options = RunOptions {
            trace: trace.clone(),
            bind: true,
            stop: Arc::clone(stop),
            weights: Some(self.dir.path().join(WEIGHTS)),
            checkpoints: Some(self.dir.path().join(FOLDER)),
            resume: self.start.clone(),
            detours: Some(detours.clone()),
            // Other settings deserve as many steps as any.
            skipped_in_a_row: self.dir.forked_from().map(|_| 0),
            stuck: Some((Duration::from_secs(10), end_without)),
            ..RunOptions::default()
        };
        let progress = Progress::on_stderr(config.train.steps, self.args.quiet);
        let saved = self.start.as_ref().map(|from| from.step());
        let mut watch = Watch::new(metrics, progress, Arc::clone(stop), saved);
        let outcome = train(config, self.built, self.data, &options, &mut |message| {
            watch.hear(self, message);
        });
        watch.progress.finish();
        self.args.trace.write(trace.as_deref())?;
        Ok((outcome.map_err(|e| self.failed(&e))?, watch))
    }

    fn say(&self, text: &str) {
        if !self.args.quiet {
            say(text);
        }
    }

    /// Steps that were done before.
    pub(super) fn done(&self) -> u64 {
        self.start.as_ref().map_or(0, |checkpoint| checkpoint.step())
    }

    fn introduce(&self) {
        let config = &self.loaded.config;
        let (m, p) = (&config.model, &config.parallel);
        self.say(&format!(
            "run     {}\nmodel   {} parameters: {} layers, hidden {}, {} heads, {} tokens, vocabulary {}\n\
             layout  TP {} x DP {}{} on {}, {:?}; optimizer on {:?}, update {} by {}\n\
             batch   {} x {} tokens in {} micro-batch{} per rank\ndata    {}",
            self.dir.path().display(),
            count(self.built.gpt.shape().parameters() as f64),
            m.layers,
            m.hidden,
            m.heads,
            m.seq_len,
            m.vocab,
            p.tensor,
            p.data,
            if p.sequence { ", sequence parallel" } else { "" },
            self.gpus(),
            config.precision,
            config.offload.optimizer,
            update_text(config.offload.update),
            SimdPath::current(),
            config.batch.global,
            m.seq_len,
            self.built.micro_batches,
            if self.built.micro_batches == 1 { "" } else { "es" },
            self.data.describe(),
        ));
        if let Some(words) = &self.saving {
            self.say(words);
        }
    }

    /// `4 virtual GPUs`
    fn gpus(&self) -> String {
        let config = &self.loaded.config;
        let ranks = world_size(config);
        if config.device != DeviceConfig::Cuda {
            return format!("{ranks} virtual GPUs");
        }
        let all = &crate::gpu::machine().gpus;
        let name = all.first().map_or("GPU", |gpu| gpu.name.as_str());
        match all.len() {
            n if n < ranks => format!("{n} x {name}, shared by {ranks} ranks"),
            _ => format!("{ranks} x {name}"),
        }
    }

    fn failed(&self, error: &RunError) -> Failed {
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
            _ => code::RANK,
        };
        let dir = self.dir.path().display();
        Failed::new(code, format!("{error}\nthe metrics up to there are in {dir}"))
    }

    /// After the last step: the closing line, the summary, a sample. The weights are in place.
    fn end(&self, outcome: &Outcome, watch: &mut Watch, seconds: f64) -> Result<(), Failed> {
        let weights = self.dir.path().join(WEIGHTS);
        if let Some(problem) = &outcome.weights_problem {
            let why = format!("the weights are not written to {}: {problem}", weights.display());
            return Err(Failed::new(code::IO, why));
        }
        let skipped = watch.last.map_or(0, |last| last.skipped_total);
        let hopeless = (skipped == outcome.step).then_some((1, outcome.step));
        if let Some(steps) = outcome.diverged.or(hopeless) {
            return Err(Failed::new(code::NUMERIC, self.diverged(outcome, watch, steps)));
        }
        // Only now: a run that has its end line is finished for good.
        if outcome.complete {
            watch.metrics.end(outcome.step, &outcome.state_hash);
        }
        if watch.metrics.dropped() > 0 {
            let (lines, path) = (watch.metrics.dropped(), self.dir.metrics_path());
            let why = format!("{lines} lines are missing in {}", path.display());
            return Err(Failed::new(code::IO, why));
        }
        self.summary(outcome, watch, seconds);
        if outcome.complete {
            self.sample(&weights, &watch.stop);
            self.next_commands();
            return Ok(());
        }
        say(&format!(
            "interrupted after step {}; its weights are in {}, {}",
            outcome.step,
            weights.display(),
            match watch.saved {
                Some(step) => format!("and --resume goes on after step {step}"),
                None => "and there is no checkpoint of it to go on from".into(),
            }
        ));
        Err(Failed::silent(code::INTERRUPTED))
    }

    fn diverged(&self, outcome: &Outcome, watch: &Watch, (from, to): (u64, u64)) -> String {
        let config = &self.loaded.config;
        let (advice, scale) = match config.precision {
            Precision::Fp16 => {
                let scale = watch.last.map_or(f64::NAN, |last| last.loss_scale);
                let floor = config.loss_scale.floor;
                let scale =
                    format!(", with a loss scale that came down to {scale} (its floor is {floor})");
                ("lower optimizer.lr, or train in Bf16", scale)
            }
            Precision::Bf16 | Precision::Fp32 => {
                ("lower optimizer.lr, or set optimizer.clip", String::new())
            }
        };
        let first = outcome.not_finite.as_ref().map_or_else(String::new, |name| {
            format!("; the backward pass came to such a gradient first in `{name}`")
        });
        let back = match watch.saved {
            Some(step) => format!(
                "; --fork starts from the checkpoint of step {step} with other settings, and the states are those of the \
                 last step that was not skipped"
            ),
            None => String::new(),
        };
        format!(
            "the gradients of steps {from} to {to} were not finite{scale}{first}, and nothing was updated: training \
             has diverged. Remedy: {advice} (optimizer.lr is {}, clip {:?}){back}",
            config.optimizer.lr, config.optimizer.clip
        )
    }

    fn summary(&self, outcome: &Outcome, watch: &Watch, seconds: f64) {
        let config = &self.loaded.config;
        let trained = outcome.step - self.done();
        let tokens = trained as f64 * (config.batch.global * config.model.seq_len) as f64;
        let unit = self.unit();
        let loss = watch.last.map_or(f64::NAN, |last| last.loss);
        let held_out = watch
            .held_out
            .map_or(String::new(), |loss| format!(", {loss:.4} over the whole held-out part"));
        let skipped = watch.last.map_or(0, |last| last.skipped_total);
        self.say(&format!(
            "\ndone    {} steps in {} ({} in training, {}tok/s), {skipped} skipped\n\
             loss    {loss:.4} {unit} in the last step{held_out}\n\
             state   {}\nfiles   {}: {METRICS}, {CONFIG}, {WEIGHTS}",
            outcome.step,
            clock(seconds),
            clock(watch.train_seconds),
            si(tokens / watch.train_seconds.max(1e-9)),
            outcome.state_hash,
            self.dir.path().display(),
        ));
    }

    const fn unit(&self) -> &'static str {
        match self.loaded.config.data.format {
            DataFormat::Bytes if self.tokenizer.is_none() => "nats per byte",
            _ => "nats per token",
        }
    }

    /// A text from the new model. The run is a good one even if there is none.
    fn sample(&self, weights: &Path, stop: &AtomicBool) {
        let config = &self.loaded.config;
        if self.args.quiet || config.sample.tokens == 0 {
            return;
        }
        let sampling = Sampling {
            prompt: crate::generate::default_prompt(config, &config.sample.prompt),
            tokens: config.sample.tokens,
            temperature: f64::from(config.sample.temperature),
            seed: config.train.seed,
        };
        let mut text = Vec::new();
        let drawn = generate(
            config,
            (Trained::Weights(weights), self.tokenizer),
            &sampling,
            &mut |piece| {
                text.extend_from_slice(piece);
                !stop.load(Ordering::Relaxed)
            },
        );
        if let Err(why) = drawn {
            say(&format!("\nno sample: {why} (see `sample` in the config)"));
            return;
        }
        let text = String::from_utf8_lossy(&text);
        say(&format!("\nit writes:\n  {}", text.replace('\n', "\n  ")));
    }

    /// Three commands that work as they stand.
    fn next_commands(&self) {
        let program = quoted(&std::env::args().next().unwrap_or_else(|| "onebox".into()));
        let dir = quoted(&self.dir.path().display().to_string());
        let sample = &self.loaded.config.sample.prompt;
        let prompt = match sample.trim() {
            "" => String::new(),
            _ => format!(" --prompt {}", quoted(sample)),
        };
        let mut lines = vec![format!("{program} generate {dir}{prompt} --temperature 0.5")];
        let given = self.args.config.sets.iter().map(|set| format!(" --set {}", quoted(set)));
        let config =
            quoted(&self.args.config.config.display().to_string()) + &given.collect::<String>();
        lines.extend(self.other_layout().map(|sets| format!("{program} train {config}{sets}")));
        lines.push(format!("{program} plan {config}"));
        self.say(&format!("\nnext, try:\n  {}", lines.join("\n  ")));
    }

    /// `--set` arguments for another grid of ranks that this config allows.
    fn other_layout(&self) -> Option<String> {
        let parallel = &self.loaded.config.parallel;
        let world = world_size(&self.loaded.config);
        let grids = [(1, world), (world, 1), (2, 2), (2, 1), (1, 2)];
        let other = grids.into_iter().filter(|grid| *grid != (parallel.tensor, parallel.data));
        other.into_iter().find_map(|(tensor, data)| {
            let mut more =
                vec![format!("parallel.tensor={tensor}"), format!("parallel.data={data}")];
            if matches!(self.loaded.config.device, DeviceConfig::Cpu { .. }) {
                more.push(format!("device.count={}", tensor * data));
            }
            let sets = [&self.args.config.sets[..], &more[..]].concat();
            crate::config::load(&self.args.config.config, &sets).ok()?;
            Some(more.iter().map(|set| format!(" --set {set}")).collect())
        })
    }
}

/// Ends the process: a rank's thread does not, and nobody could wait for it.
#[expect(clippy::exit, reason = "threads that are stuck cannot be joined")]
fn end_without(error: &RunError) {
    let ranks = error.all.iter().enumerate().filter(|(_, error)| error.is_some());
    let ranks: Vec<String> = ranks.map(|(rank, _)| rank.to_string()).collect();
    say(&format!(
        "error: {error}\nrank {} is stuck and does not end, so the process ends; checkpoints that are saved are whole",
        ranks.join(", ")
    ));
    std::process::exit(i32::from(code::RANK));
}

/// For a POSIX shell.
pub(super) fn quoted(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-./=:,+@%".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// Set by the first Ctrl-C, SIGTERM or SIGHUP (the terminal has gone): the run ends after the step. The second ends the process.
fn stop_at_signal() -> Arc<AtomicBool> {
    let stop = Arc::new(AtomicBool::new(false));
    // Caught, so that a write over the limit of a file's size is an error, not the end.
    let _ = signal_hook::flag::register(SIGXFSZ, Arc::default());
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        let aborted = i32::from(code::ABORTED);
        let registered =
            signal_hook::flag::register_conditional_shutdown(signal, aborted, Arc::clone(&stop))
                .and_then(|_| signal_hook::flag::register(signal, Arc::clone(&stop)));
        if let Err(error) = registered {
            tracing::warn!("Ctrl-C will end the run at once: {error}");
        }
    }
    stop
}
