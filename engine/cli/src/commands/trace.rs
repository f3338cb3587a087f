//! `train --trace FILE --trace-steps A..B`.

use super::{CommandError, code, may_write, say, unwritten};
use crate::report::trace::{OUTPUT, measured};
use device::Trace;
use files::path_text::PathText;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// When ops of a real run ran.
#[derive(Debug, clap::Args)]
pub(super) struct TraceArgs {
    /// Write when each op ran as a Chrome trace, like that of `simulate --trace`
    #[arg(long, value_name = "FILE", requires = "trace_steps")]
    trace: Option<PathBuf>,
    /// Steps to trace, such as 5..7 (both included)
    #[arg(long, value_name = "A..B", value_parser = steps, requires = "trace")]
    trace_steps: Option<RangeInclusive<u64>>,
}

/// `A..B`, both included.
fn steps(text: &str) -> Result<RangeInclusive<u64>, String> {
    let ends = text.split_once("..").and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
    match ends {
        Some((first, last)) if 1 <= first && first <= last => Ok(first..=last),
        _ => Err("expected two steps from 1 on, such as 5..7".into()),
    }
}

/// As they were given.
fn words(steps: &RangeInclusive<u64>) -> String {
    format!("{}..{}", steps.start(), steps.end())
}

impl TraceArgs {
    /// Refuses what cannot be traced, in a run that ends with step `last`, or written, before the run. It may be written into
    /// the run's directory, which is made later.
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

    /// What the run notes its ops in.
    pub(super) fn start(&self) -> Option<Arc<Trace>> {
        self.trace_steps.clone().map(|steps| Arc::new(Trace::of_steps(steps)))
    }

    /// After the run, whether it ended well or not.
    pub(super) fn write(&self, trace: Option<&Trace>) -> Result<(), CommandError> {
        let (Some(path), Some(steps), Some(trace)) = (&self.trace, &self.trace_steps, trace) else {
            return Ok(());
        };
        if trace.spans().is_empty() {
            // It went on after them, or ended before.
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

/// How a run has ended that was traced: a trace that is not written hides none of it.
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
