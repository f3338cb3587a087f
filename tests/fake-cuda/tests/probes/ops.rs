//! The ops of a step at the shapes of a 1.3B model: 8192 tokens, hidden 2048, 16 heads of 128, samples of 1024 tokens.

use crate::rates::tensor;
use crate::small;
use device::numerics::CountedRange;
use device::{
    DeviceOp, Dropout, Dtype, Gate, HeadNorm, HeadNormGrads, Heads, MAXIMA, Op, Plan, Scores,
    Tensor, VocabShard, WidthNorm,
};
use offload::{AdamTile, DeviceUpdate, Rule, TileNoise, control};

/// An op, and the kind of its target speed: `element-wise`, `reduction`, `attention`, `grouped`.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) kind: &'static str,
    pub(crate) make: fn(&mut Plan) -> OpSets,
}

pub(crate) type Values = Box<dyn Fn(usize) -> f64>;

/// The same op on several sets of tensors in turn, so that the caches do not hold them.
#[derive(Default)]
pub(crate) struct OpSets {
    pub(crate) ops: Vec<Op>,
    pub(crate) fill: Vec<Tensor>,
    pub(crate) write: Vec<(Tensor, Values)>,
    pub(crate) zero: Vec<Tensor>,
}

const NO_DROPOUT: Dropout = Dropout { p: 0.0, key: 0, first_row: 0 };
const DROPOUT: Dropout = Dropout { p: 0.1, key: 1, first_row: 0 };
const VALUE: Dtype = Dtype::Bf16;

/// Sizes: (tokens, hidden, vocabulary, heads, tokens of a sample).
fn sizes() -> (usize, usize, usize, usize, usize) {
    if small() { (8, 16, 24, 2, 8) } else { (8192, 2048, 50304, 16, 1024) }
}

const SETS: usize = 3;

/// Creates `op` on sets of tensors, each of a type and shape; the first `filled` tensors of a set
/// are written before.
fn on_sets<const N: usize>(
    plan: &mut Plan,
    tensors: [(Dtype, (usize, usize)); N],
    filled: usize,
    op: impl Fn([Tensor; N]) -> Op,
) -> OpSets {
    let mut made = OpSets::default();
    for _ in 0..SETS {
        let set = tensors.map(|(dtype, shape)| tensor(plan, dtype, shape));
        made.fill.extend(&set[..filled]);
        made.ops.push(op(set));
    }
    made
}

pub(crate) fn cases() -> Vec<Case> {
    let case = |name, kind, make| Case { name, kind, make };
    let many = "element-wise";
    vec![
        case("layer_norm", many, layer_norm),
        case("layer_norm_backward", "reduction", layer_norm_backward),
        case("rms_norm", many, rms_norm),
        case("rms_norm_backward", "reduction", rms_norm_backward),
        case("rotary", many, |plan| rotary(plan, false)),
        case("rotary-norm", many, |plan| rotary(plan, true)),
        case("rotary_backward", many, |plan| rotary_backward(plan, false)),
        case("rotary_backward-norm", "reduction", |plan| rotary_backward(plan, true)),
        case("swiglu", many, swiglu),
        case("swiglu_backward", many, swiglu_backward),
        case("width_norm_sums", many, |plan| width_norm(plan, 0)),
        case("width_norm", many, |plan| width_norm(plan, 1)),
        case("width_norm_backward_sums", many, |plan| width_norm(plan, 2)),
        case("width_norm_backward", "reduction", |plan| width_norm(plan, 3)),
        case("geglu", many, geglu),
        case("geglu_backward", many, geglu_backward),
        case("gelu", many, gelu),
        case("gelu_backward", many, gelu_backward),
        case("bias_dropout_add", many, |plan| bias_dropout_add(plan, NO_DROPOUT)),
        case("bias_dropout_add-0.1", many, |plan| bias_dropout_add(plan, DROPOUT)),
        case("add", many, |plan| add(plan, VALUE)),
        case("accumulate", many, |plan| add(plan, Dtype::F32)),
        case("cast", many, cast),
        case("maxima", many, maxima),
        case("quantize", many, quantize),
        case("column_sum-2048", "reduction", |plan| column_sum(plan, 1)),
        case("column_sum-6144", "reduction", |plan| column_sum(plan, 3)),
        case("column_sum-8192", "reduction", |plan| column_sum(plan, 4)),
        case("attention", "attention", |plan| attention(plan, 1, NO_DROPOUT, false)),
        case("attention-0.1", "attention", |plan| attention(plan, 1, DROPOUT, false)),
        case("attention_backward", "attention", |plan| attention(plan, 1, NO_DROPOUT, true)),
        case("attention-shared", "attention", |plan| attention(plan, 4, NO_DROPOUT, false)),
        case("attention_backward-shared", "attention", |plan| attention(plan, 4, NO_DROPOUT, true)),
        case("cap_logits", many, cap_logits),
        case("row_max", many, |plan| cross_entropy(plan, 0)),
        case("cross_entropy_stats", many, |plan| cross_entropy(plan, 1)),
        case("cross_entropy_backward", many, |plan| cross_entropy(plan, 2)),
        case("chunk_squares", many, chunk_squares),
        case("update", many, update),
    ]
}

