//! Progress of a training run on stderr: lines that stay the same for `grep`, at even distances, with
//! means of the steps in between. On a terminal, lines have only the fields that fit, and a status
//! is below. `run` reports every step; this module chooses the steps to show. It cannot fail: a
//! closed stderr loses the lines, not the run.

use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

pub use crate::report::eval_line::EvalLine;
use crate::report::{colour, stderr};

/// Number of steps that a terminal always shows, counted from the start of this process.
const FIRST_STEPS: u64 = 3;
/// Time between lines on a terminal, after the first steps.
const INTERVAL: Duration = Duration::from_secs(2);
/// Number of plain lines of a run, at most, unless they would be more than 100 steps apart.
const LINES: u64 = 200;
/// Possible numbers of steps between plain lines. The first number that gives few enough lines is
/// used.
const DISTANCES: [u64; 6] = [1, 2, 5, 10, 20, 50];
/// Steps between the plain lines of a long run.
const FARTHEST: u64 = 100;
/// Time between two drawings of the status.
const REDRAW: Duration = Duration::from_millis(100);

/// The state of a run after a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepLine {
    /// Number of the step, from 1.
    pub step: u64,
    /// Number of steps of the run.
    pub steps: u64,
    /// Number of epochs so far; `None` if the data has no known length.
    pub epoch: Option<f64>,
    /// Mean loss over the global batch.
    pub loss: f32,
    /// Gradient norm before clipping.
    pub grad_norm: f32,
    /// Loss scale; `None` without loss scaling.
    pub loss_scale: Option<f32>,
    /// Learning rate.
    pub lr: f32,
    /// Tokens per second over all ranks.
    pub tokens_per_second: f64,
    /// Model FLOPs per second over all ranks, without recomputation.
    pub flops_per_second: f64,
    /// Bytes used and allowed on the fullest device.
    pub device_memory: (u64, u64),
    /// Share of the offload's work that computation hides, 0 to 1; `None` if not measured.
    pub overlap: Option<f64>,
    /// Number of skipped steps so far.
    pub skipped: u64,
    /// Number of steps by speculative update: committed, redone, not tried; `None` without
    /// speculative updates.
    pub speculation: Option<[u64; 3]>,
    /// Seconds to the end of the run; not finite if unknown.
    pub eta_seconds: f64,
}

/// One line with as many fields as fit into `width` columns. Fields keep this order, and "-" stands
/// for a missing value:
/// `step   120/400  epoch 0.30  loss 2.4312  norm 0.83  lr 1.9e-3  scale 65536  12.3 ktok/s
/// 8.1 GFLOP/s (model)  mem 41.2/256 MiB  overlap 63%  skipped 0  eta 0:42`.
/// In a run with speculative updates, `ahead 110 committed 7 redone 3 not tried` precedes `eta`.
fn fitted(line: &StepLine, width: usize) -> String {
    let fields = fields(line);
    let up_to = |most: u8| {
        let shown = fields.iter().filter(|(rank, _)| *rank <= most);
        shown.map(|(_, text)| text.as_str()).collect::<Vec<_>>().join("  ")
    };
    let fits = |text: &String| text.chars().count() <= width;
    let text = (0..=LAST).rev().map(up_to).find(fits);
    text.unwrap_or_else(|| cut(&up_to(0), width))
}

/// Rank of the fields that a line leaves out first, if it has no room for all fields.
const LAST: u8 = 10;

/// Fields in their order, each with its rank.
fn fields(line: &StepLine) -> Vec<(u8, String)> {
    let (used, limit) = line.device_memory;
    let or_dash = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
    let speculation = line.speculation.map(|[committed, redone, no]| {
        format!("ahead {committed} committed {redone} redone {no} not tried")
    });
    let mut fields = vec![
        (0, format!("step {:>5}/{}", line.step, line.steps)),
        (6, line.epoch.map_or_else(String::new, |epoch| format!("epoch {epoch:.2}"))),
        (1, format!("loss {}", fixed(line.loss.into(), 4))),
        (5, format!("norm {}", norm(line.grad_norm.into()))),
        (6, format!("lr {:.1e}", line.lr)),
        (9, format!("scale {}", or_dash(line.loss_scale.map(|scale| scale.to_string())))),
        (4, format!("{}tok/s", si(line.tokens_per_second))),
        (8, format!("{}FLOP/s (model)", si(line.flops_per_second))),
        (7, format!("mem {}", memory(used, limit))),
        (LAST, format!("overlap {}", or_dash(line.overlap.map(|o| format!("{:.0}%", 100.0 * o))))),
        // A count of zero is the least important field.
        (if line.skipped == 0 { LAST } else { 3 }, format!("skipped {}", line.skipped)),
    ];
    fields.retain(|(_, text)| !text.is_empty());
    fields.extend(speculation.map(|text| (LAST, text)));
    fields.push((2, format!("eta {}", clock(line.eta_seconds))));
    fields
}

