//! Bytes on a GPU outside the plans of its ranks. A measurement loads kernels and cuBLASLt's code,
//! creates streams and events, and compares the driver's free bytes. It is repeated at later starts
//! until two in a row agree. NCCL's buffers are measured after a run has connected. The cache
//! folder keeps the figures by the GPU's model and the versions of driver and libraries.

use super::blas::Blas;
use super::compile::{Kernels, cache_folder, read, write};
use super::driver::{self, Context, DeviceMemory, Event, Stream};
use super::launch::{PROGRAMS, Program};
use super::marks::{Marks, STREAMS};
use super::memory::EVENTS;
use super::probe::guarded;
use super::watchdog::WATCHED;
use super::{blaslt, nccl, nvrtc};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use topology::format_bytes;
use xxhash_rust::xxh3::xxh3_128;

/// Further streams of a rank that keeps activations on the host: one for each direction.
pub const ACTIVATION_STREAMS: usize = 2;

/// Streams of a rank without activations on the host: one for each other lane on a stream, and one
/// of its own.
pub const STREAMS_PER_RANK: usize = STREAMS - ACTIVATION_STREAMS + 1;

/// Bytes on a GPU outside the plans of its ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GpuOverhead {
    /// Bytes of cuBLASLt and of its code for a small matmul of each type, once for all ranks. The code
    /// of a model's shapes is loaded later.
    pub products: u64,
    /// Bytes of onebox's kernels, for each rank.
    pub kernels: u64,
    /// Bytes of streams and events, for each rank.
    pub streams: u64,
}

/// A GPU at the start of a run.
#[derive(Clone, Copy, Debug)]
pub struct GpuMemory {
    /// Total bytes.
    pub total: u64,
    /// Free bytes after the creation of a context.
    pub free: u64,
    /// Bytes of the free memory that are needed in addition to plans.
    pub overhead: GpuOverhead,
}

/// Measures a GPU once per process. It creates a context. If the cache has no confirmed figures, it
/// loads and measures everything, including the kernels of `programs`.
///
/// # Errors
/// An error of the driver or of a library.
pub fn look(ordinal: usize, programs: &[Program]) -> Result<GpuMemory, String> {
    static SEEN: Mutex<Vec<(usize, Result<GpuMemory, String>)>> = Mutex::new(Vec::new());
    let mut seen = SEEN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, found)) = seen.iter().find(|(have, _)| *have == ordinal) {
        return found.clone();
    }
    let found = guarded(|| find(ordinal, programs));
    seen.push((ordinal, found.clone()));
    found
}

fn find(ordinal: usize, programs: &[Program]) -> Result<GpuMemory, String> {
    driver::init()?;
    let context = Context::of(ordinal)?;
    // This runs before anything is loaded: loaded code stays until the process ends.
    let (free, total) = context.memory()?;
    let path = file(ordinal, &format!("gpu {programs:?}"))?;
    let [products, kernels, streams] = match path.as_deref().and_then(figures) {
        Some((kept, AGREED)) => kept,
        kept => {
            let measured = measure(&context, programs)?;
            let before = kept.map_or(measured, |(before, _)| before);
            let looks = if kept.is_some() && before == measured { AGREED } else { 1 };
            keep(path.as_deref(), (measured, looks));
            if before != measured {
                tracing::warn!(
                    "what lies on GPU {ordinal} beside a plan took {} at this look and {} at the one before: another \
                     process may have taken or given back memory meanwhile. The most of both counts, until two looks agree",
                    format_bytes(measured.iter().sum()),
                    format_bytes(before.iter().sum())
                );
            }
            std::array::from_fn(|i| measured[i].max(before[i]))
        }
    };
    Ok(GpuMemory { total, free, overhead: GpuOverhead { products, kernels, streams } })
}

/// Bytes of this GPU that NCCL needs for a grid of TP x DP ranks, all communicators together. It is
/// the largest figure of all runs.
pub fn connected(ordinal: usize, grid: (usize, usize)) -> Option<u64> {
    let path = file(ordinal, &grid_text(grid.0, grid.1)).ok().flatten()?;
    figures(&path).map(|([bytes, ..], _)| bytes)
}

