//! The route of a piece's gradient from the reduce-scatter to the buffer that the update reads, one
//! function per placement.

use crate::blocking::{add_sum, keep_sum, widen};
use crate::layout::OptimizerLayout;
use crate::norm::MicrobatchPosition;
use crate::store::{GradientRoute, PartialSum, Store, UpdateSite};
use crate::work::PieceWork;
use device::Lane::{D2h, DpComm, Host};
use device::{Device, Event, Op, Tensor};

/// One piece of a micro-batch's gradient, already summed over the ranks.
pub(crate) struct ReducedPiece<'a> {
    pub(crate) dev: &'a Device,
    pub(crate) layout: &'a OptimizerLayout,
    pub(crate) piece: &'a PieceWork,
    /// This rank's part of the piece, in the bucket.
    pub(crate) own: Tensor,
    /// Number of the gradient buffer that the step fills.
    pub(crate) buffer: usize,
    /// Number of the micro-batch, counted from 0.
    pub(crate) micro: usize,
    /// Event after which the host has read the previous contents of the staging buffer.
    pub(crate) staging_free: Event,
}

impl ReducedPiece<'_> {
    /// Submits the ops that bring the piece to the buffer that the update of `store` reads.
    pub(crate) fn send(&self, store: &Store) {
        match store.site {
            UpdateSite::Device { gradient, summed } => {
                self.to_device(gradient[self.buffer], summed);
            }
            UpdateSite::Host { route, .. } => match route {
                GradientRoute::Direct { down } => self.direct(down[self.buffer]),
                GradientRoute::SumOnDevice { sum, down } => {
                    self.sum_on_device(sum, down[self.buffer]);
                }
                GradientRoute::SumOnHost { down, .. } => self.sum_on_host(down),
                GradientRoute::Blocking { partial_sum, wide, down } => {
                    self.blocking(partial_sum, wide, down);
                }
            },
        }
    }

    fn to_device(&self, gradient: Tensor, summed: bool) {
        let gradient = self.part(gradient);
        if summed {
            self.add(gradient);
        } else {
            self.dev.submit(DpComm, Op::Copy { src: self.own, dst: gradient });
        }
        if self.is_last() {
            self.squares(gradient);
        }
    }

    fn direct(&self, down: Tensor) {
        if self.is_last() {
            self.squares(self.own);
        }
        self.copy_down(self.own, down);
    }

    fn sum_on_device(&self, sum: Tensor, down: Tensor) {
        let sum = self.part(sum);
        self.add(sum);
        if self.is_last() {
            self.squares(sum);
            self.copy_down(sum, down);
        }
    }

    /// Copies the piece down and adds it on the host, which also computes the sums of squares.
    fn sum_on_host(&self, down: Tensor) {
        self.copy_down(self.own, down);
        self.dev.follow(Host, D2h);
        let position = if self.micro == 0 {
            MicrobatchPosition::First
        } else if self.is_last() {
            MicrobatchPosition::Last
        } else {
            MicrobatchPosition::Middle
        };
        for tile in self.piece.tiles() {
            let Some(tasks) = &tile.accumulate else {
                unreachable!("tiles of what the host adds up have tasks for it")
            };
            self.dev.submit_host(&tasks[self.buffer][position as usize], 0);
        }
    }

    fn blocking(&self, partial_sum: Option<PartialSum>, wide: Tensor, down: Tensor) {
        if let Some(PartialSum { sum, incoming }) = partial_sum {
            let sum = self.part(sum);
            if self.micro > 0 {
                add_sum(self.dev, self.own, incoming.slice(0..self.own.len()), sum);
            }
            if !self.is_last() {
                return keep_sum(self.dev, self.own, sum);
            }
        }
        let wide = wide.slice(0..self.own.len());
        widen(self.dev, self.own, wide);
        if self.is_last() {
            self.squares(wide);
        }
        self.copy_down(wide, down);
    }

    fn is_last(&self) -> bool {
        self.micro + 1 == self.layout.spec.micro_batches
    }

    /// Cuts the piece's elements out of an array of the piece's store.
    fn part(&self, array: Tensor) -> Tensor {
        array.slice(self.piece.owned.clone())
    }

    /// Adds `own` to `sum` in fp32; the first micro-batch overwrites `sum`.
    fn add(&self, sum: Tensor) {
        let op = match self.micro {
            0 => Op::Cast { x: self.own, y: sum },
            _ => Op::Add { x: self.own, into: sum },
        };
        self.dev.submit(DpComm, op);
    }

    /// Computes the sums of squares of the step's gradient `x`, chunk by chunk.
    fn squares(&self, x: Tensor) {
        let Some(partials) = self.layout.device_partials else {
            unreachable!(
                "the layout has partial sums on the device for all that the host does not add up"
            )
        };
        let partials = partials.slice(self.piece.chunks.clone());
        let (chunk, counted) = (self.layout.chunk, self.piece.counted);
        self.dev.submit(DpComm, Op::ChunkSquares { x, partials, chunk, counted });
    }

    /// Copies a result of DpComm to the piece's part of `down`, after `staging_free`.
    fn copy_down(&self, src: Tensor, down: Tensor) {
        self.dev.follow(D2h, DpComm);
        self.dev.wait(D2h, self.staging_free);
        self.dev.submit(D2h, Op::Copy { src, dst: self.part(down) });
    }
}
