//! Origins of documents: the line or the row in their file, or their number in its index.

use files::path_text::PathText;
use std::fmt;
use std::path::{Path, PathBuf};

/// The place of a document in its file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    file: PathBuf,
    number: u64,
    unit: RowUnit,
}

/// Unit of the row numbers of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RowUnit {
    /// Lines of text.
    Line,
    /// Rows of a table, or elements of a JSON array.
    Row,
    /// Documents of an index.
    Document,
}

impl RowUnit {
    /// The word before the number.
    pub(super) const fn noun(self) -> &'static str {
        match self {
            Self::Line => "line",
            Self::Row => "row",
            Self::Document => "document",
        }
    }
}

impl Origin {
    /// Makes the path of the file relative to `folder`, if the file is in that folder.
    pub fn seen_from(self, folder: &Path) -> Self {
        let file = self.file.strip_prefix(folder).map_or(self.file.clone(), PathBuf::from);
        Self { file, ..self }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, number, unit } = self;
        match unit {
            RowUnit::Line => write!(f, "{}:{number}", PathText(file)),
            unit => write!(f, "{} {} {number}", PathText(file), unit.noun()),
        }
    }
}

/// The place of a row or of a document of an index.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowLocation<'a> {
    pub(super) file: &'a Path,
    pub(super) number: u64,
    pub(super) unit: RowUnit,
}

/// The origins of documents, in order. Consecutive documents of a file share one entry.
#[derive(Debug, Default)]
pub(super) struct Origins {
    files: Vec<(PathBuf, RowUnit)>,
    runs: Vec<DocumentRun>,
}

/// Consecutive documents of a file.
#[derive(Debug)]
struct DocumentRun {
    /// Number of the first document of the run among all documents.
    document: usize,
    file: usize,
    /// Number of the first document of the run in its file.
    number: u64,
}

impl Origins {
    /// Records the origin of `document`, which comes after all others.
    pub(super) fn note(&mut self, document: usize, at: RowLocation<'_>) {
        let number = at.number;
        if self.files.last().is_none_or(|(last, _)| last != at.file) {
            self.files.push((at.file.into(), at.unit));
        }
        let file = self.files.len() - 1;
        let follows = self.runs.last().is_some_and(|run| {
            run.file == file && number == run.number + (document - run.document) as u64
        });
        if !follows {
            self.runs.push(DocumentRun { document, file, number });
        }
    }

    /// The origin of a document.
    pub(super) fn of(&self, document: usize) -> Option<Origin> {
        let next = self.runs.partition_point(|run| run.document <= document);
        let run = self.runs.get(next.checked_sub(1)?)?;
        let number = run.number + (document - run.document) as u64;
        let (file, unit) = self.files[run.file].clone();
        Some(Origin { file, number, unit })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_that_follow_each_other_take_one_run() {
        let mut origins = Origins::default();
        assert_eq!(origins.of(0), None);
        let places =
            [("a", 1), ("a", 2), ("a", 3), ("a", 7), ("a", 7), ("a", 8), ("b", 9), ("a", 1)];
        for (document, (file, number)) in places.into_iter().enumerate() {
            let unit = if file == "b" { RowUnit::Document } else { RowUnit::Line };
            origins.note(document, RowLocation { file: Path::new(file), number, unit });
        }
        assert_eq!(origins.runs.len(), 5);
        for (document, (file, number)) in places.into_iter().enumerate() {
            let message = origins.of(document).map(|origin| origin.to_string());
            let text = if file == "b" { "b document 9" } else { &format!("{file}:{number}") };
            assert_eq!(message.as_deref(), Some(text));
        }
    }
}
