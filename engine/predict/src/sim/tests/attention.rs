//! The time of attention.

use super::{near, pair, rank_of, record};
use crate::sim::{Hardware, simulate};
use device::{Arena, Dtype, Lane, Op, Plan, Scores};
use std::sync::Arc;

/// Seconds of attention forward and backward: 1024 tokens, and 16 query heads of 128 columns.
fn seconds_of_attention(
    dtype: Dtype,
    kv_count: usize,
    window: Option<usize>,
    set: impl FnOnce(&mut Hardware),
) -> [f64; 2] {
    seconds_of_heads(128, Scores { window, ..Scores::of(128) }, dtype, kv_count, set)
}

/// The same for heads of `dim` columns.
fn seconds_of_heads(
    dim: usize,
    scores: Scores,
    dtype: Dtype,
    kv_count: usize,
    set: impl FnOnce(&mut Hardware),
) -> [f64; 2] {
    let (tokens, count) = (1024, 16);
    let mut plan = Plan::default();
    let on_device = (Arena::Device, "p");
    let all = (tokens, (count + 2 * kv_count) * dim);
    let qkv = plan.tensor(on_device, "qkv", dtype, all);
    let out = plan.tensor(on_device, "out", dtype, (tokens, count * dim));
    let lse = plan.tensor(on_device, "lse", Dtype::F32, (1, count * tokens));
    let d_out = plan.tensor(on_device, "d_out", dtype, (tokens, count * dim));
    let d_qkv = plan.tensor(on_device, "d_qkv", dtype, all);
    let heads = device::Heads { count, kv_count, first: 0, total: count, seq_len: tokens };
    let dropout = device::Dropout { p: 0.0, key: 0, first_row: 0 };
    let program = record(rank_of(1, 1), &Arc::new(plan), |d| {
        [qkv, d_out].into_iter().try_for_each(|t| d.write(t, &|_| 0.0))?;
        d.begin_step(1);
        d.submit(
            Lane::Compute,
            Op::Attention { qkv, out, lse, heads, starts: None, dropout, scores },
        );
        let backward = Op::AttentionBackward {
            qkv,
            out,
            lse,
            d_out,
            d_qkv,
            heads,
            starts: None,
            dropout,
            scores,
        };
        d.submit(Lane::Compute, backward);
        d.sync_all()
    });
    let mut hardware = pair();
    set(&mut hardware);
    let timeline = simulate(program.unwrap(), &hardware, 1, 1, true);
    let spans: Vec<f64> = timeline.played(0).map(|p| p.end - p.start).collect();
    [spans[0], spans[1]]
}

#[test]
fn attention_costs_what_its_kernel_executes() {
    let square = 16.0 * 1024.0 * 1024.0 * 128.0;
    // Two matmuls forward and seven backward, of 136 of 256 tiles; one launch and three launches.
    let flops = [2.0, 7.0].map(|products| 2.0 * products * square * 136.0 / 256.0);
    let fp32 = [2e-6 + flops[0] / (0.38 * 10e12), 6e-6 + flops[1] / (0.38 * 10e12)];
    // 80 multiprocessors of 64 lanes at 10 TFLOPS run at 0.977 GHz. A matmul takes 3.2 clocks of
    // tensor cores. The cost is the largest clocks (shared memory's on a V100) and 0.45 of the other
    // clocks. 460 and 200 tokens are as long as starting and ending the blocks of 1024.
    let clocks = |least: [f64; 2], all: [f64; 2]| {
        let short = [1484.0 / 1024.0, 1224.0 / 1024.0];
        let clocks = [0, 1].map(|pass| (0.55 * least[pass] + 0.45 * all[pass]) * short[pass]);
        [0, 1].map(|pass| {
            let launches = [2e-6, 6e-6][pass];
            launches + flops[pass] / 4096.0 * clocks[pass] / (80.0 * 10e12 / (2.0 * 64.0 * 80.0))
        })
    };
    let a100 = clocks([3.2; 2], [3.2 + 1.86 + 1.75 + 0.64, 3.2 + 2.55 + 1.60 + 0.81]);
    let v100 = clocks([4.71, 5.34], [3.2 + 4.71 + 3.23 + 2.16, 3.2 + 5.34 + 2.12 + 1.40]);
    // Query heads that share keys and values compute as much.
    for ((dtype, sm, want), kv_count) in [
        (Dtype::F16, 75, fp32),
        (Dtype::F16, 0, fp32),
        (Dtype::F16, 80, a100),
        (Dtype::F16, 70, v100),
        (Dtype::F32, 80, fp32),
    ]
    .into_iter()
    .flat_map(|case| [(case, 16), (case, 2)])
    {
        let got = seconds_of_attention(dtype, kv_count, None, |h| h.gpu.sm = sm);
        got.into_iter().zip(want).for_each(|(got, want)| near(got, want));
    }
    // Blocks of 128 queries of one head: 8, on 80 multiprocessors or on 8.
    let few = |sm, processors| {
        seconds_of_attention(Dtype::F16, 16, None, |h| {
            (h.gpu.sm, h.gpu.processors) = (sm, processors);
            h.gpu.flops_32 = 10e12 / 80.0 * processors as f64;
            h.gpu.flops_16 = 100e12 / 80.0 * processors as f64;
        })
    };
    near(few(80, 128)[0], few(80, 1000)[0]);
    assert!(few(80, 127)[0] > few(80, 128)[0]);
    // Blocks of 64 queries, if shared memory is small: 16.
    near(few(89, 256)[0], few(89, 1000)[0]);
    assert!(few(89, 255)[0] > few(89, 256)[0]);
}

