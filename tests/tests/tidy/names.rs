//! Types are named by nouns, a crate gives one name to few types, and arguments have names.
//! Exceptions are listed, and the lists may only shrink.

use house::names::{definitions, files_by_name, is_no_noun};
use house::tuples::functions;
use house::workspace::{self, Crate};
use std::collections::BTreeSet;

/// List of exceptions from a rule.
#[derive(Clone, Copy)]
pub(super) struct Exceptions<'a> {
    /// Names of the exceptions, one a line.
    pub(super) list: &'a str,
    /// Required number of lines of the list.
    pub(super) length: usize,
}

/// Exceptions: type names that are no nouns.
const NO_NOUNS: Exceptions<'_> = Exceptions { list: include_str!("no_nouns.txt"), length: 0 };
/// Exceptions: names of types that more than [`MOST_FILES`] files of a crate define.
const OVERLOADS: Exceptions<'_> = Exceptions { list: include_str!("overloads.txt"), length: 0 };
/// Number of functions with an anonymous tuple argument.
const WITH_TUPLES: usize = 17;
/// Largest number of files of a crate that may define types of one name.
const MOST_FILES: usize = 3;

/// Problems of a list of exceptions from the rule `what`, for the names that need one.
pub(super) fn problems(
    needed: &BTreeSet<String>,
    exceptions: Exceptions<'_>,
    what: &str,
) -> Vec<String> {
    let listed: BTreeSet<String> = exceptions.list.lines().map(ToOwned::to_owned).collect();
    let unlisted = needed.difference(&listed);
    let mut problems: Vec<_> = unlisted.map(|name| format!("{name} is {what}")).collect();
    let unneeded = listed.difference(needed);
    problems.extend(unneeded.map(|name| format!("{name} is no longer {what}: delete its line")));
    let (lines, length) = (exceptions.list.lines().count(), exceptions.length);
    if lines != length {
        problems.push(format!(
            "{lines} lines name what is {what}, not {length}: that number may only fall"
        ));
    }
    problems
}

fn no_nouns(crates: &[Crate]) -> BTreeSet<String> {
    let all = crates.iter().flat_map(|one| &one.sources).flat_map(|file| definitions(&file.syntax));
    all.filter(|one| is_no_noun(&one.name, one.is_trait)).map(|one| one.name).collect()
}

fn overloads(crates: &[Crate]) -> BTreeSet<String> {
    let all = crates.iter().flat_map(files_by_name);
    all.filter(|(_, files)| files.len() > MOST_FILES).map(|(name, _)| name).collect()
}

fn with_tuples(crates: &[Crate]) -> usize {
    let sources = crates.iter().flat_map(|one| &one.sources).filter(|source| !source.is_test);
    sources.map(|source| functions(&source.syntax).len()).sum()
}

/// Problems of the crates' names and of the lists of exceptions.
pub(super) fn problems_of(crates: &[Crate]) -> Vec<String> {
    let what = "no noun, as the name of a type (see scripts/house --names)";
    let mut all = problems(&no_nouns(crates), NO_NOUNS, what);
    let what = format!("a type that more than {MOST_FILES} files of a crate define");
    all.extend(problems(&overloads(crates), OVERLOADS, &what));
    let tuples = with_tuples(crates);
    if tuples != WITH_TUPLES {
        all.push(format!(
            "{tuples} functions have an anonymous tuple argument (see scripts/house --tuples), not {WITH_TUPLES}: name the \
             fields, or lower `WITH_TUPLES`"
        ));
    }
    all
}

#[test]
fn a_list_of_exceptions_only_shrinks() {
    let needed = BTreeSet::from(["Kept".to_owned(), "Told".to_owned()]);
    let problems = |list, length| problems(&needed, Exceptions { list, length }, "odd");
    assert!(problems("Kept\nTold\n", 2).is_empty());
    assert_eq!(problems("Kept\n", 1), ["Told is odd"]);
    assert_eq!(problems("Kept\nSaid\nTold\n", 3), ["Said is no longer odd: delete its line"]);
    assert!(problems("Kept\nTold\n", 1)[0].contains("may only fall"));
    assert!(problems("Kept\nTold\n", 3)[0].contains("may only fall"));
}

#[test]
fn a_planted_name_and_a_planted_tuple_are_found() {
    let source = |path: &str, text: &str| workspace::Source {
        path: path.to_owned(),
        text: text.to_owned(),
        syntax: syn::parse_file(text).expect("Rust"),
        is_test: false,
    };
    let one = |texts: &[&str]| {
        let files =
            texts.iter().enumerate().map(|(at, text)| source(&format!("src/{at}.rs"), text));
        [Crate { name: "a".into(), folder: "a".into(), sources: files.collect() }]
    };
    let planted =
        one(&["struct Told; trait Read {}", "type Line = u8; fn f((a, b): (u8, &str)) {}"]);
    assert_eq!(no_nouns(&planted), BTreeSet::from(["Told".to_owned()]));
    assert_eq!(with_tuples(&planted), 1);
    assert!(overloads(&one(&["struct Part;"; 3])).is_empty());
    assert_eq!(overloads(&one(&["struct Part;"; 4])), BTreeSet::from(["Part".to_owned()]));
}
