//! Rules about states in fewer bytes, which `checks` applies.

use super::checks::{Checks, Clash};
use super::{Master, Moments, OptimizerKind, Placement, Precision};

const ON_DEVICE: (&str, &str) = ("offload.optimizer", "states on the device");

impl Checks<'_> {
    pub(super) const PRECISION: &'static [Clash] = &[Clash {
        has: |c| {
            let bf16 = matches!(c.precision, Precision::Bf16 | Precision::Fp8);
            c.offload.master == Master::Split && !bf16
        },
        message: "only a bf16 parameter is the upper half of its fp32 master",
        help: "set `precision` to `Bf16` or `Fp8`, or leave `offload.master` out",
        values: &[
            ("offload.master", "the parameter and 16 bits more"),
            ("precision", "parameters are not bf16"),
        ],
    }];

    pub(super) const PLACES: &'static [Clash] = &[
        Clash {
            has: |c| c.offload.moments == Moments::Bf16 && c.offload.optimizer != Placement::Host,
            message: "states are kept in fewer bytes on the host only",
            help: "set `offload.optimizer` to `Host`, or leave `offload.moments` out",
            values: &[("offload.moments", "fewer bytes"), ON_DEVICE],
        },
        // A split optimizer may store masters in different bytes, because the numbers are the same;
        // moments must be stored alike.
        Clash {
            has: |c| {
                let (master, moments) = (c.offload.master, c.offload.moments);
                let split = master == Master::Split && moments == Moments::Fp32;
                split && c.offload.optimizer == Placement::Device
            },
            message: "states are kept in fewer bytes on the host only",
            help: "set `offload.optimizer` to `Host`, or leave `offload.master` out",
            values: &[("offload.master", "fewer bytes"), ON_DEVICE],
        },
        Clash {
            has: |c| c.optimizer.kind == OptimizerKind::Sgd && c.offload.moments == Moments::Bf16,
            message: "`Sgd` has no moments to keep",
            help: "set `optimizer.kind` to `AdamW`, or leave `offload.moments` out",
            values: &[("offload.moments", "moments in bf16"), ("optimizer.kind", "no moments")],
        },
    ];
}
