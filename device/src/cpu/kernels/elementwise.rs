//! Activations, bias, dropout, additions, conversions, and sums of columns.

use super::math::{AHEAD, Mask, gelu, gelu_slope, masked, read, sigmoid, vectorised, write};
use super::{Memory, not_a_kernel, slice, slice_mut, values, values_mut};
use crate::cpu::workers::{Rows, Workers};
use crate::numerics::view::{BLOCK, cast};
use crate::op::Op;
use crate::{Dropout, Dtype, View, ViewMut};
use std::ops::Range;

/// Number of columns that a sum over rows processes at a time. Registers hold one sum per column.
const COLUMNS: usize = 64;

pub(super) fn run(op: &Op, m: &impl Memory, workers: &Workers) -> Result<(), String> {
    match *op {
        Op::Gelu { x, y } => map(workers, values(m, x)?, values_mut(m, y)?, gelu),
        Op::GeluBackward { x, d } => {
            let slope = |d: f32, x: f32| d * gelu_slope(x);
            update(workers, values(m, x)?, values_mut(m, d)?, slope);
        }
        Op::Add { x, into } if (x.dtype(), into.dtype()) == (Dtype::F64, Dtype::F64) => {
            let (x, into) = (slice::<f64>(m, x)?, slice_mut::<f64>(m, into)?);
            into.iter_mut().zip(x).for_each(|(into, x)| *into += x);
        }
        Op::Add { x, into } => {
            update(workers, values(m, x)?, values_mut(m, into)?, |into, x| into + x);
        }
        Op::Cast { x, y } if x.dtype() == y.dtype() => workers.copy(m.read(x), m.write(y)),
        Op::Cast { x, y } => match (values(m, x), y.dtype().is_value()) {
            (Ok(x), true) => map(workers, x, values_mut(m, y)?, |x| x),
            _ => cast(m.read(x), &mut m.write(y)),
        },
        Op::Zero { x } => m.write(x).zero(),
        Op::ColumnSum { x, y } => {
            return column_sum(workers, values(m, x)?, values_mut(m, y)?, x.shape().0, x.shape().1);
        }
        Op::BiasDropoutAdd { x, bias, residual, y, dropout } => {
            let (rows, cols) = x.shape();
            let bias = bias.map(|bias| values(m, bias)).transpose()?;
            let terms = Terms { x: values(m, x)?, bias, residual: values(m, residual)? };
            bias_dropout_add(workers, terms, values_mut(m, y)?, rows, cols, dropout);
        }
        Op::Dropout { x, y, dropout } => {
            let first = dropout.first_row * x.shape().1 as u64;
            let from = if x == y { None } else { Some(values(m, x)?) };
            drop_elements(workers, from, values_mut(m, y)?, first, Mask::new(dropout));
        }
        Op::SwiGlu { x, y } => {
            swiglu(workers, values(m, x)?, values_mut(m, y)?, y.shape().0, y.shape().1);
        }
        Op::SwiGluBackward { x, d } => {
            swiglu_backward(workers, values_mut(m, x)?, values(m, d)?, d.shape().0, d.shape().1);
        }
        _ => return not_a_kernel(),
    }
    Ok(())
}

/// Runs `f(index of the block's first element, block of y)` on the blocks of y.
fn blocks(workers: &Workers, y: ViewMut<'_>, f: impl Fn(usize, &mut ViewMut<'_>) + Sync) {
    let len = y.len();
    workers.split(len.div_ceil(BLOCK), len, Rows { view: y, each: BLOCK }, &|units, mut y, _| {
        f(units.start * BLOCK, &mut y.view);
    });
}

/// y = f(x)
fn map(workers: &Workers, x: View<'_>, y: ViewMut<'_>, f: impl Fn(f32) -> f32 + Sync) {
    each(
        workers,
        x,
        y,
        false,
        #[inline(always)]
        |_, x| f(x),
    );
}

/// y = f(y, x)
fn update(workers: &Workers, x: View<'_>, y: ViewMut<'_>, f: impl Fn(f32, f32) -> f32 + Sync) {
    each(workers, x, y, true, f);
}

/// y = f(y, x). Without `old`, f ignores the old y.
fn each(
    workers: &Workers,
    x: View<'_>,
    y: ViewMut<'_>,
    old: bool,
    f: impl Fn(f32, f32) -> f32 + Sync,
) {
    blocks(workers, y, |first, y| {
        vectorised(
            #[inline(always)]
            || {
                let (mut xs, mut ys) = ([0.0; BLOCK], [0.0; BLOCK]);
                for at in (0..y.len()).step_by(BLOCK) {
                    let n = BLOCK.min(y.len() - at);
                    x.ask(first + at + AHEAD..first + at + AHEAD + n);
                    y.as_view().ask(at + AHEAD..at + AHEAD + n);
                    let x = read(&x, first + at, n, &mut xs);
                    write(
                        y,
                        at,
                        n,
                        &mut ys,
                        old,
                        #[inline(always)]
                        |y| y.iter_mut().zip(x).for_each(|(y, x)| *y = f(*y, *x)),
                    );
                }
            },
        );
    });
}

