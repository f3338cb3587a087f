//! Activations of a block, and their memory in each tier.

use crate::activation_checkpoints::slot_prefix;
use crate::activation_tiers::{ActivationTiers, Tier};
use crate::branch::Scratch;
use crate::delta_shape::DeltaShape;
use crate::mixer::MixerActivations;
use crate::mlp_layer::MlpLayerActivations;
use crate::norm::{InputActivations, OutputActivations};
use crate::shape::{DecoderShape, ExpertsShape, Recompute};
use device::{Arena, Plan, Tensor};

/// Largest number of sets of a branch's activations in a ring: Compute uses one set while a copy
/// reads or writes the other.
const RING: usize = 2;

/// Pool of the rings on the device.
const RING_POOL: &str = "activation ring";

/// A branch of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum BranchKind {
    Attention,
    Mlp,
}

impl BranchKind {
    /// Both branches, in the order of the forward pass.
    pub(crate) const ALL: [Self; 2] = [Self::Attention, Self::Mlp];
}

impl DecoderShape {
    /// Whether blocks compute the outputs of norms and of the MLP's activation again, if they keep
    /// other activations. Blocks in tiers do so: copies move fewer bytes.
    pub(crate) fn recomputes_outputs(&self) -> bool {
        match self.recompute {
            Recompute::None => false,
            Recompute::Selective => true,
            Recompute::Block => self.tiers != ActivationTiers::NONE,
        }
    }

    /// The place of the activations of a branch of block `layer`.
    pub(crate) const fn tier(&self, branch: BranchKind, layer: usize) -> Tier {
        let counts = match branch {
            BranchKind::Attention => self.tiers.attention,
            BranchKind::Mlp => self.tiers.mlp,
        };
        match self.recompute {
            Recompute::None | Recompute::Selective => Tier::Device,
            Recompute::Block => counts.tier(layer, self.layers),
        }
    }

    /// Numbers of the blocks of a branch that are in `tier`, in ascending order.
    pub(crate) fn blocks_in(&self, branch: BranchKind, tier: Tier) -> Vec<usize> {
        (0..self.layers).filter(|layer| self.tier(branch, *layer) == tier).collect()
    }

    /// Number of sets in the ring of a branch.
    pub(crate) fn ring_sets(&self, branch: BranchKind) -> usize {
        RING.min(self.blocks_in(branch, Tier::Host).len() * self.checkpoint_slots)
    }

    /// The set of the ring for the block with the number `index` among the blocks of a branch on the
    /// host, and for the micro-batch in slot `slot`. Uses that follow each other in a backward pass
    /// of a whole group have different sets. In a forward pass of an even number of micro-batches
    /// that run backward one after the other, the last use of a block and the first use of the next
    /// block have one set, so Compute waits for the copy between them.
    pub(crate) fn ring_set(&self, branch: BranchKind, index: usize, slot: usize) -> usize {
        (index * self.backward_slots() + slot) % self.ring_sets(branch)
    }
}

/// Activations of a block, for its backward pass. Blocks share sets of them, as the tier of each
/// branch demands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockActivations {
    pub(crate) attention: AttentionBranchActivations,
    pub(crate) mlp: MlpBranchActivations,
}

/// Activations of a block's attention branch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionBranchActivations {
    pub(crate) input: InputActivations,
    pub(crate) heads: MixerActivations,
    pub(crate) output: Option<OutputActivations>,
    /// (rows, C): the residual stream after the branch.
    pub(crate) h: Tensor,
}

/// Activations of a block's MLP branch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MlpBranchActivations {
    pub(crate) input: InputActivations,
    pub(crate) inner: MlpLayerActivations,
    pub(crate) output: Option<OutputActivations>,
}

impl AttentionBranchActivations {
    /// Plans the activations of a block with the gated delta net `delta`, or with attention.
    fn plan(
        plan: &mut Plan,
        shape: &DecoderShape,
        name: &str,
        scratch: &Scratch,
        delta: Option<DeltaShape>,
    ) -> Self {
        let (at, size) = ((Arena::Device, "activations"), (shape.rows(), shape.hidden));
        let norm = format!("{name}.norm_1");
        Self {
            input: InputActivations::plan(plan, &norm, shape, scratch.recomputed),
            heads: MixerActivations::plan(plan, name, shape, scratch, delta),
            output: OutputActivations::plan(plan, &format!("{norm}_post"), shape),
            h: plan.tensor(at, format!("{name}.h"), shape.dtype, size),
        }
    }

