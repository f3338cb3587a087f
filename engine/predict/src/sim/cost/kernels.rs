//! The cost of a GPU's kernel.

use super::{KERNEL_GAP, MEMORY_SHARE, Resource, ResourceRequest};
use crate::sim::hardware::era::BATCHED_SHARE;
use crate::sim::hardware::{Gpu, Hardware};
use crate::sim::program::{Work, WorkKind};
use config::Fact;
use device::Scores;

/// Side length of the tile of a matmul that one multiprocessor computes.
const TILE: f64 = 128.0;

/// Terms of a tile's sums that take as long as writing the tile and fetching its first operands.
const GEMM_DEPTH: f64 = 128.0;

/// Fraction of a data sheet's fp32 rate that matmuls reach.
pub const WIDE_SHARE: f64 = 0.85;

/// Queries per tile of the attention kernels, and keys per tile.
const ATTENTION_TILE: f64 = 64.0;

/// Fraction of the data sheet's fp32 rate that `attention.cu` reaches, by its executed operations.
/// It is an estimate between 32 and 45 %: loads from shared memory use as many issue slots as
/// multiplications do, and barriers separate slabs.
const PORTABLE_ATTENTION_SHARE: f64 = 0.38;

/// Clocks of a multiprocessor for a matmul of 16 x 8 x 16 in `attention_mma.cu`, in addition to the
/// tensor cores, as the interpreter counts them (`benchmarks/kernels.md`).
struct TensorCoreCost {
    /// Clocks of shared memory, one for each pass.
    shared: f64,
    /// Clocks of issue, one for four instructions.
    issue: f64,
    /// Clocks of waits for loads, with 8 warps. If shared memory holds only one block (sm_86, 89
    /// and 120), 4 warps wait twice as long.
    latency: f64,
}

/// Costs of the forward and the backward pass, from compute capability 8.0 on.
const AMPERE: [TensorCoreCost; 2] = [
    TensorCoreCost { shared: 1.86, issue: 1.75, latency: 0.64 },
    TensorCoreCost { shared: 2.55, issue: 1.60, latency: 0.81 },
];

/// Costs of both passes for heads of more than 128 columns, from compute capability 8.0 on.
const AMPERE_WIDE: [TensorCoreCost; 2] = [
    TensorCoreCost { shared: 2.40, issue: 1.37, latency: 1.27 },
    TensorCoreCost { shared: 2.77, issue: 1.00, latency: 1.40 },
];

/// Costs of both passes for compute capabilities 7.0 and 7.2.
const VOLTA: [TensorCoreCost; 2] = [
    TensorCoreCost { shared: 4.71, issue: 3.23, latency: 2.16 },
    TensorCoreCost { shared: 5.34, issue: 2.12, latency: 1.40 },
];

/// Multiplications and additions of a matmul of 16 x 8 x 16.
const PRODUCT: f64 = 4096.0;

/// Clocks of this matmul by `mma.sync` on Hopper, where only other instructions reach the data
/// sheet's rate. It is assumed for sm_100, too.
const HOPPER_PRODUCT: f64 = 1.6;

/// Executed matmuls per counted matmul of a tile. The backward pass computes scores and their
/// gradients twice, so it executes 7 matmuls for 5 counted ones.
const ATTENTION_PRODUCTS: [f64; 2] = [1.0, 1.4];

pub(super) fn kernel(h: &Hardware, rank: usize, work: &Work) -> ResourceRequest {
    let gpu = &h.gpu;
    let rate = products_rate(gpu, work);
    let (arithmetic, bytes) = match work.kind {
        WorkKind::Gemm { m, n, k, .. } => {
            (work.flops / (rate * filled(gpu.processors, m, n, k)), work.bytes as f64)
        }
        WorkKind::Attention { .. } if gpu.as_of_2020.is_some() => {
            batched_attention(gpu, work, rate)
        }
        WorkKind::Attention { .. } => (attention(gpu, work), work.bytes as f64),
        _ => (0.0, work.bytes as f64 * gpu.passes_2020(work.name)),
    };
    // Kernels of several streams share the multiprocessors.
    let amounts = vec![(Resource::Memory(rank), bytes), (Resource::Arithmetic(rank), arithmetic)];
    let memory = gpu.memory * MEMORY_SHARE;
    let fixed = KERNEL_GAP * f64::from(work.calls.max(1));
    let fixed = match work.kind {
        // The kernels run one after the other: matmuls, then passes over the scores.
        WorkKind::Attention { .. } if gpu.as_of_2020.is_some() => {
            5.0 * KERNEL_GAP + arithmetic.min(bytes / memory)
        }
        WorkKind::Gemm { m, n, bias: true, .. } if gpu.did(Fact::SmallKernels) => {
            fixed + KERNEL_GAP + 2.0 * (m * n) as f64 * width(work) / memory
        }
        _ => fixed,
    };
    let separate_op = work.separate_op.filter(|_| !has_epilogues(gpu, work));
    let fixed = fixed
        + separate_op.map_or(0.0, |(name, bytes)| {
            KERNEL_GAP + bytes as f64 * gpu.passes_2020(name) / memory
        });
    ResourceRequest { fixed, amounts, ..ResourceRequest::default() }
}

