//! The second branch of a block: one MLP, or experts.

use crate::branch::{Branch, Scratch};
use crate::experts::{AppliedExperts, Experts, ExpertsActivations};
use crate::mlp::{Mlp, MlpActivations};
use crate::params::FlatBuffer;
use crate::shape::{DecoderShape, ExpertsShape};
use device::{Device, Dropout, Plan, Tensor};

/// Parameters of the branch, or their gradients.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MlpLayer {
    /// One MLP, which all tokens pass.
    Dense(Mlp),
    /// Experts; each token passes some experts.
    Sparse(Experts),
}

/// Activations of the branch, for the backward pass.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::large_enum_variant, reason = "a step copies handles and allocates nothing")]
pub(crate) enum MlpLayerActivations {
    /// Of one MLP.
    Dense(MlpActivations),
    /// Of experts.
    Sparse(ExpertsActivations),
}

/// The branch in a pass.
#[derive(Clone, Copy, Debug)]
#[expect(clippy::large_enum_variant, reason = "a step copies handles and allocates nothing")]
pub(crate) enum AppliedMlpLayer {
    /// One MLP.
    Dense(Mlp, MlpActivations),
    /// Experts.
    Sparse(AppliedExperts),
}

impl MlpLayer {
    /// Cuts the parameters of a block with `experts`, or with one MLP.
    pub(crate) fn cut(
        flat: FlatBuffer<'_>,
        shape: &DecoderShape,
        experts: Option<ExpertsShape>,
        scratch: &Scratch,
    ) -> Self {
        match experts {
            Some(experts) => Self::Sparse(Experts::cut(flat, shape, &experts, scratch)),
            None => Self::Dense(Mlp::cut(flat, shape, scratch)),
        }
    }

    /// The parameters in a pass that drops the inputs of adapters. Adapters of experts drop nothing.
    pub(crate) fn with_dropout(self, dropout: [Dropout; 2]) -> Self {
        match self {
            Self::Dense(mlp) => Self::Dense(mlp.with_dropout(dropout)),
            Self::Sparse(_) => self,
        }
    }

    /// (C): bias that is added after the sum over the ranks.
    pub(crate) const fn proj_bias(&self) -> Option<Tensor> {
        match self {
            Self::Dense(mlp) => mlp.proj_bias,
            Self::Sparse(_) => None,
        }
    }

    /// One row: the replicated matrices of experts, or their gradients.
    pub(crate) const fn replicated(&self) -> Option<Tensor> {
        match self {
            Self::Dense(_) => None,
            Self::Sparse(experts) => Some(experts.replicated),
        }
    }
}

impl MlpLayerActivations {
    /// Plans the activations of a block with `experts`, or with one MLP.
    pub(crate) fn plan(
        plan: &mut Plan,
        name: &str,
        shape: &DecoderShape,
        scratch: &Scratch,
        experts: Option<ExpertsShape>,
    ) -> Self {
        match experts {
            Some(experts) => {
                Self::Sparse(ExpertsActivations::plan(plan, name, shape, &experts, scratch))
            }
            None => Self::Dense(MlpActivations::plan(plan, name, shape, scratch)),
        }
    }

    /// All tensors but the output of the activation.
    pub(crate) fn tensors(self) -> Vec<Tensor> {
        match self {
            Self::Dense(saved) => saved.tensors(),
            Self::Sparse(saved) => saved.tensors(),
        }
    }
}

impl AppliedMlpLayer {
    /// Number of tokens.
    pub(crate) const fn tokens(&self) -> usize {
        match self {
            Self::Dense(_, saved) => saved.act.shape().0,
            Self::Sparse(experts) => experts.tokens(),
        }
    }

    /// The same for the first `rows` tokens.
    pub(crate) fn first(self, rows: usize) -> Self {
        match self {
            Self::Dense(mlp, saved) => Self::Dense(mlp, saved.first(rows)),
            Self::Sparse(experts) => Self::Sparse(experts.first(rows)),
        }
    }

    /// Chooses the experts of the tokens normed (B T, C), if the block has experts.
    pub(crate) fn route(&self, dev: &Device, normed: Tensor) {
        if let Self::Sparse(experts) = self {
            experts.route(dev, normed);
        }
    }

    /// Adds the numbers of tokens of each expert to the counts, if the block has experts. `targets`
    /// are the targets of [`MicrobatchContext`](crate::MicrobatchContext).
    pub(crate) fn count(&self, dev: &Device, targets: Tensor) {
        if let Self::Sparse(experts) = self {
            experts.count(dev, targets);
        }
    }

    /// Computes normed (B T, C) -> everything that the backward pass needs. The experts must be
    /// [chosen](Self::route).
    pub(crate) fn inner_forward(&self, dev: &Device, shape: &DecoderShape, normed: Tensor) {
        match self {
            Self::Dense(mlp, saved) => mlp.inner_forward(dev, shape, normed, *saved),
            Self::Sparse(experts) => experts.inner_forward(dev, normed),
        }
    }

    /// Computes the output: `partial` (B T, C), to be summed over the ranks.
    pub(crate) fn proj_forward(&self, dev: &Device, partial: Tensor) {
        match self {
            Self::Dense(mlp, saved) => mlp.proj_forward(dev, *saved, partial),
            Self::Sparse(experts) => experts.combine(dev, partial),
        }
    }

    /// Computes `branch.d_normed` (B T, C) from `branch.d_sum` (B T, C), and `grads`. Compute waits
    /// for the sum of `branch.d_normed` over the ranks. `targets` are
    /// the targets of [`MicrobatchContext`](crate::MicrobatchContext).
    pub(crate) fn backward(
        &self,
        dev: &Device,
        shape: &DecoderShape,
        branch: Branch,
        targets: Tensor,
        grads: MlpLayer,
    ) {
        match (self, grads) {
            (Self::Dense(mlp, saved), MlpLayer::Dense(grads)) => {
                mlp.backward(dev, shape, *saved, branch, grads);
            }
            (Self::Sparse(experts), MlpLayer::Sparse(grads)) => {
                experts.backward(dev, branch, targets, grads);
            }
            (Self::Dense(..), MlpLayer::Sparse(_)) | (Self::Sparse(_), MlpLayer::Dense(_)) => {
                unreachable!("gradients have the layout of their block")
            }
        }
    }
}
