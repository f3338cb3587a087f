//! Writes a checkpoint: a file with each rank's states, the manifest, and the final name. A failure
//! leaves the existing checkpoints unchanged. This module logs nothing.

use super::file_name;
use super::folder::{clean, exchange_by_steps};
use super::header::{Entry, encode};
use super::manifest::{FileEntry, Hash, MANIFEST, Manifest, RangeEntry, TensorEntry, states};
use super::run_folder::of;
use super::save_progress::SaveProgress;
use super::span::{Span, spans};
use device::Rank;
use files::directory::Directory;
use files::names::checkpoint_name;
use files::path_text::ShownPath;
use offload::{OwnedRun, State};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tensor_parallel::Decoder;
use xxhash_rust::xxh3::Xxh3Default;

/// Bytes of states per write.
const BLOCK: usize = 1 << 16;
/// Largest number of unsynced bytes of a file: a slow disk then still shows progress.
const UNSYNCED: usize = 1 << 30;

/// Record of a rank's file, for the manifest.
#[derive(serde::Serialize, serde::Deserialize, Debug)]
pub struct RankRecord {
    pub(crate) entry: FileEntry,
    /// The stored ranges: (number of the tensor, range).
    pub(crate) ranges: Vec<(usize, RangeEntry)>,
    /// Time spent on checksums.
    pub hashing: Duration,
}

/// A part of a tensor that a rank owns as one run of memory.
#[derive(Debug)]
pub struct Piece {
    /// The states, with the gradient if an update is delayed.
    states: Vec<State>,
    pub(crate) span: Span,
}

/// Pieces of each tensor, by the tensor's number, in the order of the model.
pub type Pieces = Vec<(usize, Vec<Piece>)>;

/// An unfinished checkpoint: a directory that gets its final name when every byte is durable.
#[derive(Clone, Debug)]
pub struct UnfinishedCheckpoint {
    step: u64,
    /// The checkpoint folder of the run.
    pub folder: Arc<Directory>,
    unfinished: Arc<Directory>,
}

impl UnfinishedCheckpoint {
    /// Creates the checkpoint of `step`, after a cleanup and after `make_room` succeeds.
    pub fn begin(
        folder: Arc<Directory>,
        step: u64,
        make_room: impl FnOnce(&Directory) -> io::Result<()>,
    ) -> io::Result<Self> {
        // A directory that cannot be removed takes room, but must not cost this checkpoint. If it has
        // the name of this one, the directory of this one cannot be made.
        if let Err(error) = clean(&folder) {
            let folder = folder.path();
            tracing::warn!("{}: cannot remove an unfinished checkpoint: {error}", folder.shown());
        }
        Self::begin_beside(folder, step, make_room)
    }

    /// Creates the checkpoint of `step` next to other unfinished checkpoints of the same command.
    pub(crate) fn begin_beside(
        folder: Arc<Directory>,
        step: u64,
        make_room: impl FnOnce(&Directory) -> io::Result<()>,
    ) -> io::Result<Self> {
        of(folder.path(), make_room(&folder))?;
        let unfinished = unfinished(step);
        of(&folder.called(&unfinished), folder.make(&unfinished))?;
        // Ignore errors of the removal: the first error is the useful one.
        let within = Arc::clone(&folder);
        Self::begun(folder, step).inspect_err(|_| drop(within.remove(&unfinished)))
    }

    /// Opens the unfinished checkpoint of `step` in `folder`, created by this or another process.
    pub fn begun(folder: Arc<Directory>, step: u64) -> io::Result<Self> {
        let unfinished = unfinished(step);
        let opened = of(&folder.called(&unfinished), folder.folder(&unfinished))?;
        Ok(Self { step, folder, unfinished: Arc::new(opened) })
    }

    /// Directory for the files.
    pub fn directory(&self) -> &Directory {
        &self.unfinished
    }

    /// Path with the final name, for messages.
    pub(crate) fn path(&self) -> PathBuf {
        self.folder.called(&checkpoint_name(self.step))
    }

