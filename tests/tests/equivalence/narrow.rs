//! Models with few columns: a matrix with one column, in total or on each rank, is still a matrix.
//! The gradients on one rank equal central differences, and the gradients on several ranks equal
//! those on one rank.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use config::{Config, DataFormat, LoadedConfig, load_str};
use data::{Corpus, Dataset};
use device::{Plan, random};
use engine::run::RunOptions;
use layout::build::shape;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use tensor_parallel::{Decoder, DecoderShape};
use tests::pass::{PassInputs, PassResult, pass, worst};
use tests::{lay_out, try_run_on};

const RON: &str = r#"(
    device: Cpu(count: 1, memory: "16MiB", threads: 1),
    model: (layers: 1, hidden: 2, heads: 1, seq_len: 4, vocab: 5, ffn_hidden: 2),
    precision: Fp32,
    batch: (micro: 1, global: 4),
    data: (train: "unused", format: U16),
    train: (steps: 2, seed: 7),
)"#;

fn load(sets: &[String]) -> Option<Config> {
    load_str(RON, "test.ron", Path::new("."), sets).ok().map(|LoadedConfig { config, .. }| config)
}

/// Shape of the model of `sets` on `tensor` ranks; `None` if its config is refused.
fn model(sets: &[&str], tensor: usize) -> Option<DecoderShape> {
    let ranks = [format!("parallel.tensor={tensor}"), format!("device.count={tensor}")];
    let sets: Vec<String> = sets.iter().map(ToString::to_string).chain(ranks).collect();
    Some(shape(&load(&sets)?))
}

/// Random parameters by name. They are so large that differences of the loss show the gradients.
fn parameters(shape: &DecoderShape) -> BTreeMap<String, Vec<f64>> {
    let decoder = Decoder::plan(&mut Plan::default(), shape, 64);
    let params = decoder.segments().iter().flat_map(|s| &s.params);
    let values = |name: &str, elements: usize| {
        let key = random::key_of_name(3, name);
        // The values are exact in fp32, because a rank holds fp32.
        (0..elements as u64).map(|i| f64::from(random::normal(key, i) as f32)).collect()
    };
    params.map(|p| (p.name.clone(), values(&p.name, p.global_len()))).collect()
}

fn pass_of(shape: &DecoderShape, params: &BTreeMap<String, Vec<f64>>) -> PassResult {
    let token = |key, i| random::below(key, i, shape.vocab as u64) as f64;
    let tokens: Vec<f64> = (0..shape.tokens() as u64).map(|i| token(1, i)).collect();
    let targets: Vec<f64> = (0..shape.tokens() as u64).map(|i| token(2, i)).collect();
    let param = |name: &str| &params[name][..];
    pass(shape, 1, &PassInputs { tokens: &tokens, targets: &targets, starts: None, param: &param })
}

/// Asserts that each gradient equals a central difference of the loss, within the error of fp32.
fn assert_gradients_are_differences(shape: &DecoderShape, what: &str) {
    const STEP: f64 = 1.0 / 512.0;
    let params = parameters(shape);
    let grads = pass_of(shape, &params).grads;
    assert!(grads.keys().eq(params.keys()), "{what}");
    for (name, of_loss) in &grads {
        let moved = |i: usize, by: f64| {
            let mut params = params.clone();
            params.get_mut(name).unwrap()[i] += by;
            pass_of(shape, &params).loss
        };
        let difference = |i| (moved(i, STEP) - moved(i, -STEP)) / (2.0 * STEP);
        let wanted: Vec<f64> = (0..of_loss.len()).map(difference).collect();
        let error = worst(of_loss, &wanted);
        assert!(error < 2e-3, "{what}: {name} is {error} off: {of_loss:?}, not {wanted:?}");
    }
}

#[test]
fn one_column_of_a_matrix_trains_as_many_do() {
    let llama = "model.family=Llama";
    let [hidden, ffn] = ["model.hidden=1", "model.ffn_hidden=1"];
    let models: [&[&str]; 9] = [
        &[ffn],
        &[hidden],
        &[hidden, ffn],
        &["model.hidden=2", "model.heads=2"],
        &["model.hidden=4", "model.heads=4", "model.ffn_hidden=4", "model.vocab=2"],
        &[llama, ffn],
        &[llama, hidden, "model.head_dim=2", "model.qkv_bias=true", "model.qk_norm=true"],
        &[llama, hidden, "model.head_dim=2", "model.heads=4", "model.kv_heads=1"],
        &[llama, "model.hidden=4", "model.heads=2", "model.ffn_hidden=4", "model.tied=true"],
    ];
    let mut cuts = 0;
    for sets in models {
        let shape = model(sets, 1).unwrap_or_else(|| panic!("{sets:?}"));
        assert_gradients_are_differences(&shape, &format!("{sets:?}"));
        let params = parameters(&shape);
        let one = pass_of(&shape, &params);
        for cut in [2, 4].into_iter().filter_map(|tensor| model(sets, tensor)) {
            cuts += 1;
            let many = pass_of(&cut, &params);
            let what = format!("{sets:?} on {} ranks", cut.tp_size);
            assert!(worst(&many.logits, &one.logits) < 1e-5, "{what}");
            for (name, grad) in &one.grads {
                let error = worst(&many.grads[name], grad);
                assert!(error < 1e-5, "{what}: {name} is {error} off");
            }
        }
    }
    assert!(cuts >= 5, "{cuts}");
}

