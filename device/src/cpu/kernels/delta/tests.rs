use crate::cpu::kernels::testing::{
    Rig, TYPES, assert_close, differences, inner, noise, starts as starts_of,
};
use crate::op::{DeltaHeads, Op};
use crate::{Dtype, Tensor};

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn silu(x: f64) -> f64 {
    x * sigmoid(x)
}

/// The position of each row in its document.
fn positions(lengths: &[usize]) -> Vec<usize> {
    lengths.iter().flat_map(|length| 0..*length).collect()
}

/// The gated delta rule step by step, in f64. A row of `gates` has H times b, then H times g.
fn steps(qkv: &[f64], gates: &[f64], heads: DeltaHeads, positions: &[usize]) -> Vec<f64> {
    let DeltaHeads { keys, values, key_dim, value_dim, .. } = heads;
    let mut states = vec![vec![0.0; key_dim * value_dim]; values];
    let mut out = Vec::new();
    let rows = qkv.chunks(heads.columns()).zip(gates.chunks(2 * values)).zip(positions);
    for ((row, gates), position) in rows {
        for (head, state) in states.iter_mut().enumerate() {
            if *position == 0 {
                state.fill(0.0);
            }
            let unit = |part: usize| {
                let first = (part * keys + head / heads.group()) * key_dim;
                let x = &row[first..first + key_dim];
                let length = (inner(x, x) + 1e-6).sqrt();
                x.iter().map(|x| x / length).collect::<Vec<_>>()
            };
            let (q, k) = (unit(0), unit(1));
            let v = &row[2 * keys * key_dim + head * value_dim..][..value_dim];
            state.iter_mut().for_each(|s| *s *= gates[values + head].exp());
            for column in 0..value_dim {
                let seen = |x: &[f64], state: &[f64]| {
                    x.iter()
                        .zip(state[column..].iter().step_by(value_dim))
                        .map(|(x, s)| x * s)
                        .sum::<f64>()
                };
                let error = v[column] - seen(&k, state);
                let to = state[column..].iter_mut().step_by(value_dim);
                to.zip(&k).for_each(|(s, k)| *s += gates[head] * k * error);
                out.push(seen(&q, state) / (key_dim as f64).sqrt());
            }
        }
    }
    out
}

/// Tensors of the rule and of its gradients.
struct RuleCase {
    rig: Rig,
    forward: Op,
    backward: Op,
    out: Tensor,
    states: Tensor,
    d_qkv: Tensor,
    d_gates: Tensor,
}

/// CaseInputs of a case: qkv, gates, and the gradient of the values.
type CaseInputs = [Vec<f64>; 3];

fn inputs(heads: DeltaHeads, rows: usize) -> CaseInputs {
    let is_beta = |i: usize| i % (2 * heads.values) < heads.values;
    let noise_of_gates = noise(2, rows * 2 * heads.values);
    let gate = |(i, x): (usize, &f64)| if is_beta(i) { 0.5 + 0.375 * x } else { (x - 1.0) / 8.0 };
    let gates = noise_of_gates.iter().enumerate().map(gate).collect();
    let of_values = rows * heads.values * heads.value_dim;
    [noise(1, rows * heads.columns()), gates, noise(3, of_values)]
}

impl RuleCase {
    fn new(
        threads: usize,
        dtype: Dtype,
        heads: DeltaHeads,
        of: &CaseInputs,
        lengths: &[usize],
    ) -> Self {
        let [qkv_values, gates, d_out] = of;
        let (mut rig, width) = (Rig::new(threads), heads.values * heads.value_dim);
        let rows = d_out.len() / width;
        let qkv = rig.put(dtype, (rows, heads.columns()), qkv_values);
        let gates = rig.put(Dtype::F32, (rows, 2 * heads.values), gates);
        let d_out = rig.put(dtype, (rows, width), d_out);
        let out = rig.out(dtype, (rows, width));
        let places = rows / heads.seq_len * heads.places();
        let states = rig.out(Dtype::F32, (places, heads.state_len()));
        let d_qkv = rig.out(dtype, (rows, heads.columns()));
        let d_gates = rig.out(Dtype::F32, (rows, 2 * heads.values));
        let starts =
            (!lengths.is_empty()).then(|| rig.put_ints(&starts_of(heads.seq_len, lengths)));
        let forward = Op::DeltaRule { qkv, gates, out, states, initial: None, heads, starts };
        let backward =
            Op::DeltaRuleBackward { qkv, gates, states, d_out, d_qkv, d_gates, heads, starts };
        rig.run(&forward);
        rig.run(&backward);
        Self { rig, forward, backward, out, states, d_qkv, d_gates }
    }

