//! Reports a layout: its simulated step, its memory, and why it is not the fastest.

use super::words::words;
use super::{Candidate, Layout};
use crate::changes;
use crate::plan::memory_report;
use crate::range::RateRange;
use crate::simulate::{
    SimulateError, SimulationReport, assumed, described_box, groups, simulate, summary,
};
use config::{Config, LoadedConfig, Placement};
use engine::dry_run::{alike, with_micro_batches};
use layout::build::{RankLayout, lay_out, shape, speculated_share, vertical_width};
use tensor_parallel::Ring;

/// Most micro-batches of a full simulation. A step with more is extrapolated from half as many.
const MOST_MICRO_BATCHES: usize = 64;

/// A layout with its step, which is simulated in full or extrapolated.
pub(super) fn layout(loaded: &LoadedConfig, c: &Candidate) -> Result<Layout, SimulateError> {
    let (config, built) = (&c.config, &c.built);
    let memory = memory_report(config, built);
    let play = |config: &Config, built: &RankLayout| -> Result<SimulatedStep, SimulateError> {
        Ok(SimulatedStep::of(&summary(config, &memory, &simulate(config, built)?)))
    };
    let unit = alike(config, built);
    let extrapolated = built.micro_batches > MOST_MICRO_BATCHES.max(4 * unit)
        && built.micro_batches.is_multiple_of(unit);
    let step = if extrapolated {
        let of = |micro_batches| {
            let few = with_micro_batches(config, built, micro_batches);
            play(&few, &lay_out(&few, &built.machine))
        };
        // The second simulation must add micro-batches beyond the first passes that run together.
        let resident = built.decoder.shape().ring == Ring::NONE;
        let first = if resident { vertical_width(config) + 1 } else { 2 * unit };
        let half = (MOST_MICRO_BATCHES / 2).next_multiple_of(unit).max(first);
        let further = (built.micro_batches - half) / unit;
        SimulatedStep::extrapolated(&of(half)?, &of(half + unit)?, further as f64)
    } else {
        play(config, built)?
    };
    let tokens = (config.batch.global * config.model.seq_len) as f64;
    let model_flops = tokens * shape(config).model_flops_per_token() / config.world_size() as f64;
    let range = RateRange::new(config, described_box(config));
    let [low, high] = range.of_rate(tokens / step.seconds);
    Ok(Layout {
        sets: changes::sets(loaded, config),
        changes: c.changes,
        tensor: config.parallel.tensor,
        data: config.parallel.data,
        micro: config.batch.micro,
        micro_batches: built.micro_batches,
        device_fraction: match config.offload.optimizer {
            Placement::Host => 0.0,
            Placement::Device => 1.0,
            Placement::Split { device_fraction } => device_fraction,
        },
        first_forward: vertical_width(config),
        speculated_fraction: speculated_share(config),
        words: words(config, built),
        tokens_per_second: tokens / step.seconds,
        tokens_per_second_low: low,
        tokens_per_second_high: high,
        range,
        step_seconds: step.seconds,
        hardware_tflops_per_gpu: step.flops / step.seconds / 1e12,
        model_tflops_per_gpu: model_flops / step.seconds / 1e12,
        gpu_bytes: memory.gpu.bytes,
        gpu_limit: memory.gpu.limit.unwrap_or(0),
        node_bytes: memory.nodes.iter().map(|node| node.bytes).collect(),
        node_limit: memory.nodes.first().map_or(0, |node| node.limit),
        nearly_full: memory.nearly_full,
        assumed: assumed(config),
        extrapolated,
        waits: step.waits,
        loses_by: Vec::new(),
    })
}

/// A simulated step: seconds, FLOPs of a GPU, and seconds by the ops that it waits for.
struct SimulatedStep {
    seconds: f64,
    flops: f64,
    waits: Vec<(&'static str, f64)>,
}

impl SimulatedStep {
    fn of(simulated: &SimulationReport) -> Self {
        let seconds = simulated.step_seconds;
        let flops = simulated.hardware_tflops_per_gpu * 1e12 * seconds;
        Self { seconds, flops, waits: groups(&simulated.critical_path) }
    }

    /// Extrapolates linearly from `less` and `more` to the point `position` intervals after `less`.
    fn extrapolated(less: &Self, more: &Self, position: f64) -> Self {
        let line = |a: f64, b: f64| a + (b - a) * position;
        let waits = less.waits.iter().zip(&more.waits);
        Self {
            seconds: line(less.seconds, more.seconds),
            flops: line(less.flops, more.flops),
            waits: waits.map(|((what, a), (_, b))| (*what, line(*a, *b))).collect(),
        }
    }
}

/// Fills in why each layout is slower than the first.
pub(super) fn compare(layouts: &mut [Layout]) {
    let Some((first, rest)) = layouts.split_first_mut() else { return };
    let operations =
        |l: &Layout| l.hardware_tflops_per_gpu * l.step_seconds * (l.tensor * l.data) as f64;
    for layout in rest {
        let more = operations(layout) / operations(first) - 1.0;
        let longer = layout.waits.iter().zip(&first.waits).map(|((what, is), (_, was))| {
            let what = match *what {
                "matrix products" if more > 0.005 => "more matrix products, run again".to_owned(),
                "matrix products" if is > was => "smaller matrix products".to_owned(),
                what => what.to_owned(),
            };
            (what, (is - was) / first.step_seconds)
        });
        let mut differ: Vec<(String, f64)> =
            longer.filter(|(_, share)| *share > 0.001 || *share < -0.02).collect();
        differ.sort_by(|a, b| b.1.total_cmp(&a.1));
        // The two largest longer waits, and the largest shorter wait.
        let shorter = differ.last().filter(|(_, share)| *share < 0.0).cloned();
        differ.retain(|(_, share)| *share > 0.0);
        differ.truncate(2);
        differ.extend(shorter);
        layout.loses_by = differ;
    }
}
