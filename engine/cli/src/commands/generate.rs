//! `onebox generate`: writes text with a trained model.

mod conversation;
mod turns;

use super::checkpoint::{ChoiceArgs, run_of};
use super::signals::Interrupt;
use super::{CommandError, Failable, code, data, print, say, seen, text_for_config};
use crate::generate::{
    BASE_ELSEWHERE, ComputeDevice, End, GenerateError, ModelSource, Piece, Sampling, StopCondition,
    WeightSource, default_prompt, generate, next_logits,
};
use crate::report::reading::TerminalProgress;
use ::data::chat::{Chat, Template, message, stop_tokens};
use ::data::model_files::ModelFiles;
use checkpoint::inspect::{best_of, checkpoints_of};
use checkpoint::{Checkpoint, CheckpointError};
use config::{Config, DeviceConfig, LoadedConfig, Precision, load_of_run, load_str};
use files::input;
use files::names::{CONFIG, KEPT, TOKENIZER, WEIGHTS};
use files::path_text::ShownPath;
use layout::LocalMachine;
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use topology::format_bytes;

/// Write text with a trained model.
#[derive(Debug, clap::Args)]
pub(super) struct GenerateArgs {
    /// Run directory, checkpoint, or folder of a Hugging Face transformers model. Of a run with
    /// train.keep_best, the best checkpoint
    run: PathBuf,
    #[command(flatten)]
    choice: ChoiceArgs,
    /// Folder of the frozen weights of the run, if it is not at model.from any more. The
    /// run has their hash, and other weights are refused
    #[arg(long, value_name = "DIR")]
    base: Option<PathBuf>,
    /// Device, if not that of the run: device=Cpu (the cores) or device=Cuda (one GPU). Number
    /// type: precision=Fp32, Bf16 or Fp16
    #[arg(long, value_name = "KEY=VALUE", value_parser = setting)]
    set: Vec<Setting>,
    /// Start of the text; token numbers for a model of token files. Several prompts give several
    /// texts, which are computed together
    /// [default: a line end]
    #[arg(long, value_name = "TEXT", group = "start")]
    prompt: Vec<String>,
    /// File with the start of the text; the end of its last line is left out. `-` is the standard
    /// input
    #[arg(long, value_name = "FILE", group = "start")]
    prompt_file: Vec<PathBuf>,
    /// Use prompts as the user's messages in the model's chat template; print only the answers.
    /// Without a prompt: keep a conversation, in which each line of the standard input is a message
    #[arg(long)]
    chat: bool,
    /// With --chat: the system message before the user's message
    #[arg(long, value_name = "TEXT", requires = "chat")]
    system: Option<String>,
    /// With --chat: a variable of the template, such as enable_thinking=false. A VALUE that is not
    /// JSON is a text
    #[arg(long, value_name = "NAME=VALUE", requires = "chat", value_parser = variable)]
    template_var: Vec<(String, serde_json::Value)>,
    /// In a conversation: the maximum number of tokens of the messages, at most model.seq_len
    /// [default: model.seq_len, at most 8192]
    #[arg(long, value_name = "N", requires = "chat", conflicts_with = "start", value_parser = clap::value_parser!(u32).range(2..))]
    context: Option<u32>,
    /// Maximum number of tokens to draw for each prompt [default: 200; in a conversation, as many as
    /// --context allows]
    #[arg(long)]
    tokens: Option<usize>,
    /// Sampling temperature; with 0, always the likeliest token
    #[arg(long, default_value_t = 0.8, value_parser = temperature, allow_negative_numbers = true)]
    temperature: f64,
    /// Draw among the N likeliest tokens
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    top_k: Option<u32>,
    /// Draw among the likeliest tokens that together have probability P
    #[arg(long, value_name = "P", default_value_t = 1.0, value_parser = probability, allow_negative_numbers = true)]
    top_p: f64,
    /// End a text before TEXT. The end tokens of the model's folder always end a text
    #[arg(long, value_name = "TEXT", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    stop: Vec<String>,
    /// Print a JSON object for each prompt, in the order of the prompts, when all are done or Ctrl-C
    /// has stopped them
    #[arg(long)]
    json: bool,
    /// Seed of the drawing; the same seed draws the same text
    #[arg(long, default_value_t = 1337)]
    seed: u64,
    /// Print the logits of the token after the prompt, as JSON, and draw nothing
    #[arg(long, conflicts_with_all = ["chat", "json"])]
    logits: bool,
}

