//! Adapters of tests/fixtures/make_adapter_fixture.py, compared with PEFT and PyTorch in float64: the
//! same logits, loss, gradients and ten losses on every layout.
#![allow(missing_docs, reason = "a test")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the lines above")]

mod dropout;
mod experts;
mod folders;

use crate::llama::packed::cut;
use crate::llama::tensors;
use checkpoint::hugging_face::{Folder, PretrainedWeights};
use config::{Config, Packing};
use data::progress::Silence;
use data::{Corpus, Dataset, Document};
use engine::run::{Message, RunOptions, Weights, train};
use layout::build::shape;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tensor_parallel::DecoderShape;
use tests::compare::full;
use tests::pass::{Fixture, PassInputs, PassResult, pass, worst};
use tests::{config, dataset_of_windows, lay_out};

/// Samples and tokens of a sample of the fixtures.
const B: usize = 6;
const T: usize = 12;
/// Seed of the order of documents.
const SEED: u64 = 7;

/// A model with its adapters.
struct AdapterCase {
    name: &'static str,
    /// The keys of the adapters.
    adapter: &'static str,
    /// Numbers of tensor-parallel ranks that fit the model.
    ranks: &'static [usize],
}

/// Three of six ranks share each head of keys and values.
const MODELS: [AdapterCase; 12] = [
    AdapterCase { name: "llama3", adapter: "rank: 4, alpha: 8", ranks: &[1, 2, 6] },
    AdapterCase {
        name: "qwen2",
        adapter: "rank: 3, alpha: 6, rank_stabilized: true, targets: [\"q_proj\", \"v_proj\"]",
        ranks: &[1, 2, 6],
    },
    AdapterCase { name: "qwen3", adapter: "rank: 2, alpha: 1", ranks: &[1, 2] },
    AdapterCase {
        name: "mistral-window",
        adapter: "rank: 2, alpha: 4, targets: [\"q_proj\", \"k_proj\", \"v_proj\", \"o_proj\"]",
        ranks: &[1, 2, 6],
    },
    AdapterCase { name: "gpt2", adapter: "rank: 4, alpha: 4", ranks: &[1, 2, 4] },
    AdapterCase { name: "qwen3-moe", adapter: "rank: 2, alpha: 4", ranks: &[1, 2, 6] },
    AdapterCase {
        name: "mixtral",
        adapter: "rank: 3, alpha: 3, targets: [\"q_proj\", \"experts.down_proj\"]",
        ranks: &[1, 2, 6],
    },
    AdapterCase {
        name: "olmoe",
        adapter: "rank: 2, alpha: 1, rank_stabilized: true, targets: [\"v_proj\", \"experts.gate_up_proj\"]",
        ranks: &[1, 2, 6],
    },
    AdapterCase { name: "gpt-oss", adapter: "rank: 2, alpha: 4", ranks: &[1, 2, 6] },
    AdapterCase { name: "glm4-moe", adapter: "rank: 2, alpha: 2", ranks: &[1, 2, 6] },
    AdapterCase { name: "qwen3-5", adapter: "rank: 2, alpha: 4", ranks: &[1, 2, 6] },
    AdapterCase {
        name: "qwen3-5-moe",
        adapter: "rank: 2, alpha: 3, targets: [\"q_proj\", \"v_proj\", \"in_proj_qkv\", \"in_proj_a\", \"experts.gate_up_proj\", \"experts.down_proj\"]",
        ranks: &[1, 2, 6],
    },
];

impl AdapterCase {
    fn sets(&self) -> Vec<String> {
        vec![format!("adapter=Lora({})", self.adapter)]
    }

    /// Whether layers have experts. The fixture then has no documents.
    fn has_experts(&self) -> bool {
        ["qwen3-moe", "mixtral", "olmoe", "gpt-oss", "glm4-moe", "qwen3-5-moe"].contains(&self.name)
    }

