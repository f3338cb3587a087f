//! Bad input gives an error with key, value and remedy, a code that is not 0, and no file.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use crate::common::{self, Folder, has_strace};
use std::process::{Command, Stdio};

#[test]
fn every_mistake_of_a_config_is_reported_at_once() {
    let folder = Folder::new();
    let wrong = common::TINY
        .replace("hidden: 32", "hiden: 32")
        .replace("lr: 3e-3", "lr: NaN")
        .replace("tensor: 2", "tensor: 3")
        .replace("steps: 4", "steps: \"four\"")
        .replace("layers: 2", "layers: 999999999999999999999999");
    std::fs::write(folder.path("wrong.ron"), wrong).unwrap();
    let texts = [
        "hiden",
        "`hidden`",
        "optimizer.lr",
        "NaN",
        "train.steps",
        "\"four\"",
        "model.layers",
        "999999999999999999999999",
    ];
    for verb in
        [&["train", "wrong.ron"][..], &["config", "check", "wrong.ron"], &["plan", "wrong.ron"]]
    {
        folder.onebox(verb).refused(78, &texts);
    }
    assert!(!folder.path("runs").exists());
}

#[test]
fn each_mistake_names_key_value_and_remedy() {
    let folder = Folder::new();
    let cases: &[(&[&str], &[&str])] = &[
        (&["model.hiden=3"], &["model.hiden", "`hidden`"]),
        (&["parallel.tensr=2"], &["parallel.tensr", "`tensor`"]),
        (&["optimizer.lr=1e999"], &["optimizer.lr", "1e999"]),
        (&["optimizer.lr=-1"], &["optimizer.lr", "-1"]),
        (&["optimizer.beta2=1.0"], &["optimizer.beta2", "1"]),
        (&["precision=Fp8"], &["precision", "Fp8", "Bf16"]),
        (&["device=Gpu"], &["`Gpu`", "did you mean `Cuda`?"]),
        (&["offload.optimizer=Gpu"], &["`Gpu`", "did you mean `Device`?"]),
        (&["model.heads=5"], &["model.heads", "5", "parallel.tensor"]),
        (&["device.count=1"], &["1 device, but tensor 2 x data 2 = 4 ranks"]),
        (&["device.count=1", "parallel.data=1"], &["1 device, but tensor 2 x data 1 = 2 ranks"]),
        (&["parallel.tensor=3", "device.count=6"], &["3 tensor-parallel ranks"]),
        (&["batch.global=7"], &["batch.global", "7"]),
        (&["device.count=3"], &["device", "3"]),
        (&["device.memory=\"12 parsecs\""], &["device.memory", "parsecs"]),
        (&["train.steps=0"], &["train.steps", "0"]),
        (&["model.layers=18446744073709551616"], &["model.layers", "18446744073709551616"]),
        (&["model.hidden=1000000", "model.layers=10000", "model.heads=1000000"], &["model."]),
        (
            &["offload.first_forward=2"],
            &["offload.first_forward", "2 micro-batches at once", "`recompute` to `Block`"],
        ),
        (
            &["offload.optimizer=Split(device_fraction: 1.1)"],
            &["offload.optimizer.device_fraction", "1.1"],
        ),
        (
            &["offload.optimizer=Split(device_fraction: -0.1)"],
            &["offload.optimizer.device_fraction", "-0.1"],
        ),
        (
            &["offload.transfer=Blocking", "offload.update=Delayed(after_step: 40)"],
            &["offload.transfer", "overlaps nothing", "`Serial`"],
        ),
        (&["train.checkpoint_keep=0"], &["train.checkpoint_keep", "0"]),
        (
            &["offload.optimizer=Device", "offload.accumulate=Host"],
            &["offload.accumulate", "offload.optimizer", "`Auto` or `Device`"],
        ),
        (&["nonsense"], &["nonsense", "="]),
    ];
    for (sets, texts) in cases {
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        folder.train("run", &sets).refused(78, texts);
        assert!(!folder.path("run").exists());
    }
    let cuda = ["train", "tiny.ron", "--run-dir", "run", "--set", "device=Cuda"];
    let mut command = folder.command(&cuda);
    // A machine with GPUs hides them here.
    command.env("CUDA_VISIBLE_DEVICES", "");
    Folder::done(command).refused(78, &["`Cuda` cannot be used here", "Cpu(count: N)"]);
    assert!(!folder.path("run").exists());
}

