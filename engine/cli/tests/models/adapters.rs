//! Adapters, from a folder of a model to folders of PEFT and of the merged model, as a user does it.
#![allow(missing_docs, reason = "a test")]
#![allow(clippy::unwrap_used, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the lines above")]

use crate::common::{Folder, has_strace, with_chats};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

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
    // A fork of a run that has all its steps has no loss of a step.
    let other = ["--fork", "--set", "adapter.alpha=9"];
    let said =
        folder.onebox(&[&["train", "half/config.ron", "--run-dir", "half"], &other[..]].concat());
    let said = said.ok().stderr;
    assert!(said.contains("no step was left: set train.steps") && !said.contains("NaN"), "{said}");
    let line = said.lines().find(|line| line.starts_with("adapter ")).unwrap();
    let settings = "the model is frozen: rank 4, alpha 9, on q_proj, k_proj, ";
    assert!(line.contains(settings) && !line.contains("dropout"), "{line}");
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
    let model = fixture("hf-chat-tiny");
    let [half, again, base] = ["half", "again", &model.to_string_lossy()].map(|from| {
        let args = ["generate", from, "--prompt", "box", "--logits", "--set", "precision=Fp32"];
        let said = folder.onebox(&args).ok().stdout;
        let logits = serde_json::from_str::<serde_json::Value>(&said).unwrap()["logits"].clone();
        serde_json::from_value::<Vec<f64>>(logits).unwrap()
    });
    let distance =
        |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    let [kept, learned] = [distance(&half, &again), distance(&half, &base)];
    assert!(kept < 1e-4 && learned > 1e-2, "{kept:e}, {learned:e}");
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
    folder.onebox(&prompt).refused(82, &["the frozen weights of the run are random"]);
    folder.onebox(&["checkpoint", "export", "run", "peft", "--to", "peft"]).ok();
    let settings = folder.read("peft/adapter_config.json");
    assert!(settings.contains("\"base_model_name_or_path\": \"\""), "{settings}");
}

/// A folder of [`with_chats`] with its own copy of the model, `model`.
fn with_model() -> Folder {
    let folder = with_chats();
    let fixture = fixture("hf-chat-tiny");
    folder.shell(&format!("cp -r {fixture:?} model")).ok();
    let ron = folder.read("chat.ron").replace(&format!("{fixture:?}"), "\"model\"");
    fs::write(folder.path("chat.ron"), ron).unwrap();
    folder
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures").join(name)
}

#[test]
fn adapters_of_other_weights_are_refused() {
    let folder = with_model();
    trained(&folder, "run", &["--set", "train.checkpoint_every=2"]);
    folder.onebox(&["checkpoint", "export", "run", "peft", "--to", "peft"]).ok();
    // One number of the model changes.
    let model = folder.path("model/model.safetensors");
    let mut bytes = fs::read(&model).unwrap();
    let end = bytes.len() - 2;
    bytes[end] ^= 1;
    fs::write(&model, bytes).unwrap();
    let other = "these are not the frozen weights of";
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
    let refusal = folder.onebox(&args).refused(
        66,
        &["adapter_model.safetensors", "the adapter here has [36, 5]: leave `adapter.rank` out"],
    );
    assert!(!folder.path("other").exists(), "{}", refusal.stderr);
    for (text, why) in [
        ("{}", "its `peft_type` is nothing"),
        (
            "{\"peft_type\": \"LORA\", \"r\": 4, \"lora_alpha\": 8, \"use_dora\": true}",
            "merge the adapters into their base with `model.merge_and_unload()`",
        ),
    ] {
        fs::write(folder.path("peft/adapter_config.json"), text).unwrap();
        let set = ["--set", "adapter=Lora(from: \"peft\")"];
        let args = [&["config", "check", "chat.ron"], &set[..]].concat();
        folder.onebox(&args).refused(78, &["adapter.from", why]);
    }
}

