//! Every CUDA kernel as NVRTC compiles it, run by the interpreter of PTX. No access is at fault.
//! The results equal those of the same kernel compiled as C++ and, within the bounds of
//! `kernels.rs`, those of the cpu backend.
//!
//! The bits are the same except for two kinds of kernels: kernels in which the C library's `logf`
//! or `log` replaces CUDA's, and kernels in which `ex2.approx` flushes subnormals. These kernels
//! are compared within a bound.

#![expect(clippy::expect_used, reason = "a test")]

use super::DROPOUT;
use super::rig::{Rig, VALUES, normal, nvrtc_or_skip, take_ran};
use device::numerics::CountedRange;
use device::{
    ColumnShard, DeviceOp, Dtype, Gate, HeadNorm, HeadNormGrads, Heads, Op, Reduction, Tensor,
    VocabShard, WidthNorm,
};
use offload::{AdamTile, DeviceUpdate, Rule, TileNoise, control};

#[path = "ptx/attention.rs"]
mod attention;
#[path = "ptx/delta.rs"]
mod delta;
#[path = "ptx/experts.rs"]
mod experts;
#[path = "ptx/faults.rs"]
mod faults;

/// Runs `test` for each GPU generation, type and alignment; all kernels of the files must run. `files`:
/// their names, with a space between two.
fn every_kernel_of(files: &str, test: impl Fn(&dyn Fn() -> Rig, Dtype)) {
    if !nvrtc_or_skip() {
        return;
    }
    for (sm, skew) in [(70, 1), (80, 0), (80, 1)] {
        for dtype in VALUES {
            let rig = || Rig::compiled(skew, sm, 0.0);
            test(&rig, dtype);
        }
    }
    let ran = take_ran();
    for kernel in files.split(' ').flat_map(kernels_of) {
        assert!(ran.contains_key(kernel), "{kernel} did not run");
    }
}

/// The names after `KERNEL(256) ` in a file of kernels.
fn kernels_of(file: &str) -> Vec<&'static str> {
    let mut all = device::cuda::testing::PROGRAMS.iter().chain(offload::PROGRAMS);
    let program = all.find(|program| program.name == file).expect("a file of kernels");
    let parts = program.source.split("\nKERNEL(").skip(1);
    parts.map(|rest| rest.split([' ', '(']).nth(1).expect("a name")).collect()
}

#[test]
fn elementwise_kernels() {
    every_kernel_of("elementwise.cu", |rig, dtype| {
        for n in [7, 2051] {
            let mut rig = rig();
            let [x, d] = [1, 2].map(|seed| rig.put(dtype, (1, n), &normal(seed, n)));
            let [y, z] = [dtype, Dtype::F32].map(|dtype| rig.out(dtype, (1, n)));
            let wide = rig.put(Dtype::F64, (1, n), &normal(3, n));
            let [wider, copy] = [(); 2].map(|()| rig.out(Dtype::F64, (1, n)));
            let partials = rig.out(Dtype::F64, (1, n.div_ceil(64)));
            let mut pair = rig.open();
            pair.check_exact(&Op::Gelu { x, y });
            pair.check_exact(&Op::GeluBackward { x, d });
            pair.check_exact(&Op::Cast { x, y: z });
            pair.check_exact(&Op::Cast { x: z, y });
            pair.check_exact(&Op::Add { x: y, into: z });
            pair.check_exact(&Op::Cast { x, y: wider });
            pair.check_exact(&Op::Add { x: wide, into: wider });
            pair.check_exact(&Op::Cast { x: wide, y: copy });
            let counted = CountedRange { end: n - 3, hole: (2, n / 2) };
            pair.check_exact(&Op::ChunkSquares { x, partials, chunk: 64, counted });
            pair.check_exact(&Op::Dropout { x, y, dropout: DROPOUT, scale: 0.22 });
            pair.check_exact(&Op::Zero { x: y });
        }
        in_rows(rig(), dtype);
        of_ranks(rig(), dtype);
    });
}

