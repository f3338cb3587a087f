//! Prints the figures of a workspace; see `scripts/house --help`.

use house::circles::{Modules, Uses, circles};
use house::lines::LineCount;
use house::names::{definitions, files_by_name, is_no_noun};
use house::prose::{self, ProseCount};
use house::tuples::functions;
use house::workspace::{self, Crate, Source};
use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (options, folders): (Vec<_>, Vec<_>) =
        arguments.iter().partition(|argument| argument.starts_with("--"));
    let folder = folders.first().map_or(".", |folder| folder.as_str());
    let has = |option: &str| options.iter().any(|given| *given == option);
    let lists = Lists { names: has("--names"), tuples: has("--tuples"), prose: has("--prose") };
    match text(Path::new(folder), lists) {
        Ok(text) => write(&mut std::io::stdout(), &text, ExitCode::SUCCESS),
        Err(error) => {
            write(&mut std::io::stderr(), &format!("house: {error}\n"), ExitCode::FAILURE)
        }
    }
}

/// Writes `text`; a reader that has gone is no error.
fn write(to: &mut dyn Write, text: &str, code: ExitCode) -> ExitCode {
    match to.write_all(text.as_bytes()).and_then(|()| to.flush()) {
        Ok(()) => code,
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => code,
        Err(_) => ExitCode::FAILURE,
    }
}

/// The lists that follow the figures.
#[derive(Clone, Copy)]
struct Lists {
    names: bool,
    tuples: bool,
    prose: bool,
}

/// The figures of the workspace in `folder`, and the lists.
fn text(folder: &Path, lists: Lists) -> Result<String, String> {
    let crates = workspace::read(folder)?;
    let mut text = figures(folder, &crates)?;
    for (name, circle) in in_circles(&crates, Modules::module_uses) {
        text.push_str(&format!("\na circle of modules in {name}: {}\n", circle.join(", ")));
    }
    for (name, circle) in in_circles(&crates, Modules::room_uses) {
        text.push_str(&format!("\na circle of rooms in {name}: {}\n", circle.join(", ")));
    }
    if lists.names {
        text.push_str("\ntype names that are no nouns:\n");
        text.extend(no_nouns(&crates).iter().map(|(place, name)| format!("{place} {name}\n")));
        text.push_str("\nnames that more than three files of a crate define:\n");
        for one in &crates {
            let files = files_by_name(one).into_iter().filter(|(_, files)| files.len() > 3);
            let line = |(name, files): (String, BTreeSet<String>)| {
                let files: Vec<_> = files.into_iter().collect();
                format!("{} {name}: {}\n", one.folder, files.join(" "))
            };
            text.extend(files.map(line));
        }
    }
    if lists.tuples {
        text.push_str("\nfunctions with an anonymous tuple argument, and their number of these:\n");
        for (place, name, tuples) in with_tuples(&crates) {
            text.push_str(&format!("{place} {name} {tuples}\n"));
        }
    }
    if lists.prose {
        text.push_str("\ndocumentation comments with a marked phrase:\n");
        for (place, phrases) in crates.iter().flat_map(prose::marked) {
            text.push_str(&format!("{place} {}\n", phrases.join(", ")));
        }
    }
    Ok(text)
}

fn figures(folder: &Path, crates: &[Crate]) -> Result<String, String> {
    let mut text = String::new();
    let mut line = |figure: &str, value: String| text.push_str(&format!("{figure:<47} {value}\n"));
    let counts: Vec<LineCount> = crates.iter().map(Crate::lines).collect::<Result<_, _>>()?;
    let all: usize = counts.iter().map(|count| count.all).sum();
    let code: usize = counts.iter().map(|count| count.code).sum();
    line("lines of source without tests and comments", code.to_string());
    line("lines of source without tests", all.to_string());
    let mut by_size: Vec<_> =
        crates.iter().zip(&counts).filter(|(_, count)| count.all > 0).collect();
    by_size.sort_by_key(|(_, count)| std::cmp::Reverse(count.code));
    if let Some((largest, count)) = by_size.first() {
        let share = 100.0 * count.code as f64 / code as f64;
        line("share of the largest crate", format!("{share:.1} % ({})", largest.name));
    }
    let modules = in_circles(crates, Modules::module_uses);
    line("circles of modules, parents and children apart", largest(&modules));
    line("circles of rooms", largest(&in_circles(crates, Modules::room_uses)));
    let no_nouns = no_nouns(crates);
    let distinct: BTreeSet<_> = no_nouns.iter().map(|(_, name)| name).collect();
    let types: BTreeSet<_> = crates.iter().flat_map(|one| files_by_name(one).into_keys()).collect();
    let value = format!("{} of {}, defined {} times", distinct.len(), types.len(), no_nouns.len());
    line("type names that are no nouns", value);
    line("most files of a crate that define one name", most_defined(crates));
    let with_tuples = with_tuples(crates);
    let several = with_tuples.iter().filter(|(_, _, tuples)| *tuples > 1).count();
    let value = format!("{}, {several} of them with several", with_tuples.len());
    line("functions with an anonymous tuple argument", value);
    let count = |file: &str, count: fn(&str) -> usize| match fs::read_to_string(folder.join(file)) {
        Ok(text) => count(&text).to_string(),
        Err(error) => error.to_string(),
    };
    line("lines of engine/src/step.rs", count("engine/src/step.rs", |text| text.lines().count()));
    let step = crates.iter().flat_map(|one| one.sources.iter().map(move |source| (one, source)));
    let step = step.filter(|(one, source)| one.path_of(source) == "engine/src/step.rs");
    let comments = ProseCount::new(step.map(|(_, source)| source));
    let value = format!("{} of {} ({:.1} %)", comments.marked, comments.all, comments.percent());
    line("marked documentation comments of it", value);
    line("targets of integration tests", targets(crates).to_string());
    line("steps to add a config key", count("CONTRIBUTING.md", key_steps));
    text.push_str("\ncrate              without tests   of it code   doc comments     marked\n");
    for (one, count) in by_size {
        let comments = ProseCount::new(&one.sources);
        text.push_str(&format!(
            "{:<20} {:>11} {:>12} {:>14} {:>8.1} %\n",
            one.name,
            count.all,
            count.code,
            comments.all,
            comments.percent()
        ));
    }
    Ok(text)
}

