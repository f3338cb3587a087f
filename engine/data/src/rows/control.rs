//! Texts of control tokens, and their ranges in a text.

use super::{CUT, LETTERS};
use std::iter::successors;
use std::ops::Range;

/// Finds control tokens in a text in one pass.
#[derive(Debug)]
pub(super) struct Control {
    /// Texts of the control tokens, the longest first.
    texts: Vec<String>,
    /// Whether the text of a control token begins with this byte.
    begins: [bool; 256],
    /// Control tokens of one character, too short for a cut; [`LETTERS`] stand for them.
    letters: Vec<char>,
}

impl Control {
    pub(super) fn new(mut texts: Vec<String>) -> Self {
        texts.sort_by_key(|text| std::cmp::Reverse(text.len()));
        let mut begins = [false; 256];
        for first in texts.iter().filter_map(|text| text.bytes().next()) {
            begins[usize::from(first)] = true;
        }
        let letter = |text: &String| {
            let mut all = text.chars();
            all.next().filter(|_| all.next().is_none())
        };
        let letters = texts.iter().filter_map(letter).collect();
        Self { texts, begins, letters }
    }

    /// Refuses more control tokens of one character than there are [`LETTERS`].
    pub(super) fn check(&self) -> Result<(), String> {
        let (many, most) = (self.letters.len(), LETTERS.count());
        match many > most {
            true => Err(format!(
                "the tokenizer has {many} special tokens of one character, and onebox tells at most {most} from text: remove some from it"
            )),
            false => Ok(()),
        }
    }

    /// Control token of one character for which `c` stands; otherwise `c`.
    pub(super) fn letter(&self, c: char) -> char {
        let number = LETTERS.clone().position(|other| other == c);
        number.and_then(|number| self.letters.get(number)).copied().unwrap_or(c)
    }

    /// Range of the first control token at or after byte `from`.
    pub(super) fn find(&self, text: &str, from: usize) -> Option<Range<usize>> {
        let bytes = text.as_bytes();
        let mut places = (from..bytes.len()).filter(|at| self.begins[usize::from(bytes[*at])]);
        places.find_map(|at| {
            let found = self.texts.iter().find(|one| bytes[at..].starts_with(one.as_bytes()))?;
            Some(at..at + found.len())
        })
    }

    /// Range of the last control token.
    pub(super) fn last(&self, text: &str) -> Option<Range<usize>> {
        successors(self.find(text, 0), |found| self.find(text, found.end)).last()
    }

    /// Text with a [`CUT`] after the first character of each control token, also if two overlap. If
    /// this character is a control token itself, one of [`LETTERS`] replaces it.
    pub(super) fn cut(&self, text: &str) -> Option<String> {
        let (mut out, mut at) = (String::new(), 0);
        while let Some(found) = self.find(text, at) {
            out.push_str(&text[at..found.start]);
            let Some(first) = text[found.clone()].chars().next() else {
                unreachable!("no token is empty")
            };
            match self.letters.iter().position(|letter| *letter == first) {
                Some(number) => out.extend(LETTERS.clone().nth(number)),
                None => out.extend([first, CUT]),
            }
            at = found.start + first.len_utf8();
        }
        (at > 0).then(|| out + &text[at..])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_character_stands_for_a_token_of_one_letter() {
        let control = Control::new(["¤", "¤a", "<a>", "é"].map(String::from).into());
        let cut = control.cut("x¤¤a<a>é").unwrap();
        assert_eq!(control.find(&cut, 0), None);
        let back: String = cut.chars().filter(|c| *c != CUT).map(|c| control.letter(c)).collect();
        assert_eq!(back, "x¤¤a<a>é");
        assert!(control.check().is_ok());
        let many = Control::new(('a'..='z').chain('A'..='B').map(String::from).collect());
        let why = many.check().unwrap_err();
        assert!(why.contains("28 special tokens of one character") && why.contains("27"), "{why}");
    }

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
