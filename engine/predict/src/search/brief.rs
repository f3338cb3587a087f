//! Estimates the time of a step, and its waits for the host, from a few of its micro-batches.

use crate::sim::Timeline;
use crate::simulate::{SimulateError, simulate_unchecked};
use config::{Config, ParameterPlace, Recompute};
use device::Lane;
use engine::dry_run::with_micro_batches;
use layout::build::{RankLayout, lay_out, shape, vertical_width};

/// Fewest micro-batches of the first of two simulations. The second has one more.
const FEW: usize = 2;

/// Smallest number of tiles of a rank's update in a brief simulation. The first and the last tile then
/// lengthen the update by at most 1/512 of its time.
const LEAST_TILES: u64 = 512;

/// Least number of tiles of a block's update on a rank in a brief simulation.
const LEAST_TILES_OF_BLOCK: u64 = 6;

/// Times of a step in seconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Brief {
    /// Seconds of the step.
    pub(crate) seconds: f64,
    /// Seconds in which the step waits for host work, copies and data-parallel collectives.
    pub(super) exposed: f64,
    /// Seconds in which the host works.
    pub(super) host: f64,
    /// Seconds in which the GPU computes.
    pub(super) compute: f64,
    /// Seconds of one micro-batch's forward pass, estimated from its fraction of the operations.
    pub(super) forward: f64,
}

impl Brief {
    /// Simulates `config` with the layout `built`.
    ///
    /// # Errors
    /// Returns the errors of [`simulate_unchecked`].
    pub(crate) fn of(config: &Config, built: &RankLayout) -> Result<Self, SimulateError> {
        let coarse = with_larger_tiles(config);
        let laid_out = coarse.as_ref().map(|coarse| lay_out(coarse, &built.machine));
        let (config, built) =
            (coarse.as_ref().unwrap_or(config), laid_out.as_ref().unwrap_or(built));
        // The second simulation must add a micro-batch beyond the first passes that run together.
        let few = match vertical_width(config) {
            1 => FEW,
            together => together + 1,
        };
        // A few micro-batches hide less of the parameter prefetch than many: simulate all.
        let streams = config.offload.parameters == ParameterPlace::Host;
        if streams || built.micro_batches <= few + 1 {
            return Ok(Self::played(config, built, &simulate_unchecked(config, built)?));
        }
        let of = |micro_batches| -> Result<Self, SimulateError> {
            let config = with_micro_batches(config, built, micro_batches);
            let built = lay_out(&config, &built.machine);
            Ok(Self::played(&config, &built, &simulate_unchecked(&config, &built)?))
        };
        let (less, more) = (of(few)?, of(few + 1)?);
        let line = |a: f64, b: f64| a + (b - a) * (built.micro_batches - few) as f64;
        Ok(Self {
            seconds: line(less.seconds, more.seconds),
            exposed: line(less.exposed, more.exposed),
            host: line(less.host, more.host),
            compute: line(less.compute, more.compute),
            forward: more.forward,
        })
    }

    fn played(config: &Config, built: &RankLayout, timeline: &Timeline) -> Self {
        let path = timeline.critical_path();
        // Kernels that wait for their submission do not wait for the host's work.
        let computes =
            |lane: Option<Lane>| matches!(lane, None | Some(Lane::Compute | Lane::TpComm));
        let exposed = path.iter().filter(|(lane, ..)| !computes(*lane)).map(|(.., s)| s).sum();
        let compute = timeline.busy(0, Lane::Compute);
        // The backward pass costs two forward passes, and one more with recomputation.
        let passes =
            if config.recompute == Recompute::Block { 4.0 - kept_share(config) } else { 3.0 };
        let busy = compute + timeline.busy(0, Lane::TpComm);
        Self {
            seconds: timeline.step_seconds(),
            exposed,
            host: timeline.busy(0, Lane::Host),
            compute,
            forward: busy / (passes * built.micro_batches as f64),
        }
    }

    /// Fraction of the step that waits for host work, copies and data-parallel collectives.
    pub(crate) fn waits(&self) -> f64 {
        self.exposed / self.seconds
    }

    /// Fraction of the host's work for which the step waits, at most 1.
    pub(crate) fn waited_share(&self) -> f64 {
        self.exposed / self.host.max(self.exposed)
    }

    /// Estimated lower bound of the step time in seconds, for any place and overlap of the update.
    pub(super) const fn floor(&self) -> f64 {
        (self.seconds - self.exposed).max(self.compute)
    }
}

/// Share of the branches of blocks that keep their activations.
fn kept_share(config: &Config) -> f64 {
    let kept = [config.activations.attention(), config.activations.mlp()];
    let blocks: usize = kept.iter().map(|of| of.gpu + of.host).sum();
    blocks as f64 / (2 * config.model.layers) as f64
}

/// `config` with larger tiles of the update, if a rank has very many tiles. A model of 70 billion
/// parameters has thousands of tiles on each of 8 ranks, and a search would spend most of its time
/// on them.
fn with_larger_tiles(config: &Config) -> Option<Config> {
    let tile = config.offload.tile_elements as u64;
    let of_rank = shape(config).trained_parameters() / config.world_size() as u64;
    let of_block = of_rank / config.model.layers as u64;
    let times = (of_rank / LEAST_TILES).min(of_block / LEAST_TILES_OF_BLOCK) / tile;
    (times > 1).then(|| {
        let mut coarse = config.clone();
        coarse.offload.tile_elements = (tile * times) as usize;
        coarse
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use config::load_str;
    use layout::LocalMachine;
    use std::path::Path;

    fn model(layers: usize, hidden: usize, on: &str) -> Config {
        let ron = format!(
            "(device: Sim(box: {on:?}), model: (layers: {layers}, hidden: {hidden}, heads: 64, seq_len: 1024), \
              recompute: Block, batch: (micro: 1, global: 2), data: (train: \"unused\"), train: (steps: 6))"
        );
        let config = load_str(&ron, "test.ron", Path::new("."), &[]);
        config.unwrap_or_else(|e| panic!("{e}")).config
    }

    #[test]
    fn larger_tiles_make_a_brief_simulation_of_a_large_model_short_and_change_no_step() {
        let large = model(12, 8192, "h200-256gib");
        let coarse = with_larger_tiles(&large).unwrap();
        assert!(coarse.offload.tile_elements > 4 * large.offload.tile_elements);
        let built = lay_out(&large, &LocalMachine::default());
        let in_full = simulate_unchecked(&large, &built).unwrap();
        let brief = Brief::of(&large, &built).unwrap();
        let error = brief.seconds / in_full.step_seconds() - 1.0;
        assert!(error.abs() < 0.005, "{error}");
        let ops = |config: &Config| {
            let built = lay_out(config, &LocalMachine::default());
            simulate_unchecked(config, &built).unwrap().played(0).count()
        };
        assert!(ops(&coarse) < ops(&large) / 2, "{} of {}", ops(&coarse), ops(&large));
        // A small model keeps its tiles.
        assert!(with_larger_tiles(&model(4, 1024, "h200-256gib")).is_none());
    }
}
