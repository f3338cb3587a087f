//! Error of the update after many steps, against the same rule in fp64.

use super::halves::{as_bf16_parameter, from_halves, lower_half};
use super::*;
use device::random;
use half::{bf16, f16};

const N: usize = 1000;
// fp32 values, so that the reference differs by its arithmetic only, not by its constants.
const BETAS: (f64, f64) = (0.9f32 as f64, 0.999f32 as f64);
const DECAY: f64 = 0.01f32 as f64;
const LR: f64 = 1e-3;

/// AdamW in fp64, from the same gradients.
struct ExactAdam {
    p: Vec<f64>,
    m: Vec<f64>,
    v: Vec<f64>,
}

impl ExactAdam {
    fn step(&mut self, t: i32, grad: &[f64]) {
        for (i, g) in grad.iter().enumerate() {
            self.m[i] = BETAS.0 * self.m[i] + (1.0 - BETAS.0) * g;
            self.v[i] = BETAS.1 * self.v[i] + (1.0 - BETAS.1) * g * g;
            let (m, v) = (self.m[i] / (1.0 - BETAS.0.powi(t)), self.v[i] / (1.0 - BETAS.1.powi(t)));
            self.p[i] -= LR * (m / (v.sqrt() + 1e-8) + DECAY * self.p[i]);
        }
    }
}

/// Gradients with a scale that drifts over two orders of magnitude, and with a steady part.
fn gradient(t: i32, i: usize) -> f64 {
    let scale = 10f64.powf(-3.0 + (f64::from(t) * 0.01).sin());
    let steady = random::normal(11, i as u64);
    scale * (random::normal(random::key(12, t as u64), i as u64) + 0.3 * steady)
}

/// Scaled gradients of every step as the update reads them, the initial weights, and the exact
/// weights after the steps `AT`.
struct Reference {
    grads: Vec<Gradients>,
    start: Vec<f32>,
    exact: [Vec<f64>; 2],
}

enum Gradients {
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
}

/// Steps after which the weights are compared.
const AT: [i32; 2] = [100, 1000];
const SCALE: f64 = 64.0;

impl Reference {
    fn new(half: bool) -> Self {
        let start: Vec<f32> = (0..N).map(|i| random::normal(10, i as u64) as f32 * 0.02).collect();
        let p = start.iter().map(|x| f64::from(*x)).collect();
        let mut exact = ExactAdam { p, m: vec![0.0; N], v: vec![0.0; N] };
        let (mut grads, mut found) = (Vec::new(), Vec::new());
        for t in 1..=AT[1] {
            let scaled = (0..N).map(|i| SCALE * gradient(t, i));
            let grad = match half {
                true => Gradients::F16(scaled.map(f16::from_f64).collect()),
                false => Gradients::Bf16(scaled.map(bf16::from_f64).collect()),
            };
            let same: Vec<f64> = match &grad {
                Gradients::F16(g) => g.iter().map(|g| g.to_f64() / SCALE).collect(),
                Gradients::Bf16(g) => g.iter().map(|g| g.to_f64() / SCALE).collect(),
            };
            exact.step(t, &same);
            grads.push(grad);
            if AT.contains(&t) {
                found.push(exact.p.clone());
            }
        }
        let [first, last] = found.try_into().unwrap();
        Self { grads, start, exact: [first, last] }
    }

    /// RMS error of `weights`, relative to the RMS distance that the exact weights moved.
    fn error(&self, which: usize, weights: &[f32]) -> f64 {
        let exact = &self.exact[which];
        let squares = |of: &[f32]| -> f64 {
            of.iter().zip(exact).map(|(x, e)| (f64::from(*x) - e).powi(2)).sum()
        };
        (squares(weights) / squares(&self.start)).sqrt()
    }

    /// Errors after the steps `AT` on `path`, with `split` masters, and bf16 moments if `short`.
    fn errors(&self, path: SimdPath, split: bool, short: bool) -> [f64; 2] {
        let (mut p, mut m, mut v) = (self.start.clone(), vec![0f32; N], vec![0f32; N]);
        let mut low: Vec<u16> = p.iter().map(|x| lower_half(*x)).collect();
        let mut high: Vec<bf16> = p.iter().map(|x| bf16::from_f32(as_bf16_parameter(*x))).collect();
        let (mut mb, mut vb) = (vec![bf16::ZERO; N], vec![bf16::ZERO; N]);
        let runs = [NoiseRun { flat: 0..N, stream: 77, global: 5 }];
        let mut found = Vec::new();
        for (t, grad) in (1..).zip(&self.grads) {
            let mut words = [0.0; control::WORDS];
            words[control::STEP] = f64::from(t);
            words[control::LR] = LR;
            words[control::FACTOR] = 1.0 / SCALE;
            words[control::MOMENTUM_CORRECTION] = 1.0 / (1.0 - BETAS.0.powi(t));
            words[control::VARIANCE_CORRECTION] = 1.0 / (1.0 - BETAS.1.powi(t));
            let (beta1, beta2) = (BETAS.0 as f32, BETAS.1 as f32);
            let update = Update {
                rule: Rule::AdamW { beta1, beta2, eps: 1e-8, weight_decay: DECAY as f32 },
                control: &words,
                grad: match grad {
                    Gradients::F16(g) => View::F16(g),
                    Gradients::Bf16(g) => View::Bf16(g),
                },
                states: [
                    if split { ViewMut::U16(&mut low) } else { ViewMut::F32(&mut p) },
                    if short { ViewMut::Bf16(&mut mb) } else { ViewMut::F32(&mut m) },
                    if short { ViewMut::Bf16(&mut vb) } else { ViewMut::F32(&mut v) },
                ],
                old: None,
                param: ViewMut::Bf16(&mut high),
                decayed: N,
                noise: Noise { runs: &runs, start: 0 },
                streams: false,
            };
            update_on(path, update).unwrap();
            if AT.contains(&t) {
                let halves = high.iter().zip(&low).map(|(h, l)| from_halves(h.to_f32(), *l));
                let weights: Vec<f32> = if split { halves.collect() } else { p.clone() };
                found.push(self.error(found.len(), &weights));
            }
        }
        found.try_into().unwrap()
    }
}

/// Bounds, relative to the distance that the weights moved: 3e-6 with fp32 states or split masters,
/// 1.5 % with bf16 moments.
#[test]
fn after_100_and_1000_steps_the_weights_are_near_those_of_fp64() {
    for half in [true, false] {
        let reference = Reference::new(half);
        for path in SimdPath::available() {
            for option in [(false, false), (true, false), (false, true), (true, true)] {
                let [first, last] = reference.errors(path, option.0, option.1);
                println!("{path} fp16 {half} (split, bf16) {option:?}: {first:.2e} {last:.2e}");
                let bound = if option.1 { 1.5e-2 } else { 3e-6 };
                assert!(first < bound && last < bound, "{path} {option:?} {first} {last}");
                assert!(!option.1 || last > 1e-4, "these are not bf16 moments");
            }
        }
    }
}
