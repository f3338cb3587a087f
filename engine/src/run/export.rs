//! Results of a run: a hash of its whole state, and its weights as one safetensors file, both in
//! global tensor order on every layout. All kernel threads of all ranks fill a window of a tensor,
//! while one thread hashes and writes the window before.

use crate::memory::windows::{WINDOW, WINDOWS, window_elements};
use crate::run::barrier::barrier;
use crate::run::options::RunOptions;
use crate::run::value_runs::ValueRuns;
use checkpoint::manifest::Hash;
use checkpoint::room;
use device::{Communicator, Device, Error, Rank, Tensor};
use files::held::LockedRunDir;
use files::names::{UNFINISHED, WEIGHTS};
use offload::Optimizer;
use serde_json::json;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use tensor_parallel::{Decoder, Param, Run, SegmentLayout};
use xxhash_rust::xxh3::Xxh3Default;

/// Number of elements of a window that one thread writes at a time.
const PART: usize = 1 << 14;
/// Key of the base's hash in the metadata of the weights file.
pub const BASE: &str = "base";
/// Number of states: the parameters, and their first and second moments.
const STATES: usize = 3;

/// Hashes the whole state and writes the weights, with the help of all ranks.
pub(crate) struct StateGatherer {
    segments: Vec<SegmentLayout>,
    /// Directory of the run, for the weights file.
    run: Option<Arc<LockedRunDir>>,
    /// Hash of the weights with the frozen parameters of the run.
    base: Option<Hash>,
    windows: OnceLock<[Window; WINDOWS]>,
    sink: Mutex<ExportSink>,
}

/// Hash and file that receive the windows in order.
struct ExportSink {
    /// Whether the states were gathered.
    gathered: bool,
    /// Whether the weights are on the disk.
    written: bool,
    hash: Xxh3Default,
    file: Option<BufWriter<File>>,
    problem: Option<io::Error>,
}

/// The outcome of the export.
pub(crate) struct ExportSummary {
    /// Hash of the states; empty if they were not gathered.
    pub(crate) state_hash: String,
    /// Whether the weights are on the disk.
    pub(crate) written: bool,
    /// Error that prevented the weights file.
    pub(crate) problem: Option<io::Error>,
}

/// A run of elements of a whole tensor, which all ranks fill together.
struct Window {
    parts: Vec<Mutex<Vec<f32>>>,
}

/// A window that all ranks have filled.
struct FilledWindow {
    number: usize,
    /// Number of elements.
    len: usize,
    /// Whether the elements are parameters, which go into the file. Moments are only hashed.
    is_params: bool,
}

/// Everything that a rank needs to gather the state.
#[derive(Clone, Copy)]
pub(crate) struct GatherContext<'a> {
    pub(crate) dev: &'a Device,
    pub(crate) world: &'a Communicator,
    pub(crate) optimizer: &'a Optimizer,
    /// Operand of the ranks' [`barrier`].
    pub(crate) barrier: Tensor,
}

/// Hasher of the windows on rank 0.
enum Hasher {
    /// A thread, with the channel of filled windows and the channel of freed windows.
    Thread(Sender<FilledWindow>, Receiver<()>),
    /// The rank's own thread, if the system refuses a thread.
    Inline,
}

impl StateGatherer {
    pub(crate) fn new(decoder: &Decoder, options: &RunOptions) -> Self {
        let hash = Xxh3Default::new();
        let sink = ExportSink { gathered: false, written: false, hash, file: None, problem: None };
        let (segments, windows) = (decoder.segments().to_vec(), OnceLock::new());
        let (run, base) = (options.weights.clone(), options.base_hash());
        Self { segments, run, base, windows, sink: Mutex::new(sink) }
    }

