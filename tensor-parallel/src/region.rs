//! The conjugate regions f and g: where tensor-parallel ranks meet.
//!
//! A column-parallel linear needs its whole input and a row-parallel one leaves partial sums. Plain: f is the
//! identity forward and an all-reduce backward, g the reverse. With sequence parallelism the tokens between
//! the two are split over the ranks: f gathers forward and reduce-scatters backward, g the reverse.
//! All collectives are on `TpComm`, in place.

use device::{Arena, Device, Event, Group, Lane, Op, Reduction, Tensor};

/// The split of tokens between the linears.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Region {
    /// Each rank holds its share of the tokens.
    pub(crate) sequence: bool,
}

impl Region {
    fn alone(dev: &Device) -> bool {
        dev.rank().tp_size == 1
    }

    /// This rank's rows of a (B T, n) buffer: all, or its share.
    pub(crate) fn rows(self, dev: &Device, full: Tensor) -> Tensor {
        let rank = dev.rank();
        if self.sequence { full.shard(rank.tp, rank.tp_size) } else { full }
    }

    /// The gradient of a row-parallel linear's bias, where a rank is alone: it then goes with that of the weight. Ranks of a
    /// group sum it by one kernel, since all keep the bias and must keep the same bits.
    pub(crate) fn with_weight(dev: &Device, d_bias: Option<Tensor>) -> Option<Tensor> {
        d_bias.filter(|_| Self::alone(dev))
    }

    /// The same gradient where [`with_weight`](Self::with_weight) leaves it.
    pub(crate) fn apart(dev: &Device, d_bias: Option<Tensor>) -> Option<Tensor> {
        d_bias.filter(|_| !Self::alone(dev))
    }

    /// Global number of this rank's first row, when the buffer's first row has number `first`.
    pub(crate) fn first_row(self, dev: &Device, first: u64, rows: usize) -> u64 {
        if self.sequence { first + (dev.rank().tp * rows) as u64 } else { first }
    }

    /// f forward, g backward: every rank has put its [`rows`](Self::rows) into `full`; afterwards `full` is
    /// whole on all. Compute waits for it.
    #[track_caller]
    pub(crate) fn gather(self, dev: &Device, full: Tensor) {
        dev.wait(Lane::Compute, self.start_gather(dev, full));
    }

    /// [`gather`](Self::gather), which is over at the event.
    #[track_caller]
    pub(crate) fn start_gather(self, dev: &Device, full: Tensor) -> Event {
        if !self.sequence || Self::alone(dev) {
            return Event::default();
        }
        dev.follow(Lane::TpComm, Lane::Compute);
        dev.submit(Lane::TpComm, Op::AllGather { x: full, group: Group::Tp });
        dev.record(Lane::TpComm)
    }

    /// Starts g forward, f backward: sums the ranks' partial `full` (B T, n), in place. When the event has
    /// passed this rank's [`rows`](Self::rows) are the sum. For Compute to wait for; where a rank is alone it made the sum.
    #[track_caller]
    pub(crate) fn start_sum(self, dev: &Device, full: Tensor) -> Event {
        if Self::alone(dev) {
            return Event::default();
        }
        dev.follow(Lane::TpComm, Lane::Compute);
        let op = if self.sequence {
            Op::ReduceScatter { x: full, group: Group::Tp }
        } else {
            Op::AllReduce { x: full, group: Group::Tp, reduce: Reduction::Sum }
        };
        dev.submit(Lane::TpComm, op);
        dev.record(Lane::TpComm)
    }

    /// [`start_sum`](Self::start_sum), and Compute waits for it. Returns this rank's rows.
    #[track_caller]
    pub(crate) fn sum(self, dev: &Device, full: Tensor) -> Tensor {
        let summed = self.start_sum(dev, full);
        dev.wait(Lane::Compute, summed);
        self.rows(dev, full)
    }

    /// Where each rank saw only its own tokens, the gradients of replicated parameters are partial sums:
    /// adds them up. Compute waits for it.
    #[track_caller]
    pub(crate) fn sum_replicated_grads(self, dev: &Device, grads: Tensor) {
        if self.sequence {
            sum_over_ranks(dev, grads, Reduction::Sum);
        }
    }
}

/// All-reduce over the tensor-parallel ranks; Compute waits for it.
#[track_caller]
pub(crate) fn sum_over_ranks(dev: &Device, x: Tensor, reduce: Reduction) {
    debug_assert!(x.arena() == Arena::Device);
    if dev.rank().tp_size > 1 {
        dev.follow(Lane::TpComm, Lane::Compute);
        dev.submit(Lane::TpComm, Op::AllReduce { x, group: Group::Tp, reduce });
        dev.follow(Lane::Compute, Lane::TpComm);
    }
}
