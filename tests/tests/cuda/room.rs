//! Multiprocessors for NCCL: communicators have a bound of blocks, and matmuls that may run during a
//! collective leave these blocks room.

use super::{GRID, accounting, in_process, on_a_real_gpu, on_cuda, try_run, under_fake};
use engine::run::RunOptions;
use fake_cuda::Stats;
use tests::tiny;

/// Cases that a child process runs.
pub(super) const CASES: &[(&str, fn())] = &[
    ("room_on_hopper", room_on_hopper),
    ("room_on_ampere", no_room),
    ("room_of_old_nccl", no_bound),
    ("room_in_process", no_room_in_process),
    ("room_accounted", accounting::two_h100),
];

/// Trains on TP 2 x DP 2, and returns the counters of the fake driver.
fn counted(options: &RunOptions) -> Stats {
    try_run(&on_cuda(tiny(GRID)), options).unwrap_or_else(|e| panic!("{e}"));
    let stats = fake_cuda::stats().expect("the fake driver");
    println!("{stats:?}");
    stats
}

/// Each of four ranks has a communicator of 16 blocks and one of 8.
fn room_on_hopper() {
    let stats = counted(&RunOptions::default());
    assert_eq!((stats.bounded_communicators, stats.communicator_ctas), (8, 4 * (16 + 8)));
    // Some matmuls run alone, and others during a sum.
    assert!(stats.gemms_beside > 0 && stats.gemms_beside < stats.gemms, "{stats:?}");
}

fn no_room() {
    let stats = counted(&RunOptions::default());
    assert_eq!((stats.bounded_communicators, stats.gemms_beside), (0, 0));
    assert!(stats.collectives > 0);
}

/// A library without the bound makes communicators without it, and the run trains.
fn no_bound() {
    let stats = counted(&RunOptions::default());
    assert!(stats.bounded_communicators == 0 && stats.collectives > 0);
}

/// Without NCCL, kernels of onebox compute the sums, and matmuls use all multiprocessors.
fn no_room_in_process() {
    let stats = counted(&in_process());
    assert_eq!((stats.bounded_communicators, stats.collectives, stats.gemms_beside), (0, 0, 0));
}

fn on_the_stand_in(case: &str, environment: &[(&str, &str)]) {
    if on_a_real_gpu() {
        return println!("{case}: skipped on a real GPU, which counts nothing");
    }
    under_fake(case, environment);
}

#[test]
fn matmuls_leave_room_for_bounded_collectives_on_hopper() {
    on_the_stand_in("room_on_hopper", &[("FAKECUDA_SM", "90")]);
    on_the_stand_in("room_on_ampere", &[("FAKECUDA_SM", "80")]);
    on_the_stand_in("room_in_process", &[("FAKECUDA_SM", "90")]);
}

#[test]
fn an_nccl_without_bounds_runs_without_them() {
    on_the_stand_in("room_of_old_nccl", &[("FAKECUDA_SM", "90"), ("FAKECUDA_NCCL", "21602")]);
}

/// Each matmul has an algorithm for the time beside a collective, too.
#[test]
fn two_hopper_gpus_load_nothing_from_step_1_on() {
    accounting::accounted("room_accounted", "90", "2", accounting::H100);
}
