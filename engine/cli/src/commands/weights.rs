//! The folders of `model.from` and `adapter.from`: their weights, and the reasons for which `train` refuses
//! them.

use super::{CommandError, ConfigArgs, code, data};
use ::data::model_files::ModelFiles;
use ::data::progress::Progress;
use checkpoint::Checkpoint;
use checkpoint::hugging_face::{
    Folder, PretrainedWeights, check_adapters, not_in_peft, read_adapters,
};
use config::{Adapter, Config, ConfigError, DeviceConfig, LoadedConfig, Trouble, ValidKeys};
use config::{Further, load_and_look};
use device::Plan;
use files::path_text::{PathText, ShownPath};
use layout::LocalMachine;
use layout::build::shape;
use std::cell::Cell;
use std::path::Path;
use std::sync::Arc;
use tensor_parallel::Decoder;

/// Weights of the folder, if training starts from them.
pub(super) fn pretrained(
    config: &Config,
    gpt: &Decoder,
) -> Result<Option<Arc<PretrainedWeights>>, CommandError> {
    let Some(folder) = opened(config)? else { return Ok(None) };
    Ok(Some(Arc::new(PretrainedWeights::new(folder, gpt)?)))
}

/// As [`pretrained`], for a run that starts; checkpoints without frozen weights name the folder by its hash.
pub(super) fn of_start(
    config: &Config,
    gpt: &Decoder,
    progress: &dyn Progress,
) -> Result<Option<Arc<PretrainedWeights>>, CommandError> {
    let found = pretrained(config, gpt)?;
    if let Some(found) = found.as_ref().filter(|_| gpt.shape().has_frozen_params()) {
        found.hash(progress)?;
    }
    Ok(found)
}

/// Adapters of the folder of PEFT from which a run starts; `None` if it starts from random ones.
///
/// # Errors
/// The folder cannot be read, or has adapters of another model.
pub(super) fn factors(
    config: &Config,
    gpt: &Decoder,
) -> Result<Option<Arc<engine::run::Weights>>, CommandError> {
    let Adapter::Lora { from: Some(from), .. } = &config.adapter else { return Ok(None) };
    Ok(Some(Arc::new(read_adapters(Path::new(from), &config.model, gpt)?)))
}

/// Option of a command that names the folder of frozen weights.
pub(super) const BY_OPTION: &str = "--base DIR";
/// Setting that names the folder of the frozen weights of a resumed run.
pub(super) const BY_KEY: &str = "--set model.from=DIR";

/// Weights that have the frozen ones of the run of checkpoint `of`; `None` if it has none.
/// `elsewhere` names another folder of them to the command.
///
/// # Errors
/// The folder of `model.from` cannot be read, or has other weights than at the start of the run.
pub(super) fn base(
    config: &Config,
    gpt: &Decoder,
    of: &Checkpoint,
    elsewhere: &str,
    progress: &dyn Progress,
) -> Result<Option<Arc<PretrainedWeights>>, CommandError> {
    if !gpt.shape().has_frozen_params() {
        return Ok(None);
    }
    let stored = of.manifest().base.as_ref();
    let found = pretrained(config, gpt).map_err(|unread| {
        let of = of.path().shown();
        unread.and(&format!(
            "the folder has the frozen weights of {of}; {elsewhere} names it at another place"
        ))
    })?;
    let Some(found) = found else {
        let why = "model.from: the frozen weights of the run are in a folder, and the key is None; set it to the folder";
        return match stored {
            None => Ok(None),
            Some(_) => Err(CommandError::new(code::CONFIG, why)),
        };
    };
    if stored != Some(found.hash(progress)?) {
        let why = format!(
            "{}: these are not the frozen weights of {}: bring the folder back as it was, or name another by {elsewhere}",
            PathText(found.path()),
            of.path().shown()
        );
        return Err(CommandError::new(code::CHECKPOINT, why));
    }
    Ok(Some(found))
}

fn opened(config: &Config) -> Result<Option<Folder>, CommandError> {
    let Some(from) = config.model.pretrained() else { return Ok(None) };
    if Path::new(from).is_file() {
        let why = "it names a file, and weights stand beside it: name the folder, or set `model.weights=Random`";
        return Err(CommandError::new(code::CONFIG, why));
    }
    Ok(Some(Folder::open(Path::new(from))?))
}

