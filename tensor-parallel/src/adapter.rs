//! Low-rank adapters of linears (LoRA, arXiv 2106.09685, section 4.1): y = x w' + s (x a') b'. The
//! weight w is frozen; a (r, k) and b (n, r) are trained, and s is a number.
//!
//! A matmul with several weights of one input, such as q, k and v, has an adapter for each weight.
//! Its a's are adjacent, so that one matmul computes all x a'. The factor on the side where w is
//! cut over the ranks is cut with it: b of a column-parallel linear, a of a row-parallel one. The
//! other factor is replicated, and each rank computes a part of its gradient, which
//! [`Block::backward`](crate::block::Block::backward) sums over the ranks.

use crate::adapter_shape::{AdapterShape, FACTORS};
use crate::params::{FlatBuffer, Init, ParamDeclarations, Split, TrainedParams};
use crate::shape::DecoderShape;
use device::{Arena, Device, Dropout, Lane::Compute, Op, Plan, Tensor};

/// Last parts of the factors' names.
const A: &str = FACTORS[0];
const B: &str = FACTORS[1];

/// Most weights that one matmul has: q, k and v.
const MOST_PARTS: usize = 3;

/// Transients of adapters; all linears share them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AdapterScratch {
    hidden: Tensor,   // (1, 3 B T r): s x a'
    d_hidden: Tensor, // (1, 3 B T r): its gradient, times s
}

/// The adapters of a linear, or their gradients.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Adapter {
    a: Tensor, // (P r, k) of P parts
    parts: [Option<Part>; MOST_PARTS],
    rank: usize,
    scale: f32,
    scratch: AdapterScratch,
}

/// The second factor of the adapter of one weight.
#[derive(Clone, Copy, Debug)]
struct Part {
    b: Tensor, // (n, r)
    /// First of the n columns in the linear's output.
    first: usize,
}

impl AdapterScratch {
    /// Plans the transients, if the model has adapters.
    pub(crate) fn plan(plan: &mut Plan, shape: &DecoderShape) -> Option<Self> {
        let adapters = shape.adapters()?;
        let mut one = |name: &str| {
            let size = (1, MOST_PARTS * shape.tokens() * adapters.rank);
            plan.tensor((Arena::Device, "transients"), name, shape.dtype, size)
        };
        Some(Self { hidden: one("adapter"), d_hidden: one("d_adapter") })
    }
}

impl DecoderShape {
    /// The adapters of the model, if it has any.
    pub fn adapters(&self) -> Option<AdapterShape> {
        match self.trained {
            TrainedParams::Adapters(shape) => Some(shape),
            TrainedParams::All | TrainedParams::AllBut(_) => None,
        }
    }
}

/// Declares the adapters of linears with one input of `k` columns. Each linear has its name, its
/// rows, and its split over the ranks, by which the adapters are split too.
pub(crate) fn declare(
    params: &mut ParamDeclarations,
    shape: &DecoderShape,
    linears: &[(&str, usize, Split)],
    k: usize,
) {
    let Some(AdapterShape { rank, targets, .. }) = shape.adapters() else { return };
    let adapted = || linears.iter().filter(|(part, ..)| targets.has(part));
    for (part, _, split) in adapted() {
        let split = if *split == Split::Columns { Split::Columns } else { Split::Replicated };
        params.add(&format!("{part}.{A}"), (rank, k), split, initial_factor(k));
    }
    for (part, rows, split) in adapted() {
        let split = if *split == Split::Columns { Split::Replicated } else { *split };
        params.add(&format!("{part}.{B}"), (*rows, rank), split, Init::Constant(0.0));
    }
}

/// Initial values of a factor a with `k` columns. Their variance is the variance of PEFT's initial values,
/// which are uniform.
pub(crate) fn initial_factor(k: usize) -> Init {
    Init::Normal(1.0 / (3.0 * k as f64).sqrt())
}

/// Multiplies x by `scale` in place.
#[track_caller]
pub(crate) fn scaled(dev: &Device, x: Tensor, scale: f32) -> Tensor {
    if scale != 1.0 {
        let (y, dropout) = (x, Dropout::NONE);
        dev.submit(Compute, Op::Dropout { x, y, dropout, scale });
    }
    x
}

