//! What a machine could do at most, to compare with: the update's loads and stores without its arithmetic, and fused
//! multiply-adds without memory.

use super::path::SimdPath;
use super::update::{Master, Update};
use super::{round, simd};
use crate::view::BLOCK;
use crate::{View, ViewMut};
use half::slice::HalfFloatSliceExt;
use pulp::{Arch, Simd, WithSimd};

/// The memory traffic of [`update`](super::update), with additions for arithmetic. The states are nonsense afterwards.
pub fn traffic(mut update: Update<'_>) {
    SimdPath::current().run(
        #[inline(always)]
        || pass(&mut update),
    );
    simd::streamed();
}

#[inline(always)]
fn pass(u: &mut Update<'_>) {
    let (mut wide, mut narrow) = ([0.0f32; BLOCK], [0u16; BLOCK]);
    for at in (0..u.grad.len()).step_by(BLOCK) {
        let n = BLOCK.min(u.grad.len() - at);
        let (wide, narrow, range) = (&mut wide[..n], &mut narrow[..n], at..at + n);
        match u.grad {
            View::F16(g) => narrow.copy_from_slice(g[range.clone()].reinterpret_cast()),
            View::Bf16(g) => narrow.copy_from_slice(g[range.clone()].reinterpret_cast()),
            other => {
                round::load(SimdPath::current(), other, at, wide);
                round::to_bf16(wide, narrow);
            }
        }
        bump(&mut u.states.momentum, at, n);
        bump(&mut u.states.variance, at, n);
        let reads = match &mut u.states.master {
            Master::Whole(master) => {
                master[range.clone()].iter_mut().for_each(|x| *x += 1.0);
                false
            }
            Master::Lower(low) => {
                low[range.clone()].iter_mut().for_each(|x| *x = x.wrapping_add(1));
                true
            }
        };
        let out: &mut [u16] = match &mut u.param {
            ViewMut::F16(out) => out[range].reinterpret_cast_mut(),
            ViewMut::Bf16(out) => out[range].reinterpret_cast_mut(),
            other => {
                other.store(at, wide);
                continue;
            }
        };
        if reads {
            out.iter_mut().zip(&*narrow).for_each(|(x, g)| *x ^= g);
        } else if u.streams {
            simd::stream(narrow, out);
        } else {
            out.copy_from_slice(narrow);
        }
    }
}

#[inline(always)]
fn bump(state: &mut ViewMut<'_>, at: usize, n: usize) {
    match state {
        ViewMut::F32(state) => state[at..at + n].iter_mut().for_each(|x| *x += 1.0),
        ViewMut::Bf16(state) => {
            let bits: &mut [u16] = state[at..at + n].reinterpret_cast_mut();
            bits.iter_mut().for_each(|x| *x = x.wrapping_add(1));
        }
        _ => {}
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
