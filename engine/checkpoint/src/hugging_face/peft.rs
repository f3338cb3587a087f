//! Folders of PEFT: a run starts from their adapters, and an export writes a checkpoint's adapters for
//! `PeftModel.from_pretrained`.

use super::export_error::ExportError;
use super::numbers::Numbers;
use super::parameters::read;
use super::peft_tensors::{PEFT_FACTORS, PREFIX, PeftTensor, tensors};
use super::tensors::widen;
use super::write::{ModelExport, cannot_write, in_new_folder, write_small};
use super::{FolderError, config_json};
use crate::Checkpoint;
use crate::header::{self, HeaderEntry, TensorEntry};
use config::transformers::{ModelClass, WrapperClass, folder_model};
use config::{Adapter, EXPERT_MATRICES, Family, ModelConfig};
use data::model_files::unreadable;
use files::durable::create_new;
use files::foreign_text::foreign;
use files::hub::name_of_snapshot;
use files::input;
use files::names::{CONFIG_OF_ADAPTER, TOKENIZER, TOKENIZER_CONFIG, UNTRAINED, WEIGHTS_OF_ADAPTER};
use layout::tensor_names::Names;
use serde_json::{Map, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufWriter, ErrorKind, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
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
    let Adapter::Lora { rank, alpha, rank_stabilized, targets, dropout, .. } =
        &model.config.adapter
    else {
        let why = "the run has no adapters, which a folder of PEFT holds: export it with --to safetensors";
        return Err(FolderError::refused(model.checkpoint.path(), why).into());
    };
    let (family, shape) = (model.config.model.family, model.built.decoder.shape());
    let came = model.model_files.get(super::CONFIG);
    let described =
        config_json::description(&model.config.model, Numbers::F32.of_torch(), came, false);
    let class = described.map_err(|why| FolderError::refused(out, why))?.class;
    let decoder = &model.built.decoder;
    let mut tensors = tensors(names_in_peft(shape, class), decoder);
    if has_fused(&tensors) {
        let why = format!(
            "PEFT cannot have the adapters of this run: {FUSED}. Export the merged model with --to safetensors --merge"
        );
        return Err(FolderError::refused(out, why).into());
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
        "lora_dropout": config::decimal(*dropout),
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
    // A run from random weights has a decoder alone.
    let has_parts = model.model_files.get(UNTRAINED).is_some();
    let wrapper = came.filter(|_| has_parts).and_then(|came| folder_model(came).ok()?.wrapper);
    if wrapper.is_some_and(loads_whole) {
        for tensor in &mut tensors {
            tensor.name = tensor.name.replacen(INNER, INNER_OF_WRAPPER, 1);
        }
        // Names of linears alone would name those of the other parts, too.
        let end = format!(".{}", PEFT_FACTORS[0]);
        let module = |tensor: &PeftTensor<'_>| {
            Some(tensor.name.strip_prefix(PREFIX)?.strip_suffix(&end)?.to_owned())
        };
        config["target_modules"] = json!(tensors.iter().filter_map(module).collect::<Vec<_>>());
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

/// Prefix in PEFT of the modules of a decoder, and of a decoder in a class with other parts, as versions 5
/// and 4 of transformers name them.
const INNER: &str = "base_model.model.model.";
const INNER_OF_WRAPPER: &str = "base_model.model.model.language_model.";
const INNER_OF_OLDER_WRAPPER: &str = "base_model.model.language_model.model.";

/// Whether transformers loads a folder of this class with its other parts for text, too: a Gemma 3 by
/// `AutoModelForCausalLM`, a Mistral 3 by `AutoModelForImageTextToText`. Of a Qwen3.5,
/// `AutoModelForCausalLM` loads the decoder alone.
const fn loads_whole(wrapper: WrapperClass) -> bool {
    match wrapper {
        WrapperClass::Gemma3 | WrapperClass::Mistral3 => true,
        WrapperClass::Qwen35 | WrapperClass::Qwen35Moe => false,
    }
}

/// Whether an adapter belongs to a part of a tensor of transformers.
fn has_fused(tensors: &[PeftTensor<'_>]) -> bool {
    tensors.iter().any(|tensor| FUSED_LINEARS.iter().any(|fused| tensor.name.contains(fused)))
}

/// Names of the modules that PEFT wraps. The classes of transformers have fused experts; the form of a
/// folder does not matter.
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
const FUSED: &str = "the class of the model has several linears in one tensor (q, k and v, or gate and up, of a Phi-3; `in_proj_qkv` and `in_proj_z`, or \
                     `in_proj_b` and `in_proj_a`, of a Qwen3-Next); onebox trains an adapter for each of them, and PEFT has no such adapters";
/// Names of tensors with several linears that have adapters of their own: those of Phi-3, then those of
/// Qwen3-Next.
const FUSED_LINEARS: [&str; 4] = ["qkv_proj", "gate_up_proj", "in_proj_qkvz", "in_proj_ba"];
/// Types of the numbers in a file of factors.
const TYPES: [&str; 3] = ["F32", "F16", "BF16"];

/// Why a folder of PEFT cannot hold the adapters of `decoder`; `None` if it can, or if the run has no
/// adapters.
pub fn not_in_peft(model: &ModelConfig, decoder: &Decoder) -> Option<&'static str> {
    decoder.shape().adapters()?;
    // The folder decides the class.
    let came = model.pretrained().and_then(|from| {
        let from = Path::new(from);
        let files = [from.join(super::CONFIG), from.to_owned()];
        files.iter().find_map(|path| input::bytes(path, config_json::LONGEST as u64).ok())
    });
    has_fused(&tensors_of(model, came.as_deref(), decoder).ok()?).then_some(FUSED)
}

/// The tensors of PEFT for the adapters of `decoder`, which has the layout of `model`. `came`: the
/// `config.json` of the folder of `model`, if it is known.
fn tensors_of<'a>(
    model: &ModelConfig,
    came: Option<&[u8]>,
    decoder: &'a Decoder,
) -> Result<Vec<PeftTensor<'a>>, String> {
    let described = config_json::description(model, Numbers::F32.of_torch(), came, false)?;
    Ok(tensors(names_in_peft(decoder.shape(), described.class), decoder))
}

