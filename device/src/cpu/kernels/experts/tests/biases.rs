//! Biases of experts.

use super::{CHOICES, OFFSETS, Rig, TYPES, assert_close, ints, noise};
use crate::Dtype;
use crate::op::Op;

#[test]
fn biases_of_experts_are_added_to_their_rows_and_summed_over_them() {
    let experts = OFFSETS.len() - 1;
    for ((dtype, ulp), threads) in TYPES.iter().flat_map(|t| [(*t, 1), (*t, 3)]) {
        for cols in [1, 37, 300] {
            let (mut rig, rows) = (Rig::new(threads), CHOICES.len());
            let x = rig.put(dtype, (rows, cols), &noise(1, rows * cols));
            let biases = rig.put(dtype, (experts, cols), &noise(2, experts * cols));
            let d_biases = rig.out(dtype, (experts, cols));
            let offsets = ints(&mut rig, (1, experts + 1), &OFFSETS);
            let (before, added) = (rig.get(x), rig.get(biases));
            rig.run(&Op::AddExpertBiases { x, biases, offsets });
            rig.run(&Op::ExpertBiasesBackward { d_y: x, offsets, d_biases });
            let expert_of = |row: usize| {
                let is_in = |e: &usize| (OFFSETS[*e]..OFFSETS[e + 1]).contains(&(row as i32));
                (0..experts).find(is_in).unwrap()
            };
            let sum = |i: usize| before[i] + added[expert_of(i / cols) * cols + i % cols];
            let want: Vec<f64> = (0..rows * cols).map(sum).collect();
            let got = rig.get(x);
            assert_close(&got, &want, 1e-6, ulp);
            let of_rows = |i: usize| {
                let own = (0..rows).filter(|row| expert_of(*row) == i / cols);
                own.map(|row| got[row * cols + i % cols]).sum::<f64>()
            };
            let want: Vec<f64> = (0..experts * cols).map(of_rows).collect();
            assert_close(&rig.get(d_biases), &want, 2e-6, ulp);
            // The third expert has no rows.
            assert!(rig.get(d_biases)[2 * cols..3 * cols].iter().all(|d| *d == 0.0));
        }
    }
}

#[test]
fn offsets_that_do_not_divide_the_rows_are_errors() {
    let mut rig = Rig::new(1);
    let (x, biases) = (rig.out(Dtype::F32, (8, 2)), rig.out(Dtype::F32, (4, 2)));
    let offsets = ints(&mut rig, (1, 5), &[0, 3, 5, 5, 7]);
    let error = rig.try_run(&Op::AddExpertBiases { x, biases, offsets }).unwrap_err();
    assert!(error.contains("do not divide 8 rows"), "{error}");
}
