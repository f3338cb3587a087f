//! Decoders of transformers, compared with transformers and PyTorch in float64: models from
//! tests/fixtures/make_llama_fixture.py and make_decoder_fixture.py give the same logits, loss,
//! gradients and ten losses on every layout, and are exported unchanged.
#![allow(missing_docs, reason = "a test")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::print_stdout, reason = "figures for --nocapture")]
#![allow(clippy::allow_attributes, reason = "the lines above")]

mod balance;
mod mxfp4;
pub(crate) mod packed;
pub(crate) mod tensors;

use checkpoint::hugging_face::{Folder, ModelExport, Numbers, PretrainedWeights, export};
use checkpoint::{Checkpoint, RunFolder};
use config::Config;
use data::model_files::ModelFiles;
use data::progress::Silence;
use data::{Corpus, Dataset, Document};
use engine::run::{Message, RunOptions, train};
use files::held::LockedRunDir;
use files::names::EXPERTS;
use layout::build::shape;
use onebox::generate::{ModelSource, WeightSource, next_logits};
use safetensors::SafeTensors;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tensor_parallel::DecoderShape;
use tensors::{CORRECTION, IDLE, has_delta_nets, is_joined_in_qwen, is_stack, load};
use tensors::{names_of_weights, stack_of, theirs};
use tests::compare::full;
use tests::pass::{Fixture, PassInputs, PassResult, pass, widened, worst};
use tests::{config, dataset_of_windows, lay_out};

/// Samples (`B`), tokens of a sample (`T`) and vocabulary (`V`) of the fixtures.
const B: usize = 6;
const T: usize = 12;
/// Number of samples in a step of documents (`MASKED_B`), and the seed of their order (`SEED`).
const MASKED_B: usize = 24;
const SEED: u64 = 7;
const V: usize = 61;

const MODELS: [&str; 25] = [
    "llama3",
    "llama-linear",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "mistral-window",
    "ministral3",
    "olmo2",
    "olmo3",
    "smollm3",
    "phi3",
    "granite",
    "seed-oss",
    "qwen3-window",
    "qwen3-moe",
    "mixtral",
    "olmoe",
    "glm4-moe",
    "glm4-air",
    "gpt-oss",
    "qwen3-5",
    "qwen3-5-moe",
    "qwen3-next",
];

/// Models whose experts have no width for GPUs: these are multiples of 8 on each rank.
const NOT_ON_GPUS: [&str; 2] = ["mixtral", "olmoe"];

/// Layouts: (tensor, data, sequence).
const LAYOUTS: [(usize, usize, bool); 7] = [
    (1, 1, false),
    (2, 1, false),
    (2, 1, true),
    (1, 3, false),
    (2, 2, true),
    // Three ranks share each key and value head.
    (6, 1, false),
    (6, 2, true),
];

fn folder(model: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("fixtures/hf-{model}-tiny"))
}

