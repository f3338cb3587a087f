//! Limits of the system: a run ends in order, and continues without the limit to the same end.

use super::plants::remove;
use super::program::{PATIENCE, ending};
use super::{Findings, Folder, sample, words};
use crate::common::without_roots_rights;
use std::process::Command;

/// Shell lines before `onebox`, with exit codes beyond the usual ones: 134 for an abort without
/// memory, and those of signals (152: the CPU time is over; 137: killed).
const LIMITS: [(&str, &[i32]); 30] = [
    ("ulimit -n 4", &[]),
    ("ulimit -n 16", &[]),
    ("ulimit -n 32", &[]),
    ("ulimit -n 64", &[]),
    ("ulimit -v 100000", &[134]),
    ("ulimit -v 200000", &[134]),
    ("ulimit -v 400000", &[134]),
    ("ulimit -v 800000", &[134]),
    ("ulimit -d 50000", &[134]),
    ("ulimit -d 200000", &[134]),
    ("ulimit -s 64", &[134]),
    ("ulimit -s 256", &[134]),
    ("ulimit -s unlimited", &[]),
    ("ulimit -f 0", &[]),
    ("ulimit -f 16", &[]),
    ("ulimit -f 128", &[]),
    ("ulimit -t 1", &[152, 137]),
    ("ulimit -c 0", &[]),
    ("ulimit -l 0", &[]),
    ("exec 0<&-", &[]),
    ("exec 1>&-", &[]),
    ("exec 2>&-", &[]),
    ("exec 0<&- 1>&- 2>&-", &[]),
    ("exec >/dev/full", &[]),
    ("umask 077", &[]),
    ("umask 777", &[]),
    ("unset HOME TMPDIR XDG_CACHE_HOME PATH", &[]),
    ("export TMPDIR=/nowhere HOME=/nowhere XDG_CACHE_HOME=/nowhere/cache", &[]),
    ("ulimit -n 1048576 2>/dev/null; export LC_ALL=tr_TR.UTF-8 TERM=", &[]),
    ("chmod 555 .; trap '' PIPE", &[]),
];

/// Programs that start `onebox`.
const STARTERS: [&str; 4] = ["taskset -c 0", "nice -n 19", "setpriv --no-new-privs", "env -i"];

const TRAIN: &str =
    "train tiny.ron -q --run-dir run --set train.checkpoint_every=2 --set train.checkpoint_keep=9";

/// Whether a program is installed.
fn has(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok()
}

fn one(folder: &Folder, limit: &str, codes: &[i32], hash: &str, findings: &mut Findings) {
    remove(&folder.path("run"));
    let starter = if STARTERS.contains(&limit) { limit } else { "" };
    let limit = if starter.is_empty() { limit } else { ":" };
    let case = format!("{limit} {starter} onebox {TRAIN}");
    let line = format!("{limit}; exec {starter} \"$0\" \"$@\"");
    let mut command = Command::new("sh");
    command.args(["-c", &line, env!("CARGO_BIN_EXE_onebox")]).args(words(TRAIN));
    command.current_dir(folder.path("")).env("XDG_CACHE_HOME", folder.path("cache"));
    let mut first = ending(without_roots_rights(&command), PATIENCE);
    if codes.contains(&first.code) {
        println!("{case}: exit {}, which this limit explains", first.code);
        first.code = 74;
        first.stderr.clear();
    }
    findings.look_at(&case, &first);
    folder.shell("chmod 755 .; [ ! -e run ] || chmod -R u+rwX run").ok();
    if first.code == 0 && folder.hash("run") != hash {
        findings.blame(&case, "ends in another state", &first);
    }
    let second = folder.attempt(&format!("{TRAIN} --resume"));
    findings.look_at(&format!("{case}, resumed without it"), &second);
    if second.code != 0 || folder.hash("run") != hash {
        findings.blame(&case, "does not go on to the same end", &second);
    }
}

#[test]
fn a_run_under_limits_of_the_system_loses_nothing() {
    let folder = Folder::new();
    let straight = folder.attempt(&TRAIN.replace("--run-dir run", "--run-dir straight"));
    assert_eq!(straight.code, 0, "{straight}");
    println!("without limits: {straight}");
    let hash = folder.hash("straight");
    let mut findings = Findings::new("limits");
    let mut cases: Vec<(&str, &[i32])> = LIMITS.to_vec();
    for starter in STARTERS {
        if has(starter.split(' ').next().unwrap()) {
            cases.push((starter, &[]));
        } else {
            println!("SKIPPED: {starter}: no such program");
        }
    }
    for (limit, codes) in sample(cases, 7) {
        one(&folder, limit, codes, &hash, &mut findings);
    }
    findings.end();
}
