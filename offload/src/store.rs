//! A rank's arrays for the elements with one update site: states, staged gradients and parameters.

use crate::buckets::Bucket;
use crate::spec::{GradAccumulation, OptimizerSpec};
use crate::speculation::SpeculationBuffers;
use crate::state::{State, Storage};
use device::{Arena, Cargo, Dtype, Plan, Pool, Tensor};

/// The pool of masters and moments.
const STATES: Pool = Pool::of_the_host("optimizer states");
/// The pool of fp32 sums of gradients over micro-batches.
const SUMS: Pool = Pool::of_the_host("gradient sums");
/// The pool of sums that go back to the device, which adds the next micro-batch's gradient.
const SUMS_TO_ADD: Pool = Pool::new("gradient sums to add").carrying(Cargo::Gradient);
/// The pool of a rank's shards of gradients, if the optimizer is on the device.
const SHARDS: Pool = Pool::new("gradient shards");
/// The pool of gradients on their way to the host.
const GRADIENT_STAGING: Pool = Pool::staging("gradient staging").carrying(Cargo::Gradient);
/// The pool of parameters on their way to the device.
const PARAMETER_STAGING: Pool = Pool::staging("parameter staging");

/// Arrays for the elements of a segment with one update site, each with one entry per element.
#[derive(Clone, Debug)]
pub(crate) struct Store {
    /// Place of the update, and the route of gradients to it.
    pub(crate) site: UpdateSite,
    /// Masters in fp32, or their lower halves; `UpdateSite::Host` then stages the upper halves.
    pub(crate) master: Tensor,
    /// The first moments.
    pub(crate) momentum: Tensor,
    /// The second moments.
    pub(crate) variance: Tensor,
    /// Second arrays of the states, if updates are speculative.
    pub(crate) speculation: Option<SpeculationBuffers>,
}

/// The gradients that an update reads, by gradient buffer: two arrays if updates are delayed, else
/// the same array twice.
pub(crate) type DoubleBuffer = [Tensor; 2];

/// Place of states and update.
#[derive(Clone, Copy, Debug)]
pub(crate) enum UpdateSite {
    /// On the device, partitioned over the data-parallel ranks (ZeRO-2). The states are fp32.
    Device {
        /// Sum of all micro-batches in fp32 if `summed`; else the gradient of the only micro-batch
        /// in the storage type.
        gradient: DoubleBuffer,
        /// Whether a step has several micro-batches.
        summed: bool,
    },
    /// In host memory; the host's cores run the update.
    Host {
        /// Route of the gradients to the host.
        route: GradientRoute,
        /// New parameters in the storage type, before they go up.
        up: Tensor,
    },
}

/// Route of a step's micro-batches to the host, as one gradient. Copies write the host memory
/// `down`.
#[derive(Clone, Copy, Debug)]
pub(crate) enum GradientRoute {
    /// The only micro-batch is copied down in the storage type.
    Direct {
        /// Gradient in the storage type.
        down: DoubleBuffer,
    },
    /// The device adds micro-batches in fp32, and the sum is copied down.
    SumOnDevice {
        /// Partial sum on the device.
        sum: Tensor,
        /// Gradient in fp32.
        down: DoubleBuffer,
    },
    /// Each micro-batch is copied down in the storage type, and the host adds it.
    SumOnHost {
        /// Gradient of one micro-batch.
        down: Tensor,
        /// Gradient in fp32 on the host.
        sum: DoubleBuffer,
    },
    /// Transfers block: see [`Transfer::Blocking`](crate::Transfer::Blocking).
    Blocking {
        /// Sum of the micro-batches, if a step has several.
        partial_sum: Option<PartialSum>,
        /// Buffer of one piece in fp32 on the device before it goes down; all pieces share it.
        wide: Tensor,
        /// Gradient in fp32.
        down: Tensor,
    },
}

/// A sum of micro-batches in the storage type: the host stores it, and the device adds to it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PartialSum {
    /// Partial sum on the host.
    pub(crate) sum: Tensor,
    /// Copy of one piece of the sum on the device; all pieces share this buffer.
    pub(crate) incoming: Tensor,
}

/// Device buffers for one piece, which all pieces share with blocking transfers.
#[derive(Clone, Copy)]
pub(crate) struct BlockingBuffers {
    /// See [`GradientRoute::Blocking`].
    pub(crate) wide: Tensor,
    /// See [`PartialSum`]; present if a step has several micro-batches.
    pub(crate) incoming: Option<Tensor>,
}

/// Plans the arrays of one store.
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

    /// Plans the gradient that an update reads, once for each gradient buffer.
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

    /// Plans the arrays on the host. `predicted`: the predicted words, if updates are speculative.
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

    /// The host's new parameters before they go up; None for a store on the device.
    pub(crate) const fn staging(&self) -> Option<Tensor> {
        match self.site {
            UpdateSite::Host { up, .. } => Some(up),
            UpdateSite::Device { .. } => None,
        }
    }

    /// Whether copies down read the bucket itself; otherwise it is free after DpComm.
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

    /// Masters, first moments and second moments in arrays number `buffer`, see
    /// [`control::STATE_BUFFER`](crate::control::STATE_BUFFER).
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

    /// The gradients that the update reads after a step that fills gradient buffer `buffer`.
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
