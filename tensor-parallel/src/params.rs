//! The layout of a segment's flat buffer: the place of each part of each global tensor.
//!
//! A segment (the embedding, one block, the final norm) is one flat run of parameters; its
//! gradients have the same layout. The order is: matrices, then sharded vectors, then replicated
//! vectors. So the elements with weight decay are a prefix, and the elements that a rank counts are
//! a prefix with at most one hole. Frozen parameters follow after all that are trained. They have no
//! gradient, and the optimizer has no state of them.

use crate::adapter_shape::is_factor;
use crate::experts_shape::EXPERTS;
use crate::trained_params::TrainedParams;
use device::numerics::CountedRange;
use device::{ExpertWeights, Tensor};
use std::ops::Range;

/// The split of a global (rows, columns) tensor over t ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Split {
    /// Every rank holds the whole tensor.
    Replicated,
    /// Rank i holds the i-th run of rows (column-parallel weights and biases, the vocabulary).
    Rows,
    /// As `Rows`, but `ranks` neighbouring ranks hold the same run (keys and values, if there are
    /// more ranks than key and value heads).
    SharedRows {
        /// Number of ranks that hold the same rows.
        ranks: usize,
    },
    /// The rows are three groups (q, k, v); rank i holds the i-th run of each.
    ThreeRows,
    /// Rank i holds the i-th run of columns (row-parallel weights).
    Columns,
}

/// The initial values of a parameter.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Init {
    /// Normally distributed with this standard deviation.
    Normal(f64),
    /// All elements have this value.
    Constant(f64),
    /// Logarithms of numbers that are uniformly distributed from `low` to `high`.
    #[expect(missing_docs, reason = "the line above names both")]
    LogUniform { low: f64, high: f64 },
}

/// One parameter of a segment.
#[derive(Clone, PartialEq, Debug)]
pub struct Param {
    /// Global name, for example `h.3.attn.qkv.weight`.
    pub name: String,
    /// Whether the parameter has one dimension, as biases and gains do. Its `global` and `local`
    /// then have one column. A matrix with one column is not a vector.
    pub is_vector: bool,
    /// (rows, columns) of the whole tensor, without padding.
    pub global: (usize, usize),
    /// (rows, columns) of a rank's part, padding included.
    pub local: (usize, usize),
    /// Split over the ranks.
    pub split: Split,
    /// Initial values.
    pub init: Init,
    /// Elements in the segment's flat buffer of parameters.
    pub range: Range<usize>,
}

/// A run of elements that is contiguous both in a rank's part and in the global tensor.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Run {
    /// Elements in the rank's part of the parameter.
    pub local: Range<usize>,
    /// Index of the first element in the global tensor.
    pub global: usize,
}

impl Param {
    /// The runs of the global tensor that rank `tp` of `t` holds; no run contains padding.
    pub fn runs(&self, tp: usize, t: usize) -> Vec<Run> {
        let ((rows, cols), (local_rows, local_cols)) = (self.global, self.local);
        let block = |local_start: usize, first_row: usize, num_rows: usize| {
            let real = num_rows.min(rows.saturating_sub(first_row));
            let (local, global) = (local_start..local_start + real * cols, first_row * cols);
            Run { local, global }
        };
        let mut runs = match self.split {
            Split::Replicated => vec![block(0, 0, rows)],
            Split::Rows => vec![block(0, tp * local_rows, local_rows)],
            Split::SharedRows { ranks } => vec![block(0, tp / ranks * local_rows, local_rows)],
            Split::ThreeRows => {
                let third = local_rows / 3;
                let group = |g: usize| block(g * third * cols, g * third * t + tp * third, third);
                (0..3).map(group).collect()
            }
            Split::Columns => {
                let row = |r: usize| Run {
                    local: r * local_cols..(r + 1) * local_cols,
                    global: r * cols + tp * local_cols,
                };
                (0..rows).map(row).collect()
            }
        };
        runs.retain(|run| !run.local.is_empty());
        runs
    }

