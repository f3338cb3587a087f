//! Each pair of features has a test that runs both together, or `config check` refuses both
//! together. `table.rs` is the table; docs/internals/features.md is its page.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]
#![allow(clippy::print_stdout, reason = "the pair that fails")]
#![allow(clippy::allow_attributes, reason = "the lines above")]

mod feature_names;
mod libraries;
mod named_tests;
mod page;
mod runs;
mod table;

use named_tests::TESTS;
use runs::{Backend, assert_late, assert_near, assert_results, run};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use table::{Coverage, Effect, FEATURES, FP32, REFUSALS, key_of, pairs, settings};
use tests::compare::assert_same_bits;
use tests::try_tiny;

/// The repository.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

#[test]
fn the_table_has_each_pair_once() {
    let names: BTreeSet<&str> = FEATURES.iter().map(|one| one.name).collect();
    assert_eq!(names.len(), FEATURES.len(), "each feature has its own name");
    let distinct: BTreeSet<[&str; 2]> =
        pairs().map(|pair| [pair.first.name, pair.second.name]).collect();
    assert_eq!(distinct.len(), FEATURES.len() * (FEATURES.len() - 1) / 2);
    let listed = REFUSALS.iter().map(|(names, _)| *names).chain(TESTS.iter().map(|one| one.pair));
    for names in listed.clone() {
        assert!(distinct.contains(&names), "{names:?} is no pair in the order of the features");
        assert_eq!(listed.clone().filter(|other| *other == names).count(), 1, "{names:?}");
    }
    for pair in pairs() {
        assert!(pair.coverage().is_some(), "nothing covers {}", pair.name());
        // Otherwise one of the features would run without what it needs.
        for one in pair.first.needs {
            let other = pair.second.needs.iter().find(|other| key_of(other) == key_of(one));
            assert!(other.is_none_or(|other| other == one), "{}: {one} {other:?}", pair.name());
        }
    }
}

#[test]
fn config_check_refuses_the_pairs_of_the_table_and_no_others() {
    for feature in &FEATURES {
        let alone = try_tiny(&settings(&[feature], None));
        assert!(alone.is_ok(), "{}: {}", feature.name, alone.unwrap_err());
    }
    for pair in pairs() {
        let (name, checked) = (pair.name(), try_tiny(&pair.settings()));
        match (pair.coverage().expect("a coverage"), checked) {
            // A config has one value of a key.
            (Coverage::Alternatives, _) => {}
            (Coverage::Refusal(message), Err(error)) => {
                let is = |text: &str| text.contains(message);
                assert!(error.errors().iter().any(|one| is(&one.message)), "{name}: {error}");
                assert!(error.errors().iter().all(|one| !one.help.is_empty()), "{name}: {error}");
            }
            (Coverage::Refusal(_), Ok(_)) => panic!("{name}: the config is not refused"),
            (_, Err(error)) => panic!("{name}: {error}"),
            (_, Ok(_)) => {}
        }
    }
}

#[test]
fn each_named_test_exists_and_uses_both_features() {
    for test in &TESTS {
        let source = std::fs::read_to_string(root().join(test.file)).unwrap();
        let begin = format!("#[test]\nfn {}() {{\n", test.function);
        let (_, rest) = source.split_once(&begin).unwrap_or_else(|| panic!("{test:?}"));
        let (body, _) = rest.split_once("\n}\n").expect("a function ends");
        for word in test.words {
            assert!(body.contains(word), "{test:?}: the function does not use {word}");
        }
    }
    // `MODELS` has models with windows, with layers without rotary positions, and with experts.
    let source = root().join("tests/tests/equivalence/llama.rs");
    let source = std::fs::read_to_string(source).unwrap();
    let (_, models) = source.split_once("\nconst MODELS: ").unwrap();
    let (models, _) = models.split_once("];").unwrap();
    let wanted = ["qwen3-window", "smollm3", "qwen3-moe", "glm4-moe", "gpt-oss", "qwen3-next"];
    let wanted = wanted.map(|model| format!("\"{model}\""));
    assert!(wanted.iter().all(|model| models.contains(model.as_str())), "{models}");
}

#[test]
fn each_feature_alone_has_its_effect() {
    for feature in &FEATURES {
        let (name, sets) = (feature.name, settings(&[feature], None));
        let base = settings(&[feature], Some(feature));
        println!("{name}");
        let losses_differ = || {
            let [base, with] = [run(&base), run(&sets)];
            let mut steps = base.0.steps.iter().zip(&with.0.steps);
            steps.any(|(a, b)| (a.loss - b.loss).abs() > 1e-2)
        };
        match feature.effect {
            Effect::Place => assert_same_bits(&run(&base).0, &run(&sets).0, name),
            Effect::Order => assert_near(name, &base, &sets, FP32),
            Effect::Rounding(limit) => {
                assert_near(name, &base, &sets, limit);
                assert!(run(&base).1 != run(&sets).1, "{name} rounds nothing");
            }
            Effect::Experiment => assert!(losses_differ(), "{name} changes no loss"),
            Effect::Command => assert_results(name, &[feature], Backend::VirtualGpus),
            // Virtual GPUs do not use libraries of GPUs.
            Effect::Library => assert_same_bits(&run(&base).0, &run(&sets).0, name),
        }
    }
}

#[test]
fn a_feature_that_changes_no_bit_changes_none_beside_any_other() {
    let mut compared = 0;
    for pair in pairs() {
        let Some(Coverage::Bits(added)) = pair.coverage() else { continue };
        println!("{}", pair.name());
        let (base, with) = (run(&pair.settings_without(added)), run(&pair.settings()));
        assert!(base.0.steps.iter().all(|step| step.loss.is_finite()), "{}", pair.name());
        assert_same_bits(&base.0, &with.0, &pair.name());
        assert!(base.1 == with.1, "{}: the weights differ", pair.name());
        compared += 1;
    }
    assert!(compared > 100, "{compared}");
}

#[test]
fn a_feature_that_rounds_or_sums_otherwise_stays_near_beside_any_other() {
    let mut compared = 0;
    for pair in pairs() {
        let name = pair.name();
        match pair.coverage() {
            Some(Coverage::Distance(added, limit)) => {
                assert_near(&name, &pair.settings_without(added), &pair.settings(), limit);
            }
            Some(Coverage::Lateness(other)) => {
                assert_late(&name, &settings(&[other], None), &pair.settings());
            }
            _ => continue,
        }
        compared += 1;
    }
    assert!(compared > 30, "{compared}");
}

#[test]
fn a_run_with_any_feature_generates_and_exports_its_weights() {
    let mut done = BTreeSet::new();
    for pair in pairs() {
        // One run is for both commands.
        let is_new =
            matches!(pair.coverage(), Some(Coverage::Command)) && done.insert(pair.settings());
        if is_new {
            assert_results(&pair.name(), &[pair.first, pair.second], Backend::VirtualGpus);
        }
    }
    assert!(done.len() > 20, "{}", done.len());
}
