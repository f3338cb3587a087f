//! Parts of rows that the model does not see.

use files::foreign_text::foreign;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use topology::counted;

/// Largest number of keys that are counted separately.
const MOST: usize = 64;
/// Largest number of names in a message.
const SHOWN: usize = 8;

/// The ignored parts of one row.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct IgnoredKeys {
    /// Ignored keys of the row, as shown in messages.
    pub(super) keys: BTreeSet<String>,
    /// Ignored keys of its messages.
    pub(super) of_messages: BTreeSet<String>,
    /// Whether the row has thoughts in an earlier answer.
    pub(super) thoughts: bool,
}

impl IgnoredKeys {
    /// Whether the model sees all of the row.
    pub(super) fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Numbers of rows with ignored parts in a data set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct IgnoredKeyCounts {
    /// Number of rows for each key.
    keys: BTreeMap<String, usize>,
    of_messages: BTreeMap<String, usize>,
    /// Number of rows with keys beyond the limit, which is reached if a data set uses data as keys.
    others: usize,
    thoughts: usize,
}

impl IgnoredKeyCounts {
    /// Adds the ignored parts of a row.
    pub(super) fn add(&mut self, row: &IgnoredKeys) {
        let mut has_others = false;
        let all = [(&mut self.keys, &row.keys), (&mut self.of_messages, &row.of_messages)];
        for (counts, keys) in all {
            for key in keys {
                let has_room = counts.len() < MOST;
                match counts.get_mut(key) {
                    Some(count) => *count += 1,
                    None if has_room => drop(counts.insert(key.clone(), 1)),
                    None => has_others = true,
                }
            }
        }
        self.others += usize::from(has_others);
        self.thoughts += usize::from(row.thoughts);
    }

    /// Whether there is anything to report.
    pub(super) fn are_some(&self) -> bool {
        *self != Self::default()
    }

    /// The report, for a data set of `of` rows.
    pub(super) fn words(&self, of: usize) -> String {
        let rows = |n: usize| format!("{n} of {} have", counted(of, "row"));
        let mut parts = Vec::new();
        for (counts, place) in [(&self.keys, ""), (&self.of_messages, " in messages")] {
            // Keys with the same number of rows share a phrase.
            let mut by_count = BTreeMap::<usize, Vec<&str>>::new();
            for (key, count) in counts {
                by_count.entry(*count).or_default().push(key);
            }
            for (count, keys) in by_count.into_iter().rev() {
                let more = match keys.len().saturating_sub(SHOWN) {
                    0 => String::new(),
                    more => format!(" and {}", counted(more, "other key")),
                };
                // The list of a prepared part is untrusted and may contain any key.
                let keys = keys[..keys.len().min(SHOWN)].iter().map(|key| foreign(key).to_string());
                let keys = keys.collect::<Vec<_>>().join(", ");
                parts.push(format!("{} {keys}{more}{place}, which nothing reads", rows(count)));
            }
        }
        if self.others > 0 {
            parts.push(format!("{} further keys, which nothing reads", rows(self.others)));
        }
        if self.thoughts > 0 {
            let rows = rows(self.thoughts);
            parts.push(format!(
                "{rows} thoughts in earlier answers, which the chat template leaves out"
            ));
        }
        parts.join("; ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(keys: &[String], of_messages: &[&str], thoughts: bool) -> IgnoredKeys {
        let of_messages = of_messages.iter().map(|key| (*key).to_owned()).collect();
        IgnoredKeys { keys: keys.iter().cloned().collect(), of_messages, thoughts }
    }

    #[test]
    fn keys_are_counted_and_said_once() {
        let mut all = IgnoredKeyCounts::default();
        all.add(&IgnoredKeys::default());
        assert!(!all.are_some());
        let [id, url] = ["`id`", "`url`"].map(str::to_owned);
        all.add(&of(&[id.clone(), url.clone()], &["`id`"], false));
        all.add(&of(&[url, id.clone()], &[], true));
        all.add(&of(&[id], &[], false));
        assert_eq!(
            all.words(5),
            "3 of 5 rows have `id`, which nothing reads; 2 of 5 rows have `url`, which nothing reads; \
             1 of 5 rows have `id` in messages, which nothing reads; \
             1 of 5 rows have thoughts in earlier answers, which the chat template leaves out"
        );
    }

    #[test]
    fn keys_that_are_data_are_not_all_kept() {
        let mut all = IgnoredKeyCounts::default();
        for n in 0..1000 {
            all.add(&of(&[format!("`{n}`")], &[], false));
        }
        let message = all.words(1000);
        assert!(message.contains("and 56 other keys, which nothing reads"), "{message}");
        assert!(message.contains("936 of 1000 rows have further keys"), "{message}");
        assert!(message.len() < 300 && all.keys.len() == MOST);
    }
}
