//! `onebox plan --model`: whether a model of transformers can be trained on a box, how, and how fast.

use super::super::exit::{Failed, code};
use super::super::largest::at_most;
use super::super::simulate::{failed, seconds};
use super::super::{ConfigArgs, print, print_json, search};
use super::PlanArgs;
use crate::config::{Config, ConfigError, Family, Loaded, Origin, load_text_to_search};
use crate::predict::changes::arguments;
use crate::predict::plan::memory_report;
use crate::predict::remedies::{largest, remedies};
use crate::predict::search::{Found, Layout, search as search_layouts};
use crate::predict::simulate::described;
use crate::report::progress::si;
use crate::train::build::build;
use serde::Serialize;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use topology::{counted, format_bytes};

/// Most tokens of a sample where nothing else is said.
const SEQ_LEN: usize = 4096;
/// Tokens of a step where nothing else is said.
const STEP: usize = 1 << 18;

/// States of 14 bytes a parameter on the host, gradients and staging included, where those of fp32 take 20: exact masters,
/// moments that are rounded by chance.
const SMALLER: [&str; 2] = ["offload.master=Split", "offload.moments=Bf16"];

/// Times the speed from which on other states are named.
const WORTH: f64 = 1.05;

/// The answer as JSON.
#[derive(Serialize)]
struct Answer<'a> {
    parameters: u64,
    seq_len: usize,
    tokens_per_step: usize,
    fits: bool,
    /// Seconds for the tokens that were asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    seconds: Option<f64>,
    /// `key=value` of the best layout, for a config that names the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    sets: Option<Vec<String>>,
    /// A faster layout of smaller states, where those of fp32 fit with parameters on the host alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    smaller_states: Option<Faster>,
    search: &'a Found,
}

/// A faster layout of other states.
#[derive(Serialize)]
struct Faster {
    tokens_per_second: f64,
    /// `key=value`, for a config that names the model.
    sets: Vec<String>,
}

pub(super) fn run(args: &PlanArgs, model: &Path) -> Result<(), Failed> {
    if args.search && !args.json {
        // Layouts are told by their differences from a config of the model, which recomputes nothing.
        let plain: &[&str] = if is_given(args, "recompute") { &[] } else { &["recompute=None"] };
        let loaded = load(args, model, plain)?;
        return search::run(&loaded, Some(gpus(args, &loaded)?), false);
    }
    let mut loaded = load(args, model, &[])?;
    // The config is not the user's own: its single rank is no layout that was asked for.
    let gpus = Some(gpus(args, &loaded)?);
    let mut found = search_layouts(&loaded, gpus).map_err(failed)?;
    let mut changed: &[&str] = &[];
    if found.layouts.is_empty() && found.no_layout.is_none() {
        // Fewer bytes for each parameter on the host, before it is said that nothing fits.
        if let (false, Ok(smaller)) = (gives_states(args), load(args, model, &SMALLER)) {
            let again = search_layouts(&smaller, gpus).map_err(failed)?;
            (loaded, found, changed) = (smaller, again, &SMALLER);
        }
    }
    let config = &loaded.config;
    let parameters = build(config).gpt.shape().parameters();
    let best = found.layouts.first();
    let complete = |chosen: &[String]| settings(config, &args.sets, changed, chosen);
    let smaller_states = match best {
        Some(best) if changed.is_empty() && has_smaller_states_to_try(args, best) => {
            faster(args, model, (gpus, best.tokens_per_second))?
        }
        _ => None,
    };
    if args.json {
        print_json(&Answer {
            parameters,
            seq_len: config.model.seq_len,
            tokens_per_step: config.batch.global * config.model.seq_len,
            fits: best.is_some(),
            seconds: args.tokens.zip(best).map(|(n, best)| n as f64 / best.tokens_per_second),
            sets: best.map(|best| complete(&best.sets)),
            smaller_states,
            search: &found,
        })?;
    } else {
        let mut out = introduction(&loaded, &found, parameters);
        match best {
            Some(best) => {
                let smaller = !changed.is_empty();
                fits(&mut out, (best, smaller), args.tokens, &complete(&best.sets));
                if let Some(Faster { tokens_per_second, sets }) = &smaller_states {
                    let (rate, with) = (si(*tokens_per_second), arguments(sets));
                    let _ = writeln!(out, "  faster with smaller states, {rate}tok/s: {with}");
                }
            }
            None => match &found.no_layout {
                Some(why) => _ = writeln!(out, "\nno: {why}"),
                None => does_not_fit(&mut out, (&loaded, gpus), changed, &complete),
            },
        }
        print(&out)?;
    }
    if best.is_some() { Ok(()) } else { Err(Failed::silent(code::DOES_NOT_FIT)) }
}

