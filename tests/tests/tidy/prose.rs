//! Few documentation comments have a phrase that makes a reader read twice. `scripts/house --prose`
//! lists them.

use house::prose::{self, ProseCount};
use house::workspace::Crate;

/// Largest share of marked comments of a crate, in percent: some good sentences have such a phrase.
const MOST: f64 = 4.0;

/// The crates with too many marked comments, and their marked comments.
pub(super) fn problems_of(crates: &[Crate]) -> Vec<String> {
    let mut problems = Vec::new();
    for one in crates {
        let share = ProseCount::new(&one.sources).percent();
        if share >= MOST {
            problems.push(format!("{share:.1} % of the documentation comments of {}:", one.name));
            let marked = prose::marked(one);
            problems.extend(marked.iter().map(|(place, is)| format!("{place} {}", is.join(", "))));
        }
    }
    problems
}
