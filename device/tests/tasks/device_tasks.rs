//! Tests that a GPU task of another crate is admitted like any op, and runs on its declared ranges.
#![allow(missing_docs, reason = "a test")]
#![allow(clippy::unwrap_used, reason = "helpers of tests")]
#![allow(clippy::allow_attributes, reason = "the lines above")]

use device::cpu::{self, CpuOptions, Lanes, ScratchFloats};
use device::cuda::testing::launches;
use device::{Arena, Device, DeviceOp, DeviceTask, Dtype, HostContext, HostTask, KernelArg};
use device::{Communicator, HostPlace, HostWork, KernelCall, Lane, Mode, Op, Plan, Rank, Tensor};
use std::sync::Arc;
use std::time::Duration;

/// Task that computes y = 2 x.
#[derive(Debug)]
struct DoubleTask {
    x: Tensor,
    y: Tensor,
}

impl HostTask for DoubleTask {
    fn name(&self) -> &'static str {
        "double"
    }
    fn accesses(&self, visit: &mut dyn FnMut(Mode, Tensor)) {
        visit(Mode::Read, self.x);
        visit(Mode::Write, self.y);
    }
    fn run(&self, _: u64, host: &mut HostContext<'_>) -> Result<(), String> {
        let (x, y) = (host.read_as::<f32>(self.x)?, host.write_as::<f32>(self.y)?);
        y.iter_mut().zip(x).for_each(|(y, x)| *y = 2.0 * x);
        Ok(())
    }
}

impl DeviceTask for DoubleTask {
    fn check(&self) -> Result<(), String> {
        let (x, y) = (self.x.len(), self.y.len());
        if x == y { Ok(()) } else { Err(format!("{x} numbers doubled to {y}")) }
    }
    fn kernel(&self) -> KernelCall {
        let args = vec![
            KernelArg::At(self.x),
            KernelArg::At(self.y),
            KernelArg::Types(vec![self.x, self.y]),
            KernelArg::Int(self.x.len() as u64),
            KernelArg::Float(2.0),
        ];
        KernelCall { name: "double", elements: self.x.len(), args }
    }
}

/// Opens a virtual GPU with two tensors of `n` elements and a longer tensor.
fn open(n: usize, lanes: Lanes) -> (Device, [Tensor; 3]) {
    let mut plan = Plan::default();
    let at = (Arena::Device, "test");
    let tensors = [("x", n), ("y", n), ("long", n + 1)]
        .map(|(name, n)| plan.tensor(at, name, Dtype::F32, (1, n)));
    let rank = Rank { tp: 0, tp_size: 1, dp: 0, dp_size: 1 };
    let world = Communicator::new(1, 1, Duration::from_secs(10));
    let options = CpuOptions {
        lanes,
        memory_limit: u64::MAX,
        host: HostPlace::default(),
        scratch: ScratchFloats::default(),
        work: HostWork::default(),
    };
    (cpu::open(rank, &Arc::new(plan), &world, &options).unwrap(), tensors)
}

fn double(x: Tensor, y: Tensor) -> Op {
    Op::Task { task: DeviceOp::new(DoubleTask { x, y }) }
}

#[test]
fn a_virtual_gpu_runs_it() {
    for lanes in [Lanes::Inline, Lanes::Threads { chaos_us: 0 }] {
        let (dev, [x, y, _]) = open(5, lanes);
        dev.write(x, &|i| i as f64).unwrap();
        dev.submit(Lane::Compute, double(x, y));
        dev.sync_all().unwrap();
        let mut got = [0.0; 5];
        dev.read(y, &mut got).unwrap();
        assert_eq!(got, [0.0, 2.0, 4.0, 6.0, 8.0]);
    }
}

#[test]
fn it_is_refused_unordered_on_another_lane_or_with_sizes_that_do_not_fit() {
    type Submit = fn(&Device, [Tensor; 3]);
    let unordered: Submit = |dev, [x, y, _]| {
        dev.submit(Lane::DpComm, Op::Cast { x, y });
        dev.submit(Lane::Compute, double(x, y));
    };
    let elsewhere: Submit = |dev, [x, y, _]| dev.submit(Lane::DpComm, double(x, y));
    let unfit: Submit = |dev, [x, _, long]| dev.submit(Lane::Compute, double(x, long));
    for (submit, why) in [
        (unordered, "Compute has not waited for that"),
        (elsewhere, "double belongs on [Compute]"),
        (unfit, "5 numbers doubled to 6"),
    ] {
        let (dev, tensors) = open(5, Lanes::Inline);
        dev.write(tensors[0], &|_| 1.0).unwrap();
        submit(&dev, tensors);
        let problem = dev.sync_all().unwrap_err().to_string();
        assert!(problem.contains(why), "{problem}");
    }
}

#[test]
fn a_gpu_launches_its_kernel_over_its_elements() {
    for (n, blocks) in [(0, None), (5, Some(1)), (5000, Some(3))] {
        let (_, [x, y, _]) = open(n, Lanes::Inline);
        let at = |t: Tensor| if t == x { 111 } else { 222 };
        let launches = launches(&double(x, y), &at, 0, 80).unwrap();
        assert_eq!(launches.iter().next().map(|launch| launch.grid[0]), blocks);
        for launch in launches.iter() {
            assert_eq!((launch.kernel, launch.block), ("double", 256));
            let two = u64::from(2.0f32.to_bits());
            assert_eq!(launch.args.slots(), [111, 222, 0x22, n as u64, two]);
        }
    }
}
