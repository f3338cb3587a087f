//! Low-rank adapters of linears (LoRA, arXiv 2106.09685, section 4.1): y = x w' + s (x a') b'. The
//! weight w is frozen; a (r, k) and b (n, r) are trained, and s is a number.
//!
//! Weights with one input, such as q, k and v, have an adapter for each weight. Weights that are one
//! tensor in a Qwen3.5, such as queries and the gate of attention's output, have one a. The a's are
//! adjacent, so that one matmul computes all x a'. The factor on the side where w is
//! cut over the ranks is cut with it: b of a column-parallel linear, a of a row-parallel one. The
//! other factor is replicated, and each rank computes a part of its gradient, which
//! [`Block::backward`](crate::block::Block::backward) sums over the ranks.
//!
//! In training, dropout of x may stand before a, as in PEFT. Weights with one input have one mask. The
//! backward pass drops x again, since that is cheaper than its memory.

use crate::adapter_shape::{AdapterShape, FACTORS};
use crate::params::{FlatBuffer, Init, ParamDeclarations, Split};
use crate::shape::{DecoderShape, MicrobatchContext};
use crate::trained_params::TrainedParams;
use device::{Arena, ColumnShard, Device, Dropout, Lane::Compute, Op, Plan, Tensor};

/// Last parts of the factors' names.
const A: &str = FACTORS[0];
const B: &str = FACTORS[1];

/// Most factors a with one input: of q, k and v.
const MOST_FACTORS: usize = 3;
/// The same in a model with gated delta nets: of their q, k and v, output gate, step sizes and decays.
const MOST_FACTORS_OF_DELTA_NETS: usize = 4;
/// Most matmuls with one input: those of a gated delta net.
const MOST_OUTPUTS: usize = 3;
/// Most factors b with one input: of q, k, v and the gate of attention's output.
const MOST_PARTS: usize = 4;
/// Most weights with adjacent rows that have one a: q, k and v of a gated delta net.
const MOST_JOINED: usize = 3;

/// Outputs of the matmuls with one input, or their gradients: (rows, n) each.
pub(crate) type Outputs = [Option<Tensor>; MOST_OUTPUTS];

/// A weight that may have an adapter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AdaptedWeight {
    /// Its name.
    name: &'static str,
    /// The name in front of its factor a, which is that of several weights with one a.
    factor: &'static str,
    /// Number of its matmul's output among the [`Outputs`].
    output: usize,
}

impl AdaptedWeight {
    /// A weight with its own a, of the first of the outputs.
    pub(crate) const fn alone(name: &'static str) -> Self {
        Self { name, factor: name, output: 0 }
    }

    /// The same with the a of the weight `factor`.
    pub(crate) const fn with_factor(self, factor: &'static str) -> Self {
        Self { factor, ..self }
    }

    /// The same with another output.
    pub(crate) const fn with_output(self, output: usize) -> Self {
        Self { output, ..self }
    }
}

/// Transients of adapters; all linears share them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AdapterScratch {
    hidden: Tensor,   // (1, F B T r) of at most F factors: s x a'
    d_hidden: Tensor, // (1, F B T r): its gradient, times s
    /// (1, B T k) of the widest input, if inputs are dropped: x after dropout, or its gradient.
    dropped: Option<Tensor>,
}

/// The adapters of weights with one input, or their gradients.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Adapter {
    a: Tensor, // (F r, k) of F factors
    parts: [Option<Part>; MOST_PARTS],
    rank: usize,
    scale: f32,
    scratch: AdapterScratch,
    dropout: Dropout,
    /// Number of ranks that have the columns of the input; 1: each rank has all.
    ranks: usize,
}

/// The second factor of the adapter of weights with adjacent rows and one a.
#[derive(Clone, Copy, Debug)]
struct Part {
    b: Tensor, // (n, r)
    /// Number of its factor a.
    number: usize,
    /// Number of the output.
    output: usize,
    /// First of the n columns in the output.
    first: usize,
}

impl Part {
    /// The columns of the output, or of its gradient.
    fn of(self, outputs: Outputs) -> Tensor {
        let whole = outputs[self.output]
            .unwrap_or_else(|| unreachable!("a weight with an adapter has an output"));
        whole.columns(self.first..self.first + self.b.shape().0)
    }
}

