//! Memory of GPUs, and host memory that the driver has pinned.
#![expect(unsafe_code, reason = "the driver's C interface")]

use super::{Context, Failure, check, sys};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Memory of a GPU.
#[derive(Debug)]
pub(in crate::cuda) struct DeviceMemory {
    context: Arc<Context>,
    pub(in crate::cuda) start: u64,
}

impl DeviceMemory {
    pub(in crate::cuda) fn new(context: &Arc<Context>, bytes: u64) -> Result<Self, Failure> {
        context.bind()?;
        let mut start = 0;
        call!(cuMemAlloc_v2(&raw mut start, bytes.max(1) as usize))?;
        Ok(Self { context: Arc::clone(context), start })
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        let _ = self.context.bind().and_then(|()| call!(cuMemFree_v2(self.start)));
    }
}

/// Host memory that the driver has pinned, in pieces.
#[derive(Debug)]
pub(in crate::cuda) struct Registration {
    context: Arc<Context>,
    pieces: Vec<u64>,
}

impl Registration {
    /// Pins `bytes` at `start`, which stay allocated longer than this lives, in pieces of `piece` bytes.
    pub(in crate::cuda) fn new(
        context: &Arc<Context>,
        start: u64,
        bytes: u64,
        piece: u64,
    ) -> Result<Self, Failure> {
        context.bind()?;
        let mut done = Self { context: Arc::clone(context), pieces: Vec::new() };
        for at in (0..bytes).step_by(piece as usize) {
            let (from, length) = (start + at, piece.min(bytes - at));
            let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
            call!(cuMemHostRegister_v2(from as *mut _, length as usize, flags))?;
            done.pieces.push(from);
        }
        Ok(done)
    }

    /// Where a GPU sees the host address `host`.
    fn device_address(host: u64) -> Result<u64, Failure> {
        let mut device = 0;
        call!(cuMemHostGetDevicePointer_v2(&raw mut device, host as *mut _, 0))?;
        Ok(device)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let _ = self.context.bind();
        for piece in &self.pieces {
            let _ = call!(cuMemHostUnregister(*piece as *mut _));
        }
    }
}

/// A page of its own, so that nothing else is pinned with it.
#[derive(Debug)]
#[repr(align(4096))]
struct Page([AtomicU32; 1024]);

/// A number that host threads and streams both read and write. Streams may write it until they are destroyed,
/// which comes first.
#[derive(Clone, Debug)]
pub(in crate::cuda) struct Word {
    page: Arc<Page>,
    index: usize,
    device: u64,
}

impl Word {
    /// Where streams find it.
    pub(super) const fn device(&self) -> u64 {
        self.device
    }

    /// Release: who sees the value sees what the thread wrote before.
    pub(in crate::cuda) fn set(&self, value: u32) {
        self.page.0[self.index].store(value, Ordering::Release);
    }

    pub(in crate::cuda) fn get(&self) -> u32 {
        self.page.0[self.index].load(Ordering::Acquire)
    }
}

/// Pinned words, each on a cache line of its own.
#[derive(Debug)]
pub(in crate::cuda) struct Words {
    _registration: Registration,
    pub(in crate::cuda) words: Vec<Word>,
}

impl Words {
    pub(in crate::cuda) fn new(context: &Arc<Context>, count: usize) -> Result<Self, Failure> {
        const LINE: usize = 32;
        let page = Arc::new(Page([const { AtomicU32::new(0) }; 1024]));
        let start = page.0.as_ptr() as u64;
        let registration = Registration::new(context, start, 4096, 4096)?;
        let word = |i: usize| {
            let index = LINE * i;
            let device = Registration::device_address(start + 4 * index as u64)?;
            Ok(Word { page: Arc::clone(&page), index, device })
        };
        let words = (0..count).map(word).collect::<Result<_, Failure>>()?;
        Ok(Self { _registration: registration, words })
    }
}
