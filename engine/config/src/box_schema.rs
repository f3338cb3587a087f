//! Keys of the description of a box.

use super::declare::section;
use super::era::Fact;
use super::machine::TopologyNumber;
use super::reading::{Declaration, Interval, KeyDefault, Section};
use super::{ParallelConfig, machine};
use std::sync::Arc;
use topology::{Machine, counted};

section! {
    /// A described box (`configs/boxes/*.ron`): `(name: "DGX-2", gpus: 16, gpu_memory: "31.7GiB",
    /// numa_nodes: 2, node_memory: "755GiB", ..)`. `plan` needs only these keys; `simulate` also
    /// needs the rates. A rate of 0 is unknown.
    #[derive(Clone, Debug, Default, PartialEq)]
    pub struct BoxConfig, read(s, stem: &str) {
        /// Name of the box in messages.
        name: String = text(KeyDefault::Derived(stem.into(), "the file's name", &[]), |_| Ok(()));
        /// Path of the hwloc XML of one machine, which shows what shares links, cores and NUMA
        /// nodes. None: every GPU has its own link.
        topology: Option<String> = path(KeyDefault::Default(None));

        let described = machine::read(s, topology.as_deref());
        /// Number of equal machines.
        machines: usize = uint(1..=1024, KeyDefault::Default(1));
        /// Number of GPUs of all machines together. If `topology` is set, the topology gives this
        /// number.
        gpus: usize = counted(TopologyNumber {
            what: "GPU", most: 4096, or: KeyDefault::Required("gpus: 16"), machines,
            per_machine: described.as_ref().map(|m| m.gpus.len()),
        });
        /// Number of NUMA nodes of each machine. If `topology` is set, the topology gives this
        /// number. Otherwise the GPUs are dealt to the nodes evenly and in order.
        numa_nodes: usize = counted(TopologyNumber {
            what: "NUMA node", most: 1024, or: KeyDefault::Default(1), machines: 1,
            per_machine: described.as_ref().map(|m| m.numa_nodes.len()),
        });
        /// Memory of each GPU as CUDA reports it. onebox leaves 1.5 GiB of it to the CUDA context
        /// and NCCL.
        gpu_memory: u64 = bytes(1 << 50, KeyDefault::Required("gpu_memory: \"31.7GiB\""));
        /// Usable memory of each NUMA node.
        node_memory: u64 = bytes(1 << 50, KeyDefault::Required("node_memory: \"755GiB\""));
        /// Machine that the XML of `topology` describes.
        machine: Option<Arc<Machine>> = not_a_key(described.map(|machine| machine::with_node_memory(machine, node_memory)));
        /// Nominal rate between a machine and all other machines, in GB/s each way; a simulation
        /// uses 85 % of it. 0: unknown.
        network_gb_per_s: f32 = rate();
        /// Price of the whole box in US dollars per hour, for `onebox plan --model FOLDER --boxes`.
        /// A comment in the file gives the date and the source of the price. 0: unknown.
        usd_per_hour: f32 = rate();
        /// Rates of each GPU. 0: unknown.
        gpu: GpuConfig = section(|s| {
            s.removed("fused_attention", "`sm` says which kernels attention has, and what they take follows from these");
            GpuConfig::read(s)
        });
        /// Rates of the host. 0: unknown.
        host: HostConfig = section(HostConfig::read);
        /// Steps of two small models that `onebox bench --save-box` has run on the box: their measured
        /// speed divided by their simulated speed. 0: not measured.
        residual: ResidualConfig = section(ResidualConfig::read);
        /// Measured rates of the cores of a machine as virtual GPUs; `onebox bench --save-box`
        /// writes them.
        measured: Option<MeasuredConfig> = section(|s| {
            let measured = MeasuredConfig::read(s);
            (measured.cores > 0).then_some(measured)
        });
    }
}

