//! Times at which a run saves: by steps, by the clock, or by the cost of a save.

use super::lock;
use config::TrainConfig;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Schedule of the saves.
pub(super) struct Pace {
    every: u64,
    minutes: Option<f32>,
    overhead: Option<f32>,
    /// Shortest time between two saves by `overhead`, and before the first save, which has no known
    /// cost.
    least: Duration,
    /// Step after which a save is due by time, as rank 0 has found.
    wanted: AtomicU64,
    /// Time at which training continued after the last save, and how long it had waited.
    last: Mutex<(Instant, Duration)>,
}

impl Pace {
    pub(super) fn new(train: &TrainConfig, least: Duration) -> Self {
        Self {
            every: train.checkpoint_every,
            minutes: train.checkpoint_minutes,
            overhead: train.checkpoint_overhead,
            least,
            wanted: AtomicU64::new(0),
            last: Mutex::new((Instant::now(), Duration::ZERO)),
        }
    }

    /// Decides before `step` whether its save is due by time. While a save is `under_way`,
    /// `overhead` starts no other save, which would have to wait.
    pub(super) fn look_at_the_clock(&self, step: u64, under_way: bool) {
        let (ended, waited) = *lock(&self.last);
        let trained = ended.elapsed();
        let time = self.minutes.is_some_and(|minutes| trained.as_secs_f32() >= 60.0 * minutes);
        let cheap = |share| trained >= pause(share, waited, self.least);
        if time || (!under_way && self.overhead.is_some_and(cheap)) {
            self.wanted.store(step, Ordering::SeqCst);
        }
    }

    /// Whether a save of the states after `step` is due.
    pub(super) fn is_due(&self, step: u64) -> bool {
        // After a saved step no rank continues before all have met, so none sees a later decision.
        (self.every > 0 && step.is_multiple_of(self.every))
            || self.wanted.load(Ordering::SeqCst) == step
    }

    /// Notes that training continues, after it has waited `waited` for a save.
    pub(super) fn saved(&self, waited: Duration) {
        *lock(&self.last) = (Instant::now(), waited);
    }
}

/// Training time after a save, so that the next save costs at most a `share` of the time. `waited`:
/// time that training waited for the save.
fn pause(share: f32, waited: Duration, least: Duration) -> Duration {
    let paid = Duration::try_from_secs_f64(waited.as_secs_f64() / f64::from(share));
    paid.unwrap_or(Duration::MAX).max(least)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_save_that_cost_a_second_is_paid_by_a_hundred_and_a_cheap_one_by_ten_minutes() {
        let (seconds, least) = (Duration::from_secs, Duration::from_secs(600));
        assert_eq!(pause(0.01, Duration::ZERO, least), least);
        assert_eq!(pause(0.01, seconds(1), least), least);
        let near = |a: Duration, b: Duration| a.abs_diff(b) < Duration::from_millis(9);
        assert!(near(pause(0.01, seconds(900), least), seconds(90_000)));
        assert!(near(pause(1.0, seconds(900), least), seconds(900)));
        assert!(near(pause(0.5, seconds(1), Duration::ZERO), seconds(2)));
        assert_eq!(pause(f32::MIN_POSITIVE, Duration::MAX, least), Duration::MAX);
    }
}
