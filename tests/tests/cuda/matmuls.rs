//! Matmuls by the clock on all ranks. The stand-in's algorithms have simulated times.

use super::{ALONE, GRID, in_process, on_cuda, processes, try_run, under_fake};
use engine::run::{FaultPoint, RunOptions, Watcher};
use std::sync::{Arc, Mutex};
use tests::compare::with;
use tests::tiny;

/// Cases that a child process runs.
pub(super) const CASES: &[(&str, fn())] =
    &[("matmuls_everywhere", everywhere), ("matmuls_apart", apart)];

const SETS: &[&str] = &["precision=Bf16", "matmuls=Timed", "train.steps=2", "train.eval_every=0"];

/// The second algorithm of cuBLASLt's heuristic is the fastest.
const SECOND: (&str, &str) = ("FAKECUDA_ALGORITHMS", "2000,1000");

/// Numbers of matmuls so far: all, those by another algorithm than the first, and those with an
/// epilogue other than a bias.
fn matmuls() -> [u64; 3] {
    let stats = fake_cuda::stats().expect("the fake driver");
    [stats.gemms, stats.other_gemms, stats.fused_gemms]
}

/// The matmuls of a run after rank 0 has opened its GPU. All ranks have chosen and warmed up then.
fn in_steps(options: &RunOptions, run: &dyn Fn(&RunOptions)) -> [u64; 3] {
    let opened = Arc::new(Mutex::new(None));
    let noted = Arc::clone(&opened);
    let watcher = Watcher::new(move |rank, place, _| {
        if (rank, place) == (0, FaultPoint::Opened) {
            *noted.lock().unwrap() = Some(matmuls());
        }
    });
    run(&RunOptions { watcher: Some(watcher), ..options.clone() });
    let before = opened.lock().unwrap().take().expect("rank 0 opens its GPU");
    let after = matmuls();
    std::array::from_fn(|i| after[i] - before[i])
}

fn one_process(layout: &[&str]) -> impl Fn(&RunOptions) {
    let config = on_cuda(tiny(&with(SETS, layout)));
    move |options| {
        try_run(&config, options).unwrap_or_else(|e| panic!("{e}"));
    }
}

/// Each rank takes the choice of rank 0, also in another process.
fn everywhere() {
    let two = |options: &RunOptions| {
        for ran in processes::by_two(&with(SETS, GRID), options) {
            ran.unwrap_or_else(|e| panic!("{e}"));
        }
    };
    let by_nccl = RunOptions::default();
    for (what, [all, others, _]) in [
        ("alone", in_steps(&by_nccl, &one_process(ALONE))),
        ("in-process", in_steps(&in_process(), &one_process(GRID))),
        ("NCCL", in_steps(&by_nccl, &one_process(GRID))),
        ("two processes", in_steps(&by_nccl, &two)),
    ] {
        println!("{what}: {others} of {all}");
        assert!(all > 100 && others == all, "{what}: {others} of {all}");
    }
}

/// Epilogues are slower than kernels, and no step has one.
fn apart() {
    let [all, others, fused] = in_steps(&in_process(), &one_process(GRID));
    assert!(all > 100 && (others, fused) == (0, 0), "{all}, {others}, {fused}");
}

#[test]
fn all_ranks_run_matmuls_by_the_algorithms_that_rank_0_has_timed() {
    under_fake("matmuls_everywhere", &[SECOND, ("FAKECUDA_CHAOS_US", "10")]);
}

#[test]
fn an_epilogue_that_the_clock_finds_slow_does_not_run() {
    let slow = [("FAKECUDA_EPILOGUE_US", "5000"), ("FAKECUDA_KERNEL_US", "100")];
    under_fake("matmuls_apart", &[&[("FAKECUDA_ALGORITHMS", "1000")][..], &slow].concat());
}
