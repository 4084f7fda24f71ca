//! Sets of bytes of a disk, as runs that neither overlap nor touch.

use std::collections::BTreeMap;

use vellum_core::{GuestOffset, GuestSpan};

/// Bytes of a disk. At most a fixed number of runs is kept.
#[derive(Debug)]
pub(super) struct Runs {
    /// The end of each run, by its start.
    runs: BTreeMap<u64, u64>,
    runs_max: usize,
}

impl Runs {
    /// No byte yet, and never more than this many runs.
    pub(super) fn with_room_for(runs_max: usize) -> Self {
        Self { runs: BTreeMap::new(), runs_max }
    }

    /// Adds these bytes. False, and nothing is added, where that would be one run too many.
    pub(super) fn insert(&mut self, span: GuestSpan) -> bool {
        let (mut start, mut end) = (span.start().bytes(), span.end().bytes());
        if span.is_empty() {
            return true;
        }
        let touching = self.runs.range(..=end).rev().take_while(|(_, its_end)| **its_end >= start);
        let touching: Vec<(u64, u64)> = touching.map(|(start, end)| (*start, *end)).collect();
        if touching.is_empty() && self.runs.len() >= self.runs_max {
            return false;
        }
        for (its_start, its_end) in touching {
            self.runs.remove(&its_start);
            (start, end) = (start.min(its_start), end.max(its_end));
        }
        self.runs.insert(start, end);
        true
    }

    /// The parts of the span that are not in the set, in order.
    pub(super) fn missing_in(&self, span: GuestSpan) -> Vec<GuestSpan> {
        let between = |start, end| GuestSpan::between(GuestOffset::new(start), GuestOffset::new(end));
        let (mut at, end) = (span.start().bytes(), span.end().bytes());
        let mut missing = Vec::new();
        if let Some((_, its_end)) = self.runs.range(..=at).next_back() {
            at = at.max(*its_end);
        }
        for (start, its_end) in self.runs.range(at.min(end)..end) {
            if *start > at {
                missing.push(between(at, *start));
            }
            at = at.max(*its_end);
        }
        if at < end {
            missing.push(between(at, end));
        }
        missing
    }

    /// Whether all of these bytes are in the set.
    pub(super) fn has_all(&self, span: GuestSpan) -> bool {
        let before = self.runs.range(..=span.start().bytes()).next_back();
        before.is_some_and(|(_, end)| *end >= span.end().bytes()) || span.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use vellum_core::Random;

    use super::*;

    fn span(start: u64, len: u64) -> GuestSpan {
        GuestOffset::new(start).span(len)
    }

    #[test]
    fn it_is_a_set_of_bytes() {
        let mut random = Random::from_seed(7);
        let (mut runs, mut model) = (Runs::with_room_for(1000), [false; 256]);
        for _ in 0..2000 {
            let start = random.below(256);
            let one = span(start, random.below((256 - start).min(12) + 1));
            if random.one_in(3) {
                assert!(runs.insert(one));
                model[usize::try_from(one.start().bytes()).unwrap()
                    ..usize::try_from(one.end().bytes()).unwrap()]
                    .fill(true);
            }
            let missing = runs.missing_in(one);
            for byte in one.start().bytes()..one.end().bytes() {
                let is_in = !missing.iter().any(|part| part.contains(GuestOffset::new(byte)));
                assert_eq!(is_in, model[usize::try_from(byte).unwrap()], "{byte} of {one}: {runs:?}");
            }
            assert_eq!(runs.has_all(one), missing.is_empty());
            assert!(missing.windows(2).all(|two| two[0].end() < two[1].start()));
            if random.one_in(400) {
                (runs, model) = (Runs::with_room_for(1000), [false; 256]);
            }
        }
    }

    #[test]
    fn there_is_a_most_of_runs() {
        let mut runs = Runs::with_room_for(2);
        assert!(runs.insert(span(0, 1)) && runs.insert(span(10, 1)));
        assert!(!runs.insert(span(20, 1)) && !runs.has_all(span(20, 1)));
        assert!(runs.insert(span(1, 9)), "two become one");
        assert!(runs.has_all(span(0, 11)) && runs.insert(span(20, 1)));
    }
}
