//! Reads the folder that `model.from` names.

use super::file::text_of;
use super::reading::{Complaint, ConfigReader, Problem};
use super::transformers::{FolderContent, FolderModel, Refusal};
use super::{DataConfig, ModelConfig, Weights, transformers};
use crate::tokenizers::unread_tokenizers;
use files::hub::incomplete_download;
use files::names::is_there;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Reads the model of a folder of transformers, or of its `config.json`. A stored config opens no
/// file.
pub(super) fn of_folder(reader: &mut ConfigReader, key: &str, path: &str) -> Option<FolderModel> {
    if reader.stored || !reader.ok(&[key]) {
        return None;
    }
    let path = Path::new(path);
    let file = if path.is_dir() { path.join("config.json") } else { path.to_owned() };
    let name = file.display();
    let model = text_of(&file).map_err(|failure| match other_content(path, &file) {
        Some(FolderContent { what, remedy }) => {
            let why = format!("`{}` has no config.json, and {what}", path.display());
            Refusal { wrong: vec![why], remedy }
        }
        None => Refusal {
            wrong: vec![format!("cannot read `{name}`: {}", failure.complaint.message)],
            remedy: unread_config(&file, failure.kind),
        },
    });
    let model = model.and_then(|text| {
        transformers::folder_model(text.as_bytes()).map_err(|Refusal { wrong, remedy }| {
            let wrong = wrong.into_iter().map(|why| format!("{name}: {why}")).collect();
            Refusal { wrong, remedy }
        })
    });
    match model {
        Ok(model) => Some(model),
        Err(Refusal { wrong, remedy }) => {
            for message in wrong {
                reader.refuse_value(key, Complaint { message, help: remedy.clone() });
            }
            reader.mark_bad(key);
            Some(transformers::none())
        }
    }
}

/// Remedy for a `config.json` that cannot be read. `why` is the kind of the system's error.
fn unread_config(file: &Path, why: Option<ErrorKind>) -> String {
    match (why, file.parent().and_then(incomplete_download)) {
        (Some(ErrorKind::PermissionDenied), _) => {
            "check the permissions of the file and of its folders".into()
        }
        (Some(ErrorKind::NotFound), Some(why)) => why,
        _ => "nothing is downloaded: name a folder on this machine with config.json".into(),
    }
}

/// Recognizes the content of a folder without `config.json`.
fn other_content(path: &Path, file: &Path) -> Option<FolderContent> {
    if is_there(file) || !path.is_dir() {
        return None;
    }
    transformers::adapter(path).or_else(|| transformers::other_form(path))
}

/// Path of the `tokenizer.json` in the folder of a model, if it exists.
pub(super) fn tokenizer_of_folder(reader: &ConfigReader, model: &ModelConfig) -> Option<String> {
    let from = model.from.as_ref().filter(|_| !reader.stored && reader.ok(&["model.from"]))?;
    let tokenizer = folder_of(from).join("tokenizer.json");
    tokenizer.is_file().then(|| tokenizer.to_string_lossy().into_owned())
}

/// Refuses to train a folder's weights on bytes if the folder has no tokenizer.json, unless the
/// config says that bytes are its tokens.
pub(super) fn refuse_bytes(reader: &mut ConfigReader, model: &ModelConfig, data: &DataConfig) {
    const KEY: &str = "data.tokenizer";
    let is_said = reader.places.contains_key(KEY);
    let is_known = reader.ok(&["model.from", "model.weights", KEY, "data.format", "data.train"]);
    let Some(from) = model.from.as_ref().filter(|_| !reader.stored && !is_said && is_known) else {
        return;
    };
    let bytes = data.format.is_bytes() && data.tokenizer.is_none() && !data.train.is_empty();
    if model.weights != Weights::Pretrained || !bytes {
        return;
    }
    let spots = [("model.from", "its weights know tokens"), ("data.train", "text")];
    let spots = spots.map(|(key, label)| reader.spot(key, label.into())).into();
    let message =
        format!("`{from}` has no tokenizer.json, and bytes are not the tokens of its weights");
    let remedy = unread_tokenizers(&folder_of(from));
    let help = format!(
        "{remedy}; or name one as `{KEY}`; where the weights were trained on bytes, set `{KEY}: None`"
    );
    reader.problems.push(Problem { key: KEY.into(), message, help, spots });
}

