//! The lines of a plan about buffers of one kind.

use predict::plan::Buffer;
use topology::format_bytes;

/// Buffers of one shape whose names differ only in their numbers.
struct SimilarBuffers<'a> {
    first: &'a Buffer,
    last: &'a Buffer,
    count: usize,
    bytes: u64,
}

/// Whether two buffers have one shape, and names that differ only in their numbers.
fn are_similar(a: &Buffer, b: &Buffer) -> bool {
    let is_number = |part: &str| part.parse::<u32>().is_ok();
    let parts = |buffer: &Buffer| buffer.name.split('.').count();
    let mut pairs = a.name.split('.').zip(b.name.split('.'));
    a.shape == b.shape
        && parts(a) == parts(b)
        && pairs.all(|(a, b)| a == b || (is_number(a) && is_number(b)))
}

impl SimilarBuffers<'_> {
    fn line(&self) -> String {
        let Self { first, last, count, bytes } = self;
        let part = |(a, b): (&str, &str)| {
            if a == b { a.to_owned() } else { format!("{{{a}..{b}}}") }
        };
        let parts = first.name.split('.').zip(last.name.split('.')).map(part);
        let name = parts.collect::<Vec<_>>().join(".");
        let times = if *count > 1 { format!("{count} x ") } else { String::new() };
        let ((rows, cols), size) = (first.shape, format_bytes(*bytes));
        format!("{name:<34} {size:>11}  {times}{} [{rows}, {cols}]", first.dtype)
    }
}

/// One line for all buffers that are similar: `block.{0..68}.params`.
pub(super) fn lines<'a>(buffers: impl Iterator<Item = &'a Buffer>) -> Vec<String> {
    let mut groups: Vec<SimilarBuffers<'a>> = Vec::new();
    for buffer in buffers {
        let bytes = buffer.bytes;
        match groups.iter_mut().find(|group| are_similar(group.first, buffer)) {
            Some(group) => {
                group.last = buffer;
                group.count += 1;
                group.bytes += bytes;
            }
            None => groups.push(SimilarBuffers { first: buffer, last: buffer, count: 1, bytes }),
        }
    }
    groups.iter().map(SimilarBuffers::line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn buffer(name: &str, shape: (usize, usize)) -> Buffer {
        let bytes = 4 * (shape.0 * shape.1) as u64;
        Buffer { name: name.into(), pool: "routes", dtype: "f32".into(), shape, offset: 0, bytes }
    }

    #[test]
    fn buffers_that_differ_in_two_numbers_share_a_line() {
        let mut all = vec![buffer("final_norm.sum", (1, 256)), buffer("block.7.lse", (1, 256))];
        for set in 1..3 {
            for block in 0..4 {
                all.push(buffer(&format!("set.{set}.block.{block}.moe.logits"), (8, 32)));
            }
        }
        all.push(buffer("set.1.block.0.moe.logits", (8, 64)));
        let found = lines(all.iter());
        let words: Vec<Vec<&str>> =
            found.iter().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(
            words,
            [
                vec!["final_norm.sum", "1.00", "KiB", "f32", "[1,", "256]"],
                vec!["block.7.lse", "1.00", "KiB", "f32", "[1,", "256]"],
                vec![
                    "set.{1..2}.block.{0..3}.moe.logits",
                    "8.00",
                    "KiB",
                    "8",
                    "x",
                    "f32",
                    "[8,",
                    "32]"
                ],
                vec!["set.1.block.0.moe.logits", "2.00", "KiB", "f32", "[8,", "64]"],
            ]
        );
    }
}
