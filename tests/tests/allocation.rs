//! A step allocates no memory, on any thread. A plan holds 16-bit tensors in 16 bits.
#![allow(missing_docs, reason = "a test")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "helpers of tests")]
#![allow(clippy::print_stdout, reason = "figures for --nocapture")]
#![allow(clippy::allow_attributes, reason = "the lines above")]
#![expect(unsafe_code, reason = "a global allocator that counts")]

use device::Dtype;
use device::cpu::Lanes;
use engine::run::{FaultPoint, RunOptions, Watcher};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use tests::{lay_out, short_text, tiny, try_run_on};

struct CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Whether a run is active. Threads that appear during a run belong to it.
static RUNNING: AtomicBool = AtomicBool::new(false);
/// Whether every rank has begun step [`FIRST`] and none has begun step `FIRST` + 2.
static OPEN: AtomicBool = AtomicBool::new(false);
/// Number of allocations by the run's lane and kernel threads while [`OPEN`] is set. [`OF_RANKS`]
/// counts the allocations by rank threads in the counted steps.
static OF_WORKERS: AtomicU64 = AtomicU64::new(0);
static OF_RANKS: AtomicU64 = AtomicU64::new(0);
/// Number of allocations by rank threads in step 1, as a control.
static IN_STEP_1: AtomicU64 = AtomicU64::new(0);
/// Number of ranks that have begun step [`FIRST`].
static BEGUN: AtomicUsize = AtomicUsize::new(0);
static RANKS: AtomicUsize = AtomicUsize::new(0);
/// First of the two counted steps.
static FIRST: AtomicU64 = AtomicU64::new(2);

#[derive(Clone, Copy, PartialEq)]
enum Thread {
    Unknown,
    /// Thread of the harness or the test, older than the run.
    Outside,
    Worker,
    /// Rank thread, with its current step.
    Rank(u64),
}

thread_local! {
    static THREAD: Cell<Thread> = const { Cell::new(Thread::Unknown) };
}

fn note() {
    let _ = THREAD.try_with(|thread| {
        if thread.get() == Thread::Unknown {
            let running = RUNNING.load(SeqCst);
            thread.set(if running { Thread::Worker } else { Thread::Outside });
        }
        match thread.get() {
            Thread::Worker if OPEN.load(SeqCst) => drop(OF_WORKERS.fetch_add(1, SeqCst)),
            Thread::Rank(step) if is_counted(step) => drop(OF_RANKS.fetch_add(1, SeqCst)),
            Thread::Rank(1) => drop(IN_STEP_1.fetch_add(1, SeqCst)),
            _ => {}
        }
    });
}

// SAFETY: each call goes unchanged to the system's allocator; `note` allocates nothing.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note();
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note();
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note();
        // SAFETY: the caller's promise.
        unsafe { System.realloc(at, layout, size) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }
}

/// Notes on each rank's thread that it begins `step`, and opens or closes the count of workers.
fn passes(_: usize, place: FaultPoint, step: u64) {
    if place != FaultPoint::Step {
        return;
    }
    THREAD.with(|thread| thread.set(Thread::Rank(step)));
    let first = FIRST.load(SeqCst);
    if step == first && BEGUN.fetch_add(1, SeqCst) + 1 == RANKS.load(SeqCst) {
        OPEN.store(true, SeqCst);
    }
    if step == first + 2 {
        OPEN.store(false, SeqCst);
    }
}

#[derive(Debug, PartialEq)]
struct AllocationCounts {
    of_ranks: u64,
    of_workers: u64,
}

/// Whether allocations of rank threads in `step` count.
fn is_counted(step: u64) -> bool {
    let first = FIRST.load(SeqCst);
    (first..first + 2).contains(&step)
}

