//! `offload.update: Auto` and `offload.speculated_fraction: Auto` from the view of a user.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use crate::common::Folder;
use serde_json::Value;
use std::path::Path;

const AUTO: [&str; 2] = ["--set", "offload.update=Auto"];

fn config(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs").join(name).display().to_string()
}

/// Result of `verb` for 70B on a DGX-2, with a batch and more settings.
fn of_70b(folder: &Folder, verb: &str, batch: usize, more: &[&str]) -> Value {
    let (path, batch) = (config("dgx2-70b.ron"), format!("batch.global={batch}"));
    let args = [&[verb, &path, "--json", "--set", &batch], more].concat();
    let done = folder.onebox(&args);
    serde_json::from_str(&done.stdout).unwrap_or_else(|e| panic!("{e}: {}", done.stdout))
}

/// The share in the sentence about `Auto`.
fn share(report: &Value) -> String {
    let why = report["chosen"].as_str().unwrap();
    let rest = why.strip_prefix("offload.update: Auto is Speculative with a share of ").unwrap();
    let (share, rest) = rest.split_once(':').unwrap();
    assert!(rest.contains("(simulated)") && rest.contains("more of the host's memory"), "{why}");
    share.to_owned()
}

#[test]
fn on_a_described_box_the_update_is_chosen_by_time() {
    let folder = Folder::new();
    let alone =
        |more: &[&str]| of_70b(&folder, "simulate", 16, &[&["--no-schedules"], more].concat());
    let seconds = |report: &Value| report["step_seconds"].as_f64().unwrap();
    let auto = alone(&AUTO);
    let with_share = |share: &str| {
        let share = format!("offload.speculated_fraction={share}");
        alone(&["--set", "offload.update=Speculative", "--set", &share])
    };
    let chosen = with_share(&share(&auto));
    assert_eq!((seconds(&auto), &auto["fits"]), (seconds(&chosen), &chosen["fits"]));
    assert!(auto["fits"] == true && seconds(&auto) < 0.9 * seconds(&alone(&[])));
    // A larger share would gain almost no time for its memory.
    assert!(seconds(&auto) < 1.06 * seconds(&with_share("1")));
    assert_eq!(alone(&[])["chosen"], Value::Null);
}

#[test]
fn the_share_is_no_larger_than_what_fits() {
    let folder = Folder::new();
    let share_of = |report: &Value| share(report).parse::<f64>().unwrap();
    let [few, many] = [16, 32].map(|batch| of_70b(&folder, "plan", batch, &AUTO));
    assert!(few["fits"] == true && many["fits"] == true);
    assert!(share_of(&many) < share_of(&few), "sums of two micro-batches take host memory");
    let next = format!("offload.speculated_fraction={}", share_of(&many) + 0.05);
    let (path, speculative) = (config("dgx2-70b.ron"), "offload.update=Speculative");
    let sets = ["--set", "batch.global=32", "--set", speculative, "--set", &next];
    assert_ne!(folder.onebox(&[&["plan", &path], &sets[..]].concat()).code, 0, "more would fit");
}

#[test]
fn where_nothing_is_gained_the_update_stays_overlapped_and_its_memory_free() {
    let folder = Folder::new();
    let plain = of_70b(&folder, "plan", 512, &[]);
    let report = of_70b(&folder, "plan", 512, &AUTO);
    let why = report["chosen"].as_str().unwrap();
    let begins = "offload.update: Auto is Overlapped: Speculative gains less than 1 %: ";
    assert!(why.starts_with(begins), "{why}");
    assert_eq!(report["host_per_rank"]["bytes"], plain["host_per_rank"]["bytes"]);
    // The last of many backward passes is too short on any box.
    let report = of_70b(&folder, "plan", 512, &[&AUTO[..], &["--set", "batch.micro=1"]].concat());
    let why = report["chosen"].as_str().unwrap();
    assert!(why.contains("at most 0.3 % of a step of 256 micro-batches"), "{why}");
}

#[test]
fn a_run_says_and_keeps_what_auto_stands_for() {
    let folder = Folder::new();
    let auto = folder.train("auto", &AUTO).ok();
    let why = "offload.update: Auto is Overlapped: virtual GPUs compute on the cores that update";
    assert!(
        auto.stderr.contains(why) && auto.stderr.contains("update Overlapped by"),
        "{}",
        auto.stderr
    );
    assert!(folder.read("auto/config.ron").contains("update: Overlapped,"));
    let speculative = folder.train("ahead", &["--set", "offload.update=Speculative"]).ok();
    let why = "offload.speculated_fraction: Auto is 0.5: no described box says what it gains";
    assert!(speculative.stderr.contains(why), "{}", speculative.stderr);
    let config = folder.read("ahead/config.ron");
    assert!(
        config.contains("update: Speculative,") && config.contains("speculated_fraction: 0.5,"),
        "{config}"
    );
    assert!(speculative.stderr.contains(" not tried  eta "), "{}", speculative.stderr);
    assert!(!auto.stderr.contains("not tried"), "{}", auto.stderr);
    assert_eq!(folder.hash("ahead"), folder.hash("auto"));
    // The written config gives the same run, with all choices already made.
    let again = folder.onebox(&["train", "ahead/config.ron", "--run-dir", "again"]).ok();
    assert!(!again.stderr.contains("Auto is"), "{}", again.stderr);
    assert_eq!(folder.hash("again"), folder.hash("ahead"));
}

#[test]
fn a_run_goes_on_and_forks_where_auto_chooses_otherwise() {
    let folder = Folder::new();
    let both = ["-q", "--set", "schedule.decay_steps=6", "--set", "train.checkpoint_every=2"];
    let speculative = ["--set", "offload.update=Speculative"];
    let six = ["--set", "train.steps=6"];
    folder.train("whole", &[&both[..], &six].concat()).ok();
    folder.train("run", &[&both[..], &speculative].concat()).ok();
    let fork = folder.train("run", &[&["--fork"], &both[1..], &six, &AUTO].concat()).ok();
    let lines: Vec<&str> = fork.stderr.lines().take(3).collect();
    assert!(lines[1].ends_with("Speculative -> Overlapped"), "{lines:?}");
    assert!(!lines[2].contains("speculated_fraction"), "{lines:?}");
    folder.train("run", &[&["--resume"], &both[..], &six, &AUTO].concat()).ok();
    assert_eq!(folder.hash("run"), folder.hash("whole"));
    // A changed share without an effect is no difference.
    let idle = ["--set", "offload.speculated_fraction=0.3", "--set", "train.steps=8"];
    let done = folder.train("whole", &[&["--resume"], &both[1..], &idle].concat()).ok();
    assert!(!done.stderr.contains("same experiment"), "{}", done.stderr);
}