    /// The same activations with another set for attention or the gated delta net.
    fn with_own_heads(
        self,
        plan: &mut Plan,
        shape: &DecoderShape,
        name: &str,
        scratch: &Scratch,
        delta: Option<DeltaShape>,
    ) -> Self {
        Self { heads: MixerActivations::plan(plan, name, shape, scratch, delta), ..self }
    }

    /// The tensors that a copy moves. The backward pass computes the branch's input again.
    fn moved(&self) -> Vec<Tensor> {
        let output = self.output.into_iter().flat_map(OutputActivations::tensors);
        self.heads.tensors().into_iter().chain(output).chain([self.h]).collect()
    }
}

impl MlpBranchActivations {
    /// Plans the activations of a block with `experts`, or with one MLP.
    fn plan(
        plan: &mut Plan,
        shape: &DecoderShape,
        name: &str,
        scratch: &Scratch,
        experts: Option<ExpertsShape>,
    ) -> Self {
        let norm = format!("{name}.norm_2");
        Self {
            input: InputActivations::plan(plan, &norm, shape, scratch.recomputed),
            inner: MlpLayerActivations::plan(plan, name, shape, scratch, experts),
            output: OutputActivations::plan(plan, &format!("{norm}_post"), shape),
        }
    }

    /// The same activations with another set for the MLP or the experts.
    fn with_own_inner(
        self,
        plan: &mut Plan,
        shape: &DecoderShape,
        name: &str,
        scratch: &Scratch,
        experts: Option<ExpertsShape>,
    ) -> Self {
        Self { inner: MlpLayerActivations::plan(plan, name, shape, scratch, experts), ..self }
    }

    /// The tensors that a copy moves. The backward pass computes the branch's input and the output
    /// of its activation again.
    fn moved(&self) -> Vec<Tensor> {
        let output = self.output.into_iter().flat_map(OutputActivations::tensors);
        self.inner.tensors().into_iter().chain(output).collect()
    }
}

impl BlockActivations {
    /// The first `rows` rows of every activation. The activations of the MLP or of the experts are whole.
    pub(crate) fn first(self, rows: usize, shape: &DecoderShape) -> Self {
        let Self { attention, mlp } = self;
        Self {
            attention: AttentionBranchActivations {
                input: attention.input.first(rows),
                heads: attention.heads.first(rows, shape.heads / shape.tp_size),
                output: attention.output.map(|saved| saved.first(rows)),
                h: attention.h.rows(0..rows),
            },
            mlp: MlpBranchActivations {
                input: mlp.input.first(rows),
                inner: mlp.inner,
                output: mlp.output.map(|saved| saved.first(rows)),
            },
        }
    }

    /// The tensors of a branch that a copy moves.
    pub(crate) fn moved(&self, branch: BranchKind) -> Vec<Tensor> {
        match branch {
            BranchKind::Attention => self.attention.moved(),
            BranchKind::Mlp => self.mlp.moved(),
        }
    }
}

/// Activations of the MLP branch that blocks use in turn: a set for blocks with one MLP, and a set
/// for blocks with experts. The two sets differ only in the MLP.
#[derive(Clone, Copy, Debug)]
struct SharedMlpActivations {
    dense: Option<MlpBranchActivations>,
    sparse: Option<MlpBranchActivations>,
}

impl SharedMlpActivations {
    /// Plans the sets of the blocks `layers`.
    fn plan(
        plan: &mut Plan,
        shape: &DecoderShape,
        name: &str,
        scratch: &Scratch,
        layers: &[usize],
    ) -> Self {
        let mut all = Self { dense: None, sparse: None };
        for layer in layers {
            let experts = shape.experts_of(*layer);
            if all.of(experts).is_some() {
                continue;
            }
            let set = match all.dense.or(all.sparse) {
                Some(other) => other.with_own_inner(plan, shape, name, scratch, experts),
                None => MlpBranchActivations::plan(plan, shape, name, scratch, experts),
            };
            match experts {
                Some(_) => all.sparse = Some(set),
                None => all.dense = Some(set),
            }
        }
        all
    }

    /// The set of blocks with `experts`, or with one MLP.
    const fn of(&self, experts: Option<ExpertsShape>) -> Option<MlpBranchActivations> {
        if experts.is_some() { self.sparse } else { self.dense }
    }
}

/// Activations of the attention branch that blocks use in turn: a set for blocks with attention, and
/// a set for blocks with a gated delta net. The two sets differ only in these.
#[derive(Clone, Copy, Debug)]
struct SharedAttentionActivations {
    attention: Option<AttentionBranchActivations>,
    delta: Option<AttentionBranchActivations>,
}

