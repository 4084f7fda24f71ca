//! A disk that keeps, or drops, what guests say of bytes that they do not need, and looks for zeros in what they write.
//!
//! ```text
//!   discard            ──► the disk below, or nothing            DiscardMode
//!   zeros, may unmap   ──► may unmap, or must keep the space     DiscardMode
//!   write of zeros     ──► as it is, or as zeros                 ZeroDetection
//! ```
//!
//! 1. A discard that is dropped leaves the bytes as they are, which the contract of a discard allows.
//! 2. A write becomes zeros only when every byte of it is zero. Of memory that others may change, a copy is looked at and
//!    written.
//! 3. Zeros found in this way keep their space, unless they are to be unmapped as well.

use std::sync::Arc;
use std::time::Duration;

use vellum_core::{
    Buffer, Disk, Extent, Filled, Filling, Geometry, GuestOffset, GuestSpan, LocalFuture, Losses,
    MergedExtent, PlaceKind, Result, Room, SharedDisk, WriteFlags, ZeroFlags,
};

/// What becomes of a discard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DiscardMode {
    /// Nothing: the space stays.
    Ignore,
    /// The space is freed where that is possible.
    #[default]
    Unmap,
}

/// Whether writes are looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ZeroDetection {
    /// They are written as they are.
    #[default]
    Off,
    /// One that has nothing but zeros becomes a request for zeros.
    On,
    /// As `On`, and the space is freed.
    Unmap,
}

/// How a disk treats what is not needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SparseMode {
    /// Discards.
    pub discard: DiscardMode,
    /// Writes of zeros.
    pub detection: ZeroDetection,
}

/// A disk over another one.
struct Sparse {
    inner: SharedDisk,
    mode: SparseMode,
}

impl SparseMode {
    /// This disk in this mode: itself where the mode is the usual one.
    pub fn over(self, inner: SharedDisk) -> SharedDisk {
        if self == Self::default() { inner } else { Arc::new(Sparse { inner, mode: self }) }
    }
}

impl Disk for Sparse {
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
        if self.mode.detection == ZeroDetection::Off || data.is_empty() {
            return self.inner.write(at, data, flags);
        }
        let data = data.owned();
        if !data.is_zero() {
            return self.inner.write(at, data, flags);
        }
        let may_unmap = self.mode.detection == ZeroDetection::Unmap;
        let zeros = ZeroFlags { fua: flags.fua, may_unmap, fast_only: false };
        self.inner.write_zeroes(at.span(data.len() as u64), zeros)
    }

    fn flush(&self) -> LocalFuture<'_, Result<()>> {
        self.inner.flush()
    }

    fn write_zeroes(&self, span: GuestSpan, flags: ZeroFlags) -> LocalFuture<'_, Result<()>> {
        let may_unmap = flags.may_unmap && self.mode.discard == DiscardMode::Unmap;
        self.inner.write_zeroes(span, ZeroFlags { may_unmap, ..flags })
    }

    fn discard(&self, span: GuestSpan, flags: WriteFlags) -> LocalFuture<'_, Result<()>> {
        match self.mode.discard {
            DiscardMode::Unmap => self.inner.discard(span, flags),
            // The disk below refuses one that it would refuse: it is closed, or the span is outside of it.
            DiscardMode::Ignore => self.inner.discard(span.start().span(0), flags),
        }
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
    use vellum_core::MemoryDisk;

    use super::*;

    fn disk(discard: DiscardMode, detection: ZeroDetection) -> (SharedDisk, SharedDisk) {
        let memory: SharedDisk = MemoryDisk::holding(&[7; 64 << 10]);
        (SparseMode { discard, detection }.over(memory.clone()), memory)
    }

    fn read(disk: &SharedDisk, at: u64, len: usize) -> Vec<u8> {
        block_on(disk.read(GuestOffset::new(at), Buffer::for_overwrite(len))).expect("it reads").to_vec()
    }

    #[test]
    fn the_usual_mode_costs_nothing() {
        let (disk, memory) = disk(DiscardMode::Unmap, ZeroDetection::Off);
        assert!(Arc::ptr_eq(&disk, &memory));
    }

    #[test]
    fn a_discard_that_is_ignored_changes_nothing_and_is_checked() {
        let (disk, _) = disk(DiscardMode::Ignore, ZeroDetection::Off);
        let discard =
            |at: u64, len| block_on(disk.discard(GuestOffset::new(at).span(len), WriteFlags::default()));
        discard(4096, 8192).expect("it is answered");
        assert_eq!(read(&disk, 0, 64 << 10), [7; 64 << 10]);
        discard(1 << 20, 4096).expect_err("outside of the disk");
        let zeros = ZeroFlags { may_unmap: true, ..ZeroFlags::default() };
        block_on(disk.write_zeroes(GuestOffset::new(4096).span(4096), zeros))
            .expect("zeros are still written");
        assert_eq!(read(&disk, 4096, 4096), [0; 4096]);
    }

    #[test]
    fn only_a_write_of_nothing_but_zeros_becomes_zeros() {
        for detection in [ZeroDetection::Off, ZeroDetection::On, ZeroDetection::Unmap] {
            let (disk, _) = disk(DiscardMode::Unmap, detection);
            let write = |at: u64, data: &[u8]| {
                let data = Buffer::copy_of(data);
                block_on(disk.write(GuestOffset::new(at), data, WriteFlags::default()))
                    .expect("it is written");
            };
            write(4096, &[0; 8192]);
            let mut last = [0; 4096];
            last[4095] = 1;
            write(16384, &last);
            write(32768, &[]);
            let mut expected = vec![7; 64 << 10];
            expected[4096..12288].fill(0);
            expected[16384..20480].copy_from_slice(&last);
            assert_eq!(read(&disk, 0, 64 << 10), expected, "{detection:?}");
            let map = block_on(disk.map(GuestOffset::new(4096).span(8192))).expect("a map");
            let is_hole = matches!(map[0].place, vellum_core::Place::Zero { .. });
            assert!(!is_hole || detection != ZeroDetection::Off, "{map:?}");
        }
    }
}
