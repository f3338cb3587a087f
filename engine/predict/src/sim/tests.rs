use super::*;
use device::{
    Arena, Cargo, Dtype, HostContext, HostOp, HostTask, Lane, Mode, Op, Plan, Pool, Reduction,
    Tensor, random,
};
use std::sync::Arc;

mod across;
mod attention;
mod channels;
mod collectives;
mod delta;
mod experts;

/// A checked recording.
fn record(
    rank: Rank,
    plan: &Arc<Plan>,
    submit: impl FnOnce(&device::Device) -> Result<(), device::Error>,
) -> Result<Program, device::Error> {
    super::record(rank, plan, true, submit)
}

/// Two GPUs on one link, with round numbers.
fn pair() -> Hardware {
    let seat = || Seat {
        machine: 0,
        links: vec![0],
        staging: vec![(0, 1.0)],
        states: vec![0],
        cores: 2.0,
    };
    Hardware {
        gpu: Gpu {
            flops_16: 100e12,
            flops_32: 10e12,
            memory: 1000e9,
            processors: 80,
            sm: 80,
            attention: AttentionKernels::Own,
            expert_load: config::LoadDistribution::Even,
            as_of_2020: None,
        },
        links: vec![10e9],
        nodes: vec![100e9],
        core_memory: 10e9,
        nvlink: vec![vec![0.0, 100e9], vec![100e9, 0.0]],
        pcie_sums: 0.0,
        network: 0.0,
        seats: vec![seat(), seat()],
        dp_size: 2,
        one_communication_stream: true,
        measured: None,
    }
}

#[derive(Debug)]
struct IdleTask(Tensor);

impl HostTask for IdleTask {
    fn name(&self) -> &'static str {
        "pass"
    }
    fn accesses(&self, visit: &mut dyn FnMut(Mode, Tensor)) {
        visit(Mode::Update, self.0);
    }
    fn run(&self, _: u64, _: &mut HostContext<'_>) -> Result<(), String> {
        Err("the simulator runs nothing".into())
    }
}

fn near(got: f64, want: f64) {
    assert!((got - want).abs() <= 1e-9 * want.abs().max(1e-9), "{got} is not {want}");
}

#[test]
fn two_ranks_by_hand() {
    let mut plan = Plan::default();
    let n = 1 << 20;
    let host = plan.tensor((Arena::Pinned, "p"), "host", Dtype::F32, (1, n));
    let dev = plan.tensor((Arena::Device, "p"), "dev", Dtype::F32, (1, n));
    let other = plan.tensor((Arena::Device, "p"), "other", Dtype::F32, (1, n));
    let plan = Arc::new(plan);
    let rank = Rank { tp: 0, tp_size: 1, dp: 0, dp_size: 2 };
    let program = record(rank, &plan, |d| {
        d.write(host, &|_| 0.0)?;
        d.begin_step(1);
        d.submit_host(&HostOp::new(IdleTask(host)), 0);
        d.follow(Lane::H2d, Lane::Host);
        d.submit(Lane::H2d, Op::Copy { src: host, dst: dev });
        d.submit(Lane::Compute, Op::Zero { x: other });
        d.follow(Lane::DpComm, Lane::H2d);
        d.submit(Lane::DpComm, Op::AllGather { x: dev, group: Group::Dp });
        d.sync_all()
    })
    .unwrap();
    for merge in [true, false] {
        let timeline = simulate(program.clone(), &pair(), 1, 2, merge);
        assert_eq!(timeline.classes(), if merge { 1 } else { 2 });
        let bytes = 4.0 * n as f64;
        // The thread submits one op after the other, with checks and driver calls.
        let (check, call) = (1e-6, 2.8e-6);
        let submitted = 3.0 * check + 3.0 * call;
        // The two cores of each rank read and write at 20 GB/s; both ranks together stay far below
        // the channels' 80.
        let pass = check + 2e-6 + 2.0 * bytes / 20e9;
        // Two copies share one link of 7.8 GB/s; each hides the start of the other.
        let copied = pass + 2.0 * bytes / 7.8e9;
        // Half of the bytes cross, at half of NVLink's 100 GB/s, as on 2 A100; memory is faster.
        let gathered = copied + 37e-6 + 0.5 * bytes / 50e9;
        for rank in 0..2 {
            let ends: Vec<f64> = timeline.played(rank).map(|p| p.end).collect();
            let zeroed = submitted + 2e-6 + bytes / 880e9;
            for (got, want) in ends.iter().zip([pass, copied, zeroed, gathered]) {
                near(*got, want);
            }
        }
        near(timeline.step_seconds(), gathered);
        let path = timeline.critical_path();
        near(path.iter().map(|(.., s)| s).sum(), gathered);
        assert!(path.iter().all(|(_, name, _)| *name != "zero"), "{path:?}");
        near(timeline.busy(0, Lane::H2d), copied - pass);
        let on = |lane: Lane| move |p: &SimulatedOp<'_>| p.lane == lane;
        near(timeline.together(0, on(Lane::Host), on(Lane::Compute)), 2e-6 + bytes / 880e9);
    }
}

