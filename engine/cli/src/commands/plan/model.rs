//! `onebox plan --model`: shows whether a box can train a model of transformers, how, and how fast.

use super::super::largest::of_states;
use super::super::search::FitFailure;
use super::super::simulate::{seconds, with_range};
use super::super::{
    CommandError, ConfigArgs, code, fit_result, print, print_json, quoted_path, say, search,
    set_arguments, text_for_config,
};
use super::PlanArgs;
use super::config_file::{ConfigFile, length, may_create};
use crate::report::reading::TerminalProgress;
use config::{Config, ConfigError, Family, Further, LoadedConfig, Origin, load_str_and_look};
use files::hub::{self, HubModel, MissingSnapshot};
use files::names::is_there;
use files::path_text::ShownPath;
use layout::LocalMachine;
use predict::States;
use predict::changes::arguments;
use predict::search::{Layout, SearchReport, search as search_layouts, search_bf16_moments};
use predict::simulate::described;
use serde::Serialize;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use topology::counted;

/// Default for the maximum number of tokens of a sample.
const SEQ_LEN: usize = 4096;
/// Default number of tokens of a step.
const STEP: usize = 1 << 18;

/// Minimum speedup for a suggestion of bf16 Adam moments.
const WORTH: f64 = 1.05;

/// Document that `--json` prints.
#[derive(Serialize)]
struct Answer<'a> {
    parameters: u64,
    seq_len: usize,
    tokens_per_step: usize,
    fits: bool,
    /// Seconds for the requested number of tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    seconds: Option<f64>,
    /// Settings `key=value` of the best layout, for a config that names the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    sets: Option<Vec<String>>,
    /// A faster layout with bf16 moments, if fp32 moments need host parameters or split parameters.
    #[serde(skip_serializing_if = "Option::is_none")]
    bf16_moments: Option<Alternative>,
    /// A layout with adapters, if no layout trains all parameters.
    #[serde(skip_serializing_if = "Option::is_none")]
    adapter: Option<Alternative>,
    #[serde(flatten)]
    no: Option<FitFailure>,
    search: &'a SearchReport,
}

/// A layout with other results.
#[derive(Serialize)]
struct Alternative {
    tokens_per_second: f64,
    tokens_per_second_low: f64,
    tokens_per_second_high: f64,
    /// Settings `key=value`, for a config that names the model.
    sets: Vec<String>,
}

impl Alternative {
    fn of(layout: &Layout, sets: Vec<String>) -> Self {
        Self {
            tokens_per_second: layout.tokens_per_second,
            tokens_per_second_low: layout.tokens_per_second_low,
            tokens_per_second_high: layout.tokens_per_second_high,
            sets,
        }
    }

    /// The layout with its rate, after `words` about it.
    fn line(&self, words: &str) -> String {
        let [rate, low, high] =
            [self.tokens_per_second, self.tokens_per_second_low, self.tokens_per_second_high];
        format!("{words}, {}: {}", with_range(rate, low, high), arguments(&self.sets))
    }
}

/// The adapters that `plan --model` proposes if no layout trains all parameters.
const ADAPTER: &str = "adapter=Lora(rank: 16, alpha: 32)";

