//! Device ops that only blocking transfers need, see
//! [`Transfer::Blocking`](crate::Transfer::Blocking).
//! Gradients cross as fp32. The host stores sums of micro-batches in the storage type; the device
//! adds.

use device::Lane::{D2h, DpComm, H2d};
use device::{Device, Op, Tensor};

/// Copies the host's `sum` up into `incoming`, which all pieces share, and adds it to `own` on
/// DpComm.
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

/// Casts `own` to fp32 in `wide` on DpComm, after the previous piece has left that shared buffer.
pub(crate) fn widen(dev: &Device, own: Tensor, wide: Tensor) {
    dev.follow(DpComm, D2h);
    dev.submit(DpComm, Op::Cast { x: own, y: wide });
}
