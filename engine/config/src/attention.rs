//! Rules about the library that computes attention.

use super::checks::{Checks, Clash};
use super::layer_pattern::WINDOWED;
use super::{Attention, Packing, Precision};

impl Checks<'_> {
    /// Attention that cuDNN does not compute.
    pub(super) const LIBRARIES: &'static [Clash] = &[
        Clash {
            has: |c| c.attention == Attention::Cudnn && c.precision == Precision::Fp32,
            message: "cuDNN computes attention in 16 bits only",
            help: "set `precision` to `Bf16`, or leave `attention` out",
            values: &[
                ("attention", "asks for cuDNN"),
                ("precision", "keeps activations in 32 bits"),
            ],
        },
        Clash {
            has: |c| c.attention == Attention::Cudnn && c.model.dropout > 0.0,
            message: "cuDNN does not compute attention with dropout: onebox makes the masks",
            help: "set `model.dropout` to 0, or leave `attention` out",
            values: &[
                ("attention", "asks for cuDNN"),
                ("model.dropout", "drops weights of attention"),
            ],
        },
        Clash {
            has: |c| {
                let dim = c.model.head_dim;
                c.attention == Attention::Cudnn && !(dim <= 128 && dim.is_multiple_of(8))
            },
            message: "cuDNN computes attention on heads of 8, 16, .. 128 elements",
            help: "leave `attention` out",
            values: &[("attention", "asks for cuDNN"), ("model.head_dim", "has another size")],
        },
        Clash {
            has: |c| c.attention == Attention::Cudnn && c.data.packing == Packing::Documents,
            message: "cuDNN does not compute attention within documents",
            help: "leave `attention` out, or set `data.packing` to another value",
            values: &[("attention", "asks for cuDNN"), ("data.packing", "separates documents")],
        },
        Clash {
            has: |c| {
                let short = c.model.window.is_some_and(|window| window < c.model.seq_len);
                c.attention == Attention::Cudnn && short && c.model.layer_pattern.contains(WINDOWED)
            },
            message: "cuDNN does not compute attention within a window",
            help: "leave `attention` out",
            values: &[
                ("attention", "asks for cuDNN"),
                ("model.window", "is shorter than a sample"),
            ],
        },
        Clash {
            has: |c| c.attention == Attention::Cudnn && c.model.score_cap.is_some(),
            message: "cuDNN does not cap the scores of attention",
            help: "leave `attention` out",
            values: &[("attention", "asks for cuDNN"), ("model.score_cap", "caps scores")],
        },
    ];
}
