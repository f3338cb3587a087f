//! Tests of a file that other programs remove, replace or cut off while a run appends to it.

use super::*;
use crate::metrics::MetricsWriter;
use crate::tensorboard::{Events, files as event_files};
use files::directory::Directory;
use files::names::{LOCK, METRICS};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

/// Directory of a run that this process has locked.
fn locked(path: &Path) -> Arc<LockedRunDir> {
    let directory = Directory::open(path).unwrap();
    let lock = directory.open_or_create(LOCK, OFlags::empty()).unwrap();
    lock.try_lock().unwrap();
    Arc::new(LockedRunDir::new(directory, lock))
}

/// Warnings of `work`, one per line.
fn warnings(work: impl FnOnce()) -> Vec<String> {
    let log = tempfile::NamedTempFile::new().unwrap();
    let subscriber =
        tracing_subscriber::fmt().with_ansi(false).with_writer(Arc::new(log.reopen().unwrap()));
    tracing::subscriber::with_default(subscriber.finish(), work);
    fs::read_to_string(log.path()).unwrap().lines().map(str::to_owned).collect()
}

/// Writes lines 1 to 3, calls `meanwhile` with the path of the file in a run's directory, and
/// writes lines 4 to 6. Returns the warnings, the contents of the file, and the lines lost.
fn lines_beside(meanwhile: impl Fn(&Path)) -> (Vec<String>, String, u64) {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path().join("run");
    fs::create_dir(&run).unwrap();
    let (held, path) = (locked(&run), run.join(METRICS));
    let mut metrics = MetricsWriter::open(&held, 0).unwrap();
    metrics.clock = || 8.5;
    (1..=3).for_each(|step| metrics.eval(step, 1.5, true, &[]));
    meanwhile(&path);
    let warned = warnings(|| {
        (4..=6).for_each(|step| metrics.eval(step, 1.5, true, &[]));
        metrics.sync();
    });
    if let Ok(victim) = fs::read_to_string(run.join("victim")) {
        assert_eq!(victim, "theirs");
    }
    // A read of a pipe would block.
    let text = fs::read_to_string(run.join("kept")).or_else(|_| fs::read_to_string(&path));
    (warned, text.unwrap(), metrics.dropped())
}

fn lines(steps: impl IntoIterator<Item = u64>) -> String {
    let line = |step| {
        format!("{{\"kind\":\"eval\",\"step\":{step},\"loss\":1.5,\"whole\":true,\"time\":8.5}}\n")
    };
    steps.into_iter().map(line).collect()
}

fn replace(path: &Path, text: &str) {
    let new = path.with_extension("new");
    fs::write(&new, text).unwrap();
    fs::rename(new, path).unwrap();
}

#[test]
fn a_file_that_is_removed_or_replaced_by_a_part_of_it_loses_nothing() {
    let whole = lines(1..=6);
    for (what, expected, meanwhile) in [
        (
            "removed",
            "it was removed",
            &(|path: &Path| fs::remove_file(path).unwrap()) as &dyn Fn(&Path),
        ),
        ("renamed", "it was removed", &|path| fs::rename(path, path.with_extension("1")).unwrap()),
        ("by its copy", "it was replaced", &|path| replace(path, &lines(1..=3))),
        ("by an old copy", "it was replaced", &|path| replace(path, &lines(1..=2)[..70])),
        ("by an empty file", "it was replaced", &|path| replace(path, "")),
    ] {
        let (warned, text, dropped) = lines_beside(meanwhile);
        assert_eq!((text, dropped), (whole.clone(), 0), "{what}");
        assert!(warned.len() == 1 && warned[0].contains(expected), "{what}: {warned:?}");
        assert!(warned[0].contains("none of its lines is lost"), "{what}: {warned:?}");
    }
}

