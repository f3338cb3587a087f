//! Checkpoints of a run. The ranks meet at a barrier. Then they write the states that they own
//! while training waits, or they copy the states and background threads write the copies while
//! training continues. The bytes are the same.
//!
//! Invariant: one checkpoint is written at a time. The next save and the end of the run wait for
//! it.

mod background;
pub(crate) mod best;
mod job;
mod pace;
mod remote;

use self::background::Snapshot;
use self::best::SavedCheckpoint;
use self::job::SaveJob;
pub(crate) use self::job::SavePoint;
use self::pace::Pace;
use crate::TIMEOUT;
use crate::run::barrier::barrier;
use crate::run::messages::{ChannelItem, Listener, Message, flush};
use crate::run::{FaultPoint, RunOptions, Watcher};
use crate::step::Trainer;
use checkpoint::RunFolder;
use checkpoint::disk_space::{NeededCheckpoints, checkpoint_bytes, is_full, make_room};
use checkpoint::evaluations::Evaluation;
use checkpoint::folder::{clean, hint, retain_from};
use checkpoint::manifest::{Control, Manifest, TensorEntry, states};
use checkpoint::save_progress::SaveProgress;
use checkpoint::write::{
    Fill, Pieces, RankRecord, UnfinishedCheckpoint, bytes, pieces, tensors, write_file,
};
use config::Config;
use crossbeam_channel::Sender;
use data::Dataset;
use device::cuda::{MatmulChoices, MatmulSelection};
use device::{Arena, Device, Error, Tensor};
use files::directory::Directory;
use files::path_text::ShownPath;
use layout::build::RankLayout;
use layout::placement::Places;
use offload::{BufferIndex, State, control};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Number of elements that are read from a device at a time.
const BLOCK: usize = 1 << 14;

/// Saver of a run's checkpoints, which all ranks share.
pub(crate) struct Saver {
    folder: RunFolder,
    pace: Pace,
    keep: usize,
    /// Whether the best checkpoint stays, too.
    keeps_best: bool,
    /// Whether the run may be rolled back: see [`checkpoint::rollback`].
    takes_back: bool,
    tokens_per_step: u64,
    /// Manifest entries that all checkpoints of this run share, with the tensors without ranges.
    pub(super) base: Manifest,
    /// Largest number of states of a tensor.
    most_states: usize,
    /// Copies of the ranks' states, by rank, if training continues during a save.
    copies: Option<Vec<Mutex<Snapshot>>>,
    shared: Mutex<SaveState>,
    pub(super) writing: Mutex<Option<JoinHandle<()>>>,
    pub(super) under_way: Arc<SaveProgress>,
    /// Cores of each rank, by rank. The thread that writes a rank's copy is bound to them.
    pub(super) cores: Vec<Vec<u32>>,
    watcher: Option<Watcher>,
}

#[derive(Default)]
struct SaveState {
    /// Checkpoint that is being written; `None` if it could not be begun.
    growing: Option<UnfinishedCheckpoint>,
    /// Error that prevents this checkpoint.
    problem: Option<String>,
    /// Whether the disk had no room for the last checkpoint.
    full: bool,
    /// Files of the ranks, by rank.
    files: Vec<Option<RankRecord>>,
    /// Lines of the run's choices of matmuls, if rank 0 has chosen them in this process.
    matmuls: Vec<String>,
    /// The complete checkpoints from which the run resumed or which it has saved.
    good: Vec<SavedCheckpoint>,
    /// Evaluation of the best complete checkpoint.
    best: Option<Evaluation>,
    /// Evaluation of the checkpoint that is being written, if it becomes the best.
    pending: Option<Evaluation>,
    /// Last warning about old checkpoints that stay, and about the hint.
    untidy: String,
}

