//! The start-up proof of `onebox train`, before anything of the run is written.

use super::TrainArgs;
use super::prepared::PreparedRun;
use crate::commands::processes::Team;
use crate::commands::{CommandError, code, say};
use crate::report::stage::Stage;
use device::ErrorKind;
use engine::proof::{ProofError, StartupProof};
use std::time::Instant;
use topology::counted;

impl PreparedRun {
    /// Compares this process's GPUs with the `cpu` backend, unless the verdict is known.
    pub(super) fn prove(&self, args: &TrainArgs, team: &Team) -> Result<(), CommandError> {
        let (config, machine) = (&self.loaded.config, &self.built.machine);
        let unproven = |why: &str| {
            say(&format!(
                "warning: the start-up proof does not run: {why}. `--set train.proof=false` skips it"
            ));
        };
        let proof = match StartupProof::look(config, machine, team.processes.as_deref()) {
            Ok(None) => return Ok(()),
            Ok(Some(proof)) => proof,
            Err(why) => {
                unproven(&why);
                return Ok(());
            }
        };
        let (shows, began) = (!args.quiet && team.is_first(), Instant::now());
        let what = "start-up proof: one block and the head, on the GPU and on the CPU";
        let stage = shows.then(|| Stage::begin(what, 0));
        let ended = proof.run();
        drop(stage);
        match ended {
            Ok(summary) if shows => say(&format!(
                "proof   {} of one block and the head agree with the cpu backend, {} numbers in {:.1} s; kept for later starts",
                counted(summary.ops, "op"),
                summary.elements,
                began.elapsed().as_secs_f64()
            )),
            Ok(_) => {}
            Err(ProofError::NoRoom(error)) => unproven(&format!("it has no room: {error}")),
            Err(ProofError::Differs(found)) => {
                let why = format!("start-up proof: {found}\nnothing was written");
                return Err(CommandError::new(code::RANK, why));
            }
            Err(ProofError::Failed(error)) => {
                let code = match error.kind() {
                    ErrorKind::Bug => code::INTERNAL,
                    ErrorKind::NoCuda => code::CONFIG,
                    _ => code::RANK,
                };
                let why = format!("start-up proof: {error}\nnothing was written");
                return Err(CommandError::new(code, why));
            }
        }
        Ok(())
    }
}
