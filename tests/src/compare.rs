//! Compares runs: bit for bit, or within the error of another order of sums in fp32.

use crate::{RunRecord, dataset, lay_out, prose, text_file, tiny, try_run_on};
use config::{Config, DataFormat};
use data::{Corpus, Dataset};
use device::cpu::Lanes;
use engine::run::RunOptions;
use files::held::LockedRunDir;
use safetensors::{Dtype, SafeTensors};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

/// fp32 parameters by global name.
pub type Weights = BTreeMap<String, Vec<f32>>;

/// Whether tests run every size and layout (`make test-full`), not the quick selection.
pub fn full() -> bool {
    std::env::var_os("ONEBOX_FULL").is_some_and(|value| value == "1")
}

/// Options with a thread per lane, which delays each op by up to `chaos_us` microseconds.
pub fn with_delays(chaos_us: u64) -> RunOptions {
    let (lanes, timeout) = (Lanes::Threads { chaos_us }, Duration::from_secs(120));
    RunOptions { lanes, timeout: Some(timeout), ..RunOptions::default() }
}

/// The settings `base`, then `more`. If a key is set twice, the last value counts.
pub fn with<'a>(base: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    [base, more].concat()
}

/// A short text: the evaluation of its whole validation set is faster than the training.
///
/// # Panics
/// If the file cannot be written.
pub fn excerpt() -> Arc<Dataset> {
    static EXCERPT: OnceLock<Arc<Dataset>> = OnceLock::new();
    Arc::clone(EXCERPT.get_or_init(|| dataset(&text_file(&prose(5_000)).display().to_string(), 16)))
}

/// Contents of all files of a checkpoint, by file name. Of the manifest only the first line,
/// without the config.
///
/// # Panics
/// If the checkpoint cannot be read.
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

/// A data set with one training window, so that every sample of every step is the same.
///
/// # Panics
/// If the files cannot be written.
pub fn one_window() -> Arc<Dataset> {
    let file = |text: &str| text_file(text).display().to_string();
    let (train, validation) = (file("the box holds a m"), file("odel that is too large"));
    let data = Corpus::open(&train, Some(&validation), DataFormat::Bytes, 0.1, 256, 16);
    Arc::new(data.unwrap_or_else(|e| panic!("{e}")).into())
}

/// Trains [`tiny`] on [`excerpt`].
///
/// # Panics
/// If the run fails.
pub fn run_with(sets: &[&str], options: &RunOptions) -> RunRecord {
    let config = tiny(sets);
    let ran = try_run_on(&excerpt(), &config, &lay_out(&config), options);
    ran.unwrap_or_else(|e| panic!("{sets:?}: {e}"))
}

/// Runs [`run_with`] with inline lanes.
///
/// # Panics
/// As [`run_with`].
pub fn run_sets(sets: &[&str]) -> RunRecord {
    run_with(sets, &RunOptions::default())
}

/// Trains on `data` with inline lanes. Also returns the final parameters.
///
/// # Panics
/// If the run fails or its weights cannot be read.
pub fn run_with_weights(data: &Arc<Dataset>, config: &Config) -> (RunRecord, Weights) {
    run_for_weights(data, config, &RunOptions::default())
}

/// Runs [`run_with_weights`] with `options`.
///
/// # Panics
/// As [`run_with_weights`].
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

/// Runs [`run_with_weights`] for [`tiny`] on [`excerpt`].
///
/// # Panics
/// As [`run_with_weights`].
pub fn tiny_with_weights(sets: &[&str]) -> (RunRecord, Weights) {
    run_with_weights(&excerpt(), &tiny(sets))
}

/// Norm of a - b.
///
/// # Panics
/// If the weights belong to different models.
pub fn distance(a: &Weights, b: &Weights) -> f64 {
    assert!(a.keys().eq(b.keys()));
    let squares = a.iter().zip(b.values()).flat_map(|((name, x), y)| {
        assert_eq!(x.len(), y.len(), "{name}");
        x.iter().zip(y).map(|(x, y)| (f64::from(*x) - f64::from(*y)).powi(2))
    });
    squares.sum::<f64>().sqrt()
}

/// Asserts that losses, norms, evaluations and final states have the same bits.
///
/// # Panics
/// If they do not; the message names the first difference.
pub fn assert_same_bits(base: &RunRecord, other: &RunRecord, what: &str) {
    for (a, b) in base.steps.iter().zip(&other.steps) {
        let step = a.step;
        assert_eq!(a.loss.to_bits(), b.loss.to_bits(), "{what}: loss of step {step}");
        assert_eq!(a.grad_norm.to_bits(), b.grad_norm.to_bits(), "{what}: norm of step {step}");
        assert_eq!(a.skipped, b.skipped, "{what}: skip of step {step}");
    }
    assert_eq!(base.bits(), other.bits(), "{what}");
}

