//! The range of a simulated rate: what a run on that box may reach, by the class of box and layout.
//!
//! The table below has a row for each class, with the ratios of measured to simulated speed that were
//! found for it. A box and a layout of several classes has the product of their factors.
//! `docs/simulator.md` shows the table.

use config::{Attention, BoxConfig, Config, ParameterPlace, Precision};
use serde::Serialize;

/// Factors of a class on the ends of a range.
#[derive(Clone, Copy, Debug, PartialEq)]
struct ErrorClass {
    /// Words for the class, in a sentence about several classes.
    words: &'static str,
    /// Factor on the low end.
    low: f64,
    /// Factor on the high end.
    high: f64,
}

const fn class(words: &'static str, low: f64, high: f64) -> ErrorClass {
    ErrorClass { words, low, high }
}

/// Steps of onebox on one H200: 0.90 to 1.05 of their simulated speed, in four steps of two models
/// on one card (`tests/published/steps.csv`). Each end of the range is 10 percentage points further
/// out, because four steps are few.
const ON_ONE_H200: ErrorClass = class("onebox on one H200", 0.8, 1.15);

/// Boxes and layouts on which onebox has not run. Whole steps of other programs had 0.66 to 1.00 of
/// the simulated speed (29 steps of PyTorch on A100 and H100), and 0.94 to 1.13 (25 of 26 steps of
/// LLMQ, SlideFormer and KempnerForge in bf16 without TP).
const NOT_RUN: ErrorClass = class("not run", 0.65, 1.15);

/// A card without compared steps: seven steps on an RTX PRO 6000 had 0.83 to 0.96 of the speed that its
/// data sheet gave, two on an RTX 5060 Ti 1.08 and 1.12.
const DATA_SHEET: ErrorClass = class("rates of a card whose steps were not compared", 0.85, 1.0);

/// Three steps of KempnerForge with TP 2 and 4 on H200 had 0.78 to 0.88, and its steps without TP 1.05 to 1.18.
const TENSOR_PARALLEL: ErrorClass = class("TP", 0.8, 1.0);

/// NCCL over PCIe reaches 1.5 to 41 GB/s on the hosts that were measured, with the same cards and links.
const SUMS_OVER_PCIE: ErrorClass = class("sums over PCIe, whose speed the host decides", 0.5, 1.25);

/// IBM's two steps on 96 H100 had 0.75 and 0.81, with one box simulated.
const MACHINES: ErrorClass = class("several machines", 0.8, 1.0);

/// Attention is a larger part of such steps, and onebox's kernels for it were measured on an H200 only. Eleven
/// steps of PyTorch, with a library's attention, had 0.80 to 1.07.
const LONG: ErrorClass = class("samples of more than 4096 tokens", 0.9, 1.1);

/// Two steps of PyTorch with 512 tokens had 0.73 and 0.91. onebox's attention was measured from 1024 tokens on.
const SHORT: ErrorClass = class("samples of fewer than 1024 tokens", 0.95, 1.0);

/// Six steps of LLMQ in fp8 had 1.04 to 1.30, and one of PyTorch 0.85.
const FP8: ErrorClass = class("fp8", 0.9, 1.14);

/// Cards (compute capability, multiprocessors) with whole steps in `tests/published/steps.csv`. At least one
/// step of each card is within 15 % of the simulation: H100 SXM and H200, RTX 4090, A100, RTX PRO 6000, RTX 5060 Ti, B200.
const COMPARED_CARDS: [(u32, usize); 6] =
    [(90, 132), (89, 128), (80, 108), (120, 188), (120, 36), (100, 148)];

/// Range of a simulated rate, relative to the rate.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RateRange {
    /// Low end divided by the simulated rate.
    pub low: f64,
    /// High end divided by the simulated rate.
    pub high: f64,
    /// Sentence about the origin of the range.
    pub reason: String,
}

impl RateRange {
    /// Range of the rates of `config` on the box `b`.
    pub fn new(config: &Config, b: &BoxConfig) -> Self {
        let base = if has_run(config, b) { ON_ONE_H200 } else { NOT_RUN };
        let wider = wider(config, b);
        let low = wider.iter().fold(base.low, |low, class| low * class.low);
        let high = wider.iter().fold(base.high, |high, class| high * class.high);
        // The steps that were measured on the box are within its range.
        let low = residuals(b).into_iter().fold(low, f64::min);
        let high = residuals(b).into_iter().fold(high, f64::max);
        let percent = |end: f64| format!("{:+.0} %", 100.0 * (end - 1.0));
        let (range, plain) = (
            format!("{} / {}", percent(low), percent(high)),
            format!("{} / {}", percent(NOT_RUN.low), percent(NOT_RUN.high)),
        );
        let reason = if base == ON_ONE_H200 {
            format!(
                "the range is {range}, since four steps of onebox on one H200 had 0.90 to 1.05 of their simulated speed"
            )
        } else {
            let words: Vec<&str> = wider.iter().map(|class| class.words).collect();
            let because = match words[..] {
                [] => String::new(),
                _ => format!("; this one is wider for: {}", words.join("; ")),
            };
            format!(
                "the range is {range}: onebox has run on one H200 only, and no range of anything else is narrower than \
                 {plain}{because}"
            )
        };
        Self { low, high, reason }
    }

