//! Floating-point numbers of 8 bits (arXiv 2209.05433), rounded to nearest with ties to even.

/// fp8 for values and weights: 4 bits of exponent, 3 of mantissa; at most 448, no infinities.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
#[repr(transparent)]
pub struct E4m3(pub u8);

/// fp8 for gradients: 5 bits of exponent, 2 of mantissa; at most 57344.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
#[repr(transparent)]
pub struct E5m2(pub u8);

/// The layout of a format.
struct Layout {
    mantissa: u32,
    bias: u32,
    /// The code of the largest finite value.
    largest: u8,
}

const E4M3: Layout = Layout { mantissa: 3, bias: 7, largest: 0x7e };
const E5M2: Layout = Layout { mantissa: 2, bias: 15, largest: 0x7b };

/// NaN in both formats.
const NAN: u8 = 0x7f;

impl Layout {
    /// The code of `x`. Values beyond the largest value become the largest value, as in the GPU's
    /// conversion instruction with `satfinite`.
    #[inline(always)]
    const fn encode(&self, x: f32) -> u8 {
        let sign = (x.to_bits() >> 24) as u8 & 0x80;
        let bits = x.to_bits() & 0x7fff_ffff;
        if bits > 0x7f80_0000 {
            return NAN;
        }
        let dropped = 23 - self.mantissa;
        let rebias = (127 - self.bias) << 23;
        let least_normal = rebias + (1 << 23);
        // Below the normal values, an addition aligns the binary point and rounds.
        let magic = f32::from_bits(least_normal + (dropped << 23));
        let subnormal = (f32::from_bits(bits) + magic).to_bits() - magic.to_bits();
        let rounded = bits.wrapping_add((1 << (dropped - 1)) - 1 + (bits >> dropped & 1));
        let normal = rounded.wrapping_sub(rebias) >> dropped;
        let code = if bits < least_normal { subnormal } else { normal };
        let largest = self.largest as u32;
        sign | if code > largest { largest } else { code } as u8
    }

    /// The value of `code`, by the formula of the format.
    const fn decode(&self, code: u8) -> f32 {
        let (sign, code) = (((code & 0x80) as u32) << 24, (code & 0x7f) as u32);
        if code > self.largest as u32 {
            // The code of infinity in E5M2 follows the code of the largest value.
            let is_infinite = self.mantissa == 2 && code == self.largest as u32 + 1;
            return f32::from_bits(sign | if is_infinite { 0x7f80_0000 } else { 0x7fc0_0000 });
        }
        let dropped = 23 - self.mantissa;
        let rebias = (127 - self.bias) << 23;
        if code >> self.mantissa != 0 {
            return f32::from_bits(sign | ((code << dropped) + rebias));
        }
        // A subnormal value gets an implicit 1, which is subtracted again.
        let one = rebias + (1 << 23);
        let value = f32::from_bits(one + (code << dropped)) - f32::from_bits(one);
        f32::from_bits(sign | value.to_bits())
    }

    const fn values(&self) -> [f32; 256] {
        let mut all = [0.0; 256];
        let mut code = 0;
        while code < 256 {
            all[code] = self.decode(code as u8);
            code += 1;
        }
        all
    }
}

macro_rules! format {
    ($t:ident, $layout:ident) => {
        impl $t {
            /// The largest finite value.
            pub const MAX: f32 = $layout.decode($layout.largest);

            /// Rounds `x`. Values beyond the largest value become the largest value; NaN stays NaN.
            #[inline(always)]
            pub const fn from_f32(x: f32) -> Self {
                Self($layout.encode(x))
            }

            /// The exact value of the number.
            #[inline(always)]
            pub const fn to_f32(self) -> f32 {
                const VALUES: [f32; 256] = $layout.values();
                VALUES[self.0 as usize]
            }
        }
    };
}
format!(E4m3, E4M3);
format!(E5m2, E5M2);

