//! The directory of a run: opened or created, locked, and written durably. `train` opens it first.
//!
//! Invariant: the process that holds a [`RunDir`] is its only writer. The lock ends with the
//! process, also after `kill -9`. All writes go to the locked directory, and none to another
//! directory that gets its path later.

use rustix::fs::OFlags;
use std::fmt;
use std::fs::{self, TryLockError};
use std::io::{self, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::metrics::finished_step;
use crate::tensorboard;
use checkpoint::manifest::MANIFEST;
use checkpoint::{RunFolder, remove_all};
use files::directory::Directory;
use files::durable::sync_folder;
use files::held::LockedRunDir;
use files::input;
use files::names::{
    CHECKPOINTS, CONFIG, DAMAGED, FORKED, LOCK, METRICS, RUNS, TOKENIZER, UNFINISHED,
    UNFINISHED_CHECKPOINTS, WEIGHTS, any, any_of, has_run, holds_run, is_there, resolved,
};
use files::path_text::PathText;
use files::utc::Utc;

mod error;
pub mod kept;
pub use error::RunDirError;
use error::cannot;
use kept::check_kept;

/// Files that onebox writes into a run directory, and that `Overwrite` removes.
const WRITTEN: [&str; 10] = [
    FORKED,
    ".forked-from.tmp",
    METRICS,
    DAMAGED,
    CONFIG,
    WEIGHTS,
    TOKENIZER,
    UNFINISHED,
    ".config.ron.tmp",
    ".tokenizer.json.tmp",
];
/// Bytes at the end of a metrics file that contain its last line.
const TAIL: u64 = 64 << 10;

/// What to do with a directory that holds a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunMode {
    /// Refuse the directory.
    Fresh,
    /// Continue the run; a directory without a run becomes a new run.
    Resume,
    /// Leave the run unchanged, and make a new directory next to it.
    Fork,
    /// Remove the files that onebox wrote into the directory.
    Overwrite,
}

impl fmt::Display for RunMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fresh => "a new run",
            Self::Resume => "--resume",
            Self::Fork => "--fork",
            Self::Overwrite => "--overwrite",
        })
    }
}

/// A run directory, locked while this value lives.
#[derive(Debug)]
pub struct RunDir {
    forked_from: Option<PathBuf>,
    held: Arc<LockedRunDir>,
    folder: RunFolder,
}

impl RunDir {
    /// Opens or creates the directory, and locks it. Without `dir`, it is a new `runs/NAME-TIME`
    /// (UTC) below the working directory. A fork of `DIR` is a new `DIR-2` (or -3, ..).
    ///
    /// # Errors
    /// [`RunDirError`] if `mode` does not allow the contents of the directory, another process has
    /// locked it, or it cannot be written.
    pub fn create(dir: Option<&Path>, name: &str, mode: RunMode) -> Result<Self, RunDirError> {
        dir.map_or(Ok(()), no_checkpoint)?;
        match (dir, mode) {
            (Some(dir), RunMode::Fork) => Self::fork(dir),
            (Some(dir), _) => Self::at(dir, mode),
            (None, RunMode::Fresh | RunMode::Overwrite) => Self::at_default(Path::new(RUNS), name),
            (None, RunMode::Resume | RunMode::Fork) => Err(RunDirError::NeedsDirectory(mode)),
        }
    }

    /// Checks whether [`create`](Self::create) accepts the directory, and changes nothing. It does not
    /// ask whether another process uses the directory.
    ///
    /// # Errors
    /// As for [`create`](Self::create).
    pub fn check(dir: Option<&Path>, name: &str, mode: RunMode) -> Result<(), RunDirError> {
        dir.map_or(Ok(()), no_checkpoint)?;
        let dir = match (dir, mode) {
            (None, RunMode::Fresh | RunMode::Overwrite) => return check_name(name),
            (None, RunMode::Resume) => return Err(RunDirError::NeedsDirectory(mode)),
            (dir, RunMode::Fork) => return Self::source(dir).map(drop),
            (Some(dir), RunMode::Fresh | RunMode::Resume | RunMode::Overwrite) => dir,
        };
        check_place(dir)?;
        match Directory::open(dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            opened => permit(&opened.map_err(cannot("read", dir))?, dir, mode),
        }
    }

