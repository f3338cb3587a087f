//! Measures copies between host and GPU: as one copy (the ceiling), and in the parts of a run.

use super::{BenchPlace, NodeMemory, fastest, memcpy, memory, open, place};
use config::{BUCKET_ELEMENTS, TILE_ELEMENTS};
use device::{
    Arena, Device, Dtype, Error, HostContext, HostOp, HostTask, Lane, Mode, Op, Plan, Tensor,
};
use layout::LocalMachine;
use serde::Serialize;
use std::sync::Arc;

/// Default bytes of a tile of 16-bit parameters.
pub const TILE_BYTES: u64 = 2 * TILE_ELEMENTS as u64;

/// Default bytes of a piece of 16-bit gradients on one data-parallel rank.
const PIECE_BYTES: u64 = 2 * BUCKET_ELEMENTS as u64;

/// Results for one GPU; rates are in 10^9 bytes per second.
#[derive(Clone, Debug, Serialize)]
pub struct Copies {
    /// Measured device, `Cuda` or `Cpu`.
    pub device: &'static str,
    /// Bytes of each direction.
    pub bytes: u64,
    /// Rate from host to GPU.
    pub up: f64,
    /// Rate from GPU to host.
    pub down: f64,
    /// Sum of both rates while both directions run at the same time.
    pub both: f64,
    /// `both` divided by the sum of `up` and `down`.
    pub both_share: f64,
    /// Rates of the same bytes in the parts of a run.
    pub parts: TileCopies,
    /// Ceiling of one direction; `None` if unknown.
    pub ceiling: Option<f64>,
    /// The meaning of `ceiling`, for a reader.
    pub ceiling_is: &'static str,
    /// Memory rates of each NUMA node of the host.
    pub memory: Vec<NodeMemory>,
}

/// Copies in the parts of a run: rates in 10^9 bytes per second, and shares of one copy's rate.
#[derive(Clone, Debug, Default, Serialize)]
pub struct TileCopies {
    /// Bytes of a tile of 16-bit parameters. A tile goes up as soon as the host has updated it.
    pub tile_bytes: u64,
    /// Bytes of a piece of 16-bit gradients. A piece is copied to the host as a whole.
    pub piece_bytes: u64,
    /// Rate of tiles from host to GPU.
    pub up: f64,
    /// `up` divided by the rate of one copy.
    pub up_share: f64,
    /// Rate of pieces from GPU to host.
    pub down: f64,
    /// `down` divided by the rate of one copy.
    pub down_share: f64,
    /// Sum of both rates while both directions run at the same time.
    pub both: f64,
    /// `both` divided by the sum of the rates of one copy in each direction.
    pub both_share: f64,
}

/// Host task before the copy of a tile. It changes one element: the update itself is not timed.
#[derive(Debug)]
struct TileUpdate(Tensor);

impl HostTask for TileUpdate {
    fn name(&self) -> &'static str {
        "made"
    }
    fn accesses(&self, visit: &mut dyn FnMut(Mode, Tensor)) {
        visit(Mode::Update, self.0);
    }
    fn run(&self, _: u64, host: &mut HostContext<'_>) -> Result<(), String> {
        host.write_as::<f32>(self.0)?.iter_mut().for_each(|x| *x += 1.0);
        Ok(())
    }
}

/// Copies of one direction, cut into parts.
struct CopyPath {
    lane: Lane,
    /// Host task before each part; empty if there are none.
    updates: Vec<Arc<HostOp>>,
    /// Source and target of each part.
    parts: Vec<(Tensor, Tensor)>,
}

impl CopyPath {
    /// Cuts the copy of `src` to `dst` into parts of at most `most` elements.
    fn new(lane: Lane, src: Tensor, dst: Tensor, most: usize) -> Self {
        let part = |at: usize| at..src.len().min(at + most);
        let parts = (0..src.len()).step_by(most).map(part);
        let parts = parts.map(|part| (src.slice(part.clone()), dst.slice(part))).collect();
        Self { lane, updates: Vec::new(), parts }
    }

