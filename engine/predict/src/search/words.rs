//! Describes a layout.

use config::{Config, KeptBlocks, Placement, Recompute};
use layout::build::{RankLayout, speculated_share, vertical_width};
use offload::GradAccumulation;
use tensor_parallel::Ring;

/// Recomputation, splits and places of a layout, as text.
pub fn words(config: &Config, built: &RankLayout) -> String {
    let mut words: Vec<String> = Vec::new();
    words.push(match config.recompute {
        Recompute::None => "no recomputation".into(),
        Recompute::Selective => "selective recomputation".into(),
        Recompute::Block if config.partition_checkpoints => "recompute from shares".into(),
        Recompute::Block => "recompute".into(),
    });
    for (kept, what) in
        [(config.activations.attention(), "attention"), (config.activations.mlp(), "the MLP")]
    {
        let KeptBlocks { gpu, host } = kept;
        if gpu + host > 0 {
            words
                .push(format!("activations of {what} on GPU for {gpu} blocks, on host for {host}"));
        }
    }
    if config.parallel.sequence && config.parallel.tensor > 1 {
        words.push("sequence".into());
    }
    words.push(match built.accumulation {
        GradAccumulation::None => "one pass".into(),
        GradAccumulation::Device | GradAccumulation::Shared => "sums on GPU".into(),
        GradAccumulation::Host => "sums on host".into(),
    });
    words.push(match config.offload.optimizer {
        Placement::Host => "optimizer on host".into(),
        Placement::Device => "optimizer on GPU".into(),
        Placement::Split { device_fraction } => {
            format!("{:.1} % of the optimizer on GPU", 100.0 * device_fraction)
        }
    });
    let Ring { buffers: slots, resident } = built.decoder.shape().ring;
    if slots > 0 {
        words.push(format!("{resident} of {} blocks stay on GPU", config.model.layers));
    } else if vertical_width(config) > 1 {
        words.push(format!("{} first forward passes together", vertical_width(config)));
    }
    if speculated_share(config) > 0.0 {
        words.push(format!("{:.0} % updated ahead", 100.0 * speculated_share(config)));
    }
    words.join(", ")
}
