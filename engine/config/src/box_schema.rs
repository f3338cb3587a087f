//! The description of a box.

use super::declare::section;
use super::era::Fact;
use super::machine::TopologyNumber;
use super::reading::{Declaration, Interval, KeyDefault, Section};
use super::{ParallelConfig, machine};
use std::sync::Arc;
use topology::{Machine, counted};

section! {
    /// A described box (`configs/boxes/*.ron`): `(name: "DGX-2", gpus: 16, gpu_memory: "31.7GiB",
    /// numa_nodes: 2, node_memory: "755GiB", ..)`. `plan` needs no more; `simulate` needs the rates. A rate of 0 is
    /// not known.
    #[derive(Clone, Debug, Default, PartialEq)]
    pub struct BoxConfig, read(s, stem: &str) {
        /// Name of the box, for messages.
        name: String = text(KeyDefault::Derived(stem.into(), "the file's name", &[]), |_| Ok(()));
        /// The hwloc XML of one machine: it says who shares links, cores and nodes. Without it every GPU has a link of
        /// its own.
        topology: Option<String> = path(KeyDefault::Default(None));

        let described = machine::read(s, topology.as_deref());
        /// Number of equal machines.
        machines: usize = uint(1..=1024, KeyDefault::Default(1));
        /// GPUs of all machines together. A topology says it by itself.
        gpus: usize = counted(TopologyNumber {
            what: "GPU", most: 4096, or: KeyDefault::Required("gpus: 16"), machines,
            per_machine: described.as_ref().map(|m| m.gpus.len()),
        });
        /// NUMA nodes of a machine. Without a topology GPUs are dealt to them evenly, in order.
        numa_nodes: usize = counted(TopologyNumber {
            what: "NUMA node", most: 1024, or: KeyDefault::Default(1), machines: 1,
            per_machine: described.as_ref().map(|m| m.numa_nodes.len()),
        });
        /// Usable memory of each GPU.
        gpu_memory: u64 = bytes(1 << 50, KeyDefault::Required("gpu_memory: \"31.7GiB\""));
        /// Usable memory of each NUMA node.
        node_memory: u64 = bytes(1 << 50, KeyDefault::Required("node_memory: \"755GiB\""));
        /// The machine that the XML describes.
        machine: Option<Arc<Machine>> = not_a_key(described.map(|machine| machine::with_node_memory(machine, node_memory)));
        /// GB/s each way between a machine and the others.
        network_gb_per_s: f32 = rate();
        /// Rates of each GPU. 0: not known.
        gpu: GpuConfig = section(|s| {
            s.removed("fused_attention", "`sm` says which kernels attention has, and what they take follows from these");
            GpuConfig::read(s)
        });
        /// Rates of the host. 0: not known.
        host: HostConfig = section(HostConfig::read);
        /// What the cores of a machine reach as virtual GPUs, as `onebox bench --save-box` writes it.
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
        /// TFLOPS of large 16-bit matrix products with fp32 sums, sustained, as published measurements have it.
        gemm_tflops: f32 = rate();
        /// TFLOPS of fp32 arithmetic, from the data sheet.
        fp32_tflops: f32 = rate();
        /// GB/s of the GPU's memory, from the data sheet.
        memory_gb_per_s: f32 = rate();
        /// GB/s each way between two GPUs of a machine, as NVLink. 0: what goes between them takes the links to the
        /// host. Used without `topology`.
        peer_gb_per_s: f32 = rate();
        /// Multiprocessors.
        processors: usize = uint_or_unknown(4..=1_000);
        /// Compute capability: 70 for V100, 90 for H100. It says what kernels attention has, so a simulation needs it.
        /// 0: not known.
        sm: u32 = uint_or_unknown(70..=200);
        /// Software as the authors of ZeRO-Offload had it in 2020, to compare with.
        as_of_2020: bool = flag(KeyDefault::Default(false));
        /// What of the software of 2020 is left out, to see what it changes.
        as_of_2020_without: Vec<Fact> = facts();
    }
}

