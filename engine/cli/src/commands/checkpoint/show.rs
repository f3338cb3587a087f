//! `onebox checkpoint show`: prints the contents of a checkpoint.

use super::super::check::model_words;
use super::super::{CommandError, print, print_json};
use super::InspectionArgs;
use crate::report::curves;
use checkpoint::Summary;
use checkpoint::inspect::checkpoints_of;
use checkpoint::manifest::TensorEntry;
use config::{Adapter, Config};
use files::foreign_text::foreign;
use files::names::checkpoint_name;
use files::path_text::ShownPath;
use layout::build::shape;
use std::fmt::Write;
use std::path::Path;
use topology::{counted, format_bytes};

pub(super) fn run(InspectionArgs { path, json }: &InspectionArgs) -> Result<(), CommandError> {
    let all = checkpoints_of(path)?;
    let newest = all.last().unwrap_or(path);
    let summary = Summary::read(newest)?;
    if *json {
        return print_json(&summary.json());
    }
    let others: Vec<String> = all[..all.len().saturating_sub(1)]
        .iter()
        .filter_map(|path| Some(path.file_name()?.to_string_lossy().into_owned()))
        .collect();
    print(&text(&summary, &others)?)
}

fn text(summary: &Summary, others: &[String]) -> Result<String, CommandError> {
    let config = summary.config()?.config;
    let (m, p) = (&config.model, &config.parallel);
    let tensors = summary.tensors();
    let parameters: usize = tensors.iter().map(TensorEntry::num_elements).sum();
    let all = shape(&config).parameters();
    let (bytes, files) = (format_bytes(summary.bytes()), counted(summary.num_files(), "file"));
    let (tensor, data, precision) = (p.tensor, p.data, config.precision);
    let mut lines = vec![("checkpoint", summary.path().shown().to_string())];
    if !others.is_empty() {
        lines.push(("others", format!("{} of this run", others.join(", "))));
    }
    lines.extend(summary.lines());
    if let Some(best) = summary.best() {
        let name = checkpoint_name(best.step);
        lines.push(("best", format!("{name} of this run, validation loss {:.4}", best.loss())));
    }
    lines.extend([
        ("states", format!("{bytes} in {files}: fp32 parameters and Adam's two moments")),
        ("model", model_words(m, all as f64)),
    ]);
    if let Some(words) = adapter_words(&config, parameters) {
        lines.push(("adapters", words));
        lines.push(("base", base_words(summary, &config)));
    }
    if !config.optimizer.frozen.is_empty() {
        lines.push(("trained", counted(parameters, "parameter")));
        lines.push(("frozen", frozen_words(&config, all - parameters as u64)));
        lines.push(("base", base_words(summary, &config)));
    }
    lines.extend([(
        "layout",
        format!("written by TP {tensor} x DP {data}, {precision:?}; any layout can go on from it"),
    )]);
    let mut text = String::new();
    for (what, words) in lines {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{what:<12}{words}");
    }
    text += &table(tensors);
    Ok(text)
}

/// Rank, linears and number of `parameters` of the adapters; `None` if the run trains all weights.
fn adapter_words(config: &Config, parameters: usize) -> Option<String> {
    let Adapter::Lora { rank, alpha, rank_stabilized, targets, dropout, .. } = &config.adapter
    else {
        return None;
    };
    let names = targets.names(&config.model).join(", ");
    let root = if *rank_stabilized { ", divided by the root of the rank" } else { "" };
    let parameters = counted(parameters, "parameter");
    let dropout = if *dropout > 0.0 { format!(", dropout {dropout}") } else { String::new() };
    Some(format!("rank {rank}, alpha {alpha}{root}{dropout}, of {names}: {parameters}"))
}

/// Number of the frozen `parameters`, and the globs of their names.
fn frozen_words(config: &Config, parameters: u64) -> String {
    let globs: Vec<String> =
        config.optimizer.frozen.iter().map(|glob| format!("`{}`", foreign(glob))).collect();
    format!("{}, of {}", counted(parameters, "parameter"), globs.join(", "))
}

/// The frozen weights of the run: their folder, and the beginning of their hash.
fn base_words(summary: &Summary, config: &Config) -> String {
    match (config.model.pretrained(), summary.base()) {
        (Some(from), Some(hash)) => format!(
            "{}, hash {}; it is not in the checkpoint: keep the folder",
            Path::new(from).shown(),
            hash.short()
        ),
        (..) => "random weights of the run, which are in no folder".into(),
    }
}

fn table(tensors: &[TensorEntry]) -> String {
    let widest = tensors.iter().map(|t| t.name.len()).max().unwrap_or(0).max("TENSOR".len());
    let mut text =
        format!("\n{:widest$}  {:>14}  {:>14}  FILES\n", "TENSOR", "SHAPE", "PARAMETERS");
    for tensor in tensors {
        let TensorEntry { name, shape: [rows, columns], .. } = tensor;
        let (elements, files) = (tensor.num_elements(), tensor.files());
        let shape = if *columns == 1 { rows.to_string() } else { format!("{rows} x {columns}") };
        let _ = writeln!(text, "{name:widest$}  {shape:>14}  {elements:>14}  {}", ranges(&files));
    }
    text
}

/// Formats numbers as ranges: `0-3, 6`.
fn ranges(numbers: &[usize]) -> String {
    let range = |(first, last): (u64, u64)| match last - first {
        0 => first.to_string(),
        _ => format!("{first}-{last}"),
    };
    let all = curves::ranges(numbers.iter().map(|number| *number as u64));
    all.into_iter().map(range).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    #[test]
    fn numbers_in_a_row_are_a_range() {
        assert_eq!(super::ranges(&[0, 1, 2, 3, 6, 8, 9]), "0-3, 6, 8-9");
        assert_eq!(super::ranges(&[]), "");
    }
}
