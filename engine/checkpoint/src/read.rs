//! Loading. Opening a checkpoint checks every byte once; later reads of ranges use the open files.

use super::header::{self, Entry};
use super::manifest::{self, Hash, LONGEST, MANIFEST, Manifest};
use super::span::Span;
use super::{CheckpointError, file_name, unreadable};
use files::directory::Directory;
use files::input;
use files::regular_file::open_at;
use offload::control;
use rayon::iter::{IntoParallelRefIterator, ParallelIterator};
use rustix::fs::OFlags;
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use tensor_parallel::{Decoder, Param};
use xxhash_rust::xxh3::{Xxh3Default, xxh3_64};

/// Bytes of a block, the unit of reads and of hashes in memory.
const BLOCK: usize = 1 << 18;

/// A checkpoint known only by its manifest; only the manifest's own hash was checked.
#[derive(Debug)]
pub struct Summary {
    pub(super) path: PathBuf,
    pub(super) manifest: Manifest,
}

/// A complete checkpoint with open files.
#[derive(Debug)]
pub struct Checkpoint {
    summary: Summary,
    files: Vec<HashedFile>,
    /// The ranges of each tensor.
    placed: Vec<Vec<RangePlace>>,
}

/// A checked file and the hashes of its blocks. Later reads compare each block with its hash.
#[derive(Debug)]
pub(super) struct HashedFile {
    file: File,
    blocks: Vec<u64>,
}

/// The place of a range in its file.
#[derive(Clone, Copy, Debug)]
pub(super) struct RangePlace {
    file: usize,
    span: Span,
    /// First byte of the range in the file, for each state.
    at: [u64; 4],
    /// Number of the first block of the range, for each state.
    first: [usize; 4],
}

impl Checkpoint {
    /// Opens the directory `path`, which must have the name of `step`, and checks all of it.
    ///
    /// # Errors
    /// [`CheckpointError`] with the file and the tensor that differ from what was written.
    pub fn open(path: &Path, step: u64) -> Result<Self, CheckpointError> {
        Self::within(&opened(path)?, step)
    }

    /// Like [`open`](Self::open), for an open directory.
    pub(super) fn within(folder: &Directory, step: u64) -> Result<Self, CheckpointError> {
        let summary = Summary::within(folder, Some(step))?;
        let checked = check_files(folder, &summary.manifest).into_iter();
        let checked = checked.collect::<Result<Vec<_>, _>>()?;
        summary.check_cover()?;
        let (files, places): (Vec<HashedFile>, Vec<_>) = checked.into_iter().unzip();
        let mut placed = vec![Vec::new(); summary.manifest.tensors.len()];
        for (tensor, place) in places.into_iter().flatten() {
            placed[tensor].push(place);
        }
        Ok(Self { summary, files, placed })
    }

    /// The summary of the checkpoint.
    pub const fn summary(&self) -> &Summary {
        &self.summary
    }

    /// The manifest of the checkpoint.
    pub const fn manifest(&self) -> &Manifest {
        &self.summary.manifest
    }

    /// The directory of the checkpoint.
    pub fn path(&self) -> &Path {
        &self.summary.path
    }

    /// Number of finished steps.
    pub const fn step(&self) -> u64 {
        self.manifest().step
    }

    /// Whether the checkpoint has hashes of its training data; earlier versions wrote none.
    pub fn knows_its_data(&self) -> bool {
        self.manifest().data.hashes().is_some()
    }

    /// Checks that the checkpoint has the tensors of `gpt`, in the same order.
    ///
    /// # Errors
    /// [`CheckpointError::OtherModel`] with the first tensor that differs.
    pub fn check_model(&self, gpt: &Decoder) -> Result<(), CheckpointError> {
        let other = |problem| CheckpointError::OtherModel { path: self.path().to_owned(), problem };
        let mut stored = self.manifest().tensors.iter();
        for param in gpt.segments().iter().flat_map(|s| &s.params) {
            let Param { name, global: (rows, columns), .. } = param;
            let Some(tensor) = stored.next() else { return Err(other(format!("no `{name}`"))) };
            if tensor.name != *name || tensor.shape != [*rows, *columns] {
                let (was, shape) = (&tensor.name, tensor.shape);
                let problem = format!("`{was}` {shape:?} for `{name}` [{rows}, {columns}]");
                return Err(other(problem));
            }
        }
        stored.next().map_or(Ok(()), |more| Err(other(format!("`{}` besides", more.name))))
    }

    /// Whether the update of the step is delayed; then the gradient is the fourth state.
    pub const fn has_late_update(&self) -> bool {
        self.manifest().has_late_update()
    }

    /// The control block for a resuming run with the initial block `initial`. `scaled` says whether
    /// that run uses a loss scale.
    pub fn control(&self, initial: &[f64; control::WORDS], scaled: bool) -> [f64; control::WORDS] {
        self.manifest().control.words(self.step(), scaled, initial)
    }

    /// A reader for the elements of the tensors.
    pub const fn reader(&self) -> CheckpointReader<'_> {
        CheckpointReader { from: self, recent: Mutex::new(Vec::new()) }
    }
}

