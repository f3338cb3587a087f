//! Gated delta nets: layouts train as one rank, settings that only move work change no bit, and long
//! documents side by side have the results of each alone.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use device::random;
use layout::build::shape;
use std::collections::BTreeMap;
use tensor_parallel::{ActivationTiers, Decoder, DecoderShape, Recompute, TierCounts};
use tests::compare::{Reference, RunDistance, assert_no_bit_changes, full, with};
use tests::pass::{PassInputs, PassResult, pass, worst};
use tests::tiny;

/// Two layers with gated delta nets around one with attention, whose output has a gate.
const DELTA: &[&str] = &[
    "model.family=Llama",
    "model.layer_pattern=DFD",
    "model.delta_net=(key_heads: 4, value_heads: 8, key_dim: 8, value_dim: 6, taps: 3)",
    "model.output_gate=true",
    "model.norm_offset=true",
    "model.qk_norm=true",
    "model.rope.rotated_share=0.5",
    "model.vocab=257",
];

/// Settings of all runs: clipping, accumulation, and evaluations between steps while an update runs.
const BASE: &[&str] =
    &["train.steps=4", "train.eval_every=2", "train.eval_batches=2", "batch.micro=1"];

const LAYOUTS: [&[&str]; 4] = [
    &["parallel.tensor=2", "parallel.data=2"],
    &["parallel.tensor=4", "parallel.sequence=true"],
    &["parallel.data=2"],
    &[],
];

/// Largest effect of the order of fp32 sums.
const FP32: RunDistance = RunDistance { loss: 5e-6, norm: 1e-5, weights: 1e-4 };

#[test]
fn gated_delta_nets_on_any_layout_train_as_on_one_rank() {
    let base = with(&with(BASE, DELTA), &["optimizer.kind=Sgd", "optimizer.lr=0.3"]);
    let reference = Reference::new(&base);
    for layout in LAYOUTS {
        reference.assert_near(&with(&base, layout), FP32);
    }
}

#[test]
fn what_only_moves_work_changes_no_bit_of_gated_delta_nets() {
    let variants: [&[&str]; 9] = [
        &["recompute=Block", "activations=Tiers(gpu_blocks: 1, host_blocks: 2, gpu_mlps: 0)"],
        &["offload.update=Serial"],
        &["offload.optimizer=Device"],
        &["offload.accumulate=Host", "offload.bucket_elements=2000"],
        &["recompute=Block"],
        &["recompute=Selective"],
        &["recompute=Block", "host_checkpoints=true", "offload.first_forward=3"],
        &["recompute=Block", "offload.parameters=Host", "offload.resident_blocks=0"],
        &["device.threads=3", "offload.lookahead=3", "offload.tile_elements=2500"],
    ];
    for (number, layout) in LAYOUTS.iter().enumerate().take(2) {
        // The quick selection takes half of the variants on each layout.
        let selected = |k: &usize| full() || (number + k).is_multiple_of(2);
        let some: Vec<&[&str]> =
            (0..variants.len()).filter(selected).map(|k| variants[k]).collect();
        assert_no_bit_changes(&with(&with(BASE, DELTA), layout), &some);
    }
}

/// Tokens of a sample: documents have several chunks of 64 rows.
const T: usize = 150;
/// Tokens of the documents of each of two samples.
const LENGTHS: [&[usize]; 2] = [&[70, 65, 15], &[5, 145]];

/// Values of all parameters of a model, and its documents.
struct Inputs {
    params: BTreeMap<String, Vec<f64>>,
    /// Tokens and targets of each document, by sample.
    documents: Vec<Vec<[Vec<f64>; 2]>>,
}

/// Tokens, targets and document starts.
struct Batch {
    tokens: Vec<f64>,
    targets: Vec<f64>,
    starts: Option<Vec<f64>>,
}

impl Inputs {
    fn of(shape: &DecoderShape) -> Self {
        let decoder = Decoder::plan(&mut device::Plan::default(), shape, 64);
        let uniform =
            |key, i: usize| f64::from(random::bits32(key, i as u64)) / f64::from(1u32 << 31) - 1.0;
        let mut params = BTreeMap::new();
        for param in decoder.segments().iter().flat_map(|segment| &segment.params) {
            let key = random::key_of_name(1, &param.name);
            let (centre, spread) = match &param.name {
                // Slow decay, so that states reach over several chunks.
                name if name.ends_with("a_log") => (-3.0, 1.0),
                name if name.ends_with("delta.norm.weight") => (1.0, 0.2),
                name if name.contains(".conv_") => (0.6, 0.4),
                _ if param.is_vector => (0.0, 0.2),
                _ => (0.0, 0.3),
            };
            let value = |i| f64::from((centre + spread * uniform(key, i)) as f32);
            params.insert(param.name.clone(), (0..param.global_len()).map(value).collect());
        }
        let mut used = 0;
        let mut tokens = |key, count: usize| -> Vec<f64> {
            used += count as u64;
            let one = |i| random::below(key, used + i, shape.vocab as u64) as f64;
            (0..count as u64).map(one).collect()
        };
        let documents = LENGTHS
            .iter()
            .map(|all| all.iter().map(|length| [2, 3].map(|key| tokens(key, *length))).collect())
            .collect();
        Self { params, documents }
    }

