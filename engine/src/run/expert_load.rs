//! The load of experts in a step.

use device::{Device, Error, MOST_EXPERTS, Tensor};
use serde::{Serialize, Serializer};
use std::fmt;
use tensor_parallel::ExpertsShape;

/// The load of the experts of all layers in a step over all data-parallel ranks. An expert's tokens
/// are those that have it among their experts; tokens of padding do not count.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ExpertLoad {
    /// Numbers of tokens by the number of the expert in its layer.
    #[serde(rename = "expert_tokens")]
    pub tokens: ExpertTokens,
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
    /// Mean of the balance losses of the micro-batches, without their factor; `None` if
    /// `model.experts.balance` is `Off`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub balance_loss: Option<f64>,
}

/// Numbers of tokens of the experts of a layer, or sums of them over the layers. A step allocates
/// nothing, so there is room for every model's experts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ExpertTokens {
    counts: [u64; MOST_EXPERTS],
    experts: usize,
}

impl ExpertTokens {
    /// No tokens of `experts` experts.
    const fn none(experts: usize) -> Self {
        assert!(experts <= MOST_EXPERTS, "a config has at most 1024 experts in a layer");
        Self { counts: [0; MOST_EXPERTS], experts }
    }

    /// The number of each expert's tokens.
    pub fn counts(&self) -> &[u64] {
        &self.counts[..self.experts]
    }
}

impl fmt::Debug for ExpertTokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.counts()).finish()
    }
}

impl Serialize for ExpertTokens {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.counts())
    }
}

impl ExpertLoad {
    /// No load of `experts` experts of a layer.
    const fn none(experts: usize) -> Self {
        Self {
            tokens: ExpertTokens::none(experts),
            least_tokens: u64::MAX,
            most_tokens: 0,
            largest_share: 0.0,
            dead: 0,
            balance_loss: None,
        }
    }

    /// Reads the load from `loads` on the host, which has the form of
    /// [`Decoder::expert_loads`](tensor_parallel::Decoder::expert_loads). `passes`: number of
    /// micro-batches of all data-parallel ranks.
    ///
    /// # Errors
    /// As [`Device::read`].
    pub(super) fn read(
        dev: &Device,
        loads: Tensor,
        shape: &ExpertsShape,
        passes: usize,
    ) -> Result<Self, Error> {
        let (experts, end) = (shape.count, loads.len() - 1);
        let mut all = Self::none(experts);
        let mut row = [0.0; MOST_EXPERTS];
        for first in (0..end).step_by(experts) {
            dev.read(loads.slice(first..first + experts), &mut row[..experts])?;
            all.add(&row[..experts]);
        }
        if shape.balance.is_some() {
            dev.read(loads.slice(end..end + 1), &mut row[..1])?;
            all.balance_loss = Some(row[0] / passes as f64);
        }
        Ok(all)
    }

    /// Values by their names in TensorBoard.
    pub(crate) fn curves(&self) -> impl Iterator<Item = (&'static str, f32)> {
        let balance = self.balance_loss.map(|loss| ("experts/balance_loss", loss as f32));
        [
            ("experts/least_tokens", self.least_tokens as f32),
            ("experts/most_tokens", self.most_tokens as f32),
            ("experts/largest_share", self.largest_share as f32),
            ("experts/dead", self.dead as f32),
        ]
        .into_iter()
        .chain(balance)
    }

    /// Adds a layer with these numbers of tokens of each expert.
    fn add(&mut self, tokens: &[f64]) {
        let sum: f64 = tokens.iter().sum();
        for (of_expert, in_all) in tokens.iter().zip(&mut self.tokens.counts) {
            let count = *of_expert as u64;
            *in_all += count;
            self.least_tokens = self.least_tokens.min(count);
            self.most_tokens = self.most_tokens.max(count);
            self.dead += u64::from(count == 0);
            self.largest_share = self.largest_share.max(of_expert / sum);
        }
    }

    /// The load of layers with these numbers of tokens of each expert, for tests.
    #[cfg(test)]
    pub(crate) fn of_layers<const E: usize>(layers: &[[f64; E]]) -> Self {
        let mut all = Self::none(E);
        layers.iter().for_each(|layer| all.add(layer));
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fullest_expert_of_any_layer_has_the_largest_share() {
        let layers = [[4.0, 4.0, 4.0, 4.0], [10.0, 0.0, 6.0, 0.0], [1.0, 2.0, 5.0, 8.0]];
        let all = ExpertLoad::of_layers(&layers);
        assert_eq!(all.tokens.counts(), [15, 6, 15, 12]);
        assert_eq!([all.least_tokens, all.most_tokens, all.dead], [0, 10, 2]);
        assert_eq!((all.largest_share, all.balance_loss), (0.625, None));
    }
}
