//! Export: writes a new folder, which gets its name after a sync and a matching read-back.

use super::experts_file::is_fused;
use super::export_error::ExportError;
use super::folder::Folder;
use super::numbers::Numbers;
use super::parameters::ModelParameters;
use super::tensors::alternated;
use super::untrained::{UntrainedSource, UntrainedTensor, UntrainedTensors, first_unequal};
use super::weights::PretrainedWeights;
use super::{CONFIG, FolderError, INDEX, WHOLE, config_json, transposed};
use crate::Checkpoint;
use crate::header::{self, HeaderEntry};
use config::Config;
use data::byte_tokenizer::{tokenizer_config, tokenizer_json};
use data::model_files::ModelFiles;
use data::progress::{Progress, Reading};
use files::durable::{create_new, rename, sync_folder};
use files::names::{
    CONFIG_OF_ADAPTER, EXPERTS, FILES, LOCK, TOKENIZER, TOKENIZER_CONFIG, UNTRAINED,
    WEIGHTS_OF_ADAPTER,
};
use files::regular_file;
use layout::build::RankLayout;
use layout::tensor_names::{Names, StackPlace, is_always_fp32, unwrapped};
use serde_json::{Map, json};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, TryLockError};
use std::io::{self, BufWriter, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use tensor_parallel::Param;

/// A model to export, and its format.
#[derive(Clone, Copy, Debug)]
pub struct ModelExport<'a> {
    /// The checkpoint with the fp32 parameters.
    pub checkpoint: &'a Checkpoint,
    /// The config of the run that wrote the checkpoint.
    pub config: &'a Config,
    /// The layout of that config.
    pub built: &'a RankLayout,
    /// The bytes of `tokenizer.json`, if the run has one.
    pub tokenizer: Option<&'a [u8]>,
    /// Files that the run kept from the folder of its pretrained model.
    pub model_files: &'a ModelFiles,
    /// The weights with the frozen parameters of the run; `None` if it froze none.
    pub base: Option<&'a PretrainedWeights>,
    /// Number format of the parameters.
    pub numbers: Numbers,
    /// Largest size of a file that holds more than one tensor, in bytes.
    pub max_file_bytes: u64,
    /// Receiver of the progress.
    pub progress: &'a dyn Progress,
}

/// Writes `model` into the new folder `out`; returns the names of all files.
///
/// # Errors
/// [`ExportError`]; then `out` is unchanged.
pub fn export(model: &ModelExport<'_>, out: &Path) -> Result<Vec<String>, ExportError> {
    // What cannot be exported is known before anything is written.
    let content = ExportContent::new(model, out)?;
    in_new_folder(out, |unfinished| {
        let files = fill(model, &content, unfinished)?;
        read_back(model, &content, unfinished).map(|()| files)
    })
}

/// Makes the folder `out` with the files that `fill` writes into it under another name. Returns what
/// `fill` returns.
pub(super) fn in_new_folder<T>(
    out: &Path,
    fill: impl FnOnce(&Path) -> Result<T, ExportError>,
) -> Result<T, ExportError> {
    if fs::symlink_metadata(out).is_ok() {
        return Err(ExportError::Exists(out.to_owned()));
    }
    let mut unfinished = out.as_os_str().to_owned();
    unfinished.push(".unfinished");
    let unfinished = PathBuf::from(unfinished);
    if let Some(parent) = out.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        fs::create_dir_all(parent).map_err(cannot_write(parent))?;
    }
    let lock = begin(&unfinished)?;
    let done = fill(&unfinished).and_then(|files| {
        let named = sync_folder(&unfinished)
            .and_then(|()| match is_held(&lock, &unfinished) {
                true => Ok(()),
                false => Err(io::Error::other("another folder is in its place")),
            })
            .and_then(|()| rename(&unfinished, out))
            .and_then(|()| fs::remove_file(out.join(LOCK)));
        named.map(|()| files).map_err(|e| cannot_write(out)(e).into())
    });
    if done.is_err() {
        give_up(&unfinished, &lock);
    }
    done
}

