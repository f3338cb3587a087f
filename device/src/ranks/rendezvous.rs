//! A rendezvous of ranks: each rank writes a record of its op into a slot.

use crate::Tensor;
use crate::error::Site;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};

/// A rank's contribution to a collective.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival {
    pub(crate) op: &'static str,
    pub(crate) site: Site,
    pub(crate) tensor: Tensor,
    /// Other values that must agree: the reduction, the root.
    pub(crate) detail: usize,
    /// A value for the other ranks. The values of the ranks may differ.
    pub(crate) payload: u64,
}

/// The record of an arrival in a slot. The rank may be in any process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ArrivalRecord {
    pub(crate) op: &'static str,
    pub(crate) line: SourceLine,
    pub(crate) tensor: Tensor,
    pub(crate) detail: usize,
    pub(crate) payload: u64,
}

/// A line of the program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SourceLine {
    pub(crate) file: &'static str,
    pub(crate) line: u32,
    pub(crate) column: u32,
}

impl fmt::Display for SourceLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.file, self.line, self.column)
    }
}

impl From<Arrival> for ArrivalRecord {
    fn from(Arrival { op, site, tensor, detail, payload }: Arrival) -> Self {
        let (file, line, column) = (site.file(), site.line(), site.column());
        Self { op, line: SourceLine { file, line, column }, tensor, detail, payload }
    }
}

/// Records of the last rendezvous, of the present one, and of the next one, which members in other
/// processes may enter early. A rank can enter rendezvous g+2 only after all ranks have entered
/// g+1, and a rank that enters g+1 no longer reads the records of g.
#[derive(Debug)]
pub(crate) struct Slots {
    pub(crate) generation: u64,
    counts: [usize; 3],
    records: [Vec<Option<ArrivalRecord>>; 3],
}

#[derive(Debug)]
pub(crate) struct Rendezvous {
    /// Number of the rendezvous, the same in all processes.
    pub(crate) id: u64,
    /// Indexes of the member ranks.
    pub(crate) members: Vec<usize>,
    /// Other processes that have members.
    pub(crate) remote_processes: Vec<usize>,
    pub(crate) slots: Mutex<Slots>,
    /// Copy of the slots' generation, for a thread that polls without their lock.
    generation: AtomicU64,
    pub(crate) changed: Condvar,
}

impl Slots {
    fn new(members: usize) -> Self {
        Self { generation: 0, counts: [0; 3], records: [(); 3].map(|()| vec![None; members]) }
    }

    /// Records that a member has entered rendezvous `generation`, the present one or the next.
    /// Returns whether the present one is now complete.
    fn put(&mut self, member: usize, generation: u64, record: ArrivalRecord) -> bool {
        assert!(generation.wrapping_sub(self.generation) < 2, "nobody is further ahead");
        let slot = (generation % 3) as usize;
        self.records[slot][member] = Some(record);
        self.counts[slot] += 1;
        let all = generation == self.generation && self.counts[slot] == self.records[slot].len();
        if all {
            self.counts[slot] = 0;
            self.generation += 1;
            let stale = ((self.generation + 1) % 3) as usize;
            self.records[stale].fill(None);
        }
        all
    }

    /// Absent members of the present rendezvous. All members are absent if it has not begun and no
    /// rank waits.
    pub(crate) fn absent(&self, rendezvous: &Rendezvous) -> Vec<usize> {
        let slot = (self.generation % 3) as usize;
        if self.counts[slot] == 0 {
            return rendezvous.members.clone();
        }
        let records = &self.records[slot];
        let absent = rendezvous.members.iter().zip(records).filter(|(_, record)| record.is_none());
        absent.map(|(member, _)| *member).collect()
    }

    /// The records of rendezvous `generation`, one of the last three.
    pub(crate) fn records(&self, generation: u64) -> &[Option<ArrivalRecord>] {
        &self.records[(generation % 3) as usize]
    }
}

impl Rendezvous {
    pub(crate) fn new(id: u64, members: Vec<usize>, elsewhere: Vec<usize>) -> Self {
        let (slots, generation) = (Mutex::new(Slots::new(members.len())), AtomicU64::new(0));
        Self {
            id,
            members,
            remote_processes: elsewhere,
            slots,
            generation,
            changed: Condvar::new(),
        }
    }

    /// Records that a member in another process has entered.
    pub(crate) fn hear(&self, member: usize, generation: u64, record: ArrivalRecord) {
        self.put(&mut lock(&self.slots), member, generation, record);
    }

    /// Records that a member has entered rendezvous `generation`. The last member wakes the others.
    pub(crate) fn put(
        &self,
        slots: &mut Slots,
        member: usize,
        generation: u64,
        record: ArrivalRecord,
    ) {
        if slots.put(member, generation, record) {
            self.generation.store(slots.generation, Ordering::Release);
            self.changed.notify_all();
        }
    }

    /// Whether all members have entered rendezvous `generation`. Does not lock the slots.
    pub(crate) fn has_advanced(&self, generation: u64) -> bool {
        self.generation.load(Ordering::Acquire) != generation
    }
}

pub(crate) fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(|e| e.into_inner())
}
