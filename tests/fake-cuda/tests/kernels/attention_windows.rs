//! Attention of wide heads, in windows, with caps and with other scales: portable and on tensor
//! cores.

use super::rig::{self, Rig, VALUES, noise};
use super::{DROPOUT, NO_DROPOUT, in_each_type};
use device::cuda::testing;
use device::{Arena, Dropout, Dtype, Heads, Op, Plan, Scores};
use std::collections::HashMap;

/// Samples of attention.
struct AttentionCase {
    seq_len: usize,
    /// Heads of queries, and of keys and values.
    heads: [usize; 2],
    dim: usize,
    /// Lengths of the documents of all samples. Empty: one sample of one document.
    documents: &'static [usize],
    scores: Scores,
}

impl AttentionCase {
    const fn new(seq_len: usize, heads: [usize; 2], dim: usize, scores: Scores) -> Self {
        Self { seq_len, heads, dim, documents: &[], scores }
    }
}

fn in_window(dim: usize, window: usize) -> Scores {
    Scores { window: Some(window), ..Scores::of(dim) }
}

/// Windows around the rows of slabs (16 or 32) and of tiles (64). With a window of 34 or 66 the first
/// query of a tile sees only the last key of a slab, or of a tile.
fn windows_of(dim: usize) -> Vec<AttentionCase> {
    let shared = [2, 1];
    vec![
        AttentionCase::new(40, shared, dim, in_window(dim, 1)),
        AttentionCase::new(140, shared, dim, in_window(dim, 5)),
        AttentionCase::new(131, [2, 2], dim, in_window(dim, 16)),
        AttentionCase::new(150, shared, dim, in_window(dim, 17)),
        AttentionCase::new(200, shared, dim, in_window(dim, 64)),
        AttentionCase::new(200, shared, dim, in_window(dim, 66)),
        AttentionCase::new(260, [1, 1], dim, in_window(dim, 129)),
        AttentionCase::new(70, shared, dim, in_window(dim, 71)),
        AttentionCase {
            documents: &[5, 90, 35, 64, 66],
            ..AttentionCase::new(130, shared, dim, in_window(dim, 34))
        },
        AttentionCase {
            documents: &[129, 71, 3, 197],
            ..AttentionCase::new(200, shared, dim, in_window(dim, 100))
        },
    ]
}

/// Heads of more than 128 elements without a window.
fn wide_heads() -> Vec<AttentionCase> {
    vec![
        AttentionCase::new(130, [2, 1], 136, Scores::of(136)),
        AttentionCase::new(67, [6, 2], 192, Scores::of(192)),
        AttentionCase::new(33, [2, 2], 250, Scores::of(250)),
        AttentionCase::new(200, [2, 1], 256, Scores::of(256)),
        AttentionCase::new(1, [1, 1], 256, Scores::of(256)),
        AttentionCase {
            documents: &[30, 40, 1, 69],
            ..AttentionCase::new(70, [2, 2], 192, Scores::of(192))
        },
        AttentionCase {
            documents: &[64, 64, 72, 197, 3],
            ..AttentionCase::new(200, [2, 1], 256, Scores::of(256))
        },
        AttentionCase::new(70, [2, 1], 256, Scores { scale: 0.03, ..Scores::of(256) }),
    ]
}

/// Caps, and scales other than 1 / sqrt(D).
fn capped_scores() -> Vec<AttentionCase> {
    let capped = |scale, cap| Scores { scale, cap: Some(cap), window: None };
    vec![
        AttentionCase::new(70, [2, 1], 64, capped(0.2, 2.0)),
        AttentionCase::new(131, [2, 1], 24, capped(0.3, 50.0)),
        AttentionCase::new(67, [2, 2], 128, Scores { scale: 0.05, ..Scores::of(128) }),
        AttentionCase::new(66, [2, 1], 256, capped(0.0625, 1.5)),
        AttentionCase::new(130, [2, 1], 80, Scores { window: Some(40), ..capped(0.2, 3.0) }),
        AttentionCase {
            documents: &[9, 61, 70],
            ..AttentionCase::new(70, [2, 1], 200, Scores { window: Some(12), ..capped(0.1, 3.0) })
        },
    ]
}