/// The scale of a tensor with the largest magnitude `maximum`, in a format with the largest value
/// `largest`. It is the least power of two for which `maximum / scale` does not exceed `largest`,
/// but at least 2^-126. A tensor of zeros has the scale 1. If a value is not finite, the scale is
/// NaN, and so are all matmuls of the tensor. Division by a power of two is exact, so that the
/// order of scaling and summing changes no bit.
pub const fn scale(maximum: f32, largest: f32) -> f32 {
    if !maximum.is_finite() {
        return f32::NAN;
    }
    if maximum == 0.0 {
        return 1.0;
    }
    let ratio = maximum / largest;
    let exponent = (ratio.to_bits() + 0x007f_ffff) >> 23;
    f32::from_bits(if exponent == 0 { 1 } else { exponent } << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The values of all codes by the paper's table: exponent and mantissa in fp64.
    fn by_formula(code: u8, mantissa: i32, bias: i32) -> f64 {
        let (sign, magnitude) = (code >> 7, i32::from(code & 0x7f));
        let (exponent, fraction) = (magnitude >> mantissa, magnitude & ((1 << mantissa) - 1));
        let fraction = f64::from(fraction) / f64::from(1 << mantissa);
        let value = match exponent {
            0 => fraction * 2f64.powi(1 - bias),
            _ => (1.0 + fraction) * 2f64.powi(exponent - bias),
        };
        if sign == 1 { -value } else { value }
    }

    /// The code with the value nearest to `x`; of two codes, the even one.
    fn nearest(x: f64, values: &[f64]) -> u8 {
        let distance = |code: &u8| (values[usize::from(*code)] - x.abs()).abs();
        let codes = 0..values.len() as u8;
        let by_distance =
            |a: &u8, b: &u8| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1)));
        let code = codes.min_by(by_distance).expect("there are codes");
        if x.is_sign_negative() { code | 0x80 } else { code }
    }

    #[test]
    fn every_code_has_the_value_of_the_papers_table() {
        for code in 0..=255u8 {
            let (e4m3, e5m2) = (E4m3(code).to_f32(), E5m2(code).to_f32());
            match code & 0x7f {
                0x7f => assert!(e4m3.is_nan()),
                _ => assert_eq!(f64::from(e4m3), by_formula(code, 3, 7), "{code:#x}"),
            }
            match code & 0x7f {
                0x7d.. => assert!(e5m2.is_nan()),
                0x7c => assert!(e5m2.is_infinite()),
                _ => assert_eq!(f64::from(e5m2), by_formula(code, 2, 15), "{code:#x}"),
            }
        }
        assert_eq!((E4m3::MAX, E5m2::MAX), (448.0, 57_344.0));
    }

    #[test]
    fn rounding_takes_the_nearest_value_and_of_two_the_even_one() {
        let e4m3: Vec<f64> = (0..=0x7e).map(|code| by_formula(code, 3, 7)).collect();
        let e5m2: Vec<f64> = (0..=0x7b).map(|code| by_formula(code, 2, 15)).collect();
        // Each sign, exponent and upper part of the mantissa, with low bits around a tie.
        for high in 0..=u16::MAX {
            for low in [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let x = f32::from_bits(u32::from(high) << 16 | low);
                if x.is_nan() {
                    assert!(E4m3::from_f32(x).to_f32().is_nan());
                    assert!(E5m2::from_f32(x).to_f32().is_nan());
                    continue;
                }
                let wide = f64::from(x.clamp(-1e6, 1e6));
                assert_eq!(E4m3::from_f32(x).0, nearest(wide, &e4m3), "{x:?}");
                assert_eq!(E5m2::from_f32(x).0, nearest(wide, &e5m2), "{x:?}");
            }
        }
    }

    #[test]
    fn a_scale_is_the_least_power_of_two_that_brings_the_maximum_into_range() {
        for maximum in [1e-30, 0.3, 1.0, 447.9, 448.0, 448.1, 896.0, 3e38] {
            let s = scale(maximum, E4m3::MAX);
            assert_eq!(s.to_bits() & 0x007f_ffff, 0, "{s} is no power of two");
            assert!(maximum / s <= 448.0 && maximum / (s / 2.0) > 448.0, "{maximum}: {s}");
        }
        assert_eq!([scale(448.0, 448.0), scale(0.0, 448.0)], [1.0, 1.0]);
        assert_eq!(scale(f32::MIN_POSITIVE, E5m2::MAX), f32::MIN_POSITIVE);
        assert!(scale(f32::INFINITY, 448.0).is_nan() && scale(f32::NAN, 448.0).is_nan());
    }
}
