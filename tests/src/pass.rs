//! One forward and backward pass of a model, assembled from all ranks, and fixtures for it.

use device::cpu::{self, CpuOptions, Lanes};
use device::{
    Arena, Communicator, Device, Dtype, Event, HostPlace, HostWork, Lane, Plan, Rank, Tensor,
};
use layout::build::scratch_floats;
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tensor_parallel::{
    BatchTensors, Decoder, DecoderShape, HeadBuckets, LossTensors, MicrobatchContext,
    SegmentLayout, SegmentRole, Split,
};

/// Tensors by name, converted to f64.
#[derive(Debug, Default)]
pub struct Fixture(pub BTreeMap<String, Vec<f64>>);

impl Fixture {
    /// Adds the tensors of a safetensors file.
    ///
    /// # Panics
    /// If `bytes` are no safetensors file.
    pub fn add(&mut self, bytes: &[u8]) {
        let file = SafeTensors::deserialize(bytes).expect("a fixture is a safetensors file");
        self.0.extend(file.tensors().iter().map(|(name, t)| (name.clone(), widened(t))));
    }

    /// The values of a tensor.
    ///
    /// # Panics
    /// If the fixture has no tensor of that name.
    pub fn get(&self, name: &str) -> &[f64] {
        self.0.get(name).unwrap_or_else(|| panic!("the fixture has no {name}"))
    }
}

/// The values of a tensor as f64.
///
/// # Panics
/// If the tensor has a type that no fixture has.
pub fn widened(t: &safetensors::tensor::TensorView<'_>) -> Vec<f64> {
    fn each<const N: usize>(data: &[u8], number: impl Fn([u8; N]) -> f64) -> Vec<f64> {
        data.as_chunks().0.iter().map(|b| number(*b)).collect()
    }
    let data = t.data();
    match t.dtype() {
        safetensors::Dtype::F64 => each(data, f64::from_le_bytes),
        safetensors::Dtype::F32 => each(data, |b| f32::from_le_bytes(b).into()),
        safetensors::Dtype::I32 => each(data, |b| i32::from_le_bytes(b).into()),
        // The upper half of an fp32 number.
        safetensors::Dtype::BF16 => each(data, |[a, b]| f32::from_le_bytes([0, 0, a, b]).into()),
        other => panic!("no fixture has {other:?}"),
    }
}

/// The largest difference; infinite if a value of `got` is not finite.
///
/// # Panics
/// If the lengths differ.
pub fn worst(got: &[f64], want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let difference =
        |(g, w): (&f64, &f64)| if g.is_finite() { (g - w).abs() } else { f64::INFINITY };
    got.iter().zip(want).map(difference).fold(0.0, f64::max)
}

/// Inputs of a pass, for all samples and ranks: tokens and targets (B T), and parameters by name.
pub struct PassInputs<'a> {
    /// Input tokens.
    pub tokens: &'a [f64],
    /// Next tokens.
    pub targets: &'a [f64],
    /// Position in the sample where each token's document starts. `None`: one document per sample.
    pub starts: Option<&'a [f64]>,
    /// Returns the values of a whole parameter by name.
    pub param: &'a (dyn Fn(&str) -> &'a [f64] + Sync),
}

impl std::fmt::Debug for PassInputs<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Given").finish_non_exhaustive()
    }
}

/// Results of a pass.
#[derive(Debug)]
pub struct PassResult {
    /// Logits (B T, V).
    pub logits: Vec<f64>,
    /// Mean loss over all tokens.
    pub loss: f64,
    /// Gradients of whole trained tensors by name: the mean over data-parallel ranks.
    pub grads: BTreeMap<String, Vec<f64>>,
    /// [`Decoder::expert_loads`] of the first rank; empty without experts.
    pub expert_loads: Vec<f64>,
}

/// Handles of a pass, the same on every rank.
struct Handles {
    plan: Arc<Plan>,
    gpt: Decoder,
    batch: BatchTensors,
    starts: Tensor,
    buckets: Vec<Tensor>,
    loss: Tensor,
    scale: Tensor,
}

/// Results of one rank: its logits, its loss, its gradient of each segment, and the load of its
/// experts.
struct RankResult {
    rank: Rank,
    logits: Vec<f64>,
    loss: f64,
    buckets: Vec<Vec<f64>>,
    expert_loads: Vec<f64>,
}

