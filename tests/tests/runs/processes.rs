//! Ranks in several processes give the same losses, states and checkpoints as in one process, bit
//! for bit, and a fault in one process ends all. The processes are threads here, with messages that
//! arrive immediately; `cluster.rs` has real processes.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use checkpoint::{Checkpoint, RunFolder, newest};
use device::cpu::{self, CpuOptions, Lanes};
use device::{
    Arena, Communicator, Dtype, Error, Group, Lane, Op, Plan, Processes, Rank, Reduction,
};
use engine::run::{FaultPoint, RunError, RunOptions, Watcher};
use files::held::LockedRunDir;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tests::compare::{assert_same_bits, excerpt, full, with};
use tests::{RunRecord, lay_out, tiny, try_run_on};

const BASE: &[&str] = &[
    "model.vocab=257",
    "model.dropout=0.1",
    "batch.micro=1",
    "train.eval_every=4",
    "train.eval_batches=1",
    "precision=Bf16",
];
const TP2_DP2: &[&str] = &["parallel.tensor=2", "parallel.data=2"];
const DP4: &[&str] = &["parallel.data=4"];

type RunResult = Result<RunRecord, Box<RunError>>;

/// Results of a run of `sets` by `count` processes, one result for each process.
fn across(count: usize, sets: &[&str], options: &RunOptions) -> Vec<RunResult> {
    let (config, data) = (tiny(sets), excerpt());
    let built = lay_out(&config);
    std::thread::scope(|scope| {
        let start = |processes| {
            let (config, built, data) = (&config, &built, &data);
            let options = RunOptions { processes: Some(processes), ..options.clone() };
            scope.spawn(move || try_run_on(data, config, built, &options))
        };
        let all: Vec<_> = Processes::in_threads(count).into_iter().map(start).collect();
        all.into_iter().map(|process| process.join().unwrap()).collect()
    })
}

/// Record of a run that does not fail, from its first process.
fn ran(count: usize, sets: &[&str], options: &RunOptions) -> RunRecord {
    let mut all = across(count, sets, options).into_iter().map(|ended| ended.unwrap());
    let first = all.next().unwrap();
    for other in all {
        assert_eq!(other.outcome.step, first.outcome.step);
        assert!(other.steps.is_empty() && other.outcome.state_hash.is_empty());
    }
    first
}

fn assert_same_across(counts: &[usize], sets: &[&str]) {
    let sets = with(BASE, sets);
    let one = ran(1, &sets, &RunOptions::default());
    assert!(!one.outcome.state_hash.is_empty());
    for count in counts {
        let ran = ran(*count, &sets, &RunOptions::default());
        assert_same_bits(&one, &ran, &format!("{sets:?} by {count} processes"));
    }
}

#[test]
fn several_processes_train_to_the_bits_of_one() {
    assert_same_across(&[2, 4], &with(TP2_DP2, &["parallel.sequence=true"]));
    assert_same_across(&[2, 4], &with(DP4, &["offload.accumulate=Host"]));
    assert_same_across(&[2], &with(TP2_DP2, &["offload.optimizer=Device"]));
}

#[test]
fn every_update_mode_has_the_same_bits_in_several_processes() {
    for mode in ["Serial", "Overlapped", "Speculative", "Delayed(after_step: 2)"] {
        let update = format!("offload.update={mode}");
        assert_same_across(if full() { &[2, 4] } else { &[2] }, &with(TP2_DP2, &[&update]));
    }
}

#[test]
fn lanes_with_threads_and_delays_change_no_bit_across_processes() {
    let sets = with(BASE, TP2_DP2);
    let one = ran(1, &sets, &RunOptions::default());
    let lanes = Lanes::Threads { chaos_us: 20 };
    let ran = ran(4, &sets, &RunOptions { lanes, ..RunOptions::default() });
    assert_same_bits(&one, &ran, "threads of lanes");
}

/// The run skips steps, and names the tensor that overflowed on a rank of another process.
#[test]
fn a_loss_scale_overflows_in_several_processes_as_in_one() {
    let scale = ["precision=Fp16", "loss_scale.initial=16777216", "train.stop_after_skipped=2"];
    let sets = with(&with(BASE, DP4), &scale);
    let [one, four] = [1, 4].map(|count| ran(count, &sets, &RunOptions::default()));
    assert!(one.outcome.diverged.is_some() && one.outcome.not_finite.is_some());
    assert_eq!(one.outcome, four.outcome);
}

