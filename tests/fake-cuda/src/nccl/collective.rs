//! A rank's part of a collective: its kind, and the memory that it reads and writes.

use super::reduce::{Element, Reduction};
use crate::{call::CallResult, driver::memory::check_accessible};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CollectiveKind {
    AllReduce,
    ReduceScatter,
    Reduce,
    AllGather,
    Broadcast,
}

impl CollectiveKind {
    /// The kind with this number in a request to another process.
    pub(super) fn new(number: u64) -> Option<Self> {
        use CollectiveKind::{AllGather, AllReduce, Broadcast, Reduce, ReduceScatter};
        let all = [AllReduce, ReduceScatter, Reduce, AllGather, Broadcast];
        all.get(usize::try_from(number).ok()?).copied()
    }
}

/// One rank's part of a collective. `count` is the argument of the call, in reduce-scatter and
/// all-gather the elements per rank.
#[derive(Debug, Clone, Copy)]
pub(super) struct Collective {
    pub(super) kind: CollectiveKind,
    pub(super) send: usize,
    pub(super) recv: usize,
    pub(super) count: usize,
    pub(super) element: Element,
    pub(super) reduction: Reduction,
    pub(super) root: usize,
}

impl Collective {
    pub(super) fn fits(&self, other: &Self) -> bool {
        let key = |c: &Self| (c.kind, c.count, c.element, c.reduction, c.root);
        key(self) == key(other)
    }

    pub(super) fn bytes(&self) -> usize {
        self.count * self.element.bytes()
    }

    /// Bytes that this rank sends and receives.
    pub(super) fn lengths(&self, rank: usize, ranks: usize) -> (usize, usize) {
        let (sent, received) = match self.kind {
            CollectiveKind::AllReduce => (1, 1),
            CollectiveKind::Reduce => (1, usize::from(rank == self.root)),
            CollectiveKind::Broadcast => (usize::from(rank == self.root), 1),
            CollectiveKind::ReduceScatter => (ranks, 1),
            CollectiveKind::AllGather => (1, ranks),
        };
        (sent * self.bytes(), received * self.bytes())
    }

    /// Checks that this rank reads and writes only live memory.
    pub(super) fn check(&self, rank: usize, ranks: usize) -> CallResult {
        let (sent, received) = self.lengths(rank, ranks);
        if self.kind != CollectiveKind::Broadcast || rank == self.root {
            check_accessible("send buffer", self.send, sent)?;
        }
        if self.kind != CollectiveKind::Reduce || rank == self.root {
            check_accessible("receive buffer", self.recv, received)?;
        }
        Ok(())
    }
}

/// Text of a part for messages.
pub(super) fn describe(part: &Collective) -> String {
    format!("{:?} of {} {:?} (root {})", part.kind, part.count, part.element, part.root)
}
