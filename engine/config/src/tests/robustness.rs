//! Tests with misspelled keys and with random texts.

use super::super::reading::{ConfigSource, SourceKind, tree};
use super::{LEAST, RICH, loaded};

/// Every field of a text: its dotted path, its key, and the byte range of the key.
fn fields(text: &str) -> Vec<(String, String, std::ops::Range<usize>)> {
    fn walk(
        node: &tree::Node,
        path: &str,
        out: &mut Vec<(String, String, std::ops::Range<usize>)>,
    ) {
        let tree::NodeKind::Struct { fields, .. } = &node.kind else { return };
        for field in fields {
            let range = field.key_place.start..field.key_place.end;
            out.push((path.to_string(), field.key.clone(), range));
            walk(&field.value, &tree::join(path, &field.key), out);
        }
    }
    let kind = SourceKind::Set;
    let source = ConfigSource { kind, name: String::new(), text: text.into() };
    let mut out = Vec::new();
    walk(&tree::parse(&source, 0, 0).unwrap(), "", &mut out);
    out
}

/// Misspellings of `key`: one deleted character, or two swapped neighbours.
fn misspellings(key: &str) -> Vec<String> {
    let characters: Vec<char> = key.chars().collect();
    let deleted = (0..characters.len()).map(|at| {
        let mut typed = characters.clone();
        typed.remove(at);
        typed
    });
    let swapped = (1..characters.len()).map(|at| {
        let mut typed = characters.clone();
        typed.swap(at - 1, at);
        typed
    });
    let typed = deleted.chain(swapped).filter(|typed| !typed.is_empty() && *typed != characters);
    // RON refuses a key that starts with a digit.
    typed.map(String::from_iter).filter(|typed| !typed.starts_with(char::is_numeric)).collect()
}

#[test]
fn every_misspelling_of_every_key_is_refused_with_the_key_that_was_meant() {
    let text = loaded(RICH, &[]).unwrap().config.to_ron();
    let mut tried = 0;
    for (section, key, range) in fields(&text) {
        for typed in misspellings(&key) {
            let mut wrong = text.clone();
            wrong.replace_range(range.clone(), &typed);
            let error = loaded(&wrong, &[]).expect_err(&typed);
            let dotted = tree::join(&section, &typed);
            let problem = error.errors().iter().find(|problem| problem.key == dotted);
            let help = &problem.unwrap_or_else(|| panic!("{dotted}:\n{error}")).help;
            assert!(help.contains(&format!("`{key}`")), "{dotted}: {help}");
            tried += 1;
        }
    }
    assert!(tried > 600, "{tried}");
}

/// A small generator of numbers (splitmix64), so that failures repeat.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % bound as u64) as usize
    }
}

/// Bytes and tokens that mean something to a parser.
const PIECES: [&str; 34] = [
    "(",
    ")",
    "[",
    "]",
    "{",
    "}",
    ",",
    ":",
    "\"",
    "'",
    "\\",
    "#",
    "r#",
    "b'",
    "//",
    "/*",
    "*/",
    "é",
    "\u{85}",
    "\u{2028}",
    "\0",
    "Some(",
    "None",
    "NaN",
    "1e999",
    "-",
    ".",
    "_",
    "=",
    "..",
    "0x",
    "#![enable(implicit_some)]",
    "\r\n",
    "99999999999999999999",
];

/// A text with some bytes removed and some pieces inserted.
fn mangled(text: &str, numbers: &mut Numbers) -> String {
    let mut text = text.to_string();
    for _ in 0..=numbers.below(3) {
        let cut = numbers.below(text.len() + 1);
        let end = (cut + numbers.below(8) * numbers.below(3)).min(text.len());
        if text.is_char_boundary(cut) && text.is_char_boundary(end) {
            text.replace_range(cut..end, PIECES[numbers.below(PIECES.len())]);
        }
    }
    text
}

#[test]
fn no_text_makes_the_loader_panic() {
    let mut numbers = Numbers(7);
    let sources = [RICH.to_string(), LEAST.to_string(), loaded(RICH, &[]).unwrap().config.to_ron()];
    let mut accepted = 0;
    for round in 0..6000 {
        let text = mangled(&sources[round % sources.len()], &mut numbers);
        match loaded(&text, &[]) {
            Ok(loaded) => {
                accepted += 1;
                let written = loaded.config.to_ron();
                let again = super::loaded(&written, &[]).unwrap_or_else(|e| panic!("{text}\n{e}"));
                assert_eq!(again.config, loaded.config, "{text}");
            }
            Err(error) => {
                assert!(!error.errors().is_empty());
                let shown = error.to_string();
                assert!(shown.contains("error") && !shown.contains('\0'), "{shown}");
            }
        }
    }
    assert!(accepted > 100, "{accepted}");
}

#[test]
fn no_argument_of_set_makes_the_loader_panic() {
    let mut numbers = Numbers(11);
    let whole = loaded(RICH, &[]).unwrap();
    let sets: Vec<String> =
        whole.origins.iter().map(|(key, value, _)| format!("{key}={value}")).collect();
    for round in 0..6000 {
        let set = mangled(&sets[round % sets.len()], &mut numbers);
        let other = mangled(&sets[numbers.below(sets.len())], &mut numbers);
        match loaded(LEAST, &[&set, &other]) {
            Ok(loaded) => assert!(!loaded.config.to_ron().is_empty()),
            Err(error) => assert!(error.to_string().contains("error")),
        }
    }
}

#[test]
fn a_text_of_errors_is_cut_short() {
    let keys: String = (0..5000).map(|n| format!("k{n}: 1,")).collect();
    let error = loaded(&format!("({keys})"), &[]).unwrap_err();
    assert_eq!(error.errors().len(), 5005);
    let shown = error.to_string();
    assert!(shown.contains("... and 4955 more errors") && shown.len() < 100_000);
}

#[test]
fn only_errors_that_are_shown_look_for_what_was_meant() {
    let keys: String = (0..60_000).map(|n| format!("k{n}: 1,")).collect();
    let error = loaded(&format!("({keys})"), &[]).unwrap_err();
    let unknown: Vec<_> = error.errors().iter().filter(|p| p.key.starts_with('k')).collect();
    assert_eq!(unknown.len(), 60_000);
    let helped = unknown.iter().take_while(|problem| !problem.help.is_empty()).count();
    assert_eq!((helped, unknown[helped..].iter().any(|p| !p.help.is_empty())), (50, false));
    let shown = error.to_string();
    assert_eq!(shown.matches("= help: ").count(), 50, "{shown}");
}

#[test]
fn a_file_cannot_write_to_the_terminal() {
    let error = loaded("(\"\u{1b}[31m\": 1, name: \u{202E})", &[]).unwrap_err().to_string();
    assert!(!error.contains('\u{1b}') && !error.contains('\u{202E}'), "{error:?}");
    let error = loaded(LEAST, &["model.layers=\"\u{1b}[31m\""]).unwrap_err().to_string();
    assert!(!error.contains('\u{1b}'), "{error:?}");
}
