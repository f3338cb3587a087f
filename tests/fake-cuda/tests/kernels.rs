//! Every CUDA kernel, emulated, against the cpu backend: each op in each storage type, at odd
//! shapes and at addresses that no wide load accepts. An op without a sum over a block has the same
//! bits.

#[path = "kernels/attention.rs"]
mod attention;
#[path = "kernels/attention_windows.rs"]
mod attention_windows;
mod common;
#[path = "kernels/delta.rs"]
mod delta;
#[path = "kernels/experts.rs"]
mod experts;
#[path = "kernels/norms.rs"]
mod norms;
#[path = "kernels/products.rs"]
mod products;
#[path = "kernels/programs.rs"]
mod programs;
#[path = "kernels/ptx.rs"]
mod ptx;
mod rig;

use device::numerics::CountedRange;
use device::{
    ColumnShard, DeviceOp, Dropout, Dtype, Gate, HeadNorm, HeadNormGrads, Heads, Op, Reduction,
    VocabShard,
};
use offload::{AdamTile, DeviceUpdate, Rule, TileNoise, control};
use rig::{Rig, VALUES, noise, normal, ulp};
use std::sync::Arc;

const NO_DROPOUT: Dropout = Dropout { p: 0.0, key: 0, first_row: 0 };
const DROPOUT: Dropout = Dropout { p: 0.25, key: 0x1234_5678_9abc_def0, first_row: 12 };
/// Tolerance of sums of up to some hundred numbers of about 1, in another order.
const SUM: (f64, f64) = (5e-7, 1.0);

/// Runs `test` for each storage type, aligned and not.
fn in_each_type(test: impl Fn(Dtype, usize)) {
    for dtype in VALUES {
        for skew in [0, 1] {
            test(dtype, skew);
        }
    }
}

#[test]
fn activations_are_the_same_bits() {
    in_each_type(|dtype, skew| {
        for n in [1, 7, 2048, 5003] {
            let mut rig = Rig::new(skew);
            let x: Vec<f64> = normal(1, n).iter().map(|x| x * 4.0).collect();
            let (x, y) = (rig.put(dtype, (1, n), &x), rig.out(dtype, (1, n)));
            let d = rig.put(dtype, (1, n), &normal(2, n));
            let mut pair = rig.open();
            pair.check_exact(&Op::Gelu { x, y });
            pair.check_exact(&Op::GeluBackward { x, d });
        }
    });
}

#[test]
fn activations_of_extreme_numbers_are_the_same_bits() {
    let x = [f64::INFINITY, f64::NAN, 0.0, -0.0, 1e30, -1e30, 88.0, -88.0, 1e-40, 3e38, -11.0];
    let mut rig = Rig::new(0);
    let (x, y) = (rig.put(Dtype::F32, (1, 11), &x), rig.out(Dtype::F32, (1, 11)));
    let d = rig.put(Dtype::F32, (1, 11), &[1.0; 11]);
    let mut pair = rig.open();
    pair.check_exact(&Op::Gelu { x, y });
    pair.check_exact(&Op::GeluBackward { x, d });
}

#[test]
fn additions_and_conversions_are_the_same_bits() {
    for (from, to) in VALUES.iter().flat_map(|a| VALUES.map(|b| (*a, b))) {
        for (skew, n) in [(0, 4099), (1, 77), (3, 5)] {
            let mut rig = Rig::new(skew);
            let x = rig.put(from, (1, n), &normal(1, n));
            let [y, z] = [2, 3].map(|s| rig.put(to, (1, n), &normal(s, n)));
            let mut pair = rig.open();
            pair.check_exact(&Op::Add { x, into: y });
            pair.check_exact(&Op::Cast { x, y });
            pair.check_exact(&Op::Zero { x: z });
        }
    }
}

#[test]
fn doubles_and_tokens_add_convert_and_become_zero() {
    for (skew, n) in [(0, 1), (1, 300)] {
        let mut rig = Rig::new(skew);
        let x: Vec<f64> = normal(1, n).iter().map(|x| x * 1e3 + 1e-9).collect();
        let x = rig.put(Dtype::F64, (1, n), &x);
        let y = rig.put(Dtype::F64, (1, n), &noise(2, n));
        let z = rig.out(Dtype::F64, (1, n));
        let floats = VALUES.map(|dtype| rig.out(dtype, (1, n)));
        let tokens = rig.put(Dtype::I32, (1, n), &vec![5.0; n]);
        let mut pair = rig.open();
        pair.check_exact(&Op::Add { x, into: y });
        pair.check_exact(&Op::Cast { x, y: z });
        for float in floats {
            pair.check_exact(&Op::Cast { x, y: float });
            pair.check_exact(&Op::Cast { x: float, y: tokens });
            pair.check_exact(&Op::Cast { x: tokens, y: float });
            pair.check_exact(&Op::Cast { x: float, y: z });
        }
        pair.check_exact(&Op::Zero { x: y });
        pair.check_exact(&Op::Zero { x: tokens });
    }
}

