//! The inputs of the blocks, which the backward pass runs them from again: every one whole, or partitioned over
//! the tensor-parallel ranks (as ZeRO-R partitions activations, arXiv 1910.02054, section 6.1).
//!
//! Partitioned, two whole buffers take turns as input and output of the blocks. Each rank keeps its share of an
//! input before it is overwritten; the backward pass gathers it again, one block ahead, while the block above is
//! at work. The last two inputs are still whole when the backward pass comes to them, and are not kept.

use crate::gpt::GptShape;
use device::{Arena, Device, Group, Lane, Op, Plan, Tensor};

/// Handles of x[0] to x[L]: the input of block l, and of the final norm.
#[derive(Clone, Debug)]
pub(crate) struct Checkpoints {
    /// (rows, C) each: x[l] is in `whole[l % whole.len()]`.
    whole: Vec<Tensor>,
    /// (1, B T C / t) each: this rank's share of x[0] to x[L - 2]. Empty where nothing is partitioned.
    shares: Vec<Tensor>,
}

impl Checkpoints {
    /// Of `set`, see [`GptShape::checkpoint_sets`].
    pub(crate) fn plan(plan: &mut Plan, shape: &GptShape, set: usize) -> Self {
        let (rows, c, dtype) = (shape.rows(), shape.hidden, shape.dtype);
        let partition = shape.partition_checkpoints && shape.tp_size > 1;
        let (count, pool) = match (partition, shape.recompute) {
            (true, _) => (2, "transients"),
            (false, true) => (shape.layers + 1, "checkpoints"),
            (false, false) => (shape.layers + 1, "activations"),
        };
        let mut tensor =
            |pool, name: String, shape| plan.tensor((Arena::Device, pool), name, dtype, shape);
        let x = if set == 0 { "x".to_owned() } else { format!("set.{set}.x") };
        let whole = (0..count).map(|i| tensor(pool, format!("{x}.{i}"), (rows, c))).collect();
        let kept = if partition { shape.layers.saturating_sub(1) } else { 0 };
        let share = (1, rows * c / shape.tp_size);
        let share = |l| tensor("checkpoints", format!("{x}.{l}.share"), share);
        Self { whole, shares: (0..kept).map(share).collect() }
    }

    /// (rows, C): x[l], while it is whole.
    pub(crate) fn input(&self, l: usize) -> Tensor {
        self.whole[l % self.whole.len()]
    }

    /// Forward, before x[l]'s buffer is used again: keeps this rank's share, on Compute.
    pub(crate) fn keep(&self, dev: &Device, l: usize) {
        if let Some(&share) = self.shares.get(l) {
            dev.submit(Lane::Compute, Op::Copy { src: self.own_part(dev, l), dst: share });
        }
    }

    /// Backward, before block l: Compute waits until x[l] is whole again, and the gather of x[l - 1] starts. It
    /// waits for nothing but the block above, so a sum that queues behind it on TpComm does not wait long.
    pub(crate) fn restore(&self, dev: &Device, l: usize) {
        if self.shares.is_empty() {
            return;
        }
        dev.follow(Lane::Compute, Lane::TpComm);
        let Some(below) = l.checked_sub(1) else { return };
        dev.follow(Lane::TpComm, Lane::Compute); // block l + 1 has read what lay in the buffer
        let (src, dst) = (self.shares[below], self.own_part(dev, below));
        dev.submit(Lane::TpComm, Op::Copy { src, dst });
        dev.submit(Lane::TpComm, Op::AllGather { x: self.flat(below), group: Group::Tp });
    }

    /// Elements, not rows: the hidden channels divide by the ranks, tokens need not.
    fn flat(&self, l: usize) -> Tensor {
        let x = self.input(l);
        x.reshape(1, x.len())
    }

    fn own_part(&self, dev: &Device, l: usize) -> Tensor {
        self.flat(l).shard(dev.rank().tp, dev.rank().tp_size)
    }
}
