//! Least memory of all layouts of a config. The time does not depend on the number of blocks: two
//! models of a few blocks are laid out, and each further block of a form counts like the last one.

use crate::LocalMachine;
use crate::build::{LayoutBuilder, RankLayout, device_limit};
use config::layer_pattern::DELTA;
use config::{Activations, Config, DeviceConfig, ParameterPlace, Placement, Transfer, UpdateMode};
use device::Arena;
use tensor_parallel::Ring;

/// Lower bounds of the bytes of a rank: no layout needs fewer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeastBytes {
    /// Least bytes of the GPU.
    pub device: u64,
    /// Least bytes of the host.
    pub pinned: u64,
    /// Least bytes of the GPU and the host together.
    pub both: u64,
    /// Most bytes that the GPU can hold; `None` if unknown.
    pub limit: Option<u64>,
}

/// Most bytes by which alignment can raise the share of a block in an arena: three tensors hold
/// words for the parts of all blocks, and each tensor is rounded up.
const ROUNDING: u64 = 3 * 256;

/// Least number of blocks in a ring, if the config gives no number.
const LEAST_RING: usize = 2;

/// Numbers of blocks of each form: with attention and one MLP, with attention and experts, with a
/// gated delta net and one MLP, with a gated delta net and experts.
#[derive(Clone, Copy)]
struct BlockCounts([usize; 4]);

impl BlockCounts {
    fn of(config: &Config) -> Self {
        let (m, mut counts) = (&config.model, [0; 4]);
        for (layer, letter) in m.layer_letters().enumerate() {
            let has_experts = m.experts.as_ref().is_some_and(|experts| experts.are_in(layer));
            counts[2 * usize::from(letter == DELTA) + usize::from(has_experts)] += 1;
        }
        Self(counts)
    }

    /// Gives `config` this number of blocks of each form, those with attention first.
    fn apply(self, config: &mut Config) {
        let Self([dense, sparse, dense_delta, sparse_delta]) = self;
        let (attention, delta) = (dense + sparse, dense_delta + sparse_delta);
        let m = &mut config.model;
        if m.delta_net.is_some() {
            let letters = m.layer_letters().filter(|letter| *letter != DELTA).take(attention);
            m.layer_pattern = letters.chain(std::iter::repeat_n(DELTA, delta)).collect();
        }
        m.layers = attention + delta;
        if let Some(experts) = &mut m.experts {
            experts.dense_layers = (0..dense).chain(attention..attention + dense_delta).collect();
        }
    }
}

