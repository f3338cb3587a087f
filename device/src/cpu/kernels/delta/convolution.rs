//! Causal convolution of each channel, with SiLU. Sums over the weights of a channel go from the
//! oldest row to the newest.

use super::super::documents::Starts;
use super::super::math::{read, vectorised};
use super::super::{Memory, is_values, not_a_kernel, values, values_mut};
use super::silu;
use crate::cpu::workers::{Rows, Workers};
use crate::op::{MOST_TAPS, Op};
use crate::{Tensor, View, ViewMut};
use std::ops::Range;

/// Channels that are processed at a time.
const CHANNELS: usize = 64;

/// A number for each of some channels.
type Lanes = [f32; CHANNELS];

pub(super) fn run(op: &Op, m: &impl Memory, workers: &Workers) -> Result<(), String> {
    match *op {
        Op::Convolution { x, weight, y, seq_len, starts } => {
            let of = Channels::new(m, x, weight, Starts::new(m, starts, 0, seq_len)?)?;
            let y = Rows { view: values_mut(m, y)?, each: of.count };
            workers.split(of.rows, x.len(), y, &|rows, mut y, _| of.forward(rows, &mut y.view));
            Ok(())
        }
        Op::ConvolutionBackward { x, weight, d_y, d_x, d_weight, seq_len, starts } => {
            let of = Channels::new(m, x, weight, Starts::new(m, starts, 0, seq_len)?)?;
            let d_y = values(m, d_y)?;
            is_values(d_weight)?;
            let mut d_weight = m.write(d_weight);
            let d_x = Rows { view: values_mut(m, d_x)?, each: of.count };
            let each = |rows: Range<usize>, mut d_x: Rows<'_>, sums: &mut [f32], _: &mut [f32]| {
                of.backward(rows, d_y, &mut d_x.view, sums);
            };
            workers.sum_rows(of.rows, weight.len(), x.len(), d_x, &each, |sums| {
                d_weight.store(0, sums);
            })
        }
        _ => not_a_kernel(),
    }
}

/// Inputs: x (rows, count) and weight (count, taps).
#[derive(Clone, Copy)]
struct Channels<'a> {
    x: View<'a>,
    weight: View<'a>,
    starts: Starts<'a>,
    rows: usize,
    count: usize,
    taps: usize,
}

impl<'a> Channels<'a> {
    fn new(
        m: &'a impl Memory,
        x: Tensor,
        weight: Tensor,
        starts: Starts<'a>,
    ) -> Result<Self, String> {
        let ((rows, count), taps) = (x.shape(), weight.shape().1);
        Ok(Self { x: values(m, x)?, weight: values(m, weight)?, starts, rows, count, taps })
    }

    /// The channels from `first` on that are processed together.
    fn some(self, first: usize) -> SomeChannels<'a> {
        let n = CHANNELS.min(self.count - first);
        let mut weights = [[0.0; CHANNELS]; MOST_TAPS];
        let mut all = [0.0; CHANNELS * MOST_TAPS];
        let all = &mut all[..n * self.taps];
        self.weight.load(first * self.taps, all);
        for (lane, of_channel) in all.chunks_exact(self.taps).enumerate() {
            weights.iter_mut().zip(of_channel).for_each(|(to, weight)| to[lane] = *weight);
        }
        SomeChannels { of: self, first, n, weights }
    }

    fn forward(self, rows: Range<usize>, y: &mut ViewMut<'_>) {
        vectorised(
            #[inline(always)]
            || {
                for first in (0..self.count).step_by(CHANNELS) {
                    let some = self.some(first);
                    for row in rows.clone() {
                        let mut sums = some.sums(row);
                        sums.iter_mut().for_each(|c| *c = silu(*c)[0]);
                        y.store((row - rows.start) * self.count + first, &sums[..some.n]);
                    }
                }
            },
        );
    }

    /// Writes d_x of `rows`, and the sums of the weights' gradients over them.
    fn backward(self, rows: Range<usize>, d_y: View<'_>, d_x: &mut ViewMut<'_>, sums: &mut [f32]) {
        let taps = self.taps;
        vectorised(
            #[inline(always)]
            || {
                for first in (0..self.count).step_by(CHANNELS) {
                    let some = self.some(first);
                    let mut d_weights = [[0.0; CHANNELS]; MOST_TAPS];
                    // Gradients of the sums of a row and of the next rows, by row modulo `taps`.
                    let mut ahead = [[0.0; CHANNELS]; MOST_TAPS];
                    for row in rows.start..(rows.start + taps - 1).min(self.rows) {
                        ahead[row % taps] = some.d_sums(row, d_y);
                    }
                    for row in rows.clone() {
                        let last = row + taps - 1;
                        if last < self.rows {
                            ahead[last % taps] = some.d_sums(last, d_y);
                        }
                        some.add_products(row, &ahead[row % taps], &mut d_weights);
                        let new = some.d_x(row, &ahead);
                        d_x.store((row - rows.start) * self.count + first, &new[..some.n]);
                    }
                    let of_channels = sums[first * taps..].chunks_exact_mut(taps).take(some.n);
                    for (lane, sums) in of_channels.enumerate() {
                        sums.iter_mut().zip(&d_weights).for_each(|(sum, d)| *sum = d[lane]);
                    }
                }
            },
        );
    }
}

