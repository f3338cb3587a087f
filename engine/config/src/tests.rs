//! Tests of what a config may contain, and that a written config reads back unchanged.

use std::path::{Path, PathBuf};

use super::*;

mod adapters;
mod attention;
mod chats;
mod fine_tune;
mod parts;
mod refusals;
mod robustness;
mod shares;
mod tiers;
mod words;

/// The smallest valid config.
pub(super) const LEAST: &str =
    "(model: (layers: 2, hidden: 32, heads: 4, seq_len: 16), train: (steps: 10))";

/// A config with a value of every shape.
const RICH: &str = r##"#![enable(implicit_some)]
/* a comment /* in a comment */ */
( // and another: ( " ' {
    name: r#"a "quoted" name"#,
    device: Cpu(count: 4, memory: "1.5GiB", threads: Some(2)),
    model: (layers: 0x2, hidden: 1_024, heads: 8, seq_len: 64, vocab: 50257, dropout: 0.1),
    parallel: (tensor: 2, data: 2, sequence: true, reduce_fp32: true, tensor_across_nodes: true,),
    precision: Fp16,
    loss_scale: (initial: 4096, window: 500, hysteresis: 3, floor: 0.5),
    offload: (
        optimizer: Split(device_fraction: 0.25), update: Delayed(after_step: 40),
        transfer: Streamed, accumulate: Host, bucket_elements: 4096, tile_elements: 1024, keep_gradients: true,
        lookahead: 3, sockets: All,
    ),
    optimizer: (kind: Sgd, lr: 1, beta1: 0, beta2: 0.999, eps: 1e-6, weight_decay: 0, clip: None),
    schedule: (kind: Wsd(stable_until: 90), warmup_steps: 5, decay_steps: 300, min_lr: 1e-3),
    batch: (micro: 3, global: 12),
    recompute: Block,
    activations: Tiers(gpu_blocks: 0, host_blocks: 1, gpu_mlps: 2, host_mlps: 0),
    data: (train: "a/*.txt", validation: Some("b.txt"), format: Jsonl(text: "t"), tokenizer: "t.json", control_tokens: Parsed, validation_fraction: 0.25),
    train: (steps: 100, eval_every: 10, eval_batches: 0, patience: 4, tensorboard: true, checkpoint_every: 50, checkpoint_minutes: 2.5, checkpoint_overhead: Some(0.02), checkpoint_writer: Foreground, checkpoint_keep: 3, keep_best: true, weights: Never, stop_after_skipped: 9, verify_every: 7, proof: false, rollbacks: 2, seed: 18446744073709551615),
    sample: (prompt: "tab\t \u{e9} \"q\" \\ \n", tokens: 7, temperature: 0),
)"##;

/// A config with every part that a GPT-2 does not have, and both kinds of layers.
const PARTS: &str = r#"(
    model: (
        family: Llama, layers: 6, hidden: 64, heads: 4, kv_heads: 2, head_dim: 16, seq_len: 128,
        rope: (theta: 1e6, rotated_share: 0.75, scaling: LongRope(
            factor: 2.0, original_seq_len: 64, short_factors: [1.0, 1.5, 2, 2, 2, 2], long_factors: [1, 2, 3, 4, 5, 6],
            attention_factor: 1.25,
        )),
        layer_pattern: "WWF", window: 32,
        experts: (count: 6, per_token: 3, ffn_hidden: 24, normalize: false, shared_hidden: 20, shared_gate: true, dense_layers: [0, 4], balance: Megatron(factor: 0.01)),
        window_rope: (theta: 1e4, rotated_share: 1.0, scaling: Yarn(factor: 4.0, original_seq_len: 32, beta_fast: 16, truncate: false)),
        qk_norm: true, norm_offset: true, norm_place: Around, gate: Gelu,
        attention_scale: 0.5, score_cap: 50, logit_cap: 30.0, embedding_scale: 8.0, residual_scale: 0.22, logit_scale: 0.0625,
    ),
    train: (steps: 10),
)"#;

pub(super) fn loaded(text: &str, sets: &[&str]) -> Result<LoadedConfig, ConfigError> {
    let sets: Vec<String> = sets.iter().map(|set| (*set).to_string()).collect();
    load_str(text, "dir/test.ron", Path::new("/base"), &sets)
}

pub(super) fn config(text: &str, sets: &[&str]) -> Config {
    loaded(text, sets).unwrap_or_else(|error| panic!("{error}")).config
}