/// Config keys and their values. A model has one value of each key, or no key if it is empty.
const KEYS: [(&str, &[&str]); 28] = [
    ("model.family", &["Gpt2", "Llama"]),
    ("model.layers", &["1", "2"]),
    ("model.hidden", &["1", "2", "3", "4"]),
    ("model.heads", &["1", "2", "3", "4"]),
    ("model.kv_heads", &["", "", "1", "2"]),
    ("model.head_dim", &["", "", "2", "4"]),
    ("model.seq_len", &["1", "2", "3", "4"]),
    ("model.vocab", &["2", "3", "4"]),
    ("model.ffn_hidden", &["1", "2", "3", "4"]),
    ("model.tied", &["", "", "true"]),
    ("model.qkv_bias", &["", "", "true"]),
    ("model.qk_norm", &["", "", "true"]),
    ("model.dropout", &["", "0.2"]),
    ("parallel.tensor", &["1", "2", "4"]),
    ("parallel.data", &["1", "2"]),
    ("parallel.sequence", &["", "true"]),
    ("parallel.reduce_fp32", &["", "true"]),
    ("batch.micro", &["1", "2"]),
    ("precision", &["Fp32", "Fp16", "Bf16"]),
    ("recompute", &["None", "Selective", "Block"]),
    ("partition_checkpoints", &["", "", "true"]),
    ("host_checkpoints", &["", "", "true"]),
    ("offload.optimizer", &["Host", "Device", "Split(device_fraction: 0.5)"]),
    ("offload.parameters", &["", "", "", "Host"]),
    ("offload.update", &["", "", "Speculative", "Delayed(after_step: 0)"]),
    ("offload.master", &["", "", "", "Split"]),
    ("optimizer.kind", &["AdamW", "Sgd"]),
    ("activations", &["", "", "Tiers(gpu_blocks: 1)", "Tiers(host_blocks: 1)"]),
];

/// Random config from the numbers of `key`, and its settings; `None` if the config is refused.
fn picked(key: u64) -> Option<(Config, Vec<String>)> {
    let pick = |(index, (key_name, values)): (usize, &(&str, &[&str]))| {
        let value = values[random::below(key, index as u64, values.len() as u64) as usize];
        (!value.is_empty()).then(|| format!("{key_name}={value}"))
    };
    let mut sets: Vec<String> = KEYS.iter().enumerate().filter_map(pick).collect();
    let number = |name: &str| {
        let of = sets.iter().find_map(|set| set.strip_prefix(name)?.parse::<usize>().ok());
        of.unwrap_or(1)
    };
    let count = number("parallel.tensor=") * number("parallel.data=");
    sets.push(format!("device.count={count}"));
    Some((load(&sets)?, sets))
}

/// Data set with the tokens of the smallest vocabulary.
fn tokens(seq_len: usize) -> Arc<Dataset> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tokens.bin");
    let tokens: Vec<u8> =
        (0..400u32).flat_map(|i| ((i * i % 7 % 2) as u16).to_le_bytes()).collect();
    std::fs::write(&file, tokens).unwrap();
    let path = file.to_str().unwrap();
    let corpus = Corpus::open(path, None, DataFormat::U16, 0.1, 2, seq_len);
    Arc::new(corpus.unwrap_or_else(|e| panic!("{e}")).into())
}

#[test]
fn what_config_check_takes_is_planned_and_trained_however_narrow() {
    const WANTED: usize = 100;
    let data: Vec<Arc<Dataset>> = (1..=4).map(tokens).collect();
    let mut narrow = 0;
    for (config, sets) in (0..).filter_map(|i| picked(random::key(11, i))).take(WANTED) {
        let built = lay_out(&config);
        let planned = predict::plan::report(&config, &built);
        planned.unwrap_or_else(|e| panic!("plan of {sets:?}: {e}"));
        let data = &data[config.model.seq_len - 1];
        let ran = try_run_on(data, &config, &built, &RunOptions::default());
        let ran = ran.unwrap_or_else(|e| panic!("{sets:?}: {e}"));
        assert_eq!(ran.steps.len(), 2, "{sets:?}");
        assert!(ran.steps.iter().all(|step| step.loss.is_finite()), "{sets:?}");
        let tensor = config.parallel.tensor;
        narrow += usize::from(config.model.hidden == 1 || config.model.ffn_hidden == tensor);
    }
    assert!(narrow > WANTED / 5, "{narrow}");
}
