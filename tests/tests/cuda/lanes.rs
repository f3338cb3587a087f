//! Overlap of the lanes of a real GPU. The tests check the order of events.

use super::{GRID, on_cuda, try_run};
use device::Lane;
use device::Trace;
use engine::run::{FaultPoint, RunOptions, Watcher};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tests::{run, tiny};

/// Number of tiles in a queue whose length does not depend on the step.
const QUEUE: usize = 1024;

const MANY_TILES: &[&str] = &[
    "model.layers=14",
    "model.hidden=64",
    "model.ffn_hidden=1024",
    "batch.micro=1",
    "batch.global=1",
    "offload.tile_elements=1024",
    "offload.bucket_elements=1000000",
    "train.steps=2",
];

/// Number, on the Compute lane, of the last op of block 0's forward pass, by step. A run of the
/// same program on the cpu backend counts the ops.
fn first_block_done() -> Vec<u64> {
    let trace = Arc::new(Trace::default());
    run(&tiny(MANY_TILES), &RunOptions { trace: Some(trace.clone()), ..RunOptions::default() });
    let spans = trace.spans().into_iter().filter(|s| s.lane == Lane::Compute).zip(1..);
    let is = |s: &device::Span| s.name == "bias_dropout_add" && s.wrote == "x.1";
    spans.filter(|(span, _)| is(span)).map(|(_, tick)| tick).collect()
}

/// Block 0 ends its forward pass while the previous step's update has more tiles left than
/// [`QUEUE`]. If the queue made the submitting thread wait, no scheduler could produce this order.
pub(super) fn update_beside_the_next_forward() {
    let done = first_block_done();
    let trace = Arc::new(Trace::default());
    let slow = Some(("adam_tile", 15));
    let options = RunOptions { trace: Some(trace.clone()), slow, ..RunOptions::default() };
    try_run(&on_cuda(tiny(MANY_TILES)), &options).unwrap_or_else(|e| panic!("{e}"));
    let tiles: Vec<u64> =
        trace.spans().iter().filter(|s| s.name == "adam_tile").map(|s| s.computed).collect();
    let of_step = tiles.len() / 2;
    assert!(of_step > QUEUE + 500, "{of_step} tiles");
    let left = tiles[..of_step].iter().filter(|computed| **computed >= done[1]).count();
    println!("{left} of {of_step} tiles left when block 0 has gone forward");
    assert!(left > QUEUE + 100, "{left} of {of_step}");
}

/// Asserts that no launch found its queue full, if the driver counts full queues.
pub(super) fn assert_never_blocked() {
    let Some(stats) = fake_cuda::stats() else { return };
    assert_eq!(stats.blocked, 0, "a thread sat in a full queue: {stats:?}");
}

/// Runs a step of about 2,500 launches on a GPU that is slower than the thread that enqueues them.
pub(super) fn nobody_sits_in_a_full_queue() {
    let config = on_cuda(tiny(&["batch.micro=1", "batch.global=20", "train.steps=1"]));
    try_run(&config, &RunOptions::default()).unwrap_or_else(|e| panic!("{e}"));
    if let Some(stats) = fake_cuda::stats() {
        assert!(stats.launches + stats.gemms > 2_000, "{stats:?}");
        // A stream reports its progress now and then, not wherever other lanes may wait.
        println!("{} of {} launches", stats.value_ops, stats.launches + stats.gemms);
        assert!(6 * stats.value_ops < stats.launches + stats.gemms, "{stats:?}");
    }
    assert_never_blocked();
}

/// Runs the same step with a trace, which puts two events around each op.
pub(super) fn nor_where_a_trace_is_made() {
    let config = on_cuda(tiny(&["batch.micro=1", "batch.global=20", "train.steps=1"]));
    let trace = Some(Arc::new(Trace::default()));
    let options = RunOptions { trace, ..RunOptions::default() };
    try_run(&config, &options).unwrap_or_else(|e| panic!("{e}"));
    assert_never_blocked();
}

/// CPUs that a thread of this process may run on, in Linux's list format.
fn allowed(thread: &str) -> String {
    let status = std::fs::read_to_string(format!("/proc/{thread}/status")).unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:"));
    line.unwrap().trim().to_owned()
}

/// CPUs that the threads of this name may run on, by thread.
fn allowed_by_name(name: &str) -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let numbers = tasks.map(|task| task.unwrap().file_name().into_string().unwrap());
    let is = |number: &String| {
        let comm = std::fs::read_to_string(format!("/proc/self/task/{number}/comm"));
        comm.is_ok_and(|comm| comm.trim() == name)
    };
    numbers.filter(is).map(|number| allowed(&format!("self/task/{number}"))).collect()
}

/// CPUs of the thread that drives a GPU, and of its Host lane.
type ThreadBinding = (String, Vec<String>);

pub(super) fn threads_are_bound() {
    let seen: Arc<Mutex<Vec<ThreadBinding>>> = Arc::default();
    let look = {
        let seen = Arc::clone(&seen);
        move |_: usize, place: FaultPoint, _: u64| {
            if place == FaultPoint::Decided {
                let driver = allowed("thread-self");
                seen.lock().unwrap().push((driver, allowed_by_name("host 0")));
            }
        }
    };
    let options =
        RunOptions { bind: true, watcher: Some(Watcher::new(look)), ..RunOptions::default() };
    try_run(&on_cuda(tiny(&["train.steps=1"])), &options).unwrap_or_else(|e| panic!("{e}"));
    let machine = topology::Machine::discover().unwrap();
    let place = &topology::place_ranks(&machine, 1)[0];
    let driver = place.driver_cpu.map(|cpu| cpu.to_string()).expect("a core");
    let mut workers = place.worker_cpus.clone();
    workers.sort_unstable();
    let expected = (driver, vec![topology::format_cpu_list(&workers)]);
    assert_eq!(*seen.lock().unwrap(), [expected]);
}

/// Runs four ranks on one GPU with few hardware queues. Each queue runs the launches of all its
/// ranks in the order of submission.
pub(super) fn ranks_share_hardware_queues() {
    let options = RunOptions { timeout: Some(Duration::from_secs(20)), ..RunOptions::default() };
    let sets = ["train.steps=4", "model.layers=1", "batch.global=4"];
    let config = on_cuda(tiny(&[GRID, &sets[..]].concat()));
    let ran = try_run(&config, &options).unwrap_or_else(|e| panic!("{e}"));
    assert!(ran.steps.iter().all(|s| s.loss.is_finite()));
}
