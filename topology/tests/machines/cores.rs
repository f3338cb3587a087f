//! Cores that have no memory of their own, and cores of several kinds.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

use std::fmt::Write as _;

use topology::report::{ReportSubject, table};
use topology::{Environment, Machine, Placement, Request, Seats, Warning, place, warnings};

/// XML of a box, as hwloc 2 exports it. A socket has quarters with `each` cores and a NUMA node, or
/// with no node if hwloc has dropped a node without memory. `kinds` has the name, the efficiency
/// and the CPU mask of each kind of cores.
fn xml(each: u32, sockets: &[&[bool]], kinds: &[(&str, u32, u64)]) -> String {
    let set = |cpus: std::ops::Range<u32>| {
        let mask = cpus.fold(0u64, |mask, cpu| mask | 1 << cpu);
        let (high, low) = (mask >> 32, mask & 0xffff_ffff);
        format!("{}0x{low:08x}", if high > 0 { format!("0x{high:08x},") } else { String::new() })
    };
    let quarters: u32 = sockets.iter().map(|quarters| quarters.len() as u32).sum();
    let with_memory = |(node, has): (usize, &bool)| has.then_some(node as u32);
    let nodes =
        sockets.concat().iter().enumerate().filter_map(with_memory).fold(0, |m, n| m | 1 << n);
    let nodes_of =
        |nodes: u32| format!("nodeset=\"0x{nodes:08x}\" complete_nodeset=\"0x{nodes:08x}\"");
    let (mut text, mut id) = (String::new(), 1);
    let mut open = |text: &mut String,
                    what: &str,
                    cpus: std::ops::Range<u32>,
                    nodes: u32,
                    more: &str| {
        id += 1;
        let cpus = set(cpus);
        let _ = writeln!(
            text,
            "<object type={what} cpuset=\"{cpus}\" complete_cpuset=\"{cpus}\" {} gp_index=\"{id}\"{more}",
            nodes_of(nodes)
        );
    };
    let all = 0..quarters * each;
    let allowed =
        format!(" allowed_cpuset=\"{}\" allowed_nodeset=\"0x{nodes:08x}\">", set(all.clone()));
    open(&mut text, "\"Machine\" os_index=\"0\"", all, nodes, &allowed);
    let mut quarter = 0;
    for (socket, quarters) in sockets.iter().enumerate() {
        let first = quarter;
        let own =
            quarters.iter().zip(first..).filter(|(has, _)| **has).fold(0, |m, (_, n)| m | 1 << n);
        let cpus = first * each..(first + quarters.len() as u32) * each;
        open(&mut text, &format!("\"Package\" os_index=\"{socket}\""), cpus, own, ">");
        for has in *quarters {
            let cpus = quarter * each..(quarter + 1) * each;
            let node = if *has { 1 << quarter } else { 0 };
            open(&mut text, "\"Group\"", cpus.clone(), node, " kind=\"10\" subkind=\"0\">");
            if *has {
                let more = " local_memory=\"68719476736\"/>";
                open(
                    &mut text,
                    &format!("\"NUMANode\" os_index=\"{quarter}\""),
                    cpus.clone(),
                    node,
                    more,
                );
            }
            for cpu in cpus {
                open(&mut text, &format!("\"Core\" os_index=\"{cpu}\""), cpu..cpu + 1, node, ">");
                open(&mut text, &format!("\"PU\" os_index=\"{cpu}\""), cpu..cpu + 1, node, "/>");
                text += "</object>\n";
            }
            text += "</object>\n";
            quarter += 1;
        }
        text += "</object>\n";
    }
    text += "</object>\n<support name=\"discovery.pu\"/>\n";
    for (name, efficiency, cpus) in kinds {
        let _ = writeln!(
            text,
            "<cpukind cpuset=\"0x{cpus:08x}\" forced_efficiency=\"{efficiency}\"><info name=\"CoreType\" value=\"{name}\"/></cpukind>"
        );
    }
    format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<!DOCTYPE topology SYSTEM \"hwloc2.dtd\">\n\
         <topology version=\"2.0\">\n{text}</topology>\n"
    )
}

fn placed(machine: &Machine, ranks: usize) -> (Placement, Vec<Warning>) {
    let request = Request { tp: 1, dp: ranks, seats: Seats::Virtual, ..Request::default() };
    let placement = place(machine, &request).unwrap();
    let found = warnings(machine, Some(&placement), &Environment::default());
    (placement, found)
}

/// NUMA node and CPUs of each rank.
fn seats(machine: &Machine, ranks: usize) -> Vec<(u32, Vec<u32>)> {
    let (placement, _) = placed(machine, ranks);
    placement.ranks.into_iter().map(|rank| (rank.numa_node, rank.cpus)).collect()
}

