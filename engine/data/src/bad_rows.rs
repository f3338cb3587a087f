//! Rows of a data set that are not taken, and why.

use super::ignored_keys::IgnoredKeyCounts;
use super::origins::RowLocation;
use files::foreign_text::{ForeignText, foreign};
use files::path_text::PathText;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::Path;
use topology::counted;

/// Share of the rows that may be left out.
const MOST_LEFT_OUT: f64 = 0.05;
/// Share of the rows that may have texts of control tokens by chance.
const BY_CHANCE: f64 = 0.01;
/// Reasons that a message shows, and rows of each.
const SHOWN: usize = 3;
/// Characters of a reason.
const LONGEST: usize = 1000;
/// So many rows at the beginning, none of which can be used, are enough.
pub(super) const FIRST_ROWS: usize = 100;
/// So many are enough if the chat template takes too many steps for each: every one takes all the time that a row may take.
pub(super) const SLOW_ROWS: usize = 4;

/// Why a row is left out if the chat template takes too many steps for it.
pub(crate) const TOO_LONG: &str = "it takes more steps than a template may for this chat";

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
    /// What nothing reads of those that are taken.
    #[serde(default)]
    pub(super) unread: IgnoredKeyCounts,
    /// The first reasons why some cannot be used.
    #[serde(default)]
    reasons: Vec<Reason>,
    /// The others are not read, since none of these can be used.
    #[serde(skip)]
    given_up: bool,
    /// They are the documents of an index.
    #[serde(skip)]
    of_index: bool,
    /// Each is named as it is found.
    #[serde(skip)]
    all: bool,
    #[serde(skip)]
    is_brief: bool,
}

impl BadRows {
    /// None yet, of rows. With `all` each is named as it is found, besides the first ones in the end. If they are brief, what nothing
    /// reads is not said.
    pub(super) fn of_rows(all: bool, is_brief: bool) -> Self {
        Self { all, is_brief, ..Self::default() }
    }

    /// None yet, of the documents of an index.
    pub(super) fn of_documents(all: bool) -> Self {
        Self { of_index: true, all, ..Self::default() }
    }

    /// Notes one that cannot be used.
    pub(super) fn add(&mut self, at: RowLocation<'_>, why: &str) {
        self.bad += 1;
        self.name(at, why);
        let place = self.place();
        let known = self.reasons.iter().position(|reason| reason.why == why);
        let number = known.unwrap_or(self.reasons.len());
        if known.is_none() {
            if number == SHOWN {
                return;
            }
            self.reasons.push(Reason { why: why.to_owned(), ..Reason::default() });
        }
        let reason = &mut self.reasons[number];
        reason.rows += 1;
        if reason.first.len() < SHOWN {
            let name = at.file.file_name().unwrap_or(at.file.as_os_str());
            reason.first.push(format!("{} {place} {}", PathText(Path::new(name)), at.number));
        }
    }

    /// Gives up, if so many rows are read, none of them can be used, and not every one is to be named.
    pub(super) fn give_up(&mut self) -> bool {
        let is_slow = |reason: &Reason| reason.why.contains(TOO_LONG);
        let are_slow = self.rows >= SLOW_ROWS && self.reasons.iter().all(is_slow);
        let are_enough = self.rows >= FIRST_ROWS || are_slow;
        self.given_up = are_enough && self.bad == self.rows && !self.all;
        self.given_up
    }

    /// Notes one with more tokens than a sample, which is left out.
    pub(super) fn add_long(&mut self, at: RowLocation<'_>, tokens: usize) {
        self.longest = self.longest.max(tokens);
        self.long += 1;
        self.name(at, &format!("it has {tokens} tokens, more than a sample"));
    }

    /// Notes one with fewer tokens than an input and a target.
    pub(super) fn add_short(&mut self, at: RowLocation<'_>) {
        self.short += 1;
        self.name(at, "it has fewer than 2 tokens");
    }

    fn name(&self, RowLocation { file, number }: RowLocation<'_>, why: &str) {
        if self.all {
            tracing::warn!("{} {} {number}: {why}", PathText(file), self.place());
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

    /// What nothing reads of those that are taken, if it is to be said.
    pub(super) fn unread(&self) -> Option<String> {
        let is_said = !self.is_brief && self.unread.are_some();
        is_said.then(|| self.unread.words(self.rows))
    }

    const fn noun(&self) -> &'static str {
        if self.of_index { "document" } else { "row" }
    }

    /// What a number of one counts.
    const fn place(&self) -> &'static str {
        if self.of_index { "document" } else { "line" }
    }

