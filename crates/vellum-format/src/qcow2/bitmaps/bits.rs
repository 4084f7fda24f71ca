//! The bits of a bitmap in memory, shared by all workers.
//!
//! ```text
//!   disk    │ granule 0 │ granule 1 │ …            2^granularity bytes each
//!   chunks  [ none ][ 512 words ][ none ] …        32768 granules each, made when the first bit is set
//! ```
//!
//! 1. A bit is set with one atomic operation and never lost. Nothing here waits.
//! 2. No bit behind the end of the disk is ever set.
//! 3. Memory: 4 KiB for each chunk that has a bit, and 16 bytes for each that could have one.

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use vellum_core::{Error, GuestOffset, GuestSpan, Result};

/// Bits of a word.
pub(crate) const WORD_BITS: u64 = 64;
/// Words of a chunk.
const CHUNK_WORDS: u64 = 512;
/// Bits of a chunk.
const CHUNK_BITS: u64 = CHUNK_WORDS * WORD_BITS;
/// A bitmap takes at most this many bytes, as in QEMU.
pub(crate) const BITMAP_BYTES_MAX: u64 = 512 << 20;

type Chunk = Box<[AtomicU64]>;

/// Which parts of a disk have changed.
#[derive(Debug)]
pub struct Bits {
    /// Bytes of the disk.
    size: u64,
    shift: u32,
    chunks: Box<[OnceLock<Chunk>]>,
}

impl Bits {
    /// No part of a disk of this many bytes. A bit stands for two to the power of `shift` bytes.
    ///
    /// # Errors
    /// `Unsupported` for more bits than are kept in memory.
    pub fn new(size: u64, shift: u32) -> Result<Self> {
        let granules = size.div_ceil(1 << shift);
        if granules.div_ceil(8) > BITMAP_BYTES_MAX {
            return Err(Error::unsupported(format!(
                "a bitmap of {granules} bits is too large: use a larger granularity"
            )));
        }
        let count = usize::try_from(granules.div_ceil(CHUNK_BITS)).expect("bounded above");
        Ok(Self { size, shift, chunks: (0..count).map(|_| OnceLock::new()).collect() })
    }

    /// Bytes of the disk.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Bytes that a bit stands for.
    pub fn granularity(&self) -> u64 {
        1 << self.shift
    }

    /// How many bits there are.
    pub(crate) fn granules(&self) -> u64 {
        self.size.div_ceil(1 << self.shift)
    }

    /// The granules that have a byte of the run.
    fn granules_in(&self, span: GuestSpan) -> Range<u64> {
        let end = span.end().bytes().min(self.size);
        let start = span.start().bytes().min(end);
        if start == end { 0..0 } else { start >> self.shift..end.div_ceil(1 << self.shift) }
    }

    /// The words that have a bit of the run.
    pub(crate) fn words_in(&self, span: GuestSpan) -> Range<u64> {
        let granules = self.granules_in(span);
        if granules.is_empty() { 0..0 } else { granules.start / WORD_BITS..granules.end.div_ceil(WORD_BITS) }
    }

    /// The words that have a bit of the run, each with these bits.
    pub(crate) fn masks_in(&self, span: GuestSpan) -> impl Iterator<Item = (u64, u64)> + use<> {
        masks(self.granules_in(span))
    }

    /// Marks what the run touches.
    pub(crate) fn mark(&self, span: GuestSpan) {
        self.masks_in(span).for_each(|(word, mask)| self.add(word, mask));
    }

    /// Whether all that the run touches is marked.
    pub(crate) fn covers(&self, span: GuestSpan) -> bool {
        self.masks_in(span).all(|(word, mask)| self.word(word) & mask == mask)
    }

    /// A word: bit 0 stands for its first granule.
    pub(crate) fn word(&self, index: u64) -> u64 {
        let (chunk, within) = place_of(index);
        match self.chunks.get(chunk).and_then(OnceLock::get) {
            Some(words) => words[within].load(Ordering::Acquire),
            None => 0,
        }
    }

