//! Where the optimizer is and when it runs.

use super::declare::{choice, section};
use super::reading::{Choice, Declaration, Interval, KeyDefault, Section};
use serde::Serialize;
use topology::Sockets;

/// Default of [`OffloadConfig::tile_elements`]: 4 MiB of 16-bit parameters, so that starting a copy takes little of its
/// time.
pub const TILE_ELEMENTS: usize = 1 << 21;

/// Default of [`OffloadConfig::bucket_elements`].
pub const BUCKET_ELEMENTS: usize = 50_000_000;

/// `offload.first_forward` for all micro-batches of any step.
pub const ALL_TOGETHER: usize = 4096;

section! {
    /// ZeRO-Offload.
    #[derive(Clone, Debug, PartialEq, Serialize)]
    pub struct OffloadConfig, read(s) {
        /// Where the optimizer states and the update are.
        optimizer: Placement = choice(KeyDefault::Default(Placement::Host)), resume: Placement;
        /// Where parameters are between their uses. `Host`: on the host, from where those of each block come up ahead
        /// of each use, so that a model may be larger than the GPUs' memory; the same bits. It needs the optimizer on
        /// the host.
        parameters: ParameterPlace = choice(KeyDefault::Default(ParameterPlace::Device)), resume: Placement;
        /// With `parameters: Host`: blocks whose parameters a GPU holds at once, besides the resident ones. None: 3, or
        /// 2 where 3 do not fit.
        ring: Option<usize> = uint_or_none(2..=64), resume: Placement;
        /// With `parameters: Host`: blocks whose parameters stay on the GPU all the same, spread evenly. None: as many
        /// as fit.
        resident_blocks: Option<usize> = uint_or_none(0..=10_000), resume: Placement;
        /// When the update runs. `Overlapped` and `Speculative` give the bits of `Serial`; `Speculative` begins during
        /// the backward pass, and takes more memory; with `Delayed` each step computes on parameters of one step
        /// earlier. `Auto` is `Speculative` where that fits and gains, else `Overlapped`; `plan`, `simulate` and
        /// `train` say why.
        update: UpdateMode = choice(KeyDefault::Default(UpdateMode::Overlapped)), resume: Placement;
        /// Share of the parameters behind the embedding whose update `Speculative` begins during the backward pass,
        /// rounded down to whole segments, the last ones: first an output projection of its own, then the final norm
        /// and the last blocks. Their states take their bytes in host memory twice. `Auto`: on a described box the
        /// share of the fastest simulated step, elsewhere at most 0.5, as far as it fits.
        speculated_fraction: SpeculatedFraction = speculated(), resume: Placement;
        /// How gradients and parameters cross PCIe. `Blocking` is what DeepSpeed did in 2020, to compare with; it needs
        /// `update: Serial` and the optimizer on the host.
        transfer: Transfer = choice(KeyDefault::Default(Transfer::Streamed)), resume: Layout;
        /// Where gradients of several micro-batches are summed, in fp32: on the GPU (4/DP bytes for each parameter) or
        /// on the host (4 bytes for each owned parameter). `Auto`: on the GPU where the plan fits.
        accumulate: Accumulate = choice(KeyDefault::Default(Accumulate::Auto)), resume: Placement;
        /// How the moments of AdamW are kept in host memory. `Bf16` takes 2 bytes for each and rounds up or down by
        /// chance: close to fp32, not equal. Only with the whole optimizer on the host.
        moments: Moments = choice(KeyDefault::Default(Moments::Fp32)), resume: Layout;
        /// How fp32 parameters are kept in host memory. `Split` keeps the bf16 parameter and the 2 bytes that make it
        /// fp32: the same bits in 2 bytes less. It needs `precision: Bf16` or `Fp8`, and some of the optimizer on the
        /// host.
        master: Master = choice(KeyDefault::Default(Master::Fp32)), resume: Placement;
        /// Most elements of a gradient bucket before it is reduced in pieces.
        bucket_elements: usize = uint(1024..=1 << 40, KeyDefault::Default(BUCKET_ELEMENTS)), resume: Placement;
        /// Most elements of a tile of the update on the host, whose parameters go up in one copy: 2 bytes each, with
        /// `precision: Fp32` 4.
        tile_elements: usize = uint(1024..=1 << 40, KeyDefault::Default(TILE_ELEMENTS)), resume: Placement;
        /// Segments by which uploads of parameters run ahead of the forward pass.
        lookahead: usize = uint(1..=64, KeyDefault::Default(1)), resume: Placement;
        /// Every block has a gradient buffer of its own, as in PyTorch, to compare with. Otherwise two take turns.
        keep_gradients: bool = flag(KeyDefault::Default(false)), resume: Placement;
        /// Micro-batches whose first forward pass goes through each block together, so that an exact update hides
        /// behind all of them. It takes a set of block inputs for each, and `recompute: Block`. With `parameters: Host`
        /// all passes of a step go so, forward and backward, in groups of so many: parameters cross PCIe twice for each
        /// group.
        first_forward: usize = uint(1..=ALL_TOGETHER as u64, together(parameters)), resume: Placement;
        /// Sockets whose cores and memory a rank uses: its own (`Near`), or `All`. `Auto`: its own, and all where its
        /// own do not hold its states and another socket has no rank.
        sockets: Sockets = choice(KeyDefault::Default(Sockets::Auto)), resume: Placement;
    }
}

