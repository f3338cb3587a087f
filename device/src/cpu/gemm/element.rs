//! Conversion between storage types and f32.

use super::Src;
use crate::numerics::{E4m3, E5m2};
use core::ops::Range;
use half::{bf16, f16};

/// A storage type.
pub(super) trait Element: Copy {
    /// `src` as f32. Converted elements are written to `line`.
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

/// A type whose elements are converted one by one.
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
one_by_one!(E4m3, E4m3::to_f32, E4m3::from_f32);
one_by_one!(E5m2, E5m2::to_f32, E5m2::from_f32);

impl Element for bf16 {
    #[inline(always)]
    fn widen(src: &[Self], dst: &mut [f32]) {
        for (dst, src) in dst.iter_mut().zip(src) {
            *dst = f32::from_bits(u32::from(src.to_bits()) << 16);
        }
    }

    #[inline(always)]
    fn narrow(src: &[f32], dst: &mut [Self]) {
        for (dst, src) in dst.iter_mut().zip(src) {
            // It has no branches, so that it vectorises; the carry rounds up to infinity correctly.
            let bits = src.to_bits();
            let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
            let bits = if src.is_nan() { bits >> 16 | 0x40 } else { rounded };
            *dst = Self::from_bits(bits as u16);
        }
    }
}

/// Widens exactly and without branches, so that it vectorises. Calls into `half` would not be
/// inlined.
#[inline(always)]
fn f16_to_f32(value: f16) -> f32 {
    const EXPONENT: u32 = 0x7c00 << 13;
    let bits = u32::from(value.to_bits());
    let magnitude = (bits & 0x7fff) << 13;
    let exponent = magnitude & EXPONENT;
    // The exponent's bias grows by 112; the exponent of infinities and NaN by 112 more.
    let normal = magnitude + (112 << 23);
    let special = normal + (112 << 23);
    // A subnormal number gets an implicit 1, which is subtracted again.
    let subnormal = f32::from_bits(normal + (1 << 23)) - f32::from_bits(113 << 23);
    let small = if exponent == 0 { subnormal.to_bits() } else { normal };
    let magnitude = if exponent == EXPONENT { special } else { small };
    f32::from_bits(magnitude | (bits & 0x8000) << 16)
}

/// Rounds to nearest, ties to even, without branches.
#[inline(always)]
fn f16_from_f32(value: f32) -> f16 {
    let sign = value.to_bits() & 0x8000_0000;
    let bits = value.to_bits() ^ sign;
    // Below 2^-14 an addition aligns the binary point and rounds.
    let magic = f32::from_bits(126 << 23);
    let subnormal = (f32::from_bits(bits) + magic).to_bits().wrapping_sub(magic.to_bits());
    let normal = bits.wrapping_sub(112 << 23).wrapping_add(0xfff + (bits >> 13 & 1)) >> 13;
    let small = if bits < 113 << 23 { subnormal } else { normal };
    let nan = 0x7e00 | (bits >> 13 & 0x3ff);
    let special = if bits > 255 << 23 { nan } else { 0x7c00 };
    let magnitude = if bits >= 143 << 23 { special } else { small };
    f16::from_bits((magnitude | sign >> 16) as u16)
}

impl Src<'_> {
    #[inline(always)]
    pub(super) fn widen(&self, range: Range<usize>, dst: &mut [f32]) {
        let dst = &mut dst[..range.len()];
        match self {
            Self::F32(data) => f32::widen(&data[range], dst),
            Self::F16(data) => f16::widen(&data[range], dst),
            Self::Bf16(data) => bf16::widen(&data[range], dst),
            Self::E4m3(data) => E4m3::widen(&data[range], dst),
            Self::E5m2(data) => E5m2::widen(&data[range], dst),
        }
    }
}
