//! Enumerates the layouts of a search: grids of ranks, micro-batches, and memory choices.

use crate::changes::{self, CHECKPOINTS, PLACES, divisors, grids};
use config::{Accumulate, Activations, Config, ParameterPlace, Recompute, UpdateMode};
use layout::LocalMachine;
use topology::counted;

/// All layouts that the model and the batch of `given` allow on `world` ranks.
pub(super) fn enumerate(given: &Config, machine: &LocalMachine, world: usize) -> Vec<Config> {
    let mut all = Vec::new();
    for (tensor, data) in grids(world) {
        for micro in divisors(given.batch.global / data) {
            let mut of_grid = given.clone();
            (of_grid.parallel.tensor, of_grid.parallel.data) = (tensor, data);
            (of_grid.batch.micro, of_grid.offload.first_forward) = (micro, 1);
            of_grid.offload.update = plain(given.offload.update);
            if of_grid.activations == Activations::Auto {
                of_grid.activations = Activations::Uniform;
            }
            // The global batch does not change: micro x data divides it.
            let one_pass = micro * data == given.batch.global;
            all.extend(
                memory_choices(&of_grid, one_pass).into_iter().filter(|c| machine.is_sound(c)),
            );
        }
    }
    all
}

/// Reason why `world` GPUs have no layout. Remedies are fewer GPUs or the nearest valid batch.
pub(super) fn no_layout(given: &Config, machine: &LocalMachine, world: usize) -> String {
    let has = |config: &Config, world| !enumerate(config, machine, world).is_empty();
    let mut remedies: Vec<String> = Vec::new();
    if let Some(fewer) = (1..world).rev().find(|fewer| has(given, *fewer)) {
        remedies.push(format!("--gpus {fewer}"));
    }
    let global = given.batch.global;
    let below = global / world * world;
    let mut near = vec![below, below + world];
    near.sort_by_key(|batch| batch.abs_diff(global));
    let with_batch = |batch: &usize| {
        let mut config = given.clone();
        config.batch.global = *batch;
        *batch > 0 && machine.is_sound(&config) && has(&config, world)
    };
    if let Some(batch) = near.into_iter().find(with_batch) {
        remedies.push(format!("--set batch.global={batch}"));
    }
    let remedies = match remedies.join(", or ") {
        none if none.is_empty() => String::new(),
        some => format!("; say {some}"),
    };
    let heads = given.model.heads;
    let divides = |&(tensor, data): &(usize, usize)| {
        heads.is_multiple_of(tensor) && global.is_multiple_of(data)
    };
    let why = match grids(world).into_iter().find(divides) {
        None => {
            let (batch, heads) = (counted(global, "sample"), counted(heads, "head"));
            format!("DP divides the batch of {batch}, and TP the {heads}")
        }
        // Another rule, such as whole machines, refuses the grids: report the first grid's.
        Some((tensor, data)) => {
            let mut config = given.clone();
            (config.parallel.tensor, config.parallel.data) = (tensor, data);
            (config.parallel.sequence, config.batch.micro) = (false, 1);
            let wrong = machine.first_broken(&config);
            let wrong = wrong.unwrap_or_else(|| "it changes the batch".into());
            format!("with TP {tensor} x DP {data}, {wrong}")
        }
    };
    format!("{} have no layout of TP x DP: {why}{remedies}", counted(world, "GPU"))
}

/// Update mode of every layout before choices. Speculative updates are a later choice.
const fn plain(update: UpdateMode) -> UpdateMode {
    match update {
        UpdateMode::Speculative | UpdateMode::Auto => UpdateMode::Overlapped,
        update => update,
    }
}

/// All layouts with the grid and the micro-batch size of `of_grid`. These layouts differ in the
/// places of data, in activation checkpoints and in sequence parallelism.
fn memory_choices(of_grid: &Config, one_pass: bool) -> Vec<Config> {
    // A single rank has nothing to split, and a single pass has nothing to accumulate.
    let split = if of_grid.parallel.tensor > 1 { &[false, true][..] } else { &[false] };
    let places = PLACES.iter().filter(|(_, sum)| !(one_pass && *sum == Accumulate::Host));
    let mut all = Vec::new();
    for &(optimizer, accumulate) in places {
        let on_one = split.len() == 1;
        for (recompute, shares) in CHECKPOINTS.into_iter().filter(|(_, s)| !(*s && on_one)) {
            for &sequence in split {
                let mut c = of_grid.clone();
                (c.offload.optimizer, c.offload.accumulate) = (optimizer, accumulate);
                let own = c.partition_checkpoints && recompute == Recompute::Block;
                changes::set_recompute(&mut c, recompute, if on_one { own } else { shares });
                if !on_one {
                    c.parallel.sequence = sequence;
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