    /// Writes the manifest of the ranks' files, then gives the checkpoint its final name; both
    /// durable. `replaces`: the run has saved this step before, and this checkpoint takes the place
    /// of the other at once.
    pub fn publish(
        &self,
        manifest: Manifest,
        files: Vec<Option<RankRecord>>,
        replaces: bool,
    ) -> io::Result<()> {
        seal(&self.unfinished, manifest, files)?;
        if !replaces || !self.folder.has(&checkpoint_name(self.step)) {
            return self.name();
        }
        let (new, name) = (unfinished(self.step), checkpoint_name(self.step));
        let swapped = match self.folder.exchange(&new, &name) {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                exchange_by_steps(&self.folder, &new, &name)
            }
            swapped => swapped,
        };
        of(self.unfinished.path(), swapped)?;
        of(self.folder.path(), self.folder.sync())?;
        // The other checkpoint has the name of an unfinished one now.
        self.remove()
    }

    /// Renames the directory to its final name and makes the rename durable.
    pub(crate) fn name(&self) -> io::Result<()> {
        let named = self.folder.rename(&unfinished(self.step), &checkpoint_name(self.step));
        of(self.unfinished.path(), named)?;
        of(self.folder.path(), self.folder.sync())
    }

    /// Removes the directory, if it has no final name yet.
    pub(crate) fn remove(&self) -> io::Result<()> {
        self.folder.remove(&unfinished(self.step))
    }
}

/// Name of the directory of `step` until the checkpoint is complete.
fn unfinished(step: u64) -> String {
    checkpoint_name(step) + ".tmp"
}

/// Writes the manifest of the ranks' files in `unfinished`, and makes it durable.
pub fn seal(
    unfinished: &Directory,
    mut manifest: Manifest,
    files: Vec<Option<RankRecord>>,
) -> io::Result<()> {
    for (number, file) in files.into_iter().enumerate() {
        let missing = || io::Error::other(format!("rank {number} wrote nothing"));
        let RankRecord { entry, ranges, .. } = file.ok_or_else(missing)?;
        manifest.files.push(entry);
        for (tensor, range) in ranges {
            manifest.tensors[tensor].ranges.push(RangeEntry { file: number, ..range });
        }
    }
    of(&unfinished.called(MANIFEST), write_whole(unfinished, &manifest.encode()?))?;
    of(unfinished.path(), unfinished.sync())
}

fn write_whole(unfinished: &Directory, manifest: &[u8]) -> io::Result<()> {
    let mut file = unfinished.create_new(MANIFEST)?;
    file.write_all(manifest)?;
    file.sync_all()
}

/// The tensors of a model, without ranges.
pub fn tensors(gpt: &Decoder) -> Vec<TensorEntry> {
    let tensor = |p: &tensor_parallel::Param| TensorEntry {
        name: p.name.clone(),
        shape: [p.global.0, p.global.1],
        ranges: Vec::new(),
    };
    gpt.segments().iter().flat_map(|s| &s.params).map(tensor).collect()
}

/// Entries of the header of a rank's file.
pub(crate) fn piece_entries(
    tensors: &[TensorEntry],
    states: &[&str],
    pieces: &[(usize, Vec<Piece>)],
) -> Vec<Entry> {
    let entry = |(tensor, pieces): &(usize, Vec<Piece>)| {
        let len = pieces.iter().map(|p| p.span.len()).sum();
        let name = &tensors[*tensor].name;
        states.iter().map(move |state| Entry { name: format!("{name}.{state}"), len })
    };
    pieces.iter().flat_map(entry).collect()
}