#[test]
fn what_others_put_there_stays_and_later_lines_follow_it() {
    let later = lines(4..=6);
    for (there, between) in [("theirs\n", ""), ("theirs", "\n")] {
        let (warned, text, dropped) = lines_beside(|path| replace(path, there));
        assert_eq!((text, dropped), (format!("{there}{between}{later}"), 0));
        assert!(
            warned.len() == 1 && warned[0].contains("which stay; what it lacks of the lines"),
            "{warned:?}"
        );
    }
    // The file is cut off in the second line.
    let cut = |path: &Path| File::options().write(true).open(path).unwrap().set_len(70).unwrap();
    let (warned, text, _) = lines_beside(cut);
    assert_eq!(text, format!("{}\n{later}", &lines(1..=3)[..70]));
    let is = "it was cut off under the run, from 180 to 70 bytes: what stood behind is lost";
    assert!(warned.len() == 1 && warned[0].contains(is), "{warned:?}");
    // The file is cut off and then removed: the lost bytes stay lost.
    let (warned, text, _) = lines_beside(|path| {
        cut(path);
        fs::remove_file(path).unwrap();
    });
    assert_eq!(text, format!("{}\n{later}", &lines(1..=3)[..70]));
    assert!(warned.len() == 2 && warned[1].contains("it was removed"), "{warned:?}");
}

#[test]
fn neither_links_nor_pipes_are_written_and_nothing_in_a_directory_that_is_anothers() {
    type Case<'a> = (&'a str, &'a str, &'a dyn Fn(&Path));
    let kept = |path: &Path| fs::rename(path, path.with_file_name("kept")).unwrap();
    let cases: [Case<'_>; 5] = [
        ("link", "symbolic link", &|path| {
            kept(path);
            fs::write(path.with_file_name("victim"), "theirs").unwrap();
            symlink("victim", path).unwrap();
        }),
        ("pipe", "it is no file", &|path| {
            kept(path);
            assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
        }),
        ("directory", "irectory", &|path| {
            kept(path);
            fs::create_dir(path).unwrap();
        }),
        ("lock", "another process has locked", &|path| {
            fs::remove_file(path.with_file_name(LOCK)).unwrap();
            fs::write(path.with_file_name(LOCK), "1").unwrap();
        }),
        ("another run", "another directory is in the place", &|path| {
            let run = path.parent().unwrap();
            fs::remove_file(path).unwrap();
            fs::rename(run, run.with_extension("moved")).unwrap();
            fs::create_dir(run).unwrap();
            fs::write(path, lines(1..=3)).unwrap();
        }),
    ];
    for (what, why, meanwhile) in cases {
        let check = |path: &Path| {
            meanwhile(path);
            // The directory stays.
            assert!(path.parent().unwrap().is_dir());
        };
        let (warned, text, dropped) = lines_beside(check);
        assert!(dropped == 3 && warned[0].contains(why), "{what}: {warned:?}");
        let writes = warned.iter().filter(|line| line.contains("cannot write")).count();
        assert_eq!(writes, 1, "{what}: {warned:?}");
        assert_eq!(text, lines(1..=3), "{what}");
    }
}

#[test]
fn events_whose_file_lost_some_go_on_in_another_file() {
    let names = |run: &Path| {
        let mut all = event_files(&Directory::open(run).unwrap());
        all.sort();
        all.into_iter().map(|(_, name)| fs::read(run.join(name)).unwrap()).collect::<Vec<_>>()
    };
    let after = |meanwhile: &dyn Fn(&Path)| {
        let folder = tempfile::tempdir().unwrap();
        let held = locked(folder.path());
        let mut events = Events::create(&held, 0).unwrap();
        events.scalars(1, &[("loss/train", 2.5)]);
        let before = names(folder.path()).remove(0);
        let (_, name) = event_files(held.check().unwrap()).remove(0);
        meanwhile(&folder.path().join(name));
        let warned =
            warnings(|| (2..=3).for_each(|step| events.scalars(step, &[("loss/train", 2.0)])));
        assert_eq!(warned.len(), 1, "{warned:?}");
        (before, names(folder.path()))
    };
    let (before, now) = after(&|path| fs::remove_file(path).unwrap());
    assert!(now.len() == 1 && now[0].starts_with(&before) && now[0].len() > before.len() + 60);
    for meanwhile in [
        &(|path: &Path| File::options().write(true).open(path).unwrap().set_len(90).unwrap())
            as &dyn Fn(&Path),
        &|path| replace(path, "theirs"),
    ] {
        let (before, now) = after(meanwhile);
        assert!(now.len() == 2 && now[0].len() <= 90, "{now:?}");
        // The new file has the version, the session and both steps.
        assert!(now[1].len() > before.len() && now[1][..12] == before[..12], "{now:?}");
    }
}
