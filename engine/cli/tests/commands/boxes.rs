//! The described boxes can be planned and simulated, and match their topologies.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use crate::common::Folder;
use config::load_box;
use serde_json::Value;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// All box files of the repository.
fn boxes() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(root().join("configs/boxes")).unwrap();
    let mut boxes: Vec<PathBuf> = entries.map(|e| e.unwrap().path()).collect();
    boxes.retain(|path| path.extension().is_some_and(|e| e == "ron"));
    boxes.sort();
    assert!(boxes.len() >= 9, "{boxes:?}");
    boxes
}

/// Arguments of `onebox VERB ...` in the comment at the top of `path`.
fn example(path: &Path, verb: &str) -> Vec<String> {
    let text = std::fs::read_to_string(path).unwrap();
    let comment = text.lines().take_while(|line| line.starts_with("//"));
    let comment: String = comment.map(|line| line.trim_start_matches("//")).collect();
    let comment = comment.replace('\\', " ");
    let start = format!("onebox {verb} ");
    let (_, rest) = comment.split_once(&start).unwrap_or_else(|| panic!("{}", path.display()));
    rest.split_whitespace().take_while(|word| *word != "onebox").map(str::to_owned).collect()
}

/// Document of `onebox VERB ARGUMENTS --json`, run at the root of the repository.
fn json(folder: &Folder, verb: &str, arguments: &[String]) -> Value {
    let mut command = folder.command(&[verb]);
    command.args(arguments).arg("--json").current_dir(root());
    let done = command.output().unwrap();
    let (out, error) =
        (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success(), "{verb} {arguments:?}: {out}{error}");
    serde_json::from_str(&out).unwrap()
}

/// `plan` and `simulate` report the same memory, ops and moved bytes.
fn agree(folder: &Folder, arguments: &[String]) {
    let (plan, simulation) = (json(folder, "plan", arguments), json(folder, "simulate", arguments));
    let name = format!("{arguments:?}");
    assert_eq!(plan["gpu"]["bytes"], simulation["gpu_bytes"], "{name}");
    assert_eq!(plan["host_per_rank"]["bytes"], simulation["host_bytes_per_rank"], "{name}");
    assert_eq!(
        (&simulation["simulated"], &simulation["fits"]),
        (&true.into(), &true.into()),
        "{name}"
    );
    let (planned, played) = (&plan["step"]["lanes"], &simulation["lanes"]);
    for (planned, played) in planned.as_array().unwrap().iter().zip(played.as_array().unwrap()) {
        assert_eq!(
            (&planned["lane"], &planned["ops"]),
            (&played["lane"], &played["ops"]),
            "{name}"
        );
        // On other lanes the plan counts some ops by their length and the simulation by their
        // accesses.
        if ["H2d", "D2h"].contains(&planned["lane"].as_str().unwrap()) {
            assert_eq!(planned["bytes"], played["bytes"], "{name}: {planned}");
        }
    }
    let hosts: u64 =
        plan["nodes"].as_array().unwrap().iter().map(|n| n["bytes"].as_u64().unwrap()).sum();
    let ranks = plan["tensor"].as_u64().unwrap() * plan["data"].as_u64().unwrap();
    assert_eq!(hosts, ranks * plan["host_per_rank"]["bytes"].as_u64().unwrap(), "{name}");
}