#[test]
fn a_copy_takes_the_channels_of_each_node_of_the_staging() {
    let (mut plan, n) = (Plan::default(), 1 << 20);
    let host = plan.tensor((Arena::Pinned, "p"), "host", Dtype::F32, (1, n));
    let dev = plan.tensor((Arena::Device, "p"), "dev", Dtype::F32, (1, n));
    let rank = Rank { tp: 0, tp_size: 1, dp: 0, dp_size: 1 };
    let program = record(rank, &Arc::new(plan), |d| {
        d.write(host, &|_| 0.0)?;
        d.begin_step(1);
        d.submit(Lane::H2d, Op::Copy { src: host, dst: dev });
        d.sync_all()
    })
    .unwrap();
    let busy = |staging: Vec<(usize, f64)>| {
        let seat = Seat { staging, ..pair().seats[0].clone() };
        let slow = Hardware { nodes: vec![1e9, 100e9], seats: vec![seat], dp_size: 1, ..pair() };
        simulate(program.clone(), &slow, 1, 1, true).busy(0, Lane::H2d)
    };
    // The slow node gives four fifths of its rate; the fast node and the link take less time.
    let spared = busy(vec![(0, 1.0)]) - busy(vec![(0, 0.25), (1, 0.75)]);
    near(spared, 0.75 * 4.0 * n as f64 / 0.8e9);
}

/// Four GPUs: two share a link, the third has a slow link of its own, the fourth a fast one.
fn uneven() -> Hardware {
    let mut hardware = pair();
    hardware.links = vec![10e9, 4e9, 20e9];
    hardware.nodes = vec![30e9, 15e9];
    hardware.nvlink = vec![vec![50e9; 4]; 4];
    let seat = |links: Vec<usize>, node: usize| Seat {
        machine: 0,
        links,
        staging: vec![(node, 1.0)],
        states: vec![node],
        cores: 1.5,
    };
    hardware.seats = vec![seat(vec![0], 0), seat(vec![0], 0), seat(vec![1], 1), seat(vec![2], 1)];
    hardware
}

/// A program of random ops with random waits. It is always valid, since every lane has its own
/// tensors.
fn random_program(seed: u64) -> Program {
    let mut plan = Plan::default();
    let mut count = 0;
    let mut draw = move |n: u64| {
        count += 1;
        random::key(seed, count) % n
    };
    let sizes = [1 << 10, 1 << 16, 1 << 20];
    let mut tensors = Vec::new();
    for lane in Lane::ALL {
        let mut make = |arena, size| {
            let name = format!("{lane:?}.{size}.{arena:?}");
            plan.tensor((arena, "p"), name, Dtype::Bf16, (1, size))
        };
        tensors.push(sizes.map(|size| [make(Arena::Device, size), make(Arena::Pinned, size)]));
    }
    let rank = Rank { tp: 0, tp_size: 2, dp: 0, dp_size: 2 };
    record(rank, &Arc::new(plan), |d| {
        for t in tensors.iter().flatten().flatten() {
            d.write(*t, &|_| 0.0)?;
        }
        for step in 1..=2 {
            d.begin_step(step);
            for _ in 0..60 {
                let lane = Lane::ALL[draw(LANES as u64) as usize];
                let [on_device, on_host] = tensors[lane as usize][draw(3) as usize];
                if draw(3) == 0 {
                    d.follow(lane, Lane::ALL[draw(LANES as u64) as usize]);
                }
                let group = [Group::Tp, Group::Dp, Group::World][draw(3) as usize];
                let op = match lane {
                    Lane::Compute => Op::Zero { x: on_device },
                    Lane::TpComm if draw(2) == 0 => Op::AllGather { x: on_device, group },
                    Lane::TpComm => {
                        Op::AllReduce { x: on_device, group: Group::Tp, reduce: Reduction::Sum }
                    }
                    Lane::DpComm => Op::ReduceScatter { x: on_device, group: Group::Dp },
                    Lane::H2d | Lane::ActivationsUp => Op::Copy { src: on_host, dst: on_device },
                    Lane::D2h | Lane::ActivationsDown => Op::Copy { src: on_device, dst: on_host },
                    Lane::Host if draw(4) == 0 => {
                        Op::AllReduce { x: on_host, group, reduce: Reduction::Sum }
                    }
                    Lane::Host => Op::Host { task: HostOp::new(IdleTask(on_host)), arg: 0 },
                };
                d.submit(lane, op);
            }
            d.sync_all()?;
        }
        Ok(())
    })
    .unwrap()
}