/// Whether the user gives the key `name` a value.
fn is_given(args: &PlanArgs, name: &str) -> bool {
    args.sets.iter().any(|set| key(set) == name)
}

/// Whether the user says how states are kept.
fn gives_states(args: &PlanArgs) -> bool {
    SMALLER.iter().any(|one| is_given(args, key(one)))
}

/// Whether parameters are on the host for states of fp32.
fn has_smaller_states_to_try(args: &PlanArgs, best: &Layout) -> bool {
    best.sets.iter().any(|set| set == "offload.parameters=Host") && !gives_states(args)
}

/// The fastest layout with smaller states, if it has more than 1.05 times the `rate`, tokens a second.
fn faster(
    args: &PlanArgs,
    model: &Path,
    (gpus, rate): (Option<usize>, f64),
) -> Result<Option<Faster>, Failed> {
    let Ok(loaded) = load(args, model, &SMALLER) else { return Ok(None) };
    let found = search_layouts(&loaded, gpus).map_err(failed)?;
    let best = found.layouts.first().filter(|best| best.tokens_per_second > WORTH * rate);
    Ok(best.map(|best| Faster {
        tokens_per_second: best.tokens_per_second,
        sets: settings(&loaded.config, &args.sets, &SMALLER, &best.sets),
    }))
}

/// The GPUs to use: as many as the arguments say, or all of the box.
fn gpus(args: &PlanArgs, loaded: &Loaded) -> Result<usize, Failed> {
    let box_ = described(&loaded.config).map_err(failed)?;
    Ok(args.gpus.map_or(box_.gpus, usize::from))
}

/// The model on the box, with a batch and a sample that people fine-tune with; `--set` changes both.
fn load(args: &PlanArgs, model: &Path, more: &[&str]) -> Result<Loaded, Failed> {
    let absolute = model.canonicalize().map_err(|e| {
        let help = "nothing is downloaded: name a folder on this machine, or its config.json";
        Failed::new(code::CONFIG, format!("cannot read {}: {e}; {help}", model.display()))
    })?;
    let name = match absolute.is_dir() {
        true => absolute.file_name(),
        false => absolute.parent().and_then(Path::file_name),
    };
    let name: String = name.map_or("model".into(), |name| name.to_string_lossy().into_owned());
    let text = |seq_len: Option<usize>, global: usize| {
        let seq_len = seq_len.map_or(String::new(), |n| format!(", seq_len: {n}"));
        format!(
            "(name: {name:?}, model: (from: {:?}, weights: Random{seq_len}), recompute: Block,
              batch: (global: {global}), train: (steps: 1000))",
            absolute.display().to_string()
        )
    };
    let config = |e: ConfigError| Failed::new(code::CONFIG, e.without_text(&name));
    let more = more.iter().map(ToString::to_string);
    let sets = args.sets.iter().cloned().chain(more).collect();
    let ConfigArgs { sets, .. } = args.on_box.with(&ConfigArgs { config: PathBuf::new(), sets })?;
    let load = |text: &str| load_text_to_search(text, &name, Path::new(""), &sets);
    // Twice: what the folder and `--set` say decides the batch.
    let first = load(&text(None, 64)).map_err(config)?;
    let said = |(key, _, origin): &(String, String, Origin)| {
        key == "model.seq_len" && *origin == Origin::Set
    };
    let (said, most) = (first.origins.iter().any(said), first.config.model.seq_len);
    let seq_len = if said { most } else { most.min(SEQ_LEN) };
    let global = (STEP / seq_len).max(1).next_power_of_two();
    load(&text((!said).then_some(seq_len), global)).map_err(config)
}

