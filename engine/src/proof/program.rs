//! The program of the start-up proof: a micro-batch through one block and the head, forward and
//! backward, with the widths of the model and a few tokens. If some blocks have gated delta nets, the
//! program has one block of each kind.

use config::{Config, Packing};
use device::Lane::{Compute, D2h, H2d};
use device::{Arena, BLOCK, Device, Dtype, Error, Event, Op, Plan, Rank, Tensor, ViewMut, random};
use std::sync::Arc;
use tensor_parallel::SegmentRole::{Block, Embedding, FinalNorm};
use tensor_parallel::{
    BatchTensors, Decoder, DecoderShape, HeadBuckets, Init, LossTensors, MicrobatchContext, Param,
    Ring, SegmentLayout, SegmentRole, Split, TrainedParams,
};

/// Tokens in a tile of the kernels of attention.
const TILE: usize = 64;
/// Flat segments are multiples of this number of elements.
const ALIGN: usize = 64;

/// Handles of the program, the same on every rank.
#[derive(Debug)]
pub(super) struct ProofProgram {
    plan: Arc<Plan>,
    decoder: Decoder,
    /// Tokens, targets, order, and starts of documents if the run packs them, (3 or 4, B T) I32: on
    /// the host and on the device.
    batch: [Tensor; 2],
    /// The block whose parameters and gradients are copied.
    copied: usize,
    /// Parameters and gradients of this block on the host.
    on_host: [Tensor; 2],
    /// Gradients of the block, of the final norm, and of the output projection, by segment.
    buckets: Vec<Option<Tensor>>,
    loss: Tensor,
    scale: Tensor,
}

/// The shape of the program: one block of the model, or one with attention and one with a gated delta
/// net, with fewer tokens. A long sample keeps its remainder after whole tiles, unless sequence
/// parallelism or fp8 needs another multiple.
pub(super) fn cut(whole: &DecoderShape) -> DecoderShape {
    let tiles = 2 * TILE + whole.seq_len % TILE;
    let seq_len = if whole.seq_len <= 3 * TILE { whole.seq_len } else { tiles };
    // Each rank has an equal part of the rows, and fp8 needs rows in multiples of 16.
    let ranks = if whole.sequence { whole.tp_size } else { 1 };
    let unit = ranks * if whole.fp8 { 16 } else { 1 };
    let (seq_len, micro_batch) = match seq_len.next_multiple_of(unit) {
        fitting if fitting <= whole.seq_len => (fitting, whole.micro_batch.min(2)),
        _ => (whole.seq_len, whole.micro_batch),
    };
    let tokens = micro_batch * seq_len;
    // Runs of the head after the first one add to gradients.
    let has_runs = whole.tokens() > whole.head_rows;
    // A block with experts has all kernels of the others, but for those of one MLP.
    let of = |delta| {
        let all = whole.layer_kinds.iter().copied();
        let mut all = all.filter(|kind| whole.kinds[*kind].delta == delta).peekable();
        let first = all.peek().copied();
        all.find(|kind| whole.kinds[*kind].experts).or(first)
    };
    let (layers, layer_kinds) = match (of(false), of(true)) {
        (Some(attention), Some(delta)) => (2, vec![attention, delta]),
        (Some(kind), None) | (None, Some(kind)) if whole.experts.is_some() => (1, vec![kind]),
        _ => (1, whole.layer_kinds.clone()),
    };
    // The kernels of frozen parameters are among those of trained ones, but for the sum of columns that a
    // trained bias of a frozen matrix needs.
    let trained = match &whole.trained {
        TrainedParams::AllBut(_) => TrainedParams::All,
        others => others.clone(),
    };
    DecoderShape {
        trained,
        layers,
        layer_kinds,
        seq_len,
        micro_batch,
        checkpoint_slots: 1,
        ring: Ring::NONE,
        head_rows: if has_runs { tokens.div_ceil(2) } else { whole.head_rows },
        ..whole.clone()
    }
}

