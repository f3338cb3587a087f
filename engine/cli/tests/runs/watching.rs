//! Curves of runs: event files for TensorBoard, and reports.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use crate::common::Folder;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;

/// Settings with event files, and a checkpoint after every second step.
const WATCHED: [&str; 10] = [
    "-q",
    "--set",
    "train.tensorboard=true",
    "--set",
    "schedule.decay_steps=6",
    "--set",
    "train.checkpoint_every=2",
    "--set",
    "train.checkpoint_keep=9",
    "--set",
];

/// Names of the event files of a run, sorted.
fn event_files(run: &Path) -> Vec<String> {
    let names = std::fs::read_dir(run).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<String> = names.map(|name| name.into_string().unwrap()).collect();
    names.retain(|name| name.contains("tfevents"));
    names.sort();
    names
}

/// The payload of every complete record.
fn records(path: &Path) -> Vec<Vec<u8>> {
    let bytes = std::fs::read(path).unwrap();
    let (mut at, mut records) = (0, Vec::new());
    while let Some(length) = bytes.get(at..at + 8) {
        let length = u64::from_le_bytes(length.try_into().unwrap()) as usize;
        let Some(record) = bytes.get(at + 12..at + 12 + length + 4) else { break };
        records.push(record[..length].to_vec());
        at += 16 + length;
    }
    records
}

/// Asserts that TensorBoard's reader, if it is installed, finds the curves of `metrics.jsonl`.
fn tensorboard_reads(run: &Path) {
    let Some(python) = std::env::var_os("ONEBOX_TENSORBOARD") else {
        let none = "ONEBOX_TENSORBOARD names no Python with tensorboard; scripts/check-tensorboard --fetch installs one";
        let in_ci = std::env::var_os("CI").is_some_and(|value| value == "true");
        assert!(!in_ci, "{none}");
        println!("SKIPPED: {none}");
        return;
    };
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/check_tensorboard.py");
    let read = Command::new(python).arg(script).arg(run).output().unwrap();
    assert!(read.status.success(), "{}", String::from_utf8_lossy(&read.stderr));
}

#[test]
fn the_curves_of_a_run_that_crashed_and_went_on_are_whole() {
    let folder = Folder::new();
    folder.train("run", &[&WATCHED[..], &["train.steps=5"]].concat()).ok();
    let run = folder.path("run");
    tensorboard_reads(&run);
    // The run looks like a crash in step 5, after the checkpoint of step 2.
    for step in [4, 5] {
        std::fs::remove_dir_all(run.join(format!("checkpoints/step-{step:08}"))).unwrap();
    }
    let metrics = folder.read("run/metrics.jsonl");
    let unfinished = metrics.rsplit_once("{\"kind\":\"step\",\"step\":5").unwrap().0;
    std::fs::write(run.join("metrics.jsonl"), unfinished).unwrap();
    let first = run.join(&event_files(&run)[0]);
    let whole = records(&first).len();
    let length = std::fs::metadata(&first).unwrap().len();
    let torn = std::fs::File::options().write(true).open(&first).unwrap();
    torn.set_len(length - 5).unwrap();
    assert_eq!(records(&first).len(), whole - 1);
    let before = std::fs::read(&first).unwrap();

    folder.train("run", &[&WATCHED[..], &["train.steps=6", "--resume"]].concat()).ok();
    let files = event_files(&run);
    assert_eq!(
        files,
        ["events.out.tfevents.0000000001.onebox", "events.out.tfevents.0000000002.onebox"]
    );
    assert_eq!(std::fs::read(&first).unwrap(), before, "an earlier file stays as it is");
    // A version, a session, the config twice, the evaluation after step 2, four steps and two
    // evaluations.
    assert_eq!(records(&run.join(&files[1])).len(), 11);
    tensorboard_reads(&run);

    folder.train("run", &[&WATCHED[..], &["train.steps=2", "--overwrite"]].concat()).ok();
    assert_eq!(event_files(&run), ["events.out.tfevents.0000000001.onebox"]);
    tensorboard_reads(&run);
}

#[test]
fn a_loss_that_is_not_finite_is_in_the_curves() {
    let folder = Folder::new();
    let broken = ["optimizer.lr=10", "--set", "optimizer.clip=None", "--set", "precision=Fp16"];
    folder.train("run", &[&WATCHED[..], &broken].concat());
    assert!(folder.read("run/metrics.jsonl").contains(":null,"));
    tensorboard_reads(&folder.path("run"));
}

