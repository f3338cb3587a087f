//! Helpers of the end-to-end tests: tiny configs, texts, and runs on virtual GPUs.
#![allow(clippy::expect_used, clippy::panic, reason = "helpers of tests")]
#![allow(clippy::allow_attributes, reason = "the lines above")]

use config::{Config, ConfigError, load_str};
use data::{Corpus, Dataset};
use engine::run::{Message, Outcome, RunError, RunOptions, StepReport, train};
use layout::LocalMachine;
use layout::build::RankLayout;
use offload::StepSchedule;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

pub mod compare;
pub mod pass;

/// This machine, discovered once for all tests of a program, since discovery is slow.
pub fn machine() -> &'static LocalMachine {
    static MACHINE: OnceLock<LocalMachine> = OnceLock::new();
    MACHINE.get_or_init(LocalMachine::default)
}

/// The layout of `config` on this machine.
pub fn lay_out(config: &Config) -> RankLayout {
    layout::build::lay_out(config, machine())
}

/// Config of a model with three blocks that trains in milliseconds. Its sizes are odd on purpose.
pub const TINY: &str = r#"(
    device: Cpu(count: 1, memory: "64MiB", threads: 1),
    model: (layers: 3, hidden: 32, heads: 4, seq_len: 16, init_std: 0.08),
    precision: Fp32,
    optimizer: (lr: 3e-3, clip: 0.5),
    offload: (tile_elements: 1024, bucket_elements: 4096),
    schedule: (warmup_steps: 3, decay_steps: 40),
    batch: (micro: 2, global: 8),
    data: (train: "unused"),
    train: (steps: 6, seed: 7),
)"#;

/// `TINY` with `--set` arguments; the device count is tensor x data.
///
/// # Panics
/// If a setting is refused.
pub fn tiny(sets: &[&str]) -> Config {
    try_tiny(sets).unwrap_or_else(|e| panic!("{e}"))
}

/// [`tiny`], or the error of the config.
///
/// # Errors
/// A setting is refused.
///
/// # Panics
/// If a number of ranks is no number.
pub fn try_tiny(sets: &[&str]) -> Result<Config, ConfigError> {
    let number = |key: &str| {
        let found = sets.iter().rev().find_map(|s| s.strip_prefix(key)?.strip_prefix('='));
        found.map_or(1, |n| n.parse::<usize>().expect("a number"))
    };
    let count = number("parallel.tensor") * number("parallel.data");
    let mut all = vec![format!("device.count={count}")];
    all.extend(sets.iter().map(ToString::to_string));
    load_str(TINY, "test.ron", Path::new("."), &all).map(|loaded| loaded.config)
}

/// A config from RON and `--set` arguments.
///
/// # Panics
/// If the config is refused.
pub fn config(ron: &str, sets: &[String]) -> Config {
    load_str(ron, "test.ron", Path::new("."), sets).unwrap_or_else(|e| panic!("{e}")).config
}

/// A data set of English-like text.
pub fn text() -> Arc<Dataset> {
    static TEXT: OnceLock<Arc<Dataset>> = OnceLock::new();
    Arc::clone(TEXT.get_or_init(|| dataset(&text_file(&prose(20_000)).display().to_string(), 16)))
}

/// A text with a validation set of four windows, for models that are slow to evaluate.
pub fn short_text() -> Arc<Dataset> {
    dataset(&text_file(&prose(600)).display().to_string(), 16)
}

/// A file with the text next to the test program, where it stays for later tests. To delete an open
/// file changes its time: a run then reads it again, and waits two seconds before that.
pub(crate) fn text_file(text: &str) -> PathBuf {
    let program = std::env::current_exe().expect("a program");
    let folder = program.parent().expect("a folder");
    let path = folder.join(format!("text-of-{}-bytes.txt", text.len()));
    if std::fs::read(&path).ok().as_deref() != Some(text.as_bytes()) {
        let unfinished = tempfile::NamedTempFile::new_in(folder).expect("a file");
        std::fs::write(unfinished.path(), text).expect("written");
        unfinished.persist(&path).expect("renamed");
    }
    path
}

/// The data set of any file.
///
/// # Panics
/// If the file is refused.
pub fn dataset(path: &str, seq_len: usize) -> Arc<Dataset> {
    let format = config::DataFormat::Bytes;
    let corpus = Corpus::open(path, None, format, 0.1, 256, seq_len);
    Arc::new(corpus.unwrap_or_else(|e| panic!("{e}")).into())
}