section! {
    /// Rates of a host.
    #[derive(Clone, Debug, Default, PartialEq)]
    pub struct HostConfig, read(s) {
        /// GB/s of the memory channels of each node, from the data sheet.
        node_gb_per_s: f32 = rate();
        /// GB/s that one core reads and writes.
        core_gb_per_s: f32 = rate();
        /// Cores of a machine. Used without `topology`.
        cores: usize = uint(0..=100_000, KeyDefault::Default(0));
        /// GB/s each way of each GPU's link. Used without `topology`.
        link_gb_per_s: f32 = rate();
    }
}

impl Section<'_, '_> {
    /// A rate that may be unknown.
    fn rate(&mut self, key: Declaration) -> f32 {
        self.float(key, Interval::closed(0.0, 1e6), KeyDefault::Default(0.0))
    }

    /// What of 2020 is left out: `"pageable scores"`.
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

    /// The arithmetic of a core, and the bytes that it takes beside that.
    fn flops_and_bytes(&mut self, flops: &'static str, bytes: &'static str) -> [f32; 2] {
        let flops = Declaration::new(flops, "GFLOPS of one core.");
        let bytes = Declaration::new(bytes, "GB/s of the operands, after the arithmetic.");
        [flops, bytes].map(|key| self.rate(key))
    }

    /// A rate of each op of [`MEASURED_OPS`].
    fn ops(&mut self, key: &'static str, doc: &'static str) -> [f32; MEASURED_OPS.len()] {
        self.section(Declaration::new(key, doc), |s| {
            MEASURED_OPS.map(|name| s.rate(Declaration::new(name, "GB/s of this op.")))
        })
    }

    /// A field of the struct that follows from keys, and is none.
    fn not_a_key<T>(&mut self, _: Declaration, value: T) -> T {
        value
    }
}

impl BoxConfig {
    /// The same box with other memory in each GPU and on each node.
    pub fn with_memory(&self, gpu_memory: u64, node_memory: u64) -> Self {
        let machine = self.machine.clone();
        let machine = machine.map(|machine| machine::with_node_memory(machine, node_memory));
        Self { gpu_memory, node_memory, machine, ..self.clone() }
    }

    /// Ranks of each machine under a grid: all of them, where one machine has the GPUs.
    ///
    /// # Errors
    /// In words, why the grid and the machines do not go together.
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
    /// What cores reach as virtual GPUs, one core while the others work too.
    #[derive(Clone, Debug, Default, PartialEq)]
    pub struct MeasuredConfig, read(s) {
        /// Cores. 0: nothing was measured.
        cores: usize = uint(0..=100_000, KeyDefault::Default(0));

        let of_16 = s.flops_and_bytes("gemm_gflops_16", "gemm_gb_per_s_16");
        let of_32 = s.flops_and_bytes("gemm_gflops_32", "gemm_gb_per_s_32");
        /// Matrix products, 16-bit and 32-bit storage: GFLOPS, and GB/s of their operands, one after the other.
        gemm: [[f32; 2]; 2] = not_a_key([of_16, of_32]);

        let forward = s.flops_and_bytes("attention_gflops", "attention_gb_per_s");
        let backward = s.flops_and_bytes("attention_backward_gflops", "attention_backward_gb_per_s");
        /// Attention, forward and backward: likewise.
        attention: [[f32; 2]; 2] = not_a_key([forward, backward]);

        let of_16 = s.ops("gb_per_s_16", "Ops on 16-bit storage. 0: not measured.");
        let of_32 = s.ops("gb_per_s_32", "Ops on 32-bit storage. 0: not measured.");
        let pairs = of_16.into_iter().zip(of_32).map(|(a, b)| [a, b]);
        /// GB/s by op, 16-bit and 32-bit storage; 0: not measured.
        ops_gb_per_s: Vec<(&'static str, [f32; 2])> = not_a_key(MEASURED_OPS.into_iter().zip(pairs).collect());
        /// Microseconds until the threads of a rank share an op.
        thread_us: f32 = rate();
        /// What each further core adds to the first core of a rank.
        thread_share: f32 = float(Interval::closed(0.0, 1.0), KeyDefault::Default(1.0));
        /// GB/s of an op that is not listed.
        other_gb_per_s: f32 = rate();
        /// Microseconds that any op takes.
        op_us: f32 = rate();
        /// Microseconds until ranks have met.
        meeting_us: f32 = rate();
    }
}

/// Ops of virtual GPUs whose speed `bench --save-box` measures.
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
