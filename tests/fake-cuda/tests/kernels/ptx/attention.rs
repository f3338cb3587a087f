//! Attention: portable, on tensor cores, and to the KV cache.

use super::kernels_of;
use crate::attention::check_sinks;
use crate::rig::{Rig, VALUES, nvrtc_or_skip, take_ran};
use crate::{DROPOUT, NO_DROPOUT};
use device::{Dtype, Heads, Op, Scores};

/// Runs attention and its gradients for heads of `dim`; its kernels with this prefix must run.
fn attention(sm: u32, dim: usize, types: &[Dtype], prefix: &str, bound: f64) {
    attention_with(sm, Scores::of(dim), dim, types, prefix, bound);
}

fn attention_with(sm: u32, scores: Scores, dim: usize, types: &[Dtype], prefix: &str, bound: f64) {
    if !nvrtc_or_skip() {
        return;
    }
    for (i, &dtype) in types.iter().enumerate() {
        let heads = Heads { count: 2, kv_count: 1, first: 1, total: 4, seq_len: 70 };
        let (rows, width, all) = (heads.seq_len, 2 * dim, 4 * dim);
        let mut rig = Rig::compiled(i % 2, sm, bound);
        let qkv = rig.put_noise(dtype, (rows, all), 1);
        let d_out = rig.put_noise(dtype, (rows, width), 2);
        let (out, d_qkv) = (rig.out(dtype, (rows, width)), rig.out(dtype, (rows, all)));
        let lse = rig.out(Dtype::F32, (heads.count, heads.seq_len));
        let starts = (i > 0).then(|| rig.put_starts(heads.seq_len, &[10, 57, 3], 0..rows));
        let dropout = if i > 1 { DROPOUT } else { NO_DROPOUT };
        let mut pair = rig.open();
        // The cpu backend does not round weights of tensor cores more than other weights.
        let rounded = if prefix == "attention_" && sm < 80 { 1e-6 } else { 1.0 / 128.0 };
        pair.check(&Op::Attention { qkv, out, lse, heads, starts, dropout, scores }, rounded, 1.0);
        let op =
            Op::AttentionBackward { qkv, out, lse, d_out, d_qkv, heads, starts, dropout, scores };
        pair.check(&op, 8.0 * rounded, 2.0);
    }
    let ran = take_ran();
    let size = if dim <= 64 {
        "64"
    } else if dim <= 128 {
        "128"
    } else {
        "256"
    };
    // Kernels by queries are the same if shared memory is small.
    for part in ["", "queries_", "keys_"] {
        let of_part = if part == "queries_" { prefix.replace("small_", "") } else { prefix.into() };
        let kernel = format!("{of_part}{part}{size}");
        assert!(ran.contains_key(&kernel), "{kernel} did not run");
    }
    assert!(ran.contains_key("attention_delta"));
}

#[test]
fn attention_of_heads_of_64() {
    attention(75, 64, &VALUES, "attention_", 2e-7);
    attention(75, 10, &VALUES[1..2], "attention_", 2e-7);
}

#[test]
fn attention_of_heads_of_128() {
    attention(75, 80, &VALUES[1..], "attention_", 2e-7);
}

#[test]
fn attention_of_heads_of_256() {
    attention(70, 136, &VALUES[1..2], "attention_", 2e-7);
    attention(80, 136, &VALUES[..1], "attention_", 2e-7);
}

#[test]
fn attention_on_tensor_cores() {
    for dim in [64, 24, 128, 80] {
        let types = [Dtype::Bf16, Dtype::F16, Dtype::F16];
        attention(80, dim, &types[..if dim % 64 == 0 { 3 } else { 1 }], "attention_mma_", 2e-6);
    }
}

#[test]
fn attention_on_tensor_cores_with_small_shared_memory() {
    let types = [Dtype::Bf16, Dtype::F16, Dtype::F16];
    attention(89, 128, &types, "attention_mma_small_", 2e-6);
    let scores = Scores { scale: 0.25, cap: Some(2.0), window: Some(20) };
    attention_with(89, scores, 80, &types[..2], "attention_mma_capped_small_", 2e-6);
}

