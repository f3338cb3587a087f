//! The start-up proof: before step 1, one block and the head of the model run on a GPU and on the
//! `cpu` backend, forward and backward, op by op from the same inputs ([`device::lockstep`]).
//!
//! The verdict is kept for the combination of GPU, driver, libraries, kernels and shapes, so that
//! later starts do not compare again. Only a comparison without a difference is kept.

mod message;
mod program;

pub use message::GpuDiscrepancy;

use crate::TIMEOUT;
use crate::run::devices::kernel_team;
use config::{Config, DeviceConfig};
use device::cpu::{self, CpuOptions, Lanes};
use device::cuda::{self, Collectives, CudaOptions, Peers};
use device::lockstep::{self, Comparison, DevicePair};
use device::{Communicator, Error, ErrorKind, HostPlace, HostWork, Processes, Rank};
use layout::LocalMachine;
use layout::attention::attention_library;
use layout::build::{scratch_floats, shape_scratch};
use program::ProofProgram;
use std::sync::Arc;
use std::thread::Builder;

/// A proof that a run needs, since no verdict is kept.
#[derive(Debug)]
pub struct StartupProof<'a> {
    config: &'a Config,
    machine: &'a LocalMachine,
    program: ProofProgram,
    groups: Vec<ProofGroup>,
}

/// GPUs of a TP group, as the driver's numbers, and the key of the group's verdict.
#[derive(Debug)]
struct ProofGroup {
    gpus: Vec<usize>,
    key: String,
}

/// The extent of a proof that found no difference.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProofSummary {
    /// Number of ops of all ranks.
    pub ops: u64,
    /// Number of elements that were compared.
    pub elements: u64,
}

/// The reason why a proof did not end with a verdict.
#[derive(Debug, thiserror::Error)]
pub enum ProofError {
    /// A GPU computes other numbers than the `cpu` backend.
    #[error(transparent)]
    Differs(Box<GpuDiscrepancy>),
    /// The memory of a GPU or of the machine is too small for the proof.
    #[error("no room for it: {0}")]
    NoRoom(Error),
    /// A device failed.
    #[error("{0}")]
    Failed(Error),
}

/// The result of a rank's program.
struct RankComparison {
    comparison: Comparison,
    ended: Result<(), Error>,
}

impl<'a> StartupProof<'a> {
    /// The proof that a run of `config` needs on this process's GPUs. `None` if all verdicts are
    /// kept, or if the run has no proof.
    ///
    /// # Errors
    /// The reason why no proof is possible here.
    pub fn look(
        config: &'a Config,
        machine: &'a LocalMachine,
        processes: Option<&Processes>,
    ) -> Result<Option<Self>, String> {
        if !config.train.proof || config.device != DeviceConfig::Cuda {
            return Ok(None);
        }
        let (tp, ranks) = (config.parallel.tensor, config.world_size());
        let here = processes.map_or(0..ranks, |all| all.ranks(all.me(), ranks));
        if !here.start.is_multiple_of(tp) || !here.len().is_multiple_of(tp) {
            return Err(format!("the {tp} ranks of a TP group are in several processes"));
        }
        let gpus = machine.rank_gpus(machine.grid(config));
        let gpu = |rank| machine.number(config, rank).and_then(|number| gpus.get(number).copied());
        let program = ProofProgram::new(config);
        let mut groups: Vec<ProofGroup> = Vec::new();
        for first in here.step_by(tp) {
            let of_group: Option<Vec<usize>> = (first..first + tp).map(gpu).collect();
            let gpus = of_group.ok_or_else(|| format!("rank {first} has no GPU"))?;
            let key = key(config, machine, program.shape(), &gpus)?;
            let is_known = groups.iter().any(|group| group.key == key) || cuda::is_proven(&key);
            if !is_known {
                groups.push(ProofGroup { gpus, key });
            }
        }
        Ok((!groups.is_empty()).then_some(Self { config, machine, program, groups }))
    }

    /// Compares, and keeps the verdicts.
    ///
    /// # Errors
    /// The first op whose results differ, or the failure of a device.
    pub fn run(&self) -> Result<ProofSummary, ProofError> {
        let mut summary = ProofSummary::default();
        for group in &self.groups {
            let found = self.compare(group)?;
            summary.ops += found.ops;
            summary.elements += found.elements;
            if let Err(why) = cuda::keep_proven(&group.key) {
                tracing::warn!("the start-up proof runs at every start: {why}");
            }
        }
        Ok(summary)
    }

