//! Checkpoints that are not written by a run: resharded for other ranks, or created from imported
//! weights. Their files are byte for byte those that the ranks of a run would write.

use super::disk_space::{checkpoint_bytes, room};
use super::header::{Entry, encode};
use super::inspect::distances;
use super::manifest::{Control, FileEntry, Hash, Manifest, RangeEntry};
use super::write::{
    Piece, Pieces, RankRecord, UnfinishedCheckpoint, piece_entries, pieces, seal, tensors,
};
use super::{Checkpoint, CheckpointError, RunFolder, TensorState, file_name};
use config::Config;
use data::Dataset;
use device::Rank;
use files::directory::Directory;
use files::path_text::ShownPath;
use layout::build::RankLayout;
use rayon::iter::{IntoParallelIterator, ParallelBridge, ParallelIterator};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use xxhash_rust::xxh3::Xxh3Default;

/// Elements per read.
const BLOCK: usize = 1 << 16;

/// Reasons why a checkpoint was not rewritten.
#[derive(Debug, thiserror::Error)]
pub enum RewriteError {
    /// The source checkpoint cannot be used.
    #[error(transparent)]
    Read(#[from] CheckpointError),
    /// The new checkpoint cannot be written.
    #[error("cannot write {}: {source}", path.shown())]
    Write {
        /// The file or folder that cannot be written.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// A source that is not a checkpoint cannot be used.
    #[error("{0}")]
    Source(String),
    /// The new checkpoint differs from its source: a defect of onebox.
    #[error("{} was written and reads otherwise: {problem}", path.shown())]
    Unequal {
        /// The new checkpoint.
        path: PathBuf,
        /// The first tensor that differs.
        problem: String,
    },
}

/// Reads a range of elements of a state of a tensor into a buffer.
pub type Values<'a> =
    dyn Fn(TensorState, Range<usize>, &mut [f32]) -> Result<(), RewriteError> + Sync + 'a;

/// The source of the tensors of a new checkpoint.
#[derive(Clone, Copy)]
#[expect(missing_debug_implementations, reason = "it has two functions")]
pub struct TensorSource<'a> {
    /// Loads a tensor, by its number in the model. It may use all cores: no other work runs then.
    pub(crate) begin: &'a dyn Fn(usize) -> Result<(), RewriteError>,
    /// Reads elements of the loaded tensor. All cores call it, so it must not wait for another
    /// core.
    pub(crate) values: &'a Values<'a>,
}

/// A complete, durable and checked checkpoint without its final name. It gets the name after all
/// other files of the run directory exist, in an unfinished folder ([`RunFolder::unfinished`]); so
/// after a killed command the directory has no checkpoint, and the command can be repeated. Dropping
/// it without a name removes it.
#[derive(Debug)]
pub struct SealedCheckpoint {
    folder: RunFolder,
    growing: UnfinishedCheckpoint,
}

impl SealedCheckpoint {
    /// Renames the checkpoint to its final name and returns its path.
    ///
    /// # Errors
    /// [`RewriteError::Write`]
    pub fn publish(self) -> Result<PathBuf, RewriteError> {
        let named = self.growing.name().and_then(|()| self.folder.sync_run());
        named.map_err(failed(&self.growing.path()))?;
        Ok(self.growing.path())
    }
}

impl Drop for SealedCheckpoint {
    fn drop(&mut self) {
        // After `publish` there is nothing to remove. An earlier error is the one to report.
        drop(self.growing.remove());
    }
}

/// Writes each checkpoint of `all` as the ranks of `config` would, into `folder`, and compares every
/// bit afterwards. A best checkpoint that is not among them is forgotten.
///
/// # Errors
/// [`RewriteError`]; then no file or folder with the name of a checkpoint is left.
pub fn reshard(
    all: &[&Checkpoint],
    config: &Config,
    built: &RankLayout,
    folder: &RunFolder,
) -> Result<Vec<SealedCheckpoint>, RewriteError> {
    let steps: Vec<u64> = all.iter().map(|from| from.step()).collect();
    let mut sealed = Vec::new();
    for from in all {
        let begin = if sealed.is_empty() { Placement::Alone } else { Placement::Beside };
        sealed.push(reshard_one(from, config, built, folder, begin, &steps)?);
    }
    Ok(sealed)
}

/// Whether a checkpoint is the first that a command writes, or stands next to unfinished checkpoints.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Placement {
    Alone,
    Beside,
}

