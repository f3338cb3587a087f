//! Layer norm or RMSNorm over this rank's tokens: at the start of a branch, before a column-parallel
//! linear, or at its end, after the sum over the ranks.

use crate::branch::{RecomputedOutputs, Scratch};
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
    pub(crate) stats: Tensor,
}

/// (B T, C): the input of a branch, or the shared one that backward computes again.
fn branch_input(
    plan: &mut Plan,
    name: String,
    shape: &DecoderShape,
    recomputed: Option<RecomputedOutputs>,
) -> Tensor {
    let size = (shape.tokens(), shape.hidden);
    let own = || plan.tensor((Arena::Device, "activations"), name, shape.dtype, size);
    recomputed.map_or_else(own, |recomputed| recomputed.normed)
}

/// Gain and bias, or their gradients: (C) each. RMSNorm has no bias.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Norm {
    pub(crate) gain: Tensor,
    pub(crate) bias: Option<Tensor>,
    epsilon: f32,
    offset: f32,
}

/// A norm in a forward pass, for its backward pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AppliedNorm {
    pub(crate) norm: Norm,
    /// (rows, C): input of the norm.
    pub(crate) x: Tensor,
    /// Statistics of the rows of x.
    pub(crate) stats: Tensor,
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
        Self {
            normed: branch_input(plan, format!("{name}.normed"), shape, recomputed),
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
        let one = Init::Constant(1.0 - shape.architecture.norm_offset);
        params.add_vector(&format!("{name}.weight"), elements, split, one);
        if !shape.architecture.rms_norm {
            params.add_vector(&format!("{name}.bias"), elements, split, Init::Constant(0.0));
        }
    }

    pub(crate) fn cut(flat: FlatBuffer<'_>, name: &str, shape: &DecoderShape) -> Self {
        let bias = (!shape.architecture.rms_norm).then(|| flat.get(name, "bias"));
        let epsilon = shape.architecture.norm_epsilon as f32;
        let offset = shape.architecture.norm_offset as f32;
        Self { gain: flat.get(name, "weight"), bias, epsilon, offset }
    }

    /// The gradients, with transients in the place of those of frozen vectors.
    pub(crate) fn with_transients(self, scratch: &Scratch, shape: &DecoderShape) -> Self {
        let of = |d, number| scratch.gradient(d, shape.hidden, number);
        Self { gain: of(self.gain, 0), bias: self.bias.map(|bias| of(bias, 1)), ..self }
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
        self.compute(dev, x, region.rows(dev, saved.normed), saved.stats);
        region.start_gather(dev, saved.normed)
    }

    /// Computes y (rows, C) and the rows' statistics from x (rows, C).
    #[track_caller]
    fn compute(&self, dev: &Device, x: Tensor, y: Tensor, stats: Tensor) {
        let Self { gain, bias, epsilon, offset } = *self;
        let op = match bias {
            Some(bias) => Op::LayerNorm { x, gain, bias, y, stats, epsilon },
            None => Op::RmsNorm { x, gain, y, stats, epsilon, offset },
        };
        dev.submit(Compute, op);
    }
}

impl AppliedNorm {
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
        let Self { norm: Norm { gain, offset, .. }, x, stats } = *self;
        let (d_y, d_gain) = (d_normed, grads.gain);
        let op = match grads.bias {
            Some(d_bias) => Op::LayerNormBackward { x, gain, stats, d_y, d_x, add, d_gain, d_bias },
            None => Op::RmsNormBackward { x, gain, stats, d_y, d_x, add, d_gain, offset },
        };
        dev.submit(Compute, op);
    }
}

/// The input of a branch in a forward pass, for its backward pass: the residual stream, after a norm
/// if the model has one there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BranchInput {
    pub(crate) norm: Option<Norm>,
    /// (rows, C): the residual stream.
    pub(crate) x: Tensor,
    pub(crate) saved: InputActivations,
    /// Whether the backward pass computes the input again.
    pub(crate) recomputes: bool,
}

/// The place of a branch's input (B T, C), complete on every rank.
#[derive(Clone, Copy, Debug)]
pub(crate) enum InputActivations {
    /// The output of a norm.
    Normed(NormActivations),
    /// The gathered residual stream, if tokens are split over the ranks.
    Gathered(Tensor),
    /// The residual stream itself.
    Residual,
}

impl InputActivations {
    /// Plans the input of a branch. `name` is the norm's name.
    pub(crate) fn plan(
        plan: &mut Plan,
        name: &str,
        shape: &DecoderShape,
        recomputed: Option<RecomputedOutputs>,
    ) -> Self {
        if shape.architecture.norms_inputs() {
            return Self::Normed(NormActivations::plan(plan, name, shape, recomputed));
        }
        if !shape.sequence {
            return Self::Residual;
        }
        Self::Gathered(branch_input(plan, format!("{name}.input"), shape, recomputed))
    }

