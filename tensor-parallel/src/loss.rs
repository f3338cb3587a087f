//! Vocabulary-parallel output projection and cross-entropy: the logits are never gathered, three numbers per
//! token are (arXiv 1909.08053, section 3).

use crate::region::sum_over_ranks;
use crate::shape::{BatchTensors, GptShape};
use device::{Arena, Device, Dtype, Lane::Compute, Op, Plan, Reduce, Tensor};

/// Activations of the output layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Head {
    /// (B T, V/t); becomes its own gradient.
    pub(crate) logits: Tensor,
    max: Tensor,  // (B T)
    sums: Tensor, // (2, B T)
}

impl Head {
    pub(crate) fn plan(plan: &mut Plan, shape: &GptShape) -> Self {
        let (tokens, at) = (shape.tokens(), (Arena::Device, "logits"));
        let columns = shape.vocab_per_rank();
        Self {
            logits: plan.tensor(at, "logits", shape.dtype, (tokens, columns)),
            max: plan.tensor(at, "logits.max", Dtype::F32, (1, tokens)),
            sums: plan.tensor(at, "logits.sums", Dtype::F32, (2, tokens)),
        }
    }

    /// normed (B T, C), table (V/t, C) -> logits of this rank's columns.
    pub(crate) fn project(&self, dev: &Device, normed: Tensor, table: Tensor) {
        dev.submit(Compute, Op::product(normed, table.t(), self.logits));
    }

    /// loss (1) F64 = sum over the micro-batch's tokens, the same on every rank.
    pub(crate) fn forward(
        &self,
        dev: &Device,
        shape: &GptShape,
        batch: &BatchTensors,
        loss: Tensor,
    ) {
        let (Self { logits, max, sums }, targets) = (*self, batch.targets);
        let shard = shape.vocab_shard(dev);
        dev.submit(Compute, Op::RowMax { x: logits, y: max, shard });
        sum_over_ranks(dev, max, Reduce::Max);
        dev.submit(Compute, Op::CrossEntropyStats { logits, max, targets, shard, sums });
        sum_over_ranks(dev, sums.reshape(1, sums.len()), Reduce::Sum);
        dev.submit(Compute, Op::CrossEntropyLoss { sums, targets, loss });
    }

    /// The logits become the gradient of the mean over the micro-batch's tokens, times `scale` (1, F64).
    pub(crate) fn backward(
        &self,
        dev: &Device,
        shape: &GptShape,
        batch: &BatchTensors,
        scale: Tensor,
    ) {
        let (Self { logits, max, sums }, targets) = (*self, batch.targets);
        let (shard, factor) = (shape.vocab_shard(dev), 1.0 / shape.tokens() as f32);
        dev.submit(
            Compute,
            Op::CrossEntropyBackward { logits, max, sums, targets, shard, scale, factor },
        );
    }

    /// From the logits' gradient: d_table (V/t, C) is written, and `d_normed` (B T, C), whose sum over the
    /// ranks is over when Compute goes on.
    pub(crate) fn project_backward(
        &self,
        dev: &Device,
        shape: &GptShape,
        (normed, table): (Tensor, Tensor),
        (d_normed, d_table): (Tensor, Tensor),
    ) {
        let d_logits = self.logits;
        dev.submit(Compute, Op::product(d_logits, table, d_normed));
        let summed = shape.region().start_sum(dev, d_normed);
        dev.submit(Compute, Op::product(d_logits.t(), normed, d_table));
        dev.wait(Compute, summed);
    }
}
