//! Files of the folder `model.from` that a run keeps, in a folder of its own.

use super::error::cannot;
use super::{RunDir, RunDirError, is};
use files::directory::Directory;
use files::names::{FILES, KEPT, OWN};
use std::ffi::OsString;
use std::io::{self, Write};

/// Name of the folder until it is complete.
const GROWING: &str = ".model.from.tmp";
impl RunDir {
    /// Writes the folder with all `files`, or not at all.
    ///
    /// # Errors
    /// [`RunDirError`] if the folder exists with other contents, or cannot be written.
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

    /// Removes the folder. Other files in it stay.
    pub(super) fn remove_kept(&self) -> Result<(), RunDirError> {
        let run = self.own("remove", KEPT)?;
        [KEPT, GROWING]
            .into_iter()
            .try_for_each(|name| remove(run, name).map_err(cannot("remove", &run.called(name))))
    }
}

/// Checks that the folder in the run directory `run` can be removed and written again. Another file in
/// it would prevent both.
///
/// # Errors
/// [`RunDirError::Strange`] names this file.
pub(super) fn check_kept(run: &Directory) -> Result<(), RunDirError> {
    let path = run.called(KEPT);
    let names = match opened(run, KEPT) {
        Ok(None) => return Ok(()),
        Ok(Some(kept)) => kept.names(),
        Err(error) => Err(error),
    };
    let strange = |name: &OsString| !FILES.iter().chain(&OWN).any(|file| *file == *name);
    match names.map_err(cannot("read", &path))?.into_iter().find(strange) {
        Some(name) => Err(RunDirError::Strange(path.join(name))),
        None => Ok(()),
    }
}

/// Opens the folder `name` of a run. `None` if `name` is no folder, but perhaps a file or a link.
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
    // Of a link, only the link itself is removed: its target does not belong to the run.
    let Some(folder) = opened(run, name)? else { return run.remove_file(name) };
    FILES.iter().chain(&OWN).try_for_each(|name| folder.remove_file(name))?;
    match run.remove_empty(name) {
        Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
        removed => removed,
    }
}

#[cfg(test)]
mod tests {
    use super::super::RunMode;
    use super::*;
    use files::names::TOKENIZER;
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
        // The remains of a process that was killed.
        fs::create_dir(path.join(GROWING)).unwrap();
        fs::write(path.join(GROWING).join("merges.txt"), "half").unwrap();
        run.keep(&files("a")).unwrap();
        run.keep(&files("a")).unwrap();
        assert_eq!(fs::read(path.join(KEPT).join(TOKENIZER)).unwrap(), b"a");
        assert!(!path.join(GROWING).exists());
        let why = run.keep(&files("other")).unwrap_err().to_string();
        assert!(why.contains("model.from") && why.contains("nothing was replaced"), "{why}");
        for name in [files::names::CONFIG, files::names::METRICS] {
            run.write_atomically(name, b"").unwrap();
        }
        drop(run);
        // A file that onebox did not write would be in the way after the run is removed.
        let notes = path.join(KEPT).join("notes.txt");
        fs::write(&notes, "mine").unwrap();
        let why = RunDir::create(Some(&path), "name", RunMode::Overwrite).unwrap_err().to_string();
        assert!(why.contains("model.from/notes.txt is no file of onebox"), "{why}");
        assert!(
            path.join(files::names::METRICS).exists() && path.join(KEPT).join(TOKENIZER).exists()
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
