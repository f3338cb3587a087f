//! What a run leaves: a hash of its whole state, and its weights as one safetensors file, in global tensor
//! order whatever the layout was. Tensors are put together a window at a time, by all kernel threads of all ranks, while one
//! thread hashes and writes the window before.

use crate::checkpoint::room;
use crate::files::held::Held;
use crate::files::names::{UNFINISHED, WEIGHTS};
use crate::run::meet::meet;
use crate::run::options::RunOptions;
use crate::run::runs::Runs;
use device::World;
use device::{Device, Error, Rank, Tensor};
use offload::Optimizer;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use tensor_parallel::{Gpt, Param, Run, SegmentLayout};
use xxhash_rust::xxh3::Xxh3Default;

/// Elements that are put together at a time, at most.
const WINDOW: usize = 1 << 23;
/// Elements of a window that one thread writes at a time.
const PART: usize = 1 << 14;
/// One is put together while the other is hashed.
const WINDOWS: usize = 2;
/// Parameters, first and second moment.
const STATES: usize = 3;

/// Bytes that the end of a run takes on the host besides the plan.
pub(crate) fn window_bytes(gpt: &Gpt) -> u64 {
    (WINDOWS * window_elements(gpt.segments()) * size_of::<f32>()) as u64
}

fn window_elements(segments: &[SegmentLayout]) -> usize {
    let params = segments.iter().flat_map(|segment| &segment.params);
    params.map(Param::global_len).max().unwrap_or(0).min(WINDOW)
}

/// The ranks' common work on the whole state.
pub(crate) struct Gathering {
    segments: Vec<SegmentLayout>,
    /// The directory of the file.
    run: Option<Arc<Held>>,
    windows: OnceLock<[Window; WINDOWS]>,
    left: Mutex<Left>,
}

/// What is made of the windows.
struct Left {
    /// The states were put together.
    gathered: bool,
    /// The weights are on the disk.
    written: bool,
    hash: Xxh3Default,
    file: Option<BufWriter<File>>,
    problem: Option<io::Error>,
}

/// What came of it.
pub(crate) struct Finished {
    /// Empty where the states were not put together.
    pub(crate) state_hash: String,
    /// The weights are on the disk.
    pub(crate) written: bool,
    /// Why the weights are not written.
    pub(crate) problem: Option<io::Error>,
}

/// A run of a whole tensor.
struct Window {
    parts: Vec<Mutex<Vec<f32>>>,
}

/// A window that is put together: its number, its elements, whether they are parameters.
struct Whole(usize, usize, bool);

/// How rank 0 has windows hashed.
enum Hashing {
    /// By a thread: the way there, and the way back of windows that are hashed.
    Thread(Sender<Whole>, Receiver<()>),
    /// By itself, where the machine gives no thread.
    Own,
}

impl Gathering {
    pub(crate) fn new(gpt: &Gpt, options: &RunOptions) -> Self {
        let hash = Xxh3Default::new();
        let left = Left { gathered: false, written: false, hash, file: None, problem: None };
        let (segments, windows) = (gpt.segments().to_vec(), OnceLock::new());
        Self { segments, run: options.weights.clone(), windows, left: Mutex::new(left) }
    }

    /// Every rank calls it after its last step, with all lanes at rest; `weights`: the file is written too, for which the ranks
    /// of `world` wait.
    pub(crate) fn run(
        &self,
        (dev, world): (&Device, &World),
        optimizer: &Optimizer,
        meeting: Tensor,
        weights: bool,
    ) -> Result<(), Error> {
        if dev.rank().index() > 0 {
            return self.walk((dev, world), optimizer, meeting, None);
        }
        if weights {
            self.start_file();
        }
        std::thread::scope(|scope| {
            let ((whole, wholes), (free, freed)) = (channel(), channel());
            let take = move || self.take_all(&wholes, &free);
            let hashing = match std::thread::Builder::new().spawn_scoped(scope, take) {
                Ok(_) => Hashing::Thread(whole, freed),
                Err(error) => {
                    tracing::warn!("no thread to hash the states beside gathering them: {error}");
                    Hashing::Own
                }
            };
            self.walk((dev, world), optimizer, meeting, Some(&hashing))
        })?;
        world.held_up(|| self.left().finish(self.run.as_deref()));
        Ok(())
    }

