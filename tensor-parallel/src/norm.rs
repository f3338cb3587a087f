//! Layer norm or RMSNorm over this rank's tokens, before a column-parallel linear.

use crate::branch::RecomputedOutputs;
use crate::params::{FlatBuffer, Init, ParamDeclarations, Split};
use crate::region::Region;
use crate::shape::DecoderShape;
use device::{Arena, Device, Dtype, Event, Lane::Compute, Op, Plan, Tensor};

/// Results of a norm, for its backward pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NormActivations {
    /// (B T, C): normed input, complete on every rank.
    pub(crate) normed: Tensor,
    /// (rows, 2): statistics of the rows; (rows, 1) for RMSNorm.
    stats: Tensor,
}

/// Gain and bias, or their gradients: (C) each. RMSNorm has no bias.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Norm {
    pub(crate) gain: Tensor,
    pub(crate) bias: Option<Tensor>,
    epsilon: f32,
}

/// A norm in a forward pass, for its backward pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AppliedNorm {
    pub(crate) norm: Norm,
    /// (rows, C): input of the norm.
    pub(crate) x: Tensor,
    pub(crate) saved: NormActivations,
}

impl NormActivations {
    /// Plans the results. With `recomputed` all norms share the output, which backward recomputes.
    pub(crate) fn plan(
        plan: &mut Plan,
        name: &str,
        shape: &DecoderShape,
        recomputed: Option<RecomputedOutputs>,
    ) -> Self {
        let at = (Arena::Device, "activations");
        let (rows, stats) = (shape.rows(), if shape.architecture.rms_norm { 1 } else { 2 });
        let size = (shape.tokens(), shape.hidden);
        let own = |plan: &mut Plan| plan.tensor(at, format!("{name}.normed"), shape.dtype, size);
        Self {
            normed: recomputed.map_or_else(|| own(plan), |recomputed| recomputed.normed),
            stats: plan.tensor(at, format!("{name}.stats"), Dtype::F32, (rows, stats)),
        }
    }

    /// The first `rows` rows of the results.
    pub(crate) fn first(self, rows: usize) -> Self {
        Self { normed: self.normed.rows(0..rows), stats: self.stats.rows(0..rows) }
    }
}

impl Norm {
    /// Declares a gain and a bias (C), as `name.weight` and `name.bias`.
    pub(crate) fn declare(params: &mut ParamDeclarations, name: &str, shape: &DecoderShape) {
        let (elements, split) = (shape.hidden, Split::Replicated);
        params.add_vector(&format!("{name}.weight"), elements, split, Init::Constant(1.0));
        if !shape.architecture.rms_norm {
            params.add_vector(&format!("{name}.bias"), elements, split, Init::Constant(0.0));
        }
    }

    pub(crate) fn cut(flat: FlatBuffer<'_>, name: &str, shape: &DecoderShape) -> Self {
        let bias = (!shape.architecture.rms_norm).then(|| flat.get(name, "bias"));
        let epsilon = shape.architecture.norm_epsilon as f32;
        Self { gain: flat.get(name, "weight"), bias, epsilon }
    }

    /// Computes x (rows, C) -> `saved.normed` (B T, C), gathered. It is complete at
    /// `record(Compute)`.
    pub(crate) fn forward(&self, dev: &Device, region: Region, x: Tensor, saved: NormActivations) {
        dev.wait(Compute, self.start_forward(dev, region, x, saved));
    }

    /// Starts [`forward`](Self::forward); the output is complete at the returned event.
    pub(crate) fn start_forward(
        &self,
        dev: &Device,
        region: Region,
        x: Tensor,
        saved: NormActivations,
    ) -> Event {
        let Self { gain, bias, epsilon } = *self;
        let (y, stats) = (region.rows(dev, saved.normed), saved.stats);
        let op = match bias {
            Some(bias) => Op::LayerNorm { x, gain, bias, y, stats, epsilon },
            None => Op::RmsNorm { x, gain, y, stats, epsilon, offset: 0.0 },
        };
        dev.submit(Compute, op);
        region.start_gather(dev, saved.normed)
    }
}

impl AppliedNorm {
    /// Repeats [`Norm::start_forward`] for the backward pass.
    pub(crate) fn start_forward(&self, dev: &Device, region: Region) -> Event {
        self.norm.start_forward(dev, region, self.x, self.saved)
    }

    /// Computes d_x (rows, C) = (add ? d_x : 0) + gradient of x, from `d_normed` (rows, C), already
    /// summed over the ranks. Writes `grads` from this rank's tokens.
    pub(crate) fn backward(
        &self,
        dev: &Device,
        d_normed: Tensor,
        d_x: Tensor,
        add: bool,
        grads: Norm,
    ) {
        let (x, gain, stats) = (self.x, self.norm.gain, self.saved.stats);
        let (d_y, d_gain) = (d_normed, grads.gain);
        let op = match grads.bias {
            Some(d_bias) => Op::LayerNormBackward { x, gain, stats, d_y, d_x, add, d_gain, d_bias },
            None => Op::RmsNormBackward { x, gain, stats, d_y, d_x, add, d_gain, offset: 0.0 },
        };
        dev.submit(Compute, op);
    }
}
