//! Memory of the batches of a rank.

use device::{Arena, Dtype, Plan, Tensor};

/// Handles of the batches, the same on every rank: (3, B T) I32 each: tokens, targets, order; and a fourth row where samples hold several
/// documents: their starts. Those for training take turns,
/// the last is an evaluation's.
#[derive(Clone, Debug)]
pub struct BatchLayout {
    /// In pinned memory.
    pub host: Vec<Tensor>,
    /// On the device.
    pub device: Vec<Tensor>,
}

impl BatchLayout {
    /// With room for `at_once` training batches and the next one.
    pub(crate) fn plan(plan: &mut Plan, tokens: usize, packs: bool, at_once: usize) -> Self {
        let rows = if packs { 4 } else { 3 };
        let mut slots = |arena, name: &str| {
            let at = (arena, "batches and losses");
            let slot = |i| plan.tensor(at, format!("{name}.{i}"), Dtype::I32, (rows, tokens));
            (0..at_once + 2).map(slot).collect()
        };
        Self { host: slots(Arena::Pinned, "batch_host"), device: slots(Arena::Device, "batch") }
    }
}