/// Whether the library has 16-bit matmuls with epilogues, whose bytes move during later tiles'
/// sums. It is assumed for all shapes from compute capability 8.0 on, at plain matmuls' speed.
fn has_epilogues(gpu: &Gpu, work: &Work) -> bool {
    gpu.sm >= 80 && gpu.as_of_2020.is_none() && !work.wide
}

/// Rate of fp8 matmuls relative to 16-bit matmuls, by the data sheets of H100, L40S and RTX 4090
/// for fp32 sums. Both are assumed to reach the same fraction of their rates.
const FP8_RATE: f64 = 2.0;

fn products_rate(gpu: &Gpu, work: &Work) -> f64 {
    match work.name {
        _ if work.wide => gpu.flops_32 * WIDE_SHARE,
        "scaled_gemm" => gpu.flops_16 * FP8_RATE,
        _ => gpu.flops_16,
    }
}

/// Bytes of an element.
const fn width(work: &Work) -> f64 {
    if work.wide { 4.0 } else { 2.0 }
}

/// Seconds of this project's attention kernels. They use tensor cores for 16 bits if the GPU has
/// them and scores have no cap, before compute capability 8.0 for heads of up to 128 columns,
/// otherwise fp32 (`launch/attention.rs`).
fn attention(gpu: &Gpu, work: &Work) -> f64 {
    let WorkKind::Attention { scores, seq_len, window, head_dim, capped, backward } = work.kind
    else {
        return 0.0;
    };
    let pass = usize::from(backward);
    let flops = work.flops * ATTENTION_PRODUCTS[pass] * tiled(seq_len, window) * padded(head_dim);
    let cost = match gpu.sm {
        _ if work.wide || capped => None,
        80.. if head_dim <= 128 => Some(&AMPERE[pass]),
        80.. => Some(&AMPERE_WIDE[pass]),
        70 | 72 if head_dim <= 128 => Some(&VOLTA[pass]),
        _ => None,
    };
    let Some(&TensorCoreCost { shared, issue, latency }) = cost else {
        return flops / (gpu.flops_32 * PORTABLE_ATTENTION_SHARE);
    };
    let processors = gpu.processors as f64;
    // One multiplication and addition for each lane and clock.
    let clock = gpu.flops_32 / (2.0 * lanes(gpu.sm) * processors);
    let product = (PRODUCT * processors * clock / gpu.flops_16).max(least_product(gpu.sm));
    // Units work in parallel in part: the time is between the greatest and the sum of their times.
    let greatest = product.max(shared).max(issue).max(latency);
    let clocks = f64::midpoint(greatest, product + shared + issue + latency);
    let rows = if gpu.sm >= 80 && !backward { 2.0 * ATTENTION_TILE } else { ATTENTION_TILE };
    let heads = scores as f64 / (seq_len * seq_len) as f64;
    let blocks = heads * (seq_len as f64 / rows).ceil();
    flops / PRODUCT * clocks / (clock * blocks.min(processors))
}

/// Lanes of fp32 arithmetic of a multiprocessor.
const fn lanes(sm: u32) -> f64 {
    if sm <= 80 { 64.0 } else { 128.0 }
}

const fn least_product(sm: u32) -> f64 {
    if sm >= 90 && sm < 120 { HOPPER_PRODUCT } else { 0.0 }
}

