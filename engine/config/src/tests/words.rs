//! Words of other tools in a config, and names of values in other spellings.

use super::*;

#[test]
fn names_of_values_may_be_in_any_case_and_have_dashes() {
    let sets = [
        "precision=fp16",
        "schedule.kind=inverse-sqrt",
        "optimizer.kind=ADAMW",
        "offload.update=delayed(after_step: 4)",
        "data.validation=None",
        "optimizer.clip=none",
        "offload.speculated_fraction=auto",
        "recompute=none",
    ];
    let loaded = loaded(LEAST, &sets).unwrap();
    let config = &loaded.config;
    assert_eq!((config.precision, config.recompute), (Precision::Fp16, Recompute::None));
    assert_eq!(config.schedule.kind, ScheduleKind::InverseSqrt);
    assert_eq!(config.offload.update, UpdateMode::Delayed { after_step: 4 });
    assert_eq!(config.optimizer.clip, None);
    // `config show` and the config of a run have the names as the documents write them.
    let shown = |key: &str| &loaded.origins.iter().find(|(name, ..)| name == key).unwrap().1;
    assert_eq!([shown("precision"), shown("schedule.kind")], ["Fp16", "InverseSqrt"]);
    assert!(config.to_ron().contains("precision: Fp16"));
    let text = LEAST.replace("(model", "(precision: bf16, schedule: (kind: inverse_sqrt), model");
    assert_eq!(super::config(&text, &[]).schedule.kind, ScheduleKind::InverseSqrt);
    let text = LEAST.replace("(model", "(offload: (update: delayed(after_step: 1)), model");
    let set = ["offload.update.after_step=9"];
    assert_eq!(super::config(&text, &set).offload.update, UpdateMode::Delayed { after_step: 9 });
}

#[test]
fn a_set_of_any_key_with_a_text_needs_no_quotes() {
    let mut texts = 0;
    let in_quotes = keys().into_iter().filter(|key| key.values.contains("in quotes"));
    let columns = ChatColumns::keys().map(|column| format!("data.columns.{column}"));
    for key in in_quotes.map(|key| key.name).chain(columns) {
        let set = format!("{key}=some/text@v-1.json");
        let why = loaded(LEAST, &[&set]).err().map_or(String::new(), |why| why.to_string());
        assert!(!why.contains("RON") && !why.contains("quotes"), "{set}: {why}");
        texts += 1;
    }
    assert!(texts > 8, "{texts} keys");
    let loaded = loaded(LEAST, &["model.from=None", "data.tokenizer=none"]).unwrap();
    assert_eq!((loaded.config.model.from, loaded.config.data.tokenizer), (None, None));
}

#[test]
fn a_name_in_quotes_is_refused_with_its_spelling_here() {
    let why = loaded(LEAST, &["precision=\"bf16\""]).unwrap_err().to_string();
    assert!(why.contains("write `Bf16` without the quotes"), "{why}");
}