/// Low caps, so that tanh bends most scores, in windows and in documents.
fn capped_heads_of(dim: usize) -> Vec<AttentionCase> {
    let capped = |cap, window| Scores { cap: Some(cap), window, ..Scores::of(dim) };
    vec![
        AttentionCase::new(131, [3, 1], dim, capped(1.5, None)),
        AttentionCase::new(40, [2, 2], dim, capped(30.0, Some(1))),
        AttentionCase::new(200, [2, 1], dim, capped(2.0, Some(66))),
        AttentionCase {
            documents: &[64, 64, 2, 127, 3],
            ..AttentionCase::new(130, [2, 1], dim, capped(1.0, None))
        },
        AttentionCase {
            documents: &[5, 90, 35, 64, 66],
            ..AttentionCase::new(130, [2, 1], dim, capped(2.0, Some(34)))
        },
    ]
}

/// Compares attention and its gradients with the cpu backend. `near`: tolerances forward and
/// backward, each an absolute difference and a number of units in the last place.
fn check(
    sm: u32,
    case: &AttentionCase,
    dtype: Dtype,
    dropout: Dropout,
    skew: usize,
    near: [(f64, f64); 2],
) {
    let &AttentionCase { seq_len, heads: [count, kv_count], dim, documents, scores } = case;
    let samples = documents.iter().sum::<usize>().div_ceil(seq_len).max(1);
    let heads = Heads { count, kv_count, first: 1, total: count + 2, seq_len };
    let (rows, width, all) = (samples * seq_len, count * dim, (count + 2 * kv_count) * dim);
    let dropout = Dropout { first_row: 3 * seq_len as u64, ..dropout };
    let mut rig = Rig::new(skew);
    rig.sm = sm;
    let qkv: Vec<f64> = noise(1, rows * all).iter().map(|x| 2.0 * x).collect();
    let qkv = rig.put(dtype, (rows, all), &qkv);
    let d_out = rig.put_noise(dtype, (rows, width), 2);
    let (out, d_qkv) = (rig.out(dtype, (rows, width)), rig.out(dtype, (rows, all)));
    let lse = rig.out(Dtype::F32, (samples * count, seq_len));
    let starts = (!documents.is_empty()).then(|| rig.put_starts(seq_len, documents, 0..rows));
    let mut pair = rig.open();
    let [forward, backward] = near;
    let op = Op::Attention { qkv, out, lse, heads, starts, dropout, scores };
    pair.check(&op, forward.0, forward.1);
    let op = Op::AttentionBackward { qkv, out, lse, d_out, d_qkv, heads, starts, dropout, scores };
    // Gradients of keys and values are sums over the heads that share them.
    pair.check(&op, backward.0 * heads.group() as f64, backward.1);
}

/// Checks each case in each type on tensor cores, one type with dropout. Weights and gradients of
/// scores are rounded to the type.
fn check_on_tensor_cores(sm: u32, types: &[Dtype], cases: &[AttentionCase]) {
    for (i, case) in cases.iter().enumerate() {
        for (j, &dtype) in types.iter().enumerate() {
            let dropout = if (i + j) % 2 == 0 { NO_DROPOUT } else { DROPOUT };
            let unit = if dtype == Dtype::Bf16 { 1.0 / 256.0 } else { 1.0 / 2048.0 };
            check(sm, case, dtype, dropout, i % 2, [(2.0 * unit, 1.0), (8.0 * unit, 2.0)]);
        }
    }
}

const HALVES: [Dtype; 2] = [Dtype::Bf16, Dtype::F16];

#[test]
fn wide_heads_on_tensor_cores_agree() {
    check_on_tensor_cores(80, &HALVES, &wide_heads());
}

#[test]
fn windows_of_wide_heads_on_tensor_cores_agree() {
    check_on_tensor_cores(80, &HALVES, &windows_of(256));
}

#[test]
fn windows_on_tensor_cores_agree() {
    check_on_tensor_cores(80, &HALVES, &windows_of(64));
    check_on_tensor_cores(80, &HALVES, &windows_of(128));
}

