//! `metrics.jsonl`: one JSON object per line, with one line after each step.
//!
//! The first line has the config of the run; so has a later line if a resumed run has another
//! config. Each line is one write of an `AppendFile`. If the run has event files for TensorBoard, its steps
//! and evaluations also go there.

pub use crate::append_file::MetricsError;
use crate::append_file::{AppendFile, Pieces};
use crate::run::{Difference, ExpertLoad};
use crate::tensorboard::Events;
use config::Config;
use files::directory::Directory;
use files::held::LockedRunDir;
use files::input;
use files::names::{DAMAGED, METRICS};
use files::path_text::ShownPath;
use files::utc::unix_seconds;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::sync::Arc;

mod gaps;
#[cfg(test)]
mod tests;

use offload::SpeculationOutcome;
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Metrics of a finished optimizer step: the keys of its line, in this order. A value that is not
/// finite becomes null.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct StepMetrics {
    /// Number of the step, from 1.
    pub step: u64,
    /// Mean loss over the global batch, in nats per token.
    pub loss: f64,
    /// Global norm of the unscaled gradient before clipping.
    pub grad_norm: f64,
    /// Loss scale that this step used; 1 without scaling.
    pub loss_scale: f32,
    /// Learning rate that this step used.
    pub lr: f32,
    /// Wall time of the step in seconds.
    pub step_seconds: f64,
    /// Tokens per second over all ranks.
    pub tokens_per_second: f64,
    /// Whether the update was skipped because a gradient was not finite.
    pub skipped: bool,
    /// Tokens trained on since step 1.
    pub tokens: u64,
    /// Number of skipped steps since step 1.
    pub skipped_total: u64,
    /// Planned bytes of memory on the fullest device.
    pub device_memory: u64,
    /// Bytes of host memory of this process, as the kernel counts them.
    pub host_memory: u64,
    /// Number of trained targets in the step; missing if all samples have the same number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub targets: Option<u64>,
    /// Number of documents in the step; missing if samples are windows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub documents: Option<u64>,
    /// Share of padding in the step's tokens, 0 to 1; missing if samples are windows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub padding: Option<f64>,
    /// Whether two runs of the step's passes gave the same bits; missing if the step ran once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verified: Option<bool>,
    /// Load of the experts; missing if the model has none.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub expert_load: Option<ExpertLoad>,
}

impl StepMetrics {
    /// Values by their names in TensorBoard. The part of a name before the slash is its group.
    fn curves(&self) -> [(&'static str, f32); 9] {
        [
            ("loss/train", self.loss as f32),
            ("optimizer/learning_rate", self.lr),
            ("optimizer/gradient_norm", self.grad_norm as f32),
            ("optimizer/loss_scale", self.loss_scale),
            ("optimizer/skipped_steps", self.skipped_total as f32),
            ("speed/tokens_per_second", self.tokens_per_second as f32),
            ("speed/step_seconds", self.step_seconds as f32),
            ("memory/device_bytes", self.device_memory as f32),
            ("memory/host_bytes", self.host_memory as f32),
        ]
    }
}

#[derive(Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
enum Line<'a> {
    Step {
        #[serde(flatten)]
        step: &'a StepMetrics,
        #[serde(rename = "ahead", skip_serializing_if = "Option::is_none")]
        speculation: Option<&'static str>,
    },
    Eval {
        step: u64,
        loss: f64,
        whole: bool,
        #[serde(skip_serializing_if = "BTreeMap::is_empty")]
        sets: BTreeMap<&'a str, f64>,
    },
    End {
        step: u64,
        state_hash: &'a str,
    },
    #[serde(rename = "checkpoint_failed")]
    CheckpointFailed {
        step: u64,
        error: &'a str,
    },
    Differs {
        step: u64,
        places: &'a [Difference],
    },
    /// Settings of the steps after `step`.
    Config {
        step: u64,
        onebox: &'a str,
        config: &'a Value,
    },
}

/// A line with the values that every line has at its end.
#[derive(Serialize)]
struct StampedLine<'a> {
    #[serde(flatten)]
    line: &'a Line<'a>,
    /// Epochs up to the step; missing if the samples are drawn at random.
    #[serde(skip_serializing_if = "Option::is_none")]
    epoch: Option<f64>,
    /// Seconds since 1970 when the line was written.
    time: f64,
}

impl Line<'_> {
    const fn step(&self) -> u64 {
        match self {
            Self::Step { step, .. } => step.step,
            Self::Eval { step, .. }
            | Self::End { step, .. }
            | Self::CheckpointFailed { step, .. }
            | Self::Differs { step, .. }
            | Self::Config { step, .. } => *step,
        }
    }
}

/// Keys of a line that are read back.
#[derive(Deserialize)]
struct LineHeader {
    kind: String,
    step: u64,
}

/// Largest size in bytes of a metrics file that is read: ten million steps.
pub const LONGEST_METRICS: u64 = 4 << 30;

