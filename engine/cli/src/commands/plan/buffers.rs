//! The lines of a plan about buffers of one kind.

use predict::plan::Buffer;
use topology::format_bytes;

/// Buffers of one shape whose names differ only in their numbers.
struct SimilarBuffers<'a> {
    /// The parts of the name between dots.
    parts: Vec<&'a str>,
    /// By part that is a number: the first and the last number.
    numbers: Vec<[&'a str; 2]>,
    first: &'a Buffer,
    count: usize,
    bytes: u64,
}

fn is_number(part: &str) -> bool {
    part.parse::<u32>().is_ok()
}

impl<'a> SimilarBuffers<'a> {
    fn new(first: &'a Buffer) -> Self {
        let parts: Vec<&str> = first.name.split('.').collect();
        let numbers = parts.iter().filter(|part| is_number(part)).map(|n| [*n, *n]).collect();
        Self { parts, numbers, first, count: 1, bytes: first.bytes }
    }

    /// Whether it has a buffer with the name of `other`, but for numbers, and with its shape.
    fn is_like(&self, other: &Self) -> bool {
        let same = |(a, b): (&&str, &&str)| a == b || (is_number(a) && is_number(b));
        self.first.shape == other.first.shape
            && self.parts.len() == other.parts.len()
            && self.parts.iter().zip(&other.parts).all(same)
    }

    fn add(&mut self, other: &Self) {
        for ([_, last], [_, number]) in self.numbers.iter_mut().zip(&other.numbers) {
            *last = *number;
        }
        self.count += other.count;
        self.bytes += other.bytes;
    }

    fn line(&self) -> String {
        let mut numbers = self.numbers.iter();
        let part = |part: &&'a str| match is_number(part).then(|| numbers.next()).flatten() {
            Some([first, last]) if first != last => format!("{{{first}..{last}}}"),
            _ => (*part).to_owned(),
        };
        let name = self.parts.iter().map(part).collect::<Vec<_>>().join(".");
        let times = if self.count > 1 { format!("{} x ", self.count) } else { String::new() };
        let (rows, cols) = self.first.shape;
        let size = format_bytes(self.bytes);
        format!("{name:<34} {size:>11}  {times}{} [{rows}, {cols}]", self.first.dtype)
    }
}

/// One line for all buffers that are alike. Names that differ only in numbers share a line: `block.{0..68}.params`.
pub(super) fn lines<'a>(buffers: impl Iterator<Item = &'a Buffer>) -> Vec<String> {
    let mut groups: Vec<SimilarBuffers<'a>> = Vec::new();
    for buffer in buffers.map(SimilarBuffers::new) {
        match groups.iter_mut().find(|group| group.is_like(&buffer)) {
            Some(group) => group.add(&buffer),
            None => groups.push(buffer),
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
