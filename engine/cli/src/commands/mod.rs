//! The command line: arguments, verbs, exit codes. Data goes to stdout, messages to stderr.

mod bench;
mod boxes;
mod cache;
mod check;
mod checkpoint;
mod data;
mod doctor;
mod exit;
mod generate;
mod install;
mod keys;
mod largest;
mod log;
mod plan;
mod plot;
mod prepare;
mod processes;
mod report;
mod resume;
mod samples;
mod search;
mod signals;
mod simulate;
mod topology;
mod trace;
mod train;
mod weights;

use crate::report::{colour, message};
use clap::error::{ContextKind, ContextValue};
use clap::{Args, FromArgMatches, Parser, Subcommand};
use config::{BOX, Config, Further, LoadedConfig, find_box, load_and_look};
use device::numerics::SimdPath;
use engine::run::Watcher;
use exit::{CommandError, Failable, code};
use files::names::CONFIG;
use files::output::Output;
use files::path_text::{ShownPath, lines};
use files::shell::{quoted, quoted_path};
use layout::LocalMachine;
use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Trains transformer language models that are too large for the GPUs of one box.
#[derive(Debug, Parser)]
#[command(name = "onebox", version = files::VERSION, arg_required_else_help = true, after_help = exit::HELP)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
    #[command(flatten)]
    log: log::LogArgs,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Train a model
    Train(train::TrainArgs),
    /// Show how much of every memory a run needs; find the fastest layout
    Plan(plan::PlanArgs),
    /// Predict the time of a step on a described box
    Simulate(simulate::SimulateArgs),
    /// Show a box: NUMA nodes, GPUs, links, and the place of each rank
    Topology(topology::TopologyArgs),
    /// List the box descriptions that --box NAME accepts
    Boxes(boxes::BoxesArgs),
    /// Measure this machine: steps, copies, the update, matmuls
    Bench(bench::BenchArgs),
    /// Write text with a trained model
    Generate(generate::GenerateArgs),
    /// Show, verify, compare, reshard, export and import checkpoints
    #[command(subcommand)]
    Checkpoint(checkpoint::CheckpointVerb),
    /// Check and prepare data; show the samples that a model sees
    #[command(subcommand)]
    Data(DataVerb),
    /// Check this machine: driver, libraries, GPUs, memory
    Doctor(doctor::DoctorArgs),
    /// Check a config, show its values, list all keys
    #[command(subcommand)]
    Config(ConfigVerb),
    /// Show the curves of runs on one page
    Report(report::ReportArgs),
    /// Draw a plot of numbers, as the scripts do
    Plot(plot::PlotArgs),
    /// Print the completions of a shell
    Completions {
        /// bash, zsh, fish, elvish or powershell
        #[arg(value_name = "SHELL")]
        shell: clap_complete::Shell,
    },
    /// Write manual pages into a directory
    Man {
        /// Directory for the pages; it is created if it is missing
        #[arg(value_name = "DIR")]
        dir: PathBuf,
    },
}

#[derive(Debug, Subcommand)]
enum DataVerb {
    /// Show the size of the cache of texts that were read; clear it
    Cache(cache::CacheArgs),
    /// Read all data; show the number of its tokens and samples
    Check(samples::DataCheckArgs),
    /// Tokenize text once, into files that runs read in place
    Prepare(prepare::PrepareArgs),
    /// Show a sample: its text, and which of its tokens are targets
    Show(samples::SamplesArgs),
}

#[derive(Debug, Subcommand)]
enum ConfigVerb {
    /// Show every error of a config, each with its place
    Check(check::CheckArgs),
    /// Show every value of a config and its origin
    Show(check::CheckArgs),
    /// List every key of a config: values, default, meaning
    Keys(keys::KeysArgs),
}

/// A config, and changes to it.
#[derive(Clone, Debug, Args)]
struct ConfigArgs {
    /// RON file, such as configs/quickstart.ron; - is the standard input
    config: PathBuf,
    /// Change a key, such as parallel.tensor=4 or 'data.train="my.txt"'; may be given many times
    #[arg(long = "set", value_name = "KEY=VALUE")]
    sets: Vec<String>,
}

impl ConfigArgs {
    /// Name of the config in messages.
    fn name(&self) -> String {
        if self.config == Path::new("-") { "stdin".into() } else { self.config.shown().to_string() }
    }

    /// Returns the file and the sets that give this config again, now that `run` has a copy. A pipe
    /// or the standard input can be read only once: then returns the run's file and no sets.
    fn again(&self, run: &Path) -> (PathBuf, &[String]) {
        match self.config != Path::new("-") && self.config.is_file() {
            true => (self.config.clone(), &self.sets),
            false => (run.join(CONFIG), &[]),
        }
    }

