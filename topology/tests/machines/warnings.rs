//! Each warning fires on its own problem, has a text, and has a remedy.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use std::collections::BTreeSet;
use std::path::Path;

use topology::{Environment, Machine, Request, Seats, Severity, Warning, place, warnings};

fn folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn load(name: &str) -> Machine {
    let file = folder().join("../configs/boxes/topologies").join(name).with_extension("xml");
    Machine::from_xml_file(&file).unwrap()
}

/// Warnings about a changed box with `ranks` virtual ranks, or with one rank per GPU (`ranks` = 0).
fn of(name: &str, ranks: usize, change: impl FnOnce(&mut Machine, &mut Request)) -> Vec<Warning> {
    let mut machine = load(name);
    let mut request = Request { tp: 1, dp: ranks, seats: Seats::Virtual, ..Request::default() };
    if ranks == 0 {
        request = Request { dp: machine.gpus.len(), seats: Seats::Gpus, ..request };
    }
    change(&mut machine, &mut request);
    let placement = place(&machine, &request).unwrap();
    warnings(&machine, Some(&placement), &Environment::default())
}

/// Warnings about a live box with these kernel settings and variables.
fn around(files: &[(&str, &str)], environment: Environment) -> Vec<Warning> {
    let root = std::env::temp_dir().join(format!("onebox-warnings-{}", std::process::id()));
    for (path, text) in files {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    let environment = Environment { root: Some(root.clone()), ..environment };
    let found = warnings(&load("dgx2"), None, &environment);
    let _ = std::fs::remove_dir_all(root);
    found
}

fn link(machine: &mut Machine, gpu: usize) -> &mut topology::Link {
    let node = machine.gpus[gpu].node;
    &mut machine.pci[node].link
}

/// Makes the cores of the first node faster than the cores of the second node.
fn halves_of_two_kinds(machine: &mut Machine, _: &mut Request) {
    let cpus = |machine: &Machine, node: usize| machine.numa_nodes[node].cpus.clone();
    let kind = |cpus| topology::CoreKind { name: None, speed: None, cpus };
    machine.core_kinds = vec![kind(cpus(machine, 0)), kind(cpus(machine, 1))];
    for core in &mut machine.cores {
        core.kind = Some(core.numa_node as usize);
    }
}

/// Ids of all warnings in the sources.
fn all_ids() -> BTreeSet<String> {
    let mut ids = BTreeSet::new();
    for file in ["warnings.rs", "place.rs", "kinds.rs"] {
        let text = std::fs::read_to_string(folder().join("src").join(file)).unwrap();
        let lines: Vec<&str> = text.lines().map(str::trim).collect();
        for pair in lines.windows(2) {
            let id = match (pair[0], pair[1].trim_start_matches("severity: ")) {
                ("self.info(" | "self.warn(", id) => id,
                (id, severity) if severity.starts_with("Severity::") => id,
                _ => continue,
            };
            let id = id.trim_start_matches("id: ").trim_end_matches(',').trim_matches('"');
            ids.insert(id.to_owned());
        }
    }
    assert!(ids.len() >= 20, "{ids:?}");
    ids
}

#[test]
fn every_warning_can_be_triggered_and_has_a_text_and_a_remedy() {
    let settings = [
        ("proc/sys/kernel/numa_balancing", "1"),
        ("proc/sys/vm/zone_reclaim_mode", "1"),
        ("sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]"),
        ("proc/self/limits", "Max locked memory   65536   65536   bytes"),
    ];
    let variables = Environment { visible_devices: Some("3,1".into()), ..Environment::default() };
    let unchanged = |_: &mut Machine, _: &mut Request| {};
    let found: Vec<(&str, Vec<Warning>)> = vec![
        (
            "no-pci",
            of("dgx2", 4, |machine, _| {
                machine.gpus.clear();
                machine.has_io = false;
            }),
        ),
        ("no-gpu", of("dgx2", 4, |machine, _| machine.gpus.clear())),
        ("mixed-gpus", of("desktop-2x3090", 0, |machine, _| machine.gpus[1].device_id.1 += 1)),
        ("shared-uplink", of("dgx2", 0, unchanged)),
        ("link-below-maximum", of("workstation-tr-4xA6000", 0, unchanged)),
        (
            "link-below-maximum",
            of("dgx2", 0, |machine, _| {
                link(machine, 0).width = Some(8);
                link(machine, 0).max_width = Some(16);
            }),
        ),
        (
            "link-below-maximum",
            of("dgx2", 0, |machine, _| {
                link(machine, 0).generation = Some(1);
                link(machine, 0).max_generation = Some(3);
            }),
        ),
        ("link-ends-differ", of("dgx2", 0, |machine, _| link(machine, 0).gb_per_s = Some(2.0))),
        ("tree-hidden", of("vm-flat-8xH100", 0, unchanged)),
        ("gpu-far", of("dgx2-cgroup-8cores", 0, unchanged)),
        ("memory-denied", of("dgx2-cpuset-node0-8cores", 0, unchanged)),
        ("gpu-node-unknown", of("dgx2", 0, |machine, _| machine.gpus[0].numa_node = None)),
        ("nodes-hidden", of("dgx2", 4, |machine, _| machine.numa_nodes.truncate(1))),
        ("node-without-memory", of("dgx2", 0, |machine, _| machine.numa_nodes[1].memory_bytes = 0)),
        (
            "cores-without-memory",
            of("dgx2", 0, |machine, _| machine.numa_nodes[0].cpus.retain(|cpu| cpu % 2 == 0)),
        ),
        ("cores-unlike", of("dgx2", 3, halves_of_two_kinds)),
        ("cpus-restricted", of("dgx2", 0, |machine, _| machine.allowed_cpus.truncate(60))),
        ("more-ranks-than-cores", of("dgx2-cgroup-8cores", 0, unchanged)),
        ("memory-short", of("dgx2", 0, |_, request| request.state_bytes = 98 << 30)),
        (
            "memory-limit",
            of("dgx2", 0, |machine, request| {
                machine.available_memory = Some(100 << 30);
                request.state_bytes = 7 << 30;
            }),
        ),
        ("numa-balancing", around(&settings, Environment::default())),
        ("zone-reclaim", around(&settings, Environment::default())),
        ("huge-pages-never", around(&settings, Environment::default())),
        ("memlock", around(&settings, Environment::default())),
        ("visible-devices-reordered", around(&[], variables.clone())),
        ("device-order", around(&[], variables)),
    ];
    let mut seen = BTreeSet::new();
    for (id, warnings) in found {
        let ids: Vec<&str> = warnings.iter().map(|warning| warning.id).collect();
        assert!(ids.contains(&id), "{id} is not in {ids:?}");
        for Warning { text, remedy, .. } in &warnings {
            assert!(text.len() > 10 && remedy.len() > 10, "{id}: {text:?}, {remedy:?}");
        }
        seen.insert(id.to_owned());
    }
    assert_eq!(seen, all_ids());
}

#[test]
fn a_box_in_order_has_nothing_worse_than_its_wiring() {
    for (name, ids) in [
        ("dgx2", &["shared-uplink"][..]),
        ("dgx-a100-nps4", &["shared-uplink"]),
        ("dgx-h100", &[]),
        ("desktop-2x3090", &[]),
    ] {
        let found = of(name, 0, |_, _| {});
        assert_eq!(found.iter().map(|w| w.id).collect::<Vec<_>>(), ids, "{name}");
        assert!(found.iter().all(|w| w.severity == Severity::Warning));
    }
    let text = &of("dgx2", 0, |_, _| {})[0].text;
    assert!(text.contains("4 GPUs share each of 4 uplinks") && text.contains("3.94"), "{text}");
}

#[test]
fn a_file_that_is_not_there_or_no_box_is_named() {
    let text = |name: &str| {
        let file = folder().join("../configs/boxes/topologies").join(name).with_extension("xml");
        std::fs::read_to_string(file).unwrap()
    };
    for device in ["/dev/null", "/dev/zero", "/dev"] {
        let error = Machine::from_xml_file(Path::new(device)).unwrap_err().to_string();
        assert!(error.contains("no regular file"), "{error}");
    }
    let error = Machine::from_xml_file(Path::new("/no/such/box.xml")).unwrap_err();
    assert!(error.to_string().contains("/no/such/box.xml"));
    let third = text("desktop-2x3090").replace("version=\"2.0\"", "version=\"3.0\"");
    assert!(Machine::from_xml(&third).unwrap_err().to_string().contains("3.0"));
    let unnumbered =
        |tag: &str| tag.replace("type=\"NUMANode\" os_index=\"1\"", "type=\"NUMANode\"");
    let error = Machine::from_xml(&unnumbered(&text("dgx-a100-nps1"))).unwrap_err();
    assert!(error.to_string().contains("a NUMA node has no number"), "{error}");
}
