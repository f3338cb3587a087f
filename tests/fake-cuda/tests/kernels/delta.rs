//! The gated delta rule and the ops around it on CUDA, emulated, against the cpu backend.

use crate::in_each_type;
use crate::rig::{Rig, VALUES, noise, normal};
use device::{DeltaHeads, Dtype, Op, Tensor};

/// Tensors of the rule.
#[derive(Clone, Copy)]
pub(crate) struct RuleTensors {
    heads: DeltaHeads,
    qkv: Tensor,
    gates: Tensor,
    out: Tensor,
    states: Tensor,
    /// Those before the samples.
    initial: Tensor,
    d_out: Tensor,
    d_qkv: Tensor,
    d_gates: Tensor,
}

impl RuleTensors {
    /// Tensors for `samples` samples.
    pub(crate) fn new(rig: &mut Rig, dtype: Dtype, heads: DeltaHeads, samples: usize) -> Self {
        let DeltaHeads { values, value_dim, seq_len, .. } = heads;
        let (rows, width) = (samples * seq_len, values * value_dim);
        let is_beta = |i: usize| i % (2 * values) < values;
        let gate =
            |(i, x): (usize, f64)| if is_beta(i) { 0.5 + 0.375 * x } else { x / 8.0 - 0.125 };
        let gates: Vec<f64> =
            noise(2, rows * 2 * values).into_iter().enumerate().map(gate).collect();
        Self {
            heads,
            qkv: rig.put_noise(dtype, (rows, heads.columns()), 1),
            gates: rig.put(Dtype::F32, (rows, 2 * values), &gates),
            out: rig.out(dtype, (rows, width)),
            states: rig.out(Dtype::F32, (samples * heads.places(), heads.state_len())),
            initial: rig.put_noise(Dtype::F32, (samples, heads.state_len()), 5),
            d_out: rig.put_noise(dtype, (rows, width), 3),
            d_qkv: rig.out(dtype, (rows, heads.columns())),
            d_gates: rig.out(Dtype::F32, (rows, 2 * values)),
        }
    }

    /// The rule, then its gradients.
    pub(crate) fn ops(self, starts: Option<Tensor>) -> [Op; 2] {
        let Self { heads, qkv, gates, out, states, d_out, d_qkv, d_gates, .. } = self;
        [
            Op::DeltaRule { qkv, gates, out, states, initial: None, heads, starts },
            Op::DeltaRuleBackward { qkv, gates, states, d_out, d_qkv, d_gates, heads, starts },
        ]
    }

    /// The rule from the states before the samples.
    fn continued(self, starts: Option<Tensor>) -> Op {
        let Self { heads, qkv, gates, out, states, initial, .. } = self;
        Op::DeltaRule { qkv, gates, out, states, initial: Some(initial), heads, starts }
    }
}

/// Largest differences on tensor cores, where each factor has 16 digits in base 2: of the rule, and of
/// its gradients.
const ON_TENSOR_CORES: [f64; 2] = [4e-6, 2e-5];

fn heads(keys: usize, values: usize, (key_dim, value_dim): (usize, usize), t: usize) -> DeltaHeads {
    DeltaHeads { keys, values, key_dim, value_dim, seq_len: t }
}

