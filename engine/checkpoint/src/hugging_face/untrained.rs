//! Tensors of a folder that are no part of its decoder, such as the tensors of a vision tower, or of
//! layers that predict several tokens. A run does not train them: it keeps the path of the folder and their hashes, and an export copies them.

use super::FolderError;
use super::folder::{Folder, ForeignTensor};
use crate::manifest::Hash;
use data::progress::Progress;
use files::foreign_text::{foreign, reason};
use files::names::{KEPT, UNTRAINED, is_there};
use layout::tensor_names::layer_of;
use rayon::iter::{IntoParallelIterator, ParallelIterator};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use topology::counted;
use xxhash_rust::xxh3::Xxh3Default;

/// Bytes that are read per call.
const AT_ONCE: usize = 8 << 20;

/// A tensor that a run does not train.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct UntrainedTensor {
    /// Whole name in the folder.
    pub(super) name: String,
    /// Type of an element, such as `BF16`.
    pub(super) dtype: String,
    pub(super) shape: Vec<usize>,
    /// Hash of its bytes.
    hash: Hash,
}

/// All tensors of a folder that a run does not train.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UntrainedTensors {
    /// Absolute path of the folder.
    folder: PathBuf,
    tensors: Vec<UntrainedTensor>,
}

/// The folder with the tensors that a run did not train.
#[derive(Debug)]
pub(super) struct UntrainedSource {
    pub(super) folder: Folder,
    pub(super) tensors: Vec<UntrainedTensor>,
}

impl UntrainedTensors {
    /// The content of the file that a run keeps.
    pub fn encode(&self) -> Vec<u8> {
        // Texts and numbers are JSON, and writing to memory cannot fail.
        let text = serde_json::to_string_pretty(self);
        let text = text.unwrap_or_else(|e| unreachable!("a list of tensors without a text: {e}"));
        (text + "\n").into_bytes()
    }

    /// Reads the file that a run keeps.
    ///
    /// # Errors
    /// The fault of the file.
    pub(super) fn decode(bytes: &[u8]) -> Result<Self, String> {
        serde_json::from_slice(bytes).map_err(|e| reason(e).to_string())
    }

    /// Number of the tensors and names of their parts, such as `3 tensors of vision_tower`.
    pub fn summary(&self) -> String {
        let part = |tensor: &UntrainedTensor| {
            let name = tensor.name.strip_prefix("model.").unwrap_or(&tensor.name);
            match layer_of(name) {
                Some(layer) => format!("layers.{layer}"),
                None => name.split('.').next().unwrap_or_default().to_owned(),
            }
        };
        let parts: BTreeSet<String> = self.tensors.iter().map(part).collect();
        let parts = parts.into_iter().collect::<Vec<_>>().join(", ");
        match self.tensors.len() {
            0 => "no tensors of other parts".into(),
            all => format!("{} of {}", counted(all, "tensor"), foreign(parts)),
        }
    }

    /// The same tensors in another folder.
    pub(super) fn at(self, folder: PathBuf) -> Self {
        Self { folder, ..self }
    }

    /// Opens the folder for an export.
    ///
    /// # Errors
    /// The folder is not there, cannot be read, or has other tensors than at the start of the run.
    pub(super) fn open(self) -> Result<UntrainedSource, FolderError> {
        let refused = |why: &str| {
            let of = self.summary();
            let why = format!(
                "an export copies {of} from there, which the run did not train, and {why}: put the folder back as it was, or write its \
                 path as `folder` into {KEPT}/{UNTRAINED} of the run"
            );
            FolderError::refused(&self.folder, why)
        };
        if !is_there(&self.folder) {
            return Err(refused("the folder is not there"));
        }
        let folder = Folder::open(&self.folder)?;
        let found = folder.untrained.values().map(|foreign| &foreign.entry);
        let found = found.map(|of| (&of.name, &of.dtype, &of.shape));
        let known = self.tensors.iter().map(|of| (&of.name, &of.dtype, &of.shape));
        if !found.eq(known) {
            return Err(refused("the folder has other tensors now"));
        }
        Ok(UntrainedSource { folder, tensors: self.tensors })
    }
}

/// Name of the first tensor that `folder` has with other bytes, or lacks.
///
/// # Errors
/// A tensor cannot be read.
pub(super) fn first_unequal(
    tensors: &[UntrainedTensor],
    folder: &Folder,
    progress: &dyn Progress,
) -> Result<Option<String>, FolderError> {
    let found = hashed(folder, progress)?;
    let unequal = tensors.iter().find(|tensor| !found.contains(tensor));
    Ok(unequal.map(|tensor| tensor.name.clone()))
}

