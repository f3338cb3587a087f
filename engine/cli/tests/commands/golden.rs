//! A committed checkpoint of format 1 loads bit for bit on any layout. A checkpoint of another
//! format is refused with both versions. ONEBOX_UPDATE=1 rewrites the checkpoint, with a hash to
//! put below: only for a new format, under a new name.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::print_stdout, reason = "what to put below")]
#![allow(clippy::allow_attributes, reason = "the lines above")]

use crate::common::Folder;
use checkpoint::{Checkpoint, RunFolder};
use config::{Config, DataFormat, load_str};
use data::{Corpus, Dataset};
use engine::run::{Message, RunOptions, train};
use layout::LocalMachine;
use layout::build::lay_out;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const STEP: u64 = 3;
/// Hash of all states after that step, in the run that wrote them.
const STATE_HASH: &str = "e99e70560aa851b1";

const RON: &str = r#"(
    name: "golden",
    device: Cpu(count: 4, memory: "16MiB", threads: 1),
    model: (layers: 1, hidden: 8, heads: 4, seq_len: 4, vocab: 11, ffn_hidden: 12, init_std: 0.2),
    parallel: (tensor: 2, data: 2),
    precision: Fp16,
    loss_scale: (initial: 1024.0, window: 2),
    optimizer: (lr: 1e-2),
    batch: (micro: 1, global: 2),
    data: (train: "/unused", format: U16),
    train: (steps: 3, checkpoint_every: 3, seed: 5),
)"#;

fn config(sets: &[&str]) -> Config {
    let sets: Vec<String> = sets.iter().map(ToString::to_string).collect();
    load_str(RON, "golden.ron", Path::new("/"), &sets).unwrap_or_else(|e| panic!("{e}")).config
}

fn path() -> PathBuf {
    let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/checkpoint-format-1");
    Path::new(fixtures).join("step-00000003")
}

fn data() -> Dataset {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tokens.bin");
    let tokens: Vec<u8> = (0..200u16).flat_map(|i| (i * i % 11).to_le_bytes()).collect();
    std::fs::write(&file, tokens).unwrap();
    Corpus::open(file.to_str().unwrap(), None, DataFormat::U16, 0.1, 11, 4).unwrap().into()
}

/// Hash of all states at the end of a run. A run from the golden checkpoint has no steps to do.
fn hash(sets: &[&str], options: &RunOptions) -> String {
    let config = config(sets);
    let mut steps = 0;
    let built = lay_out(&config, &LocalMachine::default());
    let outcome = train(&config, &built, &Arc::new(data()), options, &mut |message| {
        steps += usize::from(matches!(message, Message::Step(_)));
    });
    assert_eq!(steps, if options.resume.is_some() { 0 } else { 3 });
    outcome.unwrap_or_else(|e| panic!("{e}")).state_hash
}

#[test]
fn the_golden_checkpoint_loads_bit_for_bit_on_every_layout() {
    if std::env::var_os("ONEBOX_UPDATE").is_some() {
        let in_ci = std::env::var_os("CI").is_some_and(|value| value == "true");
        assert!(!in_ci, "ONEBOX_UPDATE writes the checkpoint that the test should compare with");
        let folder = RunFolder::at(path().parent().unwrap()).unwrap();
        let options = RunOptions { checkpoints: Some(folder), ..RunOptions::default() };
        println!("STATE_HASH = {}", hash(&[], &options));
        return;
    }
    for (tp, dp) in [(2, 2), (1, 1), (4, 1), (1, 2)] {
        let grid = [
            format!("parallel.tensor={tp}"),
            format!("parallel.data={dp}"),
            format!("device.count={}", tp * dp),
        ];
        let from = Checkpoint::open(&path(), STEP).unwrap_or_else(|e| panic!("{e}"));
        let options = RunOptions { resume: Some(Arc::new(from)), ..RunOptions::default() };
        let found = hash(&grid.each_ref().map(String::as_str), &options);
        assert_eq!(found, STATE_HASH, "TP {tp} x DP {dp}");
    }
}

#[test]
fn another_format_is_refused_with_both_versions() {
    let folder = Folder::new();
    let checkpoint = folder.path("run/checkpoints/step-00000003");
    std::fs::create_dir_all(&checkpoint).unwrap();
    for entry in std::fs::read_dir(path()).unwrap() {
        let from = entry.unwrap().path();
        std::fs::copy(&from, checkpoint.join(from.file_name().unwrap())).unwrap();
    }
    let verify = || folder.onebox(&["checkpoint", "verify", "run"]);
    verify().ok();
    let manifest = std::fs::read_to_string(checkpoint.join("MANIFEST")).unwrap();
    let json = manifest.lines().next().unwrap();
    // Manifests of later versions; in the second one, the other fields are unknown too.
    for later in [
        json.replacen("\"format\":1", "\"format\":2", 1),
        "{\"format\":2,\"onebox\":\"7.0.0\",\"stores\":[]}".to_owned(),
    ] {
        let hash = xxhash_rust::xxh3::xxh3_128(later.as_bytes());
        std::fs::write(checkpoint.join("MANIFEST"), format!("{later}\n{hash:032x}\n")).unwrap();
        let found = verify();
        for text in ["MANIFEST is broken: it has format 2, written by onebox", "reads format 1"] {
            assert!(found.stdout.contains(text), "`{text}` is not in:\n{}", found.stdout);
        }
        found.refused(82, &["cannot be used"]);
        folder.train("run", &["--resume"]).refused(82, &["format 2", "reads format 1"]);
    }
}