    /// Loads the same config with `steps` instead of epochs. The standard input was read already.
    fn load_with_steps(
        &self,
        loaded: &LoadedConfig,
        steps: u64,
    ) -> Result<LoadedConfig, CommandError> {
        let all = [format!("train.steps={steps}"), "train.epochs=None".into()];
        let sets = [&self.sets[..], &all].concat();
        let folder = self.config.parent().unwrap_or(Path::new(""));
        config::load_str(&loaded.source, &self.name(), folder, &sets).fail_with(code::CONFIG)
    }

    /// Loads the config and applies the rules of this machine's GPUs.
    fn load(&self, machine: &LocalMachine) -> Result<LoadedConfig, CommandError> {
        self.load_further(machine, false)
    }

    /// Same as [`load`](Self::load), for a search of layouts.
    fn load_to_search(&self, machine: &LocalMachine) -> Result<LoadedConfig, CommandError> {
        self.load_further(machine, true)
    }

    fn load_further(
        &self,
        machine: &LocalMachine,
        searched: bool,
    ) -> Result<LoadedConfig, CommandError> {
        let of_machine = |config: &Config| machine.broken(config);
        let further = Further { of_machine: &of_machine, searched, ..Further::NONE };
        load_and_look(&self.config, &self.sets, &further).fail_with(code::CONFIG)
    }
}

/// Described box to use a config on.
#[derive(Debug, Args)]
struct BoxArg {
    /// Use this described box instead of the config's device: a name that `onebox boxes` lists,
    /// such as dgx2, or a file
    #[arg(long = "box", value_name = "BOX")]
    on: Option<PathBuf>,
}

impl BoxArg {
    /// Returns `config` with this box as its device.
    fn with(&self, config: &ConfigArgs) -> Result<ConfigArgs, CommandError> {
        let mut config = config.clone();
        if let Some(named) = &self.on {
            let found = find_box(named, &config.config).fail_with(code::CONFIG)?;
            config.sets.push(format!("{BOX}{}", text_for_config(&found)?));
        }
        Ok(config)
    }
}

/// Choice of the CPU instructions of the update.
#[derive(Clone, Copy, Debug, Args)]
struct SimdArg {
    /// CPU instructions for the host optimizer: avx512, avx2, neon, portable [default: the best
    /// here]. Results do not change
    #[arg(long, value_name = "PATH", value_parser = |name: &str| name.parse::<SimdPath>())]
    simd: Option<SimdPath>,
}

impl SimdArg {
    /// Sets the instructions for the whole process; refuses instructions that this machine lacks.
    fn choose(self) -> Result<Option<SimdPath>, CommandError> {
        if let Some(path) = self.simd {
            path.choose().map_err(|why| format!("--simd: {why}")).fail_with(code::CONFIG)?;
        }
        Ok(self.simd)
    }
}

/// The error about an option `--config`, with a correct tip. The tip of clap is `-- --config`,
/// which means a file of this name.
fn without_option(mut error: clap::Error) -> clap::Error {
    let option = ContextValue::String("--config".to_owned());
    if error.get(ContextKind::InvalidArg) == Some(&option) {
        let tip = "the config is no option: write its path alone, as in `onebox train my.ron`";
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
    }
    error
}

/// Runs the command in the arguments of the process.
pub fn main() -> ExitCode {
    ExitCode::from(run(std::env::args_os(), None))
}

/// Runs the command of `words`, which begin with the program's name; returns the exit code. In
/// tests, `watcher` observes the ranks of `train`.
pub fn run(words: impl IntoIterator<Item = OsString>, watcher: Option<Watcher>) -> u8 {
    signals::outlive_size_limit();
    let matches = install::command().try_get_matches_from(words);
    let matches = matches.unwrap_or_else(|error| without_option(error).exit());
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    cli.log.start();
    let machine = &LocalMachine::default();
    let done = match cli.verb {
        Verb::Train(mut args) => {
            args.watcher = watcher;
            train::run(&args)
        }
        Verb::Plan(args) => plan::run(&args),
        Verb::Simulate(args) => simulate::run(&args, machine),
        Verb::Topology(args) => topology::run(&args),
        Verb::Boxes(args) => boxes::run(&args),
        Verb::Bench(args) => bench::run(&args, machine),
        Verb::Generate(args) => generate::run(&args, machine),
        Verb::Checkpoint(verb) => checkpoint::run(&verb, machine),
        Verb::Data(DataVerb::Cache(args)) => cache::run(&args),
        Verb::Data(DataVerb::Check(args)) => samples::check(&args, machine),
        Verb::Data(DataVerb::Prepare(args)) => prepare::run(&args, machine),
        Verb::Data(DataVerb::Show(args)) => samples::run(&args, machine),
        Verb::Doctor(args) => doctor::run(&args, machine),
        Verb::Report(args) => report::run(&args),
        Verb::Plot(args) => plot::run(&args),
        Verb::Completions { shell } => install::completions(shell),
        Verb::Man { dir } => install::manual(&dir),
        Verb::Config(ConfigVerb::Check(args)) => check::check(&args),
        Verb::Config(ConfigVerb::Show(args)) => check::show(&args, machine),
        Verb::Config(ConfigVerb::Keys(args)) => keys::run(&args),
    };
    crate::report::stderr::say_lost();
    let code = done.err().map_or(0, |failed| failed.report());
    crate::report::stderr::flush();
    code
}

