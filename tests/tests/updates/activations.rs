//! Memory and order of activations in tiers.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use config::{Config, DeviceConfig};
use device::{Arena, Cargo, Error};
use engine::run::RunOptions;
use layout::build::RankLayout;
use predict::plan::{Op, list};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::Rc;
use tests::compare::with_delays;
use tests::{config, lay_out, short_text, try_run_on};

/// Model with more blocks than a ring has sets.
const MODEL: &str = r#"(
    device: Cpu(count: 1, memory: "64MiB", threads: 1),
    model: (layers: 8, hidden: 32, heads: 4, seq_len: 16),
    precision: Bf16,
    recompute: Block,
    optimizer: (lr: 1e-3),
    batch: (micro: 4, global: 8),
    data: (train: "unused"),
    train: (steps: 3, seed: 7),
)"#;

fn of(sets: &[&str]) -> (Config, RankLayout) {
    let sets: Vec<String> = sets.iter().map(ToString::to_string).collect();
    let config = config(MODEL, &sets);
    let built = lay_out(&config);
    (config, built)
}

/// Bytes of a pool, without padding.
fn bytes((_, built): &(Config, RankLayout), arena: Arena, pool: &str) -> u64 {
    let of_pool = |e: &&device::Entry| e.arena == arena && e.pool.name == pool;
    built.plan.entries().iter().filter(of_pool).map(|e| e.range.end - e.range.start).sum()
}

/// Trains within `limit` bytes of the GPU.
fn train_within((mut config, built): (Config, RankLayout), limit: u64) -> Result<(), Error> {
    let DeviceConfig::Cpu { memory, .. } = &mut config.device else { panic!() };
    *memory = limit;
    let ran = try_run_on(&short_text(), &config, &built, &RunOptions::default());
    ran.map(|ran| assert_eq!(ran.steps.len(), 3)).map_err(|e| e.error)
}

const TIERS: [&str; 4] = [
    "activations=Tiers(gpu_blocks: 8)",
    "activations=Tiers(gpu_blocks: 2, host_blocks: 4)",
    "activations=Tiers(host_blocks: 8)",
    "activations=Tiers(gpu_blocks: 1, host_blocks: 0, gpu_mlps: 0, host_mlps: 5)",
];

#[test]
fn tiers_need_the_planned_bytes() {
    let experts = "model.experts=(count: 4, per_token: 2, ffn_hidden: 16, dense_layers: [3])";
    for sets in [&[][..], &["offload.first_forward=2"], &["model.family=Llama", experts]] {
        for tiers in TIERS {
            let model = of(&[sets, &[tiers]].concat());
            let planned = model.1.plan.bytes(Arena::Device);
            train_within(model.clone(), planned).unwrap_or_else(|e| panic!("{tiers}: {e}"));
            let error = train_within(model, planned - 1).unwrap_err();
            assert!(matches!(error, Error::OutOfMemory(_)), "{tiers}: {error}");
        }
    }
}