/// All micro-batches where parameters cross PCIe for each group of them.
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
    /// Where the optimizer is.
    #[derive(Clone, Copy, Debug, PartialEq, Serialize)]
    pub enum Placement {
        /// States and step on the host.
        Host,
        /// States and step on the device, partitioned over DP: no offload.
        Device,
        /// States and step of the parameters that the forward pass needs first on the device, of the others on the host.
        Split["(device_fraction: 0.2)"] {
            /// Share of the parameters whose states are on the GPUs, rounded to what every rank can own alike.
            device_fraction: f32 = float(Interval::closed(0.0, 1.0), KeyDefault::Required("device_fraction: 0.2"));
        },
    }
}

choice! {
    /// Where the 16-bit parameters are between their uses.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    pub enum ParameterPlace {
        /// On the device, all of them.
        Device,
        /// On the host, from where each block's come up for each use; the same bits.
        Host,
    }
}

choice! {
    /// How the moments of AdamW are kept in host memory.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    pub enum Moments {
        /// 4 bytes each.
        Fp32,
        /// 2 bytes each, rounded up or down by chance so that the mean is right: close to fp32, not equal. The random bits
        /// are those of seed, step, tensor and index, in every layout. Only with the whole optimizer on the host.
        Bf16,
    }
}

choice! {
    /// How master weights are kept in host memory.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    pub enum Master {
        /// 4 bytes each, besides the 16-bit parameter.
        Fp32,
        /// The bf16 parameter and the 2 bytes that make it the fp32 master: the same bits, 2 bytes less. Needs
        /// `precision: Bf16` or `Fp8`, and some of the optimizer on the host.
        Split,
    }
}

choice! {
    /// When the update runs.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    pub enum UpdateMode {
        /// All of it before the next step.
        Serial,
        /// Layer by layer under the next forward; the same bits as `Serial`.
        Overlapped,
        /// Segments are updated during the last backward pass of a step as if neither clipping nor a skip followed,
        /// into second arrays of
        /// the states, and again behind the decision where one did; the same bits as `Serial`.
        /// Idle where `optimizer` is `Device`: there it is `Overlapped`.
        Speculative,
        /// The update of step k runs under the whole of step k + 1, which computes on the parameters of step k - 1. Not
        /// exact:
        /// steps up to `after_step` are, the next one is stale. Idle where `optimizer` is `Device`: there it is
        /// `Overlapped`.
        Delayed["(after_step: 40)"] {
            /// The update of this step is the first delayed one.
            after_step: u64 = uint(0..=super::STEPS, KeyDefault::Required("after_step: 40"));
        },
        /// `Speculative` or `Overlapped`, as [`choose`](predict::choose) finds; `Overlapped` before it has looked.
        Auto,
    }
}

/// Share of the parameters that `Speculative` updates ahead of the decision.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub enum SpeculatedFraction {
    /// As [`choose`](predict::choose) finds.
    Auto,
    /// In [0, 1].
    #[serde(untagged)]
    Share(f32),
}

impl SpeculatedFraction {
    /// Where nothing else is known.
    pub const USUAL: f32 = 0.5;

    /// The share: [`USUAL`](Self::USUAL) before anyone has chosen.
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
        /// 16-bit shards as they are ready.
        Streamed,
        /// As DeepSpeed in 2020, to compare with: fp32 gradients down with every micro-batch (and the sum up), the
        /// backward pass waits for them block by block, parameters go up after the whole update. Needs
        /// `update: Serial` and the optimizer on the host.
        Blocking,
    }
}

choice! {
    /// Where gradients of several micro-batches are summed, in fp32.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
    pub enum Accumulate {
        /// The device when the plan fits it.
        Auto,
        /// 4/DP bytes per parameter of device memory.
        Device,
        /// 4 bytes per owned parameter of host memory.
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