/// Rows, rounded up to a multiple of 16, and columns.
fn sizes_of_fp8() -> (usize, usize) {
    let (rows, cols, ..) = sizes();
    (rows.next_multiple_of(16), cols)
}

fn maxima(plan: &mut Plan) -> OpSets {
    let tensors = [(VALUE, sizes_of_fp8()), (Dtype::F32, (1, MAXIMA))];
    on_sets(plan, tensors, 1, |[x, maxima]| Op::Maxima { x, maxima })
}

/// Quantizes in both layouts, as for gradients.
fn quantize(plan: &mut Plan) -> OpSets {
    let (rows, cols) = sizes_of_fp8();
    let (x, y) = ((VALUE, (rows, cols)), (Dtype::E5m2, (rows, cols)));
    let transposed = (Dtype::E5m2, (cols, rows));
    let tensors = [x, (Dtype::F32, (1, MAXIMA)), y, transposed, (Dtype::F32, (1, 1))];
    on_sets(plan, tensors, 2, |[x, maxima, y, transposed, scale]| Op::Quantize {
        x,
        maxima,
        y: Some(y),
        transposed: Some(transposed),
        scale,
    })
}

fn layer_norm(plan: &mut Plan) -> OpSets {
    let (rows, cols, ..) = sizes();
    let row = (VALUE, (1, cols));
    let tensors = [(VALUE, (rows, cols)), row, row, (VALUE, (rows, cols)), (Dtype::F32, (rows, 2))];
    on_sets(plan, tensors, 3, |[x, gain, bias, y, stats]| Op::LayerNorm {
        x,
        gain,
        bias,
        y,
        stats,
        epsilon: 1e-5,
    })
}

fn layer_norm_backward(plan: &mut Plan) -> OpSets {
    let (rows, cols, ..) = sizes();
    let (all, row) = ((VALUE, (rows, cols)), (VALUE, (1, cols)));
    let tensors = [all, row, (Dtype::F32, (rows, 2)), all, all, row, row];
    on_sets(plan, tensors, 5, |[x, gain, stats, d_y, d_x, d_gain, d_bias]| Op::LayerNormBackward {
        x,
        gain,
        stats,
        d_y,
        d_x,
        add: true,
        d_gain,
        d_bias,
    })
}

fn rms_norm(plan: &mut Plan) -> OpSets {
    let (rows, cols, ..) = sizes();
    let all = (VALUE, (rows, cols));
    let tensors = [all, (VALUE, (1, cols)), all, (Dtype::F32, (rows, 1))];
    on_sets(plan, tensors, 2, |[x, gain, y, stats]| Op::RmsNorm {
        x,
        gain,
        y,
        stats,
        epsilon: 1e-5,
        offset: 0.0,
    })
}

