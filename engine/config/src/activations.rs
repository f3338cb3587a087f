//! Tiers of activations: blocks that keep their activations on the GPU or on the host.

use super::declare::choice;
use super::reading::KeyDefault;
use serde::Serialize;

choice! {
    /// Blocks that keep their activations until the backward pass, although `recompute` is `Block`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    pub enum Activations {
        /// No blocks: `recompute` decides for all blocks.
        Uniform,
        /// Numbers of blocks by memory and simulated time. Until they are chosen: no blocks.
        Auto,
        /// The last blocks keep their activations on the GPU, and some of the other blocks keep
        /// them on the host. The remaining blocks recompute them.
        Tiers["(gpu_blocks: 4, host_blocks: 20)"] {
            /// Number of blocks, counted from the last, that keep their activations on the GPU.
            gpu_blocks: usize = uint(0..=10_000, KeyDefault::Default(0));
            /// Number of blocks whose activations go to pinned host memory and return before the
            /// block's backward pass, spread evenly over the other blocks. The GPU needs room for
            /// two of them. The last two of these blocks do not move if one micro-batch at a time
            /// goes through the blocks.
            host_blocks: usize = uint(0..=10_000, KeyDefault::Default(0));
            /// As `activations.gpu_blocks`, for the activations of the MLP alone, which are most of
            /// a block's. None: the same number.
            gpu_mlps: Option<usize> = uint_or_none(0..=10_000, KeyDefault::Default(None));
            /// As `activations.host_blocks`, for the activations of the MLP alone. None: the same
            /// number.
            host_mlps: Option<usize> = uint_or_none(0..=10_000, KeyDefault::Default(None));
        },
    }
}

/// Numbers of blocks that keep the activations of one branch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeptBlocks {
    /// Number of blocks that keep them on the GPU.
    pub gpu: usize,
    /// Number of blocks that keep them on the host.
    pub host: usize,
}

const fn given_or(given: Option<usize>, otherwise: usize) -> usize {
    match given {
        Some(number) => number,
        None => otherwise,
    }
}

impl Activations {
    /// Numbers of blocks that keep the activations of attention.
    pub const fn attention(self) -> KeptBlocks {
        match self {
            Self::Uniform | Self::Auto => KeptBlocks { gpu: 0, host: 0 },
            Self::Tiers { gpu_blocks, host_blocks, .. } => {
                KeptBlocks { gpu: gpu_blocks, host: host_blocks }
            }
        }
    }

    /// Numbers of blocks that keep the activations of the MLP.
    pub const fn mlp(self) -> KeptBlocks {
        match self {
            Self::Uniform | Self::Auto => KeptBlocks { gpu: 0, host: 0 },
            Self::Tiers { gpu_blocks, host_blocks, gpu_mlps, host_mlps } => KeptBlocks {
                gpu: given_or(gpu_mlps, gpu_blocks),
                host: given_or(host_mlps, host_blocks),
            },
        }
    }

    /// The same tiers in a model of `layers` blocks: if they are more blocks, fewer are on the host,
    /// and then fewer on the GPU.
    #[must_use]
    pub fn within(self, layers: usize) -> Self {
        let [attention, mlp] = [self.attention(), self.mlp()].map(|kept| {
            let gpu = kept.gpu.min(layers);
            KeptBlocks { gpu, host: kept.host.min(layers - gpu) }
        });
        if [attention, mlp] == [self.attention(), self.mlp()] {
            return self;
        }
        Self::Tiers {
            gpu_blocks: attention.gpu,
            host_blocks: attention.host,
            gpu_mlps: (mlp.gpu != attention.gpu).then_some(mlp.gpu),
            host_mlps: (mlp.host != attention.host).then_some(mlp.host),
        }
    }

    /// Whether activations move to the host.
    pub const fn moves(self) -> bool {
        self.attention().host > 0 || self.mlp().host > 0
    }
}
