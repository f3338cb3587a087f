//! The driver through cudarc: memory, copies, kernels, events, order, modules.
#![expect(unsafe_code, reason = "kernel launches and raw driver calls")]
#![expect(
    clippy::unwrap_used,
    clippy::multiple_unsafe_ops_per_block,
    reason = "a test passes its own live buffers"
)]

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use crate::common::in_child;
use cudarc::{
    driver::{
        CudaContext, CudaEvent, CudaFunction, CudaSlice, CudaStream, DevicePtr, LaunchConfig,
        PushKernelArg, result, sys,
    },
    nvrtc::{CompileOptions, compile_ptx, compile_ptx_with_opts},
};

const SOURCE: &str = r#"
extern "C" __global__ void fake_fill(float* x, float value, int n) { }
extern "C" __global__ void __launch_bounds__(64) fake_add(float* x, const float* y, int n) { }
"#;

const CHAOS: [(&str, &str); 1] = [("FAKECUDA_CHAOS_US", "3000")];

fn function(context: &Arc<CudaContext>, name: &str) -> CudaFunction {
    let module = context.load_module(compile_ptx(SOURCE).unwrap()).unwrap();
    module.load_function(name).unwrap()
}

fn fill(stream: &CudaStream, fill: &CudaFunction, x: &mut CudaSlice<f32>, value: f32) {
    let count = x.len() as i32;
    let mut launch = stream.launch_builder(fill);
    launch.arg(x).arg(&value).arg(&count);
    // SAFETY: the kernel has these three parameters; the buffer has `count` elements to write.
    unsafe { launch.launch(LaunchConfig::for_num_elems(count as u32)) }.unwrap();
}

#[test]
fn copies_kernels_and_counters_work() {
    in_child("driver::copies_kernels_and_counters_work", &[("FAKECUDA_DEVICES", "2")], || {
        assert_eq!(CudaContext::device_count().unwrap(), 2);
        let context = CudaContext::new(1).unwrap();
        assert_eq!(context.compute_capability().unwrap(), (8, 0));
        let stream = context.new_stream().unwrap();
        let y = stream.clone_htod(&[1.0f32, 2.0, 3.0]).unwrap();
        // SAFETY: the uninitialized memory holds floats, and any bits are a float.
        let mut x = unsafe { stream.alloc::<f32>(3) }.unwrap();
        assert!(stream.clone_dtoh(&x).unwrap().iter().all(|x| x.is_nan()));
        fill(&stream, &function(&context, "fake_fill"), &mut x, 10.0);
        let add = function(&context, "fake_add");
        let mut launch = stream.launch_builder(&add);
        launch.arg(&mut x).arg(&y).arg(&3i32);
        // SAFETY: the kernel has these three parameters, and each buffer has three elements.
        unsafe { launch.launch(LaunchConfig::for_num_elems(3)) }.unwrap();
        assert_eq!(stream.clone_dtoh(&x).unwrap(), [11.0, 12.0, 13.0]);
        let stats = fake_cuda::stats().unwrap();
        assert_eq!((stats.launches, stats.h2d_bytes, stats.d2h_bytes), (2, 12, 24));
        assert_eq!(fake_cuda::memory_use(1).unwrap().used, 24);
    });
}

#[test]
fn memory_is_limited_per_device() {
    let variables =
        [("FAKECUDA_MEMORY", "1000"), ("FAKECUDA_BESIDE", "0"), ("FAKECUDA_DEVICES", "2")];
    in_child("driver::memory_is_limited_per_device", &variables, || {
        // Not the default stream: cudarc frees a slice of it on the default stream of the context
        // that is current when the slice is dropped.
        let stream = CudaContext::new(0).unwrap().new_stream().unwrap();
        let kept = stream.alloc_zeros::<u8>(600).unwrap();
        let error = stream.alloc_zeros::<u8>(600).unwrap_err();
        assert_eq!(error.0, sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY);
        let other = CudaContext::new(1).unwrap().new_stream().unwrap();
        other.alloc_zeros::<u8>(600).unwrap();
        drop(kept);
        stream.synchronize().unwrap();
        stream.alloc_zeros::<u8>(1000).unwrap();
        assert_eq!(fake_cuda::memory_use(0).unwrap().peak, 1000);
    });
}

