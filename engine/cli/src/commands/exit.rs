//! Exit codes and errors of commands.

use std::fmt::Display;

/// Exit codes, from sysexits.h if it has a matching code.
pub(super) mod code {
    pub(crate) const DOES_NOT_FIT: u8 = 1;
    pub(crate) const DIFFERS: u8 = 1;
    /// `doctor` found a failure on the machine.
    pub(crate) const UNFIT: u8 = 1;
    pub(crate) const USAGE: u8 = 2;
    pub(crate) const DATA: u8 = 66;
    pub(crate) const INTERNAL: u8 = 70;
    pub(crate) const NO_RUN_DIR: u8 = 73;
    pub(crate) const IO: u8 = 74;
    pub(crate) const INTERRUPTED: u8 = 75;
    pub(crate) const RANK: u8 = 76;
    pub(crate) const CONFIG: u8 = 78;
    pub(crate) const NUMERIC: u8 = 79;
    pub(crate) const HOST_MEMORY: u8 = 80;
    pub(crate) const DEVICE_MEMORY: u8 = 81;
    pub(crate) const CHECKPOINT: u8 = 82;
    /// The run ended in order, but its last checkpoint is not saved.
    pub(crate) const NOT_SAVED: u8 = 83;
    /// A second Ctrl-C ended the process. `generate --json` and a conversation through pipes end
    /// with this code after the first one.
    pub(crate) const ABORTED: u8 = 130;
}

pub(super) const HELP: &str = "\
Exit codes:
  0    done
  1    plan, topology: does not fit; plan: GPU memory was not checked;
       checkpoint diff: differs; doctor: something fails
  2    wrong arguments
  66   the data cannot be used
  70   internal error (bug)
  73   the run directory is refused
  74   a file cannot be written or read
  75   interrupted, stopped cleanly
  76   a rank failed
  78   the config is wrong
  79   training diverged: all steps are skipped, or the loss ends above that of
       a guess; generate: logits are not finite
  80   not enough host memory
  81   not enough GPU memory
  82   no intact checkpoint
  83   the run has ended, and the checkpoint of its end is not saved
  130  interrupted twice, quit at once; generate --json, and --chat through
       pipes: interrupted
  134  aborted, as when the machine gives no memory for something small";

/// Error of a command: its exit code and its message.
#[derive(Debug)]
pub(super) struct CommandError {
    pub(super) code: u8,
    pub(super) message: String,
}

impl CommandError {
    pub(super) fn new(code: u8, why: impl Display) -> Self {
        Self { code, message: why.to_string() }
    }

    /// Appends `more` to the message.
    pub(super) fn and(mut self, more: &str) -> Self {
        self.message += "; ";
        self.message += more;
        self
    }

    /// An error whose message was printed already.
    pub(super) const fn silent(code: u8) -> Self {
        Self { code, message: String::new() }
    }

    /// Prints the message as a warning, if another error sets the exit code.
    pub(super) fn warn(&self) {
        super::say(&format!("warning: {}", self.message));
    }

    /// Prints the message and returns the exit code.
    pub(super) fn report(&self) -> u8 {
        if !self.message.is_empty() {
            match self.message.starts_with("error") {
                // The message lists the errors of a config.
                true => super::say_report(&self.message),
                false => super::say(&format!("error: {}", self.message)),
            }
        }
        self.code
    }
}

/// Turns an error into a [`CommandError`] with an exit code.
pub(super) trait Failable<T> {
    fn fail_with(self, code: u8) -> Result<T, CommandError>;
}

impl<T, E: Display> Failable<T> for Result<T, E> {
    fn fail_with(self, code: u8) -> Result<T, CommandError> {
        self.map_err(|why| CommandError::new(code, why))
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn no_row_of_the_codes_is_wrapped_at_80_columns() {
        let long: Vec<&str> = super::HELP.lines().filter(|line| line.len() > 80).collect();
        assert!(long.is_empty(), "{long:?}");
    }
}
