//! The shape of a model, cut over the ranks of a group, and what changes from one micro-batch to the next.

use crate::params::Init;
use crate::region::Region;
use crate::rotary::Rope;
use device::{Device, Dropout, Dtype, Heads, Tensor, VocabShard, random};

/// The activations that a block computes again in the backward pass and does not keep.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Recompute {
    /// Nothing.
    None,
    /// The outputs of norms and of the MLP's activation: large, and little work. Attention never keeps its scores, the other
    /// tensor of this kind (arXiv 2205.05198, section 5).
    Selective,
    /// The whole block from its input, but for the MLP's last linear.
    Block,
}

/// The place of the blocks' inputs until the backward pass needs them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CheckpointHome {
    /// On the device.
    Device,
    /// In host memory; copied down under the next block, and up under the block above.
    Host,
    /// In host memory, and Compute waits for every copy: as DeepSpeed's checkpoints on the CPU did, to compare with.
    HostBlocking,
    /// Nowhere: no backward pass follows.
    None,
}

/// The way in which a token's position enters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Positions {
    /// A learned row for each is added to the embedding.
    Learned,
    /// Queries and keys turn by it.
    Rotary(Rope),
}

/// The parts of which a decoder is made: GPT-2 is one choice of these, Llama another.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Architecture {
    /// RMSNorm with a gain; else layer norm with gain and bias.
    pub rms_norm: bool,
    /// Added to the variance, or to the mean square, by every norm.
    pub norm_epsilon: f64,
    /// The way in which a token's position enters.
    pub positions: Positions,
    /// The weights of q, k and v are one tensor in checkpoints, with as many heads each.
    pub joined_qkv: bool,
    /// The projections to q, k and v have biases.
    pub qkv_bias: bool,
    /// The projection back from the heads has a bias.
    pub proj_bias: bool,
    /// Each head of q and k is normed before it is rotated.
    pub qk_norm: bool,
    /// The MLP is gated, SwiGLU without biases; else GELU with biases.
    pub swiglu: bool,
    /// The output projection is the token table.
    pub tied: bool,
    /// Initial weights whose output is added to the residual stream are smaller, by the square root of the number of such
    /// additions (GPT-2, section 2.3).
    pub scaled_residuals: bool,
}

impl Architecture {
    /// The parts of GPT-2.
    pub const GPT2: Self = Self {
        rms_norm: false,
        norm_epsilon: 1e-5,
        positions: Positions::Learned,
        joined_qkv: true,
        qkv_bias: true,
        proj_bias: true,
        qk_norm: false,
        swiglu: false,
        tied: true,
        scaled_residuals: true,
    };
}

/// Everything that decides shapes.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderShape {
    /// Which parts.
    pub architecture: Architecture,
    /// L
    pub layers: usize,
    /// C
    pub hidden: usize,
    /// H, of all ranks; a multiple of `tp_size` and of `kv_heads`.
    pub heads: usize,
    /// K: heads of keys and values, of all ranks; a multiple or a divisor of `tp_size`.
    pub kv_heads: usize,
    /// D: elements of a head; even with rotary positions.
    pub head_dim: usize,
    /// T
    pub seq_len: usize,
    /// Tokens, without padding.
    pub vocab: usize,
    /// F
    pub ffn_hidden: usize,
    /// B
    pub micro_batch: usize,
    /// t
    pub tp_size: usize,
    /// Tokens outside the linears are split over the ranks.
    pub sequence: bool,
    /// The activations that blocks compute again in the backward pass.
    pub recompute: Recompute,
    /// Each rank keeps its share of a block's input. Needs [`Recompute::Block`], and no `sequence`, which splits the input too.
    pub partition_checkpoints: bool,
    /// The place of that input. On the host each rank keeps its share anyway. Needs [`Recompute::Block`].
    pub checkpoint_home: CheckpointHome,
    /// Micro-batches whose inputs of the blocks are kept at once; more than one with [`Recompute::Block`] only.
    pub checkpoint_slots: usize,
    /// Which parameters are on the device between their uses.
    pub ring: Ring,
    /// Tokens whose logits are in memory at once.
    pub head_rows: usize,
    /// Type of parameters, activations and gradients.
    pub dtype: Dtype,
    /// The products of blocks have operands of fp8; `dtype` is 16 bits.
    pub fp8: bool,
    /// Type of sums over the ranks.
    pub partial_dtype: Dtype,
    /// Probability of dropping.
    pub dropout: f32,
    /// Standard deviation of the initial weights.
    pub init_std: f64,
}