fn in_rows(mut rig: Rig, dtype: Dtype) {
    let (rows, cols) = (37, 40);
    let [x, residual] = [1, 2].map(|seed| rig.put(dtype, (rows, cols), &normal(seed, rows * cols)));
    let y = rig.out(dtype, (rows, cols));
    let wide = rig.put_noise(dtype, (rows, 2 * cols), 3);
    let [bias, sums] = [4, 5].map(|seed| rig.put_noise(dtype, (1, cols), seed));
    let mut pair = rig.open();
    let (some, dropout, scale) = (Some(bias), DROPOUT, 0.22);
    pair.check_exact(&Op::BiasDropoutAdd { x, bias: some, residual, y, dropout, scale });
    let columns = ColumnShard { first: cols, all: 3 * cols };
    for add in [false, true] {
        pair.check_exact(&Op::ColumnDropout { x, y, add, dropout, columns });
    }
    pair.check(&Op::ColumnSum { x, y: sums }, 2e-6, 1.0);
    let clamped = Gate::ClampedSilu { slope: 1.702, limit: 0.5 };
    for gate in [Gate::Silu, Gate::Gelu, clamped] {
        pair.check_exact(&Op::SwiGlu { x: wide, y, gate });
        pair.check_exact(&Op::SwiGluBackward { x: wide, d: y, gate });
    }
    pair.add_bias(x, bias);
}

fn of_ranks(mut rig: Rig, dtype: Dtype) {
    let parts: Vec<Tensor> =
        (0..3).map(|seed| rig.put(dtype, (1, 77), &normal(seed, 77))).collect();
    let wide: Vec<Tensor> =
        (0..3).map(|seed| rig.put(Dtype::F64, (1, 9), &normal(seed, 9))).collect();
    let mut pair = rig.open();
    pair.combine(parts[1], &parts, Reduction::Sum);
    pair.combine(parts[0], &parts, Reduction::Max);
    pair.combine(wide[2], &wide, Reduction::Sum);
}

#[test]
fn embedding_kernels() {
    let tokens: Vec<i32> = (0..40).map(|i| i * i % 23 - 2).collect();
    let mut order: Vec<i32> = (0..40).collect();
    order.sort_by_key(|&i| tokens[i as usize]);
    every_kernel_of("embedding.cu", |rig, dtype| {
        for cols in [3, 64, 301] {
            let shard = VocabShard { first: 4, valid: 9 };
            let mut rig = rig();
            let (ids, order) = (rig.put_ints(&tokens), rig.put_ints(&order));
            let table = rig.put_noise(dtype, (10, cols), 1);
            let y = rig.out(Dtype::F32, (40, cols));
            let d_y = rig.put(dtype, (40, cols), &normal(2, 40 * cols));
            let [d_table, positions] =
                [(10, 3), (7, 4)].map(|(rows, seed)| rig.put_noise(dtype, (rows, cols), seed));
            let d_positions = rig.out(dtype, (7, cols));
            let documents = [3, 4, 1, 1, 5, 7, 7, 2, 2, 3, 7, 7, 4, 3];
            let starts = Some(rig.put_starts(7, &documents, 13..53));
            let mut pair = rig.open();
            let scale = 61.96;
            pair.check_exact(&Op::Embedding { tokens: ids, table, shard, scale, y });
            pair.check_exact(&Op::AddPositions { x: y, table: positions, first_row: 13, starts });
            let op = Op::PositionsBackward { d_y, first_row: 13, starts, d_table: d_positions };
            pair.check_exact(&op);
            let tokens = ids;
            let op = Op::EmbeddingBackward { tokens, order, d_y, shard, scale, d_table };
            pair.check_exact(&op);
        }
    });
}

