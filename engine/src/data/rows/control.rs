//! The texts of control tokens, and where one stands in a text.

use super::CUT;
use std::ops::Range;

/// Finds all of them in one pass.
#[derive(Debug)]
pub(super) struct Control {
    /// The longer ones first.
    texts: Vec<String>,
    /// By byte: whether one begins with it.
    begins: [bool; 256],
}

impl Control {
    pub(super) fn new(mut texts: Vec<String>) -> Self {
        texts.sort_by_key(|text| std::cmp::Reverse(text.len()));
        let mut begins = [false; 256];
        for text in &texts {
            if let Some(first) = text.bytes().next() {
                begins[usize::from(first)] = true;
            }
        }
        Self { texts, begins }
    }

    /// The first one behind `from`.
    pub(super) fn find(&self, text: &str, from: usize) -> Option<Range<usize>> {
        let bytes = text.as_bytes();
        let mut places = (from..bytes.len()).filter(|at| self.begins[usize::from(bytes[*at])]);
        places.find_map(|at| {
            let found = self.texts.iter().find(|one| bytes[at..].starts_with(one.as_bytes()))?;
            Some(at..at + found.len())
        })
    }

    /// The text with a cut behind the first letter of each, also where two of them overlap.
    pub(super) fn cut(&self, text: &str) -> Option<String> {
        let mut found = self.find(text, 0)?;
        let (mut out, mut at) = (String::with_capacity(text.len() + 64), 0);
        loop {
            let first = text[found.start..].chars().next().map_or(1, char::len_utf8);
            out.push_str(&text[at..found.start + first]);
            out.push(CUT);
            at = found.start + first;
            match self.find(text, at) {
                Some(next) => found = next,
                None => return Some(out + &text[at..]),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_control_token_is_found_and_cut() {
        let control = Control::new(["<a>", "<a><b>", "[x]", "漢字", "]<"].map(String::from).into());
        assert_eq!(control.find("< <a><b>", 0), Some(2..8));
        assert_eq!(control.find("< <a><b>", 3), None);
        assert_eq!(control.cut("a < b [ é"), None);
        let cut = |text: &str| control.cut(text).map(|text| text.replace(CUT, "|"));
        assert_eq!(cut("<<a>>").unwrap(), "<<|a>>");
        assert_eq!(cut("[x]<a>漢字!").unwrap(), "[|x]|<|a>漢|字!");
        for text in ["<<a>>", "[x]<a>漢字!", "<a><a><b>[x][x]"] {
            assert_eq!(control.find(&control.cut(text).unwrap(), 0), None, "{text}");
            assert_eq!(cut(text).unwrap().replace('|', ""), text);
        }
    }
}