    /// Values of the parameter `name`; `prefix` stands before its name in the fixture.
    fn values(&self, fixture: &Fixture, prefix: &str, name: &str) -> Vec<f64> {
        let is_factor = name.contains("lora_");
        if is_factor && name.contains(".moe.experts.") {
            let alternates = tensors::alternates(self.name);
            let experts = tensors::experts_of(self.name);
            return experts::factor(fixture, prefix, name, (experts, alternates));
        }
        let of_parts = self.has_experts() || tensors::has_delta_nets(self.name);
        let theirs = match (is_factor, of_parts) {
            (false, true) => tensors::theirs(self.name, name),
            (true, _) if tensors::has_delta_nets(self.name) => {
                let (linear, factor) = name.rsplit_once('.').unwrap();
                let weight = tensors::theirs(self.name, &format!("{linear}.weight"));
                let module = weight.strip_suffix("weight").unwrap();
                let factor = factor.replace("lora_a", "lora_A").replace("lora_b", "lora_B");
                format!("base_model.model.{module}{factor}.weight")
            }
            _ => theirs(self.name, name),
        };
        fixture.get(&format!("{prefix}{theirs}")).to_vec()
    }
}

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures").join(name)
}

/// The fixture of a model's adapters, and the weights of the model and of the adapters.
fn load(model: &str) -> Fixture {
    let mut all = Fixture::default();
    let base = folder(&format!("hf-{model}-tiny"));
    for entry in std::fs::read_dir(base).unwrap() {
        let path = entry.unwrap().path();
        let is_weights = path.extension().is_some_and(|ext| ext == "safetensors");
        if is_weights && !path.ends_with("expected.safetensors") {
            all.add(&std::fs::read(path).unwrap());
        }
    }
    tensors::split_stacks(&mut all, model);
    let is_qwen = tensors::has_delta_nets(model);
    if is_qwen {
        tensors::split_qwen(&mut all);
    }
    let adapters = folder(&format!("peft-{model}-tiny"));
    for name in ["adapter_model.safetensors", "expected.safetensors"] {
        all.add(&std::fs::read(adapters.join(name)).unwrap());
    }
    if is_qwen {
        tensors::split_qwen(&mut all);
        all.0.retain(|name, _| !name.starts_with("grad.") || !tensors::is_joined_in_qwen(name));
    }
    all
}

/// Parts of names: onebox, transformers.
const LLAMA: [(&str, &str); 9] = [
    ("attn.q.", "self_attn.q_proj."),
    ("attn.k.", "self_attn.k_proj."),
    ("attn.v.", "self_attn.v_proj."),
    ("attn.q_norm.", "self_attn.q_norm."),
    ("attn.k_norm.", "self_attn.k_norm."),
    ("attn.proj.", "self_attn.o_proj."),
    ("mlp.gate.", "mlp.gate_proj."),
    ("mlp.up.", "mlp.up_proj."),
    ("mlp.proj.", "mlp.down_proj."),
];
const GPT2: [(&str, &str); 4] = [
    ("attn.qkv.", "attn.c_attn."),
    ("attn.proj.", "attn.c_proj."),
    ("mlp.fc.", "mlp.c_fc."),
    ("mlp.proj.", "mlp.c_proj."),
];

/// Name of a parameter in the files of transformers or PEFT.
fn theirs(model: &str, name: &str) -> String {
    let is_gpt2 = model == "gpt2";
    let parts = if is_gpt2 { &GPT2[..] } else { &LLAMA[..] };
    let found = parts.iter().find(|(ours, _)| name.contains(ours));
    let mut name = found.map_or(name.to_owned(), |(ours, theirs)| name.replace(ours, theirs));
    if let Some(of_layer) = name.strip_prefix("h.") {
        name = if is_gpt2 {
            format!("transformer.h.{of_layer}")
        } else {
            format!("model.layers.{of_layer}")
        };
    }
    let is_factor = name.contains("lora_");
    for (ours, theirs) in
        [("ln_1.", "input_layernorm."), ("ln_2.", "post_attention_layernorm."), ("ln_f.", "norm.")]
    {
        if !is_gpt2 {
            name = name.replace(ours, theirs);
        }
    }
    let name = match (&*name, is_gpt2) {
        ("wte" | "wpe", true) => format!("transformer.{name}.weight"),
        ("wte", false) => "model.embed_tokens.weight".to_owned(),
        ("head", _) => "lm_head.weight".to_owned(),
        ("norm.weight", _) => "model.norm.weight".to_owned(),
        ("ln_f.weight" | "ln_f.bias", true) => format!("transformer.{name}"),
        _ => name,
    };
    if !is_factor {
        return name;
    }
    let name = name.replace("lora_a", "lora_A.weight").replace("lora_b", "lora_B.weight");
    format!("base_model.model.{name}")
}

