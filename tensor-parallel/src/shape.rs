//! The shape of a model, cut over the ranks of a group, and what changes from one micro-batch to the next.

use crate::params::Init;
use crate::region::Region;
use device::{Device, Dropout, Dtype, Heads, Tensor, VocabShard, random};

/// Where the inputs are until the backward pass needs them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Keep {
    /// On the device.
    Device,
    /// In host memory; copied down under the next block, and up under the block above.
    Host,
    /// In host memory, and Compute waits for every copy: as DeepSpeed's checkpoints on the CPU did, to compare with.
    HostBlocking,
}

/// Everything that decides shapes.
#[derive(Clone, Debug, PartialEq)]
pub struct GptShape {
    /// L
    pub layers: usize,
    /// C
    pub hidden: usize,
    /// H, of all ranks; a multiple of `tp_size`.
    pub heads: usize,
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
    /// Blocks keep only their input.
    pub recompute: bool,
    /// Of that input each rank keeps its share. With recomputation and without `sequence`, which splits it too.
    pub partition_checkpoints: bool,
    /// Where it is kept; on the host each rank keeps its share anyway. With recomputation.
    pub keep: Keep,
    /// Micro-batches whose inputs of the blocks are kept at once; more than one with recomputation only.
    pub checkpoint_sets: usize,
    /// Of parameters, activations and gradients.
    pub dtype: Dtype,
    /// Of sums over the ranks.
    pub partial_dtype: Dtype,
    /// Probability of dropping.
    pub dropout: f32,
    /// Of the initial weights.
    pub init_std: f64,
}

impl GptShape {
    /// Of weights.
    pub(crate) const fn weight_init(&self) -> Init {
        Init::Normal(self.init_std)
    }

    /// Of weights whose output is added to the residual stream: smaller, by the number of such additions (GPT-2, section 2.3).
    pub(crate) fn residual_init(&self) -> Init {
        Init::Normal(self.init_std / (2.0 * self.layers as f64).sqrt())
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

    /// Parameters, without padding.
    pub const fn parameters(&self) -> u64 {
        let (c, f, l) = (self.hidden as u64, self.ffn_hidden as u64, self.layers as u64);
        let block = 4 * c * c + 2 * c * f + 9 * c + f;
        (self.vocab as u64 + self.seq_len as u64) * c + l * block + 2 * c
    }

    /// Operations of one token, forward and backward, without recomputation: 6 per parameter of the linears,
    /// plus attention's causal products.
    pub const fn model_flops_per_token(&self) -> f64 {
        let (c, f, l) = (self.hidden as f64, self.ffn_hidden as f64, self.layers as f64);
        let linears = l * (4.0 * c * c + 2.0 * c * f) + self.vocab as f64 * c;
        6.0 * linears + 6.0 * l * self.seq_len as f64 * c
    }

    pub(crate) const fn region(&self) -> Region {
        Region { sequence: self.sequence }
    }

    pub(crate) fn heads_of(&self, dev: &Device) -> Heads {
        let count = self.heads / self.tp_size;
        let (first, total) = (dev.rank().tp * count, self.heads);
        Heads { count, kv_count: count, first, total, seq_len: self.seq_len }
    }

    pub(crate) fn vocab_shard(&self, dev: &Device) -> VocabShard {
        let columns = self.vocab_per_rank();
        let first = dev.rank().tp * columns;
        VocabShard { first, valid: self.vocab.saturating_sub(first).min(columns) }
    }
}

/// What changes from one micro-batch to the next.
#[derive(Clone, Copy, Debug)]
pub struct Pass {
    /// Of this step's dropout; unused when `training` is false.
    pub dropout_key: u64,
    /// (sample of the step) times T, of the micro-batch's first sample.
    pub first_token: u64,
    /// Dropout works.
    pub training: bool,
    /// Where the inputs of its blocks are kept, below [`GptShape::checkpoint_sets`].
    pub set: usize,
}

impl Pass {
    pub(crate) fn dropout(
        &self,
        shape: &GptShape,
        layer: u64,
        site: u64,
        first_row: u64,
    ) -> Dropout {
        let key = random::key(random::key(self.dropout_key, layer), site);
        Dropout { p: if self.training { shape.dropout } else { 0.0 }, key, first_row }
    }

    pub(crate) fn first_row(&self, dev: &Device, shape: &GptShape) -> u64 {
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
