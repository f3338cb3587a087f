//! Kinds of layers as letters.

use super::reading::{Complaint, Declaration, KeyDefault, Section, quoted};

/// Letter of layers with full attention.
pub const FULL: char = 'F';
/// Letter of layers with attention within a window.
pub const WINDOWED: char = 'W';
/// Letter of layers with full attention and without rotary positions.
pub const UNROTATED: char = 'N';
/// Letter of layers with a gated delta net in the place of attention.
pub const DELTA: char = 'D';

impl Section<'_, '_> {
    /// Reads the letters of `layers` layers, and makes them as short as possible.
    pub(crate) fn layer_pattern(
        &mut self,
        key: Declaration,
        layers: usize,
        or: KeyDefault<String>,
    ) -> String {
        let values = "letters `F`, `W`, `N` and `D` in quotes".to_owned();
        self.leaf(
            key,
            or,
            values,
            |text| quoted(text),
            |reader, node| {
                let text = reader.item(node).string()?;
                let is_letter = |letter| [FULL, WINDOWED, UNROTATED, DELTA].contains(&letter);
                if text.is_empty() || !text.chars().all(is_letter) {
                    return Err(Complaint {
                        message: format!(
                            "expected the letters `F`, `W`, `N` and `D`, found {}",
                            reader.item(node).found()
                        ),
                        help: "write one letter for each layer, such as \"WWWWWF\", which repeats"
                            .into(),
                    });
                }
                // A bad number of layers is already reported.
                if layers == 0 {
                    return Ok(text);
                }
                if text.len() > layers {
                    return Err(Complaint {
                        message: format!(
                            "it has {} letters, and `model.layers` is {layers}",
                            text.len()
                        ),
                        help: format!("write at most {layers} letters: they repeat"),
                    });
                }
                Ok(shortest(&text.chars().cycle().take(layers).collect::<Vec<_>>()))
            },
        )
    }
}

/// The shortest pattern that repeats to these letters.
pub(crate) fn shortest(letters: &[char]) -> String {
    let repeats = |period: &usize| letters[*period..] == letters[..letters.len() - period];
    // Every list repeats after its own length.
    let period = (1..letters.len()).find(repeats).unwrap_or(letters.len());
    letters[..period].iter().collect()
}

#[cfg(test)]
mod tests {
    use super::super::tests::{LEAST, config, loaded};
    use super::*;

    #[test]
    fn a_pattern_is_as_short_as_possible() {
        let of = |text: &str| shortest(&text.chars().collect::<Vec<_>>());
        for (letters, pattern) in [
            ("F", "F"),
            ("FFFF", "F"),
            ("WFWFW", "WF"),
            ("WWWWWFWWWWWFWW", "WWWWWF"),
            ("WWWF", "WWWF"),
            ("FWWW", "FWWW"),
            ("FNFW", "FNFW"),
        ] {
            assert_eq!(of(letters), pattern);
        }
    }

    #[test]
    fn letters_of_a_config_repeat_over_the_layers() {
        for (written, pattern) in [("W", "W"), ("WFWFWFW", "WF"), ("WWF", "WWF"), ("NNNW", "NNNW")]
        {
            let set = format!("model.layer_pattern={written}");
            let sets = ["model.family=Llama", "model.layers=7", "model.window=4", set.as_str()];
            let model = config(LEAST, &sets).model;
            assert_eq!(model.layer_pattern, pattern);
            let all: String = model.layer_letters().collect();
            assert_eq!(all, written.repeat(7)[..7]);
        }
        for (written, message) in [
            ("WWWWWWWF", "it has 8 letters, and `model.layers` is 7"),
            ("", "expected the letters"),
            ("WX", "expected the letters `F`, `W`, `N` and `D`"),
        ] {
            let set = format!("model.layer_pattern=\"{written}\"");
            let sets = ["model.family=Llama", "model.layers=7", "model.window=4", set.as_str()];
            let why = loaded(LEAST, &sets).unwrap_err().to_string();
            assert!(why.contains(message), "{written}: {why}");
        }
    }

    #[test]
    fn a_window_that_holds_a_whole_sample_is_none() {
        let sets = ["model.family=Llama", "model.layer_pattern=\"WF\"", "model.window=8"];
        let model = config(LEAST, &sets).model;
        assert_eq!((model.window, model.layer_pattern.as_str()), (Some(8), "WF"));
        assert_eq!(model.for_samples(9).layer_pattern, "WF");
        let short = model.for_samples(8);
        assert_eq!((short.window, short.layer_pattern.as_str(), short.seq_len), (None, "F", 8));
        // Layers with other rotary positions stay layers of another kind.
        let sets = [&sets[..], &["model.window_rope.theta=7.0"]].concat();
        let model = config(LEAST, &sets).model.for_samples(4);
        assert_eq!((model.window, model.layer_pattern.as_str()), (Some(8), "WF"));
    }
}
