//! The directory that holds the checkpoints of a run: listing, opening, renaming and removing them.

use super::{Checkpoint, CheckpointError, unreadable};
use files::directory::Directory;
use files::foreign_text::foreign;
use files::names::{CHECKPOINTS, checkpoint_name, entries, step_of};
use files::path_text::ShownPath;
use files::{input, regular_file};
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// File with the name of the newest checkpoint: a hint for people and scripts, not for resumes.
const LATEST: &str = "latest";
/// Temporary name of the hint file.
const GROWING: &str = ".latest.tmp";
/// Longest hint that is read, in bytes.
const LONGEST: u64 = 1 << 10;

/// Suffix for the name of a broken checkpoint; a number follows if the name exists already.
const BROKEN: &str = ".broken";

/// Suffix of a complete checkpoint while another one of the same step takes its name.
const REPLACED: &str = ".replaced";

/// The name of a checkpoint that cannot be used, and the reason.
pub type BrokenCheckpoint = (String, CheckpointError);

/// The newest complete checkpoint in `folder` after a check of every byte, and the reasons why
/// newer checkpoints are unusable. A folder that does not exist holds no checkpoints.
///
/// # Errors
/// [`CheckpointError::Io`] if the folder or a checkpoint cannot be read; it may still be sound.
pub fn newest(
    folder: &Path,
) -> Result<(Option<Checkpoint>, Vec<BrokenCheckpoint>), CheckpointError> {
    match Directory::open(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok((None, Vec::new())),
        opened => newest_until(&opened.map_err(unreadable(folder))?, u64::MAX),
    }
}

/// Like [`newest`], but only among the checkpoints of at most `last` steps.
///
/// # Errors
/// As for [`newest`].
pub fn newest_until(
    folder: &Directory,
    last: u64,
) -> Result<(Option<Checkpoint>, Vec<BrokenCheckpoint>), CheckpointError> {
    let steps = entries(folder, &[""]).map_err(unreadable(folder.path()))?;
    newest_of(folder, steps.into_iter().filter(|(step, _)| *step <= last).collect())
}

/// Like [`newest`], with the names that [`restore`] would give; this function changes no name.
///
/// # Errors
/// As for [`newest`].
pub fn newest_as_restored(
    folder: &Directory,
) -> Result<(Option<Checkpoint>, Vec<BrokenCheckpoint>), CheckpointError> {
    let mut all = entries(folder, &["", REPLACED]).map_err(unreadable(folder.path()))?;
    // Of two checkpoints of a step, the one with the bare name stays and sorts first.
    all.dedup_by_key(|(step, _)| *step);
    newest_of(folder, all)
}

/// The newest complete checkpoint of `all`, which are sorted by age, and the faults of newer checkpoints.
fn newest_of(
    folder: &Directory,
    all: Vec<(u64, String)>,
) -> Result<(Option<Checkpoint>, Vec<BrokenCheckpoint>), CheckpointError> {
    let mut refused = Vec::new();
    for (step, name) in all.into_iter().rev() {
        match open_in(folder, step, &name) {
            Ok(checkpoint) => return Ok((Some(checkpoint), refused)),
            Err(error) if error.is_of_the_system() => return Err(error),
            Err(error) => refused.push((name, error)),
        }
    }
    Ok((None, refused))
}

/// Opens the checkpoint of `step` in `folder`.
///
/// # Errors
/// As for [`Checkpoint::open`].
pub fn open_step(folder: &Directory, step: u64) -> Result<Checkpoint, CheckpointError> {
    open_in(folder, step, &checkpoint_name(step))
}

fn open_in(folder: &Directory, step: u64, name: &str) -> Result<Checkpoint, CheckpointError> {
    let opened = folder.folder(name).map_err(unreadable(&folder.called(name)))?;
    Checkpoint::within(&opened, step)
}

/// Path of the newest checkpoint in `folder`, by name only; its content is not checked.
pub fn newest_name(folder: &Path) -> Option<PathBuf> {
    let (_, name) = entries(&Directory::open(folder).ok()?, &[""]).ok()?.pop()?;
    Some(folder.join(name))
}

/// The newest step of at most `last` among the names of the checkpoints in `folder`.
///
/// # Errors
/// The folder cannot be read.
pub fn newest_step_until(folder: &Directory, last: u64) -> io::Result<Option<u64>> {
    Ok(entries(folder, &[""])?.into_iter().map(|(step, _)| step).filter(|step| *step <= last).max())
}