    /// All windows of all states of all tensors, in order.
    fn walk(
        &self,
        (dev, world): (&Device, &World),
        optimizer: &Optimizer,
        meeting: Tensor,
        hashing: Option<&Hashing>,
    ) -> Result<(), Error> {
        let (Rank { tp, tp_size, .. }, mut number) = (dev.rank(), 0);
        for (segment, param) in self.params() {
            let (runs, len) = (param.runs(tp, tp_size), param.global_len());
            let (owner, replicas) = (param.is_owner(tp), param.is_held_twice(tp_size));
            for state in 0..STATES {
                for from in (0..len).step_by(WINDOW) {
                    let range = from..len.min(from + WINDOW);
                    let part = Part { segment, param, state, runs: &runs, range };
                    if number >= WINDOWS
                        && let Some(Hashing::Thread(_, freed)) = hashing
                        && world.held_up(|| freed.recv()).is_err()
                    {
                        // The thread that hashes has panicked, and this one will when it is joined.
                        return Ok(());
                    }
                    meet(dev, meeting)?;
                    let put = (Work::Write, owner);
                    self.contribute((dev, world), optimizer, (number, &part), put)?;
                    meet(dev, meeting)?;
                    if replicas {
                        let compare = (Work::Compare, !owner);
                        self.contribute((dev, world), optimizer, (number, &part), compare)?;
                        meet(dev, meeting)?;
                    }
                    let whole = Whole(number, part.range.len(), state == 0);
                    match hashing {
                        // Nobody listens after a panic: see above.
                        Some(Hashing::Thread(way, _)) => drop(way.send(whole)),
                        Some(Hashing::Own) => self.take(&mut self.left(), &whole),
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

    /// Copies what this rank owns of a tensor's state into the window, or compares, where it `has` a share in that: what
    /// every tensor-parallel rank holds must be the same on all. The window is in rank 0's process.
    fn contribute(
        &self,
        (dev, world): (&Device, &World),
        optimizer: &Optimizer,
        (number, part): (usize, &Part<'_>),
        (work, has): (Work, bool),
    ) -> Result<(), Error> {
        let differs = |rank| {
            let param = part.param.name.clone();
            Error::Replica { rank, param }
        };
        let (window, rank) = (|| self.window(number), dev.rank());
        let runs = Runs::default();
        let away = !world.has(Rank { tp: 0, dp: 0, ..rank });
        let take = |at: usize, values: &[f32]| match away {
            true => runs.take(at, values),
            false => window().work(work, at, values),
        };
        if has && !self.give(dev, optimizer, part, &take)? {
            return Err(differs(rank.index()));
        }
        if world.is_spread() {
            for (from, runs) in world.bring(rank, "window", &runs.into_bytes())? {
                if !Runs::each(&runs, |at, values| window().work(work, at, values)) {
                    return Err(differs(from));
                }
            }
        }
        Ok(())
    }

    /// Gives `take` each run that this rank owns of a tensor's state, with its place in the window. False: `take` said so.
    fn give(
        &self,
        dev: &Device,
        optimizer: &Optimizer,
        part: &Part<'_>,
        take: &(dyn Fn(usize, &[f32]) -> bool + Sync),
    ) -> Result<bool, Error> {
        let differs = AtomicBool::new(false);
        let local = part.local();
        for owned in optimizer.owned(part.segment, optimizer.side(dev)?) {
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

    /// Hashes and writes windows as they come, and gives them free.
    fn take_all(&self, wholes: &Receiver<Whole>, free: &Sender<()>) {
        let mut left = self.left();
        for whole in wholes {
            self.take(&mut left, &whole);
            // Behind the last windows nobody waits for another one.
            let _ = free.send(());
        }
    }

    fn take(&self, left: &mut Left, &Whole(number, len, parameters): &Whole) {
        self.window(number).each(len, |values| left.take(values, parameters));
    }

    fn left(&self) -> MutexGuard<'_, Left> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start_file(&self) {
        let Some(run) = &self.run else { return };
        let open = || {
            let directory = run.check()?;
            let header = header(&self.segments);
            room(directory, header.len() as u64 + bytes(&self.segments))?;
            let mut file = BufWriter::with_capacity(1 << 20, directory.create(UNFINISHED)?);
            file.write_all(&header).map(|()| file)
        };
        let opened = open();
        let mut left = self.left();
        match opened {
            Ok(file) => left.file = Some(file),
            Err(error) => left.give_up(error),
        }
    }

    pub(crate) fn finish(self) -> Finished {
        let left = self.left.into_inner().unwrap_or_else(PoisonError::into_inner);
        let hash = left.gathered.then(|| format!("{:016x}", left.hash.digest()));
        let Left { written, problem, .. } = left;
        Finished { state_hash: hash.unwrap_or_default(), written, problem }
    }
}

/// What is done with a rank's part of a tensor.
#[derive(Clone, Copy)]
enum Work {
    Write,
    Compare,
}

/// A window of a state of a tensor, as one rank has it.
struct Part<'a> {
    segment: usize,
    param: &'a Param,
    state: usize,
    /// Of the rank, which ascend both there and in the whole tensor.
    runs: &'a [Run],
    /// Elements of the whole tensor.
    range: Range<usize>,
}

impl Part<'_> {
    /// Elements of the segment's flat buffer among which all are that the rank has of it.
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

    /// Gives `work` each run of `values`, the elements from `flat` on of the segment's flat buffer, with its place in the
    /// window. False: `work` said so.
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

    /// Writes `values` at element `at`, or compares. False: they differ.
    fn work(&self, work: Work, mut at: usize, mut values: &[f32]) -> bool {
        let mut same = true;
        while !values.is_empty() {
            let mut part = self.part(at / PART);
            let n = values.len().min(PART - at % PART);
            let (own, now) = (&mut part[at % PART..at % PART + n], &values[..n]);
            match work {
                Work::Write => own.copy_from_slice(now),
                Work::Compare => {
                    let mut pairs = own.iter().zip(now);
                    same &= pairs.all(|(own, x)| own.to_bits() == x.to_bits());
                }
            }
            (at, values) = (at + n, &values[n..]);
        }
        same
    }

    /// Gives `f` the first `len` elements, in order.
    fn each(&self, len: usize, mut f: impl FnMut(&[f32])) {
        for from in (0..len).step_by(PART) {
            f(&self.part(from / PART)[..PART.min(len - from)]);
        }
    }
}

impl Left {
    /// The file is on the disk under its own name, or not at all.
    fn finish(&mut self, run: Option<&Held>) {
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

    /// Hashes a run of values, and writes it when it is of a parameter.
    fn take(&mut self, values: &[f32], parameter: bool) {
        let mut bytes = [0u8; 4096];
        for part in values.chunks(bytes.len() / 4) {
            let filled = &mut bytes[..4 * part.len()];
            filled.chunks_mut(4).zip(part).for_each(|(b, x)| b.copy_from_slice(&x.to_le_bytes()));
            self.hash.update(filled);
            if let (true, Some(file)) = (parameter, &mut self.file)
                && let Err(error) = file.write_all(filled)
            {
                self.give_up(error);
            }
        }
    }
}

/// Of all parameters.
fn bytes(segments: &[SegmentLayout]) -> u64 {
    let params = segments.iter().flat_map(|s| &s.params);
    params.map(|param| 4 * param.global_len() as u64).sum()
}

/// The safetensors header of all parameters, in the order in which they are written.
fn header(segments: &[SegmentLayout]) -> Vec<u8> {
    let mut entries = serde_json::Map::new();
    let mut at = 0;
    for param in segments.iter().flat_map(|s| &s.params) {
        let end = at + 4 * param.global_len() as u64;
        let (rows, cols) = param.global;
        let shape = if cols == 1 { vec![rows] } else { vec![rows, cols] };
        let entry =
            serde_json::json!({ "dtype": "F32", "shape": shape, "data_offsets": [at, end] });
        entries.insert(param.name.clone(), entry);
        at = end;
    }
    let mut json = serde_json::Value::Object(entries).to_string().into_bytes();
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend(json);
    bytes
}
