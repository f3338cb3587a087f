//! Cross entropy over logits (rows, V/tp), some columns per rank. Padded columns are ignored.

use super::math::{Cap, exp, max, read, sum, vectorised, write};
use super::{Memory, not_a_kernel, slice, slice_mut, values, values_mut};
use crate::cpu::workers::{Rows, Slice, Workers};
use crate::op::{Op, VocabShard};
use crate::{BLOCK, View, ViewMut};

pub(super) fn run(op: &Op, m: &impl Memory, workers: &Workers) -> Result<(), String> {
    match *op {
        Op::CapLogits { logits, scale, cap } => {
            let (rows, cols) = logits.shape();
            let (work, cap) = (logits.len(), cap.map(|cap| Cap::new(cap, scale)));
            let logits = Rows { view: values_mut(m, logits)?, each: cols };
            workers.split(rows, work, logits, &|_, mut logits, _| match cap {
                Some(cap) => replace(
                    &mut logits.view,
                    #[inline(always)]
                    |x| cap.of(x),
                ),
                None => replace(
                    &mut logits.view,
                    #[inline(always)]
                    |x| x * scale,
                ),
            });
        }
        Op::RowMax { x, y, shard } => {
            let (rows, cols) = x.shape();
            let (x, y) = (values(m, x)?, slice_mut::<f32>(m, y)?);
            workers.split(rows, x.len(), Slice { data: y, each: 1 }, &|rows, y, _| {
                let x = x.slice(rows.start * cols..rows.end * cols);
                row_max(x, cols, shard.valid.min(cols), y.data);
            });
        }
        Op::CrossEntropyStats { logits, max, targets, shard, sums } => {
            let ((rows, cols), logits) = (logits.shape(), values(m, logits)?);
            let (max, targets) = (slice::<f32>(m, max)?, slice::<i32>(m, targets)?);
            let (exps, at_target) = slice_mut::<f32>(m, sums)?.split_at_mut(rows);
            let out = (Slice { data: exps, each: 1 }, Slice { data: at_target, each: 1 });
            workers.split(rows, logits.len(), out, &|rows, (exps, at_target), _| {
                let logits = logits.slice(rows.start * cols..rows.end * cols);
                let (max, targets) = (&max[rows.clone()], &targets[rows]);
                sum_exps(logits, cols, shard.valid.min(cols), max, exps.data);
                pick_targets(logits, cols, shard, max, targets, at_target.data);
            });
        }
        Op::CrossEntropyLoss { sums, targets, loss } => {
            let targets = slice::<i32>(m, targets)?;
            let (exps, at_target) = slice::<f32>(m, sums)?.split_at(targets.len());
            let mut sum = 0.0;
            for ((target, exps), at_target) in targets.iter().zip(exps).zip(at_target) {
                if *target >= 0 {
                    sum += f64::from(*exps).ln() - f64::from(*at_target);
                }
            }
            slice_mut::<f64>(m, loss)?.fill(sum);
        }
        Op::CrossEntropyBackward { logits, max, sums, targets, shard, scale, factor, cap } => {
            let (rows, cols) = logits.shape();
            let targets = slice::<i32>(m, targets)?;
            let (max, sums) = (slice::<f32>(m, max)?, slice::<f32>(m, sums)?);
            let scale = slice::<f64>(m, scale)?[0]; // the op's check allows one element only
            let scale = (scale * f64::from(factor)) as f32;
            let cap = cap.map(|cap| Cap::new(cap, 1.0));
            let work = logits.len();
            let logits = Rows { view: values_mut(m, logits)?, each: cols };
            workers.split(rows, work, logits, &|rows, mut logits, _| {
                for (i, row) in rows.enumerate() {
                    let (max, sum, target) = (max[row], sums[row], targets[row]);
                    let gradient = Gradient { max, sum, target, scale, cap };
                    gradient.write(&mut logits.view, i * cols, cols, shard);
                }
            });
        }
        _ => return not_a_kernel(),
    }
    Ok(())
}

/// x = f(x).
fn replace(x: &mut ViewMut<'_>, f: impl Fn(f32) -> f32) {
    vectorised(
        #[inline(always)]
        || {
            let mut buffer = [0.0; BLOCK];
            for at in (0..x.len()).step_by(BLOCK) {
                let n = BLOCK.min(x.len() - at);
                write(
                    x,
                    at,
                    n,
                    &mut buffer,
                    true,
                    #[inline(always)]
                    |x| x.iter_mut().for_each(|x| *x = f(*x)),
                );
            }
        },
    );
}

