//! Opens a GPU for a rank: it allocates, creates and compiles everything before step 1.

use super::blas::{Blas, WORKSPACE, Workspace};
use super::collectives::{NcclCommunicators, Transport, connect, warm_up};
use super::compile::Kernels;
use super::cudnn::Attention;
use super::driver::{self, Context, DeviceMemory, Failure, Stream, Words};
use super::gpu_overhead::note_connected;
use super::history::History;
use super::host::HostLane;
use super::launch::Program;
use super::marks::{Marks, STREAMS};
use super::matmul_choices::MatmulSelection;
use super::memory::{Arrangement, Peer, Peers};
use super::pace::Pace;
use super::products::collective_ctas;
use super::progress::Progress;
use super::timeline::Timeline;
use super::watchdog::Watchdog;
use super::{Gpu, HOST_WORD, nccl};
use crate::ranks::communicator::Communicator;
use crate::ranks::memory::{HostPlace, Memory, out_of_memory};
use crate::ranks::queue::Queue;
use crate::ranks::rank_state::{HostWork, RankState};
use crate::submit::warm::DistinctOps;
use crate::{Arena, Cargo, Device, Error, Group, Lane, Plan, Rank};
use std::cell::{Cell, RefCell};
use std::fmt::Display;
use std::rc::Rc;
use std::sync::Arc;

/// The transport of data between ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Collectives {
    /// NCCL if it is found and each rank has its own GPU, else in-process.
    #[default]
    Auto,
    /// Kernels that read other ranks' memory, with the bits of the cpu backend.
    InProcess,
}

/// The library that computes attention in 16 bits on GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AttentionLibrary {
    /// onebox's kernels.
    #[default]
    Own,
    /// cuDNN, except attention within documents or with dropout, which onebox's kernels compute.
    Cudnn,
}

/// Options for opening a GPU.
#[derive(Clone, Debug)]
pub struct CudaOptions {
    /// The driver's number of the rank's GPU. `None`: the rank's index modulo the number of GPUs.
    pub gpu: Option<usize>,
    /// Place of the host memory.
    pub host: HostPlace,
    /// The table by which the ranks of the run find each other; all ranks share it.
    pub peers: Arc<Peers>,
    /// The transport of data between ranks.
    pub collectives: Collectives,
    /// The library that computes attention.
    pub attention: AttentionLibrary,
    /// How the algorithms of matmuls are selected; all ranks of a process share it.
    pub matmuls: MatmulSelection,
    /// Largest scratch of an op in bytes, see [`device_bytes`](super::device_bytes).
    pub scratch: u64,
    /// Settings of the Host lane.
    pub work: HostWork,
    /// The kernels of the device's [tasks](crate::DeviceTask), compiled while it is opened.
    pub programs: &'static [Program],
    /// The distinct ops of the rank's program. Each runs once while the device is opened, so that
    /// nothing is loaded or connected later.
    pub warm_up: Arc<DistinctOps>,
}

/// Opens a GPU for `rank`; ranks may share a GPU. Returns when all ranks have opened their GPUs.
///
/// # Errors
/// There is no GPU, or the plan does not fit the free memory of the GPU or of this machine. The
/// peers are informed of the error.
///
/// # Panics
/// If `options.peers` or `rank` belongs to a run of another size than `world`.
pub fn open(
    rank: Rank,
    plan: &Arc<Plan>,
    world: &Arc<Communicator>,
    options: &CudaOptions,
) -> Result<Device, Error> {
    let sizes = [options.peers.size(), rank.world_size(), world.num_ranks()];
    assert!(
        sizes[0] == sizes[2] && sizes[1] == sizes[2],
        "peers of {} ranks, a rank of {} and a world of {}: a collective would read the memory of others",
        sizes[0],
        sizes[1],
        sizes[2]
    );
    let gpu = GpuOpener { rank, plan, world, options }.gpu();
    let gpu = gpu.inspect_err(|error| world.fail(rank, 0, error))?;
    Ok(Device::new(rank, Arc::clone(plan), Box::new(gpu)))
}

struct GpuOpener<'a> {
    rank: Rank,
    plan: &'a Arc<Plan>,
    world: &'a Arc<Communicator>,
    options: &'a CudaOptions,
}

