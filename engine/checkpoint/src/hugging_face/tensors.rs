//! Numbers of a folder's tensors in fp32, and the message for a tensor that is missing.

use half::{bf16, f16};
use layout::tensor_names::HEAD;

/// Largest number of tensor names in a message.
const NAMED: usize = 3;

/// The error message for a missing tensor of a folder that has the tensors `strange` besides.
pub(super) fn missing(name: &str, strange: &[&str]) -> String {
    let named: Vec<&str> = strange.iter().take(NAMED).copied().collect();
    let named = named.join("`, `");
    let others = match strange.len() {
        0 => String::new(),
        n @ 1..=NAMED => format!("; it has `{named}`, which {}", are_none(n)),
        n => format!("; it has `{named}` and {} more, which {}", n - NAMED, are_none(n)),
    };
    let untied = match (name, strange) {
        (HEAD, []) => {
            ": if its output is the embedding, write `\"tie_word_embeddings\": true` into config.json"
        }
        _ => "",
    };
    format!("it has no `{name}`{others}{untied}")
}

const fn are_none(count: usize) -> &'static str {
    if count == 1 { "is no tensor of this model" } else { "are no tensors of this model" }
}

/// Converts numbers to fp32, from a type that `Folder::places` accepts.
pub(super) fn widen(dtype: &str, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        "F16" => widen_by(bytes, out, |b| f16::from_le_bytes(b).to_f32()),
        "BF16" => widen_by(bytes, out, |b| bf16::from_le_bytes(b).to_f32()),
        _ => widen_by(bytes, out, f32::from_le_bytes),
    }
}

fn widen_by<const N: usize>(bytes: &[u8], out: &mut [f32], number: impl Fn([u8; N]) -> f32) {
    out.iter_mut().zip(bytes.as_chunks::<N>().0).for_each(|(out, bytes)| *out = number(*bytes));
}

/// The elements of matrices of the same `size`, (rows, columns), column by column: elements of
/// one place follow each other.
pub(super) fn alternated(parts: &[Vec<f32>], (rows, columns): (usize, usize)) -> Vec<f32> {
    let mut all = Vec::with_capacity(parts.len() * rows * columns);
    for place in (0..columns).flat_map(|column| (0..rows).map(move |row| row * columns + column)) {
        all.extend(parts.iter().map(|part| part[place]));
    }
    all
}