/// Refuses a config that this version or this machine cannot run.
fn check_built(loaded: &LoadedConfig, machine: &LocalMachine) -> Result<(), CommandError> {
    let not_built = loaded.config.not_built(&loaded.origins, || machine.missing_gpus());
    not_built.map_or(Ok(()), Err).fail_with(code::CONFIG)
}

/// Ends the command with the exit code [`code::DOES_NOT_FIT`] if the model does not fit.
fn fit_result(fits: bool) -> Result<(), CommandError> {
    if fits { Ok(()) } else { Err(CommandError::silent(code::DOES_NOT_FIT)) }
}

/// Text of a path for a config, which can hold no path that is not UTF-8.
fn text_for_config(path: &Path) -> Result<&str, CommandError> {
    path.to_str().ok_or_else(|| {
        let remedy = "rename it, or name a link to it";
        let why =
            format!("{}: a config cannot hold a path that is not UTF-8: {remedy}", path.shown());
        CommandError::new(code::CONFIG, why)
    })
}

/// Refuses, before the work, a file that a result may not replace, or that cannot be written.
fn may_write(output: Output, path: &Path) -> Result<(), CommandError> {
    output.check(path).map_err(|e| unwritten(path, &e))
}

/// Writes the result of a command.
fn write_output(output: Output, path: &Path, text: &str) -> Result<(), CommandError> {
    output.write(path, text.as_bytes()).map_err(|e| unwritten(path, &e))
}

fn unwritten(path: &Path, error: &std::io::Error) -> CommandError {
    CommandError::new(code::IO, format!("cannot write {}: {error}", path.shown()))
}

/// Formats settings as arguments for a shell: ` --set a=1 --set b=2`.
fn set_arguments(sets: &[String]) -> String {
    sets.iter().map(|set| format!(" --set {}", quoted(set))).collect()
}

/// Noun for a number of ops, in a column.
const fn of_ops(ops: u64) -> &'static str {
    if ops == 1 { "op" } else { "ops" }
}

/// Prints to stdout, without control characters. A reader that closes stdout early is no error.
fn print(text: &str) -> Result<(), CommandError> {
    if processes::holds_back(text) {
        return Ok(());
    }
    let mut out = std::io::stdout().lock();
    seen(out.write_all(colour::on(&out, &lines(text)).as_bytes()).and_then(|()| out.flush()))
        .map(drop)
}

/// Prints one JSON document to stdout.
fn print_json(value: &impl serde::Serialize) -> Result<(), CommandError> {
    print(&(serde_json::to_string_pretty(value).fail_with(code::INTERNAL)? + "\n"))
}

/// Prints `value` as JSON if `json`, and `text` otherwise.
fn print_as(
    json: bool,
    value: &impl serde::Serialize,
    text: impl FnOnce() -> String,
) -> Result<(), CommandError> {
    if json { print_json(value) } else { print(&text()) }
}

/// Whether the written text has arrived at stdout; false if the reader has closed it.
fn seen(written: std::io::Result<()>) -> Result<bool, CommandError> {
    match written {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(false),
        Err(e) => Err(CommandError::new(code::IO, format!("cannot write to stdout: {e}"))),
    }
}

/// Prints a message to stderr.
fn say(text: &str) {
    if !processes::holds_back(text) {
        say_now(&message::message(text));
    }
}

/// Prints several messages or a table to stderr; foreign text in it must be escaped already.
fn say_report(text: &str) {
    if !processes::holds_back(text) {
        say_now(&message::report(text));
    }
}

/// Prints to stderr even if this process holds messages back.
fn say_now(text: &str) {
    crate::report::stderr::line(&colour::on(&std::io::stderr(), text));
}