/// Stores the NCCL figure that a run has measured, if it is the largest so far.
pub(super) fn note_connected(ordinal: usize, grid: (usize, usize), bytes: u64) {
    let Ok(Some(path)) = file(ordinal, &grid_text(grid.0, grid.1)) else { return };
    // A small model uses fewer algorithms than a large one, which must still fit.
    match connected(ordinal, grid) {
        Some(known) if known >= bytes => return,
        Some(known) => tracing::warn!(
            "NCCL took {} of GPU {ordinal}, and {} in earlier runs; plans keep back the most from now on. If another \
             process took memory meanwhile, delete {}",
            format_bytes(bytes),
            format_bytes(known),
            path.display()
        ),
        None => {}
    }
    keep(Some(&path), ([bytes, 0, 0], 1));
}

fn grid_text(tp: usize, dp: usize) -> String {
    format!("nccl {tp} x {dp}")
}

/// Loads and creates everything that a rank needs, on an idle GPU. Returns the bytes of cuBLASLt's
/// code, of kernels, and of streams with events.
fn measure(context: &Arc<Context>, programs: &[Program]) -> Result<[u64; 3], String> {
    let sm = driver::device_sm(context.ordinal)?;
    let own = Stream::new(context, false)?;
    let free = || context.memory().map(|(free, _)| free);
    // Precedes the measurement, since small allocations share a larger block.
    let small = DeviceMemory::new(context, 1)?;
    let start = free()?;
    let kernels = Kernels::load(sm, programs).map_err(|e| format!("kernels: {e}"))?;
    let with_kernels = free()?;
    let mut blas = Blas::new()?;
    blas.load(context, &own, sm).map_err(|e| format!("cuBLASLt: {e}"))?;
    let with_products = free()?;
    let streams = (0..STREAMS_PER_RANK).map(|_| Stream::new(context, true));
    let streams = streams.collect::<Result<Vec<_>, _>>()?;
    let marks = Marks::new()?;
    let events = (0..EVENTS + 2 * WATCHED).map(|_| Event::new());
    let events = events.collect::<Result<Vec<_>, _>>()?;
    let end = free()?;
    drop((events, marks, streams, blas, kernels, small, own));
    let taken = [(with_kernels, with_products), (start, with_kernels), (with_products, end)];
    Ok(taken.map(|(before, after)| before.saturating_sub(after)))
}

/// The file of a GPU's figures. Its name depends on everything that the figures depend on.
fn file(ordinal: usize, what: &str) -> Result<Option<PathBuf>, String> {
    let Some(folder) = cache_folder() else { return Ok(None) };
    let (name, sm) = (driver::device_name(ordinal)?, driver::device_sm(ordinal)?);
    let memory = driver::device_memory(ordinal)?;
    let versions = (driver::version()?, nvrtc::version()?, blaslt::version()?);
    let (library, loading) = (nccl::version().ok(), std::env::var("CUDA_MODULE_LOADING").ok());
    let kernels = hash_of_kernels();
    let key = format!(
        "{what}\0{name}\0{sm}\0{memory}\0{versions:?}\0{library:?}\0{loading:?}\0{STREAMS}\0{kernels:032x}"
    );
    Ok(Some(folder.join(format!("beside-{:032x}.txt", xxh3_128(key.as_bytes())))))
}

/// Hash of the texts of all kernels of ops. A search for a plan asks for it thousands of times.
fn hash_of_kernels() -> u128 {
    static HASH: OnceLock<u128> = OnceLock::new();
    *HASH.get_or_init(|| {
        let texts: Vec<String> = PROGRAMS.iter().map(Program::text).collect();
        xxh3_128(texts.concat().as_bytes())
    })
}

/// Bytes, and the number of measurements in a row that found them.
type Figures = ([u64; 3], u64);

/// Number of equal measurements that show that no other process changed the GPU's memory.
const AGREED: u64 = 2;

fn figures(path: &Path) -> Option<Figures> {
    let text = String::from_utf8(read(path)?).ok()?;
    let mut numbers = text.split_whitespace().map(str::parse);
    let mut next = || numbers.next()?.ok();
    Some(([next()?, next()?, next()?], next()?))
}

fn keep(path: Option<&Path>, ([a, b, c], looks): Figures) {
    let Some(path) = path else { return };
    if let Err(error) = write(path, format!("{a} {b} {c} {looks}").as_bytes()) {
        tracing::warn!("GPUs are measured at every start: {}: {error}", path.display());
    }
}
