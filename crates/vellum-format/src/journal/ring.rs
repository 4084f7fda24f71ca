//! The places of records: they go round and round in the journal's run.
//!
//! ```text
//!   0                                                     len
//!   ├─ free ─┬─ 12 ─┬─ 13 ─┬─ 14 ─┬──── free ──────────────┤   records are contiguous; one that does not fit
//!            tail                 head                          before the end begins at 0 again
//! ```
//!
//! 1. A place is given out only when it overlaps no record that recovery may need: those from the durable
//!    tail on.
//! 2. A record is at most an eighth of the run, and a checkpoint is due when the ring is more than half full.
//!    Three things take at most an eighth each: the record that goes with the checkpoint, the one that states
//!    the new tail, and the gap before the end. So there is always a piece that is large enough.

use std::collections::VecDeque;

/// A record that recovery may need.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Live {
    sequence: u64,
    start: u64,
    end: u64,
}

/// The use of the run. Positions and lengths in bytes, multiples of the journal's block.
#[derive(Debug)]
pub struct Ring {
    len: u64,
    head: u64,
    live: VecDeque<Live>,
}

impl Ring {
    /// A ring of this length in which nothing is needed.
    pub fn new(len: u64) -> Self {
        Self { len, head: 0, live: VecDeque::new() }
    }

    /// A ring in which these records are needed: sequence, start and end of each, in order.
    pub fn resumed(len: u64, records: impl Iterator<Item = (u64, u64, u64)>) -> Self {
        let live: VecDeque<Live> =
            records.map(|(sequence, start, end)| Live { sequence, start, end }).collect();
        Self { len, head: live.back().map_or(0, |last| last.end), live }
    }

    /// The longest record.
    pub fn record_max(&self) -> u64 {
        self.len / 8
    }

    /// Bytes from the first live record to the head, including the gap before the end.
    pub fn used(&self) -> u64 {
        match self.live.front() {
            None => 0,
            Some(first) if first.start < self.head => self.head - first.start,
            Some(first) => self.len - first.start + self.head,
        }
    }

    /// Whether a checkpoint should free space before more is written.
    pub fn is_half_full(&self) -> bool {
        self.used() > self.len / 2
    }

    /// Whether this record and another one are sure to have room without a checkpoint.
    pub fn has_room(&self) -> bool {
        self.len - self.used() >= 3 * self.record_max()
    }

    /// A place for a record. `None` when there is no room, which does not happen when checkpoints are made in
    /// time.
    pub fn place(&mut self, sequence: u64, len: u64) -> Option<u64> {
        debug_assert!(self.live.back().is_none_or(|last| last.sequence < sequence));
        let fits = |start: u64| {
            let end = start + len;
            end <= self.len && self.live.iter().all(|live| end <= live.start || live.end <= start)
        };
        let start = [self.head, 0].into_iter().find(|start| fits(*start))?;
        self.live.push_back(Live { sequence, start, end: start + len });
        self.head = start + len;
        Some(start)
    }

    /// Frees the space of records before this one. They are no longer needed, and the record that says so is
    /// flushed.
    pub fn advance(&mut self, tail: u64) {
        while self.live.front().is_some_and(|live| live.sequence < tail) {
            self.live.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use vellum_core::Random;

    use super::*;

    #[test]
    fn records_follow_each_other_and_begin_again_at_the_start() {
        let mut ring = Ring::new(16);
        assert_eq!(ring.place(1, 4), Some(0));
        assert_eq!(ring.place(2, 4), Some(4));
        assert_eq!(ring.place(3, 4), Some(8));
        assert!(ring.is_half_full());
        assert_eq!(ring.place(4, 4), Some(12));
        assert_eq!(ring.place(5, 1), None, "everything is needed");
        ring.advance(2);
        assert_eq!(ring.place(5, 3), Some(0));
        assert_eq!(ring.place(6, 2), None);
    }

    #[test]
    fn what_does_not_fit_before_the_end_leaves_a_gap() {
        let mut ring = Ring::new(16);
        ring.place(1, 4);
        ring.place(2, 4);
        ring.place(3, 4);
        ring.advance(3);
        ring.place(4, 3);
        assert_eq!(ring.place(5, 4), Some(0), "one block before the end is too small");
        assert_eq!(ring.used(), 12);
    }

    #[test]
    fn with_checkpoints_in_time_the_ring_has_room_for_any_record() {
        let mut random = Random::from_seed(1);
        let mut ring = Ring::new(256);
        // The tail that the next record states, and with it whether the record after that may use the space.
        let mut tail = 0;
        for sequence in 1..100_000 {
            let is_checkpoint_due = ring.is_half_full();
            let len = 1 + random.below(ring.record_max());
            ring.place(sequence, len).expect("rule 2");
            ring.advance(tail);
            if is_checkpoint_due {
                tail = sequence;
            }
        }
    }
}