fn fp32(model: &AdapterCase, sets: &[String], seed: u64) -> Config {
    let from = folder(&format!("hf-{}-tiny", model.name));
    let ron = format!(
        "(model: (from: {from:?}, seq_len: {T}), precision: Fp32,
          optimizer: (lr: 1e-2, beta2: 0.95, weight_decay: 0.1, clip: 1.0), schedule: (kind: Constant),
          offload: (tile_elements: 1024), device: Cpu(threads: 1), batch: (global: {B}),
          data: (train: \"unused\", format: U16, order: Random),
          train: (steps: 10, seed: {seed}, checkpoint_every: 10))"
    );
    config(&ron, &[sets.to_vec(), model.sets()].concat())
}

fn shape_of(
    model: &AdapterCase,
    (tp, dp, sequence): (usize, usize, bool),
    more: &str,
) -> DecoderShape {
    let sets = vec![
        format!("parallel.tensor={tp}"),
        format!("parallel.data={dp}"),
        format!("parallel.sequence={sequence}"),
        format!("batch.micro={}", B / dp),
        format!("device.count={}", tp * dp),
        format!("recompute={more}"),
    ];
    shape(&fp32(model, &sets, 0))
}

/// A folder of GPT-2 stores its linears transposed.
fn stored(model: &str, name: &str, values: &[f64], shape: (usize, usize)) -> Vec<f64> {
    let is_linear =
        ["qkv.weight", "proj.weight", "fc.weight"].iter().any(|end| name.ends_with(end));
    if model != "gpt2" || !is_linear {
        return values.to_vec();
    }
    let (rows, columns) = shape;
    (0..rows * columns).map(|i| values[i % columns * rows + i / columns]).collect()
}

/// The whole parameters of a model, by their names in onebox.
fn whole_params(model: &AdapterCase, fixture: &Fixture) -> Fixture {
    let shape = shape_of(model, (1, 1, false), "None");
    let whole = tensor_parallel::Decoder::plan(&mut device::Plan::default(), &shape, 64);
    let mut params = Fixture::default();
    for param in whole.segments().iter().flat_map(|s| s.all_params()) {
        let values = model.values(fixture, "", &param.name);
        let mut values = stored(model.name, &param.name, &values, param.global);
        values.truncate(param.global_len());
        params.0.insert(param.name.clone(), values);
    }
    params
}

