//! The conjugate regions f and g: the collectives of the tensor-parallel ranks.
//!
//! A column-parallel linear needs its complete input, and a row-parallel linear computes partial
//! sums. Without sequence parallelism, f is the identity forward and an all-reduce backward, and g
//! is the reverse. With sequence parallelism the tokens between the two linears are split over the
//! ranks: f gathers forward and reduce-scatters backward, and g is the reverse. All collectives are
//! on `TpComm`, in place.

use crate::shape::DecoderShape;
use device::{Arena, Device, Event, Group, Lane, Op, Reduction, Tensor};

/// The split of tokens between the linears.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Region {
    /// Whether each rank has only its share of the tokens (sequence parallelism).
    pub(crate) sequence: bool,
}

impl DecoderShape {
    pub(crate) const fn region(&self) -> Region {
        Region { sequence: self.sequence }
    }
}

impl Region {
    fn alone(dev: &Device) -> bool {
        dev.rank().tp_size == 1
    }

    /// This rank's rows of a (B T, n) buffer: all rows, or its share.
    pub(crate) fn rows(self, dev: &Device, full: Tensor) -> Tensor {
        let rank = dev.rank();
        if self.sequence { full.shard(rank.tp, rank.tp_size) } else { full }
    }

    /// `d_bias` of a row-parallel linear if `tp_size` is 1: the weight gradient's matmul then
    /// computes it. In a larger group every rank holds the bias and needs the same bits, so a
    /// separate kernel sums it.
    pub(crate) fn with_weight(dev: &Device, d_bias: Option<Tensor>) -> Option<Tensor> {
        d_bias.filter(|_| Self::alone(dev))
    }

    /// `d_bias` if [`with_weight`](Self::with_weight) returns none: for a separate kernel.
    pub(crate) fn separate_bias(dev: &Device, d_bias: Option<Tensor>) -> Option<Tensor> {
        d_bias.filter(|_| !Self::alone(dev))
    }

    /// Global number of this rank's first row, if the buffer's first row has number `first`.
    pub(crate) fn first_row(self, dev: &Device, first: u64, rows: usize) -> u64 {
        if self.sequence { first + (dev.rank().tp * rows) as u64 } else { first }
    }

    /// f forward, g backward: gathers the [`rows`](Self::rows) that every rank has written into
    /// `full`. Compute waits for the complete `full`.
    #[track_caller]
    pub(crate) fn gather(self, dev: &Device, full: Tensor) {
        dev.wait(Lane::Compute, self.start_gather(dev, full));
    }

    /// Starts a [`gather`](Self::gather), which has finished at the returned event.
    #[track_caller]
    pub(crate) fn start_gather(self, dev: &Device, full: Tensor) -> Event {
        if !self.sequence || Self::alone(dev) {
            return Event::default();
        }
        dev.follow(Lane::TpComm, Lane::Compute);
        dev.submit(Lane::TpComm, Op::AllGather { x: full, group: Group::Tp });
        dev.record(Lane::TpComm)
    }

    /// Starts g forward, f backward: sums the ranks' partial `full` (B T, n), in place. After the
    /// returned event this rank's [`rows`](Self::rows) are the sum; Compute must wait for the
    /// event. With `tp_size` 1, `full` is the sum already.
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

    /// Runs [`start_sum`](Self::start_sum), and Compute waits for it. Returns this rank's rows.
    #[track_caller]
    pub(crate) fn sum(self, dev: &Device, full: Tensor) -> Tensor {
        let summed = self.start_sum(dev, full);
        dev.wait(Lane::Compute, summed);
        self.rows(dev, full)
    }

    /// Sums the gradients of replicated parameters over the ranks, if each rank saw only its own
    /// tokens. Compute waits for the sum.
    #[track_caller]
    pub(crate) fn sum_replicated_grads(self, dev: &Device, grads: Tensor) {
        if self.sequence && !grads.is_empty() {
            sum_over_ranks(dev, grads, Reduction::Sum);
        }
    }
}

/// Runs an all-reduce over the tensor-parallel ranks; Compute waits for it.
#[track_caller]
pub(crate) fn sum_over_ranks(dev: &Device, x: Tensor, reduce: Reduction) {
    debug_assert!(x.arena() == Arena::Device);
    if dev.rank().tp_size > 1 {
        dev.follow(Lane::TpComm, Lane::Compute);
        dev.submit(Lane::TpComm, Op::AllReduce { x, group: Group::Tp, reduce });
        dev.follow(Lane::Compute, Lane::TpComm);
    }
}
