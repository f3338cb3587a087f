//! `onebox checkpoint export` and `import` for a user, and folders with false contents.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use crate::common::{CommandOutput, Folder};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

fn sets<'a>(sets: &[&'a str]) -> Vec<&'a str> {
    sets.iter().flat_map(|set| ["--set", *set]).collect()
}

/// Trains a run with a checkpoint of step 4, and exports it to `hf`.
fn exported(folder: &Folder, more: &[&str]) {
    let every = sets(&["train.checkpoint_every=4", "sample.tokens=0"]);
    folder.train("run", &[&["-q"], &every[..]].concat()).ok();
    let args = ["checkpoint", "export", "run", "hf", "--to", "safetensors"];
    folder.onebox(&[&args, more].concat()).ok();
}

fn import(folder: &Folder, from: &str, out: &str, more: &[&str]) -> CommandOutput {
    folder.onebox(&[&["checkpoint", "import", from, out, "tiny.ron"], more].concat())
}

#[test]
fn a_model_goes_out_and_comes_back_with_the_same_bits() {
    let folder = Folder::new();
    exported(&folder, &["--max-shard-size", "60kB"]);
    let index: Value =
        serde_json::from_str(&folder.read("hf/model.safetensors.index.json")).unwrap();
    assert_eq!(index["metadata"]["total_size"], 34_176 * 4);
    assert_eq!(index["weight_map"]["transformer.wte.weight"], "model-00001-of-00003.safetensors");
    let config: Value = serde_json::from_str(&folder.read("hf/config.json")).unwrap();
    assert_eq!([&config["n_embd"], &config["n_inner"]], [&Value::from(32), &Value::Null]);
    let done = import(&folder, "hf", "new", &[]).ok();
    assert!(
        done.stderr.contains("onebox train tiny.ron --run-dir new --resume"),
        "{}",
        done.stderr
    );
    // The config's rate is for random weights.
    let warning = "warning: optimizer.lr is ";
    assert!(done.stderr.contains(warning), "{}", done.stderr);
    let usual =
        import(&folder, "hf", "usual", &sets(&["optimizer.lr=2e-5", "schedule.min_lr=2e-6"]));
    assert!(!usual.ok().stderr.contains("warning"));
    let diff = folder.onebox(&["checkpoint", "diff", "run", "new", "--json"]);
    let diff: Value = serde_json::from_str(&diff.stdout).unwrap();
    for tensor in diff["tensors"].as_array().unwrap() {
        assert_eq!(tensor["master"]["equal"], true, "{tensor}");
        assert_eq!(tensor["momentum"]["equal"], false, "moments start at zero: {tensor}");
    }
    // The text before any step, and the run that follows.
    let drawn = |run: &str| {
        let args = ["generate", run, "--prompt", "the ", "--tokens", "20", "--temperature", "0"];
        folder.onebox(&args).ok().stdout
    };
    assert_eq!(drawn("run"), drawn("new"));
    // The tokenizer of the folder makes a token of each byte.
    let logits =
        |of: &str| folder.onebox(&["generate", of, "--prompt", "the ", "--logits"]).ok().stdout;
    assert_eq!(logits("run"), logits("hf"));
    let listed = |name: &str| folder.path(&format!("hf/{name}")).is_file();
    assert!(listed("tokenizer.json") && listed("tokenizer_config.json"));
    // An import keeps the files, and its export has them again.
    let again = ["checkpoint", "export", "new", "again", "--to", "safetensors"];
    folder.onebox(&again).ok();
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        assert_eq!(folder.read(&format!("hf/{name}")), folder.read(&format!("again/{name}")));
    }
    // Training from the folder reads the text by that tokenizer.
    let from = ["--set", "model.from=\"hf\"", "--set", "train.checkpoint_every=1"];
    folder.train("tuned", &[&["-q"], &from[..]].concat()).ok();
    assert!(folder.path("tuned/tokenizer.json").is_file());
    let resumed = folder.train("new", &["--resume", "-q"]).ok();
    assert!(resumed.stderr.contains("going on after step 0"), "{}", resumed.stderr);
    let [first, last] = ["new", "run"].map(|run| {
        let lines = folder.metrics(run);
        let steps: Vec<f64> = lines.iter().filter_map(|l| l["loss"].as_f64()).collect();
        [steps[0], steps[steps.len() - 1]]
    });
    // The new run begins at the end of the other run, not at its beginning.
    assert!((first[0] - last[1]).abs() < 0.15 && last[0] - first[0] > 0.15, "{first:?} {last:?}");
    import(&folder, "hf", "new", &[]).refused(73, &["already holds a run"]);
    let args = ["checkpoint", "export", "run", "hf", "--to", "safetensors"];
    folder.onebox(&args).refused(73, &["hf exists"]);
}

