//! The collective of an op.

use super::{Group, Op, Reduction};
use crate::Tensor;

/// A kind of collective.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CollectiveKind {
    /// Combines whole buffers on every rank.
    AllReduce(Reduction),
    /// Sums buffers into one part per rank.
    ReduceScatter,
    /// Collects the parts of all ranks.
    AllGather,
    /// Copies the buffer of one rank to all ranks.
    Broadcast { root: usize },
}

impl CollectiveKind {
    /// Number on which the ranks of a collective must agree, in addition to the op's name.
    pub(crate) const fn detail(self) -> usize {
        match self {
            Self::AllReduce(reduce) => reduce as usize,
            Self::ReduceScatter | Self::AllGather => 0,
            Self::Broadcast { root } => root,
        }
    }
}

/// An op that is a collective.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CollectiveOp {
    pub(crate) x: Tensor,
    pub(crate) group: Group,
    pub(crate) kind: CollectiveKind,
}

impl Op {
    /// The op as a collective. `None` if it is another op.
    pub(crate) const fn collective(&self) -> Option<CollectiveOp> {
        let (x, group, kind) = match *self {
            Self::AllReduce { x, group, reduce } => (x, group, CollectiveKind::AllReduce(reduce)),
            Self::ReduceScatter { x, group } => (x, group, CollectiveKind::ReduceScatter),
            Self::AllGather { x, group } => (x, group, CollectiveKind::AllGather),
            Self::Broadcast { x, group, root } => (x, group, CollectiveKind::Broadcast { root }),
            _ => return None,
        };
        Some(CollectiveOp { x, group, kind })
    }

    /// The group of a collective.
    pub fn group(&self) -> Option<Group> {
        self.collective().map(|of| of.group)
    }
}
