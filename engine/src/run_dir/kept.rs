//! What a run keeps of the folder that its model is from, in a folder of its own.

use super::error::cannot;
use super::{RunDir, RunDirError, is};
use crate::files::directory::Directory;
use crate::files::names::{FILES, KEPT};
use std::ffi::OsString;
use std::io::{self, Write};

/// Where it grows until it is whole.
const GROWING: &str = ".model.from.tmp";
impl RunDir {
    /// Writes the folder with `files`: all of them, or none.
    ///
    /// # Errors
    /// [`RunDirError`] if it is there with other contents, or cannot be written.
    pub fn keep(&self, files: &[(&str, Vec<u8>)]) -> Result<(), RunDirError> {
        if files.is_empty() {
            return Ok(());
        }
        let run = self.own("write", KEPT)?;
        let path = run.called(KEPT);
        if run.has(KEPT) {
            let kept = run.leads_to(KEPT);
            let same = |kept: &Directory| files.iter().all(|(name, bytes)| is(kept, name, bytes));
            let same = kept.is_ok_and(|kept| same(&kept));
            return if same { Ok(()) } else { Err(RunDirError::Differs(path)) };
        }
        let write = || {
            remove(run, GROWING)?;
            run.make(GROWING)?;
            let growing = run.folder(GROWING)?;
            for (name, bytes) in files {
                let mut file = growing.create_new(name)?;
                file.write_all(bytes)?;
                file.sync_all()?;
            }
            growing.sync()?;
            run.rename(GROWING, KEPT)?;
            run.sync()
        };
        write().map_err(cannot("write", &path))
    }

    /// Whether the folder can be removed and written again: what else is in it would stand in the way when the run has gone.
    ///
    /// # Errors
    /// [`RunDirError::Strange`] names it.
    pub(super) fn check_kept(&self) -> Result<(), RunDirError> {
        let run = self.own("read", KEPT)?;
        let path = run.called(KEPT);
        let names = match opened(run, KEPT) {
            Ok(None) => return Ok(()),
            Ok(Some(kept)) => kept.names(),
            Err(error) => Err(error),
        };
        let strange = |name: &OsString| !FILES.iter().any(|file| *file == *name);
        match names.map_err(cannot("read", &path))?.into_iter().find(strange) {
            Some(name) => Err(RunDirError::Strange(path.join(name))),
            None => Ok(()),
        }
    }

    /// Removes the folder; what else is in it stays.
    pub(super) fn remove_kept(&self) -> Result<(), RunDirError> {
        let run = self.own("remove", KEPT)?;
        [KEPT, GROWING]
            .into_iter()
            .try_for_each(|name| remove(run, name).map_err(cannot("remove", &run.called(name))))
    }
}

/// The folder `name` of a run; none where there is no such folder, but perhaps a file or a link.
fn opened(run: &Directory, name: &str) -> io::Result<Option<Directory>> {
    match run.folder(name) {
        Err(error)
            if [io::ErrorKind::NotFound, io::ErrorKind::NotADirectory].contains(&error.kind()) =>
        {
            Ok(None)
        }
        folder => folder.map(Some),
    }
}

fn remove(run: &Directory, name: &str) -> io::Result<()> {
    // Of a link nothing is removed but the link: what it leads to is not the run's.
    let Some(folder) = opened(run, name)? else { return run.remove_file(name) };
    FILES.iter().try_for_each(|name| folder.remove_file(name))?;
    match run.remove_empty(name) {
        Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
        removed => removed,
    }
}

#[cfg(test)]
mod tests {
    use super::super::RunMode;
    use super::*;
    use crate::files::names::TOKENIZER;
    use std::fs;
    use std::os::unix::fs::symlink;

    #[test]
    fn what_is_kept_is_there_as_a_whole_and_is_replaced_by_overwrite_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run");
        let create = |mode| RunDir::create(Some(&path), "name", mode).unwrap();
        let run = create(RunMode::Fresh);
        let files = |text: &str| [(TOKENIZER, text.into()), ("merges.txt", b"b".to_vec())];
        run.keep(&[]).unwrap();
        assert!(!path.join(KEPT).exists());
        // What a process that was killed left of it.
        fs::create_dir(path.join(GROWING)).unwrap();
        fs::write(path.join(GROWING).join("merges.txt"), "half").unwrap();
        run.keep(&files("a")).unwrap();
        run.keep(&files("a")).unwrap();
        assert_eq!(fs::read(path.join(KEPT).join(TOKENIZER)).unwrap(), b"a");
        assert!(!path.join(GROWING).exists());
        let why = run.keep(&files("other")).unwrap_err().to_string();
        assert!(why.contains("model.from") && why.contains("nothing was replaced"), "{why}");
        for name in [crate::files::names::CONFIG, crate::files::names::METRICS] {
            run.write_atomically(name, b"").unwrap();
        }
        drop(run);
        // A file of somebody else would be in the way once the run has gone.
        let notes = path.join(KEPT).join("notes.txt");
        fs::write(&notes, "mine").unwrap();
        let why = RunDir::create(Some(&path), "name", RunMode::Overwrite).unwrap_err().to_string();
        assert!(why.contains("model.from/notes.txt is no file of onebox"), "{why}");
        assert!(
            path.join(crate::files::names::METRICS).exists()
                && path.join(KEPT).join(TOKENIZER).exists()
        );
        fs::remove_file(notes).unwrap();
        let run = create(RunMode::Overwrite);
        assert!(!path.join(KEPT).exists());
        let elsewhere = folder.path().join("theirs");
        fs::create_dir(&elsewhere).unwrap();
        fs::write(elsewhere.join("merges.txt"), "theirs").unwrap();
        symlink(&elsewhere, path.join(GROWING)).unwrap();
        run.keep(&files("c")).unwrap();
        assert_eq!(fs::read(elsewhere.join("merges.txt")).unwrap(), b"theirs");
    }
}
