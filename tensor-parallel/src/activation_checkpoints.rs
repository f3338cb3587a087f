//! The inputs of the blocks, which the backward pass runs them from again: every one whole on the device, or each
//! rank's share of it (as ZeRO-R partitions activations, arXiv 1910.02054, section 6.1), there or on the host.
//!
//! Where they are not kept whole, two whole buffers take turns as input and output of the blocks. Each rank keeps its
//! share of an input before it is overwritten; the backward pass makes it whole again, one block ahead, while the block
//! above is at work. The last two inputs are still whole when the backward pass comes to them, and are not kept.

use crate::shape::{CheckpointHome, DecoderShape, Recompute};
use device::Lane::{Compute, D2h, H2d, TpComm};
use device::{Arena, Cargo, Device, Event, Group, Op, Plan, Pool, Tensor};

/// Inputs of blocks on their way down and up, and between.
const STAGING: Pool = Pool::staging("checkpoint staging").carrying(Cargo::Checkpoint);

/// Handles of x[0] to x[L]: the input of block l, and of the final norm.
#[derive(Clone, Debug)]
pub(crate) struct ActivationCheckpoints {
    /// (rows, C) each: x[l] is in `whole[l % whole.len()]`.
    whole: Vec<Tensor>,
    /// (1, rows C / parts) each: this rank's share of x[0] to x[L - 2]. Empty where all are whole.
    shares: Vec<Tensor>,
    /// Ranks that an input is dealt to.
    parts: usize,
    home: CheckpointHome,
}

impl ActivationCheckpoints {
    /// Plans the inputs of the micro-batch in slot `slot`; see [`DecoderShape::checkpoint_slots`].
    pub(crate) fn plan(plan: &mut Plan, shape: &DecoderShape, slot: usize) -> Self {
        let (rows, c, dtype, home) =
            (shape.rows(), shape.hidden, shape.dtype, shape.checkpoint_home);
        let deal =
            shape.partition_checkpoints || (home != CheckpointHome::Device && !shape.sequence);
        let parts = if deal { shape.tp_size } else { 1 };
        let all_whole = parts == 1 && home == CheckpointHome::Device;
        let kept = if all_whole || home == CheckpointHome::None {
            0
        } else {
            shape.layers.saturating_sub(1)
        };
        let (count, pool) = match (all_whole, shape.recompute) {
            (false, _) => (2, "transients"),
            (true, Recompute::Block) => (shape.layers + 1, "checkpoints"),
            (true, _) => (shape.layers + 1, "activations"),
        };
        let x = if slot == 0 { "x".to_owned() } else { format!("set.{slot}.x") };
        let mut tensor = |at, name: String, shape| plan.tensor(at, name, dtype, shape);
        let on_device = |pool| (Arena::Device, Pool::new(pool));
        let one = |i| tensor(on_device(pool), format!("{x}.{i}"), (rows, c));
        let whole = (0..count).map(one).collect();
        let at = match home {
            CheckpointHome::Device | CheckpointHome::None => on_device("checkpoints"),
            CheckpointHome::Host | CheckpointHome::HostBlocking => (Arena::Pinned, STAGING),
        };
        let share = |l| tensor(at, format!("{x}.{l}.share"), (1, rows * c / parts));
        Self { whole, shares: (0..kept).map(share).collect(), parts, home }
    }

    /// (rows, C): x[l], while it is whole.
    pub(crate) fn input(&self, l: usize) -> Tensor {
        self.whole[l % self.whole.len()]
    }

    /// Forward, before block l, which reads x[l]: keeps this rank's share. The block overwrites x[l - 1]; where that goes
    /// to the host, Compute waits for its copy.
    pub(crate) fn save(&self, dev: &Device, l: usize) {
        if self.shares.is_empty() {
            return;
        }
        let lane = if self.home == CheckpointHome::Device { Compute } else { D2h };
        if self.home == CheckpointHome::Host {
            dev.follow(Compute, D2h);
        }
        if let Some(&share) = self.shares.get(l) {
            if lane == D2h {
                dev.follow(D2h, Compute);
            }
            dev.submit(lane, Op::Copy { src: self.own_part(dev, l), dst: share });
        }
        if self.home == CheckpointHome::HostBlocking {
            dev.follow(Compute, D2h);
        }
    }

    /// Backward, before block l: Compute waits until x[l] is whole again, which it is at `ready`. Then x[l - 1] starts to become
    /// whole, and is so at the event.
    pub(crate) fn restore(&self, dev: &Device, l: usize, ready: Event) -> Event {
        assert!(self.home != CheckpointHome::None, "a backward pass needs what was kept");
        if self.home == CheckpointHome::HostBlocking {
            dev.wait(Compute, self.make_whole(dev, l));
            return Event::default();
        }
        dev.wait(Compute, ready);
        l.checked_sub(1).map_or_else(Event::default, |below| self.make_whole(dev, below))
    }

    /// Makes x[l] whole from the ranks' shares, where they were kept, once the block that used the buffer before is over; it is
    /// whole at the event. That waits for nothing but the block above, so a sum that queues behind it on TpComm does not wait long.
    fn make_whole(&self, dev: &Device, l: usize) -> Event {
        let Some(&share) = self.shares.get(l) else { return Event::default() };
        let lane = if self.home == CheckpointHome::Device { TpComm } else { H2d };
        dev.follow(lane, Compute);
        if lane == H2d {
            dev.follow(H2d, D2h);
        }
        dev.submit(lane, Op::Copy { src: share, dst: self.own_part(dev, l) });
        if self.parts > 1 {
            dev.follow(TpComm, lane);
            dev.submit(TpComm, Op::AllGather { x: self.flat(l), group: Group::Tp });
            return dev.record(TpComm);
        }
        dev.record(lane)
    }

    /// Elements, not rows: the hidden channels divide by the ranks, tokens need not.
    fn flat(&self, l: usize) -> Tensor {
        let x = self.input(l);
        x.reshape(1, x.len())
    }

    fn own_part(&self, dev: &Device, l: usize) -> Tensor {
        if self.parts == 1 {
            self.flat(l)
        } else {
            self.flat(l).shard(dev.rank().tp, dev.rank().tp_size)
        }
    }
}
