//! Copies that `cp.async` began and that no wait has ended yet.

/// A copy under way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Copy {
    pub(super) lane: usize,
    /// Where it reads in global memory, and how many bytes; `None` where it reads nothing.
    pub(super) from: Option<(u64, usize)>,
    /// Where it writes in shared memory; `None` where the address is at fault.
    pub(super) to: Option<u64>,
    /// What arrives.
    pub(super) bytes: [u8; 16],
    /// Bytes that arrive.
    pub(super) count: usize,
}

/// The copies of a warp. Each thread has its own groups.
#[derive(Debug, Default)]
pub(super) struct Copies {
    /// With the number of the group, among its thread's groups.
    under_way: Vec<(u64, Copy)>,
    /// Groups that a lane has closed.
    closed: [u64; 32],
}

impl Copies {
    pub(super) fn begin(&mut self, copy: Copy) {
        self.under_way.push((self.closed[copy.lane], copy));
    }

    /// `commit_group`: what these lanes began since the last one is a group.
    pub(super) fn close(&mut self, lanes: impl Iterator<Item = usize>) {
        lanes.for_each(|lane| self.closed[lane] += 1);
    }

    /// Takes out what a wait of `lanes` ends: all but the last `most` closed groups; with `None` everything.
    pub(super) fn end(&mut self, lanes: u32, most: Option<u64>) -> Vec<Copy> {
        let closed = &self.closed;
        let ends = |&mut (group, Copy { lane, .. }): &mut (u64, Copy)| {
            lanes >> lane & 1 == 1 && most.is_none_or(|most| group + most < closed[lane])
        };
        self.under_way.extract_if(.., ends).map(|(_, copy)| copy).collect()
    }
}
