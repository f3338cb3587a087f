//! The recorded ops of one rank: the real step, with sizes instead of data.

use device::cuda::testing::launches;
use device::{
    AdmittedOp, Arena, Cargo, DeltaHeads, Device, Dtype, Entry, Error, Event, Executor, Group,
    GroupedForm, Heads, LANES, Lane, Mode, Op, Plan, Rank, Scores, Tensor, join,
};
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

/// Number of finished ops by lane.
pub(super) type Ticks = [u32; LANES];

/// The demands of an op on the hardware.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Work {
    /// The op's name.
    pub name: &'static str,
    /// Kind of the op, by the resource that limits it.
    pub kind: WorkKind,
    /// Multiplications and additions of the dense work.
    pub flops: f64,
    /// Bytes read plus bytes written; for a copy or a collective, the bytes of the payload.
    pub bytes: u64,
    /// Whether the operands have 32 bits.
    pub wide: bool,
    /// The data of a copy to or from the host.
    pub cargo: Cargo,
    /// Number of driver calls that enqueue the op; 0 for an op of the Host lane.
    pub calls: u32,
    /// Name and bytes of the separate op for a matmul's epilogue, if it cannot be fused.
    pub separate_op: Option<(&'static str, u64)>,
}

/// Kinds of ops by the resource that limits them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WorkKind {
    /// A matmul of (m, k) and (k, n).
    Gemm {
        /// Rows of the result.
        m: usize,
        /// Columns of the result.
        n: usize,
        /// Terms of each sum.
        k: usize,
        /// Whether a bias is added to the rows of the result.
        bias: bool,
    },
    /// A matmul for each expert of a mixture of experts. Rows of an expert are data: the costs assume a
    /// division (`device.expert_load`).
    GroupedGemm {
        /// Kind of the matmuls.
        form: GroupedForm,
        /// Rows of all experts.
        rows: usize,
        /// Number of experts.
        experts: usize,
        /// Rows and columns of an expert's matrix.
        shape: (usize, usize),
    },
    /// Causal attention.
    Attention {
        /// Pairs of a query and a key, B H T T.
        scores: u64,
        /// T, tokens per sample.
        seq_len: usize,
        /// Number of keys that a query sees, if it is less than T.
        window: Option<usize>,
        /// Columns of a head.
        head_dim: usize,
        /// Whether scores have a cap.
        capped: bool,
        /// Whether it is the backward pass.
        backward: bool,
    },
    /// The gated delta rule.
    DeltaRule {
        /// Blocks that go through the chunks of a sample: one for each head of values and 32 of its
        /// columns.
        blocks: usize,
        /// Whether all values are bf16.
        bf16: bool,
        /// Whether it is the backward pass.
        backward: bool,
    },
    /// Any other kernel of the GPU.
    Kernel,
    /// A copy to the device.
    Up,
    /// A copy to the host.
    Down,
    /// A collective on the GPUs' links.
    Collective {
        /// Group of ranks.
        group: Group,
        /// Number of times that the payload crosses a link, in units of (n - 1) / n: 2 for an
        /// all-reduce.
        rounds: u8,
    },
    /// A collective of the host's threads.
    Meeting {
        /// Group of ranks.
        group: Group,
    },
    /// Work of the host's cores.
    Host,
}

impl WorkKind {
    /// Whether ranks meet for the op.
    pub const fn is_collective(self) -> bool {
        self.group().is_some()
    }

    /// Whether ranks meet for the op on their streams, not on the Host lane.
    pub(super) const fn is_on_streams(self) -> bool {
        matches!(self, Self::Collective { .. })
    }

    /// The group of a collective or meeting.
    pub(super) const fn group(self) -> Option<Group> {
        match self {
            Self::Collective { group, .. } | Self::Meeting { group } => Some(group),
            _ => None,
        }
    }
}