pub(super) fn run(
    args: &PlanArgs,
    model: &Path,
    machine: &LocalMachine,
) -> Result<(), CommandError> {
    if args.search && !args.json {
        // Layouts are listed as differences from a config of the model, which recomputes nothing.
        let is_given = args.sets.iter().any(|set| key(set) == "recompute");
        let plain: &[&str] = if is_given { &[] } else { &["recompute=None"] };
        let loaded = load(args, model, plain)?;
        return search::run(&loaded, machine, Some(gpus(args, &loaded)?), false);
    }
    args.write.as_deref().map_or(Ok(()), may_create)?;
    args.data.as_deref().map_or(Ok(""), text_for_config)?;
    let loaded = load(args, model, &[])?;
    // The config is not the user's own, so its single rank is not a requested layout.
    let gpus = Some(gpus(args, &loaded)?);
    let found = search_layouts(&loaded, machine, gpus, &TerminalProgress)?;
    let config = &loaded.config;
    let best = found.layouts.first();
    let complete = |chosen: &[String]| settings(config, &args.sets, chosen);
    let bf16_moments = match best {
        Some(best) if is_slowed(best, found.states) => {
            faster(&loaded, machine, gpus, best.tokens_per_second)?
        }
        _ => None,
    };
    let bf16_moments = bf16_moments.map(|layout| Alternative::of(&layout, complete(&layout.sets)));
    let adapter = match best {
        None => with_adapter(args, model, machine)?,
        Some(_) => None,
    };
    let mut no = FitFailure::of(&loaded, machine, &found, gpus);
    no.iter_mut().flat_map(FitFailure::sets).for_each(|sets| *sets = complete(sets));
    if args.json {
        print_json(&Answer {
            parameters: found.parameters,
            seq_len: config.model.seq_len,
            tokens_per_step: config.batch.global * config.model.seq_len,
            fits: best.is_some(),
            seconds: args.tokens.zip(best).map(|(n, best)| n as f64 / best.tokens_per_second),
            sets: best.map(|best| complete(&best.sets)),
            bf16_moments,
            adapter,
            no,
            search: &found,
        })?;
    } else {
        let mut out = introduction(&loaded, &found);
        if let Some(best) = best {
            fits(&mut out, best, &found, args.tokens, &complete(&best.sets));
            if let Some(faster) = &bf16_moments {
                let words = "faster with bf16 Adam moments, which change results";
                let _ = writeln!(out, "  {}", faster.line(words));
            }
        }
        if let Some(why) = &found.no_layout {
            let _ = writeln!(out, "\nno: {why}");
        }
        if let Some(no) = &no {
            let _ = writeln!(out, "\nno: {}", no.lines(config).join("\n  "));
        }
        if let Some(adapter) = &adapter {
            let words = "but an adapter (LoRA) fits, over frozen weights";
            let _ = writeln!(out, "\n{}", adapter.line(words));
        }
        if best.is_some() && args.write.is_none() {
            let _ = writeln!(out, "\nnext, try:\n  {}", again(args, model));
        }
        print(&out)?;
    }
    match (&args.write, best) {
        (None, _) => {}
        (Some(path), None) => say(&format!("{}: not written, since nothing fits", path.shown())),
        (Some(path), Some(best)) => {
            let folder = folder_of(&located(model)?);
            let is_name = !is_there(model) && model.to_str().and_then(HubModel::parse).is_some();
            let file = ConfigFile {
                path,
                model: if is_name { model.to_owned() } else { folder.clone() },
                folder,
                data: args.data.as_deref(),
                planned: config,
                box_name: &found.box_name,
                layout: best,
                sets: &complete(&best.sets),
            };
            file.write()?;
        }
    }
    fit_result(best.is_some())
}

/// This command, with the option that writes a config.
fn again(args: &PlanArgs, model: &Path) -> String {
    let on = args.on_box.on.iter().map(|on| format!(" --box {}", quoted_path(on)));
    let gpus = args.gpus.iter().map(|gpus| format!(" --gpus {gpus}"));
    let more: String = on.chain(gpus).collect();
    let sets = set_arguments(&args.sets);
    format!("onebox plan --model {}{more}{sets} --write my.ron", quoted_path(model))
}

/// Folder of a model that is named by its folder or by its config.json.
fn folder_of(located: &Path) -> PathBuf {
    match located.is_dir() {
        true => located.to_owned(),
        false => located.parent().unwrap_or(located).to_owned(),
    }
}

/// Whether host memory decides the layout, so that smaller states may make it faster.
fn is_slowed(best: &Layout, states: States) -> bool {
    let streams = best.sets.iter().any(|set| set == "offload.parameters=Host");
    states == States::SplitMaster || (states == States::Given && streams)
}

/// Fastest layout with bf16 Adam moments, if it exceeds 1.05 times `rate` tokens per second.
fn faster(
    loaded: &LoadedConfig,
    machine: &LocalMachine,
    gpus: Option<usize>,
    rate: f64,
) -> Result<Option<Layout>, CommandError> {
    let found = search_bf16_moments(loaded, machine, gpus, &TerminalProgress)?;
    let best = found.and_then(|found| found.layouts.into_iter().next());
    Ok(best.filter(|best| best.tokens_per_second > WORTH * rate))
}