/// Matrices with one row or column stay matrices, for transformers and in the run's weights.
#[test]
fn a_model_of_one_column_goes_out_with_the_shapes_of_its_matrices() {
    let folder = Folder::new();
    let narrow = ["model.hidden=1", "model.heads=1", "model.ffn_hidden=1", "model.layers=1"];
    let narrow = sets(&[&narrow[..], &["parallel.tensor=1", "parallel.data=4"]].concat());
    folder.train("run", &[&["-q"], &narrow[..]].concat()).ok();
    folder.onebox(&["checkpoint", "export", "run", "hf", "--to", "safetensors"]).ok();
    let shape = |file: &str, name: &str| {
        let bytes = std::fs::read(folder.path(file)).unwrap();
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
        header[name]["shape"].to_string()
    };
    for (own, theirs, shape_of_both) in [
        ("wte", "wte.weight", "[256,1]"),
        ("wpe", "wpe.weight", "[16,1]"),
        ("h.0.mlp.fc.weight", "h.0.mlp.c_fc.weight", "[1,1]"),
        ("h.0.mlp.fc.bias", "h.0.mlp.c_fc.bias", "[1]"),
        ("h.0.ln_1.weight", "h.0.ln_1.weight", "[1]"),
    ] {
        assert_eq!(shape("run/weights.safetensors", own), shape_of_both, "{own}");
        let theirs = format!("transformer.{theirs}");
        assert_eq!(shape("hf/model.safetensors", &theirs), shape_of_both, "{theirs}");
    }
    assert_eq!(shape("run/weights.safetensors", "h.0.attn.qkv.weight"), "[3,1]");
    assert_eq!(shape("hf/model.safetensors", "transformer.h.0.attn.c_attn.weight"), "[1,3]");
    import(&folder, "hf", "new", &narrow).ok();
    let drawn = |run: &str| {
        folder.onebox(&["generate", run, "--prompt", "the ", "--tokens", "4"]).ok().stdout
    };
    assert_eq!(drawn("run"), drawn("new"));
}

#[test]
fn a_model_that_is_not_the_configs_is_refused_key_by_key() {
    let folder = Folder::new();
    exported(&folder, &[]);
    let more = sets(&["model.layers=3", "model.seq_len=8", "model.hidden=16"]);
    import(&folder, "hf", "new", &more).refused(
        78,
        &[
            "config.json is not the model",
            "`n_layer` is 2, and model.layers is 3: --set model.layers=2",
            "`n_positions` is 16",
            "`n_embd` is 32",
            "`n_inner` is 128",
        ],
    );
    let config = folder.read("hf/config.json");
    let with = |key: &str, value: Value| {
        let mut changed: Value = serde_json::from_str(&config).unwrap();
        changed[key] = value;
        std::fs::write(folder.path("hf/config.json"), changed.to_string()).unwrap();
        import(&folder, "hf", "new", &[])
    };
    with("activation_function", "relu".into()).refused(78, &["`activation_function` is \"relu\""]);
    with("layer_norm_epsilon", 1e-6.into()).refused(78, &["`layer_norm_epsilon`"]);
    with("vocab_size", 260.into()).refused(78, &["`vocab_size` is 260"]);
    assert!(!folder.path("new").exists());
}

