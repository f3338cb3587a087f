//! `metrics.jsonl`: one JSON object per line, with one line after each step.
//!
//! Each line is one write of an `AppendFile`. If the run has event files for TensorBoard, its steps
//! and evaluations also go there.

pub use crate::append_file::MetricsError;
use crate::append_file::{AppendFile, Pieces};
use crate::run::Difference;
use crate::tensorboard::Events;
use files::directory::Directory;
use files::held::LockedRunDir;
use files::input;
use files::names::{DAMAGED, METRICS};
use files::path_text::ShownPath;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::sync::Arc;

mod gaps;

use offload::SpeculationOutcome;
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};

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
        #[serde(skip_serializing_if = "Option::is_none")]
        ahead: Option<&'static str>,
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
            let length = if last_step == 0 { 0 } else { keep(&file, dir, last_step)? };
            if file.metadata()?.len() > length {
                file.set_len(length)?;
            }
            // Also syncs the file's name: a checkpoint on the disk needs the lines of its steps.
            dir.sync()?;
            Ok((file, length))
        };
        let (file, length) = open().map_err(failed)?;
        Ok(Self { lines: AppendFile::new(run, name, Pieces::Lines, file, length), events: None })
    }

    /// Also writes steps and evaluations to `events`.
    pub fn and(self, events: Option<Events>) -> Self {
        Self { events, ..self }
    }

    /// Appends a step, and the outcome of its speculative updates if the run has them.
    pub fn step(&mut self, step: &StepMetrics, ahead: Option<SpeculationOutcome>) {
        let ahead = ahead.map(|ahead| match ahead {
            SpeculationOutcome::None => "no",
            SpeculationOutcome::Committed => "committed",
            SpeculationOutcome::Redone => "redone",
        });
        self.write(&Line::Step { step, ahead });
        if let Some(events) = &mut self.events {
            events.scalars(step.step, &step.curves());
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
        let json = serde_json::to_vec(line);
        let mut bytes = json.unwrap_or_else(|e| unreachable!("a line that is no JSON: {e}"));
        bytes.push(b'\n');
        self.lines.write(&bytes);
    }
}

