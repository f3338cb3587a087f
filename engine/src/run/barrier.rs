//! A barrier of all ranks.

use device::{Device, Error, Group, Lane, Op, Reduction};

/// Waits until all ranks have called it. Valid only between steps. `number` is the operand of the
/// all-reduce in which the ranks meet.
pub(crate) fn barrier(dev: &Device, number: device::Tensor) -> Result<(), Error> {
    let (group, reduce) = (Group::World, Reduction::Max);
    dev.submit(Lane::Host, Op::AllReduce { x: number, group, reduce });
    dev.sync(dev.record(Lane::Host))
}
