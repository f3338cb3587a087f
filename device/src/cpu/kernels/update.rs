//! The optimizer's update and the sums of squares before it: [`crate::numerics`] on the workers.

use super::{Memory, not_a_kernel, slice, slice_mut, values, values_mut};
use crate::ViewMut;
use crate::cpu::workers::{Rows, Slice, Workers};
use crate::numerics::{self, Master, Noise, States, Update, control};
use crate::op::Op;
use crate::view::BLOCK;

pub(super) fn run(op: &Op, m: &impl Memory, workers: &Workers) -> Result<(), String> {
    match *op {
        Op::ChunkSquares { x, partials, chunk, counted } => {
            let x = values(m, x)?;
            let partials = Slice { data: slice_mut::<f64>(m, partials)?, each: 1 };
            let chunk = chunk.max(1);
            workers.split(partials.data.len(), x.len(), partials, &|chunks, partials, _| {
                let at = (chunks.start * chunk).min(x.len());
                let x = x.slice(at..x.len());
                numerics::chunk_squares(x, partials.data, chunk, counted.saturating_sub(at));
            });
        }
        Op::Update { rule, grad, master, momentum, variance, param, control: words, decayed } => {
            let words = slice::<f64>(m, words)?;
            if words.len() < control::WORDS {
                return Err(format!("a control block of {} words", words.len()));
            }
            let grad = values(m, grad)?;
            let state = |t| slice_mut::<f32>(m, t).map(|data| Slice { data, each: BLOCK });
            let (master, momentum, variance) = (state(master)?, state(momentum)?, state(variance)?);
            let param = Rows { view: values_mut(m, param)?, each: BLOCK };
            let len = grad.len();
            let out = ((master, momentum), (variance, param));
            workers.split(len.div_ceil(BLOCK), len, out, &|blocks, out, _| {
                let ((master, momentum), (variance, param)) = out;
                let at = blocks.start * BLOCK;
                let update = Update {
                    rule,
                    control: words,
                    grad: grad.slice(at..at + master.data.len()),
                    states: States {
                        master: Master::Whole(master.data),
                        momentum: ViewMut::F32(momentum.data),
                        variance: ViewMut::F32(variance.data),
                    },
                    param: param.view,
                    decayed: decayed.saturating_sub(at),
                    noise: Noise { runs: &[], start: 0 },
                    streams: false,
                };
                // Types and sizes are those that were checked at submit.
                let _ = numerics::update(update);
            });
        }
        _ => return not_a_kernel(),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Rig, assert_close, noise};
    use super::*;
    use crate::{Dtype, Rule};

    #[test]
    fn an_update_is_that_of_numerics_with_any_number_of_threads() {
        let n = 70_001;
        let rule = Rule::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
        let mut words = [0.0; control::WORDS];
        words[control::LR] = 1e-2;
        words[control::FACTOR] = 0.5;
        words[control::MOMENTUM_CORRECTION] = 10.0;
        words[control::VARIANCE_CORRECTION] = 20.0;
        let run = |threads| {
            let mut rig = Rig::new(threads);
            let grad = rig.put(Dtype::Bf16, (1, n), &noise(1, n));
            let [master, momentum] = [2, 3].map(|s| rig.put(Dtype::F32, (1, n), &noise(s, n)));
            let variance: Vec<f64> = noise(4, n).iter().map(|x| x * x).collect();
            let variance = rig.put(Dtype::F32, (1, n), &variance);
            let param = rig.out(Dtype::Bf16, (1, n));
            let control = rig.put(Dtype::F64, (1, words.len()), &words);
            let decayed = 50_000;
            rig.run(&Op::Update {
                rule,
                grad,
                master,
                momentum,
                variance,
                param,
                control,
                decayed,
            });
            [master, momentum, variance, param].map(|t| rig.get(t))
        };
        let one = run(1);
        assert_eq!(one, run(3));
        let mut states =
            [2, 3, 4].map(|s| noise(s, n).iter().map(|x| *x as f32).collect::<Vec<_>>());
        states[2].iter_mut().for_each(|x| *x *= *x);
        let grad: Vec<f32> = noise(1, n).iter().map(|x| *x as f32).collect();
        let [master, momentum, variance] = &mut states;
        let states = States {
            master: Master::Whole(master),
            momentum: ViewMut::F32(momentum),
            variance: ViewMut::F32(variance),
        };
        let mut param = vec![0.0; n];
        let (param, grad) = (ViewMut::F32(&mut param), crate::View::F32(&grad));
        let (noise, decayed, streams) = (Noise { runs: &[], start: 0 }, 50_000, false);
        let control = &words;
        let update = Update { rule, control, grad, states, param, decayed, noise, streams };
        numerics::update(update).unwrap();
        assert_close(&one[0], &master.iter().map(|x| f64::from(*x)).collect::<Vec<_>>(), 0.0, 0.0);
    }

    #[test]
    fn squares_are_summed_by_chunk_with_any_number_of_threads() {
        let (n, chunk, counted) = (100_000, 4097, 70_000);
        let x = noise(1, n);
        let want: Vec<f64> = (0..n.div_ceil(chunk))
            .map(|i| {
                let end = ((i + 1) * chunk).min(counted);
                x[(i * chunk).min(end)..end].iter().map(|x| x * x).sum()
            })
            .collect();
        for threads in [1, 3] {
            let mut rig = Rig::new(threads);
            let x = rig.put(Dtype::F16, (1, n), &x);
            let partials = rig.out(Dtype::F64, (1, want.len()));
            rig.run(&Op::ChunkSquares { x, partials, chunk, counted });
            assert_close(&rig.get(partials), &want, 0.0, 0.0);
        }
    }

    #[test]
    fn a_short_control_block_is_an_error() {
        let mut rig = Rig::new(1);
        let [grad, master, momentum, variance, param] =
            [(); 5].map(|()| rig.out(Dtype::F32, (1, 4)));
        let control = rig.out(Dtype::F64, (1, 3));
        let rule = Rule::Sgd { weight_decay: 0.0 };
        let op = Op::Update { rule, grad, master, momentum, variance, param, control, decayed: 0 };
        assert!(rig.try_run(&op).expect_err("control").contains("control"));
    }
}
