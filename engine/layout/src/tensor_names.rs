//! Names of the tensors in transformers, and whether transformers stores them transposed or joined.

#[cfg(test)]
mod tests;

use config::transformers::ModelClass;
use tensor_parallel::{DecoderShape, NormPlace};

/// Naming scheme of a model family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Names {
    /// `GPT2LMHeadModel`.
    Gpt2,
    /// `LlamaForCausalLM`, and later classes, which use the same names for the same parts.
    Llama {
        /// Places of the norms, which have other names in each place.
        norms: NormPlace,
        /// Parameters that are the rows of one tensor.
        fused: &'static [Fusion],
        /// Numbers of heads by which rows alternate in one tensor.
        heads: HeadCounts,
        /// Experts of the layers that have them.
        experts: Option<ExpertNames>,
    },
}

/// Parameters of onebox that are the rows of one tensor of transformers: the parts of their names,
/// from above, and the part of its name.
type Fusion = (&'static [&'static str], &'static str);

/// Numbers of heads by which the rows of several parameters alternate in one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadCounts {
    /// Heads of queries of attention.
    pub queries: usize,
    /// Heads of keys of a gated delta net; 0 without one.
    pub delta_keys: usize,
}

/// Form of the experts of a layer in a folder, and their number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertNames {
    /// Form of the experts.
    pub form: ExpertForm,
    /// Number of experts of a layer.
    pub count: usize,
    /// Whether the output of the shared expert has a gate.
    pub gates_shared: bool,
}

/// Form of the experts of a layer in a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertForm {
    /// Three tensors for each expert.
    Single,
    /// The same, with the names of Mixtral.
    Mixtral,
    /// One tensor with the gates and ups of all experts (E, 2 I, C), and one with their projections
    /// back (E, C, I).
    Fused,
    /// The same with transposed matrices, (E, C, 2 I) and (E, I, C), and with biases (E, 2 I) and (E,
    /// C). Gates and ups alternate (gpt-oss).
    Interleaved,
}

/// Place of a matrix or of a bias of an expert in the tensor of all experts of a layer, which holds
/// `parts` of each of `experts` experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StackPlace {
    /// Number of experts in the tensor.
    pub experts: usize,
    /// Number of parameters of each expert in the tensor.
    pub parts: usize,
    /// Number of the expert.
    pub expert: usize,
    /// Number of the matrix among those of the expert.
    pub part: usize,
    /// Whether the parts alternate and matrices are transposed.
    pub interleaved: bool,
}

/// Name of the output projection, which is outside of the inner model, so it has no prefix.
pub const HEAD: &str = "lm_head.weight";

/// Parts of names: (onebox, transformers).
const GPT2: [(&str, &str); 4] = [
    (".attn.qkv.", ".attn.c_attn."),
    (".attn.proj.", ".attn.c_proj."),
    (".mlp.fc.", ".mlp.c_fc."),
    (".mlp.proj.", ".mlp.c_proj."),
];
const LLAMA: [(&str, &str); 17] = [
    (".attn.sinks", ".self_attn.sinks"),
    (".attn.q.", ".self_attn.q_proj."),
    (".attn.k.", ".self_attn.k_proj."),
    (".attn.v.", ".self_attn.v_proj."),
    (".attn.q_norm.", ".self_attn.q_norm."),
    (".attn.k_norm.", ".self_attn.k_norm."),
    (".attn.proj.", ".self_attn.o_proj."),
    (".mlp.gate.", ".mlp.gate_proj."),
    (".mlp.up.", ".mlp.up_proj."),
    (".mlp.proj.", ".mlp.down_proj."),
    (".delta.z.", ".linear_attn.in_proj_z."),
    (".delta.b.", ".linear_attn.in_proj_b."),
    (".delta.a.", ".linear_attn.in_proj_a."),
    (".delta.a_log", ".linear_attn.A_log"),
    (".delta.dt_bias", ".linear_attn.dt_bias"),
    (".delta.norm.", ".linear_attn.norm."),
    (".delta.proj.", ".linear_attn.out_proj."),
];
/// Norms before attention and before the MLP.
const NORMS_BEFORE: [(&str, &str); 2] =
    [(".ln_1.", ".input_layernorm."), (".ln_2.", ".post_attention_layernorm.")];
