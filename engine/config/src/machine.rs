//! What the topology of a described box says, against what its file says.

use super::reading::reader::Reader;
use super::reading::report::Problem;
use super::reading::section::{Or, Section};
use super::reading::value::Complaint;
use super::{BoxConfig, Config, bundled};
use std::path::Path;
use std::sync::Arc;
use topology::{Machine, counted};

/// The machine in the XML of `topology`, if there is one; errors of the XML are reported.
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
    if let Some(place) = s.reader.places.get("topology").copied() {
        s.reader.report("topology", place, Complaint { message, help: help.into() });
    }
    s.reader.mark_bad("topology");
    None
}

/// The machine with what its description says of each node's memory, where the node has some.
pub(super) fn with_node_memory(machine: Arc<Machine>, node_memory: u64) -> Arc<Machine> {
    let mut machine = Arc::unwrap_or_clone(machine);
    for node in machine.numa_nodes.iter_mut().filter(|node| node.memory_bytes > 0) {
        node.memory_bytes = node_memory;
    }
    Arc::new(machine)
}

impl BoxConfig {
    /// The same box with other memory in each GPU and on each node.
    pub fn with_memory(&self, gpu_memory: u64, node_memory: u64) -> Self {
        let machine = self.machine.clone();
        let machine = machine.map(|machine| with_node_memory(machine, node_memory));
        Self { gpu_memory, node_memory, machine, ..self.clone() }
    }
}

/// A number that the topology tells too.
pub(super) struct Told {
    pub(super) key: &'static str,
    /// `GPU`
    pub(super) what: &'static str,
    pub(super) most: u64,
    /// Without a topology.
    pub(super) or: Or<usize>,
    /// Machines alike, where the number is of all of them.
    pub(super) machines: usize,
    /// For its documentation.
    pub(super) doc: &'static str,
}

/// Reads a number that the topology tells too: `of_one` on each machine.
pub(super) fn number(s: &mut Section<'_, '_>, told: Told, of_one: Option<usize>) -> usize {
    let Told { key, what, most, or, machines, doc } = told;
    if !s.reader.ok(&["topology"]) {
        return s.uint(key, 1..=most, Or::Derived(1, "of the topology", &["topology"]), doc);
    }
    let Some(of_one) = of_one else { return s.uint(key, 1..=most, or, doc) };
    let there = of_one * machines;
    let value = s.uint(key, 1..=most, Or::Derived(there, "of the topology", &["topology"]), doc);
    if s.reader.ok(&[key]) && value != there {
        disagree(s.reader, (key, what), value, (of_one, machines));
    }
    value
}

fn disagree(
    reader: &mut Reader,
    (key, what): (&'static str, &str),
    said: usize,
    (of_one, machines): (usize, usize),
) {
    let there = of_one * machines;
    let product =
        if machines > 1 { format!(" ({machines} machines of {of_one})") } else { String::new() };
    let spots = vec![
        reader.spot(key, counted(said, what)),
        reader.spot("topology", format!("{}{product}", counted(there, what))),
    ];
    reader.mark_bad(key);
    reader.problems.push(Problem {
        key: key.into(),
        message: format!("{}, but the topology has {there}{product}", counted(said, what)),
        help: format!("leave `{key}` out: it follows from the topology"),
        spots,
    });
}

impl BoxConfig {
    /// Ranks of each machine under the grid of `config`: all of them, where one machine has the GPUs.
    ///
    /// # Errors
    /// In words, why the grid and the machines do not go together.
    pub fn ranks_per_machine(&self, config: &Config) -> Result<usize, String> {
        let (tensor, data) = (config.parallel.tensor, config.parallel.data);
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
