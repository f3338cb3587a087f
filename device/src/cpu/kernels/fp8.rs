//! Largest magnitudes, and conversion to fp8.

use super::math::vectorised;
use super::{Memory, not_a_kernel, slice, slice_mut, values};
use crate::cpu::workers::{Rows, Slice, Workers};
use crate::numerics::{E4m3, E5m2, fp8_scale};
use crate::op::{Op, run_of_maxima};
use crate::{BLOCK, Dtype, View, ViewMut};

/// Rows and columns of a tile that is transposed at a time.
const SIDE: usize = 32;

pub(super) fn run(op: &Op, m: &impl Memory, workers: &Workers) -> Result<(), String> {
    match *op {
        Op::Maxima { x, maxima } => {
            let (x, run) = (values(m, x)?, run_of_maxima(x.len()));
            let maxima = Slice { data: slice_mut::<f32>(m, maxima)?, each: 1 };
            workers.split(maxima.data.len(), x.len(), maxima, &|runs, maxima, _| {
                for (run_number, maximum) in runs.zip(maxima.data) {
                    let at = |i: usize| (i * run).min(x.len());
                    *maximum = largest(x.slice(at(run_number)..at(run_number + 1)));
                }
            });
        }
        Op::Quantize { x: from, maxima, y, transposed, scale } => {
            let (x, (rows, cols)) = (values(m, from)?, from.shape());
            let format = y.or(transposed).map_or(Dtype::E4m3, crate::Tensor::dtype);
            let limit = if format == Dtype::E5m2 { E5m2::MAX } else { E4m3::MAX };
            let factor = fp8_scale(largest(View::F32(slice(m, maxima)?)), limit);
            slice_mut(m, scale)?[0] = factor;
            if let Some(y) = y {
                let y = Rows { view: m.write(y), each: cols };
                workers.split(rows, x.len(), y, &|rows, mut y, _| {
                    divide(x.slice(rows.start * cols..rows.end * cols), factor, &mut y.view);
                });
            }
            if let Some(transposed) = transposed {
                let transposed = Rows { view: m.write(transposed), each: rows };
                workers.split(cols, x.len(), transposed, &|columns, mut transposed, _| {
                    turn(x, rows, cols, columns.start, factor, &mut transposed.view);
                });
            }
        }
        _ => return not_a_kernel(),
    }
    Ok(())
}

/// The largest magnitude of `x`, by its bits: infinity and NaN count as larger than all numbers.
fn largest(x: View<'_>) -> f32 {
    let (mut block, mut largest) = ([0.0f32; BLOCK], 0);
    vectorised(
        #[inline(always)]
        || {
            for at in (0..x.len()).step_by(BLOCK) {
                let values = &mut block[..BLOCK.min(x.len() - at)];
                x.load(at, values);
                let bits = values.iter().map(|x| x.to_bits() & 0x7fff_ffff);
                largest = bits.fold(largest, u32::max);
            }
        },
    );
    f32::from_bits(largest)
}

/// y = x / scale
fn divide(x: View<'_>, scale: f32, y: &mut ViewMut<'_>) {
    let (mut block, inverse) = ([0.0; BLOCK], 1.0 / scale);
    for at in (0..x.len()).step_by(BLOCK) {
        let values = &mut block[..BLOCK.min(x.len() - at)];
        x.load(at, values);
        values.iter_mut().for_each(|x| *x *= inverse);
        y.store(at, values);
    }
}