/// The file of a folder of PEFT with the factors of a decoder's adapters. Its header is checked; its
/// numbers are not read yet.
struct FactorFile {
    path: PathBuf,
    file: File,
    /// Places of the tensors in the file, in their order.
    entries: Vec<TensorEntry>,
}

impl FactorFile {
    /// Opens the file of `folder`, which must have these tensors and no others.
    fn open(
        folder: &Path,
        tensors: &[PeftTensor<'_>],
        decoder: &Decoder,
    ) -> Result<Self, FolderError> {
        let rank = decoder.shape().adapters().map_or(0, |adapters| adapters.rank);
        let path = folder.join(WEIGHTS_OF_ADAPTER);
        let refused = |why: String| FolderError::refused(&path, why);
        if has_fused(tensors) {
            return Err(refused(format!("{FUSED}. Start without `adapter.from`")));
        }
        let file = input::open(&path).map_err(|error| unreadable(&path, error))?;
        let bytes = file.metadata().map_err(|error| unreadable(&path, error))?.len();
        let read = |to: &mut [u8]| {
            file.read_exact_at(to, 0).map_err(|error| match error.kind() {
                ErrorKind::UnexpectedEof => refused("it is cut off".into()),
                _ => unreadable(&path, error).into(),
            })
        };
        let mut first = [0; 8];
        read(&mut first)?;
        let mut header = vec![0; header::length(first, bytes).map_err(refused)?];
        read(&mut header)?;
        let mut found = BTreeMap::new();
        for entry in header::decode(&header, bytes).map_err(refused)? {
            let mut name = entry.name.replace(".default.", ".");
            for wrapper in [INNER_OF_WRAPPER, INNER_OF_OLDER_WRAPPER] {
                name = name.replacen(wrapper, INNER, 1);
            }
            if found.contains_key(&name) {
                return Err(refused(format!("it has `{}` twice", foreign(name))));
            }
            found.insert(name, entry);
        }
        let linears = linears_of(found.keys());
        let mut entries = Vec::new();
        for PeftTensor { name, shape: (rows, columns), .. } in tensors {
            let Some(entry) = found.remove(name) else {
                return Err(refused(format!(
                    "it has no `{name}`, which an adapter here has: set `adapter.targets` to linears of the file ({linears}), or leave it out; if it has these, the adapters are of another model than `model.from`"
                )));
            };
            let wanted = [*rows, *columns];
            if entry.shape != wanted {
                let shape = &entry.shape;
                let of_rank =
                    shape.len() == 2 && (0..2).all(|i| shape[i] == wanted[i] || wanted[i] == rank);
                let remedy = match of_rank {
                    true => "leave `adapter.rank` out",
                    false => {
                        "the adapters are of another model than `model.from`: name its folder there, or another folder in `adapter.from`"
                    }
                };
                return Err(refused(format!(
                    "`{name}` has the shape {shape:?}, and the adapter here has {wanted:?}: {remedy}"
                )));
            }
            if !TYPES.contains(&entry.dtype.as_str()) {
                let types = TYPES.join(", ");
                return Err(refused(format!(
                    "`{name}` has numbers of type {}, and onebox reads {types}: save the adapters in one of these",
                    foreign(&entry.dtype)
                )));
            }
            entries.push(entry);
        }
        if let Some(strange) = found.keys().next() {
            let strange = foreign(strange);
            return Err(refused(format!(
                "`{strange}` is no factor of an adapter here: leave `adapter.targets` out if it is set; otherwise the adapters are of another model than `model.from`, or of other linears"
            )));
        }
        Ok(Self { path, file, entries })
    }

    /// Reads the numbers of the factor at `entry`.
    fn read(&self, entry: &TensorEntry) -> Result<Vec<f32>, FolderError> {
        let mut values = vec![0.0; entry.shape.iter().product()];
        let mut bytes = vec![0; values.len() * entry.width() as usize];
        let read = self.file.read_exact_at(&mut bytes, entry.at);
        read.map_err(|error| unreadable(&self.path, error))?;
        widen(&entry.dtype, &bytes, &mut values);
        match values.iter().find(|x| !x.is_finite()) {
            Some(x) => {
                let why = format!("`{}` has a {x}", foreign(&entry.name));
                Err(FolderError::refused(&self.path, why))
            }
            None => Ok(values),
        }
    }
}

/// Names of the linears that the factors `names` belong to: `q_proj, v_proj`.
fn linears_of<'a>(names: impl Iterator<Item = &'a String>) -> String {
    let linear = |name: &'a String| {
        let of = PEFT_FACTORS.iter().find_map(|factor| name.strip_suffix(factor))?;
        of.trim_end_matches('.').rsplit('.').next()
    };
    let all: BTreeSet<&str> = names.filter_map(linear).collect();
    foreign(all.into_iter().collect::<Vec<_>>().join(", ")).to_string()
}

/// Compares the header of the adapters in a folder of PEFT with the adapters of `decoder`.
///
/// # Errors
/// As [`read_adapters`], except for the numbers, which are not read.
pub fn check_adapters(
    folder: &Path,
    model: &ModelConfig,
    decoder: &Decoder,
) -> Result<(), FolderError> {
    let tensors =
        tensors_of(model, None, decoder).map_err(|why| FolderError::refused(folder, why))?;
    FactorFile::open(folder, &tensors, decoder).map(drop)
}

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
    let tensors =
        tensors_of(model, None, decoder).map_err(|why| FolderError::refused(folder, why))?;
    let from = FactorFile::open(folder, &tensors, decoder)?;
    let mut factors = BTreeMap::new();
    for (tensor, entry) in tensors.iter().zip(&from.entries) {
        let values = from.read(entry)?;
        for factor in &tensor.factors {
            factors.insert(factor.param.name.clone(), factor.values(tensor, &values).into());
        }
    }
    Ok(factors)
}
