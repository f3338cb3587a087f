//! A folder of transformers, opened: every file held, every tensor found, nothing followed out of it.

use super::config_json::mismatches;
use super::header::{self, Foreign, width};
use super::names::{HEAD, Names, bare};
use super::{CONFIG, FolderError, INDEX, WHOLE, transposed};
use crate::checkpoint::header::length;
use crate::checkpoint::read::open_at;
use crate::config::ModelConfig;
use crate::json::Object;
use half::{bf16, f16};
use rayon::iter::{IndexedParallelIterator, IntoParallelRefIterator, ParallelIterator};
use rayon::slice::{ParallelSlice, ParallelSliceMut};
use rustix::fs::{CWD, OFlags};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use tensor_parallel::{Gpt, Param};

/// Bytes that a thread reads at once.
const AT_ONCE: usize = 8 << 20;
/// Bytes of the longest JSON file that is read.
const LONGEST: u64 = 64 << 20;
/// Most files of an index.
const MOST_FILES: usize = 10_000;
/// Opened and checked as far as it goes without its data.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    config: Vec<u8>,
    files: Vec<(String, File)>,
    /// Without the prefix: (file, tensor).
    tensors: BTreeMap<String, (usize, Foreign)>,
}

/// Where a parameter of ours stands.
#[derive(Clone, Debug)]
pub(super) struct Place {
    file: usize,
    foreign: Foreign,
    /// Of ours.
    shape: (usize, usize),
    /// It stands there transposed.
    pub(super) turned: bool,
}

impl Folder {
    /// Opens a folder with `config.json` and `model.safetensors`, or parts of it and their index.
    ///
    /// # Errors
    /// [`FolderError`] with the file, and what in it cannot be.
    pub fn open(path: &Path) -> Result<Self, FolderError> {
        let folder = open_at(CWD, path, OFlags::DIRECTORY).map_err(|e| unreadable(path, e))?;
        let config = small(&folder, path, CONFIG)?;
        let is_there = |name: &str| std::fs::symlink_metadata(path.join(name)).is_ok();
        let index = match (is_there(WHOLE), is_there(INDEX)) {
            (true, true) => {
                let why = format!("it has both {WHOLE} and {INDEX}: remove the one that is stale");
                return Err(FolderError::refused(path, why));
            }
            (true, false) => BTreeMap::new(),
            (false, true) => index(&small(&folder, path, INDEX)?)
                .map_err(|why| FolderError::refused(&path.join(INDEX), why))?,
            (false, false) => {
                let why =
                    format!("it has neither {WHOLE} nor {INDEX} (other formats are not read)");
                return Err(FolderError::refused(path, why));
            }
        };
        let mut names: BTreeSet<String> = index.values().cloned().collect();
        if index.is_empty() {
            names.insert(WHOLE.into());
        }
        let mut found =
            Self { path: path.to_owned(), config, files: Vec::new(), tensors: BTreeMap::new() };
        for name in names {
            found.add(&folder, name, &index)?;
        }
        let missing = index.keys().find(|name| !found.tensors.contains_key(bare(name)));
        match missing {
            Some(name) => Err(FolderError::refused(
                &path.join(INDEX),
                format!("`{name}` is not in `{}`", index[name]),
            )),
            None => Ok(found),
        }
    }

