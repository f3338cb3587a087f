//! The update rule: unscale, clip, weight decay, AdamW and the new parameter in one pass over memory.

use super::noise::Noise;
use super::path::SimdPath;
use super::{Scalars, round, simd};
use crate::op::Rule;
use crate::view::BLOCK;
use crate::{View, ViewMut};
use half::bf16;
use half::slice::HalfFloatSliceExt;
use std::ops::Range;

/// Master weights of a run of parameters.
#[derive(Debug)]
pub enum Master<'a> {
    /// In fp32.
    Whole(&'a mut [f32]),
    /// The lower halves; the upper ones are the bf16 parameters, which are read too. The same sums, bit for bit.
    Lower(&'a mut [u16]),
}

/// States of a run of parameters.
#[derive(Debug)]
pub struct States<'a> {
    /// The parameters themselves.
    pub master: Master<'a>,
    /// First moment: fp32, or bf16 rounded by [`Noise`].
    pub momentum: ViewMut<'a>,
    /// Second moment, as the first.
    pub variance: ViewMut<'a>,
}

/// One update of a run of parameters. When the step is skipped only `param` is written, from the master.
#[derive(Debug)]
pub struct Update<'a> {
    /// The rule.
    pub rule: Rule,
    /// See [`control`](super::control).
    pub control: &'a [f64],
    /// Summed and scaled gradients.
    pub grad: View<'a>,
    /// What is kept.
    pub states: States<'a>,
    /// The parameters, rounded: bf16 to nearest with ties away from zero, else ties to even.
    pub param: ViewMut<'a>,
    /// Leading elements that take weight decay.
    pub decayed: usize,
    /// For moments of 16 bits.
    pub noise: Noise<'a>,
    /// The parameters are next read from memory, not by this core: stores pass by the caches.
    pub streams: bool,
}

/// What a block of elements is read from and written to besides the states: in the first-level cache.
struct Block {
    grad: [f32; BLOCK],
    noise: [u16; BLOCK],
    param: [u16; BLOCK],
}

/// Does it.
///
/// # Errors
/// Storage types that do not go together.
pub fn update(update: Update<'_>) -> Result<(), String> {
    update_on(SimdPath::current(), update)
}

/// [`update`] by `path`.
pub(super) fn update_on(path: SimdPath, mut update: Update<'_>) -> Result<(), String> {
    update.check()?;
    simd::keep_denormals();
    path.run(
        #[inline(always)]
        || update.run(path),
    );
    simd::streamed();
    Ok(())
}

impl<'a> Update<'a> {
    /// Two updates, parted at element `mid`.
    pub fn split_at(self, mid: usize) -> (Self, Self) {
        let Self { rule, control, grad, states, param, decayed, noise, streams } = self;
        let (masters, end) = (states.master.split_at(mid), grad.len());
        let (momentum, variance) = (states.momentum.split_at(mid), states.variance.split_at(mid));
        let (first, second) = param.split_at(mid);
        let left = States { master: masters.0, momentum: momentum.0, variance: variance.0 };
        let right = States { master: masters.1, momentum: momentum.1, variance: variance.1 };
        let part = |states, param, range: Range<usize>| Update {
            rule,
            control,
            states,
            param,
            decayed: decayed.saturating_sub(range.start).min(range.len()),
            noise: Noise { start: noise.start + range.start, ..noise },
            grad: grad.slice(range),
            streams,
        };
        (part(left, first, 0..mid), part(right, second, mid..end))
    }

    fn check(&self) -> Result<(), String> {
        let (states, n) = (&self.states, self.grad.len());
        let lengths = [states.master.len(), states.momentum.len(), states.variance.len()];
        if lengths.iter().any(|len| *len != n) || self.param.len() != n {
            return Err(format!(
                "{n} gradients, {lengths:?} states, {} parameters",
                self.param.len()
            ));
        }
        match (&states.momentum, &states.variance) {
            (ViewMut::F32(_), ViewMut::F32(_)) | (ViewMut::Bf16(_), ViewMut::Bf16(_)) => {}
            _ => return Err("moments are both fp32, or both bf16".into()),
        }
        match (&states.master, &self.param) {
            (Master::Lower(_), ViewMut::Bf16(_)) => Ok(()),
            (Master::Lower(_), _) => Err("only bf16 parameters are halves of fp32 ones".into()),
            (Master::Whole(_), ViewMut::F16(_) | ViewMut::Bf16(_) | ViewMut::F32(_)) => Ok(()),
            (Master::Whole(_), _) => Err("parameters are fp16, bf16 or fp32".into()),
        }
    }

