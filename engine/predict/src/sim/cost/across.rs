//! Costs of a group in several boxes: latency of hops, and messages between processes. A
//! box has one process. `benchmarks/cluster-2026-11-25.md` has the measurements.

use super::{COLLECTIVE_HOP, MEETING};
use crate::sim::Hardware;
use std::collections::BTreeSet;

/// Additional seconds of a hop to another box. NCCL's own model has 14e-6, both for InfiniBand and
/// for TCP (`hwLat` in its `src/graph/tuning.cc`: NET, Ring, Simple).
const NETWORK_HOP: f64 = 14e-6 - COLLECTIVE_HOP;

/// Seconds until a message arrives: 23e-6 measured between two processes of a machine, and half of
/// the 50e-6 between two polls of an idle MPI thread (`ranks/mpi.rs`).
const MESSAGE_LATENCY: f64 = 48e-6;

/// Seconds that the MPI thread needs to send or to receive one message, from the same measurement
/// as [`MESSAGE_LATENCY`].
const MESSAGE_HANDLING: f64 = 2.7e-6;

/// The distribution of a group over boxes. All boxes have equally many members and groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::sim) struct GroupSpread {
    /// Number of boxes with members.
    boxes: usize,
    /// Number of members in a box.
    here: usize,
    /// Number of members in the other boxes.
    away: usize,
    /// Number of groups of the kind with members in a box.
    groups: usize,
}

impl GroupSpread {
    pub(in crate::sim) fn of(h: &Hardware, members: &[usize]) -> Self {
        let machine = |rank: &usize| h.seats[*rank].machine;
        let boxes: BTreeSet<usize> = members.iter().map(machine).collect();
        // Every group has at least one member.
        let first = machine(&members[0]);
        let here = members.iter().filter(|rank| machine(rank) == first).count();
        let seats = h.seats.iter().filter(|seat| seat.machine == first).count();
        let groups = seats / here;
        Self { boxes: boxes.len(), here, away: members.len() - here, groups }
    }

    /// Whether the group's ranks send messages. In the simulated software of 2020 they send none.
    fn writes(self, h: &Hardware) -> bool {
        self.boxes > 1 && h.gpu.as_of_2020.is_none()
    }

    /// Number of messages that a process sends and receives when its groups of this kind meet: each
    /// member posts to each of the other processes (`ranks/remote.rs`).
    pub(in crate::sim) const fn posts(self) -> usize {
        self.groups * (self.here * (self.boxes - 1) + self.away)
    }

    /// Messages if all members send data to all members elsewhere
    /// (`ranks/rank_state/collectives.rs`).
    pub(in crate::sim) const fn parcels(self) -> usize {
        self.groups * 2 * self.here * self.away
    }

    /// Messages of a host sum: three meetings, and parcels before two of them.
    pub(in crate::sim) const fn messages_of_sum(self) -> usize {
        3 * self.posts() + 2 * self.parcels()
    }
}

/// Seconds in which the threads of a group meet; 0 for a single rank.
pub(in crate::sim) fn meeting(h: &Hardware, members: &[usize]) -> f64 {
    let dealt = GroupSpread::of(h, members);
    match members.len() {
        0 | 1 => 0.0,
        _ if dealt.writes(h) => MEETING + MESSAGE_LATENCY + MESSAGE_HANDLING * dealt.posts() as f64,
        _ => MEETING,
    }
}

/// Seconds in which a group adds up a number on the host.
pub(super) fn host_sum(h: &Hardware, members: &[usize]) -> f64 {
    let dealt = GroupSpread::of(h, members);
    if !dealt.writes(h) {
        return MEETING;
    }
    MEETING + 3.0 * MESSAGE_LATENCY + MESSAGE_HANDLING * dealt.messages_of_sum() as f64
}

/// Additional seconds of a collective with `rounds` whose ring leaves the box.
pub(super) fn hops(h: &Hardware, members: &[usize], rounds: u8) -> f64 {
    NETWORK_HOP * f64::from(rounds) * (GroupSpread::of(h, members).boxes - 1) as f64
}