/// The writer of `metrics.jsonl`.
#[derive(Debug)]
pub struct MetricsWriter {
    lines: AppendFile,
    events: Option<Events>,
    /// Epochs of one step, if the data has a known length.
    epochs_per_step: Option<f64>,
    /// Config of the last line of this kind.
    config: Option<Value>,
    /// Clock in seconds since 1970.
    pub(crate) clock: fn() -> f64,
}

impl MetricsWriter {
    /// Opens the file to append after `last_step`: 0 for a new run, the checkpoint's step for a
    /// resumed run. Removes the lines of later steps and an evaluation after `last_step`, since the
    /// run repeats them. Also removes an `end` and a torn last line. Warns of steps without a line.
    ///
    /// # Errors
    /// [`MetricsError`] if the file cannot be read or written.
    pub fn open(run: &Arc<LockedRunDir>, last_step: u64) -> Result<Self, MetricsError> {
        Self::named(run, METRICS, last_step)
    }

    fn named(run: &Arc<LockedRunDir>, name: &str, last_step: u64) -> Result<Self, MetricsError> {
        let failed = |source| MetricsError { path: run.called(name), source };
        let open = || {
            let dir = run.check()?;
            let file = dir.open_or_create(name, OFlags::APPEND)?;
            let kept =
                if last_step == 0 { KeptLines::default() } else { keep(&file, dir, last_step)? };
            let length = kept.bytes;
            if file.metadata()?.len() > length {
                file.set_len(length)?;
            }
            // Also syncs the file's name: a checkpoint on the disk needs the lines of its steps.
            dir.sync()?;
            Ok((file, kept))
        };
        let (file, kept) = open().map_err(failed)?;
        Ok(Self {
            lines: AppendFile::new(run, name, Pieces::Lines, file, kept.bytes),
            events: None,
            epochs_per_step: None,
            config: kept.config,
            clock: unix_seconds,
        })
    }

    /// Also writes the epoch of each line: a step is `epochs_per_step` of an epoch.
    pub fn with_epochs(self, epochs_per_step: Option<f64>) -> Self {
        Self { epochs_per_step, ..self }
    }

    /// Epochs up to `step`, rounded to a millionth.
    pub fn epoch(&self, step: u64) -> Option<f64> {
        self.epochs_per_step.map(|epochs| (1e6 * epochs * step as f64).round() / 1e6)
    }

    /// Appends the settings of the steps after `step`, unless the last such line has the same
    /// ones. Event files get them in any case, since each start has its own file.
    pub fn config(&mut self, step: u64, config: &Config) {
        // Through text, in which an f32 has its short form.
        let value = serde_json::to_string(config).and_then(|text| serde_json::from_str(&text));
        let value: Value = value.unwrap_or_else(|e| unreachable!("a config that is no JSON: {e}"));
        if let Some(events) = &mut self.events {
            events.settings(step, &config.to_ron(), &value);
        }
        if self.config.as_ref() != Some(&value) {
            let onebox = env!("CARGO_PKG_VERSION");
            self.write(&Line::Config { step, onebox, config: &value });
            self.config = Some(value);
        }
    }

    /// Also writes steps and evaluations to `events`.
    pub fn and(self, events: Option<Events>) -> Self {
        Self { events, ..self }
    }

    /// Appends a step, and the outcome of its speculative updates if the run has them.
    pub fn step(&mut self, step: &StepMetrics, speculation: Option<SpeculationOutcome>) {
        let speculation = speculation.map(|speculation| match speculation {
            SpeculationOutcome::None => "no",
            SpeculationOutcome::Committed => "committed",
            SpeculationOutcome::Redone => "redone",
        });
        self.write(&Line::Step { step, speculation });
        let epoch = self.epoch(step.step).map(|epoch| ("progress/epoch", epoch as f32));
        if let Some(events) = &mut self.events {
            let of_experts = step.expert_load.iter().flat_map(ExpertLoad::curves);
            let curves: Vec<_> = step.curves().into_iter().chain(epoch).chain(of_experts).collect();
            events.scalars(step.step, &curves);
        }
    }

    /// Appends an evaluation after `step`. `loss`: mean over the evaluated tokens. `whole`: the
    /// evaluated tokens are the whole validation set. `sets`: mean of each data set, if there are
    /// several.
    pub fn eval(&mut self, step: u64, loss: f64, whole: bool, sets: &[(String, f64)]) {
        let by_name = sets.iter().map(|(name, loss)| (name.as_str(), *loss)).collect();
        self.write(&Line::Eval { step, loss, whole, sets: by_name });
        if let Some(events) = &mut self.events {
            events.scalars(step, &[("loss/eval", loss as f32)]);
            for (name, loss) in sets {
                events.scalars(step, &[(&format!("loss/eval/{name}"), *loss as f32)]);
            }
        }
    }

    /// Appends that the checkpoint of `step` could not be saved, and why.
    pub fn checkpoint_failed(&mut self, step: u64, error: &str) {
        self.write(&Line::CheckpointFailed { step, error });
    }

    /// Appends that two runs of a step's passes gave different bits, and where.
    pub fn differs(&mut self, step: u64, places: &[Difference]) {
        self.write(&Line::Differs { step, places });
    }

