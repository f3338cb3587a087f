//! Single steps, compared with formulas, since all layouts could agree on a wrong result. The tests
//! compute gradients from the parameters after one step of SGD.

use tests::compare::{
    STANDSTILL, Weights, distance, initial_weights, one_window, run_sets, run_with_weights,
    tiny_with_weights, with,
};
use tests::tiny;

const LAYOUTS: [&[&str]; 4] = [
    &[],
    &["parallel.data=2"],
    &["parallel.tensor=2", "parallel.data=2"],
    &["parallel.tensor=4", "parallel.data=2", "parallel.sequence=true"],
];

/// Settings of one SGD step with rate 1, at the peak of the schedule.
const SGD: &[&str] = &[
    "model.vocab=257",
    "batch.micro=1",
    "train.steps=1",
    "schedule.warmup_steps=0",
    "schedule.kind=Constant",
    "optimizer.kind=Sgd",
    "optimizer.lr=1.0",
    "optimizer.weight_decay=0.0",
];

fn relative(a: f64, b: f64) -> f64 {
    (a / b - 1.0).abs()
}

#[test]
fn the_reported_norm_is_that_of_the_gradient() {
    for layout in LAYOUTS {
        let sets = with(&with(SGD, layout), &["optimizer.clip=None"]);
        let (ran, after) = tiny_with_weights(&sets);
        let norm = distance(&after, &initial_weights(&sets));
        // Parameters up to 1 hold a gradient with an error of 6e-8.
        let difference = relative(norm, ran.steps[0].grad_norm);
        assert!(norm > 1.0 && difference < 2e-6, "{layout:?}: {norm} {difference}");
    }
}

#[test]
fn clipping_scales_the_whole_gradient_to_the_limit() {
    for layout in LAYOUTS {
        let sets = with(&with(SGD, layout), &["optimizer.clip=0.25"]);
        let (ran, after) = tiny_with_weights(&sets);
        let start = initial_weights(&sets);
        let length = distance(&after, &start);
        assert!(
            ran.steps[0].grad_norm > 1.0 && relative(length, 0.25) < 1e-5,
            "{layout:?}: {length}"
        );
        // The update has the direction of the gradient: no part has a scale of its own.
        let (_, unclipped) = tiny_with_weights(&with(&sets, &["optimizer.clip=None"]));
        let factor = (0.25 / ran.steps[0].grad_norm) as f32;
        for (name, start) in &start {
            let moves = start.iter().zip(&after[name]).zip(&unclipped[name]);
            for ((start, clipped), whole) in moves {
                let off = (clipped - start) - (whole - start) * factor;
                assert!(off.abs() < 3e-7, "{layout:?} {name}: {off:e}");
            }
        }
    }
}

#[test]
fn the_rate_is_that_of_the_step() {
    let sets = with(SGD, &["schedule.warmup_steps=4", "optimizer.clip=0.5"]);
    let (ran, after) = tiny_with_weights(&sets);
    let length = distance(&after, &initial_weights(&sets));
    assert!(relative(length, 0.5 * 0.25) < 1e-5, "{length}");
    assert_eq!(ran.steps[0].lr, 0.25);
    let ran = run_sets(&with(&sets, &["train.steps=6", "optimizer.lr=0.125"]));
    let rates: Vec<f64> = ran.steps.iter().map(|s| s.lr / 0.125).collect();
    assert_eq!(rates, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]);
}

/// From zero moments, AdamW's corrected step is lr * g / (|g| + eps): the rate itself, for every
/// scale of the gradient. Weight decay applies before, and to matrices only.
#[test]
fn the_first_step_of_adamw_is_the_rate_in_every_parameter() {
    for layout in LAYOUTS {
        let (lr, decay) = (1e-3, 0.5);
        let sets = ["train.steps=1", "batch.micro=1", "optimizer.weight_decay=0.5"];
        let sets = with(&sets, layout); // the first of three warm-up steps to 3e-3
        let (_, after) = tiny_with_weights(&sets);
        for (name, start) in initial_weights(&sets) {
            let is_matrix = start.len() > 200;
            let shrink = if is_matrix { 1.0 - lr * decay } else { 1.0 };
            let length = |(p, q): (&f32, &f32)| (f64::from(*q) - f64::from(*p) * shrink).abs() / lr;
            let mut lengths: Vec<f64> = start.iter().zip(&after[&name]).map(length).collect();
            lengths.sort_by(f64::total_cmp);
            let (median, longest) = (lengths[lengths.len() / 2], lengths[lengths.len() - 1]);
            // The key biases, a third of their tensor, have no gradient. In fp32 a gain of 1 is
            // exact to 1e-4 of the rate.
            assert!(relative(median, 1.0) < 5e-4, "{layout:?} {name}: {median}");
            assert!(longest < 1.0005, "{layout:?} {name}: {longest}");
        }
    }
}

/// Along the gradient, the loss falls by the square of the gradient's norm. So a part that is
/// missing, stale, counted twice or wrongly scaled shows, even if it is so in every layout.
#[test]
fn the_gradient_is_the_slope_of_the_loss() {
    let data = one_window();
    for layout in LAYOUTS {
        let slope = |rate: &str, lr: f64| {
            let sets = ["optimizer.clip=None", "batch.global=4", "train.steps=2", rate];
            let (ran, _) = run_with_weights(&data, &tiny(&with(&with(SGD, layout), &sets)));
            let squares = ran.steps[0].grad_norm.powi(2);
            (ran.steps[0].loss - ran.steps[1].loss) / lr / squares
        };
        let [a, b, c] = [("4e-4", 4e-4), ("2e-4", 2e-4), ("1e-4", 1e-4)]
            .map(|(text, lr)| slope(&format!("optimizer.lr={text}"), lr));
        // Richardson's extrapolation to a rate of zero, twice.
        let (ab, bc) = (2.0 * b - a, 2.0 * c - b);
        let slope = (4.0 * bc - ab) / 3.0;
        assert!((slope - 1.0).abs() < 2e-4, "{layout:?}: {slope}, from {a} {b} {c}");
    }
}

#[test]
fn evaluation_does_not_drop() {
    for layout in LAYOUTS {
        let [without, half] = ["model.dropout=0.0", "model.dropout=0.5"]
            .map(|dropout| run_sets(&with(&with(layout, &STANDSTILL), &[dropout])));
        assert_eq!(without.evals, half.evals, "{layout:?}");
        assert_ne!(without.steps[0].loss, half.steps[0].loss, "{layout:?}");
    }
}

#[test]
fn every_layout_starts_from_the_same_weights() {
    let start: Weights = initial_weights(&[]);
    for layout in LAYOUTS {
        assert!(initial_weights(layout) == start, "{layout:?}");
    }
}
