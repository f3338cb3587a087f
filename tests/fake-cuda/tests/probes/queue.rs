//! Measures whether a thread that queries events is blocked while another thread waits at a full
//! launch queue.

use crate::small;
use cudarc::driver::{CudaContext, CudaStream, DevicePtr, sys};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const DEADLINE: Duration = Duration::from_secs(10);

/// A separate page, since the driver registers whole pages.
#[repr(align(4096))]
struct Page([AtomicU32; 1024]);

pub(crate) fn print() {
    let context = CudaContext::new(0).unwrap();
    let (full, other) = (context.new_stream().unwrap(), context.new_stream().unwrap());
    let page = Box::leak(Box::new(Page([const { AtomicU32::new(0) }; 1024])));
    let word = registered(page);
    let buffer = full.alloc_zeros::<u8>(4096).unwrap();
    let (at, _guard) = buffer.device_ptr(&full);
    full.synchronize().unwrap();
    let passed = other.record_event(None).unwrap();
    other.synchronize().unwrap();
    let pending = context.new_event(None).unwrap();
    let (launched, done) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    watch(&launched, &done);
    let count = if small() { 1000 } else { 5000 };
    std::thread::scope(|scope| {
        let (context, full, launched, pending) = (&context, &full, &launched, &pending);
        scope.spawn(move || {
            context.bind_to_thread().unwrap();
            wait_for(full, word);
            pending.record(full).unwrap();
            for _ in 0..count {
                // SAFETY: a byte of the buffer, which outlives the stream's work.
                unsafe { sys::cuMemsetD8Async(at, 1, 1, full.cu_stream()) }.result().unwrap();
                launched.fetch_add(1, Ordering::SeqCst);
            }
        });
        context.bind_to_thread().unwrap();
        settle(launched, count);
        eprintln!("figure queue launched={} of={count}", launched.load(Ordering::SeqCst));
        timed("query-of-the-full-stream", || assert!(!pending.is_complete()));
        timed("query-of-another-stream", || assert!(passed.is_complete()));
        timed("synchronize-another-stream", || passed.synchronize().unwrap());
        page.0[0].store(1, Ordering::Release);
    });
    timed("drain", || full.synchronize().unwrap());
    done.store(true, Ordering::SeqCst);
    assert_eq!(launched.load(Ordering::SeqCst), count);
}

/// Ends the process if the calls do not return, because nothing else can end them.
fn watch(launched: &Arc<AtomicUsize>, done: &Arc<AtomicBool>) {
    let (launched, done, until) = (launched.clone(), done.clone(), Instant::now() + DEADLINE);
    std::thread::spawn(move || {
        while Instant::now() < until && !done.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(20));
        }
        if !done.load(Ordering::SeqCst) {
            let launched = launched.load(Ordering::SeqCst);
            eprintln!("figure queue hangs-after={launched} note=a call waits for the full queue");
            std::process::exit(3);
        }
    });
}

/// Waits until all are launched, or until none was launched for a while.
fn settle(launched: &AtomicUsize, count: usize) {
    let mut last = usize::MAX;
    loop {
        let now = launched.load(Ordering::SeqCst);
        if now == count || now == last {
            return;
        }
        last = now;
        std::thread::sleep(Duration::from_millis(if small() { 50 } else { 500 }));
    }
}

fn timed(name: &str, call: impl FnOnce()) {
    let started = Instant::now();
    call();
    eprintln!("figure queue call={name} us={:.1}", started.elapsed().as_secs_f64() * 1e6);
}

/// Device address of the page.
fn registered(page: &'static Page) -> u64 {
    let (start, mut device) = (page.0.as_ptr() as *mut std::ffi::c_void, 0);
    // SAFETY: a page that is never freed.
    unsafe { sys::cuMemHostRegister_v2(start, 4096, sys::CU_MEMHOSTREGISTER_DEVICEMAP) }
        .result()
        .unwrap();
    // SAFETY: registered above.
    unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut device, start, 0) }.result().unwrap();
    device
}

fn wait_for(stream: &CudaStream, word: u64) {
    let flags = sys::CUstreamWaitValue_flags_enum::CU_STREAM_WAIT_VALUE_GEQ as u32;
    // SAFETY: a registered word, a live stream.
    unsafe { sys::cuStreamWaitValue32_v2(stream.cu_stream(), word, 1, flags) }.result().unwrap();
}