/// Which parameters are on the device between their uses. Of those that are not, the host has the parameters, and the caller
/// brings them up ahead of each use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ring {
    /// Buffers in which the blocks that are not resident take turns, at least 2; the token table and an output projection of its
    /// own share one more. 0: all parameters are resident.
    pub buffers: usize,
    /// Blocks that are resident, spread evenly over all.
    pub resident: usize,
}

impl Ring {
    /// All parameters are resident.
    pub const NONE: Self = Self { buffers: 0, resident: 0 };

    /// Whether block `layer` of so many is resident.
    pub const fn is_resident(self, layer: usize, layers: usize) -> bool {
        self.buffers == 0 || (layer + 1) * self.resident / layers > layer * self.resident / layers
    }
}

/// Most elements of the logits of all ranks: 1 GiB in 16 bits.
const MOST_LOGITS: usize = 1 << 29;

/// Tokens whose logits are in memory at once, for a vocabulary of `vocab`: a function of that alone, since gradients are
/// rounded once for each run of so many.
pub const fn head_rows(vocab: usize) -> usize {
    let rows = MOST_LOGITS / vocab / 128 * 128;
    if rows < 128 { 128 } else { rows }
}

impl DecoderShape {
    /// Micro-batches that go backward through each block together.
    pub(crate) const fn backward_slots(&self) -> usize {
        if self.ring.buffers > 0 { self.checkpoint_slots } else { 1 }
    }

    /// Initial values of most weights.
    pub(crate) const fn weight_init(&self) -> Init {
        Init::Normal(self.init_std)
    }

    /// Initial values of weights whose output is added to the residual stream.
    pub(crate) fn residual_init(&self) -> Init {
        let additions =
            if self.architecture.scaled_residuals { 2.0 * self.layers as f64 } else { 1.0 };
        Init::Normal(self.init_std / additions.sqrt())
    }

    /// Ranks that hold the same head of keys and values; 1 where heads are not fewer than ranks.
    pub(crate) const fn kv_replicas(&self) -> usize {
        if self.tp_size > self.kv_heads { self.tp_size / self.kv_heads } else { 1 }
    }

    /// K/t, or 1 where ranks share heads: a rank's heads of keys and values.
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

    /// Columns of a rank's first product of the MLP: F/t, twice that with a gate.
    pub(crate) const fn inner_width(&self) -> usize {
        let one = self.ffn_hidden / self.tp_size;
        if self.architecture.swiglu { 2 * one } else { one }
    }

    /// The name of the MLP's activation.
    pub(crate) const fn activation(&self) -> &'static str {
        if self.architecture.swiglu { "swiglu" } else { "gelu" }
    }

    /// Columns of the widest tensor whose rows are summed, on one rank of any number.
    pub fn widest_sum(&self) -> usize {
        let one = Self { tp_size: 1, ..self.clone() };
        one.qkv_width().max(one.inner_width()).max(one.hidden)
    }

    /// B T
    pub const fn tokens(&self) -> usize {
        self.micro_batch * self.seq_len
    }

    /// Tokens of one rank outside the linears.
    pub const fn rows(&self) -> usize {
        if self.sequence { self.tokens() / self.tp_size } else { self.tokens() }
    }

    /// V/t: a multiple of 8, so that matrix units run full.
    pub const fn vocab_per_rank(&self) -> usize {
        self.vocab.div_ceil(8 * self.tp_size) * 8
    }

    /// Operations of one token, forward and backward, without recomputation: 6 per parameter of the linears,
    /// plus attention's causal products.
    pub const fn model_flops_per_token(&self) -> f64 {
        let (c, d, l) = (self.hidden as f64, self.head_dim as f64, self.layers as f64);
        let (q, kv) = (self.heads as f64 * d, self.kv_heads as f64 * d);
        let inner = self.ffn_hidden as f64 * if self.architecture.swiglu { 3.0 } else { 2.0 };
        let linears = l * c * (2.0 * q + 2.0 * kv + inner) + self.vocab as f64 * c;
        6.0 * linears + 6.0 * l * self.seq_len as f64 * q
    }

    pub(crate) const fn region(&self) -> Region {
        Region { sequence: self.sequence }
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
    /// (sample of the step) times T, of the micro-batch's first sample.
    pub first_token: u64,
    /// Dropout works.
    pub training: bool,
    /// (B T) I32 on the device, where samples hold several documents: the place in its sample where each token's document starts.
    pub starts: Option<Tensor>,
    /// The slot of its group in which the inputs of its blocks are kept, below [`DecoderShape::checkpoint_slots`].
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
    /// Inputs.
    pub tokens: Tensor,
    /// The next token, or negative: not counted.
    pub targets: Tensor,
    /// Positions in `tokens`, sorted by token (stable).
    pub order: Tensor,
}