impl GpuOpener<'_> {
    fn gpu(&self) -> Result<Gpu, Error> {
        let (context, count) = self.context()?;
        let gpu = context.ordinal;
        let setup = |what: &'static str| move |problem: String| self.problem(gpu, what, problem);
        let made = |failure: Failure| self.problem(gpu, "open", failure);
        let sm = driver::device_sm(gpu).map_err(made)?;
        let arrangement = Arrangement::new(self.plan, self.options.scratch, WORKSPACE);
        let own = Rc::new(Stream::new(&context, false).map_err(made)?);
        // Allocations outside the plan come first, so that a shortage is reported as the error of a
        // plan that does not fit, with figures.
        self.check(&context, arrangement.bytes)?;
        let short = |error: Error| self.shortage(&context, arrangement.bytes, error);
        let pinning = |e: Failure| self.problem(gpu, "pinning host memory", e);
        let words = Words::new(&context, STREAMS + 1).map_err(pinning)?;
        let kernels =
            Kernels::load(sm, self.options.programs).map_err(setup("kernels")).map_err(short)?;
        let blas = Blas::new().and_then(|mut blas| {
            blas.load(&context, &own, sm)?;
            Ok(blas)
        });
        let mut blas = blas.map_err(setup("cuBLASLt")).map_err(short)?;
        let attention = match self.options.attention {
            AttentionLibrary::Own => None,
            AttentionLibrary::Cudnn => {
                Some(Attention::new(sm).map_err(setup("cuDNN")).map_err(short)?)
            }
        };
        let marks = Marks::new().map_err(made).map_err(short)?;
        let paces = (0..STREAMS).map(|_| Pace::new()).collect::<Result<_, _>>();
        let paces = paces.map_err(made).map_err(short)?;
        let communicators = self.communicators(&context, sm, &own, count).map_err(short)?;
        let by_nccl = communicators.is_some();
        let owner = |lane| self.owner_of_stream(lane, by_nccl);
        let streams = streams(&context, own, owner).map_err(made)?;
        let own = &streams[STREAMS];
        let device = self.device_memory(&context, arrangement.bytes, own)?;
        let refused =
            |(arena, wanted)| Error::HostMemory { rank: self.rank.index(), arena, wanted };
        let host_memory =
            Memory::pinned(self.plan, &self.options.host).map(Arc::new).map_err(refused)?;
        let peer = Peer::new(&context, device, Arc::clone(&host_memory), self.plan);
        let peer = Arc::new(peer.map_err(pinning)?);
        let scratch = (peer.device.start + arrangement.scratch, self.options.scratch);
        let address = peer.device.start + arrangement.workspace;
        blas.use_workspace(Workspace { address, bytes: WORKSPACE });
        let progress = Progress::new(&words.words[..STREAMS]);
        let passed = Lane::ALL[..STREAMS].iter().map(|lane| progress.of(*lane)).collect();
        let history = Arc::new(History::new(passed));
        self.options.peers.join(self.rank.index(), &peer);
        // The Host lane is that of the cpu backend, on memory that the driver has pinned.
        let (work, threads) = (self.options.work.clone(), true);
        let host = RankState::new(self.rank, host_memory, self.plan, self.world, work, threads);
        let host = Arc::new(host);
        let transport = self.transport(&host, &context, communicators)?;
        let timeline = Timeline::of(&host, own);
        let queue = Arc::new(Queue::new(self.options.work.jobs));
        let lane = HostLane {
            shared: Arc::clone(&host),
            context: Arc::clone(&context),
            history: Arc::clone(&history),
            done: words.words[HOST_WORD].clone(),
            compute: progress.of(Lane::Compute),
        };
        let thread = lane.spawn(&queue).map_err(|e| self.problem(gpu, "the Host lane", e))?;
        let gpu = Gpu {
            host,
            context,
            peer,
            peers: Arc::clone(&self.options.peers),
            sm,
            processors: driver::device_processors(gpu).map_err(made)?,
            ctas: if by_nccl { collective_ctas(sm, self.rank) } else { [0; 2] },
            overlap: Cell::default(),
            scratch,
            kernels: RefCell::new(kernels),
            blas: RefCell::new(blas),
            attention: attention.map(RefCell::new),
            transport,
            timeline,
            streams,
            words,
            marks: RefCell::new(marks),
            paces: RefCell::new(paces),
            progress: RefCell::new(progress),
            history,
            host_after: Cell::default(),
            host_met: Cell::default(),
            queue,
            thread: Some(thread),
        };
        let ops = &self.options.warm_up.ops;
        match &self.options.matmuls {
            MatmulSelection::Heuristic => gpu.warm_up(ops)?,
            MatmulSelection::Timed(selection) => gpu.warm_up_timed(ops, selection)?,
        }
        self.zero(&gpu)?;
        Ok(gpu)
    }

    /// Zeroes the plan's memory again, since the warm-up kernels have written to it.
    fn zero(&self, gpu: &Gpu) -> Result<(), Error> {
        let (own, device) = (&gpu.streams[STREAMS], &gpu.peer.device);
        let bytes = self.plan.bytes(Arena::Device);
        let zeroed = own.zero(device.start, bytes).and_then(|()| own.synchronize());
        zeroed.map_err(|e| self.problem(gpu.context.ordinal, "device memory", e))?;
        // In-process collectives read the peers' memory.
        self.world.gather(self.rank, "open: warm")
    }

    fn problem(&self, gpu: usize, what: &str, problem: impl Display) -> Error {
        let problem = format!("{what}: {problem}");
        Error::GpuSetup { rank: self.rank.index(), gpu, problem }
    }

    /// The rank's GPU, bound to the calling thread, and the number of GPUs.
    fn context(&self) -> Result<(Arc<Context>, usize), Error> {
        let none = |problem: String| Error::NoCuda { problem };
        if !driver::is_present() {
            return Err(none("no NVIDIA driver found".into()));
        }
        driver::init().map_err(|e| none(e.to_string()))?;
        let count = driver::device_count().map_err(|e| none(e.to_string()))?;
        if count == 0 {
            return Err(none("the driver sees no GPU".into()));
        }
        let gpu = self.options.gpu.unwrap_or(self.rank.index() % count);
        let context = Context::of(gpu).map_err(|e| self.problem(gpu, "context", e))?;
        context.bind().map_err(|e| self.problem(gpu, "context", e))?;
        Ok((context, count))
    }

    /// Checks that `bytes` (plan and other memory) are free on the GPU. Returns the free bytes.
    fn check(&self, context: &Context, bytes: u64) -> Result<u64, Error> {
        let free = context.memory().map_err(|e| self.problem(context.ordinal, "free memory", e))?.0;
        let fits = bytes <= free;
        if fits { Ok(free) } else { Err(out_of_memory(self.rank, self.plan, bytes, free)) }
    }

    /// Turns an out-of-memory error of the driver or a library for allocations outside the plan
    /// into the error of a plan that does not fit.
    fn shortage(&self, context: &Context, bytes: u64, error: Error) -> Error {
        let text = error.to_string();
        let short = ["OUT_OF_MEMORY", "ALLOC_FAILED", "ALLOCATION_FAILED"]
            .iter()
            .any(|code| text.contains(code));
        match context.memory() {
            Ok((free, _)) if short => out_of_memory(self.rank, self.plan, bytes, free),
            _ => error,
        }
    }

    /// Makes one zeroed allocation.
    fn device_memory(
        &self,
        context: &Arc<Context>,
        bytes: u64,
        stream: &Stream,
    ) -> Result<DeviceMemory, Error> {
        let (gpu, free) = (context.ordinal, self.check(context, bytes)?);
        let memory = DeviceMemory::new(context, bytes).map_err(|e| {
            if e.is_out_of_memory() {
                // Another process may have allocated memory since the check.
                let free = context.memory().map_or(free, |(free, _)| free);
                out_of_memory(self.rank, self.plan, bytes, free)
            } else {
                self.problem(gpu, "device memory", e)
            }
        })?;
        let zeroed = stream.zero(memory.start, bytes).and_then(|()| stream.synchronize());
        zeroed.map_err(|e| self.problem(gpu, "device memory", e))?;
        Ok(memory)
    }

    /// NCCL's communicators, connected and warm, if NCCL is used.
    fn communicators(
        &self,
        context: &Arc<Context>,
        sm: u32,
        stream: &Stream,
        gpus: usize,
    ) -> Result<Option<NcclCommunicators>, Error> {
        let ranks = self.world.ranks_on_this_machine();
        let why_not = if self.rank.world_size() == 1 {
            "there is one rank".to_owned()
        } else if self.options.collectives == Collectives::InProcess {
            "asked for".to_owned()
        } else if ranks > gpus {
            format!("{ranks} ranks share {}", topology::counted(gpus, "GPU"))
        } else if let Err(why) = nccl::version() {
            why
        } else {
            if self.rank.index() == 0 {
                tracing::info!("collectives by NCCL");
            }
            return self.connected(context, stream, collective_ctas(sm, self.rank)).map(Some);
        };
        if self.world.has_remote_ranks() {
            let problem = format!(
                "only NCCL moves data between GPUs of several processes, and it is not used: {why_not}"
            );
            return Err(self.problem(context.ordinal, "collectives", problem));
        }
        if self.rank.index() == 0 {
            tracing::info!("collectives in-process: {why_not}");
        }
        Ok(None)
    }

    /// Connects the communicators, and measures the memory that they use.
    fn connected(
        &self,
        context: &Arc<Context>,
        stream: &Stream,
        ctas: [u32; 2],
    ) -> Result<NcclCommunicators, Error> {
        let gpu = context.ordinal;
        let free = || context.memory().map_err(|e| self.problem(gpu, "free memory", e));
        let (before, _) = free()?;
        let communicators = connect(self.rank, self.world, &self.options.peers, gpu, ctas)?;
        let calls = &self.options.warm_up.calls;
        warm_up(self.rank, self.world, context, &communicators, stream, calls)?;
        let taken = before.saturating_sub(free()?.0);
        if self.rank.index() == 0 {
            note_connected(gpu, (self.rank.tp_size, self.rank.dp_size), taken);
        }
        Ok(communicators)
    }

    /// Creates the transport. Returns when all ranks have their memory.
    fn transport(
        &self,
        host: &Arc<RankState>,
        context: &Arc<Context>,
        communicators: Option<NcclCommunicators>,
    ) -> Result<Transport, Error> {
        self.world.gather(self.rank, "open: memory")?;
        if let Some(communicators) = communicators {
            let gpu = context.ordinal;
            let watchdog = Watchdog::start(host, gpu, &self.options.peers, &communicators);
            let watchdog = watchdog.map_err(|e| self.problem(gpu, "collectives", e))?;
            return Ok(Transport::Nccl(communicators, watchdog));
        }
        self.reach_peers(context)?;
        self.world.gather(self.rank, "open: peers")?;
        Ok(Transport::InProcess)
    }

    /// Gives kernels access to the memory of all ranks of this rank's groups.
    fn reach_peers(&self, context: &Context) -> Result<(), Error> {
        for group in [Group::Tp, Group::Dp] {
            for i in 0..self.rank.within(group).1 {
                let index = self.rank.member(group, i);
                let Some(peer) = self.options.peers.peer(index) else { continue };
                let (gpu, other) = (context.ordinal, peer.context.ordinal);
                let reached = context.reach(&peer.context);
                if !reached.map_err(|e| self.problem(gpu, "peer access", e))? {
                    let problem = format!(
                        "it cannot read the memory of GPU {other}, and without NCCL there is no \
                         other way between them"
                    );
                    return Err(self.problem(gpu, "collectives", problem));
                }
            }
        }
        Ok(())
    }

    /// The earlier lane whose stream `lane` shares, if any.
    fn owner_of_stream(&self, lane: Lane, by_nccl: bool) -> Option<Lane> {
        match lane {
            // NCCL does not promise that two communicators make progress at the same time on one
            // GPU. On one stream their collectives run in the order of the program, which all ranks
            // share, and each waits only for earlier ones.
            Lane::DpComm if by_nccl && self.rank.tp_size > 1 && self.rank.dp_size > 1 => {
                Some(Lane::TpComm)
            }
            // Without such copies these lanes have no ops, and ranks on one GPU share its hardware
            // queues.
            Lane::ActivationsUp if !self.plan.carries(Cargo::Activation) => Some(Lane::H2d),
            Lane::ActivationsDown if !self.plan.carries(Cargo::Activation) => Some(Lane::D2h),
            _ => None,
        }
    }
}

