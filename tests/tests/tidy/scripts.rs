//! The repository's scripts print their help with `--help`, and refuse wrong arguments.

use std::path::Path;
use std::process::{Command, Stdio};

#[test]
fn no_page_is_written_of_rows_that_are_not_there() {
    let folder = tempfile::tempdir().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/reproduce-paper");
    let mut command = Command::new(script);
    command.args(["--rows", "nothing", "--out"]).arg(folder.path().join("page"));
    let done = command.env("ONEBOX", "/bin/false").stdin(Stdio::null()).output().unwrap();
    let stderr = String::from_utf8_lossy(&done.stderr);
    assert_eq!(done.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains("--rows nothing matches no row of scripts/lib/paper.csv"), "{stderr}");
    assert!(!folder.path().join("page").exists());
}

#[test]
fn every_script_says_how_it_is_used_and_does_nothing_else() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts");
    let mut checked = 0;
    for entry in std::fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        let Ok(text) = std::fs::read_to_string(&path) else { continue };
        let Some(rest) = text.strip_prefix("#!/usr/bin/env bash\n# ") else { continue };
        let mut command = Command::new(&path);
        let done = command.arg("--help").stdin(Stdio::null()).output();
        let done = done.unwrap();
        let stdout = String::from_utf8_lossy(&done.stdout);
        let first = rest.lines().next().unwrap();
        assert!(done.status.success() && stdout.starts_with(first), "{}: {stdout}", path.display());
        assert!(done.stderr.is_empty(), "{}: {:?}", path.display(), done.stderr);
        checked += 1;
    }
    assert!(checked >= 15, "{checked} scripts");
}
