//! A disk that notes which parts of it were changed, so that a copy of it can follow.
//!
//! ```text
//!   guest ─► NotedDisk ─► the disk
//!               └── Notes: a bit for each part ──► whoever copies takes the bits of a part, then reads it
//! ```
//!
//! 1. A bit is set when a change has ended, also one that failed or was given up. So what was read after its bit was taken is
//!    either the newest, or the bit is set again: a change that ends later sets it.
//! 2. A fill changes nothing that is read, and is not noted.
//! 3. There are at most [`PARTS_MAX`] parts, so that the bits of the largest disk fit into 512 KiB.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use vellum_core::losses::Losses;
use vellum_core::{
    Buffer, Disk, Extent, Filled, Filling, Geometry, GuestOffset, GuestSpan, LocalFuture, MergedExtent,
    PlaceKind, Result, Room, SharedDisk, WriteFlags, ZeroFlags,
};

/// Parts of a disk, at most.
const PARTS_MAX: u64 = 4 << 20;
/// A part has so many bytes, or more where there would be too many, as a power of two.
const PART_SHIFT: u32 = 16;

/// Which parts of a disk were changed.
#[derive(Debug)]
pub struct Notes {
    words: Box<[AtomicU64]>,
    shift: u32,
    size: u64,
}

impl Notes {
    /// Of a disk of this many bytes. Nothing was changed.
    pub fn new(size: u64) -> Arc<Self> {
        let mut shift = PART_SHIFT;
        while size.div_ceil(1 << shift) > PARTS_MAX {
            shift += 1;
        }
        let words = size.div_ceil(64 << shift);
        Arc::new(Self { words: (0..words).map(|_| AtomicU64::new(0)).collect(), shift, size })
    }

    /// The span was changed.
    fn note(&self, span: GuestSpan) {
        if span.is_empty() || span.start().bytes() >= self.size {
            return;
        }
        let (first, last) =
            (span.start().bytes() >> self.shift, (span.end().bytes().min(self.size) - 1) >> self.shift);
        for word in first / 64..=last / 64 {
            let from = first.saturating_sub(word * 64).min(63);
            let to = last.saturating_sub(word * 64).min(63);
            let bits = (u64::MAX >> (63 - (to - from))) << from;
            self.words[index(word)].fetch_or(bits, Ordering::AcqRel);
        }
    }

    /// How many bytes the changed parts have.
    pub fn bytes(&self) -> u64 {
        let parts: u32 = self.words.iter().map(|word| word.load(Ordering::Relaxed).count_ones()).sum();
        u64::from(parts) << self.shift
    }

    /// Takes a run of changed parts at or behind `from`: it counts as unchanged from now on. At most 64 parts.
    pub fn take(&self, from: GuestOffset) -> Option<GuestSpan> {
        let first = from.bytes() >> self.shift;
        for word in first / 64..self.words.len() as u64 {
            let skipped = if word == first / 64 { first % 64 } else { 0 };
            let its = &self.words[index(word)];
            let bits = its.load(Ordering::Acquire) >> skipped << skipped;
            if bits == 0 {
                continue;
            }
            let start = bits.trailing_zeros();
            let len = (!(bits >> start)).trailing_zeros();
            let run = (u64::MAX >> (64 - len)) << start;
            its.fetch_and(!run, Ordering::AcqRel);
            let at = (word * 64 + u64::from(start)) << self.shift;
            let end = (at + (u64::from(len) << self.shift)).min(self.size);
            return Some(GuestSpan::between(GuestOffset::new(at), GuestOffset::new(end)));
        }
        None
    }
}

fn index(word: u64) -> usize {
    usize::try_from(word).expect("the bits fit into memory")
}

/// Notes a change when it is dropped.
struct Changing<'a>(&'a Notes, GuestSpan);

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        self.0.note(self.1);
    }
}

/// See the module.
pub struct NotedDisk {
    inner: SharedDisk,
    notes: Arc<Notes>,
}

impl NotedDisk {
    /// The disk, whose changes are noted there.
    pub fn over(inner: SharedDisk, notes: Arc<Notes>) -> SharedDisk {
        Arc::new(Self { inner, notes })
    }

    fn noted<'a, T: 'a>(&'a self, span: GuestSpan, request: LocalFuture<'a, T>) -> LocalFuture<'a, T> {
        Box::pin(async move {
            let _changing = Changing(&self.notes, span);
            request.await
        })
    }
}

impl Disk for NotedDisk {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn below(&self) -> Option<SharedDisk> {
        self.inner.below()
    }

