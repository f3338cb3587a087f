//! The files next to the weights in a transformers folder: the tokenizer's files, the chat
//! template, the generation settings. A run keeps them, and an export writes them unchanged.

use super::Tokenizer;
use super::byte_tokenizer::is_of_bytes;
use config::DataConfig;
use config::transformers::pointer;
use files::foreign_text::foreign;
use files::hub::{ModelFolder, incomplete_download};
use files::input;
use files::names::{FILES, KEPT, OWN, TOKENIZER};
use files::path_text::ShownPath;
use files::regular_file::open_at;
use rustix::fs::{CWD, OFlags};
use std::fs::File;
use std::io;
use std::io::ErrorKind::{NotADirectory, NotFound};
use std::path::{Path, PathBuf};

/// Largest total size of the files, in bytes.
const MOST: u64 = 256 << 20;

/// Folder with the additional chat templates of a model.
const TEMPLATES: &str = "additional_chat_templates";
/// Extension of the template files.
const TEMPLATE: &str = ".jinja";

/// Reasons why a file of a model cannot be read.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what variants and fields are")]
pub enum ModelFileError {
    #[error("cannot read {}: {source}{}", path.shown(), local(path, source))]
    Read { path: PathBuf, source: io::Error },
    #[error("{} cannot be used: {problem}", path.shown())]
    Refused { path: PathBuf, problem: String },
}

impl ModelFileError {
    /// Error: the file at `path` cannot be used.
    pub fn refused(path: &Path, problem: impl Into<String>) -> Self {
        Self::Refused { path: path.to_owned(), problem: problem.into() }
    }
}

/// Hint for a missing file: the command that completes a snapshot in the Hugging Face cache, or the
/// remedy for a path that is probably the name of a model instead of a folder.
fn local(path: &Path, error: &io::Error) -> String {
    if error.kind() != NotFound {
        return String::new();
    }
    let folder = path.parent().unwrap_or(path);
    if let Some(why) = incomplete_download(folder) {
        return format!("; {why}");
    }
    let inside = !folder.as_os_str().is_empty() && folder.is_dir();
    match inside && path.parent().is_some() {
        true => String::new(),
        false => "; nothing is downloaded: name a folder on this machine, with config.json and model.safetensors".into(),
    }
}

/// The files of a model, unchanged.
#[derive(Debug, Default)]
pub struct ModelFiles {
    files: Vec<(&'static str, Vec<u8>)>,
    /// Names of additional chat templates, which onebox neither uses nor keeps.
    templates: Vec<String>,
}

impl ModelFiles {
    /// Reads the files of the folder `path`, or of the folder that contains the file `path`.
    ///
    /// # Errors
    /// A file is a link or not a regular file, cannot be read, or the files exceed the size limit.
    pub fn open(path: &Path) -> Result<Self, ModelFileError> {
        let path = if path.is_dir() { path } else { path.parent().unwrap_or(path) };
        // An empty parent means a file in the working directory.
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        let folder = ModelFolder::open(path).map_err(|e| unreadable(path, e))?;
        Self::read(&FILES, |name| folder.file(name), path)
    }

    /// Reads the files that the run in `run` has kept; there may be none.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    pub fn of_run(run: &Path) -> Result<Self, ModelFileError> {
        let path = run.join(KEPT);
        match open_at(CWD, &path, OFlags::DIRECTORY) {
            Ok(folder) => {
                let file = |name: &str| open_at(&folder, Path::new(name), OFlags::empty());
                Self::read(&[&FILES[..], &OWN].concat(), file, &path)
            }
            Err(error) if error.kind() == NotFound => Ok(Self::default()),
            Err(error) => Err(unreadable(&path, error)),
        }
    }