#[test]
fn a_base_that_has_moved_is_named_at_its_new_place() {
    let folder = with_model();
    trained(&folder, "run", &["--set", "train.checkpoint_every=4"]);
    let before = answer(&folder, "run");
    folder.shell("mv model moved && cp -r moved other && cp tiny.ron other/").ok();
    let generate = ["generate", "run", "--prompt", "box", "--tokens", "8", "--temperature", "0"];
    let is_base = "the folder has the frozen weights of";
    folder.onebox(&generate).refused(66, &["model", is_base, "--base DIR names it"]);
    let merge = ["checkpoint", "export", "run", "merged", "--to", "safetensors", "--merge"];
    folder.onebox(&merge).refused(66, &["model", is_base, "--base DIR names it"]);
    let at = |place: &'static str| ["--base", place];
    let moved = folder.onebox(&[&generate[..], &at("moved")].concat()).ok().stdout;
    assert_eq!(moved, before);
    folder.onebox(&[&merge[..], &at("moved")].concat()).ok();
    assert_eq!(answer(&folder, "merged"), before);
    // A run that goes on takes the folder from its config.
    let longer = ["--resume", "--set", LORA, "--set", "optimizer.lr=1e-2", "--set"];
    let longer = [&longer[..], &["schedule.decay_steps=4", "--set", "train.steps=6"]].concat();
    for config in ["chat.ron", "run/config.ron"] {
        let resume = [&["train", config, "-q", "--run-dir", "run"], &longer[..]].concat();
        let help = "name the new place of the folder: `--set model.from=DIR`";
        folder.onebox(&resume).refused(78, &["has the frozen weights of this run", help]);
    }
    let resume = [&["train", "chat.ron", "-q", "--run-dir", "run"], &longer[..]].concat();
    folder.onebox(&[&resume[..], &["--set", "model.from=moved"]].concat()).ok();
    // Other weights are no base, and other commands have none.
    let model = folder.path("other/model.safetensors");
    let mut bytes = fs::read(&model).unwrap();
    let end = bytes.len() - 2;
    bytes[end] ^= 1;
    fs::write(&model, bytes).unwrap();
    let not = "these are not the frozen weights of";
    folder.onebox(&[&generate[..], &at("other")].concat()).refused(82, &[not, "--base DIR"]);
    let again = ["checkpoint", "export", "run", "again", "--to", "safetensors", "--merge"];
    folder.onebox(&[&again[..], &at("other")].concat()).refused(82, &[not, "--base DIR"]);
    let peft = ["checkpoint", "export", "run", "peft", "--to", "peft"];
    folder.onebox(&[&peft[..], &at("moved")].concat()).refused(78, &["leave --base out"]);
    let whole = ["generate", "moved", "--prompt", "box", "--tokens", "1"];
    folder.onebox(&[&whole[..], &at("moved")].concat()).refused(78, &["leave --base out"]);
}

#[test]
fn other_adapters_are_trained_in_a_new_run_as_the_error_says() {
    let folder = with_chats();
    trained(&folder, "run", &["--set", "train.checkpoint_every=4"]);
    let longer = ["--set", "train.steps=6", "--set", "schedule.decay_steps=4"];
    let train = |run: &str, mode: &[&str], adapter: &str| {
        let args = ["train", "chat.ron", "-q", "--run-dir", run, "--set", "optimizer.lr=1e-2"];
        let adapter = if adapter.is_empty() { vec![] } else { vec!["--set", adapter] };
        folder.onebox(&[&args[..], mode, &longer, &adapter].concat())
    };
    let advice = "train other tensors in a new run: with another --run-dir, and without --resume";
    let (rank, some) =
        ("adapter=Lora(rank: 5)", "adapter=Lora(rank: 4, alpha: 8, targets: [\"q_proj\"])");
    for (adapter, key) in [(rank, "adapter.rank"), (some, "adapter.targets"), ("", "adapter ")] {
        for mode in ["--resume", "--fork"] {
            let refusal = train("run", &[mode], adapter).refused(78, &[key, advice]).stderr;
            assert!(!refusal.contains("give --fork") && !refusal.contains("\\n"), "{refusal}");
        }
    }
    assert!(!folder.path("run-2").exists());
    train("ranked", &[], rank).ok();
    // The factor has no effect on the tensors: the advice is a fork, which works.
    let alpha = "adapter=Lora(rank: 4, alpha: 4)";
    train("run", &["--resume"], alpha).refused(78, &["adapter.alpha", "give --fork"]);
    train("run", &["--fork"], alpha).ok();
    // A list of all linears is `All`.
    let all = "adapter=Lora(rank: 4, alpha: 8, targets: [\"down_proj\", \"up_proj\", \"gate_proj\", \"o_proj\", \"v_proj\", \"k_proj\", \"q_proj\"])";
    train("run", &["--resume"], all).ok();
    let diff = folder.onebox(&["checkpoint", "diff", "run", "ranked"]);
    assert!(
        diff.stdout.contains("other trained tensors: --resume and --fork refuse it"),
        "{diff:?}"
    );
    let others = diff.stdout.lines().any(|line| line.starts_with("another experiment"));
    assert!(!others || !diff.stdout.contains("--fork does not:\n  adapter.rank"), "{diff:?}");
    // A run of all weights gets no adapters.
    let args = ["train", "chat.ron", "-q", "--run-dir", "full", "--set", "optimizer.lr=1e-2"];
    folder.onebox(&[&args[..], &["--set", "train.checkpoint_every=4"]].concat()).ok();
    train("full", &["--resume"], LORA).refused(78, &["adapter ", advice]);
}

