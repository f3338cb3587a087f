//! Keys of the offload: where the optimizer is, and when it runs.

use super::declare::{choice, section};
use super::reading::{Choice, Declaration, Interval, KeyDefault, Section};
use serde::Serialize;
use topology::Sockets;

/// Default of [`OffloadConfig::tile_elements`]: 4 MiB of 16-bit parameters, so that the start of a
/// copy is a small part of its time.
pub const TILE_ELEMENTS: usize = 1 << 21;

/// Default of [`OffloadConfig::bucket_elements`].
pub const BUCKET_ELEMENTS: usize = 50_000_000;

/// Value of `offload.first_forward` that means all micro-batches of any step.
pub const ALL_TOGETHER: usize = 4096;

section! {
    /// Keys of ZeRO-Offload.
    #[derive(Clone, Debug, PartialEq, Serialize)]
    pub struct OffloadConfig, read(s) {
        /// Where the optimizer keeps its states and runs the update. `Host`: on the host. `Device`:
        /// on the GPUs, partitioned over the data-parallel ranks. `Split`: a share on the GPUs, all
        /// else on the host.
        optimizer: Placement = choice(KeyDefault::Default(Placement::Host)), resume: Placement;
        /// Where the parameters of the forward and backward pass are between their uses. `Device`:
        /// on the GPUs. `Host`: on the host, and each block's parameters are prefetched to the GPU
        /// before each use, so a model may be larger than GPU memory; the bits are the same. `Host`
        /// needs `offload.optimizer: Host`, and does not allow `offload.update: Delayed` or
        /// `offload.transfer: Blocking`.
        parameters: ParameterPlace = choice(KeyDefault::Default(ParameterPlace::Device)), resume: Placement;
        /// Number of blocks whose parameters a GPU holds in a ring of buffers, besides the resident
        /// blocks. Only with `offload.parameters: Host`. None: 3, or 2 if 3 do not fit.
        ring: Option<usize> = uint_or_none(2..=64, KeyDefault::Default(None)), resume: Placement;
        /// Number of blocks whose parameters stay on the GPU, spread evenly over the model. Only
        /// with `offload.parameters: Host`. None: as many as fit.
        resident_blocks: Option<usize> = uint_or_none(0..=10_000, KeyDefault::Default(None)), resume: Placement;
        /// When the update runs. `Serial`: before the next step. `Overlapped`: during the next
        /// forward pass. `Speculative`: begins during the backward pass, and needs more host
        /// memory. `Delayed`: during the whole next step, which computes on parameters of one step
        /// earlier. All modes but `Delayed` give the same bits. `Auto`: `Speculative` if it fits
        /// and saves time, else `Overlapped`; `plan`, `simulate` and `train` print the reason. With
        /// `offload.optimizer: Device`, `Speculative` and `Delayed` do the same as `Overlapped`.
        update: UpdateMode = choice(KeyDefault::Default(UpdateMode::Overlapped)), resume: Placement;
        /// Share of the parameters after the embedding that `offload.update: Speculative` updates
        /// during the backward pass. It is rounded down to whole segments, counted from the end of
        /// the model: an untied output projection, the final norm, the last blocks. A share smaller
        /// than the last segment is refused. The states of these parameters are in host memory
        /// twice. `Auto`: on a described box the smallest tried share whose simulated step is at
        /// most 0.5 % slower than the fastest; elsewhere 0.5, or less if 0.5 does not fit.
        speculated_fraction: SpeculatedFraction = speculated(), resume: Placement;
        /// How gradients and parameters cross PCIe. `Streamed`: each shard as soon as it is ready.
        /// `Blocking`: as in DeepSpeed in 2020, for comparison; it needs `offload.update: Serial`
        /// and `offload.optimizer: Host`, and does not allow `offload.parameters: Host` or
        /// `offload.accumulate: Device`.
        transfer: Transfer = choice(KeyDefault::Default(Transfer::Streamed)), resume: Layout;
        /// Where gradients of several micro-batches are summed in fp32. `Device`: on the GPU, 4/DP
        /// bytes for each parameter. `Host`: on the host, 4 bytes for each parameter that a rank
        /// owns. `Auto`: on the GPU if the plan fits, else on the host. With `offload.optimizer:
        /// Device` sums are always on the GPU; with `offload.transfer: Blocking` they are always on
        /// the host, in the storage type. If `offload.parameters: Host` runs all micro-batches of a
        /// step together, the GPU needs only a few buffers.
        accumulate: Accumulate = choice(KeyDefault::Default(Accumulate::Auto)), resume: Placement;
        /// Storage of the AdamW moments in host memory. `Fp32`: 4 bytes for each moment. `Bf16`: 2
        /// bytes, with stochastic rounding: close to fp32, not equal. `Bf16` needs
        /// `offload.optimizer: Host`.
        moments: Moments = choice(KeyDefault::Default(Moments::Fp32)), resume: Layout;
        /// Storage of the fp32 parameters in host memory. `Fp32`: 4 bytes besides the 16-bit
        /// parameter. `Split`: the bf16 parameter and the 2 bytes that complete it to fp32; the
        /// same bits in 2 bytes less. `Split` needs `precision: Bf16` or `Fp8`, and at least a part
        /// of the optimizer on the host.
        master: Master = choice(KeyDefault::Default(Master::Fp32)), resume: Placement;
        /// Largest number of elements of a gradient bucket that is reduced in one piece. A longer
        /// bucket is reduced in several pieces.
        bucket_elements: usize = uint(1024..=1 << 40, KeyDefault::Default(BUCKET_ELEMENTS)), resume: Placement;
        /// Largest number of elements of a tile of the host's update. The parameters of a tile go
        /// to the GPU in one copy: 2 bytes for each element, or 4 with `precision: Fp32`.
        tile_elements: usize = uint(1024..=1 << 40, KeyDefault::Default(TILE_ELEMENTS)), resume: Placement;
        /// Number of segments (embedding, block, final norm, output projection) by which the
        /// uploads of parameters are ahead of the forward pass. Blocks in the buffers of
        /// `offload.ring` do not use this key.
        lookahead: usize = uint(1..=64, KeyDefault::Default(1)), resume: Placement;
        /// Whether every block has its own gradient buffer, as in PyTorch, for comparison.
        /// Otherwise the blocks use two buffers in turn.
        keep_gradients: bool = flag(KeyDefault::Default(false)), resume: Placement;
        /// Number of micro-batches whose first forward pass goes through each block together, so
        /// that an exact update overlaps with all of them. Each micro-batch needs a set of block
        /// inputs; more than one micro-batch needs `recompute: Block`. With `offload.parameters:
        /// Host` all forward and backward passes run in groups of this size, and parameters cross
        /// PCIe twice for each group. With `offload.parameters: Host` the default is all
        /// micro-batches of a step. A number above the micro-batches of a step means all of them.
        first_forward: usize = uint(1..=ALL_TOGETHER as u64, together(parameters)), resume: Placement;
        /// Sockets whose cores and memory a rank uses. `Near`: the rank's own socket. `All`: also
        /// the sockets without ranks. `Auto`: the own socket, or all sockets if the own socket's
        /// memory cannot hold the rank's states and another socket has no rank.
        sockets: Sockets = choice(KeyDefault::Default(Sockets::Auto)), resume: Placement;
    }
}

