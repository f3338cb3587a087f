//! Gated delta rule (arXiv 2412.06464), a linear attention with a state for each head: its shape, and
//! checks of its ops.
//!
//! A document is cut into chunks of [`DELTA_CHUNK`] rows, from its own first row on. So a document has
//! the bits that it has alone. States are kept at the starts of chunks. In a sample, chunks that
//! continue a document start at least [`DELTA_CHUNK`] rows apart, so one of them at most starts in each
//! run of [`DELTA_CHUNK`] rows, and the number of its run is the place of its state.

use super::check::{all_of, check_starts, one_of, same};
use crate::{Dtype, Op, Tensor};

/// Rows of a chunk of the gated delta rule.
pub const DELTA_CHUNK: usize = 64;

/// Largest number of elements of a key of the gated delta rule.
pub const WIDEST_DELTA_KEY: usize = 128;

/// Largest number of weights of a channel of [`Op::Convolution`].
pub const MOST_TAPS: usize = 8;

/// Shape of the gated delta rule. A row of `qkv` (B T, 2 K d + H e) has K heads of queries, K heads of
/// keys of d elements each, and H heads of values of e elements each. Each run of H / K heads of values
/// shares a head of queries and of keys.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeltaHeads {
    /// K: number of this rank's heads of keys.
    pub keys: usize,
    /// H: number of this rank's heads of values. `keys` divides it.
    pub values: usize,
    /// d: number of elements of a key.
    pub key_dim: usize,
    /// e: number of elements of a value.
    pub value_dim: usize,
    /// T: tokens of a sample.
    pub seq_len: usize,
}

impl DeltaHeads {
    /// Number of heads of values that share a head of keys.
    pub const fn group(&self) -> usize {
        self.values / self.keys
    }

    /// Columns of `qkv`: 2 K d + H e.
    pub const fn columns(&self) -> usize {
        2 * self.keys * self.key_dim + self.values * self.value_dim
    }

    /// Elements of the states of all heads: H d e.
    pub const fn state_len(&self) -> usize {
        self.values * self.key_dim * self.value_dim
    }

    /// Number of places of states of a sample.
    pub const fn places(&self) -> usize {
        self.seq_len.div_ceil(DELTA_CHUNK)
    }

    /// Multiply-adds of the forward pass for each row of each head of values: three products with a
    /// state, and the halves of four products inside a chunk.
    const fn multiply_adds(&self) -> usize {
        3 * self.key_dim * self.value_dim + DELTA_CHUNK * (self.key_dim + self.value_dim)
    }

    /// FLOPs of the forward pass over `rows` rows.
    pub fn flops(&self, rows: usize) -> f64 {
        2.0 * (rows * self.values * self.multiply_adds()) as f64
    }

    fn check(&self, qkv: Tensor) -> Result<(), String> {
        let Self { keys, values, key_dim, value_dim, seq_len } = *self;
        if [keys, values, key_dim, value_dim, seq_len].contains(&0) || !values.is_multiple_of(keys)
        {
            return Err(format!("{values} heads of values share {keys} of keys, {seq_len} tokens"));
        }
        if key_dim > WIDEST_DELTA_KEY {
            return Err(format!("keys of {key_dim} elements; at most {WIDEST_DELTA_KEY}"));
        }
        all_of(&[same(qkv.shape().1, self.columns()), same(qkv.shape().0 % seq_len, 0)])
    }

    /// Checks gates (B T, 2 H) F32, values (B T, H e) and states (B places, H d e) F32.
    fn check_others(&self, gates: Tensor, out: Tensor, states: Tensor) -> Result<(), String> {
        let rows = out.shape().0;
        let samples = rows / self.seq_len;
        all_of(&[
            one_of(gates, Dtype::F32, rows * 2 * self.values),
            same(out.shape().1, self.values * self.value_dim),
            one_of(states, Dtype::F32, samples * self.places() * self.state_len()),
        ])
    }
}

