//! Checks an op independently of other ops: its lane, shapes and types.

use crate::op::{Family, MAXIMA, Product};
use crate::{
    Arena, ColumnShard, Dtype, Epilogue, Gate, HeadNorm, Heads, Lane, Op, Scores, Tensor, WidthNorm,
};

impl Op {
    /// The lanes that accept this op.
    fn lanes(&self) -> &'static [Lane] {
        use Lane::{ActivationsDown, ActivationsUp, Compute, D2h, DpComm, H2d, Host, TpComm};
        match self {
            Self::Copy { src, dst } => match (src.arena(), dst.arena()) {
                (Arena::Pinned, Arena::Device) => &[H2d, ActivationsUp],
                (Arena::Device, Arena::Pinned) => &[D2h, ActivationsDown],
                (Arena::Device, Arena::Device) => &[Compute, TpComm, DpComm],
                (Arena::Pinned, Arena::Pinned) => &[Host],
            },
            Self::Host { .. } => &[Host],
            Self::AllReduce { x, .. } if x.arena() == Arena::Pinned => &[Host],
            Self::AllReduce { .. }
            | Self::ReduceScatter { .. }
            | Self::AllGather { .. }
            | Self::Broadcast { .. } => &[Compute, TpComm, DpComm],
            // Small kernels after a reduction may stay on its lane.
            Self::Add { .. } | Self::Cast { .. } | Self::ChunkSquares { .. } => &[Compute, DpComm],
            _ => &[Compute],
        }
    }

    /// Checks the op's shapes, types and lane.
    pub(crate) fn check(&self, lane: Lane) -> Result<(), String> {
        if !self.lanes().contains(&lane) {
            return Err(format!("{} belongs on {:?}, not on {lane:?}", self.name(), self.lanes()));
        }
        if let Self::Gemm { .. } | Self::ScaledGemm { .. } = self {
            let product = Product::of(self).ok_or("no product")?;
            return product.check().and_then(|()| {
                let separate_op = product.epilogue.separate_op(product.a, product.c);
                separate_op.map_or(Ok(()), |op| op.check(lane))
            });
        }
        let (mut transposed, mut window) = (false, false);
        self.accesses(&mut |_, t| {
            transposed |= t.is_transposed();
            window |= t.is_window();
        });
        if transposed {
            Err("only a GEMM reads a transposed view".into())
        } else if window {
            Err("only a GEMM reads or writes a window of columns".into())
        } else {
            self.check_shapes()
        }
    }

    fn check_shapes(&self) -> Result<(), String> {
        match *self {
            Self::Maxima { maxima, .. } => one_of(maxima, Dtype::F32, MAXIMA),
            Self::Quantize { x, maxima, y, transposed, scale } => {
                let (m, n) = x.shape();
                let format = y.or(transposed).map(Tensor::dtype);
                let is = |t: Tensor, shape| {
                    let fits = t.shape() == shape && Some(t.dtype()) == format;
                    if fits && t.dtype().is_fp8() {
                        Ok(())
                    } else {
                        Err(format!("{:?} of {:?} where {shape:?} belongs", t.dtype(), t.shape()))
                    }
                };
                let sixteens = [m, n].iter().all(|size| size.is_multiple_of(16));
                if !sixteens || format.is_none() || !x.range().start.is_multiple_of(16) {
                    return Err(format!("({m}, {n}) is not in multiples of 16, or goes nowhere"));
                }
                all_of(&[
                    one_of(maxima, Dtype::F32, MAXIMA),
                    one_of(scale, Dtype::F32, 1),
                    y.map_or(Ok(()), |y| is(y, (m, n))),
                    transposed.map_or(Ok(()), |transposed| is(transposed, (n, m))),
                ])
            }
            Self::Embedding { tokens, table, y, .. } => {
                all_of(&[same(y.shape().0, tokens.len()), same(y.shape().1, table.shape().1)])
            }
            Self::EmbeddingBackward { tokens, order, d_y, d_table, .. } => all_of(&[
                same(tokens.len(), order.len()),
                same(d_y.shape().0, tokens.len()),
                same(d_y.shape().1, d_table.shape().1),
            ]),
            Self::AddPositions { x, table, starts, .. } => {
                all_of(&[same(x.shape().1, table.shape().1), check_starts(starts, x)])
            }
            Self::PositionsBackward { d_y, starts, d_table, .. } => {
                all_of(&[same(d_y.shape().1, d_table.shape().1), check_starts(starts, d_y)])
            }
            Self::LayerNorm { x, gain, bias, y, stats, .. } => all_of(&[
                same(x.len(), y.len()),
                same(gain.len(), x.shape().1),
                same(bias.len(), x.shape().1),
                same(stats.len(), 2 * x.shape().0),
            ]),
            Self::LayerNormBackward { x, gain, stats, d_y, d_x, d_gain, d_bias, .. } => all_of(&[
                same(x.len(), d_y.len()),
                same(x.len(), d_x.len()),
                same(gain.len(), x.shape().1),
                same(d_gain.len(), gain.len()),
                same(d_bias.len(), gain.len()),
                same(stats.len(), 2 * x.shape().0),
            ]),
            Self::RmsNorm { x, gain, y, stats, .. } => all_of(&[
                same(x.len(), y.len()),
                same(gain.len(), x.shape().1),
                same(stats.len(), x.shape().0),
            ]),
            Self::RmsNormBackward { x, gain, stats, d_y, d_x, d_gain, .. } => all_of(&[
                same(x.len(), d_y.len()),
                same(x.len(), d_x.len()),
                same(gain.len(), x.shape().1),
                same(d_gain.len(), gain.len()),
                same(stats.len(), x.shape().0),
            ]),
            Self::Rotary { qkv, table, heads, starts, norm } => {
                all_of(&[check_rotary(qkv, table, heads, norm), check_starts(starts, qkv)])
            }
            Self::RotaryBackward { d_qkv, table, heads, starts, norm } => all_of(&[
                check_starts(starts, d_qkv),
                check_rotary(d_qkv, table, heads, norm.map(|(norm, _)| norm)),
                norm.map_or(Ok(()), |(norm, grads)| {
                    all_of(&[
                        same(grads.q_gain.len(), norm.q_gain.len()),
                        same(grads.k_gain.len(), norm.k_gain.len()),
                    ])
                }),
            ]),
            Self::WidthNormSums { qkv, raw, heads, sums } => check_width(qkv, raw, heads, sums),
            Self::WidthNorm { qkv, raw, norm } => check_width_norm(qkv, raw, norm, norm.sums),
            Self::WidthNormBackwardSums { d_qkv, raw, norm, dots } => {
                check_width_norm(d_qkv, raw, norm, dots)
            }
            Self::WidthNormBackward { d_qkv, raw, norm, dots, d_gain } => all_of(&[
                check_width_norm(d_qkv, raw, norm, dots),
                same(d_gain.len(), norm.gain.len()),
            ]),
            Self::SwiGlu { gate: Gate::ClampedSilu { slope, limit }, .. }
            | Self::SwiGluBackward { gate: Gate::ClampedSilu { slope, limit }, .. }
                if !(slope.is_finite() && slope > 0.0 && limit.is_finite() && limit > 0.0) =>
            {
                Err(format!("a gate with the slope {slope} and the limit {limit}"))
            }
            Self::SwiGlu { x, y: d, .. } | Self::SwiGluBackward { x, d, .. } => {
                all_of(&[same(x.shape().0, d.shape().0), same(x.shape().1, 2 * d.shape().1)])
            }
            Self::ColumnSum { x, y } => same(x.shape().1, y.len()),
            Self::Attention { qkv, out, lse, heads, starts, scores, .. } => all_of(&[
                check_attention(qkv, out, lse, heads),
                check_starts(starts, qkv),
                check_scores(scores),
            ]),
            Self::CachedAttention { scores: Scores { window: Some(window), .. }, .. } => {
                Err(format!("a window of {window} keys; `cache` is the rows of the window alone"))
            }
            Self::CachedAttention { q, cache, out, heads, scores, sinks } => all_of(&[
                check_cached(q, cache, out, heads),
                check_scores(scores),
                sinks.map_or(Ok(()), |sinks| same(sinks.len(), heads.count)),
            ]),
            Self::AttentionSinks { out, lse, sinks, heads } => check_sinks(out, lse, sinks, heads),
            Self::AttentionSinksBackward { out, lse, d_out, sinks, d_sinks, heads } => all_of(&[
                check_sinks(out, lse, sinks, heads),
                same(out.len(), d_out.len()),
                same(sinks.len(), d_sinks.len()),
            ]),
            Self::AttentionBackward {
                qkv, out, lse, d_out, d_qkv, heads, starts, scores, ..
            } => all_of(&[
                check_starts(starts, qkv),
                check_attention(qkv, out, lse, heads),
                check_scores(scores),
                same(out.len(), d_out.len()),
                same(qkv.len(), d_qkv.len()),
            ]),
            Self::BiasDropoutAdd { x, bias, residual, y, .. } => all_of(&[
                same(x.len(), residual.len()),
                same(x.len(), y.len()),
                bias.map_or(Ok(()), |bias| same(bias.len(), x.shape().1)),
            ]),
            Self::ColumnDropout { x, y, columns: ColumnShard { first, all }, .. } => {
                all_of(&[same(x.len(), y.len()), at_most(first + x.shape().1, all)])
            }
            Self::Gelu { x, y } | Self::Dropout { x, y, .. } | Self::Cast { x, y } => {
                same(x.len(), y.len())
            }
            Self::GeluBackward { x, d: y } | Self::Add { x, into: y } => same(x.len(), y.len()),
            Self::CapLogits { scale, cap, .. } => {
                all_of(&[positive("scale", scale), positive("cap", cap.unwrap_or(1.0))])
            }
            Self::RowMax { x, y, shard } => {
                all_of(&[same(x.shape().0, y.len()), at_most(shard.valid, x.shape().1)])
            }
            Self::CrossEntropyStats { logits, max, targets, shard, sums } => all_of(&[
                same(max.len(), logits.shape().0),
                same(targets.len(), logits.shape().0),
                same(sums.len(), 2 * logits.shape().0),
                at_most(shard.valid, logits.shape().1),
            ]),
            Self::CrossEntropyLoss { sums, targets, loss } => {
                all_of(&[same(sums.len(), 2 * targets.len()), same(loss.len(), 1)])
            }
            Self::CrossEntropyBackward {
                logits, max, sums, targets, scale, shard, cap, ..
            } => all_of(&[
                positive("cap", cap.unwrap_or(1.0)),
                same(max.len(), logits.shape().0),
                same(sums.len(), 2 * max.len()),
                same(targets.len(), max.len()),
                same(scale.len(), 1),
                at_most(shard.valid, logits.shape().1),
            ]),
            Self::ChunkSquares { x, partials, chunk, .. } => {
                same(partials.len(), x.len().div_ceil(chunk.max(1)))
            }
            Self::Task { ref task } => task.check(),
            Self::LastColumns { x, y } if x.dtype() != y.dtype() => {
                Err("columns are kept in their type".into())
            }
            Self::LastColumns { x, y } => {
                all_of(&[same(x.shape().0, y.shape().0), at_most(y.shape().1, x.shape().1)])
            }
            Self::Copy { src, dst } if src.dtype() != dst.dtype() => {
                Err("a copy does not convert".into())
            }
            Self::Copy { src, dst } => same(src.len(), dst.len()),
            Self::AllReduce { x, .. } if !x.dtype().is_value() && x.dtype() != Dtype::F64 => {
                Err("only values add up".into())
            }
            _ if matches!(self.family(), Family::Experts) => self.check_experts(),
            _ if matches!(self.family(), Family::Delta) => self.check_delta(),
            _ => Ok(()),
        }
    }
}

