//! Differences of the software of 2020, the system of ZeRO-Offload's authors, for comparison. Each
//! fact is counted or published, and each can be left out to show its effect.

use super::Gpu;
use config::Fact;

/// Rate of attention's matmuls relative to other matmuls, if each is a separate kernel for all
/// heads.
pub(in crate::sim) const BATCHED_SHARE: f64 = 0.6;

/// Number of times that attention in several kernels moves the scores: forward (matmuls, softmax,
/// dropout) and backward.
const SCORE_PASSES: [f64; 2] = [4.0, 9.0];

/// The same number if every operation is a kernel. It adds scaling, two kernels for the mask,
/// dropout with its own mask, and their gradients (Megatron-LM of 2020, `mpu/transformer.py`).
const EAGER_SCORE_PASSES: [f64; 2] = [12.5, 13.5];

/// Bytes of copies that cut heads out of the projections and join them again, forward and backward,
/// relative to the bytes of the attention's own operands.
const EAGER_HEADS: [f64; 2] = [2.0, 1.0];

/// Share of a link that copies to unpinned memory reach, where PyTorch kept checkpoints. Pinning
/// made one such copy four to six times as fast (DeepSpeed pull request 5301).
const PAGEABLE_SHARE: f64 = 0.2;

/// Share of all memory channels of a box that all ranks of the CPU-Adam of 2020 reach: 109 to 127
/// GB/s, of 256 GB/s (ZeRO-Offload, Table 4).
const ADAM_SHARE: f64 = 0.46;

/// Traffic relative to the 28 bytes of the update: a separate pass unscaled its fp32 gradients
/// (`unscale_and_clip_grads`), 8 bytes more.
const ADAM_BYTES: f64 = 36.0 / 28.0;

/// Other ops that need several kernels if each operation is a kernel, with the factor on their
/// bytes. Bias, dropout and residual need 7.5 passes instead of 3. Dropout's gradient reads a mask.
/// The loss works on fp32 logits, with 52 bytes for each instead of 8.
const EAGER_BYTES: [(&str, f64); 5] = [
    ("bias_dropout_add", 2.5),
    ("dropout", 1.25),
    ("row_max", 6.5),
    ("cross_entropy_stats", 6.5),
    ("cross_entropy_backward", 6.5),
];

/// The simulated facts of 2020.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Era2020([bool; Fact::ALL.len()]);

impl Era2020 {
    /// All facts except `left_out`.
    pub fn without(left_out: &[Fact]) -> Self {
        Self(Fact::ALL.map(|(fact, _)| !left_out.contains(&fact)))
    }
}

impl Gpu {
    /// Whether `fact` is simulated.
    pub(in crate::sim) fn did(&self, fact: Fact) -> bool {
        self.as_of_2020.is_some_and(|era| era.0[fact as usize])
    }

    /// Factor on the bytes of a kernel other than matmuls and attention.
    pub(in crate::sim) fn passes_2020(&self, name: &str) -> f64 {
        let times = EAGER_BYTES.iter().find(|(known, _)| *known == name);
        times.filter(|_| self.did(Fact::SmallKernels)).map_or(1.0, |(_, times)| *times)
    }

    pub(in crate::sim) fn head_copies_2020(&self, backward: bool) -> f64 {
        if self.did(Fact::Heads) { EAGER_HEADS[usize::from(backward)] } else { 0.0 }
    }

    pub(in crate::sim) fn score_passes_2020(&self, backward: bool) -> f64 {
        let passes = if self.did(Fact::Scores) { EAGER_SCORE_PASSES } else { SCORE_PASSES };
        passes[usize::from(backward)]
    }

    /// Share of a link that copies of checkpoints reach.
    pub(in crate::sim) fn checkpoint_share_2020(&self) -> f64 {
        if self.did(Fact::Pageable) { PAGEABLE_SHARE } else { 1.0 }
    }

    /// Share of a box's memory channels that Adam reaches on all ranks, and the factor on its
    /// bytes.
    pub(in crate::sim) fn adam_2020(&self) -> (Option<f64>, f64) {
        let share = self.did(Fact::AdamRate).then_some(ADAM_SHARE);
        (share, if self.did(Fact::Unscaling) { ADAM_BYTES } else { 1.0 })
    }
}
