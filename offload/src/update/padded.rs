//! Elements that are not whole aligned vectors are copied to a padded buffer and back.

use super::Update;
use device::numerics::lanes::WIDEST;
use device::{View, ViewMut};
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};

/// Capacity of the buffer in elements.
pub(super) const PAD: usize = 256;

/// Buffer of one field of the elements: gradients, masters, momenta, variances or parameters.
#[repr(align(64))]
struct Field {
    wide: [f32; PAD],
    narrow: [u16; PAD],
}

pub(super) struct PaddedRun {
    fields: [Field; 5],
}

impl Field {
    /// A buffer of zeros; the padding may have any value.
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

    /// A view of `len` elements with the storage type of `like`.
    fn view(&mut self, like: View<'_>, len: usize) -> ViewMut<'_> {
        match like {
            View::F16(_) => ViewMut::F16(self.narrow[..len].reinterpret_cast_mut()),
            View::Bf16(_) => ViewMut::Bf16(self.narrow[..len].reinterpret_cast_mut()),
            View::U16(_) => ViewMut::U16(&mut self.narrow[..len]),
            _ => ViewMut::F32(&mut self.wide[..len]),
        }
    }
}

impl PaddedRun {
    pub(super) const fn new() -> Self {
        Self { fields: [Field::NEW; 5] }
    }

    /// Copies `part` to the buffer, after `lead` elements of padding.
    pub(super) fn take(&mut self, part: &Update<'_>, lead: usize) {
        let views = fields(part);
        self.fields.iter_mut().zip(views).for_each(|(field, view)| field.take(view, lead));
    }

    /// The update of the copied `part` with its padding, as whole vectors.
    pub(super) fn whole<'a>(&'a mut self, part: &Update<'a>, lead: usize) -> Update<'a> {
        let len = (lead + part.grad.len()).next_multiple_of(WIDEST);
        let [like_master, like_momentum, like_variance] = part.views();
        let [grad, master, momentum, variance, param] = &mut self.fields;
        let states = [
            master.view(like_master, len),
            momentum.view(like_momentum, len),
            variance.view(like_variance, len),
        ];
        let param = param.view(part.param.as_view(), len);
        let grad = grad.view(part.grad, len).into_view();
        Update { grad, states, old: None, param, ..*part }
    }

    /// Copies the new states and parameters back to `part`.
    pub(super) fn give(&self, part: &mut Update<'_>, lead: usize) {
        let [_, states @ .., param] = &self.fields;
        states.iter().zip(&mut part.states).for_each(|(field, state)| field.give(state, lead));
        param.give(&mut part.param, lead);
    }
}

/// The fields of `part` in the order of [`PaddedRun`].
fn fields<'a>(part: &'a Update<'_>) -> [View<'a>; 5] {
    let [master, momentum, variance] = part.old.unwrap_or_else(|| part.views());
    [part.grad, master, momentum, variance, part.param.as_view()]
}
