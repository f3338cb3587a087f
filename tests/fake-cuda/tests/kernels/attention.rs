//! Attention: portable and on tensor cores.

use super::rig::{self, Rig, VALUES, noise, normal};
use super::{DROPOUT, NO_DROPOUT, in_each_type};
use device::{Dropout, Dtype, Heads, Op, Scores};

/// Samples, head dimension, heads.
type Size = (usize, usize, Heads);

fn attention_sizes() -> Vec<Size> {
    let size = |samples, seq_len, count, dim| {
        (samples, dim, Heads { count, kv_count: count, first: 1, total: count + 2, seq_len })
    };
    let grouped = |samples, seq_len, (count, kv_count), dim| {
        (samples, dim, Heads { count, kv_count, first: 1, total: count + 2, seq_len })
    };
    vec![
        grouped(2, 70, (6, 2), 24),
        grouped(1, 131, (3, 1), 80),
        grouped(1, 65, (12, 2), 64),
        grouped(1, 130, (6, 1), 5),
        grouped(1, 67, (4, 2), 128),
        size(1, 2, 1, 2),
        size(2, 65, 2, 3),
        size(1, 130, 3, 16),
        size(2, 31, 1, 80),
        size(1, 128, 1, 64),
        size(1, 70, 1, 128),
        size(1, 66, 1, 200),
    ]
}

/// Samples of several documents: some in one tile, some over several, the last over none but its own.
fn packed_sizes() -> Vec<(Size, Option<Vec<usize>>)> {
    let sizes = [
        (70, (6, 2), 24, vec![30, 40, 1, 69]),
        (200, (2, 1), 64, vec![5, 100, 95, 190, 10]),
        (300, (2, 2), 80, vec![64, 64, 72, 100, 300]),
        (131, (2, 1), 200, vec![129, 2, 3, 128]),
    ];
    let packed = sizes.map(|(seq_len, (count, kv_count), dim, lengths)| {
        let heads = Heads { count, kv_count, first: 1, total: count + 2, seq_len };
        ((2, dim, heads), Some(lengths))
    });
    packed.into()
}

/// Checks attention and its gradients for a compute capability; `types` has the tolerances.
fn check_attention(sm: u32, types: &[(Dtype, [(f64, f64); 2])]) {
    let whole = attention_sizes().into_iter().map(|size| (size, None));
    for (i, ((samples, dim, heads), documents)) in whole.chain(packed_sizes()).enumerate() {
        for ((dtype, tolerances), dropout) in
            types.iter().flat_map(|t| [(*t, NO_DROPOUT), (*t, DROPOUT)])
        {
            let (rows, width) = (samples * heads.seq_len, heads.count * dim);
            let dropout = Dropout { first_row: 3 * heads.seq_len as u64, ..dropout };
            let mut rig = Rig::new(i % 2);
            rig.sm = sm;
            let all = (heads.count + 2 * heads.kv_count) * dim;
            let qkv: Vec<f64> = noise(1, rows * all).iter().map(|x| 2.0 * x).collect();
            let qkv = rig.put(dtype, (rows, all), &qkv);
            let d_out = rig.put_noise(dtype, (rows, width), 2);
            let (out, d_qkv) = (rig.out(dtype, (rows, width)), rig.out(dtype, (rows, all)));
            let lse = rig.out(Dtype::F32, (samples * heads.count, heads.seq_len));
            let starts = documents.as_ref().map(|of| rig.put_starts(heads.seq_len, of, 0..rows));
            let scores = Scores::of(dim);
            let mut pair = rig.open();
            pair.check(
                &Op::Attention { qkv, out, lse, heads, starts, dropout, scores },
                tolerances[0].0,
                tolerances[0].1,
            );
            let op = Op::AttentionBackward {
                qkv,
                out,
                lse,
                d_out,
                d_qkv,
                heads,
                starts,
                dropout,
                scores,
            };
            // Gradients of keys and values are sums over the heads that share them.
            let (absolute, ulps) = tolerances[1];
            pair.check(&op, absolute * heads.group() as f64, ulps);
        }
    }
}

#[test]
fn attention_and_its_gradients_agree() {
    // A GPU uses its own kernels for 16 bits.
    let types = if rig::real() { &VALUES[..1] } else { &VALUES[..] };
    let types: Vec<_> = types.iter().map(|t| (*t, [(5e-7, 1.0), (2e-6, 1.0)])).collect();
    check_attention(75, &types);
}

/// Weights and gradients of scores are rounded before they are multiplied.
#[test]
fn attention_on_tensor_cores_agrees_within_the_rounding_of_weights() {
    let of = |dtype, unit: f64| (dtype, [(2.0 * unit, 1.0), (8.0 * unit, 2.0)]);
    check_attention(80, &[of(Dtype::Bf16, 1.0 / 256.0), of(Dtype::F16, 1.0 / 2048.0)]);
}

/// The same on a V100, which has tensor cores only for f16.
#[test]
fn attention_on_tensor_cores_of_volta_agrees_within_the_rounding_of_weights() {
    let unit = 1.0 / 2048.0;
    check_attention(70, &[(Dtype::F16, [(2.0 * unit, 1.0), (8.0 * unit, 2.0)])]);
}

