//! Rules about the tiers of activations, which `checks` applies.

use super::checks::{Checks, Clash};
use super::reading::Violation;
use super::{Activations, KeptBlocks, Recompute, Transfer};
use topology::counted;

impl Checks<'_> {
    pub(super) const MOVED_ACTIVATIONS: &'static [Clash] = &[Clash {
        has: |c| c.activations.moves() && c.offload.transfer == Transfer::Blocking,
        message: "`Blocking` overlaps nothing, and activations move to the host beside other blocks",
        help: "set the numbers of blocks on the host to 0, or leave `offload.transfer` out",
        values: &[
            ("activations", "of some blocks move to the host"),
            ("offload.transfer", "as DeepSpeed in 2020"),
        ],
    }];

    /// Requires that blocks are recomputed if some are excepted.
    pub(super) fn tiers_of_nothing(&self) -> Option<Violation> {
        let (activations, recompute) = (self.config.activations, self.config.recompute);
        let refused = activations != Activations::Uniform && recompute != Recompute::Block;
        refused.then(|| Violation {
            message:
                "`activations` is about blocks that are not recomputed, and no block is recomputed"
                    .into(),
            help: "set `recompute` to `Block`, or leave `activations` out".into(),
            values: vec![
                ("activations", "excepts blocks from being recomputed".into()),
                ("recompute", recompute.kept().into()),
            ],
        })
    }

    /// Refuses more blocks in tiers than the model has.
    pub(super) fn tiers_of_blocks(&self) -> Option<Violation> {
        let (activations, layers) = (self.config.activations, self.config.model.layers);
        let Activations::Tiers { gpu_mlps, host_mlps, .. } = activations else { return None };
        let own = |given: Option<usize>, key, shared| if given.is_some() { key } else { shared };
        let (gpu, host) = ("activations.gpu_blocks", "activations.host_blocks");
        let mlps = [
            own(gpu_mlps, "activations.gpu_mlps", gpu),
            own(host_mlps, "activations.host_mlps", host),
        ];
        let branches = [(activations.attention(), [gpu, host]), (activations.mlp(), mlps)];
        let too_many = |(kept, _): &(KeptBlocks, [&'static str; 2])| kept.gpu + kept.host > layers;
        let (KeptBlocks { gpu, host }, [gpu_key, host_key]) =
            branches.into_iter().find(too_many)?;
        Some(Violation {
            message: format!(
                "{} on the GPU and {} on the host are {}: the model has {}",
                counted(gpu, "block"),
                counted(host, "block"),
                counted(gpu + host, "block"),
                counted(layers, "block")
            ),
            help: format!("choose `{gpu_key}` + `{host_key}` of at most {layers}"),
            values: vec![
                (gpu_key, counted(gpu, "block")),
                (host_key, counted(host, "block")),
                ("model.layers", counted(layers, "block")),
            ],
        })
    }
}