/// The run with `sets`, made once for all tests of a program.
fn reference_run(sets: &[&str]) -> RunRecord {
    type RunCache = Mutex<BTreeMap<Vec<String>, Arc<OnceLock<RunRecord>>>>;
    static RUNS: RunCache = Mutex::new(BTreeMap::new());
    let key: Vec<String> = sets.iter().map(ToString::to_string).collect();
    let mut runs = RUNS.lock().unwrap_or_else(PoisonError::into_inner);
    let run = Arc::clone(runs.entry(key).or_default());
    // Other tests need the map while this run is made.
    drop(runs);
    run.get_or_init(|| run_sets(sets)).clone()
}

/// Asserts that each of `variants`, set on top of `base`, trains to the bits of `base`. A variant
/// without settings is `base` again.
///
/// # Panics
/// If one variant does not.
pub fn assert_no_bit_changes(base: &[&str], variants: &[&[&str]]) {
    let reference = reference_run(base);
    assert!(reference.steps.iter().all(|s| s.loss.is_finite()), "{base:?}");
    for variant in variants {
        let ran = run_sets(&with(base, variant));
        assert_same_bits(&reference, &ran, &format!("{base:?} against {variant:?}"));
    }
}

/// Distance of two runs, or its limit.
#[derive(Clone, Copy, Debug)]
pub struct RunDistance {
    /// Distance of losses and evaluations: absolute, in nats.
    pub loss: f64,
    /// Distance of gradient norms: relative.
    pub norm: f64,
    /// Norm of the difference of the final parameters, relative to their change in the reference
    /// run.
    pub weights: f64,
}

impl RunDistance {
    /// Whether no distance exceeds its limit; a NaN always does.
    fn is_within(self, limit: Self) -> bool {
        self.loss <= limit.loss && self.norm <= limit.norm && self.weights <= limit.weights
    }
}

/// The largest value, or NaN if any value is NaN (`f64::max` would drop it).
fn worst(all: impl Iterator<Item = f64>) -> f64 {
    all.fold(0.0, |worst: f64, x| if x > worst || x.is_nan() { x } else { worst })
}

/// A run to which other runs are compared.
#[derive(Debug)]
pub struct Reference {
    ran: RunRecord,
    weights: Weights,
    /// Distance that training moved the parameters.
    moved: f64,
}

impl Reference {
    /// Trains with `sets`.
    ///
    /// # Panics
    /// If the run fails, or if it does not move the parameters.
    pub fn new(sets: &[&str]) -> Self {
        Self::on(&excerpt(), sets)
    }

    /// Trains with `sets` on `data`.
    ///
    /// # Panics
    /// As [`new`](Self::new).
    pub fn on(data: &Arc<Dataset>, sets: &[&str]) -> Self {
        let (ran, weights) = run_with_weights(data, &tiny(sets));
        Self::of(ran, weights, &initial_weights(sets))
    }

    /// A finished run with its final parameters, which began with the parameters `initial`.
    ///
    /// # Panics
    /// If the run did not move the parameters.
    pub fn of(ran: RunRecord, weights: Weights, initial: &Weights) -> Self {
        let moved = distance(&weights, initial);
        assert!(moved > 0.01, "{moved}: a run that goes nowhere compares nothing");
        Self { ran, weights, moved }
    }

    /// The reports of the reference run.
    pub const fn ran(&self) -> &RunRecord {
        &self.ran
    }

    /// Asserts that a run with `sets` stays within `limit` of the reference.
    ///
    /// # Panics
    /// If it does not.
    pub fn assert_near(&self, sets: &[&str], limit: RunDistance) {
        self.assert_ran_near(&format!("{sets:?}"), &tiny_with_weights(sets), limit);
    }

    /// Asserts that a finished run is within `limit` of the reference.
    ///
    /// # Panics
    /// If it is not.
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
        let found = RunDistance {
            loss: worst(losses.chain(evals)),
            norm: worst(pairs().map(|(x, y)| (x.grad_norm / y.grad_norm - 1.0).abs())),
            weights: distance(&self.weights, weights) / self.moved,
        };
        println!("{:.1e} {:.1e} {:.1e} {what}", found.loss, found.norm, found.weights);
        assert!(found.is_within(limit), "{what}: {found:?}, allowed {limit:?}");
    }
}

/// Initial weights of a run with `sets`, from one step whose update is too small to change any
/// fp32.
///
/// # Panics
/// If that run fails.
pub fn initial_weights(sets: &[&str]) -> Weights {
    tiny_with_weights(&with(sets, &STANDSTILL)).1
}

/// Settings of a step whose update is below the smallest fp32. (A parameter 0 may become -0.)
pub const STANDSTILL: [&str; 7] = [
    "optimizer.kind=Sgd",
    "optimizer.lr=1e-44",
    "optimizer.clip=1e-3",
    "optimizer.weight_decay=0.0",
    "schedule.warmup_steps=0",
    "train.steps=1",
    "precision=Fp32",
];
