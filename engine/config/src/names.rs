//! Names of variants, as a config writes them.

use super::reading::fields::Named;
use super::*;

impl Named for Family {
    const ALL: &'static [(&'static str, Self)] = &[("Gpt2", Self::Gpt2), ("Llama", Self::Llama)];
}

impl Named for Weights {
    const ALL: &'static [(&'static str, Self)] =
        &[("Pretrained", Self::Pretrained), ("Random", Self::Random)];
}

impl Named for ControlTokens {
    const ALL: &'static [(&'static str, Self)] = &[("Text", Self::Text), ("Parsed", Self::Parsed)];
}

impl Named for Precision {
    const ALL: &'static [(&'static str, Self)] =
        &[("Fp8", Self::Fp8), ("Fp16", Self::Fp16), ("Bf16", Self::Bf16), ("Fp32", Self::Fp32)];
}

impl Named for Transfer {
    const ALL: &'static [(&'static str, Self)] =
        &[("Streamed", Self::Streamed), ("Blocking", Self::Blocking)];
}

impl Named for ParameterPlace {
    const ALL: &'static [(&'static str, Self)] = &[("Device", Self::Device), ("Host", Self::Host)];
}

impl Named for Moments {
    const ALL: &'static [(&'static str, Self)] = &[("Fp32", Self::Fp32), ("Bf16", Self::Bf16)];
}

impl Named for Master {
    const ALL: &'static [(&'static str, Self)] = &[("Fp32", Self::Fp32), ("Split", Self::Split)];
}

impl Named for Accumulate {
    const ALL: &'static [(&'static str, Self)] =
        &[("Auto", Self::Auto), ("Device", Self::Device), ("Host", Self::Host)];
}

impl Named for Sockets {
    const ALL: &'static [(&'static str, Self)] =
        &[("Auto", Self::Auto), ("Near", Self::Near), ("All", Self::All)];
}

impl Named for OptimizerKind {
    const ALL: &'static [(&'static str, Self)] = &[("AdamW", Self::AdamW), ("Sgd", Self::Sgd)];
}

impl Named for Recompute {
    const ALL: &'static [(&'static str, Self)] =
        &[("None", Self::None), ("Selective", Self::Selective), ("Block", Self::Block)];
}

impl Recompute {
    /// The activations that blocks keep, in words.
    pub(crate) const fn kept(self) -> &'static str {
        match self {
            Self::None => "every activation is kept",
            Self::Selective => "results of products and attention are kept",
            Self::Block => "the input of each block is kept",
        }
    }
}

impl Named for CheckpointWriter {
    const ALL: &'static [(&'static str, Self)] =
        &[("Auto", Self::Auto), ("Background", Self::Background), ("Foreground", Self::Foreground)];
}

impl Named for WeightsPolicy {
    const ALL: &'static [(&'static str, Self)] =
        &[("Complete", Self::Complete), ("Always", Self::Always), ("Never", Self::Never)];
}

impl Named for DataOrder {
    const ALL: &'static [(&'static str, Self)] =
        &[("Shuffled", Self::Shuffled), ("Random", Self::Random)];
}

impl Named for Packing {
    const ALL: &'static [(&'static str, Self)] =
        &[("Windows", Self::Windows), ("Documents", Self::Documents), ("None", Self::None)];
}
