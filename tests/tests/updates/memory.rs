//! A virtual GPU enforces its memory limit, and larger models train within the limit if the
//! optimizer is on the host.
#![allow(missing_docs, reason = "a test")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "helpers of tests")]
#![allow(clippy::print_stdout, reason = "figures for --nocapture")]
#![allow(clippy::allow_attributes, reason = "the lines above")]

use config::{Config, DeviceConfig};
use device::{Arena, Error};
use engine::run::{RunError, RunOptions};
use layout::build::{RankLayout, shape};
use predict::plan::memory_report;
use tensor_parallel::Ring;
use tests::compare::assert_same_bits;
use tests::{RunRecord, config, lay_out, short_text, try_run_on};

/// Memory limit in bytes: 3.9 MB for kernel scratch, 1 MB for buckets, activations and embedding.
const LIMIT: u64 = 32 << 20;

/// Config with blocks of 198 thousand parameters. The activations are small in comparison.
const MODEL: &str = r#"(
    device: Cpu(count: 1, memory: "32MiB", threads: 1),
    model: (layers: 1, hidden: 128, heads: 4, seq_len: 16),
    precision: Bf16,
    recompute: Block,
    optimizer: (lr: 1e-3),
    data: (train: "unused"),
    train: (steps: 2, seed: 7),
)"#;

fn of(placement: &str, layers: usize) -> (Config, RankLayout) {
    let sets = [format!("model.layers={layers}"), format!("offload.optimizer={placement}")];
    let config = config(MODEL, &sets);
    let built = lay_out(&config);
    (config, built)
}

fn trained((config, built): &(Config, RankLayout)) -> Result<RunRecord, Box<RunError>> {
    try_run_on(&short_text(), config, built, &RunOptions::default())
}

/// Number of parameters of the deepest model that trains under the limit. Trains this model, and
/// asserts that one more block does not fit.
fn largest(placement: &str) -> u64 {
    let fits = |layers: &usize| of(placement, *layers).1.plan.bytes(Arena::Device) <= LIMIT;
    let counts: Vec<usize> = (1..256).collect();
    let layers = counts.partition_point(fits);
    assert!((1..counts.len()).contains(&layers), "{placement}: {layers} blocks");
    let model = of(placement, layers);
    let ran = trained(&model).unwrap_or_else(|e| panic!("{placement} {layers}: {e}"));
    assert!(ran.outcome.complete && ran.steps.len() == 2 && !ran.steps.iter().any(|s| s.skipped));
    let error = trained(&of(placement, layers + 1)).expect_err("it must not fit");
    assert!(matches!(error.error, Error::OutOfMemory(_)), "{error}");
    let parameters = shape(&model.0).parameters();
    println!("{placement}: {layers} blocks, {parameters} parameters");
    parameters
}

#[test]
fn under_one_limit_the_optimizer_on_the_host_trains_five_times_the_parameters() {
    // For each parameter, the GPU holds 2 bytes, or 2 + 12 for states + 2 for the gradient. Buckets
    // and scratch are the same in both cases.
    let (on_device, on_host) = (largest("Device"), largest("Host"));
    println!("{:.2} times the parameters", on_host as f64 / on_device as f64);
    assert!(on_host >= 5 * on_device, "{on_host} against {on_device}");
}

#[test]
fn a_model_that_does_not_fit_is_told_what_it_wanted_what_was_free_and_which_pool_is_largest() {
    let model = of("Device", 40);
    let wanted = model.1.plan.bytes(Arena::Device);
    let error = trained(&model).expect_err("it must not fit");
    let Error::OutOfMemory(oom) = &error.error else { panic!("{error}") };
    assert_eq!((oom.rank, oom.arena, oom.wanted, oom.limit), (0, Arena::Device, wanted, LIMIT));
    let (taken, tensor) = &oom.free_at;
    assert!(*taken <= LIMIT && !tensor.is_empty());
    let entry = model.1.plan.entries().iter().find(|e| e.name == *tensor).unwrap();
    assert!(entry.range.end > LIMIT && entry.range.start == *taken);
    assert_eq!(oom.pools.iter().map(|(_, bytes)| bytes).sum::<u64>(), wanted);
    assert_eq!(oom.pools[0].0, "optimizer states");
    let text = error.to_string();
    for part in
        ["out of device memory on rank 0", "wanted", "limit 32.00 MiB", "were free", "by pool"]
    {
        assert!(text.contains(part), "no `{part}` in: {text}");
    }
    let at = |pool: &str| text.find(pool).unwrap_or_else(|| panic!("no `{pool}` in: {text}"));
    assert!(at("optimizer states") < at("gradient"));
}

