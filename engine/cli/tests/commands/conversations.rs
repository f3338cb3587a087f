//! `onebox generate --chat` without a prompt: a conversation through pipes and at a terminal. Also a
//! Ctrl-C during other texts.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use crate::common::{CommandOutput, Folder};
use crate::terminal::{Screen, Terminal, has_terminals};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

fn fixture(name: &str) -> String {
    format!("{}/../../tests/fixtures/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// Runs a conversation with the model of `hf-chat-tiny` on some lines.
fn converse(folder: &Folder, lines: &[u8], args: &str) -> CommandOutput {
    std::fs::write(folder.path("lines.txt"), lines).unwrap();
    let (onebox, chat) = (env!("CARGO_BIN_EXE_onebox"), fixture("hf-chat-tiny"));
    folder.shell(&format!("{onebox} generate {chat} --chat --temperature 0 {args} < lines.txt"))
}

/// JSON objects of the answers.
fn answers(folder: &Folder, lines: &str, args: &str) -> Vec<Value> {
    let out = converse(folder, lines.as_bytes(), &format!("--json {args}")).ok().stdout;
    out.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// The expected answers come from transformers: `tests/fixtures/make_conversation_fixture.py`. The
/// other ones come from one call for each turn, with all messages in one prompt.
#[test]
fn a_conversation_has_the_answers_of_transformers_and_of_one_call_for_each_turn() {
    let folder = Folder::new();
    let known: Value =
        serde_json::from_slice(&std::fs::read(fixture("conversation.json")).unwrap()).unwrap();
    let turns = known["turns"].as_array().unwrap();
    let lines: String =
        turns.iter().map(|turn| format!("{}\n", turn["message"].as_str().unwrap())).collect();
    let found = answers(&folder, &lines, "--tokens 8 --system 'be short'");
    assert_eq!(found.len(), turns.len());
    for (turn, found) in turns.iter().zip(&found) {
        assert_eq!(found["prompt"], turn["message"]);
        assert_eq!((&found["tokens"], &found["text"]), (&turn["answer"], &turn["text"]));
        // The end of the last line of a file is no part of the prompt.
        let prompt = format!("{}\n", turn["prompt"].as_str().unwrap());
        std::fs::write(folder.path("prompt.txt"), prompt).unwrap();
        let chat = fixture("hf-chat-tiny");
        let args = ["--prompt-file", "prompt.txt", "--tokens", "8", "--temperature", "0", "--json"];
        let one = folder.onebox(&[&["generate", &chat], &args[..]].concat()).ok().stdout;
        let one: Value = serde_json::from_str(&one).unwrap();
        assert_eq!(one["tokens"], found["tokens"]);
    }
    // Without --json, each answer is printed with a line end.
    let plain = converse(&folder, lines.as_bytes(), "--tokens 8 --system 'be short'").ok();
    let texts: String =
        turns.iter().map(|turn| format!("{}\n", turn["text"].as_str().unwrap())).collect();
    assert_eq!(plain.stdout, texts);
    assert_eq!(plain.stderr, "");
}

#[test]
fn each_line_of_a_pipe_is_a_message_and_reset_begins_anew() {
    let folder = Folder::new();
    let ask = |lines: &str| answers(&folder, lines, "--tokens 6");
    let alone = ask("what?\n");
    let two = ask("who waits?\n\n   \nwhat?");
    assert_eq!(two.len(), 2, "blank lines are no messages, and the last line needs no end");
    assert_ne!(two[1]["tokens"], alone[0]["tokens"], "the answer depends on the first turn");
    let anew = ask("who waits?\r\n/reset\nwhat?\n/exit\nnever read\n");
    assert_eq!((anew.len(), &anew[1]), (2, &alone[0]));
    let long = ask("one \\\ntwo\\\n\n");
    assert_eq!((long.len(), &long[0]["prompt"]), (1, &"one \ntwo\n".into()));
    assert_eq!(ask(""), Vec::<Value>::new());
    assert_eq!(ask(" /reset\n")[0]["prompt"], " /reset");
}

#[test]
fn the_oldest_turns_are_left_out_when_the_conversation_is_full() {
    let folder = Folder::new();
    let messages = ["what holds the box?", "who waits?", "for whom?"];
    let lines = messages.map(|message| format!("{message}\n")).concat();
    // One turn and the next message have more than 36 tokens.
    let full = converse(&folder, lines.as_bytes(), "--context 36 --tokens 8 --json").ok();
    let found: Vec<Value> =
        full.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for (message, found) in messages.iter().zip(&found) {
        assert_eq!(found, &answers(&folder, &format!("{message}\n"), "--tokens 8")[0]);
    }
    let output =
        "note: the oldest turn is left out from here on: the conversation has room for 36 tokens\n";
    assert_eq!(full.stderr, output.repeat(2));
    // An answer ends where the conversation is full.
    let cut = converse(&folder, b"what?\n", "--context 40 --json").ok();
    let answer: Value = serde_json::from_str(&cut.stdout).unwrap();
    assert!(answer["end"] == "length" && answer["tokens"].as_array().unwrap().len() < 40);
    assert!(cut.stderr.contains("the answer ends here: the conversation has room for 40 tokens"));
}

#[test]
fn what_cannot_be_a_message_ends_a_pipe_with_its_reason() {
    let folder = Folder::new();
    let refused = |lines: &[u8], args: &str, code, texts: &[&str]| {
        converse(&folder, lines, args).refused(code, texts);
    };
    refused(b"/bye\n", "", 66, &["/bye is no command", "/help", "write a blank before it"]);
    refused(b"a\xff\n", "", 66, &["a line of the standard input is not UTF-8"]);
    let long = "the box holds ".repeat(200);
    let says = ["this message has ", "room for 256 tokens", "--context"];
    refused(format!("{long}\n").as_bytes(), "", 66, &says);
    refused(b"", "--context 257", 2, &["--context 257", "model.seq_len 256"]);
    refused(b"", "--context 20 --prompt a", 2, &["--context", "--prompt"]);
    let chat = fixture("hf-chat-tiny");
    folder.onebox(&["generate", &chat, "--context", "20"]).refused(2, &["--chat"]);
    let plain = fixture("hf-llama3-tiny");
    folder.onebox(&["generate", &plain, "--chat"]).refused(66, &["--chat needs a model"]);
}

/// Whether the terminal has shown the prompt of a turn `times` times.
fn asked(times: usize) -> impl Fn(&Screen) -> bool {
    move |screen| {
        let text = String::from_utf8_lossy(&screen.bytes).replace('\r', "");
        text.matches("\n> ").count() >= times
    }
}

fn text(screen: &Screen) -> String {
    String::from_utf8_lossy(&screen.bytes).into_owned()
}

#[test]
fn a_person_at_a_terminal_converses_until_ctrl_d_or_two_ctrl_c() {
    if !has_terminals() {
        return;
    }
    let (folder, chat) = (Folder::new(), fixture("hf-chat-tiny"));
    let wanted = &answers(&folder, "what?\n", "--tokens 6")[0];
    let args = format!("generate {chat} --chat --temperature 0 --tokens 6");
    for ends in ["\x04", "/exit\n", "\x03\x03"] {
        let mut terminal = Terminal::start(&folder, 200, &[], &args);
        terminal.wait_for("the first prompt", asked(1));
        for (turn, line) in
            ["what?\n", "/help\n", "/bye\n", "/reset\n", "what?\n"].iter().enumerate()
        {
            terminal.keys.write_all(line.as_bytes()).unwrap();
            terminal.wait_for(line, asked(turn + 2));
        }
        for key in ends.split_inclusive('\x03') {
            terminal.keys.write_all(key.as_bytes()).unwrap();
            if key == "\x03" {
                terminal.wait_for("what ends", |screen| {
                    text(screen).contains("Ctrl-C again, or Ctrl-D")
                });
            }
        }
        let (code, lines, screen) = terminal.end();
        assert_eq!(code, 0, "{ends:?}: {lines:#?}");
        let shown = text(&screen);
        let answers =
            ["a conversation of at most 256 tokens", "/reset   start anew", "/bye is no command"];
        assert!(answers.iter().all(|words| shown.contains(words)), "{shown}");
        // A terminal gets the control characters of an answer escaped.
        let escaped = |c: char| match c.is_control() {
            true => format!("\\u{:04x}", u32::from(c)),
            false => c.to_string(),
        };
        let answer: String = wanted["text"].as_str().unwrap().chars().map(escaped).collect();
        assert_eq!(
            shown.matches(&format!("what?\r\n{answer}\r\n")).count(),
            2,
            "{answer}: {shown}"
        );
    }
}

/// A copy of the model that takes 8192 tokens, so that an answer takes long.
fn patient(folder: &Folder) {
    std::fs::create_dir(folder.path("long")).unwrap();
    for entry in std::fs::read_dir(fixture("hf-chat-tiny")).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), folder.path("long").join(entry.file_name())).unwrap();
    }
    let config = folder.read("long/config.json");
    let longer =
        config.replace("\"max_position_embeddings\": 256", "\"max_position_embeddings\": 65536");
    std::fs::write(folder.path("long/config.json"), longer).unwrap();
    // No token ends an answer.
    std::fs::write(folder.path("long/generation_config.json"), "{\"eos_token_id\": 306}").unwrap();
}

