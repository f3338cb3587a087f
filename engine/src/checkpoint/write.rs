//! Saving. Every rank writes what it owns into a file of its own; when all have come through, the manifest is
//! written and the directory gets its name. Whatever fails, the checkpoints that are there stay as they are.

use super::folder::{clean, hint, name, retain_from};
use super::header::{Entry, encode};
use super::manifest::{
    Control, FileEntry, Hash, MANIFEST, Manifest, RangeEntry, TensorEntry, states,
};
use super::span::{Span, spans};
use super::{Checkpoint, file_name};
use crate::config::Config;
use crate::data::Dataset;
use crate::messages::{Listener, Message};
use crate::run::meet;
use device::numerics::control;
use device::{Device, Error, Rank, Tensor};
use offload::{Optimizer, State};
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Instant;
use tensor_parallel::{Gpt, Split};
use xxhash_rust::xxh3::Xxh3Default;

/// Elements read from a device at once.
const BLOCK: usize = 1 << 14;

/// The ranks' common work on the checkpoints of a run.
pub(crate) struct Saver {
    folder: PathBuf,
    every: u64,
    keep: usize,
    tokens_per_step: u64,
    /// What all checkpoints of this run say, and the tensors without ranges.
    base: Manifest,
    shared: Mutex<Shared>,
}

struct Shared {
    /// Why this one will not be saved.
    problem: Option<String>,
    /// By rank.
    files: Vec<Option<Written>>,
    /// Known to be whole: the one that the run went on from, and those that it saved.
    good: Vec<u64>,
    started: Instant,
}

/// What a rank wrote.
struct Written {
    entry: FileEntry,
    /// (tensor, its range)
    ranges: Vec<(usize, RangeEntry)>,
}

/// A part of a tensor that this rank owns in one run.
struct Piece {
    /// And the gradient of an update that waits.
    states: Vec<State>,
    span: Span,
}

