//! How fp32 becomes 16 bits and comes back: parameters, halves of them, moments. Branch-free, so that it vectorises.

use super::path::SimdPath;
use super::simd;
use crate::View;
use half::slice::HalfFloatSliceExt;

const INFINITY: u32 = 0x7f80_0000;
const MAGNITUDE: u32 = 0x7fff_ffff;

/// The two halves of an fp32 parameter: [`as_bf16_parameter`] and the lower 16 bits.
#[inline(always)]
pub(super) const fn split(x: f32) -> (u16, u16) {
    let bits = x.to_bits();
    let quiet = ((bits >> 16) as u16) | 0x40;
    let nearest = (bits.wrapping_add(0x8000) >> 16) as u16;
    (if bits & MAGNITUDE > INFINITY { quiet } else { nearest }, bits as u16)
}

/// What [`split`] split.
#[inline(always)]
pub(super) const fn join(high: u16, low: u16) -> f32 {
    let is_nan = (high & 0x7fff) > (INFINITY >> 16) as u16;
    let rounded_up = low >= 0x8000 && !is_nan;
    let upper = ((high as u32) << 16).wrapping_sub(if rounded_up { 0x1_0000 } else { 0 });
    f32::from_bits(upper | low as u32)
}

/// `x` as a bf16 parameter, back in fp32: nearest, ties away from zero. With ties to even, 65,537 values would share
/// some bf16, one more than 16 further bits can tell apart.
pub fn as_bf16_parameter(x: f32) -> f32 {
    f32::from_bits(u32::from(split(x).0) << 16)
}

/// The 16 bits of `x` that [`as_bf16_parameter`] leaves out.
pub const fn lower_half(x: f32) -> u16 {
    split(x).1
}

/// The fp32 of which `parameter` is [`as_bf16_parameter`] and `lower` the [`lower_half`].
pub const fn from_halves(parameter: f32, lower: u16) -> f32 {
    join((parameter.to_bits() >> 16) as u16, lower)
}

/// IEEE half to single without instructions for it. Exact; NaN becomes quiet, as by hardware.
#[inline(always)]
const fn widen_f16(half: u16) -> f32 {
    let sign = (half as u32 & 0x8000) << 16;
    let magnitude = (half as u32 & 0x7fff) << 13;
    let special = magnitude | INFINITY | if magnitude > 0x0f80_0000 { 0x40_0000 } else { 0 };
    // Times 2^112: the other bias; numbers below the normal range come out right too.
    let scaled = (f32::from_bits(magnitude) * f32::from_bits(0x7780_0000)).to_bits();
    f32::from_bits(sign | if magnitude >= 0x0f80_0000 { special } else { scaled })
}

/// IEEE single to half without instructions for it: nearest, ties to even.
#[inline(always)]
const fn round_f16(x: f32) -> u16 {
    let bits = x.to_bits();
    let (sign, magnitude) = ((bits >> 16) & 0x8000, bits & MAGNITUDE);
    let nan = 0x7e00 | ((magnitude >> 13) & 0x3ff);
    let tie = (magnitude >> 13) & 1;
    let normal = magnitude.wrapping_add(0xfff + tie).wrapping_sub(112 << 23) >> 13;
    // 0.5 ends where the smallest halves do, so that the sum rounds as it should.
    let small = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0x3f00_0000);
    let finite = if magnitude < 0x3880_0000 { small } else { normal };
    let number = if magnitude >= 0x477f_f000 { 0x7c00 } else { finite };
    (sign | if magnitude > INFINITY { nan } else { number }) as u16
}

/// [`View::load`] by `path`.
#[inline(always)]
pub(super) fn load(path: SimdPath, view: View<'_>, at: usize, out: &mut [f32]) {
    match view {
        View::F16(halves) => widen(path, halves[at..at + out.len()].reinterpret_cast(), out),
        other => other.load(at, out),
    }
}

/// fp16 in fp32.
#[inline(always)]
pub(super) fn widen(path: SimdPath, halves: &[u16], out: &mut [f32]) {
    let done = simd::widen_f16(path, halves, out);
    out.iter_mut().zip(halves).skip(done).for_each(|(o, h)| *o = widen_f16(*h));
}

/// fp32 parameters as fp16.
#[inline(always)]
pub(super) fn to_f16(path: SimdPath, values: &[f32], out: &mut [u16]) {
    let done = simd::round_f16(path, values, out);
    out.iter_mut().zip(values).skip(done).for_each(|(o, x)| *o = round_f16(*x));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random;
    use half::{bf16, f16};

    #[test]
    fn halves_of_a_parameter_give_it_back_and_the_upper_one_is_the_nearest() {
        let lows = [0, 1, 0x7fff, 0x8000, 0x8001, 0xfffe, 0xffff];
        let edges = (0..=u16::MAX).flat_map(|h| lows.map(|low| (u32::from(h) << 16) | low));
        let drawn = (0..1_000_000).map(|i| random::bits(3, i) as u32);
        for bits in edges.chain(drawn) {
            let x = f32::from_bits(bits);
            let (high, low) = split(x);
            let back = join(high, low);
            if x.is_nan() {
                assert!(back.is_nan() && bf16::from_bits(high).is_nan());
                continue;
            }
            assert_eq!(back.to_bits(), bits, "{bits:08x}");
            let even = bf16::from_f32(x).to_bits();
            let tie = bits & 0xffff == 0x8000;
            assert!(high == even || (tie && high == even + 1), "{bits:08x}");
        }
    }

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