/// Default of `offload.first_forward`. With parameters on the host it is all micro-batches, because
/// parameters cross PCIe for each group.
const fn together(parameters: ParameterPlace) -> KeyDefault<usize> {
    match parameters {
        ParameterPlace::Device => KeyDefault::Default(1),
        ParameterPlace::Host => KeyDefault::Derived(
            ALL_TOGETHER,
            "all micro-batches of a step",
            &["offload.parameters"],
        ),
    }
}

choice! {
    /// Place of the optimizer.
    #[derive(Clone, Copy, Debug, PartialEq, Serialize)]
    pub enum Placement {
        /// States and update on the host.
        Host,
        /// States and update on the device, partitioned over DP: no offload.
        Device,
        /// States and update on the device for the parameters that the forward pass needs first, on
        /// the host for all others.
        Split["(device_fraction: 0.2)"] {
            /// Share of the parameters whose optimizer states are on the GPUs: those that the
            /// forward pass needs first. It is rounded so that every rank owns the same number.
            device_fraction: f32 = float(Interval::closed(0.0, 1.0), KeyDefault::Required("device_fraction: 0.2"));
        },
    }
}

choice! {
    /// Place of the 16-bit parameters between their uses.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    pub enum ParameterPlace {
        /// The parameters are on the device.
        Device,
        /// The parameters are on the host, and each block's parameters are prefetched for each use;
        /// the same bits.
        Host,
    }
}

