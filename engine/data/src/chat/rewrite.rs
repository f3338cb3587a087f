//! Rewrites a Jinja template for minijinja: literals have Python's characters, operators are
//! Python's, and `{% generation %}` becomes a block that minijinja knows.

use super::expression::Words;
use super::marks::FILTER;
use super::source::{Piece, Tag, TagKind, Token, pieces};
use super::turns::Loops;

/// Maximum bytes of a template; the longest public templates have about 20 KiB.
const LONGEST: usize = 256 << 10;
/// Maximum nested blocks; each `elif` counts as a block.
const DEEPEST: usize = 100;

/// Template in the syntax of minijinja.
#[derive(Debug)]
pub(super) struct RewrittenTemplate {
    pub(super) text: String,
    /// Whether the template has `{% generation %}` blocks.
    pub(super) marks: bool,
}

/// Rewrites a template for minijinja.
///
/// # Errors
/// Text that Jinja cannot read or onebox does not know, with the line.
pub(super) fn rewritten(source: &str) -> Result<RewrittenTemplate, String> {
    if source.len() > LONGEST {
        return Err(format!("it has {} bytes, and at most {LONGEST} are read", source.len()));
    }
    let (mut text, mut marks) = (String::with_capacity(2 * source.len()), false);
    // Nested blocks of minijinja for each open block: an `elif` is an `if` in an `else`.
    let mut open: Vec<usize> = Vec::new();
    let mut loops = Loops::default();
    for piece in pieces(source)? {
        let mut tag = match piece {
            Piece::Verbatim(part) => {
                text.push_str(part);
                continue;
            }
            Piece::Tag(tag) => tag,
        };
        let wrong = |why: String| format!("line {}: {why}", tag.line);
        let words = words(&tag).map_err(wrong)?;
        match tag.keyword() {
            Some("elif") => open.last_mut().into_iter().for_each(|blocks| *blocks += 1),
            Some(keyword) if keyword.starts_with("end") => {
                open.pop();
            }
            Some("for" | "if" | "set" | "macro" | "call" | "filter" | "with" | "generation")
                if tag.is_open() =>
            {
                open.push(1);
            }
            _ => {}
        }
        if open.iter().sum::<usize>() > DEEPEST {
            return Err(wrong(format!("more than {DEEPEST} blocks stand in each other")));
        }
        marks |= tag.keyword() == Some("generation");
        let Some(note) = loops.note(&tag) else {
            text.push_str(&tag.with(&words));
            continue;
        };
        // The rule for the blanks after the tag moves to the note.
        let right = std::mem::take(&mut tag.right);
        text.push_str(&tag.with(&words));
        text.push_str(&format!("{{% filter {note} %}}{{% endfilter {right}%}}"));
    }
    Ok(RewrittenTemplate { text, marks })
}

/// Rewritten words of a tag.
fn words(tag: &Tag<'_>) -> Result<String, String> {
    let mut words = Words::of(&tag.tokens);
    let written = match (tag.kind, &tag.tokens[..]) {
        (TagKind::Print, _) => words.tuple(true)?.text,
        (TagKind::Block, [Token::Name(keyword), ..]) => {
            words.take();
            block(keyword, &mut words)?
        }
        _ => return Err(format!("{} stands where the name of a block should", words.shown())),
    };
    words.end()?;
    Ok(written)
}

