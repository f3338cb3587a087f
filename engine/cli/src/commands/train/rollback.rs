//! Automatic rollback of a run that diverges.

use super::Session;
use crate::commands::{CommandError, code, say};
use checkpoint::{self, Checkpoint};
use engine::run::Outcome;
use files::names::WEIGHTS;
use files::path_text::ShownPath;
use std::fmt::Display;
use std::io;
use std::sync::Arc;
use topology::counted;

impl Session<'_> {
    /// Returns the checkpoint to continue from if the run diverged and may be rolled back `left`
    /// times: the newest checkpoint before the skipped steps, or the run's start. Removes later
    /// checkpoints.
    pub(super) fn earlier(
        &self,
        left: u64,
        outcome: &Outcome,
    ) -> Result<Option<Arc<Checkpoint>>, CommandError> {
        let Some((from, to)) = outcome.diverged.filter(|_| left > 0) else { return Ok(None) };
        let failed = |error: &dyn Display| {
            let folder = self.dir.folder().path();
            let why = format!("{}: the run cannot be taken back: {error}", folder.shown());
            CommandError::new(code::IO, why)
        };
        // An error, before anything is read or removed, if the directory is another run's.
        let folder = self.dir.folder().find().map_err(|e| self.moved(&e))?;
        let found = folder.as_deref().map(|folder| checkpoint::newest_until(folder, from - 1));
        let (found, broken) = found.transpose().map_err(|e| failed(&e))?.unwrap_or_default();
        broken.iter().for_each(|(_, why)| say(&format!("warning: {why}")));
        let before = || self.start.as_ref().filter(|start| start.step() < from).cloned();
        let Some(found) = found.map(Arc::new).or_else(before) else {
            let last = from - 1;
            say(&format!(
                "no whole checkpoint is of step {last} or before, so the run cannot be taken back"
            ));
            return Ok(None);
        };
        // The check is repeated, since reading the checkpoints is slow.
        self.dir.held().check().map_err(|error| self.moved(&error))?;
        let later = folder.map_or(Ok(()), |folder| checkpoint::remove_after(&folder, found.step()));
        later.map_err(|e| failed(&e))?;
        self.dir.remove(WEIGHTS)?;
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

    /// Error about a directory that no longer belongs to the run; its files were not touched.
    pub(super) fn moved(&self, why: &io::Error) -> CommandError {
        let place = self.dir.held().place();
        let place =
            place.map_or_else(String::new, |place| format!("; it is {} now", place.shown()));
        CommandError::new(code::NOT_SAVED, format!("{}: {why}{place}", self.dir.shown()))
    }
}
