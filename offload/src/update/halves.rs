//! An fp32 parameter as two halves: the nearest bf16, and 16 bits for the rest.

const INFINITY: u32 = 0x7f80_0000;
const MAGNITUDE: u32 = 0x7fff_ffff;

/// Splits an fp32 parameter into [`as_bf16_parameter`] and the lower 16 bits.
#[inline(always)]
pub(crate) const fn split(x: f32) -> (u16, u16) {
    let bits = x.to_bits();
    let quiet = ((bits >> 16) as u16) | 0x40;
    let nearest = (bits.wrapping_add(0x8000) >> 16) as u16;
    (if bits & MAGNITUDE > INFINITY { quiet } else { nearest }, bits as u16)
}

/// The inverse of [`split`].
#[inline(always)]
pub(crate) const fn join(high: u16, low: u16) -> f32 {
    let is_nan = (high & 0x7fff) > (INFINITY >> 16) as u16;
    let rounded_up = low >= 0x8000 && !is_nan;
    let upper = ((high as u32) << 16).wrapping_sub(if rounded_up { 0x1_0000 } else { 0 });
    f32::from_bits(upper | low as u32)
}

/// `x` as a bf16 parameter, back in fp32: rounded to nearest, ties away from zero. With ties to
/// even, some bf16 would stand for 65,537 fp32 values, and 16 bits distinguish only 65,536.
pub(crate) fn as_bf16_parameter(x: f32) -> f32 {
    f32::from_bits(u32::from(split(x).0) << 16)
}

/// The lower 16 bits of `x`, which [`from_halves`] needs besides [`as_bf16_parameter`].
pub(crate) const fn lower_half(x: f32) -> u16 {
    split(x).1
}

/// Joins a `parameter` from [`as_bf16_parameter`] and its [`lower_half`] into the fp32 value.
pub(crate) const fn from_halves(parameter: f32, lower: u16) -> f32 {
    join((parameter.to_bits() >> 16) as u16, lower)
}

#[cfg(test)]
mod tests {
    use super::*;
    use device::random;
    use half::bf16;

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
}
