//! Errors of a configuration, each with its place, the value found and a remedy.
//!
//! `Display` writes plain text in the style of rustc.

use std::fmt;

use files::foreign_text::ForeignText;
use topology::counted;

use super::{ConfigSource, SourceKind, Span};

/// Most errors that are shown, so that a file of nonsense does not fill the screen.
pub(crate) const SHOWN: usize = 50;

/// Columns of a source line that are shown around an error.
const WIDTH: usize = 100;

/// What is wrong with a value, and the remedy.
pub(crate) struct Complaint {
    pub(crate) message: String,
    pub(crate) help: String,
}

pub(crate) type ParseResult<T> = Result<T, Complaint>;

/// All errors of a configuration. `Display` prints the first 50 of them and the number of the rest.
#[derive(Debug)]
pub struct ConfigError {
    pub(crate) name: String,
    pub(crate) sources: Vec<ConfigSource>,
    pub(crate) problems: Vec<Problem>,
}

/// One error.
#[derive(Clone, Debug)]
pub struct Problem {
    /// The dotted key; empty for errors that concern no key, such as syntax.
    pub key: String,
    /// Description of the error.
    pub message: String,
    /// Remedy for the error.
    pub help: String,
    pub(crate) spots: Vec<Spot>,
}

/// A broken rule between keys.
#[derive(Debug)]
pub struct Violation {
    /// Description of the error, with the values and the arithmetic.
    pub message: String,
    /// Remedy for the error.
    pub help: String,
    /// The keys of the rule, each with the meaning of its value here. The key to blame is first.
    pub values: Vec<(&'static str, String)>,
}

/// A value that an error shows.
#[derive(Clone, Debug)]
pub(crate) enum Spot {
    /// The place of the value in a text, and a label.
    At(Span, String),
    /// A description of a value that is in no text, such as a default.
    Note(String),
}

impl ConfigError {
    /// Every error, in the order of the texts.
    pub fn errors(&self) -> &[Problem] {
        &self.problems
    }

    /// Name of the text of an error, such as a file, with line and column.
    pub fn place(&self, problem: &Problem) -> Option<(&str, usize, usize)> {
        let at = problem.place()?;
        let source = self.sources.get(at.source)?;
        let spotted = source.spot(at);
        Some((&source.name, spotted.line, spotted.col))
    }

    /// File for which an error counts: the file of its first value, or the config if the value is
    /// in no file.
    fn file(&self, problem: &Problem) -> &str {
        let first = problem.place().and_then(|at| self.sources.get(at.source));
        let of_file = first.filter(|source| matches!(source.kind, SourceKind::File { .. }));
        of_file.map_or(&self.name, |source| &source.name)
    }

    /// Returns the error without quoted lines of the text `name`: the user did not write this text.
    #[must_use]
    pub fn without_text(mut self, name: &str) -> Self {
        let is_own = |spot: &Spot| match spot {
            Spot::At(place, _) => self.sources.get(place.source).is_some_and(|s| s.name == name),
            Spot::Note(_) => false,
        };
        self.problems.iter_mut().for_each(|problem| problem.spots.retain(|spot| !is_own(spot)));
        self
    }

    /// An error without a place in a text, such as an unreadable file.
    pub(crate) fn plain(name: &str, message: String, help: String) -> Self {
        let problem = Problem { key: String::new(), message, help, spots: Vec::new() };
        Self { name: name.into(), sources: Vec::new(), problems: vec![problem] }
    }
}

impl Problem {
    /// An error at one place.
    pub(crate) fn at(key: &str, place: Span, Complaint { message, help }: Complaint) -> Self {
        Self { key: key.into(), message, help, spots: vec![Spot::At(place, String::new())] }
    }

    /// Sort key of an error: its first place. Errors without a place come first.
    pub(crate) fn order(&self) -> (usize, usize) {
        self.place().map_or((0, 0), |at| (at.source + 1, at.start))
    }

