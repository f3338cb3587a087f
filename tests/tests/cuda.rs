//! The `cuda` backend under a fake driver, without a GPU. The fake driver has real streams, events,
//! memory and kernel arithmetic. Each case runs in a child process, because the dynamic linker
//! reads `LD_LIBRARY_PATH` when a process starts.
#![allow(missing_docs, reason = "a test")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "helpers of tests")]
#![allow(clippy::print_stdout, reason = "figures for --nocapture")]
#![allow(clippy::allow_attributes, reason = "the lines above")]

use config::{Config, DeviceConfig};
use device::cuda::Collectives;
use device::{Error, Lane};
use engine::run::{FaultPoint, RunError, RunOptions, Watcher};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tests::compare::full;
use tests::{RunRecord, lay_out, short_text, tiny, try_run_on};

#[path = "cuda/accounting.rs"]
mod accounting;
#[path = "cuda/attention.rs"]
mod attention;
#[path = "cuda/collectives.rs"]
mod collectives;
#[path = "cuda/lanes.rs"]
mod lanes;
#[path = "cuda/lost.rs"]
mod lost;
#[path = "cuda/matmuls.rs"]
mod matmuls;
#[path = "cuda/matrix.rs"]
mod matrix;
#[path = "cuda/memory.rs"]
mod memory;
#[path = "cuda/processes.rs"]
mod processes;
#[path = "cuda/proof.rs"]
mod proof;
#[path = "cuda/room.rs"]
mod room;

const CASE: &str = "ONEBOX_CUDA_CASE";
/// Longest time of a case: a longer case hangs. With `ONEBOX_FULL` the limit is ten times as long.
const WATCHDOG: Duration = Duration::from_secs(480);

/// Deadline of a rank that waits for another rank: more than a busy machine delays a healthy rank.
const DEADLINE: Duration = Duration::from_secs(3);

const ALONE: &[&str] = &[];
const GRID: &[&str] = &["parallel.tensor=2", "parallel.data=2"];

/// Cases that a child process runs. Each case compares its results and panics if one is wrong.
const CASES: &[(&str, fn())] = &[
    ("alone", matrix::alone),
    ("grid_fp32", || matrix::grid("Fp32")),
    ("grid_bf16", || matrix::grid("Bf16")),
    ("grid_fp16", || matrix::grid("Fp16")),
    ("grid_fp8", || matrix::grid("Fp8")),
    ("modes", matrix::modes),
    ("sums_dp4", || matrix::sums_in_fp32(&["parallel.data=4"])),
    ("sums_grid", || matrix::sums_in_fp32(GRID)),
    ("shared", matrix::shared),
    ("tp8_dp2", || matrix::sixteen(8, 2)),
    ("tp4_dp4", || matrix::sixteen(4, 4)),
    ("tp1_dp16", || matrix::sixteen(1, 16)),
    ("collectives", collectives::are_those_of_the_cpu),
    ("ahead", ahead_case),
    ("tiles", lanes::update_beside_the_next_forward),
    ("paced", lanes::nobody_sits_in_a_full_queue),
    ("paced_and_traced", lanes::nor_where_a_trace_is_made),
    ("bound", lanes::threads_are_bound),
    ("aliased", lanes::ranks_share_hardware_queues),
    ("pinned", pinned_case),
    ("memory", memory_case),
    ("account_13b", accounting::thirteen_billion),
    ("account_h100", accounting::h100),
    ("account_70b", accounting::seventy_billion),
    ("account_70b_shortened", accounting::seventy_billion_shortened),
    ("allocated", memory::is_allocated_as_planned),
    ("written", memory::weights_are_written_in_pieces),
    ("lost", lost_case),
    ("lost_at_a_product", lost::at_a_product),
    ("lost_at_a_wait", lost::at_a_wait),
    ("hanging", hanging_case),
    ("hanging_at_first", hanging_at_first_case),
    ("missing", missing_case),
    ("processes", processes::have_the_bits_of_one),
    ("processes_missing", processes::name_the_rank_that_does_not_come),
    ("stopped", stopped_case),
    ("task", task_case),
    ("traced", traced_case),
    ("traced_late", traced_late_case),
];

