//! The committed texts, and the display of differences.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Maximum lines of a difference that are shown.
const SHOWN: usize = 40;

/// The repository: the folder of the lock file, independent of the place of this package.
pub(super) fn root() -> PathBuf {
    let mut folders = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    folders.find(|folder| folder.join("Cargo.lock").exists()).unwrap().to_owned()
}

/// Fails unless `found` is the committed text of `subject`; ONEBOX_UPDATE=1 commits it.
#[track_caller]
pub(super) fn compare(subject: &str, found: &str) {
    let path = root().join(format!("tests/fixtures/outside/{subject}.txt"));
    if std::env::var_os("ONEBOX_UPDATE").is_some() {
        let in_ci = std::env::var_os("CI").is_some_and(|value| value == "true");
        assert!(!in_ci, "ONEBOX_UPDATE writes the text that the test should compare with");
        std::fs::write(&path, found).unwrap();
        return;
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    let package = env!("CARGO_PKG_NAME");
    assert!(
        committed == found,
        "tests/fixtures/outside/{subject}.txt (-) is not what onebox shows (+):\n{}\
         If that is on purpose: ONEBOX_UPDATE=1 cargo test --locked --offline -p {package} --test commands outside::",
        difference(&committed, found)
    );
}

/// Lines that only one of two texts has, below the heading of their section.
pub(super) fn difference(committed: &str, found: &str) -> String {
    let (old, new) = (placed(committed), placed(found));
    let sides = |from: &[(String, String)], other: &[(String, String)], mark: char| {
        let other: BTreeSet<_> = other.iter().collect();
        let alone = from.iter().filter(|line| !other.contains(line));
        alone.map(|(heading, line)| format!("  {heading}\n{mark} {line}\n")).collect::<Vec<_>>()
    };
    let all = [sides(&old, &new, '-'), sides(&new, &old, '+')].concat();
    let more = all.len().saturating_sub(SHOWN);
    let shown: String = all.iter().take(SHOWN).map(String::as_str).collect();
    match (all.is_empty(), more) {
        (true, _) => "the same lines in another order, or another number of times\n".to_owned(),
        (_, 0) => shown,
        (_, more) => format!("{shown}  and {more} lines more\n"),
    }
}

/// Each line with the heading of its section.
fn placed(text: &str) -> Vec<(String, String)> {
    let mut heading = String::new();
    let place = |line: &str| {
        if line.starts_with("# ") {
            line.clone_into(&mut heading);
        }
        (heading.clone(), line.to_owned())
    };
    text.lines().map(place).collect()
}

/// The program's sources, each without its tests.
pub(super) fn sources() -> Vec<String> {
    let mut found = Vec::new();
    add_sources(&root(), &mut found);
    assert!(found.len() > 80);
    found
}

fn add_sources(folder: &Path, found: &mut Vec<String>) {
    let excluded = ["tests", "target", "fuzz", "examples", "tests.rs", "build.rs"];
    for entry in std::fs::read_dir(folder).unwrap() {
        let (path, name) = (entry.as_ref().unwrap().path(), entry.unwrap().file_name());
        let name = name.to_string_lossy().into_owned();
        if excluded.contains(&name.as_str()) || name.starts_with('.') {
            continue;
        }
        if path.is_dir() {
            add_sources(&path, found);
        } else if name.ends_with(".rs") {
            let text = std::fs::read_to_string(&path).unwrap();
            found.push(text.split("#[cfg(test)]\nmod tests {").next().unwrap().to_owned());
        }
    }
}