/// A block has q, k, v, the heads' output and h of C columns each, 4 C columns before GELU, fp32
/// numbers for each row of each head, and four statistics of norms for each row.
#[test]
fn tiers_take_the_bytes_of_their_blocks() {
    const ROWS: u64 = 4 * 16;
    let attention = ROWS * (5 * 32 * 2 + 4 * 4);
    let mlp = ROWS * 4 * 32 * 2;
    let statistics = ROWS * 2 * 4;
    let sets = |model: &(Config, RankLayout)| {
        let [kept, ring] =
            ["activations", "activation ring"].map(|pool| bytes(model, Arena::Device, pool));
        // The final norm keeps its statistics.
        (kept - statistics, ring, bytes(model, Arena::Pinned, "activation staging"))
    };
    let (of_attention, of_mlp) = (attention + statistics, mlp + statistics);
    let block = of_attention + of_mlp;
    assert_eq!(sets(&of(&[TIERS[0]])), (8 * block, 0, 0));
    // Two blocks are on the GPU, and a set is for the blocks that recompute. The last two of the
    // blocks on the host stay in the ring. The statistics of norms do not move.
    assert_eq!(sets(&of(&[TIERS[1]])), (3 * block, 2 * block, 2 * (attention + mlp)));
    assert_eq!(sets(&of(&[TIERS[2]])), (0, 2 * block, 6 * (attention + mlp)));
    assert_eq!(sets(&of(&[TIERS[3]])), (2 * of_attention + of_mlp, 2 * of_mlp, 3 * mlp));
    // Each of two micro-batches that go together has its own activations.
    let together = "offload.first_forward=2";
    let both = sets(&of(&[TIERS[1], together]));
    assert_eq!(both, (5 * block, 2 * block, 8 * (attention + mlp)));
    // The host memory is next to the GPU, and the copies are known as activations.
    let (config, built) = of(&[TIERS[2]]);
    let moved = bytes(&(config.clone(), built.clone()), Arena::Pinned, "activation staging");
    let (_, plain) = of(&[]);
    assert!(built.plan.carries(Cargo::Activation) && !plain.plan.carries(Cargo::Activation));
    let more = built.host_bytes(&config).staging - plain.host_bytes(&config).staging;
    assert!(more >= moved, "{more} of {moved}");
}

/// A block with experts moves gate and up of each expert of a token, and the expert's output of C
/// columns. One MLP moves its gate and up.
#[test]
fn experts_in_tiers_take_the_bytes_of_their_choices() {
    const ROWS: u64 = 4 * 16;
    let experts = "model.experts=(count: 4, per_token: 2, ffn_hidden: 16, dense_layers: [3])";
    let family = ["model.family=Llama", "model.ffn_hidden=64", experts];
    let model = of(&[&family[..], &["activations=Tiers(gpu_mlps: 0, host_mlps: 8)"]].concat());
    let (of_experts, of_mlp) = (ROWS * 2 * (2 * 16 + 32) * 2, ROWS * 2 * 64 * 2);
    // The last two of the eight blocks stay in the ring.
    let moved = bytes(&model, Arena::Pinned, "activation staging");
    assert_eq!(moved, 5 * of_experts + of_mlp);
    // Each of the two sets is for a block of either form, and both forms share the statistics of
    // the norm.
    let ring = bytes(&model, Arena::Device, "activation ring");
    assert_eq!(ring, 2 * (of_experts + of_mlp + ROWS * 4));
}

/// On the host, activations of all blocks fit where the GPU has no room for them.
#[test]
fn a_run_fits_with_tiers_and_not_without_them() {
    let (tiers, kept) = (of(&[TIERS[2]]), of(&["recompute=None"]));
    let limit = tiers.1.plan.bytes(Arena::Device);
    assert!(matches!(train_within(kept, limit).unwrap_err(), Error::OutOfMemory(_)));
    train_within(tiers, limit).unwrap_or_else(|e| panic!("{e}"));
}

/// The ops of a step.
fn ops(sets: &[&str]) -> Vec<Op> {
    let (config, built) = of(sets);
    let all: Rc<RefCell<Vec<Op>>> = Rc::default();
    let heard = Rc::clone(&all);
    list(&config, &built, move |op| heard.borrow_mut().push(op.clone())).unwrap();
    all.take()
}

fn is_activation_copy(op: &Op) -> bool {
    op.lane.starts_with("Activations")
}

