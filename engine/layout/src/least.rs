//! The least memory that any layout of a config takes, in a time that does not depend on how many blocks the model has: two models of
//! a few blocks are laid out, and each further block takes what the last one of these did.

use crate::LocalMachine;
use crate::build::{LayoutBuilder, RankLayout, device_limit};
use config::{Config, DeviceConfig, ParameterPlace, Placement, Transfer, UpdateMode};
use device::Arena;
use tensor_parallel::Ring;

/// Bytes of a rank: no layout takes fewer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeastBytes {
    /// Of the GPU.
    pub device: u64,
    /// Of the host.
    pub pinned: u64,
    /// Of both together.
    pub both: u64,
    /// Bytes that the GPU may hold at most, where that is known.
    pub limit: Option<u64>,
}

/// Bytes of an arena by which the share of a block may be rounded up: three words for each of its parts stand among those of all blocks.
const ROUNDING: u64 = 3 * 256;

/// Numbers of blocks that a ring has where the config leaves it open, at least.
const LEAST_RING: usize = 2;

/// What `config` takes at least, whatever is chosen for it.
pub fn least_bytes(config: &Config, machine: &LocalMachine) -> LeastBytes {
    let all: Vec<LeastBytes> =
        forms(config).iter().flat_map(|form| of_form(form, config, machine)).collect();
    let least = |bytes: fn(&LeastBytes) -> u64| all.iter().map(bytes).min().unwrap_or(0);
    LeastBytes {
        device: least(|of| of.device),
        pinned: least(|of| of.pinned),
        both: least(|of| of.both),
        limit: all.iter().map(|of| of.limit).max().flatten(),
    }
}

/// The optimizer in one place: what it takes in two is between the two. Nothing is updated ahead, which only takes more.
fn forms(config: &Config) -> Vec<Config> {
    let mut form = config.clone();
    if form.offload.update == UpdateMode::Speculative {
        form.offload.update = UpdateMode::Overlapped;
    }
    // Pieces of buckets cost time here, and memory only where one of them has a buffer.
    if form.offload.transfer == Transfer::Streamed && !form.parallel.reduce_fp32 {
        form.offload.bucket_elements = usize::MAX / 2;
    }
    let places = match form.offload.optimizer {
        Placement::Split { .. } => &[Placement::Host, Placement::Device][..],
        _ => return vec![form],
    };
    let placed = |place: &Placement| {
        let mut form = form.clone();
        form.offload.optimizer = *place;
        form
    };
    places.iter().map(placed).collect()
}

/// The least of each way to sum micro-batches that `config` leaves open.
fn of_form(form: &Config, config: &Config, machine: &LocalMachine) -> Vec<LeastBytes> {
    let ring = match form.offload.parameters {
        ParameterPlace::Device => Ring::NONE,
        ParameterPlace::Host => {
            Ring { buffers: form.offload.ring.unwrap_or(LEAST_RING), resident: 0 }
        }
    };
    let (blocks, few) = (form.model.layers, ring.buffers.max(2));
    let with = |blocks: usize, sum| {
        let mut few = form.clone();
        few.model.layers = blocks;
        (few.offload.ring, few.offload.resident_blocks) = (None, None);
        let builder = LayoutBuilder::of_least_threads(&few, machine);
        let layout = builder.plan_layout(sum, ring);
        (layout.plan.bytes(Arena::Device), layout.plan.bytes(Arena::Pinned), layout)
    };
    let sums = LayoutBuilder::of_least_threads(config, machine).accumulations(ring);
    let of_sum = |sum| {
        let first = with(blocks.min(few), sum);
        let limit = limit(form, &first.2);
        let (device, pinned) = if blocks <= few {
            (first.0, first.1)
        } else {
            let (next, more) = (with(few + 1, sum), (blocks - few) as u64);
            let all = |first: u64, next: u64| {
                first + more * next.saturating_sub(first).saturating_sub(ROUNDING)
            };
            (all(first.0, next.0), all(first.1, next.1))
        };
        LeastBytes { device, pinned, both: device + pinned, limit }
    };
    sums.into_iter().map(of_sum).collect()
}

/// Of real GPUs the limit of `layout`, which has fewer page tables: those of more blocks lower it.
fn limit(config: &Config, layout: &RankLayout) -> Option<u64> {
    match &config.device {
        DeviceConfig::Cpu { memory, .. } => Some(*memory),
        DeviceConfig::Sim { .. } | DeviceConfig::Cuda => device_limit(config, layout),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::build::lay_out;

    fn config(name: &str, sets: &[&str]) -> Option<Config> {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs");
        let sets: Vec<String> = sets.iter().map(ToString::to_string).collect();
        config::load(&folder.join(name), &sets).ok().map(|loaded| loaded.config)
    }

    /// Never more than what is laid out, and near it where nothing is left open.
    #[test]
    fn no_layout_takes_less() {
        let machine = LocalMachine::default();
        let (mut looked, mut near) = (0, 0);
        let names = [
            "quickstart.ron",
            "small-text-llama.ron",
            "h100-1.3b.ron",
            "qwen3-14b-one-gpu.ron",
            "dgx2-70b.ron",
        ];
        let all: [&[&str]; 13] = [
            &[],
            &["offload.update=Speculative", "offload.optimizer=Host"],
            &["offload.update=Delayed(after_step: 0)", "offload.optimizer=Host"],
            &["offload.optimizer=Split(device_fraction: 0.3)"],
            &["offload.optimizer=Device"],
            &["parallel.reduce_fp32=true", "offload.bucket_elements=1024"],
            &["offload.optimizer=Host", "batch.global=64", "batch.micro=1"],
            &[
                "offload.optimizer=Host",
                "batch.global=64",
                "batch.micro=1",
                "offload.accumulate=Host",
            ],
            &[
                "offload.parameters=Host",
                "offload.optimizer=Host",
                "recompute=Block",
                "host_checkpoints=true",
            ],
            &[
                "offload.parameters=Host",
                "offload.ring=4",
                "offload.optimizer=Host",
                "recompute=Block",
            ],
            &["recompute=Block", "parallel.sequence=false", "partition_checkpoints=true"],
            &["recompute=Selective", "model.seq_len=128"],
            &["offload.transfer=Blocking", "offload.update=Serial", "offload.optimizer=Host"],
        ];
        for name in names {
            for sets in all {
                for layers in [1, 2, 3, 5, 17, 64] {
                    let layers = format!("model.layers={layers}");
                    let Some(config) = config(name, &[sets, &[&layers]].concat()) else { continue };
                    let (least, built) =
                        (least_bytes(&config, &machine), lay_out(&config, &machine));
                    let (device, pinned) =
                        (built.plan.bytes(Arena::Device), built.plan.bytes(Arena::Pinned));
                    let what =
                        format!("{name} {sets:?} {layers}: {least:?} of {device} and {pinned}");
                    assert!(least.device <= device && least.pinned <= pinned, "{what}");
                    assert!(least.both <= device + pinned, "{what}");
                    assert!(least.device > 0 && least.pinned > 0, "{what}");
                    looked += 1;
                    near += usize::from(least.both as f64 > 0.97 * (device + pinned) as f64);
                }
            }
        }
        assert!(looked > 150 && near > looked / 3, "{near} near of {looked}");
    }
}
