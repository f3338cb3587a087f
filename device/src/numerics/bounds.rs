//! Benchmarks of the machine's limits: passes over memory, and fused multiply-adds in registers.

use super::lanes::{self, Kernel, Lanes, SupportedPath, prefetch, stream_vector};
use super::path::SimdPath;
use pulp::bytemuck::{cast_slice, cast_slice_mut};
use pulp::{Arch, Simd, WithSimd};

/// A pass over memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pass {
    /// Reads `from`.
    Read,
    /// Writes `to` and bypasses the caches.
    Write,
    /// Reads `from`, writes `to`, and bypasses the caches.
    Copy,
    /// Reads `to` and writes it in place.
    Change,
}

/// Runs `pass` over `from` and `to` with this process's SIMD path. Skips the last elements if they
/// do not fill a vector.
pub fn sweep(pass: Pass, from: &[f32], to: &mut [f32]) {
    lanes::run(SimdPath::current(), &mut Sweep(pass, from, to));
}

struct Sweep<'a>(Pass, &'a [f32], &'a mut [f32]);

impl Kernel for Sweep<'_> {
    #[inline(always)]
    fn run<L: Lanes>(&mut self, l: L, _: SupportedPath) {
        let Self(pass, from, to) = self;
        let from = L::as_simd_u32s(cast_slice(from)).0;
        let to = L::as_mut_simd_u32s(cast_slice_mut(to)).0;
        let (each, one) = (L::PAIR / 2, l.splat_u32s(1));
        match pass {
            Pass::Read => {
                let mut sum = one;
                for x in from {
                    prefetch(x, each);
                    sum = l.add_u32s(sum, *x);
                }
                std::hint::black_box(sum);
            }
            Pass::Write => to.iter_mut().for_each(|x| stream_vector(l, one, x)),
            Pass::Copy => {
                for (x, y) in from.iter().zip(to) {
                    prefetch(x, each);
                    stream_vector(l, *x, y);
                }
            }
            Pass::Change => {
                for x in to {
                    prefetch(x, each);
                    *x = l.add_u32s(*x, one);
                }
            }
        }
    }
}

/// STREAM's triad: `to` = `b` + 3 `c`, with stores that bypass the caches, by this process's SIMD path. Skips
/// the last elements if they do not fill a vector.
pub fn triad(b: &[f32], c: &[f32], to: &mut [f32]) {
    lanes::run(SimdPath::current(), &mut Triad { b, c, to });
}

struct Triad<'a> {
    b: &'a [f32],
    c: &'a [f32],
    to: &'a mut [f32],
}

impl Kernel for Triad<'_> {
    #[inline(always)]
    fn run<L: Lanes>(&mut self, l: L, _: SupportedPath) {
        let (b, c) = (L::as_simd_f32s(self.b).0, L::as_simd_f32s(self.c).0);
        let to = L::as_mut_simd_u32s(cast_slice_mut(self.to)).0;
        let (each, factor) = (L::PAIR / 2, l.splat_f32s(3.0));
        for ((b, c), to) in b.iter().zip(c).zip(to) {
            prefetch(b, each);
            prefetch(c, each);
            stream_vector(l, l.transmute_u32s_f32s(l.mul_add_f32s(factor, *c, *b)), to);
        }
    }
}

/// Number of independent chains of operations: enough to hide the latency of one operation.
const CHAINS: usize = 12;

/// Runs `rounds` rounds of fused multiply-adds in registers, with the widest vectors of this
/// machine. Returns the number of floating-point operations.
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

    #[test]
    fn sweeps_do_what_they_say_on_every_path() {
        // A whole number of vectors on every path.
        let n = 64 * 40;
        let from: Vec<f32> = (0..n).map(|i| i as f32).collect();
        let before = SimdPath::current();
        for path in SimdPath::available() {
            path.choose().unwrap();
            let mut memory = vec![0.0f32; n + 32];
            let line = memory.as_ptr().align_offset(64);
            // One range starts at a cache line, where stores bypass the caches; the other does not.
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
                triad(&from, &from, &mut memory[all.clone()]);
                let four: Vec<f32> = from.iter().map(|x| 4.0 * x).collect();
                assert_eq!(memory[all.clone()], four, "{path:?}");
                let outside = [&memory[..start], &memory[all.end..]].concat();
                assert!(outside.iter().all(|x| x.to_bits() == 0), "{path:?}");
            }
        }
        before.choose().unwrap();
    }
}
