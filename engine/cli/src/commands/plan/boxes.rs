//! `onebox plan --model --boxes`: ranks boxes by the time and the cost of training a model on them, and
//! says what the others lack.

use super::super::largest::lines_of;
use super::super::simulate::{seconds, with_range};
use super::super::{
    CommandError, Failable, code, fit_result, print, print_json, say, text_for_config,
};
use super::PlanArgs;
use super::model::{duration, key, load_with};
use crate::report::reading::TerminalProgress;
use config::bundled::BOXES;
use config::{BOX, find_box, load_box};
use files::foreign_text::foreign;
use files::path_text::ShownPath;
use layout::LocalMachine;
use predict::States;
use predict::search::{Layout, SearchReport, search as search_layouts};
use predict::shortage::shortages;
use serde::Serialize;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use topology::counted;

/// Document that `--json` prints.
#[derive(Serialize)]
struct RankedBoxes {
    /// Always true: nothing here was measured.
    simulated: bool,
    /// Number of tokens to train on, if it was named.
    #[serde(skip_serializing_if = "Option::is_none")]
    tokens: Option<u64>,
    /// The boxes on which the model fits, the fastest first; then the others.
    boxes: Vec<RankedBox>,
}

/// A box, and the fastest layout of the model on all its GPUs.
#[derive(Serialize)]
struct RankedBox {
    /// Name of a bundled box, or path of a file.
    name: String,
    /// The box's own name.
    title: String,
    gpus: usize,
    /// Price of the box in US dollars per hour; `None` if the box does not say it.
    #[serde(skip_serializing_if = "Option::is_none")]
    usd_per_hour: Option<f64>,
    fits: bool,
    /// The fastest layout; `None` if no layout fits.
    #[serde(skip_serializing_if = "Option::is_none")]
    best: Option<BestLayout>,
    /// A sentence with figures for each memory of the box that is too small; empty if the model fits.
    lacks: Vec<String>,
}

/// The fastest layout on a box.
#[derive(Serialize)]
struct BestLayout {
    tokens_per_second: f64,
    tokens_per_second_low: f64,
    tokens_per_second_high: f64,
    /// Seconds of one optimizer step.
    step_seconds: f64,
    /// Seconds of the training.
    #[serde(skip_serializing_if = "Option::is_none")]
    seconds: Option<Estimate>,
    /// Cost of the training in US dollars.
    #[serde(skip_serializing_if = "Option::is_none")]
    usd: Option<Estimate>,
    /// TP and DP, micro-batches, recomputation and places, in words.
    layout: String,
    /// Reason of the range.
    range: String,
    /// Settings of the layout.
    sets: Vec<String>,
}

/// A simulated amount with its range.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Estimate {
    expected: f64,
    low: f64,
    high: f64,
}

impl Estimate {
    fn map(self, f: impl Fn(f64) -> f64) -> Self {
        Self { expected: f(self.expected), low: f(self.low), high: f(self.high) }
    }

    /// The amount and its range, as `show` writes a number.
    fn words(self, show: impl Fn(f64) -> String) -> String {
        format!("{} ({} to {})", show(self.expected), show(self.low), show(self.high))
    }
}

impl BestLayout {
    fn new(best: &Layout, states: States, tokens: Option<u64>, usd_per_hour: Option<f64>) -> Self {
        let Layout { tensor, data, micro, micro_batches, words, .. } = best;
        // The highest speed has the shortest time.
        let seconds = tokens.map(|tokens| Estimate {
            expected: tokens as f64 / best.tokens_per_second,
            low: tokens as f64 / best.tokens_per_second_high,
            high: tokens as f64 / best.tokens_per_second_low,
        });
        let usd = seconds.zip(usd_per_hour);
        let usd = usd.map(|(seconds, price)| seconds.map(|seconds| price * seconds / 3600.0));
        let form = match states {
            States::Given => "",
            States::SplitMaster => ", with split fp32 parameters",
            States::Bf16Moments => ", but only with bf16 Adam moments, which change results",
        };
        Self {
            tokens_per_second: best.tokens_per_second,
            tokens_per_second_low: best.tokens_per_second_low,
            tokens_per_second_high: best.tokens_per_second_high,
            step_seconds: best.step_seconds,
            seconds,
            usd,
            layout: format!(
                "TP {tensor} x DP {data}, micro {micro} x {micro_batches}, {words}{form}"
            ),
            range: best.range.reason.clone(),
            sets: best.sets.clone(),
        }
    }
}