/// Folder `configs/` of the repository; `ONEBOX_CONFIGS` names it elsewhere.
fn shipped_folder() -> PathBuf {
    let of_repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs");
    let named = std::env::var_os("ONEBOX_CONFIGS").map(PathBuf::from);
    if of_repository.is_dir() { of_repository } else { named.expect("the folder of the configs") }
}

fn ron_files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> =
        entries.filter(|path| path.extension().is_some_and(|ext| ext == "ron")).collect();
    files.sort();
    files
}

#[test]
fn every_shipped_config_loads_and_round_trips() {
    let folder = shipped_folder();
    let files = [ron_files(&folder), ron_files(&folder.join("paper"))].concat();
    assert!(files.len() >= 17, "{files:?}");
    for file in files {
        let loaded = load(&file, &[]).unwrap_or_else(|error| panic!("{error}"));
        let again = load_str(&loaded.config.to_ron(), "other.ron", Path::new("/elsewhere"), &[])
            .unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(again.config, loaded.config, "{}", file.display());
        assert_eq!(loaded.config.name, file.file_stem().unwrap().to_string_lossy());
        let not_built = loaded.config.not_built(&loaded.origins, || None);
        // A described box holds no data.
        assert!(not_built.is_none_or(|e| e.errors().iter().all(|p| p.key == "device")));
        let top = std::fs::read_to_string(&file).unwrap();
        assert!(top.starts_with("// ") && top.contains("\n//     onebox "), "{}", file.display());
    }
    for file in ron_files(&folder.join("boxes")) {
        load_box(&file).unwrap_or_else(|error| panic!("{error}"));
    }
}

#[test]
fn the_least_config_has_the_documented_defaults() {
    let config = config(LEAST, &[]);
    assert_eq!(config.name, "test");
    assert_eq!(config.device, DeviceConfig::Cpu { count: 1, memory: 2 << 30, threads: None });
    assert_eq!((config.model.vocab, config.model.ffn_hidden), (256, 128));
    assert_eq!((config.optimizer.lr, config.schedule.min_lr), (6e-4, 6e-5));
    assert_eq!((config.schedule.decay_steps, config.optimizer.clip), (10, Some(1.0)));
    assert_eq!((config.batch.micro, config.batch.global), (1, 1));
    assert!(config.data.train.is_empty() && config.data.validation.is_empty());
    assert_eq!((config.train.seed, config.train.eval_batches), (1337, None));
    assert!(config.train.proof);
    assert_eq!(config.precision, Precision::Bf16);
    assert_eq!(config.offload.update, UpdateMode::Overlapped);
}

#[test]
fn checkpoints_come_by_their_cost_where_nothing_is_said_of_them() {
    let overhead = |sets: &[&str]| config(LEAST, sets).train.checkpoint_overhead;
    assert_eq!(overhead(&[]), Some(0.01));
    assert!(config(LEAST, &[]).train.saves());
    assert_eq!(overhead(&["train.checkpoint_every=5"]), None);
    assert_eq!(overhead(&["train.checkpoint_minutes=5"]), None);
    assert_eq!(overhead(&["train.checkpoint_every=5", "train.checkpoint_overhead=0.5"]), Some(0.5));
    let none = config(LEAST, &["train.checkpoint_overhead=None"]);
    assert!(none.train.checkpoint_overhead.is_none() && !none.train.saves());
}

#[test]
fn a_stable_schedule_decays_over_its_last_tenth() {
    let kind = |sets: &[&str]| config(LEAST, sets).schedule.kind;
    assert_eq!(kind(&["schedule.kind=Wsd"]), ScheduleKind::Wsd { stable_until: 9 });
    let longer = ["schedule.kind=Wsd", "schedule.decay_steps=2000"];
    assert_eq!(kind(&longer), ScheduleKind::Wsd { stable_until: 1800 });
    // The warm-up ends after the default of `stable_until`.
    for warmup in [9, 10] {
        let steps = format!("schedule.warmup_steps={warmup}");
        assert_eq!(
            kind(&["schedule.kind=Wsd", &steps]),
            ScheduleKind::Wsd { stable_until: warmup }
        );
    }
    let set = ["schedule.kind=Wsd", "schedule.kind.stable_until=3"];
    assert_eq!(kind(&set), ScheduleKind::Wsd { stable_until: 3 });
}

/// As in `offload`: `hysteresis` - 1 overflows change nothing, and each further one halves the
/// scale.
#[test]
fn a_run_ends_some_steps_after_its_loss_scale_can_fall_no_further() {
    for hysteresis in [1, 2, 5] {
        let set = format!("loss_scale.hysteresis={hysteresis}");
        let falling = (1..).find(|overflow| 24 - (overflow - (hysteresis - 1)).max(0) == 0);
        let stop = config(LEAST, &[&set]).train.stop_after_skipped;
        assert_eq!(stop, falling.unwrap() as u64 + 28, "{hysteresis}");
    }
}

