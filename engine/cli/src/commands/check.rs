//! `onebox config check` and `onebox config show`.

use super::processes::{SILENCE, Team};
use super::{CommandError, ConfigArgs, data, print, print_json, say, weights};
use config::{Config, ConfigError, DeviceConfig, ModelConfig, Origin, Problem, ValidKeys};
use layout::LocalMachine;
use serde_json::{Value, json};
use topology::counted;

#[derive(Debug, clap::Args)]
pub(super) struct CheckArgs {
    #[command(flatten)]
    pub(super) config: ConfigArgs,
    /// One JSON document on stdout
    #[arg(long)]
    pub(super) json: bool,
}

/// Prints all errors, or a line that describes the config, with the keys that this version cannot
/// run. Processes of a launcher join first, because a machine's requirements depend on its ranks.
pub(super) fn check(args: &CheckArgs) -> Result<(), CommandError> {
    let team = Team::join(SILENCE)?;
    let ended = team.all("config", checked(args, &team), |()| team.facts(None));
    team.end(ended)
}

fn checked(CheckArgs { config: args, json }: &CheckArgs, team: &Team) -> Result<(), CommandError> {
    let data = |config: &Config, valid: &ValidKeys<'_>| {
        data::trouble(config, &|keys| valid.has(keys)).into_iter().collect()
    };
    let refuse = |refused: CommandError, errors: Vec<Value>| {
        if !*json {
            return Err(refused);
        }
        print_json(&json!({ "ok": false, "errors": errors }))?;
        Err(CommandError::silent(refused.code))
    };
    let loaded = match weights::load(args, &team.machine, true, None, &data) {
        Ok(loaded) => loaded,
        Err((code, errors)) => {
            let all = in_json(&errors);
            return refuse(CommandError::new(code, errors), all);
        }
    };
    let config = &loaded.config;
    if let Err(refused) = team.check(config) {
        let why = json!({ "message": &refused.message });
        return refuse(refused, vec![why]);
    }
    let (tensor, data) = (config.parallel.tensor, config.parallel.data);
    let parameters = layout::build::shape(config).parameters();
    let not_built = config.not_built(&loaded.origins, || team.machine.missing_gpus());
    if team.is_first() {
        weights::warnings(&loaded).iter().for_each(|warning| say(warning));
    }
    if *json {
        let cannot = not_built.as_ref().map_or_else(Vec::new, in_json);
        return print_json(&json!({
            "ok": true,
            "errors": [],
            "parameters": parameters,
            "tensor": tensor,
            "data": data,
            "global_batch": config.batch.global,
            "seq_len": config.model.seq_len,
            "train_refuses": cannot,
        }));
    }
    print(&format!(
        "{}: ok: {}, TP {tensor} x DP {data}, global batch {} x {} tokens\n",
        args.name(),
        parameter_words(config),
        config.batch.global,
        config.model.seq_len,
    ))?;
    if let Some(not_built) = not_built {
        let keys: Vec<&str> = not_built.errors().iter().map(|p| p.key.as_str()).collect();
        let keys = keys.join(", ");
        say(&match config.device {
            DeviceConfig::Sim { .. } => {
                "note: this config is for a simulated box. To train, set device to Cuda or Cpu(..)."
                    .to_owned()
            }
            _ => format!("note: `onebox train` refuses this config here, because of {keys}"),
        });
    }
    Ok(())
}

fn in_json(errors: &ConfigError) -> Vec<Value> {
    let error = |problem: &Problem| {
        let place = errors.place(problem);
        json!({
            "key": problem.key,
            "message": problem.message,
            "help": problem.help,
            "file": place.as_ref().map(|(file, ..)| file),
            "line": place.as_ref().map(|(_, line, _)| line),
            "column": place.as_ref().map(|(.., column)| column),
        })
    };
    errors.errors().iter().map(error).collect()
}

/// Prints every key with its value and origin.
pub(super) fn show(args: &CheckArgs, machine: &LocalMachine) -> Result<(), CommandError> {
    let loaded = args.config.load(machine)?;
    if args.json {
        let key = |(key, value, origin): &(String, String, Origin)| {
            let (from, line, how) = match origin {
                Origin::File { line } => ("file", Some(line), None),
                Origin::Set => ("set", None, None),
                Origin::Default => ("default", None, None),
                Origin::Derived(how) => ("derived", None, Some(how)),
            };
            json!({ "key": key, "value": value, "from": from, "line": line, "how": how })
        };
        return print_json(&json!({ "keys": loaded.origins.iter().map(key).collect::<Vec<_>>() }));
    }
    let widest = |pick: fn(&(String, String, Origin)) -> &String, most: usize| {
        loaded.origins.iter().map(|o| pick(o).chars().count()).max().unwrap_or(0).min(most)
    };
    let (keys, values) = (widest(|o| &o.0, 40), widest(|o| &o.1, 40));
    let mut text = String::new();
    for (key, value, origin) in &loaded.origins {
        let origin = match origin {
            Origin::File { line } => format!("line {line}"),
            Origin::Set => "--set".to_owned(),
            Origin::Default => "default".to_owned(),
            Origin::Derived(how) => how.clone(),
        };
        text += &format!("{key:keys$}  {value:values$}  {origin}\n");
    }
    print(&text)
}

/// `124 M parameters: 12 layers, hidden 768, 12 heads, 1024 tokens, vocabulary 50257`.
pub(super) fn model_words(model: &ModelConfig, parameters: f64) -> String {
    let ModelConfig { layers, hidden, heads, seq_len, vocab, .. } = model;
    format!(
        "{} parameters: {}, hidden {hidden}, {}, {}, vocabulary {vocab}",
        count(parameters),
        counted(layers, "layer"),
        counted(heads, "head"),
        counted(seq_len, "token"),
    )
}

/// Number of parameters in words; also those that a token uses, if the model has experts.
pub(super) fn parameter_words(config: &Config) -> String {
    let shape = layout::build::shape(config);
    let all = count(shape.parameters() as f64);
    let mut words = format!("{all} parameters");
    if shape.experts.is_some() {
        words += &format!(", {} for each token", count(shape.active_parameters() as f64));
    }
    if shape.has_frozen_params() {
        let what = if shape.adapters().is_some() { "of adapters" } else { "trained" };
        words += &format!(", {} {what}", count(shape.trained_parameters() as f64));
    }
    words
}

/// Formats a count with a unit: `124 M`, `70.1 B`.
pub(super) fn count(n: f64) -> String {
    let (value, unit) = match n {
        n if n >= 1e12 => (n / 1e12, " T"),
        n if n >= 1e9 => (n / 1e9, " B"),
        n if n >= 1e6 => (n / 1e6, " M"),
        n if n >= 1e3 => (n / 1e3, " k"),
        n => (n, ""),
    };
    let decimals = if value >= 100.0 || unit.is_empty() { 0 } else { 1 };
    format!("{value:.decimals$}{unit}")
}