/// Reason why `train` would refuse the folder; `None` for a described box, since it does not train.
/// If the config is not `valid`, no model can be laid out, so tensors are not compared.
pub(super) fn refusal(config: &Config, valid: bool) -> Option<CommandError> {
    let from = config.model.from.as_ref()?;
    let look = || {
        match valid {
            true => pretrained(config, &Decoder::plan(&mut Plan::default(), &shape(config), 1))
                .map(drop),
            false => opened(config).map(drop),
        }?;
        Ok(ModelFiles::open(Path::new(from)).map(drop)?)
    };
    let trains = !matches!(config.device, DeviceConfig::Sim { .. });
    trains.then(look)?.err()
}

/// Reason why `train` would refuse the adapters of the folder that a valid config names; `None` for a
/// described box. Their numbers are not read.
pub(super) fn refusal_of_adapters(config: &Config) -> Option<CommandError> {
    let Adapter::Lora { from: Some(from), .. } = &config.adapter else { return None };
    if matches!(config.device, DeviceConfig::Sim { .. }) {
        return None;
    }
    let decoder = Decoder::plan(&mut Plan::default(), &shape(config), 1);
    check_adapters(Path::new(from), &config.model, &decoder).err().map(CommandError::from)
}

/// Warnings and notes about the weights from which a run starts.
pub(super) fn warnings(loaded: &LoadedConfig) -> Vec<String> {
    let config = &loaded.config;
    let random = config.random_frozen_weights().map(str::to_owned);
    let all = config.unusual_rate().into_iter().chain(random).chain(loaded.warnings.clone());
    let mut all: Vec<String> = all.map(|warning| format!("warning: {warning}")).collect();
    if config.adapter != Adapter::None {
        let decoder = Decoder::plan(&mut Plan::default(), &shape(config), 1);
        all.extend(not_in_peft(&config.model, &decoder).map(|why| {
            format!("note: adapter: `checkpoint export --to peft` refuses these adapters: {why}; `--to safetensors --merge` exports the whole model")
        }));
    }
    all
}

/// Loads a config. If training starts from the config's folder (`starts`), a refused folder is an
/// error. `of_run`: config of the resumed run, if there is one. `more` finds further errors.
///
/// # Errors
/// All errors, and the exit code.
pub(super) fn load(
    args: &ConfigArgs,
    machine: &LocalMachine,
    starts: bool,
    of_run: Option<&Path>,
    more: &Trouble<'_>,
) -> Result<LoadedConfig, (u8, ConfigError)> {
    let of_folder = Cell::new(None);
    let look = |config: &Config, valid: &ValidKeys<'_>| {
        let applies = starts && valid.has(&["model.from", "model.weights", "device"]);
        let refused = applies.then(|| refusal(config, valid.is_all())).flatten();
        let Some(refused) = refused else {
            let mut all = more(config, valid);
            let of_peft = (starts && valid.is_all()).then(|| refusal_of_adapters(config));
            if let Some(refused) = of_peft.flatten() {
                of_folder.set(Some(refused.code));
                all.push(("adapter.from", refused.message, String::new()));
            }
            return all;
        };
        of_folder.set(Some(refused.code));
        let mut all = vec![("model.from", refused.message, String::new())];
        // If the tokenizer is in the refused folder, the data cannot be checked.
        let (from, tokenizer) = (&config.model.from, &config.data.tokenizer);
        if !from.iter().zip(tokenizer).any(|(from, of)| Path::new(of).starts_with(from)) {
            all.extend(more(config, valid));
        }
        all
    };
    let of_machine = |config: &Config| machine.broken(config);
    let further = Further { trouble: &look, of_machine: &of_machine, searched: false, of_run };
    load_and_look(&args.config, &args.sets, &further).map_err(|errors| {
        // If all errors are about named files, the exit code is that of a refused file.
        let named =
            |key: &str| ["model.from", "adapter.from"].contains(&key) || data::KEYS.contains(&key);
        let of_files = errors.errors().iter().all(|e| e.help.is_empty() && named(&e.key));
        let code = if of_files { of_folder.get().unwrap_or(code::DATA) } else { code::CONFIG };
        (code, errors)
    })
}
