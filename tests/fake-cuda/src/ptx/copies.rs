//! Copies that `cp.async` started and no wait has ended yet.

/// A copy under way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Copy {
    pub(super) lane: usize,
    /// Address and number of bytes that the copy reads in global memory; `None` if it reads
    /// nothing.
    pub(super) from: Option<(u64, usize)>,
    /// Address in shared memory that the copy writes; `None` if the address is at fault.
    pub(super) to: Option<u64>,
    /// Bytes that the copy writes.
    pub(super) bytes: [u8; 16],
    /// Number of bytes that the copy writes.
    pub(super) count: usize,
}

/// The copies of a warp. Each thread has its own groups.
#[derive(Debug, Default)]
pub(super) struct Copies {
    /// Copies under way, each with the number of its group among its thread's groups.
    under_way: Vec<(u64, Copy)>,
    /// Number of groups that each lane has closed.
    closed: [u64; 32],
}

impl Copies {
    pub(super) fn begin(&mut self, copy: Copy) {
        self.under_way.push((self.closed[copy.lane], copy));
    }

    /// `commit_group`: the copies that each lane started since its last commit become a group.
    pub(super) fn close(&mut self, lanes: impl Iterator<Item = usize>) {
        lanes.for_each(|lane| self.closed[lane] += 1);
    }

    /// Removes the copies that a wait of `lanes` ends: all but the last `most` groups; `None`: all.
    pub(super) fn end(&mut self, lanes: u32, most: Option<u64>) -> Vec<Copy> {
        let closed = &self.closed;
        let ends = |&mut (group, Copy { lane, .. }): &mut (u64, Copy)| {
            lanes >> lane & 1 == 1 && most.is_none_or(|most| group + most < closed[lane])
        };
        self.under_way.extract_if(.., ends).map(|(_, copy)| copy).collect()
    }
}
