//! A lost GPU: the error says how the GPU was lost, for every call that can find the loss.

use device::cuda::{self, AttentionLibrary, Collectives, CudaOptions, MatmulSelection, Peers};
use device::{Arena, Device, Dtype, Error, Lane, Op, Plan, Rank, Tensor};
use device::{Communicator, HostContext, HostOp, HostTask, HostWork, Mode};
use std::sync::Arc;
use std::time::Duration;

/// Number of submissions, each after the previous op has run. One of them loses the GPU.
const TIMES: usize = 100;

/// Opens a GPU without peers, with three tensors.
fn open() -> (Device, [Tensor; 3]) {
    let mut plan = Plan::default();
    let mut tensor = || plan.tensor((Arena::Device, "test"), "t", Dtype::F32, (64, 64));
    let tensors = [tensor(), tensor(), tensor()];
    let options = CudaOptions {
        gpu: None,
        host: device::HostPlace::default(),
        peers: Arc::new(Peers::new(1)),
        collectives: Collectives::InProcess,
        attention: AttentionLibrary::Own,
        matmuls: MatmulSelection::Heuristic,
        scratch: 0,
        work: HostWork::default(),
        programs: &[],
        warm_up: Arc::default(),
    };
    let (plan, world) = (Arc::new(plan), Communicator::new(1, 1, Duration::from_secs(60)));
    let rank = Rank::all(1, 1).next().expect("one rank");
    (cuda::open(rank, &plan, &world, &options).unwrap(), tensors)
}

/// A matmul finds the loss. cuBLASLt itself only reports a failed call.
pub(super) fn at_a_product() {
    let (dev, [a, b, c]) = open();
    [a, b].into_iter().for_each(|x| dev.submit(Lane::Compute, Op::Zero { x }));
    for _ in 0..TIMES {
        dev.submit(Lane::Compute, Op::product(a, b, c));
        std::thread::sleep(Duration::from_millis(5));
    }
    let error = dev.sync_all().expect_err("the GPU is lost");
    let text = error.to_string();
    assert!(matches!(error, Error::Gpu { .. }) && text.contains("gemm"), "{text}");
    assert!(text.contains("ILLEGAL_ADDRESS"), "{text}");
}

/// Host task that still runs when the submitting thread reaches the wait for the task.
#[derive(Debug)]
struct SlowTask;

impl HostTask for SlowTask {
    fn name(&self) -> &'static str {
        "slow"
    }
    fn accesses(&self, _: &mut dyn FnMut(Mode, Tensor)) {}
    fn run(&self, _: u64, _: &mut HostContext<'_>) -> Result<(), String> {
        std::thread::sleep(Duration::from_millis(20));
        Ok(())
    }
}

/// The first failing call makes a stream wait for a host op.
pub(super) fn at_a_wait() {
    let (dev, [a, ..]) = open();
    let slow = HostOp::new(SlowTask);
    for _ in 0..TIMES {
        dev.submit(Lane::Compute, Op::Zero { x: a });
        std::thread::sleep(Duration::from_millis(5));
        dev.submit_host(&slow, 0);
        dev.follow(Lane::Compute, Lane::Host);
    }
    let error = dev.sync_all().expect_err("the GPU is lost");
    assert!(matches!(error, Error::Gpu { .. }), "{error}");
}
