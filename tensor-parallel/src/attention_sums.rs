//! Sums of attention's gradients over the ranks: of keys and values whose heads ranks share, and of the
//! gains of the norm of q and k.

use crate::adapter;
use crate::attention::{Attention, GAINS};
use crate::branch::Scratch;
use crate::params::FlatBuffer;
use crate::region::sum_over_ranks;
use crate::shape::{DecoderShape, QkNorm};
use device::{Device, Event, Group, Lane::Compute, Lane::TpComm, Op, Reduction, Tensor};

/// Names of keys and values, which ranks share if there are more ranks than key and value heads.
const SHARED: [&str; 2] = ["attn.k", "attn.v"];

impl Attention {
    /// Starts the sum of the key and value gradients over the ranks that share a head; each rank
    /// has the gradients of its own queries. Each rank writes the row of its head and zeros to the
    /// other rows, so an all-reduce over all ranks sums each head separately. Compute must wait for
    /// the returned event.
    #[track_caller]
    pub(crate) fn start_sum_of_shared(
        flat: FlatBuffer<'_>,
        dev: &Device,
        shape: &DecoderShape,
        scratch: &Scratch,
    ) -> Event {
        let Some(all) = scratch.d_shared else { return Event::default() };
        let head = dev.rank().tp / shape.kv_replicas();
        let row = all.rows(head..head + 1);
        let architecture = &shape.architecture;
        let mut used = 0;
        let mut next = |grads: Tensor| {
            let start = used;
            used += grads.len();
            (grads, row.slice(start..used))
        };
        let mut factors = adapter::shared(flat, shape, &SHARED).map(&mut next);
        let factors = [factors.next(), factors.next()];
        let weights = next(flat.joined(&SHARED, "weight"));
        let biases = architecture.qkv_bias.then(|| next(flat.joined(&SHARED, "bias")));
        let gains = architecture.qk_norm == Some(QkNorm::Width);
        let gains = gains.then(|| next(flat.get(GAINS[1], "weight")));
        let parts = || {
            let all = [Some(weights), biases, gains].into_iter().chain(factors).flatten();
            all.filter(|(grads, _)| !grads.is_empty())
        };
        if parts().next().is_none() {
            return Event::default(); // all are frozen
        }
        dev.submit(Compute, Op::Zero { x: all });
        for (src, dst) in parts() {
            dev.submit(Compute, Op::Copy { src, dst });
        }
        dev.follow(TpComm, Compute);
        dev.submit(TpComm, Op::AllReduce { x: all, group: Group::Tp, reduce: Reduction::Sum });
        for (dst, src) in parts() {
            dev.submit(TpComm, Op::Copy { src, dst });
        }
        dev.record(TpComm)
    }

    /// Sums the gradients of the q and k gains over the ranks, since each rank has the gradients of
    /// its own heads. With sequence parallelism the sum of all replicated gradients includes them.
    /// Gains of a norm over all heads are split with the heads.
    pub(crate) fn sum_gains(flat: FlatBuffer<'_>, dev: &Device, shape: &DecoderShape) {
        if shape.architecture.qk_norm == Some(QkNorm::Heads) && !shape.sequence {
            let gains = flat.joined(&GAINS, "weight");
            if !gains.is_empty() {
                sum_over_ranks(dev, gains, Reduction::Sum);
            }
        }
    }
}
