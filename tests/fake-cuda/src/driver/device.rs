//! Devices and their attributes.
#![expect(unsafe_code, reason = "exported C functions")]

use std::{
    ffi::{CStr, c_char, c_int, c_uint},
    sync::atomic::Ordering::SeqCst,
};

use crate::{
    call::{put, put_string},
    code,
    config::config,
    machine::{device, driver_functions, machine},
};

#[unsafe(no_mangle)]
unsafe extern "C" fn cuInit(flags: c_uint) -> c_int {
    if flags != 0 {
        return code::INVALID_VALUE;
    }
    if machine().devices.is_empty() {
        return code::NO_DEVICE;
    }
    machine().initialized.store(true, SeqCst);
    code::SUCCESS
}

/// The driver's version; permitted before `cuInit`.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDriverGetVersion(out: *mut c_int) -> c_int {
    put(out, config().driver_version).map_or_else(|error| error, |()| code::SUCCESS)
}

driver_functions! {
    fn cuDeviceGetCount(out: *mut c_int) {
        put(out, machine().devices.len() as c_int)
    }

    fn cuDeviceGet(out: *mut c_int, ordinal: c_int) {
        device(ordinal)?;
        put(out, ordinal)
    }

    fn cuDeviceGetName(out: *mut c_char, len: c_int, ordinal: c_int) {
        device(ordinal)?;
        put_string(out, len, &format!("Fake GPU (sm_{})", config().sm))
    }

    fn cuDeviceTotalMem_v2(out: *mut usize, ordinal: c_int) {
        device(ordinal)?;
        put(out, config().memory)
    }

    fn cuDeviceGetUuid(out: *mut [u8; 16], ordinal: c_int) {
        device(ordinal)?;
        put(out, uuid(ordinal))
    }

    fn cuDeviceGetUuid_v2(out: *mut [u8; 16], ordinal: c_int) {
        device(ordinal)?;
        put(out, uuid(ordinal))
    }

    fn cuDeviceGetPCIBusId(out: *mut c_char, len: c_int, ordinal: c_int) {
        device(ordinal)?;
        put_string(out, len, &bus_id(ordinal))
    }

    fn cuDeviceGetByPCIBusId(out: *mut c_int, text: *const c_char) {
        if text.is_null() {
            return Err(code::INVALID_VALUE);
        }
        // SAFETY: the C interface demands a terminated string.
        let wanted = unsafe { CStr::from_ptr(text) }.to_string_lossy().to_uppercase();
        let found = (0..machine().devices.len() as c_int).find(|&i| bus_id(i) == wanted);
        put(out, found.ok_or(code::INVALID_DEVICE)?)
    }

    fn cuDeviceGetAttribute(out: *mut c_int, attribute: c_int, ordinal: c_int) {
        device(ordinal)?;
        put(out, attribute_value(attribute, ordinal))
    }

    fn cuDeviceCanAccessPeer(out: *mut c_int, from: c_int, to: c_int) {
        device(from)?;
        device(to)?;
        put(out, c_int::from(config().peer && from != to))
    }

    fn cuDeviceGetP2PAttribute(out: *mut c_int, attribute: c_int, from: c_int, to: c_int) {
        device(from)?;
        device(to)?;
        // 1 = performance rank (0 is the best), 2 = access, 3 = native atomics, 4 = arrays.
        let access = config().peer && from != to;
        put(out, c_int::from(access && attribute != 1))
    }
}

fn bus_id(ordinal: c_int) -> String {
    format!("0000:{:02X}:00.0", 0x10 + ordinal)
}

fn uuid(ordinal: c_int) -> [u8; 16] {
    let mut bytes = *b"fake-cuda-gpu-00";
    bytes[15] = ordinal as u8;
    bytes
}

/// Value of an attribute by its number in `CUdevice_attribute`. The device is roughly an A100
/// unless `FAKECUDA_SM` says otherwise.
fn attribute_value(attribute: c_int, ordinal: c_int) -> c_int {
    let config = config();
    match attribute {
        1..=3 => 1024,                                   // threads per block, block x and y
        4 => 64,                                         // block z
        5 => c_int::MAX,                                 // grid x
        6 | 7 => 65535,                                  // grid y and z
        8 => 48 << 10,                                   // shared memory per block
        9 => 64 << 10,                                   // constant memory
        10 => 32,                                        // warp
        12 | 82 => 65536,                                // registers per block, per SM
        13 => 1_410_000,                                 // kHz
        14 => 512,                                       // texture alignment
        15 | 19 | 31 | 41 | 78 | 79 | 80 | 83 | 90 => 1, // overlap, map, concurrent, unified...
        91 | 92 | 94 | 95 | 99 | 115 | 122 | 123 => 1,   // registered pointers, memops, pools
        16 => 108,                                       // SMs
        33 => 0x10 + ordinal,                            // PCI bus
        36 => 1_215_000,                                 // memory kHz
        37 => 5120,                                      // bus width
        38 => 40 << 20,                                  // L2
        39 => 2048,                                      // threads per SM
        40 => 3,                                         // copy engines
        75 => config.sm / 10,
        76 => config.sm % 10,
        81 => config.shared_memory_optin() + 1024, // shared memory per SM
        97 => config.shared_memory_optin(),
        106 => 32,   // blocks per SM
        111 => 1024, // shared memory kept back per block
        87 => 2,
        _ => 0,
    }
}
