//! Which ranks of a run this machine has, where a launcher has started several processes for it.

/// The processes of a run, and which of them are on this machine.
#[derive(Debug)]
pub(crate) struct LocalProcesses {
    processes: usize,
    /// In order.
    on_node: Vec<usize>,
}

impl Default for LocalProcesses {
    /// One process has all ranks.
    fn default() -> Self {
        Self::new(1, vec![0])
    }
}

impl LocalProcesses {
    /// `on_node` of so many are here.
    pub(crate) const fn new(processes: usize, on_node: Vec<usize>) -> Self {
        Self { processes, on_node }
    }

    /// Number of processes of the run.
    pub(crate) const fn all(&self) -> usize {
        self.processes
    }

    /// Number of those on this machine.
    pub(crate) const fn here(&self) -> usize {
        self.on_node.len()
    }

    /// The most members that a group of ranks `step` apart, `size` of them, has in other processes than one of them.
    pub(crate) fn remote_members(&self, world_size: usize, step: usize, size: usize) -> usize {
        let home = |rank: usize| rank / (world_size / self.processes);
        let of = |rank: usize| {
            let first = rank / (step * size) * step * size + rank % step;
            (0..size).filter(|i| home(first + i * step) != home(rank)).count()
        };
        (0..world_size).map(of).max().unwrap_or(0)
    }

    /// TP and DP degree of the ranks on this machine, of a run of so many.
    pub(crate) fn grid(&self, tensor: usize, data: usize) -> (usize, usize) {
        let ranks = tensor * data / self.processes * self.on_node.len();
        if ranks.is_multiple_of(tensor) { (tensor, ranks / tensor) } else { (ranks, 1) }
    }

    /// The number of `rank` among those on this machine; `None` where another one has it.
    pub(crate) fn number(&self, world_size: usize, rank: usize) -> Option<usize> {
        let each = world_size / self.processes;
        let place = self.on_node.iter().position(|process| *process == rank / each)?;
        Some(place * each + rank % each)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_dealt_in_order_however_processes_are_dealt_to_machines() {
        let share = |on_node: &[usize]| LocalProcesses { processes: 4, on_node: on_node.to_vec() };
        assert_eq!(share(&[0, 1, 2, 3]).grid(2, 4), (2, 4));
        assert_eq!(share(&[2, 3]).grid(2, 4), (2, 2));
        assert_eq!(share(&[1]).grid(8, 1), (2, 1));
        // TP 2 x DP 4 by four processes; TP 8 by four, and TP 2 x DP 3 by two, whose third rank has its partner elsewhere.
        assert_eq!(
            [(1, 2), (2, 4)].map(|(step, size)| share(&[0]).remote_members(8, step, size)),
            [0, 3]
        );
        assert_eq!(share(&[0]).remote_members(8, 1, 8), 6);
        let two = LocalProcesses { processes: 2, on_node: vec![0] };
        assert_eq!([(1, 2), (2, 3)].map(|(step, size)| two.remote_members(6, step, size)), [1, 2]);
        let numbers = |share: LocalProcesses| {
            (0..8).map(move |rank| share.number(8, rank)).collect::<Vec<_>>()
        };
        let two = [None, None, None, None, Some(0), Some(1), Some(2), Some(3)];
        assert_eq!(numbers(share(&[2, 3])), two);
        let in_turn = [Some(0), Some(1), None, None, Some(2), Some(3), None, None];
        assert_eq!(numbers(share(&[0, 2])), in_turn);
    }
}