    /// Queues the copies. They still run on return; `Device::sync_all` waits for them.
    fn start(&self, dev: &Device) {
        let submit = |task: &Arc<HostOp>| {
            dev.submit_host(task, 0);
            dev.record(Lane::Host)
        };
        let updated: Vec<_> = self.updates.iter().map(submit).collect();
        for (at, &(src, dst)) in self.parts.iter().enumerate() {
            if let Some(updated) = updated.get(at) {
                dev.wait(self.lane, *updated);
            }
            dev.submit(self.lane, Op::Copy { src, dst });
        }
        if !self.updates.is_empty() {
            dev.follow(Lane::Host, self.lane); // the next tasks change the sources of these copies
        }
    }
}

/// A device with tensors to copy, (1, n) F32 each.
pub(super) struct CopyDevice {
    pub(super) dev: Device,
    /// Source on the host, with values, and destination on the GPU.
    pub(super) up: [Tensor; 2],
    /// Source on the GPU, with values, and destination on the host.
    pub(super) down: [Tensor; 2],
}

impl CopyDevice {
    /// Opens a GPU, or a virtual GPU, with tensors of `bytes`.
    ///
    /// # Errors
    /// There is no GPU or not enough memory.
    pub(super) fn open(on_cuda: bool, place: &BenchPlace, bytes: u64) -> Result<Self, Error> {
        let n = (bytes / 4) as usize;
        let mut plan = Plan::default();
        let mut tensor = |arena, name: &str| {
            plan.tensor((arena, "of the measurement"), name, Dtype::F32, (1, n))
        };
        let [above, above2] = ["a", "b"].map(|name| tensor(Arena::Device, name));
        let [below, below2] = ["c", "d"].map(|name| tensor(Arena::Pinned, name));
        let dev = open(plan, on_cuda, place)?;
        [above2, below].iter().try_for_each(|t| dev.write(*t, &|_| 1.0))?;
        Ok(Self { dev, up: [below, above], down: [above2, below2] })
    }
}

/// Measures copies of `bytes` between host and GPU. A copy to the GPU in tiles has tiles of at most
/// `tile` bytes.
///
/// # Errors
/// There is no GPU or not enough memory.
pub fn copies(
    machine: &LocalMachine,
    on_cuda: bool,
    bytes: u64,
    tile: u64,
) -> Result<Copies, Error> {
    let place = if on_cuda { place(machine) } else { BenchPlace::default() };
    let CopyDevice { dev, up: [below, above], down: [above2, below2] } =
        CopyDevice::open(on_cuda, &place, bytes)?;
    let n = above.len();
    let rate = |paths: &[&CopyPath]| {
        let seconds = fastest(|| {
            paths.iter().for_each(|path| path.start(&dev));
            dev.sync_all()
        })?;
        Ok::<f64, Error>((paths.len() * n * 4) as f64 / seconds / 1e9)
    };
    let [tile, piece] = [tile, PIECE_BYTES].map(|bytes| ((bytes / 4) as usize).min(n));
    let all_up = CopyPath::new(Lane::H2d, below, above, n);
    let all_down = CopyPath::new(Lane::D2h, above2, below2, n);
    let mut tiles = CopyPath::new(Lane::H2d, below, above, tile);
    // In a run, the update of a tile precedes its copy too.
    let update = |(src, _): &(Tensor, Tensor)| HostOp::new(TileUpdate(src.slice(0..1)));
    tiles.updates = tiles.parts.iter().map(update).collect();
    let pieces = CopyPath::new(Lane::D2h, above2, below2, piece);
    let (up, down, both) = (rate(&[&all_up])?, rate(&[&all_down])?, rate(&[&all_up, &all_down])?);
    let (tiles_up, pieces_down) = (rate(&[&tiles])?, rate(&[&pieces])?);
    let both_in_parts = rate(&[&pieces, &tiles])?;
    dev.finish()?;
    let parts = TileCopies {
        tile_bytes: tile as u64 * 4,
        piece_bytes: piece as u64 * 4,
        up: tiles_up,
        up_share: tiles_up / up,
        down: pieces_down,
        down_share: pieces_down / down,
        both: both_in_parts,
        both_share: both_in_parts / (up + down),
    };
    let (ceiling, ceiling_is) = match on_cuda {
        true => (place.link, "the slowest link on the way, by its width and generation"),
        false => (Some(memcpy(n * 4)), "a plain copy within the host's memory by one thread"),
    };
    let device = if on_cuda { "Cuda" } else { "Cpu" };
    let (bytes, both_share, memory) = (n as u64 * 4, both / (up + down), memory(bytes)?);
    Ok(Copies { device, bytes, up, down, both, both_share, parts, ceiling, ceiling_is, memory })
}