#[test]
fn logits_loss_and_every_gradient_are_those_of_peft_on_every_layout() {
    for model in MODELS {
        let fixture = load(model.name);
        let params = whole_params(&model, &fixture);
        let layouts = model.ranks.iter().flat_map(|tp| {
            [(*tp, 1, false), (*tp, 2, false), (*tp, 1, true)]
                .into_iter()
                .filter(|l| l.0 > 1 || !l.2)
        });
        for (number, layout) in layouts.enumerate() {
            for (way, more) in ["None", "Selective", "Block"].into_iter().enumerate() {
                if !full() && !(number + way).is_multiple_of(3) {
                    continue;
                }
                let shape = shape_of(&model, layout, more);
                let given = PassInputs {
                    tokens: fixture.get("tokens"),
                    targets: fixture.get("targets"),
                    starts: None,
                    param: &|name| params.get(name),
                };
                let case = format!("{} {layout:?} {more}", model.name);
                let PassResult { logits, loss, grads, .. } = pass(&shape, layout.1, &given);
                let difference = worst(&logits, fixture.get("logits"));
                assert!(difference < 1e-5, "{case}: logits are {difference:e} apart");
                let difference = (loss - fixture.get("loss")[0]).abs();
                assert!(difference < 1e-6, "{case}: the loss is {difference:e} off");
                let elements = fixture.0.iter().filter(|(name, _)| name.starts_with("grad."));
                let known: usize = elements.map(|(_, values)| values.len()).sum();
                let computed: usize = grads.values().map(Vec::len).sum();
                assert_eq!(computed, known, "{case}");
                for (name, grad) in &grads {
                    let want = model.values(&fixture, "grad.", name);
                    // An expert without tokens has gradients of 0.
                    let size = want.iter().fold(0.0f64, |most, x| most.max(x.abs()));
                    let difference = worst(grad, &want);
                    assert!(
                        difference <= 5e-6 * size,
                        "{case}: {name} is {difference:e} apart of {size:e}"
                    );
                }
            }
        }
    }
}

/// The weights of a model.
fn base(model: &AdapterCase) -> Arc<PretrainedWeights> {
    let from = Folder::open(&folder(&format!("hf-{}-tiny", model.name))).unwrap();
    let decoder = lay_out(&fp32(model, &[], 0)).decoder;
    let weights = PretrainedWeights::new(from, &decoder).unwrap_or_else(|e| panic!("{e}"));
    weights.hash(&Silence).unwrap();
    Arc::new(weights)
}

/// Places and times of the parts of a step, which a quick test takes in turn.
const WAYS: [&[&str]; 8] = [
    &["parallel.data=2", "device.count=2", "batch.micro=3"],
    &["parallel.tensor=2", "device.count=2", "recompute=Block"],
    &["offload.optimizer=Device", "parallel.data=2", "device.count=2", "batch.micro=3"],
    &[
        "offload.parameters=Host",
        "recompute=Block",
        "batch.micro=2",
        "parallel.data=3",
        "device.count=3",
    ],
    &[
        "offload.accumulate=Host",
        "batch.micro=2",
        "parallel.tensor=2",
        "device.count=2",
        "parallel.sequence=true",
    ],
    &["offload.update=Serial", "offload.optimizer=Split(device_fraction: 0.4)", "batch.micro=2"],
    &["offload.update=Speculative", "batch.micro=6"],
    &[
        "offload.parameters=Host",
        "recompute=Block",
        "batch.micro=2",
        "activations=Tiers(gpu_blocks: 1, host_blocks: 1)",
    ],
];

/// The factors of a fixture, by their names in onebox.
fn initial_factors(model: &AdapterCase, fixture: &Fixture) -> Arc<Weights> {
    let decoder = lay_out(&fp32(model, &[], 0)).decoder;
    let params = decoder.segments().iter().flat_map(|s| &s.params);
    let factors = params.map(|param| {
        let values = model.values(fixture, "", &param.name);
        (param.name.clone(), values.iter().map(|x| *x as f32).collect())
    });
    Arc::new(factors.collect())
}

/// Trains the adapters of a fixture, and compares the losses and norms of the steps. `steps`: prefix
/// of their names in the fixture.
fn assert_steps(
    model: &AdapterCase,
    fixture: &Fixture,
    config: &Config,
    data: &Arc<Dataset>,
    steps: &str,
) {
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    let options = RunOptions {
        pretrained: Some(base(model)),
        initial: Some(initial_factors(model, fixture)),
        ..RunOptions::default()
    };
    let outcome = train(config, &lay_out(config), data, &options, &mut |message| {
        if let Message::Step(step) = message {
            losses.push(step.loss);
            norms.push(step.grad_norm);
        }
    });
    outcome.unwrap();
    let of = |name: &str| fixture.get(&format!("{steps}train.{name}"));
    let apart = [worst(&losses, of("losses")), worst(&norms, of("norms"))];
    assert!(apart.iter().all(|x| *x < 2e-5), "{} {steps} {apart:?}", model.name);
}

