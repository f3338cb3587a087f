//! Reads the topology of a described box, and the numbers that the box file must share with it.

use super::bundled;
use super::reading::{Complaint, Declaration, KeyDefault, Section, Violation};
use std::path::Path;
use std::sync::Arc;
use topology::{Machine, counted};

/// Machine in the XML of `topology`, if the box has a topology. Errors of the XML are reported.
pub(super) fn read(s: &mut Section<'_, '_>, path: Option<&str>) -> Option<Arc<Machine>> {
    let path = path?;
    let machine = match bundled::topology(path) {
        Some(xml) => Machine::from_xml(xml),
        None => Machine::from_xml_file(Path::new(path)),
    };
    let refused = match machine {
        Ok(machine) if machine.gpus.is_empty() => "it has no GPU".to_owned(),
        Ok(machine) => return Some(Arc::new(machine)),
        Err(error) => error.to_string(),
    };
    let message = format!("the topology `{path}` cannot be used: {refused}");
    let help = "see `onebox topology --xml FILE`; export one with `lstopo --whole-io box.xml`";
    s.reader.refuse_value("topology", Complaint { message, help: help.into() });
    s.reader.mark_bad("topology");
    None
}

/// Machine with the memory of the box file on each node that has memory.
pub(super) fn with_node_memory(machine: Arc<Machine>, node_memory: u64) -> Arc<Machine> {
    let mut machine = Arc::unwrap_or_clone(machine);
    for node in machine.numa_nodes.iter_mut().filter(|node| node.memory_bytes > 0) {
        node.memory_bytes = node_memory;
    }
    Arc::new(machine)
}

/// A number of the box that a topology gives, too.
pub(super) struct TopologyNumber {
    /// Singular of the counted thing: `GPU`.
    pub(super) what: &'static str,
    pub(super) most: u64,
    /// Default without a topology.
    pub(super) or: KeyDefault<usize>,
    /// Number of equal machines that the number covers.
    pub(super) machines: usize,
    /// Number that the topology gives for each machine.
    pub(super) per_machine: Option<usize>,
}

impl Section<'_, '_> {
    /// Reads a number that a topology gives too, and refuses a different number.
    pub(super) fn counted(&mut self, key: Declaration, number: TopologyNumber) -> usize {
        let TopologyNumber { what, most, or, machines, per_machine: of_one } = number;
        if !self.reader.ok(&["topology"]) {
            return self.uint(
                key,
                1..=most,
                KeyDefault::Derived(1, "of the topology", &["topology"]),
            );
        }
        let Some(of_one) = of_one else { return self.uint(key, 1..=most, or) };
        let in_topology = of_one * machines;
        let or = KeyDefault::Derived(in_topology, "of the topology", &["topology"]);
        let (given, key) = (self.uint(key, 1..=most, or), key.name);
        if !self.reader.ok(&[key]) || given == in_topology {
            return given;
        }
        let product = match machines {
            1 => String::new(),
            _ => format!(" ({machines} machines of {of_one})"),
        };
        self.reader.mark_bad(key);
        self.reader.refuse(Violation {
            message: format!(
                "{}, but the topology has {in_topology}{product}",
                counted(given, what)
            ),
            help: format!("leave `{key}` out: it follows from the topology"),
            values: vec![
                (key, counted(given, what)),
                ("topology", format!("{}{product}", counted(in_topology, what))),
            ],
        });
        given
    }
}