impl SharedAttentionActivations {
    /// Plans the sets of the blocks `layers`.
    fn plan(
        plan: &mut Plan,
        shape: &DecoderShape,
        name: &str,
        scratch: &Scratch,
        layers: &[usize],
    ) -> Self {
        let mut all = Self { attention: None, delta: None };
        for layer in layers {
            let delta = shape.delta_of(*layer);
            if all.of(delta).is_some() {
                continue;
            }
            let set = match all.attention.or(all.delta) {
                Some(other) => other.with_own_heads(plan, shape, name, scratch, delta),
                None => AttentionBranchActivations::plan(plan, shape, name, scratch, delta),
            };
            match delta {
                Some(_) => all.delta = Some(set),
                None => all.attention = Some(set),
            }
        }
        all
    }

    /// The set of blocks with the gated delta net `delta`, or with attention.
    const fn of(&self, delta: Option<DeltaShape>) -> Option<AttentionBranchActivations> {
        if delta.is_some() { self.delta } else { self.attention }
    }
}

/// Sets of activations that several blocks use.
#[derive(Clone, Debug)]
pub(crate) struct SharedActivations {
    /// The sets of all blocks that compute the attention branch again.
    attention: SharedAttentionActivations,
    /// The sets of all blocks that compute the MLP branch again.
    mlp: SharedMlpActivations,
    /// The sets of blocks whose attention branch is on the host.
    attention_ring: Vec<SharedAttentionActivations>,
    /// The sets of blocks whose MLP branch is on the host.
    mlp_ring: Vec<SharedMlpActivations>,
}

impl SharedActivations {
    pub(crate) fn plan(plan: &mut Plan, shape: &DecoderShape, scratch: &Scratch) -> Self {
        let [of_attention, of_mlp] = BranchKind::ALL;
        let recomputed = shape.blocks_in(of_attention, Tier::Recomputed);
        let attention =
            SharedAttentionActivations::plan(plan, shape, "block", scratch, &recomputed);
        let recomputed = shape.blocks_in(of_mlp, Tier::Recomputed);
        let mlp = SharedMlpActivations::plan(plan, shape, "block", scratch, &recomputed);
        let planned = plan.entries().len();
        let name = |set: usize| format!("activations.{set}");
        let on_host = shape.blocks_in(of_attention, Tier::Host);
        let attention_ring = (0..shape.ring_sets(of_attention))
            .map(|set| SharedAttentionActivations::plan(plan, shape, &name(set), scratch, &on_host))
            .collect();
        let on_host = shape.blocks_in(of_mlp, Tier::Host);
        let mlp_ring = (0..shape.ring_sets(of_mlp))
            .map(|set| SharedMlpActivations::plan(plan, shape, &name(set), scratch, &on_host))
            .collect();
        plan.assign_pool(planned, RING_POOL);
        Self { attention, mlp, attention_ring, mlp_ring }
    }

    /// The activations of block `layer`, by slot of its micro-batch. Plans those that belong to the
    /// block alone.
    pub(crate) fn of_block(
        &self,
        plan: &mut Plan,
        shape: &DecoderShape,
        layer: usize,
        scratch: &Scratch,
    ) -> Vec<BlockActivations> {
        let missing = "blocks that use a set in turn have planned it";
        let (experts, delta) = (shape.experts_of(layer), shape.delta_of(layer));
        let ring_set = |branch, slot| {
            let on_host = shape.blocks_in(branch, Tier::Host);
            shape.ring_set(branch, on_host.partition_point(|other| *other < layer), slot)
        };
        let of_slot = |slot: usize| {
            let name = format!("{}block.{layer}", slot_prefix(slot));
            let shared = match shape.tier(BranchKind::Attention, layer) {
                Tier::Device => None,
                Tier::Host => Some(&self.attention_ring[ring_set(BranchKind::Attention, slot)]),
                Tier::Recomputed => Some(&self.attention),
            };
            let attention = match shared {
                None => AttentionBranchActivations::plan(plan, shape, &name, scratch, delta),
                Some(sets) => sets.of(delta).unwrap_or_else(|| unreachable!("{missing}")),
            };
            let shared = match shape.tier(BranchKind::Mlp, layer) {
                Tier::Device => None,
                Tier::Host => Some(&self.mlp_ring[ring_set(BranchKind::Mlp, slot)]),
                Tier::Recomputed => Some(&self.mlp),
            };
            let mlp = match shared {
                None => MlpBranchActivations::plan(plan, shape, &name, scratch, experts),
                Some(sets) => sets.of(experts).unwrap_or_else(|| unreachable!("{missing}")),
            };
            BlockActivations { attention, mlp }
        };
        (0..shape.checkpoint_slots).map(of_slot).collect()
    }
}