/// Memory report of a model on an H100. With one micro-batch there is no sum of gradients.
fn on_an_h100(optimizer: &str, layers: usize, micro_batches: usize) -> predict::plan::Report {
    let text = r#"(
        model: (layers: 1, hidden: 4096, heads: 32, seq_len: 1024, vocab: 50257),
        precision: Bf16, recompute: Block, batch: (micro: 1), data: (train: "unused"), train: (steps: 2),
    )"#;
    let box_ = concat!(env!("CARGO_MANIFEST_DIR"), "/../configs/boxes/h100-128gib.ron");
    let config = config(
        text,
        &[
            format!("device=Sim(box: {box_:?})"),
            format!("offload.optimizer={optimizer}"),
            format!("model.layers={layers}"),
            format!("batch.global={micro_batches}"),
        ],
    );
    memory_report(&config, &lay_out(&config))
}

/// The test only makes plans. 128 GiB of host memory bound the optimizer on the host, which needs
/// 18 bytes for each parameter.
#[test]
fn an_h100_beside_128_gib_trains_seven_billion_parameters_with_the_optimizer_on_the_host() {
    let largest = |optimizer: &str, micro_batches| {
        let fits = |layers: &usize| on_an_h100(optimizer, *layers, micro_batches).fits;
        let layers = (1..100).take_while(fits).last().expect("not even one block");
        let plan = on_an_h100(optimizer, layers, micro_batches);
        let more = on_an_h100(optimizer, layers + 1, micro_batches);
        let billions = plan.parameters as f64 / 1e9;
        let each = plan.gpu.bytes as f64 / plan.parameters as f64;
        let bound = more.binding.what;
        println!("{optimizer}: {layers} blocks, {billions:.2} G, {each:.2} bytes each, {bound}");
        (plan, billions, each, bound)
    };
    let (plan, on_host, _, bound) = largest("Host", 2);
    assert!(on_host >= 7.0 && plan.accumulate == "device" && bound != "gpu", "{on_host} {bound}");
    // A parameter needs 2 bytes, 12 for states, and 2 for its gradient or 4 for a sum.
    for (micro_batches, bytes) in [(1, 16.0), (2, 18.0)] {
        let (plan, on_device, each, bound) = largest("Device", micro_batches);
        assert!((bytes..bytes + 0.6).contains(&each) && bound == "gpu", "{each} {bound}");
        let limit = plan.gpu.limit.expect("a limit") as f64 / 1e9;
        assert!(on_device <= limit / bytes && on_device > 0.92 * limit / bytes, "{on_device}");
        assert!(on_host > 1.3 * on_device);
    }
}

/// The blocks are large in comparison with the token table and the scratch of kernels.
#[test]
fn parameters_of_four_times_a_gpus_memory_train_from_the_host_to_the_bits_of_resident_ones() {
    let of = |memory: &str, parameters: &str| {
        let sets = ["hidden=160", "vocab=256", "layers=64"].map(|set| format!("model.{set}"));
        let more =
            [format!("device.memory=\"{memory}\""), format!("offload.parameters={parameters}")];
        let config = config(MODEL, &[&sets[..], &more].concat());
        let built = lay_out(&config);
        (config, built)
    };
    let small = of("9MiB", "Host");
    let DeviceConfig::Cpu { memory, .. } = &small.0.device else { unreachable!("a virtual GPU") };
    assert!(2 * shape(&small.0).parameters() >= 4 * *memory, "{}", shape(&small.0).parameters());
    let refused = trained(&of("9MiB", "Device")).expect_err("it must not fit");
    assert!(matches!(refused.error, Error::OutOfMemory(_)), "{refused}");
    let report = memory_report(&small.0, &small.1);
    assert!(report.fits && report.gpu.bytes <= *memory, "{}", report.binding.words);
    let resident = trained(&of("256MiB", "Device")).unwrap_or_else(|e| panic!("{e}"));
    let streamed = trained(&small).unwrap_or_else(|e| panic!("{e}"));
    assert_same_bits(&resident, &streamed, "four times a GPU's memory");
    // The GPU keeps as many blocks as it has memory for.
    let room = of("30MiB", "Host");
    let Ring { buffers: slots, resident: stay } = room.1.decoder.shape().ring;
    assert!(slots == 3 && (10..90).contains(&stay), "{slots} {stay}");
    let block = room.1.decoder.params(1).bytes();
    let left = (30 << 20) - room.1.plan.bytes(Arena::Device);
    assert!(left < 2 * block, "{left} bytes are left, a block has {block}");
}

