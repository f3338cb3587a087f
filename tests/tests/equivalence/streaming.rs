//! Parameters on the host: the same bits as with resident parameters, on every layout and with any
//! number of parameters on the GPU.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use tests::compare::{assert_same_bits, full, run_sets, run_with, with, with_delays};

const HOST: &str = "offload.parameters=Host";
const NONE_RESIDENT: &str = "offload.resident_blocks=0";

/// Settings of all runs: more blocks than a ring has, dropout, evaluations between updates, and a
/// limit that clips some steps.
const BASE: &[&str] = &[
    "model.layers=5",
    "model.vocab=257",
    "model.dropout=0.1",
    "train.steps=5",
    "train.eval_every=2",
    "train.eval_batches=2",
    "optimizer.clip=1.1",
    "recompute=Block",
];

const UNTIED: &[&str] = &["model.family=Llama", "model.tied=false"];

const LAYOUTS: [&[&str]; 9] = [
    &[],
    &["parallel.tensor=2", "parallel.data=2", "batch.micro=1"],
    &["parallel.data=3", "batch.global=12"],
    &["parallel.tensor=2", "parallel.sequence=true", "batch.micro=1"],
    &["batch.micro=8", "host_checkpoints=true"],
    &["batch.micro=1", "host_checkpoints=true"],
    &["parallel.tensor=2", "partition_checkpoints=true", "parallel.data=2"],
    &["precision=Bf16", "offload.master=Split", "batch.micro=1", "parallel.data=2"],
    &["precision=Bf16", "offload.moments=Bf16", "offload.master=Split"],
];

/// Settings of the blocks that a GPU holds, and of the order of a step.
const WAYS: [&[&str]; 7] = [
    &[NONE_RESIDENT],
    &[NONE_RESIDENT, "offload.ring=2"],
    &[NONE_RESIDENT, "offload.ring=4", "offload.update=Serial"],
    &["offload.resident_blocks=2", "offload.ring=2", "offload.update=Speculative"],
    &[NONE_RESIDENT, "offload.first_forward=1"],
    &[NONE_RESIDENT, "offload.first_forward=2", "offload.accumulate=Host"],
    &["offload.first_forward=3", "offload.accumulate=Device", "offload.ring=2"],
];

#[test]
fn streamed_parameters_give_the_bits_of_resident_ones() {
    for (number, layout) in LAYOUTS.iter().enumerate() {
        for parts in [&[][..], UNTIED] {
            let base = with(&with(BASE, layout), parts);
            let resident = run_sets(&base);
            for (way, sets) in WAYS.iter().enumerate() {
                // The full tests combine each way with each layout.
                if full() || way == number % WAYS.len() || (way < 2 && number < 3) {
                    let sets = with(&base, &with(&[HOST], sets));
                    assert_same_bits(&resident, &run_sets(&sets), &format!("{sets:?}"));
                }
            }
        }
    }
}

#[test]
fn delayed_lanes_change_no_bit() {
    let base =
        with(BASE, &["parallel.tensor=2", "parallel.data=2", "batch.micro=1", "train.steps=3"]);
    let base = with(&base, UNTIED);
    let resident = run_sets(&base);
    for (chaos_us, way) in [(40, WAYS[0]), (80, WAYS[1]), (40, WAYS[3]), (40, WAYS[5])] {
        let sets = with(&base, &with(&[HOST, "host_checkpoints=true"], way));
        assert_same_bits(&resident, &run_with(&sets, &with_delays(chaos_us)), &format!("{sets:?}"));
    }
}

#[test]
fn steps_that_are_skipped_leave_the_parameters() {
    let sets =
        ["precision=Fp16", "loss_scale.initial=262144", "loss_scale.hysteresis=1", "batch.micro=1"];
    let base = with(&with(BASE, &sets), UNTIED);
    let resident = run_sets(&base);
    let skipped = resident.steps.iter().filter(|step| step.skipped).count();
    assert!(skipped > 0 && skipped < resident.steps.len(), "{skipped} skipped");
    for way in [WAYS[0], WAYS[3], WAYS[4]] {
        let sets = with(&base, &with(&[HOST], way));
        assert_same_bits(&resident, &run_sets(&sets), &format!("{sets:?}"));
    }
}
