//! Fine-tunes with frozen tensors of tests/fixtures/make_frozen_fixture.py, compared with PyTorch in
//! float64: the same gradients of the other tensors, and ten losses and norms on every layout.
#![allow(missing_docs, reason = "a test")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the lines above")]

use crate::llama::packed::cut;
use crate::llama::tensors::{CORRECTION, IDLE, load, stack_of, theirs};
use checkpoint::hugging_face::{Folder, PretrainedWeights};
use config::{Config, Packing};
use data::progress::Silence;
use data::{Corpus, Dataset, Document};
use engine::run::{Message, RunOptions, train};
use layout::build::shape;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tests::compare::{assert_no_bit_changes, assert_same_bits, full, run_sets, with};
use tests::pass::{PassInputs, pass, worst};
use tests::{config, dataset_of_windows, lay_out};

/// Samples, tokens of a sample and vocabulary of the fixtures.
const B: usize = 6;
const T: usize = 12;
const V: usize = 61;
/// Seed of the order of documents.
const SEED: u64 = 7;

/// A fine-tune of the fixture.
struct FrozenCase {
    frozen: Vec<String>,
    trained: usize,
    tokens: Vec<f64>,
    losses: Vec<f64>,
    norms: Vec<f64>,
    /// Losses and norms of steps on documents, if the fixture has them.
    masked: Option<[Vec<f64>; 2]>,
    packed: Option<[Vec<f64>; 2]>,
}

fn cases() -> BTreeMap<String, FrozenCase> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/frozen-tiny.json");
    let all: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let case = |(model, of): (&String, &serde_json::Value)| {
        let all_of = |list: &serde_json::Value| -> Vec<f64> {
            list.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
        };
        let numbers = |key: &str| all_of(&of[key]);
        let part =
            |key: &str| of.get(key).map(|of| ["losses", "norms"].map(|key| all_of(&of[key])));
        let case = FrozenCase {
            frozen: of["frozen"]
                .as_array()
                .unwrap()
                .iter()
                .map(|glob| glob.as_str().unwrap().to_owned())
                .collect(),
            trained: of["trained"].as_u64().unwrap() as usize,
            tokens: numbers("tokens"),
            losses: numbers("losses"),
            norms: numbers("norms"),
            masked: part("masked"),
            packed: part("packed"),
        };
        (model.clone(), case)
    };
    all.as_object().unwrap().iter().map(case).collect()
}

fn folder(model: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("fixtures/hf-{model}-tiny"))
}

fn fp32(model: &str, frozen: &[String], sets: &[String], seed: u64) -> Config {
    let from = folder(model);
    let ron = format!(
        "(model: (from: {from:?}, seq_len: {T}), precision: Fp32,
          optimizer: (lr: 1e-2, beta2: 0.95, weight_decay: 0.1, clip: 1.0, frozen: {frozen:?}),
          schedule: (kind: Constant), offload: (tile_elements: 1024), device: Cpu(threads: 1), batch: (global: {B}),
          data: (train: \"unused\", format: U16, order: Random),
          train: (steps: 10, seed: {seed}, checkpoint_every: 10))"
    );
    config(&ron, sets)
}

/// The parameter names of transformers that `theirs` does not know: the model is of another fixture.
const GPT2: &str = "gpt2";

/// Numbers of tensor-parallel ranks, data-parallel ranks, and whether tokens are split.
const LAYOUTS: [(usize, usize, bool); 5] =
    [(1, 1, false), (2, 1, false), (2, 1, true), (1, 2, false), (2, 2, true)];

