//! Rules about gated delta nets and gates of attention's output, which `checks` applies.

use super::checks::{Checks, Clash, Count};
use super::layer_pattern::DELTA;
use super::reading::Violation;
use super::{Config, Gate, Precision, ScoreRule};

/// Whether a layer has a gated delta net.
fn has_delta(config: &Config) -> bool {
    config.model.layer_pattern.contains(DELTA)
}

const OF_LAYERS: (&str, &str) = ("model.layer_pattern", "gated delta nets");
const OF_OUTPUT: (&str, &str) = ("model.output_gate", "a gate of attention's output");

impl Checks<'_> {
    pub(super) const OF_DELTA_NETS: &'static [Clash] = &[
        Clash {
            has: |c| has_delta(c) && c.precision == Precision::Fp8,
            message: "onebox has no fp8 matmuls of gated delta nets",
            help: "set `precision: Bf16`",
            values: &[("precision", "fp8 matmuls"), OF_LAYERS],
        },
        Clash {
            has: |c| c.model.output_gate && c.precision == Precision::Fp8,
            message: "onebox has no fp8 matmul of the gate of attention's output",
            help: "set `precision: Bf16`",
            values: &[("precision", "fp8 matmuls"), OF_OUTPUT],
        },
        Clash {
            has: |c| {
                let experts = c.model.experts.as_ref();
                has_delta(c) && experts.is_some_and(|experts| experts.scoring != ScoreRule::Softmax)
            },
            message: "no model has scores by sigmoid and gated delta nets",
            help: "set `model.experts.scoring` to `Softmax`, or write no `D` in `model.layer_pattern`",
            values: &[("model.experts.scoring", "scores by sigmoid"), OF_LAYERS],
        },
        Clash {
            has: |c| has_delta(c) && c.model.experts.as_ref().is_some_and(|experts| experts.biases),
            message: "no model has biases of experts and gated delta nets",
            help: "set `model.experts.biases` to `false`, or write no `D` in `model.layer_pattern`",
            values: &[("model.experts.biases", "biases"), OF_LAYERS],
        },
        Clash {
            has: |c| has_delta(c) && matches!(c.model.gate, Gate::ClampedSilu { .. }),
            message: "no model has gates with a limit and gated delta nets",
            help: "set `model.gate` to `Silu`, or write no `D` in `model.layer_pattern`",
            values: &[("model.gate", "gates with a limit"), OF_LAYERS],
        },
        Clash {
            has: |c| (has_delta(c) || c.model.output_gate) && c.model.attention_sinks,
            message: "no model has attention sinks and gated delta nets, or a gate of attention's output",
            help: "set `model.attention_sinks` to `false`",
            values: &[("model.attention_sinks", "sinks"), OF_LAYERS, OF_OUTPUT],
        },
        Clash {
            has: |c| has_delta(c) && c.model.dropout > 0.0,
            message: "a gated delta net has no attention weights to drop",
            help: "set `model.dropout: 0.0`",
            values: &[("model.dropout", "drops attention weights"), OF_LAYERS],
        },
        Clash {
            has: |c| c.model.output_gate && c.model.qkv_bias,
            message: "the gate of attention's output has no bias, and queries have one",
            help: "set `model.qkv_bias: false`, or leave `model.output_gate` out",
            values: &[OF_OUTPUT, ("model.qkv_bias", "biases of queries, keys and values")],
        },
    ];

    /// Requires that layers with a gated delta net and their sizes come together.
    pub(super) fn delta_nets_of_layers(&self) -> Option<Violation> {
        let m = &self.config.model;
        let pattern = ("model.layer_pattern", format!("{:?}", m.layer_pattern));
        let named = m.layer_pattern.contains(DELTA);
        let (message, help, sizes) = match (named, m.delta_net.is_some()) {
            (true, false) => (
                "layers with a gated delta net need its sizes",
                "set `model.delta_net`, such as `(key_heads: 16, value_heads: 32)`, or write no `D`",
                "no sizes",
            ),
            (false, true) => (
                "no layer has the gated delta net",
                "write `D` in `model.layer_pattern` for layers with it, or leave `model.delta_net` out",
                "sizes",
            ),
            _ => return None,
        };
        Some(Violation {
            message: message.into(),
            help: help.into(),
            values: vec![pattern, ("model.delta_net", sizes.into())],
        })
    }

    /// Requires that each head of keys has equally many heads of values, and each rank equally many
    /// heads of keys.
    pub(super) fn heads_of_delta_nets(&self) -> Option<Violation> {
        let delta = self.config.model.delta_net.as_ref()?;
        let keys = Count::new("model.delta_net.key_heads", delta.key_heads, "head");
        let values = Count::new("model.delta_net.value_heads", delta.value_heads, "head");
        values.split_over(keys).or_else(|| keys.split_over(self.ranks()))
    }
}

