//! Activations, bias, dropout, additions, conversions, and sums of columns.

use super::math::{AHEAD, Mask, gelu, gelu_slope, masked, read, sigmoid, vectorised, write};
use super::{Memory, not_a_kernel, slice, slice_mut, values, values_mut};
use crate::cpu::workers::{Rows, Workers};
use crate::numerics::view::{BLOCK, cast};
use crate::op::{ColumnShard, Gate, Op};
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
        Op::Cast { x, y } if x.dtype().is_value() && y.dtype().is_value() => {
            map(workers, values(m, x)?, values_mut(m, y)?, |x| x);
        }
        Op::Cast { x, y } => cast(m.read(x), &mut m.write(y)),
        Op::Zero { x } => m.write(x).zero(),
        Op::ColumnSum { x, y } => {
            return column_sum(workers, values(m, x)?, values_mut(m, y)?, x.shape().0, x.shape().1);
        }
        Op::BiasDropoutAdd { x, bias, residual, y, dropout, scale } => {
            let (rows, cols) = x.shape();
            let bias = bias.map(|bias| values(m, bias)).transpose()?;
            let terms = Terms { x: values(m, x)?, bias, residual: values(m, residual)?, scale };
            bias_dropout_add(workers, terms, values_mut(m, y)?, rows, cols, dropout);
        }
        Op::Dropout { x, y, dropout, scale } => {
            let first = dropout.first_row * x.shape().1 as u64;
            let from = if x == y { None } else { Some(values(m, x)?) };
            let factors = Factors { index: first, mask: Mask::new(dropout), scale };
            drop_elements(workers, from, values_mut(m, y)?, factors);
        }
        Op::ColumnDropout { x, y, add, dropout, columns } => {
            let size = x.shape();
            let of = DroppedColumns { x: values(m, x)?, size, add, dropout, columns };
            drop_columns(workers, of, values_mut(m, y)?);
        }
        Op::SwiGlu { x, y, gate } => {
            let ((rows, width), x, y) = (y.shape(), values(m, x)?, values_mut(m, y)?);
            match gate {
                Gate::Silu => gated(
                    workers,
                    x,
                    y,
                    rows,
                    width,
                    #[inline(always)]
                    |g| g * sigmoid(g),
                    |up| up,
                ),
                Gate::Gelu => gated(workers, x, y, rows, width, gelu, |up| up),
                Gate::ClampedSilu { slope, limit } => gated(
                    workers,
                    x,
                    y,
                    rows,
                    width,
                    #[inline(always)]
                    |g| {
                        let g = at_most(g, limit);
                        g * sigmoid(slope * g)
                    },
                    #[inline(always)]
                    |up| within(up, limit) + 1.0,
                ),
            }
        }
        Op::SwiGluBackward { x, d, gate } => {
            let ((rows, width), x, d) = (d.shape(), values_mut(m, x)?, values(m, d)?);
            match gate {
                Gate::Silu => gated_backward(
                    workers,
                    x,
                    d,
                    rows,
                    width,
                    #[inline(always)]
                    |g| {
                        let s = sigmoid(g);
                        [g * s, (g * (1.0 - s)).mul_add(s, s)]
                    },
                    |up| [up, 1.0],
                ),
                Gate::Gelu => gated_backward(
                    workers,
                    x,
                    d,
                    rows,
                    width,
                    #[inline(always)]
                    |g| [gelu(g), gelu_slope(g)],
                    |up| [up, 1.0],
                ),
                Gate::ClampedSilu { slope, limit } => gated_backward(
                    workers,
                    x,
                    d,
                    rows,
                    width,
                    #[inline(always)]
                    |g| {
                        let (g, moves) = (at_most(g, limit), g <= limit);
                        let s = sigmoid(slope * g);
                        let rise = (slope * g * (1.0 - s)).mul_add(s, s);
                        [g * s, if moves { rise } else { 0.0 }]
                    },
                    #[inline(always)]
                    |up| [within(up, limit) + 1.0, f32::from(u8::from(up.abs() <= limit))],
                ),
            }
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

/// Factors of [`drop_elements`]: `scale` times the mask from index `index` on.
#[derive(Clone, Copy)]
struct Factors {
    index: u64,
    mask: Option<Mask>,
    scale: f32,
}

/// Sets y to x, or y itself if x is `None`, times the factors.
fn drop_elements(workers: &Workers, x: Option<View<'_>>, y: ViewMut<'_>, factors: Factors) {
    let Factors { index, mask, scale } = factors;
    match (x, mask) {
        (Some(x), None) => return map(workers, x, y, |x| x * scale),
        (None, None) if scale == 1.0 => return,
        _ => {}
    }
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
                    if let Some(mask) = mask {
                        mask.fill(index + (first + at) as u64, &mut factors[..n]);
                        ys[..n].iter_mut().zip(&factors).for_each(|(y, f)| *y = masked(*y, *f));
                    }
                    ys[..n].iter_mut().for_each(|y| *y *= scale);
                    y.store(at, &ys[..n]);
                }
            },
        );
    });
}

