//! The rank threads of a run: one per GPU, each with its device and its part of the model, all walking the same
//! program. What they have to say goes to the calling thread as plain messages.

use crate::build::{Built, attention_scratch};
use crate::checkpoint::Saver;
use crate::config::{Config, Precision};
use crate::data::Dataset;
use crate::detours::Detours;
use crate::export::{Finished, Gathering};
use crate::init::Initial;
pub use crate::init::Weights;
use crate::messages::{Listener, Post};
pub use crate::messages::{Message, StepReport};
pub use crate::options::{RunOptions, Stuck};
pub use crate::place::{Place, Watcher};
use crate::places::{Places, places};
use crate::step::Trainer;
use crate::trainer::trainer;
use crossbeam_channel::RecvTimeoutError;
use device::cpu::World;
use device::numerics::control;
use device::{Device, Error, Group, Lane, Op, Rank, Reduce};
use offload::Optimizer;
use std::cmp::Reverse;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// What a run ended with.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// The last step that was done.
    pub step: u64,
    /// It was the last of the config, and the held-out part was evaluated.
    pub complete: bool,
    /// xxh3 over fp32 parameters, first and second moments, in global tensor order.
    pub state_hash: String,
    /// Why the weights are not written, where they should have been.
    pub weights_problem: Option<String>,
    /// A tensor whose gradient was not finite in the last step, if this run did that and it was skipped: of the blocks with
    /// such ones it is in the last, which the backward pass came to first.
    pub not_finite: Option<String>,
    /// The first and the last of so many skipped steps in a row that the run ended.
    pub diverged: Option<(u64, u64)>,
}

/// A failed run: which rank's own fault it was, and in which step.
#[derive(Clone, Debug, thiserror::Error)]
#[error("rank {rank}, step {step}: {error}")]
pub struct RunError {
    /// Whose.
    pub rank: usize,
    /// 0: before the first.
    pub step: u64,
    /// What.
    pub error: Error,
    /// Every rank's own view, by rank.
    pub all: Vec<Option<Error>>,
}

/// Where the gradients of a skipped step are not finite.
#[derive(Default)]
struct NotFinite {
    step: u64,
    /// Segment, index in it, and the tensor's name: the first of all ranks' in the order of the backward pass.
    first: Option<(Reverse<usize>, usize, String)>,
}

/// What all rank threads share.
pub(crate) struct Ranks<'a> {
    pub(crate) config: &'a Config,
    pub(crate) built: &'a Built,
    data: &'a Arc<Dataset>,
    pub(crate) options: &'a RunOptions,
    pub(crate) world: Arc<World>,
    pub(crate) places: Places,
    /// The step after which all ranks end; set by rank 0 before it starts that step.
    last_step: AtomicU64,
    /// The batch after which all ranks end an evaluation; likewise.
    last_batch: AtomicU64,
    /// The last evaluation is done.
    evaluated: AtomicBool,
    not_finite: Mutex<NotFinite>,
    /// The first of the steps that were skipped until the run ended; 0: none.
    diverged_from: AtomicU64,
    gathering: Gathering,
    saver: Option<Arc<Saver>>,
    /// Bytes of a real GPU that one op may need besides its operands.
    pub(crate) scratch: u64,
    detours: Arc<Detours>,
}

