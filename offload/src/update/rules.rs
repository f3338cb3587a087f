//! The update rules, for pairs of vectors.

use super::elements::{Source, Target};
use super::noise::Draw;
use crate::control;
use device::numerics::lanes::Lanes;

/// The update rule; values that change between steps are in the [control block](crate::control).
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Rule {
    /// Adam with decoupled weight decay (arXiv 1711.05101, algorithm 2).
    AdamW {
        /// Decay of the momentum per step.
        beta1: f32,
        /// Decay of the variance per step.
        beta2: f32,
        /// Added to the square root of the variance.
        eps: f32,
        /// Weight decay: a step subtracts `lr * weight_decay * p` from a parameter p.
        weight_decay: f32,
    },
    /// p -= lr g, with decoupled weight decay.
    Sgd {
        /// Weight decay: a step subtracts `lr * weight_decay * p` from a parameter p.
        weight_decay: f32,
    },
}

/// Words of the control block for one update.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scalars {
    pub(super) skip: bool,
    factor: f32,
    pub(super) lr: f32,
    momentum_correction: f32,
    variance_correction: f32,
}

impl Scalars {
    pub(super) fn new(words: &[f64]) -> Self {
        Self {
            skip: words[control::SKIP] != 0.0,
            factor: words[control::FACTOR] as f32,
            lr: words[control::LR] as f32,
            momentum_correction: words[control::MOMENTUM_CORRECTION] as f32,
            variance_correction: words[control::VARIANCE_CORRECTION] as f32,
        }
    }
}

/// Adam with decoupled weight decay. The constants of a step are merged:
/// lr * (m / c1) / (sqrt(v / c2) + eps) = (lr * sqrt(c2) / c1) * m / (sqrt(v) + eps * sqrt(c2)),
/// with c = 1 - beta^t.
#[derive(Clone, Copy)]
pub(super) struct AdamW {
    beta1: f32,
    beta2: f32,
    /// Factor of a gradient in the momentum.
    gain1: f32,
    /// Factor of a gradient before it is squared for the variance.
    gain2: f32,
    /// Epsilon with the bias correction, added to the root of the stored variance.
    eps: f32,
    /// -lr with both bias corrections.
    rate: f32,
    /// -lr * weight decay
    shrink: f32,
}

impl AdamW {
    /// `shrink`: -lr * weight decay.
    pub(super) fn new(s: Scalars, [beta1, beta2, eps]: [f32; 3], shrink: f32) -> Self {
        let correction = s.variance_correction.sqrt();
        Self {
            beta1,
            beta2,
            gain1: s.factor * (1.0 - beta1),
            gain2: s.factor * (1.0 - beta2).sqrt(),
            eps: eps / correction,
            rate: -s.lr * (s.momentum_correction / correction),
            shrink,
        }
    }

    /// Updates `n` pairs of vectors.
    #[inline(always)]
    pub(super) fn run<L: Lanes, M: Target<L>>(
        self,
        l: L,
        draw: Draw,
        grad: &impl Source<L>,
        mut master: impl Target<L>,
        [mut momentum, mut variance]: [M; 2],
        n: usize,
    ) {
        let (mut pairs, mut random) = (draw.pairs(l), [l.splat_u32s(0); 2]);
        for i in 0..n {
            if M::DRAWS {
                random = pairs.next(l);
            }
            let (g, p) = (grad.get(l, i), master.get(l, i));
            let (m, v) = (momentum.get(l, i), variance.get(l, i));
            let even = self.step(l, g[0], p[0], [m[0], v[0]]);
            let odd = self.step(l, g[1], p[1], [m[1], v[1]]);
            momentum.put(l, i, [even.1, odd.1], random);
            // The same bits for both: their errors in m / sqrt(v) cancel instead of adding up.
            variance.put(l, i, [even.2, odd.2], random);
            master.put(l, i, [even.0, odd.0], random);
        }
    }

    /// The new master, momentum and variance.
    #[inline(always)]
    fn step<L: Lanes>(
        self,
        l: L,
        g: L::f32s,
        p: L::f32s,
        [m, v]: [L::f32s; 2],
    ) -> (L::f32s, L::f32s, L::f32s) {
        let m =
            l.mul_add_f32s(m, l.splat_f32s(self.beta1), l.mul_f32s(g, l.splat_f32s(self.gain1)));
        let g = l.mul_f32s(g, l.splat_f32s(self.gain2));
        let v = l.mul_add_f32s(v, l.splat_f32s(self.beta2), l.mul_f32s(g, g));
        let root = l.add_f32s(l.sqrt_f32s(v), l.splat_f32s(self.eps));
        let p = l.mul_add_f32s(p, l.splat_f32s(self.shrink), p);
        (l.mul_add_f32s(l.div_f32s(m, root), l.splat_f32s(self.rate), p), m, v)
    }
}

/// Gradient descent with decoupled weight decay.
#[derive(Clone, Copy)]
pub(super) struct Sgd {
    /// -lr * weight decay
    pub(super) shrink: f32,
}

impl Sgd {
    /// Updates `n` pairs of vectors.
    #[inline(always)]
    pub(super) fn run<L: Lanes>(
        self,
        l: L,
        s: Scalars,
        grad: &impl Source<L>,
        mut master: impl Target<L>,
        n: usize,
    ) {
        for i in 0..n {
            let (g, p) = (grad.get(l, i), master.get(l, i));
            let new = [self.step(l, s, g[0], p[0]), self.step(l, s, g[1], p[1])];
            master.put(l, i, new, [l.splat_u32s(0); 2]);
        }
    }

    #[inline(always)]
    fn step<L: Lanes>(self, l: L, s: Scalars, g: L::f32s, p: L::f32s) -> L::f32s {
        let p = l.mul_add_f32s(p, l.splat_f32s(self.shrink), p);
        l.mul_add_f32s(l.mul_f32s(g, l.splat_f32s(s.factor)), l.splat_f32s(-s.lr), p)
    }
}

/// Keeps the masters of a skipped step, and writes the parameters from them.
#[inline(always)]
pub(super) fn keep<L: Lanes>(l: L, mut master: impl Target<L>, n: usize) {
    for i in 0..n {
        master.put(l, i, master.get(l, i), [l.splat_u32s(0); 2]);
    }
}