/// Rank 0 knows the differences that a rank of any process finds.
#[test]
fn a_step_that_runs_twice_is_compared_in_all_processes() {
    let sets = with(&with(BASE, TP2_DP2), &["train.verify_every=2"]);
    for (change_at, same) in [(None, true), (Some((3, 4)), false)] {
        let options = RunOptions { change_at, ..RunOptions::default() };
        for count in [1, 2, 4] {
            let ran = ran(count, &sets, &options);
            let verified: Vec<bool> = ran.steps.iter().filter_map(|step| step.verified).collect();
            assert_eq!(verified[..2], [true, same], "{count} processes");
        }
    }
}

fn saving(folder: &Path, resume: Option<Checkpoint>) -> RunOptions {
    let (checkpoints, resume) = (Some(RunFolder::at(folder).unwrap()), resume.map(Arc::new));
    RunOptions { checkpoints, resume, ..RunOptions::default() }
}

/// Contents of all files below `folder`, by name.
fn contents(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap().flatten() {
        let (name, path) = (entry.file_name().into_string().unwrap(), entry.path());
        if path.is_dir() {
            let inside = contents(&path).into_iter();
            found.extend(inside.map(|(below, bytes)| (format!("{name}/{below}"), bytes)));
        } else {
            found.push((name, std::fs::read(path).unwrap()));
        }
    }
    found.sort();
    found
}

#[test]
fn checkpoints_and_weights_are_the_same_files_and_any_number_of_processes_goes_on() {
    let every = [
        "train.checkpoint_every=2",
        "train.checkpoint_keep=9",
        "offload.update=Delayed(after_step: 2)",
    ];
    let sets = with(&with(BASE, TP2_DP2), &every);
    let folder = |count: usize| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("checkpoints");
        std::fs::create_dir(&path).unwrap();
        let weights = Some(LockedRunDir::unlocked(folder.path()).unwrap());
        let options = RunOptions { weights, ..saving(&path, None) };
        (ran(count, &sets, &options), folder)
    };
    let (one, in_one) = folder(1);
    assert!(contents(in_one.path()).len() > 3 * 5);
    for count in [2, 4] {
        let (several, in_several) = folder(count);
        assert_same_bits(&one, &several, "saved");
        assert!(contents(in_one.path()) == contents(in_several.path()), "{count} processes");
    }
    // The number of processes changes: 1 -> 2 -> 4 -> 1.
    let again = tempfile::tempdir().unwrap();
    for (count, steps) in [(1, 2), (2, 4), (4, 5), (1, 6)] {
        let steps = [format!("train.steps={steps}"), "schedule.decay_steps=40".to_owned()];
        let steps: Vec<&str> = steps.iter().map(String::as_str).collect();
        let (from, _) = newest(again.path()).unwrap();
        let ran = ran(count, &with(&sets, &steps), &saving(again.path(), from));
        let last = one.steps.iter().find(|step| step.step == ran.outcome.step).unwrap();
        assert_eq!(ran.steps.last().unwrap().loss.to_bits(), last.loss.to_bits());
        if ran.outcome.step == 6 {
            assert_eq!(ran.outcome.state_hash, one.outcome.state_hash);
        }
    }
}

#[test]
fn a_run_that_one_process_is_told_to_stop_ends_after_the_same_step_in_all() {
    let folder = tempfile::tempdir().unwrap();
    let sets = with(&with(BASE, DP4), &["train.checkpoint_every=100", "train.steps=400"]);
    let stop = Arc::new(AtomicBool::new(false));
    let stop_request = Arc::clone(&stop);
    let watcher = Watcher::new(move |rank, place, step| {
        if (rank, place, step) == (3, FaultPoint::Decided, 3) {
            stop_request.store(true, Ordering::Relaxed);
        }
    });
    // Each process has its own flag, and only the last process gets the request.
    let (config, data) = (tiny(&sets), excerpt());
    let built = lay_out(&config);
    let steps: Vec<u64> = std::thread::scope(|scope| {
        let all = Processes::in_threads(4).into_iter().map(|processes| {
            let stop = if processes.me() == 3 { Arc::clone(&stop) } else { Arc::default() };
            let watcher = Some(watcher.clone());
            let options = saving(folder.path(), None);
            let options = RunOptions { processes: Some(processes), stop, watcher, ..options };
            let (config, built, data) = (&config, &built, &data);
            scope.spawn(move || try_run_on(data, config, built, &options).unwrap().outcome.step)
        });
        let all: Vec<_> = all.collect();
        all.into_iter().map(|process| process.join().unwrap()).collect()
    });
    assert_eq!(steps, [3; 4]);
    assert_eq!(newest(folder.path()).unwrap().0.unwrap().step(), 3);
}

