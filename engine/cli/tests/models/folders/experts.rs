//! Folders with experts: a tensor for each matrix of an expert, or one for all experts of a layer.

use super::model::{Tensors, change, model, rename, set, tensors};
use super::results;
use crate::common::Folder;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Bytes of a number.
const WIDTH: usize = 4;

/// Dimensions of a tensor.
fn shape(entry: &Value) -> Vec<usize> {
    entry["shape"].as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize).collect()
}

/// The tensors with one for each matrix of an expert instead of one for all experts of a layer.
fn apart(all: Tensors) -> Tensors {
    let mut out = Tensors::new();
    for (name, entry, bytes) in all {
        let Some((layer, stack)) = name.split_once(".mlp.experts.") else {
            out.push((name, entry, bytes));
            continue;
        };
        let parts: &[&str] = match stack {
            "gate_up_proj" => &["gate_proj", "up_proj"],
            _ => &["down_proj"],
        };
        let all = shape(&entry);
        assert_eq!(all.len(), 3, "{name} {entry}");
        let (experts, rows, columns) = (all[0], all[1] / parts.len(), all[2]);
        let matrices = bytes.chunks(rows * columns * WIDTH);
        let names = (0..experts).flat_map(|expert| parts.iter().map(move |part| (expert, part)));
        for ((expert, part), bytes) in names.zip(matrices) {
            let mut entry = entry.clone();
            entry["shape"] = json!([rows, columns]);
            let name = format!("{layer}.mlp.experts.{expert}.{part}.weight");
            out.push((name, entry, bytes.to_vec()));
        }
    }
    out
}

/// Names and shapes of the tensors of a folder, sorted.
fn forms(folder: &Folder, path: &str) -> Vec<(String, Vec<usize>)> {
    let all = tensors(&folder.path(path));
    let mut all: Vec<_> = all.into_iter().map(|(name, entry, _)| (name, shape(&entry))).collect();
    all.sort();
    all
}

#[test]
fn experts_in_one_tensor_and_apart_are_the_same_model() {
    let (fused, single) = (model("olmoe"), model("olmoe"));
    change(&single, |all| *all = apart(std::mem::take(all)));
    assert_ne!(forms(&single, "m/model.safetensors"), forms(&fused, "m/model.safetensors"));
    assert!(results(&single) == results(&fused));
    // Old and new names of the experts of a Mixtral, and other prefixes.
    let (old, bare) = (model("mixtral"), model("mixtral"));
    rename(&bare, |name| name.replacen("model.", "", 1));
    assert!(results(&bare) == results(&old));
}

