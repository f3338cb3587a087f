//! Measures work of several devices at the same time: collectives of GPUs by their size and by the number of
//! GPUs, the update on all cores, and the update during copies.

use super::adam::adam_on;
use super::copies::CopyDevice;
use super::node_memory::{nodes, on_node};
use super::{PATIENCE, REPEATS, Row, all_at_once, cases, place, timed};
use crate::single_rank::on_gpu;
use device::cuda::{self, Peers};
use device::{
    Arena, Communicator, Device, Dtype, Error, Group, HostPlace, Lane, Op, Plan, Reduction,
};
use layout::LocalMachine;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Rate of a collective, in 10^9 bytes per second.
#[derive(Clone, Debug, PartialEq)]
pub struct CollectiveRate {
    /// Name of the collective.
    pub op: &'static str,
    /// Number of GPUs.
    pub ranks: usize,
    /// Bytes of the buffer of each GPU.
    pub bytes: u64,
    /// Rate at which each GPU sends; it receives at the same rate.
    pub sent: f64,
}

/// Sizes of the collectives in bytes, before the largest one.
const SIZES: [u64; 2] = [1 << 20, 16 << 20];

/// Rates of collectives of 2, 4, .. and all `gpus` GPUs, of several sizes up to `most` bytes.
///
/// # Errors
/// A GPU or NCCL fails, or there is not enough memory.
pub(super) fn collective_rates(gpus: usize, most: u64) -> Result<Vec<CollectiveRate>, Error> {
    let mut all = Vec::new();
    for ranks in group_sizes(gpus) {
        all.extend(rates_of(ranks, most)?);
    }
    Ok(all)
}

/// Powers of two from 2 below `gpus`, and `gpus`.
fn group_sizes(gpus: usize) -> Vec<usize> {
    let powers = std::iter::successors(Some(2), |ranks| Some(2 * ranks));
    powers.take_while(|ranks| *ranks < gpus).chain((gpus > 1).then_some(gpus)).collect()
}