    #[inline(always)]
    fn run(&mut self, path: SimdPath) {
        let scalars = Scalars::new(self.control);
        let step = self.control[super::control::STEP] as u64;
        let mut b = Block { grad: [0.0; BLOCK], noise: [0; BLOCK], param: [0; BLOCK] };
        for at in (0..self.grad.len()).step_by(BLOCK) {
            let n = BLOCK.min(self.grad.len() - at);
            let range = at..at + n;
            if !scalars.skip {
                round::load(path, self.grad, at, &mut b.grad[..n]);
                if let ViewMut::Bf16(_) = self.states.momentum {
                    self.noise.fill(step, at, &mut b.noise[..n]);
                }
            }
            let decayed = self.decayed.saturating_sub(at).min(n);
            let rule = Step { rule: self.rule, scalars, decayed };
            let given = (&b.grad[..n], &b.noise[..n]);
            let moments = (&mut self.states.momentum, &mut self.states.variance, at);
            match (&mut self.states.master, &mut self.param) {
                (Master::Lower(low), ViewMut::Bf16(high)) => {
                    let (high, low) = (&mut high[range.clone()], &mut low[range]);
                    rule.apply(given, Halves { high: high.reinterpret_cast_mut(), low }, moments);
                }
                (Master::Whole(master), ViewMut::Bf16(param)) => {
                    let rounded = &mut b.param[..n];
                    let master = &mut master[range.clone()];
                    rule.apply(given, Rounded { master, rounded }, moments);
                    publish(rounded, param[range].reinterpret_cast_mut(), self.streams);
                }
                (Master::Whole(master), param) => {
                    let master = &mut master[range.clone()];
                    rule.apply(given, Plain { master }, moments);
                    if let ViewMut::F16(param) = param {
                        let rounded = &mut b.param[..n];
                        round::to_f16(path, master, rounded);
                        publish(rounded, param[range].reinterpret_cast_mut(), self.streams);
                    } else {
                        param.store(at, master);
                    }
                }
                (Master::Lower(_), _) => {}
            }
        }
    }
}

#[inline(always)]
fn publish(rounded: &[u16], param: &mut [u16], streams: bool) {
    if streams {
        simd::stream(rounded, param);
    } else {
        param.copy_from_slice(rounded);
    }
}

/// The masters of a block, and what follows from a new one at once.
trait Masters {
    fn get(&self, i: usize) -> f32;
    fn put(&mut self, i: usize, x: f32);
    fn split(self, mid: usize) -> (Self, Self)
    where
        Self: Sized;
}

struct Plain<'a> {
    master: &'a mut [f32],
}

struct Rounded<'a> {
    master: &'a mut [f32],
    rounded: &'a mut [u16],
}

struct Halves<'a> {
    high: &'a mut [u16],
    low: &'a mut [u16],
}

impl Masters for Plain<'_> {
    #[inline(always)]
    fn get(&self, i: usize) -> f32 {
        self.master[i]
    }
    #[inline(always)]
    fn put(&mut self, i: usize, x: f32) {
        self.master[i] = x;
    }
    #[inline(always)]
    fn split(self, mid: usize) -> (Self, Self) {
        let (a, b) = self.master.split_at_mut(mid);
        (Plain { master: a }, Plain { master: b })
    }
}

impl Masters for Rounded<'_> {
    #[inline(always)]
    fn get(&self, i: usize) -> f32 {
        self.master[i]
    }
    #[inline(always)]
    fn put(&mut self, i: usize, x: f32) {
        self.master[i] = x;
        self.rounded[i] = round::split(x).0;
    }
    #[inline(always)]
    fn split(self, mid: usize) -> (Self, Self) {
        let (a, b) = self.master.split_at_mut(mid);
        let (c, d) = self.rounded.split_at_mut(mid);
        (Rounded { master: a, rounded: c }, Rounded { master: b, rounded: d })
    }
}

impl Masters for Halves<'_> {
    #[inline(always)]
    fn get(&self, i: usize) -> f32 {
        round::join(self.high[i], self.low[i])
    }
    #[inline(always)]
    fn put(&mut self, i: usize, x: f32) {
        (self.high[i], self.low[i]) = round::split(x);
    }
    #[inline(always)]
    fn split(self, mid: usize) -> (Self, Self) {
        let (a, b) = self.high.split_at_mut(mid);
        let (c, d) = self.low.split_at_mut(mid);
        (Halves { high: a, low: c }, Halves { high: b, low: d })
    }
}

/// How a moment is kept.
trait Moment: Copy {
    fn wide(self) -> f32;
    fn kept(x: f32, noise: u16) -> Self;
}

impl Moment for f32 {
    #[inline(always)]
    fn wide(self) -> f32 {
        self
    }
    #[inline(always)]
    fn kept(x: f32, _: u16) -> Self {
        x
    }
}

impl Moment for bf16 {
    #[inline(always)]
    fn wide(self) -> f32 {
        crate::view::widen_bf16(self)
    }
    #[inline(always)]
    fn kept(x: f32, noise: u16) -> Self {
        Self::from_bits(round::stochastic(x, noise))
    }
}