/// Fastest layout that trains adapters. `None` if no layout does, if the arguments ask for adapters
/// already, or if the model has no place for these adapters.
fn with_adapter(
    args: &PlanArgs,
    model: &Path,
    machine: &LocalMachine,
) -> Result<Option<Alternative>, CommandError> {
    if args.sets.iter().any(|set| key(set).starts_with("adapter")) {
        return Ok(None);
    }
    let Ok(loaded) = load(args, model, &[ADAPTER]) else { return Ok(None) };
    let found = search_layouts(&loaded, machine, Some(gpus(args, &loaded)?), &TerminalProgress)?;
    let sets = |layout: &Layout| {
        let chosen = [&layout.sets[..], &[ADAPTER.to_owned()]].concat();
        settings(&loaded.config, &args.sets, &chosen)
    };
    Ok(found.layouts.first().map(|layout| Alternative::of(layout, sets(layout))))
}

/// Number of GPUs to use: the number in the arguments, or all GPUs of the box.
fn gpus(args: &PlanArgs, loaded: &LoadedConfig) -> Result<usize, CommandError> {
    let box_ = described(&loaded.config)?;
    Ok(args.gpus.map_or(box_.gpus, usize::from))
}

/// Absolute path of a folder, of its config.json, or of the files of a model in the cache of the
/// Hugging Face hub.
fn located(model: &Path) -> Result<PathBuf, CommandError> {
    let named = if is_there(model) { None } else { model.to_str().and_then(HubModel::parse) };
    let missing =
        |why: MissingSnapshot| CommandError::new(code::CONFIG, format!("{why}; {}", why.help()));
    if let Some(named) = named {
        return named.snapshot(hub::cache_folder().as_deref()).map_err(missing);
    }
    let absolute = model.canonicalize().map_err(|e| {
        let help = "nothing is downloaded: name a folder on this machine, or its config.json";
        CommandError::new(code::CONFIG, format!("cannot read {}: {e}; {help}", model.shown()))
    })?;
    Ok(hub::newest_snapshot(&absolute).map_err(missing)?.unwrap_or(absolute))
}

/// Loads a config of the model on the box, with a usual batch and sample length for fine-tuning.
fn load(args: &PlanArgs, model: &Path, more: &[&str]) -> Result<LoadedConfig, CommandError> {
    if args.on_box.on.is_none() {
        let help = "--model needs a box to plan for: --box NAME (`onebox boxes` lists them)";
        return Err(CommandError::new(2, help));
    }
    let sets = args.sets.iter().cloned().chain(more.iter().map(ToString::to_string)).collect();
    let given = ConfigArgs { config: PathBuf::new(), sets };
    load_with(model, &args.sets, &args.on_box.with(&given)?.sets)
}

/// [`load`] with all settings `sets`; one of these settings names the box. `given` has the user's settings.
pub(super) fn load_with(
    model: &Path,
    given: &[String],
    sets: &[String],
) -> Result<LoadedConfig, CommandError> {
    let absolute = located(model)?;
    let folder = if absolute.is_dir() { Some(&*absolute) } else { absolute.parent() };
    let name = folder.and_then(|folder| match hub::name_of_snapshot(folder) {
        Some(name) => Path::new(&name).file_name().map(ToOwned::to_owned),
        None => folder.file_name().map(ToOwned::to_owned),
    });
    let name: String = name.map_or("model".into(), |name| name.to_string_lossy().into_owned());
    let (from, length) = (text_for_config(&absolute)?, length(given, 1000));
    let text = |seq_len: Option<usize>, global: usize| {
        let seq_len = seq_len.map_or(String::new(), |n| format!(", seq_len: {n}"));
        format!(
            "(name: {name:?}, model: (from: {from:?}, weights: Random{seq_len}), recompute: Block,
              batch: (global: {global}), {length})"
        )
    };
    let config = |e: ConfigError| CommandError::new(code::CONFIG, e.without_text(&name));
    let further = Further { searched: true, ..Further::NONE };
    let load = |text: &str| load_str_and_look(text, &name, Path::new(""), sets, &further);
    // The config is loaded twice, since the folder and `--set` decide the batch.
    let first = load(&text(None, 64)).map_err(config)?;
    let is_given = |(key, _, origin): &(String, String, Origin)| {
        key == "model.seq_len" && *origin == Origin::Set
    };
    let (is_given, most) = (first.origins.iter().any(is_given), first.config.model.seq_len);
    let seq_len = if is_given { most } else { most.min(SEQ_LEN) };
    let global = (STEP / seq_len).max(1).next_power_of_two();
    load(&text((!is_given).then_some(seq_len), global)).map_err(config)
}

