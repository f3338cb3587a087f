//! Draws the next token, and finds the end of a text.

/// Settings of sampling.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Maximum number of tokens to draw for each prompt.
    pub tokens: usize,
    /// Divisor of the logits; with 0, the likeliest token is always drawn.
    pub temperature: f64,
    /// Number of the likeliest tokens to draw from; `None` for all.
    pub top_k: Option<usize>,
    /// Draws from the likeliest tokens whose probabilities together reach this value; with 1, from
    /// all tokens (nucleus sampling, arXiv 1904.09751).
    pub top_p: f64,
    /// Seed; the same seed draws the same text.
    pub seed: u64,
    /// Tokens and texts that end a text earlier.
    pub stop: StopCondition,
    /// Whether the output begins with the prompt, and not with the first token after the prompt.
    pub echo: bool,
    /// Whether prompts get the special tokens that the tokenizer puts around a text.
    pub special: bool,
}

/// Tokens and texts that end a text. They are not part of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopCondition {
    /// Stop tokens.
    pub tokens: Vec<i32>,
    /// Stop texts as bytes; a stop text may span several tokens.
    pub texts: Vec<Vec<u8>>,
}

impl StopCondition {
    pub(super) fn tail(&self) -> Tail {
        Tail { stops: self.texts.clone(), held: Vec::new() }
    }
}

/// The end of a text, held back while it may be the beginning of a stop text.
pub(super) struct Tail {
    stops: Vec<Vec<u8>>,
    held: Vec<u8>,
}

impl Tail {
    /// Adds `piece`. Returns the bytes that are certainly part of the text, and whether the text
    /// stops after them.
    pub(super) fn push(&mut self, piece: &[u8]) -> (Vec<u8>, bool) {
        self.held.extend_from_slice(piece);
        let found = |stop: &Vec<u8>| self.held.windows(stop.len()).position(|at| at == &stop[..]);
        if let Some(at) = self.stops.iter().filter_map(found).min() {
            self.held.truncate(at);
            return (std::mem::take(&mut self.held), true);
        }
        let may_begin =
            |at: &usize| self.stops.iter().any(|stop| stop.starts_with(&self.held[*at..]));
        let known = (0..self.held.len()).find(may_begin).unwrap_or(self.held.len());
        (self.held.drain(..known).collect(), false)
    }

    /// Returns the bytes that are held back at the end of the text.
    pub(super) fn rest(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.held)
    }
}

/// Draws a token with the probabilities softmax(logits / temperature) over the tokens that
/// `sampling` allows: the first token whose cumulative probability exceeds `uniform` (in [0, 1)).
pub(super) fn draw(logits: &[f64], sampling: &Sampling, uniform: f64) -> i32 {
    let by_rank = |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b));
    let likeliest = (0..logits.len()).min_by(by_rank);
    let likeliest =
        likeliest.unwrap_or_else(|| unreachable!("a vocabulary has two tokens or more"));
    let Sampling { temperature, top_k, top_p, .. } = *sampling;
    if temperature <= 0.0 {
        return likeliest as i32;
    }
    let top = logits[likeliest];
    let weight = |token: &usize| ((logits[*token] - top) / temperature).exp();
    let mut tokens: Vec<usize> = (0..logits.len()).collect();
    if let Some(k) = top_k.filter(|k| *k < tokens.len()) {
        tokens.select_nth_unstable_by(k, by_rank);
        tokens.truncate(k);
    }
    if top_p < 1.0 {
        tokens.sort_unstable_by(by_rank);
        let mut left = top_p * tokens.iter().map(weight).sum::<f64>();
        let is_enough = |token: &usize| {
            left -= weight(token);
            left <= 0.0
        };
        let last = tokens.iter().position(is_enough).unwrap_or(tokens.len() - 1);
        tokens.truncate(last + 1);
    }
    // In the order of the vocabulary, so that a draw changes as little as possible if other tokens
    // are excluded.
    tokens.sort_unstable();
    let mut left = uniform * tokens.iter().map(weight).sum::<f64>();
    for token in tokens {
        left -= weight(&token);
        if left < 0.0 {
            return token as i32;
        }
    }
    likeliest as i32
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Sampling = Sampling {
        tokens: 1,
        temperature: 1.0,
        top_k: None,
        top_p: 1.0,
        seed: 0,
        stop: StopCondition { tokens: Vec::new(), texts: Vec::new() },
        echo: false,
        special: false,
    };

    #[test]
    fn draws_follow_the_probabilities() {
        let logits = [0.0, (3.0f64).ln(), f64::NEG_INFINITY];
        assert_eq!(draw(&logits, &ALL, 0.0), 0);
        assert_eq!(draw(&logits, &ALL, 0.24), 0);
        assert_eq!(draw(&logits, &ALL, 0.26), 1);
        assert_eq!(draw(&logits, &ALL, 0.999_999), 1);
        assert_eq!(draw(&logits, &Sampling { temperature: 0.5, ..ALL }, 0.11), 1); // 1 : 9
        assert_eq!(draw(&logits, &Sampling { temperature: 0.0, ..ALL }, 0.0), 1);
    }

    #[test]
    fn only_the_likeliest_are_drawn() {
        // 1 : 4 : 2 : 3
        let logits = [1.0f64, 4.0, 2.0, 3.0].map(f64::ln);
        let drawn = |sampling: &Sampling| -> Vec<i32> {
            let mut all: Vec<i32> =
                (0..100).map(|i| draw(&logits, sampling, f64::from(i) / 100.0)).collect();
            all.dedup();
            all
        };
        assert_eq!(drawn(&ALL), [0, 1, 2, 3]);
        assert_eq!(drawn(&Sampling { top_k: Some(2), ..ALL.clone() }), [1, 3]);
        assert_eq!(drawn(&Sampling { top_k: Some(9), ..ALL.clone() }), [0, 1, 2, 3]);
        // The first two have 0.7 together: 0.71 needs the third.
        assert_eq!(drawn(&Sampling { top_p: 0.69, ..ALL.clone() }), [1, 3]);
        assert_eq!(drawn(&Sampling { top_p: 0.71, ..ALL.clone() }), [1, 2, 3]);
        assert_eq!(drawn(&Sampling { top_p: 1e-9, ..ALL.clone() }), [1]);
        // The two likeliest weigh 4 and 3: half of their sum is less than the first weight.
        assert_eq!(drawn(&Sampling { top_k: Some(2), top_p: 0.5, ..ALL.clone() }), [1]);
    }

    #[test]
    fn a_text_stops_where_it_is_told_to_and_keeps_what_only_began_like_that() {
        let stop =
            StopCondition { tokens: Vec::new(), texts: vec![b"END".to_vec(), b"\n\n".to_vec()] };
        let mut tail = stop.tail();
        assert_eq!(tail.push(b"the E"), (b"the ".to_vec(), false));
        assert_eq!(tail.push(b"N"), (Vec::new(), false));
        assert_eq!(tail.push(b"E"), (b"EN".to_vec(), false));
        assert_eq!(tail.push(b"ND of"), (Vec::new(), true));
        let mut tail = stop.tail();
        assert_eq!(tail.push(b"a\n"), (b"a".to_vec(), false));
        assert_eq!(tail.rest(), b"\n");
        let mut tail = StopCondition::default().tail();
        assert_eq!(tail.push(b"any"), (b"any".to_vec(), false));
    }
}