    /// Whether rank `tp` is the first rank that holds its part. This rank counts the part in norms,
    /// and writes it to files.
    pub const fn is_owner(&self, tp: usize) -> bool {
        match self.split {
            Split::Rows | Split::ThreeRows | Split::Columns => true,
            Split::SharedRows { ranks } => tp.is_multiple_of(ranks),
            Split::Replicated => tp == 0,
        }
    }

    /// Whether several of `t` ranks hold the same part.
    pub fn is_held_twice(&self, t: usize) -> bool {
        (1..t).any(|tp| !self.is_owner(tp))
    }

    /// Lengths of the global tensor's dimensions, as in files.
    pub fn dimensions(&self) -> Vec<usize> {
        let (rows, columns) = self.global;
        if self.is_vector { vec![rows] } else { vec![rows, columns] }
    }

    /// Number of elements of the global tensor.
    pub const fn global_len(&self) -> usize {
        self.global.0 * self.global.1
    }
}

/// The layout of one segment, the same on every rank.
#[derive(Clone, PartialEq, Debug)]
pub struct SegmentLayout {
    /// Name of the segment: `embedding`, `block.3`, `final_norm`.
    pub name: String,
    /// Prefix of the parameters' names: `h.3.`.
    prefix: String,
    /// Trained parameters in the order of their ranges, without gaps.
    pub params: Vec<Param>,
    /// Frozen parameters in the order of their ranges, which begin at `padded`, without gaps.
    pub frozen: Vec<Param>,
    /// Number of leading elements with weight decay (trained matrices).
    pub decayed: usize,
    /// Number of leading elements up to the last trained one that is split over the ranks; the
    /// other trained ones are replicated. A replicated matrix may stand before it.
    pub sharded: usize,
    /// Number of trained elements.
    pub len: usize,
    /// Length of the flat buffer of gradients in elements.
    pub padded: usize,
    /// Length of the flat buffer of parameters in elements.
    pub whole: usize,
}

/// The parameters of a segment, in the order of their declaration.
pub(crate) struct ParamDeclarations {
    t: usize,
    prefix: String,
    params: Vec<Param>,
}

impl ParamDeclarations {
    /// Declares a matrix with the split `split` over the ranks.
    pub(crate) fn add(&mut self, name: &str, global: (usize, usize), split: Split, init: Init) {
        let (rows, columns) = global;
        let local = match split {
            Split::Replicated => global,
            Split::Rows | Split::ThreeRows => (rows.div_ceil(self.t), columns),
            Split::SharedRows { ranks } => (rows * ranks / self.t, columns),
            Split::Columns => (rows, columns / self.t),
        };
        self.push(name, global, local, split, init);
    }

    /// Declares a vector of `elements` elements with the split `split` over the ranks.
    pub(crate) fn add_vector(&mut self, name: &str, elements: usize, split: Split, init: Init) {
        self.add(name, (elements, 1), split, init);
        self.params.last_mut().into_iter().for_each(|param| param.is_vector = true);
    }

    /// Declares a vocabulary-parallel table; the part of a rank is padded to `local_rows`.
    pub(crate) fn add_padded(
        &mut self,
        name: &str,
        global: (usize, usize),
        local_rows: usize,
        init: Init,
    ) {
        self.push(name, global, (local_rows, global.1), Split::Rows, init);
    }

    fn push(
        &mut self,
        name: &str,
        global: (usize, usize),
        local: (usize, usize),
        split: Split,
        init: Init,
    ) {
        let (name, range) = (format!("{}{name}", self.prefix), 0..0);
        let param = Param { name, is_vector: false, global, local, split, init, range };
        self.params.push(param);
    }
}

impl SegmentLayout {
    /// Lays out the parameters that `declare` declares, with `prefix` before each name. A rank has
    /// one of `t` parts, and the flat lengths are multiples of `align`.
    pub(crate) fn new(
        name: String,
        prefix: String,
        t: usize,
        trained: &TrainedParams,
        align: usize,
        declare: impl FnOnce(&mut ParamDeclarations),
    ) -> Self {
        let mut declared = ParamDeclarations { t, prefix, params: Vec::new() };
        declare(&mut declared);
        declared.lay_out(name, trained, align)
    }
}

