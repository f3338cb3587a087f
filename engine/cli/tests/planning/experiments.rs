//! The experiments in `scripts/` on tiny cases: their output, and pages that load no other files.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use crate::common::{CommandOutput, Folder};
use std::path::Path;
use std::process::{Command, Stdio};

/// A box of two GPUs without a topology, and a model for it.
const BOX: &str = r#"(
    gpus: 2, gpu_memory: "2GiB", numa_nodes: 1, node_memory: "4GiB",
    gpu: (gemm_tflops: 2, fp32_tflops: 1, memory_gb_per_s: 100, processors: 20, sm: 80),
    host: (node_gb_per_s: 20, core_gb_per_s: 5, cores: 4, link_gb_per_s: 8),
)"#;
const MODEL: &str = r#"(
    device: Sim(box: "box.ron"),
    model: (layers: 2, hidden: 128, heads: 2, seq_len: 64),
    parallel: (data: 2),
    batch: (micro: 1, global: 4),
    train: (steps: 1),
)"#;

fn folder() -> Folder {
    let folder = Folder::new();
    std::fs::write(folder.path("box.ron"), BOX).unwrap();
    std::fs::write(folder.path("model.ron"), MODEL).unwrap();
    folder
}

/// Runs `scripts/NAME`.
fn script(folder: &Folder, name: &str, args: &[&str]) -> CommandOutput {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts").join(name);
    let mut command = Command::new(path);
    command.args(args).env("ONEBOX", env!("CARGO_BIN_EXE_onebox")).stdin(Stdio::null());
    command.current_dir(folder.path(""));
    Folder::done(command)
}

/// Rows of a CSV file under its header.
fn rows(folder: &Folder, file: &str, header: &str) -> Vec<Vec<String>> {
    let text = folder.read(file);
    let mut lines = text.lines();
    let found = lines.next().unwrap();
    assert_eq!(found, header, "{file}");
    let columns = header.split(',').count();
    let row = |line: &str| -> Vec<String> { line.split(',').map(str::to_owned).collect() };
    let rows: Vec<_> = lines.map(row).collect();
    assert!(rows.iter().all(|row| row.len() == columns), "{file}: {text}");
    rows
}

fn number(text: &str) -> f64 {
    text.parse().unwrap_or_else(|_| panic!("`{text}` is not a number"))
}

/// Asserts that the page in `out` loads nothing, and names the origin of each table and plot.
fn page(folder: &Folder, out: &str, word: &str) -> String {
    let page = folder.read(&format!("{out}/index.html"));
    assert!(page.starts_with("<!doctype html>") && page.ends_with("</body></html>\n"));
    for loads in ["<script", "<link", "<img", "src=", "@import", "url("] {
        assert!(!page.contains(loads), "the page has {loads}");
    }
    for plot in page.split("<svg").skip(1) {
        assert!(plot.split("</svg>").next().unwrap().contains(word), "a plot without {word}");
    }
    for after in page.split("</table>\n<p class=\"caption\">").skip(1) {
        let caption = after.split("</p>").next().unwrap().to_lowercase();
        assert!(caption.contains(word) || caption.contains("real runs"), "{caption}");
    }
    assert!(page.contains("onebox simulate ") || page.contains("onebox plan "), "no commands");
    page
}

#[test]
fn the_largest_model_grows_from_data_parallel_to_offload_with_tensor_parallel() {
    let folder = folder();
    let args = ["box.ron", "--hidden", "256", "--micro", "1", "--gpus", "2", "--out", "out"];
    script(&folder, "max-model-size", &args).ok();
    let header = "system,gpus,simulated_billions,layers,hidden,micro,tp,dp,gpu_gib,bound_by";
    let rows = rows(&folder, "out/sizes.csv", header);
    let layers: Vec<f64> = rows.iter().map(|row| number(&row[3])).collect();
    let names: Vec<&str> = rows.iter().map(|row| row[0].as_str()).collect();
    let systems = ["data parallel", "tensor parallel", "ZeRO-2"];
    let offloads = ["ZeRO-Offload", "ZeRO-Offload + TP", "parameters on the host"];
    assert_eq!(names, [systems, offloads].concat());
    assert!(layers[0] > 0.0 && layers[0] < layers[2] && layers[2] < layers[1], "{layers:?}");
    assert!(layers[2] < layers[3] && layers[3] < layers[4], "{layers:?}");
    assert!(layers[5] > layers[3], "{layers:?}");
    page(&folder, "out", "simulated");
    // The page agrees with `plan`: this number of layers fits, and no more.
    let commands = folder.read("out/commands.txt");
    let plans: Vec<&str> =
        commands.lines().filter(|line| line.starts_with("onebox plan")).collect();
    assert!(plans.len() >= 2 * rows.len(), "{commands}");
}

