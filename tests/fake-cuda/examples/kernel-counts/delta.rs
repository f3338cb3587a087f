//! The gated delta rule at the shapes of models, over a sample of one document.

use crate::{Case, Tensors};
use device::{DeltaHeads, Dtype, Op};

/// Rows of the part that runs: two chunks. Their work grows with the rows.
const ROWS: usize = 128;
/// Weights of a channel of the convolution.
const TAPS: usize = 4;

/// Cases of a sample with `heads` and values of the type `value`. Units are rows of heads of values.
pub(crate) fn cases(heads: DeltaHeads, value: Dtype) -> Vec<Case> {
    let (whole, part) = (heads.seq_len * heads.values, ROWS * heads.group());
    let of = move |units: usize| match units == whole {
        true => heads,
        false => DeltaHeads { keys: 1, values: heads.group(), seq_len: ROWS, ..heads },
    };
    let rule = move |t: &mut Tensors, units: usize, backward: bool| {
        let heads = of(units);
        let (rows, width) = (heads.seq_len, heads.values * heads.value_dim);
        let [qkv, d_qkv] = [(); 2].map(|()| t.make(value, (rows, heads.columns())));
        let [out, d_out] = [(); 2].map(|()| t.make(value, (rows, width)));
        let [gates, d_gates] = [(); 2].map(|()| t.make(Dtype::F32, (rows, 2 * heads.values)));
        let states = t.make(Dtype::F32, (heads.places(), heads.state_len()));
        let starts = None;
        if backward {
            Op::DeltaRuleBackward { qkv, gates, states, d_out, d_qkv, d_gates, heads, starts }
        } else {
            Op::DeltaRule { qkv, gates, out, states, initial: None, heads, starts }
        }
    };
    let convolution = move |t: &mut Tensors, rows: usize| {
        let [x, y] = [(); 2].map(|()| t.make(value, (rows, heads.columns())));
        let weight = t.make(value, (heads.columns(), TAPS));
        Op::Convolution { x, weight, y, seq_len: rows, starts: None }
    };
    let norm = move |t: &mut Tensors, rows: usize| {
        let [x, gate, y] = [(); 3].map(|()| t.make(value, (rows, heads.values * heads.value_dim)));
        let gain = t.make(value, (1, heads.value_dim));
        Op::GatedNorm { x, gate, gain, y, epsilon: 1e-6 }
    };
    let case = |name, whole, part, make| Case { name, make, whole, part, times: 1.0 };
    vec![
        case("delta rule", whole, part, Box::new(move |t: &mut Tensors, n| rule(t, n, false))),
        case(
            "delta rule backward",
            whole,
            part,
            Box::new(move |t: &mut Tensors, n| rule(t, n, true)),
        ),
        case("convolution", heads.seq_len, 16, Box::new(convolution)),
        case("gated norm", heads.seq_len, 16, Box::new(norm)),
    ]
}
