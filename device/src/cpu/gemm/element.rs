//! Conversion between storage types and f32.

use crate::numerics::view::{round_bf16, widen_bf16};
use crate::numerics::{E4m3, E5m2, round_f16};
use half::{bf16, f16};

/// A storage type of matmul operands.
pub(super) trait Element: Copy {
    /// Returns `src` as f32. Converted elements are written to `line`.
    #[inline(always)]
    fn as_f32<'a>(src: &'a [Self], line: &'a mut [f32]) -> &'a [f32] {
        let line = &mut line[..src.len()];
        Self::widen(src, line);
        line
    }
    fn widen(src: &[Self], dst: &mut [f32]);
    fn narrow(src: &[f32], dst: &mut [Self]);
}

impl Element for f32 {
    #[inline(always)]
    fn as_f32<'a>(src: &'a [Self], _: &'a mut [f32]) -> &'a [f32] {
        src
    }

    #[inline(always)]
    fn widen(src: &[Self], dst: &mut [f32]) {
        dst.copy_from_slice(src);
    }

    #[inline(always)]
    fn narrow(src: &[f32], dst: &mut [Self]) {
        dst.copy_from_slice(src);
    }
}

/// Implements `Element` for a type that is converted element by element.
macro_rules! one_by_one {
    ($t:ty, $widen:expr, $narrow:expr) => {
        impl Element for $t {
            #[inline(always)]
            fn widen(src: &[Self], dst: &mut [f32]) {
                for (dst, src) in dst.iter_mut().zip(src) {
                    *dst = $widen(*src);
                }
            }

            #[inline(always)]
            fn narrow(src: &[f32], dst: &mut [Self]) {
                for (dst, src) in dst.iter_mut().zip(src) {
                    *dst = $narrow(*src);
                }
            }
        }
    };
}
one_by_one!(f16, f16_to_f32, f16_from_f32);
one_by_one!(bf16, widen_bf16, round_bf16);
one_by_one!(E4m3, E4m3::to_f32, E4m3::from_f32);
one_by_one!(E5m2, E5m2::to_f32, E5m2::from_f32);

/// Widens exactly and without branches, so that the loop vectorises. Calls into `half` would not be
/// inlined.
#[inline(always)]
fn f16_to_f32(value: f16) -> f32 {
    const EXPONENT: u32 = 0x7c00 << 13;
    let bits = u32::from(value.to_bits());
    let magnitude = (bits & 0x7fff) << 13;
    let exponent = magnitude & EXPONENT;
    // The bias of the exponent grows by 112, and the exponent of infinities and NaN by 112 more.
    let normal = magnitude + (112 << 23);
    let special = normal + (112 << 23);
    // A subnormal number gets an implicit 1, which is subtracted again.
    let subnormal = f32::from_bits(normal + (1 << 23)) - f32::from_bits(113 << 23);
    let small = if exponent == 0 { subnormal.to_bits() } else { normal };
    let magnitude = if exponent == EXPONENT { special } else { small };
    f32::from_bits(magnitude | (bits & 0x8000) << 16)
}

#[inline(always)]
const fn f16_from_f32(value: f32) -> f16 {
    f16::from_bits(round_f16(value))
}