#[test]
fn a_box_is_taken_by_its_name_where_there_is_no_file_of_it() {
    let folder = Folder::new();
    let sets = ["precision=Fp16", "parallel.tensor=2", "parallel.data=4"];
    let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", *set]).collect();
    for verb in [&["plan"][..], &["plan", "--search"], &["simulate", "--no-schedules"]] {
        let on = [verb, &["tiny.ron", "--box", "dgx1v"], &sets].concat();
        let output = folder.onebox(&on).ok().stdout;
        assert!(output.contains("DGX-1V"), "{verb:?}: {output}");
    }
    let device = "device=Sim(box: \"dgx1v\")";
    let on = [&["config", "show", "tiny.ron", "--set", device][..], &sets].concat();
    let shown = folder.onebox(&on).ok().stdout;
    assert!(shown.contains("\"dgx1v\""), "{shown}");
    let wrong = folder.onebox(&["plan", "tiny.ron", "--set", "device=Sim(box: \"dgx1\")"]);
    wrong.refused(78, &["did you mean the box `dgx1v`?", "onebox boxes"]);
    let wrong = folder.onebox(&["plan", "tiny.ron", "--box", "h100-128"]);
    wrong.refused(78, &["no such box", "did you mean `--box h100-128gib`?"]);
    folder
        .onebox(&["plan", "tiny.ron", "--box", "cray"])
        .refused(78, &["there are: a2, a3, desktop-2x3090, "]);
    for path in ["dgx2.ron", "boxes/dgx2"] {
        folder.onebox(&["plan", "tiny.ron", "--box", path]).refused(78, &["mean `--box dgx2`?"]);
    }
    // A file has priority over a box of the same name.
    std::fs::write(folder.path("dgx1v"), "(gpus: 1)").unwrap();
    folder.onebox(&["plan", "tiny.ron", "--box", "dgx1v"]).refused(78, &["gpu_memory"]);
    folder.onebox(&["plan", "tiny.ron", "--set", device]).refused(78, &["gpu_memory", "dgx1v:1"]);
}

#[test]
fn boxes_are_listed_and_the_page_has_the_same_table() {
    let folder = Folder::new();
    let listed = folder.onebox(&["boxes"]).ok().stdout;
    let all: Value =
        serde_json::from_str(&folder.onebox(&["boxes", "--json"]).ok().stdout).unwrap();
    let all = all.as_array().unwrap();
    assert_eq!(all.len(), boxes().len());
    for listed_box in all {
        let name = listed_box["name"].as_str().unwrap();
        assert!(listed.lines().any(|line| line.starts_with(&format!("{name} "))), "{name}");
        let path = root().join(format!("configs/boxes/{name}.ron"));
        let described = load_box(&path).unwrap_or_else(|e| panic!("{e}"));
        let number = |key: &str| listed_box[key].as_f64().unwrap();
        assert_eq!(number("gpus"), described.gpus as f64);
        assert_eq!(number("gpu_memory_bytes"), described.gpu_memory as f64);
        let host = described.node_memory * described.numa_nodes as u64;
        assert_eq!(number("host_memory_bytes"), host as f64);
        assert!(listed_box["link_gb_per_s"][0].as_f64().unwrap() > 1.0, "{name}");
    }
    let nvlink = |name: &str| {
        let found = all.iter().find(|listed| listed["name"] == name).unwrap();
        (found["nvlink_gb_per_s"].as_f64().unwrap(), found["nvlink_joins_all"] == true)
    };
    assert_eq!(nvlink("dgx-b200"), (900.0, true));
    assert_eq!(nvlink("dgx1v"), (50.0, false));
    assert_eq!(nvlink("workstation-4x4090"), (0.0, false));
    let table = folder.onebox(&["boxes", "--markdown"]).ok().stdout;
    let page = std::fs::read_to_string(root().join("docs/simulator.md")).unwrap();
    assert!(page.contains(&table), "put it in docs/simulator.md: onebox boxes --markdown");
}

#[test]
fn every_box_says_what_its_topology_says() {
    for path in boxes() {
        let described = load_box(&path).unwrap_or_else(|e| panic!("{e}"));
        let Some(machine) = &described.machine else {
            assert!(described.host.cores > 0 && described.host.link_gb_per_s > 0.0);
            continue;
        };
        assert_eq!(described.gpus, machine.gpus.len() * described.machines, "{}", path.display());
        assert_eq!(described.numa_nodes, machine.numa_nodes.len());
        for node in &machine.numa_nodes {
            // A program gets a little less memory than the machine has.
            let (left, in_box) = (described.node_memory as f64, node.memory_bytes as f64);
            assert!(
                (0.94..1.002).contains(&(left / in_box)),
                "{}: {left} {in_box}",
                path.display()
            );
        }
    }
}