#[test]
fn what_fails_in_one_process_ends_all_with_the_rank_and_its_error() {
    let sets = with(BASE, TP2_DP2);
    for lane in [Lane::Compute, Lane::Host] {
        let panic_at = Some((2, lane, 20));
        let all = across(2, &sets, &RunOptions { panic_at, ..RunOptions::default() });
        for (process, ended) in all.into_iter().enumerate() {
            let error = ended.unwrap_err();
            assert_eq!(error.rank, 2, "{error}");
            assert!(error.to_string().contains("injected fault"), "{error}");
            let elsewhere = matches!(&error.error, Error::Remote(other) if other.process == 1);
            assert_eq!(elsewhere, process == 0, "{error:?}");
        }
    }
}

#[test]
fn a_rank_that_does_not_come_is_named_across_processes() {
    let sets = with(BASE, TP2_DP2);
    let stall_at = Some((3, Lane::Compute, 20, Duration::from_secs(8)));
    let options =
        RunOptions { stall_at, timeout: Some(Duration::from_secs(1)), ..RunOptions::default() };
    // In the same process, rank 2 waits for rank 3. The ranks of the other process wait for both
    // ranks, and do not blame either of them immediately.
    for ended in across(2, &sets, &options) {
        let error = ended.unwrap_err().to_string();
        assert!(error.contains("no answer for 1 s from rank(s) [3]"), "{error}");
    }
}

#[test]
fn a_disk_that_refuses_a_file_of_another_process_costs_the_checkpoint_alone() {
    let folder = tempfile::tempdir().unwrap();
    let sets = with(&with(BASE, DP4), &["train.checkpoint_every=2"]);
    let path = folder.path().to_owned();
    // Another file already has the name of rank 3's file of step 2.
    let watcher = Watcher::new(move |rank, place, step| {
        if (rank, place, step) == (3, FaultPoint::Writing, 2) {
            std::fs::write(path.join("step-00000002.tmp/rank-00003.safetensors"), "x").unwrap();
        }
    });
    let options = RunOptions { watcher: Some(watcher), ..saving(folder.path(), None) };
    let ran = ran(4, &sets, &options);
    assert_eq!(ran.outcome.step, 6);
    let steps: Vec<String> = contents(folder.path()).into_iter().map(|(name, _)| name).collect();
    assert!(steps.iter().any(|name| name == "step-00000004/MANIFEST"), "{steps:?}");
    assert!(steps.iter().all(|name| !name.starts_with("step-00000002")), "{steps:?}");
}

/// Compares every collective on every type, in more than one round, between four ranks in two and
/// in four processes.
#[test]
fn collectives_of_several_processes_are_those_of_one() {
    let dtypes = [Dtype::F16, Dtype::Bf16, Dtype::F32, Dtype::F64];
    for (tp, dp) in [(2, 2), (4, 1), (1, 4)] {
        for dtype in dtypes {
            let reference = collectives(1, (tp, dp), dtype);
            for count in [2, 4] {
                assert!(reference == collectives(count, (tp, dp), dtype), "{tp} x {dp}, {dtype:?}");
            }
        }
    }
}

