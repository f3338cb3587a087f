//! Keys of a box that a plan or a simulation needs: examples, and the places where a user finds their
//! values. One error lists all keys that a box lacks, and `onebox boxes --new` writes them into a file.

use super::BoxConfig;
use super::reading::{ConfigReader, Key, MISSING, Problem, Spot, described};
use std::fmt::Write as _;
use topology::counted;

/// Every key of the description of a box.
pub fn box_keys() -> Vec<Key> {
    described(|s| drop(BoxConfig::read(s, "")))
}

/// A key of a box.
struct KeySource {
    /// Dotted name, such as `gpu.sm`.
    name: &'static str,
    /// Example of a value, in RON.
    example: &'static str,
    /// Place where a user finds the value.
    source: &'static str,
}

const fn key(name: &'static str, example: &'static str, source: &'static str) -> KeySource {
    KeySource { name, example, source }
}

/// All keys of a new box, in the order of the file. The keys of a section stand together.
const SOURCES: [KeySource; 18] = [
    key("name", "\"my box\"", "Any words."),
    key("gpus", "1", "`nvidia-smi -L` lists the GPUs of a machine."),
    key(
        "gpu_memory",
        "\"79.6GiB\"",
        "`onebox doctor` shows it on that machine; it is a little less than the label says.",
    ),
    key("numa_nodes", "1", "`lscpu` shows it (NUMA node(s))."),
    key(
        "node_memory",
        "\"125GiB\"",
        "`free` shows the memory of a machine (available); divide it by the number of NUMA nodes.",
    ),
    key(
        "network_gb_per_s",
        "0",
        "The sum of the network cards of a machine: 400 Gbit/s are 50. It counts if the box has several machines.",
    ),
    key("usd_per_hour", "0", "The offer of the seller or of the cloud, with its date."),
    key(
        "gpu.gemm_tflops",
        "720",
        "`onebox bench --save-box FILE` measures it on that machine; the peak of a data sheet is 10 to 50 % higher.",
    ),
    key("gpu.fp32_tflops", "67", "The data sheet of the GPU: FP32 without tensor cores."),
    key("gpu.memory_gb_per_s", "3350", "The data sheet of the GPU: memory bandwidth."),
    key(
        "gpu.peer_gb_per_s",
        "0",
        "The data sheet of the GPU: half of the NVLink bandwidth, which counts both ways. Without NVLink \
         `onebox bench --save-box FILE` measures it.",
    ),
    key(
        "gpu.clock_share",
        "1",
        "`nvidia-smi -q -d POWER,CLOCK` under load, on a capped card and on one at its full limit of power; 1 without a cap.",
    ),
    key(
        "gpu.processors",
        "132",
        "The white paper of the GPU: SMs. `onebox bench --save-box FILE` writes it.",
    ),
    key(
        "gpu.sm",
        "90",
        "`nvidia-smi --query-gpu=compute_cap --format=csv`, without the point: 9.0 is 90.",
    ),
    key(
        "host.node_gb_per_s",
        "307",
        "Channels x transfers a second x 8 bytes: 8 channels of DDR5-4800 have 8 x 38.4 = 307.",
    ),
    key(
        "host.core_gb_per_s",
        "14",
        "STREAM (triad) on one core, or `onebox bench --save-box FILE` on that machine.",
    ),
    key("host.cores", "32", "`lscpu` shows it (cores of a socket x sockets)."),
    key(
        "host.link_gb_per_s",
        "63",
        "The generation and the width of the slot: 31.5 for PCIe 4.0 x16, 63 for PCIe 5.0 x16.",
    ),
];

/// Keys of `b` that a simulation needs and that are 0. A box of measured cores needs none of them.
pub fn missing_rates(b: &BoxConfig) -> Vec<&'static str> {
    if b.measured.is_some() {
        return Vec::new();
    }
    let is_alone = b.topology.is_none();
    let needed = [
        ("network_gb_per_s", b.network_gb_per_s, b.machines > 1),
        ("gpu.gemm_tflops", b.gpu.gemm_tflops, true),
        ("gpu.fp32_tflops", b.gpu.fp32_tflops, true),
        ("gpu.memory_gb_per_s", b.gpu.memory_gb_per_s, true),
        ("gpu.processors", b.gpu.processors as f32, true),
        ("gpu.sm", b.gpu.sm as f32, true),
        ("host.node_gb_per_s", b.host.node_gb_per_s, true),
        ("host.core_gb_per_s", b.host.core_gb_per_s, true),
        ("host.cores", b.host.cores as f32, is_alone),
        ("host.link_gb_per_s", b.host.link_gb_per_s, is_alone),
    ];
    let lacks = |(_, value, is_needed): &(&str, f32, bool)| *is_needed && *value <= 0.0;
    needed.into_iter().filter(lacks).map(|(name, ..)| name).collect()
}

/// Sentences about the key `name` of a box: its meaning and its source.
pub fn meaning_and_source(name: &str) -> String {
    let meaning = box_keys().into_iter().find(|key| key.name == name);
    let meaning = meaning.unwrap_or_else(|| unreachable!("a box has no key `{name}`"));
    let source = SOURCES.iter().find(|source| source.name == name);
    let source = source.unwrap_or_else(|| unreachable!("`{name}` has no source"));
    format!("{} Source: {}", meaning.doc, source.source)
}

