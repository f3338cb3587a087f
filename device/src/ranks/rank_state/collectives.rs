//! Collectives between virtual GPUs. Ranks read each other's memory between two rendezvous.
//!
//! A peer's op declares its whole range and stays in the collective until the last rendezvous, so the
//! peer's own hazard check protects the range. Sums are in rank order, in fp32 (fp64 for F64),
//! rounded once: every rank ends with the same bits.

pub(crate) mod remote;

use super::RankState;
use crate::numerics::view::copy;
use crate::ranks::communicator::CompletedRendezvous;
use crate::ranks::rendezvous::Arrival;
use crate::{AdmittedOp, BLOCK, Dtype, Error, Group, Op, Reduction, Tensor, View, ViewMut};
use std::ops::Range;

/// Runs a collective on the calling thread. Blocks until all ranks of its group have entered and
/// left it.
pub(crate) fn run(op: &AdmittedOp, shared: &RankState) -> Result<(), Error> {
    match op.op {
        Op::AllReduce { group, .. }
        | Op::ReduceScatter { group, .. }
        | Op::AllGather { group, .. }
        | Op::Broadcast { group, .. }
            if shared.world.is_remote_group(shared.rank, group) =>
        {
            remote::run(op, shared)
        }
        Op::AllReduce { x, group, reduce } => all_reduce(op, shared, x, group, reduce),
        Op::ReduceScatter { x, group } => reduce_scatter(op, shared, x, group),
        Op::AllGather { x, group } => all_gather(op, shared, x, group),
        Op::Broadcast { x, group, root } => broadcast(op, shared, x, group, root),
        _ => Ok(()),
    }
}

pub(crate) fn meet<'a>(
    op: &AdmittedOp,
    shared: &'a RankState,
    x: Tensor,
    group: Group,
    detail: usize,
) -> Result<CompletedRendezvous<'a>, Error> {
    let arrival = Arrival { op: op.op.name(), site: op.site, tensor: x, detail, payload: 0 };
    shared.world.meet(shared.rank, op.lane, group, arrival)
}

pub(crate) fn divisible(
    op: &AdmittedOp,
    shared: &RankState,
    x: Tensor,
    count: usize,
) -> Result<(), Error> {
    let whole = if x.shape().0 == 1 { x.len() } else { x.shape().0 };
    if whole.is_multiple_of(count) {
        return Ok(());
    }
    let problem = format!("{whole} rows or elements do not divide by {count} ranks");
    Err(Error::Task { rank: shared.rank.index(), op: op.op.name(), site: op.site, problem })
}

/// Sets `mine` to the combination of the same range on every rank. Only this rank reads or writes
/// `mine` meanwhile.
fn combine(met: &CompletedRendezvous<'_>, shared: &RankState, mine: Tensor, reduce: Reduction) {
    let flat = mine.reshape(1, mine.len());
    let theirs = |i: usize, range: Range<usize>| met.peer(i).view(flat.slice(range));
    combine_of(met.size(), theirs, shared, flat, reduce);
}

/// The same, where `theirs` has the elements of member i of `size` at a range of `mine`.
fn combine_of<'a>(
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

/// Copies every other rank's part into this rank's `x`. `part(i)` is the range of rank i.
fn gather(met: &CompletedRendezvous<'_>, shared: &RankState, part: impl Fn(usize) -> Tensor) {
    for i in (0..met.size()).filter(|&i| i != met.me) {
        copy(met.peer(i).view(part(i)), &mut shared.memory.view_mut(part(i)));
    }
}

fn reduce_scatter(
    op: &AdmittedOp,
    shared: &RankState,
    x: Tensor,
    group: Group,
) -> Result<(), Error> {
    let met = meet(op, shared, x, group, 0)?;
    divisible(op, shared, x, met.size())?;
    combine(&met, shared, x.shard(met.me, met.size()), Reduction::Sum);
    meet(op, shared, x, group, 0).map(drop)
}

fn all_gather(op: &AdmittedOp, shared: &RankState, x: Tensor, group: Group) -> Result<(), Error> {
    let met = meet(op, shared, x, group, 0)?;
    divisible(op, shared, x, met.size())?;
    gather(&met, shared, |i| x.shard(i, met.size()));
    meet(op, shared, x, group, 0).map(drop)
}

/// All-reduce as a reduce-scatter and an all-gather, over parts of any length.
fn all_reduce(
    op: &AdmittedOp,
    shared: &RankState,
    x: Tensor,
    group: Group,
    reduce: Reduction,
) -> Result<(), Error> {
    let met = meet(op, shared, x, group, reduce as usize)?;
    let part = |i: usize| part(x, i, met.size());
    combine(&met, shared, part(met.me), reduce);
    let summed = meet(op, shared, x, group, reduce as usize)?;
    gather(&summed, shared, part);
    meet(op, shared, x, group, reduce as usize).map(drop)
}

/// Part `i` of `count` of all elements of `x`: the last ones may be shorter, or empty.
fn part(x: Tensor, i: usize, count: usize) -> Tensor {
    let each = x.len().div_ceil(count);
    x.reshape(1, x.len()).slice((i * each).min(x.len())..((i + 1) * each).min(x.len()))
}

fn broadcast(
    op: &AdmittedOp,
    shared: &RankState,
    x: Tensor,
    group: Group,
    root: usize,
) -> Result<(), Error> {
    let met = meet(op, shared, x, group, root)?;
    if let Some(memory) = (met.me != root).then(|| met.peer(root)) {
        copy(memory.view(x), &mut shared.memory.view_mut(x));
    }
    meet(op, shared, x, group, root).map(drop)
}
