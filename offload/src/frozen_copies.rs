//! Frozen parameters on their way to the device, and their values before the first step.

use crate::frozen::Shard;
use crate::optimizer::Optimizer;
use crate::start::{FillBlocks, StatePosition, StateSource};
use crate::state::store_parameter;
use device::Lane::{DpComm, H2d};
use device::{Device, Error, Group, Op};

impl Optimizer {
    /// Copies this rank's shards of the frozen parameters up, if they are on the host.
    pub(crate) fn upload_frozen(&self, dev: &Device, segment: usize) {
        let s = &self.layout.segments[segment];
        let Some(frozen) = &s.frozen else { return };
        let Some(staging) = frozen.staging else { return };
        for Shard { flat, staged } in frozen.shards(self.rank) {
            let (src, dst) = (staging.slice(staged), s.spec.params.slice(flat));
            dev.submit(H2d, Op::Copy { src, dst });
        }
    }

    /// Gathers the frozen parameters from all ranks: those on the host at each use, the others once.
    pub(crate) fn gather_frozen(&mut self, dev: &Device, segment: usize) {
        let (s, w) = (&self.layout.segments[segment], &mut self.work[segment]);
        let Some(frozen) = &s.frozen else { return };
        if std::mem::replace(&mut w.has_frozen, true) && !frozen.is_on_host() {
            return;
        }
        for piece in &frozen.pieces {
            let x = s.spec.params.slice(piece.clone());
            dev.submit(DpComm, Op::AllGather { x, group: Group::Dp });
        }
    }

    /// Fills this rank's frozen parameters from `fill`, as state 0. Returns false if `should_stop`
    /// returned true; the parameters are then incomplete.
    ///
    /// # Errors
    /// As [`Device::write`], and the errors of `fill`.
    pub(crate) fn fill_frozen(
        &self,
        dev: &Device,
        segment: usize,
        fill: &StateSource<'_>,
        blocks: &FillBlocks<'_>,
    ) -> Result<bool, Error> {
        let s = &self.layout.segments[segment];
        let Some(frozen) = &s.frozen else { return Ok(true) };
        for (flat, home) in frozen.homes(s.spec.params, self.rank) {
            let whole = dev.write_runs(&[home], &|first, views| {
                let run = views[0].len();
                blocks.each(run, &mut |at, values| {
                    let position = StatePosition { segment, state: 0, first: flat + first + at };
                    fill(position, values)?;
                    store_parameter(&mut views[0], s.spec.params.dtype(), at, values);
                    Ok(())
                })
            });
            whole?;
            if blocks.is_stopped() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Sets this rank's frozen parameters to zero, for devices without data.
    ///
    /// # Errors
    /// As [`Device::write`].
    pub(crate) fn blank_frozen(&self, dev: &Device, segment: usize) -> Result<(), Error> {
        let s = &self.layout.segments[segment];
        let homes = s.frozen.iter().flat_map(|frozen| frozen.homes(s.spec.params, self.rank));
        homes.into_iter().try_for_each(|(_, home)| dev.write(home, &|_| 0.0))
    }
}
