//! Vocabulary-parallel output projection and cross-entropy. The ranks never gather logits, only
//! three numbers per token (arXiv 1909.08053, section 3). Both directions process the tokens in
//! runs, and only one run's logits are in memory. With a vocabulary of 128 thousand, the logits of
//! all tokens would be the largest tensor.

use crate::region::sum_over_ranks;
use crate::shape::{BatchTensors, DecoderShape};
use device::{Arena, Device, Dtype, Epilogue, Lane::Compute, Op, Plan, Reduction, Tensor};
use std::ops::Range;

/// Activations of the output layer for one run of tokens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Head {
    /// (run, V/t) logits; the backward pass replaces them by their gradient.
    pub(crate) logits: Tensor,
    max: Tensor,  // (run)
    sums: Tensor, // (2, run)
    loss: Tensor, // (1) F64: loss of a run after the first run
}

/// Inputs of the output layer, or their gradients: normed input (B T, C) and table (V/t, C). The
/// gradient of a frozen table has no elements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeadInputs {
    pub(crate) normed: Tensor,
    pub(crate) table: Tensor,
}

/// Inputs of the output layer's backward pass, one F64 on the device each.
#[derive(Clone, Copy, Debug)]
pub struct LossTensors {
    /// Output of the loss: the sum over the micro-batch's tokens.
    pub loss: Tensor,
    /// Loss scale, a factor of all gradients.
    pub scale: Tensor,
}

impl HeadInputs {
    /// The inputs for the tokens `run`.
    pub(crate) fn of(self, run: Range<usize>) -> Self {
        Self { normed: self.normed.rows(run), ..self }
    }
}

impl Head {
    pub(crate) fn plan(plan: &mut Plan, shape: &DecoderShape) -> Self {
        let (rows, at) = (shape.tokens().min(shape.head_rows), (Arena::Device, "logits"));
        let columns = shape.vocab_per_rank();
        Self {
            logits: plan.tensor(at, "logits", shape.dtype, (rows, columns)),
            max: plan.tensor(at, "logits.max", Dtype::F32, (1, rows)),
            sums: plan.tensor(at, "logits.sums", Dtype::F32, (2, rows)),
            loss: plan.tensor(at, "logits.loss", Dtype::F64, (1, 1)),
        }
    }

    /// Runs of tokens, at most `head_rows` each.
    fn runs(shape: &DecoderShape) -> impl Iterator<Item = Range<usize>> {
        let (tokens, rows) = (shape.tokens(), shape.head_rows);
        (0..tokens).step_by(rows).map(move |start| start..(start + rows).min(tokens))
    }

    /// The activations for a run of `rows` tokens.
    fn of(self, rows: usize) -> Self {
        let logits = self.logits.rows(0..rows);
        let (max, sums) = (self.max.slice(0..rows), self.sums.slice(0..2 * rows).reshape(2, rows));
        Self { logits, max, sums, ..self }
    }

    /// Computes the logits of this rank's columns from normed (run, C) and table (V/t, C).
    pub(crate) fn project(
        &self,
        dev: &Device,
        shape: &DecoderShape,
        HeadInputs { normed, table }: HeadInputs,
    ) {
        let logits = self.logits.rows(0..normed.shape().0);
        dev.submit(Compute, Op::product(normed, table.t(), logits));
        let (scale, cap) = (shape.architecture.logit_scale as f32, shape.logit_cap());
        if scale != 1.0 || cap.is_some() {
            dev.submit(Compute, Op::CapLogits { logits, scale, cap });
        }
    }

    /// Computes loss (1) F64, the sum over the micro-batch's tokens, the same on every rank.
    pub(crate) fn loss(
        &self,
        dev: &Device,
        shape: &DecoderShape,
        inputs: HeadInputs,
        batch: &BatchTensors,
        loss: Tensor,
    ) {
        for run in Self::runs(shape) {
            let head = self.of(run.len());
            head.project(dev, shape, inputs.of(run.clone()));
            head.forward(dev, shape, batch.targets.slice(run.clone()), run.start, loss);
        }
    }

    /// Computes the [`loss`](Self::loss), and the gradients of its mean over the micro-batch's
    /// tokens, times `loss.scale`. Writes `grads`; the gradient of the normed input is this rank's
    /// part, to be summed over the ranks.
    pub(crate) fn loss_and_gradients(
        &self,
        dev: &Device,
        shape: &DecoderShape,
        inputs: HeadInputs,
        batch: &BatchTensors,
        loss: LossTensors,
        grads: HeadInputs,
    ) {
        let LossTensors { loss, scale } = loss;
        for run in Self::runs(shape) {
            let (head, normed) = (self.of(run.len()), inputs.normed.rows(run.clone()));
            let targets = batch.targets.slice(run.clone());
            head.project(dev, shape, inputs.of(run.clone()));
            head.forward(dev, shape, targets, run.start, loss);
            head.backward(dev, shape, targets, scale);
            let d_logits = head.logits;
            let d_normed = grads.normed.rows(run.clone());
            dev.submit(Compute, Op::product(d_logits, inputs.table, d_normed));
            if grads.table.is_empty() {
                continue; // it is frozen
            }
            let (a, c, add) = (d_logits.t(), grads.table, run.start > 0);
            let epilogue = Epilogue::None;
            dev.submit(Compute, Op::Gemm { a, b: normed, c, bias: None, add, epilogue });
        }
    }

    /// Computes the loss of a run and adds it to the loss of the earlier runs.
    fn forward(
        &self,
        dev: &Device,
        shape: &DecoderShape,
        targets: Tensor,
        start: usize,
        loss: Tensor,
    ) {
        let Self { logits, max, sums, .. } = *self;
        let shard = shape.vocab_shard(dev);
        dev.submit(Compute, Op::RowMax { x: logits, y: max, shard });
        sum_over_ranks(dev, max, Reduction::Max);
        dev.submit(Compute, Op::CrossEntropyStats { logits, max, targets, shard, sums });
        sum_over_ranks(dev, sums.reshape(1, sums.len()), Reduction::Sum);
        if start == 0 {
            return dev.submit(Compute, Op::CrossEntropyLoss { sums, targets, loss });
        }
        dev.submit(Compute, Op::CrossEntropyLoss { sums, targets, loss: self.loss });
        dev.submit(Compute, Op::Add { x: self.loss, into: loss });
    }

    /// Replaces the logits by their gradient.
    fn backward(&self, dev: &Device, shape: &DecoderShape, targets: Tensor, scale: Tensor) {
        let Self { logits, max, sums, .. } = *self;
        let (shard, cap) = (shape.vocab_shard(dev), shape.logit_cap());
        // The logits' scale is 1 or a power of two in most models: the factor is then exact.
        let factor = shape.architecture.logit_scale as f32 / shape.tokens() as f32;
        dev.submit(
            Compute,
            Op::CrossEntropyBackward { logits, max, sums, targets, shard, scale, factor, cap },
        );
    }
}
