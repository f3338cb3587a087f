//! A GPU that is lost: whatever finds it so says how it was lost.

use device::cuda::{self, Collectives, CudaOptions, Peers};
use device::{Arena, Dtype, Error, Lane, Op, Plan, Rank};
use device::{HostWork, World};
use std::sync::Arc;
use std::time::Duration;

/// How often the product is submitted, each once the one before has run: the GPU is lost by one of them.
const TIMES: usize = 100;

/// cuBLASLt itself says that the product failed and no more.
pub(super) fn at_a_product() {
    let mut plan = Plan::default();
    let mut tensor = || plan.tensor((Arena::Device, "test"), "t", Dtype::F32, (64, 64));
    let [a, b, c] = [tensor(), tensor(), tensor()];
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
    let (plan, world) = (Arc::new(plan), World::new(1, 1, Duration::from_secs(60)));
    let rank = Rank::all(1, 1).next().expect("one rank");
    let dev = cuda::open(rank, &plan, &world, &options).unwrap();
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