/// Number of programs that cargo builds of the folders `tests` of crates.
fn targets(crates: &[Crate]) -> usize {
    let is_target = |source: &&Source| {
        let parts: Vec<&str> = source.path.split('/').collect();
        matches!(parts[..], ["tests", _] | ["tests", _, "main.rs"])
    };
    crates.iter().map(|one| one.sources.iter().filter(is_target).count()).sum()
}

/// The circles of every crate, each with the name of the crate.
fn in_circles(crates: &[Crate], uses: fn(&Modules) -> Uses) -> Vec<(String, Vec<String>)> {
    let mut found = Vec::new();
    for one in crates {
        for circle in circles(&uses(&Modules::new(one))) {
            found.push((one.name.clone(), circle.into_iter().collect()));
        }
    }
    found
}

/// The number of circles, and the largest.
fn largest(circles: &[(String, Vec<String>)]) -> String {
    match circles.iter().max_by_key(|(_, circle)| circle.len()) {
        None => "0".to_owned(),
        Some((name, circle)) => {
            format!("{}, the largest of {} in {name}", circles.len(), circle.len())
        }
    }
}

/// The places and names of types whose names are no nouns.
fn no_nouns(crates: &[Crate]) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for one in crates {
        for source in &one.sources {
            for definition in definitions(&source.syntax) {
                if is_no_noun(&definition.name, definition.is_trait) {
                    let place = format!("{}:{}", one.path_of(source), definition.line);
                    found.push((place, definition.name));
                }
            }
        }
    }
    found
}

/// The largest number of files of one crate that define a type of the same name, with those names.
fn most_defined(crates: &[Crate]) -> String {
    let count = |one: &Crate| files_by_name(one).values().map(BTreeSet::len).max().unwrap_or(0);
    let most = crates.iter().map(count).max().unwrap_or(0);
    let mut names = Vec::new();
    for one in crates {
        for (name, files) in files_by_name(one) {
            if files.len() == most {
                names.push(format!("{name} in {}", one.name));
            }
        }
    }
    format!("{most} ({})", names.join(", "))
}

/// The places, names and numbers of tuples of functions with tuple arguments that are no tests.
fn with_tuples(crates: &[Crate]) -> Vec<(String, String, usize)> {
    let mut found = Vec::new();
    for one in crates {
        for source in one.sources.iter().filter(|source| !source.is_test) {
            for function in functions(&source.syntax) {
                let place = format!("{}:{}", one.path_of(source), function.line);
                found.push((place, function.name, function.tuples));
            }
        }
    }
    found
}

/// Number of rows of the table of steps to add a config key.
fn key_steps(guide: &str) -> usize {
    let (_, section) = guide.split_once("\n## Add a config key\n").unwrap_or_default();
    let section = section.split("\n## ").next().unwrap_or_default();
    let number = |line: &&str| {
        let cell = line.strip_prefix("| ").and_then(|rest| rest.split(' ').next());
        cell.is_some_and(|cell| !cell.is_empty() && cell.bytes().all(|b| b.is_ascii_digit()))
    };
    section.lines().filter(number).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rows_of_the_table_are_the_steps() {
        let guide = "# A\n\n| 9 | op |\n\n## Add a config key\n\n| # | file |\n|---|---|\n| 1 | a |\n| 10 | b |\n\n## Add\n| 3 | c |\n";
        assert_eq!(key_steps(guide), 2);
    }

    #[test]
    fn the_largest_circle_is_named() {
        let circle = |name: &str, count: usize| (name.to_owned(), vec![String::new(); count]);
        assert_eq!(largest(&[]), "0");
        assert_eq!(largest(&[circle("a", 2), circle("b", 3)]), "2, the largest of 3 in b");
    }
}
