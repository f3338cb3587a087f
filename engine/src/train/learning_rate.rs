//! Learning rate over steps: a linear warm-up, then the curve of the config. The learning rate is a
//! pure function of the step, so a resumed run needs no state.
//!
//! The curves are the curves of transformers' `get_scheduler`
//! (tests/fixtures/make_schedule_fixture.py), one step earlier: the first step of transformers has
//! rate 0 and changes no parameter.

use config::{ScheduleConfig, ScheduleKind};
use std::f64::consts::PI;

/// The learning rate of a run by step.
#[derive(Clone, Debug, PartialEq)]
pub struct LearningRateSchedule {
    config: ScheduleConfig,
    peak: f64,
}

/// Time scale of `InverseSqrt` in steps, if the config has no warm-up.
const TIMESCALE: u64 = 10_000;

impl LearningRateSchedule {
    /// Makes the schedule with the peak rate `lr` (`optimizer.lr`).
    pub fn new(config: &ScheduleConfig, lr: f32) -> Self {
        Self { config: config.clone(), peak: f64::from(lr) }
    }

    /// Learning rate of `step`; the first step is 1. The warm-up has `step / warmup_steps` of the
    /// peak, and reaches exactly the peak at `warmup_steps`. A curve that decays is exactly the
    /// minimum from `decay_steps` on. Both values survive a cast to f32 unchanged.
    pub fn lr(&self, step: u64) -> f64 {
        let ScheduleConfig { kind, warmup_steps, min_lr, .. } = self.config;
        if step < warmup_steps {
            return self.peak * step as f64 / warmup_steps as f64;
        }
        match kind {
            ScheduleKind::Constant => self.peak,
            ScheduleKind::Cosine => self.decay(warmup_steps, step, cosine),
            ScheduleKind::Linear => self.decay(warmup_steps, step, |done| 1.0 - done),
            ScheduleKind::Wsd { stable_until } => self.decay(stable_until, step, cosine),
            ScheduleKind::InverseSqrt => {
                let (scale, shift) = match warmup_steps {
                    0 => (TIMESCALE, TIMESCALE),
                    warmup => (warmup, 0),
                };
                // The sum is in f64: a step may be as large as `u64::MAX`.
                let root = (scale as f64 / (step as f64 + shift as f64)).sqrt();
                (self.peak * root).max(f64::from(min_lr))
            }
        }
    }

    /// Rate of a curve that falls from the peak at step `from` to the minimum at `decay_steps`.
    /// `share` maps the finished part of the decay, 0 to 1, to the remaining part of the height.
    fn decay(&self, from: u64, step: u64, share: impl Fn(f64) -> f64) -> f64 {
        if step <= from {
            return self.peak;
        }
        let (decay_steps, min) = (self.config.decay_steps, f64::from(self.config.min_lr));
        if step >= decay_steps {
            return min;
        }
        let done = (step - from) as f64 / (decay_steps - from) as f64;
        min + (self.peak - min) * share(done)
    }
}

