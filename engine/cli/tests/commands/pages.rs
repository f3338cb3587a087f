//! The page of a worked example: its commands give the output that it shows.
#![allow(missing_docs, reason = "a test")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the lines above")]

use std::path::Path;
use std::process::Command;

/// Commands of a page, each with the output lines on the page.
fn commands(page: &str) -> Vec<(String, Vec<String>)> {
    let mut all: Vec<(String, Vec<String>)> = Vec::new();
    let (mut document, mut shown) = (false, false);
    for line in page.lines() {
        // An empty line may belong to the output of a command.
        let Some(line) = line.strip_prefix("    ").or_else(|| line.is_empty().then_some("")) else {
            shown = false;
            continue;
        };
        if let Some(command) = line.strip_prefix("$ ") {
            document = command.contains("<<'END'");
            shown = !document;
            all.push((command.to_owned(), Vec::new()));
        } else if let Some((command, lines)) = all.last_mut() {
            if document {
                *command += &format!("\n{line}");
                document = line != "END";
            } else if shown {
                lines.push(line.to_owned());
            }
        }
    }
    all
}

#[test]
fn a_model_learns_chats_as_the_page_says() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = std::fs::read_to_string(root.join("docs/chat.md")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(root.join("tests"), folder.path().join("tests")).unwrap();
    let program = Path::new(env!("CARGO_BIN_EXE_onebox")).parent().unwrap();
    let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap());
    let all = commands(&page);
    assert!(
        all.len() > 8 && all.iter().filter(|(_, shown)| shown.len() > 1).count() > 3,
        "{all:?}"
    );
    for (command, shown) in all {
        let output = Command::new("bash")
            .args(["-c", &command])
            .current_dir(folder.path())
            .env("PATH", &path)
            .env("XDG_CACHE_HOME", folder.path().join("cache"))
            .output()
            .unwrap();
        let (out, stderr) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{command}: {stderr}");
        let shown = shown.join("\n");
        assert!(
            shown.trim().is_empty() || shown.trim() == out.trim(),
            "{command}:\n{out}\n{shown}"
        );
    }
}
