//! Activations of blocks on the host: the copies down after a branch's forward pass, and up before
//! the block's backward pass.
//!
//! The blocks of a branch use the sets of a ring on the device in turn. Compute waits before it
//! writes a set whose copy down still reads it. In the backward pass a set goes up as soon as the
//! block that used it before has run. The copies have lanes of their own. A copy waits for the ops of
//! Compute that used its set, and for earlier copies of the set, so that none stands behind a copy
//! that waits for the host's arithmetic.

use crate::activation_checkpoints::slot_prefix;
use crate::activation_tiers::Tier;
use crate::block_activations::{BlockActivations, BranchKind};
use crate::shape::{DecoderShape, MicrobatchContext};
use device::Lane::{ActivationsDown, ActivationsUp, Compute};
use device::{Arena, Cargo, Device, Event, Op, Plan, Pool, Tensor};
use std::ops::Range;

/// Pool of activations on the host.
const STAGING: Pool = Pool::staging("activation staging").carrying(Cargo::Activation);

/// Handles of the activations of one branch of all blocks on the host.
#[derive(Clone, Debug)]
pub(crate) struct HostActivations {
    /// For each block, its number among the blocks on the host.
    indices: Vec<Option<usize>>,
    /// Number of blocks on the host.
    blocks: usize,
    /// Number of micro-batches with activations at the same time.
    slots: usize,
    /// By block on the host, then by slot.
    sets: Vec<MovedActivations>,
}

/// Activations of one branch of one block and micro-batch.
#[derive(Clone, Debug)]
struct MovedActivations {
    /// The set of the ring that holds them on the device.
    ring_set: usize,
    /// The tensors on the device.
    device: Vec<Tensor>,
    /// The tensors on the host. Empty if the activations stay in the ring: no other block uses the
    /// set between the forward and the backward pass.
    host: Vec<Tensor>,
}

/// State of the copies of one branch, in the order of submission.
#[derive(Clone, Debug)]
struct CopyState {
    /// For each set of the ring, the activations that it holds or that are copied into it. `None`:
    /// no backward pass needs the contents.
    holders: Vec<Option<usize>>,
    /// For each set of the ring, the event after which its contents are complete.
    ready: Vec<Event>,
    /// For each set of the ring, the event after which Compute has used it.
    used: Vec<Event>,
    /// For each set of the ring, the event after which the copies down have read it: all that it
    /// held before is then complete on the host.
    stored: Vec<Event>,
    /// Slots of the backward pass.
    slots: Range<usize>,
    /// Number of activations of this backward pass that are on the device or are copied to it.
    fetched: usize,
}

/// State of the copies of activations between device and host on one rank.
#[derive(Clone, Debug)]
pub struct ActivationCopies([CopyState; 2]);

impl HostActivations {
    /// Plans the activations of both branches on the host, in the order of [`BranchKind::ALL`].
    /// `saved` has the activations on the device by block and slot.
    pub(crate) fn plan(
        plan: &mut Plan,
        shape: &DecoderShape,
        saved: &[&[BlockActivations]],
    ) -> [Self; 2] {
        BranchKind::ALL.map(|branch| Self::of_branch(plan, shape, saved, branch))
    }

    fn of_branch(
        plan: &mut Plan,
        shape: &DecoderShape,
        saved: &[&[BlockActivations]],
        branch: BranchKind,
    ) -> Self {
        let (on_host, slots) = (shape.blocks_in(branch, Tier::Host), shape.checkpoint_slots);
        let blocks = on_host.len();
        let indices = (0..shape.layers).map(|layer| on_host.binary_search(&layer).ok()).collect();
        let mut sets = Vec::with_capacity(blocks * slots);
        for (index, layer) in on_host.into_iter().enumerate() {
            for (slot, on_device) in saved[layer][..slots].iter().enumerate() {
                let device = on_device.moved(branch);
                // The last uses of a ring in a forward pass are the first in the backward pass, if
                // one micro-batch at a time goes through the blocks.
                let stays = slots == 1 && (index..blocks).len() <= shape.ring_sets(branch);
                let prefix = slot_prefix(slot);
                let mut place = |t: &Tensor| {
                    // The name is that of a set in the ring: `activations.1.qkv`.
                    let name = plan.name(*t);
                    let Some(what) = name.splitn(3, '.').nth(2) else {
                        unreachable!("{name} is no activation of a set of a ring");
                    };
                    let name = format!("{prefix}block.{layer}.{what}_host");
                    plan.tensor((Arena::Pinned, STAGING), name, t.dtype(), t.shape())
                };
                let moved = if stays { &[][..] } else { &device[..] };
                let host = moved.iter().map(&mut place).collect();
                let ring_set = shape.ring_set(branch, index, slot);
                sets.push(MovedActivations { ring_set, device, host });
            }
        }
        Self { indices, blocks, slots, sets }
    }

    fn initial_state(&self) -> CopyState {
        let ring = self.sets.iter().map(|set| set.ring_set + 1).max().unwrap_or(0);
        CopyState {
            holders: vec![None; ring],
            ready: vec![Event::default(); ring],
            used: vec![Event::default(); ring],
            stored: vec![Event::default(); ring],
            slots: 0..0,
            fetched: 0,
        }
    }

    /// Index in `sets` of block `layer`, if its branch is on the host.
    fn set_of(&self, layer: usize, slot: usize) -> Option<usize> {
        self.indices[layer].map(|index| index * self.slots + slot)
    }

    /// Makes Compute wait until it may overwrite the block's set in the ring.
    fn begin_forward(&self, dev: &Device, state: &mut CopyState, layer: usize, slot: usize) {
        let Some(set) = self.set_of(layer, slot) else { return };
        let ring_set = self.sets[set].ring_set;
        dev.wait(Compute, state.stored[ring_set]);
        state.holders[ring_set] = None;
    }