#[test]
fn lanes_waits_and_rates_hold_in_random_programs() {
    for seed in 0..40 {
        let hardware = uneven();
        let timeline = simulate(random_program(seed), &hardware, 2, 2, seed % 2 == 0);
        let program = timeline.program();
        let submitted: u64 = program.ops().map(|(_, work)| work.bytes).sum();
        let resources = Resources::new(&hardware);
        let users = users(program, &hardware, 2, 2);
        let mut used = vec![0.0; resources.rates.len()];
        let mut last = 0.0f64;
        for rank in 0..4 {
            let played: Vec<SimulatedOp<'_>> = timeline.played(rank).collect();
            assert_eq!(played.iter().map(|p| p.work.bytes).sum::<u64>(), submitted);
            let mut ends: [Vec<f64>; LANES] = Default::default();
            for (p, node) in played.iter().zip(&program.nodes) {
                let before = ends[p.lane as usize].last().copied().unwrap_or(0.0);
                assert!(p.start >= before, "{seed}: two ops of {:?} at once", p.lane);
                for (lane, &tick) in node.after.iter().enumerate().filter(|(_, t)| **t > 0) {
                    assert!(p.start >= ends[lane][tick as usize - 1], "{seed}: a wait is broken");
                }
                ends[p.lane as usize].push(p.end);
                let demand = &users.ranks[rank][node.work as usize];
                assert!(p.end - p.start >= demand.alone * (1.0 - 1e-9), "{seed}: too fast");
                let uses = demand.uses.iter();
                uses.for_each(|&(resource, share)| used[resource] += share * demand.alone);
                last = last.max(p.end);
            }
        }
        // No resource gives more than it has: `used` is its use, in seconds of its whole rate.
        for (resource, seconds) in used.iter().enumerate() {
            assert!(*seconds <= last * (1.0 + 1e-9), "{seed}: resource {resource} is overdrawn");
        }
        let path: f64 = timeline.critical_path().iter().map(|(.., s)| s).sum();
        near(path, timeline.step_seconds());
    }
}

#[test]
fn ranks_that_are_alike_may_be_played_once() {
    let boxes = [pair(), uneven(), eight()];
    for (hardware, (tp, dp)) in boxes.iter().zip([(2, 1), (2, 2), (4, 2)]) {
        for seed in 0..10 {
            let merged = simulate(random_program(seed), hardware, tp, dp, true);
            let separate = simulate(random_program(seed), hardware, tp, dp, false);
            assert!(merged.classes() <= separate.classes());
            for rank in 0..tp * dp {
                for (a, b) in merged.played(rank).zip(separate.played(rank)) {
                    assert!((a.end - b.end).abs() <= 1e-9 + 1e-6 * b.end, "{seed}: {a:?} {b:?}");
                }
            }
        }
    }
    assert_eq!(simulate(random_program(1), &boxes[2], 4, 2, true).classes(), 1);
}

/// Eight equal GPUs: pairs on four links, two nodes.
fn eight() -> Hardware {
    let mut hardware = pair();
    hardware.links = vec![10e9; 4];
    hardware.nodes = vec![40e9; 2];
    hardware.nvlink = vec![vec![50e9; 8]; 8];
    let seat = |i: usize| Seat {
        machine: 0,
        links: vec![i / 2],
        staging: vec![(i / 4, 1.0)],
        states: vec![i / 4],
        cores: 2.0,
    };
    hardware.seats = (0..8).map(seat).collect();
    hardware
}

#[test]
#[should_panic(expected = "4 ranks on 2 GPUs")]
fn a_grid_that_is_larger_than_the_box_is_no_layout() {
    simulate(random_program(0), &pair(), 2, 2, true);
}

/// `N` tensors of `bytes` on the device, and one on the host.
fn tensors<const N: usize>(bytes: usize) -> (Arc<Plan>, [Tensor; N], Tensor) {
    let mut plan = Plan::default();
    let host = plan.tensor((Arena::Pinned, "p"), "host", Dtype::F32, (1, bytes / 4));
    let on_device = |i: usize| format!("device {i}");
    let mut device =
        |i| plan.tensor((Arena::Device, "p"), on_device(i), Dtype::F32, (1, bytes / 4));
    let tensors = std::array::from_fn(&mut device);
    (Arc::new(plan), tensors, host)
}

