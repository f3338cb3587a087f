//! Delayed updates: the parameters that each step uses. Nothing else differs from an exact update.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use engine::run::RunOptions;
use std::sync::Arc;
use tests::compare::{
    Weights, assert_no_bit_changes, assert_same_bits, distance, full, initial_weights, one_window,
    run_for_weights, run_sets, run_with, with, with_delays,
};
use tests::{RunRecord, tiny};

const SERIAL: &str = "offload.update=Serial";

fn delayed(after_step: u64) -> String {
    format!("offload.update=Delayed(after_step: {after_step})")
}

/// Settings of all runs: clipping, dropout, and evaluations while an update is pending.
const BASE: &[&str] = &[
    "model.vocab=257",
    "model.dropout=0.1",
    "train.steps=5",
    "train.eval_every=2",
    "train.eval_batches=2",
    "batch.micro=1",
    "offload.update=Delayed(after_step: 2)",
];

const LAYOUTS: [&[&str]; 4] = [
    &["parallel.tensor=2", "parallel.data=2"],
    &["parallel.tensor=2", "parallel.sequence=true"],
    &["parallel.data=2"],
    &[],
];

#[test]
fn steps_up_to_the_first_late_update_are_those_of_serial_and_the_next_is_not() {
    let base = ["train.steps=5", "train.eval_every=2", "batch.micro=1", "parallel.data=2"];
    let serial = run_sets(&with(&base, &[SERIAL]));
    let loss = |ran: &RunRecord, step: usize| ran.steps[step - 1].loss.to_bits();
    for after_step in 0..5 {
        let ran = run_sets(&with(&base, &[&delayed(after_step)]));
        // No update precedes step 1, so step 1 is exact.
        let exact = after_step.max(1) as usize;
        for step in 1..=exact {
            assert_eq!(loss(&serial, step), loss(&ran, step), "{after_step}: step {step}");
        }
        assert_ne!(
            loss(&serial, exact + 1),
            loss(&ran, exact + 1),
            "{after_step}: no step is late"
        );
    }
    // No update is pending when the run ends.
    for after_step in [5, 6, 1_000] {
        assert_same_bits(&serial, &run_sets(&with(&base, &[&delayed(after_step)])), "at the end");
    }
}

/// Settings with an update that is the gradient times the rate, and with identical samples.
const PLAIN: &[&str] = &[
    "optimizer.kind=Sgd",
    "optimizer.lr=0.2",
    "optimizer.clip=None",
    "optimizer.weight_decay=0.0",
    "schedule.kind=Constant",
    "schedule.warmup_steps=0",
    "batch.global=2",
];

/// Runs PLAIN and `sets` from the weights `initial`. Returns the record and the final weights.
fn plain(sets: &[&str], initial: Option<&Weights>) -> (RunRecord, Weights) {
    let given = initial.map(|all| {
        let all = all.iter().map(|(name, x)| (name.clone(), Arc::from(&x[..])));
        Arc::new(all.collect())
    });
    let options = RunOptions { initial: given, ..RunOptions::default() };
    run_for_weights(&one_window(), &tiny(&with(PLAIN, sets)), &options)
}

/// Weights `a` + `b` - `c`, by tensor.
fn moved(a: &Weights, b: &Weights, c: &Weights) -> Weights {
    let tensor = |(name, a): (&String, &Vec<f32>)| {
        let all = a.iter().zip(&b[name]).zip(&c[name]);
        let sum = |((a, b), c): ((&f32, &f32), &f32)| f64::from(*a) + f64::from(*b) - f64::from(*c);
        (name.clone(), all.map(|x| sum(x) as f32).collect())
    };
    a.iter().map(tensor).collect()
}

#[test]
fn a_late_update_adds_gradients_of_the_parameters_of_one_step_earlier() {
    const STEPS: usize = 6;
    let one_step = |from: &Weights| plain(&["train.steps=1", SERIAL], Some(from));
    for after_step in [0, 1, 3] {
        // parameters[k] are the parameters after update k.
        let mut parameters = vec![initial_weights(PLAIN)];
        let mut losses = Vec::new();
        for step in 1..=STEPS {
            let is_delayed = step > after_step.max(1);
            let used = parameters[step - 1 - usize::from(is_delayed)].clone();
            let (ran, after) = one_step(&used);
            losses.push(ran.steps[0].loss);
            parameters.push(moved(&parameters[step - 1], &after, &used));
        }
        let steps = format!("train.steps={STEPS}");
        let (ran, end) = plain(&[&steps, &delayed(after_step as u64)], None);
        for (step, loss) in losses.iter().enumerate() {
            let is = ran.steps[step].loss;
            assert!((is - loss).abs() < 1e-5, "{after_step}: step {}: {is}, not {loss}", step + 1);
        }
        let went = distance(&end, &parameters[0]);
        let off = distance(&end, &parameters[STEPS]);
        let (_, exact) = plain(&[&steps, SERIAL], None);
        assert!(off < 1e-5 * went, "{after_step}: off by {off} of {went}");
        assert!(distance(&end, &exact) > 1e-3 * went, "an exact run would pass too");
    }
}

