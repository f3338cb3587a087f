//! The library that computes attention, and the memory that it needs.

use config::{Attention, Config};
use device::Heads;
use device::cuda::{AttentionLibrary, attention_workspace};
use tensor_parallel::DecoderShape;

/// The library that computes attention on GPUs.
pub const fn attention_library(config: &Config) -> AttentionLibrary {
    match config.attention {
        Attention::Own => AttentionLibrary::Own,
        Attention::Cudnn => AttentionLibrary::Cudnn,
    }
}

/// Most bytes of scratch for a pass of attention by a library; 0 for onebox's own kernels.
pub(crate) fn library_scratch(library: Attention, shape: &DecoderShape) -> u64 {
    let heads = match library {
        Attention::Own => return 0,
        Attention::Cudnn => Heads {
            count: shape.heads / shape.tp_size,
            kv_count: shape.kv_heads / shape.tp_size,
            first: 0,
            total: shape.heads,
            seq_len: shape.seq_len,
        },
    };
    attention_workspace(shape.micro_batch, heads, shape.head_dim)
}
