//! `onebox plan --model --write`: a config of the answer, which is checked, planned and trained.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use crate::common::{Folder, with_chats};
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::symlink;
use std::process::Command;

fn model() -> String {
    format!("{}/../../tests/fixtures/hf-chat-tiny", env!("CARGO_MANIFEST_DIR"))
}

const ON: [&str; 2] = ["--box", "h100-128gib"];
const SMALL: [&str; 4] = ["--set", "model.seq_len=64", "--set", "batch.global=8"];

/// `plan --model` with more arguments.
fn plan<'a>(model: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&["plan", "--model", model], &ON[..], &SMALL, more].concat()
}

#[test]
fn a_written_config_has_the_step_of_the_answer_and_trains() {
    let (folder, model) = (with_chats(), model());
    let args = plan(&model, &["--write", "my.ron", "--data", "chats.jsonl"]);
    let output = folder.onebox(&args).ok();
    assert!(output.stderr.contains("my.ron: written\n"), "{}", output.stderr);
    let next = ["\nnext, try:\n  onebox config check my.ron\n  onebox train my.ron\n"];
    assert!(next.iter().all(|words| output.stderr.contains(words)), "{}", output.stderr);
    let text = folder.read("my.ron");
    let lines = text.lines().count();
    assert!(lines < 40 && text.matches("\n    // ").count() >= 5, "{text}");
    assert!(text.contains("format: Chat") && text.contains("optimizer: Device"), "{text}");
    let checked = folder.onebox(&["config", "check", "my.ron"]).ok();
    assert!(checked.stdout.contains("my.ron: ok: "), "{}", checked.stdout);
    // The same verdict, and the same simulated step.
    let planned = folder.onebox(&[&["plan", "my.ron"], &ON[..]].concat()).ok();
    assert!(planned.stdout.contains("it fits"), "{}", planned.stdout);
    let after = |text: &str, start: &str, end: &str| {
        text.split_once(start).unwrap().1.split_once(end).unwrap().0.to_owned()
    };
    let seconds = after(&output.stdout, "a step in ", ";");
    let simulated = folder.onebox(&[&["simulate", "my.ron", "--no-schedules"], &ON[..]].concat());
    let simulated = simulated.ok().stdout;
    assert!(simulated.contains(&format!("8 samples takes {seconds}:")), "{seconds}: {simulated}");
    let here = [
        "device=Cpu(count: 1, memory: \"256MiB\")",
        "precision=Fp32",
        "train.epochs=0.3",
        "batch.micro=2",
    ];
    let here: Vec<&str> = here.iter().flat_map(|set| ["--set", set]).collect();
    let train = ["train", "my.ron", "--run-dir", "run"];
    let done = folder.onebox(&[&train[..], &here].concat()).ok();
    assert!(done.stderr.contains("done    "), "{}", done.stderr);
    // After a fine-tune: a conversation, and the export.
    let next = done.stderr.split("next, try:").nth(1).unwrap();
    for words in [" generate run --chat\n", " checkpoint export run run-exported --to safetensors"]
    {
        assert!(next.contains(words), "{words}: {next}");
    }
    assert!(!next.contains(" plan ") && !next.contains(" train "), "{next}");
}

#[test]
fn a_config_without_data_names_the_line_to_edit_and_is_never_replaced() {
    let (folder, model) = (Folder::new(), model());
    let plain = folder.onebox(&plan(&model, &[])).ok().stdout;
    let proposed = plain.split("next, try:\n").nth(1).unwrap();
    assert!(proposed.trim_end().ends_with(" --write my.ron"), "{proposed}");
    let bin = format!(
        "{}/",
        std::path::Path::new(env!("CARGO_BIN_EXE_onebox")).parent().unwrap().display()
    );
    let output = folder.shell(&format!("PATH={bin}:$PATH; {proposed}")).ok();
    let edit = "its `data` line needs the path of your data in place of YOUR-DATA.jsonl";
    assert!(output.stderr.contains(edit), "{}", output.stderr);
    let text = folder.read("my.ron");
    assert!(text.contains("// TO EDIT: the path of your data"), "{text}");
    let missing = ["data.train", "YOUR-DATA.jsonl"];
    folder.onebox(&["config", "check", "my.ron"]).refused(66, &missing);
    let again = plan(&model, &["--write", "my.ron"]);
    folder.onebox(&again).refused(73, &["--write my.ron: it exists", "give another name"]);
    assert_eq!(folder.read("my.ron"), text);
    let nowhere = plan(&model, &["--write", "no/my.ron"]);
    folder.onebox(&nowhere).refused(74, &["there is no directory no"]);
    let args = ["plan", "tiny.ron", "--write", "other.ron"];
    folder.onebox(&args).refused(2, &["--write"]);
    folder.onebox(&["plan", "tiny.ron", "--tokens", "9"]).refused(2, &["--tokens"]);
}

