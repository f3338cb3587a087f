//! Every layout that is looked at: grids of ranks, micro-batches, and what these leave open.

use crate::config::{Accumulate, Config, ParameterPlace, Recompute, UpdateMode};
use crate::predict::changes::{self, CHECKPOINTS, PLACES, divisors, grids};

/// Everything that the model and the batch of `given` allow on `world` ranks.
pub(super) fn enumerate(given: &Config, world: usize) -> Vec<Config> {
    let mut all = Vec::new();
    for (tensor, data) in grids(world) {
        for micro in divisors(given.batch.global / data) {
            let mut of_grid = given.clone();
            (of_grid.parallel.tensor, of_grid.parallel.data) = (tensor, data);
            (of_grid.batch.micro, of_grid.offload.first_forward) = (micro, 1);
            of_grid.offload.update = plain(given.offload.update);
            // The batch does not change: micro x data divides it.
            let one_pass = micro * data == given.batch.global;
            all.extend(memory_choices(&of_grid, one_pass).into_iter().filter(Config::is_sound));
        }
    }
    all
}

/// The update that every layout starts from: a share ahead of the decision is a choice.
const fn plain(update: UpdateMode) -> UpdateMode {
    match update {
        UpdateMode::Speculative | UpdateMode::Auto => UpdateMode::Overlapped,
        update => update,
    }
}

/// What a grid and a micro-batch leave open.
fn memory_choices(of_grid: &Config, one_pass: bool) -> Vec<Config> {
    // On one rank there is nothing to split, in one pass nothing to sum.
    let split = if of_grid.parallel.tensor > 1 { &[false, true][..] } else { &[false] };
    let places = PLACES.iter().filter(|(_, sum)| !(one_pass && *sum == Accumulate::Host));
    let mut all = Vec::new();
    for &(optimizer, accumulate) in places {
        let on_one = split.len() == 1;
        for (recompute, shares) in CHECKPOINTS.into_iter().filter(|(_, s)| !(*s && on_one)) {
            for &sequence in split {
                let mut c = of_grid.clone();
                (c.offload.optimizer, c.offload.accumulate) = (optimizer, accumulate);
                c.recompute = recompute;
                if !on_one {
                    (c.parallel.sequence, c.partition_checkpoints) = (sequence, shares);
                } else if recompute != Recompute::Block {
                    c.partition_checkpoints = false;
                }
                if c.offload.parameters == ParameterPlace::Host {
                    changes::keep_parameters(&mut c);
                }
                all.push(c);
            }
        }
    }
    let mut streamed = of_grid.clone();
    changes::stream_parameters(&mut streamed);
    streamed.partition_checkpoints = false;
    for &sequence in split {
        streamed.parallel.sequence = sequence;
        all.push(streamed.clone());
    }
    all
}
