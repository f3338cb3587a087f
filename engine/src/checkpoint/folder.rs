//! The directory that holds the checkpoints of a run: what is in it, in which order, and what goes.

use super::{Checkpoint, CheckpointError, unreadable};
use crate::run_dir::durable::sync_folder;
use crate::run_dir::own;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// A hint for people and scripts, never read: the name of the newest checkpoint.
const LATEST: &str = "latest";

/// What a checkpoint's name gets that is set aside, and a number where there are several of it.
const BROKEN: &str = ".broken";

/// `step-00000120`
pub(super) fn name(step: u64) -> String {
    format!("step-{step:08}")
}

/// The step that a name says, when it is [`name`] with one of `endings`.
pub(super) fn step_of(file: &str, endings: &[&str]) -> Option<u64> {
    let bare = endings.iter().find_map(|ending| file.strip_suffix(ending))?;
    let step = bare.strip_prefix("step-")?.parse().ok()?;
    (name(step) == bare).then_some(step)
}

/// Steps and paths of what is called as a checkpoint with one of `endings`, oldest first; other names are not ours.
pub(super) fn entries(folder: &Path, endings: &[&str]) -> io::Result<Vec<(u64, PathBuf)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        if let Some(step) = step_of(&entry.file_name().to_string_lossy(), endings) {
            found.push((step, entry.path()));
        }
    }
    found.sort();
    Ok(found)
}

/// A checkpoint that cannot be used, and why.
pub(crate) type Broken = (PathBuf, CheckpointError);

/// The newest checkpoint in `folder` that is whole, every byte of it checked, and why each newer one is not.
///
/// # Errors
/// [`CheckpointError::Io`] when the folder or a checkpoint cannot be read, which is no sign that it is broken; a folder that
/// does not exist holds none.
pub fn newest(folder: &Path) -> Result<(Option<Checkpoint>, Vec<Broken>), CheckpointError> {
    newest_until(folder, u64::MAX)
}

/// [`newest`] of those that hold at most `last` steps.
///
/// # Errors
/// As `newest`.
pub(crate) fn newest_until(
    folder: &Path,
    last: u64,
) -> Result<(Option<Checkpoint>, Vec<Broken>), CheckpointError> {
    let steps = match entries(folder, &[""]) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        other => other.map_err(unreadable(folder))?,
    };
    let mut refused = Vec::new();
    for (step, path) in steps.into_iter().rev().filter(|(step, _)| *step <= last) {
        match Checkpoint::open(&path, step) {
            Ok(checkpoint) => return Ok((Some(checkpoint), refused)),
            Err(error) if error.is_of_the_system() => return Err(error),
            Err(error) => refused.push((path, error)),
        }
    }
    Ok((None, refused))
}

/// The newest checkpoint in `folder` by its name, which is all that is looked at.
pub(crate) fn newest_name(folder: &Path) -> Option<PathBuf> {
    entries(folder, &[""]).ok()?.pop().map(|(_, path)| path)
}

/// The newest step of at most `last` that a checkpoint in `folder` has by its name.
///
/// # Errors
/// The folder is there and cannot be read.
pub(crate) fn newest_step_until(folder: &Path, last: u64) -> io::Result<Option<u64>> {
    match entries(folder, &[""]) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        other => Ok(other?.into_iter().map(|(step, _)| step).filter(|step| *step <= last).max()),
    }
}

/// Opens the checkpoint `path`, whose name says its step.
///
/// # Errors
/// As [`Checkpoint::open`].
pub(crate) fn open_named(path: &Path) -> Result<Checkpoint, CheckpointError> {
    let file = path.file_name().map(|file| file.to_string_lossy()).unwrap_or_default();
    let step = step_of(&file, &[""]).ok_or_else(|| io::Error::other("no name of a checkpoint"));
    Checkpoint::open(path, step.map_err(unreadable(path))?)
}

/// What must have been in `folder`, where no checkpoint is, and is gone; none where nothing speaks for it.
pub(crate) fn gone(folder: &Path) -> Option<String> {
    if let Ok(to) = fs::read_link(folder)
        && !folder.exists()
    {
        return Some(format!("it is a link to {}, which is not there", to.display()));
    }
    let latest = fs::read_to_string(folder.join(LATEST)).ok()?;
    Some(format!("{LATEST} names {}, which is not there", latest.trim().escape_debug()))
}

/// Whether `folder` holds checkpoints, whole or broken.
pub(crate) fn any(folder: &Path) -> bool {
    entries(folder, &[""]).is_ok_and(|all| !all.is_empty())
}

/// Bytes of the files of each checkpoint in `folder`, oldest first; what cannot be looked at counts as nothing.
pub(crate) fn sizes(folder: &Path) -> Vec<u64> {
    let size = |path: PathBuf| {
        let files = fs::read_dir(path).into_iter().flatten().flatten();
        files.map(|file| file.metadata().map_or(0, |metadata| metadata.len())).sum()
    };
    entries(folder, &[""]).unwrap_or_default().into_iter().map(|(_, path)| size(path)).collect()
}

