//! Matmuls of a rank, and the multiprocessors that they leave to collectives.
//!
//! From sm_90 on, the library's matmuls have one block for each multiprocessor, which stays until
//! the end of the matmul. NCCL's blocks share no multiprocessor with them. Without a bound NCCL
//! uses up to 32 multiprocessors; the blocks of a matmul that find no multiprocessor run after the
//! collective, and the matmul lasts up to twice as long. Therefore a communicator has a bound of
//! blocks, and a matmul that may run during a sum is chosen for the other multiprocessors.
//!
//! The choice follows from the order of the program, never from time, and a pass makes the same
//! choices whenever it runs. It ignores gathers of parameters over replicas: whether one is pending
//! in a forward pass depends on the update before it, and another algorithm may have other bits.

use super::driver::Stream;
use super::{Gpu, launch};
use crate::op::Product;
use crate::op::lane::{Clock, join};
use crate::{AdmittedOp, Error, Event, Lane, Op, Rank, Tensor};

/// Compute capability of the first GPUs on which matmuls leave multiprocessors to collectives.
pub const LEAVE_ROOM_SINCE: u32 = 90;

/// Most blocks of an NCCL communicator of a TP group, whose sums inside of layers are often waited
/// for: NVLink needs about 16 for most of its rate.
const TP_CTAS: u32 = 16;
/// Most blocks of an NCCL communicator of a DP group, whose sums run during matmuls of other
/// blocks.
const DP_CTAS: u32 = 8;

/// Most blocks of a rank's NCCL communicators: TP, DP. 0: no bound, or no communicator.
pub(super) const fn collective_ctas(sm: u32, rank: Rank) -> [u32; 2] {
    if sm < LEAVE_ROOM_SINCE {
        return [0, 0];
    }
    [if rank.tp_size > 1 { TP_CTAS } else { 0 }, if rank.dp_size > 1 { DP_CTAS } else { 0 }]
}

/// The collectives that may run at the same time as the next op of Compute: Compute has not waited
/// for them.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct OverlapTracker {
    /// For each lane, the number of its ops that have finished before the next op of Compute.
    known: Clock,
    /// Numbers of the last collectives of TpComm and DpComm.
    collectives: [u64; 2],
}

impl OverlapTracker {
    pub(super) fn submit(&mut self, op: &AdmittedOp) {
        let is_sum = matches!(op.op, Op::ReduceScatter { .. } | Op::AllReduce { .. });
        match op.lane {
            Lane::TpComm if op.op.collective().is_some() => self.collectives[0] = op.tick,
            Lane::DpComm if is_sum => self.collectives[1] = op.tick,
            _ => {}
        }
    }

    pub(super) fn wait(&mut self, lane: Lane, event: &Event) {
        if lane == Lane::Compute {
            join(&mut self.known, &event.clock);
        }
    }

    pub(super) fn sync(&mut self, lane: Lane, tick: u64) {
        let known = &mut self.known[lane as usize];
        *known = (*known).max(tick);
    }

    /// The largest of `ctas` (TP, DP) whose collective may run during the next op of Compute.
    pub(super) fn most(&self, ctas: [u32; 2]) -> u32 {
        let lanes = [Lane::TpComm, Lane::DpComm];
        let runs = |group: usize| self.collectives[group] > self.known[lanes[group] as usize];
        (0..2).filter(|group| runs(*group)).map(|group| ctas[group]).max().unwrap_or(0)
    }
}

impl Gpu {
    /// Changes the state of the overlap with collectives.
    pub(super) fn track(&self, change: impl FnOnce(&mut OverlapTracker)) {
        let mut overlap = self.overlap.get();
        change(&mut overlap);
        self.overlap.set(overlap);
    }

    /// Multiprocessors that the next matmul leaves to collectives.
    pub(super) fn spared(&self) -> u32 {
        self.overlap.get().most(self.ctas)
    }

