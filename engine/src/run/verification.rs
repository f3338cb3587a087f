//! Steps that run forward and backward twice (`train.verify_every`). The same samples give the same
//! bits on any layout. A difference is a fault of a GPU, memory or link that no loss curve shows.

use crate::run::messages::Listener;
use crate::run::{Difference, Message, Ranks};
use crate::step::Trainer;
use device::{Device, Error};

/// The results of one forward and backward run of a step on a rank.
pub(super) struct Trial {
    step: u64,
    /// The loss of each micro-batch.
    losses: Vec<f64>,
    /// Sums of squares of the gradient: see [`offload::Optimizer::squares`].
    squares: Vec<f64>,
}

impl Trial {
    fn read(dev: &Device, trainer: &Trainer, step: u64) -> Result<Self, Error> {
        let mut losses = vec![0.0; trainer.samples.split.micro_batches];
        dev.read(trainer.losses_host.slice(0..losses.len()), &mut losses)?;
        Ok(Self { step, losses, squares: trainer.optimizer.squares(dev)? })
    }
}

impl Ranks<'_> {
    /// Runs `step` forward and backward before the step itself, if the step is to be verified.
    pub(super) fn run_trial(
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
            let head = self.layout.decoder.segment(self.layout.decoder.head());
            let one = self.layout.decoder.params(head).slice(0..1);
            let mut value = [0.0];
            dev.read(one, &mut value)?;
            dev.write(one, &|_| value[0] + 1.0)?;
        }
        Trial::read(dev, trainer, step).map(Some)
    }

    /// Whether the step gave the same bits as its trial. Rank 0 answers for all ranks and reports
    /// the differences; any other rank answers for itself.
    pub(super) fn verify(
        &self,
        dev: &Device,
        trainer: &Trainer,
        trial: &Trial,
        listener: Listener<'_>,
    ) -> Result<bool, Error> {
        let rank = dev.rank();
        let found = self.difference(trial, &Trial::read(dev, trainer, trial.step)?, trainer);
        // An empty text means that both runs agree: a place is never empty.
        let bytes = found.as_deref().map_or(&[][..], str::as_bytes);
        let differences = || self.differences.lock().unwrap_or_else(|e| e.into_inner());
        differences().extend(found.clone().map(|place| Difference { rank: rank.index(), place }));
        let remote = self.world.gather_remote(rank, "verified", bytes)?;
        if rank.index() != 0 {
            return Ok(found.is_none());
        }
        let mut places = std::mem::take(&mut *differences());
        let remote = remote.into_iter().filter(|(_, place)| !place.is_empty());
        let text = |place: Vec<u8>| String::from_utf8_lossy(&place).into();
        places.extend(remote.map(|(rank, place)| Difference { rank, place: text(place) }));
        places.sort_unstable();
        let same = places.is_empty();
        if !same {
            listener.tell(Message::Differs { step: trial.step, places });
        }
        Ok(same)
    }

    /// Place where two runs of a step differ on this rank: the tensors of the last differing chunk
    /// of the gradient, which the backward pass computes first, or else the loss.
    fn difference(&self, first: &Trial, second: &Trial, trainer: &Trainer) -> Option<String> {
        let differ = |(a, b): (&f64, &f64)| a.to_bits() != b.to_bits();
        let chunk = first.squares.iter().zip(&second.squares).rposition(differ);
        let Some(chunk) = chunk else {
            let mut losses = first.losses.iter().zip(&second.losses);
            return losses.any(differ).then(|| "the loss".into());
        };
        let (segment, range) = trainer.optimizer.chunk(chunk);
        let params = &self.layout.decoder.segments()[segment].params;
        let within =
            params.iter().filter(|p| p.range.start < range.end && range.start < p.range.end);
        let names: Vec<String> = within.map(|param| format!("`{}`", param.name)).collect();
        let names = if names.is_empty() { "padding".into() } else { names.join(" or ") };
        Some(format!("the gradient of {names}"))
    }
}