#[test]
fn real_sizes_are_trained_and_the_next_is_refused() {
    let folder = folder();
    let args = ["--real", "--gpus", "1", "--memory", "12MiB", "--hidden", "64", "--micro", "1"];
    let args = [&args[..], &["--out", "out"]].concat();
    script(&folder, "max-model-size", &args).ok();
    let header = "system,gpus,trained_millions,layers,hidden,micro,tp,dp,gpu_mib,bound_by";
    let rows = rows(&folder, "out/sizes.csv", header);
    assert_eq!(rows.len(), 2);
    let (device, host) = (number(&rows[0][3]), number(&rows[1][3]));
    assert!(device >= 1.0 && host > 2.0 * device, "{device} {host}");
    assert!(!page(&folder, "out", "trained").contains("class=\"tag\""), "nothing is simulated");
    // A size of zero is no result.
    let args = ["--real", "--gpus", "1", "--memory", "2MiB", "--hidden", "64", "--out", "none"];
    let texts = ["data parallel on 1 virtual GPU: not even one layer fits", "--memory than 2MiB"];
    script(&folder, "max-model-size", &args).refused(1, &texts);
    assert!(!folder.path("none/index.html").exists());
}

#[test]
fn speed_over_gpus_and_batches_is_simulated_and_says_so() {
    let folder = folder();
    script(&folder, "scale-gpus", &["model.ron", "--out", "gpus"]).ok();
    let header = "gpus,tp,dp,micro,global,simulated_step_seconds,simulated_tokens_per_second,\
                  simulated_tflops_per_gpu,efficiency,fits,bound_by";
    let gpus = rows(&folder, "gpus/gpus.csv", header);
    let counts: Vec<&str> = gpus.iter().map(|row| row[0].as_str()).collect();
    assert_eq!(counts, ["1", "2"]);
    assert!(number(&gpus[1][6]) > number(&gpus[0][6]), "{gpus:?}");
    page(&folder, "gpus", "simulated");

    let args = ["model.ron", "box.ron", "--micro-batches", "1 4", "--out", "batch"];
    script(&folder, "scale-batch", &args).ok();
    let header = "schedule,global,micro_batches,simulated_step_seconds,\
                  simulated_tokens_per_second,simulated_tflops_per_gpu,fits,bound_by";
    let batch = rows(&folder, "batch/batch.csv", header);
    let seconds = |schedule: &str, global: &str| {
        let row = batch.iter().find(|row| row[0] == schedule && row[1] == global).unwrap();
        number(&row[3])
    };
    assert_eq!(batch.len(), 10);
    assert!(seconds("Delayed", "2") < seconds("Overlapped", "2"), "{batch:?}");
    assert!(seconds("Overlapped", "2") < seconds("Serial", "2"), "{batch:?}");
    assert!(seconds("Serial", "8") < seconds("Blocking", "8"), "{batch:?}");
    page(&folder, "batch", "simulated");

    // With parameters on the host there are fewer schedules.
    let host = "recompute: Block, offload: (parameters: Host), train:";
    std::fs::write(folder.path("host.ron"), MODEL.replace("train:", host)).unwrap();
    script(&folder, "scale-batch", &["host.ron", "--micro-batches", "1 4", "--out", "host"]).ok();
    let schedules: Vec<String> =
        rows(&folder, "host/batch.csv", header).into_iter().map(|row| row[0].clone()).collect();
    assert_eq!(schedules, ["Serial", "Serial", "Overlapped", "Overlapped"]);
}

