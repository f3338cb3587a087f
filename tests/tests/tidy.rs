//! The repository keeps its own rules: dependencies between crates, limits of unsafe code, sizes,
//! names.

#![allow(clippy::expect_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

#[path = "tidy/circles.rs"]
mod circles;
#[path = "tidy/links.rs"]
mod links;
#[path = "tidy/names.rs"]
mod names;
#[path = "tidy/ops.rs"]
mod ops;
#[path = "tidy/prose.rs"]
mod prose;
#[path = "tidy/scripts.rs"]
mod scripts;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Files below `folder` with one of the endings, without hidden folders, `target` and `runs`.
fn files(folder: &Path, endings: &[&str]) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).expect("a folder").flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        let name = name.to_string_lossy().into_owned();
        if path.is_dir() {
            if !["target", "runs"].contains(&name.as_str())
                && (!name.starts_with('.') || name == ".ci")
            {
                found.extend(files(&path, endings));
            }
        } else if endings.iter().any(|ending| name.ends_with(ending)) {
            found.push(path);
        }
    }
    found.sort();
    found
}

fn sources() -> Vec<(String, String)> {
    let root = root();
    let name = |path: &PathBuf| path.strip_prefix(&root).expect("below").display().to_string();
    let sources: Vec<_> = files(&root, &[".rs"]).iter().map(|p| (name(p), read(p))).collect();
    assert!(sources.len() > 80);
    sources
}

/// The code before the tests at the end of a file.
fn code(source: &str) -> &str {
    source.split("#[cfg(test)]\nmod tests {").next().unwrap_or(source)
}

/// Rule for a file: gets its name and text, and returns the problem, if one exists.
type Rule = fn(&str, &str) -> Option<String>;

/// Rules for single Rust files, tests included, and the name and text of a file that breaks each.
const RULES: [(Rule, &str, &[&str]); 6] = [
    (words_of_others, "topology/src/planted.rs", &["#[cfg(test)]\nmod tests {\n// a transformer"]),
    (
        unsafe_outside_its_fence,
        "engine/src/planted.rs",
        &["#[cfg(test)]\nmod tests {\n    fn f() { unsa", "fe { g() } }", "\n}"],
    ),
    (too_long, "engine/src/planted.rs", &["#[cfg(test)]\nmod tests {\n", "LINES"]),
    (yields, "device/src/planted.rs", &["fn f() { std::thread::yield", "_now() }"]),
    (goes_by_path, "engine/src/run/save/planted.rs", &["fn f() { std::fs", "::rename(a, b) }"]),
    (opens_files_itself, "planted/src/lib.rs", &["pub mod planted;"]),
];

#[test]
fn every_file_of_rust_keeps_the_rules() {
    for (name, source) in sources() {
        for (rule, _, _) in RULES {
            let problem = rule(&name, &source);
            assert!(problem.is_none(), "{}", problem.unwrap_or_default());
        }
    }
}

#[test]
fn each_rule_finds_what_is_planted_in_the_tests_of_a_file() {
    for (rule, name, parts) in RULES {
        let source = parts.concat().replace("LINES", &"\n".repeat(601));
        assert!(rule(name, &source).is_some_and(|problem| problem.contains(name)), "{source}");
        assert_eq!(rule("tests/fake-cuda/planted.rs", "fn f() {}\n"), None);
    }
}