#[test]
fn attention_to_what_is_kept_agrees() {
    in_each_type(|dtype, skew| {
        for (n, count, kv_count, dim) in
            [(1, 2, 2, 3), (7, 6, 2, 10), (100, 3, 1, 64), (33, 8, 2, 128), (20, 2, 1, 256)]
        {
            let heads = Heads { count, kv_count, first: 0, total: count, seq_len: 1 };
            let mut rig = Rig::new(skew);
            let q = rig.put_noise(dtype, (1, count * dim), 1);
            let cache = rig.put_noise(dtype, (n, 2 * kv_count * dim), 2);
            let out = rig.out(dtype, (1, count * dim));
            let scores = Scores::of(dim);
            let sinks = rig.put(dtype, (1, count), &normal(3, count));
            let mut pair = rig.open();
            for sinks in [None, Some(sinks)] {
                let op = Op::CachedAttention { q, cache, out, heads, scores, sinks };
                pair.check(&op, 2e-6, 1.0);
            }
        }
    });
}

/// Checks sinks and their gradient. `sizes`: samples, tokens, heads, and elements of a head.
pub(crate) fn check_sinks(mut rig: Rig, dtype: Dtype, sizes: [usize; 4]) {
    let [samples, seq_len, count, dim] = sizes;
    let heads = Heads { count, kv_count: 1, first: 0, total: count, seq_len };
    let rows = samples * seq_len;
    let [out, d_out] = [1, 2].map(|seed| rig.put_noise(dtype, (rows, count * dim), seed));
    let lse = rig.put(Dtype::F32, (1, rows * count), &normal(3, rows * count));
    let sinks = rig.put(dtype, (1, count), &normal(4, count));
    let d_sinks = rig.out(dtype, (1, count));
    let mut pair = rig.open();
    pair.check(&Op::AttentionSinks { out, lse, sinks, heads }, 1e-6, 1.0);
    let op = Op::AttentionSinksBackward { out, lse, d_out, sinks, d_sinks, heads };
    pair.check(&op, 1e-5, 1.0);
}

#[test]
fn sinks_and_their_gradient_agree() {
    in_each_type(|dtype, skew| {
        for sizes in [[1, 1, 1, 1], [2, 9, 3, 10], [1, 130, 5, 64], [3, 33, 2, 256]] {
            check_sinks(Rig::new(skew), dtype, sizes);
        }
    });
}

#[test]
fn the_last_columns_are_kept_in_the_same_bits() {
    in_each_type(|dtype, skew| {
        for (n, of, width) in [(1, 9, 4), (77, 48, 16), (5, 8, 8), (30, 67, 33), (300, 300, 270)] {
            let mut rig = Rig::new(skew);
            let (x, y) = (rig.put_noise(dtype, (n, of), 1), rig.out(dtype, (n, width)));
            rig.open().check_exact(&Op::LastColumns { x, y });
        }
    });
}

/// The formula is computed in float64. Scores are up to 20, so the likeliest positions change a
/// running maximum often.
#[test]
fn attention_to_what_is_kept_is_the_formula() {
    in_each_type(|dtype, skew| {
        for (n, count, kv_count, dim) in
            [(1, 2, 1, 8), (9, 2, 2, 33), (515, 4, 2, 64), (70, 2, 1, 256)]
        {
            let heads = Heads { count, kv_count, first: 0, total: count, seq_len: 1 };
            let (mut rig, width) = (Rig::new(skew), 2 * kv_count * dim);
            let q: Vec<f64> = noise(3, count * dim).iter().map(|x| 16.0 * x).collect();
            let q = rig.put(dtype, (1, count * dim), &q);
            let cache = rig.put_noise(dtype, (n, width), 4);
            let out = rig.out(dtype, (1, count * dim));
            let mut pair = rig.open();
            let (query, kept) = (pair.on_cpu(q), pair.on_cpu(cache));
            let scores = Scores::of(dim);
            let got = pair
                .launched(&Op::CachedAttention { q, cache, out, heads, scores, sinks: None }, out);
            for head in 0..count {
                let shared = head / heads.group();
                let at = |position: usize, part: usize, d: usize| {
                    kept[position * width + (part * kv_count + shared) * dim + d]
                };
                let score = |position: usize| -> f64 {
                    let products = (0..dim).map(|d| query[head * dim + d] * at(position, 0, d));
                    products.sum::<f64>() / (dim as f64).sqrt()
                };
                let weights: Vec<f64> = (0..n).map(|position| score(position).exp()).collect();
                let total: f64 = weights.iter().sum();
                for d in 0..dim {
                    let sum: f64 =
                        (0..n).map(|position| weights[position] * at(position, 1, d)).sum();
                    let (got, want) = (got[head * dim + d], sum / total);
                    let near = 4e-6 + rig::ulp(dtype) * want.abs();
                    assert!(
                        (got - want).abs() <= near,
                        "{dtype:?} {n} x {dim}, {head}, {d}: {got:e}, not {want:e}"
                    );
                }
            }
        }
    });
}
