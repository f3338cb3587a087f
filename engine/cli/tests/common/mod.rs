//! A folder with a text and a tiny config, and the `onebox` binary.
#![allow(dead_code, reason = "each test file uses a part")]
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the lines above")]

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

/// Maximum time of a command. A hanging command is killed, so that the test can report it.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(300);

pub(crate) const TINY: &str = r#"(
    device: Cpu(count: 4, memory: "16MiB", threads: 1),
    model: (layers: 2, hidden: 32, heads: 4, seq_len: 16),
    parallel: (tensor: 2, data: 2),
    precision: Bf16,
    optimizer: (lr: 3e-3),
    batch: (micro: 2, global: 8),
    data: (train: "text.txt"),
    train: (steps: 4, eval_every: 2, eval_batches: 1),
    sample: (prompt: "the ", tokens: 8),
)
"#;

/// Settings that make some samples of [`Folder::write_letters`] overflow in fp16, but not all.
pub(crate) const OVERFLOWING: [&str; 11] = [
    "precision=Fp16",
    "data.order=Random",
    "model.seq_len=8",
    "loss_scale.initial=65536",
    "loss_scale.floor=65536",
    "loss_scale.window=1000000",
    "train.seed=2",
    "train.eval_every=0",
    "train.checkpoint_every=2",
    "train.checkpoint_keep=1",
    "train.stop_after_skipped=1",
];

/// A learning rate that grows until the model gets worse. Evaluations and saves rarely coincide.
pub(crate) const WORSE: [&str; 10] = [
    "optimizer.lr=1.0",
    "schedule.warmup_steps=14",
    "schedule.decay_steps=1000",
    "train.steps=14",
    "train.eval_every=2",
    "train.checkpoint_every=3",
    "train.checkpoint_keep=2",
    "train.keep_best=true",
    "sample.tokens=0",
    "batch.micro=1",
];

/// A folder with `tiny.ron` and `text.txt`; it is removed at the end.
pub(crate) struct Folder(tempfile::TempDir);

impl Folder {
    pub(crate) fn new() -> Self {
        Self::of(tempfile::tempdir().unwrap())
    }

    /// A folder on the build's disk. In memory, a file may change without a new time.
    pub(crate) fn on_disk() -> Self {
        Self::of(tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap())
    }

    /// A folder in memory, if this machine has a file system in memory.
    pub(crate) fn in_memory() -> Option<Self> {
        tempfile::tempdir_in("/dev/shm").ok().map(Self::of)
    }

    fn of(folder: tempfile::TempDir) -> Self {
        let folder = Self(folder);
        std::fs::write(folder.path("tiny.ron"), TINY).unwrap();
        let words = ["the box ", "holds a model ", "that is too large ", "for one card.\n"];
        let text: String = (0..800).map(|i| words[(i * 7 + i / 5) % words.len()]).collect();
        std::fs::write(folder.path("text.txt"), text).unwrap();
        folder
    }