/// A setting that `--set` changes.
#[derive(Clone, Copy, Debug)]
enum Setting {
    Device(ComputeDevice),
    Precision(Precision),
}

/// Accepted texts of `--set` with their settings.
const SETTINGS: [(&str, Setting); 5] = [
    ("device=Cpu", Setting::Device(ComputeDevice::Cores)),
    ("device=Cuda", Setting::Device(ComputeDevice::Gpu)),
    ("precision=Fp32", Setting::Precision(Precision::Fp32)),
    ("precision=Bf16", Setting::Precision(Precision::Bf16)),
    ("precision=Fp16", Setting::Precision(Precision::Fp16)),
];

fn setting(text: &str) -> Result<Setting, String> {
    let found = SETTINGS.iter().find(|(name, _)| *name == text);
    found.map(|(_, setting)| *setting).ok_or_else(|| {
        let all = SETTINGS.map(|(name, _)| name).join(", ");
        format!("generate takes {all}; everything else is the model's")
    })
}

/// Parses `NAME=VALUE`, a variable of a chat template.
fn variable(text: &str) -> Result<(String, serde_json::Value), String> {
    let (name, value) = text.split_once('=').ok_or("NAME=VALUE is expected")?;
    // As texts, these values would all count as true.
    if let Some((_, json)) = PYTHON.iter().find(|(python, _)| *python == value) {
        return Err(format!("`{value}` is Python's; write `{json}`"));
    }
    let value = serde_json::from_str(value).unwrap_or_else(|_| value.into());
    Ok((name.to_owned(), value))
}

/// Python's values with their JSON forms.
const PYTHON: [(&str, &str); 3] = [("True", "true"), ("False", "false"), ("None", "null")];

/// Default for the maximum number of tokens of a text.
const TOKENS: usize = 200;

/// Maximum bytes of a prompt file: a hundred times the longest context of a model.
const LONGEST_PROMPT: u64 = 64 << 20;

fn prompt_in(path: &Path) -> Result<String, CommandError> {
    let most = LONGEST_PROMPT;
    let read = match path == Path::new("-") {
        true => input::whole(io::stdin().lock(), most),
        false => input::stream(path).and_then(|file| input::whole(file, most)),
    };
    let of = format!("--prompt-file {}", path.shown());
    let bytes = match read {
        Err(error) if error.kind() == ErrorKind::FileTooLarge => {
            let most = format_bytes(most);
            let why = format!("{of}: it has more than {most}, and no model reads as much");
            return Err(CommandError::new(code::DATA, why));
        }
        read => read.map_err(|e| format!("{of}: it cannot be read: {e}")).fail_with(code::IO)?,
    };
    let text = String::from_utf8(bytes);
    let text = text.map_err(|e| format!("{of}: it is not UTF-8: {}", e.utf8_error()));
    let mut text = text.fail_with(code::DATA)?;
    // An editor ends the last line; that line end is not part of the prompt.
    let end = text.strip_suffix("\n").map(|text| text.strip_suffix('\r').unwrap_or(text).len());
    text.truncate(end.unwrap_or(text.len()));
    Ok(text)
}

/// Opens the checkpoint of a run that has no weights, or whose checkpoint is asked for.
fn open_checkpoint(args: &GenerateArgs, lacks: &str) -> Result<Checkpoint, CommandError> {
    let opened = args.choice.open(&args.run);
    opened.map_err(|error| match best_in(&args.run) {
        // The run lacks both.
        Ok((false, _)) if args.choice.is_default() => {
            let why = format!("{} {lacks}, and no checkpoint: {}", args.run.shown(), error.message);
            CommandError::new(code::DATA, why)
        }
        Ok(_) | Err(_) => error,
    })
}

