//! Colours of text on a terminal. They only repeat the meaning of the words.

use anstream::{AutoStream, ColorChoice, stream::RawStream};
use clap::builder::styling::{AnsiColor, Style};
use std::ops::Range;

/// Whether a stream is a terminal that shows colours, and NO_COLOR does not forbid them. A dumb
/// terminal shows no colours, even if CI is set, for which anstream assumes colours.
pub(crate) fn wanted(stream: &impl RawStream) -> bool {
    let dumb = std::env::var_os("TERM").is_some_and(|terminal| terminal == "dumb");
    !dumb && AutoStream::choice(stream) != ColorChoice::Never
}

/// Text for a stream, with colours if the stream shows them.
pub(crate) fn on(stream: &impl RawStream, text: &str) -> String {
    if wanted(stream) { painted(text) } else { text.to_owned() }
}

const GOOD: Style = AnsiColor::Green.on_default();
const DOUBTFUL: Style = AnsiColor::Yellow.on_default().bold();
const BAD: Style = AnsiColor::Red.on_default().bold();

/// Verdicts at the start of a line, with the text that must follow and the colour.
const STARTS: [(&str, &str, Style); 9] = [
    ("error:", " ", BAD),
    ("error", " [", BAD),
    ("warning:", " ", DOUBTFUL),
    ("warning", " [", DOUBTFUL),
    ("ok", "    ", GOOD),
    ("warn", "  ", DOUBTFUL),
    ("fail", "  ", BAD),
    ("it does not fit", "", BAD),
    ("GPU memory was not checked", ":", DOUBTFUL),
];

/// Verdicts at the end of a line, with the text that must precede and the colour.
const ENDS: [(&str, &str, Style); 2] = [("it fits", "", GOOD), ("whole", ": ", GOOD)];

fn painted(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for line in text.split_inclusive('\n') {
        match verdict(line) {
            None => out += line,
            Some((words, style)) => {
                let Range { start, end } = words;
                let (before, words, after) = (&line[..start], &line[start..end], &line[end..]);
                out += &format!("{before}{style}{words}{style:#}{after}");
            }
        }
    }
    out
}

/// Range and colour of the verdict in a line.
fn verdict(line: &str) -> Option<(Range<usize>, Style)> {
    let starts = STARTS.iter().find_map(|(words, then, style)| {
        let begins = line.strip_prefix(words)?.starts_with(then);
        begins.then_some((0..words.len(), *style))
    });
    let ends = || {
        let end = line.trim_end_matches('\n');
        ENDS.iter().find_map(|(words, first, style)| {
            let before = end.strip_suffix(words)?;
            // A sentence that ends with the same words is no verdict.
            let alone = if first.is_empty() { before.is_empty() } else { before.ends_with(first) };
            alone.then_some((before.len()..end.len(), *style))
        })
    };
    let within = || {
        let words = ["NOT SAVED", "DIFFERS"].into_iter().find(|words| line.contains(words))?;
        let at = line.find(words)?;
        Some((at..at + words.len(), BAD))
    };
    starts.or_else(ends).or_else(within)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts_are_painted_and_sentences_are_not() {
        for (line, words) in [
            ("error: no such file", Some("error:")),
            ("warning [memlock]: few", Some("warning")),
            ("fail  driver        none", Some("fail")),
            ("ok    memlock       unlimited\n", Some("ok")),
            ("it fits\n", Some("it fits")),
            ("it does not fit\n", Some("it does not fit")),
            ("runs/a/step-4: whole\n", Some("whole")),
            ("checkpoint of step 4 NOT SAVED: full", Some("NOT SAVED")),
            ("errors are rare", None),
            ("okay", None),
            ("nobody knows whether it fits\n", None),
            ("no checkpoint is whole\n", None),
        ] {
            assert_eq!(verdict(line).map(|(at, _)| &line[at]), words, "{line}");
            let plain = anstream::adapter::strip_str(&painted(line)).to_string();
            assert_eq!(plain, line);
        }
    }
}
