//! Rollback: a diverged run restarts from an earlier checkpoint and draws other samples, since the
//! same samples would make it diverge again. Checkpoints store the rollbacks for later resumes.

use serde::{Deserialize, Serialize};

/// The steps to which a run was rolled back, in the order of the rollbacks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RollbackHistory(Vec<u64>);

impl RollbackHistory {
    /// This history plus a rollback to the state after `step`.
    #[must_use]
    pub fn with_rollback(&self, step: u64) -> Self {
        Self(self.0.iter().copied().chain([step]).collect())
    }

    /// Whether the run was never rolled back.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Seed for the samples of `step` in a run with the seed `seed`.
    pub fn seed(&self, seed: u64, step: u64) -> u64 {
        let before = self.0.iter().filter(|after| step > **after).count();
        (0..before as u64).fold(seed, device::random::key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_after_a_rollback_and_only_those_have_samples_of_their_own() {
        let (none, one) =
            (RollbackHistory::default(), RollbackHistory::default().with_rollback(40));
        let (again, before) = (one.with_rollback(40), one.with_rollback(20));
        let seeds = |step: u64| [&none, &one, &again, &before].map(|d| d.seed(7, step));
        assert_eq!(seeds(20), [7; 4]);
        let [a, b, c, d] = seeds(40);
        assert!(a == 7 && b == 7 && c == 7 && d != 7);
        let [a, b, c, d] = seeds(41);
        assert!(a == 7 && b != a && c != a && c != b && d == c);
    }
}