#[test]
fn the_example_of_every_box_is_simulated_and_agrees_with_the_plan() {
    let folder = Folder::new();
    for path in boxes() {
        let arguments = example(&path, "simulate");
        let own = path.file_name().unwrap().to_string_lossy().into_owned();
        let named = arguments.iter().any(|a| a.ends_with(&own)) || own == "dgx2.ron";
        assert!(named, "{own}: {arguments:?}");
        // The example fits without changes; the first, a middle and the last micro-batch are enough
        // for this check.
        let plan = json(&folder, "plan", &arguments);
        let number = |value: &Value| value.as_u64().unwrap();
        let samples = number(&plan["step"]["tokens"]) / 1024;
        let few = number(&plan["micro_batches"]).min(3);
        let few = samples / number(&plan["micro_batches"]) * few;
        let sets = ["--set".to_owned(), format!("batch.global={few}")];
        agree(&folder, &[arguments, sets.into()].concat());
    }
}

#[test]
fn every_box_simulates_a_small_model_on_all_its_gpus() {
    let folder = Folder::new();
    for path in boxes() {
        let described = load_box(&path).unwrap_or_else(|e| panic!("{e}"));
        let gpus = described.gpus;
        let precision = if described.gpu.sm < 80 { "Fp16" } else { "Bf16" };
        let device = format!("device=Sim(box: {:?})", path.display().to_string());
        let tensor = if gpus > 1 { 2 } else { 1 };
        let sets = [
            device,
            format!("precision={precision}"),
            format!("parallel.tensor={tensor}"),
            format!("parallel.data={}", gpus / tensor),
            format!("batch.global={}", 2 * gpus),
            "batch.micro=1".to_owned(),
        ];
        let sets = sets.into_iter().flat_map(|set| ["--set".to_owned(), set]);
        let config = folder.path("tiny.ron").display().to_string();
        agree(&folder, &std::iter::once(config).chain(sets).collect::<Vec<_>>());
    }
}

#[test]
fn with_nps4_all_eight_nodes_hold_states_and_those_with_gpus_the_staging() {
    let folder = Folder::new();
    let arguments = example(&root().join("configs/boxes/dgx-a100.ron"), "simulate");
    let plan = json(&folder, "plan", &arguments);
    let nodes = plan["nodes"].as_array().unwrap();
    let bytes: Vec<u64> = nodes.iter().map(|n| n["bytes"].as_u64().unwrap()).collect();
    assert_eq!(bytes.len(), 8);
    let pools = plan["host_per_rank"]["pools"].as_array().unwrap();
    let is_staging = |pool: &&Value| pool["name"].as_str().unwrap().ends_with("staging");
    let staging = pools.iter().filter(is_staging).map(|p| p["bytes"].as_u64().unwrap());
    // Every odd node has two GPUs, with states half on this node and half on the node before.
    let staging: u64 = staging.sum();
    let states = plan["host_per_rank"]["bytes"].as_u64().unwrap() - staging;
    assert!(staging > 0 && states > staging);
    for (node, bytes) in bytes.iter().enumerate() {
        let wanted = states + if node % 2 == 1 { 2 * staging } else { 0 };
        // Pools also contain the padding between buffers.
        assert!(bytes.abs_diff(wanted) < 1 << 20, "node {node}: {} {wanted}", bytes);
    }
}

#[test]
fn a_box_that_contradicts_its_topology_is_refused_with_both_figures() {
    let folder = Folder::new();
    let xml = root().join("configs/boxes/topologies/dgx1v.xml").canonicalize().unwrap();
    let write = |topology: &Path, keys: &str| {
        let topology = format!("{:?}", topology.display().to_string());
        let text = format!(
            "(topology: {topology}, gpu_memory: \"32GiB\", node_memory: \"256GiB\", {keys})"
        );
        std::fs::write(folder.path("box.ron"), text).unwrap();
    };
    let plan = || folder.onebox(&["plan", "tiny.ron", "--set", "device=Sim(box: \"box.ron\")"]);
    write(&xml, "");
    plan().ok();
    write(&xml, "gpus: 7");
    plan().refused(78, &["gpus", "7 GPUs, but the topology has 8", "dgx1v.xml"]);
    write(&xml, "machines: 2, gpus: 8");
    plan().refused(78, &["8 GPUs, but the topology has 16 (2 machines of 8)"]);
    write(&xml, "numa_nodes: 8");
    plan().refused(78, &["numa_nodes", "8 NUMA nodes, but the topology has 2"]);
    write(Path::new("/absent.xml"), "");
    plan().refused(78, &["topology", "/absent.xml"]);
    write(&xml, "machines: 2");
    let grid = ["parallel.tensor=4", "parallel.data=3", "batch.micro=1", "batch.global=12"];
    let grid: Vec<&str> = grid.iter().flat_map(|set| ["--set", set]).collect();
    let set = ["plan", "tiny.ron", "--set", "device=Sim(box: \"box.ron\")"];
    folder.onebox(&[&set[..], &grid].concat()).refused(78, &["do not fill machines of 8"]);
}

