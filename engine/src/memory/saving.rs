//! Host memory that a checkpoint needs while it is written, and its description.

use super::{HostNodes, Memories, of_this_machine};
use config::{CheckpointWriter, Config, UpdateMode};
use layout::build::{RankLayout, update_mode};
use topology::format_bytes;

/// Bytes of host memory for each rank's copy of its states during a save. 0 if training waits
/// instead, or saves no checkpoint.
pub fn checkpoint_copy(config: &Config, built: &RankLayout) -> u64 {
    decided(config, built, &|copy| of_this_machine(config, built, copy)).copy
}

/// Use of all memories, with the copies of states if ranks keep them. `nodes` returns the use of
/// the host for a copy of the given bytes. Only this function decides `Auto`, since the free memory
/// may change between two calls.
pub fn decided(config: &Config, built: &RankLayout, nodes: &dyn Fn(u64) -> HostNodes) -> Memories {
    let memories = |copy| Memories::new(config, built, copy, nodes(copy));
    let with = || memories(states(config, built));
    let auto = match config.train.checkpoint_writer {
        _ if !config.train.saves() || built.machine.is_spread() => None,
        CheckpointWriter::Foreground => None,
        CheckpointWriter::Background => return with(),
        CheckpointWriter::Auto => Some(with()).filter(Memories::host_fits),
    };
    auto.unwrap_or_else(|| memories(0))
}

/// Number of fp32 arrays of a rank in a checkpoint: states, and the gradient of a delayed update.
pub fn saved_states(config: &Config) -> usize {
    let is_delayed = matches!(update_mode(config), UpdateMode::Delayed { .. });
    3 + usize::from(is_delayed)
}

/// Bytes of a rank's states in a checkpoint.
fn states(config: &Config, built: &RankLayout) -> u64 {
    4 * saved_states(config) as u64 * built.optimizer.owned_elements()
}

/// Describes how checkpoints are written. `None` if the run saves none.
pub fn saving(config: &Config, built: &RankLayout, memories: &Memories) -> Option<String> {
    let needed = format_bytes(states(config, built));
    let why = match config.train.checkpoint_writer {
        _ if !config.train.saves() => return None,
        _ if memories.copy > 0 => {
            let without = match memories.host_fits() {
                true => "",
                false => ", which does not fit; train.checkpoint_writer=Foreground needs none",
            };
            return Some(format!(
                "checkpoints are written while training goes on, from a copy of {needed} per rank{without}"
            ));
        }
        _ if built.machine.is_spread() => "ranks are in several processes".to_owned(),
        CheckpointWriter::Foreground | CheckpointWriter::Background => {
            "as the config says".to_owned()
        }
        CheckpointWriter::Auto => {
            format!("a copy of {needed} per rank does not fit the host's memory")
        }
    };
    Some(format!("training waits while checkpoints are written: {why}"))
}
