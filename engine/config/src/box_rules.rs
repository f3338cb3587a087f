//! Numbers of a box that no machine has, and numbers that contradict each other. All of them are
//! reported together.

use super::BoxConfig;
use super::reading::{ConfigReader, Violation, format_bytes};
use topology::counted;

/// A number of a box, and the largest value that a machine may have.
struct Limit {
    key: &'static str,
    value: f64,
    /// Largest believable value; several times the value of the largest machines of 2026.
    most: f64,
    /// Unit, and the usual mistake.
    help: &'static str,
}

const fn limit(key: &'static str, value: f64, most: f64, help: &'static str) -> Limit {
    Limit { key, value, most, help }
}

/// Smallest rate of 16-bit matmuls, in TFLOPS, for which rates of a GPU are compared with each other. A
/// slower GPU is a stand-in, or the box of a test.
const LEAST_TFLOPS: f32 = 5.0;

/// Largest ratio of the fp32 rate to the rate of 16-bit matmuls. GPUs without tensor cores have 1.
const MOST_FP32: f32 = 1.0;

/// Bytes of GPU memory that no GPU of 2026 has.
const MOST_GPU_MEMORY: u64 = 4 << 40;

/// Reports all absurd and contradicting numbers of `b`.
pub(super) fn check(reader: &mut ConfigReader, b: &BoxConfig) {
    let absurd = limits(b).into_iter().filter(|limit| limit.value > limit.most).map(too_large);
    for violation in absurd.chain(contradictions(b)) {
        // A value that cannot be read is reported already, and a stand-in takes its place.
        let keys: Vec<&str> = violation.values.iter().map(|(key, _)| *key).collect();
        if reader.ok(&keys) {
            reader.refuse(violation);
        }
    }
}

fn limits(b: &BoxConfig) -> Vec<Limit> {
    let tera = "the unit is TFLOPS: 989 and not 989000; without sparsity";
    let giga = "the unit is GB/s: 3350 and not 3350000";
    let rate = |key, value: f32, most, help| limit(key, f64::from(value), most, help);
    vec![
        rate("gpu.gemm_tflops", b.gpu.gemm_tflops, 2e4, tera),
        rate("gpu.fp32_tflops", b.gpu.fp32_tflops, 1e3, tera),
        rate("gpu.memory_gb_per_s", b.gpu.memory_gb_per_s, 1e5, giga),
        rate("gpu.peer_gb_per_s", b.gpu.peer_gb_per_s, 1e4, giga),
        rate("host.node_gb_per_s", b.host.node_gb_per_s, 1e4, giga),
        rate("host.core_gb_per_s", b.host.core_gb_per_s, 1e3, giga),
        rate("host.link_gb_per_s", b.host.link_gb_per_s, 2e3, giga),
        rate("network_gb_per_s", b.network_gb_per_s, 2e4, "the unit is GB/s: 400 Gbit/s are 50"),
    ]
}

fn too_large(Limit { key, value, most, help }: Limit) -> Violation {
    Violation {
        message: format!("{value} is more than any machine has: at most {most} is believed"),
        help: help.into(),
        values: vec![(key, "far too large".into())],
    }
}

