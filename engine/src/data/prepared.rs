//! The folders that `onebox data prepare` makes, and those of them that a run may not take.

use super::problem::{Failure, Problem, at};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The name of the list of finished parts, in the folder of all data sets.
pub(super) const MANIFEST: &str = "prepared.json";
/// Behind the name of the folder of a data set that is not finished.
const PARTIAL: &str = "partial";
/// The beginning of the name of a folder of tokens to train on.
const TRAIN: &str = "train";

/// Where the parts of a data set stand before the last one is done.
pub(super) fn partial(folder: &Path) -> PathBuf {
    folder.with_extension(PARTIAL)
}

/// Refuses files of tokens of a data set that is not finished; and the folder `text` if it has several data sets: a run would train on
/// held-out ones.
pub(super) fn check(text: &str, files: &[PathBuf], from_directory: bool) -> Result<(), Failure> {
    let tokens = files.iter().filter(|file| file.extension().is_some_and(|e| e == "bin"));
    let folders: BTreeSet<&Path> = tokens.filter_map(|file| file.parent()).collect();
    let is_half = |folder: &&&Path| folder.extension().is_some_and(|e| e == PARTIAL);
    if let Some(half) = folders.iter().find(is_half) {
        return Err(at(half)(Problem::HalfPrepared));
    }
    let of_all = |folder: &Path| {
        let all = folder.parent().filter(|all| all.starts_with(text))?;
        all.join(MANIFEST).is_file().then(|| all.to_owned())
    };
    let Some(all) = folders.iter().find_map(|folder| of_all(folder)).filter(|_| from_directory)
    else {
        return Ok(());
    };
    let sets = folders.into_iter().filter(|folder| folder.parent() == Some(all.as_path()));
    let trains = |folder: &PathBuf| {
        folder.file_name().is_some_and(|name| name.to_string_lossy().starts_with(TRAIN))
    };
    let (train, held_out) = sets.map(Path::to_owned).partition(trains);
    Err(at(&all)(Problem::AllPrepared { train, held_out }))
}