/// Some channels, with their weights by age: `weights[taps - 1]` is of the row itself.
struct SomeChannels<'a> {
    of: Channels<'a>,
    first: usize,
    n: usize,
    weights: [Lanes; MOST_TAPS],
}

impl SomeChannels<'_> {
    /// The weights that a row sees, with the row that each of them weighs.
    #[inline(always)]
    fn seen(&self, row: usize) -> impl Iterator<Item = (usize, usize)> {
        let taps = self.of.taps;
        let unseen = (taps - 1).saturating_sub(self.of.starts.position(row));
        (unseen..taps).map(move |tap| (tap, row + tap + 1 - taps))
    }

    /// Elements of a row of x or of a tensor of its shape. Lanes without a channel are 0.
    #[inline(always)]
    fn row(&self, x: &View<'_>, row: usize) -> Lanes {
        let mut lanes = [0.0; CHANNELS];
        x.load(row * self.of.count + self.first, &mut lanes[..self.n]);
        lanes
    }

    /// The convolution of a row, before SiLU.
    #[inline(always)]
    fn sums(&self, row: usize) -> Lanes {
        let mut sums = [0.0; CHANNELS];
        for (tap, other) in self.seen(row) {
            let x = self.row(&self.of.x, other);
            for ((sum, x), w) in sums.iter_mut().zip(&x).zip(&self.weights[tap]) {
                *sum = w.mul_add(*x, *sum);
            }
        }
        sums
    }

    /// The gradient with respect to [`sums`](Self::sums).
    #[inline(always)]
    fn d_sums(&self, row: usize, d_y: View<'_>) -> Lanes {
        let mut sums = self.sums(row);
        let d_y = self.row(&d_y, row);
        sums.iter_mut().zip(&d_y).for_each(|(c, d)| *c = d * silu(*c)[1]);
        sums
    }

    #[inline(always)]
    fn add_products(&self, row: usize, d_sums: &Lanes, d_weights: &mut [Lanes; MOST_TAPS]) {
        for (tap, other) in self.seen(row) {
            let mut xs = [0.0; CHANNELS];
            let at = other * self.of.count + self.first;
            let x = read(&self.of.x, at, self.n, &mut xs);
            for ((to, x), d) in d_weights[tap].iter_mut().zip(x).zip(d_sums) {
                *to = d.mul_add(*x, *to);
            }
        }
    }

    /// The gradient of a row: of the sums of the row itself and of later rows that see it.
    #[inline(always)]
    fn d_x(&self, row: usize, ahead: &[Lanes; MOST_TAPS]) -> Lanes {
        let (Channels { rows, taps, starts, .. }, mut new) = (self.of, [0.0; CHANNELS]);
        for later in (0..taps).filter(|later| row + later < rows) {
            if starts.position(row + later) < later {
                break;
            }
            let d_sums = &ahead[(row + later) % taps];
            for ((new, d), w) in new.iter_mut().zip(d_sums).zip(&self.weights[taps - 1 - later]) {
                *new = w.mul_add(*d, *new);
            }
        }
        new
    }
}