/// Least number of blocks that a thread of a [`CheckpointReader`] keeps. It keeps two blocks for
/// each range with wanted elements, because the next wanted elements are in the same blocks.
const RECENT: usize = 8;

/// A block of a file: the number of the file, the offset of its first byte, and its bytes.
type Block = (usize, u64, Vec<u8>);

/// A state of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorState {
    /// Number of the tensor in the order of the model.
    pub tensor: usize,
    /// Number of the state: 0 is the parameter.
    pub state: usize,
}

impl TensorState {
    /// The parameter of the tensor number `tensor`.
    pub const fn parameter(tensor: usize) -> Self {
        Self { tensor, state: 0 }
    }
}

/// Reads elements of a checkpoint, and compares each block with its hash from the check at opening.
#[derive(Debug)]
pub struct CheckpointReader<'a> {
    from: &'a Checkpoint,
    /// Block caches of idle threads. Within a cache the newest block is the last.
    recent: Mutex<Vec<VecDeque<Block>>>,
}

impl CheckpointReader<'_> {
    /// Reads the elements `wanted` of a state of a tensor into `out`.
    ///
    /// # Errors
    /// The file that cannot be read, or that has changed since the check.
    pub fn read(
        &self,
        which: TensorState,
        wanted: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), CheckpointError> {
        let idle = || self.recent.lock().unwrap_or_else(|e| e.into_inner());
        let mut recent = idle().pop().unwrap_or_default();
        let read = self.read_by(&mut recent, which, wanted, out);
        idle().push(recent);
        read
    }

    fn read_by(
        &self,
        recent: &mut VecDeque<Block>,
        which: TensorState,
        wanted: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), CheckpointError> {
        let places = &self.from.placed[which.tensor];
        let has = |place: &&RangePlace| place.span.overlap(wanted.clone()).next().is_some();
        let keep = RECENT.max(2 * places.iter().filter(has).count());
        for place in places {
            for (from, to, n) in place.span.overlap(wanted.clone()) {
                let (mut at, end) = (4 * from, 4 * (from + n));
                while at < end {
                    let next = end.min((at / BLOCK + 1) * BLOCK);
                    let out = &mut out[to + at / 4 - from..to + next / 4 - from];
                    self.block(recent, keep, place, which.state, at / BLOCK, |block| {
                        let bytes = block[at % BLOCK..].chunks_exact(4);
                        let values = out.iter_mut().zip(bytes);
                        values.for_each(|(x, b)| {
                            *x = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
                        });
                    })?;
                    at = next;
                }
            }
        }
        Ok(())
    }

    /// Passes block `number` of a range to `take`. `recent` keeps at most `keep` blocks.
    fn block(
        &self,
        recent: &mut VecDeque<Block>,
        keep: usize,
        place: &RangePlace,
        state: usize,
        number: usize,
        take: impl FnOnce(&[u8]),
    ) -> Result<(), CheckpointError> {
        let at = place.at[state] + (number * BLOCK) as u64;
        let known = recent.iter().find(|(file, from, _)| (*file, *from) == (place.file, at));
        if let Some((.., bytes)) = known {
            take(bytes);
            return Ok(());
        }
        let old = if recent.len() < keep { None } else { recent.pop_front() };
        let mut bytes = old.map(|(.., bytes)| bytes).unwrap_or_default();
        bytes.resize(BLOCK.min(4 * place.span.len() - number * BLOCK), 0);
        let path = || self.from.path().join(file_name(place.file));
        let HashedFile { file, blocks } = &self.from.files[place.file];
        file.read_exact_at(&mut bytes, at).map_err(|error| unreadable(&path())(error))?;
        if xxh3_64(&bytes) != blocks[place.first[state] + number] {
            let problem =
                format!("its bytes from {at} on have changed since all of it was checked");
            return Err(broken(&path(), problem));
        }
        take(&bytes);
        recent.push_back((place.file, at, bytes));
        Ok(())
    }
}

/// Opens the directory `path` of a checkpoint; a symbolic link is refused.
pub(super) fn opened(path: &Path) -> Result<Directory, CheckpointError> {
    Directory::itself(path).map_err(unreadable(path))
}

impl Summary {
    /// Reads the summary from the directory of a checkpoint. If `step` is given and the manifest
    /// has another step, the checkpoint is broken.
    pub(super) fn within(folder: &Directory, step: Option<u64>) -> Result<Self, CheckpointError> {
        let (path, at) = (folder.path().to_owned(), folder.called(MANIFEST));
        let bytes = read_manifest(folder).map_err(unreadable(&at))?;
        let manifest = Manifest::decode(&bytes).map_err(|problem| broken(&at, problem))?;
        match step {
            Some(step) if step != manifest.step => {
                Err(broken(&at, format!("it is of step {}", manifest.step)))
            }
            _ => Ok(Self { path, manifest }),
        }
    }

    /// The directory of the checkpoint.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Checks that the files hold every element of every tensor.
    pub(super) fn check_cover(&self) -> Result<(), CheckpointError> {
        let covered = self.manifest.check_cover();
        covered.map_err(|problem| broken(&self.path.join(MANIFEST), problem))
    }
}

