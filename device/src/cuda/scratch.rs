//! Bytes of a GPU that ops need besides their tensors.

use super::blas::WORKSPACE;
use super::memory::Arrangement;
use super::{cudnn, launch};
use crate::Plan;
use crate::op::{DeltaHeads, Heads};

/// Bytes of a GPU for a rank: `plan`, `scratch` for kernels, and the workspace of matmuls.
pub fn device_bytes(plan: &Plan, scratch: u64) -> u64 {
    Arrangement::new(plan, scratch, WORKSPACE).bytes
}

/// Bytes of scratch for the gradients of the gains of heads of `dim` elements.
pub const fn gains_scratch(dim: usize) -> u64 {
    launch::rotary_scratch_bytes(dim)
}

/// Bytes of scratch for the gradients of a norm's gain and bias. `shape`: (rows, columns); of a norm
/// over the width of q and k (B T, (H + K) D).
pub const fn norm_scratch(shape: (usize, usize), has_bias: bool) -> u64 {
    launch::norm_scratch_bytes(shape, if has_bias { 2 } else { 1 })
}

/// Bytes of scratch for the sums of `experts` shares over `rows` rows ([`Op::ExpertLoad`] with shares).
///
/// [`Op::ExpertLoad`]: crate::Op::ExpertLoad
pub const fn shares_scratch(rows: usize, experts: usize) -> u64 {
    launch::shares_scratch_bytes(rows, experts)
}

/// Bytes of scratch for the gradients of a gated delta net over `rows` rows, whose convolution has `taps`
/// weights for each channel.
pub fn delta_scratch(rows: usize, heads: DeltaHeads, taps: usize) -> u64 {
    launch::delta_net_scratch_bytes(rows, heads, taps)
}

/// Most bytes of scratch for a pass of cuDNN's attention over `samples` of `seq_len` tokens, by the
/// shape of its heads and the elements of each.
pub fn attention_workspace(samples: usize, heads: Heads, dim: usize) -> u64 {
    cudnn::workspace_bytes(samples, heads.count, heads.kv_count, heads.seq_len, dim)
}
