//! An open transformers folder: all files are open, all tensors located; no path leads outside.

use super::config_json::mismatches;
use super::row_place::{RowPlace, RowRuns, Steps};
use super::tensor_codes;
use super::tensors::missing;
use super::{CONFIG, FolderError, INDEX, WHOLE, weight_index};
use crate::header::{self, TensorEntry, length};
use config::ModelConfig;
use config::transformers::{
    MERGE, ModelClass, POINTER, WrapperClass, adapter, folder_model, other_form,
};
use data::model_files::{check_pointer, unreadable};
use files::foreign_text::foreign;
use files::hub::{ModelFolder, incomplete_download};
use files::input;
use layout::tensor_names::{
    CODES, HEAD, Names, StackPlace, bare, bare_in_wrapper, is_of_an_adapter, is_stack, layer_of,
};
use rayon::iter::{IntoParallelIterator, ParallelIterator};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use tensor_parallel::{Decoder, Param};

mod values;

/// Bytes that a thread reads per call.
const AT_ONCE: usize = 8 << 20;
/// Bytes of the longest JSON file that is read.
const LONGEST: u64 = 64 << 20;
/// Remedy for a folder in which each rank saved its own part of the tensors.
const GATHER: &str = "ZeRO-3 and FSDP save such parts for each rank: gather the weights, with zero_to_fp32.py in DeepSpeed's checkpoint, or by a \
                      save with stage3_gather_16bit_weights_on_model_save (FSDP: a full state dict)";

/// A folder whose headers are read and checked; its data is not read yet.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    config: Vec<u8>,
    /// Class of the decoder; that of a Llama if `config` does not say it.
    class: ModelClass,
    /// Class around the decoder.
    pub(super) wrapper: Option<WrapperClass>,
    /// Number of the decoder's layers, if the folder may have more that are no part of it.
    layers: Option<usize>,
    files: Vec<(PathBuf, File)>,
    /// The tensors of the decoder, by their names without prefix.
    tensors: BTreeMap<String, ForeignTensor>,
    /// The tensors of other parts than the decoder, by their whole names.
    pub(super) untrained: BTreeMap<String, ForeignTensor>,
    /// Tensors that only the index contains: (name, file in the index).
    absent: Vec<(String, String)>,
}

/// A tensor of the folder.
#[derive(Clone, Debug)]
pub(super) struct ForeignTensor {
    /// Number of the file.
    file: usize,
    pub(super) entry: TensorEntry,
}

/// The place of a parameter of onebox in the folder.
#[derive(Clone, Debug)]
pub(super) struct TensorPlace {
    pub(super) foreign: ForeignTensor,
    /// Number of the parameter's first element in the tensor, which may hold several parameters.
    first: usize,
    /// The runs of its rows, if they are not adjacent.
    runs: Option<RowRuns>,
    /// Shape of the parameter in onebox: (rows, columns).
    shape: (usize, usize),
    /// Whether the folder stores the tensor transposed.
    pub(super) transposed: bool,
    /// Distances of the parameter's elements, if they are not one after the other.
    steps: Option<Steps>,
    /// Scales of the codes that the tensor has in the place of numbers.
    scales: Option<ForeignTensor>,
    /// Number of the expert, if the tensor holds those of a whole layer.
    expert: Option<usize>,
}

impl TensorPlace {
    pub(super) const fn num_elements(&self) -> usize {
        self.shape.0 * self.shape.1
    }

    /// Whether the parameter is read as a whole: no part of it is a run of the tensor's numbers.
    pub(super) const fn is_read_whole(&self) -> bool {
        self.transposed || self.steps.is_some() || self.scales.is_some()
    }

    /// Runs of the tensor with the parameter's elements from `first` to `end`: number of the first
    /// element in the tensor, and number of elements.
    fn elements(&self, first: usize, end: usize) -> impl Iterator<Item = (usize, usize)> {
        // Adjacent rows are one run.
        let rows = self.runs.map_or(self.shape.0, |runs| runs.rows);
        let stride = self.runs.map_or(0, |runs| runs.stride) * self.shape.1;
        let (length, mut at) = (rows * self.shape.1, first);
        std::iter::from_fn(move || {
            let (run, offset) = (at / length.max(1), at % length.max(1));
            let count = (length - offset).min(end - at);
            at += count;
            (count > 0).then_some((self.first + run * stride + offset, count))
        })
    }
}

