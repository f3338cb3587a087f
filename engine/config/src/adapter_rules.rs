//! Rules about the keys of adapters, which `checks` applies.

use super::adapter::{DELTA_LINEARS, EXPERT_MATRICES, LINEARS, linears};
use super::checks::{Checks, Clash};
use super::layer_pattern::DELTA;
use super::reading::{Violation, ticked};
use super::{Adapter, AdapterTargets, Config, Family, Transfer};

/// Whether a config has adapters.
fn has_adapters(config: &Config) -> bool {
    config.adapter != Adapter::None
}

/// Whether parts of a model that is trained itself are frozen.
fn has_frozen_tensors(config: &Config) -> bool {
    !config.optimizer.frozen.is_empty()
}

const FROZEN: (&str, &str) = ("optimizer.frozen", "frozen tensors");
const BLOCKING: (&str, &str) = ("offload.transfer", "blocking transfers");

impl Config {
    /// Warning about frozen random weights, under adapters or beside trained ones. `None`: the run
    /// freezes nothing, or has a model.
    pub fn random_frozen_weights(&self) -> Option<&'static str> {
        if self.model.pretrained().is_some() {
            return None;
        }
        if has_adapters(self) {
            return Some(
                "the run trains adapters, and the weights under them are random: set model.from to the folder of a model",
            );
        }
        has_frozen_tensors(self).then_some(
            "optimizer.frozen freezes random weights: set model.from to the folder of a model",
        )
    }
}

impl Checks<'_> {
    pub(super) const ADAPTERS: &'static [Clash] = &[
        Clash {
            has: |c| has_adapters(c) && c.offload.transfer == Transfer::Blocking,
            message: "frozen weights have no blocking transfers",
            help: "set `offload.transfer: Streamed`",
            values: &[("adapter", "adapters"), BLOCKING],
        },
        Clash {
            has: |c| has_frozen_tensors(c) && c.offload.transfer == Transfer::Blocking,
            message: "frozen weights have no blocking transfers",
            help: "set `offload.transfer: Streamed`, or leave `optimizer.frozen` out",
            values: &[FROZEN, BLOCKING],
        },
        Clash {
            has: |c| has_frozen_tensors(c) && has_adapters(c),
            message: "adapters freeze all weights of the model already",
            help: "leave `optimizer.frozen` out; `adapter.targets` says which linears have an adapter",
            values: &[FROZEN, ("adapter", "adapters")],
        },
        Clash {
            has: |c| match &c.adapter {
                Adapter::Lora { dropout, targets, .. } => {
                    let names = targets.names(&c.model);
                    *dropout > 0.0 && names.iter().any(|name| EXPERT_MATRICES.contains(name))
                }
                Adapter::None => false,
            },
            message: "adapters of experts have no dropout, as in PEFT",
            help: "set `adapter.dropout: 0.0`, or set `adapter.targets` to other linears, such as `[\"q_proj\", \"v_proj\"]`; `All` includes experts",
            values: &[("adapter.dropout", "dropout"), ("adapter.targets", "matrices of experts")],
        },
    ];

    /// Requires that the model has the linears with adapters.
    pub(super) fn linears_of_adapters(&self) -> Option<Violation> {
        let Adapter::Lora { targets, from, .. } = &self.config.adapter else { return None };
        let model = &self.config.model;
        let known = linears(model);
        let of_delta = |name: &&str| DELTA_LINEARS.contains(name);
        let of_mlp = |name: &&str| ![&LINEARS[..4], &DELTA_LINEARS[..]].concat().contains(name);
        let is_there = |name: &&str| {
            model.family == Family::Gpt2
                || of_mlp(name)
                || model.layer_letters().any(|letter| of_delta(name) == (letter == DELTA))
        };
        if let AdapterTargets::Listed(names) = targets
            && names.iter().all(|name| known.contains(name) && !is_there(name))
        {
            return Some(Violation {
                message:
                    "no layer of the model has a linear of this list, so that nothing is trained"
                        .into(),
                help: format!(
                    "set `adapter.targets` to `All`, or to linears such as {}",
                    ticked(&known.iter().copied().filter(is_there).collect::<Vec<_>>())
                ),
                values: vec![
                    ("adapter.targets", ticked(names)),
                    ("model.layer_pattern", format!("{:?}", model.layer_pattern)),
                ],
            });
        }
        if let AdapterTargets::Listed(names) = targets
            && let Some(strange) = names.iter().find(|name| !known.contains(name))
        {
            return Some(Violation {
                message: format!("onebox has no adapter of the linear `{strange}` in this model"),
                help: match from {
                    Some(_) => "the adapters are of another model than `model.from`: name its folder there, or another folder in `adapter.from`".into(),
                    None => format!("set `adapter.targets` to linears such as {}", ticked(known)),
                },
                values: vec![("adapter.targets", format!("`{strange}`"))],
            });
        }
        None
    }

    /// Requires that a rank is at most the sizes of the matrices with adapters.
    pub(super) fn rank_of_adapters(&self) -> Option<Violation> {
        let Adapter::Lora { rank, targets, .. } = &self.config.adapter else { return None };
        let (rank, m) = (*rank, &self.config.model);
        let names = targets.names(m);
        let has = |some: &[&str]| names.iter().any(|name| some.contains(name));
        let delta = m.delta_net.as_ref();
        let values = delta.map_or(m.hidden, |delta| delta.value_heads * delta.value_dim);
        let of_experts = m.experts.as_ref().map_or(m.ffn_hidden, |experts| experts.ffn_hidden);
        let sizes = [
            (true, "model.hidden", m.hidden),
            (has(&["k_proj", "v_proj"]), "model.kv_heads", m.kv_heads * m.head_dim),
            (
                has(&["gate_proj", "up_proj", "down_proj", "c_fc", "c_proj"]),
                "model.ffn_hidden",
                m.ffn_hidden,
            ),
            (has(&EXPERT_MATRICES), "model.experts.ffn_hidden", of_experts),
            // Step sizes and decays have a row for each head, and usual ranks are larger.
            (has(&["in_proj_z", "out_proj"]), "model.delta_net.value_heads", values),
        ];
        let sizes = sizes.into_iter().filter(|(adapted, ..)| *adapted);
        let (key, least) = sizes.map(|(_, key, size)| (key, size)).min_by_key(|(_, size)| *size)?;
        (rank > least).then(|| Violation {
            message: format!("a matrix of this model has {least} rows or columns, and an adapter of rank {rank} is larger than it"),
            help: format!("set `adapter.rank` to at most {least}; merge larger adapters of PEFT with `merge_and_unload()`"),
            values: vec![("adapter.rank", rank.to_string()), (key, format!("{least} channels"))],
        })
    }
}