/// y (rows) = maxima of the first `valid` columns of x (rows, cols).
fn row_max(x: View<'_>, cols: usize, valid: usize, y: &mut [f32]) {
    vectorised(
        #[inline(always)]
        || {
            let mut buffer = [0.0; BLOCK];
            for (row, y) in y.iter_mut().enumerate() {
                *y = f32::NEG_INFINITY;
                for col in (0..valid).step_by(BLOCK) {
                    let n = BLOCK.min(valid - col);
                    *y = y.max(max(read(&x, row * cols + col, n, &mut buffer)));
                }
            }
        },
    );
}

/// sums (rows) = sums of e^(x - max) over the first `valid` columns of x (rows, cols).
fn sum_exps(x: View<'_>, cols: usize, valid: usize, maxima: &[f32], sums: &mut [f32]) {
    vectorised(
        #[inline(always)]
        || {
            let mut buffer = [0.0; BLOCK];
            for (row, (total, max)) in sums.iter_mut().zip(maxima).enumerate() {
                *total = 0.0;
                for col in (0..valid).step_by(BLOCK) {
                    let n = BLOCK.min(valid - col);
                    let x = read(&x, row * cols + col, n, &mut buffer);
                    *total += sum(x, |x| exp(x - max));
                }
            }
        },
    );
}

/// The column of a target in this shard; `None` if another rank has it.
fn column(target: i32, shard: VocabShard, cols: usize) -> Option<usize> {
    let column = usize::try_from(target).ok()?.checked_sub(shard.first)?;
    (column < shard.valid.min(cols)).then_some(column)
}

/// y (rows) = logit of the target - max, or 0 if another rank has the target.
fn pick_targets(
    logits: View<'_>,
    cols: usize,
    shard: VocabShard,
    max: &[f32],
    targets: &[i32],
    y: &mut [f32],
) {
    for (row, ((y, target), max)) in y.iter_mut().zip(targets).zip(max).enumerate() {
        *y = column(*target, shard, cols).map_or(0.0, |column| {
            let mut logit = [0.0];
            logits.load(row * cols + column, &mut logit);
            logit[0] - max
        });
    }
}

/// Values on which the gradient of one row depends, in addition to its logits.
struct Gradient {
    max: f32,
    sum: f32,
    target: i32,
    scale: f32,
    /// Cap of the logits.
    cap: Option<Cap>,
}

impl Gradient {
    /// Replaces the logits `at..at + cols` by their gradient.
    fn write(&self, logits: &mut ViewMut<'_>, at: usize, cols: usize, shard: VocabShard) {
        let valid = if self.target < 0 { 0 } else { shard.valid.min(cols) };
        let target = column(self.target, shard, cols);
        let factor = self.scale / self.sum;
        vectorised(
            #[inline(always)]
            || {
                let (mut x, mut slopes) = ([0.0; BLOCK], [0.0; BLOCK]);
                for col in (0..valid).step_by(BLOCK) {
                    let n = BLOCK.min(valid - col);
                    logits.as_view().load(at + col, &mut x[..n]);
                    if let Some(cap) = self.cap {
                        let both = slopes.iter_mut().zip(&x[..n]);
                        both.for_each(|(slope, x)| *slope = cap.slope(*x));
                    }
                    x[..n].iter_mut().for_each(|x| *x = exp(*x - self.max) * factor);
                    if let Some(x) = target.and_then(|t| x[..n].get_mut(t.checked_sub(col)?)) {
                        *x -= self.scale;
                    }
                    if self.cap.is_some() {
                        x[..n].iter_mut().zip(&slopes).for_each(|(x, slope)| *x *= slope);
                    }
                    logits.store(at + col, &x[..n]);
                }
                for col in (valid..cols).step_by(BLOCK) {
                    logits.store(at + col, &[0.0; BLOCK][..BLOCK.min(cols - col)]);
                }
            },
        );
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Rig, TYPES, assert_close, differences, noise};
    use super::*;
    use crate::{Dtype, Tensor};

    const ROWS: usize = 6;
    const TOKENS: usize = 601;
    const TARGETS: [i32; ROWS] = [0, 600, -1, 300, 151, -100];
    const SCALE: f64 = 8.0;
    const FACTOR: f32 = 0.25;
    /// A cap that bends logits of about 20.
    const CAP: f32 = 30.0;

    fn logits() -> Vec<f64> {
        noise(1, ROWS * TOKENS).iter().map(|x| x * 8.0 + 20.0).collect()
    }

