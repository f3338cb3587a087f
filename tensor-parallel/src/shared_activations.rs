//! Forms of blocks, and the activations that several blocks share.

use crate::block::BlockActivations;
use crate::branch::Scratch;
use crate::shape::{DecoderShape, ExpertsShape, Recompute};
use device::Plan;

/// Blocks with the same parameters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockForm {
    /// The first of these blocks.
    pub(crate) layer: usize,
    /// Number of these blocks.
    pub(crate) blocks: usize,
}

impl DecoderShape {
    /// The forms of the blocks: blocks of one form have the same parameters.
    pub(crate) fn block_forms(&self) -> impl Iterator<Item = BlockForm> {
        [false, true].into_iter().filter_map(move |experts| {
            let mut all = (0..self.layers).filter(|layer| self.kind(*layer).experts == experts);
            let layer = all.next()?;
            Some(BlockForm { layer, blocks: 1 + all.count() })
        })
    }
}

/// Activations that blocks share with [`Recompute::Block`]: a set for blocks with one MLP, and a set
/// for blocks with experts. The two sets differ only in the MLP.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedActivations {
    dense: Option<BlockActivations>,
    sparse: Option<BlockActivations>,
}

impl SharedActivations {
    /// Plans the sets, if blocks share activations.
    pub(crate) fn plan(plan: &mut Plan, shape: &DecoderShape, scratch: &Scratch) -> Self {
        let mut all = Self { dense: None, sparse: None };
        for BlockForm { layer, .. } in shape.block_forms() {
            if shape.recompute != Recompute::Block {
                break;
            }
            let experts = shape.experts_of(layer);
            match (all.dense, experts) {
                (Some(dense), Some(_)) => {
                    let sparse = dense.with_own_mlp(plan, shape, "block", scratch, experts);
                    all.sparse = Some(sparse);
                }
                (_, None) => {
                    all.dense = Some(BlockActivations::plan(plan, shape, "block", scratch, None));
                }
                (None, Some(_)) => {
                    all.sparse =
                        Some(BlockActivations::plan(plan, shape, "block", scratch, experts));
                }
            }
        }
        all
    }

    /// The set of blocks with `experts`, or with one MLP.
    pub(crate) fn of(&self, experts: Option<ExpertsShape>) -> Option<BlockActivations> {
        if experts.is_some() { self.sparse } else { self.dense }
    }
}
