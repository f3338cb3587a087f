//! `onebox train` in a process whose ranks are not the first: it writes its shares of checkpoints, and says nothing.

use super::prepared::Looked;
use super::{TrainArgs, code_of, end_without};
use crate::checkpoint::{Checkpoint, FOLDER, open_named};
use crate::cli::exit::{Failed, code};
use crate::cli::processes::Team;
use crate::cli::resume::unusable;
use crate::cli::signals::Signals;
use crate::cli::weights::pretrained;
use crate::config::Loaded;
use crate::data::Dataset;
use crate::run::{RunOptions, train};
use crate::run_dir::{RunDir, WEIGHTS, own};
use crate::train::build::Built;
use crate::train::detours::Detours;
use serde::{Deserialize, Serialize};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Where a run starts, as process 0 tells the others.
#[derive(Serialize, Deserialize)]
pub(super) struct Start {
    dir: PathBuf,
    /// What stands in the lock of the directory.
    lock: String,
    /// The checkpoint that the run goes on from.
    from: Option<PathBuf>,
    /// It is a fork, whose skipped steps do not count.
    fork: bool,
}

impl Start {
    pub(super) fn of(dir: &RunDir, from: Option<&Arc<Checkpoint>>) -> Self {
        let path = dir.path().canonicalize().unwrap_or_else(|_| dir.path().to_owned());
        Self {
            lock: lock_of(&path).unwrap_or_default(),
            dir: path,
            from: from
                .map(|from| from.path().canonicalize().unwrap_or_else(|_| from.path().into())),
            fork: dir.forked_from().is_some(),
        }
    }
}

fn lock_of(dir: &Path) -> std::io::Result<String> {
    let mut text = String::new();
    own::read(&dir.join(own::LOCK))?.take(64).read_to_string(&mut text)?;
    Ok(text)
}

/// Everything that such a process has before the first step.
pub(super) struct Follower<'a> {
    pub(super) args: &'a TrainArgs,
    pub(super) loaded: &'a Loaded,
    pub(super) built: &'a Built,
    pub(super) data: &'a Arc<Dataset>,
    pub(super) looked: &'a Looked,
    pub(super) team: &'a Team,
}

impl Follower<'_> {
    pub(super) fn run(&self, signals: &Signals) -> Result<(), Failed> {
        let start: Start = self.team.first("start", None)?;
        let from = self.open(&start);
        let mut from = self.team.all("ready", from, |_| Vec::new())?;
        let mut detours = from.as_ref().map(|from| from.detours().clone()).unwrap_or_default();
        loop {
            let options = self.options((&start, signals), (from.clone(), &detours))?;
            let ran = train(&self.loaded.config, self.built, self.data, &options, &mut |_| {});
            ran.map_err(|error| Failed::new(code_of(&error), error))?;
            let next: Option<PathBuf> = self.team.first("next", None)?;
            let Some(next) = next else { return Ok(()) };
            let earlier = open_named(&next).map_err(unusable)?;
            detours = detours.and(earlier.step());
            from = Some(Arc::new(earlier));
        }
    }

    /// What the run goes on from, once this process sees the directory of process 0.
    fn open(&self, start: &Start) -> Result<Option<Arc<Checkpoint>>, Failed> {
        let seen = lock_of(&start.dir);
        if seen.as_ref().ok() != Some(&start.lock) {
            let why = seen.err().map_or("another file".to_owned(), |error| error.to_string());
            return Err(Failed::new(
                code::NO_RUN_DIR,
                format!(
                    "{}: its lock is not that of process 0 ({why}): the run directory must be on a file system that all nodes share",
                    start.dir.display()
                ),
            ));
        }
        let Some(from) = &start.from else { return Ok(None) };
        open_named(from).map(|from| Some(Arc::new(from))).map_err(unusable)
    }

    fn options(
        &self,
        (start, signals): (&Start, &Signals),
        (from, detours): (Option<Arc<Checkpoint>>, &Detours),
    ) -> Result<RunOptions, Failed> {
        let pretrained = match from {
            None => pretrained(&self.loaded.config, &self.built.gpt)?,
            Some(_) => None,
        };
        Ok(RunOptions {
            processes: self.team.processes(),
            bind: true,
            stop: Arc::clone(&signals.stop),
            watcher: Some(self.args.watcher(&signals.starting)),
            weights: Some(start.dir.join(WEIGHTS)),
            checkpoints: Some(start.dir.join(FOLDER)),
            copies_states: Some(self.looked.copies_states),
            pretrained,
            resume: from,
            detours: Some(detours.clone()),
            skipped_in_a_row: start.fork.then_some(0),
            stuck: Some((Duration::from_secs(10), end_without)),
            trace: self.args.trace.start(),
            ..RunOptions::default()
        })
    }
}