/// Seconds of the median step in a `metrics.jsonl`. The first two steps are a warm-up and do not
/// count. `None` if there is no other step.
pub fn median_step(text: &str) -> Option<f64> {
    let step = |line: &str| {
        let line: serde_json::Value = serde_json::from_str(line).ok()?;
        let is_step = line["kind"] == "step" && line["step"].as_u64()? > 2;
        is_step.then(|| line["step_seconds"].as_f64()).flatten()
    };
    median(text.lines().filter_map(step))
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

/// Bytes of the lines up to `last_step` in `file`. If any line is damaged, keeps a copy of all
/// lines. Warns of steps without a line.
fn keep(file: &File, dir: &Directory, last_step: u64) -> io::Result<u64> {
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
    Ok(kept as u64)
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::path::{Path, PathBuf};

    fn step(step: u64) -> StepMetrics {
        StepMetrics {
            step,
            loss: 2.4312,
            grad_norm: 0.1,
            loss_scale: 65536.0,
            lr: 6e-4,
            step_seconds: 0.25,
            tokens_per_second: 4096.0,
            skipped: false,
            tokens: 1024 * step,
            skipped_total: 0,
            device_memory: 4096,
            host_memory: 8192,
            targets: None,
            documents: None,
            padding: None,
            verified: None,
        }
    }

    /// A path in a new folder.
    fn file() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        (folder, path)
    }

    /// Opens the file `path` in a folder that is not locked.
    fn open(path: &Path, last_step: u64) -> Result<MetricsWriter, MetricsError> {
        let failed = |source| MetricsError { path: path.to_owned(), source };
        let run = LockedRunDir::unlocked(path.parent().unwrap()).map_err(failed)?;
        MetricsWriter::named(&run, path.file_name().unwrap().to_str().unwrap(), last_step)
    }

    /// Warnings of `write`.
    fn warnings(write: impl FnOnce()) -> String {
        let (_folder, path) = file();
        let log = Arc::new(File::create(&path).unwrap());
        let subscriber = tracing_subscriber::fmt().with_writer(log).finish();
        tracing::subscriber::with_default(subscriber, write);
        fs::read_to_string(path).unwrap()
    }

    #[test]
    fn lines_have_the_keys_of_the_contract_in_order_and_short_floats() {
        let (_folder, path) = file();
        let mut metrics = open(&path, 0).unwrap();
        metrics.step(&step(1), None);
        metrics.eval(1, 2.5, true, &[]);
        metrics.checkpoint_failed(1, "no space");
        metrics.differs(1, &[Difference { rank: 2, place: "the loss".into() }]);
        metrics.end(1, "00ff");
        let expected = concat!(
            r#"{"kind":"step","step":1,"loss":2.4312,"grad_norm":0.1,"loss_scale":65536.0,"#,
            r#""lr":0.0006,"step_seconds":0.25,"tokens_per_second":4096.0,"skipped":false,"#,
            r#""tokens":1024,"skipped_total":0,"device_memory":4096,"host_memory":8192}"#,
            "\n",
            r#"{"kind":"eval","step":1,"loss":2.5,"whole":true}"#,
            "\n",
            r#"{"kind":"checkpoint_failed","step":1,"error":"no space"}"#,
            "\n",
            r#"{"kind":"differs","step":1,"places":[{"rank":2,"place":"the loss"}]}"#,
            "\n",
            r#"{"kind":"end","step":1,"state_hash":"00ff"}"#,
            "\n"
        );
        assert_eq!(fs::read_to_string(path).unwrap(), expected);
    }

    #[test]
    fn what_is_not_finite_or_not_there_is_null() {
        let (_folder, path) = file();
        let mut metrics = open(&path, 0).unwrap();
        let broken = StepMetrics {
            loss: f64::NAN,
            grad_norm: f64::INFINITY,
            loss_scale: f32::NAN,
            ..step(1)
        };
        metrics.step(&broken, None);
        metrics.eval(1, f64::NAN, false, &[]);
        let text = fs::read_to_string(path).unwrap();
        assert!(text.contains(r#""loss":null,"grad_norm":null,"loss_scale":null,"lr":"#), "{text}");
        assert!(
            text.ends_with("{\"kind\":\"eval\",\"step\":1,\"loss\":null,\"whole\":false}\n"),
            "{text}"
        );
    }

    #[test]
    fn a_full_disk_drops_lines_with_one_warning_and_never_fails() {
        let mut metrics = open(Path::new("/dev/full"), 0).unwrap();
        let log = warnings(|| (1..=3).for_each(|i| metrics.step(&step(i), None)));
        assert_eq!(metrics.dropped(), 3);
        assert_eq!(log.matches("WARN").count(), 1, "{log}");
        assert!(log.contains("/dev/full"), "{log}");
    }

    #[test]
    fn a_half_written_line_is_cut_off_before_the_next() {
        let (_folder, path) = file();
        let mut metrics = open(&path, 0).unwrap();
        metrics.eval(1, 2.5, true, &[]);
        (&metrics.lines.file).write_all(b"{\"kind\":\"ev").unwrap();
        metrics.lines.torn = true; // the state after a failed write
        metrics.eval(3, 2.25, true, &[]);
        let text = fs::read_to_string(path).unwrap();
        let lines = [(1, 2.5), (3, 2.25)].map(|(step, loss)| {
            format!("{{\"kind\":\"eval\",\"step\":{step},\"loss\":{loss},\"whole\":true}}\n")
        });
        let expected = lines.concat();
        assert_eq!(text, expected);
    }

    #[test]
    fn resuming_keeps_the_lines_up_to_the_checkpoint_and_drops_the_rest() {
        let (_folder, path) = file();
        let mut metrics = open(&path, 0).unwrap();
        metrics.step(&step(1), None);
        metrics.eval(1, 2.75, true, &[]);
        metrics.step(&step(2), None);
        // The save of step 1 fails after step 2: it runs in the background.
        metrics.checkpoint_failed(1, "no space");
        let until_two = fs::read(&path).unwrap();
        metrics.eval(2, 2.5, true, &[]);
        metrics.step(&step(3), None);
        metrics.end(3, "00");
        let all = fs::read(&path).unwrap();
        // A file that is torn anywhere after step 2 is restored to its state at step 2.
        for length in until_two.len()..=all.len() {
            fs::write(&path, &all[..length]).unwrap();
            open(&path, 2).unwrap();
            assert_eq!(fs::read(&path).unwrap(), until_two);
        }
        fs::write(&path, &all).unwrap();
        open(&path, 3).unwrap();
        assert!(all.starts_with(&fs::read(&path).unwrap()));
        assert!(!fs::read_to_string(&path).unwrap().contains("end"));
        open(&path, 0).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"");
    }

    #[test]
    fn a_damaged_line_costs_no_other_and_leaves_a_copy() {
        let (folder, path) = file();
        let mut metrics = open(&path, 0).unwrap();
        (1..=5).for_each(|number| metrics.step(&step(number), None));
        let copy = folder.path().join(DAMAGED);
        open(&path, 5).unwrap();
        assert!(!copy.exists());
        let damaged = fs::read_to_string(&path).unwrap().replacen("kind", "kinX", 3);
        let damaged = damaged.replacen("kinX", "kind", 2);
        fs::write(&path, &damaged).unwrap();
        let log = warnings(|| drop(open(&path, 4).unwrap()));
        let lines: Vec<&str> = damaged.split_inclusive('\n').collect();
        assert_eq!(fs::read_to_string(&path).unwrap(), lines[..4].concat());
        assert_eq!(fs::read_to_string(&copy).unwrap(), damaged);
        assert!(log.contains("line 3 is damaged"), "{log}");
    }

    #[test]
    fn a_run_is_finished_if_its_last_whole_line_is_an_end() {
        let end = b"{\"kind\":\"end\",\"step\":40,\"state_hash\":\"00\"}\n";
        assert_eq!(finished_step(end), Some(40));
        assert_eq!(finished_step(&[&end[..], b"{\"kind\":\"st"].concat()), Some(40));
        assert_eq!(finished_step(&[&end[..], b"{\"kind\":\"eval\",\"step\":41}\n"].concat()), None);
        assert_eq!(finished_step(&end[..end.len() - 1]), None);
        assert_eq!(finished_step(b""), None);
        assert_eq!(finished_step(b"\xff\n"), None);
    }

    #[test]
    fn a_file_that_cannot_be_opened_is_named() {
        let error = open(Path::new("/nowhere/metrics.jsonl"), 0).unwrap_err();
        assert!(error.to_string().starts_with("cannot write /nowhere/metrics.jsonl: "), "{error}");
    }
}
