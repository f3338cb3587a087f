//! The time of the gated delta rule.

use super::{near, pair, rank_of, record};
use crate::sim::simulate;
use device::{Arena, DeltaHeads, Dtype, Lane, Op, Plan};
use std::sync::Arc;

/// Seconds of the rule forward over samples of `seq_len` tokens, 8192 tokens together, with this many
/// heads of values, on a GPU like that of [`pair`].
fn seconds(seq_len: usize, values: usize, dtype: Dtype, sm: u32) -> f64 {
    let heads = DeltaHeads { keys: values, values, key_dim: 128, value_dim: 128, seq_len };
    let (mut plan, rows) = (Plan::default(), 8192);
    let mut tensor =
        |name: &str, dtype, shape| plan.tensor((Arena::Device, "p"), name, dtype, shape);
    let qkv = tensor("qkv", dtype, (rows, heads.columns()));
    let gates = tensor("gates", Dtype::F32, (rows, 2 * heads.values));
    let out = tensor("out", dtype, (rows, heads.values * heads.value_dim));
    let places = rows / seq_len * heads.places();
    let states = tensor("states", Dtype::F32, (places, heads.state_len()));
    let program = record(rank_of(1, 1), &Arc::new(plan), |d| {
        [qkv, gates].into_iter().try_for_each(|t| d.write(t, &|_| 0.0))?;
        d.begin_step(1);
        let starts = None;
        d.submit(
            Lane::Compute,
            Op::DeltaRule { qkv, gates, out, states, initial: None, heads, starts },
        );
        d.sync_all()
    });
    let mut hardware = pair();
    hardware.gpu.sm = sm;
    let timeline = simulate(program.unwrap(), &hardware, 1, 1, true);
    timeline.played(0).map(|p| p.end - p.start).sum()
}

#[test]
fn the_time_of_the_rule_grows_with_the_tokens_whatever_the_length_of_a_sample() {
    let flops = 2.0 * 8192.0 * 32.0 * (3.0 * 128.0 * 128.0 + 64.0 * 256.0);
    // Blocks of 32 columns on 80 multiprocessors: 13 rounds of 1024, and two rounds of 128.
    for (seq_len, idle) in [(1024, 13.0 * 80.0 / 1024.0), (8192, 2.0 * 80.0 / 128.0)] {
        let alone = flops / (150.0 * 10e12 / 128.0);
        near(seconds(seq_len, 32, Dtype::Bf16, 80), 2e-6 + alone * idle);
    }
}

#[test]
fn the_rule_is_fast_on_tensor_cores_that_are_all_busy() {
    let of = |values, dtype, sm| seconds(8192, values, dtype, sm) - 2e-6;
    let fast = of(32, Dtype::Bf16, 80);
    // Without bf16, or without tensor cores for it, the kernels compute in fp32.
    near(of(32, Dtype::F16, 80) / fast, 150.0 / 25.0);
    near(of(32, Dtype::Bf16, 75) / fast, 150.0 / 25.0);
    // A clock has twice the lanes there, and the rate of the GPU is given for all lanes.
    near(of(32, Dtype::Bf16, 89) / fast, 2.0 * 150.0 / 90.0);
    // 4 heads have 16 blocks, which take half of the two rounds of 32 heads.
    near(of(4, Dtype::Bf16, 80) / fast, 0.5);
}
