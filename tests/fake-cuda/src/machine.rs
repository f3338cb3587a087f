//! The simulated machine: devices, handles, and the checks at the start of each call.

use std::{
    cell::Cell,
    collections::{BTreeMap, BTreeSet},
    ffi::{c_int, c_void},
    sync::{
        Arc, LazyLock, Mutex,
        atomic::{AtomicBool, AtomicI32, Ordering::SeqCst},
    },
};

use crate::{
    call::CallResult,
    code,
    config::config,
    counters::STATS,
    handles::Handles,
    health::Health,
    memory::{HostRange, Memory},
    overhead::{LoadedCode, share},
    stream::Stream,
    sync::lock,
};

#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) ordinal: usize,
    pub(crate) null: Arc<Stream>,
    pub(crate) memory: Mutex<Memory>,
    pub(crate) retained: AtomicI32,
    pub(crate) flags: AtomicI32,
    pub(crate) peers: Mutex<BTreeSet<usize>>,
    pub(crate) health: Arc<Health>,
}

impl Device {
    /// `Err` with the device's error if the device is lost.
    pub(crate) fn alive(&self) -> CallResult {
        self.health.alive()
    }

    /// Waits for all streams of this device.
    pub(crate) fn synchronize(&self) -> CallResult {
        self.null.synchronize()?;
        let streams = machine().streams.all();
        streams
            .iter()
            .filter(|stream| stream.device == self.ordinal)
            .try_for_each(|s| s.synchronize())
    }

    /// Uses memory outside of allocations; `OUT_OF_MEMORY` if the device has too little free
    /// memory. `FAKECUDA_BESIDE` scales the bytes.
    pub(crate) fn take_overhead(&self, bytes: usize) -> CallResult {
        let mut memory = lock(&self.memory);
        let bytes = share(bytes);
        if bytes == 0 {
            return Ok(());
        }
        if memory.taken() + bytes > config().memory {
            return Err(code::OUT_OF_MEMORY);
        }
        memory.overhead.bytes += bytes;
        memory.note_peak();
        STATS.overhead_allocations.add(1);
        Ok(())
    }

    pub(crate) fn free_overhead(&self, bytes: usize) {
        let mut memory = lock(&self.memory);
        memory.overhead.bytes = memory.overhead.bytes.saturating_sub(share(bytes));
    }

    /// Uses the memory of `code` at the first call.
    pub(crate) fn load_once(&self, code: LoadedCode) -> CallResult {
        if !lock(&self.memory).overhead.loaded.insert(code) {
            return Ok(());
        }
        let taken = self.take_overhead(code.bytes(config().sm));
        if taken.is_err() {
            lock(&self.memory).overhead.loaded.remove(&code);
        }
        taken
    }
}

#[derive(Debug)]
pub(crate) struct Machine {
    pub(crate) initialized: AtomicBool,
    pub(crate) devices: Vec<Device>,
    pub(crate) streams: Handles<Stream>,
    /// Pinned host ranges, by first address.
    pub(crate) host: Mutex<BTreeMap<usize, HostRange>>,
}

pub(crate) fn machine() -> &'static Machine {
    static MACHINE: LazyLock<Machine> = LazyLock::new(|| {
        let new = |ordinal| {
            let health = Arc::new(Health::new(ordinal));
            Device {
                ordinal,
                null: Stream::start(&health, 0, 0),
                memory: Mutex::default(),
                retained: AtomicI32::new(0),
                flags: AtomicI32::new(0),
                peers: Mutex::default(),
                health,
            }
        };
        Machine {
            initialized: AtomicBool::new(false),
            devices: (0..config().devices).map(new).collect(),
            streams: Handles::default(),
            host: Mutex::default(),
        }
    });
    &MACHINE
}

thread_local!(static CURRENT: Cell<usize> = const { Cell::new(0) });

/// The context that is current on this thread: null, or the handle of a device's primary context.
pub(crate) fn current_context() -> *mut c_void {
    CURRENT.get() as *mut c_void
}

pub(crate) fn set_current_context(context: *mut c_void) -> CallResult {
    if !context.is_null() {
        context_device(context)?;
    }
    CURRENT.set(context as usize);
    Ok(())
}

const FIRST_CONTEXT: usize = 0x100;

pub(crate) fn context_of(device: usize) -> *mut c_void {
    (FIRST_CONTEXT + device) as *mut c_void
}

pub(crate) fn context_device(context: *mut c_void) -> Result<&'static Device, c_int> {
    let index = (context as usize).checked_sub(FIRST_CONTEXT);
    index.and_then(|index| machine().devices.get(index)).ok_or(code::INVALID_CONTEXT)
}

/// The device of the current context; an error if the device is lost.
pub(crate) fn current_device() -> Result<&'static Device, c_int> {
    let device = context_device(current_context())?;
    device.alive()?;
    Ok(device)
}

pub(crate) fn device(ordinal: c_int) -> Result<&'static Device, c_int> {
    initialized()?;
    let index = usize::try_from(ordinal).map_err(|_| code::INVALID_DEVICE)?;
    machine().devices.get(index).ok_or(code::INVALID_DEVICE)
}

pub(crate) fn initialized() -> CallResult {
    if machine().initialized.load(SeqCst) { Ok(()) } else { Err(code::NOT_INITIALIZED) }
}

/// The stream of a handle; null, legacy and per-thread handles mean the default stream. An error if
/// its device is lost.
pub(crate) fn stream(handle: *mut c_void) -> Result<Arc<Stream>, c_int> {
    if (handle as usize) <= 2 {
        return Ok(current_device()?.null.clone());
    }
    let stream = machine().streams.get(handle)?;
    machine().devices[stream.device].alive()?;
    Ok(stream)
}

/// Runs the body of an exported driver function.
pub(crate) fn driver_call(body: impl FnOnce() -> CallResult) -> c_int {
    STATS.calls.add(1);
    match initialized().and_then(|()| body()) {
        Ok(()) => code::SUCCESS,
        Err(error) => {
            STATS.errors.add(u64::from(error != code::NOT_READY));
            error
        }
    }
}

/// The devices that keep page tables of a registration: its owner and, for `PORTABLE` memory, each
/// device with a context.
pub(crate) fn mapped_by(owner: usize, flags: u32) -> impl Iterator<Item = &'static Device> {
    const PORTABLE: u32 = 1;
    let portable = flags & PORTABLE != 0;
    machine().devices.iter().filter(move |device| {
        device.ordinal == owner || portable && device.retained.load(SeqCst) > 0
    })
}

/// Declares exported driver functions whose bodies are `Result<(), c_int>`.
macro_rules! driver_functions {
    ($($(#[$meta:meta])* fn $name:ident($($arg:ident: $type:ty),* $(,)?) $body:block)*) => {
        $(
            $(#[$meta])*
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name($($arg: $type),*) -> std::ffi::c_int {
                crate::machine::driver_call(|| $body)
            }
        )*
    };
}
pub(crate) use driver_functions;