/// Settings of the fake driver for the worst behaviour that is known or reported of real drivers.
const UNFRIENDLY: [(&str, &str); 4] = [
    ("FAKECUDA_QUEUE", "1000"),
    ("FAKECUDA_CONNECTIONS", "1"),
    ("FAKECUDA_BLOCKING", "1"),
    ("FAKECUDA_NCCL_HOPS", "1"),
];

#[test]
fn child() {
    let Ok(case) = std::env::var(CASE) else { return };
    let others = [attention::CASES, matmuls::CASES, proof::CASES, room::CASES].concat();
    let mut cases = CASES.iter().chain(&others);
    let (_, run) = cases.find(|(name, _)| *name == case).expect("a case");
    run();
    println!("case {case} done");
}

/// Whether cases run under the driver of this machine.
fn on_a_real_gpu() -> bool {
    std::env::var_os("ONEBOX_REAL_GPU").is_some()
}

/// Runs a case under the fake driver, and fails with the child's output. With ONEBOX_REAL_GPU it
/// uses the machine's driver, and skips cases whose settings only the fake driver knows.
fn under_fake(case: &str, environment: &[(&str, &str)]) {
    let real = on_a_real_gpu();
    let of_fake_driver =
        ["FAKECUDA_FAIL", "FAKECUDA_MEMORY", "FAKECUDA_QUEUE", "FAKECUDA_ALGORITHMS"];
    if real && environment.iter().any(|(name, _)| of_fake_driver.contains(name)) {
        println!("{case}: skipped on a real GPU");
        return;
    }
    let cache = tempfile::tempdir().unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child", "--nocapture", "--test-threads=1"]).env(CASE, case);
    if !real {
        command.env("LD_LIBRARY_PATH", fake_cuda::library_folder());
        command.env("XDG_CACHE_HOME", cache.path()).env("FAKECUDA_DEVICES", "4");
        command.envs(UNFRIENDLY).env_remove("CUDA_DEVICE_MAX_CONNECTIONS");
        command.envs(environment.iter().copied());
    }
    let output = cache.path().join("output");
    let file = std::fs::File::create(&output).unwrap();
    command.stdout(file.try_clone().unwrap()).stderr(Stdio::from(file));
    let (mut child, started) = (command.spawn().unwrap(), Instant::now());
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break Some(status);
        }
        if started.elapsed() > WATCHDOG * if full() { 10 } else { 1 } {
            child.kill().unwrap();
            break None;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let output_text = String::from_utf8_lossy(&std::fs::read(&output).unwrap()).into_owned();
    let done = format!("case {case} done");
    assert!(status.is_some(), "{case} hangs:\n{output_text}");
    assert!(
        status.is_some_and(|s| s.success()) && output_text.contains(&done),
        "{case}:\n{output_text}"
    );
    println!("{output_text}");
}

fn try_run(config: &Config, options: &RunOptions) -> Result<RunRecord, Box<RunError>> {
    try_run_on(&short_text(), config, &lay_out(config), options)
}

fn on_cuda(mut config: Config) -> Config {
    config.device = DeviceConfig::Cuda;
    config
}

fn in_process() -> RunOptions {
    RunOptions { collectives: Collectives::InProcess, ..RunOptions::default() }
}

/// Error of a run on four ranks. Panics if the error is late, or if a rank has no error.
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
    let options = RunOptions { timeout: Some(DEADLINE), ..RunOptions::default() };
    let error = failed(&on_cuda(tiny(GRID)), &options);
    assert!(matches!(error.error, Error::Gpu { .. } | Error::Timeout { .. }), "{error}");
}

/// A collective hangs before the first step.
fn hanging_at_first_case() {
    let options = RunOptions { timeout: Some(DEADLINE), ..RunOptions::default() };
    let error = failed(&on_cuda(tiny(GRID)), &options).to_string();
    assert!(error.contains("first collectives have not ended in 3 s"), "{error}");
}

