//! Real folders of transformers: the same weights under other names, and folders that are no model.
//! `config check`, `train --dry-run` and `train` refuse each of the latter in the same words.
#![allow(missing_docs, reason = "a test")]
#![allow(clippy::unwrap_used, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the lines above")]

mod experts;
pub(crate) mod model;
mod refusals;
mod wrappers;

use crate::common::Folder;
use model::{change, cut, model, rename, set, tensors, write, write_keys_of_version_4};
use serde_json::{Value, json};
use std::fs;

/// The printed logits after a prompt, and the state after a step.
fn results(folder: &Folder) -> (String, String) {
    let prompt = if folder.path("m/tokenizer.json").exists() { "the box" } else { "3 9 40" };
    let output = folder.onebox(&["generate", "m", "--logits", "--prompt", prompt]).ok();
    folder.onebox(&["train", "a.ron", "-q", "--overwrite", "--run-dir", "run"]).ok();
    (output.stdout, folder.hash("run"))
}

/// transformers reads a tied table under either name, even if the index names the other one. It
/// does not read names with wrappers, but such a folder has each tensor of the model once.
#[test]
fn the_same_weights_under_other_names_are_the_same_model() {
    let of_model = |from: &'static str, to: &'static str| {
        move |folder: &Folder| rename(folder, |name| name.replacen(from, to, 1))
    };
    let before = |wrapper: &'static str| {
        move |folder: &Folder| rename(folder, |name| [wrapper, name].concat())
    };
    type FolderChange = Box<dyn Fn(&Folder)>;
    let cases: Vec<(&str, &str, FolderChange)> = vec![
        ("chat", "tied table", Box::new(of_model("model.embed_tokens", "lm_head"))),
        ("gpt2", "tied table", Box::new(of_model("transformer.wte", "lm_head"))),
        ("gpt2", "bare names", Box::new(of_model("transformer.", ""))),
        ("chat", "index of the head", Box::new(|folder| cut(folder, &["lm_head.weight"]))),
        (
            "chat",
            "index of the table",
            Box::new(|folder| {
                rename(folder, |name| name.replace("model.embed_tokens", "lm_head"));
                cut(folder, &["model.embed_tokens.weight"]);
            }),
        ),
        ("llama3", "compiled", Box::new(before("_orig_mod."))),
        ("gpt2", "compiled and wrapped twice", Box::new(before("module.module._orig_mod."))),
        ("llama3", "of PEFT, merged", Box::new(before("base_model.model."))),
        ("chat", "of PEFT, twice", Box::new(before("base_model.model.base_model.model."))),
        ("llama3", "blocks compiled", Box::new(of_model("layers.0.", "layers.0._orig_mod."))),
        (
            "chat",
            "wrapped, under the other name, in two files",
            Box::new(|folder| {
                rename(folder, |name| {
                    ["module.", name].concat().replace("model.embed_tokens", "lm_head")
                });
                cut(folder, &[]);
            }),
        ),
    ];
    let plain = ["chat", "gpt2", "llama3"].map(|name| (name, results(&model(name))));
    for (name, what, change) in cases {
        let folder = model(name);
        change(&folder);
        let want = &plain.iter().find(|(of, _)| *of == name).unwrap().1;
        assert!(results(&folder) == *want, "{name}, {what}");
    }
}

/// Rotary positions have other keys in version 4, and kinds of layers are those that a class has by
/// itself.
#[test]
fn the_keys_of_version_4_describe_the_same_model() {
    const MODELS: [&str; 11] = [
        "llama3",
        "qwen3",
        "qwen3-window",
        "mistral-window",
        "gemma2",
        "gemma3",
        "olmo2",
        "smollm3",
        "phi3",
        "granite",
        "seed-oss",
    ];
    for name in MODELS {
        let folder = model(name);
        let want = results(&folder);
        write_keys_of_version_4(&folder);
        assert!(!folder.read("m/config.json").contains("rope_parameters"), "{name}");
        assert!(results(&folder) == want, "{name}");
    }
}

/// A resumed run needs only the folder's shape. A plan needs no weights, and names their absence.
#[test]
fn weights_are_looked_for_where_they_are_read() {
    let folder = model("chat");
    folder.onebox(&["train", "a.ron", "-q", "--run-dir", "run"]).ok();
    fs::rename(folder.path("m/model.safetensors"), folder.path("m/pytorch_model.bin")).unwrap();
    let resume = ["train", "a.ron", "-q", "--run-dir", "run", "--resume"];
    let more = ["--set", "train.steps=2", "--set", "schedule.decay_steps=1"];
    folder.onebox(&[&resume[..], &more].concat()).ok();
    folder.onebox(&[&resume[..], &more, &["--dry-run"]].concat()).ok();
    let new = ["train", "a.ron", "-q", "--run-dir", "new", "--resume", "--dry-run"];
    folder.onebox(&new).refused(66, &["pytorch_model.bin"]);
    let check = folder.onebox(&["config", "check", "a.ron"]);
    let train = folder.onebox(&["train", "a.ron", "--run-dir", "new"]);
    assert_eq!((train.code, train.stderr), (check.code, check.stderr));
    assert!(!folder.path("new").exists());
    let plan = folder.onebox(&["plan", "a.ron"]).ok();
    let note = "note: `onebox train` refuses model.from: ";
    assert!(plan.stderr.contains(note) && plan.stderr.contains("pickle"), "{}", plan.stderr);
    let random = ["--set", "model.weights=Random"];
    folder.onebox(&[&["config", "check", "a.ron"][..], &random].concat()).ok();
    let plan = folder.onebox(&[&["plan", "a.ron"][..], &random].concat()).ok();
    assert!(!plan.stderr.contains(note), "{}", plan.stderr);
}

