//! The shape of a model, split over the ranks of a group, and the settings of a micro-batch.

use crate::activation_tiers::ActivationTiers;
use crate::delta_shape::DeltaShape;
pub use crate::experts_shape::{Balance, ExpertsShape, SigmoidShape};
use crate::params::Init;
use crate::rotary::Rope;
use crate::trained_params::TrainedParams;
use device::{Device, Dropout, Dtype, Gate, Heads, Scores, Tensor, VocabShard, random};

/// The activations that a block recomputes in the backward pass instead of keeping them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Recompute {
    /// No activations.
    None,
    /// The outputs of norms and of the MLP's activation: they are large and cheap. Attention never
    /// keeps its scores, which are also large and cheap (arXiv 2205.05198, section 5).
    Selective,
    /// All activations of the block from its input, except the MLP's last linear.
    Block,
}

/// Place of the blocks' inputs until the backward pass needs them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CheckpointHome {
    /// On the device.
    Device,
    /// In host memory; copied down during the next block, and up during backward of the block
    /// above.
    Host,
    /// As `Host`, but Compute waits for every copy, as in DeepSpeed's CPU checkpointing, to
    /// compare.
    HostBlocking,
    /// Not kept: no backward pass follows.
    None,
}

/// Places of the norms of a block's branches. A branch f is attention or the MLP.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NormPlace {
    /// x + f(norm(x)).
    Before,
    /// x + norm(f(norm(x))) (Gemma 2 and 3).
    Around,
    /// x + norm(f(x)) (OLMo 2 and 3).
    After,
}

/// The elements that a norm of queries and keys joins.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum QkNorm {
    /// The elements of one head; all heads share a gain (Qwen3).
    Heads,
    /// The elements of all heads of all ranks; each has a gain of its own (OLMo 2).
    Width,
}

/// A kind of layers: layers of one kind differ only in their parameters.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerKind {
    /// W: number of keys that a query sees, its own key among them. `None`: all keys of its
    /// document up to its own.
    pub window: Option<usize>,
    /// Rotation of queries and keys by their positions. `None`: they are not rotated.
    pub rope: Option<Rope>,
    /// Whether the layer has the experts of [`DecoderShape::experts`] instead of one MLP.
    pub experts: bool,
    /// Whether the layer has the gated delta net of [`DecoderShape::delta`] instead of attention.
    pub delta: bool,
}

impl LayerKind {
    /// Full attention without rotation, and one MLP.
    pub const PLAIN: Self = Self { window: None, rope: None, experts: false, delta: false };
}

/// The choice of a decoder's parts, for example GPT-2 or Llama.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Architecture {
    /// Whether norms are RMSNorm with a gain; otherwise layer norm with gain and bias.
    pub rms_norm: bool,
    /// Epsilon of every norm, added to the variance or to the mean square.
    pub norm_epsilon: f64,
    /// Number that norms add to each gain: 1 for Gemma, whose gains start at 0.
    pub norm_offset: f64,
    /// Places of the norms of a block's branches.
    pub norm_place: NormPlace,
    /// Whether a learned row for each position is added to the embedding.
    pub learned_positions: bool,
    /// Whether q, k and v are one tensor in checkpoints, with the same number of heads each.
    pub joined_qkv: bool,
    /// Whether the projections to q, k and v have biases.
    pub qkv_bias: bool,
    /// Whether the projection back from the heads has a bias.
    pub proj_bias: bool,
    /// Norm of q and k before their rotation.
    pub qk_norm: Option<QkNorm>,
    /// Whether each head has a score without a key and a value in the sum of its softmax.
    pub attention_sinks: bool,
    /// Whether attention's output is multiplied by the sigmoid of a gate, before the projection back
    /// (Qwen3.5).
    pub output_gate: bool,
    /// Activation of the gate of an MLP without biases. `None`: an MLP with GELU and biases.
    pub gate: Option<Gate>,
    /// Factor of q k'. `None`: 1 / sqrt(D).
    pub attention_scale: Option<f64>,
    /// c: attention scores s become c tanh(s / c).
    pub score_cap: Option<f64>,
    /// c: logits z become c tanh(z / c).
    pub logit_cap: Option<f64>,
    /// Factor of the embedding's rows.
    pub embedding_scale: f64,
    /// Factor of what a branch adds to the residual stream.
    pub residual_scale: f64,
    /// Factor of the logits, before their cap.
    pub logit_scale: f64,
    /// Whether the output projection is the token table.
    pub tied: bool,
    /// Whether initial weights of layers that add to the residual stream are divided by the square
    /// root of the number of additions (GPT-2, section 2.3).
    pub scaled_residuals: bool,
}