impl Folder {
    /// Opens a folder with `config.json` and `model.safetensors`, or its parts and their index.
    ///
    /// # Errors
    /// [`FolderError`] with the file and its fault.
    pub fn open(path: &Path) -> Result<Self, FolderError> {
        let folder = ModelFolder::open(path).map_err(|e| unreadable(path, e))?;
        if let Some(instead) = adapter(path) {
            return Err(FolderError::refused(path, instead.to_string()));
        }
        let config = small(&folder, path, CONFIG)?;
        // A file that describes no model is refused where it is compared with one.
        let (class, wrapper, layers) = match folder_model(&config) {
            Ok(of) => (of.class, of.wrapper, of.layers_before_others()),
            Err(_) => (ModelClass::Llama, None, None),
        };
        let is_there = |name: &str| std::fs::symlink_metadata(path.join(name)).is_ok();
        let index = match (is_there(WHOLE), is_there(INDEX)) {
            (true, true) => {
                let why = format!("it has both {WHOLE} and {INDEX}: remove the one that is stale");
                return Err(FolderError::refused(path, why));
            }
            (true, false) => BTreeMap::new(),
            (false, true) => weight_index::index(&small(&folder, path, INDEX)?)
                .map_err(|why| FolderError::refused(&path.join(INDEX), why))?,
            (false, false) => {
                let other = match (other_form(path), incomplete_download(path)) {
                    (Some(instead), _) => format!(", and {instead}"),
                    (None, Some(why)) => format!(": {why}"),
                    (None, None) => " (other formats are not read)".to_owned(),
                };
                let why = format!("it has neither {WHOLE} nor {INDEX}{other}");
                return Err(FolderError::refused(path, why));
            }
        };
        let mut names: BTreeSet<String> = index.values().cloned().collect();
        if index.is_empty() {
            names.insert(WHOLE.into());
        }
        let mut found = Self {
            path: path.to_owned(),
            config,
            class,
            wrapper,
            layers,
            files: Vec::new(),
            tensors: BTreeMap::new(),
            untrained: BTreeMap::new(),
            absent: Vec::new(),
        };
        for name in names {
            found.add(&folder, &name, &index)?;
        }
        found.check_whole()?;
        let absent = |(name, _): &(String, String)| match found.bare(name) {
            Some(bare) => !found.tensors.contains_key(&bare),
            None => !found.untrained.contains_key(name),
        };
        found.absent = index.into_iter().filter(absent).collect();
        Ok(found)
    }

    /// Name of a tensor of the decoder without prefix; `None` for a tensor of another part.
    fn bare(&self, name: &str) -> Option<String> {
        let bare = if self.wrapper.is_some() { bare_in_wrapper(name)? } else { bare(name) };
        let is_other = |bare: &String| {
            let others = self.class.other_parts();
            others.iter().any(|part| bare.starts_with(part))
                || layer_of(bare).zip(self.layers).is_some_and(|(layer, of)| layer >= of)
        };
        Some(bare).filter(|bare| !is_other(bare))
    }

    /// Refuses tensors that are only parts of the model's: adapters, and shards without elements.
    fn check_whole(&self) -> Result<(), FolderError> {
        let all = || self.tensors.values().chain(self.untrained.values());
        if let Some(foreign) = all().find(|of| is_of_an_adapter(&of.entry.name)) {
            let why = format!(
                "`{}` is of a PEFT adapter (such as LoRA) that is not merged into the weights: merge it where it was trained, \
                 with `model.{MERGE}.save_pretrained(..)`",
                foreign.entry.name
            );
            return Err(self.refused(foreign, why));
        }
        let empty: Vec<_> = all().filter(|of| of.entry.shape.contains(&0)).collect();
        let Some(foreign) = empty.first() else { return Ok(()) };
        let (count, has) = match empty.len() - 1 {
            0 => (String::new(), "has"),
            more => (format!(" and {more} more"), "have"),
        };
        let TensorEntry { name, shape, .. } = &foreign.entry;
        let why = format!("`{name}`{count} {has} no elements ({shape:?}). {GATHER}");
        Err(self.refused(foreign, why))
    }

