//! Properties of the software of 2020 that a box can leave out.

/// A property of the software of 2020.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fact {
    /// Every operation on the scores was a separate kernel.
    Scores,
    /// Separate copies cut out the heads.
    Heads,
    /// Bias, dropout, residual and the loss were several kernels each.
    SmallKernels,
    /// Checkpoints on the host were in unpinned memory.
    Pageable,
    /// Only one rank of a data-parallel group copied gradients at a time.
    OneCopier,
    /// CPU-Adam used a smaller share of the memory channels' bandwidth than Adam of onebox.
    AdamRate,
    /// A separate pass on the host unscaled the gradients.
    Unscaling,
}

impl Fact {
    /// All facts, with their names in a box.
    pub const ALL: [(Self, &'static str); 7] = [
        (Self::Scores, "scores"),
        (Self::Heads, "heads"),
        (Self::SmallKernels, "small_kernels"),
        (Self::Pageable, "pageable"),
        (Self::OneCopier, "one_copier"),
        (Self::AdamRate, "adam_rate"),
        (Self::Unscaling, "unscaling"),
    ];

    /// The fact with the name `name` in a box.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(_, known)| *known == name).map(|(fact, _)| *fact)
    }
}
