//! The update runs during the next forward pass. The tests check the order of ops in a trace, never
//! durations.
#![allow(missing_docs, reason = "a test")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "helpers of tests")]
#![allow(clippy::print_stdout, reason = "figures for --nocapture")]
#![allow(clippy::allow_attributes, reason = "the lines above")]

use device::Lane;
use device::cpu::Lanes;
use device::{Span, Trace};
use engine::run::RunOptions;
use std::sync::Arc;
use tests::{lay_out, short_text, tiny, try_run_on};

/// Slowed op and the multiple of its time, so that the scheduler cannot reorder the events.
const SLOW_ADAM: (&str, u32) = ("adam_tile", 60);
const LAYERS: usize = 10;
const STEPS: usize = 4;
/// Number of segments that are copied to the device before the forward pass needs them.
const LOOKAHEAD: usize = 6;

/// Spans of rank 0 in a run with a slow Adam.
fn traced(sets: &[&str]) -> Vec<Span> {
    traced_with(sets, SLOW_ADAM)
}

fn traced_with(sets: &[&str], slow: (&'static str, u32)) -> Vec<Span> {
    let (layers, steps) = (format!("model.layers={LAYERS}"), format!("train.steps={STEPS}"));
    let lookahead = format!("offload.lookahead={LOOKAHEAD}");
    // There is one micro-batch, so that x.1 is written once in each step.
    let mut all = vec![
        &*layers,
        &*steps,
        &*lookahead,
        "model.hidden=64",
        "batch.micro=4",
        "batch.global=4",
        "offload.tile_elements=16384",
        "offload.bucket_elements=65536",
    ];
    all.extend(sets);
    let trace = Arc::new(Trace::default());
    let options = RunOptions {
        lanes: Lanes::Threads { chaos_us: 0 },
        trace: Some(Arc::clone(&trace)),
        slow: Some(slow),
        ..RunOptions::default()
    };
    let config = tiny(&all);
    let built = lay_out(&config);
    assert_eq!(built.micro_batches, 1);
    let ran = try_run_on(&short_text(), &config, &built, &options);
    assert_eq!(ran.unwrap_or_else(|e| panic!("{e}")).steps.len(), STEPS);
    trace.spans().into_iter().filter(|s| s.rank == 0).collect()
}

/// Spans of the op `name` that writes the tensor `wrote`, by training step.
fn by_step<'a>(spans: &'a [Span], lane: Lane, name: &str, wrote: &str) -> Vec<Vec<&'a Span>> {
    let is = |s: &&Span| s.lane == lane && s.name == name && s.wrote == wrote;
    let all: Vec<&Span> = spans.iter().filter(is).collect();
    // Evaluations come after the last step and do not update.
    let per_step = if name == "adam_tile" { all.len() / STEPS } else { 1 };
    assert!(per_step > 0 && all.len() >= STEPS * per_step, "{name} of {wrote}: {}", all.len());
    all.chunks(per_step).take(STEPS).map(<[_]>::to_vec).collect()
}

/// The last op of block 0's forward pass, by step.
fn first_block_done(spans: &[Span]) -> Vec<&Span> {
    by_step(spans, Lane::Compute, "bias_dropout_add", "x.1").into_iter().flatten().collect()
}

fn adam_of(spans: &[Span], layer: usize) -> Vec<Vec<&Span>> {
    by_step(spans, Lane::Host, "adam_tile", &format!("block.{layer}.master"))
}

/// Whether block 0, in some step, ends its forward pass before the previous step's update of the
/// last block starts. One step is enough: if events forbid this order, no scheduler can produce it.
fn update_is_under_the_next_forward(spans: &[Span]) -> bool {
    let (forward, adam) = (first_block_done(spans), adam_of(spans, LAYERS - 1));
    (0..STEPS - 1).any(|k| forward[k + 1].end < adam[k][0].start)
}

#[test]
fn the_next_forward_starts_before_the_update_has_ended_and_under_serial_it_does_not() {
    assert!(update_is_under_the_next_forward(&traced(&["offload.update=Overlapped"])));
    let serial = traced(&["offload.update=Serial"]);
    assert!(!update_is_under_the_next_forward(&serial));
}

/// In some step, the update of the last segments starts before block 0's gradients are on the host.
#[test]
fn under_speculative_the_update_runs_beside_the_backward_pass_of_its_own_step() {
    let spans = traced_with(&["offload.update=Speculative"], ("ahead_tile", 1));
    let mut tiles: Vec<_> =
        spans.iter().filter(|s| s.name == "ahead_tile").map(|s| s.start).collect();
    tiles.sort();
    let is = |s: &&Span| s.lane == Lane::D2h && s.wrote.starts_with("block.0.grad_down");
    let mut down: Vec<_> = spans.iter().filter(is).map(|s| s.end).collect();
    down.sort();
    assert!(down.len() == STEPS && !tiles.is_empty() && tiles.len().is_multiple_of(STEPS));
    let of_step = tiles.len() / STEPS;
    assert!((0..STEPS).any(|k| tiles[k * of_step] < down[k]));
    // Half of the parameters after the embedding have a speculative update. The next forward pass
    // needs the other half first.
    assert!(!spans.iter().any(|s| s.name == "settle_tile" && s.wrote.starts_with("block.0.")));
    assert!(spans.iter().any(|s| s.name == "settle_tile" && s.wrote.starts_with("block.9.")));
}