/// Cosine decay of SGDR (arXiv 1608.03983), without restarts.
fn cosine(done: f64) -> f64 {
    0.5 * (1.0 + (PI * done).cos())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    const KINDS: [ScheduleKind; 5] = [
        ScheduleKind::Cosine,
        ScheduleKind::Constant,
        ScheduleKind::Linear,
        ScheduleKind::Wsd { stable_until: 50 },
        ScheduleKind::InverseSqrt,
    ];

    fn schedule(kind: ScheduleKind, warmup_steps: u64, decay_steps: u64) -> LearningRateSchedule {
        let config = ScheduleConfig { kind, warmup_steps, decay_steps, min_lr: 1e-4 };
        LearningRateSchedule::new(&config, 1e-3)
    }

    #[test]
    fn every_curve_is_that_of_transformers() {
        #[derive(Deserialize)]
        struct Curve {
            kind: String,
            warmup_steps: u64,
            decay_steps: u64,
            stable_until: u64,
            lr: f32,
            min_lr: f32,
            rates: Vec<f64>,
        }
        let fixture = include_str!("../../../tests/fixtures/schedules.json");
        let curves: Vec<Curve> = serde_json::from_str(fixture).unwrap();
        let mut kinds = std::collections::BTreeSet::new();
        for curve in curves {
            let kind = match curve.kind.as_str() {
                "Cosine" => ScheduleKind::Cosine,
                "Constant" => ScheduleKind::Constant,
                "Linear" => ScheduleKind::Linear,
                "Wsd" => ScheduleKind::Wsd { stable_until: curve.stable_until },
                "InverseSqrt" => ScheduleKind::InverseSqrt,
                other => panic!("{other}"),
            };
            let Curve { warmup_steps, decay_steps, min_lr, .. } = curve;
            let config = ScheduleConfig { kind, warmup_steps, decay_steps, min_lr };
            let schedule = LearningRateSchedule::new(&config, curve.lr);
            assert!(curve.rates.len() > decay_steps as usize);
            // The curve of transformers begins with the rate of step 0.
            for (step, rate) in (0u64..).zip(curve.rates).skip(1) {
                let ours = schedule.lr(step);
                assert!((ours - rate).abs() <= 1e-12 * rate, "{config:?} {step}: {ours} {rate}");
            }
            kinds.insert(curve.kind);
        }
        assert_eq!(kinds.len(), KINDS.len());
    }

    #[test]
    fn warm_up_is_linear_and_reaches_the_peak_at_its_last_step() {
        for kind in KINDS {
            let schedule = schedule(kind, 10, 100);
            for step in 1..=10 {
                let expected = f64::from(1e-3f32) * step as f64 / 10.0;
                assert!((schedule.lr(step) - expected).abs() < 1e-18, "{kind:?}, step {step}");
            }
            assert_eq!(schedule.lr(10) as f32, 1e-3);
        }
    }

    #[test]
    fn a_curve_that_decays_is_half_way_down_in_the_middle_and_exactly_the_minimum_at_its_end() {
        for (kind, middle) in [(KINDS[0], 60), (KINDS[2], 60), (KINDS[3], 80)] {
            let schedule = schedule(kind, 10, 110);
            assert!((schedule.lr(middle) - 0.55e-3).abs() < 1e-9, "{kind:?}");
            for step in [110, 111, 10_000, u64::MAX] {
                assert_eq!(schedule.lr(step) as f32, 1e-4, "{kind:?}, step {step}");
            }
        }
    }

    #[test]
    fn no_curve_rises_after_the_warm_up_or_falls_below_the_minimum() {
        for kind in KINDS {
            let schedule = schedule(kind, 7, 93);
            assert!((7..200).all(|step| schedule.lr(step + 1) <= schedule.lr(step)), "{kind:?}");
            assert!(schedule.lr(u64::MAX) as f32 >= 1e-4, "{kind:?}");
        }
    }

    #[test]
    fn constant_stays_at_the_peak_from_step_one_without_warm_up() {
        let schedule = schedule(ScheduleKind::Constant, 0, 5);
        assert!([1, 2, 5, 6, 1000].iter().all(|&step| schedule.lr(step) as f32 == 1e-3));
    }

    #[test]
    fn a_stable_schedule_stays_at_the_peak_until_it_decays() {
        let schedule = schedule(ScheduleKind::Wsd { stable_until: 50 }, 10, 60);
        assert!((10..=50).all(|step| schedule.lr(step) as f32 == 1e-3));
        assert!(schedule.lr(51) < 1e-3);
    }

    #[test]
    fn a_decay_that_ends_inside_the_warm_up_drops_to_the_minimum_after_it() {
        let schedule = schedule(ScheduleKind::Cosine, 10, 4);
        assert_eq!(schedule.lr(10) as f32, 1e-3);
        assert_eq!(schedule.lr(11) as f32, 1e-4);
    }
}