    fn results(&self) -> [Vec<f64>; 3] {
        [self.out, self.d_qkv, self.d_gates].map(|t| self.rig.get(t))
    }
}

fn heads(keys: usize, values: usize, (key_dim, value_dim): (usize, usize), t: usize) -> DeltaHeads {
    DeltaHeads { keys, values, key_dim, value_dim, seq_len: t }
}

#[test]
fn the_rule_in_chunks_and_its_gradients_are_those_of_the_steps() {
    // Three chunks of a document, one and several heads of values for a head of keys, documents of
    // one row, and two samples.
    let cases: [(DeltaHeads, usize, &[usize]); 4] = [
        (heads(1, 1, (3, 2), 135), 135, &[]),
        (heads(1, 3, (2, 3), 131), 131, &[1, 65, 1, 64]),
        (heads(2, 2, (4, 1), 66), 132, &[66, 2, 64]),
        (heads(2, 4, (3, 2), 20), 40, &[7, 13, 20]),
    ];
    for (heads, rows, lengths) in cases {
        let of = inputs(heads, rows);
        let [qkv, gates, d_out] = &of;
        let positions = positions(if lengths.is_empty() { &[135] } else { lengths });
        let out = steps(qkv, gates, heads, &positions);
        let d_qkv = differences(qkv, |x| inner(d_out, &steps(x, gates, heads, &positions)));
        let d_gates = differences(gates, |x| inner(d_out, &steps(qkv, x, heads, &positions)));
        for (dtype, ulp) in TYPES {
            let [got, d_q, d_g] = RuleCase::new(1, dtype, heads, &of, lengths).results();
            assert_close(&got, &out, 2e-6, ulp);
            assert_close(&d_q, &d_qkv, 2e-5, ulp);
            assert_close(&d_g, &d_gates, 2e-5, 1e-6);
        }
    }
}

#[test]
fn a_document_has_the_bits_that_it_has_alone() {
    let (lengths, width) = ([65, 1, 130, 4], 200);
    let heads = heads(1, 2, (5, 3), width);
    let of = inputs(heads, width);
    let together = RuleCase::new(1, Dtype::Bf16, heads, &of, &lengths).results();
    let mut first = 0;
    for length in lengths {
        let heads = DeltaHeads { seq_len: length, ..heads };
        let part = |x: &Vec<f64>| {
            let each = x.len() / width;
            x[first * each..(first + length) * each].to_vec()
        };
        let alone = RuleCase::new(1, Dtype::Bf16, heads, &of.each_ref().map(part), &[]);
        assert_eq!(alone.results(), together.each_ref().map(part), "{length} rows");
        first += length;
    }
}

#[test]
fn threads_change_no_bit_of_the_rule() {
    let heads = heads(2, 4, (16, 8), 100);
    let run = |threads| {
        let case = RuleCase::new(threads, Dtype::Bf16, heads, &inputs(heads, 200), &[]);
        (case.results(), case.rig.get(case.states))
    };
    assert_eq!(run(1), run(3));
}

