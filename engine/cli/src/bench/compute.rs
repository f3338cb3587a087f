//! Measures matmuls and collectives of virtual GPUs, and the peaks of the cores and the memory.

use super::node_memory::Node;
use super::{PATIENCE, all_at_once, median, memcpy, open_on_host, rounds, timed};
use crate::single_rank::inline;
use device::cpu;
use device::numerics::multiply_add;
use device::{
    Arena, Communicator, Dtype, Error, Group, HostPlace, Lane, Op, Plan, Reduction, ThreadTeam,
};
use engine::run::devices::kernel_team;
use serde::Serialize;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

const ROUNDS: usize = 5;

/// Rounds of fused multiply-adds; they last some tens of milliseconds.
const FMA_ROUNDS: usize = 2_000_000;

/// Result of one matmul, in 10^9 operations per second.
#[derive(Clone, Debug, Serialize)]
pub struct Product {
    /// Rows of the result.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// Terms of each sum.
    pub k: usize,
    /// Type of the stored operands.
    pub dtype: &'static str,
    /// Number of kernel threads.
    pub threads: usize,
    /// Rate of the matmul.
    pub gflops: f64,
    /// Rate of fused multiply-adds in registers by as many threads, in turn with the matmul.
    pub ceiling_gflops: f64,
    /// `gflops` divided by `ceiling_gflops`.
    pub share_of_ceiling: f64,
}

/// Result of one collective within this process, in 10^9 bytes per second.
#[derive(Clone, Debug, Serialize)]
pub struct Collective {
    /// Name of the collective.
    pub op: &'static str,
    /// Number of virtual GPUs.
    pub ranks: usize,
    /// Bytes of each rank's buffer.
    pub bytes: u64,
    /// Bytes of the buffer divided by the time.
    pub gb_per_s: f64,
    /// Rate of a plain copy by one thread.
    pub memcpy_gb_per_s: f64,
    /// `gb_per_s` divided by `memcpy_gb_per_s`.
    pub share_of_memcpy: f64,
}

/// Shape of a matmul (m, k) by (k, n).
#[derive(Clone, Copy, Debug, Default)]
pub struct MatmulShape {
    /// Rows of the result.
    pub m: usize,
    /// Terms of each sum.
    pub k: usize,
    /// Columns of the result.
    pub n: usize,
}

/// Matmuls of a block of GPT-2 124M on 256 tokens, and of its output layer.
const SHAPES: [MatmulShape; 4] = [
    MatmulShape { m: 256, k: 768, n: 768 },
    MatmulShape { m: 256, k: 768, n: 3072 },
    MatmulShape { m: 256, k: 3072, n: 768 },
    MatmulShape { m: 256, k: 768, n: 50_304 },
];

/// Measures matmuls of several shapes with `threads` threads.
///
/// # Errors
/// There is not enough memory.
pub fn products(threads: usize) -> Result<Vec<Product>, Error> {
    let all = [Dtype::F32, Dtype::Bf16].map(|dtype| SHAPES.map(|shape| (dtype, shape)));
    all.into_iter().flatten().map(|(dtype, shape)| product_of(dtype, shape, threads)).collect()
}

fn product_of(dtype: Dtype, shape: MatmulShape, threads: usize) -> Result<Product, Error> {
    let MatmulShape { m, k, n } = shape;
    let name = if dtype == Dtype::Bf16 { "bf16" } else { "fp32" };
    let mut plan = Plan::default();
    let [a, b, c] = [("a", (m, k)), ("b", (k, n)), ("c", (m, n))].map(|(name, shape)| {
        plan.tensor((Arena::Device, "of the measurement"), name, dtype, shape)
    });
    // Both measurements share one team: two teams would compete for the cores.
    let team = kernel_team(threads, None);
    let dev = open_on_host(plan, team.clone(), false, &Node::default())?;
    [a, b].iter().try_for_each(|t| dev.write(*t, &|i| 1.0 / (1 + i % 7) as f64))?;
    let (mut product, mut peak) = (Vec::new(), Vec::new());
    for round in 0..=ROUNDS {
        let seconds = timed(|| {
            dev.submit(Lane::Compute, Op::product(a, b, c));
            dev.sync_all()
        })?;
        let fma = multiply_add_rate(team.as_deref());
        if round > 0 {
            product.push(2.0 * (m * n * k) as f64 / seconds / 1e9);
            peak.push(fma / 1e9);
        }
    }
    dev.finish()?;
    let (gflops, ceiling_gflops) = (median(&product), median(&peak));
    let share_of_ceiling = gflops / ceiling_gflops;
    Ok(Product { m, n, k, dtype: name, threads, gflops, ceiling_gflops, share_of_ceiling })
}

/// Operations per second of fused multiply-adds.
fn multiply_add_rate(team: Option<&ThreadTeam>) -> f64 {
    let (started, done) = (Instant::now(), Mutex::new(0.0));
    let work = |_| {
        let operations = multiply_add(FMA_ROUNDS);
        *done.lock().unwrap_or_else(PoisonError::into_inner) += operations;
    };
    team.map_or_else(|| work(0), |team| team.run(&work));
    done.into_inner().unwrap_or_else(PoisonError::into_inner) / started.elapsed().as_secs_f64()
}

/// Measures collectives of `ranks` virtual GPUs in this process.
///
/// # Errors
/// There is not enough memory.
pub fn collectives(ranks: usize, bytes: u64) -> Result<Vec<Collective>, Error> {
    let n = ((bytes / 4) as usize).next_multiple_of(ranks);
    let plain = memcpy(4 * n);
    let collectives = ["all_reduce", "reduce_scatter", "all_gather"].into_iter().enumerate();
    let measured = collectives.map(|(which, op)| {
        let seconds = collective(which, ranks, n)?;
        let gb_per_s = (4 * n) as f64 / seconds / 1e9;
        let share_of_memcpy = gb_per_s / plain;
        let bytes = 4 * n as u64;
        Ok(Collective { op, ranks, bytes, gb_per_s, memcpy_gb_per_s: plain, share_of_memcpy })
    });
    measured.collect()
}

/// Median time of rank 0, in seconds.
fn collective(which: usize, ranks: usize, n: usize) -> Result<f64, Error> {
    let mut plan = Plan::default();
    let x = plan.tensor((Arena::Device, "of the measurement"), "x", Dtype::F32, (1, n));
    let (world, plan) = (Communicator::new(1, ranks, PATIENCE), Arc::new(plan));
    let op = [
        Op::AllReduce { x, group: Group::Dp, reduce: Reduction::Sum },
        Op::ReduceScatter { x, group: Group::Dp },
        Op::AllGather { x, group: Group::Dp },
    ];
    let options = inline(HostPlace::default(), cpu::ScratchFloats::default(), None);
    let times = all_at_once(&world, ranks, |rank| {
        let dev = cpu::open(rank, &plan, &world, &options)?;
        dev.write(x, &|_| 0.5)?;
        let seconds = rounds(ROUNDS, || {
            dev.submit(Lane::DpComm, op[which].clone());
            dev.sync_all()
        })?;
        dev.finish()?;
        Ok(median(&seconds))
    })?;
    Ok(times[0])
}