/// The weights are read before anything is written.
#[test]
fn a_number_that_is_none_is_named_and_leaves_no_run() {
    for (name, tensor) in
        [("gpt2", "transformer.h.0.attn.c_attn.weight"), ("chat", "model.norm.weight")]
    {
        let folder = model(name);
        let mut text = String::new();
        change(&folder, |all| {
            let found = all.iter_mut().find(|t| t.0 == tensor).unwrap();
            let end = found.2.len();
            found.2[end - 4..].copy_from_slice(&[0xff; 4]);
            text = format!("`{tensor}` has a NaN");
        });
        for more in [&[][..], &["--resume"], &["--overwrite"], &["--dry-run"]] {
            let args = ["train", "a.ron", "-q", "--run-dir", "run"];
            folder.onebox(&[&args, more].concat()).refused(66, &[&text]);
            assert!(!folder.path("run").exists(), "{more:?}");
        }
        folder.onebox(&["train", "a.ron", "-q"]).refused(66, &[&text]);
        assert!(!folder.path("runs").exists());
    }
}

/// A GPT-2 model for shorter samples has the first positions of the longer model.
#[test]
fn a_gpt2_for_shorter_samples_has_the_first_positions() {
    let folder = model("gpt2");
    folder.onebox(&["config", "check", "a.ron"]).ok();
    folder.onebox(&["train", "a.ron", "-q", "--run-dir", "run"]).ok();
    let cut = model("gpt2");
    set(&cut, "n_positions", json!(8));
    set(&cut, "n_ctx", json!(8));
    change(&cut, |all| {
        let wpe = all.iter_mut().find(|t| t.0 == "transformer.wpe.weight").unwrap();
        wpe.1["shape"] = json!([8, 32]);
        wpe.2.truncate(8 * 32 * 4);
    });
    cut.onebox(&["train", "a.ron", "-q", "--run-dir", "run"]).ok();
    assert_eq!(folder.hash("run"), cut.hash("run"));
    let logits = |of: &str| folder.onebox(&["generate", of, "--logits", "--prompt", "3 9 40"]).ok();
    folder.onebox(&["checkpoint", "export", "run", "hf", "--to", "safetensors"]).ok();
    let config: Value = serde_json::from_str(&folder.read("hf/config.json")).unwrap();
    assert_eq!([&config["n_positions"], &config["n_ctx"]], [8, 8]);
    assert_eq!(logits("run").stdout, logits("hf").stdout);
    let more = ["--set", "train.steps=2", "--set", "schedule.decay_steps=1"];
    let resume = ["train", "a.ron", "-q", "--run-dir", "run", "--resume"];
    let on = folder.onebox(&[&resume[..], &more].concat()).ok();
    assert!(on.stderr.contains("going on after step 1"), "{}", on.stderr);
    // More positions than the folder has are refused when the config is read.
    let longer = ["config", "check", "a.ron", "--set", "model.seq_len=17"];
    folder.onebox(&longer).refused(78, &["at most 16 (n_positions)"]);
}

/// A rank has extra rows that round the vocabulary up; files do not have these rows.
#[test]
fn generate_reads_the_weights_of_any_vocabulary() {
    for (vocab, tied) in [(257, false), (264, false), (301, true)] {
        let folder = Folder::new();
        let ron = format!(
            "(model: (family: Llama, layers: 1, hidden: 32, heads: 2, seq_len: 16, vocab: {vocab}, tied: {tied}),
              data: (train: \"text.txt\"), device: Cpu(threads: 1), train: (steps: 1, checkpoint_every: 1))"
        );
        fs::write(folder.path("a.ron"), ron).unwrap();
        folder.onebox(&["train", "a.ron", "-q", "--run-dir", "run"]).ok();
        folder.onebox(&["checkpoint", "export", "run", "hf", "--to", "safetensors"]).ok();
        let logits = |of: &str| {
            let args = ["generate", of, "--logits", "--set", "precision=Fp32"];
            folder.onebox(&[&args[..], &["--prompt", "a"]].concat()).ok().stdout
        };
        let want = logits("hf");
        for of in ["run", "run/checkpoints/step-00000001"] {
            assert!(logits(of) == want, "{vocab}, {tied}, {of}");
        }
        let path = folder.path("run/weights.safetensors");
        let mut all = tensors(&path);
        all.sort_by_key(|tensor| tensor.0 == "wte");
        write(&path, &all);
        assert!(logits("run") == want, "{vocab}, {tied}, in another order");
    }
}