impl Product {
    fn check(self) -> Result<(), String> {
        let Self { a, b, c, bias, .. } = self;
        let ((m, k), (k2, n)) = (a.shape(), b.shape());
        let bias_fits = bias.is_none_or(|b| b.len() == n && !b.is_transposed());
        if k != k2 || c.shape() != (m, n) || c.is_transposed() || !bias_fits {
            return Err(format!("({m}, {k}) times ({k2}, {n}) is not {:?}", c.shape()));
        }
        let has_window = [a, b, c].into_iter().any(Tensor::is_window);
        if has_window && (self.scales.is_some() || self.epilogue != Epilogue::None) {
            return Err("a matmul with windows of columns has no scales and no epilogue".into());
        }
        self.scales.map_or(Ok(()), |scales| self.check_scaled(scales))
    }

    /// Checks an fp8 matmul: cuBLASLt needs operands along k, and sizes and addresses divisible by
    /// 16.
    fn check_scaled(self, scales: [Tensor; 2]) -> Result<(), String> {
        let Self { a, b, c, bias, .. } = self;
        let ((m, k), (_, n)) = (a.shape(), b.shape());
        let sixteens = [m, n, k].iter().all(|size| size.is_multiple_of(16));
        let aligned = |t: Tensor| t.range().start.is_multiple_of(16);
        if a.is_transposed() || !b.is_transposed() {
            return Err("operands of a scaled product lie along k".into());
        }
        if !sixteens || ![a, b, c].into_iter().chain(bias).all(aligned) {
            return Err(format!("({m}, {k}) times ({k}, {n}) is not in multiples of 16"));
        }
        match (a.dtype(), b.dtype()) {
            (Dtype::E4m3, Dtype::E4m3 | Dtype::E5m2) | (Dtype::E5m2, Dtype::E4m3) => {
                all_of(&scales.map(|scale| one_of(scale, Dtype::F32, 1)))
            }
            (a, b) => Err(format!("no scaled product of {a:?} and {b:?}")),
        }
    }
}

