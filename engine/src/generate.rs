//! Text from a trained model: the weights that a run left, on one virtual GPU in fp32, one whole forward pass
//! for each token. There is no cache of keys and values: it is for a look at what a run has learned.

use crate::checkpoint::Checkpoint;
use crate::checkpoint::inspect::TensorSummary;
use crate::config::{Config, DataFormat, Family};
use crate::data::Tokenizer;
use crate::hugging_face::{Folder, FolderError, Pretrained};
use crate::run::open::kernel_crew;
use crate::run::placement::cores;
use crate::train::build::{scratch_floats, shape};
use device::cpu::{self, CpuOptions, Lanes};
use device::{Arena, Device, Dtype, Lane, Plan, Rank, Tensor, random};
use device::{HostWork, World};
use safetensors::tensor::Metadata;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tensor_parallel::{BatchTensors, Gpt, GptShape, Pass};

/// Word that keys sampling under its seed.
const SAMPLE_STREAM: u64 = 0x7361_6d70;
/// A header longer than this is no header.
const LONGEST_HEADER: u64 = 1 << 26;

/// Why nothing is generated.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what variants and fields are")]
pub enum GenerateError {
    #[error("cannot read {}: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{} is not the model of its config: {problem}", path.display())]
    Weights { path: PathBuf, problem: String },
    #[error("--prompt {0:?}: {1}")]
    Prompt(String, String),
    #[error(transparent)]
    Device(#[from] device::Error),
    #[error(transparent)]
    Folder(#[from] FolderError),
}

/// Where the weights of a model are.
#[derive(Clone, Copy, Debug)]
pub enum Trained<'a> {
    /// The file that a run leaves.
    Weights(&'a Path),
    /// The fp32 parameters of a checkpoint.
    Checkpoint(&'a Checkpoint),
    /// A folder of transformers.
    Folder(&'a Path),
}

/// How to draw.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Start of the text; for models of token files, numbers with blanks between.
    pub prompt: String,
    /// Tokens to draw.
    pub tokens: usize,
    /// 0: always the likeliest.
    pub temperature: f64,
    /// The same seed draws the same text.
    pub seed: u64,
}

/// Draws tokens after the prompt, and hands each piece of output, the prompt first, to `emit`, until that
/// says to stop (false).
///
/// # Errors
/// Weights that cannot be read or do not fit the config; a prompt that is none.
pub fn generate(
    config: &Config,
    (trained, tokenizer): (Trained<'_>, Option<&Tokenizer>),
    sampling: &Sampling,
    emit: &mut dyn FnMut(&[u8]) -> bool,
) -> Result<(), GenerateError> {
    let bytes = config.data.format.is_bytes() && tokenizer.is_none();
    let mut decode = tokenizer.map(Tokenizer::decoder);
    let mut piece = |token: i32| match &mut decode {
        Some(decode) => decode(token as u32).into_bytes(),
        None if bytes => vec![token as u8],
        None => format!("{token} ").into_bytes(),
    };
    // What lies above is no byte, or no token.
    let known = tokenizer.map_or(if bytes { 256 } else { usize::MAX }, Tokenizer::vocab);
    let mut tokens = prompt((config, tokenizer), &sampling.prompt)?;
    let whole = tokens.len().saturating_add(sampling.tokens);
    let model = Model::open(config, trained, whole.clamp(1, config.model.seq_len))?;
    let start: Vec<u8> = tokens.iter().flat_map(|token| piece(*token)).collect();
    let mut go_on = emit(&start);
    for index in 0..sampling.tokens as u64 {
        if !go_on {
            break;
        }
        let mut logits = model.next(&tokens[tokens.len().saturating_sub(model.context)..])?;
        logits.truncate(known);
        let uniform = random::uniform(random::key(sampling.seed, SAMPLE_STREAM), index);
        let token = draw(&logits, sampling.temperature, uniform);
        go_on = emit(&piece(token));
        tokens.push(token);
    }
    Ok(())
}

/// Logits of the token after a prompt, one for each of the vocabulary.
///
/// # Errors
/// As [`generate`].
pub fn next_logits(
    config: &Config,
    (trained, tokenizer): (Trained<'_>, Option<&Tokenizer>),
    text: &str,
) -> Result<Vec<f64>, GenerateError> {
    let tokens = prompt((config, tokenizer), text)?;
    let context = tokens.len().min(config.model.seq_len);
    Model::open(config, trained, context)?.next(&tokens[tokens.len() - context..])
}

/// `prompt`, or for a model of token files token 0 where it has none.
pub(crate) fn default_prompt(config: &Config, prompt: &str) -> String {
    let blank = !config.data.format.is_bytes() && prompt.trim().is_empty();
    if blank { "0".into() } else { prompt.into() }
}

/// Tokens of a prompt.
fn prompt(
    (config, tokenizer): (&Config, Option<&Tokenizer>),
    text: &str,
) -> Result<Vec<i32>, GenerateError> {
    let refuse = |problem: String| GenerateError::Prompt(text.to_owned(), problem);
    let vocab = config.model.vocab;
    let token = |word: &str| match word.parse::<i32>() {
        Ok(token) if (0..vocab as i64).contains(&i64::from(token)) => Ok(token),
        _ => Err(refuse(format!(
            "`{word}` is not a token from 0 to {}; this model was trained on token files, so the \
             prompt is token numbers with blanks between",
            vocab - 1
        ))),
    };
    let tokens = match config.data.format {
        DataFormat::Auto | DataFormat::Bytes if let Some(tokenizer) = tokenizer => {
            let encoded = tokenizer.encode(text).map_err(&refuse)?;
            encoded.into_iter().map(|token| token as i32).collect()
        }
        DataFormat::Auto | DataFormat::Bytes => text.bytes().map(i32::from).collect(),
        DataFormat::U16 | DataFormat::U32 => {
            text.split_whitespace().map(token).collect::<Result<Vec<i32>, _>>()?
        }
    };
    if tokens.is_empty() {
        return Err(refuse("it is empty; give at least one character".into()));
    }
    Ok(tokens)
}

/// Token number by its probability, softmax(logits / temperature): the first whose cumulative one exceeds
/// `uniform` (in [0, 1)).
fn draw(logits: &[f64], temperature: f64, uniform: f64) -> i32 {
    let likeliest = (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b]));
    let likeliest =
        likeliest.unwrap_or_else(|| unreachable!("a vocabulary has two tokens or more"));
    if temperature <= 0.0 {
        return likeliest as i32;
    }
    let top = logits[likeliest];
    let weight = |logit: &f64| ((logit - top) / temperature).exp();
    let mut left = uniform * logits.iter().map(weight).sum::<f64>();
    for (token, logit) in logits.iter().enumerate() {
        left -= weight(logit);
        if left < 0.0 {
            return token as i32;
        }
    }
    likeliest as i32
}

/// A model ready to predict.
struct Model {
    dev: Device,
    gpt: Gpt,
    tokens: Tensor,
    context: usize,
}

impl Model {
    fn open(config: &Config, trained: Trained<'_>, context: usize) -> Result<Self, GenerateError> {
        // The positions of a folder are read whole.
        let learned = config.model.family == Family::Gpt2;
        let whole = learned && matches!(trained, Trained::Folder(_));
        let context = if whole { config.model.seq_len } else { context };
        let shape = GptShape {
            seq_len: context,
            micro_batch: 1,
            tp_size: 1,
            sequence: false,
            recompute: true,
            checkpoint_sets: 1,
            dtype: Dtype::F32,
            partial_dtype: Dtype::F32,
            dropout: 0.0,
            ..shape(config)
        };
        let mut plan = Plan::default();
        let gpt = Gpt::plan(&mut plan, &shape, 1);
        let at = (Arena::Device, "batches");
        let tokens = plan.tensor(at, "tokens", Dtype::I32, (1, context));
        let rank = Rank { tp: 0, tp_size: 1, dp: 0, dp_size: 1 };
        let options = CpuOptions {
            lanes: Lanes::Inline,
            memory_limit: u64::MAX,
            host: device::HostPlace::default(),
            scratch: scratch_floats(&shape),
            work: HostWork { crew: kernel_crew(cores(), None), ..HostWork::default() },
        };
        let world = World::new(1, 1, Duration::from_secs(60));
        let dev = cpu::open(rank, &Arc::new(plan), &world, &options)?;
        gpt.write_constants(&dev)?;
        match trained {
            Trained::Weights(path) => load(&dev, &gpt, path)?,
            Trained::Checkpoint(from) => load_checkpoint(&dev, &gpt, from)?,
            Trained::Folder(from) => {
                let from = Pretrained::new(Folder::open(from)?, &gpt)?;
                let source = from.of_rank(&gpt, dev.rank());
                for segment in 0..gpt.num_segments() {
                    let mut values = vec![0.0; gpt.segments()[segment].len];
                    source.fill(segment, 0, &mut values)?;
                    let flat = gpt.params(segment).slice(0..values.len());
                    dev.write(flat, &|i| f64::from(values[i]))?;
                }
            }
        }
        Ok(Self { dev, gpt, tokens, context })
    }

    /// Logits of the token after `tokens` (1..=context of them).
    fn next(&self, tokens: &[i32]) -> Result<Vec<f64>, GenerateError> {
        let all = self.tokens;
        self.dev.write(all, &|i| tokens.get(i).map_or(0.0, |token| f64::from(*token)))?;
        let pass = Pass { dropout_key: 0, first_token: 0, training: false, set: 0 };
        // Only a loss reads targets, and only a backward pass the order.
        let batch = BatchTensors { tokens: all, targets: all, order: all };
        self.gpt.embed(&self.dev, &pass, &batch);
        for layer in 0..self.gpt.shape().layers {
            self.gpt.block_forward(&self.dev, &pass, layer);
        }
        let row = tokens.len() - 1;
        self.gpt.project(&self.dev, &pass, row..row + 1);
        self.dev.sync(self.dev.record(Lane::Compute))?;
        let mut logits = vec![0.0; self.gpt.shape().vocab_per_rank()];
        self.dev.read(self.gpt.logits().rows(0..1), &mut logits)?;
        logits.truncate(self.gpt.shape().vocab);
        Ok(logits)
    }
}

/// Reads every parameter of `gpt` from a safetensors file; of one with more rows, the first ones.
fn load(dev: &Device, gpt: &Gpt, path: &Path) -> Result<(), GenerateError> {
    let unreadable = |source| GenerateError::Read { path: path.to_owned(), source };
    let wrong = |problem: String| GenerateError::Weights { path: path.to_owned(), problem };
    let file = File::open(path).map_err(unreadable)?;
    let (header, metadata) = header(&file).map_err(unreadable)?.map_err(wrong)?;
    for (index, layout) in gpt.segments().iter().enumerate() {
        for param in &layout.params {
            let name = &param.name;
            let info =
                metadata.info(name).ok_or_else(|| wrong(format!("it has no tensor `{name}`")))?;
            let (rows, cols) = param.global;
            let fits = match info.shape[..] {
                [r] => r == rows && cols == 1,
                [r, c] => c == cols && (r == rows || (r > rows && name == "wpe")),
                _ => false,
            };
            if !fits || info.dtype != safetensors::Dtype::F32 {
                let found = format!("{:?} {:?}", info.dtype, info.shape);
                return Err(wrong(format!("`{name}` is {found}, not F32 [{rows}, {cols}]")));
            }
            let mut bytes = vec![0; 4 * rows * cols];
            let at = header + info.data_offsets.0 as u64;
            file.read_exact_at(&mut bytes, at).map_err(|e| match e.kind() {
                std::io::ErrorKind::UnexpectedEof => wrong("it is cut off".into()),
                _ => unreadable(e),
            })?;
            let value = |i: usize| {
                bytes
                    .get(4 * i..4 * i + 4)
                    .map_or(0.0, |b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]])))
            };
            dev.write(gpt.params(index).slice(param.range.clone()), &value)?;
        }
    }
    Ok(())
}