/// One rank gets a stop request in step 2. All ranks end after this step.
fn stopped_case() {
    let options = in_process();
    let tell = std::sync::Arc::clone(&options.stop);
    let watcher = Watcher::new(move |rank, place, step| {
        let now = (rank, place, step) == (3, FaultPoint::Step, 2);
        tell.fetch_or(now, std::sync::atomic::Ordering::SeqCst);
    });
    let options = RunOptions { watcher: Some(watcher), ..options };
    let ran = try_run(&on_cuda(tiny(GRID)), &options).expect("it ends in order");
    assert_eq!((ran.outcome.step, ran.steps.len(), ran.outcome.complete), (2, 2, false));
}

/// The GPU of rank 1 is busy for longer than the deadline. Another rank's error names rank 1.
fn missing_case() {
    let options = RunOptions { timeout: Some(DEADLINE), ..RunOptions::default() };
    let error = failed(&on_cuda(tiny(GRID)), &options);
    let Error::Timeout { rank, missing, seconds, .. } = &error.error else { panic!("{error}") };
    assert!(*rank != 1 && missing == &[1] && *seconds == 3, "{error}");
    let text = error.to_string();
    assert!(text.contains("no answer for 3 s from rank(s) [1]"), "{text}");
}

/// One rank is late in each step. The other ranks must not fill the launch queues meanwhile,
/// because then the late rank could never catch up.
fn ahead_case() {
    let slow_rank = |rank: usize, place: FaultPoint, _: u64| {
        if (rank, place) == (1, FaultPoint::Step) {
            std::thread::sleep(Duration::from_millis(700));
        }
    };
    let options = RunOptions { watcher: Some(Watcher::new(slow_rank)), ..RunOptions::default() };
    let sets = ["train.steps=2", "batch.micro=1", "batch.global=16"];
    let config = on_cuda(tiny(&[GRID, &sets[..]].concat()));
    let ran = try_run(&config, &options).unwrap_or_else(|e| panic!("{e}"));
    assert!(ran.steps.iter().all(|s| s.loss.is_finite()));
    lanes::assert_never_blocked();
}

/// Every copy between host and GPU uses pinned memory, because a copy of other memory stops its
/// rank. The run frees all its memory.
fn pinned_case() {
    let config = on_cuda(tiny(GRID));
    try_run(&config, &RunOptions::default()).unwrap_or_else(|e| panic!("{e}"));
    let Some(stats) = fake_cuda::stats() else {
        assert!(on_a_real_gpu(), "the fake driver was not loaded, or counts nothing");
        return;
    };
    assert!(stats.h2d_bytes > 100_000 && stats.d2h_bytes > 100_000, "{stats:?}");
    // Each of the four ranks pins the host memory that copies use, and the words of its lanes.
    let plan = lay_out(&config).plan;
    assert_eq!(stats.pinned_bytes, 4 * device::cuda::pinned_bytes(&plan), "{stats:?}");
    let host = plan.bytes(device::Arena::Pinned);
    assert!(device::cuda::pinned_bytes(&plan) < host * 2 / 3, "{host} bytes of host memory");
    // The writes of the ranks' own threads before the first step use pageable memory.
    assert!(stats.pageable_copies <= 8, "{stats:?}");
    assert_eq!(stats.allocations, stats.frees, "{stats:?}");
    assert_eq!((stats.errors, stats.writes_after_free), (0, 0), "{stats:?}");
}

fn task_case() {
    let options = RunOptions { panic_at: Some((2, Lane::Host, 9)), ..RunOptions::default() };
    let error = failed(&on_cuda(tiny(GRID)), &options);
    assert_eq!(error.rank, 2, "{error}");
    assert!(matches!(error.error, Error::Panicked { .. }), "{error}");
}

/// A trace has the ops of all lanes of the traced steps. The ops of a lane run one after another.
fn traced_case() {
    let trace = std::sync::Arc::new(device::Trace::of_steps(2..=2));
    let options = RunOptions { trace: Some(trace.clone()), ..RunOptions::default() };
    let config = on_cuda(tiny(ALONE));
    try_run(&config, &options).unwrap_or_else(|e| panic!("{e}"));
    let spans = trace.spans();
    for lane in [Lane::Compute, Lane::H2d, Lane::D2h, Lane::Host] {
        let mut own: Vec<_> = spans.iter().filter(|span| span.lane == lane).collect();
        own.sort_by_key(|span| span.start);
        assert!(!own.is_empty(), "nothing ran on {lane:?}");
        for (one, next) in own.iter().zip(&own[1..]) {
            // Events have a resolution of microseconds.
            let overlap = one.end.saturating_sub(next.start);
            assert!(overlap < Duration::from_micros(20), "{lane:?}: {one:?} ends behind {next:?}");
        }
    }
    let gemms = spans.iter().filter(|span| span.name == "gemm").count();
    assert!(gemms > 10 && spans.iter().all(|span| span.start <= span.end), "{gemms} products");
}

