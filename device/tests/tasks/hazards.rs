//! Compares the hazard check with an oracle without clocks: the oracle stores the program as a
//! graph and computes reachability. The programs are random, over few overlapping ranges. Both must
//! refuse the same programs, at the same op.
#![allow(missing_docs, reason = "a test")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "helpers of tests")]
#![allow(clippy::print_stdout, reason = "figures for --nocapture")]
#![allow(clippy::allow_attributes, reason = "the lines above")]

use device::{
    Arena, Device, Dtype, Error, Event, LANES, Lane, Mode, Op, Plan, Rank, Tensor, random, recorder,
};
use std::sync::Arc;

/// Elements of each arena's tensor.
const ELEMENTS: u64 = 16;
/// Actions per program.
const ACTIONS: u64 = 28;
const PROGRAMS: u64 = 12_000;

/// Random numbers of one program, drawn in order.
struct Draw {
    stream: u64,
    index: u64,
    /// Number of cases, of `CARE`, in which the program waits for a lane before it acts.
    care: u64,
}

const CARE: u64 = 12;

impl Draw {
    fn below(&mut self, bound: u64) -> u64 {
        self.index += 1;
        random::below(self.stream, self.index, bound)
    }

    fn lane(&mut self) -> Lane {
        Lane::ALL[self.below(Lane::ALL.len() as u64) as usize]
    }

    /// A run of `len` elements at a random start.
    fn run(&mut self, t: Tensor, len: u64) -> Tensor {
        let start = self.below(ELEMENTS - len + 1) as usize;
        t.slice(start..start + len as usize)
    }
}

/// The oracle's verdict on an op.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Verdict {
    Fine,
    /// The op's own operands share bytes.
    Overlap,
    /// No event orders the op after a conflicting op, or the op reads unwritten memory.
    Hazard,
}

/// The refused action, and the reason.
type Refusal = Option<(u64, Verdict)>;

/// The program as a graph. Its nodes are ops, waits, syncs, and accesses of the rank's own thread.
#[derive(Default)]
struct Graph {
    before: Vec<Vec<usize>>,
    accesses: Vec<(usize, Mode, Tensor)>,
    /// The last node of each lane.
    last: [Option<usize>; LANES],
    /// The last node of the rank's own thread.
    main: Option<usize>,
}

impl Graph {
    fn node(&mut self, before: &[Option<usize>]) -> usize {
        self.before.push(before.iter().flatten().copied().collect());
        self.before.len() - 1
    }

    fn wait(&mut self, lane: Lane, event: Option<usize>) {
        let node = self.node(&[self.last[lane as usize], event]);
        self.last[lane as usize] = Some(node);
    }

    fn sync(&mut self, event: Option<usize>) {
        self.main = Some(self.node(&[self.main, event]));
    }

    /// Adds an op, which follows its lane and all that the rank's thread has waited for.
    fn op(&mut self, lane: Lane, accesses: &[(Mode, Tensor)]) -> Verdict {
        let node = self.node(&[self.last[lane as usize], self.main]);
        self.last[lane as usize] = Some(node);
        self.enter(node, accesses)
    }

    fn touch(&mut self, mode: Mode, t: Tensor) -> Verdict {
        let node = self.node(&[self.main]);
        self.main = Some(node);
        self.enter(node, &[(mode, t)])
    }

    fn enter(&mut self, node: usize, accesses: &[(Mode, Tensor)]) -> Verdict {
        for (i, &a) in accesses.iter().enumerate() {
            if accesses[..i].iter().any(|&b| conflict(a.0, a.1, b.0, b.1)) {
                return Verdict::Overlap;
            }
        }
        let reached = self.reached(node);
        let unordered = |&a: &(Mode, Tensor)| {
            self.accesses.iter().any(|&(at, mode, t)| conflict(a.0, a.1, mode, t) && !reached[at])
        };
        let unwritten = |&(mode, t): &(Mode, Tensor)| {
            mode != Mode::Write && t.range().any(|byte| !self.is_written(t.arena(), byte))
        };
        let bad = accesses.iter().any(|a| unordered(a) || unwritten(a));
        self.accesses.extend(accesses.iter().map(|&(mode, t)| (node, mode, t)));
        if bad { Verdict::Hazard } else { Verdict::Fine }
    }

