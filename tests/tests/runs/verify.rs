//! Steps with two passes (`train.verify_every`): the second pass changes no result, and a
//! difference between the passes is reported.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use device::Rank;
use engine::run::{Message, RunOptions, train};
use offload::{NoiseRun, Optimizer, chunk_elements};
use std::ops::Range;
use std::sync::Arc;
use tensor_parallel::Decoder;
use tests::compare::{assert_same_bits, run_sets, run_with, with, with_delays};
use tests::{Constant, lay_out, text, tiny};

/// Settings of all runs: dropout, and evaluations between updates.
const BASE: &[&str] = &[
    "model.vocab=257",
    "model.dropout=0.1",
    "train.steps=5",
    "train.eval_every=3",
    "train.eval_batches=2",
    "offload.tile_elements=1024",
];
const EVERY: &str = "train.verify_every=2";

const WAYS: [&[&str]; 9] = [
    &["offload.update=Serial", "batch.micro=1"],
    &["offload.update=Overlapped", "parallel.tensor=2", "parallel.data=2"],
    &["offload.update=Overlapped", "batch.micro=1", "offload.accumulate=Host"],
    &["offload.update=Speculative", "offload.speculated_fraction=1", "parallel.data=2"],
    &[
        "offload.update=Speculative",
        "offload.speculated_fraction=1",
        "batch.micro=1",
        "offload.first_forward=2",
        "recompute=Block",
    ],
    &["offload.update=Delayed(after_step: 1)", "parallel.data=2", "batch.micro=1"],
    &[
        "offload.optimizer=Split(device_fraction: 0.4)",
        "batch.micro=1",
        "offload.accumulate=Device",
    ],
    // Steps 1 to 3 overflow.
    &[
        "precision=Fp16",
        "loss_scale.initial=16777216",
        "parallel.tensor=2",
        "parallel.sequence=true",
    ],
    &[
        "offload.parameters=Host",
        "offload.ring=2",
        "batch.micro=1",
        "recompute=Block",
        "parallel.data=2",
    ],
];

#[test]
fn a_step_that_runs_twice_has_the_bits_of_one_that_runs_once() {
    for way in WAYS {
        let sets = with(BASE, way);
        let once = run_sets(&sets);
        let twice = run_sets(&with(&sets, &[EVERY]));
        assert_same_bits(&once, &twice, &format!("{way:?}"));
        let verified = twice.steps.iter().map(|step| step.verified);
        assert!(verified.eq([None, Some(true), None, Some(true), None]), "{way:?}");
        let slow = run_with(&with(&sets, &[EVERY]), &with_delays(5));
        assert_same_bits(&once, &slow, &format!("{way:?} with delays"));
    }
}

#[test]
fn a_parameter_that_changes_between_the_two_is_told_of_with_rank_and_tensor() {
    for (way, rank) in [(WAYS[1], 2), (WAYS[2], 0), (WAYS[3], 1), (WAYS[5], 1)] {
        let config = tiny(&with(&with(BASE, way), &[EVERY]));
        let options = RunOptions { change_at: Some((rank, 4)), ..RunOptions::default() };
        let (mut differences, mut verified) = (Vec::new(), Vec::new());
        let outcome =
            train(&config, &lay_out(&config), &text(), &options, &mut |message| match message {
                Message::Differs { step, places } => differences.push((step, places)),
                Message::Step(report) => verified.push(report.verified),
                _ => {}
            });
        assert!(outcome.unwrap().complete, "the run goes on");
        assert_eq!(verified, [None, Some(true), None, Some(false), None], "{way:?}");
        let [(4, places)] = &differences[..] else { panic!("{way:?}: {differences:?}") };
        let place = &places.iter().find(|seen| seen.rank == rank).unwrap().place;
        assert!(place.starts_with("the gradient of `"), "{way:?}: {place}");
        // The backward pass begins with the final norm, which one of the ranks owns.
        assert!(places.iter().any(|seen| seen.place.contains("`ln_f.")), "{way:?}: {places:?}");
    }
}

/// Each element is in one chunk, so that a difference names the right tensor.
#[test]
fn the_chunks_of_the_ranks_of_a_group_hold_each_element_once() {
    for way in WAYS {
        let config = tiny(&with(&with(BASE, way), &["offload.bucket_elements=3000"]));
        let built = lay_out(&config);
        let dp_size = config.parallel.data;
        let counted: Vec<_> = built.decoder.segments().iter().map(|s| s.counted(0)).collect();
        let noise: Vec<Arc<[NoiseRun]>> = counted.iter().map(|_| Arc::from([])).collect();
        let longest = Decoder::longest_segment(built.decoder.shape());
        let chunks = built.optimizer.owned_elements() as usize / chunk_elements(longest);
        let mut found: Vec<Vec<Range<usize>>> = vec![Vec::new(); counted.len()];
        for dp in 0..dp_size {
            let rank = Rank { tp: 0, tp_size: config.parallel.tensor, dp, dp_size };
            let optimizer =
                Optimizer::new(&built.optimizer, rank, &counted, &noise, Arc::new(Constant));
            for (segment, range) in (0..chunks).map(|chunk| optimizer.chunk(chunk)) {
                found[segment].push(range);
            }
        }
        for (segment, mut ranges) in found.into_iter().enumerate() {
            ranges.sort_by_key(|range| range.start);
            let len = built.decoder.params(segment).len();
            let ends = ranges.iter().map(|range| range.end);
            assert!(
                ranges[0].start == 0
                    && ranges
                        .iter()
                        .skip(1)
                        .map(|r| r.start)
                        .eq(ends.clone().take(ranges.len() - 1)),
                "{way:?}"
            );
            assert_eq!(
                ranges.last().map(|range| range.end),
                Some(len),
                "{way:?}: segment {segment}"
            );
        }
    }
}
