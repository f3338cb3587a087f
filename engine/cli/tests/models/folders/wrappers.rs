//! Folders of a decoder with other parts: onebox trains the decoder, and an export has the other parts
//! as they were.

use super::model::{change, model, set, tensors, write, write_keys_of_version_4};
use super::results;
use crate::common::Folder;
use serde_json::{Value, json};
use std::fs;

/// Makes a wrapper of `m`, with tensors of a vision tower in another type, under the names of version
/// 4 (`old`) or 5 of transformers.
fn wrap(folder: &Folder, old: bool) {
    let mut inner: Value = serde_json::from_str(&folder.read("m/config.json")).unwrap();
    inner.as_object_mut().unwrap().remove("architectures");
    let config = json!({
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "dtype": "bfloat16",
        "eos_token_id": [1, 6], "mm_tokens_per_image": 256, "text_config": inner,
        "vision_config": { "model_type": "siglip_vision_model", "hidden_size": 4 }
    });
    fs::write(folder.path("m/config.json"), config.to_string()).unwrap();
    change(folder, |all| {
        for (name, ..) in all.iter_mut() {
            *name = match old {
                true => format!("language_model.{name}"),
                false => name.replace("model.", "model.language_model."),
            };
        }
        let other = |name: &str, first: u8| {
            let prefix = if old { "" } else { "model." };
            let entry = json!({ "dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 0] });
            (format!("{prefix}{name}"), entry, (first..first + 12).collect::<Vec<u8>>())
        };
        all.push(other("vision_tower.vision_model.head.weight", 1));
        all.push(other("multi_modal_projector.mm_input_projection_weight", 100));
    });
}

/// Files of Gemma 3 have the keys and prefixes of version 4; what transformers 5 writes has its own.
#[test]
fn a_wrapper_of_either_version_is_the_model_of_its_decoder() {
    let want = results(&model("gemma3"));
    for old in [true, false] {
        let folder = model("gemma3");
        if old {
            write_keys_of_version_4(&folder);
        }
        wrap(&folder, old);
        assert!(results(&folder) == want, "old: {old}");
    }
}

/// The tensors of other parts than the decoder, by name.
fn other_parts(folder: &Folder, path: &str) -> Vec<(String, Value, Vec<u8>)> {
    let mut all = tensors(&folder.path(path));
    let others = ["vision_tower", "multi_modal", "mtp.", "visual."];
    all.retain(|(name, ..)| others.iter().any(|other| name.contains(other)));
    all.iter_mut().for_each(|(_, entry, _)| entry["data_offsets"] = json!(null));
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

#[test]
fn an_export_of_a_wrapper_has_the_other_parts_as_they_were() {
    for old in [true, false] {
        let folder = model("gemma3");
        wrap(&folder, old);
        fs::write(folder.path("m/preprocessor_config.json"), "{\"size\": 8}").unwrap();
        let output = folder.onebox(&["train", "a.ron", "-q", "--run-dir", "run"]).ok();
        let note = "the run does not train 2 tensors of multi_modal_projector, vision_tower";
        assert_eq!(output.stderr.matches(note).count(), 1, "{}", output.stderr);
        let export = |run: &str, out: &str| {
            folder.onebox(&["checkpoint", "export", run, out, "--to", "safetensors"])
        };
        export("run", "out").ok();
        let came = other_parts(&folder, "m/model.safetensors");
        assert_eq!(came.len(), 2);
        assert_eq!(other_parts(&folder, "out/model.safetensors"), came);
        // The decoder keeps the names of its files, and has other numbers.
        let names = |path: &str| {
            let all = tensors(&folder.path(path));
            let mut names: Vec<String> = all.into_iter().map(|(name, ..)| name).collect();
            names.sort();
            names
        };
        assert_eq!(names("out/model.safetensors"), names("m/model.safetensors"));
        assert_ne!(
            fs::read(folder.path("out/model.safetensors")).unwrap(),
            fs::read(folder.path("m/model.safetensors")).unwrap()
        );
        let read = |path: &str| -> Value { serde_json::from_str(&folder.read(path)).unwrap() };
        let mut expected = read("m/config.json");
        expected["dtype"] = json!("float32");
        expected["text_config"]["dtype"] = json!("float32");
        assert_eq!(read("out/config.json"), expected);
        assert!(!folder.path("out/untrained.json").exists());
        assert_eq!(folder.read("out/preprocessor_config.json"), "{\"size\": 8}");
        // The export is such a folder again, and a fork exports the same parts.
        let again = folder.read("a.ron").replace("from: \"m\"", "from: \"out\"");
        fs::write(folder.path("b.ron"), again).unwrap();
        folder.onebox(&["config", "check", "b.ron"]).ok();
        let fork = ["train", "run/config.ron", "-q", "--run-dir", "run", "--fork"];
        folder.onebox(&[&fork[..], &["--set", "train.steps=2"]].concat()).ok();
        export("run-2", "forked").ok();
        assert_eq!(other_parts(&folder, "forked/model.safetensors"), came);
        // A folder that has changed, or is gone, is refused.
        change(&folder, |all| {
            all.iter_mut()
                .filter(|tensor| tensor.0.contains("vision"))
                .for_each(|tensor| tensor.2[0] ^= 1);
        });
        export("run", "changed").refused(74, &["vision_model.head.weight` has other bytes"]);
        fs::rename(folder.path("m"), folder.path("moved")).unwrap();
        let parts = ["2 tensors of", "the folder is not there", "model.from/untrained.json"];
        export("run", "gone").refused(74, &parts);
        assert!(!folder.path("changed").exists() && !folder.path("gone").exists());
    }
}

/// transformers loads a Gemma 3 with its other parts for PEFT, whose names then have `language_model`.
#[test]
fn adapters_of_a_wrapper_have_its_names_in_folders_of_peft() {
    let folder = model("gemma3");
    wrap(&folder, false);
    let lora = ["--set", "adapter=Lora(rank: 2, dropout: 0.05)"];
    folder.onebox(&[&["train", "a.ron", "-q", "--run-dir", "run"], &lora[..]].concat()).ok();
    folder.onebox(&["checkpoint", "export", "run", "peft", "--to", "peft"]).ok();
    let file = folder.path("peft/adapter_model.safetensors");
    let [of_wrapper, of_older, plain] = ["model.language_model", "language_model.model", "model"]
        .map(|module| format!("base_model.model.{module}.layers."));
    let written = tensors(&file);
    assert!(!written.is_empty());
    assert!(written.iter().all(|(name, ..)| name.starts_with(&of_wrapper)), "{}", written[0].0);
    let settings: Value = serde_json::from_str(&folder.read("peft/adapter_config.json")).unwrap();
    assert_eq!(settings["lora_dropout"], json!(0.05));
    // PEFT wraps each module whose name has one of these ends, so that none may be that of a vision tower.
    let targets = settings["target_modules"].as_array().unwrap();
    assert_eq!(targets.len(), written.len() / 2);
    let of_decoder =
        |name: &Value| name.as_str().unwrap().starts_with("model.language_model.layers.");
    assert!(targets.iter().all(of_decoder), "{targets:?}");
    // A run starts from it, under the names of any class, and with its dropout.
    let from = ["--set", "adapter=Lora(from: \"peft\")"];
    for names in [&of_wrapper, &of_older, &plain] {
        let renamed = written
            .iter()
            .cloned()
            .map(|(name, entry, bytes)| (name.replacen(&of_wrapper, names, 1), entry, bytes));
        write(&file, &renamed.collect());
        folder.onebox(&[&["config", "check", "a.ron"], &from[..]].concat()).ok();
    }
    let shown = folder.onebox(&[&["config", "show", "a.ron"], &from[..]].concat()).ok().stdout;
    let line = shown.lines().find(|line| line.starts_with("adapter.dropout ")).unwrap();
    assert!(line.contains(" 0.05 ") && line.ends_with("adapter_config.json"), "{line}");
}

#[test]
fn random_weights_of_a_wrapper_are_exported_as_a_decoder_alone() {
    let folder = model("gemma3");
    wrap(&folder, true);
    let train = ["train", "a.ron", "-q", "--run-dir", "run", "--set", "model.weights=Random"];
    let output = folder.onebox(&train).ok();
    assert!(!output.stderr.contains("does not train"), "{}", output.stderr);
    folder.onebox(&["checkpoint", "export", "run", "out", "--to", "safetensors"]).ok();
    let config: Value = serde_json::from_str(&folder.read("out/config.json")).unwrap();
    assert_eq!(config["architectures"], json!(["Gemma3ForCausalLM"]));
    assert_eq!(config["eos_token_id"], json!([1, 6]));
    assert!(other_parts(&folder, "out/model.safetensors").is_empty());
    // Another class around the decoder is refused.
    set(&folder, "architectures", json!(["Gemma3ForSequenceClassification"]));
    folder.onebox(&["config", "check", "a.ron"]).refused(78, &["`architectures` is"]);
}

/// A Qwen3.5 has layers that predict several tokens and a vision tower beside its decoder; its classes of
/// text models leave both out, too.
#[test]
fn an_export_of_a_qwen_has_its_predictions_and_its_vision_as_they_were() {
    let classes =
        [("qwen3-5", ["Qwen3_5", "qwen3_5"]), ("qwen3-5-moe", ["Qwen3_5Moe", "qwen3_5_moe"])];
    for ((name, [class, kind]), wrapped) in
        classes.into_iter().flat_map(|class| [(class, true), (class, false)])
    {
        let folder = model(name);
        if wrapped {
            let mut inner: Value = serde_json::from_str(&folder.read("m/config.json")).unwrap();
            inner.as_object_mut().unwrap().remove("architectures");
            let config = json!({
                "architectures": [format!("{class}ForConditionalGeneration")], "model_type": kind,
                "text_config": inner, "vision_config": { "model_type": format!("{kind}_vision"), "depth": 1 }
            });
            fs::write(folder.path("m/config.json"), config.to_string()).unwrap();
        }
        change(&folder, |all| {
            if wrapped {
                for (name, ..) in all.iter_mut() {
                    *name = name.replace("model.", "model.language_model.");
                }
            }
            let other = |name: &str, first: u8| {
                let entry = json!({ "dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 0] });
                (name.to_owned(), entry, (first..first + 12).collect::<Vec<u8>>())
            };
            all.push(other("mtp.layers.0.self_attn.q_proj.weight", 1));
            all.push(other("model.visual.blocks.0.norm1.weight", 100));
        });
        let output = folder.onebox(&["train", "a.ron", "-q", "--run-dir", "run"]).ok();
        let note = "the run does not train 2 tensors of mtp, visual";
        assert_eq!(output.stderr.matches(note).count(), 1, "{}", output.stderr);
        folder.onebox(&["checkpoint", "export", "run", "out", "--to", "safetensors"]).ok();
        let came = other_parts(&folder, "m/model.safetensors");
        assert_eq!(came.len(), 2);
        assert_eq!(other_parts(&folder, "out/model.safetensors"), came);
        let shapes = |path: &str| {
            let all = tensors(&folder.path(path));
            let mut all: Vec<(String, String)> =
                all.into_iter().map(|(name, of, _)| (name, of["shape"].to_string())).collect();
            all.sort();
            all
        };
        assert_eq!(shapes("out/model.safetensors"), shapes("m/model.safetensors"));
        let read = |path: &str| -> Value { serde_json::from_str(&folder.read(path)).unwrap() };
        for key in ["architectures", "model_type"] {
            assert_eq!(read("out/config.json")[key], read("m/config.json")[key]);
        }
    }
}