impl Architecture {
    /// The architecture of GPT-2.
    pub const GPT2: Self = Self {
        rms_norm: false,
        norm_epsilon: 1e-5,
        norm_offset: 0.0,
        norm_place: NormPlace::Before,
        learned_positions: true,
        joined_qkv: true,
        qkv_bias: true,
        proj_bias: true,
        qk_norm: None,
        attention_sinks: false,
        output_gate: false,
        gate: None,
        attention_scale: None,
        score_cap: None,
        logit_cap: None,
        embedding_scale: 1.0,
        residual_scale: 1.0,
        logit_scale: 1.0,
        tied: true,
        scaled_residuals: true,
    };

    /// Whether branches have a norm at their start.
    pub(crate) fn norms_inputs(&self) -> bool {
        self.norm_place != NormPlace::After
    }

    /// Whether branches have a norm at their end.
    pub(crate) fn norms_outputs(&self) -> bool {
        self.norm_place != NormPlace::Before
    }
}

/// All settings that determine tensor shapes.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderShape {
    /// Choice of the model's parts.
    pub architecture: Architecture,
    /// L: number of blocks.
    pub layers: usize,
    /// The different kinds of layers.
    pub kinds: Vec<LayerKind>,
    /// For each layer, the index of its kind in `kinds`.
    pub layer_kinds: Vec<usize>,
    /// C: hidden channels.
    pub hidden: usize,
    /// H: heads of all ranks; a multiple of `tp_size` and of `kv_heads`.
    pub heads: usize,
    /// K: heads of keys and values of all ranks; a multiple or a divisor of `tp_size`.
    pub kv_heads: usize,
    /// D: elements of a head; even with rotary positions.
    pub head_dim: usize,
    /// T: tokens of a sample.
    pub seq_len: usize,
    /// Number of tokens in the vocabulary, without padding.
    pub vocab: usize,
    /// F: inner width of the MLP. A model with experts in all layers does not use it.
    pub ffn_hidden: usize,
    /// The experts of the layers whose kind has experts. They need a gate.
    pub experts: Option<ExpertsShape>,
    /// The gated delta net of the layers whose kind has one.
    pub delta: Option<DeltaShape>,
    /// B: samples of a micro-batch.
    pub micro_batch: usize,
    /// t: number of tensor-parallel ranks.
    pub tp_size: usize,
    /// Whether tokens outside the linears are split over the ranks (sequence parallelism).
    pub sequence: bool,
    /// The activations that blocks recompute in the backward pass.
    pub recompute: Recompute,
    /// Blocks that do not recompute their activations, but keep them on the device or on the host.
    /// Needs [`Recompute::Block`].
    pub tiers: ActivationTiers,
    /// Whether each rank keeps only its share of a block's input. Needs [`Recompute::Block`]
    /// without `sequence`, which also splits the input.
    pub partition_checkpoints: bool,
    /// Place of the blocks' inputs. On the host each rank always keeps only its share. Needs
    /// [`Recompute::Block`].
    pub checkpoint_home: CheckpointHome,
    /// Number of micro-batches with saved block inputs at the same time; more than one only with
    /// [`Recompute::Block`].
    pub checkpoint_slots: usize,
    /// The parameters that stay on the device between their uses.
    pub ring: Ring,
    /// Number of tokens with logits in memory at the same time.
    pub head_rows: usize,
    /// Type of parameters, activations and gradients.
    pub dtype: Dtype,
    /// Whether the matmuls of blocks have fp8 operands; `dtype` must then have 16 bits.
    pub fp8: bool,
    /// Type of sums over the ranks.
    pub partial_dtype: Dtype,
    /// Dropout probability.
    pub dropout: f32,
    /// Standard deviation of the initial weights.
    pub init_std: f64,
    /// The parameters that are trained.
    pub trained: TrainedParams,
}

/// The parameters that stay on the device between their uses. The host has the other parameters,
/// and the caller prefetches them before each use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ring {
    /// Number of buffers that non-resident blocks use in turn: at least 2, or 0 if all parameters
    /// are resident. The token table and a separate output projection share one more buffer.
    pub buffers: usize,
    /// Number of resident blocks, spread evenly over all blocks.
    pub resident: usize,
}

impl Ring {
    /// All parameters are resident.
    pub const NONE: Self = Self { buffers: 0, resident: 0 };

    /// Whether block `layer` of `layers` blocks is resident.
    pub const fn is_resident(self, layer: usize, layers: usize) -> bool {
        self.buffers == 0 || (layer + 1) * self.resident / layers > layer * self.resident / layers
    }
}

