//! Disks that are too small, and get more room later.

use super::{Findings, full, skip, words};
use crate::attacks::program::{PATIENCE, ending};
use std::process::Command;

/// The smallest possible model, saved in every step.
const SETS: &str = "--set model.layers=1 --set model.hidden=8 --set train.steps=4 --set train.checkpoint_every=1 \
    --set train.eval_every=0 --set sample.tokens=0 --set batch.micro=1";

/// KiB of the disks.
const SIZES: [u32; 12] = [64, 80, 96, 112, 128, 160, 192, 256, 320, 512, 768, 1024];

/// A command in which `sh -c` may mount, or the reason why there is none.
fn mounter() -> Result<Command, String> {
    let root = rustix::process::geteuid().is_root();
    let how = if root { "-m" } else { "-rm" };
    let mut tried = Command::new("unshare");
    tried.args([how, "sh", "-c", "mount -t tmpfs -o size=64k tmpfs /tmp"]);
    let output =
        tried.output().map_err(|error| format!("no unshare (package util-linux): {error}"))?;
    if !output.status.success() {
        let why = String::from_utf8_lossy(&output.stderr);
        return Err(format!("this system mounts no tmpfs: {}", why.trim()));
    }
    let mut command = Command::new("unshare");
    command.args([how, "sh", "-c"]);
    Ok(command)
}

/// Fills a disk with a run, prints its code, enlarges the disk, and continues the run.
const SCRIPT: &str = r#"
onebox=$1 size=$2
shift 2
mkdir -p disk
mount -t tmpfs -o "size=${size}k" tmpfs disk || exit 99
"$onebox" "$@"
echo "code $?"
mount -o remount,size=64m tmpfs disk || exit 99
rm -f disk/filler
"$onebox" "$@" --resume
echo "code $?"
tail -n 1 disk/run/metrics.jsonl
"#;

#[test]
fn a_run_on_a_disk_that_is_full_goes_on_where_it_gets_room() {
    if let Err(why) = mounter() {
        skip("small disks", &why);
        return;
    }
    let folder = super::Folder::new();
    let straight = folder.attempt(&format!("train tiny.ron -q --run-dir straight {SETS}"));
    assert_eq!(straight.code, 0, "{straight}");
    let hash = folder.hash("straight");
    let mut findings = Findings::new("small disks");
    let mut refused = 0;
    let sizes = if full() { &SIZES[..] } else { &SIZES[3..9] };
    for size in sizes.iter().step_by(if full() { 1 } else { 3 }) {
        let case = format!("a disk of {size} KiB that gets 64 MiB");
        let mut command = mounter().unwrap();
        command.args([SCRIPT, "sh", env!("CARGO_BIN_EXE_onebox"), &size.to_string()]);
        command.args(words(&format!("train tiny.ron -q --run-dir disk/run {SETS}")));
        command.current_dir(folder.path(""));
        let ending = ending(command, 2 * PATIENCE);
        findings.look_at(&case, &ending);
        let lines: Vec<&str> = ending.stdout.lines().collect();
        let [first, second, end] = lines[..] else {
            findings.blame(&case, "the script ended early", &ending);
            continue;
        };
        refused += usize::from(first != "code 0");
        if !["code 0", "code 74", "code 80", "code 83"].contains(&first) {
            findings.blame(&case, &format!("{first} on the small disk"), &ending);
        }
        if second != "code 0" || !end.contains(&hash) {
            findings.blame(&case, &format!("{second} with room, and {end}"), &ending);
        }
    }
    assert!(refused > 0, "no disk was too small");
    findings.end();
}

/// Other programs fill the disk during the run.
#[test]
fn a_disk_that_others_fill_costs_checkpoints_and_no_run() {
    if let Err(why) = mounter() {
        skip("a disk that others fill", &why);
        return;
    }
    let folder = super::Folder::new();
    let sets = SETS.replace("steps=4", "steps=60") + " --set schedule.decay_steps=60";
    let straight = folder.attempt(&format!("train tiny.ron -q --run-dir straight {sets}"));
    assert_eq!(straight.code, 0, "{straight}");
    let hash = folder.hash("straight");
    let mut findings = Findings::new("a disk that others fill");
    let filling = SCRIPT.replace(
        "\"$onebox\" \"$@\"\n",
        "(while [ ! -e disk/run/checkpoints/step-00000003 ]; do sleep 0.01; done; cat /dev/zero > disk/filler) 2>/dev/null &\n\"$onebox\" \"$@\"\n",
    );
    for round in 0..if full() { 8 } else { 1 } {
        let case = format!("a disk that others fill, round {round}");
        let mut command = mounter().unwrap();
        command.args([&filling, "sh", env!("CARGO_BIN_EXE_onebox"), "2048"]);
        command.args(words(&format!("train tiny.ron -q --run-dir disk/run {sets}")));
        command.current_dir(folder.path(""));
        let ending = ending(command, 3 * PATIENCE);
        findings.look_at(&case, &ending);
        let lines: Vec<&str> = ending.stdout.lines().collect();
        let whole = lines.len() == 3 && lines[1] == "code 0" && lines[2].contains(&hash);
        if !whole || !["code 0", "code 74", "code 83"].contains(&lines[0]) {
            findings.blame(&case, &ending.stdout, &ending);
        }
    }
    findings.end();
}