    /// Hashes all states, and writes the file if `weights`. Every rank calls it after its last
    /// step, when all lanes are idle. On return the file is complete on rank 0.
    pub(crate) fn run(&self, gather: GatherContext<'_>, weights: bool) -> Result<(), Error> {
        if gather.dev.rank().index() > 0 {
            return self.fill_windows(gather, None);
        }
        if weights {
            self.start_file();
        }
        std::thread::scope(|scope| {
            let ((fill, filled), (free, freed)) = (channel(), channel());
            let take = move || self.take_all(&filled, &free);
            let hasher = match std::thread::Builder::new().spawn_scoped(scope, take) {
                Ok(_) => Hasher::Thread(fill, freed),
                Err(error) => {
                    tracing::warn!("no thread to hash the states beside gathering them: {error}");
                    Hasher::Inline
                }
            };
            self.fill_windows(gather, Some(&hasher))
        })?;
        gather.world.held_up(|| self.sink().finish(self.run.as_deref()));
        Ok(())
    }

    /// Fills all windows of all states of all tensors, in order. Rank 0 has the `hasher`.
    fn fill_windows(
        &self,
        gather: GatherContext<'_>,
        hasher: Option<&Hasher>,
    ) -> Result<(), Error> {
        let GatherContext { dev, world, .. } = gather;
        let meet = || barrier(dev, gather.barrier);
        let (Rank { tp, tp_size, .. }, mut number) = (dev.rank(), 0);
        for (segment, param) in self.params() {
            let (runs, len) = (param.runs(tp, tp_size), param.global_len());
            let (owner, replicas) = (param.is_owner(tp), param.is_held_twice(tp_size));
            for state in 0..STATES {
                for from in (0..len).step_by(WINDOW) {
                    let range = from..len.min(from + WINDOW);
                    let part = WindowPart { number, segment, param, state, runs: &runs, range };
                    if number >= WINDOWS
                        && let Some(Hasher::Thread(_, freed)) = hasher
                        && world.held_up(|| freed.recv()).is_err()
                    {
                        // The thread that hashes has panicked. The scope passes its panic on to
                        // this thread.
                        return Ok(());
                    }
                    meet()?;
                    self.contribute(gather, &part, WindowTask::Write, owner)?;
                    meet()?;
                    if replicas {
                        self.contribute(gather, &part, WindowTask::Compare, !owner)?;
                        meet()?;
                    }
                    let filled =
                        FilledWindow { number, len: part.range.len(), is_params: state == 0 };
                    match hasher {
                        // After a panic the receiver is gone: see above.
                        Some(Hasher::Thread(way, _)) => drop(way.send(filled)),
                        Some(Hasher::Inline) => self.take(&mut self.sink(), &filled),
                        None => {}
                    }
                    number += 1;
                }
            }
        }
        Ok(())
    }

    fn params(&self) -> impl Iterator<Item = (usize, &Param)> {
        let of = |(index, layout)| {
            let layout: &SegmentLayout = layout;
            layout.params.iter().map(move |param| (index, param))
        };
        self.segments.iter().enumerate().flat_map(of)
    }

    /// Writes this rank's part of a tensor's state into the window, or compares it, if the rank
    /// `takes_part`. A tensor that every tensor-parallel rank holds must be the same on all of
    /// them. The window is in rank 0's process. All ranks call it.
    fn contribute(
        &self,
        gather: GatherContext<'_>,
        part: &WindowPart<'_>,
        task: WindowTask,
        takes_part: bool,
    ) -> Result<(), Error> {
        let GatherContext { dev, world, .. } = gather;
        let differs = |rank| {
            let param = part.param.name.clone();
            Error::Replica { rank, param }
        };
        let (window, rank) = (|| self.window(part.number), dev.rank());
        let runs = ValueRuns::default();
        let is_remote = !world.has(Rank { tp: 0, dp: 0, ..rank });
        let take = |at: usize, values: &[f32]| match is_remote {
            true => runs.take(at, values),
            false => window().apply(task, at, values),
        };
        if takes_part && !self.give(gather, part, &take)? {
            return Err(differs(rank.index()));
        }
        if world.has_remote_ranks() {
            for (from, runs) in world.gather_remote(rank, "window", &runs.into_bytes())? {
                if !ValueRuns::each(&runs, |at, values| window().apply(task, at, values)) {
                    return Err(differs(from));
                }
            }
        }
        Ok(())
    }