/// Largest number of elements of all ranks' logits: 1 GiB in 16 bits.
const MOST_LOGITS: usize = 1 << 29;

/// Number of tokens with logits in memory at the same time, for a vocabulary of `vocab`. It depends
/// only on `vocab`, since gradients are rounded once for each run of this length.
pub const fn head_rows(vocab: usize) -> usize {
    let rows = MOST_LOGITS / vocab / 128 * 128;
    if rows < 128 { 128 } else { rows }
}

impl DecoderShape {
    /// Number of micro-batches that run backward through each block together.
    pub(crate) const fn backward_slots(&self) -> usize {
        if self.ring.buffers > 0 { self.checkpoint_slots } else { 1 }
    }

    /// The kind of block `layer`.
    pub fn kind(&self, layer: usize) -> &LayerKind {
        &self.kinds[self.layer_kinds[layer]]
    }

    /// The experts of block `layer`. `None`: the block has one MLP.
    pub fn experts_of(&self, layer: usize) -> Option<ExpertsShape> {
        let experts = self.experts.filter(|_| self.kind(layer).experts);
        assert_eq!(experts.is_some(), self.kind(layer).experts, "a kind has experts of a shape");
        experts
    }

    /// The gated delta net of block `layer`. `None`: the block has attention.
    pub fn delta_of(&self, layer: usize) -> Option<DeltaShape> {
        let delta = self.delta.filter(|_| self.kind(layer).delta);
        assert_eq!(delta.is_some(), self.kind(layer).delta, "a kind has a delta net of a shape");
        delta
    }

    /// Number of blocks with a gated delta net.
    pub(crate) fn delta_layers(&self) -> usize {
        (0..self.layers).filter(|layer| self.kind(*layer).delta).count()
    }

    /// Number of blocks with experts.
    pub fn expert_layers(&self) -> usize {
        (0..self.layers).filter(|layer| self.kind(*layer).experts).count()
    }

    /// Whether a block has one MLP.
    pub(crate) fn has_dense_layer(&self) -> bool {
        self.expert_layers() < self.layers
    }

    /// B T k: pairs of a token and one of its experts in a micro-batch.
    pub(crate) const fn pairs(&self, experts: &ExpertsShape) -> usize {
        self.tokens() * experts.per_token
    }

    /// How attention of block `layer` weighs keys. A window that holds all samples is no window.
    pub(crate) fn scores(&self, layer: usize) -> Scores {
        let (parts, plain) = (&self.architecture, Scores::of(self.head_dim));
        let scores = Scores {
            scale: parts.attention_scale.map_or(plain.scale, |scale| scale as f32),
            cap: parts.score_cap.map(|cap| cap as f32),
            window: self.kind(layer).window,
        };
        Scores { window: scores.window_in(self.seq_len), ..scores }
    }

    /// c: logits z become c tanh(z / c).
    pub(crate) fn logit_cap(&self) -> Option<f32> {
        self.architecture.logit_cap.map(|cap| cap as f32)
    }

    /// Initial values of most weights.
    pub(crate) const fn weight_init(&self) -> Init {
        Init::Normal(self.init_std)
    }

    /// Initial values of weights that add to the residual stream.
    pub(crate) fn residual_init(&self) -> Init {
        let additions =
            if self.architecture.scaled_residuals { 2.0 * self.layers as f64 } else { 1.0 };
        Init::Normal(self.init_std / additions.sqrt())
    }

    /// Number of ranks that hold the same head of keys and values; 1 if the heads are at least as
    /// many as the ranks.
    pub(crate) const fn kv_replicas(&self) -> usize {
        if self.tp_size > self.kv_heads { self.tp_size / self.kv_heads } else { 1 }
    }

    /// K/t, or 1 if ranks share heads: a rank's heads of keys and values.
    pub(crate) const fn kv_per_rank(&self) -> usize {
        self.kv_heads * self.kv_replicas() / self.tp_size
    }

    /// (H/t + 2 K/t) D: columns of a rank's q, k and v.
    pub(crate) const fn qkv_width(&self) -> usize {
        self.heads_width() + 2 * self.kv_per_rank() * self.head_dim
    }

    /// H D / t: columns of a rank's heads.
    pub(crate) const fn heads_width(&self) -> usize {
        self.heads * self.head_dim / self.tp_size
    }

    /// Columns of a rank's first matmul of the MLP: F/t, or 2 F/t with a gate.
    pub(crate) const fn inner_width(&self) -> usize {
        let one = self.ffn_hidden / self.tp_size;
        if self.architecture.gate.is_some() { 2 * one } else { one }
    }