/// Creates the folder of an unfinished export, or empties the one of a killed export. The lock is
/// its first file, until the folder has its name. A folder with files but no lock is not ours; a
/// folder with a held lock belongs to a running export.
fn begin(unfinished: &Path) -> Result<File, ExportError> {
    let failed = cannot_write(unfinished);
    match fs::create_dir(unfinished) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
        made => made.map_err(&failed)?,
    }
    let foreign = || ExportError::NotOurs(unfinished.to_owned());
    if !fs::symlink_metadata(unfinished).map_err(&failed)?.is_dir() {
        return Err(foreign());
    }
    let names = |entry: io::Result<fs::DirEntry>| entry.map(|entry| entry.file_name());
    let listed = fs::read_dir(unfinished).and_then(|all| all.map(names).collect());
    let left: Vec<OsString> = listed.map_err(&failed)?;
    let ours = left.iter().any(|name| name == LOCK) && left.iter().all(|name| is_ours(name));
    if !left.is_empty() && !ours {
        return Err(foreign());
    }
    let path = unfinished.join(LOCK);
    let lock = regular_file::open_or_create(&path).map_err(cannot_write(&path))?;
    match lock.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Err(ExportError::InUse(unfinished.to_owned())),
        Err(TryLockError::Error(source)) => return Err(cannot_write(&path)(source).into()),
    }
    // The previous holder of the lock may have renamed the folder meanwhile.
    if !is_held(&lock, unfinished) {
        return Err(ExportError::InUse(unfinished.to_owned()));
    }
    for name in left.iter().filter(|name| *name != LOCK) {
        let path = unfinished.join(name);
        fs::remove_file(&path).map_err(cannot_write(&path))?;
    }
    Ok(lock)
}

/// Removes the unfinished folder, unless another folder has its name now.
fn give_up(unfinished: &Path, lock: &File) {
    if is_held(lock, unfinished) {
        // Ignore errors of the cleanup: the first error is the useful one.
        drop(fs::remove_dir_all(unfinished));
    }
}

/// Whether `lock` is the lock file in `unfinished`; if not, the folder belongs to another export.
fn is_held(lock: &File, unfinished: &Path) -> bool {
    let here = fs::symlink_metadata(unfinished.join(LOCK));
    let is_same = |held: fs::Metadata, here: fs::Metadata| {
        (here.dev(), here.ino()) == (held.dev(), held.ino())
    };
    lock.metadata().is_ok_and(|held| here.is_ok_and(|here| is_same(held, here)))
}

/// Whether an export writes files of this name.
fn is_ours(name: &OsStr) -> bool {
    let part = |name: &str| name.starts_with("model-") && name.ends_with(".safetensors");
    let whole = [LOCK, WHOLE, INDEX, CONFIG_OF_ADAPTER, WEIGHTS_OF_ADAPTER];
    name.to_str().is_some_and(|name| whole.contains(&name) || FILES.contains(&name) || part(name))
}

/// The tensors of an export, and its `config.json`.
struct ExportContent<'a> {
    config: String,
    parameters: ModelParameters<'a>,
    tensors: Vec<ExportTensor>,
    /// Folder of the tensors that the run did not train.
    source: Option<UntrainedSource>,
}

/// A tensor of an export.
struct ExportTensor {
    name: String,
    shape: Vec<usize>,
    values: TensorValues,
}

/// Origin of a tensor's values.
enum TensorValues {
    /// Rows of the parameters with these numbers, from above. `format`: their number format.
    /// `alternating`: number of parameters whose elements alternate, in the transposed order. The rows
    /// of each are cut into `runs` runs, which alternate.
    Parameters {
        numbers: Vec<usize>,
        transposed: bool,
        alternating: Option<usize>,
        format: Numbers,
        runs: usize,
    },
    /// Bytes of a tensor that the run did not train, by its number.
    Untrained(usize),
}

