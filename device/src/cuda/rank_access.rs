//! Reads and writes of a rank's own thread between steps, on a stream of its own.

use super::Gpu;
use super::driver::Failure;
use super::marks::STREAMS;
use crate::ranks::memory::StagedElements;
use crate::{Arena, Error, Tensor, ViewMut};

/// Bytes that `read_own` and `write_own` move at a time.
const OWN_BYTES: usize = 1 << 20;

impl Gpu {
    /// Converts the result of a driver call of the rank's own thread, with which no op conflicts.
    pub(super) fn own<T>(&self, call: &str, done: Result<T, Failure>) -> Result<T, Error> {
        let (rank, gpu) = (self.rank().index(), self.context.ordinal);
        done.map_err(|e| Error::GpuSetup { rank, gpu, problem: format!("{call}: {e}") })
    }

    /// Reads a tensor of the GPU.
    pub(super) fn read_own(&self, t: Tensor, out: &mut [f64]) -> Result<(), Error> {
        let (own, most) = (&self.streams[STREAMS], OWN_BYTES / t.dtype().bytes() as usize);
        let mut staged = StagedElements::new(t.dtype(), most.min(out.len()));
        for (i, out) in out.chunks_mut(most).enumerate() {
            let part = t.slice(i * most..i * most + out.len());
            staged.truncate(part.len());
            self.own("read", own.download(self.peer.at(part), staged.bytes_mut()))?;
            staged.view().widen(out);
        }
        Ok(())
    }

    /// Sets a tensor of either arena. `set` gets parts of it, with the index of their first
    /// element.
    pub(super) fn write_own(
        &self,
        t: Tensor,
        set: &dyn Fn(usize, &mut ViewMut<'_>),
    ) -> Result<(), Error> {
        if self.host.work.rehearsal {
            return Ok(());
        }
        if t.arena() == Arena::Pinned {
            set(0, &mut self.host.memory.view_mut(t));
            return Ok(());
        }
        let (own, most) = (&self.streams[STREAMS], OWN_BYTES / t.dtype().bytes() as usize);
        let mut staged = StagedElements::new(t.dtype(), most.min(t.len()));
        for start in (0..t.len()).step_by(most) {
            let part = t.slice(start..t.len().min(start + most));
            staged.truncate(part.len());
            set(start, &mut staged.view_mut());
            self.own("write", own.upload(staged.bytes(), self.peer.at(part)))?;
        }
        Ok(())
    }
}