/// Remedy for rows of text without a tokenizer.
pub(super) fn tokenizer_remedy(model: &ModelConfig) -> String {
    match &model.from {
        Some(from) => {
            let remedy = unread_tokenizers(&folder_of(from));
            format!("`{from}` has no tokenizer.json: {remedy}; or set `data.tokenizer` to one or to its folder")
        }
        None => "set `data.tokenizer` to a tokenizer.json or to its folder, or `model.from` to a folder with one".into(),
    }
}

/// Folder of `model.from`, which names the folder or its config.json.
fn folder_of(from: &str) -> PathBuf {
    let path = Path::new(from);
    if path.is_dir() { path.into() } else { path.parent().unwrap_or(path).into() }
}

#[cfg(test)]
mod tests {
    use super::super::tests::loaded;
    use std::fs;
    use std::path::Path;

    /// Loads a config with a folder of weights in which `tokenizer` is the only tokenizer file.
    fn with(tokenizer: &str, sets: &[&str]) -> Result<(), String> {
        with_data("data: (train: \"t.txt\"), ", tokenizer, sets)
    }

    /// As [`with`], with another section `data`.
    fn with_data(data: &str, tokenizer: &str, sets: &[&str]) -> Result<(), String> {
        let folder = tempfile::tempdir().unwrap();
        let fixture =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/hf-chat-tiny");
        fs::copy(fixture.join("config.json"), folder.path().join("config.json")).unwrap();
        if !tokenizer.is_empty() {
            fs::write(folder.path().join(tokenizer), "a").unwrap();
        }
        let from = folder.path().display().to_string();
        let text = format!("(model: (from: {from:?}), {data}train: (steps: 1))");
        loaded(&text, sets).map(drop).map_err(|e| e.to_string().replace(&from, "DIR"))
    }

    #[test]
    fn weights_of_tokens_are_not_trained_on_bytes_unless_the_config_says_so() {
        for format in ["Auto", "Bytes"] {
            let format = format!("data.format={format}");
            let why = with("tokenizer.model", &[&format]).unwrap_err();
            for message in [
                "error: data.tokenizer: `DIR` has no tokenizer.json, and bytes are not the tokens",
                "does not read its tokenizer.model",
                "A.from_pretrained(\"DIR\").save_pretrained(\"DIR-tokenizer\")",
                "`data.tokenizer: None`",
            ] {
                assert!(why.contains(message), "{message}: {why}");
            }
            assert!(with("", &[&format]).unwrap_err().contains("copy the tokenizer.json"));
            with("tokenizer.json", &[&format]).unwrap();
            for consent in
                ["data.tokenizer=None", "data.tokenizer=\"t.json\"", "model.weights=Random"]
            {
                with("tokenizer.model", &[&format, consent]).unwrap();
            }
        }
        // Token files exist already, and a plan needs no data.
        with("tokenizer.model", &["data.format=U16"]).unwrap();
        with_data("", "tokenizer.model", &[]).unwrap();
    }

    #[test]
    fn chats_without_a_tokenizer_json_are_told_of_the_file_that_is_there() {
        let why = with("tokenizer.model", &["data.format=Chat"]).unwrap_err();
        for message in [
            "rows of text need a tokenizer",
            "does not read its tokenizer.model",
            "save_pretrained",
        ] {
            assert!(why.contains(message), "{message}: {why}");
        }
        assert!(with("", &["data.format=Chat"]).unwrap_err().contains("copy the tokenizer.json"));
    }
}