/// Contradictions between numbers of `b`.
fn contradictions(b: &BoxConfig) -> Vec<Violation> {
    let (gpu, host) = (&b.gpu, &b.host);
    let mut found = Vec::new();
    let mut contradict =
        |is_wrong: bool, why: &str, help: &str, values: [(&'static str, String); 2]| {
            if is_wrong {
                let (message, help) = (why.to_owned(), help.to_owned());
                found.push(Violation { message, help, values: values.into() });
            }
        };
    let rate = |rate: f32| format!("{rate} GB/s");
    // 0 is unknown and contradicts nothing.
    let both = |a: f32, b: f32| a > 0.0 && b > 0.0;
    let is_gpu = gpu.gemm_tflops >= LEAST_TFLOPS;
    contradict(
        is_gpu && gpu.fp32_tflops > MOST_FP32 * gpu.gemm_tflops,
        "fp32 arithmetic cannot be faster than 16-bit matmuls",
        "`gemm_tflops` is the rate of tensor cores, `fp32_tflops` the rate without them: look whether they are exchanged",
        [
            ("gpu.gemm_tflops", format!("{} TFLOPS", gpu.gemm_tflops)),
            ("gpu.fp32_tflops", format!("{} TFLOPS", gpu.fp32_tflops)),
        ],
    );
    let known = is_gpu && both(gpu.memory_gb_per_s, host.link_gb_per_s);
    contradict(
        known && host.link_gb_per_s > gpu.memory_gb_per_s,
        "the link to a GPU cannot be faster than the GPU's memory",
        "`link_gb_per_s` is the rate of a slot each way: 63 for PCIe 5.0 x16",
        [
            ("host.link_gb_per_s", rate(host.link_gb_per_s)),
            ("gpu.memory_gb_per_s", rate(gpu.memory_gb_per_s)),
        ],
    );
    let known = is_gpu && both(gpu.memory_gb_per_s, gpu.peer_gb_per_s);
    contradict(
        known && gpu.peer_gb_per_s > gpu.memory_gb_per_s,
        "a GPU cannot send faster than its memory reads",
        "`peer_gb_per_s` is the rate of NVLink each way: half of what data sheets say",
        [
            ("gpu.peer_gb_per_s", rate(gpu.peer_gb_per_s)),
            ("gpu.memory_gb_per_s", rate(gpu.memory_gb_per_s)),
        ],
    );
    contradict(
        both(host.core_gb_per_s, host.node_gb_per_s) && host.core_gb_per_s > host.node_gb_per_s,
        "one core cannot move more than all memory channels of its node",
        "`node_gb_per_s` is the sum of the channels of a NUMA node, `core_gb_per_s` what one core reaches",
        [
            ("host.core_gb_per_s", rate(host.core_gb_per_s)),
            ("host.node_gb_per_s", rate(host.node_gb_per_s)),
        ],
    );
    let alone = b.topology.is_none();
    contradict(
        alone && host.cores > 0 && host.cores < b.numa_nodes,
        "a machine has a core for each NUMA node at least",
        "`cores` counts the cores of a machine, and not those of a node",
        [
            ("host.cores", counted(host.cores, "core")),
            ("numa_nodes", counted(b.numa_nodes, "NUMA node")),
        ],
    );
    contradict(
        alone && b.machines > 1 && !b.gpus.is_multiple_of(b.machines),
        "equal machines have equally many GPUs",
        "`gpus` counts the GPUs of all machines together",
        [("gpus", counted(b.gpus, "GPU")), ("machines", counted(b.machines, "machine"))],
    );
    contradict(
        b.gpu_memory > MOST_GPU_MEMORY && b.gpu_memory > b.node_memory,
        "no GPU has so much memory, and more than the host",
        "`gpu_memory` is the memory of one GPU, `node_memory` that of one NUMA node: look whether they are exchanged",
        [("gpu_memory", format_bytes(b.gpu_memory)), ("node_memory", format_bytes(b.node_memory))],
    );
    found
}

#[cfg(test)]
mod tests {
    use crate::load_box;

    fn errors(keys: &str, gpu: &str, host: &str) -> String {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("b.ron");
        let text = format!(
            "(gpu_memory: \"8GiB\", node_memory: \"64GiB\", {keys}, gpu: ({gpu}), host: ({host}))"
        );
        std::fs::write(&path, text).unwrap();
        load_box(&path).map_or_else(|error| error.to_string(), |_| String::new())
    }

    #[test]
    fn all_absurd_and_contradicting_numbers_of_a_box_are_reported_at_once() {
        let gpu = "gemm_tflops: 900000, fp32_tflops: 67000, memory_gb_per_s: 20, peer_gb_per_s: 400, \
                   processors: 132, sm: 90";
        let host = "node_gb_per_s: 14, core_gb_per_s: 307, cores: 1, link_gb_per_s: 63";
        let error = errors("gpus: 7, machines: 2, numa_nodes: 4", gpu, host);
        for part in [
            "gpu.gemm_tflops: 900000 is more than any machine has: at most 20000",
            "gpu.fp32_tflops: 67000 is more than any machine has",
            "host.link_gb_per_s: the link to a GPU cannot be faster than the GPU's memory",
            "gpu.peer_gb_per_s: a GPU cannot send faster than its memory reads",
            "host.core_gb_per_s: one core cannot move more",
            "host.cores: a machine has a core for each NUMA node",
            "gpus: equal machines have equally many GPUs",
            "7 GPUs",
            "the unit is TFLOPS",
        ] {
            assert!(error.contains(part), "{part} in\n{error}");
        }
        assert!(error.contains("7 errors in "), "{error}");
    }

    #[test]
    fn numbers_that_machines_have_contradict_nothing() {
        for (gpu, host) in [
            ("", ""),
            // A GPU without tensor cores.
            ("gemm_tflops: 7, fp32_tflops: 7, memory_gb_per_s: 320", "link_gb_per_s: 15.75"),
            // Rates of a stand-in.
            ("gemm_tflops: 0.01, fp32_tflops: 0.05, memory_gb_per_s: 1", "link_gb_per_s: 12"),
            // One core reaches all channels.
            (
                "gemm_tflops: 165, fp32_tflops: 82.6",
                "node_gb_per_s: 40, core_gb_per_s: 40, cores: 1",
            ),
        ] {
            assert_eq!(errors("gpus: 2", gpu, host), "", "{gpu}, {host}");
        }
        let error = errors("gpus: 2", "gemm_tflops: 67, fp32_tflops: 720", "");
        assert!(error.contains("fp32 arithmetic cannot be faster"), "{error}");
    }
}
