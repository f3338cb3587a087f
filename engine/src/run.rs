//! The rank threads of a run: one thread per GPU, each with its device and its part of the model.
//! All threads run the same program. Rank 0 sends messages to the calling thread.

pub mod barrier;
mod comparison;
pub mod devices;
mod evaluate;
pub(crate) mod expert_load;
pub mod export;
pub(crate) mod fault_point;
pub(crate) mod host_queue;
pub mod messages;
pub mod options;
pub mod outcome;
mod rank_progress;
mod save;
mod skip_cause;
pub mod states;
pub mod stop;
mod value_runs;
mod verification;

use crate::TIMEOUT;
use crate::run::barrier::barrier;
use crate::run::comparison::{SaveDue, initial_history};
pub use crate::run::expert_load::{ExpertLoad, ExpertTokens};
use crate::run::export::{ExportSummary, GatherContext, StateGatherer};
pub use crate::run::fault_point::{FaultPoint, Watcher};
use crate::run::host_queue::host_queue_capacity;
use crate::run::messages::{ChannelItem, Listener};
pub use crate::run::messages::{Difference, EvaluationRank, Message, StepReport};
pub use crate::run::options::{RunOptions, StuckHandler};
pub use crate::run::outcome::{Outcome, ReadFailure, RunError};
use crate::run::rank_progress::RankProgress;
use crate::run::save::{SavePoint, Saver};
use crate::run::skip_cause::SkipCause;
use crate::run::stop::{PanicGuard, StopSignal, StopVote};
use crate::step::Trainer;
pub use crate::train::initial_states::Weights;
use crate::trainer::trainer;
use checkpoint::evaluations::EvaluationHistory;
use checkpoint::rollback::RollbackHistory;
use config::{Config, WeightsPolicy};
use crossbeam_channel::RecvTimeoutError;
use data::Dataset;
use device::cuda::{MatmulSelection, Peers};
use device::{Arena, Communicator, Device, Error, Rank};
use layout::build::RankLayout;
use layout::placement::Places;
pub use offload::SpeculationOutcome;
use offload::control;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};
use topology::HostBytes;
use tracing::{debug_span, info_span};

/// State that all rank threads share.
pub(crate) struct Ranks<'a> {
    pub(crate) config: &'a Config,
    pub(crate) layout: &'a RankLayout,
    pub(crate) data: &'a Arc<Dataset>,
    pub(crate) options: &'a RunOptions,
    pub(crate) world: Arc<Communicator>,
    /// Connections between the ranks on real GPUs.
    pub(crate) peers: Arc<Peers>,
    /// How real GPUs select the algorithms of matmuls.
    pub(crate) matmuls: MatmulSelection,
    pub(crate) places: Places,
    pub(crate) stop: StopSignal,
    /// Whether a checkpoint holds the last states of an interrupted run.
    checkpointed: AtomicBool,
    /// Whether the last evaluation is done.
    pub(crate) evaluated: AtomicBool,
    /// The evaluations so far, which rank 0 compares.
    evaluations: Mutex<EvaluationHistory>,
    /// Whether `train.patience` has ended the run.
    out_of_patience: AtomicBool,
    skip_cause: Mutex<SkipCause>,
    /// Differences between the two runs of a step, as seen by ranks of this process.
    differences: Mutex<Vec<Difference>>,
    pub(crate) read_failure: Mutex<Option<ReadFailure>>,
    /// First of the skipped steps in a row that ended the run; 0 if the run has not diverged.
    diverged_from: AtomicU64,
    gatherer: StateGatherer,
    saver: Option<Arc<Saver>>,
    /// Largest number of ops in the queue of the Host lane.
    pub(crate) host_queue_capacity: usize,
    rollback_history: Arc<RollbackHistory>,
}

/// A rank's link to the rest of the run between steps.
pub(crate) struct ControlLink<'a> {
    pub(crate) vote: StopVote<'a>,
    pub(crate) listener: Listener<'a>,
}

