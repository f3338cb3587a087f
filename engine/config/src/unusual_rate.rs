//! A learning rate that is unusual for pretrained weights. `docs/fine-tune.md` has the sources of
//! these numbers.

use super::fine_tune::usual_rate;
use super::reading::float_text;
use super::{Adapter, Config, OptimizerKind};

/// Largest learning rate that is usual for a full fine-tune.
const HIGHEST_RATE: f32 = 1e-4;
/// Largest learning rate that is usual for adapters, whose first factor begins at zero.
const HIGHEST_RATE_OF_ADAPTERS: f32 = 2e-3;
/// Learning rate below which 16-bit copies of the weights hardly change.
const LOWEST_RATE: f32 = 1e-7;

impl Config {
    /// Warning about a learning rate far outside of the usual range of a full fine-tune. None: the
    /// run starts from random weights, or the learning rate is usual.
    pub fn unusual_rate(&self) -> Option<String> {
        let warning =
            self.model.pretrained().is_some().then(|| self.unusual_rate_of_import()).flatten()?;
        let usual = usual_rate(&self.model, &self.adapter);
        Some(format!("{warning} Without the key it is {}.", float_text(&usual)))
    }

    /// The same for imported weights. The config does not name their folder, so its defaults belong to
    /// random weights.
    pub fn unusual_rate_of_import(&self) -> Option<String> {
        let lr = self.optimizer.lr;
        if self.optimizer.kind != OptimizerKind::AdamW {
            return None;
        }
        let (highest, usual) = match self.adapter {
            Adapter::None => (
                HIGHEST_RATE,
                "full fine-tunes usually take 1e-6 to 1e-4, and models of less than a billion parameters at times up to 1e-3",
            ),
            Adapter::Lora { .. } => {
                (HIGHEST_RATE_OF_ADAPTERS, "adapters usually take 5e-5 to 5e-4")
            }
        };
        let effect = if lr > highest {
            "A rate this high can destroy what the weights have learned"
        } else if lr < LOWEST_RATE {
            "At a rate this low the weights hardly change"
        } else {
            return None;
        };
        Some(format!(
            "optimizer.lr is {} for pretrained weights. {effect}: {usual}.",
            float_text(&lr)
        ))
    }
}