impl<'a> ExportContent<'a> {
    fn new(model: &ModelExport<'a>, out: &Path) -> Result<Self, FolderError> {
        let ModelExport { config, built, model_files, numbers, .. } = *model;
        let kept = model_files.get(UNTRAINED).map(UntrainedTensors::decode).transpose();
        let kept = kept.map_err(|why| FolderError::refused(out, format!("{UNTRAINED}: {why}")))?;
        let fused = model_files.get(EXPERTS).map_or(Ok(false), is_fused);
        let fused = fused.map_err(|why| FolderError::refused(out, format!("{EXPERTS}: {why}")))?;
        let came = model_files.get(CONFIG);
        let description =
            config_json::description(&config.model, numbers.of_torch(), came, kept.is_some());
        let description = description.map_err(|why| FolderError::refused(out, why))?;
        let decoder = &built.decoder;
        let names = Names::of(decoder.shape(), description.class, fused);
        // A base that has moved has these tensors too.
        let of_base = |kept: UntrainedTensors| match model.base {
            Some(base) => kept.at(base.path().to_owned()),
            None => kept,
        };
        let source = kept.map(|kept| of_base(kept).open()).transpose()?;
        let wholes = match &source {
            None => None,
            // Files of several versions have other prefixes; these stay as they are.
            Some(source) => Some(source.folder.places(decoder)?),
        };
        let parameters = ModelParameters::new(model.checkpoint, decoder, model.base);
        let params = &parameters.params;
        let whole = |number: usize| match &wholes {
            None => names.whole(&params[number].name),
            Some(places) => unwrapped(&places[number].foreign.entry.name),
        };
        let mut tensors = joined(params, names, numbers, &whole);
        let untrained = source.iter().flat_map(|source| &source.tensors).enumerate();
        tensors.extend(untrained.map(|(number, tensor)| ExportTensor {
            name: tensor.name.clone(),
            shape: tensor.shape.clone(),
            values: TensorValues::Untrained(number),
        }));
        Ok(Self { config: description.text, parameters, tensors, source })
    }

    /// A tensor that the run did not train, and its folder.
    fn untrained(&self, number: usize) -> (&UntrainedSource, &UntrainedTensor) {
        match &self.source {
            Some(source) => (source, &source.tensors[number]),
            None => unreachable!("only a folder has tensors that the run did not train"),
        }
    }

    /// The entry of a tensor in the header of its file.
    fn entry(&self, tensor: &ExportTensor) -> HeaderEntry {
        let elements = tensor.shape.iter().product::<usize>() as u64;
        let (dtype, bytes) = match tensor.values {
            TensorValues::Parameters { format, .. } => {
                (format.name().to_owned(), format.width() * elements)
            }
            TensorValues::Untrained(number) => {
                let (source, untrained) = self.untrained(number);
                (untrained.dtype.clone(), source.bytes(untrained))
            }
        };
        HeaderEntry { name: tensor.name.clone(), dtype, shape: tensor.shape.clone(), bytes }
    }
}

/// The tensors of the parameters. Parameters that are one tensor in transformers are together.
fn joined(
    params: &[&Param],
    names: Names,
    format: Numbers,
    whole: &dyn Fn(usize) -> String,
) -> Vec<ExportTensor> {
    let by_name: BTreeMap<&str, usize> =
        params.iter().enumerate().map(|(number, param)| (param.name.as_str(), number)).collect();
    let mut done: BTreeSet<usize> = BTreeSet::new();
    let mut tensors = Vec::new();
    for (number, param) in params.iter().enumerate() {
        if done.contains(&number) {
            continue;
        }
        let all = names.joined(&param.name);
        let numbers: Vec<usize> =
            all.iter().filter_map(|name| by_name.get(name.as_str())).copied().collect();
        assert_eq!(numbers.len(), all.len(), "{} is a parameter as the others are", param.name);
        done.extend(&numbers);
        let mut shape = param.dimensions();
        shape[0] = numbers.iter().map(|number| params[*number].global.0).sum();
        let stack = names.stack_place(&param.name);
        if let Some(StackPlace { experts, interleaved, .. }) = stack {
            shape[0] /= experts;
            shape.insert(0, experts);
            if interleaved {
                shape[1..].reverse();
            }
        }
        let alternating = stack.filter(|stack| stack.interleaved).map(|stack| stack.parts);
        if names.has_middle(&param.name) {
            shape.insert(1, 1);
        }
        let (_, transposed) = names.foreign(&param.name);
        if transposed {
            shape.reverse();
        }
        let runs = names.runs_of(&param.name);
        let format = format_of(&param.name, format);
        let values = TensorValues::Parameters { numbers, transposed, alternating, format, runs };
        tensors.push(ExportTensor { name: whole(number), shape, values });
    }
    tensors
}

/// Number format of a parameter of onebox in an export in `format`.
fn format_of(name: &str, format: Numbers) -> Numbers {
    if is_always_fp32(name) { Numbers::F32 } else { format }
}

