//! Progress of a training run on stderr: lines that stay the same for `grep`. On a terminal, lines
//! have only the fields that fit, and a status is below. `run` reports every step; this module
//! chooses the steps to show. It cannot fail: a closed stderr loses the lines, not the run.

use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use crate::report::{colour, stderr};

/// Number of steps that are always shown, counted from the start of this process.
const FIRST_STEPS: u64 = 3;
/// Time between plain lines, after the first steps.
const INTERVAL: Duration = Duration::from_secs(2);
/// Time between two drawings of the status.
const REDRAW: Duration = Duration::from_millis(100);

/// The state of a run after a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepLine {
    /// Number of the step, from 1.
    pub step: u64,
    /// Number of steps of the run.
    pub steps: u64,
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
    pub ahead: Option<[u64; 3]>,
    /// Seconds to the end of the run; not finite if unknown.
    pub eta_seconds: f64,
}

/// One line with as many fields as fit into `width` columns. Fields keep this order, and "-" stands
/// for a missing value:
/// `step   120/400  loss 2.4312  norm 0.83  lr 1.9e-3  scale 65536  12.3 ktok/s
/// 8.1 GFLOP/s (model)  mem 41.2/256 MiB  overlap 63%  skipped 0  eta 0:42`.
/// In a run with speculative updates, `ahead 110 committed 7 redone 3 not tried` precedes `eta`.
fn fitted(line: &StepLine, width: usize) -> String {
    let fields = fields(line);
    let up_to = |most: u8| {
        let kept = fields.iter().filter(|(rank, _)| *rank <= most);
        kept.map(|(_, text)| text.as_str()).collect::<Vec<_>>().join("  ")
    };
    let fits = |text: &String| text.chars().count() <= width;
    let text = (0..=LAST).rev().map(up_to).find(fits);
    text.unwrap_or_else(|| cut(&up_to(0), width))
}

/// Rank of the fields that are left out first if there is no room for all.
const LAST: u8 = 10;

