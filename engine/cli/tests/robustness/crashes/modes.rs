//! Runs of every mode, killed at random moments (kill -9). Each start has another placement than
//! the one before. The runs end in the state of an undisturbed run.

use super::full;
use crate::common::{Folder, with_chats};
use std::process::Stdio;
use std::time::{Duration, Instant};

/// Maximum time of a command; no command needs as much.
const PATIENCE: Duration = Duration::from_secs(300);

/// A training, and placements that give the same bits.
struct Mode {
    name: &'static str,
    config: &'static str,
    sets: &'static [&'static str],
    placements: &'static [&'static [&'static str]],
}

const ON_HOST: &str = "offload.parameters=Host";

const MODES: [Mode; 9] = [
    Mode {
        name: "parameters on the host, in order",
        config: "tiny.ron",
        sets: &[],
        placements: &[&[ON_HOST, "offload.update=Serial"], &["offload.update=Overlapped"]],
    },
    Mode {
        name: "parameters on the host, overlapped",
        config: "tiny.ron",
        sets: &[],
        placements: &[
            &[ON_HOST, "offload.update=Overlapped"],
            &["offload.optimizer=Device"],
            &[ON_HOST, "offload.ring=2", "offload.tile_elements=1024"],
        ],
    },
    Mode {
        name: "speculative",
        config: "tiny.ron",
        sets: &[],
        placements: &[
            &["offload.update=Speculative"],
            &["offload.update=Serial", "device.threads=2"],
            &["offload.update=Speculative", "offload.speculated_fraction=0.3"],
        ],
    },
    Mode {
        name: "split",
        config: "tiny.ron",
        sets: &[],
        placements: &[
            &["offload.optimizer=Split(device_fraction: 0.5)"],
            &["offload.optimizer=Host"],
            &["offload.optimizer=Split(device_fraction: 0.2)", "offload.update=Serial"],
        ],
    },
    Mode {
        name: "bf16 moments",
        config: "tiny.ron",
        sets: &["offload.moments=Bf16"],
        placements: &[&[], &[ON_HOST, "offload.master=Split"], &["offload.update=Serial"]],
    },
    Mode {
        name: "fp8",
        config: "tiny.ron",
        sets: &["precision=Fp8", "model.heads=2"],
        placements: &[&[], &[ON_HOST], &["offload.master=Split"]],
    },
    Mode {
        name: "fp8, speculative",
        config: "tiny.ron",
        sets: &["precision=Fp8", "model.heads=2"],
        placements: &[&["offload.update=Speculative"], &["offload.update=Serial"]],
    },
    Mode {
        name: "documents of JSON lines",
        config: "tiny.ron",
        sets: &[
            "data.train=\"rows.jsonl\"",
            "data.format=Jsonl(text: \"text\")",
            "data.packing=Documents",
            "data.tokenizer=\"tokenizer.json\"",
            "model.vocab=300",
        ],
        placements: &[&[], &["offload.update=Speculative"], &[ON_HOST, "device.threads=2"]],
    },
    Mode {
        name: "documents of chats",
        config: "chat.ron",
        sets: &["data.packing=Documents"],
        placements: &[&[], &["offload.update=Serial"], &[ON_HOST]],
    },
];

/// Settings of every run here.
const SHARED: [&str; 5] = [
    "recompute=Block",
    "train.eval_every=0",
    "train.checkpoint_every=1",
    "train.checkpoint_overhead=None",
    "schedule.decay_steps=400",
];

/// Pseudo-random numbers, equal in each run of the tests.
pub(crate) struct Numbers(pub(crate) u64);

impl Numbers {
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}

impl Mode {
    fn words(&self, run: &str, placement: usize, more: &[&str]) -> Vec<String> {
        let placement = self.placements[placement % self.placements.len()];
        let sets = SHARED.iter().chain(self.sets).chain(placement).chain(more);
        let head = ["train", self.config, "-q", "--run-dir", run];
        head.into_iter().chain(sets.flat_map(|set| ["--set", set])).map(str::to_owned).collect()
    }
}