impl AdapterScratch {
    /// Plans the transients, if the model has adapters.
    pub(crate) fn plan(plan: &mut Plan, shape: &DecoderShape) -> Option<Self> {
        let adapters = shape.adapters()?;
        let targets = adapters.targets;
        let delta = shape.delta.map_or(0, |delta| delta.values_width());
        let widths = [
            (true, shape.hidden),
            (targets.output, shape.heads_width()),
            (targets.down, shape.ffn_hidden / shape.tp_size),
            (targets.delta_output, delta / shape.tp_size),
        ];
        let widest = widths.into_iter().filter(|(adapted, _)| *adapted).map(|(_, width)| width);
        let widest = widest.fold(0, usize::max);
        let dropped = (adapters.dropout > 0.0).then(|| {
            let (at, size) = ((Arena::Device, "transients"), (1, shape.tokens() * widest));
            plan.tensor(at, "adapter_input", shape.dtype, size)
        });
        let mut one = |name: &str| {
            let factors = match shape.delta {
                Some(_) => MOST_FACTORS_OF_DELTA_NETS,
                None => MOST_FACTORS,
            };
            let size = (1, factors * shape.tokens() * adapters.rank);
            plan.tensor((Arena::Device, "transients"), name, shape.dtype, size)
        };
        Some(Self { hidden: one("adapter"), d_hidden: one("d_adapter"), dropped })
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

impl MicrobatchContext {
    /// Dropout of the inputs of adapters, whose rows are all tokens of the micro-batch.
    pub(crate) fn adapter_dropout(&self, shape: &DecoderShape, layer: u64, site: u64) -> Dropout {
        let p = shape.adapters().map_or(0.0, |adapters| adapters.dropout);
        Dropout {
            p: if self.training { p } else { 0.0 },
            ..self.dropout(shape, layer, site, self.first_token)
        }
    }
}

/// Declares the adapters of weights with one input of `k` columns. Each weight has its rows and its
/// split over the ranks, by which its adapter is split too.
pub(crate) fn declare(
    params: &mut ParamDeclarations,
    shape: &DecoderShape,
    weights: &[(AdaptedWeight, usize, Split)],
    k: usize,
) {
    let Some(AdapterShape { rank, targets, .. }) = shape.adapters() else { return };
    let adapted = || weights.iter().filter(|(weight, ..)| targets.has(weight.name));
    for (AdaptedWeight { name, factor, .. }, _, split) in adapted() {
        let split = if *split == Split::Columns { Split::Columns } else { Split::Replicated };
        if name == factor {
            params.add(&format!("{factor}.{A}"), (rank, k), split, initial_factor(k));
        }
    }
    for (AdaptedWeight { name, .. }, rows, split) in adapted() {
        let split = if *split == Split::Columns { Split::Replicated } else { *split };
        params.add(&format!("{name}.{B}"), (*rows, rank), split, Init::Constant(0.0));
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
    /// Cuts the adapters of `weights`, which have one input, out of a flat buffer. The rows of those
    /// with one output are adjacent. `None` if none has an adapter.
    pub(crate) fn cut(
        params: FlatBuffer<'_>,
        shape: &DecoderShape,
        weights: &[AdaptedWeight],
        scratch: Option<AdapterScratch>,
    ) -> Option<Self> {
        let (AdapterShape { rank, scale, targets, .. }, scratch) = shape.adapters().zip(scratch)?;
        let (mut factors, mut cut) = ([""; MOST_FACTORS_OF_DELTA_NETS], [None; MOST_PARTS]);
        let (mut count, mut parts, mut columns) = (0, 0, [0; MOST_OUTPUTS]);
        for joined in
            weights.chunk_by(|one, next| (one.factor, one.output) == (next.factor, next.output))
        {
            let AdaptedWeight { name, factor, output } = joined[0];
            let first = columns[output];
            columns[output] +=
                joined.iter().map(|weight| params.local_rows(weight.name)).sum::<usize>();
            if !targets.has(name) {
                continue;
            }
            let number = factors[..count].iter().position(|known| *known == factor);
            let number = number.unwrap_or(count);
            factors[number] = factor;
            count = count.max(number + 1);
            let mut names = [""; MOST_JOINED];
            names.iter_mut().zip(joined).for_each(|(to, weight)| *to = weight.name);
            let b = params.joined(&names[..joined.len()], B);
            cut[parts] = Some(Part { b, number, output, first });
            parts += 1;
        }
        if count == 0 {
            return None;
        }
        let a = params.joined(&factors[..count], A);
        let ranks = if params.is_split_by_columns(factors[0], A) { shape.tp_size } else { 1 };
        let (scale, dropout) = (scale as f32, Dropout::NONE);
        Some(Self { a, parts: cut, rank, scale, scratch, dropout, ranks })
    }

    /// The adapters in a pass that drops their inputs.
    pub(crate) fn with_dropout(self, dropout: Dropout) -> Self {
        Self { dropout, ..self }
    }

    /// The columns of this rank, which are those of an input of `k` columns.
    fn columns_of_rank(&self, dev: &Device, k: usize) -> ColumnShard {
        match self.ranks {
            1 => ColumnShard { first: 0, all: k },
            ranks => ColumnShard { first: dev.rank().tp * k, all: ranks * k },
        }
    }

    /// A transient with the shape of the input x, if the pass drops inputs.
    fn dropped(&self, x: Tensor) -> Option<Tensor> {
        let whole = self.scratch.dropped.filter(|_| self.dropout.p > 0.0)?;
        let (rows, k) = x.shape();
        Some(whole.slice(0..rows * k).reshape(rows, k))
    }

    /// Computes the input of the factors a from x (rows, k): x itself, or x after dropout.
    #[track_caller]
    fn input(&self, dev: &Device, x: Tensor) -> Tensor {
        let Some(y) = self.dropped(x) else { return x };
        let columns = self.columns_of_rank(dev, x.shape().1);
        dev.submit(Compute, Op::ColumnDropout { x, y, add: false, dropout: self.dropout, columns });
        y
    }

    /// The parts. Their numbers begin at 0, and each new number is the next one.
    fn parts(&self) -> impl Iterator<Item = Part> {
        self.parts.into_iter().flatten()
    }

    /// A transient for `rows` rows: (rows, F r).
    fn transient(&self, flat: Tensor, rows: usize) -> Tensor {
        let columns = self.a.shape().0;
        flat.slice(0..rows * columns).reshape(rows, columns)
    }

    /// The columns of factor `number` in a transient.
    fn columns(&self, t: Tensor, number: usize) -> Tensor {
        t.columns(number * self.rank..(number + 1) * self.rank)
    }

    /// Computes s x a' (rows, F r) in a transient from x (rows, k).
    #[track_caller]
    fn hidden(&self, dev: &Device, x: Tensor) -> Tensor {
        let hidden = self.transient(self.scratch.hidden, x.shape().0);
        dev.submit(Compute, Op::product(x, self.a.t(), hidden));
        scaled(dev, hidden, self.scale)
    }

    /// Computes y += s (x a') b' for the outputs y (rows, n) of x (rows, k).
    #[track_caller]
    pub(crate) fn forward(&self, dev: &Device, x: Tensor, outputs: Outputs) {
        let hidden = self.hidden(dev, self.input(dev, x));
        for part in self.parts() {
            let of_factor = self.columns(hidden, part.number);
            dev.submit(Compute, Op::add_product(of_factor, part.b.t(), part.of(outputs)));
        }
    }

    /// Computes d_x (rows, k) += the sum of s (d b) a over the gradients d (rows, n) of outputs. Keeps
    /// s d b for [`weight_gradient`](Self::weight_gradient).
    #[track_caller]
    pub(crate) fn input_gradient(&self, dev: &Device, d: Outputs, d_x: Tensor) {
        let d_hidden = self.transient(self.scratch.d_hidden, d_x.shape().0);
        let mut written = 0;
        for part in self.parts() {
            let Part { b, number, .. } = part;
            let (of_part, c) = (part.of(d), self.columns(d_hidden, number));
            let is_new = number == written;
            let op =
                if is_new { Op::product(of_part, b, c) } else { Op::add_product(of_part, b, c) };
            written += usize::from(is_new);
            dev.submit(Compute, op);
        }
        let d_hidden = scaled(dev, d_hidden, self.scale);
        let Some(d_dropped) = self.dropped(d_x) else {
            return dev.submit(Compute, Op::add_product(d_hidden, self.a, d_x));
        };
        dev.submit(Compute, Op::product(d_hidden, self.a, d_dropped));
        let (add, columns) = (true, self.columns_of_rank(dev, d_x.shape().1));
        let (x, y, dropout) = (d_dropped, d_x, self.dropout);
        dev.submit(Compute, Op::ColumnDropout { x, y, add, dropout, columns });
    }

    /// Computes the gradients of a and b from the gradients d (rows, n) of outputs, and x (rows, k).
    /// Computes x a' again, since that is cheaper than its memory.
    #[track_caller]
    pub(crate) fn weight_gradient(&self, dev: &Device, d: Outputs, x: Tensor, grads: Self) {
        let x = self.input(dev, x);
        let hidden = self.hidden(dev, x);
        for part in grads.parts() {
            let of_factor = self.columns(hidden, part.number);
            dev.submit(Compute, Op::product(part.of(d).t(), of_factor, part.b));
        }
        let d_hidden = self.transient(self.scratch.d_hidden, x.shape().0);
        dev.submit(Compute, Op::product(d_hidden.t(), x, grads.a));
    }
}
