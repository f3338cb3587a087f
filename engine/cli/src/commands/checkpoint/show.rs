//! `onebox checkpoint show`.

use super::super::check::count;
use super::super::exit::CommandError;
use super::super::{print, print_json};
use super::failed;
use checkpoint::Summary;
use checkpoint::inspect::checkpoints_of;
use checkpoint::manifest::TensorEntry;
use std::fmt::Write;
use std::path::Path;
use topology::{counted, format_bytes};

pub(super) fn run(path: &Path, json: bool) -> Result<(), CommandError> {
    let all = checkpoints_of(path).map_err(failed)?;
    let newest = all.last().map_or(path, |newest| newest.as_path());
    let summary = Summary::read(newest).map_err(failed)?;
    if json {
        return print_json(&summary.json());
    }
    let others: Vec<String> = all[..all.len().saturating_sub(1)]
        .iter()
        .filter_map(|path| Some(path.file_name()?.to_string_lossy().into_owned()))
        .collect();
    print(&text(&summary, &others)?)
}

fn text(summary: &Summary, others: &[String]) -> Result<String, CommandError> {
    let config = summary.config().map_err(failed)?.config;
    let (m, p) = (&config.model, &config.parallel);
    let tensors = summary.tensors();
    let parameters: usize = tensors.iter().map(TensorEntry::num_elements).sum();
    let mut lines = vec![("checkpoint", summary.path().display().to_string())];
    if !others.is_empty() {
        lines.push(("others", format!("{} of this run", others.join(", "))));
    }
    lines.extend(summary.lines());
    lines.push((
        "states",
        format!(
            "{} in {}: fp32 parameters and Adam's two moments",
            format_bytes(summary.bytes()),
            counted(summary.num_files(), "file")
        ),
    ));
    lines.push((
        "model",
        format!(
            "{} parameters: {}, hidden {}, {}, {}, vocabulary {}",
            count(parameters as f64),
            counted(m.layers, "layer"),
            m.hidden,
            counted(m.heads, "head"),
            counted(m.seq_len, "token"),
            m.vocab
        ),
    ));
    lines.push((
        "layout",
        format!(
            "written by TP {} x DP {}, {:?}; any layout can go on from it",
            p.tensor, p.data, config.precision
        ),
    ));
    let mut text = String::new();
    for (what, words) in lines {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{what:<12}{words}");
    }
    text += &table(tensors);
    Ok(text)
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

/// `0-3, 6`
fn ranges(numbers: &[usize]) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for number in numbers {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == *number => *last = *number,
            _ => runs.push((*number, *number)),
        }
    }
    let run = |(first, last): &(usize, usize)| match last - first {
        0 => first.to_string(),
        _ => format!("{first}-{last}"),
    };
    runs.iter().map(run).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    #[test]
    fn numbers_in_a_row_are_a_range() {
        assert_eq!(super::ranges(&[0, 1, 2, 3, 6, 8, 9]), "0-3, 6, 8-9");
        assert_eq!(super::ranges(&[]), "");
    }
}
