//! Saving. Ranks meet, and what they own is written: at once by themselves, while training waits, or from a copy by
//! threads of their own, while training goes on. The bytes are the same.
//!
//! Invariant: one checkpoint is written at a time. Who wants the next one waits for it, and so does the run's end.

mod background;
mod pace;
mod remote;

use self::background::Snapshot;
use self::pace::Pace;
use crate::TIMEOUT;
use crate::run::barrier::barrier;
use crate::run::messages::{ChannelItem, Listener, Message, flush};
use crate::run::{FaultPoint, RunOptions, Watcher};
use crate::step::Trainer;
use checkpoint::RunFolder;
use checkpoint::disk_space::{checkpoint_bytes, is_full, make_room};
use checkpoint::folder::{clean, hint, retain_from};
use checkpoint::manifest::{Control, Manifest, TensorEntry, states};
use checkpoint::save_progress::SaveProgress;
use checkpoint::write::{
    Fill, Pieces, RankRecord, UnfinishedCheckpoint, bytes, pieces, tensors, write_file,
};
use config::Config;
use crossbeam_channel::Sender;
use data::Dataset;
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

/// Elements read from a device at once.
const BLOCK: usize = 1 << 14;

/// The ranks' common work on the checkpoints of a run.
pub(crate) struct Saver {
    folder: RunFolder,
    pace: Pace,
    keep: usize,
    /// The run may be: see [`checkpoint::detours`].
    takes_back: bool,
    tokens_per_step: u64,
    /// What all checkpoints of this run say, and the tensors without ranges.
    pub(super) base: Manifest,
    /// Of each tensor.
    most_states: usize,
    /// By rank, where training goes on meanwhile.
    copies: Option<Vec<Mutex<Snapshot>>>,
    shared: Mutex<SaveState>,
    pub(super) writing: Mutex<Option<JoinHandle<()>>>,
    pub(super) under_way: Arc<SaveProgress>,
    /// By rank, where its threads are bound: the cores for the thread that writes its copy.
    pub(super) cores: Vec<Vec<u32>>,
    watcher: Option<Watcher>,
}

#[derive(Default)]
struct SaveState {
    /// What is being written; none where it could not be begun.
    growing: Option<UnfinishedCheckpoint>,
    /// Why this one will not be saved.
    problem: Option<String>,
    /// The disk had no room for the last one.
    full: bool,
    /// By rank.
    files: Vec<Option<RankRecord>>,
    /// Known to be whole: the one that the run went on from, and those that it saved.
    good: Vec<u64>,
    /// What was told last of old checkpoints that stay and of the hint.
    untidy: String,
}

/// When states are saved.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SavePoint {
    pub(crate) step: u64,
    /// Of the steps up to it.
    pub(crate) skipped_in_a_row: u64,
}

/// One checkpoint on its way.
#[derive(Clone, Copy)]
pub(super) struct SaveJob {
    pub(super) step: u64,
    pub(super) skipped_in_a_row: u64,
    words: [f64; control::WORDS],
    /// The update of its step waits.
    pub(super) late: bool,
    started: Instant,
    /// That training waited; `None`: it still does.
    waited: Option<Duration>,
}

impl SaveJob {
    /// With how long training waited; `None`: it still does.
    pub(super) const fn after(self, waited: Option<Duration>) -> Self {
        Self { waited, ..self }
    }
}

