//! What a rank has before the first step: fresh states, or those of a checkpoint.

use crate::config::Precision;
use crate::hugging_face::{FolderError, Pretrained};
use crate::run::meet::meet;
use crate::run::{Ranks, Unread};
use crate::step::Trainer;
use crate::train::init::{Initial, Stored};
use device::{Device, Error};
use offload::StatePosition;

impl Ranks<'_> {
    /// The states before the first step, or those of a checkpoint. Returns the steps that are done; none where the run was
    /// told to stop before all ranks had their states.
    pub(crate) fn start(&self, dev: &Device, trainer: &mut Trainer) -> Result<Option<u64>, Error> {
        self.built.gpt.write_constants(dev)?;
        let whole = self.load(dev, trainer)?;
        if !whole {
            self.stop.abandon();
        }
        meet(dev, self.built.meeting)?;
        if self.stop.is_abandoned() || self.is_told_elsewhere(dev, "abandon", !whole)? {
            return Ok(None);
        }
        if let Some(from) = &self.options.resume {
            if from.has_late_update() {
                trainer.start_update(dev, from.step());
            }
            trainer.loader.skip_to(from.step());
        }
        Ok(Some(self.steps_before()))
    }

    /// Whether a rank of another process, where there are several, says so; the same on all.
    pub(crate) fn is_told_elsewhere(
        &self,
        dev: &Device,
        what: &'static str,
        here: bool,
    ) -> Result<bool, Error> {
        if !self.world.has_remote_ranks() {
            return Ok(false);
        }
        let told = self.world.agree(dev.rank(), what, u64::from(here))?;
        Ok(told.contains(&1))
    }

    /// The step of what the run goes on from.
    pub(crate) fn steps_before(&self) -> u64 {
        self.options.resume.as_ref().map_or(0, |from| from.step())
    }

    /// This rank's states. False: the run was told to stop, and they are not whole.
    fn load(&self, dev: &Device, trainer: &mut Trainer) -> Result<bool, Error> {
        let told = || self.stop.is_told();
        if let (Some(from), None) = (&self.options.pretrained, &self.options.resume) {
            return self.load_pretrained(dev, trainer, from, &told);
        }
        let Some(from) = &self.options.resume else {
            let given = self.options.initial.as_deref();
            let initial = Initial::new(self.config, &self.built.gpt, dev.rank().tp, given);
            let fill = |segment, at, values: &mut [f32]| initial.fill(segment, at, values);
            return trainer.optimizer.init(dev, &fill, &told);
        };
        let scaled = self.config.precision == Precision::Fp16;
        let words = from.control(&trainer.optimizer.initial_control(), scaled);
        let stored = Stored::new(from, &self.built.gpt, dev.rank());
        let rank = dev.rank().index();
        let fill = |at: StatePosition, values: &mut [f32]| {
            let filled = stored.fill(at, values);
            filled.map_err(|error| {
                let system = error.is_of_the_system();
                let unread = if system { Unread::System } else { Unread::Changed };
                self.unread.lock().unwrap_or_else(|e| e.into_inner()).get_or_insert(unread);
                Error::Task {
                    rank,
                    op: "restore",
                    site: std::panic::Location::caller(),
                    problem: error.to_string(),
                }
            })
        };
        trainer.optimizer.restore(dev, &words, from.has_late_update(), &fill, &told)
    }

    /// Parameters as a folder of transformers has them, and moments of zero.
    fn load_pretrained(
        &self,
        dev: &Device,
        trainer: &mut Trainer,
        from: &Pretrained,
        told: &offload::StopCheck<'_>,
    ) -> Result<bool, Error> {
        let rank = dev.rank();
        let failed = |error: FolderError| Error::Task {
            rank: rank.index(),
            op: "load",
            site: std::panic::Location::caller(),
            problem: error.to_string(),
        };
        let source = from.of_rank(&self.built.gpt, rank);
        let words = trainer.optimizer.initial_control();
        let fill = |StatePosition { segment, state, first }: StatePosition, values: &mut [f32]| {
            match state {
                0 => source.fill(segment, first, values).map_err(failed),
                _ => {
                    values.fill(0.0);
                    Ok(())
                }
            }
        };
        trainer.optimizer.restore(dev, &words, false, &fill, told)
    }
}