/// Runs a pass of the model of `shape`, in fp32, on `dp` replicas.
///
/// # Panics
/// If a rank fails.
pub fn pass(shape: &DecoderShape, dp: usize, given: &PassInputs<'_>) -> PassResult {
    let handles = Handles::plan(shape);
    let world = Communicator::new(shape.tp_size, dp, Duration::from_secs(60));
    let parts: Vec<RankResult> = std::thread::scope(|scope| {
        let run = |rank| {
            let (handles, world) = (&handles, &world);
            scope.spawn(move || handles.rank(given, world, rank))
        };
        let threads: Vec<_> = Rank::all(shape.tp_size, dp).map(run).collect();
        threads.into_iter().map(|t| t.join().expect("a rank passes")).collect()
    });
    handles.whole(&parts)
}

impl Handles {
    fn plan(shape: &DecoderShape) -> Self {
        let mut plan = Plan::default();
        let gpt = Decoder::plan(&mut plan, shape, 64);
        let mut tensor = |name: &str, dtype, len| {
            plan.tensor((Arena::Device, "of the test"), name, dtype, (1, len))
        };
        let [tokens, targets, order, starts] = ["tokens", "targets", "order", "starts"]
            .map(|name| tensor(name, Dtype::I32, shape.tokens()));
        let bucket = |s: &SegmentLayout| tensor(&s.name, Dtype::F32, s.padded);
        let buckets = gpt.segments().iter().map(bucket).collect();
        let [loss, scale] = ["loss", "scale"].map(|name| tensor(name, Dtype::F64, 1));
        let batch = BatchTensors { tokens, targets, order };
        Self { plan: Arc::new(plan), gpt, batch, starts, buckets, loss, scale }
    }

    fn rank(&self, given: &PassInputs<'_>, world: &Arc<Communicator>, rank: Rank) -> RankResult {
        let (gpt, batch, shape) = (&self.gpt, &self.batch, self.gpt.shape());
        let options = CpuOptions {
            lanes: Lanes::Inline,
            memory_limit: u64::MAX,
            host: HostPlace::default(),
            scratch: scratch_floats(shape),
            work: HostWork::default(),
        };
        let dev = cpu::open(rank, &self.plan, world, &options).expect("a device opens");
        gpt.write_constants(&dev).expect("constants are written");
        self.write(given, &dev);
        let starts = given.starts.map(|_| self.starts);
        let counted = given.targets.iter().filter(|target| **target >= 0.0).count();
        let pass = MicrobatchContext {
            dropout_key: 0,
            first_token: (rank.dp * shape.tokens()) as u64,
            training: true,
            starts,
            targets: batch.targets,
            counted_share: counted as f64 / given.targets.len() as f64,
            slot: 0,
        };
        let bucket = |part| self.buckets[gpt.segment(part)];
        gpt.reset_expert_loads(&dev);
        gpt.embed(&dev, &pass, batch);
        let mut copies = gpt.activation_copies();
        (0..shape.layers).for_each(|layer| gpt.block_forward(&dev, &pass, layer, &mut copies));
        let mut logits = Vec::new();
        for row in (0..shape.tokens()).step_by(shape.head_rows) {
            let rows = row..(row + shape.head_rows).min(shape.tokens());
            gpt.project(&dev, &pass, rows.clone());
            logits.extend(read(&dev, gpt.logits().rows(0..rows.len())));
        }
        let buckets =
            HeadBuckets { final_norm: bucket(SegmentRole::FinalNorm), head: bucket(gpt.head()) };
        let loss = LossTensors { loss: self.loss, scale: self.scale };
        gpt.loss_backward(&dev, &pass, batch, loss, buckets);
        let mut input = Event::default();
        gpt.begin_backward(&dev, &(0..1), &mut copies);
        for layer in (0..shape.layers).rev() {
            let bucket = bucket(SegmentRole::Block(layer));
            gpt.block_backward(&dev, &pass, layer, bucket, &mut input, &mut copies);
        }
        gpt.embed_backward(&dev, &pass, batch, bucket(SegmentRole::Embedding));
        let used = |(bucket, s): (&Tensor, &SegmentLayout)| read(&dev, bucket.slice(0..s.len));
        let buckets = self.buckets.iter().zip(gpt.segments()).map(used).collect();
        let loss = read(&dev, self.loss)[0];
        let expert_loads = gpt.expert_loads().map_or_else(Vec::new, |loads| read(&dev, loads));
        dev.finish().expect("a device ends");
        RankResult { rank, logits, loss, buckets, expert_loads }
    }