#[test]
fn attention_on_tensor_cores_of_heads_of_256() {
    attention(80, 256, &[Dtype::Bf16, Dtype::F16, Dtype::F16], "attention_mma_", 2e-6);
    attention(80, 136, &[Dtype::Bf16], "attention_mma_", 2e-6);
}

#[test]
fn attention_in_windows() {
    for (sm, dim, dtype, prefix) in [
        (80, 64, Dtype::Bf16, "attention_mma_"),
        (80, 128, Dtype::F16, "attention_mma_"),
        (80, 256, Dtype::Bf16, "attention_mma_"),
        (70, 64, Dtype::F16, "attention_volta_"),
        (75, 64, Dtype::F32, "attention_"),
    ] {
        let scores = Scores { window: Some(20), ..Scores::of(dim) };
        let bound = if sm == 75 { 2e-7 } else { 2e-6 };
        attention_with(sm, scores, dim, &[dtype; 2], prefix, bound);
    }
}

#[test]
fn attention_with_caps() {
    let scores = Scores { scale: 0.25, cap: Some(2.0), window: None };
    attention_with(75, scores, 64, &[Dtype::F32], "attention_", 2e-7);
    let types = [Dtype::Bf16, Dtype::F16, Dtype::F16];
    for (dim, window) in [(64, None), (128, Some(20)), (256, Some(20))] {
        let scores = Scores { window, ..scores };
        attention_with(80, scores, dim, &types, "attention_mma_capped_", 2e-6);
    }
}

#[test]
fn attention_on_tensor_cores_of_volta() {
    for dim in [64, 24, 128, 80] {
        let samples = if dim % 64 == 0 { 3 } else { 1 };
        attention(70, dim, &[Dtype::F16; 3][..samples], "attention_volta_", 2e-6);
    }
}

#[test]
fn attention_to_what_is_kept_and_the_last_columns() {
    if !nvrtc_or_skip() {
        return;
    }
    for (sm, dtype) in [70, 80].into_iter().flat_map(|sm| VALUES.map(|dtype| (sm, dtype))) {
        for (n, count, kv_count, dim) in [(7, 6, 2, 10), (33, 2, 1, 256)] {
            let heads = Heads { count, kv_count, first: 0, total: count, seq_len: 1 };
            let mut rig = Rig::compiled(n % 2, sm, 0.0);
            let q = rig.put_noise(dtype, (1, count * dim), 1);
            let cache = rig.put_noise(dtype, (n, 2 * kv_count * dim), 2);
            let out = rig.out(dtype, (1, count * dim));
            let last = rig.out(dtype, (n, kv_count * dim));
            let sinks = rig.put_noise(dtype, (1, count), 3);
            let mut pair = rig.open();
            let scores = Scores::of(dim);
            for sinks in [None, Some(sinks)] {
                let op = Op::CachedAttention { q, cache, out, heads, scores, sinks };
                pair.check(&op, 2e-6, 1.0);
            }
            pair.launched(&Op::LastColumns { x: cache, y: last }, last);
        }
    }
    let ran = take_ran();
    assert!(ran.contains_key("cached_attention") && ran.contains_key("last_columns"));
}

#[test]
fn sinks_of_attention() {
    if !nvrtc_or_skip() {
        return;
    }
    for (sm, dtype) in [70, 80].into_iter().flat_map(|sm| VALUES.map(|dtype| (sm, dtype))) {
        check_sinks(Rig::compiled(1, sm, 2e-7), dtype, [2, 9, 3, 10]);
        check_sinks(Rig::compiled(0, sm, 2e-7), dtype, [1, 35, 2, 64]);
    }
    let ran = take_ran();
    let all = ["attention_sinks", "attention_sinks_backward"];
    assert!(all.iter().all(|kernel| ran.contains_key(*kernel)));
}

#[test]
fn these_are_all_kernels_of_attention() {
    let count = |file| kernels_of(file).len();
    // Delta, sinks and their gradient, the KV cache, the last columns; forward, queries and keys of 64, 128 and 256, on Volta
    // of 64 and 128; forward and keys of 128 for small shared memory.
    assert_eq!((count("attention.cu"), count("attention_mma.cu")), (5 + 9, 9 + 6 + 2));
    assert_eq!(count("attention_mma_capped.cu"), 9 + 2);
}
