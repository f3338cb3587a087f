//! Keys of experts.

use super::declare::{choice, section};
use super::reading::{Interval, KeyDefault};
use serde::Serialize;

section! {
    /// Experts in the place of the MLP.
    #[derive(Clone, Debug, PartialEq, Serialize)]
    pub struct ExpertsConfig, read(s, of: Option<&ExpertsConfig>) {
        /// Number of experts of a layer.
        count: usize = uint(
            1..=1024, KeyDefault::Required("count: 8").unless(of.map(|of| of.count))
        ), resume: Experiment;
        /// Number of experts that the router chooses for each token; at most
        /// `model.experts.count`.
        per_token: usize = uint(
            1..=32, KeyDefault::Required("per_token: 2").unless(of.map(|of| of.per_token))
        ), resume: Experiment;
        /// Inner width of an expert; a multiple of `parallel.tensor`, and on GPUs of 8 x
        /// `parallel.tensor`.
        ffn_hidden: usize = uint(
            1..=4_000_000, KeyDefault::Required("ffn_hidden: 768").unless(of.map(|of| of.ffn_hidden))
        ), resume: Experiment;
        /// Whether the weights of a token's experts are divided by their sum. A weight is the
        /// router's probability of the expert among all experts.
        normalize: bool = flag(
            KeyDefault::Default(true).unless(of.map(|of| of.normalize))
        ), resume: Experiment;
        /// Numbers of the layers, from 0, that have one MLP of `model.ffn_hidden` and no experts.
        dense_layers: Vec<usize> = uints(
            0..=9_999, KeyDefault::Default(Vec::new()).unless(of.map(|of| of.dense_layers.clone()))
        ), resume: Experiment;
        /// Loss that spreads the tokens evenly over the experts, for each micro-batch of each
        /// replica. The reported loss does not include it. `Off`: no such loss. `HuggingFace`: that
        /// of transformers, over all layers together. `Megatron`: that of Megatron-LM, for each
        /// layer. Tokens of padding do not count. A step has the mean over its micro-batches and
        /// replicas, however few targets count.
        balance: Balance = choice_with(
            KeyDefault::Default(Balance::Off).unless(of.map(|of| of.balance)), of.map(|of| of.balance)
        ), resume: Experiment;
    }
}

choice! {
    /// Losses that spread the tokens evenly over the experts.
    #[derive(Clone, Copy, Debug, PartialEq, Serialize)]
    pub enum Balance, read(of: Option<Balance>) {
        /// There is no such loss.
        Off,
        /// The loss of transformers.
        HuggingFace["(factor: 0.001)"] {
            /// Factor of the balance loss of transformers (`router_aux_loss_coef`).
            factor: f32 = float(FACTOR, KeyDefault::Required("factor: 0.001").unless(match of {
                Some(Balance::HuggingFace { factor }) => Some(factor),
                _ => None,
            }));
        },
        /// The loss of Megatron-LM.
        Megatron["(factor: 0.001)"] {
            /// Factor of the balance loss of Megatron-LM (`moe_aux_loss_coeff`).
            factor: f32 = float(FACTOR, KeyDefault::Required("factor: 0.001").unless(match of {
                Some(Balance::Megatron { factor }) => Some(factor),
                _ => None,
            }));
        },
    }
}

/// Allowed factors of a balance loss.
const FACTOR: Interval = Interval::above(0.0, 1e3);

impl ExpertsConfig {
    /// Whether layer number `layer` has experts.
    pub fn are_in(&self, layer: usize) -> bool {
        !self.dense_layers.contains(&layer)
    }
}