/// One line of a run whose progress goes to a file or a pipe: all fields that have a value.
fn plain(line: &StepLine) -> String {
    const EMPTY: [&str; 3] = ["scale -", "overlap -", "skipped 0"];
    let fields = fields(line).into_iter().map(|(_, text)| text);
    fields.filter(|text| !EMPTY.contains(&text.as_str())).collect::<Vec<_>>().join("  ")
}

/// Number of steps between two plain lines of a run of `steps` steps.
fn line_distance(steps: u64) -> u64 {
    DISTANCES.into_iter().find(|distance| steps <= LINES * distance).unwrap_or(FARTHEST)
}

/// Sums over the steps since the last plain line.
#[derive(Clone, Copy, Debug, Default)]
struct StepSums {
    steps: f64,
    losses: f64,
    /// Sum of the seconds per token.
    seconds_per_token: f64,
}

impl StepSums {
    fn add(&mut self, line: &StepLine) {
        self.steps += 1.0;
        self.losses += f64::from(line.loss);
        self.seconds_per_token += 1.0 / line.tokens_per_second;
    }

    /// `line` with the mean loss and the mean speed of the steps.
    fn mean(&self, line: StepLine) -> StepLine {
        let tokens_per_second = self.steps / self.seconds_per_token;
        let faster = tokens_per_second / line.tokens_per_second;
        StepLine {
            loss: (self.losses / self.steps) as f32,
            tokens_per_second,
            flops_per_second: line.flops_per_second * faster,
            ..line
        }
    }
}

pub(crate) fn cut(text: &str, width: usize) -> String {
    text.chars().take(width).collect()
}

/// Number of finished items, and number of all items.
#[derive(Clone, Copy, Debug)]
pub struct ProgressCount {
    /// Number of finished items.
    pub done: u64,
    /// Number of all items.
    pub of: u64,
}

/// Status that a terminal of `width` columns shows below all lines: `███░░░░░░░  30%  step ...`.
pub(crate) fn status(steps: ProgressCount, width: usize, rest: impl Fn(usize) -> String) -> String {
    let done = steps.done as f64 / steps.of.max(1) as f64;
    let cells = (width / 8).min(20);
    let full = (done * cells as f64) as usize;
    let bar = format!("{}{}", "█".repeat(full), "░".repeat(cells.saturating_sub(full)));
    let bar = format!("{bar} {:>3.0}%  ", (100.0 * done).floor());
    let left = width.saturating_sub(bar.chars().count());
    cut(&format!("{bar}{}", rest(left)), width)
}

/// Whether stderr is a terminal that can move its cursor. Any other stderr gets only lines.
pub(crate) fn on_terminal() -> bool {
    let dumb = std::env::var_os("TERM").is_none_or(|term| term.is_empty() || term == "dumb");
    !dumb && io::stderr().is_terminal()
}

/// The progress of a run on stderr.
#[derive(Default)]
pub struct Progress {
    /// Output of the lines; `None` shows nothing.
    lines: Option<Box<dyn Write + Send>>,
    /// Whether the lines go to a terminal, with a status below them.
    on_terminal: bool,
    reported: u64,
    shown: Option<(Instant, StepLine)>,
    /// The last step, if it was not shown.
    pending: Option<StepLine>,
    /// Sums over the steps since the last plain line.
    sums: StepSums,
    /// Time of the last drawing of the status.
    drawn: Option<Instant>,
}

impl fmt::Debug for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Progress").field("reported", &self.reported).finish_non_exhaustive()
    }
}

impl Progress {
    /// Progress of a run. `quiet` shows only warnings.
    pub fn on_stderr(quiet: bool) -> Self {
        if quiet {
            return Self::default();
        }
        Self { on_terminal: on_terminal(), ..Self::to_writer(Box::new(stderr::Queue)) }
    }

    /// Progress as plain lines to `writer`, with one write per line.
    pub fn to_writer(writer: Box<dyn Write + Send>) -> Self {
        Self { lines: Some(writer), ..Self::default() }
    }

    /// Reports a step. Plain lines show the first and the last step, and steps at even distances. A
    /// terminal shows first, last and newly skipped steps, and one about every two seconds.
    pub fn step(&mut self, line: &StepLine) {
        self.step_at(line, Instant::now());
    }

    /// Reports an evaluation in a line below the line of its step.
    /// `standing`: text about its comparison with earlier ones.
    pub fn eval(&mut self, line: &EvalLine<'_>, standing: &str) {
        self.message(&line.text(standing));
    }

    /// Reports the progress of an evaluation after a step; only a terminal shows it.
    pub fn evaluating(&mut self, steps: ProgressCount, batches: ProgressCount) {
        self.evaluating_at(steps, batches, Instant::now());
    }

    fn evaluating_at(&mut self, steps: ProgressCount, batches: ProgressCount, now: Instant) {
        if self.on_terminal {
            let ProgressCount { done, of } = batches;
            let text = format!("eval {:>5}/{}  batch {done}/{of}", steps.done, steps.of);
            self.draw(steps, now, move |width| cut(&text, width));
        }
    }

    /// Shows any other line, between the lines of steps.
    pub fn message(&mut self, text: &str) {
        if let Some(line) = self.pending.take_if(|_| self.on_terminal) {
            self.show(&line, Instant::now());
        }
        if let Some(lines) = &mut self.lines {
            write_line(lines, text);
        }
    }

