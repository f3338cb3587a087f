//! The remedies that `onebox plan` names for a config that does not fit.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use crate::common::Folder;
use std::path::Path;

#[test]
fn what_does_not_fit_is_refused_with_numbers_and_remedies() {
    let folder = Folder::new();
    let large = ["batch.micro=64", "batch.global=128", "device.memory=\"5MiB\""];
    let small: Vec<&str> = large.iter().flat_map(|set| ["--set", set]).collect();
    let done = folder.onebox(&[&["plan", "tiny.ron"], &small[..]].concat());
    assert_eq!(done.code, 1);
    assert!(done.stdout.contains("GPU memory does not fit"), "{}", done.stdout);
    let remedies: Vec<&str> = done.stdout.lines().filter(|l| l.starts_with("  --set ")).collect();
    assert_eq!(remedies.len(), 3, "{}", done.stdout);
    for remedy in remedies {
        let pasted: Vec<&str> = remedy.split_whitespace().collect();
        let done = folder.onebox(&[&["plan", "tiny.ron"], &small[..], &pasted].concat()).ok();
        assert!(done.stdout.contains("it fits"), "{remedy}: {}", done.stdout);
    }
    folder.train("run", &small).refused(81, &["GPU memory does not fit", "too much", "  --set "]);
    assert!(!folder.path("run").exists());
    // The config needs more than any machine has.
    let sets =
        ["model.layers=1000", "model.hidden=65536", "model.heads=64", "device.memory=\"1000TiB\""];
    let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
    folder.train("run", &sets).refused(80, &["out of host memory"]);
}

/// `plan` suggests dropping the user's numbers of blocks if only these do not fit, and suggests
/// smaller states.
#[test]
fn remedies_leave_out_given_blocks_and_take_smaller_states() {
    let folder = Folder::new();
    let config = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/qwen3-14b-one-gpu.ron");
    let large = ["offload.master=Fp32", "model.layers=50"];
    let small = "  --set offload.master=Split --set offload.moments=Bf16   # 1.00 x the time; other results: ";
    for (sets, remedy) in [
        (&["offload.resident_blocks=30"][..], "  --set offload.resident_blocks=None   #"),
        (&["offload.ring=20"], "  --set offload.ring=None   #"),
        (&large, small),
    ] {
        let args = sets.iter().flat_map(|set| ["--set", set]);
        let args: Vec<&str> = ["plan", config.to_str().unwrap()].into_iter().chain(args).collect();
        let done = folder.onebox(&args);
        assert_eq!(done.code, 1, "{sets:?}");
        assert!(done.stdout.contains(remedy), "no `{remedy}` for {sets:?} in {}", done.stdout);
    }
}

#[test]
fn a_step_too_long_to_play_is_refused_with_a_shorter_one() {
    let folder = Folder::new();
    let simulate = |batch: &str| {
        let sets = ["--set", "batch.micro=1", "--set", batch, "--no-schedules"];
        folder.onebox(&[&["simulate", "tiny.ron", "--box", "dgx-h100"], &sets[..]].concat())
    };
    let refusal = simulate("batch.global=2147483648");
    refusal.refused(78, &["ops, and at most 10000000 are played", "--set batch.global=128"]);
    simulate("batch.global=128").ok();
}