/// Whether the run in `dir` has kept its best checkpoint, and the faults of records that do not
/// tell. A run without checkpoints has kept none.
///
/// # Errors
/// The folder of the checkpoints, or a record in it, cannot be read.
fn best_in(dir: &Path) -> Result<(bool, Vec<CheckpointError>), CheckpointError> {
    let all = match checkpoints_of(dir) {
        Err(CheckpointError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => {
            return Ok((false, Vec::new()));
        }
        all => all?,
    };
    best_of(&all).map(|(best, faults)| (best.is_some(), faults))
}

/// Whether a run with weights of its end has a better checkpoint. Warns if its records are damaged.
fn has_best(dir: &Path) -> Result<bool, CommandError> {
    let (is_kept, faults) = best_in(dir)?;
    if !is_kept {
        faults.iter().for_each(|why| say(&format!("warning: {why}")));
    }
    Ok(is_kept)
}

fn temperature(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(t) if (0.0..=10.0).contains(&t) => Ok(t),
        _ => Err("a number from 0 to 10 is expected".into()),
    }
}

fn probability(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(p) if p > 0.0 && p <= 1.0 => Ok(p),
        _ => Err("a number above 0, at most 1, is expected".into()),
    }
}

/// Builds the config for a folder of transformers.
fn config_of(folder: &Path) -> Result<LoadedConfig, CommandError> {
    let absolute = folder.canonicalize();
    let absolute = absolute.map_err(|e| format!("cannot read {}: {e}", folder.shown()));
    let absolute = absolute.fail_with(code::DATA)?;
    let format = if folder.join(TOKENIZER).is_file() { "Auto" } else { "U32" };
    let text = format!(
        "(model: (from: {:?}), data: (format: {format}), train: (steps: 1))",
        text_for_config(&absolute)?
    );
    load_str(&text, &folder.shown().to_string(), Path::new(""), &[]).fail_with(code::CONFIG)
}

pub(super) fn run(args: &GenerateArgs, machine: &LocalMachine) -> Result<(), CommandError> {
    if args.run.join("config.json").is_file() && !args.run.join(CONFIG).exists() {
        if !args.choice.is_default() {
            let why = format!(
                "{}: it is the folder of a model, which has no steps: leave out --last and --step",
                args.run.shown()
            );
            return Err(CommandError::new(code::USAGE, why));
        }
        let loaded = config_of(&args.run)?;
        let tokenizer = data::tokenizer(&loaded.config)?;
        let trained = WeightSource::Folder(&args.run);
        let model = ModelSource::on_cores(trained, tokenizer.as_ref(), machine);
        let (model_files, place) = (ModelFiles::open(&args.run)?, args.run.clone());
        return draw(args, &loaded.config, &LoadedModel { model, model_files, place });
    }
    let (config, weights) = (args.run.join(CONFIG), args.run.join(WEIGHTS));
    let (loaded, checkpoint) = if config.is_file() {
        let loaded = load_of_run(&config).fail_with(code::CONFIG)?;
        let lacks = format!("has no {WEIGHTS}, which a run writes when it ends");
        let choice = &args.choice;
        let takes_checkpoint =
            choice.is_step() || !weights.exists() || choice.is_default() && has_best(&args.run)?;
        let checkpoint = takes_checkpoint.then(|| open_checkpoint(args, &lacks)).transpose()?;
        if checkpoint.is_none() {
            say(&format!("{}: the parameters of the end of the run", weights.shown()));
        }
        (loaded, checkpoint)
    } else if config.symlink_metadata().is_ok() {
        return Err(CommandError::new(code::DATA, format!("{} is not a file", config.shown())));
    } else {
        let lacks = format!("is not a run directory (it has no {CONFIG}; see runs/)");
        let found = open_checkpoint(args, &lacks)?;
        let stored = found.summary().config();
        (stored.fail_with(code::CHECKPOINT)?, Some(found))
    };
    let run = match &checkpoint {
        Some(checkpoint) if !config.is_file() => run_of(checkpoint),
        _ => &args.run,
    };
    let tokenizer = data::tokenizer_of(run, &loaded.config)?;
    let trained =
        checkpoint.as_ref().map_or(WeightSource::Weights(&weights), WeightSource::Checkpoint);
    let model = ModelSource::on_cores(trained, tokenizer.as_ref(), machine);
    let (model_files, place) = (ModelFiles::of_run(run)?, run.join(KEPT));
    draw(args, &loaded.config, &LoadedModel { model, model_files, place })
}

/// A model and the files of its folder.
struct LoadedModel<'a> {
    /// Source of the model, set to the cores and fp32.
    model: ModelSource<'a>,
    model_files: ModelFiles,
    /// Folder of the files in `model_files`.
    place: PathBuf,
}

