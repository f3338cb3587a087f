//! Where states may be kept in fewer bytes; refused among the `checks`.

use super::checks::{Checks, Violation};
use super::{Config, Master, Moments, OptimizerKind, Placement, Precision};

impl Checks<'_> {
    pub(super) fn split_precision(&self) -> Option<Violation> {
        let config = self.config;
        let split = config.offload.master == Master::Split;
        let bf16 = matches!(config.precision, Precision::Bf16 | Precision::Fp8);
        (split && !bf16).then(|| Violation {
            message: "only a bf16 parameter is the upper half of its fp32 master".into(),
            help: "set `precision` to `Bf16` or `Fp8`, or leave `offload.master` out".into(),
            values: vec![
                ("offload.master", "the parameter and 16 bits more".into()),
                ("precision", "parameters are not bf16".into()),
            ],
        })
    }

    pub(super) fn small_states_place(&self) -> Option<Violation> {
        let offload = &self.config.offload;
        // With the optimizer in two places masters may differ in bytes, for they are the same numbers; moments may not.
        let key = match (offload.optimizer, offload.moments, offload.master) {
            (Placement::Device | Placement::Split { .. }, Moments::Bf16, _) => "offload.moments",
            (Placement::Device, Moments::Fp32, Master::Split) => "offload.master",
            _ => return None,
        };
        Some(Violation {
            message: "states are kept in fewer bytes on the host only".into(),
            help: format!("set `offload.optimizer` to `Host`, or leave `{key}` out"),
            values: vec![
                (key, "fewer bytes".into()),
                ("offload.optimizer", "states on the device".into()),
            ],
        })
    }

    pub(super) fn moments_of_rule(&self) -> Option<Violation> {
        let Config { offload, optimizer, .. } = self.config;
        let none = optimizer.kind == OptimizerKind::Sgd;
        (none && offload.moments == Moments::Bf16).then(|| Violation {
            message: "`Sgd` has no moments to keep".into(),
            help: "set `optimizer.kind` to `AdamW`, or leave `offload.moments` out".into(),
            values: vec![
                ("offload.moments", "moments in bf16".into()),
                ("optimizer.kind", "no moments".into()),
            ],
        })
    }
}
