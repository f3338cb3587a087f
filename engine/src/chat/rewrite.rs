//! A template of Jinja as the library reads it: the literals have the characters that Python reads, and `{% generation %}` is a
//! block that the library knows.

use super::FILTER;
use super::source::{Piece, Tag, Token, pieces, quoted};
use super::turns::Loops;

/// A template for the library.
#[derive(Debug)]
pub(super) struct Rewritten {
    pub(super) text: String,
    /// Whether it has blocks `{% generation %}`.
    pub(super) marks: bool,
}

/// # Errors
/// What Jinja cannot read, with the line.
pub(super) fn rewritten(source: &str) -> Result<Rewritten, String> {
    let (mut text, mut marks) = (String::with_capacity(source.len()), false);
    let mut loops = Loops::default();
    for piece in pieces(source)? {
        match piece {
            Piece::Verbatim(part) => text.push_str(part),
            Piece::Tag(mut tag) => {
                let words = words(&tag);
                marks |= tag.keyword() == Some("generation");
                let Some(note) = loops.note(&tag) else {
                    text.push_str(&tag.with(&words));
                    continue;
                };
                // What happens to blanks behind the tag happens behind the note.
                let right = std::mem::take(&mut tag.right);
                text.push_str(&tag.with(&words));
                text.push_str(&format!("{{% filter {note} %}}{{% endfilter {right}%}}"));
            }
        }
    }
    Ok(Rewritten { text, marks })
}

/// The words of a tag. `{% generation %}` marks what an assistant says, for masks; as a filter it is a block, too.
fn words(tag: &Tag<'_>) -> String {
    match tag.keyword() {
        Some("generation") if tag.tokens.len() == 1 => format!("filter {FILTER}"),
        Some("endgeneration") if tag.tokens.len() == 1 => "endfilter".into(),
        _ => {
            let mut words = String::new();
            for placed in &tag.tokens {
                if !placed.blanks.is_empty() {
                    words.push(' ');
                }
                match &placed.token {
                    Token::Text(text) => words.push_str(&quoted(text)),
                    Token::Name(word) | Token::Integer(word) | Token::Float(word) => {
                        words.push_str(word);
                    }
                    Token::Operator(word) => words.push_str(word),
                }
            }
            words
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As Jinja has it: a tag in a comment, in a raw block or in a string is none.
    #[test]
    fn only_a_block_marks_what_an_assistant_says() {
        for (source, marks) in [
            ("{# {% generation %} #}{{ 'a' }}", false),
            ("{% raw %}{% generation %}a{% endgeneration %}{% endraw %}", false),
            ("{{ '{% generation %}' }}", false),
            ("{%- generation -%} a {%- endgeneration %}", true),
            ("{%+generation%}a{%endgeneration+%}", true),
        ] {
            let rewritten = rewritten(source).unwrap();
            assert_eq!(rewritten.marks, marks, "{source}");
            assert_eq!(rewritten.text.contains("filter generation"), marks, "{source}");
        }
    }
}
