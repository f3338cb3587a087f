//! Dropout: the elements that it drops, and the columns of a rank.

/// The elements that dropout drops. The choice is a pure function of `key` and the global index of
/// an element, so that it does not depend on ranks or micro-batches.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Dropout {
    /// Probability of dropping, in [0, 1). If it is 0, the op leaves values unchanged.
    pub p: f32,
    /// Key from seed, step, layer and site ([`crate::random::key`]).
    pub key: u64,
    /// Global index of the tensor's first row: sample of the step times T, plus position.
    pub first_row: u64,
}

impl Dropout {
    /// Dropout that drops no element.
    pub const NONE: Self = Self { p: 0.0, key: 0, first_row: 0 };
}

/// The columns of a tensor that a rank holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ColumnShard {
    /// Global number of the first column.
    pub first: usize,
    /// Number of columns of all ranks.
    pub all: usize,
}
