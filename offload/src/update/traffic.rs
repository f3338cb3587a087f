//! The loads and stores of an update without its arithmetic, to measure a lower bound of its time.

use super::Update;
use device::numerics::SimdPath;
use device::numerics::lanes::{self, Kernel, Lanes, SupportedPath, prefetch_ahead, stream_vector};
use device::{View, ViewMut};
use half::slice::HalfFloatSliceExt;
use pulp::bytemuck::{AnyBitPattern, NoUninit, try_cast_slice, try_cast_slice_mut};

/// Stores of a traffic loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreKind {
    /// All stores go to the caches.
    Cached,
    /// Stores of arrays that the update only writes bypass the caches, as those of the update.
    Streamed,
    /// All stores bypass the caches.
    AllStreamed,
}

/// A loop over the memory traffic of an update. Which loop is the fastest differs by processor, and only
/// the fastest one is a bound of the update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrafficLoop {
    /// SIMD path, which decides the width of vectors.
    pub path: SimdPath,
    /// Kind of the stores.
    pub stores: StoreKind,
    /// Elements by which prefetches are ahead; 0 for none.
    pub ahead: usize,
}

impl TrafficLoop {
    /// All loops for this machine.
    pub fn all() -> Vec<Self> {
        let stores = [StoreKind::Streamed, StoreKind::Cached, StoreKind::AllStreamed];
        let mut all = Vec::new();
        for path in SimdPath::available() {
            for stores in stores {
                all.extend([768, 0, 256, 2048].map(|ahead| Self { path, stores, ahead }));
            }
        }
        all
    }

    /// Words for the loop, such as `avx512, streamed stores, prefetches 768 ahead`.
    pub fn words(self) -> String {
        let stores = match self.stores {
            StoreKind::Cached => "cached stores",
            StoreKind::Streamed => "streamed stores",
            StoreKind::AllStreamed => "all stores streamed",
        };
        match self.ahead {
            0 => format!("{}, {stores}, no prefetches", self.path),
            ahead => format!("{}, {stores}, prefetches {ahead} ahead", self.path),
        }
    }
}

/// The memory traffic of [`update`](super::update) by the loop `by`, with additions instead of its
/// arithmetic. It needs 16-bit gradients and parameters, and covers whole vectors only. The states are
/// nonsense after a run.
pub(crate) fn traffic(update: Update<'_>, by: TrafficLoop) {
    lanes::run(by.path, &mut Traffic(update, by));
}

/// `x` as 32-bit words, without an odd last 16-bit element.
#[inline(always)]
fn words<T: NoUninit + AnyBitPattern>(x: &[T]) -> &[u32] {
    let whole = x.len() - x.len() % (4 / size_of::<T>());
    try_cast_slice(&x[..whole]).unwrap_or_else(|e| unreachable!("tiles begin at whole words: {e}"))
}

#[inline(always)]
fn words_mut<T: NoUninit + AnyBitPattern>(x: &mut [T]) -> &mut [u32] {
    let whole = x.len() - x.len() % (4 / size_of::<T>());
    let words = try_cast_slice_mut(&mut x[..whole]);
    words.unwrap_or_else(|e| unreachable!("tiles begin at whole words: {e}"))
}

struct Traffic<'a>(Update<'a>, TrafficLoop);

impl Kernel for Traffic<'_> {
    #[inline(always)]
    fn run<L: Lanes>(&mut self, l: L, _: SupportedPath) {
        let TrafficLoop { stores, ahead, .. } = self.1;
        let Update { grad, states: [master, momentum, variance], param, .. } = &mut self.0;
        let n = grad.len() / L::PAIR;
        let grad: &[u16] = match grad {
            View::F16(grad) => grad.reinterpret_cast(),
            View::Bf16(grad) => grad.reinterpret_cast(),
            _ => unreachable!("the traffic of gradients of 16 bits is measured"),
        };
        let grad = L::as_simd_u32s(words(grad)).0;
        let lower = matches!(master, ViewMut::U16(_));
        let [mut master, mut m, mut v] =
            [master, momentum, variance].map(|state| touched::<L>(state));
        let mut param = touched::<L>(param);
        for (i, g) in grad.iter().enumerate().take(n) {
            prefetch_ahead(g, L::PAIR, ahead);
            m.touch(l, i, self.1);
            v.touch(l, i, self.1);
            master.touch(l, i, self.1);
            if lower {
                param.touch(l, i, self.1);
            } else if let Some(out) = param.vectors.get_mut(i) {
                if stores == StoreKind::Cached {
                    *out = *g;
                } else {
                    stream_vector(l, *g, out);
                }
            }
        }
    }
}

/// An array that the traffic reads and writes.
struct TouchedVectors<'a, L: Lanes> {
    vectors: &'a mut [L::u32s],
    /// Number of vectors of this array per vector of 16-bit elements: 1 or 2.
    each: usize,
}

impl<'a, L: Lanes> TouchedVectors<'a, L> {
    #[inline(always)]
    fn new<T: NoUninit + AnyBitPattern>(x: &'a mut [T]) -> Self {
        Self { vectors: L::as_mut_simd_u32s(words_mut(x)).0, each: size_of::<T>() / 2 }
    }

    #[inline(always)]
    fn touch(&mut self, l: L, i: usize, by: TrafficLoop) {
        let first = i * self.each;
        let Some(vectors) = self.vectors.get_mut(first..first + self.each) else { return };
        for x in vectors {
            prefetch_ahead(x, L::PAIR / self.each, by.ahead);
            let touched = l.add_u32s(*x, l.splat_u32s(1));
            if by.stores == StoreKind::AllStreamed {
                stream_vector(l, touched, x);
            } else {
                *x = touched;
            }
        }
    }
}

#[inline(always)]
fn touched<'a, L: Lanes>(state: &'a mut ViewMut<'_>) -> TouchedVectors<'a, L> {
    match state {
        ViewMut::F32(x) => TouchedVectors::new(x),
        ViewMut::U16(x) => TouchedVectors::new(x),
        ViewMut::F16(x) => TouchedVectors::new(x.reinterpret_cast_mut()),
        ViewMut::Bf16(x) => TouchedVectors::new(x.reinterpret_cast_mut()),
        _ => unreachable!("states and parameters are numbers of 32 or 16 bits"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::update::{Noise, Rule};
    use half::bf16;

    /// The last tile of a run may have an odd number of elements.
    #[test]
    fn the_traffic_of_an_odd_tile_is_that_of_its_whole_vectors() {
        let (whole, odd) = (64 * 40, 64 * 40 + 1);
        for by in TrafficLoop::all() {
            let (grad, mut param) = (vec![bf16::ZERO; odd], vec![bf16::ONE; odd]);
            let [mut master, mut m, mut v] = [0; 3].map(|_| vec![0.0f32; odd]);
            let update = Update {
                rule: Rule::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 },
                control: &[],
                grad: View::Bf16(&grad),
                states: [ViewMut::F32(&mut master), ViewMut::F32(&mut m), ViewMut::F32(&mut v)],
                old: None,
                param: ViewMut::Bf16(&mut param),
                decayed: 0,
                noise: Noise { runs: &[], start: 0 },
                streams: false,
            };
            traffic(update, by);
            for touched in [&master, &m, &v] {
                assert!(touched[..whole].iter().all(|x| x.to_bits() == 1), "{}", by.words());
            }
            assert!(param[..whole].iter().all(|x| *x == bf16::ZERO), "{}", by.words());
        }
    }
}