#[test]
fn a_sample_goes_on_from_the_states_before_it() {
    let whole = heads(1, 2, (5, 3), 150);
    let of = inputs(whole, 150);
    let case = RuleCase::new(1, Dtype::Bf16, whole, &of, &[]);
    let [out, ..] = case.results();
    let states = case.rig.get(case.states);
    for first in [64, 128] {
        let heads = DeltaHeads { seq_len: 150 - first, ..whole };
        let mut rig = Rig::new(1);
        // Behind another sample, which starts from 0.
        let mut put = |dtype, values: &[f64]| {
            let (width, both) =
                (values.len() / 150, values[first * (values.len() / 150)..].repeat(2));
            rig.put(dtype, (2 * heads.seq_len, width), &both)
        };
        let (qkv, gates) = (put(Dtype::Bf16, &of[0]), put(Dtype::F32, &of[1]));
        let mut before = vec![0.0; heads.state_len()];
        before.extend(&states[first / 64 * heads.state_len()..][..heads.state_len()]);
        let initial = Some(rig.put(Dtype::F32, (2, heads.state_len()), &before));
        let rest = rig.out(Dtype::Bf16, (2 * heads.seq_len, 6));
        let of_rest = rig.out(Dtype::F32, (2 * heads.places(), heads.state_len()));
        let states = of_rest;
        let op = |starts| Op::DeltaRule { qkv, gates, out: rest, states, initial, heads, starts };
        rig.run(&op(None));
        let got = rig.get(rest);
        let (zero, from_state) = got.split_at(got.len() / 2);
        assert_eq!(from_state, &out[first * 6..], "{first} rows before");
        assert_ne!(zero, from_state);
        // A second document of a sample starts from 0.
        let starts =
            Some(rig.put_ints(&starts_of(heads.seq_len, &[1, heads.seq_len - 1].repeat(2))));
        rig.run(&op(starts));
        let got = rig.get(rest);
        let (zero, from_state) = got.split_at(got.len() / 2);
        assert_ne!(zero[..6], from_state[..6]);
        assert_eq!(zero[6..], from_state[6..]);
    }
}

#[test]
fn states_are_kept_before_chunks_that_go_on() {
    let heads = heads(1, 1, (2, 2), 200);
    let mut case = RuleCase::new(1, Dtype::F32, heads, &inputs(heads, 200), &[66, 4, 65, 65]);
    let is_state: Vec<bool> =
        case.rig.get(case.states).chunks(4).map(|state| state.iter().any(|x| *x != 0.0)).collect();
    // The second chunk of a document starts in rows 64, 134 and 199; none in rows 0 to 63.
    assert_eq!(is_state, [false, true, true, true]);
    let before = case.results();
    let RuleCase { forward, backward, .. } = &case;
    let [forward, backward] = [forward.clone(), backward.clone()];
    case.rig.run(&forward);
    case.rig.run(&backward);
    assert_eq!(case.results(), before);
}

/// The convolution with SiLU of x (rows, count), in f64.
fn convolved(x: &[f64], weight: &[f64], taps: usize, positions: &[usize]) -> Vec<f64> {
    let count = weight.len() / taps;
    let element = |(i, _): (usize, &f64)| {
        let (row, channel) = (i / count, i % count);
        let seen = (0..taps).filter(|back| *back <= positions[row]);
        let terms = seen.map(|back| {
            weight[channel * taps + taps - 1 - back] * x[(row - back) * count + channel]
        });
        silu(terms.sum())
    };
    x.iter().enumerate().map(element).collect()
}

#[test]
fn a_convolution_and_its_gradients_end_at_documents() {
    for (taps, count, rows, lengths) in [
        (4, 70, 24, &[5, 1, 6, 12][..]),
        (1, 3, 12, &[12]),
        (8, 2, 36, &[12, 2, 1, 9, 12]),
        (2, 65, 36, &[12, 12, 12]),
    ] {
        let (x, weight, d) =
            (noise(1, rows * count), noise(2, count * taps), noise(3, rows * count));
        let positions = positions(lengths);
        let y = convolved(&x, &weight, taps, &positions);
        let loss = |x: &[f64], weight: &[f64]| inner(&d, &convolved(x, weight, taps, &positions));
        let d_x = differences(&x, |x| loss(x, &weight));
        let d_weight = differences(&weight, |weight| loss(&x, weight));
        for (dtype, ulp) in TYPES {
            let run = |threads| {
                let mut rig = Rig::new(threads);
                let x = rig.put(dtype, (rows, count), &x);
                let weight = rig.put(dtype, (count, taps), &weight);
                let d_y = rig.put(dtype, (rows, count), &d);
                let [y, d_x] = [(); 2].map(|()| rig.out(dtype, (rows, count)));
                let d_weight = rig.out(dtype, (count, taps));
                let one = lengths.iter().all(|length| *length == 12);
                let starts = (!one).then(|| rig.put_ints(&starts_of(12, lengths)));
                let seq_len = 12;
                rig.run(&Op::Convolution { x, weight, y, seq_len, starts });
                rig.run(&Op::ConvolutionBackward {
                    x,
                    weight,
                    d_y,
                    d_x,
                    d_weight,
                    seq_len,
                    starts,
                });
                [y, d_x, d_weight].map(|t| rig.get(t))
            };
            let got = run(1);
            assert_close(&got[0], &y, 1e-6, ulp);
            assert_close(&got[1], &d_x, 4e-6, ulp);
            assert_close(&got[2], &d_weight, 2e-5, ulp);
            assert_eq!(got, run(3));
        }
    }
}

