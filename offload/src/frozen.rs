//! Frozen parameters: the optimizer sends them to the device, and never changes them. They need 2
//! bytes per parameter of a 16-bit model, in one memory: in that of the device if they stay there,
//! else in that of the host. The data-parallel ranks divide what is on the host.

use crate::spec::SegmentSpec;
use device::{Arena, Plan, Pool, Rank, Tensor};
use std::ops::Range;

/// The pool of frozen parameters on their way to the device.
const FROZEN: Pool = Pool::staging("frozen parameters");

/// The frozen parameters of a segment.
#[derive(Clone, Debug)]
pub(crate) struct FrozenPart {
    /// Ranges of the segment's flat buffer; each has its own copy and its own all-gather.
    pub(crate) pieces: Vec<Range<usize>>,
    /// This rank's shard of each piece, one after the other, on the host. `None` if the parameters
    /// stay on the device.
    pub(crate) staging: Option<Tensor>,
}

/// This rank's shard of a piece.
pub(crate) struct Shard {
    /// Elements of the segment's flat buffer.
    pub(crate) flat: Range<usize>,
    /// Elements of [`FrozenPart::staging`].
    pub(crate) staged: Range<usize>,
}

impl FrozenPart {
    /// Plans the frozen part of a segment, which consists of `pieces`. `None` if these are none.
    pub(crate) fn plan(
        plan: &mut Plan,
        segment: &SegmentSpec,
        pieces: Vec<Range<usize>>,
        dp_size: usize,
    ) -> Option<Self> {
        let (params, len) = (segment.params, pieces.iter().map(Range::len).sum::<usize>());
        if len == 0 {
            return None;
        }
        let own = (1, len / dp_size);
        let name = format!("{}.frozen", segment.name);
        let staging = segment
            .param_buffer
            .map(|_| plan.tensor((Arena::Pinned, FROZEN), name, params.dtype(), own));
        Some(Self { pieces, staging })
    }

    /// Whether the parameters are on the host between their uses.
    pub(crate) const fn is_on_host(&self) -> bool {
        self.staging.is_some()
    }

    /// This rank's shards, in the order of the pieces.
    pub(crate) fn shards(&self, rank: Rank) -> impl Iterator<Item = Shard> {
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
    pub(crate) fn homes(
        &self,
        params: Tensor,
        rank: Rank,
    ) -> impl Iterator<Item = (usize, Tensor)> {
        self.shards(rank).map(move |Shard { flat, staged }| match self.staging {
            Some(staging) => (flat.start, staging.slice(staged)),
            None => (flat.start, params.slice(flat)),
        })
    }
}
