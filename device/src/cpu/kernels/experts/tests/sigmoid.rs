//! Routes by sigmoid scores, compared with their formulas in f64.

use super::super::super::testing::{Rig, assert_close, differences, inner, noise};
use crate::op::{Op, ScoreRule, SigmoidRule};
use crate::{Dtype, Tensor};

/// Settings of a route by sigmoid scores.
#[derive(Clone, Copy, Debug)]
struct Settings {
    experts: usize,
    per_token: usize,
    groups: usize,
    kept_groups: usize,
    normalize: bool,
    scale: f64,
}

impl Settings {
    fn scoring(self, correction: Tensor) -> ScoreRule {
        let Self { groups, kept_groups, normalize, scale, .. } = self;
        let scale = scale as f32;
        ScoreRule::Sigmoid(SigmoidRule { correction, groups, kept_groups, normalize, scale })
    }

    /// Weights of given choices in f64.
    fn weights(self, logits: &[f64], choices: &[f64]) -> Vec<f64> {
        let rows = logits.chunks(self.experts).zip(choices.chunks(self.per_token));
        let weights = rows.flat_map(|(logits, choices)| {
            let score = |expert: &f64| 1.0 / (1.0 + (-logits[*expert as usize]).exp());
            let scores: Vec<f64> = choices.iter().map(score).collect();
            let sum = if self.normalize { scores.iter().sum::<f64>() + 1e-20 } else { 1.0 };
            scores.into_iter().map(move |s| s / sum * self.scale).collect::<Vec<f64>>()
        });
        weights.collect()
    }

    /// The choice of a row in f64.
    fn choice(self, logits: &[f64], correction: &[f64]) -> Vec<f64> {
        let both = logits.iter().zip(correction);
        let corrected: Vec<f64> = both.map(|(z, c)| 1.0 / (1.0 + (-z).exp()) + c).collect();
        let largest = |numbers: &[f64], count: usize| {
            let mut sorted: Vec<usize> = (0..numbers.len()).collect();
            sorted.sort_by(|a, b| numbers[*b].total_cmp(&numbers[*a]));
            sorted.truncate(count);
            sorted
        };
        let size = self.experts / self.groups;
        let scores: Vec<f64> = corrected
            .chunks(size)
            .map(|group| largest(group, 2).into_iter().map(|e| group[e]).sum())
            .collect();
        let kept = largest(&scores, self.kept_groups);
        let of_kept: Vec<f64> = corrected
            .iter()
            .enumerate()
            .map(|(e, c)| if kept.contains(&(e / size)) { *c } else { f64::NEG_INFINITY })
            .collect();
        largest(&of_kept, self.per_token).into_iter().map(|e| e as f64).collect()
    }

    /// Choices and weights of the op.
    fn route(self, threads: usize, logits: &[f64], correction: &[f64]) -> [Vec<f64>; 2] {
        let (mut rig, tokens) = (Rig::new(threads), logits.len() / self.experts);
        let logits = rig.put(Dtype::F32, (tokens, self.experts), logits);
        let scoring = self.scoring(rig.put(Dtype::F32, (1, self.experts), correction));
        let weights = rig.out(Dtype::F32, (tokens, self.per_token));
        let choices = rig.out(Dtype::I32, (tokens, self.per_token));
        rig.run(&Op::Route { logits, weights, choices, scoring });
        [rig.get(choices), rig.get(weights)]
    }
}

const CASES: [(usize, usize, usize, usize); 6] =
    [(1, 1, 1, 1), (8, 3, 1, 1), (8, 2, 4, 1), (12, 4, 3, 2), (128, 8, 1, 1), (256, 8, 8, 4)];

