//! Collectives of four ranks, one thread each.
#![expect(unsafe_code, reason = "raw NCCL calls")]
#![expect(
    clippy::unwrap_used,
    clippy::multiple_unsafe_ops_per_block,
    reason = "a test passes its own live buffers"
)]

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use crate::common::in_child;
use crate::ranks::{as_rank, sums_and_gathers};
use cudarc::{
    driver::{CudaContext, CudaSlice, CudaStream, DevicePtr},
    nccl::{Comm, Id, ReduceOp, group_end, group_start, sys},
};
use half::bf16;

const FOUR: [(&str, &str); 2] = [("FAKECUDA_DEVICES", "4"), ("FAKECUDA_CHAOS_US", "500")];

/// Runs `body` on four threads with a stream and a communicator each.
fn on_ranks(body: impl Fn(usize, Arc<CudaStream>, Comm) + Sync) {
    let id = Id::new().unwrap();
    std::thread::scope(|scope| {
        for rank in 0..4 {
            let body = &body;
            scope.spawn(move || as_rank(rank, rank, id, body));
        }
    });
}

fn upload(stream: &Arc<CudaStream>, values: &[f32]) -> CudaSlice<f32> {
    stream.clone_htod(values).unwrap()
}

#[test]
fn collectives_do_what_their_names_say() {
    in_child("nccl::collectives_do_what_their_names_say", &FOUR, || {
        on_ranks(|rank, stream, comm| {
            let mut x = sums_and_gathers(rank, &stream, &comm);
            comm.all_reduce_in_place(&mut x, &ReduceOp::Max).unwrap();
            assert_eq!(stream.clone_dtoh(&x).unwrap(), [6.0, 60.0, 4.0]);
            comm.broadcast_in_place(&mut x, 2).unwrap();
        });
    });
}

#[test]
fn one_thread_drives_all_devices_in_groups() {
    in_child("nccl::one_thread_drives_all_devices_in_groups", &FOUR, || {
        let streams: Vec<_> =
            (0..4).map(|device| CudaContext::new(device).unwrap().new_stream().unwrap()).collect();
        let comms = Comm::from_devices(streams.clone()).unwrap();
        let mut buffers: Vec<_> = streams.iter().map(|stream| upload(stream, &[2.0])).collect();
        group_start().unwrap();
        for (comm, buffer) in comms.iter().zip(&mut buffers) {
            comm.all_reduce_in_place(buffer, &ReduceOp::Sum).unwrap();
        }
        group_end().unwrap();
        for (stream, buffer) in streams.iter().zip(&buffers) {
            assert_eq!(stream.clone_dtoh(buffer).unwrap(), [8.0]);
        }
    });
}

/// Runs `body` with one raw communicator per thread, so that it can query errors and abort.
fn on_raw_ranks(body: impl Fn(usize, Arc<CudaStream>, sys::ncclComm_t) + Sync) {
    let id = cudarc::nccl::result::get_uniqueid().unwrap();
    std::thread::scope(|scope| {
        for rank in 0..4 {
            let body = &body;
            scope.spawn(move || {
                let context = CudaContext::new(rank).unwrap();
                context.bind_to_thread().unwrap();
                let stream = context.new_stream().unwrap();
                let mut comm = std::ptr::null_mut();
                // SAFETY: `comm` is written before the call returns; the context is bound to this thread.
                let code = unsafe { sys::ncclCommInitRank(&raw mut comm, 4, id, rank as i32) };
                assert_eq!(code, sys::ncclResult_t::ncclSuccess);
                body(rank, stream, comm);
            });
        }
    });
}

fn all_reduce(comm: sys::ncclComm_t, stream: &CudaStream, x: &CudaSlice<f32>, count: usize) {
    let address = x.device_ptr(stream).0 as *mut std::ffi::c_void;
    let (kind, op) = (sys::ncclDataType_t::ncclFloat32, sys::ncclRedOp_t::ncclSum);
    let handle = stream.cu_stream().cast();
    // SAFETY: `x` has room for `count` elements, and lives until its stream is synchronized or the collective aborted.
    let code = unsafe { sys::ncclAllReduce(address, address, count, kind, op, comm, handle) };
    assert_eq!(code, sys::ncclResult_t::ncclSuccess);
}

fn async_error(comm: sys::ncclComm_t) -> sys::ncclResult_t {
    let mut error = sys::ncclResult_t::ncclSuccess;
    // SAFETY: the communicator is live, and `error` is written before the call returns.
    let code = unsafe { sys::ncclCommGetAsyncError(comm, &raw mut error) };
    assert_eq!(code, sys::ncclResult_t::ncclSuccess);
    error
}

