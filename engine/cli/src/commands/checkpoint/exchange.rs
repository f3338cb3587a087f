//! `onebox checkpoint export` and `import`: exchange of models with Hugging Face's transformers.

use super::super::data::ReadOptions;
use super::super::{
    CommandError, ConfigArgs, check_built, code, data, quoted_path, say, set_arguments,
    text_for_config, weights,
};
use super::{ChoiceArgs, NewRun, run_of};
use crate::report::reading::TerminalProgress;
use crate::report::stage::Stage;
use ::data::Tokenizer;
use ::data::byte_tokenizer::is_of_bytes;
use ::data::model_files::{ModelFileError, ModelFiles};
use checkpoint::hugging_face::{
    ExportError, Folder, FolderError, ModelExport, Numbers, export, export_adapters, has_codes,
    import,
};
use config::tokenizers::tokenizer_file;
use config::{Adapter, LoadedConfig, Origin, Weights};
use files::names::{EXPERTS, TOKENIZER, UNTRAINED};
use files::path_text::{PathText, ShownPath};
use layout::LocalMachine;
use layout::build::lay_out;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Write the parameters of a checkpoint for other programs.
#[derive(Debug, clap::Args)]
pub(in crate::commands) struct ExportArgs {
    /// Checkpoint, or run directory for its best checkpoint (train.keep_best), else its newest
    path: PathBuf,
    /// Folder to create
    out: PathBuf,
    #[command(flatten)]
    choice: ChoiceArgs,
    /// Format: a folder of Hugging Face's transformers, or of PEFT
    #[arg(long, value_enum)]
    to: Format,
    /// Merge the adapters of the run into the weights of model.from
    #[arg(long)]
    merge: bool,
    /// Folder of the frozen weights of the run, if it is not at model.from any more. The checkpoint has
    /// their hash, and other weights are refused
    #[arg(long, value_name = "DIR")]
    base: Option<PathBuf>,
    /// Type of the numbers: 4 bytes or 2 bytes each
    #[arg(long, value_enum, default_value_t = Dtype::F32)]
    dtype: Dtype,
    /// Maximum size of a file with more than one tensor, such as 5GB
    #[arg(long, value_name = "SIZE", default_value = "5GB", value_parser = config::parse_bytes)]
    max_shard_size: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Format {
    /// config.json and safetensors files, for `AutoModelForCausalLM.from_pretrained`, with the
    /// model's original tokenizer and chat template
    Safetensors,
    /// adapter_config.json and adapter_model.safetensors, for `PeftModel.from_pretrained`
    Peft,
}

/// Type of the written numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Dtype {
    /// 4 bytes, as training keeps them
    #[value(name = "F32", alias = "f32")]
    F32,
    /// Rounded to bfloat16
    #[value(name = "Bf16", alias = "bf16")]
    Bf16,
}

/// Start a run from the weights of a folder of Hugging Face's transformers.
#[derive(Debug, clap::Args)]
pub(in crate::commands) struct ImportArgs {
    /// Folder with config.json and model.safetensors, or with several safetensors files and an
    /// index
    folder: PathBuf,
    /// New run directory, with a checkpoint of step 0
    out: PathBuf,
    #[command(flatten)]
    config: ConfigArgs,
}

