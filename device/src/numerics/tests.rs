//! Tests of the sums against plain formulas, and of every SIMD path against the portable one.

use super::sums::{accumulate_on, sum_of_squares_on};
use super::*;
use crate::View;
use crate::random;
use half::f16;

#[test]
fn squares_of_uncounted_elements_do_not_count_and_nan_shows() {
    let mut x = vec![2.0f32; 100];
    let mut partials = [0.0; 4];
    let counted = CountedRange { end: 70, hole: (25, 35) };
    chunk_squares(View::F32(&x), &mut partials, 30, counted);
    assert_eq!(partials, [100.0, 100.0, 40.0, 0.0]);
    x[30] = f32::NAN;
    x[65] = f32::NAN;
    chunk_squares(View::F32(&x), &mut partials, 30, counted);
    assert!(partials[2].is_nan() && partials[1] == 100.0);
}

/// Numbers of every kind: ordinary, tiny, huge, denormal, zero, infinite, NaN.
fn awkward(seed: u64, n: usize, nonsense: bool) -> Vec<f32> {
    let one = |i: u64| {
        let bits = random::bits(seed, i);
        let x = (bits as u32 as f32 / 4e9 - 0.5) * 10f32.powi((bits >> 32) as i32 % 8 - 6);
        match (bits >> 48) % 16 {
            0 => f32::from_bits(bits as u32 & 0x807f_ffff),
            1 => 0.0,
            2 => -0.0,
            3 => x * 1e30,
            4 => x * 1e-30,
            5 if nonsense => f32::INFINITY,
            6 if nonsense => f32::NAN,
            7 if nonsense => f32::NEG_INFINITY,
            _ => x,
        }
    };
    (0..n as u64).map(one).collect()
}

#[test]
fn every_simd_path_sums_to_the_bits_of_the_portable_one() {
    for n in [0, 1, 15, 16, 17, 255, 257, 1029] {
        let g = awkward(7, n, n % 2 == 1);
        let g16: Vec<f16> = g.iter().map(|x| f16::from_f32(*x)).collect();
        for x in [View::F32(&g), View::F16(&g16)] {
            let sums = |path| {
                let mut sums = awkward(8, n, false);
                accumulate_on(path, x, &mut sums, n % 3 == 0);
                let squares = sum_of_squares_on(path, x, 3..7);
                let bits = |x: &f32| if x.is_nan() { 0 } else { x.to_bits() };
                let squares = if squares.is_nan() { 0 } else { squares.to_bits() };
                (squares, sums.iter().map(bits).collect::<Vec<_>>())
            };
            let portable = sums(SimdPath::Portable);
            for path in SimdPath::available() {
                assert!(sums(path) == portable, "{path} {n}");
            }
        }
    }
}

#[test]
fn a_path_is_known_by_its_name_and_refused_where_it_is_not() {
    for path in SimdPath::ALL {
        assert_eq!(path.name().parse(), Ok(path));
    }
    assert!("sse".parse::<SimdPath>().unwrap_err().contains("avx512, avx2, neon, portable"));
    let missing = SimdPath::ALL.into_iter().find(|path| !path.is_available()).unwrap();
    assert!(missing.choose().unwrap_err().contains("portable"));
}