/// Runs `tiny` and counts the allocations of two steps: 2 and 3, or 4 and 5. The later steps are
/// for two buffers that are first filled in steps 1 and 2 and read one step later. They are also
/// for a step that needs fewer batches than have room: step 2 is the first to use the last batch's
/// memory.
fn counted(sets: &[&str], lanes: Lanes) -> AllocationCounts {
    let later = sets.iter().any(|set| set.contains("Delayed") || *set == "offload.parameters=Host");
    FIRST.store(if later { 4 } else { 2 }, SeqCst);
    let steps = format!("train.steps={}", FIRST.load(SeqCst) + 3);
    let config = tiny(&[sets, &[&steps]].concat());
    let built = lay_out(&config);
    for counter in [&OF_RANKS, &OF_WORKERS, &IN_STEP_1] {
        counter.store(0, SeqCst);
    }
    BEGUN.store(0, SeqCst);
    RANKS.store(config.parallel.tensor * config.parallel.data, SeqCst);
    // The data exists before the run, so that its allocations do not count.
    let data = short_text();
    RUNNING.store(true, SeqCst);
    let watcher = Some(Watcher::new(passes));
    let options = RunOptions { lanes, watcher, ..RunOptions::default() };
    let ran = try_run_on(&data, &config, &built, &options);
    RUNNING.store(false, SeqCst);
    let ran = ran.unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(ran.steps.len() as u64, FIRST.load(SeqCst) + 3);
    assert_eq!(BEGUN.load(SeqCst), RANKS.load(SeqCst));
    assert!(IN_STEP_1.load(SeqCst) > 0, "the first step allocates: else nothing is counted");
    AllocationCounts { of_ranks: OF_RANKS.load(SeqCst), of_workers: OF_WORKERS.load(SeqCst) }
}

/// The file has one test, because the counters are global, and threads that the harness starts
/// during a run would count too.
#[test]
fn a_step_allocates_nothing_and_a_plan_holds_sixteen_bits_in_sixteen() {
    steps_after_the_first_allocate_nothing_on_any_thread_of_a_run();
    steps_of_a_llama_allocate_nothing_either();
    steps_with_kernel_threads_allocate_nothing_either();
    sixteen_bit_buffers_hold_sixteen_bits();
}

const GRID: [&str; 2] = ["parallel.tensor=2", "parallel.data=2"];
const EXPERTS: &str = "model.experts=(count: 6, per_token: 2, ffn_hidden: 24, dense_layers: [1], balance: Megatron(factor: 0.01))";
const NOTHING: AllocationCounts = AllocationCounts { of_ranks: 0, of_workers: 0 };

fn steps_after_the_first_allocate_nothing_on_any_thread_of_a_run() {
    for sets in [
        &[][..],
        &["batch.global=2"],
        &["precision=Bf16", "recompute=Block", "model.dropout=0.1"],
        &["offload.optimizer=Device"],
        &["offload.accumulate=Host", "offload.update=Serial"],
        &["offload.transfer=Blocking", "offload.update=Serial"],
        &["offload.first_forward=3", "recompute=Block"],
        &["offload.update=Delayed(after_step: 0)", "offload.optimizer=Split(device_fraction: 0.3)"],
        &["offload.update=Speculative", "precision=Bf16", "offload.master=Split"],
        &[
            "offload.parameters=Host",
            "offload.resident_blocks=0",
            "offload.ring=2",
            "recompute=Block",
        ],
        &[
            GRID[0],
            GRID[1],
            "offload.parameters=Host",
            "offload.first_forward=2",
            "recompute=Block",
        ],
        &[GRID[0], GRID[1], "offload.update=Speculative", "offload.accumulate=Host"],
        &GRID,
        &[GRID[0], GRID[1], "parallel.sequence=true", "offload.accumulate=Host"],
        &[GRID[0], "parallel.sequence=true", "precision=Bf16", "recompute=Selective"],
        &[GRID[0], "recompute=Block", "partition_checkpoints=true"],
        &[GRID[0], "recompute=Block", "host_checkpoints=true"],
        &[GRID[0], "recompute=Block", "activations=Tiers(gpu_blocks: 1, host_blocks: 1)"],
        &["model.layers=5", "recompute=Block", "activations=Tiers(host_blocks: 5)"],
        &[GRID[0], GRID[1], "optimizer.frozen=[\"wte*\", \"h.1.*\", \"*.ln_2.*\"]"],
        &[GRID[0], "adapter=Lora(rank: 4, dropout: 0.1)", "recompute=Block"],
    ] {
        for lanes in [Lanes::Inline, Lanes::Threads { chaos_us: 0 }] {
            assert_eq!(counted(sets, lanes), NOTHING, "{sets:?} {lanes:?}");
        }
    }
}

