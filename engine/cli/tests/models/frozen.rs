//! Frozen tensors, from a folder of a model to the folder of the trained model, as a user does it.
#![allow(missing_docs, reason = "a test")]
#![allow(clippy::unwrap_used, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the lines above")]

use crate::common::{Folder, with_chats};
use safetensors::SafeTensors;
use std::fs;
use std::path::Path;

const FROZEN: &str = "optimizer.frozen=[\"lm_head.weight\", \"model.layers.0.*\", \"*norm*\"]";

/// Trains in a directory, with more arguments. Returns the hash of the states.
fn trained(folder: &Folder, run: &str, more: &[&str]) -> String {
    let sets = ["--set", FROZEN, "--set", "optimizer.lr=1e-2", "--set", "schedule.decay_steps=4"];
    let args = [&["train", "chat.ron", "--run-dir", run], &sets[..], more].concat();
    let said = folder.onebox(&args).ok().stderr;
    let line = said.lines().find(|line| line.starts_with("state ")).unwrap_or_default();
    line.split_whitespace().nth(1).unwrap_or_default().to_owned()
}

#[test]
fn frozen_tensors_keep_their_bytes_in_the_export_of_a_resumed_run() {
    let folder = with_chats();
    let state = trained(&folder, "run", &["--set", "train.checkpoint_every=4"]);
    assert!(!state.is_empty());
    trained(&folder, "half", &["--set", "train.steps=2", "--set", "train.checkpoint_every=2"]);
    let halves = ["--resume", "--set", "train.checkpoint_every=2"];
    assert_eq!(trained(&folder, "half", &halves), state, "a resumed run ends alike");
    let shown = folder.onebox(&["checkpoint", "show", "run"]).ok().stdout;
    for (what, words) in
        [("frozen", "`model.layers.0.*`"), ("base", "keep the folder"), ("trained", "parameters")]
    {
        let line = shown.lines().find(|line| line.starts_with(what)).unwrap_or_default();
        assert!(line.contains(words), "{shown}");
    }
    let export = ["checkpoint", "export", "run", "tuned", "--to", "safetensors"];
    folder.onebox(&[&export[..], &["--merge"]].concat()).refused(78, &["leave --merge out"]);
    folder.onebox(&export).ok();
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/hf-chat-tiny");
    let [was, is] = [fixture.join("model.safetensors"), folder.path("tuned/model.safetensors")]
        .map(|path| fs::read(path).unwrap());
    let [was, is] = [&was, &is].map(|bytes| SafeTensors::deserialize(bytes).unwrap());
    let mut changed = 0;
    for (name, view) in is.tensors() {
        // The folder has bf16, and the export fp32.
        let narrow = was.tensor(&name).unwrap();
        let wide: Vec<u8> =
            narrow.data().chunks_exact(2).flat_map(|b| [0, 0, b[0], b[1]]).collect();
        let of_head = name == "model.embed_tokens.weight";
        let is_frozen = of_head || name.starts_with("model.layers.0.") || name.contains("norm");
        assert_eq!(wide == view.data(), is_frozen, "{name}");
        changed += usize::from(!is_frozen);
    }
    assert_eq!(changed, 7);
    let answer = |from: &str| {
        let args = ["generate", from, "--prompt", "box", "--tokens", "8", "--temperature", "0"];
        folder.onebox(&args).ok().stdout
    };
    assert_eq!(answer("run"), answer("tuned"));
}

#[test]
fn other_frozen_tensors_and_other_weights_are_refused() {
    let folder = with_chats();
    trained(&folder, "run", &["--set", "train.checkpoint_every=4"]);
    let longer = ["--set", "train.steps=6", "--set", "optimizer.lr=1e-2"];
    for mode in ["--resume", "--fork"] {
        for frozen in ["optimizer.frozen=[]", "optimizer.frozen=[\"lm_head.weight\"]"] {
            let args = ["train", "chat.ron", "--run-dir", "run", mode, "--set", frozen];
            let args = [&args[..], &longer].concat();
            folder.onebox(&args).refused(78, &["optimizer.frozen", "in a new run"]);
        }
    }
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/hf-chat-tiny");
    folder.shell(&format!("cp -r {fixture:?} other && chmod -R u+w other")).ok();
    let model = folder.path("other/model.safetensors");
    let mut bytes = fs::read(&model).unwrap();
    let end = bytes.len() - 2;
    bytes[end] ^= 1;
    fs::write(&model, bytes).unwrap();
    let not = "these are not the frozen weights of";
    let export = ["checkpoint", "export", "run", "x", "--to", "safetensors", "--base", "other"];
    folder.onebox(&export).refused(82, &[not, "--base DIR"]);
    let import = ["checkpoint", "import", "other", "imported", "chat.ron", "--set", FROZEN];
    folder.onebox(&import).refused(78, &["optimizer.frozen", "set model.from to the folder"]);
}

#[test]
fn globs_that_freeze_nothing_a_part_or_everything_are_refused() {
    let folder = with_chats();
    for (frozen, words) in [
        ("[\"*.experts.*\"]", &["no tensor of the model", "*.experts.*", "model.embed_tokens"][..]),
        ("[\"*.q_proj.*\"]", &["multiplies as one", "k_proj.weight", "v_proj.weight"]),
        ("[\"*.q_proj.*\", \"*.k_proj.*\"]", &["multiplies as one", "v_proj.weight"]),
        ("[\"*\"]", &["freeze all tensors", "adapter: Lora"]),
        ("\"*norm*\"", &["expected a list of globs"]),
    ] {
        let set = format!("optimizer.frozen={frozen}");
        let args = ["config", "check", "chat.ron", "--set", &set];
        folder.onebox(&args).refused(78, words);
    }
    for (more, words) in [
        ("adapter=Lora(rank: 4)", "adapters freeze all weights"),
        ("offload.transfer=Blocking", "frozen weights have no blocking transfers"),
    ] {
        let args = ["config", "check", "chat.ron", "--set", FROZEN, "--set", more];
        folder.onebox(&args).refused(78, &["optimizer.frozen", words]);
    }
    let all = "optimizer.frozen=[\"*.[qkv]_proj.*\"]";
    folder.onebox(&["config", "check", "chat.ron", "--set", all]).ok();
}
