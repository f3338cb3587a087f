//! Models in the cache of the Hugging Face hub: by name, by the model's folder and by a snapshot, they
//! are the model of a plain folder. Links that leave the model's folder are refused.
#![allow(missing_docs, reason = "a test")]
#![allow(clippy::unwrap_used, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the lines above")]

use super::folders::model::{cut, model};
use crate::common::{CommandOutput, Folder, without_roots_rights};
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};

const MODEL: &str = "hub/models--Org--Chat-Tiny";

/// A folder with the model `m`, and the same files in a cache as `hf download` leaves them.
fn cached() -> Folder {
    in_cache(model("chat"))
}

/// The files of the folder `m` in a cache, too.
fn in_cache(folder: Folder) -> Folder {
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
        let copied = folder.path(&run).join("model.from");
        for entry in fs::read_dir(folder.path("plain/model.from")).unwrap() {
            let name = entry.unwrap().file_name();
            assert!(fs::symlink_metadata(copied.join(&name)).unwrap().is_file(), "{from} {name:?}");
        }
    }
    let mut plan = folder.command(&["plan", "--model", "Org/Chat-Tiny", "--box", "h100-256gib"]);
    plan.env("HF_HUB_CACHE", folder.path("hub"));
    let output = Folder::done(plan).ok().stdout;
    assert!(output.contains("Chat-Tiny: Llama family"), "{output}");
}

#[test]
fn the_cache_is_found_by_each_variable() {
    let folder = cached();
    fs::create_dir_all(folder.path("home/.cache/huggingface")).unwrap();
    symlink(folder.path("hub"), folder.path("home/.cache/huggingface/hub")).unwrap();
    let home = folder.path("home");
    let (hub, nowhere) = (folder.path("hub"), folder.path("nowhere"));
    // The order and `~` are those of huggingface_hub 2.4 (constants.py).
    for variables in [
        vec![("HF_HOME", home.join(".cache/huggingface"))],
        vec![("XDG_CACHE_HOME", home.join(".cache"))],
        vec![("HOME", home.clone())],
        vec![("HUGGINGFACE_HUB_CACHE", hub.clone()), ("HF_HOME", nowhere.clone())],
        vec![("HF_HUB_CACHE", hub), ("HUGGINGFACE_HUB_CACHE", nowhere)],
        vec![("HF_HUB_CACHE", "~/.cache/huggingface/hub".into()), ("HOME", home.clone())],
        vec![("HUGGINGFACE_HUB_CACHE", "~/.cache/huggingface/hub".into()), ("HOME", home.clone())],
        vec![("HF_HOME", "~/.cache/huggingface".into()), ("HOME", home.clone())],
        vec![("XDG_CACHE_HOME", "~/.cache".into()), ("HOME", home)],
    ] {
        let set = "model.from=\"Org/Chat-Tiny\"";
        let mut command = folder.command(&["config", "check", "a.ron", "--set", set]);
        for other in ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"] {
            command.env_remove(other);
        }
        command.envs(variables);
        Folder::done(command).ok();
    }
}