pub(super) fn run(
    args: &PlanArgs,
    model: &Path,
    machine: &LocalMachine,
) -> Result<(), CommandError> {
    let own = args.on_box.on.as_deref().map(|named| find_box(named, Path::new("")));
    let own: Option<PathBuf> = own.transpose().fail_with(code::CONFIG)?;
    let bundled = BOXES.iter().map(|(name, _)| PathBuf::from(name));
    let mut all: Vec<PathBuf> = bundled.collect();
    let is_own = |named: &Path| own.as_deref() == Some(named);
    if let Some(own) = own.as_ref().filter(|own| !all.contains(own)) {
        all.push(own.clone());
    }
    let mut boxes = Vec::new();
    for (number, named) in all.iter().enumerate() {
        say(&format!("planning on {} ({} of {})", named.shown(), number + 1, all.len()));
        let answer = match planned(args, model, named, machine) {
            // The user's own box, and a model that cannot be read on any box.
            Err(error) if is_own(named) || number == 0 && refuses_all(args, model, &all) => {
                return Err(error);
            }
            Err(error) => refused(named, &error)?,
            Ok(answer) => answer,
        };
        boxes.push(answer);
    }
    let speed = |one: &RankedBox| one.best.as_ref().map_or(0.0, |best| best.tokens_per_second);
    boxes.sort_by(|a, b| speed(b).total_cmp(&speed(a)));
    let fits = boxes.iter().any(|one| one.fits);
    let ranking = RankedBoxes { simulated: true, tokens: args.tokens, boxes };
    match args.json {
        true => print_json(&ranking)?,
        false => print(&text(model, &ranking))?,
    }
    fit_result(fits)
}

/// Settings that put the model on the box `named`. A GPU without bf16 gets fp16, unless the user names a
/// precision.
fn settings(args: &PlanArgs, named: &Path) -> Result<Vec<String>, CommandError> {
    let described = load_box(named).fail_with(code::CONFIG)?;
    let given = args.sets.iter().any(|set| key(set) == "precision");
    let halves = (described.gpu.sm < 80 && described.measured.is_none() && !given)
        .then(|| "precision=Fp16".to_owned());
    let on = format!("{BOX}{}", text_for_config(named)?);
    Ok(args.sets.iter().cloned().chain(halves).chain([on]).collect())
}

/// Whether the model cannot be loaded on any of these boxes.
fn refuses_all(args: &PlanArgs, model: &Path, all: &[PathBuf]) -> bool {
    let loads = |named: &PathBuf| {
        settings(args, named).is_ok_and(|sets| load_with(model, &args.sets, &sets).is_ok())
    };
    !all.iter().any(loads)
}

/// The row of a box on which the model cannot be loaded, such as fp8 on a GPU without it.
fn refused(named: &Path, error: &CommandError) -> Result<RankedBox, CommandError> {
    let why = error.message.lines().next().unwrap_or_default();
    let lacks = vec![why.trim_start_matches("error: ").to_owned()];
    row(named, None, None, lacks)
}

/// The row of a box. `found` has the search of its layouts, and `tokens` the number of tokens of the training.
fn row(
    named: &Path,
    found: Option<&SearchReport>,
    tokens: Option<u64>,
    lacks: Vec<String>,
) -> Result<RankedBox, CommandError> {
    let described = load_box(named).fail_with(code::CONFIG)?;
    let price = f64::from(described.usd_per_hour);
    let usd_per_hour = (price > 0.0).then_some(price);
    let best = found.and_then(|found| {
        let best = found.layouts.first()?;
        Some(BestLayout::new(best, found.states, tokens, usd_per_hour))
    });
    Ok(RankedBox {
        name: named.display().to_string(),
        title: described.name.clone(),
        gpus: described.gpus,
        usd_per_hour,
        fits: best.is_some(),
        best,
        lacks,
    })
}

