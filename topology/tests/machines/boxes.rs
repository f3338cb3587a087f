//! Users' boxes and their damaged descriptions: facts about known boxes, and rules for all boxes.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use topology::report::{self, ReportSubject};
use topology::{
    Environment, HostBytes, Machine, Placement, Request, Seats, Severity, Sockets, parse_bytes,
    place, warnings,
};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/boxes/topologies")
}

fn text_of(name: &str) -> String {
    std::fs::read_to_string(folder().join(name).with_extension("xml")).unwrap()
}

fn load(name: &str) -> Machine {
    Machine::from_xml(&text_of(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

fn names() -> Vec<String> {
    let files = std::fs::read_dir(folder()).unwrap().flatten();
    let mut names: Vec<String> = files
        .filter_map(|file| file.file_name().to_str()?.strip_suffix(".xml").map(str::to_owned))
        .collect();
    names.sort();
    assert!(names.len() >= 10);
    names
}

fn placed(machine: &Machine, tp: usize, dp: usize) -> Placement {
    place(machine, &Request { tp, dp, ..Request::default() }).unwrap()
}

fn column<T>(placement: &Placement, of: impl Fn(&topology::RankPlace) -> T) -> Vec<T> {
    placement.ranks.iter().map(of).collect()
}

/// Rules for every placement on every box.
fn check(machine: &Machine, placement: &Placement, what: &str) {
    let shared = placement.warnings.iter().any(|w| w.id == "more-ranks-than-cores");
    let (mut dealt, mut gpus) = (BTreeMap::new(), BTreeSet::new());
    for rank in &placement.ranks {
        for cpu in rank.cpus.iter().chain(&rank.worker_cpus).chain(&rank.driver_cpu) {
            assert!(machine.allowed_cpus.contains(cpu), "{what}: CPU {cpu} is not allowed");
        }
        for cpu in &rank.cpus {
            let other = dealt.insert(*cpu, rank.rank);
            assert!(shared || other.is_none(), "{what}: CPU {cpu} dealt twice");
        }
        assert!(rank.worker_cpus.iter().all(|cpu| rank.cpus.contains(cpu)), "{what}");
        assert!(!rank.state_nodes.is_empty(), "{what}");
        assert!(rank.gpu.is_none_or(|gpu| gpus.insert(gpu)), "{what}: a GPU twice");
        let usable = machine
            .allowed_nodes
            .iter()
            .any(|id| machine.numa_node(*id).is_some_and(|node| node.memory_bytes > 0));
        for node in rank.state_nodes.iter().chain([&rank.numa_node]).filter(|_| usable) {
            assert!(machine.allowed_nodes.contains(node), "{what}: node {node} is not allowed");
        }
        let empty = machine.allowed_cpus.is_empty();
        assert_eq!(rank.cpus.is_empty(), empty, "{what}: rank {} without CPUs", rank.rank);
    }
    // Cores next to empty or denied memory may stay idle. No other core may, if there are as many
    // ranks as nodes and no rank has a GPU.
    let whole = machine
        .numa_nodes
        .iter()
        .all(|node| node.memory_bytes > 0 && machine.allowed_nodes.contains(&node.id));
    let free = placement.ranks.iter().all(|rank| rank.gpu.is_none());
    if whole && free && placement.ranks.len() >= machine.numa_nodes.len() {
        let of_cores = machine.cores.iter().flat_map(|core| &core.cpus);
        let allowed = of_cores.filter(|cpu| machine.allowed_cpus.contains(cpu));
        let idle: Vec<&u32> = allowed.filter(|cpu| !dealt.contains_key(cpu)).collect();
        assert!(idle.is_empty(), "{what}: CPUs {idle:?} are not used");
    }
}

/// Shows a box and places ranks on it in every way. None of this may panic.
fn use_it(machine: &Machine, what: &str) {
    let gpus = machine.gpus.len();
    for (tp, dp, seats) in [
        (1, gpus, Seats::Gpus),
        (2, gpus / 2, Seats::Gpus),
        (gpus.max(1), 1, Seats::Gpus),
        (3, 1, Seats::Gpus),
        (2, 3, Seats::Virtual),
        (1, 300, Seats::Virtual),
    ] {
        let request = Request { tp, dp, seats, state_bytes: 1 << 40, ..Request::default() };
        let Ok(placement) = place(machine, &request) else { continue };
        check(machine, &placement, &format!("{what}, {tp} x {dp}"));
        if dp <= 16 {
            let found = warnings(machine, Some(&placement), &Environment::default());
            let shown = ReportSubject { machine, placement: Some(&placement), warnings: &found };
            for text in [
                report::table(&shown),
                report::tree(&shown),
                report::matrix(&shown),
                report::svg(&shown),
            ] {
                assert!(!text.is_empty());
            }
        }
    }
}

#[test]
fn a_dgx_2_shares_each_uplink_by_four() {
    let machine = load("dgx2");
    let gpus: Vec<String> = machine.gpus.iter().map(|gpu| gpu.pci.to_string()).collect();
    assert_eq!((gpus[0].as_str(), gpus[15].as_str()), ("0000:34:00.0", "0000:e7:00.0"));
    let nodes: Vec<_> = machine.gpus.iter().map(|gpu| gpu.numa_node.unwrap()).collect();
    assert_eq!(nodes, [[0; 8], [1; 8]].concat());
    let ports: BTreeSet<String> =
        (0..16).map(|gpu| machine.root_port(gpu).unwrap().to_string()).collect();
    assert_eq!(
        ports.into_iter().collect::<Vec<_>>(),
        ["0000:2b:00.0", "0000:4e:00.0", "0000:ae:00.0", "0000:d7:00.0"]
    );
    for gpu in 0..16 {
        assert_eq!(machine.sharers(gpu), 4);
        assert!((machine.host_gb_per_s_all(gpu).unwrap() - 3.94).abs() < 0.01);
        assert!((machine.host_gb_per_s_alone(gpu).unwrap() - 15.75).abs() < 0.01);
    }
    let placement = placed(&machine, 8, 2);
    assert!(column(&placement, |rank| rank.worker_cpus.len()).iter().all(|cores| *cores == 3));
    assert_eq!(column(&placement, |rank| rank.numa_node), nodes);
    assert_eq!(placement.ranks[15].worker_cpus, [45, 46, 47]);
    assert_eq!(placement.ranks[15].driver_cpu, Some(93));
}

#[test]
fn the_matrix_of_a_dgx_2_is_the_one_that_nvidia_prints() {
    let machine = load("dgx2");
    for a in 0..16usize {
        for b in 0..16 {
            // Two GPUs share a switch, four GPUs share a root port, and eight GPUs share a node.
            let expected = match (a, b) {
                _ if a == b => "X",
                _ if a / 2 == b / 2 => "PIX",
                _ if a / 4 == b / 4 => "PXB",
                _ if a / 8 == b / 8 => "NODE",
                _ => "SYS",
            };
            assert_eq!(machine.pcie_path(a, b).to_string(), expected, "{a} {b}");
            assert_eq!(machine.path(a, b).to_string(), if a == b { "X" } else { "NV6" });
        }
    }
}

#[test]
fn a_dgx_1_has_its_cube_mesh_and_host_bridges() {
    let machine = load("dgx1v");
    let row = |path: &dyn Fn(usize) -> topology::Path| {
        (0..8).map(|b| path(b).to_string()).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(row(&|b| machine.pcie_path(0, b)), "X PIX PHB PHB SYS SYS SYS SYS");
    assert_eq!(row(&|b| machine.path(0, b)), "X NV1 NV1 NV2 NV2 SYS SYS SYS");
    assert_eq!(row(&|b| machine.path(7, b)), "SYS SYS SYS NV1 NV2 NV1 NV2 X");
    // Each pair has two links, and its GPUs have different uplinks.
    let pairs: Vec<Vec<String>> = placed(&machine, 2, 4)
        .ranks
        .chunks(2)
        .map(|pair| {
            pair.iter().map(|rank| rank.gpu.unwrap().to_string()[5..7].to_owned()).collect()
        })
        .collect();
    assert_eq!(pairs, [["06", "0b"], ["07", "0a"], ["85", "8a"], ["86", "89"]]);
}

#[test]
fn a_dgx_a100_in_nps4_uses_the_memory_of_all_eight_nodes() {
    let machine = load("dgx-a100-nps4");
    for (tp, dp) in [(8, 1), (1, 8), (4, 2)] {
        let placement = placed(&machine, tp, dp);
        check(&machine, &placement, "nps4");
        let mut by_gpu: Vec<_> = placement.ranks.iter().collect();
        by_gpu.sort_by_key(|rank| rank.gpu);
        let staging: Vec<u32> = by_gpu.iter().map(|rank| rank.numa_node).collect();
        assert_eq!(staging, [3, 3, 1, 1, 7, 7, 5, 5]);
        let states: BTreeSet<u32> = by_gpu.iter().flat_map(|r| r.state_nodes.clone()).collect();
        assert_eq!(states.into_iter().collect::<Vec<_>>(), (0..8).collect::<Vec<_>>());
        for rank in by_gpu {
            assert_eq!(rank.worker_cpus.len(), 16);
            // Each cache belongs to one rank.
            for core in machine.cores.iter().filter(|c| rank.worker_cpus.contains(&c.cpus[0])) {
                let mates = machine.cores.iter().filter(|mate| mate.l3 == core.l3);
                assert!(mates.into_iter().all(|mate| rank.worker_cpus.contains(&mate.cpus[0])));
            }
        }
    }
    let all = machine.host_gb_per_s_all(0).unwrap();
    assert!((all - 15.75).abs() < 0.01);
}

#[test]
fn a_dgx_h100_shares_nothing_and_a_dgx_b200_neither() {
    for (name, nvlink, model) in [("dgx-h100", 450_000, "H100"), ("dgx-b200", 900_000, "B200")] {
        let machine = load(name);
        for gpu in 0..8 {
            assert_eq!(machine.sharers(gpu), 1);
            let (alone, all) = (machine.host_gb_per_s_alone(gpu), machine.host_gb_per_s_all(gpu));
            assert!(alone == all && (all.unwrap() - 63.0).abs() < 0.1);
            assert_eq!(machine.gpus[gpu].model.as_deref(), Some(model));
        }
        assert_eq!(machine.nvlink_mb_per_s(0, 7), nvlink);
        assert_eq!(machine.path(0, 7).to_string(), "NV18");
    }
}

#[test]
fn idle_gpus_leave_their_uplinks_to_the_others() {
    let machine = load("dgx2");
    let placement = placed(&machine, 4, 1);
    let chosen: Vec<usize> = placement
        .ranks
        .iter()
        .map(|rank| machine.gpus.iter().position(|gpu| Some(gpu.pci) == rank.gpu).unwrap())
        .collect();
    for gpu in &chosen {
        assert!(machine.host_gb_per_s(*gpu, &chosen).unwrap() > 15.0, "{chosen:?}");
    }
    // The ranks get the cores of both sockets.
    assert_eq!(column(&placement, |rank| rank.worker_cpus.len()), [12; 4]);
    let bridged = load("workstation-tr-4xA6000");
    let placement = placed(&bridged, 2, 2);
    let buses = column(&placement, |rank| rank.gpu.unwrap().bus);
    assert_eq!(buses, [0x01, 0x21, 0x41, 0x61]);
}

#[test]
fn restricted_boxes_are_placed_within_their_limits_and_named() {
    let ids = |machine: &Machine, placement: &Placement| {
        let found = warnings(machine, Some(placement), &Environment::default());
        let errors = found.iter().any(|warning| warning.severity == Severity::Error);
        (found.into_iter().map(|warning| warning.id).collect::<BTreeSet<_>>(), errors)
    };
    let machine = load("dgx2-cpuset-node0-8cores");
    let placement = placed(&machine, 8, 2);
    check(&machine, &placement, "cpuset");
    assert_eq!(column(&placement, |rank| rank.numa_node), [0; 16]);
    let (found, errors) = ids(&machine, &placement);
    for id in ["gpu-far", "memory-denied", "cpus-restricted", "more-ranks-than-cores"] {
        assert!(found.contains(id), "{id} is not in {found:?}");
    }
    assert!(errors);
    let machine = load("dgx2-cgroup-8cores");
    let placement = placed(&machine, 8, 2);
    assert_eq!(column(&placement, |rank| rank.numa_node), [[0; 8], [1; 8]].concat());
    assert!(ids(&machine, &placement).0.contains("gpu-far"));
    let machine = load("dgx2");
    assert!(!ids(&machine, &placed(&machine, 8, 2)).1);
}

#[test]
fn what_does_not_fit_a_node_is_an_error() {
    let machine = load("dgx2");
    for (each, fits) in [("66GiB", true), ("98GiB", false)] {
        let state_bytes = parse_bytes(each).unwrap();
        let placement =
            place(&machine, &Request { tp: 8, dp: 2, state_bytes, ..Request::default() }).unwrap();
        assert_eq!(placement.warnings.is_empty(), fits, "{each}: {:?}", placement.warnings);
    }
    let refused = place(&machine, &Request { tp: 8, dp: 3, ..Request::default() });
    assert!(refused.unwrap_err().to_string().contains("16 GPUs"));
}

#[test]
fn a_lone_gpu_uses_both_sockets_where_its_states_need_them_or_it_is_told_to() {
    // The box has two sockets with 20 cores and 251 GiB each.
    let machine = load("dgx1v");
    for seats in [Seats::Gpus, Seats::Virtual] {
        let on = |sockets, states: &str, dp| {
            let (seats, state_bytes) = (seats.clone(), parse_bytes(states).unwrap());
            let staging_bytes = 1 << 30;
            let request = Request { tp: 1, dp, seats, state_bytes, staging_bytes, sockets };
            place(&machine, &request).unwrap()
        };
        let cores = |placement: &Placement| column(placement, |rank| rank.worker_cpus.len());
        let near = on(Sockets::Auto, "200GiB", 1);
        assert_eq!((cores(&near), near.all_sockets), (vec![20], false));
        assert!(near.reasons.iter().any(|why| why.contains("stay idle")), "{:?}", near.reasons);
        let all = on(Sockets::Auto, "400GiB", 1);
        assert_eq!((cores(&all), all.all_sockets), (vec![40], true));
        assert!(all.warnings.is_empty(), "{:?}", all.warnings);
        let why = all.reasons.last().unwrap();
        for part in ["401.00 GiB on node 0", "GiB are there", "all sockets", "crosses the link"] {
            assert!(why.contains(part), "{part}: {why}");
        }
        let bytes =
            all.ranks[0].bytes_by_node(&machine, HostBytes { staging: 1 << 30, states: 400 << 30 });
        assert_eq!(bytes, BTreeMap::from([(0, 201 << 30), (1, 200 << 30)]));
        let refused = on(Sockets::Near, "400GiB", 1);
        assert_eq!((cores(&refused), refused.warnings.len()), (vec![20], 1));
        assert_eq!(cores(&on(Sockets::All, "1GiB", 1)), [40]);
        // With more ranks than sockets no socket is idle.
        assert_eq!(on(Sockets::All, "1GiB", 8).ranks, on(Sockets::Near, "1GiB", 8).ranks);
    }
}

#[test]
fn staging_that_the_node_of_a_gpu_does_not_hold_lies_on_the_other_node_too() {
    let machine = load("dgx1v");
    let total = machine.numa_nodes[0].memory_bytes;
    let (staging, states) = (total / 10 * 9, total / 10 * 6);
    let on = |sockets| {
        let request = Request { tp: 1, dp: 1, sockets, ..Request::default() };
        place(&machine, &Request { state_bytes: states, staging_bytes: staging, ..request })
            .unwrap()
    };
    for sockets in [Sockets::All, Sockets::Auto] {
        let placement = on(sockets);
        assert!(placement.warnings.is_empty(), "{:?}", placement.warnings);
        let [place] = &placement.ranks[..] else { panic!("{:?}", placement.ranks) };
        let bytes = place.bytes_by_node(&machine, HostBytes { staging, states });
        // A thirty-second of the node next to the GPU stays free.
        assert_eq!(bytes[&0], total - total / 32);
        assert_eq!(bytes.values().sum::<u64>(), staging + states);
        assert!(place.to_string().contains("staging on node 0,1, states on node 0,1"), "{place}");
        let why = placement.sockets.last().unwrap();
        for part in ["node 0 does not hold", "cross the link between the nodes"] {
            assert!(why.contains(part) && placement.reasons.contains(why), "{part}: {why}");
        }
    }
    // No staging moves if a rank has one node, or if the rank's own node holds all of its staging.
    let near = on(Sockets::Near);
    assert_eq!((near.warnings.len(), &near.ranks[0].far_staging), (1, &vec![]));
    let small = Request { tp: 1, dp: 1, sockets: Sockets::All, ..Request::default() };
    let small = Request { state_bytes: states, staging_bytes: total / 2, ..small };
    assert_eq!(place(&machine, &small).unwrap().ranks[0].far_staging, []);
}

#[test]
fn every_box_of_the_repository_is_placed_and_shown() {
    for name in names() {
        use_it(&load(&name), &name);
    }
}

#[test]
fn every_synthetic_box_is_placed_and_shown() {
    for text in [
        "pu:1",
        "core:3 pu:1",
        "numa:1 pu:7",
        "pack:2 numa:1 core:5 pu:2",
        "pack:2 group:4 numa:1 l3:4 core:4 pu:2",
        "numa:3 core:7 pu:4",
        "pack:1 numa:1(memory=0) core:4 pu:1",
        "pack:4 [numa(memory=1GB)] [numa(memory=2GB)] core:2 pu:1",
        "numa:8 core:1 pu:1",
    ] {
        let machine = Machine::from_synthetic(text).unwrap_or_else(|e| panic!("{text}: {e}"));
        use_it(&machine, text);
    }
    for wrong in ["", "what", "pu:0", "pack:-1 pu:1", "pack:4096 core:4096 pu:64", "core:2 [", "\0"]
    {
        assert!(Machine::from_synthetic(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn no_set_of_allowed_cpus_makes_it_panic() {
    let mut random = Random(7);
    for name in ["dgx2", "dgx-a100-nps4", "vm-flat-8xH100", "workstation-tr-4xA6000"] {
        let whole = load(name);
        for round in 0..40 {
            let mut machine = whole.clone();
            let keep = 1 + random.below(100);
            machine.allowed_cpus.retain(|_| random.below(100) < keep);
            machine.allowed_nodes.retain(|_| random.below(4) > 0);
            if round % 4 == 0 {
                machine.gpus.retain(|_| random.below(3) > 0);
                machine.nvlink.clear();
            }
            let node = random.below(machine.numa_nodes.len());
            machine.numa_nodes[node].memory_bytes *= (random.below(3) > 0) as u64;
            use_it(&machine, &format!("{name} round {round}"));
        }
    }
}

/// xorshift: every run does the same damage.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % n.max(1) as u64) as usize
    }
}

/// Damages the text at one place.
fn damaged(text: &str, random: &mut Random) -> String {
    let mut bytes = text.as_bytes().to_vec();
    let at = random.below(bytes.len());
    let lines: Vec<&str> = text.lines().collect();
    let line = random.below(lines.len());
    let without = |range: std::ops::Range<usize>| {
        [&lines[..range.start], &lines[range.end.min(lines.len())..]].concat().join("\n")
    };
    match random.below(7) {
        0 => bytes.truncate(at),
        1 => bytes[at] = b"0123456789abcdef<>\"/ ,x-."[random.below(25)],
        2 => return without(line..line + 1),
        3 => return without(line..line + 1 + random.below(40)),
        4 => {
            let copy = [&lines[..=line], &lines[line..]].concat();
            return copy.join("\n");
        }
        5 => {
            // Changes a number.
            let digits = (at..bytes.len()).find(|i| bytes[*i].is_ascii_digit()).unwrap_or(at);
            bytes[digits] = b'0' + random.below(10) as u8;
        }
        _ => {
            let (a, b) = (line, random.below(lines.len()));
            let mut swapped = lines.clone();
            swapped.swap(a, b);
            return swapped.join("\n");
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[test]
fn damaged_descriptions_are_refused_or_placed_but_never_panic() {
    let full = std::env::var_os("ONEBOX_FULL").is_some();
    let mut random = Random(20261121);
    let (mut refused, mut used, mut crashes) = (0, 0, 0);
    for name in names() {
        let text = text_of(&name);
        for round in 0..if full { 400 } else { 25 } {
            let mut bad = damaged(&text, &mut random);
            for _ in 0..random.below(3) {
                bad = damaged(&bad, &mut random);
            }
            match Machine::from_xml(&bad) {
                Ok(machine) => {
                    used += 1;
                    use_it(&machine, &format!("{name} damaged {round}"));
                }
                Err(error) => {
                    refused += 1;
                    let crashed = error.to_string().contains("breaks down");
                    crashes += usize::from(crashed);
                    if let Some(folder) =
                        std::env::var_os("ONEBOX_KEEP_CRASHES").filter(|_| crashed)
                    {
                        let file = format!("crash-{name}-{round}.xml");
                        std::fs::write(Path::new(&folder).join(file), &bad).unwrap();
                    }
                }
            }
        }
    }
    println!("{used} used, {refused} refused, {crashes} of these since hwloc crashes over them");
    assert!(refused > 20 && used > 20, "{refused} refused, {used} used");
}

#[test]
fn a_picture_shows_a_slow_link_and_what_a_hypervisor_hides() {
    let shown = |name| {
        let machine = load(name);
        let placement = placed(&machine, 1, machine.gpus.len());
        let found = warnings(&machine, Some(&placement), &Environment::default());
        let shown =
            ReportSubject { machine: &machine, placement: Some(&placement), warnings: &found };
        (report::svg(&shown), report::table(&shown))
    };
    let (svg, _) = shown("workstation-tr-4xA6000");
    assert_eq!(svg.matches("slow: peers 31.51").count(), 1, "the card with 8 lanes");
    assert_eq!(svg.matches("not shared").count(), 3);
    assert!(svg.contains("#b7791f"), "in a colour of its own");
    let (svg, table) = shown("vm-flat-8xH100");
    assert_eq!((svg.matches("sharing hidden").count(), svg.matches("not shared").count()), (8, 0));
    assert!(svg.contains("KVM (virtual machine): 8 GPUs"));
    assert!(
        table.contains("        ?  ") && table.contains("warning [tree-hidden]: a virtual machine"),
        "{table}"
    );
    let (svg, _) = shown("dgx2");
    assert!(!svg.contains("hidden") && !svg.contains("slow"));
}
