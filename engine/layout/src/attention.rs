//! The library that computes attention, and its memory.

use config::{Attention, Config};
use device::Heads;
use device::cuda::{self, AttentionLibrary};
use tensor_parallel::DecoderShape;

/// Who computes attention on GPUs.
pub const fn attention_library(config: &Config) -> AttentionLibrary {
    match config.attention {
        Attention::Own => AttentionLibrary::Own,
        Attention::Cudnn => AttentionLibrary::Cudnn,
    }
}

/// Most bytes of scratch that the library of `config` needs for a pass of attention, beyond what
/// onebox's kernels need.
pub(crate) fn library_scratch(config: &Config, shape: &DecoderShape) -> u64 {
    if attention_library(config) == AttentionLibrary::Own {
        return 0;
    }
    let heads = Heads {
        count: shape.heads / shape.tp_size,
        kv_count: shape.kv_heads / shape.tp_size,
        first: 0,
        total: shape.heads,
        seq_len: shape.seq_len,
    };
    cuda::attention_workspace(shape.micro_batch, heads, shape.head_dim)
}
