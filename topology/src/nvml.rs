//! NVIDIA's management library, which knows NVLink and each GPU's UUID on a live box.
//!
//! The library comes with the driver, so it is loaded by name at run time. If it is absent or
//! refuses, the report says why and nothing fails. GPUs are found by PCI address, since the library
//! also numbers GPUs that `CUDA_VISIBLE_DEVICES` hides.
#![expect(unsafe_code, reason = "loads a C library by name and calls it")]

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_uint, c_void};
use std::ptr;

use libloading::{Library, Symbol};

use crate::PciAddress;

/// The library's file name.
pub(crate) const NAME: &str = "libnvidia-ml.so.1";

/// Upper bound on the links of a GPU: more than `NVML_NVLINK_MAX_LINKS`.
const MOST_LINKS: c_uint = 64;
const SUCCESS: c_int = 0;
const ENABLED: c_uint = 1;
/// `NVML_NVLINK_DEVICE_TYPE_SWITCH`.
const SWITCH: c_uint = 2;

type Device = *mut c_void;
type LinkQuery<T> = unsafe extern "C" fn(Device, c_uint, *mut T) -> c_int;

/// The library's answer about a GPU.
#[derive(Debug, Default)]
pub(crate) struct NvmlGpu {
    pub(crate) uuid: Option<String>,
    /// Its active links.
    pub(crate) links: Vec<NvLink>,
}

/// An active link.
#[derive(Debug)]
pub(crate) struct NvLink {
    pub(crate) mb_per_s: u64,
    /// The other end, if reported.
    pub(crate) to: Option<PciAddress>,
    /// Whether the other end is reported as a switch.
    pub(crate) to_switch: bool,
}

/// `nvmlPciInfo_t`.
#[repr(C)]
#[derive(Default)]
struct PciInfo {
    legacy: [c_char; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    device_id: c_uint,
    subsystem_id: c_uint,
    /// `00000000:34:00.0`, NUL-terminated.
    address: [c_char; 32],
}

const _: () = assert!(size_of::<PciInfo>() == 68);

/// The functions in use. Older drivers lack the last one.
struct Functions<'l> {
    shutdown: Symbol<'l, unsafe extern "C" fn() -> c_int>,
    by_address: Symbol<'l, unsafe extern "C" fn(*const c_char, *mut Device) -> c_int>,
    uuid: Symbol<'l, unsafe extern "C" fn(Device, *mut c_char, c_uint) -> c_int>,
    state: Symbol<'l, LinkQuery<c_uint>>,
    version: Symbol<'l, LinkQuery<c_uint>>,
    remote: Symbol<'l, LinkQuery<PciInfo>>,
    remote_type: Option<Symbol<'l, LinkQuery<c_uint>>>,
}

/// Queries `library` about each of `gpus`; `None` for a GPU that it does not report. The error
/// is the reason in words.
pub(crate) fn ask(library: &OsStr, gpus: &[PciAddress]) -> Result<Vec<Option<NvmlGpu>>, String> {
    // SAFETY: the driver's library has no initialisers that expect anything of the process.
    let loaded = unsafe { Library::new(library) };
    let library = loaded.map_err(|_| format!("no {} was found", library.display()))?;
    let functions = Functions::of(&library).map_err(|why| format!("{NAME}: {why}"))?;
    let reports = gpus.iter().map(|gpu| functions.gpu(*gpu)).collect();
    // SAFETY: `of` initialised it, and no call follows.
    unsafe { (functions.shutdown)() };
    Ok(reports)
}

