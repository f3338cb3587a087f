//! Whole steps.

use super::{Bound, ClassRatios, bound, boxes, check, full, models, rows, table};
use config::{Config, DeviceConfig};
use layout::LocalMachine;
use layout::build::lay_out;
use predict::plan::memory_report;
use predict::range::RateRange;
use predict::simulate::{simulate, summary};
use std::collections::BTreeMap;
use std::path::Path;

const STEPS: &str = include_str!("steps.csv");

/// Bytes of a GPU's and of a node's memory. Peers keep 6 to 16 bytes for each parameter; times do not
/// depend on the size of a memory.
const MEMORY: [u64; 2] = [1 << 42, 1 << 44];

type Row = BTreeMap<&'static str, &'static str>;

fn config(row: &Row) -> Config {
    let number = |key: &str| row[key].parse::<usize>().unwrap_or_else(|e| panic!("{key}: {e}"));
    let (gpus, tensor) = (number("gpus"), number("tensor"));
    let states = match row["states"] {
        "Device" => "offload: (optimizer: Device)",
        "Host" => "offload: (optimizer: Host)",
        "Serial" => "offload: (optimizer: Host, update: Serial)",
        "Small" => "offload: (optimizer: Host, master: Split, moments: Bf16)",
        "Streamed" => "offload: (optimizer: Host, parameters: Host)",
        "Blocking" => {
            "offload: (optimizer: Host, update: Serial, transfer: Blocking, keep_gradients: true)"
        }
        other => panic!("{other} is no place of states"),
    };
    let ron = format!(
        "(name: \"row\", device: Sim(box: \"{}\"), model: ({}, seq_len: {}), parallel: (tensor: {tensor}, data: {}),
          precision: {}, recompute: {}, host_checkpoints: {}, attention: {}, {states},
          batch: (micro: {}, global: {}), data: (train: \"tokens.bin\", format: U32), train: (steps: 10))",
        row["box"],
        models::keys(row["model"]),
        row["tokens"],
        gpus / tensor,
        row["precision"],
        row["recompute"],
        row["checkpoints"] == "host",
        row["attention"],
        row["micro"],
        row["global"],
    );
    let loaded = config::load_str(&ron, "row.ron", Path::new("."), &[]);
    let mut config = loaded.unwrap_or_else(|e| panic!("{row:?}: {e}")).config;
    let described = boxes::described(row["box"], row["changes"]).with_memory(MEMORY[0], MEMORY[1]);
    if let DeviceConfig::Sim { box_, .. } = &mut config.device {
        **box_ = described;
    }
    config
}

/// Simulated value of a row in its unit, and the range of a rate.
fn simulated(row: &Row) -> (f64, RateRange) {
    let config = config(row);
    let built = lay_out(&config, &LocalMachine::default());
    let timeline = simulate(&config, &built).unwrap_or_else(|e| panic!("{row:?}: {e}"));
    let report = summary(&config, &memory_report(&config, &built), &timeline);
    let value = match row["unit"] {
        "tok/s" => report.tokens_per_second,
        "tok/s/GPU" => report.tokens_per_second / config.world_size() as f64,
        "model TFLOPS/GPU" => report.model_tflops_per_gpu,
        "s/step" => report.step_seconds,
        other => panic!("{other} is no unit of a step"),
    };
    (value, report.range)
}

/// Classes whose steps may be outside of the range of a simulation. It is that of onebox: these programs
/// are much slower (nanoGPT), older, or have a library's attention, which is twice as fast.
const OUTSIDE: [&str; 3] = ["other programs", "software of 2020", "H200 FSDP"];

/// Simulated speed over measured speed.
fn ratio(row: &Row, simulated: f64) -> f64 {
    let measured: f64 = row["measured"].parse().unwrap();
    if row["unit"] == "s/step" { measured / simulated } else { simulated / measured }
}

#[test]
fn whole_steps_are_simulated_as_they_were_measured() {
    let all = rows(STEPS);
    let stride = if full() { 1 } else { 3 };
    let mut classes: BTreeMap<&str, ClassRatios> = BTreeMap::new();
    let mut outside = Vec::new();
    for row in all.iter().step_by(stride) {
        let (value, range) = simulated(row);
        let found = ratio(row, value);
        println!(
            "{:5.3} {:5} {} | {} {} x{} {} {} {} {}: {value:.0} of {} {}",
            found,
            row["before"],
            row["class"],
            row["use"],
            row["box"],
            row["gpus"],
            row["model"],
            row["tokens"],
            row["precision"],
            row["states"],
            row["measured"],
            row["unit"]
        );
        let is_within = range.low * found <= 1.0 && 1.0 <= range.high * found;
        if !is_within && !OUTSIDE.contains(&row["class"]) {
            outside.push(format!("{row:?}: {:.3} of the simulated speed: {range:?}", 1.0 / found));
        }
        let class = classes.entry(row["class"]).or_default();
        class.now.push(found);
        if let Ok(before) = row["before"].parse() {
            class.before.push(before);
        }
    }
    println!("{}", table(&classes));
    check(&classes, BOUNDS, full());
    assert!(outside.is_empty(), "outside of the range:\n{}", outside.join("\n"));
}

/// Bounds of the errors by class. Beside each: the number of rows, and the geometric mean and the ends of
/// simulated over measured speed on 2026-11-27.
const BOUNDS: &[Bound] = &[
    // 2 rows: 0.97; 0.93 to 1.00.
    bound("DeepSpeed ZeRO-2 at 8k tokens", [0.94, 0.99], [0.91, 1.03]),
    // 3 rows: 0.91; 0.85 to 0.95.
    bound("H200 FSDP", [0.88, 0.93], [0.82, 0.98]),
    // 14 rows: 1.10; 1.00 to 1.33.
    bound("MosaicML A100", [1.08, 1.13], [0.97, 1.35]),
    // 12 rows: 1.29; 1.18 to 1.50.
    bound("MosaicML H100", [1.27, 1.32], [1.15, 1.53]),
    // 1 rows: 0.89; 0.89 to 0.89.
    bound("RTX 5060 Ti", [0.86, 0.91], [0.86, 0.91]),
    // 5 rows: 1.01; 1.00 to 1.02.
    bound("RTX PRO 6000", [0.99, 1.04], [0.98, 1.04]),
    // 3 rows: 1.22; 1.13 to 1.27.
    bound("TP", [1.19, 1.24], [1.11, 1.30]),
    // 10 rows: 0.97; 0.93 to 1.06.
    bound("best programs with states on the GPU", [0.94, 0.99], [0.90, 1.09]),
    // 7 rows: 1.00; 0.91 to 1.07.
    bound("best programs with states on the host", [0.97, 1.02], [0.89, 1.09]),
    // 2 rows: 1.28; 1.24 to 1.33.
    bound("fms-fsdp H100", [1.26, 1.31], [1.22, 1.35]),
    // 6 rows: 0.86; 0.77 to 0.96.
    bound("fp8", [0.84, 0.89], [0.74, 0.98]),
    // 4 rows: 0.96; 0.95 to 0.96.
    bound("onebox on one H200", [0.93, 0.98], [0.92, 0.99]),
    // 2 rows: 1.15; 1.11 to 1.19.
    bound("onebox on one H200 with Adam of 8B on 16 cores", [1.13, 1.18], [1.09, 1.22]),
    // 2 rows: 1.64; 1.44 to 1.86.
    bound("other programs", [1.61, 1.66], [1.42, 1.88]),
    // 1 rows: 0.85; 0.85 to 0.85.
    bound("software of 2020", [0.83, 0.88], [0.83, 0.88]),
    // 1 rows: 1.15; 1.15 to 1.15.
    bound("torchtitan H100 at 500 W", [1.13, 1.18], [1.13, 1.18]),
];
