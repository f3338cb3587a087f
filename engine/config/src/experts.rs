//! Keys of experts, and the rules about them, which `checks` applies.

use super::checks::{Checks, Clash, Count};
use super::declare::{choice, section};
use super::reading::{Interval, KeyDefault, Violation};
use super::{DeviceConfig, Precision};
use serde::Serialize;
use topology::counted;

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

/// Widths of matmuls of experts on GPUs are multiples of this number.
const WIDTH_MULTIPLE: usize = 8;

impl ExpertsConfig {
    /// Whether layer number `layer` has experts.
    pub fn are_in(&self, layer: usize) -> bool {
        !self.dense_layers.contains(&layer)
    }
}

impl Checks<'_> {
    pub(super) const OF_EXPERTS: &'static [Clash] = &[
        Clash {
            has: |c| c.precision == Precision::Fp8 && c.model.experts.is_some(),
            message: "onebox has no fp8 matmuls of experts",
            help: "set `precision: Bf16`",
            values: &[("precision", "fp8 matmuls"), ("model.experts", "experts")],
        },
        Clash {
            has: |c| {
                let experts = c.model.experts.as_ref();
                c.precision == Precision::Fp16
                    && experts.is_some_and(|experts| experts.balance != Balance::Off)
            },
            message: "onebox does not multiply a balance loss by the loss scale of `Fp16`",
            help: "set `precision: Bf16`, or leave `model.experts.balance` out",
            values: &[("model.experts.balance", "a balance loss"), ("precision", "a loss scale")],
        },
    ];

    /// Requires that a token can have as many different experts as it needs.
    pub(super) fn experts_of_token(&self) -> Option<Violation> {
        let experts = self.config.model.experts.as_ref()?;
        let (count, per_token) = (experts.count, experts.per_token);
        (per_token > count).then(|| Violation {
            message: format!(
                "a token cannot have {per_token} different experts of {}",
                counted(count, "expert")
            ),
            help: format!("set `model.experts.per_token` to at most {count}"),
            values: vec![
                ("model.experts.per_token", counted(per_token, "expert")),
                ("model.experts.count", counted(count, "expert")),
            ],
        })
    }

    /// Requires that the layers without experts exist, and that another layer has experts.
    pub(super) fn layers_of_experts(&self) -> Option<Violation> {
        let (m, key) = (&self.config.model, "model.experts.dense_layers");
        let experts = m.experts.as_ref()?;
        let layers = ("model.layers", counted(m.layers, "layer"));
        if let Some(layer) = experts.dense_layers.iter().find(|layer| **layer >= m.layers) {
            return Some(Violation {
                message: format!(
                    "there is no layer {layer}: the layers are 0 to {}",
                    m.layers.saturating_sub(1)
                ),
                help: format!("write numbers of at most {}", m.layers.saturating_sub(1)),
                values: vec![(key, format!("layer {layer}")), layers],
            });
        }
        let none = (0..m.layers).all(|layer| !experts.are_in(layer));
        none.then(|| Violation {
            message: "no layer has experts".into(),
            help: "leave `model.experts` out, or write fewer layers".into(),
            values: vec![(key, "all layers".into()), layers],
        })
    }

    /// Requires that each rank has an equal part of each expert, in which matmuls on GPUs read
    /// whole vectors.
    pub(super) fn experts_over_ranks(&self) -> Option<Violation> {
        let experts = self.config.model.experts.as_ref()?;
        let (key, width) = ("model.experts.ffn_hidden", experts.ffn_hidden);
        let count = Count::new(key, width, "channel");
        if let Some(violation) = count.split_over(self.ranks()) {
            return Some(violation);
        }
        let ranks = self.config.parallel.tensor.max(1);
        let on_gpus = match &self.config.device {
            DeviceConfig::Cpu { .. } => false,
            DeviceConfig::Cuda => true,
            DeviceConfig::Sim { box_, .. } => box_.measured.is_none(),
        };
        let hidden = self.config.model.hidden;
        let sizes =
            [(key, width / ranks, "channels of a rank"), ("model.hidden", hidden, "channels")];
        let odd = sizes.into_iter().find(|(_, size, _)| !size.is_multiple_of(WIDTH_MULTIPLE));
        let (key, size, what) = odd.filter(|_| on_gpus)?;
        Some(Violation {
            message: format!(
                "on GPUs matmuls of experts have widths in multiples of {WIDTH_MULTIPLE}: {size} {what} are none"
            ),
            help: format!("set `{key}` so that they are, or use virtual GPUs, `device: Cpu`"),
            values: vec![(key, format!("{size} {what}")), ("device", "GPUs".into())],
        })
    }
}
