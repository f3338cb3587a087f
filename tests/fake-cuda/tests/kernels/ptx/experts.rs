//! Kernels of mixture of experts.

use super::every_kernel_of;
use crate::experts::{
    GroupedTensors, ROUTES, balance_of, check_biases, check_load, check_rows, sigmoid_of, sort_of,
};
use crate::rig::normal;
use device::{Dtype, Op, ScoreRule};

#[test]
fn kernels_of_experts() {
    every_kernel_of("experts.cu", |rig, dtype| {
        check_rows(rig(), dtype, [5, 2, 37]);
        check_rows(rig(), dtype, [3, 8, 64]);
        check_rows(rig(), dtype, [9, 1, 37]);
        check_biases(rig(), dtype, &[0, 35, 0, 1], 37);
        // The other kernels have one type.
        if dtype != Dtype::F32 {
            return;
        }
        for [tokens, experts, per_token] in ROUTES {
            let mut rig = rig();
            let z = normal(1, tokens * experts);
            let logits = rig.put(Dtype::F32, (tokens, experts), &z);
            let weights = rig.out(Dtype::F32, (tokens, per_token));
            let choices = rig.out(Dtype::I32, (tokens, per_token));
            let d_weights = rig.put_noise(Dtype::F32, (tokens, per_token), 3);
            let balance = Some(balance_of(&mut rig, tokens, experts));
            let sigmoid = sigmoid_of(&mut rig, [experts, per_token]);
            let mut pair = rig.open();
            for (scoring, balance) in
                [(ScoreRule::Softmax { normalize: true }, balance), (sigmoid, None)]
            {
                pair.check(&Op::Route { logits, weights, choices, scoring }, 1e-6, 4.0);
                let op = Op::RouteBackward { logits, choices, d_weights, scoring, balance };
                pair.check(&op, 2e-6, 4.0);
            }
        }
        for (shape, experts) in [((5, 2), 8), ((700, 3), 40), ((70, 1), 1)] {
            let mut rig = rig();
            let op = sort_of(&mut rig, shape, experts);
            rig.open().check_exact(&op);
        }
        check_load(rig(), 21, 40);
    });
}

#[test]
fn grouped_matmuls() {
    every_kernel_of("grouped_gemm.cu", |rig, dtype| {
        // Even, skewed and empty groups. Tiles of 64 and 128 rows and columns have tails.
        for (rows, shape) in [(&[9, 9, 9][..], (40, 24)), (&[0, 130, 0, 3, 1], (136, 72))] {
            for result in [dtype, Dtype::F32] {
                let mut rig = rig();
                let tensors = GroupedTensors::new(&mut rig, [dtype, result], rows, shape);
                let mut pair = rig.open();
                tensors.ops().iter().for_each(|op| pair.check_exact(op));
            }
        }
    });
}