#[test]
fn gates_and_their_gradients_are_the_formula() {
    let (rows, heads) = (40, 3);
    let x: Vec<f64> = noise(1, rows * 2 * heads).iter().map(|x| 16.0 * x).collect();
    let (decay, bias, d) = (noise(2, heads), noise(3, heads), noise(4, rows * 2 * heads));
    let gates = |x: &[f64], decay: &[f64], bias: &[f64]| {
        let of = |(i, x): (usize, &f64)| {
            let head = i % heads;
            let softplus = |x: f64| x.max(0.0) + (-x.abs()).exp().ln_1p();
            if i % (2 * heads) < heads {
                sigmoid(*x)
            } else {
                -decay[head].exp() * softplus(x + bias[head])
            }
        };
        x.iter().enumerate().map(of).collect::<Vec<_>>()
    };
    let want = gates(&x, &decay, &bias);
    let d_x = differences(&x, |x| inner(&d, &gates(x, &decay, &bias)));
    let d_decay = differences(&decay, |decay| inner(&d, &gates(&x, decay, &bias)));
    let d_bias = differences(&bias, |bias| inner(&d, &gates(&x, &decay, bias)));
    for (dtype, ulp) in TYPES {
        let mut rig = Rig::new(1);
        let x = rig.put(dtype, (rows, 2 * heads), &x);
        let (decay, bias) = (rig.put(dtype, (1, heads), &decay), rig.put(dtype, (1, heads), &bias));
        let d_gates = rig.put(Dtype::F32, (rows, 2 * heads), &d);
        let gates = rig.out(Dtype::F32, (rows, 2 * heads));
        let t_d_x = rig.out(dtype, (rows, 2 * heads));
        let [t_d_decay, t_d_bias] = [(); 2].map(|()| rig.out(dtype, (1, heads)));
        rig.run(&Op::DeltaGates { x, decay, bias, gates });
        rig.run(&Op::DeltaGatesBackward {
            x,
            decay,
            bias,
            d_gates,
            d_x: t_d_x,
            d_decay: t_d_decay,
            d_bias: t_d_bias,
        });
        assert_close(&rig.get(gates), &want, 1e-10, 1e-6);
        assert_close(&rig.get(t_d_x), &d_x, 1e-6, ulp);
        assert_close(&rig.get(t_d_decay), &d_decay, 1e-3, ulp);
        assert_close(&rig.get(t_d_bias), &d_bias, 2e-5, ulp);
    }
}

