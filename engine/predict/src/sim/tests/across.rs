//! Groups with ranks in several boxes.

use super::{near, pair, rank_of, record, tensors};
use crate::sim::cost::GroupSpread;
use crate::sim::{Hardware, Program, simulate};
use device::cpu::{self, CpuOptions, Lanes, ScratchFloats};
use device::{
    Arena, Communicator, Dtype, Group, HostPlace, HostWork, Lane, Op, Plan, Processes, Rank,
    Reduction, Tensor, Wire,
};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

/// `count` boxes of two GPUs each, joined by NVLink.
fn boxes(count: usize) -> Hardware {
    let mut hardware = pair();
    hardware.network = 10e9;
    hardware.links = vec![10e9; count];
    hardware.nodes = vec![100e9; count];
    let ranks = 2 * count;
    let joined = |a: usize, b: usize| if a != b && a / 2 == b / 2 { 100e9 } else { 0.0 };
    hardware.nvlink = (0..ranks).map(|a| (0..ranks).map(|b| joined(a, b)).collect()).collect();
    let seat = hardware.seats[0].clone();
    hardware.seats = (0..ranks)
        .map(|rank| {
            let mut seat = seat.clone();
            let machine = rank / 2;
            (seat.machine, seat.links, seat.states) = (machine, vec![machine], vec![machine]);
            seat.staging = vec![(machine, 1.0)];
            seat
        })
        .collect();
    hardware
}

const BYTES: usize = 4 << 20;

/// A gather of 4 MiB and a host sum, both of `group`.
fn gather_and_sum((tp, dp): (usize, usize), group: Group) -> Program {
    let (plan, [x], host) = tensors(BYTES);
    let program = record(rank_of(tp, dp), &plan, |d| {
        d.write(host, &|_| 0.0)?;
        d.begin_step(1);
        let lane = if group == Group::Tp { Lane::TpComm } else { Lane::DpComm };
        d.submit(lane, Op::AllGather { x, group });
        d.submit(Lane::Host, Op::AllReduce { x: host, group, reduce: Reduction::Sum });
        d.sync_all()
    });
    program.unwrap()
}

#[test]
fn a_group_of_several_boxes_pays_for_hops_and_messages() {
    let (way, each) = (48e-6, 2.7e-6);
    // By group: the gather's time, the time of its messages, and the time of the host sum.
    let times = |hardware: &Hardware, grid, group| {
        let timeline = simulate(gather_and_sum(grid, group), hardware, grid.0, grid.1, true);
        let spent: Vec<f64> = timeline.played(0).map(|p| p.end - p.start).collect();
        // The checks of both ops, and three calls for the collective.
        let meeting = timeline.submitting(0).0 - 2.0 * 1e-6 - 3.0 * 2.8e-6;
        (spent[0], meeting, spent[1])
    };
    // Four ranks: 3/4 of the bytes cross the network at 8.5 GB/s, and so does one of three hops.
    let (gather, meeting, sum) = times(&boxes(2), (1, 4), Group::Dp);
    near(gather, 12e-6 + 2.0 * 2e-6 + 14e-6 + 0.75 * BYTES as f64 / 8.5e9);
    // Each process sends two posts and receives two.
    near(meeting, 30e-6 + way + 4.0 * each);
    // Three such meetings. Before two of them, four pairs of ranks exchange a parcel each way.
    near(sum, 30e-6 + 3.0 * way + (3.0 * 4.0 + 2.0 * 8.0) * each);
    // Two ranks, one in each box. The other group of this kind uses the network and sends messages
    // at the same time; each gather hides the start of the other.
    let (gather, meeting, sum) = times(&boxes(2), (2, 2), Group::Dp);
    near(gather, 2.0 * 0.5 * BYTES as f64 / 8.5e9);
    near(meeting, 30e-6 + way + 4.0 * each);
    near(sum, 30e-6 + 3.0 * way + (3.0 * 4.0 + 2.0 * 4.0) * each);
    // All ranks of the group are in one box.
    let (gather, meeting, sum) = times(&boxes(2), (2, 2), Group::Tp);
    near(gather, 37e-6 + 0.5 * BYTES as f64 / 50e9);
    near(meeting, 30e-6);
    near(sum, 30e-6);
}

