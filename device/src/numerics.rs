//! The arithmetic that host and device must share bit for bit: the update rule, sums of squares, and the
//! control block through which a step's decisions travel.
//!
//! Everything is elementwise with explicit fma, IEEE square root and division, or an fp64 sum in a fixed
//! order; so neither threads, tiles nor SIMD width change a bit.

use crate::op::Rule;
use crate::{View, ViewMut, view::BLOCK};

/// Words (F64) of the control block: what one step decides and the update reads.
pub mod control {
    /// Optimizer steps begun, this one included; skipped ones too.
    pub const STEP: usize = 0;
    /// Updates applied (Adam's t).
    pub const APPLIED: usize = 1;
    /// 1: this step's gradients are not finite and nothing is updated.
    pub const SKIP: usize = 2;
    /// By what a summed gradient is multiplied: unscale, mean over ranks and micro-batches, clip.
    pub const FACTOR: usize = 3;
    /// Learning rate of this step.
    pub const LR: usize = 4;
    /// 1 / (1 - beta1^t)
    pub const MOMENTUM_CORRECTION: usize = 5;
    /// 1 / (1 - beta2^t)
    pub const VARIANCE_CORRECTION: usize = 6;
    /// Norm of the unscaled mean gradient, before clipping.
    pub const NORM: usize = 7;
    /// Loss scale of the step now running (of the next one, once this one is decided).
    pub const LOSS_SCALE: usize = 8;
    /// Loss scale that the decided step had.
    pub const LOSS_SCALE_USED: usize = 9;
    /// Steps without overflow since the scale last changed.
    pub const GOOD_STEPS: usize = 10;
    /// Overflows that the scale still forgives.
    pub const HYSTERESIS_LEFT: usize = 11;
    /// Skipped steps so far.
    pub const SKIPPED: usize = 12;
    /// How many words.
    pub const WORDS: usize = 16;
}

/// Scalars of one update, from the control block.
#[derive(Clone, Copy, Debug)]
struct Scalars {
    skip: bool,
    factor: f32,
    lr: f32,
    momentum_correction: f32,
    variance_correction: f32,
}

impl Scalars {
    fn new(words: &[f64]) -> Self {
        Self {
            skip: words[control::SKIP] != 0.0,
            factor: words[control::FACTOR] as f32,
            lr: words[control::LR] as f32,
            momentum_correction: words[control::MOMENTUM_CORRECTION] as f32,
            variance_correction: words[control::VARIANCE_CORRECTION] as f32,
        }
    }
}

/// fp32 states of a run of parameters.
#[derive(Debug)]
pub struct States<'a> {
    /// The parameters themselves.
    pub master: &'a mut [f32],
    /// First moment.
    pub momentum: &'a mut [f32],
    /// Second moment.
    pub variance: &'a mut [f32],
}

/// One update of a run of parameters: unscale and clip (`control`), weight decay on the first `decayed`
/// elements, `rule` in fp32, and the new parameter rounded into `param`. When the step is skipped only
/// `param` is written, from the master.
pub fn update(
    rule: Rule,
    control: &[f64],
    grad: View<'_>,
    states: States<'_>,
    mut param: ViewMut<'_>,
    decayed: usize,
) {
    let scalars = Scalars::new(control);
    let States { master, momentum, variance } = states;
    pulp::Arch::new().dispatch(|| {
        let mut g = [0.0f32; BLOCK];
        for at in (0..master.len()).step_by(BLOCK) {
            let n = BLOCK.min(master.len() - at);
            let p = &mut master[at..at + n];
            if !scalars.skip {
                grad.load(at, &mut g[..n]);
                let (m, v) = (&mut momentum[at..at + n], &mut variance[at..at + n]);
                let split = decayed.saturating_sub(at).min(n);
                step(
                    rule,
                    scalars,
                    true,
                    &g[..split],
                    [&mut p[..split], &mut m[..split], &mut v[..split]],
                );
                step(
                    rule,
                    scalars,
                    false,
                    &g[split..n],
                    [&mut p[split..], &mut m[split..], &mut v[split..]],
                );
            }
            param.store(at, p);
        }
    });
}

