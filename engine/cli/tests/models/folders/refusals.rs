//! Folders that are no model: `config check` and `train --dry-run` refuse them in the same words,
//! with the remedy.

use super::model::{change, cut, model, rename, set};
use crate::common::{CommandOutput, Folder};
use serde_json::{Value, json};
use std::fs;

const POINTER: &str = "version https://git-lfs.github.com/spec/v1
oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393
size 2125423410
";

/// Asserts that `config check` and a dry run refuse the folder in the same words.
#[track_caller]
fn refused(folder: &Folder, (what, code): (&str, i32), texts: &[&str]) -> CommandOutput {
    let check = folder.onebox(&["config", "check", "a.ron"]);
    let dry = folder.onebox(&["train", "a.ron", "--dry-run"]);
    assert_eq!((dry.code, &dry.stderr), (check.code, &check.stderr), "{what}");
    assert!(check.stderr.starts_with("error: model.from: "), "{what}:\n{}", check.stderr);
    check.refused(code, texts)
}

#[test]
fn a_folder_that_is_no_model_is_refused_by_all_in_the_same_words_with_the_remedy() {
    type FolderChange = fn(&Folder);
    let put = |folder: &Folder, name: &str, text: &str| {
        fs::write(folder.path("m").join(name), text).unwrap();
    };
    let without_weights = |folder: &Folder, names: &[&str]| {
        fs::remove_file(folder.path("m/model.safetensors")).unwrap();
        for name in names {
            fs::write(folder.path("m").join(name), "x").unwrap();
        }
    };
    let pointed = ["m/{} cannot be used: it is a Git LFS pointer", "`git lfs pull`"];
    for name in ["model.safetensors", "tokenizer.json", "tokenizer.model", "tokenizer_config.json"]
    {
        let folder = model("chat");
        put(&folder, name, POINTER);
        refused(
            &folder,
            (name, 66),
            &pointed.map(|text| text.replace("{}", name)).each_ref().map(|t| &**t),
        );
    }
    let folder = model("chat");
    put(&folder, "config.json", POINTER);
    refused(
        &folder,
        ("config.json", 78),
        &["config.json: it is a Git LFS pointer", "git lfs pull"],
    );
    let folder = model("chat");
    cut(&folder, &[]);
    put(&folder, "model.safetensors.index.json", POINTER);
    refused(
        &folder,
        ("index", 66),
        &["index.json cannot be used: it is a Git LFS", "git lfs pull"],
    );
    let folder = model("chat");
    cut(&folder, &[]);
    put(&folder, "model-00002-of-00002.safetensors", POINTER);
    refused(
        &folder,
        ("part", 66),
        &["model-00002-of-00002.safetensors cannot be used: it is a Git"],
    );

    let save = "AutoModelForCausalLM.from_pretrained(";
    let others: [(&[&str], &[&str]); 9] = [
        (
            &["pytorch_model.bin", "training_args.bin"],
            &["`pytorch_model.bin` is a pickle", save, ".save_pretrained("],
        ),
        (
            &["pytorch_model.bin.index.json", "pytorch_model-00001-of-00002.bin"],
            &["pytorch_model-00001", save],
        ),
        (
            &["consolidated.00.pth", "params.json"],
            &["`consolidated.00.pth`", "convert_llama_weights_to_hf"],
        ),
        (&["model.Q4.gguf"], &["`model.Q4.gguf` is for llama.cpp", "gguf_file="]),
        (
            &["global_step20", "zero_to_fp32.py", "latest"],
            &["DeepSpeed", "zero_to_fp32.py", "--safe_serialization"],
        ),
        (&["pytorch_model_fsdp_0", "optimizer.bin"], &["FSDP", "accelerate merge-weights"]),
        (&["model-00001-of-00002.safetensors"], &["the index that names all parts is not there"]),
        (&["ckpt.pt"], &["`ckpt.pt` is a pickle", "model.save_pretrained("]),
        (&["optimizer.pt", "rng_state.pth"], &["neither model.safetensors nor", "other formats"]),
    ];
    for (names, texts) in others {
        let folder = model("chat");
        without_weights(&folder, names);
        refused(&folder, (names[0], 66), texts);
    }
    let folder = model("chat");
    without_weights(&folder, &[]);
    put(&folder, "pytorch_model.bin", POINTER);
    refused(
        &folder,
        ("pointer to a pickle", 66),
        &["is a pickle", "git lfs pull", "save_pretrained"],
    );
    // Folders of these kinds have no config.json.
    for (name, texts) in [
        ("consolidated.00.pth", ["has no config.json, and `consolidated.00.pth`", "convert_llama"]),
        ("adapter_model.safetensors", ["is of a PEFT adapter", "merge_and_unload()"]),
    ] {
        let folder = model("chat");
        without_weights(&folder, &[name]);
        fs::remove_file(folder.path("m/config.json")).unwrap();
        refused(&folder, (name, 78), &texts);
    }

    let cases: [(&str, FolderChange, &[&str]); 13] = [
        (
            "adapter beside weights",
            |folder| fs::write(folder.path("m/adapter_config.json"), "{}").unwrap(),
            &[
                "`adapter_config.json` is of a PEFT adapter",
                "merge_and_unload()",
                "move the adapter's",
            ],
        ),
        (
            "adapter not merged",
            |folder| {
                rename(folder, |name| {
                    ["base_model.model.", &name.replace("q_proj.", "q_proj.base_layer.")].concat()
                });
                change(folder, |all| {
                    let mut more = all[1].clone();
                    more.0 =
                        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
                            .into();
                    all.push(more);
                });
            },
            &["is of a PEFT adapter", "merge_and_unload()"],
        ),
        (
            "ZeRO-3",
            |folder| {
                change(folder, |all| {
                    for (_, of, data) in all.iter_mut().filter(|t| t.0.contains("_proj")) {
                        of["shape"] = json!([0]);
                        data.clear();
                    }
                });
            },
            &[
                "mlp.down_proj.weight` and 13 more have no elements ([0])",
                "zero_to_fp32.py",
                "stage3_gather_16bit_weights_on_model_save",
            ],
        ),
        (
            "one empty tensor",
            |folder| {
                change(folder, |all| {
                    all[0].1["shape"] = json!([0, 36]);
                    all[0].2.clear();
                });
            },
            &["`model.embed_tokens.weight` has no elements ([0, 36])"],
        ),
        (
            "flat parts",
            |folder| {
                change(folder, |all| {
                    all[0].1["shape"] = json!([all[0].2.len() / 2]);
                });
            },
            &[
                "`model.embed_tokens.weight` is BF16 [11052], not F32, F16 or BF16 [307, 36]",
                "gather",
            ],
        ),
        (
            "another prefix",
            |folder| rename(folder, |name| ["student.", name].concat()),
            &[
                "it has no `embed_tokens.weight`; it has `student.model.embed_tokens.weight`",
                "and 17 more",
            ],
        ),
        (
            "with a wrapper and without",
            |folder| {
                change(folder, |all| {
                    let mut more = all[1].clone();
                    more.0 = format!("_orig_mod.{}", more.0);
                    all.push(more);
                });
            },
            &["are one tensor, twice"],
        ),
        (
            "cut off",
            |folder| {
                let file =
                    fs::OpenOptions::new().write(true).open(folder.path("m/model.safetensors"));
                file.unwrap().set_len(60_000).unwrap();
            },
            &["model.safetensors cannot be used: its tensors end at byte"],
        ),
        (
            "a head of its own",
            |folder| {
                change(folder, |all| {
                    let mut head = all[0].clone();
                    head.0 = "lm_head.weight".into();
                    head.2[7] ^= 1;
                    all.push(head);
                });
            },
            &["`lm_head.weight` is not the embedding"],
        ),
        (
            "untied, without a head",
            |folder| set(folder, "tie_word_embeddings", json!(false)),
            &["it has no `lm_head.weight`", "\"tie_word_embeddings\": true"],
        ),
        (
            "index of more",
            |folder| cut(folder, &["model.layers.0.mlp.extra.weight"]),
            &["`model.layers.0.mlp.extra.weight` is not in"],
        ),
        (
            "no part",
            |folder| {
                cut(folder, &[]);
                fs::remove_file(folder.path("m/model-00001-of-00002.safetensors")).unwrap();
            },
            &["model-00001-of-00002.safetensors: No such file"],
        ),
        (
            "of another shape",
            |folder| set(folder, "intermediate_size", json!(64)),
            &["gate_proj.weight` is BF16 [66, 36], not F32, F16 or BF16 [64, 36]"],
        ),
    ];
    for (what, change, texts) in cases {
        let folder = model("chat");
        change(&folder);
        refused(&folder, (what, 66), texts);
    }
    let folder = model("chat");
    let ron = folder.read("a.ron").replace("from: \"m\"", "from: \"m/config.json\"");
    fs::write(folder.path("a.ron"), ron).unwrap();
    refused(&folder, ("a file", 78), &["it names a file"]);
}