/// Error that prevents a rank's file. `Device` ends the run, `Io` only ends the checkpoint.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
enum SaveFailure {
    Device(#[from] Error),
    Io(#[from] io::Error),
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}

impl Saver {
    /// Makes the saver of `folder`, with the intervals of `config.train`. `best`: evaluation of the
    /// best checkpoint there. `None` if it never saves.
    pub(crate) fn new(
        config: &Config,
        data: &Dataset,
        built: &RankLayout,
        folder: &RunFolder,
        options: &RunOptions,
        places: &Places,
        best: Option<Evaluation>,
    ) -> Option<Arc<Self>> {
        let train = &config.train;
        if !train.saves() {
            return None;
        }
        let mut base = Manifest::new(config, data);
        base.tensors = tensors(&built.decoder);
        base.rollback_history = options.rollback_history();
        base.base = options.base_hash();
        let here = options.resume.as_deref().filter(|from| folder.has(from));
        let named = best.map(|best| best.step);
        let saved = here.map(|from| SavedCheckpoint { step: from.step(), best: named });
        let good = saved.into_iter().collect();
        let ranks = 0..config.world_size();
        let decide = || crate::memory::checkpoint_copy(config, built) > 0;
        // In several processes, no rank would collect the files that background threads write.
        let spread = options.processes.as_ref().is_some_and(|processes| processes.count() > 1);
        let copies = !spread && options.copies_states.unwrap_or_else(decide);
        let pace = Pace::new(train, options.checkpoint_pause.unwrap_or(TIMEOUT));
        let files = ranks.clone().map(|_| None).collect();
        Some(Arc::new(Self {
            folder: folder.clone(),
            pace,
            keep: train.checkpoint_keep,
            keeps_best: train.keep_best,
            takes_back: train.rollbacks > 0,
            tokens_per_step: (config.batch.global * config.model.seq_len) as u64,
            base,
            most_states: crate::memory::saved_states(config),
            copies: copies.then(|| ranks.map(|_| Mutex::default()).collect()),
            shared: Mutex::new(SaveState { files, good, best, ..SaveState::default() }),
            writing: Mutex::new(None),
            under_way: Arc::default(),
            cores: places.ranks.iter().map(|place| place.cpus.clone()).collect(),
            watcher: options.watcher.clone(),
        }))
    }

    /// Allocates the memory of this rank's copy before the first step, if the ranks keep copies.
    /// Checkpoints hold what the run has chosen for its `matmuls`.
    ///
    /// # Errors
    /// [`Error::HostMemory`]
    pub(crate) fn open(
        &self,
        dev: &Device,
        trainer: &Trainer,
        matmuls: &MatmulSelection,
    ) -> Result<(), Error> {
        if dev.rank().index() == 0 {
            lock(&self.shared).matmuls =
                matmuls.chosen().map(MatmulChoices::lines).unwrap_or_default();
        }
        let Some(copies) = &self.copies else { return Ok(()) };
        let rank = dev.rank();
        let owned = |segment| trainer.optimizer.owned(segment, BufferIndex::FIRST);
        let pieces = pieces(&trainer.decoder, &owned, rank);
        let (mut room, wanted) = (Vec::new(), bytes(&pieces) / 3 * self.most_states);
        room.try_reserve_exact(wanted).map_err(|_| Error::HostMemory {
            rank: rank.index(),
            arena: Arena::Pinned,
            wanted: wanted as u64,
        })?;
        // The fill runs on this rank's cores, so that the memory is on their NUMA node.
        room.resize(wanted, 1);
        *lock(&copies[rank.index()]) = Snapshot { pieces, bytes: room };
        Ok(())
    }

    /// Checks whether a save is due by time. Rank 0 calls it before each step, for all ranks.
    pub(crate) fn look_at_the_clock(&self, step: u64) {
        self.pace.look_at_the_clock(step, self.progress().is_some());
    }

    /// Whether a save of the states after `step` is due.
    pub(crate) fn is_due(&self, step: u64) -> bool {
        self.pace.is_due(step)
    }

    /// Saves the states after a step. Every rank calls it between steps. A message reports the
    /// result, now or later; an error of the disk does not end the run.
    ///
    /// # Errors
    /// Errors of the device and of the barriers.
    pub(crate) fn save(
        self: &Arc<Self>,
        dev: &Device,
        trainer: &Trainer,
        meeting: Tensor,
        SavePoint { step, skipped_in_a_row, evaluations, evaluation }: SavePoint,
        listener: Listener<'_>,
    ) -> Result<(), Error> {
        let started = Instant::now();
        let optimizer = &trainer.optimizer;
        let (rank, world) = (dev.rank(), listener.world);
        let first = rank.index() == 0;
        dev.sync_all()?;
        if first {
            self.finish(listener);
        }
        self.passes(rank.index(), FaultPoint::Saving, step);
        let (side, is_delayed) = (optimizer.state_buffer(dev)?, optimizer.has_delayed_update());
        let pieces = pieces(&trainer.decoder, &|segment| optimizer.owned(segment, side), rank);
        match &self.copies {
            Some(copies) => {
                barrier(dev, meeting)?;
                lock(&copies[rank.index()]).take(dev, pieces)?;
            }
            None => {
                if first {
                    world.held_up(|| self.begin(step, is_delayed, skipped_in_a_row));
                }
                barrier(dev, meeting)?;
                if self.is_well_everywhere(rank, world)? {
                    let mut fill = |part: State, to: &mut [u8]| match world.failure().is_some() {
                        // The checkpoint can no longer become complete.
                        true => Err(io::Error::other("the run has failed").into()),
                        false => Ok(read(dev, part, to)?),
                    };
                    self.passes(rank.index(), FaultPoint::Writing, step);
                    let file = || self.write(rank.index(), &pieces, is_delayed, step, &mut fill);
                    world.held_up(file)?;
                }
            }
        }
        self.passes(rank.index(), FaultPoint::Saved, step);
        self.bring(rank, world)?;
        barrier(dev, meeting)?;
        if !first {
            return Ok(());
        }
        let mut words = [0.0; control::WORDS];
        dev.read(optimizer.control(), &mut words)?;
        let waited = None;
        let job = SaveJob {
            step,
            skipped_in_a_row,
            evaluations,
            evaluation,
            words,
            is_delayed,
            started,
            waited,
        };
        self.note_evaluation(&job);
        match (&self.copies, listener.sender) {
            (Some(_), Some(sender)) => {
                self.start(job, started.elapsed(), sender.clone(), world);
            }
            _ => {
                let writing = self.under_way.begin();
                let message = world.held_up(|| self.conclude(&job, listener.sender));
                drop(writing);
                listener.tell(message);
            }
        }
        self.pace.saved(started.elapsed());
        Ok(())
    }

    /// Waits until no checkpoint is being written. Rank 0 calls it.
    pub(crate) fn finish(&self, listener: Listener<'_>) {
        if let Some(thread) = lock(&self.writing).take() {
            // The thread has reported its errors.
            drop(listener.world.held_up(|| thread.join()));
        }
    }

    /// Whether a checkpoint of `step` is on the disk. Valid while no checkpoint is being written.
    pub(crate) fn holds(&self, step: u64) -> bool {
        lock(&self.shared).good.iter().any(|good| good.step == step)
    }

    pub(super) fn passes(&self, rank: usize, place: FaultPoint, step: u64) {
        if let Some(watcher) = &self.watcher {
            watcher.reach(rank, place, step);
        }
    }

    /// Progress of the checkpoint that is being written: see [`SaveProgress::progress`].
    pub(crate) fn progress(&self) -> Option<u64> {
        self.under_way.progress()
    }

    /// Writes this rank's file, directly from its device.
    fn write(
        &self,
        number: usize,
        pieces: &Pieces,
        is_delayed: bool,
        step: u64,
        fill: &mut Fill<'_, SaveFailure>,
    ) -> Result<(), Error> {
        match self.write_file(number, pieces, is_delayed, step, fill) {
            Ok(file) => self.wrote(number, Ok(file)),
            Err(SaveFailure::Io(error)) => self.wrote(number, Err(error)),
            Err(SaveFailure::Device(error)) => return Err(error),
        }
        Ok(())
    }

    pub(super) fn write_file<E: From<io::Error>>(
        &self,
        number: usize,
        pieces: &Pieces,
        is_delayed: bool,
        step: u64,
        fill: &mut Fill<'_, E>,
    ) -> Result<RankRecord, E> {
        let growing = self.growing(step)?;
        let folder = growing.directory();
        write_file(number, &self.base, pieces, is_delayed, folder, &self.under_way, fill)
    }

    pub(super) fn wrote(&self, number: usize, written: io::Result<RankRecord>) {
        match written {
            Ok(file) => lock(&self.shared).files[number] = Some(file),
            Err(error) => self.refuse(&error),
        }
    }

    /// Unfinished checkpoint of `step`; other processes find it in the folder.
    pub(super) fn growing(&self, step: u64) -> io::Result<UnfinishedCheckpoint> {
        if let Some(growing) = &lock(&self.shared).growing {
            return Ok(growing.clone());
        }
        let folder = self.folder.find()?;
        let gone = || io::Error::other(format!("{} is gone", self.folder.path().shown()));
        UnfinishedCheckpoint::begun(folder.ok_or_else(gone)?, step)
    }

    pub(super) fn begin(&self, step: u64, is_delayed: bool, skipped: u64) {
        {
            let shared = &mut *lock(&self.shared);
            (shared.growing, shared.problem) = (None, None);
            shared.files.iter_mut().for_each(|file| *file = None);
        }
        let room = |folder: &Directory| {
            let shared = &mut *lock(&self.shared);
            let newest = shared.good.last().filter(|_| !self.needs_all(skipped));
            let (newest, older) = (newest.map(|good| good.step), shared.needed_best());
            let needed = newest.map(|newest| NeededCheckpoints { newest, older: &older });
            let bytes = checkpoint_bytes(self.bytes(is_delayed));
            let full = std::mem::take(&mut shared.full);
            make_room(folder, needed, full, bytes, &Directory::free)
        };
        match self.folder.make().and_then(|folder| UnfinishedCheckpoint::begin(folder, step, room))
        {
            Ok(growing) => lock(&self.shared).growing = Some(growing),
            Err(error) => self.refuse(&error),
        }
    }

    /// Bytes of all states.
    fn bytes(&self, is_delayed: bool) -> u64 {
        let elements: usize = self.base.tensors.iter().map(TensorEntry::num_elements).sum();
        4 * states(is_delayed).len() as u64 * elements as u64
    }

    pub(super) fn is_well(&self) -> bool {
        lock(&self.shared).problem.is_none()
    }

    /// Gives up the checkpoint because of an error of the disk, and notes whether the disk is full.
    fn refuse(&self, error: &io::Error) {
        lock(&self.shared).full |= is_full(error);
        self.give_up(error.to_string());
    }

    pub(super) fn give_up(&self, why: String) {
        lock(&self.shared).problem.get_or_insert(why);
    }

    /// Completes a checkpoint whose files are written: writes the manifest, gives the checkpoint
    /// its name, and returns the message. All earlier messages are on the disk before it gets its
    /// name.
    fn conclude(&self, job: &SaveJob, sender: Option<&Sender<ChannelItem>>) -> Message {
        let mut hashing = Duration::ZERO;
        if self.is_well() {
            if let Some(sender) = sender {
                drop(sender.send(ChannelItem::Message(Message::Saving { step: job.step })));
                flush(sender);
            }
            self.passes(0, FaultPoint::Naming, job.step);
            let mut manifest = self.base.clone();
            manifest.step = job.step;
            manifest.skipped_in_a_row = job.skipped_in_a_row;
            manifest.evaluations = job.evaluations.map(|seen| seen.with_best(self.best()));
            manifest.tokens = job.step * self.tokens_per_step;
            manifest.control = Control::of(&job.words, self.base.control.scaled, job.is_delayed);
            let files: Vec<_> = lock(&self.shared).files.iter_mut().map(Option::take).collect();
            manifest.matmuls.clone_from(&lock(&self.shared).matmuls);
            hashing = files.iter().flatten().map(|file| file.hashing).max().unwrap_or_default();
            let growing = self.folder.check_lock().and_then(|()| self.growing(job.step));
            let published =
                growing.and_then(|it| it.publish(manifest, files, self.holds(job.step)));
            if let Err(error) = published {
                self.refuse(&error);
            }
        }
        self.verdict(job, hashing)
    }

    /// Warns that the folder cannot be tidied, unless the last warning was the same.
    fn warn_untidy(&self, error: &io::Error) {
        let error = error.to_string();
        let last_warning = &mut lock(&self.shared).untidy;
        if *last_warning != error {
            tracing::warn!("{}: cannot tidy up: {error}", self.folder.path().shown());
            *last_warning = error;
        }
    }

    /// Whether old checkpoints must stay: a rollback needs one from before the skipped steps.
    const fn needs_all(&self, skipped_in_a_row: u64) -> bool {
        self.takes_back && skipped_in_a_row > 0
    }

    /// Returns the message about a checkpoint. After a success removes old checkpoints, after a
    /// failure removes the unfinished checkpoint.
    fn verdict(&self, job: &SaveJob, hashing: Duration) -> Message {
        let step = job.step;
        let (growing, problem) = {
            let shared = &mut *lock(&self.shared);
            (shared.growing.take(), shared.problem.take())
        };
        if let Some(why) = problem {
            lock(&self.shared).pending = None;
            // If another process has the lock now, the unfinished checkpoints belong to it. Files
            // that cannot be removed now are removed before the next checkpoint.
            let own = growing.filter(|_| self.folder.check_lock().is_ok());
            drop(own.map(|growing| clean(&growing.folder)));
            return Message::NotSaved { step, why };
        }
        let (oldest, kept) = {
            let shared = &mut *lock(&self.shared);
            let needs_all = self.needs_all(job.skipped_in_a_row);
            (shared.complete(step, self.keep, needs_all), shared.kept_best())
        };
        let tidied = growing.map_or(Ok(()), |UnfinishedCheckpoint { folder, .. }| {
            self.folder.check_lock()?;
            oldest.map_or(Ok(()), |oldest| retain_from(&folder, oldest, &kept))?;
            hint(&folder, step)
        });
        if let Err(error) = tidied {
            self.warn_untidy(&error);
        }
        let seconds = job.started.elapsed();
        Message::Saved {
            step,
            waited: job.waited.unwrap_or(seconds).as_secs_f64(),
            seconds: seconds.as_secs_f64(),
            hashing: hashing.as_secs_f64(),
            bytes: self.bytes(job.is_delayed),
        }
    }
}

/// Reads `part` into `to`, as fp32 in little-endian order.
pub(super) fn read(dev: &Device, part: State, to: &mut [u8]) -> Result<(), Error> {
    let mut values = [0.0; BLOCK];
    for (from, to) in (0..part.len()).step_by(BLOCK).zip(to.chunks_mut(4 * BLOCK)) {
        let values = &mut values[..to.len() / 4];
        part.slice(from..from + values.len()).read(dev, values)?;
        let pairs = to.chunks_exact_mut(4).zip(&*values);
        pairs.for_each(|(b, x)| b.copy_from_slice(&x.to_le_bytes()));
    }
    Ok(())
}
