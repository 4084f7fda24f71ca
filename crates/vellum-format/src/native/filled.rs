//! Blocks of the base of which the image has a copy although the bitmap does not say so yet: a bit for each, in
//! memory. `fill_linear.rs` says when it is set, and who may rely on it.

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// The filled blocks of an image. Takes memory once there is one: a bit per block of the base.
#[derive(Default)]
pub(super) struct FilledBlocks {
    words: OnceLock<Box<[AtomicU64]>>,
}

impl FilledBlocks {
    fn words(&self, blocks: u64) -> &[AtomicU64] {
        self.words.get_or_init(|| (0..blocks.div_ceil(64)).map(|_| AtomicU64::new(0)).collect())
    }

    fn word(&self, block: u64) -> Option<(&AtomicU64, u64)> {
        let words = self.words.get()?;
        Some((words.get(usize::try_from(block / 64).ok()?)?, 1 << (block % 64)))
    }

    /// Whether the image has the block, whatever its bit says.
    pub(super) fn has(&self, block: u64) -> bool {
        self.word(block).is_some_and(|(word, bit)| word.load(Ordering::Acquire) & bit != 0)
    }

    pub(super) fn add(&self, block: u64, blocks: u64) {
        self.words(blocks);
        let (word, bit) = self.word(block).expect("inside the base");
        word.fetch_or(bit, Ordering::AcqRel);
    }

    /// Returns whether any of them was filled.
    pub(super) fn take_back(&self, blocks: Range<u64>) -> bool {
        if self.words.get().is_none() {
            return false;
        }
        let mut any = false;
        for (word, bit) in blocks.filter_map(|block| self.word(block)) {
            any |= word.fetch_and(!bit, Ordering::AcqRel) & bit != 0;
        }
        any
    }

    /// The filled blocks among 64, of which `first` is the first.
    pub(super) fn of_word(&self, first: u64) -> u64 {
        self.word(first).map_or(0, |(word, _)| word.load(Ordering::Acquire))
    }

    pub(super) fn any(&self) -> bool {
        let words = self.words.get();
        words.is_some_and(|words| words.iter().any(|word| word.load(Ordering::Acquire) != 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_filled_and_taken_back() {
        let filled = FilledBlocks::default();
        assert!(!filled.any() && !filled.has(0) && !filled.has(1 << 40));
        assert!(!filled.take_back(0..10));
        filled.add(63, 130);
        filled.add(64, 130);
        filled.add(129, 130);
        assert!(filled.has(63) && filled.has(64) && filled.has(129) && !filled.has(128));
        assert!(filled.take_back(64..1 << 20) && !filled.take_back(64..1 << 20));
        assert!(filled.has(63) && !filled.has(64) && !filled.has(129) && filled.any());
        assert_eq!(filled.of_word(0), 1 << 63);
        assert!(filled.take_back(63..64));
        assert!(!filled.any());
    }
}
