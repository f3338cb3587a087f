//! A meeting of ranks: a board on which each of them posts what it has come for.

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
    /// A value of the rank for the others. Values need not agree.
    pub(crate) payload: u64,
}

/// A post on a board, from whatever process.
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
    fn from(Arrival { op, site, tensor, detail, payload: told }: Arrival) -> Self {
        let (file, line, column) = (site.file(), site.line(), site.column());
        Self { op, line: SourceLine { file, line, column }, tensor, detail, payload: told }
    }
}

/// Posts of the last meeting, of the present one, and of the next one, for which members in other
/// processes may post early. A rank can post for meeting g + 2 only after all ranks have entered
/// g + 1, and a rank that enters g + 1 no longer reads the posts of g.
#[derive(Debug)]
pub(crate) struct Slots {
    pub(crate) generation: u64,
    counts: [usize; 3],
    records: [Vec<Option<ArrivalRecord>>; 3],
}

#[derive(Debug)]
pub(crate) struct Rendezvous {
    /// The same in all processes.
    pub(crate) id: u64,
    /// Rank indexes.
    pub(crate) members: Vec<usize>,
    /// Other processes that have members.
    pub(crate) remote_processes: Vec<usize>,
    pub(crate) slots: Mutex<Slots>,
    /// Of the board: for who looks without it.
    generation: AtomicU64,
    pub(crate) turned: Condvar,
}

impl Slots {
    fn new(members: usize) -> Self {
        Self { generation: 0, counts: [0; 3], records: [(); 3].map(|()| vec![None; members]) }
    }

    /// A member has come to meeting `generation`, the present one or the next. True: now all have
    /// come to the present one.
    fn put(&mut self, member: usize, generation: u64, note: ArrivalRecord) -> bool {
        assert!(generation.wrapping_sub(self.generation) < 2, "nobody is further ahead");
        let slot = (generation % 3) as usize;
        self.records[slot][member] = Some(note);
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

    /// Absent members of a meeting that has begun; all members of one that has not, in which no
    /// rank waits.
    pub(crate) fn absent(&self, meeting: &Rendezvous) -> Vec<usize> {
        let slot = (self.generation % 3) as usize;
        if self.counts[slot] == 0 {
            return meeting.members.clone();
        }
        let posts = &self.records[slot];
        let absent = meeting.members.iter().zip(posts).filter(|(_, post)| post.is_none());
        absent.map(|(member, _)| *member).collect()
    }
}

impl Slots {
    /// The posts of meeting `generation`, one of the last three.
    pub(crate) fn records(&self, generation: u64) -> &[Option<ArrivalRecord>] {
        &self.records[(generation % 3) as usize]
    }
}

impl Rendezvous {
    pub(crate) fn new(id: u64, members: Vec<usize>, elsewhere: Vec<usize>) -> Self {
        let (board, generation) = (Mutex::new(Slots::new(members.len())), AtomicU64::new(0));
        Self {
            id,
            members,
            remote_processes: elsewhere,
            slots: board,
            generation,
            turned: Condvar::new(),
        }
    }

    /// A member in another process has come.
    pub(crate) fn hear(&self, member: usize, generation: u64, note: ArrivalRecord) {
        self.put(&mut lock(&self.slots), (member, generation), note);
    }

    /// A member has come to meeting `generation`; the last one wakes the others.
    pub(crate) fn put(
        &self,
        board: &mut Slots,
        (member, generation): (usize, u64),
        note: ArrivalRecord,
    ) {
        if board.put(member, generation, note) {
            self.generation.store(board.generation, Ordering::Release);
            self.turned.notify_all();
        }
    }

    /// Whether all have come to meeting `generation`, without the board.
    pub(crate) fn has_turned(&self, generation: u64) -> bool {
        self.generation.load(Ordering::Acquire) != generation
    }
}

pub(crate) fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(|e| e.into_inner())
}
