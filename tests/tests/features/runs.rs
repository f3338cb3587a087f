//! Runs with features, and their comparison.

use super::table::{DELAYED, Feature, PACKED, PADDED, settings};
use checkpoint::hugging_face::{Folder, ModelExport, Numbers, PretrainedWeights, export};
use checkpoint::{Checkpoint, RunFolder};
use config::{Config, DeviceConfig, Precision};
use data::model_files::ModelFiles;
use data::progress::Silence;
use data::{Corpus, Dataset, Document};
use device::cuda::Collectives;
use engine::run::RunOptions;
use files::held::LockedRunDir;
use onebox::generate::{ModelSource, WeightSource, next_logits};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock};
use tests::compare::{
    Reference, RunDistance, Weights, excerpt, initial_weights, one_window, run_for_weights,
};
use tests::pass::worst;
use tests::{RunRecord, lay_out, prose, tiny, try_run_on};

/// Number of tokens of a sample of `TINY`.
const T: usize = 16;
/// The keys of which one freezes weights.
const FREEZING: [&str; 2] = ["adapter=", "optimizer.frozen="];

/// Whether a setting freezes weights.
fn freezes(set: &str) -> bool {
    FREEZING.iter().any(|key| set.starts_with(key))
}
/// Number of steps of each run.
const STEPS: u64 = 4;

/// Record of a run, and its final parameters.
pub(super) type RunResult = (RunRecord, Weights);

/// Devices of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Backend {
    VirtualGpus,
    Cuda,
}

/// A document whose tokens are bytes.
fn document(bytes: &[u8]) -> Document {
    let tokens = bytes.iter().copied().map(u32::from).collect();
    Document { tokens, counted: (0..bytes.len()).map(|i| i > 0).collect() }
}

/// Documents of a text, of 3 to 12 tokens.
fn documents(packs: bool) -> Arc<Dataset> {
    let text = prose(3_000).into_bytes();
    let (mut all, mut at) = (Vec::new(), 0);
    for length in [5, 9, 3, 12, 7].into_iter().cycle() {
        let Some(bytes) = text.get(at..at + length) else { break };
        all.push(document(bytes));
        at += length;
    }
    let (validation, train) = all.split_at(40);
    Arc::new(Corpus::of_documents(train, validation, T, packs).into())
}

/// The data set for a run with `sets`.
fn data_of(sets: &[&str]) -> Arc<Dataset> {
    static PACKED_DATA: OnceLock<Arc<Dataset>> = OnceLock::new();
    static PADDED_DATA: OnceLock<Arc<Dataset>> = OnceLock::new();
    match (sets.contains(&PACKED), sets.contains(&PADDED)) {
        (true, _) => Arc::clone(PACKED_DATA.get_or_init(|| documents(true))),
        (_, true) => Arc::clone(PADDED_DATA.get_or_init(|| documents(false))),
        (false, false) => excerpt(),
    }
}

/// A data set for a run with `sets` in which all samples are equal.
fn equal_samples(sets: &[&str]) -> Arc<Dataset> {
    let packs = sets.contains(&PACKED);
    if !packs && !sets.contains(&PADDED) {
        return one_window();
    }
    // Two documents of eight inputs each fill a packed sample.
    let same = |count: usize| vec![document(b"the box h"); count];
    Arc::new(Corpus::of_documents(&same(64), &same(16), T, packs).into())
}

fn config_of(sets: &[&str], backend: Backend) -> Config {
    let mut config = tiny(sets);
    if backend == Backend::Cuda {
        config.device = DeviceConfig::Cuda;
    }
    config
}

fn options_of(backend: Backend) -> RunOptions {
    let options = RunOptions::default();
    match backend {
        Backend::VirtualGpus => options,
        Backend::Cuda => RunOptions { collectives: Collectives::InProcess, ..options },
    }
}

/// Trains with `sets`. Returns the record and the final parameters.
pub(super) fn train(sets: &[&str], backend: Backend) -> RunResult {
    run_for_weights(&data_of(sets), &config_of(sets, backend), &options_of(backend))
}

