//! Errors of a run directory.

use super::RunMode;
use files::names::{CONFIG, METRICS};
use files::path_text::ShownPath;
use std::io;
use std::path::{Path, PathBuf};

/// Error of a run directory that cannot be used or written.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what variants and fields are")]
pub enum RunDirError {
    #[error(
        "{} already holds a run; give --resume to go on with it, --fork to start from it in a new \
         directory, --overwrite to remove it, or another --run-dir", .0.shown()
    )]
    HoldsRun(PathBuf),
    #[error(
        "{} has a {CONFIG} and no {METRICS}: that is no run of onebox, and nothing was removed; give \
         another --run-dir", .0.shown()
    )]
    NotOurs(PathBuf),
    #[error("{} already holds a run, and nothing was replaced; give another directory", .0.shown())]
    Taken(PathBuf),
    #[error(
        "{} is what a `checkpoint reshard` or `checkpoint import` left that was ended too early: run that command again, or \
         remove the directory of that run", .0.shown()
    )]
    Unfinished(PathBuf),
    #[error(
        "{} is there and is not what would be written, and nothing was replaced; remove it, or give \
         another directory", .0.shown()
    )]
    Differs(PathBuf),
    #[error("{} is no file of onebox, and nothing was removed; move it away, or give another --run-dir", .0.shown())]
    Strange(PathBuf),
    #[error("{} holds no run ({METRICS} or {CONFIG}) for --fork to start from", .0.shown())]
    NothingToFork(PathBuf),
    #[error("{0} needs --run-dir: it names the run to start from")]
    NeedsDirectory(RunMode),
    #[error(
        "{} is in use by another onebox{}; wait for it, or give another directory",
        path.shown(), of(*pid)
    )]
    InUse { path: PathBuf, pid: Option<u32> },
    #[error(
        "the run name {0:?} cannot name a directory; set `name` to one without / and a leading dot"
    )]
    BadName(String),
    #[error(
        "{} is {what}, not a place for the files of a run; give a directory of its own, such as {}",
        path.shown(), path.join("run").shown()
    )]
    Unfit { path: PathBuf, what: &'static str },
    #[error("{} is not a directory; give another one", .0.shown())]
    NotADirectory(PathBuf),
    #[error("{} is {what} of the run {}: name {}", path.shown(), run.shown(), run.shown())]
    AmongCheckpoints { path: PathBuf, what: &'static str, run: PathBuf },
    #[error(
        "{} is where {key} takes its files from: what a run writes there would become its data; give another --run-dir",
        path.shown()
    )]
    AmongData { path: PathBuf, key: &'static str },
    #[error("{} is a checkpoint, not a run: name the directory of a run, or a new one", .0.shown())]
    Checkpoint(PathBuf),
    #[error(
        "cannot {action} {}: {source}; check permissions and free space, or give another directory",
        path.shown()
    )]
    Io { action: &'static str, path: PathBuf, source: io::Error },
}

fn of(pid: Option<u32>) -> String {
    pid.map_or(String::new(), |pid| format!(" (process {pid})"))
}

pub(super) fn cannot(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> RunDirError {
    move |source| RunDirError::Io { action, path: path.to_owned(), source }
}
