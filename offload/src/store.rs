//! A rank's arrays for the elements that are updated at one place: states, and gradients and parameters on their ways.

use crate::buckets::Bucket;
use crate::spec::{GradAccumulation, OptimizerSpec};
use crate::speculation::SpeculationBuffers;
use crate::state::{State, Storage};
use device::{Arena, Cargo, Dtype, Plan, Pool, Tensor};

/// The pool of masters and moments.
const STATES: Pool = Pool::of_the_host("optimizer states");
/// The pool of fp32 sums of gradients over micro-batches.
const SUMS: Pool = Pool::of_the_host("gradient sums");
/// The pool of sums that go back to the device, where the next micro-batch's gradient is added.
const SUMS_TO_ADD: Pool = Pool::new("gradient sums to add").carrying(Cargo::Gradient);
/// The pool of a rank's shards of gradients, where the optimizer is on the device.
const SHARDS: Pool = Pool::new("gradient shards");
/// The pool of gradients on their way down.
const GRADIENT_STAGING: Pool = Pool::staging("gradient staging").carrying(Cargo::Gradient);
/// The pool of parameters on their way up.
const PARAMETER_STAGING: Pool = Pool::staging("parameter staging");

/// The arrays for the elements of a segment that are updated at one place. Each array has one element for each of them.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    /// The place of the update, and the way of gradients to it.
    pub(crate) site: UpdateSite,
    /// The masters: in fp32, or the lower halves of what `UpdateSite::Host` stages the upper ones of.
    pub(crate) master: Tensor,
    /// The first moments.
    pub(crate) momentum: Tensor,
    /// The second moments.
    pub(crate) variance: Tensor,
    /// The second arrays, where updates run ahead of the decision.
    pub(crate) speculation: Option<SpeculationBuffers>,
}

/// What an update reads, by the gradient buffer of the step that makes it: two arrays where updates are delayed, else the same one twice.
pub(crate) type DoubleBuffer = [Tensor; 2];

/// Where states and update are.
#[derive(Clone, Copy, Debug)]
pub(crate) enum UpdateSite {
    /// On the device, partitioned over the data-parallel ranks (ZeRO-2). The states are fp32.
    Device {
        /// The sum of all micro-batches in fp32 where it is `summed`, else the only one in the storage type.
        gradient: DoubleBuffer,
        /// Whether a step has several micro-batches.
        summed: bool,
    },
    /// In host memory, with the update on its cores.
    Host {
        /// How gradients come down.
        route: GradientRoute,
        /// The new parameters in the storage type, before they go up.
        up: Tensor,
    },
}

/// The route of the micro-batches of a step down to the host, as one gradient. `down` is host memory for copies.
#[derive(Clone, Copy, Debug)]
pub(crate) enum GradientRoute {
    /// The only micro-batch comes down in the storage type.
    Direct {
        /// The gradient.
        down: DoubleBuffer,
    },
    /// The device adds micro-batches up in fp32, and the sum comes down.
    SumOnDevice {
        /// The sum so far, on the device.
        sum: Tensor,
        /// The gradient, in fp32.
        down: DoubleBuffer,
    },
    /// Each micro-batch comes down in the storage type, and the host adds it.
    SumOnHost {
        /// One micro-batch.
        down: Tensor,
        /// The gradient, in fp32, on the host.
        sum: DoubleBuffer,
    },
    /// Transfers block: see [`Transfer::Blocking`](crate::Transfer::Blocking).
    Blocking {
        /// The sum of the micro-batches, where a step has several.
        partial_sum: Option<PartialSum>,
        /// A piece in fp32 before it goes down, on the device: one buffer for all pieces.
        wide: Tensor,
        /// The gradient, in fp32.
        down: Tensor,
    },
}

/// A sum of micro-batches in the storage type that the host keeps and the device adds to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PartialSum {
    /// The sum so far, on the host.
    pub(crate) sum: Tensor,
    /// A piece of it that has come up to the device: one buffer for all pieces.
    pub(crate) incoming: Tensor,
}

/// The buffers through which every piece goes where transfers block.
#[derive(Clone, Copy)]
pub(crate) struct BlockingBuffers {
    /// See [`GradientRoute::Blocking`].
    pub(crate) wide: Tensor,
    /// See [`PartialSum`], where micro-batches are summed.
    pub(crate) incoming: Option<Tensor>,
}

/// The arrays of a store, while they are planned.
pub(crate) struct StorePlanner<'a> {
    pub(crate) plan: &'a mut Plan,
    pub(crate) spec: &'a OptimizerSpec,
    /// Name of the store's elements.
    pub(crate) name: String,
    /// Number of elements that this rank owns.
    pub(crate) len: usize,
    /// Storage type of parameters and gradients.
    pub(crate) dtype: Dtype,
    /// Elements of one partial sum of the norm.
    pub(crate) chunk: usize,
}

