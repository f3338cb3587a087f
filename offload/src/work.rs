//! What one rank does with each segment: pieces, tiles and their host tasks, made once.

use crate::adam::{AdamTile, DeviceUpdate};
use crate::layout::{Layout, Place, Segment, Store};
use crate::norm::{Accumulate, Turn};
use crate::update::NoiseRun;
use device::{DeviceOp, Event, HostOp, Rank, Tensor};
use std::ops::Range;
use std::sync::Arc;

/// What this rank does with one piece of a segment.
#[derive(Debug)]
pub(crate) struct PieceWork {
    /// The piece in a flat buffer of the segment.
    pub(crate) flat: Range<usize>,
    /// Into [`Segment::stores`], and this rank's part of the piece in that store's arrays.
    pub(crate) store: usize,
    pub(crate) owned: Range<usize>,
    /// This rank's partial sums of it.
    pub(crate) chunks: Range<usize>,
    /// Leading elements of the part that count in the norm, and that take weight decay.
    pub(crate) counted: usize,
    /// None where the update is on the device.
    pub(crate) tiles: Vec<Tile>,
    /// By side of the gradients, where the update is on the device.
    pub(crate) update: Option<[Arc<DeviceOp>; 2]>,
}

/// What the host does at once. Tasks are made here, once.
#[derive(Debug)]
pub(crate) struct Tile {
    /// In the store's arrays.
    pub(crate) owned: Range<usize>,
    /// In the segment's flat buffer.
    pub(crate) start: usize,
    /// By side of the gradients: first, middle and last micro-batch.
    pub(crate) accumulate: Option<[[Arc<HostOp>; 3]; 2]>,
    pub(crate) adam: Option<[Arc<HostOp>; 2]>,
    /// The new parameters are in staging.
    pub(crate) updated: Event,
}

/// Where a segment stands.
#[derive(Debug)]
pub(crate) struct SegmentWork {
    pub(crate) pieces: Vec<PieceWork>,
    /// `update` has run and `publish` has not.
    pub(crate) unpublished: bool,
    /// By side: the host has read what came down last.
    pub(crate) staging_free: [Event; 2],
    /// The parameters in staging have gone up.
    pub(crate) uploaded: Event,
    pub(crate) params_ready: Event,
}

impl PieceWork {
    pub(crate) fn flat_start(&self, rank: Rank) -> usize {
        self.flat.start + rank.dp * self.owned.len()
    }
}

/// For rank `dp`, of whose part the first `counted` elements count in the norm.
pub(crate) fn segment_work(
    layout: &Layout,
    s: &Segment,
    dp: usize,
    (counted, noise): (usize, &Arc<[NoiseRun]>),
) -> SegmentWork {
    let dp_size = layout.spec.dp_size;
    let mut ends = vec![0; s.stores.len()];
    let pieces = s.pieces.iter().map(|piece| {
        let len = piece.len / dp_size;
        let (start, end) = (piece.start + dp * len, &mut ends[piece.store]);
        let owned = *end..*end + len;
        *end = owned.end;
        let first = s.own_chunks.start + piece.start / dp_size / layout.chunk;
        let chunks = first..first + len / layout.chunk;
        let within = |prefix: usize| prefix.saturating_sub(start).min(len);
        let counted_here = within(counted);
        let store = &s.stores[piece.store];
        let (tiles, update) = match store.place {
            Place::Host => {
                (tiles(layout, (s, store), (start, &owned, first), (counted, noise)), None)
            }
            Place::Device => (Vec::new(), Some(device_update(layout, s, (store, &owned), start))),
        };
        let flat = piece.start..piece.start + piece.len;
        PieceWork { flat, store: piece.store, owned, chunks, counted: counted_here, tiles, update }
    });
    SegmentWork {
        pieces: pieces.collect(),
        unpublished: false,
        staging_free: Default::default(),
        uploaded: Event::default(),
        params_ready: Event::default(),
    }
}

/// Cuts an owned run that starts at flat element `start` and chunk `chunks` into tiles, with their tasks.
fn tiles(
    layout: &Layout,
    (s, store): (&Segment, &Store),
    (start, owned, chunks): (usize, &Range<usize>, usize),
    (counted, noise): (usize, &Arc<[NoiseRun]>),
) -> Vec<Tile> {
    let (spec, chunk) = (&layout.spec, layout.chunk);
    let size = (spec.tile_elements / chunk).max(1) * chunk;
    let tile = |at: usize| {
        let range = at..(at + size).min(owned.end);
        let (before, len) = (at - owned.start, range.len());
        let within = |prefix: usize| prefix.saturating_sub(start + before).min(len);
        let part = |t: Tensor| t.slice(range.clone());
        let chunks = chunks + before / chunk..chunks + (before + len) / chunk;
        let accumulate = store.host_sum.zip(store.down).map(|(sums, downs)| {
            [0, 1].map(|side| {
                [Turn::First, Turn::Middle, Turn::Last].map(|turn| {
                    let (grad, sum) = (part(downs[side]), part(sums[side]));
                    let partials = layout.partials.slice(chunks.clone());
                    let counted = within(counted);
                    HostOp::new(Accumulate { grad, sum, turn, partials, chunk, counted })
                })
            })
        });
        let adam = store.up.map(|up| {
            [0, 1].map(|side| {
                HostOp::new(AdamTile {
                    rule: spec.rule,
                    control: layout.control,
                    grad: part(store.gradient(side)),
                    master: part(store.master),
                    momentum: part(store.momentum),
                    variance: part(store.variance),
                    param: part(up),
                    decayed: within(s.spec.decayed),
                    noise: (Arc::clone(noise), start + before),
                })
            })
        });
        let updated = Event::default();
        Tile { owned: range.clone(), start: start + before, accumulate, adam, updated }
    };
    owned.clone().step_by(size).map(tile).collect()
}

/// Where this rank's chunks stand among all: runs of (own, all, length).
pub(crate) fn spread_runs(
    layout: &Layout,
    dp: usize,
    work: &[SegmentWork],
) -> Vec<(usize, usize, usize)> {
    let mut runs = Vec::new();
    for (s, w) in layout.segments.iter().zip(work) {
        for p in &w.pieces {
            let start = p.flat.start + dp * p.owned.len();
            let all = s.all_chunks.start + start / layout.chunk;
            runs.push((p.chunks.start, all, p.chunks.len()));
        }
    }
    runs
}

/// By side, of a piece whose store is on the device and whose part of this rank starts at flat element `start`.
fn device_update(
    layout: &Layout,
    s: &Segment,
    (store, owned): (&Store, &Range<usize>),
    start: usize,
) -> [Arc<DeviceOp>; 2] {
    let part = |t: Tensor| t.slice(owned.clone());
    [0, 1].map(|side| {
        DeviceOp::new(DeviceUpdate(AdamTile {
            rule: layout.spec.rule,
            control: layout.device_control,
            grad: part(store.gradient(side)),
            master: part(store.master),
            momentum: part(store.momentum),
            variance: part(store.variance),
            param: s.spec.params.slice(start..start + owned.len()),
            decayed: s.spec.decayed.saturating_sub(start).min(owned.len()),
            noise: ([].into(), 0),
        }))
    })
}
