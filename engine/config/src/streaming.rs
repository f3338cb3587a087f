//! Rules about parameters on the host, and about micro-batches that go through each block together.
//! `checks` applies these rules.

use super::checks::{Checks, Clash};
use super::reading::Violation;
use super::{ALL_TOGETHER, Config, ParameterPlace, Placement, Recompute, Transfer, UpdateMode};
use topology::counted;

const UP: (&str, &str) = ("offload.parameters", "come up for each use");

fn streams(config: &Config) -> bool {
    config.offload.parameters == ParameterPlace::Host
}

const ON_GPUS: (&str, &str) = ("offload.parameters", "on the GPUs");

impl Checks<'_> {
    pub(super) const OF_NOTHING: &'static [Clash] = &[
        Clash {
            has: |c| c.offload.ring.is_some() && !streams(c),
            message: "all parameters stay on the GPUs",
            help: "set `offload.parameters` to `Host`, or leave `offload.ring` out",
            values: &[("offload.ring", "of parameters that come up for each use"), ON_GPUS],
        },
        Clash {
            has: |c| c.offload.resident_blocks.is_some() && !streams(c),
            message: "all parameters stay on the GPUs",
            help: "set `offload.parameters` to `Host`, or leave `offload.resident_blocks` out",
            values: &[
                ("offload.resident_blocks", "of parameters that come up for each use"),
                ON_GPUS,
            ],
        },
    ];

    pub(super) const PARAMETERS: &'static [Clash] = &[
        Clash {
            has: |c| streams(c) && c.offload.optimizer != Placement::Host,
            message: "parameters come up from where the host updates them, and the GPUs update some of these",
            help: "set `offload.optimizer` to `Host`, or `offload.parameters` to `Device`",
            values: &[UP, ("offload.optimizer", "updates on the GPUs")],
        },
        Clash {
            has: |c| streams(c) && matches!(c.offload.update, UpdateMode::Delayed { .. }),
            message: "a late update overwrites the host's parameters while the step still brings the older ones up",
            help: "set `offload.update` to `Overlapped`, `Speculative` or `Serial`, or `offload.parameters` to `Device`",
            values: &[UP, ("offload.update", "runs one step late")],
        },
        Clash {
            has: |c| streams(c) && c.offload.transfer == Transfer::Blocking,
            message: "`Blocking` sends parameters up once, behind the whole update",
            help: "leave `offload.transfer` out, or set `offload.parameters` to `Device`",
            values: &[UP, ("offload.transfer", "as DeepSpeed in 2020")],
        },
    ];

    /// Refuses a number of blocks that is larger than the number of blocks of the model.
    pub(super) fn blocks_of_model(&self) -> Option<Violation> {
        let (offload, layers) = (&self.config.offload, self.config.model.layers);
        let given = [
            ("offload.ring", offload.ring, "take turns in the ring"),
            ("offload.resident_blocks", offload.resident_blocks, "stay on the GPU"),
        ];
        let too_many = |&(key, blocks, what): &(_, Option<usize>, _)| {
            blocks.filter(|blocks| *blocks > layers).map(|blocks| (key, blocks, what))
        };
        let (key, blocks, what) = given.iter().find_map(too_many)?;
        Some(Violation {
            message: format!(
                "{} cannot {what}: the model has {}",
                counted(blocks, "block"),
                counted(layers, "block")
            ),
            help: format!(
                "set `{key}` to at most {layers}, or leave it out: then as many are taken as fit"
            ),
            values: vec![(key, what.into()), ("model.layers", counted(layers, "block"))],
        })
    }

    /// Requires activation checkpoints if micro-batches go through a block together.
    pub(super) fn checkpoint_sets(&self) -> Option<Violation> {
        let (together, batch) = (self.config.offload.first_forward, &self.config.batch);
        let of_step = batch.global / (batch.micro * self.config.parallel.data).max(1);
        let streams = streams(self.config);
        let sets = if streams { together.min(of_step) } else { together };
        let recompute = self.config.recompute;
        let cause = match streams && together == ALL_TOGETHER {
            true => ("offload.parameters", "come up once for all micro-batches of a step".into()),
            false => ("offload.first_forward", format!("{sets} micro-batches at once")),
        };
        (sets > 1 && recompute != Recompute::Block).then(|| Violation {
            message: format!(
                "the activations of {sets} micro-batches would have to be kept at once: they go through each block together"
            ),
            help: match streams {
                true => "set `recompute` to `Block`, or `offload.first_forward` to 1: then parameters cross PCIe for each micro-batch".into(),
                false => "set `recompute` to `Block`, or leave `offload.first_forward` out".into(),
            },
            values: vec![cause, ("recompute", recompute.kept().into())],
        })
    }
}
