//! Numbers of parameters of a model.

use crate::block::{self, BlockForm};
use crate::decoder::layouts;
use crate::params::SegmentLayout;
use crate::shape::{DecoderShape, ExpertsShape};

impl DecoderShape {
    /// Number of parameters of the model itself, without adapters and padding.
    pub fn parameters(&self) -> u64 {
        self.parameters_with(|experts| experts.count)
    }

    /// Number of trained parameters, without padding.
    pub fn trained_parameters(&self) -> u64 {
        let few = Self { layers: 0, ..self.clone() };
        let of = |s: &SegmentLayout| s.params.iter().map(|p| p.global_len() as u64).sum::<u64>();
        let others: u64 = layouts(&few, 1).iter().map(of).sum();
        let of_form =
            |form: BlockForm| form.blocks as u64 * of(&block::layout(self, form.layer, 1));
        others + self.block_forms().map(of_form).sum::<u64>()
    }

    /// Number of parameters that take part in the computation of one token, without padding.
    pub fn active_parameters(&self) -> u64 {
        self.parameters_with(|experts| experts.per_token)
    }

    /// Number of parameters without padding, if layers with experts have `count` of them.
    fn parameters_with(&self, count: impl Fn(&ExpertsShape) -> usize) -> u64 {
        let few = Self { layers: 0, ..self.clone() };
        let of = |s: &SegmentLayout| s.base_params().map(|p| p.global_len() as u64).sum::<u64>();
        let others: u64 = layouts(&few, 1).iter().map(of).sum();
        let blocks = self.block_forms().map(|BlockForm { layer, blocks }| {
            let own = of(&block::layout(self, layer, 1));
            let left_out = self.experts_of(layer).map_or(0, |experts| {
                let one = 3 * self.hidden * experts.ffn_hidden;
                (experts.count - count(&experts)) * one
            });
            blocks as u64 * (own - left_out as u64)
        });
        others + blocks.sum::<u64>()
    }
}
