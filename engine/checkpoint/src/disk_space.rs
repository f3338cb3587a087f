//! Disk space for the next checkpoint. If too little is free, older checkpoints are removed first.
//! The newest complete checkpoint stays until the next one is complete.

use super::folder::remove_those;
use files::directory::{Directory, available};
use files::names::entries;
use files::path_text::ShownPath;
use std::io::{self, ErrorKind};
use std::path::Path;

/// Free bytes in the file system of `folder` for users other than root.
pub fn free(folder: &Path) -> io::Result<u64> {
    Ok(available(&rustix::fs::statvfs(folder)?))
}

/// Bytes of a checkpoint with `states` bytes of states: 10 % more, for headers and manifest.
pub const fn checkpoint_bytes(states: u64) -> u64 {
    states.saturating_add(states.div_ceil(10))
}

/// Returns an error if fewer than `bytes` are free.
pub fn room(folder: &Directory, bytes: u64) -> io::Result<()> {
    enough(folder.free()?, bytes)
}

fn enough(free: u64, bytes: u64) -> io::Result<()> {
    if free >= bytes {
        return Ok(());
    }
    let size = topology::format_bytes;
    let why = format!("no space: {} needed, {} free", size(bytes), size(free));
    Err(io::Error::new(ErrorKind::StorageFull, why))
}

/// Whether the disk has refused bytes, even if it reports free space.
pub fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded)
}

/// Checkpoints that must stay on the disk.
#[derive(Clone, Copy, Debug)]
pub struct NeededCheckpoints<'a> {
    /// Step of the newest complete one.
    pub newest: u64,
    /// Steps of older checkpoints that are the best of the run.
    pub older: &'a [u64],
}

/// Makes room for `bytes` in `folder`. Removes the oldest checkpoints before the newest until
/// enough is free, and none that is `needed`. If the last save found the disk `full`, it removes at
/// least one.
///
/// # Errors
/// Too little is free and no checkpoint may be removed, or the removal fails.
pub fn make_room(
    folder: &Directory,
    needed: Option<NeededCheckpoints<'_>>,
    mut full: bool,
    bytes: u64,
    free: &dyn Fn(&Directory) -> io::Result<u64>,
) -> io::Result<()> {
    loop {
        let fits = enough(free(folder)?, bytes);
        if fits.is_ok() && !full {
            return Ok(());
        }
        let spare = needed.map_or(Ok(None), |needed| spare(folder, needed))?;
        let (Some(spare), Some(NeededCheckpoints { newest, .. })) = (spare, needed) else {
            return fits;
        };
        let shown = folder.path().shown();
        tracing::warn!(
            "{shown}: no room for another checkpoint: that of step {spare} is removed before the next is written; that \
             of step {newest} stays"
        );
        remove_those(folder, |step| step == spare)?;
        full = false;
    }
}

/// The oldest checkpoint before the newest that is not needed.
fn spare(
    folder: &Directory,
    NeededCheckpoints { newest, older }: NeededCheckpoints<'_>,
) -> io::Result<Option<u64>> {
    let mut steps = entries(folder, &[""])?.into_iter().map(|(step, _)| step);
    Ok(steps.find(|step| *step < newest && !older.contains(step)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder with checkpoints of these steps, 100 bytes each, on a disk of `size` bytes.
    fn on_disk(
        size: u64,
        steps: &[u64],
    ) -> ((Directory, tempfile::TempDir), impl Fn(&Directory) -> io::Result<u64>) {
        let folder = tempfile::tempdir().unwrap();
        let opened = Directory::open(folder.path()).unwrap();
        for step in steps {
            opened.make(&files::names::checkpoint_name(*step)).unwrap();
        }
        ((opened, folder), move |folder: &Directory| {
            Ok(size - 100 * entries(folder, &["", ".tmp", ".old"])?.len() as u64)
        })
    }

    fn left(folder: &Directory) -> Vec<u64> {
        entries(folder, &[""]).unwrap().into_iter().map(|(step, _)| step).collect()
    }

    fn only(newest: u64) -> Option<NeededCheckpoints<'static>> {
        Some(NeededCheckpoints { newest, older: &[] })
    }

    #[test]
    fn the_best_stays_though_it_is_the_oldest() {
        let ((folder, _kept), free) = on_disk(450, &[2, 4, 6]);
        let needed = Some(NeededCheckpoints { newest: 6, older: &[2] });
        make_room(&folder, needed, false, 160, &free).unwrap();
        assert_eq!(left(&folder), [2, 6]);
        assert!(is_full(&make_room(&folder, needed, false, 260, &free).unwrap_err()));
        assert_eq!(left(&folder), [2, 6]);
    }

    #[test]
    fn where_all_that_are_kept_and_one_more_find_room_none_goes() {
        let ((folder, _kept), free) = on_disk(310, &[2, 4]);
        make_room(&folder, only(4), false, 110, &free).unwrap();
        assert_eq!(left(&folder), [2, 4]);
    }

    #[test]
    fn where_they_do_not_the_oldest_go_first_and_the_newest_never() {
        let ((folder, _kept), free) = on_disk(350, &[2, 4, 6]);
        make_room(&folder, only(6), false, 110, &free).unwrap();
        assert_eq!(left(&folder), [4, 6]);
        let why = make_room(&folder, only(6), false, 260, &free).unwrap_err();
        assert!(why.to_string().contains("no space") && is_full(&why), "{why}");
        assert_eq!(left(&folder), [6]);
        // No checkpoint is known to be complete: a new run in a folder of another run.
        make_room(&folder, None, false, 260, &free).unwrap_err();
        assert_eq!(left(&folder), [6]);
    }

    #[test]
    fn a_disk_that_was_full_though_it_said_otherwise_loses_one_each_time() {
        let ((folder, _kept), free) = on_disk(9000, &[2, 4, 6]);
        for expected in [&[4, 6][..], &[6], &[6]] {
            make_room(&folder, only(6), true, 110, &free).unwrap();
            assert_eq!(left(&folder), expected);
        }
    }
}