choice! {
    /// Storage of the AdamW moments in host memory.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    pub enum Moments {
        /// 4 bytes for each moment.
        Fp32,
        /// 2 bytes for each moment, with stochastic rounding: the mean is right, and values are
        /// close to fp32, not equal. The random bits depend on seed, step, tensor and index, and
        /// are the same in every layout. Only with the whole optimizer on the host.
        Bf16,
    }
}

choice! {
    /// Storage of the master weights in host memory.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    pub enum Master {
        /// 4 bytes for each weight, besides the 16-bit parameter.
        Fp32,
        /// 2 bytes for each weight, which together with the bf16 parameter are the fp32 master: the
        /// same bits as `Fp32` in 2 bytes less. Needs `precision: Bf16` or `Fp8`, and at least a
        /// part of the optimizer on the host.
        Split,
    }
}

choice! {
    /// When the update runs.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    pub enum UpdateMode {
        /// The whole update runs before the next step.
        Serial,
        /// The update runs layer by layer during the next forward pass; the same bits as `Serial`.
        Overlapped,
        /// Segments are updated during the last backward pass of a step, as if the step is neither
        /// clipped nor skipped, into second arrays of the states. If the step is clipped or
        /// skipped, they are updated again after the decision. The bits are those of `Serial`. With
        /// `optimizer: Device` this mode is `Overlapped`.
        Speculative,
        /// The update of step k runs during the whole step k + 1, which computes on the parameters
        /// of step k - 1. This is not exact: steps up to `after_step` are exact, and the next step
        /// is stale. With `optimizer: Device` this mode is `Overlapped`.
        Delayed["(after_step: 40)"] {
            /// Number of the optimizer step whose update is the first delayed update; all earlier
            /// updates are exact. 0 means the same as 1.
            after_step: u64 = uint(0..=super::STEPS, KeyDefault::Required("after_step: 40"));
        },
        /// `Speculative` or `Overlapped`, as `predict::choose` decides; `Overlapped` before that.
        Auto,
    }
}

/// Share of the parameters that `Speculative` updates before the decision on the step.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub enum SpeculatedFraction {
    /// The share that `predict::choose` finds.
    Auto,
    /// A share from 0 to 1.
    #[serde(untagged)]
    Share(f32),
}

impl SpeculatedFraction {
    /// Share that is used if no better share is known.
    pub const USUAL: f32 = 0.5;

    /// Returns the share; [`USUAL`](Self::USUAL) for `Auto`.
    pub const fn share(self) -> f32 {
        match self {
            Self::Auto => Self::USUAL,
            Self::Share(share) => share,
        }
    }
}

impl Section<'_, '_> {
    fn speculated(&mut self, key: Declaration) -> SpeculatedFraction {
        let share = self.float_or_auto(key, Interval::closed(0.0, 1.0));
        share.map_or(SpeculatedFraction::Auto, SpeculatedFraction::Share)
    }
}

choice! {
    /// How gradients and parameters cross PCIe.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    pub enum Transfer {
        /// Each 16-bit shard crosses as soon as it is ready.
        Streamed,
        /// The scheme of DeepSpeed in 2020, for comparison. The sum of gradients goes down with
        /// every micro-batch, the last time as fp32, and up again for the next micro-batch. The
        /// backward pass waits for these copies block by block. Parameters go up after the whole
        /// update. Needs `update: Serial` and the optimizer on the host.
        Blocking,
    }
}

choice! {
    /// Place where gradients of several micro-batches are summed in fp32.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    pub enum Accumulate {
        /// The device if the plan fits it, else the host.
        Auto,
        /// The device: 4/DP bytes of device memory for each parameter.
        Device,
        /// The host: 4 bytes of host memory for each parameter that a rank owns.
        Host,
    }
}

impl Choice for Sockets {
    type Context = ();
    const EXAMPLES: &'static [&'static str] = &["Auto", "Near", "All"];

    fn name(&self) -> &'static str {
        match self {
            Self::Auto => "Auto",
            Self::Near => "Near",
            Self::All => "All",
        }
    }

    fn read(variant: &str, _: &mut Section<'_, '_>, (): ()) -> Self {
        match variant {
            "Near" => Self::Near,
            "All" => Self::All,
            _ => Self::Auto,
        }
    }
}
