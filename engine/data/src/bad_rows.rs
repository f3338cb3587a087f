//! Rows of a data set that are left out or changed, and the reasons.

use super::ignored_keys::IgnoredKeyCounts;
use super::origins::RowLocation;
use files::foreign_text::{ForeignText, foreign};
use files::path_text::PathText;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::Path;
use topology::counted;

/// Largest fraction of the rows that may be left out.
const MOST_LEFT_OUT: f64 = 0.05;
/// Fraction of the rows that may contain texts of control tokens by chance.
const BY_CHANCE: f64 = 0.01;
/// Largest number of reasons in a message, and of example rows per reason.
const SHOWN: usize = 3;
/// Longest reason in a message, in characters.
const LONGEST: usize = 1000;
/// Reading stops if none of this many first rows can be used.
pub(super) const FIRST_ROWS: usize = 100;
/// Reading stops after this many rows if the chat template exceeds its step limit for each, since
/// each uses the whole time limit of a row.
pub(super) const SLOW_ROWS: usize = 4;

/// Reason for leaving out a row whose chat template runs too many steps.
pub(crate) const TOO_LONG: &str = "it takes more steps than a template may for this chat";

/// Counts of the rows that are left out or changed.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct BadRows {
    pub(super) rows: usize,
    pub(super) bad: usize,
    /// Rows with more tokens than a sample; they are left out.
    pub(super) long: usize,
    /// Tokens of the longest row left out.
    pub(super) longest: usize,
    /// Rows cut to the length of a sample.
    pub(super) cut: usize,
    /// Rows divided into several samples.
    pub(super) divided: usize,
    /// Rows with fewer than 2 tokens, an input and a target.
    #[serde(default)]
    pub(super) short: usize,
    /// Rows with texts of control tokens that are treated as plain text.
    #[serde(default)]
    pub(super) rendered: usize,
    /// Keys and thoughts of the used rows that the model does not see.
    #[serde(default)]
    pub(super) unread: IgnoredKeyCounts,
    /// The first reasons why rows cannot be used.
    #[serde(default)]
    reasons: Vec<Reason>,
    /// Whether reading stopped early because none of the first rows can be used.
    #[serde(skip)]
    given_up: bool,
    /// Whether the rows are the documents of an index.
    #[serde(skip)]
    of_index: bool,
    /// Whether each row left out is logged immediately.
    #[serde(skip)]
    all: bool,
    #[serde(skip)]
    is_brief: bool,
}

impl BadRows {
    /// No rows yet. With `all`, each row left out is logged immediately, and the first rows again
    /// at the end. With `is_brief`, ignored keys are not reported.
    pub(super) fn of_rows(all: bool, is_brief: bool) -> Self {
        Self { all, is_brief, ..Self::default() }
    }

    /// No documents of an index yet.
    pub(super) fn of_documents(all: bool) -> Self {
        Self { of_index: true, all, ..Self::default() }
    }

    /// Counts a row that cannot be used.
    pub(super) fn add(&mut self, at: RowLocation<'_>, why: &str) {
        self.bad += 1;
        self.name(at, why);
        let place = at.unit.noun();
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

    /// Decides whether to stop reading: enough rows are read, none can be used, and `all` is off.
    pub(super) fn give_up(&mut self) -> bool {
        let is_slow = |reason: &Reason| reason.why.contains(TOO_LONG);
        let are_slow = self.rows >= SLOW_ROWS && self.reasons.iter().all(is_slow);
        let are_enough = self.rows >= FIRST_ROWS || are_slow;
        self.given_up = are_enough && self.bad == self.rows && !self.all;
        self.given_up
    }

    /// Counts a row with more tokens than a sample, which is left out.
    pub(super) fn add_long(&mut self, at: RowLocation<'_>, tokens: usize) {
        self.longest = self.longest.max(tokens);
        self.long += 1;
        self.name(at, &format!("it has {tokens} tokens, more than a sample"));
    }

    /// Counts a row with fewer than 2 tokens.
    pub(super) fn add_short(&mut self, at: RowLocation<'_>) {
        self.short += 1;
        self.name(at, "it has fewer than 2 tokens");
    }

    fn name(&self, RowLocation { file, number, unit }: RowLocation<'_>, why: &str) {
        if self.all {
            tracing::warn!("{} {} {number}: {why}", PathText(file), unit.noun());
        }
    }

    /// Whether more rows are left out than allowed, or all. Short rows do not count for the limit,
    /// since they have no target.
    pub(super) fn are_too_many(&self) -> bool {
        let out = self.bad + self.long;
        out as f64 > MOST_LEFT_OUT * self.rows as f64 || out + self.short == self.rows
    }

    /// Whether there is anything to report.
    pub(super) fn are_some(&self) -> bool {
        self.bad + self.long + self.cut + self.divided + self.short > 0 || self.look_rendered()
    }

    /// Whether a template probably wrote the rows: texts of control tokens are in too many rows for
    /// chance.
    fn look_rendered(&self) -> bool {
        self.rendered as f64 > BY_CHANCE * self.rows as f64
    }

    /// Report of the ignored parts of the used rows; `None` if there is nothing to report.
    pub(super) fn unread(&self) -> Option<String> {
        let is_said = !self.is_brief && self.unread.are_some();
        is_said.then(|| self.unread.words(self.rows))
    }

    const fn noun(&self) -> &'static str {
        if self.of_index { "document" } else { "row" }
    }