/// Gives a broken checkpoint another name, so that a new one can take its place.
///
/// # Errors
/// Those of the rename.
pub(crate) fn set_aside(path: &Path) -> io::Result<PathBuf> {
    let named = |i: u32| {
        let mut name = path.as_os_str().to_owned();
        name.push(BROKEN);
        if i > 1 {
            name.push(format!("-{i}"));
        }
        PathBuf::from(name)
    };
    let free = (1..1000).map(named).find(|path| fs::symlink_metadata(path).is_err());
    let free = free.ok_or_else(|| io::Error::other("too many broken ones"))?;
    fs::rename(path, &free).map(|()| free)
}

/// Whether [`set_aside`] gave this name.
fn is_set_aside(file: &str) -> bool {
    let Some((bare, number)) = file.split_once(BROKEN) else { return false };
    let number = number.strip_prefix('-').map_or(number.is_empty(), |number| {
        number.parse().is_ok_and(|i: u32| i > 1 && i.to_string() == number)
    });
    number && step_of(bare, &[""]).is_some()
}

/// Removes every checkpoint, whole or not, also those that were set aside, and the folder if nothing else is in it.
///
/// # Errors
/// The first that cannot be removed.
pub(crate) fn remove_all(folder: &Path) -> io::Result<()> {
    let found = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    for entry in found {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if step_of(&name, &["", ".tmp", ".old"]).is_some() || is_set_aside(&name) {
            remove(&entry.path())?;
        }
    }
    let hints = [LATEST, ".latest.tmp"].map(|name| fs::remove_file(folder.join(name)));
    // Neither needs to be there, and what else is in the folder stays.
    drop((hints, fs::remove_dir(folder)));
    Ok(())
}

/// Removes what a process that died left half written or half removed.
pub(super) fn clean(folder: &Path) -> io::Result<()> {
    for (_, path) in entries(folder, &[".tmp", ".old"])? {
        remove(&path)?;
    }
    Ok(())
}

/// A directory with all in it; a link itself, not what it leads to.
fn remove(path: &Path) -> io::Result<()> {
    if fs::symlink_metadata(path)?.is_dir() {
        fs::remove_dir_all(path)
    } else {
        fs::remove_file(path)
    }
}

/// Removes the checkpoints before `oldest`.
pub(super) fn retain_from(folder: &Path, oldest: u64) -> io::Result<()> {
    remove_those(folder, |step| step < oldest)
}

/// Removes the checkpoints after `newest`.
///
/// # Errors
/// The first that cannot be removed.
pub(crate) fn remove_after(folder: &Path, newest: u64) -> io::Result<()> {
    if !folder.is_dir() {
        return Ok(());
    }
    remove_those(folder, |step| step > newest)?;
    // It may be another run's.
    if folder.join(name(newest)).is_dir() { hint(folder, newest) } else { Ok(()) }
}

/// Each loses its name first, and that on the disk, so that none is ever half there.
pub(super) fn remove_those(folder: &Path, goes: impl Fn(u64) -> bool) -> io::Result<()> {
    let mut gone = Vec::new();
    for (step, path) in entries(folder, &[""])? {
        if goes(step) {
            let old = folder.join(name(step) + ".old");
            fs::rename(&path, &old)?;
            gone.push(old);
        }
    }
    if !gone.is_empty() {
        sync_folder(folder)?;
    }
    gone.iter().try_for_each(|old| remove(old))
}

/// Writes the hint anew, whole or not at all.
pub(super) fn hint(folder: &Path, step: u64) -> io::Result<()> {
    let temporary = folder.join(".latest.tmp");
    let mut file = own::create(&temporary)?;
    writeln!(file, "{}", name(step))?;
    file.sync_all()?;
    fs::rename(temporary, folder.join(LATEST))
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn what_is_set_aside_is_removed_with_all_and_nothing_that_only_looks_like_it() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("checkpoints");
        let broken = folder.join(name(2));
        for ending in ["", "-2", "-3"] {
            fs::create_dir_all(&broken).unwrap();
            let to = folder.join(format!("step-00000002.broken{ending}"));
            assert_eq!(set_aside(&broken).unwrap(), to);
        }
        let theirs = ["step-2.broken", "step-00000002.broken-02", "step-00000002.broken.kept"];
        theirs.iter().for_each(|name| fs::create_dir(folder.join(name)).unwrap());
        remove_all(&folder).unwrap();
        assert!(theirs.iter().all(|name| folder.join(name).exists()));
        assert_eq!(fs::read_dir(&folder).unwrap().count(), theirs.len());
    }
}