#[test]
fn every_byte_of_the_limit_counts() {
    needs_what_is_planned(of("Host", 2));
}

/// Asserts that the config trains in the planned bytes, and fails with one byte less.
fn needs_what_is_planned((mut config, built): (Config, RankLayout)) {
    let bytes = built.plan.bytes(Arena::Device);
    let mut with = |limit: u64| {
        let DeviceConfig::Cpu { memory, .. } = &mut config.device else { panic!() };
        *memory = limit;
        trained(&(config.clone(), built.clone()))
    };
    assert!(with(bytes).is_ok());
    assert!(matches!(with(bytes - 1).unwrap_err().error, Error::OutOfMemory(_)));
}

#[test]
fn blocking_transfer_crosses_with_every_micro_batch_and_at_last_in_fp32() {
    use device::Lane::{D2h, H2d};
    let with = |transfer: &str, micro_batches: u64| {
        let sets = [
            format!("batch.global={}", 2 * micro_batches),
            "parallel.data=2".into(),
            "device.count=2".into(),
            "offload.update=Serial".into(),
            "offload.accumulate=Auto".into(),
            format!("offload.transfer={transfer}"),
        ];
        let config = config(MODEL, &sets);
        let built = lay_out(&config);
        let step = predict::plan::report(&config, &built).unwrap().step.unwrap();
        let lane = |lane| step.lanes.iter().find(|l| l.lane == format!("{lane:?}")).unwrap().bytes;
        let states = built.plan.entries().iter().filter(|e| e.name.ends_with(".master"));
        let owned: u64 = states.map(|e| (e.shape.0 * e.shape.1) as u64).sum();
        let hosts = built.plan.pools(Arena::Pinned);
        let staging = hosts.iter().find(|(pool, _)| *pool == "gradient staging").unwrap().1;
        let sums = hosts.iter().find(|(pool, _)| *pool == "gradient sums to add");
        let sums = sums.map_or(0, |(_, bytes)| *bytes);
        let crosses = |e: &&device::Entry| e.pool.name.starts_with("gradient s") && e.is_copied();
        let mut gradients = built.plan.entries().iter().filter(crosses);
        assert!(gradients.all(|e| e.pool.cargo == device::Cargo::Gradient));
        assert_eq!(sums, if transfer == "Blocking" && micro_batches > 1 { 2 * owned } else { 0 });
        (lane(D2h), lane(H2d), staging, owned)
    };
    // With one micro-batch, D2h copies 4 bytes instead of 2, and H2d copies the same bytes.
    let (streamed, blocking) = (with("Streamed", 1), with("Blocking", 1));
    let owned = blocking.3;
    assert_eq!(blocking.0 - streamed.0, 2 * owned);
    assert_eq!((blocking.1, streamed.2, blocking.2), (streamed.1, 2 * owned, 4 * owned));
    // With five micro-batches, blocking transfers copy each gradient to the host, and copy the
    // 16-bit sum to the device for all but the first. With streamed transfers, the device adds.
    let (streamed, blocking) = (with("Streamed", 5), with("Blocking", 5));
    assert_eq!(blocking.0 - streamed.0, 4 * 2 * owned);
    assert_eq!(blocking.1 - streamed.1, 4 * 2 * owned);
    assert_eq!((streamed.2, blocking.2), (4 * owned, 4 * owned));
}

#[test]
fn partitioned_checkpoints_take_a_rank_s_share_of_the_memory() {
    const LAYERS: u64 = 6;
    for ranks in [2, 4] {
        let with = |partition: bool| {
            let sets = [
                format!("model.layers={LAYERS}"),
                format!("parallel.tensor={ranks}"),
                format!("device.count={ranks}"),
                format!("partition_checkpoints={partition}"),
            ];
            let config = config(MODEL, &sets);
            let built = lay_out(&config);
            (config, built)
        };
        let (whole, split) = (with(false), with(true));
        let checkpoints = |(_, built): &(Config, RankLayout)| {
            let pools = built.plan.pools(Arena::Device);
            pools.iter().find(|(pool, _)| *pool == "checkpoints").unwrap().1
        };
        let bytes = |(_, built): &(Config, RankLayout)| built.plan.bytes(Arena::Device);
        // The input of a block has 16 tokens x 128 channels of 2 bytes.
        let input = 16 * 128 * 2;
        assert_eq!(checkpoints(&whole), (LAYERS + 1) * input);
        // The last two inputs are no checkpoints, but two whole buffers are transients.
        assert_eq!(checkpoints(&split), (LAYERS - 1) * input / ranks);
        let saved = (LAYERS - 1) * input - checkpoints(&split);
        assert_eq!(bytes(&whole) - bytes(&split), saved);
        needs_what_is_planned(split);
    }
}

