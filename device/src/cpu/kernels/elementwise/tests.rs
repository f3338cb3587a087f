use super::super::testing::{NO_DROPOUT, Rig, TYPES, assert_close, dropout_factor, noise};
use super::*;
use crate::Tensor;

const DROPOUT: Dropout = Dropout { p: 0.25, key: 99, first_row: 12 };

fn gelu_f64(x: f64) -> f64 {
    let k = (2.0 / std::f64::consts::PI).sqrt();
    0.5 * x * (1.0 + (k * (x + 0.044715 * x.powi(3))).tanh())
}

#[test]
fn gelu_and_its_gradient_are_the_formula_in_every_type() {
    for (dtype, ulp) in TYPES {
        let mut rig = Rig::new(1);
        let x: Vec<f64> = noise(1, 1031).iter().map(|x| x * 6.0).collect();
        let d = noise(2, 1031);
        let (tx, ty) = (rig.put(dtype, (1, 1031), &x), rig.out(dtype, (1, 1031)));
        let td = rig.put(dtype, (1, 1031), &d);
        rig.run(&Op::Gelu { x: tx, y: ty });
        rig.run(&Op::GeluBackward { x: tx, d: td });
        let x = rig.get(tx);
        let y: Vec<f64> = x.iter().map(|x| gelu_f64(*x)).collect();
        assert_close(&rig.get(ty), &y, 1e-7, 1e-6 + ulp);
        let slope = |x: f64| (gelu_f64(x + 1e-5) - gelu_f64(x - 1e-5)) / 2e-5;
        let want: Vec<f64> = x.iter().zip(&d).map(|(x, d)| d * slope(*x)).collect();
        assert_close(&rig.get(td), &want, 2e-6, 1e-6 + ulp);
    }
}

/// A gate's activation and its derivative.
fn gate_f64(gate: Gate, x: f64) -> [f64; 2] {
    match gate {
        Gate::Silu => {
            let s = 1.0 / (1.0 + (-x).exp());
            [x * s, s * (1.0 + x * (1.0 - s))]
        }
        Gate::Gelu => [gelu_f64(x), (gelu_f64(x + 1e-5) - gelu_f64(x - 1e-5)) / 2e-5],
        Gate::ClampedSilu { slope, limit } => {
            let (a, g) = (f64::from(slope), x.min(limit.into()));
            let s = 1.0 / (1.0 + (-a * g).exp());
            let moves = f64::from(u8::from(x <= limit.into()));
            [g * s, moves * s * (1.0 + a * g * (1.0 - s))]
        }
    }
}

/// The factor of a gate's activation, and its derivative.
fn factor_f64(gate: Gate, up: f64) -> [f64; 2] {
    match gate {
        Gate::Silu | Gate::Gelu => [up, 1.0],
        Gate::ClampedSilu { limit, .. } => {
            let limit = f64::from(limit);
            [1.0 + up.clamp(-limit, limit), f64::from(u8::from(up.abs() <= limit))]
        }
    }
}

#[test]
fn a_number_that_is_not_finite_stays_so_behind_a_limit() {
    let mut rig = Rig::new(1);
    let x = [f64::NAN, 1.0, 1.0, f64::NAN];
    let (x, y) = (rig.put(Dtype::F32, (1, 4), &x), rig.out(Dtype::F32, (1, 2)));
    rig.run(&Op::SwiGlu { x, y, gate: Gate::ClampedSilu { slope: 1.702, limit: 7.0 } });
    assert!(rig.get(y).iter().all(|y| y.is_nan()));
}

