//! The first branch of a block, which mixes the tokens of a document: attention, or a gated delta net.

use crate::attention::{Attention, AttentionActivations, AttentionContext};
use crate::branch::{Branch, Scratch};
use crate::delta_net::{DeltaActivations, DeltaContext, DeltaNet};
use crate::delta_shape::DeltaShape;
use crate::kv_cache::Extension;
use crate::params::{FlatBuffer, ParamDeclarations};
use crate::shape::DecoderShape;
use device::{Device, Dropout, Event, Plan, Tensor};

/// Parameters of the branch, or their gradients.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Mixer {
    Attention(Attention),
    Delta(DeltaNet),
}

/// Activations of the branch, for the backward pass.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::large_enum_variant, reason = "a step copies handles and allocates nothing")]
pub(crate) enum MixerActivations {
    Attention(AttentionActivations),
    Delta(DeltaActivations),
}

/// Settings of the branch for one pass.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MixerContext {
    Attention(AttentionContext),
    Delta(DeltaContext),
}

impl MixerActivations {
    /// Plans the activations of a block with the gated delta net `delta`, or with attention.
    pub(crate) fn plan(
        plan: &mut Plan,
        name: &str,
        shape: &DecoderShape,
        scratch: &Scratch,
        delta: Option<DeltaShape>,
    ) -> Self {
        match delta {
            Some(delta) => Self::Delta(DeltaActivations::plan(plan, name, shape, &delta, scratch)),
            None => Self::Attention(AttentionActivations::plan(plan, name, shape, scratch)),
        }
    }

    /// The tensors that belong to the block alone.
    pub(crate) fn tensors(self) -> Vec<Tensor> {
        match self {
            Self::Attention(saved) => saved.tensors(),
            Self::Delta(saved) => saved.tensors(),
        }
    }

    /// The activations of the first `rows` rows, with this rank's `heads` heads of attention.
    pub(crate) fn first(self, rows: usize, heads: usize) -> Self {
        match self {
            Self::Attention(saved) => Self::Attention(saved.of(0..rows, heads)),
            Self::Delta(saved) => Self::Delta(saved.first(rows)),
        }
    }

    /// Number of tokens.
    pub(crate) const fn tokens(&self) -> usize {
        match self {
            Self::Attention(saved) => saved.out.shape().0,
            Self::Delta(saved) => saved.tokens(),
        }
    }
}

impl Mixer {
    /// Declares all parameters except the projection back.
    pub(crate) fn declare_heads(
        params: &mut ParamDeclarations,
        shape: &DecoderShape,
        delta: Option<DeltaShape>,
    ) {
        match delta {
            Some(delta) => DeltaNet::declare_heads(params, shape, &delta),
            None => Attention::declare_heads(params, shape),
        }
    }

    /// Declares the parameters of the projection back.
    pub(crate) fn declare_proj(
        params: &mut ParamDeclarations,
        shape: &DecoderShape,
        delta: Option<DeltaShape>,
    ) {
        match delta {
            Some(delta) => DeltaNet::declare_proj(params, shape, &delta),
            None => Attention::declare_proj(params, shape),
        }
    }

    /// Cuts the parameters of a block with the gated delta net `delta`, or with attention.
    pub(crate) fn cut(
        flat: FlatBuffer<'_>,
        shape: &DecoderShape,
        delta: Option<DeltaShape>,
        scratch: &Scratch,
    ) -> Self {
        match delta {
            Some(_) => Self::Delta(DeltaNet::cut(flat, shape, scratch)),
            None => Self::Attention(Attention::cut(flat, shape, scratch)),
        }
    }

    /// The parameters in a pass that drops the inputs of adapters: that of the branch, then that of the
    /// projection back.
    pub(crate) fn with_dropout(self, dropout: [Dropout; 2]) -> Self {
        match self {
            Self::Attention(own) => Self::Attention(own.with_dropout(dropout)),
            Self::Delta(own) => Self::Delta(own.with_dropout(dropout)),
        }
    }