#[test]
fn a_gated_norm_and_its_gradients_are_the_formula() {
    const EPSILON: f64 = 1e-2;
    for (rows, heads, dim) in [(3, 2, 5), (40, 1, 70), (17, 3, 1)] {
        let n = rows * heads * dim;
        let (x, gate, d, gain) = (noise(1, n), noise(2, n), noise(3, n), noise(4, dim));
        let norm = |x: &[f64], gate: &[f64], gain: &[f64]| {
            let heads = x.chunks(dim).zip(gate.chunks(dim));
            let of = |(x, gate): (&[f64], &[f64])| {
                let root = (inner(x, x) / dim as f64 + EPSILON).sqrt();
                let terms = x.iter().zip(gate).zip(gain);
                terms.map(|((x, z), g)| x / root * g * silu(*z)).collect::<Vec<_>>()
            };
            heads.flat_map(of).collect::<Vec<_>>()
        };
        let y = norm(&x, &gate, &gain);
        let d_x = differences(&x, |x| inner(&d, &norm(x, &gate, &gain)));
        let d_gate = differences(&gate, |gate| inner(&d, &norm(&x, gate, &gain)));
        let d_gain = differences(&gain, |gain| inner(&d, &norm(&x, &gate, gain)));
        for (dtype, ulp) in TYPES {
            let mut rig = Rig::new(3);
            let shape = (rows, heads * dim);
            let [x, gate, d_y] = [&x, &gate, &d].map(|values| rig.put(dtype, shape, values));
            let gain = rig.put(dtype, (1, dim), &gain);
            let [t_y, t_d_x, t_d_gate] = [(); 3].map(|()| rig.out(dtype, shape));
            let t_d_gain = rig.out(dtype, (1, dim));
            let epsilon = EPSILON as f32;
            rig.run(&Op::GatedNorm { x, gate, gain, y: t_y, epsilon });
            let (d_x_of, d_gate_of, d_gain_of) = (t_d_x, t_d_gate, t_d_gain);
            rig.run(&Op::GatedNormBackward {
                x,
                gate,
                gain,
                d_y,
                d_x: d_x_of,
                d_gate: d_gate_of,
                d_gain: d_gain_of,
                epsilon,
            });
            assert_close(&rig.get(t_y), &y, 1e-6, ulp);
            assert_close(&rig.get(t_d_x), &d_x, 2e-5, ulp);
            assert_close(&rig.get(t_d_gate), &d_gate, 2e-6, ulp);
            assert_close(&rig.get(t_d_gain), &d_gain, 2e-5, ulp);
        }
    }
}

#[test]
fn a_sigmoid_gate_and_its_gradients_are_the_formula() {
    let n = 700;
    let (x, gate, d) = (noise(1, n), noise(2, n), noise(3, n));
    let gated = |x: &[f64], gate: &[f64]| -> Vec<f64> {
        x.iter().zip(gate).map(|(x, z)| x * sigmoid(*z)).collect()
    };
    let want = gated(&x, &gate);
    let d_x: Vec<f64> = d.iter().zip(&gate).map(|(d, z)| d * sigmoid(*z)).collect();
    let slope = |z: f64| sigmoid(z) * (1.0 - sigmoid(z));
    let d_gate: Vec<f64> =
        d.iter().zip(&x).zip(&gate).map(|((d, x), z)| d * x * slope(*z)).collect();
    for (dtype, ulp) in TYPES {
        let mut rig = Rig::new(1);
        let [x, gate, t_d] = [&x, &gate, &d].map(|values| rig.put(dtype, (7, 100), values));
        let [y, t_d_gate] = [(); 2].map(|()| rig.out(dtype, (7, 100)));
        rig.run(&Op::SigmoidGate { x, gate, y });
        rig.run(&Op::SigmoidGateBackward { x, gate, d: t_d, d_gate: t_d_gate });
        assert_close(&rig.get(y), &want, 1e-6, ulp);
        assert_close(&rig.get(t_d), &d_x, 1e-6, ulp);
        assert_close(&rig.get(t_d_gate), &d_gate, 1e-6, ulp);
    }
}

/// The tensors of tests/fixtures/delta-layer.safetensors, which has float64 alone, in the order of
/// their names.
fn of_transformers<const N: usize>(lengths: [usize; N]) -> [Vec<f64>; N] {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/delta-layer.safetensors");
    let bytes = std::fs::read(path).expect("a fixture");
    let (header, rest) = bytes.split_first_chunk::<8>().expect("the length of the header");
    let data = &rest[u64::from_le_bytes(*header) as usize..];
    let mut all = data.as_chunks::<8>().0.iter().map(|x| f64::from_le_bytes(*x));
    assert_eq!(all.len(), lengths.iter().sum());
    lengths.map(|length| all.by_ref().take(length).collect())
}

