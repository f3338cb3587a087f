//! The folder of a run's checkpoints, as the run holds it.

use super::Checkpoint;
use files::directory::Directory;
use files::held::LockedRunDir;
use files::names::CHECKPOINTS;
use files::path_text::ShownPath;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// Where a run saves: as long as its directory is the one that it holds, and the folder in it the one that it found or made.
#[derive(Clone, Debug)]
pub struct RunFolder {
    run: Arc<LockedRunDir>,
    name: String,
    /// Since the run first needed it.
    found: Arc<Mutex<Option<Arc<Directory>>>>,
}

impl RunFolder {
    /// The folder of checkpoints in the directory of a run.
    pub fn of(run: &Arc<LockedRunDir>) -> Self {
        Self { run: Arc::clone(run), name: CHECKPOINTS.to_owned(), found: Arc::default() }
    }

    /// The folder `path`, which need not be there, in a directory that nobody has locked.
    ///
    /// # Errors
    /// That directory cannot be opened.
    pub fn at(path: &Path) -> io::Result<Self> {
        let parts = path.parent().zip(path.file_name().and_then(|name| name.to_str()));
        let (run, name) = parts.ok_or_else(|| io::Error::other("it names no folder"))?;
        let run = LockedRunDir::by_another(Directory::open(run)?);
        Ok(Self { run, name: name.to_owned(), found: Arc::default() })
    }

    /// What it is called, for messages.
    pub fn path(&self) -> PathBuf {
        self.run.called(&self.name)
    }

    /// Whether `checkpoint` was opened in it.
    pub fn has(&self, checkpoint: &Checkpoint) -> bool {
        checkpoint.path().parent() == Some(&self.path())
    }

    /// The folder, where it is there.
    ///
    /// # Errors
    /// The run's directory, or the folder in it, is not the one that the run has held; of the file system.
    pub fn find(&self) -> io::Result<Option<Arc<Directory>>> {
        let run = self.run.check()?;
        let opened = run.leads_to(&self.name);
        let mut found = self.found.lock().unwrap_or_else(|e| e.into_inner());
        // A folder that was removed is made again.
        if found.as_ref().map_or(Ok(false), |known| known.is_removed())? {
            *found = None;
        }
        let moved = |why| of(&self.path(), Err(io::Error::other(why)));
        let here = match opened {
            Err(error) if error.kind() == io::ErrorKind::NotFound && found.is_some() => {
                return moved("the folder of the run's checkpoints was moved");
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => of(&self.path(), opened)?,
        };
        match &*found {
            Some(known) if known.is(&here)? => Ok(Some(Arc::clone(known))),
            Some(_) => moved("another folder is in the place of the run's: it was moved"),
            None => Ok(Some(Arc::clone(found.insert(Arc::new(here))))),
        }
    }

    /// The folder, made where it is not there.
    ///
    /// # Errors
    /// As [`find`](Self::find).
    pub fn make(&self) -> io::Result<Arc<Directory>> {
        if let Some(folder) = self.find()? {
            return Ok(folder);
        }
        // In the run's directory, which is not made again where somebody has moved it.
        let run = self.run.check()?;
        let made = run.make(&self.name).and_then(|()| run.folder(&self.name));
        let folder = Arc::new(of(&self.path(), made)?);
        of(run.path(), run.sync())?;
        *self.found.lock().unwrap_or_else(|e| e.into_inner()) = Some(Arc::clone(&folder));
        Ok(folder)
    }

    /// Whether this process still has the lock of the run's directory, wherever that is now.
    ///
    /// # Errors
    /// Another process has it.
    pub fn check_lock(&self) -> io::Result<()> {
        self.run.check_lock()
    }

    /// Makes the names in the run's directory durable.
    ///
    /// # Errors
    /// As [`find`](Self::find).
    pub(crate) fn sync_run(&self) -> io::Result<()> {
        self.run.check()?.sync()
    }
}

/// The error says which file it is about.
pub(super) fn of<T>(path: &Path, result: io::Result<T>) -> io::Result<T> {
    result.map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.shown())))
}
