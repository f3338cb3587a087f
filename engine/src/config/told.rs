//! What the folder of `model.from` says.

use super::ModelConfig;
use super::file::read;
use super::reading::reader::Reader;
use super::reading::report::{Problem, Spot};
use super::reading::value::Complaint;
use super::transformers::{self, Described};
use std::path::Path;

/// The model that a folder of transformers describes, or its `config.json`. Of a stored config no file is opened.
pub(super) fn described(reader: &mut Reader, key: &str, path: &str) -> Option<Described> {
    if reader.stored || !reader.ok(&[key]) {
        return None;
    }
    let path = Path::new(path);
    let file = if path.is_dir() { path.join("config.json") } else { path.to_owned() };
    let name = file.display();
    let told = read(&file).map_err(|Complaint { message, .. }| {
        let help = "nothing is downloaded: name a folder on this machine with config.json";
        vec![(format!("cannot read `{name}`: {message}"), help)]
    });
    let told = told.and_then(|text| {
        let each = |why| (format!("{name}: {why}"), "mend the file, or use another model");
        let told = transformers::described(text.as_bytes());
        told.map_err(|wrong| wrong.into_iter().map(each).collect::<Vec<_>>())
    });
    match told {
        Ok(told) => Some(told),
        Err(wrong) => {
            let place = reader.places.get(key).copied();
            reader.mark_bad(key);
            reader.problems.extend(wrong.into_iter().map(|(message, help)| {
                let spots = place.map(|at| Spot::At(at, String::new())).into_iter().collect();
                Problem { key: key.into(), message, help: help.into(), spots }
            }));
            Some(transformers::none())
        }
    }
}

/// The tokenizer in the folder of a model, where there is one.
pub(super) fn tokenizer_beside(reader: &Reader, model: &ModelConfig) -> Option<String> {
    let from = model.from.as_ref().filter(|_| !reader.stored && reader.ok(&["model.from"]))?;
    let path = Path::new(from);
    let folder = if path.is_dir() { path } else { path.parent()? };
    let tokenizer = folder.join("tokenizer.json");
    tokenizer.is_file().then(|| tokenizer.to_string_lossy().into_owned())
}
