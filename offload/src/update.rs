//! The update rule: unscale, clip, weight decay, AdamW and the new parameter in one memory pass.

#[cfg(test)]
mod accuracy;
mod elements;
pub(crate) mod halves;
mod noise;
mod out_of_place;
mod padded;
mod rules;
#[cfg(test)]
mod tests;
mod traffic;

pub(crate) use noise::Noise;
pub use noise::{NoiseRun, TileNoise};
pub(crate) use out_of_place::{
    OutOfPlaceUpdate, UpperHalves, traffic_out_of_place, update_out_of_place,
};
pub use rules::Rule;
pub(crate) use traffic::traffic;
pub use traffic::{StoreKind, TrafficLoop};

use crate::control;
use device::numerics::SimdPath;
use device::numerics::lanes::{self, Kernel, Lanes, SupportedPath, WIDEST};
use device::{View, ViewMut};
use elements::{
    F16, F16Mut, Halves, Master, Source, Target, WordState, Words, WordsMut, aligned, wide,
    wide_mut, wide_state, words, words_mut,
};
use half::bf16;
use half::slice::HalfFloatSliceExt;
use noise::Draw;
use padded::{PAD, PaddedRun};
use rules::{AdamW, Scalars, Sgd, keep};
use std::ops::Range;

/// One update of a run of parameters. A skipped step only writes `param`, from the master.
#[derive(Debug)]
pub(crate) struct Update<'a> {
    /// The update rule.
    pub(crate) rule: Rule,
    /// The control block, see [`control`](crate::control).
    pub(crate) control: &'a [f64],
    /// Summed and scaled gradients.
    pub(crate) grad: View<'a>,
    /// Masters and moments; the new states if [`old`](Self::old) has the old ones. Masters are
    /// fp32, or the lower halves of fp32 masters. The upper halves are then the bf16 parameters,
    /// which the update also reads; the results have the same bits. Moments are fp32, or bf16 with
    /// stochastic rounding by [`Noise`].
    pub(crate) states: [ViewMut<'a>; 3],
    /// Masters, first and second moments before the update, if it does not overwrite them.
    pub(crate) old: Option<[View<'a>; 3]>,
    /// Parameters, rounded to nearest: bf16 with ties away from zero, others with ties to even.
    pub(crate) param: ViewMut<'a>,
    /// Number of leading elements with weight decay; a larger number means all elements.
    pub(crate) decayed: usize,
    /// Random bits for 16-bit moments.
    pub(crate) noise: Noise<'a>,
    /// Whether stores bypass the caches, since another reader than this core is next.
    pub(crate) streams: bool,
}

/// Applies the update with the process's SIMD path.
///
/// # Errors
/// Storage types or lengths that do not match.
pub(crate) fn update(update: Update<'_>) -> Result<(), String> {
    update_on(SimdPath::current(), update)
}

/// Applies the [`update`] with the SIMD path `path`.
fn update_on(path: SimdPath, mut update: Update<'_>) -> Result<(), String> {
    update.check()?;
    lanes::run(path, &mut update);
    Ok(())
}

impl<'a> Update<'a> {
    /// Two updates, split at element `mid`.
    #[inline(always)]
    pub(crate) fn split_at(self, mid: usize) -> (Self, Self) {
        let Self { rule, control, grad, states, old, param, decayed, noise, streams } = self;
        let [master, momentum, variance] = states.map(|state| state.split_at(mid));
        let (first, second) = param.split_at(mid);
        let left = [master.0, momentum.0, variance.0];
        let right = [master.1, momentum.1, variance.1];
        let part = |states, param, range: Range<usize>| Update {
            rule,
            control,
            states,
            old: old.map(|old| old.map(|view| view.slice(range.clone()))),
            param,
            decayed: decayed.saturating_sub(range.start).min(range.len()),
            noise: Noise { start: noise.start + range.start, ..noise },
            grad: grad.slice(range),
            streams,
        };
        (part(left, first, 0..mid), part(right, second, mid..grad.len()))
    }

    fn check(&self) -> Result<(), String> {
        let (new, n) = (self.views(), self.grad.len());
        let lengths = new.map(|state| state.len());
        let is_alike = |(old, new): (&View<'_>, &View<'_>)| {
            old.len() == n && std::mem::discriminant(old) == std::mem::discriminant(new)
        };
        if self.old.iter().flatten().zip(&new).any(|pair| !is_alike(pair)) {
            return Err(format!("{n} gradients, old states of other lengths or types"));
        }
        if lengths.iter().any(|len| *len != n) || self.param.len() != n {
            return Err(format!(
                "{n} gradients, {lengths:?} states, {} parameters",
                self.param.len()
            ));
        }
        let [master, momentum, variance] = new;
        match (momentum, variance) {
            (View::F32(_), View::F32(_)) | (View::Bf16(_), View::Bf16(_)) => {}
            _ => return Err("moments are both fp32, or both bf16".into()),
        }
        let (View::F16(_) | View::Bf16(_) | View::F32(_)) = self.grad else {
            return Err("gradients are fp16, bf16 or fp32".into());
        };
        match (master, &self.param) {
            (View::U16(_), ViewMut::Bf16(_)) => Ok(()),
            (View::U16(_), _) => Err("only bf16 parameters are halves of fp32 ones".into()),
            (View::F32(_), ViewMut::F16(_) | ViewMut::Bf16(_) | ViewMut::F32(_)) => Ok(()),
            (View::F32(_), _) => Err("parameters are fp16, bf16 or fp32".into()),
            _ => Err("masters are fp32, or the lower halves of it".into()),
        }
    }

    /// A shorter-lived update of the same elements.
    #[inline(always)]
    fn reborrow(&mut self) -> Update<'_> {
        let states = self.states.each_mut().map(ViewMut::reborrow);
        Update { states, param: self.param.reborrow(), ..*self }
    }

    /// The update of the elements `range`.
    #[inline(always)]
    fn part(&mut self, range: Range<usize>) -> Update<'_> {
        self.reborrow().split_at(range.end).0.split_at(range.start).1
    }

    /// Whether all 16-bit elements begin at a multiple of 4 bytes.
    fn is_aligned(&self) -> bool {
        let states = self.views().into_iter().chain(self.old.into_iter().flatten());
        states.chain([self.param.as_view(), self.grad]).all(aligned)
    }

    /// The masters, the first moments and the second moments.
    fn views(&self) -> [View<'_>; 3] {
        self.states.each_ref().map(ViewMut::as_view)
    }

    /// The stretch of alike elements that begins at `at`: all with weight decay or all without, and
    /// with consecutive random bits. Returns the random bits and the end of the stretch.
    fn stretch(&self, step: u64, at: usize) -> (Draw, usize) {
        let (draw, len) = match self.states[1] {
            ViewMut::Bf16(_) => self.noise.draw(step, at),
            _ => (Draw::default(), usize::MAX),
        };
        let n = self.grad.len();
        let end = if at < self.decayed { self.decayed.min(n) } else { n };
        (draw, end.min(at.saturating_add(len)))
    }
}