    /// Calls `take` with each run of a tensor's state that this rank owns, and with its place in
    /// the window. False if `take` returned false.
    fn give(
        &self,
        gather: GatherContext<'_>,
        part: &WindowPart<'_>,
        take: &(dyn Fn(usize, &[f32]) -> bool + Sync),
    ) -> Result<bool, Error> {
        let GatherContext { dev, optimizer, .. } = gather;
        let differs = AtomicBool::new(false);
        let local = part.local();
        for owned in optimizer.owned(part.segment, optimizer.state_buffer(dev)?) {
            let state = &owned.states[part.state];
            let from = owned.start.max(local.start);
            let to = (owned.start + state.len()).min(local.end);
            if from >= to {
                continue;
            }
            let state = state.slice(from - owned.start..to - owned.start);
            state.read_runs(dev, &|first, values| {
                if !part.place(from + first, values, take) {
                    differs.store(true, Ordering::Relaxed);
                }
            })?;
        }
        Ok(!differs.into_inner())
    }

    fn window(&self, number: usize) -> &Window {
        let len = window_elements(&self.segments);
        &self.windows.get_or_init(|| [(); WINDOWS].map(|()| Window::new(len)))[number % WINDOWS]
    }

    /// Hashes and writes each filled window, then frees it.
    fn take_all(&self, filled: &Receiver<FilledWindow>, free: &Sender<()>) {
        let mut sink = self.sink();
        for window in filled {
            self.take(&mut sink, &window);
            // After the last windows the receiver may be gone.
            let _ = free.send(());
        }
    }

    fn take(&self, sink: &mut ExportSink, filled: &FilledWindow) {
        let window = self.window(filled.number);
        window.each(filled.len, |values| sink.take(values, filled.is_params));
    }

    fn sink(&self) -> MutexGuard<'_, ExportSink> {
        self.sink.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start_file(&self) {
        let Some(run) = &self.run else { return };
        let open = || {
            let directory = run.check()?;
            let header = header(&self.segments, self.base.as_ref());
            room(directory, header.len() as u64 + bytes(&self.segments))?;
            let mut file = BufWriter::with_capacity(1 << 20, directory.create(UNFINISHED)?);
            file.write_all(&header).map(|()| file)
        };
        let opened = open();
        let mut sink = self.sink();
        match opened {
            Ok(file) => sink.file = Some(file),
            Err(error) => sink.give_up(error),
        }
    }

    pub(crate) fn finish(self) -> ExportSummary {
        let sink = self.sink.into_inner().unwrap_or_else(PoisonError::into_inner);
        let hash = sink.gathered.then(|| format!("{:016x}", sink.hash.digest()));
        let ExportSink { written, problem, .. } = sink;
        ExportSummary { state_hash: hash.unwrap_or_default(), written, problem }
    }
}

/// Task of a rank with its part of a window.
#[derive(Clone, Copy)]
enum WindowTask {
    Write,
    Compare,
}

/// A rank's part of a window.
struct WindowPart<'a> {
    /// Number of the window, counted over all tensors and states.
    number: usize,
    segment: usize,
    param: &'a Param,
    state: usize,
    /// Runs of the rank, in ascending order both in its part and in the whole tensor.
    runs: &'a [Run],
    /// Elements of the whole tensor that the window holds.
    range: Range<usize>,
}

impl WindowPart<'_> {
    /// Range of the segment's flat buffer that contains all elements of the window on this rank.
    fn local(&self) -> Range<usize> {
        let end = |run: &Run| run.global + run.local.len();
        let first = self.runs.partition_point(|run| end(run) <= self.range.start);
        let runs = self.runs[first..].iter().take_while(|run| run.global < self.range.end);
        let local = |run: &Run, global: usize| run.local.start + global - run.global;
        let cut = |run: &Run| {
            let (from, to) = (run.global.max(self.range.start), end(run).min(self.range.end));
            local(run, from)..local(run, to)
        };
        let all = runs.map(cut).reduce(|all, run| all.start..run.end).unwrap_or(0..0);
        self.param.range.start + all.start..self.param.range.start + all.end
    }

    /// Calls `work` with each run of `values` and its place in the window. `values` are the
    /// elements of the segment's flat buffer from `flat` on. False if `work` returned false.
    fn place(&self, flat: usize, values: &[f32], work: &dyn Fn(usize, &[f32]) -> bool) -> bool {
        let local = flat - self.param.range.start;
        let end = local + values.len();
        let first = self.runs.partition_point(|run| run.local.end <= local);
        self.runs[first..].iter().take_while(|run| run.local.start < end).all(|run| {
            let (from, to) = (run.local.start.max(local), run.local.end.min(end));
            let at = run.global + from - run.local.start - self.range.start;
            work(at, &values[from - local..to - local])
        })
    }
}