/// The GPU's clock advances by an hour before each of the two traced steps. The first step has the
/// times of the run's clock. In the second step, times are not rounded to the resolution that
/// single precision has for an hour in milliseconds.
fn traced_late_case() {
    const HOUR: u64 = 3600;
    let later = |_: usize, place: FaultPoint, step: u64| {
        if place == FaultPoint::Step && step >= 2 && !fake_cuda::advance(HOUR) {
            assert!(on_a_real_gpu(), "the fake driver was not loaded");
        }
    };
    let trace = std::sync::Arc::new(device::Trace::of_steps(2..=3));
    let watcher = Some(Watcher::new(later));
    let options = RunOptions { trace: Some(trace.clone()), watcher, ..RunOptions::default() };
    try_run(&on_cuda(tiny(&["train.steps=3"])), &options).unwrap_or_else(|e| panic!("{e}"));
    if on_a_real_gpu() {
        return;
    }
    let hour = Duration::from_secs(HOUR);
    let streams = trace.spans().into_iter().filter(|span| span.lane != Lane::Host);
    let (first, second): (Vec<_>, Vec<_>) = streams.partition(|span| span.start < hour);
    assert!(first.len() > 10 && second.len() > 10, "{} and {}", first.len(), second.len());
    let offsets = second.iter().map(|span| (span.start - hour).as_micros() % 250);
    let mut offsets: Vec<_> = offsets.collect();
    offsets.sort_unstable();
    offsets.dedup_by_key(|micros| *micros / 2);
    assert!(offsets.len() > 5, "ops start at {offsets:?} us of each 250");
}

#[test]
fn a_trace_is_as_exact_after_an_hour_as_at_the_start() {
    under_fake("traced_late", &[("FAKECUDA_CHAOS_US", "30")]);
}

#[test]
fn a_trace_has_the_ops_of_all_lanes() {
    under_fake("traced", &[("FAKECUDA_CHAOS_US", "30"), ("FAKECUDA_DRIVER", "12020")]);
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
    under_fake("grid_fp8", &[("FAKECUDA_CHAOS_US", "30"), ("FAKECUDA_SM", "90")]);
}

#[test]
fn modes_and_placements_give_the_same_bits() {
    under_fake("modes", &[("FAKECUDA_CHAOS_US", "30")]);
}

#[test]
fn with_reduce_fp32_sums_by_nccl_are_those_in_process() {
    under_fake("sums_dp4", &[]);
    under_fake("sums_grid", &[]);
}

#[test]
fn sixteen_gpus_train_as_the_cpu_does() {
    for case in ["tp8_dp2", "tp4_dp4", "tp1_dp16"].into_iter().filter(|_| full()) {
        under_fake(case, &[("FAKECUDA_DEVICES", "16"), ("FAKECUDA_CHAOS_US", "10")]);
    }
}

#[test]
fn ranks_can_share_a_gpu() {
    under_fake("shared", &[("FAKECUDA_DEVICES", "1"), ("FAKECUDA_CHAOS_US", "30")]);
    under_fake("shared", &[("FAKECUDA_DEVICES", "3")]);
}

#[test]
fn collectives_are_those_of_the_cpu_bit_for_bit() {
    under_fake("collectives", &[("FAKECUDA_CHAOS_US", "300")]);
    // All ranks are on one GPU, whose streams block their caller if they are full.
    under_fake("collectives", &[("FAKECUDA_DEVICES", "1"), ("FAKECUDA_QUEUE", "64")]);
}

#[test]
fn no_rank_runs_ahead_of_a_collective() {
    under_fake("ahead", &[("FAKECUDA_CHAOS_US", "100")]);
}

