//! Device memory outside of allocations: contexts, code, streams, page tables, NCCL's buffers.
#![expect(unsafe_code, reason = "raw driver and library calls")]
#![expect(
    clippy::unwrap_used,
    clippy::multiple_unsafe_ops_per_block,
    reason = "a test passes its own live buffers"
)]

use crate::common::in_child;
use cudarc::cublaslt::result as blaslt;
use cudarc::driver::{CudaContext, sys};
use cudarc::nccl::sys as nccl;
use std::ffi::c_void;

const MIB: u64 = 1 << 20;
const PORTABLE: u32 = 1;

fn overhead(device: i32) -> u64 {
    fake_cuda::memory_use(device).unwrap().overhead
}

fn free() -> u64 {
    let (mut free, mut total) = (0, 0);
    // SAFETY: two locals to write to.
    unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) }.result().unwrap();
    free as u64
}

#[test]
fn context_and_products_take_memory_on_v100() {
    in_child(
        "overhead::context_and_products_take_memory_on_v100",
        &[("FAKECUDA_SM", "70")],
        || {
            let context = CudaContext::new(0).unwrap();
            context.bind_to_thread().unwrap();
            assert!(overhead(0) >= 300 * MIB, "{}", overhead(0));
            let before = free();
            let handle = blaslt::create_handle().unwrap();
            assert_eq!(before - free(), 97 * MIB);
            // SAFETY: the handle is live, and not used again.
            unsafe { blaslt::destroy_handle(handle) }.unwrap();
            // The code stays loaded; another handle uses no memory.
            blaslt::create_handle().unwrap();
            assert_eq!(before - free(), 97 * MIB);
        },
    );
}

#[test]
fn products_take_more_on_h100_and_nothing_is_taken_where_it_is_not_there() {
    let name = "overhead::products_take_more_on_h100_and_nothing_is_taken_where_it_is_not_there";
    // Too little memory for 500 MiB of a context and 357 MiB of cuBLASLt's code.
    let memory = (850 * MIB).to_string();
    in_child(name, &[("FAKECUDA_SM", "90"), ("FAKECUDA_MEMORY", &memory)], || {
        let context = CudaContext::new(0).unwrap();
        context.bind_to_thread().unwrap();
        let before = overhead(0);
        blaslt::create_handle().unwrap_err();
        assert_eq!(overhead(0), before);
        let stream = context.new_stream().unwrap();
        assert!(stream.alloc_zeros::<u8>(400 << 20).is_err());
    });
}

/// 64 MiB have 16,384 pages, with 8 bytes each in every context that maps the memory.
#[test]
fn page_tables_lie_in_each_context_that_maps_host_memory() {
    let name = "overhead::page_tables_lie_in_each_context_that_maps_host_memory";
    in_child(name, &[("FAKECUDA_DEVICES", "2")], || {
        let other = CudaContext::new(1).unwrap();
        let context = CudaContext::new(0).unwrap();
        context.bind_to_thread().unwrap();
        let before = [overhead(0), overhead(1)];
        let mut host = vec![0u8; 64 << 20];
        let start: *mut c_void = host.as_mut_ptr().cast();
        let register = |flags: u32| {
            // SAFETY: `host` outlives the registration, which is ended here.
            unsafe {
                sys::cuMemHostRegister_v2(start, 64 << 20, flags).result().unwrap();
                let taken = [overhead(0) - before[0], overhead(1) - before[1]];
                sys::cuMemHostUnregister(start).result().unwrap();
                taken
            }
        };
        assert_eq!(register(0), [8 * 16_384, 0]);
        assert_eq!(register(PORTABLE), [8 * 16_384; 2]);
        assert_eq!([overhead(0), overhead(1)], before);
        drop(other);
    });
}

