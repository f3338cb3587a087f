//! Rows of a data set that are not taken, and why.

use crate::report::shown::Shown;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::Path;
use topology::counted;

/// Share of the rows that may be left out.
const MOST_LEFT_OUT: f64 = 0.05;
/// Share of the rows that may have texts of control tokens by chance.
const BY_CHANCE: f64 = 0.01;
/// Rows that a message shows.
const SHOWN: usize = 3;

/// The kind of thing that may be left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Of {
    #[default]
    Rows,
    /// Of an index.
    Documents,
}

impl Of {
    const fn noun(self) -> &'static str {
        match self {
            Self::Rows => "row",
            Self::Documents => "document",
        }
    }

    /// What a number of one counts.
    const fn place(self) -> &'static str {
        match self {
            Self::Rows => "line",
            Self::Documents => "document",
        }
    }
}

/// Rows that are no samples.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct BadRows {
    pub(super) rows: usize,
    pub(super) bad: usize,
    /// With more tokens than a sample.
    pub(super) long: usize,
    /// Tokens of the longest.
    pub(super) longest: usize,
    /// Cut to a sample.
    pub(super) cut: usize,
    /// Divided into several samples.
    pub(super) divided: usize,
    /// With fewer tokens than an input and a target.
    #[serde(default)]
    pub(super) short: usize,
    /// With texts of control tokens that control nothing.
    #[serde(default)]
    pub(super) rendered: usize,
    /// The first ones, with what is wrong with them.
    first: Vec<String>,
    #[serde(skip)]
    of: Of,
    /// Each is named as it is found.
    #[serde(skip)]
    all: bool,
}

impl BadRows {
    /// None yet, of rows. With `all` each is named as it is found, besides the first ones in the end.
    pub(super) fn of_rows(all: bool) -> Self {
        Self { all, ..Self::default() }
    }

    /// None yet, of the documents of an index.
    pub(super) fn of_documents(all: bool) -> Self {
        Self { of: Of::Documents, all, ..Self::default() }
    }

    /// Notes one that cannot be used.
    pub(super) fn add(&mut self, (path, number): (&Path, u64), why: &str) {
        self.bad += 1;
        self.name((path, number), why);
        if self.first.len() < SHOWN {
            let name = path.file_name().unwrap_or(path.as_os_str());
            let place = self.of.place();
            self.first.push(format!("{} {place} {number}: {why}", Shown(Path::new(name))));
        }
    }

    /// Notes one with more tokens than a sample, which is left out.
    pub(super) fn add_long(&mut self, at: (&Path, u64), tokens: usize) {
        self.longest = self.longest.max(tokens);
        self.long += 1;
        self.name(at, &format!("it has {tokens} tokens, more than a sample"));
    }

    /// Notes one with fewer tokens than an input and a target.
    pub(super) fn add_short(&mut self, at: (&Path, u64)) {
        self.short += 1;
        self.name(at, "it has fewer than 2 tokens");
    }

    fn name(&self, (path, number): (&Path, u64), why: &str) {
        if self.all {
            tracing::warn!("{} {} {number}: {why}", Shown(path), self.of.place());
        }
    }

    /// Whether more are left out than a user can have meant. Short ones lose no target.
    pub(super) fn are_too_many(&self) -> bool {
        let out = self.bad + self.long;
        out as f64 > MOST_LEFT_OUT * self.rows as f64 || out + self.short == self.rows
    }

    /// Whether anything is to be said.
    pub(super) fn are_some(&self) -> bool {
        self.bad + self.long + self.cut + self.divided + self.short > 0 || self.look_rendered()
    }

    /// Whether so many have texts of control tokens that a template may have made them.
    fn look_rendered(&self) -> bool {
        self.rendered as f64 > BY_CHANCE * self.rows as f64
    }

    /// The plural name of the things that may be left out.
    pub(super) fn nouns(&self) -> String {
        format!("{}s", self.of.noun())
    }
}

impl fmt::Display for BadRows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rows, bad, long, longest, cut, divided, short, rendered, .. } = self;
        let Self { first, of: what, all, .. } = self;
        let of = |n: usize| format!("{n} of {}", counted(*rows, what.noun()));
        let mut parts = Vec::new();
        if *bad > 0 {
            let more = bad - first.len();
            let more = match (more, all) {
                (0, _) => String::new(),
                (_, true) => format!("; and {more} more"),
                (_, false) => format!("; and {more} more, which `onebox data check --all` names"),
            };
            parts.push(format!("{} cannot be used ({}{more})", of(*bad), first.join("; ")));
        }
        if *long > 0 {
            parts.push(format!(
                "{} have more tokens than model.seq_len + 1, the longest {longest}, and are left out: raise \
                 model.seq_len, or set data.truncate: true",
                of(*long)
            ));
        }
        if *cut > 0 {
            parts.push(format!("{} are cut at model.seq_len + 1 tokens", of(*cut)));
        }
        if *divided > 0 {
            parts.push(format!(
                "{} have more tokens than model.seq_len + 1 and are divided into documents of that many",
                of(*divided)
            ));
        }
        if *short > 0 {
            parts.push(format!(
                "{} have fewer than 2 tokens, thus no target, and are left out",
                of(*short)
            ));
        }
        if self.look_rendered() {
            parts.push(format!(
                "{} have the texts of control tokens, which are text and control nothing: if a chat template has made them, set \
                 data.control_tokens: Parsed",
                of(*rendered)
            ));
        }
        write!(f, "{}", parts.join("; "))
    }
}
