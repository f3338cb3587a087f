//! Loads of experts: counts of their tokens, and the balance loss.

use crate::shape::{Balance, DecoderShape, MicrobatchContext};
use device::{Arena, Device, Dtype, Lane::Compute, Op, Plan, Tensor};

/// Counts of the tokens that chose each expert, and the balance loss.
#[derive(Clone, Debug)]
pub(crate) struct ExpertLoads {
    /// (1, layers with experts x E + 1) F64: the counts of the running step, and at last the sum of
    /// the balance losses of its micro-batches.
    pub(crate) step: Tensor,
    /// E: number of experts of a layer.
    experts: usize,
    /// By slot: tensors of a micro-batch. Empty without a balance loss.
    balance: Vec<BalanceTensors>,
}

/// Tensors of the balance loss: a row for each layer with experts, or one row if the loss joins the
/// layers.
#[derive(Clone, Copy, Debug)]
struct BalanceTensors {
    sums: Tensor,  // (2 rows, E) F64: counts, then sums of the probabilities
    grads: Tensor, // (rows, E) F32: gradients with respect to the probabilities
}

/// A layer's rows of [`ExpertLoads`] for the micro-batches of a slot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LayerLoads {
    /// (1, E) F64: counts of the step.
    pub(crate) step: Tensor,
    /// Rows of the balance loss, if there is one.
    pub(crate) balance: Option<LayerBalance>,
}

/// A layer's rows of [`BalanceTensors`], (1, E) each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LayerBalance {
    pub(crate) counts: Tensor,
    pub(crate) shares: Tensor,
    pub(crate) grads: Tensor,
}

impl ExpertLoads {
    /// Plans the counts of a model of `shape`, if it has experts.
    pub(crate) fn plan(plan: &mut Plan, shape: &DecoderShape) -> Option<Self> {
        let (experts, layers) = (shape.experts?, shape.expert_layers());
        let mut one = |name: String, dtype, rows| {
            let size = (rows, experts.count);
            plan.tensor((Arena::Device, "expert loads"), name, dtype, size)
        };
        let mut by_slot = |rows| {
            let of_slot = |slot| BalanceTensors {
                sums: one(format!("balance.{slot}.sums"), Dtype::F64, 2 * rows),
                grads: one(format!("balance.{slot}.gradients"), Dtype::F32, rows),
            };
            (0..shape.checkpoint_slots).map(of_slot).collect()
        };
        let balance = match experts.balance {
            None => Vec::new(),
            Some(Balance::HuggingFace(_)) => by_slot(1),
            Some(Balance::Megatron(_)) => by_slot(layers),
        };
        let size = (1, layers * experts.count + 1);
        let step = plan.tensor((Arena::Device, "expert loads"), "expert_load", Dtype::F64, size);
        Some(Self { step, experts: experts.count, balance })
    }

    /// Rows of layer number `index` of the layers with experts, for a micro-batch in slot `slot`.
    pub(crate) fn of_layer(&self, slot: usize, index: usize) -> LayerLoads {
        LayerLoads {
            step: self.step.slice(index * self.experts..(index + 1) * self.experts),
            balance: self.balance.get(slot).map(|balance| balance.of_layer(index)),
        }
    }

    /// Before the forward pass of a micro-batch: its sums are zero.
    pub(crate) fn begin(&self, dev: &Device, slot: usize) {
        if let Some(BalanceTensors { sums, .. }) = self.balance.get(slot) {
            dev.submit(Compute, Op::Zero { x: *sums });
        }
    }

    /// After the forward pass of a micro-batch: computes the balance loss, and its gradients.
    pub(crate) fn finish(&self, dev: &Device, shape: &DecoderShape, pass: &MicrobatchContext) {
        let Some(tensors) = self.balance.get(pass.slot) else { return };
        let experts = shape.experts.zip(shape.experts.and_then(|experts| experts.balance));
        let (experts, balance) =
            experts.unwrap_or_else(|| unreachable!("tensors of a balance loss that is off"));
        let (end, per_token) = (self.step.len(), experts.per_token);
        let (scale, factor) =
            (experts.balance_scale(balance), balance.factor() * pass.counted_share);
        let (counts, shares) = tensors.counts_and_shares();
        let (value, grads) = (self.step.slice(end - 1..end), tensors.grads);
        let op = Op::BalanceLoss { counts, shares, value, grads, per_token, scale, factor };
        dev.submit(Compute, op);
    }
}

impl BalanceTensors {
    /// (rows, E) each.
    fn counts_and_shares(&self) -> (Tensor, Tensor) {
        let rows = self.grads.shape().0;
        (self.sums.rows(0..rows), self.sums.rows(rows..2 * rows))
    }

    /// The row of layer number `index` of the layers with experts.
    fn of_layer(&self, index: usize) -> LayerBalance {
        // All layers share the only row of a loss that joins them.
        let row = index % self.grads.shape().0;
        let one = |t: Tensor| t.rows(row..row + 1);
        let (counts, shares) = self.counts_and_shares();
        LayerBalance { counts: one(counts), shares: one(shares), grads: one(self.grads) }
    }
}
