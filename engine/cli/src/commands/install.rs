//! Shell completions, manual pages, and help with commands in groups.

use super::{Cli, CommandError, Failable, code, seen};
use clap::{Command, CommandFactory};
use clap_complete::Shell;
use files::path_text::ShownPath;
use std::fmt::Write as _;
use std::path::Path;

/// Groups of commands in the help; every command is in one group.
const GROUPS: [(&str, &[&str]); 4] = [
    ("Train", &["train", "report", "generate", "checkpoint"]),
    ("Before a run", &["plan", "simulate", "boxes", "config", "data"]),
    ("The machine", &["doctor", "topology", "bench"]),
    ("The program", &["plot", "completions", "man", "help"]),
];

/// Maximum columns of the help: 80 columns fit every terminal and are easier to read on a wide one.
const COLUMNS: usize = 80;

/// Builds the command line, with grouped commands in its help.
pub(super) fn command() -> Command {
    let mut command = Cli::command();
    command.build();
    let mut groups = String::new();
    for (title, names) in GROUPS {
        let _ = writeln!(groups, "{title}:");
        for name in names {
            let about = command.find_subcommand(name).and_then(|verb| verb.get_about());
            let about = about.map_or_else(String::new, ToString::to_string);
            let _ = writeln!(groups, "  {name:<12}{about}");
        }
        groups.push('\n');
    }
    let template = format!(
        "{{about}}\n\n{{usage-heading}} {{usage}}\n\n{groups}Options:\n{{options}}{{after-help}}\n"
    );
    Cli::command().help_template(template).max_term_width(COLUMNS)
}

/// Writes shell completions to stdout.
pub(super) fn completions(shell: Shell) -> Result<(), CommandError> {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "onebox", &mut text);
    let mut out = std::io::stdout().lock();
    seen(std::io::Write::write_all(&mut out, &text)).map(drop)
}

/// Writes manual pages into `dir`: `onebox.1`, and one for each command, such as `onebox-train.1`.
pub(super) fn manual(dir: &Path) -> Result<(), CommandError> {
    let written =
        std::fs::create_dir_all(dir).and_then(|()| clap_mangen::generate_to(Cli::command(), dir));
    let failed = |e| format!("cannot write manual pages to {}: {e}", dir.shown());
    written.map_err(failed).fail_with(code::IO)
}