/// Searches the layouts of the model on the box `named`.
fn planned(
    args: &PlanArgs,
    model: &Path,
    named: &Path,
    machine: &LocalMachine,
) -> Result<RankedBox, CommandError> {
    let loaded = load_with(model, &args.sets, &settings(args, named)?)?;
    let gpus = Some(predict::simulate::described(&loaded.config)?.gpus);
    let found = search_layouts(&loaded, machine, gpus, &TerminalProgress)?;
    let lacks = match (found.layouts.is_empty(), &found.no_layout) {
        (false, _) => Vec::new(),
        (true, Some(why)) => vec![why.clone()],
        (true, None) => lines_of(&loaded.config, &shortages(&loaded, machine, gpus), false),
    };
    row(named, Some(&found), args.tokens, lacks)
}

fn text(model: &Path, ranking: &RankedBoxes) -> String {
    let mut out = format!(
        "{} on {}, each with its fastest layout on all GPUs: simulated, not measured\n",
        model.shown(),
        match ranking.boxes.len() {
            1 => "one box".to_owned(),
            boxes => format!("{boxes} boxes"),
        },
    );
    let (fitting, others): (Vec<&RankedBox>, Vec<&RankedBox>) =
        ranking.boxes.iter().partition(|one| one.fits);
    for (number, (one, best)) in
        fitting.iter().filter_map(|one| Some((one, one.best.as_ref()?))).enumerate()
    {
        let _ = writeln!(out, "\n{}", entry(number + 1, one, best, ranking.tokens));
    }
    if !others.is_empty() {
        out += "\ndoes not fit, or does not run:\n";
    }
    for one in others {
        let _ = writeln!(out, "  {}: {}", foreign(&one.name), one.lacks.join("; "));
    }
    out += "\n";
    out + &costs(&fitting)
        + "a range says what a run of onebox may reach, by the class of the box (docs/simulator.md); `--json` has the reason of \
           each\n"
}

fn entry(number: usize, one: &RankedBox, best: &BestLayout, tokens: Option<u64>) -> String {
    let speed =
        with_range(best.tokens_per_second, best.tokens_per_second_low, best.tokens_per_second_high);
    let time = match best.seconds.zip(tokens) {
        Some((seconds, tokens)) => format!("; {tokens} tokens in {}", seconds.words(duration)),
        None => format!("; a step in {}", seconds(best.step_seconds)),
    };
    let cost = best.usd.map_or(String::new(), |usd| format!("; {}", usd.words(dollars)));
    let (name, title, gpus) = (&one.name, &one.title, counted(one.gpus, "GPU"));
    format!(
        "{number}. {} ({}, {gpus}): {speed}{time}{cost}\n   {}",
        foreign(name),
        foreign(title),
        best.layout
    )
}

/// Line with the order by cost, or about missing prices.
fn costs(fitting: &[&RankedBox]) -> String {
    let priced = fitting.iter().filter_map(|one| {
        let usd = one.best.as_ref()?.usd?;
        Some((usd, one))
    });
    let mut priced: Vec<(Estimate, &&RankedBox)> = priced.collect();
    if priced.is_empty() {
        return "no box that fits has a price and a number of tokens: add `usd_per_hour` to a box, with date and source in a comment, \
                and rank it with --box FILE --tokens N\n"
            .into();
    }
    priced.sort_by(|a, b| a.0.expected.total_cmp(&b.0.expected));
    let words =
        priced.iter().map(|(usd, one)| format!("{} {}", foreign(&one.name), usd.words(dollars)));
    format!("by cost: {}\n", words.collect::<Vec<_>>().join(", "))
}

fn dollars(usd: f64) -> String {
    match usd {
        usd if usd >= 100.0 => format!("{usd:.0} USD"),
        usd => format!("{usd:.2} USD"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cost_is_the_time_at_the_price_and_its_range_that_of_the_time() {
        let hours = Estimate { expected: 10.0, low: 8.0, high: 20.0 };
        let usd = hours.map(|hours| 2.5 * hours);
        assert_eq!(usd, Estimate { expected: 25.0, low: 20.0, high: 50.0 });
        assert_eq!(usd.words(dollars), "25.00 USD (20.00 USD to 50.00 USD)");
        assert_eq!(dollars(1234.4), "1234 USD");
    }
}
