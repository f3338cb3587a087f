//! `onebox train` in a process other than 0: it writes its part of checkpoints, and prints nothing.

use super::prepared::PreparedRun;
use super::{TrainArgs, code_of};
use crate::commands::exit::{CommandError, code};
use crate::commands::processes::Team;
use crate::commands::resume::unusable;
use crate::commands::signals::Signals;
use crate::commands::weights::{BY_KEY, base, factors, pretrained};
use ::data::progress::Silence;
use checkpoint::{Checkpoint, CheckpointError, RunFolder, open_named, open_step};
use engine::run::{RunOptions, train};
use engine::run_dir::RunDir;
use files::directory::Directory;
use files::held::LockedRunDir;
use files::input;
use files::names::LOCK;
use files::path_text::ShownPath;
use serde::{Deserialize, Serialize};
use std::io::{self, ErrorKind};
use std::path::PathBuf;
use std::sync::Arc;

/// Start of a run, as process 0 sends it to the other processes.
#[derive(Serialize, Deserialize)]
pub(super) struct Start {
    dir: PathBuf,
    /// Contents of the directory's lock file.
    lock: String,
    /// Checkpoint that the run starts from.
    from: Option<PathBuf>,
    /// Whether the run is a fork, so that earlier skipped steps do not count.
    fork: bool,
}

impl Start {
    pub(super) fn of(dir: &RunDir, from: Option<&Arc<Checkpoint>>) -> Self {
        let path = dir.held().place().unwrap_or_else(|| dir.held().called(""));
        Self {
            lock: dir.held().check().and_then(lock_of).unwrap_or_default(),
            dir: path.canonicalize().unwrap_or(path),
            from: from
                .map(|from| from.path().canonicalize().unwrap_or_else(|_| from.path().into())),
            fork: dir.forked_from().is_some(),
        }
    }
}

fn lock_of(dir: &Directory) -> io::Result<String> {
    let text = input::beginning(dir.read(LOCK)?, 64)?;
    String::from_utf8(text).map_err(io::Error::other)
}

/// Checkpoint to which a run is rolled back.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(super) enum RollbackTarget {
    /// Checkpoint of this step, in the run's own folder.
    Own(u64),
    /// Checkpoint from which the run started.
    Start,
}

impl RollbackTarget {
    pub(super) fn of(dir: &RunDir, from: &Checkpoint) -> Self {
        if dir.folder().has(from) { Self::Own(from.step()) } else { Self::Start }
    }
}

/// Everything that a process other than process 0 has before the first step.
pub(super) struct Follower<'a> {
    pub(super) args: &'a TrainArgs,
    pub(super) run: &'a PreparedRun,
    pub(super) team: &'a Team,
}

impl Follower<'_> {
    pub(super) fn follow(&self, signals: &Signals) -> Result<(), CommandError> {
        let start: Start = self.team.first("start", None)?;
        let opened = self.open(&start);
        let (dir, first) = self.team.all("ready", opened, |_| Vec::new())?;
        let (folder, mut from) = (RunFolder::of(&dir), first.clone());
        let stored = from.as_ref().map(|from| from.manifest().rollback_history.clone());
        let mut rollback_history = stored.unwrap_or_default();
        loop {
            let PreparedRun { loaded, built, data, .. } = self.run;
            let pretrained = match &from {
                None => pretrained(&loaded.config, &built.decoder)?,
                Some(from) => base(&loaded.config, &built.decoder, from, BY_KEY, &Silence)?,
            };
            let initial = match &from {
                None => factors(&loaded.config, &built.decoder)?,
                Some(_) => None,
            };
            let options = RunOptions {
                initial,
                weights: Some(Arc::clone(&dir)),
                checkpoints: Some(folder.clone()),
                pretrained,
                resume: from.clone(),
                rollback_history: Some(rollback_history.clone()),
                skipped_in_a_row: start.fork.then_some(0),
                ..self.run.options(self.args, self.team, signals)
            };
            train(&loaded.config, built, data, &options, &mut |_| {})
                .map_err(|error| CommandError::new(code_of(&error), error))?;
            let next: Option<RollbackTarget> = self.team.first("next", None)?;
            from = match next {
                None => return Ok(()),
                Some(RollbackTarget::Start) => first.clone(),
                Some(RollbackTarget::Own(step)) => Some(Arc::new(earlier(&folder, step)?)),
            };
            if let Some(from) = &from {
                rollback_history = rollback_history.with_rollback(from.step());
            }
        }
    }

    /// Opens the checkpoint that the run starts from, if this process sees process 0's directory.
    fn open(
        &self,
        start: &Start,
    ) -> Result<(Arc<LockedRunDir>, Option<Arc<Checkpoint>>), CommandError> {
        let directory = Directory::open(&start.dir);
        let seen = directory.and_then(|directory| Ok((lock_of(&directory)?, directory)));
        let why = match seen {
            Ok((lock, directory)) if lock == start.lock => {
                let from = start.from.as_ref().map(|from| open_named(from).map(Arc::new));
                let from = from.transpose().map_err(unusable)?;
                return Ok((LockedRunDir::by_another(directory), from));
            }
            Ok(_) => "another file".to_owned(),
            Err(error) => error.to_string(),
        };
        let why = format!(
            "{}: its lock is not that of process 0 ({why}): the run directory must be on a file system that all nodes share",
            start.dir.shown()
        );
        Err(CommandError::new(code::NO_RUN_DIR, why))
    }
}

/// Opens the checkpoint of `step` in the run's own `folder`.
fn earlier(folder: &RunFolder, step: u64) -> Result<Checkpoint, CommandError> {
    let unreadable = |source| CheckpointError::Io { path: folder.path(), source };
    let found = folder.find().and_then(|found| found.ok_or_else(|| ErrorKind::NotFound.into()));
    let found = found.map_err(|error| unusable(unreadable(error)))?;
    open_step(&found, step).map_err(unusable)
}
