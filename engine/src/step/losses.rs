//! Copies of losses, and of the loads of experts, to the host.

use super::Trainer;
use device::Lane::{Compute, D2h, Host};
use device::{Device, Group, Op, Reduction, Tensor};
use std::ops::Range;

impl Trainer {
    /// Queues the copy of the loads of experts to the host, and their sum over the data-parallel
    /// ranks, if the model has experts. The result is complete when the losses are.
    pub(super) fn fetch_expert_loads(&self, dev: &Device) {
        if let Some((src, dst)) = self.decoder.expert_loads().zip(self.expert_loads_host) {
            Self::fetch_sum(dev, src, dst);
        }
    }

    /// Queues the copy of losses to the host, and their sum over the data-parallel ranks. The
    /// result is complete after `losses_on_host`.
    pub(super) fn fetch_losses(&mut self, dev: &Device, range: Range<usize>) {
        Self::fetch_sum(dev, self.losses.slice(range.clone()), self.losses_host.slice(range));
        self.losses_on_host = dev.record(Host);
    }

    /// Queues the copy of `src` on the device to `dst` on the host, and the sum of `dst` over the
    /// data-parallel ranks in rank order.
    fn fetch_sum(dev: &Device, src: Tensor, dst: Tensor) {
        let [src, dst] = [src, dst].map(|t| t.reshape(1, t.len()));
        dev.follow(D2h, Compute);
        dev.submit(D2h, Op::Copy { src, dst });
        dev.follow(Host, D2h);
        if dev.rank().dp_size > 1 {
            dev.submit(Host, Op::AllReduce { x: dst, group: Group::Dp, reduce: Reduction::Sum });
        }
    }
}
