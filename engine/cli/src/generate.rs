//! Generates text with a trained model: the weights of a run, a checkpoint or a folder of
//! transformers, on the cores or on one GPU. A KV cache holds the keys and values of earlier
//! tokens, so that each new token costs one row of every matmul.

mod compute_device;
mod generator;
mod model;
mod sampling;
mod weights;

use checkpoint::Checkpoint;
use checkpoint::hugging_face::FolderError;
pub use compute_device::ComputeDevice;
use config::{Config, Precision};
use data::progress::{Progress, Silence};
use data::{Decoder, Tokenizer};
use device::cuda::WIDEST_HEAD;
use device::random;
use files::path_text::ShownPath;
pub use generator::Generator;
use layout::LocalMachine;
use model::{Model, SampleTokens};
pub use sampling::{Sampling, StopCondition};
use sampling::{Tail, draw};
use std::path::{Path, PathBuf};
use topology::format_bytes;

/// Word that keys the random numbers of sampling under its seed.
const SAMPLE_STREAM: u64 = 0x7361_6d70;
/// Maximum characters of a prompt in a message.
const SHOWN: usize = 60;
/// Number of prompts whose next tokens are computed together.
const TOGETHER: usize = 16;

/// Remedy for a folder of frozen weights that cannot be read.
pub const BASE_ELSEWHERE: &str =
    "the folder has the frozen weights of the run; --base DIR names it at another place";

