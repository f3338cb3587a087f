//! Finds the gradient that caused a skipped step.

use crate::run::Ranks;
use device::{Device, Error};
use offload::{NonFiniteGradient, Optimizer};
use std::cmp::Reverse;

/// The first gradient of a skipped step that is not finite.
#[derive(Default)]
pub(super) struct SkipCause {
    pub(super) step: u64,
    /// Segment, element within the segment, and name of the tensor: the first over all ranks, in
    /// the order of the backward pass.
    pub(super) first: Option<(Reverse<usize>, usize, String)>,
}

impl Ranks<'_> {
    /// Finds the tensor that caused the skip of `step`, over all ranks. Keeps its name for the
    /// outcome.
    pub(super) fn locate(
        &self,
        dev: &Device,
        optimizer: &Optimizer,
        step: u64,
    ) -> Result<(), Error> {
        let found = optimizer.first_not_finite(dev)?;
        let found = found.map(|NonFiniteGradient { segment, element }| [segment, element]);
        let mut all = vec![found];
        if self.world.has_remote_ranks() {
            let found = serde_json::json!(found).to_string();
            let remote = self.world.gather_remote(dev.rank(), "not finite", found.as_bytes())?;
            all.extend(
                remote
                    .iter()
                    .filter_map(|(_, found)| serde_json::from_slice::<Option<_>>(found).ok()),
            );
        }
        for [segment, element] in all.into_iter().flatten() {
            self.note_skip_cause(step, segment, element);
        }
        Ok(())
    }

    fn note_skip_cause(&self, step: u64, segment: usize, element: usize) {
        let params = &self.layout.decoder.segments()[segment].params;
        let name =
            params.iter().find(|param| param.range.contains(&element)).map(|p| p.name.clone());
        let found = (Reverse(segment), element, name.unwrap_or_else(|| "padding".into()));
        let noted = &mut *self.skip_cause.lock().unwrap_or_else(|e| e.into_inner());
        if noted.step != step {
            *noted = SkipCause { step, first: None };
        }
        if noted.first.as_ref().is_none_or(|known| found < *known) {
            noted.first = Some(found);
        }
    }
}
