//! Normal numbers in bulk, with the same bits as [`random::normal`], which calls the C library's
//! logarithm and cosine for each number. Here both are vectorised series. If the error of the
//! series could change the rounding to fp32, about once in ten thousand numbers, the C library
//! computes the number.

use super::SimdPath;
use crate::random;
use std::f64::consts::{LN_2, SQRT_2, TAU};

/// Number of values that are computed together.
const BLOCK: usize = 32;
/// Upper bound on the error of radius * cosine, relative to the radius and including the C
/// library's own error. It is some hundred times the error that a test finds.
const ERROR: f64 = 1.0 / (1u64 << 42) as f64;
/// Adding and then subtracting this constant rounds a small number to a whole number.
const WHOLE: f64 = 1.5 * (1u64 << 52) as f64;

/// 1 / 21, 1 / 19 to 1: coefficients of artanh z / z in powers of z^2, highest power first.
const ARTANH: [f64; 11] = {
    let (mut all, mut i) = ([0.0; 11], 0);
    while i < all.len() {
        all[i] = 1.0 / (21 - 2 * i) as f64;
        i += 1;
    }
    all
};
/// Ratios of successive coefficients of the cosine's series, highest power first.
const COSINE: [f64; 11] = {
    let (mut all, mut i) = ([0.0; 11], 0);
    while i < all.len() {
        let power = (22 - 2 * i) as f64;
        all[i] = 1.0 / (power * (power - 1.0));
        i += 1;
    }
    all
};

/// Sets `out` to `deviation * random::normal(stream, i)`, rounded to fp32, for i from `first` on.
pub fn normals(stream: u64, first: u64, deviation: f64, out: &mut [f32]) {
    let (path, mut sure) = (SimdPath::current(), [false; BLOCK]);
    for (block, out) in out.chunks_mut(BLOCK).enumerate() {
        let first = first + (block * BLOCK) as u64;
        let mut values = [0.0; BLOCK];
        path.run(
            #[inline(always)]
            || {
                for i in 0..BLOCK {
                    (values[i], sure[i]) = rounded(stream, first.wrapping_add(i as u64), deviation);
                }
            },
        );
        out.copy_from_slice(&values[..out.len()]);
        for (i, out) in out.iter_mut().enumerate().filter(|(i, _)| !sure[*i]) {
            *out = (deviation * random::normal(stream, first + i as u64)) as f32;
        }
    }
}

/// A number, and whether its rounding is certain.
#[inline(always)]
fn rounded(stream: u64, index: u64, deviation: f64) -> (f32, bool) {
    let (radius, product) = product(stream, index);
    let error = radius * ERROR;
    let [low, high] = [product - error, product + error].map(|x| (deviation * x) as f32);
    // At radius 0, the C library decides the sign of zero.
    (low, (low.to_bits() == high.to_bits()) & (radius > 0.0))
}

/// The radius, and the radius times the cosine.
#[inline(always)]
fn product(stream: u64, index: u64) -> (f64, f64) {
    let double = index.wrapping_mul(2);
    let radius = minus_two_ln(1.0 - random::uniform(stream, double)).sqrt();
    (radius, radius * cos_of_turns(random::uniform(stream, double.wrapping_add(1))))
}

/// -2 ln x, for positive normal x.
#[inline(always)]
fn minus_two_ln(x: f64) -> f64 {
    // x = 2^k m, with m between the roots of 1/2 and 2.
    let from_half = x.to_bits().wrapping_sub((SQRT_2 / 2.0).to_bits());
    let k = from_half.cast_signed() >> 52;
    let m = f64::from_bits(x.to_bits().wrapping_sub((k << 52).cast_unsigned()));
    // ln m = 2 artanh z
    let z = (m - 1.0) / (m + 1.0);
    let y = z * z;
    let sum = ARTANH.iter().fold(0.0, |sum, factor| sum * y + factor);
    -2.0 * (f64::from(k as i32) * LN_2 + 2.0 * z * sum)
}

/// The cosine of `turns` full turns, for `turns` from 0 to 1.
#[inline(always)]
fn cos_of_turns(turns: f64) -> f64 {
    let halves = (2.0 * turns + WHOLE) - WHOLE;
    let angle = TAU * (turns - 0.5 * halves);
    let y = angle * angle;
    let sum = COSINE.iter().fold(1.0, |sum, factor| 1.0 - sum * y * factor);
    // Factor for 0, 1 and 2 halves: 1, -1, 1.
    sum * (1.0 - 2.0 * halves * (2.0 - halves))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_are_what_they_are_one_by_one() {
        for (stream, deviation) in [(1, 0.02), (2, 1.0), (3, 0.02 / 20f64.sqrt()), (4, 1e-40)] {
            for path in SimdPath::available() {
                path.choose().unwrap();
                for (first, len) in [(0, 100_000), (7, 1), (1 << 40, 33)] {
                    let mut many = vec![0.0; len];
                    normals(stream, first, deviation, &mut many);
                    for (i, x) in many.iter().enumerate() {
                        let one = (deviation * random::normal(stream, first + i as u64)) as f32;
                        assert_eq!(x.to_bits(), one.to_bits(), "{path} {stream} {first} {i}");
                    }
                }
            }
        }
    }

    /// Tests against a hundredth of the assumed error, also at the worst arguments.
    #[test]
    fn the_series_are_far_nearer_than_they_have_to_be() {
        for index in 0..300_000 {
            let (radius, product) = product(9, index);
            let difference = (product - random::normal(9, index)).abs();
            assert!(difference <= radius * ERROR / 100.0, "{index}: {product} by {difference}");
        }
        for i in 0..=4096 {
            let x = f64::from(i) / 4096.0;
            let (cos, ours) = ((TAU * x).cos(), cos_of_turns(x));
            assert!((cos - ours).abs() < ERROR / 100.0, "{x}: {cos} {ours}");
            for x in [x.max(1e-9), 1.0 - x * 2f64.powi(-30), 2f64.powi(-53) * (1.0 + x)] {
                let (ln, ours) = (-2.0 * x.ln(), minus_two_ln(x));
                assert!((ln - ours).abs() <= ln.abs() * ERROR / 100.0, "{x}: {ln} {ours}");
            }
        }
    }

    #[test]
    fn the_c_library_is_called_seldom_and_wherever_rounding_needs_it() {
        let calls = (0..300_000).filter(|i| !rounded(5, *i, 0.02).1).count();
        assert!((1..300).contains(&calls), "{calls}");
    }
}