#[test]
fn micro_batches_that_go_together_take_a_set_of_checkpoints_each() {
    let with = |together: u64, sets: &[&str]| {
        let mut all: Vec<String> = sets.iter().map(ToString::to_string).collect();
        all.extend([format!("offload.first_forward={together}"), "batch.global=16".into()]);
        let config = config(MODEL, &all);
        let built = lay_out(&config);
        (config, built)
    };
    let bytes = |(_, built): &(Config, RankLayout), pool: &str| {
        let pools = built.plan.pools(Arena::Device);
        pools.into_iter().find(|(name, _)| *name == pool).map_or(0, |(_, bytes)| bytes)
    };
    // Each of sixteen micro-batches has x[0] to x[L], and its tokens, targets and order.
    let layers = u64::try_from(config(MODEL, &[]).model.layers).unwrap();
    // The tokens, targets and order have whole lines of 256 bytes.
    let (input, batch) = (16 * 128 * 2, 256);
    let one = with(1, &[]);
    let micro = u64::try_from(one.0.batch.micro).unwrap();
    assert_eq!(micro, 1);
    for (requested, together) in [(1, 1), (3, 3), (8, 8), (100, 16)] {
        let many = with(requested, &[]);
        let sets = bytes(&many, "checkpoints");
        assert_eq!(sets, together * (layers + 1) * input, "{requested}");
        let more = bytes(&many, "batches and losses") - bytes(&one, "batches and losses");
        assert_eq!(more, (together - 1) * batch, "{requested}");
    }
    needs_what_is_planned(with(3, &[]));
}

/// Compares bytes of the host and of the device for each owned parameter.
#[test]
fn a_delayed_update_takes_the_bytes_of_one_more_gradient_and_a_split_moves_states() {
    let with = |batch: u64, more: &[&str]| {
        let mut sets = vec![
            format!("batch.global={batch}"),
            "parallel.data=2".into(),
            "device.count=2".into(),
            "offload.optimizer=Host".into(),
        ];
        sets.extend(more.iter().map(ToString::to_string));
        let built = lay_out(&config(MODEL, &sets));
        let states = built.plan.entries().iter().filter(|e| e.name.ends_with(".master"));
        let owned: u64 = states.map(|e| (e.shape.0 * e.shape.1) as u64).sum();
        let bytes = [Arena::Pinned, Arena::Device].map(|arena| built.plan.bytes(arena));
        let aligned = built.plan.entries().len() as u64 * 256;
        (bytes.map(|b| b as i64), owned as i64, aligned as i64)
    };
    let delayed_update = "offload.update=Delayed(after_step: 40)";
    // The pending gradient has 16 bits with one micro-batch, and is an fp32 sum otherwise.
    for (batch, sum, each) in [(2, "Auto", 2), (8, "Device", 4), (8, "Host", 4)] {
        let sum = format!("offload.accumulate={sum}");
        let (exact, owned, _) = with(batch, &[&sum]);
        let (delayed, _, slack) = with(batch, &[&sum, delayed_update]);
        let more = delayed[0] - exact[0] - each * owned;
        assert!((0..=slack).contains(&more), "{sum}: {more} bytes more than {each} each");
        assert!((0..=slack).contains(&(delayed[1] - exact[1])), "{sum}: the device pays");
    }
    // The host saves 12 bytes of states and 2 + 2 of staging. The device keeps the gradient.
    let split = "offload.optimizer=Split(device_fraction: 0.25)";
    let ((host, owned, _), (part, _, slack)) = (with(2, &[]), with(2, &[split]));
    let (less, more) = (host[0] - part[0], part[1] - host[1]);
    // The share is a quarter, rounded to whole chunks of 64 elements on 2 ranks.
    let near = |is: i64, each: i64| (is - each * owned / 4).abs() <= slack + each * 128;
    assert!(near(less, 16) && near(more, 14), "{less} less, {more} more of {owned}");
}