#[test]
fn a_box_without_what_a_simulation_needs_is_refused_by_key() {
    let folder = Folder::new();
    let text = std::fs::read_to_string(root().join("configs/boxes/dgx-h100.ron")).unwrap();
    for (line, key) in [("sm: 90,", "gpu.sm"), ("processors: 132,", "gpu.processors")] {
        assert!(text.contains(line), "{line}");
        for instead in ["", &line.replace("90", "0").replace("132", "0")] {
            let topologies = text.replace("topologies/", &format!("{}/", topologies()));
            std::fs::write(folder.path("box.ron"), topologies.replace(line, instead)).unwrap();
            let parts = ["lacks 1 key that a simulation needs (0: not known)", key, "Source: "];
            folder.onebox(&["simulate", "tiny.ron", "--box", "box.ron"]).refused(78, &parts);
        }
    }
}

#[test]
fn a_new_box_lacks_all_its_keys_in_one_error_and_replaces_no_file() {
    let folder = Folder::new();
    let said = folder.onebox(&["boxes", "--new", "my box.ron"]).ok().stderr;
    assert!(said.contains("--box 'my box.ron'"), "{said}");
    let text = folder.read("my box.ron");
    folder
        .onebox(&["boxes", "--new", "my box.ron"])
        .refused(73, &["--new my box.ron: it exists", "give another name"]);
    assert_eq!(folder.read("my box.ron"), text);
    folder.onebox(&["boxes", "--new", "none/a.ron"]).refused(74, &["cannot write none/a.ron"]);
    let keys = ["gpus", "gpu_memory", "node_memory", "gpu.gemm_tflops", "host.link_gb_per_s"];
    let keys = keys.map(|key| format!("`{key}`"));
    let keys = keys.each_ref().map(String::as_str);
    let lacks = folder.onebox(&["simulate", "tiny.ron", "--box", "my box.ron"]).refused(78, &keys);
    assert_eq!(lacks.stderr.matches("error: ").count(), 1, "{}", lacks.stderr);
    // A plan needs three of them, and a simulation says what it lacks beside these.
    let sizes = "(gpus: 4, gpu_memory: \"8GiB\", node_memory: \"64GiB\")";
    std::fs::write(folder.path("sizes.ron"), sizes).unwrap();
    folder.onebox(&["plan", "tiny.ron", "--box", "sizes.ron"]).ok();
    let rates = ["lacks 9 keys", "\n  gpu.gemm_tflops: ", "\n  host.cores: Number of cores"];
    folder.onebox(&["simulate", "tiny.ron", "--box", "sizes.ron"]).refused(78, &rates);
}

#[test]
fn all_absurd_numbers_of_a_box_are_told_at_once() {
    let folder = Folder::new();
    let text = "(gpus: 4, gpu_memory: \"8GiB\", node_memory: \"64GiB\",
        gpu: (gemm_tflops: 67, fp32_tflops: 989000, memory_gb_per_s: 3350, peer_gb_per_s: 9000),
        host: (node_gb_per_s: 14, core_gb_per_s: 307, link_gb_per_s: 63))";
    std::fs::write(folder.path("box.ron"), text).unwrap();
    let told = [
        "gpu.fp32_tflops: 989000 is more than any machine has",
        "gpu.peer_gb_per_s: a GPU cannot send faster",
        "host.core_gb_per_s: one core cannot move more",
        "4 errors in ",
    ];
    folder.onebox(&["plan", "tiny.ron", "--box", "box.ron"]).refused(78, &told);
}

/// Folder of the boxes' topologies.
fn topologies() -> String {
    root().join("configs/boxes/topologies").display().to_string()
}