    /// Opens or creates the directory of a run that is written as a whole, and locks it: `files`
    /// first, then its only checkpoint. Some of these files without a checkpoint are the remains of
    /// a process that died, and are accepted. No other contents are replaced.
    ///
    /// # Errors
    /// [`RunDirError`] if the directory has a run, or one of the files with other contents, if
    /// another process has locked it, or if it cannot be written.
    pub fn create_whole(dir: &Path, files: &[(&str, Vec<u8>)]) -> Result<Self, RunDirError> {
        no_checkpoint(dir)?;
        let run = Self::lock_at(dir)?;
        let directory = run.own("read", METRICS)?;
        if directory.has(METRICS) || any_of(directory) {
            return Err(RunDirError::Taken(dir.to_owned()));
        }
        for (name, bytes) in files {
            if directory.has(name) && !is(directory, name, bytes) {
                return Err(RunDirError::Differs(directory.called(name)));
            }
        }
        Ok(run)
    }

    /// Path of the directory when the run opened it, for messages.
    pub fn shown(&self) -> PathText<'_> {
        self.held.shown()
    }

    /// The locked directory.
    pub fn held(&self) -> &Arc<LockedRunDir> {
        &self.held
    }

    /// Folder of the run's checkpoints.
    pub fn folder(&self) -> &RunFolder {
        &self.folder
    }

    /// The directory, if it still belongs to this run. An error names `action` and the file `name`.
    fn own(&self, action: &'static str, name: &str) -> Result<&Directory, RunDirError> {
        self.held.check().map_err(cannot(action, &self.held.called(name)))
    }

    /// Directory of the run that a fork starts from.
    pub fn forked_from(&self) -> Option<&Path> {
        self.forked_from.as_deref()
    }

    /// Last step of the run in `dir`, if the run has finished.
    pub fn finished_in(dir: &Path) -> Option<u64> {
        let mut file = files::regular_file::read(&dir.join(METRICS)).ok()?;
        let length = file.metadata().ok()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(TAIL))).ok()?;
        let tail = input::beginning(file, TAIL).ok()?;
        finished_step(&tail)
    }

    /// Makes the folder of the run's checkpoints. A folder that is missing later was removed.
    ///
    /// # Errors
    /// [`RunDirError::Io`]
    pub fn make_folder(&self) -> Result<(), RunDirError> {
        match self.folder.make() {
            // Another file has the name of the folder: each save reports it.
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => Ok(()),
            made => made.map(drop).map_err(cannot("create", &self.folder.path())),
        }
    }

    /// Replaces the file `name` in one step. At any time the file has its old or its new content;
    /// on return the new content is on the disk.
    ///
    /// # Errors
    /// [`RunDirError::Io`]; the file then has its old content.
    pub fn write_atomically(&self, name: &str, bytes: &[u8]) -> Result<(), RunDirError> {
        let (directory, temporary) = (self.own("write", name)?, format!(".{name}.tmp"));
        let write = || {
            let mut file = directory.create(&temporary)?;
            file.write_all(bytes)?;
            file.sync_all()?;
            directory.rename(&temporary, name)?;
            directory.sync()
        };
        write().map_err(|source| {
            // The first error is reported.
            let _ = directory.remove_file(&temporary);
            cannot("write", &directory.called(name))(source)
        })
    }

    /// Locks the directory `dir`, and creates it if it is missing.
    fn lock_at(dir: &Path) -> Result<Self, RunDirError> {
        check_place(dir)?;
        fs::create_dir_all(dir).map_err(cannot("create", dir))?;
        Self::lock(dir.to_owned(), None)
    }

    fn at(dir: &Path, mode: RunMode) -> Result<Self, RunDirError> {
        let run = Self::lock_at(dir)?;
        let directory = run.own("read", METRICS)?;
        permit(directory, dir, mode)?;
        if mode == RunMode::Overwrite && has_run(directory) {
            for name in WRITTEN {
                run.remove(name)?;
            }
            for (_, name) in tensorboard::files(directory) {
                run.remove(&name)?;
            }
            run.remove_kept()?;
            remove_all(directory).map_err(cannot("remove", &run.folder.path()))?;
        }
        Ok(run)
    }

    /// Path of the run in `dir` that a fork starts from, without links, trailing slashes and dots,
    /// so that a suffix can follow.
    ///
    /// # Errors
    /// [`RunDirError`] if `dir` has no run.
    pub fn source(dir: Option<&Path>) -> Result<PathBuf, RunDirError> {
        let dir = dir.ok_or(RunDirError::NeedsDirectory(RunMode::Fork))?;
        no_checkpoint(dir)?;
        if !holds_run(dir) {
            return Err(RunDirError::NothingToFork(dir.to_owned()));
        }
        dir.canonicalize().map_err(cannot("find", dir))
    }

    fn fork(dir: &Path) -> Result<Self, RunDirError> {
        let source = Self::source(Some(dir))?;
        Self::lock(create_next_to(&source, 2)?, Some(source))
    }

    fn at_default(runs: &Path, name: &str) -> Result<Self, RunDirError> {
        check_name(name)?;
        fs::create_dir_all(runs).map_err(cannot("create", runs))?;
        let path = runs.join(format!("{name}-{}", Utc::now().name()));
        Self::lock(create_next_to(&path, 1)?, None)
    }

    fn lock(path: PathBuf, forked_from: Option<PathBuf>) -> Result<Self, RunDirError> {
        let directory = Directory::open(&path).map_err(cannot("lock", &path))?;
        let lock = directory.called(LOCK);
        let file = directory.open_or_create(LOCK, OFlags::empty());
        let mut file = file.map_err(cannot("lock", &lock))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::Error(source)) => return Err(cannot("lock", &path)(source)),
            Err(TryLockError::WouldBlock) => {
                let text = input::beginning(&file, 64).ok().and_then(|t| String::from_utf8(t).ok());
                let pid = text.and_then(|text| text.trim().parse().ok());
                return Err(RunDirError::InUse { path, pid });
            }
        }
        let named = file.set_len(0).and_then(|()| writeln!(file, "{}", std::process::id()));
        named.map_err(cannot("write", &lock))?;
        // The sync lets the directory and `runs` survive a power cut. An error does not stop the
        // run.
        for parent in
            path.ancestors().skip(1).take(2).filter(|parent| !parent.as_os_str().is_empty())
        {
            let _ = sync_folder(parent);
        }
        let held = Arc::new(LockedRunDir::new(directory, file));
        Ok(Self { forked_from, folder: RunFolder::of(&held), held })
    }

    /// Removes the file or link `name`, if it exists.
    ///
    /// # Errors
    /// [`RunDirError::Io`]
    pub fn remove(&self, name: &str) -> Result<(), RunDirError> {
        let directory = self.own("remove", name)?;
        directory.remove_file(name).map_err(cannot("remove", &directory.called(name)))
    }
}

