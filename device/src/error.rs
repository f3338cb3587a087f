//! Errors of a device. A lane keeps its first error, and the next blocking call returns it.

use crate::Arena;
use std::panic::Location;

/// The source line that submitted an op.
pub type Site = &'static Location<'static>;

/// The reason why a rank stopped.
#[derive(Clone, Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages name the fields")]
pub enum Error {
    /// The shapes, types or lane of an op do not fit.
    #[error("{op} at {site}: {problem}")]
    Op { op: &'static str, site: Site, problem: String },
    /// A tensor is outside the plan.
    #[error("{op} at {site}: bytes {start}..{end} of `{tensor}` lie outside what was planned")]
    OutOfPlan { op: &'static str, site: Site, tensor: String, start: u64, end: u64 },
    /// Two operands of one op share bytes, and the op writes one of them.
    #[error("{op} at {site}: `{first}` and `{second}` overlap")]
    Overlap { op: &'static str, site: Site, first: String, second: String },
    /// Two ops access the same bytes, and no event orders them.
    #[error(transparent)]
    Hazard(#[from] Box<Hazard>),
    /// The plan does not fit the memory limit.
    #[error(transparent)]
    OutOfMemory(#[from] Box<OutOfMemory>),
    /// The machine refused host memory.
    #[error("this machine does not give {} for the {arena} memory of rank {rank}", topology::format_bytes(*wanted))]
    HostMemory { rank: usize, arena: Arena, wanted: u64 },
    /// The machine refused to start a thread.
    #[error(
        "no thread for {whom}: {problem}; raise the limit of processes (`ulimit -u`, or the container's)"
    )]
    NoThread { whom: String, problem: String },
    /// A host task or a kernel returned an error.
    #[error("rank {rank}: {op} at {site}: {problem}")]
    Task { rank: usize, op: &'static str, site: Site, problem: String },
    /// A host task or a kernel panicked.
    #[error("rank {rank}: {op} at {site} panicked: {problem}")]
    Panicked { rank: usize, op: &'static str, site: Site, problem: String },
    /// Ranks entered the same meeting with different collectives.
    #[error("rank {rank}: {op} at {site}: peers disagree: {problem}")]
    Mismatch { rank: usize, op: &'static str, site: Site, problem: String },
    /// Ranks did not reach a collective in time.
    #[error("rank {rank}: {op} at {site}: no answer for {seconds} s from rank(s) {missing:?}")]
    Timeout { rank: usize, op: &'static str, site: Site, seconds: u64, missing: Vec<usize> },
    /// Another rank failed.
    #[error("rank {rank} failed in step {step}: {cause}")]
    PeerFailed { rank: usize, step: u64, cause: String },
    /// The rank's thread returned or panicked before `finish`.
    #[error("the thread of rank {rank} ended in step {step}: {why}")]
    RankDied { rank: usize, step: u64, why: String },
    /// Copies of a parameter differ between the ranks of a TP group, but must be equal.
    #[error("rank {rank}: its copy of `{param}` differs from that of the group's first rank")]
    Replica { rank: usize, param: String },
    /// An event belongs to another device.
    #[error("{site}: an event of another device")]
    ForeignEvent { site: Site },
    /// A GPU failed an op, or a wait found the GPU broken.
    #[error("rank {rank}, GPU {gpu}: {op} at {site}: {problem}")]
    Gpu { rank: usize, gpu: usize, op: &'static str, site: Site, problem: String },
    /// A GPU could not be prepared.
    #[error("rank {rank}, GPU {gpu}: {problem}")]
    GpuSetup { rank: usize, gpu: usize, problem: String },
    /// There is no GPU to train on.
    #[error("CUDA cannot be used here: {problem}")]
    NoCuda { problem: String },
    /// The backend holds no data.
    #[error("this backend holds no data")]
    NoData,
    /// A rank of another process failed.
    #[error(transparent)]
    Remote(Box<RemoteFailure>),
    /// A process has sent nothing for too long: it has crashed, is stopped, or cannot be reached.
    #[error("no sign of life for {seconds} s from process {process} on {node}, which has {ranks}")]
    Silent { process: usize, node: String, ranks: String, seconds: u64 },
    /// A process ended before the run.
    #[error(
        "process {process} on {node}, which has {ranks}, has ended before the run; it says why"
    )]
    Gone { process: usize, node: String, ranks: String },
}

/// A failure in another process.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{cause} (process {process} on {node})")]
pub struct RemoteFailure {
    /// Number of the process.
    pub process: usize,
    /// Name of the process's machine.
    pub node: String,
    /// The kind of the failure.
    pub kind: ErrorKind,
    /// The failure in words.
    pub cause: String,
}

/// The kinds of failures that a caller treats differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// A rank or a process failed.
    Rank,
    /// The memory of a GPU is too small.
    DeviceMemory,
    /// The machine's memory is too small.
    HostMemory,
    /// The program has a bug.
    Bug,
    /// There is no GPU.
    NoCuda,
    /// The host task or kernel of this name failed.
    Task(&'static str),
}

impl Error {
    /// The kind of the failure.
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::OutOfMemory(_) => ErrorKind::DeviceMemory,
            Self::HostMemory { .. } => ErrorKind::HostMemory,
            Self::Op { .. }
            | Self::OutOfPlan { .. }
            | Self::Overlap { .. }
            | Self::Hazard(_)
            | Self::ForeignEvent { .. }
            | Self::NoData => ErrorKind::Bug,
            Self::NoCuda { .. } => ErrorKind::NoCuda,
            Self::Task { op, .. } => ErrorKind::Task(op),
            Self::Remote(elsewhere) => elsewhere.kind,
            _ => ErrorKind::Rank,
        }
    }
}

impl ErrorKind {
    const PLAIN: [Self; 5] =
        [Self::Rank, Self::DeviceMemory, Self::HostMemory, Self::Bug, Self::NoCuda];

    /// The number of the kind, and the name of its task.
    pub(crate) fn parts(self) -> (u8, &'static str) {
        let number = Self::PLAIN.iter().position(|plain| *plain == self);
        let number = number.unwrap_or(Self::PLAIN.len());
        (number as u8, if let Self::Task(op) = self { op } else { "" })
    }

    pub(crate) fn from_parts(number: u8, op: &'static str) -> Option<Self> {
        let number = usize::from(number);
        let task = (number == Self::PLAIN.len()).then_some(Self::Task(op));
        Self::PLAIN.get(number).copied().or(task)
    }
}

/// Two ops access the same bytes, and no event orders them.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{op} on {lane} at {site} {what} `{tensor}` bytes {start}..{end}: {problem}")]
pub struct Hazard {
    /// The later op.
    pub op: &'static str,
    /// Lane of the later op, or `main` for the rank's own thread.
    pub lane: String,
    /// Source line that submitted the later op.
    pub site: Site,
    /// Verb for the access of the later op: `reads` or `overwrites`.
    pub what: &'static str,
    /// Name of the tensor in the plan.
    pub tensor: String,
    /// First byte of the range in the arena.
    pub start: u64,
    /// Byte after the range.
    pub end: u64,
    /// The earlier access, its op, and the line that submitted the op.
    pub problem: String,
}

/// The plan does not fit the memory limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutOfMemory {
    /// Rank that owns the memory.
    pub rank: usize,
    /// Arena that is too small.
    pub arena: Arena,
    /// Bytes that the plan needs.
    pub wanted: u64,
    /// Bytes that are available.
    pub limit: u64,
    /// Bytes used before the first tensor that did not fit, and that tensor's name.
    pub free_at: (u64, String),
    /// Bytes by pool, largest first.
    pub pools: Vec<(&'static str, u64)>,
}

impl std::error::Error for OutOfMemory {}

impl std::fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { rank, arena, wanted, limit, free_at: (taken, tensor), pools } = self;
        let size = topology::format_bytes;
        if wanted <= limit {
            write!(
                f,
                "out of {arena} memory on rank {rank}: {} were refused although {} were free; another process may have \
                 taken them meanwhile, or no piece of memory is so large\n  by pool:",
                size(*wanted),
                size(*limit)
            )?;
        } else {
            write!(
                f,
                "out of {arena} memory on rank {rank}: wanted {}, limit {}, {} too much\n  \
                 `{tensor}` is the first that does not fit ({} were free); by pool:",
                size(*wanted),
                size(*limit),
                size(wanted - limit),
                size(limit.saturating_sub(*taken))
            )?;
        }
        for (pool, bytes) in pools {
            write!(f, "\n  {:>12}  {pool}", size(*bytes))?;
        }
        Ok(())
    }
}
