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
        /// router's score of the expert.
        normalize: bool = flag(
            KeyDefault::Default(true).unless(of.map(|of| of.normalize))
        ), resume: Experiment;
        /// How a router scores the experts of a token. `Softmax`: a score is the probability of an
        /// expert among all experts. `Sigmoid`: a score is the sigmoid of one logit, and each expert
        /// has a correction, which only the choice adds to the score. The folder of the model gives
        /// the corrections, and no training changes them (GLM-4.5, DeepSeek-V3).
        scoring: ScoreRule = choice_with(
            KeyDefault::Default(ScoreRule::Softmax).unless(of.map(|of| of.scoring)), of.map(|of| of.scoring)
        ), resume: Experiment;
        /// Inner width of the shared expert, which is an MLP for all tokens; a multiple of
        /// `parallel.tensor`. Its output is added to the output of the chosen experts. 0: a layer has
        /// no shared expert.
        shared_hidden: usize = uint(
            0..=4_000_000, KeyDefault::Default(0).unless(of.map(|of| of.shared_hidden))
        ), resume: Experiment;
        /// Whether the output of the shared expert has a factor for each token: the sigmoid of a linear
        /// with one row (Qwen3-Next, Qwen3.5). Needs a shared expert.
        shared_gate: bool = flag(
            KeyDefault::Default(false).unless(of.map(|of| of.shared_gate))
        ), resume: Experiment;
        /// Whether the router and the linears of the experts have biases (gpt-oss). A shared expert
        /// has none.
        biases: bool = flag(
            KeyDefault::Default(false).unless(of.map(|of| of.biases))
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
    /// How a router scores the experts of a token.
    #[derive(Clone, Copy, Debug, PartialEq, Serialize)]
    pub enum ScoreRule, read(of: Option<ScoreRule>) {
        /// By a softmax over all experts.
        Softmax,
        /// By a sigmoid of each expert.
        Sigmoid["(groups: 1, kept_groups: 1, scale: 1.0)"] {
            /// Number of groups of equally many experts. A group is as good as the sum of its two best
            /// experts.
            groups: usize = uint(1..=32, KeyDefault::Default(1).unless(match of {
                Some(ScoreRule::Sigmoid { groups, .. }) => Some(groups),
                _ => None,
            }));
            /// Number of best groups from which a token's experts come; at most `groups`.
            kept_groups: usize = uint(1..=32, KeyDefault::Default(1).unless(match of {
                Some(ScoreRule::Sigmoid { kept_groups, .. }) => Some(kept_groups),
                _ => None,
            }));
            /// Factor of the weights of a token's experts.
            scale: f32 = float(SCALE, KeyDefault::Default(1.0).unless(match of {
                Some(ScoreRule::Sigmoid { scale, .. }) => Some(scale),
                _ => None,
            }));
        },
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

/// Allowed factors of weights.
const SCALE: Interval = Interval::above(0.0, 1e3);

/// Allowed factors of a balance loss.
const FACTOR: Interval = Interval::above(0.0, 1e3);

impl ExpertsConfig {
    /// Whether layer number `layer` has experts.
    pub fn are_in(&self, layer: usize) -> bool {
        !self.dense_layers.contains(&layer)
    }
}
