//! A described box, in plain numbers. Rates are per second: bytes, multiplications and additions.

pub(super) mod era;

use crate::{Group, Rank};
use era::AsOf2020;

/// GPUs of one kind.
#[derive(Clone, Debug, PartialEq)]
pub struct Gpu {
    /// Of 16-bit matrix products with fp32 sums, dense, as the data sheet says.
    pub flops_16: f64,
    /// Of fp32 arithmetic.
    pub flops_32: f64,
    /// Of its own memory.
    pub memory: f64,
    /// Multiprocessors.
    pub processors: usize,
    /// Attention of 16 bits on tensor cores (compute capability 8.0 and later); else its kernel works in fp32.
    pub fused_attention: bool,
    /// Software as the authors of ZeRO-Offload had it.
    pub as_of_2020: Option<AsOf2020>,
}

/// What a rank has.
#[derive(Clone, Debug, PartialEq)]
pub struct Seat {
    /// Which of the boxes.
    pub machine: usize,
    /// Links on its GPU's way to the host, into [`Hardware::links`].
    pub links: Vec<usize>,
    /// The node of its staging buffers, into [`Hardware::nodes`].
    pub staging: usize,
    /// The nodes of its optimizer states.
    pub states: Vec<usize>,
    /// Cores that work for it alone.
    pub cores: f64,
}

/// What the ranks run on.
#[derive(Clone, Debug, PartialEq)]
pub struct Hardware {
    /// All GPUs are alike.
    pub gpu: Gpu,
    /// PCIe links: bytes each way.
    pub links: Vec<f64>,
    /// NUMA nodes: bytes of their memory channels.
    pub nodes: Vec<f64>,
    /// Bytes that one core can read and write.
    pub core_memory: f64,
    /// Bytes between the GPUs of two ranks by NVLink; 0: none.
    pub nvlink: Vec<Vec<f64>>,
    /// Bytes each way between a box and the others.
    pub network: f64,
    /// By rank.
    pub seats: Vec<Seat>,
    /// Data-parallel ranks.
    pub dp_size: usize,
    /// Collectives of both groups go through one stream, where both have several ranks: two communicators are not
    /// promised progress side by side.
    pub one_communication_stream: bool,
    /// Virtual GPUs: all work is that of a machine's cores.
    pub measured: Option<Measured>,
}

/// An op takes its arithmetic and its traffic, one after the other.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rates {
    /// Multiplications and additions.
    pub flops: f64,
    /// Bytes of operands.
    pub bytes: f64,
}

impl Rates {
    /// Seconds of so much of both; a rate of 0 is no limit.
    pub(super) fn seconds(self, flops: f64, bytes: f64) -> f64 {
        let part = |amount: f64, rate: f64| if rate > 0.0 { amount / rate } else { 0.0 };
        part(flops, self.flops) + part(bytes, self.bytes)
    }
}

/// A machine whose cores stand in for GPUs, as measured on it. Every op of a rank runs in its own thread, in order
/// of submission.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Measured {
    /// Cores that all ranks share.
    pub cores: f64,
    /// As how many cores those of one rank work together.
    pub threads: f64,
    /// Matrix products of one core, 16-bit and 32-bit storage.
    pub gemm: [Rates; 2],
    /// Attention of one core, forward and backward.
    pub attention: [Rates; 2],
    /// By name of an op: bytes of one core, 16-bit and 32-bit storage.
    pub ops: Vec<(String, [f64; 2])>,
    /// Bytes of one core in any other op.
    pub other: f64,
    /// Seconds that any op takes.
    pub overhead: f64,
    /// Seconds until a rank's threads share an op.
    pub threads_start: f64,
    /// Seconds until ranks have met.
    pub meeting: f64,
}

impl Hardware {
    /// Members of every group of a kind, by group.
    pub(super) fn groups(ranks: &[Rank], group: Group) -> Vec<Vec<usize>> {
        let key = |rank: &Rank| match group {
            Group::Tp => rank.dp,
            Group::Dp => rank.tp,
            Group::World => 0,
        };
        let mut groups: Vec<Vec<usize>> = Vec::new();
        for rank in ranks {
            let key = key(rank);
            if groups.len() <= key {
                groups.resize(key + 1, Vec::new());
            }
            groups[key].push(rank.index());
        }
        groups
    }
}
