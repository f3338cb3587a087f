//! Events that know when the GPU passed them.
#![expect(unsafe_code, reason = "the driver's C interface")]

use super::{Failure, Stream, check, sys};
use std::time::Duration;

/// A point of a stream with the time of its passing.
#[derive(Debug)]
pub(in crate::cuda) struct TimedEvent(sys::CUevent);

impl TimedEvent {
    /// Recorded on a stream of the bound context.
    pub(in crate::cuda) fn record(stream: &Stream) -> Result<Self, Failure> {
        let (mut raw, flags) = (std::ptr::null_mut(), sys::CUevent_flags_enum::CU_EVENT_DEFAULT);
        call!(cuEventCreate(&raw mut raw, flags as u32))?;
        let event = Self(raw);
        call!(cuEventRecord(event.0, stream.raw))?;
        Ok(event)
    }

    /// How long after `earlier`, both of which have passed.
    pub(in crate::cuda) fn since(&self, earlier: &Self) -> Result<Duration, Failure> {
        let mut milliseconds = 0f32;
        call!(cuEventElapsedTime_v2(&raw mut milliseconds, earlier.0, self.0))?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3))
    }
}

impl Drop for TimedEvent {
    fn drop(&mut self) {
        let _ = call!(cuEventDestroy_v2(self.0));
    }
}