#[test]
fn a_config_that_cannot_be_read_is_not_said_to_be_missing() {
    let folder = Folder::new();
    // Root may read every file, so this file is a link to itself, which nobody can read.
    std::os::unix::fs::symlink("loop.ron", folder.path("loop.ron")).unwrap();
    std::os::unix::fs::symlink("nowhere", folder.path("tiny2.ron")).unwrap();
    std::fs::create_dir_all(folder.path("folder.ron/empty")).unwrap();
    std::fs::copy(folder.path("tiny.ron"), folder.path("folder.ron/other.ron")).unwrap();
    let cases: [(&str, &str, &str); 6] = [
        ("loop.ron", "symbolic links", "check the file and its permissions"),
        ("tiny2.ron", "No such file", "did you mean `./tiny.ron`?"),
        ("tniy.ron", "No such file", "did you mean `./tiny.ron`?"),
        ("tiny.ron/x.ron", "Not a directory", "check the file and its permissions"),
        ("folder.ron", "it is a directory", "in `folder.ron` there is `other.ron`"),
        ("folder.ron/empty", "it is a directory", "no `.ron` file in `folder.ron/empty`"),
    ];
    for (name, why, help) in cases {
        let done = folder.onebox(&["plan", name]).refused(78, &[why, help]);
        assert!(!done.stderr.contains(&format!("mean `./{name}`")), "{}", done.stderr);
    }
}

#[test]
fn a_file_of_another_kind_is_told_where_it_belongs() {
    let folder = Folder::new();
    let box_ = r#"(gpus: 4, gpu_memory: "2GiB", node_memory: "8GiB")"#;
    std::fs::write(folder.path("box.ron"), box_).unwrap();
    let xml = "<?xml version=\"1.0\"?>\n<!DOCTYPE topology SYSTEM \"hwloc2.dtd\">\n<topology/>\n";
    std::fs::write(folder.path("box.xml"), xml).unwrap();
    let cases: &[(&[&str], &[&str])] = &[
        (&["tiny.ron", "--box", "tiny.ron"], &["is a training config, not a box", "dgx2.ron"]),
        (&["tiny.ron", "--box", "box.xml"], &["is an XML", "not a box", "topology --xml FILE"]),
        (&["box.ron"], &["is the description of a box, not a config", "`--box FILE`"]),
        (&["box.xml"], &["is an XML", "not a config", "`onebox topology --xml FILE`"]),
    ];
    for (arguments, texts) in cases {
        let done = folder.onebox(&[&["plan"], *arguments].concat()).refused(78, texts);
        assert!(done.stderr.contains("1 error in"), "{}", done.stderr);
    }
    // A key of a box is an unknown key in a config, like any other.
    let more = ["plan", "tiny.ron", "--set", "gpu_memory=\"2GiB\""];
    folder.onebox(&more).refused(78, &["a config has no key `gpu_memory`"]);
}

#[test]
fn data_that_cannot_be_used_is_refused_by_name() {
    let folder = Folder::new();
    std::fs::write(folder.path("empty.txt"), "").unwrap();
    std::fs::write(folder.path("short.txt"), "too short").unwrap();
    std::fs::write(folder.path("odd.bin"), [0; 1001]).unwrap();
    std::fs::create_dir(folder.path("nothing")).unwrap();
    let cases: &[(&[&str], &[&str])] = &[
        (&["data.train=\"absent.txt\""], &["data.train", "absent.txt", "no such file"]),
        (&["data.train=\"empty.txt\""], &["data.train", "empty.txt", "empty"]),
        (&["data.train=\"short.txt\""], &["short.txt", "9 in all", "seq_len 16"]),
        (&["data.train=\"nothing\""], &["nothing", "no usable file: it has none. A"]),
        (&["data.train=\"*.absent\""], &["*.absent", "no file matches"]),
        (&["data.validation=\"absent.txt\""], &["data.validation", "absent.txt"]),
        (&["data.train=\"odd.bin\"", "data.format=U16"], &["odd.bin", "1001 bytes"]),
        (
            &["data.train=\"text.txt\"", "data.format=U16", "model.vocab=300"],
            &["model.vocab is 300"],
        ),
        (&["data.train=\"/dev/null\""], &["/dev/null", "regular file"]),
        (&["model.seq_len=30000"], &["seq_len 30000", "text.txt"]),
    ];
    for (sets, texts) in cases {
        let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
        folder.train("run", &sets).refused(66, texts);
        assert!(!folder.path("run").exists());
    }
}

