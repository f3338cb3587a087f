//! The states of a rank before the first step: initial, from a checkpoint, or imported weights.

use crate::run::barrier::barrier;
use crate::run::{Ranks, ReadFailure};
use crate::step::Trainer;
use crate::train::initial_states::{CheckpointStates, InitialParameters};
use checkpoint::hugging_face::{FolderError, PretrainedWeights};
use config::Precision;
use device::{Device, Error};
use offload::StatePosition;

/// Name of the op that reads the weights of a folder.
pub const LOAD: &str = "load";

impl Ranks<'_> {
    /// Loads the states before the first step. Returns the number of steps that they contain;
    /// `None` if a stop was requested before all ranks had their states.
    pub(crate) fn load_states(
        &self,
        dev: &Device,
        trainer: &mut Trainer,
    ) -> Result<Option<u64>, Error> {
        self.layout.decoder.write_constants(dev)?;
        let complete = self.load(dev, trainer)?;
        if !complete {
            self.stop.abandon();
        }
        barrier(dev, self.layout.barrier)?;
        if self.stop.is_abandoned() || self.is_set_on_any_process(dev, "abandon", !complete)? {
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

    /// Whether `local` is true on any rank, if there are several processes; otherwise false. The
    /// answer is the same on all ranks.
    pub(crate) fn is_set_on_any_process(
        &self,
        dev: &Device,
        what: &'static str,
        local: bool,
    ) -> Result<bool, Error> {
        if !self.world.has_remote_ranks() {
            return Ok(false);
        }
        let all = self.world.agree(dev.rank(), what, u64::from(local))?;
        Ok(all.contains(&1))
    }

    /// Number of steps in the checkpoint that the run resumes from.
    pub(crate) fn steps_before(&self) -> u64 {
        self.options.resume.as_ref().map_or(0, |from| from.step())
    }

    /// Loads this rank's states. False if a stop was requested and the states are incomplete.
    fn load(&self, dev: &Device, trainer: &mut Trainer) -> Result<bool, Error> {
        let stop_requested = || self.stop.is_requested();
        if let (Some(from), None) = (&self.options.pretrained, &self.options.resume) {
            return self.load_pretrained(dev, trainer, from, &stop_requested);
        }
        let Some(from) = &self.options.resume else {
            let given = self.options.initial.as_deref();
            let initial =
                InitialParameters::new(self.config, &self.layout.decoder, dev.rank(), given);
            let fill = |segment, at, values: &mut [f32]| initial.fill(segment, at, values);
            self.write_corrections(dev, |at, values: &mut [f32]| {
                fill(at.segment, at.first, values);
                Ok(())
            })?;
            return trainer.optimizer.init(dev, &fill, &stop_requested);
        };
        let scaled = self.config.precision == Precision::Fp16;
        let words = from.control(&trainer.optimizer.initial_control(), scaled);
        let stored = CheckpointStates::new(from, &self.layout.decoder, dev.rank());
        let rank = dev.rank().index();
        let base = self.options.pretrained.as_ref();
        let base = base.map(|base| base.of_rank(&self.layout.decoder, dev.rank()));
        let given = self.options.initial.as_deref();
        let initial = InitialParameters::new(self.config, &self.layout.decoder, dev.rank(), given);
        let fill = |at: StatePosition, values: &mut [f32]| {
            if self.is_frozen(at) {
                let Some(base) = &base else {
                    initial.fill(at.segment, at.first, values);
                    return Ok(());
                };
                return base.fill(at.segment, at.first, values).map_err(|e| load_failed(rank, &e));
            }
            let filled = stored.fill(at, values);
            filled.map_err(|error| {
                let system = error.is_of_the_system();
                let failure = if system { ReadFailure::System } else { ReadFailure::Changed };
                self.read_failure.lock().unwrap_or_else(|e| e.into_inner()).get_or_insert(failure);
                Error::Task {
                    rank,
                    op: "restore",
                    site: std::panic::Location::caller(),
                    problem: error.to_string(),
                }
            })
        };
        self.write_corrections(dev, fill)?;
        trainer.optimizer.restore(dev, &words, from.has_late_update(), &fill, &stop_requested)
    }

    /// Loads the parameters from a folder of transformers; the moments are zero.
    fn load_pretrained(
        &self,
        dev: &Device,
        trainer: &mut Trainer,
        from: &PretrainedWeights,
        stop_requested: &offload::StopCheck<'_>,
    ) -> Result<bool, Error> {
        let (rank, decoder) = (dev.rank(), &self.layout.decoder);
        let source = from.of_rank(decoder, rank);
        let given = self.options.initial.as_deref();
        let factors = decoder.shape().adapters();
        let factors = factors.map(|_| InitialParameters::new(self.config, decoder, rank, given));
        let words = trainer.optimizer.initial_control();
        let fill = |at: StatePosition, values: &mut [f32]| {
            let StatePosition { segment, state, first } = at;
            match (state, &factors) {
                (0, Some(factors)) if !self.is_frozen(at) => factors.fill(segment, first, values),
                (0, _) => {
                    let filled = source.fill(segment, first, values);
                    return filled.map_err(|error| load_failed(rank.index(), &error));
                }
                _ => values.fill(0.0),
            }
            Ok(())
        };
        self.write_corrections(dev, fill)?;
        trainer.optimizer.restore(dev, &words, false, &fill, stop_requested)
    }

    /// Writes the corrections of routers to the device, from the parameters that `fill` reads. Every
    /// rank needs all of them, also those whose states another rank owns.
    fn write_corrections(
        &self,
        dev: &Device,
        fill: impl Fn(StatePosition, &mut [f32]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.layout.decoder.write_router_corrections(dev, |segment, first, values: &mut [f32]| {
            fill(StatePosition { segment, state: 0, first }, values)
        })
    }

    /// Whether a position is that of a frozen parameter.
    fn is_frozen(&self, at: StatePosition) -> bool {
        at.state == 0 && at.first >= self.layout.decoder.segments()[at.segment].padded
    }
}

/// The error of a rank that cannot read the weights of a folder.
fn load_failed(rank: usize, error: &FolderError) -> Error {
    let site = std::panic::Location::caller();
    Error::Task { rank, op: LOAD, site, problem: error.to_string() }
}