impl ProofProgram {
    /// Plans the program of `config`.
    pub(super) fn new(config: &Config) -> Self {
        let shape = cut(&layout::build::shape(config));
        let mut plan = Plan::default();
        let decoder = Decoder::plan(&mut plan, &shape, ALIGN);
        let rows = if config.data.packing == Packing::Documents { 4 } else { 3 };
        let batch =
            [(Arena::Pinned, "batch_host"), (Arena::Device, "batch")].map(|(arena, name)| {
                plan.tensor((arena, "batches"), name, Dtype::I32, (rows, shape.tokens()))
            });
        // The first block may have no adapter.
        let segment = |layer: &usize| &decoder.segments()[decoder.segment(Block(*layer))];
        let copied = (0..shape.layers).find(|layer| segment(layer).len > 0);
        let copied = copied.unwrap_or_else(|| unreachable!("a block of some kind is trained"));
        let SegmentLayout { whole, len, .. } = *segment(&copied);
        let on_host = [("params_host", whole), ("bucket_host", len)].map(|(name, elements)| {
            plan.tensor((Arena::Pinned, "staging"), name, shape.dtype, (1, elements))
        });
        let head = decoder.head();
        let bucket = |role: SegmentRole| {
            let layout = &decoder.segments()[decoder.segment(role)];
            let at = (Arena::Device, "gradient buckets");
            let name = format!("{}.bucket", layout.name);
            let is_used = matches!(role, Block(_) | FinalNorm) || role == head;
            is_used.then(|| plan.tensor(at, name, shape.dtype, (1, layout.padded)))
        };
        let buckets = decoder.segment_roles().map(bucket).collect();
        let [loss, scale] = ["loss", "scale"]
            .map(|name| plan.tensor((Arena::Device, "losses"), name, Dtype::F64, (1, 1)));
        Self { plan: Arc::new(plan), decoder, batch, copied, on_host, buckets, loss, scale }
    }

    pub(super) const fn plan(&self) -> &Arc<Plan> {
        &self.plan
    }

    pub(super) const fn shape(&self) -> &DecoderShape {
        self.decoder.shape()
    }

    fn bucket(&self, role: SegmentRole) -> Tensor {
        let bucket = self.buckets[self.decoder.segment(role)];
        bucket.unwrap_or_else(|| unreachable!("{role:?} has a bucket, or no gradient"))
    }

    /// Runs the program from its inputs to the gradients of the block on the host.
    ///
    /// # Errors
    /// The errors of the device.
    pub(super) fn run(&self, dev: &Device) -> Result<(), Error> {
        self.write(dev)?;
        let copied = self.decoder.segment(Block(self.copied));
        let [params_host, bucket_host] = self.on_host;
        let [batch_host, batch] = self.batch;
        let (layout, params) = (&self.decoder.segments()[copied], self.decoder.params(copied));
        dev.submit(H2d, Op::Copy { src: batch_host, dst: batch });
        // Nothing is in the padding between trained and frozen parameters.
        let spans = [&layout.params, &layout.frozen].into_iter().filter_map(|all| {
            let (first, last) = all.first().zip(all.last())?;
            Some(first.range.start..last.range.end)
        });
        for span in spans {
            let (src, dst) = (params_host.slice(span.clone()), params.slice(span));
            dev.submit(H2d, Op::Copy { src, dst });
        }
        dev.follow(Compute, H2d);
        let row = |i: usize| {
            let row = batch.rows(i..i + 1);
            row.reshape(1, row.len())
        };
        let tensors = BatchTensors { tokens: row(0), targets: row(1), order: row(2) };
        let starts = (batch.shape().0 == 4).then(|| row(3));
        let pass = MicrobatchContext {
            dropout_key: 1,
            first_token: 0,
            training: true,
            starts,
            targets: tensors.targets,
            counted_share: 1.0,
            slot: 0,
        };
        let decoder = &self.decoder;
        decoder.reset_expert_loads(dev);
        decoder.embed(dev, &pass, &tensors);
        let mut copies = decoder.activation_copies();
        let layers = self.shape().layers;
        (0..layers).for_each(|layer| decoder.block_forward(dev, &pass, layer, &mut copies));
        let buckets =
            HeadBuckets { final_norm: self.bucket(FinalNorm), head: self.bucket(decoder.head()) };
        let loss = LossTensors { loss: self.loss, scale: self.scale };
        decoder.loss_backward(dev, &pass, &tensors, loss, buckets);
        let mut input = Event::default();
        decoder.begin_backward(dev, &(0..1), &mut copies);
        for layer in (0..layers).rev() {
            let bucket = self.bucket(Block(layer));
            decoder.block_backward(dev, &pass, layer, bucket, &mut input, &mut copies);
        }
        let bucket = self.bucket(Block(self.copied));
        // It completes the gradient of a projection that is the token table.
        if decoder.head() == Embedding {
            decoder.embed_backward(dev, &pass, &tensors, self.bucket(Embedding));
        }
        dev.follow(D2h, Compute);
        dev.submit(D2h, Op::Copy { src: bucket.slice(0..bucket_host.len()), dst: bucket_host });
        dev.sync_all()
    }

