//! Links between documents. Each relative link leads to a file of the repository, and its anchor to
//! a heading of that file.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

/// Files of the repository with all their folders; without git, all files on the disk.
fn repository() -> BTreeSet<PathBuf> {
    let listed = Command::new("git").args(["ls-files", "-z"]).current_dir(super::root()).output();
    let listed = listed.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    let names = listed.unwrap_or_default();
    let mut all: BTreeSet<PathBuf> = names.split('\0').map(PathBuf::from).collect();
    if !all.contains(Path::new("README.md")) {
        let root = super::root();
        let found = super::files(&root, &[""]);
        all = found.iter().map(|path| path.strip_prefix(&root).expect("below").into()).collect();
    }
    let folders: Vec<PathBuf> =
        all.iter().flat_map(|path| path.ancestors().skip(1).map(PathBuf::from)).collect();
    all.extend(folders);
    all
}

/// Whether a line, without its indentation, begins an item of a list.
fn is_item(line: &str) -> bool {
    let after_number = line.trim_start_matches(|c: char| c.is_ascii_digit());
    let numbered = after_number.len() < line.len()
        && (after_number.starts_with(". ") || after_number.starts_with(") "));
    numbered || ["- ", "* ", "+ "].iter().any(|mark| line.starts_with(mark))
}

/// Lines of a document outside of code blocks. Indented lines after a blank line are code, except
/// inside a list.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let (mut fenced, mut list, mut code_may_follow) = (false, false, true);
    text.lines().filter(move |line| {
        let inner = line.trim_start();
        fenced ^= inner.starts_with("```");
        if fenced || inner.is_empty() {
            code_may_follow = true;
            return !fenced;
        }
        let is_code = line.starts_with("    ") && code_may_follow && !list;
        if !is_code && (is_item(inner) || code_may_follow && !line.starts_with(' ')) {
            list = is_item(inner);
        }
        code_may_follow = is_code;
        !is_code
    })
}

/// Text of a line without the parts in backticks.
fn spoken(line: &str) -> String {
    line.split('`').step_by(2).collect()
}

/// Targets of the links of a document, without links to other sites.
fn links(text: &str) -> Vec<String> {
    let lines = prose(text).map(spoken).collect::<Vec<_>>().join(" ");
    let targets = lines.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    targets.filter(|link| !link.contains("://")).map(str::to_owned).collect()
}

/// Anchors of a document's headings, in the form that Markdown sites generate.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = prose(text).filter(|line| line.starts_with('#'));
    let anchor = |line: &str| {
        let title = line.trim_start_matches('#').trim().to_lowercase().replace(' ', "-");
        title.chars().filter(|c| c.is_alphanumeric() || "-_".contains(*c)).collect()
    };
    headings.map(anchor).collect()
}

/// Path of `link` from `folder`, without `.` and `..`; `None` if it leaves the repository.
fn resolved(folder: &Path, link: &str) -> Option<PathBuf> {
    let mut path = PathBuf::new();
    for part in folder.join(link).components() {
        match part {
            Component::Normal(name) => path.push(name),
            Component::ParentDir if path.pop() => {}
            Component::CurDir => {}
            _ => return None,
        }
    }
    Some(path)
}

/// Broken links of `document`, whose text is `text`. `read` returns the text of another document.
fn broken(
    (document, text): (&Path, &str),
    known: &BTreeSet<PathBuf>,
    read: &dyn Fn(&Path) -> String,
) -> Vec<String> {
    let folder = document.parent().unwrap_or(Path::new(""));
    let wrong = |link: &String| {
        let (file, anchor) = link.split_once('#').map_or((&**link, None), |(f, a)| (f, Some(a)));
        let target = match file {
            "" => Some(document.to_owned()),
            file => resolved(folder, file),
        };
        let Some(target) = target.filter(|target| known.contains(target)) else {
            return Some(format!("{}: no file `{link}`", document.display()));
        };
        let found = anchor.is_none_or(|anchor| anchors(&read(&target)).contains(anchor));
        (!found).then(|| format!("{}: no heading for `{link}`", document.display()))
    };
    links(text).iter().filter_map(wrong).collect()
}

#[test]
fn every_link_of_a_document_leads_to_a_file_or_a_heading() {
    let (root, known) = (super::root(), repository());
    let read = |path: &Path| super::read(&root.join(path));
    let documents = known.iter().filter(|path| path.extension().is_some_and(|e| e == "md"));
    let documents: Vec<_> = documents.filter(|path| root.join(path).exists()).collect();
    assert!(documents.len() > 15, "{documents:?}");
    let wrong: Vec<String> = documents
        .iter()
        .flat_map(|path| broken((path.as_path(), &read(path)), &known, &read))
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn a_link_that_leads_nowhere_is_found() {
    let known = ["README.md", "docs/a.md", "docs"].map(PathBuf::from).into();
    let read = |_: &Path| "# The box, `Host` and us\n".to_owned();
    let text = "[1](../README.md) [2](a.md#the-box-host-and-us) [3](#here) [4](https://x.y/z) [5](../docs)\n\
                [6](b.md) [7](../../README.md) [8](a.md#the-box) `[9](c.md)`\n\n    [10](d.md)\n\n    [11](d.md)\n\n\
                1. [12](../docs)\n\n    - [13](nested.md)\n\n        more of it: [14](deep.md)\n    ```\n    [15](e.md)\n    ```\n\n\
                No list:\n\n    [16](d.md)\n";
    let wrong = broken((Path::new("docs/a.md"), text), &known, &read);
    let says = |link: &str| wrong.iter().any(|text| text.contains(&format!("`{link}`")));
    let broken = ["b.md", "../../README.md", "a.md#the-box", "#here", "nested.md", "deep.md"];
    assert!(broken.iter().all(|link| says(link)), "{wrong:?}");
    assert_eq!(wrong.len(), broken.len(), "{wrong:?}");
}
