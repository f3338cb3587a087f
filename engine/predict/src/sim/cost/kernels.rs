//! The cost of a GPU's kernel.

use super::{KERNEL_GAP, Resource, ResourceRequest, attention, products};
use crate::sim::hardware::era::BATCHED_SHARE;
use crate::sim::hardware::{Gpu, Hardware};
use crate::sim::program::{Work, WorkKind};
use config::Fact;

/// Kernels of onebox that are slower than a GPU's memory, with the bytes that a multiprocessor
/// moves in a clock. The numerators are the GB/s that an H200 moved (means of
/// `benchmarks/nvidia-h200-2026-11-26.md` and `-27.md`) with 132 multiprocessors at 1.98 GHz. On a
/// GPU whose memory moves fewer bytes for each clock, the memory is the limit.
const BYTES_PER_CLOCK: [(&str, f64); 17] = [
    ("layer_norm", 1396.0 / H200_CLOCKS),
    ("layer_norm_backward", 1574.0 / H200_CLOCKS),
    ("rms_norm", 2000.0 / H200_CLOCKS),
    ("rms_norm_backward", 2040.0 / H200_CLOCKS),
    ("rotary", 2851.0 / H200_CLOCKS),
    ("rotary_backward", 2792.0 / H200_CLOCKS),
    ("swiglu", 3168.0 / H200_CLOCKS),
    ("swiglu_backward", 3045.0 / H200_CLOCKS),
    ("gelu", 2454.0 / H200_CLOCKS),
    ("gelu_backward", 2745.0 / H200_CLOCKS),
    ("bias_dropout_add", 3112.0 / H200_CLOCKS),
    ("maxima", 2182.0 / H200_CLOCKS),
    ("quantize", 2846.0 / H200_CLOCKS),
    ("column_sum", 2310.0 / H200_CLOCKS),
    ("cross_entropy_stats", 1944.0 / H200_CLOCKS),
    ("cross_entropy_backward", 3266.0 / H200_CLOCKS),
    ("chunk_squares", 1640.0 / H200_CLOCKS),
];

/// Clocks of all multiprocessors of an H200 in a nanosecond, by the data sheet's fp32 rate.
const H200_CLOCKS: f64 = 67e3 / 256.0;

pub(super) fn kernel(h: &Hardware, rank: usize, work: &Work) -> ResourceRequest {
    let gpu = &h.gpu;
    let (arithmetic, bytes) = match work.kind {
        WorkKind::Gemm { m, n, k, .. } => {
            (products::seconds(gpu, work, m, n, k), work.bytes as f64)
        }
        WorkKind::GroupedGemm { form, rows, experts, shape } => {
            let seconds = products::grouped_seconds(gpu, work, form, rows, experts, shape);
            (seconds, work.bytes as f64)
        }
        WorkKind::Attention { .. } if gpu.as_of_2020.is_some() => {
            batched_attention(gpu, work, products::rate(gpu, work))
        }
        WorkKind::Attention { .. } => (attention::seconds(gpu, work), work.bytes as f64),
        WorkKind::DeltaRule { blocks, bf16, backward } => {
            (delta_rule(gpu, work.flops, blocks, bf16, backward), work.bytes as f64)
        }
        _ => (moved(gpu, work), work.bytes as f64 * gpu.passes_2020(work.name)),
    };
    // Kernels of several streams share the multiprocessors.
    let amounts = vec![(Resource::Memory(rank), bytes), (Resource::Arithmetic(rank), arithmetic)];
    let memory = gpu.streamed();
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

/// FLOPs of the gated delta rule in a clock of a multiprocessor, as benchmarks/kernels.md estimates
/// them, 0.45 of the way from the greatest limit to the sum of all: on tensor cores at the rates of an
/// H100 and of an RTX 4090, and in fp32 arithmetic.
const DELTA_FLOPS: [f64; 3] = [150.0, 90.0, 25.0];

/// Share of the kernel that goes through the chunks in the time of the backward pass.
const IN_ORDER: f64 = 0.35;

/// Seconds of the gated delta rule, whose `blocks` go through the chunks of a sample one after the
/// other, one on a multiprocessor at a time: those without a block of the last round are idle.
fn delta_rule(gpu: &Gpu, flops: f64, blocks: usize, bf16: bool, backward: bool) -> f64 {
    let [great, small, plain] = DELTA_FLOPS;
    let rate = match gpu.sm {
        80 | 90 | 100 | 103 if bf16 => great,
        81.. if bf16 => small,
        _ => plain,
    };
    let seconds = flops / (rate * gpu.clocks());
    let rounds = (blocks as f64 / gpu.processors as f64).ceil();
    let idle = rounds * gpu.processors as f64 / blocks as f64;
    let in_order = if backward { IN_ORDER } else { 1.0 };
    seconds * (1.0 - in_order + in_order * idle)
}

/// Seconds in which the multiprocessors move the bytes of a kernel without dense arithmetic; 0 if only
/// the memory limits it. The software of 2020 had other kernels.
fn moved(gpu: &Gpu, work: &Work) -> f64 {
    let slow = BYTES_PER_CLOCK.iter().find(|(name, _)| *name == work.name);
    let slow = slow.filter(|_| gpu.as_of_2020.is_none());
    slow.map_or(0.0, |(_, bytes)| work.bytes as f64 / (bytes * gpu.clocks()))
}

/// Whether the library has 16-bit matmuls with epilogues, whose bytes move during later tiles'
/// sums. It is assumed for all shapes from compute capability 8.0 on, at plain matmuls' speed.
fn has_epilogues(gpu: &Gpu, work: &Work) -> bool {
    gpu.sm >= 80 && gpu.as_of_2020.is_none() && !work.wide
}

/// Bytes of an element.
const fn width(work: &Work) -> f64 {
    if work.wide { 4.0 } else { 2.0 }
}

impl Gpu {
    /// Clocks of all multiprocessors in a second: one multiplication and addition for each lane and
    /// clock is the fp32 rate.
    pub(super) fn clocks(&self) -> f64 {
        self.flops_32 / (2.0 * lanes(self.sm))
    }
}

/// Lanes of fp32 arithmetic of a multiprocessor.
const fn lanes(sm: u32) -> f64 {
    if sm <= 80 { 64.0 } else { 128.0 }
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