#[test]
fn names_circles_and_comments_need_no_exception_that_is_not_listed() {
    let crates = house::workspace::read(&root()).expect("the workspace is Rust");
    assert!(crates.len() >= 8, "{} crates", crates.len());
    let problems = [names::problems_of, circles::problems_of, prose::problems_of]
        .map(|find| find(&crates))
        .concat();
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn crates_depend_only_as_drawn() {
    let drawn: BTreeMap<&str, &[&str]> = [
        ("topology", &[][..]),
        ("device", &["topology"]),
        ("tensor-parallel", &["device"]),
        ("offload", &["device"]),
        ("files", &[]),
        ("config", &["device", "files", "topology"]),
        ("data", &["config", "device", "files", "topology"]),
        ("layout", &["config", "device", "files", "offload", "tensor-parallel", "topology"]),
        (
            "checkpoint",
            &[
                "config",
                "data",
                "device",
                "files",
                "layout",
                "offload",
                "tensor-parallel",
                "topology",
            ],
        ),
    ]
    .into();
    let packages = packages();
    for (name, allowed) in &drawn {
        let folder = packages.get(*name).unwrap_or_else(|| panic!("no package {name}"));
        let manifest = read(&root().join(folder).join("Cargo.toml"));
        let edges: BTreeSet<&str> = manifest
            .lines()
            .filter_map(|line| line.split(['.', ' ', '=']).next())
            .filter(|word| drawn.contains_key(word))
            .collect();
        assert_eq!(edges, allowed.iter().copied().collect(), "{name}");
    }
}

/// Refuses words of a subject that does not belong to the crate.
fn words_of_others(name: &str, source: &str) -> Option<String> {
    let never: &[(&str, &[&str])] = &[
        ("topology/", &["transformer", "adam", "layer"]),
        ("device/", &["adam", "Adam", "optimizer", "Optimizer", "momentum"]),
        ("tensor-parallel/", &["data parallel", "data-parallel", "dp_size", "DpComm", "Group::Dp"]),
        ("offload/", &["tensor parallel", "tensor-parallel", "tp_size", "TpComm", "Group::Tp"]),
    ];
    let (_, words) = never.iter().find(|(folder, _)| name.starts_with(folder))?;
    let (word, line) = words
        .iter()
        .find_map(|word| Some((word, source.lines().find(|line| line.contains(word))?)))?;
    Some(format!("{name} says `{word}`: {line}"))
}

/// Refuses unsafe code outside of the files that are listed for it.
fn unsafe_outside_its_fence(name: &str, source: &str) -> Option<String> {
    let fenced = [
        "device/src/numerics/simd.rs",
        "device/src/threads/thread_team.rs",
        "device/src/ranks/memory.rs",
        "device/src/cpu/gemm/kernel.rs",
        "device/src/cpu/gemm/task.rs",
        "device/src/cuda/driver",
        "device/src/cuda/libraries.rs",
        "device/src/cuda/nvrtc.rs",
        "device/src/cuda/blaslt.rs",
        "device/src/cuda/cudnn.rs",
        "device/src/cuda/nccl.rs",
        "tests/fake-cuda/",
        "topology/src/cpu_kinds.rs",
        "topology/src/hwloc_ext.rs",
        "topology/src/infos.rs",
        "topology/src/nvml.rs",
        "topology/src/arena.rs",
        "topology/src/trial.rs",
        "tests/tests/allocation.rs",
        "engine/cli/tests/data/token_files/mapping.rs",
    ];
    let marks = ["{", "impl", "fn", "extern"].map(|what| ["unsafe", what].join(" "));
    let found = source.lines().map(|line| line.split("//").next().unwrap_or(""));
    let found = found.filter(|line| marks.iter().any(|mark| line.contains(mark)));
    let outside = !fenced.iter().any(|fence| name.starts_with(fence));
    found.filter(|_| outside).map(|line| format!("{name} has unsafe code: {line}")).next()
}

/// Refuses files with more than 500 lines of code, or 600 lines with the tests at the end.
fn too_long(name: &str, source: &str) -> Option<String> {
    let most = 500;
    let (all, lines) = (source.lines().count(), code(source).lines().count());
    (all > 600 || lines > most).then(|| {
        format!("{name} has {lines} lines of code ({most} are allowed), {all} in all (600)")
    })
}

/// Refuses code that yields the core of a thread: see device/src/threads/spin_wait.rs.
fn yields(name: &str, source: &str) -> Option<String> {
    let of_a_step = ["device/src", "offload/src", "tensor-parallel/src", "engine/"];
    // This thread polls MPI, which wakes no thread, and shares its core with a rank.
    let asks = name == "device/src/ranks/mpi.rs";
    let word = ["yield", "_now"].concat();
    let found = source.contains(&word) && of_a_step.iter().any(|folder| name.starts_with(folder));
    (found && !asks)
        .then(|| format!("{name} yields its core, where it could look for a while and sleep"))
}

/// Refuses a library without the lint that leaves file access to the crate `files`. The libraries
/// of tests and `files` itself are exempt.
fn opens_files_itself(name: &str, source: &str) -> Option<String> {
    const LINT: &str = "#![cfg_attr(not(test), deny(clippy::disallowed_methods))]";
    let is_lib = name.ends_with("src/lib.rs");
    let exempt = name.starts_with("tests/") || name == "engine/files/src/lib.rs";
    (is_lib && !exempt && !source.contains(LINT)).then(|| format!("{name} has no line `{LINT}`"))
}

/// Refuses file access by path in code for run directories, because a path may lead to another run.
/// Code for run directories checks its directory (`LockedRunDir::check`) and names files inside it.
fn goes_by_path(name: &str, source: &str) -> Option<String> {
    let of_a_run = [
        "engine/src/run/save",
        "engine/checkpoint/src/write.rs",
        "engine/checkpoint/src/rewrite.rs",
        "engine/checkpoint/src/run_folder.rs",
        "engine/cli/src/commands/train/rollback.rs",
        "engine/cli/src/commands/train/diverged.rs",
        "engine/cli/src/commands/train/ending.rs",
        "engine/src/append_file.rs",
        "engine/src/metrics.rs",
        "engine/src/tensorboard.rs",
        "engine/src/run/export.rs",
        "engine/src/run_dir/kept.rs",
    ];
    of_a_run.iter().find(|file| name.starts_with(**file))?;
    // These names are types and descriptor functions, not calls with a path.
    let others =
        ["rustix::fs::", "std::fs::File;", "std::os::unix::fs::", "RankFile::", "AppendFile::"];
    let names_files = |line: &&str| {
        let line = others.iter().fold((*line).to_owned(), |line, other| line.replace(other, ""));
        line.contains("fs::") || line.contains("File::")
    };
    let line = code(source).lines().find(names_files)?;
    Some(format!("{name} goes by a path: {line}"))
}

#[test]
fn what_the_documents_name_exists() {
    let all: String = sources().into_iter().map(|(_, source)| source).collect();
    let words: BTreeSet<&str> = all.split(|c: char| !c.is_alphanumeric() && c != '_').collect();
    let pages = files(&root().join("docs/internals"), &[".md"]);
    assert!(pages.len() > 5, "{pages:?}");
    for document in ["ARCHITECTURE.md", "README.md"].map(PathBuf::from).into_iter().chain(pages) {
        let text = read(&root().join(&document));
        let document = document.display();
        for quoted in text.split('`').skip(1).step_by(2) {
            if quoted.contains('/')
                && !quoted.contains(' ')
                && !quoted.contains("NAME")
                && !quoted.starts_with("target")
            {
                assert!(root().join(quoted).exists(), "{document} names {quoted}");
            }
            let symbol = quoted.trim_end_matches("()");
            let path: Vec<&str> = symbol.split("::").collect();
            let is_symbol = path.len() > 1 || symbol.chars().next().is_some_and(char::is_uppercase);
            let plain = symbol.chars().all(|c| c.is_alphanumeric() || c == '_' || c == ':');
            if is_symbol && plain {
                for part in path {
                    assert!(words.contains(part), "{document} names {quoted}");
                }
            }
        }
    }
}

/// Names in backticks that begin as `offload.update`, with a section, but are no config key.
fn unknown_keys(text: &str) -> Vec<&str> {
    let keys: BTreeSet<String> = config::keys().into_iter().map(|key| key.name).collect();
    let is_unknown = |quoted: &&str| {
        let name = quoted.split([':', '=']).next().unwrap_or(quoted);
        let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || "_.".contains(c);
        let plain = name.chars().all(is_plain);
        let section = name.split_once('.').map(|(section, _)| section);
        // These are names of files: nanoGPT's tokens, and source files of this repository.
        plain
            && section.is_some_and(|s| keys.contains(s))
            && !keys.contains(name)
            && !["attention.cu", "optimizer.rs", "train.bin"].contains(&name)
    };
    text.split('`').skip(1).step_by(2).filter(is_unknown).collect()
}

#[test]
fn config_keys_in_the_documents_exist() {
    let mut named = 0;
    // CONTRIBUTING explains how to add a key with a key that does not exist.
    let documents =
        files(&root(), &[".md"]).into_iter().filter(|p| !p.ends_with("CONTRIBUTING.md"));
    for path in documents {
        let text = read(&path);
        let unknown = unknown_keys(&text);
        assert!(unknown.is_empty(), "{} names {unknown:?}", path.display());
        named += text.matches("`train.").count() + text.matches("`offload.").count();
    }
    assert!(named > 50, "{named}");
    let planted =
        "`offload.update: Serial`, `config.ron`, `train.bin`, `offload.updates`, `train.step=3`";
    assert_eq!(unknown_keys(planted), ["offload.updates", "train.step=3"]);
}

#[test]
fn nothing_depends_on_where_it_was_written() {
    // The names are in pieces, so that the test does not find them in this file.
    let folders = [
        ["/wo", "rk/"].concat(),
        ["/ro", "ot/"].concat(),
        ["/ho", "me/"].concat(),
        ["../sha", "red"].concat(),
    ];
    let endings = [
        ".rs", ".ron", ".toml", ".md", ".sh", ".py", "Makefile", "run", "setup", "mutants",
        ".patch",
    ];
    for path in files(&root(), &endings) {
        let text = read(&path);
        for folder in &folders {
            assert!(!text.contains(folder.as_str()), "{} names {folder}", path.display());
        }
    }
}

#[test]
fn every_config_says_what_it_is_for() {
    for path in files(&root().join("configs"), &[".ron"]) {
        let text = read(&path);
        assert!(text.starts_with("// "), "{} has no comment at its top", path.display());
    }
}

/// Texts of a mutant's hunk: the lines before the change, and the lines after it.
fn sides(hunk: &str) -> [String; 2] {
    let side = |mark: char| {
        let lines = hunk.lines().skip(1).filter(move |line| line.starts_with([' ', mark]));
        lines.map(|line| format!("{}\n", &line[1..])).collect()
    };
    ['-', '+'].map(side)
}

/// The folder of each package by its name, from the packages' manifests.
fn packages() -> BTreeMap<String, String> {
    let root = root();
    let found = files(&root, &["Cargo.toml"]).into_iter().filter_map(|manifest| {
        let text = read(&manifest);
        let (_, package) = text.split_once("[package]\n")?;
        let name = package.lines().find_map(|line| line.strip_prefix("name = \""))?;
        let folder = manifest.parent()?.strip_prefix(&root).expect("below").display().to_string();
        Some((name.trim_end_matches('"').to_owned(), folder))
    });
    found.collect()
}

/// Files that may contain the test that the arguments of `cargo test -p` name. Examples: `engine
/// --lib train::batch::tests::name`, `tests --test speculative by_hand::name`.
fn homes(packages: &BTreeMap<String, String>, arguments: &str) -> Vec<String> {
    let words: Vec<&str> = arguments.split(' ').collect();
    let Some(package) = packages.get(words[0]) else { return Vec::new() };
    let mut modules: Vec<&str> = words.last().expect("a word").split("::").collect();
    modules.pop();
    let (root, main) = match words.iter().position(|word| *word == "--test") {
        None if words.contains(&"--bin") => (format!("{package}/src"), "main".to_owned()),
        None => (format!("{package}/src"), "lib".to_owned()),
        Some(at) => {
            let folder = format!("{package}/tests");
            let file = words[at + 1];
            match modules.is_empty() {
                true => {
                    return vec![format!("{folder}/{file}.rs"), format!("{folder}/{file}/main.rs")];
                }
                false => (format!("{folder}/{file}"), format!("../{file}")),
            }
        }
    };
    // A module has its own file, or is in the file of its parent module.
    let (whole, outer) = (modules.join("/"), modules[..modules.len().max(1) - 1].join("/"));
    let of = |path: &str| match path {
        "" => vec![format!("{root}/{main}.rs")],
        path => vec![format!("{root}/{path}.rs"), format!("{root}/{path}/mod.rs")],
    };
    [of(&whole), of(&outer)].concat()
}

#[test]
fn every_mutant_still_finds_what_it_breaks() {
    let (root, packages) = (root(), packages());
    let mutants = files(&root.join("tests/mutants"), &[".patch"]);
    assert!(mutants.len() > 60);
    for path in mutants {
        let (patch, mutant) = (read(&path), path.file_name().expect("a file").to_string_lossy());
        let test = patch.lines().find_map(|line| line.strip_prefix("# test: -p "));
        let test = test.unwrap_or_else(|| panic!("{mutant} names no test"));
        let homes = homes(&packages, test);
        let name = test.rsplit([' ', ':']).next().expect("a part");
        let has_it = |file: &String| {
            let file = root.join(file);
            file.exists() && read(&file).contains(&format!("fn {name}()"))
        };
        assert!(homes.iter().any(has_it), "{mutant}: {name} is in none of {homes:?}");
        let mut changed = 0;
        for file in patch.split("\n--- a/").skip(1) {
            let name = file.lines().next().expect("a name");
            let source = read(&root.join(name));
            for hunk in file.split("\n@@ ").skip(1) {
                let [before, after] = sides(hunk);
                assert!(source.contains(&before), "{mutant}: {name} has no such lines:\n{before}");
                changed += usize::from(before != after);
            }
        }
        assert!(changed > 0, "{mutant} changes nothing");
    }
}
