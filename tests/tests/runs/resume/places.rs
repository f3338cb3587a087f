//! Runs that resume with their parameters in other memory, on the host or on the device.

use super::BASE;
use super::run_log::{RunLog, assert_goes_on_as, open, run};
use tests::compare::with;

#[test]
fn a_run_goes_on_with_parameters_at_another_place() {
    let base = with(BASE, &["model.layers=4", "recompute=Block", "train.steps=6"]);
    let streamed = ["offload.parameters=Host", "offload.resident_blocks=1", "offload.ring=2"];
    let streamed = with(&base, &streamed);
    let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let straight = [&base, &streamed]
        .iter()
        .zip(&folders)
        .map(|(sets, folder)| run(sets, 1, folder.path(), None))
        .collect::<Vec<RunLog>>();
    assert_goes_on_as(&straight[0], &straight[1], 0, "streamed");
    for (from, to) in [(0, &streamed), (1, &base)] {
        for step in [1, 3, 4] {
            let again = tempfile::tempdir().unwrap();
            let resumed = run(to, 1, again.path(), Some(open(folders[from].path(), step)));
            let what = format!("from {from} after step {step}");
            assert_goes_on_as(&straight[from], &resumed, step, &what);
        }
    }
}

/// Two layers with experts, and one with an MLP between them.
const SPARSE: &[&str] = &[
    "model.family=Llama",
    "model.experts=(count: 6, per_token: 2, ffn_hidden: 24, dense_layers: [1])",
    "train.steps=6",
];

/// Experts scored by sigmoid, and a shared one.
const SHARED: &[&str] = &[
    "model.family=Llama",
    "model.experts=(count: 8, per_token: 2, ffn_hidden: 12, shared_hidden: 20, dense_layers: [0], \
     scoring: Sigmoid(groups: 4, kept_groups: 2, scale: 1.5))",
    "train.steps=6",
];

/// Experts with biases, and sinks of attention.
const SINKS: &[&str] = &[
    "model.family=Llama",
    "model.experts=(count: 6, per_token: 2, ffn_hidden: 24, biases: true)",
    "model.gate=ClampedSilu",
    "model.attention_sinks=true",
    "model.qkv_bias=true",
    "train.steps=6",
];

#[test]
fn a_run_of_other_experts_goes_on_at_every_step() {
    for sparse in [SHARED, SINKS] {
        let sets = with(&with(BASE, sparse), &["parallel.tensor=2", "parallel.data=2"]);
        let folder = tempfile::tempdir().unwrap();
        let straight = run(&sets, 1, folder.path(), None);
        for step in 1..straight.outcome.step {
            let again = tempfile::tempdir().unwrap();
            let resumed = run(&sets, 1, again.path(), Some(open(folder.path(), step)));
            let what = format!("{sparse:?} after step {step}");
            assert_goes_on_as(&straight, &resumed, step, &what);
        }
    }
}

#[test]
fn a_run_of_experts_goes_on_at_every_step_and_on_other_ranks() {
    let base = with(BASE, SPARSE);
    let folder = tempfile::tempdir().unwrap();
    let sets = with(&base, &["parallel.tensor=2", "parallel.data=2"]);
    let straight = run(&sets, 1, folder.path(), None);
    for step in 1..straight.outcome.step {
        let again = tempfile::tempdir().unwrap();
        let resumed = run(&sets, 1, again.path(), Some(open(folder.path(), step)));
        assert_goes_on_as(&straight, &resumed, step, &format!("after step {step}"));
    }
    // The states of a checkpoint are those of the whole model: a run with as many replicas and
    // micro-batches goes on from them, on any number of tensor-parallel ranks.
    let grids: [&[&str]; 3] =
        [&["parallel.tensor=4"], &["parallel.data=2"], &["parallel.tensor=2", "recompute=Block"]];
    for grid in grids {
        let again = tempfile::tempdir().unwrap();
        let from = open(folder.path(), 3);
        let resumed = run(&with(&base, grid), 1, again.path(), Some(from));
        for (step, report) in &resumed.steps {
            let expected = &straight.steps[step];
            let apart = (report.loss - expected.loss).abs();
            assert!(apart < 0.02, "{grid:?}, step {step}: {} {}", report.loss, expected.loss);
        }
    }
}

#[test]
fn a_run_goes_on_with_other_tiers_of_activations() {
    let base = with(BASE, &["model.layers=5", "recompute=Block", "train.steps=6"]);
    let tiers = [
        with(&base, &["activations=Tiers(gpu_blocks: 1, host_blocks: 3)"]),
        with(&base, &["activations=Tiers(host_blocks: 5, host_mlps: 1)"]),
        with(&base, &["recompute=None"]),
    ];
    let folder = tempfile::tempdir().unwrap();
    let straight = run(&base, 1, folder.path(), None);
    for sets in &tiers {
        for step in [1, 4] {
            let again = tempfile::tempdir().unwrap();
            let resumed = run(sets, 1, again.path(), Some(open(folder.path(), step)));
            assert_goes_on_as(&straight, &resumed, step, &format!("{sets:?} after step {step}"));
        }
    }
    // A run with tiers goes on without them.
    let folder = tempfile::tempdir().unwrap();
    assert_goes_on_as(&straight, &run(&tiers[0], 1, folder.path(), None), 0, "with tiers");
    let again = tempfile::tempdir().unwrap();
    let resumed = run(&base, 1, again.path(), Some(open(folder.path(), 3)));
    assert_goes_on_as(&straight, &resumed, 3, "without tiers");
}

#[test]
fn a_run_of_adapters_goes_on_at_every_step_and_with_frozen_weights_at_another_place() {
    goes_on_at_every_step("adapter=Lora(rank: 4, alpha: 8)");
    let attention = "[\"q_proj\", \"v_proj\"]";
    goes_on_at_every_step(&format!("adapter=Lora(rank: 4, dropout: 0.1, targets: {attention})"));
}

#[test]
fn a_run_with_frozen_tensors_goes_on_at_every_step_and_with_them_at_another_place() {
    goes_on_at_every_step(
        "optimizer.frozen=[\"embed_tokens*\", \"layers.0.*\", \"*.k_proj.*\", \"*.q_proj.*\", \"*.v_proj.*\"]",
    );
}

/// Asserts this of a run that trains a `part` of its model.
fn goes_on_at_every_step(part: &str) {
    let base = with(&with(BASE, SPARSE), &[part, "optimizer.lr=1e-2", "recompute=Block"]);
    let sets = with(&base, &["parallel.tensor=2", "parallel.data=2"]);
    let streamed = with(&sets, &["offload.parameters=Host", "offload.ring=2"]);
    let folder = tempfile::tempdir().unwrap();
    let straight = run(&sets, 1, folder.path(), None);
    let losses: Vec<f64> = straight.steps.values().map(|step| step.loss).collect();
    assert!(losses.windows(2).any(|pair| pair[0] != pair[1]), "{losses:?}");
    for step in 1..straight.outcome.step {
        let again = tempfile::tempdir().unwrap();
        let place = if step.is_multiple_of(2) { &sets } else { &streamed };
        let resumed = run(place, 1, again.path(), Some(open(folder.path(), step)));
        assert_goes_on_as(&straight, &resumed, step, &format!("after step {step}"));
    }
}
