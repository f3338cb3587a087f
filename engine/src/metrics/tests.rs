//! Tests of lines, resumes and damaged files of metrics.

use super::*;
use std::fs;
use std::path::{Path, PathBuf};

fn step(step: u64) -> StepMetrics {
    StepMetrics {
        step,
        loss: 2.4312,
        grad_norm: 0.1,
        loss_scale: 65536.0,
        lr: 6e-4,
        step_seconds: 0.25,
        tokens_per_second: 4096.0,
        skipped: false,
        tokens: 1024 * step,
        skipped_total: 0,
        device_memory: 4096,
        host_memory: 8192,
        targets: None,
        documents: None,
        padding: None,
        verified: None,
        expert_load: None,
    }
}

/// A path in a new folder.
fn file() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("metrics.jsonl");
    (folder, path)
}

/// Opens the file `path` in a folder that is not locked.
fn open(path: &Path, last_step: u64) -> Result<MetricsWriter, MetricsError> {
    let failed = |source| MetricsError { path: path.to_owned(), source };
    let run = LockedRunDir::unlocked(path.parent().unwrap()).map_err(failed)?;
    let name = path.file_name().unwrap().to_str().unwrap();
    let writer = MetricsWriter::named(&run, name, last_step)?;
    Ok(MetricsWriter { clock: || 1_795_219_788.250_1, ..writer })
}

/// Warnings of `write`.
fn warnings(write: impl FnOnce()) -> String {
    let (_folder, path) = file();
    let log = Arc::new(File::create(&path).unwrap());
    let subscriber = tracing_subscriber::fmt().with_writer(log).finish();
    tracing::subscriber::with_default(subscriber, write);
    fs::read_to_string(path).unwrap()
}

