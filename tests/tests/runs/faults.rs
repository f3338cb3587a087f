//! A fault ends every rank soon, and the error names the place of the fault.
#![allow(missing_docs, reason = "a test")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "helpers of tests")]
#![allow(clippy::print_stdout, reason = "figures for --nocapture")]
#![allow(clippy::allow_attributes, reason = "the lines above")]

use checkpoint::RunFolder;
use device::cpu::{self, CpuOptions, Lanes};
use device::{Arena, Dtype, Error, Group, Lane, Op, Plan, Rank, Reduction};
use device::{Communicator, HostWork};
use engine::run::{FaultPoint, Message, RunError, RunOptions, Watcher, train};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use tests::{lay_out, run, text, tiny, try_run};

/// Limit that distinguishes a hang from a slow machine. The promise is one second.
const WATCHDOG: Duration = Duration::from_secs(180);

const GRID: [&str; 2] = ["parallel.tensor=2", "parallel.data=2"];

const LANES: [Lanes; 2] = [Lanes::Inline, Lanes::Threads { chaos_us: 20 }];

/// Runs `work` on another thread, so that a hang fails the test and does not block it.
fn watched<T: Send + 'static>(what: &str, work: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = channel();
    let started = Instant::now();
    std::thread::spawn(move || sender.send(work()));
    let result = receiver.recv_timeout(WATCHDOG).unwrap_or_else(|e| panic!("{what}: {e}"));
    println!("{what}: over after {:?}", started.elapsed());
    result
}

/// Error of a run on four ranks.
fn failed(what: &str, options: RunOptions) -> Box<RunError> {
    watched(what, move || try_run(&tiny(&GRID), &options)).expect_err("it must fail")
}

/// Asserts that the culprit has its own error, and that every other rank's error names it.
fn all_know(error: &RunError, culprit: usize) {
    assert_eq!((error.rank, error.all.len()), (culprit, 4), "{error}");
    for (rank, own) in error.all.iter().enumerate() {
        match own {
            Some(Error::PeerFailed { rank: whose, .. }) => {
                assert!(rank != culprit && *whose == culprit, "rank {rank}: {own:?}");
            }
            Some(_) => assert_eq!(rank, culprit, "{own:?}"),
            None => panic!("rank {rank} ended without an error"),
        }
    }
}

#[test]
fn a_panicking_listener_ends_the_run() {
    // The run has more steps than the channel holds messages.
    let config = tiny(&["train.steps=600", "schedule.decay_steps=600"]);
    let folder = tempfile::tempdir().unwrap();
    // With checkpoints, rank 0 also waits until the listener has handled all messages.
    for checkpoints in [None, Some(RunFolder::at(folder.path()).unwrap())] {
        let config = config.clone();
        let panicked = watched("a panicking listener", move || {
            std::panic::catch_unwind(|| {
                let options = RunOptions { checkpoints, ..RunOptions::default() };
                let built = lay_out(&config);
                train(&config, &built, &text(), &options, &mut |_| panic!("no paper"))
            })
        });
        assert!(panicked.is_err());
    }
}

#[test]
fn a_listener_slower_than_the_deadline_does_not_fail_the_ranks() {
    let config = tiny(&["parallel.data=2", "train.steps=400", "schedule.decay_steps=400"]);
    let timeout = Duration::from_secs(4);
    let mut steps = 0;
    let options = RunOptions { timeout: Some(timeout), ..RunOptions::default() };
    let outcome = train(&config, &lay_out(&config), &text(), &options, &mut |message| {
        if matches!(message, Message::Step(_)) {
            steps += 1;
            std::thread::sleep(if steps == 1 { timeout + timeout / 2 } else { Duration::ZERO });
        }
    });
    assert!(outcome.is_ok_and(|o| o.complete), "rank 0 waited for the listener, not for a rank");
    assert_eq!(steps, 400);
}

#[test]
fn a_panicking_kernel_ends_all_ranks_with_its_rank_step_op_and_place() {
    for lanes in LANES {
        // The faults are in the first forward pass, and after the first backward pass.
        for (lane, tick) in [(Lane::Compute, 30), (Lane::Host, 4)] {
            let what = format!("a panic on {lane:?}, {lanes:?}");
            let error = failed(
                &what,
                RunOptions { lanes, panic_at: Some((2, lane, tick)), ..RunOptions::default() },
            );
            all_know(&error, 2);
            assert!(matches!(error.error, Error::Panicked { rank: 2, .. }), "{error}");
            let text = error.to_string();
            let named = ["rank 2, step 1", "injected fault", ".rs:"];
            assert!(named.iter().all(|part| text.contains(part)), "{text}");
        }
    }
}

#[test]
fn an_error_in_a_later_step_names_that_step() {
    let panic_at = Some((1, Lane::Compute, 700));
    let error = failed("a late panic", RunOptions { panic_at, ..RunOptions::default() });
    all_know(&error, 1);
    assert!(error.step > 1, "{error}");
    let first_error = error.all[0].as_ref().map(ToString::to_string).unwrap_or_default();
    assert!(
        first_error.contains(&format!("rank 1 failed in step {}", error.step)),
        "{first_error}"
    );
}

#[test]
fn a_rank_that_returns_early_ends_all_ranks() {
    for lanes in LANES {
        let what = format!("a rank leaves, {lanes:?}");
        let error =
            failed(&what, RunOptions { lanes, leave_at: Some((3, 2)), ..RunOptions::default() });
        all_know(&error, 3);
        assert!(matches!(error.error, Error::RankDied { rank: 3, step: 2, .. }), "{error}");
        assert!(error.to_string().contains("returned early"), "{error}");
    }
}

