//! The times of all ops, and the chain of ops that made the step's time.

use super::classes::Classes;
use super::program::{Program, Ticks, Work};
use super::solve::{Span, kind_number};
use super::submit::{self, Release, ReleaseCause};
use device::{LANES, Lane};
use std::collections::BTreeMap;

/// One op on the virtual clock.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SimulatedOp<'a> {
    /// Lane of the op.
    pub lane: Lane,
    /// Work of the op.
    pub work: &'a Work,
    /// Start in seconds. A collective starts when all ranks have arrived.
    pub start: f64,
    /// End in seconds.
    pub end: f64,
}

/// A simulated run.
#[derive(Debug)]
pub struct Timeline {
    program: Program,
    classes: Classes,
    /// Times of ops by class of ranks and by node.
    spans: Vec<Vec<Span>>,
    /// Nodes of each lane, in order.
    by_lane: Vec<Vec<u32>>,
    /// The queue of each lane.
    queues: [usize; LANES],
    /// Releases of the submitting thread, in order, by class of ranks.
    releases: Vec<Vec<Release>>,
    /// Seconds in which the threads of the ranks meet, by class of groups.
    meetings: Vec<f64>,
    /// Seconds of the beginning of each recorded step, and of the end of the last one, on the
    /// slowest rank.
    steps: Vec<f64>,
}

impl Timeline {
    pub(super) fn new(
        program: Program,
        classes: Classes,
        meetings: Vec<f64>,
        spans: Vec<Vec<Span>>,
        releases: Vec<Vec<Release>>,
        queues: [usize; LANES],
    ) -> Self {
        let mut by_lane = vec![Vec::new(); LANES];
        for (index, node) in program.nodes.iter().enumerate() {
            by_lane[node.lane as usize].push(index as u32);
        }
        let mut timeline = Self {
            program,
            classes,
            spans,
            by_lane,
            queues,
            releases,
            meetings,
            steps: Vec::new(),
        };
        let marks = timeline.program.steps.clone();
        timeline.steps = marks.iter().map(|mark| timeline.passed(mark).0).collect();
        timeline
    }

    /// The time at which the ops of `mark` were finished on all ranks, and the (class, node) of the
    /// last one.
    fn passed(&self, mark: &Ticks) -> (f64, Option<(usize, usize)>) {
        let mut last = (0.0, None);
        for (class, spans) in self.spans.iter().enumerate() {
            for (lane, &tick) in mark.iter().enumerate() {
                let node = (tick as usize).checked_sub(1).map(|at| self.by_lane[lane][at] as usize);
                if let Some(node) = node.filter(|&node| spans[node].end > last.0) {
                    last = (spans[node].end, Some((class, node)));
                }
            }
        }
        last
    }

    /// The program of every rank.
    pub const fn program(&self) -> &Program {
        &self.program
    }

    /// Number of kinds of ranks that behave differently.
    pub fn classes(&self) -> usize {
        self.spans.len()
    }

    /// One rank of each kind of ranks.
    pub fn representatives(&self) -> Vec<usize> {
        let of_rank = &self.classes.of_rank;
        (0..self.classes()).filter_map(|c| of_rank.iter().position(|&of| of == c)).collect()
    }

    /// Begin and end of the last recorded step.
    pub fn window(&self) -> (f64, f64) {
        match self.steps[..] {
            [.., begin, end] => (begin, end),
            _ => (0.0, 0.0),
        }
    }

    /// Seconds of the last recorded step.
    pub fn step_seconds(&self) -> f64 {
        let (begin, end) = self.window();
        end - begin
    }

