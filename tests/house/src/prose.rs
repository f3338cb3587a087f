//! Finds the documentation comments with a phrase that makes a reader read twice.
//!
//! The phrases belong to a dialect that this project once had: pronouns without a noun, "if" replaced
//! by another word, private words. The search compares words only, so a comment without a phrase may
//! still be bad, and a few good comments have one of the phrases.

use crate::workspace::{Crate, Source};

/// Phrases, word by word: `|` separates alternatives, `_` is any word, `^` is the beginning of a
/// clause, and `.` is its end.
const PHRASES: [&str; 40] = [
    "so many|much|few",
    "for who|whom|whoever",
    "who asks|looks|reads|waits|wants|needs|gives|does|trains|knows",
    "told|tells",
    "beside",
    "behind",
    "takes|taken",
    "comes|come|came|coming to",
    "comes|come|came from|up|down",
    "goes|go|went|going on",
    "brings|bring|brought",
    "of which|whom",
    "ones",
    "one that",
    "these .",
    "these are|have|do|may|must|need|come|go|were",
    "such .",
    "such are|is|have|may",
    "those|that of",
    "^ where",
    "where there|it|they|none|nothing|one",
    "is|are|not|was|were|be there",
    "there is|are none",
    "as it|they is|are|was|were|stands|came",
    "by itself|themselves",
    "made|make|makes|read|written again",
    "nobody|whoever|whatever|whichever",
    "what _ makes|has|says|holds|gets|knows",
    "what _ _ makes|has|says|holds|gets|knows",
    "hears|heard|asks|lets|wants|wanted",
    "as far as",
    "at|of|to|on|in|from|with|by it .",
    "on its|their way",
    "if any",
    "if there is|are one|any",
    "ahead of",
    "any|no more",
    "likewise|alike",
    "nothing else|more",
    "by|until then",
];

/// A run of documentation comments of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DocComment {
    /// Number of its first line, from 1.
    pub line: usize,
    /// Its text, on one line.
    pub text: String,
}

/// The documentation comments of a text of Rust, in order.
pub fn doc_comments(text: &str) -> Vec<DocComment> {
    let mut comments: Vec<DocComment> = Vec::new();
    let mut follows = false;
    for (at, line) in text.lines().enumerate() {
        let line = line.trim_start();
        let words = line.strip_prefix("///").or_else(|| line.strip_prefix("//!"));
        match (words.map(str::trim), comments.last_mut()) {
            (None, _) => {}
            (Some(words), Some(last)) if follows => {
                last.text.push(' ');
                last.text.push_str(words);
            }
            (Some(words), _) => comments.push(DocComment { line: at + 1, text: words.to_owned() }),
        }
        follows = words.is_some();
    }
    comments
}

/// The phrases that a comment has, as the list spells them. Text between backticks counts as one word.
pub fn phrases(text: &str) -> Vec<&'static str> {
    let clauses: Vec<Vec<String>> = clauses(text);
    let has = |phrase: &str| {
        let pattern: Vec<&str> = phrase.split(' ').collect();
        clauses
            .iter()
            .any(|clause| clause.windows(pattern.len()).any(|words| is_like(&pattern, words)))
    };
    PHRASES.into_iter().filter(|phrase| has(phrase)).collect()
}

/// Whether each word is one of those at its place in the pattern.
fn is_like(pattern: &[&str], words: &[String]) -> bool {
    let fits = |(pattern, word): (&&str, &String)| {
        let is_word = word.chars().all(char::is_alphanumeric);
        (*pattern == "_" && is_word) || pattern.split('|').any(|listed| listed == word)
    };
    pattern.iter().zip(words).all(fits)
}

/// The words of each clause in lower case, between `^` and `.`.
fn clauses(text: &str) -> Vec<Vec<String>> {
    let mut prose = String::new();
    for (at, part) in text.split('`').enumerate() {
        prose.push_str(if at % 2 == 0 { part } else { "code" });
    }
    let mut clauses = Vec::new();
    for clause in prose.split([',', ';', ':', '.', '(', ')', '?', '!']) {
        let words = clause.split(|c: char| !c.is_alphanumeric() && c != '\'');
        let words = words.filter(|word| !word.is_empty()).map(str::to_lowercase);
        let all = std::iter::once("^".to_owned()).chain(words).chain([".".to_owned()]);
        clauses.push(all.collect());
    }
    clauses
}

/// Numbers of documentation comments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProseCount {
    /// All comments.
    pub all: usize,
    /// Comments with a phrase of the list.
    pub marked: usize,
}

impl ProseCount {
    /// Counts the comments of the files that are no tests.
    pub fn new<'a>(sources: impl IntoIterator<Item = &'a Source>) -> Self {
        let mut count = Self::default();
        for (_, _, phrases) in with_phrases(sources) {
            count.all += 1;
            count.marked += usize::from(!phrases.is_empty());
        }
        count
    }

    /// Percent of the comments that are marked; 0 without comments.
    pub fn percent(self) -> f64 {
        if self.all == 0 { 0.0 } else { 100.0 * self.marked as f64 / self.all as f64 }
    }
}

/// The places of the marked comments of a crate that are no tests, with the phrases of each.
pub fn marked(one: &Crate) -> Vec<(String, Vec<&'static str>)> {
    let marked = with_phrases(&one.sources).filter(|(_, _, phrases)| !phrases.is_empty());
    let place = |source, line| format!("{}:{line}", one.path_of(source));
    marked.map(|(source, line, phrases)| (place(source, line), phrases)).collect()
}

/// The comments of the files that are no tests: file, line and phrases.
fn with_phrases<'a>(
    sources: impl IntoIterator<Item = &'a Source>,
) -> impl Iterator<Item = (&'a Source, usize, Vec<&'static str>)> {
    sources.into_iter().filter(|source| !source.is_test).flat_map(|source| {
        let comments = doc_comments(&source.text).into_iter();
        comments.map(move |comment| (source, comment.line, phrases(&comment.text)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_lines_are_comments() {
        let text = "//! A.\n//! B.\n\nfn f() {} // no\n    /// C\n    x: u8,\n";
        let comments = doc_comments(text);
        let found: Vec<_> = comments.iter().map(|one| (one.line, one.text.as_str())).collect();
        assert_eq!(found, [(1, "A. B."), (5, "C")]);
    }

    #[test]
    fn each_phrase_is_found() {
        for phrase in PHRASES {
            let words = phrase.split(' ').map(|word| word.split('|').next().unwrap_or_default());
            let words: Vec<_> = words.map(|word| if word == "_" { "file" } else { word }).collect();
            let (front, back) = (words.first() == Some(&"^"), words.last() == Some(&"."));
            let middle = words[usize::from(front)..words.len() - usize::from(back)].join(" ");
            let text = match (front, back) {
                (true, true) => format!("Data, {middle}."),
                (true, false) => format!("Data, {middle} data."),
                (false, true) => format!("Data {middle}."),
                (false, false) => format!("Data {middle} data."),
            };
            assert!(phrases(&text).contains(&phrase), "{phrase}: {text}");
            assert_eq!(phrases(&format!("Data `{middle}` data.")), [""; 0], "{phrase}");
        }
    }

    #[test]
    fn plain_sentences_have_none() {
        for text in [
            "Number of newest checkpoints to keep.",
            "Runs the backward pass of a micro-batch group, block by block.",
            "These ranks share a GPU. It returns such a list of tasks; a task is asked for.",
        ] {
            assert_eq!(phrases(text), [""; 0], "{text}");
        }
    }
}
