//! Ranges of simulated speeds, the key of a box on which a speed depends most, and simulations compared with
//! runs.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use crate::common::Folder;
use serde_json::Value;
use std::path::Path;

fn config(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs").join(name).display().to_string()
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"))
}

/// The text of a box with `key` 10 % larger.
fn enlarged(text: &str, key: &str) -> String {
    let name = format!("{}: ", key.rsplit('.').next().unwrap());
    let line = text.lines().find(|line| line.trim_start().starts_with(&name));
    let line = line.unwrap_or_else(|| panic!("{key} in {text}"));
    let value = line.trim().trim_start_matches(&name).trim_end_matches(',');
    let larger = 1.1 * value.parse::<f64>().unwrap();
    text.replace(line, &format!("{name}{larger},"))
}

#[test]
fn a_rate_has_a_range_and_names_the_key_that_it_hangs_on() {
    let folder = Folder::new();
    let path = config("h100-1.3b.ron");
    // Two micro-batches, which a shortened step has, too.
    let small = ["--set", "batch.micro=2", "--set", "batch.global=4"];
    let args = [&["simulate", &path, "--no-schedules"], &small[..], &["--box"]].concat();
    let of =
        |name: &str, more: &[&str]| folder.onebox(&[&args[..], &[name], more].concat()).ok().stdout;
    let number = |report: &Value, key: &str| report[key].as_f64().unwrap();
    let ends = |report: &Value| {
        let rate = number(report, "tokens_per_second");
        ["tokens_per_second_low", "tokens_per_second_high"].map(|key| number(report, key) / rate)
    };
    let plain = json(&of("desktop-4090", &["--json"]));
    let [low, high] = ends(&plain);
    assert!((low / 0.65 - 1.0).abs() < 1e-9 && (high / 1.15 - 1.0).abs() < 1e-9, "{low} {high}");
    let [least, most] = ["low", "high"].map(|end| number(&plain["range"], end));
    assert!((low - least).abs() < 1e-9 && (high - most).abs() < 1e-9, "{least} {most}");
    let text = of("desktop-4090", &[]);
    assert!(text.contains("the range is -35 % / +15 %: onebox has run on one H200 only"), "{text}");
    assert!(text.contains("tok/s (") && text.contains("this hangs on "), "{text}");
    // This class ran on an H200.
    let [low, high] = ends(&json(&of("h200-256gib", &["--json"])));
    assert!(low > 0.7 && (high / 1.15 - 1.0).abs() < 1e-9, "{low} {high}");
    // The named key has the named influence.
    let described = std::fs::read_to_string(config("boxes/desktop-4090.ron")).unwrap();
    let key = plain["hangs_on"]["key"].as_str().unwrap();
    std::fs::write(folder.path("larger.ron"), enlarged(&described, key)).unwrap();
    let larger = json(&of("larger.ron", &["--json"]));
    let percent =
        100.0 * (number(&larger, "tokens_per_second") / number(&plain, "tokens_per_second") - 1.0);
    let told = number(&plain["hangs_on"], "percent");
    assert!(told > 1.0 && (told - percent).abs() < 0.01, "{key}: {told} told, {percent} simulated");
    // Clipped steps change the ends as the rate.
    let clipped = json(&of(
        "desktop-4090",
        &["--json", "--clipped", "0.5", "--set", "offload.update=Speculative"],
    ));
    assert!((ends(&clipped)[0] / 0.65 - 1.0).abs() < 1e-9, "{clipped}");
}

#[test]
fn a_run_is_compared_in_one_line_and_another_batch_is_warned_of() {
    let folder = Folder::new();
    folder.train("run", &[]).ok();
    let described = r#"(gpus: 4, gpu_memory: "16MiB", node_memory: "1GiB",
        measured: (cores: 2, gemm_gflops_16: 10, gemm_gflops_32: 10, attention_gflops: 5,
            attention_backward_gflops: 5, other_gb_per_s: 4, op_us: 1, meeting_us: 5))"#;
    std::fs::write(folder.path("box.ron"), described).unwrap();
    let args = ["simulate", "tiny.ron", "--box", "box.ron", "--no-schedules", "--compare", "run"];
    let done = folder.onebox(&args).ok();
    let lines = done.stdout.lines().filter(|line| line.starts_with("compared: "));
    let [line] = lines.collect::<Vec<_>>()[..] else { panic!("{}", done.stdout) };
    for part in ["2 cores", "TP 2 x DP 2, micro 2, global 8", "x as long; 2 steps of "] {
        assert!(line.contains(part), "{part} in {line}");
    }
    assert!(!done.stderr.contains("not comparable"), "{}", done.stderr);
    let report = json(&folder.onebox(&[&args[..], &["--json"]].concat()).ok().stdout);
    assert_eq!(report["compared"], line);
    let other = folder.onebox(&[&args[..], &["--set", "batch.global=4"]].concat()).ok().stderr;
    assert!(other.contains("batch.global is 8 in the run, and 4 here"), "{other}");
}