fn rms_norm_backward(plan: &mut Plan) -> OpSets {
    let (rows, cols, ..) = sizes();
    let (all, row) = ((VALUE, (rows, cols)), (VALUE, (1, cols)));
    let tensors = [all, row, (Dtype::F32, (rows, 1)), all, all, row];
    on_sets(plan, tensors, 5, |[x, gain, stats, d_y, d_x, d_gain]| Op::RmsNormBackward {
        x,
        gain,
        stats,
        d_y,
        d_x,
        add: true,
        d_gain,
        offset: 0.0,
    })
}

/// A type and a shape.
type TypedShape = (Dtype, (usize, usize));

/// Types and shapes of qkv, table, gains, raw and the gradients of gains. Key-value heads are a
/// quarter of the query heads.
fn rotary_tensors(seq_len: usize) -> ([TypedShape; 7], Heads) {
    let (rows, cols, _, count, _) = sizes();
    let (dim, kv_count) = (cols / count, (count / 4).max(1));
    let heads = Heads { count, kv_count, first: 0, total: count, seq_len };
    let (all, row) = (count + 2 * kv_count, (VALUE, (1, dim)));
    let raw = (VALUE, (rows, (count + kv_count) * dim));
    let table = (Dtype::F32, (seq_len, dim));
    ([(VALUE, (rows, all * dim)), table, row, row, raw, row, row], heads)
}

fn rotary(plan: &mut Plan, normed: bool) -> OpSets {
    let (.., seq_len) = sizes();
    let (tensors, heads) = rotary_tensors(seq_len);
    on_sets(plan, tensors, 4, |[qkv, table, q_gain, k_gain, raw, ..]| {
        let norm = normed.then_some(HeadNorm { q_gain, k_gain, raw, epsilon: 1e-6, offset: 0.0 });
        Op::Rotary { qkv, table, heads, starts: None, norm }
    })
}

fn rotary_backward(plan: &mut Plan, normed: bool) -> OpSets {
    let (.., seq_len) = sizes();
    let (tensors, heads) = rotary_tensors(seq_len);
    on_sets(plan, tensors, 5, |[d_qkv, table, q_gain, k_gain, raw, d_q, d_k]| {
        let grads = HeadNormGrads { q_gain: d_q, k_gain: d_k };
        let norm =
            normed.then_some((HeadNorm { q_gain, k_gain, raw, epsilon: 1e-6, offset: 0.0 }, grads));
        Op::RotaryBackward { d_qkv, table, heads, starts: None, norm }
    })
}

fn swiglu(plan: &mut Plan) -> OpSets {
    let (rows, cols, ..) = sizes();
    let (x, y) = ((VALUE, (rows, 8 * cols)), (VALUE, (rows, 4 * cols)));
    on_sets(plan, [x, y], 1, |[x, y]| Op::SwiGlu { x, y, gate: Gate::Silu })
}

fn swiglu_backward(plan: &mut Plan) -> OpSets {
    let (rows, cols, ..) = sizes();
    let (x, d) = ((VALUE, (rows, 8 * cols)), (VALUE, (rows, 4 * cols)));
    on_sets(plan, [x, d], 2, |[x, d]| Op::SwiGluBackward { x, d, gate: Gate::Silu })
}

fn geglu(plan: &mut Plan) -> OpSets {
    let (rows, cols, ..) = sizes();
    let (x, y) = ((VALUE, (rows, 8 * cols)), (VALUE, (rows, 4 * cols)));
    on_sets(plan, [x, y], 1, |[x, y]| Op::SwiGlu { x, y, gate: Gate::Gelu })
}