/// Norms before and after both. Llama's name for the norm before the MLP is here the name of
/// the norm after attention.
const NORMS_AROUND: [(&str, &str); 4] = [
    (".ln_1.", ".input_layernorm."),
    (".ln_1_post.", ".post_attention_layernorm."),
    (".ln_2.", ".pre_feedforward_layernorm."),
    (".ln_2_post.", ".post_feedforward_layernorm."),
];
/// Norms after both.
const NORMS_AFTER: [(&str, &str); 2] = [
    (".ln_1_post.", ".post_attention_layernorm."),
    (".ln_2_post.", ".post_feedforward_layernorm."),
];
/// Joined tensors of Phi-3.
const OF_PHI3: [Fusion; 2] = [
    (&[".attn.q.", ".attn.k.", ".attn.v."], ".self_attn.qkv_proj."),
    (&[".mlp.gate.", ".mlp.up."], ".mlp.gate_up_proj."),
];
/// Joined weights of a convolution, and joined queries and gates of the output.
const CONVOLUTIONS: Fusion = (&[".delta.conv_q.", ".delta.conv_k.", ".delta.conv_v."], CONVOLUTION);
const QUERIES: Fusion = (&[".attn.q.", ".attn.gate."], GATED_QUERIES);
/// Joined tensors of Qwen3.5.
const OF_QWEN35: [Fusion; 3] = [
    (&[".delta.q.", ".delta.k.", ".delta.v."], ".linear_attn.in_proj_qkv."),
    CONVOLUTIONS,
    QUERIES,
];
/// Joined tensors of Qwen3-Next, whose projections alternate by heads of keys.
const OF_QWEN3_NEXT: [Fusion; 4] = [
    (&[".delta.q.", ".delta.k.", ".delta.v.", ".delta.z."], DELTA_HEADS),
    (&[".delta.b.", ".delta.a."], DELTA_GATES),
    CONVOLUTIONS,
    QUERIES,
];
/// Part of the name of the weights of a convolution, which have a dimension of 1 in the middle.
const CONVOLUTION: &str = ".linear_attn.conv1d.";
/// Part of the name of queries and gates of the output, which alternate by heads.
const GATED_QUERIES: &str = ".self_attn.q_proj.";
/// Parts of the names of the projections of a Qwen3-Next, which alternate by heads of keys.
const DELTA_HEADS: &str = ".linear_attn.in_proj_qkvz.";
const DELTA_GATES: &str = ".linear_attn.in_proj_ba.";

/// Matrices of an expert: name in onebox, in most classes, and in Mixtral.
const EXPERT: [[&str; 3]; 3] =
    [["gate", "gate_proj", "w1"], ["up", "up_proj", "w3"], ["proj", "down_proj", "w2"]];
/// Other parts of a layer with experts: name in onebox, in transformers.
const OTHERS: [[&str; 2]; 6] = [
    ["router.weight", "gate.weight"],
    ["shared.output_gate.weight", "shared_expert_gate.weight"],
    ["router.correction", "gate.e_score_correction_bias"],
    ["shared.gate.weight", "shared_experts.gate_proj.weight"],
    ["shared.up.weight", "shared_experts.up_proj.weight"],
    ["shared.proj.weight", "shared_experts.down_proj.weight"],
];
/// Parts of the names of a shared expert: in most classes, and in those with a gate of its output.
const SHARED: [&str; 2] = ["shared_experts.", "shared_expert."];
/// Ends of the names of fused experts: gates and ups, and projections back.
const STACKS: [&str; 2] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"];
/// Ends of the names of codes and of their scales, behind the name of the numbers that they stand for.
pub const CODES: [&str; 2] = ["_blocks", "_scales"];

