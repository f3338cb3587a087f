//! Help, completions and manual pages.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use crate::common::Folder;
use std::collections::BTreeSet;

/// Names of the pages: `onebox`, `onebox-train`, ...
fn pages(folder: &Folder) -> BTreeSet<String> {
    folder.onebox(&["man", "new/man"]).ok();
    let names = std::fs::read_dir(folder.path("new/man")).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.map(|name| name.strip_suffix(".1").unwrap().to_owned()).collect()
}

#[test]
fn every_command_is_in_the_help_the_manual_and_the_completions() {
    let folder = Folder::new();
    let pages = pages(&folder);
    assert!(pages.len() > 20 && pages.contains("onebox-checkpoint-verify"), "{pages:?}");
    let help = folder.onebox(&["--help"]).ok().stdout;
    let bash = folder.onebox(&["completions", "bash"]).ok().stdout;
    for page in &pages {
        let words: Vec<&str> = page.split('-').skip(1).collect();
        if let [verb] = words[..] {
            assert!(help.contains(&format!("\n  {verb} ")), "{verb} is not in:\n{help}");
        }
        let own = folder.onebox(&[&words[..], &["--help"]].concat()).ok().stdout;
        let wide = own.lines().find(|line| line.chars().count() > 80);
        assert!(wide.is_none(), "{page}: {wide:?}");
        assert!(bash.contains(words.last().unwrap_or(&"onebox")), "{page}");
        let text = folder.read(&format!("new/man/{page}.1"));
        assert!(text.contains(".SH NAME") && text.contains(".SH SYNOPSIS"), "{page}:\n{text}");
    }
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let text = folder.onebox(&["completions", shell]).ok().stdout;
        assert!(text.contains("overwrite") && text.contains("reshard"), "{shell}:\n{text}");
    }
    folder.onebox(&["completions", "csh"]).refused(2, &["csh", "bash", "zsh", "fish"]);
    folder.onebox(&["man", "tiny.ron/man"]).refused(74, &["manual pages", "tiny.ron/man"]);
}

/// Bash accepts the completions.
#[test]
fn bash_takes_its_completions() {
    let folder = Folder::new();
    let bash = folder.onebox(&["completions", "bash"]).ok().stdout;
    std::fs::write(folder.path("onebox.bash"), bash).unwrap();
    let complete = "source ./onebox.bash; COMP_WORDS=(onebox tr); COMP_CWORD=1; _onebox onebox tr onebox; echo ${COMPREPLY[@]}";
    let done = folder.shell(&format!("bash -c '{complete}'")).ok();
    assert_eq!((done.stdout.trim(), &*done.stderr), ("train", ""));
}

#[test]
fn the_version_is_that_of_the_changelog() {
    let version = Folder::new().onebox(&["--version"]).ok().stdout;
    let changelog = std::fs::read_to_string("../../CHANGELOG.md").unwrap();
    let newest = changelog.lines().find_map(|line| line.strip_prefix("## ")).unwrap();
    let newest = newest.split_whitespace().next().unwrap();
    assert!(version.starts_with(&format!("onebox {newest}")), "{version}, {newest}");
}
