//! The page of `onebox report`: one file that loads nothing.

use crate::report::curves::{Curves, Eval, Step};
use crate::report::plot::{Plot, PlotStyle, Series, colour, escape, hex, short};
use crate::report::progress::clock;
use engine::metrics::median;
use engine::run::Difference;
use std::collections::BTreeSet;
use std::fmt::Write;
use topology::{counted, format_bytes};

/// Beginning of every page.
pub(crate) const BEGINNING: &str = "<!doctype html>\n<!-- onebox report -->\n";

const STYLE: &str = "
body { font: 15px/1.5 system-ui, -apple-system, 'Segoe UI', sans-serif; color: #24292f; background: #fff; max-width: 1360px; margin: 1.5rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0 0 .4rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; padding-top: .8rem; border-top: 1px solid #d8dee4; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: .8rem 1.2rem; }
.plots svg { width: 100%; height: auto; } .wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; } th, td { padding: .25rem .6rem; border-bottom: 1px solid #e3e6ea; text-align: left;
  vertical-align: top; } th { border-bottom: 2px solid #c6ccd2; } td:first-child { white-space: nowrap; } td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
i { display: inline-block; width: .75em; height: .75em; border-radius: 2px; margin-right: .45em; } summary { cursor: pointer; }
p { max-width: 80ch; } .note { color: #57606a; font-size: .88rem; }
";

/// Maximum points of a drawn curve: more than two per pixel would be wasted.
const POINTS: usize = 800;
/// Maximum rows of a run in the table of values, and in each kind of event.
const ROWS: usize = 24;

/// Function that reads a curve's value from a step.
type StepCurve = fn(&Step) -> Option<f64>;

/// Returns the page about `runs`.
pub(crate) fn page(runs: &[Curves], version: &str) -> String {
    let names: Vec<&str> = runs.iter().map(|run| run.name.as_str()).collect();
    let title = match names[..] {
        [name] => format!("Run {name}"),
        _ => format!("{} runs: {}", names.len(), names.join(", ")),
    };
    let title = escape(&title);
    let mut out = BEGINNING.to_owned();
    out.push_str(&format!(
        "<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>{title}</title>\n<style>{STYLE}</style></head><body>\n<h1>{title}</h1>\n<p class=\"note\">Written by onebox {}. \
         Measured on the machine of each run.</p>\n",
        escape(version)
    ));
    out.push_str(&summary(runs));
    out.push_str(&differences(runs));
    out.push_str("<h2>Curves</h2>\n<div class=\"plots\">\n");
    out.push_str(&plots(runs));
    out.push_str("</div>\n");
    out.push_str(&events(runs));
    out.push_str(&values(runs));
    out.push_str("</body></html>\n");
    out
}

/// HTML table. The first `texts` columns are text, the other columns are numbers. Cells are HTML.
fn table(heads: &[&str], texts: usize, rows: &[Vec<String>]) -> String {
    let mut out = "<div class=\"wide\"><table><thead><tr>".to_owned();
    heads.iter().for_each(|head| out.push_str(&format!("<th>{head}</th>")));
    out.push_str("</tr></thead><tbody>\n");
    for row in rows {
        out.push_str("<tr>");
        for (column, cell) in row.iter().enumerate() {
            let class = if column < texts { "" } else { " class=\"n\"" };
            out.push_str(&format!("<td{class}>{cell}</td>"));
        }
        out.push_str("</tr>\n");
    }
    out + "</tbody></table></div>\n"
}

/// A run's name after a square in its colour.
fn named(index: usize, run: &Curves) -> String {
    format!("<i style=\"background:{}\"></i>{}", hex(colour(index)), escape(&run.name))
}

fn or_dash(value: Option<String>) -> String {
    value.unwrap_or_else(|| "-".into())
}

fn loss(value: f64) -> String {
    format!("{value:.4}")
}

fn summary(runs: &[Curves]) -> String {
    let rows = runs.iter().enumerate().map(|(index, run)| {
        let last = run.steps.last().copied().unwrap_or_default();
        let of = run.config.as_ref().map(|loaded| format!("/{}", loaded.config.train.steps));
        let seconds: f64 = run.steps.iter().filter_map(|step| step.step_seconds).sum();
        let most = |of: StepCurve| run.steps.iter().filter_map(of).max_by(f64::total_cmp);
        let bytes = |value: Option<f64>| or_dash(value.map(|bytes| format_bytes(bytes as u64)));
        // The first steps warm up.
        let speeds = run.steps.iter().skip(2).filter_map(|step| step.tokens_per_second);
        vec![
            named(index, run),
            if run.end.is_some() { "done" } else { "not done" }.into(),
            format!("{}{}", last.step, of.unwrap_or_default()),
            short(last.tokens as f64),
            or_dash(last.loss.map(loss)),
            or_dash(run.evals.last().and_then(|eval| eval.loss).map(loss)),
            or_dash(run.best().map(|(step, least)| format!("{} at {step}", loss(least)))),
            or_dash(median(speeds).map(short)),
            clock(seconds),
            run.steps.iter().filter(|step| step.skipped).count().to_string(),
            bytes(most(|step| step.device_memory)),
            bytes(most(|step| step.host_memory)),
            or_dash(
                run.speculation_counts().map(|counts| counts.map(|n| n.to_string()).join(" / ")),
            ),
        ]
    });
    let heads = [
        "run",
        "state",
        "steps",
        "tokens",
        "loss",
        "validation loss",
        "least validation loss",
        "tokens/s (median)",
        "time in steps",
        "skipped",
        "device memory",
        "host memory (most)",
        "updates ahead: committed / redone / not tried",
    ];
    let mut rows: Vec<Vec<String>> = rows.collect();
    let mut heads = heads.to_vec();
    // The last column is only for runs with speculative updates.
    if runs.iter().all(|run| run.speculation_counts().is_none()) {
        heads.pop();
        rows.iter_mut().for_each(|row| drop(row.pop()));
    }
    table(&heads, 2, &rows)
}

/// Table of keys whose values differ between the configs.
fn differences(runs: &[Curves]) -> String {
    let configs: Vec<_> = runs.iter().map(|run| run.config.as_deref()).collect();
    let mut keys: Vec<&str> = Vec::new();
    for (key, ..) in configs.iter().flatten().flat_map(|loaded| &loaded.origins) {
        if !keys.contains(&key.as_str()) {
            keys.push(key);
        }
    }
    let value = |config: &Option<&config::LoadedConfig>, key: &str| {
        let origins = config.iter().flat_map(|loaded| &loaded.origins);
        let found = origins.into_iter().find(|(name, ..)| name == key);
        found.map_or_else(|| "-".to_owned(), |(_, value, _)| value.clone())
    };
    let mut rows: Vec<Vec<String>> = Vec::new();
    for key in keys.into_iter().filter(|key| *key != "name") {
        let values: Vec<String> = configs.iter().map(|config| value(config, key)).collect();
        if values.windows(2).any(|pair| pair[0] != pair[1]) {
            let cells = values.iter().map(|value| escape(value));
            let key = format!("<code>{}</code>", escape(key));
            rows.push(std::iter::once(key).chain(cells).collect());
        }
    }
    if rows.is_empty() {
        return String::new();
    }
    let named: Vec<String> =
        runs.iter().enumerate().map(|(index, run)| named(index, run)).collect();
    let heads: Vec<&str> = std::iter::once("key").chain(named.iter().map(String::as_str)).collect();
    format!("<h2>What differs between the configs</h2>\n{}", table(&heads, heads.len(), &rows))
}

/// Reduces points to at most [`POINTS`]. Each stretch keeps its extreme values, so no peak is lost.
fn thinned(points: Vec<(f64, f64)>) -> Vec<(f64, f64)> {
    if points.len() <= POINTS {
        return points;
    }
    let stretch = points.len().div_ceil(POINTS / 2);
    let ends = |part: &[(f64, f64)]| {
        let finite = part.iter().copied().filter(|point| point.1.is_finite());
        let by = |a: &(f64, f64), b: &(f64, f64)| a.1.total_cmp(&b.1);
        let (least, most) = (finite.clone().min_by(by), finite.max_by(by));
        let mut points: Vec<(f64, f64)> = least.into_iter().chain(most).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        points.dedup();
        // A stretch without a number interrupts the line.
        if points.is_empty() { part[..1].to_vec() } else { points }
    };
    points.chunks(stretch).flat_map(ends).collect()
}

fn plots(runs: &[Curves]) -> String {
    let of_steps = |of: StepCurve| -> Vec<Series> {
        let series = runs.iter().map(|run| {
            let points =
                run.steps.iter().map(|step| (step.step as f64, of(step).unwrap_or(f64::NAN)));
            Series { name: run.name.clone(), points: thinned(points.collect()), ideal: false }
        });
        series.collect()
    };
    let of_evals = |run: &Curves, name: String, of: &dyn Fn(&Eval) -> Option<f64>| {
        let points = run.evals.iter().map(|eval| (eval.step as f64, of(eval).unwrap_or(f64::NAN)));
        Series { name, points: thinned(points.collect()), ideal: false }
    };
    let validation = runs.iter().flat_map(|run| {
        let sets: BTreeSet<&String> = run.evals.iter().flat_map(|eval| eval.sets.keys()).collect();
        let sets = sets.into_iter().map(move |set| {
            let loss = |eval: &Eval| eval.sets.get(set).copied().flatten();
            of_evals(run, format!("{}: {set}", run.name), &loss)
        });
        [of_evals(run, run.name.clone(), &|eval| eval.loss)].into_iter().chain(sets)
    });
    let all: [(&str, &str, Vec<Series>); 11] = [
        ("Loss", "nats per token", of_steps(|step| step.loss)),
        ("Validation loss", "nats per token", validation.collect()),
        ("Learning rate", "", of_steps(|step| step.lr)),
        ("Gradient norm, before clipping", "", of_steps(|step| step.grad_norm)),
        ("Throughput", "tokens per second", of_steps(|step| step.tokens_per_second)),
        ("Loss scale", "", of_steps(|step| step.loss_scale)),
        ("Memory of the fullest device, as planned", "", of_steps(|step| step.device_memory)),
        ("Memory of the process on the host", "", of_steps(|step| step.host_memory)),
        (
            "Largest share of an expert in the tokens of its layer",
            "",
            of_steps(|step| step.largest_expert_share),
        ),
        ("Experts without a token", "", of_steps(|step| step.dead_experts.map(|dead| dead as f64))),
        ("Balance loss, without its factor", "", of_steps(|step| step.balance_loss)),
    ];
    let mut out = String::new();
    for (title, unit, mut series) in all {
        let numbers = series.iter().flat_map(|series| &series.points).map(|point| point.1);
        let numbers = numbers.filter(|y| y.is_finite());
        let (least, most) =
            (numbers.clone().fold(f64::INFINITY, f64::min), numbers.fold(0.0, f64::max));
        // No value is known, or there is no loss scaling.
        if least > most || title == "Loss scale" && most <= 1.0 {
            continue;
        }
        let mut unit = unit.to_owned();
        if title.starts_with("Memory") {
            let (bytes, name) = [(1 << 30, "GiB"), (1 << 20, "MiB")]
                .into_iter()
                .find(|(bytes, _)| most >= f64::from(*bytes))
                .unwrap_or((1 << 10, "KiB"));
            for point in series.iter_mut().flat_map(|series| &mut series.points) {
                point.1 /= f64::from(bytes);
            }
            unit = name.into();
        }
        // On a linear axis, one extreme value would flatten all other values.
        let log = least > 0.0 && (most / least > 100.0 || title == "Loss scale");
        let plot = Plot {
            title,
            x: "step",
            y: &if log { format!("{unit} (logarithmic)") } else { unit },
            width: 430,
            height: 280,
            look: PlotStyle::Curves,
            log: [false, log],
            from_zero: title == "Throughput" || title.starts_with("Memory"),
            places: &[],
            series: &series,
        };
        out.push_str(&plot.svg());
    }
    out
}

fn events(runs: &[Curves]) -> String {
    let mut rows = Vec::new();
    for (index, run) in runs.iter().enumerate() {
        let mut found: Vec<(u64, String)> = Vec::new();
        let skipped = run.skipped();
        for (first, last) in skipped.iter().take(ROWS) {
            let words = if first == last {
                "skipped: a gradient was not finite".to_owned()
            } else {
                format!("skipped up to step {last}: gradients were not finite")
            };
            found.push((*first, words));
        }
        for (step, why) in run.not_saved.iter().take(ROWS) {
            found.push((*step, format!("checkpoint NOT SAVED: {why}")));
        }
        for (step, places) in run.differs.iter().take(ROWS) {
            found.push((*step, format!("ran twice and DIFFERS: {}", Difference::all(places))));
        }
        if let Some(broken) = run.steps.iter().find(|step| step.loss.is_none()) {
            found.push((broken.step, "the loss is not finite, for the first time".to_owned()));
        }
        found.sort();
        let counts = [skipped.len(), run.not_saved.len(), run.differs.len()];
        let more: usize = counts.iter().map(|count| count.saturating_sub(ROWS)).sum();
        let last = run.steps.last().map_or(0, |step| step.step);
        if more > 0 {
            found.push((last, format!("{more} more of these")));
        }
        if run.damaged > 0 {
            let lines = counted(run.damaged, "line");
            found.push((last, format!("{lines} of its metrics cannot be read")));
        }
        if let Some((step, hash)) = &run.end {
            found.push((*step, format!("done; state {hash}")));
        }
        for (step, words) in found {
            rows.push(vec![named(index, run), step.to_string(), escape(&words)]);
        }
    }
    match rows.is_empty() {
        true => String::new(),
        false => format!("<h2>Events</h2>\n{}", table(&["run", "step", "what"], 3, &rows)),
    }
}

/// Tables of some steps of each run.
fn values(runs: &[Curves]) -> String {
    let mut out = "<h2>Values</h2>\n".to_owned();
    for (index, run) in runs.iter().enumerate() {
        let every = run.steps.len().div_ceil(ROWS).max(1);
        let rows = run.steps.iter().rev().step_by(every).map(|step| {
            let validation =
                run.evals.iter().find(|eval| eval.step == step.step).and_then(|eval| eval.loss);
            vec![
                step.step.to_string(),
                or_dash(step.loss.map(loss)),
                or_dash(validation.map(loss)),
                or_dash(step.lr.map(short)),
                or_dash(step.grad_norm.map(short)),
                or_dash(step.tokens_per_second.map(short)),
            ]
        });
        let mut rows: Vec<_> = rows.collect();
        rows.reverse();
        let heads =
            ["step", "loss", "validation loss", "learning rate", "gradient norm", "tokens/s"];
        // Writing to a String cannot fail.
        let _ = writeln!(
            out,
            "<details><summary>{}</summary>{}</details>",
            named(index, run),
            table(&heads, 0, &rows)
        );
    }
    out + "<p class=\"note\">All steps: <code>onebox report RUN --csv</code>.</p>\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::metrics::MetricsWriter;
    use files::held::LockedRunDir;

    #[test]
    fn a_peak_among_a_million_steps_is_drawn() {
        let points: Vec<(f64, f64)> =
            (0..1_000_000).map(|i| (f64::from(i), if i == 777_777 { 9.0 } else { 1.0 })).collect();
        let thin = thinned(points);
        assert!(thin.len() <= POINTS && thin.contains(&(777_777.0, 9.0)), "{}", thin.len());
        assert!(thin.windows(2).all(|pair| pair[0].0 < pair[1].0));
        let broken = thinned((0..10_000).map(|i| (f64::from(i), f64::NAN)).collect());
        assert!(broken.len() <= POINTS && !broken.is_empty());
    }

    #[test]
    fn a_step_that_differs_is_written_and_is_an_event() {
        let folder = tempfile::tempdir().unwrap();
        let run = LockedRunDir::unlocked(folder.path()).unwrap();
        let mut metrics = MetricsWriter::open(&run, 0).unwrap();
        let places = [(2, "the loss"), (3, "the gradient of `a.b`")];
        let places = places.map(|(rank, place)| Difference { rank, place: place.into() });
        metrics.differs(4, &places);
        metrics.sync();
        let events = events(&[Curves::read(folder.path(), "one".into()).unwrap()]);
        let words = "ran twice and DIFFERS: the loss on rank 2, the gradient of `a.b` on rank 3";
        assert!(events.contains(words), "{events}");
    }
}
