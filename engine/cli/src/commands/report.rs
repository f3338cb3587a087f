//! `onebox report`: shows the curves of runs, on a page or as CSV.

use super::{CommandError, code, may_write, print, say, write_output};
use crate::report::curves::{CSV, Curves, csv};
use crate::report::page::{BEGINNING, page};
use files::names::METRICS;
use files::output::Output;
use files::path_text::PathText;
use files::shell::quoted_path;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Show the curves of runs on one page
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("to").args(["output", "csv"]).required(true).multiple(true))]
pub(super) struct ReportArgs {
    /// Directories of runs, such as runs/mine; the runs may still train
    #[arg(required_unless_present = "csv", value_name = "RUN")]
    runs: Vec<PathBuf>,
    /// Page to write: one file that loads nothing else
    #[arg(short, long, value_name = "PAGE.html")]
    output: Option<PathBuf>,
    /// Write a CSV row for each step and evaluation to FILE, or to stdout without FILE or with `-`
    #[arg(long, value_name = "FILE", num_args = 0..=1)]
    csv: Option<Option<PathBuf>>,
}

const PAGE: Output = Output { what: "report", beginning: BEGINNING };
const TABLE: Output = Output { what: "table", beginning: CSV };

pub(super) fn run(args: &ReportArgs) -> Result<(), CommandError> {
    let table = args.csv.as_ref().and_then(Option::as_ref).filter(|path| path.as_os_str() != "-");
    if args.runs.is_empty() {
        return Err(no_run(table.map(PathBuf::as_path)));
    }
    if let Some(path) = &args.output {
        may_write(PAGE, path)?;
    }
    if let Some(path) = table {
        may_write(TABLE, path)?;
    }
    let names = names(&args.runs);
    let read =
        |(dir, name): (&PathBuf, String)| Curves::read(dir, name).map_err(|e| unread(dir, &e));
    let runs = args.runs.iter().zip(names).map(read).collect::<Result<Vec<_>, _>>()?;
    if let Some(path) = &args.output {
        write_output(PAGE, path, &page(&runs, files::VERSION))?;
        say(&format!("wrote {}", PathText(path)));
    }
    match (&args.csv, table) {
        (_, Some(path)) => write_output(TABLE, path, &csv(&runs)),
        (Some(_), None) => print(&csv(&runs)),
        (None, _) => Ok(()),
    }
}

/// Error about a missing run: `--csv` uses the run after it as its output file.
fn no_run(table: Option<&Path>) -> CommandError {
    let why = match table {
        Some(path) => format!(
            "no run is named: `--csv {quoted}` writes to a file called {path}. For a run called {path} say `onebox report {quoted} --csv`",
            path = PathText(path),
            quoted = quoted_path(path)
        ),
        None => "no run is named: say `onebox report RUN --csv`".into(),
    };
    CommandError::new(code::USAGE, why)
}

fn unread(dir: &Path, error: &std::io::Error) -> CommandError {
    let metrics = dir.join(METRICS);
    match error.kind() {
        ErrorKind::NotFound | ErrorKind::NotADirectory => {
            let why = format!(
                "{}: no run is there (no {METRICS}); name the directory of a run",
                PathText(dir)
            );
            CommandError::new(code::NO_RUN_DIR, why)
        }
        _ => CommandError::new(code::IO, format!("cannot read {}: {error}", PathText(&metrics))),
    }
}

/// Last parts of the paths, or whole paths if two runs would have one name.
fn names(runs: &[PathBuf]) -> Vec<String> {
    let real = |run: &PathBuf| run.canonicalize().unwrap_or_else(|_| run.clone());
    let whole = |run: &PathBuf| run.to_string_lossy().into_owned();
    let name = |run: &PathBuf| Some(real(run).file_name()?.to_string_lossy().into_owned());
    let last = runs.iter().map(|run| name(run).unwrap_or_else(|| whole(run)));
    let last: Vec<String> = last.collect();
    let twice = (1..last.len()).any(|i| last[..i].contains(&last[i]));
    if twice { runs.iter().map(whole).collect() } else { last }
}
