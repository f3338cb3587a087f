//! The crates of a workspace and their files of Rust.

use crate::lines::{self, LineCount};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Packages that consist of tests and their tools; their lines are no source.
const TEST_PACKAGES: [&str; 2] = ["house", "tests"];
/// Folders of a crate whose files are tests.
const TEST_FOLDERS: [&str; 2] = ["tests/", "benches/"];

/// A file of Rust.
#[expect(missing_debug_implementations, reason = "a syntax tree has none")]
pub struct Source {
    /// Its path from the folder of its crate on.
    pub path: String,
    /// Its text.
    pub text: String,
    /// Its syntax tree.
    pub syntax: syn::File,
    /// Whether only tests use it.
    pub is_test: bool,
}

/// A package of the workspace.
#[expect(missing_debug_implementations, reason = "a syntax tree has none")]
pub struct Crate {
    /// Its name.
    pub name: String,
    /// Its folder, from the root of the workspace on.
    pub folder: String,
    /// Files of the crate, without nested crates.
    pub sources: Vec<Source>,
}

impl Crate {
    /// Counts its lines without tests.
    ///
    /// # Errors
    /// If a file is not Rust.
    pub fn lines(&self) -> Result<LineCount, String> {
        let mut sum = LineCount::default();
        if TEST_PACKAGES.contains(&self.name.as_str()) {
            return Ok(sum);
        }
        for source in self.sources.iter().filter(|source| !source.is_test) {
            let count = lines::count(&source.text).map_err(|e| format!("{}: {e}", source.path))?;
            sum.all += count.all;
            sum.code += count.code;
        }
        Ok(sum)
    }

    /// The path of one of its files from the root of the workspace on.
    #[must_use]
    pub fn path_of(&self, source: &Source) -> String {
        format!("{}/{}", self.folder, source.path)
    }
}

/// Reads the crates of the workspace at `root`.
///
/// # Errors
/// If a file cannot be read or is not Rust.
pub fn read(root: &Path) -> Result<Vec<Crate>, String> {
    members(&text(&root.join("Cargo.toml"))?).map(|folder| one(root, folder)).collect()
}

/// The folders that the manifest of a workspace lists as members.
fn members(manifest: &str) -> impl Iterator<Item = &str> {
    let list = manifest.split_once("members = [").and_then(|(_, rest)| rest.split_once(']'));
    let list = list.map_or("", |(list, _)| list);
    list.split(',').map(|word| word.trim().trim_matches('"')).filter(|word| !word.is_empty())
}

fn one(root: &Path, folder: &str) -> Result<Crate, String> {
    let manifest = text(&root.join(folder).join("Cargo.toml"))?;
    let name = manifest.lines().find_map(|line| line.strip_prefix("name = "));
    let name = name.ok_or_else(|| format!("{folder}/Cargo.toml has no name"))?.trim_matches('"');
    let mut paths = Vec::new();
    collect(&root.join(folder), &mut paths)?;
    paths.sort();
    let mut sources = Vec::new();
    for path in paths {
        let text = text(&path)?;
        let syntax = syn::parse_file(&text).map_err(|e| format!("{}: {e}", path.display()))?;
        let path = path.strip_prefix(root.join(folder)).unwrap_or(&path).display().to_string();
        let is_test = TEST_FOLDERS.iter().any(|folder| path.starts_with(folder));
        sources.push(Source { path, text, syntax, is_test });
    }
    mark_tests(&mut sources);
    Ok(Crate { name: name.to_owned(), folder: folder.to_owned(), sources })
}

fn text(path: &Path) -> Result<String, String> {
    fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))
}

/// Adds the files of Rust below `folder` to `found`, without other packages and build folders.
fn collect(folder: &Path, found: &mut Vec<PathBuf>) -> Result<(), String> {
    let entries = fs::read_dir(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    for entry in entries {
        let path = entry.map_err(|e| format!("{}: {e}", folder.display()))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            let is_other = path.join("Cargo.toml").exists();
            if !is_other && !name.starts_with('.') && name != "target" {
                collect(&path, found)?;
            }
        } else if name.ends_with(".rs") {
            found.push(path);
        }
    }
    Ok(())
}

/// Whether an item is compiled for tests alone.
pub(crate) fn is_test(attributes: &[syn::Attribute]) -> bool {
    let is = |attribute: &syn::Attribute| {
        let condition = attribute.parse_args::<syn::Ident>();
        attribute.path().is_ident("cfg") && condition.is_ok_and(|name| name == "test")
    };
    attributes.iter().any(is)
}

/// Marks the files that are modules of tests, and their submodules.
fn mark_tests(sources: &mut [Source]) {
    let mut tests = BTreeSet::new();
    for source in sources.iter() {
        for item in &source.syntax.items {
            let syn::Item::Mod(module) = item else { continue };
            if module.content.is_none() && is_test(&module.attrs) {
                tests.insert(module_path(&source.path, &module.ident.to_string()));
            }
        }
    }
    for source in sources {
        let stem = source.path.trim_end_matches(".rs").trim_end_matches("/mod");
        let below = |test: &String| stem == test || stem.starts_with(&format!("{test}/"));
        source.is_test |= tests.iter().any(below);
    }
}

/// The path of module `name` that the file at `path` declares, without an ending.
fn module_path(path: &str, name: &str) -> String {
    let (folder, file) = path.rsplit_once('/').unwrap_or(("", path));
    match file {
        "lib.rs" | "main.rs" | "mod.rs" => format!("{folder}/{name}"),
        _ => format!("{}/{name}", path.trim_end_matches(".rs")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_read_from_one_line_and_from_several() {
        let one = "[workspace]\nmembers = [\"a\", \"b/c\"]\nresolver = \"3\"\n";
        assert_eq!(members(one).collect::<Vec<_>>(), ["a", "b/c"]);
        let several = "[workspace]\nmembers = [\n    \"a\",\n    \"b/c\",\n]\n";
        assert_eq!(members(several).collect::<Vec<_>>(), ["a", "b/c"]);
    }

    #[test]
    fn a_module_of_tests_and_what_is_below_it_is_a_test() -> Result<(), syn::Error> {
        let file = |path: &str, text: &str| {
            let (path, text) = (path.to_owned(), text.to_owned());
            Ok::<_, syn::Error>(Source {
                syntax: syn::parse_file(&text)?,
                path,
                text,
                is_test: false,
            })
        };
        let mut sources = [
            file("src/lib.rs", "mod a; #[cfg(test)] mod b;")?,
            file("src/a.rs", "#[cfg(test)] mod tests;")?,
            file("src/a/tests.rs", "mod below;")?,
            file("src/a/tests/below.rs", "")?,
            file("src/a/testsuite.rs", "")?,
            file("src/b/mod.rs", "")?,
        ];
        mark_tests(&mut sources);
        assert_eq!(sources.map(|one| one.is_test), [false, false, true, true, false, true]);
        Ok(())
    }
}
