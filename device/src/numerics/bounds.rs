//! What a machine could do at most, to compare with: the update's loads and stores without its arithmetic, passes over
//! memory, and fused multiply-adds without memory.

use super::lanes::{self, Kernel, Lanes};
use super::path::SimdPath;
use super::simd;
use super::update::{Master, Update};
use crate::{View, ViewMut};
use half::slice::HalfFloatSliceExt;
use pulp::bytemuck::{AnyBitPattern, NoUninit, try_cast_slice, try_cast_slice_mut};
use pulp::{Arch, Simd, WithSimd};

/// The memory traffic of [`update`](super::update), with additions for arithmetic. Of whole vectors, with gradients and
/// parameters of 16 bits. The states are nonsense afterwards.
pub fn traffic(update: Update<'_>) {
    lanes::run(SimdPath::current(), &mut Traffic(update));
    simd::streamed();
}

/// As 32-bit words; a last element of 16 bits that has no neighbour is left out.
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

struct Traffic<'a>(Update<'a>);

impl Kernel for Traffic<'_> {
    #[inline(always)]
    fn run<L: Lanes>(&mut self, l: L, _: SimdPath) {
        let Update { grad, states, param, streams, .. } = &mut self.0;
        let n = grad.len() / L::PAIR;
        let grad: &[u16] = match grad {
            View::F16(grad) => grad.reinterpret_cast(),
            View::Bf16(grad) => grad.reinterpret_cast(),
            _ => unreachable!("the traffic of gradients of 16 bits is measured"),
        };
        let grad = L::as_simd_u32s(words(grad)).0;
        let [mut m, mut v] = [moment::<L>(&mut states.momentum), moment::<L>(&mut states.variance)];
        let (mut master, lower) = match &mut states.master {
            Master::Whole(x) => (Touched::<L>::new(x), false),
            Master::Lower(x) => (Touched::<L>::new(x), true),
        };
        let mut param = moment::<L>(param);
        for (i, g) in grad.iter().enumerate().take(n) {
            simd::prefetch(g, L::PAIR);
            m.touch(l, i);
            v.touch(l, i);
            master.touch(l, i);
            if lower {
                param.touch(l, i);
            } else if let Some(out) = param.vectors.get_mut(i) {
                if *streams {
                    simd::stream_vector(*g, out);
                } else {
                    *out = *g;
                }
            }
        }
    }
}

/// Something that is read and written.
struct Touched<'a, L: Lanes> {
    vectors: &'a mut [L::u32s],
    /// Vectors for a pair of them of 16-bit elements.
    each: usize,
}

impl<'a, L: Lanes> Touched<'a, L> {
    #[inline(always)]
    fn new<T: NoUninit + AnyBitPattern>(x: &'a mut [T]) -> Self {
        Self { vectors: L::as_mut_simd_u32s(words_mut(x)).0, each: size_of::<T>() / 2 }
    }

    #[inline(always)]
    fn touch(&mut self, l: L, i: usize) {
        let first = i * self.each;
        let Some(vectors) = self.vectors.get_mut(first..first + self.each) else { return };
        for x in vectors {
            simd::prefetch(x, L::PAIR / self.each);
            *x = l.add_u32s(*x, l.splat_u32s(1));
        }
    }
}

#[inline(always)]
fn moment<'a, L: Lanes>(state: &'a mut ViewMut<'_>) -> Touched<'a, L> {
    match state {
        ViewMut::F32(x) => Touched::new(x),
        ViewMut::F16(x) => Touched::new(x.reinterpret_cast_mut()),
        ViewMut::Bf16(x) => Touched::new(x.reinterpret_cast_mut()),
        _ => unreachable!("moments and parameters are numbers of 32 or 16 bits"),
    }
}

/// A pass over memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// Reads `from`.
    Read,
    /// Writes `to`, past the caches.
    Write,
    /// Reads `from` and writes `to`, past the caches.
    Copy,
    /// Reads `to` and writes it in place.
    Change,
}

/// Makes `pass` over whole vectors of `from` and of `to`, as fast as this machine can.
pub fn sweep(pass: Pass, from: &[f32], to: &mut [f32]) {
    lanes::run(SimdPath::current(), &mut Sweep(pass, from, to));
    simd::streamed();
}

struct Sweep<'a>(Pass, &'a [f32], &'a mut [f32]);

