//! A GPU that is lost: whatever finds it so says how it was lost.

use device::cuda::{self, Collectives, CudaOptions, Peers};
use device::{Arena, Device, Dtype, Error, Lane, Op, Plan, Rank, Tensor};
use device::{Communicator, HostContext, HostOp, HostTask, HostWork, Mode};
use std::sync::Arc;
use std::time::Duration;

/// How often the product is submitted, each once the one before has run: the GPU is lost by one of them.
const TIMES: usize = 100;

/// A GPU alone, with three tensors.
fn open() -> (Device, [Tensor; 3]) {
    let mut plan = Plan::default();
    let mut tensor = || plan.tensor((Arena::Device, "test"), "t", Dtype::F32, (64, 64));
    let tensors = [tensor(), tensor(), tensor()];
    let options = CudaOptions {
        gpu: None,
        host: device::HostPlace::default(),
        peers: Arc::new(Peers::new(1)),
        collectives: Collectives::InProcess,
        scratch: 0,
        work: HostWork::default(),
        programs: &[],
        warm_up: Arc::default(),
    };
    let (plan, world) = (Arc::new(plan), Communicator::new(1, 1, Duration::from_secs(60)));
    let rank = Rank::all(1, 1).next().expect("one rank");
    (cuda::open(rank, &plan, &world, &options).unwrap(), tensors)
}

/// cuBLASLt itself says that the product failed and no more.
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

/// A task of the host that takes longer than the thread that submits takes to come to what waits for it.
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

/// The first call that fails tells a stream to wait for an op of the host.
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