    fn is_written(&self, arena: Arena, byte: u64) -> bool {
        let here = |t: &Tensor| t.arena() == arena && t.range().contains(&byte);
        self.accesses.iter().any(|(_, mode, t)| *mode != Mode::Read && here(t))
    }

    /// All nodes that happen before `node`.
    fn reached(&self, node: usize) -> Vec<bool> {
        let (mut reached, mut open) = (vec![false; self.before.len()], vec![node]);
        while let Some(at) = open.pop() {
            for &earlier in &self.before[at] {
                if !std::mem::replace(&mut reached[earlier], true) {
                    open.push(earlier);
                }
            }
        }
        reached
    }
}

fn conflict(mode_a: Mode, a: Tensor, mode_b: Mode, b: Tensor) -> bool {
    let (ra, rb) = (a.range(), b.range());
    let shared = a.arena() == b.arena() && ra.start < rb.end && rb.start < ra.end;
    shared && (mode_a != Mode::Read || mode_b != Mode::Read)
}

/// An op for the lane, and a handwritten list of its accesses.
fn op(draw: &mut Draw, lane: Lane, [device, pinned]: [Tensor; 2]) -> (Op, Vec<(Mode, Tensor)>) {
    let len = 1 + draw.below(4);
    let (from, to) = match lane {
        Lane::H2d | Lane::ActivationsUp => (pinned, device),
        Lane::D2h | Lane::ActivationsDown => (device, pinned),
        Lane::Host => (pinned, pinned),
        Lane::Compute | Lane::TpComm | Lane::DpComm => (device, device),
    };
    let (x, mut y) = (draw.run(from, len), draw.run(to, len));
    // Overlapping operands end a program, so few draws keep them.
    while conflict(Mode::Write, x, Mode::Write, y) && draw.below(32) > 0 {
        y = draw.run(to, len);
    }
    match (lane, draw.below(4)) {
        (Lane::Compute | Lane::DpComm, 0) => {
            (Op::Add { x, into: y }, vec![(Mode::Read, x), (Mode::Update, y)])
        }
        (Lane::Compute, 1) => (Op::Zero { x: y }, vec![(Mode::Write, y)]),
        _ => (Op::Copy { src: x, dst: y }, vec![(Mode::Read, x), (Mode::Write, y)]),
    }
}

/// The device's verdict. The device keeps its first error, so the test checks after every action.
fn verdict_of(result: Result<(), Error>) -> Verdict {
    match result {
        // The recorder has no data: a read with this error was admitted.
        Ok(()) | Err(Error::NoData) => Verdict::Fine,
        Err(Error::Hazard(_)) => Verdict::Hazard,
        Err(Error::Overlap { .. }) => Verdict::Overlap,
        Err(other) => panic!("{other}"),
    }
}