    /// Takes a file in, whose tensors must be where the index has them.
    fn add(
        &mut self,
        folder: &File,
        name: String,
        index: &BTreeMap<String, String>,
    ) -> Result<(), FolderError> {
        let path = self.path.join(&name);
        let refused = |why: String| FolderError::refused(&path, why);
        let file = open_at(folder, Path::new(&name), OFlags::empty());
        let file = file.map_err(|e| unreadable(&path, e))?;
        let bytes = file.metadata().map_err(|e| unreadable(&path, e))?.len();
        let mut first = [0; 8];
        file.read_exact_at(&mut first, 0).map_err(|e| cut_off(&path, e))?;
        let mut header = vec![0; length(first, bytes).map_err(refused)?];
        file.read_exact_at(&mut header, 0).map_err(|e| cut_off(&path, e))?;
        for foreign in header::decode(&header, bytes).map_err(refused)? {
            if !index.is_empty() && index.get(&foreign.name) != Some(&name) {
                let why = format!("`{}` is in it, which {INDEX} does not say", foreign.name);
                return Err(refused(why));
            }
            let bare = bare(&foreign.name).to_owned();
            if self.tensors.insert(bare.clone(), (self.files.len(), foreign)).is_some() {
                return Err(refused(format!("`{bare}` stands there with and without a prefix")));
            }
        }
        self.files.push((name, file));
        Ok(())
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it holds the model that `model` describes, which is `gpt`.
    ///
    /// # Errors
    /// [`FolderError::OtherModel`] with every key of `config.json` that differs; a tensor that is not as it must be.
    pub fn check_model(&self, model: &ModelConfig, gpt: &Gpt) -> Result<(), FolderError> {
        let path = self.path.join(CONFIG);
        let problems = mismatches(&self.config, model);
        match problems[..] {
            [] => self.places(gpt).map(drop),
            _ => Err(FolderError::OtherModel { path, problems }),
        }
    }

    /// Where each parameter of `gpt` stands, in the order of the model.
    ///
    /// # Errors
    /// One that is not there, of another shape or type, and what is there besides.
    pub(super) fn places(&self, gpt: &Gpt) -> Result<Vec<Place>, FolderError> {
        let params: Vec<&Param> = gpt.segments().iter().flat_map(|s| &s.params).collect();
        let names = Names::of(&gpt.shape().parts);
        let place = |param: &&Param| self.place(names, &param.name, param.global);
        let places = params.iter().map(place).collect::<Result<Vec<_>, _>>()?;
        let known: BTreeSet<String> = params.iter().map(|p| names.foreign(&p.name).0).collect();
        for (name, (file, foreign)) in &self.tensors {
            let path = self.path.join(&self.files[*file].0);
            if name == HEAD && gpt.shape().parts.tied {
                self.check_head(&path, foreign, places.first())?;
            } else if !known.contains(name) && !names.is_left_over(name, gpt.shape().layers) {
                let why = format!("`{name}` is no tensor of this model");
                return Err(FolderError::refused(&path, why));
            }
        }
        Ok(places)
    }

    fn place(&self, names: Names, name: &str, shape: (usize, usize)) -> Result<Place, FolderError> {
        let (theirs, turned) = names.foreign(name);
        let Some((file, foreign)) = self.tensors.get(&theirs) else {
            return Err(FolderError::refused(&self.path, format!("it has no `{theirs}`")));
        };
        let wanted = match shape {
            (rows, 1) => vec![rows],
            (rows, columns) if turned => vec![columns, rows],
            (rows, columns) => vec![rows, columns],
        };
        let Foreign { dtype, shape: found, .. } = foreign;
        if *found != wanted || !["F32", "F16", "BF16"].contains(&dtype.as_str()) {
            let path = self.path.join(&self.files[*file].0);
            let why = format!("`{theirs}` is {dtype} {found:?}, not F32, F16 or BF16 {wanted:?}");
            return Err(FolderError::refused(&path, why));
        }
        Ok(Place { file: *file, foreign: foreign.clone(), shape, turned })
    }

    /// The output's weights, where they stand apart, must be the embedding, bit for bit.
    fn check_head(
        &self,
        path: &Path,
        head: &Foreign,
        embedding: Option<&Place>,
    ) -> Result<(), FolderError> {
        let same = match embedding {
            Some(place)
                if place.foreign.dtype == head.dtype && place.foreign.shape == head.shape =>
            {
                let file = self.tensors.get(HEAD).map_or(0, |(file, _)| *file);
                self.bytes(file, head)? == self.bytes(place.file, &place.foreign)?
            }
            _ => false,
        };
        let why = || format!("`{HEAD}` is not the embedding, which config.json says it is");
        if same { Ok(()) } else { Err(FolderError::refused(path, why())) }
    }

    fn bytes(&self, file: usize, foreign: &Foreign) -> Result<Vec<u8>, FolderError> {
        let (name, file) = &self.files[file];
        let len: usize = foreign.shape.iter().product();
        let mut bytes = vec![0; len * bytes_of(foreign) as usize];
        let path = self.path.join(name);
        let part = |(i, part): (usize, &mut [u8])| {
            file.read_exact_at(part, foreign.at + (i * AT_ONCE) as u64)
        };
        let read = bytes.par_chunks_mut(AT_ONCE).enumerate().try_for_each(part);
        read.map_err(|e| cut_off(&path, e))?;
        Ok(bytes)
    }

    /// A part of a parameter that stands there as it does here: from element `first` on.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub(super) fn read_part(
        &self,
        place: &Place,
        first: usize,
        out: &mut [f32],
    ) -> Result<(), FolderError> {
        let (name, file) = &self.files[place.file];
        let each = bytes_of(&place.foreign);
        let mut bytes = vec![0; out.len() * each as usize];
        let read = file.read_exact_at(&mut bytes, place.foreign.at + first as u64 * each);
        read.map_err(|e| cut_off(&self.path.join(name), e))?;
        widen(&place.foreign.dtype, &bytes, out);
        self.check_finite(place, out)
    }

    fn check_finite(&self, place: &Place, values: &[f32]) -> Result<(), FolderError> {
        let Some(x) = values.par_iter().with_min_len(1 << 14).find_first(|x| !x.is_finite()) else {
            return Ok(());
        };
        let path = self.path.join(&self.files[place.file].0);
        Err(FolderError::refused(&path, format!("`{}` has a {x}", place.foreign.name)))
    }

