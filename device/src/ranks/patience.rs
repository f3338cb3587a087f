//! Measures how long a thread has waited, if it polls at least once a second.

use std::time::{Duration, Instant};

/// Longest counted pause between two polls. A longer pause means that a signal or a debugger
/// stopped the whole process, so no other rank could use the time either.
const PAUSE: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(crate) struct Patience {
    last: Instant,
    waited: Duration,
}

impl Patience {
    pub(crate) fn new() -> Self {
        Self { last: Instant::now(), waited: Duration::ZERO }
    }

    /// Time waited so far. The thread calls this function at each poll.
    pub(crate) fn waited(&mut self) -> Duration {
        self.at(Instant::now())
    }

    fn at(&mut self, now: Instant) -> Duration {
        self.waited += now.saturating_duration_since(self.last).min(PAUSE);
        self.last = now;
        self.waited
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stopped_process_has_not_waited() {
        let mut patience = Patience::new();
        let second = Duration::from_secs(1);
        let mut now = patience.last;
        for waited in 1..=100 {
            now += second;
            assert_eq!(patience.at(now), waited * second);
        }
        now += Duration::from_secs(3600);
        assert!(patience.at(now) <= 100 * second + PAUSE);
        let before = patience.at(now);
        assert_eq!(patience.at(now + second), before + second);
    }
}