fn rates_of(ranks: usize, most: u64) -> Result<Vec<CollectiveRate>, Error> {
    let elements = |bytes: u64| ((bytes / 4) as usize).next_multiple_of(ranks);
    let mut plan = Plan::default();
    let mut tensor = |name: &str, len| {
        plan.tensor((Arena::Device, "of the measurement"), name, Dtype::F32, (1, len))
    };
    let (buffer, met) = (tensor("buffer", elements(most)), tensor("met", ranks));
    let sizes: Vec<u64> = SIZES.into_iter().filter(|size| *size < most).chain([most]).collect();
    let sum = |x| Op::AllReduce { x, group: Group::Dp, reduce: Reduction::Sum };
    // Names, times that the buffer crosses a link, and ops.
    let of_size = |bytes: &u64| {
        let x = buffer.slice(0..elements(*bytes));
        [
            ("all_reduce", 2.0, *bytes, sum(x)),
            ("all_gather", 1.0, *bytes, Op::AllGather { x, group: Group::Dp }),
        ]
    };
    let ops: Vec<(&'static str, f64, u64, Op)> = sizes.iter().flat_map(of_size).collect();
    let (plan, world) = (Arc::new(plan), Communicator::new(1, ranks, PATIENCE));
    let peers = Arc::new(Peers::new(ranks));
    let times = all_at_once(&world, ranks, |rank| {
        let options = on_gpu(Some(rank.index()), HostPlace::default(), &peers);
        let dev = cuda::open(rank, &plan, &world, &options)?;
        [buffer, met].iter().for_each(|x| dev.submit(Lane::Compute, Op::Zero { x: *x }));
        dev.sync_all()?;
        let run =
            |(.., op): &(&'static str, f64, u64, Op)| together(&dev, &sum(met), Lane::DpComm, op);
        let times = ops.iter().map(run).collect::<Result<Vec<Vec<f64>>, Error>>()?;
        dev.finish()?;
        Ok(times)
    })?;
    let share = (ranks - 1) as f64 / ranks as f64;
    let rate = |(number, (op, rounds, bytes, _)): (usize, &(&'static str, f64, u64, Op))| {
        // A round lasts as long as its slowest GPU; the fastest round after the first counts.
        let round = |i: usize| times.iter().map(|of| of[number][i]).fold(0.0, f64::max);
        let seconds = (1..=REPEATS).map(round).fold(f64::INFINITY, f64::min);
        let sent = rounds * share * *bytes as f64 / seconds / 1e9;
        CollectiveRate { op, ranks, bytes: *bytes, sent }
    };
    Ok(ops.iter().enumerate().map(rate).collect())
}

/// Seconds of each round of `op`, measured after all ranks have passed the barrier.
pub(super) fn together(dev: &Device, barrier: &Op, lane: Lane, op: &Op) -> Result<Vec<f64>, Error> {
    let round = |_| {
        dev.submit(Lane::DpComm, barrier.clone());
        dev.sync_all()?;
        timed(|| {
            dev.submit(lane, op.clone());
            dev.sync_all()
        })
    };
    (0..=REPEATS).map(round).collect()
}

/// Measures the update with fp32 states on all cores of each node; returns the slowest node.
pub(super) fn update_rate(params: usize) -> Result<Row, Error> {
    let of = |node| {
        on_node(node, |team| {
            let threads = team.as_ref().map_or(1, |team| team.threads());
            let cases = &cases(threads, None, true)[..1];
            let rows = adam_on(team, node, cases, params, REPEATS)?;
            Ok(rows.into_iter().next().unwrap_or_else(|| unreachable!("a case has a row")))
        })
    };
    let rows = nodes().iter().map(of).collect::<Result<Vec<Row>, Error>>()?;
    let slowest =
        rows.into_iter().min_by(|a, b| a.gb_per_s_and_thread().total_cmp(&b.gb_per_s_and_thread()));
    Ok(slowest.unwrap_or_else(|| unreachable!("this process runs on a CPU, which is of a node")))
}

/// The update on the host while one GPU copies both ways.
#[derive(Clone, Debug)]
pub struct ConcurrentUpdate {
    /// Update on all cores of the node with the slowest cores.
    pub adam: Row,
    /// Rate of the copies, both ways added, in 10^9 bytes per second.
    pub copied: f64,
}

/// Measures the update of `params` parameters during copies of `bytes` each way.
///
/// # Errors
/// The GPU fails, there is not enough memory, or the system starts no thread.
pub(super) fn update_beside_copies(
    machine: &LocalMachine,
    params: usize,
    bytes: u64,
) -> Result<ConcurrentUpdate, Error> {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let copies = || copy_until(machine, bytes, &over);
        let started = std::thread::Builder::new().spawn_scoped(scope, copies);
        let whom = "copies beside the update".to_owned();
        let refused = |e: io::Error| Error::NoThread { whom, problem: e.to_string() };
        let copier = started.map_err(refused)?;
        let adam = update_rate(params);
        over.store(true, Ordering::Relaxed);
        let copied = copier.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        Ok(ConcurrentUpdate { adam: adam?, copied: copied? })
    })
}

/// Copies `bytes` each way again and again until `over`. Returns both ways added, in 10^9 bytes per second.
fn copy_until(machine: &LocalMachine, bytes: u64, over: &AtomicBool) -> Result<f64, Error> {
    let CopyDevice { dev, up, down } = CopyDevice::open(true, &place(machine), bytes)?;
    let (began, mut rounds) = (Instant::now(), 0u32);
    while rounds == 0 || !over.load(Ordering::Relaxed) {
        for (lane, [src, dst]) in [(Lane::H2d, up), (Lane::D2h, down)] {
            dev.submit(lane, Op::Copy { src, dst });
        }
        dev.sync_all()?;
        rounds += 1;
    }
    let seconds = began.elapsed().as_secs_f64();
    dev.finish()?;
    Ok(2.0 * f64::from(rounds) * bytes as f64 / seconds / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_powers_of_two_and_all_gpus() {
        assert_eq!(group_sizes(1), [0; 0]);
        assert_eq!(group_sizes(2), [2]);
        assert_eq!(group_sizes(6), [2, 4, 6]);
        assert_eq!(group_sizes(8), [2, 4, 8]);
    }
}