impl DeltaHeads {
    /// Checks the states before the samples of qkv: (B, H d e) F32.
    fn check_initial(&self, qkv: Tensor, initial: Tensor) -> Result<(), String> {
        one_of(initial, Dtype::F32, qkv.shape().0 / self.seq_len * self.state_len())
    }
}

impl Op {
    /// Checks the shapes of an op of the gated delta rule.
    pub(super) fn check_delta(&self) -> Result<(), String> {
        match *self {
            Self::Convolution { x, weight, y, seq_len, starts } => all_of(&[
                check_convolution(x, weight, seq_len),
                same(y.len(), x.len()),
                check_starts(starts, x),
            ]),
            Self::ConvolutionBackward { x, weight, d_y, d_x, d_weight, seq_len, starts } => {
                all_of(&[
                    check_convolution(x, weight, seq_len),
                    same(d_y.len(), x.len()),
                    same(d_x.len(), x.len()),
                    same(d_weight.len(), weight.len()),
                    check_starts(starts, x),
                ])
            }
            Self::DeltaGates { x, decay, bias, gates } => all_of(&[
                check_gates(x, gates),
                same(2 * decay.len(), x.shape().1),
                same(bias.len(), decay.len()),
            ]),
            Self::DeltaGatesBackward { x, decay, bias, d_gates, d_x, d_decay, d_bias } => {
                all_of(&[
                    check_gates(x, d_gates),
                    same(d_x.len(), x.len()),
                    same(2 * decay.len(), x.shape().1),
                    same(bias.len(), decay.len()),
                    same(d_decay.len(), decay.len()),
                    same(d_bias.len(), decay.len()),
                ])
            }
            Self::DeltaRule { qkv, gates, out, states, initial, heads, starts } => all_of(&[
                heads.check(qkv),
                same(out.shape().0, qkv.shape().0),
                heads.check_others(gates, out, states),
                initial.map_or(Ok(()), |initial| heads.check_initial(qkv, initial)),
                check_starts(starts, qkv),
            ]),
            Self::DeltaRuleBackward {
                qkv,
                gates,
                states,
                d_out,
                d_qkv,
                d_gates,
                heads,
                starts,
            } => all_of(&[
                heads.check(qkv),
                same(d_out.shape().0, qkv.shape().0),
                heads.check_others(gates, d_out, states),
                same(d_qkv.len(), qkv.len()),
                one_of(d_gates, Dtype::F32, gates.len()),
                check_starts(starts, qkv),
            ]),
            Self::GatedNorm { x, gate, gain, y, .. } => {
                all_of(&[check_gated(x, gain), same(gate.len(), x.len()), same(y.len(), x.len())])
            }
            Self::GatedNormBackward { x, gate, gain, d_y, d_x, d_gate, d_gain, .. } => all_of(&[
                check_gated(x, gain),
                same(gate.len(), x.len()),
                same(d_y.len(), x.len()),
                same(d_x.len(), x.len()),
                same(d_gate.len(), x.len()),
                same(d_gain.len(), gain.len()),
            ]),
            Self::SigmoidGate { x, gate, y } => {
                all_of(&[same(gate.len(), x.len()), same(y.len(), x.len())])
            }
            Self::SigmoidGateBackward { x, gate, d, d_gate } => all_of(&[
                same(gate.len(), x.len()),
                same(d.len(), x.len()),
                same(d_gate.len(), x.len()),
            ]),
            _ => Err(format!("{} is no op of the gated delta rule", self.name())),
        }
    }
}

fn check_convolution(x: Tensor, weight: Tensor, seq_len: usize) -> Result<(), String> {
    let ((rows, channels), (of, taps)) = (x.shape(), weight.shape());
    if taps == 0 || taps > MOST_TAPS {
        return Err(format!("{taps} weights of a channel, not 1 to {MOST_TAPS}"));
    }
    if seq_len == 0 {
        return Err("samples without tokens".into());
    }
    all_of(&[same(of, channels), same(rows % seq_len, 0)])
}