#[test]
fn rows_of_the_paper_stand_beside_simulated_ones() {
    let folder = folder();
    let rows_of =
        "^(7,ZeRO-Offload,1,|9,.*,2$|10,(ZeRO-Offload|PyTorch DDP),16,1$|T4,CPU-Adam,16,1$)";
    script(&folder, "reproduce-paper", &["--rows", rows_of, "--out", "out"]).ok();
    let header = "figure,system,gpus,billions,tp,dp,micro,global,paper,read,simulated,ratio,\
                  default_schedule,step_seconds,at_50,at_60,without_scores,without_heads,\
                  without_small_kernels,without_pageable,without_one_copier,without_adam_rate,\
                  without_unscaling,without_host_checkpoints,without_no_sequence,without_all,bound_by";
    let speeds = rows(&folder, "out/throughput.csv", header);
    let row = |figure: &str, system: &str| {
        speeds.iter().find(|row| row[0] == figure && row[1] == system).unwrap()
    };
    let ours = row("10", "ZeRO-Offload");
    assert_eq!((ours[8].as_str(), ours[9].as_str()), ("35.8", "off the bar"));
    let (paper, simulated, ratio) = (number(&ours[8]), number(&ours[10]), number(&ours[11]));
    assert!((simulated / paper - ratio).abs() < 0.01, "{ours:?}");
    assert!(number(&ours[14]) < number(&ours[15]) && number(&ours[15]) < simulated, "{ours:?}");
    assert!(number(&ours[12]) > simulated, "onebox's own schedule is the faster one: {ours:?}");
    assert_eq!(row("9", "ZeRO-Offload with DPU")[10], "-", "what is not built has no number");
    let header = "figure,system,gpus,billions,paper,read,simulated,ratio,layers,tp,dp,bound_by";
    let sizes = rows(&folder, "out/sizes.csv", header);
    assert!((number(&sizes[0][7]) - 1.0).abs() < 0.1, "13B on one GPU: {sizes:?}");
    let header = "figure,system,gpus,billions,paper,read,simulated,ratio,gb_per_s,of_2020";
    assert_eq!(rows(&folder, "out/adam.csv", header).len(), 1);
    let text = page(&folder, "out", "simulated");
    assert!(text.contains("within 15 %") || text.contains("Within 15 %"));
    assert!(folder.read("out/report.md").contains("simulated"));
}

#[test]
fn the_experiments_explain_themselves_and_refuse_what_they_cannot_do() {
    let folder = folder();
    for name in ["max-model-size", "scale-gpus", "scale-batch", "reproduce-paper"] {
        let help = script(&folder, name, &["--help"]).ok();
        assert!(help.stdout.contains("--out DIR") && help.stdout.contains(name), "{}", help.stdout);
        assert!(!help.stdout.contains('#'), "{}", help.stdout);
        script(&folder, name, &["--colour"]).refused(2, &["no option --colour", "--help"]);
        script(&folder, name, &["--out"]).refused(2, &["--out needs a value"]);
        script(&folder, name, &["nothing.ron"]).refused(1, &["no file nothing.ron"]);
        script(&folder, name, &["text.txt"]).refused(1, &["neither a config", "nor a box"]);
    }
    let more = ["model.ron", "--gpus", "2 3", "--out", "out", "box.ron"];
    script(&folder, "scale-gpus", &more).refused(1, &["onebox simulate", "78"]);
    let by = ["model.ron", "--processes", "1 2", "--out", "out"];
    script(&folder, "scale-gpus", &by)
        .refused(1, &["--processes needs a CONFIG with `device: Cpu`"]);
    let both = [&by[..], &["--gpus", "2"]].concat();
    script(&folder, "scale-gpus", &both).refused(2, &["leave --gpus out"]);
}

/// The table in ARCHITECTURE.md and the picture in docs must match the program.
#[test]
fn the_step_is_drawn_as_it_runs() {
    let folder = Folder::new();
    script(&folder, "draw-step", &["--check"]).ok();
    script(&folder, "draw-step", &["--chek"]).refused(2, &["no option --chek"]);
}
