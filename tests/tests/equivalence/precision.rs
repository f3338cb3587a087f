//! 16-bit storage: the loss scale and its skipped steps, and the distance of a run from fp32.

use engine::run::RunOptions;
use std::sync::Arc;
use tests::compare::{
    self, Reference, RunDistance, STANDSTILL, full, initial_weights, run_sets, run_with,
    tiny_with_weights, with,
};

const LAYOUTS: [&[&str]; 3] = [
    &[],
    &["parallel.tensor=2", "parallel.data=2"],
    &["parallel.tensor=2", "parallel.data=2", "parallel.sequence=true", "batch.micro=1"],
];

/// Settings with a loss scale of 2^24, with which the backward pass overflows.
const OVERFLOW: &[&str] = &["precision=Fp16", "loss_scale.initial=16777216.0"];

#[test]
fn overflowing_steps_are_skipped_and_leave_no_trace() {
    for layout in LAYOUTS {
        for placement in ["offload.optimizer=Host", "offload.optimizer=Device"] {
            let base = with(&with(layout, OVERFLOW), &[placement, "train.steps=3"]);
            let (ran, weights) = tiny_with_weights(&base);
            assert!(ran.steps.iter().all(|s| s.skipped), "{layout:?}: {:?}", ran.steps);
            let skipped: Vec<u64> = ran.steps.iter().map(|s| s.skipped_total).collect();
            assert_eq!(skipped, [1, 2, 3]);
            assert!(ran.steps.iter().all(|s| s.loss.is_finite() && !s.grad_norm.is_finite()));
            // Parameters keep their initial values. So do moments: SGD never changes them, and
            // leaves the same states.
            let start = initial_weights(&with(layout, &["train.steps=1"]));
            assert!(weights == start, "{layout:?} {placement}");
            let sgd = run_sets(&with(&base, &["optimizer.kind=Sgd"]));
            assert_eq!(ran.outcome.state_hash, sgd.outcome.state_hash, "{layout:?} {placement}");
            // The device's parameters are the initial parameters too.
            let still = run_sets(&with(&with(layout, &STANDSTILL), &["precision=Fp16"]));
            assert_eq!(ran.evals[0].1.to_bits(), still.evals[0].1.to_bits(), "{layout:?}");
        }
    }
}

#[test]
fn the_scale_halves_as_hysteresis_says_and_training_recovers() {
    for (hysteresis, forgiven) in [("loss_scale.hysteresis=1", 0), ("loss_scale.hysteresis=3", 2)] {
        let sets = with(OVERFLOW, &[hysteresis, "parallel.data=2", "train.steps=24"]);
        let ran = run_sets(&sets);
        let skipped = ran.steps.iter().take_while(|s| s.skipped).count();
        assert!(skipped > forgiven + 1, "{skipped}");
        for (i, step) in ran.steps[..=skipped].iter().enumerate() {
            let halvings = i.saturating_sub(forgiven) as i32;
            assert_eq!(step.loss_scale, 16_777_216.0 / 2f64.powi(halvings), "step {}", step.step);
        }
        let after = &ran.steps[skipped..];
        assert!(after.len() > 5 && after.iter().any(|s| !s.skipped));
        assert!(after[after.len() - 1].loss < ran.steps[0].loss - 0.3);
    }
    let sets = ["precision=Fp16", "loss_scale.initial=64.0", "loss_scale.window=2"];
    let scales: Vec<f64> = run_sets(&sets).steps.iter().map(|s| s.loss_scale).collect();
    assert_eq!(scales, [64.0, 64.0, 128.0, 128.0, 256.0, 256.0]);
}

/// Every loss scale gives the gradients of fp32, except for rounding. If a gradient kept the scale,
/// SGD would also show it in the losses.
#[test]
fn sixteen_bits_stay_near_fp32() {
    let base: &[&str] = &["optimizer.kind=Sgd", "optimizer.lr=0.3", "batch.micro=1"];
    let reference = Reference::new(base);
    // Half an ulp is 2^-12 in fp16 and 2^-9 in bf16, relative. Measured distances in fp16: at most
    // 1.4e-4, 1e-4 and 1e-4. In bf16 the distances are eight times as large.
    let fp16 = RunDistance { loss: 5e-4, norm: 3e-4, weights: 3e-4 };
    let bf16 = RunDistance { loss: 4e-3, norm: 3e-3, weights: 3e-3 };
    for layout in LAYOUTS {
        for scale in ["loss_scale.initial=32.0", "loss_scale.initial=2048.0"] {
            let sets = with(&with(base, layout), &["precision=Fp16", scale]);
            reference.assert_near(&sets, fp16);
        }
        reference.assert_near(&with(&with(base, layout), &["precision=Bf16"]), bf16);
        let fp32_sums = with(layout, &["precision=Bf16", "parallel.reduce_fp32=true"]);
        reference.assert_near(&with(base, &fp32_sums), bf16);
    }
    // Blocking transfers sum micro-batches in 16 bits: one more rounding for each micro-batch.
    let twice = |a: RunDistance| RunDistance {
        loss: 2.0 * a.loss,
        norm: 2.0 * a.norm,
        weights: 2.0 * a.weights,
    };
    for (precision, distance) in [("precision=Fp16", twice(fp16)), ("precision=Bf16", twice(bf16))]
    {
        let sums =
            ["offload.transfer=Blocking", "offload.update=Serial", "loss_scale.initial=32.0"];
        let sets = with(&with(base, &sums), &[precision, "parallel.data=2"]);
        reference.assert_near(&sets, distance);
    }
    if full() {
        // Adam divides small gradients by their size, with rounding errors. A large eps limits
        // this.
        let adam = with(base, &["optimizer.kind=AdamW", "optimizer.eps=1e-3", "optimizer.lr=3e-3"]);
        let reference = Reference::new(&adam);
        let bf16 = RunDistance { weights: 1.5e-2, ..bf16 };
        for layout in LAYOUTS {
            for precision in ["precision=Bf16", "precision=Fp16"] {
                let sets = [precision, "loss_scale.initial=1024.0"];
                reference.assert_near(&with(&with(&adam, layout), &sets), bf16);
            }
        }
    }
}