/// Fills on one stream and copies on another, with or without the wait; true if the copy was right.
fn copied_after_fill(waits: bool) -> bool {
    let context = CudaContext::new(0).unwrap();
    // SAFETY: the test orders its streams, or checks what happens without an order.
    unsafe { context.disable_event_tracking() };
    let (first, second) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let kernel = function(&context, "fake_fill");
    let mut right = true;
    for round in 1..20 {
        // SAFETY: the uninitialized memory holds floats, and any bits are a float.
        let mut x = unsafe { first.alloc::<f32>(4) }.unwrap();
        // SAFETY: as above.
        let mut y = unsafe { second.alloc::<f32>(4) }.unwrap();
        fill(&first, &kernel, &mut x, round as f32);
        if waits {
            second.wait(&first.record_event(None).unwrap()).unwrap();
        }
        second.memcpy_dtod(&x, &mut y).unwrap();
        right &= second.clone_dtoh(&y).unwrap() == [round as f32; 4];
        first.synchronize().unwrap();
    }
    right
}

#[test]
fn a_wait_orders_streams() {
    in_child("driver::a_wait_orders_streams", &CHAOS, || assert!(copied_after_fill(true)));
}

#[test]
fn a_missing_wait_is_seen_with_chaos() {
    in_child("driver::a_missing_wait_is_seen_with_chaos", &CHAOS, || {
        assert!(!copied_after_fill(false));
    });
}

#[test]
fn a_wait_takes_the_record_that_was_the_latest_when_it_was_called() {
    let name = "driver::a_wait_takes_the_record_that_was_the_latest_when_it_was_called";
    in_child(name, &[], || {
        let context = CudaContext::new(0).unwrap();
        let (first, second) = (context.new_stream().unwrap(), context.new_stream().unwrap());
        let event = context.new_event(None).unwrap();
        second.wait(&event).unwrap(); // never recorded: nothing to wait for
        second.synchronize().unwrap();
        event.record(&first).unwrap();
        second.wait(&event).unwrap();
        let (flag, address) = flag(&context);
        hold(&first, address);
        event.record(&first).unwrap(); // later than the wait
        second.synchronize().unwrap();
        assert!(!event.is_complete());
        flag.store(1, SeqCst);
        event.synchronize().unwrap();
        assert!(event.is_complete());
    });
}

/// A word of registered host memory, and its address on the device.
fn flag(context: &CudaContext) -> (&'static AtomicU32, u64) {
    context.bind_to_thread().unwrap();
    let flag: &'static _ = Box::leak(Box::new(AtomicU32::new(0)));
    let pointer = std::ptr::from_ref(flag).cast_mut().cast();
    let mut address = 0;
    // SAFETY: the word is leaked and lives as long as the process; the address goes to a live
    // variable.
    unsafe {
        sys::cuMemHostRegister_v2(pointer, 4, 3).result().unwrap();
        sys::cuMemHostGetDevicePointer_v2(&raw mut address, pointer, 0).result().unwrap();
    }
    (flag, address)
}

/// Makes the stream wait until the flag is 1.
fn hold(stream: &CudaStream, address: u64) {
    // SAFETY: a live stream, and the address of a registered word that lives as long as the process.
    unsafe { sys::cuStreamWaitValue32_v2(stream.cu_stream(), address, 1, 0) }.result().unwrap();
}

