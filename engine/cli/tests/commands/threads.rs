//! A machine that refuses more threads, as a container with a limit of processes does: every
//! command reports it, and none panics or hangs.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use crate::common::{CommandOutput, Folder, has_strace};
use std::process::Command;

/// Runs onebox with at most `given` threads from its first one; a hang is ended with code 124.
fn with(folder: &Folder, given: usize, args: &[&str]) -> CommandOutput {
    let inject = format!("inject=clone3,clone:error=EAGAIN:when={}+", given + 1);
    let mut command = Command::new("timeout");
    command.args(["60", "strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace=clone3,clone"]);
    command.args(["-e", &inject, env!("CARGO_BIN_EXE_onebox")]).args(args);
    command.current_dir(folder.path("."));
    Folder::done(command)
}

#[test]
fn a_thread_that_the_machine_does_not_give_is_an_error_with_its_reason() {
    if !has_strace() {
        return;
    }
    let folder = Folder::new();
    let train = ["train", "tiny.ron", "--run-dir", "run", "--overwrite", "--set", "train.steps=1"];
    for args in [
        &["bench", "copy", "--mib", "1"][..],
        &["bench", "collective", "--mib", "1", "--ranks", "3"],
        &[&train[..], &["--set", "schedule.decay_steps=1"]].concat(),
    ] {
        let mut refused = 0;
        for given in 0..12 {
            let done = with(&folder, given, args);
            let (what, stderr) = (format!("{args:?} with {given} threads"), &done.stderr);
            assert!(!stderr.contains("panicked"), "{what}: {stderr}");
            match done.code {
                0 => {}
                76 => {
                    refused += 1;
                    assert!(stderr.contains("no thread for"), "{what}: {stderr}");
                    assert!(
                        stderr.contains("Resource temporarily unavailable"),
                        "{what}: {stderr}"
                    );
                    assert!(stderr.contains("raise the limit of processes"), "{what}: {stderr}");
                }
                code => panic!("{what}: {code}: {stderr}"),
            }
        }
        assert!(refused > 0, "{args:?} starts no thread that it needs");
    }
}
