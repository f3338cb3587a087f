//! Line information: `.file` and `.loc`.

use std::collections::HashMap;

/// The files of a text, and the place of the last `.loc`.
#[derive(Debug, Default)]
pub(super) struct Lines {
    files: HashMap<String, String>,
    at: String,
}

impl Lines {
    /// Reads the files, which are at the end of the text, before all other statements.
    pub(super) fn of(text: &str) -> Self {
        let file = |line: &str| {
            let (number, name) =
                line.trim().strip_prefix(".file")?.trim().split_once(char::is_whitespace)?;
            let name = name.split('"').nth(1)?;
            Some((number.to_string(), name.rsplit('/').next().unwrap_or(name).to_string()))
        };
        Self { files: text.lines().filter_map(file).collect(), at: String::new() }
    }

    /// Reads `.loc FILE LINE COLUMN[, function_name F, inlined_at FILE LINE COLUMN]`.
    pub(super) fn take(&mut self, statement: &str) {
        let words: Vec<&str> =
            statement.split([' ', '\t', ',']).filter(|word| !word.is_empty()).collect();
        // Line 0 means that the instruction belongs to no line; the last place is nearer the truth.
        if words.get(2).is_none_or(|line| *line == "0") {
            return;
        }
        self.at = self.place(&words[1..]);
        if let Some(inlined) = words.iter().position(|word| *word == "inlined_at") {
            self.at += &format!(" in {}", self.place(&words[inlined + 1..]));
        }
    }

    fn place(&self, words: &[&str]) -> String {
        let file = words.first().and_then(|number| self.files.get(*number));
        format!("{}:{}", file.map_or("?", |name| name), words.get(1).unwrap_or(&"?"))
    }

    /// The current place: `norm.cu:12`, or `prelude.cuh:96 in norm.cu:12` for an inlined function.
    pub(super) fn here(&self) -> String {
        self.at.clone()
    }
}