    /// The plural name of the things that may be left out.
    pub(super) fn nouns(&self) -> String {
        format!("{}s", self.noun())
    }
}

/// Why rows cannot be used.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Reason {
    why: String,
    rows: usize,
    /// The places of the first ones.
    first: Vec<String>,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { why, rows, first } = self;
        let (place, others) = first.split_first().map_or(("", &[][..]), |(p, o)| (p.as_str(), o));
        // A list of prepared parts may have any.
        let (place, why) = (foreign(place), ForeignText::new(why, LONGEST));
        write!(f, "{place}: {why}")?;
        let others: Vec<String> = others.iter().map(|place| foreign(place).to_string()).collect();
        match (&others[..], rows.saturating_sub(first.len())) {
            ([], _) => Ok(()),
            (others, 0) => write!(f, ", also {}", others.join(", ")),
            (others, more) => write!(f, ", also {} and {more} more", others.join(", ")),
        }
    }
}

impl fmt::Display for BadRows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rows, bad, long, longest, cut, divided, short, rendered, all, .. } = self;
        let of = |n: usize| format!("{n} of {}", counted(*rows, self.noun()));
        let mut parts = Vec::new();
        if *bad > 0 {
            let mut reasons: Vec<String> = self.reasons.iter().map(Reason::to_string).collect();
            let told: usize = self.reasons.iter().map(|reason| reason.rows).sum();
            if *bad > told {
                reasons.push(format!("and {} more", bad - told));
            }
            let named: usize = self.reasons.iter().map(|reason| reason.first.len()).sum();
            if *bad > named && !all {
                reasons.push("`onebox data check --all` names each".into());
            }
            let reasons = reasons.join("; ");
            parts.push(match self.given_up {
                true => format!(
                    "none of the first {} can be used ({reasons}), so the others are not read",
                    counted(*rows, self.noun())
                ),
                false => format!("{} cannot be used ({reasons})", of(*bad)),
            });
        }
        let more = "have more tokens than model.seq_len + 1";
        let long_ones = format!(
            "{more}, the longest {longest}, and are left out: raise model.seq_len, or set data.truncate: true"
        );
        let divided_ones = format!("{more} and are divided into documents of that many");
        let rendered = if self.look_rendered() { *rendered } else { 0 };
        let rendered_ones = "have the texts of control tokens, which are text and control nothing: if a chat template has made \
             them, set data.control_tokens: Parsed";
        for (rows, what) in [
            (*long, long_ones.as_str()),
            (*cut, "are cut at model.seq_len + 1 tokens"),
            (*divided, &divided_ones),
            (*short, "have fewer than 2 tokens, thus no target, and are left out"),
            (rendered, rendered_ones),
        ] {
            if rows > 0 {
                parts.push(format!("{} {what}", of(rows)));
            }
        }
        write!(f, "{}", parts.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_reasons_are_said_once() {
        let mut rows = BadRows::of_rows(false, false);
        rows.rows = 1000;
        let path = Path::new("a/b.jsonl");
        for number in 1..=400 {
            rows.add(
                RowLocation { file: path, number },
                if number == 2 { "other" } else { "same" },
            );
        }
        assert_eq!(
            rows.to_string(),
            "400 of 1000 rows cannot be used (b.jsonl line 1: same, also b.jsonl line 3, b.jsonl line 4 and 396 more; \
             b.jsonl line 2: other; `onebox data check --all` names each)"
        );
    }

    #[test]
    fn rows_none_of_which_can_be_used_are_given_up() {
        let given_up_for = |all: bool, good: usize, why: &str| {
            let mut rows = BadRows::of_rows(all, false);
            (1..=1000).find(|number| {
                rows.rows += 1;
                if *number != good {
                    rows.add(RowLocation { file: Path::new("b"), number: *number as u64 }, why);
                }
                rows.give_up()
            })
        };
        let given_up_at = |all: bool, good: usize| given_up_for(all, good, "same");
        let slow = format!("its chat template does not run: {TOO_LONG}");
        assert_eq!(given_up_for(false, 0, &slow), Some(SLOW_ROWS));
        assert_eq!(given_up_for(false, 2, &slow), None);
        assert_eq!(given_up_at(false, 0), Some(FIRST_ROWS));
        assert_eq!(given_up_at(false, 50), None);
        assert_eq!(given_up_at(true, 0), None);
    }
}