fn introduction(loaded: &LoadedConfig, found: &SearchReport) -> String {
    let config = &loaded.config;
    let m = &config.model;
    let kind = match m.family {
        Family::Gpt2 => "GPT-2",
        Family::Llama => "Llama family",
    };
    format!(
        "{}: {kind}, {} parameters; {} of {} tokens a step, {:?}\non {}: {}, {fit} of {} fit (simulated, not measured)\n",
        found.name,
        super::count(found.parameters as f64),
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
pub(super) fn key(set: &str) -> &str {
    set.split_once('=').map_or(set, |(key, _)| key).trim()
}

/// Settings that give the layout `chosen` to a config that only names the model: sample length,
/// batch, the user's arguments, and the chosen settings.
fn settings(config: &Config, given: &[String], chosen: &[String]) -> Vec<String> {
    let (batch, model) = (config.batch.global, config.model.seq_len);
    let mut sets = vec![format!("model.seq_len={model}"), format!("batch.global={batch}")];
    let base = [format!("recompute={:?}", config.recompute)];
    for set in chosen.iter().cloned().chain(given.iter().cloned()).chain(base) {
        if !sets.iter().any(|other| key(other) == key(&set)) {
            sets.push(set);
        }
    }
    sets.retain(|set| *set != "recompute=None");
    sets
}

fn fits(
    out: &mut String,
    best: &Layout,
    found: &SearchReport,
    tokens: Option<u64>,
    sets: &[String],
) {
    let Layout { tensor, data, micro, micro_batches, words, .. } = best;
    let _ = writeln!(
        out,
        "\nyes{}: TP {tensor} x DP {data}, micro {micro} x {micro_batches}, {words}\n  {}, a step in {}; {:.1} TFLOPS of the \
         model per GPU\n  {}",
        match found.states {
            States::Given => "",
            States::SplitMaster => ", with split fp32 parameters",
            States::Bf16Moments => ", but only with bf16 Adam moments",
        },
        search::rate(best),
        seconds(best.step_seconds),
        best.model_tflops_per_gpu,
        search::memories(best),
    );
    for warning in best.nearly_full.iter().chain(&best.assumed) {
        let _ = writeln!(out, "  warning: {warning}");
    }
    if let Some(words) = of_states(found.states, &found.config) {
        let _ = writeln!(out, "  {words}");
    }
    let waits = best.waits.iter().max_by(|a, b| a.1.total_cmp(&b.1));
    if let Some((what, waited)) = waits.filter(|(_, waited)| *waited > 0.01 * best.step_seconds) {
        let share = 100.0 * waited / best.step_seconds;
        let _ = writeln!(out, "  what binds: {what}, {share:.0} % of the step");
    }
    if let Some(tokens) = tokens {
        let time = |rate: f64| duration(tokens as f64 / rate);
        let (soonest, latest) =
            (time(best.tokens_per_second_high), time(best.tokens_per_second_low));
        let _ = writeln!(
            out,
            "  {tokens} tokens in {} ({soonest} to {latest})",
            time(best.tokens_per_second)
        );
    }
    for line in search::certainty(found) {
        let _ = writeln!(out, "  {line}");
    }
    let _ = writeln!(out, "  with a config of this model: {}", arguments(sets));
}

/// Seconds as days or hours.
pub(super) fn duration(seconds: f64) -> String {
    let days = seconds / 86_400.0;
    match days >= 1.0 {
        true => format!("{days:.1} days"),
        false => format!("{:.1} hours", 24.0 * days),
    }
}