#[test]
fn the_step_after_an_overflow_is_not_stale() {
    let scale = ["precision=Fp16", "loss_scale.initial=65536", "loss_scale.window=2"];
    let sets = with(&scale, &["loss_scale.hysteresis=1", "train.steps=24"]);
    let delayed_once = delayed(1);
    let all = with(&sets, &[&delayed_once]);
    let (ran, _) = plain(&all, None);
    let skipped: Vec<usize> = (3..23).filter(|k| ran.steps[k - 1].skipped).collect();
    assert!(!skipped.is_empty() && skipped.len() < 12, "{skipped:?}");
    let mut checked = 0;
    for &step in skipped.iter().take(3) {
        // `present` has all updates up to the overflow, whose own update changes nothing. `next` is
        // a first step from `present`.
        let steps = format!("train.steps={step}");
        let (_, present) = plain(&with(&all, &[&steps]), None);
        let (next, _) = plain(&with(&all, &["train.steps=1"]), Some(&present));
        let loss = |step: usize| ran.steps[step - 1].loss.to_bits();
        assert_eq!(loss(step + 1), next.steps[0].loss.to_bits(), "after step {step}");
        // The step after the next one is stale again: it uses the same parameters.
        assert_eq!(loss(step + 1), loss(step + 2), "after step {step}");
        checked += usize::from(loss(step) != loss(step + 1));
    }
    assert!(checked > 0, "no overflow followed an update");
}

#[test]
fn places_and_pieces_change_no_bit() {
    let variants: [&[&str]; 7] = [
        &["offload.bucket_elements=1024"],
        &["offload.bucket_elements=9000", "offload.tile_elements=2500", "offload.lookahead=3"],
        &["offload.lookahead=64", "offload.tile_elements=1000000"],
        &["offload.accumulate=Host", "offload.bucket_elements=2000"],
        &["offload.optimizer=Split(device_fraction: 0.4)"],
        &["offload.optimizer=Split(device_fraction: 1.0)", "offload.bucket_elements=1500"],
        &["recompute=Block", "device.threads=2"],
    ];
    for (i, layout) in LAYOUTS.iter().enumerate() {
        let rule = if i % 2 == 0 { "optimizer.kind=AdamW" } else { "optimizer.kind=Sgd" };
        // The quick selection takes half of the variants on each layout, and each one on two layouts.
        let selected = |k: &usize| full() || (i + k).is_multiple_of(2);
        let some: Vec<&[&str]> =
            (0..variants.len()).filter(selected).map(|k| variants[k]).collect();
        assert_no_bit_changes(&with(&with(BASE, layout), &[rule]), &some);
        // With one micro-batch, the gradient shard itself waits. The empty variant repeats the run.
        let whole = with(&with(BASE, layout), &["batch.micro=4", "batch.global=8"]);
        assert_no_bit_changes(&whole, &[variants[1], variants[4], &[]]);
    }
    for precision in ["precision=Bf16", "precision=Fp16"] {
        let sets = with(LAYOUTS[0], &[precision, "loss_scale.initial=1024.0"]);
        assert_no_bit_changes(&with(BASE, &sets), &[variants[1], variants[3], variants[4]]);
    }
}

#[test]
fn lanes_with_random_delays_change_no_bit() {
    let modes: [&[&str]; 3] = [
        &[],
        &["offload.accumulate=Host", "offload.lookahead=2"],
        &["offload.optimizer=Split(device_fraction: 0.4)"],
    ];
    let delays: &[u64] = if full() { &[0, 40, 400] } else { &[40] };
    for layout in [LAYOUTS[0], LAYOUTS[3]] {
        for batch in ["batch.micro=2", "batch.global=2"] {
            let base = with(&with(BASE, layout), &["batch.micro=1", batch]);
            let inline = run_sets(&base);
            for mode in modes {
                for &chaos_us in delays {
                    let options = with_delays(chaos_us);
                    let ran = run_with(&with(&base, mode), &options);
                    assert_same_bits(&inline, &ran, &format!("{layout:?} {mode:?} {chaos_us} us"));
                }
            }
        }
    }
}

#[test]
fn an_evaluation_changes_nothing_and_sees_the_parameters_of_the_next_step() {
    let base = with(BASE, &["parallel.data=2"]);
    let often = run_sets(&with(&base, &["train.eval_every=1"]));
    let never = run_sets(&with(&base, &["train.eval_every=0"]));
    let steps = |ran: &RunRecord| ran.bits().0;
    assert_eq!(steps(&often), steps(&never));
    assert_eq!(often.outcome.state_hash, never.outcome.state_hash);
    // The evaluation after step 2 sees the parameters without the pending update of step 2.
    let sees = |step: u64| {
        let at = often.evals.iter().find(|(at, _)| *at == step);
        at.unwrap().1.to_bits()
    };
    assert_eq!(sees(1), sees(2), "the update of step 2 waits");
    assert_ne!(sees(2), sees(3));
    // The last evaluation sees all updates.
    let exact = with(&base, &["train.steps=1", "train.eval_every=0"]);
    let last = |sets: &[&str]| run_sets(&with(&exact, sets)).evals.last().unwrap().1.to_bits();
    assert_eq!(last(&[&delayed(1)]), last(&[SERIAL]));
}