#[test]
fn an_export_has_the_form_of_the_experts_of_the_folder() {
    for (name, is_apart) in [
        ("olmoe", false),
        ("olmoe", true),
        ("qwen3-moe", false),
        ("mixtral", false),
        ("glm4-moe", false),
        ("glm4-air", false),
        ("gpt-oss", false),
    ] {
        let folder = model(name);
        if is_apart {
            change(&folder, |all| *all = apart(std::mem::take(all)));
        }
        let came = forms(&folder, "m/model.safetensors");
        let kept = ["olmoe", "glm4-air"].contains(&name) && !is_apart;
        let exported = |run: &str, out: &str| {
            folder.onebox(&["checkpoint", "export", run, out, "--to", "safetensors"]).ok();
            assert_eq!(forms(&folder, &format!("{out}/model.safetensors")), came, "{name} {out}");
            assert_eq!(folder.path(run).join("model.from/experts.json").exists(), kept, "{name}");
            assert!(!folder.path(out).join("experts.json").exists());
            let keys = |path: &str| -> Value { serde_json::from_str(&folder.read(path)).unwrap() };
            let (came, all) = (keys("m/config.json"), keys(&format!("{out}/config.json")));
            for key in [
                "model_type",
                "num_experts",
                "num_local_experts",
                "num_experts_per_tok",
                "norm_topk_prob",
                "moe_intermediate_size",
                "intermediate_size",
                "mlp_only_layers",
                "sliding_window",
                "router_aux_loss_coef",
                "output_router_logits",
                "n_routed_experts",
                "n_shared_experts",
                "first_k_dense_replace",
                "n_group",
                "topk_group",
                "routed_scaling_factor",
                "num_nextn_predict_layers",
                "rope_parameters",
                "partial_rotary_factor",
                "use_qk_norm",
                "swiglu_alpha",
                "swiglu_limit",
                "layer_types",
                "attention_bias",
            ] {
                assert_eq!(all.get(key), came.get(key), "{name} {key}");
            }
        };
        folder.onebox(&["train", "a.ron", "-q", "--run-dir", "run"]).ok();
        exported("run", "out");
        // A resumed run, a fork and an import keep the form.
        let more = ["--set", "train.steps=2", "--set", "schedule.decay_steps=1"];
        let resume = ["train", "a.ron", "-q", "--run-dir", "run", "--resume"];
        folder.onebox(&[&resume[..], &more].concat()).ok();
        exported("run", "again");
        let import = ["checkpoint", "import", "m", "imported", "a.ron"];
        folder.onebox(&[&import[..], &["--set", "model.seq_len=24"]].concat()).ok();
        exported("imported", "back");
        // The header may name the tensors in another order.
        let bytes = |path: &str| {
            let all = tensors(&folder.path(path)).into_iter();
            all.map(|(name, _, bytes)| (name, bytes)).collect::<BTreeMap<_, _>>()
        };
        assert!(bytes("back/model.safetensors") == bytes("m/model.safetensors"), "{name}");
    }
}