fn geglu_backward(plan: &mut Plan) -> OpSets {
    let (rows, cols, ..) = sizes();
    let (x, d) = ((VALUE, (rows, 8 * cols)), (VALUE, (rows, 4 * cols)));
    on_sets(plan, [x, d], 2, |[x, d]| Op::SwiGluBackward { x, d, gate: Gate::Gelu })
}

/// Passes of the norm over the width of q and k: the sums and the norm, then those of the gradient.
fn width_norm(plan: &mut Plan, pass: usize) -> OpSets {
    let (rows, cols, _, count, seq_len) = sizes();
    let (dim, kv_count) = (cols / count, (count / 4).max(1));
    let heads = Heads { count, kv_count, first: 0, total: count, seq_len };
    let normed = (count + kv_count) * dim;
    let (row, pair) = ((VALUE, (1, normed)), (Dtype::F32, (rows, 2)));
    let whole = (VALUE, (rows, (count + 2 * kv_count) * dim));
    let tensors = [whole, (VALUE, (rows, normed)), row, pair, pair, row];
    on_sets(plan, tensors, 5, |[qkv, raw, gain, sums, dots, d_gain]| {
        let widths = [count * dim, kv_count * dim].map(|n| n as f32);
        let norm = WidthNorm { heads, gain, sums, widths, epsilon: 1e-5 };
        match pass {
            0 => Op::WidthNormSums { qkv, raw, heads, sums },
            1 => Op::WidthNorm { qkv, raw, norm },
            2 => Op::WidthNormBackwardSums { d_qkv: qkv, raw, norm, dots },
            _ => Op::WidthNormBackward { d_qkv: qkv, raw, norm, dots, d_gain },
        }
    })
}

fn cap_logits(plan: &mut Plan) -> OpSets {
    let (rows, _, vocab, ..) = sizes();
    let logits = tensor(plan, VALUE, (rows, vocab));
    let op = Op::CapLogits { logits, scale: 1.0, cap: Some(30.0) };
    OpSets { ops: vec![op], fill: vec![logits], ..OpSets::default() }
}

fn gelu(plan: &mut Plan) -> OpSets {
    let (rows, cols, ..) = sizes();
    on_sets(plan, [(VALUE, (rows, 4 * cols)); 2], 1, |[x, y]| Op::Gelu { x, y })
}

fn gelu_backward(plan: &mut Plan) -> OpSets {
    let (rows, cols, ..) = sizes();
    on_sets(plan, [(VALUE, (rows, 4 * cols)); 2], 2, |[x, d]| Op::GeluBackward { x, d })
}

fn bias_dropout_add(plan: &mut Plan, dropout: Dropout) -> OpSets {
    let (rows, cols, ..) = sizes();
    let all = (VALUE, (rows, cols));
    on_sets(plan, [all, (VALUE, (1, cols)), all, all], 3, |[x, bias, residual, y]| {
        Op::BiasDropoutAdd { x, bias: Some(bias), residual, y, dropout, scale: 1.0 }
    })
}

fn add(plan: &mut Plan, into: Dtype) -> OpSets {
    let (rows, cols, ..) = sizes();
    let shape = (rows, 4 * cols);
    on_sets(plan, [(VALUE, shape), (into, shape)], 2, |[x, into]| Op::Add { x, into })
}

fn cast(plan: &mut Plan) -> OpSets {
    let (rows, cols, ..) = sizes();
    let shape = (rows, 4 * cols);
    on_sets(plan, [(Dtype::F32, shape), (VALUE, shape)], 1, |[x, y]| Op::Cast { x, y })
}

fn column_sum(plan: &mut Plan, times: usize) -> OpSets {
    let (rows, cols, ..) = sizes();
    let cols = times * cols;
    on_sets(plan, [(VALUE, (rows, cols)), (VALUE, (1, cols))], 1, |[x, y]| Op::ColumnSum { x, y })
}