/// Performs one action on the device and the oracle, and returns both verdicts.
fn act(
    draw: &mut Draw,
    dev: &Device,
    graph: &mut Graph,
    events: &mut Vec<(Event, Option<usize>)>,
    tensors: [Tensor; 2],
) -> (Verdict, Verdict) {
    let lane = draw.lane();
    let silent = (Verdict::Fine, Verdict::Fine);
    match draw.below(20) {
        0..8 => {
            for other in Lane::ALL {
                if draw.below(CARE) < draw.care {
                    dev.follow(lane, other);
                    graph.wait(lane, graph.last[other as usize]);
                }
            }
            let (op, accesses) = op(draw, lane, tensors);
            dev.submit(lane, op);
            (verdict_of(dev.sync(Event::default())), graph.op(lane, &accesses))
        }
        8..11 => {
            events.push((dev.record(lane), graph.last[lane as usize]));
            silent
        }
        // Waits mostly for the newest event, as programs do, and sometimes for an old event.
        choice @ 11..16 if !events.is_empty() => {
            let oldest = draw.below(events.len() as u64) as usize;
            let (event, node) = if choice < 14 { events[events.len() - 1] } else { events[oldest] };
            dev.wait(lane, event);
            graph.wait(lane, node);
            silent
        }
        16 if !events.is_empty() => {
            let (event, node) = events[draw.below(events.len() as u64) as usize];
            graph.sync(node);
            (verdict_of(dev.sync(event)), Verdict::Fine)
        }
        17 => {
            // A fence orders all lanes, so that programs can become long.
            let ends = Lane::ALL.map(|l| (l, graph.last[l as usize]));
            dev.fence();
            let join = graph.node(&ends.map(|(_, node)| node));
            Lane::ALL.into_iter().for_each(|l| graph.wait(l, Some(join)));
            silent
        }
        18 | 19 => {
            for other in Lane::ALL {
                if draw.below(CARE) < draw.care {
                    dev.sync(dev.record(other)).unwrap();
                    graph.sync(graph.last[other as usize]);
                }
            }
            let (len, which) = (1 + draw.below(3), draw.below(2) as usize);
            let t = draw.run(tensors[which], len);
            if draw.below(2) == 0 {
                let verdict = verdict_of(dev.read(t, &mut vec![0.0; t.len()]));
                (verdict, graph.touch(Mode::Read, t))
            } else {
                (verdict_of(dev.write(t, &|_| 0.0)), graph.touch(Mode::Write, t))
            }
        }
        _ => silent,
    }
}

/// The op at which both refuse the program; `None` if both accept it.
///
/// # Panics
/// If they disagree.
fn refused_at(program: u64) -> Refusal {
    let mut plan = Plan::default();
    let mut tensor = |arena| plan.tensor((arena, "p"), "t", Dtype::F32, (1, ELEMENTS as usize));
    let tensors = [tensor(Arena::Device), tensor(Arena::Pinned)];
    let (dev, _) =
        recorder::open(Rank { tp: 0, tp_size: 1, dp: 0, dp_size: 1 }, &Arc::new(plan), "");
    let (mut graph, mut events) = (Graph::default(), Vec::new());
    let stream = random::key(0x6861_7a61, program);
    let mut draw = Draw { stream, index: 0, care: CARE - program % 5 };
    // Most programs start on written memory. The others start partly on unwritten memory.
    for t in tensors {
        let written = if draw.below(8) == 0 { ELEMENTS - 3 } else { ELEMENTS };
        let t = t.slice(0..written as usize);
        dev.write(t, &|_| 0.0).unwrap();
        assert_eq!(graph.touch(Mode::Write, t), Verdict::Fine);
    }
    for action in 0..ACTIONS {
        let (verdict, oracle) = act(&mut draw, &dev, &mut graph, &mut events, tensors);
        assert_eq!(verdict, oracle, "program {program}, action {action}: the device, the oracle");
        if verdict != Verdict::Fine {
            return Some((action, verdict));
        }
    }
    None
}

#[test]
fn the_check_refuses_exactly_the_programs_that_reachability_refuses_and_at_the_same_op() {
    let full = std::env::var_os("ONEBOX_FULL").is_some();
    let programs = if full { 20 * PROGRAMS } else { PROGRAMS };
    let verdicts: Vec<_> = (0..programs).map(refused_at).collect();
    let count =
        |wanted: &dyn Fn(&Refusal) -> bool| verdicts.iter().filter(|v| wanted(v)).count() as u64;
    // The programs must cover all verdicts, and both late and early refusals.
    let accepted = count(&|v| v.is_none());
    let hazards = count(&|v| v.is_some_and(|(at, verdict)| at > 8 && verdict == Verdict::Hazard));
    let overlaps = count(&|v| v.is_some_and(|(_, verdict)| verdict == Verdict::Overlap));
    println!(
        "{programs} programs: {accepted} accepted, {hazards} hazards after 8 actions, {overlaps} overlaps"
    );
    assert!(accepted > programs / 50 && hazards > programs / 10 && overlaps > programs / 50);
}
