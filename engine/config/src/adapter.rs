//! Keys of low-rank adapters.

use super::declare::choice;
use super::reading::{
    Complaint, ConfigReader, Declaration, Interval, KeyDefault, Node, NodeKind, ParseResult,
    Section, is_name, nearest, quoted, ticked,
};
use super::{Family, ModelConfig};
use files::foreign_text::foreign;
use serde::{Serialize, Serializer};

choice! {
    /// What is trained beside or instead of the weights of the model.
    #[derive(Clone, Debug, PartialEq, Serialize)]
    pub enum Adapter, read(of: AdapterContext) {
        /// The weights themselves.
        None,
        /// Low-rank adapters (LoRA).
        Lora["(rank: 16, alpha: 32)"] {
            /// Folder of PEFT with the adapters from which the run starts, and with the defaults of the
            /// keys below. A resumed run does not need it: its checkpoint has the adapters. None:
            /// random adapters, which change nothing before step 1.
            from: Option<String> = path(KeyDefault::Default(None)), resume: Harmless;
            /// Rank of the adapters: the rows of their first factor.
            rank: usize = uint(1..=4096, KeyDefault::Default(16).or_peft(&of, |peft| peft.rank));
            /// Factor of the adapters' outputs, times the rank: they are multiplied by `alpha` /
            /// `rank`.
            alpha: f32 = float(
                Interval::above(0.0, 1e6),
                KeyDefault::Derived(2.0 * rank as f32, "2 x rank", &["adapter.rank"])
                    .or_peft(&of, |peft| peft.alpha)
            );
            /// Whether the factor is `alpha` divided by the square root of `rank` (rsLoRA, arXiv
            /// 2312.03732).
            rank_stabilized: bool = flag(
                KeyDefault::Default(false).or_peft(&of, |peft| peft.rank_stabilized)
            );
            /// Probability with which dropout sets an element of an adapter's input to zero. Weights
            /// with one input, such as q, k and v, have one mask. Refused with adapters of experts,
            /// which have no dropout in PEFT.
            dropout: f32 = float(
                Interval::below(0.0, 1.0),
                KeyDefault::Default(0.0).or_peft(&of, |peft| peft.dropout)
            );
            /// The linears that have an adapter. `All`: all of attention, of gated delta nets and of
            /// the MLP; in a model with experts, `experts.gate_up_proj` and `experts.down_proj` in
            /// place of those of the MLP. Otherwise a list of their names in transformers, in any order;
            /// a list of all of them is `All`.
            targets: AdapterTargets = adapter_targets(
                KeyDefault::Default(AdapterTargets::All).or_peft(&of, |peft| peft.targets.clone()),
                of.linears
            );
        },
    }
}

/// Settings of the adapters in a folder of PEFT.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct PeftSettings {
    pub(super) rank: usize,
    pub(super) alpha: f32,
    pub(super) rank_stabilized: bool,
    pub(super) targets: AdapterTargets,
    pub(super) dropout: f32,
    /// Source of the settings, in words.
    pub(super) source: &'static str,
}

/// Values outside of the adapters that decide their keys.
#[derive(Clone)]
pub(super) struct AdapterContext {
    /// Settings of the adapters from which the run starts or resumes.
    peft: Option<PeftSettings>,
    /// The linears of a layer of the model.
    linears: &'static [&'static str],
}

impl AdapterContext {
    /// Context of adapters of `model` with the settings `peft`.
    pub(super) fn of(peft: Option<PeftSettings>, model: &ModelConfig) -> Self {
        let linears = linears(model);
        let canonical = |peft: PeftSettings| match peft.targets {
            AdapterTargets::Listed(names) => {
                PeftSettings { targets: AdapterTargets::canonical(names, linears), ..peft }
            }
            AdapterTargets::All => peft,
        };
        Self { peft: peft.map(canonical), linears }
    }
}

/// The linears that have an adapter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum AdapterTargets {
    /// All linears of attention, of gated delta nets, and of the MLP or of experts.
    #[default]
    All,
    /// These, by their names in transformers.
    Listed(Vec<&'static str>),
}

/// Names of the linears of a layer in most classes of transformers.
pub(super) const LINEARS: [&str; 7] =
    ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];
/// Names of the matrices of all experts of a layer: gates and ups, and those back. PEFT has adapters of
/// them as parameters, and none of other linears of the MLPs in models with experts.
pub const EXPERT_MATRICES: [&str; 2] = ["experts.gate_up_proj", "experts.down_proj"];
/// Names of the linears of a layer with experts that may have an adapter.
const LINEARS_WITH_EXPERTS: [&str; 6] =
    ["q_proj", "k_proj", "v_proj", "o_proj", EXPERT_MATRICES[0], EXPERT_MATRICES[1]];
/// Names of the linears of a gated delta net in Qwen3.5.
pub(super) const DELTA_LINEARS: [&str; 5] =
    ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"];
