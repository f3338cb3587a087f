//! `onebox checkpoint export`, `reshard` and `import`, killed at calls that change files or names.

use super::{SETS, sample, trace};
use crate::common::{Folder, has_strace};
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