/// Replaces the errors about missing keys of the box `b` by one error, which also lists the keys that
/// only a simulation needs. Other errors do not change.
pub(super) fn join_missing(reader: &mut ConfigReader, b: &BoxConfig) {
    let missing: Vec<Problem> =
        reader.problems.extract_if(.., |problem| problem.message == MISSING).collect();
    let Some(first) = missing.first() else { return };
    let required = missing.iter().map(|problem| problem.key.as_str());
    let simulated = missing_rates(b).into_iter().filter(|name| reader.ok(&[*name]));
    let names: Vec<&str> = required.chain(simulated).collect();
    let note = |(number, name): (usize, &&str)| {
        let by = if number < missing.len() { "" } else { " (for a simulation)" };
        Spot::Note(format!("`{name}`{by}: {}", meaning_and_source(name)))
    };
    let spots = first.spots.iter().cloned();
    let spots = spots.chain(names.iter().enumerate().map(note)).collect();
    let example = |name: &&str| {
        let source = SOURCES.iter().find(|source| source.name == *name);
        source.map(|source| {
            let key = name.rsplit('.').next().unwrap_or(name);
            format!("`{key}: {}`", source.example)
        })
    };
    let examples: Vec<String> = names[..missing.len()].iter().filter_map(example).collect();
    let more = match names.len() - missing.len() {
        0 => String::new(),
        more => format!(", and {} that a simulation needs, too", counted(more, "key")),
    };
    let problem = Problem {
        key: first.key.clone(),
        message: format!("the box lacks {} that a plan needs{more}", counted(missing.len(), "key")),
        help: format!(
            "add such as {}, or begin with `onebox boxes --new FILE`",
            examples.join(", ")
        ),
        spots,
    };
    reader.problems.push(problem);
}

/// First words of a new box.
const HEAD: &str = "\
// A box to fill in, written by `onebox boxes --new`. Remove the `//` before a key, and write its value:
// `onebox plan CONFIG --box FILE` needs `gpus`, `gpu_memory` and `node_memory`, and `onebox simulate` all rates.
// What stands there is an example, and says nothing about your machine. `onebox bench --save-box FILE` measures
// the machine on which it runs, and writes such a file. `topology: \"FILE\"` adds an export of hwloc, which says who
// shares links (docs/topology.md); `machines` says how many equal machines the box has.
";

/// Maximum columns of a comment.
const WIDTH: usize = 112;

/// Text of a box to fill in: each key with its meaning, its source and an example, as comments.
pub fn new_box() -> String {
    let mut out = format!("{HEAD}(\n");
    let mut section = "";
    for KeySource { name, example, .. } in &SOURCES {
        let (of, key) = name.split_once('.').unwrap_or(("", name));
        if of != section {
            out += if section.is_empty() { "" } else { "    ),\n" };
            let _ = writeln!(out, "    {of}: (");
            section = of;
        }
        let indent = if of.is_empty() { "    " } else { "        " };
        comment(&mut out, indent, &meaning_and_source(name));
        let _ = writeln!(out, "{indent}// {key}: {example},");
    }
    out + "    ),\n)\n"
}

/// Appends `text` as lines of a comment.
fn comment(out: &mut String, indent: &str, text: &str) {
    let mut line = String::new();
    for word in text.split_whitespace() {
        if !line.is_empty() && indent.len() + line.len() + word.len() > WIDTH {
            let _ = writeln!(out, "{indent}//{line}");
            line.clear();
        }
        line.push(' ');
        line += word;
    }
    let _ = writeln!(out, "{indent}//{line}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load_box;

    /// The error of a box with this text, or the box.
    fn read(text: &str) -> Result<BoxConfig, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new.ron");
        std::fs::write(&path, text).unwrap();
        load_box(&path).map_err(|error| error.to_string())
    }

    /// Whether a line of a new box is a key with an example.
    fn is_example(line: &str) -> bool {
        SOURCES.iter().any(|source| {
            let key = source.name.rsplit('.').next().unwrap();
            line.trim_start() == format!("// {key}: {},", source.example)
        })
    }

    #[test]
    fn a_new_box_lacks_all_keys_in_one_error_and_is_whole_with_its_examples() {
        let text = new_box();
        let error = read(&text).unwrap_err();
        assert_eq!(error.matches("error: ").count(), 1, "{error}");
        for name in ["gpus", "gpu_memory", "node_memory", "gpu.gemm_tflops", "host.core_gb_per_s"] {
            let told = format!("`{name}`");
            assert!(error.contains(&told) && error.contains(&meaning_and_source(name)), "{error}");
        }
        assert!(error.contains("lacks 3 keys that a plan needs, and 9 keys"), "{error}");
        let lines = text.lines().map(|line| match is_example(line) {
            true => line.replacen("// ", "", 1),
            false => line.to_owned(),
        });
        let filled: Vec<String> = lines.collect();
        assert_eq!(text.lines().filter(|line| is_example(line)).count(), SOURCES.len(), "{text}");
        let filled = read(&filled.join("\n")).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(missing_rates(&filled), [""; 0]);
        assert_eq!((filled.name.as_str(), filled.gpu.sm), ("my box", 90));
        assert!(text.lines().all(|line| line.len() <= 120), "{text}");
    }

    #[test]
    fn every_key_that_can_be_missing_has_a_meaning_and_a_source() {
        let empty = BoxConfig { machines: 2, ..BoxConfig::default() };
        let missing = missing_rates(&empty);
        assert_eq!(missing.len(), 10);
        for name in missing {
            assert!(meaning_and_source(name).contains(". Source: "), "{name}");
        }
        let whole = "gpus: 1, gpu_memory: \"8GiB\", node_memory: \"8GiB\"";
        let described = read(&format!("({whole}, topology: \"/none.xml\")")).unwrap_err();
        assert!(!described.contains("lacks"), "{described}");
    }
}
