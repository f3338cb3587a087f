//! In-process collectives on GPUs: the bits of the cpu backend, whatever the number of ranks, the length and the type.

use device::cpu::{self, CpuOptions, HostWork, Lanes, World};
use device::cuda::{self, Collectives, CudaOptions};
use device::{Arena, Device, Dtype, Group, Lane, Op, Plan, Rank, Reduce, Tensor, random};
use std::sync::Arc;
use std::time::Duration;

/// The ops of a test and the tensors that they change, at places that suit no wide load.
struct Case {
    plan: Arc<Plan>,
    ops: Vec<(Op, Tensor)>,
}

fn case(group: Group, ranks: usize) -> Case {
    let mut plan = Plan::default();
    let mut ops = Vec::new();
    for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        for n in [1, 5 * ranks, 64 * ranks + 3, 4096 * ranks] {
            let mut tensor = || {
                let at = (Arena::Device, "test");
                plan.tensor(at, "t", dtype, (1, n + 1)).slice(1..n + 1)
            };
            let [sum, max, cast] = [tensor(), tensor(), tensor()];
            ops.push((Op::AllReduce { x: sum, group, reduce: Reduce::Sum }, sum));
            ops.push((Op::AllReduce { x: max, group, reduce: Reduce::Max }, max));
            ops.push((Op::Broadcast { x: cast, group, root: ranks - 1 }, cast));
            if n % ranks == 0 {
                let [scattered, gathered] = [tensor(), tensor()];
                ops.push((Op::ReduceScatter { x: scattered, group }, scattered));
                ops.push((Op::AllGather { x: gathered, group }, gathered));
            }
        }
    }
    Case { plan: Arc::new(plan), ops }
}

/// What each rank holds after the ops. Of a reduce-scatter only its own shard counts.
fn results(
    case: &Case,
    (tp, dp): (usize, usize),
    open: impl Fn(Rank, &Arc<World>) -> Device + Sync,
) -> Vec<Vec<Vec<f64>>> {
    let world = World::new(tp, dp, Duration::from_secs(60));
    let one = |rank: Rank| {
        let dev = open(rank, &world);
        let (me, size) = if tp > 1 { (rank.tp, tp) } else { (rank.dp, dp) };
        let lane = if tp > 1 { Lane::TpComm } else { Lane::DpComm };
        for (i, (_, x)) in case.ops.iter().enumerate() {
            let key = random::key(i as u64, me as u64);
            dev.write(*x, &|i| random::normal(key, i as u64)).unwrap();
        }
        case.ops.iter().for_each(|(op, _)| dev.submit(lane, op.clone()));
        dev.sync_all().unwrap();
        let read = |(op, x): &(Op, Tensor)| {
            let kept = if matches!(op, Op::ReduceScatter { .. }) { x.shard(me, size) } else { *x };
            let mut values = vec![0.0; kept.len()];
            dev.read(kept, &mut values).unwrap();
            values
        };
        let values = case.ops.iter().map(read).collect();
        dev.finish().unwrap();
        values
    };
    std::thread::scope(|scope| {
        let one = &one;
        let threads: Vec<_> =
            Rank::all(tp, dp).map(|rank| scope.spawn(move || one(rank))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

pub(super) fn are_those_of_the_cpu() {
    for (tp, dp) in [(2, 1), (4, 1), (1, 3), (1, 4)] {
        let case = case(if tp > 1 { Group::Tp } else { Group::Dp }, tp * dp);
        let on_cpu = results(&case, (tp, dp), |rank, world| {
            let options = CpuOptions {
                lanes: Lanes::Inline,
                memory_limit: u64::MAX,
                host: cpu::HostPlace::default(),
                scratch_floats: 0,
                work: HostWork::default(),
            };
            cpu::open(rank, &case.plan, world, &options).unwrap()
        });
        let on_gpus = results(&case, (tp, dp), |rank, world| {
            let options = CudaOptions {
                gpu: None,
                host: cpu::HostPlace::default(),
                collectives: Collectives::InProcess,
                scratch: 0,
                work: HostWork::default(),
            };
            cuda::open(rank, &case.plan, world, &options).unwrap()
        });
        for (rank, (cpu, gpu)) in on_cpu.iter().zip(&on_gpus).enumerate() {
            for ((op, x), (cpu, gpu)) in case.ops.iter().zip(cpu.iter().zip(gpu)) {
                let same = cpu.iter().zip(gpu).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(
                    same,
                    "{tp}x{dp}, rank {rank}: {} of {} {:?}",
                    op.name(),
                    x.len(),
                    x.dtype()
                );
            }
        }
    }
}
