//! A barrier of all ranks.

use device::{Device, Error, Group, Lane, Op, Reduction};

/// Returns when all ranks have called it. Only between steps. `number` is the operand of the sum in which they meet.
pub(crate) fn barrier(dev: &Device, number: device::Tensor) -> Result<(), Error> {
    let (group, reduce) = (Group::World, Reduction::Max);
    dev.submit(Lane::Host, Op::AllReduce { x: number, group, reduce });
    dev.sync(dev.record(Lane::Host))
}
