//! The steps of a run of epochs, and a fine-tune that is over after a few of them.

use super::Config;
use super::fine_tune::default_samples;
use topology::counted;

/// Number of steps from which on pretrained weights learn something at the usual rates.
const ENOUGH: u64 = 10;

impl Config {
    /// Number of steps of a run of `epochs` epochs, rounded up. `samples` is the number of samples of an
    /// epoch.
    pub fn steps_of(&self, epochs: f32, samples: usize) -> u64 {
        (f64::from(epochs) * samples as f64 / self.batch.global as f64).ceil().max(1.0) as u64
    }

    /// Warning about a run of `train.epochs` that has few steps, because a step takes more samples than by
    /// default. `samples` is the number of samples of an epoch, `steps` that of the steps of the run.
    /// None: the run starts from random weights, or it has enough steps, or `batch.global` is not the
    /// cause.
    pub fn few_steps(&self, samples: usize, steps: u64) -> Option<String> {
        let global = self.batch.global;
        let usual = default_samples(self.batch.micro * self.parallel.data);
        (self.model.pretrained().is_some() && steps < ENOUGH && global > usual).then(|| {
            format!(
                "the run has only {}: a step takes {}, and an epoch has {samples}. So few steps hardly change pretrained weights: \
                 lower batch.global (without the key it is {usual}), or raise train.epochs.",
                counted(steps as usize, "step"),
                counted(global, "sample"),
            )
        })
    }
}
