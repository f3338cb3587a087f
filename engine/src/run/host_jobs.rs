//! How much work the Host lane's queue takes, so that a thread that queues an update goes on to the next forward pass.

use crate::config::{Config, DeviceConfig};
use crate::dry_run::{count, with_micro_batches};
use crate::layout::build::{Built, build};
use crate::run::RunError;
use device::Lane;
use device::cpu::Lanes;

/// Micro-batches that are counted: no rank's thread is so far ahead of its Host lane.
const AHEAD: usize = 4;

/// Ops of the Host lane in two steps, where that lane has a thread. A rank waits for each step's decision before it
/// queues the next one, so there is never more: one update that runs, the next step, and its update.
///
/// # Errors
/// The step cannot be counted.
pub(crate) fn host_jobs(config: &Config, built: &Built, lanes: Lanes) -> Result<usize, RunError> {
    if config.device != DeviceConfig::Cuda && lanes == Lanes::Inline {
        return Ok(0);
    }
    let totals = if built.micro_batches > AHEAD {
        let few = with_micro_batches(config, built, AHEAD);
        count(&few, &build(&few))
    } else {
        count(config, built)
    };
    let refused = |error| RunError { rank: 0, step: 0, error, all: Vec::new(), unread: None };
    let ops = totals.map_err(refused)?.ops[Lane::Host as usize];
    Ok(2 * ops as usize)
}
