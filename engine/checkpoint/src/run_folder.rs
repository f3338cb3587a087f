//! The checkpoint folder of a run, with checks that it was not moved or replaced.

use super::Checkpoint;
use super::folder::{clean, remove_checkpoints};
use files::directory::Directory;
use files::held::LockedRunDir;
use files::names::{CHECKPOINTS, UNFINISHED_CHECKPOINTS};
use files::path_text::ShownPath;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

/// Handle of a run's checkpoint folder. It is valid while the run directory is the locked directory
/// and still contains the folder that the run found or created.
#[derive(Clone, Debug)]
pub struct RunFolder {
    run: Arc<LockedRunDir>,
    name: String,
    found: Arc<Mutex<FoundFolder>>,
}

/// The folder that the name referred to at the last look.
#[derive(Debug, Default)]
struct FoundFolder {
    /// The open folder; `None` until the run needs it.
    folder: Option<Arc<Directory>>,
    /// Whether the run has found or created a folder, even if that folder was removed later.
    is_known: bool,
    /// Target of the link, if the name was a symbolic link.
    link: Option<PathBuf>,
}

impl RunFolder {
    /// The checkpoint folder in the directory of the run `run`.
    pub fn of(run: &Arc<LockedRunDir>) -> Self {
        Self { run: Arc::clone(run), name: CHECKPOINTS.to_owned(), found: Arc::default() }
    }

    /// The folder `path`, which need not exist, in a directory without a lock.
    ///
    /// # Errors
    /// The parent directory cannot be opened.
    pub fn at(path: &Path) -> io::Result<Self> {
        let parts = path.parent().zip(path.file_name().and_then(|name| name.to_str()));
        let (run, name) = parts.ok_or_else(|| io::Error::other("it names no folder"))?;
        let run = LockedRunDir::by_another(Directory::open(run)?);
        Ok(Self { run, name: name.to_owned(), found: Arc::default() })
    }

    /// The folder for all `count` checkpoints of the new run `run`. They get their names in it, and
    /// [`publish`](Self::publish) then gives it the name of the checkpoint folder: a kill leaves all
    /// of them or none. Removes the remains of a killed command from both folders. If the checkpoint
    /// folder is a link to a folder elsewhere, it is this folder itself, which can get one checkpoint
    /// in one step.
    ///
    /// # Errors
    /// One of the folders has other entries, the checkpoint folder is a link and there are several
    /// checkpoints, or the file system fails.
    pub fn unfinished(run: &Arc<LockedRunDir>, count: usize) -> io::Result<Self> {
        let folder = Self::of(run);
        let directory = run.check()?;
        if of(&folder.path(), directory.link(CHECKPOINTS))?.is_some() {
            let why = format!(
                "it is a link to a folder elsewhere, which cannot get {count} checkpoints in one step: remove the link, and \
                 move the folder there afterwards"
            );
            return match count {
                1 => Ok(folder),
                _ => of(&folder.path(), Err(io::Error::other(why))),
            };
        }
        if let Some(found) = folder.find()? {
            of(found.path(), clean(&found))?;
            of(found.path(), make_way(directory, CHECKPOINTS))?;
        }
        let name = UNFINISHED_CHECKPOINTS;
        let left = || match directory.link(name)? {
            // Of a link, only the link itself is removed.
            Some(_) => directory.remove_file(name),
            None => remove_checkpoints(directory, name),
        };
        of(&directory.called(name), left())?;
        if directory.has(name) {
            of(&directory.called(name), make_way(directory, name))?;
        }
        Ok(Self { run: Arc::clone(run), name: name.to_owned(), found: Arc::default() })
    }

    /// Gives an [`unfinished`](Self::unfinished) folder the name of the run's checkpoint folder, in
    /// one step and durably.
    ///
    /// # Errors
    /// The file system fails, or an entry has got that name meanwhile.
    pub fn publish(&self) -> io::Result<()> {
        if self.name == CHECKPOINTS {
            return Ok(());
        }
        let run = self.run.check()?;
        of(&run.called(CHECKPOINTS), run.rename_new(&self.name, CHECKPOINTS))?;
        of(run.path(), run.sync())
    }

    /// Path of the folder, for messages.
    pub fn path(&self) -> PathBuf {
        self.run.called(&self.name)
    }

    /// Whether `checkpoint` was opened in this folder.
    pub fn has(&self, checkpoint: &Checkpoint) -> bool {
        checkpoint.path().parent() == Some(&self.path())
    }

