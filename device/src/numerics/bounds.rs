//! What a machine could do at most, to compare with: the update's loads and stores without its arithmetic, and fused
//! multiply-adds without memory.

use super::path::SimdPath;
use super::update::{Master, Update};
use super::{round, simd};
use crate::view::BLOCK;
use crate::{View, ViewMut};
use half::slice::HalfFloatSliceExt;

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

/// Chains that run side by side, and numbers in each.
const CHAINS: usize = 12;
const NUMBERS: usize = 16;

/// Does `rounds` times [`FMA_FLOPS`] operations in registers; returns something that depends on all of them.
pub fn multiply_add(rounds: usize) -> f32 {
    SimdPath::current().run(
        #[inline(always)]
        || {
            let mut chains = [[1.0f32; NUMBERS]; CHAINS];
            let (a, b) = (std::hint::black_box(0.999f32), std::hint::black_box(0.001f32));
            for _ in 0..rounds {
                for chain in &mut chains {
                    for x in chain {
                        *x = x.mul_add(a, b);
                    }
                }
            }
            chains.iter().flatten().sum()
        },
    )
}

/// Operations of a round of [`multiply_add`].
pub const FMA_FLOPS: usize = 2 * CHAINS * NUMBERS;