/// The first rank of a grid.
fn rank_of(tp_size: usize, dp_size: usize) -> Rank {
    Rank { tp: 0, tp_size, dp: 0, dp_size }
}

fn host_op(x: Tensor) -> Op {
    Op::Host { task: HostOp::new(IdleTask(x)), arg: 0 }
}

#[test]
fn a_norm_is_as_slow_as_it_was_measured_and_a_sum_as_fast_as_memory() {
    let mut plan = Plan::default();
    let mut gpu = |name: &str, dtype, shape| plan.tensor((Arena::Device, "p"), name, dtype, shape);
    let (rows, columns) = (8192, 2048);
    let [x, y] = ["x", "y"].map(|name| gpu(name, Dtype::Bf16, (rows, columns)));
    let gain = gpu("gain", Dtype::Bf16, (1, columns));
    let stats = gpu("stats", Dtype::F32, (1, rows));
    let program = super::record(rank_of(1, 1), &Arc::new(plan), false, |d| {
        d.begin_step(1);
        d.submit(Lane::Compute, Op::RmsNorm { x, gain, y, stats, epsilon: 1e-5, offset: 0.0 });
        d.submit(Lane::Compute, Op::Add { x, into: y });
        d.sync_all()
    });
    let program = program.unwrap();
    let seconds = |processors: usize, flops_32: f64, memory: f64, of_2020: bool| {
        let mut hardware = pair();
        let as_of_2020 = of_2020.then(|| Era2020::without(&[]));
        let gpu = Gpu { processors, flops_32, memory, sm: 90, as_of_2020, ..hardware.gpu };
        hardware.gpu = gpu;
        let timeline = simulate(program.clone(), &hardware, 1, 1, true);
        let spans: Vec<f64> = timeline.played(0).map(|p| p.end - p.start - 2e-6).collect();
        [spans[0], spans[1]]
    };
    let bytes = (rows * columns * 2) as f64;
    // An H200 took 33 to 34 us for this norm, and moves 4224 GB/s of 4800 in sums.
    let [norm, sum] = seconds(132, 67e12, 4800e9, false);
    assert!((norm / 34e-6 - 1.0).abs() < 0.03, "{norm}");
    near(sum, 3.0 * bytes / (0.88 * 4800e9));
    // Where the memory is slower than the kernel, the memory limits it.
    let [norm, sum] = seconds(132, 67e12, 1000e9, false);
    assert!((norm / sum - 2.0 / 3.0).abs() < 0.01, "{norm} {sum}");
    // The software of 2020 had other kernels.
    let [norm, sum] = seconds(132, 67e12, 4800e9, true);
    assert!((norm / sum - 2.0 / 3.0).abs() < 0.01, "{norm} {sum}");
}

#[test]
fn small_kernels_wait_for_the_thread_that_submits_them() {
    let (plan, [x], _) = tensors(1024);
    let program = record(rank_of(1, 1), &plan, |d| {
        d.begin_step(1);
        (0..400).for_each(|_| d.submit(Lane::Compute, Op::Zero { x }));
        d.sync_all()
    });
    let timeline = simulate(program.unwrap(), &pair(), 1, 1, true);
    // Each kernel takes 2 us of the GPU, and 3.8 us of the thread.
    let kernel = 2e-6 + 1024.0 / 880e9;
    near(timeline.step_seconds(), 400.0 * 3.8e-6 + kernel);
    let path = timeline.critical_path();
    assert_eq!(path[0].0, None, "{path:?}");
    near(path[0].2, 400.0 * 3.8e-6);
    let (seconds, calls) = timeline.submitting(0);
    near(seconds, 400.0 * 3.8e-6);
    assert_eq!(calls, 400);
    // Virtual GPUs run an op when it is submitted.
    let measured =
        MeasuredMachine { cores: 1.0, threads: 1.0, other: 1e9, ..MeasuredMachine::default() };
    let inline = Hardware { measured: Some(measured), ..pair() };
    let timeline = simulate(timeline.program().clone(), &inline, 1, 1, true);
    near(timeline.step_seconds(), 400.0 * 1024.0 / 1e9);
    assert_eq!(timeline.submitting(0), (0.0, 0));
}