impl Kernel for Update<'_> {
    #[inline(always)]
    fn run<L: Lanes>(&mut self, lanes: L, path: SupportedPath) {
        let scalars = Scalars::new(self.control);
        let step = self.control[control::STEP] as u64;
        let (mut padded, aligned, rule) = (None, self.is_aligned(), self.rule);
        let (mut at, n) = (0, self.grad.len());
        while at < n {
            let (draw, end) = self.stretch(step, at);
            let whole = (end - at) / WIDEST * WIDEST;
            let direct = aligned && draw.lead() == 0 && at.is_multiple_of(WIDEST) && whole > 0;
            let len = match (direct, aligned) {
                (true, _) => whole,
                // A run up to the next position at which vectors can begin.
                (_, true) => (end - at).min(WIDEST - at % WIDEST),
                _ => (end - at).min(PAD - draw.lead()),
            };
            let mut part = self.part(at..at + len);
            let decays = part.decayed > 0;
            let vectors = if direct {
                part.part(0..len)
            } else {
                let padded = padded.get_or_insert_with(PaddedRun::new);
                padded.take(&part, draw.lead());
                padded.whole(&part, draw.lead())
            };
            vectors.vectors(Step { lanes, path, scalars, rule, decays, draw });
            if let (false, Some(padded)) = (direct, &padded) {
                padded.give(&mut part, draw.lead());
            }
            at += len;
        }
    }
}

/// The rule and the constants of a step.
#[derive(Clone, Copy)]
struct Step<L> {
    lanes: L,
    path: SupportedPath,
    scalars: Scalars,
    rule: Rule,
    decays: bool,
    draw: Draw,
}