#[test]
fn dropout_is_the_same_bits() {
    in_each_type(|dtype, skew| {
        for dropout in [NO_DROPOUT, DROPOUT, Dropout { first_row: (1 << 32) / 37 - 2, ..DROPOUT }] {
            for (rows, cols) in [(9, 37), (3, 64), (1, 1)] {
                let n = rows * cols;
                let mut rig = Rig::new(skew);
                let mut values = normal(1, n);
                values[n / 2] = f64::NAN;
                let (x, y) = (rig.put(dtype, (rows, cols), &values), rig.out(dtype, (rows, cols)));
                let partial = rig.put(Dtype::F32, (rows, cols), &values);
                let bias = rig.put(dtype, (1, cols), &noise(2, cols));
                let residual = rig.put(dtype, (rows, cols), &noise(3, n));
                let (mut pair, bias) = (rig.open(), Some(bias));
                for scale in [1.0, 0.22] {
                    for x in [x, partial] {
                        let op = Op::BiasDropoutAdd { x, bias, residual, y, dropout, scale };
                        pair.check_exact(&op);
                    }
                    for add in [false, true] {
                        let columns = ColumnShard { first: 2 * cols, all: 3 * cols + 5 };
                        pair.check_exact(&Op::ColumnDropout { x, y, add, dropout, columns });
                    }
                    pair.check_exact(&Op::Dropout { x, y, dropout, scale });
                    pair.check_exact(&Op::Dropout { x, y: x, dropout, scale });
                }
            }
        }
    });
}

#[test]
fn columns_are_summed() {
    in_each_type(|dtype, skew| {
        for (rows, cols) in [(1, 3), (33, 64), (70, 523), (300, 5)] {
            let mut rig = Rig::new(skew);
            let x = rig.put_noise(dtype, (rows, cols), 1);
            let [y, whole] = [dtype, Dtype::F32].map(|dtype| rig.out(dtype, (1, cols)));
            let mut pair = rig.open();
            pair.check(&Op::ColumnSum { x, y }, SUM.0, SUM.1);
            // Sums of multiples of 1/128 are exact in any order.
            pair.check_exact(&Op::ColumnSum { x, y: whole });
        }
    });
}

#[test]
fn a_bias_is_added_to_each_row() {
    if rig::real() {
        return; // launched by hand; tests/tests/cuda.rs tests matmuls and collectives on a GPU
    }
    in_each_type(|dtype, skew| {
        let (rows, cols) = (5, 19);
        let mut rig = Rig::new(skew);
        let (c, bias) = (noise(1, rows * cols), noise(2, cols));
        let (tc, tb) = (rig.put(dtype, (rows, cols), &c), rig.put(Dtype::F32, (1, cols), &bias));
        let sums = rig.open().add_bias(tc, tb);
        for (i, (sum, c)) in sums.iter().zip(&c).enumerate() {
            let want = c + bias[i % cols];
            assert!((sum - want).abs() <= ulp(dtype) * want.abs(), "{sum} {want}");
        }
    });
}

#[test]
fn ranks_are_summed_in_order_and_rounded_once() {
    if rig::real() {
        return; // launched by hand; tests/tests/cuda.rs tests matmuls and collectives on a GPU
    }
    for (ranks, dtype) in [1, 2, 7, 16].into_iter().flat_map(|n| VALUES.map(|dtype| (n, dtype))) {
        for (skew, n) in [(0, 2056), (1, 27)] {
            let mut rig = Rig::new(skew);
            let all: Vec<Vec<f64>> = (0..ranks).map(|r| normal(r, n)).collect();
            let parts: Vec<_> = all.iter().map(|x| rig.put(dtype, (1, n), x)).collect();
            let into = *parts.last().expect("a rank");
            let mut pair = rig.open();
            let all: Vec<Vec<f64>> = parts.iter().map(|t| pair.on_cpu(*t)).collect();
            let sum = |i: usize| all.iter().skip(1).fold(all[0][i] as f32, |s, x| s + x[i] as f32);
            let got = pair.combine(into, &parts, Reduction::Sum);
            let want = (0..n).map(|i| match dtype {
                Dtype::F16 => half::f16::from_f32(sum(i)).to_f64(),
                Dtype::Bf16 => half::bf16::from_f32(sum(i)).to_f64(),
                _ => f64::from(sum(i)),
            });
            assert!(got.into_iter().eq(want), "{ranks} ranks in {dtype:?}");
        }
    }
}

