//! The checkpoint folder of a run, with checks that it was not moved or replaced.

use super::Checkpoint;
use files::directory::Directory;
use files::held::LockedRunDir;
use files::names::CHECKPOINTS;
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

/// Adds the path to the message of an error.
pub(super) fn of<T>(path: &Path, result: io::Result<T>) -> io::Result<T> {
    result.map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.shown())))
}
