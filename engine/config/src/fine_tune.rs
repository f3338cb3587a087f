//! Defaults of a run that starts from pretrained weights.
//! `docs/fine-tune.md` has the sources of these numbers.

use super::reading::{ConfigReader, KeyDefault};
use super::{Adapter, Family, ModelConfig};

/// Number of parameters from which on a model gets the smaller learning rate.
const LARGE: f64 = 1e9;
/// Number of samples of an optimizer step.
const SAMPLES: usize = 8;
/// Share of the steps of the schedule that is warm-up, in percent.
const WARM_UP: u64 = 3;

/// Learning rate of adapters.
const RATE_OF_ADAPTERS: f32 = 2e-4;

/// Defaults of a fine-tune.
#[derive(Clone, Copy, Debug)]
pub(super) struct FineTune {
    /// Peak learning rate.
    pub(super) lr: f32,
    /// Decay of the second moment.
    pub(super) beta2: f32,
    pub(super) weight_decay: f32,
}

impl FineTune {
    /// Defaults for a run with this model; `None` if the run starts from random weights. A stored
    /// config has every key, and a key that it lacks has the default of its version.
    pub(super) fn of(
        reader: &ConfigReader,
        model: &ModelConfig,
        adapter: &Adapter,
    ) -> Option<Self> {
        let defaults = Self { lr: usual_rate(model, adapter), beta2: 0.999, weight_decay: 0.0 };
        (!reader.stored && model.pretrained().is_some()).then_some(defaults)
    }

    /// Number of warm-up steps of a schedule of `steps` steps.
    pub(super) const fn warmup_steps(self, steps: u64) -> u64 {
        // Both factors are at most 10^12.
        (steps * WARM_UP).div_ceil(100)
    }
}

impl<T> KeyDefault<T> {
    /// Replaces the default by that of pretrained weights, if the run starts from them.
    pub(super) fn or_tuned(self, tuned: Option<T>) -> Self {
        tuned.map_or(self, |value| {
            let from = &["model.from", "model.weights"];
            Self::Derived(value, "default of pretrained weights", from)
        })
    }
}

/// Number of samples of a step of pretrained weights: the smallest multiple of the samples of a pass that
/// is at least [`SAMPLES`].
pub(super) const fn default_samples(pass: usize) -> usize {
    if pass == 0 { SAMPLES } else { SAMPLES.next_multiple_of(pass) }
}

/// Default of the learning rate. Recipes for small models have larger rates.
pub(super) fn usual_rate(model: &ModelConfig, adapter: &Adapter) -> f32 {
    if *adapter != Adapter::None {
        return RATE_OF_ADAPTERS;
    }
    if parameters(model) < LARGE { 5e-5 } else { 2e-5 }
}

/// Number of parameters of the matrices of a model.
fn parameters(model: &ModelConfig) -> f64 {
    let [layers, hidden, vocab, ffn] =
        [model.layers, model.hidden, model.vocab, model.ffn_hidden].map(|n| n as f64);
    // Mean width of the MLPs of a layer: its own, or those of its experts.
    let ffn = model.experts.as_ref().map_or(ffn, |experts| {
        let sparse = (0..model.layers).filter(|layer| experts.are_in(*layer)).count() as f64;
        let all = (experts.count * experts.ffn_hidden) as f64;
        (sparse * all + (layers - sparse) * ffn) / layers
    });
    let heads = (model.heads + model.kv_heads) as f64 * model.head_dim as f64;
    let tables = if model.tied { 1.0 } else { 2.0 };
    let matrices = if model.family == Family::Llama { 3.0 } else { 2.0 };
    hidden * (tables * vocab + layers * (2.0 * heads + matrices * ffn))
}