/// Refuses a file, and an unlikely place for a run.
fn check_place(dir: &Path) -> Result<(), RunDirError> {
    if fs::metadata(dir).is_ok_and(|metadata| !metadata.is_dir()) {
        return Err(RunDirError::NotADirectory(dir.to_owned()));
    }
    match unfit(dir) {
        Some(what) => Err(RunDirError::Unfit { path: dir.to_owned(), what }),
        None => Ok(()),
    }
}

/// Refuses a name of a run that cannot name its directory.
fn check_name(name: &str) -> Result<(), RunDirError> {
    match name.is_empty() || name.starts_with('.') || name.contains(['/', '\0']) {
        true => Err(RunDirError::BadName(name.to_owned())),
        false => Ok(()),
    }
}

/// Refuses the contents of the open directory `dir`, named `path`, if `mode` does not allow them.
fn permit(dir: &Directory, path: &Path, mode: RunMode) -> Result<(), RunDirError> {
    if dir.has(UNFINISHED_CHECKPOINTS) {
        return Err(RunDirError::Unfinished(dir.called(UNFINISHED_CHECKPOINTS)));
    }
    match mode {
        RunMode::Fresh if has_run(dir) => Err(RunDirError::HoldsRun(path.to_owned())),
        RunMode::Overwrite if has_run(dir) && !dir.has(METRICS) => {
            Err(RunDirError::NotOurs(path.to_owned()))
        }
        RunMode::Overwrite if has_run(dir) => check_kept(dir),
        RunMode::Fresh | RunMode::Resume | RunMode::Fork | RunMode::Overwrite => Ok(()),
    }
}

