//! The update rules, by pairs of vectors.

use super::Scalars;
use super::elements::{Source, Target};
use super::lanes::Lanes;
use super::noise::Draw;

/// Adam with decoupled weight decay.
#[derive(Clone, Copy)]
pub(super) struct AdamW {
    pub(super) beta1: f32,
    pub(super) beta2: f32,
    pub(super) eps: f32,
    /// -lr * weight decay
    pub(super) shrink: f32,
}

impl AdamW {
    /// `n` pairs of vectors.
    #[inline(always)]
    pub(super) fn run<L: Lanes, M: Target<L>>(
        self,
        (l, s, draw): (L, Scalars, Draw),
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
            let even = self.step((l, s), g[0], p[0], [m[0], v[0]]);
            let odd = self.step((l, s), g[1], p[1], [m[1], v[1]]);
            momentum.put(l, i, [even.1, odd.1], random);
            // The same bits for both: their errors in m / sqrt(v) then cancel rather than add up.
            variance.put(l, i, [even.2, odd.2], random);
            master.put(l, i, [even.0, odd.0], random);
        }
    }

    /// The new master, momentum and variance.
    #[inline(always)]
    fn step<L: Lanes>(
        self,
        (l, s): (L, Scalars),
        g: L::f32s,
        p: L::f32s,
        [m, v]: [L::f32s; 2],
    ) -> (L::f32s, L::f32s, L::f32s) {
        let (beta1, beta2) = (l.splat_f32s(self.beta1), l.splat_f32s(self.beta2));
        let (rest1, rest2) = (l.splat_f32s(1.0 - self.beta1), l.splat_f32s(1.0 - self.beta2));
        let g = l.mul_f32s(g, l.splat_f32s(s.factor));
        let m = l.mul_add_f32s(m, beta1, l.mul_f32s(rest1, g));
        let v = l.mul_add_f32s(v, beta2, l.mul_f32s(l.mul_f32s(rest2, g), g));
        let corrected = l.mul_f32s(v, l.splat_f32s(s.variance_correction));
        let root = l.add_f32s(l.sqrt_f32s(corrected), l.splat_f32s(self.eps));
        let corrected = l.mul_f32s(m, l.splat_f32s(s.momentum_correction));
        let direction = l.div_f32s(corrected, root);
        let p = l.mul_add_f32s(p, l.splat_f32s(self.shrink), p);
        (l.mul_add_f32s(direction, l.splat_f32s(-s.lr), p), m, v)
    }
}

/// Gradient descent with decoupled weight decay.
#[derive(Clone, Copy)]
pub(super) struct Sgd {
    /// -lr * weight decay
    pub(super) shrink: f32,
}

impl Sgd {
    /// `n` pairs of vectors.
    #[inline(always)]
    pub(super) fn run<L: Lanes>(
        self,
        (l, s): (L, Scalars),
        grad: &impl Source<L>,
        mut master: impl Target<L>,
        n: usize,
    ) {
        for i in 0..n {
            let (g, p) = (grad.get(l, i), master.get(l, i));
            let new = [self.step((l, s), g[0], p[0]), self.step((l, s), g[1], p[1])];
            master.put(l, i, new, [l.splat_u32s(0); 2]);
        }
    }

    #[inline(always)]
    fn step<L: Lanes>(self, (l, s): (L, Scalars), g: L::f32s, p: L::f32s) -> L::f32s {
        let p = l.mul_add_f32s(p, l.splat_f32s(self.shrink), p);
        l.mul_add_f32s(l.mul_f32s(g, l.splat_f32s(s.factor)), l.splat_f32s(-s.lr), p)
    }
}

/// In a skipped step the parameters are those of the masters.
#[inline(always)]
pub(super) fn keep<L: Lanes>(l: L, mut master: impl Target<L>, n: usize) {
    for i in 0..n {
        master.put(l, i, master.get(l, i), [l.splat_u32s(0); 2]);
    }
}