    /// Fills `text.txt` with letters that follow no rule.
    pub(crate) fn write_letters(&self) {
        let mut x = 1u32;
        let letter = |_| {
            x = x.wrapping_mul(1_103_515_245).wrapping_add(12345) & 0x7fff_ffff;
            if (x >> 8).is_multiple_of(5) { ' ' } else { char::from(b'a' + ((x >> 16) % 26) as u8) }
        };
        let text: String = (0..6000).map(letter).collect();
        std::fs::write(self.path("text.txt"), text).unwrap();
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn command(&self, args: &[&str]) -> Command {
        // A shell makes background jobs ignore signals; `env` restores the default.
        let mut command = Command::new("env");
        command.args(["--default-signal", env!("CARGO_BIN_EXE_onebox")]);
        command.args(args).current_dir(self.0.path()).stdin(Stdio::null());
        command
    }

    pub(crate) fn onebox(&self, args: &[&str]) -> CommandOutput {
        Self::done(self.command(args))
    }

    /// Runs a line in the shell.
    pub(crate) fn shell(&self, line: &str) -> CommandOutput {
        let mut command = Command::new("sh");
        command.args(["-c", line]).current_dir(self.0.path()).stdin(Stdio::null());
        Self::done(command)
    }

    pub(crate) fn done(mut command: Command) -> CommandOutput {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.spawn().unwrap();
        let id = child.id();
        let (sender, receiver) = std::sync::mpsc::channel();
        std::thread::spawn(move || sender.send(child.wait_with_output()));
        let output = receiver.recv_timeout(PATIENCE).unwrap_or_else(|_| {
            Command::new("kill").args(["-9", &id.to_string()]).status().unwrap();
            receiver.recv().unwrap()
        });
        let Output { status, stdout, stderr } = output.unwrap();
        CommandOutput {
            code: status.code().unwrap_or(-1),
            stdout: String::from_utf8_lossy(&stdout).into_owned(),
            stderr: String::from_utf8_lossy(&stderr).into_owned(),
        }
    }

    /// Trains `tiny.ron` into `run`.
    pub(crate) fn train(&self, run: &str, more: &[&str]) -> CommandOutput {
        self.onebox(&[&["train", "tiny.ron", "--run-dir", run], more].concat())
    }

    pub(crate) fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.path(name)).unwrap()
    }

    /// Lines of a run's metrics, without those that hold its config.
    pub(crate) fn metrics(&self, run: &str) -> Vec<serde_json::Value> {
        let text = self.read(&format!("{run}/metrics.jsonl"));
        let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
        lines.filter(|line: &serde_json::Value| line["kind"] != "config").collect()
    }

    pub(crate) fn hash(&self, run: &str) -> String {
        self.metrics(run).last().unwrap()["state_hash"].as_str().unwrap().to_owned()
    }
}

/// A folder with a model, its chat template, and chats.
pub(crate) fn with_chats() -> Folder {
    let folder = Folder::new();
    let model = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let model = model.join("../../tests/fixtures/hf-chat-tiny");
    let chat = |i: usize| {
        let words = ["the box", "a model", "one card"];
        serde_json::json!({ "messages": [
            { "role": "user", "content": format!("what holds {}?", words[i % 3]) },
            { "role": "assistant", "content": format!("{} of {i}", words[(i + 1) % 3]) },
        ]})
    };
    let rows: String = (0..60).map(|i| format!("{}\n", chat(i))).collect();
    std::fs::write(folder.path("chats.jsonl"), rows).unwrap();
    let ron = format!(
        "(model: (from: {model:?}, seq_len: 64), device: Cpu(count: 2, memory: \"64MiB\"),
          parallel: (data: 2), precision: Fp32, batch: (micro: 2, global: 8),
          data: (train: \"chats.jsonl\", format: Chat), train: (steps: 4, eval_every: 2))"
    );
    std::fs::write(folder.path("chat.ron"), ron).unwrap();
    folder
}

/// Whether strace works here. Reports its absence, which is a failure in continuous integration.
pub(crate) fn has_strace() -> bool {
    let tried = Command::new("strace").args(["-o", "/dev/null", "true"]).output();
    let works = tried.is_ok_and(|output| output.status.success());
    let none = "no strace that works here (scripts/setup tests installs it)";
    let in_ci = std::env::var_os("CI").is_some_and(|value| value == "true");
    assert!(works || !in_ci, "{none}");
    if !works {
        println!("SKIPPED: {none}");
    }
    works
}

/// A command in which root can read no more than another user.
pub(crate) fn without_roots_rights(command: &Command) -> Command {
    let rights = "-dac_override,-dac_read_search";
    let mut without = Command::new("setpriv");
    without.args([format!("--bounding-set={rights}"), format!("--inh-caps={rights}")]);
    without.arg(command.get_program()).args(command.get_args());
    without.current_dir(command.get_current_dir().unwrap());
    for (key, value) in command.get_envs() {
        without.env(key, value.unwrap());
    }
    without
}

/// Result of a process.
#[derive(Debug)]
pub(crate) struct CommandOutput {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl CommandOutput {
    #[track_caller]
    pub(crate) fn ok(self) -> Self {
        assert_eq!(self.code, 0, "{}", self.stderr);
        self
    }

    /// Asserts that the command ended with `code`, and that its messages contain all `texts`.
    #[track_caller]
    pub(crate) fn refused(self, code: i32, texts: &[&str]) -> Self {
        assert_eq!(self.code, code, "{}", self.stderr);
        for text in texts {
            assert!(self.stderr.contains(text), "`{text}` is not in:\n{}", self.stderr);
        }
        assert!(!self.stderr.contains("panicked"), "{}", self.stderr);
        self
    }
}