#[test]
fn a_model_that_does_not_fit_leaves_no_config() {
    let (folder, model) = (Folder::new(), model());
    let box_ron = std::fs::read_to_string(format!(
        "{}/../../configs/boxes/h100-128gib.ron",
        env!("CARGO_MANIFEST_DIR")
    ));
    let memory = |text: &str| match text.trim_start().split(':').next() {
        Some("gpu_memory") => "    gpu_memory: \"1MiB\",\n".to_owned(),
        _ => format!("{text}\n"),
    };
    let small: String = box_ron.unwrap().lines().map(memory).collect();
    std::fs::write(folder.path("box.ron"), small).unwrap();
    let args = ["plan", "--model", &model, "--box", "box.ron", "--write", "my.ron"];
    let output = folder.onebox(&[&args[..], &SMALL].concat());
    assert_eq!(output.code, 1, "{}{}", output.stdout, output.stderr);
    assert!(output.stdout.contains("\nno: "), "{}", output.stdout);
    assert!(output.stderr.contains("my.ron: not written"), "{}", output.stderr);
    assert!(!folder.path("my.ron").exists());
}

/// A model of two wide layers: its states do not fit beside the GPU, and 2 bytes per parameter do.
#[test]
fn a_model_whose_states_do_not_fit_may_have_adapters() {
    let folder = Folder::new();
    let box_ron = std::fs::read_to_string(format!(
        "{}/../../configs/boxes/desktop-4090.ron",
        env!("CARGO_MANIFEST_DIR")
    ));
    let memory = |text: &str| match text.trim_start().split(':').next() {
        Some("gpu_memory") => "    gpu_memory: \"4GiB\",\n".to_owned(),
        Some("node_memory") => "    node_memory: \"5GiB\",\n".to_owned(),
        _ => format!("{text}\n"),
    };
    let small: String = box_ron.unwrap().lines().map(memory).collect();
    std::fs::write(folder.path("box.ron"), small).unwrap();
    let config = serde_json::json!({
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512, "tie_word_embeddings": false
    });
    std::fs::create_dir(folder.path("model")).unwrap();
    std::fs::write(folder.path("model/config.json"), config.to_string()).unwrap();
    let args = ["plan", "--model", "model", "--box", "box.ron", "--set", "batch.global=4"];
    let output = folder.onebox(&args);
    assert_eq!(output.code, 1, "{}{}", output.stdout, output.stderr);
    let line = output.stdout.lines().find(|line| line.starts_with("but an adapter (LoRA) fits"));
    let line = line.unwrap_or_else(|| panic!("{}", output.stdout));
    assert!(output.stdout.contains("\nno: ") && line.contains("adapter=Lora(rank: 16"), "{line}");
    let json = folder.onebox(&[&args[..], &["--json"]].concat()).stdout;
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert!(json["fits"] == false && json["adapter"]["tokens_per_second"].as_f64() > Some(0.0));
    let asked = folder.onebox(&[&args[..], &["--set", "adapter=Lora(rank: 16)"]].concat()).ok();
    assert!(asked.stdout.contains("\nyes: "), "{}", asked.stdout);
}