#[test]
fn a_run_from_a_folder_of_peft_goes_on_without_the_folder() {
    let folder = with_chats();
    trained(&folder, "first", &[]);
    folder.onebox(&["checkpoint", "export", "first", "peft", "--to", "peft"]).ok();
    let start = |run: &str, more: &[&str]| {
        let from = ["--set", "adapter=Lora(from: \"peft\")", "--set", "optimizer.lr=1e-2"];
        let saves = ["--set", "schedule.decay_steps=4", "--set", "train.checkpoint_every=2"];
        let args = ["train", "chat.ron", "-q", "--run-dir", run];
        folder.onebox(&[&args[..], &from, &saves, more].concat())
    };
    start("whole", &[]).ok();
    start("run", &["--set", "train.steps=2"]).ok();
    start("early", &["--set", "train.steps=2"]).ok();
    folder.shell("rm -r peft").ok();
    let place = "--set adapter=Lora(from: \"peft\")";
    let help = "name a folder with the adapter_config.json";
    start("new", &[]).refused(78, &["adapter.from", place, help]);
    start("run", &["--fork"]).ok();
    start("run", &["--resume"]).ok();
    let own = ["train", "early/config.ron", "-q", "--run-dir", "early", "--resume"];
    folder.onebox(&[&own[..], &["--set", "train.steps=4"]].concat()).ok();
    for run in ["run", "run-2", "early"] {
        assert_eq!(folder.hash(run), folder.hash("whole"), "{run}");
        assert_eq!(answer(&folder, run), answer(&folder, "whole"));
    }
    folder.onebox(&["checkpoint", "export", "run", "exported", "--to", "peft"]).ok();
    // Another folder is not read, either, and the run says so.
    let other = ["--resume", "--set", "train.steps=5", "--set", "adapter=Lora(from: \"none\")"];
    let said = start("run", &other).ok().stderr;
    assert!(said.contains("adapter.from is not read"), "{said}");
}

#[test]
fn a_folder_of_peft_is_checked_before_a_run_and_warned_of() {
    let folder = with_model();
    trained(&folder, "run", &[]);
    folder.onebox(&["checkpoint", "export", "run", "peft", "--to", "peft"]).ok();
    let of = |command: &[&str], adapter: &str| {
        folder.onebox(&[command, &["--set", &format!("adapter=Lora({adapter})")]].concat())
    };
    let (check, plan) = (["config", "check", "chat.ron"], ["plan", "chat.ron"]);
    let plain = of(&check, "from: \"peft\"").ok().stderr;
    assert!(!plain.contains("warning"), "{plain}");
    let name = "adapter_model.safetensors";
    for (adapter, why) in [
        ("from: \"peft\", rank: 5", "the adapter here has [36, 5]: leave `adapter.rank` out"),
        (
            "from: \"peft\", targets: [\"q_proj\"]",
            "no factor of an adapter here: leave `adapter.targets`",
        ),
    ] {
        of(&check, adapter).refused(66, &["adapter.from", name, why]);
        let planned = of(&plan, adapter).stderr;
        assert!(planned.contains("refuses adapter.from") && planned.contains(why), "{planned}");
    }
    let weights = folder.path("peft/adapter_model.safetensors");
    let bytes = fs::read(&weights).unwrap();
    let text = String::from_utf8_lossy(&bytes[8..]).into_owned();
    let end = text.find("}}").unwrap() + 2;
    let header = text[..end].replacen("\"F32\"", "\"I32\"", 1);
    let other = [&bytes[..8], header.as_bytes(), &bytes[8 + end..]].concat();
    for (bytes, why) in [
        (&other[..], "has numbers of type I32, and onebox reads F32, F16, BF16"),
        (&bytes[..bytes.len() - 4], name),
        (&bytes[..5], "it is cut off"),
    ] {
        fs::write(&weights, bytes).unwrap();
        of(&check, "from: \"peft\"").refused(66, &["adapter.from", why]);
    }
    fs::write(&weights, bytes).unwrap();
    // The settings of the folder say of which base, and the run drops inputs as they were dropped.
    let settings = folder.read("peft/adapter_config.json");
    let other = settings.replace("\"lora_dropout\": 0.0", "\"lora_dropout\": 0.05");
    let other = other.replace("/model\"", "/Other-1B\"");
    fs::write(folder.path("peft/adapter_config.json"), other).unwrap();
    let warned = |said: &str| said.matches("belong to the base").count();
    let said = of(&check, "from: \"peft\"").ok().stderr;
    assert_eq!(warned(&said), 1, "{said}");
    let train = ["train", "chat.ron", "-q", "--run-dir", "next"];
    let said = of(&train, "from: \"peft\"").ok().stderr;
    assert_eq!(warned(&said), 1, "{said}");
    assert!(folder.read("next/config.ron").contains("dropout: 0.05"));
    let resume = [&train[..], &["--resume"], &["--set", "train.steps=4"]].concat();
    let said = of(&resume, "from: \"peft\"").ok().stderr;
    assert_eq!(warned(&said), 0, "{said}");
}