#[test]
fn a_model_that_is_not_cached_is_refused_with_the_command_that_downloads_it() {
    let folder = cached();
    for (from, command) in [
        ("Org/Other", "run `hf download Org/Other`"),
        ("Org/Chat-Tiny@v2", "run `hf download Org/Chat-Tiny --revision v2`"),
        ("Org/Chat-Tiny@refs/pr/2", "run `hf download Org/Chat-Tiny --revision refs/pr/2`"),
        ("gpt2", "run `hf download gpt2`"),
    ] {
        train(&folder, from, "run").refused(78, &["model.from", from, command]);
        let mut plan = folder.command(&["plan", "--model", from, "--box", "h100-256gib"]);
        plan.env("HF_HUB_CACHE", folder.path("hub"));
        Folder::done(plan).refused(78, &[from, command]);
        assert!(!folder.path("run").exists());
        // The missing model is the cause, so its missing tokenizer is no further error.
        let from = format!("model.from={from:?}");
        let chats = ["data.format=Chat", "data.train=\"chats.jsonl\"", &from];
        let sets = chats.iter().flat_map(|set| ["--set", set]);
        let args: Vec<&str> = ["config", "check", "a.ron"].into_iter().chain(sets).collect();
        let mut check = folder.command(&args);
        check.env("HF_HUB_CACHE", folder.path("hub"));
        Folder::done(check).refused(78, &["model.from", command, "1 error in a.ron"]);
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

#[test]
fn a_name_without_an_organisation_and_a_pull_request_are_found() {
    let folder = cached();
    train(&folder, "m", "plain").ok();
    // `hf download --revision refs/pr/1` leaves the file refs/refs/pr/1.
    fs::create_dir_all(folder.path(MODEL).join("refs/refs/pr")).unwrap();
    fs::write(folder.path(MODEL).join("refs/refs/pr/1"), "0a1b").unwrap();
    train(&folder, "Org/Chat-Tiny@refs/pr/1", "request").ok();
    fs::rename(folder.path(MODEL), folder.path("hub/models--chat-tiny")).unwrap();
    train(&folder, "chat-tiny", "short").ok();
    let mut plan = folder.command(&["plan", "--model", "chat-tiny", "--box", "h100-256gib"]);
    plan.env("HF_HUB_CACHE", folder.path("hub"));
    let output = Folder::done(plan).ok().stdout;
    assert!(output.contains("chat-tiny: Llama family"), "{output}");
    // A folder of this name is there: it is the model.
    fs::rename(folder.path("m"), folder.path("chat-tiny")).unwrap();
    fs::remove_dir_all(folder.path("hub")).unwrap();
    train(&folder, "chat-tiny", "folder").ok();
    for run in ["request", "short", "folder"] {
        assert_eq!(folder.hash(run), folder.hash("plain"), "{run}");
    }
}

#[test]
fn a_snapshot_without_a_part_is_refused_with_the_command_that_downloads_it() {
    let command = "run `hf download Org/Chat-Tiny --revision 0a1b`";
    let lacks = |folder: &Folder, name: &str, code: i32| {
        fs::remove_file(snapshot(folder, name)).unwrap();
        for from in ["Org/Chat-Tiny", MODEL] {
            train(folder, from, "run").refused(code, &["model.from", name, command]);
        }
        assert!(!folder.path("run").exists(), "{name}");
    };
    lacks(&cached(), "config.json", 78);
    lacks(&cached(), "model.safetensors", 66);
    let parts = || {
        let folder = model("chat");
        cut(&folder, &[]);
        in_cache(folder)
    };
    // The index names both shards.
    lacks(&parts(), "model-00002-of-00002.safetensors", 66);
    lacks(&parts(), "model.safetensors.index.json", 66);
    // A download that has only begun: no branch names its commit.
    let folder = cached();
    fs::remove_file(folder.path(MODEL).join("refs/main")).unwrap();
    train(&folder, MODEL, "run").refused(78, &["model.from", "run `hf download Org/Chat-Tiny`"]);
}

#[test]
fn a_cache_that_may_not_be_read_is_no_missing_model() {
    let folder = cached();
    let set = "model.from=\"Org/Chat-Tiny\"";
    let locked = ["", "/models--Org--Chat-Tiny/refs/main", "/models--Org--Chat-Tiny/snapshots"];
    let config = "/models--Org--Chat-Tiny/blobs/b-config.json";
    for name in locked.into_iter().chain([config]) {
        let path = folder.path(&format!("hub{name}"));
        let before = fs::metadata(&path).unwrap().permissions();
        fs::set_permissions(&path, Permissions::from_mode(0o000)).unwrap();
        let mut command = folder.command(&["config", "check", "a.ron", "--set", set]);
        command.env("HF_HUB_CACHE", folder.path("hub"));
        let is_root = rustix::process::geteuid().is_root();
        let command = if is_root { without_roots_rights(&command) } else { command };
        let output = Folder::done(command);
        fs::set_permissions(&path, before).unwrap();
        let output = output.refused(78, &["model.from", "Permission denied", "permissions"]);
        assert!(!output.stderr.contains("hf download"), "{name}: {}", output.stderr);
    }
    // What is no folder cannot be read either.
    fs::write(folder.path("file"), "").unwrap();
    let mut command = folder.command(&["plan", "--model", "Org/X", "--box", "h100-256gib"]);
    command.env("HF_HUB_CACHE", folder.path("file"));
    Folder::done(command).refused(78, &["cannot be read", "Not a directory", "HF_HUB_CACHE"]);
}
