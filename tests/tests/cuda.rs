//! The `cuda` backend under a fake driver: real streams, events, memory and kernels' arithmetic, no GPU. Each case
//! runs in a child process, since the dynamic linker reads `LD_LIBRARY_PATH` when a process starts.
#![allow(missing_docs, reason = "a test")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "helpers of tests")]
#![allow(clippy::print_stdout, reason = "figures for --nocapture")]
#![allow(clippy::allow_attributes, reason = "the lines above")]

use device::Error;
use device::cuda::Collectives;
use engine::build::build;
use engine::config::{Config, DeviceConfig};
use engine::run::{RunError, RunOptions};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tests::{Ran, short_text, tiny, try_run_on};

const CASE: &str = "ONEBOX_CUDA_CASE";
/// A case that takes longer hangs.
const WATCHDOG: Duration = Duration::from_secs(240);

const ALONE: &[&str] = &[];
const GRID: &[&str] = &["parallel.tensor=2", "parallel.data=2"];

/// What a child process runs; each compares for itself and panics when something is off.
const CASES: &[(&str, fn())] = &[
    ("alone", alone_case),
    ("grid_fp32", || grid_case("Fp32", 2e-5)),
    ("grid_bf16", || grid_case("Bf16", 2e-2)),
    ("grid_fp16", || grid_case("Fp16", 5e-3)),
    ("modes", modes_case),
    ("shared", shared_case),
    ("memory", memory_case),
    ("lost", lost_case),
    ("hanging", hanging_case),
    ("task", task_case),
];

#[test]
fn child() {
    let Ok(case) = std::env::var(CASE) else { return };
    let (_, run) = CASES.iter().find(|(name, _)| *name == case).expect("a case");
    run();
    println!("case {case} done");
}

/// Runs a case under the fake driver; fails with what the child said.
fn under_fake(case: &str, environment: &[(&str, &str)]) {
    let cache = tempfile::tempdir().unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child", "--nocapture", "--test-threads=1"]);
    command.env(CASE, case).env("LD_LIBRARY_PATH", fake_cuda::library_folder());
    command.env("XDG_CACHE_HOME", cache.path()).env("FAKECUDA_DEVICES", "4");
    command.envs(environment.iter().copied());
    let output = cache.path().join("output");
    let file = std::fs::File::create(&output).unwrap();
    command.stdout(file.try_clone().unwrap()).stderr(Stdio::from(file));
    let (mut child, started) = (command.spawn().unwrap(), Instant::now());
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break Some(status);
        }
        if started.elapsed() > WATCHDOG {
            child.kill().unwrap();
            break None;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let said = String::from_utf8_lossy(&std::fs::read(&output).unwrap()).into_owned();
    let done = format!("case {case} done");
    assert!(status.is_some(), "{case} hangs:\n{said}");
    assert!(status.is_some_and(|s| s.success()) && said.contains(&done), "{case}:\n{said}");
    println!("{said}");
}

fn try_run(config: &Config, options: &RunOptions) -> Result<Ran, Box<RunError>> {
    try_run_on(&short_text(), config, &build(config), options)
}

fn run(config: &Config, options: &RunOptions) -> Ran {
    try_run(config, options).unwrap_or_else(|e| panic!("{e}"))
}

fn on_cuda(mut config: Config) -> Config {
    config.device = DeviceConfig::Cuda;
    config
}

fn in_process() -> RunOptions {
    RunOptions { collectives: Collectives::InProcess, ..RunOptions::default() }
}

fn with<'a>(first: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    [first, more].concat()
}

/// Losses, norms and evaluations agree within a relative tolerance.
fn close(what: &str, a: &Ran, b: &Ran, tolerance: f64) {
    let values = |r: &Ran| -> Vec<f64> {
        let steps = r.steps.iter().flat_map(|s| [s.loss, s.grad_norm]);
        steps.chain(r.evals.iter().map(|(_, loss)| *loss)).collect()
    };
    let (a, b) = (values(a), values(b));
    assert_eq!(a.len(), b.len(), "{what}");
    // `max` would pass over what is not a number.
    let off = a.iter().zip(&b).map(|(x, y)| match (x - y).abs() / y.abs().max(1e-9) {
        off if off.is_finite() => off,
        _ => f64::INFINITY,
    });
    let most = off.fold(0.0, f64::max);
    println!("{what}: at most {most:.1e} off");
    assert!(most <= tolerance, "{what}: {most:e} off\n{a:?}\n{b:?}");
}

fn alone_case() {
    let config = tiny(ALONE);
    let (cpu, cuda) =
        (run(&config, &RunOptions::default()), run(&on_cuda(config), &RunOptions::default()));
    // The same fp32 sums in another order.
    close("alone, Fp32", &cuda, &cpu, 2e-5);
}

fn grid_case(precision: &str, tolerance: f64) {
    let precision = format!("precision={precision}");
    let config = tiny(&with(GRID, &[&precision, "parallel.sequence=true"]));
    let cpu = run(&config, &RunOptions::default());
    let config = on_cuda(config);
    // Storage in 16 bits rounds every sum whose order differs; the tolerance is a few of its units.
    close(&format!("{precision}, in-process"), &run(&config, &in_process()), &cpu, tolerance);
    let nccl = run(&config, &RunOptions::default());
    close(&format!("{precision}, NCCL"), &nccl, &cpu, tolerance);
}

