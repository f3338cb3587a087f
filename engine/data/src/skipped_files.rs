//! Unused files of a directory. The user does not name them one by one, so onebox reports them.

use super::kind::{BINARY, FileKind};
use files::path_text::PathText;
use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};
use topology::{counted, format_bytes};

/// Summary of the files left out.
#[derive(Clone, Debug, Default)]
pub struct SkippedFiles {
    /// Number of files left out that may hold data.
    pub files: usize,
    /// Bytes of these files.
    pub bytes: u64,
    /// The largest of these files.
    pub(super) largest: Option<(PathBuf, u64, FileKind)>,
    /// Number of other files: pictures, programs and so on.
    pub binary: usize,
    /// Skipped run directories of onebox.
    pub runs: BTreeSet<PathBuf>,
}

impl SkippedFiles {
    pub(super) fn add(&mut self, path: &Path, bytes: u64, kind: FileKind) {
        if kind == BINARY {
            self.binary += 1;
            return;
        }
        self.files += 1;
        self.bytes += bytes;
        if self.largest.as_ref().is_none_or(|(_, most, _)| bytes > *most) {
            self.largest = Some((path.to_owned(), bytes, kind));
        }
    }

    pub(super) fn append(&mut self, other: Self) {
        self.files += other.files;
        self.bytes += other.bytes;
        self.binary += other.binary;
        self.runs.extend(other.runs);
        let both = self.largest.take().into_iter().chain(other.largest);
        self.largest = both.max_by_key(|(_, bytes, _)| *bytes);
    }

    /// Text for the description of a data set; empty if all files are used.
    pub(super) fn brief(&self) -> String {
        let mut text = String::new();
        if self.files > 0 {
            let bytes = format_bytes(self.bytes);
            text += &format!("; {} ({bytes}) left out", counted(self.files, "file"));
        }
        if self.binary > 0 {
            text += &format!("; {} passed over", counted(self.binary, "binary file"));
        }
        if !self.runs.is_empty() {
            let runs = if self.runs.len() == 1 { "run" } else { "runs" };
            text += &format!("; {} {runs} of onebox left out", self.runs.len());
        }
        text
    }
}

impl fmt::Display for SkippedFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((path, most, kind)) = &self.largest else {
            return match self.binary {
                0 => write!(f, "it has none"),
                binary => write!(f, "nothing but {}", counted(binary, "binary file")),
            };
        };
        let (files, bytes) = (self.files, format_bytes(self.bytes));
        let (path, most) = (PathText(path), format_bytes(*most));
        let FileKind { what, remedy } = kind;
        match files {
            1 => write!(f, "1 file is left out: {path} ({bytes}) is {what}: {remedy}"),
            _ => write!(
                f,
                "{files} files of {bytes} in all are left out; the largest, {path} ({most}), is {what}: {remedy}"
            ),
        }
    }
}
