//! The CUDA driver as safe types: contexts, streams, events, memory, modules. cudarc loads the
//! library and declares its functions. Its event tracking is unused, since the hazard check already
//! orders all ops.
//!
//! Invariant for every `unsafe` in this file: the constructors below make the handles, the type
//! that uses a handle keeps it, and its `Drop` alone destroys it. Addresses of memory lie in arenas
//! that live as long as the streams that use them (see `memory.rs`).
#![expect(unsafe_code, reason = "the driver's C interface")]

use cudarc::driver::sys::{self, CUdevice_attribute, CUfunction_attribute, CUresult};
use std::cell::Cell;
use std::ffi::{CStr, CString, OsStr, c_void};
use std::fmt;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, Once, PoisonError};

/// A failed driver call.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    pub(super) call: &'static str,
    pub(super) code: CUresult,
}

impl Failure {
    pub(super) const fn is_out_of_memory(&self) -> bool {
        matches!(self.code, CUresult::CUDA_ERROR_OUT_OF_MEMORY)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = std::ptr::null();
        // SAFETY: `text` is set to a static string, or left null.
        let known = unsafe { sys::cuGetErrorString(self.code, &raw mut text) };
        write!(f, "{}: {:?}", self.call, self.code)?;
        if known == CUresult::CUDA_SUCCESS && !text.is_null() {
            // SAFETY: the driver's static string.
            let text = unsafe { CStr::from_ptr(text) };
            write!(f, " ({})", text.to_string_lossy())?;
        }
        Ok(())
    }
}

impl From<Failure> for String {
    fn from(failure: Failure) -> Self {
        failure.to_string()
    }
}

fn check(call: &'static str, code: CUresult) -> Result<(), Failure> {
    if code == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(Failure { call, code }) }
}

macro_rules! call {
    ($f:ident ( $($arg:expr),* $(,)? )) => {
        // SAFETY: handles are alive, out-pointers are to locals (the invariant of this file).
        check(stringify!($f), unsafe { sys::$f($($arg),*) })
    };
}

mod memory;
mod timed;

pub(super) use memory::{DeviceMemory, HostMapping, Registration, Word, Words};
pub(super) use timed::TimedEvent;

/// Whether the driver's library can be loaded.
pub(super) fn is_present() -> bool {
    // SAFETY: loads a library by name.
    unsafe { sys::is_culib_present() }
}

/// The file of the driver's library, if it is loaded.
pub(super) fn file() -> Option<PathBuf> {
    if !is_present() {
        return None;
    }
    // SAFETY: the library can be loaded.
    let library = unsafe { sys::culib() };
    // SAFETY: the type is that of an address, and nothing is called through it.
    let found = unsafe { library.get::<*const c_void>(b"cuDriverGetVersion\0") };
    path_of(*found.ok()?)
}

/// Path of the library that has a function at `address`.
pub(super) fn path_of(address: *const c_void) -> Option<PathBuf> {
    let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: the out-pointer is to a local.
    let known = unsafe { libc::dladdr(address, info.as_mut_ptr()) };
    if known == 0 {
        return None;
    }
    // SAFETY: zero is a valid value of every field, and the call above has set them.
    let info = unsafe { info.assume_init() };
    if info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the dynamic linker's text, which lives as long as the library.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(OsStr::from_bytes(name.to_bytes()).into())
}

/// Starts the driver, which reads its settings from environment variables. Later calls do nothing.
pub(super) fn init() -> Result<(), Failure> {
    static SETTINGS: Once = Once::new();
    SETTINGS.call_once(|| {
        // Code is loaded at its first use. The warm-up uses each op once, so nothing is loaded while
        // a collective is in flight. To load all of cuBLASLt's code at the start took 1.9 s and
        // 0.47 GiB of an H200. Each stream has its own hardware queue.
        for (key, value) in [("CUDA_MODULE_LOADING", "LAZY"), ("CUDA_DEVICE_MAX_CONNECTIONS", "32")]
        {
            if std::env::var_os(key).is_none() {
                // SAFETY: runs once, in the first call into the backend, which the engine makes
                // before it starts threads that could read the environment.
                unsafe { std::env::set_var(key, value) };
            }
        }
    });
    call!(cuInit(0))
}

