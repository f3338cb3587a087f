//! Mixtures of experts: layouts train as one rank, settings that only move work change no bit, and
//! gradients are the slopes of the loss.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use config::Packing;
use data::{Corpus, Dataset, Document};
use device::random;
use engine::run::RunOptions;
use layout::build::shape;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use tensor_parallel::{ActivationTiers, Balance, Decoder, DecoderShape, Recompute, TierCounts};
use tests::compare::{
    Reference, RunDistance, assert_no_bit_changes, assert_same_bits, full, run_sets, run_with,
    with, with_delays,
};
use tests::pass::{PassInputs, PassResult, pass, worst};
use tests::{RunRecord, lay_out, tiny, try_run_on};

/// Two layers with experts, and one with an MLP between them.
const SPARSE: &[&str] = &[
    "model.family=Llama",
    "model.experts=(count: 6, per_token: 2, ffn_hidden: 24, dense_layers: [1])",
    "model.vocab=257",
];

const THREE_OF_EIGHT: &[&str] = &[
    "model.family=Llama",
    "model.experts=(count: 8, per_token: 3, ffn_hidden: 12, normalize: false, balance: HuggingFace(factor: 0.01))",
    "model.vocab=257",
];

/// Scores by sigmoid in groups, and an MLP that all tokens pass.
const SHARED: &[&str] = &[
    "model.family=Llama",
    "model.experts=(count: 8, per_token: 2, ffn_hidden: 12, shared_hidden: 20, dense_layers: [0], \
     scoring: Sigmoid(groups: 4, kept_groups: 2, scale: 1.5))",
    "model.vocab=257",
];

/// Biases of experts, gates with a limit, also of a dense and of a shared MLP, and sinks of attention.
const BIASED: &[&str] = &[
    "model.family=Llama",
    "model.experts=(count: 6, per_token: 2, ffn_hidden: 24, biases: true, shared_hidden: 8, dense_layers: [1])",
    "model.gate=ClampedSilu(slope: 1.702, limit: 1.5)",
    "model.attention_sinks=true",
    "model.qkv_bias=true",
    "model.proj_bias=true",
    "model.vocab=257",
];

/// A shared expert whose output has a gate.
const GATED: &[&str] = &[
    "model.family=Llama",
    "model.experts=(count: 8, per_token: 2, ffn_hidden: 12, shared_hidden: 20, shared_gate: true)",
    "model.vocab=257",
];

/// Gated delta nets around attention, whose output has a gate.
const DELTA: &[&str] = &[
    "model.layer_pattern=DF",
    "model.delta_net=(key_heads: 4, value_heads: 8, key_dim: 8, value_dim: 6, taps: 3)",
    "model.output_gate=true",
    "model.qk_norm=true",
    "model.norm_offset=true",
];

/// Kinds of layers beside each other: one with a window, and one without rotary positions.
const KINDS: &[&str] = &["model.layer_pattern=WN", "model.window=5"];

/// Sinks of attention.
const SINKS: &[&str] = &["model.attention_sinks=true"];

/// Settings of all runs: clipping, accumulation, and evaluations between steps while an update runs.
const BASE: &[&str] =
    &["train.steps=4", "train.eval_every=2", "train.eval_batches=2", "batch.micro=1"];

const LAYOUTS: [&[&str]; 4] = [
    &["parallel.tensor=2", "parallel.data=2"],
    &["parallel.tensor=4", "parallel.sequence=true"],
    &["parallel.data=2"],
    &[],
];

/// Largest effect of the order of fp32 sums, if no token is so close between two experts that it
/// changes them.
const FP32: RunDistance = RunDistance { loss: 5e-6, norm: 1e-5, weights: 1e-4 };

