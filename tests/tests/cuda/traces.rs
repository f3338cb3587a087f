//! Traces of steps of GPUs: their ops and the resolution of their times.

use super::{ALONE, on_a_real_gpu, on_cuda, try_run, under_fake};
use device::Lane;
use engine::run::{FaultPoint, RunOptions, Watcher};
use std::time::Duration;
use tests::tiny;

/// A trace has the ops of all lanes of the traced steps. The ops of a lane run one after another.
pub(super) fn all_lanes() {
    let trace = std::sync::Arc::new(device::Trace::of_steps(2..=2));
    let options = RunOptions { trace: Some(trace.clone()), ..RunOptions::default() };
    let config = on_cuda(tiny(ALONE));
    try_run(&config, &options).unwrap_or_else(|e| panic!("{e}"));
    let spans = trace.spans();
    for lane in [Lane::Compute, Lane::H2d, Lane::D2h, Lane::Host] {
        let mut own: Vec<_> = spans.iter().filter(|span| span.lane == lane).collect();
        own.sort_by_key(|span| span.start);
        assert!(!own.is_empty(), "nothing ran on {lane:?}");
        for (one, next) in own.iter().zip(&own[1..]) {
            // Events have a resolution of microseconds.
            let overlap = one.end.saturating_sub(next.start);
            assert!(overlap < Duration::from_micros(20), "{lane:?}: {one:?} ends behind {next:?}");
        }
    }
    let gemms = spans.iter().filter(|span| span.name == "gemm").count();
    assert!(gemms > 10 && spans.iter().all(|span| span.start <= span.end), "{gemms} products");
}

/// The GPU's clock advances by an hour before each of the two traced steps. The first step has the
/// times of the run's clock. In the second step, times are not rounded to the resolution that
/// single precision has for an hour in milliseconds.
pub(super) fn late() {
    const HOUR: u64 = 3600;
    let later = |_: usize, place: FaultPoint, step: u64| {
        if place == FaultPoint::Step && step >= 2 && !fake_cuda::advance(HOUR) {
            assert!(on_a_real_gpu(), "the fake driver was not loaded");
        }
    };
    let trace = std::sync::Arc::new(device::Trace::of_steps(2..=3));
    let watcher = Some(Watcher::new(later));
    let options = RunOptions { trace: Some(trace.clone()), watcher, ..RunOptions::default() };
    try_run(&on_cuda(tiny(&["train.steps=3"])), &options).unwrap_or_else(|e| panic!("{e}"));
    if on_a_real_gpu() {
        return;
    }
    let hour = Duration::from_secs(HOUR);
    let streams = trace.spans().into_iter().filter(|span| span.lane != Lane::Host);
    let (first, second): (Vec<_>, Vec<_>) = streams.partition(|span| span.start < hour);
    assert!(first.len() > 10 && second.len() > 10, "{} and {}", first.len(), second.len());
    let offsets = second.iter().map(|span| (span.start - hour).as_micros() % 250);
    let mut offsets: Vec<_> = offsets.collect();
    offsets.sort_unstable();
    offsets.dedup_by_key(|micros| *micros / 2);
    assert!(offsets.len() > 5, "ops start at {offsets:?} us of each 250");
}

#[test]
fn a_trace_is_as_exact_after_an_hour_as_at_the_start() {
    under_fake("traced_late", &[("FAKECUDA_CHAOS_US", "30")]);
}

#[test]
fn a_trace_has_the_ops_of_all_lanes() {
    under_fake("traced", &[("FAKECUDA_CHAOS_US", "30"), ("FAKECUDA_DRIVER", "12020")]);
}