#[test]
fn a_rank_whose_own_thread_panics_ends_all_ranks_and_is_quoted() {
    for lanes in LANES {
        let fault = |rank, place, step| {
            assert!((rank, place, step) != (1, FaultPoint::Step, 3), "a test's fault");
        };
        let watcher = Some(Watcher::new(fault));
        let what = format!("a rank thread panics, {lanes:?}");
        let error = failed(&what, RunOptions { lanes, watcher, ..RunOptions::default() });
        all_know(&error, 1);
        assert_eq!(error.step, 3);
        let text = error.to_string();
        assert!(text.contains("a test's fault") && text.contains("faults.rs:"), "{text}");
    }
}

/// Errors of two ranks. Each rank submits the op that `op` returns for it, and waits.
fn two_ranks(
    lanes: Lanes,
    timeout: Duration,
    op: fn(usize, device::Tensor) -> Option<Op>,
) -> [Error; 2] {
    let mut plan = Plan::default();
    let x = plan.tensor((Arena::Device, "test"), "x", Dtype::F32, (1, 64));
    let (plan, world) = (Arc::new(plan), Communicator::new(2, 1, timeout));
    let rank = move |rank: Rank| {
        let (plan, world) = (Arc::clone(&plan), Arc::clone(&world));
        std::thread::spawn(move || {
            let options = CpuOptions {
                lanes,
                memory_limit: u64::MAX,
                host: device::HostPlace::default(),
                scratch: cpu::ScratchFloats::default(),
                work: HostWork::default(),
            };
            let dev = cpu::open(rank, &plan, &world, &options).unwrap();
            dev.write(x, &|_| 1.0).unwrap();
            if let Some(op) = op(rank.tp, x) {
                dev.submit(Lane::TpComm, op);
            }
            // A rank without an op stays until its peer has failed.
            while dev.sync_all().is_ok() {
                std::thread::yield_now();
            }
            dev.sync_all().unwrap_err()
        })
    };
    let threads: Vec<_> = Rank::all(2, 1).map(rank).collect();
    let mut errors = threads.into_iter().map(|t| t.join().unwrap());
    [errors.next().unwrap(), errors.next().unwrap()]
}

/// Pairs of collectives that do not match: other ops, other lengths and other reductions.
const MISMATCHES: [fn(usize, device::Tensor) -> Option<Op>; 3] = [
    |rank, x| {
        let (group, reduce) = (Group::Tp, Reduction::Sum);
        Some(if rank == 0 {
            Op::AllGather { x, group }
        } else {
            Op::AllReduce { x, group, reduce }
        })
    },
    |rank, x| {
        let (x, group) = (x.slice(0..32 * (rank + 1)), Group::Tp);
        Some(Op::AllReduce { x, group, reduce: Reduction::Sum })
    },
    |rank, x| {
        let reduce = if rank == 0 { Reduction::Sum } else { Reduction::Max };
        Some(Op::AllReduce { x, group: Group::Tp, reduce })
    },
];

#[test]
fn ranks_that_come_with_different_collectives_all_end_and_one_names_both() {
    for lanes in LANES {
        for op in MISMATCHES {
            let what = format!("a mismatched collective, {lanes:?}");
            let errors = watched(&what, move || two_ranks(lanes, Duration::from_secs(600), op));
            let text =
                errors.iter().find(|e| matches!(e, Error::Mismatch { .. })).unwrap().to_string();
            assert!(text.contains("faults.rs:") && text.contains("on rank "), "{text}");
            let is_known =
                |e: &Error| matches!(e, Error::Mismatch { .. } | Error::PeerFailed { .. });
            assert!(errors.iter().all(is_known), "{errors:?}");
        }
    }
}

#[test]
fn a_collective_that_a_rank_does_not_come_to_times_out_and_names_it() {
    let op: fn(usize, device::Tensor) -> Option<Op> =
        |rank, x| (rank == 0).then_some(Op::AllGather { x, group: Group::Tp });
    let timeout = Duration::from_millis(50);
    let [first, second] = watched("a missing rank", move || two_ranks(LANES[1], timeout, op));
    assert!(matches!(&first, Error::Timeout { missing, .. } if missing[..] == [1]), "{first}");
    assert!(matches!(second, Error::PeerFailed { rank: 0, .. }), "{second}");
}

#[test]
fn steps_without_finite_gradients_are_skipped_counted_and_change_nothing() {
    // These are the largest allowed rates: parameters grow hundredfold in a step.
    let absurd = |steps: usize| {
        let steps = format!("train.steps={steps}");
        let sets = ["optimizer.lr=10.0", "optimizer.weight_decay=10.0", "optimizer.clip=None"];
        let more = ["schedule=(kind: Constant)", "parallel.data=2", "batch.global=4", &steps];
        watched("an absurd rate", {
            let config = tiny(&[&sets[..], &more[..]].concat());
            move || run(&config, &RunOptions::default())
        })
    };
    const STEPS: usize = 40;
    let ran = absurd(STEPS);
    assert_eq!(ran.steps.len(), STEPS);
    let first = ran.steps.iter().position(|s| s.skipped).expect("nothing overflowed");
    assert!((1..STEPS - 2).contains(&first), "{first}");
    let mut skipped = 0;
    for step in &ran.steps {
        skipped += u64::from(step.skipped);
        assert_eq!(step.skipped_total, skipped);
        assert_eq!(step.skipped, !step.grad_norm.is_finite(), "{step:?}");
    }
    // After the parameters overflow, every step is skipped and no state changes.
    assert!(ran.steps[first..].iter().all(|s| s.skipped));
    assert_eq!(ran.outcome.state_hash, absurd(first).outcome.state_hash);
    assert_ne!(ran.outcome.state_hash, absurd(first - 1).outcome.state_hash);
}
