//! What is different on the device where transfers block, see [`Transfer::Blocking`](crate::Transfer::Blocking):
//! gradients cross as fp32, and sums of micro-batches live on the host but are made here.

use device::Lane::{D2h, DpComm, H2d};
use device::{Device, Op, Tensor};

/// wide = own in fp32, for the first micro-batch; later wide = the host's sum so far, brought up, and += own. On
/// DpComm, once `wide`, one buffer for all pieces, is free of the last one.
pub(crate) fn widen(dev: &Device, own: Tensor, wide: Tensor, sum_so_far: Option<Tensor>) {
    dev.follow(DpComm, D2h);
    let Some(src) = sum_so_far else { return dev.submit(DpComm, Op::Cast { x: own, y: wide }) };
    dev.follow(H2d, D2h);
    dev.submit(H2d, Op::Copy { src, dst: wide });
    dev.follow(DpComm, H2d);
    dev.submit(DpComm, Op::Add { x: own, into: wide });
}