#[test]
fn a_length_in_epochs_or_steps_is_that_of_the_written_config() {
    let (folder, model) = (with_chats(), model());
    for (set, written) in [
        ("train.epochs=3", "train: (epochs: 3.0),"),
        ("train=(epochs: 0.5)", "train: (epochs: 0.5),"),
        ("train.epochs=None", "train: (epochs: 1),"),
        ("train.steps=50", "train: (steps: 50),"),
    ] {
        let args = plan(&model, &["--write", "my.ron", "--data", "chats.jsonl", "--set", set]);
        folder.onebox(&args).ok();
        let text = folder.read("my.ron");
        assert!(text.contains(written), "{set}: {text}");
        folder.onebox(&["config", "check", "my.ron"]).ok();
        std::fs::remove_file(folder.path("my.ron")).unwrap();
    }
    // Without a file to write, too.
    let output = folder.onebox(&plan(&model, &["--set", "train.epochs=3"])).ok().stdout;
    assert!(output.contains("--set train.epochs=3"), "{output}");
    let both = ["--write", "my.ron", "--set", "train.epochs=3", "--set", "train.steps=50"];
    folder.onebox(&plan(&model, &both)).refused(78, &["a run has steps or epochs, not both"]);
    assert!(!folder.path("my.ron").exists());
}

#[test]
fn an_adapter_is_one_key_of_the_written_config() {
    let (folder, model) = (with_chats(), model());
    let more = ["--write", "my.ron", "--data", "chats.jsonl", "--set", "adapter=Lora(rank: 4)"];
    folder.onebox(&plan(&model, &more)).ok();
    let text = folder.read("my.ron");
    assert!(
        text.contains("adapter: Lora(rank: 4") && text.matches("adapter:").count() == 1,
        "{text}"
    );
    folder.onebox(&["config", "check", "my.ron"]).ok();
}

/// Paths of a Unix system that are no text, on the command line of `plan` and `train`.
#[test]
fn a_path_that_is_not_utf8_is_used_or_refused_in_words() {
    let (folder, model) = (with_chats(), model());
    let named = |start: &str, end: &str| {
        OsString::from_vec([start.as_bytes(), b"\xff", end.as_bytes()].concat())
    };
    let at = |name: &OsString| folder.path("").join(name);
    let run = |args: &[&str], path: &OsString, more: &[&str]| {
        let mut command = folder.command(args);
        command.arg(path).args(more);
        Folder::done(command)
    };
    let (hf, chats, box_ron) = (named("hf", ""), named("chats", ".jsonl"), named("box", ".ron"));
    std::fs::create_dir(at(&hf)).unwrap();
    std::fs::copy(format!("{model}/config.json"), at(&hf).join("config.json")).unwrap();
    std::fs::copy(folder.path("chats.jsonl"), at(&chats)).unwrap();
    let boxes = format!("{}/../../configs/boxes", env!("CARGO_MANIFEST_DIR"));
    std::fs::copy(format!("{boxes}/h100-128gib.ron"), at(&box_ron)).unwrap();
    let refused = ["\u{fffd}", "a config cannot hold a path that is not UTF-8: rename it"];
    run(&["plan", "--box", "h100-128gib", "--model"], &hf, &[]).refused(78, &refused);
    run(&["plan", "tiny.ron", "--box"], &box_ron, &[]).refused(78, &refused);
    run(&["train", "tiny.ron", "--dry-run", "--set"], &chats, &[]).refused(2, &["UTF-8"]);
    let args = plan(&model, &["--write", "my.ron", "--data"]);
    run(&args, &chats, &[]).refused(78, &refused);
    assert!(!folder.path("my.ron").exists());
    // The paths in a config are relative to its folder.
    std::fs::copy(folder.path("tiny.ron"), at(&hf).join("tiny.ron")).unwrap();
    let mut inside = hf.clone();
    inside.push("/tiny.ron");
    run(&["train"], &inside, &["--dry-run"]).refused(78, &["directory is not UTF-8"]);
    // A config and a directory of a run may have any name.
    let tiny = named("tiny", ".ron");
    std::fs::copy(folder.path("tiny.ron"), at(&tiny)).unwrap();
    run(&["plan"], &tiny, &[]).ok();
    run(&["train", "-q", "--run-dir", "run"], &tiny, &[]).ok();
    let done = run(&["train", "tiny.ron", "--run-dir"], &named("run", ""), &[]).ok();
    assert!(done.stderr.contains("next, try:"), "{}", done.stderr);
    // So may the program.
    let program = at(&named("onebox", ""));
    symlink(env!("CARGO_BIN_EXE_onebox"), &program).unwrap();
    let mut command = Command::new(&program);
    command.args(["train", "tiny.ron", "--run-dir", "other"]).current_dir(folder.path(""));
    let done = Folder::done(command).ok();
    assert!(done.stderr.contains("next, try:"), "{}", done.stderr);
}