    /// (C): bias that is added after the sum over the ranks.
    pub(crate) const fn proj_bias(&self) -> Option<Tensor> {
        match self {
            Self::Attention(attention) => attention.proj_bias,
            Self::Delta(_) => None,
        }
    }

    /// Computes normed (B T, C) -> the outputs of this rank's heads, in `saved`.
    pub(crate) fn heads_forward(
        &self,
        dev: &Device,
        shape: &DecoderShape,
        normed: Tensor,
        saved: MixerActivations,
        pass: MixerContext,
    ) {
        match (self, saved, pass) {
            (
                Self::Attention(own),
                MixerActivations::Attention(saved),
                MixerContext::Attention(pass),
            ) => own.heads_forward(dev, shape, normed, saved, pass),
            (Self::Delta(own), MixerActivations::Delta(saved), MixerContext::Delta(pass)) => {
                own.heads_forward(dev, normed, saved, pass);
            }
            other => unreachable!("a block has what its kind says: {other:?}"),
        }
    }

    /// Computes the row-parallel projection: `partial` (B T, C), to be summed over the ranks.
    pub(crate) fn proj_forward(&self, dev: &Device, saved: MixerActivations, partial: Tensor) {
        match (self, saved) {
            (Self::Attention(own), MixerActivations::Attention(saved)) => {
                own.proj_forward(dev, saved, partial);
            }
            (Self::Delta(own), MixerActivations::Delta(saved)) => {
                own.proj_forward(dev, saved, partial);
            }
            other => unreachable!("a block has what its kind says: {other:?}"),
        }
    }

    /// Computes `branch.d_normed` (B T, C) from `branch.d_sum` (B T, C), and `grads`. Compute waits
    /// for the sum of `branch.d_normed` over the ranks.
    pub(crate) fn backward(
        &self,
        dev: &Device,
        shape: &DecoderShape,
        saved: MixerActivations,
        pass: MixerContext,
        branch: Branch,
        grads: Self,
    ) {
        match (self, saved, pass, grads) {
            (
                Self::Attention(own),
                MixerActivations::Attention(saved),
                MixerContext::Attention(pass),
                Self::Attention(grads),
            ) => own.backward(dev, shape, saved, pass, branch, grads),
            (
                Self::Delta(own),
                MixerActivations::Delta(saved),
                MixerContext::Delta(pass),
                Self::Delta(grads),
            ) => own.backward(dev, saved, pass, branch, grads),
            other => unreachable!("a block has what its kind says: {other:?}"),
        }
    }

    /// Starts the sum of gradients that some ranks share. Compute must wait for the returned event.
    #[track_caller]
    pub(crate) fn start_sum_of_shared(
        &self,
        flat: FlatBuffer<'_>,
        dev: &Device,
        shape: &DecoderShape,
        scratch: &Scratch,
    ) -> Event {
        match self {
            Self::Attention(_) => Attention::start_sum_of_shared(flat, dev, shape, scratch),
            // Each rank has its own heads of keys.
            Self::Delta(_) => Event::default(),
        }
    }

    /// Sums the gradients of gains of heads over the ranks, since each rank has the gradients of its
    /// own heads.
    pub(crate) fn sum_gains(&self, flat: FlatBuffer<'_>, dev: &Device, shape: &DecoderShape) {
        match self {
            Self::Attention(_) => Attention::sum_gains(flat, dev, shape),
            Self::Delta(_) => DeltaNet::sum_gains(flat, dev, shape),
        }
    }

    /// Computes normed (rows, C) of new tokens -> the outputs of the heads, in `saved`, from them and
    /// the cached tokens. Adds the new tokens to the cache.
    pub(crate) fn extend(
        &self,
        dev: &Device,
        shape: &DecoderShape,
        normed: Tensor,
        saved: MixerActivations,
        extension: Extension<'_>,
    ) {
        match (self, saved) {
            (Self::Attention(own), MixerActivations::Attention(saved)) => {
                own.extend(dev, shape, normed, saved, extension);
            }
            (Self::Delta(own), MixerActivations::Delta(saved)) => {
                own.extend(dev, shape, normed, saved, extension);
            }
            other => unreachable!("a block has what its kind says: {other:?}"),
        }
    }
}
