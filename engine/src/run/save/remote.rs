//! Saves with ranks in several processes. Each rank writes its own files into the shared directory,
//! and reports them to rank 0's process.

use super::{Saver, lock};
use checkpoint::write::RankRecord;
use device::{Communicator, Error, Rank};
use serde::{Deserialize, Serialize};

/// Report of a rank of another process to rank 0.
#[derive(Serialize, Deserialize)]
struct Report {
    file: Option<RankRecord>,
    problem: Option<String>,
    /// Whether the disk had no room.
    full: bool,
}

impl Saver {
    /// Whether rank 0's process has begun this checkpoint. Other processes forget the last
    /// checkpoint.
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

    /// Sends the reports of ranks of other processes to rank 0's process.
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
