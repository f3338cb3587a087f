//! What a segment's flat buffer holds: which part of which global tensor lies where.
//!
//! A segment (the embedding, one block, the final norm) is one flat run of parameters, and its gradients
//! another of the same layout. Order: sharded matrices, then other sharded parameters, then replicated ones;
//! so "decayed" and "counted once" are prefixes.

use device::Tensor;
use std::ops::Range;

/// How a global (rows, columns) tensor is cut over t ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Split {
    /// Every rank holds all of it.
    Replicated,
    /// Rank i holds the i-th run of rows (column-parallel weights and biases, the vocabulary).
    Rows,
    /// The rows are three groups (q, k, v); rank i holds the i-th run of each.
    ThreeRows,
    /// Rank i holds the i-th run of columns (row-parallel weights).
    Columns,
}

/// How a parameter starts.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Init {
    /// Normal with this standard deviation.
    Normal(f64),
    /// All the same.
    Constant(f64),
}

/// One parameter of a segment.
#[derive(Clone, PartialEq, Debug)]
pub struct Param {
    /// Global name: `h.3.attn.qkv.weight`.
    pub name: String,
    /// Of the whole tensor, without padding.
    pub global: (usize, usize),
    /// Of a rank's part, padding included.
    pub local: (usize, usize),
    /// How it is cut.
    pub split: Split,
    /// How it starts.
    pub init: Init,
    /// Elements of the segment's flat buffer.
    pub range: Range<usize>,
}

/// A run of elements that is contiguous both in a rank's part and in the global tensor.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Run {
    /// Elements of the rank's part of the parameter.
    pub local: Range<usize>,
    /// Index of the first in the global tensor.
    pub global: usize,
}

impl Param {
    /// The parts of the global tensor that rank `tp` of `t` holds; padding is in none.
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

    /// Elements of the global tensor.
    pub const fn global_len(&self) -> usize {
        self.global.0 * self.global.1
    }
}

/// The layout of one segment, the same on every rank.
#[derive(Clone, PartialEq, Debug)]
pub struct SegmentLayout {
    /// `embedding`, `block.3`, `final_norm`.
    pub name: String,
    /// In order of their ranges, without gaps.
    pub params: Vec<Param>,
    /// Leading elements that take weight decay (matrices).
    pub decayed: usize,
    /// Leading elements that are cut over the ranks; the rest is replicated.
    pub sharded: usize,
    /// Elements with parameters.
    pub len: usize,
    /// Length of the flat buffer.
    pub padded: usize,
}

impl SegmentLayout {
    pub(crate) fn new(name: String, align: usize) -> Self {
        let params = Vec::new();
        Self { name, params, decayed: 0, sharded: 0, len: 0, padded: 0 }.close(align)
    }

    /// Adds a parameter, cut over `t` ranks, behind the others.
    pub(crate) fn add(
        mut self,
        name: &str,
        global: (usize, usize),
        (split, t): (Split, usize),
        init: Init,
    ) -> Self {
        let local = match split {
            Split::Replicated => global,
            Split::Rows | Split::ThreeRows => (global.0.div_ceil(t), global.1),
            Split::Columns => (global.0, global.1 / t),
        };
        self.push(name, global, local, split, init);
        self
    }

    /// Adds a vocabulary-parallel table whose parts are padded to `local_rows`.
    pub(crate) fn add_padded(
        mut self,
        name: &str,
        global: (usize, usize),
        local_rows: usize,
        init: Init,
    ) -> Self {
        self.push(name, global, (local_rows, global.1), Split::Rows, init);
        self
    }

    fn push(
        &mut self,
        name: &str,
        global: (usize, usize),
        local: (usize, usize),
        split: Split,
        init: Init,
    ) {
        let range = self.len..self.len + local.0 * local.1;
        self.len = range.end;
        if global.1 > 1 {
            self.decayed = range.end;
        }
        if split != Split::Replicated {
            self.sharded = range.end;
        }
        let name = name.to_owned();
        self.params.push(Param { name, global, local, split, init, range });
    }

    /// Rounds the flat length up to a multiple of `align`.
    pub(crate) fn close(mut self, align: usize) -> Self {
        self.padded = self.len.next_multiple_of(align);
        self
    }

    /// Parameter `index` inside a flat buffer of this layout: (local rows, local columns), or one row.
    pub(crate) fn cut(&self, flat: Tensor, index: usize) -> Tensor {
        let param = &self.params[index];
        let t = flat.slice(param.range.clone());
        if param.local.1 > 1 { t.reshape(param.local.0, param.local.1) } else { t }
    }

    /// The replicated tail of a flat buffer.
    pub(crate) fn replicated(&self, flat: Tensor) -> Tensor {
        flat.slice(self.sharded..self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every rank's runs together cover the global tensor exactly once.
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
            let segment = SegmentLayout::new("s".into(), 64)
                .add_padded("wte", (61, 8), 61usize.div_ceil(8 * t) * 8, Init::Normal(0.02))
                .add("qkv", (3 * 16, 8), (Split::ThreeRows, t), Init::Normal(0.02))
                .add("proj", (8, 16), (Split::Columns, t), Init::Normal(0.02))
                .add("bias", (16, 1), (Split::Rows, t), Init::Constant(0.0))
                .add("gain", (8, 1), (Split::Replicated, t), Init::Constant(1.0))
                .close(64);
            segment.params.iter().for_each(|p| covers(p, t));
            assert!(segment.decayed < segment.sharded && segment.sharded < segment.len);
            assert!(segment.padded.is_multiple_of(64));
        }
    }
}
