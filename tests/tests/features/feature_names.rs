//! Names of features that several tables have.

/// Name of the feature of adapters.
pub(super) const ADAPTERS: &str = "adapters";
/// Name of the feature of frozen tensors.
pub(super) const FROZEN: &str = "frozen tensors";
/// Name of the feature of gated delta nets.
pub(super) const DELTA: &str = "gated delta nets";
/// Experts and a shared expert whose output has a gate, beside gated delta nets: no class of transformers
/// that onebox has gates a shared expert elsewhere.
pub(super) const GATED: &str = "experts beside delta nets";
/// Experts scored by sigmoid, and a shared one.
pub(super) const SIGMOID: &str = "experts by sigmoid";
/// Experts with biases and clamped gates, and sinks of attention: only together are they a class of
/// transformers.
pub(super) const SINKS: &str = "biased experts and sinks";
