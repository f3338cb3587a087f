//! Going back: a run that came to nothing goes on from an earlier checkpoint with other samples, or it would come to the
//! same again. Checkpoints know of it, so that whoever goes on from them takes those samples too.

use serde::{Deserialize, Serialize};

/// Steps after which a run was taken back to and went another way, in the order in which it happened.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Detours(Vec<u64>);

impl Detours {
    /// Another one, after `step`.
    #[must_use]
    pub fn and(&self, step: u64) -> Self {
        Self(self.0.iter().copied().chain([step]).collect())
    }

    /// Never.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The seed of the samples of `step` in a run of `seed`.
    pub(crate) fn seed(&self, seed: u64, step: u64) -> u64 {
        let ways = self.0.iter().filter(|after| step > **after).count();
        (0..ways as u64).fold(seed, device::random::key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_after_a_detour_and_only_those_have_samples_of_their_own() {
        let (none, one) = (Detours::default(), Detours::default().and(40));
        let (again, before) = (one.and(40), one.and(20));
        let seeds = |step: u64| [&none, &one, &again, &before].map(|d| d.seed(7, step));
        assert_eq!(seeds(20), [7; 4]);
        let [a, b, c, d] = seeds(40);
        assert!(a == 7 && b == 7 && c == 7 && d != 7);
        let [a, b, c, d] = seeds(41);
        assert!(a == 7 && b != a && c != a && c != b && d == c);
    }
}
