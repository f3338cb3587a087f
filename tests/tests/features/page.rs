//! The page with the table of features.

use super::named_tests::TESTS;
use super::table::{Coverage, Effect, FEATURES, Feature, Pair, REFUSALS, pairs};
use std::fmt::Write;

/// Beginning of the page.
const HEAD: &str = "# Pairs of features

This page is generated. `ONEBOX_UPDATE=1 cargo test -p tests --test features page` writes it from the table in
[table.rs](../../tests/tests/features/table.rs), and the same test fails if the page is not the table.

For each pair of features, a test runs both together, or a test asserts that `config check` refuses them. A new
feature gets an entry in the table; the tests then run its pairs.

Every run has small sizes and, unless a feature changes it, the default of each key, fp32, and stochastic
gradient descent. The run without one feature of a pair is the reference of the run with both.
";

const MARKS: &str = "
## Pairs

Rows and columns have the numbers of the features.

| mark | meaning |
|---|---|
| `=` | the run with both has the bits of the run without one: losses, norms, evaluations and states |
| `~` | the run with both is within the error of rounding of the run without one |
| `l` | the run with both has the losses of the run with exact updates, one step late |
| `c` | the command gives the same logits from the checkpoint, the weights and the exported folder of the run |
| `g` | on the stand-in for GPUs, the run with the library is within the error of rounding of the run without it |
| `t` | a test with values of transformers or PyTorch, or with slopes of the loss, runs the pair, see below |
| `x` | `config check` refuses the pair, see below |
| `.` | both are values of one key |

";

const fn mark(coverage: Coverage) -> char {
    match coverage {
        Coverage::Alternatives => '.',
        Coverage::Refusal(_) => 'x',
        Coverage::Test => 't',
        Coverage::Bits(_) => '=',
        Coverage::Distance(..) => '~',
        Coverage::Lateness(_) => 'l',
        Coverage::Command => 'c',
        Coverage::Library(_) => 'g',
    }
}

/// Settings in backticks.
fn quoted(sets: &[&str]) -> String {
    sets.iter().map(|set| format!("`{set}`")).collect::<Vec<_>>().join(", ")
}

fn effect(feature: &Feature) -> &'static str {
    match feature.effect {
        Effect::Place => "changes no bit",
        Effect::Order => "changes the order of sums",
        Effect::Rounding(_) => "rounds numbers",
        Effect::Experiment => "changes the experiment",
        Effect::Command => "is a command after the run",
        Effect::Library => "chooses a library of GPUs",
    }
}

/// Text of the page.
pub(super) fn text() -> String {
    let mut text = format!(
        "{HEAD}\n## Features\n\n| | feature | settings | needs | effect |\n|---|---|---|---|---|\n"
    );
    for (i, one) in FEATURES.iter().enumerate() {
        let [sets, needs] = [one.sets, one.needs].map(quoted);
        let line = format!("| {} | {} | {sets} | {needs} | {} |", i + 1, one.name, effect(one));
        text += &line.replace("|  |", "| |");
        text.push('\n');
    }
    text += MARKS;
    let numbers: String = (1..=FEATURES.len()).fold(String::new(), |mut text, i| {
        let _ = write!(text, " {i} |");
        text
    });
    let _ = writeln!(text, "| |{numbers}\n|---|{}", "---|".repeat(FEATURES.len()));
    for (i, second) in FEATURES.iter().enumerate() {
        let _ = write!(text, "| {} |", i + 1);
        for first in &FEATURES[..i] {
            let coverage = Pair { first, second }.coverage();
            let _ = write!(text, " `{}` |", coverage.map_or('?', mark));
        }
        let _ = writeln!(text, "{}", " |".repeat(FEATURES.len() - i));
    }
    text += "\n## Refusals\n\n| pair | part of the message |\n|---|---|\n";
    for (names, message) in REFUSALS {
        let _ = writeln!(text, "| {} | {message} |", names.join(", "));
    }
    text += "\n## Tests of other targets\n\n| pair | test |\n|---|---|\n";
    for test in &TESTS {
        let (names, file) = (test.pair.join(", "), test.file);
        let _ = writeln!(text, "| {names} | [{}](../../{file}) |", test.function);
    }
    text
}

#[test]
fn the_page_is_the_table() {
    let path = super::root().join("docs/internals/features.md");
    assert!(pairs().all(|pair| pair.coverage().is_some()));
    let text = text();
    if std::env::var_os("ONEBOX_UPDATE").is_some() {
        let in_ci = std::env::var_os("CI").is_some_and(|value| value == "true");
        assert!(!in_ci, "ONEBOX_UPDATE writes the page that the test should compare with");
        std::fs::write(&path, text).unwrap();
        return;
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    let [old, new] = [&committed, &text].map(|text| text.lines().collect::<Vec<_>>());
    let differs = old.iter().zip(&new).find(|(old, new)| old != new);
    assert!(
        committed == text,
        "docs/internals/features.md is not the table: {differs:?}, or lines are missing; \
         ONEBOX_UPDATE=1 cargo test --locked --offline -p tests --test features page"
    );
}