/// Whether, in some step, the gradients of block 0 are on the host before the last tile of the
/// previous step's update starts.
fn update_is_under_the_next_backward(spans: &[Span]) -> bool {
    let mut tiles: Vec<_> =
        spans.iter().filter(|s| s.name == "adam_tile").map(|s| s.start).collect();
    tiles.sort();
    let is = |s: &&Span| s.lane == Lane::D2h && s.wrote.starts_with("block.0.grad_down");
    let mut reduced: Vec<_> = spans.iter().filter(is).map(|s| s.end).collect();
    reduced.sort();
    assert!(reduced.len() == STEPS && tiles.len().is_multiple_of(STEPS));
    let of_step = tiles.len() / STEPS;
    (0..STEPS - 1).any(|k| reduced[k + 1] < tiles[(k + 1) * of_step - 1])
}

#[test]
fn under_delayed_the_next_backward_too_runs_beside_the_update_and_else_it_does_not() {
    let delayed = traced(&["offload.update=Delayed(after_step: 1)"]);
    assert!(update_is_under_the_next_backward(&delayed));
    assert!(!update_is_under_the_next_backward(&traced(&["offload.update=Overlapped"])));
}

/// Numbers of copies of gradients to the host: all, and copies during which Compute works.
fn copies_down(spans: &[Span]) -> (usize, usize) {
    let down = |s: &&Span| s.lane == Lane::D2h && s.wrote.ends_with("grad_down");
    let compute: Vec<&Span> = spans.iter().filter(|s| s.lane == Lane::Compute).collect();
    let overlaps = |d: &&Span| compute.iter().any(|c| c.start < d.end && d.start < c.end);
    let downs = || spans.iter().filter(down);
    (downs().count(), downs().filter(overlaps).count())
}

/// Numbers of copies of parameters to the device: all, and copies that start during an update.
fn copies_up(spans: &[Span]) -> (usize, usize) {
    let is_up = |s: &&Span| s.lane == Lane::H2d && s.wrote.ends_with(".params");
    let adam: Vec<&Span> = spans.iter().filter(|s| s.name == "adam_tile").collect();
    let in_update = |up: &&Span| {
        let done = adam.iter().filter(|tile| tile.end <= up.start).count();
        !done.is_multiple_of(adam.len() / STEPS)
    };
    let ups = || spans.iter().filter(is_up);
    (ups().count(), ups().filter(in_update).count())
}

#[test]
fn blocking_transfer_stops_compute_for_gradients_and_uploads_after_the_whole_update() {
    let streamed = ["offload.update=Serial"];
    let blocking = ["offload.update=Serial", "offload.transfer=Blocking"];
    // If an overlap with a copy is allowed, the scheduler decides. If it is forbidden, it never
    // happens.
    let slow_copies = ("copy", 20);
    let (copies, overlapping) = copies_down(&traced_with(&blocking, slow_copies));
    assert!(copies >= STEPS * (LAYERS + 2) && overlapping == 0, "{overlapping} of {copies}");
    let (_, overlapping) = copies_down(&traced_with(&streamed, slow_copies));
    assert!(overlapping > 0, "streamed copies never overlap");
    let (copies, early) = copies_up(&traced(&blocking));
    assert!(copies >= STEPS * (LAYERS + 2) && early == 0, "{early} of {copies}");
    assert!(copies_up(&traced(&streamed)).1 > 0, "streamed parameters wait for the whole update");
}

/// Number of steps in which block 0 runs before a gather that waits for the slowed Adam.
fn ahead_of_a_gather(slow: (&'static str, u32)) -> usize {
    let spans = traced_with(&["parallel.tensor=2", "parallel.data=2", "batch.micro=2"], slow);
    let forward = first_block_done(&spans);
    // This gather is queued on DpComm before block 0's forward pass, and waits for the host.
    let gathered = format!("block.{}.params", LOOKAHEAD - 1);
    let adam = adam_of(&spans, LOOKAHEAD - 1);
    let gathers: Vec<&Span> = spans.iter().filter(|s| s.name == "all_gather").collect();
    let early = |k: &usize| {
        let k = *k;
        let last_tile = adam[k][adam[k].len() - 1];
        let gather =
            gathers.iter().find(|s| s.wrote == gathered && s.start >= last_tile.end).unwrap();
        let mut sums = spans.iter().filter(|s| {
            let is = s.lane == Lane::TpComm && s.name == "all_reduce" && s.wrote == "partial";
            is && forward[k].end < s.start && s.end <= forward[k + 1].start
        });
        // Block 0 and its last sum have ended, and the gather still waits for Adam.
        let early = forward[k + 1].end < last_tile.start;
        early && gather.lane == Lane::DpComm && sums.next_back().unwrap().end < gather.start
    };
    (0..STEPS - 1).filter(early).count()
}

#[test]
fn tensor_parallel_work_never_waits_behind_a_gather() {
    let (name, slow) = SLOW_ADAM;
    // On a busy machine, only a slower Adam shows the order. If the sums and the gather shared a
    // lane, no sum could ever be early.
    let early = [1, 4, 16].map(|times| (name, slow * times)).into_iter().map(ahead_of_a_gather);
    let early = early.inspect(|early| {
        println!("block 0 went ahead of a waiting gather in {early} of {} steps", STEPS - 1);
    });
    let mut early = early.skip_while(|early| *early == 0);
    assert!(
        early.next().is_some(),
        "block 0 always waited for the parameters of block {}",
        LOOKAHEAD - 1
    );
}