#[test]
fn a_ctrl_c_stops_an_answer_that_is_being_printed_and_the_conversation_goes_on() {
    if !has_terminals() {
        return;
    }
    let folder = Folder::new();
    patient(&folder);
    let args = "generate long --chat --temperature 0";
    let mut terminal = Terminal::start(&folder, 200, &[], args);
    terminal.wait_for("the first prompt", asked(1));
    terminal.keys.write_all(b"what?\n").unwrap();
    // Words are printed as they come: the whole answer has 8192 tokens.
    let begun =
        |screen: &Screen| text(screen).split("what?\r\n").nth(1).is_some_and(|a| a.len() > 20);
    terminal.wait_for("a part of the answer", begun);
    terminal.press_ctrl_c();
    terminal.wait_for("the second prompt", asked(2));
    terminal.keys.write_all(b"/help\n").unwrap();
    terminal.wait_for("the third prompt", asked(3));
    terminal.keys.write_all(b"\x04").unwrap();
    let (code, lines, screen) = terminal.end();
    assert_eq!(code, 0, "{lines:#?}");
    let shown = text(&screen);
    assert!(
        shown.contains("at most 8192 tokens") && shown.contains("/reset   start anew"),
        "{shown}"
    );
    for not in ["the answer ends here", "Ctrl-C again"] {
        assert!(!shown.contains(not), "{not}: {shown}");
    }
}

