//! The best checkpoint of a run, and the end of a run that does not improve. The expected steps and
//! losses come from the lines of `metrics.jsonl`.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use crate::common::{Folder, OVERFLOWING, WORSE};
use crate::directories::replaced::struck;
use engine::run::FaultPoint;
use serde_json::Value;
use std::fs;

fn words(sets: &[&str], more: &[&str]) -> Vec<String> {
    let sets = sets.iter().flat_map(|set| ["--set", set]);
    more.iter().copied().chain(sets).map(str::to_owned).collect()
}

impl Folder {
    fn trained(&self, run: &str, sets: &[&str], more: &[&str]) -> crate::common::CommandOutput {
        let words = words(sets, more);
        self.train(run, &words.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// Steps of the checkpoints of a run.
    fn steps(&self, run: &str) -> Vec<u64> {
        let Ok(entries) = fs::read_dir(self.path(&format!("{run}/checkpoints"))) else {
            return Vec::new();
        };
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut steps: Vec<u64> =
            names.filter_map(|name| name.strip_prefix("step-")?.parse().ok()).collect();
        steps.sort_unstable();
        steps
    }

    /// Step and loss of the best checkpoint, by the newest checkpoint of a run.
    fn best(&self, run: &str) -> Option<(u64, f64)> {
        let shown = self.onebox(&["checkpoint", "show", run, "--json"]).ok().stdout;
        let shown: Value = serde_json::from_str(&shown).unwrap();
        let best = &shown["evaluations"]["best"];
        Some((best["step"].as_u64()?, best["loss"].as_f64().unwrap()))
    }

    /// Step and loss of the evaluation with the least loss up to step `last`.
    fn least(&self, run: &str, last: u64) -> Option<(u64, f64)> {
        let lines = self.metrics(run).into_iter();
        let evals = lines
            .filter(|line| line["kind"] == "eval")
            .filter_map(|line| Some((line["step"].as_u64().unwrap(), line["loss"].as_f64()?)));
        // Of equal losses the first counts.
        evals.filter(|(step, _)| *step <= last).reduce(|a, b| if b.1 < a.1 { b } else { a })
    }

    /// Metrics and weights of a run, without measured values.
    fn result(&self, run: &str) -> (Vec<Value>, Vec<u8>) {
        let mut lines = self.metrics(run);
        for line in &mut lines {
            let measured = ["step_seconds", "tokens_per_second", "host_memory", "time"];
            let line = line.as_object_mut().unwrap();
            line.retain(|key, _| !measured.contains(&key.as_str()));
        }
        (lines, fs::read(self.path(&format!("{run}/weights.safetensors"))).unwrap())
    }
}

#[test]
fn the_best_checkpoint_stays_and_is_the_one_with_the_least_validation_loss() {
    let folder = Folder::new();
    let done = folder.trained("run", &WORSE, &[]);
    let (least, loss) = folder.least("run", u64::MAX).unwrap();
    assert!((2..10).contains(&least), "the model gets worse after step {least}");
    assert_eq!(folder.best("run"), Some((least, loss)));
    assert_eq!(folder.steps("run"), [least, 12, 14], "the newest two and the best");
    folder.onebox(&["checkpoint", "verify", "run"]).ok();
    let named = format!("best    checkpoints/step-{least:08}, validation loss {loss:.4}");
    assert!(done.stderr.contains(&named), "{}", done.stderr);
    let shown = folder.onebox(&["checkpoint", "show", "run"]).ok().stdout;
    assert!(shown.contains(&format!("step-{least:08} of this run, validation loss")), "{shown}");

    // Without the key, the newest two stay, and every bit of the run is the same.
    let other: Vec<&str> = WORSE.into_iter().filter(|set| !set.contains("keep_best")).collect();
    folder.trained("plain", &other, &["-q"]);
    assert_eq!((folder.steps("plain"), folder.best("plain")), (vec![12, 14], None));
    assert_eq!(folder.hash("plain"), folder.hash("run"));
    assert!(folder.result("plain") == folder.result("run"));
    let manifest = folder.read("plain/checkpoints/step-00000014/MANIFEST");
    assert!(!manifest.contains("\"evaluations\""), "a run that compares nothing records nothing");
}

#[test]
fn generate_and_export_take_the_best_and_say_so_unless_the_user_asks_for_another() {
    let folder = Folder::new();
    folder.trained("run", &WORSE, &["-q"]);
    let (best, loss) = folder.best("run").unwrap();
    let at =
        |step: u64| format!("run/checkpoints/step-{step:08}: the parameters after step {step}");
    let why = format!("{}, the best of this run: validation loss {loss:.4}", at(best));
    let tokens = ["--tokens", "4", "--temperature", "0", "--prompt", "the "];
    let generated =
        |more: &[&str]| folder.onebox(&[&["generate", "run"], &tokens[..], more].concat());
    let text = generated(&[]).ok();
    assert!(text.stderr.contains(&why), "{}", text.stderr);
    let step = best.to_string();
    let same = generated(&["--step", &step]).ok();
    assert_eq!((same.stdout, same.stderr.contains(&at(best))), (text.stdout, true));
    let last = generated(&["--last"]).ok().stderr;
    assert!(
        last.contains("run/weights.safetensors: the parameters of the end of the run"),
        "{last}"
    );
    let named = ["4", "run has the steps"];
    generated(&["--step", "5"]).refused(66, &["step-00000005", named[1]]);
    generated(&["--step", "5", "--last"]).refused(2, &["cannot be used with"]);

    let export = |out: &str, more: &[&str]| {
        let args = [&["checkpoint", "export", "run", out, "--to", "safetensors"], more].concat();
        folder.onebox(&args)
    };
    let output = export("best", &[]).ok().stderr;
    assert!(
        output.contains(&why) && output.contains(&format!("after step {best}, read")),
        "{output}"
    );
    let output = export("last", &["--last"]).ok().stderr;
    assert!(output.contains(&format!("{}, the newest checkpoint", at(14))), "{output}");
    export("step", &["--step", &step]).ok();
    let weights = |out: &str| fs::read(folder.path(&format!("{out}/model.safetensors"))).unwrap();
    assert!(weights("best") == weights("step") && weights("best") != weights("last"));
    let one = format!("run/checkpoints/step-{best:08}");
    let one = ["checkpoint", "export", &one, "one", "--to", "safetensors", "--last"];
    folder.onebox(&one).refused(2, &["it is one checkpoint", "leave out --last"]);

    // A best checkpoint that is damaged or gone is not replaced by another.
    let manifest = folder.path(&format!("run/checkpoints/step-{best:08}/MANIFEST"));
    fs::write(&manifest, "{}").unwrap();
    let texts = ["MANIFEST is broken", "it is the best checkpoint of the run", "--last"];
    generated(&[]).refused(82, &texts);
    export("none", &[]).refused(82, &texts);
    fs::remove_dir_all(manifest.parent().unwrap()).unwrap();
    generated(&[])
        .refused(66, &["it is the best checkpoint of the run", &format!("bring step {best} back")]);
    generated(&["--last"]).ok();
    // A damaged record is not used, and the record before it is.
    let (newest, before) = (folder.path("run/checkpoints/step-00000014/MANIFEST"), "step-00000012");
    let bytes = fs::read_to_string(&newest).unwrap().replace("\"step\":14", "\"step\":13");
    fs::write(&newest, bytes).unwrap();
    generated(&[]).refused(66, &[&format!("bring step {best} back")]);
    generated(&["--last"]).ok();
    let output = export("older", &["--last"]).ok().stderr;
    assert!(
        output.contains("step-00000014/MANIFEST is broken") && output.contains(before),
        "{output}"
    );
}

/// The weights of the end do not stand in for a best checkpoint whose record cannot be read.
#[test]
fn checkpoints_that_cannot_be_read_are_an_error_and_no_run_without_a_best_one() {
    let folder = Folder::new();
    folder.trained("run", &WORSE, &["-q"]);
    let generated = |more: &[&str]| {
        folder.onebox(&[&["generate", "run", "--tokens", "4", "--prompt", "the "], more].concat())
    };
    let newest = folder.path("run/checkpoints/step-00000014/MANIFEST");
    let moved = folder.path("moved");
    fs::rename(&newest, &moved).unwrap();
    std::os::unix::fs::symlink(&moved, &newest).unwrap();
    generated(&[]).refused(74, &["step-00000014/MANIFEST", "it is a symbolic link"]);
    let output = generated(&["--last"]).ok().stderr;
    assert!(output.contains("the parameters of the end of the run"), "{output}");
    // Damaged records alone do not tell of a best checkpoint, and the answer says so.
    for step in folder.steps("run") {
        let manifest = folder.path(&format!("run/checkpoints/step-{step:08}/MANIFEST"));
        fs::remove_file(&manifest).unwrap();
        fs::write(&manifest, "{}").unwrap();
    }
    let output = generated(&[]).ok().stderr;
    let texts = ["warning: ", "step-00000014/MANIFEST is broken", "the end of the run"];
    assert!(texts.iter().all(|text| output.contains(text)), "{output}");
    // A run that has saved no checkpoint has no best one.
    fs::remove_dir_all(folder.path("run/checkpoints")).unwrap();
    let output = generated(&[]).ok().stderr;
    assert!(!output.contains("warning") && output.contains("the end of the run"), "{output}");
}

#[test]
fn killed_around_a_save_it_ends_with_the_same_best_checkpoint_and_the_same_bits() {
    let folder = Folder::new();
    for background in ["train.checkpoint_writer=Background", "train.checkpoint_writer=Foreground"] {
        let sets: Vec<&str> = WORSE.into_iter().chain([background]).collect();
        folder.trained("straight", &sets, &["-q", "--overwrite"]);
        let (straight, steps) = (folder.result("straight"), folder.steps("straight"));
        let (least, _) = folder.best("straight").unwrap();
        let points = [
            // A save that an evaluation asks for, which replaces the best, and one that is due.
            (FaultPoint::Evaluating, least),
            (FaultPoint::Saving, least),
            (FaultPoint::Writing, least),
            (FaultPoint::Naming, least),
            (FaultPoint::Decided, least + 1),
            (FaultPoint::Naming, 12),
            (FaultPoint::Evaluating, 14),
            (FaultPoint::Ending, 14),
        ];
        for (place, step) in points {
            let _ = fs::remove_dir_all(folder.path("run"));
            let what = format!("{place:?} {step}, {background}");
            let args = words(&sets, &["--run-dir", "run"]);
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            let died = struck(&folder, (place, step), &["sh:kill -9 $PPID"], &args);
            assert_ne!(died.code, 0, "{what}");
            // What is on the disk is consistent at once: the best that is named is there and whole.
            if let Some(newest) = folder.steps("run").last() {
                let best = folder.best("run");
                assert_eq!(best, folder.least("straight", *newest), "{what}");
                let best = best.filter(|(best, _)| !folder.steps("run").contains(best));
                assert_eq!(best, None, "{what}");
                folder.onebox(&["checkpoint", "verify", "run"]).ok();
            }
            folder.trained("run", &sets, &["--resume", "-q"]);
            assert!(folder.result("run") == straight, "{what}: another end");
            assert_eq!(
                (folder.steps("run"), folder.best("run")),
                (steps.clone(), folder.best("straight")),
                "{what}"
            );
        }
    }
}

#[test]
fn patience_ends_a_run_and_counts_across_resumes() {
    let folder = Folder::new();
    let sets: Vec<&str> = WORSE.into_iter().chain(["train.patience=2"]).collect();
    let done = folder.trained("straight", &sets, &[]);
    let (least, loss) = folder.least("straight", u64::MAX).unwrap();
    let end = least + 4;
    assert!(end < 14, "{least}");
    let last = folder.metrics("straight").last().unwrap().clone();
    assert_eq!((last["kind"].as_str(), last["step"].as_u64()), (Some("end"), Some(end)));
    assert_eq!(*folder.steps("straight").last().unwrap(), end, "a final checkpoint");
    let message = format!("ended   after {end} of 14 steps");
    let early = format!(
        "early   2 evaluations without a validation loss below the least, which was {loss:.4} after step {least}"
    );
    assert!(done.stderr.contains(&message) && done.stderr.contains(&early), "{}", done.stderr);
    let straight = folder.result("straight");
    for step in [least + 1, least + 2, least + 3] {
        let _ = fs::remove_dir_all(folder.path("run"));
        let args = words(&sets, &["--run-dir", "run"]);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        struck(&folder, (FaultPoint::Decided, step), &["sh:kill -9 $PPID"], &args);
        folder.trained("run", &sets, &["--resume", "-q"]);
        assert!(folder.result("run") == straight, "killed in step {step}: another end");
        // A run that has ended ends again, in the same step.
        folder.trained("run", &sets, &["--resume", "-q"]);
        assert!(folder.result("run") == straight, "killed in step {step}: no end");
    }
    // With more patience it goes on, to the end of the run that always had it.
    folder.trained("run", &WORSE, &["--resume", "-q"]);
    folder.trained("whole", &WORSE, &["-q"]);
    assert!(folder.result("run") == folder.result("whole"));
}

#[test]
fn patience_is_a_success_and_needs_no_checkpoints() {
    let folder = Folder::new();
    // With this rate the model is as good as after its first step.
    let sets = [
        "optimizer.lr=1e-30",
        "train.steps=40",
        "train.eval_every=1",
        "train.patience=3",
        "train.checkpoint_overhead=None",
    ];
    let done = folder.trained("run", &sets, &[]).ok();
    assert!(done.stderr.contains("ended   after 4 of 40 steps"), "{}", done.stderr);
    assert!(done.stderr.contains("not the least for 3 evaluations"), "{}", done.stderr);
    assert!(done.stderr.contains("next, try"), "{}", done.stderr);
    assert!(folder.path("run/weights.safetensors").exists() && folder.steps("run").is_empty());
}

#[test]
fn a_run_that_goes_back_forgets_a_best_checkpoint_from_after_that_step() {
    let folder = Folder::new();
    folder.write_letters();
    let more =
        ["train.rollbacks=9", "train.keep_best=true", "train.steps=12", "train.eval_every=1"];
    let other = ["train.eval_every=0", "train.checkpoint_keep=1"];
    let sets: Vec<&str> =
        OVERFLOWING.into_iter().filter(|set| !other.contains(set)).chain(more).collect();
    let done = folder.trained("run", &sets, &[]);
    assert!(done.stderr.contains("the run is taken back"), "{}", done.stderr);
    // The metrics go back, too, so they have the evaluations that count.
    let newest = *folder.steps("run").last().unwrap();
    assert_eq!(folder.best("run"), folder.least("run", newest), "{}", done.stderr);
    assert!(folder.steps("run").contains(&folder.best("run").unwrap().0));
    folder.onebox(&["checkpoint", "verify", "run"]).ok();
}

#[test]
fn a_best_checkpoint_that_is_gone_is_said_and_forgotten() {
    let folder = Folder::new();
    folder.trained("run", &WORSE, &["-q"]);
    let (best, _) = folder.best("run").unwrap();
    fs::remove_dir_all(folder.path(&format!("run/checkpoints/step-{best:08}"))).unwrap();
    let longer: Vec<&str> = WORSE.into_iter().chain(["train.steps=16"]).collect();
    let done = folder.trained("run", &longer, &["--resume"]);
    let gone = format!("the best checkpoint, of step {best}, is not there any more");
    assert_eq!(done.stderr.matches(&gone).count(), 1, "{}", done.stderr);
    let (now, _) = folder.best("run").unwrap();
    assert!(now > best && folder.steps("run").contains(&now), "{now}: {}", done.stderr);
}

#[test]
fn a_resharded_run_has_its_best_checkpoint_and_goes_on() {
    let folder = Folder::new();
    folder.trained("run", &WORSE, &["-q"]);
    let (best, loss) = folder.best("run").unwrap();
    let to = |from: &str, out: &str| {
        folder.onebox(&["checkpoint", "reshard", from, out, "--tp", "1", "--dp", "4"]).ok().stderr
    };
    let message = to("run", "other");
    assert!(
        message.contains(&format!("so is the best checkpoint of the run, of step {best}")),
        "{message}"
    );
    assert_eq!((folder.steps("other"), folder.best("other")), (vec![best, 14], Some((best, loss))));
    folder.onebox(&["checkpoint", "verify", "other"]).ok();
    let text = ["--tokens", "4", "--temperature", "0"];
    let text = |run| folder.onebox(&[&["generate", run], &text[..]].concat()).ok().stdout;
    assert_eq!(text("run"), text("other"));
    // One checkpoint alone does not name another one.
    let message = to("run/checkpoints/step-00000014", "alone");
    assert!(message.contains("is another one, and is not rewritten"), "{message}");
    assert_eq!((folder.steps("alone"), folder.best("alone")), (vec![14], None));
}

/// The evaluation after the last step has more batches, if `train.eval_batches` is None. Only those
/// that every evaluation has are compared, as in a run that evaluates no others.
#[test]
fn more_batches_after_the_last_step_do_not_decide_which_checkpoint_is_the_best() {
    let folder = Folder::new();
    let more = ["batch.global=4", "optimizer.lr=3e-3", "schedule.warmup_steps=0", "train.steps=8"];
    let of = |run: &str, batches: &str| {
        let sets: Vec<&str> = WORSE.into_iter().chain(more).chain([batches]).collect();
        folder.trained(run, &sets, &["-q"]).ok();
        let last = folder.metrics(run).into_iter().rfind(|line| line["kind"] == "eval").unwrap();
        (folder.best(run), last["loss"].as_f64().unwrap(), last["whole"] == true)
    };
    let (few, all) = (of("few", "train.eval_batches=8"), of("all", "train.eval_batches=None"));
    assert!((few.2, all.2) == (false, true) && few.1 != all.1, "{few:?} {all:?}");
    assert_eq!((few.0, few.0.unwrap().0), (all.0, 8));
}

#[test]
fn a_comparison_without_evaluations_is_refused() {
    let folder = Folder::new();
    for (sets, texts) in [
        (
            &["train.keep_best=true", "train.eval_every=0"][..],
            ["nothing is evaluated between steps", "set `train.eval_every`"],
        ),
        (
            &["train.patience=3", "train.eval_every=0"],
            ["patience counts evaluations", "set `train.eval_every`"],
        ),
        (
            &["train.keep_best=true", "train.checkpoint_overhead=None"],
            ["without checkpoints keeps no best", "set `train.checkpoint_every`"],
        ),
        (&["train.patience=0"], ["train.patience", "from 1 to"]),
    ] {
        folder.trained("run", sets, &[]).refused(78, &texts);
        assert!(!folder.path("run").exists());
    }
}