/// Columns `range` of each row.
fn columns(x: &[f64], width: usize, range: std::ops::Range<usize>) -> Vec<f64> {
    x.chunks(width).flat_map(|row| row[range.clone()].to_vec()).collect()
}

#[test]
fn a_layer_of_packed_documents_is_that_of_transformers() {
    let heads = heads(2, 4, (6, 5), 200);
    let (rows, channels, width, all) = (200, 44, 20, 72);
    let lengths = [4, 4, 4, 5, 176, rows * all, rows * width, 4, 5, 176, rows * all, rows * width];
    let [bias, d_bias, d_decay, d_gain, d_weight, d_x, d_y, decay, gain, weight, x, y] =
        of_transformers(lengths);
    let mut rig = Rig::new(1);
    let mut put = |shape, values: &[f64]| rig.put(Dtype::F32, shape, values);
    let part = |x: &[f64], range| columns(x, all, range);
    let u = put((rows, channels), &part(&x, 0..44));
    let z = put((rows, width), &part(&x, 44..64));
    let of_gates = put((rows, 8), &part(&x, 64..72));
    let (decay, bias) = (put((1, 4), &decay), put((1, 4), &bias));
    let (gain, weight) = (put((1, 5), &gain), put((channels, 4), &weight));
    let d_out = put((rows, width), &d_y);
    let mut out = |shape| rig.out(Dtype::F32, shape);
    let [qkv, d_qkv, d_u] = [(); 3].map(|()| out((rows, channels)));
    let [gates, d_gates, d_of_gates] = [(); 3].map(|()| out((rows, 8)));
    let [values, d_values, d_z, normed] = [(); 4].map(|()| out((rows, width)));
    let states = out((heads.places(), heads.state_len()));
    let [d_decay_of, d_bias_of] = [(); 2].map(|()| out((1, 4)));
    let (d_gain_of, d_weight_of) = (out((1, 5)), out((channels, 4)));
    let starts = Some(rig.put_ints(&starts_of(200, &[65, 1, 130, 4])));
    let (seq_len, epsilon) = (200, 1e-6);
    rig.run(&Op::Convolution { x: u, weight, y: qkv, seq_len, starts });
    rig.run(&Op::DeltaGates { x: of_gates, decay, bias, gates });
    rig.run(&Op::DeltaRule { qkv, gates, out: values, states, initial: None, heads, starts });
    rig.run(&Op::GatedNorm { x: values, gate: z, gain, y: normed, epsilon });
    rig.run(&Op::GatedNormBackward {
        x: values,
        gate: z,
        gain,
        d_y: d_out,
        d_x: d_values,
        d_gate: d_z,
        d_gain: d_gain_of,
        epsilon,
    });
    let d_out = d_values;
    rig.run(&Op::DeltaRuleBackward { qkv, gates, states, d_out, d_qkv, d_gates, heads, starts });
    rig.run(&Op::DeltaGatesBackward {
        x: of_gates,
        decay,
        bias,
        d_gates,
        d_x: d_of_gates,
        d_decay: d_decay_of,
        d_bias: d_bias_of,
    });
    rig.run(&Op::ConvolutionBackward {
        x: u,
        weight,
        d_y: d_qkv,
        d_x: d_u,
        d_weight: d_weight_of,
        seq_len,
        starts,
    });
    for (name, t, want) in [
        ("y", normed, y),
        ("d_q, d_k, d_v", d_u, part(&d_x, 0..44)),
        ("d_z", d_z, part(&d_x, 44..64)),
        ("d_b, d_a", d_of_gates, part(&d_x, 64..72)),
        ("d_decay", d_decay_of, d_decay),
        ("d_bias", d_bias_of, d_bias),
        ("d_gain", d_gain_of, d_gain),
        ("d_weight", d_weight_of, d_weight),
    ] {
        // Relative to the largest element, where PyTorch in float32 is off by up to 9.1e-6.
        let largest = want.iter().fold(0.0f64, |most, x| most.max(x.abs()));
        let got = rig.get(t);
        let off = got.iter().zip(&want).map(|(g, w)| (g - w).abs()).fold(0.0, f64::max) / largest;
        assert!(off < 1e-5, "{name} is off by {off:e} of {largest:e}");
    }
}
