//! Comparison with transformers and PyTorch: a model from tests/fixtures/make_hf_fixture.py is
//! imported, and gives the same logits and the same ten losses.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::print_stdout, reason = "figures for --nocapture")]
#![allow(clippy::allow_attributes, reason = "the lines above")]

use checkpoint::hugging_face::{Folder, ModelExport, Numbers, export, import};
use checkpoint::{Checkpoint, RunFolder};
use config::Config;
use data::Dataset;
use data::model_files::ModelFiles;
use data::progress::Silence;
use engine::run::{Message, RunOptions, train};
use onebox::generate::{ModelSource, WeightSource, next_logits};
use safetensors::SafeTensors;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tests::{config, dataset_of_windows, lay_out};

/// Samples (`B`), tokens of a sample (`T`) and vocabulary (`V`) of the fixture.
const B: usize = 4;
const T: usize = 16;
const V: usize = 61;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/hf-gpt2-tiny")
}

/// Expected tensor, widened to f64.
fn expected(name: &str) -> Vec<f64> {
    let bytes = std::fs::read(folder().join("expected.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensor = file.tensor(name).unwrap();
    let data = tensor.data();
    match tensor.dtype() {
        safetensors::Dtype::F64 => {
            data.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b)).collect()
        }
        safetensors::Dtype::I32 => {
            data.as_chunks().0.iter().map(|b| f64::from(i32::from_le_bytes(*b))).collect()
        }
        _ => data.as_chunks().0.iter().map(|b| f64::from(f32::from_le_bytes(*b))).collect(),
    }
}

fn fp32(sets: &[&str], seed: u64) -> Config {
    let ron = format!(
        "(model: (layers: 2, hidden: 32, heads: 4, seq_len: {T}, vocab: {V}, ffn_hidden: 96),
          precision: Fp32, optimizer: (lr: 1e-2, weight_decay: 0.1, clip: 1.0),
          schedule: (kind: Constant), offload: (tile_elements: 1024), device: Cpu(threads: 1),
          batch: (micro: 1, global: {B}), data: (train: \"unused\", format: U16, order: Random),
          train: (steps: 10, seed: {seed}, checkpoint_every: 10))"
    );
    config(&ron, &sets.iter().map(ToString::to_string).collect::<Vec<_>>())
}

fn checkpoints(run: &Path) -> RunFolder {
    RunFolder::at(&run.join("checkpoints")).unwrap()
}

fn imported(config: &Config, data: &Dataset, run: &Path) -> Checkpoint {
    let from = Folder::open(&folder()).unwrap_or_else(|e| panic!("{e}"));
    let built = lay_out(config);
    from.check_model(&config.model, &built.decoder).unwrap_or_else(|e| panic!("{e}"));
    let sealed = import(&from, config, &built, data, &checkpoints(run));
    let sealed = sealed.unwrap_or_else(|e| panic!("{e}"));
    let path = sealed.publish().unwrap_or_else(|e| panic!("{e}"));
    Checkpoint::open(&path, 0).unwrap()
}

fn windows(folder: &Path) -> (u64, Arc<Dataset>) {
    let tokens = expected("train.tokens");
    let windows: Vec<&[f64]> = tokens.chunks(T + 1).collect();
    dataset_of_windows(&windows, B, V, folder)
}

#[test]
fn logits_of_an_imported_model_are_those_of_transformers() {
    let run = tempfile::tempdir().unwrap();
    let (seed, data) = windows(run.path());
    let config = fp32(&["parallel.tensor=2", "device.count=2"], seed);
    let checkpoint = imported(&config, &data, run.path());
    let (tokens, logits) = (expected("tokens"), expected("logits"));
    let mut worst = 0.0f64;
    for (sample, rows) in tokens.chunks(T).zip(logits.chunks(T * V)) {
        for (last, row) in rows.chunks(V).enumerate() {
            let prompt: Vec<String> = sample[..=last].iter().map(f64::to_string).collect();
            let from = ModelSource::on_cores(
                WeightSource::Checkpoint(&checkpoint),
                None,
                tests::machine(),
            );
            let got = next_logits(&config, &from, &prompt.join(" ")).unwrap();
            assert_eq!(got.len(), V);
            worst = got.iter().zip(row).map(|(a, b)| (a - b).abs()).fold(worst, f64::max);
        }
    }
    println!("logits are at most {worst:.1e} apart");
    assert!(worst < 5e-6, "{worst:e}");
}

#[test]
fn ten_adamw_steps_from_an_imported_model_are_those_of_pytorch_on_every_layout() {
    let want = expected("train.losses");
    for (tp, dp) in [(1, 1), (2, 2), (4, 1)] {
        let run = tempfile::tempdir().unwrap();
        let (seed, data) = windows(run.path());
        let grid = [
            format!("parallel.tensor={tp}"),
            format!("parallel.data={dp}"),
            format!("device.count={}", tp * dp),
        ];
        let config = fp32(&grid.each_ref().map(String::as_str), seed);
        let options = RunOptions {
            resume: Some(Arc::new(imported(&config, &data, run.path()))),
            checkpoints: Some(checkpoints(run.path())),
            ..RunOptions::default()
        };
        let mut losses = Vec::new();
        let outcome = train(&config, &lay_out(&config), &data, &options, &mut |message| {
            if let Message::Step(step) = message {
                losses.push(step.loss);
            }
        });
        outcome.unwrap();
        let difference = losses.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        println!("TP {tp} x DP {dp}: losses are at most {difference:.1e} apart");
        assert_eq!(losses.len(), 10);
        assert!(difference < 1e-5, "TP {tp} x DP {dp}: {difference:e}\n{losses:?}\n{want:?}");
    }
}

#[test]
fn what_is_imported_and_exported_is_the_same_folder() {
    let run = tempfile::tempdir().unwrap();
    let (seed, data) = windows(run.path());
    let config = fp32(&["parallel.tensor=2", "parallel.data=2", "device.count=4"], seed);
    let checkpoint = imported(&config, &data, run.path());
    let tensors = |folder: &Path, names: &[String]| {
        let mut found = std::collections::BTreeMap::new();
        for name in names.iter().filter(|name| name.ends_with(".safetensors")) {
            let bytes = std::fs::read(folder.join(name)).unwrap();
            for (name, t) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
                let shape = t.shape().to_vec();
                assert!(found.insert(name, (shape, t.data().to_vec())).is_none());
            }
        }
        found
    };
    let theirs = tensors(&folder(), &["model.safetensors".into()]);
    assert_eq!(theirs.len(), 28);
    for (most, files) in [(u64::MAX, 1), (40_000, 3), (0, 28)] {
        let out = run.path().join(format!("out-{files}"));
        let built = lay_out(&config);
        let model = ModelExport {
            base: None,
            checkpoint: &checkpoint,
            config: &config,
            built: &built,
            tokenizer: None,
            model_files: &ModelFiles::default(),
            numbers: Numbers::F32,
            max_file_bytes: most,
            progress: &Silence,
        };
        let names = export(&model, &out).unwrap();
        let parts = names.iter().filter(|n| n.ends_with(".safetensors")).count();
        assert_eq!(parts, files, "{names:?}");
        assert_eq!(names.contains(&"model.safetensors.index.json".to_owned()), files > 1);
        assert!(tensors(&out, &names) == theirs, "{most}: {names:?}");
        // The exported folder can be imported, and its config.json describes the model.
        let again = Folder::open(&out).unwrap();
        again.check_model(&config.model, &built.decoder).unwrap();
    }
}