    /// Sets bits of a word. Those behind the end of the disk are ignored.
    pub(crate) fn add(&self, index: u64, bits: u64) {
        let bits = bits & self.full_word(index);
        if bits == 0 {
            return;
        }
        let (chunk, within) = place_of(index);
        let words = self.chunks[chunk].get_or_init(|| (0..CHUNK_WORDS).map(|_| AtomicU64::new(0)).collect());
        // Mostly they are set already, and then the line of the cache stays shared.
        if words[within].load(Ordering::Acquire) & bits != bits {
            words[within].fetch_or(bits, Ordering::AcqRel);
        }
    }

    /// The word in which each bit on the disk is set.
    pub(crate) fn full_word(&self, index: u64) -> u64 {
        match self.granules().saturating_sub(index * WORD_BITS) {
            0 => 0,
            left if left < WORD_BITS => (1 << left) - 1,
            _ => u64::MAX,
        }
    }

    /// How many words there are.
    pub(crate) fn words(&self) -> u64 {
        self.granules().div_ceil(WORD_BITS)
    }

    /// Marks what is marked in another bitmap, of a disk of the same size.
    pub(crate) fn merge(&self, other: &Self) {
        if self.shift == other.shift {
            for (chunk, words) in other.chunks.iter().enumerate().filter_map(|(i, one)| Some((i, one.get()?)))
            {
                for (within, word) in words.iter().enumerate() {
                    self.add(chunk as u64 * CHUNK_WORDS + within as u64, word.load(Ordering::Acquire));
                }
            }
            return;
        }
        let mut at = 0;
        while let Some(run) = other.next_run(at) {
            self.mark(other.span_of(run.clone()));
            at = run.end;
        }
    }

    /// The bytes of the disk that these granules stand for.
    fn span_of(&self, granules: Range<u64>) -> GuestSpan {
        let byte = |granule: u64| GuestOffset::new((granule << self.shift).min(self.size));
        GuestSpan::between(byte(granules.start), byte(granules.end))
    }

    /// The first granules in a row that are marked, from this one on.
    fn next_run(&self, from: u64) -> Option<Range<u64>> {
        let start = self.find(from, true)?;
        Some(start..self.find(start, false).unwrap_or_else(|| self.granules()))
    }

    /// The first granule from this one on that is marked, or that is not.
    fn find(&self, from: u64, marked: bool) -> Option<u64> {
        let end = self.granules();
        let mut at = from;
        while at < end {
            let (chunk, within) = place_of(at / WORD_BITS);
            let Some(words) = self.chunks[chunk].get() else {
                if !marked {
                    return Some(at);
                }
                at = (chunk as u64 + 1) * CHUNK_BITS;
                continue;
            };
            let word = words[within].load(Ordering::Acquire);
            let word = if marked { word } else { !word };
            let left = word >> (at % WORD_BITS);
            if left != 0 {
                return Some(at + u64::from(left.trailing_zeros())).filter(|found| *found < end);
            }
            at = (at / WORD_BITS + 1) * WORD_BITS;
        }
        None
    }

    /// The first run of the disk from here on that is marked.
    pub fn next_marked(&self, from: GuestOffset) -> Option<GuestSpan> {
        if from.bytes() >= self.size {
            return None;
        }
        let first = from.bytes() >> self.shift;
        let run = self.span_of(self.next_run(first)?);
        Some(GuestSpan::between(run.start().max(from), run.end()))
    }

    /// How many bytes of the disk are marked.
    pub fn marked_bytes(&self) -> u64 {
        let (mut bytes, mut at) = (0, GuestOffset::ZERO);
        while let Some(run) = self.next_marked(at) {
            bytes += run.len();
            at = run.end();
        }
        bytes
    }

    /// Whether nothing is marked.
    pub fn is_empty(&self) -> bool {
        self.next_run(0).is_none()
    }
}