/// The input of [`drop_columns`].
#[derive(Clone, Copy)]
struct DroppedColumns<'a> {
    x: View<'a>,
    /// Rows and columns of x.
    size: (usize, usize),
    /// Whether the results are added.
    add: bool,
    dropout: Dropout,
    columns: ColumnShard,
}

/// y (rows, n) = dropout(x (rows, n)), or y += dropout(x).
fn drop_columns(workers: &Workers, of: DroppedColumns<'_>, y: ViewMut<'_>) {
    let DroppedColumns { x, size: (rows, cols), add, dropout, columns } = of;
    let mask = Mask::new(dropout);
    workers.split(rows, y.len(), Rows { view: y, each: cols }, &|rows, mut y, _| {
        vectorised(
            #[inline(always)]
            || {
                let [mut xs, mut ys, mut factors] = [[0.0; BLOCK]; 3];
                for row in rows.clone() {
                    let row_index = (dropout.first_row + row as u64) * columns.all as u64;
                    for col in (0..cols).step_by(BLOCK) {
                        let (at, n) = (row * cols + col, BLOCK.min(cols - col));
                        let x = read(&x, at, n, &mut xs);
                        match mask {
                            None => factors[..n].fill(1.0),
                            Some(mask) => {
                                let index = row_index + (columns.first + col) as u64;
                                mask.fill(index, &mut factors[..n]);
                            }
                        }
                        write(
                            &mut y.view,
                            at - rows.start * cols,
                            n,
                            &mut ys,
                            add,
                            #[inline(always)]
                            |y| {
                                let terms = y.iter_mut().zip(x).zip(&factors);
                                match add {
                                    true => terms.for_each(|((y, x), f)| *y += masked(*x, *f)),
                                    false => terms.for_each(|((y, x), f)| *y = masked(*x, *f)),
                                }
                            },
                        );
                    }
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
    /// Factor of the dropped sum.
    scale: f32,
}

/// y (rows, cols) = residual (rows, cols) + scale dropout(x (rows, cols) + bias (cols)).
fn bias_dropout_add(
    workers: &Workers,
    terms: Terms<'_>,
    y: ViewMut<'_>,
    rows: usize,
    cols: usize,
    dropout: Dropout,
) {
    let (Terms { x, bias, residual, scale }, mask) = (terms, Mask::new(dropout));
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
                            |y| add(y, x, bias, residual, mask.map(|_| &factors[..n]), scale),
                        );
                    }
                }
            },
        );
    });
}

/// y = residual + (x + bias) factors scale; without `factors`, y = residual + (x + bias) scale.
#[inline(always)]
fn add(
    y: &mut [f32],
    x: &[f32],
    bias: &[f32],
    residual: &[f32],
    factors: Option<&[f32]>,
    scale: f32,
) {
    let terms = y.iter_mut().zip(x).zip(bias).zip(residual);
    match factors {
        None => terms.for_each(|(((y, x), b), r)| *y = (x + b) * scale + r),
        Some(factors) => {
            let terms = terms.zip(factors);
            terms.for_each(|((((y, x), b), r), f)| *y = masked(x + b, *f) * scale + r);
        }
    }
}

/// x, or `limit` if x is larger. NaN stays NaN.
#[inline(always)]
const fn at_most(x: f32, limit: f32) -> f32 {
    if x > limit { limit } else { x }
}

/// x, or the nearer end of -limit to limit if x is outside. NaN stays NaN.
#[inline(always)]
const fn within(x: f32, limit: f32) -> f32 {
    if x < -limit { -limit } else { at_most(x, limit) }
}

/// y (rows, width) = f(gate) h(up). A row of x has the gate, then up, of `width` elements each.
fn gated(
    workers: &Workers,
    x: View<'_>,
    y: ViewMut<'_>,
    rows: usize,
    width: usize,
    f: impl Fn(f32) -> f32 + Sync,
    h: impl Fn(f32) -> f32 + Sync,
) {
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
                                terms.for_each(|((y, g), up)| *y = f(*g) * h(*up));
                            },
                        );
                    }
                }
            },
        );
    });
}

/// Replaces x of [`gated`] by its gradient: (d h(up) f'(gate), d f(gate) h'(up)). `f` gives f and f',
/// and `h` gives h and h'.
fn gated_backward(
    workers: &Workers,
    x: ViewMut<'_>,
    d: View<'_>,
    rows: usize,
    width: usize,
    f: impl Fn(f32) -> [f32; 2] + Sync,
    h: impl Fn(f32) -> [f32; 2] + Sync,
) {
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
                            let [[value, slope], [factor, moves]] = [f(*g), h(*up)];
                            (*g, *up) = (d * factor * slope, d * value * moves);
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
mod tests;
