//! The Llama family against transformers and PyTorch in float64: what tests/fixtures/make_llama_fixture.py wrote gives the same
//! logits, loss, gradients and ten losses on every layout, and goes back as it came.
#![allow(missing_docs, reason = "a test")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::print_stdout, reason = "figures for --nocapture")]
#![allow(clippy::allow_attributes, reason = "the lines above")]

use device::cpu::{self, CpuOptions, Lanes};
use device::{Arena, Device, Dtype, HostWork, Lane, Plan, Rank, Tensor, World};
use engine::checkpoint::Checkpoint;
use engine::config::Config;
use engine::generate::{Trained, next_logits};
use engine::hugging_face::{Folder, Numbers, Pretrained, export};
use engine::run::{Message, RunOptions, train};
use engine::train::build::{build, shape};
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tensor_parallel::{BatchTensors, Gpt, GptShape, HeadBuckets, Part, Pass, Split};
use tests::{config, dataset_of_windows};

/// Samples, tokens of one, vocabulary of the fixtures.
const B: usize = 6;
const T: usize = 12;
const V: usize = 61;

const MODELS: [&str; 5] = ["llama3", "llama-linear", "mistral", "qwen2", "qwen3"];

/// (tensor, data, sequence)
const LAYOUTS: [(usize, usize, bool); 7] = [
    (1, 1, false),
    (2, 1, false),
    (2, 1, true),
    (1, 3, false),
    (2, 2, true),
    // Three ranks share each head of keys and values.
    (6, 1, false),
    (6, 2, true),
];

fn folder(model: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("fixtures/hf-{model}-tiny"))
}

/// What transformers calls a tensor of ours.
fn theirs(ours: &str) -> String {
    let name = match ours {
        "wte" => return "model.embed_tokens.weight".into(),
        "head" => return "lm_head.weight".into(),
        "ln_f.weight" => return "model.norm.weight".into(),
        _ => ours.replacen("h.", "model.layers.", 1),
    };
    let name = name.replace("ln_1", "input_layernorm").replace("ln_2", "post_attention_layernorm");
    let name = name.replace("mlp.proj", "mlp.down").replace("attn.proj", "attn.o");
    let mut parts: Vec<String> = name.split('.').map(str::to_owned).collect();
    if parts[3] == "attn" {
        parts[3] = "self_attn".into();
    }
    if ["q", "k", "v", "o", "gate", "up", "down"].contains(&parts[4].as_str()) {
        parts[4] += "_proj";
    }
    parts.join(".")
}

/// The tensors of all safetensors files of a folder, widened.
struct Fixture(BTreeMap<String, Vec<f64>>);

impl Fixture {
    fn load(model: &str) -> Self {
        let mut all = BTreeMap::new();
        for entry in std::fs::read_dir(folder(model)).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|e| e == "safetensors") {
                let bytes = std::fs::read(path).unwrap();
                let file = SafeTensors::deserialize(&bytes).unwrap();
                all.extend(file.tensors().iter().map(|(name, t)| (name.clone(), widened(t))));
            }
        }
        Self(all)
    }

    fn get(&self, name: &str) -> &[f64] {
        self.0.get(name).unwrap_or_else(|| panic!("the fixture has no {name}"))
    }
}

fn widened(t: &safetensors::tensor::TensorView<'_>) -> Vec<f64> {
    let data = t.data();
    match t.dtype() {
        safetensors::Dtype::F64 => {
            data.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).collect()
        }
        safetensors::Dtype::I32 => {
            data.as_chunks().0.iter().map(|b| f64::from(i32::from_le_bytes(*b))).collect()
        }
        safetensors::Dtype::BF16 => {
            let number = |b: &[u8; 2]| f64::from(half::bf16::from_le_bytes(*b));
            data.as_chunks().0.iter().map(number).collect()
        }
        _ => data.as_chunks().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect(),
    }
}

fn worst(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    // NaN must not pass for "no difference".
    let apart = |(g, w): (&f64, &f64)| if g.is_finite() { (g - w).abs() } else { f64::INFINITY };
    got.iter().zip(want).map(apart).fold(0.0, f64::max)
}