#[test]
fn gates_and_their_gradients_are_the_formula_in_every_type() {
    let gates = [Gate::Silu, Gate::Gelu, Gate::ClampedSilu { slope: 1.702, limit: 2.0 }];
    for ((dtype, ulp), gate) in TYPES.iter().flat_map(|t| gates.map(|gate| (*t, gate))) {
        for (rows, width) in [(3, 5), (1, 1031), (7, 64)] {
            let mut rig = Rig::new(1);
            let x: Vec<f64> = noise(1, 2 * rows * width).iter().map(|x| x * 6.0).collect();
            let d = noise(2, rows * width);
            let (tx, ty) = (rig.put(dtype, (rows, 2 * width), &x), rig.out(dtype, (rows, width)));
            let td = rig.put(dtype, (rows, width), &d);
            let x = rig.get(tx);
            rig.run(&Op::SwiGlu { x: tx, y: ty, gate });
            rig.run(&Op::SwiGluBackward { x: tx, d: td, gate });
            let formula = |x: &[f64]| {
                let of = |i: usize| gate_f64(gate, x[i])[0] * factor_f64(gate, x[width + i])[0];
                (0..width).map(of).collect::<Vec<f64>>()
            };
            let y: Vec<f64> = x.chunks(2 * width).flat_map(formula).collect();
            assert_close(&rig.get(ty), &y, 3e-6, 1e-6 + ulp);
            let d = rig.get(td);
            let want: Vec<f64> = (0..x.len())
                .map(|i| {
                    let (row, col) = (i / (2 * width), i % (2 * width));
                    let (at, d) = (row * 2 * width + col % width, d[row * width + col % width]);
                    let [value, slope] = gate_f64(gate, x[at]);
                    let [up, moves] = factor_f64(gate, x[at + width]);
                    if col < width { d * up * slope } else { d * value * moves }
                })
                .collect();
            assert_close(&rig.get(tx), &want, 5e-6, 1e-6 + ulp);
        }
    }
}

#[test]
fn a_sum_without_a_bias_is_that_with_zeros() {
    let mut rig = Rig::new(1);
    let (x, residual) = (
        rig.put(Dtype::Bf16, (3, 70), &noise(1, 210)),
        rig.put(Dtype::Bf16, (3, 70), &noise(2, 210)),
    );
    let bias = rig.put(Dtype::Bf16, (1, 70), &[0.0; 70]);
    let (y, z) = (rig.out(Dtype::Bf16, (3, 70)), rig.out(Dtype::Bf16, (3, 70)));
    rig.run(&Op::BiasDropoutAdd { x, bias: None, residual, y, dropout: DROPOUT, scale: 1.0 });
    rig.run(&Op::BiasDropoutAdd {
        x,
        bias: Some(bias),
        residual,
        y: z,
        dropout: DROPOUT,
        scale: 1.0,
    });
    assert_eq!(rig.get(y), rig.get(z));
}

#[test]
fn bias_dropout_add_drops_by_global_index_in_mixed_types() {
    for (dtype, ulp) in TYPES {
        for (dropout, (rows, cols), scale) in [
            (NO_DROPOUT, (5, 300), 1.0),
            (DROPOUT, (5, 300), 1.0),
            (DROPOUT, (7, 3), 1.0),
            (NO_DROPOUT, (5, 300), 0.22),
            (DROPOUT, (5, 300), 0.22),
        ] {
            let n = rows * cols;
            let mut rig = Rig::new(1);
            let (x, bias, residual) = (noise(1, n), noise(2, cols), noise(3, n));
            let tensors = [
                rig.put(Dtype::F32, (rows, cols), &x),
                rig.put(dtype, (1, cols), &bias),
                rig.put(dtype, (rows, cols), &residual),
                rig.out(dtype, (rows, cols)),
            ];
            let [tx, tb, tr, ty] = tensors;
            let bias_of = Some(tb);
            rig.run(&Op::BiasDropoutAdd {
                x: tx,
                bias: bias_of,
                residual: tr,
                y: ty,
                dropout,
                scale,
            });
            let first = dropout.first_row as usize * cols;
            let y = |i: usize| {
                let factor = f64::from(scale) * dropout_factor(dropout, first + i);
                residual[i] + (x[i] + bias[i % cols]) * factor
            };
            let want: Vec<f64> = (0..n).map(y).collect();
            assert_close(&rig.get(ty), &want, 1e-6, ulp);
        }
    }
}