/// Heads, samples, and the lengths of their documents: keys and values of parts of a tile, of several
/// and of the widest; chunks of one row and of parts; documents in two samples.
fn cases() -> [(DeltaHeads, usize, &'static [usize]); 4] {
    [
        (heads(1, 1, (3, 5), 70), 1, &[70]),
        (heads(1, 3, (18, 33), 130), 2, &[1, 65, 64, 130]),
        (heads(2, 2, (128, 40), 65), 1, &[65]),
        (heads(2, 4, (16, 16), 200), 1, &[63, 7, 65, 65]),
    ]
}

#[test]
fn the_rule_and_its_gradients_agree_on_tensor_cores() {
    let [first, ..] = cases();
    let others = [Dtype::F16, Dtype::F32].map(|dtype| (dtype, first));
    let all = cases().map(|case| (Dtype::Bf16, case)).into_iter().chain(others);
    for (i, (dtype, (heads, samples, lengths))) in all.enumerate() {
        let mut rig = Rig::new(i % 2);
        rig.sm = 80;
        let of = RuleTensors::new(&mut rig, dtype, heads, samples);
        let starts = rig.put_starts(heads.seq_len, lengths, 0..samples * heads.seq_len);
        let mut pair = rig.open();
        for starts in [None, Some(starts)] {
            let [forward, backward] = of.ops(starts);
            pair.check(&forward, ON_TENSOR_CORES[0], 1.0);
            pair.check(&backward, ON_TENSOR_CORES[1], 1.0);
            pair.check(&of.continued(starts), ON_TENSOR_CORES[0], 1.0);
        }
    }
}

/// Rows that keep or forget all of the state, beside others, and rows that add nothing to it or next
/// to nothing.
#[test]
fn the_rule_on_tensor_cores_agrees_at_the_ends_of_its_gates() {
    let heads = heads(1, 2, (20, 34), 140);
    let gates = (0..140 * 4).map(|i| {
        let row = i / 4;
        match i % 4 < 2 {
            true => [1.0, 0.0, 1e-3, 1e-12, 1e-30][row % 5],
            // The sum up to the row before keeps its digits.
            false if row == 139 => -1e6,
            false => [-1e-3, -90.0, 0.0, -1.0, -3e-2, -1e-2, -7.0][row % 7],
        }
    });
    let mut rig = Rig::new(0);
    rig.sm = 80;
    let mut of = RuleTensors::new(&mut rig, Dtype::Bf16, heads, 1);
    of.gates = rig.put(Dtype::F32, (140, 4), &gates.collect::<Vec<_>>());
    let mut pair = rig.open();
    for op in of.ops(None) {
        pair.check(&op, 4e-5, 1.0);
    }
}

#[test]
fn the_rule_and_its_gradients_agree() {
    for (dtype, skew) in VALUES.into_iter().zip([0, 1, 0]) {
        for (heads, samples, lengths) in cases() {
            let mut rig = Rig::new(skew);
            let of = RuleTensors::new(&mut rig, dtype, heads, samples);
            let starts = rig.put_starts(heads.seq_len, lengths, 0..samples * heads.seq_len);
            let mut pair = rig.open();
            for starts in [None, Some(starts)] {
                let [forward, backward] = of.ops(starts);
                pair.check(&forward, 2e-6, 1.0);
                pair.check(&backward, 2e-5, 1.0);
                pair.check(&of.continued(starts), 2e-6, 1.0);
            }
        }
    }
}

#[test]
fn convolutions_and_their_gradients_agree() {
    in_each_type(|dtype, skew| {
        for (taps, count, rows, lengths) in [
            (4, 130, 24, &[5, 1, 6, 12][..]),
            (1, 3, 12, &[12]),
            (8, 2, 36, &[12, 2, 1, 9, 12]),
            (2, 65, 1100, &[12; 92]),
        ] {
            let (seq_len, rows) = (12, rows / 12 * 12);
            let mut rig = Rig::new(skew);
            let [x, d_y] = [1, 2].map(|seed| rig.put_noise(dtype, (rows, count), seed));
            let weight = rig.put_noise(dtype, (count, taps), 3);
            let [y, d_x] = [(); 2].map(|()| rig.out(dtype, (rows, count)));
            let d_weight = rig.out(dtype, (count, taps));
            let starts = rig.put_starts(seq_len, lengths, 0..rows);
            let mut pair = rig.open();
            for starts in [None, Some(starts)] {
                pair.check_exact(&Op::Convolution { x, weight, y, seq_len, starts });
                let op = Op::ConvolutionBackward { x, weight, d_y, d_x, d_weight, seq_len, starts };
                pair.check(&op, 2e-6 * (rows as f64).sqrt(), 1.0);
            }
        }
    });
}

#[test]
fn gates_of_the_rule_and_their_gradients_agree() {
    in_each_type(|dtype, skew| {
        for (rows, heads) in [(3, 1), (70, 33)] {
            let mut rig = Rig::new(skew);
            let x: Vec<f64> = normal(1, rows * 2 * heads).iter().map(|x| 8.0 * x).collect();
            let x = rig.put(dtype, (rows, 2 * heads), &x);
            let [decay, bias] = [2, 3].map(|seed| rig.put_noise(dtype, (1, heads), seed));
            let d_gates = rig.put_noise(Dtype::F32, (rows, 2 * heads), 4);
            let gates = rig.out(Dtype::F32, (rows, 2 * heads));
            let d_x = rig.out(dtype, (rows, 2 * heads));
            let [d_decay, d_bias] = [dtype, Dtype::F32].map(|dtype| rig.out(dtype, (1, heads)));
            let mut pair = rig.open();
            pair.check(&Op::DeltaGates { x, decay, bias, gates }, 0.0, 4.0);
            let op = Op::DeltaGatesBackward { x, decay, bias, d_gates, d_x, d_decay, d_bias };
            pair.check(&op, 4e-5, 1.0);
        }
    });
}

#[test]
fn gated_norms_and_sigmoid_gates_agree() {
    in_each_type(|dtype, skew| {
        for (rows, heads, dim) in [(3, 2, 5), (9, 1, 300), (1100, 5, 8)] {
            let mut rig = Rig::new(skew);
            let shape = (rows, heads * dim);
            let [x, gate, d_y] = [1, 2, 3].map(|seed| rig.put_noise(dtype, shape, seed));
            let gain = rig.put_noise(dtype, (1, dim), 4);
            let [y, d_x, d_gate] = [(); 3].map(|()| rig.out(dtype, shape));
            let d_gain = rig.out(dtype, (1, dim));
            let mut pair = rig.open();
            let epsilon = 1e-2;
            pair.check(&Op::GatedNorm { x, gate, gain, y, epsilon }, 2e-6, 1.0);
            let op = Op::GatedNormBackward { x, gate, gain, d_y, d_x, d_gate, d_gain, epsilon };
            pair.check(&op, 2e-5, 1.0);
            pair.check_exact(&Op::SigmoidGate { x, gate, y });
            pair.check_exact(&Op::SigmoidGateBackward { x, gate, d: d_y, d_gate });
        }
    });
}