/// Sets y to x, or y itself if x is `None`, times the mask from index `index` on.
fn drop_elements(
    workers: &Workers,
    x: Option<View<'_>>,
    y: ViewMut<'_>,
    index: u64,
    mask: Option<Mask>,
) {
    let Some(mask) = mask else {
        if let Some(x) = x {
            map(workers, x, y, |x| x);
        }
        return;
    };
    blocks(workers, y, |first, y| {
        vectorised(
            #[inline(always)]
            || {
                let (mut ys, mut factors) = ([0.0; BLOCK], [0.0; BLOCK]);
                for at in (0..y.len()).step_by(BLOCK) {
                    let n = BLOCK.min(y.len() - at);
                    match x {
                        Some(x) => x.load(first + at, &mut ys[..n]),
                        None => y.as_view().load(at, &mut ys[..n]),
                    }
                    mask.fill(index + (first + at) as u64, &mut factors[..n]);
                    ys[..n].iter_mut().zip(&factors).for_each(|(y, f)| *y = masked(*y, *f));
                    y.store(at, &ys[..n]);
                }
            },
        );
    });
}

/// The terms of [`bias_dropout_add`].
struct Terms<'a> {
    x: View<'a>,
    bias: Option<View<'a>>,
    residual: View<'a>,
}

/// y (rows, cols) = residual (rows, cols) + dropout(x (rows, cols) + bias (cols)).
fn bias_dropout_add(
    workers: &Workers,
    terms: Terms<'_>,
    y: ViewMut<'_>,
    rows: usize,
    cols: usize,
    dropout: Dropout,
) {
    let (Terms { x, bias, residual }, mask) = (terms, Mask::new(dropout));
    workers.split(rows, y.len(), Rows { view: y, each: cols }, &|rows, mut y, _| {
        vectorised(
            #[inline(always)]
            || {
                let mut buffers = [[0.0; BLOCK]; 4];
                let [xs, biases, residuals, ys] = &mut buffers;
                let (mut factors, zeros) = ([0.0; BLOCK], [-0.0; BLOCK]);
                for row in rows.clone() {
                    for col in (0..cols).step_by(BLOCK) {
                        let (at, n) = (row * cols + col, BLOCK.min(cols - col));
                        let x = read(&x, at, n, xs);
                        let bias = match &bias {
                            Some(bias) => read(bias, col, n, biases),
                            None => &zeros[..n],
                        };
                        let residual = read(&residual, at, n, residuals);
                        if let Some(mask) = mask {
                            let index = dropout.first_row * cols as u64 + at as u64;
                            mask.fill(index, &mut factors[..n]);
                        }
                        write(
                            &mut y.view,
                            at - rows.start * cols,
                            n,
                            ys,
                            false,
                            #[inline(always)]
                            |y| add(y, x, bias, residual, mask.map(|_| &factors[..n])),
                        );
                    }
                }
            },
        );
    });
}

/// y = residual + (x + bias) factors; without `factors`, y = residual + x + bias.
#[inline(always)]
fn add(y: &mut [f32], x: &[f32], bias: &[f32], residual: &[f32], factors: Option<&[f32]>) {
    let terms = y.iter_mut().zip(x).zip(bias).zip(residual);
    match factors {
        None => terms.for_each(|(((y, x), b), r)| *y = (x + b) + r),
        Some(factors) => {
            terms.zip(factors).for_each(|((((y, x), b), r), f)| *y = masked(x + b, *f) + r);
        }
    }
}

/// y (rows, width) = silu(gate) up. A row of x has the gate, then up, of `width` elements each.
fn swiglu(workers: &Workers, x: View<'_>, y: ViewMut<'_>, rows: usize, width: usize) {
    workers.split(rows, x.len(), Rows { view: y, each: width }, &|rows, mut y, _| {
        vectorised(
            #[inline(always)]
            || {
                let [mut gates, mut ups, mut ys] = [[0.0; BLOCK]; 3];
                for (at, row) in rows.clone().enumerate() {
                    for col in (0..width).step_by(BLOCK) {
                        let (from, n) = (2 * row * width + col, BLOCK.min(width - col));
                        let gate = read(&x, from, n, &mut gates);
                        let up = read(&x, from + width, n, &mut ups);
                        write(
                            &mut y.view,
                            at * width + col,
                            n,
                            &mut ys,
                            false,
                            #[inline(always)]
                            |y| {
                                let terms = y.iter_mut().zip(gate).zip(up);
                                terms.for_each(|((y, g), up)| *y = g * sigmoid(*g) * up);
                            },
                        );
                    }
                }
            },
        );
    });
}

