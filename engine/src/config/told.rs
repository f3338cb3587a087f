//! What the folder of `model.from` says.

use super::ModelConfig;
use super::file::read;
use super::reading::reader::Reader;
use super::reading::report::{Problem, Spot};
use super::reading::value::Complaint;
use super::transformers::{self, Described, Instead, Refused};
use std::path::Path;

/// The model that a folder of transformers describes, or its `config.json`. Of a stored config no file is opened.
pub(super) fn described(reader: &mut Reader, key: &str, path: &str) -> Option<Described> {
    if reader.stored || !reader.ok(&[key]) {
        return None;
    }
    let path = Path::new(path);
    let file = if path.is_dir() { path.join("config.json") } else { path.to_owned() };
    let name = file.display();
    let told = read(&file).map_err(|Complaint { message, .. }| match instead(path, &file) {
        Some(Instead { what, remedy }) => {
            let why = format!("`{}` has no config.json, and {what}", path.display());
            Refused { wrong: vec![why], remedy }
        }
        None => Refused {
            wrong: vec![format!("cannot read `{name}`: {message}")],
            remedy: "nothing is downloaded: name a folder on this machine with config.json".into(),
        },
    });
    let told = told.and_then(|text| {
        let told = transformers::described(text.as_bytes());
        told.map_err(|Refused { wrong, remedy }| {
            let wrong = wrong.into_iter().map(|why| format!("{name}: {why}")).collect();
            Refused { wrong, remedy }
        })
    });
    match told {
        Ok(told) => Some(told),
        Err(Refused { wrong, remedy }) => {
            let place = reader.places.get(key).copied();
            reader.mark_bad(key);
            reader.problems.extend(wrong.into_iter().map(|message| {
                let spots = place.map(|at| Spot::At(at, String::new())).into_iter().collect();
                Problem { key: key.into(), message, help: remedy.clone(), spots }
            }));
            Some(transformers::none())
        }
    }
}

/// What a folder is whose `config.json` is not there.
fn instead(path: &Path, file: &Path) -> Option<Instead> {
    let gone = std::fs::symlink_metadata(file).is_err() && path.is_dir();
    let found =
        gone.then(|| transformers::adapter(path).or_else(|| transformers::other_form(path)));
    found.flatten()
}

/// The tokenizer in the folder of a model, where there is one.
pub(super) fn tokenizer_beside(reader: &Reader, model: &ModelConfig) -> Option<String> {
    let from = model.from.as_ref().filter(|_| !reader.stored && reader.ok(&["model.from"]))?;
    let path = Path::new(from);
    let folder = if path.is_dir() { path } else { path.parent()? };
    let tokenizer = folder.join("tokenizer.json");
    tokenizer.is_file().then(|| tokenizer.to_string_lossy().into_owned())
}
