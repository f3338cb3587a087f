//! Events that record the time at which the GPU passed them.
#![expect(unsafe_code, reason = "the driver's C interface")]

use super::{CUresult, Failure, Stream, check, sys};
use libloading::Library;
use std::sync::OnceLock;

/// The function's type in cuda.h.
type ElapsedTime = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> CUresult;

/// `cuEventElapsedTime` of all drivers. The bindings declare only its successor of CUDA 12.8.
fn elapsed_time() -> Option<ElapsedTime> {
    static FOUND: OnceLock<Option<(ElapsedTime, Library)>> = OnceLock::new();
    let find = || {
        let open = |name: &&str| {
            // SAFETY: the driver is loaded already.
            unsafe { Library::new(*name) }.ok()
        };
        let library = ["libcuda.so.1", "libcuda.so"].iter().find_map(open)?;
        // SAFETY: the type is that of cuda.h.
        let function = *unsafe { library.get::<ElapsedTime>(b"cuEventElapsedTime\0") }.ok()?;
        Some((function, library))
    };
    FOUND.get_or_init(find).as_ref().map(|(function, _)| *function)
}

/// A point of a stream, with the time at which the stream passed it.
#[derive(Debug)]
pub(in crate::cuda) struct TimedEvent(sys::CUevent);

impl TimedEvent {
    /// Records an event on a stream of the bound context.
    pub(in crate::cuda) fn record(stream: &Stream) -> Result<Self, Failure> {
        let (mut raw, flags) = (std::ptr::null_mut(), sys::CUevent_flags_enum::CU_EVENT_DEFAULT);
        call!(cuEventCreate(&raw mut raw, flags as u32))?;
        let event = Self(raw);
        stream.count(1);
        call!(cuEventRecord(event.0, stream.raw))?;
        Ok(event)
    }

    /// Seconds from `earlier` to this event; negative if this event was first. Both events must
    /// have passed. The time is exact to some microseconds if the events are at most a minute
    /// apart: the driver returns milliseconds in 24 bits.
    pub(in crate::cuda) fn since(&self, earlier: &Self) -> Result<f64, Failure> {
        let mut milliseconds = 0f32;
        const NAME: &str = "cuEventElapsedTime";
        let absent = Failure { call: NAME, code: CUresult::CUDA_ERROR_NOT_FOUND };
        let elapsed = elapsed_time().ok_or(absent)?;
        // SAFETY: both events are alive, and the out-pointer is to a local.
        check(NAME, unsafe { elapsed(&raw mut milliseconds, earlier.0, self.0) })?;
        Ok(f64::from(milliseconds) / 1e3)
    }
}

impl Drop for TimedEvent {
    fn drop(&mut self) {
        let _ = call!(cuEventDestroy_v2(self.0));
    }
}
