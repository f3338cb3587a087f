//! Rows of tables, by token and by position. All four ops are sums of rows.

use super::documents::Starts;
use super::math::{read, vectorised};
use super::{Memory, not_a_kernel, slice, values, values_mut};
use crate::cpu::workers::{Rows, Workers};
use crate::op::{Op, VocabShard};
use crate::{BLOCK, View, ViewMut};
use std::iter::once;
use std::ops::Range;

pub(super) fn run(op: &Op, m: &impl Memory, workers: &Workers) -> Result<(), String> {
    match *op {
        Op::Embedding { tokens, table, shard, scale, y } => {
            let (rows, cols) = table.shape();
            let (tokens, table) = (slice::<i32>(m, tokens)?, values(m, table)?);
            let owned = owned(shard, rows);
            workers.split(tokens.len(), y.len(), out(m, y, cols)?, &|rows, mut y, _| {
                for (i, &token) in tokens[rows].iter().enumerate() {
                    let row = i64::from(token) - owned.start;
                    let row = owned.contains(&i64::from(token)).then_some(row as usize);
                    let to = i * cols..(i + 1) * cols;
                    sum_rows(table, &row.into_iter(), scale, false, &mut y.view, to);
                }
            });
        }
        Op::EmbeddingBackward { tokens, order, d_y, shard, scale, d_table } => {
            let (rows, cols) = d_table.shape();
            let sorted = SortedPositions::new(slice(m, tokens)?, slice(m, order)?)?;
            let owned = owned(shard, rows);
            let (work, d_y) = (d_y.len(), values(m, d_y)?);
            workers.split(rows, work, out(m, d_table, cols)?, &|rows, mut d_table, _| {
                let first = owned.start + rows.start as i64;
                let tokens = first..(first + rows.len() as i64).min(owned.end);
                sorted.for_each_token(tokens, |token, positions| {
                    let at = (token - first) as usize * cols;
                    let positions = positions.iter().map(|&p| p as usize);
                    sum_rows(d_y, &positions, scale, true, &mut d_table.view, at..at + cols);
                });
            });
        }
        Op::AddPositions { x, table, first_row, starts } => {
            let (seq_len, cols) = (table.shape().0.max(1), table.shape().1);
            let starts = Starts::new(m, starts, first_row, seq_len)?;
            let table = values(m, table)?;
            workers.split(x.shape().0, x.len(), out(m, x, cols)?, &|rows, mut x, _| {
                for (i, row) in rows.enumerate() {
                    let position = once(starts.position(row));
                    sum_rows(table, &position, 1.0, true, &mut x.view, i * cols..(i + 1) * cols);
                }
            });
        }
        Op::PositionsBackward { d_y, first_row, starts, d_table } => {
            let ((seq_len, cols), rows) = (d_table.shape(), d_y.shape().0);
            let starts = Starts::new(m, starts, first_row, seq_len.max(1))?;
            let (work, d_y) = (d_y.len(), values(m, d_y)?);
            workers.split(seq_len, work, out(m, d_table, cols)?, &|positions, mut d_table, _| {
                for (i, position) in positions.enumerate() {
                    let rows = starts.rows_at(position, rows);
                    let to = i * cols..(i + 1) * cols;
                    sum_rows(d_y, &rows, 1.0, false, &mut d_table.view, to);
                }
            });
        }
        _ => return not_a_kernel(),
    }
    Ok(())
}

fn out(m: &impl Memory, t: crate::Tensor, cols: usize) -> Result<Rows<'_>, String> {
    Ok(Rows { view: values_mut(m, t)?, each: cols })
}

/// Range of the tokens with a row in this rank's table of `rows` rows.
fn owned(shard: VocabShard, rows: usize) -> Range<i64> {
    let first = shard.first as i64;
    first..first + shard.valid.min(rows) as i64
}

