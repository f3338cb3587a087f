//! `onebox checkpoint export`, `reshard` and `import`, killed at calls that change files or names;
//! and `train`, killed while a checkpoint takes the name of another.

use super::{SETS, sample, trace};
use crate::common::{Folder, WORSE, has_strace};
use std::collections::BTreeSet;
use std::process::Command;

#[test]
fn a_command_that_was_killed_at_any_system_call_works_again() {
    if !has_strace() {
        return;
    }
    let folder = Folder::new();
    folder.plain("run", &["-q"]).ok();
    let out = folder.absolute("out");
    let export = ["checkpoint", "export", "run", &out, "--to", "safetensors"];
    folder.onebox(&["checkpoint", "export", "run", "hf", "--to", "safetensors"]).ok();
    let reshard = ["checkpoint", "reshard", "run", &out, "--tp", "1", "--dp", "1"];
    let sets: Vec<&str> = SETS.iter().flat_map(|set| ["--set", set]).collect();
    let import = [&["checkpoint", "import", "hf", &out, "tiny.ron"], &sets[..]].concat();
    let calls =
        "openat,write,pwrite64,fsync,rename,renameat,renameat2,mkdir,mkdirat,unlink,unlinkat";
    let listed =
        || folder.shell("find out -type f ! -name .lock | sort | xargs -r sha256sum").stdout;
    for args in [&export[..], &reshard, &import] {
        let traced = |strace: &[&str]| {
            let mut command = Command::new("strace");
            command.args(["-f", "-qq", "-o"]).arg(folder.path("strace.log")).args(strace);
            command.arg(env!("CARGO_BIN_EXE_onebox")).args(args).current_dir(folder.path(""));
            Folder::done(command)
        };
        traced(&["-y", "-e", &format!("trace={calls}")]).ok();
        let whole = listed();
        let clean = || folder.shell("rm -rf out out.unfinished").ok();
        clean();
        let cases = trace::changes(&folder.read("strace.log"), &out);
        let cases = cases.into_iter().flat_map(|(path, call, count)| {
            (1..=count).map(move |nth| (path.clone(), call.clone(), nth))
        });
        let cases = sample(cases.collect(), 10);
        let tried = cases.len();
        let mut killed = 0;
        for (path, call, nth) in cases {
            let what = format!("{}: {call} {nth} of {path}", args[1]);
            let inject = format!("inject={call}:signal=KILL:when={nth}");
            let done = traced(&["-P", &path, "-e", &format!("trace={call}"), "-e", &inject]);
            killed += usize::from(done.code != 0);
            let again = folder.onebox(args);
            // After the last change, the command has nothing to repeat.
            assert!(again.code == 0 || again.code == 73, "{what}: {}", again.stderr);
            assert!(listed() == whole, "{what}: {}\n{}", again.stderr, listed());
            clean();
        }
        println!("{}: {tried} points, {killed} killed", args[1]);
        // The tracer counts calls by thread, and the thread of a call varies from run to run.
        assert!(2 * killed > tried, "{killed} of {tried} were killed");
    }
}

/// Names of the checkpoints in `run`: complete, unfinished and set aside.
fn checkpoints(folder: &Folder, run: &str) -> BTreeSet<String> {
    let found = std::fs::read_dir(folder.path(&format!("{run}/checkpoints")));
    let names = found.into_iter().flatten().map(|entry| entry.unwrap().file_name());
    names.map(|name| name.into_string().unwrap()).filter(|name| name != "latest").collect()
}