/// Number of the layer of a tensor, from its name without prefix.
pub fn layer_of(bare: &str) -> Option<usize> {
    bare.strip_prefix("layers.")?.split_once('.')?.0.parse().ok()
}

/// Whether transformers keeps a parameter of onebox in fp32 in a model of any type.
pub fn is_always_fp32(name: &str) -> bool {
    name.ends_with(".moe.router.correction")
}

/// Whether a tensor holds matrices of all experts of a layer.
pub fn is_stack(bare: &str) -> bool {
    STACKS.iter().any(|stack| bare.ends_with(stack))
}

/// A matrix or a bias of an expert.
#[derive(Clone, Copy)]
struct ExpertPart<'a> {
    /// Prefix of the names of its layer.
    layer: &'a str,
    /// Number of the expert.
    expert: usize,
    /// Row of [`EXPERT`].
    row: usize,
    /// `weight` or `bias`.
    own: &'a str,
}

/// The part of an expert that a parameter's name names.
fn expert_part(name: &str) -> Option<ExpertPart<'_>> {
    let (layer, rest) = name.split_once(".moe.experts.")?;
    let (expert, rest) = rest.split_once('.')?;
    let (matrix, own) = rest.split_once('.').filter(|(_, own)| ["weight", "bias"].contains(own))?;
    let row = EXPERT.iter().position(|[ours, ..]| *ours == matrix)?;
    Some(ExpertPart { layer, expert: expert.parse().ok()?, row, own })
}

/// `name` with the part of transformers, if it has a part of onebox.
fn replaced(names: &[(&str, &str)], name: &str) -> Option<String> {
    let found = names.iter().find(|(ours, _)| name.contains(ours));
    found.map(|(ours, theirs)| name.replace(ours, theirs))
}

impl Names {
    /// Names of a model of this shape in a folder of the class `class`. `fused`: whether the
    /// folder has fused experts.
    pub fn of(shape: &DecoderShape, class: ModelClass, fused: bool) -> Self {
        let parts = &shape.architecture;
        if parts.joined_qkv {
            return Self::Gpt2;
        }
        let form = match (fused, class) {
            (_, ModelClass::GptOss) => ExpertForm::Interleaved,
            (true, _) => ExpertForm::Fused,
            (false, ModelClass::Mixtral) => ExpertForm::Mixtral,
            (false, _) => ExpertForm::Single,
        };
        Self::Llama {
            norms: parts.norm_place,
            fused: match class {
                ModelClass::Qwen3Next => &OF_QWEN3_NEXT,
                class if class.has_delta_nets() => &OF_QWEN35,
                class if class.fuses_projections() => &OF_PHI3,
                _ => &[],
            },
            heads: HeadCounts {
                queries: shape.heads,
                delta_keys: shape.delta.map_or(0, |delta| delta.key_heads),
            },
            experts: shape.experts.map(|experts| {
                let gates_shared = experts.shared_gate;
                ExpertNames { form, count: experts.count, gates_shared }
            }),
        }
    }

    /// Name of a part of the experts of a layer, without the prefix; `None` for another parameter.
    fn of_experts(self, name: &str) -> Option<String> {
        let Self::Llama { experts: Some(ExpertNames { form, gates_shared, .. }), .. } = self else {
            return None;
        };
        let of_mixtral = form == ExpertForm::Mixtral;
        let whose = if of_mixtral { "block_sparse_moe" } else { "mlp" };
        let theirs = match expert_part(name) {
            None => {
                let (layer, part) = name.strip_prefix("h.")?.split_once(".moe.")?;
                let theirs = match form {
                    // The router has its own name, and a bias.
                    ExpertForm::Interleaved => part.to_owned(),
                    _ => {
                        let theirs = OTHERS.iter().find(|[ours, _]| *ours == part)?[1];
                        theirs.replace(SHARED[0], SHARED[usize::from(gates_shared)])
                    }
                };
                format!("layers.{layer}.{whose}.{theirs}")
            }
            Some(ExpertPart { layer, expert, row, own }) => {
                let layer = layer.strip_prefix("h.")?;
                let matrix = match form {
                    ExpertForm::Fused | ExpertForm::Interleaved => {
                        let end = if own == "bias" { "_bias" } else { "" };
                        return Some(format!("layers.{layer}.{}{end}", STACKS[row / 2]));
                    }
                    ExpertForm::Single => EXPERT[row][1],
                    ExpertForm::Mixtral => EXPERT[row][2],
                };
                format!("layers.{layer}.{whose}.experts.{expert}.{matrix}.weight")
            }
        };
        Some(theirs)
    }