impl Window {
    fn new(len: usize) -> Self {
        let part = |from: usize| Mutex::new(vec![0.0; PART.min(len - from)]);
        Self { parts: (0..len).step_by(PART).map(part).collect() }
    }

    fn part(&self, index: usize) -> MutexGuard<'_, Vec<f32>> {
        self.parts[index].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes `values` at element `at`, or compares them. False if they differ.
    fn apply(&self, task: WindowTask, mut at: usize, mut values: &[f32]) -> bool {
        let mut same = true;
        while !values.is_empty() {
            let mut part = self.part(at / PART);
            let n = values.len().min(PART - at % PART);
            let (own, now) = (&mut part[at % PART..at % PART + n], &values[..n]);
            match task {
                WindowTask::Write => own.copy_from_slice(now),
                WindowTask::Compare => {
                    let mut pairs = own.iter().zip(now);
                    same &= pairs.all(|(own, x)| own.to_bits() == x.to_bits());
                }
            }
            (at, values) = (at + n, &values[n..]);
        }
        same
    }

    /// Calls `f` with the first `len` elements, in order.
    fn each(&self, len: usize, mut f: impl FnMut(&[f32])) {
        for from in (0..len).step_by(PART) {
            f(&self.part(from / PART)[..PART.min(len - from)]);
        }
    }
}

impl ExportSink {
    /// Syncs the file to the disk, then gives it its name. Keeps the error of a failure.
    fn finish(&mut self, run: Option<&LockedRunDir>) {
        self.gathered = true;
        let (Some(mut file), Some(run)) = (self.file.take(), run) else { return };
        let mut close = || {
            file.flush()?;
            file.get_ref().sync_all()?;
            let directory = run.check()?;
            directory.rename(UNFINISHED, WEIGHTS)?;
            directory.sync()
        };
        match close() {
            Ok(()) => self.written = true,
            Err(error) => self.give_up(error),
        }
    }

    fn give_up(&mut self, error: io::Error) {
        self.problem.get_or_insert(error);
        self.file = None;
    }

    /// Hashes values, and writes them into the file if they are parameters.
    fn take(&mut self, values: &[f32], is_params: bool) {
        let mut bytes = [0u8; 4096];
        for part in values.chunks(bytes.len() / 4) {
            let filled = &mut bytes[..4 * part.len()];
            filled.chunks_mut(4).zip(part).for_each(|(b, x)| b.copy_from_slice(&x.to_le_bytes()));
            self.hash.update(filled);
            if let (true, Some(file)) = (is_params, &mut self.file)
                && let Err(error) = file.write_all(filled)
            {
                self.give_up(error);
            }
        }
    }
}

/// Bytes of all parameters in fp32.
fn bytes(segments: &[SegmentLayout]) -> u64 {
    let params = segments.iter().flat_map(|s| &s.params);
    params.map(|param| 4 * param.global_len() as u64).sum()
}

/// Safetensors header of all trained parameters, in the order in which they are written. Its metadata
/// has the hash of the `base`, which has the frozen parameters.
fn header(segments: &[SegmentLayout], base: Option<&Hash>) -> Vec<u8> {
    let base = base.map(|base| ("__metadata__".to_owned(), json!({ BASE: base.digits() })));
    let shape = |param: &Param| (param.name.clone(), param.dimensions());
    let params = segments.iter().flat_map(|s| &s.params);
    checkpoint::header::of_shapes(base.into_iter().collect(), "F32", 4, params.map(shape))
}
