//! What of the host's memory a checkpoint takes while it is written, and in which words that is said.

use super::{all_fit, memories};
use crate::build::{Built, update_mode};
use crate::config::{CheckpointWriter, Config, UpdateMode};
use topology::format_bytes;

/// Bytes of host memory in which each rank keeps a copy of its states while it is written; 0 where training waits
/// instead, or saves nothing.
pub(crate) fn checkpoint_copy(config: &Config, built: &Built) -> u64 {
    let copy = states(config, built);
    match config.train.checkpoint_writer {
        _ if !config.train.saves() => 0,
        CheckpointWriter::Foreground => 0,
        CheckpointWriter::Background => copy,
        CheckpointWriter::Auto if all_fit(&memories(config, built, copy).2) => copy,
        CheckpointWriter::Auto => 0,
    }
}

/// fp32 arrays of what a rank owns in a checkpoint: the states, and the gradient of an update that waits.
pub(crate) fn saved_states(config: &Config) -> usize {
    let late = matches!(update_mode(config), UpdateMode::Delayed { .. });
    3 + usize::from(late)
}

/// Bytes of the states of a rank as a checkpoint has them.
fn states(config: &Config, built: &Built) -> u64 {
    let masters = built.plan.entries().iter().filter(|e| e.name.ends_with(".master"));
    let elements: u64 = masters.map(|e| (e.shape.0 * e.shape.1) as u64).sum();
    4 * saved_states(config) as u64 * elements
}

/// How checkpoints are written, where there are any.
pub(super) fn saving(config: &Config, built: &Built, copy: u64) -> Option<String> {
    let needed = format_bytes(states(config, built));
    let why = match config.train.checkpoint_writer {
        _ if !config.train.saves() => return None,
        _ if copy > 0 => {
            let without = match all_fit(&memories(config, built, copy).2) {
                true => "",
                false => ", which does not fit; train.checkpoint_writer=Foreground needs none",
            };
            return Some(format!(
                "checkpoints are written while training goes on, from a copy of {needed} per rank{without}"
            ));
        }
        CheckpointWriter::Foreground | CheckpointWriter::Background => {
            "as the config says".to_owned()
        }
        CheckpointWriter::Auto => {
            format!("a copy of {needed} per rank does not fit the host's memory")
        }
    };
    Some(format!("training waits while checkpoints are written: {why}"))
}
