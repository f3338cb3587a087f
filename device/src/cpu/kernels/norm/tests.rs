use super::super::testing::{Rig, TYPES, assert_close, differences, inner, noise};
use crate::op::Op;
use crate::{Dtype, Tensor};

fn norm_f64(x: &[f64], gain: &[f64], bias: &[f64]) -> Vec<f64> {
    let cols = gain.len();
    let row = |x: &[f64]| {
        let mean = x.iter().sum::<f64>() / cols as f64;
        let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / cols as f64;
        let scale = 1.0 / (variance + 1e-5).sqrt();
        (0..cols).map(|i| (x[i] - mean) * scale * gain[i] + bias[i]).collect::<Vec<_>>()
    };
    x.chunks(cols).flat_map(row).collect()
}

struct Case {
    rig: Rig,
    y: Tensor,
    stats: Tensor,
    d_x: Tensor,
    d_gain: Tensor,
    d_bias: Tensor,
}

/// Forward and backward pass on the rows `rows` of an input.
fn case(
    threads: usize,
    dtype: Dtype,
    rows: std::ops::Range<usize>,
    cols: usize,
    add: bool,
) -> Case {
    let mut rig = Rig::new(threads);
    let shape = (rows.len(), cols);
    let part = |seed| noise(seed, rows.end * cols)[rows.start * cols..].to_vec();
    let (x, d_y) = (rig.put(dtype, shape, &part(1)), rig.put(dtype, shape, &part(2)));
    let (gain, bias) =
        (rig.put(dtype, (1, cols), &noise(3, cols)), rig.put(dtype, (1, cols), &noise(4, cols)));
    let (y, stats) = (rig.out(dtype, shape), rig.out(Dtype::F32, (rows.len(), 2)));
    let d_x = rig.put(dtype, shape, &part(5));
    let (d_gain, d_bias) = (rig.out(dtype, (1, cols)), rig.out(Dtype::F32, (1, cols)));
    rig.run(&Op::LayerNorm { x, gain, bias, y, stats, epsilon: 1e-5 });
    rig.run(&Op::LayerNormBackward { x, gain, stats, d_y, d_x, add, d_gain, d_bias });
    Case { rig, y, stats, d_x, d_gain, d_bias }
}

#[test]
fn forward_and_gradients_are_the_formula_in_every_type() {
    for (dtype, ulp) in TYPES {
        for (rows, cols, add) in [(3, 2, false), (5, 37, true), (2, 128, false), (1, 300, true)] {
            let (x, d_y) = (noise(1, rows * cols), noise(2, rows * cols));
            let (gain, bias, old) = (noise(3, cols), noise(4, cols), noise(5, rows * cols));
            let c = case(1, dtype, 0..rows, cols, add);
            assert_close(&c.rig.get(c.y), &norm_f64(&x, &gain, &bias), 3e-6, ulp);
            let mut d_x = differences(&x, |x| inner(&d_y, &norm_f64(x, &gain, &bias)));
            if add {
                d_x.iter_mut().zip(old).for_each(|(d, old)| *d += old);
            }
            // With two columns, variances can be near 0, and gradients are differences of large
            // numbers.
            let absolute = if cols == 2 { 1e-4 } else { 2e-5 };
            assert_close(&c.rig.get(c.d_x), &d_x, absolute, ulp);
            let d_gain = differences(&gain, |gain| inner(&d_y, &norm_f64(&x, gain, &bias)));
            assert_close(&c.rig.get(c.d_gain), &d_gain, 1e-5, ulp);
            let d_bias = differences(&bias, |bias| inner(&d_y, &norm_f64(&x, &gain, bias)));
            assert_close(&c.rig.get(c.d_bias), &d_bias, 1e-5, 0.0);
        }
    }
}

fn rms_norm_f64(x: &[f64], gain: &[f64], offset: f32) -> Vec<f64> {
    let row = |x: &[f64]| {
        let square = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
        let scale = 1.0 / (square + 1e-2).sqrt();
        let factors = gain.iter().map(|gain| scale * (gain + f64::from(offset)));
        x.iter().zip(factors).map(|(x, factor)| x * factor).collect::<Vec<_>>()
    };
    x.chunks(gain.len()).flat_map(row).collect()
}

/// y, stats, d_x and d_gain of RMSNorm on some rows of an input.
fn rms_case(
    threads: usize,
    dtype: Dtype,
    rows: std::ops::Range<usize>,
    cols: usize,
    add: bool,
    offset: f32,
) -> [Vec<f64>; 4] {
    let mut rig = Rig::new(threads);
    let shape = (rows.len(), cols);
    let part = |seed| noise(seed, rows.end * cols)[rows.start * cols..].to_vec();
    let (x, d_y) = (rig.put(dtype, shape, &part(1)), rig.put(dtype, shape, &part(2)));
    let gain = rig.put(dtype, (1, cols), &noise(3, cols));
    let (y, stats) = (rig.out(dtype, shape), rig.out(Dtype::F32, (rows.len(), 1)));
    let (d_x, d_gain) = (rig.put(dtype, shape, &part(5)), rig.out(Dtype::F32, (1, cols)));
    rig.run(&Op::RmsNorm { x, gain, y, stats, epsilon: 1e-2, offset });
    rig.run(&Op::RmsNormBackward { x, gain, stats, d_y, d_x, add, d_gain, offset });
    [y, stats, d_x, d_gain].map(|t| rig.get(t))
}