#[test]
fn experts_on_any_layout_train_as_on_one_rank() {
    let rules = ["optimizer.kind=AdamW", "optimizer.kind=Sgd"];
    let beside_delta = with(GATED, DELTA);
    let models = [SPARSE, THREE_OF_EIGHT, SHARED, BIASED, &beside_delta];
    for (i, sparse) in models.into_iter().enumerate() {
        // The quick selection takes one rule for each model.
        for (_, rule) in
            rules.iter().copied().enumerate().filter(|(j, _)| full() || i % rules.len() == *j)
        {
            let lr = if rule.ends_with("Sgd") { "optimizer.lr=0.3" } else { "optimizer.lr=3e-3" };
            let base = with(&with(BASE, sparse), &[rule, lr, "optimizer.eps=1e-6"]);
            let reference = Reference::new(&base);
            // Ranks share heads of keys and values, whose weights stand beside the router's.
            let shared = ["parallel.tensor=4", "model.kv_heads=2"];
            for layout in LAYOUTS {
                reference.assert_near(&with(&base, layout), FP32);
            }
            let base = with(&base, &["model.kv_heads=2"]);
            Reference::new(&base).assert_near(&with(&base, &shared), FP32);
        }
    }
}

#[test]
fn what_only_moves_work_changes_no_bit_of_experts() {
    let variants: [&[&str]; 12] = [
        // Only more blocks on the host than sets on the GPU move.
        &["recompute=Block", "activations=Tiers(host_blocks: 3)"],
        &["offload.update=Serial"],
        &["offload.optimizer=Device"],
        &["offload.optimizer=Split(device_fraction: 0.4)"],
        &["offload.update=Speculative"],
        &["offload.accumulate=Host", "offload.bucket_elements=2000"],
        &["recompute=Block"],
        &["recompute=Selective"],
        &["recompute=Block", "host_checkpoints=true", "offload.first_forward=3"],
        &["recompute=Block", "offload.parameters=Host", "offload.resident_blocks=0"],
        &["device.threads=3", "offload.lookahead=3", "offload.tile_elements=2500"],
        // The same run again.
        &[],
    ];
    let beside_delta = with(GATED, DELTA);
    let models = [SPARSE, THREE_OF_EIGHT, SHARED, BIASED, &beside_delta];
    for (number, sparse) in models.into_iter().enumerate() {
        let layout = LAYOUTS[number % LAYOUTS.len()];
        let base = with(&with(BASE, sparse), layout);
        // The quick selection takes half of the variants on each layout, and each one on two layouts.
        let selected = |k: &usize| full() || (number + k).is_multiple_of(2);
        let some: Vec<&[&str]> =
            (0..variants.len()).filter(selected).map(|k| variants[k]).collect();
        assert_no_bit_changes(&base, &some);
        if full() || number == 0 {
            let sets = with(&base, &["recompute=Block", "offload.parameters=Host"]);
            assert_same_bits(&run_sets(&base), &run_with(&sets, &with_delays(40)), "delays");
        }
    }
}

#[test]
fn small_types_and_balance_losses_change_no_bit_with_the_place_of_work() {
    for sets in [
        &["precision=Bf16", "offload.moments=Bf16", "offload.master=Split"][..],
        &["precision=Bf16", "model.experts.balance=Megatron(factor: 0.01)"],
        &["precision=Fp16", "parallel.tensor=2"],
    ] {
        let base = with(&with(BASE, SPARSE), sets);
        let variants: [&[&str]; 3] = [
            &["offload.update=Serial", "recompute=Block"],
            &["offload.update=Speculative", "recompute=Selective"],
            &["recompute=Block", "offload.parameters=Host", "offload.resident_blocks=0"],
        ];
        assert_no_bit_changes(&base, &variants);
    }
}

/// The choices of a forward pass are kept: rounding of another order of sums could change them.
#[test]
fn no_recomputation_routes_again() {
    for recompute in ["None", "Selective", "Block"] {
        let set = format!("recompute={recompute}");
        let config = tiny(&with(&with(BASE, SPARSE), &[&set]));
        let counts: Rc<RefCell<BTreeMap<&str, usize>>> = Rc::default();
        let counted = Rc::clone(&counts);
        let count = move |op: &predict::plan::Op| {
            *counted.borrow_mut().entry(op.name).or_default() += 1;
        };
        predict::plan::list(&config, &lay_out(&config), count).unwrap();
        let counts = counts.borrow();
        // The head runs once for each micro-batch, and two layers have experts.
        let passes = 2 * counts["cross_entropy_backward"];
        for name in ["route", "sort_by_expert", "route_backward"] {
            assert_eq!(counts[name], passes, "{recompute}: {name}");
        }
        let forward = if recompute == "Block" { 2 } else { 1 };
        // The rows of experts are gathered again for the gradients of their weights.
        assert_eq!(counts["gather_rows"], passes * (forward + 1), "{recompute}");
        assert_eq!(counts["grouped_gemm"], passes * (2 * forward + 4), "{recompute}");
    }
}