    /// A whole parameter, (rows, columns) row-major; on all cores.
    ///
    /// # Errors
    /// What cannot be read, and numbers that are not finite.
    pub(super) fn read(&self, place: &Place) -> Result<Vec<f32>, FolderError> {
        let bytes = self.bytes(place.file, &place.foreign)?;
        let each = bytes_of(&place.foreign) as usize;
        let mut values = vec![0.0; bytes.len() / each];
        let parts = values.par_chunks_mut(AT_ONCE / 4).zip(bytes.par_chunks(AT_ONCE / 4 * each));
        parts.for_each(|(values, bytes)| widen(&place.foreign.dtype, bytes, values));
        self.check_finite(place, &values)?;
        let (rows, columns) = place.shape;
        Ok(if place.turned { transposed(&values, (columns, rows)) } else { values })
    }
}

/// Bytes of each number.
fn bytes_of(foreign: &Foreign) -> u64 {
    width(&foreign.dtype).unwrap_or_else(|| unreachable!("{} was accepted", foreign.dtype))
}

/// Numbers of a type that [`Folder::place`] accepts, as fp32.
fn widen(dtype: &str, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        "F16" => widen_by(bytes, out, |b| f16::from_le_bytes(b).to_f32()),
        "BF16" => widen_by(bytes, out, |b| bf16::from_le_bytes(b).to_f32()),
        _ => widen_by(bytes, out, f32::from_le_bytes),
    }
}

fn widen_by<const N: usize>(bytes: &[u8], out: &mut [f32], number: impl Fn([u8; N]) -> f32) {
    out.iter_mut().zip(bytes.as_chunks::<N>().0).for_each(|(out, bytes)| *out = number(*bytes));
}

/// Which file each tensor is in.
pub(super) fn index(bytes: &[u8]) -> Result<BTreeMap<String, String>, String> {
    #[derive(serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Index {
        #[serde(default, rename = "metadata")]
        _metadata: Value,
        weight_map: Object<String>,
    }
    let Index { weight_map: Object(map), .. } =
        serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    let is_file = |name: &str| {
        name.ends_with(".safetensors")
            && name.len() <= 255
            && !name.starts_with('.')
            && name.chars().all(plain)
    };
    if let Some((tensor, file)) = map.iter().find(|(_, file)| !is_file(file)) {
        let (tensor, file) = (tensor.escape_debug(), file.escape_debug());
        return Err(format!(
            "`{tensor:.200}` is in `{file:.200}`, which is no file of this folder"
        ));
    }
    let files: BTreeSet<&String> = map.values().collect();
    match (map.is_empty(), files.len()) {
        (true, _) => Err("it names no tensor".into()),
        (_, n) if n > MOST_FILES => Err(format!("it names {n} files, more than {MOST_FILES}")),
        _ => Ok(map),
    }
}

/// A JSON file of the folder.
fn small(folder: &File, path: &Path, name: &str) -> Result<Vec<u8>, FolderError> {
    let at = path.join(name);
    let file = open_at(folder, Path::new(name), OFlags::empty());
    let file = file.map_err(|e| unreadable(&at, e))?;
    if file.metadata().map_err(|e| unreadable(&at, e))?.len() > LONGEST {
        return Err(FolderError::refused(
            &at,
            format!("it is longer than {}", topology::format_bytes(LONGEST)),
        ));
    }
    let mut bytes = Vec::new();
    let read = file.take(LONGEST).read_to_end(&mut bytes);
    read.map(|_| bytes).map_err(|e| unreadable(&at, e))
}

pub(super) fn unreadable(path: &Path, source: io::Error) -> FolderError {
    if source.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) {
        let why = "it is a link, and links are not followed: copy the folder with `cp -rL`";
        return FolderError::refused(path, why);
    }
    FolderError::Read { path: path.to_owned(), source }
}

/// A file that ends too soon is no system's fault.
fn cut_off(path: &Path, source: io::Error) -> FolderError {
    match source.kind() {
        io::ErrorKind::UnexpectedEof => FolderError::refused(path, "it is cut off"),
        _ => unreadable(path, source),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_names_files_of_the_folder_only() {
        let of = |file: &str| format!("{{\"metadata\":{{}},\"weight_map\":{{\"a\":\"{file}\"}}}}");
        assert_eq!(index(of("model-00001-of-00002.safetensors").as_bytes()).unwrap().len(), 1);
        for file in [
            "../model.safetensors",
            "/etc/x.safetensors",
            "sub/x.safetensors",
            ".safetensors",
            "..safetensors",
            "x.bin",
            "x.safetensors\\u0000",
            "x\\n.safetensors",
            "",
            &format!("{}.safetensors", "x".repeat(300)),
        ] {
            let why = index(of(file).as_bytes()).unwrap_err();
            assert!(why.contains("no file of this folder"), "{file}: {why}");
            assert!(!why.contains(['\n', '\0']) && why.len() < 500, "{why:?}");
        }
        let twice = of("x.safetensors").replace("{\"a\"", "{\"a\":\"y.safetensors\",\"a\"");
        assert!(index(twice.as_bytes()).unwrap_err().contains("twice"));
        for bad in ["", "{}", "[]", "{\"weight_map\":{}}", "{\"weight_map\":[]}", "{\"weight_map\""]
        {
            assert!(index(bad.as_bytes()).is_err(), "{bad}");
        }
        assert!(index("[".repeat(100_000).as_bytes()).is_err());
    }
}
