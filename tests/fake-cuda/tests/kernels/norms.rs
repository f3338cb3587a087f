//! Norms on CUDA and their gradients, emulated, against the cpu backend.

use crate::in_each_type;
use crate::rig::{Rig, normal};
use device::{Dtype, Heads, Op, WidthNorm};

#[test]
fn layer_norm_and_its_gradients_agree() {
    in_each_type(|dtype, skew| {
        // Blocks of one row and of several; the last rows are too wide for the sums of both gradients in shared memory.
        for (rows, cols) in [(3, 2), (5, 37), (40, 128), (300, 40), (2, 2500), (2, 12_300)] {
            let (x_values, d_values) = (normal(1, rows * cols), normal(2, rows * cols));
            let mut rig = Rig::new(skew);
            let (x, d_y) =
                (rig.put(dtype, (rows, cols), &x_values), rig.put(dtype, (rows, cols), &d_values));
            let [gain, bias] = [3, 4].map(|seed| rig.put_noise(dtype, (1, cols), seed));
            let (y, stats) = (rig.out(dtype, (rows, cols)), rig.out(Dtype::F32, (rows, 2)));
            let d_x = rig.put_noise(dtype, (rows, cols), 5);
            let [d_gain, d_bias] = [dtype, Dtype::F32].map(|dtype| rig.out(dtype, (1, cols)));
            let mut pair = rig.open();
            pair.check(&Op::LayerNorm { x, gain, bias, y, stats, epsilon: 1e-5 }, 3e-7, 1.0);
            for add in [false, true] {
                // At two columns the variance may be near 0, which makes differences large.
                let op = Op::LayerNormBackward { x, gain, stats, d_y, d_x, add, d_gain, d_bias };
                pair.check(&op, if cols == 2 { 1e-4 } else { 12e-6 }, 1.0);
            }
        }
    });
}

#[test]
fn rms_norm_and_its_gradients_agree() {
    in_each_type(|dtype, skew| {
        for (rows, cols, add) in
            [(3, 2, false), (600, 37, true), (40, 1031, false), (70, 2056, true)]
        {
            let mut rig = Rig::new(skew);
            let (x, d_y) =
                (rig.put_noise(dtype, (rows, cols), 1), rig.put_noise(dtype, (rows, cols), 2));
            let gain = rig.put_noise(dtype, (1, cols), 3);
            let (y, stats) = (rig.out(dtype, (rows, cols)), rig.out(Dtype::F32, (rows, 1)));
            let d_x = rig.put_noise(dtype, (rows, cols), 5);
            let d_gain = rig.out(dtype, (1, cols));
            // The sum of a branch, and its gradient, may be F32.
            let wide = rig.put_noise(Dtype::F32, (rows, cols), 6);
            let d_wide = rig.put_noise(Dtype::F32, (rows, cols), 7);
            let mut pair = rig.open();
            for (offset, x, d_x) in [(0.0, x, d_x), (1.0, x, d_x), (1.0, wide, d_wide)] {
                let op = Op::RmsNorm { x, gain, offset, y, stats, epsilon: 1e-5 };
                let factors = f64::from(1.0 + offset);
                pair.check(&op, 3e-7 * factors, 1.0);
                let op = Op::RmsNormBackward { x, gain, offset, stats, d_y, d_x, add, d_gain };
                // The gain's gradient is a sum over the rows.
                let sums = (rows as f64 / 100.0).max(1.0);
                pair.check(&op, 4e-6 * sums * factors, 1.0);
            }
        }
    });
}

#[test]
fn norms_over_the_width_of_q_and_k_agree() {
    in_each_type(|dtype, skew| {
        // Heads of one column, of parts of a run, over several runs of a thread, and many rows.
        for (rows, (count, kv_count), dim) in
            [(3, (2, 1), 1), (5, (3, 1), 5), (4, (9, 3), 200), (600, (4, 2), 8)]
        {
            let heads = Heads { count, kv_count, first: 0, total: count, seq_len: rows };
            let (all, normed) = ((count + 2 * kv_count) * dim, (count + kv_count) * dim);
            let mut rig = Rig::new(skew);
            let [qkv, d_qkv] = [1, 2].map(|seed| rig.put_noise(dtype, (rows, all), seed));
            let gain = rig.put_noise(dtype, (1, normed), 3);
            let raw = rig.out(dtype, (rows, normed));
            let [sums, dots] = [(); 2].map(|()| rig.out(Dtype::F32, (rows, 2)));
            let d_gain = rig.out(dtype, (1, normed));
            // As if another rank had as many columns of q, and a copy of k.
            let widths = [2 * count * dim, 2 * kv_count * dim].map(|n| n as f32);
            let norm = WidthNorm { heads, gain, sums, widths, epsilon: 1e-5 };
            let mut pair = rig.open();
            pair.check(&Op::WidthNormSums { qkv, raw, heads, sums }, 1e-6, 4.0);
            pair.check_exact(&Op::WidthNorm { qkv, raw, norm });
            let near = 1e-6 * (normed as f64).sqrt();
            pair.check(&Op::WidthNormBackwardSums { d_qkv, raw, norm, dots }, near, 4.0);
            let op = Op::WidthNormBackward { d_qkv, raw, norm, dots, d_gain };
            pair.check(&op, 4e-6 * (rows as f64 / 100.0).max(1.0), 1.0);
        }
    });
}
