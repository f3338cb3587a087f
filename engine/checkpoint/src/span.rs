//! Spans: equally spaced runs of elements. A few spans describe any rank's part of a tensor.

use serde::{Deserialize, Serialize};
use std::ops::Range;

/// `count` runs of `run` elements: the first starts at `start`, and each next run `stride` elements
/// later. Indices are into the whole tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Span {
    pub(crate) start: usize,
    pub(crate) run: usize,
    pub(crate) stride: usize,
    pub(crate) count: usize,
}

impl Span {
    pub(crate) const fn len(&self) -> usize {
        self.run * self.count
    }

    /// Whether the span is valid in a tensor of `whole` elements; other methods require it.
    pub(crate) fn is_within(&self, whole: usize) -> bool {
        let is_disjoint = self.run > 0 && self.count > 0 && self.stride >= self.run;
        let last = (self.count.saturating_sub(1)).checked_mul(self.stride);
        let end = last.and_then(|l| l.checked_add(self.start)?.checked_add(self.run));
        is_disjoint && end.is_some_and(|end| end <= whole)
    }

    /// The runs, in the order in which they are stored.
    pub(crate) fn runs(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let Self { start, run, stride, count } = *self;
        (0..count).map(move |i| start + i * stride..start + i * stride + run)
    }

    /// Parts of the span in `wanted`: (index in the span, index in `wanted`, elements).
    pub(crate) fn overlap(
        &self,
        wanted: Range<usize>,
    ) -> impl Iterator<Item = (usize, usize, usize)> + use<> {
        let span = *self;
        let first = wanted.start.saturating_sub(span.start) / span.stride;
        let end = wanted.end.saturating_sub(span.start).div_ceil(span.stride);
        (first..end.min(span.count)).filter_map(move |i| {
            let at = span.start + i * span.stride;
            let (from, to) = (at.max(wanted.start), (at + span.run).min(wanted.end));
            (from < to).then(|| (i * span.run + from - at, from - wanted.start, to - from))
        })
    }

    /// Appends a run if it has the same length and distance as the others; returns whether it did.
    fn extend(&mut self, run: &Range<usize>) -> bool {
        let last = self.start + (self.count - 1) * self.stride;
        if run.len() != self.run || run.start < last + self.run {
            return false;
        }
        if self.count == 1 {
            self.stride = run.start - last;
        }
        let even = run.start - last == self.stride;
        self.count += usize::from(even);
        even
    }
}

/// Joins runs, in the order of a rank's own elements, into a few spans in the same order.
pub(crate) fn spans(runs: impl IntoIterator<Item = Range<usize>>) -> Vec<Span> {
    let mut spans: Vec<Span> = Vec::new();
    for run in runs {
        if !spans.last_mut().is_some_and(|span| span.extend(&run)) {
            spans.push(Span { start: run.start, run: run.len(), stride: run.len(), count: 1 });
        }
    }
    spans
}

/// Whether `spans` contain each element of a tensor of `whole` elements exactly once.
pub(crate) fn cover<'a>(spans: impl Iterator<Item = &'a Span> + Clone, whole: usize) -> bool {
    let mut sum = 0usize;
    for span in spans.clone() {
        if !span.is_within(whole) {
            return false;
        }
        sum = sum.saturating_add(span.len());
    }
    // Here the number of elements is right, so the list of runs has at most `whole` entries.
    let mut runs: Vec<Range<usize>> = Vec::new();
    if sum == whole {
        runs.extend(spans.flat_map(Span::runs));
    }
    runs.sort_unstable_by_key(|run| run.start);
    sum == whole && runs.windows(2).all(|pair| pair[0].end == pair[1].start)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_become_few_spans_and_come_back() {
        // The end of a row, whole rows of a column split, the start of a row.
        let runs = [7..8, 12..16, 20..24, 28..32, 36..37];
        let all = spans(runs.clone());
        assert_eq!(all.len(), 3, "{all:?}");
        assert_eq!(all.iter().flat_map(Span::runs).collect::<Vec<_>>(), runs);
    }

    #[test]
    fn an_overlap_is_what_both_have() {
        let span = Span { start: 5, run: 3, stride: 7, count: 4 };
        let stored: Vec<usize> = span.runs().flatten().collect();
        for from in 0..40 {
            for to in from..40 {
                let mut found: Vec<usize> = Vec::new();
                for (at, in_wanted, n) in span.overlap(from..to) {
                    let same = (0..n).all(|i| stored[at + i] == from + in_wanted + i);
                    assert!(same, "{from}..{to}");
                    found.extend(&stored[at..at + n]);
                }
                let expected: Vec<usize> =
                    stored.iter().copied().filter(|i| (from..to).contains(i)).collect();
                assert_eq!(found, expected, "{from}..{to}");
            }
        }
    }

    #[test]
    fn only_a_whole_tensor_is_covered() {
        let span = |start, run, stride, count| Span { start, run, stride, count };
        let (left, right) = (span(0, 2, 4, 3), span(2, 2, 4, 3));
        assert!(cover([left, right].iter(), 12));
        let largest = usize::MAX;
        for wrong in [
            vec![left],
            vec![left, left],
            vec![left, right, right],
            vec![left, span(3, 2, 4, 3)],
            vec![span(0, 0, 1, 12), span(0, 12, 12, 1)],
            vec![span(0, 12, 1, 1)],
            vec![span(largest, 12, 12, 1)],
            vec![span(0, 6, largest, 2)],
            vec![span(0, 1, largest, largest)],
        ] {
            assert!(!cover(wrong.iter(), 12), "{wrong:?}");
        }
    }
}