/// Checks that `starts` has one I32 element per row.
pub(super) fn check_starts(starts: Option<Tensor>, rows: Tensor) -> Result<(), String> {
    match starts {
        Some(t) => one_of(t, Dtype::I32, rows.shape().0),
        None => Ok(()),
    }
}

fn check_attention(qkv: Tensor, out: Tensor, lse: Tensor, heads: Heads) -> Result<(), String> {
    let (rows, width) = out.shape();
    check_heads(heads)?;
    if !width.is_multiple_of(heads.count) {
        return Err(format!("{width} columns do not divide by {} heads", heads.count));
    }
    all_of(&[
        same(qkv.shape().0, rows),
        same(qkv.shape().1, width / heads.count * (heads.count + 2 * heads.kv_count)),
        same(rows % heads.seq_len, 0),
        same(lse.len(), rows * heads.count),
    ])
}

fn check_scores(scores: Scores) -> Result<(), String> {
    let Scores { scale, cap, window } = scores;
    if window == Some(0) {
        return Err("a window without keys; a query sees at least its own".into());
    }
    all_of(&[positive("scale", scale), positive("cap", cap.unwrap_or(1.0))])
}

/// Checks a number by which kernels divide, or that keeps an order.
fn positive(name: &str, number: f32) -> Result<(), String> {
    if number.is_finite() && number > 0.0 {
        Ok(())
    } else {
        Err(format!("a {name} of {number}, which is no positive number"))
    }
}

