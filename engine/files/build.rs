//! The commit that a release is built from, for `onebox --version`; none where there is no git.

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
    // Other builds would be made anew after each commit.
    if std::env::var("PROFILE").as_deref() != Ok("release") || !git.exists() {
        return None;
    }
    // It gets a line with each commit, checkout and reset.
    println!("cargo::rerun-if-changed={}", git.join("logs/HEAD").display());
    let output = Command::new("git").args(["rev-parse", "--short", "HEAD"]).output().ok()?;
    let commit = String::from_utf8(output.stdout).ok().filter(|_| output.status.success());
    commit.map(|commit| commit.trim().to_owned())
}