#[test]
fn ten_adamw_steps_of_adapters_are_those_of_peft_in_every_place() {
    for (number, model) in MODELS.iter().enumerate() {
        let fixture = load(model.name);
        for (way, sets) in WAYS.iter().enumerate() {
            if number > 0 && !full() && !(number + way).is_multiple_of(4) {
                continue;
            }
            println!("{} {sets:?}", model.name);
            let run = tempfile::tempdir().unwrap();
            let windows: Vec<&[f64]> = fixture.get("train.tokens").chunks(T + 1).collect();
            let (seed, data) = dataset_of_windows(&windows, B, 61, run.path());
            let sets: Vec<String> = sets.iter().map(ToString::to_string).collect();
            assert_steps(model, &fixture, &fp32(model, &sets, seed), &data, "");
        }
    }
}

/// Environment variable: if it is set, the test trains on GPUs.
const ON_GPUS: &str = "ONEBOX_ADAPTERS_ON_GPUS";

/// One GPU with the weights in host memory, and two with a part of each matrix.
#[test]
fn on_gpus() {
    if std::env::var_os(ON_GPUS).is_none() {
        return;
    }
    let streamed: &[&str] = &["offload.parameters=Host", "recompute=Block", "batch.micro=2"];
    for (model, sets) in [
        (&MODELS[0], streamed),
        (&MODELS[0], &["parallel.tensor=2"]),
        (&MODELS[1], &[]),
        (&MODELS[5], streamed),
    ] {
        println!("{} {sets:?}", model.name);
        let fixture = load(model.name);
        let run = tempfile::tempdir().unwrap();
        let windows: Vec<&[f64]> = fixture.get("train.tokens").chunks(T + 1).collect();
        let (seed, data) = dataset_of_windows(&windows, B, 61, run.path());
        let mut sets: Vec<String> = sets.iter().map(ToString::to_string).collect();
        sets.push("device=Cuda".into());
        assert_steps(model, &fixture, &fp32(model, &sets, seed), &data, "");
    }
}

/// Repeats ten steps in a child process under the fake driver.
#[test]
fn ten_adamw_steps_of_adapters_on_gpus_are_those_of_peft() {
    let cache = tempfile::tempdir().unwrap();
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args(["adapters::on_gpus", "--exact", "--nocapture"]).env(ON_GPUS, "1");
    command.env("LD_LIBRARY_PATH", fake_cuda::library_folder());
    command.env("XDG_CACHE_HOME", cache.path()).env("FAKECUDA_DEVICES", "2");
    let output = command.output().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    let passed = output.status.success() && stdout.contains("1 passed");
    assert!(passed, "{stdout}{}", String::from_utf8_lossy(&output.stderr));
}

/// Each document in a sample of its own, and several side by side.
#[test]
fn ten_adamw_steps_of_adapters_on_documents_are_those_of_peft() {
    for model in MODELS.iter().filter(|model| !model.has_experts()) {
        let fixture = load(model.name);
        let tokens = fixture.get("masked.train.tokens").chunks(T + 1);
        let targets = fixture.get("masked.train.targets").chunks(T);
        let starts = fixture.get("packed.train.starts").chunks(T);
        let alone = [0.0; T];
        for (steps, packs) in [("masked.", false), ("packed.", true)] {
            println!("{} {steps}", model.name);
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
            let batch = samples.len() / 10;
            let sets = [
                format!("batch.global={batch}"),
                "batch.micro=4".to_owned(),
                "data.order=Shuffled".to_owned(),
                "recompute=Block".to_owned(),
                "parallel.tensor=2".to_owned(),
                "device.count=2".to_owned(),
            ];
            let mut config = fp32(model, &sets, SEED);
            // Only a config with a format of documents can set this packing.
            if packs {
                config.data.packing = Packing::Documents;
            }
            assert_steps(model, &fixture, &config, &data, steps);
        }
    }
}