fn attention([out, lse]: [Tensor; 2], heads: Heads, scores: Scores, backward: bool) -> WorkKind {
    let (seq_len, head_dim) = (heads.seq_len, out.len() / lse.len());
    let (window, capped) = (scores.window_in(seq_len), scores.cap.is_some());
    let scores = (lse.len() * seq_len) as u64;
    WorkKind::Attention { scores, seq_len, window, head_dim, capped, backward }
}

fn delta_rule(qkv: Tensor, out: Tensor, heads: DeltaHeads, backward: bool) -> WorkKind {
    let samples = qkv.shape().0 / heads.seq_len;
    let blocks = samples * heads.values * heads.value_dim.div_ceil(32);
    let bf16 = [qkv, out].iter().all(|t| t.dtype() == Dtype::Bf16);
    WorkKind::DeltaRule { blocks, bf16, backward }
}

/// Number of kernels of `op` on a recent GPU; 1 for an op without kernel, which its own checks
/// refuse.
fn kernels(op: &Op) -> u32 {
    launches(op, &|x| x.range().start, 0, 90).map_or(1, |launches| launches.iter().count() as u32)
}

/// Number of driver calls that enqueue `op`.
fn calls(op: &Op, kind: WorkKind, rank: Rank) -> u32 {
    match kind {
        WorkKind::Gemm { .. } | WorkKind::Up | WorkKind::Down => 1,
        WorkKind::Attention { .. }
        | WorkKind::GroupedGemm { .. }
        | WorkKind::DeltaRule { .. }
        | WorkKind::Kernel => kernels(op),
        // The collective's own call, and an event before and after the call for the watchdog.
        WorkKind::Collective { group, .. } if rank.within(group).1 > 1 => 3,
        WorkKind::Collective { .. } | WorkKind::Meeting { .. } | WorkKind::Host => 0,
    }
}

impl Work {
    fn of(op: &Op, plan: &Plan) -> Self {
        let payload = |x: Tensor| x.bytes();
        let (kind, bytes) = match *op {
            Op::Gemm { a, b, bias, .. } | Op::ScaledGemm { a, b, bias, .. } => {
                let ((m, k), (_, n)) = (a.shape(), b.shape());
                (WorkKind::Gemm { m, n, k, bias: bias.is_some() }, op.bytes())
            }
            Op::GroupedGemm { form, a, experts, .. } => {
                let (rows, experts, shape) = (a.shape().0, experts.count, experts.shape);
                (WorkKind::GroupedGemm { form, rows, experts, shape }, op.bytes())
            }
            Op::Attention { out, lse, heads, scores, .. } => {
                (attention([out, lse], heads, scores, false), op.bytes())
            }
            Op::AttentionBackward { out, lse, heads, scores, .. } => {
                (attention([out, lse], heads, scores, true), op.bytes())
            }
            Op::DeltaRule { qkv, out, heads, .. } => {
                (delta_rule(qkv, out, heads, false), op.bytes())
            }
            Op::DeltaRuleBackward { qkv, d_out, heads, .. } => {
                (delta_rule(qkv, d_out, heads, true), op.bytes())
            }
            Op::Copy { src, dst } => match (src.arena(), dst.arena()) {
                (Arena::Pinned, Arena::Device) => (WorkKind::Up, payload(src)),
                (Arena::Device, Arena::Pinned) => (WorkKind::Down, payload(src)),
                (Arena::Device, Arena::Device) => (WorkKind::Kernel, op.bytes()),
                (Arena::Pinned, Arena::Pinned) => (WorkKind::Host, op.bytes()),
            },
            Op::AllReduce { x, group, .. } if x.arena() == Arena::Pinned => {
                (WorkKind::Meeting { group }, payload(x))
            }
            Op::AllReduce { x, group, .. } => {
                (WorkKind::Collective { group, rounds: 2 }, payload(x))
            }
            Op::ReduceScatter { x, group }
            | Op::AllGather { x, group }
            | Op::Broadcast { x, group, .. } => {
                (WorkKind::Collective { group, rounds: 1 }, payload(x))
            }
            Op::Host { .. } => (WorkKind::Host, op.bytes()),
            _ => (WorkKind::Kernel, op.bytes()),
        };
        let cargo = match *op {
            Op::Copy { src, .. } if kind == WorkKind::Up => cargo(plan, src),
            Op::Copy { dst, .. } if kind == WorkKind::Down => cargo(plan, dst),
            _ => Cargo::Other,
        };
        let separate_op = match *op {
            Op::Gemm { a, c, epilogue, .. } => epilogue.separate_op(a, c),
            _ => None,
        };
        let separate_op = separate_op.map(|op| (op.name(), op.bytes()));
        let (name, flops, wide) = (op.name(), op.flops(), is_wide(op));
        Self { name, kind, flops, bytes, wide, cargo, calls: 0, separate_op }
    }