    fn write(&self, given: &PassInputs<'_>, dev: &Device) {
        let Rank { tp, tp_size, dp, .. } = dev.rank();
        let write = |t, value: &dyn Fn(usize) -> f64| dev.write(t, &|i| value(i)).expect("written");
        let mut flats = Vec::new();
        for (index, layout) in self.gpt.segments().iter().enumerate() {
            let mut flat = vec![0.0; layout.whole];
            for param in layout.all_params() {
                let whole = (given.param)(&param.name);
                for run in param.runs(tp, tp_size) {
                    let local = param.range.start + run.local.start;
                    let n = run.local.len();
                    flat[local..local + n].copy_from_slice(&whole[run.global..run.global + n]);
                }
            }
            write(self.gpt.params(index), &|i| flat[i]);
            flats.push(flat);
        }
        let correction = |segment: usize, first: usize, values: &mut [f32]| {
            let given = flats[segment][first..].iter();
            values.iter_mut().zip(given).for_each(|(value, x)| *value = *x as f32);
            Ok::<(), device::Error>(())
        };
        self.gpt.write_router_corrections(dev, correction).expect("corrections are written");
        write(self.scale, &|_| 1.0);
        let tokens = self.gpt.shape().tokens();
        let own = dp * tokens..(dp + 1) * tokens;
        let (inputs, targets) = (&given.tokens[own.clone()], &given.targets[own.clone()]);
        let mut order: Vec<usize> = (0..tokens).collect();
        order.sort_by_key(|&i| inputs[i] as i64);
        write(self.batch.tokens, &|i| inputs[i]);
        write(self.batch.targets, &|i| targets[i]);
        if let Some(starts) = given.starts {
            write(self.starts, &|i| starts[own.start + i]);
        }
        write(self.batch.order, &|i| order[i] as f64);
    }

    fn whole(&self, parts: &[RankResult]) -> PassResult {
        let shape = self.gpt.shape();
        let (vocab, columns, tokens) = (shape.vocab, shape.vocab_per_rank(), shape.tokens());
        let dp = parts.len() / shape.tp_size;
        let mut logits = vec![f64::NAN; dp * tokens * vocab];
        let mut grads = BTreeMap::new();
        for RankResult { rank, logits: local, buckets, .. } in parts {
            // A rank may hold only padding.
            let first = (rank.tp * columns).min(vocab);
            for (r, row) in local.chunks(columns).enumerate() {
                let real = &row[..(vocab - first).min(columns)];
                let at = (rank.dp * tokens + r) * vocab + first;
                logits[at..at + real.len()].copy_from_slice(real);
            }
            for (layout, bucket) in self.gpt.segments().iter().zip(buckets) {
                for param in &layout.params {
                    let whole = grads
                        .entry(param.name.clone())
                        .or_insert_with(|| vec![0.0; param.global_len()]);
                    let holders = match param.split {
                        Split::Replicated => rank.tp_size,
                        Split::SharedRows { ranks } => ranks,
                        Split::Rows | Split::ThreeRows | Split::Columns => 1,
                    };
                    for run in param.runs(rank.tp, rank.tp_size) {
                        let local = &bucket[param.range.start..][run.local];
                        let into = whole[run.global..].iter_mut().zip(local);
                        into.for_each(|(w, x)| *w += x / (dp * holders) as f64);
                    }
                }
            }
        }
        let of_replicas = parts.iter().filter(|p| p.rank.tp == 0).map(|p| p.loss);
        let loss = of_replicas.sum::<f64>() / (dp * tokens) as f64;
        PassResult { logits, loss, grads, expert_loads: parts[0].expert_loads.clone() }
    }
}

fn read(dev: &Device, t: Tensor) -> Vec<f64> {
    dev.sync(dev.record(Lane::Compute)).expect("a lane gets there");
    let mut out = vec![0.0; t.len()];
    dev.read(t, &mut out).expect("a tensor is read");
    out
}