/// Samples of one and of several blocks and slabs, heads that share keys, documents, windows and caps.
#[test]
fn heads_of_128_with_small_shared_memory_agree() {
    let scores = Scores::of(128);
    let whole = [(1, [1, 1]), (33, [2, 2]), (64, [2, 1]), (131, [4, 1])]
        .map(|(seq_len, heads)| AttentionCase::new(seq_len, heads, 128, scores));
    check_on_tensor_cores(86, &HALVES, &whole);
    let narrower = AttentionCase::new(97, [3, 1], 80, Scores::of(80));
    check_on_tensor_cores(89, &HALVES, &[narrower]);
    check_on_tensor_cores(89, &HALVES, &windows_of(128));
    check_on_tensor_cores(120, &HALVES, &capped_heads_of(128));
}

#[test]
fn windows_on_tensor_cores_of_volta_agree() {
    check_on_tensor_cores(70, &[Dtype::F16], &windows_of(64));
    check_on_tensor_cores(70, &[Dtype::F16], &windows_of(128));
}

#[test]
fn windows_on_portable_kernels_agree() {
    // A GPU uses its own kernels for 16 bits.
    let types = if rig::real() { &VALUES[..1] } else { &VALUES[..] };
    for (i, case) in [24, 128, 256].into_iter().flat_map(windows_of).enumerate() {
        let dropout = if i % 2 == 0 { NO_DROPOUT } else { DROPOUT };
        let dtype = types[i % types.len()];
        check(75, &case, dtype, dropout, i % 2, [(5e-7, 1.0), (2e-6, 1.0)]);
    }
}

/// Sharp weights make more of the rounding of scores than the usual scale does.
#[test]
fn caps_and_scales_agree() {
    for (i, case) in capped_scores().iter().enumerate() {
        for dropout in [NO_DROPOUT, DROPOUT] {
            // A GPU uses its own kernels for 16 bits.
            let types = if rig::real() { &VALUES[..1] } else { &VALUES[..2] };
            for &dtype in types {
                check(75, case, dtype, dropout, i % 2, [(4e-6, 1.0), (2e-5, 1.0)]);
            }
        }
    }
}

#[test]
fn caps_on_tensor_cores_agree() {
    check_on_tensor_cores(80, &HALVES, &capped_heads_of(64));
    check_on_tensor_cores(80, &HALVES, &capped_heads_of(128));
    // Heads narrower than their kernels.
    check_on_tensor_cores(80, &HALVES, &capped_heads_of(24));
}

#[test]
fn caps_of_wide_heads_on_tensor_cores_agree() {
    check_on_tensor_cores(80, &HALVES, &capped_heads_of(256));
    check_on_tensor_cores(80, &HALVES[..1], &capped_heads_of(136));
}

#[test]
fn capped_attention_to_what_is_kept_agrees() {
    in_each_type(|dtype, skew| {
        for (n, count, kv_count, dim) in [(1, 2, 2, 3), (100, 3, 1, 64), (20, 2, 1, 256)] {
            let heads = Heads { count, kv_count, first: 0, total: count, seq_len: 1 };
            let mut rig = Rig::new(skew);
            let q = rig.put_noise(dtype, (1, count * dim), 1);
            let cache = rig.put_noise(dtype, (n, 2 * kv_count * dim), 2);
            let out = rig.out(dtype, (1, count * dim));
            let mut pair = rig.open();
            for cap in [None, Some(1.5), Some(30.0)] {
                let scores = Scores { scale: 0.5, cap, window: None };
                let sinks = None;
                let op = Op::CachedAttention { q, cache, out, heads, scores, sinks };
                pair.check(&op, 8e-6, 1.0);
            }
        }
    });
}

/// Bytes of shared memory that a block can have, by compute capability (NVIDIA's programming guide,
/// table of technical specifications).
const SHARED_BYTES: [(u32, u32); 8] = [
    (70, 96 << 10),
    (75, 64 << 10),
    (80, 163 << 10),
    (86, 99 << 10),
    (89, 99 << 10),
    (90, 227 << 10),
    (100, 227 << 10),
    (120, 99 << 10),
];

