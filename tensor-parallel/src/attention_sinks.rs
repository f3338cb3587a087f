//! Sinks of attention (arXiv 2309.17453, section 3.2): each head of queries has a score, which is in
//! the sum of the softmax of each query and has no value. Attention computes without it, and then
//! the op that adds it changes the results and the sums; the backward pass of attention reads the
//! changed ones.

use crate::params::{FlatBuffer, ParamDeclarations, Split};
use crate::shape::DecoderShape;
use device::{Device, Heads, Lane::Compute, Op, Tensor};

/// Name of the sinks.
const NAME: &str = "attn.sinks";

/// The sinks of this rank's heads (1, H/t), or their gradient, which may be frozen.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionSinks(pub(crate) Tensor);

impl AttentionSinks {
    /// Declares the sinks, if the model has some. They must stand before the biases of keys and
    /// values: the elements that a rank does not count are then one run.
    pub(crate) fn declare(params: &mut ParamDeclarations, shape: &DecoderShape) {
        if shape.architecture.attention_sinks {
            params.add_vector(NAME, shape.heads, Split::Rows, shape.weight_init());
        }
    }

    pub(crate) fn cut(flat: FlatBuffer<'_>, shape: &DecoderShape) -> Option<Self> {
        shape.architecture.attention_sinks.then(|| Self(flat.whole(NAME)))
    }

    /// Adds the sinks to the softmax with the results `out` and the logarithms `lse` of its sums.
    pub(crate) fn forward(self, dev: &Device, out: Tensor, lse: Tensor, heads: Heads) {
        dev.submit(Compute, Op::AttentionSinks { out, lse, sinks: self.0, heads });
    }

    /// Computes the gradient `d_sinks`, unless it is frozen, from `d_out`. `out` and `lse` have the
    /// sinks.
    pub(crate) fn backward(
        self,
        dev: &Device,
        [out, lse, d_out]: [Tensor; 3],
        heads: Heads,
        Self(d_sinks): Self,
    ) {
        if !d_sinks.is_empty() {
            let sinks = self.0;
            let op = Op::AttentionSinksBackward { out, lse, d_out, sinks, d_sinks, heads };
            dev.submit(Compute, op);
        }
    }
}
