//! Simulates the real step without data, on a virtual clock, for a box that is only described.
//!
//! [`record`] notes the ops of a rank; [`simulate`] runs them on all ranks of a [`Hardware`]. Ops
//! wait according to their lanes and events, have the costs of `cost.rs`, and share links, memory
//! channels and cores fairly. All ranks run one program: shapes do not depend on the rank.

mod classes;
mod cost;
mod hardware;
mod program;
mod share;
mod solve;
mod submit;
mod timeline;

pub use cost::{
    CHANNEL_SHARE, LINK_SHARE, MEMORY_SHARE, NVLINK_SHARE, PCIE_SUM_SHARES, WIDE_SHARE, link_share,
    nominal_link, nvlink_sum_share, pcie_sums,
};
pub use hardware::era::Era2020;
pub use hardware::{AttentionKernels, Gpu, Hardware, MeasuredMachine, Rates, Seat};
pub use program::{Program, Work, WorkKind, record};
pub use timeline::{SimulatedOp, Timeline};

use classes::{Classes, GroupUser, Users};
use cost::{Demand, Resources};
use device::{Group, LANES, Lane, Rank};
use solve::{Problem, kind_number, solve};

/// Simulates `program` on every rank of a TP x DP grid, which has seats on the box. With `merge`,
/// equal ranks are simulated once.
pub fn simulate(
    program: Program,
    hardware: &Hardware,
    tp: usize,
    dp: usize,
    merge: bool,
) -> Timeline {
    let (ranks, seats) = (tp * dp, hardware.seats.len());
    assert!(ranks <= seats, "a box is laid out for its grid: {ranks} ranks on {seats} GPUs");
    let users = users(&program, hardware, tp, dp);
    let classes = Classes::new(&users, merge);
    let queues = queues(hardware, tp, dp);
    let submits = hardware.measured.is_none() && hardware.gpu.as_of_2020.is_none();
    let meeting = |group| classes.meeting_of(&users, group);
    let meetings = (0..classes.members.len()).map(meeting).collect();
    let problem = Problem { program: &program, users: &users, classes: &classes, queues, submits };
    let solved = solve(problem);
    Timeline::new(program, classes, meetings, solved.0, solved.1, queues)
}

/// The largest group of a TP x DP grid whose sums cross PCIe: its number of ranks in a box, and the
/// rate in bytes per second at which each of them sends. `None`: NVLink or no link joins all groups.
pub fn sums_over_pcie(hardware: &Hardware, tp: usize, dp: usize) -> Option<(usize, f64)> {
    let all: Vec<Rank> = Rank::all(tp, dp).collect();
    let groups = [Group::Tp, Group::Dp].into_iter();
    let groups = groups.flat_map(|group| Hardware::groups(&all, group));
    let over_pcie = groups.filter(|members| cost::crosses_pcie(hardware, members));
    let rate = |members: Vec<usize>| {
        let machine = hardware.seats[members[0]].machine;
        let ranks = members.iter().filter(|&&rank| hardware.seats[rank].machine == machine).count();
        let links = members.iter().flat_map(|&rank| &hardware.seats[rank].links);
        let slowest = links.map(|link| hardware.links[*link]).fold(f64::INFINITY, f64::min);
        (ranks, pcie_sums(hardware.pcie_sums, slowest, ranks))
    };
    over_pcie.map(rate).max_by_key(|(ranks, _)| *ranks)
}

/// The queue of a rank for each lane. Virtual GPUs run inline. With NCCL both communication lanes
/// share one stream (`streams` in `cuda/open.rs`).
fn queues(hardware: &Hardware, tp: usize, dp: usize) -> [usize; LANES] {
    let mut queues = Lane::ALL.map(|lane| lane as usize);
    if hardware.measured.is_some() {
        queues = [0; LANES];
    } else if hardware.one_communication_stream && tp > 1 && dp > 1 {
        queues[Lane::DpComm as usize] = Lane::TpComm as usize;
    }
    queues
}

/// The demand of every rank and group for each kind of work.
fn users(program: &Program, hardware: &Hardware, tp: usize, dp: usize) -> Users {
    let resources = Resources::new(hardware);
    let all: Vec<Rank> = Rank::all(tp, dp).collect();
    let of_rank = |rank: &Rank| -> Vec<Demand> {
        let works = program.works.iter();
        works.map(|work| cost::of_rank(hardware, &resources, rank.index(), work)).collect()
    };
    let mut groups = Vec::new();
    for group in [Group::Tp, Group::Dp, Group::World] {
        for members in Hardware::groups(&all, group) {
            let demand = |work: &Work| {
                let mine = work.kind.group() == Some(group);
                mine.then(|| cost::of_group(hardware, &resources, &members, work))
            };
            let demands = program.works.iter().map(demand).collect();
            let meeting = cost::meeting(hardware, &members);
            groups.push(GroupUser { kind: kind_number(group), members, demands, meeting });
        }
    }
    Users { ranks: all.iter().map(of_rank).collect(), groups, resources: resources.rates.len() }
}

#[cfg(test)]
mod tests;