/// The rule on a block, of which the first `decayed` elements take weight decay.
#[derive(Clone, Copy)]
struct Step {
    rule: Rule,
    scalars: Scalars,
    decayed: usize,
}

impl Step {
    /// (gradients, random bits), masters, and the moments, in which the block begins at `at`.
    #[inline(always)]
    fn apply<M: Masters>(
        self,
        (grad, noise): (&[f32], &[u16]),
        masters: M,
        (momentum, variance, at): (&mut ViewMut<'_>, &mut ViewMut<'_>, usize),
    ) {
        let range = at..at + grad.len();
        if self.scalars.skip {
            return keep(masters, grad.len());
        }
        match (momentum, variance) {
            (ViewMut::F32(m), ViewMut::F32(v)) => {
                self.run((grad, noise), masters, (&mut m[range.clone()], &mut v[range]));
            }
            (ViewMut::Bf16(m), ViewMut::Bf16(v)) => {
                self.run((grad, noise), masters, (&mut m[range.clone()], &mut v[range]));
            }
            _ => {}
        }
    }

    #[inline(always)]
    fn run<M: Masters, T: Moment>(
        self,
        (grad, noise): (&[f32], &[u16]),
        masters: M,
        (m, v): (&mut [T], &mut [T]),
    ) {
        let mid = self.decayed;
        let (first, second) = masters.split(mid);
        let (m, later_m) = m.split_at_mut(mid);
        let (v, later_v) = v.split_at_mut(mid);
        match self.rule {
            Rule::AdamW { beta1, beta2, eps, weight_decay } => {
                let rule = AdamW { beta1, beta2, eps, shrink: -self.scalars.lr * weight_decay };
                rule.run(self.scalars, (&grad[..mid], &noise[..mid]), first, (m, v));
                let rule = AdamW { shrink: 0.0, ..rule };
                rule.run(self.scalars, (&grad[mid..], &noise[mid..]), second, (later_m, later_v));
            }
            Rule::Sgd { weight_decay } => {
                sgd(self.scalars, -self.scalars.lr * weight_decay, &grad[..mid], first);
                sgd(self.scalars, 0.0, &grad[mid..], second);
            }
        }
    }
}

/// In a skipped step the parameters are those of the masters.
#[inline(always)]
fn keep<M: Masters>(mut masters: M, n: usize) {
    for i in 0..n {
        masters.put(i, masters.get(i));
    }
}

#[inline(always)]
fn sgd<M: Masters>(s: Scalars, shrink: f32, grad: &[f32], mut masters: M) {
    for (i, g) in grad.iter().enumerate() {
        let p = masters.get(i);
        let p = p.mul_add(shrink, p);
        masters.put(i, (g * s.factor).mul_add(-s.lr, p));
    }
}

#[derive(Clone, Copy)]
struct AdamW {
    beta1: f32,
    beta2: f32,
    eps: f32,
    shrink: f32,
}

impl AdamW {
    #[inline(always)]
    fn run<M: Masters, T: Moment>(
        self,
        s: Scalars,
        (grad, noise): (&[f32], &[u16]),
        mut masters: M,
        (m, v): (&mut [T], &mut [T]),
    ) {
        let Self { beta1, beta2, eps, shrink } = self;
        let n = grad.len();
        let (noise, m, v) = (&noise[..n], &mut m[..n], &mut v[..n]);
        for i in 0..n {
            let g = grad[i] * s.factor;
            let momentum = m[i].wide().mul_add(beta1, (1.0 - beta1) * g);
            let variance = v[i].wide().mul_add(beta2, (1.0 - beta2) * g * g);
            m[i] = T::kept(momentum, noise[i]);
            // The same bits for both: their errors in m / sqrt(v) then cancel rather than add up.
            v[i] = T::kept(variance, noise[i]);
            let root = (variance * s.variance_correction).sqrt() + eps;
            let direction = momentum * s.momentum_correction / root;
            let p = masters.get(i);
            let p = p.mul_add(shrink, p);
            masters.put(i, direction.mul_add(-s.lr, p));
        }
    }
}

impl<'a> Master<'a> {
    const fn len(&self) -> usize {
        match self {
            Self::Whole(master) => master.len(),
            Self::Lower(low) => low.len(),
        }
    }

    fn split_at(self, mid: usize) -> (Self, Self) {
        match self {
            Self::Whole(master) => {
                let (a, b) = master.split_at_mut(mid);
                (Self::Whole(a), Self::Whole(b))
            }
            Self::Lower(low) => {
                let (a, b) = low.split_at_mut(mid);
                (Self::Lower(a), Self::Lower(b))
            }
        }
    }
}
