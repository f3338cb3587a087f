//! The equivalence matrix, second half: settings that only move work in place or time change no bit
//! of losses, norms, evaluations and final states.

use device::cpu::Lanes;
use engine::run::RunOptions;
use std::time::Duration;
use tests::compare::{
    assert_no_bit_changes, assert_same_bits, full, run_sets, run_with, with, with_delays,
};

/// Settings of all runs: clipping, dropout, and evaluations between steps while an update runs.
const BASE: &[&str] = &[
    "model.vocab=257",
    "model.dropout=0.1",
    "train.steps=4",
    "train.eval_every=2",
    "train.eval_batches=2",
    "batch.micro=1",
];

const RULES: [&[&str]; 2] =
    [&["optimizer.kind=AdamW"], &["optimizer.kind=Sgd", "optimizer.lr=0.3"]];

const LAYOUTS: [&[&str]; 4] = [
    &["parallel.tensor=2", "parallel.data=2"],
    &["parallel.tensor=2", "parallel.sequence=true"],
    &["parallel.data=2"],
    &[],
];

/// Asserts, for the layouts and rules, that no variant changes a bit.
fn no_bit_changes(variants: &[&[&str]]) {
    for (i, layout) in LAYOUTS.iter().enumerate() {
        for (j, rule) in RULES.iter().enumerate() {
            if full() || (i + j) % 2 == 0 {
                assert_no_bit_changes(&with(&with(BASE, rule), layout), variants);
            }
        }
    }
}

#[test]
fn update_mode_changes_no_bit() {
    no_bit_changes(&[&["offload.update=Serial"]]);
}

#[test]
fn dropout_of_adapters_has_the_same_bits_in_every_place_and_time() {
    let dropped = "adapter=Lora(rank: 4, alpha: 16, dropout: 0.3)";
    let variants: &[&[&str]] = &[
        &["offload.update=Serial", "recompute=Selective"],
        &["offload.optimizer=Device", "recompute=Block"],
        &["offload.parameters=Host", "recompute=Block", "offload.first_forward=2"],
        &["offload.update=Speculative", "offload.accumulate=Host"],
        &["recompute=Block", "activations=Tiers(gpu_blocks: 1, host_blocks: 1, host_mlps: 1)"],
    ];
    for layout in [LAYOUTS[0], LAYOUTS[3]] {
        let sets = with(&with(BASE, &[dropped]), layout);
        assert_no_bit_changes(&sets, variants);
        let without = with(&sets, &["adapter=Lora(rank: 4, alpha: 16)"]);
        let [with, without] = [sets, without].map(|sets| run_sets(&sets));
        assert_ne!(with.outcome.state_hash, without.outcome.state_hash, "{layout:?}");
    }
}

#[test]
fn split_masters_are_the_fp32_ones_over_whole_runs() {
    for (i, layout) in LAYOUTS.iter().enumerate() {
        let rule = RULES[i % 2];
        let sets = with(&with(&with(BASE, rule), layout), &["precision=Bf16"]);
        assert_no_bit_changes(
            &sets,
            &[
                &["offload.master=Split"],
                &["offload.master=Split", "offload.update=Serial", "offload.accumulate=Host"],
                &["offload.master=Split", "offload.optimizer=Split(device_fraction: 0.4)"],
            ],
        );
        let blocking = with(&sets, &["offload.update=Serial", "offload.transfer=Blocking"]);
        assert_no_bit_changes(&blocking, &[&["offload.master=Split"]]);
        if i % 2 == 0 {
            let delayed = with(&sets, &["offload.update=Delayed(after_step: 1)"]);
            let split = "offload.optimizer=Split(device_fraction: 0.4)";
            assert_no_bit_changes(
                &delayed,
                &[&["offload.master=Split"], &["offload.master=Split", split]],
            );
        }
    }
}