pub(super) fn exported(args: &ExportArgs, machine: &LocalMachine) -> Result<(), CommandError> {
    let numbers = match args.dtype {
        Dtype::F32 => Numbers::F32,
        Dtype::Bf16 => Numbers::Bf16,
    };
    if args.to == Format::Peft && numbers == Numbers::Bf16 {
        let why = "--dtype Bf16: a folder of PEFT has the adapters in fp32; leave --dtype out";
        return Err(CommandError::new(code::CONFIG, why));
    }
    let from = args.choice.open(&args.path)?;
    let config = from.summary().config()?.config;
    let built = lay_out(&config, machine);
    from.check_model(&built.decoder)?;
    let tokenizer = data::tokenizer_of(run_of(&from), &config)?;
    let tokenizer = tokenizer.as_ref().map(Tokenizer::bytes);
    let model_files = ModelFiles::of_run(run_of(&from))?;
    let adapted = built.decoder.shape().adapters().is_some();
    let has_frozen = built.decoder.shape().has_frozen_params();
    let is_whole = args.to == Format::Safetensors;
    if args.base.is_some() && !(has_frozen && is_whole) {
        let why = "--base: the export needs no frozen weights of another folder: leave --base out";
        return Err(CommandError::new(code::CONFIG, why));
    }
    let base = match (args.to, args.merge, adapted) {
        (Format::Safetensors, merge, adapted) if has_frozen && merge == adapted => {
            let mut of_base = config.clone();
            // Random weights are in no folder.
            if let Some(base) = args.base.as_ref().filter(|_| from.manifest().base.is_some()) {
                of_base.model.from = Some(text_for_config(base)?.to_owned());
                of_base.model.weights = Weights::Pretrained;
            }
            let (decoder, option) = (&built.decoder, weights::BY_OPTION);
            let base = weights::base(&of_base, decoder, &from, option, &TerminalProgress)?;
            let Some(base) = base else {
                let why = "the frozen weights of the run are random, and in no folder: they cannot be exported";
                return Err(CommandError::new(code::CONFIG, why));
            };
            Some(base)
        }
        (Format::Safetensors, false, false) | (Format::Peft, false, true) => None,
        (_, merge, adapted) => {
            let why = match (merge, adapted) {
                (true, true) => {
                    "--merge: a folder of PEFT has the adapters alone; give --to safetensors with --merge, or leave --merge out"
                }
                (true, false) => "--merge: the run trained no adapters; leave --merge out",
                (false, true) => {
                    "the run trained adapters: give --to peft for the adapters alone, or --to safetensors --merge for the whole model"
                }
                (false, false) => {
                    "--to peft: the run trained no adapters, but all weights; give --to safetensors"
                }
            };
            return Err(CommandError::new(code::CONFIG, why));
        }
    };
    let source = ModelExport {
        base: base.as_deref(),
        checkpoint: &from,
        config: &config,
        built: &built,
        tokenizer,
        model_files: &model_files,
        numbers,
        max_file_bytes: args.max_shard_size,
        progress: &TerminalProgress,
    };
    let write = if args.to == Format::Peft { export_adapters } else { export };
    let files = write(&source, &args.out).map_err(|error| {
        let code = match &error {
            ExportError::From(_) | ExportError::To(_) => code::IO,
            ExportError::Exists(_) | ExportError::NotOurs(_) | ExportError::InUse(_) => {
                code::NO_RUN_DIR
            }
            ExportError::Unequal { .. } => code::INTERNAL,
        };
        CommandError::new(code, error)
    })?;
    say(&format!(
        "{}: the {} {} after step {}, read back bit for bit: {}",
        args.out.shown(),
        if numbers == Numbers::F32 { "fp32" } else { "bf16" },
        if args.to == Format::Peft { "adapters" } else { "parameters" },
        from.step(),
        files.join(", ")
    ));
    if model_files.get("config.json").is_some_and(has_codes) {
        say(
            "note: the experts of the folder that the run came from are codes of 4 bits (MXFP4); the export has numbers in their place, of 2 bytes with --dtype Bf16",
        );
    }
    Ok(())
}