fn reshard_one(
    from: &Checkpoint,
    config: &Config,
    built: &RankLayout,
    folder: &RunFolder,
    placement: Placement,
    steps: &[u64],
) -> Result<SealedCheckpoint, RewriteError> {
    from.check_model(&built.decoder)?;
    let mut manifest = from.manifest().clone();
    manifest.evaluations = manifest.evaluations.map(|seen| {
        let best = seen.best().filter(|best| steps.contains(&best.step));
        seen.with_best(best)
    });
    manifest.config = config.to_ron();
    manifest.onebox = env!("CARGO_PKG_VERSION").into();
    let reader = from.reader();
    let values = |which, wanted, out: &mut [f32]| Ok(reader.read(which, wanted, out)?);
    let source = TensorSource { begin: &|_| Ok(()), values: &values };
    let sealed = write(manifest, built, folder, source, placement)?;
    let written = Checkpoint::within(sealed.growing.directory(), from.step())?;
    let mut unequal = None;
    distances(from, &written, &mut |d| {
        if d.states != Ok([None; 4]) {
            unequal.get_or_insert(d.name);
        }
    })?;
    match unequal {
        Some(problem) => {
            let path = sealed.growing.directory().path().to_owned();
            Err(RewriteError::Unequal { path, problem })
        }
        None => Ok(sealed),
    }
}

/// Writes parameters as a checkpoint of step 0, with zero moments, into `folder`.
///
/// # Errors
/// As for [`reshard`].
pub fn start(
    config: &Config,
    built: &RankLayout,
    data: &Dataset,
    folder: &RunFolder,
    parameters: TensorSource<'_>,
) -> Result<SealedCheckpoint, RewriteError> {
    let mut manifest = Manifest::new(config, data);
    manifest.control =
        Control::of(&built.optimizer.initial_control(), manifest.control.scaled, false);
    let values = |which: TensorState, wanted: Range<usize>, out: &mut [f32]| match which.state {
        0 => (parameters.values)(which, wanted, out),
        _ => {
            out.fill(0.0);
            Ok(())
        }
    };
    let source = TensorSource { values: &values, ..parameters };
    let sealed = write(manifest, built, folder, source, Placement::Alone)?;
    Checkpoint::within(sealed.growing.directory(), 0)?;
    Ok(sealed)
}

/// Writes all files, then the manifest, under a temporary name.
fn write(
    mut manifest: Manifest,
    built: &RankLayout,
    folder: &RunFolder,
    source: TensorSource<'_>,
    placement: Placement,
) -> Result<SealedCheckpoint, RewriteError> {
    manifest.tensors = tensors(&built.decoder);
    manifest.files = Vec::new();
    let states: usize =
        manifest.tensors.iter().map(|t| 4 * manifest.states().len() * t.num_elements()).sum();
    let make_room = |folder: &Directory| room(folder, checkpoint_bytes(states as u64));
    let begin = |within| match placement {
        Placement::Alone => UnfinishedCheckpoint::begin(within, manifest.step, make_room),
        Placement::Beside => UnfinishedCheckpoint::begin_beside(within, manifest.step, make_room),
    };
    let growing = folder.make().and_then(begin).map_err(failed(&folder.path()))?;
    let sealed = SealedCheckpoint { folder: folder.clone(), growing };
    let files = write_files(&manifest, built, sealed.growing.directory(), source)?;
    let whole = seal(sealed.growing.directory(), manifest, files);
    whole.map_err(failed(&sealed.growing.path()))?;
    Ok(sealed)
}

/// Writes the files of all ranks. It proceeds tensor by tensor, so that the source is read once.
/// Every state of every rank's part of a tensor is a separate task, so that all cores work.
fn write_files(
    manifest: &Manifest,
    built: &RankLayout,
    folder: &Directory,
    source: TensorSource<'_>,
) -> Result<Vec<Option<RankRecord>>, RewriteError> {
    let (tp_size, dp_size) = (built.decoder.shape().tp_size, built.optimizer.dp_size());
    let open = |rank: Rank| RankFile::open(manifest, built, rank, folder);
    let mut files = Rank::all(tp_size, dp_size).map(open).collect::<Result<Vec<_>, _>>()?;
    for tensor in 0..manifest.tensors.len() {
        (source.begin)(tensor)?;
        let here = files.iter_mut().filter(|file| file.next() == Some(tensor));
        here.par_bridge()
            .try_for_each(|file| file.write(manifest.states().len(), source.values))?;
    }
    files.into_par_iter().map(|file| file.close().map(Some)).collect()
}

/// The file of one rank.
struct RankFile {
    path: PathBuf,
    file: File,
    rank: usize,
    header: Vec<u8>,
    /// The pieces of each tensor; `done` counts the tensors that are written.
    all: Pieces,
    done: usize,
    /// Bytes written so far.
    at: u64,
    ranges: Vec<(usize, RangeEntry)>,
}

