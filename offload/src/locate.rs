//! Finds gradients that are not finite after a skipped step, and chunks in which two passes differ.
//! Each rank checks the elements that it owns.

use crate::Optimizer;
use device::{Device, Error};
use std::ops::Range;

/// Number of elements in one read.
const BLOCK: usize = 1 << 12;

/// The place of a gradient that is not finite.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NonFiniteGradient {
    /// The segment's number.
    pub segment: usize,
    /// The element's index in the segment's flat buffer.
    pub element: usize,
}

impl Optimizer {
    /// Sums of squares of this rank's chunks of the gradient, read from the host. They are valid
    /// after a step's decision, or after [`copy_squares_down`](Self::copy_squares_down).
    ///
    /// # Errors
    /// As [`Device::read`].
    pub fn squares(&self, dev: &Device) -> Result<Vec<f64>, Error> {
        let mut squares = vec![0.0; self.layout.partials.len()];
        dev.read(self.layout.partials, &mut squares)?;
        Ok(squares)
    }

    /// Segment and flat range of chunk `chunk` of [`squares`](Self::squares).
    pub fn chunk(&self, chunk: usize) -> (usize, Range<usize>) {
        let works = self.work.iter().enumerate();
        let mut pieces = works.flat_map(|(s, work)| work.pieces.iter().map(move |p| (s, p)));
        let Some((segment, piece)) = pieces.find(|(_, piece)| piece.chunks.contains(&chunk)) else {
            unreachable!("every chunk is one of a piece")
        };
        let (start, len) = (piece.flat_start(self.rank), self.layout.chunk);
        let from = start + (chunk - piece.chunks.start) * len;
        (segment, from..(from + len).min(start + piece.owned.len()))
    }

    /// Finds the first non-finite gradient of the decided step in the last affected segment, among
    /// this rank's elements. The backward pass computes the last segment first.
    ///
    /// # Errors
    /// As [`Device::read`].
    pub fn first_not_finite(&self, dev: &Device) -> Result<Option<NonFiniteGradient>, Error> {
        let (layout, side) = (&self.layout, self.delayed.unwrap_or(self.gradient_buffer));
        let squares = self.squares(dev)?;
        for (segment, (s, work)) in layout.segments.iter().zip(&self.work).enumerate().rev() {
            for piece in &work.pieces {
                // The buffer that the update reads.
                let gradient = s.stores[piece.store].gradient(side);
                let all = piece.owned.clone();
                for (number, chunk) in piece.chunks.clone().enumerate() {
                    if squares[chunk].is_finite() {
                        continue;
                    }
                    let from = all.start + number * layout.chunk;
                    let part = from..(from + layout.chunk).min(all.end);
                    if let Some(at) = first(dev, gradient.slice(part))? {
                        let element = piece.flat_start(self.rank) + from - all.start + at;
                        return Ok(Some(NonFiniteGradient { segment, element }));
                    }
                }
            }
        }
        Ok(None)
    }
}

fn first(dev: &Device, gradient: device::Tensor) -> Result<Option<usize>, Error> {
    let mut values = [0.0; BLOCK];
    for from in (0..gradient.len()).step_by(BLOCK) {
        let values = &mut values[..BLOCK.min(gradient.len() - from)];
        dev.read(gradient.slice(from..from + values.len()), values)?;
        if let Some(at) = values.iter().position(|value| !value.is_finite()) {
            return Ok(Some(from + at));
        }
    }
    Ok(None)
}
