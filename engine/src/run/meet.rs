//! Where all ranks wait for each other.

use device::{Device, Error, Group, Lane, Op, Reduction};

/// All ranks meet; returns when all have come. Outside a step only.
pub(crate) fn meet(dev: &Device, meeting: device::Tensor) -> Result<(), Error> {
    let (group, reduce) = (Group::World, Reduction::Max);
    dev.submit(Lane::Host, Op::AllReduce { x: meeting, group, reduce });
    dev.sync(dev.record(Lane::Host))
}
