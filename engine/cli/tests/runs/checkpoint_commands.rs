//! `onebox checkpoint`: its output, its findings, and equal states in another layout.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use crate::common::{CommandOutput, Folder, has_strace};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

/// Trains a run with checkpoints of steps 2 and 4 on a grid of ranks.
fn trained(folder: &Folder, run: &str, more: &[&str]) {
    let sets = ["train.checkpoint_every=2", "sample.tokens=0"];
    let sets: Vec<&str> = sets.iter().chain(more).flat_map(|set| ["--set", *set]).collect();
    folder.train(run, &[&["-q"], &sets[..]].concat()).ok();
}

fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let read = |entry: std::io::Result<std::fs::DirEntry>| {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        (name, std::fs::read(path).unwrap())
    };
    std::fs::read_dir(folder).unwrap().map(read).collect()
}

#[test]
fn a_checkpoint_is_shown_from_its_manifest() {
    let folder = Folder::new();
    trained(&folder, "run", &[]);
    for path in ["run", "run/checkpoints", "run/checkpoints/step-00000004"] {
        let shown = folder.onebox(&["checkpoint", "show", path]).ok().stdout;
        for text in [
            "step-00000004",
            "4, trained on 512 tokens; 4 updates applied, 0 skipped",
            "2 layers, hidden 32, 4 heads, 16 tokens, vocabulary 256",
            "TP 2 x DP 2, Bf16",
            "h.1.attn.qkv.weight          96 x 32            3072  0-1\n",
            "h.0.ln_1.weight                   32              32  2\n",
            "412.35 KiB in 4 files",
        ] {
            assert!(shown.contains(text), "`{text}` is not in:\n{shown}");
        }
        assert_eq!(path == "run/checkpoints/step-00000004", !shown.contains("step-00000002"));
    }
    let json = folder.onebox(&["checkpoint", "show", "run", "--json"]).ok().stdout;
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["step"], 4);
    assert_eq!(json["files"].as_array().unwrap().len(), 4);
    assert_eq!(json["tensors"][0]["name"], "wte");
    assert_eq!(json["tensors"][0]["shape"], serde_json::json!([256, 32]));
    let elements = |t: &serde_json::Value| t["elements"].as_u64().unwrap();
    let all: u64 = json["tensors"].as_array().unwrap().iter().map(elements).sum();
    // Number of parameters: V C + T C + L (12 C^2 + 13 C) + 2 C.
    assert_eq!(all, 256 * 32 + 16 * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 2 * 32);
    std::fs::create_dir(folder.path("empty")).unwrap();
    folder.onebox(&["checkpoint", "show", "empty"]).refused(66, &["empty", "no checkpoint"]);
    folder.onebox(&["checkpoint", "show", "nowhere"]).refused(66, &["nowhere"]);
}

#[test]
fn verify_names_the_file_and_the_tensor() {
    let folder = Folder::new();
    trained(&folder, "run", &[]);
    let whole = folder.onebox(&["checkpoint", "verify", "run"]).ok().stdout;
    assert_eq!(whole.matches(": whole").count(), 2, "{whole}");
    // A copy may have any name; its step comes from its contents.
    let copy = "cp -r run/checkpoints/step-00000002 kept";
    folder.shell(copy).ok();
    folder.onebox(&["checkpoint", "verify", "kept"]).ok();
    folder.shell("cp -r run/checkpoints/step-00000002 step-00000003").ok();
    let of_another = folder.onebox(&["checkpoint", "verify", "step-00000003"]);
    assert!(of_another.stdout.contains("it is of step 2"), "{}", of_another.stdout);
    for (file, tensor) in [("rank-00001", ".variance`"), ("rank-00003", ".variance`")] {
        let path = folder.path(&format!("run/checkpoints/step-00000004/{file}.safetensors"));
        let mut bytes = std::fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        let found = folder.onebox(&["checkpoint", "verify", "run"]);
        let line = found.stdout.lines().find(|line| line.contains(file)).unwrap();
        assert!(line.contains("is broken") && line.contains(tensor), "{line}");
        assert!(found.stdout.contains("step-00000002: whole"), "{}", found.stdout);
        found.refused(82, &["1 of 2 checkpoints cannot be used"]);
    }
    // Both broken files are named, not only the first one.
    let found = folder.onebox(&["checkpoint", "verify", "run/checkpoints/step-00000004"]);
    assert_eq!(found.stdout.matches("is broken").count(), 2, "{}", found.stdout);
}