#[test]
fn doubles_of_ranks_are_summed_and_the_largest_is_found() {
    if rig::real() {
        return; // launched by hand; tests/tests/cuda.rs tests matmuls and collectives on a GPU
    }
    let mut rig = Rig::new(0);
    let parts = [1, 2, 3].map(|seed| rig.put(Dtype::F64, (1, 5), &normal(seed, 5)));
    let maxima = [4, 5].map(|seed| rig.put(Dtype::F32, (1, 9), &normal(seed, 9)));
    let mut pair = rig.open();
    let all = parts.map(|t| pair.on_cpu(t));
    let sums: Vec<f64> = (0..5).map(|i| all[0][i] + all[1][i] + all[2][i]).collect();
    assert_eq!(pair.combine(parts[1], &parts, Reduction::Sum), sums);
    let all = maxima.map(|t| pair.on_cpu(t));
    let largest: Vec<f64> = (0..9).map(|i| all[0][i].max(all[1][i])).collect();
    assert_eq!(pair.combine(maxima[0], &maxima, Reduction::Max), largest);
}

#[test]
fn rows_of_tables_are_the_same_bits() {
    let tokens: Vec<i32> = (0..40).map(|i| i * i % 23 - 2).collect();
    let mut order: Vec<i32> = (0..40).collect();
    order.sort_by_key(|&i| tokens[i as usize]);
    in_each_type(|dtype, skew| {
        for (cols, first_row) in [(3, 0), (64, 13), (301, 4)] {
            let shard = VocabShard { first: 4, valid: 9 };
            let mut rig = Rig::new(skew);
            let (ids, order) = (rig.put_ints(&tokens), rig.put_ints(&order));
            let table = rig.put_noise(dtype, (10, cols), 1);
            let y = rig.out(Dtype::F32, (40, cols));
            let d_y = rig.put(dtype, (40, cols), &normal(2, 40 * cols));
            let d_table = rig.put_noise(dtype, (10, cols), 3);
            let positions = rig.put_noise(dtype, (7, cols), 4);
            let d_positions = rig.out(dtype, (7, cols));
            let documents = [3, 4, 1, 1, 5, 7, 7, 2, 2, 3, 7, 7, 4, 3];
            let starts = rig.put_starts(7, &documents, first_row..first_row + 40);
            let mut pair = rig.open();
            for scale in [1.0, 61.96] {
                pair.check_exact(&Op::Embedding { tokens: ids, table, shard, scale, y });
            }
            for starts in [None, Some(starts)] {
                pair.check_exact(&Op::AddPositions { x: y, table: positions, first_row, starts });
                let op = Op::PositionsBackward { d_y, first_row, starts, d_table: d_positions };
                pair.check_exact(&op);
            }
            for scale in [1.0, 61.96] {
                let tokens = ids;
                let op = Op::EmbeddingBackward { tokens, order, d_y, shard, scale, d_table };
                pair.check_exact(&op);
            }
        }
    });
}

#[test]
fn positions_without_a_row_become_zero() {
    let mut rig = Rig::new(0);
    let (d_y, d_table) = (rig.put_noise(Dtype::F16, (3, 40), 1), rig.out(Dtype::Bf16, (8, 40)));
    rig.open().check_exact(&Op::PositionsBackward { d_y, first_row: 6, starts: None, d_table });
}