#[test]
fn ranks_of_several_boxes_that_are_alike_may_be_played_once() {
    let program = || gather_and_sum((2, 4), Group::Dp);
    let [merged, separate] = [true, false].map(|merge| simulate(program(), &boxes(4), 2, 4, merge));
    assert_eq!((merged.classes(), separate.classes()), (1, 8));
    near(merged.step_seconds(), separate.step_seconds());
}

/// Delivers messages between processes that are threads here, and counts the messages of process 0.
#[derive(Debug)]
struct CountingWire {
    me: usize,
    all: Arc<Mutex<Vec<Weak<Processes>>>>,
    messages: Arc<AtomicUsize>,
}

impl Wire for CountingWire {
    fn send(&self, to: usize, bytes: Vec<u8>, _urgent: bool) {
        if self.me == 0 || to == 0 {
            self.messages.fetch_add(1, Ordering::SeqCst);
        }
        let to = self.all.lock().unwrap()[to].upgrade();
        to.unwrap().hear(self.me, bytes);
    }

    fn close(&self, _abort: Option<u8>) {}
}

/// Number of messages that process 0 of `count` sends and receives in a run with `sums` host sums.
fn messages_of_run(count: usize, (tp, dp): (usize, usize), sums: usize) -> usize {
    let mut plan = Plan::default();
    let x = plan.tensor((Arena::Pinned, "p"), "x", Dtype::F64, (1, 1));
    let (plan, messages) = (Arc::new(plan), Arc::new(AtomicUsize::new(0)));
    let all: Arc<Mutex<Vec<Weak<Processes>>>> = Arc::default();
    let nodes: Vec<String> = (0..count).map(|node| format!("node{node}")).collect();
    let process = |me| {
        let wire = CountingWire { me, all: Arc::clone(&all), messages: Arc::clone(&messages) };
        Processes::new(me, nodes.clone(), Box::new(wire), Duration::from_secs(60))
    };
    let processes: Vec<_> = (0..count).map(process).collect();
    *all.lock().unwrap() = processes.iter().map(Arc::downgrade).collect();
    let across = |p| Communicator::across(p, tp, dp, Duration::from_secs(60));
    let worlds: Vec<_> = processes.iter().map(across).collect();
    let run = |world: &Arc<Communicator>, rank: Rank, x: Tensor| {
        let options = CpuOptions {
            lanes: Lanes::Inline,
            memory_limit: u64::MAX,
            host: HostPlace::default(),
            scratch: ScratchFloats::default(),
            work: HostWork::default(),
        };
        let dev = cpu::open(rank, &plan, world, &options).unwrap();
        dev.write(x, &|_| 1.0).unwrap();
        let sum = Op::AllReduce { x, group: Group::Dp, reduce: Reduction::Sum };
        (0..sums).for_each(|_| dev.submit(Lane::Host, sum.clone()));
        dev.sync_all().unwrap();
        dev.finish().unwrap();
    };
    std::thread::scope(|scope| {
        for world in &worlds {
            for rank in Rank::all(tp, dp).filter(|rank| world.has(*rank)) {
                let run = &run;
                scope.spawn(move || run(world, rank, x));
            }
        }
    });
    messages.load(Ordering::SeqCst)
}

#[test]
fn a_sum_of_the_host_has_the_messages_that_are_simulated() {
    for (count, (tp, dp)) in [(2, (1, 4)), (2, (2, 2)), (4, (1, 8)), (4, (2, 4))] {
        let hardware = boxes(count);
        let members = Hardware::groups(&Rank::all(tp, dp).collect::<Vec<_>>(), Group::Dp);
        let [none, three] = [0, 3].map(|sums| messages_of_run(count, (tp, dp), sums));
        let simulated = GroupSpread::of(&hardware, &members[0]).messages_of_sum();
        assert_eq!(three - none, 3 * simulated, "{count} processes of TP {tp} x DP {dp}");
    }
}
