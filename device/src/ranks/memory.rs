//! The two arenas of a rank: its virtual GPU's memory, and host memory.
#![expect(
    unsafe_code,
    reason = "typed views of raw arenas; sound because ops are admitted in order"
)]

use crate::error::OutOfMemory;
use crate::numerics::{E4m3, E5m2};
use crate::{Arena, Dtype, Error, Plan, Rank, Tensor, View, ViewMut};
use half::{bf16, f16};
use pulp::bytemuck::{cast_slice, cast_slice_mut};

const PAGE: usize = 4096;
const HUGE_PAGE: u64 = 2 << 20;

/// Place of a rank's host arena. By default, the thread that first touches a page decides its node.
#[derive(Clone, Debug, Default)]
pub struct HostPlace {
    /// NUMA nodes of the arena.
    pub nodes: Vec<u32>,
    /// NUMA nodes of the staging buffers, which the GPU copies to or from, each with its capacity
    /// in bytes. They are filled in this order.
    pub staging: Vec<(u32, u64)>,
    /// CPUs of the threads that use the memory later. Their threads also touch its pages first.
    pub cpus: Vec<u32>,
    /// Uses pages of 4 KiB on any node, for comparison.
    pub small_pages: bool,
    /// Reserves only addresses, in any amount. Pages are allocated at first use; the run uses few.
    pub untouched: bool,
}

impl From<&topology::RankPlace> for HostPlace {
    fn from(place: &topology::RankPlace) -> Self {
        Self {
            nodes: place.state_nodes.clone(),
            staging: [&place.far_staging[..], &[(place.numa_node, u64::MAX)]].concat(),
            cpus: place.worker_cpus.clone(),
            small_pages: false,
            untouched: false,
        }
    }
}

impl HostPlace {
    /// `bytes` of host memory, with the plan's staging buffers on their own nodes.
    fn arena(&self, plan: &Plan, bytes: usize) -> Result<topology::Arena, topology::Error> {
        if self.untouched {
            return topology::Arena::untouched(bytes);
        }
        if self.small_pages {
            return topology::Arena::of_small_pages(bytes);
        }
        topology::Arena::with_parts(bytes, &self.nodes, &self.cpus, &self.parts(plan))
    }

    /// The plan's staging buffers with their nodes. A buffer lies on two nodes if it does not fit
    /// into the rest of the first.
    fn parts(&self, plan: &Plan) -> Vec<topology::Part> {
        let mut parts: Vec<topology::Part> = Vec::new();
        let is_all = matches!(self.staging[..], [(only, _)] if self.nodes == [only]);
        let staging = plan.entries().iter().filter(|entry| entry.is_staging() && !is_all);
        let mut nodes = self.staging.iter().copied().filter(|(_, bytes)| *bytes > 0).peekable();
        let mut taken = 0;
        for entry in staging {
            let mut start = entry.range.start;
            while let Some(&(node, bytes)) = nodes.peek().filter(|_| start < entry.range.end) {
                let end = entry.range.end.min(start.saturating_add(bytes - taken));
                taken += end - start;
                let range = start as usize..end as usize;
                match parts.last_mut() {
                    Some(part) if part.nodes == [node] && range.start < part.range.end + PAGE => {
                        part.range.end = range.end;
                    }
                    _ => parts.push(topology::Part { range, nodes: vec![node] }),
                }
                start = end;
                if taken == bytes {
                    (_, taken) = (nodes.next(), 0);
                }
            }
        }
        parts
    }
}

/// The memory of one rank, accessed through handles.
#[derive(Debug)]
pub(crate) struct Memory {
    /// The virtual GPU's memory, and the host memory on its NUMA nodes. A real GPU's driver pins
    /// the latter.
    arenas: [topology::Arena; 2],
}

