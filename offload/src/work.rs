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
    /// Elements of the piece in a flat buffer of the segment.
    pub(crate) flat: Range<usize>,
    /// Index of the piece's store in [`Segment::stores`].
    pub(crate) store: usize,
    /// This rank's elements of the piece in that store's arrays.
    pub(crate) owned: Range<usize>,
    /// Chunks of the piece among this rank's partial sums.
    pub(crate) chunks: Range<usize>,
    /// The elements of `owned` that count in the norm.
    pub(crate) counted: CountedRange,
    tasks: Tasks,
}

/// The tasks that update a piece.
#[derive(Debug)]
enum Tasks {
    OnHost(Vec<Tile>),
    /// One task for each gradient buffer.
    OnDevice([Arc<DeviceOp>; 2]),
}

/// A run of elements that one host task updates.
#[derive(Debug)]
pub(crate) struct Tile {
    /// Elements of the tile in the store's arrays.
    pub(crate) owned: Range<usize>,
    /// First element of the tile in the segment's flat buffer.
    pub(crate) start: usize,
    /// Tasks that add micro-batches on the host, by gradient buffer and by [`MicrobatchPosition`].
    /// None if the host does not add.
    pub(crate) accumulate: Option<[[Arc<HostOp>; 3]; 2]>,
    /// Update task for each gradient buffer. If the tile is updated speculatively, the task
    /// validates that update.
    pub(crate) adam: [Arc<HostOp>; 2],
    /// Speculative update of the tile, if the segment is updated speculatively.
    pub(crate) speculate: Option<Arc<HostOp>>,
    /// Event after which the new parameters are in staging.
    pub(crate) updated: Event,
}

/// The state of a segment within a step.
#[derive(Debug)]
pub(crate) struct SegmentWork {
    /// Pieces of the segment, in the order of their reductions.
    pub(crate) pieces: Vec<PieceWork>,
    /// Task that checks the segment's norm against the clip limit. Present if the segment is
    /// updated speculatively.
    pub(crate) norm_guard: Option<Arc<HostOp>>,
    /// Whether the frozen parameters were gathered once.
    pub(crate) has_frozen: bool,
    /// Whether an update is queued that `publish` has not sent yet.
    pub(crate) unpublished: bool,
    /// Whether the shared buffer has, or will have, this rank's part before the all-gather.
    pub(crate) is_partial: bool,
    /// For each gradient buffer, the event after which the host has read the staged gradients.
    pub(crate) staging_free: [Event; 2],
    /// Event after which the parameters in staging have gone up.
    pub(crate) uploaded: Event,
    /// Event after which the parameters of the last update are complete on the device.
    pub(crate) params_ready: Event,
}

impl PieceWork {
    /// This rank's first element in a flat buffer of the segment.
    pub(crate) fn flat_start(&self, rank: Rank) -> usize {
        self.flat.start + rank.dp * self.owned.len()
    }

    /// Tiles of a piece that the host updates; a piece on the device has no tiles.
    pub(crate) fn tiles(&self) -> &[Tile] {
        match &self.tasks {
            Tasks::OnHost(tiles) => tiles,
            Tasks::OnDevice(_) => &[],
        }
    }

    /// Mutable [`tiles`](Self::tiles), for their events.
    pub(crate) fn tiles_mut(&mut self) -> &mut [Tile] {
        match &mut self.tasks {
            Tasks::OnHost(tiles) => tiles,
            Tasks::OnDevice(_) => &mut [],
        }
    }

    /// Update task for each gradient buffer, if the device updates the piece.
    pub(crate) const fn update_on_device(&self) -> Option<&[Arc<DeviceOp>; 2]> {
        match &self.tasks {
            Tasks::OnHost(_) => None,
            Tasks::OnDevice(update) => Some(update),
        }
    }
}

/// Inputs of a rank's work on a segment, besides the layout.
#[derive(Clone, Copy)]
pub(crate) struct SegmentInputs<'a> {
    /// Data-parallel rank.
    pub(crate) dp: usize,
    /// The elements of the segment that count in this rank's norm.
    pub(crate) counted: CountedRange,
    /// [`NoiseRun`]s of the segment, for moments with stochastic rounding.
    pub(crate) noise: &'a Arc<[NoiseRun]>,
}

/// The elements of a piece, or of a tile, that this rank owns.
#[derive(Clone)]
struct OwnedSlice<'a> {
    layout: &'a OptimizerLayout,
    s: &'a Segment,
    store: &'a Store,
    share: SegmentInputs<'a>,
    /// First element of the slice in the segment's flat buffer.
    start: usize,
    /// First chunk of the slice among this rank's partial sums.
    chunk: usize,
    /// Elements of the slice in the store's arrays.
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
    let speculative = || pieces.iter().filter(|piece| s.stores[piece.store].speculation.is_some());
    let chunks = speculative().next().zip(speculative().next_back());
    let norm_guard = layout.predicted.zip(chunks).map(|(predicted, (first, last))| {
        let partials = layout.partials.slice(first.chunks.start..last.chunks.end);
        HostOp::new(NormGuard { predicted, partials, clip: layout.spec.clip })
    });
    SegmentWork {
        pieces,
        norm_guard,
        has_frozen: false,
        unpublished: false,
        is_partial: false,
        staging_free: Default::default(),
        uploaded: Event::default(),
        params_ready: Event::default(),
    }
}

impl OwnedSlice<'_> {
    /// Range of the slice's chunks among this rank's partial sums.
    fn chunks(&self) -> Range<usize> {
        self.chunk..self.chunk + self.owned.len() / self.layout.chunk
    }

    /// Number of the slice's elements among the first `prefix` elements of the segment.
    fn within(&self, prefix: usize) -> usize {
        prefix.saturating_sub(self.start).min(self.owned.len())
    }

    /// The slice's elements of `array`, one of the store's arrays.
    fn of(&self, array: Tensor) -> Tensor {
        array.slice(self.owned.clone())
    }

    /// Cuts the slice into tiles with their tasks.
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
        let speculate = buffers.is_some().then(|| with(adam[0].clone(), Phase::Speculate));
        let adam = adam.map(|tile| with(tile, Phase::Validate));
        let (start, updated) = (self.start, Event::default());
        Tile { start, accumulate, adam, speculate, updated, owned: self.owned }
    }

    /// Makes the tasks that add micro-batches, by gradient buffer and by position.
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

    /// Makes the update of the slice, for each gradient buffer.
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

/// Maps this rank's chunks to their positions among all ranks' chunks.
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