    /// Place of the first value that is in a text.
    fn place(&self) -> Option<Span> {
        self.spots.iter().find_map(|spot| match spot {
            Spot::At(place, _) => Some(*place),
            Spot::Note(_) => None,
        })
    }
}

impl std::error::Error for ConfigError {}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for problem in self.problems.iter().take(SHOWN) {
            render_problem(f, problem, &self.sources)?;
            writeln!(f)?;
        }
        let count = self.problems.len();
        if count > SHOWN {
            writeln!(f, "... and {} more errors\n", count - SHOWN)?;
        }
        let mut files: Vec<(&str, usize)> = Vec::new();
        for problem in &self.problems {
            let file = self.file(problem);
            match files.iter_mut().find(|(name, _)| *name == file) {
                Some((_, errors)) => *errors += 1,
                None => files.push((file, 1)),
            }
        }
        let counts =
            files.iter().map(|(name, n)| format!("{} in {}", counted(n, "error"), clean(name)));
        f.write_str(&counts.collect::<Vec<_>>().join(", "))
    }
}

fn render_problem(
    out: &mut fmt::Formatter<'_>,
    problem: &Problem,
    sources: &[ConfigSource],
) -> fmt::Result {
    let key = match problem.key.char_indices().nth(WIDTH) {
        _ if problem.key.is_empty() => String::new(),
        // A key of a config is never this long.
        Some((end, _)) => format!("{}...: ", &problem.key[..end]),
        None => format!("{}: ", problem.key),
    };
    writeln!(out, "error: {}{}", clean(&key), sentence(&problem.message))?;
    let (mut spots, mut notes) = (Vec::new(), Vec::new());
    for spot in &problem.spots {
        match spot {
            Spot::At(place, label) => spots.push((*place, label.as_str())),
            Spot::Note(note) => notes.push(note),
        }
    }
    let gutter = gutter_width(&spots, sources);
    render_spots(out, &mut spots, sources, gutter)?;
    let pad = " ".repeat(gutter);
    for note in notes {
        writeln!(out, "{pad} = note: {}", sentence(note))?;
    }
    if problem.help.is_empty() {
        return Ok(());
    }
    writeln!(out, "{pad} = help: {}", sentence(&problem.help))
}

/// Writes the lines of all spots. First come the lines of the first spot's source, in order, then
/// those of the other sources.
fn render_spots(
    out: &mut fmt::Formatter<'_>,
    spots: &mut [(Span, &str)],
    sources: &[ConfigSource],
    gutter: usize,
) -> fmt::Result {
    let Some((lead, _)) = spots.first().copied() else { return Ok(()) };
    spots.sort_by_key(|(place, _)| (place.source != lead.source, place.source, place.start));
    let pad = " ".repeat(gutter);
    let mut previous: Option<(usize, usize)> = None;
    for (place, label) in spots {
        let Some(source) = sources.get(place.source) else { continue };
        let spotted = source.spot(*place);
        match previous {
            None => writeln!(out, "{pad}--> {}\n{pad} |", address(source, lead))?,
            Some((index, _)) if index != place.source => {
                writeln!(out, "{pad}::: {}\n{pad} |", address(source, *place))?;
            }
            Some((_, line)) if spotted.line > line + 1 => writeln!(out, "...")?,
            Some(_) => {}
        }
        let here = Some((place.source, spotted.line));
        let (text, from, width) = excerpt(spotted.text, spotted.within);
        let (number, prefix) = match source.kind {
            SourceKind::File { .. } => (spotted.line.to_string(), ""),
            SourceKind::Set => (String::new(), "--set "),
            SourceKind::Box => (String::new(), "--box "),
        };
        if previous != here {
            writeln!(out, "{number:>gutter$} | {prefix}{text}")?;
        }
        previous = here;
        let underline = format!("{}{}", " ".repeat(prefix.len() + from), "^".repeat(width));
        writeln!(out, "{}", format!("{pad} | {underline} {}", clean(label)).trim_end())?;
    }
    Ok(())
}

/// Address of a place: `file:line:col`, or `command line`.
fn address(source: &ConfigSource, place: Span) -> String {
    match source.kind {
        SourceKind::File { .. } => {
            let spotted = source.spot(place);
            format!("{}:{}:{}", clean(&source.name), spotted.line, spotted.col)
        }
        SourceKind::Set | SourceKind::Box => "command line".into(),
    }
}

fn gutter_width(spots: &[(Span, &str)], sources: &[ConfigSource]) -> usize {
    let lines = spots.iter().filter_map(|(place, _)| {
        let source = sources.get(place.source)?;
        matches!(source.kind, SourceKind::File { .. }).then(|| source.spot(*place).line)
    });
    lines.max().map_or(1, |line| line.to_string().len())
}