    /// Reads the files `names` that `file` opens; `path` is their folder.
    fn read(
        names: &[&'static str],
        file: impl Fn(&str) -> io::Result<File>,
        path: &Path,
    ) -> Result<Self, ModelFileError> {
        let (mut files, mut left) = (Vec::new(), MOST);
        for name in names.iter().copied() {
            let at = path.join(name);
            let file = match file(name) {
                Err(error) if error.kind() == NotFound => continue,
                file => file.map_err(|e| unreadable(&at, e))?,
            };
            let mut bytes = Vec::new();
            let more = file.metadata().map_err(|e| unreadable(&at, e))?.len();
            if more <= left {
                // The additional byte reveals a growing file.
                bytes = input::beginning(file, left + 1).map_err(|e| unreadable(&at, e))?;
            }
            let read = more.max(bytes.len() as u64);
            left = left.checked_sub(read).ok_or_else(|| {
                let [has, most] = [read, MOST].map(topology::format_bytes);
                let why = format!(
                    "it has {has}, and what a run keeps of a folder has at most {most} in all: move it away"
                );
                ModelFileError::refused(&at, why)
            })?;
            check_pointer(&at, &bytes)?;
            files.push((name, bytes));
        }
        let mut templates: Vec<String> = match std::fs::read_dir(path.join(TEMPLATES)) {
            Err(error) if matches!(error.kind(), NotFound | NotADirectory) => Vec::new(),
            found => {
                let found = found.and_then(|all| all.collect::<io::Result<Vec<_>>>());
                let found = found.map_err(|e| unreadable(&path.join(TEMPLATES), e))?;
                let name = |entry: &std::fs::DirEntry| {
                    let name = entry.file_name().to_string_lossy().into_owned();
                    name.strip_suffix(TEMPLATE).map(str::to_owned)
                };
                found.iter().filter_map(name).collect()
            }
        };
        templates.sort_unstable();
        Ok(Self { files, templates })
    }

    /// Warning that additional chat templates are ignored, if the folder has some.
    pub fn left_out(&self) -> Option<String> {
        /// Largest number of names in the warning.
        const NAMED: usize = 8;
        let (all, named) = (&self.templates, self.templates.len().min(NAMED));
        let more = match all.len() - named {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let names = foreign(all[..named].join("`, `"));
        (!all.is_empty()).then(|| {
            format!(
                "onebox takes the default chat template alone: of {TEMPLATES} it neither uses nor keeps `{names}`{more}"
            )
        })
    }

    /// Why the files do not fit a run with this `data` and `tokenizer`; `None` if they fit.
    pub fn foreign(
        &self,
        data: &DataConfig,
        tokenizer: Option<&Tokenizer>,
    ) -> Option<&'static str> {
        match (tokenizer, self.get(TOKENIZER)) {
            (Some(now), Some(theirs)) if !now.is_of(theirs, |name| self.get(name)) => {
                Some("data.tokenizer is another one than the folder's")
            }
            (None, Some(theirs)) if data.format.is_bytes() && is_of_bytes(theirs) => None,
            (None, _) if data.format.is_bytes() => Some("the run's tokens are bytes"),
            _ => None,
        }
    }

    /// The files without `config.json`, which describes the model.
    #[must_use]
    pub fn without_model(mut self) -> Self {
        self.files.retain(|(name, _)| *name != "config.json");
        self
    }

    /// Adds a file of onebox, one of [`OWN`].
    pub fn add(&mut self, name: &'static str, bytes: Vec<u8>) {
        assert!(OWN.contains(&name), "`{name}` is a file of a folder, not of onebox");
        self.files.push((name, bytes));
    }

    /// Names and contents of the files.
    pub fn files(&self) -> &[(&'static str, Vec<u8>)] {
        &self.files
    }

    /// The content of a file.
    pub fn get(&self, name: &str) -> Option<&[u8]> {
        self.files.iter().find(|file| file.0 == name).map(|file| &*file.1)
    }
}

/// Refuses a Git LFS pointer, which stands for a file that was not downloaded.
pub fn check_pointer(path: &Path, bytes: &[u8]) -> Result<(), ModelFileError> {
    pointer(bytes).map_or(Ok(()), |instead| Err(ModelFileError::refused(path, instead.to_string())))
}

/// Error: the file at `path` cannot be read because of `source`; for a link, with the remedy.
pub fn unreadable(path: &Path, source: io::Error) -> ModelFileError {
    if source.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) {
        let why = "it is a link, and links are not followed: copy the folder with `cp -rL`";
        return ModelFileError::refused(path, why);
    }
    ModelFileError::Read { path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    #[test]
    fn what_is_no_file_of_the_folder_is_refused_with_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("tokenizer.json"), "{}").unwrap();
        fs::write(at("model.safetensors"), "never read").unwrap();
        let found = ModelFiles::open(folder.path()).unwrap();
        assert_eq!(found.files(), [("tokenizer.json", b"{}".to_vec())]);
        fs::write(at("config.json"), "{}").unwrap();
        assert_eq!(ModelFiles::open(&at("config.json")).unwrap().files().len(), 2);
        let refused = |name: &str, message: &str| {
            let why = ModelFiles::open(folder.path()).unwrap_err().to_string();
            assert!(why.contains(at(name).to_str().unwrap()) && why.contains(message), "{why}");
        };
        symlink("/etc/passwd", at("chat_template.jinja")).unwrap();
        refused("chat_template.jinja", "links are not followed");
        fs::remove_file(at("chat_template.jinja")).unwrap();
        fs::create_dir(at("merges.txt")).unwrap();
        refused("merges.txt", "not a regular file");
        fs::remove_dir(at("merges.txt")).unwrap();
        assert!(
            std::process::Command::new("mkfifo").arg(at("vocab.json")).status().unwrap().success()
        );
        refused("vocab.json", "not a regular file");
        fs::remove_file(at("vocab.json")).unwrap();
        File::create(at("tokenizer.model")).unwrap().set_len(2 << 30).unwrap();
        refused("tokenizer.model", "it has 2.00 GiB, and what a run keeps");
    }
}
