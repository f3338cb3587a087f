//! The host's memory, node by node: reading, writing, copying, and changing in place.

use super::adam::median;
use super::on_host;
use device::{Arena, Dtype, Error, HostContext, HostOp, HostTask, Lane, Mode, Plan, Tensor};
use rayon::prelude::*;
use serde::Serialize;
use std::time::Instant;
use topology::Machine;

/// One node, in 10^9 bytes a second of its own cores on its own memory.
#[derive(Clone, Debug, Serialize)]
pub struct NodeMemory {
    /// The number that Linux gives it; `None` where the machine cannot be looked at.
    pub node: Option<u32>,
    /// Of all its cores that this process may use.
    pub threads: usize,
    /// Bytes read.
    pub read: f64,
    /// Bytes written.
    pub write: f64,
    /// Bytes read and bytes written.
    pub copy: f64,
    /// Bytes read and bytes written in place.
    pub rmw: f64,
}

const ROUNDS: usize = 7;

/// Elements that a thread takes at a time.
const PIECE: usize = 1 << 16;

#[derive(Clone, Copy, Debug)]
enum Pass {
    Read,
    Write,
    Copy,
    Change,
}

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
        let mut work = move || match pass {
            Pass::Read => {
                let sum: f32 = from.par_chunks(PIECE).map(sum).sum();
                std::hint::black_box(sum);
            }
            Pass::Write => to.par_chunks_mut(PIECE).for_each(|piece| piece.fill(1.0)),
            Pass::Copy => {
                let pairs = to.par_chunks_mut(PIECE).zip(from.par_chunks(PIECE));
                pairs.for_each(|(to, from)| to.copy_from_slice(from));
            }
            Pass::Change => to.par_chunks_mut(PIECE).for_each(|piece| {
                piece.iter_mut().for_each(|x| *x += 1.0);
            }),
        };
        match host.pool() {
            Some(pool) => pool.install(work),
            None => work(),
        }
        Ok(())
    }
}

/// In lanes, so that the additions are not one long chain.
fn sum(piece: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 64];
    for run in piece.chunks(lanes.len()) {
        lanes.iter_mut().zip(run).for_each(|(lane, x)| *lane += x);
    }
    lanes.iter().sum()
}

/// Every node with arrays of `bytes`.
///
/// # Errors
/// No memory.
pub fn memory(bytes: u64) -> Result<Vec<NodeMemory>, Error> {
    let Ok(machine) = Machine::discover() else {
        return Ok(vec![node(None, Vec::new(), bytes)?]);
    };
    let allowed = |cpu: &u32| machine.allowed_cpus.contains(cpu);
    let nodes = machine
        .numa_nodes
        .iter()
        .map(|node| (node.id, node.cpus.iter().copied().filter(allowed).collect::<Vec<u32>>()));
    nodes
        .filter(|(_, cpus)| !cpus.is_empty())
        .map(|(id, cpus)| node(Some(id), cpus, bytes))
        .collect()
}

fn node(id: Option<u32>, cpus: Vec<u32>, bytes: u64) -> Result<NodeMemory, Error> {
    let threads = if cpus.is_empty() { crate::places::cores() } else { cpus.len() };
    let mut plan = Plan::default();
    let mut array = |name: &str| {
        let at = (Arena::Pinned, "of the measurement");
        plan.tensor(at, name, Dtype::F32, (1, (bytes / 4) as usize))
    };
    let (from, to) = (array("a"), array("b"));
    let place = id.map(|id| (id, cpus));
    let dev = on_host(plan, (threads, false), false, place.as_slice())?;
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