#[test]
fn gradients_of_the_other_tensors_are_those_of_transformers_on_every_layout() {
    let cases = cases();
    for (number, (model, case)) in cases.iter().filter(|(model, _)| *model != GPT2).enumerate() {
        let fixture = load(model);
        for (i, (tp, dp, sequence)) in LAYOUTS.into_iter().enumerate() {
            let more = ["None", "Selective", "Block"][(number + i) % 3];
            let sets = [
                format!("parallel.tensor={tp}"),
                format!("parallel.data={dp}"),
                format!("parallel.sequence={sequence}"),
                format!("batch.micro={}", B / dp),
                format!("device.count={}", tp * dp),
                format!("recompute={more}"),
            ];
            let shape = shape(&fp32(model, &case.frozen, &sets, 0));
            let given = PassInputs {
                tokens: fixture.get("tokens"),
                targets: fixture.get("targets"),
                starts: None,
                param: &|name| fixture.get(&theirs(model, name)),
            };
            let found = pass(&shape, dp, &given);
            let difference = worst(&found.logits, fixture.get("logits"));
            assert!(difference < 1e-5, "{model} {sets:?}: logits are {difference:e} apart");
            let trained = found.grads.iter().filter(|(name, _)| !name.ends_with(CORRECTION));
            let trained: usize = trained.map(|(_, values)| values.len()).sum();
            assert_eq!(trained, case.trained, "{model}");
            for (name, grad) in &found.grads {
                if name.ends_with(CORRECTION) || name.contains(IDLE) {
                    continue;
                }
                let want = fixture.get(&format!("grad.{}", theirs(model, name)));
                let largest = |all: &[f64]| all.iter().fold(0.0f64, |most, x| most.max(x.abs()));
                let size = stack_of(&theirs(model, name))
                    .map_or_else(|| largest(want), |stack| largest(fixture.get(&stack)));
                let difference = worst(grad, want);
                assert!(
                    difference < 5e-6 * size,
                    "{model} {sets:?}: {name} is {difference:e} apart of {size:e}"
                );
            }
        }
    }
}

/// Places and times of the parts of a step, which a quick test takes in turn.
const WAYS: [&[&str]; 9] = [
    &["parallel.data=2", "device.count=2", "batch.micro=3"],
    &["parallel.tensor=2", "device.count=2", "recompute=Block"],
    &[
        "offload.parameters=Host",
        "recompute=Block",
        "batch.micro=2",
        "parallel.data=3",
        "device.count=3",
    ],
    &[
        "offload.accumulate=Host",
        "batch.micro=3",
        "parallel.tensor=2",
        "parallel.data=2",
        "device.count=4",
        "parallel.sequence=true",
    ],
    &["offload.optimizer=Device", "parallel.data=2", "device.count=2", "batch.micro=3"],
    &["offload.update=Serial", "offload.optimizer=Split(device_fraction: 0.4)", "batch.micro=2"],
    &["offload.update=Speculative", "batch.micro=6"],
    &[
        "offload.parameters=Host",
        "recompute=Block",
        "batch.micro=2",
        "activations=Tiers(gpu_blocks: 1, host_blocks: 1)",
    ],
    &[
        "offload.parameters=Host",
        "offload.resident_blocks=0",
        "offload.ring=2",
        "recompute=Block",
        "parallel.tensor=2",
        "device.count=2",
    ],
];

#[test]
fn ten_adamw_steps_beside_frozen_tensors_are_those_of_pytorch_in_every_place() {
    for (number, (model, case)) in cases().iter().enumerate() {
        for (way, sets) in WAYS.iter().enumerate() {
            if model != "llama3" && !full() && !(number + way).is_multiple_of(4) {
                continue;
            }
            println!("{model} {sets:?}");
            let run = tempfile::tempdir().unwrap();
            let windows: Vec<&[f64]> = case.tokens.chunks(T + 1).collect();
            let (seed, data) = dataset_of_windows(&windows, B, V, run.path());
            let sets: Vec<String> = sets.iter().map(ToString::to_string).collect();
            let config = fp32(model, &case.frozen, &sets, seed);
            assert_steps(&config, model, &data, [&case.losses, &case.norms]);
        }
    }
}

/// Trains from the folder of a model, and compares the losses and norms of the steps.
fn assert_steps(config: &Config, model: &str, data: &Arc<Dataset>, want: [&[f64]; 2]) {
    let built = lay_out(config);
    let from = Folder::open(&folder(model)).unwrap();
    let weights = PretrainedWeights::new(from, &built.decoder).unwrap();
    weights.hash(&Silence).unwrap();
    let options = RunOptions { pretrained: Some(Arc::new(weights)), ..RunOptions::default() };
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    let outcome = train(config, &built, data, &options, &mut |message| {
        if let Message::Step(step) = message {
            losses.push(step.loss);
            norms.push(step.grad_norm);
        }
    });
    outcome.unwrap();
    let apart = [worst(&losses, want[0]), worst(&norms, want[1])];
    assert!(apart.iter().all(|x| *x < 2e-5), "{model} {:?} {apart:?}", config.parallel);
}