/// Trains on the GPUs of the config. `tell` gets rank 0's messages, on the calling thread, while the ranks work.
///
/// # Errors
/// The first failure, with the rank and step where it happened.
pub fn train(
    config: &Config,
    built: &Built,
    data: &Arc<Dataset>,
    options: &RunOptions,
    tell: &mut dyn FnMut(Message),
) -> Result<Outcome, RunError> {
    let (tp, dp) = (config.parallel.tensor, config.parallel.data);
    let detours = Arc::new(options.detours());
    let ranks = Ranks {
        config,
        built,
        data,
        options,
        world: World::new(tp, dp, options.timeout),
        places: places(config, options.bind),
        last_step: AtomicU64::new(config.train.steps),
        last_batch: AtomicU64::new(u64::MAX),
        evaluated: AtomicBool::new(false),
        not_finite: Mutex::default(),
        diverged_from: AtomicU64::new(0),
        gathering: Gathering::new(&built.gpt, options.weights.as_deref()),
        saver: options
            .checkpoints
            .as_deref()
            .and_then(|folder| Saver::new((config, data), built, folder, options)),
        detours,
        scratch: attention_scratch(config),
    };
    // Bounded: a full channel holds rank 0 up, a bounded one allocates nothing when it is sent to.
    let (sender, receiver) = crossbeam_channel::bounded(256);
    let results = std::thread::scope(|scope| {
        let spawn = |rank: Rank| {
            let (ranks, sender) = (&ranks, (rank.index() == 0).then(|| sender.clone()));
            let builder = std::thread::Builder::new().name(format!("rank {}", rank.index()));
            let started = builder.spawn_scoped(scope, move || ranks.run(rank, sender.as_ref()));
            started.inspect_err(|error| ranks.world.not_started(rank, error.to_string()))
        };
        let threads: Vec<_> = Rank::all(tp, dp).map(spawn).collect();
        drop(sender);
        // By value: should `tell` panic, rank 0 must not wait for who no longer listens.
        let _stop = StopOnPanic(&options.stop);
        let mut overdue = Overdue { ranks: &ranks, since: None };
        loop {
            match receiver.recv_timeout(LOOK_UP) {
                Ok(Post::Tell(message)) => tell(message),
                Ok(Post::Flush(answer)) => drop(answer),
                Err(RecvTimeoutError::Timeout) => overdue.look(&threads),
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        while threads.iter().flatten().any(|thread| !thread.is_finished()) {
            overdue.look(&threads);
            std::thread::sleep(Duration::from_millis(1));
        }
        let joined =
            |(i, thread): (usize, std::io::Result<std::thread::ScopedJoinHandle<'_, _>>)| {
                let died = |why: String| Err(Error::RankDied { rank: i, step: 0, why });
                match thread {
                    Ok(thread) => {
                        thread.join().unwrap_or_else(|_| died("its thread panicked".into()))
                    }
                    Err(error) => died(format!("no thread for it: {error}")),
                }
            };
        threads.into_iter().enumerate().map(joined).collect::<Vec<Result<u64, Error>>>()
    });
    outcome(results, ranks, config.train.steps)
}

/// The calling thread looks up so often when nothing is told.
const LOOK_UP: Duration = Duration::from_millis(200);

/// Whether a failed run does not end.
struct Overdue<'a> {
    ranks: &'a Ranks<'a>,
    /// When the failure was first seen.
    since: Option<Instant>,
}

impl Overdue<'_> {
    fn look<T>(&mut self, threads: &[std::io::Result<std::thread::ScopedJoinHandle<'_, T>>]) {
        let Some((grace, tell)) = self.ranks.options.stuck else { return };
        let Some((rank, step, error)) = self.ranks.world.failure() else { return };
        if self.since.get_or_insert_with(Instant::now).elapsed() < grace {
            return;
        }
        let stuck = |t: &std::io::Result<std::thread::ScopedJoinHandle<'_, T>>| {
            t.as_ref().is_ok_and(|t| !t.is_finished())
        };
        let all = threads.iter().enumerate().map(|(rank, t)| {
            let why = "it is stuck: it does not end".to_owned();
            stuck(t).then_some(Error::RankDied { rank, step, why })
        });
        tell(&RunError { rank, step, error, all: all.collect() });
    }
}

/// Ends the run when the listener panics.
struct StopOnPanic<'a>(&'a AtomicBool);

impl Drop for StopOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}

