//! Differences on the device where transfers block, see [`Transfer::Blocking`](crate::Transfer::Blocking):
//! gradients cross as fp32, and sums of micro-batches live on the host in the storage type but are made here.

use device::Lane::{D2h, DpComm, H2d};
use device::{Device, Op, Tensor};

/// Brings the host's `sum` so far up into `incoming`, one buffer for all pieces, and adds it to `own` on DpComm.
pub(crate) fn add_sum(dev: &Device, own: Tensor, incoming: Tensor, sum: Tensor) {
    dev.follow(H2d, DpComm);
    dev.follow(H2d, D2h);
    dev.submit(H2d, Op::Copy { src: sum, dst: incoming });
    dev.follow(DpComm, H2d);
    dev.submit(DpComm, Op::Add { x: incoming, into: own });
}

/// Copies `own` down to the host's `sum` on D2h.
pub(crate) fn keep_sum(dev: &Device, own: Tensor, sum: Tensor) {
    dev.follow(D2h, DpComm);
    dev.submit(D2h, Op::Copy { src: own, dst: sum });
}

/// Casts `own` to fp32 in `wide` on DpComm, once that buffer of all pieces is free of the last one.
pub(crate) fn widen(dev: &Device, own: Tensor, wide: Tensor) {
    dev.follow(DpComm, D2h);
    dev.submit(DpComm, Op::Cast { x: own, y: wide });
}