    fn key(&self) -> Key {
        let flops = self.flops.to_bits();
        (self.name, self.kind, flops, self.bytes, self.wide, self.cargo, self.separate_op)
    }
}

type Key = (&'static str, WorkKind, u64, u64, bool, Cargo, Option<(&'static str, u64)>);

/// The cargo of a copy, by the pool of its host memory.
fn cargo(plan: &Plan, on_host: Tensor) -> Cargo {
    let at = on_host.range().start;
    let holds = |e: &&Entry| e.arena == Arena::Pinned && e.range.contains(&at);
    plan.entries().iter().find(holds).map_or(Cargo::Other, |e| e.pool.cargo)
}

fn is_wide(op: &Op) -> bool {
    let mut first = None;
    op.accesses(&mut |_: Mode, t: Tensor| first = first.or(Some(t.dtype().bytes() >= 4)));
    first.unwrap_or(false)
}

/// One op of the program.
#[derive(Clone, Copy, Debug)]
pub(super) struct Node {
    /// Index into [`Program::works`].
    pub(super) work: u32,
    pub(super) lane: Lane,
    /// Ops that finish before the node starts, in addition to the previous op on the lane.
    pub(super) after: Ticks,
    /// Number of driver calls for events recorded or waited for since the previous op.
    pub(super) calls: u16,
}

/// The ops of one rank, in order of submission.
#[derive(Clone, Debug, Default)]
pub struct Program {
    pub(super) works: Vec<Work>,
    pub(super) nodes: Vec<Node>,
    /// The finished ops that the rank's own thread had seen at the beginning of each step, and at
    /// the end.
    pub(super) steps: Vec<Ticks>,
    /// The waits of the rank's own thread.
    pub(super) syncs: Vec<Sync>,
}

/// A wait of the rank's thread for an op.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sync {
    /// The node that the thread submits next.
    pub(super) before: u32,
    pub(super) lane: Lane,
    pub(super) tick: u32,
}

impl Program {
    /// Every op with its lane, in order of submission.
    pub fn ops(&self) -> impl Iterator<Item = (Lane, &Work)> {
        self.nodes.iter().map(|node| (node.lane, &self.works[node.work as usize]))
    }

    /// Sets the cost of all ops of `name` to 0, since a step skips their work by a flag in memory.
    pub fn leave_out(&mut self, name: &str) {
        for work in self.works.iter_mut().filter(|work| work.name == name) {
            (work.flops, work.bytes) = (0.0, 0);
        }
    }

    /// Number of recorded steps.
    pub fn steps(&self) -> usize {
        self.steps.len().saturating_sub(1)
    }
}

/// The state of a recording.
#[derive(Debug, Default)]
struct Recording {
    program: Program,
    by_key: HashMap<Key, u32>,
    /// Clock for which the next op of each lane waits.
    pending: [device::Clock; LANES],
    /// The finished ops that the rank's thread has seen.
    main: device::Clock,
    /// Last op of each lane after which an event was recorded.
    marked: device::Clock,
    /// Number of driver calls since the last op.
    calls: u16,
}

