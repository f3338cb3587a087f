//! `onebox checkpoint diff`: compares two checkpoints.

use super::super::{CommandError, code, print_as, resume::listed};
use super::open;
use crate::report::stage::Stage;
use checkpoint::inspect::{Distance, STATE_NAMES, distances};
use checkpoint::{Checkpoint, Difference, differences_of};
use config::{LoadedConfig, ResumeEffect};
use files::path_text::ShownPath;
use serde_json::{Value, json};
use std::fmt::Write;
use std::path::Path;

/// Words about keys without which a checkpoint has other tensors.
const OTHER_TENSORS: &str = "other trained tensors: --resume and --fork refuse it";

pub(super) fn run([a, b]: [&Path; 2], as_json: bool) -> Result<(), CommandError> {
    let (a, b) = (open(a)?, open(b)?);
    let configs = a.summary().differences_from(b.summary())?;
    let mut all = Vec::new();
    let stage = Stage::begin("comparing checkpoints", 0);
    distances(&a, &b, &mut |distance| all.push(distance))?;
    drop(stage);
    print_as(as_json, &in_json(&a, &b, &configs, &all), || in_words(&a, &b, &configs, &all))?;
    match is_equal(&all) {
        true => Ok(()),
        false => Err(CommandError::silent(code::DIFFERS)),
    }
}

/// Refuses a change to anything but the layout.
pub(super) fn only_layout(stored: &LoadedConfig, now: &LoadedConfig) -> Result<(), CommandError> {
    let all = differences_of(stored, now);
    let other: Vec<_> = all.iter().filter(|d| d.effect == ResumeEffect::Experiment).collect();
    if other.is_empty() {
        return Ok(());
    }
    let lines = listed(other);
    let why = format!("that is more than another layout; leave out what changes{lines}");
    Err(CommandError::new(code::CONFIG, why))
}

fn is_equal(all: &[Distance]) -> bool {
    all.iter().all(|d| d.states == Ok([None; 4]))
}

fn in_words(a: &Checkpoint, b: &Checkpoint, configs: &[Difference], all: &[Distance]) -> String {
    let mut text = format!("a  {}, step {}\n", a.path().shown(), a.step());
    let _ = writeln!(text, "b  {}, step {}\n", b.path().shown(), b.step());
    if configs.is_empty() {
        text += "the configs are the same\n";
    }
    for kind in [
        ResumeEffect::Harmless,
        ResumeEffect::Placement,
        ResumeEffect::Layout,
        ResumeEffect::Experiment,
    ] {
        let of_kind = configs.iter().filter(|d| d.effect == kind);
        let (tensors, others): (Vec<_>, Vec<_>) = of_kind.partition(|d| d.changes_tensors());
        for (words, some) in [(kind.words(), others), (OTHER_TENSORS, tensors)] {
            if !some.is_empty() {
                let _ = writeln!(text, "{words}:{}", listed(some));
            }
        }
    }
    if is_equal(all) {
        let _ = writeln!(text, "\nall {} tensors are bit-equal in all three states", all.len());
        return text;
    }
    let widest = all.iter().map(|d| d.name.len()).max().unwrap_or(0).max("TENSOR".len());
    let [master, momentum, variance, gradient] = STATE_NAMES;
    let _ = writeln!(text, "\n{:widest$}  {master:>10}  {momentum:>10}  {variance:>10}", "TENSOR");
    let cell =
        |difference: Option<f64>| difference.map_or_else(|| "=".into(), |d| format!("{d:.2e}"));
    for Distance { name, states } in all {
        let _ = match states {
            Err(why) => writeln!(text, "{name:widest$}  {why}"),
            Ok(states) => {
                let waits = states[3].map_or_else(String::new, |d| format!("  {gradient} {d:.2e}"));
                let [x, y, z, _] = states.map(cell);
                writeln!(text, "{name:widest$}  {x:>10}  {y:>10}  {z:>10}{waits}")
            }
        };
    }
    text + "\n=: bit-equal; else the largest absolute difference\n"
}

fn in_json(a: &Checkpoint, b: &Checkpoint, configs: &[Difference], all: &[Distance]) -> Value {
    let side = |c: &Checkpoint| json!({ "path": c.path(), "step": c.step() });
    let config = |d: &Difference| json!({ "key": d.key, "a": d.values[0], "b": d.values[1], "kind": d.effect });
    let tensor = |d: &Distance| match &d.states {
        Err(why) => json!({ "name": d.name, "problem": why }),
        // A number that is not finite is null, as in metrics.
        Ok(states) => {
            let state = |difference: &Option<f64>| match difference {
                None => json!({ "equal": true, "max_abs": 0.0 }),
                Some(d) => json!({ "equal": false, "max_abs": d }),
            };
            let of = |i: usize| state(&states[i]);
            let [x, y, z, waits] = STATE_NAMES;
            let mut all = json!({ "name": d.name, x: of(0), y: of(1), z: of(2) });
            if states[3].is_some() {
                all[waits] = of(3);
            }
            all
        }
    };
    json!({
        "a": side(a), "b": side(b), "equal": is_equal(all),
        "config": configs.iter().map(config).collect::<Vec<_>>(),
        "tensors": all.iter().map(tensor).collect::<Vec<_>>(),
    })
}
