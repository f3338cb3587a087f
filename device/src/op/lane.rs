//! Lanes, and events on them for other lanes to wait for.

/// A sequence of ops. Ops on one lane run in the order of submission. Ops on different lanes run at
/// the same time unless an event orders them.
///
/// There are two communication lanes, so that a tensor-parallel collective never queues behind a
/// collective that waits for the host. An executor may map both lanes to one queue if the order of
/// submission allows it. Copies of activations have two lanes of their own for the same reason: a
/// copy of parameters or gradients may wait for the host's arithmetic.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Lane {
    /// Kernels.
    Compute,
    /// Tensor-parallel collectives, inside a layer.
    TpComm,
    /// Data-parallel collectives: gradients out, parameters back.
    DpComm,
    /// Host to device copies.
    H2d,
    /// Device to host copies.
    D2h,
    /// Host to device copies of activations.
    ActivationsUp,
    /// Device to host copies of activations.
    ActivationsDown,
    /// Tasks of the host: batches, sums, decisions.
    Host,
}

/// Number of lanes.
pub const LANES: usize = 8;

impl Lane {
    /// All lanes, in the order of their numbers.
    pub const ALL: [Self; LANES] = [
        Self::Compute,
        Self::TpComm,
        Self::DpComm,
        Self::H2d,
        Self::D2h,
        Self::ActivationsUp,
        Self::ActivationsDown,
        Self::Host,
    ];
}

/// For each lane, the number of its ops that are known to be finished (a vector clock).
pub type Clock = [u64; LANES];

/// Makes `into` the clock of a lane that has also waited for all ops of `other`.
pub fn join(into: &mut Clock, other: &Clock) {
    for (a, b) in into.iter_mut().zip(other) {
        *a = (*a).max(*b);
    }
}

/// A point on a lane, with all ops that are finished when the lane has passed it. An event is plain
/// data: copy it, store it, wait for it on any number of lanes. The default event has passed on
/// every lane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Event {
    /// Number of the lane.
    pub lane: u8,
    pub(crate) device: u32,
    /// For each lane, the number of its ops that are finished when the event has passed.
    pub clock: Clock,
}

impl Event {
    pub(crate) const fn tick(&self) -> u64 {
        self.clock[self.lane as usize]
    }
}