/// Renames the embedding.
fn rename(header: &mut Value, name: &str) {
    let fields = header.as_object_mut().unwrap().remove("transformer.wte.weight").unwrap();
    header[name] = fields;
}

/// Writes a header and its data as a safetensors file.
fn write_tensors(path: &Path, header: &Value, data: &[u8]) {
    let mut json = header.to_string().into_bytes();
    json.resize(json.len().next_multiple_of(8), b' ');
    let bytes = [&(json.len() as u64).to_le_bytes()[..], &json, data].concat();
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn a_folder_that_is_not_what_it_says_is_refused() {
    let folder = Folder::new();
    exported(&folder, &[]);
    let model = folder.path("hf/model.safetensors");
    let good = std::fs::read(&model).unwrap();
    let length = u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&good[8..8 + length]).unwrap();
    let data = &good[8 + length..];
    let refused = |what: &str, texts: &[&str]| {
        let done = import(&folder, "hf", "new", &[]);
        assert!(done.code == 66 || done.code == 74, "{what}: {}: {}", done.code, done.stderr);
        for text in texts {
            assert!(done.stderr.contains(text), "{what}: `{text}` is not in:\n{}", done.stderr);
        }
        let clean = !done.stderr.contains("panicked") && !done.stderr.contains('\u{1b}');
        assert!(clean && !folder.path("new/checkpoints/step-00000000").exists(), "{what}");
    };
    type JsonChange = fn(&mut Value);
    let changes: [(&str, JsonChange, &str); 9] = [
        ("absent", |h| drop(h.as_object_mut().unwrap().remove("transformer.wte.weight")), "hole"),
        ("renamed", |h| rename(h, "transformer.w"), "it has no `wte.weight`"),
        ("of integers", |h| h["transformer.ln_f.bias"]["dtype"] = "I32".into(), "is I32"),
        ("of no type", |h| h["transformer.ln_f.bias"]["dtype"] = "\u{1b}[2J".into(), "its type is"),
        (
            "huge",
            |h| h["transformer.ln_f.bias"]["shape"] = vec![1u64 << 40].into(),
            "does not stand",
        ),
        (
            "not transposed",
            |h| h["transformer.h.0.attn.c_attn.weight"]["shape"] = vec![96, 32].into(),
            "[32, 96]",
        ),
        (
            "overlapping",
            |h| h["transformer.ln_f.bias"]["data_offsets"] = vec![0, 128].into(),
            "overlaps",
        ),
        ("a path", |h| rename(h, "../x"), "no tensor's name"),
        ("more", |h| h["transformer.ln_f.bias"]["code"] = 1.into(), "its header"),
    ];
    for (what, change, text) in changes {
        let mut header = header.clone();
        change(&mut header);
        write_tensors(&model, &header, data);
        refused(what, &[text]);
    }
    let mut with_head = header.clone();
    let end = data.len();
    with_head["lm_head.weight"] = serde_json::json!({ "dtype": "F32", "shape": [256, 32], "data_offsets": [end, end + 32768] });
    write_tensors(&model, &with_head, &[data, &[0; 32768]].concat());
    refused("an output of its own", &["`lm_head.weight` is not the embedding"]);
    let first = header["transformer.wte.weight"]["data_offsets"][0].as_u64().unwrap() as usize;
    write_tensors(&model, &with_head, &[data, &data[first..first + 32768]].concat());
    import(&folder, "hf", "tied", &[]).ok();
    let mut with_more = header.clone();
    with_more["h.7.attn.bias"] =
        serde_json::json!({ "dtype": "U8", "shape": [1, 1, 2, 2], "data_offsets": [end, end + 4] });
    write_tensors(&model, &with_more, &[data, &[1; 4]].concat());
    refused("a mask of no layer", &["`h.7.attn.bias` is no tensor of this model"]);
    let mut not_finite = data.to_vec();
    not_finite[first..first + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    write_tensors(&model, &header, &not_finite);
    refused("not finite", &["`transformer.wte.weight` has a NaN"]);

    for (what, bytes) in [
        ("empty", &good[..0]),
        ("cut in its length", &good[..7]),
        ("cut in its header", &good[..100]),
        ("cut in its data", &good[..good.len() - 1]),
        ("with a huge header", &[&u64::MAX.to_le_bytes()[..], &good[8..]].concat()),
        ("longer", &[&good[..], &[0]].concat()),
    ] {
        std::fs::write(&model, bytes).unwrap();
        refused(what, &["model.safetensors"]);
    }
    std::fs::remove_file(&model).unwrap();
    refused("without weights", &["neither model.safetensors nor"]);
}

#[test]
fn nothing_leads_out_of_a_folder() {
    let folder = Folder::new();
    exported(&folder, &["--max-shard-size", "60kB"]);
    let index = folder.read("hf/model.safetensors.index.json");
    let part = "model-00002-of-00003.safetensors";
    let with = |text: &str| {
        std::fs::write(folder.path("hf/model.safetensors.index.json"), text).unwrap();
        import(&folder, "hf", "new", &[])
    };
    folder.shell(&format!("mkdir out && cp hf/{part} out/ && cp hf/{part} x.safetensors")).ok();
    for file in ["../x.safetensors", "/x.safetensors", "sub/x.safetensors", ".x.safetensors"] {
        with(&index.replace(part, file)).refused(66, &["no file of this folder"]);
    }
    with(&index.replace(part, "model-00001-of-00003.safetensors")).refused(66, &["is not in"]);
    with(&index.replace(part, "missing.safetensors")).refused(66, &["missing.safetensors"]);
    let twice = index.replacen(
        "\"weight_map\": {",
        "\"weight_map\": {\"transformer.wte.weight\": \"a.safetensors\",",
        1,
    );
    with(&twice).refused(66, &["twice"]);
    // The index does not list all tensors of a part.
    let one: Value = serde_json::from_str(&index).unwrap();
    let mut fewer = one.clone();
    fewer["weight_map"].as_object_mut().unwrap().remove("transformer.ln_f.bias");
    with(&fewer.to_string()).refused(66, &["`transformer.ln_f.bias` is in it"]);
    with(&index);
    for file in [part, "config.json"] {
        let line =
            format!("rm -rf new && mv hf/{file} out/{file} && ln -s ../out/{file} hf/{file}");
        folder.shell(&line).ok();
        import(&folder, "hf", "new", &[]).refused(66, &["is a link", "cp -rL"]);
        folder.shell(&format!("rm hf/{file} && mkfifo hf/{file}")).ok();
        import(&folder, "hf", "new", &[]).refused(74, &["not a regular file"]);
        folder.shell(&format!("rm hf/{file} && cp out/{file} hf/{file}")).ok();
    }
    folder.shell("touch hf/model.safetensors").ok();
    import(&folder, "hf", "new", &[]).refused(66, &["both model.safetensors and"]);
    folder.shell("rm hf/model.safetensors").ok();
    import(&folder, "hf", "new", &[]).ok();
}

fn reshard(folder: &Folder, out: &str) -> CommandOutput {
    folder.onebox(&["checkpoint", "reshard", "run", out, "--tp", "1", "--dp", "1"])
}

fn export(folder: &Folder, out: &str) -> CommandOutput {
    folder.onebox(&["checkpoint", "export", "run", out, "--to", "safetensors"])
}

/// Every file below `path` except the lock, with its bytes.
fn tree(path: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![path.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let at = entry.unwrap().path();
            match at.is_dir() {
                true => folders.push(at),
                false if at.ends_with(".lock") => {}
                false => {
                    let bytes = std::fs::read(&at).unwrap();
                    found.insert(at.strip_prefix(path).unwrap().to_owned(), bytes);
                }
            }
        }
    }
    found
}

