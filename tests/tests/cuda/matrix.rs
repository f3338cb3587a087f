//! The equivalence matrix on GPUs. Losses, norms, evaluations and final parameters differ from the
//! cpu backend only by the order of sums. Settings that move work in place or time change no bit.

use super::{ALONE, GRID, in_process, on_cuda};
use data::Dataset;
use engine::run::RunOptions;
use std::sync::{Arc, OnceLock};
use tests::compare::{Reference, RunDistance, assert_same_bits, full, run_for_weights, with};
use tests::{short_text, tiny, try_run_on};

/// Largest distance of a GPU's run from the cpu backend's run: three times the distance measured
/// under the fake driver, whose matmuls sum in another order than the cpu's.
fn limit(precision: &str) -> RunDistance {
    match precision {
        // Measured: 4.4e-8, 3e-8, 1.8e-6.
        "Fp32" => RunDistance { loss: 1.3e-7, norm: 1e-7, weights: 5e-6 },
        // Measured: 9e-4, 1.1e-3, 1.9e-2. Tensor cores multiply attention weights of 8 bits.
        "Bf16" => RunDistance { loss: 2.7e-3, norm: 3e-3, weights: 6e-2 },
        // Measured: 1.4e-2, 4.9e-3, 1.2e-1. Rounding to 8 bits turns a last bit into a sixteenth.
        "Fp8" => RunDistance { loss: 4.2e-2, norm: 1.5e-2, weights: 3.6e-1 },
        // Measured: 7.4e-5, 1.2e-4, 4.4e-3.
        _ => RunDistance { loss: 2.2e-4, norm: 3.6e-4, weights: 1.4e-2 },
    }
}

/// Settings of all runs. As in the layout tests, eps is so large that Adam does not amplify
/// rounding noise. No step overflows, because then the order of sums would decide which step is
/// skipped.
const BASE: &[&str] = &[
    "model.vocab=257",
    "model.layers=2",
    "model.dropout=0.1",
    "optimizer.eps=1e-6",
    "loss_scale.initial=1024.0",
    "train.steps=3",
    "train.eval_every=2",
];

fn data() -> &'static Arc<Dataset> {
    static DATA: OnceLock<Arc<Dataset>> = OnceLock::new();
    DATA.get_or_init(short_text)
}

/// Compares each variant of `base` on GPUs, by each transport, with `base` on the cpu backend.
fn near(base: &[&str], variants: &[&[&str]], transports: &[RunOptions], limit: RunDistance) {
    let reference = Reference::on(data(), base);
    for variant in variants {
        for options in transports {
            let what = format!("{base:?} {variant:?} {:?}", options.collectives);
            let config = on_cuda(tiny(&with(base, variant)));
            reference.assert_ran_near(&what, &run_for_weights(data(), &config, options), limit);
        }
    }
}

/// Asserts that each variant of `base` has the bits of `base` on GPUs.
fn no_bit_changes(base: &[&str], variants: &[&[&str]], options: &RunOptions) {
    let run = |sets: &[&str]| {
        let config = on_cuda(tiny(sets));
        let ran = try_run_on(data(), &config, &tests::lay_out(&config), options);
        ran.unwrap_or_else(|e| panic!("{sets:?}: {e}"))
    };
    let reference = run(base);
    assert!(reference.steps.iter().all(|s| s.loss.is_finite()), "{base:?}");
    for variant in variants {
        let what = format!("{base:?} against {variant:?}, {:?}", options.collectives);
        assert_same_bits(&reference, &run(&with(base, variant)), &what);
    }
}

pub(super) fn alone() {
    near(&with(BASE, ALONE), &[&[]], &[RunOptions::default()], limit("Fp32"));
}

/// Compares TP 2 x DP 2 with the cpu backend, with one, two and four micro-batches for each rank.
pub(super) fn grid(precision: &str) {
    let set = format!("precision={precision}");
    // The sizes of fp8 matmuls are multiples of 16.
    let hidden = if precision == "Fp8" { "model.hidden=64" } else { "model.hidden=32" };
    let base = with(&with(BASE, GRID), &[&set, hidden]);
    let both = [in_process(), RunOptions::default()];
    near(&base, &[&["parallel.sequence=true"]], &both, limit(precision));
    let cuts: [&[&str]; 2] = [&["batch.micro=4"], &["batch.micro=1"]];
    let cuts = if full() || precision == "Fp32" { &cuts[..] } else { &cuts[..1] };
    near(&base, cuts, &both[..1], limit(precision));
}

/// Settings that move work to another place or time.
const PLACES: [&[&str]; 5] = [
    &["offload.update=Speculative", "offload.speculated_fraction=1", "train.verify_every=2"],
    &["offload.update=Serial"],
    &["offload.optimizer=Device"],
    &["offload.accumulate=Host"],
    &["offload.optimizer=Split(device_fraction: 0.4)"],
];

/// Update that is one step late. An update on the device is never late.
const DELAYED: &[&str] = &["offload.update=Delayed(after_step: 1)"];

/// Settings that cut the work into other pieces, or repeat a part.
const PIECES: [&[&str]; 5] = [
    &["offload.bucket_elements=1024", "offload.tile_elements=1000000"],
    &["offload.bucket_elements=9000", "offload.tile_elements=2500", "offload.lookahead=3"],
    &["offload.bucket_elements=1500", "offload.optimizer=Device", "offload.update=Serial"],
    &["recompute=Block"],
    &["recompute=Selective"],
];