    /// Loss and gradient by the formula, from the rounded logits. With a cap, the gradient is that of
    /// the logits before it.
    fn truth(logits: &[f64], cap: Option<f32>) -> (f64, Vec<f64>) {
        let cap = cap.map(f64::from);
        let mut loss = 0.0;
        let mut gradient = vec![0.0; logits.len()];
        for (row, target) in TARGETS.iter().enumerate() {
            let Ok(target) = usize::try_from(*target) else { continue };
            let x = &logits[row * TOKENS..][..TOKENS];
            let sum: f64 = x.iter().map(|x| x.exp()).sum();
            loss += sum.ln() - x[target];
            for (i, x) in x.iter().enumerate() {
                let hot = f64::from(u8::from(i == target));
                let slope = cap.map_or(1.0, |cap| 1.0 - (x / cap).powi(2));
                gradient[row * TOKENS + i] =
                    (x.exp() / sum - hot) * slope * SCALE * f64::from(FACTOR);
            }
        }
        (loss, gradient)
    }

    struct Case {
        /// Rounded logits, without padding.
        logits: Vec<f64>,
        loss: f64,
        gradient: Vec<f64>,
        sums: Vec<f64>,
    }

    /// Runs all four ops with the columns split over `shards` ranks. The last rank is padded with
    /// huge logits.
    fn case(threads: usize, dtype: Dtype, shards: usize, cap: Option<f32>) -> Case {
        let mut rig = Rig::new(threads);
        let cols = (TOKENS + 30).div_ceil(shards);
        let targets = rig.put_ints(&TARGETS);
        let scale = rig.put(Dtype::F64, (1, 1), &[SCALE]);
        let parts: Vec<(Tensor, VocabShard)> = (0..shards)
            .map(|i| {
                let (first, valid) = (i * cols, cols.min(TOKENS.saturating_sub(i * cols)));
                let at =
                    |row, col| if col < valid { logits()[row * TOKENS + first + col] } else { 6e4 };
                let x: Vec<f64> =
                    (0..ROWS).flat_map(|row| (0..cols).map(move |col| at(row, col))).collect();
                (rig.put(dtype, (ROWS, cols), &x), VocabShard { first, valid })
            })
            .collect();
        let gather = |rig: &Rig| {
            let row = |row: usize| {
                let part = |&(t, shard): &(Tensor, VocabShard)| {
                    rig.get(t)[row * cols..][..shard.valid].to_vec()
                };
                parts.iter().flat_map(part).collect::<Vec<f64>>()
            };
            (0..ROWS).flat_map(row).collect::<Vec<f64>>()
        };
        let rounded = gather(&rig);
        let each = |rig: &mut Rig, shape, make: &dyn Fn(Tensor, VocabShard, Tensor) -> Op| {
            let run = |&(logits, shard): &(Tensor, VocabShard)| {
                let out = rig.out(Dtype::F32, shape);
                rig.run(&make(logits, shard, out));
                rig.get(out)
            };
            parts.iter().map(run).collect::<Vec<Vec<f64>>>()
        };
        let maxima = each(&mut rig, (1, ROWS), &|x, shard, y| Op::RowMax { x, y, shard });
        let top = |i| maxima.iter().map(|m| m[i]).fold(f64::NEG_INFINITY, f64::max);
        let max = rig.put(Dtype::F32, (1, ROWS), &(0..ROWS).map(top).collect::<Vec<f64>>());
        let sums = each(&mut rig, (2, ROWS), &|logits, shard, sums| Op::CrossEntropyStats {
            logits,
            max,
            targets,
            shard,
            sums,
        });
        let total: Vec<f64> = (0..2 * ROWS).map(|i| sums.iter().map(|s| s[i]).sum()).collect();
        let sums = rig.put(Dtype::F32, (2, ROWS), &total);
        let loss = rig.out(Dtype::F64, (1, 1));
        rig.run(&Op::CrossEntropyLoss { sums, targets, loss });
        for &(logits, shard) in &parts {
            let factor = FACTOR;
            let op =
                Op::CrossEntropyBackward { logits, max, sums, targets, shard, scale, factor, cap };
            rig.run(&op);
            for row in rig.get(logits).chunks(cols) {
                assert!(
                    row[shard.valid..].iter().all(|x| *x == 0.0),
                    "padded columns have no gradient"
                );
            }
        }
        Case {
            logits: rounded,
            loss: rig.get(loss)[0],
            gradient: gather(&rig),
            sums: rig.get(sums),
        }
    }

    #[test]
    fn loss_and_gradient_are_the_formula_over_any_number_of_shards() {
        for (dtype, ulp) in TYPES {
            for (shards, cap) in [(1, None), (2, None), (4, None), (1, Some(CAP)), (4, Some(CAP))] {
                let case = case(1, dtype, shards, cap);
                let (loss, gradient) = truth(&case.logits, cap);
                assert_close(&[case.loss], &[loss], 0.0, 2e-6);
                assert_close(&case.gradient, &gradient, 1e-6, 2e-5 + ulp);
            }
        }
    }

