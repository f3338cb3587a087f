//! Against PyTorch: what tests/fixtures/make_gpt2_fixture.py wrote, on one rank and on grids of ranks.
#![allow(missing_docs, reason = "a test")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "helpers of tests")]
#![allow(clippy::print_stdout, reason = "figures for --nocapture")]
#![allow(clippy::allow_attributes, reason = "the lines above")]

use device::cpu::{self, CpuOptions, Lanes};
use device::{Arena, Device, Dtype, Lane, Plan, Rank, Tensor};
use device::{HostWork, World};
use engine::run::{Message, RunOptions, StepReport, Weights, train};
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tensor_parallel::{BatchTensors, Gpt, GptShape, HeadBuckets, Part as Segment, Parts, Pass};
use tests::{config, dataset_of_windows};

/// Vocabulary, tokens of a sample, hidden, samples, steps of the fixture.
const V: usize = 61;
const T: usize = 16;
const C: usize = 32;
const B: usize = 4;
const STEPS: usize = 10;
const SEQ_LEN: u64 = T as u64;

/// (tensor, data, sequence): one rank, grids, and more ranks than fill the vocabulary evenly.
const LAYOUTS: [(usize, usize, bool); 5] =
    [(1, 1, false), (1, 2, false), (2, 2, false), (2, 2, true), (4, 1, true)];

/// The fixture's tensors by name, widened.
struct Fixture(BTreeMap<String, Vec<f64>>);

impl Fixture {
    fn read(bytes: &[u8]) -> Self {
        let file = SafeTensors::deserialize(bytes).unwrap();
        let widen = |t: &safetensors::tensor::TensorView<'_>| -> Vec<f64> {
            let data = t.data();
            match t.dtype() {
                safetensors::Dtype::F64 => {
                    data.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).collect()
                }
                safetensors::Dtype::I32 => {
                    data.as_chunks().0.iter().map(|b| f64::from(i32::from_le_bytes(*b))).collect()
                }
                _ => data.as_chunks().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect(),
            }
        };
        Self(file.tensors().iter().map(|(name, t)| (name.clone(), widen(t))).collect())
    }

    fn load() -> Self {
        Self::read(include_bytes!("../fixtures/gpt2-tiny.safetensors"))
    }

    fn get(&self, name: &str) -> &[f64] {
        self.0.get(name).unwrap_or_else(|| panic!("the fixture has no {name}"))
    }

    /// Names of the parameters.
    fn params(&self) -> impl Iterator<Item = &str> {
        self.0.keys().filter_map(|name| name.strip_prefix("grad."))
    }
}

fn worst(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    // NaN must not pass for "no difference".
    let apart = |(g, w): (&f64, &f64)| if g.is_finite() { (g - w).abs() } else { f64::INFINITY };
    got.iter().zip(want).map(apart).fold(0.0, f64::max)
}

fn largest(x: &[f64]) -> f64 {
    x.iter().fold(0.0, |most, x| most.max(x.abs()))
}

/// What one pass over the fixture's batch gives, put together from all ranks.
struct Passed {
    logits: Vec<f64>,
    loss: f64,
    grads: BTreeMap<String, Vec<f64>>,
}

