//! What parameters on the host go with; refused among the `checks`.

use super::checks::{Broken, Checks};
use super::{ParameterPlace, Placement, Transfer, UpdateMode};

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