    /// Writes the inputs: parameters as at the start of training, tokens of the whole vocabulary.
    fn write(&self, dev: &Device) -> Result<(), Error> {
        self.decoder.write_constants(dev)?;
        for (segment, role) in self.decoder.segment_roles().enumerate() {
            let own = self.decoder.params(segment);
            let target = if role == Block(self.copied) { self.on_host[0] } else { own };
            for param in self.decoder.segments()[segment].all_params() {
                let values = ParamValues::of(param, dev.rank());
                let fill = |first: usize, views: &mut [ViewMut<'_>]| {
                    views.iter_mut().for_each(|view| values.fill(first, view));
                    Ok(())
                };
                dev.write_runs(&[target.slice(param.range.clone())], &fill)?;
            }
        }
        let batch = self.batch_values();
        dev.write(self.batch[0], &|i| batch[i] as f64)?;
        // Gradients in F16 would be too small without a scale.
        let scale = if self.shape().dtype == Dtype::F16 { 1024.0 } else { 1.0 };
        dev.write(self.scale, &|_| scale)
    }

    /// Tokens, targets, order, and starts of documents.
    fn batch_values(&self) -> Vec<i64> {
        let (tokens, seq_len) = (self.shape().tokens(), self.shape().seq_len);
        let vocab = self.shape().vocab as u64;
        let token = |key| move |i: usize| random::below(key, i as u64, vocab) as i64;
        let inputs: Vec<i64> = (0..tokens).map(token(1)).collect();
        // Some targets do not count, as in chats.
        let targets = (0..tokens).map(|i| if i % 7 == 3 { -1 } else { token(2)(i) });
        let mut order: Vec<usize> = (0..tokens).collect();
        order.sort_by_key(|i| inputs[*i]);
        // Each sample has two documents.
        let second = seq_len * 5 / 8;
        let start = |i: usize| if i % seq_len >= second { second as i64 } else { 0 };
        let starts = (0..tokens).filter(|_| self.batch[0].shape().0 == 4).map(start);
        let order = order.iter().map(|i| *i as i64);
        inputs.iter().copied().chain(targets).chain(order).chain(starts).collect()
    }
}

/// Values of a rank's part of a parameter: uniform around `centre`, as wide as its initial values.
#[derive(Clone, Copy, Debug)]
struct ParamValues {
    key: u64,
    centre: f32,
    /// Largest distance from `centre`.
    spread: f32,
}

impl ParamValues {
    fn of(param: &Param, rank: Rank) -> Self {
        // Ranks that hold the same part hold the same values.
        let part = match param.split {
            Split::Replicated => 0,
            Split::SharedRows { ranks } => rank.tp / ranks,
            Split::Rows | Split::ThreeRows | Split::Columns => rank.tp,
        };
        let key = random::key(random::key_of_name(0, &param.name), part as u64);
        let (centre, spread) = match param.init {
            Init::Normal(deviation) => (0.0, deviation * 3f64.sqrt()),
            Init::Constant(value) => (value, 0.1),
            Init::LogUniform { low, high } => {
                let [low, high] = [low, high].map(f64::ln);
                (f64::midpoint(low, high), (high - low) / 2.0)
            }
        };
        Self { key, centre: centre as f32, spread: spread as f32 }
    }