pub(super) fn imported(args: &ImportArgs, machine: &LocalMachine) -> Result<(), CommandError> {
    let loaded = args.config.load(machine)?;
    let config = &loaded.config;
    check_built(&loaded, machine)?;
    if !config.optimizer.frozen.is_empty() {
        let why = "optimizer.frozen: `checkpoint import` makes a run that trains all weights of the folder. To freeze some of them, set \
                   model.from to the folder, and start with `onebox train`";
        return Err(CommandError::new(code::CONFIG, why));
    }
    if config.adapter != Adapter::None {
        let why = "adapter: `checkpoint import` makes a run that trains all weights of the folder. To train adapters over them, set model.from \
                   to the folder, and start with `onebox train`";
        return Err(CommandError::new(code::CONFIG, why));
    }
    let folder = Folder::open(&args.folder)?;
    let model_files = ModelFiles::open(&args.folder)?;
    refuse_bytes(&args.folder, &model_files, &loaded)?;
    let built = lay_out(config, machine);
    folder.check_model(&config.model, &built.decoder)?;
    let tokenizer = data::tokenizer(config)?;
    let opened = data::open(config, tokenizer.as_ref(), ReadOptions::default())?;
    let mut model_files = data::fitting(model_files, &args.folder, config, tokenizer.as_ref());
    if model_files.get("config.json").is_some()
        && let Some(untrained) = folder.untrained(&TerminalProgress)?
    {
        say(&format!(
            "note: {}: the run does not train {}; an export copies them from there",
            PathText(&args.folder),
            untrained.summary()
        ));
        model_files.add(UNTRAINED, untrained.encode());
    }
    if model_files.get("config.json").is_some()
        && let Some(experts) = folder.experts_file()
    {
        model_files.add(EXPERTS, experts);
    }
    let new = NewRun::create(&args.out, config, tokenizer.as_ref(), model_files, 1)?;
    let stage = Stage::begin("writing the checkpoint", 0);
    let sealed = import(&folder, config, &built, &opened, new.folder())?;
    drop(stage);
    let written = new.finish([sealed])?;
    if let Some(unusual) = loaded.config.unusual_rate_of_import() {
        say(&format!(
            "warning: {unusual} `model.from` takes such a folder with the settings of a fine-tune."
        ));
    }
    let (config, sets) = args.config.again(&args.out);
    say(&format!(
        "{}: the weights of {}, with moments of zero; train them:\n  onebox train {} --run-dir {} --resume{}",
        written.shown(),
        folder.path().shown(),
        quoted_path(&config),
        quoted_path(&args.out),
        set_arguments(sets)
    ));
    Ok(())
}

/// Refuses to train on bytes if the folder has a tokenizer and `data.tokenizer` is not set.
fn refuse_bytes(
    folder: &Path,
    files: &ModelFiles,
    LoadedConfig { config, origins, .. }: &LoadedConfig,
) -> Result<(), CommandError> {
    let is_given = |(key, _, origin): &(String, String, Origin)| {
        key == "data.tokenizer" && *origin != Origin::Default
    };
    let bytes = config.data.format.is_bytes() && config.data.tokenizer.is_none();
    let of_tokens = |name: &&str| *name != TOKENIZER || !files.get(name).is_some_and(is_of_bytes);
    let found = tokenizer_file(folder).filter(of_tokens);
    match found.filter(|_| bytes && !origins.iter().any(is_given)) {
        None => Ok(()),
        Some(name) => {
            let folder = PathText(folder);
            let why = format!(
                "data.tokenizer: {folder} has {name}, so its weights know tokens, and the config makes none of text: set it to a tokenizer.json \
                 or to its folder, or to None for weights that were trained on bytes"
            );
            Err(CommandError::new(code::CONFIG, why))
        }
    }
}

impl From<FolderError> for CommandError {
    fn from(error: FolderError) -> Self {
        let code = match error {
            FolderError::File(error) => return error.into(),
            FolderError::Write { .. } => code::IO,
            FolderError::OtherModel { .. } => code::CONFIG,
            FolderError::Rewrite(error) => return error.into(),
        };
        Self::new(code, error)
    }
}

impl From<ModelFileError> for CommandError {
    fn from(error: ModelFileError) -> Self {
        let code = match &error {
            ModelFileError::Read { source, .. } if source.kind() != ErrorKind::NotFound => code::IO,
            ModelFileError::Read { .. } | ModelFileError::Refused { .. } => code::DATA,
        };
        Self::new(code, error)
    }
}