fn fp32(model: &str, sets: &[String], seed: u64) -> Config {
    let from = folder(model);
    let ron = format!(
        "(model: (from: {from:?}, seq_len: {T}), precision: Fp32,
          optimizer: (lr: 1e-2, beta2: 0.95, weight_decay: 0.1, clip: 1.0), schedule: (kind: Constant),
          offload: (tile_elements: 1024), device: Cpu(threads: 1), batch: (global: {B}),
          data: (train: \"unused\", format: U16), train: (steps: 10, seed: {seed}, checkpoint_every: 10))"
    );
    config(&ron, sets)
}

fn pretrained(model: &str) -> Arc<Pretrained> {
    let from = Folder::open(&folder(model)).unwrap_or_else(|e| panic!("{e}"));
    let gpt = build(&fp32(model, &[], 0)).gpt;
    Arc::new(Pretrained::new(from, &gpt).unwrap_or_else(|e| panic!("{e}")))
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

/// Handles of a pass, the same on every rank.
struct Handles {
    plan: Arc<Plan>,
    gpt: Gpt,
    batch: BatchTensors,
    buckets: Vec<Tensor>,
    loss: Tensor,
    scale: Tensor,
}

impl Handles {
    fn new(config: &Config, head_rows: usize) -> Self {
        let shape = GptShape { head_rows, ..shape(config) };
        let mut plan = Plan::default();
        let gpt = Gpt::plan(&mut plan, &shape, 64);
        let mut tensor = |name: String, dtype, len| {
            plan.tensor((Arena::Device, "of the test"), name, dtype, (1, len))
        };
        let [tokens, targets, order] = ["tokens", "targets", "order"]
            .map(|name| tensor(name.into(), Dtype::I32, shape.tokens()));
        let bucket =
            |s: &tensor_parallel::SegmentLayout| tensor(s.name.clone(), Dtype::F32, s.padded);
        let buckets = gpt.segments().iter().map(bucket).collect();
        let [loss, scale] = ["loss", "scale"].map(|name| tensor(name.into(), Dtype::F64, 1));
        let batch = BatchTensors { tokens, targets, order };
        Self { plan: Arc::new(plan), gpt, batch, buckets, loss, scale }
    }

    /// Logits, loss and buckets of a rank.
    fn rank(&self, fixture: &Fixture, world: &Arc<World>, rank: Rank) -> [Vec<Vec<f64>>; 3] {
        let shape = self.gpt.shape();
        let scratch = cpu::ScratchFloats::new(T, shape.head_dim, shape.hidden, shape.widest_sum());
        let options = CpuOptions {
            lanes: Lanes::Inline,
            memory_limit: u64::MAX,
            host: device::HostPlace::default(),
            scratch,
            work: HostWork::default(),
        };
        let dev = cpu::open(rank, &self.plan, world, &options).unwrap();
        self.gpt.write_constants(&dev).unwrap();
        self.write(fixture, &dev);
        let (gpt, batch) = (&self.gpt, &self.batch);
        let pass = Pass { dropout_key: 0, first_token: 0, training: true, set: 0 };
        let bucket = |part| self.buckets[gpt.segment(part)];
        gpt.embed(&dev, &pass, batch);
        (0..shape.layers).for_each(|layer| gpt.block_forward(&dev, &pass, layer));
        let mut logits = Vec::new();
        for row in (0..shape.tokens()).step_by(shape.head_rows) {
            let rows = row..(row + shape.head_rows).min(shape.tokens());
            gpt.project(&dev, &pass, rows.clone());
            logits.extend(read(&dev, gpt.logits().rows(0..rows.len())));
        }
        let buckets = HeadBuckets { final_norm: bucket(Part::FinalNorm), head: bucket(gpt.head()) };
        gpt.loss_backward(&dev, (&pass, batch), self.loss, self.scale, buckets);
        for layer in (0..shape.layers).rev() {
            gpt.block_backward(&dev, &pass, layer, bucket(Part::Block(layer)));
        }
        gpt.embed_backward(&dev, &pass, batch, bucket(Part::Embedding));
        let used = |(bucket, s): (&Tensor, &tensor_parallel::SegmentLayout)| {
            read(&dev, bucket.slice(0..s.len))
        };
        let buckets = self.buckets.iter().zip(gpt.segments()).map(used).collect();
        let loss = read(&dev, self.loss);
        dev.finish().unwrap();
        [vec![logits], vec![loss], buckets]
    }

    fn write(&self, fixture: &Fixture, dev: &Device) {
        let Rank { tp, tp_size, dp, .. } = dev.rank();
        for (index, layout) in self.gpt.segments().iter().enumerate() {
            let mut flat = vec![0.0; layout.padded];
            for param in &layout.params {
                let whole = fixture.get(&theirs(&param.name));
                for run in param.runs(tp, tp_size) {
                    let local = param.range.start + run.local.start;
                    let n = run.local.len();
                    flat[local..local + n].copy_from_slice(&whole[run.global..run.global + n]);
                }
            }
            dev.write(self.gpt.params(index), &|i| flat[i]).unwrap();
        }
        dev.write(self.scale, &|_| 1.0).unwrap();
        let tokens = self.gpt.shape().tokens();
        let part = |name: &str| fixture.get(name)[dp * tokens..][..tokens].to_vec();
        let (inputs, targets) = (part("tokens"), part("targets"));
        let mut order: Vec<usize> = (0..tokens).collect();
        order.sort_by_key(|&i| inputs[i] as i64);
        dev.write(self.batch.tokens, &|i| inputs[i]).unwrap();
        dev.write(self.batch.targets, &|i| targets[i]).unwrap();
        dev.write(self.batch.order, &|i| order[i] as f64).unwrap();
    }
}

fn read(dev: &Device, t: Tensor) -> Vec<f64> {
    dev.sync(dev.record(Lane::Compute)).unwrap();
    let mut out = vec![0.0; t.len()];
    dev.read(t, &mut out).unwrap();
    out
}

/// Logits (B T, V), loss, and gradients by our names, put together from all ranks.
fn pass(
    fixture: &Fixture,
    (config, head_rows): (&Config, usize),
    (tp, dp): (usize, usize),
) -> (Vec<f64>, f64, BTreeMap<String, Vec<f64>>) {
    let handles = Handles::new(config, head_rows);
    let world = World::new(tp, dp, Duration::from_secs(60));
    let ranks: Vec<Rank> = Rank::all(tp, dp).collect();
    let parts: Vec<[Vec<Vec<f64>>; 3]> = std::thread::scope(|scope| {
        let run = |rank: &Rank| {
            let (h, w, rank) = (&handles, &world, *rank);
            scope.spawn(move || h.rank(fixture, w, rank))
        };
        let threads: Vec<_> = ranks.iter().map(run).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    let (mut logits, mut loss, mut grads) = (vec![f64::NAN; B * T * V], 0.0, BTreeMap::new());
    let columns = handles.gpt.shape().vocab_per_rank();
    for (rank, [local, losses, buckets]) in ranks.iter().zip(&parts) {
        let first_row = rank.dp * B / dp * T;
        for (r, row) in local[0].chunks(columns).enumerate() {
            for (c, x) in row.iter().enumerate().filter(|(c, _)| rank.tp * columns + c < V) {
                logits[(first_row + r) * V + rank.tp * columns + c] = *x;
            }
        }
        if rank.tp == 0 {
            loss += losses[0][0] / (B * T) as f64;
        }
        for (layout, bucket) in handles.gpt.segments().iter().zip(buckets) {
            for param in &layout.params {
                let whole = grads.entry(param.name.clone());
                let whole = whole.or_insert_with(|| vec![0.0; param.global_len()]);
                let copies = dp
                    * match param.split {
                        Split::Replicated => tp,
                        Split::SharedRows { ranks } => ranks,
                        Split::Rows | Split::ThreeRows | Split::Columns => 1,
                    };
                for run in param.runs(rank.tp, tp) {
                    let local = &bucket[param.range.start..][run.local];
                    let into = whole[run.global..].iter_mut().zip(local);
                    into.for_each(|(w, x)| *w += x / copies as f64);
                }
            }
        }
    }
    (logits, loss, grads)
}

#[test]
fn logits_loss_and_every_gradient_are_those_of_transformers_on_every_layout() {
    for model in MODELS {
        let fixture = Fixture::load(model);
        // With recomputation the logits go through the tokens in runs, the last of them shorter.
        let ways = |l| [(l, "None", 1000), (l, "Block", 7)];
        for (layout, more, head_rows) in LAYOUTS.into_iter().flat_map(ways) {
            let mut sets = grid(layout);
            sets.push(format!("recompute={more}"));
            let config = fp32(model, &sets, 0);
            let (logits, loss, grads) = pass(&fixture, (&config, head_rows), (layout.0, layout.1));
            let apart = worst(&logits, fixture.get("logits"));
            assert!(apart < 1e-5, "{model} {sets:?}: logits are {apart:e} apart");
            let apart = (loss - fixture.get("loss")[0]).abs();
            assert!(apart < 1e-6, "{model} {sets:?}: the loss is {apart:e} off");
            let known = fixture.0.keys().filter(|name| name.starts_with("grad.")).count();
            assert_eq!(grads.len(), known, "{model}");
            for (name, grad) in &grads {
                let want = fixture.get(&format!("grad.{}", theirs(name)));
                let size = want.iter().fold(0.0f64, |most, x| most.max(x.abs()));
                let (apart, most) = (worst(grad, want), 5e-6 * size);
                assert!(apart < most, "{model} {sets:?}: {name} is {apart:e} apart of {size:e}");
            }
        }
    }
}

#[test]
fn ten_adamw_steps_from_a_folder_are_those_of_pytorch_on_every_layout() {
    for model in MODELS {
        let fixture = Fixture::load(model);
        let from = pretrained(model);
        let mut all: Vec<Vec<String>> = LAYOUTS.map(grid).into();
        for more in ["offload.accumulate=Host", "offload.optimizer=Device", "host_checkpoints=true"]
        {
            let sets = ["batch.micro=2", "recompute=Block", "parallel.tensor=2", more];
            all.push(sets.map(str::to_owned).into());
        }
        if std::env::var_os(ON_GPUS).is_some() {
            // One GPU, TP 2 x DP 2 with sequence parallelism, and TP 6.
            all = [LAYOUTS[0], LAYOUTS[4], LAYOUTS[5]].map(grid).into();
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
            let options =
                RunOptions { pretrained: Some(Arc::clone(&from)), ..RunOptions::default() };
            let (mut losses, mut norms) = (Vec::new(), Vec::new());
            let outcome = train(&config, &build(&config), &data, &options, &mut |message| {
                if let Message::Step(step) = message {
                    losses.push(step.loss);
                    norms.push(step.grad_norm);
                }
            });
            outcome.unwrap();
            let apart = worst(&losses, fixture.get("train.losses"));
            let of_norms = worst(&norms, fixture.get("train.norms"));
            println!("{model} {sets:?}: losses {apart:.1e}, norms {of_norms:.1e} apart");
            assert!(apart < 2e-5 && of_norms < 2e-5, "{model} {sets:?}: {apart:e} {of_norms:e}");
        }
    }
}

/// Set: trains on GPUs.
const ON_GPUS: &str = "ONEBOX_PARITY_ON_GPUS";

/// The steps once more, in a child process under the fake driver. (On a machine with a GPU, scripts/gpu-check sets the
/// variable itself.)
#[test]
fn steps_on_gpus_are_those_of_pytorch() {
    if std::env::var_os(ON_GPUS).is_some() {
        return;
    }
    let cache = tempfile::tempdir().unwrap();
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    let name = "ten_adamw_steps_from_a_folder_are_those_of_pytorch_on_every_layout";
    command.args(["--exact", name, "--nocapture"]).env(ON_GPUS, "1");
    command.env("LD_LIBRARY_PATH", fake_cuda::library_folder());
    command.env("XDG_CACHE_HOME", cache.path()).env("FAKECUDA_DEVICES", "4");
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let passed = output.status.success() && said.contains("1 passed");
    assert!(passed, "{said}{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn the_next_token_of_a_folder_is_that_of_transformers() {
    for model in MODELS {
        let fixture = Fixture::load(model);
        let config = fp32(model, &[], 0);
        let folder = folder(model);
        let mut tokens: Vec<String> = fixture.get("prompt").iter().map(f64::to_string).collect();
        // As long as a sample is.
        for want in &fixture.get("greedy")[..T - 5] {
            let trained = (Trained::Folder(&folder), None);
            let logits = next_logits(&config, trained, &tokens.join(" ")).unwrap();
            let best = (0..V).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap();
            assert_eq!(best, *want as usize, "{model} after {tokens:?}");
            tokens.push(best.to_string());
        }
    }
}

/// The weights after ten steps, as a file.
fn weights(model: &str, sets: &[&str]) -> Vec<u8> {
    let run = tempfile::tempdir().unwrap();
    let fixture = Fixture::load(model);
    let windows: Vec<&[f64]> = fixture.get("train.tokens").chunks(T + 1).collect();
    let (seed, data) = dataset_of_windows(&windows, B, V, run.path());
    let sets: Vec<String> = sets.iter().map(ToString::to_string).collect();
    let config = fp32(model, &sets, seed);
    let path = run.path().join("weights.safetensors");
    let options = RunOptions {
        pretrained: Some(pretrained(model)),
        weights: Some(path.clone()),
        ..RunOptions::default()
    };
    train(&config, &build(&config), &data, &options, &mut |_| ()).unwrap();
    std::fs::read(path).unwrap()
}

#[test]
fn when_and_where_the_update_runs_changes_no_bit() {
    for model in ["qwen3", "qwen2"] {
        let some = |mode, more: &[&str]| {
            let base = ["batch.micro=2", "recompute=Block", mode, "parallel.tensor=2"];
            weights(model, &[&base, more].concat())
        };
        let overlapped = some("offload.update=Overlapped", &[]);
        assert_eq!(some("offload.update=Serial", &[]), overlapped);
        for more in ["offload.first_forward=3", "offload.lookahead=4", "host_checkpoints=true"] {
            assert_eq!(some("offload.update=Overlapped", &[more]), overlapped, "{model} {more}");
        }
        for more in ["offload.optimizer=Device", "offload.bucket_elements=1024"] {
            assert_eq!(some("offload.update=Overlapped", &[more]), overlapped, "{model} {more}");
        }
        // A late update replaces what was last read first, the output projection among it.
        let delayed = "offload.update=Delayed(after_step: 2)";
        let late = some(delayed, &[]);
        assert_ne!(late, overlapped);
        for more in ["offload.lookahead=4", "offload.tile_elements=1024", "host_checkpoints=true"] {
            assert_eq!(some(delayed, &[more]), late, "{model} {more}");
        }
    }
}

#[test]
fn a_folder_goes_back_as_it_came() {
    for model in MODELS {
        let run = tempfile::tempdir().unwrap();
        let fixture = Fixture::load(model);
        let windows: Vec<&[f64]> = fixture.get("train.tokens").chunks(T + 1).collect();
        let (seed, data) = dataset_of_windows(&windows, B, V, run.path());
        let sets = [grid((2, 2, false)), vec!["optimizer.lr=1e-30".into()]].concat();
        let config = fp32(model, &sets, seed);
        let options = RunOptions {
            pretrained: Some(pretrained(model)),
            checkpoints: Some(run.path().join("checkpoints")),
            ..RunOptions::default()
        };
        let built = build(&config);
        train(&config, &built, &data, &options, &mut |_| ()).unwrap();
        let path = run.path().join("checkpoints/step-00000010");
        let checkpoint = Checkpoint::open(&path, 10).unwrap();
        let out = run.path().join("out");
        export(&checkpoint, (&config, &built), None, &out, (Numbers::F32, u64::MAX))
            .unwrap_or_else(|e| panic!("{e}"));
        let bytes = std::fs::read(out.join("model.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let ours: BTreeMap<String, Vec<f64>> =
            file.tensors().iter().map(|(name, t)| (name.clone(), widened(t))).collect();
        for (name, values) in &ours {
            assert!(values == fixture.get(name), "{model}: {name}");
        }
        // In bf16 each number is the nearest: what was bf16 before stays as it is.
        let half = run.path().join("half");
        let most = (Numbers::Bf16, 40_000);
        export(&checkpoint, (&config, &built), None, &half, most).unwrap_or_else(|e| panic!("{e}"));
        for entry in std::fs::read_dir(&half).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|e| e != "safetensors") {
                continue;
            }
            let bytes = std::fs::read(path).unwrap();
            for (name, t) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
                assert_eq!(t.dtype(), safetensors::Dtype::BF16);
                let rounded = |x: &f64| f64::from(half::bf16::from_f32(*x as f32));
                let want: Vec<f64> = fixture.get(&name).iter().map(rounded).collect();
                assert!(widened(&t) == want, "{model}: {name}");
            }
        }
        // The exported folder describes the same model.
        let again = engine::config::load_str(
            "(model: (from: \"out\"), data: (train: \"x\", format: U16), train: (steps: 1))",
            "a.ron",
            run.path(),
            &[],
        );
        let again = again.unwrap_or_else(|e| panic!("{e}")).config.model;
        let kept = |m: &engine::config::ModelConfig| {
            (
                m.layers,
                m.hidden,
                m.heads,
                m.kv_heads,
                m.head_dim,
                m.ffn_hidden,
                m.rope,
                m.tied,
                m.qk_norm,
            )
        };
        assert_eq!(kept(&again), kept(&config.model), "{model}");
    }
}
