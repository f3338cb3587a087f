//! The thread of a rank that submits, on the virtual clock. It takes its time for every op, waits for an op where the
//! step does, meets the other ranks of a collective, and sleeps before it fills a stream's queue (`cuda/pace.rs`).

use super::cost::MEETING;
use super::program::{Kind, Node, Program, Sync, Ticks, Work};
use crate::Lane;

/// Entries of a stream's queue that are not over: with more the thread sleeps until there are [`RESUMES`].
const AHEAD: u32 = 512;
const RESUMES: u32 = 256;

/// Entries that a library may take for an op that it enqueues: a product, a collective.
const BY_LIBRARY: u32 = 4;

/// Seconds of a call of the driver. NVIDIA measured 3.8e-6 for each kernel of a chain of short ones, launches included
/// ("Getting Started with CUDA Graphs", V100); events and words cost less than launches.
const CALL: f64 = 2.8e-6;

/// Seconds until an op has passed the hazard check: `onebox plan` takes 0.7e-6 for each of a step, on one core of a Xeon.
const CHECK: f64 = 1e-6;

/// How often the threads of a collective's ranks meet before it is on its way (`cuda/collectives.rs`).
const MEETINGS: f64 = 1.0;

/// Seconds in which `node` is submitted. `peers`: other ranks take part.
pub(super) fn seconds(work: &Work, node: &Node, peers: bool) -> f64 {
    let calls = CALL * (f64::from(work.calls) + f64::from(node.calls));
    let meets = peers && matches!(work.kind, Kind::Collective { .. });
    CHECK + calls + if meets { MEETINGS * MEETING } else { 0.0 }
}

/// What the thread stands at.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Gate {
    /// Until op `over` is; then, if the thread has slept, until op `then` is. Ops are numbers on a lane.
    Op { over: (Lane, u32), then: (Lane, u32) },
    /// Until all ranks of the next op's group have come.
    Peers,
}

/// Why the thread went on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Release {
    /// The node that it submitted next.
    pub(super) before: u32,
    /// When.
    pub(super) at: f64,
    pub(super) by: By,
}

/// Who released it.
#[derive(Clone, Copy, Debug)]
pub(super) enum By {
    /// An op of its own rank.
    Op { lane: Lane, tick: u32 },
    /// The thread of another class of ranks, which came last to the collective before which both met.
    Class(usize),
}

fn is_over((lane, tick): (Lane, u32), done: &Ticks) -> bool {
    done[lane as usize] >= tick
}

/// What must be over on the stream of an op before that is submitted: the last op that [`AHEAD`] entries lie behind, and
/// the one behind which [`RESUMES`] do.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Behind(Option<[(Lane, u32); 2]>);

impl Behind {
    fn gate(&self, done: &Ticks) -> Option<Gate> {
        let [over, then] = self.0?;
        (!is_over(over, done)).then_some(Gate::Op { over, then })
    }

    /// By node. `ticks`: numbers of nodes on their lanes; `queues`: nodes in the order of their queue.
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
    let library = matches!(work.kind, Kind::Gemm { .. } | Kind::Collective { .. });
    let own = if library && work.calls > 0 { BY_LIBRARY } else { work.calls };
    own + u32::from(node.calls)
}

/// The thread of one class of ranks.
#[derive(Debug, Default)]
pub(super) struct Submitter {
    /// Nodes that are submitted by `clock`.
    pub(super) next: usize,
    pub(super) clock: f64,
    pub(super) gate: Option<Gate>,
    /// It has met its peers for the next node.
    pub(super) met: bool,
    pub(super) releases: Vec<Release>,
    synced: usize,
}

impl Submitter {
    /// Whose first `next` nodes are submitted from the start.
    pub(super) fn new(next: usize) -> Self {
        Self { next, ..Self::default() }
    }

    /// Stops at the gate before the next node, if there is one.
    pub(super) fn stops(&mut self, syncs: &[Sync], behind: &Behind, done: &Ticks) -> bool {
        self.gate = self.sync(syncs, done).or_else(|| behind.gate(done));
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

    /// `done` are over `now`. Whether the thread goes on.
    pub(super) fn passes(&mut self, done: &Ticks, now: f64) -> bool {
        let Some(Gate::Op { over, then }) = self.gate else { return false };
        if !is_over(over, done) {
            return false;
        }
        if now > self.clock && !is_over(then, done) {
            self.gate = Some(Gate::Op { over: then, then });
            return false;
        }
        self.go_on(now, By::Op { lane: over.0, tick: over.1 });
        true
    }

    /// From the gate, at `now` or when what it did before is done.
    pub(super) fn go_on(&mut self, now: f64, by: By) {
        self.gate = None;
        if now > self.clock {
            self.clock = now;
            self.releases.push(Release { before: self.next as u32, at: now, by });
        }
    }
}