/// Why a rank's file is not there: the run's end, or only the checkpoint's.
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
    /// Into `folder`, as often as `train` says. None where it never saves.
    pub(crate) fn new(
        config: &Config,
        data: &Dataset,
        built: &RankLayout,
        folder: &RunFolder,
        options: &RunOptions,
        places: &Places,
    ) -> Option<Arc<Self>> {
        let train = &config.train;
        if !train.saves() {
            return None;
        }
        let mut base = Manifest::new(config, data);
        base.tensors = tensors(&built.decoder);
        base.rollback_history = options.rollback_history();
        let here = options.resume.as_deref().filter(|from| folder.has(from));
        let good = here.map(|from| from.step()).into_iter().collect();
        let ranks = 0..config.world_size();
        let decide = || crate::memory::checkpoint_copy(config, built) > 0;
        // What threads beside the ranks write in several processes, nobody would bring together.
        let spread = options.processes.as_ref().is_some_and(|processes| processes.count() > 1);
        let copies = !spread && options.copies_states.unwrap_or_else(decide);
        let pace = Pace::new(train, options.checkpoint_pause.unwrap_or(TIMEOUT));
        let files = ranks.clone().map(|_| None).collect();
        Some(Arc::new(Self {
            folder: folder.clone(),
            pace,
            keep: train.checkpoint_keep,
            takes_back: train.rollbacks > 0,
            tokens_per_step: (config.batch.global * config.model.seq_len) as u64,
            base,
            most_states: crate::memory::saved_states(config),
            copies: copies.then(|| ranks.map(|_| Mutex::default()).collect()),
            shared: Mutex::new(SaveState { files, good, ..SaveState::default() }),
            writing: Mutex::new(None),
            under_way: Arc::default(),
            cores: places.ranks.iter().map(|place| place.cpus.clone()).collect(),
            watcher: options.watcher.clone(),
        }))
    }

    /// Takes the memory of this rank's copy, where there is one, before the first step.
    ///
    /// # Errors
    /// [`Error::HostMemory`]
    pub(crate) fn open(&self, dev: &Device, trainer: &Trainer) -> Result<(), Error> {
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
        // On this rank's cores, so that it comes from their node's memory.
        room.resize(wanted, 1);
        *lock(&copies[rank.index()]) = Snapshot { pieces, bytes: room };
        Ok(())
    }

    /// Rank 0 asks before each step whether it is time; what it finds holds for all ranks.
    pub(crate) fn look_at_the_clock(&self, step: u64) {
        self.pace.look_at_the_clock(step, self.progress().is_some());
    }

    /// Whether the states after `step` are to be saved whatever happens.
    pub(crate) fn is_due(&self, step: u64) -> bool {
        self.pace.is_due(step)
    }

    /// Saves the states after a step; every rank calls it between steps. What came of it is told, then or later:
    /// what the disk refuses ends no run.
    ///
    /// # Errors
    /// Those of the device and of the meetings.
    pub(crate) fn save(
        self: &Arc<Self>,
        dev: &Device,
        trainer: &Trainer,
        meeting: Tensor,
        SavePoint { step, skipped_in_a_row }: SavePoint,
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
        let (side, late) = (optimizer.state_buffer(dev)?, optimizer.has_delayed_update());
        let pieces = pieces(&trainer.decoder, &|segment| optimizer.owned(segment, side), rank);
        match &self.copies {
            Some(copies) => {
                barrier(dev, meeting)?;
                lock(&copies[rank.index()]).take(dev, pieces)?;
            }
            None => {
                if first {
                    world.held_up(|| self.begin(step, late, skipped_in_a_row));
                }
                barrier(dev, meeting)?;
                if self.is_well_everywhere(rank, world)? {
                    let mut fill = |part: State, to: &mut [u8]| match world.failure().is_some() {
                        // It cannot become whole any more.
                        true => Err(io::Error::other("the run has failed").into()),
                        false => Ok(read(dev, part, to)?),
                    };
                    self.passes(rank.index(), FaultPoint::Writing, step);
                    let file = || self.write(rank.index(), &pieces, late, step, &mut fill);
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
        let job = SaveJob { step, skipped_in_a_row, words, late, started, waited: None };
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

    /// Returns when nothing is being written; rank 0 calls it.
    pub(crate) fn finish(&self, listener: Listener<'_>) {
        if let Some(thread) = lock(&self.writing).take() {
            // It has told whatever went wrong.
            drop(listener.world.held_up(|| thread.join()));
        }
    }

    /// Whether a checkpoint of `step` is on the disk. With nothing being written.
    pub(crate) fn holds(&self, step: u64) -> bool {
        lock(&self.shared).good.contains(&step)
    }

    pub(super) fn passes(&self, rank: usize, place: FaultPoint, step: u64) {
        if let Some(watcher) = &self.watcher {
            watcher.reach(rank, place, step);
        }
    }

    /// See [`SaveProgress::progress`].
    pub(crate) fn progress(&self) -> Option<u64> {
        self.under_way.progress()
    }

    /// This rank's file, straight from its device.
    fn write(
        &self,
        number: usize,
        pieces: &Pieces,
        late: bool,
        step: u64,
        fill: &mut Fill<'_, SaveFailure>,
    ) -> Result<(), Error> {
        match self.write_file(number, pieces, late, step, fill) {
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
        late: bool,
        step: u64,
        fill: &mut Fill<'_, E>,
    ) -> Result<RankRecord, E> {
        let growing = self.growing(step)?;
        let folder = growing.directory();
        write_file(number, &self.base, pieces, late, folder, &self.under_way, fill)
    }

    pub(super) fn wrote(&self, number: usize, written: io::Result<RankRecord>) {
        match written {
            Ok(file) => lock(&self.shared).files[number] = Some(file),
            Err(error) => self.refuse(&error),
        }
    }

    /// The checkpoint that grows.
    pub(super) fn growing(&self, step: u64) -> io::Result<UnfinishedCheckpoint> {
        if let Some(growing) = &lock(&self.shared).growing {
            return Ok(growing.clone());
        }
        let folder = self.folder.find()?;
        let gone = || io::Error::other(format!("{} is gone", self.folder.path().shown()));
        UnfinishedCheckpoint::begun(folder.ok_or_else(gone)?, step)
    }

    pub(super) fn begin(&self, step: u64, late: bool, skipped: u64) {
        {
            let shared = &mut *lock(&self.shared);
            (shared.growing, shared.problem) = (None, None);
            shared.files.iter_mut().for_each(|file| *file = None);
        }
        let room = |folder: &Directory| {
            let shared = &mut *lock(&self.shared);
            let newest = shared.good.last().copied().filter(|_| !self.needs_all(skipped));
            let bytes = checkpoint_bytes(self.bytes(late));
            let full = std::mem::take(&mut shared.full);
            make_room(folder, newest, full, bytes, &Directory::free)
        };
        match self.folder.make().and_then(|folder| UnfinishedCheckpoint::begin(folder, step, room))
        {
            Ok(growing) => lock(&self.shared).growing = Some(growing),
            Err(error) => self.refuse(&error),
        }
    }

    /// Of all states.
    fn bytes(&self, late: bool) -> u64 {
        let elements: usize = self.base.tensors.iter().map(TensorEntry::num_elements).sum();
        4 * states(late).len() as u64 * elements as u64
    }

    pub(super) fn is_well(&self) -> bool {
        lock(&self.shared).problem.is_none()
    }

    /// What the disk says.
    fn refuse(&self, error: &io::Error) {
        lock(&self.shared).full |= is_full(error);
        self.give_up(error.to_string());
    }

    pub(super) fn give_up(&self, why: String) {
        lock(&self.shared).problem.get_or_insert(why);
    }

    /// With every file there: the manifest, the name, and what is told. All that was told before is on the disk
    /// when the checkpoint gets its name.
    pub(super) fn conclude(&self, job: &SaveJob, sender: Option<&Sender<ChannelItem>>) -> Message {
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
            manifest.tokens = job.step * self.tokens_per_step;
            manifest.control = Control::of(&job.words, self.base.control.scaled, job.late);
            let files: Vec<_> = lock(&self.shared).files.iter_mut().map(Option::take).collect();
            hashing = files.iter().flatten().map(|file| file.hashing).max().unwrap_or_default();
            let growing = self.folder.check_lock().and_then(|()| self.growing(job.step));
            let published = growing.and_then(|it| it.publish(manifest, files));
            if let Err(error) = published {
                self.refuse(&error);
            }
        }
        self.verdict(job, hashing)
    }

    /// What stays as it was is the same after each save, and is told once.
    fn warn_untidy(&self, error: &io::Error) {
        let error = error.to_string();
        let told = &mut lock(&self.shared).untidy;
        if *told != error {
            tracing::warn!("{}: cannot tidy up: {error}", self.folder.path().shown());
            *told = error;
        }
    }

    /// A run that is taken back needs one from before the steps that are skipped.
    const fn needs_all(&self, skipped_in_a_row: u64) -> bool {
        self.takes_back && skipped_in_a_row > 0
    }

    /// What is told, and what follows from it: older ones go, or the unfinished one.
    fn verdict(&self, job: &SaveJob, hashing: Duration) -> Message {
        let step = job.step;
        let (growing, problem) = {
            let shared = &mut *lock(&self.shared);
            (shared.growing.take(), shared.problem.take())
        };
        if let Some(why) = problem {
            // If another process has the lock by now, the unfinished checkpoints are its own. What cannot be removed now is
            // removed before the next one.
            let own = growing.filter(|_| self.folder.check_lock().is_ok());
            drop(own.map(|growing| clean(&growing.folder)));
            return Message::NotSaved { step, why };
        }
        let oldest = {
            let good = &mut lock(&self.shared).good;
            good.retain(|good| *good < step);
            good.push(step);
            let needed = self.needs_all(job.skipped_in_a_row);
            let surplus = if needed { 0 } else { good.len().saturating_sub(self.keep) };
            good.drain(..surplus);
            (!needed && good.len() == self.keep).then(|| good[0])
        };
        let tidied = growing.map_or(Ok(()), |UnfinishedCheckpoint { folder, .. }| {
            self.folder.check_lock()?;
            oldest.map_or(Ok(()), |oldest| retain_from(&folder, oldest))?;
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
            bytes: self.bytes(job.late),
        }
    }
}

/// fp32 of `part`, little-endian.
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