/// Opens the checkpoint `path`, whose name contains its step.
///
/// # Errors
/// As for [`Checkpoint::open`].
pub fn open_named(path: &Path) -> Result<Checkpoint, CheckpointError> {
    let file = path.file_name().map(|file| file.to_string_lossy()).unwrap_or_default();
    let step = step_of(&file, &[""]).ok_or_else(|| io::Error::other("no name of a checkpoint"));
    Checkpoint::open(path, step.map_err(unreadable(path))?)
}

/// A sign that a folder without checkpoints once had some: a dangling link or the hint file.
pub fn gone(folder: &Path) -> Option<String> {
    if let Ok(to) = fs::read_link(folder)
        && !folder.exists()
    {
        return Some(format!("it is a link to {}, which is not there", to.shown()));
    }
    let latest = regular_file::read(&folder.join(LATEST)).ok()?;
    let latest = String::from_utf8(input::beginning(latest, LONGEST).ok()?).ok()?;
    Some(format!("{LATEST} names {}, which is not there", foreign(latest.trim())))
}

/// Bytes of each checkpoint in `folder`, oldest first; an unreadable part counts as 0 bytes.
pub fn sizes(folder: &Path) -> Vec<u64> {
    let size = |path: PathBuf| {
        let files = fs::read_dir(path).into_iter().flatten().flatten();
        files.map(|file| file.metadata().map_or(0, |metadata| metadata.len())).sum()
    };
    let found = Directory::open(folder).and_then(|folder| entries(&folder, &[""]));
    found.unwrap_or_default().into_iter().map(|(_, name)| size(folder.join(name))).collect()
}

/// Renames a broken checkpoint so that a new one can have its name, and returns the new name.
///
/// # Errors
/// The rename fails, or no free name is left.
pub fn set_aside(folder: &Directory, name: &str) -> io::Result<String> {
    let named = |i: u32| match i {
        1 => format!("{name}{BROKEN}"),
        i => format!("{name}{BROKEN}-{i}"),
    };
    let free = (1..1000).map(named).find(|name| !folder.has(name));
    let free = free.ok_or_else(|| io::Error::other("too many broken ones"))?;
    folder.rename(name, &free).map(|()| free)
}

/// Whether [`set_aside`] created the name `file`.
fn is_set_aside(file: &str) -> bool {
    let Some((bare, number)) = file.split_once(BROKEN) else { return false };
    let number = number.strip_prefix('-').map_or(number.is_empty(), |number| {
        number.parse().is_ok_and(|i: u32| i > 1 && i.to_string() == number)
    });
    number && step_of(bare, &[""]).is_some()
}

/// Removes every checkpoint of the run directory `run`: complete, unfinished and set aside. Also
/// removes their folder if it is empty then.
///
/// # Errors
/// The first checkpoint that cannot be removed.
pub fn remove_all(run: &Directory) -> io::Result<()> {
    remove_checkpoints(run, CHECKPOINTS)
}

/// Removes every checkpoint in the folder `name` of the run directory `run`, and the folder if it is
/// empty then.
///
/// # Errors
/// The first checkpoint that cannot be removed.
pub(crate) fn remove_checkpoints(run: &Directory, name: &str) -> io::Result<()> {
    let folder = match run.leads_to(name) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        opened => opened?,
    };
    for name in folder.names()?.into_iter().filter_map(|name| name.into_string().ok()) {
        if step_of(&name, &["", ".tmp", ".old", REPLACED]).is_some() || is_set_aside(&name) {
            folder.remove(&name)?;
        }
    }
    let hints = [LATEST, GROWING].map(|name| folder.remove_file(name));
    // The folder stays if it holds other files.
    drop((hints, run.remove_empty(name)));
    Ok(())
}

/// Exchanges the names of two complete checkpoints, `name` and `new`, on a file system that cannot
/// do so in one call. A kill in between leaves the checkpoint `name` under a name from which
/// [`restore`] brings it back.
///
/// # Errors
/// Returns the error of the file system. The checkpoint `name` has its name then, or that other one.
pub(crate) fn exchange_by_steps(folder: &Directory, new: &str, name: &str) -> io::Result<()> {
    let old = format!("{name}{REPLACED}");
    folder.rename(name, &old)?;
    folder.sync()?;
    if let Err(error) = folder.rename(new, name) {
        // The first error is the useful one; if this fails, too, the next start brings it back.
        drop(folder.rename(&old, name));
        return Err(error);
    }
    folder.sync()?;
    folder.rename(&old, new)
}

