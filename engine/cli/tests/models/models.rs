//! `onebox plan --model`, and configs that name a folder of transformers.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use crate::common::Folder;
use serde_json::{Value, json};

/// The `config.json` of a Qwen3 with 14.8 billion parameters.
fn qwen3() -> Value {
    json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": false, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 17408, "max_position_embeddings": 40960,
        "max_window_layers": 40, "num_attention_heads": 40, "num_hidden_layers": 40, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6, "rope_scaling": null, "rope_theta": 1_000_000, "sliding_window": null,
        "tie_word_embeddings": false, "use_sliding_window": false, "vocab_size": 151_936, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": true, "eos_token_id": 151_645
    })
}

fn with(folder: &Folder, change: impl FnOnce(&mut Value)) {
    let mut config = qwen3();
    change(&mut config);
    std::fs::create_dir_all(folder.path("Qwen3")).unwrap();
    std::fs::write(folder.path("Qwen3/config.json"), config.to_string()).unwrap();
}

/// Path of a bundled box.
fn bundled(name: &str) -> String {
    format!("{}/../../configs/boxes/{name}.ron", env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn a_model_is_planned_from_its_config_json_alone() {
    let folder = Folder::new();
    with(&folder, |_| ());
    let on = bundled("h100-128gib");
    let output = folder.onebox(&["plan", "--model", "Qwen3", "--box", &on]);
    assert_eq!(output.code, 1, "{}", output.stderr);
    for text in [
        "Qwen3: Llama family, 14.8 B parameters",
        "no: host memory is too small, even with bf16 Adam moments: ",
        "GiB of host memory, and 125.00 GiB are there",
        "GiB of host memory: yes, with bf16 Adam moments, which change results",
    ] {
        assert!(output.stdout.contains(text), "`{text}` is not in:\n{}", output.stdout);
    }
    let on = bundled("dgx-h100");
    let args =
        ["plan", "--model", "Qwen3/config.json", "--box", &on, "--tokens", "1000000000", "--json"];
    let answer: Value = serde_json::from_str(&folder.onebox(&args).ok().stdout).unwrap();
    // Two tables, 40 blocks of q, k, v, o, three linears, four norms, and the last norm.
    let block = 5120 * (128 * (40 + 8 + 8 + 40) + 3 * 17408 + 2) + 2 * 128;
    assert_eq!(answer["parameters"], json!(2u64 * 151_936 * 5120 + 40 * block + 5120));
    assert_eq!(answer["seq_len"], 4096);
    let rate = answer["search"]["layouts"][0]["tokens_per_second"].as_f64().unwrap();
    let seconds = answer["seconds"].as_f64().unwrap();
    assert!((seconds * rate / 1e9 - 1.0).abs() < 1e-6, "{seconds} s at {rate}");
}

#[test]
fn a_model_that_fits_in_groups_of_micro_batches_alone_is_found() {
    let folder = Folder::new();
    with(&folder, |_| ());
    let on = bundled("desktop-4090");
    let args = ["plan", "--model", "Qwen3", "--box", &on, "--json"];
    let answer: Value = serde_json::from_str(&folder.onebox(&args).ok().stdout).unwrap();
    let sets: Vec<&str> =
        answer["sets"].as_array().unwrap().iter().map(|set| set.as_str().unwrap()).collect();
    assert!(sets.iter().any(|set| set.starts_with("offload.first_forward=")), "{sets:?}");
    let config = format!(
        "(model: (from: \"Qwen3\", weights: Random), train: (steps: 9), device: Sim(box: {on:?}))"
    );
    std::fs::write(folder.path("own.ron"), config).unwrap();
    let sets = sets.iter().flat_map(|set| ["--set", set]);
    let own: Vec<&str> = ["plan", "own.ron"].into_iter().chain(sets).collect();
    assert!(folder.onebox(&own).ok().stdout.contains("it fits"));
    // fp32 states fit only with parameters on the host, so bf16 moments are faster.
    let args = ["plan", "--model", "Qwen3", "--box", "h100-256gib", "--json"];
    let answer: Value = serde_json::from_str(&folder.onebox(&args).ok().stdout).unwrap();
    let rate = |of: &Value| of["tokens_per_second"].as_f64().unwrap();
    let (exact, smaller) = (&answer["search"]["layouts"][0], &answer["bf16_moments"]);
    assert!(rate(smaller) > 1.05 * rate(exact), "{answer}");
    let sets = |of: &Value| of["sets"].to_string();
    assert!(!sets(&answer).contains("Bf16") && sets(smaller).contains("offload.moments=Bf16"));
}

#[test]
fn an_answer_for_some_gpus_uses_these() {
    let folder = Folder::new();
    with(&folder, |_| ());
    let on = bundled("dgx-h100");
    let on_gpus = |gpus: &str, more: &[&str]| {
        let args = ["plan", "--model", "Qwen3", "--box", &on, "--gpus", gpus];
        folder.onebox(&[&args[..], more].concat())
    };
    // 6 divides neither 64 samples nor 40 heads.
    let none = on_gpus("6", &[]);
    assert_eq!(none.code, 1, "{}", none.stderr);
    let says = "no: 6 GPUs have no layout of TP x DP: DP divides the batch of 64 samples, and TP the 40 heads; say --gpus 4, or --set \
                batch.global=66";
    assert!(none.stdout.contains(says), "{}", none.stdout);
    assert!(on_gpus("6", &["--set", "batch.global=66"]).ok().stdout.contains("DP 6,"));
    on_gpus("9", &[]).refused(78, &["--gpus 9: the box `DGX H100` has 8 GPUs"]);
}

#[test]
fn the_settings_of_an_answer_give_its_step_with_a_config_of_the_model() {
    let folder = Folder::new();
    let model = "(model: (from: \"Qwen3/config.json\", weights: Random), train: (steps: 1))";
    std::fs::write(folder.path("a.ron"), model).unwrap();
    // Parameters on the GPU with all activations, and parameters on the host.
    let cases: [(i32, &str, &str, &[&str]); 3] = [
        (4, "h100-128gib", "no recomputation", &[]),
        (
            4,
            "h100-128gib",
            "no recomputation",
            &["--set", "precision=Fp8", "--set", "offload.moments=Bf16"],
        ),
        (24, "desktop-4090", "blocks stay on GPU", &[]),
    ];
    for (layers, box_name, chosen, given) in cases {
        with(&folder, |config| config["num_hidden_layers"] = json!(layers));
        let on = bundled(box_name);
        let output = [&["plan", "--model", "Qwen3", "--box", &on], given].concat();
        let output = folder.onebox(&output).ok().stdout;
        assert!(output.contains(chosen), "{output}");
        let after = |text: &str, of: &str| {
            output.split_once(text).unwrap().1.split_once(of).unwrap().0.to_owned()
        };
        let seconds = after("a step in ", ";");
        let line = after("with a config of this model: ", "\n");
        let sets =
            line.split("--set ").skip(1).flat_map(|set| ["--set", set.trim().trim_matches('\'')]);
        let command: Vec<&str> =
            ["simulate", "a.ron", "--box", &on].into_iter().chain(sets).collect();
        let stdout = folder.onebox(&command).ok().stdout;
        assert!(
            stdout.contains(&format!("samples takes {seconds}:")),
            "{seconds}, {line}:\n{stdout}"
        );
    }
}

#[test]
fn what_onebox_does_not_compute_is_refused_with_its_key() {
    let folder = Folder::new();
    let on = bundled("dgx-h100");
    let cases: [(&str, Value, &str); 30] = [
        ("model_type", json!("dbrx"), "`model_type` is \"dbrx\""),
        ("architectures", json!(["Qwen3ForSequenceClassification"]), "only language models"),
        ("hidden_act", json!("gelu"), "gates here are SiLU"),
        ("mlp_bias", json!(true), "have no biases here"),
        ("use_sliding_window", json!("yes"), "not true or false"),
        (
            "layer_types",
            json!(["sliding_attention"]),
            "with 1 layers, and `num_hidden_layers` is 40",
        ),
        (
            "layer_types",
            json!(vec!["sliding_attention"; 40]),
            "layers have sliding_attention, and `use_sliding_window` is not true",
        ),
        (
            "rope_scaling",
            json!({"rope_type": "dynamic", "factor": 4.0}),
            "`rope_type` is \"dynamic\"",
        ),
        ("rope_scaling", json!({"rope_type": "linear"}), "`factor` is missing"),
        (
            "rope_scaling",
            json!({"type": "linear", "rope_type": "llama3", "factor": 2}),
            "`type` is",
        ),
        (
            "rope_scaling",
            json!({"rope_type": "linear", "factor": 2, "mscale": 1}),
            "`mscale` is nothing",
        ),
        (
            "rope_parameters",
            json!({"rope_type": "default", "rope_theta": 5.0}),
            "`rope_theta` is 1000000",
        ),
        ("partial_rotary_factor", json!(0.5), "whole heads are rotated"),
        ("quantization_config", json!({"bits": 4}), "not codes"),
        ("auto_map", json!({"AutoModel": "x.py"}), "not run"),
        ("num_experts", json!(128), "does not know what it changes"),
        ("num_hidden_layers", json!(0), "not from 1 to 10000"),
        ("hidden_size", json!("5120"), "not a whole number"),
        ("vocab_size", Value::Null, "`vocab_size` is missing"),
        ("rms_norm_eps", json!(-1), "not a number from 0"),
        ("num_key_value_heads", json!(0), "`num_key_value_heads` is 0, not from 1 to 65536"),
        (
            "num_key_value_heads",
            json!(7),
            "`num_attention_heads` is 40, not a multiple of `num_key_value_heads`, which is 7",
        ),
        ("num_key_value_heads", json!(80), "not a multiple of `num_key_value_heads`, which is 80"),
        ("head_dim", json!(7), "`head_dim` is 7, an odd number"),
        (
            "pad_token_id",
            json!(151_936),
            "`pad_token_id` is 151936, and `vocab_size` is 151936: write null, or a token from 0 to 151935",
        ),
        ("pad_token_id", json!(-1), "`pad_token_id` is -1"),
        ("eos_token_id", json!([1, 200_000]), "`eos_token_id` is [1,200000]"),
        ("bos_token_id", json!("<s>"), "`bos_token_id` is \"<s>\""),
        ("attention_dropout", json!(0.1), "`attention_dropout` is 0.1, not 0.0 or 0"),
        ("attention_dropout", json!("none"), "`model.dropout`"),
    ];
    for (key, value, message) in cases {
        with(&folder, |config| config[key] = value);
        let done = folder.onebox(&["plan", "--model", "Qwen3", "--box", &on]);
        let remedy = match key {
            "model_type" => "use a model of gpt2, llama, mistral, ministral3, qwen2, qwen3, gemma2",
            "quantization_config" => "as it was before it was quantized",
            _ => "mend the file",
        };
        let done = done.refused(78, &[message, remedy]);
        assert!(!done.stderr.contains('\u{fffd}'), "{}", done.stderr);
        // A generated config is not shown.
        assert!(!done.stderr.contains("weights: Random"), "{}", done.stderr);
    }
    // A correct value is no error, and each wrong key is one error.
    with(&folder, |config| {
        config["attention_dropout"] = json!(0);
        config["eos_token_id"] = json!([151_645, 151_643]);
        config["pad_token_id"] = json!(151_643);
    });
    std::fs::write(folder.path("a.ron"), "(model: (from: \"Qwen3\"), train: (steps: 1))").unwrap();
    folder.onebox(&["config", "show", "a.ron"]).ok();
    with(&folder, |config| {
        config["pad_token_id"] = json!(200_000);
        config["vocab_size"] = json!(7.5);
        config["hidden_act"] = json!("gelu");
    });
    let both = folder.onebox(&["plan", "--model", "Qwen3", "--box", &on]);
    both.refused(78, &["2 errors", "`vocab_size` is 7.5", "gates here are SiLU"]);
    let nowhere = folder.onebox(&["plan", "--model", "nowhere", "--box", &on]);
    nowhere.refused(78, &["nothing is downloaded"]);
}

#[test]
fn keys_beside_a_folder_must_not_contradict_it() {
    let folder = Folder::new();
    with(&folder, |_| ());
    let ron = |more: &str| {
        format!(
            "(model: (from: \"Qwen3\", weights: Random{more}), data: (train: \"x\"), train: (steps: 1))"
        )
    };
    let check = |more: &str| {
        std::fs::write(folder.path("a.ron"), ron(more)).unwrap();
        folder.onebox(&["config", "show", "a.ron"])
    };
    check(", seq_len: 1024, hidden: 5120").ok();
    check(", vocab: 160000").refused(78, &["160000, but the model of", "resize_token_embeddings"]);
    check(", vocab: 40000").refused(78, &["40000, but the model of", "name another folder"]);
    check(", hidden: 4096").refused(78, &["4096, but the model of", "has 5120"]);
    check(", seq_len: 65536").refused(78, &["at most 40960 (max_position_embeddings)"]);
    check(", tied: true").refused(78, &["true, but the model of", "has false"]);
    check(", rope: (theta: 5e5)").refused(78, &["model.rope", "1000000"]);
}

#[test]
fn a_window_that_a_class_has_by_itself_is_a_part_of_the_model() {
    let folder = Folder::new();
    let mistral = |window: Option<Value>, seq_len: &str| {
        with(&folder, |config| {
            config["model_type"] = "mistral".into();
            config["architectures"] = json!(["MistralForCausalLM"]);
            let keys = config.as_object_mut().unwrap();
            for key in
                ["attention_bias", "max_window_layers", "use_sliding_window", "sliding_window"]
            {
                keys.remove(key);
            }
            if let Some(window) = window {
                config["sliding_window"] = window;
            }
        });
        let ron =
            format!("(model: (from: \"Qwen3\", weights: Random{seq_len}), train: (steps: 1))");
        std::fs::write(folder.path("a.ron"), ron).unwrap();
        let shown = folder.onebox(&["config", "show", "a.ron"]).ok().stdout;
        ["model.seq_len", "model.layer_pattern", "model.window"].map(|key| {
            let line = shown.lines().find(|line| line.split_whitespace().next() == Some(key));
            line.unwrap().split_whitespace().nth(1).unwrap().to_owned()
        })
    };
    // Without the key the class has a window of 4096 tokens; with null it has none.
    assert_eq!(mistral(None, ""), ["40960", "\"W\"", "4096"]);
    assert_eq!(mistral(Some(json!(1024)), ""), ["40960", "\"W\"", "1024"]);
    assert_eq!(mistral(Some(Value::Null), ""), ["40960", "\"F\"", "None"]);
    // A window that holds a whole sample is none, as in runs of earlier versions.
    assert_eq!(mistral(None, ", seq_len: 4096"), ["4096", "\"F\"", "None"]);
}

/// Puts the model of a fixture into `chat`, with `a.ron`, which trains it for two steps.
fn with_chat(folder: &Folder) {
    let fixture = format!("{}/../../tests/fixtures/hf-chat-tiny", env!("CARGO_MANIFEST_DIR"));
    folder.shell(&format!("cp -r {fixture} chat && seq 1 3000 > text.txt")).ok();
    let ron = "(model: (from: \"chat\", seq_len: 64), data: (train: \"text.txt\"), device: Cpu(threads: 1),
        schedule: (kind: Constant), train: (steps: 2))";
    std::fs::write(folder.path("a.ron"), ron).unwrap();
}

#[test]
fn a_run_from_a_folder_goes_on_when_the_folder_has_gone() {
    let folder = Folder::new();
    with_chat(&folder);
    folder.onebox(&["train", "a.ron", "-q", "--run-dir", "run"]).ok();
    std::fs::remove_dir_all(folder.path("chat")).unwrap();
    let sets = ["model.from=None", "data.tokenizer=\"run/tokenizer.json\"", "train.steps=3"];
    let sets = sets.iter().flat_map(|set| ["--set", *set]);
    let resume = ["train", "run/config.ron", "-q", "--run-dir", "run", "--resume"];
    let all: Vec<&str> = resume.into_iter().chain(sets).collect();
    let went_on = folder.onebox(&all).ok();
    assert!(went_on.stderr.contains("going on after step 2"), "{}", went_on.stderr);
}

#[test]
fn a_first_start_with_resume_takes_the_weights_too() {
    let folder = Folder::new();
    with_chat(&folder);
    let first = |run: &str, mode: &[&str]| {
        folder.onebox(&[&["train", "a.ron", "-q", "--run-dir", run], mode].concat()).ok();
        folder.metrics(run)[0]["loss"].as_f64().unwrap()
    };
    assert_eq!(first("fresh", &[]), first("resumed", &["--resume"]));
    // A run that ends before its first checkpoint starts again from the folder, or is refused.
    for run in ["fresh", "resumed"] {
        for gone in ["checkpoints", "weights.safetensors", "metrics.jsonl"] {
            folder.shell(&format!("rm -r {run}/{gone}")).ok();
        }
    }
    assert_eq!(first("fresh", &["--resume"]), first("second", &[]));
    let sets = ["--set", "model.from=None", "--set", "data.tokenizer=\"chat/tokenizer.json\""];
    let args = [&["train", "resumed/config.ron", "--run-dir", "resumed", "--resume"], &sets[..]];
    folder
        .onebox(&args.concat())
        .refused(78, &["from the weights of", "chat", "model.from is None"]);
}

fn export(folder: &Folder, run: &str, out: &str) {
    folder.onebox(&["checkpoint", "export", run, out, "--to", "safetensors"]).ok();
}

#[test]
fn what_stands_beside_the_weights_comes_out_as_it_came() {
    let folder = Folder::new();
    with_chat(&folder);
    // Files that onebox never reads are kept as well.
    let more =
        ["special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "merges.txt"];
    for name in more.iter().chain(&["vocab.json", "tokenizer.model", "README.md"]) {
        std::fs::write(folder.path(&format!("chat/{name}")), [name.as_bytes(), &[0, 255]].concat())
            .unwrap();
    }
    folder.shell("cp -r chat came").ok();
    let train = |args: &[&str]| {
        folder.onebox(&[&["train", "run/config.ron", "-q", "--run-dir", "run"], args].concat()).ok()
    };
    folder.onebox(&["train", "a.ron", "-q", "--run-dir", "run"]).ok();
    std::fs::remove_dir_all(folder.path("chat")).unwrap();
    let gone = ["--set", "model.from=None", "--set", "data.tokenizer=\"run/tokenizer.json\""];
    train(&[&gone[..], &["--set", "train.steps=3", "--resume"]].concat());
    train(&[&gone[..], &["--set", "train.steps=4", "--fork"]].concat());
    folder.onebox(&["checkpoint", "reshard", "run", "run-3", "--tp", "2", "--dp", "1"]).ok();
    for run in ["run", "run-2", "run-3"] {
        let out = format!("{run}-out");
        export(&folder, run, &out);
        let names: Vec<String> = std::fs::read_dir(folder.path(&out))
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        assert_eq!(names.len(), 11, "{names:?}");
        for name in names.iter().filter(|name| !name.starts_with("model") && *name != "config.json")
        {
            let [was, is] =
                ["came", &out].map(|of| std::fs::read(folder.path(of).join(name)).unwrap());
            assert!(was == is, "{run}: {name}");
        }
        let config: Value =
            serde_json::from_str(&folder.read(&format!("{out}/config.json"))).unwrap();
        assert_eq!([&config["eos_token_id"], &config["bos_token_id"]], [&json!(301), &Value::Null]);
        // The model was trained on samples of 64 tokens.
        assert_eq!(config["max_position_embeddings"], 256);
    }
    let ron = "(model: (family: Llama, layers: 2, hidden: 36, heads: 6, kv_heads: 2, head_dim: 6, ffn_hidden: 66, vocab: 307,
        seq_len: 256, norm_eps: 1e-5, tied: true, rope: (theta: 100.0, scaling: Llama3(factor: 8.0, original_seq_len: 32))),
        data: (train: \"text.txt\", tokenizer: \"came/tokenizer.json\"), device: Cpu(threads: 1), train: (steps: 1))";
    std::fs::write(folder.path("b.ron"), ron).unwrap();
    folder.onebox(&["checkpoint", "import", "came", "imported", "b.ron"]).ok();
    let hashes =
        |run: &str| folder.shell(&format!("cd {run}/model.from && sha256sum *")).ok().stdout;
    assert_eq!(hashes("imported"), hashes("run"));
    // With tokens of another kind, the tokenizer and its files belong to another model.
    let args = ["checkpoint", "import", "came", "bytes", "b.ron"];
    let without = ron.replace(", tokenizer: \"came/tokenizer.json\"", "");
    std::fs::write(folder.path("b.ron"), without).unwrap();
    let why = ["came has tokenizer.json", "or to None for weights that were trained on bytes"];
    folder.onebox(&args).refused(78, &why);
    let bytes = ["--set", "data.tokenizer=None"];
    let output = folder.onebox(&[&args, &bytes[..]].concat()).ok().stderr;
    assert!(output.contains("no tokenizer and no chat template of came"), "{output}");
    assert!(!folder.path("bytes/model.from").exists());
}

#[test]
fn what_is_no_file_of_the_folder_is_refused_before_the_run() {
    let folder = Folder::new();
    with_chat(&folder);
    for (make, message) in [
        (
            "ln -s /etc/passwd chat/chat_template.jinja",
            "chat_template.jinja cannot be used: it is a link",
        ),
        (
            "ln -s nowhere chat/chat_template.jinja",
            "chat_template.jinja cannot be used: it is a link",
        ),
        ("mkdir chat/merges.txt", "merges.txt: not a regular file"),
        ("mkfifo chat/vocab.json", "vocab.json: not a regular file"),
        ("truncate -s 2G chat/tokenizer.model", "tokenizer.model cannot be used: it has 2.00 GiB"),
    ] {
        folder.shell(make).ok();
        let done = folder.onebox(&["train", "a.ron", "-q", "--run-dir", "run"]);
        assert!([66, 74].contains(&done.code) && done.stderr.contains(message), "{}", done.stderr);
        assert!(!folder.path("run").exists(), "{make}");
        folder
            .shell("cd chat && rm -rf chat_template.jinja merges.txt vocab.json tokenizer.model")
            .ok();
    }
    // The files that a run has kept are not trusted, either.
    folder.onebox(&["train", "a.ron", "-q", "--run-dir", "run"]).ok();
    folder.shell("ln -sf /etc/passwd run/model.from/tokenizer_config.json").ok();
    let args = ["checkpoint", "export", "run", "out", "--to", "safetensors"];
    folder.onebox(&args).refused(66, &["tokenizer_config.json cannot be used: it is a link"]);
}

/// Keys of zai-org/GLM-4.5-Air and of openai/gpt-oss-20b, with fewer layers and experts.
#[test]
fn mixtures_of_experts_are_planned_from_their_config_json_alone() {
    let air = json!({
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": true, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 4096, "partial_rotary_factor": 0.5, "intermediate_size": 10944,
        "max_position_embeddings": 131_072, "moe_intermediate_size": 1408, "norm_topk_prob": true,
        "num_attention_heads": 96, "n_group": 1, "topk_group": 1, "n_routed_experts": 8, "n_shared_experts": 1,
        "routed_scaling_factor": 1.0, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "num_hidden_layers": 3,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_scaling": null, "rope_theta": 1_000_000,
        "num_nextn_predict_layers": 1, "tie_word_embeddings": false, "use_qk_norm": false, "vocab_size": 151_552
    });
    let kinds = ["sliding_attention", "full_attention"];
    let oss = json!({
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": true, "experts_per_token": 4,
        "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
        "intermediate_size": 2880, "layer_types": kinds, "max_position_embeddings": 131_072,
        "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 2, "num_key_value_heads": 8,
        "num_local_experts": 4, "quantization_config": { "quant_method": "mxfp4" }, "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": false
        },
        "rope_theta": 150_000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
        "tie_word_embeddings": false, "vocab_size": 201_088
    });
    // Queries, keys, values and the projection back, with biases; two norms.
    let attention: u64 = 4096 * (128 * (2 * 96 + 2 * 8)) + 128 * (96 + 2 * 8) + 2 * 4096;
    let sparse = attention + 8 * 4096 + 8 + (8 + 1) * 3 * 4096 * 1408;
    let of_air = 2 * 151_552 * 4096 + 4096 + 3 * attention + 3 * 4096 * 10_944;
    let of_air = of_air + 2 * (sparse - attention);
    let attention: u64 = 2880 * 64 * (2 * 64 + 2 * 8) + 64 * (64 + 2 * 8) + 2880 + 64 + 2 * 2880;
    let experts: u64 = 4 * (3 * 2880 * 2880 + 2 * 2880 + 2880) + 4 * (2880 + 1);
    let of_oss = 2 * 201_088 * 2880 + 2880 + 2 * (attention + experts);
    for (name, keys, parameters) in [("air", air, of_air), ("oss", oss, of_oss)] {
        let folder = Folder::new();
        std::fs::create_dir_all(folder.path(name)).unwrap();
        std::fs::write(folder.path(name).join("config.json"), keys.to_string()).unwrap();
        let on = bundled("h100-256gib");
        let answer = folder.onebox(&["plan", "--model", name, "--box", &on, "--json"]).ok();
        let answer: Value = serde_json::from_str(&answer.stdout).unwrap();
        assert_eq!(answer["parameters"], json!(parameters), "{name}");
    }
}