/// The pieces that `rank` writes, by tensor. If several tensor-parallel ranks hold the same
/// elements, only the first of them writes them.
pub fn pieces(gpt: &Decoder, owned: &dyn Fn(usize) -> Vec<OwnedRun>, rank: Rank) -> Pieces {
    let mut all = Vec::new();
    let mut tensor = 0;
    for (segment, layout) in gpt.segments().iter().enumerate() {
        let owned = owned(segment);
        for param in &layout.params {
            let mut pieces = Vec::new();
            let owner = param.is_owner(rank.tp);
            let runs = if owner { param.runs(rank.tp, rank.tp_size) } else { Vec::new() };
            for owned in &owned {
                let end = owned.start + owned.states[0].len();
                // Start in the segment's flat buffer, and range in the whole tensor.
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
                    let all = owned.states.into_iter().chain(owned.delayed_gradient);
                    let states = all.map(|state| state.slice(part.clone())).collect();
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

/// Bytes of the states in `pieces`.
pub fn bytes(pieces: &Pieces) -> usize {
    pieces.iter().flat_map(|(_, pieces)| pieces).map(|p| 4 * p.states.len() * p.span.len()).sum()
}

/// Passes all states of `pieces` to `take`, in the order of the file.
///
/// # Errors
/// The errors of `take`.
pub fn in_order<E>(pieces: &Pieces, take: &mut dyn FnMut(State) -> Result<(), E>) -> Result<(), E> {
    for (_, pieces) in pieces {
        for state in 0..pieces.first().map_or(0, |piece| piece.states.len()) {
            pieces.iter().try_for_each(|piece| take(piece.states[state]))?;
        }
    }
    Ok(())
}

/// Source of a rank's states: writes the bytes of the given part of a state into the buffer.
pub type Fill<'a, E> = dyn FnMut(State, &mut [u8]) -> Result<(), E> + 'a;

/// Writes the file of rank `number` into `folder` and syncs it. If the update is delayed
/// (`is_delayed`), the gradient is a state too. The hashes cover the bytes that `fill` gave.
///
/// # Errors
/// The errors of the disk, with the name of the file, and the errors of `fill`.
pub fn write_file<E: From<io::Error>>(
    number: usize,
    base: &Manifest,
    pieces: &Pieces,
    is_delayed: bool,
    folder: &Directory,
    under_way: &SaveProgress,
    fill: &mut Fill<'_, E>,
) -> Result<RankRecord, E> {
    let states = states(is_delayed);
    let entries = piece_entries(&base.tensors, states, pieces);
    let header = encode(&entries);
    let path = folder.called(&file_name(number));
    let file = of(&path, folder.create_new(&file_name(number)))?;
    let mut file =
        TrackedFile { file: BufWriter::with_capacity(1 << 20, file), under_way, unsynced: 0 };
    of(&path, file.write_all(&header))?;
    let mut ranges = Vec::new();
    let mut hashing = Duration::ZERO;
    for (tensor, pieces) in pieces {
        let mut hashes: Vec<Vec<Hash>> = vec![Vec::new(); pieces.len()];
        for state in 0..states.len() {
            for (piece, hashes) in pieces.iter().zip(&mut hashes) {
                let state = piece.states[state];
                hashes.push(write_state(state, &path, &mut file, fill, &mut hashing)?);
            }
        }
        for (piece, hash) in pieces.iter().zip(hashes) {
            ranges.push((*tensor, RangeEntry { file: number, span: piece.span, hash }));
        }
    }
    of(&path, file.flush())?;
    of(&path, file.file.get_ref().sync_all())?;
    under_way.moves();
    let data: u64 = entries.iter().map(|e| 4 * e.len as u64).sum();
    let entry = FileEntry { bytes: header.len() as u64 + data, header: Hash::of(&header) };
    Ok(RankRecord { entry, ranges, hashing })
}

/// A file that reports its progress and keeps at most [`UNSYNCED`] bytes unsynced.
struct TrackedFile<'a> {
    file: BufWriter<File>,
    under_way: &'a SaveProgress,
    unsynced: usize,
}

impl Write for TrackedFile<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.under_way.moves();
        self.unsynced += written;
        if self.unsynced >= UNSYNCED {
            self.file.flush()?;
            self.file.get_ref().sync_data()?;
            self.unsynced = 0;
        }
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

fn write_state<E: From<io::Error>>(
    state: State,
    path: &Path,
    file: &mut impl Write,
    fill: &mut Fill<'_, E>,
    hashing: &mut Duration,
) -> Result<Hash, E> {
    let mut hasher = Xxh3Default::new();
    let mut bytes = vec![0; BLOCK.min(4 * state.len())];
    for from in (0..state.len()).step_by(BLOCK / 4) {
        let part = state.slice(from..(from + BLOCK / 4).min(state.len()));
        let filled = &mut bytes[..4 * part.len()];
        fill(part, filled)?;
        let began = Instant::now();
        hasher.update(filled);
        *hashing += began.elapsed();
        of(path, file.write_all(filled))?;
    }
    Ok(Hash::end(&hasher))
}