/// Least memory that `config` needs, over all choices that the config leaves open. It is 0 with frozen
/// tensors: their globs name layers, whose numbers the few blocks of the estimate do not have.
pub fn least_bytes(config: &Config, machine: &LocalMachine) -> LeastBytes {
    if !config.optimizer.frozen.is_empty() {
        return LeastBytes { device: 0, pinned: 0, both: 0, limit: None };
    }
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

/// Configs with the optimizer in one place and the least memory. A split optimizer needs an amount
/// between both places. A speculative update becomes `Overlapped`, which never needs more.
fn forms(config: &Config) -> Vec<Config> {
    let mut form = config.clone();
    if form.offload.update == UpdateMode::Speculative {
        form.offload.update = UpdateMode::Overlapped;
    }
    // Many pieces would slow this function down. They change memory only if a piece has its own
    // buffer.
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

/// Least memory of each way to sum micro-batches that `config` leaves open.
fn of_form(form: &Config, config: &Config, machine: &LocalMachine) -> Vec<LeastBytes> {
    let ring = match form.offload.parameters {
        ParameterPlace::Device => Ring::NONE,
        ParameterPlace::Host => {
            Ring { buffers: form.offload.ring.unwrap_or(LEAST_RING), resident: 0 }
        }
    };
    let (blocks, few) = (BlockCounts::of(form), ring.buffers.max(2));
    // Blocks that keep their activations differ from each other, so further blocks count as if all
    // blocks were recomputed. So do blocks of several forms, whose order changes here.
    let forms = blocks.0.iter().filter(|count| **count > 0).count();
    let is_changed = forms > 1 || blocks.0.iter().any(|count| *count > few);
    let has_tiers = form.activations != Activations::Uniform && is_changed;
    let with = |blocks: BlockCounts, sum| {
        let mut few = form.clone();
        blocks.apply(&mut few);
        if has_tiers {
            few.activations = Activations::Uniform;
        }
        (few.offload.ring, few.offload.resident_blocks) = (None, None);
        let builder = LayoutBuilder::of_least_threads(&few, machine);
        let layout = builder.plan_layout(sum, ring);
        (layout.plan.bytes(Arena::Device), layout.plan.bytes(Arena::Pinned), layout)
    };
    let sums = LayoutBuilder::of_least_threads(config, machine).accumulations(ring);
    let of_sum = |sum| {
        let start = BlockCounts(blocks.0.map(|count| count.min(few)));
        let first = with(start, sum);
        let limit = limit(form, &first.2);
        let (mut device, mut pinned) = (first.0, first.1);
        for (form, count) in blocks.0.into_iter().enumerate() {
            if count > few {
                let mut one_more = start;
                one_more.0[form] += 1;
                let (next, more) = (with(one_more, sum), (count - few) as u64);
                let growth = |first: u64, next: u64| {
                    more * next.saturating_sub(first).saturating_sub(ROUNDING)
                };
                device += growth(first.0, next.0);
                pinned += growth(first.1, next.1);
            }
        }
        if has_tiers {
            // With tiers, all norms have one output. Without them, the two norms of blocks and the
            // final norm have an output each.
            let shape = first.2.decoder.shape();
            let normed = (shape.tokens() * shape.hidden) as u64 * shape.dtype.bytes();
            device = device.saturating_sub(2 * normed + ROUNDING);
        }
        LeastBytes { device, pinned, both: device + pinned, limit }
    };
    sums.into_iter().map(of_sum).collect()
}

/// Most bytes that a GPU can hold. On real GPUs this is the limit of `layout`, which has few
/// blocks: the page tables of more blocks lower the limit.
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

    /// The least memory never exceeds a layout. It is close if the config decides everything.
    #[test]
    fn no_layout_takes_less() {
        let machine = LocalMachine::default();
        let (mut looked, mut near) = (0, 0);
        let names = [
            "quickstart.ron",
            "small-text-llama.ron",
            "h100-1.3b.ron",
            "qwen3-14b-one-gpu.ron",
            "qwen3.5-9b-one-gpu.ron",
            "qwen3.5-35b-a3b.ron",
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

    /// Blocks that keep their activations never need less than the bound, which recomputes them. A
    /// narrow MLP has fewer activations than a norm has outputs.
    #[test]
    fn no_layout_with_tiers_takes_less() {
        let machine = LocalMachine::default();
        let mut looked = 0;
        for (tiers, ffn_hidden) in [
            ("gpu_blocks: 1", 512),
            ("host_blocks: 1", 512),
            ("gpu_blocks: 1, host_blocks: 2, host_mlps: 1", 512),
            ("gpu_mlps: 1", 64),
            ("host_mlps: 1", 64),
        ] {
            for parameters in ["Device", "Host"] {
                for layers in [1, 2, 3, 5, 17] {
                    let sets = [
                        format!("model.layers={layers}"),
                        format!("model.ffn_hidden={ffn_hidden}"),
                        format!("activations=Tiers({tiers})"),
                        format!("offload.parameters={parameters}"),
                    ];
                    let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
                    let sets = [&sets[..], &["recompute=Block", "offload.optimizer=Host"]].concat();
                    let Some(config) = config("quickstart.ron", &sets) else { continue };
                    let least = least_bytes(&config, &machine);
                    let built = lay_out(&config, &machine);
                    let bytes = [Arena::Device, Arena::Pinned].map(|arena| built.plan.bytes(arena));
                    let what = format!("{tiers} {parameters} {layers}: {least:?} of {bytes:?}");
                    assert!(least.device <= bytes[0] && least.pinned <= bytes[1], "{what}");
                    assert!(least.both <= bytes[0] + bytes[1], "{what}");
                    looked += 1;
                }
            }
        }
        assert!(looked >= 40, "{looked}");
    }
}