/// Thread of a rank of this process, or the error that prevented its start.
struct RankThread<'scope> {
    rank: Rank,
    handle: Result<ScopedJoinHandle<'scope, Result<u64, Error>>, Error>,
}

impl RankThread<'_> {
    fn is_running(&self) -> bool {
        self.handle.as_ref().is_ok_and(|handle| !handle.is_finished())
    }
}

/// Trains on the GPUs of the config. Calls `tell` with the messages of rank 0, on the calling
/// thread, while the ranks work.
///
/// # Errors
/// The first failure, with its rank and its step.
pub fn train(
    config: &Config,
    layout: &RankLayout,
    data: &Arc<Dataset>,
    options: &RunOptions,
    tell: &mut dyn FnMut(Message),
) -> Result<Outcome, RunError> {
    let (tp, dp) = (config.parallel.tensor, config.parallel.data);
    let rollback_history = Arc::new(options.rollback_history());
    let places = layout.machine.places(config, layout.host_bytes(config), options.bind);
    let host_queue_capacity = host_queue_capacity(config, layout, options.lanes)?;
    let timeout = options.timeout.unwrap_or(TIMEOUT);
    let evaluations = initial_history(config, options);
    let new_saver =
        |folder| Saver::new(config, data, layout, folder, options, &places, evaluations.best());
    let ranks = Ranks {
        config,
        layout,
        data,
        options,
        world: match options.processes.as_ref().filter(|processes| processes.count() > 1) {
            Some(processes) => Communicator::across(processes, tp, dp, timeout),
            None => Communicator::new(tp, dp, timeout),
        },
        peers: Arc::new(Peers::new(tp * dp)),
        matmuls: options.matmul_selection(config),
        stop: StopSignal::new(Arc::clone(&options.stop)),
        checkpointed: AtomicBool::new(false),
        evaluated: AtomicBool::new(false),
        evaluations: Mutex::new(evaluations),
        out_of_patience: AtomicBool::new(false),
        skip_cause: Mutex::default(),
        differences: Mutex::default(),
        read_failure: Mutex::default(),
        diverged_from: AtomicU64::new(0),
        gatherer: StateGatherer::new(&layout.decoder, options),
        saver: options.checkpoints.as_ref().and_then(new_saver),
        rollback_history,
        places,
        host_queue_capacity,
    };
    ranks.world.wait_longer(ranks.memory_allowance());
    // A bounded channel allocates no memory in a send. A full channel holds up rank 0.
    let (sender, receiver) = crossbeam_channel::bounded(256);
    let results = std::thread::scope(|scope| {
        let spawn = |rank: Rank| {
            let (ranks, sender) = (&ranks, (rank.index() == 0).then(|| sender.clone()));
            let builder = std::thread::Builder::new().name(format!("rank {}", rank.index()));
            let started = builder.spawn_scoped(scope, move || ranks.run(rank, sender.as_ref()));
            started.map_err(|error| ranks.world.not_started(rank, &error))
        };
        let here = Rank::all(tp, dp).filter(|rank| ranks.world.has(*rank));
        let threads: Vec<_> = here.map(|rank| RankThread { rank, handle: spawn(rank) }).collect();
        drop(sender);
        // If `tell` panics, the guard stops the run, and the receiver is dropped before the scope
        // joins the threads: rank 0 must not wait for it.
        let messages = receiver;
        let _stop = PanicGuard(&options.stop);
        let mut watchdog = Watchdog { ranks: &ranks, since: None, progress: None };
        loop {
            match messages.recv_timeout(POLL) {
                Ok(ChannelItem::Message(message)) => tell(message),
                Ok(ChannelItem::Flush(answer)) => drop(answer),
                Err(RecvTimeoutError::Timeout) => watchdog.check(&threads),
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        while threads.iter().any(RankThread::is_running) {
            watchdog.check(&threads);
            std::thread::sleep(Duration::from_millis(1));
        }
        let joined = |RankThread { rank, handle }: RankThread<'_>| {
            let (rank, why) = (rank.index(), "its thread panicked".to_owned());
            let died = |_| Err(Error::RankDied { rank, step: 0, why });
            (rank, handle.and_then(|handle| handle.join().unwrap_or_else(died)))
        };
        threads.into_iter().map(joined).collect::<Vec<(usize, Result<u64, Error>)>>()
    });
    outcome(results, ranks, config.train.steps)
}

/// Speed of the slowest memory or disk that counts as working, in bytes per second.
const SLOWEST: f64 = 6.4e7;

/// Interval at which the calling thread checks a run that sends no message.
const POLL: Duration = Duration::from_millis(200);

/// Detects a failed run that does not end.
struct Watchdog<'a> {
    ranks: &'a Ranks<'a>,
    /// Time of the failure, or of the last progress of the checkpoint that is being written.
    since: Option<Instant>,
    /// Last progress of the checkpoint that is being written, if any.
    progress: Option<u64>,
}