#[test]
fn derived_values_follow_their_sources() {
    let sets = ["parallel=(tensor: 2, data: 4)", "batch.micro=3", "optimizer.lr=0.5"];
    let loaded = loaded(LEAST, &sets).unwrap();
    let config = &loaded.config;
    assert_eq!(config.batch.global, 12);
    assert!(matches!(config.device, DeviceConfig::Cpu { count: 8, .. }));
    assert_eq!(config.schedule.min_lr, 0.05);
    let origin = |key: &str| loaded.origins.iter().find(|(name, ..)| name == key).unwrap();
    assert_eq!(origin("batch.global").2, Origin::Derived("micro x data".into()));
    assert_eq!(origin("device.count").1, "8");
    assert_eq!(origin("optimizer.lr").2, Origin::Set);
    assert_eq!(origin("model.layers").2, Origin::File { line: 1 });
    assert_eq!(origin("sample.prompt").1, r#""\n""#);
    assert_eq!(origin("sample.prompt").2, Origin::Default);
}

#[test]
fn a_config_of_every_shape_is_read_and_round_trips() {
    let config = config(RICH, &[]);
    assert_eq!(config.name, "a \"quoted\" name");
    let DeviceConfig::Cpu { count, memory, threads } = config.device else { panic!() };
    assert_eq!((count, memory, threads), (4, 3 << 29, Some(2)));
    assert_eq!((config.model.layers, config.model.hidden), (2, 1024));
    assert_eq!(config.offload.optimizer, Placement::Split { device_fraction: 0.25 });
    assert_eq!(config.offload.update, UpdateMode::Delayed { after_step: 40 });
    let kept = [config.activations.attention(), config.activations.mlp()];
    assert_eq!(kept, [KeptBlocks { gpu: 0, host: 1 }, KeptBlocks { gpu: 2, host: 0 }]);
    assert_eq!((config.optimizer.lr, config.optimizer.clip), (1.0, None));
    assert_eq!(config.data.train, Sources::one("/base/a/*.txt".into()));
    assert_eq!(config.data.validation, Sources::one("/base/b.txt".into()));
    assert_eq!(config.train.seed, u64::MAX);
    assert_eq!(config.sample.prompt, "tab\t é \"q\" \\ \n");
    let text = config.to_ron();
    assert_eq!(tests::config(&text, &[]), config, "{text}");
    // Settings that exclude settings of `RICH`.
    let sets = ["recompute=Block", "partition_checkpoints=true", "host_checkpoints=true"];
    let more = ["offload.transfer=Blocking", "offload.update=Serial"];
    let libraries = ["attention=Cudnn", "matmuls=Timed"];
    let sets = [&sets[..], &more, &libraries].concat();
    let other = tests::config(LEAST, &sets);
    assert!(other.partition_checkpoints && other.host_checkpoints);
    assert!(other.offload.transfer == Transfer::Blocking);
    assert!(other.attention == Attention::Cudnn && other.matmuls == Matmuls::Timed);
    assert_eq!(tests::config(&other.to_ron(), &[]), other);
}

#[test]
fn origins_name_every_key_of_the_written_config_in_its_order() {
    for text in [LEAST, RICH, PARTS] {
        let loaded = loaded(text, &["data.train=x"]).unwrap();
        let written = loaded_keys(&loaded.config.to_ron());
        let origins: Vec<String> = loaded.origins.iter().map(|(key, ..)| key.clone()).collect();
        assert_eq!(origins, written);
        let sets: Vec<String> =
            loaded.origins.iter().map(|(key, value, _)| format!("{key}={value}")).collect();
        let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
        assert_eq!(config("()", &sets), loaded.config, "origins can be set again");
    }
}

/// Every dotted key of a text, without sections.
fn loaded_keys(text: &str) -> Vec<String> {
    fn walk(node: &reading::tree::Node, path: &str, keys: &mut Vec<String>) {
        if !node.is_group() {
            keys.push(path.to_string());
        }
        if let reading::tree::NodeKind::Struct { fields, .. } = &node.kind {
            fields.iter().for_each(|f| walk(&f.value, &reading::tree::join(path, &f.key), keys));
        }
    }
    let kind = reading::SourceKind::Set;
    let source = reading::ConfigSource { kind, name: String::new(), text: text.into() };
    let mut keys = Vec::new();
    walk(&reading::tree::parse(&source, 0, 0).unwrap(), "", &mut keys);
    keys
}

#[test]
fn a_byte_order_mark_and_windows_lines_are_read() {
    let text = format!("\u{FEFF}{}", LEAST.replace(", ", ",\r\n"));
    assert_eq!(config(&text, &[]), config(LEAST, &[]));
}

#[test]
fn set_wins_over_the_file_and_the_last_set_wins() {
    let sets = ["train.steps=20", " model.layers = 3 ", "train.steps=30"];
    let config = config(LEAST, &sets);
    assert_eq!((config.train.steps, config.model.layers), (30, 3));
    // A value that `--set` replaces may be invalid.
    let wrong = LEAST.replace("steps: 10", "steps: \"x\"");
    assert_eq!(tests::config(&wrong, &["train.steps=5"]).train.steps, 5);
}

#[test]
fn set_takes_texts_without_quotes() {
    let here = std::env::current_dir().unwrap();
    for (value, path) in [
        ("text", "text"),
        ("a b/*.txt", "a b/*.txt"),
        ("\"quoted.txt\"", "quoted.txt"),
        ("(odd", "(odd"),
        ("None", "None"),
        ("x=y", "x=y"),
    ] {
        let config = config(LEAST, &[&format!("data.train={value}")]);
        assert_eq!(config.data.train, Sources::one(here.join(path).to_str().unwrap().into()));
    }
    let config = config(RICH, &["data.validation=None", "name=2024", "device.memory=3MiB"]);
    assert_eq!((config.data.validation, config.name.as_str()), (Sources::default(), "2024"));
    assert!(matches!(config.device, DeviceConfig::Cpu { memory: 3_145_728, count: 4, .. }));
    let config = tests::config(LEAST, &["data.validation=/abs/v.txt"]);
    assert_eq!(config.data.validation, Sources::one("/abs/v.txt".into()));
}

#[test]
fn data_sets_are_a_path_or_a_list_and_come_back() {
    let list = "data: (train: [(path: \"a\", weight: 0.75), (path: \"/b\", name: \"code\")],
        validation: [(name: \"x\", path: \"v*.txt\"), (path: \"w\")])";
    let text = LEAST.replace("train: (steps", &format!("{list}, train: (steps"));
    let config = config(&text, &[]);
    let of = |sources: &Sources| -> Vec<(Option<String>, String, f32)> {
        sources.0.iter().map(|s| (s.name.clone(), s.path.clone(), s.weight)).collect()
    };
    let path = |name: &str| format!("/base/{name}");
    let train = [(None, path("a"), 0.75), (Some("code".into()), "/b".into(), 1.0)];
    assert_eq!(of(&config.data.train), train);
    let validation = [(Some("x".into()), path("v*.txt"), 1.0), (None, path("w"), 1.0)];
    assert_eq!(of(&config.data.validation), validation);
    let again = tests::config(&config.to_ron(), &[]);
    assert_eq!(again.data, config.data);
    // A single data set has all samples, with any weight.
    let one = tests::config(LEAST, &["data.train=[(path: \"/a\", weight: 0.1)]"]);
    assert_eq!(one.data.train, Sources::one("/a".into()));
    for (set, expected) in [
        ("data.train=[]", "expected 1 to 256 data sets, found 0"),
        ("data.train=[\"a\"]", "expected `(path: ..)` in a list, found the string \"a\""),
        ("data.train=[(weight: 1)]", "an entry has no `path`"),
        ("data.train=[(path: \"a\", weight: 0)]", "its `weight` must be a number above 0"),
        ("data.train=[(path: \"a\", share: 1)]", "an entry has no key \"share\""),
        ("data.train=[(path: \"\")]", "expected a path"),
        ("data.validation=[(path: \"a\", weight: 1)]", "it has `name` and `path`"),
        (
            "data.validation=[(name: \"a\", path: \"b\"), (name: \"a\", path: \"c\")]",
            "two data sets are called \"a\"",
        ),
        ("data.validation=[(name: \"\", path: \"b\")]", "is no name of 1 to 64 bytes"),
    ] {
        let error = loaded(LEAST, &[set]).expect_err(set).to_string();
        assert!(error.contains(expected), "{set}: {error}");
    }
}

#[test]
fn set_merges_groups_and_replaces_variants() {
    let update = config(RICH, &["offload=(update: Serial)"]).offload;
    assert_eq!((update.update, update.lookahead), (UpdateMode::Serial, 3));
    let device = config(RICH, &["device=Cpu(count: 4)"]).device;
    assert_eq!(device, DeviceConfig::Cpu { count: 4, memory: 2 << 30, threads: None });
    let sets = ["device.count=2", "parallel.data=1", "batch.global=3"];
    assert!(matches!(config(RICH, &sets).device, DeviceConfig::Cpu { count: 2, .. }));
    assert!(matches!(
        config(LEAST, &["device.threads=3"]).device,
        DeviceConfig::Cpu { count: 1, threads: Some(3), .. }
    ));
    let late = ["offload.update=Delayed(after_step: 1)", "offload.update.after_step=9"];
    assert_eq!(config(LEAST, &late).offload.update, UpdateMode::Delayed { after_step: 9 });
    assert_eq!(config(RICH, &["device=Cuda"]).device, DeviceConfig::Cuda);
}

#[test]
fn a_box_is_read_relative_to_the_config() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("boxes")).unwrap();
    let box_text = "(gpus: 2, gpu_memory: \"8GiB\", node_memory: \"1TiB\")";
    std::fs::write(folder.path().join("boxes/my.ron"), box_text).unwrap();
    let text = LEAST.replace("(model", "(device: Sim(box: \"boxes/my.ron\"), model");
    std::fs::write(folder.path().join("a.ron"), &text).unwrap();
    let config = load(&folder.path().join("a.ron"), &[]).unwrap().config;
    let DeviceConfig::Sim { box_, path, expert_load } = &config.device else { panic!() };
    assert_eq!(*expert_load, LoadDistribution::Even);
    assert_eq!((box_.name.as_str(), box_.gpus, box_.numa_nodes), ("my", 2, 1));
    assert_eq!(*path, folder.path().join("boxes/my.ron"));
    assert_eq!(tests::config(&config.to_ron(), &[]), config);
    let skewed = load(&folder.path().join("a.ron"), &["device.expert_load=Skewed".into()]);
    let skewed = skewed.unwrap().config;
    let is_skewed = |device: &DeviceConfig| {
        matches!(device, DeviceConfig::Sim { expert_load: LoadDistribution::Skewed, .. })
    };
    assert!(is_skewed(&skewed.device) && !is_skewed(&config.device));
    assert_eq!(tests::config(&skewed.to_ron(), &[]), skewed);
}

#[test]
fn every_update_mode_and_placement_is_built() {
    let split = ["offload.optimizer=Split(device_fraction: 0.5)"];
    let loaded = loaded(RICH, &split).unwrap();
    assert_eq!(loaded.config.not_built(&loaded.origins, || None).map(|e| e.to_string()), None);
}

/// Sets each key of the list to its default, and compares the names with those of the keys that
/// were read.
#[test]
fn every_key_is_listed_once_with_its_default() {
    let all = keys();
    let names: Vec<&str> = all.iter().map(|key| &*key.name).collect();
    for (name, ..) in loaded(RICH, &[]).unwrap().origins {
        assert_eq!(names.iter().filter(|listed| **listed == name).count(), 1, "{name}");
    }
    let least = loaded(LEAST, &[]).unwrap();
    // A model without experts or gated delta nets has no keys of them.
    let of_parts = ["model.experts.", "model.delta_net."];
    let is_read = |key: &&Key| !of_parts.iter().any(|part| key.name.starts_with(part));
    let read = all.iter().filter(|key| !key.is_section() && key.of.is_none());
    for key in read.filter(is_read) {
        let origin = least.origins.iter().find(|(name, ..)| *name == key.name);
        let (_, value, origin) = origin.unwrap_or_else(|| panic!("{} is not read", key.name));
        match (&key.default, origin) {
            (Some(how), Origin::Derived(derived)) => assert_eq!(how, derived, "{}", key.name),
            (Some(default), _) => {
                assert_eq!(default, value, "{}", key.name);
                // An empty `data.train` is no path, so `--set` refuses it.
                let set = format!("{}={default}", key.name);
                let unset = key.name == "data.train";
                assert!(unset || config(LEAST, &[&set]) == least.config, "{set}");
            }
            (None, origin) => assert!(matches!(origin, Origin::File { .. }), "{}", key.name),
        }
    }
    for key in all.iter().chain(&box_keys()) {
        let plain = key.doc.ends_with('.') && key.doc.starts_with(|c: char| !c.is_lowercase());
        assert!(plain && !key.values.is_empty(), "{key:?}");
    }
    let of = |name: &str| all.iter().find(|key| key.name == name).and_then(|key| key.of);
    assert_eq!((of("device.count"), of("device.box")), (Some("Cpu"), Some("Sim")));
    assert_eq!(of("offload.update.after_step"), Some("Delayed"));
    assert!(box_keys().iter().any(|key| key.name == "gpu.gemm_tflops"));
}