#[test]
fn loss_kernels() {
    let targets = [0, 600, -1, 300, 151, -100];
    every_kernel_of("loss.cu", |rig, dtype| {
        let (rows, cols) = (targets.len(), 308);
        let mut rig = rig();
        let ids = rig.put_ints(&targets);
        let scale = rig.put(Dtype::F64, (1, 1), &[8.0]);
        let loss = rig.out(Dtype::F64, (1, 1));
        let logits = rig.put(dtype, (rows, cols), &normal(1, rows * cols));
        let (max, sums) = (rig.out(Dtype::F32, (1, rows)), rig.out(Dtype::F32, (2, rows)));
        let (targets, shard) = (ids, VocabShard { first: 0, valid: 301 });
        let mut pair = rig.open();
        // So low that most logits are beyond the polynomial of tanh.
        let cap = Some(3.0);
        pair.check_exact(&Op::CapLogits { logits, scale: 4.0, cap });
        pair.check_exact(&Op::RowMax { x: logits, y: max, shard });
        pair.check(&Op::CrossEntropyStats { logits, max, targets, shard, sums }, 0.0, 2.0);
        pair.compiled = Some(1e-13);
        pair.check(&Op::CrossEntropyLoss { sums, targets, loss }, 1e-13, 0.0);
        pair.compiled = Some(0.0);
        let factor = 0.25;
        let op = Op::CrossEntropyBackward { logits, max, sums, targets, shard, scale, factor, cap };
        pair.check_exact(&op);
    });
}

#[test]
fn norm_kernels() {
    every_kernel_of("norm.cu", |rig, dtype| {
        for (rows, cols) in [(5, 37), (40, 264)] {
            let mut rig = rig();
            let [x, d_y] = [1, 2].map(|seed| rig.put_noise(dtype, (rows, cols), seed));
            let [gain, bias] = [3, 4].map(|seed| rig.put_noise(dtype, (1, cols), seed));
            let (y, d_x) = (rig.out(dtype, (rows, cols)), rig.put_noise(dtype, (rows, cols), 5));
            let [stats, root] = [2, 1].map(|numbers| rig.out(Dtype::F32, (rows, numbers)));
            let [d_gain, d_bias] = [dtype, Dtype::F32].map(|dtype| rig.out(dtype, (1, cols)));
            let mut pair = rig.open();
            pair.check(&Op::LayerNorm { x, gain, bias, y, stats, epsilon: 1e-5 }, 3e-7, 1.0);
            for add in [false, true] {
                let op = Op::LayerNormBackward { x, gain, stats, d_y, d_x, add, d_gain, d_bias };
                pair.check(&op, 4e-6, 1.0);
            }
            let stats = root;
            for offset in [0.0, 1.0] {
                let op = Op::RmsNorm { x, gain, offset, y, stats, epsilon: 1e-5 };
                pair.check(&op, 6e-7, 1.0);
                let add = true;
                let op = Op::RmsNormBackward { x, gain, offset, stats, d_y, d_x, add, d_gain };
                pair.check(&op, 8e-6, 1.0);
            }
        }
        of_widths(rig(), dtype);
    });
}

fn of_widths(mut rig: Rig, dtype: Dtype) {
    let (rows, count, kv_count, dim) = (20, 3, 1, 10);
    let heads = Heads { count, kv_count, first: 0, total: count, seq_len: rows };
    let [qkv, d_qkv] = [1, 2].map(|seed| rig.put_noise(dtype, (rows, 5 * dim), seed));
    let gain = rig.put_noise(dtype, (1, 4 * dim), 3);
    let raw = rig.out(dtype, (rows, 4 * dim));
    let [sums, dots] = [(); 2].map(|()| rig.out(Dtype::F32, (rows, 2)));
    let d_gain = rig.out(dtype, (1, 4 * dim));
    let norm = WidthNorm { heads, gain, sums, widths: [30.0, 10.0], epsilon: 1e-5 };
    let mut pair = rig.open();
    pair.check(&Op::WidthNormSums { qkv, raw, heads, sums }, 1e-6, 4.0);
    pair.check_exact(&Op::WidthNorm { qkv, raw, norm });
    pair.check(&Op::WidthNormBackwardSums { d_qkv, raw, norm, dots }, 4e-6, 4.0);
    pair.check(&Op::WidthNormBackward { d_qkv, raw, norm, dots, d_gain }, 4e-6, 1.0);
}

