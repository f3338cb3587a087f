//! Random bits for the stochastic rounding of moments: functions of the element, not of its place.

use super::elements::parts;
use device::numerics::lanes::Lanes;
use device::random;
use std::ops::Range;
use std::sync::Arc;

/// A run of a flat buffer that is contiguous in a tensor of the whole model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoiseRun {
    /// Elements of the run in the flat buffer.
    pub flat: Range<usize>,
    /// Key of the tensor's random stream, different for each tensor.
    pub stream: u64,
    /// Index of the run's first element in the whole tensor.
    pub global: u64,
}

/// The random bits of a tile's moments.
#[derive(Clone, Debug)]
pub struct TileNoise {
    /// The runs of the tile's segment, for moments of bf16.
    pub runs: Arc<[NoiseRun]>,
    /// The tile's first element in the segment's flat buffer.
    pub start: usize,
}

impl TileNoise {
    /// No random bits, for moments that are not rounded.
    pub fn none() -> Self {
        Self { runs: [].into(), start: 0 }
    }
}

/// Random bits for 16-bit moments. They depend on the tensor, the step and the index in the whole
/// tensor, not on the layout.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Noise<'a> {
    /// Runs in ascending order. An element in no run is padding, with a gradient of zero.
    pub(crate) runs: &'a [NoiseRun],
    /// Index of the first element of the update in the flat buffer.
    pub(crate) start: usize,
}

/// Random bits of elements that are consecutive in a stream.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Draw {
    stream: u64,
    /// Index of the first element in the whole tensor.
    global: u64,
}

/// Upper bits of a pair's index. Two elements share 32 random bits, and the lower 32 bits of the
/// pair's index count up.
const UPPER: u64 = !0xffff_ffff;

impl Noise<'_> {
    /// The random bits of the elements from element `at` of the update on, and the number of
    /// elements for which these bits suffice.
    pub(super) fn draw(&self, step: u64, at: usize) -> (Draw, usize) {
        let first = self.start + at;
        let run = self.runs.get(self.runs.partition_point(|run| run.flat.end <= first));
        let (draw, end) = match run {
            Some(run) if run.flat.start <= first => {
                let global = run.global + (first - run.flat.start) as u64;
                let stream = random::key(random::key(run.stream, step), global >> 33);
                (Draw { stream, global }, run.flat.end)
            }
            after => {
                let end = after.map_or(usize::MAX, |run| run.flat.start);
                (Draw { stream: 0, global: first as u64 }, end)
            }
        };
        let same = ((draw.global / 2) | !UPPER) + 1 - draw.global / 2;
        let same = (2 * same - draw.global % 2) as usize;
        (draw, same.min(end - first))
    }
}

impl Draw {
    /// 1 if the first element is the second element of its pair, else 0.
    pub(super) const fn lead(self) -> usize {
        (self.global % 2) as usize
    }

    /// Generates the random bits from the first pair on, vector by vector.
    #[inline(always)]
    pub(super) fn pairs<L: Lanes>(self, l: L) -> Pairs<L> {
        let mut places = [0; 16];
        let mut i = 0;
        while i < places.len() {
            places[i] = i as u32;
            i += 1;
        }
        let first = l.splat_u32s(((self.global / 2) as u32).wrapping_add(self.stream as u32));
        let next = l.add_u32s(first, L::as_simd_u32s(&places).0[0]);
        Pairs { next, key: (self.stream >> 32) as u32 }
    }
}

/// Generator of the random bits of pairs, one vector at a time.
pub(super) struct Pairs<L: Lanes> {
    /// Indices of the next pairs, plus the lower half of the stream.
    next: L::u32s,
    /// Upper half of the stream.
    key: u32,
}

impl<L: Lanes> Pairs<L> {
    /// The next 16 random bits of each even and each odd element: [`random::halves`] of the pair.
    #[inline(always)]
    pub(super) fn next(&mut self, l: L) -> [L::u32s; 2] {
        let z = l.mul_u32s(self.next, l.splat_u32s(random::HALVES[0]));
        self.next = l.add_u32s(self.next, l.splat_u32s(L::U32_LANES as u32));
        let z = l.xor_u32s(mixed(l, z), l.splat_u32s(self.key));
        parts(l, mixed(l, l.mul_u32s(z, l.splat_u32s(random::HALVES[1]))))
    }
}

#[inline(always)]
fn mixed<L: Lanes>(l: L, z: L::u32s) -> L::u32s {
    l.xor_u32s(z, l.wrapping_dyn_shr_u32s(z, l.splat_u32s(16)))
}
