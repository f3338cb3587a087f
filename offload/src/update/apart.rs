//! An update that leaves the states which it reads as they are: the new ones go to other arrays.

use super::{Master, States, Update, update};
use crate::control;
use device::numerics::lanes::stream;
use device::{View, ViewMut};
use half::bf16;
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use pulp::bytemuck::{cast_slice, cast_slice_mut};

/// Elements that are updated at a time, within a core's own cache.
const BLOCK: usize = 2048;

/// An update apart from the states that it reads.
#[derive(Debug)]
pub(crate) struct Apart<'a> {
    /// The masters (fp32, or `U16` of split ones), the first moments and the second moments before the update.
    pub(crate) old: [View<'a>; 3],
    /// The upper halves of split masters.
    pub(crate) upper: Upper<'a>,
    /// The update, with the arrays of the new states.
    pub(crate) new: Update<'a>,
}

/// What happens to the upper halves of split masters, which are the parameters and have one array alone.
#[derive(Debug)]
pub(crate) enum Upper<'a> {
    /// Nothing: the masters are whole.
    Absent,
    /// They are kept here before the update changes them.
    Keep(&'a mut [bf16]),
    /// They were changed before, and are these.
    Restore(&'a [bf16]),
}

/// States of one block.
#[repr(align(64))]
struct Block {
    wide: [[f32; BLOCK]; 3],
    narrow: [[u16; BLOCK]; 3],
}

/// Does it. In a skipped step only the parameters are set, to those of the old states.
///
/// # Errors
/// As [`update`].
pub(crate) fn update_apart(apart: Apart<'_>) -> Result<(), String> {
    let Apart { old, mut upper, mut new } = apart;
    let n = new.grad.len();
    if old.iter().any(|view| view.len() != n) || !upper.fits(&new.states.master, n) {
        return Err(format!("{n} gradients, old states of other lengths or kinds"));
    }
    let skip = new.control[control::SKIP] != 0.0;
    let mut block = Block { wide: [[0.0; BLOCK]; 3], narrow: [[0; BLOCK]; 3] };
    for at in (0..n).step_by(BLOCK) {
        let range = at..(at + BLOCK).min(n);
        let mut part = new.part(range.clone());
        upper.before(range.clone(), &mut part.param);
        let old = old.map(|view| view.slice(range.clone()));
        update(Update { states: block.states(old)?, param: part.param.reborrow(), ..part })?;
        if !skip {
            block.give(&mut part.states);
        }
    }
    Ok(())
}

impl<'a> Apart<'a> {
    /// Two updates, parted at element `mid`.
    pub(crate) fn split_at(self, mid: usize) -> (Self, Self) {
        let Self { old, upper, new } = self;
        let end = new.grad.len();
        let (first, second) = new.split_at(mid);
        let (left, right) = upper.split_at(mid);
        let part = |range: std::ops::Range<usize>| old.map(|view| view.slice(range.clone()));
        let (before, behind) = (part(0..mid), part(mid..end));
        (
            Self { old: before, upper: left, new: first },
            Self { old: behind, upper: right, new: second },
        )
    }
}

impl Upper<'_> {
    /// Whether there are `n` upper halves where the masters are split, and none where they are whole.
    fn fits(&self, master: &Master<'_>, n: usize) -> bool {
        match (self, master) {
            (Self::Absent, Master::Whole(_)) => true,
            (Self::Keep(kept), Master::Lower(_)) => kept.len() == n,
            (Self::Restore(kept), Master::Lower(_)) => kept.len() == n,
            _ => false,
        }
    }

    /// Keeps or restores elements `range`, which are the parameters `param`.
    fn before(&mut self, range: std::ops::Range<usize>, param: &mut ViewMut<'_>) {
        match (self, param) {
            (Self::Keep(kept), ViewMut::Bf16(param)) => {
                let kept = kept[range].reinterpret_cast_mut();
                stream(param.reinterpret_cast(), kept);
            }
            (Self::Restore(kept), ViewMut::Bf16(param)) => param.copy_from_slice(&kept[range]),
            _ => {}
        }
    }

    fn split_at(self, mid: usize) -> (Self, Self) {
        match self {
            Self::Absent => (Self::Absent, Self::Absent),
            Self::Keep(kept) => {
                let (first, second) = kept.split_at_mut(mid);
                (Self::Keep(first), Self::Keep(second))
            }
            Self::Restore(kept) => {
                let (first, second) = kept.split_at(mid);
                (Self::Restore(first), Self::Restore(second))
            }
        }
    }
}

impl Block {
    /// Brings old states in.
    fn states(
        &mut self,
        [master, momentum, variance]: [View<'_>; 3],
    ) -> Result<States<'_>, String> {
        let n = master.len();
        let [master_wide, momentum_wide, variance_wide] = &mut self.wide;
        let [master_narrow, momentum_narrow, variance_narrow] = &mut self.narrow;
        let master = match master {
            View::F32(x) => {
                master_wide[..n].copy_from_slice(x);
                Master::Whole(&mut master_wide[..n])
            }
            View::U16(x) => {
                master_narrow[..n].copy_from_slice(x);
                Master::Lower(&mut master_narrow[..n])
            }
            _ => return Err("masters are fp32, or lower halves of it".into()),
        };
        Ok(States {
            master,
            momentum: moment(momentum, (momentum_wide, momentum_narrow))?,
            variance: moment(variance, (variance_wide, variance_narrow))?,
        })
    }

    /// Stores the new states past the caches: nothing reads them before the next update.
    fn give(&self, new: &mut States<'_>) {
        let n = new.master.len();
        match &mut new.master {
            Master::Whole(x) => stream(cast_slice(&self.wide[0][..n]), cast_slice_mut(x)),
            Master::Lower(x) => stream(&self.narrow[0][..n], x),
        }
        let moments = [&mut new.momentum, &mut new.variance];
        for (moment, (wide, narrow)) in
            moments.into_iter().zip(self.wide[1..].iter().zip(&self.narrow[1..]))
        {
            match moment {
                ViewMut::F32(x) => stream(cast_slice(&wide[..n]), cast_slice_mut(x)),
                ViewMut::Bf16(x) => stream(&narrow[..n], x.reinterpret_cast_mut()),
                _ => unreachable!("the update has refused moments that are neither fp32 nor bf16"),
            }
        }
    }
}

/// Brings old moments in.
fn moment<'a>(
    old: View<'_>,
    (wide, narrow): (&'a mut [f32; BLOCK], &'a mut [u16; BLOCK]),
) -> Result<ViewMut<'a>, String> {
    let n = old.len();
    match old {
        View::F32(x) => {
            wide[..n].copy_from_slice(x);
            Ok(ViewMut::F32(&mut wide[..n]))
        }
        View::Bf16(x) => {
            narrow[..n].copy_from_slice(x.reinterpret_cast());
            Ok(ViewMut::Bf16(narrow[..n].reinterpret_cast_mut()))
        }
        _ => Err("moments are fp32 or bf16".into()),
    }
}