/// A checked file, and its ranges with the number of their tensor.
type CheckedFile = (HashedFile, Vec<(usize, RangePlace)>);

/// Compares every byte of every file with the manifest; one result per file, in order.
pub(super) fn check_files(
    folder: &Directory,
    manifest: &Manifest,
) -> Vec<Result<CheckedFile, CheckpointError>> {
    let numbers: Vec<usize> = (0..manifest.files.len()).collect();
    let checked = numbers.par_iter().map(|&number| {
        let name = file_name(number);
        let path = folder.called(&name);
        let file = open_at(folder, Path::new(&name), OFlags::empty()).map_err(unreadable(&path))?;
        let mut blocks = Vec::new();
        let placed = check_file(&path, &file, &mut blocks, number, manifest)?;
        Ok((HashedFile { file, blocks }, placed))
    });
    checked.collect()
}

pub(super) fn broken(path: &Path, problem: String) -> CheckpointError {
    CheckpointError::Broken { path: path.to_owned(), problem }
}

fn read_manifest(folder: &Directory) -> io::Result<Vec<u8>> {
    let file = open_at(folder, Path::new(MANIFEST), OFlags::empty())?;
    input::rest(&file, LONGEST).map_err(|error| match error.kind() {
        io::ErrorKind::FileTooLarge => {
            io::Error::other(format!("longer than {}", topology::format_bytes(LONGEST)))
        }
        _ => error,
    })
}

/// Compares a whole file with the manifest; returns its ranges with the number of their tensor.
fn check_file(
    path: &Path,
    file: &File,
    blocks: &mut Vec<u64>,
    number: usize,
    manifest: &Manifest,
) -> Result<Vec<(usize, RangePlace)>, CheckpointError> {
    let broken = |problem| broken(path, problem);
    let file_entry = &manifest.files[number];
    let header = check_header(path, file, file_entry)?;
    let entries = header::decode_vectors(&header, file_entry.bytes).map_err(broken)?;
    let mut entries = entries.into_iter();
    let mut found = Vec::new();
    let mut at = header.len() as u64;
    for (index, tensor) in manifest.tensors.iter().enumerate() {
        let from = tensor.ranges.partition_point(|r| r.file < number);
        let to = tensor.ranges.partition_point(|r| r.file <= number);
        let ranges = &tensor.ranges[from..to];
        let len: usize = ranges.iter().map(|r| r.span.len()).sum();
        let first = found.len();
        found.extend(ranges.iter().map(|r| {
            let (span, at, first) = (r.span, [0; 4], [0; 4]);
            (index, RangePlace { file: number, span, at, first })
        }));
        if ranges.is_empty() {
            continue;
        }
        for (state, label) in manifest.states().iter().enumerate() {
            let expected = Entry { name: format!("{}.{label}", tensor.name), len };
            if entries.next().as_ref() != Some(&expected) {
                let why = format!("`{}` is not where the manifest has it", expected.name);
                return Err(broken(why));
            }
            for (range, (_, placed)) in ranges.iter().zip(&mut found[first..]) {
                (placed.at[state], placed.first[state]) = (at, blocks.len());
                let bytes = 4 * range.span.len() as u64;
                if hash(file, at..at + bytes, blocks).map_err(unreadable(path))?
                    != range.hash[state]
                {
                    return Err(broken(format!("`{}` is not what was written", expected.name)));
                }
                at += bytes;
            }
        }
    }
    match entries.next() {
        Some(more) => Err(broken(format!("`{}` is not in the manifest", more.name))),
        None => Ok(found),
    }
}

fn check_header(
    path: &Path,
    file: &File,
    file_entry: &manifest::FileEntry,
) -> Result<Vec<u8>, CheckpointError> {
    let bytes = file.metadata().map_err(unreadable(path))?.len();
    if bytes != file_entry.bytes {
        let why = format!("it has {bytes} bytes, and was written with {}", file_entry.bytes);
        return Err(broken(path, why));
    }
    let mut first = [0; 8];
    file.read_exact_at(&mut first, 0).map_err(unreadable(path))?;
    let length = header::length(first, bytes).map_err(|why| broken(path, why))?;
    let mut header = vec![0; length];
    file.read_exact_at(&mut header, 0).map_err(unreadable(path))?;
    if Hash::of(&header) != file_entry.header {
        return Err(broken(path, "its header is not what was written".into()));
    }
    Ok(header)
}

/// Hash of a byte range of a file; appends the hashes of its blocks to `blocks`.
fn hash(file: &File, range: Range<u64>, blocks: &mut Vec<u64>) -> io::Result<Hash> {
    let mut hasher = Xxh3Default::new();
    let mut block = vec![0; BLOCK.min((range.end - range.start) as usize)];
    let mut at = range.start;
    while at < range.end {
        let part = block.len().min((range.end - at) as usize);
        file.read_exact_at(&mut block[..part], at)?;
        hasher.update(&block[..part]);
        blocks.push(xxh3_64(&block[..part]));
        at += part as u64;
    }
    Ok(Hash::end(&hasher))
}
