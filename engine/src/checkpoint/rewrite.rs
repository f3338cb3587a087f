//! Checkpoints that no run writes: one laid out anew for other ranks, or one of imported weights. The files are, byte for
//! byte, those that the ranks of such a run would write.

use super::folder::name;
use super::header::{Entry, encode};
use super::inspect::distances;
use super::manifest::{Control, FileEntry, Hash, Manifest, RangeEntry};
use super::write::{Written, piece_entries, pieces, publish, room, tensors};
use super::{Checkpoint, CheckpointError, FOLDER, file_name};
use crate::build::Built;
use crate::config::Config;
use crate::data::Dataset;
use crate::run_dir::sync_folder;
use device::Rank;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;
use xxhash_rust::xxh3::Xxh3Default;

/// Elements read at once.
const BLOCK: usize = 1 << 16;

/// Why a checkpoint was not rewritten.
#[derive(Debug, thiserror::Error)]
pub enum RewriteError {
    /// What it is made of.
    #[error(transparent)]
    Read(#[from] CheckpointError),
    /// The disk.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// A file or a folder.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// What it is made of, where that is no checkpoint.
    #[error("{0}")]
    Source(String),
    /// A defect.
    #[error("{} was written and reads otherwise: {problem}", path.display())]
    Unequal {
        /// The new one.
        path: PathBuf,
        /// The first tensor that differs.
        problem: String,
    },
}

/// Elements of a state of a tensor, by their numbers in the order of the model.
pub(crate) type Values<'a> =
    dyn Fn((usize, usize), Range<usize>, &mut [f32]) -> Result<(), RewriteError> + 'a;

/// Writes `from` as the ranks of `config` would, into the run directory `run`; every bit of it is compared afterwards.
///
/// # Errors
/// [`RewriteError`]; nothing named like a checkpoint is left then.
pub fn reshard(
    from: &Checkpoint,
    (config, built): (&Config, &Built),
    run: &Path,
) -> Result<PathBuf, RewriteError> {
    from.check_model(&built.gpt)?;
    let mut manifest = from.manifest().clone();
    manifest.config = config.to_ron();
    manifest.onebox = env!("CARGO_PKG_VERSION").into();
    let values = |which, wanted, out: &mut [f32]| Ok(from.read(which, wanted, out)?);
    let path = write(manifest, built, run, &values)?;
    let written = Checkpoint::open(&path, from.step())?;
    let mut unequal = None;
    distances(from, &written, &mut |d| {
        if d.states != Ok([None; 4]) {
            unequal.get_or_insert(d.name);
        }
    })?;
    unequal.map_or(Ok(()), |problem| Err(RewriteError::Unequal { path: path.clone(), problem }))?;
    Ok(path)
}

/// Writes parameters before the first step, with moments of zero, into the run directory `run`.
///
/// # Errors
/// As [`reshard`].
pub(crate) fn start(
    (config, built, data): (&Config, &Built, &Dataset),
    run: &Path,
    parameters: &Values<'_>,
) -> Result<PathBuf, RewriteError> {
    let mut manifest = Manifest::new(config, data);
    manifest.control = Control::of(&built.layout.initial_control(), manifest.control.scaled, false);
    let path = write(manifest, built, run, &|(tensor, state), wanted, out| match state {
        0 => parameters((tensor, state), wanted, out),
        _ => {
            out.fill(0.0);
            Ok(())
        }
    })?;
    Checkpoint::open(&path, 0)?;
    Ok(path)
}

/// All files under another name, then the manifest, then the name.
fn write(
    mut manifest: Manifest,
    built: &Built,
    run: &Path,
    values: &Values<'_>,
) -> Result<PathBuf, RewriteError> {
    let folder = run.join(FOLDER);
    let unfinished = folder.join(name(manifest.step) + ".tmp");
    manifest.tensors = tensors(&built.gpt);
    manifest.files = Vec::new();
    let at = |path: &Path| {
        let path = path.to_owned();
        move |source| RewriteError::Write { path, source }
    };
    fs::create_dir_all(&folder).map_err(at(&folder))?;
    let states: usize =
        manifest.tensors.iter().map(|t| 4 * manifest.states().len() * t.len()).sum();
    room(&folder, states as u64 + states as u64 / 10).map_err(at(&folder))?;
    fs::create_dir(&unfinished).map_err(at(&unfinished))?;
    let path = folder.join(name(manifest.step));
    let done = write_files(&manifest, built, &unfinished, values).and_then(|files| {
        let published = publish((&unfinished, &path), manifest, files);
        published.and_then(|()| sync_folder(run)).map_err(at(&path))
    });
    if done.is_err() {
        // The first error is the one to tell.
        drop(fs::remove_dir_all(&unfinished));
    }
    done.map(|()| path)
}

/// Of every rank, in order.
fn write_files(
    manifest: &Manifest,
    built: &Built,
    folder: &Path,
    values: &Values<'_>,
) -> Result<Vec<Option<Written>>, RewriteError> {
    let (tp_size, dp_size) = (built.gpt.shape().tp_size, built.layout.dp_size());
    let file = |rank: Rank| {
        let path = folder.join(file_name(rank.index()));
        write_file(manifest, built, rank, &path, values).map(Some)
    };
    Rank::all(tp_size, dp_size).map(file).collect()
}

fn write_file(
    manifest: &Manifest,
    built: &Built,
    rank: Rank,
    path: &Path,
    values: &Values<'_>,
) -> Result<Written, RewriteError> {
    let failed = |source| RewriteError::Write { path: path.to_owned(), source };
    let all = pieces(&built.gpt, &|segment| built.layout.owned(segment, rank.dp, None), rank);
    let states = manifest.states();
    let entries: Vec<Entry> = piece_entries((&manifest.tensors, states), &all);
    let header = encode(&entries);
    let file = File::create_new(path).map_err(failed)?;
    let mut file = BufWriter::with_capacity(1 << 20, file);
    file.write_all(&header).map_err(failed)?;
    let mut ranges = Vec::new();
    for (tensor, pieces) in &all {
        let first = ranges.len();
        for piece in pieces {
            let hash = vec![Hash::of(&[]); states.len()];
            ranges.push((*tensor, RangeEntry { file: rank.index(), span: piece.span, hash }));
        }
        for state in 0..states.len() {
            for (piece, (_, range)) in pieces.iter().zip(&mut ranges[first..]) {
                let mut hasher = Xxh3Default::new();
                for run in piece.span.runs() {
                    for from in run.clone().step_by(BLOCK) {
                        let mut block = vec![0.0; BLOCK.min(run.end - from)];
                        values((*tensor, state), from..from + block.len(), &mut block)?;
                        let bytes: Vec<u8> = block.iter().flat_map(|x| x.to_le_bytes()).collect();
                        hasher.update(&bytes);
                        file.write_all(&bytes).map_err(failed)?;
                    }
                }
                range.hash[state] = Hash::end(&hasher);
            }
        }
    }
    file.flush().and_then(|()| file.get_ref().sync_all()).map_err(failed)?;
    let data: u64 = entries.iter().map(|e| 4 * e.len as u64).sum();
    let entry = FileEntry { bytes: header.len() as u64 + data, header: Hash::of(&header) };
    Ok(Written { entry, ranges, hashing: Duration::ZERO })
}
