//! Names of the tensors in transformers, and whether transformers stores them transposed.

use tensor_parallel::Architecture;

/// Naming scheme of a model family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Names {
    /// `GPT2LMHeadModel`.
    Gpt2,
    /// `LlamaForCausalLM`, and the classes of Mistral, Qwen2 and Qwen3, which use the same names.
    Llama,
}

/// Name of the output projection, which is outside of the inner model, so it has no prefix.
pub(super) const HEAD: &str = "lm_head.weight";

/// Parts of names: (onebox, transformers).
const GPT2: [(&str, &str); 4] = [
    (".attn.qkv.", ".attn.c_attn."),
    (".attn.proj.", ".attn.c_proj."),
    (".mlp.fc.", ".mlp.c_fc."),
    (".mlp.proj.", ".mlp.c_proj."),
];
const LLAMA: [(&str, &str); 11] = [
    (".ln_1.", ".input_layernorm."),
    (".attn.q.", ".self_attn.q_proj."),
    (".attn.k.", ".self_attn.k_proj."),
    (".attn.v.", ".self_attn.v_proj."),
    (".attn.q_norm.", ".self_attn.q_norm."),
    (".attn.k_norm.", ".self_attn.k_norm."),
    (".attn.proj.", ".self_attn.o_proj."),
    (".ln_2.", ".post_attention_layernorm."),
    (".mlp.gate.", ".mlp.gate_proj."),
    (".mlp.up.", ".mlp.up_proj."),
    (".mlp.proj.", ".mlp.down_proj."),
];

impl Names {
    pub(super) const fn of(parts: &Architecture) -> Self {
        if parts.joined_qkv { Self::Gpt2 } else { Self::Llama }
    }

    /// Name of the embedding table in transformers, without the prefix.
    pub(super) fn table(self) -> String {
        self.foreign("wte").0
    }

    /// Name of a tensor in transformers, without the prefix, and whether its matrix is stored
    /// transposed. A GPT-2 stores its linears as (in, out).
    pub(super) fn foreign(self, name: &str) -> (String, bool) {
        let replaced = |names: &[(&str, &str)], name: &str| {
            let found = names.iter().find(|(ours, _)| name.contains(ours));
            found.map(|(ours, theirs)| name.replace(ours, theirs))
        };
        match (self, name) {
            (_, "head") => (HEAD.into(), false),
            (Self::Gpt2, "wte" | "wpe") => (format!("{name}.weight"), false),
            (Self::Gpt2, _) => match replaced(&GPT2, name) {
                Some(theirs) => (theirs, name.ends_with(".weight")),
                None => (name.to_owned(), false),
            },
            (Self::Llama, "wte") => ("embed_tokens.weight".into(), false),
            (Self::Llama, "ln_f.weight") => ("norm.weight".into(), false),
            (Self::Llama, _) => {
                let name = name.strip_prefix("h.").map_or(name.into(), |n| format!("layers.{n}"));
                (replaced(&LLAMA, &name).unwrap_or(name), false)
            }
        }
    }

    /// Name of a tensor in a `*ForCausalLM` class, with the prefix.
    pub(super) fn whole(self, name: &str) -> String {
        match (self.foreign(name).0, self) {
            (head, _) if head == HEAD => head,
            (theirs, Self::Gpt2) => format!("transformer.{theirs}"),
            (theirs, Self::Llama) => format!("model.{theirs}"),
        }
    }

    /// Whether `name` is a causal mask or rotary frequencies, saved by older versions.
    pub(super) fn is_left_over(self, name: &str, layers: usize) -> bool {
        let layer = |start: &str, ending: &str| -> Option<usize> {
            name.strip_prefix(start)?.strip_suffix(ending)?.parse().ok()
        };
        let found = match self {
            Self::Gpt2 => layer("h.", ".attn.bias").or_else(|| layer("h.", ".attn.masked_bias")),
            Self::Llama => layer("layers.", ".self_attn.rotary_emb.inv_freq"),
        };
        found.is_some_and(|layer| layer < layers)
    }
}

/// Name parts from PyTorch: `torch.compile`, data parallelism, FSDP, activation checkpoints.
const WRAPPERS: [&str; 4] =
    ["_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"];

/// A name without the prefixes of PEFT, of families, and of a class with the model inside
/// (`base_model`, `transformer`, `model`), and without the parts of PyTorch wrappers, which may
/// stand anywhere in the name. No family's own names contain these parts.
pub(super) fn bare(name: &str) -> String {
    let parts: Vec<&str> = name.split('.').filter(|part| !WRAPPERS.contains(part)).collect();
    let mut parts = &parts[..];
    while let ["base_model" | "model" | "transformer", rest @ ..] = parts {
        parts = rest;
    }
    parts.join(".")
}