#[test]
fn a_file_that_cannot_be_read_is_not_said_to_be_broken() {
    if !has_strace() {
        return;
    }
    let folder = Folder::new();
    trained(&folder, "run", &[]);
    // Root may read every file, so strace makes the system refuse one file.
    let refused = |file: &str| {
        let path = folder.path("run/checkpoints/step-00000004").canonicalize().unwrap().join(file);
        let mut command = Command::new("strace");
        command.args(["-f", "-o", "/dev/null", "-e", "trace=read,pread64", "-P"]).arg(path);
        command.args(["-e", "inject=read,pread64:error=EIO"]);
        let onebox = [env!("CARGO_BIN_EXE_onebox"), "checkpoint", "verify", "run"];
        Folder::done({
            command.args(onebox).current_dir(folder.path(""));
            command
        })
    };
    for file in ["rank-00001.safetensors", "MANIFEST"] {
        let done = refused(file);
        assert!(done.stdout.contains("step-00000002: whole"), "{}", done.stdout);
        assert!(done.stdout.contains(&format!("{file}: Input/output error")), "{}", done.stdout);
        done.refused(74, &["1 of 2 checkpoints could not be read"]);
    }
    // With another broken file, the checkpoint is broken even if the rest is unreadable.
    std::fs::write(folder.path("run/checkpoints/step-00000004/rank-00003.safetensors"), "")
        .unwrap();
    refused("rank-00001.safetensors").refused(82, &["1 of 2 checkpoints cannot be used"]);
    // A missing file is no error of the system.
    std::fs::remove_file(folder.path("run/checkpoints/step-00000002/MANIFEST")).unwrap();
    folder.onebox(&["checkpoint", "verify", "run"]).refused(82, &["cannot be used"]);
}

#[test]
fn diff_tells_what_the_configs_and_the_bits_say() {
    let folder = Folder::new();
    trained(&folder, "run", &[]);
    trained(&folder, "same", &["offload.update=Serial"]);
    trained(&folder, "other", &["train.seed=8", "parallel.data=1", "device.count=2"]);
    let same = folder.onebox(&["checkpoint", "diff", "run", "same"]).ok().stdout;
    for text in [
        "offload.update",
        "Overlapped -> Serial",
        "same experiment, different placement",
        "tensors are bit-equal",
    ] {
        assert!(same.contains(text), "`{text}` is not in:\n{same}");
    }
    let other = folder.onebox(&["checkpoint", "diff", "run", "other"]);
    assert_eq!(other.code, 1, "{}", other.stderr);
    for text in
        ["another experiment", "train.seed", "1337 -> 8", "parallel.data", "h.0.mlp.fc.weight"]
    {
        assert!(other.stdout.contains(text), "`{text}` is not in:\n{}", other.stdout);
    }
    let [a, b] = ["2", "4"].map(|step| format!("run/checkpoints/step-0000000{step}"));
    let json = folder.onebox(&["checkpoint", "diff", &a, &b, "--json"]);
    assert_eq!(json.code, 1);
    let json: serde_json::Value = serde_json::from_str(&json.stdout).unwrap();
    assert_eq!((&json["equal"], &json["a"]["step"]), (&false.into(), &2.into()));
    let difference = json["tensors"][0]["master"]["max_abs"].as_f64().unwrap();
    assert!((1e-6..0.1).contains(&difference), "{difference}");
    trained(&folder, "wide", &["model.hidden=64"]);
    let wide = folder.onebox(&["checkpoint", "diff", "run", "wide"]);
    assert_eq!(wide.code, 1);
    assert!(wide.stdout.contains("[256, 32] and [256, 64]"), "{}", wide.stdout);
}

