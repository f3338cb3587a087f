//! A layout in words.

use crate::config::{Config, Placement, Recompute};
use crate::layout::build::{Built, first_forward, share_ahead};
use offload::Sum;
use tensor_parallel::Ring;

/// What a layout recomputes, splits, and puts where.
pub(crate) fn words(config: &Config, built: &Built) -> String {
    let mut words: Vec<String> = Vec::new();
    words.push(match config.recompute {
        Recompute::None => "no recomputation".into(),
        Recompute::Selective => "selective recomputation".into(),
        Recompute::Block if config.partition_checkpoints => "recompute from shares".into(),
        Recompute::Block => "recompute".into(),
    });
    if config.parallel.sequence && config.parallel.tensor > 1 {
        words.push("sequence".into());
    }
    words.push(match built.sum {
        Sum::None => "one pass".into(),
        Sum::Device | Sum::InTurns => "sums on GPU".into(),
        Sum::Host => "sums on host".into(),
    });
    words.push(match config.offload.optimizer {
        Placement::Host => "optimizer on host".into(),
        Placement::Device => "optimizer on GPU".into(),
        Placement::Split { device_fraction } => {
            format!("{:.1} % of the optimizer on GPU", 100.0 * device_fraction)
        }
    });
    let Ring { slots, resident } = built.gpt.shape().ring;
    if slots > 0 {
        words.push(format!("{resident} of {} blocks stay on GPU", config.model.layers));
    } else if first_forward(config) > 1 {
        words.push(format!("{} first forward passes together", first_forward(config)));
    }
    if share_ahead(config) > 0.0 {
        words.push(format!("{:.0} % updated ahead", 100.0 * share_ahead(config)));
    }
    words.join(", ")
}
