//! A model that stays open for several prompts, one after the other, as in a conversation.

use super::model::Model;
use super::{
    GenerateError, ModelSource, Piece, Sampling, Text, draw_tokens, known_tokens, tokens_of,
};
use config::Config;
use data::Tokenizer;

/// A model that stays open. It keeps the keys and values of the last text, so that only the tokens
/// after the common beginning of two texts are computed.
pub struct Generator<'a> {
    config: &'a Config,
    tokenizer: Option<&'a Tokenizer>,
    model: Model,
    /// Tokens of the last text. The cache of the model holds a beginning of them.
    last: Vec<i32>,
}

impl std::fmt::Debug for Generator<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Generator").field("tokens", &self.last.len()).finish_non_exhaustive()
    }
}

impl<'a> Generator<'a> {
    /// Opens the model for texts of at most `context` tokens, at most `model.seq_len`.
    ///
    /// # Errors
    /// As for [`generate`](super::generate).
    pub fn open(
        config: &'a Config,
        from: &ModelSource<'a>,
        context: usize,
    ) -> Result<Self, GenerateError> {
        let context = context.clamp(1, config.model.seq_len);
        let model = Model::open(config, from, context, 1)?;
        Ok(Self { config, tokenizer: from.tokenizer, model, last: Vec::new() })
    }

    /// Tokens of a prompt.
    ///
    /// # Errors
    /// The tokenizer refuses the prompt, it has no token, or it has tokens that the model lacks.
    pub fn tokens(&self, prompt: &str) -> Result<Vec<i32>, GenerateError> {
        tokens_of(self.config, self.tokenizer, prompt, false)
    }

    /// Draws tokens after the tokens of a prompt, and gives each piece of output to `emit`. Ends
    /// early if `emit` returns false. Returns the number of tokens that were not computed again.
    ///
    /// # Errors
    /// The device fails, or the logits are not finite.
    pub fn extend(
        &mut self,
        prompt: &[i32],
        sampling: &Sampling,
        emit: &mut dyn FnMut(Piece<'_>) -> bool,
    ) -> Result<usize, GenerateError> {
        let alike = self.last.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        // The logits after the prompt come from its last token.
        let reused = self.model.keep(0, alike.min(prompt.len().saturating_sub(1)));
        self.last.clear();
        let text = Text::after(prompt.to_vec(), self.config, self.tokenizer, sampling);
        let (mut texts, known) = ([text], known_tokens(self.config, self.tokenizer));
        let mut emit = |_: usize, piece: Piece<'_>| emit(piece);
        draw_tokens(&mut self.model, &mut texts, known, sampling, &mut emit)?;
        let [text] = texts;
        self.last = text.tokens;
        Ok(reused)
    }

    /// Tokens of the last text, with its prompt, from token number `from` on.
    pub fn tokens_from(&self, from: usize) -> &[i32] {
        self.last.get(from..).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::model::tests::fixture;
    use crate::generate::{StopCondition, WeightSource};
    use layout::LocalMachine;

    #[test]
    fn a_prompt_is_computed_behind_what_it_has_in_common_with_the_last_text() {
        let (folder, config) = fixture("llama3");
        let machine = LocalMachine::default();
        let from = ModelSource::on_cores(WeightSource::Folder(&folder), None, &machine);
        let sampling = Sampling {
            tokens: 3,
            temperature: 0.0,
            top_k: None,
            top_p: 1.0,
            seed: 0,
            stop: StopCondition::default(),
            echo: false,
            special: false,
        };
        let mut drawn = Vec::new();
        let mut extend = |model: &mut Generator<'_>, prompt: &[i32]| {
            let mut emit = |piece: Piece<'_>| {
                if let Piece::End(_, tokens) = piece {
                    drawn = tokens.to_vec();
                }
                true
            };
            let reused = model.extend(prompt, &sampling, &mut emit).unwrap();
            (reused, drawn.clone())
        };
        let open = || Generator::open(&config, &from, 32).unwrap();
        let mut model = open();
        let first = [7, 3, 9, 11, 2];
        let (reused, answer) = extend(&mut model, &first);
        assert_eq!((reused, answer.len()), (0, 3));
        // The last drawn token was not computed.
        let further = [&first[..], &answer, &[5, 8]].concat();
        let (reused, after) = extend(&mut model, &further);
        assert_eq!((reused, &after), (first.len() + 2, &extend(&mut open(), &further).1));
        let changed = [&first[..3], &[1, 4, 6]].concat();
        let (reused, after) = extend(&mut model, &changed);
        assert_eq!((reused, &after), (3, &extend(&mut open(), &changed).1));
        let (reused, after) = extend(&mut model, &changed);
        assert_eq!((reused, &after), (5, &extend(&mut open(), &changed).1));
        let (reused, _) = extend(&mut model, &[60]);
        assert_eq!(reused, 0);
    }
}