/// What a rank reads back: its logits, its loss, and its gradient of each segment.
struct Part {
    rank: Rank,
    logits: Vec<f64>,
    loss: f64,
    buckets: Vec<Vec<f64>>,
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

fn handles(tp_size: usize, dp_size: usize, sequence: bool) -> Handles {
    let shape = GptShape {
        parts: Parts::GPT2,
        layers: 2,
        hidden: C,
        heads: 4,
        kv_heads: 4,
        head_dim: C / 4,
        seq_len: T,
        vocab: V,
        ffn_hidden: 4 * C,
        micro_batch: B / dp_size,
        tp_size,
        sequence,
        recompute: false,
        partition_checkpoints: false,
        keep: tensor_parallel::Keep::Device,
        checkpoint_sets: 1,
        head_rows: 1024,
        dtype: Dtype::F32,
        partial_dtype: Dtype::F32,
        dropout: 0.0,
        init_std: 0.0,
    };
    let mut plan = Plan::default();
    let gpt = Gpt::plan(&mut plan, &shape, 64);
    let mut tensor = |name: String, dtype, len| {
        plan.tensor((Arena::Device, "of the test"), name, dtype, (1, len))
    };
    let [tokens, targets, order] =
        ["tokens", "targets", "order"].map(|name| tensor(name.into(), Dtype::I32, shape.tokens()));
    let bucket = |s: &tensor_parallel::SegmentLayout| tensor(s.name.clone(), Dtype::F32, s.padded);
    let buckets = gpt.segments().iter().map(bucket).collect();
    let [loss, scale] = ["loss", "scale"].map(|name| tensor(name.into(), Dtype::F64, 1));
    let batch = BatchTensors { tokens, targets, order };
    Handles { plan: Arc::new(plan), gpt, batch, buckets, loss, scale }
}

impl Handles {
    fn rank(&self, fixture: &Fixture, world: &Arc<World>, rank: Rank) -> Part {
        let options = CpuOptions {
            lanes: Lanes::Inline,
            memory_limit: u64::MAX,
            host: device::HostPlace::default(),
            scratch: cpu::ScratchFloats::new(T, C / 4, C, 4 * C),
            work: HostWork::default(),
        };
        let dev = cpu::open(rank, &self.plan, world, &options).unwrap();
        self.write_params(fixture, &dev);
        self.write_batch(fixture, &dev);
        let (gpt, batch, layers) = (&self.gpt, &self.batch, self.gpt.shape().layers);
        let pass = Pass { dropout_key: 0, first_token: 0, training: true, set: 0 };
        gpt.embed(&dev, &pass, batch);
        (0..layers).for_each(|layer| gpt.block_forward(&dev, &pass, layer));
        gpt.project(&dev, &pass, 0..gpt.shape().tokens());
        let logits = read(&dev, gpt.logits());
        gpt.loss_backward(
            &dev,
            (&pass, batch),
            self.loss,
            self.scale,
            HeadBuckets {
                final_norm: self.buckets[gpt.segment(Segment::FinalNorm)],
                head: self.buckets[gpt.segment(Segment::Embedding)],
            },
        );
        let backward = |layer| {
            gpt.block_backward(
                &dev,
                &pass,
                layer,
                self.buckets[gpt.segment(Segment::Block(layer))],
            );
        };
        (0..layers).rev().for_each(backward);
        gpt.embed_backward(&dev, &pass, batch, self.buckets[gpt.segment(Segment::Embedding)]);
        dev.sync(dev.record(Lane::Compute)).unwrap();
        let used = |(bucket, s): (&Tensor, &tensor_parallel::SegmentLayout)| {
            read(&dev, bucket.slice(0..s.len))
        };
        let buckets = self.buckets.iter().zip(gpt.segments()).map(used).collect();
        let loss = read(&dev, self.loss)[0];
        dev.finish().unwrap();
        Part { rank, logits, loss, buckets }
    }

    fn write_params(&self, fixture: &Fixture, dev: &Device) {
        let Rank { tp, tp_size, .. } = dev.rank();
        for (index, layout) in self.gpt.segments().iter().enumerate() {
            let mut flat = vec![0.0; layout.padded];
            for param in &layout.params {
                let whole = fixture.get(&param.name);
                for run in param.runs(tp, tp_size) {
                    let local = param.range.start + run.local.start;
                    let n = run.local.len();
                    flat[local..local + n].copy_from_slice(&whole[run.global..run.global + n]);
                }
            }
            dev.write(self.gpt.params(index), &|i| flat[i]).unwrap();
        }
        dev.write(self.scale, &|_| 1.0).unwrap();
    }

    fn write_batch(&self, fixture: &Fixture, dev: &Device) {
        let samples = self.gpt.shape().micro_batch;
        let first = dev.rank().dp * samples;
        let at = |i: usize, ahead: usize| {
            fixture.get("tokens")[(first + i / T) * (T + 1) + i % T + ahead]
        };
        let mut order: Vec<usize> = (0..samples * T).collect();
        order.sort_by_key(|&i| at(i, 0) as i64);
        dev.write(self.batch.tokens, &|i| at(i, 0)).unwrap();
        dev.write(self.batch.targets, &|i| at(i, 1)).unwrap();
        dev.write(self.batch.order, &|i| order[i] as f64).unwrap();
    }