/// y[range] = (add ? y[range] : 0) + scale times the sum, in order, of the given rows of x, which
/// have its length.
fn sum_rows(
    x: View<'_>,
    rows: &(impl Iterator<Item = usize> + Clone),
    scale: f32,
    add: bool,
    y: &mut ViewMut<'_>,
    range: Range<usize>,
) {
    vectorised(
        #[inline(always)]
        || {
            let (mut buffer, mut old) = ([0.0; BLOCK], [0.0; BLOCK]);
            let cols = range.len();
            for col in (0..cols).step_by(BLOCK) {
                let n = BLOCK.min(cols - col);
                let mut sums = [0.0f32; BLOCK];
                for row in rows.clone() {
                    let x = read(&x, row * cols + col, n, &mut buffer);
                    sums.iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
                }
                sums[..n].iter_mut().for_each(|sum| *sum *= scale);
                if add {
                    y.as_view().load(range.start + col, &mut old[..n]);
                    sums.iter_mut().zip(&old).for_each(|(sum, old)| *sum += old);
                }
                y.store(range.start + col, &sums[..n]);
            }
        },
    );
}

/// Positions sorted by token.
#[derive(Clone, Copy)]
struct SortedPositions<'a> {
    tokens: &'a [i32],
    order: &'a [i32],
}

impl<'a> SortedPositions<'a> {
    fn new(tokens: &'a [i32], order: &'a [i32]) -> Result<Self, String> {
        let token = |p: &i32| usize::try_from(*p).ok().and_then(|p| tokens.get(p));
        let known = order.iter().all(|p| token(p).is_some());
        if known && order.is_sorted_by_key(token) {
            Ok(Self { tokens, order })
        } else {
            Err("`order` does not list positions sorted by token".into())
        }
    }

    fn token(&self, position: i32) -> i64 {
        i64::from(self.tokens[position as usize])
    }