/// A model of this kind cannot be trained. The missing tokenizer of its folder does not matter.
#[test]
fn a_folder_is_refused_for_its_cause_before_what_it_lacks() {
    let kind = |kind: &str, more: Value| {
        let mut all = json!({ "model_type": kind });
        all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        all
    };
    for (what, code, keys, text) in [
        (
            "experts",
            78,
            kind("qwen2_moe", json!({ "num_experts": 60 })),
            "it has shared experts with a gate of another class than qwen3_5_moe and qwen3_next, which",
        ),
        ("experts by name", 78, kind("dbrx", json!({})), "a mixture of experts"),
        (
            "experts by key",
            78,
            kind("granitemoe", json!({ "num_local_experts": 32 })),
            "onebox has those of qwen3_moe",
        ),
        (
            "images",
            78,
            kind("llava", json!({ "text_config": { "model_type": "mistral" } })),
            "save its text model, a mistral, in a folder",
        ),
        (
            "images around no text model",
            78,
            kind("gemma4", json!({ "text_config": { "model_type": "gemma4_text" } })),
            "norms of values",
        ),
        ("encoder", 78, kind("t5", json!({ "is_encoder_decoder": true })), "it has an encoder"),
        (
            "masked",
            78,
            kind("bert", json!({ "architectures": ["BertForMaskedLM"] })),
            "no model that goes on with a text",
        ),
        (
            "states",
            78,
            kind("mamba2", json!({ "state_size": 128 })),
            "a state in the place of attention",
        ),
        (
            "another",
            78,
            kind("cohere2", json!({})),
            "granite, seed_oss, qwen3_moe, mixtral, olmoe, glm4_moe, gpt_oss, qwen3_5_text, qwen3_5_moe_text, qwen3_next, gemma3, mistral3, qwen3_5, qwen3_5_moe are built here",
        ),
        (
            "codes",
            78,
            json!({ "quantization_config": { "quant_method": "gptq" } }),
            "as it was before it was quantized",
        ),
        (
            "positions",
            78,
            json!({ "rope_scaling": { "rope_type": "dynamic" } }),
            "`rope_type` is \"dynamic\"",
        ),
        ("weights", 66, json!({}), "`pytorch_model.bin` is a pickle"),
        ("adapter", 66, json!({}), "merge_and_unload()"),
    ] {
        let folder = model("chat");
        for (key, value) in keys.as_object().unwrap() {
            set(&folder, key, value.clone());
        }
        let weights = folder.path("m/model.safetensors");
        let new_name = match what {
            "weights" => "m/pytorch_model.bin",
            "adapter" => "m/adapter_model.safetensors",
            _ => "m/model.safetensors",
        };
        fs::rename(weights, folder.path(new_name)).unwrap();
        fs::remove_file(folder.path("m/tokenizer.json")).unwrap();
        fs::write(
            folder.path("a.ron"),
            "(data: (train: \"chats.jsonl\", format: Chat), device: Cpu(), train: (steps: 1),
              model: (from: \"m\", seq_len: 8))",
        )
        .unwrap();
        fs::write(folder.path("chats.jsonl"), "{}\n").unwrap();
        let output = refused(&folder, (what, code), &[text, "1 error in a.ron"]);
        assert!(!output.stderr.contains("tokenizer.json or"), "{what}:\n{}", output.stderr);
        assert!(
            what == "positions" || !output.stderr.contains("mend"),
            "{what}:\n{}",
            output.stderr
        );
    }
    // If the folder is a model, the missing tokenizer is the error.
    let folder = model("chat");
    fs::remove_file(folder.path("m/tokenizer.json")).unwrap();
    let sets = ["--set", "data.format=Chat", "--set", "data.train=\"chats.jsonl\""];
    let check = folder.onebox(&[&["config", "check", "a.ron"][..], &sets].concat());
    check.refused(78, &["rows of text need a tokenizer", "without a tokenizer.json"]);
}
