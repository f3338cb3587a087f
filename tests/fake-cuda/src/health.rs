//! Whether a device is lost.

use std::{
    ffi::c_int,
    sync::atomic::{AtomicI32, Ordering::SeqCst},
};

use crate::call::CallResult;

/// A device's number, and its error once it is lost.
#[derive(Debug)]
pub(crate) struct Health {
    pub(crate) ordinal: usize,
    /// The error that every call returns once the device is lost; 0 while it lives.
    error: AtomicI32,
}

impl Health {
    pub(crate) const fn new(ordinal: usize) -> Self {
        Self { ordinal, error: AtomicI32::new(0) }
    }

    /// `Err` with the device's error if the device is lost.
    pub(crate) fn alive(&self) -> CallResult {
        match self.error.load(SeqCst) {
            0 => Ok(()),
            error => Err(error),
        }
    }

    /// Marks the device as lost; the first error stays.
    pub(crate) fn lose(&self, error: c_int) {
        let _ = self.error.compare_exchange(0, error, SeqCst, SeqCst);
    }
}
