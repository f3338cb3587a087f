//! The time of a mixture of experts.

use super::{near, pair, rank_of, record};
use crate::sim::simulate;
use device::{Arena, Dtype, ExpertWeights, GroupedForm, Lane, Op, Plan};
use std::sync::Arc;

/// Seconds of a grouped matmul forward, with `rows` rows of 2048 columns and matrices (512, 2048).
fn seconds(dtype: Dtype, rows: usize, count: usize) -> f64 {
    let (n, k) = (512, 2048);
    let (mut plan, on_device) = (Plan::default(), (Arena::Device, "p"));
    let a = plan.tensor(on_device, "a", dtype, (rows, k));
    let c = plan.tensor(on_device, "c", dtype, (rows, n));
    let all = plan.tensor(on_device, "all", dtype, (1, count * n * k));
    let offsets = plan.tensor(on_device, "offsets", Dtype::I32, (1, count + 1));
    let experts = ExpertWeights { all, shape: (n, k), count, stride: n * k };
    let program = record(rank_of(1, 1), &Arc::new(plan), |d| {
        [a, all, offsets].into_iter().try_for_each(|t| d.write(t, &|_| 0.0))?;
        d.begin_step(1);
        let (form, b, add) = (GroupedForm::Forward, None, false);
        d.submit(Lane::Compute, Op::GroupedGemm { form, a, b, c: Some(c), experts, offsets, add });
        d.sync_all()
    });
    let timeline = simulate(program.unwrap(), &pair(), 1, 1, true);
    timeline.played(0).map(|p| p.end - p.start).sum()
}

#[test]
fn a_grouped_matmul_costs_whole_tiles_of_each_expert() {
    // 8 experts of 1024 rows have 8 x 4 tiles each: 256 tiles, 4 rounds of 80 multiprocessors.
    let round = |tile: f64, speed: f64| 2.0 * tile * tile * (2048.0 + 128.0) / speed * 80.0;
    near(seconds(Dtype::Bf16, 8192, 8), 2e-6 + 4.0 * round(128.0, 0.97) / 100e12);
    // One row more for each expert is a ninth tile of rows: 288 tiles still fit 4 rounds. Twice the
    // experts with half of the rows and one more have 320 tiles, and one expert more a fifth round.
    near(seconds(Dtype::Bf16, 8 * 1025, 8), 2e-6 + 4.0 * round(128.0, 0.97) / 100e12);
    near(seconds(Dtype::Bf16, 16 * 513, 16), 2e-6 + 4.0 * round(128.0, 0.97) / 100e12);
    near(seconds(Dtype::Bf16, 17 * 513, 17), 2e-6 + 5.0 * round(128.0, 0.97) / 100e12);
    // In fp32 tiles of 64 rows: 8 x 16 x 8 tiles, 13 rounds.
    near(seconds(Dtype::F32, 8192, 8), 2e-6 + 13.0 * round(64.0, 0.75) / (0.85 * 10e12));
    // A row for each of 64 experts needs a tile of each.
    near(seconds(Dtype::Bf16, 64, 64), 2e-6 + 4.0 * round(128.0, 0.97) / 100e12);
}