#[test]
fn what_a_killed_command_left_is_in_nobodys_way() {
    let folder = Folder::new();
    exported(&folder, &[]);
    import(&folder, "hf", "imported", &[]).ok();
    reshard(&folder, "resharded").ok();
    let again = |out: &str| match out {
        "imported" => import(&folder, "hf", "new", &[]),
        _ => reshard(&folder, "new"),
    };
    for (whole, step) in [("imported", "step-00000000"), ("resharded", "step-00000004")] {
        let half = format!(
            "mkdir -p new/checkpoints && cp -r {whole}/checkpoints/{step} new/checkpoints/{step}.tmp"
        );
        let files = format!("cp {whole}/config.ron new/ && echo half > new/.config.ron.tmp");
        for left in [
            format!("{half} && rm new/checkpoints/{step}.tmp/MANIFEST"),
            half.clone(),
            format!("{half} && {files}"),
        ] {
            folder.shell(&left).ok();
            again(whole).ok();
            assert!(tree(&folder.path("new")) == tree(&folder.path(whole)), "{whole}: {left}");
            again(whole).refused(73, &["new already holds a run, and nothing was replaced"]);
            std::fs::remove_dir_all(folder.path("new")).unwrap();
        }
        // Files of others are unchanged.
        for theirs in ["config.ron", "metrics.jsonl"] {
            folder.shell(&format!("{half} && echo mine > new/{theirs}")).ok();
            let before = tree(&folder.path("new"));
            again(whole).refused(73, &["nothing was replaced; ", "another directory"]);
            assert!(tree(&folder.path("new")) == before, "{whole}: {theirs}");
            std::fs::remove_dir_all(folder.path("new")).unwrap();
        }
    }
}