/// Number of lines in the metrics of a run.
fn lines(folder: &Folder, run: &str) -> usize {
    let text = std::fs::read_to_string(folder.path(run).join("metrics.jsonl"));
    text.map_or(0, |text| text.lines().count())
}

/// Last step with a complete line.
fn last_step(folder: &Folder, run: &str) -> u64 {
    let text = folder.read(&format!("{run}/metrics.jsonl"));
    let lines = text.lines().filter_map(|line| serde_json::from_str(line).ok());
    lines.filter_map(|line: serde_json::Value| line["step"].as_u64()).max().unwrap_or(0)
}

/// End of a run: the hash of its state, and its weights.
fn end(folder: &Folder, run: &str) -> (String, Vec<u8>) {
    (folder.hash(run), std::fs::read(folder.path(run).join("weights.safetensors")).unwrap())
}

/// Starts the run, and kills it after some steps and a random time.
fn killed(folder: &Folder, mode: &Mode, placement: usize, numbers: &mut Numbers) {
    let mut words = mode.words("run", placement, &["train.steps=1000000", "sample.tokens=0"]);
    words.push("--resume".to_owned());
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    // In a full run, every fourth start is killed before its first step.
    let lines_more = numbers.below(4).max(u64::from(!full()));
    let until = lines(folder, "run") + usize::try_from(lines_more).unwrap();
    let mut child = folder.command(&words).stderr(Stdio::piped()).spawn().unwrap();
    let since = Instant::now();
    while lines(folder, "run") < until && child.try_wait().unwrap().is_none() {
        assert!(since.elapsed() < PATIENCE, "{}: no {until} lines", mode.name);
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_micros(numbers.below(60_000)));
    // `kill` sends SIGKILL.
    child.kill().unwrap();
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), None, "{}: {stderr}", mode.name);
    assert!(!stderr.contains("broken") && !stderr.contains("panicked"), "{}: {stderr}", mode.name);
}

#[test]
fn killed_in_any_mode_a_run_goes_on_in_another_placement_to_the_same_end() {
    let mut numbers = Numbers(88_172_645_463_325_252);
    let (mut kills, mut faults) = (0, Vec::new());
    // 63 kills, or one kill of each mode.
    let times = if full() { 7 } else { 1 };
    for (number, mode) in MODES.iter().enumerate() {
        let folder = with_chats();
        let rows = |i: usize| {
            format!("{{\"text\": \"{}\"}}\n", "the box holds a model ".repeat(1 + i % 5))
        };
        let tokenizer =
            concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/tokenizer-tiny.json");
        std::fs::copy(tokenizer, folder.path("tokenizer.json")).unwrap();
        std::fs::write(folder.path("rows.jsonl"), (0..80).map(rows).collect::<String>()).unwrap();
        // Each mode of the quick selection begins with another placement.
        let first = if full() { 0 } else { number };
        for start in 0..times {
            killed(&folder, mode, first + start, &mut numbers);
            kills += 1;
        }
        let last = if lines(&folder, "run") > 0 { last_step(&folder, "run") } else { 0 };
        let steps = format!("train.steps={}", last + 3);
        let run = |run: &str, placement: usize, more: &[&str]| {
            let words = mode.words(run, placement, &[&steps, "sample.tokens=0"]);
            let words: Vec<&str> =
                words.iter().map(String::as_str).chain(more.iter().copied()).collect();
            folder.onebox(&words)
        };
        let resumed = run("run", first + times, &["--resume"]);
        let straight = run("straight", 0, &[]);
        println!("{}: {times} kills, {last} steps: {}", mode.name, resumed.code);
        let codes = [resumed.code, straight.code];
        if codes != [0, 0] {
            faults.push(format!("{}: {codes:?}: {}{}", mode.name, resumed.stderr, straight.stderr));
        } else if end(&folder, "run") != end(&folder, "straight") {
            faults
                .push(format!("{}: another end behind step {last}: {}", mode.name, resumed.stderr));
        }
    }
    assert!(faults.is_empty(), "{kills} kills: {}", faults.join("\n"));
}