// SAFETY: the bytes are reached only through `view` and `view_mut`, whose callers run an
// `AdmittedOp` or stand between the rendezvous of a collective that one declared. Admitted ops that
// conflict are ordered by lanes and events (hazard.rs), and the executor keeps that order with
// acquire/release counters; so no two threads touch the same bytes at once unless both read.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Zeroed arenas of the plan's sizes.
    ///
    /// # Errors
    /// Returns the arena and its bytes if the machine refuses them.
    pub(crate) fn new(plan: &Plan, host: &HostPlace) -> Result<Self, (Arena, u64)> {
        Self::of(plan, host, plan.bytes(Arena::Device), plan.bytes(Arena::Pinned))
    }

    /// The host's arena alone, for a rank whose device memory is on a GPU. Its start and size are
    /// multiples of a huge page.
    ///
    /// # Errors
    /// Returns the errors of `new`.
    pub(crate) fn pinned(plan: &Plan, host: &HostPlace) -> Result<Self, (Arena, u64)> {
        let bytes = plan.bytes(Arena::Pinned).max(1).next_multiple_of(HUGE_PAGE);
        Self::of(plan, host, 0, bytes)
    }

    fn of(plan: &Plan, host: &HostPlace, device: u64, pinned: u64) -> Result<Self, (Arena, u64)> {
        let refused = (Arena::Pinned, pinned.max(1));
        let size = usize::try_from(pinned).map_err(|_| refused)?;
        let pinned = host.arena(plan, size).map_err(|_| refused)?;
        let refused = (Arena::Device, device);
        let size = usize::try_from(device).map_err(|_| refused)?;
        let device = topology::Arena::new(size, &[], &[]).map_err(|_| refused)?;
        Ok(Self { arenas: [device, pinned] })
    }

    /// Address and bytes of the host's arena, which the driver pins.
    pub(crate) fn pinned_range(&self) -> (*mut u8, usize) {
        let arena = &self.arenas[Arena::Pinned as usize];
        (arena.as_ptr(), arena.len())
    }

    fn at(&self, t: Tensor) -> *mut u8 {
        let (arena, range) = (&self.arenas[t.arena() as usize], t.range());
        // `Device` has checked the handle against the plan; this guards against a handle of another
        // plan.
        assert!(range.end <= arena.len() as u64, "a tensor outside its arena");
        arena.as_ptr().wrapping_add(range.start as usize)
    }

    /// A view for reading a range of the running op, or a peer's range inside a collective.
    pub(crate) fn view(&self, t: Tensor) -> View<'_> {
        // SAFETY: in bounds (`at`), aligned (plans align to 256, slices step by whole elements),
        // and no one writes it meanwhile (see `Send`).
        unsafe { view(self.at(t), t.dtype(), t.span().len()) }
    }

    /// A view for writing a range. Callers form it once per declared range of the running op.
    pub(crate) fn view_mut(&self, t: Tensor) -> ViewMut<'_> {
        // SAFETY: as in `view`; and no other thread reads or writes it meanwhile.
        unsafe { view_mut(self.at(t), t.dtype(), t.span().len()) }
    }

    /// The bytes of a range that [`view`](Self::view) would show.
    pub(crate) fn bytes(&self, t: Tensor) -> &[u8] {
        // SAFETY: as in `view`.
        unsafe { std::slice::from_raw_parts(self.at(t), t.bytes() as usize) }
    }
}

/// `$part!(variant, type)` for the variant of a view that has elements of `$dtype`.
macro_rules! by_type {
    ($dtype:expr, $part:ident) => {
        match $dtype {
            Dtype::F16 => $part!(F16, f16),
            Dtype::Bf16 => $part!(Bf16, bf16),
            Dtype::F32 => $part!(F32, f32),
            Dtype::F64 => $part!(F64, f64),
            Dtype::I32 => $part!(I32, i32),
            Dtype::U16 => $part!(U16, u16),
            Dtype::E4m3 => $part!(E4m3, E4m3),
            Dtype::E5m2 => $part!(E5m2, E5m2),
        }
    };
}

/// The `n` elements at `at`. Every bit pattern is a value of their type.
///
/// # Safety
/// The elements exist, are aligned, and are not written while the view lives.
unsafe fn view<'a>(at: *const u8, dtype: Dtype, n: usize) -> View<'a> {
    macro_rules! part {
        ($variant:ident, $t:ty) => {
            // SAFETY: the caller promises it.
            View::$variant(unsafe { std::slice::from_raw_parts(at.cast::<$t>(), n) })
        };
    }
    by_type!(dtype, part)
}

/// The `n` elements at `at`, for writing.
///
/// # Safety
/// The conditions of [`view`] hold, and nothing else reads the elements while the view lives.
unsafe fn view_mut<'a>(at: *mut u8, dtype: Dtype, n: usize) -> ViewMut<'a> {
    macro_rules! part {
        ($variant:ident, $t:ty) => {
            // SAFETY: the caller promises it.
            ViewMut::$variant(unsafe { std::slice::from_raw_parts_mut(at.cast::<$t>(), n) })
        };
    }
    by_type!(dtype, part)
}

/// Elements outside of a plan's memory: from another process, or on their way to or from a GPU.
#[derive(Debug)]
pub(crate) struct StagedElements {
    dtype: Dtype,
    len: usize,
    /// Words of the widest type, so that every type is aligned.
    words: Vec<u64>,
}

impl StagedElements {
    /// `len` zeros.
    pub(crate) fn new(dtype: Dtype, len: usize) -> Self {
        let bytes = len * dtype.bytes() as usize;
        Self { dtype, len, words: vec![0; bytes.div_ceil(size_of::<u64>())] }
    }

    /// Elements of `dtype`, as [`Memory::bytes`] shows them.
    pub(crate) fn of_bytes(dtype: Dtype, bytes: &[u8]) -> Self {
        let mut all = Self::new(dtype, bytes.len() / dtype.bytes() as usize);
        all.bytes_mut().copy_from_slice(bytes);
        all
    }

    /// Keeps the first `len` elements.
    pub(crate) const fn truncate(&mut self, len: usize) {
        self.len = if len < self.len { len } else { self.len };
    }