#[test]
fn a_first_loss_that_the_weights_cannot_have_is_warned_of_once() {
    let folder = Folder::new();
    let steps = ["-q", "--set", "train.steps=2", "--set"];
    let quiet = folder.train("usual", &[&steps[..], &["train.seed=7"]].concat()).ok();
    assert!(!quiet.stderr.contains("warning"), "{}", quiet.stderr);
    let wide = folder.train("wide", &[&steps[..], &["model.init_std=0.9"]].concat()).ok();
    assert_eq!(wide.stderr.matches("warning: the loss of step 1 is").count(), 1, "{}", wide.stderr);
    assert!(wide.stderr.contains("model.init_std (0.9)"), "{}", wide.stderr);

    // These weights were hardly trained, and then count as a model from elsewhere.
    folder.onebox(&["checkpoint", "export", "usual", "hf", "--to", "safetensors"]).ok();
    let from =
        "(model: (from: \"hf\"), data: (train: \"text.txt\", tokenizer: None), train: (steps: 1))";
    std::fs::write(folder.path("from.ron"), from).unwrap();
    let imported = folder.onebox(&["train", "from.ron", "-q", "--run-dir", "imported"]).ok();
    let output = imported.stderr;
    assert!(output.contains("as if the model had not been trained on such text"), "{output}");
}

/// Two short runs and their names; one of the names is hostile.
fn two_runs(folder: &Folder) -> [&'static str; 2] {
    let names = ["wide", "<img src=x onerror=\"alert(1)\">,'&"];
    for (run, lr) in names.iter().zip(["1e-3", "6e-3"]) {
        let lr = format!("optimizer.lr={lr}");
        folder.train(run, &["-q", "--set", &lr, "--set", "train.checkpoint_every=9"]).ok();
    }
    names
}

#[test]
fn a_report_is_one_page_that_loads_nothing_and_shows_every_curve_of_every_run() {
    let folder = Folder::new();
    let runs = two_runs(&folder);
    // One run is still training, and its last line is incomplete.
    let metrics = folder.read("wide/metrics.jsonl");
    let begun = metrics.split_inclusive('\n').take(4).collect::<String>() + "{\"kind\":\"st";
    std::fs::write(folder.path("wide/metrics.jsonl"), begun).unwrap();
    let report = ["report", runs[0], runs[1], "-o", "page.html"];
    folder.onebox(&report).ok();
    let page = folder.read("page.html");
    assert!(page.starts_with("<!doctype html>") && page.ends_with("</body></html>\n"));
    for loads in ["<script", "<link", "<img", "<iframe", "href=", "@import", "url(", "//"] {
        let page = page.replace("http://www.w3.org/2000/svg", "");
        assert!(!page.contains(loads), "the page has {loads}");
    }
    let curves = [
        "Loss",
        "Validation loss",
        "Learning rate",
        "Gradient norm",
        "Throughput",
        "Memory of the fullest",
        "Memory of the process",
    ];
    for curve in curves {
        let head = format!("aria-label=\"{curve}");
        assert_eq!(page.matches(&head).count(), 1, "{curve}");
    }
    let plots: Vec<&str> = page.split("<svg").skip(1).collect();
    assert_eq!(plots.len(), curves.len(), "without a loss scale");
    assert!(plots.iter().all(|plot| plot.contains("&lt;img src=x") && plot.contains("<polyline")));
    for words in ["optimizer.lr", "2/4", "4/4", "not done", "done; state "] {
        assert!(page.contains(words), "{words}");
    }
    // A report replaces only another report.
    folder.onebox(&report).ok();
    folder
        .onebox(&["report", "wide", "-o", "tiny.ron"])
        .refused(74, &["no report that onebox wrote"]);
}