#[test]
fn the_loss_over_two_shards_agrees() {
    let targets = [0, 600, -1, 300, 151, -100];
    in_each_type(|dtype, skew| {
        let mut rig = Rig::new(skew);
        let rows = targets.len();
        let ids = rig.put_ints(&targets);
        let scale = rig.put(Dtype::F64, (1, 1), &[8.0]);
        let loss = rig.out(Dtype::F64, (1, 1));
        // 601 tokens; 7 columns of padding with huge logits.
        let shards = [(0, 300, 300), (300, 301, 308)].map(|(first, valid, cols)| {
            let values = normal(first as u64, rows * cols);
            let logit = |i: usize| if i % cols < valid { 4.0 * values[i] + 9.0 } else { 1e4 };
            let logits: Vec<f64> = (0..rows * cols).map(logit).collect();
            let logits = rig.put(dtype, (rows, cols), &logits);
            let (max, sums) = (rig.out(Dtype::F32, (1, rows)), rig.out(Dtype::F32, (2, rows)));
            (logits, max, sums, VocabShard { first, valid })
        });
        let mut pair = rig.open();
        for (logits, max, sums, shard) in shards {
            for (step, cap) in [None, Some(30.0)].into_iter().enumerate() {
                // The first step leaves gradients, which the second one scales.
                let (targets, factor, scale_of) = (ids, 0.25, [0.5, 1e3][step]);
                pair.check_exact(&Op::CapLogits { logits, scale: scale_of, cap });
                pair.check_exact(&Op::RowMax { x: logits, y: max, shard });
                let op = Op::CrossEntropyStats { logits, max, targets, shard, sums };
                pair.check(&op, 0.0, 4.0);
                pair.check(&Op::CrossEntropyLoss { sums, targets, loss }, 1e-13, 0.0);
                pair.check_exact(&Op::CrossEntropyBackward {
                    logits,
                    max,
                    sums,
                    targets,
                    shard,
                    scale,
                    factor,
                    cap,
                });
            }
        }
    });
}

#[test]
fn a_loss_over_many_rows_agrees() {
    let rows = 1500;
    let mut rig = Rig::new(0);
    let targets: Vec<i32> = (0..rows).map(|i| i % 90 - 3).collect();
    let sums: Vec<f64> = normal(1, 2 * rows as usize).iter().map(|x| x.abs() + 1.0).collect();
    let targets = rig.put_ints(&targets);
    let sums = rig.put(Dtype::F32, (2, rows as usize), &sums);
    let loss = rig.out(Dtype::F64, (1, 1));
    rig.open().check(&Op::CrossEntropyLoss { sums, targets, loss }, 1e-11, 0.0);
}

#[test]
fn sums_of_squares_are_the_same_bits() {
    in_each_type(|dtype, skew| {
        let first = CountedRange::first;
        for (n, chunk, counted) in [
            (1000, 64, first(777)),
            (1000, 64, CountedRange { end: 900, hole: (300, 711) }),
            (1000, 1, first(1000)),
            (40, 100, first(40)),
            (5000, 300, first(0)),
            // Chunks of several batches of loads.
            (6000, 1500, CountedRange { end: 5600, hole: (700, 3900) }),
            (4000, 1333, first(3900)),
        ] {
            let mut rig = Rig::new(skew);
            let mut values = normal(1, n);
            values[n / 3] = f64::INFINITY;
            let x = rig.put(dtype, (1, n), &values);
            let partials = rig.out(Dtype::F64, (1, n.div_ceil(chunk)));
            rig.open().check_exact(&Op::ChunkSquares { x, partials, chunk, counted });
        }
    });
}

#[test]
fn an_update_is_the_same_bits() {
    let n = 4099;
    let rules = [
        Rule::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 },
        Rule::Sgd { weight_decay: 0.1 },
    ];
    for (dtype, stored) in VALUES.iter().flat_map(|a| VALUES.map(|b| (*a, b))) {
        for (rule, skip) in rules.iter().flat_map(|rule| [(*rule, 0.0), (*rule, 1.0)]) {
            let mut words = [0.0; control::WORDS];
            words[control::SKIP] = skip;
            words[control::FACTOR] = 0.123_456;
            words[control::LR] = 3e-3;
            words[control::MOMENTUM_CORRECTION] = 1.0 / (1.0 - 0.9f64.powi(3));
            words[control::VARIANCE_CORRECTION] = 1.0 / (1.0 - 0.95f64.powi(3));
            let skew = usize::from(dtype == stored);
            let mut rig = Rig::new(skew);
            let mut grad = normal(1, n);
            grad[5] = 1e-41;
            grad[6] = 0.0;
            let grad = rig.put(dtype, (1, n), &grad);
            let [master, momentum] = [2, 3].map(|s| rig.put(Dtype::F32, (1, n), &normal(s, n)));
            let variance: Vec<f64> = normal(4, n).iter().map(|x| x * x * 1e-3).collect();
            let variance = rig.put(Dtype::F32, (1, n), &variance);
            let param = rig.out(stored, (1, n));
            let control = rig.put(Dtype::F64, (1, words.len()), &words);
            let (decayed, noise) = (1234, TileNoise::none());
            let task = DeviceOp::new(DeviceUpdate(AdamTile {
                rule,
                control,
                grad,
                master,
                momentum,
                variance,
                param,
                decayed,
                noise,
            }));
            let mut pair = rig.open();
            for _ in 0..3 {
                pair.check_exact(&Op::Task { task: Arc::clone(&task) });
            }
        }
    }
}