    pub(crate) fn view(&self) -> View<'_> {
        // SAFETY: `words` holds `len` elements, is aligned for every type, and is borrowed.
        unsafe { view(self.words.as_ptr().cast(), self.dtype, self.len) }
    }

    pub(crate) fn view_mut(&mut self) -> ViewMut<'_> {
        // SAFETY: as in `view`; and it is borrowed for writing.
        unsafe { view_mut(self.words.as_mut_ptr().cast(), self.dtype, self.len) }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &cast_slice(&self.words)[..self.len * self.dtype.bytes() as usize]
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut cast_slice_mut(&mut self.words)[..self.len * self.dtype.bytes() as usize]
    }
}

/// The error for a plan that needs `wanted` bytes, with the kernels' memory, and does not fit
/// `limit`.
pub(crate) fn out_of_memory(rank: Rank, plan: &Plan, wanted: u64, limit: u64) -> Error {
    let mut entries = plan.entries().iter().filter(|e| e.arena == Arena::Device);
    let first = entries.find(|e| e.range.end > limit);
    let free_at = first.map_or((plan.bytes(Arena::Device), "what kernels need".into()), |e| {
        (e.range.start, e.name.clone())
    });
    let mut pools = plan.pools(Arena::Device);
    pools.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    let (rank, arena) = (rank.index(), Arena::Device);
    Error::from(Box::new(OutOfMemory { rank, arena, wanted, limit, free_at, pools }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arenas_are_as_long_as_the_plan_says_and_hold_no_other_plans_tensors() {
        let mut plan = Plan::default();
        let on = |arena| (arena, "test");
        let x = plan.tensor(on(Arena::Device), "x", Dtype::Bf16, (3, 100));
        let y = plan.tensor(on(Arena::Pinned), "y", Dtype::F32, (1, 7));
        let memory = Memory::new(&plan, &HostPlace::default()).expect("memory");
        for arena in [Arena::Device, Arena::Pinned] {
            assert_eq!(memory.arenas[arena as usize].len() as u64, plan.bytes(arena));
        }
        assert!(matches!(memory.view(x), View::Bf16(zeros) if zeros == [bf16::ZERO; 300]));
        assert!(matches!(memory.view_mut(y), ViewMut::F32(zeros) if zeros == [0.0; 7]));
        let beyond = plan.tensor(on(Arena::Device), "z", Dtype::F32, (1, 1));
        let seen = std::panic::AssertUnwindSafe(|| memory.view(beyond).len());
        assert!(std::panic::catch_unwind(seen).is_err());
    }

    #[test]
    fn storage_types_round_trip() {
        for dtype in Dtype::ALL {
            // Halves have no sign.
            let last = if dtype == Dtype::U16 { 65_535.0 } else { -3.0 };
            let values = [0.0, 1.0, 96.0, last];
            let mut staged = StagedElements::new(dtype, 5);
            staged.truncate(4);
            staged.view_mut().fill(&|i| values[i]);
            assert_eq!(staged.bytes().len() as u64, 4 * dtype.bytes());
            let mut read = [0.0; 4];
            StagedElements::of_bytes(dtype, staged.bytes()).view().widen(&mut read);
            assert_eq!(read, values);
        }
    }

    #[test]
    fn staging_fills_its_nodes_in_order() {
        let mut plan = Plan::default();
        let mut bytes = |pool: crate::Pool, name: &str, pages: usize| {
            plan.tensor((Arena::Pinned, pool), name, Dtype::F32, (pages, PAGE / 4));
        };
        let staging = crate::Pool::staging("staging");
        bytes(staging, "a", 4);
        bytes("states".into(), "b", 8);
        bytes(staging, "c", 2);
        bytes(staging, "d", 2);
        let place = |nodes: &[u32], staging: &[(u32, u64)]| HostPlace {
            nodes: nodes.to_vec(),
            staging: staging.to_vec(),
            ..HostPlace::default()
        };
        let parts = |place: HostPlace| -> Vec<(usize, usize, Vec<u32>)> {
            let pages =
                |part: topology::Part| (part.range.start / PAGE, part.range.end / PAGE, part.nodes);
            place.parts(&plan).into_iter().map(pages).collect()
        };
        let five = 5 * PAGE as u64;
        let far = [(1, five), (0, u64::MAX)];
        let all = [(0, 4, vec![1]), (12, 13, vec![1]), (13, 16, vec![0])];
        assert_eq!(parts(place(&[0, 1], &far)), all);
        let near = [(0, 4, vec![0]), (12, 16, vec![0])];
        assert_eq!(parts(place(&[0, 1], &[(0, u64::MAX)])), near);
        // There are no parts if the whole arena is on the staging node or no node is named.
        assert_eq!(parts(place(&[0], &[(0, u64::MAX)])), []);
        assert_eq!(parts(HostPlace::default()), []);
    }
}
