//! Reads the section `model`. A folder of transformers gives the keys that the config leaves out,
//! and no key may contradict it.

use super::reading::{Section, Violation};
use super::transformers::{COMPARED, ComparedKey, FolderModel};
use super::{ModelConfig, Origin, model_folder, transformers};

/// Reads the section `model`.
pub(super) fn model(s: &mut Section<'_, '_>) -> ModelConfig {
    let mut folder = None;
    let model = ModelConfig::read(s, |s, from| {
        // A bad `model.from` is already reported, and the stand-in prevents further errors.
        folder = match from {
            _ if !s.reader.ok(&["model.from"]) => Some(transformers::none()),
            Some(path) => model_folder::of_folder(s.reader, "model.from", path),
            None => None,
        };
        folder.as_ref().map(|folder| folder.model.clone())
    });
    if let (Some(folder), Some(from)) = (&folder, &model.from) {
        contradictions(s, &model, from, folder);
    }
    model
}

/// Reports keys of the config that contradict the folder.
fn contradictions(s: &mut Section<'_, '_>, model: &ModelConfig, from: &str, folder: &FolderModel) {
    let most = folder.model.seq_len;
    // The model is the same with shorter samples, for which some windows are none.
    let [our, their] = [model, &folder.model].map(|of| of.for_samples(model.seq_len));
    let differing = COMPARED.into_iter().filter_map(|ComparedKey { key, value, .. }| {
        let (ours, theirs) = (value(&our), value(&their));
        if key == "model.seq_len" {
            let most_here = format!("at most {most} ({})", folder.positions);
            return (model.seq_len > most).then_some((key, ours, most_here));
        }
        (ours != theirs).then_some((key, ours, theirs))
    });
    for (key, ours, theirs) in differing {
        // An invalid key is already reported.
        let given = s.reader.origins.iter().any(|(name, _, origin)| {
            let rest = name.strip_prefix(key);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
                && !matches!(origin, Origin::Default | Origin::Derived(_))
        });
        if !given || !s.reader.ok(&[key, "model.from"]) {
            continue;
        }
        s.reader.refuse(Violation {
            message: format!("{ours}, but the model of {from} has {theirs}"),
            help: match key {
                "model.vocab" if model.vocab > folder.model.vocab => "leave `model.vocab` out, or make the vocabulary of the folder larger with transformers (resize_token_embeddings, save_pretrained)".into(),
                _ => format!("leave `{key}` out, or name another folder"),
            },
            values: vec![(key, format!("{ours} here")), ("model.from", format!("{theirs} there"))],
        });
    }
}
