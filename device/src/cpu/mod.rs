//! Virtual GPUs: real data, real arithmetic, an enforced memory limit. Lanes run inline in the
//! caller or as threads, with the same bits.

mod gemm;
mod kernels;
pub(crate) mod workers;

pub use workers::ScratchFloats;

use crate::op::lane::{Clock, join};
use crate::ranks::communicator::Communicator;
use crate::ranks::memory::{HostPlace, Memory, out_of_memory};
use crate::ranks::queue::Queue;
use crate::ranks::rank_state::{HostWork, RankState};
use crate::ranks::trace::Chaos;
use crate::{
    Activity, AdmittedOp, Arena, Device, Error, Event, Executor, LANES, Lane, Op, Plan, Rank,
    Tensor, ThreadTeam, View, ViewMut,
};
use std::cell::RefCell;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use workers::Workers;

/// How lanes run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Lanes {
    /// Each op runs inside `submit`. Program order is one of the orders that the events allow.
    #[default]
    Inline,
    /// One thread per lane. A random delay, seeded by rank and lane, precedes each op.
    Threads {
        /// Longest delay in microseconds; 0 for none.
        chaos_us: u64,
    },
}

/// Options for opening a virtual GPU.
#[derive(Clone, Debug)]
pub struct CpuOptions {
    /// How lanes run.
    pub lanes: Lanes,
    /// Largest size of the device's arena in bytes.
    pub memory_limit: u64,
    /// Place of the host memory.
    pub host: HostPlace,
    /// Scratch of kernels. The plan counts it.
    pub scratch: ScratchFloats,
    /// Settings of all lanes.
    pub work: HostWork,
}

/// Opens a virtual GPU for `rank`.
///
/// # Errors
/// The plan does not fit the limit or this machine's memory. The peers are informed of the error.
pub fn open(
    rank: Rank,
    plan: &Arc<Plan>,
    world: &Arc<Communicator>,
    options: &CpuOptions,
) -> Result<Device, Error> {
    let memory = check_limit(rank, plan, options.memory_limit).and_then(|()| {
        let refused = |(arena, wanted)| Error::HostMemory { rank: rank.index(), arena, wanted };
        Memory::new(plan, &options.host).map(Arc::new).map_err(refused)
    });
    let memory = memory.inspect_err(|error| world.fail(rank, 0, error))?;
    let (work, threads) = (options.work.clone(), options.lanes != Lanes::Inline);
    let shared = Arc::new(RankState::new(rank, memory, plan, world, work, threads));
    let cpu = Cpu::new(&shared, options).inspect_err(|error| world.fail(rank, 0, error))?;
    Ok(Device::new(rank, Arc::clone(plan), Box::new(cpu)))
}

fn check_limit(rank: Rank, plan: &Plan, limit: u64) -> Result<(), Error> {
    let wanted = plan.bytes(Arena::Device);
    if wanted <= limit { Ok(()) } else { Err(out_of_memory(rank, plan, wanted, limit)) }
}

struct Cpu {
    shared: Arc<RankState>,
    /// Queues by lane; empty when lanes run inline.
    queues: Vec<Arc<Queue<LaneJob>>>,
    threads: Vec<JoinHandle<()>>,
    /// For each lane, the clock that its next op waits for.
    pending: RefCell<[Clock; LANES]>,
    /// Kernel threads that inline lanes share.
    workers: Workers,
}

struct LaneJob {
    op: AdmittedOp,
    after: Clock,
}

impl Cpu {
    fn new(shared: &Arc<RankState>, options: &CpuOptions) -> Result<Self, Error> {
        let scratch = options.scratch;
        let workers = Workers::new(shared.work.team.clone(), scratch);
        let (queues, threads, pending) = (Vec::new(), Vec::new(), RefCell::default());
        let mut cpu = Self { shared: Arc::clone(shared), queues, threads, pending, workers };
        if let Lanes::Threads { chaos_us } = options.lanes {
            for lane in Lane::ALL {
                let jobs = if lane == Lane::Host { options.work.jobs } else { 0 };
                let queue = Arc::new(Queue::new(jobs));
                cpu.queues.push(Arc::clone(&queue));
                let (shared, chaos) = (Arc::clone(shared), Chaos::new(shared.rank, lane, chaos_us));
                let whom = format!("the {lane:?} lane of rank {}", shared.rank.index());
                let run = move || {
                    let workers = Workers::new(shared.work.team.clone(), scratch);
                    run_lane(&shared, &queue, &workers, chaos);
                };
                let started = std::thread::Builder::new().spawn(run);
                let refused =
                    |error: io::Error| Error::NoThread { whom, problem: error.to_string() };
                cpu.threads.push(started.map_err(refused)?);
            }
        }
        Ok(cpu)
    }
}

fn run(shared: &RankState, op: &AdmittedOp, workers: &Workers) {
    let memory = &*shared.memory;
    shared.run(op, &|op| match *op {
        Op::Copy { src, dst } => {
            workers.copy(memory.view(src), memory.view_mut(dst));
            Ok(())
        }
        _ => kernels::run(op, memory, workers),
    });
}

fn run_lane(shared: &RankState, jobs: &Queue<LaneJob>, workers: &Workers, mut chaos: Chaos) {
    crate::threads::panics::watch_this_thread();
    while let Some(LaneJob { op, after }) = jobs.pop() {
        for (lane, tick) in after.into_iter().enumerate() {
            shared.wait_done(lane, tick);
        }
        chaos.pause();
        run(shared, &op, workers);
    }
}

impl Executor for Cpu {
    fn submit(&self, op: AdmittedOp) {
        let lane = op.lane as usize;
        match self.queues.get(lane) {
            None => run(&self.shared, &op, &self.workers),
            Some(queue) => {
                let after = std::mem::take(&mut self.pending.borrow_mut()[lane]);
                queue.push(LaneJob { op, after });
            }
        }
    }

    fn wait(&self, lane: Lane, event: &Event) {
        join(&mut self.pending.borrow_mut()[lane as usize], &event.clock);
    }

    fn sync(&self, lane: Lane, tick: u64) -> Result<(), Error> {
        self.shared.wait_done(lane as usize, tick);
        self.shared.world.check(self.shared.rank)
    }

    fn in_memory(&self, t: Tensor) -> Option<View<'_>> {
        Some(self.shared.memory.view(t))
    }

    fn in_memory_mut(&self, t: Tensor) -> Option<ViewMut<'_>> {
        Some(self.shared.memory.view_mut(t))
    }

    fn team(&self) -> Option<&ThreadTeam> {
        self.shared.team()
    }

    fn write(&self, t: Tensor, value: &dyn Fn(usize) -> f64) -> Result<(), Error> {
        self.shared.memory.view_mut(t).fill(value);
        Ok(())
    }

    fn fail(&self, step: u64, error: &Error) {
        self.shared.world.fail(self.shared.rank, step, error);
    }

    fn begin_step(&self, step: u64) {
        self.shared.step.store(step, Ordering::Relaxed);
        self.shared.world.step.store(step, Ordering::Relaxed);
    }

    fn finish(&self) {}

    fn activity(&self) -> Activity {
        self.shared.meter.activity()
    }
}

impl Drop for Cpu {
    fn drop(&mut self) {
        self.queues.iter().for_each(|queue| queue.close());
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