#[test]
fn what_only_moves_work_changes_no_bit_of_small_moments() {
    for layout in LAYOUTS {
        let small = ["offload.moments=Bf16", "precision=Bf16"];
        let sets = with(&with(BASE, layout), &small);
        assert_no_bit_changes(
            &sets,
            &[
                &["offload.update=Serial", "device.threads=3"],
                &["offload.bucket_elements=9000", "offload.tile_elements=2500"],
                &["offload.accumulate=Host", "offload.master=Split"],
                &["offload.accumulate=Device", "offload.bucket_elements=1000000"],
            ],
        );
        let (wide, narrow) = (run_sets(&with(&sets, &["offload.moments=Fp32"])), run_sets(&sets));
        assert_ne!(wide.outcome.state_hash, narrow.outcome.state_hash, "{layout:?}");
    }
    // A delayed update uses the random bits of the step of its gradient.
    let delayed = with(LAYOUTS[0], &["offload.update=Delayed(after_step: 1)", "precision=Bf16"]);
    assert_no_bit_changes(
        &with(&with(BASE, &delayed), &["offload.moments=Bf16"]),
        &[
            &["offload.accumulate=Host", "offload.master=Split", "device.threads=3"],
            &["offload.bucket_elements=9000", "offload.tile_elements=2500"],
        ],
    );
}

#[test]
fn placement_changes_no_bit() {
    no_bit_changes(&[&["offload.optimizer=Device"]]);
    // With one micro-batch, the shard itself is the gradient, without a sum.
    for layout in [&[][..], &["parallel.data=2"]] {
        let whole = with(&with(BASE, layout), &["batch.micro=4", "batch.global=8"]);
        assert_no_bit_changes(&whole, &[&["offload.optimizer=Device"]]);
    }
}

#[test]
fn buckets_tiles_and_lookahead_change_no_bit() {
    no_bit_changes(&[
        &["offload.bucket_elements=1024"],
        &["offload.bucket_elements=1000000", "offload.tile_elements=1000000"],
        &["offload.bucket_elements=9000", "offload.tile_elements=2500", "offload.lookahead=3"],
        &["offload.lookahead=64", "offload.tile_elements=1024"],
        &["offload.bucket_elements=1500", "offload.optimizer=Device"],
        &["offload.keep_gradients=true"],
    ]);
}

#[test]
fn the_place_of_accumulation_changes_no_bit() {
    let other_buckets = ["offload.accumulate=Host", "offload.bucket_elements=2000"];
    no_bit_changes(&[&["offload.accumulate=Host"], &other_buckets]);
}

/// The cast of 16-bit gradients to fp32 is exact, and sums over micro-batches keep their order. So
/// the test needs no tolerance if sums are fp32 or do not exist. `precision.rs` tests 16-bit sums.
#[test]
fn blocking_transfer_changes_no_bit() {
    let [blocking, serial] = ["offload.transfer=Blocking", "offload.update=Serial"];
    let pieces = ["offload.bucket_elements=1500", "offload.tile_elements=1024"];
    no_bit_changes(&[&[blocking, serial], &with(&[blocking, serial], &pieces)]);
    for layout in [&[][..], &["parallel.data=2"]] {
        let whole = with(&with(BASE, layout), &["batch.micro=4", "batch.global=8"]);
        assert_no_bit_changes(&whole, &[&[blocking, serial]]);
    }
    for precision in ["precision=Bf16", "precision=Fp16"] {
        let grid = [
            "parallel.tensor=2",
            "parallel.data=2",
            "batch.micro=2",
            "batch.global=4",
            "train.steps=3",
        ];
        let scaled = with(&with(BASE, &grid), &[precision, "loss_scale.initial=1024.0"]);
        assert_no_bit_changes(&scaled, &[&[blocking, serial]]);
    }
    let base = with(BASE, &["parallel.data=2", "train.steps=3", "batch.micro=2"]);
    let options = with_delays(40);
    let ran = run_with(&with(&base, &[blocking, serial]), &options);
    assert_same_bits(&run_sets(&base), &ran, "random delays");
}

#[test]
fn recomputation_changes_no_bit() {
    no_bit_changes(&[&["recompute=Block"], &["recompute=Selective"]]);
}

