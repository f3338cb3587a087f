//! The update rule: unscale, clip, weight decay, AdamW and the new parameter in one pass over memory.

use super::path::SimdPath;
use super::{Scalars, round, simd};
use crate::op::Rule;
use crate::view::BLOCK;
use crate::{View, ViewMut, random};
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

/// A run of a flat buffer that lies together in a tensor of the whole model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoiseRun {
    /// In the flat buffer.
    pub flat: Range<usize>,
    /// By what the tensor's random bits differ from all others'.
    pub stream: u64,
    /// Index in the whole tensor of the first element.
    pub global: u64,
}

/// Random bits for moments of 16 bits: functions of tensor, step and index in the whole tensor, and of no layout.
#[derive(Clone, Copy, Debug)]
pub struct Noise<'a> {
    /// In ascending order; what is in none (padding) gets zeros.
    pub runs: &'a [NoiseRun],
    /// Where the first element of the update stands in the flat buffer.
    pub start: usize,
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

/// One block of elements on its way: what is in memory as it is used stays there.
struct Block {
    grad: [f32; BLOCK],
    master: [f32; BLOCK],
    momentum: [f32; BLOCK],
    variance: [f32; BLOCK],
    noise: [u32; BLOCK],
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
        let mut b = Block {
            grad: [0.0; BLOCK],
            master: [0.0; BLOCK],
            momentum: [0.0; BLOCK],
            variance: [0.0; BLOCK],
            noise: [0; BLOCK],
            param: [0; BLOCK],
        };
        for at in (0..self.grad.len()).step_by(BLOCK) {
            let n = BLOCK.min(self.grad.len() - at);
            let range = at..at + n;
            if !scalars.skip {
                round::load(path, self.grad, at, &mut b.grad[..n]);
            }
            if let ViewMut::Bf16(_) = self.states.momentum
                && !scalars.skip
            {
                self.noise.fill(step, at, &mut b.noise[..n]);
            }
            let moments = [&mut self.states.momentum, &mut self.states.variance];
            let decayed = self.decayed.saturating_sub(at).min(n);
            match &mut self.states.master {
                Master::Whole(master) => {
                    let p = &mut master[range];
                    if !scalars.skip {
                        b.apply(self.rule, scalars, at, p, moments, decayed);
                    }
                    b.publish(path, p, &mut self.param, at, self.streams);
                }
                Master::Lower(low) => {
                    let ViewMut::Bf16(high) = &mut self.param else { return };
                    if !scalars.skip {
                        let (high, low) = (&mut high[range.clone()], &mut low[range]);
                        let high: &mut [u16] = high.reinterpret_cast_mut();
                        let mut master = b.master;
                        let p = &mut master[..n];
                        for i in 0..n {
                            p[i] = round::join(high[i], low[i]);
                        }
                        b.apply(self.rule, scalars, at, p, moments, decayed);
                        for i in 0..n {
                            (high[i], low[i]) = round::split(p[i]);
                        }
                    }
                }
            }
        }
    }
}

impl Block {
    /// The rule on the elements of `p`, which stand at `at` in the moments.
    #[inline(always)]
    fn apply(
        &mut self,
        rule: Rule,
        s: Scalars,
        at: usize,
        p: &mut [f32],
        moments: [&mut ViewMut<'_>; 2],
        decayed: usize,
    ) {
        let n = p.len();
        let [momentum, variance] = moments;
        match (momentum, variance) {
            (ViewMut::F32(m), ViewMut::F32(v)) => {
                let (m, v) = (&mut m[at..at + n], &mut v[at..at + n]);
                step(rule, s, &self.grad[..n], [p, m, v], decayed);
            }
            (ViewMut::Bf16(m), ViewMut::Bf16(v)) => {
                let (m, v) = (&mut m[at..at + n], &mut v[at..at + n]);
                let (wide_m, wide_v) = (&mut self.momentum[..n], &mut self.variance[..n]);
                round::widen(m, wide_m);
                round::widen(v, wide_v);
                step(rule, s, &self.grad[..n], [p, wide_m, wide_v], decayed);
                let noise = &self.noise[..n];
                for i in 0..n {
                    m[i] = bf16::from_bits(round::stochastic(wide_m[i], noise[i]));
                    v[i] = bf16::from_bits(round::stochastic(wide_v[i], noise[i] >> 16));
                }
            }
            _ => {}
        }
    }

    /// The new parameters, rounded.
    #[inline(always)]
    fn publish(
        &mut self,
        path: SimdPath,
        p: &[f32],
        param: &mut ViewMut<'_>,
        at: usize,
        streams: bool,
    ) {
        let n = p.len();
        let rounded = &mut self.param[..n];
        let out: &mut [u16] = match param {
            ViewMut::F16(out) => {
                round::to_f16(path, p, rounded);
                out[at..at + n].reinterpret_cast_mut()
            }
            ViewMut::Bf16(out) => {
                round::to_bf16(p, rounded);
                out[at..at + n].reinterpret_cast_mut()
            }
            other => return other.store(at, p),
        };
        if streams {
            simd::stream(rounded, out);
        } else {
            out.copy_from_slice(rounded);
        }
    }
}

impl Noise<'_> {
    /// Random bits of the elements from `at` on.
    #[inline(always)]
    fn fill(&self, step: u64, at: usize, out: &mut [u32]) {
        let (first, end) = (self.start + at, self.start + at + out.len());
        let mut run = self.runs.partition_point(|run| run.flat.end <= first);
        let mut done = first;
        while done < end {
            let (upto, global) = match self.runs.get(run) {
                Some(run) if run.flat.start <= done => {
                    let global = run.global + (done - run.flat.start) as u64;
                    (run.flat.end.min(end), Some((random::key(run.stream, step), global)))
                }
                Some(run) => (run.flat.start.min(end), None),
                None => (end, None),
            };
            let out = &mut out[done - first..upto - first];
            match global {
                None => out.fill(0),
                Some((stream, global)) => {
                    for (i, bits) in out.iter_mut().enumerate() {
                        *bits = random::bits32(stream, global + i as u64);
                    }
                    run += 1;
                }
            }
            done = upto;
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

#[inline(always)]
fn step(rule: Rule, s: Scalars, grad: &[f32], [p, m, v]: [&mut [f32]; 3], decayed: usize) {
    let (pd, p) = p.split_at_mut(decayed);
    let (md, m) = m.split_at_mut(decayed);
    let (vd, v) = v.split_at_mut(decayed);
    step_run(rule, s, true, &grad[..decayed], [pd, md, vd]);
    step_run(rule, s, false, &grad[decayed..], [p, m, v]);
}

#[inline(always)]
fn step_run(rule: Rule, s: Scalars, decay: bool, grad: &[f32], [p, m, v]: [&mut [f32]; 3]) {
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
