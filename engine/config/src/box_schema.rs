//! Every key of the description of a box: its type, its range, its default, its meaning.

use super::machine::{self, Told};
use super::reading::section::{Or, Section};
use super::reading::value::Interval;
use super::*;

/// Reads the description of a box.
pub(super) fn described_box(s: &mut Section<'_, '_>, stem: &str) -> BoxConfig {
    let name = s.text(
        "name",
        Or::Derived(stem.into(), "the file's name", &[]),
        |_| Ok(()),
        "Name of the box, for messages.",
    );
    let topology = s.path_or_none("topology", "The hwloc XML of one machine: it says who shares links, cores and nodes. Without it every GPU has a link of its own.");
    let machine = machine::read(s, topology.as_deref());
    let machines = s.uint("machines", 1..=1024, Or::Default(1), "Number of equal machines.");
    let or = Or::Required("gpus: 16");
    let doc = "GPUs of all machines together. A topology says it by itself.";
    let told = Told { key: "gpus", what: "GPU", most: 4096, or, machines, doc };
    let gpus = machine::number(s, told, machine.as_ref().map(|m| m.gpus.len()));
    let (or, what) = (Or::Default(1), "NUMA node");
    let doc =
        "NUMA nodes of a machine. Without a topology GPUs are dealt to them evenly, in order.";
    let told = Told { key: "numa_nodes", what, most: 1024, or, machines: 1, doc };
    let numa_nodes = machine::number(s, told, machine.as_ref().map(|m| m.numa_nodes.len()));
    let gpu_memory = s.bytes(
        "gpu_memory",
        1 << 50,
        Or::Required("gpu_memory: \"31.7GiB\""),
        "Usable memory of each GPU.",
    );
    let node_memory = s.bytes(
        "node_memory",
        1 << 50,
        Or::Required("node_memory: \"755GiB\""),
        "Usable memory of each NUMA node.",
    );
    BoxConfig {
        name,
        gpus,
        gpu_memory,
        numa_nodes,
        node_memory,
        topology,
        machine: machine.map(|machine| machine::with_node_memory(machine, node_memory)),
        machines,
        network_gb_per_s: rate(s, "network_gb_per_s", "GB/s each way between a machine and the others."),
        gpu: s.section("gpu", "Rates of each GPU. 0: not known.", gpu),
        host: s.section("host", "Rates of the host. 0: not known.", |s| HostConfig {
            node_gb_per_s: rate(s, "node_gb_per_s", "GB/s of the memory channels of each node, from the data sheet."),
            core_gb_per_s: rate(s, "core_gb_per_s", "GB/s that one core reads and writes."),
            cores: s.uint("cores", 0..=100_000, Or::Default(0), "Cores of a machine. Used without `topology`."),
            link_gb_per_s: rate(s, "link_gb_per_s", "GB/s each way of each GPU's link. Used without `topology`."),
        }),
        measured: s.section("measured", "What the cores of a machine reach as virtual GPUs, as `onebox bench --save-box` writes it.", measured),
    }
}

fn gpu(s: &mut Section<'_, '_>) -> GpuConfig {
    s.removed(
        "fused_attention",
        "`sm` says which kernels attention has, and what they take follows from these",
    );
    GpuConfig {
            gemm_tflops: rate(s, "gemm_tflops", "TFLOPS of large 16-bit matrix products with fp32 sums, sustained, as published measurements have it."),
            fp32_tflops: rate(s, "fp32_tflops", "TFLOPS of fp32 arithmetic, from the data sheet."),
            memory_gb_per_s: rate(s, "memory_gb_per_s", "GB/s of the GPU's memory, from the data sheet."),
            peer_gb_per_s: rate(s, "peer_gb_per_s", "GB/s each way between two GPUs of a machine, as NVLink. 0: what goes between them takes the links to the host. Used without `topology`."),
            processors: s.uint_or_unknown("processors", 4..=1_000, "Multiprocessors."),
            sm: s.uint_or_unknown("sm", 70..=200, "Compute capability: 70 for V100, 90 for H100. It says what kernels attention has, so a simulation needs it. 0: not known.") as u32,
            as_of_2020: s.flag("as_of_2020", false, "Software as the authors of ZeRO-Offload had it in 2020, to compare with."),
            as_of_2020_without: facts(s),
        }
}

/// What of 2020 is left out: `"pageable scores"`.
fn facts(s: &mut Section<'_, '_>) -> Vec<Fact> {
    let known = |text: &str| {
        let all = text.split_whitespace().all(|name| Fact::named(name).is_some());
        all.then_some(()).ok_or(
            "these are words of: scores heads small_kernels pageable one_copier adam_rate unscaling",
        )
    };
    let names = s.text(
        "as_of_2020_without",
        Or::Default(String::new()),
        known,
        "What of the software of 2020 is left out, to see what it changes.",
    );
    names.split_whitespace().filter_map(Fact::named).collect()
}

/// A rate that may be unknown.
fn rate(s: &mut Section<'_, '_>, key: &'static str, doc: &'static str) -> f32 {
    s.float(key, Interval::closed(0.0, 1e6), Or::Default(0.0), doc)
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

fn measured(s: &mut Section<'_, '_>) -> Option<MeasuredConfig> {
    let cores = s.uint("cores", 0..=100_000, Or::Default(0), "Cores. 0: nothing was measured.");
    let pair = |s: &mut Section<'_, '_>, [flops, bytes]: [&'static str; 2]| {
        [
            rate(s, flops, "GFLOPS of one core."),
            rate(s, bytes, "GB/s of the operands, after the arithmetic."),
        ]
    };
    let gemm = [
        pair(s, ["gemm_gflops_16", "gemm_gb_per_s_16"]),
        pair(s, ["gemm_gflops_32", "gemm_gb_per_s_32"]),
    ];
    let attention = [
        pair(s, ["attention_gflops", "attention_gb_per_s"]),
        pair(s, ["attention_backward_gflops", "attention_backward_gb_per_s"]),
    ];
    let ops = |s: &mut Section<'_, '_>| MEASURED_OPS.map(|name| rate(s, name, "GB/s of this op."));
    let of_16 = s.section("gb_per_s_16", "Ops on 16-bit storage. 0: not measured.", ops);
    let of_32 = s.section("gb_per_s_32", "Ops on 32-bit storage. 0: not measured.", ops);
    let measured = MeasuredConfig {
        cores,
        thread_us: rate(s, "thread_us", "Microseconds until the threads of a rank share an op."),
        thread_share: s.float(
            "thread_share",
            Interval::closed(0.0, 1.0),
            Or::Default(1.0),
            "What each further core adds to the first core of a rank.",
        ),
        gemm,
        attention,
        ops_gb_per_s: MEASURED_OPS
            .into_iter()
            .zip(of_16.into_iter().zip(of_32).map(|(a, b)| [a, b]))
            .collect(),
        other_gb_per_s: rate(s, "other_gb_per_s", "GB/s of an op that is not listed."),
        op_us: rate(s, "op_us", "Microseconds that any op takes."),
        meeting_us: rate(s, "meeting_us", "Microseconds until ranks have met."),
    };
    (cores > 0).then_some(measured)
}