section! {
    /// Rates of a GPU.
    #[derive(Clone, Debug, Default, PartialEq)]
    pub struct GpuConfig, read(s) {
        /// TFLOPS that large 16-bit matmuls with fp32 sums sustain in a training step, at the card's
        /// limit of power: less than the best of many shapes on a cool card, and far less than the
        /// peak on most data sheets. It decides most of a forecast. 0: unknown.
        gemm_tflops: f32 = rate();
        /// TFLOPS of fp32 arithmetic on a GPU, from the data sheet. 0: unknown.
        fp32_tflops: f32 = rate();
        /// Bandwidth of the GPU's memory in GB/s, from the data sheet. 0: unknown.
        memory_gb_per_s: f32 = rate();
        /// Rate between the GPUs of a machine in GB/s each way. A rate above `host.link_gb_per_s`
        /// is the nominal rate of NVLink, which is used only without `topology`; collectives reach
        /// 50 to 100 % of it, by GPU generation, number of GPUs and size. A lower rate is the
        /// measured rate at which each GPU sends in sums over PCIe (NCCL's bus bandwidth), which is
        /// used as it is. 0: sums without NVLink reach 60 % of a link on 2 GPUs, 40 % on 3 to 5,
        /// and 30 % on more. Measure this rate, since hosts differ by a factor of 15.
        peer_gb_per_s: f32 = rate();
        /// Clock that the GPU keeps under this box's limit of power, relative to its clock under
        /// the limit at which `gemm_tflops` holds: below 1 for a card that is capped. It lowers
        /// `gemm_tflops` and `fp32_tflops`.
        clock_share: f32 = float(Interval::closed(0.1, 1.0), KeyDefault::Default(1.0));
        /// Number of multiprocessors of a GPU. 0: unknown.
        processors: usize = uint_or_unknown(4..=1_000);
        /// Compute capability of a GPU: 70 for V100, 90 for H100. It decides which attention
        /// kernels exist, so a simulation needs it. 0: unknown.
        sm: u32 = uint_or_unknown(70..=200);
        /// Whether to simulate the software of 2020 that the authors of ZeRO-Offload had, for
        /// comparison.
        as_of_2020: bool = flag(KeyDefault::Default(false));
        /// Properties of the software of 2020 that a simulation with `gpu.as_of_2020` leaves out,
        /// to see their effect. Words with spaces between them: `scores` (a kernel for each
        /// operation on scores), `heads` (copies of heads), `small_kernels` (several kernels for
        /// bias, dropout, residual and loss), `pageable` (checkpoints in unpinned memory),
        /// `one_copier` (one rank copies gradients at a time), `adam_rate` (a slower CPU-Adam),
        /// `unscaling` (a separate unscaling pass).
        as_of_2020_without: Vec<Fact> = facts();
    }
}

section! {
    /// Rates of a host.
    #[derive(Clone, Debug, Default, PartialEq)]
    pub struct HostConfig, read(s) {
        /// Bandwidth of the memory channels of each NUMA node in GB/s, from the data sheet. 0:
        /// unknown.
        node_gb_per_s: f32 = rate();
        /// Measured rate at which one core reads and writes memory (STREAM), in GB/s. 0: unknown.
        core_gb_per_s: f32 = rate();
        /// Number of cores of a machine. 0: unknown. Used only without `topology`.
        cores: usize = uint(0..=100_000, KeyDefault::Default(0));
        /// Nominal rate of each GPU's link to the host, in GB/s each way (31.5 for PCIe 4.0 x16); a
        /// simulation uses 78 % of it, and 85 % from 40 GB/s on. 0: unknown. Used only without
        /// `topology`.
        link_gb_per_s: f32 = rate();
    }
}

section! {
    /// Measured speed of steps divided by their simulated speed.
    #[derive(Clone, Copy, Debug, Default, PartialEq)]
    pub struct ResidualConfig, read(s) {
        /// Measured over simulated speed of a step of a small model of the family GPT-2. 0: not
        /// measured.
        gpt2: f32 = rate();
        /// Measured over simulated speed of a step of a small model of the Llama family. 0: not
        /// measured.
        llama: f32 = rate();
    }
}

/// Reads the two rates of an op on one core: of its arithmetic, and of its operands.
macro_rules! flops_and_bytes {
    ($section:ident, $flops:literal, $bytes:literal, $of:literal) => {
        [
            ($flops, concat!("GFLOPS of one core in ", $of, ", while the other cores work, too.")),
            (
                $bytes,
                concat!(
                    "GB/s at which one core moves the operands of ",
                    $of,
                    "; this time adds to the time of the arithmetic."
                ),
            ),
        ]
        .map(|(key, doc)| $section.rate(Declaration::new(key, doc)))
    };
}

/// Documentation of the rate of an op.
const OF_AN_OP: &str = "GB/s of this op on one core. 0: not measured; the rate of the other storage, else \
                        `measured.other_gb_per_s`, is used.";

impl Section<'_, '_> {
    /// Reads a rate; 0 is unknown.
    fn rate(&mut self, key: Declaration) -> f32 {
        self.float(key, Interval::closed(0.0, 1e6), KeyDefault::Default(0.0))
    }

    /// Reads the properties of the software of 2020 that are left out: `"pageable scores"`.
    fn facts(&mut self, key: Declaration) -> Vec<Fact> {
        let known = |text: &str| {
            let all = text.split_whitespace().all(|name| Fact::named(name).is_some());
            all.then_some(()).ok_or(
                "these are words of: scores heads small_kernels pageable one_copier adam_rate unscaling",
            )
        };
        let names = self.text(key, KeyDefault::Default(String::new()), known);
        names.split_whitespace().filter_map(Fact::named).collect()
    }

    /// Reads a rate for each op of [`MEASURED_OPS`].
    fn ops(&mut self, key: &'static str, doc: &'static str) -> [f32; MEASURED_OPS.len()] {
        self.section(Declaration::new(key, doc), |s| {
            MEASURED_OPS.map(|name| s.rate(Declaration::new(name, OF_AN_OP)))
        })
    }

    /// Returns the value of a field that follows from keys and is not a key.
    fn not_a_key<T>(&mut self, _: Declaration, value: T) -> T {
        value
    }
}