    /// Starts the copy of the block's activations to the host.
    fn end_forward(&self, dev: &Device, state: &mut CopyState, layer: usize, slot: usize) {
        let Some(set) = self.set_of(layer, slot) else { return };
        let MovedActivations { ring_set, device, host } = &self.sets[set];
        (state.holders[*ring_set], state.used[*ring_set]) = (Some(set), dev.record(Compute));
        if host.is_empty() {
            return;
        }
        dev.wait(ActivationsDown, state.used[*ring_set]);
        for (&src, &dst) in device.iter().zip(host) {
            dev.submit(ActivationsDown, Op::Copy { src, dst });
        }
        state.stored[*ring_set] = dev.record(ActivationsDown);
    }

    /// Begins the backward pass of the micro-batches in `slots`, and starts the first copies up.
    fn begin_backward(&self, dev: &Device, state: &mut CopyState, slots: Range<usize>) {
        assert!(!slots.is_empty(), "a backward pass has micro-batches");
        if self.slots > 1 {
            // All activations are on the host, and the ring holds those that are read late.
            state.holders.fill(None);
        }
        (state.slots, state.fetched) = (slots, 0);
        self.fetch(dev, state);
    }

    /// Index in `sets` of the activations that the backward pass reads as number `read`.
    fn set_of_read(&self, slots: &Range<usize>, read: usize) -> Option<usize> {
        let index = self.blocks.checked_sub(1 + read / slots.len())?;
        Some(index * self.slots + slots.start + read % slots.len())
    }

    /// Starts the copies up of the next activations, up to one whose set in the ring is in use.
    fn fetch(&self, dev: &Device, state: &mut CopyState) {
        while let Some(set) = self.set_of_read(&state.slots, state.fetched) {
            let MovedActivations { ring_set, device, host } = &self.sets[set];
            let ring_set = *ring_set;
            if state.holders[ring_set] != Some(set) {
                if state.holders[ring_set].is_some() {
                    return;
                }
                assert!(!host.is_empty(), "activations that stay in the ring are read first");
                dev.wait(ActivationsUp, state.used[ring_set]);
                dev.wait(ActivationsUp, state.stored[ring_set]);
                for (&dst, &src) in device.iter().zip(host) {
                    dev.submit(ActivationsUp, Op::Copy { src, dst });
                }
                state.ready[ring_set] = dev.record(ActivationsUp);
                state.holders[ring_set] = Some(set);
            }
            state.fetched += 1;
        }
    }

    /// Makes Compute wait for the block's activations.
    fn await_backward(&self, dev: &Device, state: &CopyState, layer: usize, slot: usize) {
        let Some(set) = self.set_of(layer, slot) else { return };
        let ring_set = self.sets[set].ring_set;
        assert!(
            state.holders[ring_set] == Some(set),
            "a backward pass reads in the order of reads"
        );
        dev.wait(Compute, state.ready[ring_set]);
    }

    /// Frees the block's set in the ring, and starts the next copies up.
    fn end_backward(&self, dev: &Device, state: &mut CopyState, layer: usize, slot: usize) {
        let Some(set) = self.set_of(layer, slot) else { return };
        let ring_set = self.sets[set].ring_set;
        (state.holders[ring_set], state.used[ring_set]) = (None, dev.record(Compute));
        self.fetch(dev, state);
    }
}

impl ActivationCopies {
    /// The state before the first pass.
    pub(crate) fn new(branches: &[HostActivations; 2]) -> Self {
        Self(branches.each_ref().map(HostActivations::initial_state))
    }

    /// Before block `layer` runs forward.
    pub(crate) fn begin_forward(
        &mut self,
        dev: &Device,
        branches: &[HostActivations; 2],
        pass: &MicrobatchContext,
        layer: usize,
    ) {
        for (branch, state) in branches.iter().zip(&mut self.0) {
            branch.begin_forward(dev, state, layer, pass.slot);
        }
    }

    /// After block `layer` has run forward. An evaluation keeps nothing.
    pub(crate) fn end_forward(
        &mut self,
        dev: &Device,
        branches: &[HostActivations; 2],
        pass: &MicrobatchContext,
        layer: usize,
    ) {
        if !pass.training {
            return;
        }
        for (branch, state) in branches.iter().zip(&mut self.0) {
            branch.end_forward(dev, state, layer, pass.slot);
        }
    }

    /// Before the backward pass of the micro-batches in `slots`. A block reads its MLP branch first,
    /// so that its copy is first.
    pub(crate) fn begin_backward(
        &mut self,
        dev: &Device,
        branches: &[HostActivations; 2],
        slots: &Range<usize>,
    ) {
        for (branch, state) in branches.iter().zip(&mut self.0).rev() {
            branch.begin_backward(dev, state, slots.clone());
        }
    }

    /// Before block `layer` runs backward.
    pub(crate) fn await_backward(
        &self,
        dev: &Device,
        branches: &[HostActivations; 2],
        pass: &MicrobatchContext,
        layer: usize,
    ) {
        for (branch, state) in branches.iter().zip(&self.0) {
            branch.await_backward(dev, state, layer, pass.slot);
        }
    }

    /// After block `layer` has run backward.
    pub(crate) fn end_backward(
        &mut self,
        dev: &Device,
        branches: &[HostActivations; 2],
        pass: &MicrobatchContext,
        layer: usize,
    ) {
        for (branch, state) in branches.iter().zip(&mut self.0).rev() {
            branch.end_backward(dev, state, layer, pass.slot);
        }
    }
}
