//! Choices of matmul algorithms by the clock, as lines of text. Checkpoints, the cache and messages
//! between processes hold these lines.

use super::blaslt::AlgorithmWords;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::{Arc, OnceLock};

/// How a matmul of some shape runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    /// By this algorithm of cuBLASLt.
    Algorithm(AlgorithmWords),
    /// Without its epilogue, which one of onebox's kernels computes.
    Apart,
}

/// Choices for the matmuls of a run, and the machine that they are for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MatmulChoices {
    machine: String,
    by_shape: BTreeMap<String, Choice>,
}

/// Characters between the shape of a matmul and its choice.
const BETWEEN: &str = " = ";
/// The choice of a matmul without its epilogue.
const APART: &str = "apart";
/// Hexadecimal digits of one word of an algorithm.
const DIGITS: usize = 16;
/// Longest name of a machine, and longest shape, in bytes.
const LONGEST: usize = 400;

impl MatmulChoices {
    pub(super) const fn new(machine: String, by_shape: BTreeMap<String, Choice>) -> Self {
        Self { machine, by_shape }
    }

    /// The GPU and the versions of driver and library for which the choices hold, in printable
    /// ASCII.
    pub fn machine(&self) -> &str {
        &self.machine
    }

    /// Number of matmuls with a choice.
    pub fn len(&self) -> usize {
        self.by_shape.len()
    }

    /// Whether no matmul has a choice.
    pub fn is_empty(&self) -> bool {
        self.by_shape.is_empty()
    }

    pub(super) const fn by_shape(&self) -> &BTreeMap<String, Choice> {
        &self.by_shape
    }

    /// The machine, then one line for each matmul: its shape and its choice.
    pub fn lines(&self) -> Vec<String> {
        let line = |(shape, choice): (&String, &Choice)| {
            let mut line = format!("{shape}{BETWEEN}");
            match choice {
                Choice::Apart => line.push_str(APART),
                Choice::Algorithm(words) => {
                    for word in words {
                        let _ = write!(line, "{word:016x}");
                    }
                }
            }
            line
        };
        std::iter::once(self.machine.clone()).chain(self.by_shape.iter().map(line)).collect()
    }

    /// Reads what [`lines`](Self::lines) has written.
    ///
    /// # Errors
    /// The number of the first line that is damaged, with the reason.
    pub fn of_lines<'a>(lines: impl IntoIterator<Item = &'a str>) -> Result<Self, String> {
        let mut lines = lines.into_iter();
        let machine = lines.next().filter(|line| is_plain(line));
        let machine = machine.ok_or("line 1 names no machine in printable ASCII")?.to_owned();
        let mut by_shape = BTreeMap::new();
        for (i, line) in lines.enumerate() {
            let damaged = |why: &str| format!("line {}: {why}", i + 2);
            let (shape, choice) =
                line.rsplit_once(BETWEEN).ok_or_else(|| damaged("it has no shape and choice"))?;
            if !is_plain(shape) {
                return Err(damaged("its shape is not in printable ASCII"));
            }
            let choice = match choice {
                APART => Choice::Apart,
                digits => {
                    let words = words(digits);
                    Choice::Algorithm(words.ok_or_else(|| damaged("it has no algorithm"))?)
                }
            };
            if by_shape.insert(shape.to_owned(), choice).is_some() {
                return Err(damaged("its shape stands there twice"));
            }
        }
        Ok(Self { machine, by_shape })
    }
}

/// Whether a text has 1 to [`LONGEST`] characters of printable ASCII.
fn is_plain(text: &str) -> bool {
    (1..=LONGEST).contains(&text.len()) && text.bytes().all(|byte| matches!(byte, b' '..=b'~'))
}

/// A name in printable ASCII: other characters become question marks.
pub(super) fn printable(name: &str) -> String {
    name.chars().map(|c| if matches!(c, ' '..='~') { c } else { '?' }).collect()
}

fn words(digits: &str) -> Option<AlgorithmWords> {
    let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    let mut words = AlgorithmWords::default();
    if digits.len() != DIGITS * words.len() || !digits.bytes().all(is_digit) {
        return None;
    }
    for (i, word) in words.iter_mut().enumerate() {
        *word = u64::from_str_radix(&digits[DIGITS * i..DIGITS * (i + 1)], 16).ok()?;
    }
    Some(words)
}