    /// Shows a warning, also with `quiet`.
    pub fn warn(&mut self, text: &str) {
        let text = colour::on(&io::stderr(), text);
        match self.lines {
            None => write_line(&mut stderr::Queue, &text),
            Some(_) => self.message(&text),
        }
    }

    /// Ends the progress: shows a last line that was held back, and removes the status.
    pub fn finish(&mut self) {
        if let Some(line) = self.pending.take() {
            self.show(&line, Instant::now());
        }
        if self.on_terminal {
            stderr::clear();
        }
    }

    fn step_at(&mut self, line: &StepLine, now: Instant) {
        self.reported += 1;
        if !self.on_terminal {
            self.sums.add(line);
            let even = line.step.is_multiple_of(line_distance(line.steps));
            match self.reported == 1 || even || line.step >= line.steps {
                true => self.show(line, now),
                false => self.pending = Some(*line),
            }
            return;
        }
        let due = self.shown.is_none_or(|(then, shown)| {
            now.saturating_duration_since(then) >= INTERVAL || line.skipped > shown.skipped
        });
        if due || self.reported <= FIRST_STEPS || line.step >= line.steps {
            self.show(line, now);
        } else {
            self.pending = Some(*line);
        }
        let line = *line;
        let steps = ProgressCount { done: line.step, of: line.steps };
        self.draw(steps, now, move |width| fitted(&line, width));
    }

    /// Draws the status, unless it was drawn just before. `rest` is the text after the bar.
    fn draw(
        &mut self,
        steps: ProgressCount,
        now: Instant,
        rest: impl Fn(usize) -> String + Send + 'static,
    ) {
        if self.drawn.is_none_or(|then| now.saturating_duration_since(then) >= REDRAW) {
            self.drawn = Some(now);
            stderr::status(Box::new(move |width| status(steps, width, &rest)));
        }
    }

    fn show(&mut self, line: &StepLine, now: Instant) {
        self.shown = Some((now, *line));
        self.pending = None;
        let sums = std::mem::take(&mut self.sums);
        let text = match self.on_terminal {
            true => fitted(line, stderr::width()),
            false => plain(&sums.mean(*line)),
        };
        if let Some(lines) = &mut self.lines {
            write_line(lines, &text);
        }
    }
}

/// Prints a line to stderr, from any thread.
pub(crate) fn announce(text: &str) {
    stderr::offer(format!("{text}\n").into_bytes());
}

/// Ignores errors, since the reader may be gone.
fn write_line(writer: &mut dyn Write, text: &str) {
    let _ = writer.write_all(format!("{text}\n").as_bytes()).and_then(|()| writer.flush());
}

/// Formats a number with "nan" and "inf" in small letters.
fn fixed(value: f64, digits: usize) -> String {
    format!("{value:.digits$}").to_lowercase()
}

/// Formats a norm with two digits after the point, unless they hide the value.
fn norm(value: f64) -> String {
    let plain = value == 0.0 || (0.01..1e5).contains(&value) || !value.is_finite();
    if plain { fixed(value, 2) } else { format!("{value:.1e}") }
}

/// Formats a number with a prefix: `12.3 k`, for a unit to follow.
pub(crate) fn si(mut value: f64) -> String {
    for prefix in ["", "k", "M", "G", "T"] {
        // The limit is not 1000, since 999.95 would print as 1000.0.
        if value < 999.95 || !value.is_finite() {
            return format!("{} {prefix}", fixed(value, 1));
        }
        value /= 1000.0;
    }
    format!("{} P", fixed(value, 1))
}

/// Formats memory in the limit's unit: `41.2/256 MiB`; `41.2 MiB/2 GiB` if that would show little.
fn memory(used: u64, limit: u64) -> String {
    let unit = |bytes: u64| match bytes {
        0x4000_0000.. => (30, "GiB"),
        0x10_0000.. => (20, "MiB"),
        0x400.. => (10, "KiB"),
        _ => (0, "B"),
    };
    let scaled = |bytes: u64, shift: u32| {
        let text = format!("{:.1}", bytes as f64 / (1u64 << shift) as f64);
        text.strip_suffix(".0").map_or(text.clone(), str::to_owned)
    };
    let ((shift, name), (used_shift, used_name)) = (unit(limit), unit(used));
    if used_shift == shift || used >> (shift - 4) > 0 {
        return format!("{}/{} {name}", scaled(used, shift), scaled(limit, shift));
    }
    format!("{} {used_name}/{} {name}", scaled(used, used_shift), scaled(limit, shift))
}

/// Formats a duration: `0:42` or `1:02:03`.
pub(crate) fn clock(seconds: f64) -> String {
    if !(0.0..1e9).contains(&seconds) {
        return "-".to_owned();
    }
    let seconds = seconds.round() as u64;
    let (hours, minutes, seconds) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    match hours {
        0 => format!("{minutes}:{seconds:02}"),
        _ => format!("{hours}:{minutes:02}:{seconds:02}"),
    }
}

#[cfg(test)]
mod tests;