/// A run whose best checkpoint is not its newest is rewritten as two checkpoints.
#[test]
fn a_reshard_of_two_checkpoints_that_is_killed_before_any_rename_leaves_both_or_none() {
    if !has_strace() {
        return;
    }
    let folder = Folder::new();
    let sets: Vec<&str> = WORSE.iter().flat_map(|set| ["--set", set]).collect();
    // The loss ends above that of a guess.
    folder.train("run", &[&["-q"], &sets[..]].concat()).refused(79, &[]);
    let reshard = ["checkpoint", "reshard", "run", "out", "--tp", "1", "--dp", "4"];
    folder.onebox(&reshard).ok();
    let whole = checkpoints(&folder, "out");
    assert_eq!(whole.len(), 2, "{whole:?}");
    let clean = || folder.shell("rm -rf out").ok();
    let mut killed = 0;
    for call in ["rename", "renameat", "renameat2"] {
        for nth in 1.. {
            clean();
            let inject = format!("inject={call}:signal=KILL:when={nth}");
            let mut command = Command::new("strace");
            command.args(["-f", "-qq", "-o"]).arg(folder.path("strace.log"));
            command.args(["-e", &format!("trace={call}"), "-e", &inject]);
            command.arg(env!("CARGO_BIN_EXE_onebox")).args(reshard).current_dir(folder.path(""));
            if Folder::done(command).code == 0 {
                break;
            }
            killed += 1;
            let (left, what) = (checkpoints(&folder, "out"), format!("{call} {nth}"));
            assert!(left.is_empty() || left == whole, "{what}: {left:?}");
            if left.is_empty() {
                let texts = ["out/.checkpoints.tmp", "run that command again"];
                folder.train("out", &["--resume"]).refused(73, &texts);
                folder.onebox(&reshard).ok();
            }
            assert_eq!(checkpoints(&folder, "out"), whole, "{what}");
            assert!(!folder.path("out/.checkpoints.tmp").exists(), "{what}");
            folder.onebox(&["checkpoint", "verify", "out"]).ok();
        }
    }
    assert!(killed >= 4, "the config, two checkpoints and their folder get names: {killed}");
}

/// The run is saved without its evaluation, which the resumed run makes. So it saves the step again,
/// on a file system that cannot exchange two names.
#[test]
fn a_checkpoint_that_is_set_aside_for_another_of_its_step_is_never_lost_by_a_kill() {
    if !has_strace() {
        return;
    }
    let folder = Folder::new();
    let sets = ["train.checkpoint_every=2", "schedule.decay_steps=4"];
    let sets: Vec<&str> =
        SETS.iter().filter(|set| !set.contains("train.")).copied().chain(sets).collect();
    let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
    let begin = |run: &str| {
        folder.train(run, &[&sets[..], &["--set", "train.steps=2", "-q"]].concat()).ok();
    };
    let again = [&sets[..], &["--set", "train.keep_best=true", "--resume"]].concat();
    begin("straight");
    folder.train("straight", &again).ok();
    let (straight, whole) = (folder.left("straight"), checkpoints(&folder, "straight"));
    let [name, new, replaced] =
        ["", ".tmp", ".replaced"].map(|ending| format!("step-00000002{ending}"));
    // The state before each of the three renames, and the step that the resumed run finds.
    for (nth, expected) in [(1, [&name, &new]), (2, [&replaced, &new]), (3, [&name, &replaced])] {
        begin("run");
        let kill = format!("inject=renameat:signal=KILL:when={nth}");
        let mut command = Command::new("strace");
        command.args(["-f", "-qq", "-o"]).arg(folder.path("strace.log"));
        command.args(["-P", &name, "-P", &new, "-P", &replaced]);
        command.args(["-e", "trace=renameat,renameat2", "-e", "inject=renameat2:error=EINVAL"]);
        command.args(["-e", &kill, env!("CARGO_BIN_EXE_onebox"), "train", "tiny.ron"]);
        command.args(["--run-dir", "run"]).args(&again).current_dir(folder.path(""));
        assert_ne!(Folder::done(command).code, 0, "{nth}: it is not killed");
        let expected: BTreeSet<String> = expected.into_iter().cloned().collect();
        assert_eq!(checkpoints(&folder, "run"), expected, "{nth}");
        // A dry run finds the same checkpoint, says what a run does, and changes nothing.
        let dry = folder.train("run", &[&again[..], &["--dry-run"]].concat()).ok().stderr;
        let said = ["", ": a run gives it its name ", ": a run removes it, since "][nth - 1];
        assert!(dry.contains(&format!("{replaced}{said}")) || nth == 1, "{nth}: {dry}");
        assert!(dry.contains(": going on after step 2\n"), "{nth}: {dry}");
        assert_eq!(checkpoints(&folder, "run"), expected, "{nth}");
        let resumed = folder.train("run", &again).ok();
        assert!(resumed.stderr.contains("going on after step 2"), "{nth}: {}", resumed.stderr);
        assert!(!resumed.stderr.contains("broken"), "{nth}: {}", resumed.stderr);
        assert!(folder.left("run") == straight, "{nth}: another end\n{}", resumed.stderr);
        assert_eq!(checkpoints(&folder, "run"), whole, "{nth}");
        std::fs::remove_dir_all(folder.path("run")).unwrap();
    }
}