/// A data set whose samples in a run with global batch `batch` are `windows`, each with the inputs
/// and one more token. The file has zeros except at the positions that the sampler reads with
/// `data.order: Random`. Returns the seed of that run; `folder` gets the files.
///
/// # Panics
/// If no seed keeps the windows apart.
pub fn dataset_of_windows(
    windows: &[&[f64]],
    batch: usize,
    vocab: usize,
    folder: &Path,
) -> (u64, Arc<Dataset>) {
    const TOKENS: usize = 400_000;
    let seq_len = windows[0].len() - 1;
    let [train, validation] = ["train.bin", "validation.bin"].map(|name| folder.join(name));
    let [train_text, validation_text] = [&train, &validation].map(|p| p.display().to_string());
    let open = || {
        let format = config::DataFormat::U16;
        Corpus::open(&train_text, Some(&validation_text), format, 0.1, vocab, seq_len)
            .unwrap_or_else(|e| panic!("{e}"))
    };
    std::fs::write(&validation, vec![0u8; 2 * (seq_len + 1)]).expect("written");
    std::fs::write(&train, vec![0u8; 2 * TOKENS]).expect("written");
    let empty = open();
    let starts = |seed: u64| -> Vec<usize> {
        let at = |i| empty.sample(seed, (1 + i / batch) as u64, (i % batch) as u64);
        (0..windows.len()).map(at).collect()
    };
    let are_spread = |starts: &[usize]| {
        let mut sorted = starts.to_vec();
        sorted.sort_unstable();
        sorted.windows(2).all(|w| w[1] - w[0] > seq_len)
    };
    let seed = (0..1000).find(|&seed| are_spread(&starts(seed))).expect("a seed");
    let mut bytes = vec![0u8; 2 * TOKENS];
    for (start, window) in starts(seed).iter().zip(windows) {
        for (i, token) in window.iter().enumerate() {
            bytes[2 * (start + i)..][..2].copy_from_slice(&(*token as u16).to_le_bytes());
        }
    }
    std::fs::write(&train, bytes).expect("written");
    (seed, Arc::new(open().into()))
}

/// Deterministic text: words of a small dictionary, with something to learn in their order.
pub fn prose(bytes: usize) -> String {
    const WORDS: [&str; 16] = [
        "the", "box", "holds", "a", "model", "that", "is", "too", "large", "for", "one", "card",
        "and", "every", "rank", "waits",
    ];
    let (mut text, mut word) = (String::new(), 0usize);
    for i in 0u64.. {
        if text.len() >= bytes {
            break;
        }
        text.push_str(WORDS[word]);
        text.push_str(if i % 11 == 10 { ".\n" } else { " " });
        word = (word * 3 + device::random::below(11, i, 4) as usize) % WORDS.len();
    }
    text
}

/// Results of a run on virtual GPUs that tests compare.
#[derive(Clone, Debug)]
pub struct RunRecord {
    /// Reports of all steps.
    pub steps: Vec<StepReport>,
    /// Evaluations: (step, loss).
    pub evals: Vec<(u64, f64)>,
    /// Outcome of the run.
    pub outcome: Outcome,
}

impl RunRecord {
    /// Losses and norms, bit for bit, and the hash of all states.
    pub fn bits(&self) -> (Vec<(u64, u64, bool)>, Vec<u64>, String) {
        let step = |s: &StepReport| (s.loss.to_bits(), s.grad_norm.to_bits(), s.skipped);
        let evals = self.evals.iter().map(|(_, loss)| loss.to_bits()).collect();
        (self.steps.iter().map(step).collect(), evals, self.outcome.state_hash.clone())
    }
}

/// Trains on [`text`], or returns the error.
///
/// # Errors
/// As [`train`].
pub fn try_run(config: &Config, options: &RunOptions) -> Result<RunRecord, Box<RunError>> {
    try_run_built(config, &lay_out(config), options)
}

/// Runs [`try_run`] with a finished layout.
///
/// # Errors
/// As [`train`].
pub fn try_run_built(
    config: &Config,
    built: &RankLayout,
    options: &RunOptions,
) -> Result<RunRecord, Box<RunError>> {
    try_run_on(&text(), config, built, options)
}

/// Runs [`try_run_built`] on the data set `data`.
///
/// # Errors
/// As [`train`].
pub fn try_run_on(
    data: &Arc<Dataset>,
    config: &Config,
    built: &RankLayout,
    options: &RunOptions,
) -> Result<RunRecord, Box<RunError>> {
    let (mut steps, mut evals) = (Vec::new(), Vec::new());
    let outcome = train(config, built, data, options, &mut |message| match message {
        Message::Step(step) => steps.push(step),
        Message::Eval { step, loss, .. } => evals.push((step, loss)),
        Message::Evaluating { .. }
        | Message::Differs { .. }
        | Message::Saving { .. }
        | Message::Saved { .. }
        | Message::NotSaved { .. } => {}
    })?;
    Ok(RunRecord { steps, evals, outcome })
}

/// Trains on [`text`].
///
/// # Panics
/// If the run fails.
pub fn run(config: &Config, options: &RunOptions) -> RunRecord {
    try_run(config, options).unwrap_or_else(|e| panic!("{e}"))
}

/// Trains [`tiny`] on [`text`] with inline lanes.
///
/// # Panics
/// If the run fails.
pub fn run_inline(sets: &[&str]) -> RunRecord {
    run(&tiny(sets), &RunOptions::default())
}

/// A schedule with learning rate 0.1 and weight 1 in each step.
#[derive(Debug)]
pub struct Constant;

impl StepSchedule for Constant {
    fn learning_rate(&self, _: u64) -> f64 {
        0.1
    }
    fn weight(&self, _: u64) -> f64 {
        1.0
    }
}
