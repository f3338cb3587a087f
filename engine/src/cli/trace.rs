//! `train --trace FILE --trace-steps A..B`.

use super::exit::Failed;
use super::{may_write, unwritten};
use crate::trace::{OUTPUT, measured};
use device::cpu::Trace;
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

impl TraceArgs {
    /// Refuses what cannot be traced or written, before the run. It may be written into the run's directory, which is made
    /// later.
    pub(super) fn check(&self, run_dir: Option<&Path>) -> Result<(), Failed> {
        let Some(path) = &self.trace else { return Ok(()) };
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
    pub(super) fn write(&self, trace: Option<&Trace>) -> Result<(), Failed> {
        let (Some(path), Some(trace)) = (&self.trace, trace) else { return Ok(()) };
        measured(path, trace).map_err(|e| unwritten(path, &e))
    }
}