#[test]
fn gradients_and_their_sums_cross_a_link_of_2020_one_rank_at_a_time() {
    let seconds = |pool, lane| {
        let mut plan = Plan::default();
        let host = plan.tensor((Arena::Pinned, pool), "host", Dtype::F32, (1, 1 << 20));
        let dev = plan.tensor((Arena::Device, "p"), "dev", Dtype::F32, (1, 1 << 20));
        let (src, dst) = if lane == Lane::H2d { (host, dev) } else { (dev, host) };
        let program = record(rank_of(1, 2), &Arc::new(plan), |d| {
            d.write(src, &|_| 0.0)?;
            d.begin_step(1);
            d.submit(lane, Op::Copy { src, dst });
            d.sync_all()
        });
        let mut hardware = Hardware { dp_size: 8, ..pair() };
        hardware.gpu.as_of_2020 = Some(Era2020::without(&[]));
        simulate(program.unwrap(), &hardware, 1, 2, true).busy(0, lane)
    };
    // Two ranks share the link in both cases. An eighth of the link is a quarter of a rank's half.
    let pool = Pool::new("p");
    let other = seconds(pool, Lane::H2d);
    for lane in [Lane::D2h, Lane::H2d] {
        let times = seconds(pool.carrying(Cargo::Gradient), lane) / other;
        assert!((3.9..4.1).contains(&times), "{lane:?}: {times}");
    }
}

#[test]
fn the_thread_is_never_further_ahead_of_a_stream_than_the_bound() {
    // Each kernel takes 82 us.
    let (plan, [x], host) = tensors(64 << 20);
    let program = record(rank_of(1, 1), &plan, |d| {
        d.write(host, &|_| 0.0)?;
        d.begin_step(1);
        (0..600).for_each(|_| d.submit(Lane::Compute, Op::Zero { x }));
        d.submit(Lane::Host, host_op(host));
        d.sync_all()
    });
    let timeline = simulate(program.unwrap(), &pair(), 1, 1, true);
    let played: Vec<SimulatedOp<'_>> = timeline.played(0).collect();
    // The first kernel is over before kernel 513 is submitted. After the thread has slept, it
    // continues with 256 in progress.
    let submitted = played[600].start;
    assert!(submitted > played[256].end, "{submitted}");
    assert!(submitted < played[600 - 256].end, "{submitted}");
    assert!(timeline.critical_path()[0].0 == Some(Lane::Compute));
}

#[test]
fn the_threads_of_a_collective_meet_before_it_starts() {
    let (plan, [x, y], _) = tensors(1024);
    let run = |tp, dp| {
        let program = record(rank_of(tp, dp), &plan, |d| {
            d.begin_step(1);
            for _ in 0..100 {
                d.submit(Lane::TpComm, Op::AllGather { x, group: Group::Tp });
                d.submit(Lane::Compute, Op::Zero { x: y });
            }
            d.sync_all()
        });
        let (classes, program) = (tp * dp, program.unwrap());
        let timeline = simulate(program, &pair(), tp, dp, false);
        assert_eq!(timeline.classes(), classes);
        timeline.step_seconds()
    };
    // Each op takes a meeting of 30 us, three calls for the collective, one for the kernel, and two
    // checks.
    let each = 30e-6 + 4.0 * 2.8e-6 + 2.0 * 1e-6;
    let with = run(2, 1);
    assert!(with > 100.0 * each && with < 100.0 * each + 1e-4, "{with}");
    // A single rank meets no peer.
    assert!(run(1, 1) < 1e-3);
}

#[test]
fn with_nccl_both_communication_lanes_are_one_queue() {
    let (plan, [x, y], host) = tensors(1 << 20);
    // The DP gather waits for the host; the TP sum waits for nothing.
    let run = |hardware: &Hardware, (tp, dp): (usize, usize)| {
        let program = record(rank_of(tp, dp), &plan, |d| {
            d.write(host, &|_| 0.0)?;
            d.write(y, &|_| 0.0)?;
            d.begin_step(1);
            (0..100).for_each(|_| d.submit(Lane::Host, host_op(host)));
            d.follow(Lane::DpComm, Lane::Host);
            d.submit(Lane::DpComm, Op::AllGather { x, group: Group::Dp });
            let op = Op::AllReduce { x: y, group: Group::Tp, reduce: Reduction::Sum };
            d.submit(Lane::TpComm, op);
            d.sync_all()
        });
        let timeline = simulate(program.unwrap(), hardware, tp, dp, true);
        let ends: Vec<f64> = timeline.played(0).map(|p| p.end).collect();
        (timeline.shares_communication(), ends[101] > ends[100])
    };
    assert_eq!(run(&uneven(), (2, 2)), (true, true));
    assert_eq!(run(&pair(), (1, 2)), (false, false));
    let separate = Hardware { one_communication_stream: false, ..uneven() };
    assert_eq!(run(&separate, (2, 2)), (false, false));
}
