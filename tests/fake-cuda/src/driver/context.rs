//! Primary contexts, one per device.
#![expect(unsafe_code, reason = "exported C functions")]

use std::{
    cell::RefCell,
    ffi::{c_int, c_uint, c_void},
    sync::atomic::Ordering::SeqCst,
};

use crate::{
    call::put,
    code,
    config::config,
    machine::{
        context_device, context_of, current_context, current_device, device, driver_functions,
        set_current_context,
    },
    overhead::LoadedCode,
    sync::lock,
};

thread_local!(static PUSHED: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) });

driver_functions! {
    fn cuDevicePrimaryCtxRetain(out: *mut *mut c_void, ordinal: c_int) {
        let device = device(ordinal)?;
        device.alive()?;
        device.load_once(LoadedCode::Context)?;
        device.retained.fetch_add(1, SeqCst);
        put(out, context_of(device.ordinal))
    }

    fn cuDevicePrimaryCtxRelease_v2(ordinal: c_int) {
        let device = device(ordinal)?;
        if device.retained.fetch_sub(1, SeqCst) <= 0 {
            device.retained.fetch_add(1, SeqCst);
            return Err(code::INVALID_CONTEXT);
        }
        Ok(())
    }

    fn cuDevicePrimaryCtxSetFlags_v2(ordinal: c_int, flags: c_uint) {
        device(ordinal)?.flags.store(flags as c_int, SeqCst);
        Ok(())
    }

    fn cuDevicePrimaryCtxGetState(ordinal: c_int, flags: *mut c_uint, active: *mut c_int) {
        let device = device(ordinal)?;
        put(flags, device.flags.load(SeqCst) as c_uint)?;
        put(active, c_int::from(device.retained.load(SeqCst) > 0))
    }

    fn cuCtxGetCurrent(out: *mut *mut c_void) {
        put(out, current_context())
    }

    fn cuCtxSetCurrent(context: *mut c_void) {
        set_current_context(context)
    }

    fn cuCtxPushCurrent_v2(context: *mut c_void) {
        let before = current_context() as usize;
        set_current_context(context)?;
        PUSHED.with_borrow_mut(|pushed| pushed.push(before));
        Ok(())
    }

    fn cuCtxPopCurrent_v2(out: *mut *mut c_void) {
        let before = PUSHED.with_borrow_mut(Vec::pop).ok_or(code::INVALID_CONTEXT)?;
        if !out.is_null() {
            put(out, current_context())?;
        }
        set_current_context(before as *mut c_void)
    }

    fn cuCtxGetDevice(out: *mut c_int) {
        put(out, context_device(current_context())?.ordinal as c_int)
    }

    fn cuCtxSetFlags(flags: c_uint) {
        current_device()?.flags.store(flags as c_int, SeqCst);
        Ok(())
    }

    fn cuCtxGetFlags(out: *mut c_uint) {
        put(out, current_device()?.flags.load(SeqCst) as c_uint)
    }

    fn cuCtxSynchronize() {
        current_device()?.synchronize()
    }

    fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) {
        current_device()?;
        if !least.is_null() {
            put(least, 0)?;
        }
        if greatest.is_null() { Ok(()) } else { put(greatest, -5) }
    }

    fn cuCtxSetLimit(_limit: c_int, _value: usize) {
        current_device().map(drop)
    }

    fn cuCtxGetLimit(out: *mut usize, _limit: c_int) {
        current_device()?;
        put(out, 0)
    }

    fn cuCtxSetCacheConfig(_config: c_int) {
        current_device().map(drop)
    }

    fn cuCtxGetCacheConfig(out: *mut c_int) {
        current_device()?;
        put(out, 0)
    }

    fn cuCtxEnablePeerAccess(peer: *mut c_void, flags: c_uint) {
        let (device, peer) = (current_device()?, context_device(peer)?);
        if flags != 0 {
            return Err(code::INVALID_VALUE);
        }
        if !config().peer || peer.ordinal == device.ordinal {
            return Err(code::PEER_ACCESS_UNSUPPORTED);
        }
        let added = lock(&device.peers).insert(peer.ordinal);
        if added { Ok(()) } else { Err(code::PEER_ACCESS_ALREADY_ENABLED) }
    }

    fn cuCtxDisablePeerAccess(peer: *mut c_void) {
        let (device, peer) = (current_device()?, context_device(peer)?);
        let removed = lock(&device.peers).remove(&peer.ordinal);
        if removed { Ok(()) } else { Err(code::PEER_ACCESS_NOT_ENABLED) }
    }

    fn cuProfilerStart() {
        current_device().map(drop)
    }

    fn cuProfilerStop() {
        current_device().map(drop)
    }
}
