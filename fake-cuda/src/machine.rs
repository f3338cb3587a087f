//! The pretended machine: devices, handles, and what every call checks first.

use std::{
    cell::Cell,
    collections::{BTreeMap, BTreeSet, HashMap},
    ffi::{c_int, c_void},
    sync::{
        Arc, LazyLock, Mutex,
        atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering::SeqCst},
    },
};

use crate::{
    config::Config,
    driver::{code, events::Event, memory::HostRange, memory::Memory, modules::Function},
    stats::STATS,
    stream::Stream,
    sync::lock,
};

pub(crate) type CallResult = Result<(), c_int>;

/// Handles are numbers that are never used twice: a stale or foreign one is found, not followed.
#[derive(Debug)]
pub(crate) struct Handles<T>(Mutex<HashMap<usize, Arc<T>>>);

impl<T> Handles<T> {
    fn new() -> Self {
        Self(Mutex::new(HashMap::new()))
    }

    pub(crate) fn insert(&self, value: Arc<T>) -> *mut c_void {
        static NEXT: AtomicUsize = AtomicUsize::new(0x10000);
        let handle = NEXT.fetch_add(16, SeqCst);
        lock(&self.0).insert(handle, value);
        handle as *mut c_void
    }

    pub(crate) fn get(&self, handle: *mut c_void) -> Result<Arc<T>, c_int> {
        lock(&self.0).get(&(handle as usize)).cloned().ok_or(code::INVALID_HANDLE)
    }

    pub(crate) fn remove(&self, handle: *mut c_void) -> Result<Arc<T>, c_int> {
        lock(&self.0).remove(&(handle as usize)).ok_or(code::INVALID_HANDLE)
    }

    pub(crate) fn all(&self) -> Vec<Arc<T>> {
        lock(&self.0).values().cloned().collect()
    }
}

impl<T> Default for Handles<T> {
    fn default() -> Self {
        Self::new()
    }
}

#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) ordinal: usize,
    pub(crate) null: Arc<Stream>,
    pub(crate) memory: Mutex<Memory>,
    pub(crate) retained: AtomicI32,
    pub(crate) flags: AtomicI32,
    pub(crate) peers: Mutex<BTreeSet<usize>>,
    /// The error that every call returns once the device is lost; 0 while it lives.
    error: AtomicI32,
}

impl Device {
    /// `Err` with the device's own error once it is lost.
    pub(crate) fn alive(&self) -> CallResult {
        match self.error.load(SeqCst) {
            0 => Ok(()),
            error => Err(error),
        }
    }

    /// The first error stays.
    pub(crate) fn lose(&self, error: c_int) {
        let _ = self.error.compare_exchange(0, error, SeqCst, SeqCst);
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
}

#[derive(Debug)]
pub(crate) struct Machine {
    pub(crate) config: Config,
    pub(crate) initialized: AtomicBool,
    pub(crate) devices: Vec<Device>,
    pub(crate) streams: Handles<Stream>,
    pub(crate) events: Handles<Event>,
    pub(crate) modules: Handles<crate::driver::modules::Module>,
    pub(crate) functions: Handles<Function>,
    /// Pinned host ranges, by first address.
    pub(crate) host: Mutex<BTreeMap<usize, HostRange>>,
}

pub(crate) fn machine() -> &'static Machine {
    static MACHINE: LazyLock<Machine> = LazyLock::new(|| {
        let config = Config::from_environment();
        let devices = (0..config.devices)
            .map(|ordinal| Device {
                ordinal,
                null: Stream::start(ordinal, 0, 0, &config),
                memory: Mutex::default(),
                retained: AtomicI32::new(0),
                flags: AtomicI32::new(0),
                peers: Mutex::default(),
                error: AtomicI32::new(0),
            })
            .collect();
        Machine {
            config,
            initialized: AtomicBool::new(false),
            devices,
            streams: Handles::new(),
            events: Handles::new(),
            modules: Handles::new(),
            functions: Handles::new(),
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

/// The device of the current context, alive.
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

/// A stream by its handle, on a living device; null, legacy and per-thread mean the default stream.
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
