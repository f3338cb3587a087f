//! Comparison with PyTorch: results from tests/fixtures/make_gpt2_fixture.py, on one rank and on
//! grids of ranks.
#![allow(missing_docs, reason = "a test")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "helpers of tests")]
#![allow(clippy::print_stdout, reason = "figures for --nocapture")]
#![allow(clippy::allow_attributes, reason = "the lines above")]

use device::Dtype;
use engine::run::{Message, RunOptions, StepReport, Weights, train};
use files::held::LockedRunDir;
use std::sync::Arc;
use tensor_parallel::{Architecture, DecoderShape};
use tests::pass::{Fixture, PassInputs, PassResult, pass, worst};
use tests::{config, dataset_of_windows};

/// Vocabulary, tokens of a sample, hidden size, samples and steps of the fixture.
const V: usize = 61;
const T: usize = 16;
const C: usize = 32;
const B: usize = 4;
const STEPS: usize = 10;
const SEQ_LEN: u64 = T as u64;

/// Layouts (tensor, data, sequence). Four ranks do not divide the vocabulary.
const LAYOUTS: [(usize, usize, bool); 5] =
    [(1, 1, false), (1, 2, false), (2, 2, false), (2, 2, true), (4, 1, true)];

fn load() -> Fixture {
    read(include_bytes!("../../fixtures/gpt2-tiny.safetensors"))
}

fn read(bytes: &[u8]) -> Fixture {
    let mut fixture = Fixture::default();
    fixture.add(bytes);
    fixture
}

/// Names of the fixture's parameters.
fn params(fixture: &Fixture) -> impl Iterator<Item = &str> {
    fixture.0.keys().filter_map(|name| name.strip_prefix("grad."))
}

fn largest(x: &[f64]) -> f64 {
    x.iter().fold(0.0, |most, x| most.max(x.abs()))
}

fn shape((tp_size, dp_size, sequence): (usize, usize, bool)) -> DecoderShape {
    DecoderShape {
        architecture: Architecture::GPT2,
        layers: 2,
        kinds: vec![tensor_parallel::LayerKind::PLAIN],
        layer_kinds: vec![0; 2],
        hidden: C,
        heads: 4,
        kv_heads: 4,
        head_dim: C / 4,
        seq_len: T,
        vocab: V,
        ffn_hidden: 4 * C,
        experts: None,
        delta: None,
        micro_batch: B / dp_size,
        tp_size,
        sequence,
        recompute: tensor_parallel::Recompute::None,
        tiers: tensor_parallel::ActivationTiers::NONE,
        partition_checkpoints: false,
        checkpoint_home: tensor_parallel::CheckpointHome::Device,
        checkpoint_slots: 1,
        ring: tensor_parallel::Ring::NONE,
        head_rows: 1024,
        dtype: Dtype::F32,
        fp8: false,
        partial_dtype: Dtype::F32,
        dropout: 0.0,
        init_std: 0.0,
        trained: Default::default(),
    }
}

#[test]
fn logits_loss_and_every_gradient_are_those_of_pytorch_on_every_layout() {
    let fixture = load();
    // The inputs and the targets of windows of T + 1 tokens.
    let windows = fixture.get("tokens").chunks(T + 1);
    let tokens: Vec<f64> = windows.clone().flat_map(|w| &w[..T]).copied().collect();
    let targets: Vec<f64> = windows.flat_map(|w| &w[1..]).copied().collect();
    let param = &|name: &str| fixture.get(name);
    for layout in LAYOUTS {
        let given = PassInputs { tokens: &tokens, targets: &targets, starts: None, param };
        let PassResult { logits, loss, grads, .. } = pass(&shape(layout), layout.1, &given);
        let difference = worst(&logits, fixture.get("logits"));
        assert!(difference < 1e-5, "{layout:?}: logits are {difference:e} apart");
        let difference = (loss - fixture.get("loss_f64")[0]).abs();
        assert!(difference < 1e-6, "{layout:?}: the loss is {difference:e} off");
        assert_eq!(grads.len(), params(&fixture).count());
        for (name, grad) in &grads {
            let want = fixture.get(&format!("grad.{name}"));
            // The tolerance follows the size of each tensor, so that a large tensor cannot hide a
            // wrong factor in a small tensor.
            let (difference, tolerance) = (worst(grad, want), 5e-6 * largest(want));
            assert!(
                difference < tolerance,
                "{layout:?}: {name} is {difference:e} apart, {tolerance:e} allowed"
            );
        }
    }
}

struct TrainingResult {
    losses: Vec<f64>,
    norms: Vec<f64>,
    weights: Fixture,
}

