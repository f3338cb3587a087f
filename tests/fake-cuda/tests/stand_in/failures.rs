//! Failures on demand.
#![expect(unsafe_code, reason = "raw driver calls")]

use crate::common::in_child;
use cudarc::driver::{CudaContext, result, sys, sys::CUresult};

#[test]
fn a_lost_device_answers_every_call_with_its_error() {
    let variables = [("FAKECUDA_FAIL", "lost:3@0"), ("FAKECUDA_DEVICES", "2")];
    in_child("failures::a_lost_device_answers_every_call_with_its_error", &variables, || {
        let lost = CUresult::CUDA_ERROR_ILLEGAL_ADDRESS;
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        let event = context.new_event(None).unwrap();
        let other = CudaContext::new(1).unwrap();
        let other_stream = other.new_stream().unwrap();
        context.bind_to_thread().unwrap();
        // SAFETY: a context is bound to this thread.
        let buffer = unsafe { result::malloc_sync(64) }.unwrap();
        for _ in 0..5 {
            // SAFETY: 64 bytes that were allocated above, and a live stream.
            let _ = unsafe { result::memset_d8_async(buffer, 1, 64, stream.cu_stream()) };
        }
        assert_eq!(stream.synchronize().unwrap_err().0, lost);
        assert_eq!(event.record(&stream).unwrap_err().0, lost);
        // SAFETY: allocated above and no longer used; the device is lost, which the test checks.
        assert_eq!(unsafe { result::free_sync(buffer) }.unwrap_err().0, lost);
        // SAFETY: a context is bound to this thread.
        assert_eq!(unsafe { result::malloc_sync(64) }.unwrap_err().0, lost);
        let healthy = other_stream.alloc_zeros::<u8>(8).unwrap();
        assert_eq!(other_stream.clone_dtoh(&healthy).unwrap(), [0; 8]);
    });
}

#[test]
fn the_nth_copy_and_allocation_fail_and_the_next_work() {
    let variables = [("FAKECUDA_FAIL", "memcpy:2,alloc:2")];
    in_child("failures::the_nth_copy_and_allocation_fail_and_the_next_work", &variables, || {
        let stream = CudaContext::new(0).unwrap().default_stream();
        let x = stream.alloc_zeros::<u8>(8).unwrap();
        let error = stream.alloc_zeros::<u8>(8).unwrap_err();
        assert_eq!(error.0, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        stream.clone_dtoh(&x).unwrap();
        assert_eq!(stream.clone_dtoh(&x).unwrap_err().0, CUresult::CUDA_ERROR_INVALID_VALUE);
        stream.clone_dtoh(&x).unwrap();
    });
}

#[test]
fn a_copy_from_memory_that_is_freed_too_early_loses_the_device() {
    let name = "failures::a_copy_from_memory_that_is_freed_too_early_loses_the_device";
    let text = in_child(name, &[("FAKECUDA_CHAOS_US", "50000"), ("FAKECUDA_SEED", "2")], || {
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        let mut host = vec![0u8; 64];
        let device = stream.alloc_zeros::<u8>(64).unwrap();
        stream.synchronize().unwrap();
        let address = device.leak();
        // SAFETY: 64 bytes of a live allocation.
        unsafe { sys::cuMemHostRegister_v2(host.as_mut_ptr().cast(), 64, 1) }.result().unwrap();
        for _ in 0..10 {
            // SAFETY: `host` is registered and `address` leaked; both outlive the synchronized
            // stream's work.
            unsafe { result::memcpy_dtoh_async(&mut host, address, stream.cu_stream()) }.unwrap();
        }
        // SAFETY: registered above; the fake driver must notice that copies are still under way.
        unsafe { sys::cuMemHostUnregister(host.as_mut_ptr().cast()) }.result().unwrap();
        let error = stream.synchronize().unwrap_err();
        assert_eq!(error.0, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    });
    assert!(text.is_none_or(|text| text.contains("copy: 64 bytes")));
}

#[test]
fn no_device_is_an_error_and_not_a_crash() {
    in_child(
        "failures::no_device_is_an_error_and_not_a_crash",
        &[("FAKECUDA_DEVICES", "0")],
        || {
            let error = CudaContext::device_count().unwrap_err();
            assert_eq!(error.0, CUresult::CUDA_ERROR_NO_DEVICE);
        },
    );
}
