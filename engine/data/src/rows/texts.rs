//! Texts of rows that no template writes: a field, or a prompt with its completion. A template may
//! have rendered these texts before.

use super::super::cores;
use super::super::document::Document;
use super::super::ignored_keys::IgnoredKeys;
use super::super::tokenizer::TokenSpans;
use super::forms::{Form, form};
use super::{RowContent, Rows, document};
use config::ControlTokens;
use files::json::{Json, Map};
use std::ops::Range;

impl Rows<'_> {
    /// The texts of a row that no template writes, as they stand in the row.
    fn plain_texts(&self, row: Map) -> Vec<String> {
        match &self.kind {
            RowContent::Text(field) => match row.get(field) {
                Some(Json::String(text)) => vec![text.clone()],
                _ => Vec::new(),
            },
            RowContent::Chat(with) => match form(with, row, &mut IgnoredKeys::default()) {
                Ok(Form::Texts { prompt, completion }) => vec![prompt, completion],
                _ => Vec::new(),
            },
        }
    }

    /// Number of rows with a control token's text outside of a template; 0 if onebox parses it.
    pub(crate) fn count_rendered(&self, rows: &[Result<&str, &str>]) -> usize {
        if self.in_texts == ControlTokens::Parsed {
            return 0;
        }
        // If a template writes chats, only a `completion` stays as it is.
        let needs_completion = match &self.kind {
            RowContent::Chat(with) => with.reader.is_some() && with.columns.is_empty(),
            RowContent::Text(_) => false,
        };
        let is_rendered = |i: usize| {
            let Ok(text) = rows[i] else { return false };
            if needs_completion && !text.contains("\"completion\"") {
                return false;
            }
            // A letter may be escaped in JSON.
            if self.control.find(text, 0).is_none() && !text.contains("\\u") {
                return false;
            }
            let Ok(Json::Object(row)) = Json::read(text) else { return false };
            self.plain_texts(row).iter().any(|text| self.control.find(text, 0).is_some())
        };
        cores::map(rows.len(), is_rendered).into_iter().filter(|rendered| *rendered).count()
    }

    /// Tokens of a text with parsed control tokens, and whether a control token ends the text.
    /// Tokens that the tokenizer adds around a text appear once, also if the text contains them.
    pub(super) fn parsed(
        &self,
        text: &str,
        counted: Range<usize>,
    ) -> Result<(Document, bool), String> {
        let TokenSpans { mut front, text: tokens, mut back } =
            self.tokenizer.encode_around(text)?;
        let has = |other: &[u32], at: usize| {
            let there = tokens.iter().skip(at).map(|(token, _)| token);
            !other.is_empty() && there.take(other.len()).eq(other)
        };
        if has(&front, 0) {
            front.clear();
        }
        if tokens.len() >= back.len() && has(&back, tokens.len() - back.len()) {
            back.clear();
        }
        let is_blank = |place: &Range<usize>| text.get(place.clone()).is_some_and(is_blank);
        let last = tokens.iter().rev().find(|(_, place)| !is_blank(place));
        let ends = last.is_some_and(|(token, _)| self.tokenizer.is_control(*token));
        let around = |tokens: Vec<u32>, at: usize| tokens.into_iter().map(move |t| (t, at..at));
        let all = around(front, 0).chain(tokens).chain(around(back, text.len()));
        Ok((document(all.collect(), &[counted]), ends))
    }
}

fn is_blank(text: &str) -> bool {
    !text.is_empty() && text.trim().is_empty()
}