    /// Runs the program on all ranks of a group.
    fn compare(&self, group: &ProofGroup) -> Result<ProofSummary, ProofError> {
        let tp = self.config.parallel.tensor;
        let worlds = [(); 2].map(|()| Communicator::new(tp, 1, TIMEOUT));
        let peers = Arc::new(Peers::new(tp));
        let one = |rank: Rank| self.rank(rank, group, &worlds, &peers);
        let results: Vec<RankComparison> = std::thread::scope(|scope| {
            let spawn = |rank: Rank| {
                let (one, builder) = (&one, Builder::new().name(format!("proof {}", rank.index())));
                let started = builder.spawn_scoped(scope, move || one(rank));
                (rank, started.map_err(|error| worlds[0].not_started(rank, &error)))
            };
            let threads: Vec<_> = Rank::all(tp, 1).map(spawn).collect();
            let join = |(rank, thread): (Rank, Result<std::thread::ScopedJoinHandle<'_, _>, _>)| {
                let (rank, why) = (rank.index(), "its thread panicked".to_owned());
                let died = || RankComparison::failed(Error::RankDied { rank, step: 0, why });
                match thread {
                    Ok(thread) => thread.join().unwrap_or_else(|_| died()),
                    Err(error) => RankComparison::failed(error),
                }
            };
            threads.into_iter().map(join).collect()
        });
        let found = results.iter().enumerate().filter_map(|(rank, result)| {
            result.comparison.discrepancy.as_ref().map(|found| (found.number, rank, found))
        });
        if let Some((_, rank, found)) = found.min_by_key(|(number, rank, _)| (*number, *rank)) {
            let found = GpuDiscrepancy::new(self.config, self.machine, group.gpus[rank], found);
            return Err(ProofError::Differs(Box::new(found)));
        }
        let first = worlds.iter().find_map(|world| world.failure()).map(|(_, _, error)| error);
        let failed = first.or_else(|| results.iter().find_map(|one| one.ended.clone().err()));
        match failed {
            None => Ok(ProofSummary {
                ops: results.iter().map(|one| one.comparison.ops).sum(),
                elements: results.iter().map(|one| one.comparison.elements).sum(),
            }),
            Some(error) => Err(match error.kind() {
                ErrorKind::DeviceMemory | ErrorKind::HostMemory => ProofError::NoRoom(error),
                _ => ProofError::Failed(error),
            }),
        }
    }

    /// Runs the program on one rank.
    fn rank(
        &self,
        rank: Rank,
        group: &ProofGroup,
        worlds: &[Arc<Communicator>; 2],
        peers: &Arc<Peers>,
    ) -> RankComparison {
        device::panics::watch_this_thread();
        let pair = match self.open(rank, group, worlds, peers) {
            Ok(pair) => pair,
            Err(error) => return RankComparison::failed(error),
        };
        let (dev, comparison) = lockstep::open(pair, self.program.plan());
        let ended = self.program.run(&dev).and_then(|()| dev.finish());
        let comparison = comparison.borrow().clone();
        RankComparison { comparison, ended }
    }

    /// Opens a rank's GPU, and then its virtual GPU: a rank that has no GPU leaves no other rank
    /// waiting.
    fn open(
        &self,
        rank: Rank,
        group: &ProofGroup,
        [on_gpus, on_cores]: &[Arc<Communicator>; 2],
        peers: &Arc<Peers>,
    ) -> Result<DevicePair, Error> {
        let (plan, shape) = (self.program.plan(), self.program.shape());
        let options = CudaOptions {
            matmuls: cuda::MatmulSelection::Heuristic,
            gpu: Some(group.gpus[rank.index()]),
            host: HostPlace::default(),
            peers: Arc::clone(peers),
            collectives: collectives(self.config, self.machine, &group.gpus),
            attention: attention_library(self.config),
            scratch: shape_scratch(shape, self.config.attention),
            work: HostWork::default(),
            programs: offload::PROGRAMS,
            warm_up: Arc::default(),
        };
        let subject = cuda::open(rank, plan, on_gpus, &options)?;
        let threads = (self.machine.cores() / rank.world_size()).max(1);
        let options = CpuOptions {
            lanes: Lanes::Inline,
            memory_limit: u64::MAX,
            host: HostPlace::default(),
            scratch: scratch_floats(shape),
            work: HostWork { team: kernel_team(threads, None), ..HostWork::default() },
        };
        let reference = cpu::open(rank, plan, on_cores, &options)?;
        Ok(DevicePair { subject, reference })
    }
}

impl RankComparison {
    fn failed(error: Error) -> Self {
        Self { comparison: Comparison::default(), ended: Err(error) }
    }
}

/// The transport of the run: ranks that share a GPU do not use NCCL.
fn collectives(config: &Config, machine: &LocalMachine, gpus: &[usize]) -> Collectives {
    let shares = machine.ranks(config) > machine.cuda().gpus.len();
    let is_double = (1..gpus.len()).any(|i| gpus[..i].contains(&gpus[i]));
    if shares || is_double { Collectives::InProcess } else { Collectives::Auto }
}

/// Everything that a verdict depends on.
fn key(
    config: &Config,
    machine: &LocalMachine,
    shape: &tensor_parallel::DecoderShape,
    gpus: &[usize],
) -> Result<String, String> {
    let stack = |gpu: &usize| cuda::stack(*gpu, offload::PROGRAMS);
    let stacks = gpus.iter().map(stack).collect::<Result<Vec<String>, String>>()?;
    let (library, packing) = (attention_library(config), config.data.packing);
    let transport = collectives(config, machine, gpus);
    Ok(format!(
        "onebox {}, {library:?}, {packing:?}, {transport:?}, {stacks:?}, {shape:?}",
        files::VERSION
    ))
}