#[test]
fn a_mismatch_is_an_error_that_all_ranks_can_ask_for() {
    let name = "nccl::a_mismatch_is_an_error_that_all_ranks_can_ask_for";
    let text = in_child(name, &FOUR, || {
        on_raw_ranks(|rank, stream, comm| {
            let x = stream.alloc_zeros::<f32>(8).unwrap();
            all_reduce(comm, &stream, &x, if rank == 3 { 4 } else { 8 });
            let deadline = Instant::now() + Duration::from_secs(5);
            while async_error(comm) == sys::ncclResult_t::ncclSuccess {
                assert!(Instant::now() < deadline);
                std::thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(async_error(comm), sys::ncclResult_t::ncclInvalidUsage);
            // SAFETY: the communicator is live, and not used again.
            unsafe { sys::ncclCommAbort(comm) };
            stream.synchronize().unwrap();
        });
    });
    assert!(text.is_none_or(|text| text.contains("AllReduce of 4 F32")));
}

#[test]
fn a_hanging_collective_ends_with_an_abort() {
    let variables = [("FAKECUDA_DEVICES", "4"), ("FAKECUDA_FAIL", "nccl:2")];
    in_child("nccl::a_hanging_collective_ends_with_an_abort", &variables, || {
        on_raw_ranks(|_, stream, comm| {
            let x = stream.alloc_zeros::<f32>(8).unwrap();
            all_reduce(comm, &stream, &x, 8);
            stream.synchronize().unwrap();
            all_reduce(comm, &stream, &x, 8);
            let event = stream.record_event(None).unwrap();
            std::thread::sleep(Duration::from_millis(100));
            assert!(!event.is_complete());
            assert_eq!(async_error(comm), sys::ncclResult_t::ncclSuccess);
            // SAFETY: the communicator is live, and not used again.
            unsafe { sys::ncclCommAbort(comm) };
            event.synchronize().unwrap();
        });
    });
}

#[test]
fn ranks_must_not_share_a_device() {
    let name = "nccl::ranks_must_not_share_a_device";
    in_child(name, &[("FAKECUDA_DEVICES", "1")], || {
        let stream = CudaContext::new(0).unwrap().default_stream();
        stream.context().bind_to_thread().unwrap();
        let id = cudarc::nccl::result::get_uniqueid().unwrap();
        let mut comms = [std::ptr::null_mut(); 2];
        // SAFETY: each communicator is written before its call returns; the context is bound to this thread.
        unsafe {
            assert_eq!(sys::ncclGroupStart(), sys::ncclResult_t::ncclSuccess);
            let first = sys::ncclCommInitRank(&raw mut comms[0], 2, id, 0);
            assert_eq!(first, sys::ncclResult_t::ncclSuccess);
            let second = sys::ncclCommInitRank(&raw mut comms[1], 2, id, 1);
            assert_eq!(second, sys::ncclResult_t::ncclInvalidUsage);
        }
    });
}

/// Adds 1 on rank 0 and, on the others, half of the bf16 spacing at 1. Added one by one, the small
/// numbers are lost; added to each other first, they are not.
fn sums_of_small_numbers() {
    on_ranks(|rank, stream, comm| {
        let own = if rank == 0 { 1.0 } else { 1.0 / 256.0 };
        let own = [bf16::from_f32(own); 4];
        let mut sum = stream.clone_htod(&own).unwrap();
        comm.all_reduce_in_place(&mut sum, &ReduceOp::Sum).unwrap();
        let whole = stream.clone_htod(&own).unwrap();
        let mut part = stream.alloc_zeros::<bf16>(1).unwrap();
        comm.reduce_scatter(&whole, &mut part, &ReduceOp::Sum).unwrap();
        let sum = stream.clone_dtoh(&sum).unwrap();
        assert_eq!(stream.clone_dtoh(&part).unwrap(), [sum[rank]]);
        let hops = std::env::var_os("FAKECUDA_NCCL_HOPS").is_some();
        // Ties go to even: 1 + 3/256 up to 1 + 4/256, 1 + 1/256 down to 1. Two rings reach rank 0
        // with small numbers that are already added; the others lose the small numbers one by one.
        let [one, most] = [1.0, 1.0 + 4.0 / 256.0].map(bf16::from_f32);
        let expected = if hops { [most, most, one, one] } else { [most; 4] };
        assert_eq!(sum, expected, "rank {rank}");
    });
}

#[test]
fn sums_of_16_bits_round_once_or_at_each_hop() {
    in_child("nccl::sums_of_16_bits_round_once_or_at_each_hop", &FOUR, sums_of_small_numbers);
}

#[test]
fn sums_of_16_bits_round_at_each_hop_where_that_is_asked_for() {
    let name = "nccl::sums_of_16_bits_round_at_each_hop_where_that_is_asked_for";
    let variables = [FOUR[0], FOUR[1], ("FAKECUDA_NCCL_HOPS", "1")];
    in_child(name, &variables, sums_of_small_numbers);
}