impl UntrainedSource {
    /// Bytes of a tensor.
    pub(super) fn bytes(&self, tensor: &UntrainedTensor) -> u64 {
        bytes_of(self.foreign(tensor)) as u64
    }

    /// A tensor in the folder.
    fn foreign(&self, UntrainedTensor { name, .. }: &UntrainedTensor) -> &ForeignTensor {
        match self.folder.untrained.get(name) {
            Some(foreign) => foreign,
            None => unreachable!("`{name}` was compared with the folder"),
        }
    }

    /// Passes the bytes of a tensor to `write`, and compares them with the hash of the run.
    ///
    /// # Errors
    /// The tensor cannot be read or written, or has other bytes than at the start of the run.
    pub(super) fn copy(
        &self,
        tensor: &UntrainedTensor,
        write: &mut dyn FnMut(&[u8]) -> Result<(), FolderError>,
    ) -> Result<(), FolderError> {
        let UntrainedTensor { name, hash, .. } = tensor;
        if hash_of(&self.folder, self.foreign(tensor), write)? == *hash {
            return Ok(());
        }
        let why = format!(
            "`{name}` has other bytes than at the start of the run, which did not train it: put the folder back as it was"
        );
        Err(FolderError::refused(self.folder.path(), why))
    }
}

impl Folder {
    /// Hash of the names, types, shapes and bytes of the decoder's tensors.
    ///
    /// # Errors
    /// A tensor cannot be read.
    pub(super) fn hash(&self, progress: &dyn Progress) -> Result<Hash, FolderError> {
        let tensors = self.tensors_of_decoder();
        let hashed = hashed_tensors(self, tensors, progress, "reading the base")?;
        let mut hasher = Xxh3Default::new();
        for UntrainedTensor { name, dtype, shape, hash } in &hashed {
            hasher.update(format!("{name} {dtype} {shape:?} {hash:?}\n").as_bytes());
        }
        Ok(Hash::end(&hasher))
    }

    /// The tensors that are no part of the decoder, with their hashes; `None` if the folder has a
    /// decoder alone.
    ///
    /// # Errors
    /// A tensor cannot be read, or the folder has no absolute path.
    pub fn untrained(
        &self,
        progress: &dyn Progress,
    ) -> Result<Option<UntrainedTensors>, FolderError> {
        if self.wrapper.is_none() && self.untrained.is_empty() {
            return Ok(None);
        }
        let folder = std::path::absolute(self.path());
        let folder = folder.map_err(|error| absolute_path(self.path(), &error))?;
        Ok(Some(UntrainedTensors { folder, tensors: hashed(self, progress)? }))
    }
}

fn absolute_path(path: &Path, error: &io::Error) -> FolderError {
    FolderError::refused(path, format!("its absolute path is unknown ({error})"))
}

/// All tensors of a folder that are no part of the decoder, in the order of their names.
fn hashed(folder: &Folder, progress: &dyn Progress) -> Result<Vec<UntrainedTensor>, FolderError> {
    let all: Vec<&ForeignTensor> = folder.untrained.values().collect();
    hashed_tensors(folder, all, progress, "reading other parts")
}

/// Tensors of a folder with their hashes. `what`: the title of the progress.
fn hashed_tensors(
    folder: &Folder,
    all: Vec<&ForeignTensor>,
    progress: &dyn Progress,
    what: &'static str,
) -> Result<Vec<UntrainedTensor>, FolderError> {
    let reading = progress.begin(what, all.iter().map(|of| bytes_of(of) as u64).sum());
    let hashed = |foreign: &ForeignTensor| -> Result<UntrainedTensor, FolderError> {
        let hash = hash_of(folder, foreign, &mut |part| {
            reading.add(part.len() as u64);
            Ok(())
        })?;
        let (name, dtype) = (foreign.entry.name.clone(), foreign.entry.dtype.clone());
        Ok(UntrainedTensor { name, dtype, shape: foreign.entry.shape.clone(), hash })
    };
    all.into_par_iter().map(hashed).collect()
}

/// Bytes of a tensor.
fn bytes_of(foreign: &ForeignTensor) -> usize {
    foreign.entry.shape.iter().product::<usize>() * foreign.entry.width() as usize
}