#[test]
fn a_text_is_printed_as_it_is_written() {
    if !has_terminals() {
        return;
    }
    let folder = Folder::new();
    patient(&folder);
    let args = "generate long --prompt 'the box' --tokens 60000 --temperature 0";
    let mut terminal = Terminal::start(&folder, 200, &[], args);
    terminal.wait_for("a part of the text", |screen| {
        text(screen).split("the box").nth(1).is_some_and(|more| more.len() > 20)
    });
    terminal.press_ctrl_c();
    let (code, lines, _) = terminal.end();
    assert_eq!(code, 130, "{lines:#?}");
}

/// A conversation through pipes with the model of [`patient`].
struct PipedConversation(Child);

impl PipedConversation {
    fn start(folder: &Folder, args: &[&str]) -> Self {
        let all = ["generate", "long", "--chat", "--temperature", "0"];
        Self::of(folder.command(&[&all[..], args].concat()))
    }

    fn of(mut command: Command) -> Self {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Self(command.spawn().unwrap())
    }

    fn send(&mut self, line: &str) {
        self.0.stdin.as_mut().unwrap().write_all(line.as_bytes()).unwrap();
    }

    /// A file of `/proc` about the process.
    fn of_proc(&self, name: &str) -> String {
        std::fs::read_to_string(format!("/proc/{}/{name}", self.0.id())).unwrap()
    }