#[test]
fn an_interrupted_export_begins_again_and_replaces_nothing_of_others() {
    let folder = Folder::new();
    exported(&folder, &[]);
    for left in [
        "mkdir new.unfinished",
        "mkdir new.unfinished && touch new.unfinished/.lock",
        "cp -r hf new.unfinished && echo 1 > new.unfinished/.lock",
        "cp -r hf new.unfinished && cd new.unfinished && touch .lock && mv model.safetensors model-00001-of-00002.safetensors",
    ] {
        folder.shell(left).ok();
        export(&folder, "new").ok();
        assert!(tree(&folder.path("new")) == tree(&folder.path("hf")), "{left}");
        assert!(!folder.path("new/.lock").exists() && !folder.path("new.unfinished").exists());
        std::fs::remove_dir_all(folder.path("new")).unwrap();
    }
    for theirs in [
        "cp -r hf new.unfinished",
        "cp -r hf new.unfinished && cd new.unfinished && touch .lock notes.txt",
        "mkdir elsewhere && touch elsewhere/.lock && ln -s elsewhere new.unfinished",
        "echo mine > new.unfinished",
    ] {
        folder.shell(theirs).ok();
        let before = folder.shell("find -L new.unfinished elsewhere | sort").stdout;
        export(&folder, "new").refused(73, &["new.unfinished is not what an export left"]);
        assert_eq!(folder.shell("find -L new.unfinished elsewhere | sort").stdout, before);
        folder.shell("rm -r new.unfinished").ok();
    }
    // An export that still runs keeps its lock.
    folder.shell("cp -r hf new.unfinished && touch new.unfinished/.lock").ok();
    let lock = std::fs::File::open(folder.path("new.unfinished/.lock")).unwrap();
    lock.try_lock().unwrap();
    let before = tree(&folder.path("new.unfinished"));
    export(&folder, "new").refused(73, &["another onebox is writing new.unfinished"]);
    assert!(tree(&folder.path("new.unfinished")) == before);
}
