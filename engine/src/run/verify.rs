//! Steps whose passes run twice (`train.verify_every`). The same passes of the same samples give the same bits on any layout, so a
//! difference is a fault of a GPU, of memory or of a link, which a loss curve would not show.

use crate::run::messages::Listener;
use crate::run::{Differing, Message, Ranks};
use crate::step::Trainer;
use device::{Device, Error};

/// The results of one run of a step's passes on a rank.
pub(super) struct Trial {
    step: u64,
    /// The loss of each micro-batch.
    losses: Vec<f64>,
    /// See [`offload::Optimizer::squares`].
    squares: Vec<f64>,
}

impl Trial {
    fn read(dev: &Device, trainer: &Trainer, step: u64) -> Result<Self, Error> {
        let mut losses = vec![0.0; trainer.samples.deal.micro_batches];
        dev.read(trainer.losses_host().slice(0..losses.len()), &mut losses)?;
        Ok(Self { step, losses, squares: trainer.optimizer.squares(dev)? })
    }
}

impl Ranks<'_> {
    /// Runs the passes of `step` ahead of the step itself, where it is one of those that are verified.
    pub(super) fn tried(
        &self,
        dev: &Device,
        trainer: &mut Trainer,
        step: u64,
    ) -> Result<Option<Trial>, Error> {
        let every = self.config.train.verify_every;
        if every == 0 || !step.is_multiple_of(every) {
            return Ok(None);
        }
        trainer.try_step(dev, step);
        dev.sync_all()?;
        if self.options.change_at == Some((dev.rank().index(), step)) {
            let head = self.built.gpt.segment(self.built.gpt.head());
            let one = self.built.gpt.params(head).slice(0..1);
            let mut value = [0.0];
            dev.read(one, &mut value)?;
            dev.write(one, &|_| value[0] + 1.0)?;
        }
        Trial::read(dev, trainer, step).map(Some)
    }

    /// Whether the step has the bits of its trial: on rank 0 on all ranks, and it tells of those that differ; elsewhere on this rank.
    pub(super) fn verify(
        &self,
        dev: &Device,
        trainer: &Trainer,
        trial: &Trial,
        listener: Listener<'_>,
    ) -> Result<bool, Error> {
        let rank = dev.rank();
        let place = self.difference(trial, &Trial::read(dev, trainer, trial.step)?, trainer);
        // No place is empty.
        let bytes = place.as_deref().map_or(&[][..], str::as_bytes);
        let differing = || self.differing.lock().unwrap_or_else(|e| e.into_inner());
        differing().extend(place.clone().map(|place| Differing { rank: rank.index(), place }));
        let far = self.world.gather_remote(rank, "verified", bytes)?;
        if rank.index() != 0 {
            return Ok(place.is_none());
        }
        let mut places = std::mem::take(&mut *differing());
        let far = far.into_iter().filter(|(_, place)| !place.is_empty());
        let text = |place: Vec<u8>| String::from_utf8_lossy(&place).into();
        places.extend(far.map(|(rank, place)| Differing { rank, place: text(place) }));
        places.sort_unstable();
        let same = places.is_empty();
        if !same {
            listener.tell(Message::Differs { step: trial.step, places });
        }
        Ok(same)
    }

    /// Where two runs of a step differ on this rank: the tensors of the last chunk of the gradient, to which the backward pass comes first,
    /// or else the loss.
    fn difference(&self, first: &Trial, second: &Trial, trainer: &Trainer) -> Option<String> {
        let differ = |(a, b): (&f64, &f64)| a.to_bits() != b.to_bits();
        let chunk = first.squares.iter().zip(&second.squares).rposition(differ);
        let Some(chunk) = chunk else {
            let mut losses = first.losses.iter().zip(&second.losses);
            return losses.any(differ).then(|| "the loss".into());
        };
        let (segment, range) = trainer.optimizer.chunk(chunk);
        let params = &self.built.gpt.segments()[segment].params;
        let within =
            params.iter().filter(|p| p.range.start < range.end && range.start < p.range.end);
        let names: Vec<String> = within.map(|param| format!("`{}`", param.name)).collect();
        let names = if names.is_empty() { "padding".into() } else { names.join(" or ") };
        Some(format!("the gradient of {names}"))
    }
}