    /// An error that names the file of a tensor.
    fn refused(&self, foreign: &ForeignTensor, why: String) -> FolderError {
        FolderError::refused(&self.files[foreign.file].0, why)
    }

    /// Adds a file. Its tensors must be exactly the tensors that the index assigns to this file.
    fn add(
        &mut self,
        folder: &ModelFolder,
        name: &str,
        index: &BTreeMap<String, String>,
    ) -> Result<(), FolderError> {
        let path = self.path.join(name);
        let refused = |why: String| FolderError::refused(&path, why);
        let file = folder.file(name).map_err(|e| unreadable(&path, e))?;
        let bytes = file.metadata().map_err(|e| unreadable(&path, e))?.len();
        if bytes < POINTER {
            let mut all = vec![0; bytes as usize];
            file.read_exact_at(&mut all, 0).map_err(|e| cut_off(&path, e))?;
            check_pointer(&path, &all)?;
        }
        let mut first = [0; 8];
        file.read_exact_at(&mut first, 0).map_err(|e| cut_off(&path, e))?;
        let mut header = vec![0; length(first, bytes).map_err(refused)?];
        file.read_exact_at(&mut header, 0).map_err(|e| cut_off(&path, e))?;
        for foreign in header::decode(&header, bytes).map_err(refused)? {
            if !index.is_empty() && index.get(&foreign.name).is_none_or(|file| file != name) {
                let why = format!("`{}` is in it, which {INDEX} does not say", foreign.name);
                return Err(refused(why));
            }
            let (bare, name) = (self.bare(&foreign.name), foreign.name.clone());
            let foreign = ForeignTensor { file: self.files.len(), entry: foreign };
            let replaced = match bare {
                Some(bare) => self.tensors.insert(bare, foreign),
                None => self.untrained.insert(name.clone(), foreign),
            };
            if let Some(other) = replaced {
                let other = other.entry.name;
                return Err(refused(format!("`{name}` and `{other}` are one tensor, twice")));
            }
        }
        self.files.push((path, file));
        Ok(())
    }

    /// Path of the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Checks that the folder holds the model that `model` describes, which is `gpt`.
    ///
    /// # Errors
    /// [`FolderError::OtherModel`] with every differing key of `config.json`, or an unfit tensor.
    pub fn check_model(&self, model: &ModelConfig, gpt: &Decoder) -> Result<(), FolderError> {
        let path = self.path.join(CONFIG);
        let problems = mismatches(&self.config, model);
        match problems[..] {
            [] => self.places(gpt).map(drop),
            _ => Err(FolderError::OtherModel { path, problems }),
        }
    }

    /// The place of each parameter of `gpt` but its adapters, in the order of the model.
    ///
    /// # Errors
    /// A tensor is missing, has another shape or type, or is no tensor of the model.
    pub(super) fn places(&self, gpt: &Decoder) -> Result<Vec<TensorPlace>, FolderError> {
        let params: Vec<&Param> = gpt.segments().iter().flat_map(|s| s.base_params()).collect();
        let shape = gpt.shape();
        let names = Names::of(shape, self.class, self.fuses_experts());
        let tied = shape.architecture.tied;
        let mut known: BTreeSet<String> =
            params.iter().flat_map(|p| self.names_of(names.foreign(&p.name).0)).collect();
        if tied {
            known.insert(HEAD.into());
        }
        let is_strange =
            |name: &String| !known.contains(name) && !names.is_left_over(name, shape.layers);
        let alias = |bare: &str| tied && (bare == HEAD || bare == names.table());
        let needed = |bare: &String| known.contains(bare) && !alias(bare) || is_strange(bare);
        // All tensors of other parts are needed, since an export copies them.
        let needed = |name: &str| self.bare(name).is_none_or(|bare| needed(&bare));
        if let Some((name, file)) = self.absent.iter().find(|(name, _)| needed(name)) {
            let why = format!("`{}` is not in `{file}`", foreign(name));
            return Err(FolderError::refused(&self.path.join(INDEX), why));
        }
        let strange: Vec<_> =
            self.tensors.iter().filter(|(name, _)| is_strange(name)).map(|(_, of)| of).collect();
        let rows: BTreeMap<&str, usize> =
            params.iter().map(|param| (param.name.as_str(), param.global.0)).collect();
        let place = |param: &&Param| {
            let joined = RowPlace::of(names, param, &rows);
            self.place(names, tied, param, &joined, &strange)
        };
        let places = params.iter().map(place).collect::<Result<Vec<_>, _>>()?;
        if let Some(foreign) = strange.first() {
            let name = &foreign.entry.name;
            let twice = name.contains(".experts.") && !is_stack(name) && self.fuses_experts();
            let why = match (twice, shape.experts) {
                (true, _) => ", whose experts are in one tensor for each layer: each expert must be there once".into(),
                (false, Some(experts)) if name.contains(".experts.") => {
                    format!(", which has {} experts in a layer with experts", experts.count)
                }
                _ => String::new(),
            };
            let why = format!("`{name}` is no tensor of this model{why}");
            return Err(self.refused(foreign, why));
        }
        if tied {
            self.check_head(&names.table())?;
        }
        Ok(places)
    }

