//! Capacity of the Host lane's queue: enough that a thread that queues an update can go on to the next forward pass.

use crate::dry_run::{count, with_micro_batches};
use crate::run::RunError;
use config::{Config, DeviceConfig};

use device::Lane;
use device::cpu::Lanes;
use layout::build::{RankLayout, lay_out};

/// Micro-batches that are counted: no rank's thread gets further ahead of its Host lane.
const MOST_AHEAD: usize = 4;

/// Number of ops of the Host lane in two steps, if the lane has a thread. A rank waits for the decision of each step before it
/// queues the next one, so the queue never holds more: an update that runs, the next step, and its update.
///
/// # Errors
/// The step cannot be counted.
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
