//! Capacity of the Host lane's queue: a thread can queue an update and continue with the next
//! forward pass.

use crate::dry_run::{count, with_micro_batches};
use crate::run::RunError;
use config::{Config, DeviceConfig};

use device::Lane;
use device::cpu::Lanes;
use layout::build::{RankLayout, lay_out};

/// Largest number of micro-batches that are counted. A rank's thread does not lead its Host lane by
/// more.
const MOST_AHEAD: usize = 4;

/// Number of Host-lane ops in two steps; 0 if the lane has no thread. A rank waits for the decision
/// of a step before it queues the next step. The queue thus holds at most a running update, the
/// next step, and the update of that step.
///
/// # Errors
/// The ops of a step cannot be counted.
pub(crate) fn host_queue_capacity(
    config: &Config,
    layout: &RankLayout,
    lanes: Lanes,
) -> Result<usize, RunError> {
    if config.device != DeviceConfig::Cuda && lanes == Lanes::Inline {
        return Ok(0);
    }
    let totals = if layout.micro_batches > MOST_AHEAD {
        let few = with_micro_batches(config, layout, MOST_AHEAD);
        count(&few, &lay_out(&few, &layout.machine))
    } else {
        count(config, layout)
    };
    let refused = |error| RunError { rank: 0, step: 0, error, all: Vec::new(), read_failure: None };
    let ops = totals.map_err(refused)?.ops[Lane::Host as usize];
    Ok(2 * ops as usize)
}