fn introduction(loaded: &Loaded, found: &Found, parameters: u64) -> String {
    let config = &loaded.config;
    let m = &config.model;
    let kind = match m.family {
        Family::Gpt2 => "GPT-2",
        Family::Llama => "Llama family",
    };
    format!(
        "{}: {kind}, {} parameters; {} of {} tokens a step, {:?}\non {}: {}, {fit} of {} fit (simulated, not measured)\n",
        found.name,
        super::count(parameters as f64),
        counted(config.batch.global, "sample"),
        m.seq_len,
        config.precision,
        found.box_name,
        counted(found.gpus, "GPU"),
        counted(found.enumerated, "layout"),
        fit = found.fit,
    )
}

/// The key of `key=value`.
fn key(set: &str) -> &str {
    set.split_once('=').map_or(set, |(key, _)| key).trim()
}

/// The `--set` arguments that give a layout of `chosen` settings to a config that only names the model: length of samples, batch,
/// arguments of the user, smaller states, and the chosen settings.
fn settings(config: &Config, given: &[String], smaller: &[&str], chosen: &[String]) -> Vec<String> {
    let (batch, model) = (config.batch.global, config.model.seq_len);
    let mut sets = vec![format!("model.seq_len={model}"), format!("batch.global={batch}")];
    let smaller = smaller.iter().map(ToString::to_string);
    let base = [format!("recompute={:?}", config.recompute)];
    for set in chosen.iter().cloned().chain(given.iter().cloned()).chain(smaller).chain(base) {
        if !sets.iter().any(|other| key(other) == key(&set)) {
            sets.push(set);
        }
    }
    sets.retain(|set| *set != "recompute=None");
    sets
}

fn fits(out: &mut String, (best, smaller): (&Layout, bool), tokens: Option<u64>, sets: &[String]) {
    let Layout { tensor, data, micro, micro_batches, words, .. } = best;
    let _ = writeln!(
        out,
        "\nyes{}: TP {tensor} x DP {data}, micro {micro} x {micro_batches}, {words}\n  {}tok/s, a step in {}; {:.1} TFLOPS of the \
         model per GPU\n  {} on each GPU, {} on the fullest node",
        if smaller { ", with smaller states only" } else { "" },
        si(best.tokens_per_second),
        seconds(best.step_seconds),
        best.model_tflops_per_gpu,
        format_bytes(best.gpu_bytes),
        format_bytes(best.fullest_node()),
    );
    let waits = best.waits.iter().max_by(|a, b| a.1.total_cmp(&b.1));
    if let Some((what, waited)) = waits.filter(|(_, waited)| *waited > 0.01 * best.step_seconds) {
        let share = 100.0 * waited / best.step_seconds;
        let _ = writeln!(out, "  what binds: {what}, {share:.0} % of the step");
    }
    if let Some(tokens) = tokens {
        let days = tokens as f64 / best.tokens_per_second / 86_400.0;
        let time = if days >= 1.0 {
            format!("{days:.1} days")
        } else {
            format!("{:.1} hours", 24.0 * days)
        };
        let _ = writeln!(out, "  {tokens} tokens in {time}");
    }
    let _ = writeln!(out, "  with a config of this model: {}", arguments(sets));
}

fn does_not_fit(
    out: &mut String,
    (loaded, gpus): (&Loaded, Option<usize>),
    changed: &[&str],
    complete: &dyn Fn(&[String]) -> Vec<String>,
) {
    let config = &loaded.config;
    let smaller = if changed.is_empty() { "" } else { ", with smaller states neither" };
    let binding = memory_report(config, &build(config)).binding.words;
    let _ = writeln!(out, "\nno{smaller}: {binding}");
    let remedies = remedies(loaded, gpus);
    for remedy in &remedies {
        let _ = writeln!(out, "  it would fit with {}", arguments(&complete(&remedy.sets)));
    }
    if remedies.is_empty() {
        let largest = largest(loaded, gpus);
        let _ = writeln!(out, "  {}", at_most(loaded, largest.as_ref(), changed));
    }
}