impl BoxConfig {
    /// Nominal GB/s of NVLink between any two GPUs of a machine; 0 if only a topology says it, or if
    /// there is no NVLink.
    pub fn nvlink_gb_per_s(&self) -> f32 {
        let peers = self.gpu.peer_gb_per_s;
        if self.topology.is_none() && peers > self.host.link_gb_per_s { peers } else { 0.0 }
    }

    /// Measured GB/s at which each GPU sends in sums over PCIe; 0 if the box does not say it.
    pub fn pcie_sums_gb_per_s(&self) -> f32 {
        if self.nvlink_gb_per_s() > 0.0 { 0.0 } else { self.gpu.peer_gb_per_s }
    }

    /// Returns the box with other memory in each GPU and on each node.
    pub fn with_memory(&self, gpu_memory: u64, node_memory: u64) -> Self {
        let machine = self.machine.clone();
        let machine = machine.map(|machine| machine::with_node_memory(machine, node_memory));
        Self { gpu_memory, node_memory, machine, ..self.clone() }
    }

    /// Number of ranks of each machine under a grid; all ranks if one machine has enough GPUs.
    ///
    /// # Errors
    /// The grid does not fit the machines; the text says why.
    pub fn ranks_per_machine(&self, grid: &ParallelConfig) -> Result<usize, String> {
        let (tensor, data) = (grid.tensor, grid.data);
        let (world, of_one) = (tensor * data, self.gpus / self.machines);
        if !self.gpus.is_multiple_of(self.machines) {
            return Err(format!(
                "{} on {} do not divide",
                counted(self.gpus, "GPU"),
                counted(self.machines, "machine")
            ));
        }
        if world <= of_one {
            return Ok(world);
        }
        if !world.is_multiple_of(of_one) || !of_one.is_multiple_of(tensor) {
            return Err(format!(
                "{world} ranks in groups of {tensor} do not fill machines of {}",
                counted(of_one, "GPU")
            ));
        }
        Ok(of_one)
    }
}

section! {
    /// Measured rates of cores as virtual GPUs: rates of one core while the other cores work, too.
    #[derive(Clone, Debug, Default, PartialEq)]
    pub struct MeasuredConfig, read(s) {
        /// Number of cores of the measured machine. 0: not measured.
        cores: usize = uint(0..=100_000, KeyDefault::Default(0));

        let of_16 = flops_and_bytes!(s, "gemm_gflops_16", "gemm_gb_per_s_16", "matmuls with 16-bit storage");
        let of_32 = flops_and_bytes!(s, "gemm_gflops_32", "gemm_gb_per_s_32", "matmuls with 32-bit storage");
        /// Matmuls with 16-bit and 32-bit storage: GFLOPS, and then GB/s of the operands. Both
        /// times add up.
        gemm: [[f32; 2]; 2] = not_a_key([of_16, of_32]);

        let forward = flops_and_bytes!(s, "attention_gflops", "attention_gb_per_s", "attention, forward pass");
        let backward = flops_and_bytes!(s, "attention_backward_gflops", "attention_backward_gb_per_s", "attention, backward pass");
        /// Attention, forward and backward: GFLOPS, and then GB/s of the operands, as for `gemm`.
        attention: [[f32; 2]; 2] = not_a_key([forward, backward]);

        let of_16 = s.ops("gb_per_s_16", "Ops on 16-bit storage. 0: not measured.");
        let of_32 = s.ops("gb_per_s_32", "Ops on 32-bit storage. 0: not measured.");
        let pairs = of_16.into_iter().zip(of_32).map(|(a, b)| [a, b]);
        /// GB/s of each op, with 16-bit and 32-bit storage; 0: not measured.
        ops_gb_per_s: Vec<(&'static str, [f32; 2])> = not_a_key(MEASURED_OPS.into_iter().zip(pairs).collect());
        /// Microseconds until the kernel threads of a rank have started to share an op.
        thread_us: f32 = rate();
        /// Rate that each further core adds to a rank, as a share of the first core's rate.
        thread_share: f32 = float(Interval::closed(0.0, 1.0), KeyDefault::Default(1.0));
        /// GB/s on one core of an op without its own rate.
        other_gb_per_s: f32 = rate();
        /// Microseconds that each op needs in addition to its work.
        op_us: f32 = rate();
        /// Microseconds until the ranks of a collective have met.
        meeting_us: f32 = rate();
    }
}

/// Ops of virtual GPUs that `bench --save-box` measures.
pub const MEASURED_OPS: [&str; 29] = [
    "layer_norm",
    "layer_norm_backward",
    "rms_norm",
    "rms_norm_backward",
    "rotary",
    "rotary_backward",
    "swiglu",
    "swiglu_backward",
    "gelu",
    "gelu_backward",
    "bias_dropout_add",
    "dropout",
    "column_sum",
    "row_max",
    "cross_entropy_stats",
    "cross_entropy_backward",
    "embedding",
    "embedding_backward",
    "add_positions",
    "positions_backward",
    "add",
    "cast",
    "copy",
    "update",
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "accumulate",
    "adam_tile",
];
