//! Files that a user names for onebox to read.

use super::plants::{Plant, Trap, tree, with_rights};
use super::program::{PATIENCE, ending, stopped_after};
use super::{Findings, Folder, full, sample};
use crate::common::{TINY, with_chats};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Kinds of files that an input accepts besides regular files and links to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Takes {
    Files,
    /// A pipe with a writer, such as `<(..)` of a shell.
    Pipes,
    /// A file of any length, read to its end.
    Endless,
    /// A file of a model's folder: links must be those of a download cache, or they are refused.
    Model,
    /// A file that a model's folder may lack: a dangling link may count as no file.
    Absent,
}

/// A file that a command reads; the command may create the directory `new`.
struct Input {
    file: &'static str,
    line: &'static str,
    takes: Takes,
}

const fn input(file: &'static str, line: &'static str) -> Input {
    Input { file, line, takes: Takes::Files }
}

const fn model(file: &'static str, line: &'static str) -> Input {
    Input { file, line, takes: Takes::Model }
}

const INPUTS: [Input; 36] = [
    Input { takes: Takes::Pipes, ..input("tiny.ron", "config check tiny.ron") },
    Input { takes: Takes::Pipes, ..input("tiny.ron", "train tiny.ron -q --run-dir new") },
    input("box.ron", "plan tiny.ron --box ./box.ron --set parallel.tensor=1"),
    input("box.ron", "plan tiny.ron --set device=Sim(box:\"./box.ron\") --set parallel.tensor=1"),
    input("box.ron", "simulate tiny.ron --no-schedules --box ./box.ron --set parallel.tensor=1"),
    input("topology.xml", "plan tiny.ron --box ./board.ron --set parallel.tensor=1"),
    input("topology.xml", "topology --xml topology.xml"),
    model("chat/config.json", "config check chat.ron"),
    model("chat/config.json", "plan --model chat --gpus 1 --box ./box.ron"),
    model("chat/config.json", "train chat.ron -q --run-dir new"),
    model("chat/config.json", "generate chat --prompt a --tokens 2"),
    model("chat/tokenizer.json", "train chat.ron -q --run-dir new"),
    model("chat/tokenizer.json", "generate chat --prompt a --tokens 2"),
    Input {
        takes: Takes::Absent,
        ..input("chat/tokenizer_config.json", "train chat.ron -q --run-dir new")
    },
    Input {
        takes: Takes::Absent,
        ..input("chat/chat_template.jinja", "train chat.ron -q --run-dir new")
    },
    Input {
        takes: Takes::Absent,
        ..input("chat/generation_config.json", "train chat.ron -q --run-dir new")
    },
    model("chat/model.safetensors", "config check chat.ron"),
    model("chat/model.safetensors", "train chat.ron -q --run-dir new"),
    model("chat/model.safetensors", "generate chat --prompt a --tokens 2"),
    model("chat/model.safetensors", "checkpoint import chat new chat.ron --set model.seq_len=256"),
    model("qwen/model.safetensors.index.json", "train qwen.ron -q --run-dir new"),
    model("qwen/model-00002-of-00002.safetensors", "train qwen.ron -q --run-dir new"),
    input("peft/adapter_config.json", "config check qwen.ron --set adapter=Lora(from:\"peft\")"),
    input(
        "peft/adapter_model.safetensors",
        "config check qwen.ron --set adapter=Lora(from:\"peft\")",
    ),
    input(
        "peft/adapter_model.safetensors",
        "train qwen.ron -q --run-dir new --set adapter=Lora(from:\"peft\")",
    ),
    input("text.txt", "train tiny.ron -q --run-dir new"),
    Input {
        takes: Takes::Endless,
        ..input("text.txt", "train tiny.ron -q --run-dir new --set data.format=Bytes")
    },
    input("held.txt", "train tiny.ron -q --run-dir new --set data.validation=\"held.txt\""),
    Input {
        takes: Takes::Endless,
        ..input(
            "u16.bin",
            "train tiny.ron -q --run-dir new --set data.train=\"u16.bin\" --set data.format=U16",
        )
    },
    Input {
        takes: Takes::Endless,
        ..input(
            "u32.bin",
            "train tiny.ron -q --run-dir new --set data.train=\"u32.bin\" --set data.format=U32",
        )
    },
    input("mega.bin", "train mega.ron -q --run-dir new"),
    input("mega.idx", "train mega.ron -q --run-dir new"),
    Input {
        takes: Takes::Endless,
        ..input(
            "rows.jsonl",
            "train tiny.ron -q --run-dir new --set data.train=\"rows.jsonl\" --set data.format=Jsonl(text:\"text\") --set data.tokenizer=\"tokenizer.json\" --set model.vocab=300",
        )
    },
    Input { takes: Takes::Endless, ..input("chats.jsonl", "train chat.ron -q --run-dir new") },
    input(
        "tokenizer.json",
        "train tiny.ron -q --run-dir new --set data.tokenizer=\"tokenizer.json\" --set model.vocab=300",
    ),
    Input {
        takes: Takes::Pipes,
        ..input("prompt.txt", "generate run --prompt-file prompt.txt --tokens 2")
    },
];

