//! Runs from given weights, and runs that are rolled back: several processes equal one.

use super::launch::{SAVES, assert_same, command, has_mpirun, metrics, sets, train};
use crate::common::{CommandOutput, Folder, OVERFLOWING, with_chats};
use std::collections::BTreeSet;

/// Names of the folders in `folder`.
fn runs(folder: &Folder) -> BTreeSet<String> {
    let all = std::fs::read_dir(folder.path("")).unwrap().flatten();
    let folders = all.filter(|entry| entry.path().is_dir());
    folders.map(|entry| entry.file_name().into_string().unwrap()).collect()
}

#[test]
fn a_fork_by_several_processes_is_that_of_one() {
    if !has_mpirun() {
        return;
    }
    let folder = Folder::new();
    let layout = ["parallel.tensor=1", "parallel.data=4", "schedule.decay_steps=40"];
    let set = [SAVES, &layout, &["train.steps=4"]].concat();
    assert_eq!(train(&folder, 0, "run", &["-q"], &set).code, 0);
    let changed = [SAVES, &layout, &["optimizer.lr=1e-3"]].concat();
    let fork = |count| {
        let before = runs(&folder);
        let done = train(&folder, count, "run", &["--fork"], &changed);
        assert_eq!(done.code, 0, "{}", done.stderr);
        let mut new = runs(&folder).difference(&before).cloned().collect::<Vec<_>>();
        assert_eq!(new.len(), 1, "{new:?}");
        new.remove(0)
    };
    let [one, two] = [fork(0), fork(2)];
    assert_same(&folder, &one, &two, "a fork");
    assert!(metrics(&folder.path(&two)).iter().any(|line| line.contains("step=6")));
}

#[test]
fn a_run_by_several_processes_is_taken_back_as_that_of_one() {
    if !has_mpirun() {
        return;
    }
    let folder = Folder::new();
    folder.write_letters();
    let set = [&OVERFLOWING[..], &["train.steps=20", "train.rollbacks=1000"]].concat();
    let [one, two] = [("one", 0), ("two", 2)].map(|(run, count)| {
        let done = train(&folder, count, run, &[], &set);
        assert_eq!(done.code, 0, "{}", done.stderr);
        done.stderr.matches("the run is taken back to the checkpoint of step").count()
    });
    assert!(one > 0 && one == two, "{one} times, and {two} times");
    assert_same(&folder, "one", "two", "a run that is taken back");
}

#[test]
fn several_processes_start_from_the_weights_of_a_folder_as_one_does() {
    if !has_mpirun() {
        return;
    }
    let folder = with_chats();
    let set = sets(&["train.checkpoint_every=2", "train.checkpoint_keep=9"]);
    let run = |run, count| -> CommandOutput {
        let set = set.iter().map(String::as_str);
        let args: Vec<&str> =
            ["train", "chat.ron", "--run-dir", run].into_iter().chain(set).collect();
        if count == 0 { folder.onebox(&args) } else { Folder::done(command(&folder, count, &args)) }
    };
    run("one", 0).ok();
    run("two", 2).ok();
    assert_same(&folder, "one", "two", "from the weights of a folder");
}