#[test]
fn wrong_arguments_and_places_have_codes_of_their_own() {
    let folder = Folder::new();
    folder.onebox(&["train"]).refused(2, &["<CONFIG>"]);
    folder.onebox(&["trian", "tiny.ron"]).refused(2, &["train"]);
    folder.onebox(&["train", "absent.ron"]).refused(78, &["absent.ron", "tiny.ron"]);
    folder.train("text.txt", &[]).refused(73, &["text.txt is not a directory"]);
    folder.train("text.txt/run", &[]).refused(74, &["text.txt/run"]);
}

/// `onebox` with `args`, while the disk is full for the file at `path`.
fn on_a_full_disk(folder: &Folder, path: &str, args: &[&str]) -> Command {
    let mut command = Command::new("strace");
    command.args(["-f", "-qq", "-o"]).arg(folder.path("strace.log"));
    command.arg("-P").arg(folder.path(path)).args(["-e", "trace=write,writev,pwrite64"]);
    command.args(["-e", "inject=write,writev,pwrite64:error=ENOSPC"]);
    command.arg(env!("CARGO_BIN_EXE_onebox")).args(args).current_dir(folder.path(""));
    command
}

#[test]
fn a_full_disk_is_not_a_success() {
    if !has_strace() {
        return;
    }
    let folder = Folder::new();
    // The path is that of the unfinished weights.
    let path = "run/.weights.safetensors.tmp";
    let full = on_a_full_disk(&folder, path, &["train", "tiny.ron", "--run-dir", "run", "-q"]);
    Folder::done(full).refused(74, &["the weights are not written", "No space left"]);
    assert!(!folder.path("run/weights.safetensors").exists());
    // The run is not finished, so the next one trains.
    assert!(folder.metrics("run").iter().all(|line| line["kind"] != "end"));
    folder.train("run", &["-q", "--resume"]).ok();
    assert!(folder.path("run/weights.safetensors").exists());
}

#[test]
fn a_full_output_is_not_a_success() {
    let folder = Folder::new();
    folder.train("run", &["-q"]).ok();
    for args in [&["plan", "tiny.ron"][..], &["generate", "run"], &["config", "show", "tiny.ron"]] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let status = folder.command(args).stdout(full).status().unwrap();
        assert_eq!(status.code(), Some(74), "{args:?}");
    }
}

#[test]
fn a_log_that_cannot_be_written_does_not_end_a_run() {
    if !has_strace() {
        return;
    }
    let folder = Folder::new();
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    let args = ["train", "tiny.ron", "--run-dir", "run", "--set", "train.steps=30"];
    let mut command = on_a_full_disk(&folder, "run/metrics.jsonl", &args);
    let status = command.stdin(Stdio::null()).stderr(full).status().unwrap();
    assert_eq!(status.code(), Some(74), "the metrics are missing, the weights are not");
    assert!(folder.path("run/weights.safetensors").exists());
    assert_eq!(folder.read("run/metrics.jsonl"), "");
}