    /// The documents side by side.
    fn packed(&self) -> Batch {
        let mut batch = Batch { tokens: Vec::new(), targets: Vec::new(), starts: None };
        let mut starts = Vec::new();
        for [tokens, targets] in self.documents.iter().flatten() {
            let start = (batch.tokens.len() % T) as f64;
            starts.extend(std::iter::repeat_n(start, tokens.len()));
            batch.tokens.extend(tokens);
            batch.targets.extend(targets);
        }
        Batch { starts: Some(starts), ..batch }
    }

    /// Each document alone at the start of a sample, and padding after it.
    fn alone(&self) -> Batch {
        let mut batch = Batch { tokens: Vec::new(), targets: Vec::new(), starts: None };
        for [tokens, targets] in self.documents.iter().flatten() {
            let padding = T - tokens.len();
            batch.tokens.extend(tokens.iter().chain(&vec![0.0; padding]));
            batch.targets.extend(targets.iter().chain(&vec![-1.0; padding]));
        }
        batch
    }

    fn pass(&self, shape: &DecoderShape, Batch { tokens, targets, starts }: &Batch) -> PassResult {
        let param = &|name: &str| self.params[name].as_slice();
        pass(shape, 1, &PassInputs { tokens, targets, starts: starts.as_deref(), param })
    }
}

fn delta_shape(more: &[&str]) -> DecoderShape {
    let long = ["model.seq_len=150", "batch.micro=2", "batch.global=2", "model.layers=3"];
    let base = with(DELTA, &["device.memory=256MiB"]);
    shape(&tiny(&with(&with(&base, &long), more)))
}

#[test]
fn long_documents_side_by_side_have_the_results_of_each_alone() {
    let one = delta_shape(&[]);
    let inputs = Inputs::of(&one);
    let count = LENGTHS.concat().len();
    let apart = inputs.pass(&DecoderShape { micro_batch: count, ..one.clone() }, &inputs.alone());
    let own = |(i, length): (usize, &usize)| {
        apart.logits[i * T * one.vocab..][..length * one.vocab].to_vec()
    };
    let logits: Vec<f64> = LENGTHS.concat().iter().enumerate().flat_map(own).collect();
    // A loss is the mean over the samples' tokens.
    let samples = LENGTHS.len() as f64 / count as f64;
    let layouts: [&[&str]; 5] = [
        &[],
        &["parallel.tensor=2"],
        &["parallel.tensor=4", "recompute=Block"],
        &["parallel.tensor=2", "parallel.sequence=true"],
        &["parallel.tensor=2", "parallel.sequence=true", "recompute=Selective"],
    ];
    for layout in layouts {
        let found = inputs.pass(&delta_shape(layout), &inputs.packed());
        let difference = worst(&found.logits, &logits);
        assert!(difference < 2e-5, "{layout:?}: logits are {difference:e} apart");
        assert!(found.grads.keys().eq(apart.grads.keys()));
        for (name, grad) in &found.grads {
            let want: Vec<f64> = apart.grads[name].iter().map(|x| x / samples).collect();
            let size = want.iter().fold(0.0f64, |most, x| most.max(x.abs()));
            let difference = worst(grad, &want);
            assert!(size > 0.0, "{name} has a gradient");
            assert!(
                difference <= 2e-5 * size,
                "{layout:?}: {name} is {difference:e} apart of {size:e}"
            );
        }
    }
}

#[test]
fn recomputation_and_tiers_change_no_bit_of_long_documents() {
    let one = delta_shape(&[]);
    let inputs = Inputs::of(&one);
    let packed = inputs.packed();
    let want = inputs.pass(&one, &packed);
    let on_host = TierCounts { device: 0, host: 2 };
    let tiers = ActivationTiers { attention: on_host, mlp: TierCounts::NONE };
    for (recompute, tiers) in [
        (Recompute::Block, ActivationTiers::NONE),
        (Recompute::Selective, ActivationTiers::NONE),
        (Recompute::Block, tiers),
    ] {
        let found = inputs.pass(&DecoderShape { recompute, tiers, ..one.clone() }, &packed);
        assert_eq!(found.logits, want.logits, "{recompute:?} {tiers:?}");
        assert_eq!(found.grads, want.grads, "{recompute:?} {tiers:?}");
    }
}

/// Compares the gradient of each parameter of a layer with the slope of the loss along it.
#[test]
fn the_gradients_of_gated_delta_nets_are_the_slopes_of_the_loss() {
    const STEP: f64 = 1e-3;
    let shape = delta_shape(&["parallel.tensor=2"]);
    let mut inputs = Inputs::of(&shape);
    let packed = inputs.packed();
    let PassResult { grads, .. } = inputs.pass(&shape, &packed);
    let compared = |name: &&String| name.starts_with("h.0.delta.") || name.contains("attn.gate");
    let names: Vec<String> = grads.keys().filter(compared).cloned().collect();
    assert_eq!(names.len(), 14);
    for name in names {
        let grad = &grads[&name];
        let size = grad.iter().map(|x| x * x).sum::<f64>().sqrt();
        let before = inputs.params[&name].clone();
        let mut loss_at = |step: f64| {
            let moved = before.iter().zip(grad).map(|(x, g)| x + step * g / size).collect();
            inputs.params.insert(name.clone(), moved);
            inputs.pass(&shape, &packed).loss
        };
        let step = STEP / size.max(1e-2);
        let slope = (loss_at(step) - loss_at(-step)) / (2.0 * step);
        inputs.params.insert(name.clone(), before);
        assert!((slope / size - 1.0).abs() < 0.05, "{name}: {slope} {size}");
    }
}