    /// The tensors of the decoder, in the order of their names.
    pub(super) fn tensors_of_decoder(&self) -> Vec<&ForeignTensor> {
        self.tensors.values().collect()
    }

    /// Whether the folder has one tensor for the matrices of all experts of a layer.
    pub(super) fn fuses_experts(&self) -> bool {
        self.class != ModelClass::GptOss && self.tensors.keys().any(|name| is_stack(name))
    }

    /// Names of the tensors with the numbers of `name`: `name` itself, or the names of codes and scales.
    fn names_of(&self, name: String) -> Vec<String> {
        let codes = CODES.map(|end| format!("{name}{end}"));
        let has = |name: &String| self.tensors.contains_key(name);
        if !has(&name) && codes.iter().any(has) { codes.into() } else { vec![name] }
    }

    /// The place of one parameter. A tied table may have either of its two names.
    fn place(
        &self,
        names: Names,
        tied: bool,
        param: &Param,
        joined: &RowPlace,
        strange: &[&ForeignTensor],
    ) -> Result<TensorPlace, FolderError> {
        let ((theirs, transposed), shape) = (names.foreign(&param.name), param.global);
        let other = || self.tensors.get(HEAD).filter(|_| tied && theirs == names.table());
        let stack = names.stack_place(&param.name);
        let own = self.names_of(theirs.clone());
        if let (Some(stack), [codes, scales]) = (stack.filter(|of| of.interleaved), &own[..]) {
            return self.place_of_codes(stack, param, [codes, scales]);
        }
        let Some(foreign) = self.tensors.get(&theirs).or_else(other) else {
            let strange: Vec<&str> = strange.iter().map(|f| f.entry.name.as_str()).collect();
            return Err(FolderError::refused(&self.path, missing(&theirs, &strange)));
        };
        let mut wanted = param.dimensions();
        wanted[0] = joined.rows;
        if let Some(StackPlace { experts, interleaved, .. }) = stack {
            wanted[0] = joined.rows / experts;
            wanted.insert(0, experts);
            if interleaved {
                wanted[1..].reverse();
            }
        }
        if names.has_middle(&param.name) {
            wanted.insert(1, 1);
        }
        if transposed {
            wanted.reverse();
        }
        let TensorEntry { name, dtype, shape: found, .. } = &foreign.entry;
        // Shorter samples use only the first positions, so more positions are accepted.
        let fits = match found[..] {
            [rows, columns] if param.name == "wpe" => columns == shape.1 && rows >= shape.0,
            _ => *found == wanted,
        };
        if !fits || !["F32", "F16", "BF16"].contains(&dtype.as_str()) {
            let why = format!("`{name}` is {dtype} {found:?}, not F32, F16 or BF16 {wanted:?}");
            let is_flat = found.len() == 1 && wanted.len() == 2;
            let why = if is_flat { format!("{why}. {GATHER}") } else { why };
            return Err(self.refused(foreign, why));
        }
        let steps = stack.and_then(|stack| Steps::of(stack, param));
        let first = steps.map_or(joined.first * shape.1, |steps| steps.first);
        let expert = stack.map(|stack| stack.expert);
        let (foreign, runs, scales) = (foreign.clone(), joined.runs, None);
        Ok(TensorPlace { foreign, first, runs, shape, transposed, steps, scales, expert })
    }