    /// Enqueues a matmul that leaves `spared` multiprocessors to collectives.
    pub(super) fn gemm(&self, op: &AdmittedOp, stream: &Stream, spared: u32) -> Result<(), Error> {
        let Some(gemm) = &Product::of(&op.op) else { return Err(self.refused(op, "no product")) };
        let at = |t: Tensor| self.peer.at(t);
        let left = self.processors.checked_sub(spared).filter(|left| spared > 0 && *left > 0);
        let done = self.blas.borrow_mut().gemm(stream, gemm, &at, left);
        let fused = done.map_err(|problem| self.library_failed(op, stream, &problem))?;
        if let Some(bias) = gemm.bias.filter(|_| !gemm.takes_bias()) {
            let launch = launch::add_bias(gemm.c, bias, &at);
            if let Some(launch) = launch.map_err(|problem| self.refused(op, &problem))? {
                self.launch(op, stream, &launch)?;
            }
        }
        let separate_op = gemm.epilogue.separate_op(gemm.a, gemm.c).filter(|_| !fused);
        separate_op.map_or(Ok(()), |separate_op| self.kernels(op, stream, &separate_op))
    }

    /// Runs a matmul once for each number of multiprocessors that it may leave to collectives: each
    /// has its own algorithm.
    pub(super) fn warm_up_beside_collectives(&self, op: &AdmittedOp) -> Result<(), Error> {
        if let Op::Gemm { .. } | Op::ScaledGemm { .. } = op.op {
            let mut spared = self.ctas.into_iter().filter(|ctas| *ctas > 0);
            return spared.try_for_each(|spared| self.gemm(op, self.stream(op.lane), spared));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Group, LANES, Reduction};
    use std::panic::Location;

    fn collective(lane: Lane, tick: u64) -> AdmittedOp {
        let op = Op::AllReduce { x: Tensor::NONE, group: Group::Tp, reduce: Reduction::Sum };
        AdmittedOp { op, site: Location::caller(), lane, tick }
    }

    /// The event after op `tick` of a lane.
    fn after(lane: Lane, tick: u64) -> Event {
        let mut clock = [0; LANES];
        clock[lane as usize] = tick;
        Event { lane: lane as u8, device: 1, clock }
    }

    #[test]
    fn a_collective_runs_beside_compute_until_compute_waits_for_it() {
        let (mut overlap, ctas) = (OverlapTracker::default(), [16, 8]);
        assert_eq!(overlap.most(ctas), 0);
        overlap.submit(&collective(Lane::DpComm, 3));
        assert_eq!(overlap.most(ctas), 8);
        overlap.submit(&collective(Lane::TpComm, 5));
        assert_eq!(overlap.most(ctas), 16, "the larger room");
        overlap.wait(Lane::H2d, &after(Lane::TpComm, 5));
        assert_eq!(overlap.most(ctas), 16, "another lane has waited");
        overlap.wait(Lane::Compute, &after(Lane::TpComm, 4));
        assert_eq!(overlap.most(ctas), 16, "Compute has waited for an earlier one");
        overlap.wait(Lane::Compute, &after(Lane::TpComm, 5));
        assert_eq!(overlap.most(ctas), 8);
        overlap.sync(Lane::DpComm, 3);
        assert_eq!(overlap.most(ctas), 0, "the rank's thread has waited");
        for op in
            [Op::Zero { x: Tensor::NONE }, Op::AllGather { x: Tensor::NONE, group: Group::Dp }]
        {
            overlap.submit(&AdmittedOp { op, ..collective(Lane::DpComm, 4) });
            assert_eq!(overlap.most(ctas), 0, "no collective, or a gather of parameters");
        }
        let gather = Op::AllGather { x: Tensor::NONE, group: Group::Tp };
        overlap.submit(&AdmittedOp { op: gather, ..collective(Lane::TpComm, 6) });
        assert_eq!(overlap.most(ctas), 16, "a gather inside of a layer");
    }

    #[test]
    fn communicators_are_bounded_where_matmuls_are_persistent() {
        let rank = |tp_size, dp_size| Rank { tp: 0, tp_size, dp: 0, dp_size };
        assert_eq!(collective_ctas(80, rank(2, 2)), [0, 0]);
        assert_eq!(collective_ctas(90, rank(2, 2)), [16, 8]);
        assert_eq!(collective_ctas(100, rank(1, 4)), [0, 8]);
    }
}
