//! Use of a GPU's memory outside of a plan: the free memory after each thing that a run creates,
//! and the time that this took.

use crate::nccl::Nccl;
use crate::small;
use cudarc::cublaslt::{CudaBlasLT, Matmul, MatmulConfig, result as blaslt};
use cudarc::driver::{CudaContext, CudaStream, DevicePtr, DeviceRepr, ValidAsZeroBits, sys};
use device::cuda::testing;
use half::{bf16, f16};
use std::fmt::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Barrier};
use std::time::Instant;

const MIB: usize = 1 << 20;

/// Flags of a registration for the current context, and for all contexts.
const REGISTERED: [(&str, u32); 2] = [
    ("own", sys::CU_MEMHOSTREGISTER_DEVICEMAP),
    ("portable", sys::CU_MEMHOSTREGISTER_DEVICEMAP | sys::CU_MEMHOSTREGISTER_PORTABLE),
];

struct Ledger {
    context: Arc<CudaContext>,
    free: usize,
    since: Instant,
}

impl Ledger {
    fn free(&self) -> usize {
        self.context.bind_to_thread().unwrap();
        cudarc::driver::result::mem_get_info().unwrap().0
    }

    /// Prints the memory that was used since the last entry.
    fn entry(&mut self, name: &str) {
        let (free, seconds) = (self.free(), self.since.elapsed().as_secs_f64());
        let taken = (self.free as f64 - free as f64) / MIB as f64;
        eprintln!("figure ledger stage={name} mib={taken:.1} seconds={seconds:.3}");
        (self.free, self.since) = (free, Instant::now());
    }
}

pub(crate) fn print() {
    let since = Instant::now();
    let context = CudaContext::new(0).unwrap();
    let mut ledger = Ledger { context: context.clone(), free: 0, since };
    let (free, total) = {
        context.bind_to_thread().unwrap();
        cudarc::driver::result::mem_get_info().unwrap()
    };
    // The memory used until now: the context, and other programs on the GPU.
    ledger.free = total;
    ledger.entry("context");
    assert!(free <= total);
    let (major, minor) = context.compute_capability().unwrap();
    let cubins = testing::cubins((10 * major + minor) as u32, offload::PROGRAMS).unwrap();
    ledger.since = Instant::now();
    let modules: Vec<_> = cubins.iter().map(|cubin| load(cubin)).collect();
    ledger.entry("modules");
    let streams: Vec<_> = (0..6).map(|_| context.new_stream().unwrap()).collect();
    ledger.entry("streams");
    let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
    let events: Vec<_> = (0..5 * 1024).map(|_| context.new_event(Some(flags)).unwrap()).collect();
    ledger.entry("events");
    let handle = blaslt::create_handle().unwrap();
    ledger.entry("cublaslt");
    let library = CudaBlasLT::new(streams[0].clone()).unwrap();
    ledger.entry("its-workspace");
    product::<f32>(&library, &streams[0], &mut ledger, "gemm-fp32");
    product::<bf16>(&library, &streams[0], &mut ledger, "gemm-bf16");
    product::<f16>(&library, &streams[0], &mut ledger, "gemm-fp16");
    registrations(&mut ledger);
    let gpus = CudaContext::device_count().unwrap() as usize;
    let mut contexts: Vec<_> = (1..gpus).map(|gpu| CudaContext::new(gpu).unwrap()).collect();
    contexts.insert(0, context);
    who_is_charged(&contexts);
    let connected = catch_unwind(AssertUnwindSafe(|| collectives(&mut ledger, &contexts)));
    if connected.is_err() {
        eprintln!("figure ledger stage=nccl note=not here, or it does not connect");
    }
    // SAFETY: created above, and no longer used.
    unsafe { blaslt::destroy_handle(handle) }.unwrap();
    drop((modules, events, library));
}

fn load(cubin: &[u8]) -> sys::CUmodule {
    // SAFETY: a whole cubin.
    unsafe { cudarc::driver::result::module::load_data(cubin.as_ptr().cast()) }.unwrap()
}

/// Runs the first matmul of a type; the operands are freed.
fn product<T: DeviceRepr + ValidAsZeroBits>(
    library: &CudaBlasLT,
    stream: &Arc<CudaStream>,
    ledger: &mut Ledger,
    name: &str,
) where
    CudaBlasLT: Matmul<T>,
{
    let n = if small() { 16 } else { 1024 };
    let [a, b] = [(); 2].map(|()| stream.alloc_zeros::<T>(n * n).unwrap());
    let mut c = stream.alloc_zeros::<T>(n * n).unwrap();
    let (m, n, k, ld) = (n as u64, n as u64, n as u64, n as i64);
    let config = MatmulConfig {
        transa: false,
        transb: false,
        transc: false,
        m,
        n,
        k,
        alpha: 1.0,
        lda: ld,
        ldb: ld,
        beta: 0.0,
        ldc: ld,
        stride_a: None,
        stride_b: None,
        stride_c: None,
        stride_bias: None,
        batch_size: None,
    };
    // SAFETY: three matrices of n x n.
    unsafe { library.matmul(config, &a, &b, &mut c, None, None) }.unwrap();
    stream.synchronize().unwrap();
    drop((a, b, c));
    stream.synchronize().unwrap();
    ledger.entry(name);
}