    fn wait_for(&self, what: &str, came: impl Fn(&Self) -> bool) {
        let since = Instant::now();
        while !came(self) {
            assert!(since.elapsed() < Duration::from_secs(180), "not within three minutes: {what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until the process handles SIGINT, which it does before its first turn.
    fn wait_until_ready(&self) {
        self.wait_for("a handler of SIGINT", |it| {
            let status = it.of_proc("status");
            let set = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
            u64::from_str_radix(set.trim(), 16).unwrap() >> 1 & 1 == 1
        });
    }

    /// Time that the process has computed, in ticks of 10 ms.
    fn computed(&self) -> u64 {
        let stat = self.of_proc("stat");
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
        fields[11..13].iter().map(|ticks| ticks.parse::<u64>().unwrap()).sum()
    }

    fn interrupt(&self) {
        let id = self.0.id().to_string();
        assert!(Command::new("kill").args(["-INT", &id]).status().unwrap().success());
    }

    /// Exit code, and what is left of the output, after the end of the input.
    fn end(mut self) -> (Option<i32>, String) {
        drop(self.0.stdin.take());
        // A test reads the first bytes of the answer, which may end within a character.
        let mut out = Vec::new();
        self.0.stdout.take().unwrap().read_to_end(&mut out).unwrap();
        (self.0.wait().unwrap().code(), String::from_utf8_lossy(&out).into_owned())
    }
}

impl Drop for PipedConversation {
    fn drop(&mut self) {
        let _ = self.0.kill().and_then(|()| self.0.wait());
    }
}

#[test]
fn a_ctrl_c_ends_a_conversation_through_pipes_after_the_answer_so_far() {
    let folder = Folder::new();
    patient(&folder);
    let long = ["--context", "65536"];
    // The text so far, with a line end.
    let mut piped = PipedConversation::start(&folder, &long);
    piped.send("what?\n");
    let mut begun = [0; 20];
    piped.0.stdout.as_mut().unwrap().read_exact(&mut begun).unwrap();
    piped.interrupt();
    let (code, rest) = piped.end();
    assert_eq!((code, rest.chars().last()), (Some(130), Some('\n')));
    // One object.
    let mut piped = PipedConversation::start(&folder, &[&long[..], &["--json"]].concat());
    piped.wait_until_ready();
    let before = piped.computed();
    piped.send("what?\n");
    piped.wait_for("the computation of an answer", |it| it.computed() > before + 5);
    piped.interrupt();
    let (code, out) = piped.end();
    let answer: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, out.matches('\n').count()), (Some(130), 1));
    assert_eq!((&answer["prompt"], &answer["end"]), (&"what?".into(), &"interrupted".into()));
    assert!(!answer["text"].as_str().unwrap().is_empty(), "{answer}");
    assert!(!answer["tokens"].as_array().unwrap().is_empty(), "{answer}");
    // Between two answers there is nothing to write.
    let piped = PipedConversation::start(&folder, &long);
    piped.wait_until_ready();
    piped.interrupt();
    assert_eq!(piped.end(), (Some(130), String::new()));
}

/// The model computes sixteen prompts together. The last prompt has not begun.
#[test]
fn a_ctrl_c_ends_texts_in_json_with_an_object_for_each_prompt() {
    let folder = Folder::new();
    patient(&folder);
    let mut args = vec!["generate", "long", "--json", "--temperature", "0", "--tokens", "20000"];
    args.extend(["--prompt", "the box"].repeat(17));
    let piped = PipedConversation::of(folder.command(&args));
    piped.wait_until_ready();
    let before = piped.computed();
    piped.wait_for("the computation of texts", |it| it.computed() > before + 5);
    piped.interrupt();
    let (code, out) = piped.end();
    let texts: Vec<Value> = out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((code, texts.len()), (Some(130), 17), "{out}");
    let count = |text: &Value| text["tokens"].as_array().unwrap().len();
    for (i, text) in texts.iter().enumerate() {
        assert_eq!((&text["prompt"], &text["end"]), (&"the box".into(), &"interrupted".into()));
        assert_eq!(count(text) > 0, i < 16, "{text}");
        // A token may be a part of a letter, so a text of few tokens may be empty.
        assert!(i < 16 || text["text"].as_str().unwrap().is_empty(), "{text}");
    }
    // The tokens are the first ones of the whole text.
    let first = count(&texts[0]).to_string();
    let alone = [&args[..6], &[&first[..], "--prompt", "the box"]].concat();
    let alone: Value = serde_json::from_str(&folder.onebox(&alone).ok().stdout).unwrap();
    assert_eq!(alone["tokens"], texts[0]["tokens"]);
}

#[test]
fn a_conversation_in_the_background_of_a_script_ignores_a_ctrl_c() {
    let folder = Folder::new();
    patient(&folder);
    let mut command = Command::new("sh");
    let line = format!("trap '' INT; exec {} \"$@\"", env!("CARGO_BIN_EXE_onebox"));
    command.args(["-c", &line, "script", "generate", "long", "--chat", "--json", "--tokens", "6"]);
    command.current_dir(folder.path("."));
    let mut piped = PipedConversation::of(command);
    let mut out = BufReader::new(piped.0.stdout.take().unwrap()).lines();
    for message in ["what?\n", "who waits?\n"] {
        piped.send(message);
        let answer: Value = serde_json::from_str(&out.next().unwrap().unwrap()).unwrap();
        assert_eq!(answer["end"], "length");
        piped.interrupt();
    }
    drop(piped.0.stdin.take());
    assert_eq!(piped.0.wait().unwrap().code(), Some(0));
}