#[test]
fn dropout_is_the_same_in_place_and_apart_and_on_any_part_of_the_rows() {
    for (dtype, ulp) in TYPES {
        let mut rig = Rig::new(1);
        let (rows, cols) = (9, 37);
        let x = noise(4, rows * cols);
        let (tx, ty) = (rig.put(dtype, (rows, cols), &x), rig.out(dtype, (rows, cols)));
        rig.run(&Op::Dropout { x: tx, y: ty, dropout: DROPOUT, scale: 1.0 });
        let y = rig.get(ty);
        let want: Vec<f64> =
            (0..x.len()).map(|i| x[i] * dropout_factor(DROPOUT, 12 * cols + i)).collect();
        assert_close(&y, &want, 1e-7, ulp);
        let part = rig.put(dtype, (4, cols), &x[3 * cols..7 * cols]);
        let dropout = Dropout { first_row: 15, ..DROPOUT };
        rig.run(&Op::Dropout { x: part, y: part, dropout, scale: 1.0 });
        assert_eq!(rig.get(part), y[3 * cols..7 * cols]);
        rig.run(&Op::Dropout { x: tx, y: ty, dropout: NO_DROPOUT, scale: 1.0 });
        assert_eq!(rig.get(ty), rig.get(tx));
        rig.run(&Op::Dropout { x: tx, y: tx, dropout: NO_DROPOUT, scale: 1.0 });
        assert_eq!(rig.get(tx), x);
        // A power of 2 changes no digit, with and without dropout, in place and apart.
        let quarter = |x: Vec<f64>| x.iter().map(|x| x * 0.25).collect::<Vec<f64>>();
        for (dropout, want) in [(DROPOUT, y), (NO_DROPOUT, x)] {
            rig.run(&Op::Dropout { x: tx, y: ty, dropout, scale: 0.25 });
            assert_eq!(rig.get(ty), quarter(want));
        }
        rig.run(&Op::Dropout { x: tx, y: tx, dropout: NO_DROPOUT, scale: 0.25 });
        assert_eq!(rig.get(tx), rig.get(ty));
    }
}

/// The columns of a rank are dropped as in the whole tensor, also on a part of the rows, and added.
#[test]
fn dropout_of_columns_is_that_of_the_whole_tensor() {
    for (dtype, ulp) in TYPES {
        let mut rig = Rig::new(1);
        let (rows, cols, all) = (9, 301, 907);
        let (x, old) = (noise(4, rows * cols), noise(5, rows * cols));
        let tx = rig.put(dtype, (rows, cols), &x);
        let [written, added] = [1, 2].map(|_| rig.put(dtype, (rows, cols), &old));
        let columns = ColumnShard { first: 603, all };
        let factor = |i: usize| dropout_factor(DROPOUT, (12 + i / cols) * all + 603 + i % cols);
        for (y, add) in [(written, false), (added, true)] {
            rig.run(&Op::ColumnDropout { x: tx, y, add, dropout: DROPOUT, columns });
            let base = |i: usize| if add { old[i] } else { 0.0 };
            let want: Vec<f64> = (0..x.len()).map(|i| base(i) + x[i] * factor(i)).collect();
            assert_close(&rig.get(y), &want, 1e-7, ulp);
        }
        let part = rig.put(dtype, (4, cols), &x[3 * cols..7 * cols]);
        let y = rig.out(dtype, (4, cols));
        let dropout = Dropout { first_row: 15, ..DROPOUT };
        rig.run(&Op::ColumnDropout { x: part, y, add: false, dropout, columns });
        assert_eq!(rig.get(y), rig.get(written)[3 * cols..7 * cols]);
        rig.run(&Op::ColumnDropout { x: tx, y: written, add: false, dropout: NO_DROPOUT, columns });
        assert_eq!(rig.get(written), rig.get(tx));
    }
}