    fn read(&self, at: GuestOffset, buffer: Buffer) -> LocalFuture<'_, Result<Buffer>> {
        self.inner.read(at, buffer)
    }

    fn write(&self, at: GuestOffset, data: Buffer, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        match GuestSpan::checked(at, data.len() as u64) {
            Some(span) => self.noted(span, self.inner.write(at, data, flags)),
            None => self.inner.write(at, data, flags),
        }
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        self.inner.flush()
    }

    fn write_zeroes(&self, span: GuestSpan, flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        self.noted(span, self.inner.write_zeroes(span, flags))
    }

    fn discard(&self, span: GuestSpan, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        self.noted(span, self.inner.discard(span, flags))
    }

    fn map(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<Extent>>> {
        self.inner.map(span)
    }

    fn map_whole(&self, span: GuestSpan) -> LocalFuture<'_, Result<Vec<MergedExtent<PlaceKind>>>> {
        self.inner.map_whole(span)
    }

    fn tend(&self, now: Duration) -> LocalFuture<'_, bool> {
        self.inner.tend(now)
    }

    fn filling(&self) -> Option<Filling> {
        self.inner.filling()
    }

    fn fill(&self, at: GuestOffset, data: Buffer) -> LocalFuture<'_, Result<Filled>> {
        self.inner.fill(at, data)
    }

    fn room(&self) -> LocalFuture<'_, Result<Option<Room>>> {
        self.inner.room()
    }

    fn flush_change(&self) -> LocalFuture<'_, Result<()>> {
        self.inner.flush_change()
    }

    fn losses(&self) -> Option<Arc<Losses>> {
        self.inner.losses()
    }

    fn close(&self) -> LocalFuture<'_, Result<()>> {
        self.inner.close()
    }
}

#[cfg(test)]
mod tests {
    use futures_lite::future::block_on;
    use vellum_core::{MemoryDisk, Random};

    use super::*;

    /// What was changed is taken, part by part and once, whatever the spans.
    #[test]
    fn every_changed_part_is_taken_once() {
        let mut random = Random::from_seed(4);
        for round in 0..200 {
            let size = 1 + random.below(300 << 16);
            let (notes, parts) = (Notes::new(size), size.div_ceil(1 << 16));
            let mut model = vec![false; usize::try_from(parts).expect("few")];
            for _ in 0..random.below(6) {
                let at = random.below(size);
                let most = (size - at).min(1 + random.below(100 << 16));
                let len = random.below(most + 1);
                notes.note(GuestOffset::new(at).span(len));
                if len > 0 {
                    for part in at >> 16..=(at + len - 1) >> 16 {
                        model[usize::try_from(part).expect("few")] = true;
                    }
                }
            }
            let all = model.iter().filter(|changed| **changed).count() as u64;
            assert_eq!(notes.bytes(), all << 16, "round {round}");
            let mut at = GuestOffset::ZERO;
            while let Some(span) = notes.take(at) {
                assert!(span.end().bytes() <= size && span.start() >= at, "round {round}: {span}");
                let run = span.start().bytes() >> 16..span.end().bytes().div_ceil(1 << 16);
                for part in run {
                    assert!(std::mem::take(&mut model[usize::try_from(part).expect("few")]), "{span}");
                }
                at = span.end();
            }
            assert!(model.iter().all(|changed| !changed) && notes.bytes() == 0, "round {round}");
        }
    }

    #[test]
    fn the_largest_disk_has_few_bits() {
        assert_eq!(Notes::new(1 << 62).words.len() as u64, PARTS_MAX / 64);
    }

    #[test]
    fn changes_are_noted_and_reads_are_not() {
        let notes = Notes::new(1 << 20);
        let disk = NotedDisk::over(MemoryDisk::new(1 << 20), notes.clone());
        let at = GuestOffset::new(3 << 16);
        block_on(disk.read(at, Buffer::for_overwrite(512))).expect("it is read");
        block_on(disk.flush()).expect("a flush");
        assert_eq!(notes.take(GuestOffset::ZERO), None);
        block_on(disk.write(at, Buffer::copy_of(&[1; 512]), WriteFlags::default())).expect("it is written");
        assert_eq!(notes.take(GuestOffset::ZERO), Some(at.span(1 << 16)));
        block_on(disk.write_zeroes(at.span(1 << 17), ZeroFlags::default())).expect("it is written");
        assert_eq!(notes.take(GuestOffset::ZERO), Some(at.span(1 << 17)));
        block_on(disk.discard(at.span(512), WriteFlags::default())).expect("it is discarded");
        assert_eq!(notes.take(at), Some(at.span(1 << 16)));
        // Also what fails may have changed something.
        block_on(disk.write(
            GuestOffset::new((1 << 20) - 512),
            Buffer::copy_of(&[1; 1024]),
            WriteFlags::default(),
        ))
        .expect_err("past the end");
        assert_eq!(notes.bytes(), 1 << 16);
    }
}