    /// Calls `f` with each token of the range that occurs, and with its positions.
    fn for_each_token(&self, tokens: Range<i64>, mut f: impl FnMut(i64, &[i32])) {
        let below = |limit: i64| self.order.partition_point(|&p| self.token(p) < limit);
        let order = &self.order[below(tokens.start)..below(tokens.end.max(tokens.start))];
        for positions in order.chunk_by(|&a, &b| self.token(a) == self.token(b)) {
            if let Some(&position) = positions.first() {
                f(self.token(position), positions);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Rig, TYPES, assert_close, noise, starts};
    use crate::Dtype;
    use crate::op::{Op, VocabShard};

    const TOKENS: [i32; 11] = [7, 2, -1, 9, 2, 4, 8, 2, 7, 0, 5];
    const SHARD: VocabShard = VocabShard { first: 4, valid: 4 };

    fn sorted() -> Vec<i32> {
        let mut order: Vec<i32> = (0..TOKENS.len() as i32).collect();
        order.sort_by_key(|&i| TOKENS[i as usize]);
        order
    }

    #[test]
    fn rows_of_this_shard_are_looked_up_and_others_are_zero() {
        for (dtype, _) in TYPES {
            for (cols, scale) in [(3, 1.0), (300, 1.0), (300, 1.5)] {
                let mut rig = Rig::new(1);
                let values = noise(1, 5 * cols);
                let (tokens, table) = (rig.put_ints(&TOKENS), rig.put(dtype, (5, cols), &values));
                let y = rig.out(Dtype::F32, (TOKENS.len(), cols));
                rig.run(&Op::Embedding { tokens, table, shard: SHARD, scale, y });
                for (token, row) in TOKENS.iter().zip(rig.get(y).chunks(cols)) {
                    match token - 4 {
                        local @ 0..4 => {
                            let stored = &values[local as usize * cols..][..cols];
                            let want = stored.iter().map(|x| x * f64::from(scale));
                            assert!(row.iter().copied().eq(want), "{row:?}");
                        }
                        _ => assert_eq!(row, vec![0.0; cols]),
                    }
                }
            }
        }
    }

    #[test]
    fn gradients_are_added_to_the_rows_of_their_tokens() {
        for ((dtype, ulp), scale) in TYPES.iter().flat_map(|t| [(*t, 1.0), (*t, 2.5)]) {
            let (cols, n) = (299, TOKENS.len());
            let mut rig = Rig::new(1);
            let (d, old) = (noise(1, n * cols), noise(2, 5 * cols));
            let (tokens, order) = (rig.put_ints(&TOKENS), rig.put_ints(&sorted()));
            let (d_y, d_table) = (rig.put(dtype, (n, cols), &d), rig.put(dtype, (5, cols), &old));
            let shard = SHARD;
            rig.run(&Op::EmbeddingBackward { tokens, order, d_y, shard, scale, d_table });
            let mut want = old;
            for (token, d) in TOKENS.iter().zip(d.chunks(cols)) {
                if (4..8).contains(token) {
                    let row = &mut want[(token - 4) as usize * cols..][..cols];
                    row.iter_mut().zip(d).for_each(|(row, d)| *row += f64::from(scale) * d);
                }
            }
            assert_close(&rig.get(d_table), &want, 5e-7, ulp);
        }
    }

    #[test]
    fn an_order_that_is_not_sorted_is_an_error() {
        for order in [vec![1, 0], vec![0, 2], vec![0, -1]] {
            let mut rig = Rig::new(1);
            let (tokens, order) = (rig.put_ints(&[1, 2]), rig.put_ints(&order));
            let (d_y, d_table) = (rig.out(Dtype::F32, (2, 3)), rig.out(Dtype::F32, (5, 3)));
            let (shard, scale) = (SHARD, 1.0);
            let op = Op::EmbeddingBackward { tokens, order, d_y, shard, scale, d_table };
            assert!(rig.try_run(&op).expect_err("order").contains("sorted"));
        }
    }

    #[test]
    fn positions_wrap_at_the_sample_and_their_gradients_sum() {
        for (dtype, ulp) in TYPES {
            let of = [(14, 0), (7, 10), (3, 13), (3, 4)];
            for ((rows, first_row), packed) in of.into_iter().flat_map(|r| [(r, false), (r, true)])
            {
                let (seq_len, cols) = (5, 260);
                let mut rig = Rig::new(1);
                let (x, table) = (noise(1, rows * cols), noise(2, seq_len * cols));
                let (tx, tt) =
                    (rig.put(dtype, (rows, cols), &x), rig.put(dtype, (seq_len, cols), &table));
                let d_table = rig.out(Dtype::F32, (seq_len, cols));
                // The rows begin inside a sample, so the list covers all samples.
                let documents = match packed {
                    true => starts(5, &[2, 3, 1, 3, 1, 4, 1, 5]),
                    false => vec![0; 20],
                };
                let documents = &documents[first_row % 5..][..rows];
                let starts = packed.then(|| rig.put_ints(documents));
                rig.run(&Op::PositionsBackward { d_y: tx, first_row, starts, d_table });
                rig.run(&Op::AddPositions { x: tx, table: tt, first_row, starts });
                let mut sums = vec![0.0; seq_len * cols];
                let mut want = x.clone();
                for i in 0..rows * cols {
                    let position = (first_row + i / cols) % seq_len - documents[i / cols] as usize;
                    let place = position * cols + i % cols;
                    want[i] += table[place];
                    sums[place] += x[i];
                }
                assert_close(&rig.get(tx), &want, 1e-7, ulp);
                assert_close(&rig.get(d_table), &sums, 1e-6, 0.0);
            }
        }
    }

    #[test]
    fn threads_change_no_bit() {
        let (n, cols, vocabulary) = (200, 400, 97);
        let tokens: Vec<i32> = (0..n as i32).map(|i| i * 31 % 97 - 3).collect();
        let mut order: Vec<i32> = (0..n as i32).collect();
        order.sort_by_key(|&i| tokens[i as usize]);
        let run = |threads| {
            let mut rig = Rig::new(threads);
            let shard = VocabShard { first: 0, valid: vocabulary };
            let (tokens, order) = (rig.put_ints(&tokens), rig.put_ints(&order));
            let d_y = rig.put(Dtype::Bf16, (n, cols), &noise(1, n * cols));
            let table = rig.put(Dtype::Bf16, (vocabulary, cols), &noise(2, vocabulary * cols));
            let positions = rig.out(Dtype::F32, (7, cols));
            let y = rig.out(Dtype::F32, (n, cols));
            let scale = 0.75;
            rig.run(&Op::EmbeddingBackward { tokens, order, d_y, shard, scale, d_table: table });
            rig.run(&Op::PositionsBackward { d_y, first_row: 3, starts: None, d_table: positions });
            rig.run(&Op::Embedding { tokens, table, shard, scale, y });
            rig.run(&Op::AddPositions { x: y, table: positions, first_row: 3, starts: None });
            [rig.get(table), rig.get(positions), rig.get(y)]
        };
        assert_eq!(run(1), run(3));
    }
}
