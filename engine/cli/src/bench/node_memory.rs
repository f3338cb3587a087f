//! Measures the memory of each NUMA node: reading, writing, copying, and changing in place.

use super::{median, open_on_host, rounds};
use device::numerics::{Pass, sweep};
use device::{
    Arena, Divisible, Dtype, Error, HostContext, HostOp, HostTask, Lane, Mode, Plan, Tensor,
    ThreadTeam,
};
use engine::run::devices::kernel_team;
use serde::Serialize;
use std::io;
use std::sync::Arc;
use topology::{Machine, NumaNode, cores};

/// Rates of one node's own cores on its own memory, in 10^9 bytes per second.
#[derive(Clone, Debug, Serialize)]
pub struct NodeMemory {
    /// Linux's number of the node; `None` if the machine cannot be examined.
    pub node: Option<u32>,
    /// Number of threads: one for each core of the node that this process may use.
    pub threads: usize,
    /// Rate of bytes read.
    pub read: f64,
    /// Rate of bytes written past the caches.
    pub write: f64,
    /// Rate of bytes read plus bytes written past the caches.
    pub copy: f64,
    /// Rate of bytes read plus bytes written in place.
    pub rmw: f64,
}

const ROUNDS: usize = 7;

/// Elements in a unit of work.
const PIECE: usize = 1 << 16;

#[derive(Debug)]
struct Sweep {
    pass: Pass,
    from: Tensor,
    to: Tensor,
}

impl HostTask for Sweep {
    fn name(&self) -> &'static str {
        "memory_sweep"
    }
    fn accesses(&self, visit: &mut dyn FnMut(Mode, Tensor)) {
        match self.pass {
            Pass::Read => visit(Mode::Read, self.from),
            Pass::Write => visit(Mode::Write, self.to),
            Pass::Copy => {
                visit(Mode::Read, self.from);
                visit(Mode::Write, self.to);
            }
            Pass::Change => visit(Mode::Update, self.to),
        }
    }
    fn run(&self, _: u64, host: &mut HostContext<'_>) -> Result<(), String> {
        let from = match self.pass {
            Pass::Read | Pass::Copy => host.read_as::<f32>(self.from)?,
            Pass::Write | Pass::Change => &[],
        };
        let to: &mut [f32] = match self.pass {
            Pass::Read => &mut [],
            _ => host.write_as::<f32>(self.to)?,
        };
        let pass = self.pass;
        host.parallel_for(Arrays(from, to), &|Arrays(from, to)| sweep(pass, from, to));
        Ok(())
    }
}

/// Source and target of a pass; either may be empty.
struct Arrays<'a>(&'a [f32], &'a mut [f32]);

impl Divisible for Arrays<'_> {
    fn units(&self) -> usize {
        self.0.len().max(self.1.len()).div_ceil(PIECE)
    }
    fn cut(self, units: usize) -> (Self, Self) {
        let (from, froms) = self.0.split_at(self.0.len().min(units * PIECE));
        let len = self.1.len().min(units * PIECE);
        let (to, tos) = self.1.split_at_mut(len);
        (Self(from, to), Self(froms, tos))
    }
}

/// A NUMA node. The default value means any node: for a machine that cannot be examined, or for
/// memory on no certain node.
#[derive(Clone, Debug, Default)]
pub(super) struct Node {
    /// Linux's number of the node.
    pub(super) id: Option<u32>,
    /// The CPUs of the node that this process may use.
    pub(super) cpus: Vec<u32>,
}

/// Every node with CPUs that this process may use.
pub(super) fn nodes() -> Vec<Node> {
    let Ok(machine) = Machine::discover() else { return vec![Node::default()] };
    let allowed = |cpu: &u32| machine.allowed_cpus.contains(cpu);
    let of = |node: &NumaNode| {
        let cpus = node.cpus.iter().copied().filter(allowed).collect();
        Node { id: Some(node.id), cpus }
    };
    machine.numa_nodes.iter().map(of).filter(|node| !node.cpus.is_empty()).collect()
}

/// Runs `work` in a thread on the CPUs of `node`, with kernel threads on all of these CPUs. If the
/// system refuses to bind the threads, they run anywhere.
pub(super) fn on_node<T: Send>(
    node: &Node,
    work: impl FnOnce(Option<Arc<ThreadTeam>>) -> Result<T, Error> + Send,
) -> Result<T, Error> {
    let Node { id, cpus } = node;
    let threads = if cpus.is_empty() { cores() } else { cpus.len() };
    let run = || {
        if !cpus.is_empty() {
            // This is the first thread of the team; the others bind themselves.
            let _ = topology::bind_current_thread(cpus);
        }
        work(kernel_team(threads, id.map(|_| cpus.clone())))
    };
    std::thread::scope(|scope| {
        let whom =
            id.map_or_else(|| "the memory".into(), |id| format!("the memory of NUMA node {id}"));
        let started = std::thread::Builder::new().spawn_scoped(scope, run);
        let refused = |e: io::Error| Error::NoThread { whom, problem: e.to_string() };
        let done = started.map_err(refused)?.join();
        done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Measures every node with arrays of `bytes`.
///
/// # Errors
/// There is not enough memory.
pub fn memory(bytes: u64) -> Result<Vec<NodeMemory>, Error> {
    nodes().iter().map(|node| on_node(node, |team| measure(team, node, bytes))).collect()
}

/// Measures one core of the first node with arrays of `bytes`.
///
/// # Errors
/// There is not enough memory.
pub(super) fn one_core(bytes: u64) -> Result<NodeMemory, Error> {
    let Some(mut node) = nodes().into_iter().next() else {
        unreachable!("this process runs on a CPU, which is of a node")
    };
    node.cpus.truncate(1);
    on_node(&node, |_| measure(None, &node, bytes))
}

fn measure(team: Option<Arc<ThreadTeam>>, node: &Node, bytes: u64) -> Result<NodeMemory, Error> {
    let threads = team.as_ref().map_or(1, |team| team.threads());
    let mut plan = Plan::default();
    let mut array = |name: &str| {
        let at = (Arena::Pinned, "of the measurement");
        plan.tensor(at, name, Dtype::F32, (1, (bytes / 4) as usize))
    };
    let (from, to) = (array("a"), array("b"));
    let dev = open_on_host(plan, team, false, node)?;
    [from, to].iter().try_for_each(|t| dev.write(*t, &|_| 1.0))?;
    let rate = |pass, moved: u64| {
        let op = HostOp::new(Sweep { pass, from, to });
        let seconds = rounds(ROUNDS, || {
            dev.submit_host(&op, 0);
            dev.sync(dev.record(Lane::Host))
        })?;
        Ok::<f64, Error>((moved * from.bytes()) as f64 / median(&seconds) / 1e9)
    };
    let (read, write) = (rate(Pass::Read, 1)?, rate(Pass::Write, 1)?);
    let (copy, rmw) = (rate(Pass::Copy, 2)?, rate(Pass::Change, 2)?);
    dev.finish()?;
    Ok(NodeMemory { node: node.id, threads, read, write, copy, rmw })
}
