//! Steps of whole configs in the accounting mode of the fake driver. The driver computes nothing,
//! and its memory consists of addresses. It counts every byte that a GPU would hold, in the plan
//! and outside of the plan.

use super::under_fake;
use config::{Config, load};
use engine::dry_run::dry_run;
use fake_cuda::{Stats, memory_use, stats};
use layout::build::{device_bytes, device_limit};
use predict::plan::memory_report;
use std::path::Path;
use std::sync::{Barrier, Mutex};
use tests::lay_out;

/// Usable bytes of a V100 with 32 GB and of an H100 with 80 GB, as their drivers report them.
const V100: &str = "34089730048";
pub(super) const H100: &str = "85028765696";

fn config(path: &str, sets: &[&str]) -> Config {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs").join(path);
    let mut all = vec!["device=Cuda".to_owned()];
    all.extend(sets.iter().map(ToString::to_string));
    load(&path, &all).unwrap_or_else(|e| panic!("{e}")).config
}

/// Numbers of allocations, of other increases of GPU memory, and of pinned allocations.
fn taken(stats: &Stats) -> (u64, u64, u64) {
    (stats.allocations, stats.overhead_allocations, stats.pinned)
}

/// Runs three steps. All memory use fits into the GPU, and is allocated before step 1.
fn plays_within_memory(config: &Config) {
    let (built, ranks) = (lay_out(config), config.world_size());
    let report = memory_report(config, &built);
    // Limits of the machine that runs the test do not matter.
    let fits = report.gpu.limit.is_some_and(|limit| report.gpu.bytes <= limit);
    assert!(fits && report.not_checked.is_none(), "{}", report.binding.words);
    let overheads: Vec<_> =
        report.gpu.overheads.iter().map(|part| (part.name, part.bytes)).collect();
    println!("planned {}, limit {:?}, beside {overheads:?}", report.gpu.bytes, report.gpu.limit);
    let (barrier, first, last) = (Barrier::new(ranks), Mutex::new(None), Mutex::new(None));
    let passed = |_rank: usize, step: u64| {
        // The leader reads the numbers while all other ranks wait.
        if barrier.wait().is_leader() {
            let seen = if step == 0 { &first } else { &last };
            *seen.lock().unwrap() = stats();
        }
        barrier.wait();
    };
    dry_run(config, &built, 3, &passed).unwrap_or_else(|e| panic!("{e}"));
    let [first, last] = [first, last].map(|seen| seen.into_inner().unwrap().expect("steps"));
    println!("before step 1 {first:?}\nafter step 3 {last:?}");
    assert_eq!(taken(&first), taken(&last), "nothing is allocated from step 1 on");
    assert!(last.gemms > first.gemms && last.pageable_copies == 0);
    let memory: u64 = std::env::var("FAKECUDA_MEMORY").expect("set").parse().expect("a number");
    for gpu in 0..ranks {
        let held = memory_use(gpu as i32).expect("the fake driver");
        println!("GPU {gpu}: {held:?} of {memory}");
        assert!(held.peak >= device_bytes(config, &built.plan) && held.peak_in_all <= memory);
    }
    // After the ranks have connected, the plan counts the measured bytes.
    let limit = device_limit(config, &built).expect("a limit");
    let memory = memory_report(config, &built).gpu;
    assert!(memory.bytes <= limit, "{} of {limit}", memory.bytes);
    if ranks > 1 {
        assert!(
            memory
                .overheads
                .iter()
                .any(|part| part.name == "NCCL, the most that a run has measured")
        );
    }
}

pub(super) fn seventy_billion() {
    // The global batch has two micro-batches, with the same plan.
    plays_within_memory(&config("dgx2-70b.ron", &["batch.global=32"]));
}

pub(super) fn seventy_billion_shortened() {
    plays_within_memory(&config("dgx2-70b.ron", &["batch.global=32", "model.layers=2"]));
}

pub(super) fn thirteen_billion() {
    let one = ["parallel.data=1", "batch.global=8"];
    plays_within_memory(&config("paper/dgx2-13b.ron", &one));
}

pub(super) fn h100() {
    plays_within_memory(&config("h100-1.3b.ron", &["batch.global=16"]));
}

pub(super) fn two_h100() {
    let two = ["parallel.data=2", "batch.global=32"];
    plays_within_memory(&config("h100-1.3b.ron", &two));
}

pub(super) fn accounted(case: &str, sm: &str, devices: &str, memory: &str) {
    let variables = [
        ("FAKECUDA_ACCOUNTING", "1"),
        ("FAKECUDA_SM", sm),
        ("FAKECUDA_DEVICES", devices),
        ("FAKECUDA_MEMORY", memory),
    ];
    under_fake(case, &variables);
}

#[test]
fn thirteen_billion_parameters_start_and_step_on_one_v100() {
    accounted("account_13b", "70", "1", V100);
}

#[test]
fn the_h100_config_starts_and_steps_on_one_h100() {
    accounted("account_h100", "90", "1", H100);
}

#[test]
fn seventy_billion_parameters_start_and_step_on_sixteen_v100() {
    let case = if tests::compare::full() { "account_70b" } else { "account_70b_shortened" };
    accounted(case, "70", "16", V100);
}
