//! The equivalence matrix, first half: a run on any split over ranks and micro-batches equals the
//! run of one rank. If the order of a sum changes, the difference stays within the error of fp32.

use tests::compare::{Reference, RunDistance, full, with};

/// Settings of all runs. Clipping acts in most steps (norms are 1.5 to 5), evaluations happen
/// between steps, and no tensor-parallel degree divides the vocabulary. eps is large because the
/// exact gradient of the key biases is zero: Adam would amplify its rounding noise to full steps,
/// which differ in every layout.
const BASE: &[&str] = &[
    "model.vocab=257",
    "optimizer.eps=1e-6",
    "train.eval_every=4",
    "train.eval_batches=0",
    "batch.micro=1",
];

/// The second moment of AdamW hides a wrong scale of gradients; SGD shows it.
const RULES: [&[&str]; 2] =
    [&["optimizer.kind=AdamW"], &["optimizer.kind=Sgd", "optimizer.lr=0.3"]];

/// Largest effect of the order of fp32 sums in twenty steps. Measured: 9e-8, 2e-7 and 2e-6.
const FP32: RunDistance = RunDistance { loss: 5e-7, norm: 1e-6, weights: 1e-5 };

fn near_one_rank(base: &[&str], layouts: &[&[&str]]) {
    for rule in RULES {
        let base = with(&with(BASE, base), rule);
        let reference = Reference::new(&base);
        let clipped = reference.ran().steps.iter().filter(|s| s.grad_norm > 0.5).count();
        assert!(clipped > 3, "clipping must act");
        for layout in layouts {
            reference.assert_near(&with(&base, layout), FP32);
        }
    }
}

#[test]
fn tensor_parallel_ranks_train_as_one() {
    near_one_rank(&["train.steps=20"], &[&["parallel.tensor=2"], &["parallel.tensor=4"]]);
}

#[test]
fn data_parallel_ranks_train_as_one() {
    near_one_rank(&["train.steps=20"], &[&["parallel.data=2"], &["parallel.data=4"]]);
}

#[test]
fn sequence_parallelism_trains_as_one_rank() {
    let [two, four] = ["parallel.tensor=2", "parallel.tensor=4"];
    let on = "parallel.sequence=true";
    near_one_rank(&[], &[&[two, on], &[four, on], &[four, on, "parallel.data=2"]]);
}

#[test]
fn dropout_masks_do_not_depend_on_the_layout() {
    let [two, four] = ["parallel.tensor=2", "parallel.tensor=4"];
    let (data, sequence) = ("parallel.data=2", "parallel.sequence=true");
    let layouts: [&[&str]; 4] = [&[data], &[two], &[four, sequence, data], &["batch.micro=4"]];
    near_one_rank(&["model.dropout=0.3"], &layouts);
}

#[test]
fn masks_of_adapters_do_not_depend_on_the_layout() {
    let [two, four] = ["parallel.tensor=2", "parallel.tensor=4"];
    let (data, sequence) = ("parallel.data=2", "parallel.sequence=true");
    let layouts: [&[&str]; 4] = [&[data], &[two], &[four, sequence, data], &["batch.micro=4"]];
    near_one_rank(&["adapter=Lora(rank: 4, alpha: 16, dropout: 0.3)"], &layouts);
}

#[test]
fn the_cut_into_micro_batches_changes_only_the_order_of_sums() {
    let (one, few) = ("batch.micro=8", "batch.micro=2");
    let (host, data) = ("offload.accumulate=Host", "parallel.data=2");
    near_one_rank(&[], &[&[one], &[few], &[few, host], &["batch.micro=4", data]]);
}

#[test]
fn every_layout_trains_as_one_rank() {
    let mut layouts = Vec::new();
    for tensor in ["parallel.tensor=1", "parallel.tensor=2", "parallel.tensor=4"] {
        for data in ["parallel.data=1", "parallel.data=2", "parallel.data=4"] {
            for sequence in ["parallel.sequence=false", "parallel.sequence=true"] {
                for micro in ["batch.micro=1", "batch.micro=2"] {
                    for sum in ["offload.accumulate=Device", "offload.accumulate=Host"] {
                        layouts.push([tensor, data, sequence, micro, sum]);
                    }
                }
            }
        }
    }
    // The quick selection ends with the largest of all.
    let selected = |i: &usize| full() || (i + 1).is_multiple_of(9);
    let layouts: Vec<&[&str]> =
        (0..layouts.len()).filter(selected).map(|i| &layouts[i][..]).collect();
    let dropout = "model.dropout=0.1";
    if full() {
        near_one_rank(&["train.steps=20"], &layouts);
        near_one_rank(&["train.steps=20", dropout, "recompute=Block"], &layouts);
    } else {
        near_one_rank(&[dropout], &layouts);
    }
}
