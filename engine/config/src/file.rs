//! Reads the text files of a config, and suggests names for a file that does not exist.

use super::reading::{Complaint, nearest, short};
use files::input::{self, NotAFile};
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::path::Path;

/// Most bytes of a config, which bounds the work that a wrong file can cause.
pub(super) const LARGEST: u64 = 1 << 20;

fn complaint(message: String, help: &str) -> Complaint {
    Complaint { message, help: help.into() }
}

/// Why a file cannot be read.
pub(super) struct ReadFailure {
    pub(super) complaint: Complaint,
    /// Kind of the system's error, if the system refused to open the file.
    pub(super) kind: Option<ErrorKind>,
}

impl From<Complaint> for ReadFailure {
    fn from(complaint: Complaint) -> Self {
        Self { complaint, kind: None }
    }
}

impl From<ReadFailure> for Complaint {
    fn from(failure: ReadFailure) -> Self {
        failure.complaint
    }
}

/// Reads the text of a file. The error says why it cannot be read.
pub(super) fn read(path: &Path) -> Result<String, Complaint> {
    Ok(text_of(path)?)
}

/// As [`read`]. The error also has the kind of the system's error.
pub(super) fn text_of(path: &Path) -> Result<String, ReadFailure> {
    Ok(utf8(opened(path, input::open)?)?)
}

/// As [`read`], for a file or a pipe; waits for the writer of a pipe.
pub(super) fn read_stream(path: &Path) -> Result<String, Complaint> {
    utf8(opened(path, input::stream)?)
}

fn opened(path: &Path, open: fn(&Path) -> io::Result<File>) -> Result<File, ReadFailure> {
    if path.is_dir() {
        return Err(complaint("it is a directory".into(), &folder_help(path)).into());
    }
    open(path).map_err(|error| {
        let help = match error.kind() {
            ErrorKind::NotFound => missing_help(path),
            _ if NotAFile::is(&error) => "write the text into a file, and name that".into(),
            _ => "check the file and its permissions".into(),
        };
        let complaint = complaint(error.to_string(), &help);
        ReadFailure { complaint, kind: Some(error.kind()) }
    })
}

/// Reads a whole text in UTF-8.
pub(super) fn utf8(from: impl Read) -> Result<String, Complaint> {
    let bytes = input::whole(from, LARGEST).map_err(|error| match error.kind() {
        ErrorKind::FileTooLarge => {
            let help = "a config is a few kilobytes of RON: is this the right file?";
            complaint(format!("it is larger than {}", topology::format_bytes(LARGEST)), help)
        }
        _ => complaint(error.to_string(), "check the file and its permissions"),
    })?;
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        let line = error.as_bytes().iter().take(at).filter(|byte| **byte == b'\n').count() + 1;
        complaint(format!("line {line} is not UTF-8"), "save the file as UTF-8 text")
    })
}

/// Help for a missing file: the existing file with the nearest name.
fn missing_help(path: &Path) -> String {
    let wanted = path.file_name().map(|name| name.to_string_lossy().into_owned());
    let dir = path.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let names = match ron_files(dir) {
        Ok(names) => names,
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return format!("there is no directory `{}`", dir.display());
        }
        Err(error) => return format!("the directory `{}` cannot be read: {error}", dir.display()),
    };
    // A broken link has exactly this name.
    let others = names.iter().filter(|name| wanted.as_ref() != Some(name));
    let near = nearest(wanted.as_deref().unwrap_or_default(), others.map(String::as_str));
    match near.first() {
        Some(name) => format!("did you mean `{}`?", dir.join(name).display()),
        None => in_folder(dir, &names),
    }
}

/// Help for a path that is a directory: the configs in it.
fn folder_help(dir: &Path) -> String {
    match ron_files(dir) {
        Ok(names) => format!("name a file; {}", in_folder(dir, &names)),
        Err(error) => format!("name a file; the directory cannot be read: {error}"),
    }
}

fn in_folder(dir: &Path, names: &[String]) -> String {
    match names {
        [] => format!("there is no `.ron` file in `{}`", dir.display()),
        [only] => format!("in `{}` there is `{}`", dir.display(), short(only)),
        _ => format!("in `{}` there are: {}", dir.display(), short(&names.join(", "))),
    }
}

/// Sorted names of the `.ron` files among the first 1000 entries of `dir`.
pub(super) fn ron_files(dir: &Path) -> io::Result<Vec<String>> {
    let file = |entry: io::Result<std::fs::DirEntry>| {
        let path = entry.ok()?.path();
        let name = path.file_name()?.to_str()?.to_owned();
        (name.ends_with(".ron") && !path.is_dir()).then_some(name)
    };
    let mut names: Vec<String> = std::fs::read_dir(dir)?.take(1000).filter_map(file).collect();
    names.sort();
    Ok(names)
}
