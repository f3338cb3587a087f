//! The inputs of the blocks, from which the backward pass recomputes. Either each input is complete
//! on the device, or each rank keeps a share on the device or on the host (as ZeRO-R partitions
//! activations, arXiv 1910.02054, section 6.1).
//!
//! With shares, two complete buffers alternate as input and output of the blocks. Each rank saves
//! its share of an input before the input is overwritten. The backward pass restores it one block
//! early, while the block above runs. The last two inputs are still complete when the backward pass
//! starts, and are not saved.

use crate::shape::{CheckpointHome, DecoderShape, Recompute};
use device::Lane::{Compute, D2h, H2d, TpComm};
use device::{Arena, Cargo, Device, Event, Group, Op, Plan, Pool, Tensor};

/// Pool of block inputs on the host, and on their way down and up.
const STAGING: Pool = Pool::staging("checkpoint staging").carrying(Cargo::Checkpoint);

/// Handles of x[0] to x[L]: the input of block l, and of the final norm.
#[derive(Clone, Debug)]
pub(crate) struct ActivationCheckpoints {
    /// (rows, C) each: x[l] is in `whole[l % whole.len()]`.
    whole: Vec<Tensor>,
    /// (1, rows C / parts) each: this rank's share of x[0] to x[L - 2]. Empty without shares.
    shares: Vec<Tensor>,
    /// Number of ranks that share an input.
    parts: usize,
    home: CheckpointHome,
}

/// Prefix of the names of the tensors of micro-batch slot `slot`: empty for the first slot.
pub(crate) fn slot_prefix(slot: usize) -> String {
    if slot == 0 { String::new() } else { format!("set.{slot}.") }
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
        let share_count = if all_whole || home == CheckpointHome::None {
            0
        } else {
            shape.layers.saturating_sub(1)
        };
        let (count, pool) = match (all_whole, shape.recompute) {
            (false, _) => (2, "transients"),
            (true, Recompute::Block) => (shape.layers + 1, "checkpoints"),
            (true, _) => (shape.layers + 1, "activations"),
        };
        let x = format!("{}x", slot_prefix(slot));
        let mut tensor = |at, name: String, shape| plan.tensor(at, name, dtype, shape);
        let on_device = |pool| (Arena::Device, Pool::new(pool));
        let one = |i| tensor(on_device(pool), format!("{x}.{i}"), (rows, c));
        let whole = (0..count).map(one).collect();
        let at = match home {
            CheckpointHome::Device | CheckpointHome::None => on_device("checkpoints"),
            CheckpointHome::Host | CheckpointHome::HostBlocking => (Arena::Pinned, STAGING),
        };
        let share = |l| tensor(at, format!("{x}.{l}.share"), (1, rows * c / parts));
        Self { whole, shares: (0..share_count).map(share).collect(), parts, home }
    }

    /// (rows, C): x[l], while it is complete.
    pub(crate) fn input(&self, l: usize) -> Tensor {
        self.whole[l % self.whole.len()]
    }

    /// Forward, before block l reads x[l]: saves this rank's share. The block overwrites x[l - 1],
    /// so Compute first waits for the copy of x[l - 1] to the host, if any.
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

    /// Backward, before block l: Compute waits for `ready`, after which x[l] is complete. Then
    /// starts to restore x[l - 1], which is complete at the returned event.
    pub(crate) fn restore(&self, dev: &Device, l: usize, ready: Event) -> Event {
        assert!(self.home != CheckpointHome::None, "a backward pass needs what was kept");
        if self.home == CheckpointHome::HostBlocking {
            dev.wait(Compute, self.make_whole(dev, l));
            return Event::default();
        }
        dev.wait(Compute, ready);
        l.checked_sub(1).map_or_else(Event::default, |below| self.make_whole(dev, below))
    }

    /// Restores x[l] from the saved shares after the last block that uses the buffer; x[l] is
    /// complete at the returned event. The gather waits for no other block, so a later sum on
    /// TpComm does not wait long.
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

    /// x[l] as one row of elements: the number of hidden channels is a multiple of the ranks, the
    /// number of tokens need not be.
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