/// Layers behind the last one predict several tokens. transformers ignores them, and so does a run.
#[test]
fn layers_behind_the_decoder_are_kept_as_they_were() {
    let folder = model("glm4-moe");
    let want = results(&folder);
    set(&folder, "num_nextn_predict_layers", json!(1));
    change(&folder, |all| {
        for (name, first) in [("eh_proj.weight", 1u8), ("mlp.gate.e_score_correction_bias", 90)] {
            let entry = json!({ "dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 0] });
            let bytes = (first..first + 12).collect();
            all.push((format!("model.layers.3.{name}"), entry, bytes));
        }
    });
    assert!(results(&folder) == want, "the decoder is the same");
    let output = folder.onebox(&["train", "a.ron", "-q", "--run-dir", "kept"]).ok();
    let note = "the run does not train 2 tensors of layers.3; an export copies them from there";
    assert_eq!(output.stderr.matches(note).count(), 1, "{}", output.stderr);
    folder.onebox(&["checkpoint", "export", "kept", "out", "--to", "safetensors"]).ok();
    let behind = |path: &str| {
        let mut all = tensors(&folder.path(path));
        all.retain(|(name, ..)| name.contains("layers.3."));
        all.iter_mut().for_each(|(_, entry, _)| entry["data_offsets"] = json!(null));
        all.sort_by(|a, b| a.0.cmp(&b.0));
        all
    };
    let came = behind("m/model.safetensors");
    assert_eq!((came.len(), behind("out/model.safetensors")), (2, came));
    assert_eq!(forms(&folder, "out/model.safetensors"), forms(&folder, "m/model.safetensors"));
    let keys: Value = serde_json::from_str(&folder.read("out/config.json")).unwrap();
    assert_eq!(keys["num_nextn_predict_layers"], 1);
    // A layer before the end is a layer of the decoder.
    change(&folder, |all| {
        all.iter_mut().for_each(|(name, ..)| *name = name.replace("layers.3.eh", "layers.2.eh"));
    });
    let why = "`model.layers.2.eh_proj.weight` is no tensor of this model";
    folder.onebox(&["config", "check", "a.ron"]).refused(66, &[why]);
}

#[test]
fn experts_that_are_missing_or_twice_and_other_routers_are_refused_by_name() {
    type FolderChange = Box<dyn Fn(&mut Tensors)>;
    let without = |lost: &'static str| -> FolderChange {
        Box::new(move |all| all.retain(|(name, ..)| name != lost))
    };
    // Adds a tensor with the content of another.
    let with = |from: &'static str, to: &'static str| -> FolderChange {
        Box::new(move |all| {
            let mut new = all.iter().find(|(name, ..)| name == from).unwrap().clone();
            new.0 = to.into();
            all.push(new);
        })
    };
    // Takes the last row of a matrix.
    let shorter = |of: &'static str| -> FolderChange {
        Box::new(move |all| {
            let (_, entry, bytes) = all.iter_mut().find(|(name, ..)| name == of).unwrap();
            let mut shape = shape(entry);
            shape[0] -= 1;
            bytes.truncate(shape.iter().product::<usize>() * WIDTH);
            entry["shape"] = json!(shape);
        })
    };
    // Makes the number at `place` of a tensor a NaN.
    let nan = |of: &'static str, place: usize| -> FolderChange {
        Box::new(move |all| {
            let (.., bytes) = all.iter_mut().find(|(name, ..)| name == of).unwrap();
            bytes[place * WIDTH..][..WIDTH].copy_from_slice(&[0xff; WIDTH]);
        })
    };
    const QWEN: &str = "model.layers.1.mlp.experts.3.up_proj.weight";
    const MIXTRAL: &str = "model.layers.0.block_sparse_moe.experts.5.w2.weight";
    const STACK: &str = "model.layers.1.mlp.experts.down_proj";
    let cases: [(&str, FolderChange, &[&str]); 11] = [
        ("qwen3-moe", without(QWEN), &["it has no `layers.1.mlp.experts.3.up_proj.weight`"]),
        ("mixtral", without(MIXTRAL), &["no `layers.0.block_sparse_moe.experts.5.w2.weight`"]),
        ("olmoe", without(STACK), &["it has no `layers.1.mlp.experts.down_proj`"]),
        (
            "qwen3-moe",
            with(QWEN, "model.layers.1.mlp.experts.8.up_proj.weight"),
            &["experts.8.up_proj.weight` is no tensor of this model, which has 8 experts"],
        ),
        (
            "qwen3-moe",
            with(QWEN, "layers.1.mlp.experts.3.up_proj.weight"),
            &["are one tensor, twice", QWEN],
        ),
        (
            "olmoe",
            with("model.norm.weight", "model.layers.1.mlp.experts.3.down_proj.weight"),
            &["experts.3.down_proj.weight` is no tensor", "each expert must be there once"],
        ),
        (
            "qwen3-moe",
            shorter("model.layers.1.mlp.gate.weight"),
            &["`model.layers.1.mlp.gate.weight` is F32 [7, 32], not F32, F16 or BF16 [8, 32]"],
        ),
        (
            "mixtral",
            shorter("model.layers.0.block_sparse_moe.gate.weight"),
            &["block_sparse_moe.gate.weight` is F32 [5, 36], not F32, F16 or BF16 [6, 36]"],
        ),
        ("olmoe", shorter(STACK), &["down_proj` is F32 [7, 36, 24]", "[8, 36, 24]"]),
        ("qwen3-moe", nan(QWEN, 7), &["experts.3.up_proj.weight` has a NaN"]),
        // The last number of an expert in the middle.
        ("olmoe", nan(STACK, 6 * 36 * 24 - 1), &["experts.down_proj` has a NaN in expert 5"]),
    ];
    for (name, how, texts) in cases {
        let folder = model(name);
        change(&folder, how);
        folder.onebox(&["train", "a.ron", "-q", "--run-dir", "run"]).refused(66, texts);
        assert!(!folder.path("run").exists(), "{texts:?}");
    }
    let folder = model("olmoe");
    set(&folder, "num_local_experts", json!(16));
    let why = ["`num_experts` is 8, and `num_local_experts` is 16"];
    folder.onebox(&["config", "check", "a.ron"]).refused(78, &why);
}
