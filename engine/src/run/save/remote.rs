//! Saving where ranks are in several processes: each writes its own files into the shared directory, and rank 0's process
//! learns what the others wrote.

use super::{Saver, lock};
use checkpoint::write::RankRecord;
use device::{Communicator, Error, Rank};
use serde::{Deserialize, Serialize};

/// What a rank of another process tells rank 0.
#[derive(Serialize, Deserialize)]
struct Report {
    file: Option<RankRecord>,
    problem: Option<String>,
    /// The disk had no room.
    full: bool,
}

impl Saver {
    /// Whether rank 0's process has begun this checkpoint. Forgets the last one in all other processes.
    pub(super) fn is_well_everywhere(
        &self,
        rank: Rank,
        world: &Communicator,
    ) -> Result<bool, Error> {
        if !world.has_remote_ranks() {
            return Ok(self.is_well());
        }
        let first = Rank { tp: 0, dp: 0, ..rank };
        if !world.has(first) {
            let shared = &mut *lock(&self.shared);
            (shared.problem, shared.files[rank.index()]) = (None, None);
        }
        let ill = rank == first && !self.is_well();
        let all = world.agree(rank, "checkpoint", u64::from(ill))?;
        Ok(!all.contains(&1))
    }

    /// Brings what ranks of other processes have written to rank 0.
    pub(super) fn bring(&self, rank: Rank, world: &Communicator) -> Result<(), Error> {
        if !world.has_remote_ranks() {
            return Ok(());
        }
        let report = {
            let shared = &mut *lock(&self.shared);
            let away = !world.has(Rank { tp: 0, dp: 0, ..rank });
            let file = shared.files[rank.index()].take_if(|_| away);
            let (problem, full) = (shared.problem.clone(), shared.full);
            serde_json::to_vec(&Report { file, problem, full })
        };
        let report = report.unwrap_or_else(|_| unreachable!("numbers, texts and lists are JSON"));
        for (from, report) in world.gather_remote(rank, "written", &report)? {
            let report = serde_json::from_slice(&report);
            let Report { file, problem, full } =
                report.unwrap_or_else(|_| unreachable!("the same program has written it"));
            lock(&self.shared).full |= full;
            if let Some(problem) = problem {
                self.give_up(problem);
            }
            lock(&self.shared).files[from] = file;
        }
        Ok(())
    }
}
