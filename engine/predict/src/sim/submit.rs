//! The submitting thread of a rank, on the virtual clock. It needs time for every op, waits for ops
//! as the step does, meets the other ranks of a collective, and sleeps before it fills a stream's
//! queue (`cuda/pace.rs`).

use super::program::{Node, Program, Sync, Ticks, Work, WorkKind};
use device::Lane;

/// Unfinished entries of a stream's queue. If there are more, the thread sleeps until [`RESUMES`]
/// are left.
const AHEAD: u32 = 512;
const RESUMES: u32 = 256;

/// Entries that a library may use for one op: a matmul or a collective.
const BY_LIBRARY: u32 = 4;

/// Seconds of a driver call. NVIDIA measured 3.8e-6 for each kernel of a chain of short ones,
/// launches included ("Getting Started with CUDA Graphs", V100). Events and words cost less than
/// launches.
const CALL: f64 = 2.8e-6;

/// Seconds of the hazard check of an op. `onebox plan` needs 0.7e-6 for each op of a step, on one
/// core of a Xeon.
const CHECK: f64 = 1e-6;

/// Number of meetings of the ranks' threads before a collective is enqueued
/// (`cuda/collectives.rs`).
const MEETINGS: f64 = 1.0;

/// Seconds to submit `node`. `meeting`: seconds in which the threads of several ranks meet.
pub(super) fn seconds(work: &Work, node: &Node, meeting: f64) -> f64 {
    let calls = CALL * (f64::from(work.calls) + f64::from(node.calls));
    CHECK + calls + if work.kind.is_on_streams() { MEETINGS * meeting } else { 0.0 }
}

/// The condition for which the thread waits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Gate {
    /// Op `over` must finish first. If the thread has slept, op `then` must finish too. Ops are
    /// numbers on a lane.
    Op { over: (Lane, u32), then: (Lane, u32) },
    /// All ranks of the next op's group must arrive.
    Peers,
}

/// The end of a wait of the thread.
#[derive(Clone, Copy, Debug)]
pub(super) struct Release {
    /// The node that the thread submitted next.
    pub(super) before: u32,
    /// Time in seconds.
    pub(super) at: f64,
    pub(super) by: ReleaseCause,
}

/// The cause of a release.
#[derive(Clone, Copy, Debug)]
pub(super) enum ReleaseCause {
    /// An op of the thread's own rank.
    Op { lane: Lane, tick: u32 },
    /// The thread of another class of ranks. It was the last to arrive at the meeting before a
    /// collective.
    Class(usize),
}

fn is_over(lane: Lane, tick: u32, done: &Ticks) -> bool {
    done[lane as usize] >= tick
}

/// The condition for submitting an op to its stream: two earlier ops, the last one with more than
/// [`AHEAD`] entries after it, and the last one with more than [`RESUMES`] after it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct QueueLimit(Option<[(Lane, u32); 2]>);

impl QueueLimit {
    fn gate(&self, done: &Ticks) -> Option<Gate> {
        let [over, then] = self.0?;
        (!is_over(over.0, over.1, done)).then_some(Gate::Op { over, then })
    }

    /// The conditions by node. `ticks`: numbers of nodes on their lanes; `queues`: nodes in the
    /// order of their queue.
    pub(super) fn of_nodes(program: &Program, ticks: &[u32], queues: &[Vec<u32>]) -> Vec<Self> {
        let mut all = vec![Self::default(); program.nodes.len()];
        for queue in queues {
            let (mut entries, mut passed) = (Vec::with_capacity(queue.len() + 1), [0; 2]);
            entries.push(0);
            for (at, &index) in queue.iter().enumerate() {
                let node = &program.nodes[index as usize];
                for (passed, most) in passed.iter_mut().zip([AHEAD, RESUMES]) {
                    while entries[at] - entries[*passed] > most {
                        *passed += 1;
                    }
                }
                let op = |passed: usize| {
                    let before = queue[passed.checked_sub(1)?] as usize;
                    Some((program.nodes[before].lane, ticks[before]))
                };
                if let (Some(over), Some(then)) = (op(passed[0]), op(passed[1])) {
                    all[index as usize] = Self((node.lane != Lane::Host).then_some([over, then]));
                }
                entries.push(entries[at] + entries_of(&program.works[node.work as usize], node));
            }
        }
        all
    }
}

fn entries_of(work: &Work, node: &Node) -> u32 {
    let library = matches!(work.kind, WorkKind::Gemm { .. } | WorkKind::Collective { .. });
    let own = if library && work.calls > 0 { BY_LIBRARY } else { work.calls };
    own + u32::from(node.calls)
}

/// The submitting thread of one class of ranks.
#[derive(Debug, Default)]
pub(super) struct Submitter {
    /// Number of nodes submitted until `clock`.
    pub(super) next: usize,
    pub(super) clock: f64,
    pub(super) gate: Option<Gate>,
    /// Whether the thread has met its peers for the next node.
    pub(super) met: bool,
    pub(super) releases: Vec<Release>,
    synced: usize,
}

impl Submitter {
    /// A thread whose first `next` nodes are submitted at the start.
    pub(super) fn new(next: usize) -> Self {
        Self { next, ..Self::default() }
    }

    /// Whether the thread stops before the next node. It notes the gate.
    pub(super) fn stops(&mut self, syncs: &[Sync], limit: &QueueLimit, done: &Ticks) -> bool {
        self.gate = self.sync(syncs, done).or_else(|| limit.gate(done));
        self.gate.is_some()
    }

    fn sync(&mut self, syncs: &[Sync], done: &Ticks) -> Option<Gate> {
        while let Some(&Sync { before, lane, tick }) = syncs.get(self.synced) {
            if before as usize > self.next {
                return None;
            }
            if done[lane as usize] < tick {
                return Some(Gate::Op { over: (lane, tick), then: (lane, tick) });
            }
            self.synced += 1;
        }
        None
    }

    /// Whether the thread continues, when the ops of `done` have finished at time `now`.
    pub(super) fn passes(&mut self, done: &Ticks, now: f64) -> bool {
        let Some(Gate::Op { over, then }) = self.gate else { return false };
        if !is_over(over.0, over.1, done) {
            return false;
        }
        if now > self.clock && !is_over(then.0, then.1, done) {
            self.gate = Some(Gate::Op { over: then, then });
            return false;
        }
        self.go_on(now, ReleaseCause::Op { lane: over.0, tick: over.1 });
        true
    }

    /// Continues after the gate, at `now` or at the end of its earlier work.
    pub(super) fn go_on(&mut self, now: f64, by: ReleaseCause) {
        self.gate = None;
        if now > self.clock {
            self.clock = now;
            self.releases.push(Release { before: self.next as u32, at: now, by });
        }
    }
}
