//! Collectives between virtual GPUs. Ranks of one process read each other's memory between two
//! rendezvous. Data of other processes arrives before the rendezvous that it belongs to. Large
//! ranges are sent in rounds, so that few bytes are in transit.
//!
//! A peer's op declares its whole range and stays in the collective until the last rendezvous, so
//! the peer's own hazard check protects the range. Sums are in rank order, in fp32 (fp64 for F64),
//! rounded once: every rank ends with the same bits.

use super::RankState;
use crate::numerics::view::copy;
use crate::op::{CollectiveKind, CollectiveOp};
use crate::ranks::communicator::CompletedRendezvous;
use crate::ranks::memory::StagedElements;
use crate::ranks::rendezvous::Arrival;
use crate::ranks::wire::HEAD;
use crate::{AdmittedOp, BLOCK, Dtype, Error, Reduction, Tensor, View, ViewMut};
use std::ops::Range;

/// Bytes that a rank sends to another rank before each rendezvous.
const ROUND: usize = 1 << 20;

/// Largest number of host bytes for messages of a rank's collectives, without MPI's buffers.
/// `largest`: bytes of the largest tensor. The group has `size` ranks, `away` of them in other
/// processes.
///
/// The messages of two rounds may wait on either side, since a rank may be one rendezvous ahead. In
/// addition there is room for two parts that are read from messages.
pub const fn message_bytes(largest: u64, size: u64, away: u64) -> u64 {
    let part = largest.div_ceil(size);
    let part = if part < ROUND as u64 { part } else { ROUND as u64 };
    if away == 0 { 0 } else { 4 * away * (HEAD as u64 + part) + 2 * part }
}

/// Runs a collective on the calling thread. Blocks until all ranks of its group have entered and
/// left it.
pub(super) fn run(op: &AdmittedOp, shared: &RankState, of: CollectiveOp) -> Result<(), Error> {
    divisible(op, shared, of)?;
    let (whole, x) = (Collective { op, shared, of }, of.x);
    let size = whole.size();
    match of.kind {
        // A reduce-scatter and an all-gather, over parts of any length.
        CollectiveKind::AllReduce(reduce) => {
            let part = |i: usize| part(x, i, size);
            whole.reduce(&part, reduce)?;
            whole.gather(&part)?;
        }
        CollectiveKind::ReduceScatter => whole.reduce(&|i| x.shard(i, size), Reduction::Sum)?,
        CollectiveKind::AllGather => whole.gather(&|i| x.shard(i, size))?,
        CollectiveKind::Broadcast { root } => {
            let none = x.slice(0..0);
            whole.gather(&|i| if i == root { x } else { none })?;
        }
    }
    whole.meet().map(drop)
}

pub(crate) fn meet<'a>(
    op: &AdmittedOp,
    shared: &'a RankState,
    of: CollectiveOp,
) -> Result<CompletedRendezvous<'a>, Error> {
    let CollectiveOp { x: tensor, group, kind } = of;
    let (op_name, detail) = (op.op.name(), kind.detail());
    let arrival = Arrival { op: op_name, site: op.site, tensor, detail, payload: 0 };
    shared.world.meet(shared.rank, op.lane, group, arrival)
}

/// Refuses a reduce-scatter or an all-gather if its buffer does not divide by the number of ranks.
pub(crate) fn divisible(
    op: &AdmittedOp,
    shared: &RankState,
    of: CollectiveOp,
) -> Result<(), Error> {
    let (x, count) = (of.x, shared.rank.within(of.group).1);
    let by_parts = matches!(of.kind, CollectiveKind::ReduceScatter | CollectiveKind::AllGather);
    let whole = if x.shape().0 == 1 { x.len() } else { x.shape().0 };
    if !by_parts || whole.is_multiple_of(count) {
        return Ok(());
    }
    let problem = format!("{whole} rows or elements do not divide by {count} ranks");
    Err(Error::Task { rank: shared.rank.index(), op: op.op.name(), site: op.site, problem })
}

