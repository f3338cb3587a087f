//! Folders of PEFT, and weights into which adapters are merged, compared with those of PEFT.

use super::{B, MODELS, T, base, folder, fp32, load};
use crate::llama::tensors;
use checkpoint::hugging_face::{ModelExport, Numbers, export, export_adapters, read_adapters};
use checkpoint::{Checkpoint, RunFolder};
use data::model_files::ModelFiles;
use data::progress::Silence;
use engine::run::{RunOptions, train};
use std::collections::BTreeSet;
use std::sync::Arc;
use tests::pass::{Fixture, worst};
use tests::{dataset_of_windows, lay_out};

/// A run starts from a folder of PEFT. Its adapters after ten steps are those of PEFT, as a folder of
/// PEFT with the same names, and merged into the weights.
#[test]
fn folders_of_peft_are_read_and_written_and_merged_weights_are_those_of_peft() {
    for model in &MODELS {
        let name = model.name;
        let fixture = load(name);
        let run = tempfile::tempdir().unwrap();
        let windows: Vec<&[f64]> = fixture.get("train.tokens").chunks(T + 1).collect();
        let (seed, data) = dataset_of_windows(&windows, B, 61, run.path());
        let sets = ["parallel.tensor=2", "parallel.data=3", "device.count=6", "batch.micro=2"];
        let config = fp32(model, &sets.map(str::to_owned), seed);
        let built = lay_out(&config);
        let adapters = folder(&format!("peft-{name}-tiny"));
        let factors = read_adapters(&adapters, &config.model, &built.decoder);
        let factors = factors.unwrap_or_else(|e| panic!("{e}"));
        for (factor, values) in &factors {
            let want = model.values(&fixture, "", factor);
            let same = values.iter().zip(&want).all(|(x, want)| f64::from(*x) == *want);
            assert!(same && values.len() == want.len(), "{name}: {factor}");
        }
        let base = base(model);
        let options = RunOptions {
            pretrained: Some(Arc::clone(&base)),
            initial: Some(Arc::new(factors)),
            checkpoints: Some(RunFolder::at(&run.path().join("checkpoints")).unwrap()),
            ..RunOptions::default()
        };
        train(&config, &built, &data, &options, &mut |_| ()).unwrap();
        let path = run.path().join("checkpoints/step-00000010");
        let checkpoint = Checkpoint::open(&path, 10).unwrap();
        let of_peft = ModelExport {
            base: None,
            checkpoint: &checkpoint,
            config: &config,
            built: &built,
            tokenizer: None,
            model_files: &ModelFiles::default(),
            numbers: Numbers::F32,
            max_file_bytes: u64::MAX,
            progress: &Silence,
        };
        let [out, whole] = ["out", "whole"].map(|out| run.path().join(out));
        export_adapters(&of_peft, &out).unwrap_or_else(|e| panic!("{e}"));
        let read = |path: std::path::PathBuf| {
            let mut tensors = Fixture::default();
            tensors.add(&std::fs::read(path).unwrap());
            tensors
        };
        let [written, came] =
            [&out, &adapters].map(|folder| read(folder.join("adapter_model.safetensors")));
        let names = |of: &Fixture| of.0.keys().cloned().collect::<BTreeSet<_>>();
        assert_eq!(names(&written), names(&came), "{name}");
        for (tensor, values) in &written.0 {
            let apart = worst(values, fixture.get(&format!("final.{tensor}")));
            assert!(apart < 2e-4, "{name}: {tensor} is {apart:e} apart");
        }
        assert_eq!(config_of(&out), config_of(&adapters), "{name}");

        export(&ModelExport { base: Some(&base), ..of_peft }, &whole)
            .unwrap_or_else(|e| panic!("{e}"));
        let mut merged = read(whole.join("model.safetensors"));
        tensors::split_stacks(&mut merged, name);
        let mut wanted = Fixture::default();
        for (tensor, values) in &fixture.0 {
            if let Some(tensor) = tensor.strip_prefix("merged.") {
                wanted.0.insert(tensor.to_owned(), values.clone());
            }
        }
        assert!(!wanted.0.is_empty());
        tensors::split_stacks(&mut wanted, name);
        for (tensor, values) in &wanted.0 {
            if tensors::is_stack(tensor) {
                continue;
            }
            let apart = worst(merged.get(tensor), values);
            assert!(apart < 2e-4, "{name}: {tensor} is {apart:e} apart");
        }
    }
}

/// The settings of a folder of PEFT that both programs write: targets in the order of their names.
fn config_of(folder: &std::path::Path) -> serde_json::Value {
    let text = std::fs::read_to_string(folder.join("adapter_config.json")).unwrap();
    let all: serde_json::Value = serde_json::from_str(&text).unwrap();
    let sorted = |key: &str| {
        let names = all[key].as_array().cloned().unwrap_or_default();
        let mut names: Vec<String> = names.iter().map(ToString::to_string).collect();
        names.sort();
        serde_json::Value::from(names)
    };
    serde_json::json!({
        "r": all["r"], "lora_alpha": all["lora_alpha"].as_f64(), "use_rslora": all["use_rslora"], "bias": all["bias"],
        "fan_in_fan_out": all["fan_in_fan_out"], "peft_type": all["peft_type"], "task_type": all["task_type"],
        "target_modules": sorted("target_modules"), "target_parameters": sorted("target_parameters"),
    })
}