/// Description of `dir` if it is an unlikely place for a run: the root or the home directory.
fn unfit(dir: &Path) -> Option<&'static str> {
    let dir = dir.canonicalize().ok()?;
    let home = std::env::home_dir().and_then(|home| home.canonicalize().ok());
    match dir.parent() {
        None => Some("the root of all files"),
        Some(_) => (home == Some(dir)).then_some("your home directory"),
    }
}

/// Refuses a checkpoint, and any place in the folder of a run's checkpoints, which the run removes.
fn no_checkpoint(dir: &Path) -> Result<(), RunDirError> {
    let is_checkpoint = is_there(&dir.join(MANIFEST));
    let real = resolved(dir);
    let of_run = |folder: &&Path| {
        let run = folder.parent().filter(|_| folder.ends_with(CHECKPOINTS));
        run.is_some_and(|run| is_there(&run.join(METRICS)) || any(folder))
    };
    let folder = real.ancestors().find(of_run);
    let Some((folder, run)) = folder.and_then(|folder| Some((folder, folder.parent()?))) else {
        return if is_checkpoint { Err(RunDirError::Checkpoint(dir.to_owned())) } else { Ok(()) };
    };
    let what = match is_checkpoint {
        true => "a checkpoint",
        false if folder == real => "the folder of checkpoints",
        false => "in the folder of checkpoints",
    };
    // The run's path as the caller wrote it, if `dir` contains it.
    let named = dir.ancestors().find(|up| up.canonicalize().is_ok_and(|up| up == run));
    let run = named.unwrap_or(run).to_owned();
    Err(RunDirError::AmongCheckpoints { path: dir.to_owned(), what, run })
}

/// Whether the file `name` in `dir` has exactly these `bytes`.
fn is(dir: &Directory, name: &str, bytes: &[u8]) -> bool {
    let most = bytes.len() as u64 + 1;
    dir.read(name).and_then(|file| input::beginning(file, most)).is_ok_and(|found| found == bytes)
}

