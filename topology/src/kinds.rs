//! Kinds of cores in words, and warnings about them.

use crate::{Core, CoreKind, Machine, Severity, Warning, ascending, counted, format_cpu_list};

impl CoreKind {
    /// Name of the kind, such as `IntelAtom`; without a name `kind` and its number.
    fn word(&self, index: usize) -> String {
        self.name.clone().unwrap_or_else(|| format!("kind {}", index + 1))
    }
}

impl Machine {
    /// The kinds of the box's cores as text, the fastest first; `None` if all cores are of one
    /// kind.
    pub fn kinds_of_cores(&self) -> Option<String> {
        if self.core_kinds.len() < 2 {
            return None;
        }
        let kind = |(index, kind): (usize, &CoreKind)| {
            let cores = self.cores.iter().filter(|core| core.kind == Some(index)).count();
            let speed = kind.speed.map_or_else(String::new, |mhz| format!(", {mhz} MHz at most"));
            let (word, cpus) = (kind.word(index), format_cpu_list(&kind.cpus));
            format!("{cores} {word} (CPUs {cpus}{speed})")
        };
        let all: Vec<String> = self.core_kinds.iter().enumerate().map(kind).collect();
        Some(all.join(", "))
    }

    /// Number of cores of each kind among the cores with these CPUs, the fastest kind first.
    fn kinds_of(&self, cpus: &[u32]) -> Vec<usize> {
        let mut counts = vec![0; self.core_kinds.len()];
        let of = |cpu: &u32| self.cores.iter().find(|core: &&Core| core.cpus.contains(cpu));
        for kind in cpus.iter().filter_map(|cpu| of(cpu)?.kind) {
            counts[kind] += 1;
        }
        counts
    }
}

/// Warns if ranks have different kinds of cores. `ranks`: a CPU of each core, by rank.
pub(crate) fn unlike_ranks<'a>(
    machine: &Machine,
    ranks: impl Iterator<Item = &'a [u32]>,
) -> Option<Warning> {
    let counts: Vec<Vec<usize>> = ranks.map(|cpus| machine.kinds_of(cpus)).collect();
    let alike = counts.windows(2).all(|pair| pair[0] == pair[1]);
    let used = |kind: &usize| counts.iter().any(|counts| counts[*kind] > 0);
    if alike || (0..machine.core_kinds.len()).filter(used).count() < 2 {
        return None;
    }
    let words = |counts: &[usize]| {
        let kinds = machine.core_kinds.iter().enumerate().zip(counts).filter(|(_, n)| **n > 0);
        let kinds = kinds.map(|((index, kind), n)| format!("{n} {}", kind.word(index)));
        kinds.collect::<Vec<_>>().join(" and ")
    };
    let (most, least) = (counts.iter().max()?, counts.iter().min()?);
    let of = |counts_of: &Vec<usize>| {
        let ranks = counts.iter().zip(0..).filter(|(counts, _)| *counts == counts_of);
        let ranks: Vec<u32> = ranks.map(|(_, rank)| rank).collect();
        let word = if ranks.len() == 1 { "rank" } else { "ranks" };
        format!("{word} {}: {}", format_cpu_list(&ranks), words(counts_of))
    };
    Some(Warning {
        id: "cores-unlike",
        severity: Severity::Warning,
        text: format!(
            "the ranks have cores of different kinds ({}; {}), and the slowest rank sets the pace",
            of(most),
            of(least)
        ),
        remedy: "a number of ranks that divides the cores of each kind, or leave the slow ones out (taskset, the cpuset)"
            .into(),
    })
}

/// Warns about cores without memory next to them, and names the node that they use.
pub(crate) fn cores_without_memory(machine: &Machine) -> Option<Warning> {
    let is_far = |core: &&Core| {
        let node = machine.numa_node(core.numa_node);
        node.is_some_and(|node| !core.cpus.iter().any(|cpu| node.cpus.contains(cpu)))
    };
    let far_cores: Vec<&Core> = machine.cores.iter().filter(is_far).collect();
    let cpus = ascending(far_cores.iter().flat_map(|core| core.cpus.clone()));
    let nodes = ascending(far_cores.iter().map(|core| core.numa_node));
    if cpus.is_empty() {
        return None;
    }
    Some(Warning {
        id: "cores-without-memory",
        severity: Severity::Warning,
        text: format!(
            "{} (CPUs {}) have no memory next to them: they work from that of node {}",
            counted(far_cores.len(), "core"),
            format_cpu_list(&cpus),
            format_cpu_list(&nodes)
        ),
        remedy: "put memory modules into all channels of the socket, or let the firmware show fewer nodes in it".into(),
    })
}
