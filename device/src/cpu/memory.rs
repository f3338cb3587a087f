//! The two arenas of a rank on the cpu backend.
#![expect(
    unsafe_code,
    reason = "typed views of raw arenas; sound because ops are admitted in order"
)]

use super::kernels;
use crate::{Arena, Dtype, Plan, Tensor, View, ViewMut};
use half::{bf16, f16};
use std::alloc::{Layout, alloc_zeroed, dealloc};

const PAGE: usize = 4096;
const HUGE_PAGE: usize = 2 << 20;

#[derive(Debug)]
struct Raw {
    start: *mut u8,
    layout: Layout,
}

impl Raw {
    fn new(arena: Arena, bytes: u64, align: usize) -> Result<Self, (Arena, u64)> {
        let refused = (arena, bytes);
        let size = usize::try_from(bytes.max(1)).map_err(|_| refused)?;
        let layout = Layout::from_size_align(size, align).map_err(|_| refused)?;
        // SAFETY: the layout is not empty.
        let start = unsafe { alloc_zeroed(layout) };
        if start.is_null() { Err(refused) } else { Ok(Self { start, layout }) }
    }
}

/// Bytes of one rank, reached by handle.
#[derive(Debug)]
pub(crate) struct Memory {
    arenas: [Raw; 2],
}

// SAFETY: the bytes are reached only through `view` and `view_mut`, whose callers run an `Admitted` op or
// stand between the meetings of a collective that one declared. Admitted ops that conflict are ordered by
// lanes and events (hazard.rs), and the executor keeps that order with acquire/release counters; so no two
// threads touch the same bytes at once unless both read.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Zeroed arenas of the plan's sizes.
    ///
    /// # Errors
    /// The arena and its bytes, when the machine refuses them.
    pub(crate) fn new(plan: &Plan) -> Result<Self, (Arena, u64)> {
        let device = Raw::new(Arena::Device, plan.bytes(Arena::Device), PAGE)?;
        let pinned = Raw::new(Arena::Pinned, plan.bytes(Arena::Pinned), PAGE)?;
        Ok(Self { arenas: [device, pinned] })
    }

    /// The host's arena alone, for a rank whose device memory is a GPU's; a multiple of a huge page, at one.
    ///
    /// # Errors
    /// As `new`.
    pub(crate) fn pinned(plan: &Plan) -> Result<Self, (Arena, u64)> {
        let bytes = plan.bytes(Arena::Pinned).max(1).next_multiple_of(HUGE_PAGE as u64);
        let device = Raw::new(Arena::Device, 0, PAGE)?;
        let pinned = Raw::new(Arena::Pinned, bytes, HUGE_PAGE)?;
        Ok(Self { arenas: [device, pinned] })
    }

    /// Where the host's arena starts, and its bytes: for the driver, which pins it.
    pub(crate) const fn pinned_range(&self) -> (*mut u8, usize) {
        let raw = &self.arenas[Arena::Pinned as usize];
        (raw.start, raw.layout.size())
    }

    fn at(&self, t: Tensor) -> *mut u8 {
        let (raw, range) = (&self.arenas[t.arena() as usize], t.range());
        // `Device` has checked the handle against the plan; this guards against another plan's.
        assert!(range.end <= raw.layout.size() as u64, "a tensor outside its arena");
        raw.start.wrapping_add(range.start as usize)
    }

    /// A range to read: of the running op, or a peer's inside a collective.
    pub(crate) fn view(&self, t: Tensor) -> View<'_> {
        let (at, n) = (self.at(t), t.len());
        macro_rules! part {
            ($variant:ident, $t:ty) => {
                // SAFETY: in bounds (`at`), aligned (plans align to 256, slices step by whole elements),
                // every bit pattern is a value, and no one writes it meanwhile (see `Send`).
                View::$variant(unsafe { std::slice::from_raw_parts(at.cast::<$t>(), n) })
            };
        }
        match t.dtype() {
            Dtype::F16 => part!(F16, f16),
            Dtype::Bf16 => part!(Bf16, bf16),
            Dtype::F32 => part!(F32, f32),
            Dtype::F64 => part!(F64, f64),
            Dtype::I32 => part!(I32, i32),
        }
    }

    /// A range to write. Callers form it once per declared range of the running op.
    pub(crate) fn view_mut(&self, t: Tensor) -> ViewMut<'_> {
        let (at, n) = (self.at(t), t.len());
        macro_rules! part {
            ($variant:ident, $t:ty) => {
                // SAFETY: as in `view`; and no one else reads or writes it meanwhile.
                ViewMut::$variant(unsafe { std::slice::from_raw_parts_mut(at.cast::<$t>(), n) })
            };
        }
        match t.dtype() {
            Dtype::F16 => part!(F16, f16),
            Dtype::Bf16 => part!(Bf16, bf16),
            Dtype::F32 => part!(F32, f32),
            Dtype::F64 => part!(F64, f64),
            Dtype::I32 => part!(I32, i32),
        }
    }
}

impl kernels::Memory for Memory {
    fn read(&self, t: Tensor) -> View<'_> {
        self.view(t)
    }
    fn write(&self, t: Tensor) -> ViewMut<'_> {
        self.view_mut(t)
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.start, self.layout) };
    }
}