#[test]
fn an_update_of_more_tiles_than_a_queue_holds_runs_beside_the_next_forward() {
    under_fake("tiles", &[]);
}

#[test]
fn no_thread_sits_in_a_full_queue_of_launches() {
    under_fake("paced", &[("FAKECUDA_CHAOS_US", "100")]);
}

/// The queue has 700 places, and a thread is at most 600 launches ahead.
#[test]
fn a_trace_makes_nobody_sit_in_a_full_queue_of_launches() {
    let queue = ("FAKECUDA_QUEUE", "700");
    under_fake("paced_and_traced", &[("FAKECUDA_CHAOS_US", "100"), queue]);
}

#[test]
fn who_drives_a_gpu_has_a_core_and_the_host_lane_has_the_others() {
    under_fake("bound", &[]);
}

#[test]
fn ranks_that_share_hardware_queues_do_not_wait_for_each_other_in_a_circle() {
    for connections in ["1", "3"] {
        let queues = ("CUDA_DEVICE_MAX_CONNECTIONS", connections);
        under_fake("aliased", &[("FAKECUDA_DEVICES", "1"), queues]);
    }
}

#[test]
fn copies_are_of_pinned_memory_and_all_memory_is_given_back() {
    under_fake("pinned", &[]);
}

#[test]
fn a_plan_that_does_not_fit_is_an_error_with_figures() {
    under_fake("memory", &[("FAKECUDA_BESIDE", "0"), ("FAKECUDA_MEMORY", "300000")]);
}

/// In the full test, the GPU has 76 MB next to the matmul workspace, and the host has 122 MB: a
/// thousandth of a GPU and a host that are sold together. The quick test has a fifth of both.
#[test]
fn what_is_allocated_is_what_is_planned() {
    let memory = if full() { "110000000" } else { "50000000" };
    under_fake("allocated", &[("FAKECUDA_BESIDE", "0"), ("FAKECUDA_MEMORY", memory)]);
}

#[test]
fn weights_on_a_gpu_are_those_that_were_written() {
    under_fake("written", &[]);
}

#[test]
fn a_lost_gpu_ends_the_run_and_is_named() {
    under_fake("lost", &[("FAKECUDA_FAIL", "lost:400@1")]);
    under_fake("lost", &[("FAKECUDA_FAIL", "lost:1500@1"), ("FAKECUDA_CHAOS_US", "30")]);
}

#[test]
fn a_library_that_finds_a_gpu_lost_says_how() {
    under_fake("lost_at_a_product", &[("FAKECUDA_FAIL", "lost:100@0")]);
    // In one of these cases, the wait itself finds the lost GPU.
    for at in 100..106 {
        under_fake("lost_at_a_wait", &[("FAKECUDA_FAIL", &format!("lost:{at}@0"))]);
    }
}

#[test]
fn a_run_that_is_told_to_stop_ends_after_the_same_step_on_every_gpu() {
    under_fake("stopped", &[("FAKECUDA_CHAOS_US", "30")]);
}

#[test]
fn a_collective_that_never_ends_is_aborted() {
    under_fake("hanging_at_first", &[("FAKECUDA_FAIL", "nccl:1")]);
    under_fake("hanging", &[("FAKECUDA_FAIL", "nccl:40")]);
    under_fake("hanging", &[("FAKECUDA_FAIL", "nccl-error:40")]);
}

#[test]
fn a_rank_whose_gpu_does_not_come_to_a_collective_is_named() {
    under_fake("missing", &[("FAKECUDA_FAIL", "stall:100@1")]);
}

#[test]
fn several_processes_have_the_bits_of_one() {
    // Only NCCL joins processes, and it needs a GPU for each of the four ranks.
    if on_a_real_gpu() && device::cuda::probe().gpus.len() < 4 {
        println!("processes: skipped on fewer than four GPUs");
        return;
    }
    under_fake("processes", &[]);
}

#[test]
fn a_rank_of_another_process_whose_gpu_does_not_come_is_named() {
    under_fake("processes_missing", &[("FAKECUDA_FAIL", "stall:100@2")]);
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