/// Registers host memory of 1, 8 and 32 GiB, up to half of the available memory, for one GPU's
/// context and for all.
fn registrations(ledger: &mut Ledger) {
    let unit = if small() { MIB } else { 1 << 30 };
    for count in [1usize, 8, 32] {
        let bytes = count * unit;
        if bytes as u64 > topology_available() / 2 {
            eprintln!("figure register stage={count} note=not enough host memory");
            continue;
        }
        let memory = touched(bytes);
        for (name, flags) in REGISTERED {
            ledger.since = Instant::now();
            let start = memory.as_ptr() as *mut std::ffi::c_void;
            // SAFETY: memory that lives until it is unregistered below.
            unsafe { sys::cuMemHostRegister_v2(start, bytes, flags) }.result().unwrap();
            let size = if small() { "MiB" } else { "GiB" };
            ledger.entry(&format!("register-{count}-{size}-{name}"));
            // SAFETY: registered above.
            unsafe { sys::cuMemHostUnregister(start) }.result().unwrap();
            ledger.free = ledger.free();
        }
    }
}

/// Finds the GPUs whose memory holds the page tables of a registration. The contexts of GPU 0, 2
/// and 3 register in turn, while all GPUs have a context.
fn who_is_charged(contexts: &[Arc<CudaContext>]) {
    let mib = if small() { 32 } else { 4096 };
    let bytes = mib * MIB;
    if bytes as u64 > topology_available() / 2 {
        eprintln!("figure charged note=not enough host memory");
        return;
    }
    let memory = touched(bytes);
    let start = memory.as_ptr() as *mut std::ffi::c_void;
    for own in [0, 2, 3].iter().filter_map(|gpu| contexts.get(*gpu)) {
        for (name, flags) in REGISTERED {
            let before = free_of(contexts);
            own.bind_to_thread().unwrap();
            // SAFETY: memory that lives until it is unregistered below.
            unsafe { sys::cuMemHostRegister_v2(start, bytes, flags) }.result().unwrap();
            let after = free_of(contexts);
            own.bind_to_thread().unwrap();
            // SAFETY: registered above.
            unsafe { sys::cuMemHostUnregister(start) }.result().unwrap();
            let gpu = own.ordinal();
            eprintln!(
                "figure charged gpu={gpu} mib={mib} how={name} before={before} after={after}"
            );
        }
    }
    contexts[0].bind_to_thread().unwrap();
}

/// Free KiB of each GPU.
fn free_of(contexts: &[Arc<CudaContext>]) -> String {
    let mut text = String::new();
    for context in contexts {
        context.bind_to_thread().unwrap();
        let free = cudarc::driver::result::mem_get_info().unwrap().0;
        write!(text, "{}{}", if text.is_empty() { "" } else { "," }, free >> 10).unwrap();
    }
    text
}

/// Bytes of this machine's memory that the kernel reports as available.
fn topology_available() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

/// Memory whose pages all cores have touched.
fn touched(bytes: usize) -> Vec<u8> {
    let mut memory = vec![0u8; bytes];
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    std::thread::scope(|scope| {
        for part in memory.chunks_mut(bytes.div_ceil(threads)) {
            scope.spawn(move || part.iter_mut().step_by(4096).for_each(|byte| *byte = 1));
        }
    });
    memory
}

/// NCCL over all GPUs, one thread each: the connection, then the first collective of each kind.
fn collectives(ledger: &mut Ledger, contexts: &[Arc<CudaContext>]) {
    let (gpus, nccl) = (contexts.len(), &Nccl::open());
    let (id, barrier) = (nccl.new_id(), Barrier::new(gpus + 1));
    ledger.free = ledger.free();
    ledger.since = Instant::now();
    std::thread::scope(|scope| {
        for (rank, context) in contexts.iter().enumerate() {
            let barrier = &barrier;
            scope.spawn(move || {
                context.bind_to_thread().unwrap();
                let stream = context.new_stream().unwrap();
                let comm = nccl.connect(rank, gpus, id);
                let count = if small() { 64 } else { 16 * MIB };
                let whole = stream.alloc_zeros::<f32>(gpus * count).unwrap();
                let part = stream.alloc_zeros::<f32>(count).unwrap();
                stream.synchronize().unwrap();
                barrier.wait();
                barrier.wait();
                let ([whole, part], raw) =
                    ([&whole, &part].map(|x| x.device_ptr(&stream).0), stream.cu_stream());
                nccl.all_reduce(comm, part, count, raw);
                nccl.reduce_scatter(comm, (whole, part), count, raw);
                stream.synchronize().unwrap();
                barrier.wait();
                barrier.wait();
                nccl.disconnect(comm);
            });
        }
        barrier.wait();
        ledger.entry(&format!("nccl-connect-{gpus}-ranks"));
        barrier.wait();
        barrier.wait();
        ledger.entry("nccl-first-collectives");
        barrier.wait();
    });
}