impl StorePlanner<'_> {
    fn array(&mut self, arena: Arena, pool: Pool, what: &str, dtype: Dtype) -> Tensor {
        self.plan.tensor((arena, pool), format!("{}.{what}", self.name), dtype, (1, self.len))
    }

    /// Plans what an update reads, once for each gradient buffer.
    fn double_buffer(
        &mut self,
        arena: Arena,
        pool: Pool,
        what: &str,
        dtype: Dtype,
    ) -> DoubleBuffer {
        let first = self.array(arena, pool, what, dtype);
        let delayed =
            self.spec.delayed.then(|| self.array(arena, pool, &format!("{what}.late"), dtype));
        [first, delayed.unwrap_or(first)]
    }

    pub(crate) fn on_device(mut self) -> Store {
        let summed = self.spec.accumulation != GradAccumulation::None;
        let (dtype, pool) = if summed { (Dtype::F32, SUMS) } else { (self.dtype, SHARDS) };
        let gradient = self.double_buffer(Arena::Device, pool, "grad", dtype);
        let [master, momentum, variance] = self.states(Arena::Device, Storage::default());
        let place = UpdateSite::Device { gradient, summed };
        Store { site: place, master, momentum, variance, speculation: None }
    }

    /// `predicted`: the predicted words, where updates of this segment run ahead of the decision.
    pub(crate) fn on_host(
        mut self,
        blocking: Option<BlockingBuffers>,
        shared: Option<Bucket>,
        predicted: Option<Tensor>,
    ) -> Store {
        let route = match (blocking, self.spec.accumulation) {
            (Some(BlockingBuffers { wide, incoming }), _) => {
                let partial_sum = incoming.map(|incoming| {
                    let sum = self.array(Arena::Pinned, SUMS_TO_ADD, "grad_sum", self.dtype);
                    PartialSum { sum, incoming }
                });
                GradientRoute::Blocking {
                    partial_sum,
                    wide,
                    down: self.array(Arena::Pinned, GRADIENT_STAGING, "grad_down", Dtype::F32),
                }
            }
            (None, GradAccumulation::None) => GradientRoute::Direct {
                down: self.double_buffer(Arena::Pinned, GRADIENT_STAGING, "grad_down", self.dtype),
            },
            (None, GradAccumulation::Device | GradAccumulation::Shared) => {
                let sum = match shared {
                    Some(shared) => shared.tensor.slice(0..self.len),
                    None => self.array(Arena::Device, SUMS, "grad", Dtype::F32),
                };
                GradientRoute::SumOnDevice {
                    sum,
                    down: self.double_buffer(
                        Arena::Pinned,
                        GRADIENT_STAGING,
                        "grad_down",
                        Dtype::F32,
                    ),
                }
            }
            (None, GradAccumulation::Host) => {
                let down = self.array(Arena::Pinned, GRADIENT_STAGING, "grad_down", self.dtype);
                let sum = self.double_buffer(Arena::Pinned, SUMS, "grad_sum", Dtype::F32);
                GradientRoute::SumOnHost { down, sum }
            }
        };
        let [master, momentum, variance] = self.states(Arena::Pinned, self.spec.storage);
        let up = self.array(Arena::Pinned, PARAMETER_STAGING, "params_up", self.dtype);
        let buffers = predicted.map(|predicted| self.plan_speculation(predicted));
        Store {
            site: UpdateSite::Host { route, up },
            master,
            momentum,
            variance,
            speculation: buffers,
        }
    }

    fn plan_speculation(&mut self, predicted: Tensor) -> SpeculationBuffers {
        let name = std::mem::take(&mut self.name);
        self.name = format!("{name}.second");
        let states = self.states(Arena::Pinned, self.spec.storage);
        let split = self.spec.storage.split_master;
        let upper = split.then(|| self.array(Arena::Pinned, STATES, "upper", self.dtype));
        let words = (1, self.len / self.chunk);
        let factor = self.plan.tensor(
            (Arena::Pinned, STATES),
            format!("{}.factors", self.name),
            Dtype::F64,
            words,
        );
        self.name = name;
        SpeculationBuffers { states, upper, factor, predicted }
    }

    fn states(&mut self, arena: Arena, storage: Storage) -> [Tensor; 3] {
        let master = if storage.split_master { Dtype::U16 } else { Dtype::F32 };
        [("master", master), ("momentum", storage.moments), ("variance", storage.moments)]
            .map(|(what, dtype)| self.array(arena, STATES, what, dtype))
    }
}

impl Store {
    /// Whether states and update are on the host.
    pub(crate) const fn is_on_host(&self) -> bool {
        self.staging().is_some()
    }

    /// The host's new parameters before they go up.
    pub(crate) const fn staging(&self) -> Option<Tensor> {
        match self.site {
            UpdateSite::Host { up, .. } => Some(up),
            UpdateSite::Device { .. } => None,
        }
    }

    /// Whether copies down read the bucket itself; else it is free as soon as DpComm is done with it.
    pub(crate) const fn reads_bucket_down(&self) -> bool {
        match self.site {
            UpdateSite::Device { .. }
            | UpdateSite::Host { route: GradientRoute::SumOnDevice { .. }, .. } => false,
            UpdateSite::Host {
                route: GradientRoute::Direct { .. } | GradientRoute::SumOnHost { .. },
                ..
            }
            | UpdateSite::Host { route: GradientRoute::Blocking { .. }, .. } => true,
        }
    }

    /// The masters, the first moments and the second moments; `buffer` is [`control::STATE_BUFFER`](crate::control::STATE_BUFFER).
    pub(crate) fn states(&self, buffer: usize) -> [State; 3] {
        let [master, momentum, variance] = match &self.speculation {
            Some(buffers) if buffer == 1 => buffers.states,
            _ => [self.master, self.momentum, self.variance],
        };
        let master = match self.staging().filter(|_| master.dtype() == Dtype::U16) {
            Some(upper) => State::halves(master, upper),
            None => State::whole(master),
        };
        [master, State::whole(momentum), State::whole(variance)]
    }

    /// The gradients that the update of the step of gradient buffer `buffer` reads.
    pub(crate) const fn gradient(&self, buffer: usize) -> Tensor {
        match self.site {
            UpdateSite::Device { gradient, .. } => gradient[buffer],
            UpdateSite::Host { route, .. } => match route {
                GradientRoute::Direct { down } | GradientRoute::SumOnDevice { down, .. } => {
                    down[buffer]
                }
                GradientRoute::SumOnHost { sum, .. } => sum[buffer],
                GradientRoute::Blocking { down, .. } => down,
            },
        }
    }
}