/// Hash of a tensor's bytes. `then` receives each part of them.
fn hash_of(
    folder: &Folder,
    foreign: &ForeignTensor,
    then: &mut dyn FnMut(&[u8]) -> Result<(), FolderError>,
) -> Result<Hash, FolderError> {
    let (bytes, mut hasher) = (bytes_of(foreign), Xxh3Default::new());
    let mut buffer = vec![0; AT_ONCE.min(bytes)];
    for first in (0..bytes).step_by(AT_ONCE) {
        let part = &mut buffer[..AT_ONCE.min(bytes - first)];
        folder.read_bytes(foreign, first, part)?;
        hasher.update(part);
        then(part)?;
    }
    Ok(Hash::end(&hasher))
}

#[cfg(test)]
mod tests {
    use super::*;
    use data::progress::Silence;
    use serde_json::{Map, Value, json};
    use std::fs;

    /// Writes a wrapper whose tensors have these names and one number each.
    fn wrapper(path: &Path, names: &[&str], number: f32) {
        fs::create_dir_all(path).unwrap();
        let config = json!({
            "model_type": "gemma3", "text_config": {
                "model_type": "gemma3_text", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1
            }
        });
        fs::write(path.join("config.json"), config.to_string()).unwrap();
        let (mut header, mut data) = (Map::new(), Vec::new());
        for name in names {
            let from = data.len();
            data.extend(number.to_le_bytes());
            let entry = json!({ "dtype": "F32", "shape": [1], "data_offsets": [from, data.len()] });
            header.insert((*name).to_owned(), entry);
        }
        let header = Value::Object(header).to_string();
        let length = (header.len() as u64).to_le_bytes();
        let file = [&length[..], header.as_bytes(), &data].concat();
        fs::write(path.join("model.safetensors"), file).unwrap();
    }

    const NAMES: [&str; 4] = [
        "language_model.model.norm.weight",
        "multi_modal_projector.linear.weight",
        "vision_tower.a.weight",
        "vision_tower.b.weight",
    ];

    #[test]
    fn other_parts_are_kept_by_their_hashes_and_copied_if_they_stay_the_same() {
        let temporary = tempfile::tempdir().unwrap();
        let path = temporary.path().join("model");
        wrapper(&path, &NAMES, 1.5);
        let folder = Folder::open(&path).unwrap();
        let kept = folder.untrained(&Silence).unwrap().unwrap();
        assert_eq!(kept.summary(), "3 tensors of multi_modal_projector, vision_tower");
        let kept = UntrainedTensors::decode(&kept.encode()).unwrap();
        let source = kept.clone().open().unwrap();
        for tensor in &source.tensors {
            let mut bytes: Vec<u8> = Vec::new();
            let mut write = |part: &[u8]| {
                bytes.extend(part);
                Ok(())
            };
            source.copy(tensor, &mut write).unwrap();
            assert_eq!(bytes, 1.5f32.to_le_bytes());
        }
        let unequal = |names: &[&str], number| {
            let other = temporary.path().join("other");
            wrapper(&other, names, number);
            let other = Folder::open(&other).unwrap();
            first_unequal(&source.tensors, &other, &Silence).unwrap()
        };
        assert_eq!(unequal(&NAMES, 1.5), None);
        assert_eq!(unequal(&NAMES, 2.5).as_deref(), Some(NAMES[1]));
        assert_eq!(unequal(&NAMES[..3], 1.5).as_deref(), Some(NAMES[3]));
        // Other numbers, other tensors, no folder.
        wrapper(&path, &NAMES, 2.5);
        let source = kept.clone().open().unwrap();
        let why = source.copy(&source.tensors[0], &mut |_| Ok(())).unwrap_err().to_string();
        assert!(why.contains("`multi_modal_projector.linear.weight` has other bytes"), "{why}");
        wrapper(&path, &NAMES[..3], 1.5);
        let why = kept.clone().open().unwrap_err().to_string();
        assert!(why.contains("the folder has other tensors now"), "{why}");
        fs::remove_dir_all(&path).unwrap();
        let why = kept.open().unwrap_err().to_string();
        for part in ["the folder is not there", "put the folder back", "model.from/untrained.json"]
        {
            assert!(why.contains(part), "{part}: {why}");
        }
    }

    #[test]
    fn a_decoder_alone_has_no_other_parts() {
        let temporary = tempfile::tempdir().unwrap();
        wrapper(temporary.path(), &["model.norm.weight"], 1.0);
        let config = json!({
            "model_type": "gemma3_text", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1
        });
        fs::write(temporary.path().join("config.json"), config.to_string()).unwrap();
        let folder = Folder::open(temporary.path()).unwrap();
        assert_eq!(folder.untrained(&Silence).unwrap(), None);
    }
}
