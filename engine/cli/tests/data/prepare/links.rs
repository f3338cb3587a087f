//! Links, pipes and endless files at the places that `data prepare` writes and reads.

use super::{TOKENIZER, checked, folder, made, onebox};
use crate::common::{CommandOutput, Folder};
use std::fs;
use std::os::unix::fs::symlink;
use std::process::Command;

fn prepare(folder: &Folder, out: &str) -> CommandOutput {
    onebox(folder, &["data", "prepare", "tiny.ron", out], &TOKENIZER)
}

fn pipe(folder: &Folder, name: &str) {
    assert!(Command::new("mkfifo").arg(folder.path(name)).status().unwrap().success());
}

#[test]
fn no_file_outside_of_its_folder_is_overwritten_and_no_pipe_is_waited_for() {
    let folder = folder();
    fs::create_dir(folder.path("theirs")).unwrap();
    fs::write(folder.path("theirs/victim"), "theirs").unwrap();
    let is_whole = || {
        assert_eq!(folder.read("theirs/victim"), "theirs");
        assert_eq!(fs::read_dir(folder.path("theirs")).unwrap().count(), 1);
    };
    // A link at the place of the lock is not followed.
    for (out, why) in [
        ("a", "prepare.lock: cannot be written: it is a symbolic link"),
        ("b", "prepare.lock: cannot be written: it is a pipe"),
    ] {
        fs::create_dir(folder.path(out)).unwrap();
        let lock = format!("{out}/.prepare.lock");
        match out {
            "a" => symlink("../theirs/victim", folder.path(&lock)).unwrap(),
            _ => pipe(&folder, &lock),
        }
        prepare(&folder, out).refused(74, &[why]);
        is_whole();
    }
    // A link at the place of an unfinished file is replaced.
    prepare(&folder, "whole").ok();
    for out in ["c", "d"] {
        fs::create_dir_all(folder.path(out).join("train.partial")).unwrap();
        fs::write(folder.path(out).join(".prepare.lock"), "").unwrap();
        for name in ["prepared.tmp", "train.partial/000000.tmp"] {
            let name = format!("{out}/{name}");
            match out {
                "c" => symlink(folder.path("theirs/victim"), folder.path(&name)).unwrap(),
                _ => pipe(&folder, &name),
            }
        }
        prepare(&folder, out).ok();
        is_whole();
        folder.shell(&format!("diff -r whole/train {out}/train")).ok();
    }
    // A folder behind a link is not used either.
    for name in ["train.partial", "train"] {
        let out = folder.path("e");
        fs::create_dir(&out).unwrap();
        fs::write(out.join(".prepare.lock"), "").unwrap();
        symlink("../theirs", out.join(name)).unwrap();
        let why = format!("e/{name}: it is a symbolic link, and parts are written into no folder");
        prepare(&folder, "e").refused(73, &[&why]);
        is_whole();
        fs::remove_dir_all(out).unwrap();
    }
}

#[test]
fn a_list_without_end_is_refused() {
    let folder = folder();
    let sets = made(&folder);
    let list = folder.path("made/prepared.json");
    let good = fs::read(&list).unwrap();
    let all = |why: &str| {
        checked(&folder, &sets).refused(66, &["prepared.json", why]);
        prepare(&folder, "made").refused(73, &["prepared.json", why]);
    };
    fs::remove_file(&list).unwrap();
    fs::File::create(&list).unwrap().set_len(1 << 40).unwrap();
    all("it has more than 33554432 bytes");
    for (what, why) in
        [("/dev/zero", "it is not a regular file"), ("pipe", "it is not a regular file")]
    {
        fs::remove_file(&list).unwrap();
        match what {
            "pipe" => pipe(&folder, "made/prepared.json"),
            to => symlink(to, &list).unwrap(),
        }
        all(why);
    }
    fs::remove_file(&list).unwrap();
    fs::write(&list, good).unwrap();
    checked(&folder, &sets).ok();
}
