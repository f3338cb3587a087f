//! Forms of blocks: blocks of one form have the same parameters.

use crate::shape::DecoderShape;
use crate::trained_params::TrainedParams;
use std::collections::BTreeMap;

/// Blocks with the same parameters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockForm {
    /// The first of these blocks.
    pub(crate) layer: usize,
    /// Number of these blocks.
    pub(crate) blocks: usize,
}

impl DecoderShape {
    /// The forms of the blocks: blocks of one form have the same parameters, and the same ones are
    /// trained.
    pub(crate) fn block_forms(&self) -> impl Iterator<Item = BlockForm> {
        // Each block may have frozen parameters of its own.
        let differ = matches!(self.trained, TrainedParams::AllBut(_));
        let form_of = move |layer: usize| {
            let kind = self.kind(layer);
            (kind.experts, kind.delta, if differ { layer } else { 0 })
        };
        let mut forms: BTreeMap<_, BlockForm> = BTreeMap::new();
        for layer in 0..self.layers {
            forms.entry(form_of(layer)).or_insert(BlockForm { layer, blocks: 0 }).blocks += 1;
        }
        forms.into_values()
    }
}
