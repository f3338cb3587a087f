//! Events: a record captures a point of a stream, a wait captures the latest record.
#![expect(unsafe_code, reason = "exported C functions")]

use std::{
    ffi::{c_int, c_uint, c_void},
    sync::{Arc, Condvar, LazyLock, Mutex},
    time::Instant,
};

use crate::{
    call::{CallResult, put},
    clock, code,
    config::config,
    counters::STATS,
    handles::Handles,
    health::Health,
    machine::{current_device, driver_functions, machine, stream},
    overhead,
    stream::{Stream, wait_for_launches},
    sync::{lock, wait_briefly},
};

const DISABLE_TIMING: u32 = 2;

/// One recorded point of a stream, and the time at which the stream reached the point.
#[derive(Debug, Default)]
struct Point {
    reached: Mutex<Option<Instant>>,
    changed: Condvar,
}

impl Point {
    fn reach(&self) {
        *lock(&self.reached) = Some(clock::now());
        self.changed.notify_all();
    }

    /// Waits until the stream reaches the point, or until the waiting device is lost.
    fn wait(&self, health: &Health) -> CallResult {
        let mut reached = lock(&self.reached);
        while reached.is_none() {
            health.alive()?;
            reached = wait_briefly(&self.changed, reached);
        }
        Ok(())
    }

    fn time(&self) -> Option<Instant> {
        *lock(&self.reached)
    }
}

#[derive(Debug)]
struct Event {
    device: usize,
    flags: u32,
    latest: Mutex<Option<Arc<Point>>>,
}

impl Event {
    fn latest(&self) -> Option<Arc<Point>> {
        lock(&self.latest).clone()
    }
}

static EVENTS: LazyLock<Handles<Event>> = LazyLock::new(Handles::default);

/// The event of a handle; an error if its device is lost.
fn event(handle: *mut c_void) -> Result<Arc<Event>, c_int> {
    let event = EVENTS.get(handle)?;
    machine().devices[event.device].alive()?;
    Ok(event)
}

fn record(handle: *mut c_void, stream: &Stream) -> CallResult {
    let event = event(handle)?;
    if event.device != stream.device {
        return Err(code::INVALID_HANDLE);
    }
    STATS.records.add(1);
    let point = Arc::new(Point::default());
    *lock(&event.latest) = Some(point.clone());
    stream.mark(move |_| point.reach());
    Ok(())
}

fn elapsed(out: *mut f32, start: *mut c_void, end: *mut c_void) -> CallResult {
    let (start, end) = (event(start)?, event(end)?);
    if (start.flags | end.flags) & DISABLE_TIMING != 0 || start.device != end.device {
        return Err(code::INVALID_HANDLE);
    }
    let (Some(start), Some(end)) = (start.latest(), end.latest()) else {
        return Err(code::INVALID_HANDLE);
    };
    let (Some(start), Some(end)) = (start.time(), end.time()) else {
        return Err(code::NOT_READY);
    };
    let seconds = if end >= start {
        end.duration_since(start).as_secs_f32()
    } else {
        -start.duration_since(end).as_secs_f32()
    };
    put(out, seconds * 1e3)
}

driver_functions! {
    fn cuEventCreate(out: *mut *mut c_void, flags: c_uint) {
        let device = current_device()?;
        device.take_overhead(overhead::EVENT)?;
        let device = device.ordinal;
        let event = Event { device, flags, latest: Mutex::default() };
        put(out, EVENTS.insert(Arc::new(event)))
    }

    fn cuEventDestroy_v2(handle: *mut c_void) {
        let event = EVENTS.remove(handle)?;
        machine().devices[event.device].free_overhead(overhead::EVENT);
        Ok(())
    }

    fn cuEventRecord(handle: *mut c_void, stream_handle: *mut c_void) {
        record(handle, &*stream(stream_handle)?)
    }

    fn cuEventRecordWithFlags(handle: *mut c_void, stream_handle: *mut c_void, _flags: c_uint) {
        record(handle, &*stream(stream_handle)?)
    }

    fn cuEventQuery(handle: *mut c_void) {
        wait_for_launches();
        match event(handle)?.latest() {
            Some(point) if point.time().is_none() => Err(code::NOT_READY),
            _ => Ok(()),
        }
    }

    fn cuEventSynchronize(handle: *mut c_void) {
        wait_for_launches();
        STATS.synchronizations.add(1);
        let event = event(handle)?;
        let device = &machine().devices[event.device];
        event.latest().map_or(Ok(()), |point| point.wait(&device.health))?;
        device.alive()
    }

    fn cuEventElapsedTime(out: *mut f32, start: *mut c_void, end: *mut c_void) {
        elapsed(out, start, end)
    }

    /// Function of CUDA 12.8 and later. An older driver has no such symbol at all.
    fn cuEventElapsedTime_v2(out: *mut f32, start: *mut c_void, end: *mut c_void) {
        if config().driver_version < 12080 {
            return Err(code::NOT_SUPPORTED);
        }
        elapsed(out, start, end)
    }

    fn cuStreamWaitEvent(stream_handle: *mut c_void, handle: *mut c_void, _flags: c_uint) {
        let (stream, event) = (stream(stream_handle)?, event(handle)?);
        STATS.waits.add(1);
        if let Some(point) = event.latest() {
            // A lost device stops waiting; its later work is skipped anyway.
            stream.mark(move |health| {
                let _ = point.wait(health);
            });
        }
        Ok(())
    }
}
