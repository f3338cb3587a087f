//! `train --trace FILE --trace-steps A..B`: traces the ops of a run.

use super::{CommandError, code, may_write, say, unwritten};
use crate::report::trace::{OUTPUT, measured};
use device::Trace;
use files::path_text::PathText;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Options for a trace of a run's ops.
#[derive(Debug, clap::Args)]
pub(super) struct TraceArgs {
    /// Write a Chrome trace of all ops in the steps of --trace-steps, in the format of
    /// `simulate --trace`
    #[arg(long, value_name = "FILE", requires = "trace_steps")]
    trace: Option<PathBuf>,
    /// Steps to trace, such as 5..7 (both included)
    #[arg(long, value_name = "A..B", value_parser = steps, requires = "trace")]
    trace_steps: Option<RangeInclusive<u64>>,
}

/// Parses `A..B`, both included.
fn steps(text: &str) -> Result<RangeInclusive<u64>, String> {
    let ends = text.split_once("..").and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
    match ends {
        Some((first, last)) if 1 <= first && first <= last => Ok(first..=last),
        _ => Err("expected two steps from 1 on, such as 5..7".into()),
    }
}

/// Formats the steps as in the argument of `--trace-steps`.
fn words(steps: &RangeInclusive<u64>) -> String {
    format!("{}..{}", steps.start(), steps.end())
}

impl TraceArgs {
    /// Refuses, before the run, steps after the run's step `last` and a file that cannot be
    /// written. The file may be in the run's directory, which is created later.
    pub(super) fn check(&self, run_dir: Option<&Path>, last: u64) -> Result<(), CommandError> {
        let (Some(path), Some(steps)) = (&self.trace, &self.trace_steps) else { return Ok(()) };
        if *steps.start() > last {
            let steps = words(steps);
            let why = format!(
                "--trace-steps {steps}: the last step of the run is {last} (train.steps), so nothing would be traced"
            );
            return Err(CommandError::new(code::CONFIG, why));
        }
        if run_dir.is_some_and(|dir| path.parent() == Some(dir) && !dir.exists()) {
            return Ok(());
        }
        may_write(OUTPUT, path)
    }

    /// Creates the recorder of the run's ops, if a trace is requested.
    pub(super) fn start(&self) -> Option<Arc<Trace>> {
        self.trace_steps.clone().map(|steps| Arc::new(Trace::of_steps(steps)))
    }

    /// Writes the trace after the run, even if the run failed.
    pub(super) fn write(&self, trace: Option<&Trace>) -> Result<(), CommandError> {
        let (Some(path), Some(steps), Some(trace)) = (&self.trace, &self.trace_steps, trace) else {
            return Ok(());
        };
        if trace.spans().is_empty() {
            // The run started after these steps, or ended before them.
            say(&format!(
                "warning: nothing was traced, and {} was not written: the run came to no step of {}",
                PathText(path),
                words(steps)
            ));
            return Ok(());
        }
        measured(path, trace).map_err(|e| unwritten(path, &e))
    }
}

/// Result of a traced run: an error of the trace does not hide an error of the run.
pub(super) fn after(
    ended: Result<(), CommandError>,
    traced: Result<(), CommandError>,
) -> Result<(), CommandError> {
    match (ended, traced) {
        (Err(ended), Err(traced)) => {
            traced.warn();
            Err(ended)
        }
        (ended, traced) => ended.and(traced),
    }
}