    /// Place of the parameter `name` in the tensor of all experts of its layer; `None` if it has a
    /// tensor of its own.
    pub fn stack_place(self, name: &str) -> Option<StackPlace> {
        let Self::Llama { experts: Some(ExpertNames { form, count, .. }), .. } = self else {
            return None;
        };
        let interleaved = form == ExpertForm::Interleaved;
        let is_stacked = interleaved || form == ExpertForm::Fused;
        let ExpertPart { expert, row, .. } = expert_part(name).filter(|_| is_stacked)?;
        // Gate and up are in one tensor.
        let (part, parts) = if row < 2 { (row, 2) } else { (0, 1) };
        Some(StackPlace { experts: count, parts, expert, part, interleaved })
    }

    /// Name of the embedding table in transformers, without the prefix.
    pub fn table(self) -> String {
        self.foreign("wte").0
    }

    /// The fused tensor with the parameter `name`: the parts of names of its parameters, the part
    /// of `name` among them, and its own part.
    fn fused(self, name: &str) -> Option<(&'static [&'static str], &'static str, &'static str)> {
        let Self::Llama { fused, .. } = self else { return None };
        fused.iter().find_map(|(parts, theirs)| {
            let own = parts.iter().find(|part| name.contains(**part))?;
            Some((*parts, *own, *theirs))
        })
    }

    /// Number of runs into which the rows of the parameter `name` are cut in its tensor, where the
    /// runs of several parameters alternate; 1 if its rows are adjacent.
    pub fn runs_of(self, name: &str) -> usize {
        match (self, self.fused(name)) {
            (Self::Llama { heads, .. }, Some((_, _, GATED_QUERIES))) => heads.queries,
            (Self::Llama { heads, .. }, Some((_, _, DELTA_HEADS | DELTA_GATES))) => {
                heads.delta_keys
            }
            _ => 1,
        }
    }

    /// Whether the tensor with the parameter `name` has a dimension of 1 after its rows.
    pub fn has_middle(self, name: &str) -> bool {
        matches!(self.fused(name), Some((_, _, CONVOLUTION)))
    }

    /// Names of the parameters whose rows are one tensor in transformers, from above; `name` is one
    /// of them.
    pub fn joined(self, name: &str) -> Vec<String> {
        if let Some(StackPlace { experts, parts, .. }) = self.stack_place(name)
            && let Some(ExpertPart { layer, own, .. }) = expert_part(name)
        {
            let rows = if parts == 2 { 0..2 } else { 2..3 };
            let of = |expert: usize| {
                let matrix = move |row: usize| {
                    format!("{layer}.moe.experts.{expert}.{}.{own}", EXPERT[row][0])
                };
                rows.clone().map(matrix)
            };
            return (0..experts).flat_map(of).collect();
        }
        match self.fused(name) {
            Some((parts, own, _)) => parts.iter().map(|part| name.replace(own, part)).collect(),
            None => vec![name.to_owned()],
        }
    }

    /// Name of a tensor in transformers, without the prefix, and whether its matrix is stored
    /// transposed. A GPT-2 stores its linears as (in, out).
    pub fn foreign(self, name: &str) -> (String, bool) {
        let norms: &[(&str, &str)] = match self {
            Self::Gpt2 => &[],
            Self::Llama { norms: NormPlace::Before, .. } => &NORMS_BEFORE,
            Self::Llama { norms: NormPlace::Around, .. } => &NORMS_AROUND,
            Self::Llama { norms: NormPlace::After, .. } => &NORMS_AFTER,
        };
        match (self, name) {
            (_, "head") => (HEAD.into(), false),
            (Self::Gpt2, "wte" | "wpe") => (format!("{name}.weight"), false),
            (Self::Gpt2, _) => match replaced(&GPT2, name) {
                Some(theirs) => (theirs, name.ends_with(".weight")),
                None => (name.to_owned(), false),
            },
            (Self::Llama { .. }, "wte") => ("embed_tokens.weight".into(), false),
            (Self::Llama { .. }, "ln_f.weight") => ("norm.weight".into(), false),
            (Self::Llama { .. }, _) => {
                if let Some(theirs) = self.of_experts(name) {
                    return (theirs, false);
                }
                let fused = self.fused(name).map(|(_, own, theirs)| name.replace(own, theirs));
                let name = fused.unwrap_or_else(|| name.to_owned());
                let name = name.strip_prefix("h.").map_or(name.clone(), |n| format!("layers.{n}"));
                let theirs = replaced(&LLAMA, &name).or_else(|| replaced(norms, &name));
                (theirs.unwrap_or(name), false)
            }
        }
    }

    /// Name of a tensor in a `*ForCausalLM` class, with the prefix.
    pub fn whole(self, name: &str) -> String {
        match (self.foreign(name).0, self) {
            (head, _) if head == HEAD => head,
            (theirs, Self::Gpt2) => format!("transformer.{theirs}"),
            (theirs, Self::Llama { .. }) => format!("model.{theirs}"),
        }
    }

    /// Whether `name` is a causal mask or rotary frequencies, saved by older versions.
    pub fn is_left_over(self, name: &str, layers: usize) -> bool {
        let layer = |start: &str, ending: &str| -> Option<usize> {
            name.strip_prefix(start)?.strip_suffix(ending)?.parse().ok()
        };
        let found = match self {
            Self::Gpt2 => layer("h.", ".attn.bias").or_else(|| layer("h.", ".attn.masked_bias")),
            Self::Llama { .. } => layer("layers.", ".self_attn.rotary_emb.inv_freq"),
        };
        found.is_some_and(|layer| layer < layers)
    }
}