impl ParamDeclarations {
    /// Lays out the declared parameters.
    fn lay_out(self, name: String, trained: &TrainedParams, align: usize) -> SegmentLayout {
        let Self { prefix, mut params, .. } = self;
        // A stable sort keeps the order of declaration within each kind.
        params.sort_by_key(|param| match (param.split, param.is_vector) {
            (Split::Replicated, true) => 3,
            (_, true) => 2,
            // All replicated factors are one run, which the ranks sum at once.
            (Split::Replicated, false) if is_factor(&param.name) => 1,
            (_, false) => 0,
        });
        let (params, frozen) = params.into_iter().partition(|param| trained.contains(&param.name));
        let mut layout = SegmentLayout {
            name,
            prefix,
            params,
            frozen,
            decayed: 0,
            sharded: 0,
            len: 0,
            padded: 0,
            whole: 0,
        };
        for param in &mut layout.params {
            param.range = layout.len..layout.len + param.local.0 * param.local.1;
            layout.len = param.range.end;
            if !param.is_vector {
                assert_eq!(
                    layout.decayed, param.range.start,
                    "{}: matrices come first",
                    param.name
                );
                layout.decayed = param.range.end;
            }
            if param.split != Split::Replicated {
                layout.sharded = param.range.end;
            }
        }
        layout.padded = layout.len.next_multiple_of(align);
        layout.whole = layout.padded;
        for param in &mut layout.frozen {
            param.range = layout.whole..layout.whole + param.local.0 * param.local.1;
            layout.whole = param.range.end;
        }
        layout.whole = layout.whole.next_multiple_of(align);
        layout
    }
}

impl SegmentLayout {
    /// All parameters: first the trained parameters, then the frozen parameters.
    pub fn all_params(&self) -> impl Iterator<Item = &Param> {
        self.params.iter().chain(&self.frozen)
    }

    /// All parameters of the model itself, without adapters.
    pub fn base_params(&self) -> impl Iterator<Item = &Param> {
        self.all_params().filter(|param| !is_factor(&param.name))
    }

    /// The elements of the flat buffer that rank `tp` counts. If several ranks hold an element,
    /// only the first rank counts it.
    pub fn counted(&self, tp: usize) -> CountedRange {
        let mut counted = CountedRange::first(self.len);
        let others: Vec<&Range<usize>> =
            self.params.iter().filter(|p| !p.is_owner(tp)).map(|p| &p.range).collect();
        for run in others.chunk_by(|a, b| a.end == b.start) {
            let (start, end) = (run[0].start, run[run.len() - 1].end);
            if end == self.len {
                counted.end = start;
            } else {
                let one = counted.hole == (0, 0);
                assert!(one, "{}: what other ranks count is one run and the tail", self.name);
                counted.hole = (start, end);
            }
        }
        counted
    }

    /// A flat buffer of parameters with this layout, to cut out parameters by name.
    pub(crate) const fn of(&self, flat: Tensor) -> FlatBuffer<'_> {
        FlatBuffer { layout: self, flat, len: self.whole }
    }

    /// A flat buffer of gradients with this layout. The gradient of a frozen parameter has no
    /// elements, and nothing computes it.
    pub(crate) const fn of_gradients(&self, flat: Tensor) -> FlatBuffer<'_> {
        FlatBuffer { layout: self, flat, len: self.len }
    }

    /// The replicated tail of a flat buffer of gradients. It lacks a replicated matrix before a
    /// sharded parameter.
    pub(crate) fn replicated(&self, flat: Tensor) -> Tensor {
        flat.slice(self.sharded..self.len)
    }
}

/// A flat buffer of parameters or gradients, with its layout.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FlatBuffer<'a> {
    layout: &'a SegmentLayout,
    flat: Tensor,
    /// Number of elements, without padding at the end. The buffer has no parameter after them.
    len: usize,
}

