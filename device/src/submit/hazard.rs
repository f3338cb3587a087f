//! The hazard check: events must order an op after every earlier op that conflicts with it.
//!
//! A shadow of both arenas keeps, for each range, its last write and the last read of every lane;
//! `Device` keeps a vector clock per lane. One thread submits all ops of a rank, and the check runs
//! on that thread. It depends on the program and not on the timing: an accepted program is ordered
//! in every execution. The check is always on; it makes the views that `cpu` forms of raw memory
//! sound.

use crate::error::{Hazard, Site};
use crate::op::lane::Clock;
use crate::{LANES, Lane, Mode, Plan, Tensor};
use std::collections::BTreeMap;

/// Ops remembered per lane, for error messages only.
const REMEMBERED: usize = 1024;

#[derive(Clone, Debug, Default)]
struct Segment {
    end: u64,
    written: bool,
    write_lane: u8,
    write_tick: u64,
    reads: Clock,
}

/// Names and call sites of a lane's last ops, for error messages.
type RecentOps = Box<[(&'static str, Option<Site>)]>;

#[derive(Debug)]
pub(crate) struct Hazards {
    shadow: [BTreeMap<u64, Segment>; 2],
    ops: [RecentOps; LANES],
}

/// The thread or lane that touches memory, and the ops that are known to be finished before.
pub(crate) struct Submission<'a> {
    pub(crate) op: &'static str,
    pub(crate) site: Site,
    /// `None` for the rank's own thread, whose accesses end before its next submission.
    pub(crate) lane: Option<Lane>,
    /// The ops that are finished before this op starts, and its own tick.
    pub(crate) clock: &'a Clock,
}

#[derive(Clone, Copy)]
enum Fault {
    NeverWritten,
    /// The op of this lane and tick is in `state`, and no event orders the two ops.
    Unordered {
        state: &'static str,
        lane: usize,
        tick: u64,
    },
}

impl Hazards {
    pub(crate) fn new() -> Self {
        let ring = || vec![("?", None); REMEMBERED].into_boxed_slice();
        Self { shadow: Default::default(), ops: std::array::from_fn(|_| ring()) }
    }

    /// Stores an admitted op, so that a later error can name it.
    pub(crate) fn remember(&mut self, s: &Submission<'_>) {
        if let Some(lane) = s.lane {
            let slot = s.clock[lane as usize] as usize % REMEMBERED;
            self.ops[lane as usize][slot] = (s.op, Some(s.site));
        }
    }

    /// Checks one access and enters it. After an error the device submits no more ops, so a partly
    /// entered op does no harm.
    pub(crate) fn access(
        &mut self,
        s: &Submission<'_>,
        mode: Mode,
        t: Tensor,
        plan: &Plan,
    ) -> Result<(), Box<Hazard>> {
        let range = t.range();
        if range.is_empty() {
            return Ok(());
        }
        let map = &mut self.shadow[t.arena() as usize];
        let fault = match map.get_mut(&range.start) {
            // The common case: exactly one known range.
            Some(segment) if segment.end == range.end => enter(segment, s, mode),
            _ => enter_pieces(map, s, mode, range.start, range.end),
        };
        fault.map_or(Ok(()), |fault| Err(Box::new(self.describe(s, mode, t, fault, plan))))
    }

    fn describe(
        &self,
        s: &Submission<'_>,
        mode: Mode,
        t: Tensor,
        fault: Fault,
        plan: &Plan,
    ) -> Hazard {
        let earlier = |lane: usize, tick: u64| {
            let (op, site) = self.ops[lane][tick as usize % REMEMBERED];
            let site = site.map_or_else(|| "?".into(), ToString::to_string);
            format!("{op} on {:?} at {site}", Lane::ALL[lane])
        };
        let who = s.lane.map_or_else(|| "main".into(), |lane| format!("{lane:?}"));
        let problem = match fault {
            Fault::NeverWritten => "nothing has written it".into(),
            Fault::Unordered { state, lane, tick } => {
                let by = earlier(lane, tick);
                format!("it is {state} by {by}, and {who} has not waited for that")
            }
        };
        let what = if mode == Mode::Read { "reads" } else { "overwrites" };
        let (r, tensor) = (t.range(), plan.name(t).to_owned());
        Hazard {
            op: s.op,
            lane: who,
            site: s.site,
            what,
            tensor,
            start: r.start,
            end: r.end,
            problem,
        }
    }
}

/// Enters an access to several known ranges or to unknown ranges.
fn enter_pieces(
    map: &mut BTreeMap<u64, Segment>,
    s: &Submission<'_>,
    mode: Mode,
    start: u64,
    end: u64,
) -> Option<Fault> {
    split(map, start);
    split(map, end);
    let mut covered = start;
    while covered < end {
        let next = map.range(covered..end).next().map_or(end, |(&at, _)| at);
        if next > covered {
            map.insert(covered, Segment { end: next, ..Segment::default() });
        }
        let Some(segment) = map.get_mut(&covered) else { break };
        let fault = enter(segment, s, mode);
        if fault.is_some() {
            return fault;
        }
        covered = segment.end;
    }
    None
}

fn enter(segment: &mut Segment, s: &Submission<'_>, mode: Mode) -> Option<Fault> {
    if mode != Mode::Write && !segment.written {
        return Some(Fault::NeverWritten);
    }
    let writer = segment.write_lane as usize;
    if s.clock[writer] < segment.write_tick {
        let (lane, tick) = (writer, segment.write_tick);
        return Some(Fault::Unordered { state: "written", lane, tick });
    }
    if mode == Mode::Read {
        if let Some(lane) = s.lane {
            segment.reads[lane as usize] = s.clock[lane as usize];
        }
        return None;
    }
    if let Some(reader) = (0..LANES).find(|&l| s.clock[l] < segment.reads[l]) {
        let (lane, tick) = (reader, segment.reads[reader]);
        return Some(Fault::Unordered { state: "still read", lane, tick });
    }
    segment.written = true;
    (segment.write_lane, segment.write_tick) =
        s.lane.map_or((0, 0), |lane| (lane as u8, s.clock[lane as usize]));
    segment.reads = [0; LANES];
    None
}

/// Makes `at` a boundary between ranges. Boundaries are those of the plan's tensors, shards and
/// tiles, so their number is bounded. After a step of each kind, no new boundary appears.
fn split(map: &mut BTreeMap<u64, Segment>, at: u64) {
    if let Some((&start, segment)) = map.range_mut(..at).next_back()
        && start < at
        && at < segment.end
    {
        let right = segment.clone();
        segment.end = at;
        map.insert(at, right);
    }
}