fn check_cached(q: Tensor, cache: Tensor, out: Tensor, heads: Heads) -> Result<(), String> {
    check_heads(heads)?;
    if cache.shape().0 == 0 {
        return Err("a token that does not see itself".into());
    }
    all_of(&[
        same(q.len() % heads.count, 0),
        same(cache.shape().1, 2 * heads.kv_count * (q.len() / heads.count)),
        same(out.len(), q.len()),
    ])
}

fn check_heads(heads: Heads) -> Result<(), String> {
    let Heads { count, kv_count, seq_len, .. } = heads;
    if count == 0 || kv_count == 0 || seq_len == 0 || !count.is_multiple_of(kv_count) {
        return Err(format!("{count} heads of queries share {kv_count} of keys, {seq_len} tokens"));
    }
    Ok(())
}

fn check_rotary(
    qkv: Tensor,
    table: Tensor,
    heads: Heads,
    norm: Option<HeadNorm>,
) -> Result<(), String> {
    check_heads(heads)?;
    let ((rows, columns), dim) = (qkv.shape(), heads.dim(qkv.shape().1));
    let turned = heads.turned(table);
    if turned == 0 || turned > dim || !turned.is_multiple_of(2) {
        return Err(format!("{turned} angles, cosines and sines, for heads of {dim} elements"));
    }
    all_of(&[
        same(columns, dim * (heads.count + 2 * heads.kv_count)),
        same(dim % 2, 0),
        same(rows % heads.seq_len, 0),
        same(table.len(), heads.seq_len * turned),
        norm.map_or(Ok(()), |norm| {
            all_of(&[
                same(norm.q_gain.len(), dim),
                same(norm.k_gain.len(), dim),
                same(norm.raw.len(), rows * dim * (heads.count + heads.kv_count)),
            ])
        }),
    ])
}

