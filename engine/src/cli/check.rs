//! `onebox config check` and `onebox config show`.

use super::exit::{Failed, code};
use super::{ConfigArgs, data, print, say};
use crate::config::{Origin, load_and_look};

/// All errors, or a line that says what the config is, and what of it this version cannot run.
pub(super) fn check(args: &ConfigArgs) -> Result<(), Failed> {
    let loaded = load_and_look(&args.config, &args.sets, &data::trouble).map_err(|errors| {
        // Only of the data: as `train` says it.
        let data =
            errors.errors().iter().all(|e| data::KEYS.contains(&&*e.key) && e.help.is_empty());
        Failed::new(if data { code::DATA } else { code::CONFIG }, errors)
    })?;
    let config = &loaded.config;
    let (tensor, data) = (config.parallel.tensor, config.parallel.data);
    let parameters = crate::train::build::shape(config).parameters();
    print(&format!(
        "{}: ok: {} parameters, TP {tensor} x DP {data}, global batch {} x {} tokens\n",
        args.config.display(),
        count(parameters as f64),
        config.batch.global,
        config.model.seq_len,
    ))?;
    if let Some(not_built) = config.not_built(&loaded.origins) {
        let keys: Vec<&str> = not_built.errors().iter().map(|p| p.key.as_str()).collect();
        say(&format!(
            "note: `onebox train` would refuse it here: it cannot do what {} asks for",
            keys.join(", ")
        ));
    }
    Ok(())
}

/// Every key with its value and origin.
pub(super) fn show(args: &ConfigArgs) -> Result<(), Failed> {
    let loaded = args.load()?;
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

/// `124 M`, `70.1 B`.
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