#[test]
fn the_corrected_scores_of_the_kept_groups_decide_and_plain_scores_weigh() {
    for (experts, per_token, groups, kept_groups) in CASES {
        for (normalize, scale) in [(true, 1.0), (true, 2.5), (false, 1.5)] {
            let of = Settings { experts, per_token, groups, kept_groups, normalize, scale };
            let logits: Vec<f64> = noise(1, 9 * experts).iter().map(|z| 3.0 * z).collect();
            // The correction is as large as differences of scores, and makes some of them negative.
            let correction: Vec<f64> = noise(2, experts).iter().map(|c| 0.7 * c - 0.4).collect();
            let [choices, weights] = of.route(1, &logits, &correction);
            let rows = logits.chunks(experts).zip(choices.chunks(per_token));
            let mut moved = 0;
            for (logits, chosen) in rows {
                assert_eq!(chosen, of.choice(logits, &correction), "{of:?}");
                moved += usize::from(chosen != of.choice(logits, &vec![0.0; experts]));
            }
            assert!(experts == 1 || moved > 0, "{of:?}: the correction changes a choice");
            assert_close(&weights, &of.weights(&logits, &choices), 0.0, 2e-6);
            let again = of.route(3, &logits, &correction);
            assert_eq!(again, [choices, weights], "{of:?}: threads change no bit");
        }
    }
}

/// Of equal scores and of equal groups the lower index comes first; NaN counts as -inf.
#[test]
fn ties_go_to_the_lower_index_within_and_between_groups() {
    let of = Settings {
        experts: 6,
        per_token: 2,
        groups: 3,
        kept_groups: 1,
        normalize: true,
        scale: 1.0,
    };
    let nan = f64::NAN;
    for (logits, want) in [
        ([1.0; 6], [0.0, 1.0]),
        ([0.0, 1.0, 1.0, 0.0, 0.0, 1.0], [1.0, 0.0]),
        ([0.0, 1.0, 1.0, 1.0, 1.0, 1.0], [2.0, 3.0]),
        ([nan, 9.0, 0.0, 0.0, 1.0, 0.0], [4.0, 5.0]),
        ([nan; 6], [0.0, 1.0]),
    ] {
        assert_eq!(of.route(1, &logits, &[0.0; 6])[0], want, "{logits:?}");
    }
    let all = Settings { kept_groups: 3, ..of };
    assert_eq!(all.route(1, &[nan, 2.0, 1.0, 1.0, 0.0, 1.0], &[0.0; 6])[0], [1.0, 2.0]);
}

#[test]
fn the_gradient_of_a_route_by_sigmoid_is_that_of_its_weights() {
    for (experts, per_token, groups, kept_groups) in CASES {
        for (normalize, scale) in [(true, 1.0), (true, 2.5), (false, 1.5)] {
            let of = Settings { experts, per_token, groups, kept_groups, normalize, scale };
            let tokens = 4;
            let z: Vec<f64> = noise(3, tokens * experts).iter().map(|z| 2.0 * z).collect();
            let (d, correction) = (noise(4, tokens * per_token), noise(5, experts));
            let [choices, _] = of.route(1, &z, &correction);
            let mut rig = Rig::new(1);
            let logits = rig.put(Dtype::F32, (tokens, experts), &z);
            let chosen = rig.put(Dtype::I32, (tokens, per_token), &choices);
            let d_weights = rig.put(Dtype::F32, (tokens, per_token), &d);
            let scoring = of.scoring(rig.put(Dtype::F32, (1, experts), &correction));
            let balance = None;
            rig.run(&Op::RouteBackward { logits, choices: chosen, d_weights, scoring, balance });
            let want = differences(&z, |z| inner(&of.weights(z, &choices), &d));
            let got = rig.get(logits);
            assert_close(&got, &want, 3e-6, 1e-5);
            for (row, chosen) in got.chunks(experts).zip(choices.chunks(per_token)) {
                let others = (0..experts).filter(|e| !chosen.contains(&(*e as f64)));
                others.for_each(|e| assert_eq!(row[e], 0.0));
            }
        }
    }
}