fn check_gates(x: Tensor, gates: Tensor) -> Result<(), String> {
    all_of(&[same(x.shape().1 % 2, 0), one_of(gates, Dtype::F32, x.len())])
}

fn check_gated(x: Tensor, gain: Tensor) -> Result<(), String> {
    if gain.is_empty() {
        return Err("a norm of heads without elements".into());
    }
    same(x.shape().1 % gain.len(), 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Arena, Lane, Plan};

    fn tensor(dtype: Dtype, shape: (usize, usize)) -> Tensor {
        Plan::default().tensor((Arena::Device, "test"), "t", dtype, shape)
    }

    fn floats(shape: (usize, usize)) -> Tensor {
        tensor(Dtype::F32, shape)
    }

    #[track_caller]
    fn says(op: &Op, part: &str) {
        let error = op.check(Lane::Compute).expect_err("the op does not fit");
        assert!(error.contains(part), "{error}");
    }

    #[track_caller]
    fn fits(op: &Op) {
        assert_eq!(op.check(Lane::Compute), Ok(()));
    }

    /// The rule of two samples with 2 heads of keys.
    fn rule(values: usize, key_dim: usize, states: (usize, usize), gates: Dtype) -> Op {
        let heads = DeltaHeads { keys: 2, values, key_dim, value_dim: 5, seq_len: 130 };
        Op::DeltaRule {
            qkv: floats((260, heads.columns())),
            gates: tensor(gates, (260, 2 * values)),
            out: floats((260, 5 * values)),
            states: floats(states),
            initial: None,
            heads,
            starts: Some(tensor(Dtype::I32, (1, 260))),
        }
    }

    #[test]
    fn the_rule_has_a_state_for_each_run_of_64_rows() {
        let op = rule(4, 3, (6, 60), Dtype::F32);
        fits(&op);
        // 2 (3 d e + 64 (d + e)) for each of 4 heads and 260 rows.
        assert_eq!(op.flops(), 2.0 * 260.0 * 4.0 * (45.0 + 64.0 * 8.0));
        says(&rule(4, 3, (5, 60), Dtype::F32), "sizes differ");
        says(&rule(4, 3, (6, 60), Dtype::Bf16), "F32");
        says(&rule(3, 3, (6, 45), Dtype::F32), "3 heads of values share 2 of keys");
        says(&rule(4, 129, (6, 2580), Dtype::F32), "keys of 129 elements; at most 128");
    }

    #[test]
    fn a_convolution_has_some_weights_for_each_channel() {
        let of = |channels, taps, seq_len| Op::Convolution {
            x: floats((12, 7)),
            weight: floats((channels, taps)),
            y: floats((12, 7)),
            seq_len,
            starts: None,
        };
        fits(&of(7, 1, 12));
        fits(&of(7, MOST_TAPS, 4));
        says(&of(7, MOST_TAPS + 1, 4), "9 weights of a channel, not 1 to 8");
        says(&of(6, 4, 4), "sizes differ");
        says(&of(7, 4, 5), "sizes differ");
        says(&of(7, 4, 0), "samples without tokens");
    }

    #[test]
    fn gates_and_norms_belong_to_whole_heads() {
        let gates = |columns, dtype| Op::DeltaGates {
            x: floats((3, columns)),
            decay: floats((1, 2)),
            bias: floats((1, 2)),
            gates: tensor(dtype, (3, columns)),
        };
        fits(&gates(4, Dtype::F32));
        says(&gates(6, Dtype::F32), "sizes differ");
        says(&gates(4, Dtype::F16), "F32");
        let norm = |dim| {
            let [x, gate, y] = [(); 3].map(|()| floats((3, 8)));
            Op::GatedNorm { x, gate, gain: floats((1, dim)), y, epsilon: 1e-6 }
        };
        fits(&norm(4));
        says(&norm(3), "sizes differ");
        says(&norm(0), "heads without elements");
    }
}