/// Fields in their order, each with its rank.
fn fields(line: &StepLine) -> Vec<(u8, String)> {
    let (used, limit) = line.device_memory;
    let or_dash = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
    let ahead = line.ahead.map(|[committed, redone, no]| {
        format!("ahead {committed} committed {redone} redone {no} not tried")
    });
    let mut fields = vec![
        (0, format!("step {:>5}/{}", line.step, line.steps)),
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
    fields.extend(ahead.map(|text| (LAST, text)));
    fields.push((2, format!("eta {}", clock(line.eta_seconds))));
    fields
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
    /// Time of the last line about the progress of an evaluation.
    evaluated: Option<Instant>,
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

    /// Reports a step; shows first, last and newly skipped steps, and one about every two seconds.
    pub fn step(&mut self, line: &StepLine) {
        self.step_at(line, Instant::now());
    }

    /// Reports an evaluation in a line below the line of its step.
    pub fn eval(&mut self, step: u64, steps: u64, loss: f32, whole: bool, sets: &[(String, f64)]) {
        let of = if whole { "" } else { "  over a part" };
        let sets = sets.iter().map(|(name, loss)| format!("  {name} {}", fixed(*loss, 4)));
        let sets: String = sets.collect();
        self.message(&format!("eval {step:>5}/{steps}  loss {}{sets}{of}", fixed(loss.into(), 4)));
    }

    /// Reports the progress of an evaluation after a step.
    pub fn evaluating(&mut self, steps: ProgressCount, batches: ProgressCount) {
        self.evaluating_at(steps, batches, Instant::now());
    }

    fn evaluating_at(&mut self, steps: ProgressCount, batches: ProgressCount, now: Instant) {
        let ProgressCount { done, of } = batches;
        let text = format!("eval {:>5}/{}  batch {done}/{of}", steps.done, steps.of);
        if self.on_terminal {
            return self.draw(steps, now, move |width| cut(&text, width));
        }
        let since = self.evaluated.map_or(INTERVAL, |then| now.saturating_duration_since(then));
        if since >= INTERVAL {
            self.evaluated = Some(now);
            self.message(&text);
        }
    }

    /// Shows any other line, between the lines of steps.
    pub fn message(&mut self, text: &str) {
        if let Some(line) = self.pending.take() {
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
        let due = self.shown.is_none_or(|(then, shown)| {
            now.saturating_duration_since(then) >= INTERVAL || line.skipped > shown.skipped
        });
        if due || self.reported <= FIRST_STEPS || line.step >= line.steps {
            self.show(line, now);
        } else {
            self.pending = Some(*line);
        }
        if self.on_terminal {
            let line = *line;
            let steps = ProgressCount { done: line.step, of: line.steps };
            self.draw(steps, now, move |width| fitted(&line, width));
        }
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
        let width = if self.on_terminal { stderr::width() } else { usize::MAX };
        if let Some(lines) = &mut self.lines {
            write_line(lines, &fitted(line, width));
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
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    const LINE: StepLine = StepLine {
        step: 120,
        steps: 400,
        loss: 2.4312,
        grad_norm: 0.83,
        loss_scale: Some(65536.0),
        lr: 1.9e-3,
        tokens_per_second: 12_300.0,
        flops_per_second: 8.1e9,
        device_memory: (43_201_331, 256 << 20),
        overlap: Some(0.63),
        skipped: 0,
        ahead: None,
        eta_seconds: 42.0,
    };

    /// Text of each write.
    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<String>>>);

    impl Write for Log {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().push(String::from_utf8(bytes.to_vec()).unwrap());
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Steps whose lines were written.
    fn steps(log: &Log) -> Vec<u64> {
        let step =
            |line: &String| line.split(['/', ' ']).find_map(|word| word.parse().ok()).unwrap();
        log.0.lock().unwrap().iter().map(step).collect()
    }

    fn format_line(line: &StepLine) -> String {
        fitted(line, usize::MAX)
    }

    fn plain() -> (Progress, Log) {
        let log = Log::default();
        (Progress::to_writer(Box::new(log.clone())), log)
    }

    #[test]
    fn a_line_has_all_fields_in_their_order() {
        assert_eq!(
            format_line(&LINE),
            "step   120/400  loss 2.4312  norm 0.83  lr 1.9e-3  scale 65536  12.3 ktok/s  \
             8.1 GFLOP/s (model)  mem 41.2/256 MiB  overlap 63%  skipped 0  eta 0:42"
        );
    }

    #[test]
    fn a_line_says_what_became_of_updates_ahead_of_the_decision() {
        let line = format_line(&StepLine { ahead: Some([110, 7, 3]), ..LINE });
        let end = "skipped 0  ahead 110 committed 7 redone 3 not tried  eta 0:42";
        assert!(line.ends_with(end), "{line}");
    }

    #[test]
    fn a_terminal_gets_the_fields_that_fit_it() {
        let line = |width| fitted(&LINE, width);
        assert_eq!(line(149), format_line(&LINE));
        assert_eq!(
            line(140),
            "step   120/400  loss 2.4312  norm 0.83  lr 1.9e-3  scale 65536  12.3 ktok/s  \
             8.1 GFLOP/s (model)  mem 41.2/256 MiB  eta 0:42"
        );
        assert_eq!(
            line(80),
            "step   120/400  loss 2.4312  norm 0.83  lr 1.9e-3  12.3 ktok/s  eta 0:42"
        );
        assert_eq!([line(30), line(7)], ["step   120/400  loss 2.4312", "step   "]);
        let skipped = fitted(&StepLine { skipped: 3, ..LINE }, 60);
        assert_eq!(skipped, "step   120/400  loss 2.4312  skipped 3  eta 0:42");
        for width in 0..200 {
            let shown =
                status(ProgressCount { done: 120, of: 400 }, width, |left| fitted(&LINE, left));
            assert!(shown.chars().count() <= width && line(width).len() <= width, "{shown}");
        }
        let shown = status(ProgressCount { done: 120, of: 400 }, 80, |left| fitted(&LINE, left));
        assert_eq!(
            shown,
            "███░░░░░░░  30%  step   120/400  loss 2.4312  norm 0.83  12.3 ktok/s  eta 0:42"
        );
    }

    #[test]
    fn a_broken_loss_is_seen_and_missing_values_are_dashes() {
        let line = StepLine {
            loss: f32::NAN,
            grad_norm: f32::INFINITY,
            loss_scale: None,
            tokens_per_second: f64::NAN,
            overlap: None,
            eta_seconds: f64::INFINITY,
            ..LINE
        };
        assert_eq!(
            format_line(&line),
            "step   120/400  loss nan  norm inf  lr 1.9e-3  scale -  nan tok/s  \
             8.1 GFLOP/s (model)  mem 41.2/256 MiB  overlap -  skipped 0  eta -"
        );
    }

    #[test]
    fn rates_take_the_prefix_that_leaves_three_digits() {
        for (value, text) in [
            (0.0, "0.0 "),
            (999.9, "999.9 "),
            (999.96, "1.0 k"),
            (1.25e6, "1.2 M"),
            (9.8e12, "9.8 T"),
            (2.1e15, "2.1 P"),
            (5e19, "50000.0 P"),
        ] {
            assert_eq!(si(value), text);
        }
    }

    #[test]
    fn memory_is_in_the_unit_of_the_limit() {
        assert_eq!(memory(24_589_934_592, 34_037_983_641), "22.9/31.7 GiB");
        assert_eq!(memory(512 << 20, 1 << 30), "0.5/1 GiB");
        assert_eq!(memory(42 << 20, 1 << 30), "42 MiB/1 GiB");
        assert_eq!(memory(1536, 1 << 16), "1.5/64 KiB");
        assert_eq!(memory(0, 0), "0/0 B");
    }

    #[test]
    fn times_have_hours_only_when_needed() {
        for (seconds, text) in [
            (0.0, "0:00"),
            (59.6, "1:00"),
            (3599.0, "59:59"),
            (93_784.0, "26:03:04"),
            (f64::NAN, "-"),
            (-1.0, "-"),
        ] {
            assert_eq!(clock(seconds), text);
        }
    }

    #[test]
    fn small_and_large_norms_keep_their_digits() {
        for (value, text) in [(0.0, "0.00"), (0.004, "4.0e-3"), (99.5, "99.50"), (3e7, "3.0e7")] {
            assert_eq!(norm(value), text);
        }
    }

    #[test]
    fn plain_lines_come_for_the_first_steps_then_every_two_seconds_and_at_the_end() {
        let (mut progress, log) = plain();
        let start = Instant::now();
        for step in 1..=100 {
            let now = start + Duration::from_millis(100 * step);
            progress.step_at(&StepLine { step, steps: 100, ..LINE }, now);
        }
        progress.finish();
        assert_eq!(steps(&log), [1, 2, 3, 23, 43, 63, 83, 100]);
        assert!(log.0.lock().unwrap().iter().all(|line| line.ends_with('\n')));
    }

    #[test]
    fn a_skipped_step_is_shown_at_once() {
        let ((mut progress, log), now) = (plain(), Instant::now());
        for step in 1..=20 {
            let skipped = u64::from(step >= 10);
            progress.step_at(&StepLine { step, skipped, ..LINE }, now);
        }
        assert_eq!(steps(&log), [1, 2, 3, 10]);
    }

    #[test]
    fn an_evaluation_is_shown_below_its_step() {
        let ((mut progress, log), now) = (plain(), Instant::now());
        for step in 1..=10 {
            progress.step_at(&StepLine { step, ..LINE }, now);
        }
        progress.eval(10, 400, 2.5, true, &[]);
        progress.finish();
        assert_eq!(steps(&log), [1, 2, 3, 10, 10]);
        assert_eq!(log.0.lock().unwrap()[4], "eval    10/400  loss 2.5000\n");
    }

    #[test]
    fn an_evaluation_shows_how_far_it_is_every_two_seconds() {
        let (mut progress, log) = plain();
        let start = Instant::now();
        for done in 1..=100 {
            let now = start + Duration::from_millis(100 * done);
            progress.evaluating_at(
                ProgressCount { done: 10, of: 400 },
                ProgressCount { done, of: 200 },
                now,
            );
        }
        progress.eval(10, 400, 2.5, false, &[]);
        let lines = log.0.lock().unwrap();
        let shown = [1, 21, 41, 61, 81].map(|done| format!("eval    10/400  batch {done}/200\n"));
        assert_eq!(lines[..5], shown);
        assert_eq!(lines[5], "eval    10/400  loss 2.5000  over a part\n");
    }

    #[test]
    fn a_run_cut_short_ends_with_its_last_step() {
        let ((mut progress, log), now) = (plain(), Instant::now());
        (1..=10).for_each(|step| progress.step_at(&StepLine { step, ..LINE }, now));
        progress.finish();
        progress.finish();
        assert_eq!(steps(&log), [1, 2, 3, 10]);
    }

    #[test]
    fn nothing_is_shown_when_quiet_and_a_closed_stream_is_ignored() {
        struct ClosedStream;
        impl Write for ClosedStream {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }

            fn flush(&mut self) -> io::Result<()> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
        }
        let closed = Progress::to_writer(Box::new(ClosedStream));
        for mut progress in [closed, Progress::on_stderr(true)] {
            progress.step(&LINE);
            progress.eval(120, 400, f32::NAN, false, &[]);
            progress
                .evaluating(ProgressCount { done: 120, of: 400 }, ProgressCount { done: 1, of: 2 });
            progress.message("text");
            progress.finish();
        }
    }
}