/// Replaces x of [`swiglu`] by its gradient: (d up s (1 + g (1 - s)), d g s), where g is the gate
/// and s its sigmoid.
fn swiglu_backward(workers: &Workers, x: ViewMut<'_>, d: View<'_>, rows: usize, width: usize) {
    workers.split(rows, 2 * d.len(), Rows { view: x, each: 2 * width }, &|rows, mut x, _| {
        vectorised(
            #[inline(always)]
            || {
                let [mut gates, mut ups, mut ds] = [[0.0; BLOCK]; 3];
                for (at, row) in rows.clone().enumerate() {
                    for col in (0..width).step_by(BLOCK) {
                        let (to, n) = (2 * at * width + col, BLOCK.min(width - col));
                        x.view.as_view().load(to, &mut gates[..n]);
                        x.view.as_view().load(to + width, &mut ups[..n]);
                        let d = read(&d, row * width + col, n, &mut ds);
                        for ((g, up), d) in gates[..n].iter_mut().zip(&mut ups[..n]).zip(d) {
                            let s = sigmoid(*g);
                            let slope = (*g * (1.0 - s)).mul_add(s, s);
                            (*g, *up) = (d * *up * slope, d * (*g * s));
                        }
                        x.view.store(to, &gates[..n]);
                        x.view.store(to + width, &ups[..n]);
                    }
                }
            },
        );
    });
}