/// Trains ten steps with the engine, from the fixture's weights and on the fixture's samples.
fn trained(fixture: &Fixture, optimizer: &str, sets: &[String]) -> TrainingResult {
    let folder = tempfile::tempdir().unwrap();
    let windows: Vec<&[f64]> = fixture.get("train.tokens").chunks(T + 1).collect();
    let (seed, data) = dataset_of_windows(&windows, B, V, folder.path());
    let ron = format!(
        "(model: (layers: 2, hidden: {C}, heads: 4, seq_len: {SEQ_LEN}, vocab: {V}), precision: Fp32,
          optimizer: ({optimizer}), schedule: (kind: Constant), offload: (tile_elements: 1024),
          device: Cpu(threads: 1), data: (train: \"unused\", format: U16, order: Random),
          train: (steps: {STEPS}, seed: {seed}))"
    );
    let on_gpus = std::env::var_os(ON_GPUS).map(|_| "device=Cuda".to_owned());
    let config = config(&ron, &[sets, on_gpus.as_slice()].concat());
    let whole = |name: &str| fixture.get(name).iter().map(|x| *x as f32).collect();
    let initial: Weights = params(fixture).map(|name| (name.into(), whole(name))).collect();
    let path = folder.path().join("weights.safetensors");
    let initial = Some(Arc::new(initial));
    let weights = Some(LockedRunDir::unlocked(folder.path()).unwrap());
    let options = RunOptions { initial, weights, ..RunOptions::default() };
    let mut steps: Vec<StepReport> = Vec::new();
    let built = tests::lay_out(&config);
    train(&config, &built, &data, &options, &mut |message| {
        if let Message::Step(step) = message {
            steps.push(step);
        }
    })
    .unwrap();
    TrainingResult {
        losses: steps.iter().map(|s| s.loss).collect(),
        norms: steps.iter().map(|s| s.grad_norm).collect(),
        weights: read(&std::fs::read(path).unwrap()),
    }
}

/// Environment variable: if it is set, the tests train on GPUs.
const ON_GPUS: &str = "ONEBOX_PARITY_ON_GPUS";

/// Repeats the runs of this file in a child process under the fake driver. On a machine with a GPU,
/// scripts/gpu-check sets the variable itself.
#[test]
fn steps_on_gpus_are_those_of_pytorch() {
    if std::env::var_os(ON_GPUS).is_some() {
        return;
    }
    let program = std::env::current_exe().unwrap();
    let cache = tempfile::tempdir().unwrap();
    for test in ["ten_adamw_steps", "ten_sgd_steps"] {
        let mut command = std::process::Command::new(&program);
        let name = format!("parity::{test}_are_those_of_pytorch_on_every_layout");
        command.args(["--exact", &name, "--nocapture"]).env(ON_GPUS, "1");
        command.env("LD_LIBRARY_PATH", fake_cuda::library_folder());
        command.env("XDG_CACHE_HOME", cache.path()).env("FAKECUDA_DEVICES", "4");
        let output = command.output().unwrap();
        let stdout = String::from_utf8_lossy(&output.stdout);
        let passed = output.status.success() && stdout.contains("1 passed");
        assert!(passed, "{stdout}{}", String::from_utf8_lossy(&output.stderr));
    }
}

/// Settings under which the result must be the same: layouts, accumulation, placements.
fn settings() -> Vec<Vec<String>> {
    let layout = |(tp, dp, sequence): (usize, usize, bool)| {
        vec![
            format!("parallel.tensor={tp}"),
            format!("parallel.data={dp}"),
            format!("parallel.sequence={sequence}"),
            format!("batch.micro={}", B / dp),
        ]
    };
    let mut all: Vec<Vec<String>> = LAYOUTS.map(layout).into();
    for more in ["offload.accumulate=Host", "offload.optimizer=Device"] {
        all.push(vec!["batch.micro=1".into(), "batch.global=4".into(), more.into()]);
    }
    if std::env::var_os(ON_GPUS).is_some() && !tests::compare::full() {
        // The quick selection has one GPU, and TP 2 x DP 2 with sequence parallelism.
        all = vec![all.swap_remove(0), layout(LAYOUTS[3])];
    }
    all
}

#[test]
fn ten_adamw_steps_are_those_of_pytorch_on_every_layout() {
    let fixture = load();
    let adamw = "lr: 1e-2, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, clip: 1.0";
    for sets in settings() {
        let got = trained(&fixture, adamw, &sets);
        let losses = worst(&got.losses, fixture.get("train.losses"));
        let norms = worst(&got.norms, fixture.get("train.grad_norms"));
        assert!(losses < 2e-5 && norms < 2e-5, "{sets:?}: losses {losses:e}, norms {norms:e}");
        for name in params(&fixture) {
            let mut got = got.weights.get(name).to_vec();
            let mut want = fixture.get(&format!("train.final.{name}")).to_vec();
            if name.ends_with("attn.qkv.bias") {
                // The exact gradient of the key bias is zero: Adam's steps are rounding noise.
                got.drain(C..2 * C);
                want.drain(C..2 * C);
            }
            let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
            let difference = norm(&mut got.iter().zip(&want).map(|(g, w)| g - w))
                / norm(&mut want.iter().copied());
            assert!(difference < 1e-3, "{sets:?}: {name} is {difference:e} of its norm apart");
        }
    }
}

#[test]
fn ten_sgd_steps_are_those_of_pytorch_on_every_layout() {
    // SGD does not divide by the gradient's size, so it shows every wrong scale.
    let fixture = load();
    for sets in settings() {
        let got = trained(&fixture, "kind: Sgd, lr: 0.1, weight_decay: 0.0, clip: None", &sets);
        let losses = worst(&got.losses, fixture.get("sgd.losses"));
        let norms = worst(&got.norms, fixture.get("sgd.grad_norms"));
        assert!(losses < 5e-6 && norms < 5e-6, "{sets:?}: losses {losses:e}, norms {norms:e}");
    }
}