#[test]
fn rotary_kernels() {
    every_kernel_of("rotary.cu", |rig, dtype| {
        for (rows, (count, kv_count), dim, turned) in [
            (35, (3, 1), 10, 10),
            (40, (4, 2), 16, 16),
            (5, (4, 4), 128, 128),
            (40, (4, 2), 80, 20),
        ] {
            let heads = Heads { count, kv_count, first: 0, total: count, seq_len: 5 };
            let columns = (count + 2 * kv_count) * dim;
            let mut rig = rig();
            let table: Vec<f64> =
                (0..5 * turned).map(|i| if i % turned < turned / 2 { 0.6 } else { 0.8 }).collect();
            let table = rig.put(Dtype::F32, (5, turned), &table);
            let [qkv, d_qkv] = [1, 2].map(|seed| rig.put_noise(dtype, (rows, columns), seed));
            let [q_gain, k_gain] = [3, 4].map(|seed| rig.put_noise(dtype, (1, dim), seed));
            let raw = rig.out(dtype, (rows, (count + kv_count) * dim));
            let [q, k] = [(); 2].map(|()| rig.out(dtype, (1, dim)));
            let starts = rig.put_starts(5, &[2, 3, 1, 4].repeat(rows / 5), 0..rows);
            let norm = HeadNorm { q_gain, k_gain, raw, epsilon: 1e-6, offset: 1.0 };
            let grads = HeadNormGrads { q_gain: q, k_gain: k };
            let mut pair = rig.open();
            for (starts, norm) in [(Some(starts), None), (None, Some(norm))] {
                pair.check(&Op::Rotary { qkv, table, heads, starts, norm }, 8e-7, 1.0);
                let norm = norm.map(|norm| (norm, grads));
                let op = Op::RotaryBackward { d_qkv, table, heads, starts, norm };
                pair.check(&op, 16e-6, 1.0);
            }
        }
    });
}

#[test]
fn update_kernels() {
    let n = 1029;
    let rules = [
        Rule::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 },
        Rule::Sgd { weight_decay: 0.1 },
    ];
    every_kernel_of("update.cu", |rig, dtype| {
        for rule in rules {
            let mut words = [0.0; control::WORDS];
            words[control::FACTOR] = 0.123_456;
            words[control::LR] = 3e-3;
            words[control::MOMENTUM_CORRECTION] = 1.0 / (1.0 - 0.9f64.powi(3));
            words[control::VARIANCE_CORRECTION] = 1.0 / (1.0 - 0.95f64.powi(3));
            let mut rig = rig();
            let grad = rig.put(dtype, (1, n), &normal(1, n));
            let [master, momentum] = [2, 3].map(|s| rig.put(Dtype::F32, (1, n), &normal(s, n)));
            let variance: Vec<f64> = normal(4, n).iter().map(|x| x * x * 1e-3).collect();
            let variance = rig.put(Dtype::F32, (1, n), &variance);
            let param = rig.out(dtype, (1, n));
            let control = rig.put(Dtype::F64, (1, words.len()), &words);
            let (decayed, noise) = (234, TileNoise::none());
            let tile =
                AdamTile { rule, control, grad, master, momentum, variance, param, decayed, noise };
            rig.open().check_exact(&Op::Task { task: DeviceOp::new(DeviceUpdate(tile)) });
        }
    });
}

/// Compares the hash of scripts/kernel_report.py.
#[test]
fn the_page_of_estimates_is_of_these_kernels() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let folders = ["device/src/cuda/kernels", "offload/src/kernels"];
    let files =
        folders.iter().flat_map(|folder| std::fs::read_dir(root.join(folder)).expect(folder));
    let mut paths: Vec<_> = files.map(|entry| entry.expect("a file").path()).collect();
    paths.retain(|path| path.extension().is_some_and(|e| e == "cu" || e == "cuh"));
    paths.sort_by_key(|path| path.file_name().map(std::ffi::OsStr::to_os_string));
    let bytes = paths.iter().flat_map(|path| std::fs::read(path).expect("a file"));
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    });
    let page = std::fs::read_to_string(root.join("benchmarks/kernels.md")).expect("the page");
    let line = format!("sources: {hash:016x}");
    assert!(page.contains(&line), "a kernel has changed: run scripts/kernel-report ({line})");
}
