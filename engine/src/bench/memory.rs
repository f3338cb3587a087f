//! The host's memory, node by node: reading, writing, copying, and changing in place.

use super::adam::median;
use super::on_host;
use crate::run::open::kernel_crew;
use device::numerics::{Pass, sweep};
use device::{
    Arena, Crew, Dtype, Error, HostContext, HostOp, HostTask, Lane, Mode, Pieces, Plan, Tensor,
};
use serde::Serialize;
use std::io;
use std::sync::Arc;
use std::time::Instant;
use topology::cores;
use topology::{Machine, NumaNode};

/// One node, in 10^9 bytes a second of its own cores on its own memory.
#[derive(Clone, Debug, Serialize)]
pub struct NodeMemory {
    /// The number that Linux gives it; `None` where the machine cannot be looked at.
    pub node: Option<u32>,
    /// Of all its cores that this process may use.
    pub threads: usize,
    /// Bytes read.
    pub read: f64,
    /// Bytes written, past the caches.
    pub write: f64,
    /// Bytes read and bytes written, these past the caches.
    pub copy: f64,
    /// Bytes read and bytes written in place.
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
        host.share(Arrays(from, to), &|Arrays(from, to)| sweep(pass, from, to));
        Ok(())
    }
}

/// One of them may be empty.
struct Arrays<'a>(&'a [f32], &'a mut [f32]);

impl Pieces for Arrays<'_> {
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

/// A node by Linux's number, and its CPUs that this process may use; neither where the machine cannot be looked at.
pub(super) type Node = (Option<u32>, Vec<u32>);

/// Every node that has such CPUs.
pub(super) fn nodes() -> Vec<Node> {
    let Ok(machine) = Machine::discover() else { return vec![(None, Vec::new())] };
    let allowed = |cpu: &u32| machine.allowed_cpus.contains(cpu);
    let of = |node: &NumaNode| -> Node {
        (Some(node.id), node.cpus.iter().copied().filter(allowed).collect())
    };
    machine.numa_nodes.iter().map(of).filter(|(_, cpus)| !cpus.is_empty()).collect()
}

/// `work` in a thread on the CPUs of `node`, with a crew of all of them, and what [`on_host`] asks for memory there. Where
/// binding is refused it is wherever it is.
pub(super) fn on_node<T: Send>(
    (id, cpus): &Node,
    work: impl FnOnce(Option<Arc<Crew>>, &[(u32, Vec<u32>)]) -> Result<T, Error> + Send,
) -> Result<T, Error> {
    let threads = if cpus.is_empty() { cores() } else { cpus.len() };
    let run = || {
        if !cpus.is_empty() {
            // The crew's first thread; the others bind themselves.
            let _ = topology::bind_current_thread(cpus);
        }
        let place = id.map(|id| (id, cpus.clone()));
        let crew = kernel_crew(threads, place.as_ref().map(|(_, cpus)| cpus.clone()));
        work(crew, place.as_slice())
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

/// Every node with arrays of `bytes`.
///
/// # Errors
/// No memory.
pub fn memory(bytes: u64) -> Result<Vec<NodeMemory>, Error> {
    nodes().iter().map(|of| on_node(of, |crew, place| node(crew, place, bytes))).collect()
}

/// One core of the first node, with arrays of `bytes`.
///
/// # Errors
/// No memory.
pub(super) fn one_core(bytes: u64) -> Result<NodeMemory, Error> {
    let Some((id, mut cpus)) = nodes().into_iter().next() else {
        unreachable!("this process runs on a CPU, which is of a node")
    };
    cpus.truncate(1);
    on_node(&(id, cpus), |_, place| node(None, place, bytes))
}

fn node(
    crew: Option<Arc<Crew>>,
    place: &[(u32, Vec<u32>)],
    bytes: u64,
) -> Result<NodeMemory, Error> {
    let id = place.first().map(|(id, _)| *id);
    let threads = crew.as_ref().map_or(1, |crew| crew.threads());
    let mut plan = Plan::default();
    let mut array = |name: &str| {
        let at = (Arena::Pinned, "of the measurement");
        plan.tensor(at, name, Dtype::F32, (1, (bytes / 4) as usize))
    };
    let (from, to) = (array("a"), array("b"));
    let dev = on_host(plan, crew, false, place)?;
    [from, to].iter().try_for_each(|t| dev.write(*t, &|_| 1.0))?;
    let rate = |pass, moved: u64| {
        let op = HostOp::new(Sweep { pass, from, to });
        let mut seconds = Vec::new();
        for round in 0..=ROUNDS {
            let started = Instant::now();
            dev.submit_host(&op, 0);
            dev.sync(dev.record(Lane::Host))?;
            if round > 0 {
                seconds.push(started.elapsed().as_secs_f64());
            }
        }
        Ok::<f64, Error>((moved * from.bytes()) as f64 / median(&seconds) / 1e9)
    };
    let (read, write) = (rate(Pass::Read, 1)?, rate(Pass::Write, 1)?);
    let (copy, rmw) = (rate(Pass::Copy, 2)?, rate(Pass::Change, 2)?);
    dev.finish()?;
    Ok(NodeMemory { node: id, threads, read, write, copy, rmw })
}