fn outcome(
    results: Vec<Result<u64, Error>>,
    ranks: Ranks<'_>,
    steps: u64,
) -> Result<Outcome, RunError> {
    let mut all: Vec<Option<Error>> = results.iter().map(|r| r.as_ref().err().cloned()).collect();
    if let Some((rank, step, error)) = ranks.world.failure() {
        // That a rank returned early is known to the others; why, it knows itself.
        let own = all[rank].get_or_insert_with(|| error.clone()).clone();
        let died = |error: &Error| matches!(error, Error::RankDied { .. });
        let error = if died(&error) && !died(&own) { own } else { error };
        return Err(RunError { rank, step, error, all });
    }
    if let Some((rank, error)) = all.iter().enumerate().find_map(|(i, e)| Some((i, e.clone()?))) {
        return Err(RunError { rank, step: 0, error, all });
    }
    let step = results.into_iter().flatten().max().unwrap_or(0);
    let complete = step == steps && ranks.evaluated.load(Ordering::SeqCst);
    let noted = ranks.not_finite.into_inner().unwrap_or_else(|e| e.into_inner());
    let not_finite = noted.first.filter(|_| noted.step == step).map(|(_, _, name)| name);
    let Finished { state_hash, problem } = ranks.gathering.finish();
    let weights_problem = problem.map(|problem| problem.to_string());
    let from = ranks.diverged_from.into_inner();
    let diverged = (from > 0).then_some((from, step));
    Ok(Outcome { step, complete, state_hash, weights_problem, not_finite, diverged })
}