    /// Sets the elements of `view`; the first has the index `first`.
    fn fill(self, first: usize, view: &mut ViewMut<'_>) {
        let mut block = [0.0f32; BLOCK];
        for at in (0..view.len()).step_by(BLOCK) {
            let values = &mut block[..BLOCK.min(view.len() - at)];
            for (i, value) in values.iter_mut().enumerate() {
                let bits = random::bits32(self.key, (first + at + i) as u64);
                *value = self.centre + self.spread * (bits as f32 / 2_147_483_648.0 - 1.0);
            }
            view.store(at, values);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn shape(sets: &[&str]) -> DecoderShape {
        const CONFIG: &str = "(device: Cuda, model: (family: Llama, layers: 9, hidden: 256, heads: 8, \
            kv_heads: 4, seq_len: 4096, ffn_hidden: 512, vocab: 1000), precision: Bf16, batch: (micro: 4, global: 8), \
            train: (steps: 1))";
        let sets: Vec<String> = sets.iter().map(|set| (*set).to_owned()).collect();
        let loaded = config::load_str(CONFIG, "test.ron", Path::new("."), &sets);
        layout::build::shape(&loaded.unwrap_or_else(|e| panic!("{e}")).config)
    }

    #[test]
    fn rows_are_cut_and_widths_are_not() {
        let whole = shape(&[]);
        let one = cut(&whole);
        assert_eq!((one.layers, one.micro_batch, one.seq_len), (1, 2, 128));
        assert_eq!(DecoderShape { layers: 9, micro_batch: 4, seq_len: 4096, ..one }, whole);
        // A tile that is not full stays so, and short samples stay as they are.
        let rows = |sets: &[&str]| (cut(&shape(sets)).micro_batch, cut(&shape(sets)).seq_len);
        assert_eq!(rows(&["model.seq_len=1000", "batch.micro=1"]), (1, 128 + 1000 % 64));
        assert_eq!(rows(&["model.seq_len=100"]), (2, 100));
        // Rows of each rank in multiples of 16.
        let split = ["parallel.tensor=4", "parallel.sequence=true", "precision=Fp8"];
        let length = ["model.seq_len=1040"];
        assert_eq!(rows(&[&split[..], &length].concat()), (2, 192));
        // A sample of one tile is too short for it.
        assert_eq!(rows(&[&split[..], &["model.seq_len=48"]].concat()), (4, 48));
    }

    #[test]
    fn a_program_has_a_block_with_attention_and_one_with_a_gated_delta_net() {
        let net = "model.delta_net=(key_heads: 2, value_heads: 4)";
        let both = cut(&shape(&["model.layer_pattern=DDF", net]));
        let kinds: Vec<bool> = (0..both.layers).map(|layer| both.kind(layer).delta).collect();
        assert_eq!(kinds, [false, true]);
        let all = cut(&shape(&["model.layer_pattern=D", net]));
        assert_eq!((all.layers, all.kind(0).delta), (1, true));
        let experts =
            "model.experts=(count: 4, per_token: 2, ffn_hidden: 64, dense_layers: [0, 1, 2, 5])";
        let both = cut(&shape(&["model.layer_pattern=DDF", net, experts]));
        let kinds = (0..both.layers).map(|layer| both.kind(layer));
        let kinds: Vec<[bool; 2]> = kinds.map(|kind| [kind.delta, kind.experts]).collect();
        assert_eq!(kinds, [[false, true], [true, true]]);
        let one = cut(&shape(&[experts]));
        assert_eq!((one.layers, one.kind(0).experts), (1, true));
    }

    #[test]
    fn values_depend_on_the_part_and_not_on_the_cuts() {
        let param = |split| Param {
            name: "h.0.w".into(),
            is_vector: false,
            global: (8, 8),
            local: (4, 8),
            split,
            init: Init::Normal(0.5),
            range: 0..32,
        };
        let values = |split, tp: usize, first: usize| {
            let rank = Rank { tp, tp_size: 2, dp: 0, dp_size: 1 };
            let mut out = vec![0.0f32; 2000];
            let mut view = ViewMut::F32(&mut out[first..]);
            ParamValues::of(&param(split), rank).fill(first, &mut view);
            out
        };
        let whole = values(Split::Rows, 0, 0);
        assert_eq!(whole[700..], values(Split::Rows, 0, 700)[700..]);
        assert_ne!(whole, values(Split::Rows, 1, 0));
        assert_eq!(values(Split::Replicated, 0, 0), values(Split::Replicated, 1, 0));
        let shared = Split::SharedRows { ranks: 2 };
        assert_eq!(values(shared, 0, 0), values(shared, 1, 0));
        let squares: f32 = whole.iter().map(|x| x * x).sum();
        assert!((squares / 2000.0 - 0.25).abs() < 0.02, "{squares}");
    }
}