/// For other contexts, memory that one context has pinned is pageable: a copy blocks.
#[test]
fn host_memory_is_pinned_for_the_context_that_registered_it() {
    let name = "overhead::host_memory_is_pinned_for_the_context_that_registered_it";
    in_child(name, &[("FAKECUDA_DEVICES", "2")], || {
        let contexts = [0, 1].map(|device| CudaContext::new(device).unwrap());
        let mut host = vec![0u8; 4096];
        let start: *mut c_void = host.as_mut_ptr().cast();
        contexts[0].bind_to_thread().unwrap();
        // SAFETY: `host` outlives all copies.
        unsafe { sys::cuMemHostRegister_v2(start, 4096, 0) }.result().unwrap();
        for (device, pageable) in [(0, 0), (1, 1)] {
            contexts[device].bind_to_thread().unwrap();
            let (stream, mut at) = (contexts[device].new_stream().unwrap(), 0);
            // SAFETY: both ranges are live to the end of the process.
            unsafe {
                sys::cuMemAlloc_v2(&raw mut at, 4096).result().unwrap();
                let copied = sys::cuMemcpyHtoDAsync_v2(at, start, 4096, stream.cu_stream());
                copied.result().unwrap();
            }
            stream.synchronize().unwrap();
            assert_eq!(fake_cuda::stats().unwrap().pageable_copies, pageable);
        }
        // Neither inside a registration nor for a registration without the flag `MAPPED`.
        let mut address = 0;
        contexts[0].bind_to_thread().unwrap();
        // SAFETY: a local to write to.
        unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut address, start, 0) }
            .result()
            .unwrap_err();
    });
}

#[test]
fn nccl_connects_at_the_first_collective_of_each_size() {
    let name = "overhead::nccl_connects_at_the_first_collective_of_each_size";
    in_child(name, &[("FAKECUDA_SM", "70")], || {
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        context.bind_to_thread().unwrap();
        let mut x = stream.alloc_zeros::<f32>(1 << 20).unwrap();
        let id = cudarc::nccl::result::get_uniqueid().unwrap();
        let mut comm = std::ptr::null_mut();
        let before = free();
        // SAFETY: one rank, whose communicator is written before the call returns.
        unsafe { nccl::ncclCommInitRank(&raw mut comm, 1, id, 0) }.result().unwrap();
        let joined = before - free();
        assert!(joined > 47 * MIB && joined < 100 * MIB, "{joined}");
        let mut taken_by = |count: usize| {
            let before = free();
            let at = cudarc::driver::DevicePtrMut::device_ptr_mut(&mut x, &stream).0;
            // SAFETY: the buffer has at least this many elements.
            unsafe {
                cudarc::nccl::result::all_reduce(
                    at as *const _,
                    at as *mut _,
                    count,
                    nccl::ncclDataType_t::ncclFloat32,
                    nccl::ncclRedOp_t::ncclSum,
                    comm,
                    stream.cu_stream().cast(),
                )
            }
            .unwrap();
            before - free()
        };
        assert_eq!(taken_by(2), 500 * MIB);
        assert_eq!(taken_by(2), 0);
        assert_eq!(taken_by(1 << 20), 100 * MIB);
    });
}

#[test]
fn accounted_memory_has_addresses_and_no_bytes() {
    let name = "overhead::accounted_memory_has_addresses_and_no_bytes";
    let variables = [("FAKECUDA_ACCOUNTING", "1"), ("FAKECUDA_MEMORY", "40000000000000")];
    in_child(name, &variables, || {
        let context = CudaContext::new(0).unwrap();
        context.bind_to_thread().unwrap();
        let (stream, mut at) = (context.new_stream().unwrap(), 0);
        let bytes = 30_000_000_000_000;
        // SAFETY: 30 TB of addresses without memory, which nothing touches.
        unsafe {
            sys::cuMemAlloc_v2(&raw mut at, bytes).result().unwrap();
            sys::cuMemsetD8Async(at, 0, bytes, stream.cu_stream()).result().unwrap();
            sys::cuMemcpyDtoDAsync_v2(at, at + 8, bytes - 8, stream.cu_stream()).result().unwrap();
        }
        stream.synchronize().unwrap();
        assert!(fake_cuda::memory_use(0).unwrap().used == bytes as u64);
        // An access outside of the allocation is still refused.
        // SAFETY: refused before anything is touched.
        unsafe { sys::cuMemsetD8Async(at + 8, 0, bytes, stream.cu_stream()) }.result().unwrap_err();
    });
}

#[test]
fn libraries_of_a_later_major_than_the_drivers_fail() {
    let name = "overhead::libraries_of_a_later_major_than_the_drivers_fail";
    let versions = [("FAKECUDA_DRIVER", "12040"), ("FAKECUDA_CUBLASLT", "130000")];
    in_child(name, &versions, || {
        CudaContext::new(0).unwrap().bind_to_thread().unwrap();
        blaslt::create_handle().unwrap_err();
    });
}
