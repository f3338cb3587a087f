//! The rank threads of a run: one per GPU, each with its device and its part of the model, all walking the same
//! program. What they have to say goes to the calling thread as plain messages.

mod evaluate;
pub(crate) mod export;
pub(crate) mod fault_point;
pub(crate) mod host_jobs;
pub(crate) mod load;
pub(crate) mod meet;
pub(crate) mod messages;
mod not_finite;
pub(crate) mod open;
pub(crate) mod options;
pub(crate) mod outcome;
mod runs;
pub(crate) mod stop;
mod verify;

use crate::checkpoint::detours::Detours;
use crate::config::{Config, WeightsPolicy};
use crate::data::Dataset;
use crate::layout::build::Built;
use crate::layout::placement::{Places, places};
use crate::run::export::{Finished, Gathering};
pub use crate::run::fault_point::{Place, Watcher};
use crate::run::host_jobs::host_jobs;
use crate::run::meet::meet;
pub use crate::run::messages::{Differing, Message, StepReport};
use crate::run::messages::{Listener, Post};
use crate::run::not_finite::NotFinite;
pub use crate::run::options::{RunOptions, Stuck};
pub use crate::run::outcome::{Outcome, RunError, Unread};
use crate::run::stop::{Stop, Turns};
use crate::save::{AfterStep, Saver};
use crate::step::Trainer;
pub use crate::train::init::Weights;
use crate::train::trainer::trainer;
use crossbeam_channel::RecvTimeoutError;
use device::World;
use device::cuda::Peers;
use device::{Arena, Device, Error, Rank};
pub use offload::Ahead;
use offload::control;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};
use topology::HostBytes;
use tracing::{debug_span, info_span};

/// How far a rank came.
struct Reached {
    step: u64,
    /// No step follows: the run was told to stop.
    stopped: bool,
    /// No step follows: too many were skipped in a row.
    diverged: bool,
}

impl Reached {
    const fn goes_on(&self) -> bool {
        !self.stopped && !self.diverged
    }
}

/// What all rank threads share.
pub(crate) struct Ranks<'a> {
    pub(crate) config: &'a Config,
    pub(crate) built: &'a Built,
    pub(crate) data: &'a Arc<Dataset>,
    pub(crate) options: &'a RunOptions,
    pub(crate) world: Arc<World>,
    /// Of ranks on real GPUs.
    pub(crate) peers: Arc<Peers>,
    pub(crate) places: Places,
    pub(crate) stop: Stop,
    /// A checkpoint holds the states that an interrupted run ends with.
    held: AtomicBool,
    /// The last evaluation is done.
    pub(crate) evaluated: AtomicBool,
    not_finite: Mutex<NotFinite>,
    /// The differences between the two runs of a step that ranks of this process have seen.
    differing: Mutex<Vec<Differing>>,
    pub(crate) unread: Mutex<Option<Unread>>,
    /// The first of the steps that were skipped until the run ended; 0: none.
    diverged_from: AtomicU64,
    gathering: Gathering,
    saver: Option<Arc<Saver>>,
    /// Room of the Host lane's queue.
    pub(crate) host_jobs: usize,
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
    let places = places(config, built.host_bytes(config), options.bind);
    let host_jobs = host_jobs(config, built, options.lanes)?;
    let ranks = Ranks {
        config,
        built,
        data,
        options,
        world: match options.processes.as_ref().filter(|processes| processes.count() > 1) {
            Some(processes) => World::across(processes, (tp, dp), options.timeout),
            None => World::new(tp, dp, options.timeout),
        },
        peers: Arc::new(Peers::new(tp * dp)),
        stop: Stop::new(Arc::clone(&options.stop)),
        held: AtomicBool::new(false),
        evaluated: AtomicBool::new(false),
        not_finite: Mutex::default(),
        differing: Mutex::default(),
        unread: Mutex::default(),
        diverged_from: AtomicU64::new(0),
        gathering: Gathering::new(&built.gpt, options),
        saver: options
            .checkpoints
            .as_ref()
            .and_then(|folder| Saver::new((config, data), built, folder, (options, &places))),
        detours,
        places,
        host_jobs,
    };
    ranks.world.wait_longer(ranks.while_large());
    // Bounded: a full channel holds rank 0 up, a bounded one allocates nothing when it is sent to.
    let (sender, receiver) = crossbeam_channel::bounded(256);
    let results = std::thread::scope(|scope| {
        let spawn = |rank: Rank| {
            let (ranks, sender) = (&ranks, (rank.index() == 0).then(|| sender.clone()));
            let builder = std::thread::Builder::new().name(format!("rank {}", rank.index()));
            let started = builder.spawn_scoped(scope, move || ranks.run(rank, sender.as_ref()));
            started.map_err(|error| ranks.world.not_started(rank, &error))
        };
        let here = Rank::all(tp, dp).filter(|rank| ranks.world.has(*rank));
        let threads: Vec<_> = here.map(|rank| (rank, spawn(rank))).collect();
        drop(sender);
        // By value: should `tell` panic, rank 0 must not wait for who no longer listens.
        let _stop = StopOnPanic(&options.stop);
        let mut overdue = Overdue { ranks: &ranks, since: None, progress: None };
        loop {
            match receiver.recv_timeout(LOOK_UP) {
                Ok(Post::Tell(message)) => tell(message),
                Ok(Post::Flush(answer)) => drop(answer),
                Err(RecvTimeoutError::Timeout) => overdue.look(&threads),
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        let runs = |(_, thread): &(Rank, Result<ScopedJoinHandle<'_, _>, Error>)| {
            thread.as_ref().is_ok_and(|thread| !thread.is_finished())
        };
        while threads.iter().any(runs) {
            overdue.look(&threads);
            std::thread::sleep(Duration::from_millis(1));
        }
        let joined = |(rank, thread): (Rank, Result<ScopedJoinHandle<'_, _>, Error>)| {
            let (rank, why) = (rank.index(), "its thread panicked".to_owned());
            let died = |_| Err(Error::RankDied { rank, step: 0, why });
            (rank, thread.and_then(|thread| thread.join().unwrap_or_else(died)))
        };
        threads.into_iter().map(joined).collect::<Vec<(usize, Result<u64, Error>)>>()
    });
    outcome(results, ranks, config.train.steps)
}

/// Bytes per second of the slowest memory or disk that is no fault.
const SLOWEST: f64 = 6.4e7;

/// The calling thread looks up so often when nothing is told.
const LOOK_UP: Duration = Duration::from_millis(200);

/// Whether a failed run does not end.
struct Overdue<'a> {
    ranks: &'a Ranks<'a>,
    /// When the failure was first seen, or the checkpoint that is being written last moved.
    since: Option<Instant>,
    /// Of that checkpoint.
    progress: Option<u64>,
}

