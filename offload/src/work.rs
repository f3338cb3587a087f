//! A rank's work on each segment: pieces, tiles and their host tasks, made once.

use crate::adam::{AdamTile, DeviceUpdate};
use crate::layout::{OptimizerLayout, Segment};
use crate::norm::{AccumulateTask, MicrobatchPosition, PartialsRun};
use crate::speculation::{NormGuard, Phase, SpeculativeTile};
use crate::store::{DoubleBuffer, GradientRoute, Store, UpdateSite};
use crate::update::{NoiseRun, TileNoise};
use device::numerics::CountedRange;
use device::{DeviceOp, Event, HostOp, Rank, Tensor};
use std::ops::Range;
use std::sync::Arc;

/// This rank's work on one piece of a segment.
#[derive(Debug)]
pub(crate) struct PieceWork {
    /// The elements of the piece in a flat buffer of the segment.
    pub(crate) flat: Range<usize>,
    /// The number of its store among [`Segment::stores`].
    pub(crate) store: usize,
    /// This rank's elements of the piece in that store's arrays.
    pub(crate) owned: Range<usize>,
    /// The piece's chunks among this rank's partial sums.
    pub(crate) chunks: Range<usize>,
    /// Which elements of `owned` count in the norm.
    pub(crate) counted: CountedRange,
    tasks: Tasks,
}

/// The tasks that update a piece.
#[derive(Debug)]
enum Tasks {
    OnHost(Vec<Tile>),
    /// One for each gradient buffer.
    OnDevice([Arc<DeviceOp>; 2]),
}

/// A run of elements that the host updates at once.
#[derive(Debug)]
pub(crate) struct Tile {
    /// Its elements in the store's arrays.
    pub(crate) owned: Range<usize>,
    /// Its first element in the segment's flat buffer.
    pub(crate) start: usize,
    /// The tasks that add micro-batches up, where the host does, by gradient buffer and by [`MicrobatchPosition`].
    pub(crate) accumulate: Option<[[Arc<HostOp>; 3]; 2]>,
    /// The update for each gradient buffer, or what is left to do where the tile is updated ahead of the decision.
    pub(crate) adam: [Arc<HostOp>; 2],
    /// The update ahead of the decision, where there is one.
    pub(crate) speculate: Option<Arc<HostOp>>,
    /// The event behind which the new parameters are in staging.
    pub(crate) updated: Event,
}

/// The state of a segment within a step.
#[derive(Debug)]
pub(crate) struct SegmentWork {
    /// Its pieces, in the order in which they are reduced.
    pub(crate) pieces: Vec<PieceWork>,
    /// Adds up its sums of squares, where it is updated ahead of the decision.
    pub(crate) norm_guard: Option<Arc<HostOp>>,
    /// Whether an update is queued that `publish` has not sent out.
    pub(crate) unpublished: bool,
    /// Whether this rank's part is in a shared buffer, or on its way there, and the other ranks' parts are not.
    pub(crate) is_partial: bool,
    /// For each gradient buffer, the event behind which the host has read what came down last.
    pub(crate) staging_free: [Event; 2],
    /// The event behind which the parameters in staging have gone up.
    pub(crate) uploaded: Event,
    /// The event behind which the parameters of the last update are whole on the device.
    pub(crate) params_ready: Event,
}

impl PieceWork {
    /// This rank's first element in a flat buffer of the segment.
    pub(crate) fn flat_start(&self, rank: Rank) -> usize {
        self.flat.start + rank.dp * self.owned.len()
    }

    /// The tiles of what the host updates; the device updates without tiles.
    pub(crate) fn tiles(&self) -> &[Tile] {
        match &self.tasks {
            Tasks::OnHost(tiles) => tiles,
            Tasks::OnDevice(_) => &[],
        }
    }

    /// [`tiles`](Self::tiles), to note their events.
    pub(crate) fn tiles_mut(&mut self) -> &mut [Tile] {
        match &mut self.tasks {
            Tasks::OnHost(tiles) => tiles,
            Tasks::OnDevice(_) => &mut [],
        }
    }