    /// Appends the last line of a finished run and syncs the file to the disk.
    pub fn end(&mut self, step: u64, state_hash: &str) {
        self.write(&Line::End { step, state_hash });
        self.sync();
    }

    /// Syncs all lines to the disk. A failure is a warning.
    pub fn sync(&mut self) {
        self.lines.sync();
        if let Some(events) = &mut self.events {
            events.sync();
        }
    }

    /// Number of lines that could not be written.
    pub fn dropped(&self) -> u64 {
        self.lines.dropped
    }

    fn write(&mut self, line: &Line<'_>) {
        let time = (1e3 * (self.clock)()).round() / 1e3;
        let json = serde_json::to_vec(&StampedLine { line, epoch: self.epoch(line.step()), time });
        let mut bytes = json.unwrap_or_else(|e| unreachable!("a line that is no JSON: {e}"));
        bytes.push(b'\n');
        self.lines.write(&bytes);
    }
}

/// Seconds of the steps in a `metrics.jsonl`, in their order. The first two steps of a run are a warm-up
/// and are left out.
pub fn step_seconds(text: &str) -> Vec<f64> {
    let step = |line: &str| {
        let line: Value = serde_json::from_str(line).ok()?;
        let is_step = line["kind"] == "step" && line["step"].as_u64()? > 2;
        is_step.then(|| line["step_seconds"].as_f64()).flatten()
    };
    text.lines().filter_map(step).collect()
}

/// The config of the last start in a `metrics.jsonl`; `None` if it has none.
pub fn config_of(text: &str) -> Option<Value> {
    let config = |line: &str| {
        let mut line: Value = serde_json::from_str(line).ok()?;
        (line["kind"] == "config").then(|| line["config"].take())
    };
    text.lines().rev().find_map(config)
}

/// Step and loss of every complete line of a step. The loss is NaN if it was not finite.
pub fn losses(text: &[u8]) -> Vec<(u64, f64)> {
    #[derive(Deserialize)]
    struct Loss {
        kind: String,
        step: u64,
        loss: Option<f64>,
    }
    let lines = whole_lines(text).filter_map(|line| serde_json::from_slice::<Loss>(line).ok());
    let steps = lines.filter(|line| line.kind == "step");
    steps.map(|line| (line.step, line.loss.unwrap_or(f64::NAN))).collect()
}

/// Median of `values`; the upper of two middle values.
pub fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied()
}

/// Step of the `end` line, if this is the last complete line.
pub fn finished_step(text: &[u8]) -> Option<u64> {
    let last = whole_lines(text).last()?;
    let written: LineHeader = serde_json::from_slice(last).ok()?;
    (written.kind == "end").then_some(written.step)
}

/// Lines of an earlier start that a resumed run keeps.
#[derive(Default)]
struct KeptLines {
    bytes: u64,
    /// Config in the last of them that has one.
    config: Option<Value>,
}

/// The last config in `text`.
fn last_config(text: &[u8]) -> Option<Value> {
    #[derive(Deserialize)]
    struct ConfigLine {
        config: Value,
    }
    const KIND: &[u8] = b"{\"kind\":\"config\"";
    let lines = whole_lines(text).filter(|line| line.starts_with(KIND));
    let found = lines.last().map(serde_json::from_slice::<ConfigLine>)?.ok()?;
    Some(found.config)
}

/// Finds the lines up to `last_step` in `file`. If any line is damaged, keeps a copy of all
/// lines. Warns of steps without a line.
fn keep(file: &File, dir: &Directory, last_step: u64) -> io::Result<KeptLines> {
    let text = input::rest(file, LONGEST_METRICS)?;
    let damaged =
        whole_lines(&text).position(|line| serde_json::from_slice::<LineHeader>(line).is_err());
    if let Some(number) = damaged {
        dir.create(DAMAGED)?.write_all(&text)?;
        let (path, copy) = (dir.called(METRICS), dir.called(DAMAGED));
        let (path, number, copy) = (path.shown(), number + 1, copy.shown());
        tracing::warn!(
            "{path}: line {number} is damaged; it stays, and a copy of all lines is in {copy}"
        );
    }
    let kept = kept(&text, last_step);
    if let Some(gaps) = gaps::words(&text[..kept], gaps::forked_at(dir), last_step) {
        let path = dir.called(METRICS);
        tracing::warn!("{}: {gaps}; the run goes on after step {last_step}", path.shown());
    }
    Ok(KeptLines { bytes: kept as u64, config: last_config(&text[..kept]) })
}

/// Bytes before the first line of a step after `last_step`. An unreadable line counts as an earlier
/// line.
fn kept(text: &[u8], last_step: u64) -> usize {
    let stays = |line: &&[u8]| {
        let written = serde_json::from_slice::<LineHeader>(line);
        written.map_or(true, |line| match line.kind.as_str() {
            "end" => false,
            "eval" => line.step < last_step,
            _ => line.step <= last_step,
        })
    };
    whole_lines(text).take_while(stays).map(<[u8]>::len).sum()
}

/// Complete lines of `text` with their newlines. A last line without a newline is left out.
fn whole_lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split_inclusive(|&byte| byte == b'\n').filter(|line| line.ends_with(b"\n"))
}