#[test]
fn the_load_of_experts_counts_each_token_of_each_replica_once() {
    let base = with(BASE, SPARSE);
    for layout in LAYOUTS {
        let ran = run_sets(&with(&base, layout));
        for step in &ran.steps {
            let load = step.expert_load.unwrap();
            // 8 samples of 16 tokens with 2 experts each: the mean expert has 42.7 of 256 pairs.
            assert!(load.least_tokens <= 42 && load.most_tokens >= 43, "{layout:?}: {load:?}");
            assert!((load.largest_share - load.most_tokens as f64 / 256.0).abs() < 1e-12);
            assert_eq!(load.dead > 0, load.least_tokens == 0, "{layout:?}");
            // In two layers.
            assert_eq!(load.tokens.counts().iter().sum::<u64>(), 2 * 256, "{layout:?}");
            assert_eq!((load.tokens.counts().len(), load.balance_loss), (6, None));
        }
        let loads = |ran: &RunRecord| ran.steps[0].expert_load;
        assert_eq!(loads(&ran), loads(&run_sets(&base)), "{layout:?}");
    }
    assert_eq!(run_sets(BASE).steps[0].expert_load, None);
}

/// Trains on 64 documents of 3 to 12 tokens, of which every `every`-th target counts.
fn run_documents(sets: &[&str], packing: Packing, every: usize) -> RunRecord {
    let document = |n: u64| {
        let length = 3 + random::below(1, n, 10) as usize;
        let token = |i: usize| random::below(2, 100 * n + i as u64, 257) as u32;
        Document {
            tokens: (0..length).map(token).collect(),
            counted: (0..length).map(|i| i > 0 && (i - 1).is_multiple_of(every)).collect(),
        }
    };
    let documents: Vec<Document> = (0..64).map(document).collect();
    let packs = packing == Packing::Documents;
    let data = Corpus::of_documents(&documents, &documents[..1], 16, packs);
    let base = with(&with(BASE, SPARSE), &["data.order=Shuffled"]);
    let mut config = tiny(&with(&base, sets));
    // Only a config with a format of documents can set this packing.
    config.data.packing = packing;
    let data = Arc::new(Dataset::from(data));
    try_run_on(&data, &config, &lay_out(&config), &RunOptions::default()).unwrap()
}

#[test]
fn padding_is_no_load_of_experts() {
    for packing in [Packing::None, Packing::Documents] {
        for layout in LAYOUTS {
            let mut most = 0.0f64;
            for step in run_documents(layout, packing, 2).steps {
                let (load, padding) = (step.expert_load.unwrap(), step.contents.unwrap().padding);
                most = most.max(padding);
                // 8 samples of 16 tokens with 2 experts each, in two layers.
                let pairs = (128.0 * (1.0 - padding) * 4.0).round() as u64;
                let counts = load.tokens.counts();
                assert_eq!(counts.iter().sum::<u64>(), pairs, "{packing:?} {layout:?}");
            }
            assert!(most > 0.0, "{packing:?} {layout:?}: no sample has padding");
        }
    }
}

/// A micro-batch is one sample, on each layout.
#[test]
fn the_balance_loss_of_a_step_is_that_of_its_micro_batches() {
    // Experts with equally many tokens have k, or 1 for each of two layers.
    for (balance, least) in [("HuggingFace", 2.0), ("Megatron", 2.0)] {
        let set = format!("model.experts.balance={balance}(factor: 0.01)");
        let base = with(&with(BASE, SPARSE), &[&set]);
        let loss = |layout| {
            let load = run_sets(&with(&base, layout)).steps[0].expert_load.unwrap();
            load.balance_loss.unwrap()
        };
        let one = loss(&[]);
        assert!(one > 0.9 * least && one < 2.0 * least, "{balance}: {one}");
        for layout in LAYOUTS {
            let other = loss(layout);
            assert!((other / one - 1.0).abs() < 1e-5, "{balance} {layout:?}: {other}, not {one}");
        }
    }
}