/// Part of a line around `within` that is safe to print, with the column and width of the
/// underline.
fn excerpt(line: &str, within: std::ops::Range<usize>) -> (String, usize, usize) {
    let count = |text: Option<&str>| text.unwrap_or_default().chars().count();
    let from = count(line.get(..within.start));
    let width = count(line.get(within)).max(1);
    let total = line.chars().count();
    if total <= WIDTH {
        return (clean(line), from, width);
    }
    let start = from.saturating_sub(WIDTH / 2).min(total - WIDTH);
    let piece: String = line.chars().skip(start).take(WIDTH).collect();
    let lead = if start > 0 { "..." } else { "" };
    let tail = if start + WIDTH < total { "..." } else { "" };
    let column = from - start + lead.len();
    (format!("{lead}{}{tail}", clean(&piece)), column, width.min(WIDTH + lead.len() - column + 1))
}

/// Replaces control characters and line ends, so that a file cannot write to the terminal.
fn clean(text: &str) -> String {
    let printable = |c: char| match c {
        '\t' => ' ',
        c if c.is_control() || matches!(c, '\u{200E}' | '\u{200F}' | '\u{202A}'..='\u{202E}') => {
            '\u{FFFD}'
        }
        c => c,
    };
    text.chars().map(printable).collect()
}

/// Makes a message safe to print; the message may quote whole paths and commands.
fn sentence(text: &str) -> String {
    /// Most characters of a message.
    const LONGEST: usize = 10_000;
    ForeignText::new(clean(text), LONGEST).to_string()
}

/// A value quoted in a message: one line, at most 40 characters.
pub(crate) fn short(text: &str) -> String {
    let mut out: String = text.chars().take(40).collect();
    if out.len() < text.len() {
        out += "...";
    }
    clean(&out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &str) -> ConfigSource {
        let kind = SourceKind::File { dir: Some("/".into()) };
        ConfigSource { kind, name: "a.ron".into(), text: text.into() }
    }

    fn error(sources: Vec<ConfigSource>, spots: Vec<Spot>) -> ConfigError {
        let problem = Problem {
            key: "model.heads".into(),
            message: "is wrong".into(),
            help: "do this".into(),
            spots,
        };
        ConfigError { name: "a.ron".into(), sources, problems: vec![problem] }
    }

    fn at(source: usize, start: usize, end: usize, label: &str) -> Spot {
        Spot::At(Span { source, start, end }, label.into())
    }

    #[test]
    fn two_places_of_a_file_are_shown_in_order_under_the_first_ones_address() {
        let text = "(\n  heads: 12,\n\n\n  tensor: 8,\n)";
        let spots = vec![at(0, 27, 28, "8 ranks"), at(0, 11, 13, "12 heads")];
        let expected = "\
error: model.heads: is wrong
 --> a.ron:5:11
  |
2 |   heads: 12,
  |          ^^ 12 heads
...
5 |   tensor: 8,
  |           ^ 8 ranks
  = help: do this

1 error in a.ron";
        assert_eq!(error(vec![file(text)], spots).to_string(), expected);
    }

    #[test]
    fn a_set_argument_is_shown_as_it_was_given() {
        let set =
            ConfigSource { kind: SourceKind::Set, name: "--set".into(), text: "a=\u{1b}0".into() };
        let spots = vec![at(1, 2, 4, "here"), at(0, 0, 1, "")];
        let shown = error(vec![file("é"), set], spots).to_string();
        assert!(shown.contains("  | --set a=\u{FFFD}0\n  |         ^^ here\n"), "{shown}");
        assert!(shown.contains(" ::: a.ron:1:1\n"), "{shown}");
    }

    #[test]
    fn long_lines_are_cut_around_the_place() {
        let text = format!("{}BAD{}", "x".repeat(5000), "y".repeat(5000));
        let (line, from, width) = excerpt(&text, 5000..5003);
        assert!(line.len() < 120);
        assert_eq!((&line[from..from + width], width), ("BAD", 3));
        let (line, from, width) = excerpt(&text, 0..10_003);
        assert!(from + width <= line.len());
    }
}