impl RankFile {
    fn open(
        manifest: &Manifest,
        built: &RankLayout,
        rank: Rank,
        folder: &Directory,
    ) -> Result<Self, RewriteError> {
        let name = file_name(rank.index());
        let path = folder.called(&name);
        let all = pieces(&built.decoder, &|segment| built.optimizer.owned(segment, rank.dp), rank);
        let entries: Vec<Entry> = piece_entries(&manifest.tensors, manifest.states(), &all);
        let header = encode(&entries);
        let file = folder.create_new(&name).and_then(|file| {
            file.write_all_at(&header, 0)?;
            Ok(file)
        });
        let file = file.map_err(failed(&path))?;
        let (rank, at) = (rank.index(), header.len() as u64);
        Ok(Self { path, file, rank, header, all, done: 0, at, ranges: Vec::new() })
    }

    /// The next tensor to write.
    fn next(&self) -> Option<usize> {
        self.all.get(self.done).map(|(tensor, _)| *tensor)
    }

    /// Writes all states of the rank's part of the next tensor.
    fn write(&mut self, states: usize, values: &Values<'_>) -> Result<(), RewriteError> {
        let (tensor, pieces) = &self.all[self.done];
        let bytes: u64 = pieces.iter().map(|piece| 4 * piece.span.len() as u64).sum();
        let state = |state: usize| {
            let mut at = self.at + state as u64 * bytes;
            let piece = |piece: &Piece| {
                let hash =
                    self.write_piece(TensorState { tensor: *tensor, state }, piece, at, values)?;
                at += 4 * piece.span.len() as u64;
                Ok(hash)
            };
            pieces.iter().map(piece).collect::<Result<Vec<Hash>, RewriteError>>()
        };
        let hashes = (0..states).into_par_iter().map(state).collect::<Result<Vec<_>, _>>()?;
        for (i, piece) in pieces.iter().enumerate() {
            let hash = hashes.iter().map(|of_state| of_state[i].clone()).collect();
            self.ranges.push((*tensor, RangeEntry { file: self.rank, span: piece.span, hash }));
        }
        self.at += states as u64 * bytes;
        self.done += 1;
        Ok(())
    }

    /// Writes one state of a piece to the file, from byte `at` of the file on; returns its hash.
    fn write_piece(
        &self,
        which: TensorState,
        piece: &Piece,
        mut at: u64,
        values: &Values<'_>,
    ) -> Result<Hash, RewriteError> {
        let mut hasher = Xxh3Default::new();
        let (mut block, mut bytes) = (Vec::new(), Vec::with_capacity(8 * BLOCK));
        let mut put = |bytes: &mut Vec<u8>| {
            hasher.update(bytes);
            self.file.write_all_at(bytes, at).map_err(failed(&self.path))?;
            at += bytes.len() as u64;
            bytes.clear();
            Ok::<_, RewriteError>(())
        };
        for run in piece.span.runs() {
            for from in run.clone().step_by(BLOCK) {
                block.resize(BLOCK.min(run.end - from), 0.0);
                values(which, from..from + block.len(), &mut block)?;
                let start = bytes.len();
                bytes.resize(start + 4 * block.len(), 0);
                let places = bytes[start..].chunks_exact_mut(4);
                places.zip(&block).for_each(|(b, x)| b.copy_from_slice(&x.to_le_bytes()));
                // Short runs share a write.
                if bytes.len() >= 4 * BLOCK {
                    put(&mut bytes)?;
                }
            }
        }
        put(&mut bytes)?;
        Ok(Hash::end(&hasher))
    }

    fn close(self) -> Result<RankRecord, RewriteError> {
        self.file.sync_all().map_err(failed(&self.path))?;
        let entry = FileEntry { bytes: self.at, header: Hash::of(&self.header) };
        Ok(RankRecord { entry, ranges: self.ranges, hashing: Duration::ZERO })
    }
}