    #[test]
    fn logits_are_scaled_and_capped_and_the_gradient_is_that_of_the_capped_loss() {
        let x: Vec<f64> = noise(1, ROWS * TOKENS).iter().map(|x| x * 160.0).collect();
        for ((dtype, ulp), cap) in TYPES.iter().flat_map(|t| [(*t, None), (*t, Some(CAP))]) {
            let scale = 0.125;
            let capped = |x: &[f64]| {
                let of = |x: &f64| {
                    cap.map_or(x * 0.125, |cap: f32| {
                        f64::from(cap) * (x * 0.125 / f64::from(cap)).tanh()
                    })
                };
                x.iter().map(of).collect::<Vec<f64>>()
            };
            for threads in [1, 3] {
                let mut rig = Rig::new(threads);
                let logits = rig.put(dtype, (ROWS, TOKENS), &x);
                let x = rig.get(logits);
                rig.run(&Op::CapLogits { logits, scale, cap });
                assert_close(&rig.get(logits), &capped(&x), 1e-6, 1e-6 + ulp);
            }
            // Of a few logits, since each is moved.
            let few = &x[..40];
            let loss = |x: &[f64]| {
                let z = capped(x);
                z.iter().map(|z| z.exp()).sum::<f64>().ln() - z[7]
            };
            let mut rig = Rig::new(1);
            let logits = rig.put(Dtype::F32, (1, 40), few);
            let (max, sums) = (rig.out(Dtype::F32, (1, 1)), rig.out(Dtype::F32, (2, 1)));
            let (targets, one) = (rig.put_ints(&[7]), rig.put(Dtype::F64, (1, 1), &[1.0]));
            let shard = VocabShard { first: 0, valid: 40 };
            rig.run(&Op::CapLogits { logits, scale, cap });
            rig.run(&Op::RowMax { x: logits, y: max, shard });
            rig.run(&Op::CrossEntropyStats { logits, max, targets, shard, sums });
            let (factor, scale) = (scale, one);
            let op =
                Op::CrossEntropyBackward { logits, max, sums, targets, shard, scale, factor, cap };
            rig.run(&op);
            assert_close(&rig.get(logits), &differences(few, loss), 1e-6, 1e-5);
        }
    }

    #[test]
    fn a_shard_of_padding_alone_takes_no_part() {
        let case = case(1, Dtype::F32, 64, None);
        assert_close(&[case.loss], &[truth(&case.logits, None).0], 0.0, 2e-6);
    }

    #[test]
    fn rows_with_a_negative_target_have_no_gradient() {
        let gradient = case(1, Dtype::F32, 2, Some(CAP)).gradient;
        for (row, target) in gradient.chunks(TOKENS).zip(TARGETS) {
            assert_eq!(target < 0, row.iter().all(|x| *x == 0.0));
        }
    }

    #[test]
    fn threads_and_other_rows_change_no_bit() {
        let (rows, cols) = (67, 999);
        let run = |threads, rows: Range<usize>| {
            let mut rig = Rig::new(threads);
            let n = rows.len();
            let shard = VocabShard { first: 5, valid: 990 };
            let x = &noise(3, rows.end * cols)[rows.start * cols..];
            let targets: Vec<i32> = rows.map(|r| r as i32 * 13 % 1100).collect();
            let (logits, targets) = (rig.put(Dtype::Bf16, (n, cols), x), rig.put_ints(&targets));
            let (max, sums) = (rig.out(Dtype::F32, (1, n)), rig.out(Dtype::F32, (2, n)));
            let scale = rig.put(Dtype::F64, (1, 1), &[SCALE]);
            rig.run(&Op::RowMax { x: logits, y: max, shard });
            rig.run(&Op::CrossEntropyStats { logits, max, targets, shard, sums });
            let factor = FACTOR;
            let cap = Some(CAP);
            let op =
                Op::CrossEntropyBackward { logits, max, sums, targets, shard, scale, factor, cap };
            rig.run(&op);
            (rig.get(sums), rig.get(logits))
        };
        let (sums, gradient) = run(1, 0..rows);
        assert!((&sums, &gradient) == (&run(3, 0..rows).0, &run(3, 0..rows).1));
        let (part_sums, part_gradient) = run(1, 20..31);
        assert_eq!(part_sums[..11], sums[20..31]);
        assert_eq!(part_gradient, gradient[20 * cols..31 * cols]);
    }

    #[test]
    fn stats_have_both_halves() {
        let sums = case(1, Dtype::F32, 1, None).sums;
        assert!(sums[..ROWS].iter().all(|x| *x >= 1.0));
        assert!(sums[ROWS..].iter().zip(TARGETS).all(|(x, t)| *x <= 0.0 && (t >= 0 || *x == 0.0)));
    }

    use std::ops::Range;
}