/// Compares modes, places and pieces on TP 2 x DP 2.
pub(super) fn modes() {
    let small = with(BASE, GRID);
    for precision in ["precision=Fp32", "precision=Bf16", "precision=Fp16"] {
        let base = with(&small, &[precision]);
        if full() || precision == "precision=Bf16" {
            let mut all: Vec<&[&str]> = PLACES.into_iter().chain(PIECES).chain([&[][..]]).collect();
            // NVIDIA's library takes GELU of a sum before it rounds the sum. `Selective` computes
            // GELU again, of the rounded sum.
            if fake_cuda::stats().is_none() && precision != "precision=Fp32" {
                all.retain(|sets| *sets != ["recompute=Selective"]);
            }
            no_bit_changes(&base, &all, &in_process());
        }
        if full() || precision == "precision=Fp32" {
            no_bit_changes(&base, &PLACES, &RunOptions::default());
        }
    }
    let together = with(&small, &["batch.micro=1", "recompute=Block", "precision=Bf16"]);
    no_bit_changes(&together, &[&["offload.first_forward=3"]], &in_process());
    let (blocks, host) = ("model.layers=4", "offload.parameters=Host");
    let one: &[&str] = &[host, "offload.resident_blocks=1", "offload.ring=2"];
    let two: &[&str] = &[host, "offload.resident_blocks=0", "host_checkpoints=true"];
    no_bit_changes(&with(&together, &[blocks]), &[one, two], &in_process());
    let untied = ["model.family=Llama", "model.tied=false", blocks, "precision=Fp32"];
    let tiers: &[&str] = &["activations=Tiers(gpu_blocks: 0, host_blocks: 3)"];
    let both = with(two, tiers);
    no_bit_changes(&with(&together, &untied), &[two, tiers, &both], &RunOptions::default());
    // Trained parts of a model: adapters that drop their inputs, and some tensors.
    let adapters = "adapter=Lora(rank: 4, alpha: 8, dropout: 0.2)";
    let frozen = "optimizer.frozen=[\"wte*\", \"h.0.*\", \"*.ln_2.*\"]";
    for part in [adapters, frozen] {
        let base = with(&small, &[part, "precision=Fp32"]);
        near(&base, &[&[host, "recompute=Block"]], &[in_process()], limit("Fp32"));
        no_bit_changes(&with(&together, &[part]), &[two], &in_process());
    }
    let delayed = with(&small, &with(DELAYED, &["train.steps=4", "precision=Fp32"]));
    near(&delayed, &[&[]], &[in_process()], limit("Fp32"));
    no_bit_changes(&delayed, &[PLACES[3], PLACES[4], PIECES[1], &[]], &in_process());
}

/// With `reduce_fp32`, the sums of NCCL equal the in-process sums, which are fp32 in rank order and
/// rounded once. NCCL adds 16-bit numbers hop by hop with a rounding in each hop, so `reduce_fp32`
/// gives it none. In groups of two ranks, a sum has one rounding anyway. With four ranks, NCCL
/// chooses the order of fp32 sums, and only the fake NCCL promises rank order.
pub(super) fn sums_in_fp32(layout: &[&str]) {
    let base = with(&with(BASE, layout), &["precision=Bf16", "parallel.reduce_fp32=true"]);
    let base = with(&base, &["train.steps=2", "train.eval_every=0"]);
    let run = |sets: &[&str], options: &RunOptions| {
        let config = on_cuda(tiny(&with(&base, sets)));
        let ran = try_run_on(data(), &config, &tests::lay_out(&config), options);
        ran.unwrap_or_else(|e| panic!("{sets:?}: {e}"))
    };
    if layout != GRID && fake_cuda::stats().is_none() {
        return near(&base, &[&[]], &[RunOptions::default()], limit("Bf16"));
    }
    let in_process = run(&[], &in_process());
    let variants: Vec<&[&str]> = PLACES.into_iter().chain([&[][..], PIECES[1]]).collect();
    let few = if full() || layout != GRID { 0 } else { PLACES.len() };
    for variant in &variants[few..] {
        let by_nccl = run(variant, &RunOptions::default());
        assert_same_bits(&in_process, &by_nccl, &format!("{layout:?} {variant:?}"));
    }
    if layout != GRID {
        let hops = run(&["parallel.reduce_fp32=false"], &RunOptions::default());
        let once = run(&["parallel.reduce_fp32=false"], &super::in_process());
        assert!(hops.bits() != once.bits(), "sums by hops should differ");
    }
}

pub(super) fn shared() {
    let base = with(BASE, GRID);
    near(&base, &[&[]], &[RunOptions::default()], limit("Fp32"));
}

/// Compares sixteen ranks with the cpu backend, by both transports, and then checks bits.
pub(super) fn sixteen(tensor: usize, data: usize) {
    let grid = [("tensor", tensor), ("data", data)].map(|(key, n)| format!("parallel.{key}={n}"));
    let batch = format!("batch.global={}", 2 * data);
    let model = ["model.hidden=64", "model.heads=8", "batch.micro=1", &batch];
    let base = with(BASE, &with(&model, &[&grid[0], &grid[1]]));
    for precision in ["Fp32", "Bf16", "Fp16"] {
        let set = format!("precision={precision}");
        let both = [in_process(), RunOptions::default()];
        near(&with(&base, &[&set]), &[&[]], &both, limit(precision));
    }
    let bf16 = with(&base, &["precision=Bf16"]);
    no_bit_changes(&bf16, &PLACES, &in_process());
    no_bit_changes(&bf16, &[PIECES[1], PIECES[3], &[]], &in_process());
    // NCCL adds around a ring, which begins at another rank in each piece. With more than two
    // ranks, the cuts between pieces decide the order of a sum and its rounding. The split
    // optimizer has other cuts.
    let places = if data > 2 { &PLACES[..3] } else { &PLACES };
    no_bit_changes(&bf16, places, &RunOptions::default());
}
