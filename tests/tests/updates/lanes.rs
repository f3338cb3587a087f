//! Ops that run during the update of parameters, on the virtual clock of a described box. No
//! scheduler is involved, so the checks are exact.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use config::{Config, load};
use device::Lane::{ActivationsDown, ActivationsUp, Compute, DpComm, H2d, Host, TpComm};
use predict::sim::{self, Hardware, SimulatedOp, Timeline};
use predict::simulate::{hardware, record};
use std::path::Path;
use tests::lay_out;

/// Simulates `config`, often with one micro-batch, so that the update has the largest share.
fn played(config: &str, global: &str, sets: &[&str]) -> Timeline {
    let (config, hardware) = described(config, global, sets);
    on(&config, &hardware)
}

fn on(config: &Config, hardware: &Hardware) -> Timeline {
    let program = record(config, &lay_out(config), true).unwrap();
    sim::simulate(program, hardware, config.parallel.tensor, config.parallel.data, true)
}

fn described(config: &str, global: &str, sets: &[&str]) -> (Config, Hardware) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs").join(config);
    let sets = std::iter::once(&global).chain(sets).map(ToString::to_string);
    let sets: Vec<String> = sets.collect();
    let config = load(&path, &sets).unwrap_or_else(|e| panic!("{e}")).config;
    let hardware = hardware(&config, lay_out(&config).host_bytes(&config)).unwrap();
    (config, hardware)
}

/// Starts and ends of ops in seconds, in order of time.
type Spans = Vec<(f64, f64)>;

