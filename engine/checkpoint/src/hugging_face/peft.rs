//! Folders of PEFT: a run starts from their adapters, and an export writes a checkpoint's adapters for
//! `PeftModel.from_pretrained`.

use super::export_error::ExportError;
use super::names::Names;
use super::numbers::Numbers;
use super::parameters::read;
use super::peft_tensors::{PeftTensor, tensors};
use super::tensors::widen;
use super::write::{ModelExport, cannot_write, in_new_folder, write_small};
use super::{FolderError, config_json};
use crate::Checkpoint;
use crate::header::{self, HeaderEntry};
use config::transformers::ModelClass;
use config::{Adapter, EXPERT_MATRICES, Family, ModelConfig};
use files::durable::create_new;
use files::foreign_text::foreign;
use files::hub::name_of_snapshot;
use files::input;
use files::names::{CONFIG_OF_ADAPTER, TOKENIZER, TOKENIZER_CONFIG, WEIGHTS_OF_ADAPTER};
use serde_json::{Map, json};
use std::collections::BTreeMap;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::Arc;
use tensor_parallel::{Decoder, DecoderShape};

/// Files of a tokenizer and its chat template, which a folder of PEFT may have.
const OF_TOKENIZER: [&str; 5] = [
    TOKENIZER,
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
];

/// Writes the adapters of a checkpoint as a new folder `out` of PEFT. Returns the names of its files.
///
/// # Errors
/// As [`export`](super::export), and for a checkpoint without adapters.
pub fn export_adapters(model: &ModelExport<'_>, out: &Path) -> Result<Vec<String>, ExportError> {
    let Adapter::Lora { rank, alpha, rank_stabilized, targets, .. } = &model.config.adapter else {
        let why = "the run has no adapters, which a folder of PEFT holds: export it with --to safetensors";
        return Err(FolderError::refused(model.checkpoint.path(), why).into());
    };
    let (family, shape) = (model.config.model.family, model.built.decoder.shape());
    let came = model.model_files.get(super::CONFIG);
    let described =
        config_json::description(&model.config.model, Numbers::F32.of_torch(), came, false);
    let class = described.map_err(|why| FolderError::refused(out, why))?.class;
    let decoder = &model.built.decoder;
    let tensors = tensors(names_in_peft(shape, class), decoder);
    if has_fused(&tensors) {
        let why = format!("{FUSED}. Export the merged model with --to safetensors --merge");
        return Err(FolderError::refused(model.checkpoint.path(), why).into());
    }
    // PEFT writes an empty name for a base that is in no folder, such as random weights.
    let from = model.config.model.pretrained().unwrap_or_default();
    let base = name_of_snapshot(Path::new(from)).unwrap_or_else(|| from.to_owned());
    let names = targets.names(&model.config.model);
    let (of_experts, linears): (Vec<&str>, Vec<&str>) =
        names.into_iter().partition(|name| EXPERT_MATRICES.contains(name));
    let mut config = json!({
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": family == Family::Gpt2,
        "inference_mode": true,
        "init_lora_weights": true,
        "lora_alpha": config::decimal(*alpha),
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": linears,
        "task_type": "CAUSAL_LM",
        "use_rslora": rank_stabilized,
    });
    if !of_experts.is_empty() {
        let names: Vec<String> = of_experts.iter().map(|name| format!("mlp.{name}")).collect();
        config["target_parameters"] = json!(names);
    }
    in_new_folder(out, |folder| {
        let mut files = vec![WEIGHTS_OF_ADAPTER.to_owned()];
        write_factors(model.checkpoint, &tensors, &folder.join(WEIGHTS_OF_ADAPTER))?;
        read_back(model, folder)?;
        let text = format!("{config:#}\n");
        write_small(folder, CONFIG_OF_ADAPTER, text.as_bytes(), &mut files)?;
        if let Some(bytes) = model.tokenizer {
            write_small(folder, TOKENIZER, bytes, &mut files)?;
        }
        for (name, bytes) in model.model_files.files() {
            if OF_TOKENIZER.contains(name) && !files.iter().any(|written| written == name) {
                write_small(folder, name, bytes, &mut files)?;
            }
        }
        Ok(files)
    })
}

