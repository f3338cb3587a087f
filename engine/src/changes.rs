//! Changes to a config that keep its model, batch and results, and the `--set` arguments that make them.

use crate::build::world_size;
use crate::config::{Accumulate, Config, DeviceConfig, Loaded, OffloadConfig, Origin};
use crate::config::{Placement, Recompute, placement_text};

/// What makes `loaded` the config `changed`, as `key=value`. Values that would follow from a changed one, such as the
/// global batch where the file leaves it out, are held.
pub fn sets(loaded: &Loaded, changed: &Config) -> Vec<String> {
    let given = &loaded.config;
    let mut sets = Vec::new();
    let mut set = |key: &str, was: String, is: String| {
        if was != is {
            sets.push(format!("{key}={is}"));
        }
    };
    let (old, new) = (&given.parallel, &changed.parallel);
    set("parallel.tensor", old.tensor.to_string(), new.tensor.to_string());
    set("parallel.data", old.data.to_string(), new.data.to_string());
    set("batch.micro", given.batch.micro.to_string(), changed.batch.micro.to_string());
    set("recompute", format!("{:?}", given.recompute), format!("{:?}", changed.recompute));
    let (old_shares, shares) = (given.partition_checkpoints, changed.partition_checkpoints);
    set("partition_checkpoints", old_shares.to_string(), shares.to_string());
    let (old_host, host) = (given.host_checkpoints, changed.host_checkpoints);
    set("host_checkpoints", old_host.to_string(), host.to_string());
    set("parallel.sequence", old.sequence.to_string(), new.sequence.to_string());
    let (old, new) = (&given.offload, &changed.offload);
    set("offload.optimizer", placement_text(old.optimizer), placement_text(new.optimizer));
    set("offload.accumulate", format!("{:?}", old.accumulate), format!("{:?}", new.accumulate));
    let together = |o: &OffloadConfig| o.first_forward.to_string();
    set("offload.first_forward", together(old), together(new));
    set("model.layers", given.model.layers.to_string(), changed.model.layers.to_string());
    let pass = |c: &Config| c.batch.micro * c.parallel.data;
    if is_derived(loaded, "batch.global") && pass(given) != pass(changed) {
        sets.push(format!("batch.global={}", changed.batch.global));
    }
    if let DeviceConfig::Cpu { count, .. } = changed.device
        && !is_derived(loaded, "device.count")
        && world_size(given) != world_size(changed)
    {
        sets.push(format!("device.count={count}"));
    }
    sets
}

fn is_derived(loaded: &Loaded, key: &str) -> bool {
    let origin = loaded.origins.iter().find(|(name, ..)| name == key).map(|(.., origin)| origin);
    matches!(origin, Some(Origin::Derived(_)))
}

/// `--set a=1 --set 'b=C(d: 2)'`, for a shell.
pub fn arguments(sets: &[String]) -> String {
    let quoted = |set: &String| if set.contains(' ') { format!("'{set}'") } else { set.clone() };
    let all: Vec<String> = sets.iter().map(|set| format!("--set {}", quoted(set))).collect();
    all.join(" ")
}

/// How many settings differ; a TP x DP grid is one.
pub fn count(given: &Config, changed: &Config) -> usize {
    let (old, new) = (&given.parallel, &changed.parallel);
    let differ = [
        (old.tensor, old.data) != (new.tensor, new.data),
        old.sequence != new.sequence,
        given.batch.micro != changed.batch.micro,
        given.recompute != changed.recompute,
        given.partition_checkpoints != changed.partition_checkpoints,
        given.host_checkpoints != changed.host_checkpoints,
        given.offload.optimizer != changed.offload.optimizer,
        given.offload.accumulate != changed.offload.accumulate,
        given.offload.first_forward != changed.offload.first_forward,
    ];
    differ.into_iter().filter(|differs| *differs).count()
}

/// Every TP x DP grid of `world` ranks.
pub fn grids(world: usize) -> Vec<(usize, usize)> {
    divisors(world).into_iter().map(|tensor| (tensor, world / tensor)).collect()
}

/// Divisors in ascending order; none of 0.
pub fn divisors(n: usize) -> Vec<usize> {
    let small: Vec<usize> =
        (1..).take_while(|d| d * d <= n).filter(|d| n.is_multiple_of(*d)).collect();
    let large = small.iter().rev().filter(|d| *d * *d != n).map(|d| n / d);
    small.iter().copied().chain(large).collect()
}

/// What of the activations is kept: (recompute, partition_checkpoints).
pub const CHECKPOINTS: [(Recompute, bool); 3] =
    [(Recompute::None, false), (Recompute::Block, false), (Recompute::Block, true)];

/// Where the optimizer and the sums of micro-batches can be.
pub const PLACES: [(Placement, Accumulate); 3] = [
    (Placement::Host, Accumulate::Device),
    (Placement::Host, Accumulate::Host),
    (Placement::Device, Accumulate::Device),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divisors_are_all_there_in_order() {
        for n in 0..200 {
            let all: Vec<usize> = (1..=n).filter(|d| n % d == 0).collect();
            assert_eq!(divisors(n), all, "{n}");
        }
        assert_eq!(grids(6), [(1, 6), (2, 3), (3, 2), (6, 1)]);
    }
}
