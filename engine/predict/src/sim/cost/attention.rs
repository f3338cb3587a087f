//! The time of attention: onebox's own kernels, and cuDNN's.

use crate::sim::hardware::{AttentionKernels, Gpu};
use crate::sim::program::{Work, WorkKind};
use device::Scores;
use device::cuda::is_small_attention;

/// Queries per tile of the attention kernels, and keys per tile.
const ATTENTION_TILE: f64 = 64.0;

/// Fraction of the data sheet's fp32 rate that `attention.cu` reaches, by its executed operations.
/// It is an estimate between 32 and 45 %: loads from shared memory use as many issue slots as
/// multiplications do, and barriers separate slabs.
const PORTABLE_ATTENTION_SHARE: f64 = 0.38;

/// Clocks of a multiprocessor for a matmul of 16 x 8 x 16 in `attention_mma.cuh`, in addition to the
/// tensor cores, as the interpreter counts them (`benchmarks/kernels.md`).
struct TensorCoreCost {
    /// Clocks of shared memory, one for each pass.
    shared: f64,
    /// Clocks of issue, one for four instructions.
    issue: f64,
    /// Clocks of waits for loads, with the 8 warps that a multiprocessor holds.
    latency: f64,
}

/// Costs of the forward and the backward pass for heads of up to 128 columns, from compute
/// capability 8.0 on, except those of [`AMPERE_SMALL`].
const AMPERE: [TensorCoreCost; 2] = [
    TensorCoreCost { shared: 1.86, issue: 1.75, latency: 0.64 },
    TensorCoreCost { shared: 2.55, issue: 1.60, latency: 0.81 },
];

/// [`AMPERE`] for heads of 65 to 128 columns if a multiprocessor has 100 KiB of shared memory.
const AMPERE_SMALL: [TensorCoreCost; 2] = [
    TensorCoreCost { shared: 2.64, issue: 2.07, latency: 1.28 },
    TensorCoreCost { shared: 2.53, issue: 1.56, latency: 1.16 },
];

/// Costs of both passes for heads of more than 128 columns, from compute capability 8.0 on.
const AMPERE_WIDE: [TensorCoreCost; 2] = [
    TensorCoreCost { shared: 2.40, issue: 2.04, latency: 1.33 },
    TensorCoreCost { shared: 2.83, issue: 1.62, latency: 1.51 },
];

/// [`AMPERE`] for scores with a cap.
const AMPERE_CAPPED: [TensorCoreCost; 2] = [
    TensorCoreCost { shared: 1.86, issue: 4.20, latency: 0.64 },
    TensorCoreCost { shared: 2.62, issue: 3.18, latency: 0.81 },
];

/// [`AMPERE_SMALL`] for scores with a cap.
const AMPERE_SMALL_CAPPED: [TensorCoreCost; 2] = [
    TensorCoreCost { shared: 2.64, issue: 4.51, latency: 1.28 },
    TensorCoreCost { shared: 2.62, issue: 3.16, latency: 1.16 },
];

/// [`AMPERE_WIDE`] for scores with a cap.
const AMPERE_WIDE_CAPPED: [TensorCoreCost; 2] = [
    TensorCoreCost { shared: 2.40, issue: 3.26, latency: 1.33 },
    TensorCoreCost { shared: 2.87, issue: 2.47, latency: 1.51 },
];

/// Costs of both passes for compute capabilities 7.0 and 7.2.
const VOLTA: [TensorCoreCost; 2] = [
    TensorCoreCost { shared: 4.71, issue: 3.23, latency: 2.16 },
    TensorCoreCost { shared: 5.34, issue: 2.12, latency: 1.40 },
];

/// Place of a kernel's time between the greatest of its limits (0) and their sum (1): units work in
/// parallel in part. This and [`SHORT`] agree within 4 % with all six passes measured on an H200
/// (`benchmarks/h200-2026-11-27.md`).
const OVERLAP: f64 = 0.45;

/// Tokens whose keys take as long as the start of a block of queries and the write of its result, in the
/// forward and the backward pass. So short sequences are slower. The charts of FlashAttention-2 on A100
/// and H100 rise in the same way.
const SHORT: [f64; 2] = [460.0, 200.0];

/// Multiplications and additions of a matmul of 16 x 8 x 16.
const PRODUCT: f64 = 4096.0;

/// Clocks of this matmul by `mma.sync` on Hopper. Only other instructions reach the data sheet's rate
/// there. The same number is assumed for sm_100.
const HOPPER_PRODUCT: f64 = 1.6;

/// Executed matmuls per counted matmul of a tile. The backward pass computes scores and their
/// gradients twice, so it executes 7 matmuls if 5 are counted.
const ATTENTION_PRODUCTS: [f64; 2] = [1.0, 1.4];

/// Rate of cuDNN's passes over long samples with heads of 128, relative to large matmuls: 680 and 497
/// TFLOPS of an H200's 735, by six measured passes.
const CUDNN_SHARES: [f64; 2] = [0.925, 0.676];

