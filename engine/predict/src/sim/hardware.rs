//! The description of a box in plain numbers. Rates are per second: bytes, or multiplications and
//! additions.

pub(super) mod era;

use device::{Group, Rank};
use era::Era2020;
use std::collections::BTreeMap;

/// GPUs of one kind.
#[derive(Clone, Debug, PartialEq)]
pub struct Gpu {
    /// Rate of dense 16-bit matrix products with fp32 sums, by the data sheet.
    pub flops_16: f64,
    /// Rate of fp32 arithmetic.
    pub flops_32: f64,
    /// Bytes per second of its own memory.
    pub memory: f64,
    /// Number of multiprocessors.
    pub processors: usize,
    /// Compute capability, 70 for V100, which says what attention kernels it takes; 0: those in
    /// fp32.
    pub sm: u32,
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
    /// The nodes of its optimizer states.
    pub states: Vec<usize>,
    /// Number of cores that work for it alone.
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
    /// Bytes per second each way between a box and the others.
    pub network: f64,
    /// Seats by rank.
    pub seats: Vec<Seat>,
    /// Number of data-parallel ranks.
    pub dp_size: usize,
    /// Whether collectives of both groups share one stream, if both groups have several ranks: NCCL
    /// does not promise that two communicators make progress side by side.
    pub one_communication_stream: bool,
    /// Virtual GPUs: the cores of a machine do all work.
    pub measured: Option<MeasuredMachine>,
}

/// Rates of arithmetic and of traffic. An op takes the sum of both times.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rates {
    /// Multiplications and additions per second.
    pub flops: f64,
    /// Bytes of operands per second.
    pub bytes: f64,
}

impl Rates {
    /// Seconds of both together. A rate of 0 is no limit.
    pub(super) fn seconds(self, flops: f64, bytes: f64) -> f64 {
        let part = |amount: f64, rate: f64| if rate > 0.0 { amount / rate } else { 0.0 };
        part(flops, self.flops) + part(bytes, self.bytes)
    }
}

/// A machine whose cores replace GPUs, with measured rates. Every op of a rank runs in the rank's
/// own thread, in order of submission.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MeasuredMachine {
    /// Number of cores that all ranks share.
    pub cores: f64,
    /// The speed of one rank's threads together, in cores.
    pub threads: f64,
    /// Rates of matrix products on one core, for 16-bit and 32-bit storage.
    pub gemm: [Rates; 2],
    /// Rates of attention on one core, forward and backward.
    pub attention: [Rates; 2],
    /// By name of an op: bytes per second on one core, for 16-bit and 32-bit storage.
    pub ops: Vec<(String, [f64; 2])>,
    /// Bytes per second on one core of any other op.
    pub other: f64,
    /// Seconds of every op in addition.
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