/// Bits of each rank's tensors after some collectives.
fn collectives(count: usize, (tp, dp): (usize, usize), dtype: Dtype) -> Vec<Vec<u64>> {
    let mut plan = Plan::default();
    // fp64 needs two rounds. The other types need one round, with the same code.
    let long = if dtype == Dtype::F64 { 4 * (3 << 16) + 8 } else { 4 * 1027 };
    let [large, odd, small] =
        [long, 13, 8].map(|n| plan.tensor((Arena::Device, "test"), format!("x{n}"), dtype, (1, n)));
    let plan = Arc::new(plan);
    let of_rank = |world: &Arc<Communicator>, rank: Rank| {
        let options = CpuOptions {
            lanes: Lanes::Inline,
            memory_limit: u64::MAX,
            host: device::HostPlace::default(),
            scratch: cpu::ScratchFloats::default(),
            work: device::HostWork::default(),
        };
        let dev = cpu::open(rank, &plan, world, &options).unwrap();
        let mut all = Vec::new();
        for (i, group) in [Group::World, Group::Tp, Group::Dp].into_iter().enumerate() {
            let value = |x: usize| ((x * 7 + rank.index() * 13 + i) % 101) as f64 / 7.0 - 5.0;
            for x in [large, odd, small] {
                dev.write(x, &value).unwrap();
            }
            let sum = Reduction::Sum;
            let ops = [
                Op::AllReduce { x: large, group, reduce: sum },
                Op::AllReduce { x: odd, group, reduce: Reduction::Max },
                Op::ReduceScatter { x: large, group },
                Op::AllGather { x: large, group },
                Op::Broadcast { x: small, group, root: rank.within(group).1 - 1 },
                Op::AllReduce { x: odd, group, reduce: sum },
            ];
            for op in ops {
                dev.submit(Lane::DpComm, op);
            }
            dev.sync(dev.record(Lane::DpComm)).unwrap();
            for x in [large, odd, small] {
                let mut values = vec![0.0; x.len()];
                dev.read(x, &mut values).unwrap();
                all.extend(values.into_iter().map(f64::to_bits));
            }
        }
        dev.finish().unwrap();
        all
    };
    let world = |processes| Communicator::across(&processes, tp, dp, Duration::from_secs(60));
    // A single process has no messages to send.
    let worlds: Vec<_> = Processes::in_threads(count).into_iter().map(world).collect();
    std::thread::scope(|scope| {
        let mut all = Vec::new();
        for world in &worlds {
            for rank in Rank::all(tp, dp).filter(|rank| world.has(*rank)) {
                let of_rank = &of_rank;
                all.push(scope.spawn(move || of_rank(world, rank)));
            }
        }
        all.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// The expected step and best checkpoint follow from the losses of the evaluations.
#[test]
fn a_run_that_compares_its_evaluations_decides_alike_in_every_mode_and_number_of_processes() {
    let compared = [
        "train.steps=16",
        "train.eval_every=2",
        "train.keep_best=true",
        "train.patience=2",
        "train.checkpoint_every=3",
        "train.checkpoint_keep=1",
        "optimizer.lr=1.0",
        "schedule.warmup_steps=16",
    ];
    let sets = with(&with(BASE, TP2_DP2), &compared);
    let modes: [&[&str]; 4] = [
        &["offload.update=Serial"],
        &["offload.update=Speculative"],
        &["offload.update=Delayed(after_step: 2)"],
        &["offload.parameters=Host", "recompute=Block"],
    ];
    for mode in modes {
        let of = |count: usize| {
            let folder = tempfile::tempdir().unwrap();
            let ran = ran(count, &with(&sets, mode), &saving(folder.path(), None));
            (ran, contents(folder.path()))
        };
        let (one, files) = of(1);
        let mut least = (0, f64::INFINITY);
        let mut since = 0;
        let expected = one.evals.iter().take_while(|(step, loss)| {
            let goes_on = since < 2;
            match *loss < least.1 {
                true => (least, since) = ((*step, *loss), 0),
                false => since += 1,
            }
            goes_on
        });
        assert_eq!(expected.count(), one.evals.len(), "{mode:?}: an evaluation after the end");
        assert!(since == 2 && one.outcome.out_of_patience && one.outcome.complete, "{mode:?}");
        assert_eq!(one.outcome.step, least.0 + 4, "{mode:?}");
        let seen = one.outcome.evaluations.unwrap();
        let best = seen.best().map(|best| (best.step, best.loss().to_bits()));
        assert_eq!(best, Some((least.0, least.1.to_bits())), "{mode:?}");
        let manifests = files.iter().filter(|(name, _)| name.ends_with("MANIFEST"));
        let names: Vec<&str> = manifests.map(|(name, _)| name.as_str()).collect();
        let expected = [least.0, least.0 + 4].map(|step| format!("step-{step:08}/MANIFEST"));
        assert_eq!(names, expected, "{mode:?}");
        for count in [2, 4] {
            let (several, in_several) = of(count);
            assert_eq!(several.outcome, one.outcome, "{mode:?}, {count} processes");
            assert!(in_several == files, "{mode:?}, {count} processes");
        }
    }
}
