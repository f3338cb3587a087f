//! Ranks of a communicator of four, and the collectives that all of them run.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::sync::Arc;

use cudarc::{
    driver::{CudaContext, CudaSlice, CudaStream},
    nccl::{Comm, Id, ReduceOp},
};
use half::bf16;

/// Runs `body` as rank `rank` on `device`, with a stream and a communicator.
pub(crate) fn as_rank(
    rank: usize,
    device: usize,
    id: Id,
    body: impl FnOnce(usize, Arc<CudaStream>, Comm),
) {
    let context = CudaContext::new(device).unwrap();
    context.bind_to_thread().unwrap();
    let stream = context.new_stream().unwrap();
    let comm = Comm::from_rank(stream.clone(), rank, 4, id).unwrap();
    body(rank, stream, comm);
}

/// Runs sums, shares of sums, gathers, and sums of 16 bits. Returns the first sum.
pub(crate) fn sums_and_gathers(
    rank: usize,
    stream: &Arc<CudaStream>,
    comm: &Comm,
) -> CudaSlice<f32> {
    let r = rank as f32;
    let mut x = stream.clone_htod(&[r, 10.0 * r, 1.0]).unwrap();
    comm.all_reduce_in_place(&mut x, &ReduceOp::Sum).unwrap();
    assert_eq!(stream.clone_dtoh(&x).unwrap(), [6.0, 60.0, 4.0]);

    let long = stream.clone_htod(&[r, r + 1.0, r + 2.0, r + 3.0]).unwrap();
    let mut shard = stream.alloc_zeros::<f32>(1).unwrap();
    comm.reduce_scatter(&long, &mut shard, &ReduceOp::Sum).unwrap();
    assert_eq!(stream.clone_dtoh(&shard).unwrap(), [6.0 + 4.0 * r]);

    let mut all = stream.alloc_zeros::<f32>(4).unwrap();
    comm.all_gather(&shard, &mut all).unwrap();
    assert_eq!(stream.clone_dtoh(&all).unwrap(), [6.0, 10.0, 14.0, 18.0]);

    let halves = [bf16::from_f32(r), bf16::from_f32(0.5)];
    let mut halves = stream.clone_htod(&halves).unwrap();
    comm.all_reduce_in_place(&mut halves, &ReduceOp::Sum).unwrap();
    assert_eq!(stream.clone_dtoh(&halves).unwrap(), [6.0, 2.0].map(bf16::from_f32));
    x
}
