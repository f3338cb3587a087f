//! Times messages between the processes of a run, and collectives of four virtual GPUs that are
//! divided among the processes. The simulator's figures are from here
//! (`engine/predict/src/sim/cost/across.rs`): `cargo build --release -p device --features mpi
//! --example messages`, then `mpirun -n 2 target/release/examples/messages`.
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "an example shows what it found")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use device::cpu::{self, CpuOptions, Lanes, ScratchFloats};
use device::{
    Arena, Dtype, Group, HostPlace, HostWork, Lane, Op, Plan, Processes, Rank, Reduction,
};
use device::{Communicator, Tensor};
use std::sync::Arc;
use std::time::{Duration, Instant};

const RANKS: usize = 4;
const ELEMENTS: usize = 8 << 20;
const MIB: usize = 1 << 20;

fn main() -> Result<(), String> {
    let processes = device::mpi::join(Duration::from_secs(60))?;
    let others = processes.count() - 1;
    let mut lines = String::new();
    if others > 0 {
        let message = |count, bytes: usize| {
            median(count, || drop(processes.exchange("message", vec![0; bytes])))
        };
        let (way, mib) = (message(301, 0), message(31, MIB));
        // The MPI thread sends these messages and receives as many.
        let many = median(5, || {
            (0..5_000).for_each(|_| processes.beat());
            drop(processes.exchange("end", Vec::new()));
        });
        let each = many / (10_000 * others) as f64;
        lines = format!(
            "until a message arrives {way:.1} us, one of 1 MiB {mib:.0} us; each message sent or received {each:.2} us\n"
        );
    }
    lines += &collectives(&processes);
    if processes.me() == 0 {
        println!("{} process(es), medians\n{lines}", processes.count());
    }
    let left = processes.part(0);
    processes.close(left.map(|_| 1));
    Ok(())
}

/// The median of `count` times in microseconds.
fn median(count: usize, mut work: impl FnMut()) -> f64 {
    let mut time = || {
        let began = Instant::now();
        work();
        began.elapsed().as_secs_f64() * 1e6
    };
    let mut all: Vec<f64> = (0..count).map(|_| time()).collect();
    all.sort_by(f64::total_cmp);
    all[count / 2]
}

/// The times of collectives of 16 MiB and of 8 bytes, measured on rank 0.
fn collectives(processes: &Arc<Processes>) -> String {
    let mut plan = Plan::default();
    let large = plan.tensor((Arena::Device, "example"), "large", Dtype::Bf16, (1, ELEMENTS));
    let small = plan.tensor((Arena::Pinned, "example"), "small", Dtype::F64, (1, 1));
    let plan = Arc::new(plan);
    let world = Communicator::across(processes, 1, RANKS, Duration::from_secs(600));
    std::thread::scope(|scope| {
        let (plan, world) = (&plan, &world);
        let run = |rank| scope.spawn(move || of_rank(rank, plan, world, large, small));
        let mine = Rank::all(1, RANKS).filter(|rank| world.has(*rank));
        let threads: Vec<_> = mine.map(run).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).next().unwrap()
    })
}

fn of_rank(
    rank: Rank,
    plan: &Arc<Plan>,
    world: &Arc<Communicator>,
    large: Tensor,
    small: Tensor,
) -> String {
    let options = CpuOptions {
        lanes: Lanes::Inline,
        memory_limit: u64::MAX,
        host: HostPlace::default(),
        scratch: ScratchFloats::default(),
        work: HostWork::default(),
    };
    let dev = cpu::open(rank, plan, world, &options).unwrap();
    dev.write(large, &|_| 0.0).unwrap();
    dev.write(small, &|_| 0.0).unwrap();
    let (group, reduce) = (Group::Dp, Reduction::Sum);
    let ops = [
        ("all_gather of 16 MiB", Op::AllGather { x: large, group }),
        ("reduce_scatter of 16 MiB", Op::ReduceScatter { x: large, group }),
        ("all_reduce of 16 MiB", Op::AllReduce { x: large, group, reduce }),
        ("all_reduce of 8 bytes", Op::AllReduce { x: small, group, reduce }),
    ];
    let mut lines = String::new();
    for (name, op) in ops {
        let lane = if name.contains("bytes") { Lane::Host } else { Lane::DpComm };
        let time = median(11, || {
            dev.submit(lane, op.clone());
            dev.sync(dev.record(lane)).unwrap();
        });
        lines += &format!("{name} {:.3} ms\n", time / 1e3);
    }
    dev.finish().unwrap();
    lines
}
