//! Models in the cache of the Hugging Face hub: by name, by the model's folder and by a snapshot, they
//! are the model of a plain folder. Links that leave the model's folder are refused.
#![allow(missing_docs, reason = "a test")]
#![allow(clippy::unwrap_used, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the lines above")]

use super::folders::model::model;
use crate::common::{CommandOutput, Folder};
use std::fs;
use std::os::unix::fs::symlink;

const MODEL: &str = "hub/models--Org--Chat-Tiny";

/// A folder with the model `m`, and the same files in a cache as `hf download` leaves them.
fn cached() -> Folder {
    let folder = model("chat");
    for name in ["blobs", "refs", "snapshots/0a1b"] {
        fs::create_dir_all(folder.path(MODEL).join(name)).unwrap();
    }
    fs::write(folder.path(MODEL).join("refs/main"), "0a1b").unwrap();
    for entry in fs::read_dir(folder.path("m")).unwrap() {
        let (from, name) = (entry.as_ref().unwrap().path(), entry.unwrap().file_name());
        let name = name.to_str().unwrap();
        if from.is_file() {
            fs::copy(from, folder.path(MODEL).join("blobs").join(format!("b-{name}"))).unwrap();
            symlink(format!("../../blobs/b-{name}"), snapshot(&folder, name)).unwrap();
        }
    }
    folder
}

fn snapshot(folder: &Folder, name: &str) -> std::path::PathBuf {
    folder.path(MODEL).join("snapshots/0a1b").join(name)
}

/// Trains one step from the model that `from` names.
fn train(folder: &Folder, from: &str, run: &str) -> CommandOutput {
    let from = format!("model.from={from:?}");
    let mut command = folder.command(&["train", "a.ron", "-q", "--run-dir", run, "--set", &from]);
    command.env("HF_HUB_CACHE", folder.path("hub"));
    Folder::done(command)
}

#[test]
fn a_cached_model_is_the_model_of_its_folder() {
    let folder = cached();
    train(&folder, "m", "plain").ok();
    let snapshot = format!("{MODEL}/snapshots/0a1b");
    for (i, from) in ["Org/Chat-Tiny", "Org/Chat-Tiny@main", "Org/Chat-Tiny@0a1b", MODEL, &snapshot]
        .into_iter()
        .enumerate()
    {
        let run = format!("run-{i}");
        train(&folder, from, &run).ok();
        assert_eq!(folder.hash(&run), folder.hash("plain"), "{from}");
        // The run keeps the tokenizer and the template as files of its own.
        let kept = folder.path(&run).join("model.from");
        for entry in fs::read_dir(folder.path("plain/model.from")).unwrap() {
            let name = entry.unwrap().file_name();
            assert!(fs::symlink_metadata(kept.join(&name)).unwrap().is_file(), "{from} {name:?}");
        }
    }
    let mut plan = folder.command(&["plan", "--model", "Org/Chat-Tiny", "--box", "h100-256gib"]);
    plan.env("HF_HUB_CACHE", folder.path("hub"));
    let said = Folder::done(plan).ok().stdout;
    assert!(said.contains("Chat-Tiny: Llama family"), "{said}");
}

#[test]
fn the_cache_is_found_by_each_variable() {
    let folder = cached();
    fs::create_dir_all(folder.path("home/.cache/huggingface")).unwrap();
    symlink(folder.path("hub"), folder.path("home/.cache/huggingface/hub")).unwrap();
    let home = folder.path("home");
    for (variable, value) in [
        ("HF_HOME", home.join(".cache/huggingface")),
        ("XDG_CACHE_HOME", home.join(".cache")),
        ("HOME", home.clone()),
    ] {
        let set = "model.from=\"Org/Chat-Tiny\"";
        let mut command = folder.command(&["config", "check", "a.ron", "--set", set]);
        for other in ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"] {
            command.env_remove(other);
        }
        command.env(variable, value);
        Folder::done(command).ok();
    }
}

#[test]
fn a_model_that_is_not_cached_is_refused_with_the_command_that_downloads_it() {
    let folder = cached();
    for (from, command) in [
        ("Org/Other", "run `hf download Org/Other`"),
        ("Org/Chat-Tiny@v2", "run `hf download Org/Chat-Tiny --revision v2`"),
    ] {
        train(&folder, from, "run").refused(78, &["model.from", from, command]);
        let mut plan = folder.command(&["plan", "--model", from, "--box", "h100-256gib"]);
        plan.env("HF_HUB_CACHE", folder.path("hub"));
        Folder::done(plan).refused(78, &[from, command]);
        assert!(!folder.path("run").exists());
    }
}

#[test]
fn a_link_that_leaves_the_model_and_a_missing_blob_are_refused() {
    for name in ["model.safetensors", "tokenizer_config.json"] {
        let folder = cached();
        let (link, blob) =
            (snapshot(&folder, name), folder.path(MODEL).join("blobs").join(format!("b-{name}")));
        let moved = folder.path("elsewhere");
        fs::rename(&blob, &moved).unwrap();
        train(&folder, "Org/Chat-Tiny", "run")
            .refused(74, &[name, "is missing: download the model again"]);
        for to in [moved.display().to_string(), "../../../../elsewhere".into()] {
            fs::remove_file(&link).unwrap();
            symlink(to, &link).unwrap();
            train(&folder, "Org/Chat-Tiny", "run")
                .refused(74, &[name, "leaves the cache folder of the model"]);
        }
        assert!(!folder.path("run").exists(), "{name}");
    }
}