/// Trains with `sets` on virtual GPUs, once for all tests.
pub(super) fn run(sets: &[&'static str]) -> Arc<RunResult> {
    static RUNS: Mutex<BTreeMap<Vec<&str>, Arc<RunResult>>> = Mutex::new(BTreeMap::new());
    let known = RUNS.lock().unwrap().get(sets).map(Arc::clone);
    known.unwrap_or_else(|| {
        let ran = Arc::new(train(sets, Backend::VirtualGpus));
        RUNS.lock().unwrap().insert(sets.to_vec(), Arc::clone(&ran));
        ran
    })
}

/// Initial weights of the model of `sets`.
fn initial(sets: &[&'static str]) -> Weights {
    let of_model = |set: &&str| set.starts_with("model.") || freezes(set);
    initial_weights(&sets.iter().copied().filter(of_model).collect::<Vec<_>>())
}

/// The finished run with `sets` as a reference.
pub(super) fn reference(sets: &[&'static str], ran: RunResult) -> Reference {
    let (ran, weights) = ran;
    Reference::of(ran, weights, &initial(sets))
}

/// Asserts that the run with `sets` is within `limit` of the run with `base`.
pub(super) fn assert_near(
    what: &str,
    base: &[&'static str],
    sets: &[&'static str],
    limit: RunDistance,
) {
    let reference = reference(base, (*run(base)).clone());
    reference.assert_ran_near(what, &run(sets), limit);
}

/// Asserts that the run with `late` has the losses of the run with `exact` one step late, on equal
/// samples.
pub(super) fn assert_late(what: &str, exact: &[&str], late: &[&str]) {
    let losses = |sets: &[&str]| {
        let config = config_of(sets, Backend::VirtualGpus);
        let ran =
            try_run_on(&equal_samples(sets), &config, &lay_out(&config), &RunOptions::default());
        let ran = ran.unwrap_or_else(|e| panic!("{what}: {e}"));
        ran.steps.iter().map(|step| step.loss.to_bits()).collect::<Vec<_>>()
    };
    let (exact, late) = (losses(exact), losses(late));
    assert!(exact[0] != exact[1] && exact[1] != exact[2], "{what}: the updates change no loss");
    assert_eq!(late[..3], [exact[0], exact[0], exact[1]], "{what}: {exact:?}");
}

/// A folder with the weights of a run with `sets` that freezes nothing, in `folder`.
fn base_of(sets: &[&str], folder: &Path) -> Arc<PretrainedWeights> {
    let whole: Vec<&str> = sets.iter().copied().filter(|set| !freezes(set)).collect();
    let run = folder.join("base-run");
    let config = config_of(&whole, Backend::VirtualGpus);
    let built = lay_out(&config);
    let options = RunOptions {
        checkpoints: Some(RunFolder::at(&run).unwrap()),
        ..options_of(Backend::VirtualGpus)
    };
    try_run_on(&data_of(&whole), &config, &built, &options).unwrap();
    let checkpoint = Checkpoint::open(&run.join("step-00000004"), STEPS).unwrap();
    let exported = folder.join("base");
    let model = ModelExport {
        base: None,
        checkpoint: &checkpoint,
        config: &config,
        built: &built,
        tokenizer: None,
        model_files: &ModelFiles::default(),
        numbers: Numbers::F32,
        max_file_bytes: u64::MAX,
        progress: &Silence,
    };
    export(&model, &exported).unwrap();
    let decoder = lay_out(&config_of(sets, Backend::VirtualGpus)).decoder;
    let base = PretrainedWeights::new(Folder::open(&exported).unwrap(), &decoder).unwrap();
    base.hash(&Silence).unwrap();
    Arc::new(base)
}

/// Asserts that a run with `features` and its checkpoint, its weights and its exported folder give
/// the same logits, also in a config without the features that are not of the model.
pub(super) fn assert_results(what: &str, features: &[&'static Feature], backend: Backend) {
    let saved = format!("train.checkpoint_every={STEPS}");
    let mut sets: Vec<&str> = settings(features, None);
    sets.push(&saved);
    let run = tempfile::tempdir().unwrap();
    let (mut config, folder) = (config_of(&sets, backend), run.path().join("checkpoints"));
    let base = sets.iter().any(|set| freezes(set)).then(|| {
        let base = base_of(&sets, run.path());
        config.model.from = Some(base.path().display().to_string());
        config.model.weights = config::Weights::Pretrained;
        base
    });
    let options = RunOptions {
        pretrained: base.clone(),
        weights: Some(LockedRunDir::unlocked(run.path()).unwrap()),
        checkpoints: Some(RunFolder::at(&folder).unwrap()),
        ..options_of(backend)
    };
    let built = lay_out(&config);
    let ran = try_run_on(&data_of(&sets), &config, &built, &options);
    ran.unwrap_or_else(|e| panic!("{what}: {e}"));
    let checkpoint = Checkpoint::open(&folder.join("step-00000004"), STEPS).unwrap();
    let exported = run.path().join("exported");
    let model = ModelExport {
        base: base.as_deref(),
        checkpoint: &checkpoint,
        config: &config,
        built: &built,
        tokenizer: None,
        model_files: &ModelFiles::default(),
        numbers: Numbers::F32,
        max_file_bytes: u64::MAX,
        progress: &Silence,
    };
    export(&model, &exported).unwrap_or_else(|e| panic!("{what}: {e}"));
    let of_model = |set: &&str| set.starts_with("model.") || set.starts_with("data.format");
    let plain = tiny(&sets.iter().copied().filter(of_model).collect::<Vec<_>>());
    let logits = |config: &Config, source: WeightSource<'_>, precision| {
        let on_cores = ModelSource::on_cores(source, None, tests::machine());
        let from = ModelSource { precision, ..on_cores };
        next_logits(config, &from, "3 1 4 1 5 9 2 6").unwrap_or_else(|e| panic!("{what}: {e}"))
    };
    let want = logits(&config, WeightSource::Checkpoint(&checkpoint), Precision::Fp32);
    assert!(want.iter().any(|logit| *logit != want[0]), "{what}: all logits are equal");
    let weights = run.path().join("weights.safetensors");
    let of_weights = if base.is_some() { &config } else { &plain };
    let got = logits(of_weights, WeightSource::Weights(&weights), Precision::Fp32);
    // The weights have the update that waits in the checkpoint.
    let is_late = features.iter().any(|feature| feature.name == DELAYED);
    let difference = worst(&got, &want);
    assert!(is_late != (got == want), "{what}: logits of the weights are {difference:e} apart");
    let of_folder = logits(&plain, WeightSource::Folder(&exported), Precision::Fp32);
    let difference = worst(&of_folder, &want);
    assert!(difference < 1e-6, "{what}: logits of the exported folder are {difference:e} apart");
    if config.precision != Precision::Fp32 {
        let rounded = logits(&config, WeightSource::Checkpoint(&checkpoint), config.precision);
        let difference = worst(&rounded, &want);
        assert!(
            rounded != want && difference < 0.1,
            "{what}: rounded logits are {difference:e} apart"
        );
    }
}
