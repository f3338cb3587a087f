//! Compares the step of a config under each update mode.

use super::choose::choice;
use super::plan::memory_report;
use super::simulate::{Schedule, SimulateError, mean_step, simulate};
use config::{Config, Placement, Transfer, UpdateMode, in_line};
use data::progress::Progress;
use layout::LocalMachine;
use layout::build::{lay_out, speculated_share, update_mode, vertical_width};

/// Number of micro-batches that run their first forward pass together.
const TOGETHER: usize = 8;

/// The step of `config` under each update mode. Its own mode is first, with `own` seconds. One
/// entry runs several first forward passes together. Times are means if the fraction `clipped` of
/// the steps is clipped or skipped. If all updates run on the device, only the own mode is
/// returned. The other entries stream, even if transfers of the config block.
///
/// # Errors
/// Returns the errors of [`simulate`].
pub fn schedules(
    config: &Config,
    machine: &LocalMachine,
    own: f64,
    clipped: f64,
    progress: &dyn Progress,
) -> Result<Vec<Schedule>, SimulateError> {
    let schedule = |config: &Config, step_seconds: f64| {
        let (offload, memory) = (&config.offload, memory_report(config, &lay_out(config, machine)));
        let delayed = matches!(update_mode(config), UpdateMode::Delayed { .. });
        let mut update = in_line(&offload.update);
        if vertical_width(config) > 1 {
            update = format!("{update}, first_forward {}", vertical_width(config));
        }
        let blocking = offload.transfer == Transfer::Blocking;
        Schedule {
            schedule: if blocking { format!("{update}, Blocking") } else { update },
            share: Some(speculated_share(config)).filter(|share| *share > 0.0),
            exact: !delayed,
            step_seconds,
            ratio: step_seconds / own,
            host_bytes_per_rank: memory.host_per_rank.bytes,
            fits: memory.fits,
        }
    };
    let mut all = vec![schedule(config, own)];
    if config.offload.optimizer == Placement::Device {
        return Ok(all);
    }
    let mut others = Vec::new();
    let delayed = UpdateMode::Delayed { after_step: 40 };
    let of = |update| {
        let mut other = config.clone();
        (other.offload.update, other.offload.transfer) = (update, Transfer::Streamed);
        let mode = |c: &Config| std::mem::discriminant(&c.offload.update);
        let differs = mode(&other) != mode(config) || config.offload.transfer != Transfer::Streamed;
        (differs && machine.is_sound(&other)).then_some(other)
    };
    others.extend([UpdateMode::Serial, UpdateMode::Overlapped, delayed].into_iter().filter_map(of));
    let mut together = config.clone();
    (together.offload.update, together.offload.transfer) =
        (UpdateMode::Overlapped, Transfer::Streamed);
    together.offload.first_forward = TOGETHER;
    if vertical_width(config) == 1 && vertical_width(&together) > 1 && machine.is_sound(&together) {
        others.push(together);
    }
    if let Some(mut speculative) = of(UpdateMode::Speculative) {
        match choice(&speculative, machine) {
            // The share updates nothing speculatively: the step is that of `Overlapped`.
            Err(SimulateError::NothingAhead { .. }) => {}
            chosen => {
                if let Some((_, share, _)) = chosen? {
                    speculative.offload.speculated_fraction = share;
                }
                others.push(speculative);
            }
        }
    }
    let stage = progress.begin_steps("simulating other schedules", others.len() as u64);
    for other in others {
        let built = lay_out(&other, machine);
        let committed = simulate(&other, &built)?.step_seconds();
        all.push(schedule(&other, mean_step(&other, &built, committed, clipped)?));
        stage.add(1);
    }
    Ok(all)
}
