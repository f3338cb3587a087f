//! Steps without a line in a metrics file.

use super::{LineHeader, whole_lines};
use files::directory::Directory;
use files::input;
use files::names::{FORKED, step_of};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Number of ranges that a message names.
const NAMED: usize = 5;
/// Largest length of a path in bytes.
const LONGEST: u64 = 1 << 13;

/// Step that the fork in `dir` starts from; 0 if the run is no fork. The metrics of earlier steps
/// are in the source of the fork.
pub(super) fn forked_at(dir: &Directory) -> u64 {
    let step = || {
        let path = input::whole(dir.read(FORKED).ok()?, LONGEST).ok()?;
        step_of(Path::new(OsStr::from_bytes(&path)).file_name()?.to_str()?, &[""])
    };
    step().unwrap_or(0)
}

/// Describes the steps after `first`, up to `last`, without a line in `text`; `None` without such
/// steps.
pub(super) fn words(text: &[u8], first: u64, last: u64) -> Option<String> {
    let step = |line: &[u8]| {
        let line: LineHeader = serde_json::from_slice(line).ok()?;
        (line.kind == "step" && line.step <= last).then_some(line.step)
    };
    let mut there: Vec<u64> = whole_lines(text).filter_map(step).collect();
    there.sort_unstable();
    let (mut missing, mut next, mut ranges) = (0, first + 1, Vec::new());
    for step in there.into_iter().chain([last + 1]) {
        if step > next {
            missing += step - next;
            ranges.push(match step - next {
                1 => next.to_string(),
                _ => format!("{next} to {}", step - 1),
            });
        }
        next = next.max(step + 1);
    }
    let more = ranges.len().saturating_sub(NAMED);
    ranges.truncate(NAMED);
    if more > 0 {
        ranges.push(format!("and {more} more gaps"));
    }
    let of = last - first;
    (missing > 0).then(|| format!("no line of {missing} of {of} steps: {}", ranges.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(steps: impl IntoIterator<Item = u64>) -> String {
        let line = |step| format!("{{\"kind\":\"step\",\"step\":{step},\"loss\":1.5}}\n");
        steps.into_iter().map(line).collect()
    }

    #[test]
    fn steps_without_a_line_are_counted_and_named_as_ranges() {
        let text_of = |text: &str, first, last| words(text.as_bytes(), first, last);
        assert_eq!(text_of(&lines(1..=9), 0, 9), None);
        assert_eq!(text_of(&lines(1..=9), 0, 5), None);
        assert_eq!(text_of("", 0, 0), None);
        // A fork has the lines after its start.
        assert_eq!(text_of(&lines(6..=9), 5, 9), None);
        let gap = text_of(&lines((1..=2).chain(101..=110)), 0, 110).unwrap();
        assert_eq!(gap, "no line of 98 of 110 steps: 3 to 100");
        assert_eq!(text_of("", 0, 1).unwrap(), "no line of 1 of 1 steps: 1");
        // Neither an incomplete line nor a line of another kind is the line of a step.
        let other = lines([1]) + "{\"kind\":\"eval\",\"step\":2,\"loss\":1}\n" + &lines([3])[..9];
        assert_eq!(text_of(&other, 0, 3).unwrap(), "no line of 2 of 3 steps: 2 to 3");
        let odd = text_of(&lines((1..100).step_by(2)), 0, 100).unwrap();
        assert_eq!(odd, "no line of 50 of 100 steps: 2, 4, 6, 8, 10, and 45 more gaps");
    }
}