#[test]
fn another_layout_and_back_is_the_same_files() {
    let folder = Folder::new();
    let layouts = [(2, 2), (1, 4), (4, 1)];
    for (tp, dp) in layouts {
        let from = format!("run-{tp}-{dp}");
        let grid = [
            format!("parallel.tensor={tp}"),
            format!("parallel.data={dp}"),
            "model.vocab=257".into(),
            "offload.bucket_elements=2048".into(),
        ];
        trained(&folder, &from, &grid.each_ref().map(String::as_str));
        let reshard = |from: &str, (tp, dp): (usize, usize), out: &str| {
            let (tp, dp) = (tp.to_string(), dp.to_string());
            let args = ["checkpoint", "reshard", from, "--tp", &tp, "--dp", &dp, out];
            folder.onebox(&args)
        };
        let other = if (tp, dp) == (4, 1) { (1, 2) } else { (4, 1) };
        let (other_layout, same_layout) = (format!("there-{tp}-{dp}"), format!("back-{tp}-{dp}"));
        reshard(&from, other, &other_layout).ok();
        reshard(&other_layout, (tp, dp), &same_layout).ok();
        let step = "checkpoints/step-00000004";
        let [was, moved, is] = [&from, &other_layout, &same_layout]
            .map(|run| files(&folder.path(&format!("{run}/{step}"))));
        assert_eq!(moved.len(), other.0 * other.1 + 1);
        assert!(was == is, "TP {tp} x DP {dp}: {:?} and {:?}", was.keys(), is.keys());
        reshard(&from, other, &other_layout).refused(73, &["already holds a run"]);
        reshard(&from, (3, 1), "three").refused(78, &["4 heads cannot be split evenly over 3"]);
        assert!(!folder.path("three").exists());
    }
    let more = ["--set", "optimizer.lr=2e-3"];
    let args = ["checkpoint", "reshard", "run-2-2", "lr", "--tp", "1", "--dp", "1"];
    folder.onebox(&[&args, &more[..]].concat()).refused(78, &["optimizer.lr", "0.003 -> 0.002"]);
}

#[test]
fn a_run_goes_on_from_another_layout_as_from_its_own() {
    let folder = Folder::new();
    trained(&folder, "run", &[]);
    let args = ["checkpoint", "reshard", "run", "moved", "--tp", "4", "--dp", "1"];
    folder.onebox(&args).ok();
    let sets = ["train.steps=6", "schedule.decay_steps=4", "parallel.tensor=4", "parallel.data=1"];
    let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", *set]).collect();
    for run in ["run", "moved"] {
        folder.train(run, &[&["--fork", "-q"], &sets[..]].concat()).ok();
    }
    assert_eq!(folder.hash("run-2"), folder.hash("moved-2"));
}

/// Changes the config in the manifest of the newest checkpoint of `run`.
fn with_config(folder: &Folder, run: &str, change: impl FnOnce(&str) -> String) {
    let path = folder.path(&format!("{run}/checkpoints/step-00000004/MANIFEST"));
    let manifest = std::fs::read_to_string(&path).unwrap();
    let mut json: serde_json::Value =
        serde_json::from_str(manifest.lines().next().unwrap()).unwrap();
    let config = json["config"].as_str().unwrap();
    let changed = change(config);
    assert_ne!(config, changed);
    json["config"] = changed.into();
    let json = json.to_string();
    let seal = xxhash_rust::xxh3::xxh3_128(json.as_bytes());
    std::fs::write(&path, format!("{json}\n{seal:032x}\n")).unwrap();
}

/// Checks each command that reads a checkpoint's config; a hang is ended with code 124.
fn commands_on(folder: &Folder, run: &str, check: impl Fn(CommandOutput)) {
    let train = ["train", "tiny.ron", "--run-dir", run, "--resume", "-q", "--set"];
    let all: [&[&str]; 5] = [
        &["checkpoint", "show", run],
        &["checkpoint", "diff", run, run],
        &["checkpoint", "export", run, "out", "--to", "safetensors"],
        &["checkpoint", "reshard", run, "resharded", "--tp", "1", "--dp", "1"],
        &[&train[..], &["train.steps=6", "--set", "schedule.decay_steps=4"]].concat(),
    ];
    for args in all {
        let mut command = Command::new("timeout");
        command.args(["20", env!("CARGO_BIN_EXE_onebox")]).args(args);
        command.current_dir(folder.path("."));
        check(Folder::done(command));
    }
}

