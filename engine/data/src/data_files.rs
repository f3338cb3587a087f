//! The files that a config entry stands for: a file, a directory or a glob.

use std::collections::BTreeSet;
use std::fs::{self, FileType};
use std::io;
use std::path::{Path, PathBuf};

use super::Problem;
use super::kind::uncompressed;
use super::problem::{Failure, at};
use files::hub::HubModel;
use files::names::{CONFIG, METRICS, is_run, resolved};

/// Folders of build products and earlier runs.
const SKIPPED_FOLDERS: [&str; 3] = ["target", "runs", "node_modules"];
const WILDCARDS: [char; 3] = ['*', '?', '['];

/// The files that a config entry stands for.
#[derive(Default)]
pub(super) struct NamedFiles {
    /// The files, sorted by path.
    pub(super) files: Vec<PathBuf>,
    /// Whether the entry names a directory.
    pub(super) from_directory: bool,
    /// Skipped run directories: the output of a run is not data for it or for a later run.
    pub(super) runs: BTreeSet<PathBuf>,
}

/// The files that `text` names.
pub(super) fn find_files(text: &str) -> Result<NamedFiles, Failure> {
    let (path, mut found) = (Path::new(text), NamedFiles::default());
    let problem = match fs::metadata(path) {
        _ if text.is_empty() => Problem::NotSet,
        Ok(metadata) if metadata.is_file() => {
            return Ok(NamedFiles { files: vec![path.to_owned()], ..found });
        }
        Ok(metadata) if metadata.is_dir() => {
            walk(path, &mut found)?;
            found.files.sort();
            return Ok(NamedFiles { from_directory: true, ..found });
        }
        Ok(_) => Problem::NotAFile,
        Err(error) if error.kind() != io::ErrorKind::NotFound => Problem::Unreadable(error),
        Err(_) if !text.contains(WILDCARDS) => {
            prefix(text).or_else(|| of_hub(path)).unwrap_or(Problem::Missing)
        }
        Err(_) => {
            let mut pattern: Vec<_> = text.split('/').collect();
            pattern.dedup_by(|part, before| *part == "**" && *before == "**");
            glob(Path::new(""), &pattern, &mut found)?;
            found.files.sort();
            found.files.dedup();
            if !found.files.is_empty() {
                return Ok(found);
            }
            Problem::NoMatch
        }
    };
    Err(at(path)(problem))
}

/// The problem of an entry that is the prefix of a Megatron data set with another `data.format`.
fn prefix(text: &str) -> Option<Problem> {
    let tokens = PathBuf::from(format!("{text}.bin"));
    tokens.is_file().then_some(Problem::Prefix { tokens })
}

/// The problem of a path that looks like the name `ORG/NAME` of a data set on the Hugging Face hub: the
/// folder of the config has no folder `ORG`, and `NAME` does not end as a file.
fn of_hub(path: &Path) -> Option<Problem> {
    const FILES: [&str; 14] = [
        "arrow", "bin", "csv", "gz", "idx", "json", "jsonl", "md", "ndjson", "parquet", "tsv",
        "txt", "xz", "zst",
    ];
    let is_file = |end: &str| FILES.contains(&end.to_ascii_lowercase().as_str());
    if path.extension().and_then(|end| end.to_str()).is_some_and(is_file) {
        return None;
    }
    let org = path.parent().filter(|org| !org.exists())?;
    org.parent().filter(|base| base.parent().is_some() && base.is_dir())?;
    let name = format!("{}/{}", org.file_name()?.to_str()?, path.file_name()?.to_str()?);
    HubModel::parse(&name)?;
    Some(Problem::OfHub { name })
}

/// A training file and a validation file in the same folder, found by their names.
pub(super) fn validation_file_among(files: &[PathBuf]) -> Option<(PathBuf, PathBuf)> {
    const VALIDATION_NAMES: [&str; 6] = ["val", "valid", "validation", "test", "dev", "eval"];
    const DATA: [&str; 6] = ["bin", "csv", "json", "jsonl", "parquet", "txt"];
    // Files of the Hugging Face Hub have names such as `train-00000-of-00002.parquet`.
    let is_count = |name: &str| name.len() == 5 && name.bytes().all(|byte| byte.is_ascii_digit());
    let without_part = |stem: String| {
        let part =
            stem.rsplit_once("-of-").and_then(|(first, all)| Some((first.rsplit_once('-')?, all)));
        match part {
            Some(((name, part), all)) if is_count(part) && is_count(all) => name.to_owned(),
            _ => stem,
        }
    };
    let stem = |file: &Path| {
        let stem = uncompressed(file).file_stem()?.to_str()?.to_ascii_lowercase();
        Some(without_part(stem))
    };
    let is_data =
        |file: &Path| uncompressed(file).extension().is_some_and(|e| DATA.iter().any(|d| e == *d));
    let data_files = files.iter().filter(|file| is_data(file));
    let mut validation_files =
        data_files.filter(|f| stem(f).is_some_and(|s| VALIDATION_NAMES.contains(&&*s)));
    validation_files.find_map(|validation| {
        let train = files.iter().find(|file| {
            stem(file).as_deref() == Some("train")
                && (file.parent(), file.extension())
                    == (validation.parent(), validation.extension())
        });
        Some((train?.clone(), validation.clone()))
    })
}