#[test]
fn no_output_replaces_what_onebox_did_not_write_as_one() {
    let folder = Folder::new();
    let tiny = folder.read("tiny.ron");
    let bare = "(gpus: 4, gpu_memory: \"8GiB\", node_memory: \"64GiB\")";
    std::fs::write(folder.path("bare.ron"), bare).unwrap();
    for (args, what) in [
        (&["bench", "--save-box"][..], "box"),
        (&["bench", "step", "tiny.ron", "--trace"], "trace"),
        (&["simulate", "tiny.ron", "--box", "bare.ron", "--trace"], "trace"),
        (&["train", "tiny.ron", "--run-dir", "run", "--trace-steps", "1..2", "--trace"], "trace"),
    ] {
        let theirs = format!("no {what} that onebox wrote");
        for (path, texts) in [
            ("tiny.ron", ["tiny.ron", &theirs, "another name"]),
            ("text.txt", ["text.txt", &theirs, "another name"]),
            ("nope/h.ron", ["nope/h.ron", "no directory nope", ""]),
            (".", [".", "it is a directory", ""]),
        ] {
            let done = folder.onebox(&[args, &[path]].concat()).refused(74, &texts);
            assert!(!done.stderr.contains("measuring"), "{}", done.stderr);
        }
    }
    assert_eq!(folder.read("tiny.ron"), tiny);
    assert!(!folder.path("run").exists());
    // A trace replaces a trace or an empty file, and may be inside of the run.
    std::fs::write(folder.path("empty"), "").unwrap();
    for path in ["run/trace.json", "run/trace.json", "empty"] {
        let traced = ["-q", "--overwrite", "--trace", path, "--trace-steps", "1..2"];
        folder.train("run", &traced).ok();
        assert!(folder.read(path).contains("traceEvents"), "{path}");
    }
}

/// A file in the place of the checkpoint folder makes a run end without its last checkpoint.
#[test]
fn a_trace_that_cannot_be_written_hides_nothing_of_how_a_run_ends() {
    let folder = Folder::new();
    std::fs::create_dir(folder.path("owing")).unwrap();
    std::fs::write(folder.path("owing/checkpoints"), "").unwrap();
    let traced = ["--trace", "/dev/full", "--trace-steps", "1..2"];
    let saving = ["--set", "train.checkpoint_every=4"];
    let cannot = "cannot write /dev/full: No space left";
    let owing = folder.train("owing", &[&traced[..], &saving].concat());
    let warned = format!("warning: {cannot}");
    owing.refused(83, &["the run has ended after step 4, whose checkpoint is NOT SAVED", &warned]);
    assert!(folder.path("owing/weights.safetensors").exists());
    // If nothing else fails, the trace is the error.
    let done = folder.train("run", &traced).refused(74, &["done    4 steps", "error: ", cannot]);
    assert!(!done.stderr.contains("warning"), "{}", done.stderr);
    assert_eq!(folder.metrics("run").last().unwrap()["kind"], "end");
}

/// Pipes that a user, a config or a folder names; a config and a prompt may be pipes.
#[test]
fn no_pipe_is_waited_for() {
    let folder = Folder::new();
    folder.train("run", &["-q"]).ok();
    folder.shell("mkdir model && mkfifo model/config.json pipe.ron && rm run/weights.safetensors && mkfifo run/weights.safetensors").ok();
    let no_file = "it is not a regular file";
    folder
        .onebox(&["plan", "--model", "model", "--box", "dgx2"])
        .refused(78, &["model/config.json", no_file]);
    let of_folder = ["config", "check", "tiny.ron", "--set", "model=(from: \"model\")"];
    folder.onebox(&of_folder).refused(78, &["model/config.json", no_file]);
    folder.onebox(&["plan", "tiny.ron", "--box", "pipe.ron"]).refused(78, &["pipe.ron", no_file]);
    folder
        .onebox(&["plan", "tiny.ron", "--box", "pip.ron"])
        .refused(78, &["there is no such file"]);
    folder
        .onebox(&["generate", "run", "--prompt", "a"])
        .refused(74, &["weights.safetensors", no_file]);
    let onebox = env!("CARGO_BIN_EXE_onebox");
    let line =
        format!("exec {onebox} config check <(cat tiny.ron) --set 'data.train=\"text.txt\"'");
    let mut command = Command::new("bash");
    command.args(["-c", &line]).current_dir(folder.path(""));
    Folder::done(command).ok();
    // The pipe is read once, so a run's proposals at its end use the run's own config.
    folder.shell("mkfifo once.ron").ok();
    let (from, to) = (folder.path("tiny.ron"), folder.path("once.ron"));
    let writer = std::thread::spawn(move || std::fs::copy(from, to).unwrap());
    let sets = ["-q", "--run-dir", "piped"];
    let done = folder.onebox(&[&["train", "once.ron"], &sets[..]].concat()).ok();
    writer.join().unwrap();
    assert!(!done.stdout.contains("once.ron"), "{}", done.stdout);
}
