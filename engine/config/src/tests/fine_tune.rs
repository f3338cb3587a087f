//! Defaults of pretrained weights.

use super::*;

/// Loads a config of a folder of transformers with `sets`.
fn tuned(sets: &[&str]) -> LoadedConfig {
    tuned_for("steps: 1000", sets)
}

/// As [`tuned`], with another length of the run.
fn tuned_for(length: &str, sets: &[&str]) -> LoadedConfig {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/hf-chat-tiny");
    let text = format!(
        "(model: (from: {:?}, seq_len: 64), data: (train: \"c.jsonl\", format: Chat), train: ({length}))",
        folder.display().to_string()
    );
    loaded(&text, sets).unwrap_or_else(|error| panic!("{error}"))
}

/// How a key got its value from other keys.
fn reason(loaded: &LoadedConfig, key: &str) -> String {
    match &loaded.origins.iter().find(|(name, ..)| name == key).unwrap().2 {
        Origin::Derived(how) => how.clone(),
        other => panic!("{key}: {other:?}"),
    }
}

#[test]
fn a_schedule_of_epochs_says_that_its_steps_are_a_stand_in() {
    let loaded = tuned_for("epochs: 3", &[]);
    for key in ["train.steps", "schedule.decay_steps", "schedule.warmup_steps"] {
        assert!(reason(&loaded, key).contains("a stand-in"), "{key}: {}", reason(&loaded, key));
    }
}

/// transformers' Trainer 5: `learning_rate` 5e-5, `adam_beta2` 0.999, `weight_decay` 0 and 8 samples;
/// TRL and axolotl: 2e-5. The recipes of Alpaca, Tulu 3 and SmolLM3 have a warm-up of 3 %.
#[test]
fn pretrained_weights_have_the_defaults_of_a_full_fine_tune() {
    let loaded = tuned(&[]);
    let Config { optimizer, schedule, batch, .. } = &loaded.config;
    assert_eq!((optimizer.lr, optimizer.beta1, optimizer.beta2), (5e-5, 0.9, 0.999));
    assert_eq!((optimizer.weight_decay, schedule.warmup_steps), (0.0, 30));
    assert_eq!((batch.micro, batch.global, schedule.min_lr), (1, 8, 5e-6));
    let reason = |key: &str| reason(&loaded, key);
    for key in ["optimizer.lr", "optimizer.beta2", "optimizer.weight_decay"] {
        assert_eq!(reason(key), "default of pretrained weights");
    }
    assert_eq!(
        reason("schedule.warmup_steps"),
        "3 % of decay_steps: default of pretrained weights"
    );
    assert!(reason("batch.global").ends_with("default of pretrained weights"));
    // A model of two billion parameters, of which the folder has the shape alone.
    let folder = tempfile::tempdir().unwrap();
    let large = r#"{"model_type": "llama", "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 24, "num_attention_heads": 16, "max_position_embeddings": 2048}"#;
    std::fs::write(folder.path().join("config.json"), large).unwrap();
    let from = format!("model.from={:?}", folder.path().display().to_string());
    let sets = [&from, "data.tokenizer=\"t.json\""];
    assert_eq!(tuned(&sets).config.optimizer.lr, 2e-5);
}

#[test]
fn random_weights_and_stored_configs_keep_the_defaults_of_training() {
    let plain = config(LEAST, &[]);
    let random = tuned(&["model.weights=Random"]).config;
    assert_eq!((random.optimizer, random.batch), (plain.optimizer.clone(), plain.batch.clone()));
    assert_eq!(random.schedule.warmup_steps, 0);
    // A run that goes on from its own config, and a stored config without the keys.
    let run = tuned(&[]).config;
    assert_eq!(config(&run.to_ron(), &["train.steps=2000"]).schedule, run.schedule);
    let old = "(model: (from: \"/gone\", layers: 2, hidden: 32, heads: 4, seq_len: 16), train: (steps: 10))";
    let stored = load_stored(old, &[]).unwrap().config;
    assert_eq!((stored.optimizer, stored.batch), (plain.optimizer, plain.batch));
    assert_eq!(stored.schedule.warmup_steps, 0);
}

#[test]
fn the_defaults_fit_every_layout_and_length() {
    for (sets, global) in [
        (&["batch.micro=3"][..], 9),
        (&["parallel.data=2", "batch.micro=2"], 8),
        (&["parallel.data=16"], 16),
        (&["batch.micro=12"], 12),
        (&["batch.global=5"], 5),
    ] {
        assert_eq!(tuned(sets).config.batch.global, global, "{sets:?}");
    }
    for (sets, warmup) in [
        (&["train.steps=1"][..], 1),
        (&["train.steps=34"], 2),
        (&["schedule.decay_steps=20"], 1),
        (&["schedule.warmup_steps=0"], 0),
        (&["train.steps=1000000000000"], 30_000_000_000),
    ] {
        let tokens = ["batch.global=1", "model.seq_len=1"];
        let sets = [sets, &tokens].concat();
        assert_eq!(tuned(&sets).config.schedule.warmup_steps, warmup, "{sets:?}");
    }
}

#[test]
fn a_warning_of_an_unusual_rate_has_the_usual_range() {
    let warning = |sets: &[&str]| tuned(sets).config.unusual_rate();
    for usual in
        ["optimizer.lr=1e-6", "optimizer.lr=1e-4", "model.weights=Random", "optimizer.kind=Sgd"]
    {
        assert_eq!(warning(&[usual]), None, "{usual}");
    }
    assert_eq!(warning(&["optimizer.lr=6e-4", "model.weights=Random"]), None);
    for (set, expected) in
        [("optimizer.lr=6e-4", "can destroy"), ("optimizer.lr=1e-8", "hardly change")]
    {
        let warning = warning(&[set]).unwrap();
        assert!(
            warning.contains(expected) && warning.contains("usually take 1e-6 to 1e-4"),
            "{warning}"
        );
    }
}

#[test]
fn a_warning_of_few_steps_names_the_samples_of_a_step() {
    let warning = |sets: &[&str], steps| tuned(sets).config.few_steps(54, steps);
    let large = ["batch.global=64", "train.steps=1"];
    let said = warning(&large, 1).unwrap();
    for words in ["only 1 step:", "takes 64 samples", "an epoch has 54", "without the key it is 8"]
    {
        assert!(said.contains(words), "{words}: {said}");
    }
    // Enough steps, the default, or random weights.
    assert_eq!(warning(&large, 10), None);
    assert_eq!(warning(&["batch.global=8"], 1), None);
    assert_eq!(warning(&["batch.micro=12"], 1), None);
    assert_eq!(warning(&["batch.global=64", "model.weights=Random"], 1), None);
}
