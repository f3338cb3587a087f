//! `onebox plan --search`: prints the result of [`predict::search`] as text or JSON.

use super::check::count;
use super::largest::{ShortageReport, of_states};
use super::simulate::{seconds, with_range};
use super::{CommandError, fit_result, print_as};
use crate::report::reading::TerminalProgress;
use crate::report::stage::Stage;
use config::{Config, LoadedConfig};
use layout::LocalMachine;
use predict::changes::arguments;
use predict::plan::filled;
use predict::remedies::{Remedy, remedies};
use predict::search::{Layout, SearchReport, search};
use serde::Serialize;
use std::fmt::Write as _;
use topology::counted;

/// Document that `--json` prints.
#[derive(Serialize)]
struct Document<'a> {
    #[serde(flatten)]
    found: &'a SearchReport,
    #[serde(flatten)]
    no: Option<FitFailure>,
}

/// Reason why no layout fits; the default is empty.
#[derive(Default, Serialize)]
pub(super) struct FitFailure {
    /// Changes of config values that would make it fit.
    pub(super) remedies: Vec<Remedy>,
    /// Report if no change helps.
    #[serde(flatten)]
    pub(super) lacking: Option<ShortageReport>,
}

impl FitFailure {
    /// All settings of the remedies and shortages.
    pub(super) fn sets(&mut self) -> impl Iterator<Item = &mut Vec<String>> {
        let short = self.lacking.iter_mut().flat_map(|lacking| &mut lacking.shortages);
        let remedies = self.remedies.iter_mut().map(|remedy| &mut remedy.sets);
        remedies.chain(short.map(|shortage| &mut shortage.sets))
    }

    /// Lines about the changes that would make it fit, or about the memory that is too small.
    pub(super) fn lines(&self, config: &Config) -> Vec<String> {
        let remedies = self.remedies.iter();
        let fits = remedies.map(|remedy| format!("it would fit with {}", arguments(&remedy.sets)));
        let lacking = self.lacking.iter().flat_map(|lacking| lacking.lines(config, false));
        fits.chain(lacking).collect()
    }

    /// Failure of a search; `None` if a layout fits, or if the model allows no layout.
    pub(super) fn of(
        loaded: &LoadedConfig,
        machine: &LocalMachine,
        found: &SearchReport,
        gpus: Option<usize>,
    ) -> Option<Self> {
        if !found.layouts.is_empty() || found.no_layout.is_some() {
            return None;
        }
        // The ranks of the config may be too many for the box.
        let gpus = gpus.or((!machine.is_sound(&loaded.config)).then_some(found.gpus));
        Some(Self::new(loaded, machine, gpus))
    }

    /// Collects the remedies, or the shortages if there is no remedy.
    pub(super) fn new(loaded: &LoadedConfig, machine: &LocalMachine, gpus: Option<usize>) -> Self {
        let _stage = Stage::begin("looking for changes with which it fits", 0);
        let remedies = remedies(loaded, machine, gpus);
        let lacking = remedies.is_empty().then(|| ShortageReport::of(loaded, machine, gpus));
        Self { remedies, lacking }
    }
}

pub(super) fn run(
    loaded: &LoadedConfig,
    machine: &LocalMachine,
    gpus: Option<usize>,
    json: bool,
) -> Result<(), CommandError> {
    let found = search(loaded, machine, gpus, &TerminalProgress)?;
    let no = FitFailure::of(loaded, machine, &found, gpus);
    let document = Document { found: &found, no };
    let text = || text(loaded, &found, document.no.as_ref(), gpus.is_some());
    print_as(json, &document, text)?;
    fit_result(!found.layouts.is_empty())
}