/// Reason why no text is generated.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what variants and fields are")]
pub enum GenerateError {
    #[error("cannot read {}: {source}", path.shown())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{} is not the model of its config: {problem}", path.shown())]
    Weights { path: PathBuf, problem: String },
    #[error(
        "{}: these are not the frozen weights of the run: bring the folder back as it was, or name another by --base DIR", .0.shown()
    )]
    OtherBase(PathBuf),
    #[error("{0}; {BASE_ELSEWHERE}")]
    Base(FolderError),
    #[error(
        "--base: the weights are a whole model, and no other folder has frozen ones: leave --base out"
    )]
    NothingFrozen,
    #[error(
        "the frozen weights of the run are random, and in no folder, so that no text can be generated"
    )]
    NoBase,
    #[error("--prompt {0}: {1}")]
    Prompt(String, String),
    #[error(
        "the logits of the next token are not finite ({0}): the weights are damaged, or training has diverged; take an earlier checkpoint"
    )]
    NotFinite(f64),
    #[error(
        "weights, keys and values take {}, and this machine has {} free: give fewer --tokens or prompts, a smaller --context, or a smaller model",
        format_bytes(*needed), format_bytes(*free)
    )]
    Memory { needed: u64, free: u64 },
    #[error(
        "no GPU computes this here: {0}; see `onebox doctor`, or take the cores: --set device=Cpu"
    )]
    NoGpu(String),
    #[error(
        "`Bf16` needs sm_80 or newer: GPU {gpu}, {name}, is sm_{sm}, which has no bf16 products; take --set precision=Fp16 or Fp32"
    )]
    NoBf16 { gpu: usize, name: String, sm: u32 },
    #[error(
        "heads of {0} elements: on GPUs they have at most {WIDEST_HEAD}, for which there are kernels; take the cores: --set device=Cpu"
    )]
    WideHeads(usize),
    #[error("{0}")]
    GpuMemory(String),
    #[error(transparent)]
    Device(#[from] device::Error),
    #[error(transparent)]
    Folder(#[from] FolderError),
}

/// Source of a model's weights.
#[derive(Clone, Copy, Debug)]
pub enum WeightSource<'a> {
    /// The file that a run writes at its end.
    Weights(&'a Path),
    /// The fp32 parameters of a checkpoint.
    Checkpoint(&'a Checkpoint),
    /// A folder of transformers.
    Folder(&'a Path),
}

/// A model: its weights, its tokenizer, and the device that computes it.
#[derive(Clone, Copy, Debug)]
pub struct ModelSource<'a> {
    /// Source of the weights.
    pub weights: WeightSource<'a>,
    /// Tokenizer; without it, bytes are tokens, or the prompt is token numbers.
    pub tokenizer: Option<&'a Tokenizer>,
    /// Folder of the frozen weights of the run, if it is not `model.from` of the config.
    pub base: Option<&'a Path>,
    /// Device that computes: the cores or a GPU.
    pub device: ComputeDevice,
    /// Machine of the device.
    pub machine: &'a LocalMachine,
    /// Type of weights, activations, keys and values. Sums are fp32.
    pub precision: Precision,
    /// Receiver of the progress of reading the weights.
    pub progress: &'a dyn Progress,
}

impl<'a> ModelSource<'a> {
    /// A model that computes on the cores in fp32.
    pub const fn on_cores(
        trained: WeightSource<'a>,
        tokenizer: Option<&'a Tokenizer>,
        machine: &'a LocalMachine,
    ) -> Self {
        Self {
            weights: trained,
            tokenizer,
            base: None,
            device: ComputeDevice::Cores,
            machine,
            precision: Precision::Fp32,
            progress: &Silence,
        }
    }
}

/// Reason why a text ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum End {
    /// A stop token was drawn.
    StopToken,
    /// A stop text occurred.
    StopText,
    /// The text has the requested number of tokens.
    Length,
}

/// A piece of output about one text.
#[derive(Clone, Copy, Debug)]
pub enum Piece<'a> {
    /// The prompt, decoded from its tokens without the special tokens around it.
    Prompt(&'a [u8]),
    /// The next part of the text.
    Text(&'a [u8]),
    /// The text is complete: why it ended, and the tokens that were drawn.
    End(End, &'a [i32]),
}

/// A prompt and the tokens drawn so far.
struct Text<'a> {
    tokens: Vec<i32>,
    /// Number of tokens of the prompt.
    prompt: usize,
    /// Tokens of the prompt, without the special tokens that the tokenizer puts around it.
    own: Vec<i32>,
    written: TokenWriter<'a>,
    tail: Tail,
    over: bool,
}

/// Turns tokens into text.
pub(crate) enum TokenWriter<'a> {
    /// Decodes with a tokenizer.
    Text(Decoder<'a>),
    Bytes,
    Numbers,
}

impl<'a> TokenWriter<'a> {
    /// Without a tokenizer, tokens are bytes if `is_text`, and numbers otherwise.
    pub(crate) fn new(tokenizer: Option<&'a Tokenizer>, is_text: bool) -> Self {
        match tokenizer {
            Some(tokenizer) => Self::Text(tokenizer.decoder()),
            None if is_text => Self::Bytes,
            None => Self::Numbers,
        }
    }

    /// Returns the text that `token` adds.
    pub(crate) fn push(&mut self, token: i32) -> Vec<u8> {
        match self {
            Self::Text(decoder) => decoder.push(token as u32).into_bytes(),
            Self::Bytes => vec![token as u8],
            Self::Numbers => format!("{token} ").into_bytes(),
        }
    }

    /// Returns the text that is left at the end.
    pub(crate) fn rest(&mut self) -> Vec<u8> {
        match self {
            Self::Text(decoder) => decoder.rest().into_bytes(),
            Self::Bytes | Self::Numbers => Vec::new(),
        }
    }
}

/// Draws tokens after each prompt, and gives each piece of output to `emit`, with the number of its
/// prompt. Ends early if `emit` returns false. A text does not depend on the other prompts. Returns
/// the tokens drawn after each prompt.
///
/// # Errors
/// The weights cannot be read, or do not fit the config or the memory. The GPU is missing or fails.
/// A prompt has no tokens.
pub fn generate(
    config: &Config,
    from: &ModelSource<'_>,
    prompts: &[String],
    sampling: &Sampling,
    emit: &mut dyn FnMut(usize, Piece<'_>) -> bool,
) -> Result<Vec<Vec<i32>>, GenerateError> {
    let tokenizer = from.tokenizer;
    let known = known_tokens(config, tokenizer);
    let text = |prompt: &String| -> Result<Text<'_>, GenerateError> {
        let tokens = tokens_of(config, tokenizer, prompt, sampling.special)?;
        let own = match tokenizer.filter(|_| sampling.special) {
            Some(tokenizer) => {
                let own = tokenizer.encode(prompt);
                let own = own.map_err(|why| GenerateError::Prompt(excerpt(prompt), why))?;
                own.into_iter().map(|token| token as i32).collect()
            }
            None => tokens.clone(),
        };
        Ok(Text { own, ..Text::after(tokens, config, tokenizer, sampling) })
    };
    let mut texts: Vec<Text<'_>> = prompts.iter().map(text).collect::<Result<_, _>>()?;
    let longest = texts.iter().map(|text| text.tokens.len()).max().unwrap_or(0);
    let context = longest.saturating_add(sampling.tokens).clamp(1, config.model.seq_len);
    let mut model = Model::open(config, from, context, texts.len().clamp(1, TOGETHER))?;
    for (group, texts) in texts.chunks_mut(TOGETHER).enumerate() {
        let mut emit = |i: usize, piece: Piece<'_>| emit(group * TOGETHER + i, piece);
        if !extend_texts(&mut model, texts, known, sampling, &mut emit)? {
            break;
        }
    }
    Ok(texts.into_iter().map(|mut text| text.tokens.split_off(text.prompt)).collect())
}

/// Extends texts. Tokens from `known` on are never drawn. Returns false if `emit` returns false.
fn extend_texts(
    model: &mut Model,
    texts: &mut [Text<'_>],
    known: usize,
    sampling: &Sampling,
    emit: &mut dyn FnMut(usize, Piece<'_>) -> bool,
) -> Result<bool, GenerateError> {
    model.forget();
    for (i, text) in texts.iter_mut().enumerate().filter(|_| sampling.echo) {
        let pieces = text.own.iter().flat_map(|token| text.written.push(*token));
        let mut start: Vec<u8> = pieces.collect();
        start.extend(text.written.rest());
        if !emit(i, Piece::Prompt(&start)) {
            return Ok(false);
        }
    }
    draw_tokens(model, texts, known, sampling, emit)
}

/// Whether the tokens of the model are bytes.
const fn has_bytes(config: &Config, tokenizer: Option<&Tokenizer>) -> bool {
    config.data.format.is_bytes() && tokenizer.is_none()
}

/// Number of tokens that may be drawn. Larger numbers are no bytes, or no tokens.
fn known_tokens(config: &Config, tokenizer: Option<&Tokenizer>) -> usize {
    let bytes = has_bytes(config, tokenizer);
    tokenizer.map_or(if bytes { 256 } else { usize::MAX }, Tokenizer::vocab)
}

/// Draws the tokens of texts. The cache may hold a beginning of each text. Returns false if `emit`
/// returns false.
fn draw_tokens(
    model: &mut Model,
    texts: &mut [Text<'_>],
    known: usize,
    sampling: &Sampling,
    emit: &mut dyn FnMut(usize, Piece<'_>) -> bool,
) -> Result<bool, GenerateError> {
    for index in 0..sampling.tokens as u64 {
        let left: Vec<usize> = (0..texts.len()).filter(|i| !texts[*i].over).collect();
        if left.is_empty() {
            break;
        }
        let grown: Vec<SampleTokens<'_>> =
            left.iter().map(|i| SampleTokens { sample: *i, tokens: &texts[*i].tokens }).collect();
        let all = model.next(&grown)?;
        let uniform = random::uniform(random::key(sampling.seed, SAMPLE_STREAM), index);
        for (i, mut logits) in left.into_iter().zip(all) {
            logits.truncate(known);
            let token = draw(&logits, sampling, uniform);
            if !texts[i].take(token, sampling, &mut |piece| emit(i, piece)) {
                return Ok(false);
            }
        }
    }
    let mut left = texts.iter_mut().enumerate().filter(|(_, text)| !text.over);
    Ok(left.all(|(i, text)| text.end(End::Length, &mut |piece| emit(i, piece))))
}

impl<'a> Text<'a> {
    /// A text after the tokens of its prompt.
    fn after(
        tokens: Vec<i32>,
        config: &Config,
        tokenizer: Option<&'a Tokenizer>,
        sampling: &Sampling,
    ) -> Self {
        let written = TokenWriter::new(tokenizer, has_bytes(config, tokenizer));
        let (prompt, tail) = (tokens.len(), sampling.stop.tail());
        Self { tokens, prompt, own: Vec::new(), written, tail, over: false }
    }

    /// Adds `token`, or ends the text. Returns false if `emit` returns false.
    fn take(
        &mut self,
        token: i32,
        sampling: &Sampling,
        emit: &mut dyn FnMut(Piece<'_>) -> bool,
    ) -> bool {
        if sampling.stop.tokens.contains(&token) {
            return self.end(End::StopToken, emit);
        }
        self.tokens.push(token);
        let (known, stopped) = self.tail.push(&self.written.push(token));
        let go_on = known.is_empty() || emit(Piece::Text(&known));
        if stopped { go_on && self.end(End::StopText, emit) } else { go_on }
    }

    fn end(&mut self, how: End, emit: &mut dyn FnMut(Piece<'_>) -> bool) -> bool {
        self.over = true;
        // After a stop text, no text is left.
        let (mut rest, _) = self.tail.push(&self.written.rest());
        rest.extend(self.tail.rest());
        (rest.is_empty() || emit(Piece::Text(&rest)))
            && emit(Piece::End(how, &self.tokens[self.prompt..]))
    }
}

/// Logits of the token after a prompt, one per token of the vocabulary. With a folder, the prompt
/// gets the special tokens that the tokenizer puts around a text.
///
/// # Errors
/// Same as [`generate`].
pub fn next_logits(
    config: &Config,
    from: &ModelSource<'_>,
    text: &str,
) -> Result<Vec<f64>, GenerateError> {
    let special = matches!(from.weights, WeightSource::Folder(_));
    let tokens = tokens_of(config, from.tokenizer, text, special)?;
    let context = tokens.len().min(config.model.seq_len);
    let mut model = Model::open(config, from, context, 1)?;
    Ok(model.next(&[SampleTokens { sample: 0, tokens: &tokens }])?.remove(0))
}

/// `prompt`, or token 0 if the prompt is blank and must consist of token numbers.
pub(crate) fn default_prompt(
    config: &Config,
    tokenizer: Option<&Tokenizer>,
    prompt: &str,
) -> String {
    let numbers = tokenizer.is_none() && !config.data.format.is_text();
    let blank = numbers && prompt.trim().is_empty();
    if blank { "0".into() } else { prompt.into() }
}

/// The beginning of a text, in quotes.
fn excerpt(text: &str) -> String {
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{:?}.. ({} bytes)", &text[..end], text.len()),
        None => format!("{text:?}"),
    }
}

/// Converts a prompt to tokens.
fn tokens_of(
    config: &Config,
    tokenizer: Option<&Tokenizer>,
    text: &str,
    special: bool,
) -> Result<Vec<i32>, GenerateError> {
    let refuse = |problem: String| GenerateError::Prompt(excerpt(text), problem);
    let vocab = config.model.vocab;
    let token = |word: &str| match word.parse::<i32>() {
        Ok(token) if (0..vocab as i64).contains(&i64::from(token)) => Ok(token),
        _ => Err(refuse(format!(
            "{} is not a token from 0 to {}; this model was trained on token files, or its folder has no \
             tokenizer.json, so the prompt is token numbers with blanks between",
            excerpt(word),
            vocab - 1
        ))),
    };
    let tokens = match (tokenizer, config.data.format.is_text()) {
        (Some(tokenizer), _) => {
            let encoded = match special {
                true => tokenizer.encode_prompt(text),
                false => tokenizer.encode(text),
            };
            let encoded = encoded.map_err(&refuse)?;
            encoded.into_iter().map(|token| token as i32).collect()
        }
        (None, true) => text.bytes().map(i32::from).collect(),
        (None, false) => text.split_whitespace().map(token).collect::<Result<Vec<i32>, _>>()?,
    };
    if tokens.is_empty() {
        return Err(refuse("it is empty; give at least one character".into()));
    }
    // A token outside of the vocabulary has no embedding.
    if let Some(token) = tokens.iter().find(|token| **token as usize >= vocab) {
        return Err(refuse(format!(
            "its token {token} is not one of the model, which has {vocab}: the tokenizer is another model's"
        )));
    }
    Ok(tokens)
}