/// Creates the first of `path` (`suffix` 1), `path-2`, `path-3`, .. that does not exist.
fn create_next_to(path: &Path, mut suffix: usize) -> Result<PathBuf, RunDirError> {
    loop {
        let mut name = path.as_os_str().to_owned();
        if suffix > 1 {
            name.push(format!("-{suffix}"));
        }
        let candidate = PathBuf::from(name);
        match fs::create_dir(&candidate) {
            Ok(()) => return Ok(candidate),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => suffix += 1,
            Err(error) => return Err(cannot("create", &candidate)(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tempfile::tempdir;

    const END: &str = "{\"kind\":\"end\",\"step\":40,\"state_hash\":\"00\"}\n";

    /// Creates the directory, after the check of a dry run, which must have the same result.
    fn create(dir: &Path, mode: RunMode) -> Result<RunDir, RunDirError> {
        let checked = RunDir::check(Some(dir), "name", mode).map_err(|why| why.to_string());
        let created = RunDir::create(Some(dir), "name", mode);
        match &created {
            // A dry run neither locks nor writes.
            Err(RunDirError::InUse { .. } | RunDirError::Io { .. }) => {}
            Ok(_) => assert_eq!(checked, Ok(())),
            Err(why) => assert_eq!(checked, Err(why.to_string())),
        }
        created
    }

    /// A folder with a run in `run`.
    fn with_run() -> (tempfile::TempDir, PathBuf) {
        let folder = tempdir().unwrap();
        let path = folder.path().join("run");
        create(&path, RunMode::Fresh).unwrap().write_atomically(CONFIG, b"()").unwrap();
        (folder, path)
    }

    #[test]
    fn default_directories_have_name_and_time_and_never_collide() {
        let folder = tempdir().unwrap();
        let runs = folder.path().join("runs");
        let made: Vec<_> = (0..3).map(|_| RunDir::at_default(&runs, "gpt").unwrap()).collect();
        let names: Vec<_> = made.iter().map(|run| run.shown().to_string()).collect();
        let name = |path: &String| path.rsplit('/').next().unwrap().to_owned();
        let names: Vec<_> = names.iter().map(name).collect();
        assert!(
            names.iter().all(|name| name.starts_with("gpt-2") && name.len() >= 19),
            "{names:?}"
        );
        assert!(names[0] != names[1] && names[1] != names[2], "{names:?}");
        assert!(matches!(RunDir::at_default(&runs, "a/b"), Err(RunDirError::BadName(_))));
        let taken = runs.join("taken");
        let made: Vec<_> = (0..3).map(|_| create_next_to(&taken, 1).unwrap()).collect();
        assert_eq!(made, ["taken", "taken-2", "taken-3"].map(|name| runs.join(name)));
    }

    #[test]
    fn a_second_holder_is_refused_with_directory_and_pid_until_the_first_is_gone() {
        let folder = tempdir().unwrap();
        let path = folder.path().join("run");
        let first = create(&path, RunMode::Fresh).unwrap();
        for mode in [RunMode::Fresh, RunMode::Resume, RunMode::Overwrite] {
            let message = create(&path, mode).unwrap_err().to_string();
            assert!(message.starts_with(path.to_str().unwrap()), "{message}");
            assert!(message.contains(&format!("(process {})", std::process::id())), "{message}");
        }
        drop(first);
        create(&path, RunMode::Fresh).unwrap();
    }

    #[test]
    fn a_fresh_run_refuses_a_directory_with_a_run_and_names_the_choices() {
        let (_folder, path) = with_run();
        let message = create(&path, RunMode::Fresh).unwrap_err().to_string();
        for choice in ["--resume", "--fork", "--overwrite", "--run-dir", path.to_str().unwrap()] {
            assert!(message.contains(choice), "{message}");
        }
    }

    #[test]
    fn what_a_killed_command_left_is_no_run_and_that_command_takes_it() {
        let folder = tempdir().unwrap();
        fs::create_dir(folder.path().join(UNFINISHED_CHECKPOINTS)).unwrap();
        for mode in [RunMode::Fresh, RunMode::Resume, RunMode::Overwrite] {
            let message = create(folder.path(), mode).unwrap_err().to_string();
            assert!(message.contains("run that command again"), "{message}");
        }
        RunDir::create_whole(folder.path(), &[]).unwrap();
    }

    #[test]
    fn a_fresh_run_takes_a_directory_with_other_files() {
        let folder = tempdir().unwrap();
        fs::write(folder.path().join("notes.txt"), "mine").unwrap();
        create(folder.path(), RunMode::Fresh).unwrap();
    }

    #[test]
    fn overwrite_removes_what_onebox_wrote_and_nothing_else() {
        let (_folder, path) = with_run();
        let theirs = ["notes.txt", "events.out.tfevents.1.theirs", "checkpoints/epoch-1"];
        fs::create_dir_all(path.join("checkpoints")).unwrap();
        let events = "events.out.tfevents.0000000002.onebox";
        for name in theirs.iter().chain(&[METRICS, WEIGHTS, events]) {
            fs::write(path.join(name), "x").unwrap();
        }
        drop(create(&path, RunMode::Overwrite).unwrap());
        assert!(theirs.iter().all(|name| path.join(name).exists()));
        let left = fs::read_dir(&path).unwrap().count();
        assert_eq!(left, 4, ".lock, and three of theirs");
        create(&path, RunMode::Fresh).unwrap();
    }

    #[test]
    fn a_config_that_a_user_wrote_is_not_overwritten() {
        let folder = tempdir().unwrap();
        fs::write(folder.path().join(CONFIG), "(mine)").unwrap();
        let error = create(folder.path(), RunMode::Overwrite).unwrap_err();
        assert!(matches!(error, RunDirError::NotOurs(_)), "{error}");
        assert_eq!(fs::read_to_string(folder.path().join(CONFIG)).unwrap(), "(mine)");
    }

    #[test]
    fn overwrite_does_not_follow_links() {
        let (folder, path) = with_run();
        let elsewhere = folder.path().join("kept");
        fs::write(&elsewhere, "x").unwrap();
        fs::write(path.join(METRICS), "x").unwrap();
        std::os::unix::fs::symlink(&elsewhere, path.join(WEIGHTS)).unwrap();
        create(&path, RunMode::Overwrite).unwrap();
        assert!(elsewhere.exists() && fs::symlink_metadata(path.join(WEIGHTS)).is_err());
    }

    #[test]
    fn a_fork_leaves_its_source_alone_and_goes_beside_it() {
        let (folder, path) = with_run();
        let running = create(&path, RunMode::Resume).unwrap();
        let fork = create(&path.join("."), RunMode::Fork).unwrap();
        let source = folder.path().canonicalize().unwrap().join("run");
        let neighbour = source.with_file_name("run-2");
        assert_eq!(fork.held().place(), Some(neighbour));
        assert_eq!(fork.forked_from(), Some(&*source));
        assert!(running.held().check().unwrap().has(CONFIG));
        let error = create(folder.path(), RunMode::Fork).unwrap_err();
        assert!(matches!(error, RunDirError::NothingToFork(_)), "{error}");
    }

    #[test]
    fn the_root_of_all_files_is_no_place_for_a_run() {
        let folder = tempdir().unwrap();
        for path in ["/", "/../.", "//"].map(Path::new) {
            assert!(unfit(path).is_some_and(|what| what.contains("root")), "{path:?}");
        }
        assert_eq!(unfit(folder.path()), None);
    }

    #[test]
    fn resume_and_fork_need_a_directory() {
        for mode in [RunMode::Resume, RunMode::Fork] {
            let message = RunDir::create(None, "name", mode).unwrap_err().to_string();
            assert!(message.starts_with(&format!("{mode} needs --run-dir")), "{message}");
        }
    }

    #[test]
    fn resume_makes_a_directory_that_is_not_there() {
        let folder = tempdir().unwrap();
        let path = folder.path().join("a/b");
        create(&path, RunMode::Resume).unwrap();
        assert_eq!((RunDir::finished_in(&path), path.is_dir()), (None, true));
    }

    #[test]
    fn paths_that_cannot_be_directories_are_named() {
        let folder = tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        let message = create(&file, RunMode::Overwrite).unwrap_err().to_string();
        assert!(message.ends_with("file is not a directory; give another one"), "{message}");
        for path in [file.join("run"), PathBuf::from("/proc/run")] {
            let message = create(&path, RunMode::Fresh).unwrap_err().to_string();
            assert!(
                message.starts_with(&format!("cannot create {}: ", path.display())),
                "{message}"
            );
        }
        assert!(file.exists());
    }

    #[test]
    fn an_atomic_write_replaces_the_whole_file_and_leaves_no_other() {
        let (_folder, path) = with_run();
        let run = create(&path, RunMode::Resume).unwrap();
        run.write_atomically(CONFIG, b"(longer)").unwrap();
        run.write_atomically(CONFIG, b"(b)").unwrap();
        assert_eq!(fs::read(path.join(CONFIG)).unwrap(), b"(b)");
        fs::create_dir(path.join(METRICS)).unwrap();
        let message = run.write_atomically(METRICS, b"x").unwrap_err().to_string();
        assert!(message.starts_with("cannot write ") && message.contains(METRICS), "{message}");
        assert_eq!(fs::read_dir(&path).unwrap().count(), 3);
    }

    #[test]
    fn a_finished_run_is_known_from_the_tail_of_its_metrics() {
        let (_folder, path) = with_run();
        let steps = "{\"kind\":\"eval\",\"step\":1,\"loss\":2.5}\n".repeat(10_000);
        for (tail, finished) in [("", None), (END, Some(40)), ("{\"kind\":\"end\",\"st", None)] {
            fs::write(path.join(METRICS), steps.clone() + tail).unwrap();
            assert_eq!(RunDir::finished_in(&path), finished);
        }
    }
}