fn fp32(model: &str, sets: &[String], seed: u64) -> Config {
    let from = folder(model);
    let ron = format!(
        "(model: (from: {from:?}, seq_len: {T}), precision: Fp32,
          optimizer: (lr: 1e-2, beta2: 0.95, weight_decay: 0.1, clip: 1.0), schedule: (kind: Constant),
          offload: (tile_elements: 1024), device: Cpu(threads: 1), batch: (global: {B}),
          data: (train: \"unused\", format: U16, order: Random), train: (steps: 10, seed: {seed}, checkpoint_every: 10))"
    );
    config(&ron, sets)
}

fn pretrained(model: &str) -> Arc<PretrainedWeights> {
    let from = Folder::open(&folder(model)).unwrap_or_else(|e| panic!("{e}"));
    let gpt = lay_out(&fp32(model, &[], 0)).decoder;
    Arc::new(PretrainedWeights::new(from, &gpt).unwrap_or_else(|e| panic!("{e}")))
}

fn grid((tp, dp, sequence): (usize, usize, bool)) -> Vec<String> {
    vec![
        format!("parallel.tensor={tp}"),
        format!("parallel.data={dp}"),
        format!("parallel.sequence={sequence}"),
        format!("batch.micro={}", B / dp),
        format!("device.count={}", tp * dp),
    ]
}

#[test]
fn logits_loss_and_every_gradient_are_those_of_transformers_on_every_layout() {
    for (number, model) in MODELS.into_iter().enumerate() {
        let fixture = load(model);
        // With block recomputation, the head works on runs of 7 tokens; the last run is shorter.
        let ways = |l| [(l, "None", 1000), (l, "Selective", 1000), (l, "Block", 7)];
        // The quick selection takes one way on each layout, and another one for the next model.
        let cases = LAYOUTS.into_iter().enumerate().flat_map(|(i, layout)| {
            let selected = move |way: &usize| full() || (number + i + way).is_multiple_of(3);
            ways(layout).into_iter().enumerate().filter(move |(way, _)| selected(way))
        });
        for (_, (layout, more, head_rows)) in cases {
            let mut sets = grid(layout);
            sets.push(format!("recompute={more}"));
            let config = fp32(model, &sets, 0);
            let shape = DecoderShape { head_rows, ..shape(&config) };
            let given = PassInputs {
                tokens: fixture.get("tokens"),
                targets: fixture.get("targets"),
                starts: None,
                param: &|name| fixture.get(&theirs(model, name)),
            };
            let PassResult { logits, loss, grads, .. } = pass(&shape, layout.1, &given);
            let difference = worst(&logits, fixture.get("logits"));
            assert!(difference < 1e-5, "{model} {sets:?}: logits are {difference:e} apart");
            let difference = (loss - fixture.get("loss")[0]).abs();
            assert!(difference < 1e-6, "{model} {sets:?}: the loss is {difference:e} off");
            let joined = |name: &str| {
                name.contains("qkv_proj")
                    || name.contains("gate_up_proj")
                    || is_stack(name)
                    || has_delta_nets(model) && is_joined_in_qwen(name)
            };
            let known = |name: &&String| name.starts_with("grad.") && !joined(name);
            let known = fixture.0.keys().filter(known).count();
            let corrections = grads.keys().filter(|name| name.ends_with(CORRECTION)).count();
            assert_eq!(corrections, if model.starts_with("glm4") { 2 } else { 0 }, "{model}");
            assert_eq!(grads.len(), known + corrections, "{model}");
            for (name, grad) in &grads {
                if name.ends_with(CORRECTION) {
                    // A buffer in transformers.
                    assert!(grad.iter().all(|x| *x == 0.0), "{model} {sets:?}: {name}");
                    continue;
                }
                let want = fixture.get(&format!("grad.{}", theirs(model, name)));
                if name.contains(IDLE) {
                    let zero = |all: &[f64]| all.iter().all(|x| *x == 0.0);
                    assert!(zero(want) && zero(grad), "{model} {sets:?}: {name} has a gradient");
                    continue;
                }
                let largest = |all: &[f64]| all.iter().fold(0.0f64, |most, x| most.max(x.abs()));
                // transformers has the matrices of all experts in one tensor.
                let size = stack_of(&theirs(model, name))
                    .map_or_else(|| largest(want), |stack| largest(fixture.get(&stack)));
                let (difference, most) = (worst(grad, want), 5e-6 * size);
                assert!(
                    difference < most,
                    "{model} {sets:?}: {name} is {difference:e} apart of {size:e}"
                );
            }
        }
    }
}

/// Layouts on which the steps of model `number` are compared: all of them for the first model, and with
/// ONEBOX_FULL=1 for every model. The others take one in turn, since their gradients are compared on all.
fn layouts_of_steps(number: usize) -> Vec<(usize, usize, bool)> {
    let all = full() || number == 0;
    if all { LAYOUTS.to_vec() } else { vec![[LAYOUTS[4], LAYOUTS[6]][number % 2]] }
}

/// Trains from a folder, and compares the losses and norms of the steps.
fn assert_steps(
    config: &Config,
    (from, data): (&Arc<PretrainedWeights>, &Arc<Dataset>),
    [want_losses, want_norms]: [&[f64]; 2],
    run: &str,
) {
    let options = RunOptions { pretrained: Some(Arc::clone(from)), ..RunOptions::default() };
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    let outcome = train(config, &lay_out(config), data, &options, &mut |message| {
        if let Message::Step(step) = message {
            losses.push(step.loss);
            norms.push(step.grad_norm);
        }
    });
    outcome.unwrap();
    let (difference, of_norms) = (worst(&losses, want_losses), worst(&norms, want_norms));
    println!("{run}: losses {difference:.1e}, norms {of_norms:.1e} apart");
    assert!(difference < 2e-5 && of_norms < 2e-5, "{run}: {difference:e} {of_norms:e}");
}

#[test]
fn ten_adamw_steps_from_a_folder_are_those_of_pytorch_on_every_layout() {
    let on_gpus = std::env::var_os(ON_GPUS).is_some();
    // On GPUs, models that together use every kernel; all of them with ONEBOX_FULL=1.
    let some = [
        "llama3",
        "gemma3",
        "gemma2",
        "olmo3",
        "phi3",
        "qwen3-moe",
        "glm4-moe",
        "gpt-oss",
        "qwen3-5-moe",
    ];
    let used = |model: &&str| {
        let fits = !NOT_ON_GPUS.contains(model);
        !on_gpus || fits && (full() || some.contains(model))
    };
    for (number, model) in MODELS.into_iter().enumerate().filter(|(_, model)| used(model)) {
        let fixture = load(model);
        let from = pretrained(model);
        let mut all: Vec<Vec<String>> = layouts_of_steps(number).into_iter().map(grid).collect();
        let places =
            ["offload.accumulate=Host", "offload.optimizer=Device", "host_checkpoints=true"];
        // The quick selection takes all places for the first model, and one for each other model.
        let selected = |place: &usize| full() || number == 0 || number % places.len() == *place;
        for (_, more) in places.into_iter().enumerate().filter(|(place, _)| selected(place)) {
            let sets = ["batch.micro=2", "recompute=Block", "parallel.tensor=2", more];
            all.push(sets.map(str::to_owned).into());
        }
        if on_gpus {
            // One GPU, TP 2 x DP 2 with sequence parallelism, and TP 6. Under the fake driver the quick
            // selection takes all three for the first model, and the second one for each other model.
            let one = number > 0 && !full() && std::env::var_os(FAKE_DEVICES).is_some();
            let layouts = [LAYOUTS[0], LAYOUTS[4], LAYOUTS[5]];
            let used = if one { &layouts[1..2] } else { &layouts[..] };
            all = used.iter().copied().map(grid).collect();
            for sets in &mut all {
                sets.pop();
                sets.push("device=Cuda".into());
            }
        }
        for sets in all {
            let run = tempfile::tempdir().unwrap();
            let windows: Vec<&[f64]> = fixture.get("train.tokens").chunks(T + 1).collect();
            let (seed, data) = dataset_of_windows(&windows, B, V, run.path());
            let config = fp32(model, &sets, seed);
            let want = ["losses", "norms"].map(|of| fixture.get(&format!("train.{of}")));
            assert_steps(&config, (&from, &data), want, &format!("{model} {sets:?}"));
        }
    }
}

/// Each sample is a document, and some of its targets do not count. The loss is the mean over the
/// counted targets of the global batch, for every split over ranks and micro-batches.
#[test]
fn ten_adamw_steps_on_masked_documents_are_those_of_pytorch_on_every_layout() {
    for (number, model) in MODELS.into_iter().enumerate() {
        let (fixture, from) = (load(model), pretrained(model));
        let counted = fixture.get("masked.train.targets").chunks(T);
        let documents: Vec<Document> = fixture
            .get("masked.train.tokens")
            .chunks(T + 1)
            .zip(counted)
            .map(|(tokens, targets)| Document {
                tokens: tokens.iter().map(|token| *token as u32).collect(),
                counted: [false].into_iter().chain(targets.iter().map(|t| *t >= 0.0)).collect(),
            })
            .collect();
        let none = documents.iter().filter(|document| !document.counted.contains(&true)).count();
        assert!(none > 5, "{model}: some samples have no target");
        // Sample n of the run is document n.
        let validation = [documents[0].clone()];
        let data = Corpus::of_documents(&documents, &validation, T, false);
        let mut in_place = documents.clone();
        for (n, document) in documents.iter().enumerate() {
            in_place[data.shuffled(SEED, n as u64)] = document.clone();
        }
        let data = Arc::new(Dataset::from(Corpus::of_documents(&in_place, &validation, T, false)));
        let micros = [2, 4].into_iter().cycle().skip(number / 2);
        // Other layouts than those of the steps without documents.
        let turn = if number == 0 { 0 } else { number + 1 };
        for (layout, micro) in layouts_of_steps(turn).into_iter().zip(micros) {
            let mut sets = grid(layout);
            sets.retain(|set| !set.starts_with("batch.micro"));
            sets.extend([format!("batch.micro={micro}"), format!("batch.global={MASKED_B}")]);
            sets.push("data.order=Shuffled".into());
            let config = fp32(model, &sets, SEED);
            let want = ["losses", "norms"].map(|of| fixture.get(&format!("masked.train.{of}")));
            assert_steps(&config, (&from, &data), want, &format!("{model} {sets:?}"));
        }
    }
}

/// Environment variable: if it is set, the tests train on GPUs.
const ON_GPUS: &str = "ONEBOX_PARITY_ON_GPUS";
/// Environment variable with the number of GPUs of the fake driver.
const FAKE_DEVICES: &str = "FAKECUDA_DEVICES";

/// Repeats the steps in a child process under the fake driver. On a machine with a GPU,
/// scripts/gpu-check sets the variable itself.
#[test]
fn steps_on_gpus_are_those_of_pytorch() {
    if std::env::var_os(ON_GPUS).is_some() {
        return;
    }
    let cache = tempfile::tempdir().unwrap();
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    let names = [
        "llama::ten_adamw_steps_from_a_folder_are_those_of_pytorch_on_every_layout",
        "llama::packed::ten_adamw_steps_on_packed_documents_are_those_of_pytorch_on_every_layout",
    ];
    command.args(names).args(["--exact", "--nocapture"]).env(ON_GPUS, "1");
    command.env("LD_LIBRARY_PATH", fake_cuda::library_folder());
    command.env("XDG_CACHE_HOME", cache.path()).env(FAKE_DEVICES, "4");
    let output = command.output().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    let passed = output.status.success() && stdout.contains("2 passed");
    assert!(passed, "{stdout}{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn the_next_token_of_a_folder_is_that_of_transformers() {
    for model in MODELS {
        let fixture = load(model);
        let config = fp32(model, &[], 0);
        let folder = folder(model);
        let mut tokens: Vec<String> = fixture.get("prompt").iter().map(f64::to_string).collect();
        // A sequence is at most as long as a sample.
        for want in &fixture.get("greedy")[..T - 5] {
            let from = ModelSource::on_cores(WeightSource::Folder(&folder), None, tests::machine());
            let logits = next_logits(&config, &from, &tokens.join(" ")).unwrap();
            let best = (0..V).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap();
            assert_eq!(best, *want as usize, "{model} after {tokens:?}");
            tokens.push(best.to_string());
        }
    }
}

/// Weights file of a run of ten steps.
fn weights(model: &str, sets: &[&str]) -> Vec<u8> {
    let run = tempfile::tempdir().unwrap();
    let fixture = load(model);
    let windows: Vec<&[f64]> = fixture.get("train.tokens").chunks(T + 1).collect();
    let (seed, data) = dataset_of_windows(&windows, B, V, run.path());
    let sets: Vec<String> = sets.iter().map(ToString::to_string).collect();
    let config = fp32(model, &sets, seed);
    let path = run.path().join("weights.safetensors");
    let options = RunOptions {
        pretrained: Some(pretrained(model)),
        weights: Some(LockedRunDir::unlocked(run.path()).unwrap()),
        ..RunOptions::default()
    };
    train(&config, &lay_out(&config), &data, &options, &mut |_| ()).unwrap();
    std::fs::read(path).unwrap()
}

#[test]
fn when_and_where_the_update_runs_changes_no_bit() {
    // From the third on they have two kinds of layers, or experts.
    let models = "qwen3 qwen2 gemma3 olmo3 qwen3-moe olmoe glm4-moe gpt-oss qwen3-5 qwen3-next";
    for (number, model) in models.split(' ').enumerate() {
        let some = |sets: &[&str]| {
            let base = ["batch.micro=2", "recompute=Block", "parallel.tensor=2"];
            weights(model, &[&base, sets].concat())
        };
        // A delayed update first replaces the last-read tensors, such as the output projection.
        let delayed = "offload.update=Delayed(after_step: 2)";
        let (of_overlapped, of_delayed) = (some(&["offload.update=Overlapped"]), some(&[delayed]));
        assert_ne!(of_delayed, of_overlapped);
        let variants: [(&[&str], _); 9] = [
            (&["offload.update=Serial"], &of_overlapped),
            (&["offload.first_forward=3"], &of_overlapped),
            (&["offload.lookahead=4"], &of_overlapped),
            (&["host_checkpoints=true"], &of_overlapped),
            (&["offload.optimizer=Device"], &of_overlapped),
            (&["offload.bucket_elements=1024"], &of_overlapped),
            (&[delayed, "offload.lookahead=4"], &of_delayed),
            (&[delayed, "offload.tile_elements=1024"], &of_delayed),
            (&[delayed, "host_checkpoints=true"], &of_delayed),
        ];
        // The quick selection: all for the first model; the others take three of them in turn.
        let selected =
            |variant: &usize| full() || number == 0 || (number + variant).is_multiple_of(3);
        for (_, (sets, wanted)) in variants.into_iter().enumerate().filter(|(i, _)| selected(i)) {
            assert_eq!(some(sets), *wanted, "{model} {sets:?}");
        }
    }
}

#[test]
fn a_folder_goes_back_as_it_came() {
    for model in MODELS {
        let run = tempfile::tempdir().unwrap();
        let fixture = load(model);
        let windows: Vec<&[f64]> = fixture.get("train.tokens").chunks(T + 1).collect();
        let (seed, data) = dataset_of_windows(&windows, B, V, run.path());
        let sets = [grid((2, 2, false)), vec!["optimizer.lr=1e-30".into()]].concat();
        let config = fp32(model, &sets, seed);
        let options = RunOptions {
            pretrained: Some(pretrained(model)),
            checkpoints: Some(RunFolder::at(&run.path().join("checkpoints")).unwrap()),
            ..RunOptions::default()
        };
        let built = lay_out(&config);
        train(&config, &built, &data, &options, &mut |_| ()).unwrap();
        let path = run.path().join("checkpoints/step-00000010");
        let checkpoint = Checkpoint::open(&path, 10).unwrap();
        let out = run.path().join("out");
        // What a run keeps of the folder, but for config.json.
        let mut model_files = ModelFiles::default();
        if let Some(experts) = pretrained(model).experts_file() {
            model_files.add(EXPERTS, experts);
        }
        assert_eq!(
            model_files.files().len(),
            usize::from(["olmoe", "glm4-air", "qwen3-5-moe"].contains(&model)),
            "{model}"
        );
        let exported = ModelExport {
            base: None,
            checkpoint: &checkpoint,
            config: &config,
            built: &built,
            tokenizer: None,
            model_files: &model_files,
            numbers: Numbers::F32,
            max_file_bytes: u64::MAX,
            progress: &Silence,
        };
        export(&exported, &out).unwrap_or_else(|e| panic!("{e}"));
        let bytes = std::fs::read(out.join("model.safetensors")).unwrap();
        let mut ours = Fixture::default();
        ours.add(&bytes);
        // All tensors of the folder, and none in another form.
        let came = names_of_weights(model);
        assert_eq!(ours.0.keys().cloned().collect::<Vec<_>>(), came, "{model}");
        for (name, values) in &ours.0 {
            assert!(values == fixture.get(name), "{model}: {name}");
        }
        // In bf16 each number is the nearest bf16 number, so that bf16 numbers stay the same.
        let half = run.path().join("half");
        let exported = ModelExport { numbers: Numbers::Bf16, max_file_bytes: 40_000, ..exported };
        export(&exported, &half).unwrap_or_else(|e| panic!("{e}"));
        for entry in std::fs::read_dir(&half).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|e| e != "safetensors") {
                continue;
            }
            let bytes = std::fs::read(path).unwrap();
            for (name, t) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
                // transformers keeps corrections of routers in fp32.
                let is_exact = name.ends_with("e_score_correction_bias");
                let dtype =
                    if is_exact { safetensors::Dtype::F32 } else { safetensors::Dtype::BF16 };
                assert_eq!(t.dtype(), dtype, "{name}");
                let nearest = |x: &f64| f64::from(half::bf16::from_f32(*x as f32));
                let rounded = |x: &f64| if is_exact { *x } else { nearest(x) };
                let want: Vec<f64> = fixture.get(&name).iter().map(rounded).collect();
                assert!(widened(&t) == want, "{model}: {name}");
            }
        }
        // The exported folder describes the same model.
        let again = config::load_str(
            "(model: (from: \"out\"), data: (train: \"x\", format: U16), train: (steps: 1))",
            "a.ron",
            run.path(),
            &[],
        );
        let again = again.unwrap_or_else(|e| panic!("{e}")).config.model;
        let shape_of = |m: &config::ModelConfig| {
            (
                [m.layers, m.hidden, m.heads],
                m.kv_heads,
                m.head_dim,
                m.ffn_hidden,
                m.rope.clone(),
                m.window_rope.clone(),
                m.layer_pattern.clone(),
                m.window,
                m.tied,
                (m.qk_norm, m.experts.clone(), m.delta_net.clone(), m.output_gate),
            )
        };
        assert_eq!(shape_of(&again), shape_of(&config.model), "{model}");
    }
}
