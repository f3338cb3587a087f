//! Equal ranks are simulated once: the 16 GPUs of a DGX-2, or the 128 of eight, are one class.
//!
//! Ranks, groups of ranks and resources get colours from their neighbours, and the colours are
//! refined until nothing changes (an equitable partition). Ranks of one colour submit the same
//! program, meet partners of the same colours and share resources with equally many of each colour,
//! so all their ops have the same times.

use super::cost::Demand;
use super::share::Side;
use std::collections::{BTreeMap, BTreeSet};

/// The use of resources by ranks and groups.
#[derive(Debug)]
pub(super) struct Users {
    /// Demands by rank and by work; empty for a collective.
    pub(super) ranks: Vec<Vec<Demand>>,
    /// All groups of all kinds.
    pub(super) groups: Vec<GroupUser>,
    /// Number of resources.
    pub(super) resources: usize,
}

/// A group of ranks for collectives.
#[derive(Debug)]
pub(super) struct GroupUser {
    /// Its kind: a number for each [`Group`](device::Group).
    pub(super) kind: usize,
    /// Its ranks.
    pub(super) members: Vec<usize>,
    /// Demands by work; `None` for work of another kind of group.
    pub(super) demands: Vec<Option<Demand>>,
    /// Seconds in which the threads of its ranks meet; 0 for a single rank.
    pub(super) meeting: f64,
}

/// Number of kinds of groups.
pub(super) const KINDS: usize = 3;

/// The classes, the quotient of the partition.
#[derive(Debug)]
pub(super) struct Classes {
    /// Class of each rank.
    pub(super) of_rank: Vec<usize>,
    /// Class of a rank's group, by class of ranks and by kind of group.
    pub(super) groups_of: Vec<[usize; KINDS]>,
    /// Classes of the member ranks, by class of groups.
    pub(super) members: Vec<Vec<usize>>,
    /// Class of each group.
    of_group: Vec<usize>,
    /// Class of each resource.
    of_resource: Vec<usize>,
    /// One resource of each class of resources.
    resource: Vec<usize>,
}

/// Work that all members of a class do at the same time.
#[derive(Clone, Debug, Default)]
pub(super) struct Load {
    /// Seconds if nothing else runs.
    pub(super) alone: f64,
    /// (class of resources, fraction of one resource that all members use together).
    pub(super) uses: Vec<(usize, f64)>,
    /// Fraction that one member uses of its most used resource.
    pub(super) dominant: f64,
    pub(super) side: Side,
}

type Signature = Vec<u64>;

impl Classes {
    /// Refines until stable. Without `merge` every rank is a class of its own, for tests.
    pub(super) fn new(users: &Users, merge: bool) -> Self {
        let start = |n: usize| (0..n).map(|i| if merge { 0 } else { i }).collect::<Vec<_>>();
        let mut rank = start(users.ranks.len());
        let mut group = start(users.groups.len());
        let mut resource = start(users.resources);
        loop {
            let before = [count(&rank), count(&group), count(&resource)];
            resource = recolour(&resource, &of_resources(users, &rank, &group));
            let of_ranks: Vec<Signature> =
                (0..rank.len()).map(|r| of_rank(users, r, &group, &resource)).collect();
            let of_groups: Vec<Signature> =
                users.groups.iter().map(|g| of_group(g, &rank, &resource)).collect();
            rank = recolour(&rank, &of_ranks);
            group = recolour(&group, &of_groups);
            if before == [count(&rank), count(&group), count(&resource)] {
                return Self::quotient(users, rank, group, resource);
            }
        }
    }

    fn quotient(
        users: &Users,
        of_rank: Vec<usize>,
        of_group: Vec<usize>,
        of_resource: Vec<usize>,
    ) -> Self {
        let mut members = vec![Vec::new(); count(&of_group)];
        let mut groups_of = vec![[usize::MAX; KINDS]; count(&of_rank)];
        for (group, &class) in users.groups.iter().zip(&of_group) {
            let distinct: BTreeSet<usize> = group.members.iter().map(|&m| of_rank[m]).collect();
            members[class] = distinct.into_iter().collect();
            for &rank in &members[class] {
                groups_of[rank][group.kind] = class;
            }
        }
        let resource = first_of_each(&of_resource);
        Self { of_rank, groups_of, members, of_group, of_resource, resource }
    }

    /// Number of classes of ranks.
    pub(super) fn ranks(&self) -> usize {
        self.groups_of.len()
    }

    /// Number of classes of resources.
    pub(super) fn resources(&self) -> usize {
        self.resource.len()
    }

    /// Seconds in which the threads of a group of `class` meet; 0 for a single rank.
    pub(super) fn meeting_of(&self, users: &Users, class: usize) -> f64 {
        let group = self.of_group.iter().position(|of| *of == class);
        group.map_or(0.0, |group| users.groups[group].meeting)
    }

