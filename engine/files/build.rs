//! The commit of a release build, for `onebox --version`; none without a git repository.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let version = env!("CARGO_PKG_VERSION");
    let commit = commit().map_or_else(String::new, |commit| format!(" ({commit})"));
    println!("cargo::rustc-env=ONEBOX_VERSION={version}{commit}");
}

fn commit() -> Option<String> {
    let git = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.git");
    // Only a release depends on the commit: other builds would run again after each commit.
    if std::env::var("PROFILE").as_deref() != Ok("release") || !git.exists() {
        return None;
    }
    // Git appends a line to this file at each commit, checkout and reset.
    println!("cargo::rerun-if-changed={}", git.join("logs/HEAD").display());
    let output = Command::new("git").args(["rev-parse", "--short", "HEAD"]).output().ok()?;
    let commit = String::from_utf8(output.stdout).ok().filter(|_| output.status.success());
    commit.map(|commit| commit.trim().to_owned())
}