#[test]
fn rms_norm_and_its_gradients_are_the_formula_in_every_type() {
    for (dtype, ulp) in TYPES {
        for (rows, cols, add, offset) in [
            (3, 2, false, 0.0),
            (5, 37, true, 0.0),
            (2, 128, false, 0.0),
            (1, 300, true, 0.0),
            (5, 37, true, 1.0),
            (2, 128, false, 1.0),
        ] {
            let (x, d_y) = (noise(1, rows * cols), noise(2, rows * cols));
            let (gain, old) = (noise(3, cols), noise(5, rows * cols));
            let [y, _, got_x, got_gain] = rms_case(1, dtype, 0..rows, cols, add, offset);
            assert_close(&y, &rms_norm_f64(&x, &gain, offset), 3e-6, ulp);
            let mut d_x = differences(&x, |x| inner(&d_y, &rms_norm_f64(x, &gain, offset)));
            if add {
                d_x.iter_mut().zip(old).for_each(|(d, old)| *d += old);
            }
            assert_close(&got_x, &d_x, 2e-5, ulp);
            let d_gain = differences(&gain, |gain| inner(&d_y, &rms_norm_f64(&x, gain, offset)));
            assert_close(&got_gain, &d_gain, 1e-5, 2.0 * ulp);
        }
    }
}

#[test]
fn rows_and_threads_of_rms_norm_change_no_bit() {
    let of = |rows| rms_case(1, Dtype::Bf16, rows, 333, true, 1.0);
    let (all, part) = (of(0..9), of(4..7));
    for (of, each) in [(0, 333), (1, 1), (2, 333)] {
        assert_eq!(all[of][4 * each..7 * each], part[of]);
    }
    let run = |threads| rms_case(threads, Dtype::Bf16, 0..101, 777, true, 1.0);
    assert_eq!(run(1), run(3));
}

#[test]
fn a_row_does_not_depend_on_the_others() {
    for (dtype, _) in TYPES {
        let (cols, n) = (333, 9);
        let (all, part) = (case(1, dtype, 0..n, cols, false), case(1, dtype, 4..7, cols, false));
        let same = |a: Tensor, b: Tensor, each: usize| {
            assert_eq!(all.rig.get(a)[4 * each..7 * each], part.rig.get(b));
        };
        same(all.y, part.y, cols);
        same(all.d_x, part.d_x, cols);
        same(all.stats, part.stats, 2);
    }
}

#[test]
fn threads_change_no_bit() {
    let run = |threads| {
        let c = case(threads, Dtype::Bf16, 0..101, 777, true);
        [c.y, c.stats, c.d_x, c.d_gain, c.d_bias].map(|t| c.rig.get(t))
    };
    assert_eq!(run(1), run(3));
}

#[test]
fn too_little_scratch_is_an_error() {
    let mut rig = Rig::new(1);
    let cols = 1 << 20;
    let [x, gain, bias, y] = [(); 4].map(|()| rig.out(Dtype::F16, (1, cols)));
    let stats = rig.out(Dtype::F32, (1, 2));
    let error = rig.try_run(&Op::LayerNorm { x, gain, bias, y, stats, epsilon: 1e-5 });
    assert!(error.expect_err("scratch").contains("scratch"));
}

/// A branch's sum is F32, and its normed sum has 16 bits.
#[test]
fn input_and_output_of_rms_norm_may_have_different_types() {
    let (rows, cols, offset, add) = (5, 37, 1.0, false);
    let (x, d_y, gain) = (noise(1, rows * cols), noise(2, rows * cols), noise(3, cols));
    let mut rig = Rig::new(1);
    let tx = rig.put(Dtype::F32, (rows, cols), &x);
    let td = rig.put(Dtype::Bf16, (rows, cols), &d_y);
    let tg = rig.put(Dtype::Bf16, (1, cols), &gain);
    let (y, stats) = (rig.out(Dtype::Bf16, (rows, cols)), rig.out(Dtype::F32, (rows, 1)));
    let (d_x, d_gain) = (rig.out(Dtype::F32, (rows, cols)), rig.out(Dtype::F32, (1, cols)));
    rig.run(&Op::RmsNorm { x: tx, gain: tg, offset, y, stats, epsilon: 1e-2 });
    rig.run(&Op::RmsNormBackward { x: tx, gain: tg, offset, stats, d_y: td, d_x, add, d_gain });
    assert_close(&rig.get(y), &rms_norm_f64(&x, &gain, offset), 3e-6, 4e-3);
    let want = differences(&x, |x| inner(&d_y, &rms_norm_f64(x, &gain, offset)));
    assert_close(&rig.get(d_x), &want, 2e-5, 6e-8);
}