#[test]
fn add_cast_and_zero_round_once() {
    let (x, into) = (noise(5, 700), noise(6, 700));
    for (from, _) in TYPES {
        for (to, ulp) in TYPES {
            let mut rig = Rig::new(1);
            let (tx, ty) = (rig.put(from, (7, 100), &x), rig.put(to, (7, 100), &into));
            rig.run(&Op::Add { x: tx, into: ty });
            let sum: Vec<f64> = x.iter().zip(&into).map(|(x, y)| x + y).collect();
            assert_close(&rig.get(ty), &sum, 0.0, ulp);
            rig.run(&Op::Cast { x: tx, y: ty });
            assert_eq!(rig.get(ty), x);
            rig.run(&Op::Zero { x: ty });
            assert_eq!(rig.get(ty), [0.0; 700]);
        }
    }
}

#[test]
fn doubles_add_and_convert() {
    let mut rig = Rig::new(1);
    let (x, y) =
        (rig.put(Dtype::F64, (1, 2), &[1e-9, 2.0]), rig.put(Dtype::F64, (1, 2), &[1.0, 1.0]));
    rig.run(&Op::Add { x, into: y });
    assert_eq!(rig.get(y), [1.0 + 1e-9, 3.0]);
    let z = rig.out(Dtype::F32, (1, 2));
    rig.run(&Op::Cast { x: y, y: z });
    assert_eq!(rig.get(z), [1.0, 3.0]);
}

#[test]
fn columns_are_summed_in_every_type() {
    for (dtype, ulp) in TYPES {
        let mut rig = Rig::new(1);
        let (rows, cols) = (33, 523);
        let x = noise(7, rows * cols);
        let (tx, ty) = (rig.put(dtype, (rows, cols), &x), rig.out(dtype, (1, cols)));
        rig.run(&Op::ColumnSum { x: tx, y: ty });
        let want: Vec<f64> = (0..cols).map(|c| x.iter().skip(c).step_by(cols).sum()).collect();
        assert_close(&rig.get(ty), &want, 1e-5, ulp);
    }
}

#[test]
fn threads_change_no_bit() {
    let (rows, cols) = (257, 301);
    let run = |threads| {
        let mut rig = Rig::new(threads);
        let mut put = |seed| rig.put(Dtype::Bf16, (rows, cols), &noise(seed, rows * cols));
        let [x, y, z, w]: [Tensor; 4] = [1, 2, 3, 4].map(&mut put);
        let bias = rig.put(Dtype::F32, (1, cols), &noise(5, cols));
        let sums = rig.out(Dtype::F32, (1, cols));
        rig.run(&Op::Gelu { x, y });
        rig.run(&Op::GeluBackward { x: y, d: z });
        rig.run(&Op::BiasDropoutAdd {
            x: y,
            bias: Some(bias),
            residual: z,
            y: w,
            dropout: DROPOUT,
            scale: 1.0,
        });
        rig.run(&Op::Dropout { x: w, y: w, dropout: DROPOUT, scale: 1.0 });
        rig.run(&Op::Add { x: z, into: w });
        rig.run(&Op::ColumnSum { x: w, y: sums });
        let copy = rig.out(Dtype::Bf16, (rows, cols));
        rig.run(&Op::Cast { x: w, y: copy });
        assert_eq!(rig.get(copy), rig.get(w));
        [rig.get(y), rig.get(z), rig.get(w), rig.get(sums)]
    };
    assert_eq!(run(1), run(3));
}

#[test]
fn wrong_types_are_errors() {
    let mut rig = Rig::new(1);
    let (x, y) = (rig.put_ints(&[1, 2]), rig.out(Dtype::F32, (1, 2)));
    assert!(rig.try_run(&Op::Gelu { x, y }).expect_err("tokens").contains("I32"));
    assert!(rig.try_run(&Op::Add { x, into: y }).is_err());
    assert!(rig.try_run(&Op::Copy { src: x, dst: y }).expect_err("copy").contains("not a kernel"));
}