#[test]
fn a_stream_waits_for_a_flag_of_the_host() {
    in_child("driver::a_stream_waits_for_a_flag_of_the_host", &[], || {
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        let (flag, address) = flag(&context);
        hold(&stream, address);
        let handle = stream.cu_stream();
        // SAFETY: as in `hold`.
        unsafe { sys::cuStreamWriteValue32_v2(handle, address, 7, 0) }.result().unwrap();
        never(|| flag.load(SeqCst) != 0);
        flag.store(1, SeqCst);
        stream.synchronize().unwrap();
        assert_eq!(flag.load(SeqCst), 7);
    });
}

#[test]
fn pageable_copies_block_and_pinned_ones_do_not() {
    let slow = [("FAKECUDA_CHAOS_US", "60000"), ("FAKECUDA_SEED", "3")];
    in_child("driver::pageable_copies_block_and_pinned_ones_do_not", &slow, || {
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        let device = stream.alloc_zeros::<u8>(64).unwrap();
        stream.synchronize().unwrap();
        let address = device.device_ptr(&stream).0;
        let mut host = vec![9u8; 64];
        let handle = stream.cu_stream();
        // SAFETY: 64 bytes of a live allocation of 64; the call returns after the copy, since
        // `host` is not registered.
        unsafe { result::memcpy_dtoh_async(&mut host, address, handle) }.unwrap();
        assert_eq!(host, [0; 64]);
        host.fill(9);
        let pointer = host.as_mut_ptr().cast();
        // SAFETY: 64 bytes, which live until they are unregistered.
        unsafe { sys::cuMemHostRegister_v2(pointer, 64, 1) }.result().unwrap();
        let (flag, word) = flag(&context);
        hold(&stream, word);
        for _ in 0..10 {
            // SAFETY: as above; `host` outlives the stream's work, which is synchronized with below.
            unsafe { result::memcpy_dtoh_async(&mut host, address, handle) }.unwrap();
        }
        assert_eq!(host, [9; 64]);
        flag.store(1, SeqCst);
        stream.synchronize().unwrap();
        assert_eq!(host, [0; 64]);
        // SAFETY: registered above, and no longer used.
        unsafe { sys::cuMemHostUnregister(pointer) }.result().unwrap();
        assert_eq!(fake_cuda::stats().unwrap().pageable_copies, 1);
    });
}

