//! `onebox data check` and `onebox data show`: check data, and show the samples that a model sees.

use super::check::CheckArgs;
use super::data::{self, ReadOptions};
use super::{CommandError, ConfigArgs, Failable, code, print, print_json, say};
use crate::generate::TokenWriter;
use crate::report::colour;
use ::data::{Dataset, Document, Identity, Sample, Tokenizer};
use clap::builder::styling::{AnsiColor, Style};
use layout::LocalMachine;
use serde_json::json;
use topology::counted as counted_noun;

#[derive(Debug, clap::Args)]
pub(super) struct SamplesArgs {
    #[command(flatten)]
    config: ConfigArgs,
    /// Number of the sample in the run, from 0, in the order of training
    #[arg(long, value_name = "N", default_value_t = 0)]
    sample: u64,
    /// One JSON document on stdout: tokens, counted, documents
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
pub(super) struct DataCheckArgs {
    #[command(flatten)]
    check: CheckArgs,
    /// Warn about every row that is left out, not only about the first three
    #[arg(long)]
    all: bool,
}

/// Reads all data, and prints its size and hashes.
pub(super) fn check(args: &DataCheckArgs, machine: &LocalMachine) -> Result<(), CommandError> {
    let DataCheckArgs { check: CheckArgs { config: args, json }, all } = args;
    let loaded = args.load(machine)?;
    let config = &loaded.config;
    let how = ReadOptions { compares: true, names_all: *all, ..ReadOptions::default() };
    let (_, dataset) = data::read_whole(config, how)?;
    let Identity { train, validation } = dataset.identity();
    let (samples, windows) = (dataset.num_train_samples(), dataset.num_eval_windows());
    if let Some(epochs) = config.train.epochs
        && let Some(few) = config.few_steps(samples, config.steps_of(epochs, samples))
    {
        say(&format!("warning: {few}"));
    }
    if *json {
        let (shares, evaluations) = (dataset.shares(1.0), dataset.evaluations());
        return print_json(&json!({
            "ok": true,
            "tokens": dataset.num_tokens(),
            "samples": samples,
            "held_out_samples": windows,
            "train_hash": format!("{train:032x}"),
            "held_out_hash": format!("{validation:032x}"),
            "sets": shares.map(|(name, samples, share)| json!({ "name": name, "samples": samples, "share": share })).collect::<Vec<_>>(),
            "held_out_sets": evaluations.map(|(name, corpus)| json!({ "name": name, "samples": corpus.num_eval_windows() })).collect::<Vec<_>>(),
        }));
    }
    print(&format!(
        "{}: ok: {}\n{}\nxxh3 of the tokens: {train:032x} to train, {validation:032x} for validation\n",
        args.name(),
        dataset.describe(),
        epochs(&dataset, config.batch.global),
    ))
}

/// Text about the steps of an epoch, for each data set.
fn epochs(dataset: &Dataset, global: usize) -> String {
    let samples = dataset.num_train_samples();
    let steps = |samples: usize, share: f64| samples as f64 / (global as f64 * share);
    let all = steps(samples, 1.0);
    let sets: Vec<_> = dataset.shares(1.0).collect();
    if sets.len() == 1 {
        let samples = counted_noun(samples, "sample");
        return format!("an epoch has {samples}, which are {all:.1} steps of {global}");
    }
    let one = |(name, samples, share): (&str, usize, f64)| {
        let steps = steps(samples, share);
        format!(
            "an epoch of {name} has {}, and the run takes them in {steps:.1} steps of {global}",
            counted_noun(samples, "sample")
        )
    };
    let sets: Vec<_> = sets.into_iter().map(one).collect();
    format!(
        "{}\ntrain.epochs: 1 is as many samples as all have together: {samples}, which are {all:.1} steps",
        sets.join("\n")
    )
}

/// Colours of targets, in a text that also has other tokens, and of control tokens.
const COLOURS: [Style; 2] = [AnsiColor::Green.on_default(), Style::new().invert()];
/// Marks of targets and of control tokens, for output without colours.
const MARKS: [[&str; 2]; 2] = [["[[", "]]"], ["«", "»"]];

pub(super) fn run(args: &SamplesArgs, machine: &LocalMachine) -> Result<(), CommandError> {
    let loaded = args.config.load(machine)?;
    let config = &loaded.config;
    // Other commands report the unused parts of rows.
    let how = ReadOptions { is_brief: true, ..ReadOptions::default() };
    let (tokenizer, dataset) = data::read_whole(config, how)?;
    let (seed, global) = (config.train.seed, config.batch.global as u64);
    let Sample { corpus_name, corpus, place } =
        dataset.sample(config.data.order, seed, args.sample, global);
    let documents = corpus.documents(place).fail_with(code::DATA)?;
    let in_window = corpus.starts_in_window(place).fail_with(code::DATA)?;
    let starts = documents.iter().scan(0, |end, document| {
        let start = *end;
        *end += document.tokens.len();
        Some(start)
    });
    let starts: Vec<usize> = if documents.len() > 1 { starts.collect() } else { in_window };
    let tokens: Vec<u32> = documents.iter().flat_map(|d| d.tokens.clone()).collect();
    let counted: Vec<bool> = documents.iter().flat_map(|d| d.counted.clone()).collect();
    // Without a working directory, files keep their full names.
    let here = std::env::current_dir().unwrap_or_default();
    let origins =
        corpus.origins(place).into_iter().map(|o| o.map(|o| o.seen_from(&here).to_string()));
    let origins: Vec<Option<String>> = origins.collect();
    if args.json {
        return print_json(
            &json!({ "tokens": tokens, "counted": counted, "documents": starts, "origins": origins }),
        );
    }
    let targets = counted.iter().filter(|counts| **counts).count();
    let all = targets + documents.len() >= tokens.len();
    let painted = colour::wanted(&std::io::stdout());
    let marked = match (all, painted) {
        (true, _) => "",
        (false, true) => " (green)",
        (false, false) => " between [[ and ]]",
    };
    let is_control = |token: &u32| tokenizer.as_ref().is_some_and(|t| t.is_control(*token));
    let control = match (tokens.iter().filter(|token| is_control(token)).count(), painted) {
        (0, _) => String::new(),
        (n, true) => format!(", {} (inverted)", counted_noun(n, "control token")),
        (n, false) => format!(", {} between « and »", counted_noun(n, "control token")),
    };
    let each = dataset.num_train_samples();
    let of = match documents.len() {
        1 => String::new(),
        n => format!("{n} documents, "),
    };
    let of = corpus_name.map_or_else(String::new, |name| format!("of {name}, ")) + &of;
    let mut out = format!(
        "sample {} of the run, one of {each} of an epoch: {of}{}, {}{marked}{control}\n",
        args.sample,
        counted_noun(tokens.len(), "token"),
        counted_noun(targets, "target"),
    );
    for (number, (document, origin)) in documents.iter().zip(&origins).enumerate() {
        let tokens = counted_noun(document.tokens.len(), "token");
        let from = origin.as_ref().map_or_else(String::new, |origin| format!(", {origin}"));
        match (documents.len(), origin) {
            (1, None) => {}
            (1, Some(origin)) => out += &format!("\n---- {origin}"),
            (n, _) => out += &format!("\n---- document {} of {n}, {tokens}{from}", number + 1),
        }
        let style = TextStyle { is_text: config.data.format.is_text(), all, painted };
        out += &format!("\n{}\n", text(document, tokenizer.as_ref(), style));
    }
    print(&out)
}

/// How the tokens of a document are printed.
#[derive(Clone, Copy)]
struct TextStyle {
    /// Whether tokens without a tokenizer are bytes of text, not numbers.
    is_text: bool,
    /// Whether all tokens are targets, so that none is marked.
    all: bool,
    /// Whether colours mark the tokens, not brackets.
    painted: bool,
}

/// Text of the tokens, or their numbers if they have no text.
fn text(
    document: &Document,
    tokenizer: Option<&Tokenizer>,
    TextStyle { is_text, all, painted }: TextStyle,
) -> String {
    let mut writer = TokenWriter::new(tokenizer, is_text);
    let mut bytes = Vec::new();
    let (mut out, mut on) = (String::new(), [false; 2]);
    for (token, counts) in document.tokens.iter().zip(&document.counted) {
        let is_control = tokenizer.is_some_and(|tokenizer| tokenizer.is_control(*token));
        let next = [*counts && !all, is_control];
        if next != on || is_control {
            // The rest of an incomplete character belongs to the tokens before.
            out += &rest(&mut writer, &mut bytes);
            out += &change(on, next, painted);
            on = next;
        }
        bytes.extend(writer.push(*token as i32));
    }
    out += &rest(&mut writer, &mut bytes);
    out + &change(on, [false; 2], painted)
}

/// Marks between two tokens; `from` and `to` say for each: is it a target, is it a control token?
fn change(from: [bool; 2], to: [bool; 2], painted: bool) -> String {
    if painted {
        let end = if from.contains(&true) { format!("{:#}", COLOURS[0]) } else { String::new() };
        let begin = COLOURS.iter().zip(to).filter(|(_, on)| *on);
        return end + &begin.map(|(colour, _)| colour.to_string()).collect::<String>();
    }
    let [[target, end], [control, end_control]] = MARKS;
    let marks = [
        (from[1], end_control),
        (from[0] && !to[0], end),
        (to[0] && !from[0], target),
        (to[1], control),
    ];
    marks.iter().filter(|(here, _)| *here).map(|(_, mark)| *mark).collect()
}

/// Text of the last bytes of a piece.
fn rest(writer: &mut TokenWriter<'_>, bytes: &mut Vec<u8>) -> String {
    bytes.extend(writer.rest());
    shown(&String::from_utf8_lossy(&std::mem::take(bytes)))
}

/// Escapes the characters that control a terminal.
fn shown(text: &str) -> String {
    let plain = |c: char| !c.is_control() || c == '\n' || c == '\t';
    let one = |c: char| if plain(c) { c.to_string() } else { c.escape_default().to_string() };
    text.chars().map(one).collect()
}