#[test]
fn partitioned_checkpoints_change_no_bit() {
    let [two, four] = ["parallel.tensor=2", "parallel.tensor=4"];
    let on = ["recompute=Block", "partition_checkpoints=true"];
    // With few blocks, ranks gather little or nothing. Evaluations use the same buffers.
    for layout in [&[two, "model.layers=1"], &[two, "model.layers=2"], &[four, "model.layers=5"]] {
        assert_no_bit_changes(&with(BASE, layout), &[&on]);
    }
    let base = with(BASE, &[two, "parallel.data=2", "model.layers=4", "batch.micro=2"]);
    let whole = run_sets(&with(&base, &["recompute=Block"]));
    let timeout = Duration::from_secs(120);
    for lanes in [Lanes::Inline, Lanes::Threads { chaos_us: 40 }] {
        let options = RunOptions { lanes, timeout: Some(timeout), ..RunOptions::default() };
        assert_same_bits(&whole, &run_with(&with(&base, &on), &options), &format!("{lanes:?}"));
    }
}

#[test]
fn checkpoints_on_the_host_change_no_bit() {
    let on = ["recompute=Block", "host_checkpoints=true"];
    let blocking = with(&on, &["offload.transfer=Blocking", "offload.update=Serial"]);
    let layouts: [&[&str]; 4] = [
        &["model.layers=1"],
        &["model.layers=3", "parallel.data=2"],
        &["model.layers=2", "parallel.tensor=2", "parallel.sequence=true"],
        &["model.layers=5", "parallel.tensor=4"],
    ];
    for layout in layouts {
        assert_no_bit_changes(&with(BASE, layout), &[&on, &blocking]);
    }
    let base = with(BASE, &["parallel.tensor=2", "parallel.data=2", "model.layers=4"]);
    let whole = run_sets(&with(&base, &["recompute=Block"]));
    let options = with_delays(40);
    for on in [&on[..], &blocking] {
        assert_same_bits(&whole, &run_with(&with(&base, on), &options), "random delays");
    }
}

#[test]
fn kernel_threads_change_no_bit() {
    no_bit_changes(&[&["device.threads=2"], &["device.threads=3", "offload.accumulate=Host"]]);
}

#[test]
fn a_second_run_has_the_same_bits_and_another_seed_has_not() {
    no_bit_changes(&[&[]]);
    let seeds = ["train.seed=7", "train.seed=8"].map(|seed| run_sets(&[seed]).bits());
    assert_ne!(seeds[0], seeds[1]);
}

#[test]
fn lanes_with_random_delays_change_no_bit() {
    let modes: &[&[&str]] = &[
        &[],
        &["offload.accumulate=Host", "offload.lookahead=2"],
        &["offload.update=Serial"],
        &["offload.optimizer=Device"],
    ];
    // With and without data parallelism, the Host lane has different ops after a copy.
    let quick = (&modes[..2], &LAYOUTS[..2], &[40][..]);
    let (modes, layouts, delays) =
        if full() { (modes, &LAYOUTS[..], &[0, 40, 400][..]) } else { quick };
    for layout in layouts {
        let base = with(&with(BASE, layout), &["train.steps=3", "batch.micro=2"]);
        let inline = run_sets(&base);
        for mode in modes {
            for &chaos_us in delays {
                let options = with_delays(chaos_us);
                let ran = run_with(&with(&base, mode), &options);
                assert_same_bits(&inline, &ran, &format!("{layout:?} {mode:?} {chaos_us} us"));
            }
        }
    }
}