pub(crate) fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures")
}

/// A folder with one file of every kind.
pub(crate) fn material() -> Folder {
    let folder = with_chats();
    let fixtures = fixtures();
    let sh = |line: &str| drop(folder.shell(line).ok());
    let boxes = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/boxes");
    for (from, to) in [
        (fixtures.join("hf-chat-tiny"), "chat"),
        (fixtures.join("hf-qwen3-tiny"), "qwen"),
        (fixtures.join("peft-qwen3-tiny"), "peft"),
        (fixtures.join("tokenizer-tiny.json"), "tokenizer.json"),
        (boxes.join("topologies/desktop-2x3090.xml"), "topology.xml"),
    ] {
        sh(&format!("cp -r '{}' {to}", from.display()));
    }
    let board = fs::read_to_string(boxes.join("desktop-2x3090.ron")).unwrap();
    let own = board.replace("topologies/desktop-2x3090.xml", "topology.xml");
    fs::write(folder.path("board.ron"), own).unwrap();
    let none = board.replace("topology: \"topologies/desktop-2x3090.xml\",", "");
    let none = none.replace("host: (", "host: (cores: 16, link_gb_per_s: 12,");
    fs::write(folder.path("box.ron"), none).unwrap();
    let chat = folder.read("chat.ron");
    let named = |model: &str| {
        let from = chat.find("from: ").unwrap() + 6;
        let end = from + chat[from..].find(',').unwrap();
        format!("{}{model:?}{}", &chat[..from], &chat[end..])
    };
    fs::write(folder.path("chat.ron"), named("chat")).unwrap();
    let qwen = named("qwen").replace("chats.jsonl", "small.bin").replace("Chat", "U16");
    fs::write(folder.path("qwen.ron"), qwen.replace("seq_len: 64", "seq_len: 8")).unwrap();
    sh("cp text.txt held.txt; printf 'the box' > prompt.txt");
    // The template is in a file of its own, as in newer folders.
    let path = folder.path("chat/tokenizer_config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let template = config.as_object_mut().unwrap().remove("chat_template").unwrap();
    fs::write(folder.path("chat/chat_template.jinja"), template.as_str().unwrap()).unwrap();
    fs::write(path, config.to_string()).unwrap();
    let tokens = (0..6000_u32).map(|i| (i * 7 + i / 5) % 251);
    let wide: Vec<u8> = tokens.clone().flat_map(u32::to_le_bytes).collect();
    let narrow: Vec<u8> = tokens.clone().flat_map(|token| (token as u16).to_le_bytes()).collect();
    let small = tokens.flat_map(|token| ((token % 60) as u16).to_le_bytes());
    fs::write(folder.path("small.bin"), small.collect::<Vec<u8>>()).unwrap();
    fs::write(folder.path("u32.bin"), wide).unwrap();
    fs::write(folder.path("u16.bin"), &narrow).unwrap();
    fs::write(folder.path("mega.bin"), &narrow).unwrap();
    fs::write(folder.path("mega.idx"), index(6000)).unwrap();
    let mega = TINY.replace("\"text.txt\"", "\"mega.bin\", format: Megatron");
    fs::write(folder.path("mega.ron"), mega).unwrap();
    let rows = "{\"text\": \"the box holds a model that is too large for one card\"}\n".repeat(100);
    fs::write(folder.path("rows.jsonl"), rows).unwrap();
    folder
}

/// A Megatron index of documents of 60 tokens; a token has two bytes.
fn index(tokens: u32) -> Vec<u8> {
    let count = u64::from(tokens / 60);
    let mut bytes = b"MMIDIDX\0\0".to_vec();
    bytes.extend(1_u64.to_le_bytes());
    bytes.push(8);
    bytes.extend(count.to_le_bytes());
    bytes.extend((count + 1).to_le_bytes());
    (0..count).for_each(|_| bytes.extend(60_u32.to_le_bytes()));
    (0..count).for_each(|i| bytes.extend((i * 120).to_le_bytes()));
    (0..=count).for_each(|i| bytes.extend(i.to_le_bytes()));
    bytes
}

/// Fills a pipe with the original contents, as a shell does for `<(cat ..)`.
fn fed(folder: &Folder, line: &str, file: &str) -> super::ProgramEnd {
    let (from, to) = (folder.path("theirs/original"), folder.path(file));
    let writer = std::thread::spawn(move || fs::write(to, fs::read(from).unwrap()));
    let ending = folder.attempt(line);
    // The pipe may be unread.
    let unread = fs::File::options().read(true).write(true).open(folder.path(file));
    let _ = writer.join();
    drop(unread);
    ending
}

fn one(folder: &Folder, input: &Input, plant: Plant, findings: &mut Findings) {
    let Input { file, line, takes } = *input;
    let Some(planted) = Trap::new(folder, file, plant) else { return };
    let case = format!("{plant:?} as {file} of `onebox {line}`");
    let before = tree(&folder.path(file));
    let name = Path::new(file).file_name().unwrap().to_str().unwrap();
    // Without its config.json a folder is no model, so the message names the folder.
    let name = if line.starts_with("generate chat") { "chat" } else { name };
    let is_fed = takes == Takes::Pipes && plant == Plant::Pipe;
    let is_endless = takes == Takes::Endless && plant == Plant::Sparse;
    let ending = if is_fed {
        fed(folder, line, file)
    } else if is_endless {
        let time = Duration::from_secs(if full() { 6 } else { 1 });
        stopped_after(folder.attacked(line), time)
    } else {
        ending(with_rights(folder.attacked(line), plant), PATIENCE)
    };
    findings.look_at(&case, &ending);
    let is_of_model = matches!(takes, Takes::Model | Takes::Absent);
    let works = plant == Plant::Link && !is_of_model || is_fed;
    let may_work = is_endless
        || takes == Takes::Absent && plant == Plant::Dangling
        || plant == Plant::Link && ending.code == 0
        // A foreign text is still a text, and a directory of texts may replace a text.
        || matches!(plant, Plant::Foreign | Plant::OtherKind);
    if works && ending.code != 0 {
        findings.blame(&case, "does not work", &ending);
    } else if !works && !may_work && !ending.is_hung && !ending.is_refusal_of(name) {
        findings.blame(&case, "is not refused by name", &ending);
    }
    if plant == Plant::OtherKind && ending.code != 0 && !ending.stderr.contains(name) {
        findings.blame(&case, "is not named", &ending);
    }
    let mut harm = planted.harm();
    if !is_fed && tree(&folder.path(file)) != before {
        harm.push(format!("{file} is changed"));
    }
    findings.harm(&case, &harm, &ending);
    planted.undo();
    super::plants::remove(&folder.path("new"));
}

#[test]
fn what_a_user_names_may_be_a_link_and_is_read_to_a_bound() {
    let folder = material();
    folder.train("run", &["-q"]).ok();
    let mut findings = Findings::new("inputs");
    for input in &INPUTS {
        // Each command works if nothing is planted.
        let is_tried = full() || !input.line.starts_with("train");
        if is_tried {
            let ending = folder.attempt(input.line);
            findings.look_at(&format!("`onebox {}`", input.line), &ending);
            if ending.code != 0 {
                findings.blame(input.line, "does not work untouched", &ending);
            }
            super::plants::remove(&folder.path("new"));
        }
    }
    let all = INPUTS.iter().flat_map(|input| Plant::ALL.map(|plant| (input, plant))).collect();
    for (input, plant) in sample(all, 25) {
        one(&folder, input, plant, &mut findings);
    }
    findings.end();
}