/// The gradient of the balance loss is much larger than that of the loss.
#[test]
fn a_balance_loss_weighs_the_same_however_few_targets_count() {
    let first = |balance: &str, every| {
        let set = format!("model.experts.balance={balance}(factor: 1000)");
        let sets = [set.as_str(), "parallel.data=2"];
        let step = run_documents(&sets, Packing::None, every).steps[0];
        (step.grad_norm, step.expert_load.unwrap().balance_loss.unwrap())
    };
    for balance in ["HuggingFace", "Megatron"] {
        let ((all, value), (few, value_of_few)) = (first(balance, 1), first(balance, 3));
        assert!((all / few - 1.0).abs() < 0.1, "{balance}: norms {all} and {few}");
        assert!((value - value_of_few).abs() < 1e-9 && value > 0.9, "{balance}: {value}");
    }
}

/// Values of all parameters of a model, and a batch.
struct Inputs {
    params: BTreeMap<String, Vec<f64>>,
    tokens: Vec<f64>,
    targets: Vec<f64>,
}

impl Inputs {
    fn of(shape: &DecoderShape, samples: usize) -> Self {
        let decoder = Decoder::plan(&mut device::Plan::default(), shape, 64);
        let uniform =
            |key, i: usize| f64::from(random::bits32(key, i as u64)) / f64::from(1u32 << 31) - 1.0;
        let mut params = BTreeMap::new();
        for param in decoder.segments().iter().flat_map(|segment| &segment.params) {
            let key = random::key_of_name(1, &param.name);
            // Tokens prefer their experts clearly, so that small steps change no choice.
            let (centre, spread) = match &param.name {
                name if name.contains("router") => (0.0, 0.7),
                _ if param.is_vector => (1.0, 0.2),
                _ => (0.0, 0.3),
            };
            let value = |i| f64::from((centre + spread * uniform(key, i)) as f32);
            params.insert(param.name.clone(), (0..param.global_len()).map(value).collect());
        }
        let tokens = samples * shape.seq_len;
        let token = |key| move |i: usize| random::below(key, i as u64, shape.vocab as u64) as f64;
        let vocab = token(2);
        Self {
            params,
            tokens: (0..tokens).map(vocab).collect(),
            targets: (0..tokens).map(token(3)).collect(),
        }
    }

    fn pass(&self, shape: &DecoderShape, dp: usize) -> PassResult {
        let given = PassInputs {
            tokens: &self.tokens,
            targets: &self.targets,
            starts: None,
            param: &|name| self.params[name].as_slice(),
        };
        pass(shape, dp, &given)
    }
}

fn sparse_shape(sparse: &[&str], layout: &[&str]) -> DecoderShape {
    shape(&tiny(&with(&with(sparse, &["model.layers=2", "batch.micro=4"]), layout)))
}

