//! Prints the memory of one million parameters on a GPU and on the host, with the optimizer on
//! either: `cargo run -p offload --example memory`.
#![allow(clippy::print_stdout, reason = "an example shows what it found")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use device::{Arena, Dtype, Group, Plan};
use offload::{
    BucketSharing, GradAccumulation, OptimizerLayout, OptimizerSpec, Rule, SegmentSpec, Storage,
    Transfer, chunk_elements,
};

const PARAMETERS: usize = 1 << 20;
const DATA_PARALLEL_RANKS: usize = 4;

fn main() {
    for (place, device_fraction) in [("host", 0.0), ("GPUs", 1.0)] {
        let mut plan = Plan::default();
        let params = plan.tensor((Arena::Device, "parameters"), "p", Dtype::Bf16, (1, PARAMETERS));
        let segment = SegmentSpec {
            name: "segment".into(),
            params,
            trained: params.len(),
            len: PARAMETERS,
            decayed: PARAMETERS,
            bucket: BucketSharing::Own,
            param_buffer: None,
        };
        let spec = OptimizerSpec {
            rule: Rule::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 },
            device_fraction,
            delayed: false,
            speculative_fraction: 0.0,
            accumulation: GradAccumulation::None,
            transfer: Transfer::Streamed,
            storage: Storage::default(),
            micro_batches: 1,
            dp_size: DATA_PARALLEL_RANKS,
            reduce_fp32: false,
            norm_group: Group::World,
            clip: Some(1.0),
            loss_scale: None,
            bucket_elements: 1 << 18,
            tile_elements: 1 << 16,
        };
        OptimizerLayout::plan(&mut plan, &spec, chunk_elements(PARAMETERS), &[segment]);
        println!("optimizer on the {place}, {DATA_PARALLEL_RANKS} data-parallel ranks, by rank:");
        for arena in [Arena::Device, Arena::Pinned] {
            for (pool, bytes) in plan.pools(arena) {
                println!("  {bytes:>9} bytes of {arena} memory: {pool}");
            }
        }
    }
}
