//! Files of a directory that are not taken. A directory is named by a wish, not by its files, so what it loses is said.

use super::kind::{BINARY, FileKind};
use files::path_text::PathText;
use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};
use topology::{counted, format_bytes};

/// What was left out, and why.
#[derive(Clone, Debug, Default)]
pub struct SkippedFiles {
    /// Files that may hold data.
    pub files: usize,
    /// Their bytes.
    pub bytes: u64,
    /// The largest of them.
    pub(super) largest: Option<(PathBuf, u64, FileKind)>,
    /// Others: pictures, programs and so on.
    pub binary: usize,
    /// Directories of runs of onebox.
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

    /// For the line that describes a data set; empty when nothing was left out.
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