    /// Mean over the data-parallel ranks of what the tensor-parallel ones hold together.
    fn whole(&self, parts: &[Part]) -> Passed {
        let mut logits = vec![f64::NAN; B * T * V];
        let mut grads = BTreeMap::new();
        let columns = self.gpt.shape().vocab_per_rank();
        for Part { rank, logits: local, buckets, .. } in parts {
            let first_row = rank.dp * B / rank.dp_size * T;
            for (r, row) in local.chunks(columns).enumerate() {
                for (c, x) in row.iter().enumerate().filter(|(c, _)| rank.tp * columns + c < V) {
                    logits[(first_row + r) * V + rank.tp * columns + c] = *x;
                }
            }
            for (layout, bucket) in self.gpt.segments().iter().zip(buckets) {
                for param in &layout.params {
                    let whole = grads
                        .entry(param.name.clone())
                        .or_insert_with(|| vec![0.0; param.global_len()]);
                    let replicated = param.split == tensor_parallel::Split::Replicated;
                    let copies = rank.dp_size * if replicated { rank.tp_size } else { 1 };
                    for run in param.runs(rank.tp, rank.tp_size) {
                        let local = &bucket[param.range.start..][run.local];
                        let into = whole[run.global..].iter_mut().zip(local);
                        into.for_each(|(w, x)| *w += x / copies as f64);
                    }
                }
            }
        }
        let of_replicas = parts.iter().filter(|p| p.rank.tp == 0).map(|p| p.loss);
        Passed { logits, loss: of_replicas.sum::<f64>() / (B * T) as f64, grads }
    }
}

fn read(dev: &Device, t: Tensor) -> Vec<f64> {
    dev.sync(dev.record(Lane::Compute)).unwrap();
    let mut out = vec![0.0; t.len()];
    dev.read(t, &mut out).unwrap();
    out
}

fn pass(fixture: &Fixture, (tp, dp, sequence): (usize, usize, bool)) -> Passed {
    let handles = handles(tp, dp, sequence);
    let world = World::new(tp, dp, Duration::from_secs(60));
    let parts: Vec<Part> = std::thread::scope(|scope| {
        let run = |rank| {
            scope.spawn({
                let (h, w) = (&handles, &world);
                move || h.rank(fixture, w, rank)
            })
        };
        let threads: Vec<_> = Rank::all(tp, dp).map(run).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    handles.whole(&parts)
}

#[test]
fn logits_loss_and_every_gradient_are_those_of_pytorch_on_every_layout() {
    let fixture = Fixture::load();
    for layout in LAYOUTS {
        let Passed { logits, loss, grads } = pass(&fixture, layout);
        let apart = worst(&logits, fixture.get("logits"));
        assert!(apart < 1e-5, "{layout:?}: logits are {apart:e} apart");
        let apart = (loss - fixture.get("loss_f64")[0]).abs();
        assert!(apart < 1e-6, "{layout:?}: the loss is {apart:e} off");
        assert_eq!(grads.len(), fixture.params().count());
        for (name, grad) in &grads {
            let want = fixture.get(&format!("grad.{name}"));
            // Each against its own size: a wrong factor in a small tensor must not hide behind a large one.
            let (apart, tolerance) = (worst(grad, want), 5e-6 * largest(want));
            assert!(
                apart < tolerance,
                "{layout:?}: {name} is {apart:e} apart, {tolerance:e} allowed"
            );
        }
    }
}

struct Trained {
    losses: Vec<f64>,
    norms: Vec<f64>,
    weights: Fixture,
}

/// Ten steps of the engine, from the fixture's weights, on its windows.
fn trained(fixture: &Fixture, optimizer: &str, sets: &[String]) -> Trained {
    let folder = tempfile::tempdir().unwrap();
    let windows: Vec<&[f64]> = fixture.get("train.tokens").chunks(T + 1).collect();
    let (seed, data) = dataset_of_windows(&windows, B, V, folder.path());
    let ron = format!(
        "(model: (layers: 2, hidden: {C}, heads: 4, seq_len: {SEQ_LEN}, vocab: {V}), precision: Fp32,
          optimizer: ({optimizer}), schedule: (kind: Constant), offload: (tile_elements: 1024),
          device: Cpu(threads: 1), data: (train: \"unused\", format: U16),
          train: (steps: {STEPS}, seed: {seed}))"
    );
    let on_gpus = std::env::var_os(ON_GPUS).map(|_| "device=Cuda".to_owned());
    let config = config(&ron, &[sets, on_gpus.as_slice()].concat());
    let whole = |name: &str| fixture.get(name).iter().map(|x| *x as f32).collect();
    let initial: Weights = fixture.params().map(|name| (name.into(), whole(name))).collect();
    let path = folder.path().join("weights.safetensors");
    let initial = Some(Arc::new(initial));
    let options = RunOptions { initial, weights: Some(path.clone()), ..RunOptions::default() };
    let mut steps: Vec<StepReport> = Vec::new();
    let built = engine::train::build::build(&config);
    train(&config, &built, &data, &options, &mut |message| {
        if let Message::Step(step) = message {
            steps.push(step);
        }
    })
    .unwrap();
    Trained {
        losses: steps.iter().map(|s| s.loss).collect(),
        norms: steps.iter().map(|s| s.grad_norm).collect(),
        weights: Fixture::read(&std::fs::read(path).unwrap()),
    }
}

/// Set: trains on GPUs.
const ON_GPUS: &str = "ONEBOX_PARITY_ON_GPUS";

/// The runs of this file once more, in a child process under the fake driver. (On a machine with a GPU,
/// scripts/gpu-check sets the variable itself.)
#[test]
fn steps_on_gpus_are_those_of_pytorch() {
    if std::env::var_os(ON_GPUS).is_some() {
        return;
    }
    let program = std::env::current_exe().unwrap();
    let cache = tempfile::tempdir().unwrap();
    for test in ["ten_adamw_steps", "ten_sgd_steps"] {
        let mut command = std::process::Command::new(&program);
        let name = format!("{test}_are_those_of_pytorch_on_every_layout");
        command.args(["--exact", &name, "--nocapture"]).env(ON_GPUS, "1");
        command.env("LD_LIBRARY_PATH", fake_cuda::library_folder());
        command.env("XDG_CACHE_HOME", cache.path()).env("FAKECUDA_DEVICES", "4");
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        let passed = output.status.success() && said.contains("1 passed");
        assert!(passed, "{said}{}", String::from_utf8_lossy(&output.stderr));
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
        // The quick selection: one GPU, TP 2 x DP 2 with sequence parallelism.
        all = vec![all.swap_remove(0), layout(LAYOUTS[3])];
    }
    all
}

#[test]
fn ten_adamw_steps_are_those_of_pytorch_on_every_layout() {
    let fixture = Fixture::load();
    let adamw = "lr: 1e-2, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1, clip: 1.0";
    for sets in settings() {
        let got = trained(&fixture, adamw, &sets);
        let losses = worst(&got.losses, fixture.get("train.losses"));
        let norms = worst(&got.norms, fixture.get("train.grad_norms"));
        assert!(losses < 2e-5 && norms < 2e-5, "{sets:?}: losses {losses:e}, norms {norms:e}");
        for name in fixture.params() {
            let mut got = got.weights.get(name).to_vec();
            let mut want = fixture.get(&format!("train.final.{name}")).to_vec();
            if name.ends_with("attn.qkv.bias") {
                // Of the keys' bias the exact gradient is zero: Adam made steps of pure rounding.
                got.drain(C..2 * C);
                want.drain(C..2 * C);
            }
            let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
            let apart = norm(&mut got.iter().zip(&want).map(|(g, w)| g - w))
                / norm(&mut want.iter().copied());
            assert!(apart < 1e-3, "{sets:?}: {name} is {apart:e} of its norm apart");
        }
    }
}

#[test]
fn ten_sgd_steps_are_those_of_pytorch_on_every_layout() {
    // SGD does not divide by the gradient's size, so it shows every wrong scale.
    let fixture = Fixture::load();
    for sets in settings() {
        let got = trained(&fixture, "kind: Sgd, lr: 0.1, weight_decay: 0.0, clip: None", &sets);
        let losses = worst(&got.losses, fixture.get("sgd.losses"));
        let norms = worst(&got.norms, fixture.get("sgd.grad_norms"));
        assert!(losses < 5e-6 && norms < 5e-6, "{sets:?}: losses {losses:e}, norms {norms:e}");
    }
}