/// Checks a norm over the width of q and k. `pairs` has two numbers for each row.
fn check_width(qkv: Tensor, raw: Tensor, heads: Heads, pairs: Tensor) -> Result<(), String> {
    check_heads(heads)?;
    let ((rows, columns), dim) = (qkv.shape(), heads.dim(qkv.shape().1));
    let normed = (rows, dim * (heads.count + heads.kv_count));
    if raw.shape() != normed {
        return Err(format!("q and k of {:?} where {normed:?} belong", raw.shape()));
    }
    all_of(&[
        same(columns, dim * (heads.count + 2 * heads.kv_count)),
        one_of(pairs, Dtype::F32, 2 * rows),
    ])
}

fn check_width_norm(
    qkv: Tensor,
    raw: Tensor,
    norm: WidthNorm,
    pairs: Tensor,
) -> Result<(), String> {
    let WidthNorm { heads, gain, sums, widths, .. } = norm;
    all_of(&[
        check_width(qkv, raw, heads, pairs),
        same(gain.len(), raw.shape().1),
        one_of(sums, Dtype::F32, 2 * raw.shape().0),
        positive("width of q", widths[0]),
        positive("width of k", widths[1]),
    ])
}

/// Checks sinks (H) of heads with the outputs `out` (B T, H D) and `lse` (B, H, T) F32.
fn check_sinks(out: Tensor, lse: Tensor, sinks: Tensor, heads: Heads) -> Result<(), String> {
    check_heads(heads)?;
    let (rows, width) = out.shape();
    all_of(&[
        same(width % heads.count, 0),
        same(rows % heads.seq_len, 0),
        one_of(lse, Dtype::F32, rows * heads.count),
        same(sinks.len(), heads.count),
    ])
}

pub(super) fn one_of(t: Tensor, dtype: Dtype, len: usize) -> Result<(), String> {
    if t.dtype() == dtype {
        same(t.len(), len)
    } else {
        Err(format!("{:?} where {dtype:?} belongs", t.dtype()))
    }
}

pub(super) fn same(x: usize, y: usize) -> Result<(), String> {
    if x == y { Ok(()) } else { Err(format!("sizes differ: {x} and {y}")) }
}

fn at_most(x: usize, y: usize) -> Result<(), String> {
    if x <= y { Ok(()) } else { Err(format!("{x} valid columns of {y}")) }
}