#[test]
fn a_step_of_a_model_with_experts_has_their_load() {
    let (_folder, path) = file();
    let load = ExpertLoad::of_layers(&[[3.0, 40.0, 21.0], [24.0, 25.0, 15.0]]);
    let balanced = ExpertLoad { balance_loss: Some(1.25), ..load };
    let mut metrics = open(&path, 0).unwrap();
    metrics.step(&StepMetrics { expert_load: Some(load), ..step(1) }, None);
    metrics.step(&StepMetrics { expert_load: Some(balanced), ..step(2) }, None);
    let text = fs::read_to_string(&path).unwrap();
    let keys = r#","expert_tokens":[27,65,36],"least_expert_tokens":3,"most_expert_tokens":40,"largest_expert_share":0.625,"dead_experts":0"#;
    for (line, more) in text.lines().zip(["", r#","balance_loss":1.25"#]) {
        assert!(line.contains(&format!(r#"{keys}{more},"time":"#)), "{line}");
    }
}

#[test]
fn lines_have_the_keys_of_the_contract_in_order_and_short_floats() {
    let (_folder, path) = file();
    let mut metrics = open(&path, 0).unwrap().with_epochs(Some(1.0 / 3.0));
    metrics.step(&step(1), None);
    metrics.eval(1, 2.5, true, &[]);
    metrics.checkpoint_failed(1, "no space");
    metrics.differs(1, &[Difference { rank: 2, place: "the loss".into() }]);
    metrics.end(1, "00ff");
    let expected = concat!(
        r#"{"kind":"step","step":1,"loss":2.4312,"grad_norm":0.1,"loss_scale":65536.0,"#,
        r#""lr":0.0006,"step_seconds":0.25,"tokens_per_second":4096.0,"skipped":false,"#,
        r#""tokens":1024,"skipped_total":0,"device_memory":4096,"host_memory":8192"#,
        "END",
        r#"{"kind":"eval","step":1,"loss":2.5,"whole":true"#,
        "END",
        r#"{"kind":"checkpoint_failed","step":1,"error":"no space""#,
        "END",
        r#"{"kind":"differs","step":1,"places":[{"rank":2,"place":"the loss"}]"#,
        "END",
        r#"{"kind":"end","step":1,"state_hash":"00ff""#,
        "END"
    );
    let expected = expected.replace("END", ",\"epoch\":0.333333,\"time\":1795219788.25}\n");
    assert_eq!(fs::read_to_string(path).unwrap(), expected);
}

#[test]
fn what_is_not_finite_or_not_there_is_null() {
    let (_folder, path) = file();
    let mut metrics = open(&path, 0).unwrap();
    let broken =
        StepMetrics { loss: f64::NAN, grad_norm: f64::INFINITY, loss_scale: f32::NAN, ..step(1) };
    metrics.step(&broken, None);
    metrics.eval(1, f64::NAN, false, &[]);
    let text = fs::read_to_string(path).unwrap();
    assert!(text.contains(r#""loss":null,"grad_norm":null,"loss_scale":null,"lr":"#), "{text}");
    assert!(
        text.contains("{\"kind\":\"eval\",\"step\":1,\"loss\":null,\"whole\":false,"),
        "{text}"
    );
}

#[test]
fn a_full_disk_drops_lines_with_one_warning_and_never_fails() {
    let mut metrics = open(Path::new("/dev/full"), 0).unwrap();
    let log = warnings(|| (1..=3).for_each(|i| metrics.step(&step(i), None)));
    assert_eq!(metrics.dropped(), 3);
    assert_eq!(log.matches("WARN").count(), 1, "{log}");
    assert!(log.contains("/dev/full"), "{log}");
}

#[test]
fn a_half_written_line_is_cut_off_before_the_next() {
    let (_folder, path) = file();
    let mut metrics = open(&path, 0).unwrap();
    metrics.eval(1, 2.5, true, &[]);
    (&metrics.lines.file).write_all(b"{\"kind\":\"ev").unwrap();
    metrics.lines.torn = true; // the state after a failed write
    metrics.eval(3, 2.25, true, &[]);
    let text = fs::read_to_string(path).unwrap();
    let lines = [(1, 2.5), (3, 2.25)].map(|(step, loss)| {
        format!("{{\"kind\":\"eval\",\"step\":{step},\"loss\":{loss},\"whole\":true,\"time\":1795219788.25}}\n")
    });
    let expected = lines.concat();
    assert_eq!(text, expected);
}

#[test]
fn resuming_keeps_the_lines_up_to_the_checkpoint_and_drops_the_rest() {
    let (_folder, path) = file();
    let mut metrics = open(&path, 0).unwrap();
    metrics.step(&step(1), None);
    metrics.eval(1, 2.75, true, &[]);
    metrics.step(&step(2), None);
    // The save of step 1 fails after step 2: it runs in the background.
    metrics.checkpoint_failed(1, "no space");
    let until_two = fs::read(&path).unwrap();
    metrics.eval(2, 2.5, true, &[]);
    metrics.step(&step(3), None);
    metrics.end(3, "00");
    let all = fs::read(&path).unwrap();
    // A file that is torn anywhere after step 2 is restored to its state at step 2.
    for length in until_two.len()..=all.len() {
        fs::write(&path, &all[..length]).unwrap();
        open(&path, 2).unwrap();
        assert_eq!(fs::read(&path).unwrap(), until_two);
    }
    fs::write(&path, &all).unwrap();
    open(&path, 3).unwrap();
    assert!(all.starts_with(&fs::read(&path).unwrap()));
    assert!(!fs::read_to_string(&path).unwrap().contains("end"));
    open(&path, 0).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"");
}

#[test]
fn the_config_comes_first_and_again_where_a_resumed_run_has_another() {
    let of = |steps: u64| {
        let ron = format!(
            "(model: (layers: 1, hidden: 8, heads: 1, seq_len: 8), data: (train: \"x\"), train: (steps: {steps}))"
        );
        config::load_str(&ron, "a.ron", Path::new("/"), &[]).unwrap().config
    };
    let (_folder, path) = file();
    let mut metrics = open(&path, 0).unwrap();
    metrics.config(0, &of(2));
    (1..=2).for_each(|number| metrics.step(&step(number), None));
    metrics.end(2, "00");
    let lines = |path| {
        let text = fs::read_to_string(path).unwrap();
        let json = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let seen = |line: Value| {
            (line["kind"].as_str().unwrap().to_owned(), line["config"]["train"]["steps"].as_u64())
        };
        json.map(seen).collect::<Vec<_>>()
    };
    let step_line = ("step".to_owned(), None);
    let config_line = |steps| ("config".to_owned(), Some(steps));
    open(&path, 2).unwrap().config(2, &of(2));
    assert_eq!(lines(&path), [config_line(2), step_line.clone(), step_line.clone()]);
    open(&path, 2).unwrap().config(2, &of(3));
    let both = [config_line(2), step_line.clone(), step_line.clone(), config_line(3)];
    assert_eq!(lines(&path), both);
    // The run goes back: the second config has not begun yet.
    open(&path, 1).unwrap().config(1, &of(2));
    assert_eq!(lines(&path), both[..2]);
    // A file of an earlier version has none.
    fs::write(&path, "{\"kind\":\"step\",\"step\":1}\n").unwrap();
    open(&path, 1).unwrap().config(1, &of(2));
    assert_eq!(lines(&path), [step_line, config_line(2)]);
}

#[test]
fn a_damaged_line_costs_no_other_and_leaves_a_copy() {
    let (folder, path) = file();
    let mut metrics = open(&path, 0).unwrap();
    (1..=5).for_each(|number| metrics.step(&step(number), None));
    let copy = folder.path().join(DAMAGED);
    open(&path, 5).unwrap();
    assert!(!copy.exists());
    let damaged = fs::read_to_string(&path).unwrap().replacen("kind", "kinX", 3);
    let damaged = damaged.replacen("kinX", "kind", 2);
    fs::write(&path, &damaged).unwrap();
    let log = warnings(|| drop(open(&path, 4).unwrap()));
    let lines: Vec<&str> = damaged.split_inclusive('\n').collect();
    assert_eq!(fs::read_to_string(&path).unwrap(), lines[..4].concat());
    assert_eq!(fs::read_to_string(&copy).unwrap(), damaged);
    assert!(log.contains("line 3 is damaged"), "{log}");
}

#[test]
fn a_run_is_finished_if_its_last_whole_line_is_an_end() {
    let end = b"{\"kind\":\"end\",\"step\":40,\"state_hash\":\"00\"}\n";
    assert_eq!(finished_step(end), Some(40));
    assert_eq!(finished_step(&[&end[..], b"{\"kind\":\"st"].concat()), Some(40));
    assert_eq!(finished_step(&[&end[..], b"{\"kind\":\"eval\",\"step\":41}\n"].concat()), None);
    assert_eq!(finished_step(&end[..end.len() - 1]), None);
    assert_eq!(finished_step(b""), None);
    assert_eq!(finished_step(b"\xff\n"), None);
}

#[test]
fn a_file_that_cannot_be_opened_is_named() {
    let error = open(Path::new("/nowhere/metrics.jsonl"), 0).unwrap_err();
    assert!(error.to_string().starts_with("cannot write /nowhere/metrics.jsonl: "), "{error}");
}

#[test]
fn each_line_has_the_epoch_of_its_step() {
    let (_folder, path) = file();
    let mut metrics = open(&path, 0).unwrap().with_epochs(Some(0.25));
    (1..=5).for_each(|number| metrics.step(&step(number), None));
    metrics.eval(5, 2.5, true, &[]);
    let text = fs::read_to_string(&path).unwrap();
    let epochs =
        text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["epoch"].clone());
    assert_eq!(epochs.collect::<Vec<_>>(), [0.25, 0.5, 0.75, 1.0, 1.25, 1.25]);
    // Samples that are drawn at random make no epochs.
    let mut metrics = open(&path, 0).unwrap();
    metrics.step(&step(1), None);
    assert!(!fs::read_to_string(&path).unwrap().contains("epoch"));
}
