//! What a training run does not show of a device: products that add.

use super::collectives::{on_cpu, on_gpu};
use device::cpu::World;
use device::{Arena, Device, Dtype, Lane, Op, Plan, Rank, random};
use std::sync::Arc;
use std::time::Duration;

type Open = dyn Fn(Rank, &Arc<Plan>, &Arc<World>) -> Device;

pub(super) fn does_as_the_cpu_does() {
    let mut plan = Plan::default();
    let mut tensor = |shape| plan.tensor((Arena::Device, "test"), "t", Dtype::F32, shape);
    let [a, b, c] = [(5, 33), (33, 9), (5, 9)].map(&mut tensor);
    let plan = Arc::new(plan);
    let rank = Rank { tp: 0, tp_size: 1, dp: 0, dp_size: 1 };
    let run = |open: &Open| {
        let dev = open(rank, &plan, &World::new(1, 1, Duration::from_secs(60)));
        for (key, x) in [a, b, c].into_iter().enumerate() {
            dev.write(x, &|i| random::normal(key as u64, i as u64)).unwrap();
        }
        dev.submit(Lane::Compute, Op::Gemm { a, b, c, beta: 0.5, bias: None });
        dev.sync_all().unwrap();
        let mut sums = vec![f64::NAN; c.len()];
        dev.read(c, &mut sums).unwrap();
        dev.finish().unwrap();
        sums
    };
    let (cpu, gpu) = (run(&on_cpu), run(&on_gpu));
    let apart = cpu.iter().zip(&gpu).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(apart < 1e-5, "{apart}");
}