/// Each document in a sample of its own, and several side by side.
#[test]
fn ten_adamw_steps_on_documents_beside_frozen_tensors_are_those_of_pytorch() {
    let (model, fixture) = ("llama3", load("llama3"));
    let case = &cases()[model];
    let tokens = fixture.get("masked.train.tokens").chunks(T + 1);
    let targets = fixture.get("masked.train.targets").chunks(T);
    let starts = fixture.get("packed.train.starts").chunks(T);
    let alone = [0.0; T];
    for (steps, packs) in [(&case.masked, false), (&case.packed, true)] {
        let samples = tokens.clone().zip(targets.clone()).zip(starts.clone());
        let samples: Vec<Vec<Document>> = samples
            .map(|((t, wanted), starts)| cut(t, wanted, if packs { starts } else { &alone }))
            .collect();
        let validation = samples[0].clone();
        let of = |samples: &[Vec<Document>]| {
            Corpus::of_documents(&samples.concat(), &validation, T, packs)
        };
        let shuffled = of(&samples);
        let mut in_place = samples.clone();
        for (n, documents) in samples.iter().enumerate() {
            in_place[shuffled.shuffled(SEED, n as u64)].clone_from(documents);
        }
        let data = Arc::new(Dataset::from(of(&in_place)));
        let sets = [
            format!("batch.global={}", samples.len() / 10),
            "batch.micro=4".to_owned(),
            "data.order=Shuffled".to_owned(),
            "recompute=Block".to_owned(),
            "parallel.tensor=2".to_owned(),
            "device.count=2".to_owned(),
        ];
        let mut config = fp32(model, &case.frozen, &sets, SEED);
        // Only a config with a format of documents can set this packing.
        if packs {
            config.data.packing = Packing::Documents;
        }
        let [losses, norms] = steps.as_ref().unwrap();
        assert_steps(&config, model, &data, [losses, norms]);
    }
}

/// A frozen embedding, a frozen block between trained ones, and frozen parts of the others.
const FROZEN: &str =
    "optimizer.frozen=[\"wte*\", \"wpe*\", \"h.1.*\", \"*.ln_2.*\", \"*.c_attn.weight\"]";

#[test]
fn what_only_moves_work_changes_no_bit_beside_frozen_tensors() {
    let base = ["model.vocab=257", "model.dropout=0.1", "train.steps=4", "batch.micro=1", FROZEN];
    for layout in [
        &["parallel.tensor=2", "parallel.data=2"][..],
        &["parallel.tensor=2", "parallel.sequence=true"],
        &["parallel.data=2"],
        &[],
    ] {
        assert_no_bit_changes(
            &with(&base, layout),
            &[
                &["offload.update=Serial"],
                &["offload.update=Speculative"],
                &["offload.optimizer=Device", "offload.bucket_elements=1500"],
                &["offload.optimizer=Split(device_fraction: 0.4)", "device.threads=3"],
                &["offload.accumulate=Host", "offload.bucket_elements=9000"],
                &["offload.parameters=Host", "recompute=Block"],
                &[
                    "offload.parameters=Host",
                    "offload.resident_blocks=0",
                    "offload.ring=2",
                    "recompute=Block",
                ],
                &["recompute=Selective", "offload.lookahead=3"],
            ],
        );
    }
    let delayed = with(&base, &["offload.update=Delayed(after_step: 1)"]);
    assert_no_bit_changes(&delayed, &[&["offload.accumulate=Host", "offload.tile_elements=2500"]]);
}

/// The first blocks with the embedding, and the last blocks with the final norm.
#[test]
fn whole_ends_of_a_model_are_frozen_in_every_update_mode() {
    for frozen in ["[\"w?e*\", \"h.[01].*\"]", "[\"h.[12].*\", \"ln_f.*\"]", "[\"h.*\", \"w?e*\"]"]
    {
        let frozen = format!("optimizer.frozen={frozen}");
        let base = ["model.vocab=257", "train.steps=3", "batch.micro=1", frozen.as_str()];
        assert_no_bit_changes(
            &base,
            &[
                &["offload.update=Speculative", "offload.speculated_fraction=1.0"],
                &["offload.optimizer=Split(device_fraction: 0.5)"],
                &["offload.parameters=Host", "recompute=Block"],
            ],
        );
    }
}

#[test]
fn an_empty_list_freezes_nothing() {
    let base = ["train.steps=2"];
    assert_same_bits(&run_sets(&base), &run_sets(&with(&base, &["optimizer.frozen=[]"])), "[]");
    let frozen = run_sets(&with(&base, &[FROZEN]));
    assert_ne!(run_sets(&base).outcome.state_hash, frozen.outcome.state_hash);
}