impl Kernel for Sweep<'_> {
    #[inline(always)]
    fn run<L: Lanes>(&mut self, l: L, _: SimdPath) {
        let Self(pass, from, to) = self;
        let from = L::as_simd_u32s(words(from)).0;
        let to = L::as_mut_simd_u32s(words_mut(to)).0;
        let (each, one) = (L::PAIR / 2, l.splat_u32s(1));
        match pass {
            Pass::Read => {
                let mut sum = one;
                for x in from {
                    simd::prefetch(x, each);
                    sum = l.add_u32s(sum, *x);
                }
                std::hint::black_box(sum);
            }
            Pass::Write => to.iter_mut().for_each(|x| simd::stream_vector(one, x)),
            Pass::Copy => {
                for (x, y) in from.iter().zip(to) {
                    simd::prefetch(x, each);
                    simd::stream_vector(*x, y);
                }
            }
            Pass::Change => {
                for x in to {
                    simd::prefetch(x, each);
                    *x = l.add_u32s(*x, one);
                }
            }
        }
    }
}

/// Chains of operations that run side by side: enough to hide the latency of one.
const CHAINS: usize = 12;

/// Does `rounds` rounds of fused multiply-adds in registers, with the widest vectors of this machine; returns how many
/// floating-point operations these were.
pub fn multiply_add(rounds: usize) -> f64 {
    struct Chains(usize);
    impl WithSimd for Chains {
        type Output = f64;
        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) -> f64 {
            let mut chains = [simd.splat_f32s(1.0); CHAINS];
            let (a, b) = std::hint::black_box((0.999, 0.001));
            let (a, b) = (simd.splat_f32s(a), simd.splat_f32s(b));
            for _ in 0..self.0 {
                for chain in &mut chains {
                    *chain = simd.mul_add_f32s(*chain, a, b);
                }
            }
            std::hint::black_box(chains.map(|chain| simd.reduce_sum_f32s(chain)));
            2.0 * (self.0 * CHAINS * S::F32_LANES) as f64
        }
    }
    Arch::new().dispatch(Chains(rounds))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Rule;
    use crate::numerics::{Noise, States};
    use half::bf16;

    /// A tile at the end of a run may have an odd number of elements.
    #[test]
    fn the_traffic_of_an_odd_tile_is_that_of_its_whole_vectors() {
        let (whole, odd) = (64 * 40, 64 * 40 + 1);
        let (grad, mut param) = (vec![bf16::ZERO; odd], vec![bf16::ONE; odd]);
        let [mut master, mut m, mut v] = [0; 3].map(|_| vec![0.0f32; odd]);
        traffic(Update {
            rule: Rule::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 },
            control: &[],
            grad: View::Bf16(&grad),
            states: States {
                master: Master::Whole(&mut master),
                momentum: ViewMut::F32(&mut m),
                variance: ViewMut::F32(&mut v),
            },
            param: ViewMut::Bf16(&mut param),
            decayed: 0,
            noise: Noise { runs: &[], start: 0 },
            streams: false,
        });
        for touched in [&master, &m, &v] {
            assert!(touched[..whole].iter().all(|x| x.to_bits() == 1));
        }
        assert!(param[..whole].iter().all(|x| *x == bf16::ZERO));
    }

    #[test]
    fn sweeps_do_what_they_say_on_every_path() {
        // Whole vectors on every path.
        let n = 64 * 40;
        let from: Vec<f32> = (0..n).map(|i| i as f32).collect();
        let before = SimdPath::current();
        for path in SimdPath::available() {
            path.choose().unwrap();
            let mut memory = vec![0.0f32; n + 32];
            let line = memory.as_ptr().align_offset(64);
            // At the start of a line, where stores go past the caches, and elsewhere.
            for start in [line + 16, line + 1] {
                memory.fill(0.0);
                let all = start..start + n;
                let bits = |to: &[f32]| to.iter().map(|x| x.to_bits()).collect::<Vec<u32>>();
                sweep(Pass::Write, &[], &mut memory[all.clone()]);
                assert_eq!(bits(&memory[all.clone()]), vec![1; n], "{path:?}");
                sweep(Pass::Change, &[], &mut memory[all.clone()]);
                assert_eq!(bits(&memory[all.clone()]), vec![2; n], "{path:?}");
                sweep(Pass::Copy, &from, &mut memory[all.clone()]);
                assert_eq!(memory[all.clone()], from, "{path:?}");
                sweep(Pass::Read, &from, &mut []);
                let beside = [&memory[..start], &memory[all.end..]].concat();
                assert!(beside.iter().all(|x| x.to_bits() == 0), "{path:?}");
            }
        }
        before.choose().unwrap();
    }
}