#[test]
fn wrong_addresses_and_handles_are_refused() {
    in_child(
        "driver::wrong_addresses_and_handles_are_refused",
        &[("FAKECUDA_DEVICES", "2")],
        || {
            let context = CudaContext::new(0).unwrap();
            let stream = context.new_stream().unwrap();
            let device = stream.alloc_zeros::<u8>(64).unwrap();
            let address = device.device_ptr(&stream).0;
            let handle = stream.cu_stream();
            // SAFETY: the fake driver looks up these wrong addresses before it uses them.
            let copy =
                |from, bytes| unsafe { sys::cuMemcpyDtoDAsync_v2(address, from, bytes, handle) };
            use sys::CUresult::{
                CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, CUDA_ERROR_INVALID_HANDLE,
                CUDA_ERROR_INVALID_VALUE,
            };
            assert_eq!(copy(address + 32, 64), CUDA_ERROR_INVALID_VALUE);
            assert_eq!(copy(0, 8), CUDA_ERROR_INVALID_VALUE);
            let mut host = [0u8; 8];
            // SAFETY: never registered, which the call checks first.
            let unregister = unsafe { sys::cuMemHostUnregister(host.as_mut_ptr().cast()) };
            assert_eq!(unregister, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
            let stale = context.new_event(None).unwrap();
            let other = CudaContext::new(1).unwrap();
            let foreign = other.new_stream().unwrap();
            // SAFETY: both handles are live; the call must refuse different contexts.
            let record = unsafe { sys::cuEventRecord(stale.cu_event(), foreign.cu_stream()) };
            assert_eq!(record, CUDA_ERROR_INVALID_HANDLE);
            let kernel = function(&other, "fake_fill");
            let mut launch = stream.launch_builder(&kernel);
            let mut x = stream.alloc_zeros::<f32>(1).unwrap();
            launch.arg(&mut x).arg(&1.0f32).arg(&1i32);
            // SAFETY: the kernel has these three parameters; the call must refuse its other
            // context.
            let error = unsafe { launch.launch(LaunchConfig::for_num_elems(1)) }.unwrap_err();
            assert_eq!(error.0, CUDA_ERROR_INVALID_HANDLE);
        },
    );
}

/// Fills memory of device 1 by a kernel of device 0; `enabled_on` lists devices with peer access.
fn fill_of_a_peer(enabled_on: &[usize]) -> Result<(), sys::CUresult> {
    let contexts = [0, 1].map(|gpu| CudaContext::new(gpu).unwrap());
    let (own, peer) = (contexts[0].new_stream().unwrap(), contexts[1].new_stream().unwrap());
    let x = peer.alloc_zeros::<f32>(4).unwrap();
    peer.synchronize().unwrap();
    for &gpu in enabled_on {
        contexts[gpu].bind_to_thread().unwrap();
        // SAFETY: a living context of another device.
        unsafe { sys::cuCtxEnablePeerAccess(contexts[1 - gpu].cu_ctx(), 0) }.result().unwrap();
    }
    contexts[0].bind_to_thread().unwrap();
    // A copy needs no peer access.
    let mut copy = own.alloc_zeros::<f32>(4).unwrap();
    own.memcpy_dtod(&x, &mut copy).unwrap();
    own.synchronize().unwrap();
    let kernel = function(&contexts[0], "fake_fill");
    let address = x.device_ptr(&peer).0;
    let mut launch = own.launch_builder(&kernel);
    launch.arg(&address).arg(&1f32).arg(&4i32);
    // SAFETY: the kernel has these three parameters; the test is whether it may access the
    // elements.
    unsafe { launch.launch(LaunchConfig::for_num_elems(4)) }.unwrap();
    let ended = own.synchronize().map_err(|e| e.0);
    // The error stays.
    assert_eq!(own.synchronize().map_err(|e| e.0), ended);
    peer.synchronize().unwrap();
    ended
}

#[test]
fn a_kernel_reaches_another_gpu_only_where_its_own_has_peer_access() {
    let name = "driver::a_kernel_reaches_another_gpu_only_where_its_own_has_peer_access";
    in_child(name, &[("FAKECUDA_DEVICES", "2")], || {
        assert_eq!(fill_of_a_peer(&[0]), Ok(()));
    });
}

#[test]
fn a_kernel_without_peer_access_loses_its_gpu() {
    // The other direction does not help.
    in_child(
        "driver::a_kernel_without_peer_access_loses_its_gpu",
        &[("FAKECUDA_DEVICES", "2")],
        || {
            assert_eq!(fill_of_a_peer(&[1]), Err(sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS));
        },
    );
}

#[test]
fn nvrtc_refuses_what_the_real_one_would() {
    in_child("driver::nvrtc_refuses_what_the_real_one_would", &[], || {
        let options = |options: &[&str]| CompileOptions {
            options: options.iter().map(|option| option.to_string()).collect(),
            ..Default::default()
        };
        let flags = ["--gpu-architecture=sm_80", "--use_fast_math", "--std=c++17"];
        compile_ptx_with_opts(SOURCE, options(&flags)).unwrap();
        compile_ptx_with_opts(SOURCE, options(&["--gpu-architecture=sm_30"])).unwrap_err();
        compile_ptx_with_opts(SOURCE, options(&["--no-such-option"])).unwrap_err();
        compile_ptx("#include <cuda_fp16.h>").unwrap_err();
        compile_ptx("extern \"C\" __global__ void k() {").unwrap_err();
        let context = CudaContext::new(0).unwrap();
        let module = context.load_module(compile_ptx(SOURCE).unwrap()).unwrap();
        // The emulator knows this kernel, but the source does not contain it.
        module.load_function("fake_count").unwrap_err();
        module.load_function("no_such_kernel").unwrap_err();
    });
}

#[test]
fn timing_events_measure() {
    in_child("driver::timing_events_measure", &[], || {
        let context = CudaContext::new(0).unwrap();
        let stream = context.new_stream().unwrap();
        let flags = Some(sys::CUevent_flags::CU_EVENT_DEFAULT);
        let start = stream.record_event(flags).unwrap();
        stream.synchronize().unwrap();
        assert!(fake_cuda::advance(5));
        let end = stream.record_event(flags).unwrap();
        assert!(start.elapsed_ms(&end).unwrap() >= 5000.0);
    });
}

/// Enqueues work that waits for nothing, while another stream waits for a flag of the host.
fn event_next_to_a_waiting_stream(
    device: usize,
    streams: usize,
) -> (CudaEvent, &'static AtomicU32) {
    let context = CudaContext::new(device).unwrap();
    let streams: Vec<_> = (0..streams).map(|_| context.new_stream().unwrap()).collect();
    let (flag, address) = flag(&context);
    hold(&streams[0], address);
    (streams[streams.len() - 1].record_event(None).unwrap(), flag)
}

/// Checks for some time that an event does not happen before the host acts.
fn never(happens: impl Fn() -> bool) {
    for _ in 0..100 {
        assert!(!happens());
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn streams_that_share_a_hardware_queue_wait_for_each_other() {
    let name = "driver::streams_that_share_a_hardware_queue_wait_for_each_other";
    let variables = [
        ("FAKECUDA_CONNECTIONS", "1"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "3"),
        ("FAKECUDA_DEVICES", "2"),
    ];
    in_child(name, &variables, || {
        let (shared_queue, flag) = event_next_to_a_waiting_stream(0, 4);
        never(|| shared_queue.is_complete());
        flag.store(1, SeqCst);
        shared_queue.synchronize().unwrap();
        let (own_queue, flag) = event_next_to_a_waiting_stream(1, 3);
        own_queue.synchronize().unwrap();
        flag.store(1, SeqCst);
    });
}

/// Runs two threads: one is blocked in a full queue, the other queries an event of another stream.
/// `look` gets whether the query has returned, before the queue moves.
fn query_during_a_full_queue(look: impl FnOnce(&AtomicBool)) {
    let context = CudaContext::new(0).unwrap();
    let (full, other) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let done = other.record_event(None).unwrap();
    done.synchronize().unwrap();
    let (flag, address) = flag(&context);
    hold(&full, address);
    let event = context.new_event(None).unwrap();
    let (returned, recorded) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..20 {
                event.record(&full).unwrap();
                recorded.fetch_add(1, SeqCst);
            }
        });
        // When the stream starts the wait, its place in the queue becomes free once more.
        while fake_cuda::stats().unwrap().blocked == 0 || recorded.load(SeqCst) < 16 {
            std::thread::sleep(Duration::from_millis(1));
        }
        scope.spawn(|| returned.store(done.is_complete(), SeqCst));
        look(&returned);
        flag.store(1, SeqCst);
    });
    assert!(returned.load(SeqCst));
}

#[test]
fn a_full_queue_holds_up_who_asks_for_an_event() {
    let name = "driver::a_full_queue_holds_up_who_asks_for_an_event";
    let variables = [("FAKECUDA_QUEUE", "16"), ("FAKECUDA_BLOCKING", "1")];
    in_child(name, &variables, || {
        query_during_a_full_queue(|returned| never(|| returned.load(SeqCst)));
    });
}

#[test]
fn a_full_queue_holds_up_launches_alone_unless_asked_for() {
    let name = "driver::a_full_queue_holds_up_launches_alone_unless_asked_for";
    in_child(name, &[("FAKECUDA_QUEUE", "16")], || {
        query_during_a_full_queue(|returned| {
            while !returned.load(SeqCst) {
                std::thread::sleep(Duration::from_millis(1));
            }
        });
    });
}