    /// Opens the folder, if it exists.
    ///
    /// # Errors
    /// The run directory or the folder was replaced since it was opened, or the file system fails.
    pub fn find(&self) -> io::Result<Option<Arc<Directory>>> {
        let run = self.run.check()?;
        let (link, opened) = (run.link(&self.name), run.leads_to(&self.name));
        let link = of(&self.path(), link)?;
        let mut found = self.found();
        // If the folder was removed, forget it: the run may create another.
        if found.folder.as_ref().map_or(Ok(false), |known| known.is_removed())? {
            found.folder = None;
        }
        let moved = |why| of(&self.path(), Err(io::Error::other(why)));
        let here = match opened {
            Err(error) if error.kind() == io::ErrorKind::NotFound && found.folder.is_some() => {
                return moved("the folder of the run's checkpoints was moved");
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => of(&self.path(), opened)?,
        };
        let is_same = found.folder.as_ref().map(|known| known.is(&here)).transpose()?;
        let is_other_link = found.is_known && link.is_some() && link != found.link;
        match is_same {
            Some(false) => {
                return moved("another folder is in the place of the run's: it was moved");
            }
            None if is_other_link => {
                return moved(
                    "a link is in the place of the folder of the run's checkpoints, which was removed",
                );
            }
            Some(true) if is_other_link => tracing::warn!(
                "{}: it is a symbolic link now; it leads to the folder that it replaces, so the run goes on saving there",
                self.path().display()
            ),
            _ => {}
        }
        (found.link, found.is_known) = (link, true);
        Ok(Some(Arc::clone(found.folder.get_or_insert_with(|| Arc::new(here)))))
    }

    fn found(&self) -> MutexGuard<'_, FoundFolder> {
        self.found.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Opens the folder, and creates it if it is missing.
    ///
    /// # Errors
    /// As for [`find`](Self::find).
    pub fn make(&self) -> io::Result<Arc<Directory>> {
        if let Some(folder) = self.find()? {
            return Ok(folder);
        }
        // Create it in the run directory, which is not recreated if a user has moved it.
        let run = self.run.check()?;
        let made = run.make(&self.name).and_then(|()| run.folder(&self.name));
        let folder = Arc::new(of(&self.path(), made)?);
        of(run.path(), run.sync())?;
        *self.found() =
            FoundFolder { folder: Some(Arc::clone(&folder)), is_known: true, link: None };
        Ok(folder)
    }

    /// Whether this process still holds the lock of the run directory, even if it was moved.
    ///
    /// # Errors
    /// Another process has it.
    pub fn check_lock(&self) -> io::Result<()> {
        self.run.check_lock()
    }

    /// Makes the names in the run's directory durable.
    ///
    /// # Errors
    /// As for [`find`](Self::find).
    pub(crate) fn sync_run(&self) -> io::Result<()> {
        self.run.check()?.sync()
    }
}

/// Removes the empty folder `name` of a run's directory.
fn make_way(run: &Directory, name: &str) -> io::Result<()> {
    run.remove_empty(name).map_err(|error| match error.kind() {
        io::ErrorKind::DirectoryNotEmpty => io::Error::other("it has other files: move them away"),
        _ => error,
    })
}

/// Adds the path to the message of an error.
pub(super) fn of<T>(path: &Path, result: io::Result<T>) -> io::Result<T> {
    result.map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.shown())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    #[test]
    fn the_folder_of_a_new_run_gets_its_name_in_one_step_after_what_a_kill_left_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let run = LockedRunDir::unlocked(folder.path()).unwrap();
        let (elsewhere, theirs) = (tempfile::tempdir().unwrap(), "step-00000001");
        fs::create_dir(elsewhere.path().join(theirs)).unwrap();
        for left in [
            &["checkpoints/step-00000002.tmp"][..],
            &[".checkpoints.tmp/step-00000002", ".checkpoints.tmp/step-00000004.tmp"],
            &[],
        ] {
            left.iter().for_each(|left| fs::create_dir_all(at(left)).unwrap());
            if left.is_empty() {
                symlink(elsewhere.path(), at(UNFINISHED_CHECKPOINTS)).unwrap();
            }
            let new = RunFolder::unfinished(&run, 2).unwrap();
            assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "{left:?}");
            new.make().unwrap().make("step-00000002").unwrap();
            assert!(!at(CHECKPOINTS).exists());
            new.publish().unwrap();
            assert!(at("checkpoints/step-00000002").exists());
            assert!(!at(UNFINISHED_CHECKPOINTS).exists());
            fs::remove_dir_all(at(CHECKPOINTS)).unwrap();
        }
        assert!(elsewhere.path().join(theirs).exists(), "a link was followed");
        // A folder that has got the name meanwhile is not replaced.
        let new = RunFolder::unfinished(&run, 2).unwrap();
        new.make().unwrap();
        fs::create_dir(at(CHECKPOINTS)).unwrap();
        assert_eq!(new.publish().unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    }

    #[test]
    fn files_of_others_and_links_are_no_place_for_the_checkpoints_of_a_new_run() {
        for (theirs, count) in [("checkpoints/notes", 1), (".checkpoints.tmp/notes", 2)] {
            let folder = tempfile::tempdir().unwrap();
            let file = folder.path().join(theirs);
            fs::create_dir(file.parent().unwrap()).unwrap();
            fs::write(&file, "mine").unwrap();
            let run = LockedRunDir::unlocked(folder.path()).unwrap();
            let why = RunFolder::unfinished(&run, count).unwrap_err().to_string();
            assert!(why.contains("it has other files") && file.exists(), "{why}");
        }
        let (folder, disk) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        symlink(disk.path(), folder.path().join(CHECKPOINTS)).unwrap();
        let run = LockedRunDir::unlocked(folder.path()).unwrap();
        let why = RunFolder::unfinished(&run, 2).unwrap_err().to_string();
        assert!(why.contains("cannot get 2 checkpoints in one step"), "{why}");
        // One checkpoint gets its name in one step there.
        let new = RunFolder::unfinished(&run, 1).unwrap();
        new.make().unwrap().make("step-00000002").unwrap();
        new.publish().unwrap();
        assert!(disk.path().join("step-00000002").exists());
    }
}
