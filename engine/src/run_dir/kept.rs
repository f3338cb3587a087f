//! What a run keeps of the folder that its model is from, in a folder of its own.

use super::durable::sync_folder;
use super::error::cannot;
use super::{RunDir, RunDirError, TOKENIZER, is, is_there};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

/// The folder.
pub(crate) const KEPT: &str = "model.from";
/// Where it grows until it is whole.
const GROWING: &str = ".model.from.tmp";
/// Its files, where they are there. Of `config.json` an export takes the special tokens; the rest of it onebox writes itself.
pub(crate) const FILES: [&str; 12] = [
    "config.json",
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "tekken.json",
];

impl RunDir {
    /// Writes the folder with `files`: all of them, or none.
    ///
    /// # Errors
    /// [`RunDirError`] if it is there with other contents, or cannot be written.
    pub fn keep(&self, files: &[(&str, Vec<u8>)]) -> Result<(), RunDirError> {
        let (path, growing) = (self.path.join(KEPT), self.path.join(GROWING));
        if is_there(&path) && !files.is_empty() {
            let same = files.iter().all(|(name, bytes)| is(&path.join(name), bytes));
            return if same { Ok(()) } else { Err(RunDirError::Differs(path)) };
        }
        let write = || {
            remove(&growing)?;
            fs::create_dir(&growing)?;
            for (name, bytes) in files {
                let mut file = File::create_new(growing.join(name))?;
                file.write_all(bytes)?;
                file.sync_all()?;
            }
            sync_folder(&growing)?;
            fs::rename(&growing, &path)?;
            sync_folder(&self.path)
        };
        if files.is_empty() { Ok(()) } else { write().map_err(cannot("write", &path)) }
    }

    /// Whether the folder can be removed and written again: what else is in it would stand in the way when the run has gone.
    ///
    /// # Errors
    /// [`RunDirError::Strange`] names it.
    pub(super) fn check_kept(&self) -> Result<(), RunDirError> {
        let path = self.path.join(KEPT);
        let entries = match fs::read_dir(&path) {
            // A link or a file is removed itself.
            Err(e)
                if [io::ErrorKind::NotFound, io::ErrorKind::NotADirectory].contains(&e.kind()) =>
            {
                return Ok(());
            }
            entries => entries.map_err(cannot("read", &path))?,
        };
        if fs::symlink_metadata(&path).is_ok_and(|found| found.is_symlink()) {
            return Ok(());
        }
        for entry in entries {
            let name = entry.map_err(cannot("read", &path))?.file_name();
            if !FILES.iter().any(|file| *file == name) {
                return Err(RunDirError::Strange(path.join(name)));
            }
        }
        Ok(())
    }

    /// Removes the folder; what else is in it stays.
    pub(super) fn remove_kept(&self) -> Result<(), RunDirError> {
        [KEPT, GROWING].iter().try_for_each(|name| {
            let path = self.path.join(name);
            remove(&path).map_err(cannot("remove", &path))
        })
    }
}

fn remove(folder: &Path) -> io::Result<()> {
    // Of a link nothing is removed but the link: what it leads to is not the run's.
    match fs::symlink_metadata(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
        Ok(found) if !found.is_dir() => return fs::remove_file(folder),
        Ok(_) => {}
    }
    for name in FILES {
        match fs::remove_file(folder.join(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    match fs::remove_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
        removed => removed,
    }
}

#[cfg(test)]
mod tests {
    use super::super::RunMode;
    use super::*;
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
        for name in [super::super::CONFIG, super::super::METRICS] {
            run.write_atomically(name, b"").unwrap();
        }
        drop(run);
        // A file of somebody else would be in the way once the run has gone.
        let notes = path.join(KEPT).join("notes.txt");
        fs::write(&notes, "mine").unwrap();
        let why = RunDir::create(Some(&path), "name", RunMode::Overwrite).unwrap_err().to_string();
        assert!(why.contains("model.from/notes.txt is no file of onebox"), "{why}");
        assert!(
            path.join(super::super::METRICS).exists() && path.join(KEPT).join(TOKENIZER).exists()
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
