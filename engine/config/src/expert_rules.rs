//! Rules about the keys of experts, which `checks` applies.

use super::checks::{Checks, Clash, Count};
use super::reading::Violation;
use super::{Balance, DeviceConfig, Precision};
use topology::counted;

/// Widths of matmuls of experts on GPUs are multiples of this number.
const WIDTH_MULTIPLE: usize = 8;

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
            help: "set `precision: Bf16`, or `model.experts.balance: Off`",
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