    /// The load if all ranks of `class` do `work`.
    pub(super) fn rank_load(&self, users: &Users, class: usize, work: usize) -> Load {
        let same = users.ranks.iter().zip(&self.of_rank).filter(|(_, of)| **of == class);
        self.load(same.map(|(demands, _)| &demands[work]))
    }

    /// The load if all groups of `class` do `work`.
    pub(super) fn group_load(&self, users: &Users, class: usize, work: usize) -> Load {
        let same = users.groups.iter().zip(&self.of_group).filter(|(_, of)| **of == class);
        self.load(same.filter_map(|(group, _)| group.demands[work].as_ref()))
    }

    /// The sum of the demands. All resources of a class have the same load, so one of each class
    /// suffices.
    fn load<'a>(&self, demands: impl Iterator<Item = &'a Demand>) -> Load {
        let (mut load, mut uses) = (Load::default(), BTreeMap::<usize, f64>::new());
        for demand in demands {
            (load.alone, load.side) = (demand.alone, demand.side);
            for &(resource, share) in &demand.uses {
                load.dominant = load.dominant.max(share);
                let class = self.of_resource[resource];
                if self.resource[class] == resource {
                    *uses.entry(class).or_default() += share;
                }
            }
        }
        Load { uses: uses.into_iter().collect(), ..load }
    }
}

fn count(colours: &[usize]) -> usize {
    colours.iter().max().map_or(0, |most| most + 1)
}

fn first_of_each(colours: &[usize]) -> Vec<usize> {
    let mut first = vec![0; count(colours)];
    for (i, &colour) in colours.iter().enumerate().rev() {
        first[colour] = i;
    }
    first
}

/// New colours: elements with the same old colour and the same signature share one. Colours are
/// numbered by first appearance.
fn recolour(old: &[usize], signatures: &[Signature]) -> Vec<usize> {
    let mut seen: BTreeMap<(usize, &Signature), usize> = BTreeMap::new();
    let keys = old.iter().copied().zip(signatures);
    keys.map(|key| {
        let next = seen.len();
        *seen.entry(key).or_insert(next)
    })
    .collect()
}

/// Users of each resource, by colour and share.
fn of_resources(users: &Users, rank: &[usize], group: &[usize]) -> Vec<Signature> {
    let mut entries: Vec<Vec<[u64; 4]>> = vec![Vec::new(); users.resources];
    let mut enter = |kind: u64, colour: usize, work: usize, demand: &Demand| {
        for &(resource, share) in &demand.uses {
            entries[resource].push([kind, colour as u64, work as u64, share.to_bits()]);
        }
    };
    for (demands, &colour) in users.ranks.iter().zip(rank) {
        demands.iter().enumerate().for_each(|(work, demand)| enter(0, colour, work, demand));
    }
    for (user, &colour) in users.groups.iter().zip(group) {
        let demands = user.demands.iter().enumerate();
        demands.for_each(|(work, d)| d.iter().for_each(|demand| enter(1, colour, work, demand)));
    }
    entries.into_iter().map(flat).collect()
}

fn of_rank(users: &Users, r: usize, group: &[usize], resource: &[usize]) -> Signature {
    let mut entries: Vec<[u64; 4]> = Vec::new();
    for (work, demand) in users.ranks[r].iter().enumerate() {
        entries.extend(of_demand(work, demand, resource));
    }
    for (user, &colour) in users.groups.iter().zip(group) {
        if user.members.contains(&r) {
            entries.push([0, user.kind as u64, colour as u64, 0]);
        }
    }
    flat(entries)
}

fn of_group(user: &GroupUser, rank: &[usize], resource: &[usize]) -> Signature {
    let mut entries: Vec<[u64; 4]> = vec![[0, user.kind as u64, user.meeting.to_bits(), 0]];
    entries.extend(user.members.iter().map(|&m| [3, rank[m] as u64, 0, 0]));
    for (work, demand) in user.demands.iter().enumerate() {
        entries.extend(demand.iter().flat_map(|demand| of_demand(work, demand, resource)));
    }
    flat(entries)
}

fn of_demand(work: usize, demand: &Demand, resource: &[usize]) -> Vec<[u64; 4]> {
    let time = [1, work as u64, demand.alone.to_bits(), 0];
    let used = demand.uses.iter();
    let used = used.map(|&(at, share)| [2, work as u64, resource[at] as u64, share.to_bits()]);
    std::iter::once(time).chain(used).collect()
}

fn flat(mut entries: Vec<[u64; 4]>) -> Signature {
    entries.sort_unstable();
    entries.into_iter().flatten().collect()
}