/// Compares the gradient of each parameter with the slope of the loss along it.
#[test]
fn the_gradients_of_experts_are_the_slopes_of_the_loss() {
    const STEP: f64 = 1e-4;
    let without_balance = "model.experts.balance=Off";
    for (sparse, kinds) in [
        (SPARSE, &[][..]),
        (THREE_OF_EIGHT, &[]),
        (THREE_OF_EIGHT, KINDS),
        (SHARED, KINDS),
        (BIASED, KINDS),
        (SHARED, SINKS),
        (GATED, KINDS),
        (GATED, DELTA),
    ] {
        let shape = sparse_shape(sparse, &with(kinds, &[without_balance]));
        let mut inputs = Inputs::of(&shape, 4);
        let PassResult { grads, .. } = inputs.pass(&shape, 1);
        let mut compared = 0;
        for (name, grad) in &grads {
            let size = grad.iter().map(|x| x * x).sum::<f64>().sqrt();
            // Rounding hides the slope along an expert that few tokens chose.
            let of_experts = [".moe.", "ln_2", "sinks"].iter().any(|part| name.contains(part));
            if !of_experts || size < 1e-2 {
                continue;
            }
            let before = inputs.params[name].clone();
            let mut loss_at = |step: f64| {
                let moved = before.iter().zip(grad).map(|(x, g)| x + step * g / size).collect();
                inputs.params.insert(name.clone(), moved);
                inputs.pass(&shape, 1).loss
            };
            let slope = (loss_at(STEP) - loss_at(-STEP)) / (2.0 * STEP);
            inputs.params.insert(name.clone(), before);
            assert!(
                (slope / size - 1.0).abs() < 0.05,
                "{sparse:?} {kinds:?} {name}: {slope} {size}"
            );
            compared += 1;
        }
        assert!(compared > 12, "{compared} of {} parameters", grads.len());
    }
}

#[test]
fn every_layout_and_recomputation_has_the_gradients_of_one_rank() {
    let beside_delta = with(GATED, DELTA);
    for sparse in [SPARSE, THREE_OF_EIGHT, SHARED, BIASED, GATED, &beside_delta] {
        let one = sparse_shape(sparse, &[]);
        let inputs = Inputs::of(&one, 4);
        let expected = inputs.pass(&one, 1);
        let layouts: [&[&str]; 5] = [
            &["parallel.tensor=2"],
            &["parallel.tensor=4"],
            &["parallel.tensor=2", "parallel.sequence=true"],
            &["parallel.tensor=4", "parallel.sequence=true", "recompute=Block"],
            &["recompute=Selective", "parallel.tensor=2"],
        ];
        for layout in layouts {
            let shape = sparse_shape(sparse, layout);
            let PassResult { loss, grads, .. } = inputs.pass(&shape, 1);
            assert!((loss - expected.loss).abs() < 1e-5, "{layout:?}: {loss} {}", expected.loss);
            assert!(grads.keys().eq(expected.grads.keys()));
            for (name, grad) in &grads {
                let want = &expected.grads[name];
                let size = want.iter().fold(0.0f64, |most, x| most.max(x.abs()));
                let apart = worst(grad, want);
                assert!(apart <= 2e-5 * size + 1e-9, "{layout:?} {name}: {apart:e} of {size:e}");
            }
        }
        let again = DecoderShape { recompute: Recompute::Block, ..one.clone() };
        assert_eq!(inputs.pass(&again, 1).grads, expected.grads);
        let on_host = TierCounts { device: 0, host: 2 };
        let tiers = ActivationTiers { attention: TierCounts::NONE, mlp: on_host };
        let moved = DecoderShape { tiers, ..again };
        assert_eq!(inputs.pass(&moved, 1).grads, expected.grads);
    }
}

/// With one layer of experts, the loss of transformers is k times that of Megatron-LM.
#[test]
fn both_balance_losses_agree_on_one_layer() {
    let of = |balance: Option<Balance>| {
        let shape = sparse_shape(SPARSE, &["model.experts.dense_layers=[1]"]);
        let experts =
            shape.experts.map(|experts| tensor_parallel::ExpertsShape { balance, ..experts });
        let shape = DecoderShape { experts, ..shape };
        let grads = Inputs::of(&shape, 4).pass(&shape, 1).grads;
        grads["h.0.moe.router.weight"].clone()
    };
    let (none, transformers) = (of(None), of(Some(Balance::HuggingFace(0.5))));
    let megatron = of(Some(Balance::Megatron(1.0)));
    let size = none.iter().fold(0.0f64, |most, x| most.max(x.abs()));
    assert!(worst(&none, &transformers) > 1e-3 * size, "the loss has a gradient");
    assert!(worst(&transformers, &megatron) < 1e-5 * size);
    let twice = of(Some(Balance::HuggingFace(1.0)));
    let linear = none.iter().zip(&transformers).map(|(none, once)| 2.0 * once - none);
    assert!(worst(&twice, &linear.collect::<Vec<_>>()) < 1e-5 * size);
}