#[test]
fn nothing_changes_a_bit_in_any_precision() {
    let mut variants = Vec::new();
    for optimizer in ["offload.optimizer=Host", "offload.optimizer=Device"] {
        for update in ["offload.update=Overlapped", "offload.update=Serial"] {
            for sum in ["offload.accumulate=Device", "offload.accumulate=Host"] {
                for bucket in ["offload.bucket_elements=1024", "offload.bucket_elements=50000"] {
                    for lookahead in ["offload.lookahead=1", "offload.lookahead=4"] {
                        for recompute in
                            ["recompute=None", "recompute=Selective", "recompute=Block"]
                        {
                            let refused = optimizer.ends_with("Device") && sum.ends_with("Host");
                            if !refused {
                                let offload = [optimizer, update, sum, bucket, lookahead];
                                variants.push([&offload[..], &[recompute]].concat());
                            }
                        }
                    }
                }
            }
        }
    }
    let selected = |i: &usize| full() || (i + 1).is_multiple_of(13);
    let variants: Vec<&[&str]> =
        (0..variants.len()).filter(selected).map(|i| &variants[i][..]).collect();
    let layouts = if full() { &LAYOUTS[..] } else { &LAYOUTS[..1] };
    for precision in ["precision=Fp32", "precision=Bf16", "precision=Fp16"] {
        for layout in layouts {
            let sets = ["train.steps=3", precision, "loss_scale.initial=1024.0"];
            assert_no_bit_changes(&with(&with(BASE, layout), &sets), &variants);
        }
    }
    // The sizes of fp8 matmuls are multiples of 16.
    for layout in layouts {
        let sets = ["train.steps=3", "precision=Fp8", "model.hidden=64"];
        assert_no_bit_changes(&with(&with(BASE, layout), &sets), &variants);
    }
}

#[test]
fn a_split_of_the_optimizer_changes_no_bit() {
    let variants: [&[&str]; 6] = [
        &["offload.optimizer=Split(device_fraction: 0.1)"],
        &["offload.optimizer=Split(device_fraction: 0.5)", "offload.update=Serial"],
        &["offload.optimizer=Split(device_fraction: 0.5)", "offload.accumulate=Host"],
        &["offload.optimizer=Split(device_fraction: 0.77)", "offload.bucket_elements=1500"],
        &["offload.optimizer=Split(device_fraction: 0.0)"],
        &["offload.optimizer=Split(device_fraction: 1.0)", "offload.accumulate=Host"],
    ];
    no_bit_changes(&variants);
    for layout in [&[][..], &["parallel.data=2"]] {
        let whole = with(&with(BASE, layout), &["batch.micro=4", "batch.global=8"]);
        assert_no_bit_changes(&whole, &variants[..4]);
    }
    let base = with(BASE, &["parallel.data=2", "train.steps=3", "batch.micro=2"]);
    let options = with_delays(40);
    for variant in &variants[1..3] {
        assert_same_bits(&run_sets(&base), &run_with(&with(&base, variant), &options), "delays");
    }
}

#[test]
fn a_first_forward_of_several_micro_batches_together_changes_no_bit() {
    let base = with(BASE, &["recompute=Block"]);
    for (i, layout) in LAYOUTS.iter().enumerate().filter(|(i, _)| full() || i % 2 == 0) {
        // There are eight or four micro-batches; a group has some, all, or more than exist.
        let layout = with(&with(&base, layout), RULES[i % 2]);
        let all: [&[&str]; 4] = [
            &["offload.first_forward=2"],
            &["offload.first_forward=3", "offload.update=Serial", "offload.lookahead=3"],
            &["offload.first_forward=8", "offload.accumulate=Host"],
            &["offload.first_forward=100", "offload.optimizer=Split(device_fraction: 0.3)"],
        ];
        assert_no_bit_changes(&layout, &all);
    }
    // More cases: one micro-batch, which has no group; partitioned checkpoints; a delayed update.
    let one = with(&base, &["batch.micro=8"]);
    assert_no_bit_changes(&one, &[&["offload.first_forward=2"]]);
    let shares = with(&base, &["parallel.tensor=2", "partition_checkpoints=true"]);
    assert_no_bit_changes(&shares, &[&["offload.first_forward=3"], &["offload.first_forward=8"]]);
    let delayed = with(&base, &["offload.update=Delayed(after_step: 1)", "parallel.data=2"]);
    assert_no_bit_changes(&delayed, &[&["offload.first_forward=3"]]);
    let options = with_delays(40);
    let ran = run_with(&with(&shares, &["offload.first_forward=3"]), &options);
    assert_same_bits(&run_sets(&shares), &ran, "random delays");
}