impl LoadedModel<'_> {
    /// Error about an unusable file of the model's folder.
    fn unusable(&self, why: &str) -> CommandError {
        CommandError::new(code::DATA, format!("{}: {why}", self.place.shown()))
    }
}

/// Draws and prints the texts, or prints the logits if `--logits` is set.
fn draw(args: &GenerateArgs, config: &Config, from: &LoadedModel<'_>) -> Result<(), CommandError> {
    let mut model = from.model;
    model.progress = &TerminalProgress;
    model.base = args.base.as_deref();
    if config.device == DeviceConfig::Cuda {
        model.device = ComputeDevice::Gpu;
    }
    // If a setting occurs twice, the last one counts.
    for setting in &args.set {
        match *setting {
            Setting::Device(on) => model.device = on,
            Setting::Precision(precision) => model.precision = precision,
        }
    }
    if args.chat && args.prompt.is_empty() && args.prompt_file.is_empty() {
        return conversation::run(args, config, from, &model);
    }
    let asked = match (&args.prompt[..], &args.prompt_file[..]) {
        ([], []) => vec!["\n".to_owned()],
        (prompts, []) => prompts.to_vec(),
        (_, files) => files.iter().map(|path| prompt_in(path)).collect::<Result<_, _>>()?,
    };
    if args.logits {
        let [prompt] = &asked[..] else {
            return Err(CommandError::new(code::USAGE, "--logits takes one --prompt"));
        };
        let prompt = default_prompt(config, model.tokenizer, prompt);
        let logits = next_logits(config, &model, &prompt)?;
        return print(&format!("{}\n", serde_json::json!({ "logits": logits })));
    }
    let (prompts, sampling) = (texts_of(args, config, from, &asked)?, sampling(args, from)?);
    let all = vec![TextProgress::default(); prompts.len()];
    let mut texts = Texts { all, shown: !args.json, at: (0, 0), unseen: None };
    let mut interrupt: Option<io::Result<Interrupt>> = None;
    let mut emit = |i: usize, piece: Piece<'_>| {
        let goes_on = texts.take(i, piece);
        // Without --json, a Ctrl-C ends the process, which has printed the text so far.
        goes_on && (!args.json || !is_interrupted(interrupt.get_or_insert_with(Interrupt::hear)))
    };
    let drawn = generate(config, &model, &prompts, &sampling, &mut emit)?;
    texts.unseen.map_or(Ok(()), Err)?;
    if let Some(Err(error)) = interrupt {
        return Err(CommandError::new(code::INTERNAL, error));
    }
    if !args.json {
        return Ok(());
    }
    let mut is_complete = true;
    for ((prompt, mut text), tokens) in asked.iter().zip(texts.all).zip(drawn) {
        if text.end.is_none() {
            (text.tokens, is_complete) = (tokens, false);
        }
        print_text(prompt, &text)?;
    }
    if is_complete { Ok(()) } else { Err(CommandError::silent(code::ABORTED)) }
}

/// Whether the texts end now: a Ctrl-C came, or nothing can listen for one.
fn is_interrupted(heard: &io::Result<Interrupt>) -> bool {
    heard.as_ref().map_or(true, Interrupt::came)
}

/// Settings of sampling in the arguments.
fn sampling(args: &GenerateArgs, from: &LoadedModel<'_>) -> Result<Sampling, CommandError> {
    let tokens = stop_tokens(&from.model_files);
    Ok(Sampling {
        tokens: args.tokens.unwrap_or(TOKENS),
        temperature: args.temperature,
        top_k: args.top_k.map(|k| k as usize),
        top_p: args.top_p,
        seed: args.seed,
        stop: StopCondition {
            tokens: tokens.map_err(|why| from.unusable(&why))?,
            texts: args.stop.iter().map(|text| text.clone().into_bytes()).collect(),
        },
        echo: !args.chat,
        special: !args.chat && matches!(from.model.weights, WeightSource::Folder(_)),
    })
}

/// Prints a prompt and its text as a JSON object on one line. A text without an end was interrupted.
fn print_text(prompt: &str, text: &TextProgress) -> Result<(), CommandError> {
    let written = String::from_utf8_lossy(&text.bytes);
    let end = text.end.map_or_else(|| "interrupted".into(), |end| serde_json::json!(end));
    let tokens = &text.tokens;
    let json =
        serde_json::json!({ "prompt": prompt, "text": written, "tokens": tokens, "end": end });
    print(&format!("{json}\n"))
}

