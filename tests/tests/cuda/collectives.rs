//! In-process collectives on GPUs have the bits of the cpu backend, for all numbers of ranks,
//! lengths and types.

use device::cpu::{self, CpuOptions, Lanes};
use device::cuda::{self, AttentionLibrary, Collectives, CudaOptions, MatmulSelection, Peers};
use device::{Arena, Device, Dtype, Group, Lane, Op, Plan, Rank, Reduction, Tensor, random};
use device::{Communicator, HostWork};
use std::sync::Arc;
use std::time::Duration;

/// A collective and its tensors. Each rank writes `x` directly before the collective, copies `x` to
/// `copy_of_x` directly after it, and then clears `x`. A rank that reads its peers too early misses
/// their values, and a rank that reads too late finds zeros.
struct Round {
    op: Op,
    source: Tensor,
    x: Tensor,
    copy_of_x: Tensor,
}

impl Round {
    fn submit(&self, dev: &Device, lane: Lane) {
        let copy = |x, into| [Op::Zero { x: into }, Op::Add { x, into }];
        copy(self.source, self.x).into_iter().for_each(|op| dev.submit(Lane::Compute, op));
        dev.wait(lane, dev.record(Lane::Compute));
        dev.submit(lane, self.op.clone());
        dev.wait(Lane::Compute, dev.record(lane));
        copy(self.x, self.copy_of_x).into_iter().for_each(|op| dev.submit(Lane::Compute, op));
        dev.submit(Lane::Compute, Op::Zero { x: self.x });
    }
}

/// Rounds of a test. Their tensors are not aligned for wide loads.
struct Case {
    plan: Arc<Plan>,
    rounds: Vec<Round>,
}

fn case(group: Group, ranks: usize) -> Case {
    let mut plan = Plan::default();
    let mut rounds = Vec::new();
    for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        for n in [1, 5 * ranks, 64 * ranks + 3, 4096 * ranks] {
            let mut tensor = || {
                let at = (Arena::Device, "test");
                plan.tensor(at, "t", dtype, (1, n + 1)).slice(1..n + 1)
            };
            let mut round = |op: &dyn Fn(Tensor) -> Op| {
                let [source, x, copy_of_x] = [tensor(), tensor(), tensor()];
                rounds.push(Round { op: op(x), source, x, copy_of_x });
            };
            round(&|x| Op::AllReduce { x, group, reduce: Reduction::Sum });
            round(&|x| Op::AllReduce { x, group, reduce: Reduction::Max });
            round(&|x| Op::Broadcast { x, group, root: ranks - 1 });
            if n % ranks == 0 {
                round(&|x| Op::ReduceScatter { x, group });
                round(&|x| Op::AllGather { x, group });
            }
        }
    }
    Case { plan: Arc::new(plan), rounds }
}

/// Values that each rank kept. After a reduce-scatter only the rank's own shard counts.
fn results(
    case: &Case,
    (tp, dp): (usize, usize),
    open: impl Fn(Rank, &Arc<Communicator>) -> Device + Sync,
) -> Vec<Vec<Vec<f64>>> {
    let world = Communicator::new(tp, dp, Duration::from_secs(60));
    let one = |rank: Rank| {
        let dev = open(rank, &world);
        let (me, size) = if tp > 1 { (rank.tp, tp) } else { (rank.dp, dp) };
        let lane = if tp > 1 { Lane::TpComm } else { Lane::DpComm };
        for (i, round) in case.rounds.iter().enumerate() {
            let key = random::key(i as u64, me as u64);
            dev.write(round.source, &|i| random::normal(key, i as u64)).unwrap();
        }
        case.rounds.iter().for_each(|round| round.submit(&dev, lane));
        dev.sync_all().unwrap();
        let read = |Round { op, copy_of_x, .. }: &Round| {
            let whole = !matches!(op, Op::ReduceScatter { .. });
            let copy_of_x = if whole { *copy_of_x } else { copy_of_x.shard(me, size) };
            let mut values = vec![0.0; copy_of_x.len()];
            dev.read(copy_of_x, &mut values).unwrap();
            values
        };
        let values = case.rounds.iter().map(read).collect();
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

fn on_cpu(rank: Rank, plan: &Arc<Plan>, world: &Arc<Communicator>) -> Device {
    let options = CpuOptions {
        lanes: Lanes::Inline,
        memory_limit: u64::MAX,
        host: device::HostPlace::default(),
        scratch: cpu::ScratchFloats { each: 1 << 16, sums: 1 << 16 },
        work: HostWork::default(),
    };
    cpu::open(rank, plan, world, &options).unwrap()
}

fn on_gpu(rank: Rank, plan: &Arc<Plan>, world: &Arc<Communicator>, peers: &Arc<Peers>) -> Device {
    let options = CudaOptions {
        gpu: None,
        host: device::HostPlace::default(),
        peers: Arc::clone(peers),
        collectives: Collectives::InProcess,
        attention: AttentionLibrary::Own,
        matmuls: MatmulSelection::Heuristic,
        scratch: 0,
        work: HostWork::default(),
        programs: &[],
        warm_up: Arc::default(),
    };
    cuda::open(rank, plan, world, &options).unwrap()
}

pub(super) fn are_those_of_the_cpu() {
    for (tp, dp) in [(2, 1), (4, 1), (1, 3), (1, 4)] {
        let case = case(if tp > 1 { Group::Tp } else { Group::Dp }, tp * dp);
        let cpus = results(&case, (tp, dp), |rank, world| on_cpu(rank, &case.plan, world));
        let peers = Arc::new(Peers::new(tp * dp));
        let on_gpu = |rank: Rank, world: &_| on_gpu(rank, &case.plan, world, &peers);
        let gpus = results(&case, (tp, dp), on_gpu);
        for (rank, (cpu, gpu)) in cpus.iter().zip(&gpus).enumerate() {
            for (Round { op, x, .. }, (cpu, gpu)) in case.rounds.iter().zip(cpu.iter().zip(gpu)) {
                let same = cpu.iter().zip(gpu).all(|(a, b)| a.to_bits() == b.to_bits());
                let (name, n, dtype) = (op.name(), x.len(), x.dtype());
                assert!(same, "{tp}x{dp}, rank {rank}: {name} of {n} {dtype:?}");
            }
        }
    }
}