impl Watchdog<'_> {
    fn check(&mut self, threads: &[RankThread<'_>]) {
        let Some(stuck) = self.ranks.options.stuck else { return };
        let Some((rank, step, error)) = self.ranks.world.failure() else { return };
        let progress = self.ranks.saver.as_ref().and_then(|saver| saver.progress());
        if progress != self.progress {
            (self.progress, self.since) = (progress, None);
        }
        // A rank may wait for the checkpoint, which is worth the wait even if all ranks have ended.
        let patience = match progress {
            Some(_) => self.ranks.options.stuck_save.unwrap_or(TIMEOUT),
            None => stuck.after,
        };
        if self.since.get_or_insert_with(Instant::now).elapsed() < patience {
            return;
        }
        let mut all = vec![None; self.ranks.config.world_size()];
        for thread in threads.iter().filter(|thread| thread.is_running()) {
            let (rank, why) = (thread.rank.index(), "it is stuck: it does not end".to_owned());
            all[rank] = Some(Error::RankDied { rank, step, why });
        }
        if progress.is_none() && all.iter().all(Option::is_none) {
            return;
        }
        (stuck.call)(&RunError { rank, step, error, all, read_failure: None });
    }
}

fn outcome(
    results: Vec<(usize, Result<u64, Error>)>,
    ranks: Ranks<'_>,
    steps: u64,
) -> Result<Outcome, RunError> {
    let read_failure = *ranks.read_failure.lock().unwrap_or_else(|e| e.into_inner());
    let mut all: Vec<Option<Error>> = vec![None; ranks.config.world_size()];
    for (rank, result) in &results {
        all[*rank] = result.as_ref().err().cloned();
    }
    if let Some((rank, step, error)) = ranks.world.failure() {
        // The other ranks know that a rank returned early. Only the rank itself knows why.
        let own = all[rank].get_or_insert_with(|| error.clone()).clone();
        let died = |error: &Error| matches!(error, Error::RankDied { .. });
        let error = if died(&error) && !died(&own) { own } else { error };
        return Err(RunError { rank, step, error, all, read_failure });
    }
    if let Some((rank, error)) = all.iter().enumerate().find_map(|(i, e)| Some((i, e.clone()?))) {
        return Err(RunError { rank, step: 0, error, all, read_failure });
    }
    let step = results.into_iter().filter_map(|(_, result)| result.ok()).max();
    let step = step.unwrap_or_else(|| unreachable!("a run without ranks has no plan"));
    let out_of_patience = ranks.out_of_patience.load(Ordering::SeqCst);
    let complete = (step == steps && ranks.evaluated.load(Ordering::SeqCst)) || out_of_patience;
    let evaluations = ranks.compared();
    let noted = ranks.skip_cause.into_inner().unwrap_or_else(|e| e.into_inner());
    let not_finite = noted.first.filter(|_| noted.step == step).map(|(_, _, name)| name);
    let ExportSummary { state_hash, written: weights_written, problem } = ranks.gatherer.finish();
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
        evaluations,
        out_of_patience,
        diverged,
    })
}

