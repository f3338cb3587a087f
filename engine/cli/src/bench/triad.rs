//! STREAM's triad on the kernel threads of a rank, to compare it with the ceilings of the update.

use super::{median, timed};
use device::numerics::triad;
use device::{Divisible, Error, HostContext, HostOp, HostTask, Mode, Tensor};
use std::sync::Arc;

/// Number of timed rounds.
const ROUNDS: usize = 5;

/// Elements in a unit of work.
const PIECE: usize = 1 << 16;

/// The triad `to` = `b` + 3 `c` over arrays of fp32.
#[derive(Clone, Copy, Debug)]
pub(super) struct Triad {
    pub(super) b: Tensor,
    pub(super) c: Tensor,
    pub(super) to: Tensor,
}

impl Triad {
    /// Rate in 10^9 bytes per second, counted as STREAM counts: two arrays read and one written. `run` runs a
    /// task and waits for it.
    pub(super) fn gb_per_s(
        self,
        run: &dyn Fn(&Arc<HostOp>) -> Result<(), Error>,
    ) -> Result<f64, Error> {
        let op = HostOp::new(self);
        // The first round faults the memory in.
        run(&op)?;
        let seconds: Vec<f64> =
            (0..ROUNDS).map(|_| timed(|| run(&op))).collect::<Result<_, Error>>()?;
        Ok(3.0 * self.to.bytes() as f64 / median(&seconds) / 1e9)
    }
}

impl HostTask for Triad {
    fn name(&self) -> &'static str {
        "triad"
    }
    fn accesses(&self, visit: &mut dyn FnMut(Mode, Tensor)) {
        visit(Mode::Read, self.b);
        visit(Mode::Read, self.c);
        visit(Mode::Write, self.to);
    }
    fn run(&self, _: u64, host: &mut HostContext<'_>) -> Result<(), String> {
        let (b, c) = (host.read_as::<f32>(self.b)?, host.read_as::<f32>(self.c)?);
        let to = host.write_as::<f32>(self.to)?;
        host.parallel_for(TriadArrays { b, c, to }, &|TriadArrays { b, c, to }| triad(b, c, to));
        Ok(())
    }
}

/// Arrays of equal length.
struct TriadArrays<'a> {
    b: &'a [f32],
    c: &'a [f32],
    to: &'a mut [f32],
}

impl Divisible for TriadArrays<'_> {
    fn units(&self) -> usize {
        self.to.len().div_ceil(PIECE)
    }
    fn cut(self, units: usize) -> (Self, Self) {
        let len = self.to.len().min(units * PIECE);
        let ((b, bs), (c, cs)) = (self.b.split_at(len), self.c.split_at(len));
        let (to, tos) = self.to.split_at_mut(len);
        (Self { b, c, to }, Self { b: bs, c: cs, to: tos })
    }
}