#[derive(Debug)]
struct Recorder {
    recording: Rc<RefCell<Recording>>,
    plan: Arc<Plan>,
    rank: Rank,
    checked: bool,
}

/// Driver calls around a wait of Compute that may be long: they write the stream's progress
/// (`cuda/progress.rs`).
const TOLD_CALLS: u16 = 2;

/// Runs `submit` on a recording device, and returns the recorded program. `submit` begins each step
/// with [`Device::begin_step`] and waits for its end. If ops are not `checked`, their ranges,
/// overlaps and hazards are not checked, which halves the time.
///
/// # Errors
/// Returns an error of `submit` or, if ops are checked, of the device's own checks.
pub fn record(
    rank: Rank,
    plan: &Arc<Plan>,
    checked: bool,
    submit: impl FnOnce(&Device) -> Result<(), Error>,
) -> Result<Program, Error> {
    let recording = Rc::new(RefCell::new(Recording::default()));
    let plan_of_it = Arc::clone(plan);
    let recorder = Recorder { recording: Rc::clone(&recording), plan: plan_of_it, rank, checked };
    let dev = Device::new(rank, Arc::clone(plan), Box::new(recorder));
    submit(&dev)?;
    recording.borrow_mut().mark_step();
    dev.finish()?;
    let recording = std::mem::take(&mut *recording.borrow_mut());
    Ok(recording.program)
}

impl Recording {
    fn mark_step(&mut self) {
        let main = self.main.map(|tick| tick as u32);
        self.program.steps.push(main);
    }
}

impl Executor for Recorder {
    fn holds_data(&self) -> bool {
        false
    }

    fn is_checked(&self) -> bool {
        self.checked
    }

    fn submit(&self, AdmittedOp { op, lane, .. }: AdmittedOp) {
        let r = &mut *self.recording.borrow_mut();
        let mut work = Work::of(&op, &self.plan);
        let next = r.program.works.len() as u32;
        let index = *r.by_key.entry(work.key()).or_insert(next);
        if index == next {
            work.calls = calls(&op, work.kind, self.rank);
            r.program.works.push(work);
        }
        let mut after = r.pending[lane as usize];
        join(&mut after, &r.main);
        after[lane as usize] = 0;
        let after = after.map(|tick| tick as u32);
        let calls = std::mem::take(&mut r.calls);
        r.program.nodes.push(Node { work: index, lane, after, calls });
    }

    fn record(&self, lane: Lane, tick: u64) {
        let r = &mut *self.recording.borrow_mut();
        if lane != Lane::Host && r.marked[lane as usize] < tick {
            r.marked[lane as usize] = tick;
            r.calls = r.calls.saturating_add(1);
        }
    }

    fn wait(&self, lane: Lane, event: &Event) {
        let r = &mut *self.recording.borrow_mut();
        join(&mut r.pending[lane as usize], &event.clock);
        let long = lane == Lane::Compute && event.lane != Lane::TpComm as u8;
        // The Host lane's thread waits without a call.
        let calls = u16::from(lane != Lane::Host) + if long { TOLD_CALLS } else { 0 };
        r.calls = r.calls.saturating_add(calls);
    }

    fn sync(&self, lane: Lane, tick: u64) -> Result<(), Error> {
        let r = &mut *self.recording.borrow_mut();
        let main = &mut r.main[lane as usize];
        if *main < tick {
            *main = tick;
            let before = r.program.nodes.len() as u32;
            r.program.syncs.push(Sync { before, lane, tick: tick as u32 });
        }
        Ok(())
    }

    fn begin_step(&self, _: u64) {
        self.recording.borrow_mut().mark_step();
    }

    fn write(&self, _: Tensor, _: &dyn Fn(usize) -> f64) -> Result<(), Error> {
        Ok(())
    }

    fn fail(&self, _: u64, _: &Error) {}

    fn finish(&self) {}
}