    /// Low and high end for the simulated rate `rate`.
    pub fn of_rate(&self, rate: f64) -> [f64; 2] {
        [self.low * rate, self.high * rate]
    }
}

/// Influence of a key of a box on the simulated speed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct KeyInfluence {
    /// Dotted key of the box.
    pub key: &'static str,
    /// Percent by which the speed grows if the key is 10 % larger.
    pub percent: f64,
}

impl KeyInfluence {
    /// Sentence about the influence, for a report.
    pub fn words(&self) -> String {
        let Self { key, percent } = self;
        format!("this hangs on {key} most: 10 % there are {percent:.0} % here")
    }
}

/// Whether onebox has run steps of this class on a GPU: one GPU of Hopper with 132 multiprocessors (H200, or
/// H100 SXM, which has the same chip) at its full clock, bf16, 1024 to 4096 tokens, onebox's attention, parameters
/// on the GPU.
fn has_run(config: &Config, b: &BoxConfig) -> bool {
    b.measured.is_none()
        && !b.gpu.as_of_2020
        && (b.gpu.sm, b.gpu.processors) == (90, 132)
        && b.gpu.clock_share >= 1.0
        && config.world_size() == 1
        && config.precision == Precision::Bf16
        && config.attention != Attention::Cudnn
        && config.offload.parameters == ParameterPlace::Device
        && (1024..=4096).contains(&config.model.seq_len)
}

/// Classes that make the range wider.
fn wider(config: &Config, b: &BoxConfig) -> Vec<ErrorClass> {
    if b.measured.is_some() {
        // Cores in place of GPUs: `scripts/check-simulator` compares their steps, with 0.71 to 1.12.
        return Vec::new();
    }
    let (tp, dp, tokens) = (config.parallel.tensor, config.parallel.data, config.model.seq_len);
    let compared = COMPARED_CARDS.contains(&(b.gpu.sm, b.gpu.processors));
    let several = tp * dp > b.gpus / b.machines.max(1);
    // A rate of a bundled box is that of another host with the same cards.
    let has_measured_sums = b.pcie_sums_gb_per_s() > 0.0 && !residuals(b).is_empty();
    let classes = [
        (!compared && residuals(b).is_empty(), DATA_SHEET),
        (tp > 1, TENSOR_PARALLEL),
        (tp * dp > 1 && !has_nvlink(b) && !has_measured_sums, SUMS_OVER_PCIE),
        (several, MACHINES),
        (tokens > 4096, LONG),
        (tokens < 1024, SHORT),
        (config.precision == Precision::Fp8, FP8),
    ];
    classes.into_iter().filter(|(applies, _)| *applies).map(|(_, class)| class).collect()
}

/// Measured over simulated speed of the small models that `bench --save-box` ran on the box, if it did.
fn residuals(b: &BoxConfig) -> Vec<f64> {
    let all = [b.residual.gpt2, b.residual.llama].map(f64::from);
    all.into_iter().filter(|residual| *residual > 0.0).collect()
}