fn place_of(word: u64) -> (usize, usize) {
    let chunk = usize::try_from(word / CHUNK_WORDS).unwrap_or(usize::MAX);
    (chunk, usize::try_from(word % CHUNK_WORDS).expect("at most 511"))
}

/// Granules as words, each with the bits that stand for them.
fn masks(granules: Range<u64>) -> impl Iterator<Item = (u64, u64)> {
    let words = granules.start / WORD_BITS..granules.end.div_ceil(WORD_BITS);
    let words = if granules.is_empty() { 0..0 } else { words };
    words.map(move |word| {
        let first = granules.start.saturating_sub(word * WORD_BITS).min(WORD_BITS);
        let end = granules.end.saturating_sub(word * WORD_BITS).min(WORD_BITS);
        (word, (u64::MAX >> (WORD_BITS - (end - first))) << first)
    })
}

#[cfg(test)]
mod tests {
    use vellum_core::Random;

    use super::*;

    fn span(at: u64, len: u64) -> GuestSpan {
        GuestOffset::new(at).span(len)
    }

    fn runs(bits: &Bits) -> Vec<(u64, u64)> {
        let (mut all, mut at) = (Vec::new(), GuestOffset::ZERO);
        while let Some(run) = bits.next_marked(at) {
            all.push((run.start().bytes(), run.len()));
            at = run.end();
        }
        all
    }

    #[test]
    fn a_run_marks_the_granules_that_it_touches() {
        let bits = Bits::new(10_000, 9).unwrap();
        assert!(bits.is_empty());
        bits.mark(span(511, 2));
        assert_eq!(runs(&bits), [(0, 1024)]);
        bits.mark(span(9_999, 1));
        assert_eq!(runs(&bits), [(0, 1024), (9728, 272)], "the last granule ends with the disk");
        bits.mark(span(9_999, 9_999));
        bits.mark(span(20_000, 5));
        bits.mark(span(3, 0));
        assert_eq!(bits.marked_bytes(), 1024 + 272);
        assert_eq!(bits.full_word(0), (1 << 20) - 1);
        assert!(bits.covers(span(100, 900)) && !bits.covers(span(100, 1000)));
    }

    #[test]
    fn too_many_bits_are_refused() {
        assert!(Bits::new(1 << 42, 9).is_err());
        assert!(Bits::new(1 << 41, 9).is_ok());
    }

    /// Whatever is marked, and merged into another granularity, is what a list of bytes says.
    #[test]
    fn bits_are_what_a_model_says() {
        let mut random = Random::from_seed(3);
        for _ in 0..200 {
            let size = 1 + random.below(6 << 20);
            let mut power = |most| 9 + u32::try_from(random.below(most)).unwrap();
            let (shift, other) = (power(5), power(8));
            let (bits, into) = (Bits::new(size, shift).unwrap(), Bits::new(size, other).unwrap());
            let granules = size.div_ceil(1 << shift);
            let mut model = vec![false; usize::try_from(granules).unwrap()];
            for _ in 0..random.below(8) {
                let at = random.below(size);
                let longest = 1 << random.below(23);
                let len = 1 + random.below((size - at).min(longest));
                bits.mark(span(at, len));
                for granule in at >> shift..(at + len).div_ceil(1 << shift) {
                    model[usize::try_from(granule).unwrap()] = true;
                }
            }
            let mut found = vec![false; model.len()];
            for (at, len) in runs(&bits) {
                for granule in at >> shift..(at + len).div_ceil(1 << shift) {
                    found[usize::try_from(granule).unwrap()] = true;
                }
            }
            assert_eq!(found, model, "{size} {shift}");
            into.merge(&bits);
            let mut merged = Bits::new(size, other).unwrap();
            runs(&bits).into_iter().for_each(|(at, len)| merged.mark(span(at, len)));
            assert_eq!(runs(&into), runs(&merged), "{size} {shift} {other}");
            merged = Bits::new(size, other).unwrap();
            assert!(merged.is_empty());
        }
    }
}
