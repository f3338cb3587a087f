//! Collectives of groups with ranks in several processes. Ranks of one process read each other's
//! memory, as ever; data of other processes arrives before the rendezvous that it belongs to.
//!
//! Large ranges go in rounds, so that only little of them is on its way. The sums are those of one
//! process: in rank order, rounded once.

use super::{CompletedRendezvous, RankState, combine_of, divisible, meet, part};
use crate::numerics::view::{ReceivedElements, copy};
use crate::ranks::wire::HEAD;
use crate::{AdmittedOp, Error, Group, Op, Reduction, Tensor};

/// Bytes that a rank sends another one before both meet.
const ROUND: usize = 1 << 20;

/// Bytes of the host that the messages of a rank's collectives take at most. `largest`: bytes of the largest tensor, of a group of
/// `size` ranks, `away` of which are in other processes. MPI's own buffers are not among them.
///
/// The messages of two rounds may wait on either side, since a rank may be one rendezvous ahead. Beside them, one
/// part is read for a message and one from a message.
pub const fn message_bytes(largest: u64, size: u64, away: u64) -> u64 {
    let part = largest.div_ceil(size);
    let part = if part < ROUND as u64 { part } else { ROUND as u64 };
    if away == 0 { 0 } else { 4 * away * (HEAD as u64 + part) + 2 * part }
}

/// Runs a collective whose group has ranks in other processes.
pub(super) fn run(op: &AdmittedOp, shared: &RankState) -> Result<(), Error> {
    match op.op {
        Op::AllReduce { x, group, reduce } => {
            let whole = RemoteCollective { op, shared, x, group, detail: reduce as usize };
            let part = |i: usize| part(x, i, whole.size());
            whole.reduce(&part, reduce)?;
            whole.gather(&part)
        }
        Op::ReduceScatter { x, group } => {
            let whole = RemoteCollective { op, shared, x, group, detail: 0 };
            divisible(op, shared, x, whole.size())?;
            whole.reduce(&|i| x.shard(i, whole.size()), Reduction::Sum)?;
            whole.meet().map(drop)
        }
        Op::AllGather { x, group } => {
            let whole = RemoteCollective { op, shared, x, group, detail: 0 };
            divisible(op, shared, x, whole.size())?;
            whole.gather(&|i| x.shard(i, whole.size()))
        }
        Op::Broadcast { x, group, root } => {
            let whole = RemoteCollective { op, shared, x, group, detail: root };
            let none = x.reshape(1, x.len()).slice(0..0);
            whole.gather(&|i| if i == root { x } else { none })
        }
        _ => unreachable!("{} is no collective that data crosses processes for", op.op.name()),
    }
}

/// A collective on `x` of a group with ranks in other processes.
struct RemoteCollective<'a> {
    op: &'a AdmittedOp,
    shared: &'a RankState,
    x: Tensor,
    group: Group,
    detail: usize,
}

impl RemoteCollective<'_> {
    fn me(&self) -> usize {
        self.shared.rank.within(self.group).0
    }

    fn size(&self) -> usize {
        self.shared.rank.within(self.group).1
    }

    fn meet(&self) -> Result<CompletedRendezvous<'_>, Error> {
        meet(self.op, self.shared, self.x, self.group, self.detail)
    }

    /// Members in other processes.
    fn remote_members(&self) -> impl Iterator<Item = usize> {
        (0..self.size()).filter(|i| self.is_remote(*i))
    }

    fn is_remote(&self, i: usize) -> bool {
        self.shared.world.is_remote_rank(self.shared.rank.member(self.group, i))
    }

    fn send(&self, to: usize, part: Tensor) {
        let mut bytes = Vec::with_capacity(part.bytes() as usize);
        self.shared.memory.view(part).append_to(&mut bytes);
        self.shared.world.send(self.shared.rank, self.op.lane, self.group, to, &bytes);
    }

    /// Rounds in which all parts go. One at least, in which the group compares its ops.
    fn rounds(&self, part: &dyn Fn(usize) -> Tensor) -> usize {
        let longest = (0..self.size()).map(|i| part(i).len()).max().unwrap_or(0);
        longest.div_ceil(self.each()).max(1)
    }

    /// Elements of a round.
    const fn each(&self) -> usize {
        ROUND / self.x.dtype().bytes() as usize
    }

    /// The elements of `part` that round number `round` sends.
    fn cut(&self, part: Tensor, round: usize) -> Tensor {
        let (flat, each) = (part.reshape(1, part.len()), self.each());
        flat.slice((round * each).min(part.len())..((round + 1) * each).min(part.len()))
    }

    /// Sets this rank's part to the combination of the same range on every rank.
    fn reduce(&self, part: &dyn Fn(usize) -> Tensor, reduce: Reduction) -> Result<(), Error> {
        for round in 0..self.rounds(part) {
            self.remote_members().for_each(|i| self.send(i, self.cut(part(i), round)));
            let met = self.meet()?;
            let mine = self.cut(part(self.me()), round);
            let received = |i| ReceivedElements::new(mine.dtype(), met.parcel(i).bytes());
            let theirs: Vec<Option<ReceivedElements>> =
                (0..self.size()).map(|i| self.is_remote(i).then(|| received(i))).collect();
            let of = |i: usize, range: std::ops::Range<usize>| match &theirs[i] {
                Some(received) => received.view().slice(range),
                None => met.peer(i).view(mine.slice(range)),
            };
            combine_of(self.size(), of, self.shared, mine, reduce);
        }
        Ok(())
    }

    /// Copies every other rank's part into this rank's memory.
    fn gather(&self, part: &dyn Fn(usize) -> Tensor) -> Result<(), Error> {
        for round in 0..self.rounds(part) {
            self.remote_members().for_each(|i| self.send(i, self.cut(part(self.me()), round)));
            let met = self.meet()?;
            for i in (0..self.size()).filter(|i| *i != self.me()) {
                let theirs = self.cut(part(i), round);
                let mut mine = self.shared.memory.view_mut(theirs);
                if self.is_remote(i) {
                    let received = ReceivedElements::new(theirs.dtype(), met.parcel(i).bytes());
                    copy(received.view(), &mut mine);
                } else {
                    copy(met.peer(i).view(theirs), &mut mine);
                }
            }
        }
        self.meet().map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::message_bytes;

    #[test]
    fn letters_of_two_rounds_wait_on_either_side() {
        // Parts of 64 bytes, with 33 of their message.
        assert_eq!(message_bytes(256, 4, 2), 2 * 2 * 2 * (33 + 64) + 2 * 64);
        assert_eq!(message_bytes(1 << 30, 4, 3), 2 * 2 * 3 * (33 + (1 << 20)) + (2 << 20));
        assert_eq!(message_bytes(1 << 30, 4, 0), 0);
    }
}