/// Adds the files of a directory. Does not follow links.
fn walk(directory: &Path, found: &mut NamedFiles) -> Result<(), Failure> {
    for (path, name, kind) in list(directory)? {
        if kind.is_dir() && enters(&name) {
            match is_run(&path) {
                true => drop(found.runs.insert(path)),
                false => walk(&path, found)?,
            }
        } else if kind.is_file() && name != "Cargo.lock" && !name.starts_with('.') {
            found.files.push(path);
        }
    }
    Ok(())
}

/// Adds the files below `base` that match the components of a pattern. As in a shell, a wildcard
/// skips hidden names and follows links. `**` matches any number of the folders that `walk` enters.
fn glob(base: &Path, pattern: &[&str], found: &mut NamedFiles) -> Result<(), Failure> {
    let Some((&part, rest)) = pattern.split_first() else {
        if base.is_file() {
            found.files.push(base.to_owned());
        }
        return Ok(());
    };
    let at_start = base.as_os_str().is_empty();
    if !part.contains(WILDCARDS) {
        // The empty first component of an absolute pattern is the root.
        return glob(&base.join(if at_start && part.is_empty() { "/" } else { part }), rest, found);
    }
    if part == "**" {
        glob(base, if rest.is_empty() { &["*"] } else { rest }, found)?;
    }
    if !at_start && !base.is_dir() {
        return Ok(());
    }
    for (path, name, kind) in list(base)? {
        let hidden = name.starts_with('.') && !part.starts_with('.');
        let enters = part == "**" && kind.is_dir() && enters(&name);
        let matches = part != "**" && !hidden && matches(part, &name);
        if (enters || matches && !rest.is_empty()) && is_run(&path) {
            found.runs.insert(path);
        } else if enters {
            glob(&path, pattern, found)?;
        } else if matches {
            glob(&path, rest, found)?;
        }
    }
    Ok(())
}

/// Whether a file that a run writes into `directory` would be among the files that `text` names.
pub(super) fn takes_from(text: &str, directory: &Path) -> bool {
    let is = |path: &Path| resolved(path) == resolved(directory);
    if Path::new(text).is_dir() {
        return is(Path::new(text));
    }
    let last = text.rsplit('/').next().unwrap_or(text);
    if Path::new(text).exists() || ![CONFIG, METRICS].iter().any(|name| matches(last, name)) {
        return false;
    }
    let folders = |file: &PathBuf| file.parent().is_some_and(is);
    find_files(text).is_ok_and(|found| found.files.iter().any(folders))
}

fn enters(folder: &str) -> bool {
    !folder.starts_with('.') && !SKIPPED_FOLDERS.contains(&folder)
}

/// Path, name and kind of each entry of a directory; the empty path is the working directory.
fn list(directory: &Path) -> Result<Vec<(PathBuf, String, FileType)>, Failure> {
    let readable = if directory.as_os_str().is_empty() { Path::new(".") } else { directory };
    let entries = fs::read_dir(readable).and_then(|entries| {
        let described = entries.map(|entry| {
            let entry = entry?;
            let name = entry.file_name();
            Ok((directory.join(&name), name.to_string_lossy().into_owned(), entry.file_type()?))
        });
        described.collect()
    });
    entries.map_err(|error| at(directory)(Problem::Unreadable(error)))
}

/// Whether a name matches one component of a pattern with `*`, `?` and `[..]`. Backtracking is
/// limited to the last `*`. A pattern with many `*` therefore needs no exponential time.
fn matches(pattern: &str, name: &str) -> bool {
    let pattern: Vec<char> = pattern.chars().collect();
    let name: Vec<char> = name.chars().collect();
    let (mut i, mut j) = (0, 0);
    let mut star = None; // (pattern index after the last `*`, end of its match in `name`)
    while j < name.len() {
        if pattern.get(i) == Some(&'*') {
            i += 1;
            star = Some((i, j));
        } else if let Some(length) = matches_one(&pattern[i..], name[j]) {
            (i, j) = (i + length, j + 1);
        } else if let Some((after, taken)) = star {
            (i, j) = (after, taken + 1);
            star = Some((after, taken + 1));
        } else {
            return false;
        }
    }
    pattern[i..].iter().all(|&c| c == '*')
}

