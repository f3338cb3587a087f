//! Counts lines of a file of Rust without its tests.

use proc_macro2::{Delimiter, Group, TokenStream, TokenTree};
use std::collections::BTreeSet;

/// First words of an item; other things with attributes end at a comma, too.
const ITEMS: [&str; 14] = [
    "async",
    "const",
    "enum",
    "extern",
    "fn",
    "impl",
    "macro_rules",
    "mod",
    "pub",
    "static",
    "struct",
    "trait",
    "type",
    "use",
];

/// The lines that are no tests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LineCount {
    /// All lines, including comments and blank lines.
    pub all: usize,
    /// Lines with code.
    pub code: usize,
}

/// Counts the lines of `text` that are no tests. A line with a token counts as code.
pub(crate) fn count(text: &str) -> Result<LineCount, String> {
    let tokens: TokenStream = text.parse().map_err(|e| format!("{e}"))?;
    let mut lines = Lines { text: text.lines().collect(), ..Lines::default() };
    lines.read(tokens);
    let all = lines.text.len() - lines.test.len();
    let code = lines.code.difference(&lines.test).count();
    Ok(LineCount { all, code })
}

/// Numbers of lines, from 1.
#[derive(Default)]
struct Lines<'a> {
    text: Vec<&'a str>,
    code: BTreeSet<usize>,
    test: BTreeSet<usize>,
}

impl Lines<'_> {
    fn read(&mut self, tokens: TokenStream) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let mut at = 0;
        while at < tokens.len() {
            if let Some((attribute, length)) = attribute(&tokens[at..]) {
                if is_comment(attribute, &self.text) {
                    at += length;
                    continue;
                }
                if is_cfg_test(attribute) {
                    let end = at + item_length(&tokens[at..]);
                    let lines = first_line(&tokens[at])..=last_line(&tokens[end - 1]);
                    self.test.extend(lines);
                    at = end;
                    continue;
                }
            }
            match &tokens[at] {
                TokenTree::Group(group) => {
                    self.code.insert(group.span_open().start().line);
                    self.code.insert(group.span_close().end().line);
                    self.read(group.stream());
                }
                token => self.code.extend(first_line(token)..=last_line(token)),
            }
            at += 1;
        }
    }
}

fn first_line(token: &TokenTree) -> usize {
    token.span().start().line
}

fn last_line(token: &TokenTree) -> usize {
    token.span().end().line
}

fn is_mark(token: Option<&TokenTree>, mark: char) -> bool {
    matches!(token, Some(TokenTree::Punct(found)) if found.as_char() == mark)
}

/// The brackets of the attribute that `tokens` start with, and its number of tokens.
fn attribute(tokens: &[TokenTree]) -> Option<(&Group, usize)> {
    let length = if is_mark(tokens.get(1), '!') { 3 } else { 2 };
    match (is_mark(tokens.first(), '#'), tokens.get(length - 1)) {
        (true, Some(TokenTree::Group(group))) if group.delimiter() == Delimiter::Bracket => {
            Some((group, length))
        }
        _ => None,
    }
}

/// Whether an attribute is written as a comment.
fn is_comment(attribute: &Group, text: &[&str]) -> bool {
    let start = attribute.span_open().start();
    let line = text.get(start.line.saturating_sub(1)).copied().unwrap_or_default();
    let rest: String = line.chars().skip(start.column).collect();
    rest.starts_with("//") || rest.starts_with("/*")
}

fn is_cfg_test(attribute: &Group) -> bool {
    attribute.stream().to_string().replace(' ', "") == "cfg(test)"
}

/// Number of tokens of the item at the start of `tokens`, with its attributes.
fn item_length(tokens: &[TokenTree]) -> usize {
    let mut at = 0;
    while let Some((_, length)) = attribute(&tokens[at..]) {
        at += length;
    }
    let is_item =
        matches!(tokens.get(at), Some(TokenTree::Ident(word)) if ITEMS.iter().any(|i| word == i));
    while let Some(token) = tokens.get(at) {
        at += 1;
        let is_body = matches!(token, TokenTree::Group(g) if g.delimiter() == Delimiter::Brace);
        if is_body && !is_mark(tokens.get(at), ';') {
            break;
        }
        if is_mark(Some(token), ';') || (!is_item && is_mark(Some(token), ',')) {
            break;
        }
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(text: &str) -> (usize, usize) {
        let count = count(text).unwrap_or_default();
        (count.all, count.code)
    }

    #[test]
    fn comments_and_blank_lines_are_no_code() {
        let text = "//! Says.\n\n/// A.\nfn a() {\n    // b\n    b(); // c\n    /* d\n    */\n}\n";
        assert_eq!(counts(text), (9, 3));
    }

    #[test]
    fn an_attribute_is_code_and_a_string_of_several_lines_too() {
        assert_eq!(counts("#![allow(a)]\n#[derive(B)]\nstruct A;\n"), (3, 3));
        assert_eq!(counts("const A: &str = \"a\n\n// b\n\";\n"), (4, 4));
        assert_eq!(counts("#[doc = \"a\"]\nstruct A;\n"), (2, 2));
    }

    #[test]
    fn tests_are_left_out_to_the_end_of_their_item() {
        let text = "fn a() {}\n#[cfg(test)]\n/// B.\nmod b {\n    fn c() {}\n}\nfn d() {}\n";
        assert_eq!(counts(text), (2, 2));
        assert_eq!(counts("#[cfg(test)]\nmod tests;\nfn d() {}\n"), (1, 1));
        assert_eq!(counts("#[cfg(test)]\nuse a::{\n    b\n};\nfn d() {}\n"), (1, 1));
        let field = "struct A {\n    #[cfg(test)]\n    a: u8,\n    b: u8,\n}\n";
        assert_eq!(counts(field), (3, 3));
        let function = "#[cfg(test)]\nfn a<A, B>() -> [u8; 2] {\n    f()\n}\nfn d() {}\n";
        assert_eq!(counts(function), (1, 1));
    }
}