/// [`SHORT`] for cuDNN. Measured: 396, 586 and 624 TFLOPS in the forward pass at 1024, 4096 and
/// 8192 tokens.
const CUDNN_SHORT: f64 = 730.0;

/// Rate of heads of 64 relative to heads of 128: 0.87 to 0.91 in FlashAttention-2's charts.
const NARROW_HEADS: f64 = 0.9;

/// Seconds of a pass of attention.
pub(super) fn seconds(gpu: &Gpu, work: &Work) -> f64 {
    match gpu.attention {
        AttentionKernels::Own => own(gpu, work),
        AttentionKernels::Cudnn => cudnn(gpu, work),
    }
}

fn cudnn(gpu: &Gpu, work: &Work) -> f64 {
    let WorkKind::Attention { seq_len, window, head_dim, backward, .. } = work.kind else {
        return 0.0;
    };
    let share = CUDNN_SHARES[usize::from(backward)] / short(seq_len, window, CUDNN_SHORT);
    let heads = if head_dim <= 64 { NARROW_HEADS / padded(head_dim) } else { 1.0 };
    work.flops / (gpu.flops_16 * share * heads)
}

/// Seconds of this project's attention kernels. They use tensor cores for 16 bits if the GPU has
/// them, otherwise fp32 (`launch/attention.rs`). Before compute capability 8.0 tensor cores serve
/// heads of up to 128 columns whose scores have no cap.
fn own(gpu: &Gpu, work: &Work) -> f64 {
    let WorkKind::Attention { scores, seq_len, window, head_dim, capped, backward } = work.kind
    else {
        return 0.0;
    };
    let pass = usize::from(backward);
    let flops = work.flops * ATTENTION_PRODUCTS[pass] * tiled(seq_len, window) * padded(head_dim);
    let small = is_small_attention(gpu.sm, head_dim);
    let cost = match gpu.sm {
        _ if work.wide => None,
        80.. if small && capped => Some(&AMPERE_SMALL_CAPPED[pass]),
        80.. if small => Some(&AMPERE_SMALL[pass]),
        80.. => match (head_dim <= 128, capped) {
            (true, false) => Some(&AMPERE[pass]),
            (true, true) => Some(&AMPERE_CAPPED[pass]),
            (false, false) => Some(&AMPERE_WIDE[pass]),
            (false, true) => Some(&AMPERE_WIDE_CAPPED[pass]),
        },
        70 | 72 if head_dim <= 128 && !capped => Some(&VOLTA[pass]),
        _ => None,
    };
    let Some(&TensorCoreCost { shared, issue, latency }) = cost else {
        return flops / (gpu.flops_32 * PORTABLE_ATTENTION_SHARE);
    };
    let processors = gpu.processors as f64;
    let clock = gpu.clocks() / processors;
    let product = (PRODUCT * processors * clock / gpu.flops_16).max(least_product(gpu.sm));
    let greatest = product.max(shared).max(issue).max(latency);
    let all = product + shared + issue + latency;
    let clocks = (greatest + OVERLAP * (all - greatest)) * short(seq_len, window, SHORT[pass]);
    let rows =
        if gpu.sm >= 80 && !small && !backward { 2.0 * ATTENTION_TILE } else { ATTENTION_TILE };
    let heads = scores as f64 / (seq_len * seq_len) as f64;
    let blocks = heads * (seq_len as f64 / rows).ceil();
    flops / PRODUCT * clocks / (clock * blocks.min(processors))
}

const fn least_product(sm: u32) -> f64 {
    if sm >= 90 && sm < 120 { HOPPER_PRODUCT } else { 0.0 }
}

/// Time of samples of `seq_len` tokens relative to the time of very long samples, for the same work. A
/// block of queries that sees only a window starts and ends for as few keys as in a shorter sample.
fn short(seq_len: usize, window: Option<usize>, tokens: f64) -> f64 {
    let length = 2.0 * pairs(seq_len, window) / seq_len as f64;
    (length + tokens) / length
}

/// The counted pairs of a query and a key: the pairs in the window or, without a window, half of the
/// square.
fn pairs(seq_len: usize, window: Option<usize>) -> f64 {
    Scores { scale: 1.0, cap: None, window }.pairs(seq_len)
}

/// The ratio of the pairs in whole tiles, from the window's first tile to the diagonal, to the counted
/// pairs.
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
    ATTENTION_TILE * ATTENTION_TILE * whole / pairs(seq_len, window)
}

/// Columns of the kernel relative to the columns of the head: kernels exist for heads of 64, 128 and 256.
fn padded(head_dim: usize) -> f64 {
    head_dim.max(64).next_power_of_two() as f64 / head_dim as f64
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn a_window_is_as_slow_as_samples_with_as_few_keys() {
        // A query sees half of 1024 keys in the mean.
        assert!((short(1024, None, 460.0) - 1484.0 / 1024.0).abs() < 1e-12);
        // In a very long sample a query sees its whole window, as in samples of twice the window.
        let long = short(1 << 24, Some(512), 460.0);
        assert!((long - short(1024, None, 460.0)).abs() < 1e-3, "{long}");
    }
}