/// Sets the rows of `transposed` to columns of x (rows, cols), from `first` on, divided by `scale`.
fn turn(
    x: View<'_>,
    rows: usize,
    cols: usize,
    first: usize,
    scale: f32,
    transposed: &mut ViewMut<'_>,
) {
    let (end, inverse) = (first + transposed.len() / rows, 1.0 / scale);
    let (mut tile, mut line) = ([[0.0; SIDE]; SIDE], [0.0; SIDE]);
    for row in (0..rows).step_by(SIDE) {
        let height = SIDE.min(rows - row);
        for col in (first..end).step_by(SIDE) {
            let width = SIDE.min(end - col);
            for (i, to) in tile[..height].iter_mut().enumerate() {
                x.load((row + i) * cols + col, &mut to[..width]);
            }
            for j in 0..width {
                line.iter_mut().zip(&tile[..height]).for_each(|(to, from)| *to = from[j] * inverse);
                transposed.store((col + j - first) * rows + row, &line[..height]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Rig, noise};
    use super::*;
    use crate::op::MAXIMA;
    use crate::{Arena, Tensor};

    fn rig(threads: usize, values: &[f64], shape: (usize, usize)) -> (Rig, Tensor, Tensor) {
        let mut rig = Rig::new(threads);
        let x = rig.put(Dtype::Bf16, shape, values);
        let maxima = rig.out(Dtype::F32, (1, MAXIMA));
        rig.run(&Op::Maxima { x, maxima });
        (rig, x, maxima)
    }

    #[test]
    fn maxima_are_those_of_runs_and_a_value_that_is_not_finite_stands_above_all() {
        let shape @ (m, n) = (48, 112);
        let mut x = noise(1, m * n);
        x[100] = -1000.0;
        let (rig, t, maxima) = rig(2, &x, shape);
        assert_eq!(t.arena(), Arena::Device);
        let (found, run) = (rig.get(maxima), run_of_maxima(m * n));
        assert_eq!(found[100 / run], 1000.0);
        assert_eq!(found.iter().filter(|x| **x > 0.0).count(), (m * n).div_ceil(run));
        for hostile in [f64::NAN, f64::INFINITY] {
            x[77] = hostile;
            let (rig, _, maxima) = self::rig(1, &x, shape);
            assert!(rig.get(maxima).iter().any(|x| !x.is_finite()));
        }
    }

    #[test]
    fn fp8_values_are_rounded_scaled_ones_and_the_transposed_copy_has_the_same() {
        let shape @ (m, n) = (48, 112);
        let x = noise(2, m * n);
        let one = |threads, format| {
            let (mut rig, x, maxima) = rig(threads, &x, shape);
            let (y, transposed) = (rig.out(format, shape), rig.out(format, (n, m)));
            let scale = rig.out(Dtype::F32, (1, 1));
            rig.run(&Op::Quantize { x, maxima, y: Some(y), transposed: Some(transposed), scale });
            (rig.get(x), rig.get(y), rig.get(transposed), rig.get(scale)[0])
        };
        for (format, error) in [(Dtype::E4m3, 1.0 / 16.0), (Dtype::E5m2, 1.0 / 8.0)] {
            let (x, y, transposed, scale) = one(1, format);
            for (i, (x, y)) in x.iter().zip(&y).enumerate() {
                assert!(
                    (x - y * scale).abs() <= error * x.abs() + scale / 512.0,
                    "{x} {y} {scale}"
                );
                assert_eq!(*y, transposed[i % n * m + i / n]);
            }
            assert_eq!(one(3, format), (x, y, transposed, scale));
        }
    }

    #[test]
    fn a_scaled_product_is_that_of_the_rounded_values() {
        let (m, n, k) = (32, 48, 400);
        let mut rig = Rig::new(1);
        let a = rig.put(Dtype::E5m2, (m, k), &noise(1, m * k));
        let b = rig.put(Dtype::E4m3, (n, k), &noise(2, n * k));
        let bias = rig.put(Dtype::Bf16, (1, n), &noise(3, n));
        let c = rig.out(Dtype::F32, (m, n));
        let [of_a, of_b] = [0.25, 8.0].map(|scale| rig.put(Dtype::F32, (1, 1), &[scale]));
        rig.run(&Op::ScaledGemm { a, b: b.t(), c, bias: Some(bias), scales: [of_a, of_b] });
        let (a, b, bias) = (rig.get(a), rig.get(b), rig.get(bias));
        for (i, c) in rig.get(c).iter().enumerate() {
            let (row, col) = (i / n, i % n);
            let sum: f64 = (0..k).map(|p| a[row * k + p] * b[col * k + p]).sum();
            let want = 2.0 * sum + bias[col];
            assert!((c - want).abs() < 1e-4, "{c} {want}");
        }
    }

    #[test]
    fn a_tensor_with_a_value_that_is_not_finite_has_no_finite_product() {
        let (m, n) = (16, 32);
        let mut x = noise(2, m * n);
        x[9] = f64::INFINITY;
        let (mut rig, x, maxima) = rig(1, &x, (m, n));
        let (y, scale) = (rig.out(Dtype::E4m3, (m, n)), rig.out(Dtype::F32, (1, 1)));
        rig.run(&Op::Quantize { x, maxima, y: Some(y), transposed: None, scale });
        let (b, one) = (
            rig.put(Dtype::E4m3, (16, n), &vec![1.0; 16 * n]),
            rig.put(Dtype::F32, (1, 1), &[1.0]),
        );
        let c = rig.out(Dtype::Bf16, (m, 16));
        rig.run(&Op::ScaledGemm { a: y, b: b.t(), c, bias: None, scales: [scale, one] });
        assert!(rig.get(c).iter().all(|x| x.is_nan()));
    }
}
