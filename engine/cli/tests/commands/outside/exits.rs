//! The exit code of each situation that a test can create directly. The tests of signals cover 75
//! and 130; 70 is a bug, and 134 is a machine without memory.

use super::{line_of_words, on_gpus, with_runs};
use crate::common::CommandOutput;
use std::fs;

/// A situation, and a command that causes it in the folder of [`with_runs`].
const SITUATIONS: [(&str, &str); 32] = [
    (
        "a box has too little memory for a placement",
        "topology --xml ROOT/configs/boxes/topologies/dgx2.xml --check --states 900GiB",
    ),
    ("a config is right", "config check tiny.ron"),
    ("a plan fits its box", "plan tiny.ron --box dgx-a100"),
    ("a checkpoint is whole", "checkpoint verify run"),
    ("checkpoints are equal", "checkpoint diff run run"),
    ("checkpoints differ", "checkpoint diff run other"),
    ("a plan does not fit its box", "plan one.ron --box none.ron"),
    ("a simulated run does not fit its box", "simulate one.ron --box none.ron --no-schedules"),
    ("no layout of a search fits", "plan one.ron --search --box none.ron"),
    (
        "a placement does not fit a box",
        "topology --xml ROOT/configs/boxes/topologies/dgx2.xml --tp 4096",
    ),
    ("no command is given", ""),
    ("a command is unknown", "learn"),
    ("an option is unknown", "plan tiny.ron --jsn"),
    ("options exclude each other", "plan tiny.ron --ops --search"),
    ("a file of data is absent", "train tiny.ron --run-dir new --set data.train=\"absent\""),
    ("data to check is absent", "data check tiny.ron --set data.train=\"absent\""),
    ("a box to show is absent", "topology --xml absent.xml"),
    (
        "a run to compare with is absent",
        "simulate tiny.ron --box dgx-a100 --no-schedules --compare absent",
    ),
    ("a run directory has a run", "train tiny.ron --run-dir run"),
    ("a folder of prepared data has something else", "data prepare chat.ron run"),
    ("a trace cannot be written", "simulate tiny.ron --box dgx-a100 --trace absent/trace"),
    ("a config is absent", "train absent.ron"),
    ("a key is unknown", "config check tiny.ron --set model.hiden=3"),
    ("a value is out of its range", "plan tiny.ron --set model.layers=0"),
    ("a box is unknown", "plan tiny.ron --box nothing"),
    (
        "a resumed run is another experiment",
        "train tiny.ron --run-dir run --resume --set train.seed=2",
    ),
    (
        "every step is skipped",
        "train tiny.ron --run-dir skipped --set precision=Fp16 --set loss_scale.initial=16777216 --set loss_scale.floor=16777216 --set train.stop_after_skipped=2",
    ),
    (
        "host memory is too small",
        "train one.ron --run-dir new --set device.memory=\"900TiB\" --set model.layers=1 --set model.heads=512 --set model.hidden=65536 --set model.vocab=16777216",
    ),
    ("GPU memory is too small", "train tiny.ron --run-dir new --set device.memory=\"64KiB\""),
    ("a checkpoint is broken", "checkpoint verify broken"),
    ("no checkpoint of a run is intact", "train tiny.ron --run-dir broken --resume"),
    (
        "the last checkpoint cannot be saved",
        "train tiny.ron --run-dir full --set train.checkpoint_every=2",
    ),
];

/// Lines `CODE  situation`, sorted.
pub(super) fn text() -> String {
    let folder = with_runs();
    fs::create_dir(folder.path("full")).unwrap();
    fs::write(folder.path("full/checkpoints"), "").unwrap();
    let mut lines = Vec::new();
    let mut add = |situation: &str, done: CommandOutput| {
        assert!(!done.stderr.contains("panicked"), "{situation}: {}", done.stderr);
        lines.push(format!("{:>3}  {situation}\n", done.code));
    };
    for (situation, line) in SITUATIONS {
        add(situation, line_of_words(&folder, line));
    }
    let train = ["train", "one.ron", "--run-dir", "gpus", "--set", "device=Cuda"];
    for (situation, variables) in [
        // First, since a GPU that has passed its proof is not proven again.
        ("a GPU computes other numbers than the CPU", ("FAKECUDA_WRONG", "gemm")),
        ("a kernel fails on a GPU", ("FAKECUDA_FAIL", "launch:60@0")),
        ("a GPU has too little memory", ("FAKECUDA_MEMORY", "150000")),
        ("there is no GPU to train on", ("FAKECUDA_DEVICES", "0")),
    ] {
        add(situation, on_gpus(&folder, &train, &[variables]));
        drop(fs::remove_dir_all(folder.path("gpus")));
    }
    add(
        "a wanted GPU is absent",
        on_gpus(&folder, &["doctor", "--cuda"], &[("FAKECUDA_DEVICES", "0")]),
    );
    lines.sort();
    lines.concat()
}