#[cfg(test)]
mod tests {
    use crate::tests::{LEAST, config, loaded};

    const FAMILY: &str = "model.family=Llama";
    const PATTERN: &str = "model.layer_pattern=D";
    const NET: &str = "model.delta_net=(key_heads: 2, value_heads: 4)";
    const EXPERTS: &str = "model.experts=(count: 4, per_token: 2, ffn_hidden: 8)";

    #[test]
    fn a_combination_with_gated_delta_nets_that_onebox_lacks_is_refused() {
        assert!(config(LEAST, &[FAMILY, PATTERN, NET]).model.delta_net.is_some());
        let both = config(LEAST, &[FAMILY, PATTERN, NET, EXPERTS]).model;
        assert!(both.delta_net.is_some() && both.experts.is_some());
        for (sets, message) in [
            (&[PATTERN][..], "layers with a gated delta net need its sizes"),
            (&[NET], "no layer has the gated delta net"),
            (&[PATTERN, NET, "precision=Fp8"], "no fp8 matmuls of gated delta nets"),
            (&[PATTERN, NET, "model.dropout=0.1"], "no attention weights to drop"),
            (&["model.output_gate=true", "precision=Fp8"], "no fp8 matmul of the gate"),
            (
                &["model.output_gate=true", "model.qkv_bias=true"],
                "the gate of attention's output has",
            ),
            (
                &[
                    PATTERN,
                    NET,
                    "model.experts=(count: 4, per_token: 2, ffn_hidden: 8, scoring: Sigmoid)",
                ],
                "no model has scores by sigmoid and gated delta nets",
            ),
            (
                &[
                    PATTERN,
                    NET,
                    "model.experts=(count: 4, per_token: 2, ffn_hidden: 8, biases: true)",
                ],
                "no model has biases of experts and gated delta nets",
            ),
            (
                &[PATTERN, NET, EXPERTS, "model.gate=ClampedSilu"],
                "no model has gates with a limit and gated delta nets",
            ),
            (
                &["model.output_gate=true", EXPERTS, "model.attention_sinks=true"],
                "no model has attention sinks and gated delta nets, or a gate",
            ),
            (
                &[PATTERN, "model.delta_net=(key_heads: 3, value_heads: 4)"],
                "4 heads cannot be split evenly over 3 heads",
            ),
            (&[PATTERN, NET, "parallel.tensor=4"], "2 heads cannot be split evenly over 4"),
            (&[PATTERN, "model.delta_net=(key_heads: 2, value_heads: 4, key_dim: 129)"], "129"),
        ] {
            let sets = [&[FAMILY, "model.layers=2", "model.heads=4"], sets].concat();
            let why = loaded(LEAST, &sets).unwrap_err().to_string();
            assert!(why.contains(message), "{sets:?}: {why}");
        }
        let why = loaded(LEAST, &["model.output_gate=true"]).unwrap_err().to_string();
        assert!(why.contains("a GPT-2 is not made like that"), "{why}");
    }
}
