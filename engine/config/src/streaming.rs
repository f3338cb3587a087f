//! Settings that do not go with parameters on the host, or with micro-batches that go through each block together; refused
//! among the `checks`.

use super::checks::{Checks, Clash, Violation};
use super::{ALL_TOGETHER, ParameterPlace, Placement, Recompute, Transfer, UpdateMode};
use topology::counted;

impl Checks<'_> {
    fn streams(&self) -> bool {
        self.config.offload.parameters == ParameterPlace::Host
    }

    /// A rule that parameters on the host break together with the value of another key.
    fn streaming(&self, broken: bool, clash: &Clash) -> Option<Violation> {
        (self.streams() && broken).then(|| Violation {
            message: clash.message.into(),
            help: clash.help.into(),
            values: vec![
                ("offload.parameters", "come up for each use".into()),
                (clash.key, clash.meaning.into()),
            ],
        })
    }

    pub(super) fn ring_of_nothing(&self) -> Option<Violation> {
        self.of_nothing(self.config.offload.ring.is_some(), "offload.ring")
    }

    pub(super) fn resident_of_nothing(&self) -> Option<Violation> {
        self.of_nothing(self.config.offload.resident_blocks.is_some(), "offload.resident_blocks")
    }

    fn of_nothing(&self, is_given: bool, key: &'static str) -> Option<Violation> {
        (is_given && !self.streams()).then(|| Violation {
            message: "all parameters stay on the GPUs".into(),
            help: format!("set `offload.parameters` to `Host`, or leave `{key}` out"),
            values: vec![
                (key, "of parameters that come up for each use".into()),
                ("offload.parameters", "on the GPUs".into()),
            ],
        })
    }

    /// More blocks than the model has.
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

    /// Micro-batches that go through a block together need checkpoints.
    pub(super) fn checkpoint_sets(&self) -> Option<Violation> {
        let (together, batch) = (self.config.offload.first_forward, &self.config.batch);
        let of_step = batch.global / (batch.micro * self.config.parallel.data).max(1);
        let sets = if self.streams() { together.min(of_step) } else { together };
        let recompute = self.config.recompute;
        let cause = match self.streams() && together == ALL_TOGETHER {
            true => ("offload.parameters", "come up once for all micro-batches of a step".into()),
            false => ("offload.first_forward", format!("{sets} micro-batches at once")),
        };
        (sets > 1 && recompute != Recompute::Block).then(|| Violation {
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

    pub(super) fn parameters_beside_optimizer(&self) -> Option<Violation> {
        let on_device = self.config.offload.optimizer != Placement::Host;
        let clash = Clash {
            message: "parameters come up from where the host updates them, and the GPUs update some of these",
            help: "set `offload.optimizer` to `Host`, or `offload.parameters` to `Device`",
            key: "offload.optimizer",
            meaning: "updates on the GPUs",
        };
        self.streaming(on_device, &clash)
    }

    pub(super) fn parameters_of_late_updates(&self) -> Option<Violation> {
        let late = matches!(self.config.offload.update, UpdateMode::Delayed { .. });
        let clash = Clash {
            message: "a late update overwrites the host's parameters while the step still brings the older ones up",
            help: "set `offload.update` to `Overlapped`, `Speculative` or `Serial`, or `offload.parameters` to `Device`",
            key: "offload.update",
            meaning: "runs one step late",
        };
        self.streaming(late, &clash)
    }

    pub(super) fn parameters_blocking(&self) -> Option<Violation> {
        let blocking = self.config.offload.transfer == Transfer::Blocking;
        let clash = Clash {
            message: "`Blocking` sends parameters up once, behind the whole update",
            help: "leave `offload.transfer` out, or set `offload.parameters` to `Device`",
            key: "offload.transfer",
            meaning: "as DeepSpeed in 2020",
        };
        self.streaming(blocking, &clash)
    }
}
