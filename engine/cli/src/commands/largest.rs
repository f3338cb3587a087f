//! Messages if a model fits with no layout: the short memory, and the largest model of its shape.

use super::check::count;
use config::{Config, DeviceConfig, LoadedConfig};
use layout::LocalMachine;
use predict::States;
use predict::changes::arguments;
use predict::remedies::{LargestModel, largest};
use predict::shortage::{Memory, MemoryShortage, Shortage};
use serde::Serialize;
use std::fmt::Write as _;
use topology::{counted, format_bytes};

/// Report for the case that no layout fits and no change helps.
#[derive(Debug, Serialize)]
pub(super) struct ShortageReport {
    /// Memory that is too small, and enough memory: with bf16 Adam moments, and with equal results.
    pub(super) shortages: Vec<Shortage>,
    /// Largest model of the same shape that fits; `None` for a trained model from a folder.
    pub(super) largest: Option<LargestModel>,
}

impl ShortageReport {
    pub(super) fn of(loaded: &LoadedConfig, machine: &LocalMachine, gpus: Option<usize>) -> Self {
        let shortages = predict::shortage::shortages(loaded, machine, gpus);
        Self { shortages, largest: largest(loaded, machine, gpus) }
    }

    /// Lines about the memory that is too small, the amounts that would be enough, and the largest
    /// model that fits. If `sets`, each amount comes with the settings that it needs.
    pub(super) fn lines(&self, config: &Config, sets: bool) -> Vec<String> {
        let mut lines = lines_of(config, &self.shortages, sets);
        if config.model.from.is_none() {
            lines.push(at_most(config, self.largest.as_ref()));
        }
        lines
    }
}

/// Lines about the memory that is too small, and the amounts that would be enough. If `sets`, each amount
/// comes with the settings that it needs.
pub(super) fn lines_of(config: &Config, shortages: &[Shortage], sets: bool) -> Vec<String> {
    let first = shortages.first().map(|shortage| short(config, shortage));
    let enough = shortages.iter().map(|shortage| enough(config, shortage, sets));
    first.into_iter().chain(enough).collect()
}

/// Describes a memory that is too small: the bytes for the nearest layout, and the available bytes.
fn short(config: &Config, shortage: &Shortage) -> String {
    let Shortage { short, states, tensor, data, micro, words, .. } = shortage;
    let (names, needs): (Vec<_>, Vec<_>) = short
        .iter()
        .map(|one| {
            let (enough, there) = (format_bytes(one.enough), format_bytes(one.there));
            let (name, each) = (name(one), each(one, config));
            (name, format!("{enough} of {name}{each}, and {there} are there"))
        })
        .unzip();
    let verb = if names.len() > 1 { "are" } else { "is" };
    let with = match states {
        States::Given => "",
        States::SplitMaster => ", even with split fp32 parameters",
        States::Bf16Moments => ", even with bf16 Adam moments",
    };
    format!(
        "{} {verb} too small{with}: the nearest layout (TP {tensor} x DP {data}, micro {micro}, {words}) needs {}",
        names.join(" and "),
        needs.join("; ")
    )
}

fn name(short: &MemoryShortage) -> &'static str {
    match short.memory {
        Memory::Gpu => "GPU memory",
        Memory::Host => "host memory",
    }
}

/// Words for the GPUs or nodes that each have an amount; empty if there is only one.
fn each(short: &MemoryShortage, config: &Config) -> String {
    match (short.memory, short.nodes) {
        (Memory::Host, 1) => String::new(),
        (Memory::Host, nodes) => format!(" on each of {nodes} NUMA nodes"),
        (Memory::Gpu, _) => match &config.device {
            DeviceConfig::Sim { box_, .. } if box_.gpus == 1 => String::new(),
            _ => " on each GPU".into(),
        },
    }
}

/// Line about an amount that is enough: `with 307.34 GiB of host memory: yes`.
fn enough(config: &Config, shortage: &Shortage, sets: bool) -> String {
    let amount = |short: &MemoryShortage| {
        format!("{} of {}{}", format_bytes(short.enough), name(short), each(short, config))
    };
    let amounts: Vec<String> = shortage.short.iter().map(amount).collect();
    let mut line = format!("with {}: yes", amounts.join(" and "));
    line += match shortage.states {
        States::Given => "",
        States::SplitMaster => ", with split fp32 parameters, the same results",
        States::Bf16Moments => ", with bf16 Adam moments, which change results",
    };
    if sets && !shortage.sets.is_empty() {
        let _ = write!(line, ": {}", arguments(&shortage.sets));
    }
    line
}

fn at_most(config: &Config, largest: Option<&LargestModel>) -> String {
    let Some(LargestModel { layers, parameters, sets }) = largest else {
        return "not even one layer of this shape fits".into();
    };
    format!(
        "with one or two changes at most {layers} of its {} fit, {} parameters, with {}",
        counted(config.model.layers, "layer"),
        count(*parameters as f64),
        arguments(sets),
    )
}

/// Note about states that differ from those of the config; `None` if they are equal.
pub(super) fn of_states(states: States, config: &Config) -> Option<&'static str> {
    let split = config.offload.master == config::Master::Split;
    match states {
        States::Given => None,
        States::SplitMaster => Some(
            "fp32 parameters are kept in two halves: the same results in 18 instead of 20 bytes per parameter on the host",
        ),
        States::Bf16Moments if split => Some(
            "results change: bf16 moments are rounded stochastically; with split fp32 parameters the host keeps 14 instead of 20 bytes \
             per parameter",
        ),
        States::Bf16Moments => Some(
            "results change: bf16 moments are rounded stochastically; the host keeps 16 instead of 20 bytes per parameter",
        ),
    }
}