#[test]
fn a_checkpoint_of_adapters_is_shown_with_its_base_and_exported_as_adapters() {
    let folder = with_model();
    trained(&folder, "run", &["--set", "train.checkpoint_every=4"]);
    let shown = folder.onebox(&["checkpoint", "show", "run"]).ok().stdout;
    let line = |what: &str| {
        let line = shown.lines().find(|line| line.starts_with(what));
        line.unwrap_or_else(|| panic!("{what}: {shown}")).to_owned()
    };
    assert!(line("adapters ").contains("rank 4, alpha 8, of q_proj, k_proj"), "{shown}");
    let base = line("base ");
    assert!(base.contains("/model, hash ") && base.contains("keep the folder"), "{base}");
    let model = line("model ");
    let full = folder.onebox(&["config", "check", "chat.ron"]).ok().stdout;
    let count = full.split(": ok: ").nth(1).unwrap().split(" parameters").next().unwrap();
    assert!(model.contains(&format!("{count} parameters")), "{model} {full}");
    let json = folder.onebox(&["checkpoint", "show", "run", "--json"]).ok().stdout;
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let hash = json["base"].as_str().unwrap();
    assert!(hash.len() == 32 && base.contains(&hash[..8]), "{hash}: {base}");
    let export = ["checkpoint", "export", "run", "peft", "--to", "peft"];
    let said = folder.onebox(&export).ok().stderr;
    assert!(said.contains("the fp32 adapters after step 4"), "{said}");
}

#[test]
fn a_model_whose_adapters_have_no_folder_of_peft_is_told_before_the_run() {
    let folder = Folder::new();
    fs::write(folder.path("tokens.bin"), [0; 4096]).unwrap();
    let check = |name: &str| {
        let ron = format!(
            "(model: (from: {:?}, seq_len: 12), data: (train: \"tokens.bin\", format: U16), adapter: Lora(rank: 4), train: (steps: 1))",
            fixture(name)
        );
        fs::write(folder.path("a.ron"), ron).unwrap();
        folder.onebox(&["config", "check", "a.ron"]).ok().stderr
    };
    for name in ["hf-phi3-tiny", "hf-qwen3-next-tiny"] {
        let said = check(name);
        assert!(said.contains("note: adapter: `checkpoint export --to peft` refuses"), "{said}");
    }
    assert!(!check("hf-llama3-tiny").contains("note: adapter"));
}

#[test]
fn numbers_of_a_folder_of_peft_are_read_once() {
    if !has_strace() {
        return;
    }
    let folder = with_chats();
    trained(&folder, "run", &[]);
    folder.onebox(&["checkpoint", "export", "run", "peft", "--to", "peft"]).ok();
    let file = folder.path("peft/adapter_model.safetensors").canonicalize().unwrap();
    let mut command = Command::new("strace");
    command.args(["-f", "-qq", "-o"]).arg(folder.path("reads"));
    command.args(["-e", "trace=read,pread64", "-P"]).arg(&file);
    command.args([env!("CARGO_BIN_EXE_onebox"), "train", "chat.ron", "-q", "--run-dir", "next"]);
    command.args(["--set", "adapter=Lora(from: \"peft\")"]).current_dir(folder.path(""));
    Folder::done(command).ok();
    let log = folder.read("reads");
    let counts = log.lines().filter_map(|line| line.rsplit(" = ").next()?.parse::<u64>().ok());
    let (read, all) = (counts.sum::<u64>(), fs::metadata(&file).unwrap().len());
    let header = u64::from_le_bytes(*fs::read(&file).unwrap().first_chunk().unwrap());
    // The check before the run reads the header, too.
    assert!(read >= all && read < all + header + 64, "{read} of {all} bytes\n{log}");
}
