//! The description of a box in plain numbers. Rates are per second, of bytes or of multiplications
//! and additions.

pub(super) mod era;

use config::LoadDistribution;
use device::{Group, Rank};
use era::Era2020;
use std::collections::BTreeMap;

/// Kernels that compute attention.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AttentionKernels {
    /// onebox's own.
    #[default]
    Own,
    /// cuDNN's.
    Cudnn,
}

/// GPUs of one kind.
#[derive(Clone, Debug, PartialEq)]
pub struct Gpu {
    /// FLOPs per second of large dense 16-bit matmuls with fp32 sums, sustained in a step.
    pub flops_16: f64,
    /// FLOPs per second of fp32 arithmetic.
    pub flops_32: f64,
    /// Bytes per second of the GPU's own memory.
    pub memory: f64,
    /// Number of multiprocessors.
    pub processors: usize,
    /// Compute capability, for example 70 for V100. It selects the attention kernels; 0 selects
    /// those in fp32.
    pub sm: u32,
    /// The kernels of attention.
    pub attention: AttentionKernels,
    /// The rows of each expert.
    pub expert_load: LoadDistribution,
    /// The software of ZeRO-Offload's authors in 2020, if it is simulated.
    pub as_of_2020: Option<Era2020>,
}

/// The place of a rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Seat {
    /// Index of its box.
    pub machine: usize,
    /// Links on its GPU's way to the host, as indexes into [`Hardware::links`].
    pub links: Vec<usize>,
    /// The nodes of its staging buffers, as indexes into [`Hardware::nodes`], with the share of
    /// their bytes on each.
    pub staging: Vec<(usize, f64)>,
    /// The nodes of its optimizer states, as indexes into [`Hardware::nodes`].
    pub states: Vec<usize>,
    /// Number of cores that work for this rank alone.
    pub cores: f64,
}

/// The hardware of all ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct Hardware {
    /// The GPU of every rank.
    pub gpu: Gpu,
    /// PCIe links: bytes per second each way.
    pub links: Vec<f64>,
    /// NUMA nodes: bytes per second of their memory channels.
    pub nodes: Vec<f64>,
    /// Bytes per second that one core can read and write.
    pub core_memory: f64,
    /// Bytes per second of NVLink between the GPUs of two ranks; 0 for none.
    pub nvlink: Vec<Vec<f64>>,
    /// Bytes per second that each GPU sends in sums over PCIe, measured on the box; 0 if unknown.
    pub pcie_sums: f64,
    /// Bytes per second each way between a box and the others.
    pub network: f64,
    /// Seats by rank.
    pub seats: Vec<Seat>,
    /// Number of data-parallel ranks.
    pub dp_size: usize,
    /// Whether collectives of both groups share one stream, if both groups have several ranks: NCCL
    /// does not promise that two communicators make progress at the same time.
    pub one_communication_stream: bool,
    /// Measured rates of virtual GPUs, whose work the cores of a machine do.
    pub measured: Option<MeasuredMachine>,
}

/// Rates of arithmetic and of memory traffic. The time of an op is the sum of both times.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rates {
    /// Multiplications and additions per second.
    pub flops: f64,
    /// Bytes of operands per second.
    pub bytes: f64,
}

impl Rates {
    /// Seconds of arithmetic and traffic together. A rate of 0 is no limit.
    pub(super) fn seconds(self, flops: f64, bytes: f64) -> f64 {
        let part = |amount: f64, rate: f64| if rate > 0.0 { amount / rate } else { 0.0 };
        part(flops, self.flops) + part(bytes, self.bytes)
    }
}

/// A machine whose cores replace GPUs, with measured rates. A rank runs every op in its own thread,
/// in order of submission.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MeasuredMachine {
    /// Number of cores that all ranks share.
    pub cores: f64,
    /// The speed of one rank's threads together, in cores.
    pub threads: f64,
    /// Rates of matmuls on one core, for 16-bit and 32-bit storage.
    pub gemm: [Rates; 2],
    /// Rates of attention on one core, forward and backward.
    pub attention: [Rates; 2],
    /// Name of an op, and its bytes per second on one core, for 16-bit and 32-bit storage.
    pub ops: Vec<(String, [f64; 2])>,
    /// Bytes per second on one core of any other op.
    pub other: f64,
    /// Seconds of overhead of every op.
    pub overhead: f64,
    /// Seconds until a rank's threads have begun to share an op.
    pub threads_start: f64,
    /// Seconds until ranks have met.
    pub meeting: f64,
}

impl Hardware {
    /// Members of every group of a kind.
    pub(super) fn groups(ranks: &[Rank], group: Group) -> Vec<Vec<usize>> {
        let key = |rank: &Rank| match group {
            Group::Tp => rank.dp,
            Group::Dp => rank.tp,
            Group::World => 0,
        };
        let mut groups: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for rank in ranks {
            groups.entry(key(rank)).or_default().push(rank.index());
        }
        groups.into_values().collect()
    }
}