impl Ranks<'_> {
    /// Runs one rank from start to end. Returns its last step.
    fn run(
        &self,
        rank: Rank,
        sender: Option<&crossbeam_channel::Sender<ChannelItem>>,
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
        let mut trainer =
            trainer(self.config, self.layout, self.data, &self.rollback_history, rank);
        self.reach(rank, FaultPoint::Opened, 0);
        if let Some(saver) = &self.saver {
            saver.open(&dev, &trainer, &self.matmuls)?;
        }
        dev.write(self.layout.barrier, &|_| 0.0)?;
        let states = debug_span!("load").in_scope(|| self.load_states(&dev, &mut trainer));
        let Some(done) = states? else {
            dev.finish()?;
            return Ok(self.steps_before());
        };
        self.reach(rank, FaultPoint::Loaded, done);
        trainer.loader.prefetch(&dev);
        let listener = Listener { sender, world: &self.world };
        let mut link = ControlLink { vote: self.stop.vote(&self.world, rank), listener };
        self.bind_driver(place, true);
        let reached = self.run_steps(&dev, &mut trainer, done, &mut link)?;
        let Some(reached) = reached else { return Ok(done) };
        trainer.finish_update(&dev);
        dev.sync_all()?;
        self.bind_driver(place, false);
        self.reach(rank, FaultPoint::Ending, reached.step);
        if let Some(weights) = self.gather_mode(&dev, done, &reached, listener)? {
            let _gathering = debug_span!("gather").entered();
            let (world, optimizer) = (&*self.world, &trainer.optimizer);
            let gather =
                GatherContext { dev: &dev, world, optimizer, barrier: self.layout.barrier };
            self.gatherer.run(gather, weights)?;
        }
        let compares = self.config.train.compares_evaluations();
        if !compares && !reached.stopped && reached.step == self.config.train.steps {
            self.evaluate(&dev, &mut trainer, reached.step, &mut link)?;
        }
        if let Some(saver) = self.saver.as_ref().filter(|_| rank.index() == 0) {
            saver.finish(listener);
        }
        dev.finish()?;
        Ok(reached.step)
    }

    /// Runs every step after `done`, with the saves and evaluations between steps. `None` if this
    /// rank ends early because a test requested it.
    fn run_steps(
        &self,
        dev: &Device,
        trainer: &mut Trainer,
        done: u64,
        link: &mut ControlLink<'_>,
    ) -> Result<Option<RankProgress>, Error> {
        let steps = self.config.train.steps;
        let mut reached =
            RankProgress { stopped: link.vote.ends_here()?, ..RankProgress::at(done) };
        self.before_steps(dev, trainer, &mut reached, link)?;
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
            self.reach(dev.rank(), FaultPoint::Step, step);
            let trial = self.run_trial(dev, trainer, step)?;
            let stepping = debug_span!("step", number = step).entered();
            let decided = trainer.train_step(dev, step);
            dev.sync(decided)?;
            drop(stepping);
            if step == done + 1 {
                self.world.wait_longer(Duration::ZERO);
            }
            self.reach(dev.rank(), FaultPoint::Decided, step);
            let mut report = self.report(dev, trainer)?;
            report.verified =
                trial.map(|trial| self.verify(dev, trainer, &trial, link.listener)).transpose()?;
            report.seconds = ended.elapsed().as_secs_f64();
            if report.skipped {
                self.locate(dev, &trainer.optimizer, step)?;
            } else {
                last_good = step;
            }
            link.listener.tell(Message::Step(report));
            // The result is the same on all ranks.
            let diverged = step - last_good >= self.config.train.stop_after_skipped;
            if diverged {
                self.diverged_from.store(last_good + 1, Ordering::SeqCst);
            }
            let due = self.saver.as_ref().is_some_and(|saver| saver.is_due(step));
            let (stopped, is_due) = link.vote.after_step(due)?;
            reached = RankProgress { stopped, diverged, ..RankProgress::at(step) };
            let due = SaveDue { is_due, skipped_in_a_row: step - last_good };
            self.after_step(dev, trainer, &mut reached, due, link)?;
            ended = Instant::now();
        }
        self.out_of_patience.fetch_or(reached.out_of_patience, Ordering::SeqCst);
        Ok(Some(reached))
    }

    /// Decides whether the ranks gather the states at the end (`Some`), and whether they then write
    /// the weights. All ranks call it.
    ///
    /// A run that is not interrupted always hashes all states. After an interrupt a hash would take
    /// minutes for a large model. The ranks then gather only to write the weights: if
    /// `train.weights` says so, or if no checkpoint holds the states.
    fn gather_mode(
        &self,
        dev: &Device,
        done: u64,
        reached: &RankProgress,
        listener: Listener<'_>,
    ) -> Result<Option<bool>, Error> {
        let policy = self.config.train.weights;
        let file = self.options.weights.is_some() && policy != WeightsPolicy::Never;
        if !reached.stopped {
            return Ok(Some(file));
        }
        // The states that the run started from still exist.
        if !file || reached.step == done {
            return Ok(None);
        }
        if policy == WeightsPolicy::Complete {
            if let Some(saver) = self.saver.as_ref().filter(|_| dev.rank().index() == 0) {
                saver.finish(listener);
                self.checkpointed.store(saver.holds(reached.step), Ordering::SeqCst);
            }
            barrier(dev, self.layout.barrier)?;
            let saved = self.checkpointed.load(Ordering::SeqCst);
            if self.is_set_on_any_process(dev, "held", saved)? {
                self.checkpointed.store(true, Ordering::SeqCst);
            }
        }
        Ok((!self.checkpointed.load(Ordering::SeqCst)).then_some(true))
    }

    /// Extra time for a rank, after the deadline, to touch its memory first, or to read or write
    /// its states.
    fn memory_allowance(&self) -> Duration {
        let HostBytes { staging, states } = self.layout.host_bytes(self.config);
        let device = self.layout.plan.bytes(Arena::Device);
        Duration::from_secs_f64((staging + states + device) as f64 / SLOWEST)
    }

    /// Saves a checkpoint, if this run has a folder for them.
    fn save(
        &self,
        dev: &Device,
        trainer: &Trainer,
        after: SavePoint,
        listener: Listener<'_>,
    ) -> Result<(), Error> {
        let Some(saver) = &self.saver else { return Ok(()) };
        let _saving = debug_span!("save", step = after.step).entered();
        self.world.wait_longer(self.memory_allowance());
        saver.save(dev, trainer, self.layout.barrier, after, listener)?;
        // A late rank meets the others in their next step, which has the normal deadline.
        self.world.wait_longer(Duration::ZERO);
        Ok(())
    }

    fn report(&self, dev: &Device, trainer: &Trainer) -> Result<StepReport, Error> {
        let mut words = [0.0; control::WORDS];
        dev.read(trainer.optimizer.control(), &mut words)?;
        let mut sum = 0.0;
        for micro in 0..self.layout.micro_batches {
            let mut loss = [0.0];
            dev.read(trainer.losses_host.slice(micro..micro + 1), &mut loss)?;
            sum += loss[0];
        }
        let loads = self.layout.expert_loads;
        let passes = self.layout.micro_batches * dev.rank().dp_size;
        let read = |(loads, shape)| ExpertLoad::read(dev, loads, &shape, passes);
        let expert_load = loads.zip(self.layout.decoder.shape().experts).map(read).transpose()?;
        let step = words[control::STEP] as u64;
        let targets = trainer.samples.targets(step);
        Ok(StepReport {
            step,
            loss: sum / targets as f64,
            targets,
            contents: trainer.samples.contents(step),
            expert_load,
            grad_norm: words[control::NORM],
            loss_scale: words[control::LOSS_SCALE_USED],
            lr: words[control::LR],
            skipped: words[control::SKIP] != 0.0,
            skipped_total: words[control::SKIPPED] as u64,
            speculation: SpeculationOutcome::of(&words),
            verified: None,
            seconds: 0.0,
            activity: dev.activity(),
        })
    }
}
