//! Tiers of activations: blocks that keep them on the GPU or on the host train to the bits of blocks
//! that recompute them, on every layout, in every update mode and at every place of parameters.

use tests::compare::{assert_same_bits, full, run_sets, run_with, with, with_delays};

/// Settings of all runs: more blocks than a ring has sets, dropout, evaluations between updates,
/// several micro-batches, and a limit that clips some steps.
const BASE: &[&str] = &[
    "model.layers=6",
    "model.vocab=257",
    "model.dropout=0.1",
    "train.steps=3",
    "train.eval_every=2",
    "train.eval_batches=2",
    "optimizer.clip=1.1",
    "recompute=Block",
];

const STREAMED: &str = "offload.parameters=Host";
const NONE_RESIDENT: &str = "offload.resident_blocks=0";
const LLAMA: &str = "model.family=Llama";

/// Tiers alone, and mixtures. Both branches of a block have the same tier, or different ones.
const TIERS: [&str; 7] = [
    "activations=Tiers(gpu_blocks: 6)",
    "activations=Tiers(host_blocks: 6)",
    "activations=Tiers(gpu_blocks: 1, host_blocks: 3)",
    "activations=Tiers(gpu_blocks: 2, host_blocks: 1)",
    "activations=Tiers(gpu_blocks: 1, host_blocks: 0, gpu_mlps: 0, host_mlps: 5)",
    "activations=Tiers(host_blocks: 4, gpu_mlps: 3, host_mlps: 0)",
    "activations=Tiers(gpu_blocks: 3, host_blocks: 3, gpu_mlps: 0, host_mlps: 4)",
];

const LAYOUTS: [&[&str]; 17] = [
    &[],
    &["batch.micro=1"],
    &["parallel.tensor=2", "parallel.data=2", "batch.micro=1"],
    &["parallel.tensor=2", "parallel.sequence=true", "precision=Bf16"],
    &["parallel.tensor=4", "host_checkpoints=true"],
    &["parallel.tensor=2", "partition_checkpoints=true", "offload.accumulate=Host"],
    &["offload.first_forward=3", "batch.micro=1"],
    &["offload.first_forward=2", "batch.micro=1", "host_checkpoints=true"],
    &["offload.update=Speculative", "precision=Bf16"],
    &["offload.update=Delayed(after_step: 1)", "host_checkpoints=true"],
    &["offload.update=Serial", "offload.optimizer=Device"],
    &["precision=Fp8", "model.heads=2"],
    &[STREAMED, NONE_RESIDENT, "batch.micro=1"],
    &[STREAMED, NONE_RESIDENT, "offload.first_forward=1", "host_checkpoints=true"],
    &[STREAMED, "offload.first_forward=3", "parallel.data=2", "batch.micro=1"],
    &[LLAMA, "model.kv_heads=2", "model.qk_norm=true", "model.norm_place=Around"],
    &[
        LLAMA,
        "model.norm_place=After",
        "model.qk_norm=true",
        "model.qk_norm_width=true",
        "parallel.tensor=2",
        "parallel.sequence=true",
    ],
];

#[test]
fn tiers_change_no_bit() {
    for (number, layout) in LAYOUTS.iter().enumerate() {
        let base = with(BASE, layout);
        let recomputed = run_sets(&base);
        assert!(recomputed.steps.iter().all(|step| step.loss.is_finite()), "{layout:?}");
        for (tier, set) in TIERS.iter().enumerate() {
            // The full tests combine each mixture with each layout.
            if full() || tier == number % TIERS.len() || tier == (3 * number + 2) % TIERS.len() {
                let sets = with(&base, &[set]);
                assert_same_bits(&recomputed, &run_sets(&sets), &format!("{sets:?}"));
            }
        }
    }
}

/// Blocks with experts, and blocks with one MLP between them.
const SPARSE: &[&str] =
    &[LLAMA, "model.experts=(count: 6, per_token: 2, ffn_hidden: 24, dense_layers: [1, 4])"];

