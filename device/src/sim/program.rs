//! What one rank submits, as recorded: the very step, with sizes instead of data.

use crate::lane::join;
use crate::{
    Admitted, Arena, Device, Entry, Error, Event, Executor, Group, LANES, Lane, Mode, Op, Plan,
    Rank, Tensor,
};
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

/// By lane, how many of its ops are over.
pub(super) type Ticks = [u32; LANES];

/// What an op asks of the hardware.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Work {
    /// The op's name.
    pub name: &'static str,
    /// What limits it.
    pub kind: Kind,
    /// Multiplications and additions of the dense work.
    pub flops: f64,
    /// Bytes read plus bytes written; of a copy or a collective: the payload.
    pub bytes: u64,
    /// Operands are stored in 32 bits.
    pub wide: bool,
    /// Of a copy to or from the host.
    pub cargo: Cargo,
}

/// What a copy between host and device carries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Cargo {
    /// Parameters, or anything small.
    #[default]
    Other,
    /// Gradients, or their sum so far.
    Gradient,
    /// What is kept of a block for the backward pass.
    Checkpoint,
}

/// Ops by what limits them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// (m, k) times (k, n).
    Gemm {
        /// Rows of the result.
        m: usize,
        /// Columns of the result.
        n: usize,
        /// Terms of each sum.
        k: usize,
        /// A bias is added to its rows.
        bias: bool,
    },
    /// Causal attention over so many pairs of a query and a key (B H T T).
    Attention {
        /// B H T T
        scores: u64,
        /// Whether it is the gradient's.
        backward: bool,
    },
    /// Any other kernel of the GPU.
    Kernel,
    /// Up to the device.
    Up,
    /// Down to the host.
    Down,
    /// Among ranks, on the GPUs' links.
    Collective {
        /// Who takes part.
        group: Group,
        /// How often the payload crosses a link, in units of (n - 1) / n: 2 for an all-reduce.
        rounds: u8,
    },
    /// Among ranks, by the host's threads.
    Meeting {
        /// Who takes part.
        group: Group,
    },
    /// Work of the host's cores.
    Host,
}

impl Kind {
    /// Ranks meet for it.
    pub const fn is_collective(self) -> bool {
        self.group().is_some()
    }

    /// The ranks it needs.
    pub(super) const fn group(self) -> Option<Group> {
        match self {
            Self::Collective { group, .. } | Self::Meeting { group } => Some(group),
            _ => None,
        }
    }
}

impl Work {
    fn of(op: &Op, plan: &Plan) -> Self {
        let payload = |x: Tensor| x.bytes();
        let (kind, bytes) = match *op {
            Op::Gemm { a, b, bias, .. } => {
                let ((m, k), (_, n)) = (a.shape(), b.shape());
                (Kind::Gemm { m, n, k, bias: bias.is_some() }, op.bytes())
            }
            Op::Attention { lse, heads, .. } => {
                let scores = (lse.len() * heads.seq_len) as u64;
                (Kind::Attention { scores, backward: false }, op.bytes())
            }
            Op::AttentionBackward { lse, heads, .. } => {
                let scores = (lse.len() * heads.seq_len) as u64;
                (Kind::Attention { scores, backward: true }, op.bytes())
            }
            Op::Copy { src, dst } => match (src.arena(), dst.arena()) {
                (Arena::Pinned, Arena::Device) => (Kind::Up, payload(src)),
                (Arena::Device, Arena::Pinned) => (Kind::Down, payload(src)),
                (Arena::Device, Arena::Device) => (Kind::Kernel, op.bytes()),
                (Arena::Pinned, Arena::Pinned) => (Kind::Host, op.bytes()),
            },
            Op::AllReduce { x, group, .. } if x.arena() == Arena::Pinned => {
                (Kind::Meeting { group }, payload(x))
            }
            Op::AllReduce { x, group, .. } => (Kind::Collective { group, rounds: 2 }, payload(x)),
            Op::ReduceScatter { x, group }
            | Op::AllGather { x, group }
            | Op::Broadcast { x, group, .. } => (Kind::Collective { group, rounds: 1 }, payload(x)),
            Op::Host { .. } => (Kind::Host, op.bytes()),
            _ => (Kind::Kernel, op.bytes()),
        };
        let cargo = match *op {
            Op::Copy { src, .. } if kind == Kind::Up => cargo(plan, src),
            Op::Copy { dst, .. } if kind == Kind::Down => cargo(plan, dst),
            _ => Cargo::Other,
        };
        Self { name: op.name(), kind, flops: op.flops(), bytes, wide: is_wide(op), cargo }
    }