/// Number of pattern characters that match the character `c` of the name; `None` if none match.
fn matches_one(pattern: &[char], c: char) -> Option<usize> {
    let literal = || (pattern.first() == Some(&c)).then_some(1);
    match pattern {
        ['?', ..] => Some(1),
        ['[', class @ ..] => {
            let negated = usize::from(class.first() == Some(&'!'));
            let set = &class[negated..];
            // A `]` in the first place belongs to the set; a `[` without an end is a literal.
            let Some(end) = set.iter().skip(1).position(|&c| c == ']') else { return literal() };
            let (mut set, mut found) = (&set[..=end], false);
            while let [first, rest @ ..] = set {
                let (last, rest) =
                    if let ['-', last, rest @ ..] = rest { (last, rest) } else { (first, rest) };
                found |= (*first..=*last).contains(&c);
                set = rest;
            }
            (found == (negated == 0)).then_some(negated + end + 3)
        }
        _ => literal(),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    use tempfile::TempDir;

    /// A folder with these files.
    pub(crate) fn folder(files: &[(&str, &[u8])]) -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, content) in files {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        folder
    }

    pub(crate) fn path(folder: &TempDir, name: &str) -> String {
        folder.path().join(name).to_str().unwrap().to_owned()
    }

    /// Names of the files below `folder` that a pattern matches.
    fn found(folder: &TempDir, pattern: &str) -> Vec<String> {
        let files = find_files(&path(folder, pattern)).unwrap().files;
        let name =
            |file: PathBuf| file.strip_prefix(folder.path()).unwrap().to_str().unwrap().to_owned();
        files.into_iter().map(name).collect()
    }

    pub(crate) const TREE: [(&str, &[u8]); 11] = [
        ("b.txt", b"bb"),
        ("a/z.md", b"zz"),
        ("a/b/deep.txt", b"dd"),
        ("a.txt", b"aa"),
        (".hidden", b"no"),
        (".git/config", b"no"),
        ("target/x.txt", b"no"),
        ("runs/x.txt", b"no"),
        ("a/node_modules/x.txt", b"no"),
        ("Cargo.lock", b"no"),
        ("tokens.bin", b"\xff\xfe"),
    ];

    #[test]
    fn a_directory_gives_its_files_in_sorted_path_order_without_links() {
        let folder = folder(&TREE);
        symlink(folder.path().join("b.txt"), folder.path().join("link.txt")).unwrap();
        symlink(folder.path(), folder.path().join("loop")).unwrap();
        let names = ["a/b/deep.txt", "a/z.md", "a.txt", "b.txt", "tokens.bin"];
        assert_eq!(found(&folder, ""), names);
    }

    #[test]
    fn a_glob_gives_its_matches_in_sorted_path_order() {
        let folder = folder(&TREE);
        assert_eq!(found(&folder, "*.txt"), ["a.txt", "b.txt"]);
        assert_eq!(found(&folder, "?/*"), ["a/z.md"]);
        assert_eq!(found(&folder, "**/*.txt"), ["a/b/deep.txt", "a.txt", "b.txt"]);
        assert_eq!(found(&folder, "**/**/[a-b].txt"), ["a.txt", "b.txt"]);
        assert_eq!(found(&folder, "a/**"), ["a/b/deep.txt", "a/z.md"]);
        assert_eq!(found(&folder, "*/../b.t?t").last().unwrap(), "target/../b.txt");
        assert_eq!(found(&folder, ".h*"), [".hidden"]);
        assert_eq!(found(&folder, "**/b/*"), ["a/b/deep.txt"]);
    }

    #[test]
    fn a_validation_file_in_the_folder_of_a_training_file_is_known_by_its_name() {
        let found = |names: &[&str]| {
            validation_file_among(&names.iter().map(PathBuf::from).collect::<Vec<_>>())
        };
        let pair = |train: &str, validation: &str| Some((train.into(), validation.into()));
        assert_eq!(found(&["a/train.bin", "a/val.bin"]), pair("a/train.bin", "a/val.bin"));
        let [train, test] = ["train", "test"].map(|name| format!("{name}-00000-of-00002.parquet"));
        assert_eq!(found(&[&test, &train]), pair(&train, &test));
        assert_eq!(
            found(&["train.jsonl.gz", "dev.jsonl.gz"]),
            pair("train.jsonl.gz", "dev.jsonl.gz")
        );
        for names in [
            ["train.txt", "b/val.txt"],
            ["train.rs", "test.rs"],
            ["train-1-of-2.csv", "test-1-of-2.csv"],
        ] {
            assert_eq!(found(&names), None, "{names:?}");
        }
    }

    #[test]
    fn a_name_with_wildcards_that_exists_is_a_file() {
        let folder = folder(&[("[x].txt", b"0123456789"), ("x.txt", b"no")]);
        assert_eq!(found(&folder, "[x].txt"), ["[x].txt"]);
    }

    #[test]
    fn patterns_match_as_in_a_shell() {
        for (pattern, yes, no) in [
            ("*", "abc", ""),
            ("a*c", "abcbc", "abcb"),
            ("*a*b*", "xaxxbx", "xbxxax"),
            ("?", "é", "ab"),
            ("[a-cx]1", "b1", "d1"),
            ("[!a-c]", "d", "b"),
            ("[]]", "]", "["),
            ("[a-]", "-", "b"),
            ("[ab", "[ab", "a"),
            ("**.txt", "a.txt", "a.md"),
        ] {
            assert!(matches(pattern, yes), "{pattern} {yes}");
            assert!(!matches(pattern, no) || no.is_empty(), "{pattern} {no}");
        }
        // Many stars that almost match do not cost exponential time.
        assert!(!matches(&"a*".repeat(40), &"a".repeat(39)));
    }
}
