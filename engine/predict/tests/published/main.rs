//! Published measurements of others, and this project's own, beside what the simulator says of them.
//!
//! `steps.csv` has whole steps and `parts.csv` single products, passes of attention, collectives,
//! copies and kernels, each with its source. A row with `check` in the column `use` had no part in the
//! choice of any constant. The column `before` has the ratio of the simulator of 2026-11-25. The tests
//! fail if the errors of a class grow. The quick tests take every third row of `steps.csv`; with
//! ONEBOX_FULL=1 they take all rows. `scripts/check-simulator --published` prints the signed errors of
//! all rows.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

mod boxes;
mod models;
mod parts;
mod steps;

use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Whether all rows are simulated.
fn full() -> bool {
    std::env::var_os("ONEBOX_FULL").is_some_and(|value| value == "1")
}

/// Rows of a CSV file without quotes, by the names of its columns.
fn rows(text: &'static str) -> Vec<BTreeMap<&'static str, &'static str>> {
    let mut lines = text.lines();
    let names: Vec<&str> = lines.next().unwrap().split(',').collect();
    let row = |line: &'static str| {
        let values: Vec<&str> = line.split(',').collect();
        assert_eq!(values.len(), names.len(), "{line}");
        names.iter().copied().zip(values).collect()
    };
    lines.map(row).collect()
}

/// Simulated speed over measured speed of the rows of a class: above 1 is too fast.
#[derive(Debug, Default)]
struct ClassRatios {
    /// Ratios of this version.
    now: Vec<f64>,
    /// Ratios of the version of 2026-11-25, where they are known.
    before: Vec<f64>,
}

/// The largest errors that a class may have.
#[derive(Clone, Copy, Debug)]
struct Bound {
    /// Name of the class.
    class: &'static str,
    /// Smallest and largest geometric mean of the ratios.
    mean: [f64; 2],
    /// Smallest and largest ratio.
    each: [f64; 2],
}

const fn bound(class: &'static str, mean: [f64; 2], each: [f64; 2]) -> Bound {
    Bound { class, mean, each }
}

/// Geometric mean.
fn mean(ratios: &[f64]) -> f64 {
    (ratios.iter().map(|ratio| ratio.ln()).sum::<f64>() / ratios.len().max(1) as f64).exp()
}

/// Smallest and largest ratio.
fn ends(ratios: &[f64]) -> [f64; 2] {
    let low = ratios.iter().copied().fold(f64::INFINITY, f64::min);
    [low, ratios.iter().copied().fold(0.0, f64::max)]
}

/// Median of the distances from 1.
fn median_error(ratios: &[f64]) -> f64 {
    let mut errors: Vec<f64> = ratios.iter().map(|ratio| (ratio - 1.0).abs()).collect();
    errors.sort_by(f64::total_cmp);
    if errors.is_empty() { 0.0 } else { errors[errors.len() / 2] }
}

/// Table of signed errors by class.
fn table(classes: &BTreeMap<&str, ClassRatios>) -> String {
    let mut text = "| class | rows | mean | median error | least .. most | before: mean | median error | least .. most |\n\
                    |---|---|---|---|---|---|---|---|\n"
        .to_owned();
    let percent = |x: f64| format!("{:+.0} %", 100.0 * (x - 1.0));
    let cells = |ratios: &[f64]| {
        let [low, high] = ends(ratios);
        let error = format!("{:.0} %", 100.0 * median_error(ratios));
        match ratios.len() {
            0 => " - | - | -".into(),
            _ => format!(
                "{} | {error} | {} .. {}",
                percent(mean(ratios)),
                percent(low),
                percent(high)
            ),
        }
    };
    for (class, ratios) in classes {
        let (now, before) = (cells(&ratios.now), cells(&ratios.before));
        let _ = writeln!(text, "| {class} | {} | {now} | {before} |", ratios.now.len());
    }
    text
}

/// Fails if a class has larger errors than its bound, or if it has none. The mean is that of `all` rows.
fn check(classes: &BTreeMap<&str, ClassRatios>, bounds: &[Bound], all: bool) {
    let mut wrong = Vec::new();
    for (class, ratios) in classes {
        let Some(bound) = bounds.iter().find(|bound| bound.class == *class) else {
            wrong.push(format!("{class}: no bound"));
            continue;
        };
        let within = |x: f64, [low, high]: [f64; 2]| low <= x && x <= high;
        let mean = mean(&ratios.now);
        if all && !within(mean, bound.mean) {
            wrong.push(format!("{class}: a mean of {mean:.3}, not within {:?}", bound.mean));
        }
        for ratio in ratios.now.iter().filter(|ratio| !within(**ratio, bound.each)) {
            wrong.push(format!("{class}: a ratio of {ratio:.3}, not within {:?}", bound.each));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
