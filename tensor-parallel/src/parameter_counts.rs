//! Names and numbers of the parameters of a model.

use crate::block;
use crate::block_form::BlockForm;
use crate::decoder::layouts;
use crate::experts_shape::EXPERTS;
use crate::params::{Param, SegmentLayout};
use crate::shape::{DecoderShape, ExpertsShape};
use crate::trained_params::TrainedParams;

impl DecoderShape {
    /// Global names of the parameters of the model itself, without adapters.
    pub fn parameter_names(&self) -> Vec<String> {
        let whole = Self { tp_size: 1, trained: TrainedParams::All, ..self.clone() };
        let all = layouts(&whole, 1);
        all.into_iter().flat_map(|layout| layout.params).map(|param| param.name).collect()
    }

    /// Whether the run trains only a part of the parameters.
    pub fn has_frozen_params(&self) -> bool {
        self.trained != TrainedParams::All
    }

    /// Number of parameters of frozen linears that a token passes, in a full fine-tune.
    pub(crate) fn frozen_linears(&self) -> f64 {
        if !matches!(self.trained, TrainedParams::AllBut(_)) {
            return 0.0;
        }
        let passed = |param: &Param| {
            let name = param.name.as_str();
            let is_linear = match name {
                "wte" => self.architecture.tied,
                "wpe" => false,
                _ => !param.is_vector && !name.contains(".delta.conv_"),
            };
            let of_experts = self.experts.filter(|_| name.contains(EXPERTS));
            let share = of_experts.map_or(1.0, |e| e.per_token as f64 / e.count as f64);
            if is_linear { share * param.global_len() as f64 } else { 0.0 }
        };
        layouts(self, 1).iter().flat_map(|layout| &layout.frozen).map(passed).sum()
    }

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
