//! Frozen parameters of a model whose other parameters are trained. The parameters that one op reads
//! together, such as q, k and v or the same matrix of all experts of a layer, are one unit: all of
//! them are frozen, or none is.

use crate::experts_shape::EXPERTS;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Parts of the names of parameters that one op reads together.
const TOGETHER: [&[&str]; 9] = [
    &["attn.q.", "attn.k.", "attn.v."],
    &["attn.q_norm.", "attn.k_norm."],
    &["mlp.gate.", "mlp.up."],
    &["moe.experts.0.gate.", "moe.experts.0.up."],
    &["moe.shared.gate.", "moe.shared.up."],
    &["moe.router.weight", "moe.shared.output_gate.weight"],
    &["delta.q.", "delta.k.", "delta.v."],
    &["delta.conv_q.", "delta.conv_k.", "delta.conv_v."],
    &["delta.b.", "delta.a."],
];

/// Global name of the first of the parameters that are frozen together with the parameter `name`.
pub fn frozen_unit(name: &str) -> String {
    let of_first_expert = name.split_once(EXPERTS).and_then(|(layer, rest)| {
        let (_, part) = rest.split_once('.')?;
        Some(format!("{layer}{EXPERTS}0.{part}"))
    });
    let name = of_first_expert.unwrap_or_else(|| name.to_owned());
    let first = TOGETHER.iter().find_map(|parts| {
        let own = parts.iter().find(|part| name.contains(**part))?;
        Some(name.replacen(own, parts[0], 1))
    });
    first.unwrap_or(name)
}

/// Frozen parameters, as the names of their [units](frozen_unit).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FrozenParams(Arc<BTreeSet<String>>);

impl FrozenParams {
    /// Whether the parameter with the global name `name` is frozen.
    pub(crate) fn contains(&self, name: &str) -> bool {
        self.0.contains(&frozen_unit(name))
    }
}

impl FromIterator<String> for FrozenParams {
    fn from_iter<T: IntoIterator<Item = String>>(units: T) -> Self {
        Self(Arc::new(units.into_iter().collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_op_reads_is_frozen_together() {
        for (name, unit) in [
            ("h.3.attn.v.bias", "h.3.attn.q.bias"),
            ("h.3.attn.k_norm.weight", "h.3.attn.q_norm.weight"),
            ("h.3.attn.gate.weight", "h.3.attn.gate.weight"),
            ("h.0.moe.experts.17.up.weight", "h.0.moe.experts.0.gate.weight"),
            ("h.0.moe.experts.17.proj.bias", "h.0.moe.experts.0.proj.bias"),
            ("h.0.moe.shared.up.weight", "h.0.moe.shared.gate.weight"),
            ("h.0.moe.shared.output_gate.weight", "h.0.moe.router.weight"),
            ("h.12.delta.a.weight", "h.12.delta.b.weight"),
            ("h.12.delta.a_log", "h.12.delta.a_log"),
            ("wte", "wte"),
        ] {
            assert_eq!(frozen_unit(name), unit);
        }
        let frozen: FrozenParams = ["h.3.attn.q.weight".to_owned()].into_iter().collect();
        let has = |name| frozen.contains(name);
        assert_eq!(
            ["h.3.attn.k.weight", "h.3.attn.k.bias", "h.4.attn.k.weight"].map(has),
            [true, false, false]
        );
    }
}