/// Whether an adapter stands beside a part of a tensor of transformers.
fn has_fused(tensors: &[PeftTensor<'_>]) -> bool {
    tensors
        .iter()
        .any(|tensor| ["qkv_proj", "gate_up_proj"].iter().any(|fused| tensor.name.contains(fused)))
}

/// Names of the modules that PEFT wraps: the classes of transformers have fused experts, in whatever
/// form a folder has them.
fn names_in_peft(shape: &DecoderShape, class: ModelClass) -> Names {
    Names::of(shape, class, true)
}

/// Reads the factors as a run would that starts from them, and compares them with the checkpoint.
fn read_back(model: &ModelExport<'_>, folder: &Path) -> Result<(), ExportError> {
    let written = read_adapters(folder, &model.config.model, &model.built.decoder)?;
    let params = model.built.decoder.segments().iter().flat_map(|layout| &layout.params);
    for (number, param) in params.enumerate() {
        let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        if bits(&written[&param.name]) != bits(&read(model.checkpoint, number)?) {
            let (path, tensor) = (folder.to_owned(), param.name.clone());
            return Err(ExportError::Unequal { path, tensor });
        }
    }
    Ok(())
}

fn write_factors(
    from: &Checkpoint,
    tensors: &[PeftTensor<'_>],
    path: &Path,
) -> Result<(), ExportError> {
    let failed = cannot_write(path);
    let entry = |PeftTensor { name, shape: (rows, columns), .. }: &PeftTensor<'_>| HeaderEntry {
        name: name.clone(),
        dtype: Numbers::F32.name().into(),
        shape: vec![*rows, *columns],
        bytes: Numbers::F32.width() * (rows * columns) as u64,
    };
    let torch = Map::from_iter([("__metadata__".into(), json!({ "format": "pt" }))]);
    let file = create_new(path).map_err(&failed)?;
    let mut file = BufWriter::with_capacity(1 << 20, file);
    let header = header::of_entries(torch, tensors.iter().map(entry));
    file.write_all(&header).map_err(&failed)?;
    for tensor in tensors {
        let mut whole = vec![0.0; tensor.shape.0 * tensor.shape.1];
        for factor in &tensor.factors {
            factor.put(&read(from, factor.number)?, tensor, &mut whole);
        }
        let mut bytes = Vec::new();
        whole.into_iter().for_each(|x| Numbers::F32.write(x, &mut bytes));
        file.write_all(&bytes).map_err(&failed)?;
    }
    file.flush().and_then(|()| file.get_ref().sync_all()).map_err(&failed)?;
    Ok(())
}

/// Reason why a model has no folder of PEFT.
const FUSED: &str = "the class of the model has q, k and v in one tensor, and gate and up in one; onebox trains an adapter for each of them, \
                     and PEFT has no such adapters";
/// Bytes of the largest file of factors that is read.
const LONGEST: u64 = 16 << 30;

/// Reads the factors of the adapters of `decoder` from a folder of PEFT, by their names in onebox.
///
/// # Errors
/// A file cannot be read. A factor is missing, has another shape or type, has a number that is not
/// finite, or belongs to another model.
pub fn read_adapters(
    folder: &Path,
    model: &ModelConfig,
    decoder: &Decoder,
) -> Result<BTreeMap<String, Arc<[f32]>>, FolderError> {
    let path = folder.join(WEIGHTS_OF_ADAPTER);
    let refused = |why: String| FolderError::refused(&path, why);
    let bytes = input::bytes(&path, LONGEST).map_err(|error| refused(error.to_string()))?;
    let first = bytes.first_chunk().ok_or_else(|| refused("it is cut off".into()))?;
    let header = header::length(*first, bytes.len() as u64).map_err(refused)?;
    let entries = header::decode(&bytes[..header], bytes.len() as u64).map_err(refused)?;
    let class = config_json::description(model, Numbers::F32.of_torch(), None, false);
    let class = class.map_err(refused)?.class;
    let tensors = tensors(names_in_peft(decoder.shape(), class), decoder);
    if has_fused(&tensors) {
        return Err(refused(format!("{FUSED}. Start without `adapter.from`")));
    }
    let mut found = BTreeMap::new();
    for entry in entries {
        let name = entry.name.replace(".default.", ".");
        if found.contains_key(&name) {
            return Err(refused(format!("it has `{}` twice", foreign(name))));
        }
        found.insert(name, entry);
    }
    let mut factors = BTreeMap::new();
    for tensor in &tensors {
        let PeftTensor { name, shape: (rows, columns), .. } = tensor;
        let Some(entry) = found.remove(name) else {
            return Err(refused(format!("it has no `{name}`, which an adapter of this model has")));
        };
        let wanted = [*rows, *columns];
        if entry.shape != wanted || !["F32", "F16", "BF16"].contains(&entry.dtype.as_str()) {
            let (dtype, shape) = (&entry.dtype, &entry.shape);
            let why = format!("`{name}` is {dtype} {shape:?}, not F32, F16 or BF16 {wanted:?}");
            return Err(refused(why));
        }
        let mut values = vec![0.0; rows * columns];
        let start = entry.at as usize;
        let end = start + values.len() * entry.width() as usize;
        widen(&entry.dtype, &bytes[start..end], &mut values);
        if let Some(x) = values.iter().find(|x| !x.is_finite()) {
            return Err(refused(format!("`{name}` has a {x}")));
        }
        for factor in &tensor.factors {
            factors.insert(factor.param.name.clone(), factor.values(tensor, &values).into());
        }
    }
    match found.keys().next() {
        Some(strange) => {
            let strange = foreign(strange);
            Err(refused(format!("`{strange}` is no factor of an adapter of this model")))
        }
        None => Ok(factors),
    }
}