/// Attention in which `group` query heads share one key-value head, if there are that many heads.
fn attention(plan: &mut Plan, group: usize, dropout: Dropout, backward: bool) -> OpSets {
    let (rows, cols, _, count, seq_len) = sizes();
    let kv_count = (count / group).max(1);
    let heads = Heads { count, kv_count, first: 0, total: count, seq_len };
    let all = (count + 2 * kv_count) * (cols / count);
    let (out, qkv) = ((VALUE, (rows, cols)), (VALUE, (rows, all)));
    let lse = (Dtype::F32, (rows / seq_len * count, seq_len));
    let scores = Scores::of(cols / count);
    on_sets(plan, [qkv, out, out, lse, qkv], 4, |[qkv, out, d_out, lse, d_qkv]| {
        if backward {
            Op::AttentionBackward {
                qkv,
                out,
                lse,
                d_out,
                d_qkv,
                heads,
                starts: None,
                dropout,
                scores,
            }
        } else {
            Op::Attention { qkv, out, lse, heads, starts: None, dropout, scores }
        }
    })
}

/// Passes over the logits: their maxima, the sums, and the gradient.
fn cross_entropy(plan: &mut Plan, pass: usize) -> OpSets {
    let (rows, _, vocab, ..) = sizes();
    let shard = VocabShard { first: 0, valid: vocab };
    let logits = tensor(plan, VALUE, (rows, vocab));
    let [max, y] = [(); 2].map(|()| tensor(plan, Dtype::F32, (1, rows)));
    let sums = tensor(plan, Dtype::F32, (2, rows));
    let targets = tensor(plan, Dtype::I32, (1, rows));
    let scale = tensor(plan, Dtype::F64, (1, 1));
    let op = match pass {
        0 => Op::RowMax { x: logits, y, shard },
        1 => Op::CrossEntropyStats { logits, max, targets, shard, sums },
        _ => Op::CrossEntropyBackward {
            logits,
            max,
            sums,
            targets,
            shard,
            scale,
            factor: 1.0,
            cap: None,
        },
    };
    let write: Vec<(Tensor, Values)> = vec![
        (targets, Box::new(move |i| (i * 7 % vocab) as f64)),
        (max, Box::new(|_| 1.0)),
        (sums, Box::new(|_| 1.0)),
        (scale, Box::new(|_| 1e-4)),
    ];
    OpSets { ops: vec![op], fill: vec![logits], write, zero: Vec::new() }
}

fn chunk_squares(plan: &mut Plan) -> OpSets {
    let (rows, cols, ..) = sizes();
    let (n, chunk) = (rows * 4 * cols, if small() { 64 } else { 1 << 16 });
    let tensors = [(VALUE, (1, n)), (Dtype::F64, (1, n.div_ceil(chunk)))];
    let counted = CountedRange::first(n);
    on_sets(plan, tensors, 1, |[x, partials]| Op::ChunkSquares { x, partials, chunk, counted })
}

fn update(plan: &mut Plan) -> OpSets {
    let n = if small() { 256 } else { 64 << 20 };
    let rule = Rule::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
    let [grad, master, momentum, variance] = [(); 4].map(|()| tensor(plan, Dtype::F32, (1, n)));
    let param = tensor(plan, VALUE, (1, n));
    let control = tensor(plan, Dtype::F64, (1, control::WORDS));
    let (decayed, noise) = (n, TileNoise::none());
    let tile = AdamTile { rule, control, grad, master, momentum, variance, param, decayed, noise };
    let op = Op::Task { task: DeviceOp::new(DeviceUpdate(tile)) };
    let word = |i| match i {
        control::FACTOR | control::MOMENTUM_CORRECTION | control::VARIANCE_CORRECTION => 1.0,
        control::LR => 1e-4,
        _ => 0.0,
    };
    let write: Vec<(Tensor, Values)> = vec![(control, Box::new(word))];
    OpSets { ops: vec![op], fill: vec![grad, master], write, zero: vec![momentum, variance] }
}