/// The outputs of experts move beside the inputs of their gates. The router's choices always stay.
#[test]
fn tiers_of_experts_change_no_bit() {
    let layouts: [&[&str]; 6] = [
        &[],
        &["parallel.tensor=2", "parallel.data=2", "batch.micro=1"],
        &["parallel.tensor=4", "parallel.sequence=true", "precision=Bf16"],
        &["offload.first_forward=3", "batch.micro=1", "offload.update=Speculative"],
        &[STREAMED, NONE_RESIDENT, "batch.micro=1", "host_checkpoints=true"],
        &["model.experts.balance=Megatron(factor: 0.01)", "precision=Bf16", "batch.micro=1"],
    ];
    for (number, layout) in layouts.iter().enumerate() {
        let base = with(&with(BASE, SPARSE), layout);
        let recomputed = run_sets(&base);
        assert!(recomputed.steps.iter().all(|step| step.loss.is_finite()), "{layout:?}");
        for tiers in [TIERS[1], TIERS[[2, 4, 6][number % 3]]] {
            let sets = with(&base, &[tiers]);
            assert_same_bits(&recomputed, &run_sets(&sets), &format!("{sets:?}"));
            if full() || number == 3 {
                let ran = run_with(&sets, &with_delays(40));
                assert_same_bits(&recomputed, &ran, &format!("{sets:?} with delays"));
            }
        }
    }
}

/// `recompute: None` keeps what the tiers keep, and more.
#[test]
fn tiers_give_the_bits_of_kept_activations() {
    for layout in [&[][..], &["parallel.tensor=2", "parallel.data=2", "batch.micro=1"]] {
        let base = with(BASE, layout);
        let kept = run_sets(&with(&base, &["recompute=None"]));
        for tiers in [TIERS[1], TIERS[4]] {
            assert_same_bits(&kept, &run_sets(&with(&base, &[tiers])), tiers);
        }
    }
}

#[test]
fn delayed_lanes_change_no_bit_of_tiers() {
    let layouts: [&[&str]; 5] = [
        &[],
        &["parallel.tensor=2", "parallel.data=2", "batch.micro=1", "host_checkpoints=true"],
        &["offload.first_forward=3", "batch.micro=1", "offload.update=Speculative"],
        &[STREAMED, NONE_RESIDENT, "batch.micro=1", "host_checkpoints=true"],
        &["offload.update=Delayed(after_step: 1)", "offload.accumulate=Host"],
    ];
    for (number, layout) in layouts.iter().enumerate() {
        let base = with(BASE, layout);
        let recomputed = run_sets(&base);
        for tiers in [TIERS[1], TIERS[[2, 4, 6][number % 3]]] {
            let sets = with(&base, &[tiers]);
            // The quick selection takes one delay for each layout.
            for chaos_us in
                [40, 120].into_iter().filter(|us| full() || (*us == 40) == number.is_multiple_of(2))
            {
                let ran = run_with(&sets, &with_delays(chaos_us));
                assert_same_bits(&recomputed, &ran, &format!("{sets:?} {chaos_us}"));
            }
        }
    }
}

/// Models with fewer blocks than a ring has sets, and with one block more.
#[test]
fn few_blocks_change_no_bit() {
    for layers in 1..=3 {
        let layers_set = format!("model.layers={layers}");
        for more in [&[][..], &["offload.first_forward=2", "batch.micro=1"]] {
            let base = with(&with(BASE, &[&layers_set]), more);
            let recomputed = run_sets(&base);
            for tiers in [format!("host_blocks: {layers}"), "gpu_blocks: 1".into()] {
                let set = format!("activations=Tiers({tiers})");
                let sets = with(&base, &[&set]);
                assert_same_bits(&recomputed, &run_sets(&sets), &format!("{sets:?}"));
            }
        }
    }
}