    /// The plural noun for the rows.
    pub(super) fn nouns(&self) -> String {
        format!("{}s", self.noun())
    }
}

/// A reason why rows cannot be used.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Reason {
    why: String,
    rows: usize,
    /// Places of the first rows with this reason.
    first: Vec<String>,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { why, rows, first } = self;
        // The list of a prepared part is untrusted and may contain any text.
        let why = ForeignText::new(why, LONGEST);
        // A place is a file, a noun and a number. Places in the same file share the first two.
        let divided = |place: &str| match place.rsplit_once(' ') {
            Some((of, number)) => (foreign(of).to_string(), foreign(number).to_string()),
            None => (foreign(place).to_string(), String::new()),
        };
        let mut places = Vec::<(String, Vec<String>)>::new();
        for (of, number) in first.iter().map(|place| divided(place)) {
            match places.last_mut().filter(|(other, _)| *other == of) {
                Some((_, numbers)) => numbers.push(number),
                None => places.push((of, vec![number])),
            }
        }
        let plural = |(of, numbers): (String, Vec<String>)| match &numbers[..] {
            [one] => format!("{of} {one}"),
            several => format!("{of}s {}", several.join(", ")),
        };
        let mut places: Vec<String> = places.into_iter().map(plural).collect();
        let more = rows.saturating_sub(first.len());
        let last = match more {
            0 => places.pop(),
            more => Some(format!("{more} more")),
        };
        let places = [places.join(", "), last.unwrap_or_default()];
        let places: Vec<&str> =
            places.iter().map(String::as_str).filter(|p| !p.is_empty()).collect();
        write!(f, "{}: {why}", places.join(" and "))
    }
}

impl fmt::Display for BadRows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rows, bad, long, longest, cut, divided, short, rendered, all, .. } = self;
        let of = |n: usize| format!("{n} of {}", counted(*rows, self.noun()));
        let mut parts = Vec::new();
        if *bad > 0 {
            let mut reasons: Vec<String> = self.reasons.iter().map(Reason::to_string).collect();
            let listed: usize = self.reasons.iter().map(|reason| reason.rows).sum();
            if *bad > listed {
                reasons.push(format!("and {} more", bad - listed));
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
    use super::super::origins::RowUnit;
    use super::*;

    #[test]
    fn equal_reasons_are_said_once() {
        let mut rows = BadRows::of_rows(false, false);
        rows.rows = 1000;
        let path = Path::new("a/b.jsonl");
        for number in 1..=400 {
            rows.add(
                RowLocation { file: path, number, unit: RowUnit::Line },
                if number == 2 { "other" } else { "same" },
            );
        }
        assert_eq!(
            rows.to_string(),
            "400 of 1000 rows cannot be used (b.jsonl lines 1, 3, 4 and 396 more: same; b.jsonl line 2: other; \
             `onebox data check --all` names each)"
        );
    }

    #[test]
    fn rows_none_of_which_can_be_used_are_given_up() {
        let given_up_for = |all: bool, good: usize, why: &str| {
            let mut rows = BadRows::of_rows(all, false);
            (1..=1000).find(|number| {
                rows.rows += 1;
                if *number != good {
                    let (file, unit) = (Path::new("b"), RowUnit::Row);
                    rows.add(RowLocation { file, number: *number as u64, unit }, why);
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
