//! The load of experts in a step.

use device::{Device, Error, Tensor};
use serde::Serialize;

/// Largest number of experts of a layer (`model.experts.count`).
const MOST_EXPERTS: usize = 1024;

/// The load of the experts of all layers in a step over all data-parallel ranks. An expert's tokens
/// are those that have it among their experts; tokens of padding count.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ExpertLoad {
    /// Least number of tokens of an expert.
    #[serde(rename = "least_expert_tokens")]
    pub least_tokens: u64,
    /// Largest number of tokens of an expert.
    #[serde(rename = "most_expert_tokens")]
    pub most_tokens: u64,
    /// Largest share that one expert has in the tokens of all experts of its layer, 0 to 1.
    #[serde(rename = "largest_expert_share")]
    pub largest_share: f64,
    /// Number of experts of all layers without a token.
    #[serde(rename = "dead_experts")]
    pub dead: u64,
}

impl ExpertLoad {
    /// Reads the load from `loads` (layers with experts, E) F64 on the host.
    ///
    /// # Errors
    /// As [`Device::read`].
    pub(super) fn read(dev: &Device, loads: Tensor) -> Result<Self, Error> {
        let (layers, experts) = loads.shape();
        assert!(experts <= MOST_EXPERTS, "a config has at most {MOST_EXPERTS} experts in a layer");
        let mut row = [0.0; MOST_EXPERTS];
        let mut all = Self { least_tokens: u64::MAX, most_tokens: 0, largest_share: 0.0, dead: 0 };
        for layer in 0..layers {
            dev.read(loads.rows(layer..layer + 1), &mut row[..experts])?;
            all.add(&row[..experts]);
        }
        Ok(all)
    }

    /// Values by their names in TensorBoard.
    pub(crate) fn curves(&self) -> [(&'static str, f32); 4] {
        [
            ("experts/least_tokens", self.least_tokens as f32),
            ("experts/most_tokens", self.most_tokens as f32),
            ("experts/largest_share", self.largest_share as f32),
            ("experts/dead", self.dead as f32),
        ]
    }

    /// Adds a layer with these numbers of tokens of each expert.
    fn add(&mut self, tokens: &[f64]) {
        let sum: f64 = tokens.iter().sum();
        for of_expert in tokens {
            self.least_tokens = self.least_tokens.min(*of_expert as u64);
            self.most_tokens = self.most_tokens.max(*of_expert as u64);
            self.dead += u64::from(*of_expert as u64 == 0);
            self.largest_share = self.largest_share.max(of_expert / sum);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fullest_expert_of_any_layer_has_the_largest_share() {
        let mut all =
            ExpertLoad { least_tokens: u64::MAX, most_tokens: 0, largest_share: 0.0, dead: 0 };
        for layer in [[4.0, 4.0, 4.0, 4.0], [10.0, 0.0, 6.0, 0.0], [1.0, 2.0, 5.0, 8.0]] {
            all.add(&layer);
        }
        let expected =
            ExpertLoad { least_tokens: 0, most_tokens: 10, largest_share: 0.625, dead: 2 };
        assert_eq!(all, expected);
    }
}