/// The streams by lane, then the rank's own stream. The GPU prefers all lanes to Compute, since
/// other lanes and ranks wait for them. `owner` gives the earlier lane whose stream a lane shares.
fn streams(
    context: &Arc<Context>,
    own: Rc<Stream>,
    owner: impl Fn(Lane) -> Option<Lane>,
) -> Result<Vec<Rc<Stream>>, Failure> {
    let mut streams: Vec<Rc<Stream>> = Vec::with_capacity(STREAMS + 1);
    for lane in &Lane::ALL[..STREAMS] {
        streams.push(match owner(*lane) {
            Some(owner) => Rc::clone(&streams[owner as usize]),
            None => Rc::new(Stream::new(context, *lane != Lane::Compute)?),
        });
    }
    streams.push(own);
    Ok(streams)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    #[should_panic(expected = "peers of 4 ranks, a rank of 2 and a world of 2")]
    fn peers_are_those_of_the_world() {
        let options = CudaOptions {
            gpu: None,
            host: HostPlace::default(),
            peers: Arc::new(Peers::new(4)),
            collectives: Collectives::Auto,
            attention: AttentionLibrary::Own,
            matmuls: MatmulSelection::Heuristic,
            scratch: 0,
            work: HostWork::default(),
            programs: &[],
            warm_up: Arc::default(),
        };
        let rank = Rank { tp: 0, tp_size: 2, dp: 0, dp_size: 1 };
        let world = Communicator::new(2, 1, Duration::from_millis(1));
        let _ = open(rank, &Arc::new(Plan::default()), &world, &options);
    }
}