fn modes_case() {
    for precision in ["precision=Fp32", "precision=Fp16"] {
        let sets = with(GRID, &[precision, "train.steps=3", "model.layers=2"]);
        for options in [in_process(), RunOptions::default()] {
            let what = format!("{precision}, {:?}", options.collectives);
            let bits = |more: &[&str]| run(&on_cuda(tiny(&with(&sets, more))), &options).bits();
            let overlapped = bits(&[]);
            assert_eq!(bits(&["offload.update=Serial"]), overlapped, "{what}: Serial");
            assert_eq!(bits(&["offload.optimizer=Device"]), overlapped, "{what}: Device");
            assert_eq!(bits(&["offload.accumulate=Host"]), overlapped, "{what}: accumulate");
        }
    }
}

fn shared_case() {
    let config = tiny(GRID);
    let cpu = run(&config, &RunOptions::default());
    close("four ranks on one GPU", &run(&on_cuda(config), &RunOptions::default()), &cpu, 2e-5);
}

/// The error of a run on four ranks, and that it came soon.
fn failed(config: &Config, options: &RunOptions) -> Box<RunError> {
    let started = Instant::now();
    let error = try_run(config, options).expect_err("it must fail");
    println!("after {:?}: {error}", started.elapsed());
    for own in &error.all {
        println!("  {}", own.as_ref().map_or_else(String::new, ToString::to_string));
    }
    assert!(started.elapsed() < Duration::from_secs(60), "it took too long");
    assert!(error.all.iter().all(Option::is_some), "every rank knows");
    error
}

fn memory_case() {
    let error = failed(&on_cuda(tiny(GRID)), &RunOptions::default());
    let Error::OutOfMemory(out) = &error.error else { panic!("{error}") };
    assert!(out.wanted > out.limit && !out.pools.is_empty(), "{out:?}");
}

fn lost_case() {
    let error = failed(&on_cuda(tiny(GRID)), &in_process());
    assert!(matches!(error.error, Error::Gpu { .. }), "{error}");
    assert!(error.to_string().contains("ILLEGAL_ADDRESS"), "{error}");
    assert_eq!(error.rank, 1, "{error}");
}

fn hanging_case() {
    let options = RunOptions { timeout: Duration::from_secs(2), ..RunOptions::default() };
    let error = failed(&on_cuda(tiny(GRID)), &options);
    assert!(matches!(error.error, Error::Gpu { .. } | Error::Timeout { .. }), "{error}");
}

fn task_case() {
    let options =
        RunOptions { panic_at: Some((2, device::Lane::Host, 9)), ..RunOptions::default() };
    let error = failed(&on_cuda(tiny(GRID)), &options);
    assert_eq!(error.rank, 2, "{error}");
    assert!(matches!(error.error, Error::Panicked { .. }), "{error}");
}

#[test]
fn one_gpu_trains_as_the_cpu_does() {
    under_fake("alone", &[]);
    under_fake("alone", &[("FAKECUDA_CHAOS_US", "50"), ("FAKECUDA_SM", "90")]);
}

#[test]
fn four_gpus_train_as_the_cpu_does() {
    for case in ["grid_fp32", "grid_bf16", "grid_fp16"] {
        under_fake(case, &[("FAKECUDA_CHAOS_US", "30")]);
    }
}

#[test]
fn modes_and_placements_give_the_same_bits() {
    under_fake("modes", &[("FAKECUDA_CHAOS_US", "30")]);
}

#[test]
fn ranks_can_share_a_gpu() {
    under_fake("shared", &[("FAKECUDA_DEVICES", "1"), ("FAKECUDA_CHAOS_US", "30")]);
    under_fake("shared", &[("FAKECUDA_DEVICES", "3")]);
}

#[test]
fn a_plan_that_does_not_fit_is_an_error_with_figures() {
    under_fake("memory", &[("FAKECUDA_MEMORY", "300000")]);
}

#[test]
fn a_lost_gpu_ends_the_run_and_is_named() {
    under_fake("lost", &[("FAKECUDA_FAIL", "lost:400@1")]);
    under_fake("lost", &[("FAKECUDA_FAIL", "lost:1500@1"), ("FAKECUDA_CHAOS_US", "30")]);
}

#[test]
fn a_collective_that_never_ends_is_aborted() {
    under_fake("hanging", &[("FAKECUDA_FAIL", "nccl:9")]);
    under_fake("hanging", &[("FAKECUDA_FAIL", "nccl-error:9")]);
}

#[test]
fn a_host_task_that_panics_ends_the_run() {
    under_fake("task", &[]);
}

#[test]
fn without_a_driver_cuda_is_refused_in_words() {
    let probe = device::cuda::probe();
    if let Some(missing) = probe.missing() {
        println!("{missing}");
        assert!(!missing.is_empty());
        let error = try_run(&on_cuda(tiny(ALONE)), &RunOptions::default()).expect_err("no GPU");
        assert!(matches!(error.error, Error::NoCuda { .. }), "{error}");
    }
}