impl<'l> Functions<'l> {
    /// Looks up the functions and starts the library.
    fn of(library: &'l Library) -> Result<Self, String> {
        let init: Symbol<'_, unsafe extern "C" fn() -> c_int> = find(library, c"nvmlInit_v2")?;
        let functions = Self {
            shutdown: find(library, c"nvmlShutdown")?,
            by_address: find(library, c"nvmlDeviceGetHandleByPciBusId_v2")?,
            uuid: find(library, c"nvmlDeviceGetUUID")?,
            state: find(library, c"nvmlDeviceGetNvLinkState")?,
            version: find(library, c"nvmlDeviceGetNvLinkVersion")?,
            remote: find(library, c"nvmlDeviceGetNvLinkRemotePciInfo_v2")?,
            remote_type: find(library, c"nvmlDeviceGetNvLinkRemoteDeviceType").ok(),
        };
        // SAFETY: takes nothing; others may call it again, and the library counts.
        match unsafe { init() } {
            SUCCESS => Ok(functions),
            error => Err(format!("it does not start (error {error})")),
        }
    }

    fn gpu(&self, gpu: PciAddress) -> Option<NvmlGpu> {
        let address = CString::new(gpu.to_string()).ok()?;
        let mut device = ptr::null_mut();
        // SAFETY: the address is NUL-terminated, and `device` has room for the handle.
        let found = unsafe { (self.by_address)(address.as_ptr(), &raw mut device) };
        if found != SUCCESS {
            return None;
        }
        Some(NvmlGpu { uuid: self.uuid_of(device), links: self.links_of(device) })
    }

    fn uuid_of(&self, device: Device) -> Option<String> {
        // Every UUID fits in 96 bytes; the last byte stays 0.
        let mut text = [0; 97];
        // SAFETY: the buffer has the length that is passed.
        let result = unsafe { (self.uuid)(device, text.as_mut_ptr(), 96) };
        if result == SUCCESS { words(&text) } else { None }
    }

    fn links_of(&self, device: Device) -> Vec<NvLink> {
        // Link numbers may have gaps, and a missing link is an error.
        let active = |link: &c_uint| number(&self.state, device, *link) == Ok(ENABLED);
        (0..MOST_LINKS).filter(active).map(|link| self.link(device, link)).collect()
    }

    fn link(&self, device: Device, link: c_uint) -> NvLink {
        let mb_per_s = number(&self.version, device, link).map_or(25_000, mb_per_s);
        let mut info = PciInfo::default();
        // SAFETY: `info` has the layout that the library writes.
        let is_known = unsafe { (self.remote)(device, link, &raw mut info) } == SUCCESS;
        let to = words(&info.address).filter(|_| is_known).and_then(|text| text.parse().ok());
        let to_switch =
            self.remote_type.as_ref().is_some_and(|of| number(of, device, link) == Ok(SWITCH));
        NvLink { mb_per_s, to, to_switch }
    }
}

/// A function by name. The caller chooses its type.
fn find<'l, T>(library: &'l Library, name: &CStr) -> Result<Symbol<'l, T>, String> {
    // SAFETY: callers (`Functions::of`) give each name the type that the library's header has for it.
    let found = unsafe { library.get(name.to_bytes_with_nul()) };
    found.map_err(|_| format!("it is not NVIDIA's or too old: it lacks {}", name.to_string_lossy()))
}

/// MB/s each way of a link of a version. Version 1.0 is numbered 1, 2.0 to 4.0 are 2 to 6, 5.0 is
/// 7.
const fn mb_per_s(version: c_uint) -> u64 {
    match version {
        1 => 20_000,
        0 | 2..=6 => 25_000,
        _ => 50_000,
    }
}

/// A number that the library reports for a link, or the library's error.
fn number(ask: &LinkQuery<c_uint>, device: Device, link: c_uint) -> Result<c_uint, c_int> {
    let mut value = 0;
    // SAFETY: the handle is the library's own, and `value` has room for the answer.
    match unsafe { ask(device, link, &raw mut value) } {
        SUCCESS => Ok(value),
        error => Err(error),
    }
}

/// The text in a buffer, if a NUL ends it.
fn words(buffer: &[c_char]) -> Option<String> {
    let bytes: Vec<u8> = buffer.iter().flat_map(|c| c.to_ne_bytes()).collect();
    let text = CStr::from_bytes_until_nul(&bytes).ok()?;
    Some(text.to_string_lossy().into_owned())
}
