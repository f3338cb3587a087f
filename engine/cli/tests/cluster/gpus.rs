//! Ranks on GPUs in several processes, with a stand-in driver: NCCL moves data between them.

use super::faults::{
    BASE, Fault, FaultAction, ON_GPUS, assert_named, assert_same_end, copy, suffer,
};
use super::launch::{
    ACROSS, NUMBER, SAVES, assert_same, assert_whole, command, has_mpirun, launch, on_gpus, sets,
};
use crate::common::{CommandOutput, Folder};
use engine::run::FaultPoint;

fn train(
    folder: &Folder,
    count: usize,
    run: &str,
    set: &[&str],
    variables: &[(&str, &str)],
) -> CommandOutput {
    let set = sets(set);
    let set: Vec<&str> = set.iter().map(String::as_str).collect();
    let words = ["train", "tiny.ron", "--run-dir", run, "--resume", "--silence", "20"];
    let args = [&words, &set[..]].concat();
    let mut started = match count {
        0 => folder.command(&args),
        _ => command(folder, count, &args),
    };
    on_gpus(folder, &mut started);
    started.envs(variables.iter().copied());
    Folder::done(started)
}

#[test]
fn processes_with_gpus_leave_the_files_of_one_process() {
    if !has_mpirun() {
        return;
    }
    let folder = Folder::new();
    let layouts: [(&[&str], usize); 2] = [
        (&["parallel.tensor=2", "parallel.data=2", "offload.update=Speculative"], 2),
        (&["parallel.tensor=4", "parallel.data=1", ACROSS], 2),
    ];
    for (number, (layout, count)) in layouts.into_iter().enumerate() {
        let set = [SAVES, &[ON_GPUS], layout].concat();
        let [one, run] = [format!("one-{number}"), format!("run-{number}")];
        train(&folder, 0, &one, &set, &[]).ok();
        let done = train(&folder, count, &run, &set, &[]).ok();
        assert!(done.stderr.contains("processes 0 on "), "{}", done.stderr);
        assert_same(&folder, &one, &run, &format!("{layout:?} by {count}"));
    }
}

#[test]
fn what_fails_with_gpus_in_one_process_is_named() {
    if !has_mpirun() {
        return;
    }
    let folder = Folder::new();
    let two = [ON_GPUS, "parallel.tensor=1", "parallel.data=4"];
    let few = [("FAKECUDA_DEVICES", "3")];
    let done = train(&folder, 2, "run", &two, &few);
    done.refused(
        76,
        &["only NCCL moves data between GPUs of several processes", "4 ranks share 3 GPUs"],
    );
    // GPU 2 belongs to rank 2, in process 1.
    let fails = [("FAKECUDA_FAIL", "nccl-init:1@2")];
    let done = train(&folder, 2, "other", &two, &fails);
    done.refused(76, &["rank 2, GPU 2", "unhandled system error (process 1 on "]);
}

#[test]
fn a_process_with_gpus_that_is_killed_or_stopped_ends_all() {
    if !has_mpirun() {
        return;
    }
    let folder = Folder::new();
    let set = [BASE, &[ON_GPUS, "train.steps=4"]].concat();
    let go_on = |run: &str, steps| {
        let set = [&set, &[steps][..]].concat();
        train(&folder, 0, run, &set, &[]).ok();
    };
    // A process that is killed early may end the others before any checkpoint has its name.
    go_on("begun", "train.steps=2");
    copy(&folder.path("begun"), &folder.path("straight"));
    go_on("straight", "train.steps=4");
    for (number, how) in [FaultAction::Kill, FaultAction::Stop].into_iter().enumerate() {
        let run = format!("run-{number}");
        copy(&folder.path("begun"), &folder.path(&run));
        let fault = Fault { how, victim: 1 - number, place: Some(FaultPoint::Step), time: 3 };
        let done = suffer(&folder, 2, &run, &set, fault);
        assert_named(&done, fault);
        assert_whole(&folder, &run);
        go_on(&run, "train.steps=4");
        assert_same_end(&folder, "straight", &run, &fault.to_string());
    }
}

/// `config check` counts only the ranks of its machine; other host names are other machines.
#[test]
fn streams_are_counted_by_machine() {
    if !has_mpirun() {
        return;
    }
    let renames = ["-u", "true"];
    if !std::process::Command::new("unshare").args(renames).status().is_ok_and(|s| s.success()) {
        println!("SKIPPED: a process may not change its machine's name here");
        return;
    }
    let folder = Folder::new();
    let set = sets(&[
        ON_GPUS,
        "parallel.tensor=1",
        "parallel.data=24",
        "batch.global=24",
        "batch.micro=1",
    ]);
    let check = |renamed: bool| {
        let own = NUMBER.map(|name| format!("${{{name}-}}")).concat();
        let rename = if renamed { format!("hostname node{own}; ") } else { String::new() };
        let mut started = launch(&folder, 2, "unshare");
        started.args(["-u", "sh", "-c", &format!("{rename}exec \"$0\" \"$@\"")]);
        started.args([env!("CARGO_BIN_EXE_onebox"), "config", "check", "tiny.ron"]).args(&set);
        on_gpus(&folder, &mut started);
        Folder::done(started)
    };
    let done = check(true).ok();
    assert_eq!(done.stdout.matches(": ok: ").count(), 1, "{}", done.stdout);
    let text = "6 ranks on a GPU have 36 streams; its 32 hardware queues order those of 5";
    let done = check(false);
    done.refused(78, &[text, "use at most 20 ranks on 4 GPUs"]);
}
