//! Sum of the data-parallel ranks' gradients: in fp32, in rank order, rounded once.
#![allow(missing_docs, reason = "a test")]
#![allow(clippy::unwrap_used, reason = "helpers of tests")]
#![allow(clippy::allow_attributes, reason = "the lines above")]

use device::cpu::{self, CpuOptions, Lanes, ScratchFloats};
use device::numerics::CountedRange;
use device::{Arena, Dtype, Group, Plan, Rank, Tensor, random};
use device::{Communicator, HostPlace, HostWork};
use half::bf16;
use offload::{
    BucketSharing, GradAccumulation, Optimizer, OptimizerLayout, OptimizerSpec, Rule, SegmentSpec,
    Storage, Transfer,
};
use std::sync::Arc;
use std::time::Duration;
use tests::Constant;

/// Number of elements of the only segment (`N`), and of a chunk of its norm (`CHUNK`).
const N: usize = 4096;
const CHUNK: usize = 64;

fn spec(
    dp_size: usize,
    reduce_fp32: bool,
    device_fraction: f64,
    bucket_elements: usize,
) -> OptimizerSpec {
    OptimizerSpec {
        rule: Rule::Sgd { weight_decay: 0.0 },
        device_fraction,
        delayed: false,
        speculative_fraction: 0.0,
        accumulation: GradAccumulation::None,
        transfer: Transfer::Streamed,
        storage: Storage::default(),
        micro_batches: 1,
        dp_size,
        reduce_fp32,
        norm_group: Group::Tp,
        clip: None,
        loss_scale: None,
        bucket_elements,
        tile_elements: 1024,
    }
}

fn laid_out(spec: &OptimizerSpec) -> (Arc<Plan>, Arc<OptimizerLayout>) {
    let mut plan = Plan::default();
    let params = plan.tensor((Arena::Device, "parameters"), "p", Dtype::Bf16, (1, N));
    let name = "segment".to_owned();
    let segment = SegmentSpec {
        name,
        params,
        trained: params.len(),
        len: N,
        decayed: 0,
        bucket: BucketSharing::Own,
        param_buffer: None,
    };
    let layout = OptimizerLayout::plan(&mut plan, spec, CHUNK, &[segment]);
    (Arc::new(plan), Arc::new(layout))
}

fn gradient(rank: usize, i: usize) -> bf16 {
    bf16::from_f64(random::normal(random::key(7, rank as u64), i as u64))
}

/// Contents of the buckets after the reduction: for each piece, the parts of all ranks.
fn reduced(spec: &OptimizerSpec) -> Vec<f64> {
    let (plan, layout) = laid_out(spec);
    let world = Communicator::new(1, spec.dp_size, Duration::from_secs(60));
    let one = |rank: Rank| {
        let options = CpuOptions {
            lanes: Lanes::Inline,
            memory_limit: u64::MAX,
            host: HostPlace::default(),
            scratch: ScratchFloats { each: 1 << 12, sums: 1 << 12 },
            work: HostWork::default(),
        };
        let dev = cpu::open(rank, &plan, &world, &options).unwrap();
        let noise = [Arc::from([])];
        let mut optimizer =
            Optimizer::new(&layout, rank, &[CountedRange::first(N)], &noise, Arc::new(Constant));
        let bucket = optimizer.bucket(&dev, 0, 0);
        dev.write(bucket.tensor, &|i| gradient(rank.dp, i).to_f64()).unwrap();
        optimizer.reduce(&dev, 0, bucket, 0);
        dev.sync_all().unwrap();
        let own = |start: usize| -> Tensor {
            let piece = bucket.tensor.slice(start..(start + spec.bucket_elements).min(N));
            piece.shard(rank.dp, spec.dp_size)
        };
        let starts = (0..N).step_by(spec.bucket_elements);
        let read = starts.map(|start| {
            let mut values = vec![0.0; own(start).len()];
            dev.read(own(start), &mut values).unwrap();
            values
        });
        let read: Vec<Vec<f64>> = read.collect();
        dev.finish().unwrap();
        read
    };
    let ranks: Vec<Vec<Vec<f64>>> = std::thread::scope(|scope| {
        let one = &one;
        let threads: Vec<_> =
            Rank::all(1, spec.dp_size).map(|rank| scope.spawn(move || one(rank))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    let pieces = 0..ranks[0].len();
    pieces.flat_map(|piece| ranks.iter().flat_map(move |own| own[piece].clone())).collect()
}

#[test]
fn gradients_come_to_the_fp32_sum_of_the_ranks_rounded_once() {
    for dp_size in [2, 4] {
        let sum = |i| (0..dp_size).map(|rank| gradient(rank, i).to_f32()).reduce(|a, b| a + b);
        let sums = (0..N).map(|i| bf16::from_f32(sum(i).unwrap()).to_f64());
        let sums: Vec<f64> = sums.collect();
        for fraction in [0.0, 1.0] {
            for bucket_elements in [1024, N] {
                for reduce_fp32 in [false, true] {
                    let spec = spec(dp_size, reduce_fp32, fraction, bucket_elements);
                    assert!(reduced(&spec) == sums, "{spec:?}");
                }
            }
        }
    }
}

#[test]
fn sums_in_fp32_take_one_piece_of_device_memory_and_nothing_where_a_rank_is_alone() {
    let bytes = |dp_size, reduce_fp32| {
        let (plan, _) = laid_out(&spec(dp_size, reduce_fp32, 0.0, 1024));
        plan.bytes(Arena::Device)
    };
    for dp_size in [2, 4] {
        assert_eq!(bytes(dp_size, true), bytes(dp_size, false) + 4 * 1024);
    }
    assert_eq!(bytes(1, true), bytes(1, false));
}
