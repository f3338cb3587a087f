//! RON as a tree in which every key and every value has its place.
//!
//! `ron` itself decides what is valid, and describes errors. The tree is built from valid text, so
//! the parser only finds where things start and end.

use std::collections::HashMap;

use super::{ConfigSource, Span};

/// A value and its place.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    pub(crate) place: Span,
    pub(crate) kind: NodeKind,
}

/// Form of a value, before its type is known.
#[derive(Clone, Debug)]
pub(crate) enum NodeKind {
    /// A number, `true`, `None`, or a variant without fields, as text.
    Word(String),
    /// A RON string literal.
    Text,
    /// Text of a `--set` that needs no quotes.
    Bare,
    /// A group of keys: `(key: value, ...)` or `Name(key: value, ...)`.
    Struct { name: Option<String>, fields: Vec<Field> },
    /// A group of values: `(value, ...)` or `Name(value, ...)`.
    Tuple { name: Option<String>, items: Vec<Node> },
    /// A list: `[value, ...]`.
    List(Vec<Node>),
    /// A value that no config uses, described in words.
    Other(&'static str),
}

/// A key with its value: `key: value`.
#[derive(Clone, Debug)]
pub(crate) struct Field {
    pub(crate) key: String,
    pub(crate) key_place: Span,
    pub(crate) value: Node,
}

/// Reason why a text is no RON, and the place.
#[derive(Debug)]
pub(crate) struct SyntaxError {
    pub(crate) place: Span,
    pub(crate) message: String,
}

/// Parses the text of source number `index` from byte `start` on.
pub(crate) fn parse(
    source: &ConfigSource,
    index: usize,
    start: usize,
) -> Result<Node, SyntaxError> {
    let text = source.text.get(start..).unwrap_or_default();
    if let Err(error) = ron::from_str::<serde::de::IgnoredAny>(text) {
        let local = ConfigSource { text: text.to_string(), ..source.clone() };
        let at = |p: ron::error::Position| start + local.offset(p.line, p.col);
        let (from, to) = (at(error.span.start), at(error.span.end));
        // The place does not include the space before the unexpected characters.
        let rest = source.text.get(from..).unwrap_or_default();
        let from = match error.code {
            ron::Error::TrailingCharacters => from + rest.len() - rest.trim_start().len(),
            _ => from,
        };
        let place = Span { source: index, start: from, end: to.max(from) };
        return Err(SyntaxError { place, message: error.code.to_string() });
    }
    let mut parser = Parser { text: &source.text, at: start, source: index };
    parser.attributes().and_then(|()| parser.value()).ok_or_else(|| SyntaxError {
        place: parser.place(parser.at),
        message: "This is RON that a config cannot hold".into(),
    })
}

impl Node {
    /// Node without keys, a stand-in for a text that is missing or cannot be parsed.
    pub(crate) const fn empty() -> Self {
        let place = Span { source: 0, start: 0, end: 0 };
        Self { place, kind: NodeKind::Struct { name: None, fields: Vec::new() } }
    }

    /// Calls `found` with the dotted key and both places of every key that stands twice.
    pub(crate) fn duplicates(&self, path: &str, found: &mut impl FnMut(String, Span, Span)) {
        if let NodeKind::List(items) = &self.kind {
            items.iter().for_each(|item| item.duplicates(path, found));
        }
        let NodeKind::Struct { fields, .. } = &self.kind else { return };
        let mut seen: HashMap<&str, Span> = HashMap::new();
        for field in fields {
            let dotted = join(path, &field.key);
            if let Some(first) = seen.insert(&field.key, field.key_place) {
                found(dotted.clone(), first, field.key_place);
            }
            field.value.duplicates(&dotted, found);
        }
    }

    /// Whether this node is `( key: value, ... )` without a name.
    pub(crate) fn is_group(&self) -> bool {
        matches!(self.kind, NodeKind::Struct { name: None, .. })
    }
}

/// Joins a dotted key: `path.key`, or `key` at the top.
pub(crate) fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.into() } else { format!("{path}.{key}") }
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
    source: usize,
}