/// Registers of each kernel by name and compute capability, as NVRTC compiles it (the page of
/// estimates, which another test compares with the sources).
fn registers_of_kernels(page: &str) -> HashMap<(&str, u32), u32> {
    let rows = page.lines().filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |"));
    let mut rows = rows.map(|row| row.split(" | ").collect::<Vec<_>>());
    let head = rows.find(|row| row[0] == "kernel").unwrap_or_default();
    let sm: Vec<Option<u32>> =
        head.iter().map(|cell| cell.strip_prefix("sm_")?.parse().ok()).collect();
    let rows = rows.take_while(|row| row[0] != "config");
    let cells = rows.flat_map(|row| {
        let of_row = row[1..].iter().zip(&sm[1..]);
        let of_row = of_row.filter_map(|(cell, sm)| Some(((*sm)?, cell.parse().ok()?)));
        of_row.map(|(sm, registers)| ((row[0], sm), registers)).collect::<Vec<_>>()
    });
    cells.collect()
}

#[test]
fn every_gpu_has_its_attention_kernels_and_their_shared_memory() {
    let compiled = registers_of_kernels(include_str!("../../../../benchmarks/kernels.md"));
    assert!(compiled.contains_key(&("attention_mma_small_128", 89)), "{compiled:?}");
    for dim in [8, 64, 72, 128, 136, 256] {
        let (seq_len, cap) = (300, Some(30.0));
        let heads = Heads { count: 1, kv_count: 1, first: 0, total: 1, seq_len };
        let mut plan = Plan::default();
        let mut tensor = |dtype, shape| plan.tensor((Arena::Device, "test"), "t", dtype, shape);
        let [out, d_out] = [(); 2].map(|()| tensor(Dtype::F16, (seq_len, dim)));
        let [qkv, d_qkv] = [(); 2].map(|()| tensor(Dtype::F16, (seq_len, 3 * dim)));
        let lse = tensor(Dtype::F32, (1, seq_len));
        let (starts, dropout) = (None, NO_DROPOUT);
        for (sm, most) in SHARED_BYTES {
            for scores in [Scores::of(dim), Scores { cap, ..Scores::of(dim) }] {
                let forward = Op::Attention { qkv, out, lse, heads, starts, dropout, scores };
                let backward = Op::AttentionBackward {
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
                for op in [forward, backward] {
                    let at = |t: device::Tensor| t.range().start;
                    let launches = testing::launches(&op, &at, 0, sm).expect("kernels");
                    for launch in launches.iter().filter(|l| l.kernel != "attention_delta") {
                        let name = launch.kernel;
                        assert!(launch.shared_bytes <= most, "{name} on sm_{sm}: {launch:?}");
                        let capped = scores.cap.is_some();
                        let products = sm >= 80 || (sm == 70 && dim <= 128 && !capped);
                        let of_tensor_cores = name.contains("_mma_") || name.contains("_volta_");
                        assert_eq!(of_tensor_cores, products, "{name}, {dim} elements, sm_{sm}");
                        let of_caps = name.contains("_capped_");
                        assert_eq!(of_caps, products && capped, "{name}, {dim} elements, sm_{sm}");
                        let by_queries = name.contains("_queries_");
                        let small = most == 99 << 10 && (65..=128).contains(&dim) && !by_queries;
                        assert_eq!(name.contains("_small_"), small, "{name}, {dim}, sm_{sm}");
                        // A kernel that has no code for this GPU ends at once, with 4 registers.
                        if let Some(registers) = compiled.get(&(name, sm)) {
                            assert!(*registers > 64, "{name} on sm_{sm}: {registers} registers");
                        }
                        // Two blocks share a multiprocessor, which keeps 1 KiB for each.
                        if products && sm >= 80 && dim <= 128 {
                            assert!(launch.shared_bytes <= most / 2 - 512, "{name} on sm_{sm}");
                        }
                    }
                }
            }
        }
    }
}
