//! Rules about the keys of adapters, which `checks` applies.

use super::adapter::{LINEARS, linears};
use super::checks::{Checks, Clash};
use super::reading::{Violation, ticked};
use super::{Adapter, AdapterTargets, Config, Transfer};

/// Whether a config has adapters.
fn has_adapters(config: &Config) -> bool {
    config.adapter != Adapter::None
}

impl Config {
    /// Warning about adapters of random weights. `None`: the run has no adapters, or a model.
    pub fn adapters_of_random_weights(&self) -> Option<&'static str> {
        (has_adapters(self) && self.model.pretrained().is_none()).then_some(
            "the run trains adapters, and the weights under them are random: set model.from to the folder of a model",
        )
    }
}

impl Checks<'_> {
    pub(super) const ADAPTERS: &'static [Clash] = &[Clash {
        has: |c| has_adapters(c) && c.offload.transfer == Transfer::Blocking,
        message: "frozen weights have no blocking transfers",
        help: "set `offload.transfer: Streamed`",
        values: &[("adapter", "adapters"), ("offload.transfer", "blocking transfers")],
    }];

    /// Requires that the model has the linears with adapters.
    pub(super) fn linears_of_adapters(&self) -> Option<Violation> {
        let Adapter::Lora { targets, .. } = &self.config.adapter else { return None };
        let model = &self.config.model;
        let known = linears(model.family);
        if let AdapterTargets::Listed(names) = targets
            && let Some(strange) = names.iter().find(|name| !known.contains(name))
        {
            return Some(Violation {
                message: format!("the layers of this model have no linear `{strange}`"),
                help: format!("its linears are {}", ticked(known)),
                values: vec![("adapter.targets", format!("`{strange}`"))],
            });
        }
        let of_mlp = LINEARS[4..].iter().any(|name| targets.has(name));
        (model.experts.is_some() && of_mlp).then(|| Violation {
            message: "onebox has no adapters of experts, and of the MLP of a model with experts"
                .into(),
            help: format!(
                "set `adapter.targets` to linears of attention: {}",
                ticked(&LINEARS[..4])
            ),
            values: vec![
                ("adapter.targets", "linears of the MLP".into()),
                ("model.experts", "experts".into()),
            ],
        })
    }

    /// Requires that a rank is smaller than the matrices.
    pub(super) fn rank_of_adapters(&self) -> Option<Violation> {
        let Adapter::Lora { rank, .. } = self.config.adapter else { return None };
        let m = &self.config.model;
        let sizes = [
            ("model.hidden", m.hidden),
            ("model.kv_heads", m.kv_heads * m.head_dim),
            ("model.ffn_hidden", m.ffn_hidden),
        ];
        let (key, least) = sizes.into_iter().min_by_key(|(_, size)| *size)?;
        (rank > least).then(|| Violation {
            message: format!("a matrix of this model has {least} rows or columns, and an adapter of rank {rank} is larger than it"),
            help: format!("set `adapter.rank` to at most {least}"),
            values: vec![("adapter.rank", rank.to_string()), (key, format!("{least} channels"))],
        })
    }
}