/// `hwloc-calc --intersect pu package:N` of hwloc 2.9 prints the same cores for each socket.
#[test]
fn cores_without_memory_stay_in_their_socket_and_are_dealt_evenly() {
    let cores = |range: std::ops::Range<u32>| range.collect::<Vec<_>>();
    // Half of each socket's memory modules are missing.
    let machine = Machine::from_xml(&xml(4, &[&[true, false], &[true, false]], &[])).unwrap();
    assert_eq!(seats(&machine, 2), [(0, cores(0..8)), (2, cores(8..16))]);
    let machine = Machine::from_xml(&xml(4, &[&[false, true], &[false, true]], &[])).unwrap();
    assert_eq!(seats(&machine, 2), [(1, cores(0..8)), (3, cores(8..16))]);
    // Two nodes get the cores of the two nodes without memory.
    let machine =
        Machine::from_xml(&xml(4, &[&[true, true, false, false], &[true; 4]], &[])).unwrap();
    let of = |node| machine.cores.iter().filter(move |core| core.numa_node == node).count();
    assert_eq!([0, 1, 4, 5, 6, 7].map(of), [8, 8, 4, 4, 4, 4]);
    let ranks = seats(&machine, 2);
    assert_eq!(ranks[1], (5, cores(16..32)));
    // The other sockets get the cores of a socket without any memory.
    let machine = Machine::from_xml(&xml(4, &[&[true], &[false, false], &[true]], &[])).unwrap();
    let of = |node| machine.cores.iter().filter(move |core| core.numa_node == node).count();
    assert_eq!([0, 3].map(of), [8, 8]);
}

#[test]
fn the_table_and_a_finding_show_where_cores_without_memory_count() {
    let machine = Machine::from_xml(&xml(4, &[&[true, false], &[true, false]], &[])).unwrap();
    let (placement, found) = placed(&machine, 2);
    let shown = ReportSubject { machine: &machine, placement: Some(&placement), warnings: &found };
    let table = table(&shown);
    for line in ["0     0           8   64.00 GiB           -     0  0-7", "2     1           8"] {
        assert!(table.contains(line), "{line}\n{table}");
    }
    let warning = found.iter().find(|warning| warning.id == "cores-without-memory").unwrap();
    assert_eq!(
        warning.text,
        "8 cores (CPUs 4-7,12-15) have no memory next to them: they work from that of node 0,2"
    );
    let whole = Machine::from_xml(&xml(4, &[&[true, true]], &[])).unwrap();
    assert!(placed(&whole, 2).1.iter().all(|warning| warning.id != "cores-without-memory"));
}

/// Kinds of cores, as `lstopo --cpukinds` of hwloc 2.9 prints them: the slowest first.
const FAST_AND_SLOW: [(&str, u32, u64); 2] = [("IntelAtom", 0, 0xff0), ("IntelCore", 1, 0xf)];

#[test]
fn ranks_get_cores_of_each_kind_alike() {
    let machine = Machine::from_xml(&xml(12, &[&[true]], &FAST_AND_SLOW)).unwrap();
    assert_eq!(machine.core_kinds.len(), 2);
    let names: Vec<_> = machine.core_kinds.iter().map(|kind| kind.name.as_deref()).collect();
    assert_eq!(names, [Some("IntelCore"), Some("IntelAtom")]);
    // Each rank has cores of each kind, and all ranks have the same number of cores.
    let ranks = seats(&machine, 2);
    assert_eq!(ranks[0].1, [0, 1, 4, 5, 6, 7]);
    assert_eq!(ranks[1].1, [2, 3, 8, 9, 10, 11]);
    assert!(placed(&machine, 2).1.iter().all(|warning| warning.id != "cores-unlike"));
    let three = seats(&machine, 3);
    assert_eq!(three[0].1, [0, 1, 4, 5]);
    assert_eq!(three[1].1, [2, 6, 7, 8]);
    assert_eq!(three[2].1, [3, 9, 10, 11]);
    let (placement, found) = placed(&machine, 3);
    let unlike = |found: &[Warning]| {
        found
            .iter()
            .find(|warning| warning.id == "cores-unlike")
            .map(|warning| warning.text.clone())
    };
    assert_eq!(
        unlike(&found).unwrap(),
        "the ranks have cores of different kinds (rank 0: 2 IntelCore and 2 IntelAtom; ranks 1-2: 1 IntelCore and 3 \
         IntelAtom), and the slowest rank sets the pace"
    );
    let shown = ReportSubject { machine: &machine, placement: Some(&placement), warnings: &found };
    let kinds = "kinds of cores: 4 IntelCore (CPUs 0-3), 8 IntelAtom (CPUs 4-11)\n";
    assert!(table(&shown).contains(kinds), "{}", table(&shown));
    // Some ranks have slow cores only.
    let (_, found) = placed(&machine, 6);
    assert!(unlike(&found).unwrap().contains("ranks 4-5: 2 IntelAtom)"), "{found:?}");
}