    /// The update for each gradient buffer, where the device does it.
    pub(crate) const fn update_on_device(&self) -> Option<&[Arc<DeviceOp>; 2]> {
        match &self.tasks {
            Tasks::OnHost(_) => None,
            Tasks::OnDevice(update) => Some(update),
        }
    }
}

/// Inputs of the work of a rank on a segment, besides the layout.
#[derive(Clone, Copy)]
pub(crate) struct SegmentInputs<'a> {
    /// The rank among the data-parallel ranks.
    pub(crate) dp: usize,
    /// Which elements of the segment count in this rank's norm.
    pub(crate) counted: CountedRange,
    /// The runs of the segment, for moments that are rounded by chance.
    pub(crate) noise: &'a Arc<[NoiseRun]>,
}

/// The elements of a piece, or of a tile, that this rank owns.
#[derive(Clone)]
struct OwnedSlice<'a> {
    layout: &'a OptimizerLayout,
    s: &'a Segment,
    store: &'a Store,
    share: SegmentInputs<'a>,
    /// Its first element in the segment's flat buffer.
    start: usize,
    /// Its first chunk among this rank's partial sums.
    chunk: usize,
    /// Its elements in the store's arrays.
    owned: Range<usize>,
}

/// Makes all tasks of a rank for a segment.
pub(crate) fn segment_work(
    layout: &OptimizerLayout,
    s: &Segment,
    share: SegmentInputs<'_>,
) -> SegmentWork {
    let dp_size = layout.spec.dp_size;
    let mut ends = vec![0; s.stores.len()];
    let pieces = s.pieces.iter().map(|piece| {
        let len = piece.len / dp_size;
        let end = &mut ends[piece.store];
        let owned = *end..*end + len;
        *end = owned.end;
        let (start, store) = (piece.start + share.dp * len, &s.stores[piece.store]);
        let chunk = s.chunks.own.start + piece.start / dp_size / layout.chunk;
        let part = OwnedSlice { layout, s, store, share, start, chunk, owned };
        PieceWork {
            flat: piece.start..piece.start + piece.len,
            store: piece.store,
            chunks: part.chunks(),
            counted: share.counted.from(part.start),
            tasks: match store.site {
                UpdateSite::Device { .. } => Tasks::OnDevice(part.update_on_device()),
                UpdateSite::Host { route, up } => Tasks::OnHost(part.tiles(route, up)),
            },
            owned: part.owned,
        }
    });
    let pieces: Vec<PieceWork> = pieces.collect();
    let ahead = || pieces.iter().filter(|piece| s.stores[piece.store].speculation.is_some());
    let chunks = ahead().next().zip(ahead().next_back());
    let norm_guard = layout.predicted.zip(chunks).map(|(predicted, (first, last))| {
        let partials = layout.partials.slice(first.chunks.start..last.chunks.end);
        HostOp::new(NormGuard { predicted, partials, clip: layout.spec.clip })
    });
    SegmentWork {
        pieces,
        norm_guard,
        unpublished: false,
        is_partial: false,
        staging_free: Default::default(),
        uploaded: Event::default(),
        params_ready: Event::default(),
    }
}