    /// Name of the MLP's activation.
    pub(crate) const fn activation(&self) -> &'static str {
        match self.architecture.gate {
            Some(Gate::Silu | Gate::ClampedSilu { .. }) => "swiglu",
            Some(Gate::Gelu) => "geglu",
            None => "gelu",
        }
    }

    /// Elements of the longest gradient that an op computes though its parameter is frozen: of norms,
    /// and of the small parameters of a gated delta net.
    pub(crate) fn longest_unread(&self) -> usize {
        let of_heads = self.heads_width() + self.kv_per_rank() * self.head_dim;
        let of_delta = self.delta.map_or(0, |delta| {
            let heads = delta.heads(self.tp_size, self.seq_len);
            (heads.columns() * delta.taps).max(2 * heads.values).max(delta.value_dim)
        });
        of_heads.max(2 * self.head_dim).max(2 * self.hidden).max(of_delta)
    }

    /// Columns of the widest tensor with row sums. Computed for `tp_size` 1, so it does not depend
    /// on the number of ranks.
    pub fn widest_sum(&self) -> usize {
        let one = Self { tp_size: 1, ..self.clone() };
        one.qkv_width().max(one.inner_width()).max(one.hidden)
    }

    /// B T: tokens of a micro-batch.
    pub const fn tokens(&self) -> usize {
        self.micro_batch * self.seq_len
    }

    /// Tokens of one rank outside the linears.
    pub const fn rows(&self) -> usize {
        if self.sequence { self.tokens() / self.tp_size } else { self.tokens() }
    }

    /// V/t: a multiple of 8, so that tensor cores are fully used.
    pub const fn vocab_per_rank(&self) -> usize {
        self.vocab.div_ceil(8 * self.tp_size) * 8
    }

    /// FLOPs per token, forward and backward, without recomputation: 6 per parameter of the
    /// linears that a token passes (4 if they are frozen, also under adapters, which are small), plus
    /// attention's causal matmuls over the keys of each layer's window, or the gated delta rule. A
    /// token passes the router, k experts, and the shared MLP and its gate, of a layer with experts.
    pub fn model_flops_per_token(&self) -> f64 {
        let (c, d, l) = (self.hidden as f64, self.head_dim as f64, self.layers as f64);
        let (q, kv) = (self.heads as f64 * d, self.kv_heads as f64 * d);
        let gated = self.architecture.gate.is_some();
        let inner = self.ffn_hidden as f64 * if gated { 3.0 } else { 2.0 };
        let inner = match &self.experts {
            None => inner,
            Some(experts) => {
                let shared = experts.shared_hidden.unwrap_or(0);
                let chosen = 3.0 * (experts.per_token * experts.ffn_hidden + shared) as f64;
                let scores = (experts.count + usize::from(experts.shared_gate)) as f64;
                let sparse = self.expert_layers() as f64;
                ((l - sparse) * inner + sparse * (chosen + scores)) / l
            }
        };
        let gates = if self.architecture.output_gate { q } else { 0.0 };
        let (deltas, frozen) = (self.delta_layers() as f64, 2.0 * self.frozen_linears());
        let of_delta = self.delta.map_or(0, |delta| delta.linears(self.hidden)) as f64;
        let mixers = (l - deltas) * c * (2.0 * q + gates + 2.0 * kv) + deltas * of_delta;
        let linears = mixers + l * c * inner + self.vocab as f64 * c;
        let rule = self.delta.map_or(0.0, |delta| delta.heads(1, self.seq_len).flops(1));
        // Twice the mean number of keys of a query: T without a window.
        let keys = |layer| 2.0 * self.scores(layer).pairs(self.seq_len) / self.seq_len as f64;
        let of_linears = if self.adapters().is_some() { 4.0 } else { 6.0 };
        let attends = |layer: &usize| !self.kind(*layer).delta;
        let keys = (0..self.layers).filter(attends).map(keys).sum::<f64>();
        // The gradients of the rule take twice the FLOPs of its forward pass.
        of_linears * linears - frozen + 6.0 * keys * q + 3.0 * deltas * rule
    }

    pub(crate) fn heads_of(&self, dev: &Device) -> Heads {
        let (count, kv_count) = (self.heads / self.tp_size, self.kv_per_rank());
        let (first, total) = (dev.rank().tp * count, self.heads);
        Heads { count, kv_count, first, total, seq_len: self.seq_len }
    }

    pub(crate) fn vocab_shard(&self, dev: &Device) -> VocabShard {
        let columns = self.vocab_per_rank();
        let first = dev.rank().tp * columns;
        VocabShard { first, valid: self.vocab.saturating_sub(first).min(columns) }
    }
}