/// The driver's version, such as 12040 for CUDA 12.4.
pub(super) fn version() -> Result<i32, Failure> {
    let mut version = 0;
    call!(cuDriverGetVersion(&raw mut version))?;
    Ok(version)
}

pub(super) fn device_count() -> Result<usize, Failure> {
    let mut count = 0;
    call!(cuDeviceGetCount(&raw mut count))?;
    Ok(count.max(0) as usize)
}

fn device(ordinal: usize) -> Result<sys::CUdevice, Failure> {
    let mut device = 0;
    call!(cuDeviceGet(&raw mut device, ordinal as i32))?;
    Ok(device)
}

pub(super) fn device_name(ordinal: usize) -> Result<String, Failure> {
    let device = device(ordinal)?;
    let mut name = [0u8; 256];
    call!(cuDeviceGetName(name.as_mut_ptr().cast(), 255, device))?;
    let text = CStr::from_bytes_until_nul(&name).unwrap_or_default();
    Ok(text.to_string_lossy().into_owned())
}

/// The PCI address of a GPU, such as `0000:34:00.0`.
pub(super) fn device_address(ordinal: usize) -> Result<String, Failure> {
    let device = device(ordinal)?;
    let mut text = [0u8; 32];
    call!(cuDeviceGetPCIBusId(text.as_mut_ptr().cast(), 31, device))?;
    let text = CStr::from_bytes_until_nul(&text).unwrap_or_default();
    Ok(text.to_string_lossy().into_owned())
}

pub(super) fn device_memory(ordinal: usize) -> Result<u64, Failure> {
    let device = device(ordinal)?;
    let mut bytes = 0;
    call!(cuDeviceTotalMem_v2(&raw mut bytes, device))?;
    Ok(bytes as u64)
}

fn attribute(ordinal: usize, which: CUdevice_attribute) -> Result<u32, Failure> {
    let (device, mut value) = (device(ordinal)?, 0);
    call!(cuDeviceGetAttribute(&raw mut value, which, device))?;
    Ok(value as u32)
}

/// Compute capability: 70 for V100, 90 for H100.
pub(super) fn device_sm(ordinal: usize) -> Result<u32, Failure> {
    let of = |which| attribute(ordinal, which);
    let major = of(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = of(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    Ok(10 * major + minor)
}

/// Number of multiprocessors.
pub(super) fn device_processors(ordinal: usize) -> Result<u32, Failure> {
    attribute(ordinal, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
}

/// A GPU's primary context: one per GPU and process.
#[derive(Debug)]
pub(super) struct Context {
    pub(super) ordinal: usize,
    device: sys::CUdevice,
    raw: sys::CUcontext,
}

// SAFETY: a context may be current on any thread, and on several threads at the same time.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// The context of a GPU, shared by all callers until the process ends, since creation is slow.
    pub(super) fn of(ordinal: usize) -> Result<Arc<Self>, Failure> {
        static ALL: Mutex<Vec<Arc<Context>>> = Mutex::new(Vec::new());
        let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(context) = all.iter().find(|context| context.ordinal == ordinal) {
            return Ok(Arc::clone(context));
        }
        let (device, mut raw) = (device(ordinal)?, std::ptr::null_mut());
        call!(cuDevicePrimaryCtxRetain(&raw mut raw, device))?;
        let context = Arc::new(Self { ordinal, device, raw });
        all.push(Arc::clone(&context));
        Ok(context)
    }

    /// Makes later driver calls of the calling thread use this GPU.
    pub(super) fn bind(&self) -> Result<(), Failure> {
        call!(cuCtxSetCurrent(self.raw))
    }

    /// Free and total bytes of the GPU's memory.
    pub(super) fn memory(&self) -> Result<(u64, u64), Failure> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        call!(cuMemGetInfo_v2(&raw mut free, &raw mut total))?;
        Ok((free as u64, total as u64))
    }

    /// Gives this GPU's kernels access to the memory of `peer`, and returns whether the machine
    /// can.
    pub(super) fn reach(&self, peer: &Self) -> Result<bool, Failure> {
        if self.ordinal == peer.ordinal {
            return Ok(true);
        }
        let mut can = 0;
        call!(cuDeviceCanAccessPeer(&raw mut can, self.device, peer.device))?;
        if can == 0 {
            return Ok(false);
        }
        self.bind()?;
        match call!(cuCtxEnablePeerAccess(peer.raw, 0)) {
            Err(Failure { code: CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, .. }) => Ok(true),
            done => done.map(|()| true),
        }
    }

    /// (least, greatest) priority of streams.
    fn priorities(&self) -> Result<(i32, i32), Failure> {
        self.bind()?;
        let (mut least, mut greatest) = (0, 0);
        call!(cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest))?;
        Ok((least, greatest))
    }
}