impl<'a> Parser<'a> {
    fn rest(&self) -> &'a str {
        self.text.get(self.at..).unwrap_or_default()
    }

    fn place(&self, start: usize) -> Span {
        Span { source: self.source, start, end: self.at }
    }

    fn eat(&mut self, token: &str) -> bool {
        let found = self.rest().starts_with(token);
        self.at += if found { token.len() } else { 0 };
        found
    }

    /// Moves after the next `token`; `None` if there is no further one.
    fn past(&mut self, token: &str) -> Option<()> {
        self.at += self.rest().find(token)? + token.len();
        Some(())
    }

    /// Skips whitespace and comments.
    fn skip(&mut self) {
        loop {
            let rest = self.rest();
            self.at += rest.len() - rest.trim_start_matches(is_space).len();
            if self.eat("/*") {
                self.block_comment();
            } else if self.eat("//") {
                self.at += self.rest().find('\n').unwrap_or(self.rest().len());
            } else {
                return;
            }
        }
    }

    fn block_comment(&mut self) {
        let mut depth = 1;
        while depth > 0 && !self.rest().is_empty() {
            if self.eat("/*") {
                depth += 1;
            } else if self.eat("*/") {
                depth -= 1;
            } else {
                self.at += self.rest().chars().next().map_or(0, char::len_utf8);
            }
        }
    }

    /// Skips attributes such as `#![enable(implicit_some)]`.
    fn attributes(&mut self) -> Option<()> {
        self.skip();
        while self.eat("#") {
            while !self.eat("]") {
                match self.rest().chars().next()? {
                    '"' => self.string()?,
                    c => self.at += c.len_utf8(),
                }
                self.skip();
            }
            self.skip();
        }
        Some(())
    }

    fn value(&mut self) -> Option<Node> {
        self.skip();
        let start = self.at;
        let kind = match self.rest().chars().next()? {
            '[' => NodeKind::List(self.items("[", "]")?),
            '{' => self.items("{", "}").map(|_| NodeKind::Other("a map"))?,
            '(' => self.group(None)?,
            _ => match self.literal() {
                Some(kind) => kind,
                None => self.word_value()?,
            },
        };
        Some(Node { place: self.place(start), kind })
    }

    fn string(&mut self) -> Option<()> {
        self.eat("\"");
        loop {
            let stop = self.rest().find(['"', '\\'])?;
            self.at += stop;
            if self.eat("\"") {
                return Some(());
            }
            self.at += 1;
            self.at += self.rest().chars().next()?.len_utf8();
        }
    }

    fn character(&mut self) -> Option<()> {
        self.eat("'");
        self.at += if self.eat("\\") { 1 } else { self.rest().chars().next()?.len_utf8() };
        self.past("'")
    }

    /// Reads the values between two brackets; the keys of a map are values, too.
    fn items(&mut self, open: &str, close: &str) -> Option<Vec<Node>> {
        self.eat(open);
        let mut items = Vec::new();
        loop {
            self.skip();
            if self.eat(close) {
                return Some(items);
            }
            items.push(self.value()?);
            self.skip();
            let _ = self.eat(",") || self.eat(":");
        }
    }

    /// Reads a word, or a name with its fields.
    fn word_value(&mut self) -> Option<NodeKind> {
        let word = self.word()?.to_string();
        let end = self.at;
        self.skip();
        if self.rest().starts_with('(') {
            return self.group(Some(word));
        }
        self.at = end;
        Some(NodeKind::Word(word))
    }

    /// Reads a literal: `"..."`, `r"..."`, `r#"..."#`, `b"..."`, `br"..."`, `'.'`, `b'.'`.
    fn literal(&mut self) -> Option<NodeKind> {
        let rest = self.rest();
        let (prefix, rest) = rest.split_at(rest.find(|c| !"br#".contains(c))?);
        let is_text = rest.starts_with('"');
        if !is_text && !rest.starts_with('\'') {
            return None;
        }
        self.at += prefix.len();
        if prefix.contains('r') {
            self.eat("\"");
            self.past(&format!("\"{}", prefix.trim_start_matches(['b', 'r'])))?;
        } else if is_text {
            self.string()?;
        } else {
            self.character()?;
        }
        Some(match is_text {
            _ if prefix.starts_with('b') => NodeKind::Other("a byte string"),
            true => NodeKind::Text,
            false => NodeKind::Other("a character"),
        })
    }

    /// Reads up to the next separator; drops `r#` before a name.
    fn word(&mut self) -> Option<&'a str> {
        self.eat("r#");
        let rest = self.rest();
        let stop = rest.find(|c| is_space(c) || "()[]{},:\"'/".contains(c)).unwrap_or(rest.len());
        self.at += stop;
        rest.get(..stop).filter(|word| !word.is_empty())
    }

    fn group(&mut self, name: Option<String>) -> Option<NodeKind> {
        self.eat("(");
        self.skip();
        let inside = self.at;
        let named = self.rest().starts_with(')') || self.key().is_some();
        self.at = inside;
        if !named {
            return Some(NodeKind::Tuple { name, items: self.items("", ")")? });
        }
        let mut fields = Vec::new();
        while !self.eat(")") {
            let (key, key_place) = self.key()?;
            fields.push(Field { key, key_place, value: self.value()? });
            self.skip();
            self.eat(",");
            self.skip();
        }
        Some(NodeKind::Struct { name, fields })
    }

    /// Reads `key:`, and returns the key with its place.
    fn key(&mut self) -> Option<(String, Span)> {
        let start = self.at;
        let word = self.word()?;
        let place = self.place(start);
        self.skip();
        self.eat(":").then(|| (word.to_string(), place))
    }
}

/// Whether RON counts `c` as whitespace.
fn is_space(c: char) -> bool {
    matches!(c, ' ' | '\n' | '\t' | '\r' | '\x0B' | '\x0C' | '\u{85}')
        || matches!(c, '\u{200E}' | '\u{200F}' | '\u{2028}' | '\u{2029}')
}