fn block(keyword: &str, words: &mut Words<'_, '_>) -> Result<String, String> {
    Ok(match keyword {
        "if" | "elif" => format!("{keyword} {}", words.tuple(false)?.text),
        "for" => for_block(words)?,
        "set" => set_block(words)?,
        "with" => {
            let mut pairs = Vec::new();
            while words.next().is_some() {
                if !pairs.is_empty() {
                    words.expect(",")?;
                }
                let name = words.name()?;
                words.expect("=")?;
                pairs.push(format!("{name}={}", words.expression()?.text));
            }
            format!("with {}", pairs.join(", "))
        }
        "macro" => {
            let name = words.name()?;
            format!("macro {name}{}", signature(words)?)
        }
        "call" => {
            let caller = if words.is_operator("(") { signature(words)? } else { String::new() };
            format!("call{caller} {}", words.expression()?.text)
        }
        "filter" => format!("filter {}", filters(words)?),
        // A filter block marks the assistant's text for masks, with the same rules for blanks.
        "generation" => format!("filter {FILTER}"),
        "endgeneration" => "endfilter".into(),
        "else" | "endif" | "endfor" | "endset" | "endmacro" | "endcall" | "endfilter"
        | "endwith" | "break" | "continue" => {
            // Jinja ignores a name after the end of a macro.
            if matches!(keyword, "endmacro" | "endcall") && words.next().is_some() {
                words.name()?;
            }
            keyword.to_owned()
        }
        other => {
            return Err(format!(
                "a block `{other:.60}`, which onebox does not know in a chat template"
            ));
        }
    })
}

/// Names with commas and brackets, and whether a name is an attribute.
fn targets(
    words: &mut Words<'_, '_>,
    until: impl Fn(&Token<'_>) -> bool,
) -> Result<(String, bool), String> {
    let (mut written, mut attribute) = (String::new(), false);
    while let Some(next) = words.next().filter(|next| !until(next)) {
        if let Token::Operator(bracket @ ("(" | ")" | ",")) = next {
            words.take();
            written.push_str(bracket);
            continue;
        }
        if words.skip(".") {
            attribute = true;
            written.push('.');
        }
        written.push_str(words.name()?);
    }
    match written.is_empty() {
        true => Err(format!("{} stands where a name should", words.shown())),
        false => Ok((written, attribute)),
    }
}

fn for_block(words: &mut Words<'_, '_>) -> Result<String, String> {
    let (names, attribute) = targets(words, |next| *next == Token::Name("in"))?;
    if attribute {
        return Err(format!("a loop over `{names:.60}`, which is no name"));
    }
    if !words.skip_name("in") {
        return Err("`in` is missing in a loop".into());
    }
    let over = words.tuple(false)?.text;
    let only = match words.skip_name("if") {
        true => format!(" if {}", words.expression()?.text),
        false => String::new(),
    };
    let recursive = if words.skip_name("recursive") { " recursive" } else { "" };
    Ok(format!("for {names} in __iterated({over}){only}{recursive}"))
}

fn set_block(words: &mut Words<'_, '_>) -> Result<String, String> {
    let (names, attribute) = targets(words, |next| matches!(next, Token::Operator("=" | "|")))?;
    if attribute && names.contains(',') {
        return Err(format!(
            "`{names:.60}` is set at once, which onebox does not know: set each alone"
        ));
    }
    if words.skip("=") {
        let value = words.tuple(true)?.text;
        return Ok(match attribute {
            true => format!("set {names} = __held({value})"),
            false => format!("set {names} = {value}"),
        });
    }
    match words.skip("|") {
        true => Ok(format!("set {names} | {}", filters(words)?)),
        false => Ok(format!("set {names}")),
    }
}

/// Filters with `|` between them.
fn filters(words: &mut Words<'_, '_>) -> Result<String, String> {
    let mut written = words.filter()?.text;
    while words.skip("|") {
        written.push_str(" | ");
        written.push_str(&words.filter()?.text);
    }
    Ok(written)
}

/// The parameters of a macro.
fn signature(words: &mut Words<'_, '_>) -> Result<String, String> {
    words.expect("(")?;
    let parameters: Vec<String> = words.listed(")", |words, parameters| {
        let name = words.name()?;
        parameters.push(match words.skip("=") {
            true => format!("{name}={}", words.expression()?.text),
            false => name.to_owned(),
        });
        Ok(())
    })?;
    Ok(format!("({})", parameters.join(", ")))
}
#[cfg(test)]
mod tests {
    use super::*;

    /// As in Jinja, a tag in a comment, in a raw block or in a string is no tag.
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
