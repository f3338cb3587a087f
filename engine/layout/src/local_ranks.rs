//! Which ranks of a run this machine has, where a launcher has started several processes for it.

use config::Config;
use device::Processes;
use std::sync::OnceLock;

/// The processes of this one's machine.
#[derive(Debug)]
struct LocalProcesses {
    processes: usize,
    /// In order.
    on_node: Vec<usize>,
}

static LOCAL: OnceLock<LocalProcesses> = OnceLock::new();

/// From now on the ranks of a run are dealt to `processes`. Before anything is laid out or placed.
pub fn set_processes(processes: &Processes) {
    let (all, on_node) = (processes.count(), processes.on_this_node());
    LOCAL.get_or_init(|| LocalProcesses { processes: all, on_node });
}

/// Whether ranks are in several processes.
pub fn is_spread() -> bool {
    LOCAL.get().is_some_and(|share| share.processes > 1)
}

/// Number of processes of the run on this machine.
pub fn processes() -> usize {
    LOCAL.get().map_or(1, |share| share.on_node.len())
}

/// The most members that a group of consecutive ranks `step` apart, `size` of them, has in other processes than one of them.
pub fn remote_members(config: &Config, (step, size): (usize, usize)) -> usize {
    LOCAL.get().map_or(0, |share| share.remote_members(config.world_size(), (step, size)))
}

/// TP and DP degree of the ranks on this machine.
pub fn grid(config: &Config) -> (usize, usize) {
    let (tensor, data) = (config.parallel.tensor, config.parallel.data);
    LOCAL.get().map_or((tensor, data), |share| share.grid(tensor, data))
}

/// Number of ranks on this machine.
pub fn ranks(config: &Config) -> usize {
    let (tensor, data) = grid(config);
    tensor * data
}

/// The number of `rank` among those on this machine; `None` where another one has it.
pub fn number(config: &Config, rank: usize) -> Option<usize> {
    LOCAL.get().map_or(Some(rank), |share| share.number(config.world_size(), rank))
}

impl LocalProcesses {
    fn remote_members(&self, world_size: usize, (step, size): (usize, usize)) -> usize {
        let home = |rank: usize| rank / (world_size / self.processes);
        let of = |rank: usize| {
            let first = rank / (step * size) * step * size + rank % step;
            (0..size).filter(|i| home(first + i * step) != home(rank)).count()
        };
        (0..world_size).map(of).max().unwrap_or(0)
    }

    fn grid(&self, tensor: usize, data: usize) -> (usize, usize) {
        let ranks = tensor * data / self.processes * self.on_node.len();
        if ranks.is_multiple_of(tensor) { (tensor, ranks / tensor) } else { (ranks, 1) }
    }

    fn number(&self, world_size: usize, rank: usize) -> Option<usize> {
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
        assert_eq!([(1, 2), (2, 4)].map(|group| share(&[0]).remote_members(8, group)), [0, 3]);
        assert_eq!(share(&[0]).remote_members(8, (1, 8)), 6);
        let two = LocalProcesses { processes: 2, on_node: vec![0] };
        assert_eq!([(1, 2), (2, 3)].map(|group| two.remote_members(6, group)), [1, 2]);
        let numbers = |share: LocalProcesses| {
            (0..8).map(move |rank| share.number(8, rank)).collect::<Vec<_>>()
        };
        let two = [None, None, None, None, Some(0), Some(1), Some(2), Some(3)];
        assert_eq!(numbers(share(&[2, 3])), two);
        let in_turn = [Some(0), Some(1), None, None, Some(2), Some(3), None, None];
        assert_eq!(numbers(share(&[0, 2])), in_turn);
    }
}
