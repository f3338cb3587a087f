//! Runs of elements that are no whole vectors, or lie between words: copied to where they are, with others around.

use super::{Master, States, Update};
use device::numerics::lanes::WIDEST;
use device::{View, ViewMut};
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};

/// Elements that there is room for.
pub(super) const PAD: usize = 256;

/// One field of some elements: gradients, masters, momenta, variances or parameters.
#[repr(align(64))]
struct Field {
    wide: [f32; PAD],
    narrow: [u16; PAD],
}

pub(super) struct PaddedRun {
    fields: [Field; 5],
}

impl Field {
    /// Any number may stand around them.
    const NEW: Self = Self { wide: [0.0; PAD], narrow: [0; PAD] };

    fn take(&mut self, from: View<'_>, lead: usize) {
        let range = lead..lead + from.len();
        match from {
            View::F32(x) => self.wide[range].copy_from_slice(x),
            View::F16(x) => self.narrow[range].copy_from_slice(x.reinterpret_cast()),
            View::Bf16(x) => self.narrow[range].copy_from_slice(x.reinterpret_cast()),
            View::U16(x) => self.narrow[range].copy_from_slice(x),
            View::F64(_) | View::I32(_) | View::E4m3(_) | View::E5m2(_) => {}
        }
    }

    fn give(&self, to: &mut ViewMut<'_>, lead: usize) {
        let range = lead..lead + to.len();
        match to {
            ViewMut::F32(x) => x.copy_from_slice(&self.wide[range]),
            ViewMut::F16(x) => x.reinterpret_cast_mut().copy_from_slice(&self.narrow[range]),
            ViewMut::Bf16(x) => x.reinterpret_cast_mut().copy_from_slice(&self.narrow[range]),
            ViewMut::U16(x) => x.copy_from_slice(&self.narrow[range]),
            ViewMut::F64(_) | ViewMut::I32(_) | ViewMut::E4m3(_) | ViewMut::E5m2(_) => {}
        }
    }

    /// `len` elements, stored as those of `like` are.
    fn view(&mut self, like: View<'_>, len: usize) -> ViewMut<'_> {
        match like {
            View::F16(_) => ViewMut::F16(self.narrow[..len].reinterpret_cast_mut()),
            View::Bf16(_) => ViewMut::Bf16(self.narrow[..len].reinterpret_cast_mut()),
            _ => ViewMut::F32(&mut self.wide[..len]),
        }
    }
}

impl PaddedRun {
    pub(super) const fn new() -> Self {
        Self { fields: [Field::NEW; 5] }
    }

    /// Copies `part` to behind `lead` others.
    pub(super) fn take(&mut self, part: &Update<'_>, lead: usize) {
        let views = fields(part);
        self.fields.iter_mut().zip(views).for_each(|(field, view)| field.take(view, lead));
    }

    /// `part` where it was copied to, and what makes it whole vectors.
    pub(super) fn whole<'a>(&'a mut self, part: &Update<'a>, lead: usize) -> Update<'a> {
        let len = (lead + part.grad.len()).next_multiple_of(WIDEST);
        let [_, kept, ..] = fields(part);
        let [grad, master, momentum, variance, param] = &mut self.fields;
        let states = States {
            master: match kept {
                View::U16(_) => Master::Lower(&mut master.narrow[..len]),
                _ => Master::Whole(&mut master.wide[..len]),
            },
            momentum: momentum.view(part.states.momentum.as_view(), len),
            variance: variance.view(part.states.variance.as_view(), len),
        };
        let param = param.view(part.param.as_view(), len);
        let grad = match part.grad {
            View::F16(_) => View::F16(grad.narrow[..len].reinterpret_cast()),
            View::Bf16(_) => View::Bf16(grad.narrow[..len].reinterpret_cast()),
            _ => View::F32(&grad.wide[..len]),
        };
        Update { grad, states, old: None, param, ..*part }
    }

    /// Copies `part` back.
    pub(super) fn give(&self, part: &mut Update<'_>, lead: usize) {
        let [_, master, momentum, variance, param] = &self.fields;
        let states = &mut part.states;
        match &mut states.master {
            Master::Whole(x) => master.give(&mut ViewMut::F32(x), lead),
            Master::Lower(x) => master.give(&mut ViewMut::U16(x), lead),
        }
        momentum.give(&mut states.momentum, lead);
        variance.give(&mut states.variance, lead);
        param.give(&mut part.param, lead);
    }
}

/// In the order of [`PaddedRun`].
fn fields<'a>(part: &'a Update<'_>) -> [View<'a>; 5] {
    let [master, momentum, variance] = part.old.unwrap_or_else(|| part.states.views());
    [part.grad, master, momentum, variance, part.param.as_view()]
}