    /// The ops of `rank` in order of submission.
    pub fn played(&self, rank: usize) -> impl Iterator<Item = SimulatedOp<'_>> {
        let spans = &self.spans[self.classes.of_rank[rank]];
        self.program.nodes.iter().zip(spans).map(|(node, span)| SimulatedOp {
            lane: node.lane,
            work: &self.program.works[node.work as usize],
            start: span.start,
            end: span.end,
        })
    }

    /// Seconds of the last step in which `lane` of `rank` worked.
    pub fn busy(&self, rank: usize, lane: Lane) -> f64 {
        let (begin, end) = self.window();
        let inside = |p: SimulatedOp<'_>| (p.end.min(end) - p.start.max(begin)).max(0.0);
        self.played(rank).filter(|p| p.lane == lane).map(inside).sum()
    }

    /// Seconds of the last step in which an op that `one` accepts and an op that `other` accepts
    /// both ran on `rank`.
    pub fn together(
        &self,
        rank: usize,
        one: impl Fn(&SimulatedOp<'_>) -> bool,
        other: impl Fn(&SimulatedOp<'_>) -> bool,
    ) -> f64 {
        let (begin, end) = self.window();
        let mut edges: Vec<(f64, i32, i32)> = Vec::new();
        for p in self.played(rank) {
            let (start, stop) = (p.start.max(begin), p.end.min(end));
            let (a, b) = (i32::from(one(&p)), i32::from(other(&p)));
            if stop > start && a + b > 0 {
                edges.push((start, a, b));
                edges.push((stop, -a, -b));
            }
        }
        edges.sort_by(|x, y| x.0.total_cmp(&y.0));
        let (mut a, mut b, mut at, mut both) = (0, 0, 0.0, 0.0);
        for (time, da, db) in edges {
            if a > 0 && b > 0 {
                both += time - at;
            }
            (a, b, at) = (a + da, b + db, time);
        }
        both
    }

    /// The critical path of the last step: the chain of ops to its end, in which each op started
    /// when the one before it ended. Returns seconds by lane and op, longest first; they add up to
    /// the step. An entry without a lane is the rank's thread, for an op that waited only for its
    /// submission.
    pub fn critical_path(&self) -> Vec<(Option<Lane>, &'static str, f64)> {
        let (begin, _) = self.window();
        let mut sums: BTreeMap<(Option<usize>, &'static str), f64> = BTreeMap::new();
        let mut at = self.program.steps.last().and_then(|mark| self.passed(mark).1);
        let before = self.before_on_queue();
        while let Some((class, node)) = at {
            let span = self.spans[class][node];
            if span.end <= begin {
                break;
            }
            let op = &self.program.nodes[node];
            let work = &self.program.works[op.work as usize];
            *sums.entry((Some(op.lane as usize), work.name)).or_default() +=
                span.end - span.start.max(begin);
            let class = self.last_to_come(class, node);
            at = self.cause(class, node, before[node]);
            let ended = at.map_or(0.0, |(class, node)| self.spans[class][node].end);
            if self.spans[class][node].submitted > ended {
                let (from, by) = self.submission(class, node, begin);
                *sums.entry((None, "submission")).or_default() +=
                    (self.spans[class][node].submitted - from.max(begin)).max(0.0);
                at = by;
            }
        }
        let mut path: Vec<_> = sums
            .into_iter()
            .map(|((lane, name), s)| (lane.map(|lane| Lane::ALL[lane]), name, s))
            .collect();
        path.sort_by(|a, b| b.2.total_cmp(&a.2));
        path
    }

    /// The time since which threads have worked without a stop until they submitted `node` of
    /// `class`. Also the op for which they waited before. The search ends at `begin`.
    fn submission(&self, class: usize, node: usize, begin: f64) -> (f64, Option<(usize, usize)>) {
        let (mut class, mut node) = (class, node);
        loop {
            let releases = &self.releases[class];
            let count = releases.partition_point(|release| release.before as usize <= node);
            let Some(release) = count.checked_sub(1).map(|last| &releases[last]) else {
                return (0.0, None);
            };
            match release.by {
                ReleaseCause::Op { lane, tick } => {
                    let op = self.by_lane[lane as usize][tick as usize - 1] as usize;
                    return (release.at, Some((class, op)));
                }
                ReleaseCause::Class(_) if release.at <= begin => return (release.at, None),
                // The thread of class `last` was the last to arrive at the same node.
                ReleaseCause::Class(last) => (class, node) = (last, release.before as usize),
            }
        }
    }

    /// Seconds of the last step in which the thread of `rank` submits, and the number of its driver
    /// calls.
    pub fn submitting(&self, rank: usize) -> (f64, u64) {
        let (begin, end) = self.window();
        let (mut seconds, mut calls) = (0.0, 0);
        let class = self.classes.of_rank[rank];
        for (node, span) in self.program.nodes.iter().zip(&self.spans[class]) {
            if span.submitted <= begin || span.submitted > end {
                continue;
            }
            let work = &self.program.works[node.work as usize];
            seconds += submit::seconds(work, node, self.meeting(class, work));
            calls += u64::from(work.calls) + u64::from(node.calls);
        }
        (seconds, calls)
    }

    fn meeting(&self, class: usize, work: &Work) -> f64 {
        let kind = work.kind.group().map(kind_number);
        kind.map_or(0.0, |kind| self.meetings[self.classes.groups_of[class][kind]])
    }

    /// Whether the two communication lanes share a queue of their own.
    pub fn shares_communication(&self) -> bool {
        let [compute, tp, dp, ..] = self.queues;
        tp == dp && tp != compute
    }

    /// The last class to arrive at a collective.
    fn last_to_come(&self, class: usize, node: usize) -> usize {
        let work = &self.program.works[self.program.nodes[node].work as usize];
        let Some(kind) = work.kind.group().map(kind_number) else { return class };
        let members = &self.classes.members[self.classes.groups_of[class][kind]];
        let ready = |class: &&usize| self.spans[**class][node].ready;
        members.iter().max_by(|a, b| ready(a).total_cmp(&ready(b))).copied().unwrap_or(class)
    }

    /// The op whose end started `node`.
    fn cause(&self, class: usize, node: usize, before: Option<usize>) -> Option<(usize, usize)> {
        let after = self.program.nodes[node].after;
        let named = after.iter().enumerate().filter(|(_, tick)| **tick > 0);
        let named = named.map(|(lane, &tick)| self.by_lane[lane][tick as usize - 1] as usize);
        let end = |&node: &usize| self.spans[class][node].end;
        let cause = named.chain(before).max_by(|a, b| end(a).total_cmp(&end(b)));
        cause.map(|node| (class, node))
    }

    /// The previous node on the queue, for each node.
    fn before_on_queue(&self) -> Vec<Option<usize>> {
        let mut last = [None; LANES];
        let nodes = self.program.nodes.iter().enumerate();
        nodes.map(|(i, node)| last[self.queues[node.lane as usize]].replace(i)).collect()
    }
}