/// A checkpoint without its name, since a process was killed while another checkpoint of the same
/// step took that name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplacedCheckpoint {
    /// Name that it has now.
    pub now: String,
    /// Its own name.
    pub name: String,
    /// Whether the other checkpoint has the name.
    pub is_replaced: bool,
}

/// The checkpoints in `folder` that [`restore`] renames or removes.
///
/// # Errors
/// Returns the error of the file system.
pub fn replaced(folder: &Directory) -> io::Result<Vec<ReplacedCheckpoint>> {
    let one = |(step, now)| {
        let name = checkpoint_name(step);
        ReplacedCheckpoint { is_replaced: folder.has(&name), now, name }
    };
    Ok(entries(folder, &[REPLACED])?.into_iter().map(one).collect())
}

/// Gives a checkpoint its name back if a process was killed while another one of the same step took
/// that name. If the other one has the name, the checkpoint is removed.
///
/// # Errors
/// Returns the error of the file system.
pub fn restore(folder: &Directory) -> io::Result<()> {
    for ReplacedCheckpoint { now: old, name, is_replaced } in replaced(folder)? {
        let to = if is_replaced { format!("{name}.old") } else { name };
        match folder.rename(&old, &to) {
            // Another process of this run was faster.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            renamed => renamed?,
        }
        folder.sync()?;
        if is_replaced {
            folder.remove(&to)?;
        }
    }
    Ok(())
}

/// Removes the checkpoints that a dead process left half written or half removed.
///
/// # Errors
/// The first checkpoint that cannot be removed. All further checkpoints are removed nevertheless.
pub fn clean(folder: &Directory) -> io::Result<()> {
    restore(folder)?;
    let removed =
        entries(folder, &[".tmp", ".old"])?.into_iter().map(|(_, name)| folder.remove(&name));
    removed.fold(Ok(()), io::Result::and)
}

/// Removes the checkpoints before `oldest`, except the checkpoints of the steps `kept`.
pub fn retain_from(folder: &Directory, oldest: u64, kept: &[u64]) -> io::Result<()> {
    remove_those(folder, |step| step < oldest && !kept.contains(&step))
}

/// Removes the checkpoints after `newest`.
///
/// # Errors
/// The first checkpoint that cannot be removed.
pub fn remove_after(folder: &Directory, newest: u64) -> io::Result<()> {
    remove_those(folder, |step| step > newest)?;
    // The folder may belong to another run.
    if folder.has(&checkpoint_name(newest))
        && let Err(error) = hint(folder, newest)
    {
        // The hint is optional, so a failed write is only a warning.
        tracing::warn!("{error}");
    }
    Ok(())
}

/// Removes the checkpoints whose step satisfies `goes`. Each is renamed first and the renames are
/// synced, so a crash leaves no partial checkpoint under its final name.
pub(crate) fn remove_those(folder: &Directory, goes: impl Fn(u64) -> bool) -> io::Result<()> {
    let mut gone = Vec::new();
    for (_, name) in entries(folder, &[""])?.into_iter().filter(|(step, _)| goes(*step)) {
        let old = format!("{name}.old");
        folder.rename(&name, &old)?;
        gone.push(old);
    }
    if !gone.is_empty() {
        folder.sync()?;
    }
    gone.iter().try_for_each(|old| folder.remove(old))
}

