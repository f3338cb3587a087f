//! Adapters, from a folder of a model to folders of PEFT and of the merged model, as a user does it.
#![allow(missing_docs, reason = "a test")]
#![allow(clippy::unwrap_used, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the lines above")]

use crate::common::{Folder, with_chats};
use std::fs;
use std::path::Path;

/// Adapters that learn fast.
const LORA: &str = "adapter=Lora(rank: 4, alpha: 8)";

/// Trains adapters in a directory, with more arguments. Returns the hash of the states.
fn trained(folder: &Folder, run: &str, more: &[&str]) -> String {
    let sets = ["--set", LORA, "--set", "optimizer.lr=1e-2", "--set", "schedule.decay_steps=4"];
    let args = [&["train", "chat.ron", "--run-dir", run], &sets[..], more].concat();
    let said = folder.onebox(&args).ok().stderr;
    let line = said.lines().find(|line| line.starts_with("state ")).unwrap_or_default();
    line.split_whitespace().nth(1).unwrap_or_default().to_owned()
}

/// The likeliest text after a prompt.
fn answer(folder: &Folder, from: &str) -> String {
    let args = ["generate", from, "--prompt", "box", "--tokens", "8", "--temperature", "0"];
    folder.onebox(&args).ok().stdout
}

#[test]
fn adapters_are_trained_resumed_merged_and_go_on_from_a_folder_of_peft() {
    let folder = with_chats();
    let state = trained(&folder, "run", &[]);
    assert!(!state.is_empty());
    trained(&folder, "half", &["--set", "train.steps=2", "--set", "train.checkpoint_every=2"]);
    let halves = ["--resume", "--set", "train.checkpoint_every=2"];
    assert_eq!(trained(&folder, "half", &halves), state, "a resumed run ends alike");
    let export = |more: &[&str]| {
        let args = [&["checkpoint", "export", "half"], more].concat();
        folder.onebox(&args)
    };
    export(&["peft", "--to", "peft"]).ok();
    export(&["merged", "--to", "safetensors", "--merge"]).ok();
    for (more, why) in [
        (&["x", "--to", "safetensors"][..], "or --to safetensors --merge for the whole model"),
        (&["x", "--to", "peft", "--merge"], "leave --merge out"),
        (&["x", "--to", "peft", "--dtype", "Bf16"], "leave --dtype out"),
    ] {
        export(more).refused(78, &[why]);
    }
    let answers = ["half", "merged"].map(|from| answer(&folder, from));
    assert_eq!(answers[0], answers[1]);
    // The settings come from the folder, and the adapters go on.
    let from = ["--set", "adapter=Lora(from: \"peft\")"];
    let shown = folder.onebox(&[&["config", "show", "chat.ron"], &from[..]].concat()).ok().stdout;
    let line = shown.lines().find(|line| line.starts_with("adapter.rank ")).unwrap();
    assert!(line.contains(" 4 ") && line.ends_with("adapter_config.json"), "{line}");
    let more = [
        "--set",
        "optimizer.kind=Sgd",
        "--set",
        "optimizer.lr=1e-9",
        "--set",
        "train.checkpoint_every=4",
    ];
    let args = [&["train", "chat.ron", "-q", "--run-dir", "again"], &from[..], &more].concat();
    folder.onebox(&args).ok();
    assert_eq!(answer(&folder, "again"), answers[0]);
    let bytes = |name: &str| fs::read(folder.path(name)).unwrap();
    assert!(
        bytes("peft/adapter_model.safetensors").len() < bytes("merged/model.safetensors").len()
    );
}

#[test]
fn adapters_are_not_imported_and_have_a_base_in_a_folder() {
    let folder = with_chats();
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/hf-chat-tiny");
    let fixture = fixture.to_string_lossy();
    let import = ["checkpoint", "import", &fixture, "imported", "chat.ron", "--set", LORA];
    folder.onebox(&import).refused(78, &["set model.from to the folder"]);
    assert!(!folder.path("imported").exists());
    // Over random weights no folder has the base.
    let sets = ["--set", LORA, "--set", "optimizer.lr=1e-2", "--set", "model.weights=Random"];
    let args = [&["train", "chat.ron", "--run-dir", "run"], &sets[..]].concat();
    let said = folder.onebox(&args).ok();
    let said = said.stdout + &said.stderr;
    assert!(said.contains("--to peft"), "{said}");
    let prompt = ["generate", "run", "--prompt", "box", "--tokens", "2"];
    folder.onebox(&prompt).refused(82, &["the weights under the adapters are random"]);
    folder.onebox(&["checkpoint", "export", "run", "peft", "--to", "peft"]).ok();
    let settings = folder.read("peft/adapter_config.json");
    assert!(settings.contains("\"base_model_name_or_path\": \"\""), "{settings}");
}

#[test]
fn adapters_of_other_weights_are_refused() {
    let folder = with_chats();
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/hf-chat-tiny");
    folder.shell(&format!("cp -r {fixture:?} model")).ok();
    let ron = folder.read("chat.ron").replace(&format!("{fixture:?}"), "\"model\"");
    fs::write(folder.path("chat.ron"), ron).unwrap();
    trained(&folder, "run", &["--set", "train.checkpoint_every=2"]);
    folder.onebox(&["checkpoint", "export", "run", "peft", "--to", "peft"]).ok();
    // One number of the model changes.
    let model = folder.path("model/model.safetensors");
    let mut bytes = fs::read(&model).unwrap();
    let end = bytes.len() - 2;
    bytes[end] ^= 1;
    fs::write(&model, bytes).unwrap();
    let other = "these are not the weights over which the adapters";
    let prompt = ["generate", "run", "--prompt", "box", "--tokens", "2"];
    folder.onebox(&prompt).refused(82, &[other, "bring the folder back as it was"]);
    let merged = ["checkpoint", "export", "run", "merged", "--to", "safetensors", "--merge"];
    folder.onebox(&merged).refused(82, &[other]);
    let longer = ["--set", LORA, "--set", "optimizer.lr=1e-2", "--set", "train.steps=6"];
    let args =
        ["train", "chat.ron", "--run-dir", "run", "--resume", "--set", "schedule.decay_steps=4"];
    folder.onebox(&[&args[..], &longer].concat()).refused(82, &[other]);
    assert!(folder.path("run/weights.safetensors").exists(), "a refused run loses nothing");
    folder.onebox(&[&args[..], &longer, &["--dry-run"]].concat()).refused(82, &[other]);
    let fork = ["train", "chat.ron", "--run-dir", "run", "--fork"];
    folder.onebox(&[&fork[..], &longer].concat()).refused(82, &[other]);
    assert!(!folder.path("run-2").exists());
    // An adapter of another shape.
    let from = "adapter=Lora(from: \"peft\", rank: 5)";
    let args = ["train", "chat.ron", "--run-dir", "other", "--set", from];
    let refusal = folder
        .onebox(&args)
        .refused(66, &["adapter_model.safetensors", "not F32, F16 or BF16 [36, 5]"]);
    assert!(!folder.path("other").exists(), "{}", refusal.stderr);
    for (text, why) in [
        ("{}", "its `peft_type` is nothing"),
        (
            "{\"peft_type\": \"LORA\", \"r\": 4, \"lora_alpha\": 8, \"use_dora\": true}",
            "no adapters with `use_dora`",
        ),
    ] {
        fs::write(folder.path("peft/adapter_config.json"), text).unwrap();
        let set = ["--set", "adapter=Lora(from: \"peft\")"];
        let args = [&["config", "check", "chat.ron"], &set[..]].concat();
        folder.onebox(&args).refused(78, &["adapter.from", why]);
    }
}