impl FlatBuffer<'_> {
    /// The tensor with the name `part.own`: (local rows, local columns); a vector is one row.
    pub(crate) fn get(self, part: &str, own: &str) -> Tensor {
        self.cut(self.param_of(part, own))
    }

    /// Rows of the weight of `part` that this rank holds.
    pub(crate) fn local_rows(self, part: &str) -> usize {
        self.param_of(part, "weight").local.0
    }

    /// Whether the ranks have the columns of the matrix with the name `part.own`.
    pub(crate) fn is_split_by_columns(self, part: &str, own: &str) -> bool {
        self.param_of(part, own).split == Split::Columns
    }

    /// As [`get`](Self::get), but `None` for the gradient of a frozen parameter.
    pub(crate) fn get_trained(self, part: &str, own: &str) -> Option<Tensor> {
        Some(self.get(part, own)).filter(|tensor| !tensor.is_empty())
    }

    /// The tensors of several parts as one tensor with all their rows. The parts must be adjacent.
    pub(crate) fn joined(self, parts: &[&str], own: &str) -> Tensor {
        let first = self.param_of(parts[0], own);
        let (mut rows, mut range) = (0, first.range.start..first.range.start);
        for part in parts {
            let param = self.param_of(part, own);
            let adjacent = param.range.start == range.end;
            assert!(adjacent, "{}: {parts:?} stand one after the other", self.layout.name);
            (rows, range.end) = (rows + param.local.0, param.range.end);
        }
        self.shaped(range, rows, first)
    }

    /// The parameters whose names after the segment's prefix satisfy `is`, as one row. They must be
    /// adjacent.
    pub(crate) fn run_of(self, whose: &str, is: impl Fn(&str) -> bool) -> Tensor {
        let name = &self.layout.name;
        let mut range: Option<Range<usize>> = None;
        for param in self.layout.all_params() {
            if !param.name.strip_prefix(&self.layout.prefix).is_some_and(&is) {
                continue;
            }
            let start = range.as_ref().map_or(param.range.start, |range| range.start);
            let end = range.map_or(start, |range| range.end);
            assert_eq!(end, param.range.start, "{name}: all of {whose} are adjacent");
            range = Some(start..param.range.end);
        }
        let range = range.unwrap_or_else(|| unreachable!("{name} has no {whose}"));
        self.elements(range)
    }

    /// The parameters of all experts whose names after the expert's number are in `parts`, as one row.
    /// They must be adjacent.
    pub(crate) fn run_of_experts(self, parts: &[&str]) -> Tensor {
        self.run_of(parts[0], |name| {
            let numbered = name.strip_prefix(EXPERTS).and_then(|rest| rest.split_once('.'));
            numbered.is_some_and(|(_, part)| parts.contains(&part))
        })
    }

    /// The matrices of `count` experts, each of this `shape` and made of its `parts`.
    pub(crate) fn of_experts(
        self,
        parts: &[&str],
        shape: (usize, usize),
        count: usize,
    ) -> ExpertWeights {
        ExpertWeights { all: self.run_of_experts(parts), shape, count, stride: shape.0 * shape.1 }
    }

    /// Elements `range` of the buffer as one row: no elements if they are frozen parameters and the
    /// buffer has gradients.
    fn elements(&self, range: Range<usize>) -> Tensor {
        if range.end > self.len { self.flat.slice(0..0) } else { self.flat.slice(range) }
    }

    /// The tensor with the name `name`, without a part.
    pub(crate) fn whole(self, name: &str) -> Tensor {
        self.cut(self.param(name, |of_segment| of_segment == name))
    }

    /// The parameter with the name `part.own`.
    fn param_of(&self, part: &str, own: &str) -> &Param {
        let is_own = |name: &str| Some(name.strip_prefix(part)?.strip_prefix('.')? == own);
        self.param(part, |name| is_own(name) == Some(true))
    }

    /// The parameter whose name after the segment's prefix satisfies `is`. Does not allocate, since
    /// every step calls it.
    fn param(&self, whose: &str, is: impl Fn(&str) -> bool) -> &Param {
        let picked = |param: &&Param| param.name.strip_prefix(&self.layout.prefix).is_some_and(&is);
        self.layout.all_params().find(picked).unwrap_or_else(|| {
            unreachable!("{} declares what it cuts, and has no `{whose}`", self.layout.name)
        })
    }

    fn cut(&self, param: &Param) -> Tensor {
        self.shaped(param.range.clone(), param.local.0, param)
    }

    /// Shapes `range` as `rows` rows with the columns of `like`; a vector is one row.
    fn shaped(&self, range: Range<usize>, rows: usize, like: &Param) -> Tensor {
        let t = self.elements(range);
        if like.is_vector || t.is_empty() { t } else { t.reshape(rows, like.local.1) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adapter_shape::{AdapterShape, AdapterTargets};
    use device::{Arena, Dtype, Plan};

    /// The layout of what `declare` declares, all trained, on one of `t` ranks.
    fn laid_out(t: usize, declare: impl FnOnce(&mut ParamDeclarations)) -> SegmentLayout {
        laid_out_with(t, &TrainedParams::All, declare)
    }

    fn laid_out_with(
        t: usize,
        trained: &TrainedParams,
        declare: impl FnOnce(&mut ParamDeclarations),
    ) -> SegmentLayout {
        let mut declared = ParamDeclarations { t, prefix: "s.".into(), params: Vec::new() };
        declare(&mut declared);
        declared.lay_out("s".into(), trained, 64)
    }

    /// Asserts that all ranks' runs together cover the global tensor exactly once.
    fn covers(param: &Param, t: usize) {
        let mut seen = vec![0; param.global_len()];
        for tp in 0..t {
            for run in param.runs(tp, t) {
                for i in 0..run.local.len() {
                    seen[run.global + i] += 1;
                }
            }
        }
        let expected = if param.split == Split::Replicated { t } else { 1 };
        assert!(seen.iter().all(|&n| n == expected), "{param:?}");
    }

    #[test]
    fn the_parts_of_all_ranks_are_the_whole() {
        for t in [1, 2, 4] {
            let segment = laid_out(t, |p| {
                p.add_vector("norm.gain", 8, Split::Replicated, Init::Constant(1.0));
                p.add_vector("qkv.bias", 3 * 16, Split::ThreeRows, Init::Constant(0.0));
                p.add("qkv.weight", (3 * 16, 8), Split::ThreeRows, Init::Normal(0.02));
                p.add("proj", (8, 16), Split::Columns, Init::Normal(0.02));
                p.add("narrow", (8, t), Split::Columns, Init::Normal(0.02));
                p.add_padded("wte", (61, 8), 61usize.div_ceil(8 * t) * 8, Init::Normal(0.02));
            });
            let names: Vec<&str> = segment.params.iter().map(|p| p.name.as_str()).collect();
            assert_eq!(
                names,
                ["s.qkv.weight", "s.proj", "s.narrow", "s.wte", "s.qkv.bias", "s.norm.gain"]
            );
            let flat = Plan::default().tensor(
                (Arena::Device, "test"),
                "flat",
                Dtype::F32,
                (1, segment.padded),
            );
            assert_eq!(segment.of(flat).get("qkv", "weight").shape(), (3 * 16 / t, 8));
            assert_eq!(segment.of(flat).get("qkv", "bias").shape(), (1, 3 * 16 / t));
            // A matrix with one column still has weight decay and two dimensions.
            assert_eq!(segment.of(flat).whole("narrow").shape(), (8, 1));
            assert_eq!(segment.params[2].dimensions(), [8, t]);
            assert_eq!(segment.params[4].dimensions(), [3 * 16]);
            assert_eq!(segment.decayed, segment.params[3].range.end);
            assert_eq!(
                segment.of(flat).whole("proj").range(),
                flat.slice(segment.params[1].range.clone()).range()
            );
            segment.params.iter().for_each(|p| covers(p, t));
            assert!(segment.decayed < segment.sharded && segment.sharded < segment.len);
            assert!(segment.padded.is_multiple_of(64));
        }
    }

    /// Four ranks share two heads of keys and values. The weights that a later rank does not count
    /// are one run, and the vectors that it does not count are the tail.
    #[test]
    fn a_replicated_matrix_decays_and_only_the_first_rank_counts_it() {
        let (t, shared) = (4, Split::SharedRows { ranks: 2 });
        let segment = laid_out(t, |p| {
            p.add_vector("norm.gain", 8, Split::Replicated, Init::Constant(1.0));
            p.add("up", (16, 8), Split::Rows, Init::Normal(0.02));
            p.add("q", (16, 8), Split::Rows, Init::Normal(0.02));
            p.add("k", (8, 8), shared, Init::Normal(0.02));
            p.add("v", (8, 8), shared, Init::Normal(0.02));
            p.add("router", (3, 8), Split::Replicated, Init::Normal(0.02));
            p.add("proj", (8, 16), Split::Columns, Init::Normal(0.02));
            p.add_vector("k_norm", 8, shared, Init::Constant(1.0));
        });
        let names: Vec<&str> = segment.params.iter().map(|p| p.name.as_str()).collect();
        let expected = ["up", "q", "k", "v", "router", "proj", "k_norm", "norm.gain"];
        assert_eq!(names, expected.map(|name| format!("s.{name}")));
        let range = |name: &str| {
            let found = segment.params.iter().find(|p| p.name == format!("s.{name}"));
            found.unwrap_or_else(|| panic!("{name}")).range.clone()
        };
        assert_eq!(segment.decayed, range("proj").end);
        assert_eq!(segment.sharded, range("k_norm").end);
        let counted = [0, 1, 2, 3].map(|tp| segment.counted(tp));
        let [router, kv] = [range("router"), range("k").start..range("router").end];
        let hole = |hole: Range<usize>| (hole.start, hole.end);
        assert_eq!((counted[0].end, counted[0].hole), (segment.len, (0, 0)));
        // The second and the fourth rank hold the keys and values of the rank before.
        assert_eq!((counted[1].end, counted[1].hole), (range("k_norm").start, hole(kv.clone())));
        assert_eq!((counted[2].end, counted[2].hole), (range("norm.gain").start, hole(router)));
        assert_eq!((counted[3].end, counted[3].hole), (counted[1].end, hole(kv)));
    }

    /// A linear with its adapter, and another linear.
    #[test]
    fn frozen_parameters_follow_the_trained_ones_and_their_gradients_have_no_elements() {
        let targets = AdapterTargets::ALL;
        let trained =
            TrainedParams::Adapters(AdapterShape { rank: 4, scale: 1.0, targets, dropout: 0.0 });
        let segment = laid_out_with(1, &trained, |p| {
            p.add_vector("norm.weight", 8, Split::Replicated, Init::Constant(1.0));
            p.add("up.weight", (16, 8), Split::Rows, Init::Normal(0.02));
            p.add("up.lora_a", (4, 8), Split::Replicated, Init::Normal(0.02));
            p.add("up.lora_b", (16, 4), Split::Rows, Init::Constant(0.0));
            p.add("proj.weight", (8, 16), Split::Columns, Init::Normal(0.02));
        });
        let names = |params: &[Param]| params.iter().map(|p| p.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(&segment.params), ["s.up.lora_b", "s.up.lora_a"]);
        assert_eq!(names(&segment.frozen), ["s.up.weight", "s.proj.weight", "s.norm.weight"]);
        let SegmentLayout { decayed, sharded, len, padded, whole, .. } = segment;
        assert_eq!([decayed, sharded, len, padded, whole], [96, 64, 96, 128, 448]);
        assert_eq!(segment.counted(0), CountedRange::first(96));
        assert_eq!(segment.counted(1).end, 64);
        let (mut plan, at) = (Plan::default(), (Arena::Device, "test"));
        let flat = plan.tensor(at, "flat", Dtype::F32, (1, whole));
        let bucket = plan.tensor(at, "bucket", Dtype::F32, (1, padded));
        assert_eq!(segment.of(flat).get("up", "weight").range(), flat.slice(128..256).range());
        let grads = segment.of_gradients(bucket);
        assert!(grads.get("up", "weight").is_empty());
        assert!(grads.get_trained("norm", "weight").is_none());
        assert_eq!(grads.get("up", "lora_a").range(), bucket.slice(64..96).range());
        assert_eq!(grads.get_trained("up", "lora_b").map(Tensor::len), Some(64));
    }
}