fn failed(path: &Path) -> impl FnOnce(io::Error) -> RewriteError {
    let path = path.to_owned();
    |source| RewriteError::Write { path, source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use config::load_str;
    use data::Corpus;
    use layout::LocalMachine;
    use layout::build::lay_out;
    use std::sync::{Mutex, PoisonError};

    #[test]
    fn what_an_import_reads_is_asked_for_tensor_by_tensor_by_all_ranks_files() {
        const RON: &str = "(device: Cpu(count: 4, memory: \"64MiB\"), \
                            model: (layers: 2, hidden: 32, heads: 4, seq_len: 16, vocab: 9001), \
                            parallel: (tensor: 2, data: 2), batch: (micro: 1, global: 2), \
                            data: (train: \"x\"), train: (steps: 1))";
        let config = load_str(RON, "a.ron", Path::new("."), &[]).unwrap().config;
        let (built, folder) =
            (lay_out(&config, &LocalMachine::default()), tempfile::tempdir().unwrap());
        let data = Corpus::noise(config.model.seq_len).into();
        let asked = Mutex::new(Vec::new());
        let begun = Mutex::new(None);
        let begin = |tensor| {
            // A thread that waits here for all cores could receive a task that reads values.
            assert!(rayon::current_thread_index().is_none(), "begun by one of the cores that ask");
            *begun.lock().unwrap_or_else(PoisonError::into_inner) = Some(tensor);
            Ok(())
        };
        let note = |TensorState { tensor, .. }, wanted: Range<usize>, out: &mut [f32]| {
            assert_eq!(*begun.lock().unwrap_or_else(PoisonError::into_inner), Some(tensor));
            asked.lock().unwrap_or_else(PoisonError::into_inner).push(tensor);
            out.iter_mut().zip(wanted).for_each(|(x, i)| *x = (tensor * 300_000 + i) as f32);
            Ok(())
        };
        let source = TensorSource { begin: &begin, values: &note };
        let into = RunFolder::at(&folder.path().join("checkpoints")).unwrap();
        let sealed = start(&config, &built, &data, &into, source).unwrap();
        let path = sealed.publish().unwrap();
        let asked = asked.into_inner().unwrap();
        // If the order were rank by rank, every tensor would be loaded again for each file.
        assert!(asked.is_sorted(), "{asked:?}");
        let written = Checkpoint::open(&path, 0).unwrap();
        for (tensor, of) in written.summary().tensors().iter().enumerate() {
            let right = |i: usize| (tensor * 300_000 + i) as f32;
            // Pieces that end within blocks; the largest tensor has several blocks in each file.
            for (step, reader) in
                [(of.num_elements(), written.reader()), (50_001, written.reader())]
            {
                for from in (0..of.num_elements()).step_by(step) {
                    let wanted = from..(from + step).min(of.num_elements());
                    let mut values = vec![0.0; wanted.len()];
                    reader
                        .read(TensorState::parameter(tensor), wanted.clone(), &mut values)
                        .unwrap();
                    assert!(wanted.map(right).eq(values), "{} from {from}", of.name);
                }
            }
        }
    }

    /// Each row of a row-parallel weight has a piece in the file of every tensor-parallel rank.
    #[test]
    fn what_lies_in_many_files_is_not_read_again_for_each_row() {
        const RON: &str = "(device: Cpu(count: 16, memory: \"64MiB\"), \
                            model: (layers: 1, hidden: 256, heads: 16, seq_len: 16, vocab: 272), \
                            parallel: (tensor: 16), batch: (micro: 1, global: 1), \
                            data: (train: \"x\"), train: (steps: 1))";
        let config = load_str(RON, "a.ron", Path::new("."), &[]).unwrap().config;
        let (built, folder) =
            (lay_out(&config, &LocalMachine::default()), tempfile::tempdir().unwrap());
        let data = Corpus::noise(config.model.seq_len).into();
        let zeros = |_: TensorState, _: Range<usize>, out: &mut [f32]| {
            out.fill(0.0);
            Ok(())
        };
        let source = TensorSource { begin: &|_| Ok(()), values: &zeros };
        let into = RunFolder::at(&folder.path().join("checkpoints")).unwrap();
        let sealed = start(&config, &built, &data, &into, source).unwrap();
        let path = sealed.publish().unwrap();
        let written = Checkpoint::open(&path, 0).unwrap();
        let tensors = written.summary().tensors();
        let (tensor, of) = tensors
            .iter()
            .enumerate()
            .max_by_key(|(_, of)| (of.num_elements(), of.files().len()))
            .unwrap();
        assert_eq!(of.files().len(), 16, "{}", of.name);
        let read = || -> usize {
            let io = std::fs::read_to_string("/proc/thread-self/io").unwrap();
            io.lines().find_map(|line| line.strip_prefix("rchar: ")).unwrap().parse().unwrap()
        };
        let (before, reader, mut values) = (read(), written.reader(), vec![0.0; 4096]);
        for from in (0..of.num_elements()).step_by(values.len()) {
            reader
                .read(TensorState::parameter(tensor), from..from + values.len(), &mut values)
                .unwrap();
        }
        let bytes = 4 * of.num_elements();
        let read = read() - before;
        assert!(
            (bytes..2 * bytes).contains(&read),
            "{}: {read} bytes were read for {bytes}",
            of.name
        );
    }
}