/// The ratio of the pairs in whole tiles, from the window's first tile to the diagonal, to the counted
/// pairs: the pairs in the window or, without a window, half of the square.
fn tiled(seq_len: usize, window: Option<usize>) -> f64 {
    let tiles = (seq_len as f64 / ATTENTION_TILE).ceil();
    let whole = match window {
        None => tiles * (tiles + 1.0) / 2.0,
        Some(window) => {
            // The tiles before the diagonal's that the first query of a tile sees.
            let before = ((window as f64 - 1.0) / ATTENTION_TILE).ceil().min(tiles - 1.0);
            before * (before + 1.0) / 2.0 + (tiles - before) * (before + 1.0)
        }
    };
    let counted = Scores { scale: 1.0, cap: None, window }.pairs(seq_len);
    ATTENTION_TILE * ATTENTION_TILE * whole / counted
}

/// Columns of the kernel relative to those of the head: kernels exist for heads of 64, 128 and 256.
fn padded(head_dim: usize) -> f64 {
    head_dim.max(64).next_power_of_two() as f64 / head_dim as f64
}

/// Seconds of arithmetic, and bytes, of attention in several kernels, which move whole squares of
/// scores through memory.
fn batched_attention(gpu: &Gpu, work: &Work, rate: f64) -> (f64, f64) {
    let WorkKind::Attention { scores, head_dim, backward, .. } = work.kind else {
        return (0.0, 0.0);
    };
    let bytes = work.bytes as f64 * (1.0 + gpu.head_copies_2020(backward));
    // The whole square counts, not only the part that each token sees.
    let products = if backward { 5.0 } else { 2.0 };
    let flops = 2.0 * products * scores as f64 * head_dim as f64;
    let scores = scores as f64 * width(work) * gpu.score_passes_2020(backward);
    (flops / (rate * BATCHED_SHARE), bytes + scores)
}

/// Fraction of a GPU that a matmul keeps busy: the last round of tiles may be short, and each tile
/// has a start and an end.
fn filled(processors: usize, m: usize, n: usize, k: usize) -> f64 {
    let tiles = (m as f64 / TILE).ceil() * (n as f64 / TILE).ceil();
    let rounds = (tiles / processors as f64).ceil();
    let whole = (m as f64 / TILE) * (n as f64 / TILE) / (rounds * processors as f64);
    whole.min(1.0) * k as f64 / (k as f64 + GEMM_DEPTH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_product_fills_a_gpu_when_its_tiles_fill_every_round() {
        // 80 tiles fill 80 processors; 81 need a second round.
        let one = filled(80, 128 * 80, 128, 1 << 20);
        assert!((one - 1.0).abs() < 1e-3, "{one}");
        let two = filled(80, 128 * 81, 128, 1 << 20);
        assert!((two - 81.0 / 160.0).abs() < 1e-3, "{two}");
        assert!(filled(80, 1, 1, 1024) < 1e-5);
        assert!(filled(80, 10_240, 128, 128) > 0.49 && filled(80, 10_240, 128, 128) < 0.51);
    }

    #[test]
    fn attention_executes_whole_tiles_and_padded_heads() {
        // 16 tiles per side: 136 of 256 tiles for the half square.
        assert!((tiled(1024, None) - 136.0 / 128.0).abs() < 1e-12);
        // One tile for a quarter of a tile.
        assert!((tiled(32, None) - 8.0).abs() < 1e-12);
        assert_eq!([32, 64, 96, 128, 160].map(padded), [2.0, 1.0, 128.0 / 96.0, 1.0, 1.6]);
    }

    #[test]
    fn attention_in_a_window_executes_the_tiles_of_the_window() {
        // With 65 keys, the first query of a tile sees the whole tile before: 31 tiles in 16 rows of tiles.
        let pairs = 65.0 * 66.0 / 2.0 + (1024.0 - 65.0) * 65.0;
        assert!((tiled(1024, Some(65)) - 31.0 * 4096.0 / pairs).abs() < 1e-12);
        // With one key, the tiles on the diagonal.
        assert!((tiled(1024, Some(1)) - 16.0 * 4096.0 / 1024.0).abs() < 1e-12);
        // With all but one key, all tiles up to the diagonal.
        let pairs = 1024.0 * 1025.0 / 2.0 - 1.0;
        assert!((tiled(1024, Some(1023)) - 136.0 * 4096.0 / pairs).abs() < 1e-12);
    }
}