#[test]
fn wide_heads_and_capped_scores_have_clocks_of_their_own_from_sm_80_on() {
    let short = [1484.0 / 1024.0, 1224.0 / 1024.0];
    let launches = [2e-6, 6e-6];
    let flops = |dim| {
        let square = 16.0 * 1024.0 * 1024.0 * f64::from(dim);
        [2.0, 7.0].map(|products| 2.0 * products * square * 136.0 / 256.0)
    };
    // Clocks as in attention_costs_what_its_kernel_executes, for multiprocessors of so many lanes.
    let seconds_on = |lanes, dim, beside: [[f64; 3]; 2]| {
        let (clock, product) = (10e12 / (2.0 * lanes * 80.0), 3.2 * 64.0 / lanes);
        [0, 1].map(|pass| {
            let all = product + beside[pass].iter().sum::<f64>();
            let greatest = beside[pass].into_iter().fold(product, f64::max);
            let clocks = (0.55 * greatest + 0.45 * all) * short[pass];
            launches[pass] + flops(dim)[pass] / 4096.0 * clocks / (80.0 * clock)
        })
    };
    let seconds = |dim, beside| seconds_on(64.0, dim, beside);
    let fp32 = |dim| [0, 1].map(|pass| launches[pass] + flops(dim)[pass] / (0.38 * 10e12));
    let wide = seconds(256, [[2.40, 2.04, 1.33], [2.83, 1.62, 1.51]]);
    let capped = seconds(128, [[1.86, 4.20, 0.64], [2.62, 3.18, 0.81]]);
    let small = seconds_on(128.0, 128, [[2.64, 2.07, 1.28], [2.53, 1.56, 1.16]]);
    let small_capped = seconds_on(128.0, 128, [[2.64, 4.51, 1.28], [2.62, 3.16, 1.16]]);
    let narrow = seconds_on(128.0, 64, [[1.86, 1.75, 0.64], [2.55, 1.60, 0.81]]);
    let wide_capped = seconds(256, [[2.40, 3.26, 1.33], [2.87, 2.47, 1.51]]);
    for (dim, sm, cap, want) in [
        (256, 80, None, wide),
        (192, 80, None, wide),
        (128, 80, Some(50.0), capped),
        (256, 80, Some(50.0), wide_capped),
        // A multiprocessor with 100 KiB of shared memory has kernels of its own for heads of 128.
        (128, 86, None, small),
        (128, 89, Some(50.0), small_capped),
        (64, 89, None, narrow),
        (128, 70, Some(50.0), fp32(128)),
        (128, 75, Some(50.0), fp32(128)),
        (256, 70, None, fp32(256)),
        (256, 75, None, fp32(256)),
    ] {
        let scores = Scores { cap, ..Scores::of(dim) };
        let set = |h: &mut Hardware| h.gpu.sm = sm;
        let got = seconds_of_heads(dim, scores, Dtype::F16, 16, set);
        got.into_iter().zip(want).for_each(|(got, want)| near(got, want));
    }
}

#[test]
fn attention_in_a_window_costs_the_tiles_of_the_window() {
    // 31 of 136 tiles: that of a query and the one before.
    for sm in [75, 80, 70] {
        let of = |window| {
            seconds_of_attention(Dtype::F16, 16, window, |h| {
                // Memory takes no time.
                (h.gpu.sm, h.gpu.memory) = (sm, 1e18);
            })
        };
        let (whole, narrow, wide) = (of(None), of(Some(65)), of(Some(1024)));
        assert_eq!(whole, wide);
        // Blocks with fewer keys start and end as often, except in the kernels without tensor cores.
        let pairs = 65.0 * 66.0 / 2.0 + (1024.0 - 65.0) * 65.0;
        let length = 2.0 * pairs / 1024.0;
        for (pass, launches) in [2e-6, 6e-6].into_iter().enumerate() {
            let short = [460.0, 200.0][pass];
            let slower = match sm {
                75 => 1.0,
                _ => (1.0 + short / length) / (1.0 + short / 1024.0),
            };
            near(narrow[pass] - launches, (whole[pass] - launches) * slower * 31.0 / 136.0);
        }
    }
}

#[test]
fn shared_heads_of_keys_and_values_are_read_and_written_once() {
    for kv_count in [16, 2] {
        let got = seconds_of_attention(Dtype::F16, kv_count, None, |h| h.gpu.memory = 1e9);
        let (out, lse) = ((1024 * 16 * 128 * 2) as f64, (1024 * 16 * 4) as f64);
        let qkv = out * (16 + 2 * kv_count) as f64 / 16.0;
        let bytes = [qkv + out + lse, 2.0 * qkv + 2.0 * out + lse];
        let fixed = [2e-6, 6e-6];
        for (got, (bytes, fixed)) in got.into_iter().zip(bytes.into_iter().zip(fixed)) {
            near(got, fixed + bytes / (0.88 * 1e9));
        }
    }
}
