//! Classes of transformers whose models onebox trains.

/// Class of a decoder in transformers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the variants are the names of the classes")]
pub enum ModelClass {
    Gpt2,
    Llama,
    Mistral,
    Ministral3,
    Qwen2,
    Qwen3,
    Gemma2,
    Gemma3,
    Olmo2,
    Olmo3,
    SmolLm3,
    Phi3,
    Granite,
    SeedOss,
    Qwen3Moe,
    Mixtral,
    Olmoe,
    Glm4Moe,
    GptOss,
    Qwen35,
    Qwen35Moe,
    Qwen3Next,
}

impl ModelClass {
    /// All classes.
    pub const ALL: [Self; 22] = [
        Self::Gpt2,
        Self::Llama,
        Self::Mistral,
        Self::Ministral3,
        Self::Qwen2,
        Self::Qwen3,
        Self::Gemma2,
        Self::Gemma3,
        Self::Olmo2,
        Self::Olmo3,
        Self::SmolLm3,
        Self::Phi3,
        Self::Granite,
        Self::SeedOss,
        Self::Qwen3Moe,
        Self::Mixtral,
        Self::Olmoe,
        Self::Glm4Moe,
        Self::GptOss,
        Self::Qwen35,
        Self::Qwen35Moe,
        Self::Qwen3Next,
    ];

    /// Value of `model_type`.
    pub const fn model_type(self) -> &'static str {
        match self {
            Self::Gpt2 => "gpt2",
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Ministral3 => "ministral3",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Gemma2 => "gemma2",
            Self::Gemma3 => "gemma3_text",
            Self::Olmo2 => "olmo2",
            Self::Olmo3 => "olmo3",
            Self::SmolLm3 => "smollm3",
            Self::Phi3 => "phi3",
            Self::Granite => "granite",
            Self::SeedOss => "seed_oss",
            Self::Qwen3Moe => "qwen3_moe",
            Self::Mixtral => "mixtral",
            Self::Olmoe => "olmoe",
            Self::Glm4Moe => "glm4_moe",
            Self::GptOss => "gpt_oss",
            Self::Qwen35 => "qwen3_5_text",
            Self::Qwen35Moe => "qwen3_5_moe_text",
            Self::Qwen3Next => "qwen3_next",
        }
    }

    /// Name of the class with an output projection, and of the class without.
    pub const fn names(self) -> [&'static str; 2] {
        match self {
            Self::Gpt2 => ["GPT2LMHeadModel", "GPT2Model"],
            Self::Llama => ["LlamaForCausalLM", "LlamaModel"],
            Self::Mistral => ["MistralForCausalLM", "MistralModel"],
            Self::Ministral3 => ["Ministral3ForCausalLM", "Ministral3Model"],
            Self::Qwen2 => ["Qwen2ForCausalLM", "Qwen2Model"],
            Self::Qwen3 => ["Qwen3ForCausalLM", "Qwen3Model"],
            Self::Gemma2 => ["Gemma2ForCausalLM", "Gemma2Model"],
            Self::Gemma3 => ["Gemma3ForCausalLM", "Gemma3TextModel"],
            Self::Olmo2 => ["Olmo2ForCausalLM", "Olmo2Model"],
            Self::Olmo3 => ["Olmo3ForCausalLM", "Olmo3Model"],
            Self::SmolLm3 => ["SmolLM3ForCausalLM", "SmolLM3Model"],
            Self::Phi3 => ["Phi3ForCausalLM", "Phi3Model"],
            Self::Granite => ["GraniteForCausalLM", "GraniteModel"],
            Self::SeedOss => ["SeedOssForCausalLM", "SeedOssModel"],
            Self::Qwen3Moe => ["Qwen3MoeForCausalLM", "Qwen3MoeModel"],
            Self::Mixtral => ["MixtralForCausalLM", "MixtralModel"],
            Self::Olmoe => ["OlmoeForCausalLM", "OlmoeModel"],
            Self::Glm4Moe => ["Glm4MoeForCausalLM", "Glm4MoeModel"],
            Self::GptOss => ["GptOssForCausalLM", "GptOssModel"],
            Self::Qwen35 => ["Qwen3_5ForCausalLM", "Qwen3_5TextModel"],
            Self::Qwen35Moe => ["Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextModel"],
            Self::Qwen3Next => ["Qwen3NextForCausalLM", "Qwen3NextModel"],
        }
    }

    /// Whether a folder of the class has q, k and v in one tensor, and gate and up in one.
    pub const fn fuses_projections(self) -> bool {
        matches!(self, Self::Phi3)
    }

    /// Whether layers of the class have experts in the place of an MLP.
    pub const fn has_experts(self) -> bool {
        matches!(
            self,
            Self::Qwen3Moe
                | Self::Mixtral
                | Self::Olmoe
                | Self::Glm4Moe
                | Self::GptOss
                | Self::Qwen35Moe
                | Self::Qwen3Next
        )
    }

    /// Whether layers with experts have a shared expert whose output has a gate.
    pub const fn gates_shared_expert(self) -> bool {
        matches!(self, Self::Qwen35Moe | Self::Qwen3Next)
    }

    /// Whether folders of the class may have further layers after the decoder's last layer, which
    /// predict several tokens (MTP).
    pub const fn may_predict_more(self) -> bool {
        matches!(self, Self::Glm4Moe)
    }

    /// Beginnings of the names of tensors that folders of the class may have, and that are no part of
    /// the decoder: layers that predict several tokens (MTP), and a vision tower.
    pub const fn other_parts(self) -> &'static [&'static str] {
        match self {
            Self::Qwen35 | Self::Qwen35Moe => &["mtp.", "visual."],
            Self::Qwen3Next => &["mtp."],
            _ => &[],
        }
    }

    /// Whether layers of the class may have a gated delta net in the place of attention.
    pub const fn has_delta_nets(self) -> bool {
        matches!(self, Self::Qwen35 | Self::Qwen35Moe | Self::Qwen3Next)
    }

    /// Whether norms of the class multiply by 1 + their gain.
    pub const fn offsets_gains(self) -> bool {
        self.is_gemma() || self.has_delta_nets()
    }

    /// Whether the class is one of Gemma.
    pub const fn is_gemma(self) -> bool {
        matches!(self, Self::Gemma2 | Self::Gemma3)
    }
}

