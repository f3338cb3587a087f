//! Reasons why the data cannot be used; the messages contain the key, the file and the remedy.

use super::bad_rows::BadRows;
use super::skipped_files::SkippedFiles;
use super::unpack_error::UnpackError;
use super::utf8::Utf8Error;
use config::DataFormat;
use files::foreign_text::foreign;
use files::path_text::PathText;
use files::shell::{quoted, quoted_path};
use std::io;
use std::path::{Path, PathBuf, absolute};
use topology::format_bytes;

/// An error of the data: key, path and problem.
#[derive(Debug, thiserror::Error)]
#[error("{key}: {}: {problem}", PathText(path))]
pub struct DataError {
    /// The config key to change.
    pub key: &'static str,
    /// The file, directory or glob, as an absolute path.
    pub path: PathBuf,
    /// The fault and its remedy.
    pub problem: Problem,
}

/// A fault of a file, directory or config entry.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what variants and fields are")]
pub enum Problem {
    #[error("the key is empty: name a text file, a directory or a glob")]
    NotSet,
    #[error(
        "no such file (config paths are relative to the config file, --set paths to the current directory)"
    )]
    Missing,
    #[error(
        "no such file. If it is a data set of the Hugging Face hub: nothing is downloaded; run `{}`, and name the files in that \
         folder",
        download(name)
    )]
    OfHub { name: String },
    #[error("no file matches (the pattern knows `*`, `?`, `[a-z]`, `[!a-z]` and `**`)")]
    NoMatch,
    #[error(
        "does not exist, but {} does: a token file and its index, as Megatron writes them; set data.format: Megatron",
        PathText(tokens)
    )]
    Prefix { tokens: PathBuf },
    #[error(
        "no usable file: {0}. A directory gives its UTF-8 files, or *.bin for U16 and U32, without hidden ones, \
         target, runs, node_modules, Cargo.lock and links; name a file or a glob to take it as it is"
    )]
    NoUsableFile(Box<SkippedFiles>),
    #[error(
        "more would be left out than taken ({}): {left}; or name files or a glob instead of the directory",
        format_bytes(*taken)
    )]
    MoreLeftOut { left: Box<SkippedFiles>, taken: u64 },
    #[error("it is {what}, and {error}")]
    Packed { what: String, error: UnpackError },
    #[error(
        "Arrow files, as the Python library `datasets` saves them, are not read: convert them with this line, and name the .jsonl \
         files that it writes: {command}"
    )]
    Arrow { command: String },
    #[error("it is {what}: {remedy}{insist}")]
    Foreign { what: &'static str, remedy: &'static str, insist: &'static str },
    #[error(
        "it has {} beside {}, which would be trained on too: set data.train to the one and data.validation to the other, \
         or name both by a glob",
        PathText(validation),
        PathText(train)
    )]
    ValidationAmongTraining { train: PathBuf, validation: PathBuf },
    #[error(
        "`onebox data prepare` has not finished it; give the same command again, which goes on behind the parts that are there"
    )]
    HalfPrepared,
    #[error(
        "`onebox data prepare` wrote it, and each of its folders is a data set: set data.train to {}{}",
        folders(train),
        if validation.is_empty() { String::new() } else { format!(", and data.validation to {}", folders(validation)) }
    )]
    AllPrepared { train: Vec<PathBuf>, validation: Vec<PathBuf> },
    #[error("{fault}; {remedy}")]
    OtherPart { fault: String, remedy: String },
    #[error(
        "it is damaged ({0}); copy all files of its folder again, or delete the folder and prepare the text again, or move the file \
         away if `onebox data prepare` did not write it"
    )]
    BadList(String),
    #[error(
        "a newer onebox wrote it, in format {version}, and this one reads formats up to {known}; take that onebox, or move it away \
         if `onebox data prepare` did not write it"
    )]
    NewerList { version: u32, known: u32 },
    #[error(
        "an older onebox wrote it, in format {version} without hashes; make the tokens again: rm -r {0} && onebox data prepare CONFIG {0}",
        quoted_path(all)
    )]
    OlderList { version: u32, all: PathBuf },
    #[error(
        "{} says that its tokens are {dtype}, but data.format is {format:?}: {remedy}",
        PathText(index)
    )]
    OtherTokens {
        index: PathBuf,
        dtype: &'static str,
        format: Box<DataFormat>,
        remedy: &'static str,
    },
    #[error(
        "data.format is Megatron, but {} is not there; copy it beside the tokens, or set data.format: U16 or U32",
        PathText(index)
    )]
    NoIndex { index: PathBuf },
    #[error(
        "its index {} is damaged, {fault}; copy both files again, or write them anew",
        PathText(index)
    )]
    BadIndex { index: PathBuf, fault: String },
    #[error(
        "its index {} counts {needs} bytes of tokens, and it has {bytes}; copy both files again, or write them anew",
        PathText(index)
    )]
    OtherLength { index: PathBuf, needs: u64, bytes: u64 },
    #[error(
        "its mask {} is damaged, {fault}; copy all files again, or prepare the data again",
        PathText(mask)
    )]
    BadMask { mask: PathBuf, fault: String },
    #[error(
        "{} is not there, and other files of the data have a mask, which says which tokens count; copy it beside the tokens, \
         or prepare the data again",
        PathText(mask)
    )]
    NoMask { mask: PathBuf },
    #[error(
        "it is a part of chats, and {} is not there, which says which tokens count; copy it beside the tokens, or prepare the \
         data again; or, to train on the prompts too, take `.chat` out of the names of the tokens and of their index",
        PathText(mask)
    )]
    LostMask { mask: PathBuf },
    #[error(
        "{} says which of its tokens count; set data.format: Megatron and data.packing: None or Documents, or move the mask away",
        PathText(mask)
    )]
    UnusedMask { mask: PathBuf },
    #[error(
        "{} says that its tokens are {dtype}: onebox reads uint8, uint16, int16 and int32, convert it",
        PathText(index)
    )]
    StrangeTokens { index: PathBuf, dtype: &'static str },
    #[error(
        "its tokens have {width} bytes, and those of the files before it {before}; write all with one type"
    )]
    OtherWidth { width: usize, before: usize },
    #[error("{which} is negative: tokens of {dtype} are not below {end}")]
    Negative { which: String, dtype: &'static str, end: usize },
    #[error("empty: put text into it, or name another file")]
    Empty,
    #[error("neither a regular file nor a directory: copy its content to a file")]
    NotAFile,
    #[error("cannot read it: {0}; check its permissions, and that nothing else writes to it")]
    Unreadable(io::Error),
    #[error("cannot read it from byte {offset} on: {why}; check that nothing else writes to it")]
    Changed { offset: u64, why: String },
    #[error(
        "{bytes} bytes are no whole number of {width}-byte tokens; check data.format and the end \
         of the file"
    )]
    PartialToken { bytes: usize, width: usize },
    #[error(
        "{which} is {token}, but model.vocab is {vocab}; set model.vocab to more than the \
         largest token, or check data.format"
    )]
    TokenOutOfVocab { which: String, token: u32, vocab: usize },
    #[error("{rows}; at most 5 % of the {} may be left out", rows.nouns())]
    BadRows { rows: Box<BadRows> },
    #[error(
        "data.format: {format} makes tokens of text and needs a tokenizer: set data.tokenizer to a tokenizer.json or to its folder"
    )]
    NeedsTokenizer { format: &'static str },
    #[error("{0}; data.format: Chat needs the chat template of the model")]
    NoTemplate(String),
    #[error(
        "it has no chat template, which alone writes data.system into a chat: put a chat_template.jinja there, or leave data.system out"
    )]
    SystemWithoutTemplate,
    #[error(
        "it has one row or document, and none is left for validation: give more, or set data.validation"
    )]
    OneRow,
    #[error("cannot be used as a tokenizer.json: {0}")]
    NoTokenizer(String),
    #[error("it has no tokenizer.json: {0}")]
    NoTokenizerJson(String),
    #[error("the files beside it list tokens that it does not take: {0}")]
    BadListed(String),
    #[error(
        "its largest token is {largest} (\"{}\"), but model.vocab is {vocab}; set model.vocab to {} or more{}; if the folder of \
         model.from gives the vocabulary, take the tokenizer of that model, or make the vocabulary larger with transformers \
         (resize_token_embeddings, save_pretrained)",
        foreign(text),
        largest + 1,
        if *listed { ", or take that token out of tokenizer_config.json, which lists it beside the tokenizer.json" } else { "" }
    )]
    TokenizerVocab { largest: u32, text: String, vocab: usize, listed: bool },
    #[error(
        "tokenizer_config.json names \"{}\" as eos_token, which ends a text, and the tokenizer has no such token: name one that it \
         has, or add it with transformers (add_special_tokens, save_pretrained)",
        foreign(text)
    )]
    NoEnd { text: String },
    #[error("{fault}; or {or_else}")]
    NotUtf8 { fault: Utf8Error, or_else: &'static str },
    #[error(
        "{} of text are more than a tokenizer takes at once ({}), and onebox knows no place to cut them: {why}; divide the file \
         into smaller ones, or write JSON lines with a document in each (data.format: Jsonl)",
        format_bytes(*bytes),
        format_bytes(*most)
    )]
    Uncut { bytes: u64, most: u64, why: String },
    #[error(
        "the {part} part has {tokens} tokens ({arithmetic}), but model.seq_len {seq_len} needs \
         seq_len + 1 = {}; lower model.seq_len to at most {}, or {remedy}",
        seq_len + 1, tokens.saturating_sub(1).max(1)
    )]
    TooShort {
        part: &'static str,
        tokens: usize,
        arithmetic: String,
        seq_len: usize,
        remedy: &'static str,
    },
}