fn fill(
    model: &ModelExport<'_>,
    content: &ExportContent<'_>,
    folder: &Path,
) -> Result<Vec<String>, ExportError> {
    let ModelExport { config, tokenizer, model_files, .. } = *model;
    let entries: Vec<HeaderEntry> =
        content.tensors.iter().map(|tensor| content.entry(tensor)).collect();
    let files = parts(&entries, model.max_file_bytes);
    let total: u64 = entries.iter().map(|entry| entry.bytes).sum();
    let reading = model.progress.begin("writing weights", total);
    let mut names = Vec::new();
    let mut map = Map::new();
    for (number, part) in files.iter().enumerate() {
        let name = match files.len() {
            1 => WHOLE.to_owned(),
            n => format!("model-{:05}-of-{n:05}.safetensors", number + 1),
        };
        for entry in &entries[part.clone()] {
            map.insert(entry.name.clone(), name.clone().into());
        }
        let header = entries[part.clone()].to_vec();
        let tensors = &content.tensors[part.clone()];
        write_part(content, header, tensors, &folder.join(&name), &*reading)?;
        names.push(name);
    }
    drop(reading);
    if files.len() > 1 {
        let index = json!({ "metadata": { "total_size": total }, "weight_map": map });
        write_small(folder, INDEX, format!("{index:#}\n").as_bytes(), &mut names)?;
    }
    write_small(folder, CONFIG, content.config.as_bytes(), &mut names)?;
    if let Some(bytes) = tokenizer {
        write_small(folder, TOKENIZER, bytes, &mut names)?;
    }
    if tokenizer.is_none() && makes_bytes(config) && model_files.get(TOKENIZER).is_none() {
        write_small(folder, TOKENIZER, tokenizer_json().as_bytes(), &mut names)?;
        write_small(folder, TOKENIZER_CONFIG, tokenizer_config().as_bytes(), &mut names)?;
    }
    for (name, bytes) in model_files.files() {
        if ![CONFIG, UNTRAINED, EXPERTS].contains(name)
            && (*name != TOKENIZER || tokenizer.is_none())
        {
            write_small(folder, name, bytes, &mut names)?;
        }
    }
    Ok(names)
}

/// Whether the tokens of a run are the bytes of its texts.
const fn makes_bytes(config: &Config) -> bool {
    config.data.tokenizer.is_none() && config.data.format.is_bytes() && config.model.vocab >= 256
}

/// Ranges of tensors, one per file: each fits into `most` bytes or is a single tensor.
fn parts(tensors: &[HeaderEntry], most: u64) -> Vec<std::ops::Range<usize>> {
    let mut parts: Vec<std::ops::Range<usize>> = Vec::new();
    let mut bytes = 0;
    for (i, tensor) in tensors.iter().enumerate() {
        let more = tensor.bytes;
        match parts.last_mut() {
            Some(part) if bytes + more <= most => {
                part.end = i + 1;
                bytes += more;
            }
            _ => {
                parts.push(i..i + 1);
                bytes = more;
            }
        }
    }
    parts
}