/// Name parts from PyTorch: `torch.compile`, data parallelism, FSDP, activation checkpoints.
const WRAPPERS: [&str; 4] =
    ["_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"];

/// A name without the parts of PyTorch wrappers, which may stand anywhere in the name. No family's own
/// names contain these parts.
pub fn unwrapped(name: &str) -> String {
    let parts: Vec<&str> = name.split('.').filter(|part| !WRAPPERS.contains(part)).collect();
    parts.join(".")
}

/// A name without the parts of PyTorch wrappers, and without the prefixes of PEFT, of families, and
/// of a class with the model inside (`base_model`, `transformer`, `model`).
pub fn bare(name: &str) -> String {
    let name = unwrapped(name);
    let parts: Vec<&str> = name.split('.').collect();
    let mut parts = &parts[..];
    while let ["base_model" | "model" | "transformer", rest @ ..] = parts {
        parts = rest;
    }
    parts.join(".")
}

/// Bare name of a tensor of the decoder in a class with other parts; `None` for a tensor of another
/// part. Version 5 of transformers writes `model.language_model.`, version 4 writes
/// `language_model.model.`. The output projection has its own name in version 5.
pub fn bare_in_wrapper(name: &str) -> Option<String> {
    let name = bare(name);
    if name == HEAD {
        return Some(name);
    }
    name.strip_prefix("language_model.").map(bare)
}

/// Whether a tensor belongs to an adapter, or to a linear that an adapter wraps.
pub fn is_of_an_adapter(name: &str) -> bool {
    let is_one =
        |part: &str| ["base_layer", "modules_to_save"].contains(&part) || part.starts_with("lora_");
    name.split('.').any(is_one)
}