    /// The place of a matrix of an expert in tensors of codes and scales, which are not transposed.
    fn place_of_codes(
        &self,
        stack: StackPlace,
        param: &Param,
        names: [&String; 2],
    ) -> Result<TensorPlace, FolderError> {
        let [codes, scales] = names.map(|name| {
            let found = self.tensors.get(name);
            found.ok_or_else(|| FolderError::refused(&self.path, missing(name, &[])))
        });
        let (codes, scales, shape) = (codes?, scales?, param.global);
        let StackPlace { experts, parts, expert, part, .. } = stack;
        for (foreign, wanted) in
            [codes, scales].into_iter().zip(tensor_codes::shapes(experts, parts * shape.0, shape.1))
        {
            let TensorEntry { name, dtype, shape: found, .. } = &foreign.entry;
            if *found != wanted || dtype != "U8" {
                let why = format!("`{name}` is {dtype} {found:?}, not U8 {wanted:?}");
                return Err(self.refused(foreign, why));
            }
        }
        let first = (expert * parts * shape.0 + part) * shape.1;
        let steps = Some(Steps { first, row: parts * shape.1, column: 1 });
        let (foreign, scales) = (codes.clone(), Some(scales.clone()));
        Ok(TensorPlace {
            foreign,
            first,
            runs: None,
            shape,
            transposed: false,
            steps,
            scales,
            expert: Some(expert),
        })
    }

    /// Checks that the head's weights, if the folder has them, equal the embedding bit for bit.
    fn check_head(&self, table: &str) -> Result<(), FolderError> {
        let (Some(head), Some(table)) = (self.tensors.get(HEAD), self.tensors.get(table)) else {
            return Ok(());
        };
        let form = |of: &ForeignTensor| (of.entry.dtype.clone(), of.entry.shape.clone());
        if form(head) == form(table) && self.is_same(head, table)? {
            return Ok(());
        }
        let why =
            format!("`{}` is not the embedding, which config.json says it is", head.entry.name);
        Err(self.refused(head, why))
    }

    /// Whether two tensors of the same type and shape have the same bytes.
    fn is_same(&self, one: &ForeignTensor, other: &ForeignTensor) -> Result<bool, FolderError> {
        let bytes = one.entry.shape.iter().product::<usize>() * one.entry.width() as usize;
        let part = |of: &ForeignTensor, first: usize| {
            let mut part = vec![0; AT_ONCE.min(bytes - first)];
            self.read_bytes(of, first, &mut part).map(|()| part)
        };
        let parts = (0..bytes.div_ceil(AT_ONCE)).into_par_iter().map(|i| i * AT_ONCE);
        let same = parts.map(|first| Ok(part(one, first)? == part(other, first)?));
        same.try_reduce(|| true, |a, b| Ok(a && b))
    }
}

/// Reads a JSON file of the folder.
fn small(folder: &ModelFolder, path: &Path, name: &str) -> Result<Vec<u8>, FolderError> {
    let at = path.join(name);
    let file = folder.file(name).map_err(|e| unreadable(&at, e))?;
    let bytes = input::rest(&file, LONGEST).map_err(|error| match error.kind() {
        io::ErrorKind::FileTooLarge => {
            let why = format!("it is longer than {}", topology::format_bytes(LONGEST));
            FolderError::refused(&at, why)
        }
        _ => unreadable(&at, error).into(),
    })?;
    check_pointer(&at, &bytes)?;
    Ok(bytes)
}

/// The error of a failed read; a truncated file is refused content, not an error of the system.
fn cut_off(path: &Path, source: io::Error) -> FolderError {
    match source.kind() {
        io::ErrorKind::UnexpectedEof => FolderError::refused(path, "it is cut off"),
        _ => unreadable(path, source).into(),
    }
}