#[test]
fn a_report_that_cannot_be_written_leaves_the_one_before() {
    let folder = Folder::new();
    folder.train("run", &["-q"]).ok();
    folder.onebox(&["report", "run", "-o", "page.html"]).ok();
    let before = folder.read("page.html");
    let names = || {
        let names = std::fs::read_dir(folder.path("")).unwrap();
        let mut names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let all = names();
    // The file system takes 8 blocks of 512 bytes of a file.
    let limited = |page: &str| {
        let onebox = env!("CARGO_BIN_EXE_onebox");
        folder.shell(&format!("ulimit -f 8; exec {onebox} report run run -o {page}"))
    };
    limited("page.html").refused(74, &["cannot write page.html", "File too large"]);
    assert_eq!(folder.read("page.html"), before);
    limited("other.html").refused(74, &["cannot write other.html"]);
    assert_eq!(names(), all);
    // A link is written through, and a page keeps its permissions.
    std::os::unix::fs::symlink("page.html", folder.path("link.html")).unwrap();
    let mode = std::fs::Permissions::from_mode(0o640);
    std::fs::set_permissions(folder.path("page.html"), mode).unwrap();
    folder.onebox(&["report", "run", "run", "-o", "link.html"]).ok();
    let through = folder.read("page.html");
    assert!(through != before && folder.path("link.html").is_symlink());
    folder.onebox(&["report", "run", "-o", "page.html"]).ok();
    let mode = std::fs::metadata(folder.path("page.html")).unwrap().permissions().mode();
    assert_eq!((folder.read("page.html"), mode & 0o777), (before, 0o640));
}

#[test]
fn a_table_has_every_step_and_evaluation() {
    let folder = Folder::new();
    folder.train("run", &["-q"]).ok();
    let done = folder.onebox(&["report", "run", "--csv"]).ok();
    let rows: Vec<Vec<&str>> = done.stdout.lines().map(|line| line.split(',').collect()).collect();
    let kinds: Vec<&str> = rows.iter().map(|row| row[1]).collect();
    assert_eq!(kinds, ["kind", "step", "step", "eval", "step", "step", "eval"]);
    let columns = ["step", "tokens", "loss", "grad_norm", "lr"]
        .map(|name| rows[0].iter().position(|head| *head == name).unwrap());
    let steps = folder.metrics("run").into_iter().filter(|line| line["kind"] == "step");
    for (line, row) in steps.zip(rows.iter().filter(|row| row[1] == "step")) {
        for (name, column) in ["step", "tokens", "loss", "grad_norm", "lr"].iter().zip(columns) {
            assert_eq!(row[column].parse::<f64>().unwrap(), line[name].as_f64().unwrap(), "{name}");
        }
    }
    folder.onebox(&["report", "run", "--csv", "run.csv", "-o", "page.html"]).ok();
    assert_eq!(folder.read("run.csv"), done.stdout);
    assert_eq!(folder.onebox(&["report", "run", "--csv", "-"]).ok().stdout, done.stdout);
    assert_eq!(folder.onebox(&["report", "--csv", "-", "run"]).ok().stdout, done.stdout);
    assert!(!folder.path("-").exists());
    let texts = ["no run is named", "a file called run.", "say `onebox report run --csv`"];
    folder.onebox(&["report", "--csv", "run"]).refused(2, &texts);
    folder.onebox(&["report", "--csv"]).refused(2, &["no run is named"]);
}

#[test]
fn a_report_of_nothing_is_refused() {
    let folder = Folder::new();
    folder.train("run", &["-q"]).ok();
    folder
        .onebox(&["report", "run", "none", "-o", "a.html"])
        .refused(73, &["none: no run is there"]);
    assert!(!folder.path("a.html").exists());
    folder.onebox(&["report", "run"]).refused(2, &["--output <PAGE.html>", "--csv"]);
    // A run that has just begun has no curves yet.
    std::fs::write(folder.path("run/metrics.jsonl"), "").unwrap();
    folder.onebox(&["report", "run", "-o", "begun.html"]).ok();
    let begun = folder.read("begun.html");
    assert!(begun.contains("0/4") && !begun.contains("<svg"), "{begun}");
    folder.onebox(&["report", "run", "--csv", "run"]).refused(74, &["it is a directory"]);
    folder.onebox(&["report", "run", "-o", "no/a.html"]).refused(74, &["there is no directory no"]);
}

#[test]
fn a_plot_is_drawn_of_lines_and_a_line_that_is_none_is_named() {
    let folder = Folder::new();
    let plot = |lines: &str, how: &str| {
        let run = format!("printf '{lines}' | {} plot {how}", env!("CARGO_BIN_EXE_onebox"));
        folder.shell(&run)
    };
    let lines = r"a\t1\t100\na\t4\t350\nb\t1\t90\nb\t4\t-\n";
    let svg = plot(lines, "lines --title A --logarithmic xy --ideal").ok().stdout;
    assert!(
        svg.starts_with("<svg ") && svg.contains(">\nideal\n<") && svg.contains(">\n350\n<"),
        "{svg}"
    );
    let bars = plot(lines, "bars --x GPUs").ok().stdout;
    assert!(bars.contains(">\nGPUs\n<") && bars.contains(">\n90\n<"), "{bars}");
    plot("a b", "bars").refused(78, &["line 1, \"a b\"", "tabs"]);
    plot(r"a\tx\t1", "lines").refused(78, &["the place of a line must be a number"]);
    plot(r"a\t1\tx", "lines").refused(78, &["the value must be a number"]);
    plot(r"a\t0\t1", "lines --logarithmic x").refused(78, &["not above 0"]);
    assert!(plot("", "lines").ok().stdout.contains("</svg>"));
}
