//! Settings that do not go with parameters on the host, or with micro-batches that go through each block together; refused
//! among the `checks`.

use super::checks::{Broken, Checks};
use super::{ALL_TOGETHER, ParameterPlace, Placement, Recompute, Transfer, UpdateMode};
use topology::counted;

impl Checks<'_> {
    fn streams(&self) -> bool {
        self.config.offload.parameters == ParameterPlace::Host
    }

    /// A rule that parameters on the host break together with the value of `key`.
    fn streaming(
        &self,
        broken: bool,
        (message, help): (&str, &str),
        (key, what): (&'static str, &str),
    ) -> Option<Broken> {
        (self.streams() && broken).then(|| Broken {
            message: message.into(),
            help: help.into(),
            values: vec![("offload.parameters", "come up for each use".into()), (key, what.into())],
        })
    }

    pub(super) fn ring_of_nothing(&self) -> Option<Broken> {
        self.of_nothing(self.config.offload.ring.is_some(), "offload.ring")
    }

    pub(super) fn resident_of_nothing(&self) -> Option<Broken> {
        self.of_nothing(self.config.offload.resident_blocks.is_some(), "offload.resident_blocks")
    }

    fn of_nothing(&self, is_given: bool, key: &'static str) -> Option<Broken> {
        (is_given && !self.streams()).then(|| Broken {
            message: "all parameters stay on the GPUs".into(),
            help: format!("set `offload.parameters` to `Host`, or leave `{key}` out"),
            values: vec![
                (key, "of parameters that come up for each use".into()),
                ("offload.parameters", "on the GPUs".into()),
            ],
        })
    }

    /// More blocks than the model has.
    pub(super) fn blocks_of_model(&self) -> Option<Broken> {
        let (offload, layers) = (&self.config.offload, self.config.model.layers);
        let given = [
            ("offload.ring", offload.ring, "take turns in the ring"),
            ("offload.resident_blocks", offload.resident_blocks, "stay on the GPU"),
        ];
        let too_many = |&(key, blocks, what): &(_, Option<usize>, _)| {
            blocks.filter(|blocks| *blocks > layers).map(|blocks| (key, blocks, what))
        };
        let (key, blocks, what) = given.iter().find_map(too_many)?;
        Some(Broken {
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

    /// Micro-batches that go through a block together need checkpoints.
    pub(super) fn checkpoint_sets(&self) -> Option<Broken> {
        let (together, batch) = (self.config.offload.first_forward, &self.config.batch);
        let of_step = batch.global / (batch.micro * self.config.parallel.data).max(1);
        let sets = if self.streams() { together.min(of_step) } else { together };
        let recompute = self.config.recompute;
        let cause = match self.streams() && together == ALL_TOGETHER {
            true => ("offload.parameters", "come up once for all micro-batches of a step".into()),
            false => ("offload.first_forward", format!("{sets} micro-batches at once")),
        };
        (sets > 1 && recompute != Recompute::Block).then(|| Broken {
            message: format!(
                "the activations of {sets} micro-batches would have to be kept at once: they go through each block together"
            ),
            help: match self.streams() {
                true => "set `recompute` to `Block`, or `offload.first_forward` to 1: then parameters cross PCIe for each micro-batch".into(),
                false => "set `recompute` to `Block`, or leave `offload.first_forward` out".into(),
            },
            values: vec![cause, ("recompute", recompute.kept().into())],
        })
    }

    pub(super) fn parameters_beside_optimizer(&self) -> Option<Broken> {
        let on_device = self.config.offload.optimizer != Placement::Host;
        let why = (
            "parameters come up from where the host updates them, and the GPUs update some of these",
            "set `offload.optimizer` to `Host`, or `offload.parameters` to `Device`",
        );
        self.streaming(on_device, why, ("offload.optimizer", "updates on the GPUs"))
    }

    pub(super) fn parameters_of_late_updates(&self) -> Option<Broken> {
        let late = matches!(self.config.offload.update, UpdateMode::Delayed { .. });
        let why = (
            "a late update overwrites the host's parameters while the step still brings the older ones up",
            "set `offload.update` to `Overlapped`, `Speculative` or `Serial`, or `offload.parameters` to `Device`",
        );
        self.streaming(late, why, ("offload.update", "runs one step late"))
    }

    pub(super) fn parameters_blocking(&self) -> Option<Broken> {
        let blocking = self.config.offload.transfer == Transfer::Blocking;
        let why = (
            "`Blocking` sends parameters up once, behind the whole update",
            "leave `offload.transfer` out, or set `offload.parameters` to `Device`",
        );
        self.streaming(blocking, why, ("offload.transfer", "as DeepSpeed in 2020"))
    }
}
