//! Runs compared: bit for bit, or within what another order of sums in fp32 explains.

use crate::{RunRecord, dataset, lay_out, prose, tiny, try_run_on};
use config::{Config, DataFormat};
use data::{Corpus, Dataset};
use device::cpu::Lanes;
use engine::run::RunOptions;
use files::held::LockedRunDir;
use safetensors::{Dtype, SafeTensors};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// fp32 parameters by global name.
pub type Weights = BTreeMap<String, Vec<f32>>;

/// Every size and layout (`make test-full`), not the quick selection.
pub fn full() -> bool {
    std::env::var_os("ONEBOX_FULL").is_some_and(|value| value == "1")
}

/// Every lane a thread, and each op held back by up to so many microseconds.
pub fn with_delays(chaos_us: u64) -> RunOptions {
    let (lanes, timeout) = (Lanes::Threads { chaos_us }, Duration::from_secs(120));
    RunOptions { lanes, timeout: Some(timeout), ..RunOptions::default() }
}

/// `base` and then `more`; of a key that is set twice the last value counts.
pub fn with<'a>(base: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    [base, more].concat()
}

/// A short text: the evaluation of all of its held-out part takes less time than the training does.
///
/// # Panics
/// When it cannot be written.
pub fn excerpt() -> Arc<Dataset> {
    static EXCERPT: OnceLock<Arc<Dataset>> = OnceLock::new();
    Arc::clone(EXCERPT.get_or_init(|| {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("excerpt.txt");
        std::fs::write(&file, prose(5_000)).expect("written");
        dataset(&file.display().to_string(), 16)
    }))
}

/// All files of a checkpoint but the config and the hash in its manifest, and those of these words of its control block that it has.
///
/// # Panics
/// When it cannot be read.
pub fn contents(checkpoint: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries =
        std::fs::read_dir(checkpoint).expect("a checkpoint").map(|entry| entry.expect("an entry"));
    let content = |entry: std::fs::DirEntry| {
        let name = entry.file_name().into_string().expect("a name");
        let mut bytes = std::fs::read(entry.path()).expect("a file");
        if name == "MANIFEST" {
            let line = bytes.split(|byte| *byte == b'\n').next().expect("a line");
            let mut manifest: serde_json::Value = serde_json::from_slice(line).expect("JSON");
            manifest.as_object_mut().and_then(|all| all.remove("config")).expect("a config");
            bytes = manifest.to_string().into_bytes();
        }
        (name, bytes)
    };
    entries.map(content).collect()
}

/// A training part of one window, so that every sample of every step is the same.
///
/// # Panics
/// When it cannot be written.
pub fn one_window() -> Arc<Dataset> {
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).expect("written");
        path.display().to_string()
    };
    let train = file("train.txt", "the box holds a m");
    let held_out = file("held_out.txt", "odel that is too large");
    let data = Corpus::open(&train, Some(&held_out), DataFormat::Bytes, 0.1, 256, 16);
    Arc::new(data.unwrap_or_else(|e| panic!("{e}")).into())
}

/// Trains [`tiny`] on [`excerpt`].
///
/// # Panics
/// When the run fails.
pub fn run_with(sets: &[&str], options: &RunOptions) -> RunRecord {
    let config = tiny(sets);
    let ran = try_run_on(&excerpt(), &config, &lay_out(&config), options);
    ran.unwrap_or_else(|e| panic!("{sets:?}: {e}"))
}

/// [`run_with`] inline lanes.
///
/// # Panics
/// As there.
pub fn run_sets(sets: &[&str]) -> RunRecord {
    run_with(sets, &RunOptions::default())
}

/// Trains on `data` with inline lanes; also the parameters at the end.
///
/// # Panics
/// When the run fails or its weights cannot be read.
pub fn run_with_weights(data: &Arc<Dataset>, config: &Config) -> (RunRecord, Weights) {
    run_for_weights(data, config, &RunOptions::default())
}

/// [`run_with_weights`] as `options` say.
///
/// # Panics
/// As there.
pub fn run_for_weights(
    data: &Arc<Dataset>,
    config: &Config,
    options: &RunOptions,
) -> (RunRecord, Weights) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("weights.safetensors");
    let weights = Some(LockedRunDir::unlocked(folder.path()).expect("a folder"));
    let options = RunOptions { weights, ..options.clone() };
    let ran =
        try_run_on(data, config, &lay_out(config), &options).unwrap_or_else(|e| panic!("{e}"));
    let bytes = std::fs::read(path).expect("weights");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let tensor = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
        assert_eq!(view.dtype(), Dtype::F32);
        let value = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
        (name, view.data().chunks_exact(4).map(value).collect())
    };
    (ran, file.tensors().into_iter().map(tensor).collect())
}

/// [`run_with_weights`] of [`tiny`] on [`excerpt`].
///
/// # Panics
/// As there.
pub fn tiny_with_weights(sets: &[&str]) -> (RunRecord, Weights) {
    run_with_weights(&excerpt(), &tiny(sets))
}

/// Norm of a - b.
///
/// # Panics
/// When they are not of the same model.
pub fn distance(a: &Weights, b: &Weights) -> f64 {
    assert!(a.keys().eq(b.keys()));
    let squares = a.iter().zip(b.values()).flat_map(|((name, x), y)| {
        assert_eq!(x.len(), y.len(), "{name}");
        x.iter().zip(y).map(|(x, y)| (f64::from(*x) - f64::from(*y)).powi(2))
    });
    squares.sum::<f64>().sqrt()
}

