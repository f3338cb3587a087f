//! The time of the gated delta rule.

use super::{near, pair, rank_of, record};
use crate::sim::simulate;
use device::{Arena, DeltaHeads, Dtype, Lane, Op, Plan};
use std::sync::Arc;

/// Seconds of the rule forward over samples of `seq_len` tokens, 8192 tokens together.
fn seconds(seq_len: usize) -> f64 {
    let heads = DeltaHeads { keys: 16, values: 32, key_dim: 128, value_dim: 128, seq_len };
    let (mut plan, rows) = (Plan::default(), 8192);
    let mut tensor =
        |name: &str, dtype, shape| plan.tensor((Arena::Device, "p"), name, dtype, shape);
    let qkv = tensor("qkv", Dtype::Bf16, (rows, heads.columns()));
    let gates = tensor("gates", Dtype::F32, (rows, 2 * heads.values));
    let out = tensor("out", Dtype::Bf16, (rows, heads.values * heads.value_dim));
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
    let timeline = simulate(program.unwrap(), &pair(), 1, 1, true);
    timeline.played(0).map(|p| p.end - p.start).sum()
}

#[test]
fn the_time_of_the_rule_grows_with_the_tokens_whatever_the_length_of_a_sample() {
    let flops = 2.0 * 8192.0 * 32.0 * (3.0 * 128.0 * 128.0 + 64.0 * 256.0);
    for seq_len in [1024, 8192] {
        near(seconds(seq_len), 2e-6 + flops / (0.15 * 10e12));
    }
}