/// Text of the search result. `named_gpus`: the user has named the number of GPUs.
fn text(
    loaded: &LoadedConfig,
    found: &SearchReport,
    no: Option<&FitFailure>,
    named_gpus: bool,
) -> String {
    let SearchReport { name, box_name, gpus, enumerated, fit, parameters, .. } = found;
    let parameters = count(*parameters as f64);
    let mut out =
        format!("{name}, {parameters} parameters, on {box_name}: simulated, not measured\n");
    if let (0, Some(why)) = (*fit, &found.no_layout) {
        return out + why + "\n";
    }
    let _ = write!(out, "{} on {}, {fit} fit", counted(enumerated, "layout"), counted(gpus, "GPU"));
    if let Some(no) = no {
        let lines = no.lines(&loaded.config).into_iter().map(|line| line + "\n");
        return out + "\nno layout fits\n" + &lines.collect::<String>();
    }
    let _ = writeln!(
        out,
        "; {} skipped: another layout does the same with less work{}\nscreened {} and {} (optimizer's share on the GPUs, first \
         forward passes together, share updated ahead) with a shortened step, then simulated the best {} in full (the shortened step was within \
         {:.1} %)",
        found.set_aside,
        match found.left_out {
            0 => String::new(),
            out => format!(", {out} left out"),
        },
        counted(found.simulated_briefly, "layout"),
        counted(found.choices, "variant"),
        found.simulated_in_full,
        100.0 * found.brief_error,
    );
    match found.given {
        Some(given) => {
            let [rate, low, high] = [
                given.tokens_per_second,
                given.tokens_per_second_low,
                given.tokens_per_second_high,
            ];
            let (place, speed) = (given.rank, with_range(rate, low, high));
            let _ = writeln!(out, "the config as it is: place {place}, {speed} simulated");
        }
        None if loaded.config.world_size() != *gpus && named_gpus => {
            let own = counted(loaded.config.world_size(), "GPU");
            let _ = writeln!(out, "the config as it is takes {own}");
        }
        None => out += "the config as it is does not fit\n",
    }
    if let Some(words) = of_states(found.states, &found.config) {
        let _ = writeln!(out, "no layout fits with the states of the config; {words}");
    }
    let best = found.layouts.first().map_or(0.0, |layout| layout.tokens_per_second);
    for (index, layout) in found.layouts.iter().enumerate() {
        let _ = write!(out, "\n{}", entry(index + 1, layout, best));
    }
    for line in certainty(found) {
        let _ = write!(out, "\n{line}");
    }
    out + "\n"
}

/// Sentences about the range of the best layout's speed, and about the key that it depends on.
pub(super) fn certainty(found: &SearchReport) -> Vec<String> {
    let range = found.layouts.first().map(|layout| layout.range.reason.clone());
    range.into_iter().chain(found.hangs_on.map(|influence| influence.words())).collect()
}

fn entry(number: usize, layout: &Layout, best: f64) -> String {
    let Layout { tensor, data, micro, micro_batches, words, .. } = layout;
    let mut out =
        format!("{number}. TP {tensor} x DP {data}, micro {micro} x {micro_batches}, {words}\n");
    let sets = match layout.sets[..] {
        [] => "the config as it is".to_owned(),
        _ => arguments(&layout.sets),
    };
    let _ = writeln!(out, "   {sets}");
    let _ = writeln!(
        out,
        "   {} ({:+.1} %), a step in {}{}; {:.1} TFLOPS per GPU as run, {:.1} of the model\n   {}",
        rate(layout),
        100.0 * (layout.tokens_per_second / best - 1.0),
        seconds(layout.step_seconds),
        if layout.extrapolated { " (extrapolated)" } else { "" },
        layout.hardware_tflops_per_gpu,
        layout.model_tflops_per_gpu,
        memories(layout),
    );
    // Only the best layout shows warnings; the others show how full their memories are.
    let warnings = layout.nearly_full.iter().chain(&layout.assumed);
    for warning in warnings.filter(|_| number == 1) {
        let _ = writeln!(out, "   warning: {warning}");
    }
    if number > 1 {
        let _ = writeln!(out, "   {}", why(layout));
    }
    out
}

/// Speed of a layout, with its range.
pub(super) fn rate(layout: &Layout) -> String {
    with_range(
        layout.tokens_per_second,
        layout.tokens_per_second_low,
        layout.tokens_per_second_high,
    )
}

/// Text about how full the memories of GPUs and host are.
pub(super) fn memories(layout: &Layout) -> String {
    let gpu = filled(layout.gpu_bytes, layout.gpu_limit);
    let host = filled(layout.fullest_node(), layout.node_limit);
    match layout.node_bytes.len() {
        1 => format!("GPU memory {gpu}, host memory {host}"),
        nodes => {
            format!("GPU memory {gpu}, host memory {host} on the fullest of {nodes} NUMA nodes")
        }
    }
}

fn why(layout: &Layout) -> String {
    if layout.loses_by.is_empty() {
        return "as fast, with more changes".into();
    }
    let parts =
        layout.loses_by.iter().map(|(what, share)| format!("{what} {:+.1} %", 100.0 * share));
    format!("loses by: {}", parts.collect::<Vec<_>>().join(", "))
}