pub(super) fn all_of(checks: &[Result<(), String>]) -> Result<(), String> {
    checks.iter().find(|c| c.is_err()).cloned().unwrap_or(Ok(()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Dropout, Plan};

    fn tensor(dtype: Dtype, shape: (usize, usize)) -> Tensor {
        Plan::default().tensor((Arena::Device, "test"), "t", dtype, shape)
    }

    /// 2 heads of queries and 1 of keys and values, with 8 elements each, in samples of 6 tokens.
    const HEADS: Heads = Heads { count: 2, kv_count: 1, first: 0, total: 2, seq_len: 6 };

    fn says(op: &Op, part: &str) {
        let error = op.check(Lane::Compute).expect_err("the op does not fit");
        assert!(error.contains(part), "{error}");
    }

    #[test]
    fn scores_without_an_order_or_without_a_key_are_refused() {
        let (qkv, out) = (tensor(Dtype::Bf16, (12, 32)), tensor(Dtype::Bf16, (12, 16)));
        let (lse, heads) = (tensor(Dtype::F32, (4, 6)), HEADS);
        let (starts, dropout) = (None, Dropout::NONE);
        let of = |scores| Op::Attention { qkv, out, lse, heads, starts, dropout, scores };
        let usual = Scores::of(8);
        for window in [None, Some(1), Some(100)] {
            let scores = Scores { scale: 0.3, cap: Some(50.0), window };
            assert_eq!(of(scores).check(Lane::Compute), Ok(()));
        }
        says(&of(Scores { window: Some(0), ..usual }), "at least its own");
        for number in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            says(&of(Scores { scale: number, ..usual }), "scale");
            says(&of(Scores { cap: Some(number), ..usual }), "cap");
        }
        let (q, out) = (tensor(Dtype::Bf16, (1, 16)), tensor(Dtype::Bf16, (1, 16)));
        let cache = tensor(Dtype::Bf16, (9, 16));
        let of = |scores| Op::CachedAttention { q, cache, out, heads, scores, sinks: None };
        assert_eq!(of(usual).check(Lane::Compute), Ok(()));
        says(&of(Scores { window: Some(4), ..usual }), "rows of the window alone");
    }

    #[test]
    fn a_table_turns_an_even_number_of_elements_of_a_head() {
        let qkv = tensor(Dtype::Bf16, (12, 32));
        let of = |shape| {
            let table = tensor(Dtype::F32, shape);
            Op::Rotary { qkv, table, heads: HEADS, starts: None, norm: None }
        };
        for turned in [2, 4, 8] {
            assert_eq!(of((6, turned)).check(Lane::Compute), Ok(()));
        }
        for turned in [0, 3, 10] {
            says(&of((6, turned)), "for heads of 8 elements");
        }
        says(&of((1, 25)), "sizes differ");
    }

    #[test]
    fn caps_and_widths_of_norms_are_positive_and_shapes_fit() {
        let logits = tensor(Dtype::Bf16, (3, 50));
        let of = |scale, cap| Op::CapLogits { logits, scale, cap };
        assert_eq!(of(0.1, Some(30.0)).check(Lane::Compute), Ok(()));
        says(&of(0.0, None), "scale");
        says(&of(1.0, Some(0.0)), "cap");
        let (qkv, raw) = (tensor(Dtype::Bf16, (12, 32)), tensor(Dtype::Bf16, (12, 24)));
        let (gain, sums) = (tensor(Dtype::Bf16, (1, 24)), tensor(Dtype::F32, (12, 2)));
        let norm = WidthNorm { heads: HEADS, gain, sums, widths: [16.0, 8.0], epsilon: 1e-5 };
        assert_eq!(Op::WidthNorm { qkv, raw, norm }.check(Lane::Compute), Ok(()));
        let narrow = WidthNorm { widths: [16.0, 0.0], ..norm };
        says(&Op::WidthNorm { qkv, raw, norm: narrow }, "width of k");
        let other = WidthNorm { gain: tensor(Dtype::Bf16, (1, 16)), ..norm };
        says(&Op::WidthNorm { qkv, raw, norm: other }, "sizes differ");
        says(&Op::WidthNorm { qkv, raw: qkv, norm }, "q and k of");
        let halves = tensor(Dtype::Bf16, (12, 2));
        says(&Op::WidthNormSums { qkv, raw, heads: HEADS, sums: halves }, "F32 belongs");
    }
}