/// One queue of a GPU.
#[derive(Debug)]
pub(super) struct Stream {
    context: Arc<Context>,
    raw: sys::CUstream,
    /// Number of entries that its queue has received.
    entries: Cell<u64>,
}

impl Stream {
    /// Creates a stream. The GPU prefers the kernels of an `urgent` stream.
    pub(super) fn new(context: &Arc<Context>, urgent: bool) -> Result<Self, Failure> {
        let (least, greatest) = context.priorities()?;
        let (mut raw, priority) = (std::ptr::null_mut(), if urgent { greatest } else { least });
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        call!(cuStreamCreateWithPriority(&raw mut raw, flags, priority))?;
        Ok(Self { context: Arc::clone(context), raw, entries: Cell::new(0) })
    }

    /// The handle, for libraries that enqueue work. A library enqueues at most four entries: a
    /// matmul and its sum, or a collective and the events around it.
    pub(super) fn raw(&self) -> sys::CUstream {
        self.count(4);
        self.raw
    }

    /// Number of entries enqueued so far.
    pub(super) const fn entries(&self) -> u64 {
        self.entries.get()
    }

    fn count(&self, more: u64) {
        self.entries.set(self.entries.get() + more);
    }

    /// The error of a lost GPU, which every call returns; `None` while the GPU works.
    pub(super) fn loss(&self) -> Option<Failure> {
        let state = call!(cuStreamQuery(self.raw));
        state.err().filter(|e| e.code != CUresult::CUDA_ERROR_NOT_READY)
    }

    pub(super) fn synchronize(&self) -> Result<(), Failure> {
        call!(cuStreamSynchronize(self.raw))
    }

    pub(super) fn record(&self, event: &Event) -> Result<(), Failure> {
        self.count(1);
        call!(cuEventRecord(event.0, self.raw))
    }

    /// Makes later work start after the last record of `event` so far.
    pub(super) fn wait(&self, event: &Event) -> Result<(), Failure> {
        self.count(1);
        call!(cuStreamWaitEvent(self.raw, event.0, 0))
    }

    /// Makes later work start when the host has set `word` to `value` or more.
    pub(super) fn wait_word(&self, word: &Word, value: u32) -> Result<(), Failure> {
        let flags = sys::CUstreamWaitValue_flags_enum::CU_STREAM_WAIT_VALUE_GEQ as u32;
        self.count(1);
        call!(cuStreamWaitValue32_v2(self.raw, word.device(), value, flags))
    }

    /// Makes the stream set `word` when it reaches this point.
    pub(super) fn write_word(&self, word: &Word, value: u32) -> Result<(), Failure> {
        self.count(1);
        call!(cuStreamWriteValue32_v2(self.raw, word.device(), value, 0))
    }

    pub(super) fn zero(&self, at: u64, bytes: u64) -> Result<(), Failure> {
        if bytes == 0 {
            return Ok(());
        }
        self.count(1);
        call!(cuMemsetD8Async(at, 0, bytes as usize, self.raw))
    }

    pub(super) fn copy_on_device(&self, src: u64, dst: u64, bytes: u64) -> Result<(), Failure> {
        if bytes == 0 {
            return Ok(());
        }
        self.count(1);
        call!(cuMemcpyDtoDAsync_v2(dst, src, bytes as usize, self.raw))
    }

    /// Copies to the GPU. `src` is an address of pinned host memory.
    pub(super) fn copy_up(&self, src: u64, dst: u64, bytes: u64) -> Result<(), Failure> {
        self.count(1);
        call!(cuMemcpyHtoDAsync_v2(dst, src as *const _, bytes as usize, self.raw))
    }

    /// Copies to the host. `dst` is an address of pinned host memory.
    pub(super) fn copy_down(&self, src: u64, dst: u64, bytes: u64) -> Result<(), Failure> {
        self.count(1);
        call!(cuMemcpyDtoHAsync_v2(dst as *mut _, src, bytes as usize, self.raw))
    }