    /// The first `rows` rows.
    pub(crate) fn first(self, rows: usize) -> Self {
        match self {
            Self::Normed(saved) => Self::Normed(saved.first(rows)),
            Self::Gathered(full) => Self::Gathered(full.rows(0..rows)),
            Self::Residual => Self::Residual,
        }
    }
}

impl BranchInput {
    /// (B T, C): the input, while it is in memory.
    pub(crate) const fn output(&self) -> Tensor {
        match self.saved {
            InputActivations::Normed(saved) => saved.normed,
            InputActivations::Gathered(full) => full,
            InputActivations::Residual => self.x,
        }
    }

    /// Computes the input. It is complete at `record(Compute)`.
    pub(crate) fn forward(&self, dev: &Device, region: Region) -> Tensor {
        dev.wait(Compute, self.start_forward(dev, region));
        self.output()
    }

    /// Starts [`forward`](Self::forward); the input is complete at the returned event.
    pub(crate) fn start_forward(&self, dev: &Device, region: Region) -> Event {
        match (self.norm, self.saved) {
            (Some(norm), InputActivations::Normed(saved)) => {
                norm.start_forward(dev, region, self.x, saved)
            }
            (None, InputActivations::Gathered(full)) => {
                dev.submit(Compute, Op::Copy { src: self.x, dst: region.rows(dev, full) });
                region.start_gather(dev, full)
            }
            (None, InputActivations::Residual) => Event::default(),
            (norm, saved) => unreachable!("a norm has results: {norm:?}, {saved:?}"),
        }
    }

    /// Computes d (rows, C) += gradient of the residual stream, from `d_input` (rows, C), already
    /// summed over the ranks. Writes the norm's `grads` from this rank's tokens.
    pub(crate) fn backward(&self, dev: &Device, d_input: Tensor, d: Tensor, grads: Option<Norm>) {
        match (self.norm, self.saved, grads) {
            (Some(norm), InputActivations::Normed(saved), Some(grads)) => {
                let norm = AppliedNorm { norm, x: self.x, stats: saved.stats };
                norm.backward(dev, d_input, d, true, grads);
            }
            (None, _, None) => dev.submit(Compute, Op::Add { x: d_input, into: d }),
            (norm, saved, _) => {
                unreachable!("a norm has results and gradients: {norm:?}, {saved:?}")
            }
        }
    }
}

/// The sum of a branch before the norm at its end, for the norm's backward pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OutputActivations {
    sum: Tensor,   // (rows, C)
    stats: Tensor, // (rows, 1)
}

impl OutputActivations {
    /// Plans the results, if branches have a norm at their end. `name` is the norm's name.
    pub(crate) fn plan(plan: &mut Plan, name: &str, shape: &DecoderShape) -> Option<Self> {
        let (at, rows) = ((Arena::Device, "activations"), shape.rows());
        shape.architecture.norms_outputs().then(|| Self {
            sum: plan.tensor(at, format!("{name}.sum"), shape.dtype, (rows, shape.hidden)),
            stats: plan.tensor(at, format!("{name}.stats"), Dtype::F32, (rows, 1)),
        })
    }

    /// All tensors.
    pub(crate) const fn tensors(self) -> [Tensor; 2] {
        [self.sum, self.stats]
    }

    /// The first `rows` rows of the results.
    pub(crate) fn first(self, rows: usize) -> Self {
        Self { sum: self.sum.rows(0..rows), stats: self.stats.rows(0..rows) }
    }

    /// Computes norm(summed) from a branch's sum (rows, C), which has any type. The result (rows, C)
    /// is in a transient.
    pub(crate) fn forward(
        self,
        dev: &Device,
        norm: Norm,
        summed: Tensor,
        scratch: &Scratch,
    ) -> Tensor {
        let y = scratch.branch_output(self.sum.shape().0);
        dev.submit(Compute, Op::Cast { x: summed, y: self.sum });
        norm.compute(dev, self.sum, y, self.stats);
        y
    }

    /// Computes `d_sum` (rows, C) from `d_y` (rows, C), the gradient of the normed sum. Writes
    /// `grads` from this rank's tokens.
    pub(crate) fn backward(
        self,
        dev: &Device,
        norm: Norm,
        d_y: Tensor,
        d_sum: Tensor,
        grads: Norm,
    ) {
        let norm = AppliedNorm { norm, x: self.sum, stats: self.stats };
        norm.backward(dev, d_y, d_sum, false, grads);
    }
}