#[test]
fn keys_of_other_tools_are_answered_in_files_sections_and_sets() {
    let in_file = |keys: &str| {
        let text = LEAST.replace("(model", &format!("({keys}, model"));
        loaded(&text, &[]).unwrap_err().to_string()
    };
    for (keys, expected) in [
        (
            "num_train_epochs: 3",
            "help: here it is called `train.epochs`: write `train: (epochs: 3)`",
        ),
        ("bf16: true", "`precision`: `Bf16` is the default; leave the key out"),
        ("base_model: \"Qwen/Qwen3-8B\"", "write `model: (from: \"Qwen/Qwen3-8B\")`"),
        ("zero_optimization: (stage: 3)", "onebox has ZeRO-Offload of its own"),
        ("lora: (r: 8)", "write `adapter: Lora(rank: 16, alpha: 32)`"),
        ("adapter: Lora(r: 8)", "here it is called `rank`"),
        ("adapter: Lora(lora_alpha: 8)", "here it is called `adapter.alpha`"),
        ("adapter: Lora(peft_type: \"LORA\")", "leave it out"),
        ("optimizer: (type: \"AdamW\")", "`optimizer.kind` names an optimizer"),
        ("batch: (gradient_accumulation_steps: 8)", "8 x `batch.micro` x `parallel.data`"),
        (
            "tensor-model-parallel-size: 8",
            "`tensor-model-parallel-size`: here it is called `parallel.tensor`",
        ),
    ] {
        assert!(in_file(keys).contains(expected), "{keys}: {}", in_file(keys));
    }
    for (set, expected) in [
        ("lora_r=8", "here it is called `adapter.rank`"),
        ("pipeline_parallel_size=2", "onebox has no pipeline parallelism"),
        ("pipeline_parallel=2", "onebox has no pipeline parallelism"),
        ("num_epochs=2", "write `--set train.epochs=2`"),
        ("train.warmup_ratio=0.1", "0.1 x `train.steps`"),
        ("base_model=Qwen/Qwen3-8B", "here it is called `model.from`"),
        ("tensor-model-parallel-size=2", "write `--set parallel.tensor=2`"),
        ("model.sequence_len=64", "write `--set model.seq_len=64`"),
    ] {
        let why = loaded(LEAST, &[set]).expect_err(set).to_string();
        assert!(why.contains(expected) && why.contains("unknown key"), "{set}: {why}");
    }
}

#[test]
fn adapters_of_other_tools_and_their_dropout_are_answered() {
    for (set, expected) in [
        ("adapter=qlora", "onebox has no quantized weights"),
        ("adapter=dora", "onebox does not have this adapter"),
        ("adapter=rslora", "rank_stabilized: true"),
        ("adapter=Lora(dropout: 1.0)", "adapter.dropout"),
        ("adapter=Lora(dropout: -0.1)", "adapter.dropout"),
    ] {
        let why = loaded(LEAST, &[set]).expect_err(set).to_string();
        assert!(why.contains(expected), "{set}: {why}");
    }
    loaded(LEAST, &["adapter=Lora(dropout: 0.05)"]).unwrap();
}

#[test]
fn targets_in_any_order_are_one_set_and_a_list_of_all_is_all() {
    let of = |targets: &str| {
        let loaded = loaded(LEAST, &[&format!("adapter=Lora(targets: {targets})")]).unwrap();
        let shown = loaded.origins.iter().find(|(key, ..)| key == "adapter.targets");
        (loaded.config.adapter, shown.unwrap().1.clone())
    };
    let (_, all) = of("All");
    assert_eq!(all, "All");
    assert_eq!(of("[\"c_fc\", \"c_proj\", \"c_attn\"]").1, all);
    assert_eq!(of("[\"c_fc\", \"c_attn\"]"), of("[\"c_attn\", \"c_fc\"]"));
    assert_eq!(of("[\"c_fc\", \"c_attn\"]").1, "[\"c_attn\", \"c_fc\"]", "in one line");
}

#[test]
fn a_file_of_another_tool_is_answered_with_the_keys_here() {
    let yaml = "base_model: Qwen/Qwen3-8B\nsequence_len: 2048\nmicro_batch_size: 2\n";
    let why = load_str(yaml, "a.yml", Path::new("/"), &[]).unwrap_err().to_string();
    assert!(why.contains("this looks like YAML"), "{why}");
    assert!(
        why.contains("`sequence_len` is `model.seq_len`, `micro_batch_size` is `batch.micro`"),
        "{why}"
    );
}

#[test]
fn a_box_gets_no_answers_about_a_config() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("box.ron");
    std::fs::write(&file, "(gpus: 2, gpu_memory: \"8GiB\", node_memory: \"1TiB\", dp: 2)").unwrap();
    let why = load_box(&file).unwrap_err().to_string();
    assert!(why.contains("no key `dp`") && !why.contains("parallel.data"), "{why}");
}
