//! Tests that a host task gets the ranges that it declared when its op was created, and not ranges
//! that it would declare later.
#![allow(missing_docs, reason = "a test")]
#![allow(clippy::unwrap_used, reason = "helpers of tests")]
#![allow(clippy::allow_attributes, reason = "the lines above")]

use device::cpu::{self, CpuOptions, Lanes, ScratchFloats};
use device::{Arena, Dtype, Error, HostContext, HostOp, HostTask, Mode, Plan, Rank, Tensor};
use device::{Communicator, HostPlace, HostWork};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Task that declares the first range at the first call, and the second range at later calls. It
/// writes the range number `arg`.
#[derive(Debug)]
struct FickleTask {
    ranges: [Tensor; 2],
    calls: Arc<AtomicUsize>,
}

impl HostTask for FickleTask {
    fn name(&self) -> &'static str {
        "fickle"
    }
    fn accesses(&self, visit: &mut dyn FnMut(Mode, Tensor)) {
        visit(Mode::Write, self.ranges[self.calls.fetch_add(1, Ordering::SeqCst).min(1)]);
    }
    fn run(&self, arg: u64, host: &mut HostContext<'_>) -> Result<(), String> {
        host.write_as::<f32>(self.ranges[arg as usize])?.fill(1.0);
        Ok(())
    }
}

/// Submits the task twice, the second time with `arg`. Returns the tensor that it wrote, and the
/// number of calls for accesses.
fn run(lanes: Lanes, arg: u64) -> (Result<f64, Error>, usize) {
    let mut plan = Plan::default();
    let at = (Arena::Pinned, "test");
    let ranges = ["x", "y"].map(|name| plan.tensor(at, name, Dtype::F32, (1, 8)));
    let rank = Rank { tp: 0, tp_size: 1, dp: 0, dp_size: 1 };
    let world = Communicator::new(1, 1, Duration::from_secs(10));
    let (memory_limit, work) = (u64::MAX, HostWork::default());
    let options = CpuOptions {
        lanes,
        memory_limit,
        host: HostPlace::default(),
        scratch: ScratchFloats::default(),
        work,
    };
    let dev = cpu::open(rank, &Arc::new(plan), &world, &options).unwrap();
    let calls = Arc::new(AtomicUsize::new(0));
    let task = HostOp::new(FickleTask { ranges, calls: Arc::clone(&calls) });
    dev.submit_host(&task, 0);
    dev.submit_host(&task, arg);
    let mut first = [0.0];
    let read = dev.sync_all().and_then(|()| dev.read(ranges[0].slice(7..8), &mut first));
    (read.map(|()| first[0]), calls.load(Ordering::SeqCst))
}

#[test]
fn the_accesses_of_a_task_are_read_once_and_the_task_gets_no_others() {
    for lanes in [Lanes::Inline, Lanes::Threads { chaos_us: 0 }] {
        let (value, calls) = run(lanes, 0);
        assert_eq!((value.unwrap(), calls), (1.0, 1));
        let (value, calls) = run(lanes, 1);
        let problem = value.unwrap_err().to_string();
        assert!(problem.contains("not declared as written"), "{problem}");
        assert_eq!(calls, 1);
    }
}
