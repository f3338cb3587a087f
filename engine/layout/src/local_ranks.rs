//! Ranks of a run on this machine, if a launcher has started several processes.

use crate::local_machine::{LocalMachine, LocalProcesses};
use config::Config;

impl LocalMachine {
    /// Whether the run has several processes.
    pub fn is_spread(&self) -> bool {
        self.0.processes.count > 1
    }

    /// Number of processes of the run on this machine.
    pub fn processes(&self) -> usize {
        self.0.processes.on_node.len()
    }

    /// Largest number of members that a group has in other processes than one of its members. A
    /// group has `size` ranks, which are `step` apart.
    pub fn remote_members(&self, config: &Config, step: usize, size: usize) -> usize {
        let world_size = config.world_size();
        let home = |rank: usize| rank / (world_size / self.0.processes.count);
        let of = |rank: usize| {
            let first = rank / (step * size) * step * size + rank % step;
            (0..size).filter(|i| home(first + i * step) != home(rank)).count()
        };
        (0..world_size).map(of).max().unwrap_or(0)
    }

    /// TP and DP degree of the ranks on this machine.
    pub fn grid(&self, config: &Config) -> (usize, usize) {
        let (tensor, ranks) = (config.parallel.tensor, self.ranks(config));
        if ranks.is_multiple_of(tensor) { (tensor, ranks / tensor) } else { (ranks, 1) }
    }

    /// Number of ranks on this machine.
    pub fn ranks(&self, config: &Config) -> usize {
        config.world_size() / self.0.processes.count * self.processes()
    }

    /// Number of `rank` among the ranks on this machine; `None` if `rank` is on another machine.
    pub fn number(&self, config: &Config, rank: usize) -> Option<usize> {
        let LocalProcesses { count, on_node } = &self.0.processes;
        let each = config.world_size() / count;
        let place = on_node.iter().position(|process| *process == rank / each)?;
        Some(place * each + rank % each)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local_machine::Parts;
    use std::path::Path;
    use std::sync::Arc;

    /// A machine with the processes `on_node` of the run's `count` processes.
    fn share(count: usize, on_node: &[usize]) -> LocalMachine {
        let processes = LocalProcesses { count, on_node: on_node.to_vec() };
        LocalMachine(Arc::new(Parts { processes, ..Parts::default() }))
    }

    fn of_ranks(tensor: usize, data: usize) -> Config {
        let ron = format!(
            r#"(model: (layers: 1, hidden: 32, heads: 8, seq_len: 16), device: Cpu(count: {}),
            parallel: (tensor: {tensor}, data: {data}),
            batch: (micro: 1), data: (train: "unused"), train: (steps: 1))"#,
            tensor * data
        );
        config::load_str(&ron, "a.ron", Path::new("."), &[]).unwrap().config
    }

    #[test]
    fn ranks_are_dealt_in_order_however_processes_are_dealt_to_machines() {
        let (eight, narrow) = (of_ranks(2, 4), of_ranks(8, 1));
        assert_eq!(share(4, &[0, 1, 2, 3]).grid(&eight), (2, 4));
        assert_eq!(share(4, &[2, 3]).grid(&eight), (2, 2));
        assert_eq!(share(4, &[1]).grid(&narrow), (2, 1));
        // TP 2 x DP 4 and TP 8 on four processes. Then TP 2 x DP 3 on two: the third rank's TP
        // partner is in the other process.
        let remote = |(step, size)| share(4, &[0]).remote_members(&eight, step, size);
        assert_eq!([(1, 2), (2, 4)].map(remote), [0, 3]);
        assert_eq!(share(4, &[0]).remote_members(&narrow, 1, 8), 6);
        let remote = |(step, size)| share(2, &[0]).remote_members(&of_ranks(2, 3), step, size);
        assert_eq!([(1, 2), (2, 3)].map(remote), [1, 2]);
        let numbers =
            |share: LocalMachine| (0..8).map(|rank| share.number(&eight, rank)).collect::<Vec<_>>();
        let two = [None, None, None, None, Some(0), Some(1), Some(2), Some(3)];
        assert_eq!(numbers(share(4, &[2, 3])), two);
        let in_turn = [Some(0), Some(1), None, None, Some(2), Some(3), None, None];
        assert_eq!(numbers(share(4, &[0, 2])), in_turn);
    }
}