/// Chat template of the model, with the variables in the arguments.
fn template(args: &GenerateArgs, from: &LoadedModel<'_>) -> Result<Template, CommandError> {
    if from.model.tokenizer.is_none() {
        let why = "--chat needs a model whose text goes through a tokenizer: leave it out";
        return Err(CommandError::new(code::DATA, why));
    }
    let template = Template::of(&from.model_files).and_then(|t| t.with(&args.template_var));
    let template = template.map_err(|why| from.unusable(&why))?;
    if let Some(left_out) = from.model_files.left_out() {
        say(&format!("note: {}: {left_out}", from.place.shown()));
    }
    Ok(template)
}

/// Converts the prompts to the texts that the model reads.
fn texts_of(
    args: &GenerateArgs,
    config: &Config,
    from: &LoadedModel<'_>,
    prompts: &[String],
) -> Result<Vec<String>, CommandError> {
    if !args.chat {
        let text = |prompt: &String| default_prompt(config, from.model.tokenizer, prompt);
        return Ok(prompts.iter().map(text).collect());
    }
    let template = template(args, from)?;
    let text = |prompt: &String| {
        let system = args.system.iter().map(|text| message("system", text));
        let messages: Vec<_> = system.chain([message("user", prompt)]).collect();
        template.text(Chat::of(&messages), true).map_err(|why| from.unusable(&why))
    };
    prompts.iter().map(text).collect()
}

/// State of all texts. Shown texts are printed in the order of their prompts, as early as possible.
struct Texts {
    all: Vec<TextProgress>,
    shown: bool,
    /// Index of the text that is being printed, and the number of its bytes printed so far.
    at: (usize, usize),
    unseen: Option<CommandError>,
}

#[derive(Clone, Default)]
struct TextProgress {
    bytes: Vec<u8>,
    end: Option<End>,
    tokens: Vec<i32>,
}

impl Texts {
    /// Adds a piece to text `i` and prints what is ready. Returns whether to continue.
    fn take(&mut self, i: usize, piece: Piece<'_>) -> bool {
        match piece {
            Piece::Prompt(_) if !self.shown => {}
            Piece::Prompt(bytes) | Piece::Text(bytes) => self.all[i].bytes.extend_from_slice(bytes),
            Piece::End(end, tokens) => {
                self.all[i].end = Some(end);
                self.all[i].tokens = tokens.to_vec();
            }
        }
        if !self.shown {
            return true;
        }
        let mut out = Vec::new();
        while let Some(text) = self.all.get(self.at.0) {
            out.extend_from_slice(&text.bytes[self.at.1..]);
            self.at.1 = text.bytes.len();
            if text.end.is_none() {
                break;
            }
            out.push(b'\n');
            self.at = (self.at.0 + 1, 0);
        }
        let mut to = io::stdout().lock();
        seen(to.write_all(&out).and_then(|()| to.flush())).unwrap_or_else(|failed| {
            self.unseen = Some(failed);
            false
        })
    }
}

impl From<GenerateError> for CommandError {
    fn from(error: GenerateError) -> Self {
        let code = match error {
            GenerateError::Folder(error) => return error.into(),
            GenerateError::Base(error) => return Self::from(error).and(BASE_ELSEWHERE),
            GenerateError::NothingFrozen => code::CONFIG,
            GenerateError::Read { .. } => code::IO,
            GenerateError::Weights { .. } => code::DATA,
            GenerateError::OtherBase(_) | GenerateError::NoBase => code::CHECKPOINT,
            GenerateError::Memory { .. } => code::HOST_MEMORY,
            GenerateError::NoGpu(_)
            | GenerateError::NoBf16 { .. }
            | GenerateError::WideHeads(_) => code::CONFIG,
            GenerateError::GpuMemory(_) => code::DEVICE_MEMORY,
            GenerateError::Prompt(..) => code::USAGE,
            GenerateError::NotFinite(_) => code::NUMERIC,
            GenerateError::Device(ref error) => match error {
                device::Error::HostMemory { .. } => code::HOST_MEMORY,
                device::Error::OutOfMemory(_) => code::DEVICE_MEMORY,
                device::Error::Gpu { .. } | device::Error::GpuSetup { .. } => code::RANK,
                _ => code::INTERNAL,
            },
        };
        Self::new(code, error)
    }
}