/// Whether a tensor belongs to an adapter, or to a linear that an adapter wraps.
pub(super) fn is_of_an_adapter(name: &str) -> bool {
    let is_one =
        |part: &str| ["base_layer", "modules_to_save"].contains(&part) || part.starts_with("lora_");
    name.split('.').any(is_one)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_transformers() {
        for (ours, theirs, transposed) in [
            ("wte", "wte.weight", false),
            ("h.3.ln_1.bias", "h.3.ln_1.bias", false),
            ("h.3.attn.qkv.weight", "h.3.attn.c_attn.weight", true),
            ("h.3.attn.qkv.bias", "h.3.attn.c_attn.bias", false),
            ("h.11.attn.proj.weight", "h.11.attn.c_proj.weight", true),
            ("h.11.mlp.fc.weight", "h.11.mlp.c_fc.weight", true),
            ("h.11.mlp.proj.bias", "h.11.mlp.c_proj.bias", false),
            ("ln_f.weight", "ln_f.weight", false),
        ] {
            assert_eq!(Names::Gpt2.foreign(ours), (theirs.to_owned(), transposed));
        }
        for (ours, theirs) in [
            ("wte", "model.embed_tokens.weight"),
            ("h.3.ln_1.weight", "model.layers.3.input_layernorm.weight"),
            ("h.3.attn.q.weight", "model.layers.3.self_attn.q_proj.weight"),
            ("h.3.attn.k.bias", "model.layers.3.self_attn.k_proj.bias"),
            ("h.3.attn.k_norm.weight", "model.layers.3.self_attn.k_norm.weight"),
            ("h.11.attn.proj.weight", "model.layers.11.self_attn.o_proj.weight"),
            ("h.11.ln_2.weight", "model.layers.11.post_attention_layernorm.weight"),
            ("h.11.mlp.gate.weight", "model.layers.11.mlp.gate_proj.weight"),
            ("h.11.mlp.proj.weight", "model.layers.11.mlp.down_proj.weight"),
            ("ln_f.weight", "model.norm.weight"),
            ("head", "lm_head.weight"),
        ] {
            assert_eq!(Names::Llama.whole(ours), theirs);
            assert!(!Names::Llama.foreign(ours).1);
        }
    }

    #[test]
    fn wrappers_put_no_other_name_before_a_tensor() {
        let (embedding, query) = ("embed_tokens.weight", "layers.0.self_attn.q_proj.weight");
        for (name, want) in [
            ("model.embed_tokens.weight", embedding),
            ("embed_tokens.weight", embedding),
            ("_orig_mod.model.embed_tokens.weight", embedding),
            ("module.module._orig_mod.model.embed_tokens.weight", embedding),
            ("base_model.model.model.embed_tokens.weight", embedding),
            ("base_model.model.base_model.model.module.model.embed_tokens.weight", embedding),
            ("model.model.embed_tokens.weight", embedding),
            ("model._orig_mod.layers.0._checkpoint_wrapped_module.self_attn.q_proj.weight", query),
            ("_fsdp_wrapped_module.model.layers.0.self_attn.module.q_proj.weight", query),
            ("module.lm_head.weight", HEAD),
            ("base_model.model.lm_head.weight", HEAD),
            ("module.transformer.wte.weight", "wte.weight"),
            // Other names do not change.
            ("student.model.embed_tokens.weight", "student.model.embed_tokens.weight"),
            ("modules.embed_tokens.weight", "modules.embed_tokens.weight"),
        ] {
            assert_eq!(bare(name), want, "{name}");
        }
    }

    #[test]
    fn only_left_overs_of_layers_that_are_there_are_left_out() {
        let gpt2 = |name| Names::Gpt2.is_left_over(name, 2);
        assert!(gpt2("h.0.attn.bias") && gpt2("h.1.attn.masked_bias"));
        assert!(!gpt2("h.2.attn.bias") && !gpt2("h.0.mlp.bias"));
        assert!(!gpt2("h.-1.attn.bias") && !gpt2("attn.bias"));
        assert!(Names::Llama.is_left_over("layers.1.self_attn.rotary_emb.inv_freq", 2));
        assert!(!Names::Llama.is_left_over("layers.2.self_attn.rotary_emb.inv_freq", 2));
    }
}