/// The command that downloads a data set of the Hugging Face hub.
fn download(name: &str) -> String {
    let folder = name.rsplit('/').next().unwrap_or(name);
    format!("hf download --repo-type dataset {} --local-dir {}", quoted(name), quoted(folder))
}

/// The folders as a list in a sentence.
fn folders(all: &[PathBuf]) -> String {
    all.iter().map(|folder| PathText(folder).to_string()).collect::<Vec<_>>().join(" and ")
}

/// A problem and its path.
pub(super) type Failure = (PathBuf, Problem);

/// Adds the config key to a failure.
pub(super) fn in_key(key: &'static str) -> impl FnOnce(Failure) -> DataError {
    move |(path, problem)| DataError { key, path: absolute(&path).unwrap_or(path), problem }
}

/// Reports rows that are left out, changed or partly ignored; fails if too many are left out.
pub(super) fn settle(named: &Path, rows: BadRows) -> Result<(), Failure> {
    if rows.are_too_many() {
        return Err(at(named)(Problem::BadRows { rows: Box::new(rows) }));
    }
    if rows.are_some() {
        tracing::warn!("{}: {rows}", PathText(named));
    }
    if let Some(unread) = rows.unread() {
        tracing::warn!("{}: {unread}", PathText(named));
    }
    Ok(())
}

/// Adds the path to a problem.
pub(super) fn at(path: &Path) -> impl FnOnce(Problem) -> Failure {
    |problem| (path.to_owned(), problem)
}