/// The old moment, if it has its own array, and the array of the new moment.
type Moment<'a, 'b> = (Option<View<'a>>, &'a mut ViewMut<'b>);

impl Update<'_> {
    /// Updates whole vectors, all with weight decay or all without.
    #[inline(always)]
    fn vectors<L: Lanes>(mut self, step: Step<L>) {
        let (n, streams, path) = (self.grad.len() / L::PAIR, self.streams, step.path);
        let old = self.old.map_or([None; 3], |old| old.map(Some));
        let [master, momentum, variance] = &mut self.states;
        let moments = [(old[1], momentum), (old[2], variance)];
        let old_master = old[0].and_then(View::as_slice::<f32>);
        match (master, &mut self.param) {
            (ViewMut::U16(low), ViewMut::Bf16(high)) => {
                let old_lower = old[0].and_then(View::as_slice).map(|old| words::<L>(old, n));
                let upper = words_mut::<L>(high.reinterpret_cast_mut(), n);
                let halves = Halves { upper, old_lower, lower: words_mut::<L>(low, n) };
                step.on(self.grad, halves, moments, n);
            }
            (ViewMut::F32(master), ViewMut::Bf16(param)) => {
                let param = WordsMut(words_mut::<L>(param.reinterpret_cast_mut(), n), streams);
                let master = Master(wide_state(old_master, master, n), param);
                step.on(self.grad, master, moments, n);
            }
            (ViewMut::F32(master), ViewMut::F16(param)) => {
                let param = F16Mut(path, param.reinterpret_cast_mut(), streams);
                let master = Master(wide_state(old_master, master, n), param);
                step.on(self.grad, master, moments, n);
            }
            (ViewMut::F32(master), ViewMut::F32(param)) => {
                let master = Master(wide_state(old_master, master, n), wide_mut::<L>(param, n));
                step.on(self.grad, master, moments, n);
            }
            _ => {}
        }
    }
}

impl<L: Lanes> Step<L> {
    #[inline(always)]
    fn on(self, grad: View<'_>, master: impl Target<L>, moments: [Moment<'_, '_>; 2], n: usize) {
        if self.scalars.skip {
            return keep(self.lanes, master, n);
        }
        match grad {
            View::Bf16(x) => {
                let grad = Words::<L>(words::<L>(x.reinterpret_cast(), n));
                self.with(&grad, master, moments, n);
            }
            View::F16(x) => self.with(&F16(self.path, x.reinterpret_cast()), master, moments, n),
            View::F32(x) => self.with(&wide::<L>(x, n), master, moments, n),
            _ => {}
        }
    }

    #[inline(always)]
    fn with(
        self,
        grad: &impl Source<L>,
        master: impl Target<L>,
        [(old_momentum, momentum), (old_variance, variance)]: [Moment<'_, '_>; 2],
        n: usize,
    ) {
        let Self { lanes, scalars, rule, decays, draw, .. } = self;
        let shrink = if decays { -scalars.lr } else { 0.0 };
        let rule = match rule {
            Rule::AdamW { beta1, beta2, eps, weight_decay } => {
                AdamW::new(scalars, [beta1, beta2, eps], shrink * weight_decay)
            }
            Rule::Sgd { weight_decay } => {
                let rule = Sgd { shrink: shrink * weight_decay };
                return rule.run(lanes, scalars, grad, master, n);
            }
        };
        match (momentum, variance) {
            (ViewMut::F32(m), ViewMut::F32(v)) => {
                let old_m = old_momentum.and_then(View::as_slice);
                let old_v = old_variance.and_then(View::as_slice);
                let moments = [wide_state::<L>(old_m, m, n), wide_state::<L>(old_v, v, n)];
                rule.run(lanes, draw, grad, master, moments, n);
            }
            (ViewMut::Bf16(m), ViewMut::Bf16(v)) => {
                let [old_m, old_v] = [old_momentum, old_variance].map(|old| {
                    let old = old.and_then(View::as_slice::<bf16>);
                    old.map(|old| words::<L>(old.reinterpret_cast(), n))
                });
                let new = words_mut::<L>(m.reinterpret_cast_mut(), n);
                let m = WordState { old: old_m, new };
                let new = words_mut::<L>(v.reinterpret_cast_mut(), n);
                let v = WordState { old: old_v, new };
                rule.run(lanes, draw, grad, master, [m, v], n);
            }
            _ => {}
        }
    }
}