#[test]
fn gates_and_their_gradients_are_the_same_bits() {
    in_each_type(|dtype, skew| {
        for (rows, width) in [(3, 5), (1, 1031), (9, 64), (300, 33)] {
            let mut rig = Rig::new(skew);
            let values: Vec<f64> = normal(1, 2 * rows * width).iter().map(|x| 4.0 * x).collect();
            let x = rig.put(dtype, (rows, 2 * width), &values);
            let (y, d) = (rig.out(dtype, (rows, width)), rig.put_noise(dtype, (rows, width), 2));
            let mut pair = rig.open();
            let clamped = Gate::ClampedSilu { slope: 1.702, limit: 2.0 };
            for gate in [Gate::Silu, Gate::Gelu, clamped] {
                pair.check_exact(&Op::SwiGlu { x, y, gate });
                pair.check_exact(&Op::SwiGluBackward { x, d, gate });
            }
        }
    });
}

#[test]
fn rotations_and_their_gradients_agree() {
    in_each_type(|dtype, skew| {
        // Heads of whole runs of 8 pairs, of parts of one, and of one pair; then heads of which the
        // first elements turn alone, the last with more runs than lanes of half a warp.
        for (rows, (count, kv_count), dim, turned) in [
            (10, (6, 2), 2, 2),
            (35, (3, 1), 10, 10),
            (40, (12, 2), 16, 16),
            (50, (6, 1), 34, 34),
            (15, (5, 5), 80, 80),
            (75, (4, 1), 98, 98),
            (5, (4, 4), 128, 128),
            (15, (2, 1), 256, 256),
            (35, (3, 1), 10, 4),
            (40, (12, 2), 128, 64),
            (15, (5, 5), 80, 78),
            (15, (2, 1), 256, 2),
        ] {
            for offset in [None, Some(0.0), Some(1.0)] {
                let heads = Heads { count, kv_count, first: 0, total: count, seq_len: 5 };
                let columns = (count + 2 * kv_count) * dim;
                let mut rig = Rig::new(skew);
                let angle = |i: usize| (i / turned * (1 + i % (turned / 2))) as f64;
                let is_cosine = |i: usize| i % turned < turned / 2;
                let half = |i: usize| if is_cosine(i) { angle(i).cos() } else { angle(i).sin() };
                let table: Vec<f64> = (0..5 * turned).map(half).collect();
                let table = rig.put(Dtype::F32, (5, turned), &table);
                let qkv = rig.put_noise(dtype, (rows, columns), 1);
                let d_qkv = rig.put_noise(dtype, (rows, columns), 2);
                let (q_gain, k_gain) =
                    (rig.put_noise(dtype, (1, dim), 3), rig.put_noise(dtype, (1, dim), 4));
                let raw = rig.out(dtype, (rows, (count + kv_count) * dim));
                let grads = HeadNormGrads {
                    q_gain: rig.out(dtype, (1, dim)),
                    k_gain: rig.out(dtype, (1, dim)),
                };
                let epsilon = 1e-6;
                let norm = offset.map(|offset| HeadNorm { q_gain, k_gain, raw, epsilon, offset });
                let factors = f64::from(1.0 + offset.unwrap_or(0.0));
                let starts = rig.put_starts(5, &[2, 3, 1, 4].repeat(rows / 5), 0..rows);
                let mut pair = rig.open();
                for starts in [None, Some(starts)] {
                    let op = Op::Rotary { qkv, table, heads, starts, norm };
                    pair.check(&op, 4e-7 * factors, 1.0);
                    let norm = norm.map(|norm| (norm, grads));
                    let op = Op::RotaryBackward { d_qkv, table, heads, starts, norm };
                    pair.check(&op, 2e-5 * factors, 1.0);
                }
            }
        }
    });
}
