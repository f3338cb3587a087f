//! The last accesses of a byte, and whether anything orders two accesses.

/// Stamp of an access: block, epoch of the block (barriers so far), epoch of the warp
/// (`__syncwarp`s since the last barrier), thread; 0: no access.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Stamp(u64);

const THREAD: u32 = 10;
const WITHIN: u32 = 12;
const EPOCH: u32 = 18;

impl Stamp {
    /// Stamp of an access. The epochs wrap around, so the order of very distant accesses is
    /// arbitrary.
    pub(super) fn new(block: usize, epoch: u64, within: u64, thread: usize) -> Self {
        let fold = |x: u64, bits: u32| x & ((1 << bits) - 1);
        let block = (block as u64 + 1) << (EPOCH + WITHIN + THREAD);
        let epoch = fold(epoch, EPOCH) << (WITHIN + THREAD);
        Self(block | epoch | fold(within, WITHIN) << THREAD | fold(thread as u64, THREAD))
    }

    pub(super) fn thread(self) -> usize {
        (self.0 & ((1 << THREAD) - 1)) as usize
    }

    pub(super) fn block(self) -> usize {
        (self.0 >> (EPOCH + WITHIN + THREAD)) as usize - 1
    }

    fn warp(self) -> usize {
        self.thread() / 32
    }

    /// Whether nothing orders an earlier access and this access.
    fn races(self, earlier: Self) -> bool {
        if earlier == Self::default() || earlier == self {
            return false;
        }
        if earlier.block() != self.block() {
            return true;
        }
        if earlier.thread() == self.thread() {
            return false;
        }
        let epoch = |stamp: Self| stamp.0 >> (WITHIN + THREAD);
        let within = |stamp: Self| stamp.0 >> THREAD;
        epoch(self) == epoch(earlier)
            && (self.warp() != earlier.warp() || within(self) == within(earlier))
    }
}

/// The last accesses of a byte.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cell {
    write: Stamp,
    read: Stamp,
    /// Read of another thread than `read`, if possible of another warp. A third reader may be lost.
    other: Stamp,
}

impl Cell {
    /// Number of kinds of accesses since the launch began: 1 for reads and 1 for writes.
    pub(super) fn touches(&self) -> u64 {
        u64::from(self.read != Stamp::default()) + u64::from(self.write != Stamp::default())
    }

    pub(super) fn written(&self) -> Stamp {
        self.write
    }

    pub(super) fn was_read(&self) -> Stamp {
        self.read
    }

    /// Records a read; returns the access that races with this read.
    pub(super) fn read(&mut self, now: Stamp) -> Option<Stamp> {
        if self.read == now {
            return None;
        }
        if self.read.thread() != now.thread() || self.read.0 >> THREAD != now.0 >> THREAD {
            let keeps = self.other.0 >> (WITHIN + THREAD) == now.0 >> (WITHIN + THREAD)
                && self.other.warp() != now.warp()
                && self.read.warp() == now.warp();
            if !keeps && self.read.thread() != now.thread() {
                self.other = self.read;
            }
            self.read = now;
        }
        now.races(self.write).then_some(self.write)
    }

    /// Records a write; returns the access that races with this write.
    pub(super) fn write(&mut self, now: Stamp) -> Option<Stamp> {
        let found =
            [self.write, self.read, self.other].into_iter().find(|&earlier| now.races(earlier));
        self.write = now;
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn race(first: Stamp, second: Stamp) -> bool {
        let mut cell = Cell::default();
        assert!(cell.write(first).is_none());
        cell.write(second).is_some()
    }

    #[test]
    fn a_barrier_orders_a_block_and_a_warp_barrier_its_warp() {
        let first = Stamp::new(0, 0, 0, 3);
        assert!(race(first, Stamp::new(0, 0, 0, 4)));
        assert!(!race(first, Stamp::new(0, 0, 0, 3)));
        assert!(!race(first, Stamp::new(0, 1, 0, 4)));
        assert!(!race(first, Stamp::new(0, 0, 1, 4)));
        assert!(race(first, Stamp::new(0, 0, 1, 40)));
        assert!(race(first, Stamp::new(1, 1, 0, 3)));
    }

    #[test]
    fn a_write_races_with_either_of_two_readers() {
        for writer in [1, 2, 40] {
            let mut cell = Cell::default();
            for reader in [1, 40, 2] {
                assert!(cell.read(Stamp::new(0, 0, 0, reader)).is_none());
            }
            assert!(cell.write(Stamp::new(0, 0, 0, writer)).is_some(), "{writer}");
        }
    }
}
