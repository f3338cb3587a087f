//! Rules of the globs of `optimizer.frozen`: each matches a tensor, all leave some tensors, and tensors
//! that one op reads together are frozen together.

use crate::build::shape_of_all;
use crate::frozen_tensors::{names_of, schemes};
use crate::glob::matches;
use config::{Adapter, Config, Violation};
use files::foreign_text::foreign;
use std::collections::BTreeMap;
use tensor_parallel::frozen_unit;

/// Largest number of names in a message.
const SHOWN: usize = 4;

/// The rules of frozen tensors that `config` breaks.
pub(crate) fn broken(config: &Config) -> Option<Violation> {
    let globs = &config.optimizer.frozen;
    if globs.is_empty() || config.adapter != Adapter::None || !config.is_sound() {
        return None;
    }
    let shape = shape_of_all(config);
    let (schemes, params) = (schemes(&shape), shape.parameter_names());
    let names: Vec<Vec<String>> =
        params.iter().map(|name| names_of(&shape, &schemes, name)).collect();
    let has = |glob: &str, number: usize| names[number].iter().any(|name| matches(glob, name));
    let refused = |glob: &str, message: String, help: String| {
        let values = vec![("optimizer.frozen", format!("`{}`", foreign(glob)))];
        Some(Violation { message, help, values })
    };
    for glob in globs {
        if !(0..params.len()).any(|number| has(glob, number)) {
            let some = [0, params.len() / 2].map(|number| format!("`{}`", names[number][0]));
            return refused(
                glob,
                format!("no tensor of the model has a name that `{}` matches", foreign(glob)),
                format!(
                    "write names of transformers such as {}, with `*` for any characters, or leave the glob out",
                    some.join(" or ")
                ),
            );
        }
    }
    let frozen: Vec<bool> =
        (0..params.len()).map(|number| globs.iter().any(|glob| has(glob, number))).collect();
    if frozen.iter().all(|frozen| *frozen) {
        return refused(
            &globs.join(", "),
            "these globs freeze all tensors of the model, so that nothing is trained".into(),
            "leave tensors out of `optimizer.frozen`; to train adapters over frozen weights, set `adapter: Lora(rank: 16, alpha: 32)` in its place".into(),
        );
    }
    let mut units: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (number, name) in params.iter().enumerate() {
        units.entry(frozen_unit(name)).or_default().push(number);
    }
    for unit in units.values() {
        let left: Vec<usize> = unit.iter().copied().filter(|number| !frozen[*number]).collect();
        if left.is_empty() || left.len() == unit.len() {
            continue;
        }
        let glob = globs.iter().find(|glob| unit.iter().any(|number| has(glob, *number)));
        let glob = glob.unwrap_or_else(|| unreachable!("a glob froze a part of the unit"));
        let shown: Vec<String> =
            left.iter().take(SHOWN).map(|number| format!("`{}`", names[*number][0])).collect();
        let more = match left.len().saturating_sub(SHOWN) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        return refused(
            glob,
            format!(
                "`{}` freezes a part of the tensors that onebox multiplies as one: not {}{more}",
                foreign(glob),
                shown.join(", ")
            ),
            "freeze all of them with further globs, or none".into(),
        );
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::shape;
    use config::load_str;
    use std::collections::BTreeSet;
    use std::path::Path;

    /// A config of a small model with more keys, and the refusal of its frozen tensors.
    fn refusal(model: &str, frozen: &str) -> (Config, Option<String>) {
        let ron = format!(
            "(model: (layers: 2, hidden: 32, heads: 4, seq_len: 16, {model}), data: (train: \"x\"),
              optimizer: (frozen: {frozen}), train: (steps: 1))"
        );
        let loaded = load_str(&ron, "a.ron", Path::new("."), &[]);
        let config = loaded.unwrap_or_else(|e| panic!("{e}")).config;
        let broken = broken(&config).map(|broken| broken.message);
        (config, broken)
    }

    const SPARSE: &str =
        "family: Llama, experts: (count: 4, per_token: 2, ffn_hidden: 32, dense_layers: [0])";

    /// Names of the frozen parameters, without the numbers of experts.
    fn frozen(model: &str, globs: &str) -> Vec<String> {
        let (config, refused) = refusal(model, globs);
        assert_eq!(refused, None);
        let whole = shape_of_all(&config);
        let trained = shape(&config).trained;
        let names = whole.parameter_names().into_iter().filter(|name| !trained.contains(name));
        let units: BTreeSet<String> = names.map(|name| frozen_unit(&name)).collect();
        units.into_iter().collect()
    }

    #[test]
    fn globs_match_names_of_transformers_in_all_forms() {
        for globs in ["[\"*.mlp.experts.*\"]", "[\"*.experts.gate_up_proj\", \"*.experts.*.w2.*\"]"]
        {
            assert_eq!(
                frozen(SPARSE, globs),
                ["h.1.moe.experts.0.gate.weight", "h.1.moe.experts.0.proj.weight"]
            );
        }
        const WRAPPED: &str = "[\"model.language_model.layers.*.mlp.gate.weight\"]";
        for globs in ["[\"*.mlp.gate.weight\"]", WRAPPED] {
            assert_eq!(frozen(SPARSE, globs), ["h.1.moe.router.weight"]);
        }
        assert_eq!(frozen("", "[\"lm_head.weight\"]"), ["wte"]);
        assert_eq!(frozen("", "[\"transformer.wpe.*\", \"h.1.ln_1.*\"]").len(), 3);
    }

    #[test]
    fn parts_of_a_product_are_refused() {
        let message = |globs| refusal(SPARSE, globs).1.unwrap_or_default();
        let part = message("[\"*.experts.3.*\"]");
        assert!(
            part.contains("experts.0.gate_proj.weight`") && part.contains("and 2 more"),
            "{part}"
        );
        const GATED: &str = "family: Llama, experts: (count: 4, per_token: 2, ffn_hidden: 32, shared_hidden: 32, shared_gate: true)";
        let both = frozen(GATED, "[\"*layers.1*gate.weight\"]");
        assert_eq!(both, ["h.1.moe.router.weight"]);
        let part = refusal(GATED, "[\"*.mlp.gate.weight\"]").1.unwrap_or_default();
        assert!(part.contains("shared_expert_gate.weight"), "{part}");
        let part = message("[\"*.up_proj.weight\"]");
        assert!(part.contains("gate_proj.weight"), "{part}");
        assert!(message("[\"*.mlp.router.bias\"]").contains("no tensor"));
    }
}