/// A forged checkpoint may name any file in its config.
#[test]
fn a_config_in_a_manifest_opens_no_file() {
    let folder = Folder::new();
    trained(&folder, "run", &[]);
    folder.shell("mkfifo box.ron").ok();
    let path = folder.path("box.ron").display().to_string();
    with_config(&folder, "run", |config| {
        let (from, to) =
            (config.find("device: Cpu(").unwrap(), config.find("    model: ").unwrap());
        format!("{}device: Sim(box: {path:?}),\n{}", &config[..from], &config[to..])
    });
    commands_on(&folder, "run", |done| {
        let words = "a checkpoint's config names the box";
        done.refused(82, &["device.box", words, "use a checkpoint of a run"]);
    });
    assert!(!folder.path("out").exists() && !folder.path("resharded").exists());
}

/// A later version may drop keys and add others.
#[test]
fn a_config_of_another_version_is_read_with_what_is_known_of_it() {
    let folder = Folder::new();
    trained(&folder, "run", &[]);
    with_config(&folder, "run", |config| {
        let known = |line: &&str| !line.contains("checkpoint_overhead:");
        let lines: Vec<&str> = config.lines().filter(known).collect();
        assert!(lines.len() < config.lines().count(), "{config}");
        let text = lines.join("\n").replacen("train: (", "train: (warp_speed: 9, ", 1);
        text.replacen("model: (", "flux: (capacitor: true), model: (", 1)
    });
    commands_on(&folder, "run", |done| {
        let output = done.ok().stderr;
        for text in [
            "step-00000004",
            "its config has `flux`, `train.warp_speed`, which",
            "does not know: ignored",
        ] {
            assert!(output.contains(text), "`{text}` is not in:\n{output}");
        }
        assert!(!output.contains("another experiment"), "{output}");
    });
    // Settings of the user are still checked.
    let args = ["checkpoint", "reshard", "run", "other", "--tp", "1", "--dp", "1"];
    let more = ["--set", "train.warp_speed=9"];
    folder.onebox(&[&args, &more[..]].concat()).refused(78, &["unknown key", "warp_speed"]);
}

/// Text generation needs only the model size and the kind of tokens from a run's config.
#[test]
fn a_text_is_drawn_by_a_config_of_another_version_and_without_its_box() {
    let folder = Folder::new();
    trained(&folder, "run", &[]);
    let args = ["generate", "run", "--prompt", "the ", "--tokens", "8", "--temperature", "0"];
    let drawn = folder.onebox(&args).ok().stdout;
    folder.shell("mkfifo box.ron").ok();
    let (path, config) =
        (folder.path("box.ron").display().to_string(), folder.read("run/config.ron"));
    let (from, to) = (config.find("device: Cpu(").unwrap(), config.find("    model: ").unwrap());
    let device = format!("device: Sim(box: {path:?}),\n");
    let known = |line: &&str| !line.contains("checkpoint_overhead:");
    let text = [&config[..from], &device, &config[to..]].concat();
    let text = text.lines().filter(known).collect::<Vec<_>>().join("\n");
    let text = text.replacen("train: (", "train: (warp_speed: 9, ", 1);
    let text = text.replacen("model: (", "flux: (capacitor: true), model: (", 1);
    std::fs::write(folder.path("run/config.ron"), text).unwrap();
    for left in ["weights.safetensors", "checkpoints"] {
        let mut command = Command::new("timeout");
        command.args(["20", env!("CARGO_BIN_EXE_onebox")]).args(args);
        command.current_dir(folder.path("."));
        let done = Folder::done(command).ok();
        assert_eq!(done.stdout, drawn);
        for text in ["run/config.ron", "`flux`, `train.warp_speed`, which", "not know: ignored"] {
            assert!(done.stderr.contains(text), "`{text}` is not in:\n{}", done.stderr);
        }
        // The text then comes from the newest checkpoint.
        folder.shell(&format!("rm -rf run/{left}")).ok();
    }
}