/// Why a rank's file is not there: the run's end, or only the checkpoint's.
enum Fault {
    Device(Error),
    Io(io::Error),
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Self::Device(error)
    }
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl Saver {
    /// Into `folder`, after `train.checkpoint_every` steps each; `resumed` is where the run goes on from.
    pub(crate) fn new(
        (config, data): (&Config, &Dataset),
        gpt: &Gpt,
        folder: &Path,
        resumed: Option<&Checkpoint>,
    ) -> Self {
        let mut base = Manifest::new(config, data);
        let tensor = |p: &tensor_parallel::Param| TensorEntry {
            name: p.name.clone(),
            shape: [p.global.0, p.global.1],
            ranges: Vec::new(),
        };
        base.tensors.extend(gpt.segments().iter().flat_map(|s| &s.params).map(tensor));
        let here = resumed.filter(|from| from.path().parent() == Some(folder));
        let good = here.map(Checkpoint::step).into_iter().collect();
        let files = (0..crate::build::world_size(config)).map(|_| None).collect();
        Self {
            folder: folder.to_owned(),
            every: config.train.checkpoint_every,
            keep: config.train.checkpoint_keep,
            tokens_per_step: (config.batch.global * config.model.seq_len) as u64,
            base,
            shared: Mutex::new(Shared { problem: None, files, good, started: Instant::now() }),
        }
    }

    /// Whether the states after `step` are to be saved whatever happens.
    pub(crate) const fn is_due(&self, step: u64) -> bool {
        step.is_multiple_of(self.every)
    }

    /// Saves the states after `step`; every rank calls it between steps. Rank 0 tells what came of it: what the
    /// disk refuses ends no run. All that it told before has been taken down when the checkpoint gets its name.
    ///
    /// # Errors
    /// Those of the device and of the meetings.
    pub(crate) fn save(
        &self,
        dev: &Device,
        (optimizer, gpt, meeting): (&Optimizer, &Gpt, Tensor),
        step: u64,
        listener: Listener<'_>,
    ) -> Result<(), Error> {
        let world = listener.world;
        dev.sync_all()?;
        let (first, late) = (dev.rank().index() == 0, optimizer.is_late());
        let unfinished = self.folder.join(name(step) + ".tmp");
        if first {
            self.with(|shared| {
                shared.problem = None;
                shared.started = Instant::now();
                shared.files.iter_mut().for_each(|file| *file = None);
            });
            world.held_up(|| self.attempt(|| self.begin(&unfinished, late)));
        }
        meet(dev, meeting)?;
        if self.with(|shared| shared.problem.is_none()) {
            let pieces = pieces(gpt, optimizer, dev.rank());
            match world.held_up(|| write_file(dev, &self.base, (&pieces, late), &unfinished)) {
                Ok(file) => self.with(|shared| shared.files[dev.rank().index()] = Some(file)),
                Err(Fault::Device(error)) => return Err(error),
                Err(Fault::Io(error)) => {
                    let file = unfinished.join(file_name(dev.rank().index()));
                    self.give_up(&format!("{}: {error}", file.display()));
                }
            }
        }
        meet(dev, meeting)?;
        if !first {
            return Ok(());
        }
        let mut words = [0.0; control::WORDS];
        dev.read(optimizer.control(), &mut words)?;
        let message = world.held_up(|| {
            listener.flush();
            self.attempt(|| self.publish(&unfinished, step, (&words, late)));
            self.verdict(step, &unfinished, late)
        });
        listener.tell(message);
        Ok(())
    }

    /// Does something on the disk unless the checkpoint has failed already.
    fn attempt(&self, action: impl FnOnce() -> io::Result<()>) {
        if self.with(|shared| shared.problem.is_none())
            && let Err(error) = action()
        {
            self.give_up(&format!("{}: {error}", self.folder.display()));
        }
    }

    fn give_up(&self, why: &str) {
        self.with(|shared| {
            shared.problem.get_or_insert_with(|| why.to_owned());
        });
    }

    fn with<R>(&self, f: impl FnOnce(&mut Shared) -> R) -> R {
        f(&mut self.shared.lock().unwrap_or_else(|e| e.into_inner()))
    }

    /// An empty directory, and room for what comes into it.
    fn begin(&self, unfinished: &Path, late: bool) -> io::Result<()> {
        if !self.folder.is_dir() {
            fs::create_dir_all(&self.folder)?;
            self.folder.parent().map_or(Ok(()), sync)?;
        }
        clean(&self.folder)?;
        let states = self.bytes(late);
        room(&self.folder, states + states / 10)?;
        fs::create_dir(unfinished)
    }

    /// The manifest, then the name.
    fn publish(
        &self,
        unfinished: &Path,
        step: u64,
        (words, late): (&[f64; control::WORDS], bool),
    ) -> io::Result<()> {
        let mut manifest = self.base.clone();
        manifest.step = step;
        manifest.tokens = step * self.tokens_per_step;
        manifest.control = Control::of(words, self.base.control.scaled, late);
        let files =
            self.with(|shared| shared.files.iter_mut().map(Option::take).collect::<Vec<_>>());
        for (number, file) in files.into_iter().enumerate() {
            let missing = || io::Error::other(format!("rank {number} wrote nothing"));
            let Written { entry, ranges } = file.ok_or_else(missing)?;
            manifest.files.push(entry);
            for (tensor, range) in ranges {
                manifest.tensors[tensor].ranges.push(RangeEntry { file: number, ..range });
            }
        }
        let mut file = File::create_new(unfinished.join(MANIFEST))?;
        file.write_all(&manifest.encode()?)?;
        file.sync_all()?;
        sync(unfinished)?;
        fs::rename(unfinished, self.folder.join(name(step)))?;
        sync(&self.folder)
    }

    /// What is told, and what follows from it: older ones go, or the unfinished one.
    fn verdict(&self, step: u64, unfinished: &Path, late: bool) -> Message {
        let (problem, seconds) =
            self.with(|shared| (shared.problem.take(), shared.started.elapsed().as_secs_f64()));
        if let Some(why) = problem {
            // What cannot be removed now is removed before the next one.
            let _ = clean(&self.folder);
            drop(fs::remove_dir_all(unfinished));
            return Message::NotSaved { step, why };
        }
        let oldest = self.with(|shared| {
            shared.good.retain(|good| *good < step);
            shared.good.push(step);
            let surplus = shared.good.len().saturating_sub(self.keep);
            shared.good.drain(..surplus);
            (shared.good.len() == self.keep).then(|| shared.good[0])
        });
        let tidied = oldest.map_or(Ok(()), |oldest| retain_from(&self.folder, oldest));
        if let Err(error) = tidied.and_then(|()| hint(&self.folder, step)) {
            tracing::warn!("{}: cannot tidy up: {error}", self.folder.display());
        }
        Message::Saved { step, seconds, bytes: self.bytes(late) }
    }

    /// Of all states together.
    fn bytes(&self, late: bool) -> u64 {
        let elements: usize = self.base.tensors.iter().map(TensorEntry::len).sum();
        4 * states(late).len() as u64 * elements as u64
    }
}

