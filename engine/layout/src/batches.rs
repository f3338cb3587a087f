//! Memory for the batches of a rank.

use device::{Arena, Dtype, Plan, Tensor};

/// Tensor handles of the batches, the same on every rank. Each tensor is I32 of shape (3, B T):
/// tokens, targets, order. If samples hold several documents, a fourth row has the starts of the
/// documents. Training batches use the slots in turn; the last slot is for evaluations.
#[derive(Clone, Debug)]
pub struct BatchLayout {
    /// Slots in pinned host memory.
    pub host: Vec<Tensor>,
    /// Slots on the device.
    pub device: Vec<Tensor>,
}

impl BatchLayout {
    /// Lays out slots for `at_once` training batches, the next training batch and an evaluation
    /// batch.
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