/// Settings that change from one micro-batch to the next.
#[derive(Clone, Copy, Debug)]
pub struct MicrobatchContext {
    /// Key of this step's dropout; unused when `training` is false.
    pub dropout_key: u64,
    /// Number of the micro-batch's first token in the step: the number of its first sample times T.
    pub first_token: u64,
    /// Whether dropout is on and block inputs are saved for a backward pass.
    pub training: bool,
    /// (B T) I32 on the device: the position in the sample at which each token's document starts.
    /// Present if samples hold several documents.
    pub starts: Option<Tensor>,
    /// (B T) I32 on the device: the targets. Tokens of padding have [`device::PADDING`].
    pub targets: Tensor,
    /// Share of the step's tokens whose target counts, 0 to 1. A balance loss is multiplied by it,
    /// since the caller divides the gradient of the step by it.
    pub counted_share: f64,
    /// Slot of the saved block inputs in the micro-batch's group, less than
    /// [`DecoderShape::checkpoint_slots`].
    pub slot: usize,
}

impl MicrobatchContext {
    pub(crate) fn dropout(
        &self,
        shape: &DecoderShape,
        layer: u64,
        site: u64,
        first_row: u64,
    ) -> Dropout {
        let key = random::key(random::key(self.dropout_key, layer), site);
        Dropout { p: if self.training { shape.dropout } else { 0.0 }, key, first_row }
    }

    pub(crate) fn first_row(&self, dev: &Device, shape: &DecoderShape) -> u64 {
        shape.region().first_row(dev, self.first_token, shape.rows())
    }
}

/// A micro-batch on the device, (B T) I32 each.
#[derive(Clone, Copy, Debug)]
pub struct BatchTensors {
    /// Input tokens.
    pub tokens: Tensor,
    /// Next tokens; a negative target is not counted, and padding has [`device::PADDING`].
    pub targets: Tensor,
    /// Positions in `tokens`, sorted by token (stable).
    pub order: Tensor,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two layers of two tokens, each with two experts of three.
    #[test]
    fn both_balance_losses_are_those_of_their_formulas() {
        const COUNTS: [[f64; 3]; 2] = [[2.0, 1.0, 1.0], [0.0, 2.0, 2.0]];
        // Sums of the probabilities over the tokens of each layer.
        const SUMS: [[f64; 3]; 2] = [[0.75, 0.5, 0.75], [0.25, 1.0, 0.75]];
        let (experts, chosen, tokens, layers) = (3.0, 2.0, 2.0, 2.0);
        let mean = |all: [[f64; 3]; 2], e: usize| (all[0][e] + all[1][e]) / (layers * tokens);
        let transformers = experts * (0..3).map(|e| mean(COUNTS, e) * mean(SUMS, e)).sum::<f64>();
        let of_layer = |l: usize| (0..3).map(|e| COUNTS[l][e] * SUMS[l][e]).sum::<f64>();
        let megatron = experts / (chosen * tokens * tokens) * (of_layer(0) + of_layer(1));
        // What the op computes of rows of counts and sums.
        let value = |balance, rows: &[[[f64; 3]; 2]]| {
            let (count, per_token, ffn_hidden, normalize) = (3, 2, 8, true);
            let shape = ExpertsShape {
                count,
                per_token,
                ffn_hidden,
                normalize,
                sigmoid: None,
                shared_hidden: None,
                shared_gate: false,
                biases: false,
                balance: None,
            };
            let of_row = |[c, s]: &[[f64; 3]; 2]| {
                let tokens = c.iter().sum::<f64>() / chosen;
                c.iter().zip(s).map(|(c, s)| c * s).sum::<f64>() / (tokens * tokens)
            };
            shape.balance_scale(balance) * rows.iter().map(of_row).sum::<f64>()
        };
        let near = |value: f64, expected: f64| assert!((value - expected).abs() < 1e-12);
        let joined = |of: [[f64; 3]; 2]| [0, 1, 2].map(|e| of[0][e] + of[1][e]);
        near(value(Balance::HuggingFace(0.5), &[[joined(COUNTS), joined(SUMS)]]), transformers);
        let rows = [[COUNTS[0], SUMS[0]], [COUNTS[1], SUMS[1]]];
        near(value(Balance::Megatron(0.5), &rows), megatron);
        assert_eq!(
            [Balance::HuggingFace(0.5), Balance::Megatron(0.25)].map(Balance::factor),
            [0.5, 0.25]
        );
    }
}