/// The gradients of the factors b of `parts`, which several ranks hold.
pub(crate) fn shared<'a>(
    flat: FlatBuffer<'a>,
    shape: &DecoderShape,
    parts: &'a [&str],
) -> impl Iterator<Item = Tensor> + use<'a> {
    let targets = shape.adapters().map(|adapters| adapters.targets);
    let has = move |part: &&&str| targets.is_some_and(|targets| targets.has(part));
    parts.iter().filter(has).map(move |part| flat.get(part, B))
}

impl Adapter {
    /// Cuts the adapters of a linear out of a flat buffer. The rows of `parts` are adjacent in the
    /// linear's weight. `None` if the linear has no adapter.
    pub(crate) fn cut(
        params: FlatBuffer<'_>,
        shape: &DecoderShape,
        parts: &[&str],
        scratch: Option<AdapterScratch>,
    ) -> Option<Self> {
        let (AdapterShape { rank, scale, targets }, scratch) = shape.adapters().zip(scratch)?;
        let (mut names, mut cut, mut count, mut column) =
            ([""; MOST_PARTS], [None; MOST_PARTS], 0, 0);
        for part in parts {
            let rows = params.local_rows(part);
            if targets.has(part) {
                names[count] = part;
                cut[count] = Some(Part { b: params.get(part, B), first: column });
                count += 1;
            }
            column += rows;
        }
        if count == 0 {
            return None;
        }
        let a = params.joined(&names[..count], A);
        Some(Self { a, parts: cut, rank, scale: scale as f32, scratch })
    }

    /// The parts, each with its number.
    fn parts(&self) -> impl Iterator<Item = (usize, Part)> {
        self.parts.into_iter().flatten().enumerate()
    }

    /// A transient for `rows` rows: (rows, P r).
    fn transient(&self, flat: Tensor, rows: usize) -> Tensor {
        let columns = self.a.shape().0;
        flat.slice(0..rows * columns).reshape(rows, columns)
    }

    /// The columns of part `number` in a transient.
    fn columns(&self, t: Tensor, number: usize) -> Tensor {
        t.columns(number * self.rank..(number + 1) * self.rank)
    }

    /// Computes s x a' (rows, P r) in a transient from x (rows, k).
    #[track_caller]
    fn hidden(&self, dev: &Device, x: Tensor) -> Tensor {
        let hidden = self.transient(self.scratch.hidden, x.shape().0);
        dev.submit(Compute, Op::product(x, self.a.t(), hidden));
        scaled(dev, hidden, self.scale)
    }

    /// Computes y (rows, n) += s (x a') b' from x (rows, k).
    #[track_caller]
    pub(crate) fn forward(&self, dev: &Device, x: Tensor, y: Tensor) {
        let hidden = self.hidden(dev, x);
        for (number, Part { b, first }) in self.parts() {
            let c = y.columns(first..first + b.shape().0);
            dev.submit(Compute, Op::add_product(self.columns(hidden, number), b.t(), c));
        }
    }

    /// Computes d_x (rows, k) += s (d b) a from the gradient d (rows, n) of y. Keeps s d b for
    /// [`weight_gradient`](Self::weight_gradient).
    #[track_caller]
    pub(crate) fn input_gradient(&self, dev: &Device, d: Tensor, d_x: Tensor) {
        let d_hidden = self.transient(self.scratch.d_hidden, d.shape().0);
        for (number, Part { b, first }) in self.parts() {
            let (of_part, c) =
                (d.columns(first..first + b.shape().0), self.columns(d_hidden, number));
            dev.submit(Compute, Op::product(of_part, b, c));
        }
        dev.submit(Compute, Op::add_product(scaled(dev, d_hidden, self.scale), self.a, d_x));
    }

    /// Computes the gradients of a and b from d (rows, n) and x (rows, k). Computes x a' again, since
    /// that is cheaper than its memory.
    #[track_caller]
    pub(crate) fn weight_gradient(&self, dev: &Device, d: Tensor, x: Tensor, grads: Self) {
        let hidden = self.hidden(dev, x);
        for (number, Part { b, first }) in grads.parts() {
            let of_part = d.columns(first..first + b.shape().0);
            dev.submit(Compute, Op::product(of_part.t(), self.columns(hidden, number), b));
        }
        let d_hidden = self.transient(self.scratch.d_hidden, d.shape().0);
        dev.submit(Compute, Op::product(d_hidden.t(), x, grads.a));
    }
}