/// What `rank` writes, by tensor. Of what every tensor-parallel rank holds the first one's copy is taken.
fn pieces(gpt: &Gpt, optimizer: &Optimizer, rank: Rank) -> Vec<(usize, Vec<Piece>)> {
    let mut all = Vec::new();
    let mut tensor = 0;
    for (segment, layout) in gpt.segments().iter().enumerate() {
        let owned = optimizer.owned(segment);
        for param in &layout.params {
            let mut pieces = Vec::new();
            let replica = rank.tp > 0 && param.split == Split::Replicated;
            let runs = if replica { Vec::new() } else { param.runs(rank.tp, rank.tp_size) };
            for owned in &owned {
                let end = owned.start + owned.states[0].len();
                // In the segment's flat buffer, and where that is in the whole tensor.
                let inside = runs.iter().filter_map(|run| {
                    let at = param.range.start + run.local.start;
                    let (from, to) = (at.max(owned.start), (at + run.local.len()).min(end));
                    (from < to).then(|| (from, run.global + from - at..run.global + to - at))
                });
                let inside: Vec<_> = inside.collect();
                let mut from = inside.first().map_or(0, |(from, _)| from - owned.start);
                for span in spans(inside.into_iter().map(|(_, global)| global)) {
                    let part = from..from + span.len();
                    from = part.end;
                    let states = owned.states.into_iter().chain(owned.gradient);
                    let states = states.map(|state| state.slice(part.clone())).collect();
                    pieces.push(Piece { states, span });
                }
            }
            if !pieces.is_empty() {
                all.push((tensor, pieces));
            }
            tensor += 1;
        }
    }
    all
}

/// Writes a rank's file to the disk. Hashes are of what was in memory.
fn write_file(
    dev: &Device,
    base: &Manifest,
    (pieces, late): (&[(usize, Vec<Piece>)], bool),
    folder: &Path,
) -> Result<Written, Fault> {
    let number = dev.rank().index();
    let states = states(late);
    let entry = |(tensor, pieces): &(usize, Vec<Piece>)| {
        let len = pieces.iter().map(|p| p.span.len()).sum();
        let name = &base.tensors[*tensor].name;
        states.iter().map(move |state| Entry { name: format!("{name}.{state}"), len })
    };
    let entries: Vec<Entry> = pieces.iter().flat_map(entry).collect();
    let header = encode(&entries);
    let mut file =
        BufWriter::with_capacity(1 << 20, File::create_new(folder.join(file_name(number)))?);
    file.write_all(&header)?;
    let mut ranges = Vec::new();
    for (tensor, pieces) in pieces {
        let mut hashes: Vec<Vec<Hash>> = vec![Vec::new(); pieces.len()];
        for state in 0..states.len() {
            for (piece, hashes) in pieces.iter().zip(&mut hashes) {
                hashes.push(write_state(dev, piece.states[state], &mut file)?);
            }
        }
        for (piece, hash) in pieces.iter().zip(hashes) {
            ranges.push((*tensor, RangeEntry { file: number, span: piece.span, hash }));
        }
    }
    file.flush()?;
    file.get_ref().sync_all()?;
    let data: u64 = entries.iter().map(|e| 4 * e.len as u64).sum();
    let entry = FileEntry { bytes: header.len() as u64 + data, header: Hash::of(&header) };
    Ok(Written { entry, ranges })
}

fn write_state(dev: &Device, state: State, file: &mut impl Write) -> Result<Hash, Fault> {
    let mut hasher = Xxh3Default::new();
    let (mut values, mut bytes) = (vec![0.0; BLOCK], vec![0; 4 * BLOCK]);
    for from in (0..state.len()).step_by(BLOCK) {
        let n = BLOCK.min(state.len() - from);
        state.slice(from..from + n).read(dev, &mut values[..n])?;
        let filled = &mut bytes[..4 * n];
        let pairs = filled.chunks_exact_mut(4).zip(&values);
        pairs.for_each(|(b, x)| b.copy_from_slice(&(*x as f32).to_le_bytes()));
        hasher.update(filled);
        file.write_all(filled)?;
    }
    Ok(Hash::end(&hasher))
}

/// An error when fewer than `bytes` are free.
fn room(folder: &Path, bytes: u64) -> io::Result<()> {
    let disk = rustix::fs::statvfs(folder)?;
    let free = disk.f_bavail.saturating_mul(disk.f_frsize);
    if free >= bytes {
        return Ok(());
    }
    let size = crate::config::format_bytes;
    Err(io::Error::other(format!("no space: {} needed, {} free", size(bytes), size(free))))
}

/// Makes names in a directory durable.
fn sync(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}
