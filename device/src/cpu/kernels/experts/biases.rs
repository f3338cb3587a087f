//! Biases of experts, for rows that are sorted by expert.

use super::super::math::{read, vectorised};
use super::super::{Memory, not_a_kernel, slice, values, values_mut};
use super::ExpertOffsets;
use crate::BLOCK;
use crate::cpu::workers::{Rows, Workers};
use crate::op::Op;

pub(super) fn run(op: &Op, m: &impl Memory, workers: &Workers) -> Result<(), String> {
    match *op {
        Op::AddExpertBiases { x, biases, offsets } => {
            let ((rows, cols), work) = (x.shape(), x.len());
            let offsets = ExpertOffsets::new(slice(m, offsets)?, rows)?;
            let biases = values(m, biases)?;
            let x = Rows { view: values_mut(m, x)?, each: cols };
            workers.split(rows, work, x, &|rows, mut x, _| {
                let [mut sums, mut more] = [[0.0; BLOCK]; 2];
                for (at, row) in rows.enumerate() {
                    let expert = offsets.of_row(row);
                    for col in (0..cols).step_by(BLOCK) {
                        let n = BLOCK.min(cols - col);
                        let bias = read(&biases, expert * cols + col, n, &mut more);
                        let sums = &mut sums[..n];
                        x.view.as_view().load(at * cols + col, sums);
                        sums.iter_mut().zip(bias).for_each(|(x, bias)| *x += bias);
                        x.view.store(at * cols + col, sums);
                    }
                }
            });
        }
        Op::ExpertBiasesBackward { d_y, offsets, d_biases } => {
            let ((rows, cols), work) = (d_y.shape(), d_y.len());
            let offsets = ExpertOffsets::new(slice(m, offsets)?, rows)?;
            let d_y = values(m, d_y)?;
            let d_biases = Rows { view: values_mut(m, d_biases)?, each: cols };
            workers.split(offsets.count(), work, d_biases, &|experts, mut d_biases, _| {
                let (mut sums, mut more) = ([0.0f32; BLOCK], [0.0; BLOCK]);
                for (at, expert) in experts.enumerate() {
                    for col in (0..cols).step_by(BLOCK) {
                        let n = BLOCK.min(cols - col);
                        let sums = &mut sums[..n];
                        vectorised(
                            #[inline(always)]
                            || {
                                sums.fill(0.0);
                                for row in offsets.rows(expert) {
                                    let d = read(&d_y, row * cols + col, n, &mut more);
                                    sums.iter_mut().zip(d).for_each(|(sum, d)| *sum += d);
                                }
                            },
                        );
                        d_biases.view.store(at * cols + col, sums);
                    }
                }
            });
        }
        _ => return not_a_kernel(),
    }
    Ok(())
}
