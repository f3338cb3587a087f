//! Handles that an application gets for objects.

use std::{
    collections::HashMap,
    ffi::{c_int, c_void},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
};

use crate::{code, sync::lock};

/// Objects by handle. A handle is never used twice, so a stale or foreign handle is an error.
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
