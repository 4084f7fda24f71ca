//! The order in which blocks were read first from below: what a boot trace records.

use vellum_core::{BlockSize, GuestSpan};

use super::runs::Runs;

/// How many runs are kept: a boot reads a few thousand.
pub(super) const RUNS_MAX: usize = 1 << 16;
/// The parts that count: what the page cache of a guest reads.
const BLOCK: BlockSize = BlockSize::PAGE;

/// A run of bytes of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Where it begins, in bytes.
    pub at: u64,
    /// How many bytes.
    pub len: u64,
}

/// The order so far.
#[derive(Debug)]
pub(super) struct Order {
    runs: Vec<Run>,
    seen: Runs,
    is_whole: bool,
}

impl Default for Order {
    fn default() -> Self {
        Self { runs: Vec::new(), seen: Runs::with_room_for(RUNS_MAX), is_whole: true }
    }
}

impl Order {
    /// These bytes are read.
    pub(super) fn note(&mut self, span: GuestSpan) {
        if !self.is_whole {
            return;
        }
        for part in self.seen.missing_in(BLOCK.widen(span)) {
            if !self.seen.insert(part) {
                self.is_whole = false;
                return;
            }
            match self.runs.last_mut() {
                Some(last) if last.at + last.len == part.start().bytes() => last.len += part.len(),
                _ => self.runs.push(Run { at: part.start().bytes(), len: part.len() }),
            }
            if self.runs.len() >= RUNS_MAX {
                self.is_whole = false;
                return;
            }
        }
    }

    /// The runs, and whether they are all there were.
    pub(super) fn runs(&self) -> (Vec<Run>, bool) {
        (self.runs.clone(), self.is_whole)
    }
}

#[cfg(test)]
mod tests {
    use vellum_core::GuestOffset;

    use super::*;

    #[test]
    fn each_block_counts_once_and_neighbours_are_one_run() {
        let mut order = Order::default();
        for (at, len) in [(8192, 4096), (12_288, 512), (0, 100), (8192, 8192), (4096, 20_480)] {
            order.note(GuestOffset::new(at).span(len));
        }
        let run = |at, len| Run { at, len };
        let runs = vec![run(8192, 8192), run(0, 8192), run(16_384, 8192)];
        assert_eq!(order.runs(), (runs, true));
    }

    #[test]
    fn it_is_bounded() {
        let mut order = Order::default();
        for block in 0..RUNS_MAX as u64 + 10 {
            order.note(GuestOffset::new(block * 8192).span(512));
        }
        let (runs, is_whole) = order.runs();
        assert!(!is_whole && runs.len() == RUNS_MAX);
    }
}
