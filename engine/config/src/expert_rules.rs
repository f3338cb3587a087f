//! Rules about the keys of experts, which `checks` applies.

use super::checks::{Checks, Clash, Count};
use super::reading::Violation;
use super::{Balance, DeviceConfig, Gate, Precision, ScoreRule};
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
        Clash {
            has: |c| c.model.attention_sinks && c.model.experts.is_none(),
            message: "no model has attention sinks and no experts",
            help: "set `model.attention_sinks` to `false`, or write `model.experts`",
            values: &[("model.attention_sinks", "sinks"), ("model.experts", "no experts")],
        },
        Clash {
            has: |c| matches!(c.model.gate, Gate::ClampedSilu { .. }) && c.model.experts.is_none(),
            message: "no model has gates with a limit and no experts",
            help: "set `model.gate` to `Silu`, or write `model.experts`",
            values: &[("model.gate", "gates with a limit"), ("model.experts", "no experts")],
        },
        Clash {
            has: |c| {
                let experts = c.model.experts.as_ref();
                experts.is_some_and(|experts| experts.shared_gate && experts.shared_hidden == 0)
            },
            message: "there is no shared expert whose output the gate could multiply",
            help: "set `model.experts.shared_hidden` to its inner width, or `model.experts.shared_gate` to `false`",
            values: &[
                ("model.experts.shared_gate", "a gate"),
                ("model.experts.shared_hidden", "no shared expert"),
            ],
        },
        Clash {
            has: |c| {
                let experts = c.model.experts.as_ref();
                experts.is_some_and(|experts| {
                    experts.scoring != ScoreRule::Softmax && experts.balance != Balance::Off
                })
            },
            message: "onebox has a balance loss of probabilities, and sigmoids are none",
            help: "set `model.experts.balance` to `Off`",
            values: &[
                ("model.experts.balance", "a balance loss"),
                ("model.experts.scoring", "scores by sigmoid"),
            ],
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

    /// Requires groups that a router can compare, and that hold the experts of a token.
    pub(super) fn groups_of_experts(&self) -> Option<Violation> {
        let experts = self.config.model.experts.as_ref()?;
        let ScoreRule::Sigmoid { groups, kept_groups, .. } = experts.scoring else { return None };
        if groups == 1 && kept_groups == 1 {
            return None;
        }
        let (count, per_token) = (experts.count, experts.per_token);
        let (of_groups, of_kept) =
            ("model.experts.scoring.groups", "model.experts.scoring.kept_groups");
        let all = (of_groups, counted(groups, "group"));
        let size = count / groups.max(1);
        if !count.is_multiple_of(groups) || size < 2 {
            return Some(Violation {
                message: format!(
                    "{} do not form {} of equally many experts, two at least",
                    counted(count, "expert"),
                    counted(groups, "group")
                ),
                help: format!("set `{of_groups}` to a divisor of half of the experts, such as 1"),
                values: vec![all, ("model.experts.count", counted(count, "expert"))],
            });
        }
        if kept_groups > groups {
            return Some(Violation {
                message: format!("{kept_groups} of {} cannot be chosen", counted(groups, "group")),
                help: format!("set `{of_kept}` to at most {groups}"),
                values: vec![(of_kept, counted(kept_groups, "group")), all],
            });
        }
        (kept_groups * size < per_token).then(|| Violation {
            message: format!(
                "a token cannot have {} from {} of {size}",
                counted(per_token, "expert"),
                counted(kept_groups, "group")
            ),
            help: format!("set `{of_kept}` to at least {}", per_token.div_ceil(size)),
            values: vec![
                (of_kept, counted(kept_groups, "group")),
                ("model.experts.per_token", counted(per_token, "expert")),
            ],
        })
    }

    /// Requires that each rank has an equal part of each expert, in which matmuls on GPUs read
    /// whole vectors.
    pub(super) fn experts_over_ranks(&self) -> Option<Violation> {
        let experts = self.config.model.experts.as_ref()?;
        let (key, width) = ("model.experts.ffn_hidden", experts.ffn_hidden);
        let count = Count::new(key, width, "channel");
        let shared = Count::new("model.experts.shared_hidden", experts.shared_hidden, "channel");
        let uneven = [count, shared].into_iter().find_map(|count| count.split_over(self.ranks()));
        if uneven.is_some() {
            return uneven;
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
