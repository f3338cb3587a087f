//! Layer norm over this rank's tokens, before a column-parallel linear.

use crate::params::{Declared, Flat, Init, Split};
use crate::region::Region;
use device::{Arena, Device, Dtype, Lane::Compute, Op, Plan, Tensor};

/// Added to the variance of a layer norm (GPT-2).
pub const LAYER_NORM_EPSILON: f64 = 1e-5;

/// What a norm leaves for its backward pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NormSaved {
    /// (B T, C): the normed input, whole on every rank.
    pub(crate) normed: Tensor,
    /// (rows, 2)
    stats: Tensor,
}

/// Gain and bias, or their gradients: (C) each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Norm {
    pub(crate) gain: Tensor,
    pub(crate) bias: Tensor,
}

impl NormSaved {
    pub(crate) fn plan(
        plan: &mut Plan,
        name: &str,
        dtype: Dtype,
        (rows, full_rows, hidden): (usize, usize, usize),
    ) -> Self {
        let at = (Arena::Device, "activations");
        Self {
            normed: plan.tensor(at, format!("{name}.normed"), dtype, (full_rows, hidden)),
            stats: plan.tensor(at, format!("{name}.stats"), Dtype::F32, (rows, 2)),
        }
    }
}

impl Norm {
    /// Declares gain and bias of (C) each, as `name.weight` and `name.bias`.
    pub(crate) fn declare(params: &mut Declared, name: &str, hidden: usize) {
        let (shape, split) = ((hidden, 1), Split::Replicated);
        params.add(&format!("{name}.weight"), shape, split, Init::Constant(1.0));
        params.add(&format!("{name}.bias"), shape, split, Init::Constant(0.0));
    }

    pub(crate) fn cut(flat: Flat<'_>, name: &str) -> Self {
        Self { gain: flat.get(name, "weight"), bias: flat.get(name, "bias") }
    }

    /// x (rows, C) -> `saved.normed` (B T, C), gathered. Whole at `record(Compute)`.
    pub(crate) fn forward(&self, dev: &Device, region: Region, x: Tensor, saved: NormSaved) {
        let y = region.rows(dev, saved.normed);
        dev.submit(
            Compute,
            Op::LayerNorm {
                x,
                gain: self.gain,
                bias: self.bias,
                y,
                stats: saved.stats,
                epsilon: LAYER_NORM_EPSILON as f32,
            },
        );
        region.gather(dev, saved.normed);
    }

    /// d_x (rows, C) = (add ? d_x : 0) + gradient of x, from `d_normed` (rows, C), already summed over the
    /// ranks. Writes `grads` from this rank's tokens.
    pub(crate) fn backward(
        &self,
        dev: &Device,
        (x, saved): (Tensor, NormSaved),
        d_normed: Tensor,
        (d_x, add): (Tensor, bool),
        grads: Self,
    ) {
        let op = Op::LayerNormBackward {
            x,
            gain: self.gain,
            stats: saved.stats,
            d_y: d_normed,
            d_x,
            add,
            d_gain: grads.gain,
            d_bias: grads.bias,
        };
        dev.submit(Compute, op);
    }
}
