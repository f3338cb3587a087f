//! How far from exact arithmetic a long run ends: the update against the same rule in fp64, over many steps.

use super::update::update_on;
use super::*;
use crate::op::Rule;
use crate::{View, ViewMut, random};
use half::{bf16, f16};

const N: usize = 2000;
// As fp32 has them: the reference is exact arithmetic, not other numbers.
const BETAS: (f64, f64) = (0.9f32 as f64, 0.999f32 as f64);
const DECAY: f64 = 0.01f32 as f64;
const LR: f64 = 1e-3;

/// Everything in fp64, from the same gradients.
struct Exact {
    p: Vec<f64>,
    m: Vec<f64>,
    v: Vec<f64>,
}

impl Exact {
    fn step(&mut self, t: i32, grad: &[f64]) {
        for (i, g) in grad.iter().enumerate() {
            self.m[i] = BETAS.0 * self.m[i] + (1.0 - BETAS.0) * g;
            self.v[i] = BETAS.1 * self.v[i] + (1.0 - BETAS.1) * g * g;
            let (m, v) = (self.m[i] / (1.0 - BETAS.0.powi(t)), self.v[i] / (1.0 - BETAS.1.powi(t)));
            self.p[i] -= LR * (m / (v.sqrt() + 1e-8) + DECAY * self.p[i]);
        }
    }
}

/// Gradients whose scale drifts over two orders of magnitude, with a part that is steady.
fn gradient(t: i32, i: usize) -> f64 {
    let scale = 10f64.powf(-3.0 + (f64::from(t) * 0.01).sin());
    let steady = random::normal(11, i as u64);
    scale * (random::normal(random::key(12, t as u64), i as u64) + 0.3 * steady)
}

/// The rms error of the weights over the rms of how far they moved, after each of `at` steps.
fn errors(path: SimdPath, half: bool, (split, short): (bool, bool), at: [i32; 2]) -> [f64; 2] {
    let start: Vec<f32> = (0..N).map(|i| random::normal(10, i as u64) as f32 * 0.02).collect();
    let wide = |x: &f32| f64::from(*x);
    let mut exact = Exact { p: start.iter().map(wide).collect(), m: vec![0.0; N], v: vec![0.0; N] };
    let (mut p, mut m, mut v) = (start.clone(), vec![0f32; N], vec![0f32; N]);
    let mut low: Vec<u16> = start.iter().map(|x| lower_half(*x)).collect();
    let mut high: Vec<bf16> = start.iter().map(|x| bf16::from_f32(as_bf16_parameter(*x))).collect();
    let (mut mb, mut vb) = (vec![bf16::ZERO; N], vec![bf16::ZERO; N]);
    let runs = [NoiseRun { flat: 0..N, stream: 77, global: 5 }];
    let mut found = Vec::new();
    for t in 1..=at[1] {
        let scaled: Vec<f64> = (0..N).map(|i| 64.0 * gradient(t, i)).collect();
        let g16: Vec<f16> = scaled.iter().map(|g| f16::from_f64(*g)).collect();
        let gb: Vec<bf16> = scaled.iter().map(|g| bf16::from_f64(*g)).collect();
        let same: Vec<f64> = match half {
            true => g16.iter().map(|g| g.to_f64() / 64.0).collect(),
            false => gb.iter().map(|g| g.to_f64() / 64.0).collect(),
        };
        exact.step(t, &same);
        let mut words = [0.0; control::WORDS];
        words[control::STEP] = f64::from(t);
        words[control::LR] = LR;
        words[control::FACTOR] = 1.0 / 64.0;
        words[control::MOMENTUM_CORRECTION] = 1.0 / (1.0 - BETAS.0.powi(t));
        words[control::VARIANCE_CORRECTION] = 1.0 / (1.0 - BETAS.1.powi(t));
        let (beta1, beta2) = (BETAS.0 as f32, BETAS.1 as f32);
        let update = Update {
            rule: Rule::AdamW { beta1, beta2, eps: 1e-8, weight_decay: DECAY as f32 },
            control: &words,
            grad: if half { View::F16(&g16) } else { View::Bf16(&gb) },
            states: States {
                master: if split { Master::Lower(&mut low) } else { Master::Whole(&mut p) },
                momentum: if short { ViewMut::Bf16(&mut mb) } else { ViewMut::F32(&mut m) },
                variance: if short { ViewMut::Bf16(&mut vb) } else { ViewMut::F32(&mut v) },
            },
            param: ViewMut::Bf16(&mut high),
            decayed: N,
            noise: Noise { runs: &runs, start: 0 },
            streams: false,
        };
        update_on(path, update).unwrap();
        if at.contains(&t) {
            let halves = high.iter().zip(&low).map(|(h, l)| from_halves(h.to_f32(), *l));
            let weights: Vec<f32> = if split { halves.collect() } else { p.clone() };
            let error = weights.iter().zip(&exact.p).map(|(w, e)| (f64::from(*w) - e).powi(2));
            let moved = start.iter().zip(&exact.p).map(|(s, e)| (f64::from(*s) - e).powi(2));
            found.push((error.sum::<f64>() / moved.sum::<f64>()).sqrt());
        }
    }
    [found[0], found[1]]
}

/// fp32 states and split masters: 1e-5 of the way that the weights went. bf16 moments: 2 %.
#[test]
fn after_100_and_1000_steps_the_weights_are_near_those_of_fp64() {
    for path in SimdPath::available() {
        for half in [true, false] {
            for option in [(false, false), (true, false), (false, true), (true, true)] {
                let found = errors(path, half, option, [100, 1000]);
                println!(
                    "{path} half {half} (split, bf16 moments) {option:?}: {:.2e} {:.2e}",
                    found[0], found[1]
                );
                let bound = if option.1 { 2e-2 } else { 1e-5 };
                assert!(found.iter().all(|e| *e < bound), "{path} {option:?} {found:?}");
                assert!(!option.1 || found[1] > 1e-4, "bf16 moments are not what was measured");
            }
        }
    }
}
