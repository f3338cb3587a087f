//! The memory of a rank on a GPU, and the table through which other ranks of the process access it.

use super::driver::{Context, DeviceMemory, Event, Failure, HostMapping, Registration};
use super::nccl;
use crate::ranks::memory::Memory;
use crate::{Arena, Group, LANES, Plan, Tensor};
use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, OnceLock};

/// Largest number of bytes that one call pins. Drivers refuse some sizes, and pieces show the
/// progress of pinning.
pub(super) const PIECE: u64 = 1 << 30;

/// Bytes of a page, the unit of pinning.
pub(super) const PAGE: u64 = 4096;

/// The pages of the host arena that copies between host and GPU access, in order, as ranges of
/// bytes.
pub(super) fn copied(plan: &Plan) -> Vec<Range<u64>> {
    let mut runs: Vec<Range<u64>> = Vec::new();
    for entry in plan.entries().iter().filter(|entry| entry.is_copied() && !entry.range.is_empty())
    {
        let (start, end) =
            (entry.range.start / PAGE * PAGE, entry.range.end.next_multiple_of(PAGE));
        match runs.last_mut() {
            Some(run) if start <= run.end => run.end = run.end.max(end),
            _ => runs.push(start..end),
        }
    }
    runs
}

/// Bytes of host memory that a driver pins for a rank of `plan`: the pages that copies between host
/// and GPU access, and the page of the words by which lanes wait for each other.
pub fn pinned_bytes(plan: &Plan) -> u64 {
    PAGE + copied(plan).iter().map(|run| run.end - run.start).sum::<u64>()
}

/// Bytes of a GPU for the page tables of the memory pinned for a rank of `plan`: 8 for each page of
/// 4 KiB.
pub fn page_tables(plan: &Plan) -> u64 {
    pinned_bytes(plan) / PAGE * 8
}

/// Splits a range of the host arena at the ends of pinned pieces, which are multiples of [`PIECE`].
pub(super) fn pieces<E>(
    range: Range<u64>,
    visit: &mut dyn FnMut(Range<u64>) -> Result<(), E>,
) -> Result<(), E> {
    let mut at = range.start;
    while at < range.end {
        let end = ((at / PIECE + 1) * PIECE).min(range.end);
        visit(at..end)?;
        at = end;
    }
    Ok(())
}

/// Offsets of the data after the plan's bytes, in one allocation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arrangement {
    pub(super) scratch: u64,
    pub(super) workspace: u64,
    pub(super) bytes: u64,
}

impl Arrangement {
    pub(super) fn new(plan: &Plan, scratch: u64, workspace: u64) -> Self {
        let start = plan.bytes(Arena::Device).next_multiple_of(256);
        let workspace_start = (start + scratch).next_multiple_of(256);
        Self { scratch: start, workspace: workspace_start, bytes: workspace_start + workspace }
    }
}

/// Number of meetings of the ranks in an in-process collective.
pub(super) const PHASES: usize = 3;

/// Events of a rank for its in-process collectives.
pub(super) const EVENTS: usize = LANES * 3 * PHASES;

/// One rank's memory and events. [`Peers`] keeps it until the run ends, so that no peer reads freed
/// memory.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(super) context: Arc<Context>,
    pub(super) device: DeviceMemory,
    /// Events by lane, group and phase of an in-process collective.
    events: Vec<Event>,
    /// Number of collectives that this rank's streams have started, by group: TP, DP.
    pub(super) started: [AtomicU64; 2],
    // Declared before `host`, the memory that the registration must not outlive.
    _pinned: Registration,
    /// Pinned ranges of the host arena, in bytes.
    copied: Vec<Range<u64>>,
    host: Arc<Memory>,
}

impl Peer {
    /// Allocates device memory, and host memory with its copied parts pinned.
    pub(super) fn new(
        context: &Arc<Context>,
        device: DeviceMemory,
        host: Arc<Memory>,
        plan: &Plan,
    ) -> Result<Self, Failure> {
        let (start, copied) = (host.pinned_range().0 as u64, copied(plan));
        let mut pinned = Registration::new(context);
        for run in &copied {
            pieces(run.clone(), &mut |piece| {
                pinned.add(start + piece.start, piece.end - piece.start, HostMapping::No)
            })?;
        }
        let events = (0..EVENTS).map(|_| Event::new()).collect::<Result<_, _>>()?;
        Ok(Self {
            context: Arc::clone(context),
            device,
            events,
            started: Default::default(),
            _pinned: pinned,
            copied,
            host,
        })
    }

    /// Whether copies may access a tensor of the host arena.
    pub(super) fn is_pinned(&self, t: Tensor) -> bool {
        let range = t.range();
        let before = self.copied.partition_point(|run| run.start <= range.start);
        before > 0 && range.end <= self.copied[before - 1].end
    }

    /// The address of a tensor: on the device or on the host.
    pub(super) fn at(&self, t: Tensor) -> u64 {
        let start = match t.arena() {
            Arena::Device => self.device.start,
            Arena::Pinned => self.host.pinned_range().0 as u64,
        };
        start + t.range().start
    }

    /// The event after `phase` of a collective.
    pub(super) fn event(&self, lane: usize, group: Group, phase: usize) -> &Event {
        &self.events[(lane * 3 + group as usize) * PHASES + phase]
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // The last owner may be on a thread other than the rank's.
        let _ = self.context.bind();
    }
}

/// NCCL's id of a group.
#[derive(Debug)]
struct GroupId {
    group: Group,
    /// The index of the group's first rank.
    first: usize,
    id: nccl::Id,
}

/// Table of the ranks of a run on GPUs, by which they find each other's memory.
#[derive(Debug)]
pub struct Peers {
    by_rank: Vec<OnceLock<Arc<Peer>>>,
    /// NCCL's ids of the groups with more than one rank.
    ids: Mutex<Vec<GroupId>>,
}

impl Peers {
    /// The table of a run with `world_size` ranks.
    pub fn new(world_size: usize) -> Self {
        let by_rank = (0..world_size).map(|_| OnceLock::new()).collect();
        Self { by_rank, ids: Mutex::default() }
    }

    pub(super) fn size(&self) -> usize {
        self.by_rank.len()
    }

    pub(super) fn join(&self, rank: usize, peer: &Arc<Peer>) {
        // A rank opens one device.
        let _ = self.by_rank[rank].set(Arc::clone(peer));
    }

    pub(super) fn peer(&self, rank: usize) -> Option<&Arc<Peer>> {
        self.by_rank.get(rank)?.get()
    }

    pub(super) fn post_id(&self, group: Group, first: usize, id: nccl::Id) {
        self.ids.lock().unwrap_or_else(|e| e.into_inner()).push(GroupId { group, first, id });
    }

    pub(super) fn id(&self, group: Group, first: usize) -> Option<nccl::Id> {
        let ids = self.ids.lock().unwrap_or_else(|e| e.into_inner());
        ids.iter().find(|have| have.group == group && have.first == first).map(|have| have.id)
    }
}