#[inline(always)]
fn step(rule: Rule, s: Scalars, decay: bool, grad: &[f32], [p, m, v]: [&mut [f32]; 3]) {
    let n = grad.len();
    let (p, m, v) = (&mut p[..n], &mut m[..n], &mut v[..n]);
    match rule {
        Rule::AdamW { beta1, beta2, eps, weight_decay } => {
            let shrink = if decay { -s.lr * weight_decay } else { 0.0 };
            for i in 0..n {
                let g = grad[i] * s.factor;
                m[i] = m[i].mul_add(beta1, (1.0 - beta1) * g);
                v[i] = v[i].mul_add(beta2, (1.0 - beta2) * g * g);
                let root = (v[i] * s.variance_correction).sqrt() + eps;
                let direction = m[i] * s.momentum_correction / root;
                p[i] = p[i].mul_add(shrink, p[i]);
                p[i] = direction.mul_add(-s.lr, p[i]);
            }
        }
        Rule::Sgd { weight_decay } => {
            let shrink = if decay { -s.lr * weight_decay } else { 0.0 };
            for i in 0..n {
                p[i] = p[i].mul_add(shrink, p[i]);
                p[i] = (grad[i] * s.factor).mul_add(-s.lr, p[i]);
            }
        }
    }
}

/// Lanes of the fixed summation tree of [`sum_of_squares`].
const SUM_LANES: usize = 16;

/// Sum of squares in fp64, in an order that depends on the length alone: element i goes to lane i mod 16,
/// lanes are added in order. Not finite if any element is not.
pub fn sum_of_squares(x: View<'_>) -> f64 {
    pulp::Arch::new().dispatch(|| {
        let mut lanes = [0.0f64; SUM_LANES];
        let mut block = [0.0f32; BLOCK];
        for at in (0..x.len()).step_by(BLOCK) {
            let n = BLOCK.min(x.len() - at);
            x.load(at, &mut block[..n]);
            for run in block[..n].chunks(SUM_LANES) {
                for (lane, x) in lanes.iter_mut().zip(run) {
                    *lane += f64::from(*x) * f64::from(*x);
                }
            }
        }
        lanes.iter().sum()
    })
}

/// Sums of squares of runs of `chunk` elements, of which the first `counted` elements of x count.
pub fn chunk_squares(x: View<'_>, partials: &mut [f64], chunk: usize, counted: usize) {
    for (i, partial) in partials.iter_mut().enumerate() {
        let end = ((i + 1) * chunk).min(x.len()).min(counted);
        let start = (i * chunk).min(end);
        *partial = sum_of_squares(x.slice(start..end));
    }
}