    fn key(&self) -> Key {
        (self.name, self.kind, self.flops.to_bits(), self.bytes, self.wide, self.cargo)
    }
}

type Key = (&'static str, Kind, u64, u64, bool, Cargo);

/// By the pool of its place on the host.
fn cargo(plan: &Plan, on_host: Tensor) -> Cargo {
    let at = on_host.range().start;
    let holds = |e: &&Entry| e.arena == Arena::Pinned && e.range.contains(&at);
    match plan.entries().iter().find(holds).map(|e| e.pool) {
        Some("checkpoint staging") => Cargo::Checkpoint,
        Some("gradient staging" | "gradient sums") => Cargo::Gradient,
        _ => Cargo::Other,
    }
}

fn is_wide(op: &Op) -> bool {
    let mut first = None;
    op.accesses(&mut |_: Mode, t: Tensor| first = first.or(Some(t.dtype().bytes() >= 4)));
    first.unwrap_or(false)
}

/// One op of the program.
#[derive(Clone, Copy, Debug)]
pub(super) struct Node {
    /// Into [`Program::works`].
    pub(super) work: u32,
    pub(super) lane: Lane,
    /// What must be over before it starts, beside the op before it on its lane.
    pub(super) after: Ticks,
}

/// What one rank does, in order of submission.
#[derive(Clone, Debug, Default)]
pub struct Program {
    pub(super) works: Vec<Work>,
    pub(super) nodes: Vec<Node>,
    /// What the rank's own thread had seen over when each step began, and at the end.
    pub(super) steps: Vec<Ticks>,
}

impl Program {
    /// Every op with its lane, in order of submission.
    pub fn ops(&self) -> impl Iterator<Item = (Lane, &Work)> {
        self.nodes.iter().map(|node| (node.lane, &self.works[node.work as usize]))
    }

    /// Steps that were recorded.
    pub fn steps(&self) -> usize {
        self.steps.len().saturating_sub(1)
    }
}

/// What the device writes to while the program is submitted.
#[derive(Debug, Default)]
struct Recording {
    program: Program,
    by_key: HashMap<Key, u32>,
    /// Per lane: what its next op waits for.
    pending: [crate::lane::Clock; LANES],
    /// What the rank's thread has seen over.
    main: crate::lane::Clock,
}

#[derive(Debug)]
struct Recorder(Rc<RefCell<Recording>>, Arc<Plan>);

/// Runs `submit` on a device that records, and returns what it submitted. `submit` begins each step with
/// [`Device::begin_step`] and waits for its end.
///
/// # Errors
/// Of the device's own checks, or of `submit`.
pub fn record(
    rank: Rank,
    plan: &Arc<Plan>,
    submit: impl FnOnce(&Device) -> Result<(), Error>,
) -> Result<Program, Error> {
    let recording = Rc::new(RefCell::new(Recording::default()));
    let recorder = Box::new(Recorder(Rc::clone(&recording), Arc::clone(plan)));
    let dev = Device::new(rank, Arc::clone(plan), recorder);
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
    fn submit(&self, Admitted { op, lane, .. }: Admitted) {
        let r = &mut *self.0.borrow_mut();
        let work = Work::of(&op, &self.1);
        let next = r.program.works.len() as u32;
        let index = *r.by_key.entry(work.key()).or_insert(next);
        if index == next {
            r.program.works.push(work);
        }
        let mut after = r.pending[lane as usize];
        join(&mut after, &r.main);
        after[lane as usize] = 0;
        let after = after.map(|tick| tick as u32);
        r.program.nodes.push(Node { work: index, lane, after });
    }

    fn wait(&self, lane: Lane, event: &Event) {
        join(&mut self.0.borrow_mut().pending[lane as usize], &event.clock);
    }

    fn sync(&self, lane: Lane, tick: u64) -> Result<(), Error> {
        let main = &mut self.0.borrow_mut().main[lane as usize];
        *main = (*main).max(tick);
        Ok(())
    }

    fn begin_step(&self, _: u64) {
        self.0.borrow_mut().mark_step();
    }

    fn write(&self, _: Tensor, _: &dyn Fn(usize) -> f64) -> Result<(), Error> {
        Ok(())
    }

    fn fail(&self, _: u64, _: &Error) {}

    fn finish(&self) {}
}