/// y (cols) = sums over the rows of x (rows, cols).
fn column_sum(
    workers: &Workers,
    x: View<'_>,
    mut y: ViewMut<'_>,
    rows: usize,
    cols: usize,
) -> Result<(), String> {
    let sum = |rows: Range<usize>, (), sums: &mut [f32], _: &mut [f32]| {
        vectorised(
            #[inline(always)]
            || {
                let mut xs = [0.0; COLUMNS];
                for (at, out) in sums.chunks_mut(COLUMNS).enumerate() {
                    let (first, n) = (at * COLUMNS, out.len());
                    let mut sums = [0.0; COLUMNS];
                    for row in rows.clone() {
                        let x = read(&x, row * cols + first, n, &mut xs);
                        sums.iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
                    }
                    out.copy_from_slice(&sums[..n]);
                }
            },
        );
    };
    workers.sum_rows(rows, cols, x.len(), (), &sum, |sums| y.store(0, sums))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{NO_DROPOUT, Rig, TYPES, assert_close, dropout_factor, noise};
    use super::*;
    use crate::Tensor;

    const DROPOUT: Dropout = Dropout { p: 0.25, key: 99, first_row: 12 };

    fn gelu_f64(x: f64) -> f64 {
        let k = (2.0 / std::f64::consts::PI).sqrt();
        0.5 * x * (1.0 + (k * (x + 0.044715 * x.powi(3))).tanh())
    }

    #[test]
    fn gelu_and_its_gradient_are_the_formula_in_every_type() {
        for (dtype, ulp) in TYPES {
            let mut rig = Rig::new(1);
            let x: Vec<f64> = noise(1, 1031).iter().map(|x| x * 6.0).collect();
            let d = noise(2, 1031);
            let (tx, ty) = (rig.put(dtype, (1, 1031), &x), rig.out(dtype, (1, 1031)));
            let td = rig.put(dtype, (1, 1031), &d);
            rig.run(&Op::Gelu { x: tx, y: ty });
            rig.run(&Op::GeluBackward { x: tx, d: td });
            let x = rig.get(tx);
            let y: Vec<f64> = x.iter().map(|x| gelu_f64(*x)).collect();
            assert_close(&rig.get(ty), &y, 1e-7, 1e-6 + ulp);
            let slope = |x: f64| (gelu_f64(x + 1e-5) - gelu_f64(x - 1e-5)) / 2e-5;
            let want: Vec<f64> = x.iter().zip(&d).map(|(x, d)| d * slope(*x)).collect();
            assert_close(&rig.get(td), &want, 2e-6, 1e-6 + ulp);
        }
    }

    #[test]
    fn swiglu_and_its_gradient_are_the_formula_in_every_type() {
        let silu = |x: f64| x / (1.0 + (-x).exp());
        for (dtype, ulp) in TYPES {
            for (rows, width) in [(3, 5), (1, 1031), (7, 64)] {
                let mut rig = Rig::new(1);
                let x: Vec<f64> = noise(1, 2 * rows * width).iter().map(|x| x * 6.0).collect();
                let d = noise(2, rows * width);
                let (tx, ty) =
                    (rig.put(dtype, (rows, 2 * width), &x), rig.out(dtype, (rows, width)));
                let td = rig.put(dtype, (rows, width), &d);
                let x = rig.get(tx);
                rig.run(&Op::SwiGlu { x: tx, y: ty });
                rig.run(&Op::SwiGluBackward { x: tx, d: td });
                let formula = |x: &[f64]| {
                    let row = |x: &[f64]| {
                        (0..width).map(|i| silu(x[i]) * x[width + i]).collect::<Vec<f64>>()
                    };
                    x.chunks(2 * width).flat_map(row).collect::<Vec<f64>>()
                };
                assert_close(&rig.get(ty), &formula(&x), 3e-6, 1e-6 + ulp);
                let d = rig.get(td);
                let want: Vec<f64> = (0..x.len())
                    .map(|i| {
                        let (row, col) = (i / (2 * width), i % (2 * width));
                        let (at, d) = (row * 2 * width + col % width, d[row * width + col % width]);
                        let (g, up, s) = (x[at], x[at + width], 1.0 / (1.0 + (-x[at]).exp()));
                        if col < width { d * up * s * (1.0 + g * (1.0 - s)) } else { d * g * s }
                    })
                    .collect();
                assert_close(&rig.get(tx), &want, 3e-6, 1e-6 + ulp);
            }
        }
    }

    #[test]
    fn a_sum_without_a_bias_is_that_with_zeros() {
        let mut rig = Rig::new(1);
        let (x, residual) = (
            rig.put(Dtype::Bf16, (3, 70), &noise(1, 210)),
            rig.put(Dtype::Bf16, (3, 70), &noise(2, 210)),
        );
        let bias = rig.put(Dtype::Bf16, (1, 70), &[0.0; 70]);
        let (y, z) = (rig.out(Dtype::Bf16, (3, 70)), rig.out(Dtype::Bf16, (3, 70)));
        rig.run(&Op::BiasDropoutAdd { x, bias: None, residual, y, dropout: DROPOUT });
        rig.run(&Op::BiasDropoutAdd { x, bias: Some(bias), residual, y: z, dropout: DROPOUT });
        assert_eq!(rig.get(y), rig.get(z));
    }

    #[test]
    fn bias_dropout_add_drops_by_global_index_in_mixed_types() {
        for (dtype, ulp) in TYPES {
            for (dropout, (rows, cols)) in
                [(NO_DROPOUT, (5, 300)), (DROPOUT, (5, 300)), (DROPOUT, (7, 3))]
            {
                let n = rows * cols;
                let mut rig = Rig::new(1);
                let (x, bias, residual) = (noise(1, n), noise(2, cols), noise(3, n));
                let tensors = [
                    rig.put(Dtype::F32, (rows, cols), &x),
                    rig.put(dtype, (1, cols), &bias),
                    rig.put(dtype, (rows, cols), &residual),
                    rig.out(dtype, (rows, cols)),
                ];
                let [tx, tb, tr, ty] = tensors;
                rig.run(&Op::BiasDropoutAdd {
                    x: tx,
                    bias: Some(tb),
                    residual: tr,
                    y: ty,
                    dropout,
                });
                let first = dropout.first_row as usize * cols;
                let y = |i: usize| {
                    residual[i] + (x[i] + bias[i % cols]) * dropout_factor(dropout, first + i)
                };
                let want: Vec<f64> = (0..n).map(y).collect();
                assert_close(&rig.get(ty), &want, 1e-6, ulp);
            }
        }
    }

    #[test]
    fn dropout_is_the_same_in_place_and_apart_and_on_any_part_of_the_rows() {
        for (dtype, ulp) in TYPES {
            let mut rig = Rig::new(1);
            let (rows, cols) = (9, 37);
            let x = noise(4, rows * cols);
            let (tx, ty) = (rig.put(dtype, (rows, cols), &x), rig.out(dtype, (rows, cols)));
            rig.run(&Op::Dropout { x: tx, y: ty, dropout: DROPOUT });
            let y = rig.get(ty);
            let want: Vec<f64> =
                (0..x.len()).map(|i| x[i] * dropout_factor(DROPOUT, 12 * cols + i)).collect();
            assert_close(&y, &want, 1e-7, ulp);
            let part = rig.put(dtype, (4, cols), &x[3 * cols..7 * cols]);
            rig.run(&Op::Dropout {
                x: part,
                y: part,
                dropout: Dropout { first_row: 15, ..DROPOUT },
            });
            assert_eq!(rig.get(part), y[3 * cols..7 * cols]);
            rig.run(&Op::Dropout { x: tx, y: ty, dropout: NO_DROPOUT });
            assert_eq!(rig.get(ty), rig.get(tx));
            rig.run(&Op::Dropout { x: tx, y: tx, dropout: NO_DROPOUT });
            assert_eq!(rig.get(tx), x);
        }
    }

    #[test]
    fn add_cast_and_zero_round_once() {
        let (x, into) = (noise(5, 700), noise(6, 700));
        for (from, _) in TYPES {
            for (to, ulp) in TYPES {
                let mut rig = Rig::new(1);
                let (tx, ty) = (rig.put(from, (7, 100), &x), rig.put(to, (7, 100), &into));
                rig.run(&Op::Add { x: tx, into: ty });
                let sum: Vec<f64> = x.iter().zip(&into).map(|(x, y)| x + y).collect();
                assert_close(&rig.get(ty), &sum, 0.0, ulp);
                rig.run(&Op::Cast { x: tx, y: ty });
                assert_eq!(rig.get(ty), x);
                rig.run(&Op::Zero { x: ty });
                assert_eq!(rig.get(ty), [0.0; 700]);
            }
        }
    }

    #[test]
    fn doubles_add_and_convert() {
        let mut rig = Rig::new(1);
        let (x, y) =
            (rig.put(Dtype::F64, (1, 2), &[1e-9, 2.0]), rig.put(Dtype::F64, (1, 2), &[1.0, 1.0]));
        rig.run(&Op::Add { x, into: y });
        assert_eq!(rig.get(y), [1.0 + 1e-9, 3.0]);
        let z = rig.out(Dtype::F32, (1, 2));
        rig.run(&Op::Cast { x: y, y: z });
        assert_eq!(rig.get(z), [1.0, 3.0]);
    }

    #[test]
    fn columns_are_summed_in_every_type() {
        for (dtype, ulp) in TYPES {
            let mut rig = Rig::new(1);
            let (rows, cols) = (33, 523);
            let x = noise(7, rows * cols);
            let (tx, ty) = (rig.put(dtype, (rows, cols), &x), rig.out(dtype, (1, cols)));
            rig.run(&Op::ColumnSum { x: tx, y: ty });
            let want: Vec<f64> = (0..cols).map(|c| x.iter().skip(c).step_by(cols).sum()).collect();
            assert_close(&rig.get(ty), &want, 1e-5, ulp);
        }
    }

    #[test]
    fn threads_change_no_bit() {
        let (rows, cols) = (257, 301);
        let run = |threads| {
            let mut rig = Rig::new(threads);
            let mut put = |seed| rig.put(Dtype::Bf16, (rows, cols), &noise(seed, rows * cols));
            let [x, y, z, w]: [Tensor; 4] = [1, 2, 3, 4].map(&mut put);
            let bias = rig.put(Dtype::F32, (1, cols), &noise(5, cols));
            let sums = rig.out(Dtype::F32, (1, cols));
            rig.run(&Op::Gelu { x, y });
            rig.run(&Op::GeluBackward { x: y, d: z });
            rig.run(&Op::BiasDropoutAdd {
                x: y,
                bias: Some(bias),
                residual: z,
                y: w,
                dropout: DROPOUT,
            });
            rig.run(&Op::Dropout { x: w, y: w, dropout: DROPOUT });
            rig.run(&Op::Add { x: z, into: w });
            rig.run(&Op::ColumnSum { x: w, y: sums });
            let copy = rig.out(Dtype::Bf16, (rows, cols));
            rig.run(&Op::Cast { x: w, y: copy });
            assert_eq!(rig.get(copy), rig.get(w));
            [rig.get(y), rig.get(z), rig.get(w), rig.get(sums)]
        };
        assert_eq!(run(1), run(3));
    }

    #[test]
    fn wrong_types_are_errors() {
        let mut rig = Rig::new(1);
        let (x, y) = (rig.put_ints(&[1, 2]), rig.out(Dtype::F32, (1, 2)));
        assert!(rig.try_run(&Op::Gelu { x, y }).expect_err("tokens").contains("I32"));
        assert!(rig.try_run(&Op::Add { x, into: y }).is_err());
        assert!(
            rig.try_run(&Op::Copy { src: x, dst: y }).expect_err("copy").contains("not a kernel")
        );
    }
}