/// into = x, or into += x, in fp32.
pub fn accumulate(x: View<'_>, into: &mut [f32], first: bool) {
    pulp::Arch::new().dispatch(|| {
        let mut block = [0.0f32; BLOCK];
        for at in (0..into.len()).step_by(BLOCK) {
            let n = BLOCK.min(into.len() - at);
            let sums = &mut into[at..at + n];
            if first {
                x.load(at, sums);
            } else {
                x.load(at, &mut block[..n]);
                sums.iter_mut().zip(&block[..n]).for_each(|(s, x)| *s += x);
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn control(lr: f64, factor: f64, t: i32) -> [f64; control::WORDS] {
        let mut words = [0.0; control::WORDS];
        words[control::LR] = lr;
        words[control::FACTOR] = factor;
        words[control::MOMENTUM_CORRECTION] = 1.0 / (1.0 - 0.9f64.powi(t));
        words[control::VARIANCE_CORRECTION] = 1.0 / (1.0 - 0.95f64.powi(t));
        words
    }

    #[test]
    fn adamw_follows_the_formula_in_f64() {
        let rule = Rule::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
        let n = 700;
        let mut p: Vec<f32> = (0..n).map(|i| (i as f32 * 0.37).sin()).collect();
        let (mut m, mut v, mut out) = (vec![0.0; n], vec![0.0; n], vec![0.0; n]);
        let mut q: Vec<f64> = p.iter().map(|&x| f64::from(x)).collect();
        let (mut qm, mut qv) = (vec![0.0; n], vec![0.0; n]);
        for t in 1..=20 {
            let g: Vec<f32> = (0..n).map(|i| ((i * t as usize) as f32 * 0.11).cos()).collect();
            let states = States { master: &mut p, momentum: &mut m, variance: &mut v };
            update(
                rule,
                &control(1e-3, 0.5, t),
                View::F32(&g),
                states,
                ViewMut::F32(&mut out),
                300,
            );
            for i in 0..n {
                let g = f64::from(g[i]) * 0.5;
                qm[i] = 0.9 * qm[i] + 0.1 * g;
                qv[i] = 0.95 * qv[i] + 0.05 * g * g;
                let decay = if i < 300 { 0.1 } else { 0.0 };
                let (mh, vh) = (qm[i] / (1.0 - 0.9f64.powi(t)), qv[i] / (1.0 - 0.95f64.powi(t)));
                q[i] -= 1e-3 * (mh / (f64::sqrt(vh) + 1e-8) + decay * q[i]);
            }
        }
        let worst = p.iter().zip(&q).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max);
        assert!(worst < 2e-6, "{worst}");
        assert_eq!(p, out);
    }

    #[test]
    fn where_a_tile_is_cut_never_changes_a_bit() {
        let rule = Rule::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
        let n = 1000;
        let g: Vec<f32> = (0..n).map(|i| (i as f32 * 0.7).sin()).collect();
        let run = |cuts: &[usize]| {
            let mut p: Vec<f32> = (0..n).map(|i| (i as f32 * 0.37).sin()).collect();
            let (mut m, mut v, mut out) = (vec![0.1; n], vec![0.2; n], vec![0.0; n]);
            let mut start = 0;
            for &end in cuts {
                let states = States {
                    master: &mut p[start..end],
                    momentum: &mut m[start..end],
                    variance: &mut v[start..end],
                };
                let (grad, param) = (View::F32(&g[start..end]), ViewMut::F32(&mut out[start..end]));
                let decayed = 513usize.saturating_sub(start).min(end - start);
                update(rule, &control(1e-2, 1.0, 3), grad, states, param, decayed);
                start = end;
            }
            out
        };
        assert_eq!(run(&[1000]), run(&[1, 17, 300, 512, 700, 1000]));
    }

    #[test]
    fn a_skipped_update_leaves_the_states_and_writes_the_parameter() {
        let rule = Rule::Sgd { weight_decay: 0.0 };
        let mut words = control(1.0, 1.0, 1);
        words[control::SKIP] = 1.0;
        let (mut p, mut m, mut v, mut out) = ([1.5f32], [0.0f32], [0.0f32], [0.0f32]);
        let states = States { master: &mut p, momentum: &mut m, variance: &mut v };
        update(rule, &words, View::F32(&[f32::NAN]), states, ViewMut::F32(&mut out), 0);
        assert_eq!((p, m, v, out), ([1.5], [0.0], [0.0], [1.5]));
    }

    #[test]
    fn squares_of_uncounted_elements_do_not_count_and_nan_shows() {
        let mut x = vec![2.0f32; 100];
        let mut partials = [0.0; 4];
        chunk_squares(View::F32(&x), &mut partials, 30, 70);
        assert_eq!(partials, [120.0, 120.0, 40.0, 0.0]);
        x[65] = f32::NAN;
        chunk_squares(View::F32(&x), &mut partials, 30, 70);
        assert!(partials[2].is_nan() && partials[1] == 120.0);
    }
}