impl Overdue<'_> {
    fn look<T>(&mut self, threads: &[(Rank, Result<ScopedJoinHandle<'_, T>, Error>)]) {
        let Some((grace, tell)) = self.ranks.options.stuck else { return };
        let Some((rank, step, error)) = self.ranks.world.failure() else { return };
        let progress = self.ranks.saver.as_ref().and_then(|saver| saver.progress());
        if progress != self.progress {
            (self.progress, self.since) = (progress, None);
        }
        // A rank may wait for it, and even where none lives any more it is worth the wait.
        let patience = if progress.is_some() { self.ranks.options.stuck_save } else { grace };
        if self.since.get_or_insert_with(Instant::now).elapsed() < patience {
            return;
        }
        let stuck =
            |t: &Result<ScopedJoinHandle<'_, T>, Error>| t.as_ref().is_ok_and(|t| !t.is_finished());
        let mut all = vec![None; self.ranks.config.world_size()];
        for (stuck, _) in threads.iter().filter(|(_, thread)| stuck(thread)) {
            let (rank, why) = (stuck.index(), "it is stuck: it does not end".to_owned());
            all[rank] = Some(Error::RankDied { rank, step, why });
        }
        if progress.is_none() && all.iter().all(Option::is_none) {
            return;
        }
        tell(&RunError { rank, step, error, all, unread: None });
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
    results: Vec<(usize, Result<u64, Error>)>,
    ranks: Ranks<'_>,
    steps: u64,
) -> Result<Outcome, RunError> {
    let unread = *ranks.unread.lock().unwrap_or_else(|e| e.into_inner());
    let mut all: Vec<Option<Error>> = vec![None; ranks.config.world_size()];
    for (rank, result) in &results {
        all[*rank] = result.as_ref().err().cloned();
    }
    if let Some((rank, step, error)) = ranks.world.failure() {
        // That a rank returned early is known to the others; why, it knows itself.
        let own = all[rank].get_or_insert_with(|| error.clone()).clone();
        let died = |error: &Error| matches!(error, Error::RankDied { .. });
        let error = if died(&error) && !died(&own) { own } else { error };
        return Err(RunError { rank, step, error, all, unread });
    }
    if let Some((rank, error)) = all.iter().enumerate().find_map(|(i, e)| Some((i, e.clone()?))) {
        return Err(RunError { rank, step: 0, error, all, unread });
    }
    let step = results.into_iter().filter_map(|(_, result)| result.ok()).max();
    let step = step.unwrap_or_else(|| unreachable!("a run without ranks has no plan"));
    let complete = step == steps && ranks.evaluated.load(Ordering::SeqCst);
    let noted = ranks.not_finite.into_inner().unwrap_or_else(|e| e.into_inner());
    let not_finite = noted.first.filter(|_| noted.step == step).map(|(_, _, name)| name);
    let Finished { state_hash, written: weights_written, problem } = ranks.gathering.finish();
    let weights_problem = problem.map(|problem| problem.to_string());
    let from = ranks.diverged_from.into_inner();
    let diverged = (from > 0).then_some((from, step));
    Ok(Outcome {
        step,
        complete,
        state_hash,
        weights_written,
        weights_problem,
        not_finite,
        diverged,
    })
}

impl Ranks<'_> {
    /// One rank from start to end; returns its last step.
    fn run(
        &self,
        rank: Rank,
        sender: Option<&crossbeam_channel::Sender<Post>>,
    ) -> Result<u64, Error> {
        device::panics::watch_this_thread();
        let _rank = info_span!("rank", number = rank.index()).entered();
        let place = self.places.ranks.get(rank.index());
        if let Some(place) = place
            && let Err(error) = topology::bind_current_thread(&place.cpus)
        {
            tracing::warn!("rank {} is not bound: {error}", rank.index());
        }
        let dev = debug_span!("open").in_scope(|| self.open(rank, place))?;
        let mut trainer = trainer(self.config, self.built, (self.data, &self.detours), rank);
        self.passes(rank, Place::Opened, 0);
        if let Some(saver) = &self.saver {
            saver.open(&dev, (&trainer.optimizer, &self.built.gpt))?;
        }
        dev.write(self.built.meeting, &|_| 0.0)?;
        let states = debug_span!("load").in_scope(|| self.start(&dev, &mut trainer));
        let Some(done) = states? else {
            dev.finish()?;
            return Ok(self.steps_before());
        };
        self.passes(rank, Place::Loaded, done);
        trainer.loader.prefetch(&dev);
        let listener = Listener { sender, world: &self.world };
        let mut turns = self.stop.turns(&self.world, rank);
        self.drives(place, true);
        let reached = self.steps(&dev, &mut trainer, done, (&mut turns, listener))?;
        let Some(reached) = reached else { return Ok(done) };
        trainer.finish_update(&dev);
        dev.sync_all()?;
        self.drives(place, false);
        self.passes(rank, Place::Ending, reached.step);
        if let Some(weights) = self.gathers(&dev, done, &reached, listener)? {
            let _gathering = debug_span!("gather").entered();
            self.gathering.run(
                (&dev, &self.world),
                &trainer.optimizer,
                self.built.meeting,
                weights,
            )?;
        }
        if !reached.stopped && reached.step == self.config.train.steps {
            self.evaluate(&dev, &mut trainer, reached.step, (&mut turns, listener))?;
        }
        if let Some(saver) = self.saver.as_ref().filter(|_| rank.index() == 0) {
            saver.finish(listener);
        }
        dev.finish()?;
        Ok(reached.step)
    }

    /// Every step after `done`, with what belongs between steps. None: this rank leaves, as a test asked it to.
    fn steps(
        &self,
        dev: &Device,
        trainer: &mut Trainer,
        done: u64,
        (turns, listener): (&mut Turns<'_>, Listener<'_>),
    ) -> Result<Option<Reached>, Error> {
        let steps = self.config.train.steps;
        let mut reached = Reached { step: done, stopped: turns.end_here()?, diverged: false };
        // An evaluation that is cut short ends the run: it is done again by whoever goes on from here.
        if !reached.stopped && self.is_eval_due(done) {
            reached.stopped = !self.evaluate(dev, trainer, done, (turns, listener))?;
        }
        let mut ended = Instant::now();
        let mut last_good = done.saturating_sub(self.options.skipped_in_a_row());
        while reached.goes_on() && reached.step < steps {
            let step = reached.step + 1;
            dev.begin_step(step);
            if let Some(saver) = self.saver.as_ref().filter(|_| dev.rank().index() == 0) {
                saver.look_at_the_clock(step);
            }
            if self.options.leave_at == Some((dev.rank().index(), step)) {
                return Ok(None);
            }
            self.passes(dev.rank(), Place::Step, step);
            let trial = self.tried(dev, trainer, step)?;
            let stepping = debug_span!("step", number = step).entered();
            let decided = trainer.train_step(dev, step);
            dev.sync(decided)?;
            drop(stepping);
            if step == done + 1 {
                self.world.wait_longer(Duration::ZERO);
            }
            self.passes(dev.rank(), Place::Decided, step);
            let mut report = self.report(dev, trainer)?;
            report.verified =
                trial.map(|trial| self.verify(dev, trainer, &trial, listener)).transpose()?;
            report.seconds = ended.elapsed().as_secs_f64();
            if report.skipped {
                self.locate(dev, &trainer.optimizer, step)?;
            } else {
                last_good = step;
            }
            listener.tell(Message::Step(report));
            // All ranks know the same of it.
            let diverged = step - last_good >= self.config.train.stop_after_skipped;
            if diverged {
                self.diverged_from.store(last_good + 1, Ordering::SeqCst);
            }
            let due = self.saver.as_ref().is_some_and(|saver| saver.is_due(step));
            let (stopped, due) = turns.after_step(due)?;
            reached = Reached { step, stopped, diverged };
            // First the states: an evaluation changes nothing.
            let after = AfterStep { step, skipped_in_a_row: step - last_good };
            if due || !reached.goes_on() || step == steps {
                self.save(dev, trainer, after, listener)?;
            }
            if reached.goes_on() && self.is_eval_due(step) {
                reached.stopped = !self.evaluate(dev, trainer, step, (turns, listener))?;
                if reached.stopped && !due {
                    self.save(dev, trainer, after, listener)?;
                }
            }
            ended = Instant::now();
        }
        Ok(Some(reached))
    }

    /// Whether the states are put together at the end, and then whether the weights are written. All ranks call it.
    ///
    /// A run that ends by itself leaves a hash of them all. At an interrupt that would cost minutes for large models, so the
    /// states are put together only for weights: where `train.weights` asks for them, or nothing else holds the states.
    fn gathers(
        &self,
        dev: &Device,
        done: u64,
        reached: &Reached,
        listener: Listener<'_>,
    ) -> Result<Option<bool>, Error> {
        let policy = self.config.train.weights;
        let file = self.options.weights.is_some() && policy != WeightsPolicy::Never;
        if !reached.stopped {
            return Ok(Some(file));
        }
        // Those that it started from are where they were.
        if !file || reached.step == done {
            return Ok(None);
        }
        if policy == WeightsPolicy::Complete {
            if let Some(saver) = self.saver.as_ref().filter(|_| dev.rank().index() == 0) {
                saver.finish(listener);
                self.held.store(saver.holds(reached.step), Ordering::SeqCst);
            }
            meet(dev, self.built.meeting)?;
            let held = self.held.load(Ordering::SeqCst);
            if self.is_told_elsewhere(dev, "held", held)? {
                self.held.store(true, Ordering::SeqCst);
            }
        }
        Ok((!self.held.load(Ordering::SeqCst)).then_some(true))
    }

    /// What a rank may take besides the deadline to bring in its memory, or to read or write its states.
    fn while_large(&self) -> Duration {
        let HostBytes { staging, states } = self.built.host_bytes(self.config);
        let device = self.built.plan.bytes(Arena::Device);
        Duration::from_secs_f64((staging + states + device) as f64 / SLOWEST)
    }

    /// A checkpoint, where this run has any.
    fn save(
        &self,
        dev: &Device,
        trainer: &Trainer,
        after: AfterStep,
        listener: Listener<'_>,
    ) -> Result<(), Error> {
        let model = (&trainer.optimizer, &self.built.gpt, self.built.meeting);
        let Some(saver) = &self.saver else { return Ok(()) };
        let _saving = debug_span!("save", step = after.step).entered();
        self.world.wait_longer(self.while_large());
        saver.save(dev, model, after, listener)?;
        // Who comes late finds the others still in their next step.
        self.world.wait_longer(Duration::ZERO);
        Ok(())
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
        let step = words[control::STEP] as u64;
        let targets = trainer.samples.targets(step);
        Ok(StepReport {
            step,
            loss: sum / targets as f64,
            targets,
            held: trainer.samples.held(step),
            grad_norm: words[control::NORM],
            loss_scale: words[control::LOSS_SCALE_USED],
            lr: words[control::LR],
            skipped: words[control::SKIP] != 0.0,
            skipped_total: words[control::SKIPPED] as u64,
            ahead: Ahead::of(&words),
            verified: None,
            seconds: 0.0,
            activity: dev.activity(),
        })
    }
}