/// How a run selects the algorithms of its matmuls.
#[derive(Clone, Debug, Default)]
pub enum MatmulSelection {
    /// The first algorithm of cuBLASLt's heuristic, with the epilogue if there is one.
    #[default]
    Heuristic,
    /// The fastest way by the clock.
    Timed(Arc<TimedSelection>),
}

/// Choices by the clock that a run begins with, and those that it has made.
#[derive(Debug, Default)]
pub struct TimedSelection {
    stored: Option<MatmulChoices>,
    chosen: OnceLock<MatmulChoices>,
}

impl MatmulSelection {
    /// A selection by the clock. The ranks take `stored` choices, for example those of a
    /// checkpoint, if they are for this machine.
    pub fn timed(stored: Option<MatmulChoices>) -> Self {
        Self::Timed(Arc::new(TimedSelection { stored, chosen: OnceLock::new() }))
    }

    /// The choices of the run, after rank 0 has opened its GPU in this process; without a GPU those
    /// that it began with. `None` if the run takes the heuristic's algorithms.
    pub fn chosen(&self) -> Option<&MatmulChoices> {
        match self {
            Self::Heuristic => None,
            Self::Timed(timed) => timed.chosen().or(timed.stored()),
        }
    }
}

impl TimedSelection {
    pub(super) const fn stored(&self) -> Option<&MatmulChoices> {
        self.stored.as_ref()
    }

    pub(super) fn chosen(&self) -> Option<&MatmulChoices> {
        self.chosen.get()
    }

    /// Sets the choices of the run. Rank 0 calls it once.
    pub(super) fn set(&self, choices: MatmulChoices) {
        let set = self.chosen.set(choices);
        assert!(set.is_ok(), "a run has one rank 0, which opens one GPU");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> MatmulChoices {
        let words = [0x10, 0, u64::MAX, 3, 4, 5, 6, 0xfedc_ba98_7654_3210];
        let by_shape = [
            ("Bf16 64x32t 16, Bf16 64x8 256, F32 32x8 256", Choice::Algorithm(words)),
            ("Bf16 64x32t 16, Bf16 64x8 256, Bf16 32x8 256, Gelu", Choice::Apart),
        ];
        let by_shape = by_shape.map(|(shape, choice)| (shape.to_owned(), choice));
        MatmulChoices::new("a GPU, sm_90, driver 13000".to_owned(), by_shape.into())
    }

    #[test]
    fn choices_are_read_as_they_were_written() {
        let lines = example().lines();
        assert_eq!(lines.len(), 3);
        assert!(lines[1].ends_with(", Gelu = apart"), "{lines:?}");
        let read = MatmulChoices::of_lines(lines.iter().map(String::as_str)).unwrap();
        assert_eq!((read.len(), &read), (2, &example()));
    }

    #[test]
    fn damaged_choices_are_refused_with_their_line() {
        let lines = example().lines();
        let refused = |number: usize, with: &str| {
            let mut lines = lines.clone();
            with.clone_into(&mut lines[number - 1]);
            let why = MatmulChoices::of_lines(lines.iter().map(String::as_str)).unwrap_err();
            assert!(why.starts_with(&format!("line {number}")), "{why}");
        };
        let long = "x".repeat(LONGEST + 1);
        for machine in ["", "\u{1b}[2J", "a\nb", "gr\u{fc}n", &long] {
            refused(1, machine);
        }
        let digits = "0".repeat(8 * DIGITS);
        let short = format!("a = {}", &digits[1..]);
        let upper = format!("a = {}A", &digits[1..]);
        let signed = format!("a = +{}", &digits[1..]);
        for line in ["", "a", "a = ", " = apart", "a = Apart", "\u{7} = apart", &short, &upper] {
            refused(2, line);
        }
        refused(3, &signed);
        refused(3, &lines[1]);
        assert!(MatmulChoices::of_lines([]).unwrap_err().starts_with("line 1"));
    }

    #[test]
    fn a_machine_of_any_name_has_choices_that_can_be_read() {
        let machine = printable("GPU\u{1b} \u{fc}\n");
        assert_eq!(machine, "GPU? ??");
        let lines = MatmulChoices::new(machine, BTreeMap::new()).lines();
        assert!(MatmulChoices::of_lines(lines.iter().map(String::as_str)).unwrap().is_empty());
    }
}