#[test]
fn all_boxes_are_ranked_by_time_and_cost_and_the_others_say_what_they_lack() {
    let (folder, model) = (with_chats(), model());
    let own = |gpu_memory: &str, price: &str| {
        let text = format!(
            "(gpus: 1, gpu_memory: \"{gpu_memory}\", node_memory: \"8GiB\", {price}
              gpu: (gemm_tflops: 100, fp32_tflops: 20, memory_gb_per_s: 1000, processors: 80, sm: 80),
              host: (node_gb_per_s: 100, core_gb_per_s: 10, cores: 8, link_gb_per_s: 30))"
        );
        std::fs::write(folder.path("own.ron"), text).unwrap();
    };
    let args = ["plan", "--model", &model, "--boxes", "--tokens", "1000000", "--box", "own.ron"];
    let args = [&args[..], &SMALL].concat();
    own("8GiB", "usd_per_hour: 3.6,");
    let done = folder.onebox(&[&args[..], &["--json"]].concat()).ok();
    assert!(done.stderr.contains("planning on own.ron ("), "{}", done.stderr);
    let ranking: serde_json::Value = serde_json::from_str(&done.stdout).unwrap();
    let boxes = ranking["boxes"].as_array().unwrap();
    assert_eq!(boxes.len(), config::bundled::BOXES.len() + 1);
    let number = |value: &serde_json::Value| value.as_f64().unwrap();
    let speed = |one: &serde_json::Value| one["best"]["tokens_per_second"].as_f64();
    let fits = boxes.iter().take_while(|one| one["fits"] == true).count();
    assert!(boxes[fits..].iter().all(|one| one["fits"] == false));
    assert!(fits > 10 && boxes[..fits].is_sorted_by_key(|one| -speed(one).unwrap()), "{boxes:?}");
    // A box with more GPUs than samples has no layout, and says so.
    for one in &boxes[fits..] {
        assert!(one["lacks"][0].as_str().unwrap().contains("GPUs have no layout"), "{one}");
    }
    let own_box = boxes.iter().find(|one| one["name"] == "own.ron").unwrap();
    let (time, usd) = (&own_box["best"]["seconds"], &own_box["best"]["usd"]);
    assert!((number(&time["expected"]) * speed(own_box).unwrap() / 1e6 - 1.0).abs() < 1e-9);
    for end in ["expected", "low", "high"] {
        assert!((number(&usd[end]) / (0.001 * number(&time[end])) - 1.0).abs() < 1e-6, "{own_box}");
    }
    assert!(number(&time["low"]) < number(&time["expected"]), "{own_box}");
    assert!(boxes.iter().filter(|one| one["usd_per_hour"].is_number()).count() == 1, "{boxes:?}");
    own("100KiB", "");
    let text = folder.onebox(&args).ok().stdout;
    assert!(text.contains("\n1. ") && text.contains("1000000 tokens in "), "{text}");
    let lacks = text.lines().find(|line| line.contains("own.ron: ")).unwrap();
    assert!(lacks.contains("GPU memory") && lacks.contains(" are there; with "), "{lacks}");
    assert!(text.contains("no box that fits has a price"), "{text}");
    for other in [&["--gpus", "1"][..], &["--write", "my.ron"], &["--search"]] {
        folder.onebox(&[&args[..], other].concat()).refused(2, &["--boxes"]);
    }
}
