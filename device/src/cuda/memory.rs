//! The memory of a rank on a GPU, and what the other ranks of the process reach of it.

use super::driver::{Context, DeviceMemory, Event, Failure, Registration};
use super::nccl;
use crate::cpu::memory::Memory;
use crate::{Arena, Group, LANES, Plan, Tensor};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, OnceLock};

/// Bytes of host memory that are pinned at once: drivers refuse some sizes, and a piece at a time shows how far
/// pinning got.
pub(super) const PIECE: u64 = 1 << 30;

/// Where things lie behind the plan's bytes, in one allocation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrangement {
    pub(super) scratch: u64,
    pub(super) workspace: u64,
    pub(super) bytes: u64,
}

impl Arrangement {
    pub(super) fn new(plan: &Plan, scratch: u64, workspace: u64) -> Self {
        let start = plan.bytes(Arena::Device).next_multiple_of(256);
        let behind = (start + scratch).next_multiple_of(256);
        Self { scratch: start, workspace: behind, bytes: behind + workspace }
    }
}

/// Steps of a collective between which ranks meet.
pub(super) const PHASES: usize = 3;

/// One rank's memory and events. The world keeps it to the end of the run, so that no peer reads freed memory.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(super) context: Arc<Context>,
    pub(super) device: DeviceMemory,
    /// By lane, group and phase of an in-process collective.
    events: Vec<Event>,
    /// Collectives that this rank's streams have started, by group: TP, DP.
    pub(super) started: [AtomicU64; 2],
    /// One of them has not ended: what this rank is late for, others keep from it.
    pub(super) held_up: AtomicBool,
    // Declared before the memory, which it must not outlive.
    _pinned: Registration,
    host: Arc<Memory>,
}

impl Peer {
    /// Zeroed device memory, and pinned host memory.
    pub(super) fn new(
        context: &Arc<Context>,
        device: DeviceMemory,
        host: Arc<Memory>,
    ) -> Result<Self, Failure> {
        let (start, bytes) = host.pinned_range();
        let pinned = Registration::new(context, start as u64, bytes as u64, PIECE)?;
        let events = (0..LANES * 3 * PHASES).map(|_| Event::new()).collect::<Result<_, _>>()?;
        Ok(Self {
            context: Arc::clone(context),
            device,
            events,
            started: Default::default(),
            held_up: AtomicBool::new(false),
            _pinned: pinned,
            host,
        })
    }

    /// Where a tensor lies: a device address, or a host address.
    pub(super) fn at(&self, t: Tensor) -> u64 {
        let start = match t.arena() {
            Arena::Device => self.device.start,
            Arena::Pinned => self.host.pinned_range().0 as u64,
        };
        start + t.range().start
    }

    /// The event behind `phase` of a collective.
    pub(super) fn event(&self, lane: usize, group: Group, phase: usize) -> &Event {
        &self.events[(lane * 3 + group as usize) * PHASES + phase]
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // The last to go may be another thread than the rank's.
        let _ = self.context.bind();
    }
}

/// Where the ranks of a run on GPUs find each other.
#[derive(Debug)]
pub(crate) struct Board {
    peers: Vec<OnceLock<Arc<Peer>>>,
    /// Of each group of more than one rank, by its first rank.
    ids: Mutex<Vec<((Group, usize), nccl::Id)>>,
}

impl Board {
    pub(crate) fn new(world_size: usize) -> Self {
        Self { peers: (0..world_size).map(|_| OnceLock::new()).collect(), ids: Mutex::default() }
    }

    pub(super) fn join(&self, rank: usize, peer: &Arc<Peer>) {
        // A rank opens one device.
        let _ = self.peers[rank].set(Arc::clone(peer));
    }

    pub(super) fn peer(&self, rank: usize) -> Option<&Arc<Peer>> {
        self.peers.get(rank)?.get()
    }

    pub(super) fn post_id(&self, group: (Group, usize), id: nccl::Id) {
        self.ids.lock().unwrap_or_else(|e| e.into_inner()).push((group, id));
    }

    pub(super) fn id(&self, group: (Group, usize)) -> Option<nccl::Id> {
        let ids = self.ids.lock().unwrap_or_else(|e| e.into_inner());
        ids.iter().find(|(have, _)| *have == group).map(|(_, id)| *id)
    }
}