/// Reads every parameter of `gpt` from a checkpoint; of positions, the first ones.
fn load_checkpoint(dev: &Device, gpt: &Gpt, from: &Checkpoint) -> Result<(), GenerateError> {
    let wrong = |problem: String| GenerateError::Weights { path: from.path().to_owned(), problem };
    let tensors = from.tensors();
    for (index, layout) in gpt.segments().iter().enumerate() {
        for param in &layout.params {
            let (rows, cols) = param.global;
            let fits = |t: &TensorSummary| {
                let more = param.name == "wpe" && t.shape[0] > rows;
                t.name == param.name && t.shape[1] == cols && (t.shape[0] == rows || more)
            };
            let number = tensors.iter().position(fits);
            let absent = || wrong(format!("it has no `{}` [{rows}, {cols}]", param.name));
            let mut values = vec![0.0; rows * cols];
            from.reader()
                .read((number.ok_or_else(absent)?, 0), 0..values.len(), &mut values)
                .map_err(|e| wrong(e.to_string()))?;
            let flat = gpt.params(index).slice(param.range.clone());
            dev.write(flat, &|i| values.get(i).map_or(0.0, |x| f64::from(*x)))?;
        }
    }
    Ok(())
}

/// Where data starts in a safetensors file, and what is where.
fn header(file: &File) -> std::io::Result<Result<(u64, Metadata), String>> {
    let mut length = [0; 8];
    if let Err(e) = file.read_exact_at(&mut length, 0) {
        return cut_off(e);
    }
    let length = u64::from_le_bytes(length);
    if length > LONGEST_HEADER {
        return Ok(Err("not a safetensors file".into()));
    }
    let end = 8 + length;
    let mut bytes = vec![0; end as usize];
    if let Err(e) = file.read_exact_at(&mut bytes, 0) {
        return cut_off(e);
    }
    let parsed = serde_json::from_slice(&bytes[8..]).map_err(|e| e.to_string());
    Ok(parsed.map(|metadata| (end, metadata)))
}

/// A file that ends too soon is wrong; one that cannot be read is another matter.
fn cut_off<T>(error: std::io::Error) -> std::io::Result<Result<T, String>> {
    let wrong = error.kind() == std::io::ErrorKind::UnexpectedEof;
    if wrong { Ok(Err("it is cut off".into())) } else { Err(error) }
}

#[cfg(test)]
mod tests {
    use super::draw;

    #[test]
    fn draws_follow_the_probabilities() {
        let logits = [0.0, (3.0f64).ln(), f64::NEG_INFINITY];
        assert_eq!(draw(&logits, 1.0, 0.0), 0);
        assert_eq!(draw(&logits, 1.0, 0.24), 0);
        assert_eq!(draw(&logits, 1.0, 0.26), 1);
        assert_eq!(draw(&logits, 1.0, 0.999_999), 1);
        assert_eq!(draw(&logits, 0.5, 0.11), 1); // 1 : 9
        assert_eq!(draw(&logits, 0.0, 0.0), 1);
    }
}