    /// Copies `bytes` to the GPU and returns after the copy.
    pub(super) fn upload(&self, bytes: &[u8], dst: u64) -> Result<(), Failure> {
        self.copy_up(bytes.as_ptr() as u64, dst, bytes.len() as u64)?;
        self.synchronize()
    }

    /// Copies `bytes` from the GPU and returns after the copy.
    pub(super) fn download(&self, src: u64, bytes: &mut [u8]) -> Result<(), Failure> {
        self.copy_down(src, bytes.as_mut_ptr() as u64, bytes.len() as u64)?;
        self.synchronize()
    }

    /// Launches a kernel. Each argument has 8 bytes; a kernel reads as many of them as its
    /// parameter has.
    pub(super) fn launch(
        &self,
        function: Function,
        grid: [u32; 3],
        block: u32,
        shared_bytes: u32,
        args: &mut [u64],
    ) -> Result<(), Failure> {
        const MOST: usize = 48;
        let mut pointers = [std::ptr::null_mut(); MOST];
        for (pointer, arg) in pointers.iter_mut().zip(args.iter_mut()) {
            *pointer = std::ptr::from_mut(arg).cast();
        }
        let ([x, y, z], none) = (grid, std::ptr::null_mut());
        let pointers = pointers.as_mut_ptr();
        self.count(1);
        call!(cuLaunchKernel(
            function.0,
            x,
            y,
            z,
            block,
            1,
            1,
            shared_bytes,
            self.raw,
            pointers,
            none
        ))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // A failure is ignored, since the stream is not used again.
        let _ = self.context.bind().and_then(|()| call!(cuStreamDestroy_v2(self.raw)));
    }
}

/// A point of a stream. A host thread that waits for it sleeps.
#[derive(Debug)]
pub(super) struct Event(sys::CUevent);

// SAFETY: the driver's event calls may come from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// Makes an event on the bound context.
    pub(super) fn new() -> Result<Self, Failure> {
        use sys::CUevent_flags_enum::{CU_EVENT_BLOCKING_SYNC, CU_EVENT_DISABLE_TIMING};
        let mut raw = std::ptr::null_mut();
        let flags = CU_EVENT_BLOCKING_SYNC as u32 | CU_EVENT_DISABLE_TIMING as u32;
        call!(cuEventCreate(&raw mut raw, flags))?;
        Ok(Self(raw))
    }

    /// Sleeps until the stream has passed the last record.
    pub(super) fn synchronize(&self) -> Result<(), Failure> {
        call!(cuEventSynchronize(self.0))
    }

    /// Whether the stream has passed the last record.
    pub(super) fn has_passed(&self) -> Result<bool, Failure> {
        match call!(cuEventQuery(self.0)) {
            Err(Failure { code: CUresult::CUDA_ERROR_NOT_READY, .. }) => Ok(false),
            done => done.map(|()| true),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let _ = call!(cuEventDestroy_v2(self.0));
    }
}

/// Compiled kernels on a GPU.
#[derive(Clone, Copy, Debug)]
pub(super) struct Module(sys::CUmodule);

#[derive(Clone, Copy, Debug)]
pub(super) struct Function(sys::CUfunction);

impl Module {
    /// Loads a cubin on the bound context.
    pub(super) fn load(cubin: &[u8]) -> Result<Self, Failure> {
        let mut raw = std::ptr::null_mut();
        call!(cuModuleLoadData(&raw mut raw, cubin.as_ptr().cast()))?;
        Ok(Self(raw))
    }

    pub(super) fn function(self, name: &str) -> Option<Function> {
        let name = CString::new(name).ok()?;
        let mut raw = std::ptr::null_mut();
        call!(cuModuleGetFunction(&raw mut raw, self.0, name.as_ptr())).ok()?;
        Some(Function(raw))
    }

    pub(super) fn unload(self) {
        let _ = call!(cuModuleUnload(self.0));
    }
}

impl Function {
    /// Allows more dynamic shared memory than the default of 48 KiB.
    pub(super) fn allow_shared(self, bytes: u32) -> Result<(), Failure> {
        use CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as SHARED;
        call!(cuFuncSetAttribute(self.0, SHARED, bytes as i32))
    }
}
