//! Frozen parameters: the optimizer sends them to the device, and never changes them. They need 2
//! bytes per parameter of a 16-bit model, in one memory: in that of the device if they stay there,
//! else in that of the host. The data-parallel ranks divide what is on the host.

use crate::layout::pieces;
use crate::optimizer::Optimizer;
use crate::spec::{OptimizerSpec, SegmentSpec};
use crate::start::{FillBlocks, StatePosition, StateSource};
use crate::state::store_parameter;
use device::Lane::{DpComm, H2d};
use device::{Arena, Device, Error, Group, Op, Plan, Pool, Rank, Tensor};
use std::ops::Range;

/// The pool of frozen parameters on their way to the device.
const FROZEN: Pool = Pool::staging("frozen parameters");

/// The frozen parameters of a segment.
#[derive(Clone, Debug)]
pub(crate) struct FrozenPart {
    /// Ranges of the segment's flat buffer; each has its own copy and its own all-gather.
    pieces: Vec<Range<usize>>,
    /// This rank's shard of each piece, one after the other, on the host. `None` if the parameters
    /// stay on the device.
    staging: Option<Tensor>,
}

/// This rank's shard of a piece.
struct Shard {
    /// Elements of the segment's flat buffer.
    flat: Range<usize>,
    /// Elements of [`FrozenPart::staging`].
    staged: Range<usize>,
}

impl FrozenPart {
    /// Plans the frozen part of a segment, if it has one. `unit`: see [`pieces`].
    pub(crate) fn plan(
        plan: &mut Plan,
        spec: &OptimizerSpec,
        unit: usize,
        segment: &SegmentSpec,
    ) -> Option<Self> {
        let (params, frozen) = (segment.params, segment.trained..segment.params.len());
        if frozen.is_empty() {
            return None;
        }
        let own = (1, frozen.len() / spec.dp_size);
        let name = format!("{}.frozen", segment.name);
        let staging = segment
            .param_buffer
            .map(|_| plan.tensor((Arena::Pinned, FROZEN), name, params.dtype(), own));
        let all = pieces(frozen, spec.bucket_elements, unit, 0);
        let pieces = all.into_iter().map(|piece| piece.start..piece.start + piece.len).collect();
        Some(Self { pieces, staging })
    }

    /// Whether the parameters are on the host between their uses.
    pub(crate) const fn is_on_host(&self) -> bool {
        self.staging.is_some()
    }

    fn shards(&self, rank: Rank) -> impl Iterator<Item = Shard> {
        let mut end = 0;
        self.pieces.iter().map(move |piece| {
            let len = piece.len() / rank.dp_size;
            let (start, staged) = (piece.start + rank.dp * len, end..end + len);
            end = staged.end;
            Shard { flat: start..start + len, staged }
        })
    }

    /// The memory of each shard before its all-gather: the first element in the segment's flat
    /// buffer, and the tensor.
    fn homes(&self, params: Tensor, rank: Rank) -> impl Iterator<Item = (usize, Tensor)> {
        self.shards(rank).map(move |Shard { flat, staged }| match self.staging {
            Some(staging) => (flat.start, staging.slice(staged)),
            None => (flat.start, params.slice(flat)),
        })
    }
}

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
