//! The step of a config under each update mode, to compare.

use super::choose::choice;
use super::plan::memory_report;
use super::simulate::{Schedule, SimulateError, mean_step, simulate};
use config::{Config, Placement, Transfer, UpdateMode, in_line};
use layout::LocalMachine;
use layout::build::{lay_out, speculated_share, update_mode, vertical_width};

/// Micro-batches whose first forward passes go together.
const TOGETHER: usize = 8;

/// The step of `config` under each update mode, its own first, which takes `own` seconds, and with several first forward
/// passes together. The share `clipped` of the steps is clipped or skipped, and the times are means. Where all updates are on the
/// device there is no other mode. Where transfers block, the others stream.
///
/// # Errors
/// As [`simulate`].
pub fn schedules(
    config: &Config,
    machine: &LocalMachine,
    own: f64,
    clipped: f64,
) -> Result<Vec<Schedule>, SimulateError> {
    let told = |config: &Config, step_seconds: f64| {
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
    let mut all = vec![told(config, own)];
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
    if let Some(mut ahead) = of(UpdateMode::Speculative) {
        match choice(&ahead, machine) {
            // Its share takes nothing: the step is that of `Overlapped`.
            Err(SimulateError::NothingAhead { .. }) => {}
            chosen => {
                if let Some((_, share, _)) = chosen? {
                    ahead.offload.speculated_fraction = share;
                }
                others.push(ahead);
            }
        }
    }
    for other in others {
        let built = lay_out(&other, machine);
        let committed = simulate(&other, &built)?.step_seconds();
        all.push(told(&other, mean_step(&other, &built, committed, clipped)?));
    }
    Ok(all)
}