/// Losses, norms, evaluations and final states are the same bits.
///
/// # Panics
/// When they are not; says where they part.
pub fn assert_same_bits(base: &RunRecord, other: &RunRecord, what: &str) {
    for (a, b) in base.steps.iter().zip(&other.steps) {
        let step = a.step;
        assert_eq!(a.loss.to_bits(), b.loss.to_bits(), "{what}: loss of step {step}");
        assert_eq!(a.grad_norm.to_bits(), b.grad_norm.to_bits(), "{what}: norm of step {step}");
        assert_eq!(a.skipped, b.skipped, "{what}: skip of step {step}");
    }
    assert_eq!(base.bits(), other.bits(), "{what}");
}

/// Each of `variants`, set on top of `base`, runs to the bits of `base`.
///
/// # Panics
/// When one does not.
pub fn assert_no_bit_changes(base: &[&str], variants: &[&[&str]]) {
    let reference = run_sets(base);
    assert!(reference.steps.iter().all(|s| s.loss.is_finite()), "{base:?}");
    for variant in variants {
        let ran = run_sets(&with(base, variant));
        assert_same_bits(&reference, &ran, &format!("{base:?} against {variant:?}"));
    }
}

/// How far two runs are, or may be, apart.
#[derive(Clone, Copy, Debug)]
pub struct RunDistance {
    /// Losses and evaluations: absolute, in nats.
    pub loss: f64,
    /// Gradient norms: relative.
    pub norm: f64,
    /// Final parameters: norm of the difference, relative to how far the run moved them.
    pub weights: f64,
}

impl RunDistance {
    /// A NaN is never within a limit.
    fn is_within(self, limit: Self) -> bool {
        self.loss <= limit.loss && self.norm <= limit.norm && self.weights <= limit.weights
    }
}

/// The largest; NaN if any is (`f64::max` would drop it).
fn worst(all: impl Iterator<Item = f64>) -> f64 {
    all.fold(0.0, |worst: f64, x| if x > worst || x.is_nan() { x } else { worst })
}

/// A run that others are held against.
#[derive(Debug)]
pub struct Reference {
    ran: RunRecord,
    weights: Weights,
    /// How far training moved the parameters.
    moved: f64,
}

impl Reference {
    /// Trains `sets`.
    ///
    /// # Panics
    /// When that fails, or nothing moves.
    pub fn new(sets: &[&str]) -> Self {
        Self::on(&excerpt(), sets)
    }

    /// Trains `sets` on `data`.
    ///
    /// # Panics
    /// As [`new`](Self::new).
    pub fn on(data: &Arc<Dataset>, sets: &[&str]) -> Self {
        let (ran, weights) = run_with_weights(data, &tiny(sets));
        let moved = distance(&weights, &initial_weights(sets));
        assert!(moved > 0.01, "{moved}: a run that goes nowhere compares nothing");
        Self { ran, weights, moved }
    }

    /// What was reported.
    pub const fn ran(&self) -> &RunRecord {
        &self.ran
    }

    /// `sets` trains to the same within `limit`.
    ///
    /// # Panics
    /// When it does not.
    pub fn assert_near(&self, sets: &[&str], limit: RunDistance) {
        self.assert_ran_near(&format!("{sets:?}"), &tiny_with_weights(sets), limit);
    }

    /// A run was the same within `limit`.
    ///
    /// # Panics
    /// When it was not.
    #[expect(clippy::print_stdout, reason = "shown with --nocapture, to see how tight limits are")]
    pub fn assert_ran_near(
        &self,
        what: &str,
        (ran, weights): &(RunRecord, Weights),
        limit: RunDistance,
    ) {
        let (a, b) = (&self.ran, ran);
        assert_eq!(a.steps.len(), b.steps.len(), "{what}");
        assert!(a.evals.iter().map(|e| e.0).eq(b.evals.iter().map(|e| e.0)), "{what}");
        let pairs = || a.steps.iter().zip(&b.steps);
        let losses = pairs().map(|(x, y)| (x.loss - y.loss).abs());
        let evals = a.evals.iter().zip(&b.evals).map(|((_, x), (_, y))| (x - y).abs());
        let apart = RunDistance {
            loss: worst(losses.chain(evals)),
            norm: worst(pairs().map(|(x, y)| (x.grad_norm / y.grad_norm - 1.0).abs())),
            weights: distance(&self.weights, weights) / self.moved,
        };
        println!("{:.1e} {:.1e} {:.1e} {what}", apart.loss, apart.norm, apart.weights);
        assert!(apart.is_within(limit), "{what}: {apart:?}, allowed {limit:?}");
    }
}

/// What a run with `sets` starts from: one step whose update is too small to change any fp32.
///
/// # Panics
/// When that run fails.
pub fn initial_weights(sets: &[&str]) -> Weights {
    tiny_with_weights(&with(sets, &STANDSTILL)).1
}

/// Sets for a step that changes no parameter: its update is below the smallest fp32. (What is 0 may become -0.)
pub const STANDSTILL: [&str; 7] = [
    "optimizer.kind=Sgd",
    "optimizer.lr=1e-44",
    "optimizer.clip=1e-3",
    "optimizer.weight_decay=0.0",
    "schedule.warmup_steps=0",
    "train.steps=1",
    "precision=Fp32",
];
