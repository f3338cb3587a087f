//! The gated delta rule and the ops around it, compiled.

use super::every_kernel_of;
use crate::delta::RuleTensors;
use crate::rig::{Rig, nvrtc_or_skip};
use device::{DeltaHeads, Dtype, Op};

#[test]
fn delta_kernels() {
    every_kernel_of("delta.cu delta_mma.cu delta_mma_gradients.cu", |rig, dtype| {
        let heads = DeltaHeads { keys: 1, values: 2, key_dim: 18, value_dim: 34, seq_len: 70 };
        let mut rig = rig();
        // Powers of the kernels for tensor cores differ in their last digits.
        if rig.sm >= 80 && dtype == Dtype::Bf16 {
            rig.compiled = Some(2e-6);
        }
        let of = RuleTensors::new(&mut rig, dtype, heads, 1);
        let starts = rig.put_starts(70, &[2, 67, 1], 0..70);
        let mut pair = rig.open();
        for op in of.ops(Some(starts)) {
            pair.check(&op, 2e-5, 1.0);
        }
    });
}

/// Queries and keys in two parts, wide loads and copies, and a document of one row before others.
#[test]
fn delta_kernels_of_wide_heads() {
    if !nvrtc_or_skip() {
        return;
    }
    let heads = DeltaHeads { keys: 1, values: 2, key_dim: 72, value_dim: 40, seq_len: 140 };
    let mut rig = Rig::compiled(0, 80, 4e-6);
    let of = RuleTensors::new(&mut rig, Dtype::Bf16, heads, 1);
    let starts = rig.put_starts(140, &[1, 65, 74], 0..140);
    let mut pair = rig.open();
    for op in of.ops(Some(starts)) {
        pair.check(&op, 2e-5, 1.0);
    }
}

#[test]
fn kernels_around_the_delta_rule() {
    every_kernel_of("delta_gates.cu", |rig, dtype| {
        let (rows, count, taps, seq_len, heads) = (36, 130, 4, 12, 2);
        let mut rig = rig();
        rig.compiled = Some(4e-6);
        let [x, d_y, gate] = [1, 2, 3].map(|seed| rig.put_noise(dtype, (rows, count), seed));
        let weight = rig.put_noise(dtype, (count, taps), 4);
        let gain = rig.put_noise(dtype, (1, count / heads), 5);
        let [y, d_x, d_gate] = [(); 3].map(|()| rig.out(dtype, (rows, count)));
        let d_weight = rig.out(dtype, (count, taps));
        let d_gain = rig.out(dtype, (1, count / heads));
        let starts = Some(rig.put_starts(seq_len, &[5, 1, 6, 12, 12], 0..rows));
        let of_gates = rig.put_noise(dtype, (rows, 2 * heads), 6);
        let [decay, bias] = [7, 8].map(|seed| rig.put_noise(dtype, (1, heads), seed));
        let d_gates = rig.put_noise(Dtype::F32, (rows, 2 * heads), 9);
        let gates = rig.out(Dtype::F32, (rows, 2 * heads));
        let d_of_gates = rig.out(dtype, (rows, 2 * heads));
        let [d_decay, d_bias] = [(); 2].map(|()| rig.out(dtype, (1, heads)));
        let mut pair = rig.open();
        pair.check_exact(&Op::Convolution { x, weight, y, seq_len, starts });
        let op = Op::ConvolutionBackward { x, weight, d_y, d_x, d_weight, seq_len, starts };
        pair.check(&op, 2e-5, 1.0);
        let epsilon = 1e-2;
        pair.check(&Op::GatedNorm { x, gate, gain, y, epsilon }, 2e-6, 1.0);
        let op = Op::GatedNormBackward { x, gate, gain, d_y, d_x, d_gate, d_gain, epsilon };
        pair.check(&op, 2e-5, 1.0);
        pair.check_exact(&Op::SigmoidGate { x, gate, y });
        pair.check_exact(&Op::SigmoidGateBackward { x, gate, d: d_y, d_gate });
        let x = of_gates;
        pair.check(&Op::DeltaGates { x, decay, bias, gates }, 2e-6, 4.0);
        let d_x = d_of_gates;
        let op = Op::DeltaGatesBackward { x, decay, bias, d_gates, d_x, d_decay, d_bias };
        pair.check(&op, 4e-5, 1.0);
    });
}
