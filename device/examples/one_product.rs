//! Computes one matmul on a virtual GPU, and shows that a forgotten wait is refused. Run it with
//! `cargo run -p device --example one_product`.
#![allow(clippy::print_stdout, reason = "an example shows what it found")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use device::cpu::{self, CpuOptions, Lanes, ScratchFloats};
use device::{Arena, Communicator, Dtype, Error, HostPlace, HostWork, Lane, Op, Plan, Rank};
use std::sync::Arc;
use std::time::Duration;

fn main() -> Result<(), Error> {
    // The plan assigns every byte before memory is allocated.
    let mut plan = Plan::default();
    let mut tensor = |arena, name, shape| plan.tensor((arena, "example"), name, Dtype::F32, shape);
    let a = tensor(Arena::Device, "a", (2, 3));
    let b = tensor(Arena::Device, "b", (3, 2));
    let c = tensor(Arena::Device, "c", (2, 2));
    let below = tensor(Arena::Pinned, "c on the host", (2, 2));

    let rank = Rank { tp: 0, tp_size: 1, dp: 0, dp_size: 1 };
    let world = Communicator::new(1, 1, Duration::from_secs(10));
    let options = CpuOptions {
        lanes: Lanes::Inline,
        memory_limit: 1 << 20,
        host: HostPlace::default(),
        scratch: ScratchFloats::new(1, 1, 3, 3),
        work: HostWork::default(),
    };
    let dev = cpu::open(rank, &Arc::new(plan), &world, &options)?;
    dev.write(a, &|i| i as f64)?;
    dev.write(b, &|i| 1.0 + i as f64)?;

    dev.submit(Lane::Compute, Op::product(a, b, c));
    dev.sync(dev.record(Lane::Compute))?;
    let mut values = [0.0; 4];
    dev.read(c, &mut values)?;
    println!("a b = {values:?}");

    // The copy is on another lane, and no event orders it after the second matmul.
    dev.submit(Lane::Compute, Op::product(a, b, c));
    dev.submit(Lane::D2h, Op::Copy { src: c, dst: below });
    if let Err(refused) = dev.sync_all() {
        println!("{refused}");
    }
    Ok(())
}