/// Replaces the hint file atomically.
///
/// # Errors
/// The file cannot be written; the error contains its path.
pub fn hint(folder: &Directory, step: u64) -> io::Result<()> {
    let write = || {
        let mut file = folder.create(GROWING)?;
        writeln!(file, "{}", checkpoint_name(step))?;
        file.sync_all()?;
        folder.rename(GROWING, LATEST)
    };
    write().map_err(|error| {
        // Ignore errors of the cleanup: the first error is the useful one.
        drop(folder.remove_file(GROWING));
        let at = folder.called(LATEST);
        io::Error::new(error.kind(), format!("cannot write {}: {error}", at.display()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn only_names_that_are_written_here_count() {
        assert_eq!(step_of("step-00000120", &[""]), Some(120));
        assert_eq!(step_of("step-00000120.tmp", &[".tmp", ".old"]), Some(120));
        assert_eq!(step_of("step-123456789", &[""]), Some(123_456_789));
        for stray in [
            "step-",
            "step-5",
            "step--0000001",
            "step-+0000001",
            "step-000000120",
            "STEP-00000001",
            "step-00000120.tmp",
            "old-step-00000120",
            "step-99999999999999999999",
            "latest",
            "step-0000000a",
        ] {
            assert_eq!(step_of(stray, &[""]), None, "{stray}");
        }
    }

    /// Each state in which a kill can leave the folder holds a complete checkpoint of the step.
    #[test]
    fn names_that_are_exchanged_by_steps_never_lose_the_checkpoint() {
        let names = ["", ".tmp", REPLACED].map(|ending| checkpoint_name(2) + ending);
        let [name, new, replaced] = names.each_ref().map(String::as_str);
        let made = |all: &[(&str, &str)]| {
            let folder = tempfile::tempdir().unwrap();
            for (name, text) in all {
                fs::create_dir(folder.path().join(name)).unwrap();
                fs::write(folder.path().join(name).join("text"), text).unwrap();
            }
            (Directory::open(folder.path()).unwrap(), folder)
        };
        let left = |folder: &tempfile::TempDir| {
            let names = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path());
            let text = |path: PathBuf| {
                let text = fs::read_to_string(path.join("text")).unwrap();
                (path.file_name().unwrap().to_string_lossy().into_owned(), text)
            };
            names.map(text).collect::<BTreeMap<_, _>>()
        };
        let is = |all: &[(&str, &str)]| {
            all.iter()
                .map(|(name, text)| ((*name).to_owned(), (*text).to_owned()))
                .collect::<BTreeMap<_, _>>()
        };
        let (opened, folder) = made(&[(name, "old"), (new, "new")]);
        exchange_by_steps(&opened, new, name).unwrap();
        assert_eq!(left(&folder), is(&[(name, "new"), (new, "old")]));
        // A new checkpoint that is not there leaves the old one where it was.
        let (opened, folder) = made(&[(name, "old")]);
        exchange_by_steps(&opened, new, name).unwrap_err();
        assert_eq!(left(&folder), is(&[(name, "old")]));
        for (killed, kept) in [
            (&[(replaced, "old"), (new, "new")][..], "old"),
            (&[(replaced, "old"), (name, "new")][..], "new"),
        ] {
            let (opened, folder) = made(killed);
            let is_replaced = kept == "new";
            let expected =
                ReplacedCheckpoint { now: replaced.into(), name: name.into(), is_replaced };
            assert_eq!(super::replaced(&opened).unwrap(), [expected]);
            restore(&opened).unwrap();
            assert_eq!(left(&folder).get(name).map(String::as_str), Some(kept));
            assert!(!left(&folder).contains_key(replaced));
            // A save that begins keeps it, too.
            let (opened, folder) = made(killed);
            clean(&opened).unwrap();
            assert_eq!(left(&folder), is(&[(name, kept)]));
            let run = tempfile::tempdir().unwrap();
            fs::rename(folder.path(), run.path().join(CHECKPOINTS)).unwrap();
            remove_all(&Directory::open(run.path()).unwrap()).unwrap();
            assert!(!run.path().join(CHECKPOINTS).exists());
        }
    }

    #[test]
    fn what_is_set_aside_is_removed_with_all_and_nothing_that_only_looks_like_it() {
        let folder = tempfile::tempdir().unwrap();
        let run = Directory::open(folder.path()).unwrap();
        let folder = folder.path().join(CHECKPOINTS);
        for ending in ["", "-2", "-3"] {
            fs::create_dir_all(folder.join(checkpoint_name(2))).unwrap();
            let to = format!("step-00000002.broken{ending}");
            assert_eq!(
                set_aside(&run.leads_to(CHECKPOINTS).unwrap(), &checkpoint_name(2)).unwrap(),
                to
            );
        }
        for ending in ["", ".tmp", ".old", REPLACED] {
            fs::create_dir(folder.join(checkpoint_name(4) + ending)).unwrap();
        }
        let theirs = ["step-2.broken", "step-00000002.broken-02", "step-00000002.broken.kept"];
        theirs.iter().for_each(|name| fs::create_dir(folder.join(name)).unwrap());
        remove_all(&run).unwrap();
        assert!(theirs.iter().all(|name| folder.join(name).exists()));
        assert_eq!(fs::read_dir(&folder).unwrap().count(), theirs.len());
    }
}
