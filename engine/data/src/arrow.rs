//! Data sets that the Python library `datasets` has saved as Arrow files. onebox does not read them:
//! its error has the line of Python that converts them.

use super::problem::{Failure, Problem, at};
use files::input;
use files::shell::quoted;
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// The list of splits that `DatasetDict.save_to_disk` writes.
const SPLITS: &str = "dataset_dict.json";
/// The list of files that `Dataset.save_to_disk` writes.
const STATE: &str = "state.json";
/// Largest list of splits, in bytes.
const LARGEST: u64 = 1 << 20;

#[derive(Deserialize)]
struct SplitList {
    splits: Vec<String>,
}

/// Whether the name of a file says that it is an Arrow file.
pub(super) fn is_named(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "arrow")
}

/// Refuses a folder of `save_to_disk`.
pub(super) fn check(folder: &Path) -> Result<(), Failure> {
    // Without a slash at the end.
    let folder = &*folder.components().collect::<PathBuf>();
    let command = match (splits(folder), is_saved(folder)) {
        (Some(splits), _) => of_splits(folder, &splits),
        (None, true) => of_saved(folder, ""),
        (None, false) => return Ok(()),
    };
    Err(at(folder)(Problem::Arrow { command }))
}

/// The command that converts an Arrow file, or the saved data set that contains the file.
pub(super) fn command(path: &Path) -> String {
    match path.parent().filter(|folder| is_saved(folder)) {
        Some(folder) => of_saved(folder, ""),
        None => {
            let (from, to) = (literal(path), literal(&path.with_extension("jsonl")));
            python(&format!(
                "from datasets import Dataset; Dataset.from_file({from}).to_json({to})"
            ))
        }
    }
}

/// Whether a folder has the list of files of a saved data set. Other programs write a file of this
/// name, too.
fn is_saved(folder: &Path) -> bool {
    let text = input::text(&folder.join(STATE), LARGEST).unwrap_or_default();
    serde_json::from_str::<serde_json::Value>(&text)
        .is_ok_and(|state| state["_data_files"].is_array())
}

fn splits(folder: &Path) -> Option<Vec<String>> {
    let text = input::text(&folder.join(SPLITS), LARGEST).ok()?;
    serde_json::from_str(&text).ok().map(|SplitList { splits }| splits)
}

/// One line for all splits of a data set, with a file for each.
fn of_splits(folder: &Path, splits: &[String]) -> String {
    let (from, to) = (literal(folder), literal(&path_with_ending(folder, "-")));
    match splits {
        [split] => of_saved(folder, split),
        _ => python(&format!(
            "from datasets import load_from_disk; [rows.to_json({to} + name + \".jsonl\") for name, rows in load_from_disk({from}).items()]"
        )),
    }
}

fn of_saved(folder: &Path, split: &str) -> String {
    let (from, to) = (literal(folder), literal(&path_with_ending(folder, ".jsonl")));
    let split = match split {
        "" => String::new(),
        split => format!("[{}]", serde_json::Value::from(split)),
    };
    python(&format!(
        "from datasets import load_from_disk; load_from_disk({from}){split}.to_json({to})"
    ))
}

/// The path `folder` with `ending` appended to its last name.
fn path_with_ending(folder: &Path, ending: &str) -> PathBuf {
    PathBuf::from(format!("{}{ending}", folder.display()))
}

/// A path as a text of Python. A text of JSON is one.
fn literal(path: &Path) -> String {
    serde_json::Value::from(path.to_string_lossy()).to_string()
}

fn python(script: &str) -> String {
    format!("python3 -c {}", quoted(script))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_of_another_program_is_no_saved_data_set() {
        let folder = tempfile::tempdir().unwrap();
        let write = |text| std::fs::write(folder.path().join(STATE), text).unwrap();
        write("{\"version\": 4}");
        assert!(check(folder.path()).is_ok());
        write("{\"_data_files\": [{\"filename\": \"data-00000-of-00001.arrow\"}]}");
        assert!(check(folder.path()).is_err());
    }
}