/// Names of the linears of a model with attention, gated delta nets and MLPs.
const LINEARS_WITH_DELTA_NETS: [&str; 12] = {
    let ([q, k, v, o, gate, up, down], [qkv, z, b, a, out]) = (LINEARS, DELTA_LINEARS);
    [q, k, v, o, qkv, z, b, a, out, gate, up, down]
};
/// The same with experts in place of MLPs.
const LINEARS_WITH_BOTH: [&str; 11] = {
    let ([q, k, v, o, gate_up, down], [qkv, z, b, a, out]) = (LINEARS_WITH_EXPERTS, DELTA_LINEARS);
    [q, k, v, o, qkv, z, b, a, out, gate_up, down]
};
/// Names of the linears of a layer of GPT-2; both projections back have one name.
const GPT2_LINEARS: [&str; 3] = ["c_attn", "c_proj", "c_fc"];

impl AdapterTargets {
    /// These linears, in the order of a layer; `All` if they are all `linears` of a layer.
    fn canonical(mut names: Vec<&'static str>, linears: &[&str]) -> Self {
        names.sort_by_key(|name| known_linear(name).map(|(place, _)| place));
        if names.len() == linears.len() && linears.iter().all(|name| names.contains(name)) {
            return Self::All;
        }
        Self::Listed(names)
    }

    /// Whether the linear `name` has an adapter.
    pub fn has(&self, name: &str) -> bool {
        match self {
            Self::All => true,
            Self::Listed(names) => names.contains(&name),
        }
    }

    /// The linears that have an adapter in `model`.
    pub fn names(&self, model: &ModelConfig) -> Vec<&'static str> {
        linears(model).iter().copied().filter(|name| self.has(name)).collect()
    }
}

/// The linears of a layer of `model` that may have an adapter.
pub(super) const fn linears(model: &ModelConfig) -> &'static [&'static str] {
    match (model.family, &model.experts, &model.delta_net) {
        (Family::Gpt2, ..) => &GPT2_LINEARS,
        (Family::Llama, None, None) => &LINEARS,
        (Family::Llama, Some(_), None) => &LINEARS_WITH_EXPERTS,
        (Family::Llama, None, Some(_)) => &LINEARS_WITH_DELTA_NETS,
        (Family::Llama, Some(_), Some(_)) => &LINEARS_WITH_BOTH,
    }
}

/// The linears of a layer of any model.
fn all_linears() -> impl Iterator<Item = &'static str> + Clone {
    let attention = LINEARS_WITH_DELTA_NETS.into_iter();
    attention.chain(EXPERT_MATRICES).chain(GPT2_LINEARS)
}

impl Serialize for AdapterTargets {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::All => serializer.serialize_unit_variant("AdapterTargets", 0, "All"),
            Self::Listed(names) => names.serialize(serializer),
        }
    }
}

impl<T> KeyDefault<T> {
    /// Replaces the default by the value in the settings of the context, if it has any.
    fn or_peft(self, of: &AdapterContext, value: impl FnOnce(&PeftSettings) -> T) -> Self {
        match &of.peft {
            Some(peft) => Self::Derived(value(peft), peft.source, &["adapter.from"]),
            None => self,
        }
    }
}

/// The linear with this name, and its place in the order of a layer.
pub(super) fn known_linear(name: &str) -> Option<(usize, &'static str)> {
    all_linears().enumerate().find(|(_, known)| *known == name)
}

impl Section<'_, '_> {
    /// Reads `All`, or a list of names of linears.
    fn adapter_targets(
        &mut self,
        key: Declaration,
        or: KeyDefault<AdapterTargets>,
        linears: &[&str],
    ) -> AdapterTargets {
        let values = "`All`, or a list of names";
        self.leaf(key, or, values.into(), super::in_line, |reader, node| {
            targets(reader, node, linears)
        })
    }
}

fn targets(reader: &ConfigReader, node: &Node, linears: &[&str]) -> ParseResult<AdapterTargets> {
    let help = || "write `All`, or a list such as `[\"q_proj\", \"v_proj\"]`".to_owned();
    let items = match &node.kind {
        NodeKind::Word(word) if is_name(word, "All") => return Ok(AdapterTargets::All),
        NodeKind::List(items) if !items.is_empty() => items,
        NodeKind::List(_) => {
            let message = "an adapter of no linear trains nothing".to_owned();
            return Err(Complaint { message, help: help() });
        }
        _ => {
            let found = reader.item(node).found();
            let message = format!("expected `All` or names of linears, found {found}");
            return Err(Complaint { message, help: help() });
        }
    };
    let mut names = Vec::new();
    for item in items {
        let name = reader.item(item).string()?;
        let Some(known) = all_linears().find(|known| *known == name) else {
            let message = format!("no linear has the name {}", foreign(quoted(&name)));
            let near = nearest(&name, all_linears());
            let help = match near.is_empty() {
                true => format!("the names are {}", ticked(linears)),
                false => format!("did you mean {}?", ticked(&near)),
            };
            return Err(Complaint { message, help });
        };
        if names.contains(&known) {
            let message = format!("`{known}` stands there twice");
            return Err(Complaint { message, help: "write each name once".into() });
        }
        names.push(known);
    }
    Ok(AdapterTargets::canonical(names, linears))
}