/// Class of transformers with a decoder and other parts inside, such as a vision tower.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the variants are the names of the classes")]
pub enum WrapperClass {
    Gemma3,
    Mistral3,
    Qwen35,
    Qwen35Moe,
}

impl WrapperClass {
    /// All classes.
    pub const ALL: [Self; 4] = [Self::Gemma3, Self::Mistral3, Self::Qwen35, Self::Qwen35Moe];

    /// Value of `model_type`.
    pub const fn model_type(self) -> &'static str {
        match self {
            Self::Gemma3 => "gemma3",
            Self::Mistral3 => "mistral3",
            Self::Qwen35 => "qwen3_5",
            Self::Qwen35Moe => "qwen3_5_moe",
        }
    }

    /// Name of the class with an output projection, and of the class without.
    pub const fn names(self) -> [&'static str; 2] {
        match self {
            Self::Gemma3 => ["Gemma3ForConditionalGeneration", "Gemma3Model"],
            Self::Mistral3 => ["Mistral3ForConditionalGeneration", "Mistral3Model"],
            Self::Qwen35 => ["Qwen3_5ForConditionalGeneration", "Qwen3_5Model"],
            Self::Qwen35Moe => ["Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeModel"],
        }
    }

    /// Classes of the decoder inside; the first is that of a file without a `model_type` inside.
    pub const fn decoders(self) -> &'static [ModelClass] {
        match self {
            Self::Gemma3 => &[ModelClass::Gemma3],
            Self::Mistral3 => &[ModelClass::Mistral, ModelClass::Ministral3],
            Self::Qwen35 => &[ModelClass::Qwen35],
            Self::Qwen35Moe => &[ModelClass::Qwen35Moe],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_class_has_names_of_its_own() {
        let names = ModelClass::ALL.iter().flat_map(|class| class.names());
        let names: Vec<&str> =
            names.chain(WrapperClass::ALL.iter().flat_map(|class| class.names())).collect();
        let types = ModelClass::ALL.map(ModelClass::model_type);
        let types = [&types[..], &WrapperClass::ALL.map(WrapperClass::model_type)].concat();
        for all in [names, types] {
            let mut sorted = all.clone();
            sorted.sort_unstable();
            sorted.dedup();
            assert_eq!(sorted.len(), all.len(), "{all:?}");
        }
    }
}