impl Ranks<'_> {
    /// One rank from start to end; returns its last step.
    fn run(
        &self,
        rank: Rank,
        sender: Option<&crossbeam_channel::Sender<Post>>,
    ) -> Result<u64, Error> {
        device::panics::watch_this_thread();
        let place = self.places.ranks.get(rank.index());
        if let Some(place) = place
            && let Err(error) = topology::bind_current_thread(&place.cpus)
        {
            tracing::warn!("rank {} is not bound: {error}", rank.index());
        }
        let dev = self.open(rank, place)?;
        let mut trainer = trainer(self.config, self.built, (self.data, &self.detours), rank);
        self.passes(rank, Place::Opened, 0);
        if let Some(saver) = &self.saver {
            saver.open(&dev, (&trainer.optimizer, &self.built.gpt))?;
        }
        let done = self.start(&dev, &mut trainer)?;
        self.passes(rank, Place::Loaded, done);
        dev.write(self.built.meeting, &|_| 0.0)?;
        trainer.loader.prefetch(&dev);
        let listener = Listener { sender, world: &self.world };
        let steps = self.config.train.steps;
        let mut last = done;
        // An evaluation that is cut short ends the run: it is done again by whoever goes on from here.
        let mut goes_on =
            !self.is_eval_due(done) || self.evaluate(&dev, &mut trainer, done, false, listener)?;
        let mut ended = Instant::now();
        let mut last_good = done.saturating_sub(self.options.skipped_in_a_row());
        for step in done + 1..=steps {
            if !goes_on {
                break;
            }
            dev.begin_step(step);
            if rank.index() == 0 {
                self.decide_for_all(step);
            }
            if self.options.leave_at == Some((rank.index(), step)) {
                return Ok(last);
            }
            self.passes(rank, Place::Step, step);
            let decided = trainer.train_step(&dev, step);
            dev.sync(decided)?;
            self.passes(rank, Place::Decided, step);
            last = step;
            let mut report = self.report(&dev, &trainer)?;
            report.seconds = ended.elapsed().as_secs_f64();
            if report.skipped {
                self.locate(&dev, &trainer.optimizer, step)?;
            } else {
                last_good = step;
            }
            listener.tell(Message::Step(report));
            // All ranks know the same of it.
            let diverged = step - last_good >= self.config.train.stop_after_skipped;
            if diverged {
                self.diverged_from.store(last_good + 1, Ordering::SeqCst);
            }
            // Rank 0 wrote it before it submitted this step, whose norm all ranks have waited for.
            goes_on = !diverged && self.last_step.load(Ordering::SeqCst) > step;
            // First the states: an evaluation changes nothing.
            let due = self.saver.as_ref().is_some_and(|saver| saver.is_due(step));
            if due || !goes_on {
                self.save(&dev, &trainer, (step, step - last_good), listener)?;
            }
            if goes_on && self.is_eval_due(step) {
                goes_on = self.evaluate(&dev, &mut trainer, step, false, listener)?;
                if !goes_on && !due {
                    self.save(&dev, &trainer, (step, step - last_good), listener)?;
                }
            }
            ended = Instant::now();
        }
        trainer.finish_update(&dev);
        dev.sync_all()?;
        self.passes(rank, Place::Ending, last);
        self.gathering.run(&dev, &trainer.optimizer, self.built.meeting)?;
        if last == self.config.train.steps {
            self.evaluate(&dev, &mut trainer, last, true, listener)?;
        }
        if let Some(saver) = self.saver.as_ref().filter(|_| rank.index() == 0) {
            saver.finish(listener);
        }
        dev.finish()?;
        Ok(last)
    }

    fn passes(&self, rank: Rank, place: Place, step: u64) {
        if let Some(watcher) = &self.options.watcher {
            watcher.passes(rank.index(), place, step);
        }
    }

    /// Notes which tensor made `step` be skipped: the first on any rank.
    fn locate(&self, dev: &Device, optimizer: &Optimizer, step: u64) -> Result<(), Error> {
        let Some((segment, at)) = optimizer.first_not_finite(dev)? else { return Ok(()) };
        let params = &self.built.gpt.segments()[segment].params;
        let name = params.iter().find(|param| param.range.contains(&at)).map(|p| p.name.clone());
        let found = (Reverse(segment), at, name.unwrap_or_else(|| "padding".into()));
        let noted = &mut *self.not_finite.lock().unwrap_or_else(|e| e.into_inner());
        if noted.step != step {
            *noted = NotFinite { step, first: None };
        }
        if noted.first.as_ref().is_none_or(|known| found < *known) {
            noted.first = Some(found);
        }
        Ok(())
    }

    /// What rank 0 knows and all must do alike: before it submits `step`.
    fn decide_for_all(&self, step: u64) {
        if self.options.stop.load(Ordering::Relaxed) {
            self.last_step.fetch_min(step, Ordering::SeqCst);
        }
        if let Some(saver) = &self.saver {
            saver.look_at_the_clock(step);
        }
    }

    /// The states before the first step, or those of a checkpoint. Returns the steps that are done.
    fn start(&self, dev: &Device, trainer: &mut Trainer) -> Result<u64, Error> {
        let Some(from) = &self.options.resume else {
            let given = self.options.initial.as_deref();
            let initial = Initial::new(self.config, &self.built.gpt, dev.rank().tp, given);
            trainer.optimizer.init(dev, &|segment, at| initial.value(segment, at))?;
            return Ok(0);
        };
        let scaled = self.config.precision == Precision::Fp16;
        let words = from.control(&trainer.optimizer.initial_control(), scaled);
        let stored = crate::init::Stored::new(from, &self.built.gpt, dev.rank());
        let late = from.has_late_update();
        trainer.optimizer.restore(dev, &words, late, &mut |(segment, state), first, values| {
            let filled = stored.fill((segment, state), first, values);
            filled.map_err(|error| Error::Task {
                rank: dev.rank().index(),
                op: "restore",
                site: std::panic::Location::caller(),
                problem: error.to_string(),
            })
        })?;
        if late {
            trainer.start_update(dev, from.step());
        }
        trainer.loader.skip_to(from.step());
        Ok(from.step())
    }

    /// A checkpoint of the states after a step, of which so many were skipped in a row, where this run has any.
    fn save(
        &self,
        dev: &Device,
        trainer: &Trainer,
        steps: (u64, u64),
        listener: Listener<'_>,
    ) -> Result<(), Error> {
        let model = (&trainer.optimizer, &self.built.gpt, self.built.meeting);
        self.saver.as_ref().map_or(Ok(()), |saver| saver.save(dev, model, steps, listener))
    }

    /// Whether an evaluation of a part follows `step`.
    const fn is_eval_due(&self, step: u64) -> bool {
        let train = &self.config.train;
        train.eval_every > 0
            && step > 0
            && step.is_multiple_of(train.eval_every)
            && step < train.steps
    }

    fn report(&self, dev: &Device, trainer: &Trainer) -> Result<StepReport, Error> {
        let mut words = [0.0; control::WORDS];
        dev.read(trainer.optimizer.control(), &mut words)?;
        let mut sum = 0.0;
        for micro in 0..self.built.micro_batches {
            let mut loss = [0.0];
            dev.read(trainer.losses_host().slice(micro..micro + 1), &mut loss)?;
            sum += loss[0];
        }
        let tokens = self.config.batch.global * self.config.model.seq_len;
        Ok(StepReport {
            step: words[control::STEP] as u64,
            loss: sum / tokens as f64,
            grad_norm: words[control::NORM],
            loss_scale: words[control::LOSS_SCALE_USED],
            lr: words[control::LR],
            skipped: words[control::SKIP] != 0.0,
            skipped_total: words[control::SKIPPED] as u64,
            seconds: 0.0,
            activity: dev.activity(),
        })
    }

    /// Mean held-out loss; over all of it when `whole`, else over `train.eval_batches` batches. False: cut short.
    fn evaluate(
        &self,
        dev: &Device,
        trainer: &mut Trainer,
        step: u64,
        whole: bool,
        listener: Listener<'_>,
    ) -> Result<bool, Error> {
        self.passes(dev.rank(), Place::Evaluating, step);
        let per_batch = (self.config.batch.micro * self.config.parallel.data) as u64;
        let windows = self.data.num_eval_windows() as u64;
        let all = windows.div_ceil(per_batch);
        // Counted in global batches, so that every layout sees the same windows.
        let asked = self.config.train.eval_batches * self.built.micro_batches as u64;
        let batches = if whole || asked == 0 { all } else { asked.min(all) };
        let mut sum = 0.0;
        for index in 0..batches {
            if dev.rank().index() == 0 && self.options.stop.load(Ordering::Relaxed) {
                self.last_batch.fetch_min(index, Ordering::SeqCst);
            }
            let losses_on_host = trainer.evaluate(dev, index);
            dev.sync(losses_on_host)?;
            let mut loss = [0.0];
            let last = self.built.micro_batches;
            dev.read(trainer.losses_host().slice(last..last + 1), &mut loss)?;
            sum += loss[0];
            // Rank 0 wrote it before it submitted this batch, for whose loss all ranks have waited.
            if self.last_batch.load(Ordering::SeqCst) <= index {
                return Ok(false);
            }
        }
        // Only the last window can be shorter.
        let tokens = (batches * per_batch * self.config.model.seq_len as u64)
            .min(self.data.num_eval_targets());
        let whole = batches == all;
        if step == self.config.train.steps {
            self.evaluated.store(true, Ordering::SeqCst);
        }
        listener.tell(Message::Eval { step, loss: sum / tokens as f64, whole });
        Ok(true)
    }
}

/// All ranks meet; returns when all have come. Outside a step only.
pub(crate) fn meet(dev: &Device, meeting: device::Tensor) -> Result<(), Error> {
    let (group, reduce) = (Group::World, Reduce::Max);
    dev.submit(Lane::Host, Op::AllReduce { x: meeting, group, reduce });
    dev.sync(dev.record(Lane::Host))
}
