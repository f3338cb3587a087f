//! Groups of micro-batches: vertical scheduling (GreedySnake, arXiv 2512.17570). All micro-batches
//! of a group pass through a block before the next block begins. The block's parameters are read
//! once.

use crate::train::batch::{Batch, BatchSplit};
use config::UpdateMode;
use device::{Event, random};
use offload::Bucket;
use std::ops::Range;
use tensor_parallel::MicrobatchContext;

/// Key that derives the dropout stream from the seed of a run ("drop" in ASCII).
const DROPOUT_STREAM: u64 = 0x6472_6f70;

/// Order in which the ops of a step are queued. It changes no result, except with a delayed update.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExecutionSchedule {
    pub(crate) update: UpdateMode,
    /// Number of segments that are prefetched before the forward pass reads them.
    pub(crate) lookahead: usize,
    /// Number of micro-batches in a vertical group (`offload.first_forward`).
    pub(crate) vertical_width: usize,
    /// Whether every group is vertical, forward and backward. Otherwise only the forward pass of
    /// the first group is vertical.
    pub(crate) vertical_backward: bool,
}

impl ExecutionSchedule {
    /// Numbers of the micro-batches of the group that begins with `first`, in a step of `all` of
    /// them.
    pub(super) fn group(self, first: usize, all: usize) -> Range<usize> {
        let is_vertical = first == 0 || self.vertical_backward;
        let width = if is_vertical { self.vertical_width } else { 1 };
        first..all.min(first + width)
    }

    /// Slots of a group of `len` micro-batches, in the order of their backward passes. The slots of
    /// a range run backward together.
    pub(super) fn backward_order(self, len: usize) -> impl Iterator<Item = Range<usize>> {
        let width = if self.vertical_backward { len } else { 1 };
        (0..len).step_by(width).map(move |slot| slot..slot + width)
    }
}

/// A micro-batch of the current group. Its slot is its index in the group, and selects its buffers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Microbatch {
    /// Number of the micro-batch in the step, from 0.
    pub(super) number: usize,
    pub(super) context: MicrobatchContext,
    pub(super) batch: Batch,
    /// Event after which the activation checkpoint of the next block to go backward is on the
    /// device.
    pub(super) checkpoint_ready: Event,
    /// Bucket of a tied embedding, into which the head has written its part of the gradient.
    pub(super) tied_bucket: Option<Bucket>,
}

impl Microbatch {
    /// Makes micro-batch `number` of training step `step`. `counted_share`: share of the step's
    /// tokens whose target counts.
    pub(super) fn of_step(
        split: &BatchSplit,
        step: u64,
        number: usize,
        slot: usize,
        batch: Batch,
        counted_share: f64,
    ) -> Self {
        let context = MicrobatchContext {
            dropout_key: random::key(random::key(split.seed, DROPOUT_STREAM), step),
            first_token: (split.first_sample(number) * split.seq_len) as u64,
            training: true,
            starts: batch.starts,
            targets: batch.tensors.targets,
            counted_share,
            slot,
        };
        Self::new(number, context, batch)
    }

    /// Makes a micro-batch of an evaluation.
    pub(super) fn of_evaluation(number: usize, batch: Batch) -> Self {
        let context = MicrobatchContext {
            dropout_key: 0,
            first_token: 0,
            training: false,
            starts: batch.starts,
            targets: batch.tensors.targets,
            counted_share: 1.0,
            slot: 0,
        };
        Self::new(number, context, batch)
    }

    fn new(number: usize, context: MicrobatchContext, batch: Batch) -> Self {
        Self { number, context, batch, checkpoint_ready: Event::default(), tied_bucket: None }
    }
}