/// The fp8 formats have 4 and 3 significant bits. One rounding has an error of up to 2^-4 and 2^-3,
/// relative. Measured against bf16: at most 1.6e-2, 2.3e-2 and 8.2e-3.
#[test]
fn fp8_stays_near_bf16_in_both_families_and_every_layout() {
    let sizes: &[&str] =
        &["model.hidden=64", "optimizer.kind=Sgd", "optimizer.lr=0.3", "batch.micro=1"];
    let distance = RunDistance { loss: 4e-2, norm: 6e-2, weights: 2.5e-2 };
    for family in ["model.family=Gpt2", "model.family=Llama"] {
        let base = with(sizes, &[family]);
        let reference = Reference::new(&with(&base, &["precision=Bf16"]));
        for layout in LAYOUTS {
            reference.assert_near(&with(&with(&base, layout), &["precision=Fp8"]), distance);
        }
        let fp32_sums = ["precision=Fp8", "parallel.reduce_fp32=true", "parallel.tensor=2"];
        reference.assert_near(&with(&base, &fp32_sums), distance);
    }
}

/// Rounding to fp8 turns no infinity into a number.
#[test]
fn a_weight_that_is_not_finite_is_found_in_fp8() {
    let base = ["model.hidden=64", "precision=Fp8", "train.steps=1"];
    let mut weights = initial_weights(&base);
    weights.get_mut("h.1.mlp.proj.weight").unwrap()[5] = f32::INFINITY;
    let initial = weights.iter().map(|(name, all)| (name.clone(), all.as_slice().into()));
    let initial = Some(Arc::new(initial.collect()));
    let ran = run_with(&base, &RunOptions { initial, ..RunOptions::default() });
    assert!(ran.steps[0].skipped && ran.outcome.not_finite.is_some(), "{:?}", ran.steps);
}

/// Only the gradient of one norm's bias overflows: the norm's output is made small, and the weight
/// that reads this output is made large.
#[test]
fn a_skipped_step_names_the_first_tensor_whose_gradient_overflowed() {
    let base = [
        "optimizer.clip=None",
        "batch.micro=4",
        "batch.global=4",
        "train.steps=1",
        "precision=Fp16",
        "loss_scale.initial=16384",
    ];
    let mut weights = initial_weights(&base);
    let by = |name: &str, factor: f32, weights: &mut compare::Weights| {
        weights.get_mut(name).unwrap().iter_mut().for_each(|x| *x *= factor);
    };
    let ran = |sets: &[&str], weights: &compare::Weights| {
        let initial = weights.iter().map(|(name, all)| (name.clone(), all.as_slice().into()));
        let initial = Some(Arc::new(initial.collect()));
        run_with(&with(&base, sets), &RunOptions { initial, ..RunOptions::default() })
    };
    let plain = ran(&[], &weights);
    assert!(!plain.steps[0].skipped && plain.outcome.not_finite.is_none());
    by("h.1.ln_1.weight", 1.0 / 4096.0, &mut weights);
    by("h.1.ln_1.bias", 1.0 / 4096.0, &mut weights);
    by("h.1.attn.qkv.weight", 4096.0, &mut weights);
    for layout in [
        &["offload.update=Serial"][..],
        &["offload.update=Overlapped", "batch.micro=2"],
        &["offload.update=Speculative", "offload.speculated_fraction=1"],
        &["offload.update=Speculative", "batch.micro=2", "offload.accumulate=Host"],
        &["offload.accumulate=Host", "batch.micro=2"],
        &["offload.optimizer=Device"],
        &["parallel.data=2", "batch.micro=2"],
    ] {
        let ran = ran(layout, &weights);
        assert!(ran.steps[0].skipped, "{layout:?}");
        // The gradient of the norm's weight, before its bias in the model, may overflow too.
        let named = ran.outcome.not_finite.unwrap();
        assert!(named.starts_with("h.1.ln_1."), "{layout:?}: {named}");
    }
}