/// Copies of activations have lanes of their own, and wait only for Compute and for each other. A
/// lane is a queue, so nothing that waits for the host's arithmetic is ahead of them.
#[test]
fn copies_of_activations_never_stand_behind_the_host() {
    let modes: [&[&str]; 5] = [
        &[],
        &["offload.update=Delayed(after_step: 0)", "offload.accumulate=Host"],
        &["offload.update=Speculative"],
        &["offload.parameters=Host", "offload.resident_blocks=0"],
        &["offload.first_forward=2", "offload.update=Serial"],
    ];
    for mode in modes {
        for tiers in [TIERS[1], TIERS[2], TIERS[3]] {
            let all = ops(&[mode, &[tiers]].concat());
            let (copies, others): (Vec<&Op>, Vec<&Op>) =
                all.iter().partition(|op| is_activation_copy(op));
            let count = |lane: &str| copies.iter().filter(|op| op.lane == lane).count();
            let (up, down) = (count("ActivationsUp"), count("ActivationsDown"));
            assert!(up > 0 && up == down, "{mode:?} {tiers}: {up} up, {down} down");
            assert!(copies.iter().all(|op| op.name == "copy"));
            let allowed: BTreeSet<i64> = all
                .iter()
                .filter(|op| is_activation_copy(op) || op.lane == "Compute")
                .map(|op| op.number)
                .collect();
            // Ops of the step before have numbers up to 0. Only a serial update ends a step with a
            // wait of all lanes.
            let is_serial = mode.contains(&"offload.update=Serial");
            for op in &copies {
                let waits = op.waits.iter().filter(|number| **number > 0 || !is_serial);
                let foreign: Vec<&i64> = waits.filter(|n| !allowed.contains(*n)).collect();
                assert!(foreign.is_empty(), "{mode:?} {tiers}: {op:?} waits for {foreign:?}");
            }
            // No other lane carries activations of blocks to the host.
            let moves = |op: &&&Op| op.name == "copy" && op.lane != "Host";
            let stray = others.iter().filter(moves).flat_map(|op| &op.tensors);
            let stray: Vec<_> = stray.filter(|t| t.name.starts_with("activations.")).collect();
            assert!(stray.is_empty(), "{mode:?} {tiers}: {stray:?}");
        }
    }
}

/// Each tensor goes up once for each time that it goes down, from the same memory into a set of the
/// ring, and with the bytes of the plan.
#[test]
fn what_goes_down_comes_up_again() {
    for tiers in [TIERS[1], TIERS[2], TIERS[3]] {
        let all = ops(&[tiers]);
        let host = |op: &Op| {
            let mut names = op.tensors.iter().map(|t| t.name.clone());
            names.find(|name| name.ends_with("_host")).unwrap()
        };
        let of_lane = |lane: &str| {
            let of_lane = all.iter().filter(|op| op.lane == lane);
            let mut names: Vec<String> = of_lane.map(host).collect();
            names.sort();
            names
        };
        let (down, up) = (of_lane("ActivationsDown"), of_lane("ActivationsUp"));
        assert_eq!(down, up, "{tiers}");
        let moved = |lane: &str| -> u64 {
            all.iter().filter(|op| op.lane == lane).map(|op| op.bytes).sum()
        };
        let micro_batches = 2;
        let planned = micro_batches * bytes(&of(&[tiers]), Arena::Pinned, "activation staging");
        assert_eq!(
            (moved("ActivationsDown"), moved("ActivationsUp")),
            (planned, planned),
            "{tiers}"
        );
    }
}

/// With random delays of every op, a run with a slow lane ends and has the bits of one without.
#[test]
fn the_bits_of_a_long_run_hold_with_random_delays() {
    let with = |sets: &[&str], options: &RunOptions| {
        let (config, built) = of(sets);
        let ran = try_run_on(&short_text(), &config, &built, options);
        ran.unwrap_or_else(|e| panic!("{sets:?}: {e}")).bits()
    };
    let plain = with(&["train.steps=8"], &RunOptions::default());
    for tiers in [TIERS[1], TIERS[2]] {
        let slow = RunOptions { slow: Some(("copy", 20)), ..with_delays(60) };
        assert_eq!(plain, with(&["train.steps=8", tiers], &slow), "{tiers}");
    }
}
