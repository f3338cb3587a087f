//! Memory of GPUs, and host memory pinned by the driver.
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

/// Whether kernels and streams can use pinned memory by a device address, or only copies can.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) enum HostMapping {
    No,
    Yes,
}

/// Host memory that the driver has pinned for one context, in pieces.
#[derive(Debug)]
pub(in crate::cuda) struct Registration {
    context: Arc<Context>,
    pieces: Vec<u64>,
}

impl Registration {
    /// A registration without pieces.
    pub(in crate::cuda) fn new(context: &Arc<Context>) -> Self {
        Self { context: Arc::clone(context), pieces: Vec::new() }
    }

    /// Pins a piece: `bytes` at `start`, which stay allocated longer than the registration lives.
    /// The piece is not pinned for other contexts (`PORTABLE`): each of them would keep page tables
    /// for it, and no other GPU copies it.
    pub(in crate::cuda) fn add(
        &mut self,
        start: u64,
        bytes: u64,
        mapped: HostMapping,
    ) -> Result<(), Failure> {
        self.context.bind()?;
        let flags = match mapped {
            HostMapping::No => 0,
            HostMapping::Yes => sys::CU_MEMHOSTREGISTER_DEVICEMAP,
        };
        call!(cuMemHostRegister_v2(start as *mut _, bytes as usize, flags))?;
        self.pieces.push(start);
        Ok(())
    }

    /// The GPU's address of the piece at the host address `start`. Some drivers refuse an address
    /// inside a piece.
    fn device_address(start: u64) -> Result<u64, Failure> {
        let mut device = 0;
        call!(cuMemHostGetDevicePointer_v2(&raw mut device, start as *mut _, 0))?;
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

/// A whole page, so that no other data is pinned with the words.
#[derive(Debug)]
#[repr(align(4096))]
struct Page([AtomicU32; 1024]);

/// A number that host threads and streams both read and write. Streams may write it until they are
/// destroyed, and they are destroyed first.
#[derive(Clone, Debug)]
pub(in crate::cuda) struct Word {
    page: Arc<Page>,
    index: usize,
    device: u64,
}

impl Word {
    /// The address for streams.
    pub(super) const fn device(&self) -> u64 {
        self.device
    }

    /// Sets the word with release order: a thread that sees the value sees the earlier writes of
    /// this thread.
    pub(in crate::cuda) fn set(&self, value: u32) {
        self.page.0[self.index].store(value, Ordering::Release);
    }

    pub(in crate::cuda) fn get(&self) -> u32 {
        self.page.0[self.index].load(Ordering::Acquire)
    }
}

/// Pinned words, each on its own cache line.
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
        let mut registration = Registration::new(context);
        registration.add(start, 4096, HostMapping::Yes)?;
        let device = Registration::device_address(start)?;
        let word = |i: usize| {
            let index = LINE * i;
            Word { page: Arc::clone(&page), index, device: device + 4 * index as u64 }
        };
        Ok(Self { _registration: registration, words: (0..count).map(word).collect() })
    }
}
