//! Learning rate over steps: a linear warm-up, then a cosine (SGDR, arXiv 1608.03983, without
//! restarts) or the peak throughout. `run` asks for it once per step; a pure function, so a resumed
//! run needs no state.

use crate::config::{ScheduleConfig, ScheduleKind};

/// The schedule of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    kind: ScheduleKind,
    peak: f64,
    min: f64,
    warmup_steps: u64,
    decay_steps: u64,
}

impl Schedule {
    /// `lr` is the peak (`optimizer.lr`).
    pub fn new(config: &ScheduleConfig, lr: f32) -> Self {
        Self {
            kind: config.kind,
            peak: f64::from(lr),
            min: f64::from(config.min_lr),
            warmup_steps: config.warmup_steps,
            decay_steps: config.decay_steps,
        }
    }

    /// The rate of `step`; the first step is 1. `step / warmup_steps` of the peak up to
    /// `warmup_steps`, where the peak is reached exactly; `Cosine` is exactly the minimum from
    /// `decay_steps` on. Both survive a cast to f32 unchanged.
    pub fn lr(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            return self.peak * step as f64 / self.warmup_steps as f64;
        }
        if step == self.warmup_steps || self.kind == ScheduleKind::Constant {
            return self.peak;
        }
        if step >= self.decay_steps {
            return self.min;
        }
        let done =
            (step - self.warmup_steps) as f64 / (self.decay_steps - self.warmup_steps) as f64;
        let share = 0.5 * (1.0 + (std::f64::consts::PI * done).cos());
        self.min + (self.peak - self.min) * share
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schedule(kind: ScheduleKind, warmup_steps: u64, decay_steps: u64) -> Schedule {
        let config = ScheduleConfig { kind, warmup_steps, decay_steps, min_lr: 1e-4 };
        Schedule::new(&config, 1e-3)
    }

    #[test]
    fn warm_up_is_linear_and_reaches_the_peak_at_its_last_step() {
        for kind in [ScheduleKind::Cosine, ScheduleKind::Constant] {
            let schedule = schedule(kind, 10, 100);
            for step in 1..=10 {
                let expected = f64::from(1e-3f32) * step as f64 / 10.0;
                assert!((schedule.lr(step) - expected).abs() < 1e-18, "step {step}");
            }
            assert_eq!(schedule.lr(10) as f32, 1e-3);
        }
    }

    #[test]
    fn cosine_is_half_way_down_in_the_middle_and_exactly_the_minimum_from_decay_steps_on() {
        let schedule = schedule(ScheduleKind::Cosine, 10, 110);
        assert!((schedule.lr(60) - 0.55e-3).abs() < 1e-9);
        for step in [110, 111, 10_000, u64::MAX] {
            assert_eq!(schedule.lr(step) as f32, 1e-4);
        }
    }

    #[test]
    fn cosine_never_rises_after_the_warm_up() {
        let schedule = schedule(ScheduleKind::Cosine, 7, 93);
        assert!((7..200).all(|step| schedule.lr(step + 1) <= schedule.lr(step)));
    }

    #[test]
    fn constant_stays_at_the_peak_from_step_one_without_warm_up() {
        let schedule = schedule(ScheduleKind::Constant, 0, 5);
        assert!([1, 2, 5, 6, 1000].iter().all(|&step| schedule.lr(step) as f32 == 1e-3));
    }

    #[test]
    fn a_decay_that_ends_inside_the_warm_up_drops_to_the_minimum_after_it() {
        let schedule = schedule(ScheduleKind::Cosine, 10, 4);
        assert_eq!(schedule.lr(10) as f32, 1e-3);
        assert_eq!(schedule.lr(11) as f32, 1e-4);
    }
}
