//! Conversion between fp16 and fp32 without branches, so that loops vectorise.

use super::path::SimdPath;
use super::simd;
use crate::View;
use half::slice::HalfFloatSliceExt;

const INFINITY: u32 = 0x7f80_0000;
const MAGNITUDE: u32 = 0x7fff_ffff;

/// Widens an IEEE half in portable code. Exact; NaN becomes quiet, as in hardware.
#[inline(always)]
const fn widen_f16(half: u16) -> f32 {
    let sign = (half as u32 & 0x8000) << 16;
    let magnitude = (half as u32 & 0x7fff) << 13;
    let special = magnitude | INFINITY | if magnitude > 0x0f80_0000 { 0x40_0000 } else { 0 };
    // Multiplies by 2^112 for the other bias, also below the normal range.
    let scaled = (f32::from_bits(magnitude) * f32::from_bits(0x7780_0000)).to_bits();
    f32::from_bits(sign | if magnitude >= 0x0f80_0000 { special } else { scaled })
}

/// Rounds an IEEE single to half in portable code, to nearest, ties to even.
#[inline(always)]
pub(crate) const fn round_f16(x: f32) -> u16 {
    let bits = x.to_bits();
    let (sign, magnitude) = ((bits >> 16) & 0x8000, bits & MAGNITUDE);
    let nan = 0x7e00 | ((magnitude >> 13) & 0x3ff);
    let tie = (magnitude >> 13) & 1;
    let normal = magnitude.wrapping_add(0xfff + tie).wrapping_sub(112 << 23) >> 13;
    // The last bit of 0.5 has the value of the smallest half, so the sum rounds correctly.
    let small = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0x3f00_0000);
    let finite = if magnitude < 0x3880_0000 { small } else { normal };
    let number = if magnitude >= 0x477f_f000 { 0x7c00 } else { finite };
    (sign | if magnitude > INFINITY { nan } else { number }) as u16
}

/// Does the work of [`View::load`], compiled for `path`.
#[inline(always)]
pub(super) fn load(path: SimdPath, view: View<'_>, at: usize, out: &mut [f32]) {
    match view {
        View::F16(halves) => widen(path, halves[at..at + out.len()].reinterpret_cast(), out),
        other => other.load(at, out),
    }
}

/// Widens fp16 to fp32.
#[inline(always)]
pub(super) fn widen(path: SimdPath, halves: &[u16], out: &mut [f32]) {
    let done = simd::widen_f16(path, halves, out);
    out.iter_mut().zip(halves).skip(done).for_each(|(o, h)| *o = widen_f16(*h));
}

/// Rounds fp32 to fp16.
#[inline(always)]
pub(super) fn to_f16(path: SimdPath, values: &[f32], out: &mut [u16]) {
    let done = simd::round_f16(path, values, out);
    out.iter_mut().zip(values).skip(done).for_each(|(o, x)| *o = round_f16(*x));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random;
    use half::f16;

    #[test]
    fn portable_halves_agree_with_the_library() {
        for h in 0..=u16::MAX {
            assert_eq!(widen_f16(h).to_bits(), f16::from_bits(h).to_f32().to_bits(), "{h:04x}");
        }
        let edges = (0..=u16::MAX).flat_map(|h| {
            [0, 1, 0xfff, 0x1000, 0x1001, 0x8000, 0xffff].map(|low| (u32::from(h) << 16) | low)
        });
        for bits in edges.chain((0..1_000_000).map(|i| random::bits(5, i) as u32)) {
            let x = f32::from_bits(bits);
            assert_eq!(round_f16(x), f16::from_f32(x).to_bits(), "{bits:08x}");
        }
    }
}
