//! Which gradients made a step be skipped.

use crate::run::Ranks;
use device::{Device, Error};
use offload::Optimizer;
use std::cmp::Reverse;

/// Where the gradients of a skipped step are not finite.
#[derive(Default)]
pub(super) struct NotFinite {
    pub(super) step: u64,
    /// Segment, index in it, and the tensor's name: the first of all ranks' in the order of the backward pass.
    pub(super) first: Option<(Reverse<usize>, usize, String)>,
}

impl Ranks<'_> {
    /// Notes which tensor made `step` be skipped: the first on any rank.
    pub(super) fn locate(
        &self,
        dev: &Device,
        optimizer: &Optimizer,
        step: u64,
    ) -> Result<(), Error> {
        let found = optimizer.first_not_finite(dev)?;
        let found = found.map(|offload::NonFiniteGradient { segment, element }| {
            (segment as u64, element as u64)
        });
        if let Some(found) = found {
            self.note_not_finite(step, found);
        }
        if self.world.has_remote_ranks() {
            let found = found.map_or_else(Vec::new, |(segment, at)| {
                [segment.to_le_bytes(), at.to_le_bytes()].concat()
            });
            for (_, found) in self.world.gather_remote(dev.rank(), "not finite", &found)? {
                if let ([segment, at], []) = found.as_chunks() {
                    let found = (u64::from_le_bytes(*segment), u64::from_le_bytes(*at));
                    self.note_not_finite(step, found);
                }
            }
        }
        Ok(())
    }

    fn note_not_finite(&self, step: u64, (segment, at): (u64, u64)) {
        let (segment, at) = (segment as usize, at as usize);
        let params = &self.built.gpt.segments()[segment].params;
        let name = params.iter().find(|param| param.range.contains(&at)).map(|p| p.name.clone());
        let found = (Reverse(segment), at, name.unwrap_or_else(|| "padding".into()));
        let noted = &mut *self.not_finite.lock().unwrap_or_else(|e| e.into_inner());
        if noted.step != step {
            *noted = NotFinite { step, first: None };
        }
        if noted.first.as_ref().is_none_or(|known| found < *known) {
            noted.first = Some(found);
        }
    }
}
