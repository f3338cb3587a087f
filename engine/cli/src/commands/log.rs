//! The program's log on stderr: warnings, and on request its actions and their durations.

use crate::report::message;
use clap::error::ErrorKind;
use clap::{CommandFactory, ValueEnum};
use files::foreign_text::foreign;
use std::ffi::OsStr;
use std::fmt;
use std::time::Instant;
use tracing_subscriber::field::MakeExt;
use tracing_subscriber::filter::LevelFilter;
use tracing_subscriber::fmt::format::{FmtSpan, Writer, debug_fn};
use tracing_subscriber::fmt::time::FormatTime;

/// Environment variable with the log level of every command.
const VARIABLE: &str = "ONEBOX_LOG";

/// Level of detail; each level includes the levels before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub(super) enum Level {
    /// Errors that end the run.
    Error,
    /// Warnings for the user: the default.
    #[default]
    Warn,
    /// Decisions and their reasons: placement, collectives.
    Info,
    /// Phases of a run, each with its time.
    Debug,
    /// Everything.
    Trace,
}

#[derive(Debug, clap::Args)]
pub(super) struct LogArgs {
    /// Level of detail of the program's log [default: the value of ONEBOX_LOG, or else warn]
    #[arg(long, global = true, value_name = "LEVEL")]
    log: Option<Level>,
    /// Same as --log info; if given twice, same as --log debug
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    verbose: u8,
}

impl LogArgs {
    /// The more detailed level of both options; without them, the level in ONEBOX_LOG.
    fn level(&self, set: Option<&OsStr>) -> Result<Level, String> {
        let verbose = [None, Some(Level::Info), Some(Level::Debug)];
        let requested = self.log.max(verbose[usize::from(self.verbose.min(2))]);
        let Some(set) = set.filter(|set| requested.is_none() && !set.is_empty()) else {
            return Ok(requested.unwrap_or_default());
        };
        let text = set.to_string_lossy();
        Level::from_str(&text, true).map_err(|_| {
            let all = Level::value_variants().iter().filter_map(ValueEnum::to_possible_value);
            let all: Vec<String> = all.map(|level| level.get_name().to_owned()).collect();
            format!("{VARIABLE} is `{}`; it takes {}", foreign(text), all.join(", "))
        })
    }

    pub(super) fn start(&self) {
        let level = self
            .level(std::env::var_os(VARIABLE).as_deref())
            .unwrap_or_else(|why| super::Cli::command().error(ErrorKind::InvalidValue, why).exit());
        let filter = match level {
            Level::Error => LevelFilter::ERROR,
            Level::Warn => LevelFilter::WARN,
            Level::Info => LevelFilter::INFO,
            Level::Debug => LevelFilter::DEBUG,
            Level::Trace => LevelFilter::TRACE,
        };
        let log = tracing_subscriber::fmt()
            .with_writer(crate::report::stderr::Log)
            .with_ansi(crate::report::colour::wanted(&std::io::stderr()))
            .with_target(false)
            .fmt_fields(debug_fn(message::field).delimited(" "))
            .with_max_level(filter)
            // A log that cannot be written, as on a full disk, must not end or panic a run.
            .log_internal_errors(false);
        // A log exists already only if this function is called twice.
        let _ = if level >= Level::Debug {
            log.with_timer(Uptime(Instant::now())).with_span_events(FmtSpan::CLOSE).try_init()
        } else {
            log.without_time().try_init()
        };
    }
}

/// Seconds since the start of the program.
struct Uptime(Instant);

impl FormatTime for Uptime {
    fn format_time(&self, w: &mut Writer<'_>) -> fmt::Result {
        write!(w, "{:10.6}", self.0.elapsed().as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_more_detailed_option_counts() {
        let level = |log, verbose| LogArgs { log, verbose }.level(None).unwrap();
        assert_eq!(level(None, 0), Level::Warn);
        assert_eq!(level(Some(Level::Error), 0), Level::Error);
        assert_eq!(level(Some(Level::Error), 1), Level::Info);
        assert_eq!(level(Some(Level::Trace), 1), Level::Trace);
        assert_eq!(level(None, 9), Level::Debug);
        let set = |log, text: &str| LogArgs { log, verbose: 0 }.level(Some(text.as_ref()));
        assert_eq!(set(None, "Debug"), Ok(Level::Debug));
        assert_eq!(set(Some(Level::Error), "debug"), Ok(Level::Error));
        let refused = "ONEBOX_LOG is `loud`; it takes error, warn, info, debug, trace";
        assert_eq!(set(None, "loud"), Err(refused.to_owned()));
    }
}
