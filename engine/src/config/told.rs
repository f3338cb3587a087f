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
    let told = read(&file).map_err(|Complaint { message, .. }| {
        let help = "nothing is downloaded: name a folder on this machine with config.json";
        (format!("cannot read `{}`: {message}", file.display()), help.to_owned())
    });
    let told = told.and_then(|text| {
        transformers::described(text.as_bytes()).map_err(|wrong| {
            let lines: String = wrong.iter().map(|line| format!("\n  {line}")).collect();
            let message = format!("{} is no model that onebox computes:{lines}", file.display());
            (message, "use a model of another kind, or mend the file".to_owned())
        })
    });
    match told {
        Ok(told) => Some(told),
        Err((message, help)) => {
            let spots = reader.places.get(key).map(|at| Spot::At(*at, String::new()));
            let spots = spots.into_iter().collect();
            reader.mark_bad(key);
            reader.problems.push(Problem { key: key.into(), message, help, spots });
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
