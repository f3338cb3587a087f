//! Sinks of attention: a score of each head in the sum of its softmax, without a value.

use super::super::math::{dot, exp, read, sigmoid, vectorised};
use super::super::{Memory, not_a_kernel, number, slice, slice_mut, values, values_mut};
use crate::BLOCK;
use crate::cpu::workers::{Rows, Slice, Workers};
use crate::op::{Heads, Op};

pub(super) fn run(op: &Op, m: &impl Memory, workers: &Workers) -> Result<(), String> {
    match *op {
        Op::AttentionSinks { out, lse, sinks, heads } => {
            let Heads { count, seq_len, .. } = heads;
            let ((rows, width), sinks) = (out.shape(), values(m, sinks)?);
            let (dim, work) = (width / count, out.len());
            let sums = slice_mut::<f32>(m, lse)?;
            let out = Rows { view: values_mut(m, out)?, each: width };
            workers.split(rows, work, out, &|rows, mut out, _| {
                let mut buffer = [0.0; BLOCK];
                for (at, row) in rows.enumerate() {
                    for head in 0..count {
                        let lse = sums[place(heads, row, head)];
                        let share = sigmoid(lse - number(sinks, head));
                        let first = at * width + head * dim;
                        for col in (0..dim).step_by(BLOCK) {
                            let part = &mut buffer[..BLOCK.min(dim - col)];
                            out.view.as_view().load(first + col, part);
                            part.iter_mut().for_each(|x| *x *= share);
                            out.view.store(first + col, part);
                        }
                    }
                }
            });
            let units = rows / seq_len * count;
            workers.split(
                units,
                units * seq_len,
                Slice { data: sums, each: seq_len },
                &|units, sums, _| {
                    for (unit, sums) in units.zip(sums.data.chunks_exact_mut(seq_len)) {
                        let sink = number(sinks, unit % count);
                        for lse in sums {
                            *lse = lse.max(sink) + exp(-(*lse - sink).abs()).ln_1p();
                        }
                    }
                },
            );
        }
        Op::AttentionSinksBackward { out, lse, d_out, sinks, d_sinks, heads } => {
            let ((rows, width), count, work) = (out.shape(), heads.count, out.len());
            let (dim, sums, sinks) = (width / count, slice::<f32>(m, lse)?, values(m, sinks)?);
            let (out, d_out) = (values(m, out)?, values(m, d_out)?);
            let d_sinks = Rows { view: values_mut(m, d_sinks)?, each: 1 };
            workers.split(count, work, d_sinks, &|of, mut d_sinks, _| {
                let [mut one, mut other] = [[0.0; BLOCK]; 2];
                for (at, head) in of.enumerate() {
                    let sink = number(sinks, head);
                    let mut total = 0.0f64;
                    for row in 0..rows {
                        let mut product = 0.0;
                        for col in (0..dim).step_by(BLOCK) {
                            let (from, n) = (row * width + head * dim + col, BLOCK.min(dim - col));
                            let x = read(&out, from, n, &mut one);
                            let d = read(&d_out, from, n, &mut other);
                            vectorised(
                                #[inline(always)]
                                || product += dot(x, d),
                            );
                        }
                        let share = exp(sink - sums[place(heads, row, head)]);
                        total -= f64::from(share) * f64::from(product);
                    }
                    d_sinks.view.store(at, &[total as f32]);
                }
            });
        }
        _ => return not_a_kernel(),
    }
    Ok(())
}

/// Index of the sum of a row and a head in (B, H, T).
const fn place(heads: Heads, row: usize, head: usize) -> usize {
    let Heads { count, seq_len, .. } = heads;
    (row / seq_len * count + head) * seq_len + row % seq_len
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::{Rig, TYPES, assert_close, noise};
    use crate::Dtype;
    use crate::op::{Heads, Op};

    /// The formulas of a softmax with one more score, in f64.
    #[test]
    fn sinks_and_their_gradient_are_the_formula_in_every_type() {
        for ((dtype, ulp), threads) in TYPES.iter().flat_map(|t| [(*t, 1), (*t, 3)]) {
            for (samples, seq_len, count, dim) in [(1, 1, 1, 2), (2, 5, 3, 6), (1, 9, 2, 300)] {
                let heads = Heads { count, kv_count: 1, first: 0, total: count, seq_len };
                let (mut rig, rows) = (Rig::new(threads), samples * seq_len);
                let [out, d_out] = [1, 2].map(|seed| {
                    rig.put(dtype, (rows, count * dim), &noise(seed, rows * count * dim))
                });
                let sums: Vec<f64> = noise(3, rows * count).iter().map(|x| 4.0 * x).collect();
                let lse = rig.put(Dtype::F32, (1, rows * count), &sums);
                let sinks = rig.put(dtype, (1, count), &noise(4, count));
                let d_sinks = rig.out(dtype, (1, count));
                let (before, sums, of_heads) = (rig.get(out), rig.get(lse), rig.get(sinks));
                rig.run(&Op::AttentionSinks { out, lse, sinks, heads });
                rig.run(&Op::AttentionSinksBackward { out, lse, d_out, sinks, d_sinks, heads });
                let place = |row: usize, head: usize| super::place(heads, row, head);
                let all =
                    |row: usize, head: usize| sums[place(row, head)].exp() + of_heads[head].exp();
                let scaled = |i: usize| {
                    let (row, head) = (i / (count * dim), i / dim % count);
                    before[i] * sums[place(row, head)].exp() / all(row, head)
                };
                let want: Vec<f64> = (0..before.len()).map(scaled).collect();
                let got = rig.get(out);
                assert_close(&got, &want, 1e-6, 1e-6 + ulp);
                let mut logs = vec![0.0; rows * count];
                for (row, head) in (0..rows).flat_map(|row| (0..count).map(move |head| (row, head)))
                {
                    logs[place(row, head)] = all(row, head).ln();
                }
                assert_close(&rig.get(lse), &logs, 1e-6, 1e-6);
                let d = rig.get(d_out);
                let of_head = |head: usize| {
                    let row = |row: usize| {
                        let first = (row * count + head) * dim;
                        let product: f64 = (first..first + dim).map(|i| d[i] * got[i]).sum();
                        -of_heads[head].exp() / all(row, head) * product
                    };
                    (0..rows).map(row).sum::<f64>()
                };
                let want: Vec<f64> = (0..count).map(of_head).collect();
                assert_close(&rig.get(d_sinks), &want, 1e-5, 1e-5 + ulp);
            }
        }
    }
}
