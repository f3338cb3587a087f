//! Ops that run during the update of parameters, on the virtual clock of a described box. No
//! scheduler is involved, so the checks are exact.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use config::{Config, load};
use device::Lane::{Compute, DpComm, H2d, Host, TpComm};
use predict::sim::{self, Hardware, SimulatedOp, Timeline};
use predict::simulate::{hardware, record};
use std::path::Path;
use tests::lay_out;

/// A model on a DGX-2, with one micro-batch, where the update weighs most.
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

/// When ops ran, one after another.
type Spans = Vec<(f64, f64)>;

/// Ops of rank 0 in the last step.
fn spans(timeline: &Timeline, is: impl Fn(&SimulatedOp<'_>) -> bool) -> Spans {
    let (begin, end) = timeline.window();
    let inside = timeline.played(0).filter(|p| p.start >= begin && p.start < end && is(p));
    let mut spans: Spans = inside.map(|p| (p.start, p.end)).collect();
    spans.sort_by(|a, b| a.0.total_cmp(&b.0));
    spans
}

/// When both ran.
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

/// Seconds in which Adam, a copy of parameters up, their gathering and Compute all run.
fn all_at_once(timeline: &Timeline) -> f64 {
    let up = spans(timeline, |p| p.lane == H2d && p.work.name == "copy");
    let gather = spans(timeline, |p| p.lane == DpComm && p.work.name == "all_gather");
    let compute = spans(timeline, |p| p.lane == Compute);
    assert!(!up.is_empty() && !gather.is_empty() && !compute.is_empty());
    let updating = spans(timeline, adam);
    seconds(&both(&both(&updating, &up), &both(&gather, &compute)))
}

/// The share of the time from the first tile to the last in which `lane` works.
fn occupancy(timeline: &Timeline, lane: device::Lane) -> f64 {
    let tiles = spans(timeline, adam);
    let update = vec![(tiles[0].0, tiles[tiles.len() - 1].1)];
    seconds(&both(&update, &spans(timeline, |p| p.lane == lane))) / seconds(&update)
}

#[test]
fn adam_copies_gathers_and_the_next_forward_run_at_once_and_under_serial_never() {
    // The forward pass takes longer than the update.
    let small = |set: &str| played("paper/dgx2-10b.ron", "batch.global=160", &[set]);
    assert!(all_at_once(&small("offload.update=Overlapped")) > 0.0);
    assert_eq!(all_at_once(&small("offload.update=Serial")), 0.0);
    // And here it does not. Of Compute: nothing; the next forward pass, as long as that is; all that the step has.
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

/// A lane is a queue: what stands behind an op that waits for Adam waits too. So nothing that the forward pass needs may
/// stand behind a gather. That holds of the program, on every backend that has a queue for each lane. With NCCL the two
/// communication lanes of GPUs are one stream, in the order of the program, and there it does not.
#[test]
fn no_tensor_parallel_op_stands_behind_a_gather_that_waits_for_adam() {
    let (config, one) =
        described("dgx2-70b.ron", "batch.global=16", &["offload.update=Overlapped"]);
    let apart = Hardware { one_communication_stream: false, ..one.clone() };
    let [together, apart] = [one, apart].map(|hardware| on(&config, &hardware));
    assert!(together.shares_communication() && !apart.shares_communication());
    let (overtook, late) = overtaking(&apart);
    assert!(overtook > 0, "of {late} beside the update");
    // And the lane of the gathers stands still most of the time: it is their queue, not their work, that would block.
    assert!(occupancy(&apart, DpComm) < 0.1, "{}", occupancy(&apart, DpComm));
    let (overtook, late) = overtaking(&together);
    assert_eq!(overtook, 0, "of {late}: one stream has one order");
    let [together, apart] = [together, apart].map(|timeline| timeline.step_seconds());
    assert!(together > apart && together < 1.1 * apart, "{together} and {apart}");
}

/// Tensor-parallel ops that end before a gather starts that was submitted before them, and all of them, beside the
/// update.
fn overtaking(timeline: &Timeline) -> (usize, usize) {
    let (begin, end) = timeline.window();
    let tiles = spans(timeline, adam);
    let last_tile = tiles[tiles.len() - 1].1;
    let (mut gather, mut overtook, mut late) = (f64::NEG_INFINITY, 0, 0);
    for p in timeline.played(0).filter(|p| p.start >= begin && p.start < end) {
        match (p.lane, p.work.name) {
            (DpComm, "all_gather") => gather = gather.max(p.start),
            (TpComm, _) if p.start < last_tile => {
                overtook += usize::from(p.end <= gather);
                late += 1;
            }
            _ => {}
        }
    }
    (overtook, late)
}

/// Parameters that live on the host: no op of Compute waits for a copy up beside the first blocks behind the update, and the step
/// takes little longer than with a GPU that holds all parameters.
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
    // Between the first block's forward pass and the last one's backward pass Compute never stands still as long as half of a
    // block's copy takes.
    let copies = spans(&streamed, |p| p.lane == H2d && p.work.name == "copy");
    let compute = spans(&streamed, |p| p.lane == Compute);
    let block = seconds(&copies) / 24.0;
    let pauses = compute.windows(2).map(|pair| pair[1].0 - pair[0].1);
    let behind = pauses.skip(compute.len() / 4).fold(0.0, f64::max);
    assert!(behind < 0.5 * block, "{behind} of {block}");
    // One micro-batch of a sixteenth of the tokens hides nothing.
    let few = ["batch.micro=1", "model.seq_len=512", none[0], none[1]];
    let few = on(&described("llama3-70b-one-gpu.ron", "batch.global=1", &few).0, &hardware);
    let copying = seconds(&spans(&few, |p| p.lane == H2d && p.work.name == "copy"));
    assert!(copying > 0.5 * few.step_seconds(), "{copying} of {}", few.step_seconds());
}

/// The tables of the first and the last segment share a buffer, and a ring's blocks may lie far behind blocks that stay. What comes
/// up into such a buffer waits for its update, and parameters that stay do not stand behind it on the lane.
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