/// Ranks have key and value heads of their own, share them, or share the only head.
fn steps_of_a_llama_allocate_nothing_either() {
    let llama = ["model.family=Llama", "model.qk_norm=true", "model.qkv_bias=true"];
    for sets in [
        &["model.kv_heads=2"][..],
        &["model.kv_heads=2", "parallel.tensor=2", "model.tied=true"],
        &["model.kv_heads=2", "parallel.tensor=4", "precision=Bf16", "recompute=Block"],
        &["model.kv_heads=1", "parallel.tensor=4", "parallel.sequence=true"],
        &["model.kv_heads=1", GRID[0], GRID[1], "offload.accumulate=Host", "batch.global=8"],
        &["model.kv_heads=1", GRID[0], "offload.optimizer=Device", "recompute=Block"],
        &[EXPERTS, GRID[0], GRID[1]],
        &[EXPERTS, GRID[0], "parallel.sequence=true", "recompute=Block"],
        &[EXPERTS, GRID[0], "recompute=Block", "offload.parameters=Host", "adapter=Lora(rank: 4)"],
        &[
            GRID[0],
            "model.layer_pattern=DF",
            "model.delta_net=(key_heads: 2, value_heads: 4, key_dim: 8, value_dim: 6, taps: 3)",
            "model.output_gate=true",
            "model.qkv_bias=false",
            "adapter=Lora(rank: 4, dropout: 0.1)",
        ],
        &[
            "model.kv_heads=1",
            GRID[0],
            "offload.update=Delayed(after_step: 0)",
            "offload.optimizer=Split(device_fraction: 0.3)",
        ],
    ] {
        let sets = [&llama[..], sets].concat();
        for lanes in [Lanes::Inline, Lanes::Threads { chaos_us: 0 }] {
            assert_eq!(counted(&sets, lanes), NOTHING, "{sets:?} {lanes:?}");
        }
    }
}

fn steps_with_kernel_threads_allocate_nothing_either() {
    // The model is large enough for kernels to use several threads.
    let large = ["device.threads=2", "model.hidden=128", "batch.micro=16", "batch.global=64"];
    for grid in [&[][..], &GRID] {
        let sets = [&large[..], grid].concat();
        assert_eq!(counted(&sets, Lanes::Inline), NOTHING, "{sets:?}");
    }
}

fn sixteen_bit_buffers_hold_sixteen_bits() {
    let bytes = |precision: &str| {
        let sets = [format!("precision={precision}"), "batch.global=2".into()];
        let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
        counted(&sets, Lanes::Inline);
        let built = lay_out(&tiny(&sets));
        for entry in built.plan.entries() {
            let elements = (entry.shape.0 * entry.shape.1) as u64;
            let each = entry.range.end - entry.range.start;
            assert_eq!(each, elements * entry.dtype.bytes(), "{}", entry.name);
        }
        let of = |pool: &str| {
            let entries = built.plan.entries().iter().filter(|e| e.pool.name == pool);
            entries.map(|e| (e.dtype, e.range.end - e.range.start)).collect::<Vec<_>>()
        };
        ["parameters", "gradient buckets", "activations", "parameter staging", "gradient staging"]
            .map(of)
    };
    let (full, half) = (bytes("Fp32"), bytes("Bf16"));
    for (full, half) in full.iter().zip(&half) {
        assert!(!full.is_empty() && full.len() == half.len());
        for ((_, wide), (dtype, narrow)) in full.iter().zip(half) {
            // The statistics of norms and attention stay fp32.
            let expected = if *dtype == Dtype::Bf16 { wide / 2 } else { *wide };
            assert_eq!(*narrow, expected);
        }
    }
    for pool in [&half[0], &half[1], &half[3], &half[4]] {
        assert!(pool.iter().all(|(dtype, _)| *dtype == Dtype::Bf16 && dtype.bytes() == 2));
    }
}
