//! What the software of 2020 did otherwise: the system of the authors of ZeRO-Offload, to compare with. Each fact is
//! counted or published, and each can be left out, to see what it changes.

use super::Gpu;

/// Of the rate of matrix products, those of attention when each is a kernel of its own for all heads.
pub(in crate::sim) const BATCHED_SHARE: f64 = 0.6;

/// How often attention in several kernels moves the scores: forward (products, softmax, dropout) and backward.
const SCORE_PASSES: [f64; 2] = [4.0, 9.0];

/// The same where every operation is a kernel: also scaling, two for the mask and dropout with its own mask, and
/// their gradients (Megatron-LM of 2020, `mpu/transformer.py`).
const EAGER_SCORE_PASSES: [f64; 2] = [12.5, 13.5];

/// Heads are cut out of the projections and put together again by copies, forward and backward: this many times the
/// bytes of the attention's own operands.
const EAGER_HEADS: [f64; 2] = [2.0, 1.0];

/// Of a link, copies to memory that is not pinned, where PyTorch kept checkpoints: pinning one such copy made it four
/// to six times as fast (DeepSpeed pull request 5301).
const PAGEABLE_SHARE: f64 = 0.2;

/// Of all memory channels of a box, the CPU-Adam of 2020 on all its ranks: 109 to 127 GB/s of 256 (ZeRO-Offload,
/// Table 4).
const ADAM_SHARE: f64 = 0.46;

/// A pass of its own unscaled its fp32 gradients (`unscale_and_clip_grads`): 8 bytes beside 28.
const ADAM_BYTES: f64 = 36.0 / 28.0;

/// Other kernels that are several when each operation is one: this many times the bytes. Bias, dropout and residual
/// are 7.5 passes for 3; dropout's gradient reads a mask; the loss works on fp32 logits, 52 bytes of each for 8.
const EAGER_BYTES: [(&str, f64); 5] = [
    ("bias_dropout_add", 2.5),
    ("dropout", 1.25),
    ("row_max", 6.5),
    ("cross_entropy_stats", 6.5),
    ("cross_entropy_backward", 6.5),
];

/// Something that software did in 2020.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fact {
    /// Every operation on the scores was a kernel.
    Scores,
    /// Heads were cut out by copies.
    Heads,
    /// Bias, dropout, residual and the loss were several kernels each.
    SmallKernels,
    /// Checkpoints on the host were in memory that was not pinned.
    Pageable,
    /// One rank of a data-parallel group at a time copied gradients.
    OneCopier,
    /// CPU-Adam reached less of the memory channels.
    AdamRate,
    /// Gradients were unscaled by a pass of the host.
    Unscaling,
}

impl Fact {
    /// All of them, with the names that a box has for them.
    pub const ALL: [(Self, &'static str); 7] = [
        (Self::Scores, "scores"),
        (Self::Heads, "heads"),
        (Self::SmallKernels, "small_kernels"),
        (Self::Pageable, "pageable"),
        (Self::OneCopier, "one_copier"),
        (Self::AdamRate, "adam_rate"),
        (Self::Unscaling, "unscaling"),
    ];

    /// The fact that a box calls `name`.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(_, known)| *known == name).map(|(fact, _)| *fact)
    }
}

/// The facts of 2020 that are played.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AsOf2020([bool; Fact::ALL.len()]);

impl AsOf2020 {
    /// All of them but `left_out`.
    pub fn without(left_out: &[Fact]) -> Self {
        Self(Fact::ALL.map(|(fact, _)| !left_out.contains(&fact)))
    }
}

impl Gpu {
    /// Whether `fact` is played.
    pub(in crate::sim) fn did(&self, fact: Fact) -> bool {
        self.as_of_2020.is_some_and(|era| era.0[fact as usize])
    }

    /// How often kernels other than products and attention move their bytes.
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

    /// Of a link, copies of checkpoints.
    pub(in crate::sim) fn checkpoint_share_2020(&self) -> f64 {
        if self.did(Fact::Pageable) { PAGEABLE_SHARE } else { 1.0 }
    }

    /// Of the memory channels of a box, Adam on all ranks; and how many times its bytes it moves.
    pub(in crate::sim) fn adam_2020(&self) -> (Option<f64>, f64) {
        let share = self.did(Fact::AdamRate).then_some(ADAM_SHARE);
        (share, if self.did(Fact::Unscaling) { ADAM_BYTES } else { 1.0 })
    }
}
