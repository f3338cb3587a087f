//! Prints the parts of a small GPT's parameters on the second of two ranks: `cargo run -p
//! tensor-parallel --example shards`.
#![allow(clippy::print_stdout, reason = "an example shows what it found")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use device::{Arena, Dtype, Plan};
use tensor_parallel::{Architecture, CheckpointHome, Decoder, DecoderShape, Recompute};

fn main() {
    let shape = DecoderShape {
        architecture: Architecture::GPT2,
        layers: 2,
        kinds: vec![tensor_parallel::LayerKind::PLAIN],
        layer_kinds: vec![0; 2],
        hidden: 64,
        heads: 4,
        kv_heads: 4,
        head_dim: 16,
        seq_len: 32,
        vocab: 256,
        ffn_hidden: 256,
        experts: None,
        delta: None,
        micro_batch: 4,
        tp_size: 2,
        sequence: false,
        recompute: Recompute::None,
        tiers: tensor_parallel::ActivationTiers::NONE,
        partition_checkpoints: false,
        checkpoint_home: CheckpointHome::Device,
        checkpoint_slots: 1,
        ring: tensor_parallel::Ring::NONE,
        head_rows: 1024,
        dtype: Dtype::Bf16,
        fp8: false,
        partial_dtype: Dtype::Bf16,
        dropout: 0.0,
        init_std: 0.02,
        trained: Default::default(),
    };
    let mut plan = Plan::default();
    let gpt = Decoder::plan(&mut plan, &shape, 64);
    for param in gpt.segments().iter().flat_map(|segment| &segment.params) {
        let runs = param.runs(1, shape.tp_size);
        let elements: usize = runs.iter().map(|run| run.local.len()).sum();
        println!(
            "{:24} {:?} of {:?}: {elements} elements in {} run(s) of the whole tensor",
            param.name,
            param.local,
            param.global,
            runs.len()
        );
    }
    println!("{} bytes of device memory on each rank", plan.bytes(Arena::Device));
}