/// Sets `mine` to the combination of the same range on every rank. `theirs` returns the elements of
/// member i of `size` for a range of `mine`. Only this rank accesses `mine` during the call.
fn combine<'a>(
    size: usize,
    theirs: impl Fn(usize, Range<usize>) -> View<'a>,
    shared: &RankState,
    mine: Tensor,
    reduce: Reduction,
) {
    if mine.dtype() == Dtype::F64 {
        for e in 0..mine.len() {
            let value = |i| match theirs(i, e..e + 1).as_slice::<f64>() {
                Some(values) => values[0],
                None => unreachable!("the range is of 64 bits, as was looked at above"),
            };
            let mut total = value(0);
            for i in 1..size {
                total = match reduce {
                    Reduction::Sum => total + value(i),
                    Reduction::Max => total.max(value(i)),
                };
            }
            if let ViewMut::F64(out) = shared.memory.view_mut(mine.slice(e..e + 1)) {
                out[0] = total;
            }
        }
        return;
    }
    let (mut sum, mut block) = ([0.0f32; BLOCK], [0.0f32; BLOCK]);
    for start in (0..mine.len()).step_by(BLOCK) {
        let n = BLOCK.min(mine.len() - start);
        for i in 0..size {
            let theirs = theirs(i, start..start + n);
            if i == 0 {
                theirs.load(0, &mut sum[..n]);
                continue;
            }
            theirs.load(0, &mut block[..n]);
            let pairs = sum[..n].iter_mut().zip(&block[..n]);
            match reduce {
                Reduction::Sum => pairs.for_each(|(s, x)| *s += x),
                Reduction::Max => pairs.for_each(|(s, x)| *s = s.max(*x)),
            }
        }
        shared.memory.view_mut(mine.slice(start..start + n)).store(0, &sum[..n]);
    }
}

/// Part `i` of `count` of all elements of `x`. The last parts may be shorter or empty.
fn part(x: Tensor, i: usize, count: usize) -> Tensor {
    let each = x.len().div_ceil(count);
    x.reshape(1, x.len()).slice((i * each).min(x.len())..((i + 1) * each).min(x.len()))
}

/// A collective of this rank.
struct Collective<'a> {
    op: &'a AdmittedOp,
    shared: &'a RankState,
    of: CollectiveOp,
}

impl Collective<'_> {
    fn me(&self) -> usize {
        self.shared.rank.within(self.of.group).0
    }

    fn size(&self) -> usize {
        self.shared.rank.within(self.of.group).1
    }

    fn meet(&self) -> Result<CompletedRendezvous<'_>, Error> {
        meet(self.op, self.shared, self.of)
    }

    /// Members in other processes.
    fn remote_members(&self) -> impl Iterator<Item = usize> {
        (0..self.size()).filter(|i| self.is_remote(*i))
    }

    fn is_remote(&self, i: usize) -> bool {
        self.shared.world.is_remote_rank(self.shared.rank.member(self.of.group, i))
    }

    fn send(&self, to: usize, part: Tensor) {
        let bytes = self.shared.memory.bytes(part);
        self.shared.world.send(self.shared.rank, self.op.lane, self.of.group, to, bytes);
    }

    /// Number of rounds that send all parts: at least one, in which the group compares its ops.
    fn rounds(&self, part: &dyn Fn(usize) -> Tensor) -> usize {
        let each = self.each();
        (0..self.size()).map(|i| part(i).len().div_ceil(each)).fold(1, usize::max)
    }

    /// Elements of a round. If no data leaves the process, one round has all elements.
    fn each(&self) -> usize {
        let round = ROUND / self.of.x.dtype().bytes() as usize;
        if self.shared.world.is_remote_group(self.shared.rank, self.of.group) {
            round
        } else {
            usize::MAX
        }
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
            let received = |i| (i, StagedElements::of_bytes(mine.dtype(), met.parcel(i).bytes()));
            let remote: Vec<(usize, StagedElements)> =
                self.remote_members().map(received).collect();
            let of = |i: usize, range: Range<usize>| match remote.iter().find(|(of, _)| *of == i) {
                Some((_, received)) => received.view().slice(range),
                None => met.peer(i).view(mine.slice(range)),
            };
            combine(self.size(), of, self.shared, mine, reduce);
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
                    let received = StagedElements::of_bytes(theirs.dtype(), met.parcel(i).bytes());
                    copy(received.view(), &mut mine);
                } else {
                    copy(met.peer(i).view(theirs), &mut mine);
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::message_bytes;

    #[test]
    fn messages_of_two_rounds_wait_on_either_side() {
        // Parts of 64 bytes, with 33 of their message.
        assert_eq!(message_bytes(256, 4, 2), 2 * 2 * 2 * (33 + 64) + 2 * 64);
        assert_eq!(message_bytes(1 << 30, 4, 3), 2 * 2 * 3 * (33 + (1 << 20)) + (2 << 20));
        assert_eq!(message_bytes(1 << 30, 4, 0), 0);
    }
}
