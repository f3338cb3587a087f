//! The start-up proof of `train`, with a stand-in for the driver that computes wrong numbers on
//! demand.
#![allow(missing_docs, reason = "a test")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]
#![allow(clippy::allow_attributes, reason = "the lines above")]

use crate::common::{CommandOutput, Folder};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

const PROVEN: &str = "of one block and the head agree with the cpu backend";

/// Starts `run` on four GPUs of the stand-in.
fn train(folder: &Folder, run: &str, sets: &[&str], variables: &[(&str, &str)]) -> CommandOutput {
    let sets = sets.iter().flat_map(|set| ["--set", *set]);
    let words = ["train", "tiny.ron", "--run-dir", run, "--set", "device=Cuda"];
    let args: Vec<&str> = words.into_iter().chain(sets).collect();
    let mut command = folder.command(&args);
    command.env("LD_LIBRARY_PATH", fake_cuda::library_folder());
    command.env("XDG_CACHE_HOME", folder.path("cache")).env("FAKECUDA_DEVICES", "4");
    command.envs(variables.iter().copied());
    Folder::done(command)
}

/// The verdicts in the cache.
fn verdicts(folder: &Folder) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder.path("cache/onebox")).into_iter().flatten().flatten();
    let is_verdict = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("proof-"))
    };
    let mut all: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(is_verdict).collect();
    all.sort();
    all
}

/// Words for `--set`, texts of a message, and variables of the stand-in.
type Words<'a> = &'a [&'a str];
type Variables<'a> = &'a [(&'a str, &'a str)];

const WRONG: [(&str, &str); 1] = [("FAKECUDA_WRONG", "gemm")];

#[test]
fn a_gpu_is_proven_once_for_each_driver_and_shape() {
    let folder = Folder::new();
    let first = train(&folder, "first", &[], &[]).ok();
    assert!(first.stderr.contains(PROVEN), "{}", first.stderr);
    assert_eq!(verdicts(&folder).len(), 1);
    // A known verdict is not checked again, even if it would not hold any more.
    let later = train(&folder, "later", &["optimizer.lr=2e-3"], &WRONG).ok();
    assert!(!later.stderr.contains(PROVEN), "{}", later.stderr);
    let others: [(Words<'_>, Variables<'_>); 6] = [
        (&[], &[("FAKECUDA_DRIVER", "13010")]),
        (&[], &[("FAKECUDA_CUBLASLT", "120800")]),
        (&[], &[("FAKECUDA_NVRTC", "12.8")]),
        (&[], &[("FAKECUDA_SM", "90")]),
        (&["batch.micro=1"], &[]),
        (&["precision=Fp16"], &[]),
    ];
    for (number, (sets, variables)) in others.into_iter().enumerate() {
        let done = train(&folder, &format!("other-{number}"), sets, variables).ok();
        assert!(done.stderr.contains(PROVEN), "{sets:?} {variables:?}: {}", done.stderr);
        assert_eq!(verdicts(&folder).len(), 2 + number);
    }
}

#[test]
fn a_gpu_with_wrong_results_is_refused_before_anything_is_written() {
    let folder = Folder::new();
    let hopper = ("FAKECUDA_SM", "90");
    let cases: [(Words<'_>, Variables<'_>, Words<'_>); 9] = [
        (&[], &[("FAKECUDA_WRONG", "gemm")], &["gemm at ", "cuBLASLt 12.9.0 computes it"]),
        (&["precision=Fp32"], &[("FAKECUDA_WRONG", "tf32")], &["gemm at ", "cuBLASLt 12.9.0"]),
        (
            &["precision=Fp8", "model.heads=2"],
            &[("FAKECUDA_WRONG", "gemm"), hopper],
            &["scaled_gemm at ", "cuBLASLt 12.9.0"],
        ),
        (
            &["attention=Cudnn", "parallel.tensor=1"],
            &[("FAKECUDA_WRONG", "graph"), hopper],
            &["attention at ", "cuDNN 9.19.0 computes it: set `attention: Own`"],
        ),
        (&[], &[("FAKECUDA_WRONG", "nccl")], &["all_reduce at ", "NCCL 2.24.3"]),
        (
            &[],
            &[("FAKECUDA_WRONG", "copy")],
            &["op 1, copy at ", "`batch`", "install another driver"],
        ),
        (
            &[],
            &[("FAKECUDA_WRONG", "kernel=attention_mma_64")],
            &["attention at ", "which NVRTC 12.9 compiled"],
        ),
        (
            &["precision=Fp32"],
            &[("FAKECUDA_WRONG", "kernel=attention_keys_64")],
            &["attention_backward at ", "which NVRTC 12.9 compiled"],
        ),
        // Adapters are computed with frozen weights, which are not zero.
        (
            &["adapter=Lora(rank: 4, dropout: 0.1)"],
            &[("FAKECUDA_WRONG", "kernel=attention_mma_64")],
            &["attention at ", "which NVRTC 12.9 compiled"],
        ),
    ];
    for (sets, variables, texts) in cases {
        let texts = [texts, &["start-up proof: GPU ", "nothing was written", "train.proof: false"]]
            .concat();
        train(&folder, "run", sets, variables).refused(76, &texts);
        assert!(!folder.path("run").exists(), "{variables:?}");
        assert!(verdicts(&folder).is_empty(), "{variables:?}");
    }
    // Who trusts the GPU more than the proof may train.
    train(&folder, "run", &["train.proof=false"], &WRONG).ok();
    assert!(verdicts(&folder).is_empty());
}

#[test]
fn a_verdict_that_is_damaged_of_another_or_open_to_others_is_none() {
    let folder = Folder::new();
    train(&folder, "first", &[], &[]).ok();
    train(&folder, "other", &["batch.micro=1"], &[]).ok();
    let all = verdicts(&folder);
    let kept: Vec<Vec<u8>> = all.iter().map(|path| fs::read(path).unwrap()).collect();
    let open = |path: &PathBuf, mode| {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    };
    let refuses = |what: &str| {
        let done = train(&folder, "wrong", &[], &WRONG).refused(76, &["gemm at "]);
        assert!(!folder.path("wrong").exists(), "{what}: {}", done.stderr);
    };
    // The file of this run is one of the two; both change.
    for (path, kept) in all.iter().zip(&kept) {
        let mut bytes = kept.clone();
        bytes[5] ^= 1;
        fs::write(path, bytes).unwrap();
    }
    refuses("damaged");
    for (path, kept) in all.iter().zip(&kept) {
        fs::write(path, &kept[..kept.len() / 2]).unwrap();
    }
    refuses("cut");
    for (path, kept) in all.iter().zip(kept.iter().rev()) {
        fs::write(path, kept).unwrap();
    }
    refuses("of another");
    for (path, kept) in all.iter().zip(&kept) {
        fs::write(path, kept).unwrap();
        open(path, 0o666);
    }
    refuses("open to others");
    all.iter().for_each(|path| open(path, 0o600));
    train(&folder, "again", &[], &WRONG).ok();
}

#[test]
fn without_a_cache_the_proof_runs_at_every_start() {
    let folder = Folder::new();
    fs::write(folder.path("cache"), "no folder").unwrap();
    for run in ["first", "second"] {
        let done = train(&folder, run, &[], &[]).ok();
        assert!(done.stderr.contains(PROVEN), "{}", done.stderr);
    }
    train(&folder, "wrong", &[], &WRONG).refused(76, &["gemm at "]);
}