/// Spans of the selected ops of rank 0 in the last step.
fn spans(timeline: &Timeline, is: impl Fn(&SimulatedOp<'_>) -> bool) -> Spans {
    let (begin, end) = timeline.window();
    let inside = timeline.played(0).filter(|p| p.start >= begin && p.start < end && is(p));
    let mut spans: Spans = inside.map(|p| (p.start, p.end)).collect();
    spans.sort_by(|a, b| a.0.total_cmp(&b.0));
    spans
}

/// Spans in which both `a` and `b` run.
fn both(a: &Spans, b: &Spans) -> Spans {
    let (mut i, mut j, mut all) = (0, 0, Spans::new());
    while i < a.len() && j < b.len() {
        let (from, to) = (a[i].0.max(b[j].0), a[i].1.min(b[j].1));
        if from < to {
            all.push((from, to));
        }
        if a[i].1 < b[j].1 { i += 1 } else { j += 1 }
    }
    all
}

fn seconds(spans: &Spans) -> f64 {
    spans.iter().map(|(from, to)| to - from).sum()
}

fn adam(p: &SimulatedOp<'_>) -> bool {
    p.lane == Host && p.work.name == "adam_tile"
}

/// Seconds in which Adam, a parameter copy to the device, an all-gather and Compute all run.
fn all_at_once(timeline: &Timeline) -> f64 {
    let up = spans(timeline, |p| p.lane == H2d && p.work.name == "copy");
    let gather = spans(timeline, |p| p.lane == DpComm && p.work.name == "all_gather");
    let compute = spans(timeline, |p| p.lane == Compute);
    assert!(!up.is_empty() && !gather.is_empty() && !compute.is_empty());
    let updating = spans(timeline, adam);
    seconds(&both(&both(&updating, &up), &both(&gather, &compute)))
}

/// Share of the update, from its first tile to its last tile, in which `lane` works.
fn occupancy(timeline: &Timeline, lane: device::Lane) -> f64 {
    let tiles = spans(timeline, adam);
    let update = vec![(tiles[0].0, tiles[tiles.len() - 1].1)];
    seconds(&both(&update, &spans(timeline, |p| p.lane == lane))) / seconds(&update)
}

#[test]
fn adam_copies_gathers_and_the_next_forward_run_at_once_and_under_serial_never() {
    // In this model the forward pass is longer than the update.
    let small = |set: &str| played("paper/dgx2-10b.ron", "batch.global=160", &[set]);
    assert!(all_at_once(&small("offload.update=Overlapped")) > 0.0);
    assert_eq!(all_at_once(&small("offload.update=Serial")), 0.0);
    // In this model the update is longer. Under Serial, Compute does nothing during the update.
    // Under Overlapped it runs the next forward pass, and under Delayed all work of the step.
    let large = |set: &str| played("dgx2-70b.ron", "batch.global=16", &[set]);
    let [serial, overlapped] = ["offload.update=Serial", "offload.update=Overlapped"].map(large);
    let delayed = large("offload.update=Delayed(after_step: 1)");
    let at_work = [&serial, &overlapped, &delayed].map(|t| occupancy(t, Compute));
    let forward = seconds(&spans(&serial, |p| p.lane == Compute)) / 4.0;
    let update = seconds(&spans(&serial, adam));
    assert_eq!(at_work[0], 0.0, "{at_work:?}");
    assert!(at_work[1] > 0.8 * forward / update, "{at_work:?}, {forward} under {update}");
    assert!(at_work[2] > 2.0 * at_work[1], "{at_work:?}");
}

/// A lane is a queue: all ops after an op that waits for Adam wait too. So no op that the forward
/// pass needs may follow a gather on its lane. This is true of the program, and of every backend
/// that has a queue for each lane. With NCCL it is false: the two communication lanes of a GPU
/// share one stream, in the order of the program.
#[test]
fn no_tensor_parallel_op_stands_behind_a_gather_that_waits_for_adam() {
    let (config, one) =
        described("dgx2-70b.ron", "batch.global=16", &["offload.update=Overlapped"]);
    let separate = Hardware { one_communication_stream: false, ..one.clone() };
    let [together, separate] = [one, separate].map(|hardware| on(&config, &hardware));
    assert!(together.shares_communication() && !separate.shares_communication());
    let (overtook, ops) = overtaking(&separate);
    assert!(overtook > 0, "of {ops} beside the update");
    // The lane of the gathers is idle most of the time: its queue would block, not its work.
    assert!(occupancy(&separate, DpComm) < 0.1, "{}", occupancy(&separate, DpComm));
    let (overtook, ops) = overtaking(&together);
    assert_eq!(overtook, 0, "of {ops}: one stream has one order");
    let [together, separate] = [together, separate].map(|timeline| timeline.step_seconds());
    assert!(together > separate && together < 1.1 * separate, "{together} and {separate}");
}

/// Numbers of tensor-parallel ops during the update: of ops that end before the start of an earlier
/// submitted gather, and of all ops.
fn overtaking(timeline: &Timeline) -> (usize, usize) {
    let (begin, end) = timeline.window();
    let tiles = spans(timeline, adam);
    let last_tile = tiles[tiles.len() - 1].1;
    let (mut gather, mut overtook, mut ops) = (f64::NEG_INFINITY, 0, 0);
    for p in timeline.played(0).filter(|p| p.start >= begin && p.start < end) {
        match (p.lane, p.work.name) {
            (DpComm, "all_gather") => gather = gather.max(p.start),
            (TpComm, _) if p.start < last_tile => {
                overtook += usize::from(p.end <= gather);
                ops += 1;
            }
            _ => {}
        }
    }
    (overtook, ops)
}

/// With parameters on the host, no op of Compute waits for a copy, except in the first blocks after
/// the update. The step is little longer than on a GPU that holds all parameters.
#[test]
fn parameters_from_the_host_come_up_behind_computing() {
    let (config, hardware) =
        described("llama3-70b-one-gpu.ron", "batch.global=8", &["model.layers=12"]);
    let none: &[&str] = &["model.layers=12", "offload.resident_blocks=0"];
    let streamed = on(&described("llama3-70b-one-gpu.ron", "batch.global=8", none).0, &hardware);
    assert_eq!(lay_out(&config).decoder.shape().ring.resident, 12, "all of so few blocks fit");
    let resident = on(&config, &hardware);
    let ratio = streamed.step_seconds() / resident.step_seconds();
    assert!(ratio < 1.03, "{ratio}");
    // After the first quarter of its ops, Compute never pauses for half of the time that the copy
    // of a block needs.
    let copies = spans(&streamed, |p| p.lane == H2d && p.work.name == "copy");
    let compute = spans(&streamed, |p| p.lane == Compute);
    let block = seconds(&copies) / 24.0;
    let pauses = compute.windows(2).map(|pair| pair[1].0 - pair[0].1);
    let longest_wait = pauses.skip(compute.len() / 4).fold(0.0, f64::max);
    assert!(longest_wait < 0.5 * block, "{longest_wait} of {block}");
    // One micro-batch with a sixteenth of the tokens is too short to hide the copies.
    let few = ["batch.micro=1", "model.seq_len=512", none[0], none[1]];
    let few = on(&described("llama3-70b-one-gpu.ron", "batch.global=1", &few).0, &hardware);
    let copying = seconds(&spans(&few, |p| p.lane == H2d && p.work.name == "copy"));
    assert!(copying > 0.5 * few.step_seconds(), "{copying} of {}", few.step_seconds());
}

/// The tables of the first and the last segment share a buffer, and the blocks of the ring may
/// follow many resident blocks. A copy into such a buffer waits for the segment's update. Resident
/// parameters must not wait for this copy on the lane.
#[test]
fn parameters_that_stay_go_up_before_those_that_are_read_later() {
    let base = ["model.layers=20", "batch.micro=4"];
    let on_box = |set: &str| {
        let sets = [&base[..], &[set]].concat();
        played("llama3-70b-one-gpu.ron", "batch.global=4", &sets).step_seconds()
    };
    let resident = on_box("offload.parameters=Device");
    for some in [20, 10, 1] {
        let ratio = on_box(&format!("offload.resident_blocks={some}")) / resident;
        assert!(ratio < 1.02, "{some} blocks stay: {ratio}");
    }
}

/// Blocks that keep their activations are not computed twice, and the copies of activations run
/// beside other blocks.
#[test]
fn blocks_in_tiers_save_time_and_their_copies_run_beside_computing() {
    let with = |more: &[&str]| {
        let base = ["model.layers=12", "offload.resident_blocks=12", "batch.micro=4"];
        played("llama3-70b-one-gpu.ron", "batch.global=16", &[&base[..], more].concat())
    };
    let recomputed = with(&[]);
    let kept = with(&["activations=Tiers(gpu_blocks: 4)"]);
    let moved = with(&["activations=Tiers(host_blocks: 4)"]);
    let [again, kept, on_host] = [&recomputed, &kept, &moved].map(Timeline::step_seconds);
    assert!(kept < again && on_host < again, "{again}, {kept} on the GPU, {on_host} on the host");
    let compute = spans(&moved, |p| p.lane == Compute);
    for lane in [ActivationsUp, ActivationsDown] {
        let copies = spans(&moved, |p| p.lane == lane);
        let hidden = seconds(&both(&copies, &compute)) / seconds(&copies);
        assert!(hidden > 0.5, "{lane:?}: {hidden} of the copies is beside computing");
        assert!(spans(&recomputed, |p| p.lane == lane).is_empty());
    }
}
