//! Ranks on GPUs in several processes, which are threads here. NCCL joins their GPUs, and messages
//! between the processes carry its ids.

use super::{DEADLINE, GRID, on_cuda};
use device::{Error, Processes};
use engine::run::{RunError, RunOptions};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tests::compare::assert_same_bits;
use tests::{RunRecord, lay_out, short_text, tiny, try_run_on};

const DP4: &[&str] = &["parallel.data=4"];

/// Results of a run of `sets` by two processes, one result for each process.
pub(super) fn by_two(sets: &[&str], options: &RunOptions) -> Vec<Result<RunRecord, Box<RunError>>> {
    let (config, data) = (on_cuda(tiny(sets)), short_text());
    let (built, over) = (lay_out(&config), AtomicBool::new(false));
    let all = Processes::in_threads(2);
    std::thread::scope(|scope| {
        // The network connection of real processes also beats.
        let beats = || {
            while !over.load(Ordering::Relaxed) {
                all.iter().for_each(|processes| processes.beat());
                std::thread::sleep(Duration::from_millis(100));
            }
        };
        scope.spawn(beats);
        let start = |processes| {
            let options = RunOptions { processes: Some(processes), ..options.clone() };
            let (config, built, data) = (&config, &built, &data);
            scope.spawn(move || try_run_on(data, config, built, &options))
        };
        let started: Vec<_> = all.iter().cloned().map(start).collect();
        let ended = started.into_iter().map(|process| process.join().unwrap()).collect();
        over.store(true, Ordering::Relaxed);
        ended
    })
}

pub(super) fn have_the_bits_of_one() {
    let across = ["parallel.tensor=4", "parallel.tensor_across_nodes=true"];
    for layout in [GRID, DP4, &across] {
        let config = on_cuda(tiny(layout));
        let one = try_run_on(&short_text(), &config, &lay_out(&config), &RunOptions::default());
        let two = by_two(layout, &RunOptions::default()).swap_remove(0);
        let [one, two] = [one, two].map(|ran| ran.unwrap_or_else(|e| panic!("{layout:?}: {e}")));
        assert_same_bits(&one, &two, &format!("{layout:?}"));
    }
}

/// The GPU of rank 2 is busy for longer than the deadline. The ranks of the other process name rank
/// 2, and not rank 3, which waits too.
pub(super) fn name_the_rank_that_does_not_come() {
    let options = RunOptions { timeout: Some(DEADLINE), ..RunOptions::default() };
    for ended in by_two(DP4, &options) {
        let error = ended.err().unwrap();
        println!("{error}");
        let text = error.to_string();
        assert!(text.contains("no answer for 3 s from rank(s) [2]"), "{text}");
        let timeout =
            |error: &Error| matches!(error, Error::Timeout { missing, .. } if *missing == [2]);
        let known = |error: &Error| {
            timeout(error) || matches!(error, Error::PeerFailed { .. } | Error::Remote(_))
        };
        assert!(error.all.iter().flatten().all(known), "{:?}", error.all);
    }
}