/// Whether NVLink joins every pair of GPUs of a machine.
fn has_nvlink(b: &BoxConfig) -> bool {
    match &b.machine {
        Some(machine) => {
            let joins = |a: usize| (0..a).all(|other| machine.nvlink_mb_per_s(a, other) > 0);
            (0..machine.gpus.len()).all(joins)
        }
        None => b.nvlink_gb_per_s() > 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use config::{load_box, load_str};
    use std::collections::BTreeSet;
    use std::path::Path;

    /// Range of a small model on a bundled box.
    fn range(on: &str, sets: &[&str]) -> RateRange {
        let ron = "(model: (layers: 2, hidden: 128, heads: 8, seq_len: 1024), batch: (micro: 1, global: 8), \
                   data: (train: \"unused\"), train: (steps: 6))";
        let sets: Vec<String> = sets.iter().map(ToString::to_string).collect();
        let config = load_str(ron, "test.ron", Path::new("."), &sets);
        let config = config.unwrap_or_else(|e| panic!("{e}")).config;
        RateRange::new(&config, &load_box(Path::new(on)).unwrap())
    }

    #[test]
    fn only_what_ran_on_an_h200_has_a_range_narrower_than_that_of_the_rest() {
        for on in ["h200-256gib", "dgx-h200", "h100-1tib"] {
            let ran = range(on, &[]);
            assert_eq!([ran.low, ran.high], [0.8, 1.15], "{on}");
            assert!(ran.reason.contains("-20 % / +15 %, since four steps of onebox"), "{ran:?}");
        }
        for (on, sets) in [
            ("h100-256gib", &[][..]),
            ("desktop-4090", &[]),
            ("dgx-a100", &[]),
            ("v100-32gb", &["precision=Fp16"]),
            ("h200-256gib", &["precision=Fp16"]),
            ("h200-256gib", &["precision=Fp8"]),
            ("h200-256gib", &["model.seq_len=512"]),
            ("h200-256gib", &["model.seq_len=8192"]),
            ("h200-256gib", &["attention=Cudnn"]),
            ("dgx-h200", &["parallel.data=2"]),
            ("dgx-h200", &["parallel.tensor=2"]),
        ] {
            let wide = range(on, sets);
            assert!(wide.low <= 0.65 && wide.high >= 1.15, "{on}, {sets:?}: {wide:?}");
            assert!(wide.reason.contains("one H200 only"), "{wide:?}");
            assert!(wide.reason.contains("narrower than -35 % / +15 %"), "{wide:?}");
        }
    }

    #[test]
    fn a_range_is_wider_for_each_class_that_was_not_compared() {
        let low = |on: &str, sets: &[&str]| range(on, sets).low;
        let plain = low("desktop-4090", &[]);
        assert_eq!(plain, 0.65);
        assert!(low("desktop-5090", &[]) < plain, "a data sheet");
        let pair = low("workstation-4x4090", &["parallel.data=2"]);
        assert!(pair < plain, "sums over PCIe");
        assert!(low("workstation-4x4090", &["parallel.tensor=2"]) < pair, "and TP");
        assert_eq!(
            low("workstation-4xpro6000", &["parallel.data=2"]),
            pair,
            "sums of another host"
        );
        let joined = range("dgx-a100", &["parallel.data=2"]);
        assert_eq!(joined.low, plain, "NVLink joins these");
        assert!(low("dgx-a100", &["parallel.tensor=2"]) < plain);
        assert!(
            low(
                "dgx2-x8",
                &["parallel.tensor=8", "parallel.data=16", "batch.global=16", "precision=Fp16"]
            ) < plain
        );
        let config = load_str(
            "(model: (layers: 2, hidden: 128, heads: 8, seq_len: 1024), data: (train: \"unused\"), train: (steps: 6))",
            "test.ron",
            Path::new("."),
            &[],
        );
        let mut measured = load_box(Path::new("desktop-5090")).unwrap();
        measured.residual = config::ResidualConfig { gpt2: 0.9, llama: 0.5 };
        let measured = RateRange::new(&config.unwrap().config, &measured);
        assert_eq!(
            [measured.low, measured.high],
            [0.5, 1.15],
            "a step on the box is within its range"
        );
        // `bench --save-box` has measured the sums, too.
        let two = ["parallel.data=2".to_owned()];
        let ron = "(model: (layers: 2, hidden: 128, heads: 8, seq_len: 1024), batch: (micro: 1, global: 8), \
                   data: (train: \"unused\"), train: (steps: 6))";
        let two = load_str(ron, "test.ron", Path::new("."), &two).unwrap().config;
        let mut measured = load_box(Path::new("workstation-4xpro6000")).unwrap();
        measured.residual = config::ResidualConfig { gpt2: 0.9, llama: 1.0 };
        assert_eq!(RateRange::new(&two, &measured).low, 0.65);
        measured.gpu.peer_gb_per_s = 0.0;
        assert_eq!(RateRange::new(&two, &measured).low, pair);
        let both = range("workstation-4x4090", &["parallel.tensor=2"]).reason;
        assert!(both.contains("wider for: TP; sums over PCIe"), "{both}");
    }
    #[test]
    fn compared_cards_are_those_of_the_published_steps() {
        let rows = include_str!("../tests/published/steps.csv").lines().skip(1);
        let boxes: BTreeSet<&str> = rows.filter_map(|row| row.split(',').nth(3)).collect();
        let cards = boxes.into_iter().map(|name| load_box(Path::new(name)).unwrap().gpu);
        // Steps on a V100 ran with the software of 2020.
        let cards: BTreeSet<(u32, usize)> =
            cards.map(|gpu| (gpu.sm, gpu.processors)).filter(|card| *card != (70, 80)).collect();
        assert_eq!(cards, BTreeSet::from(COMPARED_CARDS));
    }
}