/// Writes a file with the `tensors`, whose header has the entries `header`.
fn write_part(
    content: &ExportContent<'_>,
    header: Vec<HeaderEntry>,
    tensors: &[ExportTensor],
    path: &Path,
    reading: &dyn Reading,
) -> Result<(), ExportError> {
    let parameters = &content.parameters;
    let failed = cannot_write(path);
    let torch = Map::from_iter([("__metadata__".into(), json!({ "format": "pt" }))]);
    let file = create_new(path).map_err(&failed)?;
    let mut file = BufWriter::with_capacity(1 << 20, file);
    file.write_all(&header::of_entries(torch, header)).map_err(&failed)?;
    let mut write = |bytes: &[u8]| {
        reading.add(bytes.len() as u64);
        file.write_all(bytes).map_err(&failed)
    };
    for tensor in tensors {
        let (rows, is_transposed, parts, format, runs) = match &tensor.values {
            TensorValues::Parameters { numbers, transposed, alternating, format, runs } => {
                (numbers, *transposed, *alternating, *format, *runs)
            }
            TensorValues::Untrained(number) => {
                let (source, untrained) = content.untrained(*number);
                source.copy(untrained, &mut write)?;
                continue;
            }
        };
        let mut write_values = |values: &[f32]| {
            values.chunks(1 << 12).try_for_each(|part| {
                let mut bytes = Vec::with_capacity(4 * part.len());
                part.iter().for_each(|x| format.write(*x, &mut bytes));
                write(&bytes)
            })
        };
        if runs > 1 {
            let all = rows.iter().map(|number| parameters.values(*number));
            let all = all.collect::<Result<Vec<_>, _>>()?;
            for run in 0..runs {
                for values in &all {
                    let each = values.len() / runs;
                    write_values(&values[run * each..(run + 1) * each])?;
                }
            }
            continue;
        }
        for numbers in rows.chunks(parts.unwrap_or(1)) {
            let size = parameters.params[numbers[0]].global;
            let all = numbers.iter().map(|number| parameters.values(*number));
            let all = all.collect::<Result<Vec<_>, _>>()?;
            let values = match parts {
                Some(_) => alternated(&all, size),
                None if is_transposed => transposed(&all[0], size),
                None => {
                    all.into_iter().next().unwrap_or_else(|| unreachable!("a chunk is not empty"))
                }
            };
            write_values(&values)?;
        }
    }
    file.flush().and_then(|()| file.get_ref().sync_all()).map_err(&failed)?;
    Ok(())
}

/// Reads the folder as an import would, and compares all values with the parameters.
fn read_back(
    model: &ModelExport<'_>,
    content: &ExportContent<'_>,
    folder: &Path,
) -> Result<(), ExportError> {
    let ModelExport { built, numbers, progress, .. } = *model;
    let written = Folder::open(folder)?;
    let places = written.places(&built.decoder)?;
    let params = &content.parameters.params;
    let bytes = |param: &&Param| numbers.width() * param.global_len() as u64;
    let reading = progress.begin("comparing weights", params.iter().map(bytes).sum());
    for (number, (param, place)) in params.iter().zip(&places).enumerate() {
        let (values, is) = (content.parameters.values(number)?, written.read(place)?);
        let format = format_of(&param.name, numbers);
        if !values.iter().map(|x| format.kept(*x).to_bits()).eq(is.iter().map(|x| x.to_bits())) {
            let (path, tensor) = (folder.to_owned(), param.name.clone());
            return Err(ExportError::Unequal { path, tensor });
        }
        reading.add(bytes(param));
    }
    drop(reading);
    if let Some(source) = &content.source
        && let Some(tensor) = first_unequal(&source.tensors, &written, progress)?
    {
        return Err(ExportError::Unequal { path: folder.to_owned(), tensor });
    }
    Ok(())
}

pub(super) fn write_small(
    folder: &Path,
    name: &str,
    bytes: &[u8],
    names: &mut Vec<String>,
) -> Result<(), FolderError> {
    let path = folder.join(name);
    let write = || {
        let mut file = create_new(&path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    names.push(name.to_owned());
    write().map_err(cannot_write(&path))
}

pub(super) fn cannot_write(path: &Path) -> impl Fn(io::Error) -> FolderError {
    move |source| FolderError::Write { path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_export_that_fails_removes_no_other_folder() {
        let folder = tempfile::tempdir().unwrap();
        let [unfinished, moved] = ["new.unfinished", "moved"].map(|name| folder.path().join(name));
        let lock = begin(&unfinished).unwrap();
        fs::rename(&unfinished, &moved).unwrap();
        let other = begin(&unfinished).unwrap();
        give_up(&unfinished, &lock);
        assert!(unfinished.join(LOCK).exists() && moved.join(LOCK).exists());
        give_up(&unfinished, &other);
        assert!(!unfinished.exists());
    }

    #[test]
    fn a_file_is_full_or_has_one_tensor() {
        let tensor = |elements: u64| HeaderEntry {
            name: String::new(),
            dtype: "F32".into(),
            shape: vec![elements as usize],
            bytes: 4 * elements,
        };
        let tensors = [3, 2, 9, 1, 1, 1, 5].map(tensor);
        assert_eq!(parts(&tensors, 20), [0..2, 2..3, 3..6, 6..7]);
        assert_eq!(parts(&tensors, u64::MAX), vec![0..7; 1]);
        assert_eq!(parts(&tensors, 0).len(), 7);
    }
}
