//! Taking a run back by itself when its steps come to nothing.

use super::refused;
use crate::checkpoint::{self, Checkpoint, FOLDER};
use crate::cli::exit::{Failed, code};
use crate::cli::say;
use crate::run::Outcome;
use crate::run_dir::{RunDir, WEIGHTS};
use std::fmt::Display;
use std::sync::Arc;
use topology::counted;

/// The checkpoint to go on from after a run that diverged and may be taken back `left` times: the newest from before
/// the steps that were skipped, and be it the one that the run `started` from. Those after it are removed.
pub(super) fn start(
    dir: &RunDir,
    started: Option<&Arc<Checkpoint>>,
    (left, outcome): (u64, &Outcome),
) -> Result<Option<Arc<Checkpoint>>, Failed> {
    let Some((from, to)) = outcome.diverged.filter(|_| left > 0) else { return Ok(None) };
    let folder = dir.path().join(FOLDER);
    let failed = |error: &dyn Display| {
        let why = format!("{}: the run cannot be taken back: {error}", folder.display());
        Failed::new(code::IO, why)
    };
    let found = checkpoint::newest_until(&folder, from - 1).map_err(|e| failed(&e))?;
    let (found, broken) = found;
    broken.iter().for_each(|(_, why)| say(&format!("warning: {why}")));
    let before = || started.filter(|start| start.step() < from).cloned();
    let Some(found) = found.map(Arc::new).or_else(before) else {
        let last = from - 1;
        say(&format!(
            "no whole checkpoint is of step {last} or before, so the run cannot be taken back"
        ));
        return Ok(None);
    };
    checkpoint::remove_after(&folder, found.step()).map_err(|e| failed(&e))?;
    dir.remove(WEIGHTS).map_err(refused)?;
    let first = outcome.not_finite.as_ref();
    let first = first.map_or_else(String::new, |name| format!(", the first in `{name}`"));
    say(&format!(
        "the gradients of steps {from} to {to} were not finite{first}: the run is taken back to the checkpoint of step {} \
         and goes on with other samples; it may be taken back {} more",
        found.step(),
        counted(left - 1, "time")
    ));
    Ok(Some(found))
}