impl OwnedSlice<'_> {
    /// The range of its chunks among this rank's partial sums.
    fn chunks(&self) -> Range<usize> {
        self.chunk..self.chunk + self.owned.len() / self.layout.chunk
    }

    /// Counts its elements among the first `prefix` of the segment.
    fn within(&self, prefix: usize) -> usize {
        prefix.saturating_sub(self.start).min(self.owned.len())
    }

    /// Cuts its elements out of one of the store's arrays.
    fn of(&self, array: Tensor) -> Tensor {
        array.slice(self.owned.clone())
    }

    /// Cuts it into tiles, with their tasks.
    fn tiles(&self, route: GradientRoute, up: Tensor) -> Vec<Tile> {
        let chunk = self.layout.chunk;
        let size = (self.layout.spec.tile_elements / chunk).max(1) * chunk;
        let tile = |at: usize| {
            let before = at - self.owned.start;
            let owned = at..(at + size).min(self.owned.end);
            let (start, chunk) = (self.start + before, self.chunk + before / chunk);
            OwnedSlice { start, chunk, owned, ..self.clone() }.tile(route, up)
        };
        self.owned.clone().step_by(size).map(tile).collect()
    }

    fn tile(self, route: GradientRoute, up: Tensor) -> Tile {
        let accumulate = match route {
            GradientRoute::SumOnHost { down, sum } => Some(self.accumulate(down, sum)),
            GradientRoute::Direct { .. }
            | GradientRoute::SumOnDevice { .. }
            | GradientRoute::Blocking { .. } => None,
        };
        let noise = TileNoise { runs: Arc::clone(self.share.noise), start: self.start };
        let adam = self.update(self.layout.control, self.of(up), &noise);
        let buffers = self.store.speculation.as_ref();
        let buffers =
            buffers.map(|buffers| buffers.tile(&self.owned, self.owned.start / self.layout.chunk));
        let with = |tile: AdamTile, when| match buffers.clone() {
            Some(buffers) => HostOp::new(SpeculativeTile { tile, buffers, phase: when }),
            None => HostOp::new(tile),
        };
        let ahead = buffers.is_some().then(|| with(adam[0].clone(), Phase::Speculate));
        let adam = adam.map(|tile| with(tile, Phase::Validate));
        let (start, updated) = (self.start, Event::default());
        Tile { start, accumulate, adam, speculate: ahead, updated, owned: self.owned }
    }

    /// Makes the tasks that add micro-batches up, by gradient buffer and by position.
    fn accumulate(&self, down: Tensor, sums: DoubleBuffer) -> [[Arc<HostOp>; 3]; 2] {
        sums.map(|sum| {
            [MicrobatchPosition::First, MicrobatchPosition::Middle, MicrobatchPosition::Last].map(
                |position| {
                    HostOp::new(AccumulateTask {
                        grad: self.of(down),
                        sum: self.of(sum),
                        position,
                        partials: self.layout.partials.slice(self.chunks()),
                        chunk: self.layout.chunk,
                        counted: self.share.counted.from(self.start),
                    })
                },
            )
        })
    }

    /// Makes the device's update for each gradient buffer.
    fn update_on_device(&self) -> [Arc<DeviceOp>; 2] {
        let param = self.s.spec.params.slice(self.start..self.start + self.owned.len());
        let update = self.update(self.layout.device_control, param, &TileNoise::none());
        update.map(|tile| DeviceOp::new(DeviceUpdate(tile)))
    }

    /// Says what is updated, for each gradient buffer.
    fn update(&self, control: Tensor, param: Tensor, noise: &TileNoise) -> [AdamTile; 2] {
        [0, 1].map(|buffer| AdamTile {
            rule: self.layout.spec.rule,
            control,
            grad: self.of(self.store.gradient(buffer)),
            master: self.of(self.store.master),
            momentum: self.of(self.store.momentum),
            variance: self.of(self.store.variance),
            param,
            decayed: self.within(self.s.spec.decayed),
            noise: noise.clone(),
        })
    }
}

/// Says where this rank's chunks stand among all ranks' chunks.
pub(crate) fn spread_runs(
    layout: &OptimizerLayout,
    dp: usize,
    work: &[SegmentWork],
) -> Vec<PartialsRun> {
    let mut runs = Vec::new();
    for (s, w) in layout.segments.iter().zip(work) {
        for p in &w.pieces {
            let start = p.flat.start + dp * p.owned.len();
            let all = s.chunks.all.start + start / layout.chunk;
            runs.push(PartialsRun { own: p.chunks.start, all, len: p.chunks.len() });
        }
    }
    runs
}
